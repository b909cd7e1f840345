//! Client of the pages that need the admin token, for `block`, `unblock`, `blocks`, `reset` and `tap`.
//!
//! The token is read from the environment, so that no list of processes shows it.
//!
//! Decides: from where commands take the admin token.

use super::client::{PageRequest, default_debug_address, describe_refusal, format_json_as_line, send_page_request};
use super::print::{CommandOutcome, fail_if_unwritten, print_error, print_to_stdout};
use crate::base::text::escape_unprintable;
use crate::settings::Settings;
use crate::settings::address::ConnectAddress;
use crate::settings::listeners::ADMIN_TOKEN_VARIABLES;
use crate::settings::secret::Secret;

/// Server that is called.
#[derive(Debug, clap::Args)]
pub(super) struct AdminServerArgs {
    /// Address of the debug listener of a running server
    #[arg(long, value_name = "HOST:PORT", default_value = default_debug_address())]
    pub(super) addr: ConnectAddress,
    /// Write the server's answer as JSON, in one line
    #[arg(long)]
    pub(super) json: bool,
}

/// Reads the admin token that the environment names.
pub(super) fn read_admin_token() -> Result<Secret, String> {
    let source = Settings::secret_from_env(std::env::vars_os(), &ADMIN_TOKEN_VARIABLES);
    let Some(source) = source.map_err(|error| error.to_string())? else {
        return Err("set TOLLKEEPER_ADMIN_TOKEN or TOLLKEEPER_ADMIN_TOKEN_FILE to the token of the server".to_owned());
    };
    source.load_secret().map_err(|error| escape_unprintable(&error.to_string()))
}

/// Calls the debug listener with the token of the environment.
pub(super) fn call_server(server: &AdminServerArgs, path: &str, request: PageRequest<'_>) -> Result<Vec<u8>, String> {
    let (status, answer) = send_page_request(&server.addr, path, request, Some(&read_admin_token()?))?;
    match status {
        200 => Ok(answer),
        _ => Err(describe_refusal(&server.addr, path, status, &answer)),
    }
}

/// Prints the answer, by `format` if it is not asked for as it is.
pub(super) fn print_answer(
    answer: Result<Vec<u8>, String>,
    server: &AdminServerArgs,
    format: impl Fn(&[u8]) -> Option<String>,
) -> CommandOutcome {
    let page = answer.and_then(|answer| match server.json {
        true => Ok(format_json_as_line(&answer)),
        false => format(&answer)
            .ok_or_else(|| format!("{} answered, but not as the debug listener of this version does", server.addr)),
    });
    match page {
        Ok(page) => fail_if_unwritten(print_to_stdout(page), CommandOutcome::Success),
        Err(problem) => {
            print_error(problem);
            CommandOutcome::Failure
        }
    }
}

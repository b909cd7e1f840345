//! `reset`: deletes the counters that a request would charge.
//!
//! Decides: options of `reset`, and what it says of other replicas.

use serde::Deserialize;

use super::admin_client::{AdminServerArgs, call_server, print_answer};
use super::client::PageRequest;
use super::print::{CommandOutcome, escape_and_shorten, usage_error};
use super::request_flags::{RequestArgs, format_descriptor};
use crate::base::pb::RateLimitRequest;
use crate::base::pb::proto_json::request_to_json;
use crate::base::text::escape_unprintable;

/// Arguments of `reset`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    request: RequestArgs,
    #[command(flatten)]
    server: AdminServerArgs,
}

pub(super) const HELP: &str = "\
Deletes the counters that the request would charge, and what bans and slots they have: the caller has its whole limit \
again. With counters in Redis the other replicas are told.

The token is that of the server: TOLLKEEPER_ADMIN_TOKEN or TOLLKEEPER_ADMIN_TOKEN_FILE in the environment.

Examples:
  tollkeeper reset --domain example --descriptor login=ann
  tollkeeper reset --request request.json --json

Exit codes: 0 deleted, 1 the server refused or did not answer, 2 invalid usage.";

/// Answer of `/reset`.
#[derive(Debug, Deserialize)]
struct ResetAnswer {
    reset: Vec<u64>,
    announced: Option<bool>,
}

/// Deletes the counters.
pub(super) fn run(args: &Args) -> CommandOutcome {
    let request = args.request.read_request().and_then(|request| {
        let body = request_to_json(&request).map_err(|error| error.to_string())?;
        Ok((request, body))
    });
    let (request, body) = match request {
        Ok(request) => request,
        Err(problem) => {
            return usage_error(escape_unprintable(&problem));
        }
    };
    let answer = call_server(&args.server, "/reset", PageRequest::Post(&body));
    print_answer(answer, &args.server, |answer| format_reset(answer, &request))
}

fn format_reset(answer: &[u8], request: &RateLimitRequest) -> Option<String> {
    let ResetAnswer { reset, announced } = serde_json::from_slice(answer).ok()?;
    let line = |(descriptor, count): (_, &u64)| {
        let counters = if *count == 1 { "counter" } else { "counters" };
        format!("{count} {counters} deleted: {}\n", escape_and_shorten(&format_descriptor(descriptor)))
    };
    let lines: String = request.descriptors.iter().zip(&reset).map(line).collect();
    Some(
        lines
            + match announced {
                Some(true) => "the other replicas were told\n",
                Some(false) => {
                    "the other replicas could not be told: those with eventual limits may still reject (retry)\n"
                }
                None => "",
            },
    )
}

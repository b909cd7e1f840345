//! The command line: the only code that prints.
//!
//! One binary, several names: called as `ratelimit` it serves and only warns about arguments it does not know; called
//! as
//! `config_check_cmd` or `client_cmd` it takes what envoyproxy/ratelimit's tools of that name take. Exit codes: 0 ok,
//! 1 failed (`check` found problems), 2 bad usage or settings.

mod serve;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::settings::reference;

/// A rate limit decision service for Envoy.
#[derive(Debug, Parser)]
#[command(name = "tollkeeper", version, max_term_width = 120, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: serve::Args,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve decisions; also what happens without a subcommand
    #[command(after_long_help = reference::help())]
    Serve(serve::Args),
}

const AFTER_HELP: &str = "\
Try it:
  tollkeeper serve --config config/example.yaml
  tollkeeper call --domain example --descriptor login=ann --count 6

`tollkeeper serve --help` lists every environment variable.";

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// Well.
    Done,
    /// It did what it was asked to, and the answer is no; or it could not.
    Failed,
    /// It was asked wrongly, or set up wrongly.
    Misused,
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::SUCCESS,
            Outcome::Failed => Self::FAILURE,
            Outcome::Misused => Self::from(2),
        }
    }
}

/// Runs the command that `arguments` ask for, the program's name first.
pub fn main(arguments: &[OsString]) -> ExitCode {
    let name = arguments.first().and_then(|name| Path::new(name).file_name()).and_then(|name| name.to_str());
    let outcome = match name {
        Some("ratelimit") => serve::as_ratelimit(arguments),
        _ => match Cli::try_parse_from(arguments) {
            Ok(cli) => run(cli),
            Err(error) => {
                // `--help` and `--version` come this way too, and are no misuse; clap knows which stream is meant.
                let _ = error.print();
                if error.use_stderr() { Outcome::Misused } else { Outcome::Done }
            }
        },
    };
    outcome.into()
}

fn run(cli: Cli) -> Outcome {
    match cli.command {
        None => serve::run(&cli.serve),
        Some(Command::Serve(args)) => serve::run(&args),
    }
}

/// Says on stderr what went wrong.
#[expect(clippy::print_stderr, reason = "the command line talks to a person")]
fn complain(what: impl std::fmt::Display) {
    eprintln!("tollkeeper: {what}");
}

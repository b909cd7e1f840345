//! The command line: the only code that prints.
//!
//! One binary, several names: called as `ratelimit` it serves and only warns about arguments it does not know; called
//! as
//! `config_check_cmd` or `client_cmd` it takes what envoyproxy/ratelimit's tools of that name take. Exit codes: 0 ok,
//! 1 failed (`check` found problems), 2 bad usage or settings.

mod print;
mod debug_listener;
mod question;
mod duration;
mod secure;
mod rules;
mod client;
mod serve;
mod environment;
mod check;
mod explain;
mod call;
mod top;
mod bench;
mod schema;
mod go_flags;
mod config_check_cmd;
mod client_cmd;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

/// A rate limit decision service for Envoy.
#[derive(Debug, Parser)]
#[command(
    name = "tollkeeper",
    version,
    max_term_width = 120,
    after_help = AFTER_HELP,
    args_conflicts_with_subcommands = true
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: serve::Args,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve decisions; also what happens without a subcommand
    #[command(after_long_help = serve::help())]
    Serve(serve::Args),
    /// Find every problem of rule files, or of the environment
    #[command(after_long_help = check::HELP)]
    Check(check::Args),
    /// Tell which rule a request meets, and why, charging nothing
    #[command(after_long_help = explain::HELP)]
    Explain(explain::Args),
    /// Ask a running server, as Envoy would
    #[command(after_long_help = call::HELP)]
    Call(call::Args),
    /// Show which keys a running server refuses most, or what stands out of its limits
    #[command(after_long_help = top::HELP)]
    Top(top::Args),
    /// Put a load on any rate limit service: throughput, latencies, exactness
    #[command(after_long_help = bench::HELP)]
    Bench(Box<bench::Args>),
    /// Print the JSON Schema of a rule file, for editors
    #[command(after_long_help = schema::HELP)]
    Schema,
}

const AFTER_HELP: &str = "\
Try it:
  tollkeeper serve --config config/example.yaml
  tollkeeper call --domain example --descriptor login=ann --count 6

`tollkeeper serve --help` lists every environment variable. Called as `ratelimit` it serves; called as `config_check_cmd` \
or `client_cmd` it takes the flags of envoyproxy/ratelimit's tools of that name.

Exit codes: 0 ok, 1 failed, 2 bad usage or settings.";

/// How to write what was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people
    #[default]
    Text,
    /// For programs
    Json,
}

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

/// Whether somebody asks what this program is, whatever it is called.
fn is_question(argument: &OsString) -> bool {
    ["--help", "-h", "--version", "-V"].iter().any(|question| argument == question)
}

/// Runs the command that `arguments` ask for, the program's name first.
pub fn main(arguments: &[OsString]) -> ExitCode {
    let name = arguments.first().and_then(|name| Path::new(name).file_name()).and_then(|name| name.to_str());
    let outcome = match name {
        Some("ratelimit") if !arguments.iter().any(is_question) => serve::as_ratelimit(arguments),
        Some("config_check_cmd") => config_check_cmd::run(arguments),
        Some("client_cmd") => client_cmd::run(arguments),
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
        Some(Command::Check(args)) => check::run(&args),
        Some(Command::Explain(args)) => explain::run(&args),
        Some(Command::Call(args)) => call::run(&args),
        Some(Command::Top(args)) => top::run(&args),
        Some(Command::Bench(args)) => bench::run(&args),
        Some(Command::Schema) => schema::run(),
    }
}

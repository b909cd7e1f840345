//! The command line: the only code that prints.
//!
//! One binary with several names. Called as `ratelimit` it serves and warns about unknown arguments; called as
//! `config_check_cmd` it has the flags of envoyproxy/ratelimit's tool of that name. Exit codes: 0 ok, 1 failed (`check`
//! found problems), 2 invalid usage or settings. `tollkeeper-bench` (`tests/bench/load`) uses what is public below.
//!
//! Decides: names of the program (`ratelimit`, `config_check_cmd`); which commands there are.

pub mod print;
pub mod chart;
pub mod request_flags;
pub mod client;
mod rule_files;
mod serve;
mod check;
mod explain;
mod call;
mod top;
mod admin_client;
mod blocks;
mod reset;
mod tap;
mod quota;
mod traffic_input;
mod simulate;
mod recommend;
mod why;
mod events;
mod diff;
mod schema;
mod settings;
mod shell_files;
mod config_check_cmd;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use print::CommandOutcome;

/// Rate limit decision service for Envoy.
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
    /// Serve decisions; the default without a subcommand
    #[command(after_long_help = serve::format_help())]
    Serve(serve::Args),
    /// Find all problems of rule files, or of the environment
    #[command(after_long_help = check::HELP)]
    Check(check::Args),
    /// Explain which rule matches a request, and why, without charging it
    #[command(after_long_help = explain::HELP)]
    Explain(explain::Args),
    /// Send rate limit requests to a running server, as Envoy does
    #[command(after_long_help = call::HELP)]
    Call(call::Args),
    /// Show the most rejected or busiest keys of a running server, unmatched descriptors, or findings about its limits
    #[command(after_long_help = top::HELP)]
    Top(top::Args),
    /// Reject every request with a value at once, until a time
    #[command(after_long_help = blocks::BLOCK_HELP)]
    Block(blocks::BlockArgs),
    /// Undo a block
    #[command(after_long_help = blocks::UNBLOCK_HELP)]
    Unblock(blocks::UnblockArgs),
    /// List the blocked values of a running server
    #[command(after_long_help = blocks::LIST_HELP)]
    Blocks(blocks::ListArgs),
    /// Delete the counters that a request would charge
    #[command(after_long_help = reset::HELP)]
    Reset(reset::Args),
    /// Print decisions of a running server as it makes them
    #[command(after_long_help = tap::HELP)]
    Tap(tap::Args),
    /// Show quota streams, and how limits are divided among proxies
    #[command(after_long_help = quota::HELP)]
    Quota(quota::Args),
    /// Removed; the error says what to use instead
    #[command(hide = true, disable_help_flag = true)]
    Bench(IgnoredArgs),
    /// Show the effect that rules would have had on recorded traffic
    #[command(after_long_help = simulate::HELP)]
    Simulate(Box<simulate::Args>),
    /// Find the smallest limits that reject few keys of recorded traffic
    #[command(after_long_help = recommend::HELP)]
    Recommend(Box<recommend::Args>),
    /// Show why requests with a descriptor were rejected, from the decision log
    #[command(after_long_help = why::HELP)]
    Why(Box<why::Args>),
    /// Print the records of a decision log's stream in Redis, each by one consumer of a group
    #[command(after_long_help = events::args::HELP)]
    Events(events::args::Args),
    /// List the limits that differ between two sets of rule files
    #[command(after_long_help = diff::HELP)]
    Diff(diff::Args),
    /// Print the JSON Schema of rule files, for editors
    #[command(after_long_help = schema::HELP)]
    Schema(schema::Args),
    /// Print the environment variables that people set, with their values here
    #[command(after_long_help = settings::HELP)]
    Settings(settings::Args),
    /// Print a manual page, or write those of all commands
    #[command(after_long_help = shell_files::MAN_HELP)]
    Man(shell_files::ManArgs),
    /// Print the completion script of a shell
    #[command(after_long_help = shell_files::COMPLETIONS_HELP)]
    Completions(shell_files::CompletionsArgs),
}

/// Arguments of a removed command, without effect.
#[derive(Debug, clap::Args)]
struct IgnoredArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    _arguments: Vec<OsString>,
}

/// Error of `bench`; a later version has no such command.
const BENCH_REMOVED: &str = "bench: removed from this program (in the repository of tollkeeper, run \
cargo run --release --manifest-path tests/bench/Cargo.toml -- with the same options)";

/// Error under the name `client_cmd`; a later version does not know it.
const CLIENT_CMD_REMOVED: &str = "client_cmd: removed (run tollkeeper call --addr HOST:PORT --domain DOMAIN --descriptor \
key=value; its other flags are in tollkeeper call --help)";

const AFTER_HELP: &str = "\
Try it:
  tollkeeper serve --config config/example.yaml
  tollkeeper call --domain example --descriptor login=ann --count 6

`tollkeeper settings` prints the environment variables that people set, with --all every one. Called as `ratelimit` it serves; called as `config_check_cmd` \
it has the flags of envoyproxy/ratelimit's tool of that name.

TOLLKEEPER_ADDR is the default of --addr, the debug listener of a running server; not of `call`.

Exit codes: 0 ok, 1 failed, 2 invalid usage or settings.";

/// Returns `true` for arguments that ask about this program, under any name.
fn asks_for_help_or_version(argument: &OsString) -> bool {
    ["--help", "-h", "--version", "-V"].iter().any(|flag| argument == flag)
}

/// Runs the command in `arguments`, which begin with the program's name.
pub fn main(arguments: &[OsString]) -> ExitCode {
    let name = arguments.first().and_then(|name| Path::new(name).file_name()).and_then(|name| name.to_str());
    let outcome = match name {
        Some("ratelimit") if !arguments.iter().any(asks_for_help_or_version) => serve::run_as_ratelimit(arguments),
        Some("config_check_cmd") => config_check_cmd::run(arguments),
        Some("client_cmd") => print::usage_error(CLIENT_CMD_REMOVED),
        _ => match Cli::try_parse_from(arguments) {
            Ok(cli) => run_command(cli),
            Err(mut error) => {
                serve::suggest_config_flag(&mut error);
                // `--help` and `--version` are errors for clap too; it chooses the right stream.
                let _ = error.print();
                if error.use_stderr() { CommandOutcome::UsageError } else { CommandOutcome::Success }
            }
        },
    };
    outcome.into()
}

fn run_command(cli: Cli) -> CommandOutcome {
    match cli.command {
        None => serve::run(&cli.serve),
        Some(Command::Serve(args)) => serve::run(&args),
        Some(Command::Check(args)) => check::run(&args),
        Some(Command::Explain(args)) => explain::run(&args),
        Some(Command::Call(args)) => call::run(&args),
        Some(Command::Top(args)) => top::run(&args),
        Some(Command::Block(args)) => blocks::run_block(&args),
        Some(Command::Unblock(args)) => blocks::run_unblock(&args),
        Some(Command::Blocks(args)) => blocks::run_list(&args),
        Some(Command::Reset(args)) => reset::run(&args),
        Some(Command::Tap(args)) => tap::run(&args),
        Some(Command::Quota(args)) => quota::run(&args),
        Some(Command::Bench(_)) => print::usage_error(BENCH_REMOVED),
        Some(Command::Diff(args)) => diff::run(&args),
        Some(Command::Schema(args)) => schema::run(&args),
        Some(Command::Settings(args)) => settings::run(&args),
        Some(Command::Man(args)) => shell_files::run_man(&args, Cli::command()),
        Some(Command::Completions(args)) => shell_files::run_completions(&args, Cli::command()),
        Some(Command::Simulate(args)) => simulate::run(&args),
        Some(Command::Recommend(args)) => recommend::run(&args),
        Some(Command::Why(args)) => why::run(&args),
        Some(Command::Events(args)) => events::run(&args),
    }
}

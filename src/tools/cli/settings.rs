//! `settings`: prints the variables that people set, or all, with their values in this environment.

use super::print::{CommandOutcome, fail_if_unwritten, print_to_stdout};
use crate::settings::documentation::format_effective_settings;

pub(super) const HELP: &str = "\
Prints the about forty variables that people set, and all that this environment sets, with their values: those of the \
environment, marked by *, and otherwise the defaults. Secrets are masked. A server in the same environment has these \
settings; /settings of its debug listener shows those of a running one.

Examples:
  tollkeeper settings
  REDIS_URL=redis:6379 tollkeeper settings --all

`tollkeeper check --env` finds what is wrong with them.

Exit codes: 0 printed, 1 the output could not be written.";

/// Arguments of `settings`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print all variables
    #[arg(long)]
    all: bool,
}

/// Prints the settings.
pub(super) fn run(args: &Args) -> CommandOutcome {
    let text = format_effective_settings(std::env::vars_os(), args.all);
    fail_if_unwritten(print_to_stdout(text), CommandOutcome::Success)
}

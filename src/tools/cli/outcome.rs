//! Outcomes of commands, and their exit codes.

use std::process::ExitCode;

/// Outcome of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommandOutcome {
    /// The command succeeded.
    Success,
    /// The command failed, or found problems.
    Failure,
    /// The command line or the settings are invalid.
    UsageError,
}

impl From<CommandOutcome> for ExitCode {
    fn from(outcome: CommandOutcome) -> Self {
        match outcome {
            CommandOutcome::Success => Self::SUCCESS,
            CommandOutcome::Failure => Self::FAILURE,
            CommandOutcome::UsageError => Self::from(2),
        }
    }
}

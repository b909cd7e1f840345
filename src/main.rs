//! Parse, run, exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    tollkeeper::cli::main(&std::env::args_os().collect::<Vec<_>>())
}

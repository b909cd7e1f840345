//! Parse, run, exit code.

use std::process::ExitCode;

/// Answers are freed by other threads than those that made their requests, which this allocator makes cheap.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    tollkeeper::cli::main(&std::env::args_os().collect::<Vec<_>>())
}

//! Parse, run, exit code.

use std::process::ExitCode;

/// Answers are freed by other threads than those that made their requests, which this allocator makes cheap. It does
/// without huge pages: a process that has just started would take five of them, 10 MB for less than one.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    tollkeeper::cli::main(&std::env::args_os().collect::<Vec<_>>())
}

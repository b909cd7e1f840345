//! Parse, run, exit code.

use std::process::ExitCode;

/// Many small blocks come and go with each request and each reload; this allocator is quicker at it than the system's.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    tollkeeper::cli::main(&std::env::args_os().collect::<Vec<_>>())
}

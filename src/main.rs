//! The program: runs the command line and returns its exit code.
//!
//! Decides: the allocator (mimalloc); `Cargo.toml` says that a panic ends the process.

use std::process::ExitCode;

/// Frees memory cheaply on another thread than the one that allocated it, as happens with responses.
///
/// Huge pages are off: a new process would take five of them, 10 MB for less than 1 MB of data.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    tollkeeper::tools::cli::main(&std::env::args_os().collect::<Vec<_>>())
}

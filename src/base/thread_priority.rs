//! The priority of background threads.

/// Lowers the priority of the calling thread, so that its work delays no decision on a busy machine.
///
/// The thread keeps its priority if the process lacks the permission.
pub fn lower() {
    const NICENESS: i32 = 10;
    if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
        tracing::debug!(%error, "a background thread runs at full priority");
    }
}

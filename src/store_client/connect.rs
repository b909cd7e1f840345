//! Opened connections.

use super::pipeline::Closed;

/// Connection that is ready for commands.
#[derive(Debug)]
pub(crate) struct Connected<C> {
    pub(crate) connection: C,
    /// Receives the reason once the connection is closed.
    pub(crate) closed: Closed,
}

//! Bytes that requests and responses in progress take, counted against the limits of admission.
//!
//! Most requests and responses are small, and their number is limited; only what exceeds [`UNCOUNTED_BYTES`] is
//! counted, so the usual call touches no shared counter here.

use std::sync::Arc;

use super::admission::ConnectionPermit;
use crate::telemetry::listener_stats::RefusedLimit;

/// Bytes of a request or response that are not counted.
const UNCOUNTED_BYTES: usize = 2048;

/// Bytes that one request or response takes. Dropping the value frees them.
#[derive(Debug)]
pub(super) struct BufferedBytes {
    connection: Arc<ConnectionPermit>,
    bytes: usize,
}

impl BufferedBytes {
    /// No bytes yet, of a request on this connection.
    pub(super) const fn new(connection: Arc<ConnectionPermit>) -> Self {
        Self { connection, bytes: 0 }
    }

    /// Bytes of a response that the client has not taken yet; `None` if they are too few to be counted.
    ///
    /// # Errors
    /// The limit that is reached.
    pub(super) fn of_response(connection: &Arc<ConnectionPermit>, bytes: usize) -> Result<Option<Self>, RefusedLimit> {
        if bytes <= UNCOUNTED_BYTES {
            return Ok(None);
        }
        let mut this = Self::new(Arc::clone(connection));
        this.add(bytes)?;
        Ok(Some(this))
    }

    /// Adds bytes.
    ///
    /// # Errors
    /// The limit that is reached; the bytes are not added then.
    pub(super) fn add(&mut self, bytes: usize) -> Result<(), RefusedLimit> {
        let more = counted(self.bytes + bytes) - counted(self.bytes);
        if more > 0 {
            self.connection.add_buffered(more)?;
        }
        self.bytes += bytes;
        Ok(())
    }

    /// The connection of the request or response.
    pub(super) const fn connection(&self) -> &Arc<ConnectionPermit> {
        &self.connection
    }
}

impl Drop for BufferedBytes {
    fn drop(&mut self) {
        let counted = counted(self.bytes);
        if counted > 0 {
            self.connection.remove_buffered(counted);
        }
    }
}

const fn counted(bytes: usize) -> usize {
    bytes.saturating_sub(UNCOUNTED_BYTES)
}

//! Records that a sink did not take.

use std::io;

/// Records that a sink did not take.
#[derive(Debug)]
pub(super) struct LostRecords {
    /// Number of records, at least 1.
    pub(super) count: u64,
    /// Reason, without secrets.
    pub(super) error: io::Error,
}

impl LostRecords {
    /// All of these lines.
    pub(super) fn all(lines: &[u8], error: io::Error) -> Self {
        Self { count: memchr::memchr_iter(b'\n', lines).count() as u64, error }
    }
}

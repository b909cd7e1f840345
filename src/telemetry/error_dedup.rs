//! De-duplication of logged errors that last.
//!
//! An error is logged when it begins, when it changes, and once a minute while it lasts. Errors may alternate, as when
//! one connection is refused and another times out, so the last few are remembered. Their number is bounded: a server
//! that keeps inventing new errors must not flood the log.

use std::time::{Duration, Instant};

/// Time after which an error that lasts is logged again.
const REPEAT_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of different errors logged in one interval.
const MAX_ERRORS: usize = 6;

/// Errors that were logged since the last success.
#[derive(Debug, Default)]
pub(crate) struct ErrorDedup {
    logged: Vec<(String, Instant)>,
}

impl ErrorDedup {
    /// Returns true if the error should be logged now.
    pub(crate) fn is_new(&mut self, text: &str) -> bool {
        self.logged.retain(|(_, at)| at.elapsed() < REPEAT_INTERVAL);
        let is_new = self.logged.len() < MAX_ERRORS && !self.logged.iter().any(|(logged, _)| logged == text);
        if is_new {
            self.logged.push((text.to_owned(), Instant::now()));
        }
        is_new
    }

    /// Forgets all errors after a success; returns true if any were logged.
    pub(crate) fn clear(&mut self) -> bool {
        !std::mem::take(&mut self.logged).is_empty()
    }
}

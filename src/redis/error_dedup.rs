//! Troubles are said when they begin, when they change, and once a minute while they last.
//!
//! Some troubles come in turns, as when one connection is refused and another hangs: each is said once, and then each
//! once a minute. A few are remembered, so that not even a server that invents new ones floods the log.

use std::time::{Duration, Instant};

/// A trouble that lasts is said again after this time.
const SAY_AGAIN: Duration = Duration::from_secs(60);
/// Troubles in turns; further ones wait.
const MOST: usize = 6;

/// What has been said, since the last time that all was well.
#[derive(Debug, Default)]
pub(crate) struct ErrorDedup {
    said: Vec<(String, Instant)>,
}

impl ErrorDedup {
    /// Whether to say this now.
    pub(crate) fn should_log(&mut self, text: &str) -> bool {
        self.said.retain(|(_, when)| when.elapsed() < SAY_AGAIN);
        let is_new = self.said.len() < MOST && !self.said.iter().any(|(said, _)| said == text);
        if is_new {
            self.said.push((text.to_owned(), Instant::now()));
        }
        is_new
    }

    /// All is well; whether something had been said.
    pub(crate) fn end(&mut self) -> bool {
        !std::mem::take(&mut self.said).is_empty()
    }
}

//! Answers of the global Redis: whether the region is cut off from it.
//!
//! Decides: when a region is cut off (`CUT_OFF_AFTER_US`).

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::Instant;

use crate::base::clock::to_micros;
use crate::limit::RegionConnection;

/// Time without an answer of the global Redis after which a region is cut off, in microseconds.
const CUT_OFF_AFTER_US: u64 = 5_000_000;

/// Times of its answers.
#[derive(Debug)]
pub(super) struct GlobalAnswers {
    started: Instant,
    /// Time of the last answer in microseconds since the start; 0: there was none.
    answered_us: AtomicU64,
}

impl GlobalAnswers {
    /// Starts without an answer.
    pub(super) fn new() -> Self {
        Self { started: Instant::now(), answered_us: AtomicU64::new(0) }
    }

    /// Whether the global Redis has answered lately. At the start it has time for its first answer.
    pub(super) fn connection(&self, at: Instant) -> RegionConnection {
        let since_us = self.us_since_start(at).saturating_sub(self.answered_us.load(Ordering::Relaxed));
        if since_us < CUT_OFF_AFTER_US { RegionConnection::Connected } else { RegionConnection::CutOff }
    }

    /// Microseconds since the last answer; `None` before the first.
    pub(super) fn us_since_answer(&self, at: Instant) -> Option<u64> {
        let answered_us = self.answered_us.load(Ordering::Relaxed);
        (answered_us > 0).then(|| self.us_since_start(at).saturating_sub(answered_us))
    }

    /// Records an answer.
    pub(super) fn record(&self, at: Instant) {
        self.answered_us.fetch_max(self.us_since_start(at).max(1), Ordering::Relaxed);
    }

    /// Microseconds since this process started to ask.
    pub(super) fn us_since_start(&self, at: Instant) -> u64 {
        to_micros(at.saturating_duration_since(self.started))
    }
}

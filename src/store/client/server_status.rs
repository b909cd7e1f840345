//! What is known of one server of a store: its last answers and errors, for pages, alarms, metrics and other replicas.
//!
//! A call records its answer by one store without a lock; errors and late answers are rare and cost more.
//!
//! Decides: latency, last success and last error of each server in `/store`.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use crate::base::clock::to_micros;

/// State of one server.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ServerStatus {
    /// Address of the server.
    pub address: String,
    /// True while calls fail at once because the server failed too often.
    pub is_breaker_open: bool,
    /// Mean duration of its last answers in milliseconds; `null` before the first.
    pub answer_ms: Option<f64>,
    /// Seconds since the last answer to a charge; `null` before the first.
    pub last_success_s: Option<u64>,
    /// The last error, free of secrets; `null` if there was none.
    pub last_error: Option<String>,
    /// Seconds since that.
    pub last_error_s: Option<u64>,
    /// Time that the last answer took which came too late, in milliseconds; `null` if there was none.
    pub last_late_answer_ms: Option<f64>,
}

impl ServerStatus {
    /// Merges the states of each address, and sorts by address: two deployments may be one server.
    pub(crate) fn merge_by_address(servers: &mut Vec<Self>) {
        servers.sort_by(|a, b| a.address.cmp(&b.address));
        servers.dedup_by(|other, kept| {
            let is_same = other.address == kept.address;
            if is_same {
                kept.is_breaker_open |= other.is_breaker_open;
                if other.last_success_s.is_some_and(|age| kept.last_success_s.is_none_or(|known| age < known)) {
                    (kept.answer_ms, kept.last_success_s) = (other.answer_ms, other.last_success_s);
                }
                if other.last_error_s.is_some_and(|age| kept.last_error_s.is_none_or(|known| age < known)) {
                    (kept.last_error, kept.last_error_s) = (other.last_error.take(), other.last_error_s);
                }
                kept.last_late_answer_ms = other.last_late_answer_ms.or(kept.last_late_answer_ms);
            }
            is_same
        });
    }

    /// The server of the last error, with that error; `None` if there was none.
    pub fn last_error_of(servers: &[Self]) -> Option<String> {
        let failed = servers.iter().filter_map(|server| Some((server.last_error_s?, server)));
        let (_, server) = failed.min_by_key(|(age_s, _)| *age_s)?;
        Some(format!("{}: {}", server.address, server.last_error.as_deref()?))
    }
}

/// Age and length of the last, or mean, duration of some answers.
#[derive(Debug, Default)]
pub(crate) struct AnswerDuration(AtomicU64);

/// Time from which ages are counted.
static FIRST_READ: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Share of an answer in the mean of the last ones, as a divisor.
const MEAN_DIVISOR: u64 = 8;

impl AnswerDuration {
    /// Records an answer at `at`.
    pub(crate) fn record_last(&self, at: Instant, took: Duration) {
        self.store(at, to_micros(took));
    }

    /// Records an answer at `at` for the mean. Of answers at the same moment one may be lost.
    #[inline]
    pub(crate) fn record_for_mean(&self, at: Instant, took: Duration) {
        let (last, took_us) = (self.0.load(Ordering::Relaxed), to_micros(took));
        let mean_us = last & u64::from(u32::MAX);
        let mean_us = if last == 0 { took_us } else { mean_us - mean_us / MEAN_DIVISOR + took_us / MEAN_DIVISOR };
        self.store(at, mean_us);
    }

    #[inline]
    fn store(&self, at: Instant, us: u64) {
        // The upper half are seconds, from 1 on; so 0 stands for no answer.
        let seconds = at.saturating_duration_since(*FIRST_READ).as_secs() + 1;
        self.0.store(seconds << 32 | us.min(u64::from(u32::MAX)), Ordering::Relaxed);
    }

    /// Seconds since the last answer, and the duration; `None` without one.
    pub(crate) fn read(&self) -> Option<(u64, Duration)> {
        let packed = self.0.load(Ordering::Relaxed);
        let seconds = (packed >> 32).checked_sub(1)?;
        let age_s = FIRST_READ.elapsed().as_secs().saturating_sub(seconds);
        Some((age_s, Duration::from_micros(packed & u64::from(u32::MAX))))
    }
}

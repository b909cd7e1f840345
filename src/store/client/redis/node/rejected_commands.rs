//! Optional commands that a server rejects, until it accepts them or no call needs them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;

use crate::base::clock::Clock;
use crate::settings::endpoint::Endpoint;
use crate::store::client::redis::health_check::OptionalCommands;
use crate::telemetry::log_throttle::LogThrottle;

/// Minimum time between two log lines about rejected optional commands, and time until a rejection is forgotten.
const REJECTION_INTERVAL: Duration = Duration::from_secs(60);
/// Time in which further rejections change nothing.
const REJECTION_UPDATE_INTERVAL: Duration = Duration::from_millis(100);

/// Last rejection of an optional command, for logs and health pages.
#[derive(Debug)]
pub(super) struct RejectedCommands {
    last: ArcSwapOption<Rejection>,
    log: LogThrottle,
}

/// Last rejection of an optional command.
#[derive(Debug)]
struct Rejection {
    text: String,
    at: Instant,
}

impl RejectedCommands {
    /// Creates the state without a rejection.
    pub(super) fn new() -> Self {
        Self { last: ArcSwapOption::empty(), log: LogThrottle::every(REJECTION_INTERVAL) }
    }

    /// Advice for the last rejection; `None` without one.
    pub(super) fn text(&self) -> Option<Arc<String>> {
        let last = self.last.load_full();
        // The calls that needed the command may have ended.
        let recent = last.filter(|last| last.at.elapsed() < REJECTION_INTERVAL);
        recent.map(|last| Arc::new(last.text.clone()))
    }

    /// Records that the server rejected an optional command, and logs it.
    pub(super) fn record(&self, endpoint: &Endpoint, optional: &OptionalCommands) {
        let is_known = {
            let last = self.last.load();
            last.as_ref().is_some_and(|last| last.at.elapsed() < REJECTION_UPDATE_INTERVAL)
        };
        if !is_known {
            let OptionalCommands { consequence, advice, .. } = optional;
            if let Some(suppressed) = self.log.allow(Clock::System.now()) {
                tracing::error!(server = %endpoint, suppressed, "{consequence}: {advice}");
            }
            let rejection = Rejection { text: format!("{endpoint}: {advice}"), at: Instant::now() };
            self.last.store(Some(Arc::new(rejection)));
        }
    }

    /// Clears the rejection of optional commands.
    pub(super) fn clear(&self) {
        if self.last.load().is_some() {
            self.last.store(None);
        }
    }
}

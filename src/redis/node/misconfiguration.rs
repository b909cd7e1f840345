//! Configuration errors of one node: what an operator must change before it can serve.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;

use crate::clock::Clock;
use crate::redis::connect_error::ConnectError;
use crate::redis::error::RedisError;
use crate::redis::health_check::OptionalCommands;
use crate::settings::endpoint::Endpoint;
use crate::telemetry::log_throttle::LogThrottle;

/// Minimum time between two log lines about rejected optional commands, and time until a rejection is forgotten.
const REJECTION_INTERVAL: Duration = Duration::from_secs(60);
/// Time in which further rejections change nothing.
const REJECTION_UPDATE_INTERVAL: Duration = Duration::from_millis(100);

/// Current configuration errors.
#[derive(Debug)]
pub(super) struct Misconfiguration {
    error: ArcSwapOption<String>,
    optional_rejected: ArcSwapOption<Rejection>,
    log: LogThrottle,
}

/// Last rejection of an optional command.
#[derive(Debug)]
struct Rejection {
    text: String,
    at: Instant,
}

impl Misconfiguration {
    /// Creates the state without an error.
    pub(super) fn new() -> Self {
        Self {
            error: ArcSwapOption::empty(),
            optional_rejected: ArcSwapOption::empty(),
            log: LogThrottle::every(REJECTION_INTERVAL),
        }
    }

    /// Text of the current error; `None` without one.
    pub(super) fn text(&self) -> Option<Arc<String>> {
        let rejected = || {
            let rejected = self.optional_rejected.load_full();
            // The calls that needed the command may have ended.
            let recent = rejected.filter(|rejected| rejected.at.elapsed() < REJECTION_INTERVAL);
            recent.map(|rejected| Arc::new(rejected.text.clone()))
        };
        self.error.load_full().or_else(rejected)
    }

    /// Records a configuration error; any other error but a timeout clears the state.
    pub(super) fn record(&self, endpoint: &Endpoint, error: &ConnectError) {
        // A slow server may still be misconfigured.
        if error.kind == RedisError::Timeout {
            return;
        }
        let text = error.kind.is_misconfiguration().then(|| Arc::new(format!("{endpoint}: {error}")));
        self.error.store(text);
    }

    /// Clears the error.
    pub(super) fn clear(&self) {
        // Load first: in the common case there is nothing to clear.
        if self.error.load().is_some() {
            self.error.store(None);
        }
    }

    /// Records that the server rejected an optional command, and logs it.
    pub(super) fn record_optional_rejected(&self, endpoint: &Endpoint, optional: &OptionalCommands) {
        let is_known = {
            let rejected = self.optional_rejected.load();
            rejected.as_ref().is_some_and(|rejected| rejected.at.elapsed() < REJECTION_UPDATE_INTERVAL)
        };
        if !is_known {
            let OptionalCommands { consequence, advice, .. } = optional;
            if let Some(suppressed) = self.log.allow(Clock::System.now()) {
                tracing::error!(server = %endpoint, suppressed, "{consequence}: {advice}");
            }
            let rejection = Rejection { text: format!("{endpoint}: {advice}"), at: Instant::now() };
            self.optional_rejected.store(Some(Arc::new(rejection)));
        }
    }

    /// Clears the rejection of optional commands.
    pub(super) fn clear_optional_rejected(&self) {
        if self.optional_rejected.load().is_some() {
            self.optional_rejected.store(None);
        }
    }
}

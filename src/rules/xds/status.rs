//! State of the stream to the control plane, for pages and metrics.

use std::sync::{Mutex, MutexGuard};

use serde::Serialize;

use super::refused_domains::RefusedDomain;
use crate::base::clock::{Clock, Time};
use crate::base::sharded::lock_ignoring_poison;
use crate::settings::xds::XdsSettings;

/// State of the stream, written by the client of the control plane.
#[derive(Debug)]
pub struct StreamStatus {
    clock: Clock,
    report: Mutex<StreamReport>,
}

/// Copy of the state of the stream: `xds` of `/rlconfig/status`.
#[derive(Clone, Debug, Serialize)]
pub struct StreamReport {
    /// Address of the control plane.
    pub server: String,
    /// Node id of this client.
    pub node_id: String,
    /// State of the stream.
    pub stream: StreamState,
    /// Time of the last change of that state, RFC 3339 in UTC.
    pub stream_since: String,
    /// Error that ended the last stream, or of the last attempt to connect; absent while the stream is up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream_error: Option<String>,
    /// Version that was accepted last; absent before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Time when that version was accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version_since: Option<String>,
    /// Time when rules that were read from the cache had been accepted; absent for rules of the control plane.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_since: Option<String>,
    /// That time, for metrics.
    #[serde(skip)]
    pub cached_at: Option<Time>,
    /// Last version that was refused; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_refusal: Option<RefusedVersion>,
    /// Version whose usable domains are applied while the others were refused; absent if none was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partly_applied_version: Option<String>,
    /// Domains of the applied rules that have older rules, or none, because theirs were refused.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub refused_domains: Vec<RefusedDomain>,
    /// Number of streams that were opened.
    pub streams: u64,
    /// Number of accepted responses.
    pub accepted: u64,
    /// Number of refusals, repeated ones included.
    pub refused: u64,
}

/// State of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StreamState {
    /// There is no connection.
    Down,
    /// The server has not sent a response on this stream.
    Unanswered,
    /// The server has sent a response on this stream.
    Up,
}

/// A version that was refused.
#[derive(Clone, Debug, Serialize)]
pub struct RefusedVersion {
    /// The version.
    pub version: String,
    /// Time of its first refusal.
    pub at: String,
    /// Problems of its rules.
    pub error: String,
}

impl StreamReport {
    /// Returns the version of the applied rules; that of most domains if some were refused.
    pub fn applied_version(self) -> Option<String> {
        self.partly_applied_version.or(self.version)
    }

    /// Number of responses that were accepted or refused.
    pub const fn accepted_or_refused_count(&self) -> u64 {
        self.accepted + self.refused
    }
}

impl StreamStatus {
    /// State before the first stream.
    pub fn new(settings: &XdsSettings, clock: Clock) -> Self {
        let report = StreamReport {
            server: settings.server_address(),
            node_id: settings.node_id.clone(),
            stream: StreamState::Down,
            stream_since: clock.now().to_string(),
            stream_error: None,
            version: None,
            version_since: None,
            cached_since: None,
            cached_at: None,
            last_refusal: None,
            partly_applied_version: None,
            refused_domains: Vec::new(),
            streams: 0,
            accepted: 0,
            refused: 0,
        };
        Self { clock, report: Mutex::new(report) }
    }

    /// Returns a copy.
    pub fn snapshot(&self) -> StreamReport {
        self.lock_report().clone()
    }

    /// Records a stream that was opened.
    pub(super) fn record_opened(&self) {
        self.lock_report().streams += 1;
        self.set_state(StreamState::Unanswered, None);
    }

    /// Records a response.
    pub(super) fn record_response(&self) {
        self.set_state(StreamState::Up, None);
    }

    /// Records that the server does not answer.
    pub(super) fn record_silent(&self, error: String) {
        self.lock_report().stream_error = Some(error);
    }

    /// Records the end of a stream, or a failure to connect.
    pub(super) fn record_lost(&self, error: String) {
        self.set_state(StreamState::Down, Some(error));
    }

    /// Records a version that was accepted.
    pub(super) fn record_accepted(&self, version: &str) {
        let now = self.now();
        let mut report = self.lock_report();
        report.accepted += 1;
        report.partly_applied_version = None;
        report.refused_domains.clear();
        report.cached_since = None;
        let was_cached = report.cached_at.take().is_some();
        if was_cached || report.version.as_deref() != Some(version) {
            report.version = Some(version.to_owned());
            report.version_since = Some(now.to_string());
        }
    }

    /// Records that rules from the cache are applied.
    pub(super) fn record_loaded_from_cache(&self, version: String, accepted_at: Time, refused: Vec<RefusedDomain>) {
        let now = self.now().to_string();
        let mut report = self.lock_report();
        // The control plane may have been faster.
        if report.accepted == 0 {
            report.partly_applied_version = (!refused.is_empty()).then(|| version.clone());
            report.refused_domains = refused;
            report.version = Some(version);
            report.version_since = Some(now);
            report.cached_since = Some(accepted_at.to_string());
            report.cached_at = Some(accepted_at);
        }
    }

    /// Records the first refusal of a version.
    pub(super) fn record_refused(&self, version: String, error: String) {
        let at = self.now().to_string();
        let mut report = self.lock_report();
        report.refused += 1;
        report.last_refusal = Some(RefusedVersion { version, at, error });
    }

    /// Records a version of which some domains were refused and the others applied.
    pub(super) fn record_refused_domains(&self, version: &str, refused: Vec<RefusedDomain>) {
        let errors: Vec<_> = refused.iter().map(|domain| domain.error.as_str()).collect();
        self.record_refused(version.to_owned(), errors.join("\n"));
        let mut report = self.lock_report();
        (report.cached_since, report.cached_at) = (None, None);
        report.partly_applied_version = Some(version.to_owned());
        report.refused_domains = refused;
    }

    /// Records that the same content was refused again.
    pub(super) fn record_refused_again(&self) {
        self.lock_report().refused += 1;
    }

    fn set_state(&self, state: StreamState, error: Option<String>) {
        let now = self.now();
        let mut report = self.lock_report();
        if report.stream != state {
            report.stream = state;
            report.stream_since = now.to_string();
        }
        report.stream_error = error;
    }

    fn now(&self) -> Time {
        self.clock.now()
    }

    fn lock_report(&self) -> MutexGuard<'_, StreamReport> {
        lock_ignoring_poison(&self.report)
    }
}

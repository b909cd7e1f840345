//! Notices about the membership of a region: log lines when one appears or ends, and texts for pages.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::standing::{CUT_OFF_AFTER, RegionStanding};
use crate::base::clock::Clock;
use crate::base::sharded::lock_ignoring_poison;
use crate::settings::redis::regions::RegionSettings;
use crate::store::client::redis::error::RedisError;
use crate::store::stats::MembershipNotice;
use crate::telemetry::log_throttle::LogThrottle;

/// Shortest time between two equal log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Time for which a change gets a notice, in microseconds; limits with a longer period wait for longer.
const SHORT_PERIOD_US: u64 = 60_000_000;

/// Returns the notices that hold at `at`.
pub fn membership_notices(standing: &RegionStanding, at: Instant) -> Vec<MembershipNotice> {
    let findings = standing.findings();
    let mut notices = Vec::new();
    if findings.is_second() {
        notices.push(MembershipNotice::SecondRedis);
    }
    if !findings.differing().is_empty() {
        notices.push(MembershipNotice::OtherLists(findings.differing().to_vec()));
    }
    if findings.changed_before_us(at).is_some_and(|us| us < SHORT_PERIOD_US) {
        let is_new = findings.is_new();
        notices.push(if is_new { MembershipNotice::NewRedis } else { MembershipNotice::ListChanged });
    }
    if !standing.is_connected(at) {
        notices.push(MembershipNotice::CutOff);
    }
    notices
}

/// Log of notices.
#[derive(Debug)]
pub(super) struct NoticeLog {
    region: String,
    logged: Mutex<Vec<MembershipNotice>>,
    /// Nothing is logged before: a process that starts is cut off.
    since: Instant,
    failure_log: LogThrottle,
}

impl NoticeLog {
    pub(super) fn new(regions: &RegionSettings) -> Self {
        Self {
            region: regions.own_region_name().to_owned(),
            logged: Mutex::default(),
            since: Instant::now() + CUT_OFF_AFTER,
            failure_log: LogThrottle::every(LOG_INTERVAL),
        }
    }

    /// Logs the notices that are new, and those that ended.
    pub(super) fn log_changes(&self, standing: &RegionStanding, at: Instant) {
        let mut now = membership_notices(standing, at);
        if at < self.since {
            now.retain(|notice| *notice != MembershipNotice::CutOff);
        }
        let mut logged = lock_ignoring_poison(&self.logged);
        let region = self.region.as_str();
        for notice in now.iter().filter(|notice| !logged.contains(notice)) {
            let name = notice.name();
            match notice {
                MembershipNotice::ListChanged | MembershipNotice::NewRedis => {
                    tracing::warn!(region, notice = name, "{notice}");
                }
                _ => tracing::error!(region, notice = name, "{notice}"),
            }
        }
        for ended in logged.iter().filter(|notice| !now.contains(notice)) {
            let name = ended.name();
            let text = match ended {
                MembershipNotice::SecondRedis => "no other Redis has the name of this region any more",
                MembershipNotice::OtherLists(_) => "TOLLKEEPER_REGIONS no longer differs as before",
                MembershipNotice::ListChanged => "TOLLKEEPER_REGIONS has not changed for a minute",
                MembershipNotice::NewRedis => "the Redis of this region is no longer new",
                MembershipNotice::CutOff => "the global Redis answers again",
            };
            tracing::warn!(region, notice = name, "{text}");
        }
        *logged = now;
    }

    /// Logs failures that an operator can fix and that no other log line reports.
    pub(super) fn log_failure(&self, what: &'static str, key: &[u8], error: RedisError) {
        let is_reported_here =
            matches!(error, RedisError::WrongType | RedisError::BadReply | RedisError::Misconfigured);
        if is_reported_here && let Some(suppressed) = self.failure_log.allow(Clock::System.now()) {
            let key = String::from_utf8_lossy(key);
            tracing::error!(%key, %error, suppressed, "cannot read the {what}: limits with `scope: global` get no grants");
        }
    }
}

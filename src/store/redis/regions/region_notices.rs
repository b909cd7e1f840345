//! Notices about the membership of a region: log lines when one appears or ends, and texts for pages.
//!
//! Decides: the texts of notices of a region, while a conflict lasts.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use super::standing::{
    CUT_OFF_AFTER, MissingRegions, RegionConflict, RegionConflictKind, RegionFindings, RegionStanding, time_left_until,
};
use crate::base::clock::Clock;
use crate::base::sharded::lock_ignoring_poison;
use crate::settings::redis::regions::RegionSettings;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::server_clock::process_time_us;
use crate::store::stats::RegionNotice;
use crate::telemetry::log_throttle::LogThrottle;

/// Shortest time between two equal log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Time for which a change gets a notice, in microseconds; limits with a longer period wait for longer.
const CHANGE_NOTICE_DURATION_US: u64 = 60_000_000;

/// Returns the notices that hold at `at`.
pub fn collect_region_notices(standing: &RegionStanding, at: Instant) -> Vec<RegionNotice> {
    let findings = standing.findings();
    let mut notices = collect_conflict_notices(&findings, at);
    if findings.us_since_change(at).is_some_and(|us| us < CHANGE_NOTICE_DURATION_US) {
        let is_new = findings.has_new_redis();
        notices.push(if is_new { RegionNotice::NewRedis } else { RegionNotice::ListChanged });
    }
    let parts_left = findings.lease_ends_us().and_then(|ends_us| time_left_until(ends_us, at));
    if !standing.has_global_connection(at) {
        notices.push(RegionNotice::CutOff { parts_left });
        if parts_left.is_none() {
            notices.push(RegionNotice::LeaseEnded);
        }
    }
    if let Some(MissingRegions { never_reported, silent }) =
        findings.missing_regions().filter(|_| standing.has_global_connection(at))
    {
        if !never_reported.is_empty() {
            notices.push(RegionNotice::NeverReported(never_reported.clone()));
        }
        if !silent.is_empty() {
            notices.push(RegionNotice::NotSeen(silent.clone()));
        }
    }
    notices.extend(standing.pause_left_after_global_jump(at).map(|pause| RegionNotice::GlobalClockJumped { pause }));
    notices.extend(standing.pause_left_after_region_jump(at).map(|pause| RegionNotice::RegionClockJumped { pause }));
    notices
}

/// Returns the notices about conflicts with other Redis.
fn collect_conflict_notices(findings: &RegionFindings, at: Instant) -> Vec<RegionNotice> {
    let conflicts = |kind| {
        let conflicts = findings.conflicts().iter().filter(move |conflict| conflict.kind == kind);
        conflicts.filter_map(move |conflict| Some((conflict, time_left_until(conflict.until_us, at)?)))
    };
    let last_report = |(conflict, _): &(&RegionConflict, Duration)| conflict.seen_us;
    let end = |(_, left): &(&RegionConflict, Duration)| *left;
    let second = conflicts(RegionConflictKind::SecondRedis).max_by_key(end).map(|(_, pause)| {
        let seen_us =
            conflicts(RegionConflictKind::SecondRedis).map(|found| last_report(&found)).max().unwrap_or_default();
        let silent = u64::try_from(process_time_us(at).saturating_sub(seen_us)).unwrap_or(0);
        RegionNotice::SecondRedis { silent: Duration::from_micros(silent), pause }
    });
    let copied = conflicts(RegionConflictKind::CopiedRedis)
        .map(|found| end(&found))
        .max()
        .map(|pause| RegionNotice::CopiedRedis { pause });
    let mut regions: Vec<String> =
        conflicts(RegionConflictKind::OtherList).map(|(conflict, _)| conflict.region.clone()).collect();
    regions.sort_unstable();
    regions.dedup();
    let others = conflicts(RegionConflictKind::OtherList).map(|found| end(&found)).max();
    let others = others.map(|pause| RegionNotice::OtherLists { regions, pause });
    second.into_iter().chain(copied).chain(others).collect()
}

/// Logs notices when they appear and when they end.
#[derive(Debug)]
pub(super) struct NoticeLog {
    region: String,
    logged: Mutex<Vec<RegionNotice>>,
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
        let mut now = collect_region_notices(standing, at);
        if at < self.since {
            now.retain(|notice| !is_usual_at_start(notice));
        }
        let mut logged = lock_ignoring_poison(&self.logged);
        let region = self.region.as_str();
        let is_among = |notice: &RegionNotice, all: &[RegionNotice]| all.iter().any(|it| it.has_same_subject(notice));
        for notice in now.iter().filter(|notice| !is_among(notice, &logged)) {
            let name = notice.name();
            match notice {
                RegionNotice::ListChanged
                | RegionNotice::NewRedis
                | RegionNotice::NeverReported(_)
                | RegionNotice::NotSeen(_) => tracing::warn!(region, notice = name, "{notice}"),
                _ => tracing::error!(region, notice = name, "{notice}"),
            }
        }
        for ended in logged.iter().filter(|notice| !is_among(notice, &now)) {
            tracing::warn!(region, notice = ended.name(), "{}", notice_end_text(ended));
        }
        *logged = now;
    }

    /// Logs failures that an operator can fix and that no other log line reports.
    pub(super) fn log_failure(&self, what: &'static str, key: &[u8], error: RedisError) {
        let is_reported_here =
            matches!(error, RedisError::WrongType | RedisError::BadReply | RedisError::Misconfigured);
        if is_reported_here && let Some(suppressed) = self.failure_log.allow(Clock::System.now()) {
            let key = String::from_utf8_lossy(key);
            tracing::error!(
                %key, %error, suppressed, "cannot read the {what}: limits with `scope: global` get no grants"
            );
        }
    }
}

/// Returns true for notices that a process has until both Redis have answered.
const fn is_usual_at_start(notice: &RegionNotice) -> bool {
    matches!(notice, RegionNotice::CutOff { .. } | RegionNotice::LeaseEnded | RegionNotice::NeverReported(_))
}

/// Returns what a log line says when a notice ends.
const fn notice_end_text(ended: &RegionNotice) -> &'static str {
    match ended {
        RegionNotice::SecondRedis { .. } => "no other Redis has the name of this region any more",
        RegionNotice::CopiedRedis { .. } => "the Redis of this region is no longer used beside a copy of it",
        RegionNotice::OtherLists { .. } => "TOLLKEEPER_REGIONS no longer differs as before",
        RegionNotice::ListChanged => "the regions have not changed for a minute",
        RegionNotice::NewRedis => "the Redis of this region is no longer new",
        RegionNotice::CutOff { .. } => "the global Redis answers again",
        RegionNotice::LeaseEnded => "the global Redis has confirmed this region again",
        RegionNotice::NeverReported(_) => "the regions that never reported are no longer the same",
        RegionNotice::NotSeen(_) => "the regions that do not report are no longer the same",
        RegionNotice::GlobalClockJumped { .. } => "a period has passed since the clock of the global Redis jumped",
        RegionNotice::RegionClockJumped { .. } => {
            "a period has passed since the clock of the region's Redis jumped or its data was lost"
        }
    }
}

//! Notices about the membership of a region: log lines when one appears or ends, and texts for pages.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::standing::{CUT_OFF_AFTER, Findings, MissingRegions, PartsRest, RegionStanding, RestCause, left_until};
use crate::base::clock::Clock;
use crate::base::sharded::lock_ignoring_poison;
use crate::settings::redis::regions::RegionSettings;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::server_clock::process_us;
use crate::store::stats::membership_notice::MembershipNotice;
use crate::telemetry::log_throttle::LogThrottle;

/// Shortest time between two equal log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Time for which a change gets a notice, in microseconds; limits with a longer period wait for longer.
const SHORT_PERIOD_US: u64 = 60_000_000;

/// Returns the notices that hold at `at`.
pub fn membership_notices(standing: &RegionStanding, at: Instant) -> Vec<MembershipNotice> {
    let findings = standing.findings();
    let mut notices = rest_notices(&findings, at);
    if findings.changed_before_us(at).is_some_and(|us| us < SHORT_PERIOD_US) {
        let is_new = findings.is_new();
        notices.push(if is_new { MembershipNotice::NewRedis } else { MembershipNotice::ListChanged });
    }
    let parts_left = findings.lease_ends_us().and_then(|ends_us| left_until(ends_us, at));
    if !standing.is_connected(at) {
        notices.push(MembershipNotice::CutOff { parts_left });
        if parts_left.is_none() {
            notices.push(MembershipNotice::LeaseEnded);
        }
    }
    if let Some(MissingRegions { never_reported, silent }) = findings.missing().filter(|_| standing.is_connected(at)) {
        if !never_reported.is_empty() {
            notices.push(MembershipNotice::NeverReported(never_reported.clone()));
        }
        if !silent.is_empty() {
            notices.push(MembershipNotice::NotSeen(silent.clone()));
        }
    }
    notices.extend(standing.global_clock_rest(at).map(|rest| MembershipNotice::GlobalClockJumped { rest }));
    notices.extend(standing.region_clock_rest(at).map(|rest| MembershipNotice::RegionClockJumped { rest }));
    notices
}

/// Returns the notices about other Redis because of which the parts rest.
fn rest_notices(findings: &Findings, at: Instant) -> Vec<MembershipNotice> {
    let rests = |cause| {
        let rests = findings.rests().iter().filter(move |rest| rest.cause == cause);
        rests.filter_map(move |rest| Some((rest, left_until(rest.until_us, at)?)))
    };
    let last_report = |(rest, _): &(&PartsRest, Duration)| rest.seen_us;
    let end = |(_, left): &(&PartsRest, Duration)| *left;
    let second = rests(RestCause::SecondRedis).max_by_key(end).map(|(_, rest)| {
        let seen_us = rests(RestCause::SecondRedis).map(|rest| last_report(&rest)).max().unwrap_or_default();
        let silent = u64::try_from(process_us(at).saturating_sub(seen_us)).unwrap_or(0);
        MembershipNotice::SecondRedis { silent: Duration::from_micros(silent), rest }
    });
    let copied =
        rests(RestCause::CopiedRedis).map(|rest| end(&rest)).max().map(|rest| MembershipNotice::CopiedRedis { rest });
    let mut regions: Vec<String> = rests(RestCause::OtherList).map(|(rest, _)| rest.region.clone()).collect();
    regions.sort_unstable();
    regions.dedup();
    let others = rests(RestCause::OtherList).map(|rest| end(&rest)).max();
    let others = others.map(|rest| MembershipNotice::OtherLists { regions, rest });
    second.into_iter().chain(copied).chain(others).collect()
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
            now.retain(|notice| !is_usual_at_start(notice));
        }
        let mut logged = lock_ignoring_poison(&self.logged);
        let region = self.region.as_str();
        let is_among =
            |notice: &MembershipNotice, all: &[MembershipNotice]| all.iter().any(|it| it.has_same_subject(notice));
        for notice in now.iter().filter(|notice| !is_among(notice, &logged)) {
            let name = notice.name();
            match notice {
                MembershipNotice::ListChanged
                | MembershipNotice::NewRedis
                | MembershipNotice::NeverReported(_)
                | MembershipNotice::NotSeen(_) => tracing::warn!(region, notice = name, "{notice}"),
                _ => tracing::error!(region, notice = name, "{notice}"),
            }
        }
        for ended in logged.iter().filter(|notice| !is_among(notice, &now)) {
            tracing::warn!(region, notice = ended.name(), "{}", end_text(ended));
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

/// Returns true for notices that a process has until both Redis have answered.
const fn is_usual_at_start(notice: &MembershipNotice) -> bool {
    matches!(
        notice,
        MembershipNotice::CutOff { .. } | MembershipNotice::LeaseEnded | MembershipNotice::NeverReported(_)
    )
}

/// Returns what a log line says when a notice ends.
const fn end_text(ended: &MembershipNotice) -> &'static str {
    match ended {
        MembershipNotice::SecondRedis { .. } => "no other Redis has the name of this region any more",
        MembershipNotice::CopiedRedis { .. } => "the Redis of this region is no longer used beside a copy of it",
        MembershipNotice::OtherLists { .. } => "TOLLKEEPER_REGIONS no longer differs as before",
        MembershipNotice::ListChanged => "the regions have not changed for a minute",
        MembershipNotice::NewRedis => "the Redis of this region is no longer new",
        MembershipNotice::CutOff { .. } => "the global Redis answers again",
        MembershipNotice::LeaseEnded => "the global Redis has confirmed this region again",
        MembershipNotice::NeverReported(_) => "the regions that never reported are no longer the same",
        MembershipNotice::NotSeen(_) => "the regions that do not report are no longer the same",
        MembershipNotice::GlobalClockJumped { .. } => "a period has passed since the clock of the global Redis jumped",
        MembershipNotice::RegionClockJumped { .. } => {
            "a period has passed since the clock of the region's Redis jumped"
        }
    }
}

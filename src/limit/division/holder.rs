//! A holder: one proxy's stream with a key, what it wants, and what it may still admit.
//!
//! A demand is told some seconds late by reports. Small differences between samples are noise, and are smoothed. A
//! difference that chance does not explain is a change of the demand, which happened at some time within the sample: so
//! the sample is a mean of the former demand and the new one, and the new one is further away. The sample after it has
//! the new demand alone.
//!
//! Decides: how the demand of a proxy is measured from its reports.
//! Decides: the demand in a report: denied requests too, reports in quick succession, `time_elapsed` of 0.
//! Decides: until when an assignment may be in use that was acknowledged late (`latest_end`).
//! Decides: the margin for clocks and late deliveries (`MARGIN_US`); when a silent proxy is left out.

use smallvec::SmallVec;

use super::assignment::{ProxyTokenBucket, Strategy};
use crate::base::clock::Time;

/// Time that an assignment takes to be in force after it was sent, and by which clocks and deliveries differ, in
/// microseconds.
pub const MARGIN_US: u64 = 1_000_000;
/// Time after the sending from which a report proves that the assignment is in force, in microseconds.
pub(super) const CONFIRMED_AFTER_US: u64 = MARGIN_US;
/// Time without a report after which a holder leaves the division, in microseconds: two reports are missing.
const SILENT_AFTER_US: u64 = 11_000_000;
/// Time for which a report shows that a proxy is alive, in microseconds.
const ALIVE_US: u64 = 5_500_000;
/// Shortest time that a demand is measured over, in microseconds.
pub(super) const MIN_ELAPSED_US: u64 = 1_000_000;
/// Parts of a share that are given up one after the other; more are merged.
const MAX_RELEASED_SHARES: usize = 6;

/// Time over which noise is smoothed, in microseconds.
const SMOOTHING_US: u64 = 10_000_000;
/// Largest demand that is recorded, in thousandths of a hit per second.
const MAX_DEMAND_MHPS: u64 = 1 << 50;
/// Standard deviations from which a difference is a change.
const SIGNIFICANT_DEVIATIONS: u64 = 3;

/// Usage of a bucket since its last report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Requests that passed.
    pub allowed: u64,
    /// Requests that were denied.
    pub denied: u64,
    /// Time since the last report as the proxy says, in microseconds.
    pub elapsed_us: u64,
    /// Time that the report came. If this process stood still meanwhile: when that began, because the report may have
    /// waited since then.
    pub received: Time,
}

/// The last assignment that was sent.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    pub(super) strategy: Strategy,
    pub(super) at: Time,
    /// Time of the last one that may have added tokens: since then the bucket was only made smaller.
    pub(super) filled_at: Time,
    /// End of its time to live, counted from the sending: it ends at the proxy at this time or later.
    pub(super) ends: Time,
    /// Time that it was sent last: an equal one renews it.
    pub(super) last_sent: Time,
    /// Time by which the proxy had received that; `None` if it is not known.
    pub(super) received_by: Option<Time>,
    /// Maximum number of lent hits that it admits from its start on.
    pub(super) most: u64,
    /// How it follows from the one before.
    pub(super) change: TokenChange,
    /// Requests that were reported as passed since it was sent.
    pub(super) passed: u64,
}

/// How the tokens of an assignment follow from those of the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenChange {
    /// There are more of them: what passed before the change would have left fewer.
    Raise,
    /// There are fewer, in this ratio: what passed before the change counts by the ratio only.
    Shrink { to: u32, from: u32 },
    /// They are new, whatever was left: at most this much may have passed before the change.
    Fresh { before: u64 },
}

impl Sent {
    /// Latest time at which it may still be in force: a proxy that acknowledged it late began its time to live late. One
    /// that did not acknowledge it began it at once, or never.
    pub fn latest_end(&self) -> Time {
        let late_us = self.received_by.map_or(0, |received| received.since_us(self.last_sent));
        self.ends.plus_us(late_us + MARGIN_US)
    }

    /// Records that the proxy had received by `now` all that was sent before `sent_before`.
    pub(super) fn record_receipt(&mut self, sent_before: Time, now: Time) {
        if self.last_sent < sent_before {
            self.received_by.get_or_insert(now);
        }
    }

    /// True for a bucket that nothing refills.
    pub(super) const fn never_refills(&self) -> bool {
        matches!(self.strategy, Strategy::Deny | Strategy::Tokens(ProxyTokenBucket { fill: 0, .. }))
    }

    /// Records that a report came which was made under the assignment: all that passed before it is reported.
    pub(super) fn bound_hits_before_change(&mut self) {
        if let TokenChange::Fresh { before } = &mut self.change {
            *before = self.passed.min(*before);
        }
    }

    /// Maximum number of hits that the proxy can still admit, once the assignment is in force.
    pub(super) fn most_left(&self) -> u64 {
        let passed_since = match self.change {
            TokenChange::Raise => self.passed,
            TokenChange::Shrink { to, from } => {
                let passed = u128::from(self.passed) * u128::from(to) / u128::from(from.max(1));
                u64::try_from(passed).unwrap_or(u64::MAX)
            }
            TokenChange::Fresh { before } => self.passed.saturating_sub(before),
        };
        self.most.saturating_sub(passed_since)
    }
}

/// A part of a limit that is divided as a rate, in hits per period: of its refill, and of its bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Part of the refill.
    pub refill: u64,
    /// Part of the bucket.
    pub bucket: u64,
}

/// Part of a share that a holder gave up, and that may still be in use.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReleasedShare {
    /// The refill, or the lent hits.
    pub(super) share: u64,
    /// The part of the bucket, which is empty then.
    pub(super) bucket: u64,
    /// The assignment that gave it up; `None` once it is known to be in force, and if there is none.
    pub(super) sent: Option<Time>,
    /// Time from which it is out of use.
    pub(super) until: Time,
}

/// A rate's share of a holder, and what it gave up.
#[derive(Clone, Debug, Default)]
pub struct RateShare {
    /// What it has now.
    pub now: Part,
    pub(super) released_shares: SmallVec<[ReleasedShare; 1]>,
}

impl RateShare {
    /// What is out of others' reach.
    pub(super) fn reserved(&self) -> Part {
        self.released_shares.iter().fold(self.now, |sum, loss| Part {
            refill: sum.refill.saturating_add(loss.share),
            bucket: sum.bucket.saturating_add(loss.bucket),
        })
    }

    /// Records another part, sent at `sent`, or `None` if the old one lapsed; what it is less by is in use until
    /// `old_end` at most.
    pub fn change_to(&mut self, part: Part, sent: Option<Time>, old_end: Time) {
        let share = self.now.refill.saturating_sub(part.refill);
        let bucket = self.now.bucket.saturating_sub(part.bucket);
        self.now = part;
        self.release_later(ReleasedShare { share, bucket, sent, until: old_end });
    }

    fn release_later(&mut self, loss: ReleasedShare) {
        if loss.share == 0 && loss.bucket == 0 {
            return;
        }
        let is_full = self.released_shares.len() >= MAX_RELEASED_SHARES;
        match self.released_shares.last_mut() {
            Some(last) if is_full => {
                *last = ReleasedShare {
                    share: last.share.saturating_add(loss.share),
                    bucket: last.bucket.saturating_add(loss.bucket),
                    sent: loss.sent,
                    until: last.until.max(loss.until),
                }
            }
            _ => self.released_shares.push(loss),
        }
    }

    /// Records that what was sent before `sent_before` is in force from `at` on.
    pub(super) fn confirm(&mut self, sent_before: Time, at: Time) {
        for loss in &mut self.released_shares {
            if loss.sent.take_if(|sent| *sent < sent_before).is_some() {
                loss.until = loss.until.min(at);
            }
        }
    }

    /// Lowers `earliest` to the next time at which others may have what was given up.
    pub(super) fn note_releases(&self, earliest: &mut Option<Time>) {
        self.released_shares.iter().for_each(|loss| note_earliest(earliest, loss.until));
    }

    /// Takes the released shares that are out of use.
    pub(super) fn take_unused_releases(&mut self, now: Time) -> SmallVec<[ReleasedShare; 1]> {
        let unused = self.released_shares.iter().filter(|loss| loss.until <= now).copied().collect();
        self.released_shares.retain(|loss| loss.until > now);
        unused
    }
}

/// What a holder has, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HolderReport {
    /// What it was told last.
    pub strategy: Option<Strategy>,
    /// What is in use of the first limit.
    pub reserved: u64,
    /// End of its assignment.
    pub ends: Time,
}

/// Keeps the earlier of two times.
pub(super) fn note_earliest(earliest: &mut Option<Time>, at: Time) {
    *earliest = Some(earliest.map_or(at, |earliest| earliest.min(at)));
}

/// A proxy's stream that holds a part of the limits of a key.
#[derive(Debug)]
pub struct ShareHolder<K> {
    /// Identifies the holder to the caller.
    pub key: K,
    /// The proxy keeps the ratio of tokens when its bucket changes, as Envoy does; else it begins with a full one.
    pub keeps_ratio: bool,
    /// What its proxy is asked for.
    pub demand: Demand,
    /// Hits of reports that came too soon after another to measure a demand.
    unmeasured_hits: u64,
    /// Time of the last measurement.
    measured_at: Time,
    /// Number of reports, up to 255.
    pub reports: u8,
    /// Time of the last report.
    pub reported: Time,
    /// Time that the last report counts as received at.
    pub(super) received: Time,
    /// Hits were denied since the report before the last.
    pub was_denied: bool,
    /// All hits were denied, and there were some: whatever the proxy was assigned is used up or over.
    pub(super) is_empty: bool,
    /// The assignment that was sent last.
    pub sent: Option<Sent>,
    /// Until then the proxy may have an assignment of another replica, or of a stream before this one, which is better
    /// than less.
    pub(super) foreign_assignment_until: Time,
    /// Requests may have passed by something else than the assignments of this ledger, and are not all reported.
    pub has_unknown_assignment: bool,
    /// Requests passed before the first assignment, and count as used of it, so that the proxy may have as many more left:
    /// a raise in proportion would raise these too.
    pub(super) may_have_more_left: bool,
    /// Lent hits that the proxy may still admit, or admitted and did not report.
    pub(super) outstanding: u64,
    /// Share of each pool that is divided as a rate, by its index.
    pub rates: SmallVec<[RateShare; 1]>,
}

impl<K> ShareHolder<K> {
    pub(super) fn new(key: K, keeps_ratio: bool, pools: usize, now: Time) -> Self {
        Self {
            key,
            keeps_ratio,
            demand: Demand::default(),
            unmeasured_hits: 0,
            measured_at: now,
            reports: 0,
            reported: now,
            received: now,
            was_denied: false,
            is_empty: false,
            sent: None,
            foreign_assignment_until: now,
            has_unknown_assignment: false,
            may_have_more_left: false,
            outstanding: 0,
            rates: (0..pools).map(|_| RateShare::default()).collect(),
        }
    }

    /// True if the proxy has not reported for so long that it may be gone.
    pub fn is_silent(&self, now: Time) -> bool {
        now.since_us(self.reported) > SILENT_AFTER_US
    }

    /// True if the proxy has reported lately; else nothing is sent to it.
    pub(super) fn is_alive(&self, now: Time) -> bool {
        now.since_us(self.reported) < ALIVE_US
    }

    /// Records a report: its demand, its denials and its time. A demand is measured over a second or more, so reports
    /// in quick succession are added up.
    pub(super) fn record_report(&mut self, usage: Usage, now: Time) {
        let elapsed_us = usage.elapsed_us.min(SILENT_AFTER_US);
        // Only the proxy knows what time the first report is about.
        if self.reports > 0 || elapsed_us >= MIN_ELAPSED_US {
            self.unmeasured_hits = self.unmeasured_hits.saturating_add(usage.allowed.saturating_add(usage.denied));
        }
        let since_us = now.since_us(self.measured_at).max(elapsed_us);
        if since_us >= MIN_ELAPSED_US {
            self.demand.take_sample(std::mem::take(&mut self.unmeasured_hits), since_us);
            self.measured_at = now;
        }
        self.is_empty = usage.allowed == 0 && usage.denied > 0;
        self.was_denied = usage.denied > 0;
        self.reported = now;
        self.received = usage.received;
        self.reports = self.reports.saturating_add(1);
    }

    /// Hits that may have passed before the last assignment or after it.
    pub(super) fn uncertain_hits(&self) -> u64 {
        match self.sent.map(|sent| sent.change) {
            Some(TokenChange::Fresh { before }) => before,
            Some(TokenChange::Raise | TokenChange::Shrink { .. }) | None => 0,
        }
    }

    /// Maximum number of lent hits that the proxy can have left once the last assignment is in force.
    pub(super) fn most_left(&self) -> u64 {
        // A bucket that is refilled may admit as much again after each renewal.
        let sent = self.sent.filter(Sent::never_refills);
        sent.map_or(self.outstanding, |sent| self.outstanding.min(sent.most_left()))
    }

    /// True if the proxy has nothing, or denied hits.
    pub fn is_waiting(&self) -> bool {
        self.sent.is_none() || self.was_denied || self.is_denied()
    }

    /// True if the proxy has nothing yet, and its demand is not known.
    pub(super) const fn is_newcomer(&self) -> bool {
        self.sent.is_none() && self.demand.samples == 0
    }

    /// True if the proxy denies everything.
    pub(super) fn is_denied(&self) -> bool {
        self.sent.is_some_and(|sent| sent.strategy == Strategy::Deny)
    }

    /// True if the last assignment is in force at the proxy for at least the margin, as far as its time goes.
    pub(super) fn is_surely_in_force(&self, now: Time) -> bool {
        self.sent.is_some_and(|sent| sent.ends > now.plus_us(MARGIN_US))
    }

    /// True if no assignment can be in force any more.
    pub(super) fn is_assignment_over(&self, now: Time) -> bool {
        self.sent.is_none_or(|sent| sent.latest_end() <= now)
    }

    /// True if a report that was received at `received` was made under the last assignment: the proxy acknowledged it, and
    /// what it sent before that has come.
    pub(super) fn is_confirmed_by_report(&self, received: Time) -> bool {
        self.sent.is_some_and(|sent| sent.received_by.is_some() && sent.at.plus_us(CONFIRMED_AFTER_US) < received)
    }

    /// True if no tokens were added after a report that was received at `received`, but by the bucket's own refill.
    pub(super) fn is_filled_before_report(&self, received: Time) -> bool {
        self.sent.is_some_and(|sent| sent.filled_at.plus_us(CONFIRMED_AFTER_US) < received)
    }

    /// True if lent hits can be changed: what the next reports say of the time before a change is told apart from what
    /// passed after it for one change at a time. Before a first assignment nothing passed, and a raise takes no hits.
    pub(super) fn can_be_changed(&self) -> bool {
        let is_simple = |sent: Sent| matches!(sent.change, TokenChange::Raise | TokenChange::Fresh { before: 0 });
        self.sent.is_none_or(is_simple) || self.is_confirmed_by_report(self.received)
    }

    /// True if the proxy may have an assignment that this ledger does not know, which is better than less.
    pub(super) fn may_have_foreign_assignment(&self, now: Time) -> bool {
        self.sent.is_none() && !self.is_empty && now < self.foreign_assignment_until
    }
}

/// Demand of a proxy, or of all who ask over RLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Thousandths of a hit per second.
    pub mhps: u64,
    /// Number of samples, up to 255.
    pub samples: u8,
    /// The last sample showed a change.
    has_changed: bool,
}

impl Demand {
    /// Records that `hits` were asked for in `since_us`.
    pub fn take_sample(&mut self, hits: u64, since_us: u64) {
        let since_us = u128::from(since_us.max(1));
        let measured = saturate_to_u64(u128::from(hits) * 1_000_000_000 / since_us).min(MAX_DEMAND_MHPS);
        let former = self.mhps;
        let expected = saturate_to_u64(u128::from(former) * since_us / 1_000_000_000);
        let deviation = hits.max(expected).max(1).isqrt();
        let is_change = hits.abs_diff(expected) > SIGNIFICANT_DEVIATIONS * deviation;
        self.mhps = match is_change {
            _ if self.samples == 0 => measured,
            true if self.has_changed => measured,
            // The change was in the middle of the sample, or before it if the demand would be nearly 0.
            true if measured > former => measured.saturating_add(measured - former),
            true => measured.saturating_mul(2).saturating_sub(former).max(measured / 4),
            false => {
                let weight = since_us * u128::from(measured) + u128::from(SMOOTHING_US) * u128::from(former);
                saturate_to_u64(weight / (since_us + u128::from(SMOOTHING_US)))
            }
        }
        .min(MAX_DEMAND_MHPS);
        self.has_changed = is_change && !self.has_changed && self.samples > 0;
        self.samples = self.samples.saturating_add(1);
    }

    /// Hits in `span_us`, rounded up.
    pub(super) fn in_span(&self, span_us: u64) -> u64 {
        saturate_to_u64((u128::from(self.mhps) * u128::from(span_us)).div_ceil(1_000_000_000))
    }
}

fn saturate_to_u64(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

//! Grant requests of token buckets: a rate and a part of the capacity, for a term.

use std::time::{Duration, Instant};

use super::bucket_grants::{self, TermReply};
use super::clocks::{ClockOffsets, global_clock};
use super::grant_request::GrantRequest;
use super::region_call;
use super::requests::GrantWorker;
use super::script_call::KeyScript;
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::global_bucket::{TermRequest, TokenPool};
use crate::limit::algorithm::global_clock::GlobalClock;
use crate::limit::algorithm::region_bucket::RegionBucketCounts;
use crate::limit::algorithm::region_bucket_grant::RegionTerm;
use crate::limit::algorithm::region_window::REQUEST_INTERVAL_US;
use crate::store::client::redis::hash_slot::hash_slot;
use crate::store::client::redis::server_clock::InstantRange;
use crate::store::redis::key::global_key;
use crate::store::redis::script::arguments::clock_argument;
use crate::store::redis::script::compose::{global_bucket_script, region_bucket_grant_script};

/// Time in which the bucket of the region takes a grant, within which its clock is known.
const REGION_TIME: Duration = Duration::from_millis(500);
/// Longest term of a grant in microseconds; others have a region's part that long after it died.
const MAX_TERM_US: u64 = 40_000_000;
/// Term of a grant to a bucket whose demand was seen for a moment only.
const FIRST_TERM_US: u64 = 5_000_000;
/// Demand that was seen for this part of the period is steady.
const STEADY_PARTS: u64 = 12;
/// Shortest time over which demand is measured, in microseconds.
const MIN_RATE_SPAN_US: u64 = 1_000_000;

/// Demand on a bucket at the time of its grant request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketDemand {
    /// Tokens per period, beside the region's own.
    pub wanted: u32,
    /// Duration of the grant in microseconds.
    pub term_us: u64,
}

impl BucketDemand {
    /// Wants a quarter more than callers asked for, for two thirds of the period.
    pub fn at(limit: &Limit, counts: &RegionBucketCounts, now_us: u64) -> Self {
        let period_us = limit.period_us();
        let elapsed_us = now_us.saturating_sub(counts.requested_since.as_micros());
        let asked = u128::from(counts.requested) * u128::from(period_us) / u128::from(elapsed_us.max(MIN_RATE_SPAN_US));
        let wanted = (asked + asked / 4).saturating_sub(u128::from(limit.region_reserve())).max(1);
        let term_us = (period_us / 3 * 2).clamp(REQUEST_INTERVAL_US, MAX_TERM_US);
        let is_steady = elapsed_us >= (period_us / STEADY_PARTS).min(FIRST_TERM_US);
        Self {
            wanted: u32::try_from(wanted).unwrap_or(u32::MAX),
            term_us: if is_steady { term_us } else { term_us.min(FIRST_TERM_US) },
        }
    }

    /// Time after which the next request is opened: before the term ends, and sooner if less was granted than wanted.
    /// So at most three grants to a region run at once.
    pub fn pause_us(&self, granted: u32) -> u64 {
        let pause_us = if granted < self.wanted { self.term_us / 5 * 2 } else { self.term_us / 4 * 3 };
        pause_us.max(REQUEST_INTERVAL_US)
    }
}

impl GrantWorker {
    /// Answers the request of a token bucket.
    pub(super) async fn answer_bucket(&self, request: &GrantRequest, counts: &RegionBucketCounts) {
        let demand = BucketDemand::at(&request.limit, counts, request.now.as_micros());
        let Some(reply) = self.ask_bucket(request, demand).await else { return };
        if reply.end == Time::default() {
            // Too many grants have not ended; the one that the bucket has goes on.
            self.counts.add_failed();
            return;
        }
        let term = RegionTerm {
            request: counts.open_request,
            epoch: reply.epoch.as_micros(),
            rate: reply.rate,
            capacity: reply.capacity,
            start: Time::from_micros(reply.end.as_micros().saturating_sub(demand.term_us)),
            end: reply.end,
            exhausted: reply.rate < demand.wanted,
            next_request_at: request.now.plus_us(demand.pause_us(reply.rate)),
        };
        let from = Instant::now();
        let clock = self.clock(&request.key, InstantRange { from, until: from + REGION_TIME });
        let argument = region_call::encode_term(&request.limit, None, &term);
        let more: [&[u8]; 2] = [b"", &clock_argument(&clock)];
        let call =
            KeyScript { script: region_bucket_grant_script(), key: &request.key, argument: &argument, more: &more };
        // What the rate makes in the term.
        let hits = u128::from(reply.rate) * u128::from(demand.term_us) / u128::from(request.limit.period_us());
        self.call_region(call, u64::try_from(hits).unwrap_or(u64::MAX)).await;
    }

    /// Asks the global Redis for a rate.
    async fn ask_bucket(&self, request: &GrantRequest, demand: BucketDemand) -> Option<TermReply> {
        let term = TermRequest {
            region: self.settings.number(),
            wanted: demand.wanted,
            term_us: demand.term_us,
            pool: pool(&request.limit),
        };
        let key = global_key(&request.key);
        let argument = bucket_grants::encode_request(term, None);
        let call = KeyScript { script: global_bucket_script(), key: &key, argument: &argument, more: &[] };
        let (reply, answer) = self.call_global(call, bucket_grants::decode_request).await?;
        self.record_answer(&answer, reply.now);
        Some(reply)
    }

    /// Returns the clock of the global Redis for a call on the region's counter `within` a range.
    fn clock(&self, key: &[u8], within: InstantRange) -> GlobalClock {
        let slot = || hash_slot(key);
        let region = self.region.clock_offset(slot, within);
        let global = self.global.clock_offset(slot, within);
        let offsets = region.zip(global).map(|(region, global)| ClockOffsets { region, global });
        offsets.map_or(GlobalClock::UNKNOWN, |offsets| global_clock(offsets, within))
    }
}

/// Tokens that regions may be granted: all but their own.
pub const fn pool(limit: &Limit) -> TokenPool {
    TokenPool { rate: limit.max_granted(), capacity: limit.max_granted_capacity() }
}

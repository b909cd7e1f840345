//! Scripts that charge by no counting method: registries of replicas, holders and regions, grants, resets, and counters
//! in the key format of envoyproxy/ratelimit.

use std::slice;

use bytes::{BufMut, Bytes, BytesMut};
use tollkeeper::base::clock::Time;
use tollkeeper::limit::Limit;
use tollkeeper::limit::algorithm::CountingMethod;
use tollkeeper::limit::algorithm::global_bucket::GlobalBucketParameters;
use tollkeeper::limit::algorithm::global_window::{GlobalWindowParameters, ReturnedHits};
use tollkeeper::limit::algorithm::region_bucket::PrepaidHitsGrant;
use tollkeeper::limit::algorithm::region_window::HitsGrant;
use tollkeeper::store::redis::regions::grant_encoding::{
    GlobalBucketAction, GlobalWindowAction, encode_counter_reset, encode_global_bucket_call, encode_global_window_call,
    encode_hits_grant, encode_hits_return, encode_prepaid_hits_grant,
};
use tollkeeper::store::redis::regions::registry::{
    FencingToken, FencingTokens, IdentityCall, IdentityClaim, RegionIdentity, RegionListHash, RegionRedisId,
    RegionReport, encode_identity_call, encode_region_report,
};
use tollkeeper::store::redis::regions::resets::{CounterToReset, encode_resets_addition, encode_resets_read};
use tollkeeper::store::redis::replicas::{ClaimAction, OwnerId, encode_claim_argument};
use tollkeeper::store::redis::script::{self, put_time};

use super::charges::Descriptor;
use super::script_calls::ScriptCalls;

const fn key(name: &'static str) -> Bytes {
    Bytes::from_static(name.as_bytes())
}

impl ScriptCalls {
    /// Makes a random call of a script that charges by no counting method.
    pub(crate) fn call_shared_record(&mut self, descriptors: &[Descriptor]) {
        match self.chance.below(11) {
            0 => self.claim_replica_slot(),
            1 => self.exchange_holders(),
            2 => self.change_identity(),
            3 => self.report_region(),
            4 => self.change_resets(),
            5 => self.call_global_window(),
            6 => self.call_global_bucket(),
            7 | 8 => self.call_counter_of_region(descriptors),
            9 => self.charge_window_in_ratelimit_format(),
            _ => {
                self.call("global probe", script::global_probe_script(), &[key("probe")], &[Bytes::new()]);
            }
        }
    }

    fn small_id<const BYTES: usize>(&mut self, count: u64) -> [u8; BYTES] {
        [u8::try_from(self.chance.below(count)).expect("a small number"); BYTES]
    }

    fn claim_replica_slot(&mut self) {
        let owner = OwnerId(self.small_id(5));
        let slots = self.chance.pick(&[3, 3, 3, 1, 8]);
        let action = if self.chance.one_in(6) { ClaimAction::Release } else { ClaimAction::Claim };
        let argument = encode_claim_argument(owner, slots, action, self.given_time());
        self.call("replicas", script::replicas_script(), &[key("replicas")], &[argument]);
    }

    fn exchange_holders(&mut self) {
        let mut argument = BytesMut::new();
        put_time(&mut argument, self.given_time());
        argument.put_u64_le(self.chance.pick(&[3_000_000, 15_000_000]));
        for _ in 0..self.chance.below(4) {
            argument.put_u64_le(self.chance.below(6));
            argument.put_u64_le(self.chance.below(20_000_000));
            argument.put_u64_le(self.chance.below(2));
        }
        self.call("holders", script::holders_script(), &[key("holders")], &[argument.freeze()]);
    }

    fn random_fence(&mut self) -> FencingTokens {
        let generation = self.chance.below(4);
        FencingTokens { generation, current: FencingToken(self.small_id(3)), next: FencingToken(self.small_id(3)) }
    }

    fn change_identity(&mut self) {
        let id = RegionRedisId(self.small_id(3));
        let list_changed = if self.chance.one_in(2) { self.time_within(60_000_000) } else { Time::default() };
        let is_new = self.chance.one_in(2);
        let identity = RegionIdentity { id, list_changed, is_new, fence: self.random_fence() };
        let claim = match self.chance.below(3) {
            0 => IdentityClaim::Propose(id),
            _ => IdentityClaim::Remember { identity, is_settled: self.chance.one_in(2) },
        };
        let call = IdentityCall {
            claim,
            list: RegionListHash(self.small_id(2)),
            other_list_changed_ago_us: self.random_pause(),
            leased_until: if self.chance.one_in(2) { self.time_within(60_000_000) } else { Time::default() },
            jumped_ago_us: self.random_pause(),
            accepted: FencingToken(self.small_id(3)),
            proposal: FencingToken(self.small_id(3)),
        };
        let argument = encode_identity_call(&call, self.given_time());
        self.call("region identity", script::region_identity_script(), &[key("identity")], &[argument]);
    }

    fn random_pause(&mut self) -> Option<u64> {
        self.chance.one_in(4).then(|| self.chance.below(100_000_000))
    }

    fn report_region(&mut self) {
        let report = RegionReport {
            name: self.chance.pick(&["eu", "us", "asia"]),
            id: RegionRedisId(self.small_id(4)),
            fence: self.random_fence(),
            list: RegionListHash(self.small_id(2)),
            sent: if self.chance.one_in(5) { Time::default() } else { self.time_within(5_000_000) },
            lease_us: self.chance.pick(&[0, 1_000_000, 60_000_000]),
            jumped_ago_us: self.random_pause(),
        };
        let argument = encode_region_report(report, self.given_time());
        self.call("region members", script::global_members_script(), &[key("members")], &[argument]);
    }

    fn change_resets(&mut self) {
        let time = self.time_within(100_000_000);
        let counter =
            |number: u64| CounterToReset { key: format!("counter {number}").into(), period_ms: 1000 * number };
        let argument = match self.chance.below(3) {
            0 => encode_resets_read(time, self.given_time()),
            _ => {
                let counters: Vec<_> = (0..self.chance.between(1, 4)).map(counter).collect();
                encode_resets_addition(time, &counters, self.given_time())
            }
        };
        self.call("resets", script::global_resets_script(), &[key("resets")], &[argument]);
    }

    fn call_global_window(&mut self) {
        let number = self.chance.below(3);
        let pool = GlobalWindowParameters {
            period_us: [1_000_000, 60_000_000, 86_400_000_000][self.chance.place(3)],
            is_sliding: number == 1,
            max: self.chance.pick(&[5, 100, 4_000_000_000]),
        };
        let wanted = self.chance.pick(&[1, 7, 60, u32::MAX]);
        let window = self.now().as_micros() / pool.period_us + self.chance.below(3) - 1;
        let epoch = if self.chance.one_in(2) { Time::default() } else { self.time_within(10) };
        let action = match self.chance.below(8) {
            0 => GlobalWindowAction::Reset,
            1 | 2 => GlobalWindowAction::Return(ReturnedHits { window, hits: u64::from(wanted), epoch }),
            _ => GlobalWindowAction::Grant { wanted },
        };
        let argument = encode_global_window_call(pool, action, self.given_time());
        let key = format!("global window {number}").into();
        self.call("global window", script::global_window_script(), &[key], &[argument]);
    }

    fn call_global_bucket(&mut self) {
        let pool = GlobalBucketParameters {
            period_us: self.chance.pick(&[1_000_000, 60_000_000]),
            rate: self.chance.pick(&[1, 10, 1000, u32::MAX]),
            capacity: self.chance.pick(&[1, 20, 5000, u32::MAX]),
            prepaid_lifetime_us: self.chance.pick(&[1000, 2_000_000]),
        };
        let wanted = self.chance.pick(&[1, 7, 60, u32::MAX]);
        let action =
            if self.chance.one_in(8) { GlobalBucketAction::Reset } else { GlobalBucketAction::Grant { wanted } };
        let argument = encode_global_bucket_call(pool, action, self.given_time());
        let key = format!("global bucket {}", self.chance.below(2)).into();
        self.call("global bucket", script::global_bucket_script(), &[key], &[argument]);
    }

    /// Gives a grant to a counter of a region, takes hits back, or resets it.
    fn call_counter_of_region(&mut self, descriptors: &[Descriptor]) {
        let counters: Vec<(Bytes, Limit)> =
            descriptors.iter().flat_map(Descriptor::limits).filter(|(_, limit)| limit.is_counted_in_region()).collect();
        if counters.is_empty() {
            return;
        }
        let (key, limit) = &counters[self.chance.place(counters.len())];
        let (state, period_ms) = (self.numbers(key), limit.period_us() / 1000);
        if self.chance.one_in(8) {
            let argument = encode_counter_reset(period_ms, self.time_within(10_000_000));
            self.call("region reset", script::region_reset_script(), slice::from_ref(key), &[argument]);
        } else if limit.counting_method() == CountingMethod::RegionBucket {
            let grant = self.random_prepaid_hits(limit, &state);
            let argument = encode_prepaid_hits_grant(limit, &grant);
            self.call("region bucket grant", script::region_bucket_grant_script(), slice::from_ref(key), &[argument]);
        } else {
            let window = state.get(1).copied().unwrap_or(1).saturating_add(self.chance.below(2));
            let request = state.get(10).copied().unwrap_or_default();
            let grant = HitsGrant {
                request: if self.chance.one_in(6) { request.saturating_add(1) } else { request },
                window,
                epoch: if self.chance.one_in(4) { self.time_within(10).as_micros() } else { 0 },
                hits: self.chance.below(20),
                low: self.chance.below(5),
                exhausted: self.chance.one_in(3),
                next_request_at: self.time_within(1_000_000),
            };
            let argument = match self.chance.below(4) {
                0 => encode_hits_return(period_ms, window),
                _ => encode_hits_grant(period_ms, &grant),
            };
            self.call("region grant", script::region_grant_script(), slice::from_ref(key), &[argument]);
        }
    }

    fn random_prepaid_hits(&mut self, limit: &Limit, state: &[u64]) -> PrepaidHitsGrant {
        let request = state.get(13).copied().unwrap_or_default();
        PrepaidHitsGrant {
            request: if self.chance.one_in(6) { request.saturating_add(1) } else { request },
            epoch: if self.chance.one_in(4) { self.time_within(10).as_micros() } else { 0 },
            hits: self.chance.below(20),
            low: self.chance.below(5),
            start: self.time_within(2_000_000),
            end: self.now().plus_us(self.chance.below(limit.period_us())),
            exhausted: self.chance.one_in(3),
            next_request_at: self.time_within(1_000_000),
        }
    }

    fn charge_window_in_ratelimit_format(&mut self) {
        let mut keys = vec![Bytes::from(format!("ratelimit {}", self.chance.below(3)))];
        if self.chance.one_in(3) {
            self.command(&[b"SET", b"ratelimit reserved", b"2", b"PX", b"5000"]);
            keys.push(key("ratelimit reserved"));
        }
        let mut arguments = vec![Bytes::from(self.chance.between(1, 100).to_string())];
        for _ in 0..self.chance.between(1, 4) {
            let hits = self.chance.pick(&["1", "5", "-1", "-3", "1000000000", "-1000000000"]);
            arguments.push(key(hits));
        }
        self.call("window in ratelimit's format", script::window_charges_script(), &keys, &arguments);
    }
}

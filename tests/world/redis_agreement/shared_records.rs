//! Scripts that charge by no counting method: registries of replicas and holders, pools of regions, and counters in the
//! key format of envoyproxy/ratelimit.

use std::slice;

use bytes::{BufMut, Bytes, BytesMut};
use tollkeeper::limit::Limit;
use tollkeeper::limit::algorithm::region_pool::{LastAnswer, PoolGrant};
use tollkeeper::store::redis::regions::exchange::{PoolOperation, encode_pool_operation};
use tollkeeper::store::redis::replicas::{ClaimAction, ProcessId, encode_claim_argument};
use tollkeeper::store::redis::script::{self, put_time};

use super::charges::Descriptor;
use super::script_calls::ScriptCalls;

const fn key(name: &'static str) -> Bytes {
    Bytes::from_static(name.as_bytes())
}

impl ScriptCalls {
    /// Makes a random call of a script that charges by no counting method.
    pub(crate) fn call_shared_record(&mut self, descriptors: &[Descriptor]) {
        match self.chance.below(6) {
            0 => self.claim_replica_place(),
            1 => self.exchange_holders(),
            2 | 3 => self.operate_on_pool(descriptors),
            4 => self.charge_window_in_ratelimit_format(),
            _ => {
                self.call("global probe", script::global_probe_script(), &[key("probe")], &[Bytes::new()]);
            }
        }
    }

    fn small_id<const BYTES: usize>(&mut self, count: u64) -> [u8; BYTES] {
        [u8::try_from(self.chance.below(count)).expect("a small number"); BYTES]
    }

    fn claim_replica_place(&mut self) {
        let owner = ProcessId(self.small_id(5));
        let places = self.chance.pick(&[3, 3, 3, 1, 8]);
        let action = if self.chance.one_in(6) { ClaimAction::Release } else { ClaimAction::Claim };
        let argument = encode_claim_argument(owner, places, action, self.given_time());
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

    /// Gives an answer to a pool of a region, checks at it, or opens a request that gives hits back.
    fn operate_on_pool(&mut self, descriptors: &[Descriptor]) {
        let pools: Vec<(Bytes, Limit)> = descriptors.iter().flat_map(Descriptor::pools).collect();
        if pools.is_empty() {
            return;
        }
        let (key, limit) = &pools[self.chance.place(pools.len())];
        let number = self.numbers(key).get(5).copied().unwrap_or_default();
        let number = if self.chance.one_in(6) { number.saturating_add(1) } else { number };
        let grant = PoolGrant {
            number,
            held: self.chance.below(20),
            until: self.now().plus_us(self.chance.below(limit.period_us())),
            low: self.chance.below(5),
            next_request_at: self.time_within(1_000_000),
            answer: LastAnswer { room: self.chance.below(100), window_end: self.now(), ..LastAnswer::default() },
        };
        let change = match self.chance.below(4) {
            0 => PoolOperation::Read,
            1 => PoolOperation::RequestKeeping(self.chance.below(10)),
            _ => PoolOperation::Accept(&grant),
        };
        let argument = Bytes::from(encode_pool_operation(self.given_time(), number, change));
        self.call("pool of a region", script::pool_exchange_script(), slice::from_ref(key), &[argument]);
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

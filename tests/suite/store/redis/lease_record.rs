//! Scripts and the model of a Redis agree on leases: on the record, on what refunds, returns and resets leave charged.

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{TestCaseResult, TestRunner};
use redis::{Value, cmd, from_redis_value};
use smallvec::SmallVec;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::store::charge::{OwnedCharge, OwnedCounter};
use tollkeeper::store::redis::eventual::{LeaseArguments, LeasePurpose, OwnLease, StoredLease, build_full_refund};
use tollkeeper::store::redis::script::{CallTime, encode_charges, replay_charges, script_for_countings};

use super::agreement::Redis;
use super::eventual_model::redis::StoredCounters;
use crate::limit::algorithms::scenario;
use kit::redis::options;

/// One call, `after_us` after the one before it.
#[derive(Clone, Debug)]
struct Call {
    after_us: u64,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    /// Hits are charged, and a lease of other hits, which is recorded for a time in microseconds.
    Lease(u64, u64, u64),
    /// Hits are refunded, while the caller has admitted some hits of its leases.
    Refund(u64, Vec<(Index, u64)>),
    /// Some hits of a lease are returned; the lease is void from some time on.
    Return(Index, u64, Option<u64>),
    /// The counters are reset, and some leases end.
    Reset(Vec<Index>),
}

fn call() -> impl Strategy<Value = Call> {
    let kind = prop_oneof![
        4 => (0..40_u64, 1..60_u64, 1..1_200_000_u64).prop_map(|(hits, leased, kept)| Kind::Lease(hits, leased, kept)),
        2 => (1..150_u64, proptest::collection::vec((any::<Index>(), 0..60_u64), 0..3))
            .prop_map(|(hits, own)| Kind::Refund(hits, own)),
        2 => (any::<Index>(), 1..60_u64, proptest::option::of(0..2_000_000_u64))
            .prop_map(|(lease, hits, void)| Kind::Return(lease, hits, void)),
        1 => proptest::collection::vec(any::<Index>(), 0..3).prop_map(Kind::Reset),
    ];
    (prop_oneof![0..1000_u64, 0..400_000_u64], kind).prop_map(|(after_us, kind)| Call { after_us, kind })
}

fn counters() -> impl Strategy<Value = Vec<OwnedCounter>> {
    const ALGORITHMS: [Algorithm; 4] =
        [Algorithm::TokenBucket, Algorithm::FixedWindow, Algorithm::SlidingWindowLog, Algorithm::SlidingWindowCounter];
    let counter = (proptest::sample::select(&ALGORITHMS[..]), 1..200_u32, 1..5_u32, proptest::bool::weighted(0.8));
    let counter = counter.prop_map(|(algorithm, requests, seconds, enforced)| {
        let spec = LimitSpec::new(algorithm, requests.into(), Period::new(Unit::Second, seconds).unwrap());
        let limit = Limit::new(&LimitSpec { count_rejected: Some(false), ..spec }).unwrap();
        OwnedCounter { limit, shadow: !enforced, quota: false, tag: 0 }
    });
    proptest::collection::vec(counter, 1..=3)
}

impl Kind {
    /// Commands of the call, and what it says of leases. `granted` are all leases so far.
    fn of(
        &self,
        counters: &SmallVec<[OwnedCounter; 1]>,
        granted: &[StoredLease],
        now: Time,
    ) -> (Vec<OwnedCharge>, LeaseArguments) {
        let command = |hits| OwnedCharge::new(counters.clone(), ChargeRequest::new(hits, 0));
        let own = |leases: Vec<(Index, u64)>| {
            let mut own: SmallVec<[OwnLease; 2]> = SmallVec::new();
            for (index, done) in leases.into_iter().filter(|_| !granted.is_empty()) {
                let lease = *index.get(granted);
                if own.iter().all(|it| it.lease != lease) {
                    own.push(OwnLease { lease, done: done.min(lease.hits) });
                }
            }
            own
        };
        match self.clone() {
            Self::Lease(hits, requested, kept_us) => {
                let lease =
                    LeaseArguments { purpose: LeasePurpose::Charge { requested, kept_us }, own: SmallVec::new() };
                (vec![command(Hits::new(hits, false)), command(Hits::Charge(requested))], lease)
            }
            Self::Refund(hits, leases) => {
                let purpose = LeasePurpose::Charge { requested: 0, kept_us: 0 };
                (vec![command(Hits::Refund(hits))], LeaseArguments { purpose, own: own(leases) })
            }
            Self::Return(index, hits, void_us) => {
                let void_from = void_us.map(|after_us| now.plus_us(after_us));
                let refund = OwnedCharge { void_from, ..command(Hits::Refund(hits)) };
                let own = own(vec![(index, u64::MAX)]);
                (vec![refund], LeaseArguments { purpose: LeasePurpose::Return, own })
            }
            Self::Reset(leases) => {
                let own = own(leases.into_iter().map(|index| (index, u64::MAX)).collect());
                (vec![build_full_refund(counters.clone())], LeaseArguments { purpose: LeasePurpose::Reset, own })
            }
        }
    }
}

/// Calls the script of the counters at `now`.
fn eval(redis: &mut Redis, keys: &[String], commands: &[OwnedCharge], leases: &LeaseArguments, now: Time) -> Value {
    let script = script_for_countings(commands[0].counters.iter().map(|counter| counter.limit.algorithm()));
    let mut command = cmd("EVAL");
    command.arg(&script.text).arg(keys.len()).arg(keys);
    command.arg(&encode_charges(commands, CallTime::Given(now))[..]).arg(&leases.encode()[..]);
    let reply = command.query(&mut redis.connection).expect("a script that fails has a mistake");
    redis.lives(keys);
    reply
}

/// Runs calls on new keys of a Redis and on the model.
fn run(redis: &mut Redis, counters: Vec<OwnedCounter>, calls: &[Call]) -> TestCaseResult {
    let keys = redis.new_keys(counters.len() + 1);
    let (record, counter_keys) = keys.split_last().unwrap();
    let counters = SmallVec::from_vec(counters);
    let mut model = StoredCounters::new(&counters);
    let (mut now, mut granted) = (Time::from_secs(1_767_225_600), Vec::new());
    for Call { after_us, kind } in calls {
        now = now.plus_us(*after_us);
        let (commands, leases) = kind.of(&counters, &granted, now);
        let reply = eval(redis, &keys, &commands, &leases, now);
        let (results, leased) = model.call(&commands, Some(&leases), now);
        if leases.purpose == LeasePurpose::Reset {
            prop_assert!(matches!(reply, Value::Int(_)), "{:?}", reply);
        } else {
            let outcome = replay_charges(&commands, &from_redis_value::<Vec<u8>>(reply).unwrap(), true).unwrap();
            prop_assert_eq!(&outcome.results, &results, "{:?}, {} leased", kind, leased);
        }
        if let LeasePurpose::Charge { requested: 1.., .. } = leases.purpose {
            granted.extend(model.record.last());
        }
        let stored: Option<Vec<u8>> = cmd("GET").arg(record).query(&mut redis.connection).unwrap();
        let recorded = model.record.iter().flat_map(|it| [it.end.as_micros(), it.hits]);
        let recorded: Vec<u8> = recorded.flat_map(u64::to_le_bytes).collect();
        prop_assert!(stored.unwrap_or_default() == recorded, "{:?} is not recorded after {:?}", model.record, kind);
        for (index, key) in counter_keys.iter().enumerate() {
            let found = redis.state(key, counters[index].limit.algorithm());
            let state = found.unwrap_or_else(|| State::empty(counters[index].limit.algorithm()));
            prop_assert_eq!(&state, &model.states[index], "{:?}, {} leased", kind, leased);
        }
    }
    Ok(())
}

#[test]
fn script_records_leases_like_the_model() {
    let server = options().start();
    let redis = RefCell::new(Redis::new(&server));
    let config = ProptestConfig { source_file: Some(file!()), ..scenario::config() };
    let histories = (counters(), proptest::collection::vec(call(), 1..30));
    let outcome =
        TestRunner::new(config).run(&histories, |(counters, calls)| run(&mut redis.borrow_mut(), counters, &calls));
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn record_of_more_than_256_leases_keeps_all_hits() {
    let server = options().start();
    let mut redis = Redis::new(&server);
    let spec = LimitSpec::new(Algorithm::FixedWindow, 1000, Period::new(Unit::Day, 1).unwrap());
    let counters =
        SmallVec::from_iter([OwnedCounter { limit: Limit::new(&spec).unwrap(), shadow: false, quota: false, tag: 0 }]);
    let (keys, now) = (redis.new_keys(2), Time::from_secs(1_767_225_600));
    let mut send = |kind: Kind| {
        let (commands, leases) = kind.of(&counters, &[], now);
        (eval(&mut redis, &keys, &commands, &leases, now), commands)
    };
    for _ in 0..300 {
        send(Kind::Lease(0, 2, 1_000_000));
    }
    let (reply, commands) = send(Kind::Refund(10_000, Vec::new()));
    let outcome = replay_charges(&commands, &from_redis_value::<Vec<u8>>(reply).unwrap(), true).unwrap();
    assert_eq!((outcome.results[0][0].before, outcome.results[0][0].after), (600, 600));
    let record: Vec<u8> = cmd("GET").arg(&keys[1]).query(&mut redis.connection).unwrap();
    assert_eq!(record.len(), 256 * 16);
}

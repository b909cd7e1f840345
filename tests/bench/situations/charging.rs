//! A charge on counters in memory, with the hash of its path.

use std::hint::black_box;
use std::sync::Arc;

use smallvec::smallvec;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::{Algorithm, HitExpiry};
use tollkeeper::limit::charge::{Charge, ChargeRequest, Counter};
use tollkeeper::limit::counter_path::CounterPath;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::rules::rule::set::hash_limit_identity;
use tollkeeper::store::memory::MemoryStore;

use super::{BEGIN, CAPACITY_BYTES, DOMAIN, Situation, Walk};

/// Charges one hit to each key in turn.
///
/// All hits are admitted, and no counter becomes empty. Clones share the counters.
#[derive(Clone)]
pub(crate) struct Charging {
    memory: Arc<MemoryStore>,
    limit: Limit,
    tag: u128,
    now: Time,
    step_us: u64,
    /// Position among the keys.
    pub(crate) walk: Walk,
}

impl Charging {
    /// Charges by an algorithm, on `keys` keys.
    pub(crate) fn new(algorithm: Algorithm, keys: usize) -> Self {
        let count = u32::try_from(keys).expect("there are few");
        let (requests_per_unit, step_us) = match algorithm.properties().hit_expiry {
            // Buckets drain at half the rate of the charges, so that they are never empty.
            HitExpiry::Continuous => (30_000_000 / count, 1),
            HitExpiry::WithWindow => (4_000_000_000, 1),
            // Eight charges a minute, so that a log has eight records.
            HitExpiry::AfterPeriod => (10, 7_500_000 / u64::from(count)),
        };
        Self::of((algorithm, requests_per_unit), step_us, keys)
    }

    /// Charges one key's log, which has `records` records of the last minute.
    pub(crate) fn long_log(records: u32) -> Self {
        Self::of((Algorithm::SlidingWindowLog, records + 1), 60_000_000 / u64::from(records), 1)
    }

    fn of((algorithm, requests_per_unit): (Algorithm, u32), step_us: u64, keys: usize) -> Self {
        let room = u32::MAX / 2;
        let spec = LimitSpec {
            bucket_size: (algorithm == Algorithm::TokenBucket).then_some(room),
            queue_size: (algorithm == Algorithm::LeakyBucket).then_some(room),
            ..LimitSpec::new(algorithm, requests_per_unit.into(), Period::new(Unit::Minute, 1).expect("it is a period"))
        };
        let limit = Limit::new(&spec).expect("it is a limit");
        let mut situation = Self {
            memory: Arc::new(MemoryStore::new(CAPACITY_BYTES)),
            limit,
            tag: hash_limit_identity(&limit, 0),
            now: BEGIN,
            step_us,
            walk: Walk::over(keys),
        };
        // Counters lie in memory in the order of creation, which is not the order of the charges.
        assert!((0..keys).all(|key| situation.charges(key)), "all are admitted");
        let mut situation = situation.warmed();
        assert!((0..2000).all(|charge| situation.charges(charge % keys)), "all are admitted");
        assert_eq!(situation.memory.memory_usage().counters, keys as u64);
        situation
    }

    /// Charges a key; true if the charge is admitted.
    fn charges(&mut self, key: usize) -> bool {
        self.now = self.now.plus_us(self.step_us);
        let entries = [Entry { key: b"user", value: &key.to_be_bytes() }];
        let path = CounterPath { domain: DOMAIN, entries: black_box(&entries), shared: &[], candidate: None };
        let counter = Counter { limit: &self.limit, shadow: false, quota: false, tag: self.tag, epoch: 0 };
        let charge = Charge::new(path, smallvec![counter], ChargeRequest::new(Hits::Charge(1), u64::MAX));
        black_box(self.memory.charge(black_box(&charge), self.now)).is_ok_and(|levels| levels[0].admitted)
    }
}

impl Situation for Charging {
    fn step(&mut self) {
        let key = self.walk.next();
        black_box(self.charges(key));
    }

    fn inputs(&self) -> usize {
        self.walk.positions
    }
}

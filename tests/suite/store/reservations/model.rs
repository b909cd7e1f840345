//! Reservations against a model that knows the true cost of each request: no history admits more than the limit.
//!
//! The model repeats all requests with what each of them costs as far as is known: the estimate until it is settled,
//! then the cost, at the time of the request; what exceeds the estimate at the time of the settlement; nothing once it
//! is over, if the rule gives it back. A request that the counter admits must fit in the model too. Windows that keep
//! the estimate must agree with it exactly.

use std::collections::BTreeMap;

use tollkeeper::base::clock::Time;
use tollkeeper::limit::Limit;
use tollkeeper::limit::algorithm::fixed_window::window_bounds;
use tollkeeper::limit::charge::ChargeResult;
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::reservation::UnsettledPolicy;
use tollkeeper::limit::slot::SlotChange;
use tollkeeper::store::memory::MemoryStore;

use super::steps::{Kind, SETTLE_WITHIN_S, Step, Steps, charge_of, reserving_limit};

/// A cost, as far as it is known.
#[derive(Clone, Copy, Debug)]
struct Cost {
    at: Time,
    hits: u64,
}

/// All costs so far, in the order of time, and the place of the open estimate of each stream.
#[derive(Default)]
struct Model {
    costs: Vec<Cost>,
    open: BTreeMap<u128, usize>,
    /// Time at which the reservation of each stream is over.
    ends: BTreeMap<u128, Time>,
}

impl Model {
    /// Forgets reservations that are over.
    fn give_back_unsettled(&mut self, now: Time) {
        let over: Vec<u128> = self.ends.iter().filter(|(_, end)| **end <= now).map(|(id, _)| *id).collect();
        for id in over {
            self.ends.remove(&id);
            if let Some(place) = self.open.remove(&id) {
                self.costs[place].hits = 0;
            }
        }
    }

    fn record(&mut self, step: &Step, result: &ChargeResult) {
        let id = step.slot.id.0;
        if matches!(result.slot, SlotChange::Taken | SlotChange::Renewed) {
            self.ends.insert(id, step.now.plus_us(u64::from(SETTLE_WITHIN_S) * 1_000_000));
        }
        match (step.hits, result.slot) {
            (Hits::Charge(hits), SlotChange::Taken) => {
                self.open.insert(id, self.costs.len());
                self.costs.push(Cost { at: step.now, hits });
            }
            (Hits::Refund(cost), SlotChange::Freed) => {
                let place = self.open.remove(&id).expect("only an open reservation is settled");
                let known = &mut self.costs[place];
                let beyond = cost.saturating_sub(known.hits);
                assert_eq!(result.above_estimate, beyond, "{step:?}");
                known.hits = known.hits.min(cost);
                self.costs.push(Cost { at: step.now, hits: beyond });
            }
            (Hits::Refund(cost), SlotChange::ReleasedEarly) => self.costs.push(Cost { at: step.now, hits: cost }),
            _ => {}
        }
    }

    /// Hits that count at `now`.
    fn used(&self, kind: Kind, limit: &Limit, now: Time) -> u64 {
        let period = limit.period_us();
        let sum =
            |counts: &dyn Fn(&Cost) -> bool| self.costs.iter().filter(|cost| counts(cost)).map(|cost| cost.hits).sum();
        match kind {
            Kind::Fixed | Kind::Calendar | Kind::Months => {
                let start = window_bounds(limit, now).0;
                sum(&|cost| cost.at >= start)
            }
            Kind::Log => sum(&|cost| now.since_us(cost.at) < period),
            Kind::SlidingCounter => {
                let window = now.as_micros() / period;
                let current: u64 = sum(&|cost| cost.at.as_micros() / period == window);
                let previous: u64 = sum(&|cost| cost.at.as_micros() / period + 1 == window);
                current + previous * (period - now.as_micros() % period) / period
            }
            Kind::Bucket => {
                let (mut units, mut last) = (0_u128, Time::default());
                for cost in &self.costs {
                    units = units
                        .saturating_sub(u128::from(cost.at.since_us(last)) * u128::from(limit.requests_per_unit()));
                    units += u128::from(cost.hits) * u128::from(period);
                    last = cost.at;
                }
                units = units.saturating_sub(u128::from(now.since_us(last)) * u128::from(limit.requests_per_unit()));
                u64::try_from(units.div_ceil(u128::from(period))).unwrap()
            }
        }
    }
}

/// Repeats histories on a counter in memory; returns the requests that were taken, settled and rejected.
fn check_histories(kind: Kind, unsettled: UnsettledPolicy, seeds: std::ops::Range<u64>) -> [u32; 3] {
    let (mut taken, mut settled, mut rejected) = (0, 0, 0);
    for seed in seeds {
        let memory = MemoryStore::new(64 << 20);
        let (mut steps, mut model) = (Steps::new(seed, kind), Model::default());
        let entries = [Entry { key: b"k", value: b"v" }];
        for turn in 0..300 {
            let mut step = steps.next_step();
            // The debt of a log ends at its limit, so what is given back after that is not comparable.
            if let (Kind::Log, Hits::Refund(cost)) = (kind, step.hits) {
                let reserved = model.open.get(&step.slot.id.0).map_or(0, |place| model.costs[*place].hits);
                step.hits = Hits::Refund(cost.min(reserved));
            }
            // The model of a bucket knows one rate.
            let limit = reserving_limit(kind, 60, unsettled, None);
            if unsettled == UnsettledPolicy::Return {
                model.give_back_unsettled(step.now);
            }
            let before = model.used(kind, &limit, step.now);
            let results = memory.charge(&charge_of(&step, &[limit], &entries), step.now).expect("there is room");
            let (result, at) = (results[0], format!("{kind:?}, seed {seed}, turn {turn}: {step:?}"));
            if let (Hits::Charge(hits), SlotChange::Taken) = (step.hits, result.slot) {
                assert!(before + hits <= 60, "{before} are used, and {hits} were admitted: {at}");
                taken += 1;
            }
            if let (Hits::Charge(hits), false, SlotChange::None) = (step.hits, result.admitted, result.slot) {
                rejected += 1;
                let is_window = matches!(kind, Kind::Fixed | Kind::Calendar | Kind::Months);
                let is_exact = is_window && unsettled == UnsettledPolicy::Keep;
                assert!(!is_exact || before + hits > 60, "{before} are used, and {hits} were rejected: {at}");
            }
            settled += u32::from(result.slot == SlotChange::Freed);
            model.record(&step, &result);
        }
    }
    [taken, settled, rejected]
}

#[test]
fn no_history_admits_more_than_the_limit() {
    for kind in Kind::ALL {
        for unsettled in [UnsettledPolicy::Keep, UnsettledPolicy::Return] {
            let [taken, settled, rejected] = check_histories(kind, unsettled, 0..kit::histories(20));
            assert!(taken > 100 && settled > 50 && rejected > 33, "{kind:?}: {taken} {settled} {rejected}");
        }
    }
}

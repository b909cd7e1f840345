//! Charges for all descriptors of a request, from counters in this process or in Redis.
//!
//! Both ways are the same but for who is asked and when: from memory one descriptor after the other, from Redis all at
//! once, so that they cost one round trip. Under STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT it is first found out whether
//! any descriptor would refuse; if so, those that would pass only look, and are not charged for a request that fails.

use smallvec::SmallVec;

use super::selection::Selection;
use super::{Decider, DecisionContext, Outcome};
use crate::clock::Time;
use crate::counter::Charge;
use crate::limit::StorePolicy;
use crate::redis::error::RedisError;
use crate::request::{Hits, Request};
use crate::store::fallback::Fallback;
use crate::store::memory::Memory;
use crate::store::redis::charge_context::ChargeContext;
use crate::store::redis::{ChargeMode, ChargeResults, Redis};
use crate::store::{ChargeError, StoreOutcome};

/// What came of the charges of a request, one for each descriptor.
type Outcomes = SmallVec<[Outcome; 2]>;
/// A request, and what decides each of its descriptors.
type Question<'q, 'a, 'r> = (&'q Request<'a>, &'q [Selection<'r>]);

impl Decider {
    /// Charges from counters in this process.
    pub(super) fn charge(
        &self,
        memory: &Memory,
        context: DecisionContext<'_>,
        question: Question<'_, '_, '_>,
    ) -> Outcomes {
        let (request, selections) = question;
        let charge = |place: usize| selections[place].charge((request, place), context.max_delay_us);
        // Each is tried before any is charged, as if it were alone.
        let tried = self.behaviour.stop_cache_key_increment_when_overlimit;
        let tried: SmallVec<[Option<bool>; 2]> = (0..selections.len())
            .filter(|_| tried)
            .map(|place| Some(memory.admits(&charge(place)?, context.now)))
            .collect();
        let spares = tried.contains(&Some(false));
        let outcome = |(place, selection): (usize, &Selection<'_>)| {
            let Some(mut charge) = charge(place) else { return Outcome::Free };
            if spares && tried[place] == Some(true) {
                only_look(&mut charge);
            }
            match memory.charge(&charge, context.now) {
                Ok(levels) => charged(question, place, StoreOutcome::by_store(levels)),
                Err(full) => {
                    let spill = |charge: &Charge<'_>| memory.charge_spilled(charge, context.now);
                    self.by_policy(full.into(), (selection, &charge), context.now, spill)
                }
            }
        };
        selections.iter().enumerate().map(outcome).collect()
    }

    /// Charges from counters in Redis.
    pub(super) async fn charge_shared(
        &self,
        redis: &Redis,
        context: DecisionContext<'_>,
        question: Question<'_, '_, '_>,
    ) -> Outcomes {
        let (request, selections) = question;
        let mut outcomes: Outcomes = selections.iter().map(|_| Outcome::Free).collect();
        let mut asked: SmallVec<[usize; 2]> = SmallVec::new();
        let mut charges: SmallVec<[Charge<'_>; 2]> = SmallVec::new();
        for (place, selection) in selections.iter().enumerate() {
            if let Some(charge) = selection.charge((request, place), context.max_delay_us) {
                asked.push(place);
                charges.push(charge);
            }
        }
        let fail = |(place, charge): (usize, &Charge<'_>), error: RedisError| {
            self.by_policy(error.into(), (&selections[place], charge), context.now, |charge| {
                redis.local().charge(charge, context.now)
            })
        };
        if self.behaviour.stop_cache_key_increment_when_overlimit {
            let trials = ask(redis, &charges, ChargeMode::DryRun, context).await;
            let passes: SmallVec<[bool; 2]> = asked
                .iter()
                .zip(&charges)
                .zip(&trials)
                .map(|((place, charge), trial)| {
                    would_pass(&selections[*place], charge, trial, (redis.local(), context.now))
                })
                .collect();
            if passes.contains(&false) {
                charges
                    .iter_mut()
                    .zip(&passes)
                    .filter(|(_, passes)| **passes)
                    .for_each(|(charge, _)| only_look(charge));
            }
            // Those that failed on trial are not tried again: policy has them.
            for at in (0..charges.len()).rev() {
                if let Err(error) = trials[at] {
                    let place = asked.remove(at);
                    outcomes[place] = fail((place, &charges.remove(at)), error);
                }
            }
        }
        let results = ask(redis, &charges, ChargeMode::Commit, context).await;
        for ((place, charge), result) in asked.into_iter().zip(&charges).zip(results) {
            outcomes[place] = match result {
                Ok(found) => charged(question, place, found),
                Err(error) => fail((place, charge), error),
            };
        }
        outcomes
    }

    /// What becomes of a charge that the store failed. Refunds, looks and trials are never refused.
    fn by_policy(
        &self,
        error: ChargeError,
        (selection, charge): (&Selection<'_>, &Charge<'_>),
        now: Time,
        stand_in: impl FnOnce(&Charge<'_>) -> ChargeResults,
    ) -> Outcome {
        let policy = selection.store_policy(charge.request.hits);
        self.failures.note(error, policy, now);
        if policy != StorePolicy::Local {
            return Outcome::Failed(policy);
        }
        let mut levels = stand_in(charge);
        if charge.request.hits == Hits::Peek {
            levels.iter_mut().for_each(|level| level.admitted = true);
        }
        Outcome::Fallback(levels)
    }
}

/// Asks Redis, if the caller leaves time for that.
pub(super) async fn ask(
    redis: &Redis,
    charges: &[Charge<'_>],
    mode: ChargeMode,
    context: DecisionContext<'_>,
) -> SmallVec<[Result<StoreOutcome, RedisError>; 2]> {
    match context.until {
        Some(until) if !charges.is_empty() => {
            redis.charge_all(charges, mode, ChargeContext { now: context.now, until, span_ref: context.span_ref }).await
        }
        _ => charges.iter().map(|_| Err(RedisError::NoTime)).collect(),
    }
}

/// Whether a charge that was tried would pass; one that failed, by the policy that it falls to.
fn would_pass(
    selection: &Selection<'_>,
    charge: &Charge<'_>,
    trial: &Result<StoreOutcome, RedisError>,
    (local, now): (&Fallback, Time),
) -> bool {
    match (trial, selection.store_policy(charge.request.hits)) {
        // A trial that would refuse spares the others too, as in the program replaced.
        (Ok(found), _) => found.levels.iter().all(|level| level.admitted),
        (Err(_), StorePolicy::Allow) => true,
        (Err(_), StorePolicy::Local) => local.admits(charge, now),
        (Err(_), StorePolicy::Deny | StorePolicy::Error) => false,
    }
}

/// Spares a counter the hits of a request that another refuses.
const fn only_look(charge: &mut Charge<'_>) {
    if matches!(charge.request.hits, Hits::Charge(_)) {
        charge.request.hits = Hits::Peek;
    }
}

fn charged((request, selections): Question<'_, '_, '_>, place: usize, found: StoreOutcome) -> Outcome {
    selections[place].notice_reports(request.descriptors[place].hits, &found.levels);
    Outcome::Charged(found)
}

//! Draws for all descriptors of a request, from counters in this process or in Redis.
//!
//! Both ways are the same but for who is asked and when: from memory one descriptor after the other, from Redis all at
//! once, so that they cost one round trip. Under STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT it is first found out whether
//! any descriptor would refuse; if so, those that would pass only look, and are not charged for a request that fails.

use smallvec::SmallVec;

use super::selection::Selection;
use super::{Decider, Edge, Outcome};
use crate::clock::Time;
use crate::counter::Draw;
use crate::limit::StorePolicy;
use crate::request::{Hits, Request};
use crate::store::local::Local;
use crate::store::memory::Memory;
use crate::store::redis::failure::RedisError;
use crate::store::redis::occasion::Occasion;
use crate::store::redis::{Levels, Purpose, Redis};
use crate::store::{DrawError, Drawn};

/// What came of the draws of a request, one for each descriptor.
type Outcomes = SmallVec<[Outcome; 2]>;
/// A request, and what decides each of its descriptors.
type Question<'q, 'a, 'r> = (&'q Request<'a>, &'q [Selection<'r>]);

impl Decider {
    /// Draws from counters in this process.
    pub(super) fn draw(&self, memory: &Memory, edge: Edge<'_>, question: Question<'_, '_, '_>) -> Outcomes {
        let (request, selections) = question;
        let draw = |place: usize| selections[place].draw((request, place), edge.hold_us);
        // Each is tried before any is drawn, as if it were alone.
        let tried = self.behaviour.stop_cache_key_increment_when_overlimit;
        let tried: SmallVec<[Option<bool>; 2]> =
            (0..selections.len()).filter(|_| tried).map(|place| Some(memory.admits(&draw(place)?, edge.now))).collect();
        let spares = tried.contains(&Some(false));
        let outcome = |(place, selection): (usize, &Selection<'_>)| {
            let Some(mut draw) = draw(place) else { return Outcome::Free };
            if spares && tried[place] == Some(true) {
                only_look(&mut draw);
            }
            match memory.draw(&draw, edge.now) {
                Ok(levels) => drawn(question, place, Drawn::by_store(levels)),
                Err(full) => {
                    let spill = |draw: &Draw<'_>| memory.draw_spilled(draw, edge.now);
                    self.by_policy(full.into(), (selection, &draw), edge.now, spill)
                }
            }
        };
        selections.iter().enumerate().map(outcome).collect()
    }

    /// Draws from counters in Redis.
    pub(super) async fn draw_shared(&self, redis: &Redis, edge: Edge<'_>, question: Question<'_, '_, '_>) -> Outcomes {
        let (request, selections) = question;
        let mut outcomes: Outcomes = selections.iter().map(|_| Outcome::Free).collect();
        let mut asked: SmallVec<[usize; 2]> = SmallVec::new();
        let mut draws: SmallVec<[Draw<'_>; 2]> = SmallVec::new();
        for (place, selection) in selections.iter().enumerate() {
            if let Some(draw) = selection.draw((request, place), edge.hold_us) {
                asked.push(place);
                draws.push(draw);
            }
        }
        let fail = |(place, draw): (usize, &Draw<'_>), error: RedisError| {
            self.by_policy(error.into(), (&selections[place], draw), edge.now, |draw| {
                redis.local().draw(draw, edge.now)
            })
        };
        if self.behaviour.stop_cache_key_increment_when_overlimit {
            let trials = ask(redis, &draws, Purpose::Trial, edge).await;
            let passes: SmallVec<[bool; 2]> = asked
                .iter()
                .zip(&draws)
                .zip(&trials)
                .map(|((place, draw), trial)| would_pass(&selections[*place], draw, trial, (redis.local(), edge.now)))
                .collect();
            if passes.contains(&false) {
                draws.iter_mut().zip(&passes).filter(|(_, passes)| **passes).for_each(|(draw, _)| only_look(draw));
            }
            // Those that failed on trial are not tried again: policy has them.
            for at in (0..draws.len()).rev() {
                if let Err(error) = trials[at] {
                    let place = asked.remove(at);
                    outcomes[place] = fail((place, &draws.remove(at)), error);
                }
            }
        }
        let results = ask(redis, &draws, Purpose::Charge, edge).await;
        for ((place, draw), result) in asked.into_iter().zip(&draws).zip(results) {
            outcomes[place] = match result {
                Ok(found) => drawn(question, place, found),
                Err(error) => fail((place, draw), error),
            };
        }
        outcomes
    }

    /// What becomes of a draw that the store failed. Refunds, looks and trials are never refused.
    fn by_policy(
        &self,
        error: DrawError,
        (selection, draw): (&Selection<'_>, &Draw<'_>),
        now: Time,
        stand_in: impl FnOnce(&Draw<'_>) -> Levels,
    ) -> Outcome {
        let policy = selection.store_policy(draw.ask.hits);
        self.failures.note(error, policy, now);
        if policy != StorePolicy::Local {
            return Outcome::Failed(policy);
        }
        let mut levels = stand_in(draw);
        if draw.ask.hits == Hits::Look {
            levels.iter_mut().for_each(|level| level.admitted = true);
        }
        Outcome::StoodIn(levels)
    }
}

/// Asks Redis, if the caller leaves time for that.
pub(super) async fn ask(
    redis: &Redis,
    draws: &[Draw<'_>],
    purpose: Purpose,
    edge: Edge<'_>,
) -> SmallVec<[Result<Drawn, RedisError>; 2]> {
    match edge.until {
        Some(until) if !draws.is_empty() => {
            redis.draw_all(draws, purpose, Occasion { now: edge.now, until, anchor: edge.anchor }).await
        }
        _ => draws.iter().map(|_| Err(RedisError::NoTime)).collect(),
    }
}

/// Whether a draw that was tried would pass; one that failed, by the policy that it falls to.
fn would_pass(
    selection: &Selection<'_>,
    draw: &Draw<'_>,
    trial: &Result<Drawn, RedisError>,
    (local, now): (&Local, Time),
) -> bool {
    match (trial, selection.store_policy(draw.ask.hits)) {
        // A trial that would refuse spares the others too, as in the program replaced.
        (Ok(found), _) => found.levels.iter().all(|level| level.admitted),
        (Err(_), StorePolicy::Allow) => true,
        (Err(_), StorePolicy::Local) => local.admits(draw, now),
        (Err(_), StorePolicy::Deny | StorePolicy::Error) => false,
    }
}

/// Spares a counter the hits of a request that another refuses.
const fn only_look(draw: &mut Draw<'_>) {
    if matches!(draw.ask.hits, Hits::Take(_)) {
        draw.ask.hits = Hits::Look;
    }
}

fn drawn((request, selections): Question<'_, '_, '_>, place: usize, found: Drawn) -> Outcome {
    selections[place].notice_reports(request.descriptors[place].hits, &found.levels);
    Outcome::Drawn(found)
}

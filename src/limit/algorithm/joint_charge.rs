//! A charge on all limits of a descriptor at once.
//!
//! The limits of an overflow (`limit::overflow`) divide the hits of a charge. Each takes as many as it would admit alone.
//! A refund goes the other way: the last limit gives back what it has counted, then the one before it. A peek passes if
//! one of them has room for a hit.
//!
//! Decides: whether the other limits of a descriptor are charged if one rejects (`charge_together`).
//! Decides: which limits of an overflow are charged and refunded, with how many hits; when a rejected charge could pass.

use smallvec::SmallVec;

use super::state::State;
use crate::base::clock::Time;
use crate::limit::charge::{ChargeRequest, ChargeResult, JointLimit};
use crate::limit::overflow::split_into_overflow_chains;
use crate::limit::request::Hits;

/// Applies a request to all limits of a descriptor at once.
///
/// If a limit that rejects others is exceeded, only limits where rejected hits count are charged. Otherwise each limit
/// that admits the hits is charged, and one that does not (a quota, or in shadow mode) only if its rejected hits count.
/// `states` are those of `limits`, in the same order. The results of limits that overflow into each other agree on
/// `admitted` and `retry_after_us`.
pub fn charge_together(
    limits: &[JointLimit<'_>],
    states: &mut [State],
    now: Time,
    request: ChargeRequest,
) -> SmallVec<[ChargeResult; 1]> {
    if let ([only], [state]) = (limits, &mut *states) {
        return SmallVec::from([state.charge(only.limit, now, request)]);
    }
    if has_overflow(limits) {
        return charge_with_overflow(limits, states, now, request);
    }
    let rejected = limits
        .iter()
        .zip(states.iter())
        .any(|(one, state)| one.rejects_others && !state.admits(one.limit, now, request));
    // For a limit that rejects these hits itself, the flag makes no difference.
    let request = ChargeRequest { rejected_elsewhere: request.rejected_elsewhere || rejected, ..request };
    limits.iter().zip(states).map(|(one, state)| state.charge(one.limit, now, request)).collect()
}

/// For each limit, true if [`charge_together`] would admit the hits; changes nothing.
pub fn admits_each(
    limits: &[JointLimit<'_>],
    states: &[State],
    now: Time,
    request: ChargeRequest,
) -> SmallVec<[bool; 4]> {
    if has_overflow(limits) {
        return divide_hits(limits, states, now, request).into_iter().map(|part| part.admitted).collect();
    }
    limits.iter().zip(states).map(|(one, state)| state.admits(one.limit, now, request)).collect()
}

/// Hits of a refund that each limit gives back; [`Hits::Peek`] if it gives back none.
pub fn divide_refund(
    limits: &[JointLimit<'_>],
    states: &[State],
    now: Time,
    request: ChargeRequest,
) -> SmallVec<[Hits; 4]> {
    if has_overflow(limits) {
        return divide_hits(limits, states, now, request).into_iter().map(|part| part.hits).collect();
    }
    limits.iter().map(|_| request.hits).collect()
}

fn has_overflow(limits: &[JointLimit<'_>]) -> bool {
    limits.iter().any(|one| one.limit.chain_position().takes_overflow())
}

/// Part of a charge that one limit decides.
#[derive(Clone, Copy)]
struct LimitHits {
    /// Hits that it takes or gives back; [`Hits::Peek`] for none. All hits if they are rejected.
    hits: Hits,
    /// The limit, or the chain that it is in, admits the hits of the charge.
    admitted: bool,
}

#[cold]
fn charge_with_overflow(
    limits: &[JointLimit<'_>],
    states: &mut [State],
    now: Time,
    request: ChargeRequest,
) -> SmallVec<[ChargeResult; 1]> {
    let parts = divide_hits(limits, states, now, request);
    let rejected = limits.iter().zip(&parts).any(|(one, part)| one.rejects_others && !part.admitted);
    let charge = |((one, state), part): ((&JointLimit<'_>, &mut State), &LimitHits)| {
        let rejected_elsewhere = request.rejected_elsewhere || rejected || !part.admitted;
        state.charge(one.limit, now, ChargeRequest { hits: part.hits, rejected_elsewhere, ..request })
    };
    let mut results: SmallVec<[ChargeResult; 1]> = limits.iter().zip(states).zip(&parts).map(charge).collect();
    for chain in split_into_overflow_chains(limits.iter().map(|one| one.limit.chain_position())) {
        if chain.len() > 1 {
            let admitted = parts[chain.start].admitted;
            let wait_us = if admitted {
                None
            } else {
                chain_retry_after_us(&limits[chain.clone()], &results[chain.clone()], request)
            };
            for result in &mut results[chain] {
                (result.admitted, result.retry_after_us) = (admitted, wait_us);
            }
        }
    }
    results
}

/// Microseconds until a chain admits the hits that it rejected, at most; `None` if it never will.
///
/// One of its limits may have room for all hits first. If none ever has, all are empty when the last of them is.
fn chain_retry_after_us(limits: &[JointLimit<'_>], results: &[ChargeResult], request: ChargeRequest) -> Option<u64> {
    let of_one_us = results.iter().filter_map(|result| result.retry_after_us).min();
    // A limit of 0 admits nothing, whatever the size of its bucket.
    let admitting = limits.iter().filter(|one| one.limit.requests_per_unit() > 0);
    let capacity = admitting.fold(0_u64, |sum, one| sum.saturating_add(one.limit.capacity()));
    let until_empty_us = || results.iter().map(|result| result.reset_us).max();
    of_one_us.or_else(|| (request.required_hits() <= capacity).then(until_empty_us).flatten())
}

fn divide_hits(
    limits: &[JointLimit<'_>],
    states: &[State],
    now: Time,
    request: ChargeRequest,
) -> SmallVec<[LimitHits; 4]> {
    let mut parts = SmallVec::new();
    for chain in split_into_overflow_chains(limits.iter().map(|one| one.limit.chain_position())) {
        let (limits, states) = (&limits[chain.clone()], &states[chain]);
        match (limits, states) {
            ([one], [state]) => {
                parts.push(LimitHits { hits: request.hits, admitted: state.admits(one.limit, now, request) });
            }
            _ => parts.extend(divide_hits_in_chain(limits, states, now, request)),
        }
    }
    parts
}

fn divide_hits_in_chain(
    limits: &[JointLimit<'_>],
    states: &[State],
    now: Time,
    request: ChargeRequest,
) -> SmallVec<[LimitHits; 4]> {
    let members = || limits.iter().zip(states);
    let part = |hits, admitted| LimitHits { hits, admitted };
    match request.hits {
        Hits::Peek => {
            let admitted = members().any(|(one, state)| state.admits(one.limit, now, request));
            members().map(|_| part(Hits::Peek, admitted)).collect()
        }
        Hits::Charge(hits) => {
            let mut rest = hits;
            let mut take = |(one, state): (&JointLimit<'_>, &State)| {
                let taken = max_admissible_hits(one, state, now, ChargeRequest { hits: Hits::Charge(rest), ..request });
                rest -= taken;
                part(if taken > 0 { Hits::Charge(taken) } else { Hits::Peek }, true)
            };
            let parts = members().map(&mut take).collect();
            if rest == 0 { parts } else { members().map(|_| part(request.hits, false)).collect() }
        }
        Hits::Refund(hits) => {
            let mut rest = hits;
            let mut give_back = |(index, (one, state)): (usize, (&JointLimit<'_>, &State))| {
                let peek = ChargeRequest { hits: Hits::Peek, ..request };
                let counted = if index > 0 { state.clone().charge(one.limit, now, peek).before } else { rest };
                let given = rest.min(counted);
                rest -= given;
                part(if given > 0 { Hits::Refund(given) } else { Hits::Peek }, true)
            };
            let mut parts: SmallVec<[LimitHits; 4]> = members().enumerate().rev().map(&mut give_back).collect();
            parts.reverse();
            parts
        }
    }
}

/// Most hits, up to those of the charge, that a limit admits.
fn max_admissible_hits(one: &JointLimit<'_>, state: &State, now: Time, request: ChargeRequest) -> u64 {
    let Hits::Charge(most) = request.hits else { return 0 };
    let admits = |hits| state.admits(one.limit, now, ChargeRequest { hits: Hits::Charge(hits), ..request });
    if most == 0 || admits(most) {
        return most;
    }
    let (mut fitting, mut too_many) = (0, most);
    while too_many - fitting > 1 {
        let middle = fitting + (too_many - fitting) / 2;
        if admits(middle) { fitting = middle } else { too_many = middle }
    }
    fitting
}

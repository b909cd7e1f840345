//! Admitted hits of one descriptor on the true time line, and a check of the bound.
//!
//! All numbers are integers: overshoot is in hundred-thousandths of a hit.

use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Consistency, Limit, LimitSpec, Overshoot};

use super::scenario::Adjustment;

/// Units per hit.
const PARTS: i128 = 100_000;

/// Source of admitted hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    Share,
    Lease,
    Redis,
}

/// Admitted hits of one request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    /// Time of use, in microseconds by the clock of Redis.
    pub(super) at: u64,
    pub(super) hits: u64,
    pub(super) by: By,
}

/// Highest usage of the bounds, all sources together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Worst {
    pub(super) admitted: f64,
    pub(super) promised: f64,
    /// Bound of a strict limit.
    pub(super) strict: f64,
}

impl Worst {
    /// Used part of the allowed overshoot.
    pub(super) fn overshot(self) -> f64 {
        (self.admitted - self.strict) / (self.promised - self.strict)
    }
}

/// Checks the hits admitted under one limit; `uses` and `adjustments` are in order of time.
pub(super) fn check(limit: &Limit, uses: &[Use], adjustments: &[(u64, Adjustment)]) -> Result<Worst, String> {
    let overshoot = overshoot(limit);
    shares(limit, uses, overshoot)?;
    let charged: Vec<Use> = uses.iter().copied().filter(|it| it.by != By::Share).collect();
    check_replay(limit, &charged, adjustments)?;
    if !adjustments.is_empty() {
        // The replay and the bound of shares say all.
        return Ok(Worst { admitted: 1.0, promised: 2.0, strict: 1.0 });
    }
    let max = i128::from(limit.requests_per_unit()) * PARTS;
    let expect = |what: &str, found: i128, max: i128| match found <= max {
        true => Ok(()),
        false => Err(format!("{what}: {} hits, {} at most", found as f64 / PARTS as f64, max as f64 / PARTS as f64)),
    };
    let (total, promised) = match limit.algorithm() {
        Algorithm::FixedWindow => {
            expect("charged in a window", in_a_window(limit, &charged), max)?;
            (in_a_window(limit, uses), max + overshoot)
        }
        Algorithm::SlidingWindowLog => {
            expect("charged in a span", in_a_span(limit, &charged), max)?;
            (in_a_span(limit, uses), max + overshoot)
        }
        Algorithm::SlidingWindowCounter => (in_a_window(limit, uses), max + overshoot),
        Algorithm::TokenBucket => {
            let capacity = i128::from(limit.capacity()) * PARTS;
            expect("charged beyond what comes back", beyond_the_rate(limit, &charged), capacity + overshoot / 2)?;
            (in_a_span(limit, uses), capacity + max + overshoot)
        }
        Algorithm::LeakyBucket | Algorithm::Concurrent => unreachable!("it is never eventual"),
    };
    expect("admitted altogether", total, promised)?;
    let over = |hits: i128| hits as f64 / max.max(1) as f64;
    Ok(Worst { admitted: over(total), promised: over(promised), strict: over(promised - overshoot) })
}

/// Checks the hits admitted under two limits on one counter: the bounds of both together are the larger ones.
pub(super) fn check_changed(
    limit: &Limit,
    changed: &Limit,
    uses: &[Use],
    adjustments: &[(u64, Adjustment)],
) -> Result<Worst, String> {
    shares(limit, uses, overshoot(limit).max(overshoot(changed)))?;
    let charged: Vec<Use> = uses.iter().copied().filter(|it| it.by != By::Share).collect();
    let larger = if limit.requests_per_unit() > changed.requests_per_unit() { limit } else { changed };
    // The refill of a bucket depends on the limit of each charge.
    if limit.algorithm() != Algorithm::TokenBucket {
        check_replay(larger, &charged, adjustments)?;
    }
    Ok(Worst { admitted: 1.0, promised: 2.0, strict: 1.0 })
}

/// Overshoot in units.
fn overshoot(limit: &Limit) -> i128 {
    match limit.consistency() {
        Consistency::Eventual(Overshoot::MilliPercent(part)) => {
            i128::from(limit.requests_per_unit()) * i128::from(part)
        }
        Consistency::Eventual(Overshoot::Hits(hits)) => i128::from(hits) * PARTS,
        Consistency::Strict => 0,
    }
}

/// Bound of shares in any span of one period: the overshoot, half of it for token_bucket.
fn shares(limit: &Limit, uses: &[Use], overshoot: i128) -> Result<(), String> {
    let shared: Vec<Use> = uses.iter().copied().filter(|it| it.by == By::Share).collect();
    let max = if limit.algorithm() == Algorithm::TokenBucket { overshoot / 2 } else { overshoot };
    let found = in_a_span(limit, &shared);
    if found <= max { Ok(()) } else { Err(format!("shares: {} parts of a hit in a period, {max} at most", found)) }
}

/// Maximum number of hits in any span of one period.
fn in_a_span(limit: &Limit, uses: &[Use]) -> i128 {
    let period_us = limit.period().micros();
    let (mut first, mut in_span, mut max) = (0, 0, 0);
    for it in uses {
        in_span += it.hits;
        while uses[first].at + period_us <= it.at {
            in_span -= uses[first].hits;
            first += 1;
        }
        max = max.max(in_span);
    }
    i128::from(max) * PARTS
}

/// Maximum number of hits in any aligned window.
fn in_a_window(limit: &Limit, uses: &[Use]) -> i128 {
    let period_us = limit.period().micros();
    let (mut window, mut in_span, mut max) = (0, 0, 0);
    for it in uses {
        let of = it.at / period_us;
        in_span = if of == window { in_span + it.hits } else { it.hits };
        (window, max) = (of, max.max(in_span));
    }
    i128::from(max) * PARTS
}

/// Checks that the strict algorithm admits each hit if all are charged, refunded and reset in order. Its bucket is
/// larger by what refills during a lease.
fn check_replay(limit: &Limit, uses: &[Use], adjustments: &[(u64, Adjustment)]) -> Result<(), String> {
    let refilled = if limit.algorithm() == Algorithm::TokenBucket { overshoot(limit) / 2 } else { 0 };
    let refilled = u64::try_from((refilled + PARTS - 1) / PARTS).unwrap();
    let spec = LimitSpec::new(limit.algorithm(), limit.requests_per_unit(), limit.period());
    let bucket_size = (refilled > 0).then(|| u32::try_from(limit.capacity() + refilled).unwrap());
    let limit = &if refilled > 0 { Limit::new(&LimitSpec { bucket_size, ..spec }).unwrap() } else { *limit };
    let mut state = State::empty(limit.algorithm());
    let mut adjustments = adjustments.iter().peekable();
    for it in uses {
        while let Some((at, adjustment)) = adjustments.next_if(|(at, _)| *at < it.at) {
            match *adjustment {
                Adjustment::Refund(hits) => {
                    state.charge(limit, Time::from_micros(*at), ChargeRequest::new(Hits::Refund(hits), 0));
                }
                Adjustment::Reset => state = State::empty(limit.algorithm()),
            }
        }
        let result = state.charge(limit, Time::from_micros(it.at), ChargeRequest::new(Hits::Charge(it.hits), 0));
        if !result.admitted {
            return Err(format!("{it:?} after {} hits would have been rejected", result.before));
        }
    }
    Ok(())
}

/// Maximum over all spans of the hits minus the refill.
fn beyond_the_rate(limit: &Limit, uses: &[Use]) -> i128 {
    let period_us = i128::from(limit.period_us());
    let back = |at: u64| PARTS * i128::from(limit.requests_per_unit()) * i128::from(at);
    let (mut before, mut least, mut max) = (0, i128::MAX, 0);
    for it in uses {
        least = least.min(before - back(it.at));
        before += PARTS * i128::from(it.hits) * period_us;
        max = max.max(before - back(it.at) - least);
    }
    (max + period_us - 1) / period_us
}

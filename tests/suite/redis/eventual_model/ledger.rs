//! Admitted hits of one descriptor on the true time line, and a check of the bound.
//!
//! All numbers are integers: overshoot is in hundred-thousandths of a hit.

use tollkeeper::algorithm::ChargeRequest;
use tollkeeper::algorithm::state::State;
use tollkeeper::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::{Consistency, Limit, Overshoot};
use tollkeeper::request::Hits;

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

/// Checks the hits admitted under one limit; `uses` are in order of time.
pub(super) fn check(limit: &Limit, uses: &[Use]) -> Result<Worst, String> {
    let overshoot = overshoot(limit);
    shares(limit, uses, overshoot)?;
    let charged: Vec<Use> = uses.iter().copied().filter(|it| it.by != By::Share).collect();
    let most = i128::from(limit.requests_per_unit()) * PARTS;
    let expect = |what: &str, found: i128, most: i128| match found <= most {
        true => Ok(()),
        false => Err(format!("{what}: {} hits, {} at most", found as f64 / PARTS as f64, most as f64 / PARTS as f64)),
    };
    let (total, promised) = match limit.algorithm() {
        Algorithm::FixedWindow => {
            expect("charged in a window", in_a_window(limit, &charged), most)?;
            (in_a_window(limit, uses), most + overshoot)
        }
        Algorithm::SlidingWindowLog => {
            expect("charged in a span", in_a_span(limit, &charged), most)?;
            (in_a_span(limit, uses), most + overshoot)
        }
        Algorithm::SlidingWindowCounter => {
            check_replay(limit, &charged)?;
            (in_a_window(limit, uses), most + overshoot)
        }
        Algorithm::TokenBucket => {
            let capacity = i128::from(limit.capacity()) * PARTS;
            expect("charged beyond what comes back", beyond_the_rate(limit, &charged), capacity + overshoot / 2)?;
            (in_a_span(limit, uses), capacity + most + overshoot)
        }
        Algorithm::LeakyBucket => unreachable!("it is never eventual"),
    };
    expect("admitted altogether", total, promised)?;
    let over = |hits: i128| hits as f64 / most.max(1) as f64;
    Ok(Worst { admitted: over(total), promised: over(promised), strict: over(promised - overshoot) })
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
    let most = if limit.algorithm() == Algorithm::TokenBucket { overshoot / 2 } else { overshoot };
    let found = in_a_span(limit, &shared);
    if found <= most { Ok(()) } else { Err(format!("shares: {} parts of a hit in a period, {most} at most", found)) }
}

/// Maximum number of hits in any span of one period.
fn in_a_span(limit: &Limit, uses: &[Use]) -> i128 {
    let period_us = limit.period().micros();
    let (mut first, mut held, mut most) = (0, 0, 0);
    for it in uses {
        held += it.hits;
        while uses[first].at + period_us <= it.at {
            held -= uses[first].hits;
            first += 1;
        }
        most = most.max(held);
    }
    i128::from(most) * PARTS
}

/// Maximum number of hits in any aligned window.
fn in_a_window(limit: &Limit, uses: &[Use]) -> i128 {
    let period_us = limit.period().micros();
    let (mut window, mut held, mut most) = (0, 0, 0);
    for it in uses {
        let of = it.at / period_us;
        held = if of == window { held + it.hits } else { it.hits };
        (window, most) = (of, most.max(held));
    }
    i128::from(most) * PARTS
}

/// Checks that each hit passes if all are charged in order.
fn check_replay(limit: &Limit, uses: &[Use]) -> Result<(), String> {
    let mut state = State::empty(limit.algorithm());
    for it in uses {
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
    let (mut before, mut least, mut most) = (0, i128::MAX, 0);
    for it in uses {
        least = least.min(before - back(it.at));
        before += PARTS * i128::from(it.hits) * period_us;
        most = most.max(before - back(it.at) - least);
    }
    (most + period_us - 1) / period_us
}

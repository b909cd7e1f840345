//! token_bucket: tokens come back continuously, at `requests_per_unit` a period; idle time earns a burst.
//!
//! The state is the tokens that are out. They come back with the time that passed, computed at each charge; no timer.
//! A charge passes if the bucket holds as many tokens as it has hits. With `max_wait` a charge that lacks tokens takes
//! them in advance and is held until they have come; the tokens out can then exceed the bucket.

use super::leaky_level::{LeakyLevel, to_us};
use super::{ChargeRequest, ChargeResult, Effect};
use crate::clock::Time;
use crate::limit::Limit;

/// Tokens that are out: `used` whole ones and `part`/period of one more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Whole tokens.
    pub used: u64,
    /// The rest, in parts of which a token has as many as the period has microseconds.
    pub part: u64,
    /// When this was so.
    pub last: Time,
}

impl State {
    /// What is out at `now`, as if nothing ever was if that is nothing; what was, if `now` is not later.
    pub fn drained(self, limit: &Limit, now: Time) -> Self {
        if now <= self.last {
            return self;
        }
        let (used, part) = LeakyLevel::at(limit, (self.used, self.part), self.last, now).parts();
        if (used, part) == (0, 0) { Self::default() } else { Self { used, part, last: now } }
    }
}

/// Charges tokens.
pub fn charge(limit: &Limit, state: &mut State, now: Time, request: ChargeRequest) -> ChargeResult {
    let mut out = LeakyLevel::at(limit, (state.used, state.part), state.last, now);
    let before = out.hits();
    let fits = early_us(&out, request) == Some(0);
    let effect = request.effect(fits, limit);
    match effect {
        Effect::Nothing => {}
        Effect::Charge(hits) => out.units += out.units_of(hits),
        Effect::Debt(hits) => {
            // Debt ends at one period's worth of tokens below an empty bucket, and never lowers what is out.
            let most = out.units_of(u64::from(limit.capacity()) + u64::from(limit.requests_per_unit()));
            out.units = out.units.max(most.min(out.units + out.units_of(hits)));
        }
        Effect::Refund(hits) => out.units = out.units.saturating_sub(out.units_of(hits)),
    }
    if effect != Effect::Nothing {
        let (used, part) = out.parts();
        *state = State { used, part, last: out.at };
    }
    ChargeResult {
        admitted: fits,
        before,
        after: out.hits(),
        remaining: out.remaining(),
        reset_us: out.until_empty_us(),
        retry_after_us: if fits { None } else { early_us(&out, request) },
        delay_us: match effect {
            // The tokens that were lacking have come when no more are out than the bucket holds.
            Effect::Charge(_) => to_us(out.until_us(out.units_of(u64::from(limit.capacity())))),
            _ => 0,
        },
    }
}

/// Whether [`charge`] would pass.
pub fn admits(limit: &Limit, state: &State, now: Time, request: ChargeRequest) -> bool {
    early_us(&LeakyLevel::at(limit, (state.used, state.part), state.last, now), request) == Some(0)
}

/// How much too early a charge comes, in microseconds: until it need not wait for its tokens longer than it may. `None`
/// if there will never be enough.
fn early_us(out: &LeakyLevel<'_>, request: ChargeRequest) -> Option<u64> {
    Some(to_us(out.until_room_us(request)?.saturating_sub(out.patience_us(request))))
}

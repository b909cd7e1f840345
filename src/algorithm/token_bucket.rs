//! token_bucket: tokens come back continuously, at `requests_per_unit` a period; idle time earns a burst.
//!
//! The state is the tokens that are out. They come back with the time that passed, computed at each draw; no timer.
//! A draw passes if the bucket holds as many tokens as it has hits. With `max_wait` a draw that lacks tokens takes
//! them in advance and is held until they have come; the tokens out can then exceed the bucket.

use super::drain::Drain;
use super::{Ask, Effect, Level, to_u32};
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

/// Draws tokens.
pub fn draw(limit: &Limit, state: &mut State, now: Time, ask: Ask) -> Level {
    let mut out = Drain::at(limit, (state.used, state.part), state.last, now);
    let before = out.hits();
    let fits = lack(limit, &out, ask).is_some_and(|lack| lack.over_us == 0);
    let hold_us = match lack(limit, &out, ask) {
        Some(lack) if lack.wait_us > 0 => out.ahead_us + lack.wait_us,
        _ => 0,
    };
    let effect = ask.effect(fits, limit);
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
    Level {
        admitted: fits,
        before,
        after: out.hits(),
        remaining: to_u32(u64::from(limit.capacity()).saturating_sub(out.hits())),
        reset_us: out.until_empty_us(),
        retry_after_us: if fits { None } else { lack(limit, &out, ask).map(|lack| lack.over_us) },
        hold_us: if matches!(effect, Effect::Charge(_)) { hold_us } else { 0 },
    }
}

/// Whether [`draw`] would pass.
pub fn admits(limit: &Limit, state: &State, now: Time, ask: Ask) -> bool {
    let out = Drain::at(limit, (state.used, state.part), state.last, now);
    lack(limit, &out, ask).is_some_and(|lack| lack.over_us == 0)
}

/// How much too early a draw comes.
struct Lack {
    /// Until all its tokens are there, in microseconds.
    wait_us: u64,
    /// By how much that is longer than the answer may be held, in microseconds.
    over_us: u64,
}

/// What the draw lacks; `None` if there will never be enough.
fn lack(limit: &Limit, out: &Drain<'_>, ask: Ask) -> Option<Lack> {
    let wanted = ask.wanted();
    if wanted == 0 {
        return Some(Lack { wait_us: 0, over_us: 0 });
    }
    let room = u64::from(limit.capacity()).checked_sub(wanted)?;
    if limit.requests_per_unit() == 0 {
        return None;
    }
    let wait_us = out.until_us(out.units_of(room));
    let bound_us = ask.hold_us.min(limit.max_wait_us());
    let over_us = if wait_us == 0 { 0 } else { (out.ahead_us.saturating_add(wait_us)).saturating_sub(bound_us) };
    Some(Lack { wait_us, over_us })
}

//! Division of the limits of one key among proxies that decide by themselves.
//!
//! A proxy is a *holder*. What a replica may hand out of a limit without asking is its *hold*, a *pool* here: the
//! store takes it from the limit that every other decision sees. A pool is handed out as *assignments*. This module
//! is the ledger: it says what a holder gets, what of it can still be used, and what is free. It reads no clock and
//! sends nothing; callers pass `now`, and send what it returns at once and in order.
//!
//! Invariant: of each pool, what holders have in reserve is never more than what is held, unless a proxy reports more
//! than it may have admitted (*debt*, which is charged like all that is reported).
//!
//! Why no more than the limit is admitted, for hits that are lent: a holder's `outstanding` is at least what its
//! proxy may still admit, together with what it admitted and did not report. An assignment of G adds G. A report of A
//! subtracts A. A report that was made under the last assignment proves that all earlier ones are over and that what
//! they admitted has been reported, so no more than what the last one admits can be outstanding: G, less what was
//! reported since and cannot have passed before it (`holder::Sent::most_left`); nothing, if a request was denied
//! between two such reports. If a proxy keeps the ratio of its tokens, and it has at most R of M tokens, then a
//! bucket of M x T / R tokens leaves it at most T: the change adds T - R. It has at most R of them also if earlier
//! assignments are on their way, because it takes them in order. A report does not tell what passed before a change
//! from what passed after it, so a change waits until the one before it is confirmed, unless nothing was lost by that
//! (`holder::ShareHolder::can_be_changed`). What is reported is charged when the hold falls by it; what is
//! outstanding stays held until the assignment ends, also if its stream is lost, because the proxy may use it in a
//! later window, and counts as used then. A proxy that comes with an assignment of another stream or replica is left
//! alone until that has ended, or can be replaced by as much; what it reports before is part of that. So charged and
//! held hits cover all that is admitted, in every window, and the store keeps their sum within the limit. A call to
//! the store whose answer is lost is repeated with its number, so that hits are charged once, or again if the store has
//! forgotten the hold meanwhile.
//!
//! For rates: a share of s per period is a bucket of b tokens, s of which arrive in a period. Its holder admits what
//! that part of the limit admits. A share moves only after it was out of use for the time in which it refills: from
//! the moment that a report, or an acknowledged PING, proves the smaller one to be in force, else from the end of the
//! assignment. So the new holder's full bucket, and the tokens that a raise mints, are those that a part of the limit
//! has after a rest.
//!
//! Not covered: a proxy that stands still, and begins an assignment that was sent meanwhile when it continues. Lent
//! hits end ten seconds before a window does, or last beyond it; rates move after 16 s; a longer standstill may cost
//! the part of that proxy once more. Nothing but what must be is sent to a proxy that has not reported for 5.5 s.

pub mod assignment;
pub mod divided_limit;
mod fair_share;
pub mod demand;
pub mod holder;
pub mod ledger;
mod assign;
#[cfg(test)]
mod model;

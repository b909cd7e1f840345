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
//! Lent hits: a holder's `outstanding` is at least what its proxy may still admit, with what it admitted and did not
//! report. An assignment of G adds G, a report of A subtracts A. A report that was made under the last assignment, which
//! the proxy acknowledged before it, proves that all earlier ones are over: at most what the last one admits is
//! outstanding (`holder::Sent::most_left`), nothing if a request was denied between two such reports. Of a bucket that is
//! refilled, all that it admits until its end, and in the five seconds before a renewal, stays outstanding. A bucket of M
//! tokens that changes to M x T / R leaves at most T to a proxy that keeps its ratio and has at most R. A report does not
//! tell what passed before a change from what passed after it, so a change waits until the one before it is confirmed
//! (`holder::ShareHolder::can_be_changed`). What is outstanding stays held until the assignment ends, also if its stream
//! is lost, and counts as used then. A proxy that comes with an assignment of another stream or replica is left alone
//! until that has ended, or can be replaced by as much.
//!
//! Rates: a share is a part of the refill and a part of the bucket (`holder::Part`). Either is out of use a margin after
//! an acknowledged PING proves that the proxy has less, else at the end of the assignment. Another holder may have the
//! refill from then on. The part of the bucket counts as empty (`empty_buckets`), because its next holder begins with a
//! full one: it is handed out once refill that nobody had meanwhile has filled it. So the tokens of proxies and the full
//! parts that nobody has are at most the bucket of what is held, and grow by its refill only. If holders lack parts of
//! the bucket, as much refill is withheld until they are full. What is given back to the store is a full part of the
//! bucket, and refill that nobody has had for as long as a bucket takes to fill: the store may admit as much at once.
//!
//! If several limits of a key are rates, a proxy has one bucket, the smallest of them, and each limit counts as much of
//! its own as that has. When a limit changes (`limit_change`), proxies keep their tokens, which are another part of it.
//!
//! A message may be late or lost. A reply to a PING proves that a response has arrived, a report does not: reports may
//! come where responses do not. An assignment that was acknowledged late ends as much later (`holder::Sent::latest_end`);
//! one that was not acknowledged was begun at once or never. Lent hits end ten seconds before a window does, or last
//! beyond it. Not covered: a proxy that stands still for some seconds, and does not acknowledge what it begins then, uses
//! its part as much longer.
//!
//! Decides: why proxies over RLQS never admit more than the limit: the proof.

pub mod assignment;
pub mod divided_limit;
pub mod empty_buckets;
pub mod fair_share;
pub mod holder;
pub mod ledger;
mod levels;
pub mod assign;
mod limit_change;

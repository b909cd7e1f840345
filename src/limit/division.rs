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
//! Why no more than the limit is admitted, for hits that are lent: a holder's `outstanding` is at least what its proxy
//! may still admit, together with what it admitted and did not report. An assignment of G adds G. A report of A
//! subtracts A. A report that was made under the last assignment, which the proxy acknowledged before it, proves that
//! all earlier ones are over and that what they admitted has been reported, so no more than what the last one admits
//! can be outstanding: G, less what was reported since and cannot have passed before it (`holder::Sent::most_left`);
//! nothing, if a request was denied between two such reports. If a proxy keeps the ratio of its tokens, and it has at
//! most R of M tokens, then a bucket of M x T / R tokens leaves it at most T: the change adds T - R. It has at most R
//! of them also if earlier assignments are on their way, because it takes them in order. A report does not tell what
//! passed before a change from what passed after it, so a change waits until the one before it is confirmed, unless
//! nothing was lost by that (`holder::ShareHolder::can_be_changed`). What is reported is charged when the hold falls by
//! it; what is outstanding stays held until the assignment ends, also if its stream is lost, because the proxy may use
//! it in a later window, and counts as used then. A proxy that comes with an assignment of another stream or replica is
//! left alone until that has ended, or can be replaced by as much; what it reports before is part of that. So charged
//! and held hits cover all that is admitted, in every window, and the store keeps their sum within the limit. A call to
//! the store whose answer is lost is repeated with its number, so that hits are charged once, or again if the store has
//! forgotten the hold meanwhile.
//!
//! For rates: a share is a part of the refill and a part of the bucket (`holder::Part`). Either is out of use once an
//! acknowledged PING proves a margin later that the proxy has less, else at the end of the assignment. A part of the
//! refill that is out of use mints no tokens: another holder may have it from then on. A part of the bucket may have
//! been emptied, and begins full with its new holder: so it counts as empty (`empty_buckets`), and is handed out once
//! refill that nobody had meanwhile has filled it. Let P be the tokens that proxies have, and the full parts that
//! nobody has. P is at most the bucket of what is held. It grows by refill only, of holders or of nobody, together at
//! most what is held: handing out a full part moves it within P, and a part that goes out of use takes its tokens off.
//! So in any span all together admit at most the bucket, and the refill of that span. If holders lack parts of the
//! bucket, some refill is withheld until they are full: a quarter of what is lacking, or a bit more than an eighth of
//! what is held if that is more. If buckets follow the refill, holders with nothing get what is full before others get
//! more. What is given back to the store is a full part of the bucket, and refill that nobody has had for as long as a
//! bucket takes to fill: the store may admit as much at once.
//!
//! If several limits of a key are rates, a proxy has one bucket, the smallest of them. Each limit counts only as much
//! of its own as that has, so that a raise takes a full part of each of them. When a limit changes (`limit_change`),
//! proxies keep their tokens, which are another part of it then; more than it allows is never free.
//!
//! A proxy that stands still may begin an assignment late, and end it as late. So its end is counted from the time by
//! which it was acknowledged, and ten seconds later than it was sent until then (`holder::Sent::latest_end`); the hold
//! in the store lasts as long. Lent hits end ten seconds before a window does, or last beyond it. What is sent to a
//! proxy that stands still keeps its part from others for longer. So one that was not heard in the last 300 ms is told
//! something only after it replied to a PING (`holder::ShareHolder::defer_send_if_maybe_stalled`); and no more than
//! before if it has not reported for 5.5 s, because something between may reply for it. Not covered: a proxy that
//! stands still for more than ten seconds after it was sent something; its part may pass once more.
//!
//! Decides: why proxies over RLQS never admit more than the limit: the proof.

pub mod assignment;
pub mod divided_limit;
pub mod empty_buckets;
pub mod fair_share;
pub mod demand;
pub mod holder;
pub mod ledger;
mod levels;
mod assign;
mod limit_change;

//! Strict fixed windows by INCRBY and EXPIRE, on the very keys of envoyproxy/ratelimit.
//!
//! So both can serve one Redis during a roll-out, and a Redis or a user without scripts will do. The key holds the
//! window's start by this process's clock, in whole seconds, and nothing of the limit. A run of draws is one INCRBY of
//! their sum: with refused hits counted the order makes no difference to the count, and each draw's own level is
//! worked out here. A refund that would leave less than nothing is added back.

use bytes::{BufMut, Bytes, BytesMut};
use fred::types::Value;
use smallvec::SmallVec;

use super::combine::Drawings;
use super::failure::{RedisError, Refused};
use super::node::Node;
use super::script::{Drawing, Replayed};
use crate::algorithm::{State, Term, draw_together, fixed_window};
use crate::clock::Time;
use crate::counter::{Counter, Draw, Path};
use crate::limit::{Algorithm, Consistency, Limit};
use crate::request::Hits;

/// A window's counter.
#[derive(Clone, Debug)]
pub(super) struct Window {
    pub(super) key: Bytes,
    /// Its start, in seconds since the epoch.
    pub(super) start_s: u64,
    /// What EXPIRE says.
    expire_s: i64,
    now: Time,
    /// Looks and trials only read.
    reads: bool,
}

impl Window {
    /// The window that `draw` counts in; `None` if envoyproxy/ratelimit has no such counter.
    pub(super) fn of(prefix: &str, draw: &Draw<'_>, now: Time, jitter_s: u64, reads: bool) -> Option<Self> {
        let [Counter { term, epoch: 0, .. }] = *draw.counters else { return None };
        let limit = term.limit;
        if !is_plain(limit) {
            return None;
        }
        let (start, end) = fixed_window::window(limit, now);
        let start_s = start.as_micros() / 1_000_000;
        // As there: a calendar month's counter goes with the month, any other a whole window after its last hit.
        let from = if limit.calendar_months() { now } else { start };
        let length_s = end.since_us(from).div_ceil(1_000_000);
        Some(Self {
            key: key(prefix, &draw.path, start_s),
            start_s,
            expire_s: i64::try_from(length_s + jitter_s).unwrap_or(i64::MAX),
            now,
            reads,
        })
    }
}

fn is_plain(limit: &Limit) -> bool {
    limit.algorithm() == Algorithm::FixedWindow
        && limit.consistency() == Consistency::Strict
        && limit.count_rejected()
        && limit.period().multiplier() == 1
}

/// `<prefix><domain>_<key>_<value>_..._<start>`
fn key(prefix: &str, path: &Path<'_>, start_s: u64) -> Bytes {
    let mut key = BytesMut::with_capacity(128);
    key.put_slice(prefix.as_bytes());
    key.put_slice(path.domain.as_bytes());
    key.put_u8(b'_');
    for (place, entry) in path.entries.iter().enumerate() {
        let shared = path.shared.iter().find(|(shared, _)| *shared == place);
        key.put_slice(entry.key);
        key.put_u8(b'_');
        key.put_slice(shared.map_or(entry.value, |(_, pattern)| pattern));
        key.put_u8(b'_');
    }
    key.put_slice(start_s.to_string().as_bytes());
    key.freeze()
}

/// Counts the draws in their order.
pub(super) async fn draw(window: &Window, drawings: &Drawings, node: &Node, asking: bool) -> Result<Replayed, Refused> {
    let mut replayed =
        Replayed { levels: Vec::with_capacity(drawings.len()), states: SmallVec::new(), now: window.now };
    let mut rest = &drawings[..];
    while !rest.is_empty() {
        let run = rest.iter().take_while(|drawing| !is_refund(drawing)).count();
        let (now, later) = rest.split_at(run.max(1));
        let before = step(window, now, node, asking).await?;
        let mut states = [State::FixedWindow(fixed_window::State { count: before, last: window.now })];
        for drawing in now {
            replayed.levels.push(level(drawing, &mut states, window.now));
        }
        replayed.states = SmallVec::from(states);
        rest = later;
    }
    Ok(replayed)
}

fn is_refund(drawing: &Drawing) -> bool {
    matches!(drawing.ask.hits, Hits::Refund(_)) && !drawing.trial
}

/// Counts a run of hits, or one refund; the count before it.
async fn step(window: &Window, run: &[Drawing], node: &Node, asking: bool) -> Result<u64, Refused> {
    let by: i64 = run.iter().map(signed_hits).sum();
    if window.reads && run.iter().all(|drawing| drawing.trial) {
        let count = node.call("GET", vec![Value::Bytes(window.key.clone())], asking).await?;
        return match count {
            Value::Null => Ok(0),
            count => Ok(u64::try_from(integer(&count)?).unwrap_or(0)),
        };
    }
    let after = increment(window, by, node, asking).await?;
    if after < 0 && by < 0 {
        // Another refund may have come between: what is missing is added back by whoever took it away.
        increment(window, (-after).min(-by), node, asking).await?;
    }
    Ok(u64::try_from(after - by).unwrap_or(0))
}

async fn increment(window: &Window, by: i64, node: &Node, asking: bool) -> Result<i64, Refused> {
    let key = Value::Bytes(window.key.clone());
    let increment = ("INCRBY", vec![key.clone(), Value::Integer(by)]);
    let expire = ("EXPIRE", vec![key, Value::Integer(window.expire_s)]);
    let (count, expiry) = node.call_two(increment, expire, asking).await;
    let count = integer(&count?)?;
    expiry?;
    Ok(count)
}

fn signed_hits(drawing: &Drawing) -> i64 {
    let signed = |hits: u64| i64::try_from(hits).unwrap_or(i64::MAX);
    match drawing.ask.hits {
        _ if drawing.trial => 0,
        Hits::Look => 0,
        Hits::Take(hits) => signed(hits),
        Hits::Refund(hits) => -signed(hits),
    }
}

fn integer(value: &Value) -> Result<i64, Refused> {
    value.as_i64().ok_or(Refused::Failed(RedisError::WrongType))
}

fn level(drawing: &Drawing, states: &mut [State; 1], now: Time) -> SmallVec<[crate::algorithm::Level; 1]> {
    let terms: SmallVec<[Term<'_>; 1]> =
        drawing.counters.iter().map(|counted| Term { limit: &counted.limit, enforced: counted.enforced }).collect();
    if drawing.trial {
        return draw_together(&terms, &mut states.clone(), now, drawing.ask);
    }
    draw_together(&terms, states, now, drawing.ask)
}

//! Table of the algorithms: one row each, with its Lua file, wire format and lease model.
//!
//! To add an algorithm: write its Lua file in `lua/`, and add one row here. Nothing else in the Redis store names an
//! algorithm, except the INCRBY path, which exists for one algorithm only.

use super::command::ChargeCommand;
use super::script::reply_reader::{MAX_EXACT, MalformedReply, ReplyReader};
use crate::algorithm::sliding_window_log::LogRecord;
use crate::algorithm::state::State;
use crate::algorithm::{
    ChargeRequest, ChargeResult, fixed_window, leaky_bucket, sliding_window_counter, sliding_window_log, token_bucket,
};
use crate::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::Algorithm;
use crate::request::Hits;

/// Modulus of the number of hits ever entered in a log; `lua/log.lua` has the same.
const LOG_MODULUS: u64 = 1 << 52;

/// Row of the table.
#[derive(Debug)]
pub(crate) struct AlgorithmRow {
    /// Number of the algorithm in script arguments. Part of the wire format: replicas of all versions must agree.
    pub(crate) wire_id: u8,
    /// Text of its Lua file.
    pub(crate) lua: &'static str,
    /// Helper functions that the Lua file calls, by the names of their parts.
    pub(crate) helpers: &'static [&'static str],
    /// Computes the arguments `a` and `b` of a call, for the counter at an index.
    pub(crate) arguments: fn(&[ChargeCommand], usize) -> [i64; 2],
    /// Returns the longest delay in microseconds that keeps the numbers of a script exact.
    pub(crate) max_delay_us: fn(&Limit) -> u64,
    /// Decodes the state that follows the time of the last charge in a reply.
    pub(crate) read_state: fn(&mut ReplyReader<'_>, Time) -> Result<State, MalformedReply>,
    /// Model of leases of eventual limits.
    pub(crate) lease: LeaseModel,
    /// Computes the time in microseconds until a rejected charge could pass, from the result of another one on the same
    /// state. The hits are at most the capacity. `None`: the result does not tell.
    pub(crate) wait_us: fn(&Limit, &ChargeResult, ChargeRequest) -> Option<u64>,
    /// True if a rejection ends at a time that no further hit postpones, even if rejected hits count.
    pub(crate) rejection_end_is_fixed: bool,
}

/// Aging of charged hits; determines the size, life and return of leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeaseModel {
    /// Hits belong to an aligned window and expire with it.
    Window,
    /// Hits drain continuously.
    Refill,
    /// Hits expire one period after they were entered.
    Log,
    /// The algorithm cannot be eventual.
    Never,
}

/// Returns the row of an algorithm.
pub(crate) const fn row(algorithm: Algorithm) -> &'static AlgorithmRow {
    match algorithm {
        Algorithm::TokenBucket => &TOKEN_BUCKET,
        Algorithm::LeakyBucket => &LEAKY_BUCKET,
        Algorithm::FixedWindow => &FIXED_WINDOW,
        Algorithm::SlidingWindowLog => &SLIDING_WINDOW_LOG,
        Algorithm::SlidingWindowCounter => &SLIDING_WINDOW_COUNTER,
    }
}

/// Returns true if limits of an algorithm can be eventual.
pub(crate) fn can_be_lent(algorithm: Algorithm) -> bool {
    row(algorithm).lease != LeaseModel::Never
}

static TOKEN_BUCKET: AlgorithmRow = AlgorithmRow {
    wire_id: 0,
    lua: include_str!("lua/token_bucket.lua"),
    helpers: &["divide"],
    arguments: |_, _| [0, 0],
    max_delay_us: |limit| {
        // The time in which 2^52 tokens refill: borrowed tokens must stay countable. At least 12 days.
        let longest_us = (1 << 52) * u128::from(limit.period_us()) / u128::from(limit.requests_per_unit().max(1));
        u64::try_from(longest_us).unwrap_or(u64::MAX).min(MAX_EXACT - 1)
    },
    read_state: |reply, last| {
        Ok(State::TokenBucket(token_bucket::State { used: reply.number()?, part: reply.number()?, last }))
    },
    lease: LeaseModel::Refill,
    wait_us: bucket_wait_us,
    rejection_end_is_fixed: false,
};

static LEAKY_BUCKET: AlgorithmRow = AlgorithmRow {
    wire_id: 1,
    lua: include_str!("lua/leaky_bucket.lua"),
    helpers: &["divide"],
    arguments: |_, _| [0, 0],
    max_delay_us: |_| MAX_EXACT - 1,
    read_state: |reply, last| {
        let (queued, part, tail) = (reply.number_u32()?, reply.number()?, reply.number_u32()?);
        Ok(State::LeakyBucket(leaky_bucket::State { queued, part, tail, last }))
    },
    lease: LeaseModel::Never,
    wait_us: |limit, result, request| {
        // A request leaves when everything before it has left.
        let delay_us = request.max_delay_us.min(limit.max_wait_us());
        let without_delay = ChargeRequest { max_delay_us: 0, ..request };
        Some(bucket_wait_us(limit, result, without_delay)?.max(result.reset_us.saturating_sub(delay_us)))
    },
    rejection_end_is_fixed: false,
};

static FIXED_WINDOW: AlgorithmRow = AlgorithmRow {
    wire_id: 2,
    lua: include_str!("lua/fixed_window.lua"),
    helpers: &[],
    arguments: |commands, index| {
        let calendar = commands.first().map(|command| &command.counters[index].limit).filter(|it| it.calendar_months());
        [calendar.map_or(0, |limit| i64::from(limit.period().multiplier())), 0]
    },
    max_delay_us: |_| MAX_EXACT - 1,
    read_state: |reply, last| Ok(State::FixedWindow(fixed_window::State { count: reply.number()?, last })),
    lease: LeaseModel::Window,
    wait_us: |_, result, _| Some(result.reset_us),
    rejection_end_is_fixed: true,
};

static SLIDING_WINDOW_LOG: AlgorithmRow = AlgorithmRow {
    wire_id: 3,
    lua: include_str!("lua/sliding_window_log.lua"),
    helpers: &["log"],
    arguments: log_reach,
    max_delay_us: |_| MAX_EXACT - 1,
    read_state: |reply, last| read_log(reply, last).map(State::SlidingWindowLog),
    lease: LeaseModel::Log,
    wait_us: |_, _, _| None,
    rejection_end_is_fixed: false,
};

static SLIDING_WINDOW_COUNTER: AlgorithmRow = AlgorithmRow {
    wire_id: 4,
    lua: include_str!("lua/sliding_window_counter.lua"),
    helpers: &["divide"],
    arguments: |_, _| [0, 0],
    max_delay_us: |_| MAX_EXACT - 1,
    read_state: |reply, last| {
        let (current, previous) = (reply.number()?, reply.number()?);
        Ok(State::SlidingWindowCounter(sliding_window_counter::State { current, previous, last }))
    },
    lease: LeaseModel::Window,
    wait_us: |_, _, _| None,
    rejection_end_is_fixed: false,
};

/// Returns how many hits of a log its reply must cover: from the oldest on, less the hits that the log holds, and from
/// the newest back. See `lua/log.lua`.
fn log_reach(commands: &[ChargeCommand], index: usize) -> [i64; 2] {
    let signed = |hits| i64::try_from(hits).unwrap_or(i64::MAX);
    let (mut requested, mut max_debt, mut refunded, mut min_limit) = (0, 0, 0, i64::MAX);
    for command in commands {
        let limit = &command.counters[index].limit;
        min_limit = min_limit.min(i64::from(limit.requests_per_unit()));
        match command.request.hits {
            Hits::Peek => requested += 1,
            Hits::Charge(hits) => {
                requested += signed(hits);
                // Rejected hits that count are entered before the hits that a later charge waits for: count them twice.
                max_debt = max_debt.max(if limit.count_rejected() { signed(hits) } else { 0 });
            }
            Hits::Refund(hits) => refunded += signed(hits),
        }
    }
    [requested + max_debt - min_limit, refunded]
}

/// Computes the wait of a bucket, whose level falls evenly: `reset_us` is the time until it is 0.
fn bucket_wait_us(limit: &Limit, result: &ChargeResult, request: ChargeRequest) -> Option<u64> {
    let Hits::Charge(hits) = request.hits else { return None };
    let room = u128::from(u64::from(limit.capacity()).checked_sub(hits)?);
    let room_us = room * u128::from(limit.period_us()) / u128::from(limit.requests_per_unit().max(1));
    let room_us = u64::try_from(room_us).unwrap_or(u64::MAX);
    let delay_us = request.max_delay_us.min(limit.max_wait_us());
    Some(result.reset_us.saturating_sub(room_us).saturating_sub(delay_us))
}

/// Decodes a log: the running sum before the first record, the number of records, then each record.
fn read_log(reply: &mut ReplyReader<'_>, last: Time) -> Result<sliding_window_log::State, MalformedReply> {
    let (mut sum, count) = (reply.number()?, reply.number()?);
    let mut log = sliding_window_log::State { last, ..Default::default() };
    for _ in 0..count {
        let (at, next_sum) = (reply.time()?, reply.number()?);
        let hits = (next_sum + LOG_MODULUS).checked_sub(sum).ok_or(MalformedReply)? % LOG_MODULUS;
        let in_order = at <= last && log.records.back().is_none_or(|newest| newest.at < at);
        let hits = u32::try_from(hits).ok().filter(|hits| *hits > 0 && in_order).ok_or(MalformedReply)?;
        log.held += u64::from(hits);
        log.records.push_back(LogRecord { at, hits });
        sum = next_sum;
    }
    Ok(log)
}

#[cfg(test)]
mod tests {
    use super::row;
    use crate::limit::algorithm::Algorithm;

    #[test]
    fn wire_ids_of_released_versions_stay() {
        let ids = Algorithm::ALL.map(|algorithm| (algorithm.name(), row(algorithm).wire_id));
        assert_eq!(
            ids,
            [
                ("token_bucket", 0),
                ("leaky_bucket", 1),
                ("fixed_window", 2),
                ("sliding_window_log", 3),
                ("sliding_window_counter", 4),
            ]
        );
    }
}

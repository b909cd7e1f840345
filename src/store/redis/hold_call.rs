//! Call that adjusts a hold: its argument and its reply, which `lua/hold.lua` documents.

use std::slice;

use bytes::Bytes;

use super::script::{CallTime, encode_charges, encode_flags_word};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::fixed_window::window_bounds;
use crate::limit::algorithm::stored_state::{MAX_LUA_INTEGER, MalformedReply, ReplyReader};
use crate::limit::charge::ChargeRequest;
use crate::limit::hold::{
    HeldAmount, HoldAnswer, HoldRequest, MAX_HOLD_US, OtherPool, PoolId, window_end, windows_until_hold_end,
};
use crate::limit::request::Hits;
use crate::store::charge::{OwnedCharge, OwnedCounter};

/// Largest amount that a request is sent with: a script holds sums of them exactly.
const MAX_AMOUNT: u64 = 1 << 40;

/// Encodes a request of a pool on one counter, at about `time`.
pub(super) fn encode_hold_request(counter: &OwnedCounter, pool: PoolId, request: HoldRequest, time: CallTime) -> Bytes {
    let limit = &counter.limit;
    // A peek has the numbers of its counter, and no charges.
    let peek = OwnedCharge::new([*counter].into_iter().collect(), ChargeRequest::new(Hits::Peek, 0));
    let mut argument = encode_charges(slice::from_ref(&peek), time).to_vec();
    let now = match time {
        CallTime::Server { about } => about,
        CallTime::Given(now) => now,
    };
    let lasts_us = request.lasts_us.min(MAX_HOLD_US);
    let [first_end, second_end] = next_calendar_window_ends(limit, now.plus_us(lasts_us));
    let numbers = [
        limit.requests_per_unit(),
        limit.capacity(),
        u64::from(limit.holds_take_capacity()),
        windows_until_hold_end(limit),
        first_end.as_micros(),
        second_end.as_micros(),
        request.used.min(MAX_AMOUNT),
        request.wanted.hits.min(MAX_AMOUNT),
        request.wanted.capacity.min(MAX_AMOUNT),
        lasts_us,
        request.demand.min(MAX_AMOUNT),
        // Numbers begin with the time in microseconds. If they were cut, the next would be taken for a repetition.
        request.number.min(MAX_LUA_INTEGER),
        (if request.first_number > 0 { request.first_number } else { request.number }).min(MAX_LUA_INTEGER),
        limit.capacity_for_scripts(),
        encode_flags_word(counter).unsigned_abs(),
    ];
    numbers.iter().for_each(|number| argument.extend_from_slice(&number.to_le_bytes()));
    argument.extend_from_slice(&pool.0);
    argument.into()
}

/// Returns the next two ends of windows of a calendar after `at`, which is a time by the clock of this process; zeros
/// if windows have the period's length.
fn next_calendar_window_ends(limit: &Limit, at: Time) -> [Time; 2] {
    if !limit.follows_calendar_months() && limit.calendar_windows().is_none() {
        return [Time::default(); 2];
    }
    let first = window_bounds(limit, at).1;
    [first, window_bounds(limit, first).1]
}

/// Decodes the reply to a request.
///
/// # Errors
/// The script cannot have returned this reply.
pub(super) fn decode_hold_answer(reply: &[u8], limit: &Limit) -> Result<HoldAnswer, MalformedReply> {
    let mut reader = ReplyReader::new(reply);
    let now = reader.read_time()?;
    let granted = read_amount(&mut reader)?;
    let until = reader.read_time()?;
    let room = read_amount(&mut reader)?;
    let mut others = Vec::new();
    while let Some(id) = reader.read_bytes_if(|_| true) {
        let (held, until) = (read_amount(&mut reader)?, reader.read_time()?);
        others.push(OtherPool { pool: PoolId(id), held, until, demand: reader.read_number()? });
        let _number = reader.read_number()?;
    }
    if !reader.is_empty() {
        return Err(MalformedReply);
    }
    Ok(HoldAnswer { granted, now, until, room, others, window_end: window_end(limit, now) })
}

fn read_amount(reader: &mut ReplyReader<'_>) -> Result<HeldAmount, MalformedReply> {
    Ok(HeldAmount { hits: reader.read_number()?, capacity: reader.read_number()? })
}

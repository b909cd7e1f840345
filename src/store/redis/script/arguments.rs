//! Encoder of a call's argument: signed 64-bit little-endian numbers, in the layout that `lua/driver.lua` documents.
//!
//! Dry runs and peeks change nothing and are not sent. Delays are bounded so that a Lua number holds every value
//! exactly.

use bytes::{BufMut, Bytes, BytesMut};

use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::counting::Counting;
use crate::limit::algorithm::region::GlobalView;
use crate::limit::algorithm::reply_reader::MAX_EXACT;
use crate::limit::algorithm::state::State;
use crate::limit::algorithm::stored_state::CallCharge;
use crate::limit::request::Hits;
use crate::store::charge::{OwnedCharge, OwnedCounter};

/// Encodes a call of at most [`MAX_CHARGES_PER_CALL`](crate::store::charge::MAX_CHARGES_PER_CALL) charges.
/// The charges happen at `now`, or at the server's own time if `now` is `None`.
pub fn arguments(charges: &[OwnedCharge], now: Option<Time>) -> Bytes {
    let mut encoder = ArgEncoder(Vec::with_capacity(128));
    encoder.push(now.map_or(-1, exact));
    let Some(first) = charges.first() else { return encoder.0.into() };
    for (index, counter) in first.counters.iter().enumerate() {
        let limit = &counter.limit;
        encoder.push(i64::from(limit.counting().properties().wire_id));
        encoder.push(signed(limit.period_us()));
        let call_charges =
            charges.iter().map(|charge| CallCharge { limit: &charge.counters[index].limit, hits: charge.request.hits });
        let [a, b] = State::script_arguments(limit.counting(), call_charges);
        encoder.push(a);
        encoder.push(b);
        encoder.push_digits(match limit.is_counted_in_region() {
            true => charges.iter().map(|charge| charge.counters[index].limit.region_ttl_ms()).fold(0, u64::max),
            false => limit.period_us() / 1000,
        });
    }
    let mut changing = charges.iter().filter_map(|charge| Some((charge, signed_hits(charge)?))).peekable();
    while let Some((charge, hits)) = changing.next() {
        let mut times = 1;
        while changing.next_if(|(next, _)| *next == charge).is_some() {
            times += 1;
        }
        encoder.push(times);
        encoder.push(hits);
        for counter in &charge.counters {
            encoder.push_limit(counter, wait_word(charge, &counter.limit));
        }
    }
    encoder.0.into()
}

/// Appends a time in microseconds, or -1 for the server's own time, to an argument of numbers.
pub fn put_time(argument: &mut BytesMut, time: Option<Time>) {
    argument.put_i64_le(time.and_then(|time| i64::try_from(time.as_micros()).ok()).unwrap_or(-1));
}

/// Encodes the view of the global Redis, an argument of calls on global limits that `lua/regions/region_window.lua`
/// documents.
pub fn view_argument(view: &GlobalView) -> [u8; 40] {
    let flags = i64::from(view.can_request) + 2 * i64::from(view.cut_off) + 4 * i64::from(view.parts_unusable);
    let numbers = [exact(view.valid_from), exact(view.valid_until), view.offset_lo, view.offset_hi, flags];
    let mut argument = [0; 40];
    for (bytes, number) in argument.chunks_exact_mut(8).zip(numbers) {
        bytes.copy_from_slice(&number.to_le_bytes());
    }
    argument
}

/// Returns the hits that a charge adds, negative for a refund; `None` if it cannot change a counter.
fn signed_hits(charge: &OwnedCharge) -> Option<i64> {
    match charge.request.hits {
        _ if charge.dry_run => None,
        Hits::Peek => None,
        Hits::Charge(hits) => Some(signed(hits)),
        Hits::Refund(hits) => Some(-signed(hits)),
    }
}

/// Returns the word of a limit that scripts call `wait`: for a refund the time from which it is void, 0 if it never is;
/// for a charge its longest delay in microseconds, or the cut-off allowance of a global limit (see `regions`).
fn wait_word(charge: &OwnedCharge, limit: &Limit) -> i64 {
    let void_from = || charge.void_from.map_or(0, exact);
    let longest_delay_us = || signed(charge.max_delay_us().min(limit.max_wait_us()));
    match charge.request.hits {
        Hits::Refund(_) => void_from(),
        Hits::Charge(_) | Hits::Peek if limit.is_counted_in_region() => signed(limit.cut_off_allowance()),
        Hits::Charge(_) | Hits::Peek => longest_delay_us(),
    }
}

/// Returns the flags of a limit: 1 if its rejection rejects the charge plus 2 if rejected hits count. With a bucket of
/// a region, the rest of the number is the slack of clocks in microseconds.
fn flags_word(counter: &OwnedCounter) -> i64 {
    let limit = &counter.limit;
    // In a region, rejected hits are demand that the next grant must cover.
    let counts_rejected = limit.count_rejected() || limit.is_counted_in_region();
    let slack_us = if limit.counting() == Counting::RegionBucket { signed(limit.clock_slack_us()) } else { 0 };
    i64::from(counter.joint_limit().rejects_others) + 2 * i64::from(counts_rejected) + 4 * slack_us
}

fn exact(time: Time) -> i64 {
    signed(time.as_micros().min(MAX_EXACT - 1))
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Buffer of the argument.
struct ArgEncoder(Vec<u8>);

impl ArgEncoder {
    fn push(&mut self, number: i64) {
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    /// Appends the number of digits as one byte, then the decimal digits.
    fn push_digits(&mut self, number: u64) {
        let mut buffer = itoa::Buffer::new();
        let digits = buffer.format(number);
        self.0.push(u8::try_from(digits.len()).expect("a number has at most 20 digits"));
        self.0.extend_from_slice(digits.as_bytes());
    }

    fn push_limit(&mut self, counter: &OwnedCounter, wait_word: i64) {
        self.push(i64::from(counter.limit.counted_requests()));
        self.push(i64::from(counter.limit.counted_capacity()));
        self.push(wait_word);
        self.push(flags_word(counter));
    }
}

//! Operations on the state of one algorithm that stores need: how it is encoded, scaled and passed to scripts.
//!
//! Charging a state is not one of them: each algorithm has the functions `charge` and `admits` beside its `State`.
//!
//! Decides: how a level is scaled to the share of `local`, and rounded up (`ShareRatio`).

use super::leaky_level::{LevelParts, RememberedSize};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::charge::{ChargeRequest, ChargeResult, clamp_to_u32};
use crate::limit::request::Hits;

/// One of the charges that a call of a script makes on a counter.
#[derive(Clone, Copy, Debug)]
pub struct ScriptCharge<'c> {
    /// Limit of the counter.
    pub limit: &'c Limit,
    /// Hits to charge, peek at or refund.
    pub hits: Hits,
}

/// State of a counter of one algorithm, as stores encode and scale it.
///
/// Defaults are those of most algorithms.
pub(crate) trait StoredState: Sized {
    /// Packs all but the time of the last charge into two words.
    ///
    /// The memory store does not pack a `sliding_window_log`: it keeps the records apart.
    fn to_packed_words(&self) -> [u64; 2];

    /// Unpacks the words of [`to_packed_words`](Self::to_packed_words).
    fn from_packed_words(words: [u64; 2], last: Time) -> Self;

    /// Decodes the state that follows the time of the last charge in a script's reply.
    ///
    /// # Errors
    /// The script cannot have returned these numbers.
    fn read_from_reply(reply: &mut ReplyReader<'_>, last: Time) -> Result<Self, MalformedReply>;

    /// Returns a state that uses the same part of a share as this one uses of `limit`, rounded up.
    fn scaled_to_fallback_share(&self, ratio: ShareRatio, limit: &Limit, now: Time) -> Self;

    /// Computes the script arguments `a` and `b` of a call that makes these charges at about `_now`.
    fn script_arguments<'c>(_charges: impl Iterator<Item = ScriptCharge<'c>>, _now: Time) -> [i64; 2] {
        [0, 0]
    }

    /// Returns the longest delay in microseconds that keeps the numbers of a script exact, whatever the limit allows.
    fn max_lua_exact_delay_us(_limit: &Limit) -> u64 {
        MAX_LUA_INTEGER - 1
    }

    /// Derives the wait of a rejected charge, in microseconds, from the result of another charge on the same state.
    ///
    /// The hits are at most the capacity. `None`: the result does not tell.
    fn derive_wait_from_result_us(_limit: &Limit, _result: &ChargeResult, _request: ChargeRequest) -> Option<u64> {
        None
    }
}

/// Ratio of this process's fallback share of a limit to the limit, by capacity.
///
/// Rounding is against the caller: the share is used at least as much as the limit was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShareRatio {
    limit: u64,
    share: u64,
}

impl ShareRatio {
    /// Computes the ratio of `share` to `limit`.
    pub(super) fn new(share: &Limit, limit: &Limit) -> Self {
        Self { limit: limit.capacity().max(1), share: share.capacity().max(1) }
    }

    pub(super) fn scale_rounded_up(self, count: u64) -> u64 {
        if self.share == self.limit {
            count
        } else {
            clamp_to_u64((u128::from(count) * u128::from(self.share)).div_ceil(self.limit.into()))
        }
    }

    pub(super) fn scale_rounded_down(self, count: u64) -> u64 {
        clamp_to_u64(u128::from(count) * u128::from(self.share) / u128::from(self.limit))
    }

    /// Returns the mark of a scaled level: that of a bucket of the share's size.
    pub(super) fn scale_mark(self, mark: RememberedSize) -> RememberedSize {
        RememberedSize { size: clamp_to_u32(self.scale_rounded_up(u64::from(mark.size))), ..mark }
    }

    /// Scales a level of `limit`, rounded up to the smallest fraction of a hit.
    pub(super) fn scale_level(self, level: LevelParts, limit: &Limit) -> LevelParts {
        if self.share == self.limit {
            return level;
        }
        let period = u128::from(limit.period_us());
        let units = u128::from(level.whole) * period + u128::from(level.part);
        // No overflow: levels are below 2^40 hits, periods below 2^45 us, and shares below 2^32.
        let scaled = units.saturating_mul(self.share.into()).div_ceil(self.limit.into());
        LevelParts { whole: clamp_to_u64(scaled / period), part: clamp_to_u64(scaled % period) }
    }
}

fn clamp_to_u64(count: u128) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// Largest integer that a Lua number holds exactly; scripts read and return none above it.
pub const MAX_LUA_INTEGER: u64 = 1 << 53;

/// A reply that the script cannot have returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed reply of a script")]
pub struct MalformedReply;

/// Rest of a reply: unsigned 64-bit little-endian numbers.
pub struct ReplyReader<'r>(&'r [u8]);

impl<'r> ReplyReader<'r> {
    /// Starts at the first byte of `reply`.
    pub const fn new(reply: &'r [u8]) -> Self {
        Self(reply)
    }

    /// Returns true at the end of the reply.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Reads the next `N` bytes if they are there and `is_meant` accepts them.
    pub fn read_bytes_if<const N: usize>(&mut self, is_meant: impl FnOnce(&[u8; N]) -> bool) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk::<N>().filter(|(bytes, _)| is_meant(bytes))?;
        self.0 = rest;
        Some(*bytes)
    }

    /// Reads a number of at most [`MAX_LUA_INTEGER`].
    pub fn read_number(&mut self) -> Result<u64, MalformedReply> {
        let (number, rest) = self.0.split_first_chunk().ok_or(MalformedReply)?;
        self.0 = rest;
        let number = u64::from_le_bytes(*number);
        if number <= MAX_LUA_INTEGER { Ok(number) } else { Err(MalformedReply) }
    }

    /// Reads 64 bits that are no number.
    pub(crate) fn read_word(&mut self) -> Result<u64, MalformedReply> {
        let (word, rest) = self.0.split_first_chunk().ok_or(MalformedReply)?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*word))
    }

    /// Reads a number that fits 32 bits.
    pub(crate) fn read_u32(&mut self) -> Result<u32, MalformedReply> {
        u32::try_from(self.read_number()?).map_err(|_| MalformedReply)
    }

    /// Reads a time in microseconds.
    pub fn read_time(&mut self) -> Result<Time, MalformedReply> {
        self.read_number().map(Time::from_micros)
    }
}

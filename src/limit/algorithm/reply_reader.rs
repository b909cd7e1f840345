//! Decoder of the numbers in a script's reply.

use crate::base::clock::Time;

/// Largest integer that a Lua number holds exactly; scripts read and return none above it.
pub(crate) const MAX_EXACT: u64 = 1 << 53;

/// A reply that the script cannot have returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed reply of a script")]
pub struct MalformedReply;

/// Rest of a reply: unsigned 64-bit little-endian numbers.
pub(crate) struct ReplyReader<'r>(&'r [u8]);

impl<'r> ReplyReader<'r> {
    /// Starts at the first byte of `reply`.
    pub(crate) const fn new(reply: &'r [u8]) -> Self {
        Self(reply)
    }

    /// Returns true at the end of the reply.
    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Reads a number of at most [`MAX_EXACT`].
    pub(crate) fn number(&mut self) -> Result<u64, MalformedReply> {
        let (number, rest) = self.0.split_first_chunk().ok_or(MalformedReply)?;
        self.0 = rest;
        let number = u64::from_le_bytes(*number);
        if number <= MAX_EXACT { Ok(number) } else { Err(MalformedReply) }
    }

    /// Reads a number that fits 32 bits.
    pub(crate) fn number_u32(&mut self) -> Result<u32, MalformedReply> {
        u32::try_from(self.number()?).map_err(|_| MalformedReply)
    }

    /// Reads a time in microseconds.
    pub(crate) fn time(&mut self) -> Result<Time, MalformedReply> {
        self.number().map(Time::from_micros)
    }
}

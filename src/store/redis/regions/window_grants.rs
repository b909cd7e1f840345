//! Argument and reply of `lua/global_window.lua`: grants of a window's hits to regions.

use bytes::{BufMut, Bytes, BytesMut};

use crate::base::clock::Time;
use crate::limit::algorithm::global_window::{WindowPool, WindowReturn};
use crate::limit::algorithm::reply_reader::{MalformedReply, ReplyReader};

/// Purpose of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowCall {
    /// Grants at most these hits.
    Grant {
        /// Hits that the region wants.
        wanted: u32,
    },
    /// Takes back hits that the region has not used.
    Return(WindowReturn),
    /// Forgets all hits and starts a new epoch.
    Reset,
}

/// Reply to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowReply {
    /// Time of the global Redis.
    pub now: Time,
    /// Time of the last reset; 0: none is known.
    pub epoch: Time,
    /// Window that contains `now`.
    pub window: u64,
    /// Hits granted, or taken back.
    pub hits: u64,
    /// Hits that stay free after a grant.
    pub free: u64,
}

/// Encodes a call, made at `now`, or at the server's own time if `now` is `None`.
pub fn encode(pool: WindowPool, call: WindowCall, now: Option<Time>) -> Bytes {
    let (purpose, hits, window, epoch) = match call {
        WindowCall::Grant { wanted } => (0, u64::from(wanted), 0, 0),
        WindowCall::Return(WindowReturn { window, hits, epoch }) => (1, hits, window, epoch.as_micros()),
        WindowCall::Reset => (2, 0, 0, 0),
    };
    let mut argument = BytesMut::with_capacity(64);
    argument.put_i64_le(now.and_then(|now| i64::try_from(now.as_micros()).ok()).unwrap_or(-1));
    for number in [purpose, pool.period_us, u64::from(pool.is_sliding), u64::from(pool.max), hits, window, epoch] {
        argument.put_u64_le(number);
    }
    argument.freeze()
}

/// Decodes the reply.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn decode(reply: &[u8]) -> Result<WindowReply, MalformedReply> {
    let mut reader = ReplyReader::new(reply);
    let decoded = WindowReply {
        now: reader.time()?,
        epoch: reader.time()?,
        window: reader.number()?,
        hits: reader.number()?,
        free: reader.number()?,
    };
    if reader.is_empty() { Ok(decoded) } else { Err(MalformedReply) }
}

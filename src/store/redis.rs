//! Counters in Redis or Valkey, shared by all replicas.
//!
//! One call decides all limits of a descriptor, in one script that runs on the node that owns its keys. The script
//! returns what the counters had used; the pure algorithms then say here what each draw finds, so that Redis and memory
//! can not answer differently. Draws on a key whose call is in flight wait for each other and go together.

pub mod key;
pub mod script;

use std::time::Instant;

use smallvec::SmallVec;

use crate::algorithm::Level;
use crate::clock::Time;
use crate::counter::Draw;

/// The levels of a descriptor's limits, in their order.
pub type Levels = SmallVec<[Level; 1]>;

/// Counters in Redis.
#[derive(Debug)]
pub struct Redis {}

/// What becomes of what is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// It is charged.
    Charge,
    /// Nothing: only what the draw would find is asked.
    Trial,
}

/// Why a draw was not decided by Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RedisError {
    /// No answer came in time; the draw may have been charged.
    #[error("no answer in time")]
    Timeout,
}

impl Redis {
    /// Makes all draws of a request at once; one result for each, in their order, not later than `until`.
    ///
    /// `now` is this process's time; the counters' own time is that of Redis.
    pub async fn draw_all(
        &self,
        draws: &[Draw<'_>],
        _purpose: Purpose,
        (_now, _until): (Time, Instant),
    ) -> SmallVec<[Result<Levels, RedisError>; 2]> {
        draws.iter().map(|_| Err(RedisError::Timeout)).collect()
    }
}

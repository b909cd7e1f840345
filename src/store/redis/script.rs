//! The scripts that draw from counters in Redis.
use crate::algorithm::{Ask, Level, State};
use crate::clock::Time;
use crate::limit::{Algorithm, Limit};
use bytes::Bytes;
use smallvec::SmallVec;
pub const MOST_DRAWS: usize = 512;
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    pub limit: Limit,
    pub enforced: bool,
    pub tag: u128,
}
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drawing {
    pub counters: SmallVec<[Counted; 1]>,
    pub ask: Ask,
    pub trial: bool,
}
#[derive(Debug)]
pub struct Script {
    pub text: String,
    pub sha1: String,
}
pub fn script_for(_algorithms: impl Iterator<Item = Algorithm>) -> &'static Script {
    todo!()
}
pub fn arguments(_draws: &[Drawing], _now: Option<Time>) -> Bytes {
    todo!()
}
#[derive(Debug)]
pub struct Replayed {
    pub levels: Vec<SmallVec<[Level; 1]>>,
    pub states: SmallVec<[State; 1]>,
    pub now: Time,
}
#[derive(Debug)]
pub struct BadReply;
pub fn replay(_draws: &[Drawing], _reply: &[u8]) -> Result<Replayed, BadReply> {
    todo!()
}

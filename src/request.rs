//! A question as the pipeline sees it: a domain and descriptors, borrowed from whatever carried them.
//!
//! Entry keys and values are bytes: Envoy forwards raw header bytes, and a value that is not UTF-8 must be limited like
//! any other. Protobuf, JSON and command lines are turned into this form at the edge; nothing below knows where
//! a request came from. A request whose domain or descriptor list is empty can be built; `decide` refuses it.

use smallvec::SmallVec;

/// The most hits one charge can carry; larger numbers are clamped to it.
pub const MAX_HITS: u64 = 1 << 32;

/// One `ShouldRateLimit` question.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request<'a> {
    /// The namespace of the limits.
    pub domain: &'a str,
    /// Each is matched and decided by itself, in this order.
    pub descriptors: SmallVec<[Descriptor<'a>; 2]>,
    /// The request-wide number of hits as it was sent; 0 where it was not.
    pub hits_addend: u32,
}

/// A path through the rule tree, with what this request asks of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor<'a> {
    /// The path, outermost first; may be empty, which matches no rule.
    pub entries: SmallVec<[Entry<'a>; 4]>,
    /// What is charged from each limit that matches.
    pub hits: Hits,
    /// The number of hits as it was sent with this descriptor, if any.
    pub hits_addend: Option<u64>,
    /// A limit sent with the request, to be used in place of the configured one.
    pub limit_override: Option<LimitOverride>,
}

/// One key and value of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Raw bytes, not necessarily UTF-8.
    pub key: &'a [u8],
    /// Raw bytes, not necessarily UTF-8; may be empty.
    pub value: &'a [u8],
}

/// A limit that travels with a request, as it was sent: nothing in it is checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitOverride {
    /// 0 refuses everything.
    pub requests_per_unit: u32,
    /// The number of `envoy.type.v3.RateLimitUnit`; 7 is the rate limit service's own WEEK.
    pub unit: i32,
    /// The period is the unit times this; 1 where it was not sent.
    pub unit_multiplier: u32,
}

/// What one charge takes from a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hits {
    /// Nothing: a free look at whether one more hit would pass.
    Peek,
    /// So many hits, 1 to [`MAX_HITS`].
    Charge(u64),
    /// So many hits given back, 1 to [`MAX_HITS`]; never refused.
    Refund(u64),
}

impl Hits {
    /// `count` hits to take, or to give back if `negative`; 0 is a look. Clamped to [`MAX_HITS`].
    pub const fn new(count: u64, negative: bool) -> Self {
        let count = if count > MAX_HITS { MAX_HITS } else { count };
        match (count, negative) {
            (0, _) => Self::Peek,
            (_, false) => Self::Charge(count),
            (_, true) => Self::Refund(count),
        }
    }
}

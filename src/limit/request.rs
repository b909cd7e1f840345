//! A rate-limit request: a domain and descriptors, borrowed from the message that carried them.
//!
//! Entry keys and values are bytes: Envoy forwards raw header bytes, and a value that is not UTF-8 is limited like any
//! other. Protobuf, JSON and command lines are converted to this form on arrival, so the decision path does not know
//! their origin. A request without a domain or descriptors can be built; `decide` rejects it as invalid.
//!
//! Decides: how many hits a descriptor may have (`MAX_HITS_OF_DESCRIPTOR`).

use std::fmt;

use smallvec::SmallVec;

/// Maximum number of hits that a descriptor can have, 2^53 - 1; larger numbers are clamped.
pub const MAX_HITS_OF_DESCRIPTOR: u64 = (1 << 53) - 1;

/// Maximum number of hits of one charge; larger numbers are clamped, unless all counters are fixed windows and one has
/// a limit above 2^32 - 1.
pub const MAX_HITS: u64 = 1 << 32;

/// Request of one `ShouldRateLimit` call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request<'a> {
    /// Namespace of the limits.
    pub domain: &'a str,
    /// Descriptors; each is matched and decided by itself, in this order.
    pub descriptors: SmallVec<[Descriptor<'a>; 2]>,
    /// Number of hits for all descriptors, as sent; 0 if absent.
    pub hits_addend: u32,
}

/// Path through the rule tree, with the hits to charge there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor<'a> {
    /// Entries of the path, outermost first; an empty path matches no rule.
    pub entries: SmallVec<[Entry<'a>; 4]>,
    /// Hits for each limit that matches.
    pub hits: Hits,
    /// Number of hits as sent with this descriptor, if any.
    pub hits_addend: Option<u64>,
    /// Limit sent with the request, which replaces the configured one.
    pub limit_override: Option<LimitOverride>,
}

/// Key and value of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Key as raw bytes, not necessarily UTF-8.
    pub key: &'a [u8],
    /// Value as raw bytes, not necessarily UTF-8; may be empty.
    pub value: &'a [u8],
}

/// Writes `key=value,key=value` as it was sent; bytes that are not UTF-8 become U+FFFD. Whoever prints it escapes it.
impl fmt::Display for Descriptor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, entry) in self.entries.iter().enumerate() {
            let separator = if index > 0 { "," } else { "" };
            write!(f, "{separator}{entry}")?;
        }
        Ok(())
    }
}

/// Writes `key=value`, as a descriptor does.
impl fmt::Display for Entry<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", String::from_utf8_lossy(self.key), String::from_utf8_lossy(self.value))
    }
}

/// Limit sent with a request, not validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitOverride {
    /// Hits in a period; 0 rejects everything.
    pub requests_per_unit: u32,
    /// Number of `envoy.type.v3.RateLimitUnit`; 7 is WEEK of the rate limit service's own enum.
    pub unit: i32,
    /// Number of units in the period; 1 if absent.
    pub unit_multiplier: u32,
}

/// Hits of one request to a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hits {
    /// No hits: reads the counter without charging; admitted if one more hit would be.
    Peek,
    /// Number of hits to charge, 1 to [`MAX_HITS_OF_DESCRIPTOR`].
    Charge(u64),
    /// Number of hits to refund, 1 to [`MAX_HITS_OF_DESCRIPTOR`]; never rejected.
    Refund(u64),
}

impl Hits {
    /// Creates a charge of `count` hits, or a refund if `negative`; 0 is a peek. Clamps to [`MAX_HITS_OF_DESCRIPTOR`].
    pub const fn new(count: u64, negative: bool) -> Self {
        let count = if count > MAX_HITS_OF_DESCRIPTOR { MAX_HITS_OF_DESCRIPTOR } else { count };
        match (count, negative) {
            (0, _) => Self::Peek,
            (_, false) => Self::Charge(count),
            (_, true) => Self::Refund(count),
        }
    }
}

//! The answer: a verdict for each descriptor, and how they merge into one.
//!
//! Over limit is a value here, never an error. Names are borrowed from the rule set that decided; the encoders turn
//! a decision into protobuf or JSON and add nothing of their own.

use std::borrow::Cow;

use smallvec::SmallVec;

use crate::limit::period::Period;

/// The answer to a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision<'r> {
    /// Whether the request as a whole is refused. This alone decides what Envoy does.
    pub over_limit: bool,
    /// Whether it would be, were not everything on trial (SHADOW_MODE).
    pub shadowed: bool,
    /// One for each descriptor of the request, in its order.
    pub statuses: SmallVec<[LimitStatus<'r>; 2]>,
    /// To be added to the response to the client, in this order; free of control characters.
    pub headers: SmallVec<[Header<'r>; 4]>,
    /// The body of a refusal, where the rule has one.
    pub body: Option<&'r str>,
    /// The dynamic metadata for Envoy, where it is switched on.
    pub metadata: Option<serde_json::Map<String, serde_json::Value>>,
    /// How long the answer is to be held, in microseconds; 0 unless it is OK.
    pub delay_us: u64,
}

/// What is said about one descriptor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LimitStatus<'r> {
    /// Whether this descriptor is over its limit, as the client is told.
    pub over_limit: bool,
    /// The limit that decided; `None` if none matched.
    pub current_limit: Option<CurrentLimit<'r>>,
    /// Hits that could still pass now; `u32::MAX` if the rule is unlimited.
    pub remaining: u32,
    /// Seconds until the limit is full again, or, for a refusal, until the same request could pass; rounded up.
    pub until_reset_s: Option<u64>,
}

/// A limit as it is named to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CurrentLimit<'r> {
    /// The rule's `name`; empty if it has none.
    pub name: &'r str,
    /// Hits in a period.
    pub requests_per_unit: u32,
    /// The period.
    pub period: Period,
}

/// A header for the client's response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header<'r> {
    /// The name, as configured.
    pub name: &'r str,
    /// The value.
    pub value: Cow<'r, str>,
}

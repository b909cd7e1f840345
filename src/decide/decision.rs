//! The answer to a request: a status for each descriptor, and the merged result.
//!
//! Over limit is a value here, never an error. Names are borrowed from the rule set that decided. The encoders turn a
//! decision into protobuf or JSON and add nothing.

use std::borrow::Cow;

use smallvec::SmallVec;

use crate::limit::period::Period;

/// The answer to a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision<'r> {
    /// True if the request is rejected. Envoy acts on this alone.
    pub over_limit: bool,
    /// True if the request would be rejected without SHADOW_MODE.
    pub shadowed: bool,
    /// Status of each descriptor, in the order of the request.
    pub statuses: SmallVec<[LimitStatus<'r>; 2]>,
    /// Headers to add to the client's response, in this order.
    pub headers: SmallVec<[Header<'r>; 4]>,
    /// Body of a rejection, if the rule has one.
    pub body: Option<&'r str>,
    /// Dynamic metadata for Envoy, if it is switched on.
    pub metadata: Option<serde_json::Map<String, serde_json::Value>>,
    /// Delay of the response in microseconds; 0 if the request is rejected.
    pub delay_us: u64,
}

/// Status of one descriptor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LimitStatus<'r> {
    /// True if the descriptor is over its limit, as reported to the client.
    pub over_limit: bool,
    /// The limit that decided; `None` if none matched.
    pub current_limit: Option<CurrentLimit<'r>>,
    /// Number of hits that would still be admitted now; `u32::MAX` if the rule is unlimited.
    pub remaining: u32,
    /// Seconds until the full limit is available again or, after a rejection, until the same request can be admitted;
    /// rounded up.
    pub until_reset_s: Option<u64>,
}

/// Limit as reported to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CurrentLimit<'r> {
    /// `name` of the rule; empty if it has none.
    pub name: &'r str,
    /// Hits per period.
    pub requests_per_unit: u32,
    /// Period of the limit.
    pub period: Period,
}

/// Header for the client's response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header<'r> {
    /// Name, as configured.
    pub name: &'r str,
    /// Value of the header.
    pub value: Cow<'r, str>,
}

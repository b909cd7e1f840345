//! A decision: its inputs besides the request, its result, and the reasons why there is none.
//!
//! The result has a status for each descriptor, and the merged answer. Over limit is a value here, never an error.
//! Names are borrowed from the rule set that decided. The encoders turn a decision into protobuf or JSON and add
//! nothing.

use std::borrow::Cow;

use smallvec::SmallVec;

use crate::limit::period::Period;
use crate::limit::slot::SlotCaller;
use crate::rules::rule::set::RuleSet;
use crate::store::StoreContext;

/// Inputs taken once for each decision, when its request arrives.
#[derive(Clone, Copy, Debug)]
pub struct DecisionContext<'r> {
    /// The rules; `None` before any were loaded.
    pub rules: Option<&'r RuleSet>,
    /// Longest delay of the response that the caller can wait for, in microseconds, after the store's timeout.
    pub max_delay_us: u64,
    /// Time of the request, deadline and span of the store's operations.
    pub store: StoreContext<'r>,
    /// Who makes the call; only for slots.
    pub slots: SlotCaller<'r>,
}

/// The answer to a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision<'r> {
    /// True if the request is rejected. Envoy acts on this alone.
    pub over_limit: bool,
    /// True if the request would be rejected without SHADOW_MODE.
    pub shadowed: bool,
    /// Status of each descriptor, in the order of the request.
    pub statuses: SmallVec<[ReportedStatus<'r>; 2]>,
    /// Headers to add to the client's response, in this order.
    pub headers: SmallVec<[Header<'r>; 4]>,
    /// Headers to add to the request for the upstream, in this order; none unless they are switched on.
    pub request_headers: Vec<Header<'r>>,
    /// Body of a rejection, if the rule has one.
    pub body: Option<Cow<'r, str>>,
    /// Dynamic metadata for Envoy, if it is switched on.
    pub metadata: Option<serde_json::Map<String, serde_json::Value>>,
    /// Delay of the response in microseconds; 0 if the request is rejected.
    pub delay_us: u64,
}

/// Status of one descriptor, as the response reports it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReportedStatus<'r> {
    /// True if the descriptor is over its limit, as reported to the client.
    pub over_limit: bool,
    /// The limit that decided; `None` if none matched.
    pub current_limit: Option<CurrentLimit<'r>>,
    /// Number of hits that would still be admitted now; `u32::MAX` as in the protocol if the rule is unlimited.
    pub remaining: u64,
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
    pub requests_per_unit: u64,
    /// Period of the limit.
    pub period: Period,
}

/// Header for the client's response, or for the request to the upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header<'r> {
    /// Name, as configured.
    pub name: &'r str,
    /// Value of the header.
    pub value: Cow<'r, str>,
}

impl<'r> Header<'r> {
    /// Creates a header.
    pub fn new(name: &'r str, value: impl Into<Cow<'r, str>>) -> Self {
        Self { name, value: value.into() }
    }
}

/// Reason why a request has no decision. The texts, but for [`DecideError::Store`], are those of envoyproxy/ratelimit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecideError {
    /// The request names no domain: the caller's fault.
    #[error("rate limit domain must not be empty")]
    EmptyDomain,
    /// The request has no descriptor: the caller's fault.
    #[error("rate limit descriptor list must not be empty")]
    NoDescriptors,
    /// No rules were ever loaded: our fault.
    #[error("no rate limit configuration loaded")]
    NoRules,
    /// The store failed under a rule with the policy `error`.
    #[error("the store failed, and the policy is `on_store_error: error`")]
    Store,
    /// The value of an entry `slot` or `release` is a formatter that Envoy sent as text: the caller's fault. All its
    /// streams would have one slot.
    #[error(
        "the value of an entry `slot` or `release` begins with `%`: envoy sends the text of a formatter unless its \
         runtime has envoy.reloadable_features.enable_formatter_for_ratelimit_action_descriptor_value: true"
    )]
    LiteralFormatter,
    /// Its descriptors could take too many steps of backtracking: the caller's fault.
    #[error(
        "rate limit descriptor list is too long for a domain with `backtrack: true` and such rules: at most \
         {max_descriptors} descriptors"
    )]
    TooMuchBacktracking {
        /// Maximum number of descriptors in this domain.
        max_descriptors: u64,
    },
}

impl DecideError {
    /// Name of the reason in the decision log.
    pub const fn name(self) -> &'static str {
        match self {
            Self::EmptyDomain => "empty_domain",
            Self::NoDescriptors => "no_descriptors",
            Self::NoRules => "no_rules",
            Self::Store => "store",
            Self::LiteralFormatter => "literal_formatter",
            Self::TooMuchBacktracking { .. } => "too_much_backtracking",
        }
    }
}

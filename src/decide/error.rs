//! Reasons why a request has no decision.

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
    #[error("the store failed, and the rule says `on_store_error: error`")]
    Store,
}

impl DecideError {
    /// Name of the reason in the decision log.
    pub const fn name(self) -> &'static str {
        match self {
            Self::EmptyDomain => "empty_domain",
            Self::NoDescriptors => "no_descriptors",
            Self::NoRules => "no_rules",
            Self::Store => "store",
        }
    }
}

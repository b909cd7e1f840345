//! Assignments: what a proxy is told to do.

/// Strategy of an assignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// Every request passes.
    Allow,
    /// No request passes.
    Deny,
    /// Requests take tokens.
    Tokens(ProxyTokenBucket),
}

/// A bucket of tokens at a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyTokenBucket {
    /// Tokens that it holds, at least 1.
    pub max: u32,
    /// Tokens that arrive in an interval; 0: none.
    pub fill: u32,
    /// The interval in seconds, at least 1.
    pub interval_s: u32,
}

/// An assignment to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// What the proxy does.
    pub strategy: Strategy,
    /// [`Strategy::Deny`] goes before it in the same message, so that the bucket begins full.
    pub starts_full: bool,
    /// Time to live in seconds, at least 1.
    pub ttl_s: u32,
}

/// What becomes of an idle holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retirement {
    /// Send this first.
    Assign(Assignment),
    /// Wait for the next report.
    Wait,
    /// The proxy may forget the bucket.
    Done,
}

//! Errors of connecting: a kind for decisions, and a text for operators.

use super::error::RedisError;

/// Reason why a server cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(crate) struct ConnectError {
    pub(crate) kind: RedisError,
    /// Text for logs and health pages, free of secrets.
    pub(crate) text: String,
}

impl ConnectError {
    /// Creates an error that an operator must fix.
    pub(crate) const fn misconfigured(text: String) -> Self {
        Self { kind: RedisError::Misconfigured, text }
    }
}

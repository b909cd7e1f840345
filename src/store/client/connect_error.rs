//! Errors of connecting: a kind for decisions, and a text for operators.

use std::fmt::Display;

/// Reason of a failed call to one kind of server.
pub(crate) trait ErrorKind: Copy + PartialEq + Display + Send + Sync + 'static {
    /// No reply arrived before the deadline.
    const TIMEOUT: Self;
    /// The connection closed before the reply.
    const BROKEN: Self;
    /// The server or the connection needs other settings.
    const MISCONFIGURED: Self;

    /// Returns true if the error concerns the whole server, not one key or slot.
    fn is_of_server(self) -> bool;

    /// Returns true if the error lasts until an operator changes a setting.
    fn is_misconfiguration(self) -> bool;
}

/// Reason why a server cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(crate) struct ConnectError<K> {
    pub(crate) kind: K,
    /// Text for logs and health pages, free of secrets.
    pub(crate) text: String,
}

impl<K: ErrorKind> ConnectError<K> {
    /// Creates an error that an operator must fix.
    pub(crate) const fn misconfigured(text: String) -> Self {
        Self { kind: K::MISCONFIGURED, text }
    }
}

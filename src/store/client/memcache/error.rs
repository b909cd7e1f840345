//! Errors of the client: kinds of failed calls, and the meaning of error replies.

use crate::base::named_enum::named_enum;
use crate::store::client::connect::{CallErrorKind, ConnectError};
use crate::store::client::pipeline::PipelineError;

named_enum! {
    /// Reason why memcached did not complete a call. Kinds that Redis has too have the same names.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
    pub enum MemcacheError {
        /// No reply arrived before the deadline; the call may have run.
        #[error("no answer in time")]
        Timeout = "timeout",
        /// The caller's deadline is too short for a call.
        #[error("the caller leaves no time to ask")]
        NoTime = "no_time",
        /// No connection is open, the breaker is open, or no server is known.
        #[error("not connected")]
        Unreachable = "unreachable",
        /// The connection closed before the reply; the call may have run.
        #[error("the connection broke")]
        Broken = "broken",
        /// The server cannot store values.
        #[error("the server takes no writes")]
        NoWrites = "no_writes",
        /// The value is not a number.
        #[error("the key holds a value that is no number")]
        WrongType = "wrong_type",
        /// The reply is invalid, or an error that the client does not know.
        #[error("an invalid reply")]
        BadReply = "bad_reply",
        /// The server or the connection needs other settings.
        #[error("the server does not serve this client")]
        Misconfigured = "misconfigured",
        /// Too many calls wait for one server.
        #[error("too many calls are queued")]
        Overloaded = "overloaded",
        /// The limit needs more than an increment.
        #[error("memcache cannot count such a limit")]
        Unsupported = "unsupported",
    }
}

impl MemcacheError {
    /// Setting or server property that an operator should check.
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Timeout => "TOLLKEEPER_STORE_TIMEOUT bounds the wait",
            Self::NoTime => "its deadline (grpc-timeout) must leave more than 5 ms",
            Self::Unreachable | Self::Broken => "see the preceding connection errors",
            Self::NoWrites => "its memory (-m) may be full",
            Self::WrongType => "CACHE_KEY_PREFIX separates keys from those of other programs",
            Self::BadReply => "is it memcached 1.4 or newer?",
            Self::Misconfigured => "see the preceding errors for the setting",
            Self::Overloaded => "the server cannot keep up with the load",
            Self::Unsupported => {
                "memcache counts strict fixed windows that count rejected hits, one for each descriptor"
            }
        }
    }

    /// Parses the text of an error reply.
    pub fn from_reply(text: &str) -> Self {
        let message = text.split_once(' ').map_or("", |(_, message)| message);
        if message.contains("non-numeric") {
            Self::WrongType
        } else if message.contains("out of memory") {
            Self::NoWrites
        } else if message.contains("unauthenticated") {
            Self::Misconfigured
        } else {
            Self::BadReply
        }
    }
}

impl CallErrorKind for MemcacheError {
    const TIMEOUT_KIND: Self = Self::Timeout;
    const BROKEN_CONNECTION_KIND: Self = Self::Broken;
    const MISCONFIGURED_KIND: Self = Self::Misconfigured;

    fn concerns_whole_server(self) -> bool {
        matches!(self, Self::Timeout | Self::Broken | Self::NoWrites | Self::Misconfigured)
    }

    fn is_misconfiguration(self) -> bool {
        self == Self::Misconfigured
    }
}

/// Reason why a server cannot be used.
pub(crate) type MemcacheConnectError = ConnectError<MemcacheError>;

impl From<PipelineError> for MemcacheError {
    fn from(error: PipelineError) -> Self {
        match error {
            PipelineError::Timeout => Self::Timeout,
            PipelineError::Broken => Self::Broken,
            PipelineError::Overloaded => Self::Overloaded,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::MemcacheError;

    #[test]
    fn error_replies_have_kinds() {
        for (text, kind) in [
            ("CLIENT_ERROR cannot increment or decrement non-numeric value", MemcacheError::WrongType),
            ("SERVER_ERROR out of memory storing object", MemcacheError::NoWrites),
            ("SERVER_ERROR out of memory in incr", MemcacheError::NoWrites),
            ("CLIENT_ERROR unauthenticated", MemcacheError::Misconfigured),
            ("CLIENT_ERROR bad command line format", MemcacheError::BadReply),
            ("ERROR", MemcacheError::BadReply),
        ] {
            assert_eq!(MemcacheError::from_reply(text), kind, "{text}");
        }
    }
}

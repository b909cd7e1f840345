//! Errors of the client: kinds of failed calls, and the meaning of error replies.
//!
//! An error is a kind without text: kinds are counted, select the failure policy and open breakers. The text of a reply
//! is logged where the reply is read. Redirections and missing scripts are error replies, but not failures.
//!
//! Decides: what an error of Redis means (READONLY, LOADING, NOAUTH, NOSCRIPT, OOM), and what to do.
//! Decides: which errors count for the circuit breaker (`concerns_whole_server`).

use crate::base::named_enum::named_enum;
use crate::base::text::first_chars_if_longer;
use crate::store::client::connect::{CallErrorKind, ConnectError};
use crate::store::client::pipeline::PipelineError;

named_enum! {
    /// Reason why Redis did not complete a call.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
    pub enum RedisError {
        /// No reply arrived before the deadline; the call may have run.
        #[error("no answer in time")]
        Timeout = "timeout",
        /// The caller's deadline is too short for a call.
        #[error("the caller leaves no time to ask")]
        NoTime = "no_time",
        /// No connection is open, or no server is known.
        #[error("not connected")]
        Unreachable = "unreachable",
        /// The breaker is open: the server was not asked, because its last calls failed.
        #[error("not asked, because its last calls failed")]
        BreakerOpen = "breaker_open",
        /// The connection closed before the reply; the call may have run.
        #[error("the connection broke")]
        Broken = "broken",
        /// The server is a replica, or has lost its primary.
        #[error("the server is read-only")]
        ReadOnly = "read_only",
        /// The server is out of memory, or is configured to reject writes.
        #[error("the server takes no writes")]
        NoWrites = "no_writes",
        /// Another script runs for too long.
        #[error("the server is busy with a script")]
        Busy = "busy",
        /// The server is reading its data from disk.
        #[error("the server is loading its data")]
        Loading = "loading",
        /// The server rejects the password or user.
        #[error("the server does not accept the credentials")]
        Unauthenticated = "unauthenticated",
        /// No node serves the slot of the key now.
        #[error("no node serves the slot")]
        SlotDown = "slot_down",
        /// The key holds a value of another type.
        #[error("the key holds a value of another type")]
        WrongType = "wrong_type",
        /// The reply is invalid.
        #[error("an invalid reply")]
        BadReply = "bad_reply",
        /// The user lacks a permission, or the server lacks a command or is of another kind.
        #[error("the server rejects a command that is needed")]
        Misconfigured = "misconfigured",
        /// Too many calls wait for one key or one server.
        #[error("too many calls are queued")]
        Overloaded = "overloaded",
    }
}

impl RedisError {
    /// Setting or server property that an operator should check.
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Timeout => "TOLLKEEPER_STORE_TIMEOUT bounds the wait",
            Self::NoTime => "its deadline (grpc-timeout) must leave more than 5 ms",
            Self::Unreachable | Self::BreakerOpen | Self::Broken => "see the preceding connection errors",
            Self::ReadOnly | Self::SlotDown => "the client looks for a primary until it finds one",
            Self::NoWrites => "its memory (maxmemory) or its disk may be full",
            Self::Busy => "SCRIPT KILL ends the script",
            Self::Loading => "the server serves again once it has loaded its data",
            Self::Unauthenticated => "REDIS_AUTH or the file of REDIS_AUTH_FILE holds the password",
            Self::WrongType => "CACHE_KEY_PREFIX separates keys from those of other programs",
            Self::BadReply => "is it Redis 5.0 or newer, or Valkey?",
            Self::Misconfigured => "see the preceding errors for the missing permission or setting",
            Self::Overloaded => "the server cannot keep up with the load",
        }
    }
}

impl CallErrorKind for RedisError {
    const TIMEOUT: Self = Self::Timeout;
    const BROKEN_CONNECTION: Self = Self::Broken;
    const MISCONFIGURED: Self = Self::Misconfigured;

    fn concerns_whole_server(self) -> bool {
        matches!(
            self,
            Self::Timeout
                | Self::Broken
                | Self::ReadOnly
                | Self::NoWrites
                | Self::Busy
                | Self::Loading
                | Self::Unauthenticated
                | Self::Misconfigured
        )
    }

    fn is_misconfiguration(self) -> bool {
        matches!(self, Self::Misconfigured | Self::Unauthenticated)
    }

    fn is_login_failure(self) -> bool {
        self == Self::Unauthenticated
    }
}

/// Reason why a server cannot be used.
pub(crate) type RedisConnectError = ConnectError<RedisError>;

impl From<PipelineError> for RedisError {
    fn from(error: PipelineError) -> Self {
        match error {
            PipelineError::Timeout => Self::Timeout,
            PipelineError::Broken => Self::Broken,
            PipelineError::Overloaded => Self::Overloaded,
        }
    }
}

/// Meaning of an error reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplyError {
    /// The server does not have the script; send its text.
    NoScript,
    /// The node at this address owns the slot now.
    Moved(String),
    /// The node at this address serves the key during a migration; send ASKING first.
    Ask(String),
    /// The command failed.
    Failed(RedisError),
}

impl ReplyError {
    /// Parses the text of an error reply.
    pub fn from_reply(text: &str) -> Self {
        let mut words = text.split_ascii_whitespace();
        let address = |words: &mut dyn Iterator<Item = &str>| words.nth(1).map(str::to_owned);
        let failure = match words.next().unwrap_or_default() {
            "NOSCRIPT" => return Self::NoScript,
            "MOVED" => return address(&mut words).map_or(Self::Failed(RedisError::BadReply), Self::Moved),
            "ASK" => return address(&mut words).map_or(Self::Failed(RedisError::BadReply), Self::Ask),
            "TRYAGAIN" | "CLUSTERDOWN" => RedisError::SlotDown,
            "READONLY" | "MASTERDOWN" => RedisError::ReadOnly,
            "OOM" | "MISCONF" | "NOREPLICAS" => RedisError::NoWrites,
            "BUSY" => RedisError::Busy,
            "LOADING" => RedisError::Loading,
            "NOAUTH" | "WRONGPASS" => RedisError::Unauthenticated,
            "WRONGTYPE" => RedisError::WrongType,
            "NOPERM" | "CROSSSLOT" | "NOPROTO" => RedisError::Misconfigured,
            "ERR" | "@user_script:" => parse_generic_error(text),
            _ => RedisError::BadReply,
        };
        Self::Failed(failure)
    }
}

/// Parses an `ERR` reply. Servers before 7.0 wrap errors of a script in such a text or begin it with `@user_script:`,
/// and servers from 7.2 on wrap those of its ACL.
fn parse_generic_error(text: &str) -> RedisError {
    /// Parts of texts that mark a wrapped error, and its kind.
    const WRAPPED_ERROR_MARKS: [(&str, RedisError); 9] = [
        ("-OOM ", RedisError::NoWrites),
        ("-MISCONF ", RedisError::NoWrites),
        ("-NOREPLICAS ", RedisError::NoWrites),
        ("-READONLY ", RedisError::ReadOnly),
        ("-NOPERM ", RedisError::Misconfigured),
        ("WRONGTYPE ", RedisError::WrongType),
        ("Write commands not allowed after non deterministic", RedisError::Misconfigured),
        ("can't run this command or subcommand", RedisError::Misconfigured),
        ("ACL failure in script", RedisError::Misconfigured),
    ];
    /// Parts of texts that mark a configuration error.
    const MISCONFIGURATION_MARKS: [&str; 6] = [
        "unknown command",
        "cluster support disabled",
        "is not allowed",
        "AUTH <password> called without any password",
        "invalid DB index",
        "DB index is out of range",
    ];
    if let Some((_, kind)) = WRAPPED_ERROR_MARKS.iter().find(|(mark, _)| text.contains(mark)) {
        *kind
    } else if MISCONFIGURATION_MARKS.iter().any(|mark| text.contains(mark)) {
        RedisError::Misconfigured
    } else if text.contains("not an integer") {
        RedisError::WrongType
    } else if text.contains("invalid password") {
        RedisError::Unauthenticated
    } else {
        RedisError::BadReply
    }
}

/// Maximum number of characters of an error reply in logs.
const MAX_LOGGED_REPLY_CHARS: usize = 160;

/// Returns the text of an error reply for logs: shortened, and without arguments.
pub(crate) fn sanitize_error_text(text: &str) -> String {
    // Some servers quote the arguments of the command, passwords included.
    let text = text.split(", with args").next().unwrap_or_default();
    first_chars_if_longer(text, MAX_LOGGED_REPLY_CHARS).unwrap_or(text).to_owned()
}

//! Why Redis did not decide a charge, and what its error replies mean.
//!
//! A failure has a kind and no text: kinds are counted, decide by policy and open breakers; the text is logged where
//! the reply was read. Replies that send a call elsewhere, or ask for the script, are no failures and are told apart
//! here too.

/// Why a charge was not decided by Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum RedisError {
    /// No answer came in time; the charge may have been charged.
    #[error("no answer in time")]
    Timeout,
    /// The caller waits too short a time to ask.
    #[error("the caller leaves no time to ask")]
    NoTime,
    /// There is no connection, or the breaker is open.
    #[error("not connected")]
    Unreachable,
    /// The connection broke; the charge may have been charged.
    #[error("the connection broke")]
    Broken,
    /// The server is a replica, or has lost its primary.
    #[error("the server is read-only")]
    ReadOnly,
    /// The server is out of memory, or was told not to write.
    #[error("the server takes no writes")]
    NoWrites,
    /// Another script runs on and on.
    #[error("the server is busy with a script")]
    Busy,
    /// The server is reading its data from disk.
    #[error("the server is loading its data")]
    Loading,
    /// The password or user is not accepted.
    #[error("the server does not accept the credentials")]
    Unauthenticated,
    /// No node serves the key's slot, or not now.
    #[error("no node serves the slot")]
    SlotDown,
    /// Something else stands under the counter's key.
    #[error("something else stands under the key")]
    WrongType,
    /// A reply that makes no sense.
    #[error("a reply that makes no sense")]
    BadReply,
    /// The user may not do what the rules need, or the server does not know how to, or is of another kind.
    #[error("the server refuses what the rules need")]
    Misconfigured,
    /// Too many charges wait for one counter, or too many calls for one server.
    #[error("too many charges wait")]
    Overloaded,
}

impl RedisError {
    /// All kinds, in their order.
    pub const ALL: [Self; 14] = [
        Self::Timeout,
        Self::NoTime,
        Self::Unreachable,
        Self::Broken,
        Self::ReadOnly,
        Self::NoWrites,
        Self::Busy,
        Self::Loading,
        Self::Unauthenticated,
        Self::SlotDown,
        Self::WrongType,
        Self::BadReply,
        Self::Misconfigured,
        Self::Overloaded,
    ];

    /// The name in metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::NoTime => "no_time",
            Self::Unreachable => "unreachable",
            Self::Broken => "broken",
            Self::ReadOnly => "read_only",
            Self::NoWrites => "no_writes",
            Self::Busy => "busy",
            Self::Loading => "loading",
            Self::Unauthenticated => "unauthenticated",
            Self::SlotDown => "slot_down",
            Self::WrongType => "wrong_type",
            Self::BadReply => "bad_reply",
            Self::Misconfigured => "misconfigured",
            Self::Overloaded => "overloaded",
        }
    }

    /// What an operator might look at or set to mend it.
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Timeout => "TOLLKEEPER_STORE_TIMEOUT says how long a charge may take",
            Self::NoTime => "its deadline (grpc-timeout) must leave more than 5 ms",
            Self::Unreachable | Self::Broken => "the lines about connecting say why",
            Self::ReadOnly | Self::SlotDown => "it is looked for in its place until a primary is found",
            Self::NoWrites => "its memory (maxmemory) or its disk may be full",
            Self::Busy => "SCRIPT KILL ends a script that runs on and on",
            Self::Loading => "it is back when it has read its data",
            Self::Unauthenticated => "REDIS_AUTH or TOLLKEEPER_REDIS_AUTH_FILE holds the password",
            Self::WrongType => "CACHE_KEY_PREFIX keeps the keys of others apart",
            Self::BadReply => "is it Redis 5.0 or newer, or Valkey?",
            Self::Misconfigured => "the lines before this one say what it wants",
            Self::Overloaded => "more than it takes is asked of it",
        }
    }

    /// Whether it says that its server can not serve anybody. What concerns one key or one slot does not.
    pub const fn is_of_server(self) -> bool {
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

    /// Whether waiting will not mend it: somebody has to change a setting.
    pub const fn is_misconfiguration(self) -> bool {
        matches!(self, Self::Misconfigured | Self::Unauthenticated)
    }
}

/// What an error reply asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplyError {
    /// The script itself: the server does not have it.
    NoScript,
    /// To go to the node that owns the slot now.
    Moved(String),
    /// To go to this node for this once, after ASKING.
    Ask(String),
    /// Nothing: the charge failed.
    Failed(RedisError),
}

impl ReplyError {
    /// What an error reply, `text`, means.
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
            "ERR" => of_plain_error(text),
            _ => RedisError::BadReply,
        };
        Self::Failed(failure)
    }
}

/// What follows `ERR`. Servers before 7.0 wrap what went wrong within a script into such a text.
fn of_plain_error(text: &str) -> RedisError {
    const WRAPPED: [(&str, RedisError); 8] = [
        ("-OOM ", RedisError::NoWrites),
        ("-MISCONF ", RedisError::NoWrites),
        ("-NOREPLICAS ", RedisError::NoWrites),
        ("-READONLY ", RedisError::ReadOnly),
        ("-NOPERM ", RedisError::Misconfigured),
        ("WRONGTYPE ", RedisError::WrongType),
        ("Write commands not allowed after non deterministic", RedisError::Misconfigured),
        ("can't run this command or subcommand", RedisError::Misconfigured),
    ];
    const PLAIN: [&str; 6] = [
        "unknown command",
        "cluster support disabled",
        "is not allowed",
        "AUTH <password> called without any password",
        "invalid DB index",
        "DB index is out of range",
    ];
    if let Some((_, kind)) = WRAPPED.iter().find(|(mark, _)| text.contains(mark)) {
        *kind
    } else if PLAIN.iter().any(|mark| text.contains(mark)) {
        RedisError::Misconfigured
    } else if text.contains("not an integer") {
        RedisError::WrongType
    } else if text.contains("invalid password") {
        RedisError::Unauthenticated
    } else {
        RedisError::BadReply
    }
}

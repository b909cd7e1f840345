//! The settings of the process, from its environment.
//!
//! Modelled twice: a table says what each variable may be and what becomes of it; `Settings` is what the program uses,
//! typed and valid. `Settings::from_env` is the only way from one to the other, and names all mistakes at once. What
//! would change a verdict and does not exist here stops the start; what is harmless gets a notice. Rule files given on
//! the command line are not settings, and neither is anything that can change while the process runs.

pub mod address;
mod assemble;
pub mod bounds;
mod environment;
pub mod metrics;
pub mod parse;
pub mod redis;
pub mod reference;
pub mod report;
pub mod setting;
pub mod table;
pub mod target;
pub mod tracing;
pub mod tls;
mod url;
pub mod value;

use std::ffi::OsString;
use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use crate::limit::StorePolicy;
use crate::telemetry::logs;
use address::Address;
use bounds::Bounds;
use environment::Environment;
use metrics::Metrics;
use redis::Redis;
use tls::Tls;
use tracing::Tracing;
use value::Secret;

/// All settings, by concern.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Where to listen.
    pub listeners: Listeners,
    /// What clients may take of them.
    pub bounds: Bounds,
    /// Who may do on the debug listener what is more than looking; `None`: nobody.
    pub admin: Option<AdminToken>,
    /// How gRPC connections are kept.
    pub grpc: Grpc,
    /// Where rules come from, and what they start from.
    pub rules: Rules,
    /// How answers look, and what overrides the rules.
    pub behaviour: Behaviour,
    /// Where counters live.
    pub store: Store,
    /// The counters in this process: all of them, or those that stand in for a Redis that is away.
    pub memory: Memory,
    /// How the process ends.
    pub shutdown: Shutdown,
    /// What is logged, and how.
    pub logs: Logs,
    /// Where metrics go.
    pub metrics: Metrics,
    /// Where traces go; `None`: there are none.
    pub tracing: Option<Tracing>,
    /// Threads that serve; `None`: one for each core.
    pub worker_threads: Option<NonZeroUsize>,
}

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listeners {
    /// The rate limit service and its health service.
    pub grpc: GrpcListener,
    /// `/json` and the health pages.
    pub http: Address,
    /// `/rlconfig` and what else shows the inside.
    pub debug: Address,
    /// How the first is encrypted; `None`: not at all.
    pub grpc_tls: Option<Tls>,
    /// How the second is.
    pub http_tls: Option<Tls>,
}

/// Where the rate limit service listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrpcListener {
    /// On a TCP port.
    Tcp(Address),
    /// On a unix socket at this path.
    Unix(PathBuf),
}

/// What proves that a caller may do more than look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminToken {
    /// This, of [`AdminToken::LEAST_BYTES`] at least.
    Text(Secret),
    /// What this file holds when it is asked for.
    File(PathBuf),
}

impl AdminToken {
    /// The shortest token, in bytes: nobody guesses so long a one.
    pub const LEAST_BYTES: usize = 16;
}

/// How gRPC connections are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grpc {
    /// A connection is asked to close after this time; `None`: never.
    pub max_connection_age: Option<Duration>,
    /// Its calls may take this much longer; `None`: as long as they like.
    pub max_connection_age_grace: Option<Duration>,
    /// Time between pings; `None`: no pings.
    pub keepalive_interval: Option<Duration>,
    /// A connection whose ping stays unanswered for this time is closed.
    pub keepalive_timeout: Duration,
    /// Calls that one connection may have open at once, at least 1.
    pub max_concurrent_streams: u32,
    /// The largest request that is read, at least 1 KiB.
    pub max_message_bytes: usize,
    /// Whether server reflection is offered.
    pub reflection: bool,
}

/// Where rules come from, and what they start from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// In or below it are the rule files; empty: there are none.
    pub root: PathBuf,
    /// A directory below `root`, or empty.
    pub subdirectory: PathBuf,
    /// A directory below that, which holds the rule files.
    pub app_directory: PathBuf,
    /// Whether names that begin with a dot are skipped.
    pub ignore_dot_files: bool,
    /// Whether `root` is watched for a swapped link.
    pub watch_root: bool,
    /// Whether files with the same domain are merged.
    pub merge_domains: bool,
    /// Whether health needs a loaded domain.
    pub healthy_with_at_least_one_config: bool,
    /// How often the contents of files are compared; `None`: never.
    pub poll_interval: Option<Duration>,
    /// Files are read when nothing has changed for this time.
    pub reload_debounce: Duration,
    /// The policy of rules that have none.
    pub on_store_error: StorePolicy,
    /// How many processes may have a share of an eventual limit, for advice on rules: 1 to 1000.
    pub max_replicas: u32,
}

/// How answers look, and what overrides the rules.
#[derive(Clone, Debug, PartialEq)]
pub struct Behaviour {
    /// Nothing is refused.
    pub shadow_mode: bool,
    /// Every limit is a quota.
    pub quota_mode: bool,
    /// The answer's dynamic metadata describes the request and its rules.
    pub response_dynamic_metadata: bool,
    /// The answer's dynamic metadata names the rules that refused.
    pub metadata_verdicts: bool,
    /// Headers to send with every answer.
    pub limit_headers: Option<HeaderNames>,
    /// The header to send with a refusal.
    pub retry_after_header: Option<String>,
    /// A refused request is charged only to the limits that refuse it.
    pub stop_cache_key_increment_when_overlimit: bool,
    /// The most requests per unit of a sliding_window_log, at least 1.
    pub log_max: u32,
    /// Whether fixed windows of months follow the calendar (UTC).
    pub calendar_months: bool,
    /// The share of a limit from which a hit counts as near it, 0 to 1.
    pub near_limit_ratio: f32,
}

/// The names of the three headers, as written; each is a valid header name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderNames {
    /// For the limit.
    pub limit: String,
    /// For what is left of it.
    pub remaining: String,
    /// For the seconds until it is reset.
    pub reset: String,
}

/// Where counters live.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "there is one for each process")]
pub enum Store {
    /// In this process: every replica counts for itself.
    Memory,
    /// In Redis, shared by all replicas.
    Redis(Redis),
}

/// The counters in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// What they may take, at least 1 MiB.
    pub capacity_bytes: usize,
}

/// How the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shutdown {
    /// How long it goes on serving after health says no; at most `timeout`.
    pub drain_period: Duration,
    /// The longest it takes from the signal, the drain included.
    pub timeout: Duration,
}

/// What is logged, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logs {
    /// Events of this level and graver ones.
    pub level: logs::Level,
    /// How a line looks.
    pub format: logs::Format,
}

/// Something about the environment that an operator should know, and that stops nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The variable.
    pub name: String,
    /// What to know; completes a sentence that begins with the name.
    pub what: String,
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.what)
    }
}

/// Everything in the environment that stops the start; one line each.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct SettingsError {
    /// In the order of the documentation; at least one.
    pub problems: Vec<Problem>,
}

/// One setting that stops the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The variable.
    pub name: String,
    /// Its value as it may be shown.
    pub shown: String,
    /// What is wrong.
    pub what: String,
    /// What to do about it.
    pub fix: String,
}

/// `NAME=value: what is wrong; what to do`
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}: {}; {}", self.name, self.shown, self.what, self.fix)
    }
}

impl Settings {
    /// The settings that an environment asks for, with what is worth saying about it.
    ///
    /// The error names every variable that does not parse, that contradicts another, or that asks for what would change
    /// verdicts or security and does not exist here. Secrets are in neither.
    pub fn from_env(vars: impl Iterator<Item = (OsString, OsString)>) -> Result<(Self, Vec<Notice>), SettingsError> {
        let assembled = assemble::assemble(&Environment::read(vars));
        if assembled.problems.is_empty() {
            return Ok((assembled.settings, assembled.notices));
        }
        Err(SettingsError { problems: assembled.problems })
    }
}

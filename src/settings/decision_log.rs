//! Decision log: destinations, and the decisions and values that it contains.
//!
//! Decides: files, sizes, streams and batches of the decision log.
//! Decides: the secret that hashes values and authenticates replicas (`TOLLKEEPER_DECISION_LOG_HASH_KEY`).

use std::path::{Path, PathBuf};

use super::collector::CollectorSettings;
use super::credentials::{CredentialVariables, SecretSource, SecretVariables};
use super::redis::addresses::AddressVariables;
use super::redis::deployment::{DeploymentSettings, DeploymentVariables};
use super::redis::{CERTIFICATE_VARIABLES, REDIS_TIMEOUT};
use super::secret::Secret;
use super::setting::settings;
use super::tracing::{Compression, OTEL_EXPORTER_OTLP_ENDPOINT, OtelProtocol, OtlpSignalVariables};
use super::value::choices;
use super::value::number::ByteSize;
use super::value::text::{SecretUrl, TextList};
use super::values::Values;
use crate::base::named_enum::named_enum;

settings! { "Decision log";
    TOLLKEEPER_DECISION_LOG: TextList = "",
        "destinations: stdout, file:PATH (.gz: compressed), redis:STREAM, otlp; empty: no log"
        .often_set();
    TOLLKEEPER_DECISION_LOG_WHEN: TextList = "rejected,shadow,errors",
        "decisions that are logged: rejected, shadow, errors (by a failure policy), or all";
    TOLLKEEPER_DECISION_LOG_SAMPLE: f64 = "1",
        "share of the keys that are logged; the same keys in all replicas"
        .within("0 to 1") .only_read("with TOLLKEEPER_DECISION_LOG");
    TOLLKEEPER_ZONE: String = "", "zone of this replica, for its records"
        .only_read("with TOLLKEEPER_DECISION_LOG");
    TOLLKEEPER_DECISION_LOG_VALUES: LoggedValueForm = "plain",
        "values of descriptors in the log, the console and its pages"
        .often_set();
    TOLLKEEPER_DECISION_LOG_HASH_KEY: Option<Secret> = "",
        "key of hashed values, 16 bytes or more"
        .only_read("if values are hashed (TOLLKEEPER_TOP_VALUES), or replicas exchange statistics through Redis");
    TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE: Option<PathBuf> = "",
        "file that holds the key of hashed values, read at the start"
        .only_read("if values are hashed (TOLLKEEPER_TOP_VALUES), or replicas exchange statistics through Redis");
    TOLLKEEPER_DECISION_LOG_FILE_BYTES: ByteSize = "100MiB", "size at which a log file is rotated"
        .within("64KiB to 1024GiB") .only_read("with TOLLKEEPER_DECISION_LOG");
    TOLLKEEPER_DECISION_LOG_FILES: u32 = "10", "log files kept, the current one included"
        .within("1 to 10000") .only_read("with TOLLKEEPER_DECISION_LOG");
    TOLLKEEPER_DECISION_LOG_QUEUE_BYTES: ByteSize = "8MiB",
        "memory for records that wait; more are dropped and counted"
        .within("64KiB to 4GiB") .only_read("with TOLLKEEPER_DECISION_LOG");
    TOLLKEEPER_DECISION_LOG_STREAM_LENGTH: u64 = "1000000",
        "approximate number of records kept in redis:STREAM"
        .within("1 to 1000000000") .only_read("with redis:STREAM in TOLLKEEPER_DECISION_LOG");
    TOLLKEEPER_DECISION_LOG_REDIS_URL: SecretUrl = "",
        "Redis of the stream, like REDIS_URL (a list: cluster, or primary and sentinels); empty: that of counters"
        .only_read("with redis:STREAM in TOLLKEEPER_DECISION_LOG");
    TOLLKEEPER_DECISION_LOG_REDIS_AUTH: Option<Secret> = "", "password or user:password of the stream's Redis"
        .only_read("with redis:STREAM in TOLLKEEPER_DECISION_LOG");
    TOLLKEEPER_DECISION_LOG_REDIS_AUTH_FILE: Option<PathBuf> = "", "file that holds it"
        .only_read("with redis:STREAM in TOLLKEEPER_DECISION_LOG");
    OTEL_EXPORTER_OTLP_LOGS_ENDPOINT: Option<SecretUrl> = "",
        "URL of the collector of otlp, over HTTP with the whole path; not set: OTEL_EXPORTER_OTLP_ENDPOINT"
        .only_read("with otlp in TOLLKEEPER_DECISION_LOG");
    OTEL_EXPORTER_OTLP_LOGS_PROTOCOL: Option<OtelProtocol> = "", "protocol of the collector for logs"
        .only_read("with otlp in TOLLKEEPER_DECISION_LOG");
    OTEL_EXPORTER_OTLP_LOGS_HEADERS: Option<Secret> = "", "headers of export requests for logs: k=v,k=v"
        .only_read("with otlp in TOLLKEEPER_DECISION_LOG");
    OTEL_EXPORTER_OTLP_LOGS_TIMEOUT: Option<u64> = "",
        "time limit of an export request for logs, in milliseconds" .within("1 to 3600000")
        .only_read("with otlp in TOLLKEEPER_DECISION_LOG");
    OTEL_EXPORTER_OTLP_LOGS_COMPRESSION: Option<Compression> = "", "compression of export requests for logs"
        .only_read("with otlp in TOLLKEEPER_DECISION_LOG");
    OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE: Option<PathBuf> = "",
        "CA certificates for the collector of logs, PEM file, instead of the system's"
        .only_read("with otlp in TOLLKEEPER_DECISION_LOG");
    OTEL_EXPORTER_OTLP_LOGS_CLIENT_CERTIFICATE: Option<PathBuf> = "", "client certificate for it, PEM file"
        .only_read("with otlp in TOLLKEEPER_DECISION_LOG");
    OTEL_EXPORTER_OTLP_LOGS_CLIENT_KEY: Option<PathBuf> = "", "private key of the client certificate (PEM)"
        .only_read("with otlp in TOLLKEEPER_DECISION_LOG");
}

/// Redis of the decision log. What it does not set is that of the counters, except credentials.
static STREAM_REDIS_VARIABLES: DeploymentVariables = DeploymentVariables {
    url: AddressVariables { url: &TOLLKEEPER_DECISION_LOG_REDIS_URL, kind: None, socket: None },
    connections: None,
    connect_timeout: &REDIS_TIMEOUT,
    tls: None,
    server: CredentialVariables::new(
        Some(&TOLLKEEPER_DECISION_LOG_REDIS_AUTH),
        Some(&TOLLKEEPER_DECISION_LOG_REDIS_AUTH_FILE),
    ),
    sentinels: CredentialVariables::new(None, None),
};

/// Variables of the export of logs over OTLP.
static OTLP_LOG_VARIABLES: OtlpSignalVariables = OtlpSignalVariables {
    path: "/v1/logs",
    endpoint: &OTEL_EXPORTER_OTLP_LOGS_ENDPOINT,
    protocol: &OTEL_EXPORTER_OTLP_LOGS_PROTOCOL,
    headers: &OTEL_EXPORTER_OTLP_LOGS_HEADERS,
    timeout: &OTEL_EXPORTER_OTLP_LOGS_TIMEOUT,
    compression: &OTEL_EXPORTER_OTLP_LOGS_COMPRESSION,
    certificate: &OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE,
    client_certificate: &OTEL_EXPORTER_OTLP_LOGS_CLIENT_CERTIFICATE,
    client_key: &OTEL_EXPORTER_OTLP_LOGS_CLIENT_KEY,
};

named_enum! {
    /// Form of the values of descriptors in the log.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum LoggedValueForm {
        /// As sent.
        Plain = "plain",
        /// Keyed hash.
        Hashed = "hashed",
        /// Left out.
        None = "none",
    }
}

choices! { LoggedValueForm }

/// Settings of the decision log.
#[derive(Clone, Debug, PartialEq)]
pub struct DecisionLogSettings {
    /// Destinations, at least one.
    pub sinks: Vec<SinkSettings>,
    /// Decisions that are logged.
    pub when: LoggedDecisionKinds,
    /// Share of the keys that is logged, 0 to 1.
    pub sample: f64,
    /// Zone of this replica; empty if it has none.
    pub zone: String,
    /// Form of the values of descriptors.
    pub values: LoggedValueForm,
    /// Key of hashed values; set if `values` is `Hashed`.
    pub hash_key: Option<SecretSource>,
    /// Maximum size of a file in bytes.
    pub max_file_bytes: u64,
    /// Number of files that are kept, the current one included; at least 1.
    pub max_files: u32,
    /// Maximum size of the records that wait for one sink, in bytes.
    pub queue_bytes: usize,
}

/// Destination of the decision log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SinkSettings {
    /// Standard output.
    Stdout,
    /// A file, compressed if its name ends in `.gz`.
    File(PathBuf),
    /// A stream in Redis.
    Redis(Box<RedisStreamSettings>),
    /// Logs of an OpenTelemetry collector.
    Otlp(Box<CollectorSettings>),
}

/// Stream in Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisStreamSettings {
    /// Key of the stream, not empty.
    pub key: String,
    /// Approximate number of records that are kept, at least 1.
    pub max_length: u64,
    /// Deployment that has the stream.
    pub deployment: DeploymentSettings,
}

impl RedisStreamSettings {
    /// Reads the settings of a stream; `counters` is the Redis of the counters. `None` after a problem.
    fn from_values(values: &mut Values, counters: Option<&DeploymentSettings>, key: &str) -> Option<Self> {
        let deployment = match counters {
            _ if stream_has_own_redis(values) => STREAM_REDIS_VARIABLES.read_deployment(values, &CERTIFICATE_VARIABLES),
            Some(counters) => counters.clone(),
            None => {
                let what = "names a stream, but the counters are not in Redis";
                values.add_problem(&TOLLKEEPER_DECISION_LOG, what, "give TOLLKEEPER_DECISION_LOG_REDIS_URL");
                return None;
            }
        };
        let max_length = values.get(&TOLLKEEPER_DECISION_LOG_STREAM_LENGTH);
        Some(Self { key: key.to_owned(), max_length, deployment })
    }
}

/// Decisions that are logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoggedDecisionKinds {
    /// Rejected requests.
    pub rejected: bool,
    /// Admitted requests that exceed a limit in shadow mode.
    pub shadow: bool,
    /// Decisions by a failure policy, and requests without a decision.
    pub errors: bool,
    /// All decisions.
    pub all: bool,
}

impl LoggedDecisionKinds {
    /// Words of `TOLLKEEPER_DECISION_LOG_WHEN`.
    const SELECTORS: [&'static str; 4] = ["rejected", "shadow", "errors", "all"];

    /// Words of `TOLLKEEPER_DECISION_LOG_WHEN` that select these decisions.
    pub fn selector_words(self) -> impl Iterator<Item = &'static str> {
        let Self { rejected, shadow, errors, all } = self;
        Self::SELECTORS
            .into_iter()
            .zip([rejected, shadow, errors, all])
            .filter_map(|(word, is_set)| is_set.then_some(word))
    }

    fn from_selector_words(words: &[String]) -> Option<Self> {
        let mut logged = Self::default();
        for word in words.iter().map(|word| word.trim()).filter(|word| !word.is_empty()) {
            match word {
                "rejected" => logged.rejected = true,
                "shadow" => logged.shadow = true,
                "errors" => logged.errors = true,
                "all" => logged.all = true,
                _ => return None,
            }
        }
        (logged != Self::default()).then_some(logged)
    }
}

/// Key of hashed values, read at the start.
pub static HASH_KEY_VARIABLES: SecretVariables =
    SecretVariables { text: &TOLLKEEPER_DECISION_LOG_HASH_KEY, file: &TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE };

impl DecisionLogSettings {
    /// True if records go to an OpenTelemetry collector.
    pub fn uses_collector(&self) -> bool {
        self.sinks.iter().any(|sink| matches!(sink, SinkSettings::Otlp(_)))
    }

    /// Deployments of Redis that hold a stream.
    pub(super) fn redis_deployments(&self) -> impl Iterator<Item = &DeploymentSettings> {
        self.sinks.iter().filter_map(|sink| match sink {
            SinkSettings::Redis(stream) => Some(&stream.deployment),
            SinkSettings::Stdout | SinkSettings::File(_) | SinkSettings::Otlp(_) => None,
        })
    }

    /// Reads the settings; `counters` is the Redis of the counters. `None` if there is no log.
    pub(super) fn from_values(
        values: &mut Values,
        counters: Option<&DeploymentSettings>,
        hash_key: Option<&SecretSource>,
    ) -> Option<Self> {
        let sinks = read_sinks(values, counters);
        let TextList(words) = values.get(&TOLLKEEPER_DECISION_LOG_WHEN);
        let when = LoggedDecisionKinds::from_selector_words(&words);
        if when.is_none() {
            let fix = "give rejected, shadow and errors, or fewer of them, or all";
            values.add_problem(&TOLLKEEPER_DECISION_LOG_WHEN, "not a list of decisions", fix);
        }
        let logged_values = values.get(&TOLLKEEPER_DECISION_LOG_VALUES);
        if sinks.is_empty() {
            return None;
        }
        Some(Self {
            sinks,
            when: when.unwrap_or_default(),
            sample: values.get(&TOLLKEEPER_DECISION_LOG_SAMPLE),
            zone: values.get(&TOLLKEEPER_ZONE),
            values: logged_values,
            hash_key: hash_key.filter(|_| logged_values == LoggedValueForm::Hashed).cloned(),
            max_file_bytes: values.get(&TOLLKEEPER_DECISION_LOG_FILE_BYTES).0,
            max_files: values.get(&TOLLKEEPER_DECISION_LOG_FILES),
            queue_bytes: values.get(&TOLLKEEPER_DECISION_LOG_QUEUE_BYTES).to_usize_saturating(),
        })
    }
}

fn read_sinks(values: &mut Values, counters: Option<&DeploymentSettings>) -> Vec<SinkSettings> {
    let TextList(words) = values.get(&TOLLKEEPER_DECISION_LOG);
    let mut sinks = Vec::new();
    for word in words.iter().map(|word| word.trim()).filter(|word| !word.is_empty()) {
        let sink = match word.split_once(':') {
            None if word == "stdout" => SinkSettings::Stdout,
            Some(("file", path)) if path.ends_with(".zst") => {
                let what = "asks for compression with zstd, which was removed";
                values.add_problem(&TOLLKEEPER_DECISION_LOG, what, "name a file that ends in .gz for gzip");
                continue;
            }
            Some(("file", path)) if !path.is_empty() && !path.contains('\0') => {
                SinkSettings::File(Path::new(path).to_owned())
            }
            Some(("redis", key)) if !key.is_empty() => match RedisStreamSettings::from_values(values, counters, key) {
                Some(stream) => SinkSettings::Redis(Box::new(stream)),
                None => continue,
            },
            None if word == "otlp" => SinkSettings::Otlp(Box::new(read_collector(values))),
            _ => {
                let fix = "give stdout, file:PATH, redis:STREAM or otlp, or a list of them";
                values.add_problem(&TOLLKEEPER_DECISION_LOG, "names an unknown destination", fix);
                continue;
            }
        };
        if sinks.contains(&sink) {
            values.add_problem(&TOLLKEEPER_DECISION_LOG, "names a destination twice", "give each once");
        } else {
            sinks.push(sink);
        }
    }
    sinks
}

/// Reads the connection to the collector. A local one is not assumed: its absence would lose records.
fn read_collector(values: &mut Values) -> CollectorSettings {
    if values.first_set([OTLP_LOG_VARIABLES.endpoint, &OTEL_EXPORTER_OTLP_ENDPOINT]).is_none() {
        let fix = "give OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_LOGS_ENDPOINT";
        values.add_problem(&TOLLKEEPER_DECISION_LOG, "names a collector that has no URL", fix);
    }
    CollectorSettings::from_signal_variables(values, &OTLP_LOG_VARIABLES)
}

/// Returns `true` if the stream has a Redis of its own.
pub(super) fn stream_has_own_redis(values: &Values) -> bool {
    !values.get(&TOLLKEEPER_DECISION_LOG_REDIS_URL).reveal().is_empty()
}

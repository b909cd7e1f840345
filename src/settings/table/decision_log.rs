//! The decision log.

use std::path::PathBuf;

use crate::settings::choices::{Compression, DeploymentKind, LoggedValues, OtelProtocol};
use crate::settings::secret::Secret;
use crate::settings::setting::settings;
use crate::settings::value::number::{FloatRange, IntRange};
use crate::settings::value::size::{ByteSize, SizeRange};
use crate::settings::value::text::{SecretUrl, TextList};

settings! { "Decision log";
    TOLLKEEPER_DECISION_LOG: TextList = "",
        "destinations of the decision log: stdout, file:PATH (.zst: compressed), redis:STREAM, otlp; empty: no log";
    TOLLKEEPER_DECISION_LOG_WHEN: TextList = "rejected,shadow,errors",
        "decisions that are logged: rejected, shadow, errors (a failure policy decided), or all";
    TOLLKEEPER_DECISION_LOG_SAMPLE: f64 = 1.0,
        "share of the keys whose decisions are logged; all replicas choose the same keys"
        .allowed(FloatRange::new(0.0, 1.0));
    TOLLKEEPER_DECISION_LOG_VALUES: LoggedValues = LoggedValues::Plain,
        "values of descriptors in the log: as sent, as a keyed hash, or left out";
    TOLLKEEPER_DECISION_LOG_HASH_KEY: Option<Secret> = None,
        "key of hashed values, 16 bytes or more; equal keys give equal hashes in all replicas";
    TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE: Option<PathBuf> = None,
        "file that holds the key of hashed values, read at the start";
    TOLLKEEPER_DECISION_LOG_FILE_BYTES: ByteSize = 100 << 20, "size at which a log file is rotated"
        .allowed(SizeRange::new(64 << 10, 1 << 40));
    TOLLKEEPER_DECISION_LOG_FILES: u32 = 10, "number of log files kept, the current one included"
        .allowed(IntRange::new(1, 10_000));
    TOLLKEEPER_DECISION_LOG_QUEUE_BYTES: ByteSize = 8 << 20,
        "memory for records that a destination has not taken yet; more are dropped and counted"
        .allowed(SizeRange::new(64 << 10, 1 << 32));
    TOLLKEEPER_DECISION_LOG_STREAM_LENGTH: u64 = 1_000_000,
        "approximate number of records kept in the stream of redis:STREAM; Redis removes the oldest"
        .allowed(IntRange::new(1, 1_000_000_000));
    TOLLKEEPER_DECISION_LOG_REDIS_URL: SecretUrl = "",
        "Redis of the stream, in the form of REDIS_URL (rediss:// is TLS); empty: that of the counters";
    TOLLKEEPER_DECISION_LOG_REDIS_TYPE: DeploymentKind = DeploymentKind::Single, "kind of deployment";
    TOLLKEEPER_DECISION_LOG_REDIS_TLS: bool = false, "connect over TLS, with the certificates of REDIS_TLS_";
    TOLLKEEPER_DECISION_LOG_REDIS_AUTH: Option<Secret> = None, "password or user:password of the stream's Redis";
    TOLLKEEPER_DECISION_LOG_REDIS_AUTH_FILE: Option<PathBuf> = None, "file that holds it";
    TOLLKEEPER_DECISION_LOG_REDIS_SENTINEL_AUTH: Option<Secret> = None, "password or user:password for its sentinels";
    TOLLKEEPER_DECISION_LOG_REDIS_SENTINEL_AUTH_FILE: Option<PathBuf> = None, "file that holds it";
    OTEL_EXPORTER_OTLP_LOGS_ENDPOINT: Option<SecretUrl> = None,
        "URL of the collector of otlp, over HTTP with the whole path; not set: OTEL_EXPORTER_OTLP_ENDPOINT";
    OTEL_EXPORTER_OTLP_LOGS_PROTOCOL: Option<OtelProtocol> = None, "protocol of the collector for logs";
    OTEL_EXPORTER_OTLP_LOGS_HEADERS: Option<Secret> = None, "headers of export requests for logs: k=v,k=v";
    OTEL_EXPORTER_OTLP_LOGS_TIMEOUT: Option<u64> = None,
        "time limit of an export request for logs, in milliseconds" .allowed(IntRange::new(1, 3_600_000));
    OTEL_EXPORTER_OTLP_LOGS_COMPRESSION: Option<Compression> = None, "compression of export requests for logs";
    OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE: Option<PathBuf> = None,
        "CA certificates for the collector of logs, PEM file, instead of the system's";
    OTEL_EXPORTER_OTLP_LOGS_CLIENT_CERTIFICATE: Option<PathBuf> = None, "client certificate for it, PEM file";
    OTEL_EXPORTER_OTLP_LOGS_CLIENT_KEY: Option<PathBuf> = None, "private key of the client certificate, PEM file";
}

//! Settings from an environment: every name of envoyproxy/ratelimit, its default and its syntax, and rejected values.

#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use std::ffi::OsString;
use std::net::{Ipv4Addr, Ipv6Addr, TcpStream};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kit::fixtures::ENVOY_GATEWAY;
use tollkeeper::limit::StoreFailurePolicy;
use tollkeeper::serve::server::listeners::listen_tcp;
use tollkeeper::settings::address::{Address, Endpoint, Host};
use tollkeeper::settings::credentials::{CredentialFile, Credentials};
use tollkeeper::settings::decisions::LimitHeaderNames;
use tollkeeper::settings::listeners::GrpcListenAddress;
use tollkeeper::settings::problem::Notice;
use tollkeeper::settings::report::{Disposition, ReportedVariable, report_variables};
use tollkeeper::settings::secret::Secret;
use tollkeeper::settings::store::StoreSettings;
use tollkeeper::settings::value::SettingValue;
use tollkeeper::settings::value::number::ByteSize;
use tollkeeper::settings::value::text::{TextList, TextMap};
use tollkeeper::settings::{Settings, documentation, environment};
use tollkeeper::telemetry::logs;

use crate::generated::{self, assert_up_to_date};

mod identities;
mod memcache;
mod redis;
mod regions;
mod tls;

type Vars<'a> = &'a [(&'a str, &'a str)];

fn os(vars: Vars<'_>) -> impl Iterator<Item = (OsString, OsString)> {
    vars.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)))
}

fn tcp(host: &str, port: u16) -> Endpoint {
    Endpoint::Tcp { host: host.into(), port }
}

fn read(vars: Vars<'_>) -> Settings {
    Settings::from_env(os(vars)).unwrap().0
}

/// Error lines of a start with `vars`.
fn problems(vars: Vars<'_>) -> Vec<String> {
    Settings::from_env(os(vars)).unwrap_err().to_string().lines().map(str::to_owned).collect()
}

/// Credentials in a file that this variable names.
fn credential_file(setting: &'static str, path: &str) -> Credentials {
    Credentials::File(CredentialFile { setting, path: path.into() })
}

fn notices(vars: Vars<'_>) -> Vec<String> {
    Settings::from_env(os(vars)).unwrap().1.iter().map(Notice::to_string).collect()
}

/// Every variable that envoyproxy/ratelimit reads, with its default.
const PEER: &[(&str, &str)] = &[
    ("HOST", "0.0.0.0"),
    ("PORT", "8080"),
    ("DEBUG_HOST", "0.0.0.0"),
    ("DEBUG_PORT", "6070"),
    ("GRPC_UDS", ""),
    ("GRPC_HOST", "0.0.0.0"),
    ("GRPC_PORT", "8081"),
    ("GRPC_MAX_CONNECTION_AGE", "24h"),
    ("GRPC_MAX_CONNECTION_AGE_GRACE", "1h"),
    ("GRPC_SERVER_USE_TLS", "false"),
    ("GRPC_SERVER_TLS_CERT", ""),
    ("GRPC_SERVER_TLS_KEY", ""),
    ("GRPC_CLIENT_TLS_CACERT", ""),
    ("GRPC_CLIENT_TLS_SAN", ""),
    // WARN in envoyproxy/ratelimit; both accept any case.
    ("LOG_LEVEL", "warn"),
    ("LOG_FORMAT", "text"),
    ("CONFIG_TYPE", "FILE"),
    ("FORCE_START_WITHOUT_INITIAL_CONFIG", "false"),
    ("CONFIG_GRPC_XDS_NODE_ID", "default"),
    ("CONFIG_GRPC_XDS_NODE_METADATA", ""),
    ("CONFIG_GRPC_XDS_SERVER_URL", "localhost:18000"),
    ("CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL", "3s"),
    ("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", ""),
    ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "false"),
    ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", ""),
    ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", ""),
    ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", ""),
    ("CONFIG_GRPC_XDS_SERVER_TLS_SAN", ""),
    ("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "600ms"),
    // Written 60s in envoyproxy/ratelimit.
    ("XDS_CLIENT_BACKOFF_MAX_INTERVAL", "3s"),
    ("XDS_CLIENT_BACKOFF_RANDOM_FACTOR", "0.66"),
    ("XDS_CLIENT_BACKOFF_JITTER", "true"),
    ("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "0"),
    ("USE_DOG_STATSD", "false"),
    ("USE_DOG_STATSD_MOGRIFIERS", ""),
    // true in envoyproxy/ratelimit; here true if STATSD_HOST or STATSD_PORT is set.
    ("USE_STATSD", ""),
    ("STATSD_HOST", "localhost"),
    ("STATSD_PORT", "8125"),
    ("EXTRA_TAGS", ""),
    ("STATS_FLUSH_INTERVAL", "10s"),
    ("DISABLE_STATS", "false"),
    ("USE_PROMETHEUS", "false"),
    ("PROMETHEUS_ADDR", ":9090"),
    ("PROMETHEUS_PATH", "/metrics"),
    ("PROMETHEUS_MAPPER_YAML", ""),
    ("PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS", "false"),
    ("RUNTIME_ROOT", "/srv/runtime_data/current"),
    ("RUNTIME_SUBDIRECTORY", ""),
    ("RUNTIME_APPDIRECTORY", "config"),
    ("RUNTIME_IGNOREDOTFILES", "false"),
    ("RUNTIME_WATCH_ROOT", "true"),
    ("EXPIRATION_JITTER_MAX_SECONDS", "300"),
    ("LOCAL_CACHE_SIZE_IN_BYTES", "0"),
    ("NEAR_LIMIT_RATIO", "0.8"),
    ("CACHE_KEY_PREFIX", ""),
    // redis in envoyproxy/ratelimit; here not set means this process.
    ("BACKEND_TYPE", ""),
    ("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "false"),
    ("LIMIT_RESPONSE_HEADERS_ENABLED", "false"),
    ("LIMIT_LIMIT_HEADER", "RateLimit-Limit"),
    ("LIMIT_REMAINING_HEADER", "RateLimit-Remaining"),
    ("LIMIT_RESET_HEADER", "RateLimit-Reset"),
    ("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", "false"),
    ("REDIS_SOCKET_TYPE", "unix"),
    ("REDIS_TYPE", "SINGLE"),
    ("REDIS_URL", "/var/run/nutcracker/ratelimit.sock"),
    // 10 in envoyproxy/ratelimit.
    ("REDIS_POOL_SIZE", "1"),
    ("REDIS_AUTH", ""),
    ("REDIS_TLS", "false"),
    ("REDIS_TLS_CLIENT_CERT", ""),
    ("REDIS_TLS_CLIENT_KEY", ""),
    ("REDIS_TLS_CACERT", ""),
    ("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", "false"),
    ("REDIS_PIPELINE_WINDOW", "0"),
    ("REDIS_PIPELINE_LIMIT", "0"),
    ("REDIS_CLUSTER_PIPELINE_PARALLELISM", "1"),
    ("REDIS_HEALTH_CHECK_ACTIVE_CONNECTION", "false"),
    ("REDIS_TIMEOUT", "10s"),
    ("REDIS_POOL_ON_EMPTY_BEHAVIOR", "WAIT"),
    ("REDIS_SENTINEL_AUTH", ""),
    ("REDIS_PERSECOND", "false"),
    ("REDIS_PERSECOND_SOCKET_TYPE", "unix"),
    ("REDIS_PERSECOND_TYPE", "SINGLE"),
    ("REDIS_PERSECOND_URL", "/var/run/nutcracker/ratelimitpersecond.sock"),
    ("REDIS_PERSECOND_POOL_SIZE", "1"),
    ("REDIS_PERSECOND_AUTH", ""),
    ("REDIS_PERSECOND_TLS", "false"),
    ("REDIS_PERSECOND_SENTINEL_AUTH", ""),
    ("REDIS_PERSECOND_PIPELINE_WINDOW", "0"),
    ("REDIS_PERSECOND_PIPELINE_LIMIT", "0"),
    ("REDIS_PERSECOND_CLUSTER_PIPELINE_PARALLELISM", "1"),
    ("REDIS_PERSECOND_TIMEOUT", "10s"),
    ("REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR", "WAIT"),
    ("REDIS_STARTUP_INITIAL_INTERVAL", "1s"),
    ("REDIS_STARTUP_MAX_INTERVAL", "30s"),
    ("REDIS_STARTUP_MAX_ELAPSED_TIME", "0"),
    ("REDIS_CLOSE_CONNECTION_ON_READONLY_ERROR", "false"),
    ("REDIS_POOL_ON_EMPTY_WAIT_DURATION", ""),
    ("REDIS_PERSECOND_POOL_ON_EMPTY_WAIT_DURATION", ""),
    ("MEMCACHE_HOST_PORT", ""),
    ("MEMCACHE_MAX_IDLE_CONNS", "2"),
    ("MEMCACHE_SRV", ""),
    ("MEMCACHE_SRV_REFRESH", "0"),
    ("MEMCACHE_TLS", "false"),
    ("MEMCACHE_TLS_CLIENT_CERT", ""),
    ("MEMCACHE_TLS_CLIENT_KEY", ""),
    ("MEMCACHE_TLS_CACERT", ""),
    ("MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION", "false"),
    ("SHADOW_MODE", "false"),
    ("QUOTA_MODE", "false"),
    ("RESPONSE_DYNAMIC_METADATA", "false"),
    ("MERGE_DOMAIN_CONFIG", "false"),
    ("TRACING_ENABLED", "false"),
    ("TRACING_SERVICE_NAME", "RateLimit"),
    ("TRACING_SERVICE_NAMESPACE", ""),
    ("TRACING_SERVICE_INSTANCE_ID", ""),
    ("TRACING_EXPORTER_PROTOCOL", "http"),
    ("TRACING_SAMPLING_RATE", "1"),
    ("USE_CALENDAR_MONTH_RATE_LIMIT", "false"),
    // Read by its libraries.
    ("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
    ("OTEL_EXPORTER_OTLP_HEADERS", ""),
    ("STATSD_PROTOCOL", "tcp"),
    ("GOSTATS_BATCH_ENABLED", ""),
    ("DOG_STATSD_MOGRIFIER_X_PATTERN", ""),
    ("DD_AGENT_HOST", ""),
    ("GOMAXPROCS", ""),
    ("GOMEMLIMIT", ""),
    // Set by Envoy Gateway.
    ("GRPC_SERVER_TLS_CA_CERT", ""),
];

#[test]
fn every_variable_of_envoyproxy_ratelimit_is_known_with_its_default() {
    for (name, default) in PEER {
        let setting = environment::find_setting(name).unwrap_or_else(|| panic!("{name} is not in a group"));
        assert_eq!(setting.default_text(), *default, "{name}");
    }
}

/// Names of open changes of envoyproxy/ratelimit.
const PROPOSED: [&str; 15] = [
    "LIMIT_REQUEST_HEADERS_ENABLED",
    "LIMIT_REQUEST_LIMIT_HEADER",
    "LIMIT_REQUEST_REMAINING_HEADER",
    "LIMIT_REQUEST_RESET_HEADER",
    "REDIS_AUTH_FILE",
    "REDIS_AWS_IAM_AUTH",
    "REDIS_AWS_IAM_CACHE_NAME",
    "REDIS_AWS_IAM_REGION",
    "REDIS_AWS_IAM_SERVERLESS",
    "REDIS_AWS_IAM_USER_ID",
    "REDIS_PERSECOND_AUTH_FILE",
    "REDIS_PERSECOND_AWS_IAM_AUTH",
    "REDIS_PERSECOND_AWS_IAM_CACHE_NAME",
    "REDIS_PERSECOND_AWS_IAM_SERVERLESS",
    "REDIS_PERSECOND_AWS_IAM_USER_ID",
];

#[test]
fn settings_table_has_unique_names_and_typed_defaults() {
    let names: Vec<&str> = environment::all_settings().map(|setting| setting.name()).collect();
    for (i, setting) in environment::all_settings().enumerate() {
        let (name, help) = (setting.name(), setting.info().help);
        assert!(!names[..i].contains(&name), "{name} twice");
        let is_own = name.starts_with("TOLLKEEPER_") || name.starts_with("OTEL_");
        let is_peers = PEER.iter().any(|(known, _)| setting.info().covers_variable(known));
        let is_of_cloud = ["AWS_", "AZURE_", "GCE_"].iter().any(|cloud| name.starts_with(cloud));
        assert!(is_own || is_peers || is_of_cloud || PROPOSED.contains(&name), "{name} is nobody's");
        assert!(!help.is_empty() && help.len() < 120 && !help.contains('|'), "{name}: {help}");
        let default = setting.default_text();
        if !default.is_empty() {
            setting.validate(default).unwrap_or_else(|invalid| panic!("{name}: {invalid:?}"));
            assert!(!setting.overrides_default(default), "{name}");
        }
        // The bounds of a range are parsed with a value.
        for value in ["1", "1s"] {
            let _ = setting.validate(value);
        }
    }
}

#[test]
fn an_empty_environment_gives_the_defaults() {
    let settings = read(&[]);
    let wildcard = |port| Address { host: Host::Wildcard, port };
    assert_eq!(settings.listeners.grpc, GrpcListenAddress::Tcp(wildcard(8081)));
    assert_eq!((&settings.listeners.http, &settings.listeners.debug), (&wildcard(8080), &wildcard(6070)));
    let grpc = &settings.grpc;
    assert_eq!(grpc.max_connection_age, Some(Duration::from_secs(86_400)));
    assert_eq!(grpc.max_connection_age_grace, Some(Duration::from_secs(3600)));
    assert_eq!(grpc.keepalive_interval, Some(Duration::from_secs(60)));
    assert_eq!((grpc.max_message_bytes, grpc.reflection), (4 << 20, false));
    assert_eq!(grpc.max_header_bytes, 128 << 10);
    let rules = &settings.rules;
    assert_eq!(rules.root, Path::new("/srv/runtime_data/current"));
    assert_eq!((rules.subdirectory.as_path(), rules.app_directory.as_path()), (Path::new(""), Path::new("config")));
    assert_eq!((rules.ignore_dot_files, rules.watch_root, rules.merge_domains), (false, true, false));
    assert!(!rules.healthy_with_at_least_one_config);
    assert_eq!(
        (rules.poll_interval, rules.reload_debounce),
        (Some(Duration::from_secs(1)), Duration::from_millis(100))
    );
    assert_eq!(
        (rules.on_store_error, settings.decisions.log_max, settings.decisions.calendar_months),
        (StoreFailurePolicy::Local, 10_000, false)
    );
    let behaviour = &settings.decisions;
    assert!(!behaviour.shadow_mode && !behaviour.quota_mode && !behaviour.response_dynamic_metadata);
    assert!(!behaviour.metadata_verdicts && !behaviour.stop_cache_key_increment_when_overlimit);
    assert_eq!((&behaviour.limit_headers, behaviour.retry_after_header.as_deref()), (&None, Some("Retry-After")));
    assert_eq!((&settings.store, settings.memory.capacity_bytes), (&StoreSettings::Memory, 512 << 20));
    assert_eq!(
        (settings.shutdown.drain_period, settings.shutdown.timeout),
        (Duration::from_secs(5), Duration::from_secs(25))
    );
    assert_eq!((settings.logs.level, settings.logs.format), (logs::Level::Warn, logs::Format::Text));
    assert_eq!(settings.worker_threads, None);
    assert_eq!(notices(&[]), [""; 0]);
}

#[test]
fn reflection_is_on_by_default_where_no_other_machine_connects() {
    let cases = [
        ("GRPC_HOST", "127.0.0.2", true),
        ("GRPC_HOST", "[::1]", true),
        ("GRPC_HOST", "::ffff:127.0.0.1", true),
        ("GRPC_HOST", "LocalHost", true),
        ("GRPC_UDS", "/run/x.sock", true),
        ("GRPC_HOST", "192.0.2.7", false),
        ("GRPC_HOST", "tollkeeper.internal", false),
        ("GRPC_HOST", "", false),
    ];
    for (name, value, offered) in cases {
        assert_eq!(read(&[(name, value)]).grpc.reflection, offered, "{name}={value}");
        assert!(!read(&[(name, value), ("TOLLKEEPER_REFLECTION", "false")]).grpc.reflection, "{name}={value}");
    }
}

#[test]
fn each_variable_reaches_its_setting() {
    let settings = read(&[
        ("GRPC_UDS", "/run/x.sock"),
        ("HOST", "::1"),
        ("PORT", "0"),
        ("DEBUG_HOST", "localhost"),
        ("DEBUG_PORT", "0x1F90"),
        ("GRPC_MAX_CONNECTION_AGE", "0"),
        ("GRPC_MAX_CONNECTION_AGE_GRACE", "90s"),
        ("TOLLKEEPER_GRPC_KEEPALIVE_INTERVAL", "0s"),
        ("TOLLKEEPER_REFLECTION", "T"),
        ("RUNTIME_ROOT", "/data"),
        ("RUNTIME_SUBDIRECTORY", "ratelimit"),
        ("RUNTIME_WATCH_ROOT", "0"),
        ("TOLLKEEPER_POLL_INTERVAL", "0"),
        ("TOLLKEEPER_ON_STORE_ERROR", "deny"),
        ("TOLLKEEPER_LOG_MAX", "0xc8"),
        ("LIMIT_RESPONSE_HEADERS_ENABLED", "true"),
        ("LIMIT_LIMIT_HEADER", "x-lim"),
        ("TOLLKEEPER_RETRY_AFTER_HEADER", ""),
        ("TOLLKEEPER_MEMORY_BYTES", "2 GiB"),
        ("TOLLKEEPER_WORKER_THREADS", "3"),
        ("TOLLKEEPER_DRAIN_PERIOD", "0"),
        ("LOG_LEVEL", "Warning"),
        ("LOG_FORMAT", "JSON"),
    ]);
    assert_eq!(settings.listeners.grpc, GrpcListenAddress::Unix(PathBuf::from("/run/x.sock")));
    assert_eq!(settings.listeners.http, Address { host: Host::Ip(Ipv6Addr::LOCALHOST.into()), port: 0 });
    assert_eq!(settings.listeners.debug, Address { host: Host::Name("localhost".into()), port: 8080 });
    assert_eq!(settings.grpc.max_connection_age, None);
    assert_eq!(settings.grpc.max_connection_age_grace, Some(Duration::from_secs(90)));
    assert_eq!((settings.grpc.keepalive_interval, settings.grpc.reflection), (None, true));
    assert_eq!(
        (settings.rules.root.as_path(), settings.rules.subdirectory.as_path()),
        (Path::new("/data"), Path::new("ratelimit"))
    );
    assert_eq!((settings.rules.watch_root, settings.rules.poll_interval), (false, None));
    assert_eq!((settings.rules.on_store_error, settings.decisions.log_max), (StoreFailurePolicy::Deny, 200));
    let names = LimitHeaderNames {
        limit: "x-lim".into(),
        remaining: "RateLimit-Remaining".into(),
        reset: "RateLimit-Reset".into(),
    };
    assert_eq!((settings.decisions.limit_headers, settings.decisions.retry_after_header), (Some(names), None));
    assert_eq!(settings.memory.capacity_bytes, 2 << 30);
    assert_eq!(settings.worker_threads.map(std::num::NonZeroUsize::get), Some(3));
    assert_eq!(settings.shutdown.drain_period, Duration::ZERO);
    assert_eq!((settings.logs.level, settings.logs.format), (logs::Level::Warn, logs::Format::Json));
}

/// Parses a value of a setting without restrictions.
fn parse<T: SettingValue>(text: &str) -> Result<T, String> {
    T::parse(text, T::RANGE).map_err(|invalid| invalid.what)
}

#[test]
fn durations_parse_like_go() {
    let nanos = [
        ("0", 0),
        ("150us", 150_000),
        ("150\u{b5}s", 150_000),
        ("150\u{3bc}s", 150_000),
        ("10s", 10_000_000_000),
        ("+10s", 10_000_000_000),
        ("1h30m", 5_400_000_000_000),
        ("1.5s", 1_500_000_000),
        (".5s", 500_000_000),
        ("1.s", 1_000_000_000),
        ("0.000000001s", 1),
        ("1h2m3.004s", 3_723_004_000_000),
        ("0s", 0),
        ("-0", 0),
    ];
    for (text, expected) in nanos {
        assert_eq!(parse(text), Ok(Duration::from_nanos(expected)), "{text}");
    }
    for (text, what) in [
        ("10", "a duration needs a unit"),
        ("", "set but empty"),
        ("-5s", "a duration cannot be negative"),
        ("1d", "not a duration"),
        ("10 s", "not a duration"),
        ("s", "not a duration"),
        (".s", "not a duration"),
        ("1h30", "not a duration"),
        ("--5s", "not a duration"),
        ("ten", "not a duration"),
        ("9999999999h", "out of range"),
        ("99999999999999999999999s", "out of range"),
    ] {
        assert_eq!(parse::<Duration>(text).unwrap_err(), what, "{text}");
    }
}

#[test]
fn bools_and_numbers_parse_like_go() {
    for word in ["1", "t", "T", "TRUE", "true", "True"] {
        assert_eq!(parse(word), Ok(true), "{word}");
        assert!(read(&[("SHADOW_MODE", word)]).decisions.shadow_mode);
    }
    for word in ["0", "f", "F", "FALSE", "false", "False"] {
        assert_eq!(parse(word), Ok(false), "{word}");
    }
    for word in ["yes", "tRUE", " true", "2", "on"] {
        assert_eq!(parse::<bool>(word).unwrap_err(), "not a bool", "{word}");
    }
    for (text, number) in [
        ("12", 12),
        ("-12", -12),
        ("+7", 7),
        ("0x1F", 31),
        ("-0b11", -3),
        ("0o17", 15),
        ("017", 15),
        ("0", 0),
        ("0x_1_F", 31),
    ] {
        assert_eq!(parse::<i64>(text), Ok(number), "{text}");
    }
    for text in ["1.0", "1e3", "08", "0x", "1_000", "--1", "-+1", "0x-1", "_1", "9223372036854775808", "1 ", "é", "0é"]
    {
        assert_eq!(parse::<i64>(text).unwrap_err(), "not a whole number", "{text}");
    }
    for text in ["NaN", "inf", "a"] {
        assert_eq!(parse::<f64>(text).unwrap_err(), "not a number", "{text}");
    }
}

#[test]
fn lists_maps_and_sizes_are_parsed() {
    let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    assert_eq!(parse("a,b"), Ok(TextList(vec!["a".into(), "b".into()])));
    assert_eq!(parse(""), Ok(TextList(vec![])));
    assert_eq!(parse("k:v,l:"), Ok(TextMap(vec![pair("k", "v"), pair("l", "")])));
    assert_eq!(parse(" "), Ok(TextMap(vec![])));
    for text in ["k", "k:v:w", "k:v,"] {
        assert_eq!(parse::<TextMap>(text).unwrap_err(), "not a map", "{text}");
    }
    for (text, bytes) in [("0", 0), ("4096", 4096), ("4KiB", 4096), ("3MiB", 3 << 20), ("1 GiB", 1 << 30)] {
        assert_eq!(parse(text), Ok(ByteSize(bytes)), "{text}");
    }
    for text in ["4K", "4kb", "1.5GiB", "-1", "+1", "MiB", "99999999999999GiB", "4096 "] {
        assert_eq!(parse::<ByteSize>(text).unwrap_err(), "not a size", "{text}");
    }
}

#[test]
fn bad_value_is_reported_with_a_fix() {
    for (name, value, line) in [
        ("PORT", "abc", "PORT=abc: not a whole number; give a whole number, 0 to 65535"),
        ("PORT", "65536", "PORT=65536: out of range; give a whole number, 0 to 65535"),
        ("PORT", "", "PORT=: set but empty; unset it or give a whole number, 0 to 65535"),
        ("SHADOW_MODE", "", "SHADOW_MODE=: set but empty; unset it or give true or false"),
        ("SHADOW_MODE", "yes", "SHADOW_MODE=yes: not a bool; give true or false"),
        ("GRPC_MAX_CONNECTION_AGE", "30", "GRPC_MAX_CONNECTION_AGE=30: a duration needs a unit; write 30s for seconds"),
        (
            "STATS_FLUSH_INTERVAL",
            "x",
            "STATS_FLUSH_INTERVAL=x: not a duration; give a duration such as 1.5s, 10ms to 1h",
        ),
        (
            "TOLLKEEPER_POLL_INTERVAL",
            "1ms",
            "TOLLKEEPER_POLL_INTERVAL=1ms: out of range; give a duration such as 1.5s, 0 or 100ms to 24h",
        ),
        (
            "TOLLKEEPER_MEMORY_BYTES",
            "512M",
            "TOLLKEEPER_MEMORY_BYTES=512M: not a size; give bytes, or a size such as 64MiB, 1MiB to 1024GiB",
        ),
        ("NEAR_LIMIT_RATIO", "2", "NEAR_LIMIT_RATIO=2: out of range; give a number, 0 to 1"),
        (
            "LOG_LEVEL",
            "loud",
            "LOG_LEVEL=loud: not known; give panic, fatal, error, warn, warning, info, debug or trace",
        ),
        ("LOG_FORMAT", "xml", "LOG_FORMAT=xml: not known; give text or json"),
        ("CONFIG_TYPE", "file", "CONFIG_TYPE=file: not known; give FILE or GRPC_XDS_SOTW"),
        (
            "TOLLKEEPER_ON_STORE_ERROR",
            "maybe",
            "TOLLKEEPER_ON_STORE_ERROR=maybe: not known; give local, allow, deny or error",
        ),
        ("HOST", "a b", "HOST=a b: not an address; give an IP address or a host name, without a port"),
        (
            "PROMETHEUS_ADDR",
            "9090",
            "PROMETHEUS_ADDR=9090: not an address; give host:port or :port, with a port of 0 to 65535",
        ),
        (
            "TOLLKEEPER_EXCEEDED_LIMITS_HEADER",
            "Host",
            "TOLLKEEPER_EXCEEDED_LIMITS_HEADER=Host: a header that requests need; give a name such as x-ratelimit-exceeded",
        ),
        (
            "TOLLKEEPER_RETRY_AFTER_HEADER",
            "x: 1\r\ny",
            "TOLLKEEPER_RETRY_AFTER_HEADER=x: 1\\r\\ny: not a header name; give letters, digits and hyphens, 256 at most",
        ),
        (
            "TOLLKEEPER_DRAIN_PERIOD",
            "30s",
            "TOLLKEEPER_DRAIN_PERIOD=30s: longer than the TOLLKEEPER_SHUTDOWN_TIMEOUT of 25s, which includes it; give at most 25s, or a longer TOLLKEEPER_SHUTDOWN_TIMEOUT",
        ),
        (
            "TOLLKEEPER_SHUTDOWN_TIMEOUT",
            "1s",
            "TOLLKEEPER_SHUTDOWN_TIMEOUT=1s: shorter than the TOLLKEEPER_DRAIN_PERIOD of 5s, which it includes; give more, or a TOLLKEEPER_DRAIN_PERIOD of at most 1s",
        ),
    ] {
        assert_eq!(problems(&[(name, value)]), [line]);
    }
    assert_eq!(
        problems(&[("LIMIT_RESPONSE_HEADERS_ENABLED", "1"), ("LIMIT_RESET_HEADER", "")]),
        ["LIMIT_RESET_HEADER=: set but empty; unset it or give a header name"]
    );
    read(&[("LIMIT_RESET_HEADER", ""), ("LOG_FORMAT", ""), ("HOST", ""), ("RUNTIME_ROOT", ""), ("EXTRA_TAGS", "")]);
}

#[test]
fn all_bad_settings_are_reported_at_once_in_the_order_of_the_documentation() {
    let lines =
        problems(&[("LOG_LEVEL", "x"), ("PORT", "x"), ("HOST", "?"), ("SHADOW_MODE", "x"), ("GRPC_PORT", "-1")]);
    let names: Vec<&str> = lines.iter().map(|line| line.split('=').next().unwrap()).collect();
    assert_eq!(names, ["GRPC_PORT", "HOST", "PORT", "SHADOW_MODE", "LOG_LEVEL"]);
    // An invalid value contradicts nothing.
    let lines = problems(&[("TOLLKEEPER_DRAIN_PERIOD", "30s"), ("TOLLKEEPER_SHUTDOWN_TIMEOUT", "60")]);
    assert_eq!(lines, ["TOLLKEEPER_SHUTDOWN_TIMEOUT=60: a duration needs a unit; write 60s for seconds"]);
}

#[test]
fn value_that_is_not_utf8_is_an_error_naming_the_variable() {
    let raw = |name: &[u8], value: &[u8]| (OsString::from_vec(name.to_vec()), OsString::from_vec(value.to_vec()));
    let vars = [raw(b"RUNTIME_ROOT", b"/\xff"), raw(b"\xff", b"x"), raw(b"ELSE", b"\xff")];
    let error = Settings::from_env(vars.iter().cloned()).unwrap_err();
    assert_eq!(error.to_string(), "RUNTIME_ROOT=?: not UTF-8; give plain text");
    let lines = report_variables(vars.into_iter());
    assert_eq!((lines.len(), lines[0].disposition.prevents_start()), (1, true));
}

#[test]
fn backend_without_a_server_stops_the_start() {
    for (name, value, shown, rest) in [
        ("BACKEND_TYPE", "", "", "set but empty; unset it or give redis or memcache"),
        ("BACKEND_TYPE", "memcache", "memcache", "there are no servers; give MEMCACHE_HOST_PORT or MEMCACHE_SRV"),
    ] {
        assert_eq!(problems(&[(name, value)]), [format!("{name}={shown}: {rest}")]);
    }
    let harmless = [("CONFIG_TYPE", "FILE"), ("GRPC_SERVER_USE_TLS", "false"), ("GRPC_CLIENT_TLS_CACERT", "")];
    assert_eq!(notices(&harmless), [""; 0]);
}

#[test]
fn ignored_harmless_setting_gets_one_line() {
    let vars = [
        ("USE_STATSD", "false"),
        ("USE_PROMETHEUS", "true"),
        ("DD_ENV", "prod"),
        ("DD_SERVICE", "x"),
        ("MEMCACHE_HOST_PORT", "a:1"),
        ("SHADOWMODE", "true"),
        ("TOLLKEEPER_GRPC_PORT", "1"),
        ("TOLLKEEPER_NOVELTY", "1"),
        // A notice about these would not fit on one line.
        ("TOLLKEEPER_LOG\nMAX", "1"),
        ("TOLLKEEPER_RLQS_MAX_ID_BYTES", "1MiB"),
        ("TOLLKEEPER_\u{1b}[2J", "1"),
        ("UNRELATED", "1"),
        ("HOSTNAME", "pod-1"),
        // Set by Kubernetes for a service called tollkeeper.
        ("TOLLKEEPER_PORT", "tcp://10.0.0.1:8081"),
        ("TOLLKEEPER_SERVICE_HOST", "10.0.0.1"),
        ("TOLLKEEPER_SERVICE_PORT_GRPC", "8081"),
        ("TOLLKEEPER_PORT_8081_TCP_ADDR", "10.0.0.1"),
        ("TOLLKEEPER_PORT_8081_TCP_PROTO", "tcp"),
    ];
    let expected = [
        "DD_* has no effect: this program does not use the Datadog client",
        "MEMCACHE_HOST_PORT has no effect: it is only read with BACKEND_TYPE=memcache",
        "SHADOWMODE is not known and has no effect; did you mean SHADOW_MODE?",
        "TOLLKEEPER_GRPC_PORT is not known and has no effect; did you mean GRPC_PORT?",
        "TOLLKEEPER_NOVELTY is not known and has no effect",
        "TOLLKEEPER_RLQS_MAX_ID_BYTES was removed and has no effect; \
         use TOLLKEEPER_RLQS_MAX_BUCKETS: each 640 bytes of keys and values take one of them",
    ];
    assert_eq!(notices(&vars), expected);
}

#[test]
fn variable_that_nothing_reads_says_what_would_make_it_read() {
    const VALUES: [&str; 13] =
        ["true", "false", "2", "3", "0.5", "2s", "2MiB", "redis", "grpc", "gzip", "a.b", "a:1", "traceidratio"];
    for setting in environment::all_settings().filter(|setting| !setting.info().is_variable_family()) {
        let words = setting.allowed_values_text().unwrap_or_default();
        let words = words.split([',', ' ']).map(str::trim);
        let value = VALUES.into_iter().chain(words).find(|value| setting.overrides_default(value));
        let (name, value) = (setting.name(), value.unwrap_or_else(|| panic!("{}", setting.name())));
        let report = report_variables(os(&[(name, value)]));
        assert!(!format!("{report:?}").contains("nothing reads it"), "{report:?}");
    }
    for (vars, expected) in [
        (
            &[("LIMIT_RESET_HEADER", "x-reset")][..],
            "LIMIT_RESET_HEADER has no effect: it is only read with LIMIT_RESPONSE_HEADERS_ENABLED=true",
        ),
        (
            &[("USE_DOG_STATSD", "true"), ("DOG_STATSD_MOGRIFIER_A_NAME", "a")],
            "DOG_STATSD_MOGRIFIER_A_NAME has no effect: it is only read if USE_DOG_STATSD_MOGRIFIERS names its rule, with USE_DOG_STATSD=true",
        ),
        (
            &[("TRACING_ENABLED", "true"), ("OTEL_TRACES_SAMPLER", "always_on"), ("OTEL_TRACES_SAMPLER_ARG", "0.5")],
            "OTEL_TRACES_SAMPLER_ARG has no effect: it is only read with TRACING_ENABLED=true and OTEL_TRACES_SAMPLER=traceidratio or parentbased_traceidratio",
        ),
        (
            &[("TOLLKEEPER_DECISION_LOG_SAMPLE", "0.5")],
            "TOLLKEEPER_DECISION_LOG_SAMPLE has no effect: it is only read with TOLLKEEPER_DECISION_LOG",
        ),
    ] {
        assert_eq!(notices(vars), [expected]);
    }
    // What a more specific variable overrides is read nevertheless.
    let overridden = [
        ("TRACING_ENABLED", "true"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:1"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://b:1"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "1"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "2"),
        ("OTEL_SERVICE_NAME", "a"),
        ("TRACING_SERVICE_NAME", "b"),
        // Of AWS's own libraries.
        ("AWS_REGION", "eu-west-1"),
    ];
    assert_eq!(notices(&overridden), [""; 0]);
}

#[test]
fn report_shows_the_disposition_of_each_variable() {
    let lines = report_variables(os(&[
        ("TOLLKEEPER_LOGMAX", "1"),
        ("SHADOW_MODE", "true"),
        ("MERGE_DOMAIN_CONFIG", "true"),
        ("STATSD_PORT", "8125"),
        ("REDIS_TLS_CACERT", "/ca"),
        ("REDIS_AUTH", "hunter2"),
        ("REDIS_POOL_SIZE", "2"),
        ("PORT", "x"),
        ("TOLLKEEPER_SHUTDOWN_TIMEOUT", "1s"),
        ("PATH", "/bin"),
    ]));
    let line = |name: &str, value: &str, disposition| ReportedVariable {
        name: name.into(),
        value: Some(value.into()),
        disposition,
    };
    let invalid = |what: &str, fix: &str| Disposition::Invalid { what: what.into(), fix: fix.into() };
    let expected = [
        line("PORT", "x", invalid("not a whole number", "give a whole number, 0 to 65535")),
        line(
            "MERGE_DOMAIN_CONFIG",
            "true",
            Disposition::Differs { why: "files are merged in the order of their names".into() },
        ),
        line("SHADOW_MODE", "true", Disposition::Honoured),
        line(
            "TOLLKEEPER_SHUTDOWN_TIMEOUT",
            "1s",
            invalid(
                "shorter than the TOLLKEEPER_DRAIN_PERIOD of 5s, which it includes",
                "give more, or a TOLLKEEPER_DRAIN_PERIOD of at most 1s",
            ),
        ),
        line("STATSD_PORT", "8125", Disposition::Honoured),
        line("REDIS_POOL_SIZE", "2", Disposition::Honoured),
        line("REDIS_AUTH", "***", Disposition::Honoured),
        line(
            "REDIS_TLS_CACERT",
            "/ca",
            Disposition::NoEffect {
                why: "it is only read if a connection to Redis has TLS (REDIS_TLS=true, or rediss:// in its URL)"
                    .into(),
            },
        ),
        ReportedVariable {
            name: "TOLLKEEPER_LOGMAX".into(),
            value: None,
            disposition: Disposition::Unknown { fix: Some("did you mean TOLLKEEPER_LOG_MAX?".into()) },
        },
    ];
    assert_eq!(lines, expected);
    let stopping: Vec<&str> =
        lines.iter().filter(|line| line.disposition.prevents_start()).map(|line| line.name.as_str()).collect();
    assert_eq!(stopping, ["PORT", "TOLLKEEPER_SHUTDOWN_TIMEOUT"]);
}

#[test]
fn variables_that_nobody_reads_are_named_with_what_to_use() {
    let fixes: &[(&str, Option<&str>)] = &[
        ("SANITIZE_DESCRIPTOR_METRIC_DOTS", Some("a dot in a value shifts no label of Prometheus here")),
        ("ENABLE_NEGATIVE_HITS", Some("`is_negative_hits` of a descriptor always refunds")),
        ("MAX_CONCURRENT_REQUESTS", Some("use TOLLKEEPER_MAX_CONCURRENT_REQUESTS")),
        ("REQUEST_TIMEOUT", Some("use `timeout` of Envoy's filter, and TOLLKEEPER_STORE_TIMEOUT")),
        ("GRPC_MAX_CONCURRENT_STREAMS", Some("a connection may have 4096")),
        ("MAX_SLEEPING_ROUTINES", Some("use `queue_size` of a rule with `algorithm: leaky_bucket`")),
        ("REDIS_SENTINEL_MASTER_NAME", Some("use REDIS_URL: the name of the primary, then the sentinels")),
        ("REDIS_PASSWORD", Some("use REDIS_AUTH")),
        ("LIMITS_FILE", Some("use RUNTIME_ROOT, or serve --config FILE; the rules have another form")),
        ("ENVOY_RLS_PORT", Some("use GRPC_PORT")),
        // Removed.
        ("TOLLKEEPER_TABLE_KEEP", Some("use `keep` of the table")),
        ("TOLLKEEPER_GRPC_KEEPALIVE_TIMEOUT", Some("it is a third of TOLLKEEPER_GRPC_KEEPALIVE_INTERVAL")),
        ("REDIS_SHARD_KEY", None),
        ("PROMETHEUS_BUCKETS", None),
        ("TOLLKEEPER_NEW_THING", None),
    ];
    for (name, fix) in fixes {
        let vars = [(OsString::from(name), OsString::from("1"))].into_iter();
        let unknown = Disposition::Unknown { fix: fix.map(str::to_owned) };
        let lines: Vec<_> = report_variables(vars).into_iter().map(|line| (line.name, line.disposition)).collect();
        assert!(lines.contains(&((*name).to_owned(), unknown)), "{name}: {lines:?}");
    }
    // Of Kubernetes, and of programs that have nothing to do with this one.
    for (name, value) in
        [("REDIS_PORT", "tcp://10.0.0.1:6379"), ("REDIS_SERVICE_HOST", "10.0.0.1"), ("GRPC_TRACE", "all")]
    {
        let lines = report_variables([(OsString::from(name), OsString::from(value))].into_iter());
        assert!(lines.iter().all(|line| line.name != name), "{name}: {lines:?}");
    }
}

/// Each row of the page has variables that `check --env` names too.
#[test]
fn newer_variables_of_envoyproxy_ratelimit_are_on_its_page() {
    let page = kit::read(&kit::repository("docs/coming-from-envoyproxy-ratelimit.md"));
    let (_, rest) = page.split_once("Of its newer variables").unwrap();
    let rows = rest.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
    let names: Vec<&str> = rows.map_while(|row| row.strip_prefix("| `")?.split('`').next()).collect();
    assert_eq!(names.len(), 6, "{names:?}");
    for name in names {
        let lines = report_variables(os(&[(name, "1")]));
        let found = lines.iter().find(|line| line.name == name).unwrap_or_else(|| panic!("{name} is not named"));
        let is_said = match &found.disposition {
            Disposition::Unknown { fix } => fix.is_some(),
            disposition => matches!(disposition, Disposition::NoEffect { .. }),
        };
        assert!(is_said, "{found:?}");
    }
}

#[test]
fn removed_variable_for_tls_or_a_password_prevents_the_start() {
    for (name, instead) in [
        ("TOLLKEEPER_GLOBAL_REDIS_TLS", "rediss:// in TOLLKEEPER_GLOBAL_REDIS_URL"),
        ("TOLLKEEPER_REDIS_AUTH_FILE", "REDIS_AUTH_FILE"),
    ] {
        let line = format!("{name}=***: removed; unset it, and use {instead}");
        assert_eq!(problems(&[(name, "sesame")]), [line]);
        let lines = report_variables(os(&[(name, "sesame")]));
        assert!(lines.len() == 1 && lines[0].disposition.prevents_start(), "{lines:?}");
    }
}

#[test]
fn a_variable_is_reported_as_different_only_if_its_value_makes_a_difference() {
    let same: &[Vars<'_>] = &[
        &[("USE_STATSD", "true")],
        &[("USE_PROMETHEUS", "true")],
        &[("DEBUG_PORT", "6070")],
        &[("MERGE_DOMAIN_CONFIG", "false")],
        &[("RUNTIME_WATCH_ROOT", "false")],
        &[("RESPONSE_DYNAMIC_METADATA", "false")],
        &[("LOCAL_CACHE_SIZE_IN_BYTES", "0")],
        &[("REDIS_URL", "r:1"), ("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_POOL_SIZE", "10"), ("REDIS_TYPE", "SINGLE")],
        &[("REDIS_URL", "redis://user:password@r:1"), ("REDIS_TLS", "true")],
        &[("REDIS_URL", "r:1,s:1"), ("REDIS_TYPE", "cluster"), ("REDIS_AUTH", "password")],
        &[("REDIS_URL", "r:1"), ("TOLLKEEPER_KEY_FORMAT", "ratelimit"), ("EXPIRATION_JITTER_MAX_SECONDS", "10")],
        &[("GRPC_SERVER_USE_TLS", "true"), ("GRPC_SERVER_TLS_CERT", "/a/crt"), ("GRPC_SERVER_TLS_KEY", "/a/key")],
        &[("TRACING_ENABLED", "true"), ("TRACING_SAMPLING_RATE", "0.5")],
    ];
    // variables, and those of them that differ
    let different: &[(Vars<'_>, &[&str])] = &[
        (&[("USE_STATSD", "true"), ("USE_PROMETHEUS", "true")], &["USE_STATSD"]),
        (&[("MERGE_DOMAIN_CONFIG", "true")], &["MERGE_DOMAIN_CONFIG"]),
        (&[("RUNTIME_WATCH_ROOT", "true")], &["RUNTIME_WATCH_ROOT"]),
        (&[("RESPONSE_DYNAMIC_METADATA", "true")], &["RESPONSE_DYNAMIC_METADATA"]),
        (&[("REDIS_URL", "r:1"), ("LOCAL_CACHE_SIZE_IN_BYTES", "1000")], &["LOCAL_CACHE_SIZE_IN_BYTES"]),
        (&[("REDIS_URL", "rediss://r:1")], &["REDIS_URL"]),
        (&[("REDIS_URL", "redis://:password@r:1"), ("REDIS_TYPE", "cluster")], &["REDIS_URL"]),
        (&[("REDIS_URL", "r:1"), ("REDIS_POOL_SIZE", "200")], &["REDIS_POOL_SIZE"]),
        (
            &[("GRPC_SERVER_USE_TLS", "true"), ("GRPC_SERVER_TLS_CERT", "/a/crt"), ("GRPC_SERVER_TLS_KEY", "/b/key")],
            &["GRPC_SERVER_TLS_CERT"],
        ),
    ];
    let differing = |vars: Vars<'_>| {
        let lines = report_variables(os(vars)).into_iter();
        let differing = lines.filter(|line| matches!(line.disposition, Disposition::Differs { .. }));
        differing.map(|line| line.name).collect::<Vec<_>>()
    };
    for vars in same {
        assert_eq!(differing(vars), [""; 0], "{vars:?}");
    }
    for (vars, expected) in different {
        assert_eq!(differing(vars), *expected, "{vars:?}");
    }
}

#[test]
fn statsd_is_on_if_enabled_or_its_address_is_set() {
    let on = |vars: Vars<'_>| {
        let sinks = read(vars).metrics.statsd;
        let protocols = sinks.iter().map(|sink| (sink.host.clone(), sink.port, sink.protocol.clone()));
        protocols.map(|(host, port, protocol)| format!("{host}:{port} {protocol:?}")).collect::<Vec<_>>()
    };
    let (tcp, dog) = ("localhost:8125 Tcp", "localhost:8125 DogStatsd([])");
    assert_eq!(on(&[]), [""; 0]);
    assert_eq!(on(&[("USE_STATSD", "true")]), [tcp]);
    assert_eq!(on(&[("STATSD_PORT", "8125")]), [tcp]);
    assert_eq!(on(&[("STATSD_HOST", "a"), ("STATSD_PROTOCOL", "UDP")]), ["a:8125 Udp"]);
    assert_eq!(on(&[("STATSD_PORT", "1"), ("USE_STATSD", "false")]), [""; 0]);
    // The location of DogStatsD does not by itself turn on statsd.
    assert_eq!(on(&[("USE_DOG_STATSD", "true"), ("STATSD_PORT", "8125")]), [dog]);
    assert_eq!(on(&[("USE_DOG_STATSD", "true"), ("USE_STATSD", "true")]), [tcp, dog]);
    assert_eq!(on(&[("USE_STATSD", "true"), ("DISABLE_STATS", "true")]), [""; 0]);
    for (vars, line) in [
        (&[("STATSD_HOST", "")], "STATSD_HOST=: names no server; give the host and the port of statsd"),
        (&[("STATSD_PORT", "0")], "STATSD_PORT=0: names no server; give the host and the port of statsd"),
        (&[("STATSD_PORT", "x")], "STATSD_PORT=x: not a whole number; give a whole number, 0 to 65535"),
    ] {
        assert_eq!(problems(vars), [line]);
    }
    assert_eq!(
        problems(&[
            ("USE_DOG_STATSD", "true"),
            ("USE_DOG_STATSD_MOGRIFIERS", "A,B,C"),
            ("DOG_STATSD_MOGRIFIER_A_NAME", "n"),
            ("DOG_STATSD_MOGRIFIER_B_PATTERN", "("),
            ("DOG_STATSD_MOGRIFIER_C_PATTERN", "c"),
        ])
        .len(),
        3
    );
}

/// Addresses, TLS and tracing of Envoy Gateway, beside the rest of its environment.
const ENVOY_GATEWAY_ADDRESSES: Vars<'static> = &[
    ("CONFIG_GRPC_XDS_SERVER_URL", "envoy-gateway:18001"),
    ("REDIS_URL", "redis.redis-system.svc.cluster.local:6379"),
    ("REDIS_TLS", "true"),
    ("REDIS_TLS_CLIENT_CERT", "/redis-certs/tls.crt"),
    ("REDIS_TLS_CLIENT_KEY", "/redis-certs/tls.key"),
    ("PROMETHEUS_ADDR", ":19001"),
    ("TRACING_ENABLED", "true"),
    ("TRACING_SERVICE_NAME", "envoy-ratelimit"),
    ("TRACING_EXPORTER_PROTOCOL", "grpc"),
    ("TRACING_SAMPLING_RATE", "0.5"),
    ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://otel:4317"),
];

#[test]
fn envoy_gateway_environment_is_accepted() {
    let environment = [ENVOY_GATEWAY, ENVOY_GATEWAY_ADDRESSES].concat();
    let lines = report_variables(os(&environment));
    assert_eq!(lines.len(), environment.len());
    assert!(
        lines.iter().all(|line| !matches!(line.disposition, Disposition::Invalid { .. } | Disposition::Unknown { .. }))
    );
    let ignored = lines.iter().filter(|line| matches!(line.disposition, Disposition::NoEffect { .. }));
    let ignored: Vec<_> = ignored.map(|line| line.name.as_str()).collect();
    for name in ["RUNTIME_ROOT", "RUNTIME_SUBDIRECTORY", "RUNTIME_IGNOREDOTFILES", "RUNTIME_WATCH_ROOT"] {
        assert!(ignored.contains(&name), "{name} is not reported as ignored: {ignored:?}");
    }
    let settings = read(&environment);
    let xds = settings.xds.unwrap();
    assert_eq!((xds.server_address().as_str(), xds.node_id.as_str()), ("envoy-gateway:18001", "envoy-ratelimit"));
    assert!(xds.tls.is_some_and(|tls| tls.client.is_some() && tls.ca.is_some()));
    assert_eq!(xds.max_message_bytes, 64 << 20);
    assert!(!settings.rules.healthy_with_rules_only);
    assert_eq!(settings.logs.level, logs::Level::Info);
    let tls = settings.listeners.grpc_tls.unwrap();
    assert_eq!((tls.key.path.as_path(), tls.clients), (Path::new("/certs/tls.key"), None));
    let StoreSettings::Redis(redis) = settings.store else { panic!("{:?}", settings.store) };
    assert!(redis.main.tls.is_some_and(|tls| tls.client.is_some()));
}

#[test]
fn settings_of_the_control_plane_are_checked() {
    let with = |vars: &[(&'static str, &'static str)]| {
        let xds = [("CONFIG_TYPE", "GRPC_XDS_SOTW")];
        problems(&xds.iter().chain(vars).copied().collect::<Vec<_>>())
    };
    let address = "not an address; give host:port, with a port of 1 to 65535";
    let headers = "not headers; give name:value,name:value, with names and values that a header can hold";
    for (name, value, rest) in [
        ("CONFIG_GRPC_XDS_SERVER_URL", "envoy-gateway", address),
        ("CONFIG_GRPC_XDS_SERVER_URL", "envoy-gateway:0", address),
        ("CONFIG_GRPC_XDS_NODE_METADATA", "zone", "not a map; give key=value,key=value"),
        ("XDS_CLIENT_BACKOFF_RANDOM_FACTOR", "2", "out of range; give a number, 0 to 1"),
    ] {
        assert_eq!(with(&[(name, value)]), [format!("{name}={value}: {rest}")]);
    }
    for value in ["authorization", "a b:c", "a:\n", "a-bin:x"] {
        let found = with(&[("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", value)]);
        assert_eq!(found, [format!("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS=***: {headers}")]);
    }
    let tls = ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true");
    let found = with(&[tls, ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "/certs/tls.crt")]);
    let alone = "CONFIG_GRPC_XDS_CLIENT_TLS_CERT=/certs/tls.crt: set without CONFIG_GRPC_XDS_CLIENT_TLS_KEY";
    assert_eq!(found, [format!("{alone}; give both or none")]);
    let san = with(&[tls, ("CONFIG_GRPC_XDS_SERVER_TLS_SAN", "*.x")]);
    assert_eq!((san.len(), san[0].contains("without a wildcard")), (1, true), "{san:?}");
}

#[test]
fn address_of_the_control_plane_may_have_the_schemes_of_grpc() {
    for (url, server) in [
        ("envoy-gateway:18001", "envoy-gateway:18001"),
        ("dns:///envoy-gateway:18001", "envoy-gateway:18001"),
        (":18000", "localhost:18000"),
        ("[::1]:18000", "[::1]:18000"),
    ] {
        let settings = read(&[("CONFIG_TYPE", "GRPC_XDS_SOTW"), ("CONFIG_GRPC_XDS_SERVER_URL", url)]);
        assert_eq!(settings.xds.unwrap().server_address(), server, "{url}");
    }
}

#[test]
fn one_backoff_interval_alone_bounds_the_other() {
    let backoff = |name, value| read(&[("CONFIG_TYPE", "GRPC_XDS_SOTW"), (name, value)]).xds.unwrap().backoff;
    let longer = backoff("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "10s");
    assert_eq!((longer.initial, longer.max), (Duration::from_secs(10), Duration::from_secs(10)));
    let shorter = backoff("XDS_CLIENT_BACKOFF_MAX_INTERVAL", "300ms");
    assert_eq!((shorter.initial, shorter.max), (Duration::from_millis(300), Duration::from_millis(300)));
}

#[test]
fn secrets_are_never_shown() {
    let secret = Secret::new("hunter2");
    assert_eq!((format!("{secret}"), format!("{secret:?}"), secret.reveal()), ("***".into(), "***".into(), "hunter2"));
    for (name, value) in [
        ("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "authorization:hunter2"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=hunter2"),
        ("DD_API_KEY", "hunter2"),
    ] {
        let setting = environment::find_setting(name).unwrap();
        let parsed = setting.validate(value);
        let result = Settings::from_env(os(&[(name, value)]));
        let text = format!(
            "{parsed:?} {result:?} {:?} {}",
            report_variables(os(&[(name, value)])),
            setting.format_for_message(value)
        );
        assert!(!text.contains("hunter2"), "{name}: {text}");
    }
    assert_eq!(
        String::format_for_message(&format!("a\n\u{1b}{}", "b".repeat(200))),
        format!("a\\n\\u{{1b}}{}...", "b".repeat(97))
    );
}

#[test]
fn addresses_parse_in_common_forms() {
    let wildcard = |port| Some(Address { host: Host::Wildcard, port });
    let v6 = |port| Some(Address { host: Host::Ip(Ipv6Addr::LOCALHOST.into()), port });
    for (text, expected) in [
        (":9090", wildcard(9090)),
        ("[::]:1", wildcard(1)),
        (":::9090", wildcard(9090)),
        ("0.0.0.0:80", wildcard(80)),
        ("127.0.0.1:0", Some(Address { host: Host::Ip(Ipv4Addr::LOCALHOST.into()), port: 0 })),
        ("[::1]:1", v6(1)),
        ("localhost:80", Some(Address { host: Host::Name("localhost".into()), port: 80 })),
        ("9090", None),
        ("", None),
        (":", None),
        (":x", None),
        (":+1", None),
        (":65536", None),
        ("::1:80", None),
        ("[x]:1", None),
        ("a b:1", None),
        ("http://x:1", None),
    ] {
        assert_eq!(Address::parse(text), expected, "{text}");
    }
    for text in ["", "0.0.0.0", "::", "[::]"] {
        assert_eq!(Host::parse(text), Some(Host::Wildcard), "{text}");
    }
    let texts: Vec<String> = [wildcard(1), v6(2)].into_iter().flatten().map(|address| address.to_string()).collect();
    assert_eq!(texts, ["[::]:1", "[::1]:2"]);
}

#[test]
fn wildcard_address_listens_on_ipv4_and_ipv6() {
    let listener = listen_tcp(&Address { host: Host::Wildcard, port: 0 }).unwrap();
    let port = listener.local_addr().unwrap().port();
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    if listener.local_addr().unwrap().is_ipv6() {
        // A machine may have IPv6 sockets and no loopback address for them.
        let loopback = std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0));
        assert_eq!(TcpStream::connect((Ipv6Addr::LOCALHOST, port)).is_ok(), loopback.is_ok());
    }
}

#[test]
fn taken_port_is_an_error() {
    for host in [Host::Wildcard, Host::Ip(Ipv4Addr::LOCALHOST.into()), Host::Name("localhost".into())] {
        let first = listen_tcp(&Address { host: host.clone(), port: 0 }).unwrap();
        let port = first.local_addr().unwrap().port();
        let error = listen_tcp(&Address { host: Host::Ip(first.local_addr().unwrap().ip()), port }).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse, "{host:?}");
    }
}

#[test]
fn help_names_every_setting_under_its_group() {
    let help = documentation::format_environment_help();
    for setting in environment::all_settings() {
        let assignment = format!("\n  {}={}", setting.name(), setting.default_text());
        assert!(help.contains(&assignment), "{}", setting.name());
    }
    for group in environment::SETTING_GROUPS {
        assert!(help.lines().any(|line| line == format!("{}:", group.title)), "{}", group.title);
    }
    assert!(help.contains("source of the rules: files, or a control plane over xDS (FILE or GRPC_XDS_SOTW)"));
}

/// The page gives only the names of these twins, and their defaults if they differ.
#[test]
fn twins_for_limits_per_second_accept_the_same_values() {
    let mut twins = 0;
    for twin in environment::all_settings().filter(|setting| setting.name().contains("_PERSECOND_")) {
        let base = environment::find_setting(&twin.name().replacen("_PERSECOND", "", 1)).unwrap();
        assert_eq!(
            (twin.type_name(), twin.allowed_values_text()),
            (base.type_name(), base.allowed_values_text()),
            "{}",
            twin.name()
        );
        let support = [twin, base].map(|setting| std::mem::discriminant(&setting.info().support));
        assert_eq!(support[0], support[1], "{}", twin.name());
        twins += 1;
    }
    assert_eq!(twins, 20);
}

#[test]
fn settings_doc_page_matches_the_table() {
    assert_up_to_date(&generated::settings());
}

#[test]
fn fix_of_a_duration_without_unit_is_a_valid_value() {
    for (name, text) in
        [("TOLLKEEPER_STORE_TIMEOUT", "15"), ("REDIS_TIMEOUT", "5000"), ("TOLLKEEPER_POLL_INTERVAL", "30")]
    {
        let error = Settings::from_env([(name.into(), text.into())].into_iter()).unwrap_err().to_string();
        let written =
            error.split("write ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or_else(|| panic!("{error}"));
        let fixed = Settings::from_env([(name.into(), written.into())].into_iter());
        assert!(fixed.is_ok(), "{error}: {written}");
    }
}

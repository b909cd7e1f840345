//! Every environment variable that this program knows: those of envoyproxy/ratelimit, and its own (`TOLLKEEPER_...`).
//!
//! One row each, in the order of the documentation: name, kind, default, what is done with it, and what it means. This
//! is the only place that knows a default or a status; what a later release implements is changed here. Names that
//! end in `*` stand for a family that some library reads.

use std::time::Duration;

use super::setting::Status::{Differs, Honoured, NoEffect, Refused};
use super::setting::{Group, Kind, LONGEST, Refusal, Setting, Status, When};
use crate::telemetry::logs::Level;

/// The setting called `name`, or whose family it belongs to; a name of its own goes before a family.
pub fn find(name: &str) -> Option<&'static Setting> {
    let exact = TABLE.iter().find(|setting| setting.name == name);
    exact.or_else(|| TABLE.iter().find(|setting| setting.covers(name)))
}

macro_rules! table {
    ($($group:ident { $($name:literal $kind:expr, $default:literal, $status:expr, $doc:literal;)* })*) => {
        &[$($(Setting {
            name: $name, kind: $kind, default: $default, group: Group::$group, status: $status, doc: $doc,
        },)*)*]
    };
}

/// All settings, group by group.
pub static TABLE: &[Setting] = table! {
    Listeners {
        "GRPC_HOST" Kind::Text, "0.0.0.0", Honoured, "address of the rate limit service; a wildcard takes IPv4 and IPv6";
        "GRPC_PORT" PORT, "8081", Honoured, "port of the rate limit service and its health service; 0: any free one";
        "GRPC_UDS" Kind::Path, "", Honoured, "unix socket of the rate limit service, in place of its address and port";
        "HOST" Kind::Text, "0.0.0.0", Honoured, "address of /json, /healthcheck, /livez and /readyz";
        "PORT" PORT, "8080", Honoured, "port of /json, /healthcheck, /livez and /readyz; 0: any free one";
        "DEBUG_HOST" Kind::Text, "0.0.0.0", Honoured, "address of /rlconfig and what else shows the inside";
        "DEBUG_PORT" PORT, "6070", Differs("there are no /debug/pprof pages"),
            "port of /rlconfig and what else shows the inside; 0: any free one";
        "TOLLKEEPER_ADMIN_TOKEN" Kind::Secret, "", Honoured,
            "what a caller of the debug listener must show to reset or list counters or to set the log level; 16 bytes at least";
        "TOLLKEEPER_ADMIN_TOKEN_FILE" Kind::Path, "", Honoured,
            "file with what TOLLKEEPER_ADMIN_TOKEN would say; read at each such call";
    }
    Grpc {
        "GRPC_MAX_CONNECTION_AGE" AGE, "24h", Honoured, "a connection is asked to close after this time; 0: never";
        "GRPC_MAX_CONNECTION_AGE_GRACE" AGE, "1h", Honoured, "its calls may take this much longer; 0: as long as they like";
        "TOLLKEEPER_GRPC_KEEPALIVE_INTERVAL" span(Duration::from_secs(1), DAY, true), "1m", Honoured,
            "time between pings that find out whether a client is still there; 0: no pings";
        "TOLLKEEPER_GRPC_KEEPALIVE_TIMEOUT" span(Duration::from_millis(100), HOUR, false), "20s", Honoured,
            "a connection whose ping stays unanswered for this time is closed";
        "TOLLKEEPER_GRPC_MAX_CONCURRENT_STREAMS" Kind::Int { min: 1, max: 1 << 30 }, "4096", Honoured,
            "calls that one connection may have open at once, held answers included";
        "TOLLKEEPER_GRPC_MAX_MESSAGE_BYTES" Kind::Bytes { min: 1 << 10, max: 1 << 30 }, "4MiB", Honoured,
            "the largest request that is read";
        "TOLLKEEPER_REFLECTION" Kind::Bool, "false", Honoured, "offer gRPC server reflection";
    }
    Bounds {
        "TOLLKEEPER_MAX_CONNECTIONS" AT_LEAST_0, "10000", Honoured,
            "connections that a listener may have open, a third of the open files that the system allows at most; 0: that third";
        "TOLLKEEPER_MAX_CONNECTIONS_PER_ADDRESS" AT_LEAST_0, "2000", Honoured,
            "those of them that may come from one address, which of IPv6 is a /64; 0: all";
        "TOLLKEEPER_MAX_CONCURRENT_REQUESTS" AT_LEAST_0, "65536", Honoured,
            "requests that may be read, decided or held at once over gRPC and /json; more are refused at once; 0: any number";
        "TOLLKEEPER_MAX_CONCURRENT_REQUESTS_PER_ADDRESS" AT_LEAST_0, "16384", Honoured,
            "those of them that may come from one address to one listener; 0: all";
        "TOLLKEEPER_MAX_HEADER_BYTES" Kind::Bytes { min: 8 << 10, max: 1 << 20 }, "16KiB", Honoured,
            "the largest head of a request over gRPC or to /json";
        "TOLLKEEPER_HEAD_TIMEOUT" span(Duration::from_millis(100), HOUR, false), "60s", Honoured,
            "how long a client may take for a TLS handshake, its first request, and over HTTP/1 the head of each";
        "TOLLKEEPER_IDLE_TIMEOUT" span(Duration::from_millis(100), DAY, true), "1h", Honoured,
            "a gRPC connection without a new request for this time is asked to close; 0: it may stay";
    }
    Tls {
        "GRPC_SERVER_USE_TLS" Kind::Bool, "false", Honoured, "serve gRPC over TLS";
        "GRPC_SERVER_TLS_CERT" Kind::Path, "", Differs("it need not lie beside the key"),
            "certificate chain of the gRPC listener, PEM; read again when it changes";
        "GRPC_SERVER_TLS_KEY" Kind::Path, "", Honoured, "its private key, PEM; read again when it changes";
        "GRPC_SERVER_TLS_CA_CERT" Kind::Path, "",
            NoEffect { when: When::Filled, why: "envoyproxy/ratelimit does not read it either" }, "set by Envoy Gateway";
        "GRPC_CLIENT_TLS_CACERT" Kind::Path, "",
            Differs("the authorities of the system are not trusted besides; it stops the start without TLS"),
            "authorities that must have signed a client's certificate, PEM; read again when they change";
        "GRPC_CLIENT_TLS_SAN" Kind::Text, "", Differs("it stops the start without GRPC_CLIENT_TLS_CACERT"),
            "DNS name that a client's certificate must hold among its alternative names";
        "TOLLKEEPER_HTTP_TLS_CERT" Kind::Path, "", Honoured,
            "certificate chain of the listener of /json and the health pages, PEM; not set: it serves without TLS";
        "TOLLKEEPER_HTTP_TLS_KEY" Kind::Path, "", Honoured, "its private key, PEM";
        "TOLLKEEPER_HTTP_TLS_CLIENT_CACERT" Kind::Path, "", Honoured,
            "authorities that must have signed the certificate of who comes there, PEM; probes need one too";
    }
    Rules {
        "CONFIG_TYPE" exactly(&["FILE", "GRPC_XDS_SOTW"]), "FILE", Refused(NO_XDS), "where rules come from";
        "RUNTIME_ROOT" Kind::Path, "/srv/runtime_data/current", Honoured, "directory in or below which the rule files are";
        "RUNTIME_SUBDIRECTORY" Kind::Path, "", Honoured, "directory below RUNTIME_ROOT";
        "RUNTIME_APPDIRECTORY" Kind::Path, "config", Honoured, "directory below RUNTIME_SUBDIRECTORY that holds the rule files";
        "RUNTIME_IGNOREDOTFILES" Kind::Bool, "false", Honoured, "skip files and directories whose names begin with a dot";
        "RUNTIME_WATCH_ROOT" Kind::Bool, "true", Differs("files edited in place are noticed too, whatever it says"),
            "watch RUNTIME_ROOT for a swapped symbolic link, rather than the directory of the rule files";
        "MERGE_DOMAIN_CONFIG" Kind::Bool, "false", Differs("files are merged in the order of their names"),
            "files with the same domain are merged, rather than refused";
        "FORCE_START_WITHOUT_INITIAL_CONFIG" Kind::Bool, "false",
            NoEffect { when: When::True, why: "rules come from files, which are read once before the first answer" },
            "start without waiting for the first rules";
        "HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED" Kind::Bool, "false", Honoured, "be healthy only once a domain is loaded";
        "TOLLKEEPER_POLL_INTERVAL" span(Duration::from_millis(100), DAY, true), "10s", Honoured,
            "how often the contents of the rule files are compared, for file systems that send no events; 0: never";
        "TOLLKEEPER_RELOAD_DEBOUNCE" span(Duration::from_millis(1), Duration::from_secs(10), false), "100ms", Honoured,
            "rule files are read when nothing has changed for this time";
        "TOLLKEEPER_LOG_MAX" Kind::Int { min: 1, max: 1_000_000 }, "10000", Honoured,
            "the most requests_per_unit that a sliding_window_log may have";
        "USE_CALENDAR_MONTH_RATE_LIMIT" Kind::Bool, "false", Honoured,
            "fixed windows of months are calendar months in UTC, rather than 30 days";
    }
    Answers {
        "SHADOW_MODE" Kind::Bool, "false", Honoured, "refuse nothing, whatever the rules say";
        "QUOTA_MODE" Kind::Bool, "false", Honoured, "every limit is a quota: a request is refused when all of its quotas are used up";
        "STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT" Kind::Bool, "false", Honoured,
            "a refused request is charged only to the limits that refuse it";
        "LIMIT_RESPONSE_HEADERS_ENABLED" Kind::Bool, "false", Honoured, "send the three headers below with every answer";
        "LIMIT_LIMIT_HEADER" Kind::Header, "RateLimit-Limit", Honoured, "header with the limit";
        "LIMIT_REMAINING_HEADER" Kind::Header, "RateLimit-Remaining", Honoured, "header with what is left of it";
        "LIMIT_RESET_HEADER" Kind::Header, "RateLimit-Reset", Honoured, "header with the seconds until it is reset";
        "TOLLKEEPER_RETRY_AFTER_HEADER" Kind::Header, "Retry-After", Honoured,
            "header of a refusal with the seconds until the same request could pass; empty: none";
        "RESPONSE_DYNAMIC_METADATA" Kind::Bool, "false", Differs("metadata of a rule stays with its rule"),
            "describe the request, and the metadata of the rules it met, in the dynamic metadata of the answer";
        "TOLLKEEPER_METADATA_VERDICTS" Kind::Bool, "false", Honoured,
            "name the rules that refused in the dynamic metadata of the answer";
        "TOLLKEEPER_ON_STORE_ERROR" any_case(&["local", "allow", "deny", "error"]), "local", Honoured,
            "what a rule that says nothing about it answers when its counter can not be asked";
    }
    Counters {
        "BACKEND_TYPE" exactly(&["redis", "memcache"]), "", Refused(NO_BACKEND),
            "where counters live; not set: in Redis if a REDIS_ variable is set, else in this process";
        "TOLLKEEPER_MEMORY_BYTES" Kind::Bytes { min: 1 << 20, max: 1 << 40 }, "512MiB", Honoured,
            "what the counters in this process may take; when it is used up, the least used ones go";
        "TOLLKEEPER_OVER_LIMIT_CACHE_BYTES" Kind::Bytes { min: 0, max: 1 << 40 }, "4MiB", Honoured,
            "what may be kept of refusals that Redis has just given, which are given again without asking; 0: none is kept";
        "LOCAL_CACHE_SIZE_IN_BYTES" AT_LEAST_0, "0", Differs("a refusal is kept for 1 s at most, and only for its own limit"),
            "bytes for refusals, fixed windows that count refused hits included; 0: the setting above alone, without those";
        "EXPIRATION_JITTER_MAX_SECONDS" ANY_INT, "300", Differs("only with TOLLKEEPER_KEY_FORMAT=ratelimit"),
            "random seconds by which a counter in Redis outlives its window; 0 or less: none";
        "CACHE_KEY_PREFIX" Kind::Text, "", Honoured, "what the keys of counters in Redis begin with, 256 bytes at most";
    }
    Process {
        "TOLLKEEPER_DRAIN_PERIOD" span(Duration::ZERO, HOUR, true), "5s", Honoured,
            "how long a stop goes on serving after health says no, so that clients go elsewhere";
        "TOLLKEEPER_SHUTDOWN_TIMEOUT" span(Duration::ZERO, HOUR, true), "25s", Honoured,
            "the longest a stop takes from its signal, TOLLKEEPER_DRAIN_PERIOD included; then the process ends";
        "TOLLKEEPER_WORKER_THREADS" Kind::Int { min: 0, max: 1024 }, "0", Honoured, "threads that serve; 0: one for each core";
        "GOMAXPROCS" Kind::Text, "", NoEffect { when: When::Set, why: "it is for Go programs; see TOLLKEEPER_WORKER_THREADS" },
            "threads of a Go program";
        "GOMEMLIMIT" Kind::Text, "", NoEffect { when: When::Set, why: "it is for Go programs; see TOLLKEEPER_MEMORY_BYTES" },
            "memory of a Go program";
    }
    Logs {
        "LOG_LEVEL" any_case(&Level::NAMES), "WARN", Honoured,
            "what is logged: this and graver; start, stop and reloads are warnings, so that they show";
        "LOG_FORMAT" any_case(&["text", "json", ""]), "text", Honoured, "how a line of the log looks";
    }
    Metrics {
        "USE_STATSD" Kind::Bool, "", Differs("the default there is true; several kinds of metrics may be on at once"),
            "send metrics to statsd; not set: if STATSD_HOST or STATSD_PORT is";
        "STATSD_HOST" Kind::Text, "localhost", Honoured, "host of statsd";
        "STATSD_PORT" PORT, "8125", Honoured, "port of statsd";
        "STATSD_PROTOCOL" any_case(&["tcp", "udp"]), "tcp", Honoured, "tcp or udp";
        "USE_DOG_STATSD" Kind::Bool, "false", Honoured, "send metrics to DogStatsD, at STATSD_HOST and STATSD_PORT over UDP";
        "USE_DOG_STATSD_MOGRIFIERS" Kind::List, "", Honoured, "names of the rewriting rules below, in the order in which they are tried";
        "DOG_STATSD_MOGRIFIER_*" Kind::Text, "", Honoured,
            "a rewriting rule: `_PATTERN` (a regular expression), `_NAME` and `_TAGS` (k:v,k:v), which may hold $1, $2 and so on";
        "USE_PROMETHEUS" Kind::Bool, "false", Honoured, "serve metrics to Prometheus";
        "PROMETHEUS_ADDR" Kind::Address, ":9090", Honoured, "address and port of the Prometheus listener";
        "PROMETHEUS_PATH" Kind::Text, "/metrics", Honoured, "path of the metrics";
        "PROMETHEUS_MAPPER_YAML" Kind::Path, "",
            Differs("a file that can not be read or is wrong stops the start; regular expressions match whole names"),
            "file that maps statsd names to Prometheus names, in place of the usual names and labels";
        "PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS" Kind::Bool, "false", Honoured,
            "ratelimit_service_response_time_seconds holds milliseconds, whatever it is called";
        "TOLLKEEPER_METRIC_PATH_LABEL" Kind::Bool, "false", Honoured,
            "the metrics of limits have a label `path` with the whole path, beside `domain`, `key1` and so on";
        "TOLLKEEPER_METRIC_SERIES" Kind::Int { min: 0, max: 10_000_000 }, "10000", Honoured,
            "the most names that requests may make: detailed_metric, value_to_metric, limits of Envoy's, unknown domains";
        "TOLLKEEPER_TOP_KEYS" Kind::Int { min: 0, max: 1_000_000 }, "2048", Honoured,
            "how many of the keys that are refused most /top counts in a minute; 0: none";
        "EXTRA_TAGS" Kind::Map, "", Honoured, "tags on every metric: k:v,k:v";
        "STATS_FLUSH_INTERVAL" span(Duration::from_millis(10), HOUR, false), "10s", Honoured, "how often metrics are sent to statsd";
        "DISABLE_STATS" Kind::Bool, "false", Honoured, "no metrics at all, whatever else is set; /top, /rules and the counts of /stats are off too";
        "NEAR_LIMIT_RATIO" Kind::Float { min: 0.0, max: 1.0 }, "0.8", Honoured, "share of a limit from which a hit counts as near it";
        "GOSTATS_*" Kind::Text, "", NoEffect { when: When::Filled, why: "metrics are sent by a program that is not Go" },
            "settings of a Go statsd library";
        "DD_*" Kind::Secret, "", NoEffect { when: When::Filled, why: "metrics are sent by another client than Datadog's" },
            "settings of the Datadog client";
    }
    Tracing {
        "TRACING_ENABLED" Kind::Bool, "false", Honoured, "send traces over OTLP";
        "TRACING_SERVICE_NAME" Kind::Text, "RateLimit", Honoured, "name of the service in traces; goes before OTEL_SERVICE_NAME";
        "TRACING_SERVICE_NAMESPACE" Kind::Text, "", Honoured, "namespace of the service in traces";
        "TRACING_SERVICE_INSTANCE_ID" Kind::Text, "", Honoured, "instance in traces; empty: a random one";
        "TRACING_EXPORTER_PROTOCOL" exactly(&["http", "grpc", ""]), "http", Honoured,
            "how the collector is spoken to; goes before OTEL_EXPORTER_OTLP_PROTOCOL";
        "TRACING_SAMPLING_RATE" SHARE, "1", Differs("a number outside of 0 to 1 stops the start"),
            "share of the traces begun here that is kept; goes before OTEL_TRACES_SAMPLER";
        "TOLLKEEPER_TRACE_DESCRIPTORS" Kind::Bool, "false", Honoured,
            "spans hold the keys and values of descriptors, which may tell who somebody is";
        "OTEL_SDK_DISABLED" Kind::Bool, "false", Honoured, "no traces, whatever else is set";
        "OTEL_SERVICE_NAME" Kind::Text, "", Honoured, "name of the service in traces";
        "OTEL_RESOURCE_ATTRIBUTES" Kind::Text, "", Honoured, "what else tells this process from others in traces: k=v,k=v";
        "OTEL_EXPORTER_OTLP_ENDPOINT" Kind::Url, "", Honoured,
            "URL of the collector; not set: http://localhost:4318, or :4317 over gRPC";
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" Kind::Url, "", Honoured, "the same for traces; over HTTP with the whole path";
        "OTEL_EXPORTER_OTLP_PROTOCOL" OTLP, "", Honoured, "how the collector is spoken to";
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL" OTLP, "", Honoured, "the same for traces";
        "OTEL_EXPORTER_OTLP_HEADERS" Kind::Secret, "", Honoured, "headers that the collector gets: k=v,k=v";
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS" Kind::Secret, "", Honoured, "the same for traces";
        "OTEL_EXPORTER_OTLP_TIMEOUT" MILLISECONDS, "10000", Honoured, "the longest that sending spans takes, in milliseconds";
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT" MILLISECONDS, "", Honoured, "the same for traces";
        "OTEL_EXPORTER_OTLP_COMPRESSION" COMPRESSION, "", Honoured, "how spans are compressed";
        "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION" COMPRESSION, "", Honoured, "the same for traces";
        "OTEL_EXPORTER_OTLP_CERTIFICATE" Kind::Path, "", Honoured, "authority to trust in place of those of the system";
        "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE" Kind::Path, "", Honoured, "the same for traces";
        "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE" Kind::Path, "", Honoured, "certificate shown to the collector";
        "OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE" Kind::Path, "", Honoured, "the same for traces";
        "OTEL_EXPORTER_OTLP_CLIENT_KEY" Kind::Path, "", Honoured, "its private key";
        "OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY" Kind::Path, "", Honoured, "the same for traces";
        "OTEL_EXPORTER_OTLP_INSECURE" Kind::Bool, "false", NoEffect { when: When::True, why: "http:// or https:// says it" },
            "speak to the collector without TLS";
        "OTEL_EXPORTER_OTLP_*" Kind::Secret, "",
            NoEffect { when: When::Filled, why: "it says nothing about traces, or is not known" }, "other things sent over OTLP";
        "OTEL_TRACES_SAMPLER" exactly(&SAMPLERS), "", Honoured, "which traces are kept; not set: as TRACING_SAMPLING_RATE says";
        "OTEL_TRACES_SAMPLER_ARG" SHARE, "1", Honoured, "share of the traces that a sampler by ratio keeps";
        "OTEL_PROPAGATORS" Kind::List, "tracecontext,b3,b3multi", Honoured,
            "how callers may say of which trace they are; W3C goes before B3";
        "OTEL_BSP_MAX_QUEUE_SIZE" Kind::Int { min: 1, max: 1_000_000 }, "2048", Honoured,
            "spans that may wait to be sent; more are dropped and counted";
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE" Kind::Int { min: 1, max: 100_000 }, "512", Honoured, "spans that are sent at once, at most";
        "OTEL_BSP_SCHEDULE_DELAY" MILLISECONDS, "5000", Honoured, "the longest that a span waits to be sent, in milliseconds";
        "OTEL_BSP_EXPORT_TIMEOUT" MILLISECONDS, "30000",
            NoEffect { when: When::Set, why: "OTEL_EXPORTER_OTLP_TIMEOUT is the one that counts" }, "see OTEL_EXPORTER_OTLP_TIMEOUT";
    }
    Xds {
        "CONFIG_GRPC_XDS_NODE_ID" Kind::Text, "default", WITHOUT_XDS, "node id";
        "CONFIG_GRPC_XDS_NODE_METADATA" Kind::Text, "", WITHOUT_XDS, "node metadata: k=v,k=v";
        "CONFIG_GRPC_XDS_SERVER_URL" Kind::Url, "localhost:18000", WITHOUT_XDS, "address of the xDS server";
        "CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL" ANY_SPAN, "3s", WITHOUT_XDS, "time between attempts to connect";
        "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS" Kind::Secret, "", WITHOUT_XDS, "headers of the stream: k:v,k:v";
        "CONFIG_GRPC_XDS_SERVER_USE_TLS" Kind::Bool, "false", WITHOUT_XDS, "connect over TLS";
        "CONFIG_GRPC_XDS_CLIENT_TLS_CERT" Kind::Path, "", WITHOUT_XDS, "certificate shown to the xDS server";
        "CONFIG_GRPC_XDS_CLIENT_TLS_KEY" Kind::Path, "", WITHOUT_XDS, "its private key";
        "CONFIG_GRPC_XDS_SERVER_TLS_CACERT" Kind::Path, "", WITHOUT_XDS, "authority that must have signed the server's certificate";
        "CONFIG_GRPC_XDS_SERVER_TLS_SAN" Kind::Text, "", WITHOUT_XDS, "name that the server's certificate must hold";
        "XDS_CLIENT_BACKOFF_INITIAL_INTERVAL" ANY_SPAN, "10s", WITHOUT_XDS, "first wait after a lost stream";
        "XDS_CLIENT_BACKOFF_MAX_INTERVAL" ANY_SPAN, "60s", WITHOUT_XDS, "longest wait after a lost stream";
        "XDS_CLIENT_BACKOFF_RANDOM_FACTOR" ANY_FLOAT, "0.5", WITHOUT_XDS, "how much the waits vary";
        "XDS_CLIENT_BACKOFF_JITTER" Kind::Bool, "true", WITHOUT_XDS, "whether the waits vary";
        "XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES" ANY_INT, "0", WITHOUT_XDS, "the largest message that is read; 0: 4 MiB";
    }
    Redis {
        "REDIS_SOCKET_TYPE" any_case(&["tcp", "unix"]), "unix", Differs("not set, it is what REDIS_URL looks like"),
            "what a single REDIS_URL names: host:port (tcp) or a path (unix)";
        "REDIS_TYPE" any_case(&["SINGLE", "SENTINEL", "CLUSTER"]), "SINGLE", Honoured, "how Redis is set up";
        "REDIS_URL" Kind::Url, "/var/run/nutcracker/ratelimit.sock",
            Differs("rediss:// is TLS; a node of a cluster that is found later gets the user and password too"),
            "host:port, a path or redis://user:password@host:port/db; a list for a cluster; master,host:port,... for sentinels";
        "REDIS_POOL_SIZE" AT_LEAST_1, "1", Differs("the default there is 10; one connection carries all calls, and more than 128 are 128"),
            "connections to each node";
        "REDIS_AUTH" Kind::Secret, "", Honoured, "password, or user:password, in place of what REDIS_URL holds";
        "TOLLKEEPER_REDIS_AUTH_FILE" Kind::Path, "", Honoured,
            "file with what REDIS_AUTH would say; read at each connect and when it changes";
        "REDIS_TLS" Kind::Bool, "false", Honoured, "connect over TLS";
        "REDIS_TLS_CLIENT_CERT" Kind::Path, "", Honoured, "certificate shown to Redis, per second or not";
        "REDIS_TLS_CLIENT_KEY" Kind::Path, "", Honoured, "its private key";
        "REDIS_TLS_CACERT" Kind::Path, "", Honoured, "authority to trust besides those of the system, per second or not";
        "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION" Kind::Bool, "false", Honoured, "accept a trusted certificate for another name";
        "REDIS_TIMEOUT" DIAL, "10s", Honoured, "the longest that connecting takes; no answer waits for it";
        "TOLLKEEPER_STORE_TIMEOUT" span(Duration::from_millis(1), Duration::from_secs(10), false), "15ms", Honoured,
            "the longest that an answer waits for Redis; then TOLLKEEPER_ON_STORE_ERROR or the rule decides";
        "TOLLKEEPER_REPLICAS" Kind::Int { min: 1, max: 100_000 }, "", Honoured,
            "by how much to divide what is allowed locally while Redis is away; not set: the replicas last seen alive";
        "TOLLKEEPER_MAX_REPLICAS" Kind::Int { min: 1, max: 1000 }, "16", Honoured,
            "how many replicas may have a share of an eventual limit; the same in all of them";
        "TOLLKEEPER_KEY_FORMAT" any_case(&["tollkeeper", "ratelimit"]), "tollkeeper", Honoured,
            "ratelimit: strict fixed windows are shared with an envoyproxy/ratelimit on the same Redis";
        "TOLLKEEPER_EVENTUAL_BYTES" Kind::Bytes { min: 0, max: 1 << 40 }, "64MiB", Honoured,
            "about how much memory descriptors with `consistency: eventual` take; those without room are counted strictly";
        "REDIS_HEALTH_CHECK_ACTIVE_CONNECTION" Kind::Bool, "false", Honoured, "be unhealthy without a connection";
        "REDIS_SENTINEL_AUTH" Kind::Secret, "", Honoured, "password, or user:password, for sentinels";
        "TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE" Kind::Path, "", Honoured, "file with what REDIS_SENTINEL_AUTH would say";
        "REDIS_PIPELINE_WINDOW" ANY_SPAN, "0", PIPELINED, "how long commands are gathered";
        "REDIS_PIPELINE_LIMIT" ANY_INT, "0", PIPELINED, "how many commands are gathered";
        "REDIS_CLUSTER_PIPELINE_PARALLELISM" AT_LEAST_0, "1", ALL_AT_ONCE, "nodes asked at once";
        "REDIS_POOL_ON_EMPTY_BEHAVIOR" Kind::Text, "WAIT", NO_POOL, "WAIT, CREATE or ERROR";
        "REDIS_STARTUP_INITIAL_INTERVAL" ANY_SPAN, "1s", starts_anyway("1s"), "first wait between attempts to connect at the start";
        "REDIS_STARTUP_MAX_INTERVAL" ANY_SPAN, "30s", starts_anyway("30s"), "longest wait between attempts to connect at the start";
        "REDIS_STARTUP_MAX_ELAPSED_TIME" ANY_SPAN, "0", starts_anyway("0"), "when to give up at the start; 0: never";
        "REDIS_CLOSE_CONNECTION_ON_READONLY_ERROR" Kind::Bool, "false",
            NoEffect { when: When::True, why: "it is always so" }, "connect anew when Redis turns read-only";
        "REDIS_PERSECOND" Kind::Bool, "false", Honoured, "limits per second are counted in another Redis";
        "REDIS_PERSECOND_SOCKET_TYPE" any_case(&["tcp", "unix"]), "unix", Differs("not set, it is what REDIS_PERSECOND_URL looks like"),
            "as REDIS_SOCKET_TYPE, for limits per second";
        "REDIS_PERSECOND_TYPE" any_case(&["SINGLE", "SENTINEL", "CLUSTER"]), "SINGLE", Honoured, "as REDIS_TYPE, for limits per second";
        "REDIS_PERSECOND_URL" Kind::Url, "/var/run/nutcracker/ratelimitpersecond.sock", Differs("as REDIS_URL does"),
            "as REDIS_URL, for limits per second";
        "REDIS_PERSECOND_POOL_SIZE" AT_LEAST_1, "1", Differs("as REDIS_POOL_SIZE does"), "as REDIS_POOL_SIZE, for limits per second";
        "REDIS_PERSECOND_AUTH" Kind::Secret, "", Honoured, "as REDIS_AUTH, for limits per second";
        "TOLLKEEPER_REDIS_PERSECOND_AUTH_FILE" Kind::Path, "", Honoured, "as TOLLKEEPER_REDIS_AUTH_FILE, for limits per second";
        "REDIS_PERSECOND_TLS" Kind::Bool, "false", Honoured, "as REDIS_TLS, for limits per second";
        "REDIS_PERSECOND_TIMEOUT" DIAL, "10s", Honoured, "as REDIS_TIMEOUT, for limits per second";
        "REDIS_PERSECOND_SENTINEL_AUTH" Kind::Secret, "", Honoured, "as REDIS_SENTINEL_AUTH, for limits per second";
        "TOLLKEEPER_REDIS_PERSECOND_SENTINEL_AUTH_FILE" Kind::Path, "", Honoured,
            "as TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE, for limits per second";
        "REDIS_PERSECOND_PIPELINE_WINDOW" ANY_SPAN, "0", PIPELINED, "as REDIS_PIPELINE_WINDOW, for limits per second";
        "REDIS_PERSECOND_PIPELINE_LIMIT" ANY_INT, "0", PIPELINED, "as REDIS_PIPELINE_LIMIT, for limits per second";
        "REDIS_PERSECOND_CLUSTER_PIPELINE_PARALLELISM" AT_LEAST_0, "1", ALL_AT_ONCE,
            "as REDIS_CLUSTER_PIPELINE_PARALLELISM, for limits per second";
        "REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR" Kind::Text, "WAIT", NO_POOL, "as REDIS_POOL_ON_EMPTY_BEHAVIOR, for limits per second";
        "REDIS_POOL_ON_EMPTY_WAIT_DURATION" Kind::Text, "", NO_LONGER_READ, "gone from envoyproxy/ratelimit";
        "REDIS_PERSECOND_POOL_ON_EMPTY_WAIT_DURATION" Kind::Text, "", NO_LONGER_READ, "gone from envoyproxy/ratelimit";
    }
    Memcache {
        "MEMCACHE_HOST_PORT" Kind::List, "", WITHOUT_MEMCACHE, "servers: host:port,host:port";
        "MEMCACHE_MAX_IDLE_CONNS" ANY_INT, "2", WITHOUT_MEMCACHE, "idle connections to each server";
        "MEMCACHE_SRV" Kind::Text, "", WITHOUT_MEMCACHE, "DNS record that names the servers";
        "MEMCACHE_SRV_REFRESH" ANY_SPAN, "0", WITHOUT_MEMCACHE, "how often that record is read; 0: once";
        "MEMCACHE_TLS" Kind::Bool, "false", WITHOUT_MEMCACHE, "connect over TLS";
        "MEMCACHE_TLS_CLIENT_CERT" Kind::Path, "", WITHOUT_MEMCACHE, "certificate shown to memcache";
        "MEMCACHE_TLS_CLIENT_KEY" Kind::Path, "", WITHOUT_MEMCACHE, "its private key";
        "MEMCACHE_TLS_CACERT" Kind::Path, "", WITHOUT_MEMCACHE, "authority that must have signed the certificate of memcache";
        "MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION" Kind::Bool, "false", WITHOUT_MEMCACHE, "accept a certificate for another name";
    }
};

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);

const PORT: Kind = Kind::Int { min: 0, max: 65_535 };
const ANY_INT: Kind = Kind::Int { min: i64::MIN, max: i64::MAX };
const ANY_FLOAT: Kind = Kind::Float { min: f64::MIN, max: f64::MAX };
const SHARE: Kind = Kind::Float { min: 0.0, max: 1.0 };
const MILLISECONDS: Kind = Kind::Int { min: 1, max: 3_600_000 };
const OTLP: Kind = exactly(&["http/protobuf", "grpc", ""]);
const COMPRESSION: Kind = any_case(&["none", "gzip", ""]);
const SAMPLERS: [&str; 7] = [
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
    "",
];
const AT_LEAST_1: Kind = Kind::Int { min: 1, max: i64::MAX };
const AT_LEAST_0: Kind = Kind::Int { min: 0, max: i64::MAX };
const AGE: Kind = span(Duration::from_millis(1), LONGEST, true);
const DIAL: Kind = span(Duration::from_millis(1), HOUR, false);
const ANY_SPAN: Kind = span(Duration::ZERO, LONGEST, true);

const fn span(min: Duration, max: Duration, zero: bool) -> Kind {
    Kind::Duration { min, max, zero }
}

const fn exactly(words: &'static [&'static str]) -> Kind {
    Kind::OneOf { words, any_case: false }
}

const fn any_case(words: &'static [&'static str]) -> Kind {
    Kind::OneOf { words, any_case: true }
}

const WITHOUT_XDS: Status = NoEffect { when: When::Filled, why: "it is only read with CONFIG_TYPE=GRPC_XDS_SOTW" };
const WITHOUT_MEMCACHE: Status = NoEffect { when: When::Filled, why: "it is only read with BACKEND_TYPE=memcache" };
const PIPELINED: Status = NoEffect { when: When::Not("0"), why: "calls go out as they come, without waiting" };
const ALL_AT_ONCE: Status = NoEffect { when: When::Not("1"), why: "all nodes are always asked at once" };
const NO_POOL: Status = NoEffect { when: When::Not("WAIT"), why: "connections are shared, so there is always one" };
const NO_LONGER_READ: Status =
    NoEffect { when: When::Set, why: "envoyproxy/ratelimit does not read it any more either" };

const fn starts_anyway(default: &'static str) -> Status {
    NoEffect { when: When::Not(default), why: "the start does not wait for Redis, and attempts to connect never end" }
}

const NO_XDS: &[Refusal] = &[Refusal {
    when: When::Is("GRPC_XDS_SOTW"),
    why: "rules over xDS are not in this release",
    instead: "unset it and give the rules as files, by --config or RUNTIME_ROOT",
}];
const NO_BACKEND: &[Refusal] = &[Refusal {
    when: When::Is("memcache"),
    why: "counters in memcache leak under load and are not supported",
    instead: "give redis, or unset it to count in this process",
}];

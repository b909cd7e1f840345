//! The environment variables: all that this program knows, those that are set, and unknown ones that look meant for it.
//!
//! Known are those of envoyproxy/ratelimit, and its own (`TOLLKEEPER_...`). Each group is one file, which declares its
//! settings and reads them. Only that file knows their defaults. The groups and their settings are in the order of the
//! documentation. Other unknown names are ignored.
//!
//! Decides: whether a misspelled or unknown variable is noticed, also by `check --env`.
//! Decides: which groups of variables there are (`SETTING_GROUPS`).

use std::ffi::OsString;

use super::problem::{Notice, SettingProblem};
use super::secret::SECRET_MASK;
use super::setting::{AnySetting, SettingGroup};
use super::values::{EnvironmentFindings, Variable};
use super::{
    client_limits, cloud_identity, counters, decision_log, decisions, fleet, grpc, listeners, logs, memcache, metrics,
    otlp_metrics, process, redis, rules, tls, tracing, webhook, xds,
};

/// All groups of settings.
pub static SETTING_GROUPS: [&SettingGroup; 20] = [
    &listeners::GROUP,
    &grpc::GROUP,
    &client_limits::GROUP,
    &tls::GROUP,
    &rules::GROUP,
    &decisions::GROUP,
    &counters::GROUP,
    &process::GROUP,
    &logs::GROUP,
    &decision_log::GROUP,
    &webhook::GROUP,
    &metrics::GROUP,
    &fleet::GROUP,
    &tracing::GROUP,
    &otlp_metrics::GROUP,
    &xds::GROUP,
    &redis::GROUP,
    &redis::regions::GROUP,
    &cloud_identity::GROUP,
    &memcache::GROUP,
];

/// Iterates over all settings, group by group.
pub fn all_settings() -> impl Iterator<Item = &'static dyn AnySetting> {
    SETTING_GROUPS.iter().flat_map(|group| group.settings.iter().copied())
}

/// Finds the setting called `name`, or the family that `name` belongs to; an exact name takes precedence.
pub fn find_setting(name: &str) -> Option<&'static dyn AnySetting> {
    all_settings()
        .find(|setting| setting.name() == name)
        .or_else(|| all_settings().find(|setting| setting.info().covers_variable(name)))
}

/// Returns the position of the setting for the variable `name`, for sorting.
pub(crate) fn setting_position(name: &str) -> Option<usize> {
    let found = find_setting(name)?;
    all_settings().position(|setting| setting.name() == found.name())
}

/// The variables of an environment, by name; of two with one name the first counts.
#[derive(Clone, Default)]
pub(crate) struct Environment {
    /// Known variables, in the order of the documentation, then by name.
    pub(crate) known: Vec<Variable>,
    /// Unknown variables that look meant for this program, by name.
    pub(crate) unknown: Vec<UnknownVariable>,
    /// Removed variables that prevent the start.
    refused: Vec<SettingProblem>,
}

/// A variable that is not known.
#[derive(Clone)]
pub(crate) struct UnknownVariable {
    pub(crate) name: String,
    /// Similar known name, which may have been meant.
    pub(crate) nearest: Option<&'static str>,
    /// What to use instead, if other rate limiters have the variable, or an earlier version had it.
    pub(crate) instead: Option<&'static str>,
    /// An earlier version had the variable.
    is_removed: bool,
}

/// Variables of envoyproxy/ratelimit that came later, of its forks, and of Limitador, with what to use instead.
const FOREIGN_VARIABLES: [(&str, &str); 28] = [
    ("SANITIZE_DESCRIPTOR_METRIC_DOTS", "nothing: a dot in a value shifts no label of Prometheus here"),
    ("ENABLE_NEGATIVE_HITS", "nothing: `is_negative_hits` of a descriptor always refunds"),
    ("MAX_CONCURRENT_REQUESTS", "TOLLKEEPER_MAX_CONCURRENT_REQUESTS"),
    ("REQUEST_TIMEOUT", "`timeout` of Envoy's filter, and TOLLKEEPER_STORE_TIMEOUT"),
    ("GRPC_MAX_CONCURRENT_STREAMS", "nothing: a connection may have 4096"),
    ("MAX_SLEEPING_ROUTINES", "`queue_size` of a rule with `algorithm: leaky_bucket`"),
    ("REDIS_SENTINEL_MASTER_NAME", "REDIS_URL: the name of the primary, then the sentinels"),
    ("REDIS_PERSECOND_SENTINEL_MASTER_NAME", "REDIS_PERSECOND_URL: the name of the primary, then the sentinels"),
    ("REDIS_PASSWORD", "REDIS_AUTH"),
    ("REDIS_USERNAME", "REDIS_AUTH: user:password"),
    ("REDIS_HOST", "REDIS_URL: host:port, with REDIS_SOCKET_TYPE=tcp"),
    ("REDIS_PORT", "REDIS_URL: host:port, with REDIS_SOCKET_TYPE=tcp"),
    ("LIMITS_FILE", "RUNTIME_ROOT, or serve --config FILE; the rules have another form"),
    ("ENVOY_RLS_HOST", "GRPC_HOST"),
    ("ENVOY_RLS_PORT", "GRPC_PORT"),
    ("HTTP_API_HOST", "HOST"),
    ("HTTP_API_PORT", "PORT"),
    ("RUST_LOG", "LOG_LEVEL"),
    ("TRACING_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT, with TRACING_ENABLED=true"),
    ("LIMIT_NAME_IN_PROMETHEUS_LABELS", "nothing: metrics have the keys of a rule as labels"),
    ("METRIC_LABELS_DEFAULT", "`detailed_metric` of a rule"),
    ("RATE_LIMIT_HEADERS", "`enable_x_ratelimit_headers` of Envoy's filter"),
    ("GRPC_REFLECTION_SERVICE", "TOLLKEEPER_REFLECTION"),
    ("DISK_PATH", "REDIS_URL: counters that must survive a restart are in Redis"),
    ("REDIS_LOCAL_CACHE_ENABLED", "`consistency: eventual` of a rule"),
    ("REDIS_LOCAL_CACHE_FLUSHING_PERIOD_MS", "`consistency: eventual` of a rule"),
    ("REDIS_LOCAL_CACHE_BATCH_SIZE", "`consistency: eventual` of a rule"),
    ("REDIS_LOCAL_CACHE_RESPONSE_TIMEOUT_MS", "TOLLKEEPER_STORE_TIMEOUT"),
];

/// Removed variables, with what to use instead.
const REMOVED_VARIABLES: [(&str, &str); 16] = [
    ("TOLLKEEPER_MAX_CONNECTIONS_PER_ADDRESS", "nothing: an address gets a fifth of TOLLKEEPER_MAX_CONNECTIONS"),
    (
        "TOLLKEEPER_MAX_CONCURRENT_REQUESTS_PER_ADDRESS",
        "nothing: an address gets a quarter of TOLLKEEPER_MAX_CONCURRENT_REQUESTS",
    ),
    (
        "TOLLKEEPER_MAX_BUFFERED_BYTES_PER_ADDRESS",
        "nothing: an address gets a quarter of TOLLKEEPER_MAX_BUFFERED_BYTES",
    ),
    (
        "TOLLKEEPER_MAX_BUFFERED_BYTES_PER_CONNECTION",
        "nothing: a connection gets an eighth of TOLLKEEPER_MAX_BUFFERED_BYTES",
    ),
    ("TOLLKEEPER_MAX_HEADER_BYTES", "nothing: the headers of an HTTP request may have 16 KiB"),
    ("TOLLKEEPER_GRPC_KEEPALIVE_TIMEOUT", "nothing: it is a third of TOLLKEEPER_GRPC_KEEPALIVE_INTERVAL"),
    ("TOLLKEEPER_GRPC_MAX_CONCURRENT_STREAMS", "nothing: a connection may have 4096"),
    ("TOLLKEEPER_RLQS_MAX_BUCKETS_PER_STREAM", "nothing: a stream gets a part of TOLLKEEPER_RLQS_MAX_BUCKETS"),
    ("TOLLKEEPER_RLQS_MAX_ID_BYTES", "TOLLKEEPER_RLQS_MAX_BUCKETS: each 640 bytes of keys and values take one of them"),
    ("LIMIT_ALL_DESCRIPTORS_HEADERS_ENABLED", "`enable_x_ratelimit_headers` of Envoy, which shows all descriptors"),
    ("TOLLKEEPER_TABLE_KEEP", "`keep` of the table"),
    ("TOLLKEEPER_TABLE_UNKNOWN_READS", "nothing: unknown values are read 2000 times a second at most"),
    ("TOLLKEEPER_GLOBAL_REDIS_POOL_SIZE", "REDIS_POOL_SIZE"),
    ("TOLLKEEPER_GLOBAL_REDIS_TIMEOUT", "REDIS_TIMEOUT"),
    ("TOLLKEEPER_DECISION_LOG_REDIS_TYPE", "nothing: the form of TOLLKEEPER_DECISION_LOG_REDIS_URL says it"),
    ("TOLLKEEPER_REGION_LEASE", "nothing: a cut-off region keeps its part for as long as it is cut off"),
];

/// Removed variables that prevent the start, with what to use instead: ignored, they would leave a connection without
/// TLS or password.
const REFUSED_VARIABLES: [(&str, &str); 8] = [
    ("TOLLKEEPER_REDIS_AUTH_FILE", "REDIS_AUTH_FILE"),
    ("TOLLKEEPER_REDIS_PERSECOND_AUTH_FILE", "REDIS_PERSECOND_AUTH_FILE"),
    ("TOLLKEEPER_GLOBAL_REDIS_TLS", "rediss:// in TOLLKEEPER_GLOBAL_REDIS_URL"),
    ("TOLLKEEPER_GLOBAL_REDIS_AUTH", "TOLLKEEPER_GLOBAL_REDIS_AUTH_FILE"),
    ("TOLLKEEPER_GLOBAL_REDIS_SENTINEL_AUTH", "TOLLKEEPER_GLOBAL_REDIS_SENTINEL_AUTH_FILE"),
    ("TOLLKEEPER_DECISION_LOG_REDIS_TLS", "rediss:// in TOLLKEEPER_DECISION_LOG_REDIS_URL"),
    ("TOLLKEEPER_DECISION_LOG_REDIS_SENTINEL_AUTH", "a password in TOLLKEEPER_DECISION_LOG_REDIS_URL"),
    ("TOLLKEEPER_DECISION_LOG_REDIS_SENTINEL_AUTH_FILE", "a password in TOLLKEEPER_DECISION_LOG_REDIS_URL"),
];

/// Starts of names of this program and of envoyproxy/ratelimit.
const KNOWN_PREFIXES: [&str; 8] =
    ["TOLLKEEPER_", "REDIS_", "MEMCACHE_", "RUNTIME_", "CONFIG_GRPC_XDS_", "GRPC_SERVER_", "PROMETHEUS_", "STATSD_"];

impl Environment {
    /// Selects the variables that concern this program.
    pub(crate) fn select_variables(vars: impl Iterator<Item = (OsString, OsString)>) -> Self {
        let mut environment = Self::default();
        for (name, value) in vars {
            // Known names are printable ASCII, and a notice about an unknown one must fit on a line.
            let Some(name) = name.to_str().filter(|name| name.bytes().all(|b| b.is_ascii_graphic())) else { continue };
            match find_setting(name) {
                Some(setting) => {
                    if environment.known.iter().all(|other| other.name != name) {
                        let text = value.into_string().ok();
                        environment.known.push(Variable { name: name.to_owned(), setting, text });
                    }
                }
                None if is_kubernetes_service_variable(name, &value) => {}
                None if let Some((_, instead)) = REFUSED_VARIABLES.iter().find(|(refused, _)| *refused == name) => {
                    let (what, fix) = ("removed".to_owned(), format!("unset it, and use {instead}"));
                    environment.refused.push(SettingProblem {
                        name: name.to_owned(),
                        shown: SECRET_MASK.to_owned(),
                        what,
                        fix,
                    });
                }
                None => environment.unknown.extend(UnknownVariable::detect_meant_for_tollkeeper(name)),
            }
        }
        environment.known.sort_by_cached_key(|variable| (setting_position(&variable.name), variable.name.clone()));
        environment.unknown.sort_by(|a, b| a.name.cmp(&b.name));
        environment
    }

    /// Sorts findings in the order of the documentation, and adds notices about ignored and unknown variables.
    pub(crate) fn sort_and_complete_findings(&self, mut findings: EnvironmentFindings) -> EnvironmentFindings {
        let EnvironmentFindings { problems, ignored, notices, .. } = &mut findings;
        problems.extend(self.refused.iter().cloned());
        problems.sort_by_key(|problem| setting_position(&problem.name));
        problems.dedup();
        notices.extend(ignored.iter().map(|ignored| Notice::no_effect(&ignored.name, &ignored.what)));
        notices.sort_by_key(|notice| setting_position(&notice.name));
        notices.dedup();
        for variable in &self.unknown {
            let guess = variable.suggestion().map(|fix| format!("; {fix}")).unwrap_or_default();
            let why = if variable.is_removed { "was removed" } else { "is not known" };
            let what = format!("{why} and has no effect{guess}");
            notices.push(Notice { name: variable.name.clone(), what });
        }
        findings
    }
}

/// Variable with the default of `--addr` of commands that call the debug listener; a server does not read it.
pub const DEBUG_ADDRESS_VARIABLE: &str = "TOLLKEEPER_ADDR";

/// Variable with the default of `--addr` of `call`; a server does not read it.
pub const GRPC_ADDRESS_VARIABLE: &str = "TOLLKEEPER_GRPC_ADDR";

impl UnknownVariable {
    /// What to do about it.
    pub(crate) fn suggestion(&self) -> Option<String> {
        let instead = self.instead.map(|instead| match instead.strip_prefix("nothing: ") {
            Some(why) => why.to_owned(),
            None => format!("use {instead}"),
        });
        instead.or_else(|| self.nearest.map(|name| format!("did you mean {name}?")))
    }

    /// Returns the unknown variable `name` if it begins as known ones do, is of another rate limiter, or resembles a
    /// known name.
    fn detect_meant_for_tollkeeper(name: &str) -> Option<Self> {
        if [DEBUG_ADDRESS_VARIABLE, GRPC_ADDRESS_VARIABLE].contains(&name) {
            return None;
        }
        let own = name.strip_prefix("TOLLKEEPER_");
        let nearest =
            own.and_then(|rest| find_setting(rest).map(AnySetting::name)).or_else(|| nearest_known_name(name));
        let find = |variables: &[(&str, &'static str)]| {
            variables.iter().find(|(variable, _)| *variable == name).map(|(_, instead)| *instead)
        };
        let removed = find(&REMOVED_VARIABLES);
        let instead = removed.or_else(|| find(&FOREIGN_VARIABLES));
        let is_meant = instead.is_some() || KNOWN_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        let is_removed = removed.is_some();
        (is_meant || nearest.is_some()).then(|| Self { name: name.to_owned(), nearest, instead, is_removed })
    }
}

/// Finds the known name that `name` misspells: by one edit in a short name, by two in a long one.
fn nearest_known_name(name: &str) -> Option<&'static str> {
    const MIN_FUZZY_NAME_LENGTH: usize = 7;
    const MIN_TWO_EDITS_NAME_LENGTH: usize = 12;
    const MAX_FUZZY_NAME_LENGTH: usize = 64;
    if !(MIN_FUZZY_NAME_LENGTH..=MAX_FUZZY_NAME_LENGTH).contains(&name.len()) {
        return None;
    }
    let max_edits = if name.len() < MIN_TWO_EDITS_NAME_LENGTH { 1 } else { 2 };
    let upper = name.to_ascii_uppercase();
    let names = all_settings().filter(|setting| !setting.info().is_variable_family()).map(AnySetting::name);
    let candidates = names.filter(|name| name.len() >= MIN_FUZZY_NAME_LENGTH);
    let near = candidates.map(|name| (strsim::osa_distance(&upper, name), name));
    near.filter(|(edits, _)| *edits <= max_edits).min_by_key(|(edits, _)| *edits).map(|(_, name)| name)
}

/// Returns `true` for variables that Kubernetes sets to describe a service.
///
/// A service called `tollkeeper` adds `TOLLKEEPER_PORT=tcp://...` and more to every pod of its namespace.
fn is_kubernetes_service_variable(name: &str, value: &OsString) -> bool {
    let is_url = value.to_str().is_some_and(|text| ["tcp://", "udp://", "sctp://"].iter().any(|s| text.starts_with(s)));
    let has_protocol = ["_TCP", "_UDP", "_SCTP"].iter().any(|protocol| {
        ["", "_PROTO", "_PORT", "_ADDR"].iter().any(|end| name.strip_suffix(end).is_some_and(|n| n.ends_with(protocol)))
    });
    is_url
        || name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || (name.contains("_PORT_") && has_protocol)
}

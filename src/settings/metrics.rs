//! Destinations and labels of metrics.
//!
//! Prometheus, statsd and DogStatsD can be used together: Prometheus scrapes, the other two get metrics sent.
//!
//! Decides: path and format of metrics.
//! Decides: `EXTRA_TAGS`, mogrifiers and tags that are wrong: a key twice, an empty item (`a,,b`).
//! Decides: the interval of statsd; what is off with `DISABLE_STATS` and `TOLLKEEPER_TOP_KEYS=0`.
//! Decides: how many keys are kept.

use std::path::PathBuf;
use std::time::Duration;

use regex::Regex;

use super::address::Address;
use super::secret::Secret;
use super::setting::{AnySetting, settings};
use super::value::text::{TextList, TextMap};
use super::value::{SettingValue as _, choices};
use super::values::Values;
use crate::base::named_enum::named_enum;

settings! { "Metrics";
    USE_STATSD: Option<bool> = "", "send metrics to statsd; not set: if STATSD_HOST or STATSD_PORT is"
        .differs("true by default there; can be used beside DogStatsD and Prometheus");
    STATSD_HOST: String = "localhost", "host of statsd";
    STATSD_PORT: u16 = "8125", "port of statsd";
    STATSD_PROTOCOL: StatsdTransport = "tcp", "transport to statsd"
        .only_read("if metrics are sent to statsd (USE_STATSD=true)");
    USE_DOG_STATSD: bool = "false", "send metrics to DogStatsD at STATSD_HOST:STATSD_PORT, over UDP";
    USE_DOG_STATSD_MOGRIFIERS: TextList = "",
        "rewriting rules for DogStatsD metrics, tried in this order" .only_read("with USE_DOG_STATSD=true");
    DOG_STATSD_MOGRIFIER as "DOG_STATSD_MOGRIFIER_*": String = "",
        "rewriting rule `_X`: `_X_PATTERN` (regular expression), `_X_NAME`, `_X_TAGS` (k:v,k:v); $1 is the first group"
        .only_read("if USE_DOG_STATSD_MOGRIFIERS names its rule, with USE_DOG_STATSD=true");
    USE_PROMETHEUS: bool = "false", "serve metrics to Prometheus" .often_set();
    PROMETHEUS_ADDR: Address = ":9090", "address of the Prometheus listener"
        .only_read("with USE_PROMETHEUS=true")
        .often_set();
    PROMETHEUS_PATH: String = "/metrics", "path of the metrics page" .only_read("with USE_PROMETHEUS=true");
    PROMETHEUS_MAPPER_YAML: Option<PathBuf> = "",
        "statsd_exporter mapping file"
        .differs("an invalid file prevents the start, a missing one does not; regular expressions match whole names")
        .only_read("with USE_PROMETHEUS=true");
    PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS: bool = "false",
        "report ratelimit_service_response_time_seconds in milliseconds"
        .only_read("with USE_PROMETHEUS=true");
    TOLLKEEPER_METRIC_PATH_LABEL: bool = "false",
        "add a label `path` with the whole path of a limit";
    TOLLKEEPER_METRIC_SERIES: usize = "10000",
        "most series that requests name: detailed_metric, value_to_metric, overrides, unknown domains"
        .within("0 to 10000000");
    TOLLKEEPER_TOP_KEYS: usize = "2048",
        "most rejected keys that /top tracks per minute; 0: none" .within("0 to 1000000");
    EXTRA_TAGS: TextMap = "", "tags on every metric" .often_set();
    STATS_FLUSH_INTERVAL: Duration = "10s", "interval of sending metrics to statsd and DogStatsD"
        .within("10ms to 1h");
    DISABLE_STATS: bool = "false", "turn off all metrics, /top, /rules and the counters of /stats";
    NEAR_LIMIT_RATIO: f64 = "0.8", "share of a limit above which hits are counted as near_limit"
        .within("0 to 1");
    GOSTATS as "GOSTATS_*": String = "", "settings of a Go statsd library"
        .without_effect("this program does not use that Go library");
    DD as "DD_*": Option<Secret> = "", "settings of the Datadog client"
        .without_effect("this program does not use the Datadog client");
}

named_enum! {
    /// Transport of statsd.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum StatsdTransport {
        /// TCP.
        Tcp = "tcp",
        /// UDP.
        Udp = "udp",
    }
}

choices! { StatsdTransport }

/// Destinations and labels of metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricsSettings {
    /// `true` if no metrics are counted, served or sent.
    pub is_off: bool,
    /// The Prometheus listener, if there is one.
    pub prometheus: Option<PrometheusSettings>,
    /// The statsd and DogStatsD servers that get metrics.
    pub statsd: Vec<StatsdServer>,
    /// Interval of sending.
    pub flush_interval: Duration,
    /// Tags on all metrics, sorted by name, each name once.
    pub tags: Vec<(String, String)>,
    /// `true` if metrics of limits have a label with the whole path.
    pub path_label: bool,
    /// Maximum number of series named by requests.
    pub max_request_series: usize,
    /// Approximate number of keys that `/top` tracks per minute; 0 means none.
    pub top_keys: usize,
}

/// Listener and page for Prometheus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrometheusSettings {
    /// Address of the listener.
    pub address: Address,
    /// Path of the page, which begins with a slash.
    pub path: String,
    /// statsd_exporter mapping file, if there is one.
    pub mapper: Option<PathBuf>,
    /// `true` if response times are in milliseconds instead of seconds.
    pub milliseconds: bool,
}

/// A server that gets metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatsdServer {
    /// Its host.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Protocol and transport.
    pub protocol: StatsdProtocol,
}

/// Protocol and transport of a statsd server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatsdProtocol {
    /// statsd over TCP.
    Tcp,
    /// statsd over UDP.
    Udp,
    /// DogStatsD over UDP, with names rewritten by the first rule that matches.
    DogStatsd(Vec<Mogrifier>),
}

/// A rule that rewrites metric names for DogStatsD.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mogrifier {
    /// Valid regular expression for the names that the rule applies to.
    pub pattern: String,
    /// New name, in which `$1` is the first group of the pattern.
    pub name: String,
    /// Tags, in which `$1` is the first group of the pattern.
    pub tags: Vec<(String, String)>,
}

impl MetricsSettings {
    pub(super) fn from_values(values: &mut Values) -> Self {
        let is_off = values.get(&DISABLE_STATS);
        Self {
            is_off,
            prometheus: PrometheusSettings::from_values(values).filter(|_| !is_off),
            statsd: StatsdServer::all_from_values(values).into_iter().filter(|_| !is_off).collect(),
            flush_interval: values.get(&STATS_FLUSH_INTERVAL),
            tags: read_tags(values),
            path_label: values.get(&TOLLKEEPER_METRIC_PATH_LABEL),
            max_request_series: values.get(&TOLLKEEPER_METRIC_SERIES),
            top_keys: values.get(&TOLLKEEPER_TOP_KEYS),
        }
    }
}

/// Reads the tags, which Prometheus must accept as labels.
fn read_tags(values: &mut Values) -> Vec<(String, String)> {
    let TextMap(mut tags) = values.get(&EXTRA_TAGS);
    tags.sort();
    if tags.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        values.add_problem(&EXTRA_TAGS, "names a tag twice", "give each tag once");
    }
    let is_label = |name: &str| {
        let begins_well = name.bytes().next().is_some_and(|first| !first.is_ascii_digit());
        begins_well && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    };
    if tags.iter().any(|(name, _)| !is_label(name)) {
        let fix = "give names of letters, digits and `_` that do not begin with a digit";
        values.add_problem(&EXTRA_TAGS, "holds a name that Prometheus does not accept", fix);
    }
    tags
}

impl PrometheusSettings {
    fn from_values(values: &mut Values) -> Option<Self> {
        if !values.get(&USE_PROMETHEUS) {
            return None;
        }
        let path = values.get(&PROMETHEUS_PATH);
        if !path.starts_with('/') || path.contains(['{', '}', '*', '?', '#']) {
            let fix = "give one that begins with `/` and holds none of { } * ? #";
            values.add_problem(&PROMETHEUS_PATH, "not a path", fix);
        }
        Some(Self {
            address: values.get(&PROMETHEUS_ADDR),
            path,
            mapper: values.get(&PROMETHEUS_MAPPER_YAML),
            milliseconds: values.get(&PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS),
        })
    }
}

impl StatsdServer {
    fn all_from_values(values: &mut Values) -> Vec<Self> {
        let is_located = values.is_set(&STATSD_HOST) || values.is_set(&STATSD_PORT);
        let use_dog_statsd = values.get(&USE_DOG_STATSD);
        // The location of DogStatsD does not by itself ask for statsd too.
        let use_statsd = values.get(&USE_STATSD).unwrap_or(is_located && !use_dog_statsd);
        let others = [use_dog_statsd, values.get(&USE_PROMETHEUS)];
        if use_statsd && others.contains(&true) {
            values.mark_difference_from_envoy_ratelimit(
                &USE_STATSD,
                "statsd, DogStatsD and Prometheus are used together, not only one",
            );
        }
        let (host, port) = (values.get(&STATSD_HOST), values.get(&STATSD_PORT));
        if (use_statsd || use_dog_statsd) && (host.is_empty() || port == 0) {
            let setting: &dyn AnySetting = if host.is_empty() { &STATSD_HOST } else { &STATSD_PORT };
            values.add_problem(setting, "names no server", "give the host and the port of statsd");
        }
        let mut servers = Vec::new();
        if use_statsd {
            let protocol = match values.get(&STATSD_PROTOCOL) {
                StatsdTransport::Tcp => StatsdProtocol::Tcp,
                StatsdTransport::Udp => StatsdProtocol::Udp,
            };
            servers.push(Self { host: host.clone(), port, protocol });
        }
        if use_dog_statsd {
            let TextList(names) = values.get(&USE_DOG_STATSD_MOGRIFIERS);
            let mogrifiers = names.iter().filter_map(|name| Mogrifier::from_values(values, name)).collect();
            servers.push(Self { host, port, protocol: StatsdProtocol::DogStatsd(mogrifiers) });
        }
        servers
    }
}

impl Mogrifier {
    /// Reads the rule called `name`; `None` after a problem.
    fn from_values(values: &mut Values, name: &str) -> Option<Self> {
        let variable = |part: &str| format!("DOG_STATSD_MOGRIFIER_{name}_{part}");
        let text = |part: &str| values.family_member_text(&variable(part)).unwrap_or_default().to_owned();
        let (pattern, new_name, tags) = (text("PATTERN"), text("NAME"), text("TAGS"));
        let Ok(TextMap(tags)) = TextMap::parse(&tags, TextMap::RANGE) else {
            values.add_problem_with_name(&variable("TAGS"), "not a list of tags", "give k:v,k:v");
            return None;
        };
        if pattern.is_empty() {
            let fix = "give a regular expression, or remove it from USE_DOG_STATSD_MOGRIFIERS";
            values.add_problem_with_name(&variable("PATTERN"), "not set", fix);
            return None;
        }
        if Regex::new(&pattern).is_err() {
            let fix = "give one without look-around and back-references";
            values.add_problem_with_name(&variable("PATTERN"), "not a regular expression", fix);
            return None;
        }
        if new_name.is_empty() {
            values.add_problem_with_name(
                &variable("NAME"),
                "not set",
                "give the new name of metrics that match the pattern",
            );
            return None;
        }
        Some(Self { pattern, name: new_name, tags })
    }
}

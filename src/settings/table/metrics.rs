//! Metrics.

use std::path::PathBuf;
use std::time::Duration;

use crate::settings::address::Address;
use crate::settings::choices::StatsdTransport;
use crate::settings::condition::Condition;
use crate::settings::secret::Secret;
use crate::settings::setting::settings;
use crate::settings::value::number::{DurationRange, FloatRange, IntRange};
use crate::settings::value::text::{TextList, TextMap};

const FLUSH_INTERVAL: DurationRange = DurationRange::new(Duration::from_millis(10), Duration::from_secs(3600));

settings! { "Metrics";
    USE_STATSD: Option<bool> = None, "send metrics to statsd; not set: true if STATSD_HOST or STATSD_PORT is set"
        .differs(Condition::Never, "the default there is true; statsd, DogStatsD and Prometheus can be used together");
    STATSD_HOST: String = "localhost", "host of statsd";
    STATSD_PORT: u16 = 8125, "port of statsd";
    STATSD_PROTOCOL: StatsdTransport = StatsdTransport::Tcp, "transport to statsd";
    USE_DOG_STATSD: bool = false, "send metrics to DogStatsD at STATSD_HOST:STATSD_PORT, over UDP";
    USE_DOG_STATSD_MOGRIFIERS: TextList = "",
        "rewriting rules for DogStatsD metrics, tried in this order: a,b";
    DOG_STATSD_MOGRIFIER as "DOG_STATSD_MOGRIFIER_*": String = "",
        "rewriting rule `_X`: `_X_PATTERN` (regular expression), `_X_NAME`, `_X_TAGS` (k:v,k:v); $1 is the first group";
    USE_PROMETHEUS: bool = false, "serve metrics to Prometheus";
    PROMETHEUS_ADDR: Address = 9090, "address and port of the Prometheus listener";
    PROMETHEUS_PATH: String = "/metrics", "path of the metrics page";
    PROMETHEUS_MAPPER_YAML: Option<PathBuf> = None,
        "statsd_exporter mapping file for metric names and labels, instead of the built-in ones"
        .differs(Condition::Never, "an unreadable or invalid file prevents the start; regular expressions match whole names");
    PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS: bool = false,
        "report ratelimit_service_response_time_seconds in milliseconds, despite its name";
    TOLLKEEPER_METRIC_PATH_LABEL: bool = false,
        "add a label `path` with the whole path of a limit";
    TOLLKEEPER_METRIC_SERIES: usize = 10_000,
        "maximum number of series named by requests: detailed_metric, value_to_metric, Envoy's limits, unknown domains"
        .allowed(IntRange::new(0, 10_000_000));
    TOLLKEEPER_TOP_KEYS: usize = 2048,
        "number of most rejected keys that /top tracks per minute; 0 turns it off" .allowed(IntRange::new(0, 1_000_000));
    EXTRA_TAGS: TextMap = (), "tags on every metric, such as env:prod,zone:a";
    STATS_FLUSH_INTERVAL: Duration = Duration::from_secs(10), "interval of sending metrics to statsd and DogStatsD"
        .allowed(FLUSH_INTERVAL);
    DISABLE_STATS: bool = false, "turn off all metrics, /top, /rules and the counters of /stats";
    NEAR_LIMIT_RATIO: f64 = 0.8, "share of a limit above which hits are counted as near_limit"
        .allowed(FloatRange::new(0.0, 1.0));
    GOSTATS as "GOSTATS_*": String = "", "settings of a Go statsd library"
        .no_effect(Condition::NotEmpty, "this program does not use that Go library");
    DD as "DD_*": Option<Secret> = None, "settings of the Datadog client"
        .no_effect(Condition::NotEmpty, "this program does not use the Datadog client");
}

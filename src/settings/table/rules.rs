//! Rules and their files.

use std::path::PathBuf;
use std::time::Duration;

use crate::settings::choices::RuleSourceKind;
use crate::settings::condition::Condition;
use crate::settings::setting::settings;
use crate::settings::value::number::{DurationRange, IntRange};

const POLL_INTERVAL: DurationRange =
    DurationRange::new(Duration::from_millis(100), Duration::from_secs(86_400)).or_zero();
const RELOAD_DEBOUNCE: DurationRange = DurationRange::new(Duration::from_millis(1), Duration::from_secs(10));

settings! { "Rules and their files";
    CONFIG_TYPE: RuleSourceKind = RuleSourceKind::Files, "source of the rules: files, or a control plane over xDS";
    RUNTIME_ROOT: PathBuf = "/srv/runtime_data/current", "directory above the rule files; empty: no rules";
    RUNTIME_SUBDIRECTORY: PathBuf = "", "directory below RUNTIME_ROOT; empty: RUNTIME_ROOT itself";
    RUNTIME_APPDIRECTORY: PathBuf = "config", "directory below RUNTIME_SUBDIRECTORY that holds the rule files";
    RUNTIME_IGNOREDOTFILES: bool = false, "skip files and directories with names that begin with a dot";
    RUNTIME_WATCH_ROOT: bool = true,
        "watch RUNTIME_ROOT for a swapped symbolic link, instead of the directory of the rule files"
        .differs(Condition::True, "files edited in place are noticed with either value");
    TOLLKEEPER_RULE_DEFAULTS: Option<PathBuf> = None,
        "file of defaults for rules of any source, by domain and unit; reloaded like rules";
    MERGE_DOMAIN_CONFIG: bool = false, "merge files with the same domain, instead of an error"
        .differs(Condition::True, "files are merged in the order of their names");
    FORCE_START_WITHOUT_INITIAL_CONFIG: bool = false, "report healthy before the first rules over xDS";
    HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED: bool = false, "report unhealthy until at least one domain is loaded";
    TOLLKEEPER_POLL_INTERVAL: Duration = Duration::from_secs(10),
        "interval of comparing file contents, for file systems without change events; 0 means never"
        .allowed(POLL_INTERVAL);
    TOLLKEEPER_RELOAD_DEBOUNCE: Duration = Duration::from_millis(100),
        "time without a further change after which changed rule files are read" .allowed(RELOAD_DEBOUNCE);
    TOLLKEEPER_LOG_MAX: u32 = 10_000,
        "maximum requests_per_unit of a sliding_window_log, which stores each hit" .allowed(IntRange::new(1, 1_000_000));
    USE_CALENDAR_MONTH_RATE_LIMIT: bool = false,
        "align fixed windows of months with calendar months (UTC), instead of 30 days";
}

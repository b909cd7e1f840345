//! Location of the rules, and the defaults that they start from.
//!
//! Decides: the directory of rules (`RUNTIME_ROOT`, `--config`), its poll interval.
//! Decides: health without rules (`FORCE_START_WITHOUT_INITIAL_CONFIG`, `HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED`).
//! Decides: `TOLLKEEPER_LOG_MAX`.

use std::path::PathBuf;
use std::time::Duration;

use super::redis::TOLLKEEPER_MAX_REPLICAS;
use super::setting::settings;
use super::value::choices;
use super::values::Values;
use crate::base::named_enum::named_enum;
use crate::limit::StoreFailurePolicy;

settings! { "Rules and their files";
    CONFIG_TYPE: RuleSourceKind = "FILE", "source of the rules: files, or a control plane over xDS"
        .often_set();
    RUNTIME_ROOT: PathBuf = "/srv/runtime_data/current", "directory above the rule files; empty: no rules"
        .only_read("with CONFIG_TYPE=FILE") .often_set();
    RUNTIME_SUBDIRECTORY: PathBuf = "", "directory below RUNTIME_ROOT; empty: no rules, unless RUNTIME_WATCH_ROOT=false"
        .only_read("with CONFIG_TYPE=FILE") .often_set();
    RUNTIME_APPDIRECTORY: PathBuf = "config", "directory below RUNTIME_SUBDIRECTORY that holds the rule files"
        .only_read("with CONFIG_TYPE=FILE") .often_set();
    RUNTIME_IGNOREDOTFILES: bool = "false", "skip files and directories that begin with a dot"
        .only_read("with CONFIG_TYPE=FILE");
    RUNTIME_WATCH_ROOT: bool = "true",
        "watch RUNTIME_ROOT for a swapped symbolic link, not the directory of the rule files"
        .differs("files edited in place are noticed with either value") .only_read("with CONFIG_TYPE=FILE");
    TOLLKEEPER_RULE_DEFAULTS: Option<PathBuf> = "",
        "file of defaults for rules, by domain and unit; reloaded like rules";
    MERGE_DOMAIN_CONFIG: bool = "false", "merge files with the same domain; false: an error"
        .differs_by_value("files are merged in the order of their names");
    FORCE_START_WITHOUT_INITIAL_CONFIG: bool = "false", "report healthy before the first rules over xDS"
        .only_read("with CONFIG_TYPE=GRPC_XDS_SOTW");
    HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED: bool = "false", "report unhealthy until at least one domain is loaded";
    TOLLKEEPER_POLL_INTERVAL: Duration = "1s",
        "interval of looking for changed rule files, besides file events; 0: never"
        .within("0 or 100ms to 24h") .only_read("with CONFIG_TYPE=FILE or TOLLKEEPER_RULE_DEFAULTS");
    TOLLKEEPER_RELOAD_DEBOUNCE: Duration = "100ms",
        "time without a change before rule files are read" .within("1ms to 10s")
        .only_read("with CONFIG_TYPE=FILE or TOLLKEEPER_RULE_DEFAULTS");
    TOLLKEEPER_LOG_MAX: u32 = "10000",
        "maximum requests_per_unit of a sliding_window_log, which stores each hit" .within("1 to 1000000");
    USE_CALENDAR_MONTH_RATE_LIMIT: bool = "false",
        "align fixed windows of months with calendar months (UTC); false: 30 days";
}

named_enum! {
    /// Source of the rules.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RuleSourceKind {
        /// Files.
        Files = "FILE",
        /// A control plane, over xDS.
        Xds = "GRPC_XDS_SOTW",
    }
}

choices! { RuleSourceKind: CASE_SENSITIVE }

/// Location of the rules, and the defaults that they start from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSettings {
    /// Directory above the rule files; empty means that there are none.
    pub root: PathBuf,
    /// Directory below `root`, or empty.
    pub subdirectory: PathBuf,
    /// Directory below `subdirectory` that holds the rule files.
    pub app_directory: PathBuf,
    /// `true` if names that begin with a dot are skipped.
    pub ignore_dot_files: bool,
    /// `true` if `root` is watched for a swapped symbolic link.
    pub watch_root: bool,
    /// File of defaults for the rules.
    pub defaults: Option<PathBuf>,
    /// `true` if files with the same domain are merged.
    pub merge_domains: bool,
    /// `true` if health needs a loaded domain.
    pub healthy_with_at_least_one_config: bool,
    /// `true` if health needs loaded rules, even without a domain.
    pub healthy_with_rules_only: bool,
    /// Interval of comparing file contents; `None` means never.
    pub poll_interval: Option<Duration>,
    /// Time without a further change after which changed files are read.
    pub reload_debounce: Duration,
    /// Failure policy of rules that have none.
    pub on_store_error: StoreFailurePolicy,
    /// Maximum number of replicas that share an eventual limit, for lints about rules: 1 to 1000.
    pub max_replicas: u32,
}

impl RuleSettings {
    /// Reads the settings; `on_store_error` is the failure policy of rules that have none.
    pub(super) fn from_values(values: &mut Values, on_store_error: StoreFailurePolicy) -> Self {
        let are_files = values.get(&CONFIG_TYPE) == RuleSourceKind::Files;
        let defaults = values.get(&TOLLKEEPER_RULE_DEFAULTS);
        // Defaults are watched like rule files, wherever the rules come from.
        let is_watched = are_files || defaults.is_some();
        let watch_root = values.get_if(are_files, &RUNTIME_WATCH_ROOT);
        if watch_root && values.is_set(&RUNTIME_WATCH_ROOT) {
            let how = "files edited in place are noticed with either value";
            values.mark_difference_from_envoy_ratelimit(&RUNTIME_WATCH_ROOT, how);
        }
        let poll_interval = values.get_if(is_watched, &TOLLKEEPER_POLL_INTERVAL);
        Self {
            root: values.get_if(are_files, &RUNTIME_ROOT),
            subdirectory: values.get_if(are_files, &RUNTIME_SUBDIRECTORY),
            app_directory: values.get_if(are_files, &RUNTIME_APPDIRECTORY),
            ignore_dot_files: values.get_if(are_files, &RUNTIME_IGNOREDOTFILES),
            watch_root,
            defaults,
            merge_domains: values.get(&MERGE_DOMAIN_CONFIG),
            healthy_with_at_least_one_config: values.get(&HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED),
            healthy_with_rules_only: !are_files && !values.get(&FORCE_START_WITHOUT_INITIAL_CONFIG),
            poll_interval: Some(poll_interval).filter(|interval| !interval.is_zero()),
            reload_debounce: values.get_if(is_watched, &TOLLKEEPER_RELOAD_DEBOUNCE),
            on_store_error,
            max_replicas: values.get(&TOLLKEEPER_MAX_REPLICAS).get(),
        }
    }
}

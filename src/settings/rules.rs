//! Location of the rules, and the defaults that they start from.

use std::path::PathBuf;
use std::time::Duration;

use super::choices::RuleSourceKind;
use super::table::redis::TOLLKEEPER_MAX_REPLICAS;
use super::table::responses::TOLLKEEPER_ON_STORE_ERROR;
use super::table::rules::*;
use super::values::Values;
use crate::limit::StorePolicy;

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
    pub on_store_error: StorePolicy,
    /// Maximum number of replicas that share an eventual limit, for lints about rules: 1 to 1000.
    pub max_replicas: u32,
}

impl RuleSettings {
    pub(super) fn read(values: &Values) -> Self {
        Self {
            root: values.get(&RUNTIME_ROOT),
            subdirectory: values.get(&RUNTIME_SUBDIRECTORY),
            app_directory: values.get(&RUNTIME_APPDIRECTORY),
            ignore_dot_files: values.get(&RUNTIME_IGNOREDOTFILES),
            watch_root: values.get(&RUNTIME_WATCH_ROOT),
            defaults: values.get(&TOLLKEEPER_RULE_DEFAULTS),
            merge_domains: values.get(&MERGE_DOMAIN_CONFIG),
            healthy_with_at_least_one_config: values.get(&HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED),
            healthy_with_rules_only: values.get(&CONFIG_TYPE) == RuleSourceKind::Xds
                && !values.get(&FORCE_START_WITHOUT_INITIAL_CONFIG),
            poll_interval: values.nonzero(&TOLLKEEPER_POLL_INTERVAL),
            reload_debounce: values.get(&TOLLKEEPER_RELOAD_DEBOUNCE),
            on_store_error: values.get(&TOLLKEEPER_ON_STORE_ERROR),
            max_replicas: values.get(&TOLLKEEPER_MAX_REPLICAS).get(),
        }
    }
}

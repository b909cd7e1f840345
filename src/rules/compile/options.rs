//! The settings of a process that change the meaning of rule files.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::Arc;

use super::value_set_files::{SetCache, SetFiles};
use crate::limit::{DEFAULT_MAX_SLIDING_LOG_HITS, StoreFailurePolicy};
use crate::rules::load_progress::LoadProgress;
use crate::rules::rule_defaults::RuleDefaults;
use crate::settings::Settings;
use crate::settings::store::StoreSettings;

/// Settings that change the meaning of rule files.
#[derive(Clone, Debug)]
pub struct CompileOptions {
    /// Files may add to each other's domains (`MERGE_DOMAIN_CONFIG`).
    pub merge_domains: bool,
    /// Fixed windows of months follow the calendar (`USE_CALENDAR_MONTH_RATE_LIMIT`).
    pub calendar_months: bool,
    /// Maximum `requests_per_unit` of a sliding_window_log.
    pub log_max: u32,
    /// Policy of limits without `on_store_error` in their rule or domain.
    pub on_store_error: StoreFailurePolicy,
    /// Counters are in memcache, which only counts fixed windows (`BACKEND_TYPE=memcache`).
    pub memcache: bool,
    /// Maximum number of replicas that share an eventual limit (`TOLLKEEPER_MAX_REPLICAS`), at least 1; for lints only.
    pub max_replicas: u32,
    /// Number of regions that share a global limit (`TOLLKEEPER_REGIONS`); `None` if there is only one region.
    pub regions: Option<NonZeroU16>,
    /// Shortest timeout of the callers of each domain that is known, in microseconds; for lints only.
    pub caller_timeouts_us: Arc<BTreeMap<String, u64>>,
    /// Defaults of `TOLLKEEPER_RULE_DEFAULTS`; none until its file is read.
    pub rule_defaults: Arc<RuleDefaults>,
    /// Files with sets that rules name; none until they are read.
    pub set_files: Arc<SetFiles>,
    /// Sets of these files that were compiled before.
    pub set_cache: Arc<SetCache>,
    /// Progress of the load.
    pub progress: Arc<LoadProgress>,
}

impl Default for CompileOptions {
    fn default() -> Self {
        Self {
            merge_domains: false,
            calendar_months: false,
            log_max: DEFAULT_MAX_SLIDING_LOG_HITS,
            on_store_error: StoreFailurePolicy::default(),
            memcache: false,
            max_replicas: 16,
            regions: None,
            caller_timeouts_us: Arc::default(),
            rule_defaults: Arc::default(),
            set_files: Arc::default(),
            set_cache: Arc::default(),
            progress: Arc::default(),
        }
    }
}

impl From<&Settings> for CompileOptions {
    fn from(settings: &Settings) -> Self {
        Self {
            merge_domains: settings.rules.merge_domains,
            calendar_months: settings.decisions.calendar_months,
            log_max: settings.decisions.log_max,
            on_store_error: settings.rules.on_store_error,
            memcache: matches!(settings.store, StoreSettings::Memcache(_)),
            max_replicas: settings.rules.max_replicas,
            regions: settings.store.number_of_regions(),
            caller_timeouts_us: Arc::default(),
            rule_defaults: Arc::default(),
            set_files: Arc::default(),
            set_cache: Arc::default(),
            progress: Arc::default(),
        }
    }
}

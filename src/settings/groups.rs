//! All environment variables that this program knows: those of envoyproxy/ratelimit, and its own (`TOLLKEEPER_...`).
//!
//! Each group is one file, which declares its settings and reads them. Only that file knows their defaults. The groups
//! and their settings are in the order of the documentation.

use super::setting::{AnySetting, SettingGroup};
use super::{
    client_limits, cloud_identity, counters, decision_log, decisions, fleet, grpc, listeners, logs, memcache, metrics,
    otlp_metrics, process, redis, rules, tls, tracing, xds,
};

/// All groups of settings.
pub static SETTING_GROUPS: [&SettingGroup; 19] = [
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

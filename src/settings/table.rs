//! All environment variables that this program knows: those of envoyproxy/ratelimit, and its own (`TOLLKEEPER_...`).
//!
//! Each variable is one typed constant in the file of its group, with name, default, allowed values, support and help.
//! This is the only place that knows a default. The groups and their settings are in the order of the documentation.

pub mod listeners;
pub mod grpc;
pub mod client_limits;
pub mod tls;
pub mod rules;
pub mod responses;
pub mod counters;
pub mod process;
pub mod logs;
pub mod decision_log;
pub mod metrics;
pub mod fleet;
pub mod tracing;
pub mod xds;
pub mod redis;
pub mod regions;
pub mod memcache;

use super::setting::{AnySetting, SettingGroup};

/// All groups of settings.
pub static GROUPS: [&SettingGroup; 17] = [
    &listeners::GROUP,
    &grpc::GROUP,
    &client_limits::GROUP,
    &tls::GROUP,
    &rules::GROUP,
    &responses::GROUP,
    &counters::GROUP,
    &process::GROUP,
    &logs::GROUP,
    &decision_log::GROUP,
    &metrics::GROUP,
    &fleet::GROUP,
    &tracing::GROUP,
    &xds::GROUP,
    &redis::GROUP,
    &regions::GROUP,
    &memcache::GROUP,
];

/// Iterates over all settings, group by group.
pub fn all() -> impl Iterator<Item = &'static dyn AnySetting> {
    GROUPS.iter().flat_map(|group| group.settings.iter().copied())
}

/// Finds the setting called `name`, or the family that `name` belongs to; an exact name takes precedence.
pub fn find(name: &str) -> Option<&'static dyn AnySetting> {
    all().find(|setting| setting.name() == name).or_else(|| all().find(|setting| setting.info().covers(name)))
}

/// Returns the position of the setting for the variable `name`, for sorting.
pub(crate) fn position(name: &str) -> Option<usize> {
    let found = find(name)?;
    all().position(|setting| setting.name() == found.name())
}

//! Reading of the regions and of the Redis that all of them reach.

use std::collections::HashSet;
use std::ops::RangeInclusive;

use super::deployment::GLOBAL;
use crate::settings::choices::KeyFormat;
use crate::settings::redis::{DeploymentSettings, RegionSettings, region_number};
use crate::settings::setting::AnySetting;
use crate::settings::table::redis::TOLLKEEPER_KEY_FORMAT;
use crate::settings::table::regions::*;
use crate::settings::value::text::TextList;
use crate::settings::values::Values;

/// Minimum and maximum number of regions.
const REGION_COUNT: RangeInclusive<usize> = 2..=64;
/// Maximum length of a region's name in bytes.
const MAX_NAME_BYTES: usize = 63;

/// Reads the regions beside counters in `main`; `None` if there is only one.
pub(super) fn regions(values: &mut Values, main: &DeploymentSettings) -> Option<RegionSettings> {
    if !is_requested(values) {
        for setting in companions() {
            values.ignore_if_changed(setting, "it is only read with TOLLKEEPER_REGION");
        }
        return None;
    }
    if values.get(&TOLLKEEPER_KEY_FORMAT) == KeyFormat::Ratelimit {
        let fix = "unset it, or unset TOLLKEEPER_REGION";
        values.problem(&TOLLKEEPER_KEY_FORMAT, "has no limits over several regions", fix);
    }
    let own = values.get(&TOLLKEEPER_REGION);
    let names = names(values, &own);
    if values.get(&TOLLKEEPER_GLOBAL_REDIS_URL).reveal().is_empty() {
        let what = format!("not set with {}", requesting(values));
        values.problem(&TOLLKEEPER_GLOBAL_REDIS_URL, what, "give the address of the Redis that all regions reach");
        return None;
    }
    let global = GLOBAL.read(values);
    if (&global.topology, global.database) == (&main.topology, main.database) {
        let what = "names the database of REDIS_URL: each region needs a Redis of its own beside the global one";
        values.notice(&TOLLKEEPER_GLOBAL_REDIS_URL, what);
    }
    let wait_replicas = values.get(&TOLLKEEPER_GLOBAL_REDIS_WAIT_REPLICAS);
    let index = names.iter().position(|name| *name == own)?;
    Some(RegionSettings { index, names, global, wait_replicas })
}

/// Adds a problem if regions are set without Redis.
pub(crate) fn require_redis(values: &mut Values, why: &'static str) {
    if is_requested(values) {
        let fix = "give REDIS_URL, or unset TOLLKEEPER_REGION, TOLLKEEPER_REGIONS and TOLLKEEPER_GLOBAL_REDIS_URL";
        values.problem_with(requesting(values), format!("regions share limits through Redis, and {why}"), fix);
    } else {
        for setting in companions() {
            values.ignore_if_changed(setting, "it is only read with TOLLKEEPER_REGION");
        }
    }
}

/// Returns true if a setting asks for several regions.
fn is_requested(values: &Values) -> bool {
    !values.get(&TOLLKEEPER_REGION).is_empty()
        || !values.get(&TOLLKEEPER_REGIONS).0.is_empty()
        || !values.get(&TOLLKEEPER_GLOBAL_REDIS_URL).reveal().is_empty()
}

/// Returns the name of the first setting that asks for several regions.
fn requesting(values: &Values) -> &'static str {
    if !values.get(&TOLLKEEPER_REGION).is_empty() {
        TOLLKEEPER_REGION.name()
    } else if !values.get(&TOLLKEEPER_REGIONS).0.is_empty() {
        TOLLKEEPER_REGIONS.name()
    } else {
        TOLLKEEPER_GLOBAL_REDIS_URL.name()
    }
}

/// Returns the settings that have an effect only beside the name of the region.
fn companions() -> impl Iterator<Item = &'static dyn AnySetting> {
    GROUP.settings.iter().copied()
}

/// Reads the names, in their order.
fn names(values: &mut Values, own: &str) -> Vec<String> {
    let TextList(names) = values.get(&TOLLKEEPER_REGIONS);
    let mut names: Vec<String> = names.iter().map(|name| name.trim().to_owned()).collect();
    names.sort_unstable();
    let valid = "give names of letters, digits, `-`, `_` and `.`, at most 63 bytes each";
    if own.is_empty() {
        let what = format!("not set with {}", requesting(values));
        values.problem(&TOLLKEEPER_REGION, what, "give the name of this region");
    } else if !is_plain(own) {
        values.problem(&TOLLKEEPER_REGION, "not a plain name", valid);
    }
    if names.is_empty() {
        let what = format!("not set with {}", requesting(values));
        values.problem(&TOLLKEEPER_REGIONS, what, "give the names of all regions, alike in all regions");
    } else if !names.iter().all(|name| is_plain(name)) {
        values.problem(&TOLLKEEPER_REGIONS, "not a list of plain names", valid);
    } else if names.windows(2).any(|pair| pair[0] == pair[1]) {
        values.problem(&TOLLKEEPER_REGIONS, "names a region twice", "give each once");
    } else if names.iter().map(|name| region_number(name)).collect::<HashSet<_>>().len() < names.len() {
        values.problem(&TOLLKEEPER_REGIONS, "two names have one hash", "rename one of the regions");
    } else if !REGION_COUNT.contains(&names.len()) {
        let fix = format!("give {} to {} names", REGION_COUNT.start(), REGION_COUNT.end());
        values.problem(&TOLLKEEPER_REGIONS, format!("names {} regions", names.len()), fix);
    } else if is_plain(own) && !names.iter().any(|name| name == own) {
        let fix = "add it there, in all regions";
        values.problem(&TOLLKEEPER_REGION, "not in TOLLKEEPER_REGIONS", fix);
    }
    names
}

/// Returns true for names that need no quotes in keys, logs and labels.
fn is_plain(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(is_plain)
}

//! One limit over several regions: the regions, and the Redis that all of them reach.
//!
//! Decides: which names regions may have; what `TOLLKEEPER_REGIONS` needs.

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use siphasher::sip::SipHasher13;

use super::addresses::DeploymentKind;
use super::deployment::{DeploymentSettings, DeploymentVariables};
use crate::settings::cloud_identity::TokenCloud;
use crate::settings::setting::{AnySetting, settings};
use crate::settings::tls::StoreTlsVariables;
use crate::settings::value::text::{SecretUrl, TextList};
use crate::settings::values::Values;

settings! { "Regions", only read "with TOLLKEEPER_REGION";
    TOLLKEEPER_REGION: String = "", "name of this region, for limits with `scope: global`";
    TOLLKEEPER_REGIONS: TextList = "",
        "names of all regions, 2 to 64; equal in all regions";
    TOLLKEEPER_GLOBAL_REDIS_URL: SecretUrl = "",
        "Redis that all regions reach, like REDIS_URL";
    TOLLKEEPER_GLOBAL_REDIS_TYPE: DeploymentKind = "SINGLE", "kind of deployment";
    TOLLKEEPER_GLOBAL_REDIS_AUTH_FILE: Option<PathBuf> = "", "file that holds password or user:password";
    TOLLKEEPER_GLOBAL_REDIS_AWS_IAM_AUTH: bool = "false", "REDIS_AWS_IAM_AUTH for it";
    TOLLKEEPER_GLOBAL_REDIS_AWS_IAM_CACHE_NAME: String = "", "name of the cache or cluster";
    TOLLKEEPER_GLOBAL_REDIS_AWS_IAM_USER_ID: String = "", "id of the user";
    TOLLKEEPER_GLOBAL_REDIS_AWS_IAM_REGION: String = "", "region of the cache; empty: AWS_REGION";
    TOLLKEEPER_GLOBAL_REDIS_AWS_IAM_SERVERLESS: bool = "false", "the cache is serverless";
    TOLLKEEPER_GLOBAL_REDIS_IDENTITY: TokenCloud = "none", "TOLLKEEPER_REDIS_IDENTITY for it";
    TOLLKEEPER_GLOBAL_REDIS_SENTINEL_AUTH_FILE: Option<PathBuf> = "",
        "file that holds password or user:password for its sentinels"
        .only_read("with TOLLKEEPER_REGION and TOLLKEEPER_GLOBAL_REDIS_TYPE=sentinel");
    TOLLKEEPER_GLOBAL_REDIS_WAIT_REPLICAS: u32 = "0",
        "replicas of the global Redis that must know a grant before its use (WAIT)"
        .within("0 to 1");
}

/// Regions that share limits, and the Redis that all of them reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionSettings {
    /// Index of this region in `names`.
    pub index: usize,
    /// Names of all regions in their order, 2 to 64, without duplicates.
    pub names: Vec<String>,
    /// Deployment that all regions reach.
    pub global: DeploymentSettings,
    /// Number of its replicas that must have a grant before it is used, 0 or 1.
    pub wait_replicas: u32,
}

impl RegionSettings {
    /// Reads the regions beside counters in `main`; `None` if there is only one. `variables` are those of the Redis that
    /// all regions reach.
    pub(super) fn from_values(
        values: &mut Values,
        main: &DeploymentSettings,
        variables: &DeploymentVariables,
        certificates: &StoreTlsVariables,
    ) -> Option<Self> {
        if !are_regions_configured(values) {
            return None;
        }
        let own = values.get(&TOLLKEEPER_REGION);
        let names = read_region_names(values, &own);
        if values.get(&TOLLKEEPER_GLOBAL_REDIS_URL).reveal().is_empty() {
            let what = format!("not set with {}", first_set_region_setting(values));
            values.add_problem(
                &TOLLKEEPER_GLOBAL_REDIS_URL,
                what,
                "give the address of the Redis that all regions reach",
            );
            return None;
        }
        let global = variables.read_deployment(values, certificates);
        if (&global.topology, global.database) == (&main.topology, main.database) {
            let what = "names the database of REDIS_URL: each region needs a Redis of its own beside the global one";
            values.add_notice(&TOLLKEEPER_GLOBAL_REDIS_URL, what);
        }
        let wait_replicas = values.get(&TOLLKEEPER_GLOBAL_REDIS_WAIT_REPLICAS);
        let index = names.iter().position(|name| *name == own)?;
        Some(Self { index, names, global, wait_replicas })
    }

    /// Returns the name of this region.
    pub fn own_region_name(&self) -> &str {
        &self.names[self.index]
    }

    /// Returns the number of this region.
    pub fn own_region_number(&self) -> u32 {
        region_number_from_name(self.own_region_name())
    }
}

/// Returns the number of a region in the global Redis: a hash of its name, so that other regions do not change it.
pub fn region_number_from_name(name: &str) -> u32 {
    let [_, _, _, _, number @ ..] = SipHasher13::new().hash(name.as_bytes()).to_be_bytes();
    u32::from_be_bytes(number)
}

/// Minimum and maximum number of regions.
const REGION_COUNT_RANGE: RangeInclusive<usize> = 2..=64;
/// Maximum length of a region's name in bytes.
const MAX_REGION_NAME_BYTES: usize = 63;

/// Adds a problem if regions are configured, for counters that are not in Redis; `why` says where they are.
pub(crate) fn refuse_regions_without_redis(values: &mut Values, why: &'static str) {
    if are_regions_configured(values) {
        let fix = "give REDIS_URL, or unset TOLLKEEPER_REGION, TOLLKEEPER_REGIONS and TOLLKEEPER_GLOBAL_REDIS_URL";
        values.add_problem_with_name(
            first_set_region_setting(values),
            format!("regions share limits through Redis, and {why}"),
            fix,
        );
    }
}

/// Returns `true` if a setting asks for several regions.
pub(super) fn are_regions_configured(values: &Values) -> bool {
    let asking: [&dyn AnySetting; 3] = [&TOLLKEEPER_REGION, &TOLLKEEPER_REGIONS, &TOLLKEEPER_GLOBAL_REDIS_URL];
    asking.into_iter().any(|setting| values.differs_from_default(setting))
}

/// Returns the name of the first setting that asks for several regions.
fn first_set_region_setting(values: &Values) -> &'static str {
    if !values.get(&TOLLKEEPER_REGION).is_empty() {
        TOLLKEEPER_REGION.name()
    } else if !values.get(&TOLLKEEPER_REGIONS).0.is_empty() {
        TOLLKEEPER_REGIONS.name()
    } else {
        TOLLKEEPER_GLOBAL_REDIS_URL.name()
    }
}

/// Reads the names of all regions and sorts them; the region's own must be among them.
fn read_region_names(values: &mut Values, own: &str) -> Vec<String> {
    let TextList(names) = values.get(&TOLLKEEPER_REGIONS);
    let mut names: Vec<String> = names.iter().map(|name| name.trim().to_owned()).collect();
    names.sort_unstable();
    let valid = "give names of letters, digits, `-`, `_` and `.`, at most 63 bytes each";
    if own.is_empty() {
        let what = format!("not set with {}", first_set_region_setting(values));
        values.add_problem(&TOLLKEEPER_REGION, what, "give the name of this region");
    } else if !is_plain_region_name(own) {
        values.add_problem(&TOLLKEEPER_REGION, "not a plain name", valid);
    }
    if names.is_empty() {
        let what = format!("not set with {}", first_set_region_setting(values));
        values.add_problem(&TOLLKEEPER_REGIONS, what, "give the names of all regions, alike in all regions");
    } else if !names.iter().all(|name| is_plain_region_name(name)) {
        values.add_problem(&TOLLKEEPER_REGIONS, "not a list of plain names", valid);
    } else if names.windows(2).any(|pair| pair[0] == pair[1]) {
        values.add_problem(&TOLLKEEPER_REGIONS, "names a region twice", "give each once");
    } else if names.iter().map(|name| region_number_from_name(name)).collect::<HashSet<_>>().len() < names.len() {
        values.add_problem(&TOLLKEEPER_REGIONS, "two names have one hash", "rename one of the regions");
    } else if !REGION_COUNT_RANGE.contains(&names.len()) {
        let fix = format!("give {} to {} names", REGION_COUNT_RANGE.start(), REGION_COUNT_RANGE.end());
        values.add_problem(&TOLLKEEPER_REGIONS, format!("names {} regions", names.len()), fix);
    } else if is_plain_region_name(own) && !names.iter().any(|name| name == own) {
        let fix = "add it there, in all regions";
        values.add_problem(&TOLLKEEPER_REGION, "not in TOLLKEEPER_REGIONS", fix);
    }
    names
}

/// Returns true for names that need no quotes in keys, logs and labels.
fn is_plain_region_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=MAX_REGION_NAME_BYTES).contains(&name.len()) && name.bytes().all(is_plain)
}

//! Settings of the view of all replicas.

use super::choices::{LoggedValues, TopValues};
use super::decision_log::{DecisionLogSettings, HashKey};
use super::redis::DeploymentSettings;
use super::store::StoreSettings;
use super::table::decision_log::{TOLLKEEPER_DECISION_LOG_HASH_KEY, TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE};
use super::table::fleet::*;
use super::values::Values;

/// View of all replicas, and the form of rejected keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetSettings {
    /// Redis through which replicas exchange statistics; the error is the reason why they do not.
    pub redis: Result<FleetRedis, &'static str>,
    /// Form of the values in rejected keys.
    pub top_values: TopValues,
    /// False if the values must not leave the process.
    pub publishes_keys: bool,
    /// Secret of all replicas, for hashes and to authenticate statistics.
    pub secret: Option<HashKey>,
}

/// Redis through which replicas exchange statistics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetRedis {
    /// Deployment of the counters.
    pub deployment: DeploymentSettings,
    /// Prefix of all keys, at most 256 bytes.
    pub key_prefix: String,
}

impl FleetSettings {
    pub(super) fn read(
        values: &mut Values,
        store: &StoreSettings,
        log: Option<&DecisionLogSettings>,
        secret: Option<HashKey>,
    ) -> Self {
        let redis = match store {
            _ if !values.get(&TOLLKEEPER_FLEET) => Err("TOLLKEEPER_FLEET=false"),
            StoreSettings::Redis(redis) => {
                Ok(FleetRedis { deployment: redis.main.clone(), key_prefix: redis.key_prefix.clone() })
            }
            StoreSettings::Memory | StoreSettings::Memcache(_) => {
                Err("counters are not in Redis, through which replicas tell of each other")
            }
        };
        let logged = log.map_or(LoggedValues::Plain, |log| log.values);
        let top_values = match logged {
            LoggedValues::Hashed => TopValues::Hashed,
            LoggedValues::Plain | LoggedValues::None => values.get(&TOLLKEEPER_TOP_VALUES),
        };
        if top_values == TopValues::Hashed && logged != LoggedValues::Hashed && secret.is_none() {
            let fix = "give TOLLKEEPER_DECISION_LOG_HASH_KEY or TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE";
            values.problem(&TOLLKEEPER_TOP_VALUES, "there is no key to hash with", fix);
        }
        if top_values == TopValues::Plain && redis.is_err() {
            const WHY: &str = "no values are hashed, and no statistics are exchanged";
            values.ignore_if_changed(&TOLLKEEPER_DECISION_LOG_HASH_KEY, WHY);
            values.ignore_if_changed(&TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE, WHY);
        }
        let publishes_keys = logged != LoggedValues::None || top_values == TopValues::Hashed;
        Self { redis, top_values, publishes_keys, secret }
    }
}

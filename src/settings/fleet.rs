//! View of all replicas, and the form of rejected keys in it.
//!
//! Decides: why a replica is in no fleet; plain or hashed values in reports (`TOLLKEEPER_TOP_VALUES`).

use super::credentials::SecretSource;
use super::decision_log::{HASH_KEY_VARIABLES, LoggedValueForm, TOLLKEEPER_DECISION_LOG_VALUES};
use super::redis::deployment::DeploymentSettings;
use super::setting::{AnySetting, settings};
use super::store::StoreSettings;
use super::value::choices;
use super::values::Values;
use crate::base::named_enum::named_enum;

settings! { "Fleet";
    TOLLKEEPER_FLEET: bool = "true",
        "publish statistics of this replica in Redis, for /fleet";
    TOLLKEEPER_TOP_VALUES: TopKeyValueForm = "plain",
        "values of descriptors in /top, /fleet and /counters, if more private than TOLLKEEPER_DECISION_LOG_VALUES";
}

named_enum! {
    /// Form of the values of descriptors in rejected keys; the later, the more private.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum TopKeyValueForm {
        /// As sent.
        Plain = "plain",
        /// Keyed hash.
        Hashed = "hashed",
        /// Left out.
        None = "none",
    }
}

choices! { TopKeyValueForm }

/// View of all replicas, and the form of rejected keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetSettings {
    /// Redis through which replicas exchange statistics; the error is the reason why they do not.
    pub redis: Result<FleetRedis, &'static str>,
    /// Form of the values in rejected keys; without values, keys do not leave the process.
    pub top_values: TopKeyValueForm,
    /// Secret of all replicas, for hashes and to authenticate statistics.
    pub secret: Option<SecretSource>,
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
    pub(super) fn from_values(values: &mut Values, store: &StoreSettings) -> Self {
        let redis = match store {
            _ if !values.get(&TOLLKEEPER_FLEET) => Err("TOLLKEEPER_FLEET=false"),
            StoreSettings::Redis(redis) => {
                Ok(FleetRedis { deployment: redis.main.clone(), key_prefix: redis.key_prefix.clone() })
            }
            StoreSettings::Memory | StoreSettings::Memcache(_) => {
                Err("counters are not in Redis, through which replicas tell of each other")
            }
        };
        // What must not be in the log must not be on a page either, whether there is a log or not.
        let logged_values = values.get(&TOLLKEEPER_DECISION_LOG_VALUES);
        let at_least = match logged_values {
            LoggedValueForm::Plain => TopKeyValueForm::Plain,
            LoggedValueForm::Hashed => TopKeyValueForm::Hashed,
            LoggedValueForm::None => TopKeyValueForm::None,
        };
        let top_values = values.get(&TOLLKEEPER_TOP_VALUES).max(at_least);
        let is_log_hashed = logged_values == LoggedValueForm::Hashed;
        let are_values_hashed = is_log_hashed || top_values == TopKeyValueForm::Hashed;
        let secret = if are_values_hashed || redis.is_ok() { HASH_KEY_VARIABLES.read_source(values) } else { None };
        if are_values_hashed && secret.is_none() {
            let asking: &dyn AnySetting =
                if is_log_hashed { &TOLLKEEPER_DECISION_LOG_VALUES } else { &TOLLKEEPER_TOP_VALUES };
            let fix = "give TOLLKEEPER_DECISION_LOG_HASH_KEY or TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE";
            values.add_problem(asking, "there is no key to hash with", fix);
        }
        Self { redis, top_values, secret }
    }
}

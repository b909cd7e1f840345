//! The view of all replicas.

use crate::settings::choices::TopValues;
use crate::settings::setting::settings;

settings! { "Fleet";
    TOLLKEEPER_FLEET: bool = true,
        "with Redis, publish statistics of this replica there, so that /fleet of any replica shows all of them";
    TOLLKEEPER_TOP_VALUES: TopValues = TopValues::Plain,
        "values of descriptors in /top and /fleet: as sent, or hashed by TOLLKEEPER_DECISION_LOG_HASH_KEY";
}

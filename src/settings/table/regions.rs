//! One limit over several regions: the regions, and the Redis that all of them reach.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use crate::settings::choices::DeploymentKind;
use crate::settings::secret::Secret;
use crate::settings::setting::settings;
use crate::settings::value::number::{DurationRange, IntRange};
use crate::settings::value::text::{SecretUrl, TextList};

settings! { "Regions";
    TOLLKEEPER_REGION: String = "", "name of this region, for limits with `scope: global`; empty: there is only one";
    TOLLKEEPER_REGIONS: TextList = "",
        "names of all regions, this one included, 2 to 64; must be equal in all regions, in any order";
    TOLLKEEPER_GLOBAL_REDIS_URL: SecretUrl = "",
        "Redis that all regions reach, in the form of REDIS_URL (rediss:// is TLS); no response waits for it";
    TOLLKEEPER_GLOBAL_REDIS_TYPE: DeploymentKind = DeploymentKind::Single, "kind of deployment";
    TOLLKEEPER_GLOBAL_REDIS_POOL_SIZE: NonZeroUsize = NonZeroUsize::MIN, "connections to each node, at most 128";
    TOLLKEEPER_GLOBAL_REDIS_AUTH: Option<Secret> = None, "password or user:password";
    TOLLKEEPER_GLOBAL_REDIS_AUTH_FILE: Option<PathBuf> = None, "file that holds it";
    TOLLKEEPER_GLOBAL_REDIS_TLS: bool = false, "connect over TLS, with the certificates of REDIS_TLS_";
    TOLLKEEPER_GLOBAL_REDIS_TIMEOUT: Duration = Duration::from_secs(10), "time limit of a connection attempt"
        .allowed(DurationRange::new(Duration::from_millis(1), Duration::from_secs(3600)));
    TOLLKEEPER_GLOBAL_REDIS_SENTINEL_AUTH: Option<Secret> = None, "password or user:password for its sentinels";
    TOLLKEEPER_GLOBAL_REDIS_SENTINEL_AUTH_FILE: Option<PathBuf> = None, "file that holds it";
    TOLLKEEPER_GLOBAL_REDIS_WAIT_REPLICAS: u32 = 0,
        "replicas of the global Redis that must have a grant before a region uses it (WAIT)"
        .allowed(IntRange::new(0, 1));
}

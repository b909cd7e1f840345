//! Counters in memcache, which this program does not support.

use std::path::PathBuf;
use std::time::Duration;

use crate::settings::condition::Condition;
use crate::settings::setting::{Support, settings};
use crate::settings::value::text::TextList;

const WITHOUT_MEMCACHE: Support =
    Support::NoEffect { when: Condition::NotEmpty, why: "it is only read with BACKEND_TYPE=memcache" };

settings! { "Counters in memcache";
    MEMCACHE_HOST_PORT: TextList = "", "servers: host:port,host:port" .support(WITHOUT_MEMCACHE);
    MEMCACHE_MAX_IDLE_CONNS: i64 = 2, "idle connections to each server" .support(WITHOUT_MEMCACHE);
    MEMCACHE_SRV: String = "", "DNS SRV record of the servers" .support(WITHOUT_MEMCACHE);
    MEMCACHE_SRV_REFRESH: Duration = Duration::ZERO, "interval of reading that record; 0 means once"
        .support(WITHOUT_MEMCACHE);
    MEMCACHE_TLS: bool = false, "connect over TLS" .support(WITHOUT_MEMCACHE);
    MEMCACHE_TLS_CLIENT_CERT: Option<PathBuf> = None, "client certificate for memcache, PEM file"
        .support(WITHOUT_MEMCACHE);
    MEMCACHE_TLS_CLIENT_KEY: Option<PathBuf> = None, "private key of the client certificate, PEM file"
        .support(WITHOUT_MEMCACHE);
    MEMCACHE_TLS_CACERT: Option<PathBuf> = None, "CA certificates for memcache, PEM file" .support(WITHOUT_MEMCACHE);
    MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION: bool = false, "accept a trusted certificate for another name"
        .support(WITHOUT_MEMCACHE);
}

//! Counters in memcache: servers and TLS.

use std::path::PathBuf;
use std::time::Duration;

use crate::settings::setting::settings;
use crate::settings::value::text::TextList;

settings! { "Counters in memcache";
    MEMCACHE_HOST_PORT: TextList = "",
        "servers, host:port or path; their order decides which of them holds a counter";
    MEMCACHE_MAX_IDLE_CONNS: i64 = 2, "idle connections to each server; 0 or less means 2, the maximum is 128";
    MEMCACHE_SRV: String = "", "DNS SRV record of the servers, `_service._proto.name`; instead of MEMCACHE_HOST_PORT";
    MEMCACHE_SRV_REFRESH: Duration = Duration::ZERO, "interval of reading that record; 0 means once";
    MEMCACHE_TLS: bool = false, "connect over TLS";
    MEMCACHE_TLS_CLIENT_CERT: Option<PathBuf> = None, "client certificate for memcache, PEM file";
    MEMCACHE_TLS_CLIENT_KEY: Option<PathBuf> = None, "private key of the client certificate, PEM file";
    MEMCACHE_TLS_CACERT: Option<PathBuf> = None, "CA certificates beside the system's, PEM file";
    MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION: bool = false, "accept a trusted certificate for another name";
}

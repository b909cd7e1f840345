//! Memcache settings of an environment: every accepted form, every contradiction, and the settings of other stores.

use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use tollkeeper::settings::address::Endpoint;
use tollkeeper::settings::counters::{KeyFormat, OverLimitCacheSettings};
use tollkeeper::settings::memcache::{MemcacheServers, MemcacheSettings};
use tollkeeper::settings::pem::{ClientCertificate, PemFile};
use tollkeeper::settings::store::StoreSettings;
use tollkeeper::settings::tls::StoreTls;

use super::{Vars, notices, problems, read, tcp};

const BACKEND: (&str, &str) = ("BACKEND_TYPE", "memcache");
const HOST: (&str, &str) = ("MEMCACHE_HOST_PORT", "h:1");

/// Memcache settings of an environment.
fn memcache(vars: Vars<'_>) -> MemcacheSettings {
    match read(vars).store {
        StoreSettings::Memcache(memcache) => memcache,
        store => panic!("{vars:?} is no memcache: {store:?}"),
    }
}

fn servers(list: &str) -> MemcacheServers {
    memcache(&[BACKEND, ("MEMCACHE_HOST_PORT", list)]).servers
}

#[test]
fn backend_type_selects_memcache_with_defaults() {
    let expected = MemcacheSettings {
        servers: MemcacheServers::List(vec![tcp("h", 1)]),
        max_idle: NonZeroUsize::new(2).unwrap(),
        tls: None,
        timeout: Duration::from_millis(15),
        replicas: None,
        key_prefix: String::new(),
        key_format: KeyFormat::Tollkeeper,
        expiration_jitter: Duration::from_secs(300),
        over_limit_cache: OverLimitCacheSettings { capacity_bytes: 4 << 20, caches_counting_windows: false },
    };
    assert_eq!(memcache(&[BACKEND, HOST]), expected);
    assert_eq!(notices(&[BACKEND, HOST]), [""; 0]);
    // Its servers alone do not select it, as in envoyproxy/ratelimit.
    assert_eq!(read(&[HOST]).store, StoreSettings::Memory);
    assert_eq!(notices(&[HOST]), ["MEMCACHE_HOST_PORT has no effect: it is only read with BACKEND_TYPE=memcache"]);
}

#[test]
fn servers_keep_their_order_and_their_repetitions() {
    let expected = [tcp("b", 2), tcp("a", 1), tcp("::1", 3), tcp("b", 2), Endpoint::Unix("/run/memcached".into())];
    assert_eq!(servers("b:2, a:1,[::1]:3,b:2,/run/memcached"), MemcacheServers::List(expected.into()));
    assert_eq!(servers("b:2,a:1").to_string(), "b:2,a:1");
    for list in ["h", "h:", "h:x", "h:0", ":1", "a:1,", ",a:1", "a:1 b:2", "::1:2", "redis://h:1"] {
        assert_eq!(
            problems(&[BACKEND, ("MEMCACHE_HOST_PORT", list)]),
            [format!("MEMCACHE_HOST_PORT={list}: not a list of servers; give host:port,host:port, IPv6 in brackets")]
        );
    }
}

#[test]
fn servers_come_from_a_list_or_from_one_srv_record() {
    let srv = ("MEMCACHE_SRV", "_memcache._tcp.mem.example.com");
    let record = |refresh| MemcacheServers::Srv { name: srv.1.into(), refresh };
    assert_eq!(memcache(&[BACKEND, srv]).servers, record(Duration::ZERO));
    let refreshed = memcache(&[BACKEND, srv, ("MEMCACHE_SRV_REFRESH", "1m30s")]).servers;
    assert_eq!((refreshed.to_string(), refreshed), (format!("srv {}", srv.1), record(Duration::from_secs(90))));
    for name in ["mem.example.com", "_memcache.mem.example.com", "_._tcp.a", "_a._tcp.", "_a._b", "_a._tcp.b c"] {
        assert_eq!(
            problems(&[BACKEND, ("MEMCACHE_SRV", name)]),
            [format!("MEMCACHE_SRV={name}: not the name of an SRV record; give _service._proto.name")]
        );
    }
    assert_eq!(problems(&[BACKEND, HOST, srv]), ["MEMCACHE_HOST_PORT=h:1: MEMCACHE_SRV is set too; unset one of them"]);
    for nothing in [&[BACKEND][..], &[BACKEND, ("MEMCACHE_HOST_PORT", ""), ("MEMCACHE_SRV", "")]] {
        assert_eq!(
            problems(nothing),
            ["BACKEND_TYPE=memcache: there are no servers; give MEMCACHE_HOST_PORT or MEMCACHE_SRV"]
        );
    }
}

#[test]
fn each_memcache_variable_reaches_its_setting() {
    let file = |setting, path: &str| PemFile { setting, path: path.into() };
    let expected = MemcacheSettings {
        servers: MemcacheServers::List(vec![tcp("h", 1)]),
        max_idle: NonZeroUsize::new(7).unwrap(),
        tls: Some(StoreTls {
            ca_setting: "MEMCACHE_TLS_CACERT",
            ca: Some(file("MEMCACHE_TLS_CACERT", "/ca")),
            client: Some(ClientCertificate {
                certificate: file("MEMCACHE_TLS_CLIENT_CERT", "/cert"),
                key: file("MEMCACHE_TLS_CLIENT_KEY", "/key"),
            }),
            skip_hostname: true,
        }),
        timeout: Duration::from_millis(20),
        replicas: NonZeroU32::new(3),
        key_prefix: "p:".into(),
        key_format: KeyFormat::Ratelimit,
        expiration_jitter: Duration::from_secs(5),
        over_limit_cache: OverLimitCacheSettings { capacity_bytes: 5 << 20, caches_counting_windows: true },
    };
    let vars = [
        BACKEND,
        HOST,
        ("MEMCACHE_MAX_IDLE_CONNS", "7"),
        ("MEMCACHE_TLS", "true"),
        ("MEMCACHE_TLS_CACERT", "/ca"),
        ("MEMCACHE_TLS_CLIENT_CERT", "/cert"),
        ("MEMCACHE_TLS_CLIENT_KEY", "/key"),
        ("MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION", "true"),
        ("TOLLKEEPER_STORE_TIMEOUT", "20ms"),
        ("TOLLKEEPER_REPLICAS", "3"),
        ("CACHE_KEY_PREFIX", "p:"),
        ("TOLLKEEPER_KEY_FORMAT", "ratelimit"),
        ("EXPIRATION_JITTER_MAX_SECONDS", "5"),
        ("LOCAL_CACHE_SIZE_IN_BYTES", "5242880"),
    ];
    assert_eq!(memcache(&vars), expected);
    assert_eq!(notices(&vars), [""; 0]);
}

#[test]
fn number_of_connections_is_bounded() {
    for (text, connections) in [("0", 2), ("-1", 2), ("1", 1), ("128", 128), ("5000", 128)] {
        assert_eq!(memcache(&[BACKEND, HOST, ("MEMCACHE_MAX_IDLE_CONNS", text)]).max_idle.get(), connections, "{text}");
    }
    assert_eq!(
        notices(&[BACKEND, HOST, ("MEMCACHE_MAX_IDLE_CONNS", "5000")]),
        ["MEMCACHE_MAX_IDLE_CONNS is more than the maximum of 128, which is used"]
    );
}

#[test]
fn contradiction_in_tls_of_memcache_is_an_error() {
    let tls = ("MEMCACHE_TLS", "true");
    assert_eq!(
        problems(&[BACKEND, HOST, tls, ("MEMCACHE_TLS_CLIENT_CERT", "/c")]),
        ["MEMCACHE_TLS_CLIENT_CERT=/c: set without MEMCACHE_TLS_CLIENT_KEY; give both or none"]
    );
    assert_eq!(
        problems(&[BACKEND, HOST, tls, ("MEMCACHE_TLS_CLIENT_KEY", "/k")]),
        ["MEMCACHE_TLS_CLIENT_KEY=/k: set without MEMCACHE_TLS_CLIENT_CERT; give both or none"]
    );
    assert_eq!(
        problems(&[BACKEND, ("MEMCACHE_HOST_PORT", "h:1,/socket"), tls]),
        ["MEMCACHE_TLS=true: a unix socket has no TLS; unset it, or give host:port as MEMCACHE_HOST_PORT"]
    );
}

#[test]
fn setting_that_memcache_does_not_read_gets_one_line() {
    let lines = |names: &[&str], why: &str| names.iter().map(|name| format!("{name} has no effect: {why}")).collect();
    let cases: &[(Vars<'_>, Vec<String>)] = &[
        // envoyproxy/ratelimit ignores Redis here, too.
        (
            &[
                BACKEND,
                HOST,
                ("REDIS_URL", "redis:6379"),
                ("REDIS_SOCKET_TYPE", "tcp"),
                ("REDIS_TYPE", "SINGLE"),
                ("REDIS_PERSECOND", "true"),
                ("REDIS_AUTH", "secret"),
                ("TOLLKEEPER_EVENTUAL_BYTES", "1MiB"),
                ("TOLLKEEPER_MAX_REPLICAS", "3"),
            ],
            lines(
                &["REDIS_SOCKET_TYPE", "REDIS_URL", "REDIS_AUTH", "TOLLKEEPER_EVENTUAL_BYTES", "REDIS_PERSECOND"],
                "it is only read with counters in Redis",
            ),
        ),
        (
            &[BACKEND, HOST, ("MEMCACHE_TLS_CACERT", "/ca"), ("MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION", "true")],
            lines(
                &["MEMCACHE_TLS_CACERT", "MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION"],
                "it is only read with BACKEND_TYPE=memcache and MEMCACHE_TLS=true",
            ),
        ),
        (
            &[BACKEND, HOST, ("MEMCACHE_SRV_REFRESH", "1s")],
            lines(&["MEMCACHE_SRV_REFRESH"], "it is only read with BACKEND_TYPE=memcache and MEMCACHE_SRV"),
        ),
        (
            &[("REDIS_URL", "h:1"), HOST, ("MEMCACHE_TLS", "true"), ("MEMCACHE_MAX_IDLE_CONNS", "2")],
            lines(&["MEMCACHE_HOST_PORT", "MEMCACHE_TLS"], "it is only read with BACKEND_TYPE=memcache"),
        ),
        (
            &[("BACKEND_TYPE", "redis"), ("REDIS_URL", "h:1"), HOST],
            lines(&["MEMCACHE_HOST_PORT"], "it is only read with BACKEND_TYPE=memcache"),
        ),
    ];
    for (vars, expected) in cases {
        assert_eq!(notices(vars), *expected, "{vars:?}");
    }
}

#[test]
fn settings_of_the_decision_logs_stream_are_not_reported_as_ignored() {
    let log = [("TOLLKEEPER_DECISION_LOG", "redis:decisions"), ("TOLLKEEPER_DECISION_LOG_REDIS_URL", "log:6379")];
    let stream = [BACKEND, HOST, ("REDIS_TIMEOUT", "3s"), ("REDIS_POOL_SIZE", "4")];
    let ignored = |name: &str| format!("{name} has no effect: it is only read with counters in Redis");
    assert_eq!(notices(&[&stream[..], &log].concat()), [ignored("REDIS_POOL_SIZE")]);
    assert_eq!(notices(&stream), [ignored("REDIS_POOL_SIZE"), ignored("REDIS_TIMEOUT")]);
}

//! Redis settings of an environment: every accepted form, every contradiction, and no secret in any output.

use std::num::{NonZeroU32, NonZeroUsize};
use std::process::Command;
use std::time::Duration;

use tollkeeper::settings::address::Endpoint;
use tollkeeper::settings::counters::{KeyFormat, OverLimitCacheSettings};
use tollkeeper::settings::credentials::Credentials;
use tollkeeper::settings::pem::{ClientCertificate, PemFile};
use tollkeeper::settings::redis::deployment::{DeploymentSettings, TopologySettings};
use tollkeeper::settings::redis::{RedisSettings, TableLookupSettings};
use tollkeeper::settings::report::{Disposition, report_variables};
use tollkeeper::settings::secret::Secret;
use tollkeeper::settings::store::StoreSettings;
use tollkeeper::settings::tls::StoreTls;
use tollkeeper::settings::{Settings, documentation, environment};

use super::{PEER, Vars, credential_file, notices, os, problems, read, tcp};
use kit::repository;

/// Redis settings of an environment.
pub(super) fn redis(vars: Vars<'_>) -> RedisSettings {
    match read(vars).store {
        StoreSettings::Redis(redis) => redis,
        store => panic!("{vars:?} is no Redis: {store:?}"),
    }
}

fn single(host: &str, port: u16) -> TopologySettings {
    TopologySettings::Single(tcp(host, port))
}

fn unix(path: &str) -> TopologySettings {
    TopologySettings::Single(Endpoint::Unix(path.into()))
}

fn inline(user: Option<&str>, password: &str) -> Credentials {
    Credentials::Inline { user: user.map(str::to_owned), password: Secret::new(password) }
}

#[test]
fn any_redis_setting_selects_redis() {
    assert_eq!(read(&[]).store, StoreSettings::Memory);
    for (name, _) in PEER.iter().filter(|(name, _)| name.starts_with("REDIS_")) {
        let setting = environment::find_setting(name).unwrap();
        let value = match setting.default_text() {
            "" => "/x",
            default => default,
        };
        assert!(matches!(read(&[(name, value)]).store, StoreSettings::Redis(_)), "{name}={value}");
    }
    assert!(matches!(read(&[("BACKEND_TYPE", "redis")]).store, StoreSettings::Redis(_)));
    // An empty variable does not select Redis, and neither do settings that only apply with it.
    for name in ["REDIS_URL", "REDIS_AUTH", "REDIS_TLS_CACERT", "REDIS_POOL_ON_EMPTY_BEHAVIOR"] {
        assert_eq!(read(&[(name, "")]).store, StoreSettings::Memory, "{name}");
    }
    let others = [("TOLLKEEPER_STORE_TIMEOUT", "1s"), ("CACHE_KEY_PREFIX", "x")];
    assert_eq!(read(&others).store, StoreSettings::Memory);
}

#[test]
fn redis_defaults_match_envoyproxy_ratelimit() {
    let main = DeploymentSettings {
        setting: "REDIS_URL",
        topology: unix("/var/run/nutcracker/ratelimit.sock"),
        database: 0,
        credentials: Credentials::None,
        tls: None,
        connections: NonZeroUsize::MIN,
        connect_timeout: Duration::from_secs(10),
    };
    let expected = RedisSettings {
        main: main.clone(),
        per_second: None,
        regions: None,
        timeout: Duration::from_millis(15),
        replicas: None,
        max_replicas: NonZeroU32::new(16).unwrap(),
        eventual_bytes: 64 << 20,
        key_prefix: String::new(),
        key_format: KeyFormat::Tollkeeper,
        expiration_jitter: Duration::from_secs(300),
        over_limit_cache: OverLimitCacheSettings { capacity_bytes: 4 << 20, caches_counting_windows: false },
        tables: TableLookupSettings::default(),
        health_needs_connection: false,
    };
    assert_eq!(redis(&[("BACKEND_TYPE", "redis")]), expected);
    let tables = redis(&[("BACKEND_TYPE", "redis"), ("TOLLKEEPER_TABLE_BYTES", "1MiB")]);
    let bounds = TableLookupSettings { cache_bytes: 1 << 20, ..TableLookupSettings::default() };
    assert_eq!(tables, RedisSettings { tables: bounds, ..expected.clone() });
    let per_second = DeploymentSettings {
        setting: "REDIS_PERSECOND_URL",
        topology: unix("/var/run/nutcracker/ratelimitpersecond.sock"),
        ..main
    };
    assert_eq!(redis(&[("REDIS_PERSECOND", "true")]), RedisSettings { per_second: Some(per_second), ..expected });
}

#[test]
fn local_cache_size_adds_to_the_over_limit_cache() {
    const MIB: usize = 1 << 20;
    let cases: [(Vars<'_>, usize, bool); 6] = [
        (&[("LOCAL_CACHE_SIZE_IN_BYTES", "0")], 4 * MIB, false),
        (&[("LOCAL_CACHE_SIZE_IN_BYTES", "1")], 4 * MIB, true),
        (&[("LOCAL_CACHE_SIZE_IN_BYTES", "8388608")], 8 * MIB, true),
        (&[("TOLLKEEPER_OVER_LIMIT_CACHE_BYTES", "16MiB"), ("LOCAL_CACHE_SIZE_IN_BYTES", "8388608")], 16 * MIB, true),
        (&[("TOLLKEEPER_OVER_LIMIT_CACHE_BYTES", "1000")], 1000, false),
        (&[("TOLLKEEPER_OVER_LIMIT_CACHE_BYTES", "0"), ("LOCAL_CACHE_SIZE_IN_BYTES", "8388608")], 0, false),
    ];
    for (vars, capacity_bytes, caches_counting_windows) in cases {
        let vars = [&[("REDIS_URL", "/redis.sock")], vars].concat();
        assert_eq!(
            redis(&vars).over_limit_cache,
            OverLimitCacheSettings { capacity_bytes, caches_counting_windows },
            "{vars:?}"
        );
    }
}

#[test]
fn each_redis_variable_reaches_its_setting() {
    let redis = redis(&[
        ("REDIS_URL", "a:1"),
        ("REDIS_SOCKET_TYPE", "TCP"),
        ("REDIS_TYPE", "Single"),
        ("REDIS_POOL_SIZE", "4"),
        ("REDIS_TIMEOUT", "2s"),
        ("REDIS_AUTH", "ann:se:cret"),
        ("REDIS_TLS", "true"),
        ("REDIS_TLS_CACERT", "/ca"),
        ("REDIS_TLS_CLIENT_CERT", "/cert"),
        ("REDIS_TLS_CLIENT_KEY", "/key"),
        ("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", "true"),
        ("REDIS_HEALTH_CHECK_ACTIVE_CONNECTION", "true"),
        ("REDIS_PERSECOND", "true"),
        ("REDIS_PERSECOND_URL", "m,b:2"),
        ("REDIS_PERSECOND_TYPE", "sentinel"),
        ("REDIS_PERSECOND_POOL_SIZE", "5"),
        ("REDIS_PERSECOND_TIMEOUT", "3s"),
        ("REDIS_PERSECOND_AUTH_FILE", "/per-second"),
        ("REDIS_PERSECOND_SENTINEL_AUTH", "word"),
        ("CACHE_KEY_PREFIX", "p:"),
        ("EXPIRATION_JITTER_MAX_SECONDS", "-1"),
        ("TOLLKEEPER_STORE_TIMEOUT", "20ms"),
        ("TOLLKEEPER_REPLICAS", "3"),
        ("TOLLKEEPER_MAX_REPLICAS", "1000"),
        ("TOLLKEEPER_KEY_FORMAT", "Ratelimit"),
    ]);
    let file = |setting, path: &str| PemFile { setting, path: path.into() };
    let certificate = file("REDIS_TLS_CLIENT_CERT", "/cert");
    let client = Some(ClientCertificate { certificate, key: file("REDIS_TLS_CLIENT_KEY", "/key") });
    let main = DeploymentSettings {
        setting: "REDIS_URL",
        topology: single("a", 1),
        database: 0,
        credentials: inline(Some("ann"), "se:cret"),
        tls: Some(StoreTls {
            ca_setting: "REDIS_TLS_CACERT",
            ca: Some(file("REDIS_TLS_CACERT", "/ca")),
            client,
            skip_hostname: true,
        }),
        connections: NonZeroUsize::new(4).unwrap(),
        connect_timeout: Duration::from_secs(2),
    };
    assert_eq!(redis.main, main);
    let sentinels = TopologySettings::Sentinel {
        primary: "m".into(),
        sentinels: vec![tcp("b", 2)],
        credentials: inline(None, "word"),
    };
    let per_second = DeploymentSettings {
        setting: "REDIS_PERSECOND_URL",
        topology: sentinels,
        database: 0,
        credentials: credential_file("REDIS_PERSECOND_AUTH_FILE", "/per-second"),
        tls: None,
        connections: NonZeroUsize::new(5).unwrap(),
        connect_timeout: Duration::from_secs(3),
    };
    assert_eq!(redis.per_second, Some(per_second));
    assert_eq!((redis.timeout, redis.replicas), (Duration::from_millis(20), NonZeroU32::new(3)));
    assert_eq!(redis.max_replicas.get(), 1000);
    assert_eq!((redis.key_prefix.as_str(), redis.key_format), ("p:", KeyFormat::Ratelimit));
    assert_eq!((redis.expiration_jitter, redis.health_needs_connection), (Duration::ZERO, true));
}

#[test]
fn redis_url_parses_in_every_form() {
    let none = Credentials::None;
    for (url, topology, credentials, database, is_tls) in [
        ("redis:6379", single("redis", 6379), none.clone(), 0, false),
        ("10.0.0.1:6380", single("10.0.0.1", 6380), none.clone(), 0, false),
        ("[::1]:6379", single("::1", 6379), none.clone(), 0, false),
        ("/run/redis.sock", unix("/run/redis.sock"), none.clone(), 0, false),
        ("/run/a:b,c@d.sock", unix("/run/a:b,c@d.sock"), none.clone(), 0, false),
        ("redis://h", single("h", 6379), none.clone(), 0, false),
        ("REDIS://h:1/", single("h", 1), none.clone(), 0, false),
        ("redis://[fe80::1]", single("fe80::1", 6379), none.clone(), 0, false),
        ("redis://h:1/15", single("h", 1), none.clone(), 15, false),
        ("redis://h:1?db=3", single("h", 1), none.clone(), 3, false),
        ("redis://h:1/3?db=3", single("h", 1), none.clone(), 3, false),
        ("redis://:pw@h:1", single("h", 1), inline(None, "pw"), 0, false),
        ("redis://ann:pw@h:1/2", single("h", 1), inline(Some("ann"), "pw"), 2, false),
        ("redis://a%3Ab:p%40%2F%2525@h:1", single("h", 1), inline(Some("a:b"), "p@/%25"), 0, false),
        ("redis://ann:a:b,c@d@h:1", single("h", 1), inline(Some("ann"), "a:b,c@d"), 0, false),
        ("redis://h:1?username=ann&password=p+w%26&db=1", single("h", 1), inline(Some("ann"), "p w&"), 1, false),
        ("redis://ann@h:1?password=a@b", single("h", 1), inline(Some("ann"), "a@b"), 0, false),
        ("rediss://h:1", single("h", 1), none.clone(), 0, true),
    ] {
        let main = redis(&[("REDIS_URL", url)]).main;
        let found = (main.topology, main.credentials, main.database, main.tls.is_some());
        assert_eq!(found, (topology, credentials, database, is_tls), "{url}");
        // The deployment for limits per second is parsed alike.
        let other = redis(&[("REDIS_PERSECOND", "1"), ("REDIS_PERSECOND_URL", url)]).per_second.unwrap();
        assert_eq!((other.topology, other.tls.is_some()), (found.0, is_tls), "{url}");
    }
    let relative = redis(&[("REDIS_URL", "redis.sock"), ("REDIS_SOCKET_TYPE", "unix")]);
    assert_eq!(relative.main.topology, unix("redis.sock"));
    let texts = [tcp("h", 1), tcp("::1", 2), Endpoint::Unix("/s".into())].map(|endpoint| endpoint.to_string());
    assert_eq!(texts, ["h:1", "[::1]:2", "/s"]);
}

#[test]
fn lists_of_nodes_and_sentinels_parse() {
    let cluster = |vars: Vars<'_>| redis(&[&[("REDIS_TYPE", "cluster")], vars].concat()).main;
    for url in ["a:1,b:2", " a:1 , b:2,", "redis://a:1,b:2", "redis://a:1/0,redis://b:2"] {
        let main = cluster(&[("REDIS_URL", url)]);
        assert_eq!(main.topology, TopologySettings::Cluster(vec![tcp("a", 1), tcp("b", 2)]), "{url}");
    }
    let main = cluster(&[("REDIS_URL", "rediss://ann:pw@a:1,b:2"), ("REDIS_SOCKET_TYPE", "tcp")]);
    assert_eq!((main.credentials, main.tls.is_some()), (inline(Some("ann"), "pw"), true));
    assert_eq!(cluster(&[("REDIS_URL", "a:1")]).topology, TopologySettings::Cluster(vec![tcp("a", 1)]));

    let sentinel = |vars: Vars<'_>| redis(&[&[("REDIS_TYPE", "SENTINEL")], vars].concat()).main;
    // Credentials in the URL are for the sentinels that it names; the database is the primary's.
    let main = sentinel(&[("REDIS_URL", "my-master,redis://:pw@a/3,b:2"), ("REDIS_AUTH", "word")]);
    let topology = TopologySettings::Sentinel {
        primary: "my-master".into(),
        sentinels: vec![tcp("a", 26_379), tcp("b", 2)],
        credentials: inline(None, "pw"),
    };
    assert_eq!((main.topology, main.credentials, main.database), (topology, inline(None, "word"), 3));
    let main = sentinel(&[("REDIS_URL", "m,a:1"), ("TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE", "/f")]);
    let topology = TopologySettings::Sentinel {
        primary: "m".into(),
        sentinels: vec![tcp("a", 1)],
        credentials: credential_file("TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE", "/f"),
    };
    assert_eq!((main.topology, main.credentials), (topology, Credentials::None));
}

#[test]
fn credential_variables_take_precedence_over_the_url() {
    for (auth, expected) in [
        ("pw", inline(None, "pw")),
        ("ann:pw", inline(Some("ann"), "pw")),
        ("ann:p:w", inline(Some("ann"), "p:w")),
        (":pw", inline(None, "pw")),
        ("ann:", inline(Some("ann"), "")),
        ("", inline(Some("bob"), "other")),
    ] {
        let vars = [("REDIS_URL", "redis://bob:other@h:1"), ("REDIS_AUTH", auth)];
        assert_eq!(redis(&vars).main.credentials, expected, "{auth}");
        let lines = notices(&vars);
        if auth.is_empty() {
            assert_eq!(lines, [""; 0]);
        } else {
            assert_eq!(lines, ["REDIS_URL holds a password, which REDIS_AUTH overrides"], "{auth}");
        }
    }
    let from_file = redis(&[("REDIS_URL", "h:1"), ("REDIS_AUTH_FILE", "/run/secrets/redis")]);
    assert_eq!(from_file.main.credentials, credential_file("REDIS_AUTH_FILE", "/run/secrets/redis"));
    let both = redis(&[
        ("REDIS_AUTH_FILE", "/token"),
        ("REDIS_PERSECOND", "true"),
        ("REDIS_PERSECOND_URL", "h:2"),
        ("REDIS_PERSECOND_AUTH_FILE", "/other"),
    ]);
    assert_eq!(both.main.credentials, credential_file("REDIS_AUTH_FILE", "/token"));
    assert_eq!(both.per_second.unwrap().credentials, credential_file("REDIS_PERSECOND_AUTH_FILE", "/other"));
}

const FORMS: &str = "give host:port, a path that begins with /, or redis://user:password@host:port/db, IPv6 in \
                     brackets, and what is special in a user or password as %40";

#[test]
fn bad_redis_url_is_reported_with_a_fix() {
    let no_address = format!("not an address of Redis; {FORMS}");
    let no_port = format!("no port, and no path that begins with /; {FORMS}");
    let list = "a list, though REDIS_TYPE is single; give one address, or REDIS_TYPE=cluster, or REDIS_TYPE=sentinel";
    let number = "its database is no number; give one of 0 to 255 after the /, or none";
    let no_password = "it has a user and no password; give user:password@, or :password@ for no user";
    let query = "a query that is not known; give none but username, password and db";
    let percent = "it has a % that stands for nothing; write a % in a user or password as %25";
    for (url, shown, rest) in [
        ("redis", "redis", no_port.as_str()),
        (":6379", ":6379", &no_address),
        ("h:0", "h:0", &no_address),
        ("h:65536", "h:65536", &no_address),
        ("h:+1", "h:***", &no_address),
        ("h:", "h:", &no_address),
        ("::1:6379", ":***", &no_address),
        ("[::1:6379", "[:***", &no_address),
        ("[::1]6379", "[::1]6379", &no_address),
        ("a b:1", "a b:1", &no_address),
        ("http://h:1", "http://h:1", &no_address),
        ("redis://", "redis://", &no_address),
        ("redis:///0", "redis:///0", &no_address),
        ("redis://h:1#x", "redis://h:***", &no_address),
        ("redis://ann:pw", "redis://ann:***", &no_address),
        ("redis://ann:p/w@h:1", "redis://***@h:1", number),
        ("redis://h:1/x", "redis://h:***", number),
        ("redis://h:1/256", "redis://h:1/256", number),
        ("redis://h:1?db=-1", "redis://h:1?***", number),
        ("redis://h:1/1?db=2", "redis://h:1/1?***", "it gives the database twice; give it once"),
        ("redis://:a@h:1?password=b", "redis://***@h:1?***", "it gives the password twice; give it once"),
        ("redis://ann@h:1", "redis://***@h:1", no_password),
        ("redis://h:1?ssl=false", "redis://h:1?***", query),
        ("redis://:a%zz@h:1", "redis://***@h:1", percent),
        ("redis://:a%4@h:1", "redis://***@h:1", percent),
        ("redis://:a%ff@h:1", "redis://***@h:1", percent),
        ("a:1,b:2", "a:1,b:2", list),
        ("redis://:x@a:1,redis://:y@b:2", "redis://***@b:2", list),
        ("m,a:1", "m,a:1", list),
        ("/s?db=1", "/s?***", "a path with a query; give the path alone, and a password by REDIS_AUTH"),
    ] {
        assert_eq!(problems(&[("REDIS_URL", url)]), [format!("REDIS_URL={shown}: {rest}")]);
    }
}

#[test]
fn contradictory_settings_are_reported_together() {
    const SENTINELS: &str = "the name of the primary, then its sentinels: primaryname,host:port,host:port";
    const NODES: &str = "some of its nodes: host:port,host:port";
    let sentinel = ("REDIS_TYPE", "sentinel");
    let cluster = ("REDIS_TYPE", "cluster");
    let tls = ("REDIS_TLS", "true");
    let file = ("REDIS_AUTH_FILE", "/f");
    let cases: &[(Vars<'_>, String)] = &[
        (&[("REDIS_URL", ""), ("REDIS_TLS", "false")], "REDIS_URL=: set but empty; give the address of Redis, or unset all that begins with REDIS_".into()),
        (&[("REDIS_SOCKET_TYPE", "tcp")], "REDIS_URL=: not set, though REDIS_SOCKET_TYPE is tcp; give host:port, or REDIS_SOCKET_TYPE=unix".into()),
        (&[("REDIS_URL", "/s"), ("REDIS_SOCKET_TYPE", "tcp")], "REDIS_URL=/s: a path, though REDIS_SOCKET_TYPE is tcp; give host:port, or REDIS_SOCKET_TYPE=unix".into()),
        (&[("REDIS_URL", "h:1"), ("REDIS_SOCKET_TYPE", "unix")], "REDIS_URL=h:1: no path, though REDIS_SOCKET_TYPE is unix; give a path that begins with /, or REDIS_SOCKET_TYPE=tcp".into()),
        (&[("REDIS_SOCKET_TYPE", "udp")], "REDIS_SOCKET_TYPE=udp: not known; give tcp or unix".into()),
        (&[("REDIS_TYPE", "ring"), ("REDIS_URL", "a:1,b:2")], "REDIS_TYPE=ring: not known; give SINGLE, SENTINEL or CLUSTER".into()),
        (&[sentinel], format!("REDIS_URL=: not set with REDIS_TYPE=SENTINEL; give {SENTINELS}")),
        (&[cluster], format!("REDIS_URL=: not set with REDIS_TYPE=CLUSTER; give {NODES}")),
        (&[sentinel, ("REDIS_URL", "m")], format!("REDIS_URL=m: it names a primary and no sentinel; give {SENTINELS}")),
        (&[sentinel, ("REDIS_URL", "a:1,b:2")], format!("REDIS_URL=a:1,b:2: it does not begin with the name of the primary; give {SENTINELS}")),
        (&[sentinel, ("REDIS_URL", "m,/s")], "REDIS_URL=m,/s: a unix socket, which is not possible for a sentinel; give host:port,host:port".into()),
        (&[cluster, ("REDIS_URL", "/s")], "REDIS_URL=/s: a unix socket, which is not possible for a cluster; give host:port,host:port".into()),
        (&[cluster, ("REDIS_URL", ",")], format!("REDIS_URL=,: it names no node; give {NODES}")),
        (&[cluster, ("REDIS_URL", "redis://h:1/2")], "REDIS_URL=redis://h:1/2: a cluster has only database 0; leave the database out".into()),
        (&[cluster, ("REDIS_URL", "redis://:a@h:1,redis://:b@i:1")], "REDIS_URL=redis://***@i:1: its addresses have different users or passwords; give the same to all, or leave them out and give REDIS_AUTH".into()),
        (&[sentinel, ("REDIS_URL", "m,redis://h:1/1,redis://i:1/2")], "REDIS_URL=m,redis://h:1/1,redis://i:1/2: its addresses have different databases; give the same to all".into()),
        (&[cluster, ("REDIS_URL", "redis://h:1,rediss://i:1")], "REDIS_URL=redis://h:1,rediss://i:1: it has both redis:// and rediss://; give rediss:// to all for TLS, or to none".into()),
        (&[("REDIS_URL", "rediss://h:1"), ("REDIS_TLS", "false")], "REDIS_TLS=false: REDIS_URL says rediss://, which is TLS; unset it, or write redis:// in REDIS_URL".into()),
        (&[("REDIS_URL", "/s"), tls], "REDIS_TLS=true: a unix socket has no TLS; unset it, or give host:port as REDIS_URL".into()),
        (&[("REDIS_URL", "h:1"), tls, ("REDIS_TLS_CLIENT_CERT", "/c")], "REDIS_TLS_CLIENT_CERT=/c: set without REDIS_TLS_CLIENT_KEY; give both or none".into()),
        (&[("REDIS_URL", "rediss://h:1"), ("REDIS_PERSECOND", "true"), ("REDIS_PERSECOND_URL", "rediss://h:1"), ("REDIS_TLS_CLIENT_KEY", "/k")], "REDIS_TLS_CLIENT_KEY=/k: set without REDIS_TLS_CLIENT_CERT; give both or none".into()),
        (&[("REDIS_URL", "h:1"), file, ("REDIS_AUTH", "x")], "REDIS_AUTH_FILE=/f: REDIS_AUTH is set too; unset one of them".into()),
        (&[("REDIS_URL", "redis://:x@h:1"), file], "REDIS_AUTH_FILE=/f: REDIS_URL holds a password too; leave it to the file, which may say user:password".into()),
        (&[("REDIS_AUTH", ":")], "REDIS_AUTH=***: it holds no password; give password or user:password".into()),
        (&[("REDIS_AUTH", "x\n")], "REDIS_AUTH=***: it ends in a line break; remove it".into()),
        (&[("REDIS_POOL_SIZE", "0")], "REDIS_POOL_SIZE=0: out of range; give a whole number, 1 or more".into()),
        (&[("REDIS_TIMEOUT", "0")], "REDIS_TIMEOUT=0: out of range; give a duration such as 1.5s, 1ms to 1h".into()),
        (&[("REDIS_URL", "h:1"), ("TOLLKEEPER_STORE_TIMEOUT", "11s")], "TOLLKEEPER_STORE_TIMEOUT=11s: out of range; give a duration such as 1.5s, 1ms to 10s".into()),
        (&[("TOLLKEEPER_REPLICAS", "0")], "TOLLKEEPER_REPLICAS=0: out of range; give a whole number, 1 to 100000".into()),
        (
            &[("TOLLKEEPER_MAX_REPLICAS", "1001")],
            "TOLLKEEPER_MAX_REPLICAS=1001: out of range; give a whole number, 1 to 1000".into(),
        ),
        (&[("TOLLKEEPER_KEY_FORMAT", "x")], "TOLLKEEPER_KEY_FORMAT=x: not known; give tollkeeper or ratelimit".into()),
        (&[("REDIS_URL", "h:1"), ("TOLLKEEPER_KEY_FORMAT", "ratelimit"), ("EXPIRATION_JITTER_MAX_SECONDS", "31622401")], "EXPIRATION_JITTER_MAX_SECONDS=31622401: more than a year; give at most 31622400".into()),
        (&[("REDIS_PERSECOND", "true"), ("REDIS_PERSECOND_TYPE", "cluster")], format!("REDIS_PERSECOND_URL=: not set with REDIS_PERSECOND_TYPE=CLUSTER; give {NODES}")),
    ];
    for (vars, line) in cases {
        assert_eq!(problems(vars), [line.as_str()], "{vars:?}");
        // `check --env` reports the same, also for a variable that is missing.
        let stopping = report_variables(os(vars)).into_iter().filter(|line| line.disposition.prevents_start()).count();
        assert_eq!(stopping, 1, "{vars:?}");
    }
    let long = "x".repeat(257);
    assert!(
        problems(&[("REDIS_URL", "h:1"), ("CACHE_KEY_PREFIX", &long)])[0].ends_with("too long; give at most 256 bytes")
    );
    redis(&[("REDIS_URL", "h:1"), ("CACHE_KEY_PREFIX", "a{}")]);
    redis(&[cluster, ("REDIS_URL", "h:1"), ("CACHE_KEY_PREFIX", "{a}")]);
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn ignored_redis_setting_gets_one_line() {
    const FILES: [(&str, &str); 4] = [
        ("REDIS_TLS_CACERT", "/ca"),
        ("REDIS_TLS_CLIENT_CERT", "/c"),
        ("REDIS_TLS_CLIENT_KEY", ""),
        ("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", "true"),
    ];
    let lines = |names: &[&str], why: &str| names.iter().map(|name| format!("{name} has no effect: {why}")).collect();
    let url = ("REDIS_URL", "h:1");
    let cases: &[(Vars<'_>, Vec<String>)] = &[
        (
            &[("CACHE_KEY_PREFIX", "x"), ("TOLLKEEPER_STORE_TIMEOUT", "1s"), ("TOLLKEEPER_REPLICAS", "1")],
            lines(
                &["CACHE_KEY_PREFIX", "TOLLKEEPER_STORE_TIMEOUT", "TOLLKEEPER_REPLICAS"],
                "it is only read with counters in Redis or memcached",
            ),
        ),
        (
            &[("TOLLKEEPER_EVENTUAL_BYTES", "1MiB")],
            lines(&["TOLLKEEPER_EVENTUAL_BYTES"], "it is only read with counters in Redis"),
        ),
        (
            &[("REDIS_URL", "h:1"), ("EXPIRATION_JITTER_MAX_SECONDS", "5")],
            lines(
                &["EXPIRATION_JITTER_MAX_SECONDS"],
                "it is only read with TOLLKEEPER_KEY_FORMAT=ratelimit and counters in Redis or memcached",
            ),
        ),
        (
            &[url, FILES[0], FILES[1], FILES[2], FILES[3]],
            lines(
                &["REDIS_TLS_CLIENT_CERT", "REDIS_TLS_CACERT", "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION"],
                "it is only read if a connection to Redis has TLS (REDIS_TLS=true, or rediss:// in its URL)",
            ),
        ),
        (
            &[url, ("REDIS_SENTINEL_AUTH", "x")],
            lines(&["REDIS_SENTINEL_AUTH"], "it is only read with counters in Redis and REDIS_TYPE=sentinel"),
        ),
        (
            &[url, ("REDIS_PERSECOND_URL", "h:1"), ("REDIS_PERSECOND_TYPE", "SINGLE"), ("REDIS_PERSECOND_AUTH", "x")],
            lines(
                &["REDIS_PERSECOND_URL", "REDIS_PERSECOND_AUTH"],
                "it is only read with counters in Redis and REDIS_PERSECOND=true",
            ),
        ),
        (
            &[url, ("REDIS_PIPELINE_WINDOW", "150us"), ("REDIS_PIPELINE_LIMIT", "0")],
            lines(&["REDIS_PIPELINE_WINDOW"], "commands are pipelined without waiting"),
        ),
        (
            &[url, ("REDIS_POOL_ON_EMPTY_BEHAVIOR", "CREATE"), ("REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR", "WAIT")],
            lines(&["REDIS_POOL_ON_EMPTY_BEHAVIOR"], "connections are shared, so none is ever missing"),
        ),
        (
            &[url, ("REDIS_CLUSTER_PIPELINE_PARALLELISM", "0")],
            lines(&["REDIS_CLUSTER_PIPELINE_PARALLELISM"], "all nodes are always called in parallel"),
        ),
        (
            &[url, ("REDIS_STARTUP_MAX_ELAPSED_TIME", "1m"), ("REDIS_STARTUP_MAX_INTERVAL", "30s")],
            lines(
                &["REDIS_STARTUP_MAX_ELAPSED_TIME"],
                "the start does not wait for Redis, and connection attempts never end",
            ),
        ),
        (
            &[url, ("REDIS_CLOSE_CONNECTION_ON_READONLY_ERROR", "true")],
            lines(&["REDIS_CLOSE_CONNECTION_ON_READONLY_ERROR"], "it is always so"),
        ),
        (
            &[("REDIS_TYPE", "cluster"), url, ("REDIS_SOCKET_TYPE", "unix")],
            lines(&["REDIS_SOCKET_TYPE"], "nodes of a cluster and sentinels always use TCP"),
        ),
        (
            &[url, ("TOLLKEEPER_OVER_LIMIT_CACHE_BYTES", "0"), ("LOCAL_CACHE_SIZE_IN_BYTES", "1000")],
            lines(
                &["LOCAL_CACHE_SIZE_IN_BYTES"],
                "it is only read with counters in Redis or memcached, and without TOLLKEEPER_OVER_LIMIT_CACHE_BYTES=0",
            ),
        ),
        (&[url, ("TOLLKEEPER_OVER_LIMIT_CACHE_BYTES", "0")], vec![]),
        (
            &[url, ("REDIS_POOL_SIZE", "500")],
            vec!["REDIS_POOL_SIZE is more than the maximum of 128, which is used".into()],
        ),
        (
            &[
                url,
                ("LOCAL_CACHE_SIZE_IN_BYTES", "0"),
                ("REDIS_AUTH", ""),
                ("REDIS_SENTINEL_AUTH", ""),
                ("CACHE_KEY_PREFIX", "x"),
            ],
            vec![],
        ),
    ];
    for (vars, expected) in cases {
        assert_eq!(notices(vars), *expected, "{vars:?}");
        let idle = report_variables(os(vars))
            .into_iter()
            .filter(|line| matches!(line.disposition, Disposition::NoEffect { .. }))
            .count();
        assert_eq!(idle, expected.iter().filter(|line| line.contains("no effect")).count(), "{vars:?}");
    }
    assert_eq!(redis(&[url, ("REDIS_POOL_SIZE", "500")]).main.connections.get(), 128);
}

/// All text about an environment: error, notices, report, and the shown value.
fn all_output(vars: Vars<'_>) -> String {
    let result = Settings::from_env(os(vars));
    let words = match &result {
        Ok((_, notices)) => notices.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"),
        Err(error) => error.to_string(),
    };
    let (name, value) = vars[0];
    let setting = environment::find_setting(name).unwrap();
    let parsed = setting.validate(value);
    format!("{words} {result:?} {:?} {parsed:?} {}", report_variables(os(vars)), setting.format_for_message(value))
}

#[test]
fn secrets_are_shown_in_no_output() {
    const AUTHS: &[&str] = &["hunter2", "hunter2:x", "x:hunter2", ":hunter2", "hunter2:", "hunter2\n", "a:b:hunter2"];
    const URLS: &[&str] = &[
        "redis://:hunter2@h:1",
        "redis://ann:hunter2@h:1/2",
        "redis://hunter2@h:1",
        "redis://:hunter2",
        "redis://ann:hunter2",
        "redis://ann:hunter2/0",
        "redis://ann:x/hunter2",
        "redis://ann:x/hunter2@h:1",
        "redis://ann:x#hunter2@h:1",
        "redis://h:1#hunter2",
        "redis://h:1/hunter2",
        "redis://h:hunter2@",
        "redis://ann:x@hunter2@h:1",
        "redis://ann:%zzhunter2@h:1",
        "redis://:x,redis://hunter2@h:1",
        "redis://:hunter2@h:1,redis://:x@h:2",
        "redis://:hunter2@h:1,redis://:hunter2@h:2",
        "redis://:a,hunter2@h:1",
        "m,u:hunter2@h:1,h2",
        "m,redis://u:hunter2@h:1",
        "m,redis://u:hunter2",
        "u:hunter2@h:1",
        "u:hunter2",
        "h:1:hunter2",
        "redis://h?password=hunter2",
        "redis://h?hunter2",
        "redis://h?hunter2=x",
        "redis://h?a=b@c&password=hunter2",
        "redis://h?password=a@hunter2",
        "redis://h?password=a@hunter2&db=x",
        "redis://u:a?hunter2@h:1",
        "rediss://u:hunter2@h:1",
        "hunter2://x@h",
        "a:hunter2://x@h",
        "valkey://u:hunter2@h:1",
        "/run/x.sock?password=hunter2",
        "x.sock?password=hunter2",
        "hunter2@x.sock",
    ];
    let mut tried = 0;
    for prefix in ["REDIS_", "REDIS_PERSECOND_"] {
        let (url, auth) = (format!("{prefix}URL"), format!("{prefix}AUTH"));
        let (sentinel_auth, topology, socket) =
            (format!("{prefix}SENTINEL_AUTH"), format!("{prefix}TYPE"), format!("{prefix}SOCKET_TYPE"));
        for kind in ["single", "sentinel", "cluster", "ring"] {
            for (name, values) in [(&url, URLS), (&auth, AUTHS), (&sentinel_auth, AUTHS)] {
                for value in values {
                    for more in
                        [&[][..], &[(socket.as_str(), "unix")], &[(socket.as_str(), "tcp")], &[(auth.as_str(), "x")]]
                    {
                        let base: Vars<'_> = &[(name, value), (&topology, kind), ("REDIS_PERSECOND", "true")];
                        for vars in [base, &base[..1]] {
                            let text = all_output(&[vars, more].concat());
                            assert!(!text.contains("hunter2"), "{name}={value} {kind} {more:?}: {text}");
                            tried += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(tried > 2000, "{tried}");
    assert!(
        !documentation::format_environment_help().contains("hunter2")
            && !documentation::format_settings_markdown().contains("hunter2")
    );
}

#[test]
fn example_environments_select_their_topologies() {
    for (file, expected) in [
        ("redis-single.env", single("redis", 6379)),
        (
            "redis-sentinel.env",
            TopologySettings::Sentinel {
                primary: "mymaster".into(),
                sentinels: ["sentinel-0", "sentinel-1", "sentinel-2"].map(|host| tcp(host, 26_379)).into(),
                credentials: credential_file("TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE", "/run/secrets/sentinel"),
            },
        ),
        (
            "redis-cluster.env",
            TopologySettings::Cluster(["redis-0", "redis-1", "redis-2"].map(|host| tcp(host, 6379)).into()),
        ),
        ("redis-per-second.env", single("redis", 6379)),
    ] {
        // A shell sources the file and exports its variables, as users do.
        let path = repository("config").join(file);
        let script = "set -eu; unset PATH; set -a; . \"$0\"; /usr/bin/env -0";
        let output = Command::new("sh").args(["-c", script]).arg(&path).env_clear().output().unwrap();
        assert!(output.status.success(), "{file}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        let vars: Vec<(&str, &str)> = text.split('\0').filter_map(|line| line.split_once('=')).collect();
        let main = redis(&vars).main;
        assert_eq!((main.topology, notices(&vars)), (expected, vec![]), "{file}");
        assert_eq!(redis(&vars).per_second.is_some(), file == "redis-per-second.env", "{file}");
        assert!(matches!(main.credentials, Credentials::File(_)), "{file}");
    }
}

//! Settings of several regions: what is read, and an error for each contradiction.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::time::Duration;

use tollkeeper::settings::credentials::Credentials;
use tollkeeper::settings::redis::RedisSettings;
use tollkeeper::settings::redis::deployment::TopologySettings;
use tollkeeper::settings::redis::regions::region_number_from_name;
use tollkeeper::settings::report::report_variables;
use tollkeeper::settings::secret::Secret;
use tollkeeper::settings::store::StoreSettings;

use super::{Vars, credential_file, notices, os, problems, read, tcp};

const URL: (&str, &str) = ("REDIS_URL", "here:6379");
const REGION: (&str, &str) = ("TOLLKEEPER_REGION", "eu-west");
const REGIONS: (&str, &str) = ("TOLLKEEPER_REGIONS", "us-east, eu-west");
const GLOBAL: (&str, &str) = ("TOLLKEEPER_GLOBAL_REDIS_URL", "there:6379");

fn redis(vars: Vars<'_>) -> RedisSettings {
    match read(vars).store {
        StoreSettings::Redis(redis) => redis,
        store => panic!("{vars:?} is no Redis: {store:?}"),
    }
}

#[test]
fn each_variable_of_regions_reaches_its_setting() {
    let regions = redis(&[URL, REGION, REGIONS, GLOBAL]).regions.unwrap();
    assert_eq!((regions.own_region_name(), regions.index), ("eu-west", 0));
    assert_eq!(regions.names, ["eu-west", "us-east"], "in any order");
    assert_eq!(regions.global.setting, "TOLLKEEPER_GLOBAL_REDIS_URL");
    assert_eq!(regions.global.topology, TopologySettings::Single(tcp("there", 6379)));
    assert_eq!((regions.global.connections, regions.wait_replicas), (NonZeroUsize::MIN, 0));
    let regions = redis(&[
        URL,
        REGION,
        REGIONS,
        ("TOLLKEEPER_GLOBAL_REDIS_URL", "m,rediss://:word@there:1"),
        ("TOLLKEEPER_GLOBAL_REDIS_TYPE", "sentinel"),
        ("REDIS_POOL_SIZE", "3"),
        ("REDIS_TIMEOUT", "3s"),
        ("TOLLKEEPER_GLOBAL_REDIS_AUTH_FILE", "/servers"),
        ("TOLLKEEPER_GLOBAL_REDIS_WAIT_REPLICAS", "1"),
        ("REDIS_TLS_CACERT", "/ca"),
    ])
    .regions
    .unwrap();
    let global = regions.global;
    let credentials = Credentials::Inline { user: None, password: Secret::new("word") };
    let topology = TopologySettings::Sentinel { primary: "m".into(), sentinels: vec![tcp("there", 1)], credentials };
    assert_eq!((global.topology, regions.wait_replicas), (topology, 1));
    let file = credential_file("TOLLKEEPER_GLOBAL_REDIS_AUTH_FILE", "/servers");
    assert_eq!(
        (global.credentials, global.connections.get(), global.connect_timeout),
        (file, 3, Duration::from_secs(3))
    );
    assert!(global.tls.is_some_and(|tls| tls.ca.is_some()));
    let sentinels = redis(&[
        URL,
        REGION,
        REGIONS,
        ("TOLLKEEPER_GLOBAL_REDIS_URL", "m,there:1"),
        ("TOLLKEEPER_GLOBAL_REDIS_TYPE", "sentinel"),
        ("TOLLKEEPER_GLOBAL_REDIS_SENTINEL_AUTH_FILE", "/sentinels"),
    ]);
    let TopologySettings::Sentinel { credentials, .. } = sentinels.regions.unwrap().global.topology else { panic!() };
    assert_eq!(credentials, credential_file("TOLLKEEPER_GLOBAL_REDIS_SENTINEL_AUTH_FILE", "/sentinels"));
    assert_eq!(redis(&[URL]).regions, None);
}

#[test]
fn number_of_a_region_stays_when_the_list_changes() {
    // A number that another region had would free the grants that the other one still uses.
    let number =
        |list| redis(&[URL, REGION, ("TOLLKEEPER_REGIONS", list), GLOBAL]).regions.unwrap().own_region_number();
    assert_eq!(number("ap,eu-west,us"), number("aa,ap,eu-west,us"));
    assert_ne!(region_number_from_name("us"), region_number_from_name("eu-west"));
    // What regions store is read by those of another version.
    assert_eq!(region_number_from_name("eu-west"), 589_638_446);
}

#[test]
fn regions_with_one_number_are_refused() {
    let names = (0_u32..).map(|region| format!("r{region}"));
    let mut by_number = HashMap::new();
    let pair =
        names.map(|name| (by_number.insert(region_number_from_name(&name), name.clone()), name)).find_map(|pair| {
            match pair {
                (Some(other), name) => Some(format!("{other},{name}")),
                (None, _) => None,
            }
        });
    let pair = pair.expect("32 bits collide");
    let own = pair.split(',').next().unwrap();
    let found = problems(&[URL, ("TOLLKEEPER_REGION", own), ("TOLLKEEPER_REGIONS", &pair), GLOBAL]);
    assert_eq!(found, [format!("TOLLKEEPER_REGIONS={pair}: two names have one hash; rename one of the regions")]);
}

#[test]
fn contradicting_settings_of_regions_are_one_error_each() {
    const NAMES: &str = "give names of letters, digits, `-`, `_` and `.`, at most 63 bytes each";
    const REDIS: &str =
        "give REDIS_URL, or unset TOLLKEEPER_REGION, TOLLKEEPER_REGIONS and TOLLKEEPER_GLOBAL_REDIS_URL";
    let many: Vec<String> = (0..65).map(|region| format!("r{region}")).collect();
    let many = many.join(",");
    let long = "x".repeat(64);
    let cases: &[(Vars<'_>, String)] = &[
        (&[URL, REGION, GLOBAL], "TOLLKEEPER_REGIONS=: not set with TOLLKEEPER_REGION; give the names of all regions, alike in all regions".into()),
        (&[URL, REGIONS, GLOBAL], "TOLLKEEPER_REGION=: not set with TOLLKEEPER_REGIONS; give the name of this region".into()),
        (&[URL, REGION, REGIONS], "TOLLKEEPER_GLOBAL_REDIS_URL=: not set with TOLLKEEPER_REGION; give the address of the Redis that all regions reach".into()),
        (&[URL, ("TOLLKEEPER_REGION", "asia"), REGIONS, GLOBAL], "TOLLKEEPER_REGION=asia: not in TOLLKEEPER_REGIONS; add it there, in all regions".into()),
        (&[URL, ("TOLLKEEPER_REGION", "eu west"), REGIONS, GLOBAL], format!("TOLLKEEPER_REGION=eu west: not a plain name; {NAMES}")),
        (&[URL, ("TOLLKEEPER_REGION", &long), REGIONS, GLOBAL], format!("TOLLKEEPER_REGION={long}: not a plain name; {NAMES}")),
        (&[URL, REGION, ("TOLLKEEPER_REGIONS", "eu-west,{us}"), GLOBAL], format!("TOLLKEEPER_REGIONS=eu-west,{{us}}: not a list of plain names; {NAMES}")),
        (&[URL, REGION, ("TOLLKEEPER_REGIONS", "eu-west,"), GLOBAL], format!("TOLLKEEPER_REGIONS=eu-west,: not a list of plain names; {NAMES}")),
        (&[URL, REGION, ("TOLLKEEPER_REGIONS", "eu-west,us,eu-west"), GLOBAL], "TOLLKEEPER_REGIONS=eu-west,us,eu-west: names a region twice; give each once".into()),
        (&[URL, REGION, ("TOLLKEEPER_REGIONS", "eu-west"), GLOBAL], "TOLLKEEPER_REGIONS=eu-west: names 1 regions; give 2 to 64 names".into()),
        (&[URL, REGION, REGIONS, GLOBAL, ("TOLLKEEPER_KEY_FORMAT", "ratelimit")], "TOLLKEEPER_KEY_FORMAT=ratelimit: has no limits over several regions; unset it, or unset TOLLKEEPER_REGION".into()),
        (&[REGION, REGIONS, GLOBAL], format!("TOLLKEEPER_REGION=eu-west: regions share limits through Redis, and counters are in this process; {REDIS}")),
        (&[GLOBAL], format!("TOLLKEEPER_GLOBAL_REDIS_URL=there:6379: regions share limits through Redis, and counters are in this process; {REDIS}")),
        (&[REGIONS, ("BACKEND_TYPE", "memcache"), ("MEMCACHE_HOST_PORT", "m:1")], format!("TOLLKEEPER_REGIONS=us-east, eu-west: regions share limits through Redis, and counters are in memcache; {REDIS}")),
        (&[URL, REGION, REGIONS, GLOBAL, ("TOLLKEEPER_GLOBAL_REDIS_WAIT_REPLICAS", "2")], "TOLLKEEPER_GLOBAL_REDIS_WAIT_REPLICAS=2: out of range; give a whole number, 0 to 1".into()),
        (&[URL, REGION, REGIONS, ("TOLLKEEPER_GLOBAL_REDIS_URL", "a:1,b:2"), ("TOLLKEEPER_GLOBAL_REDIS_TYPE", "sentinel")], "TOLLKEEPER_GLOBAL_REDIS_URL=a:1,b:2: it does not begin with the name of the primary; give the name of the primary, then its sentinels: primaryname,host:port,host:port".into()),
    ];
    for (vars, line) in cases {
        assert_eq!(problems(vars), [line.as_str()], "{vars:?}");
        let stopping = report_variables(os(vars)).into_iter().filter(|line| line.disposition.prevents_start()).count();
        assert_eq!(stopping, 1, "{vars:?}");
    }
    let many = problems(&[URL, ("TOLLKEEPER_REGION", "r0"), ("TOLLKEEPER_REGIONS", &many), GLOBAL]);
    assert!(many.len() == 1 && many[0].ends_with(": names 65 regions; give 2 to 64 names"), "{many:?}");
    assert_eq!(problems(&[URL, GLOBAL]).len(), 2, "both names are missing");
}

#[test]
fn unused_and_doubtful_settings_of_regions_get_one_notice() {
    let why = "has no effect: it is only read with TOLLKEEPER_REGION";
    let unused = ("TOLLKEEPER_GLOBAL_REDIS_WAIT_REPLICAS", "1");
    for vars in [&[unused, URL][..], &[unused]] {
        assert_eq!(notices(vars), [format!("TOLLKEEPER_GLOBAL_REDIS_WAIT_REPLICAS {why}")], "{vars:?}");
    }
    let same = ("TOLLKEEPER_GLOBAL_REDIS_URL", "redis://here");
    let what = "names the database of REDIS_URL: each region needs a Redis of its own beside the global one";
    assert_eq!(notices(&[URL, REGION, REGIONS, same]), [format!("TOLLKEEPER_GLOBAL_REDIS_URL {what}")]);
    let other_database = ("TOLLKEEPER_GLOBAL_REDIS_URL", "redis://here/1");
    assert!(notices(&[URL, REGION, REGIONS, other_database]).is_empty());
    assert!(notices(&[URL, REGION, REGIONS, GLOBAL]).is_empty());
}

#[test]
fn password_of_the_global_redis_is_never_shown() {
    let vars: Vars<'_> = &[URL, REGION, ("TOLLKEEPER_GLOBAL_REDIS_URL", "redis://:sesame@there")];
    assert!(!problems(vars).join("\n").contains("sesame"));
    let valid = [vars, &[REGIONS]].concat();
    assert!(!format!("{:?}", read(&valid)).contains("sesame"));
    assert!(!report_variables(os(&valid)).iter().any(|line| format!("{line:?}").contains("sesame")));
}

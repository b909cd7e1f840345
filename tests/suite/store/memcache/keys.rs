//! Keys of counters: those of envoyproxy/ratelimit, long ones, hostile ones, and how long they are kept.

use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use tollkeeper::base::clock::Time;
use tollkeeper::settings::Settings;
use tollkeeper::store::Store;

use super::{call, client_of, counting_in};
use kit::memcached::{Memcached, memcached};
use kit::test_service::{TestRequest, TestService, store_runtime};
use kit::wait_for;

/// Maximum length of a key in memcached.
const MAX_KEY_BYTES: usize = 250;
const DAY_S: u64 = 86_400;

const RULES: &str = "domain: domain
descriptors:
  - {key: key, rate_limit: {unit: second, requests_per_unit: 3}}
  - {key: minute, rate_limit: {unit: minute, requests_per_unit: 3}}
  - {key: hour, rate_limit: {unit: hour, requests_per_unit: 3}}
  - {key: day, rate_limit: {unit: day, requests_per_unit: 3}}
  - {key: week, rate_limit: {unit: week, requests_per_unit: 3}}
  - {key: month, rate_limit: {unit: month, requests_per_unit: 3}}
  - {key: year, rate_limit: {unit: year, requests_per_unit: 3}}
  - {key: files, value: files/*, share_threshold: true, rate_limit: {unit: minute, requests_per_unit: 3}}
  - key: key2
    value: value2
    descriptors: [{key: subkey2, rate_limit: {unit: minute, requests_per_unit: 3}}]
";

/// A service at `start` in the key format of envoyproxy/ratelimit, once it counts.
fn service(server: &Memcached, env: &[(&str, &str)], start: Time) -> TestService {
    let address = server.address();
    let mut variables = vec![
        ("BACKEND_TYPE", "memcache"),
        ("MEMCACHE_HOST_PORT", &address),
        ("TOLLKEEPER_KEY_FORMAT", "ratelimit"),
        ("TOLLKEEPER_STORE_TIMEOUT", "10s"),
        ("TOLLKEEPER_ON_STORE_ERROR", "error"),
    ];
    variables.extend(env);
    let os = variables.iter().map(|(name, value)| (name.into(), value.into()));
    let (settings, _) = Settings::from_env(os).expect("the settings are valid");
    let store = {
        let _within = store_runtime().enter();
        Store::open(&settings.store, 1 << 20, settings.slots.holder_timeout)
    };
    let service = TestService::new(variables, start).with_store(store);
    service.load([("rules.yaml", RULES)]);
    wait_for("a charge", || service.decide(&about(&[("year", "wait")])).ok());
    server.command("flush_all", "OK");
    service
}

fn about(entries: &[(&str, &str)]) -> TestRequest {
    TestRequest::new("domain").descriptor(entries)
}

fn now() -> Time {
    Time::from_secs(SystemTime::now().duration_since(UNIX_EPOCH).expect("it is later").as_secs())
}

/// Keys of counters.
fn keys(server: &Memcached) -> Vec<Vec<u8>> {
    server.keys().into_keys().filter(|key| !key.ends_with(b"probe")).collect()
}

#[test]
fn keys_are_those_of_envoyproxy_ratelimit() {
    let server = memcached().start();
    let now = now();
    let seconds = now.as_micros() / 1_000_000;
    let window = |length_s: u64| seconds / length_s * length_s;
    let prefixed: &[(&str, &str)] = &[("CACHE_KEY_PREFIX", "prefix:")];
    let minute = window(60);
    type Case<'c> = (&'c [(&'c str, &'c str)], TestRequest, String);
    let table: &[Case<'_>] = &[
        (&[], about(&[("key", "value")]), format!("domain_key_value_{seconds}")),
        (prefixed, about(&[("minute", "v")]), format!("prefix:domain_minute_v_{minute}")),
        (&[], about(&[("minute", "")]), format!("domain_minute__{minute}")),
        (&[], about(&[("minute", "a_b|{c}\\=*%:/?")]), format!("domain_minute_a_b|{{c}}\\=*%:/?_{minute}")),
        (&[], about(&[("minute", "\u{e4}\u{20ac}")]), format!("domain_minute_\u{e4}\u{20ac}_{minute}")),
        (&[], about(&[("files", "files/a.pdf")]), format!("domain_files_files/*_{minute}")),
        (&[], about(&[("key2", "value2"), ("subkey2", "s")]), format!("domain_key2_value2_subkey2_s_{minute}")),
        (&[], about(&[("no", "rule")]).limit(5, 3, None), format!("domain_no_rule_{}", window(3600))),
        (&[], about(&[("hour", "v")]), format!("domain_hour_v_{}", window(3600))),
        (&[], about(&[("day", "v")]), format!("domain_day_v_{}", window(DAY_S))),
        (&[], about(&[("week", "v")]), format!("domain_week_v_{}", window(7 * DAY_S))),
        (&[], about(&[("month", "v")]), format!("domain_month_v_{}", window(30 * DAY_S))),
        (&[], about(&[("year", "v")]), format!("domain_year_v_{}", window(365 * DAY_S))),
    ];
    for (env, request, key) in table {
        let service = service(&server, env, now);
        assert!(!service.decide(request).expect("memcache decides").over_limit());
        let seen = keys(&server);
        assert_eq!(seen, [key.as_bytes()], "{}", String::from_utf8_lossy(&seen.concat()));
        assert_eq!(server.count(key), Some(1));
    }
}

#[test]
fn counter_lives_at_least_as_long_as_its_window() {
    let server = memcached().start();
    let start = now();
    let seconds = start.as_micros() / 1_000_000;
    for jitter in ["0", "300"] {
        let service = service(&server, &[("EXPIRATION_JITTER_MAX_SECONDS", jitter)], start);
        for (unit, length_s) in [("hour", 3600), ("month", 30 * DAY_S), ("year", 365 * DAY_S)] {
            server.command("flush_all", "OK");
            service.decide(&about(&[(unit, "v")])).expect("memcache decides");
            let expiries: Vec<i64> = server.keys().into_values().collect();
            let [expiry] = expiries[..] else { panic!("{unit}: {expiries:?}") };
            let expiry = u64::try_from(expiry).expect("it expires");
            let jitter_s: u64 = jitter.parse().unwrap();
            let window_end = (seconds / length_s + 1) * length_s;
            // The expiry counts from the Unix time of the charge, which is later than `start`.
            let latest = now().as_micros() / 1_000_000 + length_s + jitter_s + 5;
            assert!((window_end..=latest).contains(&expiry), "{unit}: {expiry} is not in {window_end}..={latest}");
        }
    }
}

#[test]
fn windows_follow_each_other_without_a_rest() {
    let server = memcached().start();
    let service = service(&server, &[], now());
    let request = about(&[("minute", "v")]);
    let statuses = || service.decide(&request).expect("memcache decides").statuses();
    let used_up = [(false, 2), (false, 1), (false, 0), (true, 0)];
    for _ in 0..3 {
        assert_eq!([(); 4].map(|()| statuses()[0]), used_up);
        service.advance_us(60_000_000);
    }
}

#[test]
fn longest_key_is_sent_unchanged_and_longer_ones_hashed() {
    let server = memcached().start();
    let now = now();
    let service = service(&server, &[], now);
    let year = now.as_micros() / 1_000_000 / (365 * DAY_S) * (365 * DAY_S);
    let rest = format!("domain_year__{year}").len();
    let long = |length: usize, last: &str| "v".repeat(length - rest - 1) + last;
    let mut expected = BTreeSet::new();
    for length in [MAX_KEY_BYTES - 1, MAX_KEY_BYTES, MAX_KEY_BYTES + 1, MAX_KEY_BYTES + 2, 4_000] {
        for last in ["a", "b"] {
            let value = long(length, last);
            let request = about(&[("year", &value)]);
            let statuses = [(); 4].map(|()| service.decide(&request).expect("memcache decides").statuses()[0]);
            assert_eq!(statuses, [(false, 2), (false, 1), (false, 0), (true, 0)], "{length} {last}");
            if length <= MAX_KEY_BYTES {
                expected.insert(format!("domain_year_{value}_{year}").into_bytes());
            }
        }
    }
    let seen: BTreeSet<_> = keys(&server).into_iter().collect();
    assert_eq!(seen.len(), 10);
    assert!(expected.is_subset(&seen), "{seen:?}");
    assert!(seen.iter().all(|key| key.len() <= MAX_KEY_BYTES));
}

#[test]
fn hostile_bytes_of_a_client_reach_no_command() {
    let values = [
        " ",
        "a b",
        "\r\n",
        "\n",
        "\r",
        "\0",
        "\t",
        "\u{7f}",
        "\u{85}",
        "\u{a0}",
        "\u{2028}",
        "\r\nflush_all\r\n",
        "\nflush_all\n",
        "x 0 0 1\r\n9\r\nset canary 0 0 1\r\n9\r\nget x",
        " 99\r\nshutdown\r\n",
        "x noreply",
        "x 5 noreply",
        "\u{1}\u{2}\u{1b}[2J",
        "%0d%0aflush_all%0d%0a",
    ];
    for format in ["tollkeeper", "ratelimit"] {
        let server = memcached().with(&["-A"]).start();
        let tollkeeper = counting_in(&server.address()).env("TOLLKEEPER_KEY_FORMAT", format).start();
        let client = client_of(&tollkeeper);
        server.command("flush_all", "OK");
        server.command("set canary 0 0 1\r\n7", "STORED");
        let flushes = server.stat("cmd_flush");
        for value in values {
            // Beyond the maximum length of a key, too.
            for value in [value.to_owned(), value.repeat(2 * MAX_KEY_BYTES)] {
                let seen = [(); 4].map(|()| call(&client, "user", &value));
                assert_eq!(seen, [(true, 2), (true, 1), (true, 0), (false, 0)].map(Ok), "{format} {value:.40?}");
            }
        }
        assert_eq!((server.count("canary"), server.stat("cmd_flush")), (Some(7), flushes));
        let counters: Vec<_> = server.keys().into_keys().filter(|key| !key.ends_with(b"probe")).collect();
        let is_plain = |key: &Vec<u8>| key.iter().all(|byte| *byte > b' ' && *byte != 0x7f);
        assert!(counters.iter().all(is_plain), "{counters:?}");
        assert_eq!(counters.len(), 1 + 2 * values.len(), "{format}");
    }
}

//! Keys of counters in Redis: a public format that never gives two counters one key.
//!
//! Clients choose the values. No two counters may share a key, all keys of a descriptor are in one slot that the path
//! alone decides, and the length of keys is bounded.

use std::collections::HashMap;

use proptest::prelude::*;
use smallvec::SmallVec;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::charge::Counter;
use tollkeeper::limit::counter_path::CounterPath;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Entry;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::rules::rule::set::hash_limit_identity;
use tollkeeper::store::client::redis::hash_slot::hash_slot;
use tollkeeper::store::redis::key::{MAX_PATH_BYTES, build_counter_keys, leases_key};

use kit::replica::Replica;
use kit::test_service::TestRequest;
use kit::tollkeeper::with_rules;
use kit::{read, redis, repository, wait_for};

/// Identity of a counter.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Identity {
    domain: String,
    /// Each key with its value, or with the pattern that values share.
    entries: Entries,
    algorithm: Algorithm,
    period_s: u64,
    calendar: bool,
    epoch: u64,
}

/// Keys with their values.
type Entries = Vec<(Vec<u8>, Value)>;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Value {
    Own(Vec<u8>),
    Shared(Vec<u8>),
}

fn limit(algorithm: Algorithm, unit: Unit, multiplier: u32, calendar_months: bool) -> Limit {
    let period = Period::new(unit, multiplier).expect("it is short enough");
    Limit::new(&LimitSpec { calendar_months, ..LimitSpec::new(algorithm, 5, period) })
        .expect("so plain a limit is valid")
}

/// The keys of limits with their epochs on the same path.
fn keys_of(prefix: &str, domain: &str, entries: &[(Vec<u8>, Value)], limits: &[(Limit, u64)]) -> Vec<Vec<u8>> {
    let mut shared: Vec<(usize, &[u8])> = Vec::new();
    let mut sent: Vec<Entry<'_>> = Vec::new();
    for (place, (key, value)) in entries.iter().enumerate() {
        let value: &[u8] = match value {
            Value::Own(value) => value,
            Value::Shared(pattern) => {
                shared.push((place, pattern));
                // The pattern replaces the value that was sent.
                b"}sent{"
            }
        };
        sent.push(Entry { key, value });
    }
    let counters: SmallVec<[Counter<'_>; 1]> = limits
        .iter()
        .map(|(limit, epoch)| Counter {
            limit,
            shadow: false,
            quota: false,
            tag: hash_limit_identity(limit, *epoch),
            epoch: *epoch,
        })
        .collect();
    let path = CounterPath { domain, entries: &sent, shared: &shared, candidate: None };
    build_counter_keys(prefix, &path, &counters).into_iter().map(|key| key.to_vec()).collect()
}

fn own(entries: &[(&str, &str)]) -> Entries {
    entries.iter().map(|(key, value)| (key.as_bytes().to_vec(), Value::Own(value.as_bytes().to_vec()))).collect()
}

/// An algorithm, a unit, how many of it, and whether months follow the calendar.
type Form = (Algorithm, Unit, u32, bool);
/// A prefix, a domain, keys with values, a form, an epoch; and the key.
type Example<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], Form, u64, &'a str);

const MINUTE: Form = (Algorithm::FixedWindow, Unit::Minute, 1, false);

#[test]
fn key_text_is_the_documented_form() {
    let long = "x".repeat(300);
    let digest = blake3_128(format!("shop|user={long}").as_bytes());
    let head = format!("shop|user={}", "x".repeat(200 - 34 - 10));
    let shortened = format!("tk1:{{{head}\\#{digest}}}:fixed_window:60s");
    let months = (Algorithm::FixedWindow, Unit::Month, 1, true);
    let quarters = (Algorithm::FixedWindow, Unit::Month, 3, true);
    let table: &[Example<'_>] = &[
        ("", "shop", &[("user", "anna")], MINUTE, 0, "tk1:{shop|user=anna}:fixed_window:60s"),
        ("", "shop", &[("user", "")], MINUTE, 0, "tk1:{shop|user=}:fixed_window:60s"),
        ("", "shop", &[("a", "b"), ("c", "d")], MINUTE, 0, "tk1:{shop|a=b|c=d}:fixed_window:60s"),
        ("", "shop", &[], MINUTE, 0, "tk1:{shop}:fixed_window:60s"),
        ("", "shop", &[("user", "anna")], MINUTE, 7, "tk1:{shop|user=anna}:fixed_window:60s:7"),
        ("", "s|h", &[("k=", "a|b=c")], MINUTE, 0, r"tk1:{s\7ch|k\3d=a\7cb\3dc}:fixed_window:60s"),
        ("", "{s}", &[("k", r"{}\")], MINUTE, 0, r"tk1:{\7bs\7d|k=\7b\7d\5c}:fixed_window:60s"),
        ("", "shop", &[("k", "a*:é_b\n")], MINUTE, 0, "tk1:{shop|k=a*:é_b\n}:fixed_window:60s"),
        ("app:a=b|", "shop", &[("k", "v")], MINUTE, 0, "app:a=b|tk1:{shop|k=v}:fixed_window:60s"),
        (r"{a}\", "shop", &[("k", "v")], MINUTE, 0, r"\7ba\7d\5ctk1:{shop|k=v}:fixed_window:60s"),
        ("", "shop", &[("user", &long)], MINUTE, 0, &shortened),
        ("", "s", &[("k", "v")], (Algorithm::TokenBucket, Unit::Hour, 1, false), 0, "tk1:{s|k=v}:token_bucket:3600s"),
        ("", "s", &[("k", "v")], (Algorithm::LeakyBucket, Unit::Second, 1, false), 0, "tk1:{s|k=v}:leaky_bucket:1s"),
        (
            "",
            "s",
            &[("k", "v")],
            (Algorithm::SlidingWindowLog, Unit::Minute, 5, false),
            0,
            "tk1:{s|k=v}:sliding_window_log:300s",
        ),
        (
            "",
            "s",
            &[("k", "v")],
            (Algorithm::SlidingWindowCounter, Unit::Day, 1, false),
            2,
            "tk1:{s|k=v}:sliding_window_counter:86400s:2",
        ),
        ("", "s", &[("k", "v")], months, 0, "tk1:{s|k=v}:fixed_window:1mo"),
        ("", "s", &[("k", "v")], quarters, 0, "tk1:{s|k=v}:fixed_window:3mo"),
        (
            "",
            "s",
            &[("k", "v")],
            (Algorithm::FixedWindow, Unit::Month, 1, false),
            0,
            "tk1:{s|k=v}:fixed_window:2592000s",
        ),
    ];
    for (prefix, domain, entries, (algorithm, unit, multiplier, calendar), epoch, expected) in table {
        let limit = limit(*algorithm, *unit, *multiplier, *calendar);
        let [key] = &keys_of(prefix, domain, &own(entries), &[(limit, *epoch)])[..] else {
            panic!("one limit, one key")
        };
        assert_eq!(String::from_utf8_lossy(key), *expected);
    }
    let pattern = (b"path".to_vec(), Value::Shared(b"/api/*|x".to_vec()));
    let minute = limit(MINUTE.0, MINUTE.1, MINUTE.2, MINUTE.3);
    let key = &keys_of("", "s", &[pattern], &[(minute, 0)])[0];
    assert_eq!(String::from_utf8_lossy(key), r"tk1:{s|path=\*/api/*\7cx}:fixed_window:60s");
}

fn blake3_128(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..32].to_owned()
}

#[test]
fn limits_share_a_key_exactly_if_they_share_a_counter() {
    let mut limits = Vec::new();
    for algorithm in Algorithm::ALL {
        for (unit, multiplier) in [
            (Unit::Second, 60),
            (Unit::Second, 3600),
            (Unit::Minute, 1),
            (Unit::Minute, 60),
            (Unit::Hour, 1),
            (Unit::Day, 7),
            (Unit::Week, 1),
            (Unit::Day, 30),
            (Unit::Month, 1),
            (Unit::Month, 2),
            (Unit::Year, 1),
        ] {
            for calendar in [false, true] {
                for epoch in [0, 1, 60, u64::MAX] {
                    limits.push((limit(algorithm, unit, multiplier, calendar), epoch));
                }
            }
        }
    }
    let keys = keys_of("", "shop", &own(&[("user", "anna")]), &limits);
    for (one, (limit, epoch)) in keys.iter().zip(&limits) {
        for (other, (other_limit, other_epoch)) in keys.iter().zip(&limits) {
            let same = hash_limit_identity(limit, *epoch) == hash_limit_identity(other_limit, *other_epoch);
            assert_eq!(one == other, same, "{limit:?} {epoch} and {other_limit:?} {other_epoch}");
        }
    }
}

/// Bytes with and without a meaning in keys, so that ambiguous keys are likely.
fn hostile(max_length: usize) -> impl Strategy<Value = Vec<u8>> {
    const BYTES: &[u8] = b"\\\\||=={}}*#:57bcda0_\xff\n";
    prop::collection::vec(prop::sample::select(BYTES), 0..max_length)
}

fn text(max_length: usize) -> impl Strategy<Value = String> {
    hostile(max_length).prop_map(|bytes| bytes.into_iter().filter(u8::is_ascii).map(char::from).collect())
}

fn entries(max_length: usize, max_bytes: usize) -> impl Strategy<Value = Entries> {
    let value = prop_oneof![hostile(max_bytes).prop_map(Value::Own), hostile(max_bytes).prop_map(Value::Shared)];
    prop::collection::vec((hostile(max_bytes), value), 0..max_length)
}

fn domain(max_length: usize) -> impl Strategy<Value = String> {
    text(max_length).prop_map(|text| if text.is_empty() { "d".to_owned() } else { text })
}

fn limits() -> impl Strategy<Value = (Limit, u64)> {
    let units = prop::sample::select(&[Unit::Second, Unit::Minute, Unit::Hour, Unit::Month][..]);
    let algorithms = prop::sample::select(&Algorithm::ALL[..]);
    (algorithms, units, 1_u32..4, any::<bool>(), 0_u64..3).prop_map(|(algorithm, unit, multiplier, calendar, epoch)| {
        (limit(algorithm, unit, multiplier, calendar), epoch)
    })
}

fn identity(domain: &str, entries: &[(Vec<u8>, Value)], (limit, epoch): &(Limit, u64)) -> Identity {
    Identity {
        domain: domain.to_owned(),
        entries: entries.to_vec(),
        algorithm: limit.algorithm(),
        period_s: limit.period_us() / 1_000_000,
        calendar: limit.follows_calendar_months(),
        epoch: *epoch,
    }
}

/// Reverses escapes; `None` for text that no key contains.
fn unescaped(mut text: &[u8], special: &[u8]) -> Option<Vec<u8>> {
    let mut plain = Vec::new();
    while let Some((first, rest)) = text.split_first() {
        text = rest;
        if *first != b'\\' {
            plain.push(*first);
            continue;
        }
        let (digits, rest) = text.split_at_checked(2)?;
        let byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        plain.push(special.contains(&byte).then_some(byte)?);
        text = rest;
    }
    Some(plain)
}

/// Parses a path of up to [`MAX_PATH_BYTES`] by the published format alone.
fn read_path(path: &[u8]) -> Option<(Vec<u8>, Entries)> {
    let special = br"\|={}";
    let mut parts = path.split(|byte| *byte == b'|');
    let domain = unescaped(parts.next()?, special)?;
    let entry = |part: &[u8]| {
        let equals = part.iter().position(|byte| *byte == b'=')?;
        let (key, value) = (unescaped(&part[..equals], special)?, &part[equals + 1..]);
        Some((
            key,
            match value.strip_prefix(br"\*") {
                Some(pattern) => Value::Shared(unescaped(pattern, special)?),
                None => Value::Own(unescaped(value, special)?),
            },
        ))
    };
    Some((domain, parts.map(entry).collect::<Option<_>>()?))
}

/// Hash tag of a key, and the text before and after it.
fn parted(key: &[u8]) -> (&[u8], &[u8], &[u8]) {
    let open = key.iter().position(|byte| *byte == b'{').expect("a key has a brace");
    let close = open + key[open..].iter().position(|byte| *byte == b'}').expect("and one that closes it");
    (&key[..open], &key[open + 1..close], &key[close + 1..])
}

/// Slot by the specification of Redis Cluster: CRC-16/XMODEM of the hash tag, bit by bit.
fn specified_slot(key: &[u8]) -> u16 {
    let open = key.iter().position(|byte| *byte == b'{').map(|open| open + 1);
    let tag = open.and_then(|open| {
        let length = key[open..].iter().position(|byte| *byte == b'}').filter(|length| *length > 0)?;
        Some(&key[open..open + length])
    });
    let crc = tag.unwrap_or(key).iter().fold(0_u16, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| (crc << 1) ^ if crc & 0x8000 == 0 { 0 } else { 0x1021 })
    });
    crc % 16_384
}

#[test]
fn hash_slots_match_redis_cluster() {
    // The check value of the CRC, and the examples of the specification.
    assert_eq!(hash_slot(b"123456789"), 0x31c3);
    assert_eq!(hash_slot(b"{user1000}.following"), hash_slot(b"user1000"));
    assert_eq!(hash_slot(b"foo{{bar}}zap"), hash_slot(b"{bar"));
    assert_eq!(hash_slot(b"foo{bar}{zap}"), hash_slot(b"bar"));
    assert_eq!(hash_slot(b"foo{}{bar}"), specified_slot(b"foo{}{bar}"));
}

proptest! {
    #[test]
    fn hash_slots_match_the_specification_for_any_bytes(key in prop_oneof![hostile(40), prop::collection::vec(any::<u8>(), 0..60)]) {
        prop_assert_eq!(hash_slot(&key), specified_slot(&key));
    }

    /// A key can be read back, so no two counters have the same.
    #[test]
    fn key_parses_back_to_its_counter(
        prefix in text(8),
        domain in domain(8),
        entries in entries(4, 8),
        limits in prop::collection::vec(limits(), 1..4),
    ) {
        for (key, limit) in keys_of(&prefix, &domain, &entries, &limits).iter().zip(&limits) {
            let (before, path, behind) = parted(key);
            let before = before.strip_suffix(b"tk1:").expect("the version stands before the path");
            prop_assert_eq!(unescaped(before, br"\{}").expect("the prefix can be read"), prefix.as_bytes());
            let (limit, epoch) = limit;
            let period = if limit.follows_calendar_months() {
                format!("{}mo", limit.period().multiplier())
            } else {
                format!("{}s", limit.period_us() / 1_000_000)
            };
            let epoch = if *epoch == 0 { String::new() } else { format!(":{epoch}") };
            prop_assert_eq!(String::from_utf8_lossy(behind), format!(":{}:{period}{epoch}", limit.algorithm()));
            prop_assume!(path.len() < MAX_PATH_BYTES);
            let (read_domain, read_entries) = read_path(path).expect("the path can be read");
            prop_assert_eq!(read_domain, domain.as_bytes());
            prop_assert_eq!(&read_entries, &entries);
        }
    }

    /// The same for paths of which only a digest is left: nearly equal ones, long and short, by their keys.
    #[test]
    fn different_counters_have_different_keys(
        domains in prop::collection::vec(domain(3), 2),
        paths in prop::collection::vec(entries(3, 4), 12),
        filler in 0_usize..230,
        limits in prop::collection::vec(limits(), 2),
    ) {
        let mut seen: HashMap<Vec<u8>, Identity> = HashMap::new();
        for domain in &domains {
            for path in &paths {
                let mut path = path.clone();
                path.insert(0, (b"filler".to_vec(), Value::Own(vec![b'x'; filler])));
                for (key, limit) in keys_of("", domain, &path, &limits).into_iter().zip(&limits) {
                    let identity = identity(domain, &path, limit);
                    let known = seen.entry(key).or_insert_with(|| identity.clone());
                    prop_assert_eq!(known, &identity);
                }
            }
        }
        // And the other way round: the same counter always has the same key.
        let counters: std::collections::HashSet<&Identity> = seen.values().collect();
        prop_assert_eq!(counters.len(), seen.len());
    }

    /// The slot depends on the path alone, not on the prefix or the values; the length is bounded.
    #[test]
    fn path_alone_decides_the_slot_and_keys_are_bounded(
        prefix in text(20),
        domain in domain(60),
        entries in entries(8, 120),
        limits in prop::collection::vec(limits(), 1..4),
    ) {
        let keys = keys_of(&prefix, &domain, &entries, &limits);
        let bare = keys_of("", &domain, &entries, &limits);
        let (_, path, _) = parted(&keys[0]);
        prop_assert!(path.len() <= MAX_PATH_BYTES);
        for (key, bare) in keys.iter().zip(&bare) {
            prop_assert_eq!(parted(key).1, path);
            prop_assert_eq!(parted(bare).1, path);
            prop_assert_eq!(specified_slot(key), specified_slot(path));
            prop_assert_eq!(hash_slot(key), specified_slot(key));
            // The record of leases has the slot of its counters, and is one for all of them.
            prop_assert_eq!(specified_slot(&leases_key(key)), specified_slot(path));
            prop_assert_eq!(leases_key(key), leases_key(&keys[0]));
            prop_assert!(!keys.contains(&leases_key(key).to_vec()));
            // The longest suffix: an algorithm, a period below 9 digits, and an epoch.
            prop_assert!(key.len() <= 3 * prefix.len() + "tk1:{}".len() + MAX_PATH_BYTES + 60, "{}", key.len());
        }
    }
}

#[test]
fn crafted_path_cannot_collide_with_a_shortened_one() {
    let long = own(&[("user", &"x".repeat(300))]);
    let minute = limit(MINUTE.0, MINUTE.1, MINUTE.2, MINUTE.3);
    let key = keys_of("", "shop", &long, &[(minute, 0)]).remove(0);
    let (_, path, _) = parted(&key);
    assert_eq!(path.len(), MAX_PATH_BYTES);
    // The very text, sent as a value.
    let value = String::from_utf8(path.strip_prefix(b"shop|user=").unwrap().to_vec()).unwrap();
    let forged = keys_of("", "shop", &own(&[("user", &value)]), &[(minute, 0)]).remove(0);
    assert_ne!(key, forged);
    // One byte less than is shortened, exactly as much, and one more.
    for (length, shortened) in [(189, false), (190, false), (191, true)] {
        let key = keys_of("", "shop", &own(&[("user", &"x".repeat(length))]), &[(minute, 0)]).remove(0);
        assert_eq!(parted(&key).1.contains(&b'#'), shortened, "{length}");
        assert_eq!(parted(&key).1.len(), (10 + length).min(MAX_PATH_BYTES));
    }
}

/// Rules of all algorithms, by key.
fn rules_of_all() -> String {
    let rule = |algorithm: Algorithm| {
        format!(
            "  - {{key: {algorithm}, rate_limit: {{unit: minute, requests_per_unit: 5, algorithm: {algorithm}}}}}\n"
        )
    };
    format!("domain: shop\ndescriptors:\n{}", Algorithm::ALL.map(rule).concat())
}

#[test]
fn documented_acl_is_sufficient() {
    let page = read(&repository("docs/redis.md"));
    let (_, scripts) = page.split_once("    ACL SETUSER tollkeeper on >password ").expect("the page has a user");
    let (scripts, _) = scripts.split_once("\n\n").expect("and says more");
    let plain = "-@all +incrby +expire +get ~*";
    assert!(page.contains(plain), "the page has another user for plain windows by now");
    for (rights, format, algorithms) in [
        (&*scripts.replace(['\\', '\n'], ""), "tollkeeper", &Algorithm::ALL[..]),
        (plain, "ratelimit", &[Algorithm::FixedWindow]),
    ] {
        let user = format!("tollkeeper on >secret {rights}");
        let server = redis::options().with(&[("user", "default off"), ("user", &user)]).start();
        let env = [("REDIS_AUTH", "tollkeeper:secret"), ("TOLLKEEPER_KEY_FORMAT", format)];
        let replica = Replica::new(&server.address(), env, Time::from_secs(1_783_513_296));
        replica.service.load([("rules.yaml", rules_of_all().as_str())]);
        for algorithm in algorithms {
            let question = TestRequest::new("shop").descriptor(&[(algorithm.name(), "v")]);
            // Charges, expired hits, refunds and peeks.
            let charges =
                [question.clone(), question.clone().hits(2), question.clone().refund(1), question.clone().hits(0)];
            for (step, charge) in charges.iter().cycle().take(30).enumerate() {
                replica.decide(charge).unwrap_or_else(|error| panic!("{algorithm}, step {step}: {error}"));
                replica.service.advance_us(13_700_000);
            }
        }
    }
}

#[test]
fn documented_acl_gives_no_errors_in_the_log() {
    let page = read(&repository("docs/redis.md"));
    let (_, rights) = page.split_once("    ACL SETUSER tollkeeper on >password ").expect("the page has a user");
    let (rights, _) = rights.split_once("\n\n").expect("and says more");
    let user = format!("tollkeeper on >secret {}", rights.replace(['\\', '\n'], ""));
    let server = redis::options().with(&[("user", &user)]).start();
    let tollkeeper =
        with_rules("domain: shop\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 10}}]")
            .env("REDIS_URL", format!("redis://tollkeeper:secret@{}", server.address()))
            .env("TOLLKEEPER_FLEET", "true")
            .env("TOLLKEEPER_STORE_TIMEOUT", "10s")
            .start();
    let body = r#"{"domain": "shop", "descriptors": [{"entries": [{"key": "k", "value": "v"}]}]}"#;
    wait_for("a decision", || (tollkeeper.post_json(body).status == 200).then_some(()));
    // The view of all replicas needs more, and says so.
    wait_for("the missing permissions", || tollkeeper.stderr().contains("set TOLLKEEPER_FLEET=false").then_some(()));
    let log = tollkeeper.stderr();
    assert!(!log.contains("level=error"), "{log}");
    let refused = server.query::<Vec<::redis::Value>>(&["ACL", "LOG"]);
    assert!(!format!("{refused:?}").contains("ping"), "{refused:?}");
}

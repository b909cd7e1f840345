//! Statsd counters after the recorded requests equal those of envoyproxy/ratelimit.
//!
//! The sink is a real one, TCP on loopback (a busy machine loses UDP packets), and each process is stopped so that its last counts are sent.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::Duration;

use tollkeeper::limit::period::Unit;

use super::{DIFFERENCES, Group, Recording, hour, http, recorded, redis, request_from_json};
use kit::statsd;
use kit::tollkeeper::Setup;

/// Prefix of all names of limits.
const OF_LIMITS: &str = "ratelimit.service.rate_limit.";

/// Result of [`exported_counters`] within one clock hour, because windows start on the hour.
fn exported_counters_in_one_hour(group: &Group, setup: impl Fn() -> Setup) -> BTreeMap<String, i64> {
    loop {
        let began_in = hour();
        let counters = exported_counters(group, setup());
        if hour() == began_in {
            return counters;
        }
    }
}

/// Replays all recorded requests against a process that exports to statsd; returns the exported counters of limits.
fn exported_counters(group: &Group, setup: Setup) -> BTreeMap<String, i64> {
    let statsd = statsd::tcp(0);
    let mut tollkeeper = setup
        .env("USE_STATSD", "true")
        .env("STATSD_HOST", "127.0.0.1")
        .env("STATSD_PORT", statsd.port().to_string())
        .env("STATSD_PROTOCOL", "tcp")
        .env("STATS_FLUSH_INTERVAL", "50ms")
        .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
        .start();
    for step in group.lines.iter().flat_map(|line| &line.steps) {
        http::post(tollkeeper.http_port(), "/json", step.request.clone()).send();
    }
    // A stop waits a second for the last report, which a busy machine may not send by then.
    let mut counters = BTreeMap::new();
    while counters.is_empty() || counters != statsd.counters() {
        counters = statsd.counters();
        thread::sleep(Duration::from_secs(1));
    }
    tollkeeper.signal("TERM");
    assert!(tollkeeper.wait().success(), "{}", tollkeeper.stderr());
    statsd.join();
    let counters = statsd.counters().into_iter();
    counters.filter_map(|(name, count)| Some((name.strip_prefix(OF_LIMITS)?.to_owned(), count))).collect()
}

/// The names that differ, with both values.
fn differences(group: &Group, ours: &BTreeMap<String, i64>) -> Vec<String> {
    let mut theirs: BTreeMap<String, i64> = group.lines.iter().flat_map(|line| line.stats.clone()).collect();
    // Of a domain that is no line's nothing was recorded; there each descriptor counts once.
    for request in group.lines.iter().flat_map(|line| &line.steps).map(|step| &step.request) {
        let request = request_from_json(request).expect("it was recorded in this form");
        if !request.domain.is_empty() && group.lines.iter().all(|line| line.name != request.domain) {
            *theirs.entry(format!("{}.domain_not_found", request.domain)).or_default() +=
                i64::try_from(request.descriptors.len()).expect("there are few");
        }
    }
    theirs.retain(|_, count| *count > 0);
    let names: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    let differing = names.into_iter().filter(|name| ours.get(*name) != theirs.get(*name));
    differing.map(|name| format!("{name}: ours {:?}, theirs {:?}", ours.get(name), theirs.get(name))).collect()
}

#[test]
fn recorded_counters_are_complete() {
    let stats = recorded().iter().flat_map(|group| &group.lines).map(|line| line.stats.len()).sum::<usize>();
    assert_eq!(stats, 1989);
}

#[test]
fn statsd_counters_match_under_ratelimit_key_format() {
    let server = redis::options().start();
    let mut wrong = Vec::new();
    for group in recorded() {
        let setup = || {
            server.query::<()>(&["FLUSHALL"]);
            let setup = group.setup().env("BACKEND_TYPE", "redis").env("REDIS_SOCKET_TYPE", "tcp");
            // A busy machine must not look like an unreachable Redis.
            let setup = setup.env("REDIS_URL", server.address()).env("TOLLKEEPER_STORE_TIMEOUT", "10s");
            setup.env("TOLLKEEPER_KEY_FORMAT", "ratelimit")
        };
        let found = differences(&group, &exported_counters_in_one_hour(&group, setup));
        let now_s = hour() * 3600;
        let sharing = group.lines.iter().filter(|recording| windows_share_a_key(recording, now_s));
        let names: BTreeSet<&str> = sharing.map(|recording| &*recording.name).collect();
        wrong.extend(found.into_iter().filter(|found| !names.contains(found.split('.').next().unwrap_or_default())));
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n"));
}

/// True if windows of two units of the domain begin at the same moment: in the first hour of a day, for example. The
/// key has only that moment, so limits of both units then share a counter.
fn windows_share_a_key(recording: &Recording, now_s: u64) -> bool {
    let of_rules = recording
        .rlconfig
        .iter()
        .filter_map(|line| Unit::from_name(line.split("unit=").nth(1)?.split_whitespace().next()?));
    let requests = recording.steps.iter().filter_map(|step| request_from_json(&step.request).ok());
    let sent = requests.flat_map(|request| request.descriptors).filter_map(|descriptor| descriptor.limit);
    let sent = sent.filter_map(|limit| Unit::from_protobuf_number(limit.unit));
    let lengths_s: BTreeSet<u64> = of_rules.chain(sent).map(|unit| unit.seconds()).collect();
    let starts_s: BTreeSet<u64> = lengths_s.iter().map(|length_s| now_s - now_s % length_s).collect();
    starts_s.len() < lengths_s.len()
}

#[test]
fn windows_share_keys_in_the_first_hour_of_a_day() {
    let sharing_at = |now_s| {
        let groups = recorded();
        let lines = groups.iter().flat_map(|group| &group.lines);
        lines.filter(|recording| windows_share_a_key(recording, now_s)).count()
    };
    // Noon and midnight of Wednesday the 8th of July 2026.
    assert_eq!(sharing_at(1_783_512_000), 0);
    let all: usize = recorded().iter().map(|group| group.lines.len()).sum();
    assert!((1..all).contains(&sharing_at(1_783_468_800)), "{}", sharing_at(1_783_468_800));
}

/// Only where an answer differs do counters: a hit on another counter is near or over at another time.
#[test]
fn statsd_counters_match_except_for_known_differences() {
    let mut wrong = Vec::new();
    for group in recorded() {
        let found = differences(&group, &exported_counters_in_one_hour(&group, || group.setup()));
        wrong.extend(found.into_iter().filter(|found| {
            let domain = found.split('.').next().unwrap_or_default();
            DIFFERENCES.iter().all(|(name, ..)| *name != domain)
        }));
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n"));
}

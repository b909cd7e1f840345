//! Counters in a real Redis on the same machine: CPU per decision, and latency.
//!
//! Rules have `on_store_error: deny` and reject nothing else, so any response other than OK is by policy. The bench
//! prints the number of these responses, which should be 0.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tollkeeper::base::pb;

use crate::frame;
use crate::load::{Pace, STREAMS, call_once_for_each, closed_loop, median, open_loop_latencies, percentile};
use crate::process::{self, MeasuredServer};
use kit::redis::cluster::Cluster;
use kit::redis::{Server, options};

const ROUND: Duration = Duration::from_secs(3);
const ROUNDS: usize = 5;
/// Concurrent calls of ten descriptors per connection.
///
/// With more, on two cores, responses arrive after the store's timeout, and policy decides.
const FEW_STREAMS: usize = 8;

pub(crate) const RULES: &str = "domain: bench
defaults: {on_store_error: deny}
descriptors:
  - {key: fixed, rate_limit: {unit: day, requests_per_unit: 4000000000}}
  - key: token
    rate_limit: {unit: day, requests_per_unit: 10, bucket_size: 4000000000, algorithm: token_bucket}
  - {key: strict_minute, rate_limit: {unit: minute, requests_per_unit: 1000, algorithm: sliding_window_counter}}
  - key: eventual_minute
    rate_limit:
      {unit: minute, requests_per_unit: 1000, algorithm: sliding_window_counter, consistency: eventual}
  - {key: eventual_fixed, rate_limit: {unit: day, requests_per_unit: 4000000000, consistency: eventual}}
  - key: eventual_token
    rate_limit:
      {unit: day, requests_per_unit: 4000000000, algorithm: token_bucket, consistency: eventual}
";

/// Name, label in the table, number of keys, and a function that builds a key's request.
type Situation = (&'static str, &'static str, u64, fn(u64) -> Bytes);

/// All situations with Redis.
pub(crate) async fn all(selected: impl Fn(&str) -> bool) {
    let empty = MeasuredServer::empty_handler();
    let server = options().start();
    let single = MeasuredServer::redis(&server);
    let tollkeeper = MeasuredServer::start(process::tollkeeper(RULES).env("REDIS_URL", server.address()));
    let table: [Situation; 7] = [
        ("redis-keys", "redis, 100 000 keys, fixed", 100_000, |key| one("fixed", key)),
        ("redis-keys", "redis, 100 000 keys, token", 100_000, |key| one("token", key)),
        ("redis-hot", "redis, one hot key, fixed", 1, |key| one("fixed", key)),
        ("redis-hot", "redis, one hot key, token", 1, |key| one("token", key)),
        ("eventual", "eventual, 100 000 keys, fixed", 100_000, |key| one("eventual_fixed", key)),
        ("eventual", "eventual, one hot key, fixed", 1, |key| one("eventual_fixed", key)),
        ("eventual", "eventual, one hot key, token", 1, |key| one("eventual_token", key)),
    ];
    for (name, label, keys, request) in table {
        if selected(name) {
            let calls_every_time = keys > 1 && name != "eventual";
            let streams = if calls_every_time { STREAMS / 2 } else { STREAMS };
            compare(label, (&tollkeeper, &single, &empty), keys, (streams, request)).await;
        }
    }
    if selected("eventual-calls") {
        calls_per_thousand(&tollkeeper, &server).await;
    }
    if selected("eventual-flood") {
        flood(&tollkeeper).await;
    }
    if selected("redis-open") {
        open_loop(&tollkeeper, &empty).await;
    }
    if selected("redis-ten") {
        ten_descriptors(&empty).await;
    }
}

async fn compare(
    label: &str,
    (tollkeeper, redis, empty): (&MeasuredServer, &MeasuredServer, &MeasuredServer),
    keys: u64,
    (streams, request): (usize, fn(u64) -> Bytes),
) {
    closed_loop(tollkeeper, keys, request, (streams, ROUND)).await;
    let (mut ratios, mut ours, mut floors, mut rates, mut theirs) = (vec![], vec![], vec![], vec![], vec![]);
    let mut rejected = 0;
    for _ in 0..ROUNDS {
        let floor = closed_loop(empty, keys, request, (streams, ROUND)).await;
        let redis_cpu = redis.cpu();
        let our = closed_loop(tollkeeper, keys, request, (streams, ROUND)).await;
        let calls = our.calls_per_s * ROUND.as_secs_f64();
        theirs.push((redis.cpu() - redis_cpu).as_secs_f64() * 1e6 / calls);
        ratios.push(our.us_per_call / floor.us_per_call);
        ours.push(our.us_per_call);
        floors.push(floor.us_per_call);
        rates.push(our.calls_per_s);
        rejected += our.rejected;
    }
    println!(
        "{label:<34} {:>10.2} {:>10.2} {:>7.3} {:>9.0}   redis {:.2} us/call, {rejected} by policy",
        median(&mut ours),
        median(&mut floors),
        median(&mut ratios),
        median(&mut rates),
        median(&mut theirs),
    );
}

/// Label of a key distribution, and a request for a key from an even random number.
type KeyDistribution = (&'static str, fn(u64) -> Bytes);

/// Calls to Redis for keys of an eventual rule, chosen evenly and by Zipf's law.
async fn calls_per_thousand(tollkeeper: &MeasuredServer, redis: &Server) {
    let calls = || -> u64 {
        let counts = redis.command_counts();
        counts.iter().filter(|(command, _)| command.starts_with("eval")).map(|(_, calls)| calls).sum()
    };
    let table: [KeyDistribution; 3] = [
        ("10 000 keys, even", |random| one("eventual_minute", random % KEYS as u64)),
        ("10 000 keys, Zipf", |random| one("eventual_minute", 1_000_000 + zipf(random))),
        ("10 000 keys, Zipf, strict", |random| one("strict_minute", 1_000_000 + zipf(random))),
    ];
    for (label, request) in table {
        let before = calls();
        let cost = closed_loop(tollkeeper, RANDOM_RANGE, request, (STREAMS, ROUND * 3)).await;
        let decisions = cost.calls_per_s * (ROUND * 3).as_secs_f64();
        println!(
            "{label}: {:.0} decisions/s, {:.1} % rejected, {:.1} calls to Redis per 1000 decisions",
            cost.calls_per_s,
            100.0 * cost.rejected as f64 / decisions,
            1000.0 * (calls() - before) as f64 / decisions
        );
    }
}

const KEYS: usize = 10_000;
const RANDOM_RANGE: u64 = 1 << 20;

/// One of the keys by Zipf's law with the exponent 1, from an even random.
fn zipf(random: u64) -> u64 {
    static UP_TO: LazyLock<Vec<f64>> = LazyLock::new(|| {
        let mut sum = 0.0;
        (1..=KEYS)
            .map(|rank| {
                sum += 1.0 / rank as f64;
                sum
            })
            .collect()
    });
    let percentile = random as f64 / RANDOM_RANGE as f64 * UP_TO[KEYS - 1];
    UP_TO.partition_point(|up_to| *up_to <= percentile) as u64
}

/// Ten million keys of an eventual rule, with one call each.
async fn flood(tollkeeper: &MeasuredServer) {
    const KEYS: u64 = 10_000_000;
    for part in 1..=5 {
        let began = Instant::now();
        call_once_for_each(tollkeeper, KEYS / 5 * (part - 1)..KEYS / 5 * part, |key| one("eventual_fixed", key)).await;
        println!(
            "flood: {} million keys, {:.0} calls/s, {:.1} MB resident",
            part * 2,
            KEYS as f64 / 5.0 / began.elapsed().as_secs_f64(),
            tollkeeper.resident_bytes() as f64 / 1e6
        );
    }
}

/// Latency of calls at half of capacity, beside the empty handler at the same rate.
async fn open_loop(tollkeeper: &MeasuredServer, empty: &MeasuredServer) {
    let request: fn(u64) -> Bytes = |key| one("fixed", key);
    let capacity = closed_loop(tollkeeper, 10_000, request, (STREAMS, ROUND)).await.calls_per_s;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some tens of thousands")]
    let rate = (capacity / 2.0) as u32;
    for round in 1..=3 {
        let floor = open_loop_latencies(empty, rate, Duration::from_secs(5), Pace::Sleep, request).await;
        let ours = open_loop_latencies(tollkeeper, rate, Duration::from_secs(5), Pace::Sleep, request).await;
        for (who, latencies) in [("empty handler", &floor), ("redis", &ours)] {
            println!(
                "open loop {round}, {rate} calls/s, {who:<13}: p50 {} us, p99 {} us, p99.9 {} us",
                percentile(latencies, 500),
                percentile(latencies, 990),
                percentile(latencies, 999)
            );
        }
    }
}

/// Ten descriptors a request over a cluster of three.
async fn ten_descriptors(empty: &MeasuredServer) {
    let cluster = Cluster::start_with(&options(), 0);
    let setup = process::tollkeeper(RULES).env("REDIS_TYPE", "cluster");
    let tollkeeper = MeasuredServer::start(setup.env("REDIS_URL", cluster.addresses().join(",")));
    let node = MeasuredServer::redis(cluster.node(0));
    let ten: fn(u64) -> Bytes = |key| many("fixed", key, 10);
    compare("redis cluster, 10 descriptors", (&tollkeeper, &node, empty), 100_000, (FEW_STREAMS, ten)).await;
    for round in 1..=3 {
        let single =
            open_loop_latencies(&tollkeeper, 200, Duration::from_secs(5), Pace::Sleep, |key| one("fixed", key)).await;
        let tenfold = open_loop_latencies(&tollkeeper, 200, Duration::from_secs(5), Pace::Sleep, ten).await;
        println!(
            "cluster {round}, 200 calls/s: 1 descriptor p50 {} us, 10 descriptors p50 {} us, ratio {:.2}",
            percentile(&single, 500),
            percentile(&tenfold, 500),
            percentile(&tenfold, 500) as f64 / percentile(&single, 500) as f64
        );
    }
}

pub(crate) fn one(rule: &str, key: u64) -> Bytes {
    many(rule, key, 1)
}

pub(crate) fn many(rule: &str, key: u64, count: u64) -> Bytes {
    let descriptor = |place: u64| {
        let value = format!("user-{:08}-{place}", key).into();
        let entry = pb::rate_limit_descriptor::Entry { key: rule.to_owned().into(), value };
        pb::RateLimitDescriptor { entries: vec![entry], ..Default::default() }
    };
    frame(&pb::RateLimitRequest {
        domain: "bench".to_owned(),
        descriptors: (0..count).map(descriptor).collect(),
        hits_addend: 0,
    })
}

//! Comparison of the tables in `docs/reference/metrics.md` with running processes: each metric, its type, its labels.

use std::collections::{BTreeMap, BTreeSet};

use super::{SHOP, Scrape, Watched, redis, send_traffic, wait_for, with_rules};
use kit::memcached::memcached;
use kit::tollkeeper::without_rules;
use kit::{read, repository};

/// Metrics of certificates, which these processes do not export.
const NOT_SCRAPED: [&str; 3] = [
    "tollkeeper_blocked_requests_total",
    "tollkeeper_certificate_not_after_seconds",
    "tollkeeper_level_webhook_requests_total",
];

/// Type and labels by name.
type Metrics = BTreeMap<String, (String, BTreeSet<String>)>;

/// Rows of the tables whose first column is a metric.
fn documented() -> Metrics {
    let page = read(&repository("docs/reference/metrics.md"));
    let mut metrics = Metrics::new();
    for line in page.lines().filter(|line| {
        line.starts_with("| `ratelimit_") || line.starts_with("| `tollkeeper_") || line.starts_with("| `process_")
    }) {
        let columns: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [series, kind, meaning] = columns[..] else { panic!("`name{{labels}}`, type and meaning: {line}") };
        assert!(!meaning.is_empty(), "{line}");
        let series = series.trim_matches('`').trim_end_matches('}');
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels = labels.split(',').filter(|label| !label.is_empty()).map(generic).collect();
        assert!(metrics.insert(name.to_owned(), (kind.to_owned(), labels)).is_none(), "{name} has two rows");
    }
    metrics
}

/// Removes the number of `key1...` and so on.
fn generic(label: &str) -> String {
    label.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.').to_owned()
}

/// Families of a scrape with their labels, without `le`.
fn scraped(scrape: &Scrape) -> Metrics {
    let labels = |family: &str, kind: &str| -> BTreeSet<String> {
        let of_family = |name: &&String| {
            let own = name.split('{').next().unwrap_or_default();
            own == family || kind == "histogram" && own.strip_prefix(family) == Some("_bucket")
        };
        let names = scrape.samples.keys().filter(of_family);
        names.flat_map(|name| name.split("=\"").map(last_word).collect::<Vec<_>>()).collect()
    };
    let without = |mut labels: BTreeSet<String>| {
        labels.remove("le");
        labels.remove("");
        labels
    };
    let types = scrape.types.iter();
    types.map(|(name, kind)| (name.clone(), (kind.clone(), without(labels(name, kind))))).collect()
}

/// Name of the label at the end of a piece before `="`; empty for the last piece.
fn last_word(piece: &str) -> String {
    let is_end = piece.ends_with('}') || !piece.contains(['{', ',']);
    if is_end { String::new() } else { generic(piece.rsplit(['{', ',']).next().unwrap_or_default()) }
}

/// Rules that make Redis count everything.
const REDIS: &str = "\
domain: shop
descriptors:
  - {key: strict, rate_limit: {unit: day, requests_per_unit: 2, count_rejected: false}}
  - {key: second, rate_limit: {unit: second, requests_per_unit: 2}}
  - {key: shared, rate_limit: {unit: day, requests_per_unit: 1000, consistency: eventual}}
  - {key: banned, rate_limit: {unit: second, requests_per_unit: 0, ban: 1h}}
  - {key: stream, rate_limit: {concurrent: 1, max_duration: 1s}}
  - {key: cost, rate_limit: {unit: day, requests_per_unit: 100, reservations: 1s}}
";

/// Metrics of processes with the memory store, with Redis, with memcached and with rules over xDS.
fn all() -> Metrics {
    // Spans are counted if tracing is on, even if none is sampled.
    let traced =
        [("TRACING_ENABLED", "true"), ("TRACING_SAMPLING_RATE", "0"), ("TOLLKEEPER_DECISION_LOG", "file:/dev/null")];
    let exported = [("OTEL_METRICS_EXPORTER", "otlp"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")];
    let traced = [&traced[..], &exported].concat();
    let memory = Watched::start(traced.iter().fold(with_rules(SHOP), |setup, (name, value)| setup.env(name, value)));
    send_traffic(&memory.server);
    let (main, per_second) = (redis::options().start(), redis::options().start());
    let setup = with_rules(REDIS)
        .env("REDIS_URL", main.address())
        .env("REDIS_SOCKET_TYPE", "tcp")
        .env("REDIS_PERSECOND", "true")
        .env("REDIS_PERSECOND_URL", per_second.address())
        .env("REDIS_PERSECOND_SOCKET_TYPE", "tcp")
        .env("TOLLKEEPER_STORE_TIMEOUT", "10s");
    let shared = Watched::start(setup);
    // A cost above its estimate, and an estimate that nobody settles: it is over before slot c is.
    for (slot, hits) in [("a", 1), ("a,release=?", 3), ("b", 1)] {
        shared.admits("shop", &format!("cost=x,slot={slot}"), hits);
    }
    // A slot that is released, a release before its request, and a slot that nobody releases.
    for slot in ["a", "a,release=?", "b,release=?", "b", "c"] {
        shared.admits("shop", &format!("stream=x,slot={slot}"), 1);
    }
    wait_for("a share and a rejection from memory", || {
        for descriptor in ["strict=x", "second=x", "shared=x", "banned=x"] {
            shared.admits("shop", descriptor, 1);
        }
        shared.admits("shop", "stream=x,slot=d", 1);
        let found = shared.scrape();
        let lacks = [
            "ratelimit_service_rate_limit_over_limit_with_local_cache",
            "tollkeeper_rule_overshoot_hits_total",
            "tollkeeper_rule_bans_total",
            "tollkeeper_rule_banned_total",
            "tollkeeper_rule_seats_expired_total",
            "tollkeeper_rule_late_requests_total",
            "tollkeeper_rule_reservations_excess_hits_total",
        ];
        lacks.iter().all(|name| found.types.contains_key(*name)).then_some(())
    });
    shared.admits("shop", "cost=x,slot=b,release=?", 1);
    let scrape = shared.scrape();
    let xds = [
        ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
        ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"),
        ("TOLLKEEPER_RULE_DEFAULTS", "/nonexistent"),
    ];
    // Without a control plane, and without the file.
    let xds = [("TOLLKEEPER_RLQS", "true")].iter().chain(&xds);
    let xds = xds.fold(without_rules(), |setup, (name, value)| setup.env(name, value));
    let xds = Watched::start(xds.env("CONFIG_GRPC_XDS_SERVER_URL", "127.0.0.1:1"));
    let servers = memcached().start();
    let setup = with_rules(SHOP).env("BACKEND_TYPE", "memcache").env("MEMCACHE_HOST_PORT", servers.address());
    let memcache = Watched::start(setup);
    // Neither the metadata server nor Redis answers.
    let setup = with_rules(SHOP).env("REDIS_URL", "127.0.0.1:1").env("TOLLKEEPER_REDIS_IDENTITY", "google");
    let identity = Watched::start(setup.env("GCE_METADATA_HOST", "127.0.0.1:1"));
    let mut all = scraped(&memory.scrape());
    for (name, (kind, labels)) in
        [scrape, xds.scrape(), memcache.scrape(), of_a_region(), identity.scrape()].iter().flat_map(scraped)
    {
        let known = all.entry(name).or_insert((kind, BTreeSet::new()));
        known.1.extend(labels);
    }
    all
}

/// Metrics of a process that was granted hits of a limit of two regions.
fn of_a_region() -> Scrape {
    const GLOBAL: &str = "\
domain: shop
plans: {free: {unit: day, requests_per_unit: 1}}
tables: {customers: {redis: customers}}
descriptors:
  - {key: worldwide, rate_limit: {unit: day, requests_per_unit: 1000, scope: global}}
";
    let (region, global) = (redis::options().start(), redis::options().start());
    let setup = with_rules(GLOBAL)
        .env("REDIS_URL", region.address())
        .env("REDIS_SOCKET_TYPE", "tcp")
        .env("TOLLKEEPER_REGION", "eu")
        .env("TOLLKEEPER_REGIONS", "eu,us")
        .env("TOLLKEEPER_GLOBAL_REDIS_URL", global.address());
    let process = Watched::start(setup);
    wait_for("a grant", || {
        process.admits("shop", "worldwide=x", 10);
        let found = process.scrape();
        let admitted = |from: &str| found.count(&format!("tollkeeper_region_hits_total{{from=\"{from}\"}}"));
        let is_granted = admitted("reserve") > 0 && admitted("grant") > 0;
        Some(found).filter(|found| is_granted && found.types.contains_key("tollkeeper_grant_age_seconds"))
    })
}

#[test]
fn docs_list_every_metric_with_type_and_labels() {
    let (page, scraped) = (documented(), all());
    assert!(page.len() > 40, "{page:#?}");
    let names: BTreeSet<&String> = page.keys().chain(scraped.keys()).collect();
    let wrong: Vec<String> = names
        .into_iter()
        .filter(|name| page.get(*name) != scraped.get(*name))
        .filter(|name| scraped.contains_key(*name) || !NOT_SCRAPED.contains(&name.as_str()))
        .map(|name| format!("{name}: the page has {:?}, processes have {:?}", page.get(name), scraped.get(name)))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

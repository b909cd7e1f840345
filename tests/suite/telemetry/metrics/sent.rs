//! Exported metrics: statsd over TCP and UDP, DogStatsD, and an absent server.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use tollkeeper::telemetry::metrics::statsd::{StatsdEncoder, StatsdFormat};
use tollkeeper::telemetry::metrics::{Family, MetricKind, MetricValue, Series};

use super::{SHOP, Setup, Watched, send_traffic, statsd, wait_for, with_prometheus, with_rules};
use kit::port::Port;

/// Sends metrics to a port of 127.0.0.1 with a short interval.
fn sending(setup: Setup, port: u16) -> Setup {
    let setup = setup.env("STATSD_HOST", "127.0.0.1").env("STATSD_PORT", port.to_string());
    setup.env("STATS_FLUSH_INTERVAL", "20ms").env("TOLLKEEPER_DRAIN_PERIOD", "0s")
}

/// Expected counters of [`send_traffic`], in part.
const COUNTERS: [(&str, i64); 9] = [
    ("ratelimit.service.rate_limit.shop.user.total_hits", 5),
    ("ratelimit.service.rate_limit.shop.user.within_limit", 3),
    ("ratelimit.service.rate_limit.shop.user.over_limit", 2),
    ("ratelimit.service.rate_limit.shop.user.total_negative_hits", 2),
    ("ratelimit.service.rate_limit.shop.region.team.user.total_hits", 1),
    ("ratelimit.service.rate_limit.nowhere.domain_not_found", 2),
    ("ratelimit.service.call.should_rate_limit.service_error", 1),
    ("ratelimit.service.config_load_success", 1),
    ("ratelimit_server.ShouldRateLimit.total_requests", 20),
];

fn assert_counters(found: &BTreeMap<String, i64>, tags: &str) {
    for (name, count) in COUNTERS {
        assert_eq!(found.get(&format!("{name}{tags}")), Some(&count), "{name}{tags} in {found:#?}");
    }
    assert!(found.values().all(|count| *count > 0), "what has not moved is not sent: {found:?}");
    assert!(found.keys().all(|name| name.starts_with("ratelimit")), "only what has a name in statsd: {found:?}");
}

#[test]
fn statsd_over_tcp_gets_deltas_that_add_up() {
    let statsd = statsd::tcp(0);
    let mut server = sending(with_rules(SHOP), statsd.port()).env("EXTRA_TAGS", "zone:eu,env:prod").start();
    send_traffic(&server);
    let tags = ".__env=prod.__zone=eu";
    let requests = format!("ratelimit_server.ShouldRateLimit.total_requests{tags}");
    // Metrics are sent before the shutdown too.
    wait_for("the first counters", || statsd.counters().contains_key(&requests).then_some(()));
    server.signal("TERM");
    assert!(server.wait().success());
    wait_for("the last counters", || (statsd.counters().get(&requests) == Some(&20)).then_some(()));
    assert_counters(&statsd.counters(), tags);
    let (mut times, mut rates) = (0, 0.0);
    for line in statsd.lines() {
        let (name, value) = line.split_once(':').expect("a name and a value");
        if let Some(value) = value.split_once("|ms").filter(|_| name.contains("ShouldRateLimit")) {
            assert!(value.0.parse::<f64>().is_ok_and(|ms| ms > 0.0 && ms <= 10_000.0), "{line}");
            times += 1;
            rates += value.1.strip_prefix("|@").map_or(1.0, |rate| 1.0 / rate.parse::<f64>().expect("a rate"));
        }
    }
    assert!(times > 0 && (rates - 20.0).abs() < 0.01, "{times} lines stand for {rates} calls");
}

#[test]
fn dogstatsd_gets_tags_and_rewritten_names() {
    let statsd = statsd::udp();
    let mut server = sending(with_rules(SHOP), statsd.port())
        .env("USE_DOG_STATSD", "true")
        .env("EXTRA_TAGS", "env:prod")
        .env("USE_DOG_STATSD_MOGRIFIERS", "LIMITS,LATER")
        .env("DOG_STATSD_MOGRIFIER_LIMITS_PATTERN", r"^(?i)RATELIMIT\.service\.rate_limit\.(.*)\.(.*)\.(\w+)$")
        .env("DOG_STATSD_MOGRIFIER_LIMITS_NAME", "ratelimit.service.rate_limit.$3")
        .env("DOG_STATSD_MOGRIFIER_LIMITS_TAGS", "domain:$1,descriptor:$2")
        .env("DOG_STATSD_MOGRIFIER_LATER_PATTERN", "total_hits|total_requests")
        .env("DOG_STATSD_MOGRIFIER_LATER_NAME", "later")
        .start();
    send_traffic(&server);
    server.signal("TERM");
    assert!(server.wait().success());
    statsd.flush();
    let found = statsd.counters();
    for (name, count) in [
        ("ratelimit.service.rate_limit.total_hits|#domain:shop,descriptor:user,env:prod", 5),
        ("ratelimit.service.rate_limit.over_limit|#domain:shop,descriptor:user,env:prod", 2),
        ("ratelimit.service.rate_limit.within_limit|#domain:shop.region.team,descriptor:user,env:prod", 1),
        ("ratelimit.service.config_load_success|#env:prod", 1),
        // The first match applies.
        ("later|#env:prod", 21),
    ] {
        assert_eq!(found.get(name), Some(&count), "{name} in {found:#?}");
    }
}

#[test]
fn all_exporters_can_run_together() {
    let statsd = statsd::udp();
    let setup = with_rules(SHOP).env("USE_STATSD", "true").env("STATSD_PROTOCOL", "udp").env("USE_DOG_STATSD", "true");
    let (setup, port) = with_prometheus(sending(setup, statsd.port()).env("EXTRA_TAGS", "env:prod"));
    let mut watched = Watched { server: setup.start(), port };
    send_traffic(&watched.server);
    let native = "ratelimit_service_rate_limit_total_hits{domain=\"shop\",env=\"prod\",key1=\"user\"}";
    assert_eq!(watched.scrape().count(native), 5);
    watched.server.signal("TERM");
    assert!(watched.server.wait().success());
    statsd.flush();
    let found = statsd.counters();
    let user = "ratelimit.service.rate_limit.shop.user.total_hits";
    assert_eq!([".__env=prod", "|#env:prod"].map(|tags| found.get(&format!("{user}{tags}"))), [Some(&5), Some(&5)]);
}

/// Number of log lines about statsd.
fn statsd_warnings(stderr: &str) -> usize {
    stderr.lines().filter(|line| line.contains("metrics not sent: ")).count()
}

#[test]
fn absent_statsd_server_gets_all_deltas_later() {
    let port = Port::reserve();
    let mut server = sending(with_rules(SHOP), port.number()).start();
    send_traffic(&server);
    wait_for("a warning in the log", || (statsd_warnings(&server.stderr()) > 0).then_some(()));
    assert_eq!(server.healthcheck(), 200);
    let statsd = statsd::tcp(port.number());
    let requests = "ratelimit_server.ShouldRateLimit.total_requests";
    wait_for("what was counted meanwhile", || (statsd.counters().get(requests) == Some(&20)).then_some(()));
    server.signal("TERM");
    assert!(server.wait().success());
    assert_counters(&statsd.counters(), "");
    assert_eq!(statsd_warnings(&server.stderr()), 1, "the log is not throttled: {}", server.stderr());
}

#[test]
fn unresolvable_statsd_host_does_no_harm() {
    for protocol in ["udp", "tcp"] {
        let setup = sending(with_rules(SHOP), 8125).env("STATSD_HOST", "statsd.invalid");
        let mut server = setup.env("STATSD_PROTOCOL", protocol).start();
        send_traffic(&server);
        wait_for("a warning in the log", || (statsd_warnings(&server.stderr()) > 0).then_some(()));
        assert_eq!(server.healthcheck(), 200);
        server.signal("TERM");
        assert!(server.wait().success(), "{}", server.stderr());
    }
}

#[test]
fn statsd_server_that_does_not_read_does_no_harm() {
    // The server accepts connections and never reads.
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    // Long lines fill the socket buffers soon.
    let tag = format!("pad:{}", "x".repeat(60_000));
    let setup = sending(with_rules(SHOP), port).env("STATS_FLUSH_INTERVAL", "10ms").env("EXTRA_TAGS", tag);
    let mut watched = Watched::start(setup);
    send_traffic(&watched.server);
    let mut sent = 0;
    wait_for("a warning in the log", || {
        for _ in 0..20 {
            watched.admits("shop", "idle=x", 1);
            sent += 1;
        }
        (statsd_warnings(&watched.server.stderr()) > 0).then_some(())
    });
    let idle = "ratelimit.service.rate_limit.shop.idle.total_hits";
    let stats = kit::http::get(watched.server.debug_port(), "/stats").send().text();
    assert!(stats.contains(&format!("{idle}: {sent}\n")), "{sent} hits: {stats}");
    watched.server.signal("TERM");
    assert!(watched.server.wait().success(), "{}", watched.server.stderr());
    drop(listener);
}

#[test]
fn separators_in_tags_of_dogstatsd_are_replaced() {
    let tags = vec![("env".to_owned(), "a,b|c".to_owned())];
    let mut encoder = StatsdEncoder::new(StatsdFormat::DogStatsd(Vec::new()), tags);
    let series = Series::new(MetricValue::Gauge(1.0)).with_statsd_name("x".to_owned());
    encoder.add_family(&Family::new("x", MetricKind::Gauge, "Help.").add_series(series));
    let mut sent = String::new();
    let report = encoder.send_report(|packet| {
        sent.push_str(packet);
        Ok(())
    });
    report.expect("it is sent");
    assert_eq!(sent, "x:1|g|#env:a_b_c\n");
}

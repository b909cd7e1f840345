//! Redis of the stream: where it is, how it is reached, and errors that name the setting to change.

use tempfile::tempdir;

use super::NOON;
use kit::fixtures::shop_request;
use kit::grpc::{Client, rate_limit_request};
use kit::redis::certificates::Certificates;
use kit::redis::sentinels::{NAME, Sentinels};
use kit::redis::{Server, options};
use kit::scrape::{scrape, with_prometheus};
use kit::tcp_proxy::{Mode, TcpProxy};
use kit::test_service::TestService;
use kit::tollkeeper::{ExitResult, Setup, with_rules};
use kit::wait_for;

const RULES: &str = "domain: shop\ndescriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 2}}]\n";
const SINK: (&str, &str) = ("TOLLKEEPER_DECISION_LOG", "redis:decisions");
const URL: &str = "TOLLKEEPER_DECISION_LOG_REDIS_URL";
const LOST: &str = "records of the decision log are lost";

/// A service with counters in memory that logs all decisions to a stream.
fn service(env: &[(&str, &str)]) -> TestService {
    let own = [SINK, ("TOLLKEEPER_DECISION_LOG_WHEN", "all")];
    let service = TestService::new(own.into_iter().chain(env.iter().copied()), NOON);
    service.load([("rules.yaml", RULES)]);
    service
}

/// Logs ten decisions with these settings, and returns the length of the stream.
fn entries(env: &[(&str, &str)], server: &Server) -> u64 {
    let service = service(env);
    (0..10).for_each(|_| drop(service.decide(&shop_request("user=ann")).unwrap()));
    service.finish_log();
    server.query(&["XLEN", "decisions"])
}

fn process(env: &[(&str, &str)]) -> Setup {
    let setup = with_rules(RULES)
        .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
        .env("TOLLKEEPER_DECISION_LOG_WHEN", "all")
        .env(SINK.0, SINK.1);
    env.iter().fold(setup, |setup, (name, value)| setup.env(name, *value))
}

/// Messages of a process that makes decisions until records are lost, and then stops.
fn messages(env: &[(&str, &str)]) -> String {
    let (setup, prometheus) = with_prometheus(process(env));
    let mut server = setup.start();
    let client = Client::connect(server.grpc_port());
    wait_for("several losses", || {
        client.call(&rate_limit_request("shop", &[("user", "ann")])).unwrap();
        let records = scrape(prometheus.number()).with_prefix("tollkeeper_decision_log_records_total{");
        let failed = records.iter().find(|record| record.contains("\"failed\"")).unwrap();
        let failed: f64 = failed.rsplit_once(' ').unwrap().1.parse().unwrap();
        (failed >= 5.0).then_some(())
    });
    server.signal("TERM");
    assert!(server.wait().success());
    let stderr = server.stderr();
    assert_eq!(stderr.matches(LOST).count(), 1, "{stderr}");
    stderr
}

#[test]
fn stream_is_in_the_counters_redis_by_default() {
    let server = options().password("secret").start();
    let address = server.address();
    let counters = [("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &*address), ("REDIS_AUTH", "secret")];
    assert_eq!(entries(&counters, &server), 11);
}

#[test]
fn stream_without_a_redis_prevents_the_start() {
    let ExitResult { code, stderr, .. } = process(&[]).run();
    let expected = "TOLLKEEPER_DECISION_LOG=redis:decisions: names a stream, but the counters are not in Redis; \
        give TOLLKEEPER_DECISION_LOG_REDIS_URL";
    assert!(code == Some(2) && stderr.contains(expected), "{stderr}");
}

#[test]
fn url_of_the_stream_has_its_own_kind_of_socket() {
    let (counters, server) = (options().unix_socket().start(), options().unix_socket().start());
    let (path, address) = (counters.socket().display().to_string(), server.address());
    let over_tcp = [("REDIS_SOCKET_TYPE", "unix"), ("REDIS_URL", &*path), (URL, &*address)];
    assert_eq!(entries(&over_tcp, &server), 11);
    let (address, path) = (counters.address(), server.socket().display().to_string());
    let over_unix = [("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &*address), (URL, &*path)];
    assert_eq!(entries(&over_unix, &server), 22);
    assert_eq!(counters.query::<u64>(&["EXISTS", "decisions"]), 0);
}

#[test]
fn stream_is_reached_over_tls() {
    let directory = tempdir().unwrap();
    let certificates = Certificates::new(directory.path());
    let server = options().tls(&certificates).start();
    let authority = certificates.path("ca.crt").display().to_string();
    let by_url = format!("rediss://127.0.0.1:{}", server.tls_port());
    assert_eq!(entries(&[(URL, &by_url), ("REDIS_TLS_CACERT", &authority)], &server), 11);
}

#[test]
fn certificates_for_the_stream_alone_are_used_and_choose_no_store() {
    let directory = tempdir().unwrap();
    let certificates = Certificates::new(directory.path());
    let (counters, server) = (options().start(), options().tls(&certificates).start());
    let authority = certificates.path("ca.crt").display().to_string();
    let url = format!("rediss://127.0.0.1:{}", server.tls_port());
    let stream = [(URL, &*url), ("REDIS_TLS_CACERT", &*authority)];
    let stderr = process(&stream).start().stderr();
    assert!(stderr.contains("counters=\"memory of this process"), "{stderr}");
    assert!(!stderr.contains("has no effect"), "{stderr}");
    let address = counters.address();
    let both = [&stream[..], &[("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", &address)]].concat();
    let stderr = process(&both).start().stderr();
    assert!(!stderr.contains("has no effect"), "{stderr}");
}

#[test]
fn stream_is_on_the_primary_that_sentinels_name() {
    let sentinels = Sentinels::start_with(&options().password("secret"), &options().password("guard"));
    let url = format!("{NAME},redis://:guard@{}", sentinels.addresses().join(","));
    let env = [(URL, &*url), ("TOLLKEEPER_DECISION_LOG_REDIS_AUTH", "secret")];
    assert_eq!(entries(&env, sentinels.server(sentinels.primary())), 11);
}

#[test]
fn only_entries_without_a_reply_count_as_failed() {
    let server = options().start();
    let proxy = TcpProxy::to(&server.address());
    let url = format!("127.0.0.1:{}", proxy.port());
    let service = service(&[(URL, &url)]);
    wait_for("the header", || (server.query::<u64>(&["XLEN", "decisions"]) == 1).then_some(()));
    // A reply has more than 20 bytes.
    proxy.set(Mode::Truncate(400));
    (0..50).for_each(|_| drop(service.decide(&shop_request("user=ann")).unwrap()));
    let counts = || service.inner.decider.log.as_ref().unwrap().counts_by_sink().next().unwrap();
    wait_for("all outcomes", || (counts().written + counts().failed == 50).then_some(()));
    let counts = counts();
    assert!(counts.written > 0 && counts.failed > 20, "{counts:?}");
    proxy.set(Mode::Pass);
    service.finish_log();
}

#[test]
fn rejected_command_is_logged_once_with_the_permission_to_give() {
    let server = options().user("log", "on >hunter2 ~decisions +@connection +info +xtrim").start();
    let address = server.address();
    let stderr = messages(&[(URL, &address), ("TOLLKEEPER_DECISION_LOG_REDIS_AUTH", "log:hunter2")]);
    let fix = "give +xadd +xtrim ~decisions to the user of TOLLKEEPER_DECISION_LOG_REDIS_AUTH";
    assert!(stderr.contains(fix) && !stderr.contains("hunter2"), "{stderr}");
}

#[test]
fn key_of_another_type_is_logged_once_with_the_setting() {
    let server = options().start();
    server.query::<()>(&["SET", "decisions", "1"]);
    let stderr = messages(&[(URL, &server.address())]);
    assert!(stderr.contains("TOLLKEEPER_DECISION_LOG must name a key that no other program uses"), "{stderr}");
}

#[test]
fn full_memory_is_logged_once_with_the_setting() {
    let server = options().with(&[("maxmemory", "1"), ("maxmemory-policy", "noeviction")]).start();
    let stderr = messages(&[(URL, &server.address())]);
    assert!(stderr.contains("TOLLKEEPER_DECISION_LOG_STREAM_LENGTH bounds the stream"), "{stderr}");
}

#[test]
fn wrong_password_is_not_logged() {
    let server = options().password("secret").start();
    let url = format!("redis://:hunter2@{}", server.address());
    let stderr = messages(&[(URL, &url)]);
    assert!(stderr.contains(URL) && !stderr.contains("hunter2"), "{stderr}");
}

#[test]
fn settings_of_a_stream_without_a_stream_are_told() {
    let settings = [
        (URL, "redis://:hunter2@127.0.0.1:6379"),
        ("TOLLKEEPER_DECISION_LOG_REDIS_AUTH", "hunter2"),
        ("TOLLKEEPER_DECISION_LOG_STREAM_LENGTH", "5"),
        ("OTEL_EXPORTER_OTLP_LOGS_HEADERS", "authorization=hunter2"),
    ];
    let setup = process(&settings).env(SINK.0, "stdout");
    let stderr = setup.start().stderr();
    for (name, _) in settings {
        let kind = if name.starts_with("OTEL_") { "otlp" } else { "redis:STREAM" };
        let notice = format!("{name} has no effect: it is only read with {kind} in TOLLKEEPER_DECISION_LOG");
        assert!(stderr.contains(&notice), "{name}: {stderr}");
    }
    assert!(!stderr.contains("hunter2"), "{stderr}");
}

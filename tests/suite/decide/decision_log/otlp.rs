//! Logs to a collector: what it receives, over both protocols, and collectors that freeze or are not there.

use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::logs::v1::SeverityNumber;
use tempfile::tempdir;
use tollkeeper::decide::log::RecordCounts;

use super::NOON;
use super::schema::assert_valid;
use kit::fixtures::shop_request;
use kit::grpc::{Client, rate_limit_request};
use kit::otlp_collector::{OtlpCollector, ReceivedLog};
use kit::port::Port;
use kit::redis::certificates::Certificates;
use kit::tcp_proxy::{Mode, TcpProxy};
use kit::test_service::TestService;
use kit::tollkeeper::{Setup, Tollkeeper, with_rules};
use kit::wait_for;

const RULES: &str = "domain: shop\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 1}}]\n";
const PROTOCOLS: [&str; 2] = ["grpc", "http/protobuf"];

fn logging(url: &str, protocol: &str) -> Setup {
    with_rules(RULES)
        .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
        .env("TOLLKEEPER_DECISION_LOG", "otlp")
        .env("TOLLKEEPER_DECISION_LOG_WHEN", "all")
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        .env("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
}

/// A service in this process that logs all decisions to a collector.
fn service(url: &str, env: &[(&str, &str)]) -> TestService {
    let own = [
        ("TOLLKEEPER_DECISION_LOG", "otlp"),
        ("TOLLKEEPER_DECISION_LOG_WHEN", "all"),
        ("TOLLKEEPER_DECISION_LOG_QUEUE_BYTES", "64KiB"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", url),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "500"),
    ];
    let service = TestService::new(own.into_iter().chain(env.iter().copied()), NOON);
    service.load([("rules.yaml", RULES)]);
    service
}

fn decide(service: &TestService, count: u32) {
    (0..count).for_each(|number| drop(service.decide(&shop_request(&format!("user={number}"))).unwrap()));
}

fn counts(service: &TestService) -> RecordCounts {
    service.inner.decider.log.as_ref().unwrap().counts_by_sink().next().unwrap()
}

fn call(server: &Tollkeeper, count: u32) {
    let client = Client::connect(server.grpc_port());
    (0..count).for_each(|_| drop(client.call(&rate_limit_request("shop", &[("user", "ann")])).unwrap()));
}

fn stop(mut server: Tollkeeper) -> String {
    server.signal("TERM");
    assert!(server.wait().success());
    server.stderr()
}

/// JSON of the body, which fits the schema.
fn body(log: &ReceivedLog) -> serde_json::Value {
    assert_valid(&format!("{}\n", log.body()));
    serde_json::from_str(log.body()).unwrap()
}

fn told(collector: &OtlpCollector, reason: &str) -> u64 {
    let is_of = |record: &serde_json::Value| record["type"] == "dropped" && record["reason"] == reason;
    let records = collector.logs();
    records.iter().map(body).filter(is_of).map(|record| record["count"].as_u64().unwrap()).sum()
}

#[test]
fn collector_gets_each_record_with_its_time_severity_and_trace() {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    for protocol in PROTOCOLS {
        let collector = OtlpCollector::start();
        let server = logging(&collector.url(), protocol)
            .env("TRACING_ENABLED", "true")
            .env("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20hunter2")
            .env("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
            .start();
        let parent = format!("00-{TRACE}-00f067aa0ba902b7-01");
        let client = Client::connect(server.grpc_port());
        let request = rate_limit_request("shop", &[("user", "ann")]);
        client.call_with_headers(&request, &[("traceparent", &parent)]).unwrap();
        client.call_with_headers(&request, &[("traceparent", &parent.replace("-01", "-00"))]).unwrap();
        let stderr = stop(server);
        let logs = collector.logs();
        let summary: Vec<_> = logs.iter().map(|log| (&*log.record.event_name, log.record.severity_number())).collect();
        let expected = [
            ("tollkeeper.header", SeverityNumber::Info),
            ("tollkeeper.decision", SeverityNumber::Info),
            ("tollkeeper.decision", SeverityNumber::Warn),
        ];
        assert_eq!(summary, expected, "{protocol}");
        for log in &logs {
            let time_us = body(log)["time_us"].as_u64().unwrap();
            assert_eq!(log.record.time_unix_nano, time_us * 1000);
            assert_eq!(log.authorization, "Bearer hunter2");
            assert_eq!(log.resource["deployment.environment.name"], "test");
            assert_eq!(log.resource["service.name"], "RateLimit");
        }
        let ids: Vec<String> =
            logs.iter().map(|log| log.record.trace_id.iter().map(|byte| format!("{byte:02x}")).collect()).collect();
        assert_eq!(ids, ["", TRACE, ""]);
        // The resource is that of the spans, the random id of the process included.
        assert_eq!(logs[0].resource, collector.received()[0].resource);
        assert!(!stderr.contains("hunter2"), "{stderr}");
    }
}

#[test]
fn logs_have_an_endpoint_and_headers_of_their_own_and_need_no_traces() {
    let (collector, general) = (OtlpCollector::start(), OtlpCollector::start());
    let server = logging(&general.url(), "http/protobuf")
        .env("TRACING_ENABLED", "false")
        .env("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", format!("{}/v1/logs", collector.url()))
        .env("OTEL_EXPORTER_OTLP_HEADERS", "authorization=general")
        .env("OTEL_EXPORTER_OTLP_LOGS_HEADERS", "authorization=logs")
        .start();
    call(&server, 2);
    let stderr = stop(server);
    assert_eq!((collector.logs().len(), general.logs().len()), (3, 0));
    assert!(collector.logs().iter().all(|log| log.authorization == "logs"));
    assert!(!stderr.contains("has no effect"), "{stderr}");
}

#[test]
fn collector_is_reached_over_tls() {
    let directory = tempdir().unwrap();
    let certificates = Certificates::new(directory.path());
    for protocol in PROTOCOLS {
        let collector = OtlpCollector::tls(&certificates);
        let server = logging(&collector.url(), protocol)
            .env("OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE", certificates.path("ca.crt"))
            .start();
        call(&server, 1);
        stop(server);
        assert_eq!(collector.logs().len(), 2, "{protocol}");
    }
}

#[test]
fn frozen_collector_delays_no_decision_and_losses_are_told() {
    for protocol in PROTOCOLS {
        let collector = OtlpCollector::start();
        let proxy = TcpProxy::to(&format!("127.0.0.1:{}", collector.port()));
        let url = format!("http://127.0.0.1:{}", proxy.port());
        let service = service(&url, &[("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)]);
        wait_for("the header", || (collector.logs().len() == 1).then_some(()));
        proxy.set(Mode::Blackhole);
        let started = Instant::now();
        decide(&service, 3000);
        // One export takes 0.5 s; decisions that waited for each would take minutes.
        assert!(started.elapsed() < Duration::from_secs(20));
        wait_for("losses", || (counts(&service).dropped > 0 && counts(&service).failed > 0).then_some(()));
        assert_eq!((counts(&service).written, collector.logs().len()), (0, 1));
        proxy.set(Mode::Reset);
        proxy.set(Mode::Pass);
        wait_for("the losses to be told", || {
            decide(&service, 1);
            let lost = counts(&service);
            (told(&collector, "write_failed") >= lost.failed && lost.written > 0).then_some(())
        });
        // A drop may fail to be told while the collector is frozen.
        assert!(told(&collector, "queue_full") <= counts(&service).dropped);
        service.finish_log();
    }
}

#[test]
fn absent_collector_delays_neither_a_decision_nor_the_stop() {
    let port = Port::reserve();
    let url = format!("http://127.0.0.1:{}", port.number());
    for protocol in PROTOCOLS {
        let service = service(&url, &[("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)]);
        decide(&service, 3000);
        wait_for("losses", || (counts(&service).dropped > 0 && counts(&service).failed > 0).then_some(()));
        assert_eq!(counts(&service).written, 0);
        let server = logging(&url, protocol).start();
        call(&server, 20);
        let stderr = stop(server);
        let lost = ["records of the decision log are lost: otlp:", "last records of the decision log not written"];
        assert!(lost.iter().any(|text| stderr.contains(text)), "{stderr}");
    }
}

#[test]
fn stop_with_a_frozen_collector_is_bounded() {
    for protocol in PROTOCOLS {
        let collector = OtlpCollector::start();
        let proxy = TcpProxy::to(&format!("127.0.0.1:{}", collector.port()));
        proxy.set(Mode::Blackhole);
        let server = logging(&format!("http://127.0.0.1:{}", proxy.port()), protocol)
            .env("OTEL_EXPORTER_OTLP_TIMEOUT", "600000")
            .start();
        call(&server, 20);
        let stderr = stop(server);
        assert!(stderr.contains("last records of the decision log not written"), "{stderr}");
    }
}

#[test]
fn unusable_collector_prevents_the_start() {
    let refused = |env: &[(&str, &str)]| {
        let setup = with_rules(RULES).env("TOLLKEEPER_DECISION_LOG", "otlp");
        let result = env.iter().fold(setup, |setup, (name, value)| setup.env(name, *value)).run();
        assert_eq!(result.code, Some(2), "{}", result.stderr);
        result.stderr
    };
    let without = refused(&[("TRACING_ENABLED", "true")]);
    let expected = "TOLLKEEPER_DECISION_LOG=otlp: names a collector that has no URL; \
        give OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_LOGS_ENDPOINT";
    assert!(without.contains(expected), "{without}");
    let malformed = refused(&[("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "collector:4317")]);
    let expected = "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT=collector:4317: not a URL of a collector; \
        give http://host:port or https://host:port";
    assert!(malformed.contains(expected), "{malformed}");
    let url = ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://localhost:4317");
    let headers = refused(&[url, ("OTEL_EXPORTER_OTLP_LOGS_HEADERS", "hunter2")]);
    assert!(headers.contains("OTEL_EXPORTER_OTLP_LOGS_HEADERS=") && !headers.contains("hunter2"), "{headers}");
    let certificate = refused(&[url, ("OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE", "/none")]);
    assert!(certificate.contains("OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE=/none"), "{certificate}");
}

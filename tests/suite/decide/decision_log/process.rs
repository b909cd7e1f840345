//! The decision log of a process: standard output, reloads, the trace of a request, and a bounded stop.

use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::process::Command;

use tempfile::tempdir;
use tollkeeper::decide::log::header::HeaderReason;
use tollkeeper::decide::log::record::Record;

use super::records;
use kit::grpc::{Client, rate_limit_request};
use kit::otlp_collector::OtlpCollector;
use kit::tollkeeper::{Setup, Tollkeeper, with_rules};
use kit::wait_for;

const RULES: &str = "domain: shop\ndescriptors: [{key: login, rate_limit: {unit: day, requests_per_unit: 5}}]\n";

fn logging(sink: &str) -> Setup {
    with_rules(RULES)
        .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
        .env("TOLLKEEPER_DECISION_LOG", sink)
        .env("TOLLKEEPER_DECISION_LOG_WHEN", "all")
}

fn call(server: &Tollkeeper, count: u32) {
    let client = Client::connect(server.grpc_port());
    for _ in 0..count {
        client.call(&rate_limit_request("shop", &[("login", "ann")])).unwrap();
    }
}

fn stop(mut server: Tollkeeper) -> String {
    server.signal("TERM");
    assert!(server.wait().success());
    server.stderr()
}

#[test]
fn standard_output_has_all_records_after_a_stop() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("stdout");
    let server = logging("stdout").stdout(File::create(&file).unwrap()).start();
    call(&server, 3);
    fs::write(server.rules_path(), RULES.replace("login", "other")).unwrap();
    wait_for("the reload", || (server.rules_status()["version"] == 2).then_some(()));
    call(&server, 1);
    stop(server);
    let found: Vec<String> = records(&file)
        .iter()
        .map(|record| match record {
            Record::Header(header) => format!("{:?}", header.event),
            Record::Decision(decision) => format!("{} limits", decision.descriptors[0].limits.len()),
            Record::Dropped(dropped) => format!("{dropped:?}"),
        })
        .collect();
    let (start, reload) = (format!("{:?}", HeaderReason::Start), format!("{:?}", HeaderReason::Reload));
    assert_eq!(found, [&*start, "1 limits", "1 limits", "1 limits", &reload, "0 limits"]);
}

#[test]
fn standard_output_that_is_not_read_delays_neither_answers_nor_the_stop() {
    let directory = tempdir().unwrap();
    let pipe = directory.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // Open for reading too, so that writes wait instead of failing.
    let unread = OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
    let server = logging("stdout").env("TOLLKEEPER_DECISION_LOG_QUEUE_BYTES", "64KiB").stdout(unread).start();
    // Many times what the pipe and the queue take.
    call(&server, 2000);
    let stderr = stop(server);
    assert!(stderr.contains("last records of the decision log not written"), "{stderr}");
}

#[test]
fn record_of_a_sampled_request_has_its_trace() {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    let collector = OtlpCollector::start();
    let server = logging(&format!("file:{}", file.display()))
        .env("TRACING_ENABLED", "true")
        .env("TRACING_SAMPLING_RATE", "0")
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url())
        .start();
    let parent = format!("00-{TRACE}-00f067aa0ba902b7-01");
    let client = Client::connect(server.grpc_port());
    let request = rate_limit_request("shop", &[("login", "ann")]);
    client.call_with_headers(&request, &[("traceparent", &parent)]).unwrap();
    client.call(&request).unwrap();
    stop(server);
    let traces: Vec<Option<String>> =
        super::decisions(&file).iter().map(|decision| decision.trace_id.as_deref().map(str::to_owned)).collect();
    assert_eq!(traces, [Some(TRACE.to_owned()), None]);
}

#[test]
fn invalid_settings_prevent_the_start() {
    let refused = |env: &[(&str, &str)]| {
        let setup = env.iter().fold(with_rules(RULES), |setup, (name, value)| setup.env(name, Path::new(value)));
        let result = setup.run();
        assert_eq!(result.code, Some(2), "{}", result.stderr);
        result.stderr
    };
    let unknown = refused(&[("TOLLKEEPER_DECISION_LOG", "file")]);
    assert!(unknown.contains("TOLLKEEPER_DECISION_LOG=file: names an unknown destination"), "{unknown}");
    let zstd = refused(&[("TOLLKEEPER_DECISION_LOG", "stdout,file:log.zst")]);
    let expected = "TOLLKEEPER_DECISION_LOG=stdout,file:log.zst: asks for compression with zstd, which was removed; \
                    name a file that ends in .gz";
    assert!(zstd.contains(expected), "{zstd}");
    let when = refused(&[("TOLLKEEPER_DECISION_LOG_WHEN", "sometimes")]);
    assert!(when.contains("TOLLKEEPER_DECISION_LOG_WHEN=sometimes: not a list of decisions"), "{when}");
    let hashed = [("TOLLKEEPER_DECISION_LOG", "stdout"), ("TOLLKEEPER_DECISION_LOG_VALUES", "hashed")];
    let without_key = refused(&hashed);
    assert!(
        without_key.contains("TOLLKEEPER_DECISION_LOG_VALUES=hashed: there is no key to hash with"),
        "{without_key}"
    );
    let short = refused(&[&hashed[..], &[("TOLLKEEPER_DECISION_LOG_HASH_KEY", "sesame")]].concat());
    assert!(short.contains("too short to be a secret") && !short.contains("sesame"), "{short}");
    let missing = refused(&[&hashed[..], &[("TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE", "/none")]].concat());
    assert!(missing.contains("TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE=/none: cannot be read"), "{missing}");
}

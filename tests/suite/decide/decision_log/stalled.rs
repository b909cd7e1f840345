//! Destinations that stall or fail: decisions go on, and what is lost is counted and told.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::{TempDir, tempdir};
use tollkeeper::decide::log::RecordCounts;
use tollkeeper::decide::log::record::{DropReason, Record};

use super::{logging_service, records};
use kit::fixtures::shop_request;
use kit::test_service::TestService;
use kit::wait_for;

const RULES: &str = "descriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 2}}]\n";
const ENV: [(&str, &str); 2] =
    [("TOLLKEEPER_DECISION_LOG_WHEN", "all"), ("TOLLKEEPER_DECISION_LOG_QUEUE_BYTES", "64KiB")];

fn counts(service: &TestService) -> RecordCounts {
    service.inner.decider.log.as_ref().unwrap().counts_by_sink().next().unwrap()
}

fn decide(service: &TestService, count: u32) {
    (0..count).for_each(|number| drop(service.decide(&shop_request(&format!("user={number}"))).unwrap()));
}

/// Named pipe without a reader, and a service that logs to it.
fn log_to_pipe(directory: &TempDir) -> (PathBuf, TestService) {
    let file = directory.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
    let service = logging_service(&file, &ENV, RULES);
    (file, service)
}

fn wait_for_write_error(service: &TestService) {
    wait_for("a write to fail", || {
        decide(service, 1);
        (counts(service).failed > 0).then_some(())
    });
}

#[test]
fn pipe_without_a_reader_delays_neither_a_decision_nor_the_end() {
    let directory = tempdir().unwrap();
    let (_file, service) = log_to_pipe(&directory);
    let started = Instant::now();
    // The queue takes about a hundred records.
    decide(&service, 1000);
    // A decision that waited for the pipe would wait for ever.
    assert!(started.elapsed() < Duration::from_secs(20));
    let stalled = counts(&service);
    assert!(stalled.dropped > 500 && stalled.written == 0, "{stalled:?}");
    // The end does not wait for the pipe either.
    assert!(!service.inner.decider.log.as_ref().unwrap().flush_and_end(Duration::from_millis(10)));
}

#[test]
fn losses_are_told_when_a_pipe_gets_a_reader() {
    let directory = tempdir().unwrap();
    let (file, service) = log_to_pipe(&directory);
    decide(&service, 1000);
    let lost = counts(&service).dropped;
    let reader = std::thread::spawn(move || fs::read_to_string(file).unwrap());
    service.finish_log();
    let lines = reader.join().unwrap();
    let told = |record: serde_json::Value| (record["type"] == "dropped").then(|| record["count"].as_u64().unwrap());
    let told: u64 = lines.lines().filter_map(|line| told(serde_json::from_str(line).unwrap())).sum();
    assert_eq!((told, counts(&service).written), (lost, 1000 - lost));
    assert!(lost > 500);
}

#[test]
fn record_larger_than_the_queue_is_dropped_and_holds_up_no_other() {
    let directory = tempdir().unwrap();
    let file = directory.path().join("log");
    let service = logging_service(&file, &ENV, RULES);
    wait_for("a header", || file.exists().then_some(()));
    service.decide(&shop_request(&format!("user={}", "x".repeat(100_000)))).unwrap();
    wait_for("the loss to be told", || {
        let is_told = |record: &Record| matches!(record, Record::Dropped(dropped) if dropped.count == 1);
        records(&file).iter().any(is_told).then_some(())
    });
    decide(&service, 1);
    wait_for("a record", || (counts(&service).written == 1).then_some(()));
}

#[test]
fn pipe_whose_reader_goes_away_is_written_again_for_the_next_reader() {
    let directory = tempdir().unwrap();
    let (file, service) = log_to_pipe(&directory);
    let read_line = |file: &Path| {
        let mut line = String::new();
        BufReader::new(fs::File::open(file).unwrap()).read_line(&mut line).unwrap();
        line
    };
    assert!(read_line(&file).contains("\"type\":\"header\""));
    wait_for_write_error(&service);
    decide(&service, 1);
    assert!(read_line(&file).starts_with("{\"v\":1,"));
}

#[test]
fn full_disk_is_counted() {
    let service = logging_service(Path::new("/dev/full"), &ENV, RULES);
    decide(&service, 10);
    service.finish_log();
    let counts = counts(&service);
    assert_eq!((counts.written, counts.failed, counts.dropped), (0, 10, 0));
}

#[test]
fn drop_that_could_not_be_told_is_told_later() {
    let directory = tempdir().unwrap();
    let logs = directory.path().join("logs");
    let file = logs.join("log");
    fs::create_dir(&logs).unwrap();
    let service = logging_service(&file, &ENV, RULES);
    fs::remove_dir_all(&logs).unwrap();
    wait_for_write_error(&service);
    // Larger than the queue.
    service.decide(&shop_request(&format!("user={}", "x".repeat(100_000)))).unwrap();
    assert_eq!(counts(&service).dropped, 1);
    // The next failed batch had the news of it.
    let failed = counts(&service).failed;
    wait_for("another write to fail", || {
        decide(&service, 1);
        (counts(&service).failed > failed + 1).then_some(())
    });
    fs::create_dir(&logs).unwrap();
    wait_for("a record", || {
        decide(&service, 1);
        (counts(&service).written > 0).then_some(())
    });
    service.finish_log();
    let told = records(&file).iter().any(|record| {
        matches!(record, Record::Dropped(dropped) if (dropped.reason, dropped.count) == (DropReason::QueueFull, 1))
    });
    assert!(told);
}

#[test]
fn records_that_a_destination_refused_are_told_when_it_works_again() {
    let directory = tempdir().unwrap();
    let logs = directory.path().join("logs");
    let file = logs.join("log");
    fs::create_dir(&logs).unwrap();
    let service = logging_service(&file, &ENV, RULES);
    // The writer opens the file with its first write.
    fs::remove_dir_all(&logs).unwrap();
    wait_for_write_error(&service);
    fs::create_dir(&logs).unwrap();
    wait_for("a record", || {
        decide(&service, 1);
        (counts(&service).written > 0).then_some(())
    });
    service.finish_log();
    let told: u64 = records(&file)
        .iter()
        .filter_map(|record| match record {
            Record::Dropped(dropped) if dropped.reason == DropReason::WriteFailed => Some(dropped.count),
            _ => None,
        })
        .sum();
    assert_eq!(told, counts(&service).failed);
}

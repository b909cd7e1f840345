//! Log lines: their format, their levels, and that no message can forge a line.

#![expect(clippy::unwrap_used, reason = "what cannot be unwrapped fails the test")]

use std::time::Duration;

use serde_json::{Value, json};
use tollkeeper::base::clock::{Clock, Time};
use tollkeeper::telemetry::log_throttle::LogThrottle;
use tollkeeper::telemetry::logs::{FATAL_TARGET, Format, Level, MAX_VALUE_BYTES};

use kit::log_capture::log_of;

/// Log output of `emit` at 2026-01-02T03:04:05.006007Z.
fn log(level: Level, format: Format, emit: impl FnOnce()) -> String {
    log_of(level, format, Clock::manual(Time::from_micros(1_767_323_045_006_007)), emit)
}

fn json_log(emit: impl FnOnce()) -> Value {
    let text = log(Level::Trace, Format::Json, emit);
    assert_eq!(text.matches('\n').count(), 1, "one line: {text:?}");
    serde_json::from_str(&text).unwrap()
}

#[test]
fn json_line_has_the_keys_that_collectors_expect() {
    let line =
        json_log(|| tracing::warn!(target: "tollkeeper", rules = 3, share = 0.5, ok = true, file = "a.yaml", "loaded"));
    let expected = json!({
        "@timestamp": "2026-01-02T03:04:05.006007000Z",
        "level": "warning",
        "@message": "loaded",
        "rules": 3, "share": 0.5, "ok": true, "file": "a.yaml",
    });
    assert_eq!(line, expected);
    let keys: Vec<&String> = line.as_object().unwrap().keys().collect();
    assert_eq!(keys[..3], ["@timestamp", "level", "@message"]);
}

#[test]
fn field_cannot_override_a_standard_key() {
    let line = json_log(|| tracing::info!(target: "tollkeeper", level = "fatal", "@message" = "other", "said"));
    assert_eq!((&line["level"], &line["@message"]), (&json!("info"), &json!("said")));
    assert_eq!((&line["fields.level"], &line["fields.@message"]), (&json!("fatal"), &json!("other")));
}

#[test]
fn text_line_has_time_level_and_message() {
    let text = log(Level::Info, Format::Text, || {
        tracing::error!(target: "tollkeeper", path = "a b", port = 8081, rule = %"x.y", empty = "", "no \"luck\"");
    });
    let expected = "time=\"2026-01-02T03:04:05.006007000Z\" level=error msg=\"no \\\"luck\\\"\" path=\"a b\" port=8081 rule=x.y empty=\"\"\n";
    assert_eq!(text, expected);
}

#[test]
fn untrusted_text_cannot_forge_lines_or_emit_escapes() {
    let hostile = "x\nlevel=error msg=forged\r\u{1b}[2J\u{9b}31m\u{7f}\0\u{2028}\u{202e}\t\"";
    for format in [Format::Text, Format::Json] {
        let text = log(Level::Info, format, || {
            tracing::warn!(target: "tollkeeper", value = hostile, shown = %hostile, debugged = ?hostile, "{hostile}");
        });
        assert_eq!(text.lines().count(), 1, "{text:?}");
        let line = text.strip_suffix('\n').unwrap();
        assert!(line.chars().all(|c| !c.is_control() && !"\u{2028}\u{202e}".contains(c)), "{line:?}");
        if format == Format::Json {
            let parsed: Value = serde_json::from_str(line).unwrap();
            assert_eq!(parsed["@message"], hostile);
            assert_eq!(parsed["value"], hostile);
        }
    }
}

#[test]
fn huge_value_is_truncated_at_a_character() {
    let huge = format!("a{}", "é".repeat(MAX_VALUE_BYTES));
    let line = json_log(|| tracing::warn!(target: "tollkeeper", huge, "said"));
    let written = line["huge"].as_str().unwrap();
    assert!(written.ends_with("é... (16386 bytes more)"), "{}", &written[written.len() - 40..]);
    assert!(written.len() < MAX_VALUE_BYTES + 40);
}

#[test]
fn level_passes_itself_and_more_severe_ones() {
    const ALL: [&str; 6] = ["fatal", "error", "warning", "info", "debug", "trace"];
    for (name, written) in
        [("panic", 0), ("FATAL", 1), ("error", 2), ("Warn", 3), ("WARNING", 3), ("info", 4), ("debug", 5), ("trace", 6)]
    {
        let text = log(Level::parse(name).unwrap(), Format::Json, || {
            tracing::error!(target: FATAL_TARGET, "a");
            tracing::error!(target: "tollkeeper::serve::server", "b");
            tracing::warn!(target: "tollkeeper::serve::server", "c");
            tracing::info!(target: "tollkeeper::serve::server", "d");
            tracing::debug!(target: "tollkeeper::serve::server", "e");
            tracing::trace!(target: "tollkeeper::serve::server", "f");
        });
        let levels: Vec<Value> =
            text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["level"].clone()).collect();
        assert_eq!(levels, ALL[..written], "{name}");
    }
    assert_eq!(Level::parse("loud"), None);
    assert_eq!(Level::default(), Level::Warn);
}

#[test]
fn libraries_log_only_warnings_unless_level_is_trace() {
    let emit = || {
        tracing::warn!(target: "hyper", "a");
        tracing::info!(target: "hyper", "b");
        tracing::debug!(target: "hyper", "c");
    };
    for (level, lines) in [(Level::Error, 0), (Level::Warn, 1), (Level::Debug, 1), (Level::Trace, 3)] {
        assert_eq!(log(level, Format::Text, emit).lines().count(), lines, "{level:?}");
    }
}

#[test]
fn h2_logs_nothing_unless_level_is_trace() {
    let emit = || tracing::warn!(target: "h2::proto::ping_pong", "a frame of a client");
    for (level, lines) in [(Level::Error, 0), (Level::Warn, 0), (Level::Debug, 0), (Level::Trace, 1)] {
        assert_eq!(log(level, Format::Text, emit).lines().count(), lines, "{level:?}");
    }
}

#[test]
fn repeated_event_is_logged_once_per_interval_with_a_count() {
    let clock = Clock::manual(Time::from_secs(1000));
    let throttle = LogThrottle::every(Duration::from_secs(60));
    let due_at = |second: u64| {
        clock.set(Time::from_secs(second));
        throttle.allow(clock.now())
    };
    // (second, result of `allow`)
    let cases = [
        (1000, Some(0)),
        (1000, None),
        (1059, None),
        (1060, Some(2)),
        (1061, None),
        (5000, Some(1)),
        // Another thread read the clock earlier and calls later.
        (4999, None),
        // After the clock was set back an hour, lines are not suppressed for an hour.
        (1400, Some(1)),
        (1401, None),
        (1460, Some(1)),
    ];
    for (second, expected) in cases {
        assert_eq!(due_at(second), expected, "at {second}");
    }
}

#[test]
fn of_many_threads_one_logs_and_the_others_are_counted() {
    static THROTTLE: LogThrottle = LogThrottle::every(Duration::from_secs(60));
    let calls = || (0..1000).filter_map(|_| THROTTLE.allow(Time::from_secs(1000))).collect::<Vec<u64>>();
    let allowed: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(calls)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    // A thread can be suppressed before the one that logs reads the count.
    let [suppressed] = allowed[..] else { panic!("{} lines", allowed.len()) };
    assert_eq!(THROTTLE.allow(Time::from_secs(1060)), Some(7999 - suppressed));
}

#[test]
fn clean_start_logs_one_line() {
    let rules = "domain: shop\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 10}}]";
    let server = kit::tollkeeper::with_rules(rules).env("DEBUG_HOST", "127.0.0.1").start();
    let log = server.stderr();
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(lines.len(), 1, "{log}");
    for part in ["level=info", "msg=\"serving\"", "rules=1", "counters=\"memory of this process, not shared\""] {
        assert!(log.contains(part), "{part}: {log}");
    }
}

mod recent_problems {
    use serde_json::Value;
    use tollkeeper::telemetry::logs::{Format, Level, LoggedProblem, MAX_KEPT_LINES, RECENT_PROBLEMS, RecentProblems};

    const MAX_TEXT_BYTES: usize = 2048;

    fn problem(message: &str) -> LoggedProblem {
        let fields = [("huge".to_owned(), Value::from("x".repeat(100_000))), ("more".to_owned(), Value::from("y"))];
        LoggedProblem {
            time: "2026-01-01T00:00:00Z".to_owned(),
            level: "warning",
            target: "tollkeeper".into(),
            message: message.to_owned(),
            fields: fields.into_iter().collect(),
            times: 1,
        }
    }

    #[test]
    fn lines_are_bounded_in_number_and_size() {
        let recent = RecentProblems::default();
        for index in 0..1000 {
            recent.add_line(problem(&format!("{index} {}", "z".repeat(100_000))));
        }
        let lines = recent.copy_lines();
        assert_eq!(lines.len(), MAX_KEPT_LINES);
        assert!(lines[0].message.starts_with("900 ") && lines[99].message.starts_with("999 "));
        let bytes: usize = lines.iter().map(|line| serde_json::to_string(line).unwrap().len()).sum();
        assert!(bytes < MAX_KEPT_LINES * (2 * MAX_TEXT_BYTES + 300), "{bytes}");
    }

    #[test]
    fn lines_name_the_module_without_its_crate() {
        super::log(Level::Warn, Format::Json, || {
            tracing::warn!(target: "tollkeeper_service::serve::server", "a module of another crate");
            tracing::warn!(target: "tollkeeper::tools::cli", "a module of this crate");
            tracing::warn!(target: "hyper::server", "a module of a library");
        });
        let lines = RECENT_PROBLEMS.copy_lines();
        for (message, target) in [
            ("a module of another crate", "tollkeeper::serve::server"),
            ("a module of this crate", "tollkeeper::tools::cli"),
            ("a module of a library", "hyper::server"),
        ] {
            assert!(lines.iter().any(|line| line.message == message && line.target == target), "{message}");
        }
    }

    #[test]
    fn equal_lines_in_a_row_are_one() {
        let recent = RecentProblems::default();
        for _ in 0..500 {
            recent.add_line(problem("a\u{1b}[31m"));
        }
        recent.add_line(problem("b"));
        let lines = recent.copy_lines();
        let shown: Vec<_> = lines.iter().map(|line| (line.message.as_str(), line.times)).collect();
        assert_eq!(shown, [("a\u{fffd}[31m", 500), ("b", 1)]);
    }
}

//! Text in outputs: none has a raw control character or mark of writing direction, whatever clients and files say.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use serde_json::{Value, json};
use tollkeeper::base::clock::{Clock, Time};
use tollkeeper::base::text;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::yaml::DocumentSelection;
use tollkeeper::serve::report::rules::{RuleUsageReport, RulesQuery};
use tollkeeper::serve::report::top::{TopQuery, TopReport, TopTextContent};
use tollkeeper::serve::report::unmatched::{UnmatchedQuery, UnmatchedReport};
use tollkeeper::telemetry::logs::{Format, Level};

use kit::grpc::{Client, rate_limit_request};
use kit::log_capture::log_of;
use kit::test_service::{TestRequest, TestService};
use kit::tollkeeper::{Tollkeeper, inherited_env, program_path, with_rules};
use kit::{http, wait_for};

const NOON: Time = Time::from_secs(1_800_000_000);

/// All characters that no output may have raw, but for line feeds between lines.
static UNPRINTABLE: LazyLock<Vec<char>> = LazyLock::new(|| {
    let ranges = [
        ('\0', '\u{1f}'),
        ('\u{7f}', '\u{9f}'),
        ('\u{2028}', '\u{2029}'),
        ('\u{fff9}', '\u{fffb}'),
        // Default_Ignorable_Code_Point, of DerivedCoreProperties.txt.
        ('\u{ad}', '\u{ad}'),
        ('\u{34f}', '\u{34f}'),
        ('\u{61c}', '\u{61c}'),
        ('\u{115f}', '\u{1160}'),
        ('\u{17b4}', '\u{17b5}'),
        ('\u{180b}', '\u{180f}'),
        ('\u{200b}', '\u{200f}'),
        ('\u{202a}', '\u{202e}'),
        ('\u{2060}', '\u{206f}'),
        ('\u{3164}', '\u{3164}'),
        ('\u{fe00}', '\u{fe0f}'),
        ('\u{feff}', '\u{feff}'),
        ('\u{ffa0}', '\u{ffa0}'),
        ('\u{fff0}', '\u{fff8}'),
        ('\u{1bca0}', '\u{1bca3}'),
        ('\u{1d173}', '\u{1d17a}'),
        ('\u{e0000}', '\u{e0fff}'),
    ];
    let mut all: Vec<char> = ranges.into_iter().flat_map(|(first, last)| first..=last).collect();
    all.sort_unstable();
    all
});

/// Those that YAML has an escape of four digits for.
fn unprintable_within_16_bits() -> Vec<char> {
    UNPRINTABLE.iter().copied().filter(|c| u32::from(*c) <= 0xffff).collect()
}

fn assert_printable(output: &str, text: &str) {
    let found = text.chars().find(|c| *c != '\n' && UNPRINTABLE.binary_search(c).is_ok());
    assert_eq!(found, None, "{output} has a raw {found:?}: {text:?}");
}

/// JSON strings whose unprintable characters are all escaped, as YAML needs them.
fn escaped(text: &str) -> String {
    let escape = |c: char| if c.is_ascii_alphanumeric() { c.to_string() } else { format!("\\u{:04x}", u32::from(c)) };
    format!("\"{}\"", text.chars().map(escape).collect::<String>())
}

/// Texts of unprintable and other characters, within 16 bits.
fn hostile_text() -> impl Strategy<Value = String> {
    let other = prop::sample::select(vec!['a', '7', ' ', '"', '\\', '=', ',', '<', '\u{e9}', '\u{20ac}', '\u{627}']);
    let c = prop_oneof![prop::sample::select(unprintable_within_16_bits()), other];
    prop::collection::vec(c, 1..24).prop_map(|characters| characters.into_iter().collect())
}

#[test]
fn set_is_the_stated_one() {
    let all = ('\0'..=char::MAX).filter(|c| text::is_unprintable(*c));
    assert_eq!(all.collect::<Vec<_>>(), *UNPRINTABLE);
    // Above 16 bits JSON has two escapes.
    let tag = "a\u{e0041}\u{1d173}b";
    assert_eq!(text::quote_as_json(tag), "\"a\\udb40\\udc41\\ud834\\udd73b\"");
    assert_eq!(serde_json::from_str::<String>(&text::quote_as_json(tag)).unwrap(), tag);
    assert_eq!(text::escape_unprintable(tag), "a\\u{e0041}\\u{1d173}b");
}

proptest! {
    #[test]
    fn functions_leave_no_unprintable_character(hostile in hostile_text(), max in 0_usize..30) {
        let safe = [
            text::escape_unprintable(&hostile),
            text::truncate_and_escape(&hostile, max),
            text::quote_as_json(&hostile),
            text::remove_unprintable(&hostile).into_owned(),
            hostile.chars().map(text::replace_unprintable_char).collect(),
        ];
        safe.iter().for_each(|safe| assert!(!safe.chars().any(text::is_unprintable), "{safe:?}"));
        prop_assert_eq!(serde_json::from_str::<String>(&text::quote_as_json(&hostile)).unwrap(), hostile.clone());
        assert_printable("replace_unprintable", &text::replace_unprintable(&hostile));
    }

    #[test]
    fn json_decodes_to_the_same_values(hostile in hostile_text()) {
        let value = json!({ (hostile.clone()): [1, hostile, null], "more": {"\t": "\r\n"} });
        for json in [value.to_string(), format!("\t{}\r\n", serde_json::to_string_pretty(&value).unwrap())] {
            let printable = text::escape_unprintable_json(&json);
            assert_printable("JSON", &printable);
            prop_assert_eq!(&serde_json::from_str::<Value>(&printable).unwrap(), &value);
            prop_assert_eq!(&*text::escape_unprintable_json_lines(json.as_bytes()), printable.as_bytes());
        }
    }

    #[test]
    fn log_lines_are_printable(hostile in hostile_text()) {
        for format in [Format::Text, Format::Json] {
            let line = log_of(Level::Info, format, Clock::manual(NOON), || {
                tracing::info!(target: "tollkeeper", field = hostile, other = ?hostile, "{hostile}");
            });
            assert_printable("a log line", &line);
            prop_assert_eq!(line.matches('\n').count(), 1);
        }
    }

    #[test]
    fn diagnostics_are_printable(hostile in hostile_text()) {
        let text = escaped(&hostile);
        let raw: String = hostile.chars().filter(|c| !c.is_control() && !"\"\\".contains(*c)).collect();
        let rules = format!(
            "domain: d\ndescriptors:\n- key: \"{raw}\"\n  {text}: 1\n  value: {text}\n  rate_limit: {{unit: {text}, \
             requests_per_unit: {text}, algorithm: {text}}}\n- {{key: k, rate_limit: {{unlimited: {text}}}}}\n"
        );
        let source = RuleText { name: Arc::from("x.yaml"), bytes: rules.clone().into_bytes(), documents: DocumentSelection::All };
        let found = compile_texts(&[source], &CompileOptions::default()).unwrap_err();
        prop_assert!(found.error_count() >= 3, "{}", found);
        assert_printable("diagnostics", &found.to_string());
        found.errors().iter().for_each(|error| assert_printable("an excerpt", &error.format_excerpt(&rules)));
    }

    #[test]
    fn reports_and_responses_are_printable(hostile in hostile_text()) {
        let service = TestService::new([("LIMIT_RESPONSE_HEADERS_ENABLED", "true")], NOON);
        let (text, body) = (escaped(&hostile), "over_limit_body: no");
        let rules = format!(
            "domain: d\ndescriptors:\n- key: {text}\n  rate_limit: {{unit: day, requests_per_unit: 1, name: {text}}}\n  \
             {body}\n"
        );
        service.load([("rules.yaml", rules.as_str())]);
        let request = TestRequest::new("d").descriptor(&[(&hostile, &hostile)]);
        for _ in 0..2 {
            let response = service.decide(&request).unwrap().response;
            for header in &response.response_headers_to_add {
                assert_printable("a header", &format!("{}{}", header.key, header.value));
            }
            let limit = response.statuses[0].current_limit.as_ref().unwrap();
            assert_printable("the name of a limit", &limit.name);
        }
        let top_keys = &service.inner.decider.metrics.top_keys;
        let top = TopReport::new(top_keys, service.now(), &TopQuery::default());
        prop_assert_eq!(top.overall.len(), 1);
        assert_printable("/top", &top.format_text(TopTextContent::Rejected));
        let loaded = service.inner.rules.current_rules_owned().unwrap();
        let usage = RuleUsageReport::new(&loaded.rules, &service.inner.decider.metrics, service.now(), &RulesQuery::default());
        assert_printable("/rules", &usage.format_text());
        let unmatched = TestRequest::new("d").descriptor(&[(&hostile, &hostile), ("other", &hostile)]);
        drop(service.decide(&unmatched).unwrap());
        drop(service.decide(&TestRequest::new(&hostile).descriptor(&[(&hostile, "x")])));
        let (metrics, query) = (&service.inner.decider.metrics, UnmatchedQuery::default());
        let unmatched = UnmatchedReport::new(metrics, Some(&loaded.rules), service.now(), &query, true);
        prop_assert!(!unmatched.descriptors.is_empty());
        assert_printable("/unmatched", &unmatched.format_text());
        let busiest = metrics.busiest_keys.snapshot(service.now(), 10, |_| true);
        let top = top.with_busiest_keys(&busiest, &TopQuery::default());
        prop_assert_eq!(top.busiest.len(), 1);
        assert_printable("/top?show=busiest", &top.format_text(TopTextContent::Busiest));
    }
}

/// A server that logs all that it decides, with the hostile text in its rules.
fn server(hostile: &str, log: &Path) -> Tollkeeper {
    let text = escaped(hostile);
    let rules = format!(
        "domain: shop\ndescriptors:\n- {{key: user, rate_limit: {{unit: day, requests_per_unit: 1}}}}\n- key: {text}\n  \
         rate_limit: {{unit: day, requests_per_unit: 1, name: {text}}}\n- key: {text}\n  value: {text}\n  rate_limit: \
         {{unit: day, requests_per_unit: 1}}\n"
    );
    with_rules(&rules)
        .env("LOG_LEVEL", "debug")
        .env("RESPONSE_DYNAMIC_METADATA", "true")
        .env("TOLLKEEPER_DECISION_LOG", format!("file:{},stdout", log.display()))
        .env("TOLLKEEPER_DECISION_LOG_WHEN", "all")
        .env("CLUSTER_NAME", hostile.replace('\0', ""))
        .stdout(fs::File::create(log.with_extension("stdout")).unwrap())
        .start()
}

/// Output of a command, which must not be empty.
fn command(directory: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(program_path());
    command.args(arguments).current_dir(directory).env_clear().envs(inherited_env()).stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    assert!(!text.is_empty(), "{arguments:?} prints nothing");
    String::from_utf8(text).unwrap()
}

#[test]
fn outputs_of_a_server_and_of_commands_are_printable() {
    // What no output of a reasonable program has, once for each character.
    let hostile: String = unprintable_within_16_bits().into_iter().flat_map(|c| [c, 'x']).collect();
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log.jsonl");
    let server = server(&hostile, &log);
    let client = Client::connect(server.grpc_port());
    for entries in [[("user", &*hostile)], [(&*hostile, "a")], [(&*hostile, &*hostile)]] {
        let request = rate_limit_request("shop", &entries);
        (0..3).for_each(|_| drop(client.call(&request).unwrap()));
    }
    client.call(&rate_limit_request(&hostile, &[("user", &hostile)])).unwrap();
    let refused = client.call(&rate_limit_request("", &[("user", &hostile)])).unwrap_err();
    assert_printable("a status", refused.message());

    let entry = |key: &str, value: &str| json!({"entries": [{"key": key, "value": value}]});
    let request = json!({"domain": "shop", "descriptors": [entry("user", &hostile), entry(&hostile, &hostile)]});
    let body = request.to_string();
    let post = |port: u16, path: &str| http::post(port, path, body.as_str()).send().text();
    assert_printable("/json", &post(server.http_port(), "/json"));
    assert_printable("/json with an error", &http::post(server.http_port(), "/json", &*hostile).send().text());
    let explained = post(server.debug_port(), "/explain");
    assert_printable("/explain", &explained);
    let explained: Value = serde_json::from_str(&explained).unwrap();
    assert_eq!(explained["descriptors"][0]["descriptor"], format!("user={hostile}"), "JSON decodes to the text");
    let pages = [
        "/rlconfig",
        "/rlconfig/status",
        "/problems",
        "/store",
        "/settings",
        "/top",
        "/top?format=json",
        "/rules",
        "/rules?format=json",
        "/fleet",
        "/fleet?format=json",
        "/counters?domain=shop&rule=shop.user",
    ];
    for page in pages {
        assert_printable(page, &http::get(server.debug_port(), page).send().text());
    }
    let top: Value = serde_json::from_str(&http::get(server.debug_port(), "/top?format=json").send().text()).unwrap();
    assert_eq!(top["overall"].as_array().unwrap().len(), 3, "{top}");

    let lines = wait_for("the decisions to be logged", || {
        let lines = fs::read_to_string(&log).ok()?;
        (lines.lines().count() > 10).then_some(lines)
    });
    assert_printable("the decision log", &lines);
    let logged =
        |line: &str| serde_json::from_str::<Value>(line).unwrap()["descriptors"][0]["entries"][0]["value"].clone();
    assert_eq!(logged(lines.lines().nth(1).unwrap()), *hostile, "the log decodes to the text");
    wait_for("the decisions on standard output", || {
        let stdout = fs::read_to_string(log.with_extension("stdout")).unwrap();
        assert_printable("the decision log on standard output", &stdout);
        (stdout.lines().count() > 10).then_some(())
    });
    assert!(server.stderr().contains("decision"), "{}", server.stderr());
    assert_printable("the log", &server.stderr());

    outputs_of_commands_are_printable(&server, &hostile, directory.path(), &body);
}

/// Checks the outputs of commands, by a server and by its decision log in `directory`.
fn outputs_of_commands_are_printable(server: &Tollkeeper, hostile: &str, directory: &Path, request: &str) {
    let debug = format!("127.0.0.1:{}", server.debug_port());
    let grpc = format!("127.0.0.1:{}", server.grpc_port());
    fs::write(directory.join("request.json"), request).unwrap();
    fs::copy(server.rules_path(), directory.join("rules.yaml")).unwrap();
    let bad =
        fs::read_to_string(server.rules_path()).unwrap().replace("unit: day", &format!("unit: {}", escaped(hostile)));
    fs::write(directory.join("bad.yaml"), bad).unwrap();
    // An argument of a program has no U+0000.
    let value = format!("user={}", hostile.replace(['\0', ','], ""));
    let why = ["why", "--domain", "shop", "--descriptor", &value, "--log", "log.jsonl"];
    let commands: [&[&str]; 15] = [
        &["explain", "--request", "request.json", "--addr", &debug],
        &["explain", "--request", "request.json", "--config", "rules.yaml"],
        &["explain", "--request", "request.json", "--config", "rules.yaml", "--json"],
        &["call", "--request", "request.json", "--addr", &grpc],
        &["call", "--request", "request.json", "--addr", &grpc, "--json"],
        &["check", "bad.yaml"],
        &["check", "bad.yaml", "--format", "json"],
        &["top", "--addr", &debug],
        &["top", "--addr", &debug, "--json"],
        &["top", "--addr", &debug, "--rules"],
        &["simulate", "--traffic", "log.jsonl", "--rules", "rules.yaml"],
        &["simulate", "--traffic", "log.jsonl", "--rules", "rules.yaml", "--json"],
        &["recommend", "--traffic", "log.jsonl", "--rule", "shop.user"],
        &why,
        &[why.as_slice(), &["--json"]].concat(),
    ];
    for arguments in commands {
        let text = command(directory, arguments);
        assert_printable(&format!("tollkeeper {arguments:?}"), &text);
        assert!(!text.contains("Usage:"), "{arguments:?}: {text}");
    }
}

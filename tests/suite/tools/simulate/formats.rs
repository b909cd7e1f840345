//! Files of traffic: compressed, several, and access logs or tables with a mapping.

use serde_json::{Value, json};

use super::{Files, Log, OLD_RULES, compressed, limit};

/// Figures without what depends on the file and on the machine.
fn figures(mut results: Value) -> Value {
    let fields = results.as_object_mut().unwrap();
    for field in ["speed", "warnings"] {
        fields.remove(field);
    }
    results
}

#[test]
fn compressed_files_and_parts_of_a_log_give_the_same_figures() {
    let log = Log::new("p", OLD_RULES).ten_of_ann_and_two_of_bob();
    let (first, second) = log.lines.split_at(6);
    let files = Files::new().with("log.jsonl", log.text());
    let files = files.with("1.jsonl", first.join("\n") + "\n").with("2.jsonl", second.join("\n") + "\n");
    let gzip = compressed("gzip", &files.path("log.jsonl"));
    let files = files.with("log.jsonl.gz", gzip);
    let expected = figures(files.simulate("--rules new.yaml --traffic log.jsonl --json").json());
    assert_eq!(expected["new"]["rejected"], 7);
    for traffic in ["log.jsonl.gz", "2.jsonl 1.jsonl"] {
        let results = files.simulate(&format!("--rules new.yaml --json --traffic {traffic}")).json();
        assert_eq!(figures(results), expected, "{traffic}");
    }
}

#[test]
fn log_that_ends_within_a_record_is_read_to_its_last_record() {
    let log = Log::new("p", OLD_RULES).ten_of_ann_and_two_of_bob().text();
    let files = Files::new().with("log.jsonl", &log[..log.len() - 20]);
    let results = files.simulate("--rules new.yaml --traffic log.jsonl --json").json();
    assert_eq!(results["traffic"]["requests"], 11);
    assert_eq!(results["warnings"], json!(["a file ends within a record: its end is missing"]));
}

/// Mapping of the rows below.
const MAP: &str = "\
time: start_time
domain: shop
hits: cost
descriptors:
- - {key: login, field: user}
- - {key: kind, value: request}
  - {key: login, field: user}
";

#[test]
fn rows_of_an_access_log_become_requests_in_the_order_of_their_times() {
    let row = |at_ms: u64, user: Value| {
        let rest = json!({"bytes": [1, {"a": "}"}], "path": "/\u{e9}\\\"x"});
        let time = format!("2023-11-14T22:13:20.{at_ms:03}Z");
        json!({"start_time": time, "user": user, "cost": 1, "rest": rest}).to_string()
    };
    // Written when the responses ended.
    let order = [300, 0, 100, 200, 500, 400];
    let mut rows: Vec<String> = order.iter().map(|at_ms| row(*at_ms, json!("ann"))).collect();
    rows.push(row(600, json!("-")));
    rows.push(row(700, json!(null)));
    let files = Files::new().with("map.yaml", MAP).with("access.log", rows.join("\n"));
    let results =
        files.simulate("--rules new.yaml --against old.yaml --traffic access.log --map map.yaml --json").json();
    assert_eq!((&results["traffic"]["requests"], &results["traffic"]["skipped"]), (&json!(6), &json!(2)));
    assert_eq!(results["new"]["unmatched_descriptors"], 6);
    assert_eq!((&results["new"]["rejected"], &results["old"]["rejected"]), (&json!(3), &json!(1)));
    assert_eq!(results["traffic"]["first"], "2023-11-14T22:13:20Z");
    assert_eq!(limit(&results, "shop.login")["new"]["longest_run"]["seconds"], 0.2);
}

#[test]
fn csv_has_a_line_of_headings_and_quoted_values() {
    let rows =
        "user,cost,start_time\n\"a,b\",2,1700000000\n\"a,b\",2,1700000000500\n,1,1700000001\n\"a\nb\",1,1700000002\n";
    let map = MAP.replace("- - {key: kind, value: request}\n  - {key: login, field: user}\n", "");
    let files = Files::new().with("map.yaml", map).with("table.csv", rows);
    let results = files.simulate("--rules new.yaml --traffic table.csv --map map.yaml --json").json();
    assert_eq!((&results["traffic"]["requests"], &results["traffic"]["skipped"]), (&json!(3), &json!(1)));
    assert_eq!(
        results["rejected_keys"],
        json!([{"limit": "shop.login", "key": "login=a\\,b", "requests": 1, "error": 0}])
    );
    assert_eq!(limit(&results, "shop.login")["new"]["hits"], 5);
}

#[test]
fn mapping_of_the_documentation_reads_an_access_log() {
    let page = kit::read(&kit::repository("docs/simulate.md"));
    let (_, block) = page.split_once("```text\n").unwrap();
    let (map, _) = block.split_once("```").unwrap();
    let row = |user: &str, ip: &str| {
        json!({"start_time": "2026-01-01T00:00:00Z", "user": user, "ip": ip, "cost": 1}).to_string() + "\n"
    };
    let log = row("ann", "192.0.2.1").repeat(4) + &row("ann", "-");
    let files = Files::new().with("map.yaml", map).with("access.log", log);
    let results = files.simulate("--rules new.yaml --traffic access.log --map map.yaml --json").json();
    // The first descriptor needs only the name; the second matches no rule, and the last row lacks it.
    assert_eq!((&results["traffic"]["requests"], &results["new"]["rejected"]), (&json!(5), &json!(2)));
    assert_eq!(results["new"]["unmatched_descriptors"], 4);
}

#[test]
fn traffic_and_mappings_with_errors_are_refused_with_a_fix() {
    let log = Log::new("p", OLD_RULES).ten_of_ann_and_two_of_bob().text();
    let endless = format!("user,cost,start_time\n\"{}", "x".repeat(17 << 20));
    let header = |changes: &Value| Log::with_settings("p", OLD_RULES, changes).request(0, &["login=ann"]).text();
    let value_rule = OLD_RULES.replace("key: login", "key: login, value: ann");
    let files = Files::new()
        .with("map.yaml", MAP)
        .with("log.jsonl", &log)
        .with("access.log", "{\"start_time\": \"2023-11-14T22:13:20Z\", \"user\": \"ann\"}\n{]\n")
        .with("late.log", "{\"start_time\": \"soon\", \"user\": \"ann\"}\n")
        .with("other.csv", "a,b\n1,2\n")
        .with("endless.csv", endless)
        .with("none.jsonl", header(&json!({"values": "none"})))
        .with("hashed.jsonl", header(&json!({"values": "hashed"})))
        .with("value.yaml", value_rule)
        .with("broken.jsonl", log.replacen("\"seq\":3", "\"seq\":x", 1))
        .with("empty.jsonl", "")
        .with("log.zst", b"\x28\xb5\x2f\xfd\x00");
    let with_map = |file: &str| format!("--rules new.yaml --map map.yaml --traffic {file}");
    let without = |file: &str| format!("--rules new.yaml --traffic {file}");
    for (arguments, expected) in [
        (without("access.log"), "access.log:1: not a record of a decision log"),
        (without("access.log"), "(give --map for an access log or a table)"),
        (without("missing.jsonl"), "missing.jsonl: cannot be opened"),
        (without("broken.jsonl"), "broken.jsonl:4: not a record of a decision log"),
        (without("empty.jsonl"), "the traffic has no requests"),
        (without("none.jsonl"), "none.jsonl:1: the log has no values"),
        ("--rules value.yaml --traffic hashed.jsonl".to_owned(), "value.yaml:3:4 matches on a value"),
        (
            without("log.zst"),
            "log.zst:1: cannot be read: it is compressed with zstd (decompress it with `zstd -d FILE`",
        ),
        (with_map("log.zst"), "log.zst:1: it is compressed with zstd (decompress it with `zstd -d FILE`"),
        (with_map("access.log"), "access.log:2: not a JSON object"),
        (with_map("late.log"), "late.log:1: 'soon' is not a time"),
        (with_map("other.csv"), "there is no column 'start_time' (the columns are: a, b)"),
        (with_map("endless.csv"), "a row is longer than 16777216 bytes (is a quote missing?)"),
    ] {
        let message = files.simulate(&arguments).fails_with(1);
        assert!(message.contains(expected) && !message.contains("panicked"), "{arguments}: {message}");
    }
    // A rule that matches on keys alone needs no values.
    assert_eq!(files.simulate("--rules new.yaml --traffic hashed.jsonl --json").json()["new"]["rejected"], 0);
    for (map, expected) in [
        ("time: t\ndomain: shop\ndescriptors: []\n", "`descriptors` is empty"),
        ("time: t\ndescriptors: [[{key: a, field: b}]]\n", "give either `domain: NAME` or `domain_field: FIELD`"),
        ("time: t\ndomain: shop\ndescriptors: [[{key: a}]]\n", "descriptor 1, key 'a': give either `field` or `value`"),
        ("time: t\ndomain: shop\nhit: n\ndescriptors: [[{key: a, field: b}]]\n", "hit"),
        ("time: t\ndomain: shop\nmax_delay: 2h\ndescriptors: [[{key: a, field: b}]]\n", "max_delay: "),
    ] {
        std::fs::write(files.path("bad.yaml"), map).unwrap();
        let message = files.simulate("--rules new.yaml --map bad.yaml --traffic access.log").fails_with(2);
        assert!(message.contains("--map bad.yaml: ") && message.contains(expected), "{map}: {message}");
    }
}

mod field_map {
    use tollkeeper::base::clock::Time;
    use tollkeeper::limit::request::Hits;
    use tollkeeper::tools::replay::field_map::{parse_hits, parse_time};

    #[test]
    fn times_are_read_in_every_unit() {
        let expected = Some(Time::from_micros(1_700_000_000_250_000));
        for text in [
            "2023-11-14T22:13:20.250Z",
            "2023-11-14T23:13:20.25+01:00",
            "1700000000.25",
            "1700000000250",
            "1700000000250000",
            "1700000000250000000",
        ] {
            assert_eq!(parse_time(text), expected, "{text}");
        }
        for text in ["", "-", "yesterday", "-1", "nan", "inf", "2023-11-14", "1960-01-01T00:00:00Z"] {
            assert_eq!(parse_time(text), None, "{text}");
        }
    }

    #[test]
    fn hits_are_rounded_up_and_may_be_negative() {
        for (text, hits) in [
            ("0", Some(Hits::Peek)),
            ("3", Some(Hits::Charge(3))),
            ("2.1", Some(Hits::Charge(3))),
            ("-4", Some(Hits::Refund(4))),
            ("many", None),
            ("inf", None),
        ] {
            assert_eq!(parse_hits(text), hits, "{text}");
        }
    }
}

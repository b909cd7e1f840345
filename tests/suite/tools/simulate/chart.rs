//! The chart of requests over time.

use std::process::Command;

use serde_json::json;
use tollkeeper::tools::cli::chart::format_timeline_chart;
use tollkeeper::tools::simulate::tally::TimelineResults;

use super::{Files, Log};
use kit::tollkeeper::program_path;

/// A chart of spans of two seconds, 64 columns wide.
fn chart(requests: &[u64], rejected: &[u64], rejected_before: Option<&[u64]>) -> String {
    let timeline = TimelineResults {
        start: "2026-07-08T12:00:00.25Z".to_owned(),
        span_seconds: 2,
        requests: requests.to_vec(),
        rejected: rejected.to_vec(),
        rejected_before: rejected_before.map(<[u64]>::to_vec),
    };
    let chart = format_timeline_chart("admitted and rejected", &timeline, "2026-07-08T12:01:38.5Z", 64);
    for line in chart.lines() {
        assert!(line.chars().count() <= 64 && line.trim_end() == line, "{line}");
    }
    chart
}

#[test]
fn each_span_has_its_height_on_a_common_scale() {
    let text = chart(&[2, 5, 26, 25, 1], &[0, 1, 2, 24, 1], Some(&[0, 0, 0, 12, 0]));
    assert_eq!(
        text,
        "
admitted and rejected, requests per 2 s
      24 │                      ███████████
admitted │                      ███████████
       0 │▂▂▂▂▂▂▂▂▂▂▂▄▄▄▄▄▄▄▄▄▄▄███████████▁▁▁▁▁▁▁▁▁▁▁
      24 │                                 ███████████
rejected │                                 ███████████
       0 │           ▁▁▁▁▁▁▁▁▁▁▁▂▂▂▂▂▂▂▂▂▂▂███████████▁▁▁▁▁▁▁▁▁▁
      24 │
  before │                                 ▄▄▄▄▄▄▄▄▄▄▄
       0 │                                 ███████████
          2026-07-08T12:00:00Z              2026-07-08T12:01:38Z
"
    );
}

#[test]
fn nothing_is_drawn_without_requests() {
    assert_eq!(chart(&[], &[], None), "");
    assert_eq!(chart(&[], &[], Some(&[])), "");
}

#[test]
fn one_span_takes_the_whole_width() {
    assert_eq!(
        chart(&[4], &[1], None),
        "
admitted and rejected, requests per 2 s
       3 │██████████████████████████████████████████████████████
admitted │██████████████████████████████████████████████████████
       0 │██████████████████████████████████████████████████████
       3 │
rejected │
       0 │██████████████████████████████████████████████████████
          2026-07-08T12:00:00Z              2026-07-08T12:01:38Z
"
    );
}

#[test]
fn rejected_requests_are_not_admitted() {
    assert_eq!(
        chart(&[3, 7], &[3, 7], None),
        "
admitted and rejected, requests per 2 s
       7 │
admitted │
       0 │
       7 │                           ███████████████████████████
rejected │▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃███████████████████████████
       0 │██████████████████████████████████████████████████████
          2026-07-08T12:00:00Z              2026-07-08T12:01:38Z
"
    );
}

#[test]
fn spans_beyond_the_width_are_joined_and_one_request_among_many_is_seen() {
    let (mut requests, mut rejected) = (vec![1000; 100], vec![0; 100]);
    (requests[10], rejected[40]) = (0, 1);
    assert_eq!(
        chart(&requests, &rejected, None),
        "
admitted and rejected, requests per 4 s
    2000 │██████ ███████████████████████████████████████████████
admitted │██████▄███████████████████████████████████████████████
       0 │██████████████████████████████████████████████████████
    2000 │
rejected │
       0 │                      ▁
          2026-07-08T12:00:00Z              2026-07-08T12:01:38Z
"
    );
}

#[test]
fn huge_counts_are_shown_in_full() {
    assert_eq!(
        chart(&[u64::MAX, u64::MAX / 2, 1], &[0, u64::MAX / 4, 1], None),
        "
admitted and rejected, requests per 2 s
18446744073709551615 │██████████████
            admitted │██████████████
                   0 │██████████████▇▇▇▇▇▇▇▇▇▇▇▇▇▇
18446744073709551615 │
            rejected │
                   0 │              ▆▆▆▆▆▆▆▆▆▆▆▆▆▆▁▁▁▁▁▁▁▁▁▁▁▁▁▁
                      2026-07-08T12:00:00Z  2026-07-08T12:01:38Z
"
    );
}

#[test]
fn charts_of_the_documentation_and_the_help_are_real() {
    let rules = |limit: u32| {
        format!(
            "domain: shop\ndescriptors:\n- {{key: login, rate_limit: {{unit: minute, requests_per_unit: {limit}, algorithm: token_bucket}}}}\n"
        )
    };
    let mut log = Log::new("p", &rules(120));
    // Ann logs in every two seconds for 20 minutes; bob four times a second for three of them.
    for at in 0..4800 {
        if at % 8 == 0 {
            log = log.request(at * 250, &["login=ann"]);
        }
        if (2000..2720).contains(&at) {
            log = log.request(at * 250, &["login=bob"]);
        }
    }
    let files = Files::new().with("new.yaml", rules(60)).with("decisions.jsonl", log.text());
    let run = files.simulate("--rules new.yaml --traffic decisions.jsonl");
    assert_eq!(run.code(), 0, "{run:?}");
    let text = run.stdout();
    let (_, chart) = text.split_once("\nadmitted and rejected").unwrap();
    let indented: String =
        format!("admitted and rejected{chart}").lines().map(|line| format!("    {line}\n")).collect();
    let page = kit::read(&kit::repository("docs/simulate.md"));
    assert!(page.contains(&indented), "docs/simulate.md lacks\n{indented}");
    let results = files.simulate("--rules new.yaml --traffic decisions.jsonl --json").json();
    let timeline = &results["timeline"];
    assert_eq!(timeline["span_seconds"], json!(16));
    // The help is for narrower terminals.
    let counts = |name: &str| serde_json::from_value::<Vec<u64>>(timeline[name].clone()).unwrap();
    let timeline = TimelineResults {
        start: timeline["start"].as_str().unwrap().to_owned(),
        span_seconds: 16,
        requests: counts("requests"),
        rejected: counts("rejected"),
        rejected_before: Some(counts("rejected_before")),
    };
    let last = results["traffic"]["last"].as_str().unwrap();
    let chart = format_timeline_chart("admitted and rejected", &timeline, last, 64);
    let indented: String = chart.trim_start().lines().map(|line| format!("  {line}\n")).collect();
    let mut help = Command::new(program_path());
    let help = help.args(["simulate", "--help"]).env("COLUMNS", "80").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    assert!(help.contains(&indented), "{indented}\nis not in\n{help}");
}

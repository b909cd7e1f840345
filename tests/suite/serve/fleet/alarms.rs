//! Hot keys and gaps between requests.

use std::collections::HashSet;
use std::sync::Arc;
use tollkeeper::rules::compile::RuleText;
use tollkeeper::rules::compile::compile_texts;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::yaml::DocumentSelection;
use tollkeeper::serve::fleet::alarms::RequestGap;
use tollkeeper::serve::fleet::alarms::find_hot_key;
use tollkeeper::serve::fleet::alarms::find_request_gap;
use tollkeeper::serve::fleet::alarms::limits_left_out_of_hot_key_alarm;
use tollkeeper::serve::fleet::finding::ADVICE;
use tollkeeper::telemetry::decision_history::RequestMinute;
use tollkeeper::telemetry::metrics::limit_stats::LimitName;
use tollkeeper::telemetry::top_keys::{KeyCount, UnenforcedMode};

#[test]
fn pages_of_alarms_exist() {
    for (kind, _, page) in ADVICE {
        let (path, anchor) = page.split_once('#').unwrap_or((page, ""));
        let text = kit::read(&kit::repository(path));
        let headings =
            text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches(['#', ' ']));
        let mut anchors = headings.map(|heading| heading.to_lowercase().replace(' ', "-"));
        assert!(anchor.is_empty() || anchors.any(|of_page| of_page == anchor), "{kind}: {page}");
    }
}

#[test]
fn hot_key_has_more_than_half_of_many_hits_and_no_burst() {
    let key = |at_least: u64, in_bursts: u64| KeyCount {
        mode: None,
        limit: Arc::new(LimitName::new(["shop", "user"])),
        text: "user=ann".into(),
        has_plain_values: true,
        at_least,
        at_most: at_least,
        requests: at_least,
        in_bursts,
        largest_burst: in_bursts,
    };
    for (keys, all, is_found) in [
        (vec![key(1000, 0), key(900, 0)], 1900, true),
        (vec![key(1000, 0), key(900, 0)], 2000, false),
        (vec![key(999, 0)], 999, false),
        (vec![key(5000, 5000)], 5000, false),
        (vec![key(5000, 4001)], 5000, false),
        (vec![key(5000, 4000)], 5000, true),
        (vec![], 0, false),
    ] {
        assert_eq!(find_hot_key(&keys, all).is_some(), is_found, "{keys:?} of {all}");
        let in_shadow: Vec<_> =
            keys.into_iter().map(|key| KeyCount { mode: Some(UnenforcedMode::Shadow), ..key }).collect();
        assert!(find_hot_key(&in_shadow, all).is_none());
    }
}

#[test]
fn limits_of_a_rule_with_one_key_have_no_hot_key() {
    let rules = "\
domain: shop
descriptors:
- {key: generic_key, value: checkout, rate_limit: {unit: minute, requests_per_unit: 5}}
- key: user
  rate_limit:
  - {unit: minute, requests_per_unit: 5}
  - {unit: hour, requests_per_unit: 50, name: hourly}
  - {unit: hour, requests_per_unit: 5, name: lower, shadow_mode: true}
";
    let text = RuleText { name: "rules.yaml".into(), bytes: rules.into(), documents: DocumentSelection::FirstOnly };
    let compiled = compile_texts(&[text], &CompileOptions::default()).expect("good rules");
    let rules = RuleSet::new(compiled.domains);
    let limits: Vec<_> = rules.rules().flat_map(|rule| &rule.limits).map(|limit| &limit.stats).collect();
    let left_out = |names: &[&LimitName]| -> Vec<&str> {
        let names: HashSet<&LimitName> = names.iter().copied().collect();
        rules.rules().flat_map(|rule| limits_left_out_of_hot_key_alarm(rule, &names)).map(LimitName::as_str).collect()
    };
    let names: Vec<&LimitName> = limits.iter().map(|limit| limit.name()).collect();
    limits.iter().for_each(|limit| limit.keys.add_hash(1));
    assert_eq!(left_out(&names).len(), 4, "one key each");
    // In another register of the sketch.
    limits[1].keys.add_hash(1 << 60);
    assert_eq!(left_out(&names), [names[0].as_str()], "two keys of the second rule");
    assert_eq!(left_out(&names[1..]), [""; 0], "the first has no key with many hits");
}

fn gap_after(requests: &[u64]) -> Option<RequestGap> {
    let minute = |requests: &u64| RequestMinute { requests: *requests, ..RequestMinute::default() };
    let minutes: Vec<_> = (100..).zip(requests.iter().map(minute)).collect();
    find_request_gap(&minutes)
}

#[test]
fn gap_is_found_after_traffic_only() {
    assert_eq!(gap_after(&[]), None);
    assert_eq!(gap_after(&[0, 0, 0]), None, "a process that just started");
    assert_eq!(gap_after(&[500, 400, 0]), None, "the minute that runs may have begun just now");
    assert_eq!(gap_after(&[500, 400, 0, 0]), Some(RequestGap { minutes: 1, before: 500 }));
    assert_eq!(gap_after(&[29, 29, 0, 0]), None, "few requests may pause");
    assert_eq!(gap_after(&[500, 0, 0, 1]), None);
    assert_eq!(gap_after(&[&[500][..], &[0; 10]].concat()), Some(RequestGap { minutes: 9, before: 500 }));
    assert_eq!(gap_after(&[&[500][..], &[0; 11]].concat()), None, "a service that was switched off");
}

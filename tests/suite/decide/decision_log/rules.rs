//! Rules in headers: the same rule set can be compiled from them.

use std::sync::Arc;

use tollkeeper::base::pb::xds::{RateLimitConfig, RateLimitUnit};
use tollkeeper::decide::log::header::{self, RuleSetRecord};
use tollkeeper::rules::compile::RuleText;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::rule::rlconfig::format_rlconfig;
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::rule_defaults::RuleDefaults;
use tollkeeper::rules::source::SourceRules;
use tollkeeper::rules::xds::resource::parse_resources;
use tollkeeper::rules::yaml::DocumentSelection;

use kit::xds_server::{limited, resource};

fn text(name: &str, bytes: Vec<u8>, documents: DocumentSelection) -> RuleText {
    RuleText { name: Arc::from(name), bytes, documents }
}

/// `/rlconfig` of the rules, with the location of each.
fn lines(rules: SourceRules) -> Vec<String> {
    let compiled = rules.compile(&CompileOptions::default()).unwrap_or_else(|problems| panic!("{problems}"));
    let rules = RuleSet::new(compiled.domains);
    let locations: Vec<String> = rules.rules().map(|compiled| compiled.rule.location.to_string()).collect();
    [format_rlconfig(&rules), locations].concat()
}

/// Asserts that the record, read from its JSON, gives the same rules. Returns its id.
fn assert_round_trip(rules: SourceRules) -> String {
    let record = header::build_rule_set_record(&rules, Some("7"), &RuleDefaults::default());
    let json = serde_json::to_string(&record).unwrap();
    let read: RuleSetRecord = serde_json::from_str(&json).unwrap();
    assert_eq!(read, record);
    assert_eq!(lines(header::decode_recorded_rules(read).unwrap().rules), lines(rules));
    record.id
}

#[test]
fn rule_files_and_resources_are_recorded_without_loss() {
    let yaml = |domain: &str| {
        let rules = "descriptors: [{key: \u{fc}, rate_limit: {unit: day, requests_per_unit: 3}}]";
        format!("domain: {domain}\n{rules}\n---\ndomain: {domain}2\n{rules}\n")
    };
    let utf16: Vec<u8> = "\u{feff}".chars().chain(yaml("d").chars()).flat_map(|c| (c as u16).to_le_bytes()).collect();
    let files = SourceRules::Texts(
        vec![
            text("a.yaml", yaml("a").into_bytes(), DocumentSelection::All),
            text("b.yaml", yaml("b").into_bytes(), DocumentSelection::FirstOnly),
            text("d.yaml", utf16, DocumentSelection::All),
        ]
        .into(),
    );
    let config = |name: &str, requests| {
        let descriptors = vec![limited("user", RateLimitUnit::Day, requests)];
        resource(&RateLimitConfig { name: name.to_owned(), domain: name.to_owned(), descriptors })
    };
    let resources =
        |requests| SourceRules::Resources(parse_resources(vec![config("x", requests), config("y", 5)]).unwrap());
    let ids = [files, resources(3), resources(4)].map(assert_round_trip);
    assert!(ids[0] != ids[1] && ids[1] != ids[2]);
    assert_eq!(assert_round_trip(resources(3)), ids[1]);
}

#[test]
fn damaged_rules_are_errors() {
    let record =
        |json: &str| header::decode_recorded_rules(serde_json::from_str(json).unwrap()).unwrap_err().join("\n");
    let document = |rest: &str| format!(r#"{{"id":"","documents":[{{"name":"n",{rest}}}]}}"#);
    assert_eq!(record(&document(r#""format":"yaml""#)), "n: the document has no contents");
    let found = record(&document(r#""format":"xds","base64":"?""#));
    assert!(found.starts_with("n: the document is not base64: "), "{found}");
    let found = record(&document(r#""format":"xds","base64":"//8=""#));
    assert!(found.contains("it cannot be decoded"), "{found}");
}

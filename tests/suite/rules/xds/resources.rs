//! Resources as rules: the same checks as for YAML, with the name of the resource in messages.

use prost_types::value::Kind;
use prost_types::{Any, Struct, Value};
use tollkeeper::base::pb::xds::{
    RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitReplace, RateLimitUnit,
};
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{CompiledRules, RuleText, compile_texts};
use tollkeeper::rules::rule::rlconfig::format_rlconfig;
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::xds::refused_domains::compile_resources;
use tollkeeper::rules::xds::resource::parse_resources;
use tollkeeper::rules::yaml::DocumentSelection;

use kit::xds_server::{TYPE_URL, daily, limited, resource};

fn compiled(configs: &[RateLimitConfig]) -> Result<CompiledRules, String> {
    compiled_resources(configs.iter().map(resource).collect())
}

fn compiled_resources(resources: Vec<Any>) -> Result<CompiledRules, String> {
    let resources = parse_resources(resources).map_err(|errors| errors.join("\n"))?;
    compile_resources(&resources, &CompileOptions::default()).map_err(|problems| problems.to_string())
}

fn errors(configs: &[RateLimitConfig]) -> String {
    compiled(configs).expect_err("the rules are wrong")
}

fn lines(compiled: CompiledRules) -> Vec<String> {
    format_rlconfig(&RuleSet::new(compiled.domains))
}

fn domain(descriptors: Vec<RateLimitDescriptor>) -> RateLimitConfig {
    RateLimitConfig { name: "res".to_owned(), domain: "d".to_owned(), descriptors }
}

fn policy(policy: RateLimitPolicy) -> RateLimitConfig {
    domain(vec![RateLimitDescriptor { key: "k".to_owned(), rate_limit: Some(policy), ..Default::default() }])
}

#[test]
fn resource_gives_the_same_rules_as_yaml() {
    let nested = RateLimitDescriptor {
        key: "route".to_owned(),
        value: "a".to_owned(),
        descriptors: vec![
            RateLimitDescriptor { shadow_mode: true, ..limited("user", RateLimitUnit::Week, 5) },
            RateLimitDescriptor { quota_mode: true, ..limited("team", RateLimitUnit::Month, 0) },
            RateLimitDescriptor {
                detailed_metric: true,
                value: "*".to_owned(),
                ..limited("ip", RateLimitUnit::Hour, 7)
            },
        ],
        ..RateLimitDescriptor::default()
    };
    let free = RateLimitPolicy { unlimited: true, name: "free".to_owned(), ..RateLimitPolicy::default() };
    let free = RateLimitDescriptor { key: "free".to_owned(), rate_limit: Some(free), ..RateLimitDescriptor::default() };
    let mut named = limited("named", RateLimitUnit::Second, 3);
    if let Some(policy) = &mut named.rate_limit {
        policy.name = "own".to_owned();
        policy.replaces = vec![RateLimitReplace { name: "free".to_owned() }];
    }
    let units = [RateLimitUnit::Minute, RateLimitUnit::Day, RateLimitUnit::Year];
    let mut descriptors = vec![nested, free, named];
    descriptors.extend(units.map(|unit| limited(unit.as_str_name(), unit, 1)));
    let over_xds = compiled(&[domain(descriptors)]).unwrap();
    let yaml = "domain: d
descriptors:
- key: route
  value: a
  descriptors:
  - {key: user, shadow_mode: true, rate_limit: {unit: week, requests_per_unit: 5}}
  - {key: team, quota_mode: true, rate_limit: {unit: month}}
  - {key: ip, value: '*', detailed_metric: true, rate_limit: {unit: hour, requests_per_unit: 7}}
- {key: free, rate_limit: {unlimited: true, name: free}}
- {key: named, rate_limit: {unit: second, requests_per_unit: 3, name: own, replaces: [{name: free}]}}
- {key: MINUTE, rate_limit: {unit: minute, requests_per_unit: 1}}
- {key: DAY, rate_limit: {unit: day, requests_per_unit: 1}}
- {key: YEAR, rate_limit: {unit: year, requests_per_unit: 1}}
";
    let text = RuleText { name: "res".into(), bytes: yaml.into(), documents: DocumentSelection::All };
    let from_yaml = compile_texts(&[text], &CompileOptions::default()).unwrap();
    let without_positions = |compiled: &CompiledRules| {
        let text = format!("{:?}", compiled.domains);
        text.split("line: ")
            .map(|part| part.trim_start_matches(|c: char| c.is_ascii_digit()))
            .collect::<String>()
            .split("column: ")
            .map(|part| part.trim_start_matches(|c: char| c.is_ascii_digit()))
            .collect::<String>()
    };
    assert_eq!(without_positions(&over_xds), without_positions(&from_yaml));
    assert_eq!(lines(over_xds), lines(from_yaml));
}

#[test]
fn metadata_becomes_json() {
    let text = |text: &str| Value { kind: Some(Kind::StringValue(text.to_owned())) };
    let fields = [("team".to_owned(), text("a")), ("n".to_owned(), Value { kind: Some(Kind::NumberValue(1.5)) })];
    let descriptor =
        RateLimitDescriptor { metadata: Some(Struct { fields: fields.into() }), ..limited("k", RateLimitUnit::Day, 1) };
    let compiled = compiled(&[domain(vec![descriptor])]).unwrap();
    let rule = compiled.domains[0].descriptors[0].rule.as_ref().unwrap();
    assert_eq!(serde_json::to_value(&rule.metadata).unwrap(), serde_json::json!({"team": "a", "n": 1.5}));
}

#[test]
fn messages_are_those_of_envoyproxy_ratelimit_after_the_name_of_the_resource() {
    let unit = |unit| RateLimitPolicy { unit, requests_per_unit: 1, ..RateLimitPolicy::default() };
    let own =
        RateLimitPolicy { name: "n".to_owned(), replaces: vec![RateLimitReplace { name: "n".to_owned() }], ..unit(1) };
    let empty_domain = RateLimitConfig { domain: String::new(), ..domain(Vec::new()) };
    let twice = domain(vec![limited("k", RateLimitUnit::Day, 1), limited("k", RateLimitUnit::Day, 1)]);
    for (config, expected) in [
        (policy(unit(0)), "res: invalid rate limit unit 'UNKNOWN'"),
        (policy(unit(8)), "res: invalid rate limit unit '8'"),
        (policy(unit(-1)), "res: invalid rate limit unit '-1'"),
        (
            policy(RateLimitPolicy { unlimited: true, ..unit(1) }),
            "res: should not specify rate limit unit when unlimited",
        ),
        (policy(own), "res: replaces should not contain name of same descriptor"),
        (empty_domain, "res: config file cannot have empty domain"),
        (domain(vec![limited("", RateLimitUnit::Day, 1)]), "res: descriptor has empty key"),
        (twice, "res: duplicate descriptor composite key 'd.k'"),
    ] {
        let found = errors(&[config]);
        assert!(found.starts_with(expected) && found.lines().count() == 1, "{found}, not {expected}");
    }
    let path = "(descriptors[0].rate_limit.unit)";
    assert!(errors(&[policy(unit(0))]).contains(path), "{}", errors(&[policy(unit(0))]));
    let found = errors(&[daily("d", &[("a", 1)]), daily("d", &[("b", 1)])]);
    assert!(found.starts_with("d: duplicate domain 'd' in config file"), "{found}");
}

#[test]
fn order_of_resources_does_not_matter() {
    let same_name = RateLimitConfig { name: "a".to_owned(), ..daily("c", &[("k", 3)]) };
    let one = [daily("a", &[("k", 1)]), daily("b", &[("k", 2)]), same_name];
    let mut other = one.clone();
    other.reverse();
    assert_eq!(lines(compiled(&one).unwrap()), lines(compiled(&other).unwrap()));
}

#[test]
fn unknown_fields_pass() {
    let mut with_unknown = resource(&daily("d", &[("k", 1)]));
    // Field 99, length-delimited.
    with_unknown.value.extend([0x9a, 0x06, 0x02, b'x', b'y']);
    assert!(compiled_resources(vec![with_unknown]).is_ok());
}

#[test]
fn bytes_that_are_no_resource_are_errors() {
    let broken = Any { type_url: TYPE_URL.to_owned(), value: vec![0x0a, 0xff] };
    let other = Any { type_url: "type.googleapis.com/other\n".to_owned(), value: Vec::new() };
    let not_utf8 = Any { type_url: TYPE_URL.to_owned(), value: vec![0x0a, 0x01, 0xff] };
    let errors = parse_resources(vec![resource(&daily("d", &[])), broken, other, not_utf8]).unwrap_err();
    assert_eq!(errors.len(), 3, "{errors:?}");
    assert!(errors[0].starts_with("resource 1 of 4: it cannot be decoded: "), "{errors:?}");
    assert_eq!(errors[1], "resource 2 of 4: it is a 'type.googleapis.com/other\\n', not a RateLimitConfig");
}

//! Limits as text: every text of a limit is made of its written keys, which compile to an equal limit; and changes of
//! limits between two sets of rules.

use std::collections::BTreeSet;
use std::num::NonZeroU16;

use proptest::prelude::*;
use tollkeeper::limit::overflow::ChainPosition;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::document::read::all_keys;
use tollkeeper::rules::key_table::Section;
use tollkeeper::rules::rule::changes::{LimitList, RuleChanges};
use tollkeeper::rules::rule::decompile::{LimitPlace, format_limit_on_one_line, format_rule_file_with_limits};
use tollkeeper::rules::rule::rlconfig::format_rlconfig;
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::rule::{RuleAllowance, RuleLimit};
use tollkeeper::rules::yaml::DocumentSelection;

/// Options under which every key has an effect.
fn options() -> CompileOptions {
    CompileOptions { regions: NonZeroU16::new(2), ..CompileOptions::default() }
}

fn load(text: &str) -> Option<RuleSet> {
    let text = RuleText { name: "rules.yaml".into(), bytes: text.into(), documents: DocumentSelection::All };
    Some(RuleSet::new(compile_texts(&[text], &options()).ok()?.domains))
}

/// The rule file of a descriptor with these keys, and these limits in a list.
fn rule_file(descriptor: &str, limits: &[String]) -> String {
    let limits: String = limits.iter().map(|limit| format!("  - {limit}\n")).collect();
    format!("domain: shop\ndescriptors:\n- key: user\n{descriptor}  rate_limit:\n{limits}")
}

fn limits(rules: &RuleSet) -> Vec<RuleLimit> {
    match &rules.rules().next().expect("a rule").rule.allowance {
        RuleAllowance::Limits(limits) => limits.clone(),
        other @ RuleAllowance::Unlimited { .. } => panic!("{other:?}"),
    }
}

/// Everything that a limit is.
fn describe(limits: &[RuleLimit]) -> Vec<String> {
    let describe = |limit: &RuleLimit| {
        let RuleLimit {
            limit,
            name,
            replaces,
            active,
            shadow,
            quota,
            candidate,
            overflow_to,
            notify,
            epoch,
            left_out_defaults: _,
        } = limit;
        let active = active.map(|active| active.spec().to_string());
        format!(
            "{limit:?} {name:?} {replaces:?} {active:?} {shadow} {quota} {candidate} {overflow_to:?} {notify:?} {epoch}"
        )
    };
    limits.iter().map(describe).collect()
}

/// Asserts that the texts of the rule's limits compile to equal limits. Returns the printed keys.
fn assert_texts_compile_to_equal_limits(text: &str) -> Option<BTreeSet<&'static str>> {
    let rules = load(text)?;
    let limits = limits(&rules);
    let entries = rules.find_rule_path("shop.user").expect("a rule");
    let file = format_rule_file_with_limits(&entries, &limits);
    let again = load(&file).unwrap_or_else(|| panic!("does not compile:\n{file}\nfrom:\n{text}"));
    assert_eq!(describe(&self::limits(&again)), describe(&limits), "{file}\nfrom:\n{text}");
    assert_eq!(format_rlconfig(&again), format_rlconfig(&rules), "{file}");
    // A limit that overflows needs the next one.
    let is_alone = |limit: &&RuleLimit| !limit.candidate && limit.limit.chain_position() == ChainPosition::NotInChain;
    for limit in limits.iter().filter(is_alone) {
        let line = format_limit_on_one_line(limit.rule_file_keys(LimitPlace::Sole));
        let alone = rule_file("", std::slice::from_ref(&line));
        let again = load(&alone).unwrap_or_else(|| panic!("does not compile: {line}\nfrom:\n{text}"));
        assert_eq!(describe(&self::limits(&again)), describe(std::slice::from_ref(limit)), "{line}\nfrom:\n{text}");
    }
    let keys = LimitPlace::of_limits(&limits).flat_map(|(limit, place)| limit.rule_file_keys(place));
    Some(keys.map(|(key, _)| key).collect())
}

/// Keys that a limit of any algorithm may have, with values.
const OPTIONAL_KEYS: [&str; 27] = [
    "notify: [99.9%, 50%]",
    "unit_multiplier: 3",
    "algorithm: token_bucket",
    "algorithm: leaky_bucket",
    "algorithm: sliding_window_log",
    "algorithm: sliding_window_counter",
    "window: {timezone: Europe/Berlin, day_starts: \"06:30\", week_starts: sunday}",
    "ban: 10m",
    "ban: {for: 90s, after: 3}",
    "reservations: 10m",
    "reservations: {estimate: 7, settle_within: 90s, unsettled: return}",
    "active: {days: \"mon-fri\", from: \"08:00\", to: \"18:00\", timezone: Asia/Tokyo}",
    "bucket_size: 40",
    "queue_size: 4",
    "max_wait: 1500us",
    "count_rejected: true",
    "count_rejected: false",
    "consistency: eventual",
    "max_overshoot: 12.5%",
    "scope: global",
    "reserve: 30%",
    "on_region_loss: deny",
    "on_store_error: deny",
    "on_store_error: allow",
    "epoch: 9",
    "replaces: [{name: other}, {name: \"a, b\"}]",
    "quota_mode: true",
];

fn limit_text() -> impl Strategy<Value = String> {
    let base = prop::sample::select(vec![
        "unit: day, requests_per_unit: 500",
        "unit: month, requests_per_unit: 100",
        "unit: second, requests_per_unit: 0",
        "concurrent: 5",
        "concurrent: 5, max_duration: 90s",
    ]);
    let others = prop::sample::subsequence(OPTIONAL_KEYS.to_vec(), 0..5);
    let name = prop::option::weighted(0.4, prop::sample::select(vec!["name: one", "name: \"no\"", "name: \"a: b\""]));
    let shadow = prop::option::weighted(0.3, Just("shadow_mode: true"));
    (base, others, name, shadow).prop_map(|(base, others, name, shadow)| {
        let keys: Vec<&str> = std::iter::once(base).chain(others).chain(name).chain(shadow).collect();
        format!("{{{}}}", keys.join(", "))
    })
}

proptest! {
    #![proptest_config(kit::costly_property(1000))]

    #[test]
    fn texts_of_limits_compile_to_equal_limits(
        descriptor in prop::sample::select(vec!["", "  shadow_mode: true\n", "  quota_mode: true\n"]),
        limits in prop::collection::vec(limit_text(), 1..4),
    ) {
        // Not every combination is valid.
        assert_texts_compile_to_equal_limits(&rule_file(descriptor, &limits));
    }
}

#[test]
fn text_of_a_limit_has_every_key() {
    let mut printed = BTreeSet::new();
    for limit in [
        "unit: day, unit_multiplier: 2, requests_per_unit: 9, algorithm: token_bucket, bucket_size: 20, max_wait: 2s",
        "unit: day, requests_per_unit: 9, algorithm: leaky_bucket, queue_size: 3, name: one, replaces: [{name: two}]",
        "unit: day, requests_per_unit: 9, window: {timezone: Asia/Tokyo}, ban: 5m, on_store_error: deny, epoch: 2",
        "unit: day, requests_per_unit: 9, reservations: 5m, active: {days: sat}, quota_mode: true",
        "unit: day, requests_per_unit: 900, consistency: eventual, max_overshoot: 40",
        "unit: day, requests_per_unit: 900, scope: global, reserve: 30%, on_region_loss: deny, shadow_mode: true",
        "unit: day, requests_per_unit: 9, count_rejected: false",
        "concurrent: 3, max_duration: 90s",
        "unit: day, requests_per_unit: 9, notify: [80%]",
    ] {
        let text = rule_file("", &[format!("{{{limit}}}")]);
        printed.extend(assert_texts_compile_to_equal_limits(&text).unwrap_or_else(|| panic!("invalid: {limit}")));
    }
    let overflow = [
        "{unit: day, requests_per_unit: 9, name: plan, overflow_to: credits}",
        "{unit: week, requests_per_unit: 9, name: credits, overflow_to: \"no\"}",
        "{unit: year, requests_per_unit: 9, name: \"no\"}",
    ];
    let overflow = rule_file("", &overflow.map(str::to_owned));
    printed.extend(assert_texts_compile_to_equal_limits(&overflow).expect("it is valid"));
    let of_limits = all_keys().filter(|key| key.sections.contains(&Section::Limit)).map(|key| key.name);
    // Texts of a rejection are keys of the rule.
    let expected: BTreeSet<&str> = of_limits.filter(|key| !key.starts_with("over_limit_")).collect();
    assert_eq!(printed, expected);
}

fn list(limits: &[&str]) -> LimitList {
    let rules: String = limits
        .iter()
        .enumerate()
        .map(|(index, limit)| format!("- {{key: k{index}, rate_limit: {limit}}}\n"))
        .filter(|rule| !rule.contains("none"))
        .collect();
    LimitList::of_rules(&load(&format!("domain: shop\ndescriptors:\n{rules}")).expect("valid rules"))
}

#[test]
fn changes_name_each_limit_with_old_and_new_values_and_are_bounded() {
    let minute = "{unit: minute, requests_per_unit: 300}";
    for (old, new, expected) in [
        (minute, minute, "no limit changed (bodies, metadata and tables are not compared)"),
        (minute, "{unit: minute, requests_per_unit: 5}", "shop.k0 300 -> 5 a minute; 1 changed, 0 added, 0 removed"),
        (
            minute,
            "{unit: hour, unit_multiplier: 2, requests_per_unit: 300}",
            "shop.k0 300 a minute -> 300 in 2 hours; 1 changed, 0 added, 0 removed",
        ),
        (
            minute,
            "{unit: minute, requests_per_unit: 300, algorithm: token_bucket, on_store_error: deny}",
            "shop.k0 300 a minute, algorithm fixed_window -> token_bucket, bucket_size none -> 300, on_store_error \
             local -> deny; 1 changed, 0 added, 0 removed",
        ),
        (
            minute,
            "{unlimited: true}",
            "shop.k0 300 a minute -> unlimited, algorithm fixed_window -> none; 1 changed, 0 added, 0 removed",
        ),
        (minute, "none", "shop.k0 removed: 300 a minute, algorithm fixed_window; 0 changed, 0 added, 1 removed"),
        ("none", "{concurrent: 4}", "shop.k0 added: 4 at once, each for 3600s; 0 changed, 1 added, 0 removed"),
    ] {
        let changes = RuleChanges::between(&list(&[old, "{unit: day}"]), &list(&[new, "{unit: day}"]));
        assert_eq!(changes.to_string(), expected);
    }
    let many = |limit| vec![limit; 10_000];
    let changes = RuleChanges::between(&list(&many(minute)), &list(&many("{unit: day, requests_per_unit: 1}")));
    assert_eq!((changes.changed, changes.limits.len()), (10_000, 100));
    assert!(changes.to_string().len() < 1000, "{changes}");
}

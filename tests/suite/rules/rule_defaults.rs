//! Defaults for rules of any source: their file, their precedence, and limits that cannot have them.

use std::num::NonZeroU16;
use std::sync::Arc;

use proptest::prelude::*;
use tollkeeper::decide::log::header;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::period::Unit;
use tollkeeper::limit::{Consistency, Limit, Overshoot, StoreFailurePolicy};
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{CompiledRules, RuleText, compile_texts};
use tollkeeper::rules::diagnostic::Diagnostics;
use tollkeeper::rules::rule::{Domain, RuleAllowance, RuleLimit};
use tollkeeper::rules::rule_defaults::{MAX_DEFAULTS_FILE_BYTES, RuleDefaults};
use tollkeeper::rules::schema::defaults_file_schema;
use tollkeeper::rules::source::SourceRules;
use tollkeeper::rules::yaml::DocumentSelection;

use crate::generated::{self, assert_up_to_date};

fn defaults(text: impl AsRef<[u8]>) -> Result<RuleDefaults, Diagnostics> {
    RuleDefaults::parse_file(&Arc::from("defaults.yaml"), text.as_ref()).map(|(defaults, _)| defaults)
}

fn compiled(rules: &str, defaults: RuleDefaults, options: &CompileOptions) -> Result<CompiledRules, Diagnostics> {
    let text =
        RuleText { name: "rules.yaml".into(), bytes: rules.as_bytes().to_vec(), documents: DocumentSelection::All };
    compile_texts(&[text], &CompileOptions { rule_defaults: Arc::new(defaults), ..options.clone() })
}

/// Domains of valid rules under valid defaults, with the warnings.
fn applied(rules: &str, text: &str) -> (Vec<Domain>, String) {
    let defaults = defaults(text).unwrap_or_else(|found| panic!("{text}\n{found}"));
    let compiled = compiled(rules, defaults, &CompileOptions::default());
    let compiled = compiled.unwrap_or_else(|found| panic!("{rules}\n{text}\n{found}"));
    (compiled.domains, compiled.warnings.to_string())
}

/// Limits of the first descriptor.
fn limits(domains: &[Domain]) -> &[RuleLimit] {
    match domains[0].descriptors[0].rule.as_ref().map(|rule| &rule.allowance) {
        Some(RuleAllowance::Limits(limits)) => limits,
        other => panic!("{other:?}"),
    }
}

fn rule(rate_limit: &str) -> String {
    format!("domain: shop\ndescriptors:\n  - key: k\n    rate_limit: {rate_limit}\n")
}

const DAILY: &str = "{unit: day, requests_per_unit: 5}";

fn limit(rate_limit: &str, text: &str) -> Limit {
    limits(&applied(&rule(rate_limit), text).0)[0].limit
}

/// Keys that can be combined freely.
#[derive(Clone, Debug, Default)]
struct FreeKeys {
    algorithm: Option<Algorithm>,
    on_store_error: Option<StoreFailurePolicy>,
    epoch: Option<u64>,
}

impl FreeKeys {
    fn yaml(&self) -> String {
        let keys = [
            self.algorithm.map(|algorithm| format!("algorithm: {algorithm}")),
            self.on_store_error.map(|policy| format!("on_store_error: {}", policy.name())),
            self.epoch.map(|epoch| format!("epoch: {epoch}")),
        ];
        keys.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

fn free_keys() -> impl Strategy<Value = FreeKeys> {
    let algorithms = [Algorithm::FixedWindow, Algorithm::SlidingWindowCounter, Algorithm::TokenBucket];
    let algorithm = prop::option::of(prop::sample::select(algorithms.to_vec()));
    let policy = prop::option::of(prop::sample::select(StoreFailurePolicy::ALL.to_vec()));
    (algorithm, policy, prop::option::of(1..1000_u64)).prop_map(|(algorithm, on_store_error, epoch)| FreeKeys {
        algorithm,
        on_store_error,
        epoch,
    })
}

proptest! {
    /// Per key: the limit, the `defaults` of its file, domain and unit, domain, `*` and unit, `*`, built-in.
    #[test]
    fn first_layer_with_a_key_decides(layers in prop::collection::vec(free_keys(), 6)) {
        let [own, file, domain_unit, domain, all_unit, all] = layers.as_slice() else { unreachable!() };
        let rules = format!(
            "domain: shop\ndefaults: {{{}}}\ndescriptors:\n- {{key: k, rate_limit: {{unit: DAY, requests_per_unit: 9, {}}}}}\n",
            file.yaml(),
            own.yaml()
        );
        let layer = |keys: &FreeKeys, of_unit: &FreeKeys| {
            let other = "hour: {algorithm: leaky_bucket, on_store_error: deny, epoch: 5000}";
            format!("{{by_unit: {{Day: {{{}}}, {other}}}, {}}}", of_unit.yaml(), keys.yaml())
        };
        let text = format!(
            "defaults:\n  shop: {}\n  \"*\": {}\n  other: {{algorithm: sliding_window_log, epoch: 7000}}\n",
            layer(domain, domain_unit), layer(all, all_unit)
        );
        let (domains, warnings) = applied(&rules, &text);
        prop_assert_eq!(warnings, "");
        let RuleLimit { limit, epoch, .. } = &limits(&domains)[0];
        let algorithm = layers.iter().find_map(|layer| layer.algorithm).unwrap_or_default();
        let policy = layers.iter().find_map(|layer| layer.on_store_error).unwrap_or_default();
        prop_assert_eq!(limit.algorithm(), algorithm);
        prop_assert_eq!(limit.on_store_error(), policy);
        prop_assert_eq!(*epoch, layers.iter().find_map(|layer| layer.epoch).unwrap_or(0));
        // The same for limits that are sent with a request, which have no keys of their own.
        let by_unit = domains[0].defaults_by_unit.iter().find(|of_unit| of_unit.unit == Unit::Day).unwrap();
        prop_assert_eq!(by_unit.defaults.algorithm, layers[1..].iter().find_map(|layer| layer.algorithm).unwrap_or_default());
        prop_assert_eq!(domains[0].defaults.epoch, [file, domain, all].iter().find_map(|layer| layer.epoch).unwrap_or(0));
    }
}

/// Keys of `defaults` in any combination, as YAML without braces.
fn any_keys() -> impl Strategy<Value = String> {
    let one_of = |key: &'static str, values: &'static [&'static str]| {
        prop::option::weighted(0.4, prop::sample::select(values)).prop_map(move |value| (key, value))
    };
    let keys = (
        one_of("algorithm", Algorithm::NAMES),
        one_of("queue_size", &["1", "20"]),
        one_of("max_wait", &["0", "10ms"]),
        one_of("count_rejected", &["true", "false"]),
        one_of("consistency", &["strict", "eventual"]),
        one_of("max_overshoot", &["5%", "50"]),
        one_of("scope", &["global", "region"]),
        one_of("on_store_error", &["deny", "error"]),
        one_of("epoch", &["3"]),
    );
    keys.prop_map(|(a, b, c, d, e, f, g, h, i)| {
        let written =
            [a, b, c, d, e, f, g, h, i].into_iter().filter_map(|(key, value)| Some(format!("{key}: {}", value?)));
        written.collect::<Vec<_>>().join(", ")
    })
}

fn any_limits() -> impl Strategy<Value = String> {
    let limit = (prop::sample::select(vec!["second", "day", "month"]), 0..20_000_u32, any_keys());
    let limit =
        limit.prop_map(|(unit, requests, keys)| format!("{{unit: {unit}, requests_per_unit: {requests}, {keys}}}"));
    prop::collection::vec(limit, 1..4).prop_map(|limits| match limits.as_slice() {
        [one] => one.clone(),
        many => format!("[{}]", many.join(", ")),
    })
}

proptest! {

    /// Valid rules stay valid under all defaults, so a control plane never gets a refusal for them.
    #[test]
    fn no_default_makes_a_rule_invalid(
        rate_limit in any_limits(), file in any_keys(), layers in prop::collection::vec(any_keys(), 4), memcache: bool,
        calendar_months: bool,
    ) {
        let rules = format!("domain: shop\ndefaults: {{{file}}}\ndescriptors:\n  - key: k\n    rate_limit: {rate_limit}\n");
        let regions = NonZeroU16::new(2);
        let options = CompileOptions { memcache, calendar_months, regions, ..CompileOptions::default() };
        let text = format!(
            "defaults:\n  shop: {{by_unit: {{day: {{{}}}}}, {}}}\n  \"*\": {{by_unit: {{day: {{{}}}}}, {}}}\n",
            layers[0], layers[1], layers[2], layers[3]
        );
        let before = compiled(&rules, RuleDefaults::default(), &options);
        let Ok(shared) = defaults(&text) else { return Ok(()) };
        let after = compiled(&rules, shared, &options);
        prop_assert_eq!(before.is_ok(), after.is_ok(), "{}\n{}", rules, text);
        let (Ok(before), Ok(after)) = (before, after) else { return Ok(()) };
        let [before, after] = [&before, &after].map(|compiled| limits(&compiled.domains));
        let all = after;
        for (index, (before, after)) in before.iter().zip(all).enumerate() {
            let counter = |limit: &RuleLimit| (limit.limit.algorithm(), limit.limit.period());
            prop_assert!(all[..index].iter().all(|other| counter(other) != counter(after)), "{}\n{}", rules, text);
            if memcache {
                prop_assert_eq!(after.limit.algorithm(), Algorithm::FixedWindow);
                prop_assert_eq!(after.limit.consistency(), Consistency::Strict);
                prop_assert!(after.limit.counts_rejected_hits());
            }
            // A key with precedence is not undone by one without.
            prop_assert!(before.limit.global_scope().is_none() || after.limit.global_scope().is_some());
            if let Consistency::Eventual(_) = before.limit.consistency() {
                prop_assert!(matches!(after.limit.consistency(), Consistency::Eventual(_)));
            }
        }
    }
}

#[test]
fn limits_get_what_their_control_plane_cannot_say() {
    let text = r#"
defaults:
  "*":
    on_store_error: deny
    by_unit:
      day: {algorithm: fixed_window}
  shop:
    algorithm: sliding_window_counter
    consistency: eventual
    max_overshoot: 10%
    by_unit:
      second: {algorithm: token_bucket, consistency: strict}
"#;
    let daily = limit("{unit: day, requests_per_unit: 5}", text);
    assert_eq!(daily.algorithm(), Algorithm::SlidingWindowCounter, "the domain precedes `*` with the unit");
    assert_eq!(daily.consistency(), Consistency::Eventual(Overshoot::MilliPercent(10_000)));
    assert_eq!(daily.on_store_error(), StoreFailurePolicy::Deny);
    let per_second = limit("{unit: SECOND, requests_per_unit: 5}", text);
    assert_eq!((per_second.algorithm(), per_second.consistency()), (Algorithm::TokenBucket, Consistency::Strict));
}

/// Asserts that a default is left out of a limit, with a reason that contains `expected`.
fn assert_left_out(rate_limit: &str, text: &str, expected: &str) {
    let (domains, warnings) = applied(&rule(rate_limit), text);
    assert!(warnings.contains("rules.yaml:4:"), "{warnings}");
    assert!(
        warnings.contains(&format!("warning: the default {expected}")) || warnings.contains(expected),
        "{warnings}"
    );
    let left_out = &limits(&domains)[0].left_out_defaults;
    assert!(left_out.len() == 1 && left_out[0].contains(expected), "{left_out:?}");
}

#[test]
fn default_that_a_limit_cannot_have_is_left_out_with_the_reason() {
    let log = r#"defaults: {shop: {algorithm: sliding_window_log}, "*": {algorithm: sliding_window_counter}}"#;
    let long = "{unit: day, requests_per_unit: 10001}";
    let eventual = "defaults: {shop: {consistency: eventual}}";
    let cases = [
        (
            long,
            log,
            "`algorithm: sliding_window_log` of defaults.yaml:1:19 is left out: sliding_window_log keeps an entry",
        ),
        (
            "{unit: day, requests_per_unit: 5, algorithm: leaky_bucket}",
            eventual,
            "`consistency: eventual` of defaults.yaml:1:19 is left out: `consistency: eventual` cannot be kept with leaky",
        ),
        (
            "{unit: day, requests_per_unit: 5, count_rejected: true}",
            eventual,
            "is left out: `consistency: eventual` cannot be kept with `count_rejected: true`",
        ),
        (
            "{unit: day, requests_per_unit: 5}",
            "defaults: {shop: {scope: global}}",
            "`scope: global` of defaults.yaml:1:19 is left out: `scope: global`: the reserve of this limit gives each of",
        ),
        (
            "{unit: day, requests_per_unit: 5}",
            r#"defaults: {shop: {count_rejected: true}, "*": {consistency: eventual}}"#,
            "is left out: `consistency: eventual` cannot be kept with `count_rejected: true`",
        ),
        (
            "[{unit: day, requests_per_unit: 5}, {unit: day, requests_per_unit: 3, algorithm: token_bucket}]",
            "defaults: {shop: {algorithm: token_bucket}}",
            "is left out: another limit of the descriptor has this algorithm and period",
        ),
        (
            "{unit: day, requests_per_unit: 500000, algorithm: token_bucket}",
            r#"defaults: {shop: {consistency: eventual}, "*": {max_wait: 10ms}}"#,
            "`max_wait` of defaults.yaml:1:49 is left out: `consistency: eventual` cannot be kept with `max_wait`",
        ),
    ];
    for (rate_limit, text, expected) in cases {
        assert_left_out(rate_limit, text, expected);
    }
    // The next layer applies instead.
    assert_eq!(limit(long, log).algorithm(), Algorithm::SlidingWindowCounter);
}

#[test]
fn limits_that_are_never_active_together_have_the_same_default() {
    let day = r#"{unit: minute, requests_per_unit: 9, active: {from: "08:00", to: "20:00"}}"#;
    let night = r#"{unit: minute, requests_per_unit: 3, active: {from: "20:00", to: "08:00"}}"#;
    let text = "defaults: {shop: {algorithm: sliding_window_counter}}";
    let (domains, warnings) = applied(&rule(&format!("[{day}, {night}]")), text);
    let algorithms: Vec<Algorithm> = limits(&domains).iter().map(|limit| limit.limit.algorithm()).collect();
    assert_eq!(algorithms, [Algorithm::SlidingWindowCounter; 2], "{warnings}");
}

#[test]
fn global_default_is_left_out_of_limits_that_cannot_be_global() {
    let global = "defaults: {shop: {scope: global}}";
    let cases = [
        (
            "{unit: day, requests_per_unit: 5000, algorithm: leaky_bucket}",
            global,
            "`scope: global` of defaults.yaml:1:19 is left out: `scope: global` cannot be kept with leaky_bucket",
        ),
        (
            "{unit: day, requests_per_unit: 5000, algorithm: sliding_window_log}",
            global,
            "is left out: `scope: global` cannot be kept with sliding_window_log",
        ),
        (
            "{unit: day, requests_per_unit: 5000, count_rejected: true}",
            global,
            "is left out: `scope: global` cannot be kept with `count_rejected: true`",
        ),
        (
            "{unit: day, requests_per_unit: 5000, algorithm: token_bucket, max_wait: 1s}",
            global,
            "is left out: `scope: global` cannot be kept with `max_wait`",
        ),
        (
            "{unit: day, requests_per_unit: 5000, algorithm: token_bucket}",
            r#"defaults: {shop: {scope: global}, "*": {max_wait: 10ms}}"#,
            "`max_wait` of defaults.yaml:1:41 is left out: `scope: global` cannot be kept with `max_wait`",
        ),
    ];
    for (rate_limit, text, expected) in cases {
        assert_left_out(rate_limit, text, expected);
    }
}

#[test]
fn global_default_is_left_out_for_calendar_months() {
    let regions = NonZeroU16::new(3);
    let options = CompileOptions { calendar_months: true, regions, ..CompileOptions::default() };
    let global = "defaults: {shop: {scope: global}}";
    let month = "{unit: month, requests_per_unit: 5000}";
    let found = compiled(&rule(month), defaults(global).unwrap(), &options).unwrap();
    let RuleLimit { limit, left_out_defaults, .. } = &limits(&found.domains)[0];
    assert_eq!(limit.global_scope(), None);
    let expected = "`scope: global` cannot be kept with calendar months";
    assert!(left_out_defaults.len() == 1 && left_out_defaults[0].contains(expected), "{left_out_defaults:?}");
    // The `defaults` of a rule file too, without a warning.
    let text = format!("{}defaults: {{scope: global}}\n", rule(month));
    let found = compiled(&text, RuleDefaults::default(), &options).unwrap();
    assert_eq!(limits(&found.domains)[0].limit.global_scope(), None);
    // Years, and months of 30 days, have windows of one length.
    for (unit, calendar_months) in [("year", true), ("month", false)] {
        let options = CompileOptions { calendar_months, regions, ..CompileOptions::default() };
        let text = rule(&format!("{{unit: {unit}, requests_per_unit: 5000}}"));
        let found = compiled(&text, defaults(global).unwrap(), &options).unwrap();
        assert!(limits(&found.domains)[0].limit.global_scope().is_some(), "{unit}");
    }
}

#[test]
fn default_of_another_algorithm_is_skipped_without_a_warning() {
    let text = r#"defaults: {"*": {queue_size: 20, max_wait: 10ms, max_overshoot: 3%}}"#;
    let (domains, warnings) = applied(&rule("{unit: day, requests_per_unit: 5}"), text);
    assert_eq!((warnings.as_str(), limits(&domains)[0].left_out_defaults.len()), ("", 0));
    let unlimited = "domain: shop\ndescriptors: [{key: k, rate_limit: {unlimited: true}}]\n";
    assert_eq!(applied(unlimited, r#"defaults: {"*": {on_store_error: deny}}"#).1, "");
    // Its own algorithm may be a default of another layer.
    let text = r#"defaults: {shop: {queue_size: 20}, "*": {algorithm: leaky_bucket}}"#;
    let leaky = limit("{unit: second, requests_per_unit: 100}", text);
    assert_eq!((leaky.algorithm(), leaky.capacity()), (Algorithm::LeakyBucket, 20));
}

#[test]
fn own_values_are_checked_without_defaults() {
    // Valid only because of a default, and so invalid once the default goes.
    let text = "defaults: {shop: {algorithm: token_bucket}}";
    let found = compiled(
        &rule("{unit: day, requests_per_unit: 5, bucket_size: 9}"),
        defaults(text).unwrap(),
        &CompileOptions::default(),
    );
    assert!(found.unwrap_err().to_string().contains("`bucket_size` does not apply to fixed_window"));
}

#[test]
fn memcache_gets_no_default_that_an_increment_cannot_count() {
    let text = "defaults: {shop: {algorithm: token_bucket, on_store_error: deny, epoch: 4}}";
    let options = CompileOptions { memcache: true, ..CompileOptions::default() };
    let compiled = compiled(&rule("{unit: day, requests_per_unit: 5}"), defaults(text).unwrap(), &options).unwrap();
    let RuleLimit { limit, epoch, left_out_defaults, .. } = &limits(&compiled.domains)[0];
    assert_eq!(
        (limit.algorithm(), limit.on_store_error(), *epoch),
        (Algorithm::FixedWindow, StoreFailurePolicy::Deny, 4)
    );
    assert!(left_out_defaults[0].contains("BACKEND_TYPE=memcache"), "{left_out_defaults:?}");
    assert_eq!(compiled.domains[0].defaults.algorithm, Algorithm::FixedWindow);
    let global = defaults("defaults: {shop: {scope: global}}").unwrap();
    let found = self::compiled(&rule("{unit: day, requests_per_unit: 5000}"), global, &options).unwrap();
    let RuleLimit { limit, left_out_defaults, .. } = &limits(&found.domains)[0];
    assert_eq!((limit.global_scope(), left_out_defaults.len()), (None, 1));
    assert!(left_out_defaults[0].contains("BACKEND_TYPE=memcache"), "{left_out_defaults:?}");
    // Written in a rule file it is refused.
    let text = format!("{}defaults: {{scope: global}}\n", rule("{unit: day, requests_per_unit: 5000}"));
    let refused = self::compiled(&text, RuleDefaults::default(), &options).unwrap_err().to_string();
    assert!(refused.contains("`scope: global` is not possible with BACKEND_TYPE=memcache"), "{refused}");
}

#[test]
fn body_of_a_rejection_can_be_a_default() {
    let text = r#"defaults: {"*": {over_limit_body: slow, over_limit_content_type: text/x, by_unit: {day: {over_limit_body: tomorrow}}}}"#;
    let body = |rate_limit: &str| {
        let (domains, _) = applied(&rule(rate_limit), text);
        let body = domains[0].descriptors[0].rule.as_ref().unwrap().rejection.clone();
        (body.body.unwrap().text().to_owned(), body.content_type.unwrap().to_string())
    };
    assert_eq!(body("{unit: day, requests_per_unit: 5}"), ("tomorrow".to_owned(), "text/x".to_owned()));
    assert_eq!(body("{unit: hour, requests_per_unit: 5}"), ("slow".to_owned(), "text/x".to_owned()));
    let own = body("{unit: day, requests_per_unit: 5, over_limit_body: own}");
    assert_eq!(own, ("own".to_owned(), "text/x".to_owned()));
}

#[test]
fn decision_log_records_the_defaults_with_the_rules() {
    let rules =
        RuleText { name: "rules.yaml".into(), bytes: rule(DAILY).into_bytes(), documents: DocumentSelection::All };
    let rules = SourceRules::Texts(vec![rules].into());
    let shared = defaults("defaults: {shop: {algorithm: token_bucket}}").unwrap();
    let without = header::build_rule_set_record(&rules, None, &RuleDefaults::default());
    let record = header::build_rule_set_record(&rules, None, &shared);
    assert_ne!(record.id, without.id);
    let read = header::decode_recorded_rules(record).unwrap();
    let options = CompileOptions { rule_defaults: Arc::new(read.defaults), ..CompileOptions::default() };
    let domains = read.rules.compile(&options).unwrap().domains;
    assert_eq!(limits(&domains)[0].limit.algorithm(), Algorithm::TokenBucket);
}

#[test]
fn unusable_file_is_refused_with_position_and_fix() {
    let cases = [
        ("", "1:1: there are no `defaults`, begin the file with `defaults:`"),
        ("domain: shop\ndefaults: {}", "1:1: `domain` does not belong in a file of defaults"),
        ("defaults: 1", "cannot unmarshal !!int `1` into defaults, write a mapping here"),
        ("defaults: {shop: {algorithm: window}}", "1:30: unknown algorithm 'window', write one of token_bucket"),
        ("defaults: {shop: {algoritm: fixed_window}}", "unknown key 'algoritm', did you mean `algorithm`?"),
        ("defaults: {shop: {by_units: {}}}", "unknown key 'by_units', did you mean `by_unit`?"),
        ("defaults: {shop: {unit: day}}", "`unit` does not belong in a domain of a file of defaults"),
        ("defaults: {shop: {by_unit: {days: {epoch: 1}}}}", "invalid rate limit unit 'days', write one of second"),
        ("defaults: {shop: {by_unit: {day: {epoch: 1}, DAY: {}}}}", "the unit day is written twice"),
        ("defaults: {shop: {by_unit: {day: {by_unit: {}}}}}", "`by_unit` does not belong in `defaults`"),
        ("defaults: {shop/*: {epoch: 1}}", "'shop/*' is not the name of a domain, write a whole name, or \"*\""),
        ("defaults: {\"\": {epoch: 1}}", "'' is not the name of a domain"),
        (
            "defaults: {shop: {consistency: eventual, algorithm: leaky_bucket}}",
            "`consistency: eventual` cannot be kept with leaky_bucket",
        ),
        ("defaults: {}\n---\ndefaults: {}", "a second document, write all defaults in one document"),
        ("defaults: {shop: *x}", "yaml: "),
        ("defaults: {[1]: {}}", "a name that is not text"),
        ("defaults: \0", "control characters are not allowed"),
    ];
    for (text, expected) in cases {
        let found = defaults(text).expect_err(text).to_string();
        assert!(found.contains(expected) && found.starts_with("defaults.yaml:"), "{text}: {found}");
    }
    let large = defaults(vec![b'#'; MAX_DEFAULTS_FILE_BYTES + 1]).unwrap_err().to_string();
    assert!(large.contains("a file of defaults of 1048577 bytes, at most 1048576 are read"), "{large}");
}

#[test]
fn aliases_that_expand_without_end_are_refused() {
    let mut bomb = String::from("a0: &a0 {shop: {epoch: 1}, b: {epoch: 1}}\n");
    for level in 1..30 {
        bomb += &format!("a{level}: &a{level} {{x: *a{0}, y: *a{0}, z: *a{0}}}\n", level - 1);
    }
    bomb += "defaults: *a29\n";
    let found = defaults(&bomb).unwrap_err().to_string();
    assert!(found.contains("excessive aliasing"), "{found}");
}

#[test]
fn committed_schema_of_defaults_matches_the_code() {
    assert_up_to_date(&generated::schemas());
    let schema = defaults_file_schema();
    assert!(schema["$defs"]["domain_defaults"]["properties"]["on_store_error"].is_object());
}

mod keys {
    use tollkeeper::rules::document::defaults::DefaultableKey;
    use tollkeeper::rules::document::read::all_keys;
    use tollkeeper::rules::key_table::Section;

    #[test]
    fn defaultable_keys_are_those_that_defaults_can_have() {
        let mut rows: Vec<_> = all_keys().filter(|key| key.belongs_in(Section::Defaults)).map(|key| key.name).collect();
        let mut names = DefaultableKey::NAMES.to_vec();
        rows.sort_unstable();
        names.sort_unstable();
        assert_eq!(rows, names);
    }
}

//! Meaning of rule files, and diagnostics of invalid ones.
//!
//! Each invalid file is in `config/bad`, with the expected diagnostics beside it. After a deliberate change of
//! messages, `.ci/generate` rewrites those texts; read them before the commit.

use std::num::{NonZeroU16, NonZeroU32};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::ban::Ban;
use tollkeeper::limit::calendar::Zone;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::reservation::{ReservationPolicy, UnsettledPolicy};
use tollkeeper::limit::window::WindowSpec;
use tollkeeper::limit::{Consistency, Limit, LimitSpec, Overshoot, StoreFailurePolicy};
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{CompiledRules, RuleText, compile_texts};
use tollkeeper::rules::diagnostic::Diagnostics;
use tollkeeper::rules::document::read::all_keys;
use tollkeeper::rules::key_table::Section;
use tollkeeper::rules::rule::rejection_body::RejectionBody;
use tollkeeper::rules::rule::rlconfig::format_rlconfig;
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::rule::{Domain, RuleAllowance, RuleLimit, RuleNode};
use tollkeeper::rules::schema::rule_file_schema;
use tollkeeper::rules::yaml::DocumentSelection;

use crate::generated::{self, assert_up_to_date};

fn source(name: &str, text: impl AsRef<[u8]>) -> RuleText {
    RuleText { name: Arc::from(name), bytes: text.as_ref().to_vec(), documents: DocumentSelection::All }
}

fn load(text: impl AsRef<[u8]>) -> Result<CompiledRules, Diagnostics> {
    compile_texts(&[source("x.yaml", text)], &CompileOptions::default())
}

/// Domains of a file that loads without diagnostics.
fn good(text: &str) -> Vec<Domain> {
    let compiled = load(text).map_err(|found| format!("{text}\n{found}")).expect("a good file");
    assert!(compiled.warnings.is_empty(), "{text}\n{}", compiled.warnings);
    compiled.domains
}

/// A domain of one descriptor with this `rate_limit`.
fn rule(rate_limit: &str) -> String {
    format!("domain: d\ndescriptors:\n  - key: k\n    rate_limit: {rate_limit}\n")
}

fn limits_of(node: &RuleNode) -> &[RuleLimit] {
    match node.rule.as_ref().map(|rule| &rule.allowance) {
        Some(RuleAllowance::Limits(limits)) => limits,
        _ => &[],
    }
}

/// The limits of the first descriptor.
fn limits(domains: &[Domain]) -> &[RuleLimit] {
    limits_of(&domains[0].descriptors[0])
}

/// The first limit of the first descriptor of a good file.
fn limit(text: &str) -> Limit {
    limits(&good(text))[0].limit
}

fn in_repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(in_repository(path)).map_err(|error| format!("{path}: {error}")).expect("readable")
}

#[test]
fn bad_files_give_the_expected_diagnostics() {
    let expected = generated::rule_diagnostics();
    assert!(expected.len() > 70, "only {} files", expected.len());
    assert_up_to_date(&expected);
}

#[test]
fn example_and_reference_load_without_warnings() {
    assert_eq!(good(&read("config/example.yaml"))[0].name, "example");
    assert_eq!(good(&read("config/reference.yaml"))[0].name, "reference");
}

#[test]
fn reference_has_every_key_at_its_default() {
    let text = read("config/reference.yaml");
    for key in all_keys().filter(|key| key.sections.iter().any(|section| section.is_in_rule_files())) {
        let assigned: Vec<&str> = text
            .lines()
            .flat_map(|line| line.split([',', '{']))
            .map(|part| part.trim_start_matches([' ', '-']).trim_end_matches([' ', '}']))
            .filter_map(|part| part.strip_prefix(key.name)?.strip_prefix(':'))
            .map(str::trim)
            .collect();
        assert!(!assigned.is_empty(), "{} is not in the reference", key.name);
        assert!(key.default.is_empty() || assigned.contains(&key.default), "{}: {assigned:?}", key.name);
    }
}

#[test]
fn reference_equals_the_defaults() {
    let domains = good(&read("config/reference.yaml"));
    let mut compared = 0;
    for node in &domains[0].descriptors {
        // The example of a network exempts it.
        let Some(rule) = &node.rule else { continue };
        let RuleAllowance::Limits(limits) = &rule.allowance else { panic!("limits") };
        for RuleLimit { limit, shadow, quota, epoch, .. } in limits {
            let mut bare = LimitSpec::new(limit.algorithm(), limit.requests_per_unit(), limit.period());
            bare.sole = limits.len() == 1;
            if node.key == "eventual" {
                bare.consistency = Some(Consistency::Eventual(Overshoot::DEFAULT));
            }
            if node.key == "times" {
                bare.window = Some(WindowSpec::in_zone(Zone::utc()));
                bare.ban = Ban::new(600_000_000, 1);
            }
            if node.key == "overflow" {
                bare.chain_position = limit.chain_position();
            }
            if node.key == "settled" {
                bare.reservations = ReservationPolicy::new(600, UnsettledPolicy::Keep, NonZeroU32::new(4000));
            }
            assert_eq!(Limit::new(&bare).as_ref(), Ok(limit), "{}", node.key);
            assert_eq!((*shadow, *quota, *epoch), (false, false, 0));
            compared += 1;
        }
    }
    assert_eq!(compared, 17);
}

#[test]
fn committed_schema_matches_the_code() {
    assert_up_to_date(&generated::schemas());
    for place in Section::ALL.into_iter().filter(|section| section.is_in_rule_files()).skip(1) {
        assert!(rule_file_schema()["$defs"][place.name()]["properties"].is_object(), "{}", place.name());
    }
    for file in ["config/example.yaml", "config/reference.yaml"] {
        assert!(read(file).starts_with("# yaml-language-server: $schema=rules.schema.json\n"), "{file}");
    }
}

#[test]
fn limit_fields_are_compiled_as_written() {
    let minute = Period::new(Unit::Minute, 1).expect("a minute");
    let plain = |algorithm| LimitSpec::new(algorithm, 100, minute);
    let local = Some(StoreFailurePolicy::Local);
    let table = [
        ("", plain(Algorithm::FixedWindow)),
        (
            ", unit_multiplier: 5",
            LimitSpec { period: Period::new(Unit::Minute, 5).expect("5"), ..plain(Algorithm::FixedWindow) },
        ),
        (
            ", algorithm: token_bucket, bucket_size: 7",
            LimitSpec { bucket_size: Some(7), ..plain(Algorithm::TokenBucket) },
        ),
        (
            ", algorithm: token_bucket, max_wait: 1.5ms",
            LimitSpec { max_wait_us: Some(1500), ..plain(Algorithm::TokenBucket) },
        ),
        (", algorithm: leaky_bucket, max_wait: 0", LimitSpec { max_wait_us: Some(0), ..plain(Algorithm::LeakyBucket) }),
        (", algorithm: leaky_bucket, max_wait: 1h2m3s4ms5us", {
            LimitSpec { max_wait_us: Some(3_723_004_005), ..plain(Algorithm::LeakyBucket) }
        }),
        (", algorithm: sliding_window_log, count_rejected: true", {
            LimitSpec { count_rejected: Some(true), ..plain(Algorithm::SlidingWindowLog) }
        }),
        (
            ", on_store_error: error",
            LimitSpec { on_store_error: Some(StoreFailurePolicy::Error), ..plain(Algorithm::FixedWindow) },
        ),
    ];
    for (extra, terms) in table {
        let text = rule(&format!("{{unit: minute, requests_per_unit: 100{extra}}}"));
        let expected = Limit::new(&LimitSpec { on_store_error: terms.on_store_error.or(local), ..terms });
        assert_eq!(Ok(limit(&text)), expected, "{extra}");
    }
}

#[test]
fn overshoot_is_a_percentage_or_a_count() {
    let table = [
        ("", Overshoot::DEFAULT),
        (", max_overshoot: 5%", Overshoot::MilliPercent(5_000)),
        (", max_overshoot: 0.5%", Overshoot::MilliPercent(500)),
        (", max_overshoot: '.125 %'", Overshoot::MilliPercent(125)),
        (", max_overshoot: 100%", Overshoot::MilliPercent(100_000)),
        (", max_overshoot: 400", Overshoot::Hits(400)),
    ];
    for (extra, overshoot) in table {
        let text = rule(&format!("{{unit: minute, requests_per_unit: 100000, consistency: eventual{extra}}}"));
        assert_eq!(limit(&text).consistency(), Consistency::Eventual(overshoot), "{extra}");
    }
}

#[test]
fn rule_takes_precedence_over_defaults() {
    let text = "
domain: d
defaults: {algorithm: leaky_bucket, queue_size: 1, max_wait: 2ms, on_store_error: deny, epoch: 3, over_limit_body: no}
descriptors:
  - {key: a, rate_limit: {unit: second, requests_per_unit: 100}}
  - {key: b, rate_limit: {unit: second, requests_per_unit: 100, algorithm: fixed_window, on_store_error: allow, epoch: 4}}
  - {key: c, over_limit_body: 'yes', rate_limit: {unit: second, requests_per_unit: 100, algorithm: token_bucket}}
";
    let domains = good(text);
    let rules: Vec<_> = domains[0].descriptors.iter().map(|node| node.rule.as_ref().expect("a rule")).collect();
    let limits: Vec<&RuleLimit> = rules
        .iter()
        .map(|rule| match &rule.allowance {
            RuleAllowance::Limits(limits) => &limits[0],
            RuleAllowance::Unlimited { .. } => panic!("unlimited"),
        })
        .collect();
    let algorithms: Vec<_> = limits.iter().map(|one| one.limit.algorithm()).collect();
    assert_eq!(algorithms, [Algorithm::LeakyBucket, Algorithm::FixedWindow, Algorithm::TokenBucket]);
    assert_eq!(limits.iter().map(|one| one.limit.max_wait_us()).collect::<Vec<_>>(), [2000, 0, 2000]);
    let policies: Vec<_> = limits.iter().map(|one| one.limit.on_store_error()).collect();
    assert_eq!(policies, [StoreFailurePolicy::Deny, StoreFailurePolicy::Allow, StoreFailurePolicy::Deny]);
    assert_eq!(limits.iter().map(|one| one.epoch).collect::<Vec<_>>(), [3, 4, 3]);
    assert_eq!(
        rules.iter().map(|rule| rule.rejection.body.as_ref().map(RejectionBody::text)).collect::<Vec<_>>(),
        [Some("no"), Some("no"), Some("yes")]
    );
    assert_eq!(domains[0].defaults.algorithm, Algorithm::LeakyBucket);
    assert_eq!(domains[0].defaults.on_store_error, Some(StoreFailurePolicy::Deny));
    assert_eq!(domains[0].defaults.epoch, 3);
}

#[test]
fn default_consistency_skips_limits_that_cannot_be_eventual() {
    let text = "
domain: d
defaults: {consistency: eventual, max_overshoot: 50%}
descriptors:
  - {key: a, rate_limit: {unit: second, requests_per_unit: 100}}
  - {key: b, rate_limit: {unit: second, requests_per_unit: 100, algorithm: leaky_bucket}}
  - {key: c, rate_limit: {unit: second, requests_per_unit: 100, count_rejected: true}}
  - {key: d, rate_limit: {unit: second, requests_per_unit: 100, consistency: strict}}
";
    let eventual = Consistency::Eventual(Overshoot::MilliPercent(50_000));
    let domains = good(text);
    let kept: Vec<_> = domains[0]
        .descriptors
        .iter()
        .map(|node| match &node.rule.as_ref().expect("a rule").allowance {
            RuleAllowance::Limits(limits) => limits[0].limit.consistency(),
            RuleAllowance::Unlimited { .. } => panic!("unlimited"),
        })
        .collect();
    assert_eq!(kept, [eventual, Consistency::Strict, Consistency::Strict, Consistency::Strict]);
}

#[test]
fn list_gives_a_descriptor_several_limits() {
    let text = "
domain: d
descriptors:
  - key: k
    shadow_mode: true
    rate_limit:  # check: ok, x and y are elsewhere
      - {unit: second, requests_per_unit: 10, replaces: [{name: x}]}
      - {unit: day, requests_per_unit: 1000, name: daily, quota_mode: true, replaces: [{name: x}, {name: y}]}
      - {unit: hour, unit_multiplier: 3, requests_per_unit: 300, algorithm: token_bucket}
";
    let domains = good(text);
    let limits = limits(&domains);
    assert!(limits.iter().all(|one| one.shadow));
    assert_eq!(limits.iter().map(|one| one.quota).collect::<Vec<_>>(), [false, true, false]);
    assert!(!limits[0].limit.counts_rejected_hits(), "only a single fixed_window counts rejected hits");
    assert_eq!(domains[0].descriptors[0].rule.as_ref().expect("a rule").replaces, ["x", "y"]);
    assert_eq!(
        format_rlconfig(&RuleSet::new(domains.clone())),
        [
            "d.k: unit=SECOND requests_per_unit=10, shadow_mode: true, quota_mode: false",
            "d.k.daily: unit=DAY requests_per_unit=1000, shadow_mode: true, quota_mode: true",
            "d.k.3_hour_token_bucket: unit=HOUR requests_per_unit=300, shadow_mode: true, quota_mode: false, \
             unit_multiplier: 3, algorithm: token_bucket",
        ]
    );
}

#[test]
fn rules_keep_their_source_positions() {
    let domains = good("domain: d\ndescriptors:\n  - key: k\n    rate_limit: {unit: day, requests_per_unit: 1}\n");
    let node = &domains[0].descriptors[0];
    assert_eq!(node.location.to_string(), "x.yaml:3:5");
    assert_eq!(node.rule.as_ref().expect("a rule").location.to_string(), "x.yaml:4:5");
}

#[test]
fn all_documents_are_read_or_a_warning_names_ignored_ones() {
    let text = "domain: a\n---\ndomain: b\n---\n";
    assert_eq!(good(text).iter().map(|domain| domain.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    // Text after the first document is ignored, even if it is not YAML.
    for rest in ["domain: b\n", "a: [\n"] {
        let first =
            RuleText { documents: DocumentSelection::FirstOnly, ..source("x.yaml", format!("domain: a\n---\n{rest}")) };
        let compiled = compile_texts(&[first], &CompileOptions::default()).expect("it loads");
        assert_eq!(compiled.domains.len(), 1);
        assert!(compiled.warnings.to_string().contains("only the first document of this file is read"), "{rest}");
    }
}

#[test]
fn fixed_window_compiles_to_the_same_limit_with_memcache() {
    let memcache = CompileOptions { memcache: true, ..CompileOptions::default() };
    for limit in [
        "{unit: day, requests_per_unit: 5}",
        "{unit: day, requests_per_unit: 5, algorithm: fixed_window, count_rejected: true, consistency: strict}",
        "[{unit: month, unit_multiplier: 2, requests_per_unit: 5, name: a, replaces: [{name: b}]}]  # check: ok, b is elsewhere",
        "{unlimited: true}",
    ] {
        let text = rule(limit);
        let domains = compile_texts(&[source("x.yaml", &text)], &memcache)
            .map_err(|found| format!("{limit}: {found}"))
            .unwrap()
            .domains;
        assert_eq!(format!("{domains:?}"), format!("{:?}", good(&text)), "{limit}");
        assert!(limits(&domains).iter().all(|limit| limit.limit.counts_rejected_hits()), "{limit}");
    }
}

#[test]
fn domains_merge_only_if_enabled() {
    let files = [
        source("a.yaml", "domain: d\ndescriptors:\n  - {key: a, rate_limit: {unit: day}}\n"),
        source("b.yaml", "domain: d\ndescriptors:\n  - {key: b, rate_limit: {unit: day}}\n"),
    ];
    let error = compile_texts(&files, &CompileOptions::default()).expect_err("two files, one domain").to_string();
    assert!(error.contains("b.yaml:1:1: duplicate domain 'd' in config file, it is in a.yaml:1:1 already"), "{error}");
    let merge = CompileOptions { merge_domains: true, ..CompileOptions::default() };
    let domains = compile_texts(&files, &merge).expect("merged").domains;
    assert_eq!(domains.len(), 1);
    assert_eq!(domains[0].descriptors.iter().map(|node| node.key.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    let twice = [files[0].clone(), files[0].clone()];
    let error = compile_texts(&twice, &merge).expect_err("a twice").to_string();
    assert!(error.contains("duplicate descriptor composite key 'd.a', the first is at a.yaml:3:"), "{error}");
}

/// Defaults of the only limit of the outermost descriptor at `index`: its epoch, algorithm, policy and body.
fn limit_of(domain: &Domain, index: usize) -> (u64, Algorithm, StoreFailurePolicy, Option<&str>) {
    let rule = domain.descriptors[index].rule.as_ref().expect("a rule");
    match &rule.allowance {
        RuleAllowance::Limits(limits) => {
            let RuleLimit { limit, epoch, .. } = &limits[0];
            (*epoch, limit.algorithm(), limit.on_store_error(), rule.rejection.body.as_ref().map(RejectionBody::text))
        }
        RuleAllowance::Unlimited { .. } => panic!("unlimited"),
    }
}

#[test]
fn defaults_of_one_file_apply_to_merged_files_before_and_after_it() {
    let rule = |file: &str, key: &str| {
        source(file, format!("domain: d\ndescriptors:\n  - {{key: {key}, rate_limit: {{unit: day}}}}\n"))
    };
    let defaults =
        "domain: d\ndefaults: {epoch: 3, algorithm: token_bucket, on_store_error: deny, over_limit_body: no}\n";
    let files = [rule("a.yaml", "a"), source("b.yaml", defaults), rule("c.yaml", "c")];
    let merge = CompileOptions { merge_domains: true, ..CompileOptions::default() };
    let domains = compile_texts(&files, &merge).expect("merged").domains;
    for index in [0, 1] {
        let expected = (3, Algorithm::TokenBucket, StoreFailurePolicy::Deny, Some("no"));
        assert_eq!(limit_of(&domains[0], index), expected, "descriptor {index}");
    }
    assert_eq!(domains[0].defaults.epoch, 3, "overrides");
}

#[test]
fn contradicting_defaults_of_merged_files_are_an_error() {
    let merge = CompileOptions { merge_domains: true, ..CompileOptions::default() };
    let with = |file: &str, defaults: &str| source(file, format!("domain: d\ndefaults: {defaults}\n"));
    let first = with("a.yaml", "{epoch: 1, max_overshoot: 5%}");
    for other in ["{epoch: 2, max_overshoot: 5%}", "{epoch: 1, max_overshoot: 6%}", "{on_store_error: deny}", "{}"] {
        let found = compile_texts(&[first.clone(), with("b.yaml", other)], &merge).expect_err(other).to_string();
        let expected = "b.yaml:2:1: domain 'd' has two different `defaults`, \
                        make them the same as in a.yaml:2:1, or state them in one file only";
        assert_eq!(found, expected, "{other}");
    }
    let same = with("b.yaml", "{max_overshoot: 5%,   epoch: 1}");
    compile_texts(&[first, same], &merge).expect("the same defaults twice");
}

#[test]
fn problems_of_all_files_are_reported_together_in_order() {
    let files = [source("z.yaml", rule("{unit: foo}")), source("a.yaml", ""), source("b.yaml", "domain: [")];
    let found = compile_texts(&files, &CompileOptions::default()).expect_err("all are bad");
    let sections: Vec<_> = found.errors().iter().map(|error| &*error.file).collect();
    assert_eq!(sections, ["z.yaml", "a.yaml", "b.yaml"]);
}

#[test]
fn diagnostic_is_printed_with_a_caret_and_as_json() {
    let text = rule("{unit: hours, requests_per_unit: 3}");
    let found = load(&text).expect_err("a bad unit");
    let error = &found.errors()[0];
    assert_eq!(
        error.format_excerpt(&text),
        "    4 |     rate_limit: {unit: hours, requests_per_unit: 3}\n      |                  ^\n"
    );
    assert_eq!(
        serde_json::to_value(error).expect("it is JSON"),
        serde_json::json!({
            "severity": "error", "file": "x.yaml", "line": 4, "column": 18,
            "path": "descriptors[0].rate_limit.unit", "message": "invalid rate limit unit 'hours'",
            "hint": "did you mean `hour`?",
        })
    );
}

#[test]
fn suspicious_rules_get_warnings() {
    let lone = "domain: d\ndescriptors:\n  - key: k\n";
    let table = [
        (format!("{lone}    domain: z\n    rate_limit: {{unit: day}}\n"), "`domain` does not belong in a descriptor"),
        (rule("{unit: day, shadow_mode: true}"), "`shadow_mode` does not belong in a `rate_limit`"),
        (format!("domain: c\n{}", rule("{unit: day}")), "the key `domain` is written twice in this mapping"),
        (lone.to_owned(), "this descriptor does nothing"),
        (rule("{unit: second, requests_per_unit: 10, algorithm: leaky_bucket, queue_size: 5}"), "waits 100 ms or more"),
        (rule("{unit: minute, requests_per_unit: 100, consistency: eventual}"), "the overshoot is too small"),
        (
            rule(
                "{unit: second, requests_per_unit: 9, algorithm: token_bucket, consistency: eventual, max_overshoot: 0.3%}",
            ),
            "hits cannot be leased",
        ),
        (rule("{unit: day, over_limit_content_type: a/b}"), "`over_limit_content_type` without `over_limit_body`"),
        (rule("{unit: day, requests_per_unit: 9, <<: {requests_per_unit: 3}}"), "is written before a merge key"),
    ];
    for (text, expected) in table {
        let compiled = load(&text).unwrap_or_else(|found| panic!("{text}\n{found}"));
        assert!(compiled.warnings.to_string().contains(expected), "{text}\n{}", compiled.warnings);
        assert_eq!(compiled.warnings.warnings().len(), 1, "{text}\n{}", compiled.warnings);
    }
}

#[test]
fn level_that_shares_below_one_that_does_not_gets_a_warning() {
    for (above, is_found) in [
        ("key: method, match: { in: [GET, HEAD] }", true),
        ("key: path, value: \"/api/*\"", true),
        ("key: path, match: { regex: '/v[0-9]' }", true),
        ("key: method, match: { in: [GET, HEAD] }, share_threshold: true", false),
        ("key: user, match: { not: { in: [bot] } }", false),
        ("key: remote_address, match: { cidr: [10.0.0.0/8] }", false),
        ("key: user", false),
        ("key: user, value: ann", false),
    ] {
        let below =
            "{ key: p, value: \"/v*\", share_threshold: true, rate_limit: { unit: day, requests_per_unit: 9 } }";
        let text = format!("domain: d\ndescriptors:\n  - {{ {above}, descriptors: [{below}] }}\n");
        let warnings = load(&text).unwrap_or_else(|found| panic!("{text}\n{found}")).warnings.to_string();
        assert_eq!(warnings.contains("only this level shares a counter"), is_found, "{text}\n{warnings}");
    }
}

#[test]
fn replaced_name_that_no_limit_has_gets_a_warning() {
    let rules = |first: &str| {
        format!(
            "domain: d\ndescriptors:\n  - {{key: a, rate_limit: {{{first}unit: day, requests_per_unit: 1}}}}\n  - key: b\n    \
             rate_limit: {{name: gold, unit: day, requests_per_unit: 2, replaces: [{{name: per-address}}]}}\n"
        )
    };
    good(&rules("name: per-address, "));
    for (first, hint) in [("name: per-adress, ", "did you mean `per-adress`?"), ("", "give the limit that it replaces")]
    {
        let warnings = load(rules(first)).expect("a warning only").warnings.to_string();
        assert!(
            warnings.starts_with("x.yaml:5:5: warning: `replaces` names 'per-address', and no limit"),
            "{warnings}"
        );
        assert!(warnings.contains(hint), "{warnings}");
    }
    // A plan has the name.
    good(
        "domain: d\nplans: {free: {name: own-plan, unit: day, requests_per_unit: 1}}\ntables: {t: {file: t.csv}}\ndescriptors:\n  \
         - {key: a, plan: {from: t, default: free}}\n  \
         - {key: b, rate_limit: {unit: day, requests_per_unit: 2, replaces: [{name: own-plan}]}}\n",
    );
}

#[test]
fn comment_acknowledges_the_warnings_of_its_line() {
    let rules = |before: &str, behind: &str| {
        format!(
            "domain: d\ndescriptors:\n{before}  - key: a{behind}\n    value: 10.0.0.0/8\n    rate_limit: {{unit: day, requests_per_unit: 1}}\n"
        )
    };
    assert_eq!(load(rules("", "")).expect("loads").warnings.warning_count(), 1);
    for text in [rules("  # check: ok, a name of a network\n", ""), rules("", " # check: ok")] {
        let warnings = load(&text).expect("loads").warnings;
        assert_eq!((warnings.warning_count(), warnings.acknowledged_count()), (0, 1), "{text}\n{warnings}");
    }
    // An error stays, and so does the warning of another line.
    let bad = "domain: d\ndescriptors:\n  - key: a\n    rate_limit: {unit: days, requests_per_unit: 1} # check: ok\n";
    assert_eq!(load(bad).expect_err("an error").error_count(), 1);
    let other = rules("", "").replace("domain: d", "domain: d # check: ok");
    assert_eq!(load(&other).expect("loads").warnings.warning_count(), 1);
}

#[test]
fn global_limit_that_regions_cannot_share_well_gets_a_warning() {
    let three = CompileOptions { regions: NonZeroU16::new(3), ..CompileOptions::default() };
    let table = [
        ("{unit: minute, requests_per_unit: 1000, scope: global}", &three, None),
        ("{unit: minute, requests_per_unit: 999, scope: global}", &three, Some("is split coarsely")),
        ("{unit: second, requests_per_unit: 1000, scope: global}", &three, Some("is split coarsely")),
        ("{unit: minute, requests_per_unit: 999, scope: region}", &three, None),
        (
            "{unit: minute, requests_per_unit: 1000, scope: global}",
            &CompileOptions::default(),
            Some("`scope: global` has no effect without TOLLKEEPER_REGIONS"),
        ),
    ];
    for (limit, options, expected) in table {
        let text = rule(limit);
        let compiled = compile_texts(&[source("x.yaml", text.as_bytes())], options).expect("it loads");
        let warnings = compiled.warnings.to_string();
        match expected {
            Some(expected) => assert!(warnings.contains(expected), "{limit}: {warnings}"),
            None => assert_eq!(warnings, "", "{limit}"),
        }
    }
}

#[test]
fn many_wildcards_with_the_same_text_get_a_warning() {
    let wildcards = |pattern: fn(usize) -> String| {
        let nodes: String = (0..1200).map(|n| format!("  - {{key: k, value: '{}'}}\n", pattern(n))).collect();
        load(format!("domain: d\ndescriptors:\n{nodes}")).expect("it loads").warnings.to_string()
    };
    let alike = wildcards(|n| format!("{}end", "*".repeat(n + 1)));
    assert!(alike.contains("1200 wildcards of this level have the same text beside their `*`"), "{alike}");
    assert_eq!(wildcards(|n| format!("{n:04}*")), "");
    assert_eq!(wildcards(|n| format!("*{n:04}")), "");
}

#[test]
fn merge_keys_fill_missing_fields() {
    let text = "
domain: d
descriptors:
  - key: a
    rate_limit: &base {unit: hour, requests_per_unit: 3}
  - key: b
    rate_limit: {<<: [{algorithm: token_bucket}, *base], requests_per_unit: 9}
";
    assert_eq!(
        format_rlconfig(&RuleSet::new(good(text)))[1],
        "d.b: unit=HOUR requests_per_unit=9, shadow_mode: false, quota_mode: false, algorithm: token_bucket"
    );
}

#[test]
fn rlconfig_shows_the_keys_of_a_global_limit() {
    let line = |keys: &str| {
        let text = rule(&format!("{{unit: day, requests_per_unit: 5000, scope: global{keys}}}"));
        let options = CompileOptions { regions: NonZeroU16::new(3), ..CompileOptions::default() };
        let compiled = compile_texts(&[source("x.yaml", text)], &options).expect("the rule is valid");
        format_rlconfig(&RuleSet::new(compiled.domains)).remove(0)
    };
    let expected = ", scope: global, reserve: 10%, max_overshoot: 5%, on_region_loss: share";
    assert!(line("").ends_with(expected), "{}", line(""));
    let keys = ", reserve: 12.5%, max_overshoot: 40, on_region_loss: deny";
    assert!(line(keys).ends_with(&format!(", scope: global{keys}")), "{}", line(keys));
}

#[test]
fn scalars_follow_yaml_1_1() {
    // Each with the start of its warning; one that reads as written has none.
    let warned = |text: &str, warning: &str| {
        let compiled = load(text).map_err(|found| format!("{text}\n{found}")).expect("a good file");
        let found: Vec<String> = compiled.warnings.warnings().iter().map(ToString::to_string).collect();
        let is_as_expected =
            if warning.is_empty() { found.is_empty() } else { found.len() == 1 && found[0].contains(warning) };
        assert!(is_as_expected, "{text}\n{found:?}, expected {warning}");
        compiled.domains
    };
    for (number, value, warning) in [
        ("0x1F", 31, "x.yaml:4:48: warning: `requests_per_unit: 0x1F` is read as 31, write 31"),
        ("010", 8, "`requests_per_unit: 010` is read as 8, write 8"),
        ("0o10", 8, "is read as 8"),
        ("0b11", 3, "is read as 3"),
        ("1_000", 1000, "is read as 1000"),
        ("+5", 5, ""),
        ("!!int 7", 7, ""),
        ("0", 0, ""),
        ("", 0, "`requests_per_unit` has no value, so it is 0: every request is rejected, write the number"),
        ("~", 0, "`requests_per_unit` has no value"),
    ] {
        let domains = warned(&rule(&format!("{{unit: day, requests_per_unit: {number}}}")), warning);
        assert_eq!(limits(&domains)[0].limit.requests_per_unit(), value, "{number}");
    }
    for (word, shadow, warning) in [
        ("true", true, ""),
        ("FALSE", false, ""),
        ("yes", true, "`shadow_mode: yes` is read as true, write true"),
        ("On", true, "is read as true"),
        ("y", true, "is read as true"),
        ("NO", false, "is read as false"),
        ("off", false, "is read as false"),
        ("~", false, "`shadow_mode` has no value, so it counts as not written"),
    ] {
        let text = format!("domain: d\ndescriptors:\n  - {{key: k, shadow_mode: {word}, rate_limit: {{unit: day}}}}\n");
        assert_eq!(limits(&warned(&text, warning))[0].shadow, shadow, "{word}");
    }
    for (keys, warning) in [
        ("algorithm:", "`algorithm` has no value, so it counts as not written"),
        ("on_store_error:", "`on_store_error` has no value"),
        ("unit_multiplier: 03", "`unit_multiplier: 03` is read as 3"),
        ("ban: {for: 5m, after: 010}", "`after: 010` is read as 8"),
        ("algorithm: leaky_bucket, max_wait:", "`max_wait` has no value"),
        ("consistency: eventual, max_overshoot: 0310", "`max_overshoot: 0310` is read as 200"),
    ] {
        warned(&rule(&format!("{{unit: day, requests_per_unit: 5000, {keys}}}")), warning);
    }
    for (text, value) in [("1.5", "1.5"), ("08", "08"), ("2026-01-02", "2026-01-02"), ("!!str ~", "~"), ("null", "")] {
        let text = format!("domain: d\ndescriptors:\n  - {{key: k, value: {text}, rate_limit: {{unit: day}}}}\n");
        assert_eq!(good(&text)[0].descriptors[0].value.pattern_text(), value);
    }
}

#[test]
fn metadata_keeps_its_types() {
    let text = "domain: d\ndescriptors:\n  - key: k\n    metadata: {a: 1, b: [2.5, x, ~, no], 3: {c: .inf, d: 2026-01-02}}\n    rate_limit: {unit: day}\n";
    let domains = good(text);
    let metadata = domains[0].descriptors[0].rule.as_ref().expect("a rule").metadata.clone().expect("metadata");
    let expected = serde_json::json!({"a": 1, "b": [2.5, "x", null, false], "3": {"c": "Infinity", "d": "2026-01-02"}});
    assert_eq!(serde_json::Value::Object(metadata), expected);
}

#[test]
fn utf_16_with_a_byte_order_mark_is_decoded() {
    let text = rule("{unit: day, requests_per_unit: 1}");
    let units = std::iter::once(0xfeff).chain(text.encode_utf16());
    let little: Vec<u8> = units.clone().flat_map(u16::to_le_bytes).collect();
    let big: Vec<u8> = units.flat_map(u16::to_be_bytes).collect();
    assert_eq!(load(little).expect("it loads").domains.len(), 1);
    assert_eq!(load(big).expect("it loads").domains.len(), 1);
}

#[test]
fn invalid_text_is_rejected_with_its_position() {
    let table: [(&[u8], &str); 4] = [
        (b"domain: a\nb: \xff\n", "x.yaml:2:4: error loading config file: yaml: invalid UTF-8"),
        (b"\x7fELF\x02\x01\x00\x00\xff", "this looks like a binary file"),
        (b"domain: a\x00", "this looks like a binary file"),
        (b"\xff\xfe\x00", "invalid UTF-16"),
    ];
    for (bytes, expected) in table {
        let found = load(bytes).expect_err("it is no text").to_string();
        assert!(found.contains(expected), "{found}");
    }
    let large = load(vec![b' '; 65 << 20]).expect_err("it is too large").to_string();
    assert!(large.contains("at most 64 MB are read"), "{large}");
}

#[test]
fn rules_of_maximum_depth_load() {
    let text =
        format!("domain: d\ndescriptors: {}[]{}\n", "[{key: k, value: v, descriptors: ".repeat(126), "}]".repeat(126));
    let mut node = &good(&text)[0].descriptors[0];
    let mut depth = 1;
    while let Some(next) = node.descriptors.first() {
        (node, depth) = (next, depth + 1);
    }
    assert_eq!(depth, 126);
}

#[test]
fn diagnostics_stop_at_a_thousand_and_count_the_rest() {
    let text = format!("domain: d\ndescriptors:\n{}", "  - value: x\n".repeat(3000));
    let found = load(text).expect_err("no keys");
    assert_eq!((found.errors().len(), found.dropped_counts().0), (1000, 2000));
    assert!(found.to_string().ends_with("and 2000 more errors"));
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = load(bytes);
    }

    #[test]
    fn arbitrary_yaml_like_text_never_panics(text in "([ a-z0-9:,{}\\[\\]&*!#|>'\"%@~<\\-\\n\\t]|domain: |key: |rate_limit: |<<: |\\*a|&a ){0,200}") {
        let _ = load(text);
    }

    #[test]
    fn damaged_files_never_panic(
        file in prop::sample::select(vec!["config/example.yaml", "config/reference.yaml"]),
        cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0_usize..30), 1..6),
    ) {
        let mut bytes = read(file).into_bytes();
        for (at, byte, removed) in cuts {
            let at = at.index(bytes.len());
            let end = (at + removed).min(bytes.len());
            bytes.splice(at..end, [byte]);
        }
        if let Err(found) = load(&bytes) {
            let text = String::from_utf8_lossy(&bytes);
            prop_assert!(found.errors().iter().all(|error| !error.message.is_empty() && error.line > 0));
            found.errors().iter().for_each(|error| drop(error.format_excerpt(&text)));
        }
    }

    #[test]
    fn loaded_rules_have_unique_paths_and_no_empty_keys(values in prop::collection::vec("[ab_*.]{0,3}", 1..8)) {
        let nodes: String = values.iter().map(|v| format!("  - {{key: k{v}, value: '{v}'}}\n")).collect();
        if let Ok(compiled) = load(format!("domain: d\ndescriptors:\n{nodes}")) {
            let mut composites: Vec<_> = compiled.domains[0].descriptors.iter().map(|node| node.composite_key()).collect();
            composites.sort();
            composites.dedup();
            prop_assert_eq!(composites.len(), values.len());
        }
    }
}

#[test]
fn metadata_without_meaning_is_ignored_whatever_it_holds() {
    for metadata in ["{list: [1, two], number: 1.5, nested: {unknown: 1e3}}", "[1, 2]", "1.5"] {
        let in_rate_limit = format!("{{unit: day, requests_per_unit: 1, metadata: {metadata}}}");
        for text in
            [format!("metadata: {metadata}\n{}", rule("{unit: day, requests_per_unit: 1}")), rule(&in_rate_limit)]
        {
            let compiled = load(&text).map_err(|found| format!("{text}\n{found}")).unwrap();
            assert_eq!(limits(&compiled.domains).len(), 1, "{text}");
            assert!(compiled.warnings.to_string().contains("`metadata` does not belong in"), "{}", compiled.warnings);
        }
    }
}

#[test]
fn of_a_key_written_twice_the_last_counts() {
    let text = "domain: d
descriptors:
  - key: k
    rate_limit: {unit: day, requests_per_unit: 5}
    metadata: {a: 1}
    rate_limit: {unit: day, requests_per_unit: 6}
    metadata: {b: 2}
";
    let compiled = load(text).map_err(|found| found.to_string()).unwrap();
    assert_eq!(limits(&compiled.domains)[0].limit.requests_per_unit(), 6);
    let metadata = serde_json::to_value(&compiled.domains[0].descriptors[0].rule.as_ref().unwrap().metadata).unwrap();
    assert_eq!(metadata, serde_json::json!({ "b": 2 }));
    let warnings = compiled.warnings.to_string();
    assert!(warnings.contains("`rate_limit` is written twice") && warnings.contains("line 4 does not"), "{warnings}");
}

#[test]
fn separators_of_yaml_1_1_end_no_line() {
    let error = load("domain: d\u{85}descriptors: []\n").unwrap_err().to_string();
    assert!(error.contains("control characters are not allowed, and here is U+0085"), "{error}");
    assert_eq!(load("domain: \"a\u{2028}b\"\n").unwrap().domains[0].name, "a\u{2028}b");
}

#[test]
fn small_global_limit_without_regions_gets_only_a_warning() {
    let text = rule("{unit: day, requests_per_unit: 1, scope: global, reserve: 50%}");
    let compiled = load(&text).map_err(|found| found.to_string()).unwrap();
    let warnings = compiled.warnings.to_string();
    assert!(warnings.contains("`scope: global` has no effect without TOLLKEEPER_REGIONS"), "{warnings}");
    let regions = CompileOptions { regions: NonZeroU16::new(2), ..CompileOptions::default() };
    let small = compile_texts(&[source("x.yaml", &text)], &regions).unwrap_err().to_string();
    assert!(small.contains("gives each of 2 regions less than one hit"), "{small}");
}

#[test]
fn bracket_that_nothing_opens_is_an_error() {
    let document = "{domain: shop, descriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: 5}}]}";
    for rest in ["}", "]", "\n}\n", "}}\n"] {
        let text = format!("{document}{rest}");
        for documents in [DocumentSelection::FirstOnly, DocumentSelection::All] {
            let found = compile_texts(&[RuleText { documents, ..source("x.yaml", &text) }], &CompileOptions::default());
            let error = found.unwrap_err().to_string();
            assert!(error.contains("misplaced bracket, remove the bracket that nothing opens"), "{text}: {error}");
        }
    }
}

mod acknowledged_lines {
    use tollkeeper::rules::diagnostic::AcknowledgedLines;

    #[test]
    fn comments_acknowledge_their_line_or_the_next() {
        let text = "\
# check: ok, the file is a sample
domain: a
descriptors:  # check: ok
# check: ok: two lines
# of comment

- key: b # check: okay
- key: c#check: ok
- value: '# check: ok'
- key: d
";
        let found = AcknowledgedLines::from_text(text);
        let lines: Vec<u32> = (0..12).filter(|line| found.contains_line(*line)).collect();
        // In quotes it looks the same: only warnings of that line are concerned.
        assert_eq!(lines, [2, 3, 7]);
        assert!(!AcknowledgedLines::from_text("domain: a\n").contains_line(1));
    }
}

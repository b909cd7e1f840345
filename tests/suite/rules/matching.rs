//! `match`, sets from files, and `matching` of a domain: what rules match, as compared with naive matchers, and as the
//! program shows it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Instant;

use proptest::prelude::*;
use serde_json::Value;
use smallvec::SmallVec;
use tempfile::TempDir;
use tollkeeper::limit::request::{Descriptor, Entry, Hits, Request};
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{CompiledRules, RuleText, compile_texts};
use tollkeeper::rules::rule::rlconfig::format_rlconfig;
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::yaml::DocumentSelection;

use kit::tollkeeper::{self as program, Tollkeeper};
use kit::wait_for;

fn compile(text: &str) -> CompiledRules {
    let source = RuleText { name: "r.yaml".into(), bytes: text.into(), documents: DocumentSelection::All };
    compile_texts(&[source], &CompileOptions::default()).unwrap_or_else(|found| panic!("{text}\n{found}"))
}

fn warnings(text: &str) -> Vec<String> {
    compile(text).warnings.warnings().iter().map(ToString::to_string).collect()
}

/// Entries of `key=value,key=value`.
fn entries(descriptor: &str) -> SmallVec<[Entry<'_>; 4]> {
    let parts = descriptor.split(',').map(|text| text.split_once('=').unwrap_or((text, "")));
    parts.map(|(key, value)| Entry { key: key.as_bytes(), value: value.as_bytes() }).collect()
}

/// Key and value of each entry of a counter's path.
type CounterEntries = Vec<(Vec<u8>, Vec<u8>)>;

/// Path of the rule that decides a descriptor of the domain `d`, with the key of its counter.
fn decide(rules: &RuleSet, entries: &[Entry<'_>]) -> Option<(String, CounterEntries)> {
    let descriptor = Descriptor {
        entries: entries.iter().copied().collect(),
        hits: Hits::Peek,
        hits_addend: None,
        limit_override: None,
    };
    let mut request = Request { domain: "d", descriptors: SmallVec::from_iter([descriptor]), hits_addend: 0 };
    if let Some(domain) = rules.find_domain_with_any_order("d") {
        rules.sort_request_entries(domain, &mut request);
    }
    let entries = &request.descriptors[0].entries;
    let found = rules.find_rule(rules.domain("d").unwrap(), entries)?;
    let value = |(index, entry): (usize, &Entry<'_>)| {
        let shared = found.shared.iter().find(|(shared, _)| *shared == index);
        (entry.key.to_vec(), shared.map_or_else(|| entry.value.to_vec(), |(_, pattern)| pattern.to_vec()))
    };
    Some((found.rule.rule.path.clone(), entries.iter().enumerate().map(value).collect()))
}

fn rule_of(rules: &RuleSet, descriptor: &str) -> Option<String> {
    decide(rules, &entries(descriptor)).map(|(rule, _)| rule)
}

const OFFICE: &str = r#"domain: d
descriptors:
  - { key: ip, value: 10.0.0.9, rate_limit: { unit: day, requests_per_unit: 1 } }
  - { key: ip, match: { in: [10.0.0.7, 10.0.0.8, 10.0.0.9] }, rate_limit: { unit: day, requests_per_unit: 2 } }
  - { key: ip, value: "10.9*", rate_limit: { unit: day, requests_per_unit: 3 } }
  - { key: ip, match: { cidr: [10.0.0.0/8, "2001:db8::/32"] }, share_threshold: true, rate_limit: { unit: day, requests_per_unit: 4 } }
  - { key: ip, match: { not: { cidr: ["::/0", 0.0.0.0/0] } }, rate_limit: { unit: day, requests_per_unit: 5 } }
  - { key: ip, rate_limit: { unit: day, requests_per_unit: 6 } }
  - { key: path, match: { regex: "/v[0-9]+/login" }, rate_limit: { unit: day, requests_per_unit: 7 } }
  - { key: path, match: { not: { regex: "/v[0-9]+/.*" } }, rate_limit: { unit: day, requests_per_unit: 8 } }
"#;

#[test]
fn operators_match_in_one_file_order_with_wildcards() {
    let rules = RuleSet::new(compile(OFFICE).domains);
    for (entry, rule) in [
        ("ip=10.0.0.9", Some("d.ip_10.0.0.9")),
        ("ip=10.0.0.8", Some("d.ip_in(10.0.0.7, 10.0.0.8, 10.0.0.9)")),
        ("ip=10.9.0.1", Some("d.ip_10.9*")),
        ("ip=10.8.0.1", Some("d.ip_cidr(10.0.0.0/8, 2001:db8::/32)")),
        ("ip=::ffff:10.8.0.1", Some("d.ip_cidr(10.0.0.0/8, 2001:db8::/32)")),
        ("ip=2001:db8::1", Some("d.ip_cidr(10.0.0.0/8, 2001:db8::/32)")),
        ("ip=10.8.0.1:80", Some("d.ip_not_cidr(0.0.0.0/0, ::/0)")),
        ("ip=192.0.2.1", Some("d.ip")),
        ("ip=in(10.0.0.7 10.0.0.8)", Some("d.ip_not_cidr(0.0.0.0/0, ::/0)")),
        ("path=/v1/login", Some("d.path_regex(/v[0-9]+/login)")),
        ("path=/v1/login/", None),
        ("path=/v/login", Some("d.path_not_regex(/v[0-9]+/.*)")),
        ("other=10.0.0.8", None),
    ] {
        assert_eq!(rule_of(&rules, entry).as_deref(), rule, "{entry}");
    }
    let counter = |entry: &str| decide(&rules, &entries(entry)).unwrap().1[0].1.clone();
    assert_eq!(counter("ip=10.0.0.8"), b"10.0.0.8", "a counter of its own");
    assert_eq!(counter("ip=10.8.0.1"), b"cidr(10.0.0.0/8, 2001:db8::/32)", "a shared counter");
    let lines = format_rlconfig(&rules).join("\n");
    assert!(lines.contains("d.path_not_regex(/v[0-9]+/.*): unit=DAY requests_per_unit=8"), "{lines}");
}

#[test]
fn rule_that_never_matches_is_warned_about() {
    let limit = "rate_limit: { unit: day, requests_per_unit: 1 }";
    for (first, second, is_hidden) in [
        ("value: \"/a*\"", "value: \"/a/*\"", true),
        ("value: \"/a/*\"", "value: \"/a*\"", false),
        ("value: \"*\"", "match: { regex: x }", true),
        ("value: \"*\"", "value: x", false),
        ("value: \"*\"", "metadata: {}", true),
        ("match: { in: [a, b, c] }", "match: { in: [c, a] }", true),
        ("match: { in: [a, b, c] }", "match: { in: [c, d] }", false),
        ("value: \"a*\"", "match: { in: [a, ab] }", true),
        ("match: { cidr: [10.0.0.0/8] }", "match: { cidr: [10.1.0.0/16, 10.2.0.0/16] }", true),
        ("match: { cidr: [10.0.0.0/9, 10.128.0.0/9] }", "match: { cidr: [10.0.0.0/8, 10.1.0.0/16] }", true),
        ("match: { cidr: [10.1.0.0/16] }", "match: { cidr: [10.0.0.0/8] }", false),
        ("match: { cidr: [10.0.0.0/8] }", "match: { in: [10.1.2.3] }", true),
        ("match: { not: { in: [a] } }", "match: { in: [b, c] }", true),
        ("match: { not: { in: [a] } }", "match: { in: [a, c] }", false),
    ] {
        let rules =
            format!("domain: d\ndescriptors:\n- {{ key: k, {first}, {limit} }}\n- {{ key: k, {second}, {limit} }}\n");
        let found = warnings(&rules);
        assert_eq!(found.len(), usize::from(is_hidden), "{rules}{found:?}");
        assert!(found.iter().all(|found| found.contains("never matches")), "{found:?}");
    }
}

#[test]
fn hidden_subtree_is_warned_about_unless_backtracking_reaches_it() {
    let rules = "descriptors:
- { key: user, value: ann, descriptors: [{ key: path, value: /a, rate_limit: { unit: day, requests_per_unit: 1 } }] }
- { key: user, descriptors: [{ key: path, rate_limit: { unit: day, requests_per_unit: 1 } }] }
";
    let found = warnings(&format!("domain: d\n{rules}"));
    assert!(found.len() == 1 && found[0].contains("values of 'user_ann' never reach 'path' below 'user'"), "{found:?}");
    assert!(found[0].contains("matching: {backtrack: true}"), "{found:?}");
    assert_eq!(warnings(&format!("domain: d\nmatching: {{ backtrack: true }}\n{rules}")), [""; 0]);
}

#[test]
fn value_that_looks_like_a_network_or_an_expression_is_warned_about() {
    for (value, operator) in [
        ("10.0.0.0/8", Some("cidr")),
        ("10.0.0.1/8", Some("cidr")),
        ("2001:db8::/32", Some("cidr")),
        ("^/v[0-9]+$", Some("regex")),
        ("^/api/.*", Some("regex")),
        ("10.0.0.1", None),
        ("/api/*", None),
        ("/v1/10.0.0.0/8", None),
        ("^", None),
        ("a$", None),
        ("1/2", None),
    ] {
        let rules = format!("domain: d\ndescriptors: [{{ key: k, value: '{value}', rate_limit: {{ unit: day }} }}]\n");
        let found = warnings(&rules);
        assert_eq!(found.len(), usize::from(operator.is_some()), "{value}: {found:?}");
        assert!(operator.is_none_or(|operator| found[0].contains(&format!("{{{operator}: "))), "{found:?}");
    }
}

#[test]
fn expressions_that_take_many_passes_are_warned_about_and_then_refused() {
    let rules = |keys: usize, count: usize| {
        let limit = "rate_limit: { unit: day, requests_per_unit: 1 }";
        // Two of them together have an automaton that is too large.
        let rule = |at: usize| {
            let (first, second) = (('a'..='z').nth(at % 26).unwrap(), ('A'..='Z').nth(at / 26).unwrap());
            format!("- {{ key: k{}, match: {{ regex: '.*[{first}{second}].{{8}}x' }}, {limit} }}\n", at % keys)
        };
        format!("domain: d\ndescriptors:\n{}", (0..count).map(rule).collect::<String>())
    };
    assert_eq!(warnings(&rules(1, 8)), [""; 0]);
    assert_eq!(warnings(&rules(3, 24)), [""; 0], "a value is compared with the expressions of its key");
    let found = warnings(&rules(1, 9));
    assert!(found.len() == 1 && found[0].contains("of this level take 9 passes over a value"), "{found:?}");
    let source = RuleText { name: "r.yaml".into(), bytes: rules(1, 300).into(), documents: DocumentSelection::All };
    let found = compile_texts(&[source], &CompileOptions::default()).unwrap_err().to_string();
    assert!(found.contains("passes over a value; at most 256 are allowed"), "{found}");
}

#[test]
fn repeated_keys_match_in_any_order_and_share_counters() {
    let rules = RuleSet::new(
        compile(
            "domain: d
matching: { order: any }
descriptors:
- key: k
  value: m
  descriptors:
  - { key: k, value: '*', share_threshold: true, rate_limit: { unit: day, requests_per_unit: 1 } }
- { key: z, descriptors: [{ key: a, rate_limit: { unit: day, requests_per_unit: 1 } }] }
",
        )
        .domains,
    );
    let expected = decide(&rules, &entries("k=m,k=a"));
    assert_eq!(expected.as_ref().map(|(rule, _)| rule.as_str()), Some("d.k_m.k_*"));
    for descriptor in ["k=a,k=m", "k=z,k=m", "k=m,k=m"] {
        assert_eq!(decide(&rules, &entries(descriptor)), expected, "{descriptor}");
    }
    assert_eq!(rule_of(&rules, "k=m,k=m,k=m"), None);
    assert_eq!(rule_of(&rules, "z=1,a=2").as_deref(), Some("d.a.z"));
    assert_eq!(decide(&rules, &entries("z=1,a=2")), decide(&rules, &entries("a=2,z=1")));
}

#[test]
fn hostile_descriptors_take_bounded_time_with_backtracking() {
    let mut rules = "domain: d\nmatching: { order: any, backtrack: true }\ndescriptors:\n".to_owned();
    // Every value matches all wildcards of every level, and no path has an end.
    for first in 0..20 {
        let _ = writeln!(rules, "- key: k\n  value: '*{}*'\n  descriptors:", "x".repeat(first + 1));
        for second in 0..20 {
            let below = "{ key: z, value: never, rate_limit: { unit: day, requests_per_unit: 1 } }";
            let stars = "x*".repeat(second + 30);
            let _ = writeln!(rules, "  - {{ key: k, value: '*{stars}', descriptors: [{below}] }}");
        }
    }
    let rules = RuleSet::new(compile(&rules).domains);
    let (one, other) = ("x".repeat(100), "x".repeat(101));
    let started = Instant::now();
    for _ in 0..5 {
        assert_eq!(rule_of(&rules, &format!("k={one},k={other},z=no")), None);
        assert_eq!(rule_of(&rules, &vec![format!("k={one}"); 1000].join(",")), None);
    }
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
}

#[test]
fn more_steps_than_allowed_are_an_error() {
    let level = |indent: &str, below: &str| {
        (0..30).fold(String::new(), |text, at| text + &format!("{indent}- key: k\n{indent}  value: '*{at}*'\n{below}"))
    };
    let inner = level("      ", "        rate_limit: { unit: day, requests_per_unit: 1 }\n");
    let middle = level("    ", &format!("      descriptors:\n{inner}"));
    let rules = format!(
        "domain: d\nmatching: {{ backtrack: true }}\ndescriptors:\n{}",
        level("", &format!("  descriptors:\n{middle}"))
    );
    let source = RuleText { name: "r.yaml".into(), bytes: rules.into(), documents: DocumentSelection::All };
    let found = compile_texts(&[source], &CompileOptions::default()).unwrap_err().to_string();
    assert!(found.starts_with("r.yaml:2:1: ") && found.contains("backtracking could try 27930 descriptors"), "{found}");
}

/// A small tree of rules over few keys and values, as YAML flow text, with all its paths.
#[derive(Clone, Debug)]
struct TestNode {
    key: &'static str,
    pattern: &'static str,
    has_limit: bool,
    below: Vec<TestNode>,
}

const PATTERNS: [&str; 6] = [
    "",
    "value: x",
    "value: 'x*'",
    "match: { in: [x, y] }",
    "match: { not: { in: [x] } }",
    "match: { regex: '[yz]+' }",
];

impl TestNode {
    fn matches(&self, entry: &Entry<'_>) -> bool {
        let value = std::str::from_utf8(entry.value).unwrap();
        let has_value = match self.pattern {
            "" => true,
            "value: x" => value == "x",
            "value: 'x*'" => value.starts_with('x'),
            "match: { in: [x, y] }" => value == "x" || value == "y",
            "match: { not: { in: [x] } }" => value != "x",
            _ => !value.is_empty() && value.chars().all(|c| c == 'y' || c == 'z'),
        };
        entry.key == self.key.as_bytes() && has_value
    }

    fn rank(&self) -> usize {
        match self.pattern {
            "value: x" => 0,
            "" => 2,
            _ => 1,
        }
    }

    fn composite(&self) -> String {
        let text = ["", "_x", "_x*", "_in(x, y)", "_not_in(x)", "_regex([yz]+)"];
        let at = PATTERNS.iter().position(|pattern| *pattern == self.pattern).unwrap();
        format!("{}{}", self.key, text[at])
    }

    fn write(nodes: &[Self], text: &mut String) {
        text.push('[');
        for node in nodes {
            let _ = write!(text, "{{ key: {}, ", node.key);
            if !node.pattern.is_empty() {
                let _ = write!(text, "{}, ", node.pattern);
            }
            if node.has_limit {
                text.push_str("rate_limit: { unit: day, requests_per_unit: 1 }, ");
            }
            text.push_str("descriptors: ");
            Self::write(&node.below, text);
            text.push_str("}, ");
        }
        text.push(']');
    }

    /// The path that a naive search finds: names of its nodes; `Some(None)` for an exemption.
    fn search(nodes: &[Self], entries: &[Entry<'_>], path: &str) -> Option<Option<String>> {
        let (first, rest) = entries.split_first()?;
        let mut matching: Vec<&Self> = nodes.iter().filter(|node| node.matches(first)).collect();
        matching.sort_by_key(|node| node.rank());
        matching.into_iter().find_map(|node| {
            let path = format!("{path}.{}", node.composite());
            match (rest, node.has_limit, node.below.is_empty()) {
                ([], true, _) => Some(Some(path)),
                ([], false, true) => Some(None),
                _ => Self::search(&node.below, rest, &path),
            }
        })
    }

    /// Whether a path that exempts its values matches the entries in this order, preferred or not.
    fn may_exempt(nodes: &[Self], entries: &[Entry<'_>]) -> bool {
        let Some((first, rest)) = entries.split_first() else { return false };
        nodes.iter().filter(|node| node.matches(first)).any(|node| match rest {
            [] => !node.has_limit && node.below.is_empty(),
            _ => Self::may_exempt(&node.below, rest),
        })
    }
}

/// Siblings must have distinct keys and patterns.
fn distinct(nodes: Vec<TestNode>) -> Vec<TestNode> {
    let mut seen = BTreeSet::new();
    nodes.into_iter().filter(|node| seen.insert((node.key, node.pattern))).collect()
}

fn trees(keys: &'static [&'static str]) -> impl Strategy<Value = Vec<TestNode>> {
    let pattern = || prop::sample::select(&PATTERNS[..]);
    let leaf = (prop::sample::select(keys), pattern(), any::<bool>()).prop_map(|(key, pattern, has_limit)| TestNode {
        key,
        pattern,
        has_limit,
        below: Vec::new(),
    });
    let node = leaf.prop_recursive(3, 40, 5, move |inner| {
        (prop::sample::select(keys), pattern(), any::<bool>(), prop::collection::vec(inner, 0..5))
            .prop_map(|(key, pattern, has_limit, below)| TestNode { key, pattern, has_limit, below: distinct(below) })
    });
    prop::collection::vec(node, 1..6).prop_map(distinct)
}

fn descriptors() -> impl Strategy<Value = Vec<String>> {
    let entry = (prop::sample::select(vec!["a", "b", "c"]), "[xyz]{0,2}");
    let descriptor = prop::collection::vec(entry, 1..5)
        .prop_map(|entries| entries.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(","));
    prop::collection::vec(descriptor, 1..8)
}

fn permutations<'e>(entries: &[Entry<'e>]) -> Vec<Vec<Entry<'e>>> {
    if entries.len() <= 1 {
        return vec![entries.to_vec()];
    }
    let mut all = Vec::new();
    for at in 0..entries.len() {
        let mut rest = entries.to_vec();
        let first = rest.remove(at);
        all.extend(permutations(&rest).into_iter().map(|rest| [vec![first], rest].concat()));
    }
    all
}

proptest! {

    #[test]
    fn backtracking_finds_what_a_naive_search_finds(nodes in trees(&["a", "b"]), descriptors in descriptors()) {
        let mut text = "domain: d\nmatching: { backtrack: true }\ndescriptors: ".to_owned();
        TestNode::write(&nodes, &mut text);
        let rules = RuleSet::new(compile(&text).domains);
        for descriptor in &descriptors {
            let entries = entries(descriptor);
            let expected = TestNode::search(&nodes, &entries, "d").flatten();
            prop_assert_eq!(decide(&rules, &entries).map(|(rule, _)| rule), expected, "{}\n{}", descriptor, text);
        }
    }

    #[test]
    fn any_order_of_entries_has_one_rule_and_one_counter(
        nodes in trees(&["a", "b", "c"]),
        descriptors in descriptors(),
        backtrack in any::<bool>(),
    ) {
        let mut text = format!("domain: d\nmatching: {{ order: any, backtrack: {backtrack} }}\ndescriptors: ");
        TestNode::write(&nodes, &mut text);
        let source = RuleText { name: "r.yaml".into(), bytes: text.clone().into(), documents: DocumentSelection::All };
        // Rules that differ only in their order are an error.
        let Ok(compiled) = compile_texts(&[source], &CompileOptions::default()) else { return Ok(()) };
        let rules = RuleSet::new(compiled.domains);
        for descriptor in &descriptors {
            let sent = entries(descriptor);
            let expected = decide(&rules, &sent);
            let all = permutations(&sent);
            for order in &all {
                prop_assert_eq!(&decide(&rules, order), &expected, "{}\n{}", descriptor, text);
            }
            // With backtracking a rule is found if one matches in any order of the entries. Where an exemption matches
            // too, the levels decide, whose order is that of the sorted rules.
            if backtrack {
                let matches = all.iter().any(|order| TestNode::search(&nodes, order, "d").is_some());
                let is_exempt = all.iter().any(|order| TestNode::may_exempt(&nodes, order));
                prop_assert!(is_exempt || matches == expected.is_some(), "{}\n{}", descriptor, text);
            }
        }
    }
}

/// A directory with these files.
fn directory(files: &[(&str, &str)]) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    directory
}

fn start(directory: &Path) -> Tollkeeper {
    let setup = program::without_rules().arg("--config").arg(directory);
    setup.env("TOLLKEEPER_POLL_INTERVAL", "0").env("TOLLKEEPER_RELOAD_DEBOUNCE", "10ms").start()
}

fn check(path: &Path) -> (bool, String) {
    let output =
        std::process::Command::new(program::program_path()).arg("check").arg(path).env_clear().output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

/// Limit of a descriptor with one entry, in the domain `d`; `None` if there is none.
fn limit(server: &Tollkeeper, key: &str, value: &str) -> Option<u64> {
    let entries = format!(r#"[{{"key":"{key}","value":"{value}"}}]"#);
    let body = server.post_json(&format!(r#"{{"domain":"d","descriptors":[{{"entries":{entries}}}]}}"#)).body;
    let body: Value = serde_json::from_slice(&body).unwrap();
    body["statuses"][0]["currentLimit"]["requestsPerUnit"].as_u64()
}

const WITH_SETS: &str = "domain: d
descriptors:
- { key: ip, match: { cidr: { file: lists/offices.txt } }, rate_limit: { unit: day, requests_per_unit: 10 } }
- { key: user, match: { in: { file: blocked.list } }, rate_limit: { unit: day, requests_per_unit: 1 } }
- { key: user, rate_limit: { unit: day, requests_per_unit: 5 } }
";

#[test]
fn sets_are_read_from_files_and_reloaded() {
    let files = directory(&[
        ("rules.yaml", WITH_SETS),
        ("lists/offices.txt", "\u{feff}# offices\r\n10.0.0.0/8 # all\r\n\r\n 2001:db8::/32\r\n"),
        ("blocked.list", "eve\n# mallory\n"),
    ]);
    let server = start(files.path());
    assert_eq!(limit(&server, "ip", "10.1.2.3"), Some(10));
    assert_eq!(limit(&server, "ip", "192.0.2.1"), None);
    assert_eq!((limit(&server, "user", "eve"), limit(&server, "user", "mallory")), (Some(1), Some(5)));

    fs::write(files.path().join("blocked.list"), "mallory\n").unwrap();
    wait_for("the new set", || (limit(&server, "user", "mallory") == Some(1)).then_some(()));
    assert_eq!(limit(&server, "user", "eve"), Some(5));

    fs::write(files.path().join("lists/offices.txt"), "10.0.0.0/8\n10.0.0.1/8\nnonsense\n").unwrap();
    let status = wait_for("the bad set", || Some(server.rules_status()).filter(|status| status["refused"] == 1));
    let error = status["last_error"].as_str().unwrap();
    assert!(error.contains("lists/offices.txt:2:1: `10.0.0.1/8` has bits beyond its length"), "{error}");
    assert!(error.contains("lists/offices.txt:3:1: `nonsense` is not a network"), "{error}");
    assert!(error.contains("rules.yaml:3:"), "{error}");
    assert_eq!(limit(&server, "ip", "10.1.2.3"), Some(10), "the last good set stays");

    fs::remove_file(files.path().join("lists/offices.txt")).unwrap();
    let status = wait_for("the missing set", || Some(server.rules_status()).filter(|status| status["refused"] == 2));
    let error = status["last_error"].as_str().unwrap();
    assert!(error.contains("the file `lists/offices.txt` cannot be read: no such file or directory"), "{error}");
    assert_eq!(limit(&server, "ip", "10.1.2.3"), Some(10));

    fs::write(files.path().join("lists/offices.txt"), "192.0.2.0/24\n").unwrap();
    wait_for("the mended set", || (limit(&server, "ip", "192.0.2.1") == Some(10)).then_some(()));
    assert_eq!(limit(&server, "ip", "10.1.2.3"), None);
}

#[test]
fn set_of_a_runtime_directory_is_not_read_as_rules() {
    let server = program::with_runtime_files(vec![
        ("rules.yaml".to_owned(), WITH_SETS.replace("lists/", "")),
        ("offices.txt".to_owned(), "10.0.0.0/8\n".to_owned()),
        ("blocked.list".to_owned(), "- eve: [\n".to_owned()),
    ])
    .start();
    assert_eq!(limit(&server, "ip", "10.1.2.3"), Some(10));
    assert_eq!(limit(&server, "user", "- eve: ["), Some(1));
    assert_eq!(server.rules_status()["domains"], 1);
}

#[test]
fn check_reads_sets_and_names_bad_lines_and_names() {
    let files = directory(&[("rules.yaml", WITH_SETS), ("lists/offices.txt", "10.0.0.0/8\nx\n"), ("blocked.list", "")]);
    let (is_good, page) = check(files.path());
    assert!(!is_good && page.contains("lists/offices.txt:2:1: `x` is not a network"), "{page}");
    fs::write(files.path().join("lists/offices.txt"), "10.0.0.0/8\n").unwrap();
    assert!(check(files.path()).0);
    for (name, problem) in [
        ("../up.txt", "it leads out of the directory of the rule file"),
        ("/etc/hosts.txt", "it leads out of the directory of the rule file"),
        ("rules.yaml", "its name does not end in .txt or .list"),
        ("gone.txt", "no such file or directory"),
    ] {
        fs::write(files.path().join("rules.yaml"), WITH_SETS.replace("blocked.list", name)).unwrap();
        let (is_good, page) = check(files.path());
        assert!(!is_good && page.contains(&format!("`{name}` cannot be read: {problem}")), "{page}");
    }
}

#[test]
fn set_of_a_million_entries_loads_in_bounded_time_and_memory() {
    let (mut networks, mut values) = (String::new(), String::new());
    for at in 0..1_000_000_u32 {
        let [_, a, b, c] = (at * 16).to_be_bytes();
        let _ = writeln!(networks, "10.{a}.{b}.{c}/28");
        let _ = writeln!(values, "user-{at:08}");
    }
    let files = directory(&[("rules.yaml", WITH_SETS), ("lists/offices.txt", &networks), ("blocked.list", &values)]);
    let started = Instant::now();
    let server = start(files.path());
    let elapsed = started.elapsed();
    assert_eq!(limit(&server, "ip", "10.7.7.7"), Some(10));
    assert_eq!(limit(&server, "ip", "11.7.7.7"), None);
    assert_eq!(limit(&server, "user", "user-00123456"), Some(1));
    assert_eq!(limit(&server, "user", "user-01000000"), Some(5));
    let peak = server.peak_mib();
    println!("{elapsed:?} until ready, {peak} MiB at most");
    assert!(peak < 400, "{peak} MiB");
}

#[test]
fn explain_shows_why_a_match_does_not_decide() {
    let files = directory(&[("rules.yaml", OFFICE)]);
    let server = start(files.path());
    let explain = |key: &str, value: &str| {
        let entries = format!(r#"[{{"key":"{key}","value":"{value}"}}]"#);
        server.explain(&format!(r#"{{"domain":"d","descriptors":[{{"entries":{entries}}}]}}"#))["descriptors"][0]["steps"][0].clone()
    };
    let step = explain("ip", "10.0.0.8");
    assert_eq!(step["matched"][0], "match");
    assert_eq!(step["matched"][1], "ip_in(10.0.0.7, 10.0.0.8, 10.0.0.9)");
    let reasons = |step: &Value| -> Vec<String> {
        step["other_matches"]
            .as_array()
            .unwrap()
            .iter()
            .map(|miss| format!("{}: {}", miss[0], miss[2]).replace('"', ""))
            .collect()
    };
    let found = reasons(&step);
    assert!(found.iter().any(|miss| miss == "ip_cidr(10.0.0.0/8, 2001:db8::/32): it matches too, but an earlier wildcard or `match` takes precedence"), "{found:?}");
    assert!(!found.iter().any(|miss| miss.starts_with("ip_not_cidr")), "{found:?}");
    let found = reasons(&explain("ip", "nobody"));
    assert!(!found.iter().any(|miss| miss.starts_with("ip_cidr")), "{found:?}");
}

#[test]
fn explain_shows_the_match_that_backtracking_left() {
    let rules = "domain: d
matching: { order: any, backtrack: true }
descriptors:
- { key: a, value: x, descriptors: [{ key: b, value: '1', rate_limit: { unit: day, requests_per_unit: 1 } }] }
- { key: a, descriptors: [{ key: b, rate_limit: { unit: day, requests_per_unit: 2 } }] }
";
    let files = directory(&[("rules.yaml", rules)]);
    let server = start(files.path());
    let body = r#"{"domain":"d","descriptors":[{"entries":[{"key":"b","value":"2"},{"key":"a","value":"x"}]}]}"#;
    let explained = server.explain(body)["descriptors"][0].clone();
    assert_eq!(explained["rule"]["path"], "d.a.b");
    assert_eq!(explained["steps"][0]["entry"], "a=x");
    assert_eq!(
        explained["steps"][0]["other_matches"][0][2],
        "it matches better, but has no rule for the entries after it"
    );
    assert_eq!(explained["limits"][0]["counter"]["used"], 0);
    server.post_json(body);
    let sorted = r#"{"domain":"d","descriptors":[{"entries":[{"key":"a","value":"x"},{"key":"b","value":"2"}]}]}"#;
    assert_eq!(server.explain(sorted)["descriptors"][0]["limits"][0]["counter"]["used"], 1);
}

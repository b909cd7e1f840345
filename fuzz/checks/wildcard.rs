//! Rule matching, compared with an obviously correct matcher in which every `*` tries every length.

use std::collections::HashSet;
use std::sync::Arc;

use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Entry;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::rule::value_pattern::ValuePattern;
use tollkeeper::rules::rule::{
    Allowance, Domain, OverLimitBody, OverrideDefaults, Rule, RuleLimit, RuleNode, SourceLocation,
};

/// Maximum input: the reference matcher takes quadratic time.
const MAX_BYTES: usize = 256;

pub(crate) fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Some((rules, entry)) = text.rsplit_once('\n').filter(|_| text.len() <= MAX_BYTES) else { return };
    let pair = |line: &str| line.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
    let mut known = HashSet::new();
    let nodes: Vec<RuleNode> = rules
        .lines()
        .filter_map(|line| {
            let (key, value) = pair(line).unwrap_or((line.to_owned(), String::new()));
            let node = node(key, value);
            (!node.key.is_empty() && known.insert(node.composite_key())).then_some(node)
        })
        .collect();
    let patterns: Vec<String> = nodes.iter().map(RuleNode::composite_key).collect();
    let domain = Domain {
        name: "d".to_owned(),
        defaults: OverrideDefaults::default(),
        defaults_by_unit: Vec::new(),
        descriptors: nodes,
    };
    let rules = RuleSet::new(vec![domain]);
    let (key, value) = pair(entry).unwrap_or((entry.to_owned(), String::new()));
    let entries = [Entry { key: key.as_bytes(), value: value.as_bytes() }];
    let found = rules.find_rule(rules.domain("d").expect("it was put there"), &entries);
    let found = found.map(|found| found.rule.rule.path.clone());
    let composite = format!("{key}_{value}");
    let expected = patterns
        .iter()
        .find(|pattern| **pattern == composite)
        .or_else(|| patterns.iter().find(|p| p.contains('*') && reference_matches(p.as_bytes(), composite.as_bytes())))
        .or_else(|| patterns.iter().find(|pattern| **pattern == key));
    assert_eq!(found.as_ref(), expected, "{patterns:?} and {composite:?}");
}

/// Matches by dynamic programming: each row has, for one more byte of the pattern, the prefixes of the text that match.
fn reference_matches(pattern: &[u8], text: &[u8]) -> bool {
    let mut matched = vec![false; text.len() + 1];
    matched[0] = true;
    for byte in pattern {
        let mut next = vec![false; text.len() + 1];
        for length in 0..=text.len() {
            next[length] = match byte {
                b'*' => matched[length] || (length > 0 && next[length - 1]),
                _ => length > 0 && matched[length - 1] && text[length - 1] == *byte,
            };
        }
        matched = next;
    }
    matched[text.len()]
}

/// A node whose rule is named after its composite key.
fn node(key: String, value: String) -> RuleNode {
    let location = SourceLocation { file: Arc::from("f"), line: 1, column: 1 };
    let spec = LimitSpec::new(Algorithm::FixedWindow, 1, Period::new(Unit::Second, 1).expect("a second"));
    let limit = Limit::new(&spec).expect("a plain limit");
    let limit = RuleLimit {
        limit,
        name: String::new(),
        shadow: false,
        quota: false,
        candidate: false,
        epoch: 0,
        left_out_defaults: Vec::new(),
    };
    let mut node = RuleNode {
        key,
        value: ValuePattern::from(value),
        rule: None,
        share_threshold: false,
        value_to_metric: false,
        descriptors: Vec::new(),
        location: location.clone(),
    };
    node.rule = Some(Rule {
        path: node.composite_key(),
        location,
        allowance: Allowance::Limits(vec![limit]),
        replaces: Vec::new(),
        metadata: None,
        over_limit_body: OverLimitBody::default(),
        detailed_metric: false,
        logging: None,
    });
    node
}

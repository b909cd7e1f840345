//! Rule matching, compared with an obviously correct matcher in which every `*` tries every length, and every `match`
//! is tried in file order. A value `in:a,b`, `cidr:10.0.0.0/8`, `regex:[a-z]+` is a `match`, with a `!` in front a
//! negated one.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Entry;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::rules::rule::expression::measure_expression;
use tollkeeper::rules::rule::network::Network;
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::rule::value_pattern::{MatchPattern, Operator, ValuePattern};
use tollkeeper::rules::rule::{
    Domain, MatchingOptions, OverrideDefaults, RejectionResponse, Rule, RuleAllowance, RuleNode, SourceLocation,
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
            let node = node(key, value)?;
            (!node.key.is_empty() && known.insert(node.composite_key())).then_some(node)
        })
        .collect();
    let patterns = nodes.clone();
    let domain = Domain {
        name: "d".to_owned(),
        defaults: OverrideDefaults::default(),
        defaults_by_unit: Vec::new(),
        matching: MatchingOptions::default(),
        plans: Vec::new(),
        tables: Vec::new(),
        descriptors: nodes,
    };
    let rules = RuleSet::new(vec![domain]);
    let (key, value) = pair(entry).unwrap_or((entry.to_owned(), String::new()));
    let entries = [Entry { key: key.as_bytes(), value: value.as_bytes() }];
    let found = rules.find_rule(rules.domain("d").expect("it was put there"), &entries);
    let found = found.map(|found| found.rule.rule.path.clone());
    let composite = format!("{key}_{value}");
    let is_match = |node: &&RuleNode| matches!(node.value, ValuePattern::Match(_));
    let has_text = |text: &str| patterns.iter().find(|node| !is_match(node) && node.composite_key() == text);
    let matches = |node: &&RuleNode| match &node.value {
        ValuePattern::Match(pattern) => node.key == key && pattern.matches(value.as_bytes()),
        ValuePattern::Any | ValuePattern::Exact(_) | ValuePattern::Wildcard(_) => {
            let pattern = node.composite_key();
            pattern.contains('*') && reference_matches(pattern.as_bytes(), composite.as_bytes())
        }
    };
    let expected = has_text(&composite).or_else(|| patterns.iter().find(matches)).or_else(|| has_text(&key));
    assert_eq!(found, expected.map(RuleNode::composite_key), "{patterns:?} and {composite:?}");
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

/// The `match` that a value stands for; `None` if its operand is invalid.
fn pattern(value: &str) -> Option<Option<MatchPattern>> {
    let (plain, negated) = value.strip_prefix('!').map_or((value, false), |plain| (plain, true));
    let operator = match plain.split_once(':') {
        Some(("in", values)) => {
            let values: BTreeSet<&str> = values.split(',').collect();
            Operator::In(values.into_iter().map(Box::from).collect())
        }
        Some(("cidr", networks)) => {
            let networks: Option<BTreeSet<Network>> =
                networks.split(',').map(|network| Network::parse(network).ok()).collect();
            Operator::Cidr(networks?.into_iter().collect())
        }
        Some(("regex", expression)) => {
            measure_expression(expression).ok()?;
            Operator::Regex(expression.into())
        }
        _ => return Some(None),
    };
    Some(Some(MatchPattern::new(operator, negated)))
}

/// A node whose rule is named after its composite key; `None` if its `match` is invalid.
fn node(key: String, value: String) -> Option<RuleNode> {
    let value = match pattern(&value)? {
        Some(_) if key.contains('*') => return None,
        Some(pattern) => ValuePattern::Match(Arc::new(pattern)),
        None => ValuePattern::from(value),
    };
    let location = SourceLocation { file: Arc::from("f"), line: 1, column: 1 };
    let spec = LimitSpec::new(Algorithm::FixedWindow, 1, Period::new(Unit::Second, 1).expect("a second"));
    let limit = Limit::new(&spec).expect("a plain limit");
    let mut node = RuleNode {
        key,
        value,
        rule: None,
        share_threshold: false,
        value_to_metric: false,
        exempt: false,
        descriptors: Vec::new(),
        location: location.clone(),
    };
    node.rule = Some(Rule {
        path: node.composite_key(),
        location,
        allowance: RuleAllowance::Limits(vec![limit.into()]),
        replaces: Vec::new(),
        metadata: None,
        enforced_share: None,
        rejection: RejectionResponse::default(),
        detailed_metric: false,
        logging: None,
        plan: None,
    });
    Some(node)
}

//! Matching a descriptor against a number of rules.

use std::hint::black_box;
use std::net::Ipv4Addr;
use std::sync::Arc;

use smallvec::SmallVec;
use tollkeeper::limit::request::Entry;
use tollkeeper::rules::rule::Domain;
use tollkeeper::rules::rule::network::Network;
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::rule::value_pattern::{MatchPattern, Operator, ValuePattern};

use super::{DOMAIN, Situation, Walk, many_rules};

/// Kind of all rules.
const PATH: &str = "- {key: path, value: /, rate_limit: {unit: minute, requests_per_unit: 10}}\n";

/// Matches a descriptor of each rule in turn.
pub(crate) struct Matching {
    rules: RuleSet,
    /// Keys and values of a matching descriptor, for each rule.
    paths: Vec<Vec<(String, String)>>,
    walk: Walk,
}

impl Matching {
    /// Rules with a key and a value.
    pub(crate) fn exact(count: usize) -> Self {
        let path = |i| format!("/service/{i}/items");
        Self::new(many_rules(PATH, count, |i, node| node.value = path(i).into()), count, |i| {
            vec![("path".into(), path(i))]
        })
    }

    /// Rules with a key alone.
    pub(crate) fn default_key(count: usize) -> Self {
        let key = |i| format!("user-of-{i}");
        Self::new(many_rules(PATH, count, |i, node| (node.key, node.value) = (key(i), ValuePattern::Any)), count, |i| {
            vec![(key(i), format!("user-{i:08}"))]
        })
    }

    /// Wildcard rules with different prefixes.
    pub(crate) fn wildcard(count: usize) -> Self {
        let rules = many_rules(PATH, count, |i, node| node.value = format!("/service/{i:06}/*").into());
        Self::new(rules, count, |i| vec![("path".into(), format!("/service/{i:06}/items"))])
    }

    /// Wildcard rules without a prefix, which are tried in the order of the file.
    pub(crate) fn wildcard_in_order(count: usize) -> Self {
        let rules = many_rules(PATH, count, |i, node| node.value = format!("*/service/{i:06}").into());
        Self::new(rules, count, |i| vec![("path".into(), format!("/eu/service/{i:06}"))])
    }

    /// Rules with lists of ten values.
    pub(crate) fn lists(count: usize) -> Self {
        let value = |i: usize, at: usize| format!("/service/{i:06}/{at}");
        let list = |i| Operator::In((0..10).map(|at| Box::from(value(i, at))).collect());
        Self::new(many_rules(PATH, count, |i, node| node.value = matching(list(i))), count, |i| {
            vec![("path".into(), value(i, i % 10))]
        })
    }

    /// Rules with networks of 16 addresses.
    pub(crate) fn networks(count: usize) -> Self {
        let first = |i: usize| u32::try_from(i).expect("few rules") * 16 + (10 << 24);
        let network = |i| Operator::Cidr(Arc::new([Network::V4 { first: first(i), length: 28 }]));
        Self::new(many_rules(PATH, count, |i, node| node.value = matching(network(i))), count, |i| {
            vec![("path".into(), Ipv4Addr::from_bits(first(i) + 7).to_string())]
        })
    }

    /// Rules with regular expressions.
    pub(crate) fn expressions(count: usize) -> Self {
        let expression = |i: usize| Operator::Regex(format!("/v[0-9]+/service-{i:04}/items/[a-z]+").into());
        Self::new(many_rules(PATH, count, |i, node| node.value = matching(expression(i))), count, |i| {
            vec![("path".into(), format!("/v{}/service-{i:04}/items/shoes", i % 9))]
        })
    }

    /// Rules with key and value on two levels, ten rules on the inner level.
    pub(crate) fn nested(count: usize) -> Self {
        let inner = |i| format!("  {}", PATH.replace("/,", &format!("/items/{i},")));
        let outer = (0..10).map(inner).fold("- key: tenant\n  descriptors:\n".to_owned(), |text, inner| text + &inner);
        let tenant = |i| format!("tenant-{i}");
        Self::new(many_rules(&outer, count / 10, |i, node| node.value = tenant(i).into()), count, |i| {
            vec![("tenant".into(), tenant(i / 10)), ("path".into(), format!("/items/{}", i % 10))]
        })
    }

    fn new(rules: Vec<Domain>, count: usize, path: impl Fn(usize) -> Vec<(String, String)>) -> Self {
        let rules = RuleSet::new(rules);
        assert_eq!(rules.rule_count(), count);
        let situation = Self { rules, paths: (0..count).map(path).collect(), walk: Walk::over(count) };
        assert!((0..count).all(|place| situation.finds(place)), "each rule is met");
        situation
    }

    fn finds(&self, place: usize) -> bool {
        let entries: SmallVec<[Entry<'_>; 4]> = self.paths[place]
            .iter()
            .map(|(key, value)| Entry { key: key.as_bytes(), value: value.as_bytes() })
            .collect();
        let domain = self.rules.domain(DOMAIN).expect("there is one");
        black_box(self.rules.find_rule(domain, black_box(&entries))).is_some()
    }
}

fn matching(operator: Operator) -> ValuePattern {
    ValuePattern::Match(Arc::new(MatchPattern::new(operator, false)))
}

impl Situation for Matching {
    fn step(&mut self) {
        let place = self.walk.next();
        black_box(self.finds(place));
    }

    fn inputs(&self) -> usize {
        self.walk.positions
    }
}

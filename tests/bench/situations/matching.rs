//! The rule that a descriptor meets, among so many.

use std::hint::black_box;

use smallvec::SmallVec;
use tollkeeper::request::Entry;
use tollkeeper::rule::set::RuleSet;

use super::{DOMAIN, Situation, Walk, rules};

/// What every rule says.
const LIMIT: &str = "{unit: minute, requests_per_unit: 10}";

/// Looks for each of the rules in turn.
pub(crate) struct Matching {
    rules: RuleSet,
    /// Of each rule, the keys and values of a descriptor that meets it.
    paths: Vec<Vec<(String, String)>>,
    walk: Walk,
}

impl Matching {
    /// Met by key and value.
    pub(crate) fn exact(count: usize) -> Self {
        let rule = |i| format!("- {{key: path, value: /service/{i}/items, rate_limit: {LIMIT}}}\n");
        Self::new(count, rule, |i| vec![("path".to_owned(), format!("/service/{i}/items"))])
    }

    /// Met by the key alone.
    pub(crate) fn default_key(count: usize) -> Self {
        let rule = |i| format!("- {{key: user-of-{i}, rate_limit: {LIMIT}}}\n");
        Self::new(count, rule, |i| vec![(format!("user-of-{i}"), format!("user-{i:08}"))])
    }

    /// Met by a wildcard; what stands before the star differs.
    pub(crate) fn wildcard(count: usize) -> Self {
        let rule = |i| format!("- {{key: path, value: /service/{i:06}/*, rate_limit: {LIMIT}}}\n");
        Self::new(count, rule, |i| vec![("path".to_owned(), format!("/service/{i:06}/items"))])
    }

    /// Met by a wildcard that begins with the star, so that only the order of the file tells which is tried first.
    pub(crate) fn wildcard_in_order(count: usize) -> Self {
        let rule = |i| format!("- {{key: path, value: '*/service/{i:06}', rate_limit: {LIMIT}}}\n");
        Self::new(count, rule, |i| vec![("path".to_owned(), format!("/eu/service/{i:06}"))])
    }

    /// Met by key and value on each of two levels, the inner of ten rules.
    pub(crate) fn nested(count: usize) -> Self {
        let rule = |i| {
            let inner = format!("  - {{key: path, value: /items/{}, rate_limit: {LIMIT}}}\n", i % 10);
            if i % 10 > 0 { inner } else { format!("- key: tenant\n  value: tenant-{i}\n  descriptors:\n{inner}") }
        };
        Self::new(count, rule, |i| {
            let tenant = ("tenant".to_owned(), format!("tenant-{}", i / 10 * 10));
            vec![tenant, ("path".to_owned(), format!("/items/{}", i % 10))]
        })
    }

    fn new(count: usize, rule: impl Fn(usize) -> String, path: impl Fn(usize) -> Vec<(String, String)>) -> Self {
        let text: String = (0..count).map(rule).collect();
        let rules = RuleSet::new(rules(&text));
        assert_eq!(rules.rule_count(), count);
        let situation = Self { rules, paths: (0..count).map(path).collect(), walk: Walk::through(count) };
        assert!((0..count).all(|place| situation.finds(place)), "each rule is met");
        situation
    }

    fn finds(&self, place: usize) -> bool {
        let entries: SmallVec<[Entry<'_>; 4]> = self.paths[place]
            .iter()
            .map(|(key, value)| Entry { key: key.as_bytes(), value: value.as_bytes() })
            .collect();
        let domain = self.rules.domain(DOMAIN).expect("there is one");
        black_box(self.rules.find(domain, black_box(&entries))).is_some()
    }
}

impl Situation for Matching {
    fn step(&mut self) {
        let place = self.walk.next();
        black_box(self.finds(place));
    }

    fn inputs(&self) -> usize {
        self.walk.places
    }
}

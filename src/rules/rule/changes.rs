//! Difference between two sets of rules, by limit: `shop.user 300 -> 5 a minute; 1 changed, 1 added, 0 removed`.
//!
//! A limit is known by its name in metrics, and compared by its written keys. What is no key of a limit does not show:
//! the contents of files with sets or tables, bodies, metadata and comments.
//!
//! Decides: what a load says of the limits that it changed (`RuleChanges`), and of how many.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use super::decompile::{LimitKeys, LimitPlace};
use super::set::RuleSet;
use super::{Domain, Rule, RuleAllowance, RuleNode};
use crate::base::text::truncate_and_escape;
use crate::limit::StoreFailurePolicy;

/// Maximum number of limits that are named.
const MAX_NAMED_LIMITS: usize = 100;
/// Maximum number of them in a line of the log.
const MAX_LIMITS_IN_LINE: usize = 5;
/// Maximum length of the text of a limit, in characters.
const MAX_TEXT_CHARS: usize = 300;

/// Keys of all limits of a set of rules, by name; several of one name in file order.
#[derive(Debug, Default)]
pub struct LimitList(BTreeMap<String, Vec<LimitKeys>>);

impl LimitList {
    /// Limits of compiled rules, those of plans included.
    pub fn of_rules(rules: &RuleSet) -> Self {
        let mut list = Self::default();
        rules.rules().for_each(|compiled| list.add_limits(&compiled.rule));
        list
    }

    /// Limits of domains.
    pub fn of_domains(domains: &[Domain]) -> Self {
        let mut list = Self::default();
        let mut waiting: Vec<&RuleNode> = domains.iter().flat_map(|domain| &domain.descriptors).collect();
        while let Some(node) = waiting.pop() {
            if let Some(rule) = &node.rule {
                list.add_limits(rule);
                rule.plan_rules().for_each(|of_plan| list.add_limits(of_plan));
            }
            waiting.extend(node.descriptors.iter());
        }
        list
    }

    fn add_limits(&mut self, rule: &Rule) {
        match &rule.allowance {
            RuleAllowance::Unlimited { .. } => {
                self.0.entry(rule.limit_path(0)).or_default().push(vec![("unlimited", "true".to_owned())]);
            }
            RuleAllowance::Limits(limits) => {
                for (index, (limit, place)) in LimitPlace::of_limits(limits).enumerate() {
                    self.0.entry(rule.limit_path(index)).or_default().push(limit.rule_file_keys(place));
                }
            }
        }
    }
}

/// What changed from one set of rules to the next.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RuleChanges {
    /// Number of limits that both have, with other keys.
    pub changed: u64,
    /// Number of limits that only the new set has.
    pub added: u64,
    /// Number of limits that only the old set has.
    pub removed: u64,
    /// Text of each, those that changed first; at most 100.
    pub limits: Vec<String>,
}

impl RuleChanges {
    /// Compares two sets.
    pub fn between(old: &LimitList, new: &LimitList) -> Self {
        let (mut changed, mut added, mut removed) =
            (BoundedTexts::default(), BoundedTexts::default(), BoundedTexts::default());
        let names: BTreeSet<&String> = old.0.keys().chain(new.0.keys()).collect();
        for name in names {
            let (before, after) =
                (old.0.get(name).map_or(&[][..], Vec::as_slice), new.0.get(name).map_or(&[][..], Vec::as_slice));
            for index in 0..before.len().max(after.len()) {
                match (before.get(index), after.get(index)) {
                    (Some(before), Some(after)) if before != after => {
                        changed.push(|| format!("{name} {}", describe_change(before, after)));
                    }
                    (None, Some(after)) => added.push(|| format!("{name} added: {}", describe_limit(after))),
                    (Some(before), None) => removed.push(|| format!("{name} removed: {}", describe_limit(before))),
                    _ => {}
                }
            }
        }
        let counts = (changed.count, added.count, removed.count);
        let texts = changed.texts.into_iter().chain(added.texts).chain(removed.texts);
        Self { changed: counts.0, added: counts.1, removed: counts.2, limits: texts.take(MAX_NAMED_LIMITS).collect() }
    }

    /// Number of limits that differ.
    pub const fn count(&self) -> u64 {
        self.changed + self.added + self.removed
    }

    /// Formats the numbers.
    pub fn format_counts(&self) -> String {
        match self.count() {
            0 => "no limit changed (bodies, metadata and tables are not compared)".to_owned(),
            _ => format!("{} changed, {} added, {} removed", self.changed, self.added, self.removed),
        }
    }
}

/// Writes the first limits and the numbers, on one line.
impl fmt::Display for RuleChanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for text in self.limits.iter().take(MAX_LIMITS_IN_LINE) {
            write!(f, "{text}; ")?;
        }
        if self.count() > MAX_LIMITS_IN_LINE as u64 {
            f.write_str("...; ")?;
        }
        f.write_str(&self.format_counts())
    }
}

#[derive(Default)]
struct BoundedTexts {
    texts: Vec<String>,
    count: u64,
}

impl BoundedTexts {
    fn push(&mut self, text: impl FnOnce() -> String) {
        self.count += 1;
        if self.texts.len() < MAX_NAMED_LIMITS {
            self.texts.push(truncate_and_escape(&text(), MAX_TEXT_CHARS));
        }
    }
}

/// Keys that say how much is admitted in which time.
const ALLOWANCE_KEYS: [&str; 6] =
    ["unlimited", "concurrent", "max_duration", "unit", "unit_multiplier", "requests_per_unit"];

fn find_value<'k>(keys: &'k LimitKeys, name: &str) -> Option<&'k str> {
    keys.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str())
}

/// Period of a limit: `a minute`, `in 5 minutes`, `at once, each for 60s`; empty if it is unlimited.
fn describe_period(keys: &LimitKeys) -> String {
    match (find_value(keys, "unit"), find_value(keys, "unit_multiplier"), find_value(keys, "max_duration")) {
        (Some(unit), None, _) => format!("a {unit}"),
        (Some(unit), Some(multiplier), _) => format!("in {multiplier} {unit}s"),
        (None, _, Some(duration)) => format!("at once, each for {duration}"),
        (None, _, None) => String::new(),
    }
}

fn amount_of(keys: &LimitKeys) -> &str {
    find_value(keys, "requests_per_unit").or_else(|| find_value(keys, "concurrent")).unwrap_or("unlimited")
}

fn describe_allowance(keys: &LimitKeys) -> String {
    format!("{} {}", amount_of(keys), describe_period(keys)).trim_end().to_owned()
}

fn describe_limit(keys: &LimitKeys) -> String {
    let others = keys.iter().filter(|(key, _)| !ALLOWANCE_KEYS.contains(key) && *key != "name");
    others.fold(describe_allowance(keys), |text, (key, value)| format!("{text}, {key} {value}"))
}

fn describe_change(before: &LimitKeys, after: &LimitKeys) -> String {
    let mut text = match (describe_period(before) == describe_period(after), amount_of(before) == amount_of(after)) {
        (true, true) => describe_allowance(after),
        (true, false) => format!("{} -> {}", amount_of(before), describe_allowance(after)),
        (false, _) => format!("{} -> {}", describe_allowance(before), describe_allowance(after)),
    };
    let names: BTreeSet<&str> = before.iter().chain(after).map(|(key, _)| *key).collect();
    for name in names.into_iter().filter(|name| !ALLOWANCE_KEYS.contains(name)) {
        let (before, after) = (find_value(before, name), find_value(after, name));
        if before != after {
            let absent = if name == "on_store_error" { StoreFailurePolicy::default().name() } else { "none" };
            text += &format!(", {name} {} -> {}", before.unwrap_or(absent), after.unwrap_or(absent));
        }
    }
    text
}

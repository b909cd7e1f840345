//! Compiled rules back in the form of rule files, as YAML.
//!
//! The YAML is a rule file with the limits of a rule, or a plan with one: what pages and tools print, to be pasted into
//! a rule file. Every text of a limit is made of its written keys, with which it compiles to an equal limit.
//!
//! Decides: a compiled limit as YAML (`RuleLimit::rule_file_keys`).

use std::sync::Arc;

use super::RuleLimit;
use super::set::RuleSet;
use super::value_pattern::{MatchPattern, Operator, ValuePattern};
use crate::base::text::escape_unprintable_json;
use crate::limit::{Consistency, GlobalScope, Limit, StoreFailurePolicy};

/// Descriptors that lead to a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulePath {
    /// Domain.
    pub domain: String,
    /// Descriptors from the outermost to that of the rule, at least one.
    pub entries: Vec<RuleDescriptor>,
}

/// A descriptor as a rule file has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleDescriptor {
    /// Key.
    pub key: String,
    /// Values of the key that it matches.
    pub value: ValuePattern,
    /// All values that the pattern matches share one counter.
    pub share_threshold: bool,
}

impl RuleSet {
    /// Returns the descriptors that lead to the rule with this path; `None` if there is none.
    pub fn find_rule_path(&self, path: &str) -> Option<RulePath> {
        let has_path = |id: &usize| self.nodes[*id].rule.as_deref().is_some_and(|rule| rule.rule.path == path);
        let mut id = (0..self.nodes.len()).find(has_path)?;
        let mut entries = Vec::new();
        while !self.nodes[id].composite.is_empty() {
            entries.push(self.to_rule_descriptor(id));
            id = self.nodes[id].parent as usize;
        }
        entries.reverse();
        let domain = self.domains().find(|domain| domain.root as usize == id)?.name.clone();
        Some(RulePath { domain, entries })
    }

    fn to_rule_descriptor(&self, id: usize) -> RuleDescriptor {
        let node = &self.nodes[id];
        let (key, rest) = node.composite.split_at(node.key_length);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let value = match &node.pattern {
            Some(pattern) => ValuePattern::Match(Arc::clone(pattern)),
            // A value follows the key and `_`.
            None => ValuePattern::from(text(rest.get(1..).unwrap_or_default())),
        };
        RuleDescriptor { key: text(key), value, share_threshold: node.share_threshold }
    }
}

/// Whether a limit is the only one of its rule that decides, or a candidate; `count_rejected` depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitPlace {
    /// The only one that decides, or a candidate.
    Sole,
    /// One of several.
    OneOfSeveral,
}

impl LimitPlace {
    /// Place of each limit of a rule.
    pub fn of_limits(limits: &[RuleLimit]) -> impl Iterator<Item = (&RuleLimit, Self)> {
        let deciding = limits.iter().filter(|limit| !limit.candidate).count();
        let place = move |limit: &RuleLimit| match limit.candidate || deciding == 1 {
            true => Self::Sole,
            false => Self::OneOfSeveral,
        };
        limits.iter().map(move |limit| (limit, place(limit)))
    }
}

impl RuleLimit {
    /// Returns the keys with which a rule file makes an equal limit, and their values as YAML on one line.
    ///
    /// A key that is at its default is absent; the algorithm is always there, because defaults of rules may name
    /// another. `shadow_mode` and `quota_mode` are as in a list.
    pub fn rule_file_keys(&self, place: LimitPlace) -> Vec<(&'static str, String)> {
        // Exhaustive, so that a new property cannot be forgotten here.
        let Self {
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
        } = self;
        let mut keys = Vec::new();
        if !name.is_empty() {
            keys.push(("name", quote_for_yaml(name)));
        }
        if !replaces.is_empty() {
            let names = replaces.iter().map(|name| format!("{{name: {}}}", quote_for_yaml(name)));
            keys.push(("replaces", format!("[{}]", names.collect::<Vec<_>>().join(", "))));
        }
        keys.extend(list_rule_file_keys(limit, place));
        if let Some(active) = active {
            keys.push(("active", active.spec().to_string()));
        }
        let on_store_error = limit.on_store_error();
        // That of a candidate is given.
        if on_store_error != StoreFailurePolicy::default() && !candidate {
            keys.push(("on_store_error", on_store_error.name().to_owned()));
        }
        keys.extend(overflow_to.iter().map(|name| ("overflow_to", quote_for_yaml(name))));
        if let Some(notify) = notify {
            keys.push(("notify", notify.to_string()));
        }
        if *epoch != 0 {
            keys.push(("epoch", epoch.to_string()));
        }
        for (key, _) in [("shadow_mode", shadow), ("quota_mode", quota)].into_iter().filter(|(_, is_set)| **is_set) {
            keys.push((key, "true".to_owned()));
        }
        keys
    }
}

fn list_rule_file_keys(limit: &Limit, place: LimitPlace) -> Vec<(&'static str, String)> {
    let period = limit.period();
    let mut keys = Vec::new();
    if limit.is_concurrent() {
        keys.push(("concurrent", limit.requests_per_unit().to_string()));
        keys.push(("max_duration", format_micros(period.micros())));
    } else {
        keys.push(("unit", period.unit().name().to_owned()));
        if period.multiplier() != 1 {
            keys.push(("unit_multiplier", period.multiplier().to_string()));
        }
        keys.push(("requests_per_unit", limit.requests_per_unit().to_string()));
        keys.push(("algorithm", limit.algorithm().name().to_owned()));
    }
    let window = limit.calendar_windows().map(|window| ("window", window.spec().to_string()));
    keys.extend(window);
    keys.extend(limit.ban().map(|ban| ("ban", ban.to_string())));
    keys.extend(limit.reservations().map(|reservations| ("reservations", reservations.to_string())));
    // A bucket of 0 cannot be written; it is that of a limit of 0.
    let capacity = limit.algorithm().properties().capacity.rule_file_key().filter(|_| limit.capacity() > 0);
    keys.extend(capacity.map(|key| (key, limit.capacity().to_string())));
    keys.extend(limit.non_default_max_wait_us().map(|max_wait_us| ("max_wait", format_micros(max_wait_us))));
    let by_default = place == LimitPlace::Sole && limit.counts_rejected_if_sole();
    if limit.counts_rejected_hits() != by_default {
        keys.push(("count_rejected", limit.counts_rejected_hits().to_string()));
    }
    if let Consistency::Eventual(overshoot) = limit.consistency() {
        keys.push(("consistency", "eventual".to_owned()));
        // A global limit has one `max_overshoot` for both.
        keys.extend(limit.global_scope().is_none().then(|| ("max_overshoot", overshoot.to_string())));
    }
    keys.extend(limit.global_scope().into_iter().flat_map(GlobalScope::rule_file_keys));
    keys
}

/// Formats a duration as rule files have it.
fn format_micros(micros: u64) -> String {
    match micros {
        whole if whole.is_multiple_of(1_000_000) => format!("{}s", whole / 1_000_000),
        whole if whole.is_multiple_of(1000) => format!("{}ms", whole / 1000),
        micros => format!("{micros}us"),
    }
}

/// Keys of a limit to paste.
pub type LimitKeys = Vec<(&'static str, String)>;

/// Formats the rule file of a limit with these keys. Other keys of the rule are absent.
pub fn format_rule_yaml(entries: &RulePath, keys: LimitKeys) -> String {
    let (mut text, indent) = format_descriptors(entries);
    text += &format!("{indent}rate_limit:\n");
    for (key, value) in keys {
        text += &format!("{indent}  {key}: {value}\n");
    }
    text
}

/// Formats the domain and the descriptors down to the rule, with the indentation of the keys of the last.
fn format_descriptors(entries: &RulePath) -> (String, String) {
    let mut text = format!("domain: {}\n", quote_for_yaml(&entries.domain));
    let mut indent = String::new();
    for RuleDescriptor { key, value, share_threshold } in &entries.entries {
        text += &format!("{indent}descriptors:\n{indent}- key: {}\n", quote_for_yaml(key));
        indent += "  ";
        match value {
            ValuePattern::Any => {}
            ValuePattern::Exact(value) | ValuePattern::Wildcard(value) => {
                text += &format!("{indent}value: {}\n", quote_for_yaml(value));
            }
            ValuePattern::Match(pattern) => text += &format!("{indent}match: {}\n", format_match(pattern)),
        }
        if *share_threshold {
            text += &format!("{indent}share_threshold: true\n");
        }
    }
    (text, indent)
}

/// Formats a limit as a mapping on one line: a value of `rate_limit`, or an item of its list.
pub fn format_limit_on_one_line(keys: LimitKeys) -> String {
    // A plain text with a comma or a colon would end in braces.
    let is_plain = |value: &str| !value.starts_with(['{', '[', '"']) && value.contains([',', ':']);
    let fields = keys.into_iter().map(|(key, value)| match is_plain(&value) {
        true => format!("{key}: {}", serde_json::Value::from(value)),
        false => format!("{key}: {value}"),
    });
    format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
}

/// Formats the rule file with these limits of a rule. Other keys are absent.
pub fn format_rule_file_with_limits(entries: &RulePath, limits: &[RuleLimit]) -> String {
    let (mut text, indent) = format_descriptors(entries);
    // A named limit in shadow mode would become a candidate of one without a name.
    let is_of_rule = limits.iter().all(|limit| limit.shadow);
    if is_of_rule {
        text += &format!("{indent}shadow_mode: true\n");
    }
    text += &format!("{indent}rate_limit:\n");
    let line = |(limit, place): (&RuleLimit, _)| {
        let mut keys = limit.rule_file_keys(place);
        keys.retain(|(key, _)| !is_of_rule || limit.candidate || *key != "shadow_mode");
        format_limit_on_one_line(keys)
    };
    LimitPlace::of_limits(limits).map(line).for_each(|line| text += &format!("{indent}- {line}\n"));
    text
}

/// Formats the rule file of a plan of one limit with these keys. Other plans and keys of the plan are absent.
pub fn format_plan_yaml(entries: &RulePath, plan: &str, keys: LimitKeys) -> String {
    let mut text = format!("domain: {}\nplans:\n  {}:\n", quote_for_yaml(&entries.domain), quote_for_yaml(plan));
    for (key, value) in keys {
        text += &format!("    {key}: {value}\n");
    }
    text
}

/// Formats the value of a `match`, on one line.
fn format_match(pattern: &MatchPattern) -> String {
    let list = |items: Vec<String>| format!("[{}]", items.join(", "));
    // Quoted: a comma or a colon would end a plain text in brackets.
    let quote = |text: &str| escape_unprintable_json(&serde_json::Value::from(text).to_string()).into_owned();
    let file = |name: &str| format!("{{ file: {} }}", quote(name));
    let (operator, operand) = match &pattern.operator {
        Operator::In(values) => ("in", list(values.iter().map(|value| quote(value)).collect())),
        Operator::InFile(set) => ("in", file(&set.name)),
        Operator::Cidr(networks) => {
            ("cidr", list(networks.iter().map(|network| quote(&network.to_string())).collect()))
        }
        Operator::CidrFile(set) => ("cidr", file(&set.name)),
        Operator::Regex(expression) => ("regex", quote(expression)),
    };
    match pattern.negated {
        true => format!("{{ not: {{ {operator}: {operand} }} }}"),
        false => format!("{{ {operator}: {operand} }}"),
    }
}

/// Quotes text that YAML would read otherwise, and escapes what a terminal would. JSON strings are YAML strings.
fn quote_for_yaml(text: &str) -> String {
    let is_plain = text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c))
        && !["true", "false", "null", "yes", "no", "on", "off", "y", "n"].contains(&text.to_ascii_lowercase().as_str());
    if is_plain {
        return text.to_owned();
    }
    escape_unprintable_json(&serde_json::Value::from(text).to_string()).into_owned()
}

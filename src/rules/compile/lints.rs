//! Warnings about rules that load but probably do not do what is intended.
//!
//! Each is about a mistake that otherwise shows only in production. A correct file gets no warning, so that people do
//! not learn to ignore them.
//!
//! Decides: which rules load with a warning; costly expressions; a too small `max_overshoot`.
//! Decides: the warning of `scope: global` without effect; how many expressions one level may have.

use std::collections::HashMap;
use std::num::NonZeroU32;

use super::limit_defaults::DomainSettings;
use super::options::CompileOptions;
use crate::limit::local_budget::LocalBudget;
use crate::limit::{DEFAULT_ENVOY_TIMEOUT_US, Limit};
use crate::rules::diagnostic::escape_for_message;
use crate::rules::document::fields::{DocumentReader, FieldPath};
use crate::rules::document::{DescriptorSpec, RateLimitEntry, RateLimitSpec};
use crate::rules::rule::RuleNode;
use crate::rules::rule::expression::{Expressions, MAX_AUTOMATA_PER_KEY, MAX_AUTOMATA_WITHOUT_WARNING};
use crate::rules::rule::network::{Network, NetworkError};
use crate::rules::rule::value_pattern::Operator;
use crate::rules::rule::value_pattern::{MatchKind, ValuePattern};
use crate::rules::rule::wildcard::{WildcardPattern, max_tried_patterns};
use crate::rules::yaml::Position;

/// Maximum number of wildcards of one level that may be tried one by one without a warning.
const MAX_WILDCARDS_WITHOUT_WARNING: usize = 1000;

/// Warns about a descriptor that has no limit and no children, and exempts no value.
pub(super) fn warn_about_descriptor_without_effect(
    reader: &mut DocumentReader<'_>,
    written: &DescriptorSpec,
    node: &RuleNode,
    field_path: &FieldPath<'_>,
) {
    if !node.key.is_empty() && !written.unreadable && !affects_requests(written, node) {
        let message = "this descriptor does nothing";
        reader.report_warning(
            written.at,
            field_path,
            message,
            "give it a `rate_limit`, `descriptors`, or a `value` to exempt",
        );
    }
}

/// Warns about a value that looks like a network or a regular expression: it is compared as it is.
pub(super) fn warn_about_value_like_pattern(
    reader: &mut DocumentReader<'_>,
    at: Position,
    value: &str,
    field_path: &FieldPath<'_>,
) {
    // An address alone is an ordinary value.
    let is_network = value.contains('/') && !matches!(Network::parse(value), Err(NetworkError::NotANetwork));
    let operator = match (is_network, looks_like_expression(value)) {
        (true, _) => "cidr",
        (false, true) => "regex",
        (false, false) => return,
    };
    let value = escape_for_message(value);
    let (what, hint) = match operator {
        "cidr" => ("network", format!("write `match: {{cidr: [\"{value}\"]}}` instead of `value`")),
        _ => ("regular expression", format!("write `match: {{regex: '{value}'}}` instead of `value`")),
    };
    let message = format!("this value is compared as text, not as a {what}");
    reader.report_warning(at, &field_path.with_key("value"), message, hint);
}

/// Returns `true` for a text that is anchored as an expression is, at both ends or with an operator between.
fn looks_like_expression(value: &str) -> bool {
    let (starts, ends) = (value.starts_with('^'), value.ends_with('$'));
    let has_operator = [".*", ".+", "]+", "]*", "\\d", "\\w", "(?"].iter().any(|operator| value.contains(operator));
    value.len() > 2 && ((starts && ends) || ((starts || ends) && has_operator))
}

/// Returns `true` if a descriptor affects any request.
fn affects_requests(written: &DescriptorSpec, node: &RuleNode) -> bool {
    let has_rule = !matches!(written.rate_limit, RateLimitSpec::None) || written.plan.is_some();
    let exempts_values = match node.match_kind() {
        MatchKind::Exact | MatchKind::Wildcard | MatchKind::Match => true,
        MatchKind::Any => false,
    };
    has_rule || !written.descriptors.is_empty() || exempts_values
}

/// Warns about a delay that exceeds Envoy's timeout, and about an eventual or global limit that is too small to share.
pub(super) fn warn_about_limit(
    reader: &mut DocumentReader<'_>,
    written: &RateLimitEntry,
    limit: &Limit,
    scope: &DomainSettings<'_>,
    field_path: &FieldPath<'_>,
) {
    let options = scope.options;
    let each_us = limit.period_us() / limit.requests_per_unit().max(1);
    let longest_us = limit.longest_queue_wait_us();
    let suffices = scope.caller_timeout_us >= longest_us;
    if longest_us.is_some() && each_us > DEFAULT_ENVOY_TIMEOUT_US && !suffices {
        let message = format!("a request that waits in this queue waits {} ms or more", each_us / 1000);
        let hint = "Envoy gives up after 20 ms unless `timeout` of its rate limit filter says otherwise";
        reader.report_warning(written.at, field_path, message, hint);
    }
    warn_about_small_overshoot(reader, written, limit, options, field_path);
    warn_about_global_limit(reader, written, limit, options, field_path);
}

/// Returns `true` for values that one limit probably means together: methods in a list, paths of a wildcard. Networks,
/// files and all values but some are rather clients, with a counter each.
pub(super) fn has_values_that_belong_together(value: &ValuePattern) -> bool {
    match value {
        ValuePattern::Match(pattern) => {
            !pattern.negated && matches!(pattern.operator, Operator::In(_) | Operator::Regex(_))
        }
        ValuePattern::Wildcard(_) => true,
        ValuePattern::Any | ValuePattern::Exact(_) => false,
    }
}

/// Warns about a level that shares a counter below the level `key_above`, whose values have a counter each.
pub(super) fn warn_about_level_that_does_not_share(
    reader: &mut DocumentReader<'_>,
    at: Position,
    key_above: &str,
    field_path: &FieldPath<'_>,
) {
    let key = escape_for_message(key_above);
    let message = format!("only this level shares a counter: each value of `{key}` above it has one of its own");
    let hint = "write `share_threshold: true` there too, or `# check: ok, REASON` above this line";
    reader.report_warning(at, field_path, message, hint);
}

/// Smallest `requests_per_unit` that regions can share without a warning; a smaller one is split coarsely.
const MIN_GLOBAL_HITS_WITHOUT_WARNING: u64 = 1000;

/// Shortest period of a limit that regions can share without a warning, in microseconds.
const MIN_GLOBAL_PERIOD_US_WITHOUT_WARNING: u64 = 60_000_000;

/// Warns about `scope: global` without regions.
pub(super) fn warn_about_global_scope_without_regions(
    reader: &mut DocumentReader<'_>,
    written: &RateLimitEntry,
    field_path: &FieldPath<'_>,
) {
    let at = written.defaultable.scope.map_or(written.at, |scope| scope.at);
    let message = "`scope: global` has no effect without TOLLKEEPER_REGIONS: each region has the limit for itself";
    let hint = "set TOLLKEEPER_REGION, TOLLKEEPER_REGIONS and TOLLKEEPER_GLOBAL_REDIS_URL";
    reader.report_warning(at, &field_path.with_key("scope"), message, hint);
}

/// Warns about a global limit that has no effect, or that is too small to split well.
fn warn_about_global_limit(
    reader: &mut DocumentReader<'_>,
    written: &RateLimitEntry,
    limit: &Limit,
    options: &CompileOptions,
    field_path: &FieldPath<'_>,
) {
    // Memcache refuses such a limit.
    if limit.global_scope().is_none() || options.memcache {
        return;
    }
    if options.regions.is_none() {
        warn_about_global_scope_without_regions(reader, written, field_path);
    } else if limit.requests_per_unit() > 0
        && (limit.requests_per_unit() < MIN_GLOBAL_HITS_WITHOUT_WARNING
            || limit.period_us() < MIN_GLOBAL_PERIOD_US_WITHOUT_WARNING)
    {
        let message = "a limit below 1000, or with a period below a minute, is split coarsely over regions";
        let hint = "a region may reject although another one has hits left; raise the limit or the period";
        let at = written.defaultable.scope.map_or(written.at, |scope| scope.at);
        reader.report_warning(at, &field_path.with_key("scope"), message, hint);
    }
}

/// Warns about an overshoot that is too small to admit hits without the store.
fn warn_about_small_overshoot(
    reader: &mut DocumentReader<'_>,
    written: &RateLimitEntry,
    limit: &Limit,
    options: &CompileOptions,
    field_path: &FieldPath<'_>,
) {
    let slots = NonZeroU32::new(options.max_replicas).unwrap_or(NonZeroU32::MIN);
    let budget = LocalBudget::for_limits([limit].into_iter(), slots);
    let Some(budget) = budget.filter(|_| limit.requests_per_unit() > 0) else { return };
    let at = written.defaultable.consistency.map_or(written.at, |consistency| consistency.at);
    if budget.life_us == 0 {
        let message = "with so small an overshoot and so short a period hits cannot be leased";
        reader.report_warning(
            at,
            field_path,
            message,
            "each request asks the store; raise `max_overshoot` or use strict",
        );
    } else if budget.share == 0 && limit.global_scope().is_none() {
        let message = format!("the overshoot is too small to share it among {slots} replicas");
        let hint = "the first hits on each key ask the store; raise `max_overshoot` or use strict";
        reader.report_warning(at, field_path, message, hint);
    }
}

/// Maximum number of expressions of one level.
const MAX_EXPRESSIONS_PER_LEVEL: usize = 5000;

/// Warns about expressions of one level that need many automata together; refuses too many expressions or automata.
pub(super) fn warn_about_costly_expressions(
    reader: &mut DocumentReader<'_>,
    nodes: &[RuleNode],
    field_path: &FieldPath<'_>,
) {
    // Expressions by their key, and whether they are negated: each has automata of its own.
    let mut groups: HashMap<(&str, bool), Vec<(&str, ())>> = HashMap::new();
    for node in nodes {
        if let ValuePattern::Match(pattern) = &node.value
            && let Operator::Regex(expression) = &pattern.operator
        {
            groups.entry((&node.key, pattern.negated)).or_default().push((expression, ()));
        }
    }
    let expressions: usize = groups.values().map(Vec::len).sum();
    let Some(first) = nodes.first().filter(|_| expressions > MAX_AUTOMATA_WITHOUT_WARNING) else { return };
    let at = Position { line: first.location.line, column: first.location.column };
    if expressions > MAX_EXPRESSIONS_PER_LEVEL {
        let message =
            format!("{expressions} expressions in one level; at most {MAX_EXPRESSIONS_PER_LEVEL} are allowed");
        reader.report_error(at, field_path, message, "use wildcards or lists for some of them");
        return;
    }
    let mut automata_of_keys: HashMap<&str, usize> = HashMap::new();
    for ((key, _), expressions) in &groups {
        *automata_of_keys.entry(key).or_default() += Expressions::new(expressions).automata_count();
    }
    let automata = automata_of_keys.into_values().max().unwrap_or(0);
    let message = format!("the expressions of this level take {automata} passes over a value");
    let hint = "write wildcards such as `*admin*` for expressions with `.*` in front";
    if automata > MAX_AUTOMATA_PER_KEY {
        reader.report_error(at, field_path, format!("{message}; at most {MAX_AUTOMATA_PER_KEY} are allowed"), hint);
    } else if automata > MAX_AUTOMATA_WITHOUT_WARNING {
        reader.report_warning(at, field_path, message, hint);
    }
}

/// Warns about wildcards of one level that have all their literal parts in common: they are tried one after the other.
pub(super) fn warn_about_costly_wildcards(
    reader: &mut DocumentReader<'_>,
    nodes: &[RuleNode],
    field_path: &FieldPath<'_>,
) {
    if nodes.len() <= MAX_WILDCARDS_WITHOUT_WARNING {
        return;
    }
    let pattern = |node: &RuleNode| match node.match_kind() {
        MatchKind::Wildcard => Some(WildcardPattern::new(node.composite_key().as_bytes())),
        MatchKind::Exact | MatchKind::Match | MatchKind::Any => None,
    };
    let patterns: Vec<WildcardPattern> = nodes.iter().filter_map(pattern).collect();
    let alike = max_tried_patterns(patterns.iter());
    if alike > MAX_WILDCARDS_WITHOUT_WARNING {
        let Some(first) = nodes.first() else { return };
        let at = Position { line: first.location.line, column: first.location.column };
        let message = format!("{alike} wildcards of this level have the same text beside their `*`");
        reader.report_warning(at, field_path, message, "they are tried one after the other; give each text of its own");
    }
}

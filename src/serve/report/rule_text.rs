//! The lines of a rule in its file, as they were loaded, and its limits in the form of rule files.
//!
//! Only lines of loaded rules are shown, and without comments: a file may say more to those who edit it than to those
//! who reach the debug listener.
//!
//! Decides: which lines of a file are a rule.

use serde::{Deserialize, Serialize};

use crate::rules::live::{LoadedRules, NumberedLine};
use crate::rules::rule::decompile::{LimitPlace, format_limit_on_one_line, format_rule_file_with_limits};
use crate::rules::rule::set::{CompiledRule, RuleSet};
use crate::rules::rule::{RuleAllowance, RuleLimit, SourceLocation};

/// Query of `/rule_text`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RuleTextQuery {
    /// Location of a rule: `file:line:column`, as in `/rules` and `/explain`.
    pub origin: String,
}

/// Maximum number of lines of a rule.
const MAX_RULE_LINES: usize = 60;
/// Maximum number of characters of a line.
const MAX_LINE_CHARS: usize = 200;

/// A rule in its file.
#[derive(Clone, Debug, Serialize)]
pub struct RuleTextReport {
    /// Name of the file.
    pub file: String,
    /// Line of the rule's limits, from 1.
    pub line: u32,
    /// Lines from that of the rule's key to the end of the rule, without comments; empty if the rules came from a
    /// control plane.
    pub lines: Vec<NumberedLine>,
    /// True if lines were left out.
    pub is_cut: bool,
    /// Limits, candidates last, each on one line of YAML: what decides, without policies and texts.
    pub limits: Vec<RuleLimitText>,
    /// A rule file with these limits; absent if there are none.
    pub yaml: Option<String>,
}

/// A limit in the form of rule files.
#[derive(Clone, Debug, Serialize)]
pub struct RuleLimitText {
    /// Name in metrics.
    pub rule: String,
    /// Value of `rate_limit`.
    pub yaml: String,
    /// True for a candidate.
    pub candidate: bool,
}

impl RuleTextReport {
    /// Finds the rule at a location of the loaded rules; `None` if there is none.
    pub fn find(loaded: &LoadedRules, origin: &str) -> Option<Self> {
        let (file, line, column) = split_location(origin)?;
        let is_at = |at: &SourceLocation| at.line == line && at.column == column && &*at.file == file;
        let rule = loaded.rules.rules().find(|rule| is_at(&rule.rule.location))?;
        let SourceLocation { file, line, .. } = &rule.rule.location;
        let text = loaded.from.texts.iter().find(|text| text.name == *file);
        let (lines, is_cut) = text.map(|text| find_rule_lines(&text.bytes, *line)).unwrap_or_default();
        // Each is a text by itself.
        let limits = rule.limits.iter().zip(rule_limits(rule)).map(|(compiled, limit)| RuleLimitText {
            rule: compiled.stats.name().as_str().to_owned(),
            yaml: format_limit_on_one_line(limit.rule_file_keys(LimitPlace::Sole)),
            candidate: compiled.candidate,
        });
        Some(Self {
            file: file.to_string(),
            line: *line,
            lines,
            is_cut,
            limits: limits.collect(),
            yaml: format_rule_as_file(&loaded.rules, rule, None),
        })
    }
}

/// Limits of a rule, candidates last, as the compiled ones.
pub(super) fn rule_limits(rule: &CompiledRule) -> &[RuleLimit] {
    match &rule.rule.allowance {
        RuleAllowance::Unlimited { .. } => &[],
        RuleAllowance::Limits(limits) => limits,
    }
}

/// Formats a rule file with the limits of a rule, and `added` as one more line of the list.
pub(super) fn format_rule_as_file(rules: &RuleSet, rule: &CompiledRule, added: Option<String>) -> Option<String> {
    let path = rules.find_rule_path(&rule.rule.path)?;
    let limits = rule_limits(rule);
    (!limits.is_empty()).then(|| format_rule_file_with_limits(&path, limits, added))
}

/// Splits `file:line:column`; `None` if it is none.
fn split_location(origin: &str) -> Option<(&str, u32, u32)> {
    let mut parts = origin.rsplitn(3, ':');
    let (column, line) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    Some((parts.next()?, line, column))
}

/// Lines of the list item that contains `line`, and whether the last were left out.
pub fn find_rule_lines(text: &[u8], line: u32) -> (Vec<NumberedLine>, bool) {
    let all: Vec<&[u8]> = text.split(|byte| *byte == b'\n').collect();
    let at = (line as usize).saturating_sub(1);
    if at >= all.len() {
        return (Vec::new(), false);
    }
    let indent = |index: usize| all[index].iter().take_while(|byte| **byte == b' ').count();
    let is_item = |index: usize| all[index][indent(index)..].starts_with(b"-");
    let is_blank = |index: usize| matches!(all[index].get(indent(index)), None | Some(b'#' | b'\r'));
    // `rate_limit` stands deeper than the `- key` that it belongs to.
    let within = indent(at);
    let is_start = |index: &usize| is_item(*index) && !is_blank(*index) && (*index == at || indent(*index) < within);
    let lowest = at.saturating_sub(MAX_RULE_LINES / 2);
    let first = (lowest..=at).rev().find(is_start).unwrap_or(at);
    let mut end = first + 1;
    while end < all.len() && (is_blank(end) || indent(end) > indent(first)) {
        end += 1;
    }
    while end > first + 1 && is_blank(end - 1) {
        end -= 1;
    }
    let shown = end.min(first + MAX_RULE_LINES);
    let lines = (first..shown).zip(1..).filter_map(|(index, offset)| {
        let start = &all[index][..all[index].len().min(4 * MAX_LINE_CHARS)];
        let start = String::from_utf8_lossy(start);
        let text = start[..find_comment(&start).unwrap_or(start.len())].trim_end();
        let is_comment = text.is_empty() && !start.trim().is_empty();
        let number = u32::try_from(first).unwrap_or(u32::MAX).saturating_add(offset);
        (!is_comment).then(|| NumberedLine { number, text: text.chars().take(MAX_LINE_CHARS).collect() })
    });
    (lines.collect(), shown < end)
}

/// Place of the first `#` that may begin a comment. One in a quoted text counts too: what is quoted depends on the
/// lines before, and a comment must never be shown.
pub fn find_comment(line: &str) -> Option<usize> {
    let is_after_blank =
        |at: usize| at.checked_sub(1).is_none_or(|before| line.as_bytes()[before].is_ascii_whitespace());
    line.match_indices('#').map(|(at, _)| at).find(|at| is_after_blank(*at))
}

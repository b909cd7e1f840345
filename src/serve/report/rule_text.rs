//! The limits of a loaded rule in the form of rule files: what decides, whatever its file says.
//!
//! Decides: what `/rule_text` shows of a rule.

use serde::{Deserialize, Serialize};

use crate::rules::live::LoadedRules;
use crate::rules::rule::decompile::{LimitPlace, format_limit_on_one_line, format_rule_file_with_limits};
use crate::rules::rule::{RuleAllowance, SourceLocation};

/// Query of `/rule_text`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RuleTextQuery {
    /// Location of a rule: `file:line:column`, as in `/rules` and `/explain`.
    pub origin: String,
}

/// A loaded rule.
#[derive(Clone, Debug, Serialize)]
pub struct RuleTextReport {
    /// Name of the file.
    pub file: String,
    /// Line of the rule's limits, from 1.
    pub line: u32,
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
        let limits = match &rule.rule.allowance {
            RuleAllowance::Unlimited { .. } => &[][..],
            RuleAllowance::Limits(limits) => limits,
        };
        // Each is a text by itself.
        let texts = rule.limits.iter().zip(limits).map(|(compiled, limit)| RuleLimitText {
            rule: compiled.stats.name().as_str().to_owned(),
            yaml: format_limit_on_one_line(limit.rule_file_keys(LimitPlace::Sole)),
            candidate: compiled.candidate,
        });
        let path = loaded.rules.find_rule_path(&rule.rule.path).filter(|_| !limits.is_empty());
        Some(Self {
            file: file.to_string(),
            line: *line,
            limits: texts.collect(),
            yaml: path.map(|path| format_rule_file_with_limits(&path, limits)),
        })
    }
}

/// Splits `file:line:column`; `None` if it is none.
fn split_location(origin: &str) -> Option<(&str, u32, u32)> {
    let mut parts = origin.rsplitn(3, ':');
    let (column, line) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    Some((parts.next()?, line, column))
}

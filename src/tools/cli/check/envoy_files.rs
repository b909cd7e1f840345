//! Envoy bootstraps of `check --envoy`: reads them, and formats what is found.
//!
//! Decides: which files `check --envoy` reads, how large: standard input, `/config_dump`.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Serialize, Serializer};

use crate::base::text::escape_unprintable;
use crate::rules::diagnostic::{Diagnostic, format_excerpt};
use crate::rules::rule::set::RuleSet;
use crate::rules::yaml::text;
use crate::tools::cli::print::format_with_noun;
use crate::tools::envoy_check::finding::{EnvoyFinding, EnvoyFindings, FindingSeverity};
use crate::tools::envoy_check::{ReachedRules, check_file, collect_shortest_timeouts};

/// Path that means standard input.
const STDIN_PATH: &str = "-";

/// Maximum number of findings with one consequence and fix whose lines are shown.
const MAX_EXCERPTS: usize = 3;

/// Prefix of the messages of rule files that are not YAML.
const RULE_FILE_ERROR_PREFIX: &str = "error loading config file: ";

/// Bootstraps that were read, or why one could not be.
pub(super) struct EnvoyFiles(Vec<(String, Result<String, UnreadableFile>)>);

/// Bootstraps that were checked.
pub(super) struct CheckedEnvoyFiles {
    files: Vec<CheckedFile>,
}

/// A bootstrap, or why it could not be read.
struct CheckedFile {
    name: String,
    text: String,
    found: Result<EnvoyFindings, UnreadableFile>,
}

/// Why a file could not be read.
struct UnreadableFile {
    line: u32,
    column: u32,
    message: String,
    fix: Option<String>,
}

impl UnreadableFile {
    fn with_problem_at_start(message: String, fix: &str) -> Self {
        Self { line: 1, column: 1, message, fix: Some(fix.to_owned()) }
    }
}

impl From<&Diagnostic> for UnreadableFile {
    fn from(diagnostic: &Diagnostic) -> Self {
        let Diagnostic { line, column, message, hint, .. } = diagnostic;
        let message = message.strip_prefix(RULE_FILE_ERROR_PREFIX).unwrap_or(message).to_owned();
        Self { line: *line, column: *column, message, fix: hint.clone() }
    }
}

impl EnvoyFiles {
    /// Reads the files.
    pub(super) fn read(paths: &[PathBuf]) -> Self {
        Self(paths.iter().map(|path| (path.display().to_string(), read_bootstrap_text(path))).collect())
    }

    /// Shortest timeout of the rate limit filters of each domain, in microseconds.
    pub(super) fn collect_shortest_timeouts(&self) -> BTreeMap<String, u64> {
        collect_shortest_timeouts(self.0.iter().filter_map(|(_, text)| text.as_deref().ok()))
    }

    /// Checks the files, against rules if there are any without errors.
    pub(super) fn check(self, rules: Option<&RuleSet>) -> CheckedEnvoyFiles {
        let mut reached = ReachedRules::default();
        let mut check = |(name, text): (String, Result<String, UnreadableFile>)| {
            let (text, found) = match text {
                Ok(text) => {
                    let found = check_file(&Arc::from(&*name), &text, rules, &mut reached);
                    let found = found.map_err(|problems| match problems.errors().first() {
                        Some(first) => UnreadableFile::from(first),
                        None => UnreadableFile::with_problem_at_start("unreadable".to_owned(), "write YAML or JSON"),
                    });
                    (text, found)
                }
                Err(unreadable) => (String::new(), Err(unreadable)),
            };
            CheckedFile { name, text, found }
        };
        let mut files: Vec<CheckedFile> = self.0.into_iter().map(&mut check).collect();
        // Of several Envoys, each may reach some of the rules; of an unreadable one nothing is known.
        if files.iter().all(|file| file.found.is_ok())
            && let Some(found) = files.last_mut().and_then(|file| file.found.as_mut().ok())
        {
            rules.iter().for_each(|rules| reached.report_others(rules, found));
        }
        CheckedEnvoyFiles { files }
    }
}

impl CheckedEnvoyFiles {
    /// Returns `true` if a file cannot be read, or has a finding that is an error.
    pub(super) fn has_errors(&self) -> bool {
        self.count_findings(FindingSeverity::Error) > 0
    }

    fn count_findings(&self, severity: FindingSeverity) -> u64 {
        let of_file = |file: &CheckedFile| match &file.found {
            Ok(found) => found.count(severity),
            Err(_) => u64::from(severity == FindingSeverity::Error),
        };
        self.files.iter().map(of_file).sum()
    }

    fn count_acknowledged(&self) -> u64 {
        self.files.iter().filter_map(|file| file.found.as_ref().ok()).map(|found| found.acknowledged).sum()
    }

    /// Formats the findings with their lines, and their numbers.
    pub(super) fn format_text(&self) -> String {
        let mut page = String::new();
        for CheckedFile { name, text, found } in &self.files {
            match found {
                Ok(found) => {
                    page += &format_findings(name, found.kept(), text);
                    let total: u64 = FindingSeverity::ALL.iter().map(|severity| found.count(*severity)).sum();
                    let more = total.saturating_sub(found.kept().len() as u64);
                    page += &if more > 0 { format!("and {more} more findings\n") } else { String::new() };
                }
                Err(UnreadableFile { line, column, message, fix }) => {
                    page += &escape_unprintable(&format!("{name}:{line}:{column}: error: {message}"));
                    page.push('\n');
                    page += &format_excerpt(text, *line, *column);
                    page +=
                        &fix.as_ref().map_or_else(String::new, |fix| format!("  fix: {}\n", escape_unprintable(fix)));
                }
            }
        }
        let [errors, warnings, hints] = FindingSeverity::ALL.map(|severity| self.count_findings(severity));
        let counts =
            [(self.files.len() as u64, "Envoy file"), (errors, "error"), (warnings, "warning"), (hints, "hint")];
        page += &counts.map(|(count, what)| format_with_noun(count, what)).join(", ");
        page += &match self.count_acknowledged() {
            0 => "\n".to_owned(),
            acknowledged => format!(", {acknowledged} acknowledged\n"),
        };
        page
    }
}

/// Formats findings: place and message of each, with the line; consequence and fix once for those that share them.
fn format_findings(own_file: &str, findings: &[EnvoyFinding], text: &str) -> String {
    let mut page = String::new();
    let mut is_written = HashSet::new();
    for EnvoyFinding { severity, check, consequence, fix, .. } in findings {
        let group = (*severity, check.name(), fix);
        if !is_written.insert((check.name(), severity.name(), fix)) {
            continue;
        }
        let same = findings.iter().filter(|other| (other.severity, other.check.name(), &other.fix) == group);
        for (count, finding) in same.enumerate() {
            let EnvoyFinding { file, line, column, message, .. } = finding;
            let headline = format!("{file}:{line}:{column}: {}: {message} [{}]", severity.name(), check.name());
            page += &escape_unprintable(&headline);
            page.push('\n');
            if file == own_file && count < MAX_EXCERPTS {
                page += &format_excerpt(text, *line, *column);
            }
        }
        page += &format!("  so: {}\n  fix: {}\n", escape_unprintable(consequence), escape_unprintable(fix));
    }
    page
}

/// Reads a file, or standard input, of at most the size of a rule file.
fn read_bootstrap_text(path: &Path) -> Result<String, UnreadableFile> {
    let mut bytes = Vec::new();
    let limit = text::MAX_YAML_BYTES as u64 + 1;
    let read = if path == Path::new(STDIN_PATH) {
        io::stdin().lock().take(limit).read_to_end(&mut bytes)
    } else {
        File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes))
    };
    read.map_err(|error| {
        UnreadableFile::with_problem_at_start(error.to_string(), "check the spelling and the permissions")
    })?;
    if bytes.len() > text::MAX_YAML_BYTES {
        let message = format!("at most {} MB are read", text::MAX_YAML_BYTES >> 20);
        return Err(UnreadableFile::with_problem_at_start(message, "check a part of it"));
    }
    let decoded = text::decode_text(&bytes).map_err(|text::UnreadableText { at, message, hint }| UnreadableFile {
        line: at.line,
        column: at.column,
        message,
        fix: Some(hint.to_owned()),
    })?;
    Ok(decoded.into_owned())
}

/// Writes `files`, the numbers of findings, and the findings; an unreadable file is a finding `unreadable`.
impl Serialize for CheckedEnvoyFiles {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let [errors, warnings, hints] = FindingSeverity::ALL.map(|severity| self.count_findings(severity));
        let findings: Vec<serde_json::Value> = self.files.iter().flat_map(findings_as_json).collect();
        let (files, acknowledged) = (self.files.len(), self.count_acknowledged());
        serde_json::json!({
            "files": files, "errors": errors, "warnings": warnings, "hints": hints, "acknowledged": acknowledged,
            "findings": findings,
        })
        .serialize(serializer)
    }
}

fn findings_as_json(file: &CheckedFile) -> Vec<serde_json::Value> {
    match &file.found {
        Ok(found) => found.kept().iter().filter_map(|finding| serde_json::to_value(finding).ok()).collect(),
        Err(UnreadableFile { line, column, message, fix }) => vec![serde_json::json!({
            "severity": FindingSeverity::Error, "check": "unreadable", "file": file.name, "line": line, "column": column,
            "path": "", "message": message, "consequence": "nothing of this file is checked", "fix": fix,
        })],
    }
}

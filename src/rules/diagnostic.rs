//! Diagnostics of rule files: message, position and fix; and the lines whose warnings are acknowledged.
//!
//! `Display` writes one line for logs, [`Diagnostic::format_excerpt`] the line of the file with a caret for people, and
//! `Serialize` an object for CI.
//!
//! [`Diagnostics`] is bounded: of a million errors a thousand are kept and the rest are counted. Errors and warnings
//! have separate bounds, so that no flood of warnings hides an error. Text quoted from a file is made printable first.
//!
//! A comment `# check: ok, REASON` at the end of a line, or alone in the lines above it, acknowledges the warnings of
//! that line: its author has read them and wants what is written. Errors cannot be acknowledged.
//!
//! Decides: how many errors and warnings are kept and shown, with which lines.
//! Decides: which warnings `# check: ok` acknowledges (`AcknowledgedLines`).

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use serde::{Serialize, Serializer};

use crate::base::text::{replace_unprintable_char, truncate_and_escape};
use crate::rules::rule::SourceLocation;

/// Maximum number of errors, and of warnings, that are kept; the rest are counted.
pub const MAX_KEPT_PER_SEVERITY: usize = 1000;

/// Maximum number of characters of a line in an excerpt.
const MAX_EXCERPT_CHARS: usize = 120;

/// Severity of a diagnostic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The rules cannot be used.
    Error,
    /// The rules can be used, but probably do not do what is intended.
    Warning,
}

/// One error or warning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Diagnostic {
    /// Error or warning.
    pub severity: Severity,
    /// Name of the file as it was given.
    #[serde(serialize_with = "serialize_name")]
    pub file: Arc<str>,
    /// Line, from 1; 0 if the rules were not text.
    pub line: u32,
    /// Column in characters, from 1; 0 if the rules were not text.
    pub column: u32,
    /// Path in the document, such as `descriptors[2].rate_limit.unit`; empty for the document itself.
    pub path: String,
    /// Error message.
    pub message: String,
    /// Suggested fix, if one is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

fn serialize_name<S: Serializer>(name: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(name)
}

/// Writes `file:line:column: message, hint`; a warning says so before its message.
///
/// Without a position, as in rules that were not text, it writes `name: message (path), hint`.
impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let warning = if self.severity == Severity::Warning { "warning: " } else { "" };
        match (self.line, self.path.as_str()) {
            (0, "") => write!(f, "{}: {warning}{}", self.file, self.message)?,
            (0, path) => write!(f, "{}: {warning}{} ({path})", self.file, self.message)?,
            (line, _) => write!(f, "{}:{line}:{}: {warning}{}", self.file, self.column, self.message)?,
        }
        match &self.hint {
            Some(hint) => write!(f, ", {hint}"),
            None => Ok(()),
        }
    }
}

impl Diagnostic {
    /// A problem with a fix, at a location in a rule file.
    pub(crate) fn at_location(
        severity: Severity,
        location: &SourceLocation,
        message: String,
        hint: impl Into<String>,
    ) -> Self {
        let SourceLocation { file, line, column } = location.clone();
        Self { severity, file, line, column, path: String::new(), message, hint: Some(hint.into()) }
    }

    /// Returns the line of `text` with a caret below the column, for terminals; empty if `text` has no such line.
    ///
    /// ```text
    ///    4 |     rate_limit: {unit: hours, requests_per_unit: 3}
    ///      |                        ^
    /// ```
    pub fn format_excerpt(&self, text: &str) -> String {
        format_excerpt(text, self.line, self.column)
    }
}

/// Returns a line of `text` with a caret below the column, both from 1; empty if `text` has no such line.
pub fn format_excerpt(text: &str, line_number: u32, column: u32) -> String {
    let index = usize::try_from(line_number).map_or(0, |line| line.saturating_sub(1));
    let Some(line) = text.lines().nth(index) else { return String::new() };
    let column = usize::try_from(column).map_or(0, |column| column.saturating_sub(1));
    // A long line is cut before the column, so that the caret is visible.
    let skipped = if column < MAX_EXCERPT_CHARS - 20 { 0 } else { column - 40 };
    let shown = line
        .chars()
        .skip(skipped)
        .take(MAX_EXCERPT_CHARS)
        .map(|c| if c == '\t' { ' ' } else { replace_unprintable_char(c) });
    let shown: String = shown.collect();
    let caret = " ".repeat(column - skipped);
    format!("{:>5} | {}\n      | {caret}^\n", line_number, shown.trim_end())
}

/// All diagnostics of one check, in the order of their positions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diagnostics {
    errors: Vec<Diagnostic>,
    warnings: Vec<Diagnostic>,
    more_errors: u64,
    more_warnings: u64,
    acknowledged: u64,
    /// Number of errors about files whose expressions take too much work.
    costly: u64,
}

impl Diagnostics {
    /// Adds a diagnostic; beyond [`MAX_KEPT_PER_SEVERITY`] of its severity it is only counted.
    pub fn push(&mut self, diagnostic: Diagnostic) {
        let (kept, more) = match diagnostic.severity {
            Severity::Error => (&mut self.errors, &mut self.more_errors),
            Severity::Warning => (&mut self.warnings, &mut self.more_warnings),
        };
        if kept.len() < MAX_KEPT_PER_SEVERITY {
            kept.push(diagnostic);
        } else {
            *more += 1;
        }
    }

    /// Adds an error about a file whose expressions take too much work.
    pub(crate) fn push_costly(&mut self, error: Diagnostic) {
        self.costly += 1;
        self.push(error);
    }

    /// Returns `true` if the only errors are about files whose expressions take too much work, and all of them were
    /// kept.
    pub(crate) fn are_only_about_costly_files(&self) -> bool {
        self.costly > 0 && self.costly == self.errors.len() as u64 && self.more_errors == 0
    }

    /// Returns `true` if the rules cannot be used.
    pub fn has_errors(&self) -> bool {
        !self.errors.is_empty()
    }

    /// Number of errors, including those that were not kept.
    pub fn error_count(&self) -> u64 {
        self.more_errors.saturating_add(self.errors.len() as u64)
    }

    /// Number of warnings, including those that were not kept.
    pub fn warning_count(&self) -> u64 {
        self.more_warnings.saturating_add(self.warnings.len() as u64)
    }

    /// Returns `true` if there are no diagnostics.
    pub fn is_empty(&self) -> bool {
        self.errors.is_empty() && self.warnings.is_empty()
    }

    /// Errors that were kept.
    pub fn errors(&self) -> &[Diagnostic] {
        &self.errors
    }

    /// Warnings that were kept.
    pub fn warnings(&self) -> &[Diagnostic] {
        &self.warnings
    }

    /// Number of warnings that their files acknowledge; they are not among the others.
    pub const fn acknowledged_count(&self) -> u64 {
        self.acknowledged
    }

    /// Removes the warnings of `file` in these lines. Those beyond the bound stay counted.
    pub(crate) fn remove_acknowledged(&mut self, file: &str, lines: &AcknowledgedLines) {
        let before = self.warnings.len();
        self.warnings.retain(|warning| &*warning.file != file || !lines.contains_line(warning.line));
        self.acknowledged = self.acknowledged.saturating_add((before - self.warnings.len()) as u64);
    }

    /// Numbers of errors and of warnings that were not kept.
    pub fn dropped_counts(&self) -> (u64, u64) {
        (self.more_errors, self.more_warnings)
    }

    /// Appends all diagnostics of `other`.
    pub fn append(&mut self, other: Self) {
        self.more_errors = self.more_errors.saturating_add(other.more_errors);
        self.more_warnings = self.more_warnings.saturating_add(other.more_warnings);
        self.acknowledged = self.acknowledged.saturating_add(other.acknowledged);
        self.costly = self.costly.saturating_add(other.costly);
        other.errors.into_iter().chain(other.warnings).for_each(|found| self.push(found));
    }

    /// Sorts diagnostics by file, in the order of `files`, then by position.
    pub(crate) fn sort(&mut self, files: &[Arc<str>]) {
        let index = |file: &Arc<str>| files.iter().position(|other| other == file);
        for kept in [&mut self.errors, &mut self.warnings] {
            kept.sort_by_cached_key(|found| (index(&found.file), found.line, found.column));
        }
    }
}

/// Writes one line for each diagnostic, errors first, then the numbers of those not kept.
impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for found in self.errors.iter().chain(&self.warnings) {
            write!(f, "{separator}{found}")?;
            separator = "\n";
        }
        for (count, what) in [(self.more_errors, "errors"), (self.more_warnings, "warnings")] {
            if count > 0 {
                write!(f, "{separator}and {count} more {what}")?;
                separator = "\n";
            }
        }
        Ok(())
    }
}

impl std::error::Error for Diagnostics {}

/// Makes `text` fit for a message: printable, and at most 200 characters of it.
pub(crate) fn escape_for_message(text: &str) -> String {
    truncate_and_escape(text, 200)
}

/// Returns the name that `written` was probably meant to be, if one is similar enough.
pub(crate) fn find_similar_name<'n>(written: &str, names: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    /// Bounded, because a comparison takes time proportional to both lengths.
    const MAX_COMPARED_BYTES: usize = 100;
    names
        .filter(|name| name.len().max(written.len()) <= MAX_COMPARED_BYTES)
        .map(|name| (strsim::normalized_damerau_levenshtein(written, name), name))
        .filter(|(likeness, _)| *likeness >= 0.6)
        .max_by(|one, other| one.0.total_cmp(&other.0).then(other.1.cmp(one.1)))
        .map(|(_, name)| name)
}

/// Beginning of a comment that acknowledges warnings, after the `#` and spaces.
const ACKNOWLEDGING_COMMENT: &str = "check: ok";

/// Lines of a text whose warnings are acknowledged, from 1.
#[derive(Clone, Debug, Default)]
pub struct AcknowledgedLines {
    lines: HashSet<u32>,
}

impl AcknowledgedLines {
    /// Finds the lines of a text whose warnings its comments acknowledge.
    pub fn from_text(text: &str) -> Self {
        let mut lines = HashSet::new();
        // Most files have none.
        if !text.contains(ACKNOWLEDGING_COMMENT) {
            return Self { lines };
        }
        let mut is_for_next = false;
        for (number, line) in (1..).zip(text.lines()) {
            let is_marked = line.match_indices('#').any(|(at, _)| is_acknowledging_comment(line, at));
            let content = line.trim_start();
            if content.is_empty() || content.starts_with('#') {
                is_for_next |= is_marked;
                continue;
            }
            if is_marked || is_for_next {
                lines.insert(number);
            }
            is_for_next = false;
        }
        Self { lines }
    }

    /// Returns `true` if no line is acknowledged.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Returns `true` if the warnings of a line are acknowledged.
    pub fn contains_line(&self, line: u32) -> bool {
        self.lines.contains(&line)
    }
}

/// Returns `true` if the `#` at this place begins a comment that acknowledges warnings.
fn is_acknowledging_comment(line: &str, at: usize) -> bool {
    let is_comment = line[..at].chars().next_back().is_none_or(char::is_whitespace);
    let Some(rest) = line[at + 1..].trim_start().strip_prefix(ACKNOWLEDGING_COMMENT) else { return false };
    is_comment && rest.chars().next().is_none_or(|next| !next.is_alphanumeric())
}

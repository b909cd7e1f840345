//! What is wrong with a rule file, where, and what to do about it.
//!
//! A `Diagnostic` is a value: found once, shown by whoever asked. `Display` is one line for logs,
//! `Diagnostic::excerpt` the offending line with a caret for people, `Serialize` an object for CI.
//!
//! `Diagnostics` is bounded: a file of a million mistakes costs a thousand and a count. Errors and warnings have
//! bounds of their own, so that no flood of warnings hides an error. What was quoted from a file was made printable
//! first.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use serde::{Serialize, Serializer};

/// The most errors, and the most warnings, that are kept; the rest is counted.
pub const MAX_KEPT: usize = 1000;

/// The most characters of an offending line that an excerpt shows.
const EXCERPT_CHARS: usize = 120;

/// Whether the rules can be used in spite of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// They can not.
    Error,
    /// They can, but probably do not do what was meant.
    Warning,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Diagnostic {
    /// Whether the rules can be used in spite of it.
    pub severity: Severity,
    /// The file's name as it was given.
    #[serde(serialize_with = "as_text")]
    pub file: Arc<str>,
    /// From 1.
    pub line: u32,
    /// From 1, in characters.
    pub column: u32,
    /// The place in the document, such as `descriptors[2].rate_limit.unit`; empty for the document itself.
    pub path: String,
    /// What is wrong.
    pub message: String,
    /// How to put it right, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

fn as_text<S: Serializer>(name: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(name)
}

/// Writes `file:line:column: message, hint`; a warning says so before its message.
impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let warning = if self.severity == Severity::Warning { "warning: " } else { "" };
        write!(f, "{}:{}:{}: {warning}{}", self.file, self.line, self.column, self.message)?;
        match &self.hint {
            Some(hint) => write!(f, ", {hint}"),
            None => Ok(()),
        }
    }
}

impl Diagnostic {
    /// The offending line of `text` with a caret below the column, for terminals; empty if `text` has no such line.
    ///
    /// ```text
    ///    4 |     rate_limit: {unit: hours, requests_per_unit: 3}
    ///      |                        ^
    /// ```
    pub fn excerpt(&self, text: &str) -> String {
        let index = usize::try_from(self.line).map_or(0, |line| line.saturating_sub(1));
        let Some(line) = text.lines().nth(index) else { return String::new() };
        let column = usize::try_from(self.column).map_or(0, |column| column.saturating_sub(1));
        // A long line is shown from a little before the column, so that the caret is always in sight.
        let skipped = if column < EXCERPT_CHARS - 20 { 0 } else { column - 40 };
        let shown: String = line.chars().skip(skipped).take(EXCERPT_CHARS).map(printable).collect();
        let caret = " ".repeat(column - skipped);
        format!("{:>5} | {}\n      | {caret}^\n", self.line, shown.trim_end())
    }
}

/// A character that moves no cursor and rings no bell.
fn printable(character: char) -> char {
    if character == '\t' {
        ' '
    } else if character.is_control() {
        char::REPLACEMENT_CHARACTER
    } else {
        character
    }
}

/// All findings of one check, in the order of their places.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diagnostics {
    errors: Vec<Diagnostic>,
    warnings: Vec<Diagnostic>,
    more_errors: u64,
    more_warnings: u64,
}

impl Diagnostics {
    /// Adds a finding; past [`MAX_KEPT`] of its severity it is only counted.
    pub fn push(&mut self, diagnostic: Diagnostic) {
        let (kept, more) = match diagnostic.severity {
            Severity::Error => (&mut self.errors, &mut self.more_errors),
            Severity::Warning => (&mut self.warnings, &mut self.more_warnings),
        };
        if kept.len() < MAX_KEPT {
            kept.push(diagnostic);
        } else {
            *more += 1;
        }
    }

    /// Whether the rules can not be used.
    pub fn has_errors(&self) -> bool {
        !self.errors.is_empty()
    }

    /// How many errors were found, those that were not kept included.
    pub fn error_count(&self) -> u64 {
        self.more_errors.saturating_add(self.errors.len() as u64)
    }

    /// How many warnings were found, those that were not kept included.
    pub fn warning_count(&self) -> u64 {
        self.more_warnings.saturating_add(self.warnings.len() as u64)
    }

    /// Whether nothing was found.
    pub fn is_empty(&self) -> bool {
        self.errors.is_empty() && self.warnings.is_empty()
    }

    /// The errors that were kept.
    pub fn errors(&self) -> &[Diagnostic] {
        &self.errors
    }

    /// The warnings that were kept.
    pub fn warnings(&self) -> &[Diagnostic] {
        &self.warnings
    }

    /// How many errors and warnings were found beyond those kept.
    pub fn more(&self) -> (u64, u64) {
        (self.more_errors, self.more_warnings)
    }

    /// Adds all of `other` behind what is here.
    pub fn append(&mut self, other: Self) {
        self.more_errors = self.more_errors.saturating_add(other.more_errors);
        self.more_warnings = self.more_warnings.saturating_add(other.more_warnings);
        other.errors.into_iter().chain(other.warnings).for_each(|found| self.push(found));
    }

    /// Puts the findings in the order of their lines; those of one file stay together, files in order of appearance.
    pub(crate) fn sort(&mut self, files: &[Arc<str>]) {
        let place = |file: &Arc<str>| files.iter().position(|other| other == file);
        for kept in [&mut self.errors, &mut self.warnings] {
            kept.sort_by_cached_key(|found| (place(&found.file), found.line, found.column));
        }
    }
}

/// One line each, errors first, then what was left out.
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

/// `text` as messages quote it: control characters escaped, and no more than 200 characters of it.
pub(crate) fn quotable(text: &str) -> String {
    const MOST: usize = 200;
    let mut quoted = String::with_capacity(text.len().min(MOST));
    for (index, character) in text.chars().enumerate() {
        if index == MOST {
            quoted.push_str("...");
            break;
        }
        if character.is_control() {
            // Writing to a string does not fail.
            let _ = write!(quoted, "{}", character.escape_default());
        } else {
            quoted.push(character);
        }
    }
    quoted
}

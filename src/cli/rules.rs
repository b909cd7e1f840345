//! Rule files for the commands: read as `serve` reads them, and every problem kept.
//!
//! A file that can not be read is a problem like any other, at line 1, and hides no problem of another file. The
//! settings that change what rules mean come from the environment; one that `serve` would refuse is set aside, so that
//! rules can be checked on a machine that is set up otherwise.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::print::complain;
use crate::config::compile::options::CompileOptions;
use crate::config::compile::{Compiled, RuleText, compile};
use crate::config::diagnostic::{Diagnostic, Diagnostics, Severity};
use crate::config::files::read::read;
use crate::config::files::{MAX_FILE_BYTES, PathError, PathProblem, ReadFailure, RuleFile, RuleLocation};
use crate::config::yaml::{Documents, text};
use crate::report::text::plain;
use crate::rule::set::RuleSet;
use crate::settings::Settings;

/// What was found in rule files.
pub(super) struct Rules {
    /// The files that could be read.
    pub(super) sources: Vec<RuleText>,
    /// All problems.
    pub(super) found: Diagnostics,
    /// The rules, unless there are errors.
    pub(super) set: Option<RuleSet>,
}

/// Stands for standard input where a path is meant.
const STDIN: &str = "-";

impl Rules {
    /// Reads and compiles files, directories and `-`.
    pub(super) fn read(paths: &[PathBuf], options: &CompileOptions) -> Self {
        let mut found = Diagnostics::default();
        let mut sources = Vec::new();
        let (stdin, paths): (Vec<_>, Vec<_>) = paths.iter().cloned().partition(|path| path == Path::new(STDIN));
        if !paths.is_empty() {
            let read = read(&RuleLocation::Paths(paths)).unwrap_or_else(|ReadFailure { errors, readable }| {
                errors.iter().for_each(|error| found.push(at_line_1(error, Severity::Error)));
                readable
            });
            read.warnings.iter().for_each(|warning| found.push(at_line_1(warning, Severity::Warning)));
            let source = |file: RuleFile| RuleText { name: file.name, bytes: file.bytes, documents: Documents::All };
            sources.extend(read.files.into_iter().map(source));
        }
        if !stdin.is_empty() {
            let mut text = Vec::new();
            // One byte too many makes the compiler say that it is too large.
            if let Err(error) = io::stdin().lock().take(MAX_FILE_BYTES + 1).read_to_end(&mut text) {
                let problem = PathProblem::Unreadable(error.to_string());
                found.push(at_line_1(&PathError { path: STDIN.into(), problem }, Severity::Error));
            }
            sources.push(RuleText { name: STDIN.into(), bytes: text, documents: Documents::All });
        }
        Self::compile(sources, options, found)
    }

    /// Compiles files that were read; `found` says what is wrong with others.
    pub(super) fn compile(sources: Vec<RuleText>, options: &CompileOptions, mut found: Diagnostics) -> Self {
        let set = match compile(&sources, options) {
            Ok(Compiled { domains, warnings }) => {
                found.append(warnings);
                (!found.has_errors()).then(|| RuleSet::new(domains))
            }
            Err(problems) => {
                found.append(problems);
                None
            }
        };
        Self { sources, found, set }
    }

    /// Every finding with its line, errors first.
    pub(super) fn text(&self) -> String {
        let texts: Vec<(&Arc<str>, _)> =
            self.sources.iter().filter_map(|file| Some((&file.name, text::decode(&file.bytes).ok()?))).collect();
        let mut page = String::new();
        for diagnostic in self.found.errors().iter().chain(self.found.warnings()) {
            page += &plain(&diagnostic.to_string());
            page.push('\n');
            if let Some((_, text)) = texts.iter().find(|(name, _)| **name == diagnostic.file) {
                page += &diagnostic.excerpt(text);
            }
        }
        let (errors, warnings) = self.found.more();
        for (more, what) in [(errors, "errors"), (warnings, "warnings")] {
            if more > 0 {
                page += &format!("and {more} more {what}\n");
            }
        }
        page
    }
}

/// What can not be read, as a finding.
fn at_line_1(error: &PathError, severity: Severity) -> Diagnostic {
    Diagnostic {
        severity,
        file: error.path.to_string_lossy().into(),
        line: 1,
        column: 1,
        path: String::new(),
        message: error.problem.to_string(),
        hint: Some(error.problem.fix().to_owned()),
    }
}

/// The settings of the environment, or the defaults if it has some that `serve` refuses, which is said.
pub(super) fn settings() -> Settings {
    if let Ok((settings, _)) = Settings::from_env(std::env::vars_os()) {
        return settings;
    }
    complain("the environment has settings that stop a start, so the defaults hold here; see `tollkeeper check --env`");
    Settings::from_env(std::iter::empty()).map(|(settings, _)| settings).expect("an empty environment is valid")
}

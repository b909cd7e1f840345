//! The file of `TOLLKEEPER_RULE_DEFAULTS`: read, watched, and its state for pages and metrics.
//!
//! A file that cannot be used changes nothing: the last usable one stays. At the start there is none, and the built-in
//! defaults apply, because without a rate limit service Envoy would admit everything.
//!
//! Decides: what a bad file of `TOLLKEEPER_RULE_DEFAULTS` does, and when it is read again.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use serde::Serialize;

use super::diagnostic::{Diagnostics, Severity};
use super::files::read::read_rule_files;
use super::files::watch::{FileSetReceiver, FileWatcher, WatchReloader, WatchTiming};
use super::files::{PathError, PathProblem, RuleFileSetResult, RuleFilesLocation};
use super::rule_defaults::RuleDefaults;
use crate::base::clock::Time;
use crate::base::sharded::lock_ignoring_poison;
use crate::rules::rule::set::RuleSet;
use crate::rules::rule::{RuleAllowance, RuleLimit};
use crate::settings::problem::UnusableSetting;
use crate::settings::rules::TOLLKEEPER_RULE_DEFAULTS;
use crate::settings::setting::AnySetting as _;

/// Maximum number of findings, and of domains, in a report.
const MAX_REPORTED_FINDINGS: usize = 20;

/// The watched file.
#[derive(Debug)]
pub struct DefaultsWatch {
    watcher: FileWatcher,
    changes: FileSetReceiver,
}

/// Defaults that were read, or all problems of their file; with warnings.
pub type DefaultsReadResult = Result<(RuleDefaults, Diagnostics), Diagnostics>;

impl DefaultsWatch {
    /// Reads the file and starts to watch it. Blocks on disk I/O.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(path: &Path, timing: WatchTiming) -> io::Result<(Self, RuleFileSetResult)> {
        let location = RuleFilesLocation::Paths(vec![path.to_owned()]);
        let first = read_rule_files(&location);
        let (watcher, changes) = FileWatcher::start(location, timing, &first)?;
        Ok((Self { watcher, changes }, first))
    }

    /// Returns the changed file, or its errors; `None` after the watcher has ended. Cancel safe.
    pub async fn next_change(&mut self) -> Option<RuleFileSetResult> {
        self.changes.next_set().await
    }

    /// Handle that requests the file again.
    pub fn reloader(&self) -> WatchReloader {
        self.watcher.reloader()
    }
}

/// Reads the file once. Blocks on disk I/O.
pub fn read_defaults(path: &Path) -> DefaultsReadResult {
    parse_defaults(path, read_rule_files(&RuleFilesLocation::Paths(vec![path.to_owned()])))
}

/// Parses what was read at `path`.
pub fn parse_defaults(path: &Path, result: RuleFileSetResult) -> DefaultsReadResult {
    let failed = |errors: &[PathError]| {
        let mut problems = Diagnostics::default();
        errors.iter().for_each(|error| problems.push(error.to_diagnostic(Severity::Error)));
        problems
    };
    let set = result.map_err(|failure| failed(&failure.errors))?;
    match set.files.as_slice() {
        [file] if file.path == path => RuleDefaults::parse_file(&file.name, &file.bytes),
        _ => {
            let problem = PathProblem::NotAFile("a directory");
            Err(failed(&[PathError { path: path.to_owned(), problem }]))
        }
    }
}

/// Returns the first problem of the file, if the file cannot be used. Blocks on disk I/O.
pub fn find_unusable_file(path: &Path) -> Option<UnusableSetting> {
    let problems = read_defaults(path).err()?;
    let what = problems.errors().first().map(ToString::to_string).unwrap_or_default();
    Some(UnusableSetting { setting: TOLLKEEPER_RULE_DEFAULTS.name(), shown: path.display().to_string(), what })
}

/// State of the file.
#[derive(Debug)]
pub struct DefaultsStatus {
    path: PathBuf,
    state: Mutex<DefaultsState>,
}

#[derive(Debug, Default)]
struct DefaultsState {
    defaults: Arc<RuleDefaults>,
    warnings: Vec<String>,
    loaded_at: Option<Time>,
    last_error: Option<String>,
    refused: u64,
    without_effect: DefaultsWithoutEffect,
}

/// Defaults that have no effect on the loaded rules.
#[derive(Clone, Debug, Default)]
struct DefaultsWithoutEffect {
    left_out: u64,
    first_left_out: Vec<String>,
    domains_without_rules: Vec<String>,
}

/// Copy of the state: `rule_defaults` of `/rlconfig/status`.
#[derive(Clone, Debug, Serialize)]
pub struct DefaultsReport {
    /// Path of the file.
    pub path: String,
    /// Time when the defaults that apply were loaded, RFC 3339 in UTC; `null`: the built-in ones apply.
    pub loaded_at: Option<String>,
    /// Problems of the file, if it cannot be used now.
    pub last_error: Option<String>,
    /// Number of contents of the file that could not be used.
    pub refused: u64,
    /// Number of defaults that were left out of a limit.
    pub left_out: u64,
    /// Warnings about the file, and the first defaults that were left out.
    pub findings: Vec<String>,
    /// Domains in the file that have no rules; the first of them.
    pub domains_without_rules: Vec<String>,
}

impl DefaultsStatus {
    /// State before the file was read.
    pub fn new(path: PathBuf) -> Self {
        Self { path, state: Mutex::default() }
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Defaults that apply.
    pub fn defaults(&self) -> Arc<RuleDefaults> {
        Arc::clone(&self.lock_state().defaults)
    }

    /// Returns `true` once the file could be used.
    pub fn is_loaded(&self) -> bool {
        self.lock_state().loaded_at.is_some()
    }

    /// Records defaults that apply from now on, with the warnings about their file.
    pub fn record_accepted(&self, defaults: Arc<RuleDefaults>, warnings: &Diagnostics, now: Time) {
        let mut state = self.lock_state();
        state.defaults = defaults;
        state.warnings = warnings.warnings().iter().take(MAX_REPORTED_FINDINGS).map(ToString::to_string).collect();
        state.loaded_at = Some(now);
        state.last_error = None;
    }

    /// Records a file that cannot be used.
    pub fn record_refused(&self, error: String) {
        let mut state = self.lock_state();
        state.last_error = Some(error);
        state.refused += 1;
    }

    /// Records which of the defaults have no effect on these rules.
    pub fn record_defaults_without_effect(&self, rules: &RuleSet, defaults: &RuleDefaults) {
        let recorded = DefaultsWithoutEffect::find_defaults_without_effect(rules, defaults);
        self.lock_state().without_effect = recorded;
    }

    /// Returns a copy.
    pub fn snapshot(&self) -> DefaultsReport {
        let state = self.lock_state();
        let DefaultsWithoutEffect { left_out, first_left_out, domains_without_rules } = state.without_effect.clone();
        DefaultsReport {
            path: self.path.to_string_lossy().into_owned(),
            loaded_at: state.loaded_at.map(|at| at.to_string()),
            last_error: state.last_error.clone(),
            refused: state.refused,
            left_out,
            findings: state.warnings.iter().cloned().chain(first_left_out).collect(),
            domains_without_rules,
        }
    }

    fn lock_state(&self) -> MutexGuard<'_, DefaultsState> {
        lock_ignoring_poison(&self.state)
    }
}

impl DefaultsWithoutEffect {
    fn find_defaults_without_effect(rules: &RuleSet, defaults: &RuleDefaults) -> Self {
        let mut found = Self::default();
        for rule in rules.rules().map(|compiled| &compiled.rule) {
            let RuleAllowance::Limits(limits) = &rule.allowance else { continue };
            for RuleLimit { left_out_defaults, .. } in limits {
                found.left_out += left_out_defaults.len() as u64;
                let room = MAX_REPORTED_FINDINGS.saturating_sub(found.first_left_out.len());
                let texts = left_out_defaults.iter().take(room).map(|text| format!("{}: {text}", rule.path));
                found.first_left_out.extend(texts);
            }
        }
        let without_rules = defaults.domain_names().into_iter().filter(|name| rules.domain(name).is_none());
        found.domains_without_rules = without_rules.take(MAX_REPORTED_FINDINGS).map(str::to_owned).collect();
        found
    }
}

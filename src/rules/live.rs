//! The loaded rules, and the outcome of the last attempt to replace them.
//!
//! A reload replaces all rules or none. A decision loads the rules once and keeps them until it is made, so no decision
//! sees half a change. Loading them takes no lock.
//!
//! Decides: whether a load changed the rules (`have_same_texts`); how many loads are remembered.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use arc_swap::{ArcSwapOption, Guard};
use serde::Serialize;

use super::compile::RuleText;
use super::compile::options::CompileOptions;
use super::defaults_file::{DefaultsReport, DefaultsStatus};
use super::load_progress::LoadProgress;
use super::table_loader::TableReport;
use super::xds::status::{StreamReport, StreamStatus};
use crate::base::clock::Time;
use crate::base::sharded::lock_ignoring_poison;
use crate::rules::rule::changes::{LimitList, RuleChanges};
use crate::rules::rule::set::RuleSet;

/// Rules that decide, replaced as a whole.
#[derive(Debug, Default)]
pub struct LiveRules {
    current: ArcSwapOption<LoadedRules>,
    attempt: Mutex<LastLoadAttempt>,
    stream: OnceLock<Arc<StreamStatus>>,
    defaults: OnceLock<Arc<DefaultsStatus>>,
    tables: Mutex<Vec<TableReport>>,
    marks: Mutex<VecDeque<LoadRecord>>,
    progress: Arc<LoadProgress>,
}

/// Maximum number of attempts to load rules that are kept.
const MAX_LOAD_RECORDS: usize = 100;

/// Record of an attempt to load rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LoadRecord {
    /// Time, in seconds since the Unix epoch.
    pub at_s: u64,
    /// Number of the loaded set; `null` if the attempt failed.
    pub version: Option<u64>,
    /// False if the rules and the defaults were the same before.
    #[serde(skip)]
    pub changed: bool,
}

/// A set of rules that was loaded.
#[derive(Debug)]
pub struct LoadedRules {
    /// The rules.
    pub rules: RuleSet,
    /// Number of the set in this process, from 1.
    pub version: u64,
    /// Time of loading.
    pub loaded_at: Time,
    /// Names of the texts of the set, and the version that its source gives it.
    pub from: RuleSetOrigin,
    /// Limits that the load changed; `None` for the first.
    pub changes: Option<RuleChanges>,
}

/// What a loaded set was compiled from.
#[derive(Clone, Debug, Default)]
pub struct RuleSetOrigin {
    /// Names of the rule texts.
    pub names: Vec<Arc<str>>,
    /// Version that the source gives the set, if it has versions.
    pub version: Option<Arc<str>>,
    /// Texts of the rules; empty if they came from a control plane.
    pub texts: Arc<[RuleText]>,
    /// Options with which they were compiled.
    pub options: CompileOptions,
}

/// The last attempt to load rules.
#[derive(Clone, Debug, Default)]
struct LastLoadAttempt {
    at: Option<Time>,
    error: Option<String>,
    problems: Vec<RuleProblem>,
    refused: u64,
}

/// An error in a rule file, with the lines around it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RuleProblem {
    /// Position, message and fix.
    pub message: String,
    /// Name of the file.
    pub file: Arc<str>,
    /// Line, from 1; 0 if the rules were not text.
    pub line: u32,
    /// Lines of the file around it.
    pub lines: Vec<NumberedLine>,
}

/// A line of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NumberedLine {
    /// Number, from 1.
    pub number: u32,
    /// Text, cut if it is long.
    pub text: String,
}

/// Body of `/rlconfig/status`.
#[derive(Clone, Debug, Serialize)]
pub struct LoadStatus {
    /// Number of the loaded set in this process; 0 before the first.
    pub version: u64,
    /// Time of loading, RFC 3339 in UTC.
    pub loaded_at: Option<String>,
    /// Identity of the loaded set, as in the decision log: a hash of its texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<Arc<str>>,
    /// Limits that the load changed; absent for the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes: Option<RuleChanges>,
    /// Names of the rule texts.
    pub sources: Vec<Arc<str>>,
    /// Version that the source gives the set; absent if it has no versions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_version: Option<Arc<str>>,
    /// Number of domains.
    pub domains: usize,
    /// Number of rules.
    pub rules: usize,
    /// Time of the last attempt to load rules.
    pub last_attempt_at: Option<String>,
    /// Errors of the last attempt, if it failed.
    pub last_error: Option<String>,
    /// Number of failed attempts since the start.
    pub refused: u64,
    /// What a load that is slow compiles, and for how long; absent if none is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loading: Option<String>,
    /// Stream from the control plane; absent if rules come from files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub xds: Option<StreamReport>,
    /// File of `TOLLKEEPER_RULE_DEFAULTS`; absent without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule_defaults: Option<DefaultsReport>,
    /// Tables that choose plans; absent without any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<TableReport>,
}

impl LiveRules {
    /// Sets the state of the xDS stream that rules come from, once.
    pub fn set_xds_status(&self, status: Arc<StreamStatus>) {
        // A process has one source of rules.
        let _ = self.stream.set(status);
    }

    /// Sets the state of the file of `TOLLKEEPER_RULE_DEFAULTS`, once.
    pub fn set_defaults_status(&self, status: Arc<DefaultsStatus>) {
        // A process has one such file.
        let _ = self.defaults.set(status);
    }

    /// Progress of the load that runs.
    pub const fn progress(&self) -> &Arc<LoadProgress> {
        &self.progress
    }

    /// Sets the state of the tables after a load. Counts are read when they are shown.
    pub fn set_table_reports(&self, reports: Vec<TableReport>) {
        *lock_ignoring_poison(&self.tables) = reports;
    }

    /// Returns the state of the tables, with the counts of now.
    fn table_reports(&self) -> Vec<TableReport> {
        let mut reports = lock_ignoring_poison(&self.tables).clone();
        if let Some(loaded) = self.current.load().as_ref() {
            for report in &mut reports {
                let tables = loaded.rules.domain(&report.domain).map_or(&[][..], |domain| &domain.tables);
                if let Some(table) = tables.iter().find(|table| table.name == report.name) {
                    report.update_counts(&table.stats);
                }
            }
        }
        reports
    }

    /// Returns the version at the source; `None` if it has no versions.
    ///
    /// A control plane may give the same rules a new version.
    pub fn source_version(&self) -> Option<Arc<str>> {
        let accepted = self.stream.get().and_then(|stream| stream.snapshot().applied_version());
        let loaded = || self.current.load().as_ref().and_then(|loaded| loaded.from.version.clone());
        accepted.map(Arc::from).or_else(loaded)
    }

    /// Returns the loaded rules, if any.
    pub fn current_rules(&self) -> Guard<Option<Arc<LoadedRules>>> {
        self.current.load()
    }

    /// Returns the loaded rules for a decision that waits.
    pub fn current_rules_owned(&self) -> Option<Arc<LoadedRules>> {
        self.current.load_full()
    }

    /// Replaces the rules, and waits up to 1 s until no decision uses the old ones. Returns the number of the new set.
    pub fn replace_rules(&self, rules: RuleSet, from: RuleSetOrigin, now: Time) -> u64 {
        let (version, old) = self.swap_rules(rules, from, now);
        if let Some(old) = old {
            await_sole_owner(&old);
        }
        version
    }

    /// Replaces the rules. Returns the number of the new set, and the old one.
    pub fn swap_rules(&self, rules: RuleSet, from: RuleSetOrigin, now: Time) -> (u64, Option<Arc<LoadedRules>>) {
        let last = self.current.load_full();
        let changes = last.as_ref().map(|last| match have_same_texts(&last.rules, &rules) {
            true => RuleChanges::default(),
            false => RuleChanges::between(&LimitList::of_rules(&last.rules), &LimitList::of_rules(&rules)),
        });
        let mut attempt = self.lock_attempt();
        let version = last.as_ref().map_or(0, |last| last.version) + 1;
        let changed = !last.as_ref().is_some_and(|last| have_same_texts(&last.rules, &rules));
        drop(last);
        let old = self.current.swap(Some(Arc::new(LoadedRules { rules, version, loaded_at: now, from, changes })));
        *attempt = LastLoadAttempt { at: Some(now), error: None, problems: Vec::new(), refused: attempt.refused };
        drop(attempt);
        self.add_load_record(now, Some(version), changed);
        (version, old)
    }

    /// Records a failed attempt; the loaded rules stay.
    pub fn record_failed_load(&self, error: String, problems: Vec<RuleProblem>, now: Time) {
        let mut attempt = self.lock_attempt();
        *attempt = LastLoadAttempt { at: Some(now), error: Some(error), problems, refused: attempt.refused + 1 };
        drop(attempt);
        self.add_load_record(now, None, false);
    }

    /// Returns the last attempts to load rules, the oldest first.
    pub fn load_history(&self) -> Vec<LoadRecord> {
        lock_ignoring_poison(&self.marks).iter().copied().collect()
    }

    fn add_load_record(&self, now: Time, version: Option<u64>, changed: bool) {
        let mut marks = lock_ignoring_poison(&self.marks);
        if marks.len() >= MAX_LOAD_RECORDS {
            marks.pop_front();
        }
        marks.push_back(LoadRecord { at_s: now.as_micros() / 1_000_000, version, changed });
    }

    /// Returns the errors of the last attempt that have a position, the first of them.
    pub fn last_problems(&self) -> Vec<RuleProblem> {
        self.lock_attempt().problems.clone()
    }

    /// Returns the loaded set and the outcome of the last attempt.
    pub fn status(&self) -> LoadStatus {
        let attempt = self.lock_attempt().clone();
        let loaded = self.current.load();
        let loaded = loaded.as_ref();
        let from = loaded.map(|loaded| loaded.from.clone()).unwrap_or_default();
        LoadStatus {
            version: loaded.map_or(0, |loaded| loaded.version),
            loaded_at: loaded.map(|loaded| loaded.loaded_at.to_string()),
            id: loaded.map(|loaded| Arc::from(&*loaded.rules.id)).filter(|id: &Arc<str>| !id.is_empty()),
            changes: loaded.and_then(|loaded| loaded.changes.clone()),
            sources: from.names,
            source_version: self.source_version(),
            domains: loaded.map_or(0, |loaded| loaded.rules.domain_count()),
            rules: loaded.map_or(0, |loaded| loaded.rules.rule_count()),
            last_attempt_at: attempt.at.map(|at| at.to_string()),
            last_error: attempt.error,
            refused: attempt.refused,
            loading: self.progress.describe_slow_load(),
            xds: self.stream.get().map(|stream| stream.snapshot()),
            rule_defaults: self.defaults.get().map(|defaults| defaults.snapshot()),
            tables: self.table_reports(),
        }
    }

    fn lock_attempt(&self) -> MutexGuard<'_, LastLoadAttempt> {
        lock_ignoring_poison(&self.attempt)
    }
}

/// True if both sets come from the same texts, sets in files and defaults; false if that is not known.
fn have_same_texts(last: &RuleSet, next: &RuleSet) -> bool {
    !next.contents_hash.is_empty() && last.contents_hash == next.contents_hash
}

/// Waits up to 1 s until no decision holds an old set, so that it is dropped on the reload thread.
///
/// Dropping a set takes time for every rule in it, which must not delay a decision. A decision holds a set for
/// microseconds.
fn await_sole_owner(old: &Arc<LoadedRules>) {
    const MAX_WAIT: Duration = Duration::from_secs(1);
    let started = Instant::now();
    while Arc::strong_count(old) > 1 && started.elapsed() < MAX_WAIT {
        thread::sleep(Duration::from_millis(1));
    }
}

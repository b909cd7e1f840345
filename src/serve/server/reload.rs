//! Applies rules: at the start, and whenever their source delivers an update.
//!
//! Rules are compiled on a thread of their own, so a large set delays no decision. A set with errors is rejected as a
//! whole, with every problem in the log, and the last good set stays. The outcome is reported to the source. With
//! `TOLLKEEPER_RULE_DEFAULTS` the accepted rules are kept, and compiled again when that file changes.
//!
//! Decides: that a bad load keeps the old rules, and an empty one (`keep_rules_if_empty`).
//! Decides: whether a start waits for rules, or for a control plane (no).
//! Decides: how many problems a load logs (`MAX_LOGGED_PROBLEMS`).

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use tokio::sync::oneshot;

use super::table_changes::TableFollowers;
use crate::base::clock::Clock;
use crate::base::sharded::lock_ignoring_poison;
use crate::base::threads;
use crate::decide::log::DecisionLog;
use crate::decide::log::header::{self, RuleSetRecord};
use crate::rules::compile::CompiledRules;
use crate::rules::compile::options::CompileOptions;
use crate::rules::defaults_file::{self, DefaultsStatus, DefaultsWatch};
use crate::rules::diagnostic::{Diagnostic, Diagnostics};
use crate::rules::files::walk::FileStamps;
use crate::rules::files::watch::{FileSetReceiver, FileWatcher, WatchReloader, WatchTiming};
use crate::rules::files::{RuleFileSetResult, RuleFilesLocation};
use crate::rules::live::{LiveRules, RuleProblem, RuleSetOrigin};
use crate::rules::rule::set::RuleSet;
use crate::rules::rule_defaults::RuleDefaults;
use crate::rules::source::{
    CompileFailure, CompiledSnapshot, RuleSource, RuleUpdate, SourceConfig, SourceReloader, SourceRules,
};
use crate::rules::table_loader::{RuleFilePaths, TableLoader};
use crate::rules::xds::refused_domains::{AppliedUpdate, UpdateResult};
use crate::serve::grpc::health::GrpcHealth;
use crate::telemetry::logs::LIFECYCLE_TARGET;
use crate::telemetry::service_metrics::ServiceMetrics;

/// Compiles updates and replaces the rules.
#[derive(Clone, Debug)]
pub(super) struct RuleApplier {
    pub(super) rules: Arc<LiveRules>,
    pub(super) options: CompileOptions,
    pub(super) clock: Clock,
    pub(super) metrics: Arc<ServiceMetrics>,
    pub(super) log: Option<Arc<DecisionLog>>,
    /// State of the file of defaults, if there is one.
    pub(super) defaults: Option<Arc<DefaultsStatus>>,
    /// Warnings of the last set, which are not logged again, and its rules.
    pub(super) last: Arc<Mutex<LastAcceptedUpdate>>,
    /// Tables of the rules.
    pub(super) tables: Arc<Mutex<TableLoader>>,
}

/// Rules and warnings of the last accepted update.
#[derive(Debug, Default)]
pub(super) struct LastAcceptedUpdate {
    /// Its rules, if there is a file of defaults.
    accepted: Option<AcceptedRules>,
    /// Its warnings.
    warnings: HashSet<String>,
}

/// Rules that were accepted, as their source delivered them.
#[derive(Clone, Debug)]
struct AcceptedRules {
    rules: SourceRules,
    /// Version at the source.
    version: Option<Arc<str>>,
    /// Paths of the files.
    paths: Arc<RuleFilePaths>,
}

/// Compiled rules that are about to replace the current ones, with where they come from.
struct RuleSetReplacement {
    compiled: CompiledRules,
    from: RuleSetOrigin,
    /// The rules as the decision log records them; their id comes from here.
    recorded: RuleSetRecord,
    /// Paths of its files.
    paths: Arc<RuleFilePaths>,
}

/// Applies the updates of a running source of rules, and changes of the file of defaults.
#[derive(Debug)]
pub(super) struct RuleUpdater {
    applier: RuleApplier,
    source: RuleSource,
    defaults: Option<DefaultsWatch>,
    timing: WatchTiming,
    tables: Option<TableWatch>,
    /// Followers of tables in Redis; `None` if counters are elsewhere.
    followers: Option<TableFollowers>,
}

/// Watch of the files of tables.
#[derive(Debug)]
struct TableWatch {
    /// Ends with it.
    _watcher: FileWatcher,
    changes: FileSetReceiver<FileStamps>,
    paths: Vec<PathBuf>,
}

/// Handle that makes the source read the rules, and the file of defaults, again (SIGHUP).
#[derive(Clone, Debug)]
pub(super) struct ReloadTrigger {
    source: SourceReloader,
    defaults: Option<WatchReloader>,
}

/// Result of applying a file of defaults; the error is the text of all problems.
type ApplyResult = Result<(), String>;

/// Maximum number of problems of one set that are logged.
const MAX_LOGGED_PROBLEMS: usize = 20;

impl RuleUpdater {
    /// Reads the defaults, starts the source and applies the update that it has at once, if any.
    ///
    /// # Errors
    /// The source or the watcher of the defaults cannot be started.
    pub(super) fn start(
        mut applier: RuleApplier,
        config: SourceConfig,
        timing: WatchTiming,
        followers: Option<TableFollowers>,
    ) -> io::Result<Self> {
        applier.options.progress = Arc::clone(applier.rules.progress());
        let mut watch = None;
        if let Some(status) = &applier.defaults {
            applier.rules.set_defaults_status(Arc::clone(status));
            let (started, first) = DefaultsWatch::start(status.path(), timing.clone())?;
            // A file that cannot be used is logged; the built-in defaults apply.
            let _ = applier.apply_defaults_file(status, first);
            watch = Some(started);
        }
        let (mut source, first) = RuleSource::start(config)?;
        if let Some(status) = source.xds_stream_status() {
            applier.rules.set_xds_status(Arc::clone(status));
        }
        if let Some(update) = first {
            source.report_result(&applier.apply_update(update));
        }
        let mut updates = Self { applier, source, defaults: watch, timing, tables: None, followers };
        updates.watch_tables();
        Ok(updates)
    }

    /// Handle that requests the rules again.
    pub(super) fn reload_trigger(&self) -> ReloadTrigger {
        let defaults = self.defaults.as_ref().map(DefaultsWatch::reloader);
        ReloadTrigger { source: self.source.reloader(), defaults }
    }

    /// Applies updates until the source ends.
    pub(super) async fn apply_updates(mut self, health: GrpcHealth) {
        loop {
            tokio::select! {
                update = self.source.next_update() => {
                    let Some(update) = update else { return };
                    let newer = self.apply_update(update, Overtaking::Possible).await;
                    if let Some(newer) = newer {
                        self.apply_update(newer, Overtaking::Impossible).await;
                    }
                    self.watch_tables();
                }
                Some(_) = next_table_change(&mut self.tables) => {
                    let applier = self.applier.clone();
                    if let Err(failure) = applier.run_on_low_priority_thread(RuleApplier::apply_changed_tables).await {
                        tracing::error!("the tables stay as they are: {failure}");
                    }
                }
                Some(changed) = wait_for_defaults_file_change(&mut self.defaults) => {
                    self.applier.apply_changed_defaults_file(changed).await;
                }
            }
            health.send_changed_status();
        }
    }
}

/// Whether newer files end a load. Of two loads one comes to its end, however often files change.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Overtaking {
    Possible,
    Impossible,
}

impl RuleUpdater {
    /// Applies an update on a thread of its own. Returns the update that overtook it, if one did.
    async fn apply_update(&mut self, update: RuleUpdate, overtaking: Overtaking) -> Option<RuleUpdate> {
        let applier = self.applier.clone();
        let mut load = pin!(applier.run_on_low_priority_thread(move |applier| applier.apply_update(update)));
        // A control plane sends nothing before it has the result.
        let mut listens = overtaking == Overtaking::Possible && matches!(self.source, RuleSource::Files(_));
        let mut newer = None;
        let result = loop {
            tokio::select! {
                result = &mut load => break result,
                update = self.source.next_update(), if listens => {
                    listens = false;
                    if update.is_some() {
                        self.applier.rules.progress().supersede();
                    }
                    newer = update;
                }
            }
        };
        let result = result.unwrap_or_else(|failure| Err(self.applier.record_rejection(&[failure])));
        self.source.report_result(&result);
        newer
    }

    /// Watches the files of the tables that the rules have now, and follows those in Redis.
    fn watch_tables(&mut self) {
        let tables = lock_ignoring_poison(&self.applier.tables);
        if let Some(followers) = &mut self.followers {
            followers.follow_only(tables.row_caches());
        }
        let stamps = tables.stamps();
        drop(tables);
        let paths: Vec<PathBuf> = stamps.0.iter().map(|(path, _)| path.clone()).collect();
        if self.tables.as_ref().is_some_and(|watch| watch.paths == paths) {
            return;
        }
        self.tables = None;
        if paths.is_empty() {
            return;
        }
        let location = RuleFilesLocation::Paths(paths.clone());
        match FileWatcher::start_comparing_stamps(location, self.timing.clone(), &stamps) {
            Ok((watcher, changes)) => self.tables = Some(TableWatch { _watcher: watcher, changes, paths }),
            Err(error) => tracing::error!(%error, "tables are not watched: no thread can be started (send SIGHUP)"),
        }
    }
}

/// Waits for a change of the file of a table; for ever without tables. Cancel safe.
async fn next_table_change(tables: &mut Option<TableWatch>) -> Option<FileStamps> {
    match tables {
        Some(tables) => tables.changes.next_set().await,
        None => std::future::pending().await,
    }
}

/// Returns the next change of the file of defaults; waits for ever without one. Cancel safe.
async fn wait_for_defaults_file_change(defaults: &mut Option<DefaultsWatch>) -> Option<RuleFileSetResult> {
    match defaults {
        Some(defaults) => defaults.next_change().await,
        None => std::future::pending().await,
    }
}

impl ReloadTrigger {
    /// Requests an update even if nothing changed.
    pub(super) fn request_reload(&self) {
        if let Some(defaults) = &self.defaults {
            defaults.reload();
        }
        // A source that sends each change by itself only says so.
        if self.defaults.is_none() || !matches!(self.source, SourceReloader::Pushed) {
            self.source.request_reload();
        }
    }
}

impl RuleApplier {
    /// Runs `work` on a thread of its own, with low priority.
    ///
    /// # Errors
    /// The thread cannot be started, or it panicked.
    async fn run_on_low_priority_thread<R: Send + 'static>(
        self,
        work: impl FnOnce(&Self) -> R + Send + 'static,
    ) -> Result<R, String> {
        let (done, finished) = oneshot::channel();
        let apply = move || {
            threads::lower_thread_priority();
            let _ = done.send(work(&self));
        };
        match thread::Builder::new().name("rules".to_owned()).spawn(apply) {
            Ok(_) => finished.await.map_err(|_| "loading the rules panicked".to_owned()),
            Err(error) => Err(format!("cannot start a thread to load the rules: {error}")),
        }
    }

    /// Applies a changed file of defaults, or keeps the last one.
    async fn apply_changed_defaults_file(&self, changed: RuleFileSetResult) {
        let Some(status) = self.defaults.clone() else { return };
        let applied = Arc::clone(&status);
        let result = self
            .clone()
            .run_on_low_priority_thread(move |applier| applier.apply_defaults_file(&applied, changed))
            .await;
        if let Err(failure) = result {
            record_refused_defaults_file(&status, &[failure]);
        }
    }

    /// Reads the file of defaults and compiles the rules again with it.
    ///
    /// # Errors
    /// The file cannot be used; it was logged, and nothing changed.
    fn apply_defaults_file(&self, status: &DefaultsStatus, changed: RuleFileSetResult) -> ApplyResult {
        let texts = |problems: &Diagnostics| problems.errors().iter().map(ToString::to_string).collect::<Vec<_>>();
        let (defaults, warnings) = defaults_file::parse_defaults(status.path(), changed)
            .map_err(|problems| record_refused_defaults_file(status, &texts(&problems)))?;
        let defaults = Arc::new(defaults);
        let accepted = self.lock_last_accepted().accepted.clone();
        if let Some(AcceptedRules { rules, version, paths }) = accepted {
            let options = CompileOptions { rule_defaults: Arc::clone(&defaults), ..self.options.clone() };
            let recorded = header::build_rule_set_record(&rules, version.as_deref(), &defaults);
            let from = RuleSetOrigin {
                names: rules.source_names(),
                version,
                texts: rules.copy_texts(),
                options: options.clone(),
            };
            // Defaults make no rule invalid, so this does not fail.
            let compiled =
                rules.compile(&options).map_err(|found| record_refused_defaults_file(status, &texts(&found)))?;
            self.replace_rules(RuleSetReplacement { compiled, from, recorded, paths }, &defaults)
                .map_err(|found| record_refused_defaults_file(status, &texts(&found)))?;
        }
        for warning in warnings.warnings().iter().take(MAX_LOGGED_PROBLEMS) {
            tracing::warn!("TOLLKEEPER_RULE_DEFAULTS: {warning}");
        }
        tracing::info!(target: LIFECYCLE_TARGET, path = %status.path().display(), "defaults of rules loaded");
        status.record_accepted(defaults, &warnings, self.clock.now());
        Ok(())
    }

    /// Compiles an update and replaces the rules, or rejects it with all its errors.
    fn apply_update(&self, update: RuleUpdate) -> UpdateResult {
        self.rules.progress().begin();
        let result = self.compile_and_replace_rules(update);
        self.rules.progress().end();
        result
    }

    fn compile_and_replace_rules(&self, update: RuleUpdate) -> UpdateResult {
        let snapshot = update.map_err(|errors| self.record_rejection(&errors))?;
        if snapshot.rules.is_empty() && snapshot.keep_rules_if_empty && self.has_rules() {
            return Err(self.record_rejection(&snapshot.warnings));
        }
        snapshot.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        let defaults = self.defaults.as_ref().map(|status| status.defaults()).unwrap_or_default();
        let paths = Arc::clone(&snapshot.paths);
        let options = CompileOptions { rule_defaults: Arc::clone(&defaults), ..self.options.clone() };
        let version = snapshot.version.clone();
        let previous =
            self.rules.current_rules_owned().map(|loaded| Arc::clone(&loaded.from.texts)).unwrap_or_default();
        let CompiledSnapshot { compiled, rules, refused, problems } = snapshot
            .compile_with_error_lines(&previous, &options)
            .map_err(|CompileFailure { diagnostics, problems }| {
                if options.progress.is_superseded() {
                    tracing::info!("a load of rules ended early: the files have changed again");
                    return String::new();
                }
                let texts: Vec<_> = diagnostics.errors().iter().map(ToString::to_string).collect();
                self.record_rejection_with_file_lines(&texts, problems)
            })?;
        let recorded = header::build_rule_set_record(&rules, version.as_deref(), &defaults);
        let (names, texts) = (rules.source_names(), rules.copy_texts());
        let from = RuleSetOrigin { names, version: version.clone(), texts, options };
        let replacement = RuleSetReplacement { compiled, from, recorded, paths: Arc::clone(&paths) };
        self.replace_rules(replacement, &defaults).map_err(|found| {
            let texts: Vec<_> = found.errors().iter().map(ToString::to_string).collect();
            self.record_rejection_with_file_lines(&texts, found.errors().iter().map(to_rule_problem).collect())
        })?;
        if !refused.is_empty() {
            let errors: Vec<_> = refused.iter().flat_map(|domain| domain.error.lines().map(str::to_owned)).collect();
            self.record_rejection_with_file_lines(&errors, problems);
        }
        let resources = match &rules {
            SourceRules::Resources(resources) => resources.clone(),
            SourceRules::Texts(_) => Vec::new(),
        };
        self.lock_last_accepted().accepted = self.defaults.is_some().then_some(AcceptedRules { rules, version, paths });
        Ok(AppliedUpdate { resources, refused })
    }

    /// Replaces the rules. Logs warnings that the last set did not have.
    ///
    /// # Errors
    /// Problems of a table; nothing changed.
    fn replace_rules(&self, set: RuleSetReplacement, defaults: &RuleDefaults) -> Result<(), Diagnostics> {
        let RuleSetReplacement { compiled, from, recorded, paths } = set;
        let mut tables = lock_ignoring_poison(&self.tables);
        let prepared = tables.prepare_tables(&compiled.domains, &paths, self.clock.now())?;
        log_problems_of_kept_tables(&prepared.kept);
        let warnings = compiled.warnings.warnings().iter().take(MAX_LOGGED_PROBLEMS).map(ToString::to_string);
        let warnings: Vec<String> = warnings.collect();
        let known = std::mem::replace(&mut self.lock_last_accepted().warnings, warnings.iter().cloned().collect());
        warnings.iter().filter(|warning| !known.contains(*warning)).for_each(|warning| tracing::warn!("{warning}"));
        let mut rules = RuleSet::from_domains(compiled.domains, &self.metrics.limits);
        tables.attach_to_rules(prepared, &mut rules);
        let reports = tables.table_reports();
        drop(tables);
        rules.id = recorded.id.as_str().into();
        rules.contents_hash = header::hash_documents_without_names(&recorded.documents).into();
        if let Some(log) = &self.log {
            log.write_header(Some(recorded));
        }
        if let Some(status) = &self.defaults {
            status.record_defaults_without_effect(&rules, defaults);
        }
        let version = self.rules.replace_rules(rules, from, self.clock.now());
        self.rules.set_table_reports(reports);
        let status = self.rules.status();
        let (domains, rules, id) = (status.domains, status.rules, status.id.unwrap_or_default());
        let changes = status.changes.map(|changes| changes.to_string()).unwrap_or_default();
        // The line of the start has the first rules.
        match version {
            1 => tracing::info!(version, domains, rules, %id, "rules loaded"),
            _ => tracing::info!(target: LIFECYCLE_TARGET, version, domains, rules, %id, %changes, "rules loaded"),
        }
        Ok(())
    }

    /// Reads tables whose files have changed, and replaces their rows.
    ///
    /// # Errors
    /// The problems, which were logged; the last good rows stay.
    fn apply_changed_tables(&self) -> ApplyResult {
        let Some(loaded) = self.rules.current_rules_owned() else { return Ok(()) };
        let mut tables = lock_ignoring_poison(&self.tables);
        let result = tables.reload_changed_files(&loaded.rules, self.clock.now());
        self.rules.set_table_reports(tables.table_reports());
        match result {
            Ok(replaced) => {
                for (domain, table, rows) in replaced {
                    tracing::info!(target: LIFECYCLE_TARGET, domain, table = &*table, rows, "table loaded");
                }
                Ok(())
            }
            Err(problems) => {
                log_problems_of_kept_tables(&problems);
                Err(problems.to_string())
            }
        }
    }

    fn lock_last_accepted(&self) -> MutexGuard<'_, LastAcceptedUpdate> {
        lock_ignoring_poison(&self.last)
    }

    fn has_rules(&self) -> bool {
        self.rules.current_rules().as_ref().is_some_and(|loaded| loaded.rules.domain_count() > 0)
    }

    /// Logs and records why a set, or some domains of it, were rejected. Returns the text of the problems.
    fn record_rejection(&self, problems: &[String]) -> String {
        self.record_rejection_with_file_lines(problems, Vec::new())
    }

    /// Rejects a set, with the lines of its files.
    fn record_rejection_with_file_lines(&self, problems: &[String], in_files: Vec<RuleProblem>) -> String {
        for problem in problems.iter().take(MAX_LOGGED_PROBLEMS) {
            tracing::error!("Error loading new configuration: {problem}");
        }
        if let Some(more) = problems.len().checked_sub(MAX_LOGGED_PROBLEMS).filter(|more| *more > 0) {
            tracing::error!("Error loading new configuration: {more} more problems; `tollkeeper check` lists them all");
        }
        let error = problems.join("\n");
        self.rules.record_failed_load(error.clone(), in_files, self.clock.now());
        error
    }
}

/// Logs problems of tables whose last good rows stay.
fn log_problems_of_kept_tables(problems: &Diagnostics) {
    for problem in problems.errors().iter().take(MAX_LOGGED_PROBLEMS) {
        tracing::error!("a table cannot be used, its last good rows stay: {problem}");
    }
    if let Some(more) = problems.error_count().checked_sub(MAX_LOGGED_PROBLEMS as u64).filter(|more| *more > 0) {
        tracing::error!("a table cannot be used: {more} more problems; `tollkeeper check` lists them");
    }
}

/// A problem of a table, without the lines around it.
fn to_rule_problem(problem: &Diagnostic) -> RuleProblem {
    RuleProblem { message: problem.to_string(), file: Arc::clone(&problem.file), line: problem.line, lines: Vec::new() }
}

/// Logs and records why a file of defaults cannot be used. Returns the problems as an error.
fn record_refused_defaults_file(status: &DefaultsStatus, problems: &[String]) -> String {
    let kept = if status.is_loaded() { "the last usable defaults stay" } else { "the built-in defaults apply" };
    for problem in problems.iter().take(MAX_LOGGED_PROBLEMS) {
        tracing::error!("TOLLKEEPER_RULE_DEFAULTS cannot be used, {kept}: {problem}");
    }
    let error = problems.join("\n");
    status.record_refused(error.clone());
    error
}

//! Loads the files of tables, and gives their rows to the rule set that decides.
//!
//! A file is read only when its stamp has changed, whether the rules or the file itself are reloaded. The last good
//! rows of a file stay while it has errors. Rules are refused if a table of theirs was never good, or names a plan that
//! they lack. All this happens on the thread that applies rules.
//!
//! Decides: when a table is read again; which rows stay after an error; unknown plans, tables in Redis without Redis.
//! Decides: bad lines of a table in `/rlconfig/status`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::diagnostic::{Diagnostic, Diagnostics, Severity, escape_for_message, find_similar_name};
use super::files::PathProblem;
use super::files::read::resolve_directory_of;
use super::files::walk::{FileStamp, FileStamps};
use super::plan_table::PlanTable;
use super::plan_table::live::{BoundTable, LiveTable, TableStats};
use super::plan_table::row_cache::RowCache;
use super::rule::set::RuleSet;
use super::rule::{Domain, SourceLocation, TableDeclaration, TableSource};
use super::table_file::{TableWithStamp, read_table};
use crate::base::clock::Time;
use crate::settings::redis::TableLookupSettings;

/// Maximum number of problems of one table in a report.
const MAX_REPORTED_PROBLEMS_PER_TABLE: usize = 20;

/// Paths of rule files by their names in messages; a name without one is its path.
pub type RuleFilePaths = HashMap<Arc<str>, PathBuf>;

/// Table whose rows were replaced: its domain, its name and the number of rows.
pub type ReplacedTable = (String, Arc<str>, u64);

/// Tables of the rules, with the files that were read.
#[derive(Debug, Default)]
pub struct TableLoader {
    files: HashMap<PathBuf, TableFile>,
    uses: Vec<TableInUse>,
    stats: HashMap<(String, Arc<str>), Arc<TableStats>>,
    /// Files of tables by their names, in place of those that rules name.
    replaced_files: HashMap<String, PathBuf>,
    /// Known rows of tables in Redis.
    caches: Vec<Arc<RowCache>>,
    redis: RedisTableSupport,
    lookup: TableLookupSettings,
}

/// Whether tables can be in Redis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RedisTableSupport {
    /// They can, or it does not matter: a tool reads none.
    #[default]
    Accepted,
    /// They cannot: counters are not in Redis.
    Refused,
}

/// Time of a load, and the counts of the table.
struct LoadOfTable<'s> {
    now: Time,
    stats: &'s TableStats,
}

/// A file that rules name.
#[derive(Debug, Default)]
struct TableFile {
    /// Directory that it must be in or below, without links; anywhere if a command names the file.
    within: Option<PathBuf>,
    /// The last good rows.
    table: Option<Arc<PlanTable>>,
    /// Stamp of what was read last, good or not.
    stamp: Option<FileStamp>,
    /// Problems of what was read last; none if it was good.
    problems: Diagnostics,
    loaded_at: Option<Time>,
}

/// A table of the rules that decide.
#[derive(Clone, Debug)]
struct TableInUse {
    domain: String,
    index: usize,
    name: Arc<str>,
    /// Path of its file, if its rows are in one.
    path: Option<PathBuf>,
}

/// Rows for the tables of a rule set.
#[derive(Debug, Default)]
pub struct PreparedTables {
    tables: Vec<(TableInUse, PreparedRows, Arc<TableStats>)>,
    /// Problems of files whose last good rows stay.
    pub kept: Diagnostics,
}

/// Rows of one table.
#[derive(Debug)]
enum PreparedRows {
    File(BoundTable),
    Redis(Arc<RowCache>),
}

/// State of a table, for pages.
#[derive(Clone, Debug, Serialize)]
pub struct TableReport {
    /// Domain.
    pub domain: String,
    /// Name of the table.
    pub name: Arc<str>,
    /// Path of its file; `null` for a table in Redis.
    pub file: Option<String>,
    /// Number of rows that decide.
    pub rows: u64,
    /// Memory of these rows, in bytes.
    pub memory_bytes: u64,
    /// Time when these rows were loaded, RFC 3339 in UTC.
    pub loaded_at: Option<String>,
    /// Problems of the file as it is now; `null` if its rows decide.
    pub last_error: Option<String>,
    /// Number of loads that failed.
    pub refused: u64,
    /// Number of decisions by the default plan.
    pub default_decisions: u64,
}

impl TableReport {
    /// Sets the counts to those of now.
    pub fn update_counts(&mut self, stats: &TableStats) {
        self.rows = stats.rows();
        self.memory_bytes = stats.memory_bytes();
        self.loaded_at = stats.loaded_at().map(|at| at.to_string());
        self.refused = stats.failed_loads();
        self.default_decisions = stats.absent_row_decisions();
    }
}

impl TableLoader {
    /// A loader that reads these files for tables of these names, in place of those that rules name.
    pub fn with_replacement_files(replaced_files: HashMap<String, PathBuf>) -> Self {
        Self { replaced_files, ..Self::default() }
    }

    /// A loader that keeps rows of tables in Redis within these bounds.
    pub fn with_lookup_settings(lookup: TableLookupSettings) -> Self {
        Self { lookup, ..Self::default() }
    }

    /// Refuses tables in Redis, because counters are elsewhere.
    #[must_use]
    pub fn refuse_redis_tables(self) -> Self {
        Self { redis: RedisTableSupport::Refused, ..self }
    }

    /// Reads the tables of `domains`, and binds their rows to the plans. Blocks on disk I/O.
    ///
    /// # Errors
    /// Every problem of a file that was never good, and every plan that a table names and its domain lacks.
    pub fn prepare_tables(
        &mut self,
        domains: &[Domain],
        paths: &RuleFilePaths,
        now: Time,
    ) -> Result<PreparedTables, Diagnostics> {
        let mut prepared = PreparedTables::default();
        let mut errors = Diagnostics::default();
        for domain in domains {
            for (index, declared) in domain.tables.iter().enumerate() {
                let stats = self.stats.entry((domain.name.clone(), Arc::clone(&declared.name))).or_default();
                let (stats, name) = (Arc::clone(stats), Arc::clone(&declared.name));
                let mut place = TableInUse { domain: domain.name.clone(), index, name, path: None };
                let replaced = self.replaced_files.get(&*declared.name).cloned();
                let rows = match (&declared.source, replaced) {
                    (TableSource::Redis { table, keep }, None) => {
                        if self.redis == RedisTableSupport::Refused {
                            errors.push(build_redis_table_error(declared));
                        }
                        Ok(PreparedRows::Redis(self.find_or_create_cache(
                            domain,
                            table,
                            keep.unwrap_or(self.lookup.keep),
                        )))
                    }
                    (TableSource::Redis { .. }, Some(path)) => {
                        let rows = self.prepare_file(&path, None, domain, &LoadOfTable { now, stats: &stats });
                        place.path = Some(path);
                        rows
                    }
                    (TableSource::File(file), replaced) => {
                        let rule_file = find_rule_file(declared, paths);
                        let within = replaced.is_none().then(|| resolve_directory_of(rule_file));
                        let beside = || rule_file.parent().unwrap_or(Path::new("")).join(&**file);
                        let path = replaced.unwrap_or_else(beside);
                        let rows = self.prepare_file(&path, within, domain, &LoadOfTable { now, stats: &stats });
                        place.path = Some(path);
                        rows
                    }
                };
                match rows {
                    Ok(rows) => {
                        let file = place.path.as_ref().and_then(|path| self.files.get(path));
                        file.into_iter().for_each(|file| prepared.kept.append(file.problems.clone()));
                        prepared.tables.push((place, rows, stats));
                    }
                    Err(problems) => errors.append(problems),
                }
            }
        }
        if errors.has_errors() { Err(errors) } else { Ok(prepared) }
    }

    /// Reads a file, and binds its rows to the plans of a domain.
    fn prepare_file(
        &mut self,
        path: &Path,
        within: Option<PathBuf>,
        domain: &Domain,
        load: &LoadOfTable<'_>,
    ) -> Result<PreparedRows, Diagnostics> {
        let file = self.files.entry(path.to_owned()).or_default();
        file.within = within;
        file.read_if_changed(path, load.now, load.stats);
        let Some(table) = &file.table else { return Err(file.problems.clone()) };
        bind_to_plans(table, &domain.plans, &domain.name, path).map(PreparedRows::File)
    }

    /// Returns the known rows of a table in Redis; a new cache if the plans of the domain have changed.
    fn find_or_create_cache(&self, domain: &Domain, table: &Arc<str>, keep: Duration) -> Arc<RowCache> {
        let is_same =
            |cache: &&Arc<RowCache>| cache.table == *table && cache.keep == keep && cache.plans == domain.plans;
        let known = self.caches.iter().find(is_same).cloned();
        let new = || RowCache::new(Arc::clone(table), keep, domain.plans.clone(), self.lookup.cache_bytes);
        known.unwrap_or_else(|| Arc::new(new()))
    }

    /// Gives prepared rows to the rule set of the same domains, before it decides.
    pub fn attach_to_rules(&mut self, prepared: PreparedTables, rules: &mut RuleSet) {
        self.uses.clear();
        self.caches.clear();
        for (used, rows, stats) in prepared.tables {
            let name = Arc::clone(&used.name);
            let table = match rows {
                PreparedRows::File(rows) => {
                    let loaded_at = used.path.as_ref().and_then(|path| self.files.get(path)?.loaded_at);
                    loaded_at.into_iter().for_each(|at| stats.record_load(at));
                    let table = LiveTable::new(name, stats);
                    table.replace_rows(rows);
                    table
                }
                PreparedRows::Redis(cache) => {
                    self.caches.push(Arc::clone(&cache));
                    LiveTable::new_in_redis(name, stats, cache)
                }
            };
            if rules.replace_table(&used.domain, used.index, table) {
                self.uses.push(used);
            }
        }
        let uses = &self.uses;
        self.files.retain(|path, _| uses.iter().any(|used| used.path.as_ref() == Some(path)));
    }

    /// Known rows of the tables in Redis.
    pub fn row_caches(&self) -> &[Arc<RowCache>] {
        &self.caches
    }

    /// Reads the files that have changed, and replaces the rows of the tables of `rules`. Blocks on disk I/O.
    ///
    /// # Errors
    /// Every problem; the last good rows of these files stay.
    pub fn reload_changed_files(&mut self, rules: &RuleSet, now: Time) -> Result<Vec<ReplacedTable>, Diagnostics> {
        let mut errors = Diagnostics::default();
        let mut replaced = Vec::new();
        let mut changed: Vec<PathBuf> = Vec::new();
        for used in &self.uses {
            let Some(live) = rules.domain(&used.domain).and_then(|domain| domain.tables.get(used.index)) else {
                continue;
            };
            let Some(path) = &used.path else { continue };
            let Some(file) = self.files.get_mut(path) else { continue };
            if file.read_if_changed(path, now, &live.stats) {
                changed.push(path.clone());
            }
        }
        for path in changed {
            let Some(file) = self.files.get_mut(&path) else { continue };
            let uses = self.uses.iter().filter(|used| used.path.as_ref() == Some(&path));
            let of_domain = |used: &TableInUse| {
                let domain = rules.domain(&used.domain)?;
                Some((domain, domain.tables.get(used.index)?))
            };
            if file.problems.has_errors() {
                errors.append(file.problems.clone());
                continue;
            }
            let Some(table) = file.table.clone() else { continue };
            let mut unknown = Diagnostics::default();
            let mut bound = Vec::new();
            for (domain, live) in uses.filter_map(of_domain) {
                match bind_to_plans(&table, &domain.plans, &domain.name, &path) {
                    Ok(rows) => bound.push((domain, live, rows)),
                    Err(found) => {
                        live.stats.record_failed_load();
                        unknown.append(found);
                    }
                }
            }
            if unknown.has_errors() {
                file.problems = unknown.clone();
                errors.append(unknown);
                continue;
            }
            for (domain, live, rows) in bound {
                live.replace_rows(rows);
                live.stats.record_load(now);
                replaced.push((domain.name.clone(), Arc::clone(&live.name), live.stats.rows()));
            }
        }
        if errors.has_errors() { Err(errors) } else { Ok(replaced) }
    }

    /// Stamps of the files as they were read, for a watcher.
    pub fn stamps(&self) -> FileStamps {
        let stamp = |file: &TableFile| file.stamp.ok_or(PathProblem::Missing);
        let mut stamps: Vec<_> = self.files.iter().map(|(path, file)| (path.clone(), stamp(file))).collect();
        stamps.sort_by(|one, other| one.0.cmp(&other.0));
        FileStamps(stamps)
    }

    /// State of each table.
    pub fn table_reports(&self) -> Vec<TableReport> {
        let report = |used: &TableInUse| {
            let stats = self.stats.get(&(used.domain.clone(), Arc::clone(&used.name))).cloned().unwrap_or_default();
            let problems = used.path.as_ref().and_then(|path| self.files.get(path)).map(|file| &file.problems);
            let problems = problems.into_iter().flat_map(Diagnostics::errors).take(MAX_REPORTED_PROBLEMS_PER_TABLE);
            let problems: Vec<_> = problems.map(ToString::to_string).collect();
            let mut report = TableReport {
                domain: used.domain.clone(),
                name: Arc::clone(&used.name),
                file: used.path.as_ref().map(|path| path.to_string_lossy().into_owned()),
                rows: 0,
                memory_bytes: 0,
                loaded_at: None,
                last_error: (!problems.is_empty()).then(|| problems.join("\n")),
                refused: 0,
                default_decisions: 0,
            };
            report.update_counts(&stats);
            report
        };
        self.uses.iter().map(report).collect()
    }
}

impl TableFile {
    /// Reads the file unless its stamp is that of the last read. Returns true if it was read.
    fn read_if_changed(&mut self, path: &Path, now: Time, stats: &TableStats) -> bool {
        let stamp = std::fs::metadata(path).ok().map(|metadata| FileStamp::from_metadata(&metadata));
        if stamp.is_some() && stamp == self.stamp {
            return false;
        }
        match read_table(path, self.within.as_deref()) {
            Ok(TableWithStamp { table, stamp }) => {
                self.table = Some(table);
                self.stamp = Some(stamp);
                self.problems = Diagnostics::default();
                self.loaded_at = Some(now);
            }
            Err(problems) => {
                self.stamp = stamp;
                self.problems = problems;
                stats.record_failed_load();
            }
        }
        true
    }
}

/// Returns the path of the rule file that declares a table.
fn find_rule_file<'p>(declared: &'p TableDeclaration, paths: &'p RuleFilePaths) -> &'p Path {
    let name = &declared.location.file;
    paths.get(name).map_or_else(|| Path::new(&**name), PathBuf::as_path)
}

fn build_redis_table_error(declared: &TableDeclaration) -> Diagnostic {
    let SourceLocation { file, line, column } = &declared.location;
    Diagnostic {
        severity: Severity::Error,
        file: Arc::clone(file),
        line: *line,
        column: *column,
        path: format!("tables.{}.redis", declared.name),
        message: format!("the table '{}' is in Redis, and the counters are not", declared.name),
        hint: Some("set REDIS_URL, or write the rows into a `file`".to_owned()),
    }
}

/// Binds rows to the plans of a domain, or reports those that it lacks.
fn bind_to_plans(
    table: &Arc<PlanTable>,
    plans: &[Arc<str>],
    domain: &str,
    path: &Path,
) -> Result<BoundTable, Diagnostics> {
    BoundTable::bind(Arc::clone(table), plans).map_err(|unknown| {
        let mut found = Diagnostics::default();
        for plan in unknown {
            let hint = match find_similar_name(&plan.name, plans.iter().map(|known| &**known)) {
                Some(nearest) => format!("did you mean `{nearest}`?"),
                None => "define it under `plans`, or write a limit such as 500/minute".to_owned(),
            };
            found.push(Diagnostic {
                severity: Severity::Error,
                file: path.to_string_lossy().into(),
                line: u32::try_from(plan.line).unwrap_or(u32::MAX),
                column: 1,
                path: String::new(),
                message: format!("unknown plan '{}' of the domain '{}'", plan.name, escape_for_message(domain)),
                hint: Some(hint),
            });
        }
        found
    })
}

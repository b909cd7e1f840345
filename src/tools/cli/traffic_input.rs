//! Common parts of the commands that read recorded traffic: its files and streams, bounds, progress and errors.
//!
//! Decides: how traffic files are read, rotated ones too; the range of `--memory`, the size of `--map`.
//! Decides: hashed values that rules match on.

use std::ffi::OsString;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, fs};

use super::print::{CommandOutcome, ProgressLine};
use super::rule_files::{self, CheckedRules, TableFiles};
use crate::base::text::escape_unprintable;
use crate::rules::diagnostic::Diagnostics;
use crate::rules::rule::set::RuleSet;
use crate::rules::yaml::DocumentSelection;
use crate::settings::Settings;
use crate::settings::decision_log::{RedisStreamSettings, SinkSettings};
use crate::settings::problem::SettingsError;
use crate::settings::redis::deployment::URL_FLAG;
use crate::settings::value::SettingValue as _;
use crate::settings::value::number::ByteSize;
use crate::tools::replay::field_map::FieldMap;
use crate::tools::replay::merge::MergedTraffic;
use crate::tools::replay::source::{SourceOptions, TrafficLocation};

/// Problem of a command, with its outcome.
#[derive(Debug)]
pub(super) struct CommandFailure {
    pub(super) outcome: CommandOutcome,
    pub(super) problem: String,
}

impl CommandFailure {
    pub(super) fn usage_error(problem: String) -> Self {
        Self { outcome: CommandOutcome::UsageError, problem }
    }
}

impl<E: std::error::Error> From<E> for CommandFailure {
    fn from(error: E) -> Self {
        Self { outcome: CommandOutcome::Failure, problem: escape_unprintable(&error.to_string()) }
    }
}

/// Parses `--memory`: bytes of counters, 1 MiB to 1 TiB.
pub(super) fn parse_memory_size(text: &str) -> Result<ByteSize, String> {
    const MEMORY_SIZE_RANGE: &str = "1MiB to 1024GiB";
    ByteSize::parse(text, MEMORY_SIZE_RANGE).map_err(|invalid| format!("{}; {}", invalid.what, invalid.fix))
}

/// Parses `NAME=FILE`.
pub(super) fn parse_table_argument(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, file)) if !name.is_empty() && !file.is_empty() => Ok((name.to_owned(), file.into())),
        _ => Err("write the name of a table and a file, such as customers=new.csv".to_owned()),
    }
}

/// Checks that the rules have the tables whose files are replaced.
pub(super) fn check_table_names(tables: &[(String, PathBuf)], rules: Option<&RuleSet>) -> Result<(), CommandFailure> {
    let Some(rules) = rules else { return Ok(()) };
    let names = || rules.domains().flat_map(|domain| &domain.tables).map(|table| table.name.to_string());
    for (name, _) in tables {
        if !names().any(|known| known == *name) {
            let hint = suggest_similar_paths(names(), name);
            let problem = format!("--table {name}: the rules have no table of this name{hint}");
            return Err(CommandFailure::usage_error(escape_unprintable(&problem)));
        }
    }
    Ok(())
}

/// Compiles the rules of a flag, with these files of tables.
pub(super) fn compile_rules(
    flag: &str,
    paths: &[PathBuf],
    settings: &Settings,
    tables: &TableFiles,
) -> Result<Arc<RuleSet>, CommandFailure> {
    let mut found = Diagnostics::default();
    let options = rule_files::build_compile_options(settings, None, &mut found);
    let rules = CheckedRules::read_and_compile_documents(paths, DocumentSelection::All, &options, found, tables);
    let problem = || format!("the rules of {flag} have errors\n{}", rules.format_problems().trim_end());
    match rules.set {
        Some(set) => Ok(Arc::new(set)),
        None => Err(CommandFailure { outcome: CommandOutcome::Failure, problem: problem() }),
    }
}

/// Reads the mapping of `--map`.
pub(super) fn read_field_map(path: &Path) -> Result<FieldMap, CommandFailure> {
    const MAX_FIELD_MAP_BYTES: u64 = 1 << 20;
    let usage = |problem: String| {
        CommandFailure::usage_error(escape_unprintable(&format!("--map {}: {problem}", path.display())))
    };
    let mut text = String::new();
    let read = fs::File::open(path).and_then(|file| file.take(MAX_FIELD_MAP_BYTES).read_to_string(&mut text));
    read.map_err(|error| usage(error.to_string()))?;
    FieldMap::parse(&text).map_err(usage)
}

/// Lists the paths of all limits of a rule set.
pub(super) fn list_limit_paths(rules: &RuleSet) -> impl Iterator<Item = String> {
    rules.rules().flat_map(|compiled| (0..compiled.limits.len()).map(|index| compiled.rule.limit_path(index)))
}

/// Names the most similar paths, for a message about an unknown one; empty without paths.
pub(super) fn suggest_similar_paths(paths: impl Iterator<Item = String>, wanted: &str) -> String {
    const MAX_SUGGESTIONS: usize = 3;
    /// Likeness from 0 to 1 that a path after the first needs.
    const MIN_LIKENESS: f64 = 0.8;
    let likeness = |path: &str| strsim::jaro_winkler(path, wanted);
    let mut paths: Vec<String> = paths.collect();
    paths.sort_by(|one, two| likeness(two).total_cmp(&likeness(one)).then_with(|| one.cmp(two)));
    paths.dedup();
    let similar = paths.iter().enumerate().filter(|(rank, path)| *rank == 0 || likeness(path) >= MIN_LIKENESS);
    let named: Vec<String> = similar.take(MAX_SUGGESTIONS).map(|(_, path)| format!("'{path}'")).collect();
    if named.is_empty() { String::new() } else { format!(" (did you mean {}?)", named.join(" or ")) }
}

/// Fails if a rule matches on values, which a log with hashed values does not have.
pub(super) fn refuse_rules_on_hashed_values<'r>(
    mut rules: impl Iterator<Item = &'r Arc<RuleSet>>,
) -> Result<(), CommandFailure> {
    match rules.find_map(|rules| rules.first_value_match_location()) {
        None => Ok(()),
        Some(location) => Err(CommandFailure {
            outcome: CommandOutcome::Failure,
            problem: escape_unprintable(&format!(
                "the values of the log are hashed, and {location} matches on a value (record with \
                 TOLLKEEPER_DECISION_LOG_VALUES=plain)"
            )),
        }),
    }
}

/// Opens files and streams of `--traffic`. Adds the bytes that are read to `bytes`.
pub(super) fn open_traffic(
    paths: &[PathBuf],
    sources: &SourceOptions,
    bytes: &Arc<AtomicU64>,
) -> Result<MergedTraffic, CommandFailure> {
    let locations: Vec<TrafficLocation> =
        paths.iter().map(|path| parse_traffic_location(path)).collect::<Result<_, _>>()?;
    Ok(MergedTraffic::open(&locations, sources, bytes)?)
}

/// Returns the location of traffic; a stream is in the Redis of the server's settings.
fn parse_traffic_location(path: &Path) -> Result<TrafficLocation, CommandFailure> {
    match path.to_str().and_then(|text| text.strip_prefix("redis:")) {
        None if path.is_dir() => {
            let path = path.display();
            let problem = format!("--traffic {path}: is a directory (give its files, such as {path}/*)");
            Err(CommandFailure::usage_error(escape_unprintable(&problem)))
        }
        None => Ok(TrafficLocation::File(path.to_owned())),
        Some(key) => match read_stream_settings(key, None) {
            Ok(stream) => Ok(TrafficLocation::Stream(Box::new(stream))),
            Err(problem) => {
                Err(CommandFailure::usage_error(escape_unprintable(&format!("--traffic redis:{key}: {problem}"))))
            }
        },
    }
}

/// Refuses `--report` of earlier versions.
pub(super) fn refuse_report_flag(report: Option<&Path>) -> Result<(), CommandFailure> {
    let problem = "--report was removed: the text shows requests over time as a chart, and --json writes all figures";
    report.map_or(Ok(()), |_| Err(CommandFailure::usage_error(problem.to_owned())))
}

/// Progress of reading files.
pub(super) struct ReadProgress {
    line: ProgressLine,
    /// Size of all files in bytes; `None` for streams, pipes and standard input.
    total: Option<u64>,
    /// Bytes that are read.
    pub(super) bytes: Arc<AtomicU64>,
}

impl ReadProgress {
    pub(super) fn start(paths: &[PathBuf]) -> Self {
        let size = |path: &PathBuf| fs::metadata(path).ok().filter(fs::Metadata::is_file).map(|file| file.len());
        Self { line: ProgressLine::start(), total: paths.iter().map(size).sum(), bytes: Arc::default() }
    }

    /// Shows how much is read.
    pub(super) fn show(&mut self) {
        const BYTES_IN_MB: f64 = 1e6;
        let read = self.bytes.load(Ordering::Relaxed) as f64;
        self.line.show(|| match self.total {
            Some(total) => {
                let percent = read / (total.max(1) as f64) * 100.0;
                format!("read {:.0} MB of {:.0} MB, {percent:.0} %", read / BYTES_IN_MB, total as f64 / BYTES_IN_MB)
            }
            None => format!("read {:.0} MB", read / BYTES_IN_MB),
        });
    }
}

/// Reads the Redis of a stream from the environment, as the server does; `url`, the value of `--url`, takes precedence.
/// Only the variables of that Redis are read, so no other one can prevent it.
///
/// # Errors
/// The variables or the URL have problems, or name no Redis. Problems of a flag name the flag.
pub(super) fn read_stream_settings(key: &str, url: Option<&str>) -> Result<RedisStreamSettings, String> {
    if key.is_empty() || key.contains(',') || key.trim() != key {
        return Err(format!("'{key}' is not the key of a stream: give one without commas, and no blanks around it"));
    }
    let has_own_redis = url.is_some() || env::var_os(STREAM_URL_VARIABLE).is_some_and(|url| !url.is_empty());
    let is_replaced = |name: &OsString| name == STREAM_SINK_VARIABLE || (name == STREAM_URL_VARIABLE && url.is_some());
    let is_used = |name: &OsString| name.to_str().is_some_and(|name| configures_stream_redis(name, has_own_redis));
    let mut vars: Vec<_> = env::vars_os().filter(|(name, _)| is_used(name) && !is_replaced(name)).collect();
    vars.push((STREAM_SINK_VARIABLE.into(), format!("redis:{key}").into()));
    vars.extend(url.map(|url| (STREAM_URL_VARIABLE.into(), url.into())));
    let settings = Settings::from_env(vars.into_iter());
    let (settings, _) = settings.map_err(|error| format_stream_problems(&error, key, url.is_some()))?;
    let mut sinks = settings.decision_log.into_iter().flat_map(|log| log.sinks);
    match sinks.next() {
        Some(SinkSettings::Redis(mut stream)) => {
            if url.is_some() {
                stream.deployment.setting = URL_FLAG;
            }
            Ok(*stream)
        }
        _ => Err(format!("'{key}' is not the key of a stream")),
    }
}

const STREAM_SINK_VARIABLE: &str = "TOLLKEEPER_DECISION_LOG";
const STREAM_URL_VARIABLE: &str = "TOLLKEEPER_DECISION_LOG_REDIS_URL";

/// Returns `true` for the variables from which the Redis of a stream is read: its own one, or that of the counters.
fn configures_stream_redis(name: &str, has_own_redis: bool) -> bool {
    let is_of_any = name.starts_with("REDIS_TLS_") || name == "REDIS_TIMEOUT";
    let is_of_counters = ["REDIS_", "TOLLKEEPER_REDIS_", "MEMCACHE_"].iter().any(|prefix| name.starts_with(prefix));
    let is_of_counters = is_of_counters || name == "BACKEND_TYPE";
    name.starts_with("TOLLKEEPER_DECISION_LOG_REDIS_") || is_of_any || (!has_own_redis && is_of_counters)
}

/// Formats problems of the environment, with the flag instead of a variable that stands for it.
fn format_stream_problems(error: &SettingsError, key: &str, has_url_flag: bool) -> String {
    let problems = error.problems.iter().map(|problem| match problem.name.as_str() {
        STREAM_SINK_VARIABLE => format!("stream '{key}': {}; {}", problem.what, problem.fix),
        STREAM_URL_VARIABLE if has_url_flag => {
            format!("{URL_FLAG}={}: {}; {}", problem.shown, problem.what, problem.fix)
        }
        _ => problem.to_string(),
    });
    problems.collect::<Vec<_>>().join("\n")
}

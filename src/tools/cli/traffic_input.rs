//! Common parts of the commands that read recorded traffic: their arguments, files and streams, progress and errors.
//!
//! Decides: how traffic files are read, rotated ones too; the range of `--memory`, the size of `--map`.
//! Decides: hashed values that rules match on.

use std::ffi::OsString;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::{env, fs};

use super::print::{CommandOutcome, ProgressLine, print_error};
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
use crate::tools::replay::merge::{MAX_TRAFFIC_FILES, MergedTraffic};
use crate::tools::replay::replayer::ReplayOptions;
use crate::tools::replay::source::{SourceOptions, SourceSummary, TrafficEvent, TrafficLocation};

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

/// Arguments of the commands that replay traffic.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub(super) struct TrafficArgs {
    /// Rule files, directories of rule files, or -; without them the recorded rules
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub(super) rules: Vec<PathBuf>,
    /// Use this file for a table of --rules, in place of the one that they name; repeatable
    #[arg(long, value_name = "NAME=FILE", requires = "rules", value_parser = parse_table_argument)]
    table: Vec<(String, PathBuf)>,
    /// Decision logs: files, plain or compressed (gzip), redis:STREAM, or - for standard input
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub(super) traffic: Vec<PathBuf>,
    /// Mapping of the fields of an access log (JSON lines) or of CSV to requests, in YAML
    #[arg(long, value_name = "FILE")]
    pub(super) map: Option<PathBuf>,
    /// Removed
    #[arg(long, value_name = "FILE", hide = true)]
    report: Option<PathBuf>,
    /// Write the results as one JSON object
    #[arg(long)]
    pub(super) json: bool,
    /// Memory of the counters of each replay; `recommend` keeps as much of recorded charges
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_memory_size)]
    memory: ByteSize,
    /// Number of keys that are told apart; `simulate` estimates further ones, `recommend` leaves them out
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) max_keys: u32,
}

/// Settings and rules of a replay.
pub(super) struct ReplaySetup {
    pub(super) settings: Settings,
    /// Rules of `--rules`.
    pub(super) rules: Option<Arc<RuleSet>>,
    pub(super) replay: ReplayOptions,
    pub(super) sources: SourceOptions,
}

impl TrafficArgs {
    /// Checks the combination of flags, and reads settings, rules and mapping. `other_rules` are further paths that the
    /// command reads.
    pub(super) fn prepare(&self, other_rules: &[PathBuf]) -> Result<ReplaySetup, CommandFailure> {
        let reads = [&self.traffic[..], &self.rules, other_rules].into_iter().flatten();
        let problem = match () {
            () if self.report.is_some() => REPORT_REMOVED.to_owned(),
            () if self.traffic.len() > MAX_TRAFFIC_FILES => {
                format!("--traffic has more than {MAX_TRAFFIC_FILES} files (read them in parts)")
            }
            () if reads.filter(|path| *path == Path::new("-")).count() > 1 => {
                "standard input (-) can be read only once".to_owned()
            }
            () if self.map.is_some() && self.rules.is_empty() => {
                "--map needs --rules: such traffic has no rules of its own".to_owned()
            }
            () => return self.read_setup(),
        };
        Err(CommandFailure::usage_error(problem))
    }

    fn read_setup(&self) -> Result<ReplaySetup, CommandFailure> {
        let settings = rule_files::read_settings_or_defaults();
        let map = self.map.as_deref().map(read_field_map).transpose()?;
        let tables: TableFiles = self.table.iter().cloned().collect();
        let rules = compile_rules("--rules", &self.rules, &settings, &tables)?;
        check_table_names(&self.table, rules.as_deref())?;
        let behaviour = Arc::new(settings.decisions.clone());
        let sources = SourceOptions::new(map, settings.decisions.clone());
        let replay = ReplayOptions { memory_bytes: self.memory.0, behaviour };
        Ok(ReplaySetup { settings, rules, replay, sources })
    }

    /// Reads the traffic until `each` returns false, and shows progress.
    pub(super) fn read_traffic(
        &self,
        sources: &SourceOptions,
        mut each: impl FnMut(&TrafficEvent) -> Result<bool, CommandFailure>,
    ) -> Result<TrafficReadStats, CommandFailure> {
        let mut progress = ReadProgress::start(&self.traffic);
        let locations = self.traffic.iter().map(|path| parse_log_location("--traffic", path));
        let locations: Vec<TrafficLocation> = locations.collect::<Result<_, _>>()?;
        let mut traffic = MergedTraffic::open(&locations, sources, &progress.bytes)?;
        let mut events: u64 = 0;
        while let Some(event) = traffic.next_event()? {
            events += 1;
            if events.is_multiple_of(1 << 14) {
                progress.show();
            }
            if !each(event)? {
                break;
            }
        }
        Ok(TrafficReadStats { summary: traffic.summary(), decode_time: traffic.decode_time })
    }
}

/// Traffic that was read.
pub(super) struct TrafficReadStats {
    pub(super) summary: SourceSummary,
    /// CPU time of decoding it.
    pub(super) decode_time: Duration,
}

const REPORT_REMOVED: &str =
    "--report was removed: the text shows requests over time as a chart, and --json writes all figures";

/// Prints a failure of a command, and returns its outcome.
pub(super) fn print_failure(failed: Result<CommandOutcome, CommandFailure>) -> CommandOutcome {
    failed.unwrap_or_else(|CommandFailure { outcome, problem }| {
        print_error(problem);
        outcome
    })
}

/// Parses `--memory`: bytes of counters, 1 MiB to 1 TiB.
fn parse_memory_size(text: &str) -> Result<ByteSize, String> {
    const MEMORY_SIZE_RANGE: &str = "1MiB to 1024GiB";
    ByteSize::parse(text, MEMORY_SIZE_RANGE).map_err(|invalid| format!("{}; {}", invalid.what, invalid.fix))
}

/// Parses `NAME=FILE`.
fn parse_table_argument(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, file)) if !name.is_empty() && !file.is_empty() => Ok((name.to_owned(), file.into())),
        _ => Err("write the name of a table and a file, such as customers=new.csv".to_owned()),
    }
}

/// Checks that the rules have the tables whose files are replaced.
fn check_table_names(tables: &[(String, PathBuf)], rules: Option<&RuleSet>) -> Result<(), CommandFailure> {
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

/// Compiles the rules of a flag, with these files of tables; `None` without paths.
pub(super) fn compile_rules(
    flag: &str,
    paths: &[PathBuf],
    settings: &Settings,
    tables: &TableFiles,
) -> Result<Option<Arc<RuleSet>>, CommandFailure> {
    if paths.is_empty() {
        return Ok(None);
    }
    let mut found = Diagnostics::default();
    let options = rule_files::build_compile_options(settings, None, &mut found);
    let rules = CheckedRules::read_and_compile_documents(paths, DocumentSelection::All, &options, found, tables);
    let problem = || format!("the rules of {flag} have errors\n{}", rules.format_problems().trim_end());
    match rules.set {
        Some(set) => Ok(Some(Arc::new(set))),
        None => Err(CommandFailure { outcome: CommandOutcome::Failure, problem: problem() }),
    }
}

/// Reads the mapping of `--map`.
fn read_field_map(path: &Path) -> Result<FieldMap, CommandFailure> {
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

/// Returns the location of a log that a flag names; a stream is in the Redis of the server's settings.
pub(super) fn parse_log_location(flag: &str, path: &Path) -> Result<TrafficLocation, CommandFailure> {
    match path.to_str().and_then(|text| text.strip_prefix("redis:")) {
        None if path.is_dir() => {
            let path = path.display();
            let problem = format!("{flag} {path}: is a directory (give its files, such as {path}/*)");
            Err(CommandFailure::usage_error(escape_unprintable(&problem)))
        }
        None => Ok(TrafficLocation::File(path.to_owned())),
        Some(key) => match read_stream_settings(key, None) {
            Ok(stream) => Ok(TrafficLocation::Stream(Box::new(stream))),
            Err(problem) => {
                Err(CommandFailure::usage_error(escape_unprintable(&format!("{flag} redis:{key}: {problem}"))))
            }
        },
    }
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

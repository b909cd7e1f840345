//! Common parts of the commands that read recorded traffic: its files and streams, bounds, progress and errors.

use std::ffi::OsString;
use std::io::{self, IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::{env, fs};

use indicatif::{ProgressBar, ProgressStyle};

use super::print::CommandOutcome;
use super::rule_files::{self, CheckedRules};
use crate::base::printable_text::escape_unprintable;
use crate::rules::diagnostic::Diagnostics;
use crate::rules::rule::set::RuleSet;
use crate::settings::Settings;
use crate::settings::decision_log::{SinkSettings, StreamSettings};
use crate::settings::value::SettingValue as _;
use crate::settings::value::number::{ByteSize, ByteSizeRange};
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
    const MEMORY_SIZE_RANGE: ByteSizeRange = ByteSizeRange::new(1 << 20, 1 << 40);
    ByteSize::parse(text, &MEMORY_SIZE_RANGE).map_err(|invalid| format!("{}; {}", invalid.what, invalid.fix))
}

/// Reads and compiles the rule files of a flag; fails if they have errors.
pub(super) fn compile_rules(
    flag: &str,
    paths: &[PathBuf],
    settings: &Settings,
) -> Result<Arc<RuleSet>, CommandFailure> {
    let mut found = Diagnostics::default();
    let options = rule_files::build_compile_options(settings, None, &mut found);
    let rules = CheckedRules::read_and_compile(paths, &options, found);
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

/// Builds the progress bar over the bytes of all files, hidden if standard error is not a terminal.
pub(super) fn build_progress_bar(paths: &[PathBuf]) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let sizes: Option<u64> = paths.iter().map(|path| Some(fs::metadata(path).ok()?.len())).sum();
    let style = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {bytes} of {total_bytes}, {msg}");
    let bar = sizes.map_or_else(ProgressBar::no_length, ProgressBar::new);
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Reads the Redis of a stream from the environment, as the server does; `url` takes precedence.
///
/// # Errors
/// The environment has problems, or names no Redis.
pub(super) fn read_stream_settings(key: &str, url: Option<&str>) -> Result<StreamSettings, String> {
    const SINK_VARIABLE: &str = "TOLLKEEPER_DECISION_LOG";
    const URL_VARIABLE: &str = "TOLLKEEPER_DECISION_LOG_REDIS_URL";
    if key.is_empty() || key.contains(',') || key.trim() != key {
        return Err(format!("'{key}' is not the key of a stream: give one without commas, and no blanks around it"));
    }
    let is_replaced = |name: &OsString| name == SINK_VARIABLE || (name == URL_VARIABLE && url.is_some());
    let mut vars: Vec<(OsString, OsString)> = env::vars_os().filter(|(name, _)| !is_replaced(name)).collect();
    vars.push((SINK_VARIABLE.into(), format!("redis:{key}").into()));
    vars.extend(url.map(|url| (URL_VARIABLE.into(), url.into())));
    let (settings, _) = Settings::from_env(vars.into_iter()).map_err(|error| error.to_string())?;
    let mut sinks = settings.decision_log.into_iter().flat_map(|log| log.sinks);
    match sinks.next() {
        Some(SinkSettings::Redis(stream)) => Ok(*stream),
        _ => Err(format!("'{key}' is not the key of a stream")),
    }
}

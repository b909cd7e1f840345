//! `PROMETHEUS_MAPPER_YAML`: maps statsd names to names and labels in Prometheus.
//!
//! The file has the format of statsd_exporter, which envoyproxy/ratelimit embeds: a list of mappings, of which the
//! first match applies, by glob (`*` is one part between dots) or regular expression; all globs are tried first. These
//! keys are used: `match`, `match_type`, `match_metric_type`, `name`, `labels`, `action: drop`, `scale` and
//! `defaults.match_type`. Keys for buckets and for the lifetime of series are ignored. A regular expression must match
//! the whole name: otherwise `over_limit` would match `over_limit_with_local_cache` too and count it twice.
//!
//! The number of mappings, the size of regular expressions, and the length of names and labels are bounded.
//!
//! Decides: how statsd names map to names and labels of Prometheus.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex};

use regex::{Regex, RegexBuilder};
use serde::Deserialize;

use super::MetricKind;
use crate::base::sharded::lock_ignoring_poison;
use crate::base::text::truncate_and_escape;

/// Mapping of statsd names, read from a file.
#[derive(Debug)]
pub struct Mapper {
    mappings: Vec<Mapping>,
    /// Results for names that were mapped before.
    cache: Mutex<HashMap<String, CachedMappings>>,
}

/// Results for a name as counter, gauge and histogram: `None` until it is mapped, `Some(None)` if the mapping drops the
/// series.
type CachedMappings = [Option<Option<Arc<MappedName>>>; 3];

/// Result of a mapping.
#[derive(Clone, Debug, PartialEq)]
pub struct MappedName {
    /// Name in Prometheus.
    pub name: String,
    /// Labels, ordered by name.
    pub labels: Vec<(String, String)>,
    /// Factor for the value.
    pub scale: f64,
}

#[derive(Debug)]
struct Mapping {
    pattern: Regex,
    is_glob: bool,
    kind: Option<MetricKind>,
    drops: bool,
    name: String,
    labels: Vec<(String, String)>,
    scale: f64,
}

/// Error of a mapping file.
#[derive(Debug, thiserror::Error)]
pub enum MapperError {
    /// The file cannot be read.
    #[error("{0}")]
    Unreadable(#[from] std::io::Error),
    /// The file is not valid YAML, or too large.
    #[error("{0}")]
    Yaml(String),
    /// A mapping is invalid.
    #[error("mapping {number}: {problem}")]
    Mapping {
        /// Number of the mapping, from 1.
        number: usize,
        /// Problem, and the value at fault.
        problem: String,
    },
}

/// Contents of the file. Unknown keys are ignored.
#[derive(Deserialize)]
struct MapperFile {
    #[serde(default)]
    defaults: MapperDefaults,
    #[serde(default)]
    mappings: Vec<MappingEntry>,
}

#[derive(Default, Deserialize)]
struct MapperDefaults {
    match_type: Option<String>,
}

#[derive(Deserialize)]
struct MappingEntry {
    #[serde(rename = "match")]
    pattern: String,
    match_type: Option<String>,
    match_metric_type: Option<String>,
    action: Option<String>,
    name: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    scale: Option<f64>,
}

/// Maximum size of the file in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Maximum number of mappings. Each takes up to some milliseconds to compile and some kilobytes of memory.
const MAX_MAPPINGS: usize = 1000;
/// Maximum size of a compiled regular expression in bytes; usual ones take some hundreds.
const MAX_REGEX_BYTES: usize = 64 << 10;
/// Maximum length of a template for a name or label value in bytes.
const MAX_TEMPLATE_BYTES: usize = 1024;
/// Maximum number of group references in a template; each can expand to a whole name.
const MAX_GROUP_REFERENCES: usize = 16;
/// Maximum number of labels of a mapping.
const MAX_LABELS: usize = 32;

/// Prefixes of names that a mapping must not produce, because other series have them.
const RESERVED_PREFIXES: [&str; 2] = ["tollkeeper_", "process_"];

impl Mapper {
    /// Reads a file.
    ///
    /// # Errors
    /// The file cannot be read, is not valid, or exceeds a bound.
    pub fn read_file(path: &Path) -> Result<Self, MapperError> {
        if std::fs::metadata(path)?.len() > MAX_FILE_BYTES {
            return Err(MapperError::Yaml("larger than 1 MiB".to_owned()));
        }
        Self::parse(&std::fs::read_to_string(path)?)
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// The text is not valid or exceeds a bound.
    pub fn parse(text: &str) -> Result<Self, MapperError> {
        let document: MapperFile =
            serde_saphyr::from_str(text).map_err(|error| MapperError::Yaml(error.to_string().replace('\n', " ")))?;
        if document.mappings.len() > MAX_MAPPINGS {
            return Err(MapperError::Yaml(format!("more than {MAX_MAPPINGS} mappings")));
        }
        let default = document.defaults.match_type.unwrap_or_default();
        let mapping = |(index, entry): (usize, &MappingEntry)| {
            Mapping::new(entry, &default).map_err(|problem| MapperError::Mapping { number: index + 1, problem })
        };
        let mut mappings = document.mappings.iter().enumerate().map(mapping).collect::<Result<Vec<_>, _>>()?;
        // As in statsd_exporter, all globs come before all regular expressions.
        mappings.sort_by_key(|mapping| !mapping.is_glob);
        Ok(Self { mappings, cache: Mutex::default() })
    }

    /// Returns `true` if a mapping is a regular expression.
    pub fn has_regexes(&self) -> bool {
        self.mappings.iter().any(|mapping| !mapping.is_glob)
    }

    /// Maps a name; `None` drops the series. A name without a mapping stays, with invalid characters replaced by `_`.
    pub fn map_name(&self, statsd_name: &str, kind: MetricKind) -> Option<Arc<MappedName>> {
        let mut cache = lock_ignoring_poison(&self.cache);
        if let Some(mapped) = cache.get(statsd_name).and_then(|cached| cached[kind as usize].as_ref()) {
            return mapped.clone();
        }
        let mapped = self.map_uncached_name(statsd_name, kind).map(Arc::new);
        cache.entry(statsd_name.to_owned()).or_default()[kind as usize] = Some(mapped.clone());
        mapped
    }

    /// Clears the cache if it holds many more names than are in use.
    pub fn clear_oversized_cache(&self, used: usize) {
        let mut cache = lock_ignoring_poison(&self.cache);
        if cache.len() > 2 * used + 1000 {
            cache.clear();
        }
    }

    fn map_uncached_name(&self, statsd_name: &str, kind: MetricKind) -> Option<MappedName> {
        let applies = |mapping: &&Mapping| mapping.kind.is_none_or(|only| only == kind);
        let found = self
            .mappings
            .iter()
            .filter(applies)
            .find_map(|mapping| mapping.pattern.captures(statsd_name).map(|captures| (mapping, captures)));
        let Some((mapping, captures)) = found else {
            return Some(MappedName { name: sanitize_prometheus_name(statsd_name), labels: Vec::new(), scale: 1.0 });
        };
        if mapping.drops {
            return None;
        }
        let expand = |text: &str| {
            let mut expanded = String::new();
            captures.expand(text, &mut expanded);
            expanded
        };
        let labels = mapping.labels.iter().map(|(name, value)| (name.clone(), expand(value))).collect();
        Some(MappedName { name: sanitize_prometheus_name(&expand(&mapping.name)), labels, scale: mapping.scale })
    }
}

impl Mapping {
    fn new(entry: &MappingEntry, default_type: &str) -> Result<Self, String> {
        let match_type = entry.match_type.as_deref().unwrap_or(default_type);
        let (pattern, is_glob) = match match_type {
            "" | "glob" => (glob_to_regex(&entry.pattern), true),
            "regex" => (anchor_regex(&entry.pattern)?, false),
            other => return Err(format!("match_type `{other}` is neither glob nor regex")),
        };
        let pattern = compile_regex(&pattern)
            .map_err(|problem| format!("match `{}` {problem}", truncate_and_escape(&entry.pattern, MAX_SHOWN_CHARS)))?;
        let drops = match entry.action.as_deref() {
            None | Some("" | "map") => false,
            Some("drop") => true,
            Some(other) => return Err(format!("action `{other}` is neither map nor drop")),
        };
        let kind = match entry.match_metric_type.as_deref() {
            None | Some("") => None,
            Some("counter") => Some(MetricKind::Counter),
            Some("gauge") => Some(MetricKind::Gauge),
            Some("timer" | "observer") => Some(MetricKind::Histogram),
            Some(other) => return Err(format!("match_metric_type `{other}` is none of counter, gauge and observer")),
        };
        let name = entry.name.clone().unwrap_or_default();
        if name.is_empty() && !drops {
            return Err("name is missing".to_owned());
        }
        entry.check_bounds(&name)?;
        if RESERVED_PREFIXES.iter().any(|start| name.starts_with(start)) {
            return Err(format!("`{name}` is the name of another metric"));
        }
        let is_taken = |label: &str| label.starts_with("__") || label == "le";
        if let Some(label) =
            entry.labels.keys().find(|label| sanitize_prometheus_name(label) != **label || is_taken(label))
        {
            return Err(format!("`{label}` is not a valid label name"));
        }
        let scale = entry.scale.unwrap_or(1.0);
        if !scale.is_finite() {
            return Err("scale is not a number".to_owned());
        }
        let labels = entry.labels.iter().map(|(name, value)| (name.clone(), brace_group_references(value))).collect();
        Ok(Self { pattern, is_glob, kind, drops, name: brace_group_references(&name), labels, scale })
    }
}

impl MappingEntry {
    /// Checks the bounds of labels and templates.
    fn check_bounds(&self, name: &str) -> Result<(), String> {
        if is_template_too_long(name) {
            return Err(format!("name {TEMPLATE_TOO_LONG_PROBLEM}"));
        }
        if self.labels.len() > MAX_LABELS {
            return Err(format!("more than {MAX_LABELS} labels"));
        }
        match self.labels.iter().find(|(label, value)| is_template_too_long(label) || is_template_too_long(value)) {
            Some((label, _)) => {
                Err(format!("label `{}` {TEMPLATE_TOO_LONG_PROBLEM}", truncate_and_escape(label, MAX_SHOWN_CHARS)))
            }
            None => Ok(()),
        }
    }
}

/// Problem of a template that exceeds a bound.
const TEMPLATE_TOO_LONG_PROBLEM: &str = "is too long: 1024 bytes at most, with 16 references to groups";

/// Characters of a pattern or a label that a message shows.
const MAX_SHOWN_CHARS: usize = 80;

fn is_template_too_long(template: &str) -> bool {
    template.len() > MAX_TEMPLATE_BYTES || template.bytes().filter(|byte| *byte == b'$').count() > MAX_GROUP_REFERENCES
}

/// Compiles a regular expression of bounded size; an error is the problem.
fn compile_regex(pattern: &str) -> Result<Regex, String> {
    RegexBuilder::new(pattern).size_limit(MAX_REGEX_BYTES).build().map_err(|error| match error {
        regex::Error::CompiledTooBig(_) => "is a regular expression that is too large".to_owned(),
        _ => "is not a regular expression".to_owned(),
    })
}

/// Anchors a regular expression. It must be valid by itself: `a)|(b` would be valid only between the brackets.
fn anchor_regex(pattern: &str) -> Result<String, String> {
    compile_regex(pattern)
        .map_err(|problem| format!("match `{}` {problem}", truncate_and_escape(pattern, MAX_SHOWN_CHARS)))?;
    Ok(format!("^(?:{pattern})$"))
}

/// Converts a glob to a regular expression: each `*` is a group that matches one part between dots.
fn glob_to_regex(glob: &str) -> String {
    format!("^{}$", glob.split('*').map(regex::escape).collect::<Vec<_>>().join("([^.]*)"))
}

/// Writes `$1` as `${1}`, so that the text after it is not read as part of the group's name.
fn brace_group_references(text: &str) -> String {
    let mut braced = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        let (before, after) = rest.split_at(at);
        let digits = after[1..].bytes().take_while(u8::is_ascii_digit).count();
        braced.push_str(before);
        match digits {
            0 => braced.push('$'),
            _ => braced.extend(["${", &after[1..=digits], "}"]),
        }
        rest = &after[1 + digits..];
    }
    braced + rest
}

/// Replaces characters that are invalid in names of Prometheus.
pub(super) fn sanitize_prometheus_name(name: &str) -> String {
    let mut escaped: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '_' }).collect();
    if escaped.starts_with(|c: char| c.is_ascii_digit()) || escaped.is_empty() {
        escaped.insert(0, '_');
    }
    escaped
}

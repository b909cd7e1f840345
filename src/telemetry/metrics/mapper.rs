//! `PROMETHEUS_MAPPER_YAML`: the names of statsd become names and labels of Prometheus, as an operator says.
//!
//! The file is that of statsd_exporter, which envoyproxy/ratelimit has inside: a list of mappings of which the first
//! that matches a name decides, by glob (`*` is one part between dots) or by regular expression; as there, all globs
//! are tried before any regular expression. Honoured are `match`, `match_type`, `match_metric_type`, `name`, `labels`,
//! `action: drop`, `scale` and the `defaults` of them; how a histogram is divided and how long a series lives is
//! decided here, and those keys are passed over. A regular expression matches a whole name and not a part: in a part
//! of a name, `over_limit` also finds `over_limit_with_local_cache` and counts it twice.
//!
//! What a file costs is bounded: how many mappings it has, how large their expressions become, and what a name or a
//! label can grow to.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use regex::{Regex, RegexBuilder};
use serde::Deserialize;

use super::family::MetricKind;

/// What an operator's file says.
#[derive(Debug)]
pub struct Mapper {
    mappings: Vec<Mapping>,
    /// What became of names until now.
    cache: Mutex<HashMap<String, CachedMappings>>,
}

/// What a name becomes as a counter, a gauge and a histogram; the inner `None`: it is dropped.
type CachedMappings = [Option<Option<Arc<MappedName>>>; 3];

/// What a name becomes.
#[derive(Clone, Debug, PartialEq)]
pub struct MappedName {
    /// The name in Prometheus.
    pub name: String,
    /// The labels, by name.
    pub labels: Vec<(String, String)>,
    /// By what the value is multiplied.
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

/// Why a file can not be used.
#[derive(Debug, thiserror::Error)]
pub enum MapperError {
    /// It can not be read.
    #[error("{0}")]
    Unreadable(#[from] std::io::Error),
    /// It is no such file.
    #[error("{0}")]
    Yaml(String),
    /// One of its mappings, from 1, is wrong.
    #[error("mapping {place}: {what}")]
    Mapping {
        /// Which.
        place: usize,
        /// What is wrong.
        what: String,
    },
}

/// The file as written. Keys that are not here are others' affair.
#[derive(Deserialize)]
struct MapperFile {
    #[serde(default)]
    defaults: Defaults,
    #[serde(default)]
    mappings: Vec<MappingEntry>,
}

#[derive(Default, Deserialize)]
struct Defaults {
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

/// A larger file is a mistake, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Each takes some milliseconds to read and some kilobytes to keep, if it is as large as it may be.
const MAX_MAPPINGS: usize = 1000;
/// The largest regular expression, in bytes of memory; the usual ones take some hundreds.
const MAX_REGEX_BYTES: usize = 64 << 10;
/// The longest template of a name or of a label's value, in bytes.
const MAX_TEMPLATE_BYTES: usize = 1024;
/// The most references to groups in a template: each may stand for a whole name.
const MAX_GROUP_REFERENCES: usize = 16;
/// The most labels of a mapping.
const MAX_LABELS: usize = 32;

/// How the names begin that no file maps: a series of another kind may have them.
const RESERVED_PREFIXES: [&str; 2] = ["tollkeeper_", "process_"];

impl Mapper {
    /// Reads a file.
    ///
    /// # Errors
    /// Says what is wrong with it.
    pub fn read(path: &Path) -> Result<Self, MapperError> {
        if std::fs::metadata(path)?.len() > MAX_FILE_BYTES {
            return Err(MapperError::Yaml("larger than 1 MiB".to_owned()));
        }
        Self::parse(&std::fs::read_to_string(path)?)
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// Says what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, MapperError> {
        let document: MapperFile =
            serde_saphyr::from_str(text).map_err(|error| MapperError::Yaml(error.to_string().replace('\n', " ")))?;
        if document.mappings.len() > MAX_MAPPINGS {
            return Err(MapperError::Yaml(format!("more than {MAX_MAPPINGS} mappings")));
        }
        let default = document.defaults.match_type.unwrap_or_default();
        let mapping = |(place, entry): (usize, &MappingEntry)| {
            Mapping::of(entry, &default).map_err(|what| MapperError::Mapping { place: place + 1, what })
        };
        let mut mappings = document.mappings.iter().enumerate().map(mapping).collect::<Result<Vec<_>, _>>()?;
        // In statsd_exporter a regular expression has its turn only where no glob matched, wherever it stands.
        mappings.sort_by_key(|mapping| !mapping.is_glob);
        Ok(Self { mappings, cache: Mutex::default() })
    }

    /// What a name of this kind becomes; `None`: it is dropped. One that nothing maps keeps its name, with what
    /// Prometheus does not take replaced by `_`.
    pub fn map(&self, stats: &str, kind: MetricKind) -> Option<Arc<MappedName>> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mapped) = cache.get(stats).and_then(|cached| cached[kind as usize].as_ref()) {
            return mapped.clone();
        }
        let mapped = self.lookup(stats, kind).map(Arc::new);
        cache.entry(stats.to_owned()).or_default()[kind as usize] = Some(mapped.clone());
        mapped
    }

    /// Forgets what became of names if many more are known than are used.
    pub fn sweep(&self, used: usize) {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.len() > 2 * used + 1000 {
            cache.clear();
        }
    }

    fn lookup(&self, stats: &str, kind: MetricKind) -> Option<MappedName> {
        let fits = |mapping: &&Mapping| mapping.kind.is_none_or(|wanted| wanted == kind);
        let found = self
            .mappings
            .iter()
            .filter(fits)
            .find_map(|mapping| mapping.pattern.captures(stats).map(|captures| (mapping, captures)));
        let Some((mapping, captures)) = found else {
            return Some(MappedName { name: escaped(stats), labels: Vec::new(), scale: 1.0 });
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
        Some(MappedName { name: escaped(&expand(&mapping.name)), labels, scale: mapping.scale })
    }
}

impl Mapping {
    fn of(entry: &MappingEntry, default_type: &str) -> Result<Self, String> {
        let match_type = entry.match_type.as_deref().unwrap_or(default_type);
        let (pattern, is_glob) = match match_type {
            "" | "glob" => (glob(&entry.pattern), true),
            "regex" => (anchored(&entry.pattern)?, false),
            other => return Err(format!("match_type `{other}` is neither glob nor regex")),
        };
        let pattern = expression(&pattern).map_err(|what| format!("match `{}` {what}", shortened(&entry.pattern)))?;
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
            return Err("it has no name".to_owned());
        }
        entry.is_small(&name)?;
        if RESERVED_PREFIXES.iter().any(|start| name.starts_with(start)) {
            return Err(format!("`{name}` is the name of another metric"));
        }
        let is_taken = |label: &str| label.starts_with("__") || label == "le";
        if let Some(label) = entry.labels.keys().find(|label| escaped(label) != **label || is_taken(label)) {
            return Err(format!("`{label}` is no name of a label"));
        }
        let scale = entry.scale.unwrap_or(1.0);
        if !scale.is_finite() {
            return Err("scale is no number".to_owned());
        }
        let labels = entry.labels.iter().map(|(name, value)| (name.clone(), with_braces(value))).collect();
        Ok(Self { pattern, is_glob, kind, drops, name: with_braces(&name), labels, scale })
    }
}

impl MappingEntry {
    /// Says which of its templates could become too much.
    fn is_small(&self, name: &str) -> Result<(), String> {
        if is_too_long(name) {
            return Err(format!("name {TOO_LONG}"));
        }
        if self.labels.len() > MAX_LABELS {
            return Err(format!("more than {MAX_LABELS} labels"));
        }
        match self.labels.iter().find(|(label, value)| is_too_long(label) || is_too_long(value)) {
            Some((label, _)) => Err(format!("label `{}` {TOO_LONG}", shortened(label))),
            None => Ok(()),
        }
    }
}

/// What is said of a template that could become too much.
const TOO_LONG: &str = "is too long: 1024 bytes at most, with 16 references to groups";

fn is_too_long(template: &str) -> bool {
    template.len() > MAX_TEMPLATE_BYTES || template.bytes().filter(|byte| *byte == b'$').count() > MAX_GROUP_REFERENCES
}

/// The beginning of a text, for a message.
fn shortened(text: &str) -> String {
    const SHOWN: usize = 80;
    text.char_indices().nth(SHOWN).map_or_else(|| text.to_owned(), |(end, _)| format!("{}...", &text[..end]))
}

/// A regular expression of bounded size, or what is wrong with it.
fn expression(pattern: &str) -> Result<Regex, String> {
    RegexBuilder::new(pattern).size_limit(MAX_REGEX_BYTES).build().map_err(|error| match error {
        regex::Error::CompiledTooBig(_) => "is too large a regular expression".to_owned(),
        _ => "is no regular expression".to_owned(),
    })
}

/// A regular expression that matches whole names. It must be one by itself: between brackets, `a)|(b` is another.
fn anchored(pattern: &str) -> Result<String, String> {
    expression(pattern).map_err(|what| format!("match `{}` {what}", shortened(pattern)))?;
    Ok(format!("^(?:{pattern})$"))
}

/// A glob as a regular expression: each `*` is a group that holds one part between dots.
fn glob(glob: &str) -> String {
    format!("^{}$", glob.split('*').map(regex::escape).collect::<Vec<_>>().join("([^.]*)"))
}

/// `$1` as `${1}`, so that what follows it is not taken for a part of the group's name.
fn with_braces(text: &str) -> String {
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

/// A name that Prometheus takes.
pub(super) fn escaped(name: &str) -> String {
    let mut escaped: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '_' }).collect();
    if escaped.starts_with(|c: char| c.is_ascii_digit()) || escaped.is_empty() {
        escaped.insert(0, '_');
    }
    escaped
}

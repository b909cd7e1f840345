//! Headers of the decision log: the settings and rules from which a tool repeats the decisions that follow, and the
//! rule set that a tool compiles from them.
//!
//! Decides: which rules and value files a header holds (`MAX_RECORDED_SET_BYTES`).
//! Decides: when two rule sets are equal: names of files do not count, comments do.

use std::num::NonZeroU16;
use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};

use crate::limit::StoreFailurePolicy;
use crate::rules::compile::RuleText;
use crate::rules::compile::options::CompileOptions;
use crate::rules::compile::value_set_files::{SetContents, SetFileText, SetFiles};
use crate::rules::rule_defaults::RuleDefaults;
use crate::rules::source::{RuleTexts, SourceRules};
use crate::rules::xds::resource::parse_recorded_resources;
use crate::rules::yaml::DocumentSelection;

/// Settings and rules: at the start of a process, at each reload, at the start of each file, and in a stream again once
/// the last one is trimmed away.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeaderRecord {
    /// Reason for the header.
    pub event: HeaderReason,
    /// Random id of the process.
    pub process: String,
    /// Number of the last record before; 0 at the start.
    pub seq: u64,
    /// Time in microseconds since the Unix epoch.
    pub time_us: u64,
    /// Version of the program.
    pub program: String,
    /// Store of the counters: `memory`, `redis` or `memcache`.
    pub store: String,
    /// Settings that change answers, and those of the log.
    pub settings: SettingsRecord,
    /// Rules; absent before any were loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<RuleSetRecord>,
}

/// Reason for a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeaderReason {
    /// The process started; counters in memory are empty.
    Start,
    /// The rules were replaced.
    Reload,
    /// A new file begins, or a stream was trimmed; settings and rules are those of before.
    Rotation,
}

/// Settings that change answers, and those of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SettingsRecord {
    /// `SHADOW_MODE`.
    pub shadow_mode: bool,
    /// `QUOTA_MODE`.
    pub quota_mode: bool,
    /// `STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT`.
    pub stop_cache_key_increment_when_overlimit: bool,
    /// `MERGE_DOMAIN_CONFIG`.
    pub merge_domains: bool,
    /// `USE_CALENDAR_MONTH_RATE_LIMIT`.
    pub calendar_months: bool,
    /// `TOLLKEEPER_LOG_MAX`.
    pub log_max: u32,
    /// `TOLLKEEPER_ON_STORE_ERROR`.
    pub on_store_error: StoreFailurePolicy,
    /// `TOLLKEEPER_MAX_REPLICAS`.
    pub max_replicas: u32,
    /// Number of regions of `TOLLKEEPER_REGIONS`; absent if there is only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub regions: Option<NonZeroU16>,
    /// `TOLLKEEPER_DECISION_LOG_WHEN`.
    pub when: Vec<String>,
    /// `TOLLKEEPER_DECISION_LOG_SAMPLE`, 0 to 1.
    pub sample: f64,
    /// `TOLLKEEPER_DECISION_LOG_VALUES`.
    pub values: String,
}

/// A rule set, from which the same rules can be compiled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleSetRecord {
    /// Hash of the documents: equal in all replicas with equal rules.
    pub id: String,
    /// Version that the control plane gives the rules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Rule files or resources, in the order in which they are compiled.
    pub documents: Vec<RuleDocumentRecord>,
}

/// A rule file, or a resource of a control plane. It has either `text` or `base64`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleDocumentRecord {
    /// Name in messages.
    pub name: String,
    /// Format of the contents.
    pub format: RuleDocumentFormat,
    /// Contents, if they are UTF-8 text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Any other contents, in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base64: Option<String>,
}

/// Format of a rule document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleDocumentFormat {
    /// YAML or JSON; all documents of the text count.
    Yaml,
    /// YAML or JSON; only the first document of the text counts.
    YamlFirst,
    /// A `RateLimitConfig` of a control plane, in protobuf.
    Xds,
    /// The file of `TOLLKEEPER_RULE_DEFAULTS`, in YAML or JSON.
    RuleDefaults,
    /// A file with a set that a rule names; the name is that of the rule file, `#`, and that in the rule.
    Set,
    /// The same, with the hash of the contents in their place: they are too large for the log.
    SetHash,
}

/// Length of a rule set's id in bytes.
const RULE_SET_ID_BYTES: usize = 16;

/// Records rules as their source delivered them, with the version at the source and the defaults.
pub fn build_rule_set_record(rules: &SourceRules, version: Option<&str>, defaults: &RuleDefaults) -> RuleSetRecord {
    let mut documents: Vec<RuleDocumentRecord> = match rules {
        SourceRules::Texts(of_files) => {
            of_files.texts.iter().map(build_text_document).chain(build_set_documents(&of_files.sets)).collect()
        }
        SourceRules::Resources(resources) => resources
            .iter()
            .map(|resource| RuleDocumentRecord {
                name: resource.name.to_string(),
                format: RuleDocumentFormat::Xds,
                text: None,
                base64: Some(BASE64_STANDARD.encode(&resource.encoded)),
            })
            .collect(),
    };
    documents.extend(
        defaults.source_text().map(|(file, text)| build_document(file, text, RuleDocumentFormat::RuleDefaults)),
    );
    RuleSetRecord { id: hash_documents(&documents), version: version.map(str::to_owned), documents }
}

fn build_text_document(text: &RuleText) -> RuleDocumentRecord {
    let format = match text.documents {
        DocumentSelection::All => RuleDocumentFormat::Yaml,
        DocumentSelection::FirstOnly => RuleDocumentFormat::YamlFirst,
    };
    build_document(&text.name, &text.bytes, format)
}

/// Maximum number of bytes of sets in one header; larger ones are recorded by their hash.
const MAX_RECORDED_SET_BYTES: usize = 256 << 10;

fn build_set_documents(sets: &SetFiles) -> Vec<RuleDocumentRecord> {
    let mut bytes_left = MAX_RECORDED_SET_BYTES;
    let mut documents = Vec::with_capacity(sets.texts.len());
    for SetFileText { rule_file, name, contents, .. } in &sets.texts {
        // Rules that name a file without contents are not loaded.
        let Ok(contents) = contents else { continue };
        let name = format!("{rule_file}{SET_NAME_SEPARATOR}{name}");
        documents.push(match bytes_left.checked_sub(contents.len()) {
            Some(left) => {
                bytes_left = left;
                build_document(&name, contents, RuleDocumentFormat::Set)
            }
            None => build_document(
                &name,
                blake3::Hash::from_bytes(*contents.content_hash()).to_hex().as_bytes(),
                RuleDocumentFormat::SetHash,
            ),
        });
    }
    documents
}

/// Stands between the names of a rule file and of a set, which does not contain it.
const SET_NAME_SEPARATOR: char = '#';

fn build_set_text(name: &str, contents: Result<Vec<u8>, String>) -> Option<SetFileText> {
    let (rule_file, set) = name.rsplit_once(SET_NAME_SEPARATOR)?;
    let contents = contents.map(SetContents::from);
    Some(SetFileText { rule_file: rule_file.into(), name: set.into(), path: name.into(), contents })
}

fn build_document(name: &str, bytes: &[u8], format: RuleDocumentFormat) -> RuleDocumentRecord {
    let (utf8, base64) = match std::str::from_utf8(bytes) {
        Ok(utf8) => (Some(utf8.to_owned()), None),
        Err(_) => (None, Some(BASE64_STANDARD.encode(bytes))),
    };
    RuleDocumentRecord { name: name.to_owned(), format, text: utf8, base64 }
}

/// Hash of the documents and their order.
fn hash_documents(documents: &[RuleDocumentRecord]) -> String {
    hash_parts(
        documents
            .iter()
            .flat_map(|document| [document.name.as_str(), document_contents(document), document_format_name(document)]),
    )
}

/// Hash of the documents and their order, but not of their names: replicas may read them from different directories.
pub fn hash_documents_without_names(documents: &[RuleDocumentRecord]) -> String {
    hash_parts(documents.iter().flat_map(|document| [document_contents(document), document_format_name(document)]))
}

fn document_contents(document: &RuleDocumentRecord) -> &str {
    document.text.as_ref().or(document.base64.as_ref()).map(String::as_str).unwrap_or_default()
}

const fn document_format_name(document: &RuleDocumentRecord) -> &'static str {
    match document.format {
        RuleDocumentFormat::Yaml => "yaml",
        RuleDocumentFormat::YamlFirst => "yaml_first",
        RuleDocumentFormat::Xds => "xds",
        RuleDocumentFormat::RuleDefaults => "rule_defaults",
        RuleDocumentFormat::Set => "set",
        RuleDocumentFormat::SetHash => "set_hash",
    }
}

/// Hash of the parts, each of which is preceded by its length.
fn hash_parts<'p>(parts: impl Iterator<Item = &'p str>) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    hasher.finalize().to_hex()[..2 * RULE_SET_ID_BYTES].to_owned()
}

/// Rules as their source delivered them, with their defaults.
#[derive(Clone, Debug)]
pub struct RecordedRules {
    /// The rules.
    pub rules: SourceRules,
    /// Defaults to compile them with.
    pub defaults: RuleDefaults,
}

/// Returns recorded rules; [`SourceRules::compile`] with the recorded defaults and settings makes the same rule set.
///
/// # Errors
/// The documents that cannot be decoded.
pub fn decode_recorded_rules(record: RuleSetRecord) -> Result<RecordedRules, Vec<String>> {
    let mut defaults = RuleDefaults::default();
    let mut errors = Vec::new();
    let (mut texts, mut sets, mut resources) = (Vec::new(), Vec::new(), Vec::new());
    for RuleDocumentRecord { name, format, text, base64 } in record.documents {
        let decoded = base64.map(|base64| BASE64_STANDARD.decode(base64)).transpose();
        let bytes = match (text, decoded) {
            (Some(text), _) => text.into_bytes(),
            (None, Ok(Some(bytes))) => bytes,
            (None, Ok(None)) => {
                errors.push(format!("{name}: the document has no contents"));
                continue;
            }
            (None, Err(error)) => {
                errors.push(format!("{name}: the document is not base64: {error}"));
                continue;
            }
        };
        let name: Arc<str> = name.into();
        match format {
            RuleDocumentFormat::Yaml => texts.push(RuleText { name, bytes, documents: DocumentSelection::All }),
            RuleDocumentFormat::YamlFirst => {
                texts.push(RuleText { name, bytes, documents: DocumentSelection::FirstOnly });
            }
            RuleDocumentFormat::Set => sets.extend(build_set_text(&name, Ok(bytes))),
            RuleDocumentFormat::SetHash => {
                let problem = "it is too large for the decision log; name the rules with --config";
                sets.extend(build_set_text(&name, Err(problem.to_owned())));
            }
            RuleDocumentFormat::Xds => resources.push(bytes),
            RuleDocumentFormat::RuleDefaults => match RuleDefaults::parse_file(&name, &bytes) {
                Ok((read, _)) => defaults = read,
                Err(problems) => errors.extend(problems.errors().iter().map(ToString::to_string)),
            },
        }
    }
    if !texts.is_empty() && !resources.is_empty() {
        errors.push("the rule set has both files and resources".to_owned());
    }
    let rules = match (errors.is_empty(), resources.is_empty()) {
        (false, _) => return Err(errors),
        (true, true) => SourceRules::Texts(RuleTexts { texts, sets: Arc::new(SetFiles::from(sets)) }),
        (true, false) => SourceRules::Resources(parse_recorded_resources(resources)?),
    };
    Ok(RecordedRules { rules, defaults })
}

/// Returns the recorded settings that change the meaning of rules.
pub fn build_compile_options(settings: &SettingsRecord) -> CompileOptions {
    CompileOptions {
        merge_domains: settings.merge_domains,
        calendar_months: settings.calendar_months,
        log_max: settings.log_max,
        on_store_error: settings.on_store_error,
        max_replicas: settings.max_replicas,
        regions: settings.regions,
        ..CompileOptions::default()
    }
}

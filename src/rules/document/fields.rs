//! The keys of one mapping, checked against the table of keys, with hints for what people write by mistake.
//!
//! A [`DocumentReader`] collects diagnostics while a document is read. A [`FieldPath`] is the path to a field, as a
//! linked list on the stack, so a path is formatted only for a diagnostic. [`DocumentReader::read_fields`] sorts the
//! keys of a mapping into fields, keys to ignore as envoyproxy/ratelimit does, and errors. Keys of other rate limiters
//! and files of another kind get hints.
//!
//! Decides: unknown keys (`did you mean`); known keys in the wrong place (`report_misplaced_key`): in a rule file, a key
//! of envoyproxy/ratelimit is ignored there.
//! Decides: keys of other rate limiters (`MISTAKEN_KEYS`); files of another kind (`detect_non_rule_file`).

use std::fmt;
use std::sync::Arc;

use super::value::{describe_node, format_as_go};
use crate::rules::diagnostic::{Diagnostic, Diagnostics, Severity, escape_for_message};
use crate::rules::key_table::{RuleFileKey, Section, ValueKind};
use crate::rules::yaml::{Position, ScalarValue, YamlContent, YamlNode};

/// Path from the root of a document to a field.
#[derive(Clone, Copy, Debug)]
pub struct FieldPath<'p> {
    parent: Option<&'p FieldPath<'p>>,
    step: PathStep<'p>,
}

/// One step of a path.
#[derive(Clone, Copy, Debug)]
enum PathStep<'p> {
    Key(&'p str),
    Index(usize),
}

impl<'p> FieldPath<'p> {
    /// Path of the document itself.
    pub const ROOT: FieldPath<'static> = FieldPath { parent: None, step: PathStep::Key("") };

    /// Appends a key.
    pub fn with_key(&'p self, key: &'p str) -> Self {
        Self { parent: Some(self), step: PathStep::Key(key) }
    }

    /// Appends the index of a list element, from 0.
    pub fn with_index(&'p self, index: usize) -> Self {
        Self { parent: Some(self), step: PathStep::Index(index) }
    }
}

/// Writes `descriptors[2].rate_limit.unit`.
impl fmt::Display for FieldPath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(parent) = self.parent else { return Ok(()) };
        parent.fmt(f)?;
        match self.step {
            PathStep::Key(key) if parent.parent.is_none() => write!(f, "{}", escape_for_message(key)),
            PathStep::Key(key) => write!(f, ".{}", escape_for_message(key)),
            PathStep::Index(index) => write!(f, "[{index}]"),
        }
    }
}

/// Reader of the documents of one file, which collects their diagnostics.
#[derive(Debug)]
pub struct DocumentReader<'f> {
    /// Name of the file.
    pub file: &'f Arc<str>,
    /// All diagnostics so far.
    pub found: &'f mut Diagnostics,
    /// Rows of the keys of all sections.
    pub(super) key_tables: &'static [&'static [RuleFileKey]],
}

impl DocumentReader<'_> {
    /// Records an error. An empty hint is omitted.
    pub fn report_error(
        &mut self,
        at: Position,
        field_path: &FieldPath<'_>,
        message: impl Into<String>,
        hint: impl Into<String>,
    ) {
        let error = self.build_diagnostic(at, field_path, message.into(), hint.into());
        self.found.push(error);
    }

    /// Records a warning. An empty hint is omitted.
    pub fn report_warning(
        &mut self,
        at: Position,
        field_path: &FieldPath<'_>,
        message: impl Into<String>,
        hint: impl Into<String>,
    ) {
        let warning = self.build_diagnostic(at, field_path, message.into(), hint.into());
        self.found.push(Diagnostic { severity: Severity::Warning, ..warning });
    }

    /// Builds a diagnostic with the severity of an error.
    fn build_diagnostic(&self, at: Position, field_path: &FieldPath<'_>, message: String, hint: String) -> Diagnostic {
        Diagnostic {
            severity: Severity::Error,
            file: Arc::clone(self.file),
            line: at.line,
            column: at.column,
            path: field_path.to_string(),
            message,
            hint: (!hint.is_empty()).then_some(hint),
        }
    }
}

/// A key in a section to which it belongs, with its value.
#[derive(Clone, Copy, Debug)]
pub struct Field<'n> {
    /// Row of the key.
    pub key: &'static RuleFileKey,
    /// Position of the key.
    pub at: Position,
    /// Value of the key.
    pub node: &'n YamlNode<'n>,
    /// Path to the key.
    pub path: FieldPath<'n>,
}

impl DocumentReader<'_> {
    /// Returns the fields of a mapping in `section`. Reports a node that is not a mapping.
    pub fn read_fields<'n>(
        &mut self,
        node: &'n YamlNode<'n>,
        section: Section,
        field_path: &'n FieldPath<'n>,
    ) -> Option<Vec<Field<'n>>> {
        let YamlContent::Map(map) = &node.content else {
            self.report_wrong_type(node, section.type_in_messages(), "write a mapping here", field_path);
            return None;
        };
        let mut fields = Vec::with_capacity(map.len());
        for (name, node) in map.iter() {
            let Some(known) = self.find_known_key(name, section, field_path) else { continue };
            let field = Field { key: known, at: name.at, node, path: field_path.with_key(known.name) };
            if known.belongs_in(section) {
                self.warn_about_spelling(&field, section);
                fields.push(field);
            } else {
                self.report_misplaced_key(&field, section);
            }
        }
        Some(fields)
    }

    /// Warns about a number or a word that is read, but probably not as its author meant: no value, `0100`, `yes`.
    fn warn_about_spelling(&mut self, Field { key, node, path, .. }: &Field<'_>, section: Section) {
        let Some(scalar) = node.as_scalar() else { return };
        let takes_number = matches!(key.kind, ValueKind::Count(..) | ValueKind::Overshoot);
        let takes_value = takes_number
            || matches!(
                key.kind,
                ValueKind::Flag
                    | ValueKind::Duration
                    | ValueKind::WholeSeconds
                    | ValueKind::DurationOrTable(_)
                    | ValueKind::Choice(_)
                    | ValueKind::Percentage(_)
            );
        // A `match` without a value is an error.
        let is_of_match = matches!(section, Section::Match | Section::Negation | Section::MatchSet);
        let (name, text) = (key.name, scalar.text());
        let (message, hint) = match scalar.value() {
            ScalarValue::Null if name == "requests_per_unit" => (
                format!("`{name}` has no value, so it is 0: every request is rejected"),
                "write the number; 0 if that is meant".to_owned(),
            ),
            ScalarValue::Null if takes_value || !key.peer && !is_of_match => (
                format!("`{name}` has no value, so it counts as not written"),
                "write the value, or remove the key".to_owned(),
            ),
            ScalarValue::Int(number)
                if takes_number && scalar.is_plain() && text.trim_start_matches('+') != number.to_string() =>
            {
                (
                    format!("`{name}: {}` is read as {number}", escape_for_message(text)),
                    format!("write {number}, or the number that is meant"),
                )
            }
            ScalarValue::Bool(flag) if key.kind == ValueKind::Flag && !text.eq_ignore_ascii_case(&flag.to_string()) => {
                (
                    format!("`{name}: {}` is read as {flag}", escape_for_message(text)),
                    format!("write {flag}, as other readers of YAML take it for text"),
                )
            }
            _ => return,
        };
        self.report_warning(node.at, path, message, hint);
    }

    /// Returns the key of that name, or reports it as unknown.
    fn find_known_key(
        &mut self,
        name: &YamlNode<'_>,
        section: Section,
        field_path: &FieldPath<'_>,
    ) -> Option<&'static RuleFileKey> {
        let text = match name.as_scalar() {
            Some(scalar) if scalar.value() == ScalarValue::Text => scalar.text(),
            _ => {
                let message = format!("config error, key is not of type string: {}", format_as_go(name));
                self.report_error(name.at, field_path, message, "put it in quotes if it is meant as a name");
                return None;
            }
        };
        let known = self.find_key_preferring(text, section);
        if known.is_none() {
            let hint = match (hint_for_mistaken_key(text, section), self.nearest_key(text, section)) {
                (Some(hint), _) => hint.to_owned(),
                (None, Some(near)) => format!("did you mean `{near}`?"),
                (None, None) => String::new(),
            };
            self.report_error(
                name.at,
                &field_path.with_key(text),
                format!("config error, unknown key '{}'", escape_for_message(text)),
                hint,
            );
        }
        known
    }

    /// Returns the row of a key in `section`, else that in another section.
    fn find_key_preferring(&self, name: &str, section: Section) -> Option<&'static RuleFileKey> {
        let mut named = self.key_tables.iter().copied().flatten().filter(|key| key.name == name);
        let first = named.next()?;
        Some(if first.belongs_in(section) { first } else { named.find(|key| key.belongs_in(section)).unwrap_or(first) })
    }

    /// Returns the key of `section` that is most similar to `name`, if one is similar enough.
    fn nearest_key(&self, name: &str, section: Section) -> Option<&'static str> {
        // Bounded, because a comparison takes time proportional to the length.
        if name.len() > 40 {
            return None;
        }
        let lower = name.to_ascii_lowercase().replace('-', "_");
        self.key_tables
            .iter()
            .copied()
            .flatten()
            .filter(|key| key.belongs_in(section))
            .map(|key| (strsim::normalized_damerau_levenshtein(&lower, key.name), key.name))
            .filter(|(likeness, _)| *likeness >= 0.6)
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .map(|(_, name)| name)
    }

    /// Returns the sections that have a key of this name, in the order of [`Section`]; only those of the same kind of file as
    /// `section`, if there are any.
    fn sections_of_key(&self, name: &str, section: Section) -> Vec<Section> {
        let has_key =
            |at: &Section| self.key_tables.iter().copied().flatten().any(|key| key.name == name && key.belongs_in(*at));
        let all: Vec<Section> = Section::ALL.into_iter().filter(has_key).collect();
        let is_same_file = |at: &Section| at.is_in_rule_files() == section.is_in_rule_files();
        if all.iter().any(is_same_file) { all.into_iter().filter(is_same_file).collect() } else { all }
    }

    /// Reports a file of another kind, by the key that tells.
    pub(super) fn report_non_rule_file(&mut self, NonRuleFile { key, hint }: NonRuleFile<'_, '_>) {
        let name = key.as_scalar().map_or("", |key| key.text());
        let message = format!("config error, unknown key '{}'", escape_for_message(name));
        self.report_error(key.at, &FieldPath::ROOT.with_key(name), message, hint);
    }

    /// Reports a known key in a section to which it does not belong.
    fn report_misplaced_key(&mut self, field: &Field<'_>, section: Section) {
        let Field { key, at, path, .. } = *field;
        let message = format!("`{}` does not belong in {}", key.name, section.message_phrase());
        let sections = self.sections_of_key(key.name, section);
        let belongs = sections.iter().map(|section| section.message_phrase()).collect::<Vec<_>>().join(" or ");
        if section == Section::Limit && key.name == "unlimited" {
            self.report_error(
                at,
                &path,
                "`unlimited` in a list of limits",
                "write `rate_limit: {unlimited: true}` alone",
            );
        } else if key.peer && section.is_in_rule_files() {
            self.report_warning(at, &path, message, format!("it is ignored; it belongs in {belongs}"));
        } else {
            self.report_error(at, &path, message, format!("it belongs in {belongs}"));
        }
    }

    /// Reports a list element that is not a mapping.
    pub fn report_not_a_mapping(&mut self, element: &YamlNode<'_>, field_path: &FieldPath<'_>, hint: &str) {
        let message =
            format!("config error, yaml file contains list of type other than map: {}", format_as_go(element));
        self.report_error(element.at, field_path, message, hint);
    }

    /// Reports a value that is not convertible to the Go type `into`, in the words of envoyproxy/ratelimit.
    pub fn report_wrong_type(&mut self, node: &YamlNode<'_>, into: &str, hint: &str, field_path: &FieldPath<'_>) {
        // At the root, envoyproxy/ratelimit reports the type of the list, not that of its elements.
        if let YamlContent::List(list) = &node.content
            && field_path.parent.is_some()
            && let Some((index, element)) =
                list.iter().enumerate().find(|(_, element)| !matches!(element.content, YamlContent::Map(_)))
        {
            return self.report_not_a_mapping(element, &field_path.with_index(index), hint);
        }
        let odd = node
            .as_scalar()
            .is_some_and(|scalar| matches!(scalar.value(), ScalarValue::Float(_) | ScalarValue::Large(_)));
        let prefix = if odd { "error checking config: " } else { "" };
        self.report_error(
            node.at,
            field_path,
            format!("{prefix}cannot unmarshal {} into {into}", describe_node(node)),
            hint,
        );
    }
}

/// A key of other rate limiters, with the hint for it.
struct MistakenKey {
    names: &'static [&'static str],
    sections: &'static [Section],
    hint: &'static str,
}

const LIMIT_SECTIONS: &[Section] = &[Section::RateLimit, Section::Limit];

const MISTAKEN_KEYS: &[MistakenKey] = &[
    MistakenKey {
        names: &["burst", "burst_size", "max_burst", "capacity", "max_tokens"],
        sections: LIMIT_SECTIONS,
        hint: "a burst is `bucket_size: N` with `algorithm: token_bucket`",
    },
    MistakenKey {
        names: &["limit", "requests", "max_requests", "max", "rate", "hits", "average"],
        sections: LIMIT_SECTIONS,
        hint: "write `requests_per_unit: N` with a `unit`",
    },
    MistakenKey {
        names: &["period", "interval", "per", "duration", "seconds", "window_size"],
        sections: LIMIT_SECTIONS,
        hint: "write `unit`, and `unit_multiplier` for several: 30 s are `unit: second, unit_multiplier: 30`",
    },
    MistakenKey {
        names: &["values", "one_of"],
        sections: &[Section::Descriptor],
        hint: "write a list of values as `match: {in: [GET, HEAD]}`",
    },
];

/// Keys of Envoy's bootstrap that no rule file has.
const ENVOY_BOOTSTRAP_KEYS: [&str; 6] =
    ["static_resources", "staticResources", "dynamic_resources", "dynamicResources", "layered_runtime", "bootstrap"];

/// Returns the hint for a key of another rate limiter.
fn hint_for_mistaken_key(name: &str, section: Section) -> Option<&'static str> {
    let known = MISTAKEN_KEYS.iter().find(|known| known.names.contains(&name) && known.sections.contains(&section));
    known.map(|known| known.hint)
}

/// File of another kind in place of rules.
pub(super) struct NonRuleFile<'n, 'a> {
    /// The key that tells.
    key: &'n YamlNode<'a>,
    /// What the file is, and what to do.
    hint: String,
}

/// Finds out whether a document is of another kind.
pub(super) fn detect_non_rule_file<'n, 'a>(root: &'n YamlNode<'a>) -> Option<NonRuleFile<'n, 'a>> {
    let YamlContent::Map(map) = &root.content else { return None };
    let find = |name: &str| map.iter().find(|(key, _)| key.as_scalar().is_some_and(|key| key.text() == name));
    if let (Some((key, _)), Some((_, kind))) = (find("apiVersion"), find("kind")) {
        let kind = kind.as_scalar().map_or("", |kind| kind.text());
        let hint = match kind {
            "ConfigMap" => "this is a ConfigMap; give the text below its `data`, as `kubectl get configmap NAME -o \
                 jsonpath='{.data.rules\\.yaml}' | tollkeeper check -` does"
                .to_owned(),
            _ => "this is an object of Kubernetes, not a file of rules".to_owned(),
        };
        return Some(NonRuleFile { key, hint });
    }
    let (key, _) = ENVOY_BOOTSTRAP_KEYS.iter().find_map(|name| find(name))?;
    let hint = "this is a bootstrap of Envoy; `tollkeeper check --envoy FILE` checks it".to_owned();
    Some(NonRuleFile { key, hint })
}

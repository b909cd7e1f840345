//! Defaults for the rules of any source, from the file of `TOLLKEEPER_RULE_DEFAULTS`.
//!
//! The file has the keys of `defaults` in a rule file, by domain and by unit. A value of a rule, or of the `defaults`
//! of its rule file, takes precedence; then come those of the domain and unit, the domain, `*` and the unit, and `*`.
//! The file is read as a whole or not at all.
//!
//! Decides: which entry of `TOLLKEEPER_RULE_DEFAULTS` applies to a rule; the largest file.

use std::collections::HashMap;
use std::sync::Arc;

use super::diagnostic::{Diagnostics, escape_for_message};
use super::document::defaults::{DefaultableKeys, check_defaults};
use super::document::fields::{DocumentReader, Field, FieldPath};
use super::document::keys::{KeyValue, OptionalValue, rule_keys};
use super::key_table::{Section, ValueKind};
use super::yaml::{DocumentSelection, Position, Spanned, YamlContent, YamlNode, parse, text};
use crate::limit::period::Unit;

/// Maximum size of the file, in bytes.
pub const MAX_DEFAULTS_FILE_BYTES: usize = 1 << 20;

/// Name that stands for all domains.
const ALL_DOMAINS: &str = "*";

/// Defaults by domain and unit.
#[derive(Clone, Debug, Default)]
pub struct RuleDefaults {
    file: Arc<str>,
    /// Text of the file; `None` without one.
    text: Option<Arc<[u8]>>,
    domains: HashMap<String, DomainDefaults>,
}

rule_keys! {
    /// Defaults of one domain, or of all.
    #[derive(Clone, Debug, Default)]
    pub struct DomainDefaults of [DomainDefaults] {
        tollkeeper "by_unit" by_unit: Vec<UnitDefaults>,
            "Defaults for limits of a unit, by its name; they take precedence over those of the domain.";
    }
    and keys: DefaultableKeys;
}

rule_keys! {
    /// The file itself.
    #[derive(Clone, Debug, Default)]
    pub struct DefaultsFileKeys of [DefaultsFile] {
        tollkeeper "defaults" domains: Option<Spanned<HashMap<String, DomainDefaults>>>,
            "Defaults by domain; `*` stands for all domains.";
    }
}

/// Defaults for limits of a unit.
#[derive(Clone, Debug)]
pub struct UnitDefaults {
    unit: Unit,
    keys: DefaultableKeys,
}

/// Layers of defaults that apply to a domain, in the order of their precedence.
#[derive(Clone, Copy, Debug)]
pub struct DefaultLayers<'d> {
    file: &'d Arc<str>,
    /// Those of the domain itself, then those of all domains.
    domains: [Option<&'d DomainDefaults>; 2],
}

impl RuleDefaults {
    /// Reads a file. Returns the warnings too.
    ///
    /// # Errors
    /// Every problem, if at least one is an error.
    pub fn parse_file(file: &Arc<str>, bytes: &[u8]) -> Result<(Self, Diagnostics), Diagnostics> {
        let mut found = Diagnostics::default();
        let domains = parse_defaults_text(&mut DocumentReader { file, found: &mut found }, bytes).unwrap_or_default();
        if found.has_errors() {
            return Err(found);
        }
        Ok((Self { file: Arc::clone(file), text: Some(bytes.into()), domains }, found))
    }

    /// Name and text of the file; `None` without one.
    pub fn source_text(&self) -> Option<(&str, &[u8])> {
        Some((&*self.file, self.text.as_deref()?))
    }

    /// Names of the domains with defaults of their own, sorted.
    pub fn domain_names(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.domains.keys().map(String::as_str).filter(|name| *name != ALL_DOMAINS).collect();
        names.sort_unstable();
        names
    }

    /// Defaults that apply to the domain of that name.
    pub fn layers_for_domain(&self, domain: &str) -> DefaultLayers<'_> {
        DefaultLayers { file: &self.file, domains: [domain, ALL_DOMAINS].map(|name| self.domains.get(name)) }
    }
}

impl<'d> DefaultLayers<'d> {
    /// Returns `true` if the file has defaults neither for this domain nor for all domains.
    pub fn has_no_defaults(self) -> bool {
        self.domains.iter().all(Option::is_none)
    }

    /// Name of the file in messages.
    pub const fn file_name(self) -> &'d Arc<str> {
        self.file
    }

    /// Defaults for limits of `unit`, in the order of their precedence. Without a unit those by unit do not apply.
    pub fn layers_for_unit(self, unit: Option<Unit>) -> impl Iterator<Item = &'d DefaultableKeys> {
        self.domains.into_iter().flatten().flat_map(move |domain| {
            let by_unit = domain.by_unit.iter().filter(move |of_unit| Some(of_unit.unit) == unit);
            by_unit.map(|of_unit| &of_unit.keys).chain([&domain.keys])
        })
    }

    /// Units with defaults of their own, each once.
    pub fn units_with_defaults(self) -> impl Iterator<Item = Unit> {
        let has = move |unit: &Unit| {
            self.domains.iter().flatten().any(|domain| domain.by_unit.iter().any(|of_unit| of_unit.unit == *unit))
        };
        Unit::ALL.into_iter().filter(has)
    }
}

/// Reads the text of the file: defaults by domain; `None` if an error was reported.
fn parse_defaults_text(reader: &mut DocumentReader<'_>, bytes: &[u8]) -> Option<HashMap<String, DomainDefaults>> {
    let start = Position { line: 1, column: 1 };
    if bytes.len() > MAX_DEFAULTS_FILE_BYTES {
        let message = format!("a file of defaults of {} bytes", bytes.len());
        reader.report_error(start, &FieldPath::ROOT, message, format!("at most {MAX_DEFAULTS_FILE_BYTES} are read"));
        return None;
    }
    let text = match text::decode_text(bytes) {
        Ok(text) => text,
        Err(text::UnreadableText { at, message, hint }) => {
            reader.report_error(at, &FieldPath::ROOT, format!("error loading config file: yaml: {message}"), hint);
            return None;
        }
    };
    let roots = parse::parse_documents(&text, DocumentSelection::All, reader.file, reader.found);
    let mut roots = roots.iter().filter(|root| !root.is_null());
    let (root, second) = (roots.next(), roots.next());
    if let Some(second) = second {
        reader.report_error(second.at, &FieldPath::ROOT, "a second document", "write all defaults in one document");
    }
    let mut read = DefaultsFileKeys::default();
    if let Some(root) = root {
        reader.read_section(&mut read, root, Section::DefaultsFile, &FieldPath::ROOT);
    }
    if read.domains.is_none() && !reader.found.has_errors() {
        let hint = "begin the file with `defaults:`, or write `defaults: {}` for none";
        reader.report_error(root.map_or(start, |root| root.at), &FieldPath::ROOT, "there are no `defaults`", hint);
    }
    Some(read.domains?.value)
}

/// Defaults by domain.
impl OptionalValue for HashMap<String, DomainDefaults> {
    const KIND: ValueKind = ValueKind::Free;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let mut domains = Self::new();
        for (name, node) in reader.read_named_entries(field)? {
            let field_path = field.path.with_key(&name.value);
            if name.value.is_empty() || (name.value.contains('*') && name.value != ALL_DOMAINS) {
                let message = format!("'{}' is not the name of a domain", escape_for_message(&name.value));
                reader.report_error(name.at, &field_path, message, "write a whole name, or \"*\" for all domains");
            }
            let mut defaults = DomainDefaults::default();
            if !node.is_null() && reader.read_section(&mut defaults, node, Section::DomainDefaults, &field_path) {
                check_defaults(reader, &defaults.keys, &field_path);
            }
            domains.insert(name.value, defaults);
        }
        Some(domains)
    }
}

/// Defaults by unit.
impl KeyValue for Vec<UnitDefaults> {
    const KIND: ValueKind = ValueKind::Free;

    fn read(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Self {
        let mut read = Self::new();
        for (name, node) in reader.read_named_entries(field).unwrap_or_default() {
            let field_path = field.path.with_key(&name.value);
            let Some(unit) = Unit::from_name(&name.value) else {
                let message = format!("invalid rate limit unit '{}'", escape_for_message(&name.value));
                let hint = format!("write one of {}", Unit::ALL.map(Unit::name).join(", "));
                reader.report_error(name.at, &field_path, message, hint);
                continue;
            };
            if read.iter().any(|of_unit| of_unit.unit == unit) {
                let message = format!("the unit {} is written twice", unit.name());
                reader.report_error(name.at, &field_path, message, "remove one");
            }
            let mut keys = DefaultableKeys::default();
            if !node.is_null() && reader.read_section(&mut keys, node, Section::Defaults, &field_path) {
                check_defaults(reader, &keys, &field_path);
                read.push(UnitDefaults { unit, keys });
            }
        }
        read
    }
}

impl DocumentReader<'_> {
    /// Returns the entries of a mapping with free names; none for null.
    fn read_named_entries<'n>(&mut self, field: &Field<'n>) -> Option<Vec<(Spanned<String>, &'n YamlNode<'n>)>> {
        let map = match &field.node.content {
            YamlContent::Map(map) => map,
            _ if field.node.is_null() => return Some(Vec::new()),
            _ => {
                self.report_wrong_type(field.node, "defaults", "write a mapping here", &field.path);
                return None;
            }
        };
        let mut entries = Vec::with_capacity(map.len());
        for (name, node) in map.iter() {
            match name.as_scalar() {
                Some(scalar) => entries.push((Spanned { value: scalar.text().to_owned(), at: name.at }, node)),
                None => self.report_error(name.at, &field.path, "a name that is not text", "write a name here"),
            }
        }
        Some(entries)
    }
}

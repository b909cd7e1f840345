//! Defaults for the rules of any source, from the file of `TOLLKEEPER_RULE_DEFAULTS`.
//!
//! The file has the keys of `defaults` in a rule file, by domain and by unit. A value of a rule, or of the `defaults`
//! of its rule file, takes precedence; then come those of the domain and unit, the domain, `*` and the unit, and `*`.
//! The file is read as a whole or not at all.
//!
//! Decides: which entry of `TOLLKEEPER_RULE_DEFAULTS` applies to a rule; the largest file.

use std::collections::HashMap;
use std::sync::Arc;

use super::diagnostic::Diagnostics;
use super::document::defaults::DefaultableKeys;
use super::document::defaults_file::{ALL_DOMAINS, DefaultsFileKeys, DomainDefaults};
use super::document::fields::{DocumentReader, FieldPath};
use super::key_table::Section;
use super::yaml::{DocumentSelection, Position, parse, text};
use crate::limit::period::Unit;

/// Maximum size of the file, in bytes.
pub const MAX_DEFAULTS_FILE_BYTES: usize = 1 << 20;

/// Defaults by domain and unit.
#[derive(Clone, Debug, Default)]
pub struct RuleDefaults {
    file: Arc<str>,
    /// Text of the file; `None` without one.
    text: Option<Arc<[u8]>>,
    domains: HashMap<String, DomainDefaults>,
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
        let domains = parse_defaults_text(&mut DocumentReader::new(file, &mut found), bytes).unwrap_or_default();
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

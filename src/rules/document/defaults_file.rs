//! The file of `TOLLKEEPER_RULE_DEFAULTS` as written: defaults by domain and by unit.
//!
//! Decides: which names of domains and units the file may have.

use std::collections::HashMap;

use super::defaults::{DefaultableKeys, check_defaults};
use super::fields::{DocumentReader, Field};
use super::keys::{ReadField, ReadValue, rule_keys};
use crate::limit::period::Unit;
use crate::rules::diagnostic::escape_for_message;
use crate::rules::key_table::{Section, ValueKind};
use crate::rules::yaml::{Spanned, YamlContent, YamlNode};

/// Name that stands for all domains.
pub const ALL_DOMAINS: &str = "*";

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
    /// Unit.
    pub unit: Unit,
    /// Defaults.
    pub keys: DefaultableKeys,
}

/// Defaults by domain.
impl ReadValue for HashMap<String, DomainDefaults> {
    const KIND: ValueKind = ValueKind::Free;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let mut domains = Self::new();
        for (name, node) in reader.read_entries_with_any_name(field)? {
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
impl ReadField for Vec<UnitDefaults> {
    const KIND: ValueKind = ValueKind::Free;

    fn read(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Self {
        let mut read = Self::new();
        for (name, node) in reader.read_entries_with_any_name(field).unwrap_or_default() {
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
    /// Returns the entries of a mapping with free names; empty for null, `None` for a value that is no mapping, which is
    /// reported.
    fn read_entries_with_any_name<'n>(
        &mut self,
        field: &Field<'n>,
    ) -> Option<Vec<(Spanned<String>, &'n YamlNode<'n>)>> {
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

//! Reads YAML nodes into the typed document: the values of keys that contain mappings and lists.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::defaults::DefaultableKeys;
use super::defaults_file::{DefaultsFileKeys, DomainDefaults};
use super::fields::{DocumentReader, Field, FieldPath, detect_non_rule_file};
use super::keys::{ReadField, ReadValue, SectionKeys as _};
use super::matching::{MatchKeys, MatchSetKeys, MatchingSpec};
use super::times::{ActiveKeys, BanKeys, ReservationKeys, WindowKeys};
use super::value;
use super::{
    DescriptorSpec, Document, PlanLookupSpec, PlanSpec, RateLimitEntry, RateLimitSpec, ReplacesKeys, TableSpec,
};
use crate::rules::diagnostic::{Diagnostics, escape_for_message};
use crate::rules::key_table::{RuleFileKey, Section, ValueKind};
use crate::rules::plan_table::is_valid_plan_or_table_name;
use crate::rules::yaml::{Spanned, YamlContent, YamlNode};

/// Rows of the keys of all sections.
const KEY_TABLES: [&[RuleFileKey]; 16] = [
    Document::KEYS,
    DefaultableKeys::KEYS,
    MatchingSpec::KEYS,
    DescriptorSpec::KEYS,
    MatchKeys::KEYS,
    MatchSetKeys::KEYS,
    RateLimitEntry::KEYS,
    ReplacesKeys::KEYS,
    WindowKeys::KEYS,
    BanKeys::KEYS,
    ReservationKeys::KEYS,
    ActiveKeys::KEYS,
    PlanLookupSpec::KEYS,
    TableSpec::KEYS,
    DefaultsFileKeys::KEYS,
    DomainDefaults::KEYS,
];

/// Returns the keys of all sections, of rule files and of files of defaults.
pub fn all_keys() -> impl Iterator<Item = &'static RuleFileKey> {
    KEY_TABLES.into_iter().flatten()
}

impl<'f> DocumentReader<'f> {
    /// A reader of the documents of `file`.
    pub fn new(file: &'f Arc<str>, found: &'f mut Diagnostics) -> Self {
        Self { file, found, key_tables: &KEY_TABLES }
    }
}

/// Reads a document. Reports a `root` that is not a mapping and returns `None`.
pub fn read_document(reader: &mut DocumentReader<'_>, root: &YamlNode<'_>) -> Option<Document> {
    let mut document = Document { at: root.at, ..Document::default() };
    if root.is_null() {
        return Some(document);
    }
    if let Some(foreign) = detect_non_rule_file(root) {
        reader.report_non_rule_file(foreign);
        document.unreadable = true;
        return Some(document);
    }
    let errors = reader.found.error_count();
    let fields = reader.read_fields(root, Section::Root, &FieldPath::ROOT)?;
    document.unreadable = reader.found.error_count() > errors;
    for field in fields {
        document.read_key(reader, &field);
        // A domain that cannot be read was reported.
        document.unreadable |= field.key.name == "domain" && document.domain.is_none() && !field.node.is_null();
    }
    Some(document)
}

impl ReadField for Vec<DescriptorSpec> {
    const KIND: ValueKind = ValueKind::Tables(Section::Descriptor);

    fn read(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Self {
        let mut descriptors = Self::new();
        for (index, node) in reader.read_list_of_mappings(field, "[]config.YamlDescriptor") {
            let field_path = field.path.with_index(index);
            let errors = reader.found.error_count();
            let mut read = DescriptorSpec { at: node.at, index, ..DescriptorSpec::default() };
            read.key.at = node.at;
            let fields = reader.read_fields(node, Section::Descriptor, &field_path).unwrap_or_default();
            read.unreadable = reader.found.error_count() > errors;
            for field in fields {
                let errors = reader.found.error_count();
                read.read_key(reader, &field);
                read.unreadable |= field.key.name == "key" && reader.found.error_count() > errors;
            }
            descriptors.push(read);
        }
        descriptors
    }
}

impl ReadField for Vec<PlanSpec> {
    const KIND: ValueKind = ValueKind::NamedLimits;

    fn read(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Self {
        let mut plans = Self::new();
        for (name, node) in reader.read_entries_with_checked_names(field, "plan") {
            let path = field.path.with_key(&name.value);
            let rate_limit = RateLimitSpec::read(reader, &Field { node, at: name.at, path, ..*field });
            if matches!(rate_limit, RateLimitSpec::None) {
                let hint = "write a mapping such as {unit: minute, requests_per_unit: 10}";
                reader.report_error(name.at, &path, "a plan without limits", hint);
            }
            plans.push(PlanSpec { name: name.clone(), rate_limit });
        }
        plans
    }
}

impl ReadField for Vec<TableSpec> {
    const KIND: ValueKind = ValueKind::NamedTables(Section::Table);

    fn read(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Self {
        let mut tables = Self::new();
        for (name, node) in reader.read_entries_with_checked_names(field, "table") {
            let errors = reader.found.error_count();
            let mut read = TableSpec { name: name.clone(), ..TableSpec::default() };
            reader.read_section(&mut read, node, Section::Table, &field.path.with_key(&name.value));
            read.unreadable = reader.found.error_count() > errors;
            tables.push(read);
        }
        tables
    }
}

impl ReadValue for PlanLookupSpec {
    const KIND: ValueKind = ValueKind::Table(Section::Plan);

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let errors = reader.found.error_count();
        let mut read = Self::default();
        let is_mapping = reader.read_section(&mut read, field.node, Section::Plan, &field.path);
        read.unreadable = reader.found.error_count() > errors;
        is_mapping.then_some(read)
    }
}

impl ReadValue for DefaultableKeys {
    const KIND: ValueKind = ValueKind::Table(Section::Defaults);

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let mut read = Self::default();
        reader.read_section(&mut read, field.node, Section::Defaults, &field.path).then_some(read)
    }
}

/// Value of `metadata`.
impl ReadValue for Map<String, Value> {
    const KIND: ValueKind = ValueKind::Free;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        if let Value::Object(map) = value::to_json(field.node) {
            return Some(map);
        }
        let message = format!("cannot unmarshal {} into map[string]interface {{}}", value::describe_node(field.node));
        reader.report_error(field.node.at, &field.path, message, "write a mapping here");
        None
    }
}

impl ReadField for RateLimitSpec {
    const KIND: ValueKind = ValueKind::Limits;

    fn read(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Self {
        let at = field.at;
        match &field.node.content {
            YamlContent::Map(_) => {
                let limit = reader.read_limit(field.node, Section::RateLimit, &field.path);
                Self::One(Spanned { value: Box::new(limit), at })
            }
            YamlContent::List(list) if list.is_empty() => {
                let hint = match field.key.name {
                    "rate_limit" => "leave `rate_limit` out if there is no limit",
                    _ => "write a limit such as {unit: minute, requests_per_unit: 10}, or {unlimited: true}",
                };
                reader.report_error(at, &field.path, "an empty list of limits", hint);
                Self::Unreadable
            }
            YamlContent::List(_) => {
                let mut limits = Vec::new();
                for (index, node) in reader.read_list_of_mappings(field, "[]config.YamlRateLimit") {
                    let limit = reader.read_limit(node, Section::Limit, &field.path.with_index(index));
                    limits.push(RateLimitEntry { index: Some(index), ..limit });
                }
                Self::Many(Spanned { value: limits, at })
            }
            YamlContent::Scalar(_) if field.node.is_null() => Self::None,
            YamlContent::Scalar(_) => {
                let hint = "write a mapping such as {unit: minute, requests_per_unit: 10}";
                reader.report_wrong_type(field.node, Section::RateLimit.type_in_messages(), hint, &field.path);
                Self::Unreadable
            }
        }
    }
}

/// Names in `replaces`, including empty ones.
impl ReadField for Vec<Spanned<String>> {
    const KIND: ValueKind = ValueKind::Tables(Section::Replaces);

    fn read(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Self {
        let mut names = Self::new();
        for (index, node) in reader.read_list_of_mappings(field, "[]config.yamlReplaces") {
            let mut keys = ReplacesKeys::default();
            reader.read_section(&mut keys, node, Section::Replaces, &field.path.with_index(index));
            names.push(keys.name.unwrap_or(Spanned { value: String::new(), at: node.at }));
        }
        names
    }
}

impl DocumentReader<'_> {
    fn read_limit(&mut self, node: &YamlNode<'_>, section: Section, field_path: &FieldPath<'_>) -> RateLimitEntry {
        let errors = self.found.error_count();
        let mut read = RateLimitEntry { at: node.at, ..RateLimitEntry::default() };
        self.read_section(&mut read, node, section, field_path);
        read.unreadable = self.found.error_count() > errors;
        read
    }

    /// Returns the elements of a list of mappings with their indices; none for null. Reports a value that is not
    /// convertible to the Go type `into`, and elements that are not mappings.
    fn read_list_of_mappings<'n>(&mut self, field: &Field<'n>, into: &str) -> Vec<(usize, &'n YamlNode<'n>)> {
        let mut elements = Vec::new();
        match &field.node.content {
            YamlContent::List(list) => {
                elements.reserve(list.len());
                for (index, node) in list.iter().enumerate() {
                    if matches!(node.content, YamlContent::Map(_)) {
                        elements.push((index, node));
                    } else {
                        let hint = match field.key.name {
                            "descriptors" => "write a mapping such as `- key: ...`",
                            "replaces" => "write a mapping such as `- name: ...`",
                            _ => "write a mapping such as `- {unit: minute, requests_per_unit: 10}`",
                        };
                        self.report_not_a_mapping(node, &field.path.with_index(index), hint);
                    }
                }
            }
            _ if field.node.is_null() => {}
            _ => {
                let hint = "write a list, its elements beginning with `- `";
                self.report_wrong_type(field.node, into, hint, &field.path);
            }
        }
        elements
    }

    /// Returns the elements of a mapping from names that the user chooses. Reports invalid names, and leaves them out.
    fn read_entries_with_checked_names<'n>(
        &mut self,
        field: &Field<'n>,
        kind: &str,
    ) -> Vec<(Spanned<String>, &'n YamlNode<'n>)> {
        let YamlContent::Map(map) = &field.node.content else {
            if !field.node.is_null() {
                self.report_wrong_type(field.node, "a mapping", "write a mapping from names", &field.path);
            }
            return Vec::new();
        };
        let mut elements = Vec::with_capacity(map.len());
        for (name, node) in map.iter() {
            let text = name.as_scalar().map_or("", |scalar| scalar.text());
            if is_valid_plan_or_table_name(text) {
                elements.push((Spanned { value: text.to_owned(), at: name.at }, node));
            } else {
                let message = format!("'{}' cannot be the name of a {kind}", escape_for_message(text));
                self.report_error(name.at, &field.path, message, "write up to 64 letters, digits, `_` and `-`");
            }
        }
        elements
    }
}

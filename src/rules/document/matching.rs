//! `match` of a descriptor and `matching` of a document, as written.
//!
//! Decides: how many operators a `match` may have: one.

use super::fields::{DocumentReader, Field, FieldPath};
use crate::rules::key_table::{Section, ValueKind};
use crate::rules::rule::EntryOrder;
use crate::rules::yaml::{Spanned, YamlContent, YamlNode};

/// Value of `match`.
#[derive(Clone, Debug)]
pub struct MatchSpec {
    /// The operator.
    pub operator: OperatorSpec,
    /// It is written in `not`.
    pub negated: bool,
}

/// Operator of a `match`.
#[derive(Clone, Debug)]
pub enum OperatorSpec {
    /// `in`.
    In(SetSpec),
    /// `cidr`.
    Cidr(SetSpec),
    /// `regex`.
    Regex(Spanned<String>),
}

/// Value of `in` or `cidr`.
#[derive(Clone, Debug)]
pub enum SetSpec {
    /// Elements of a list; the position is that of the key.
    List(Spanned<Vec<Spanned<String>>>),
    /// Name of a file.
    File(Spanned<String>),
}

/// Value of `matching`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MatchingSpec {
    /// `order`.
    pub order: EntryOrder,
    /// `backtrack`.
    pub backtrack: bool,
}

/// Suggested fix for a `match` without one operator.
const OPERATOR_HINT: &str = "write one of `in`, `cidr`, `regex`, or `not` around one of them";

impl DocumentReader<'_> {
    /// Reads a mapping with the keys of `matching`.
    pub(super) fn read_matching(&mut self, node: &YamlNode<'_>, field_path: &FieldPath<'_>) -> Option<MatchingSpec> {
        let mut spec = MatchingSpec::default();
        for field in self.read_fields(node, Section::Matching, "matching", field_path)? {
            let field_path = field_path.with_key(field.key.name);
            match field.key.name {
                "order" => {
                    let order = self.read_choice(&field, EntryOrder::from_name, &field_path);
                    spec.order = order.map_or(EntryOrder::default(), |order| order.value);
                }
                "backtrack" => spec.backtrack = self.read_bool_or_false(&field, &field_path),
                _ => {}
            }
        }
        Some(spec)
    }

    /// Reads a mapping with the keys of `match`.
    pub(super) fn read_match(&mut self, node: &YamlNode<'_>, field_path: &FieldPath<'_>) -> Option<MatchSpec> {
        let field = self.read_single_field(node, Section::Match, field_path)?;
        let field_path = field_path.with_key(field.key.name);
        if field.key.name != "not" {
            let operator = self.read_operator(&field, &field_path)?;
            return Some(MatchSpec { operator, negated: false });
        }
        let inner = self.read_single_field(field.node, Section::Negation, &field_path)?;
        let operator = self.read_operator(&inner, &field_path.with_key(inner.key.name))?;
        Some(MatchSpec { operator, negated: true })
    }

    /// Returns the only field of a mapping; reports none, or several.
    fn read_single_field<'n, 'a>(
        &mut self,
        node: &'n YamlNode<'a>,
        section: Section,
        field_path: &FieldPath<'_>,
    ) -> Option<Field<'n, 'a>> {
        let errors = self.found.error_count();
        let fields = self.read_fields(node, section, section.name(), field_path)?;
        match fields.as_slice() {
            [field] if !field.node.is_null() => Some(*field),
            // A wrong key was reported.
            [] if self.found.error_count() > errors => None,
            [] | [_] => {
                self.report_error(node.at, field_path, "no operator", OPERATOR_HINT);
                None
            }
            [_, second, ..] => {
                let hint = "give each a descriptor of its own, or nest descriptors";
                self.report_error(second.at, field_path, format!("{} operators in one `match`", fields.len()), hint);
                None
            }
        }
    }

    fn read_operator(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Option<OperatorSpec> {
        match field.key.name {
            "in" => Some(OperatorSpec::In(self.read_set(field, field_path)?)),
            "cidr" => Some(OperatorSpec::Cidr(self.read_set(field, field_path)?)),
            _ => {
                let expression = self.read_string(field, field_path)?;
                Some(OperatorSpec::Regex(Spanned { value: expression.value, at: field.node.at }))
            }
        }
    }

    fn read_set(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Option<SetSpec> {
        debug_assert!(field.key.kind == ValueKind::Set, "a key with a set");
        match &field.node.content {
            YamlContent::List(list) => {
                let mut elements = Vec::with_capacity(list.len());
                let errors = self.found.error_count();
                for (index, node) in list.iter().enumerate() {
                    match node.as_scalar() {
                        Some(scalar) if !scalar.is_null() => {
                            elements.push(Spanned { value: scalar.text().to_owned(), at: node.at });
                        }
                        _ => {
                            let hint = "write text here; \"\" is the empty text";
                            let message = "an element that is not text";
                            self.report_error(node.at, &field_path.with_index(index), message, hint);
                        }
                    }
                }
                let is_whole = self.found.error_count() == errors;
                is_whole.then_some(SetSpec::List(Spanned { value: elements, at: field.at }))
            }
            YamlContent::Map(_) => {
                let fields = self.read_fields(field.node, Section::MatchSet, "match_set", field_path)?;
                let file = fields.first()?;
                let name = self.read_string(file, &field_path.with_key(file.key.name))?;
                Some(SetSpec::File(Spanned { value: name.value, at: file.node.at }))
            }
            YamlContent::Scalar(_) => {
                let hint = "write a list such as [a, b], or {file: NAME.txt}";
                self.report_error(field.node.at, field_path, format!("`{}` is not a list", field.key.name), hint);
                None
            }
        }
    }
}

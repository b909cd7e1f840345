//! `match` of a descriptor and `matching` of a document, as written.
//!
//! Decides: how many operators a `match` may have: one.

use super::fields::{DocumentReader, Field};
use super::keys::{ReadField, ReadValue, SectionKeys as _, rule_keys};
use crate::rules::key_table::{Section, ValueKind};
use crate::rules::rule::EntryOrder;
use crate::rules::yaml::{Spanned, YamlContent};

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

rule_keys! {
    /// Value of `matching`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct MatchingSpec of [Matching] {
        tollkeeper "order" order: EntryOrder = "as_written",
            "as_written: entries must come in the order of the rules. any: in any order they match the same rule and counter.";
        tollkeeper "backtrack" backtrack: bool = "false",
            "If a better match has no rule for the entries after it, the next match is tried.";
    }
}

rule_keys! {
    /// Value of `match`, or of the `not` in it.
    #[derive(Clone, Debug, Default)]
    pub struct MatchKeys of [Match, Negation] {
        tollkeeper "in" values: Option<Spanned<SetSpec>>, "The value is one of these, or of the lines of a file.";
        tollkeeper "cidr" networks: Option<Spanned<SetSpec>>,
            "The value is the text of an address in one of these networks, or of the lines of a file.";
        tollkeeper "regex" expression: Option<Spanned<Spanned<String>>>,
            "The regular expression matches the whole value, as bytes; `.` is any byte. It takes linear time.";
        tollkeeper "not" negation in [Match]: Option<Spanned<MatchSpec>> as Table(Section::Negation),
            "The operator in it does not match.";
    }
}

rule_keys! {
    /// Value of `in` or `cidr`, written as a mapping.
    #[derive(Clone, Debug, Default)]
    pub struct MatchSetKeys of [MatchSet] {
        tollkeeper "file" file: Option<Spanned<Spanned<String>>>,
            "The name of a .txt or .list file with one entry a line, relative to the directory of the rule file.";
    }
}

/// Suggested fix for a `match` without one operator.
const OPERATOR_HINT: &str = "write one of `in`, `cidr`, `regex`, or `not` around one of them";

/// `as_written` if it is not written.
impl ReadField for EntryOrder {
    const KIND: ValueKind = ValueKind::Choice(Self::NAMES);

    fn read(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Self {
        Option::<Spanned<Self>>::read(reader, field).map(|order| order.value).unwrap_or_default()
    }
}

impl ReadValue for MatchingSpec {
    const KIND: ValueKind = ValueKind::Table(Section::Matching);

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let mut keys = Self::default();
        reader.read_section(&mut keys, field.node, Section::Matching, &field.path).then_some(keys)
    }
}

/// `None` if it cannot be read, which was reported.
impl ReadValue for Option<MatchSpec> {
    const KIND: ValueKind = ValueKind::Table(Section::Match);

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        Some(reader.read_match(field, Section::Match))
    }
}

/// Value of `not`.
impl ReadValue for MatchSpec {
    const KIND: ValueKind = ValueKind::Table(Section::Negation);

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let negated = reader.read_match(field, Section::Negation)?;
        Some(Self { negated: true, ..negated })
    }
}

impl DocumentReader<'_> {
    /// Reads a `match` or a `not`. Reports a mapping with no operator or with several.
    fn read_match(&mut self, field: &Field<'_>, section: Section) -> Option<MatchSpec> {
        let errors = self.found.error_count();
        let fields = self.read_fields(field.node, section, &field.path)?;
        let mut keys = MatchKeys::default();
        match fields.as_slice() {
            [operator] if !operator.node.is_null() => keys.read_key(self, operator),
            // A wrong key was reported.
            [] if self.found.error_count() > errors => {}
            [] | [_] => {
                self.report_error(field.node.at, &field.path, "no operator", OPERATOR_HINT);
            }
            [_, second, ..] => {
                let hint = "give each a descriptor of its own, or nest descriptors";
                self.report_error(second.at, &field.path, format!("{} operators in one `match`", fields.len()), hint);
            }
        }
        if let Some(negation) = keys.negation {
            return Some(negation.value);
        }
        let operator = keys.values.map(|set| OperatorSpec::In(set.value));
        let operator = operator.or(keys.networks.map(|set| OperatorSpec::Cidr(set.value)));
        let operator = operator.or(keys.expression.map(|expression| OperatorSpec::Regex(expression.value)));
        Some(MatchSpec { operator: operator?, negated: false })
    }
}

impl ReadValue for SetSpec {
    const KIND: ValueKind = ValueKind::Set;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        match &field.node.content {
            YamlContent::List(list) => {
                let mut elements = Vec::with_capacity(list.len());
                let errors = reader.found.error_count();
                for (index, node) in list.iter().enumerate() {
                    match node.as_scalar() {
                        Some(scalar) if !scalar.is_null() => {
                            elements.push(Spanned { value: scalar.text().to_owned(), at: node.at });
                        }
                        _ => {
                            let hint = "write text here; \"\" is the empty text";
                            let message = "an element that is not text";
                            reader.report_error(node.at, &field.path.with_index(index), message, hint);
                        }
                    }
                }
                let is_whole = reader.found.error_count() == errors;
                is_whole.then_some(Self::List(Spanned { value: elements, at: field.at }))
            }
            YamlContent::Map(_) => {
                let mut keys = MatchSetKeys::default();
                let errors = reader.found.error_count();
                reader.read_section(&mut keys, field.node, Section::MatchSet, &field.path);
                if keys.file.is_none() && reader.found.error_count() == errors {
                    let hint = "write `{file: NAME.txt}`, or a list";
                    reader.report_error(
                        field.node.at,
                        &field.path,
                        format!("`{}` without a file", field.key.name),
                        hint,
                    );
                }
                Some(Self::File(keys.file?.value))
            }
            YamlContent::Scalar(_) => {
                let hint = "write a list such as [a, b], or {file: NAME.txt}";
                reader.report_error(field.node.at, &field.path, format!("`{}` is not a list", field.key.name), hint);
                None
            }
        }
    }
}

//! How a key of a rule file is declared, and how its value is read.
//!
//! `rule_keys!` makes a structure from rows: a row is a key, its field and the type of that field. The type says how
//! the value is read ([`ReadField`]).
//!
//! Decides: which type a key takes: `requests_per_unit: "10"`, `value: 404`, a key without a value.

use super::fields::{DocumentReader, Field};
use super::value::{self, InvalidValue};
use crate::limit::algorithm::Algorithm;
use crate::limit::calendar::Weekday;
use crate::limit::period::Period;
use crate::limit::reservation::UnsettledPolicy;
use crate::limit::window::MonthLength;
use crate::limit::{Overshoot, RegionLossPolicy, StoreFailurePolicy};
use crate::rules::diagnostic::escape_for_message;
use crate::rules::key_table::{ConsistencyWord, ScopeWord, Section, ValueKind};
use crate::rules::rule::rejection_body::RejectionFormat;
use crate::rules::rule::{EntryOrder, RuleLogging};
use crate::rules::yaml::{Position, Scalar, ScalarValue, Spanned, YamlContent, YamlNode};

/// Type of a field that holds the value of a key. A key whose value is null counts as not written.
pub trait ReadField: Sized {
    /// Kind of the value, unless the row of the key gives one with `as`.
    const KIND: ValueKind;

    /// Reads the value. Reports one that cannot be read, and leaves the field at its default.
    fn read(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Self;

    /// Position of the key; `None` if it is not written, or if the type does not keep it.
    fn position(&self) -> Option<Position> {
        None
    }
}

/// Type of a value that is written or not, so that its field is `Option<Spanned<Self>>`.
pub trait ReadValue: Sized {
    /// Kind of the value, unless the row of the key gives one with `as`.
    const KIND: ValueKind;

    /// Reads a value that is not null. Reports one that cannot be read.
    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self>;

    /// The value, if it is a word.
    fn fixed_word(&self) -> Option<&'static str> {
        None
    }
}

impl<T: ReadValue> ReadField for Option<Spanned<T>> {
    const KIND: ValueKind = T::KIND;

    fn read(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Self {
        if field.node.is_null() {
            return None;
        }
        Some(Spanned { value: T::read_value(reader, field)?, at: field.at })
    }

    fn position(&self) -> Option<Position> {
        self.as_ref().map(|spanned| spanned.at)
    }
}

/// A structure with the keys of a section.
pub trait SectionKeys {
    /// Reads the value of one key; ignores a key that this structure does not have.
    fn read_key(&mut self, reader: &mut DocumentReader<'_>, field: &Field<'_>);
}

/// Declares a structure with the keys of one or more sections, and the rows of these keys.
///
/// ```text
/// rule_keys! {
///     /// Value of `ban`.
///     pub struct BanKeys of [Ban] {
///         tollkeeper "after" after: Option<Spanned<u32>> as Count(1, 100) = "1", "The ban begins with this rejection.";
///     }
/// }
/// ```
///
/// A row is: who has the key (`envoy`: envoyproxy/ratelimit too), the key, its field, `in [...]` if only some of the
/// sections have it, the type of the field, `as ...` if the type does not say which values are valid, the default in
/// YAML, and the description. After `and` follows a structure whose keys belong to the sections too; in `also` follow
/// fields that are no keys.
macro_rules! rule_keys {
    (
        $(#[$attribute:meta])*
        pub struct $name:ident of $sections:tt {
            $(
                $origin:ident $key:literal $field:ident $(in [$($only:ident),+])?: $type:ty
                $(as $kind:ident $(($($bound:expr),+))?)? $(= $default:literal)?, $doc:literal;
            )+
        }
        $(and $rest:ident: $rest_type:ty;)?
        $(also { $($(#[$other_attribute:meta])* $other:ident: $other_type:ty,)+ })?
    ) => {
        $(#[$attribute])*
        pub struct $name {
            $(#[doc = concat!("`", $key, "`: ", $doc)] pub $field: $type,)+
            $(#[doc = "Further keys."] pub $rest: $rest_type,)?
            $($($(#[$other_attribute])* pub $other: $other_type,)+)?
        }

        impl $name {
            /// Rows of the keys.
            pub const KEYS: &'static [$crate::rules::key_table::RuleFileKey] = &[$(
                $crate::rules::key_table::RuleFileKey {
                    name: $key,
                    peer: $crate::rules::document::keys::rule_keys!(@is_envoys $origin),
                    sections: $crate::rules::document::keys::rule_keys!(@sections $sections $([$($only),+])?),
                    kind: $crate::rules::document::keys::rule_keys!(@kind $type $(, $kind $(($($bound),+))?)?),
                    default: concat!("" $(, $default)?),
                    doc: $doc,
                },
            )+];

            /// Keys that are written, with their positions, in the order of the rows; not those whose type keeps none.
            pub fn written_keys(&self) -> impl Iterator<Item = $crate::rules::yaml::Spanned<&'static str>> {
                let positions =
                    [$(($key, $crate::rules::document::keys::ReadField::position(&self.$field)),)+].into_iter();
                positions
                    .filter_map(|(value, at)| Some($crate::rules::yaml::Spanned { value, at: at? }))
                    $(.chain(self.$rest.written_keys()))?
            }
        }

        impl $crate::rules::document::keys::SectionKeys for $name {
            fn read_key(
                &mut self,
                reader: &mut $crate::rules::document::fields::DocumentReader<'_>,
                field: &$crate::rules::document::fields::Field<'_>,
            ) {
                match field.key.name {
                    $($key => self.$field = $crate::rules::document::keys::ReadField::read(reader, field),)+
                    _ => { $(self.$rest.read_key(reader, field))? }
                }
            }
        }
    };
    (@is_envoys envoy) => { true };
    (@is_envoys tollkeeper) => { false };
    (@sections [$($section:ident),+]) => { &[$($crate::rules::key_table::Section::$section),+] };
    (@sections $all:tt [$($only:ident),+]) => { &[$($crate::rules::key_table::Section::$only),+] };
    (@kind $type:ty) => { <$type as $crate::rules::document::keys::ReadField>::KIND };
    (@kind $type:ty, $($kind:tt)+) => { $crate::rules::key_table::ValueKind::$($kind)+ };
}
pub(crate) use rule_keys;

impl DocumentReader<'_> {
    /// Reads the keys of a mapping into `keys`. Reports a node that is not a mapping, and returns `false`.
    pub(in crate::rules) fn read_section(
        &mut self,
        keys: &mut impl SectionKeys,
        node: &YamlNode<'_>,
        section: Section,
        field_path: &super::fields::FieldPath<'_>,
    ) -> bool {
        let Some(fields) = self.read_fields(node, section, field_path) else { return false };
        for field in fields {
            keys.read_key(self, &field);
        }
        true
    }

    /// Reads the value of a key as one of `words`.
    fn read_word<T>(&mut self, field: &Field<'_>, words: &[&str], from_name: impl Fn(&str) -> Option<T>) -> Option<T> {
        self.read_scalar(field, |scalar| {
            from_name(scalar.text()).ok_or_else(|| InvalidValue {
                message: format!("unknown {} '{}'", field.key.name, escape_for_message(scalar.text())),
                hint: match (field.key.name, scalar.text()) {
                    // It counts nothing in a period, so it is a key of its own.
                    ("algorithm", "concurrent") => {
                        "write `concurrent: N` in place of `algorithm`, `unit` and `requests_per_unit`".to_owned()
                    }
                    _ => format!("write one of {}", words.join(", ")),
                },
            })
        })
    }

    /// Parses the value of a key; `None` for null. Reports a mapping, a list, and an invalid value.
    pub(in crate::rules) fn read_scalar<T>(
        &mut self,
        field: &Field<'_>,
        parse: impl Fn(&Scalar<'_>) -> Result<T, InvalidValue>,
    ) -> Option<T> {
        match field.node.as_scalar() {
            None => {
                self.report_wrong_type(field.node, "string", "write text here", &field.path);
                None
            }
            Some(scalar) if scalar.is_null() => None,
            Some(scalar) => match parse(scalar) {
                Ok(value) => Some(value),
                Err(InvalidValue { message, hint }) => {
                    self.report_error(field.node.at, &field.path, message, hint);
                    None
                }
            },
        }
    }

    /// Reads a duration of whole seconds, because keys of counters and names of metrics contain it in seconds. Returns
    /// microseconds.
    pub(super) fn read_whole_seconds(&mut self, field: &Field<'_>, name: &str) -> Option<u64> {
        self.read_scalar(field, |scalar| {
            let duration_us = value::parse_duration_us(scalar.text())?;
            Period::from_micros(duration_us).map(|_| duration_us).ok_or_else(|| InvalidValue {
                message: format!("a `{name}` of {}", escape_for_message(scalar.text())),
                hint: "write whole seconds, from 1s to 366 days, such as 10m".to_owned(),
            })
        })
    }

    /// Reads a whole number in the range of its row.
    fn read_count(&mut self, field: &Field<'_>, min: u64, max: u64) -> Option<u64> {
        let number = match field.node.as_scalar().map(|scalar| scalar.value()) {
            Some(ScalarValue::Int(number)) => u64::try_from(number).ok(),
            _ => None,
        };
        match number {
            Some(value) if (min..=max).contains(&value) => return Some(value),
            Some(value) if !field.key.peer => {
                let message = format!("`{}` is {value}, out of range", field.key.name);
                let hint = format!("write a whole number from {min} to {max}");
                self.report_error(field.node.at, &field.path, message, hint);
            }
            _ => {
                let into = if max == u64::from(u32::MAX) { "uint32" } else { "uint64" };
                let hint = format!("write a whole number from {min} to {max}, without quotes");
                self.report_wrong_type(field.node, into, &hint, &field.path);
            }
        }
        None
    }

    /// Reports a list of values as `value`, in the words of envoyproxy/ratelimit.
    fn report_list_as_value(&mut self, field: &Field<'_>) {
        let YamlContent::List(list) = &field.node.content else { return };
        let element = list.first().map_or_else(String::new, |element| value::format_as_go(element));
        let message = format!("config error, yaml file contains list of type other than map: {element}");
        self.report_error(field.at, &field.path, message, "write `match: {in: [A, B]}` in place of `value`");
    }
}

impl ReadValue for String {
    const KIND: ValueKind = ValueKind::Text;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        match &field.node.content {
            YamlContent::Scalar(scalar) => return Some(scalar.text().to_owned()),
            YamlContent::List(_) if field.key.name == "value" => reader.report_list_as_value(field),
            _ => reader.report_wrong_type(field.node, "string", "write text here", &field.path),
        }
        None
    }
}

/// Text with the position of the value, for messages that point into it.
impl ReadValue for Spanned<String> {
    const KIND: ValueKind = ValueKind::Text;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        Some(Self { value: String::read_value(reader, field)?, at: field.node.at })
    }
}

/// Text; empty if it is not written.
impl ReadField for Spanned<String> {
    const KIND: ValueKind = ValueKind::Text;

    fn read(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Self {
        Option::read(reader, field).unwrap_or(Self { value: String::new(), at: field.at })
    }
}

/// Text; empty if it is not written.
impl ReadField for String {
    const KIND: ValueKind = ValueKind::Text;

    fn read(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Self {
        Spanned::read(reader, field).value
    }
}

impl ReadValue for bool {
    const KIND: ValueKind = ValueKind::Flag;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        if let Some(ScalarValue::Bool(flag)) = field.node.as_scalar().map(|scalar| scalar.value()) {
            return Some(flag);
        }
        reader.report_wrong_type(field.node, "bool", "write true or false, without quotes", &field.path);
        None
    }

    fn fixed_word(&self) -> Option<&'static str> {
        Some(if *self { "true" } else { "false" })
    }
}

/// `false` if it is not written.
impl ReadField for bool {
    const KIND: ValueKind = ValueKind::Flag;

    fn read(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Self {
        Option::<Spanned<Self>>::read(reader, field).is_some_and(|flag| flag.value)
    }
}

/// A number, or a duration in microseconds, as the row of the key says.
impl ReadValue for u64 {
    const KIND: ValueKind = ValueKind::Count(0, Self::MAX);

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        match field.key.kind {
            ValueKind::Count(min, max) => reader.read_count(field, min, max),
            ValueKind::WholeSeconds => reader.read_whole_seconds(field, field.key.name),
            _ => reader.read_scalar(field, |scalar| value::parse_duration_us(scalar.text())),
        }
    }
}

/// A number, or thousandths of a percent, as the row of the key says.
impl ReadValue for u32 {
    const KIND: ValueKind = ValueKind::Count(0, Self::MAX as u64);

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        match field.key.kind {
            ValueKind::Percentage(least) => {
                reader.read_scalar(field, |scalar| value::parse_milli_percent(scalar, least))
            }
            // The row bounds the number by 32 bits.
            _ => Self::try_from(u64::read_value(reader, field)?).ok(),
        }
    }
}

impl ReadValue for Overshoot {
    const KIND: ValueKind = ValueKind::Overshoot;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        reader.read_scalar(field, value::parse_overshoot)
    }
}

/// Implements [`ReadValue`] for enums with words, by the function that finds the value of a word.
macro_rules! word_values {
    ($($type:ident::$from_name:ident,)+) => {$(
        impl ReadValue for $type {
            const KIND: ValueKind = ValueKind::Choice(Self::NAMES);

            fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
                reader.read_word(field, Self::NAMES, Self::$from_name)
            }

            fn fixed_word(&self) -> Option<&'static str> {
                Some(self.name())
            }
        }
    )+};
}

word_values! {
    Algorithm::from_rule_word,
    ConsistencyWord::from_name,
    EntryOrder::from_name,
    MonthLength::from_name,
    RegionLossPolicy::from_name,
    RejectionFormat::from_name,
    RuleLogging::from_name,
    ScopeWord::from_name,
    StoreFailurePolicy::from_name,
    UnsettledPolicy::from_name,
    Weekday::from_name,
}

//! Mapping of the fields of an access log or a table to requests.
//!
//! The mapping is a YAML file. Descriptors are built as Envoy builds them: an entry whose field is absent drops its
//! descriptor, and a row without descriptors is no request.
//!
//! Decides: which times and hits of an access log are read (`--map`); a field that is absent.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde::Deserialize;

use super::recorded_request::{RecordedDescriptor, RecordedRequest};
use crate::base::clock::{Time, to_micros};
use crate::limit::request::Hits;
use crate::settings::value::SettingValue as _;

/// A mapping file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FieldMapFile {
    /// Field with the time of a request.
    time: String,
    /// Domain of all requests.
    domain: Option<String>,
    /// Field with the domain.
    domain_field: Option<String>,
    /// Field with the hits.
    hits: Option<String>,
    /// Longest delay of an answer.
    max_delay: Option<String>,
    /// Descriptors, each a list of entries.
    descriptors: Vec<Vec<MappedEntry>>,
}

/// Entry of a descriptor: a key with a field or a constant value.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MappedEntry {
    key: String,
    field: Option<String>,
    value: Option<String>,
}

/// Mapping of fields to requests.
#[derive(Clone, Debug)]
pub struct FieldMap {
    /// Names of the fields that are used, without repetition.
    fields: Vec<String>,
    time: usize,
    domain: TextSource,
    hits: Option<usize>,
    max_delay_us: u64,
    descriptors: Vec<Vec<EntrySource>>,
}

#[derive(Clone, Debug)]
struct EntrySource {
    key: String,
    value: TextSource,
}

/// Source of a text.
#[derive(Clone, Debug)]
enum TextSource {
    Constant(Arc<str>),
    /// Index of a field.
    Field(usize),
}

/// Values of the fields of one row, in the order of [`FieldMap::fields`].
pub type FieldValues<'a> = [Option<Cow<'a, str>>];

/// Field of a mapping that rows lack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbsentField {
    /// Name of the field.
    pub field: String,
    /// Rows without it.
    pub rows: u64,
}

/// Delay that Envoy's default timeout of 20 ms leaves, in microseconds.
const DEFAULT_MAX_DELAY_US: u64 = 18_000;
/// Range of the longest delay.
const MAX_RESPONSE_DELAY_RANGE: &str = "0 to 30s";

impl FieldMap {
    /// Parses a mapping file.
    ///
    /// # Errors
    /// The text is no mapping; the error says what to write.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: FieldMapFile = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        let mut fields = Vec::new();
        let mut index = |name: String| {
            fields.iter().position(|known| *known == name).unwrap_or_else(|| {
                fields.push(name);
                fields.len() - 1
            })
        };
        let time = index(file.time);
        let domain = match (file.domain, file.domain_field) {
            (Some(domain), None) => TextSource::Constant(domain.into()),
            (None, Some(field)) => TextSource::Field(index(field)),
            _ => return Err("give either `domain: NAME` or `domain_field: FIELD`".to_owned()),
        };
        let hits = file.hits.map(&mut index);
        let mut descriptors = Vec::with_capacity(file.descriptors.len());
        for (number, written) in file.descriptors.into_iter().enumerate() {
            let entry = |MappedEntry { key, field, value }| match (field, value) {
                (Some(field), None) => Ok(EntrySource { key, value: TextSource::Field(index(field)) }),
                (None, Some(value)) => Ok(EntrySource { key, value: TextSource::Constant(value.into()) }),
                _ => Err(format!("descriptor {}, key '{key}': give either `field` or `value`", number + 1)),
            };
            let entries: Vec<EntrySource> = written.into_iter().map(entry).collect::<Result<_, _>>()?;
            if entries.is_empty() {
                return Err(format!("descriptor {} has no entries", number + 1));
            }
            descriptors.push(entries);
        }
        if descriptors.is_empty() {
            return Err("`descriptors` is empty (list at least one)".to_owned());
        }
        let max_delay_us = match file.max_delay {
            None => DEFAULT_MAX_DELAY_US,
            Some(text) => Duration::parse(&text, MAX_RESPONSE_DELAY_RANGE)
                .map(to_micros)
                .map_err(|invalid| format!("max_delay: {} ({})", invalid.what, invalid.fix))?,
        };
        Ok(Self { fields, time, domain, hits, max_delay_us, descriptors })
    }

    /// Names of the fields that are used, without repetition.
    pub fn fields(&self) -> &[String] {
        &self.fields
    }

    /// Builds the request of a row; `None` if no descriptor has all of its fields.
    ///
    /// # Errors
    /// A time or a number of hits cannot be read, or the time or the domain is absent.
    pub fn build_request(&self, values: &FieldValues<'_>) -> Result<Option<RecordedRequest>, String> {
        let mut request = RecordedRequest::default();
        request.max_delay_us = self.max_delay_us;
        let hits = match self.hits.and_then(|index| values[index].as_deref()) {
            Some(text) => parse_hits(text).ok_or_else(|| format!("'{text}' is not a number of hits"))?,
            None => Hits::Charge(1),
        };
        for entries in &self.descriptors {
            if entries.iter().any(|entry| resolve_text(&entry.value, values).is_none()) {
                continue;
            }
            request.push_descriptor(RecordedDescriptor::new(hits));
            for entry in entries {
                if let Some(value) = resolve_text(&entry.value, values) {
                    request.push_entry(entry.key.as_bytes(), value.as_bytes());
                }
            }
        }
        if request.descriptors().is_empty() {
            return Ok(None);
        }
        request.domain = match &self.domain {
            TextSource::Constant(domain) => Arc::clone(domain),
            TextSource::Field(index) => {
                values[*index].as_deref().ok_or_else(|| self.format_absent_field(*index))?.into()
            }
        };
        let time = values[self.time].as_deref().ok_or_else(|| self.format_absent_field(self.time))?;
        request.arrival = parse_time(time)
            .ok_or_else(|| format!("'{time}' is not a time (RFC 3339, or seconds to nanoseconds since 1970)"))?;
        Ok(Some(request))
    }

    fn format_absent_field(&self, field: usize) -> String {
        format!("the field '{}' is absent", self.fields[field])
    }
}

fn resolve_text<'v>(source: &'v TextSource, values: &'v FieldValues<'_>) -> Option<&'v str> {
    match source {
        TextSource::Constant(text) => Some(text),
        TextSource::Field(index) => values[*index].as_deref(),
    }
}

/// Parses a number of hits, rounded up; a negative number refunds.
pub fn parse_hits(text: &str) -> Option<Hits> {
    if let Ok(count) = text.parse::<i64>() {
        return Some(Hits::new(count.unsigned_abs(), count < 0));
    }
    let count: f64 = text.parse().ok().filter(|count: &f64| count.is_finite())?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates, and hits are clamped")]
    let whole = count.abs().ceil() as u64;
    Some(Hits::new(whole, count < 0.0))
}

/// Parses RFC 3339, or a number since 1970 in seconds, milliseconds, microseconds or nanoseconds, told apart by its
/// size.
pub fn parse_time(text: &str) -> Option<Time> {
    if let Ok(timestamp) = text.parse::<Timestamp>() {
        return u64::try_from(timestamp.as_microsecond()).ok().map(Time::from_micros);
    }
    let number: f64 = text.parse().ok().filter(|number: &f64| (0.0..1e20).contains(number))?;
    let micros = match number {
        0.0..1e11 => number * 1e6,
        1e11..1e14 => number * 1e3,
        1e14..1e17 => number,
        _ => number / 1e3,
    };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is in range")]
    Some(Time::from_micros(micros.round() as u64))
}

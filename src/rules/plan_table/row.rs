//! The value of a row: the name of a plan, or a limit such as `500/minute`.

use std::fmt;

use crate::limit::period::{Period, Unit};

/// Value of a row as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowValue<'a> {
    /// Name of a plan.
    Plan(&'a str),
    /// Limit of the row's own.
    Own(OwnLimit),
}

/// Limit of a row's own; its other properties come from the defaults of the domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnLimit {
    /// Hits in a period; 0 rejects everything.
    pub requests_per_unit: u32,
    /// The period.
    pub period: Period,
}

/// Value of a row as a table keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackedRow {
    /// Index of a plan.
    Plan(u16),
    /// Limit of the row's own.
    Own(OwnLimit),
}

/// Row that a look-up found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundRow {
    /// Index among the plans of the domain.
    Plan(u16),
    /// Limit of the row's own.
    Own(OwnLimit),
}

/// Text that is neither the name of a plan nor a limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowTextError {
    /// The text is not UTF-8.
    #[error("the plan is not UTF-8")]
    NotUtf8,
    /// The text is empty.
    #[error("there is no plan")]
    Empty,
    /// The text has a slash and is not a limit.
    #[error("`{0}` is not a limit")]
    InvalidLimit(String),
    /// The text cannot be the name of a plan.
    #[error("`{0}` is not the name of a plan")]
    InvalidName(String),
}

impl RowTextError {
    /// Fix to suggest.
    pub const fn suggested_fix(&self) -> &'static str {
        match self {
            Self::NotUtf8 | Self::Empty | Self::InvalidName(_) => {
                "write the name of a plan, or a limit such as 500/minute"
            }
            Self::InvalidLimit(_) => "write a number and a unit, such as 500/minute or 100/5 minutes",
        }
    }
}

/// Maximum length of the name of a plan or of a table, in bytes.
const MAX_NAME_BYTES: usize = 64;
/// Maximum number of characters of a text in a message.
const MAX_QUOTED_CHARS: usize = 40;

/// Returns true if a plan or a table can have this name: letters, digits, `_` and `-`.
pub fn is_valid_plan_or_table_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(is_allowed)
}

impl<'a> RowValue<'a> {
    /// Parses the name of a plan, or a limit: `NUMBER/UNIT` or `NUMBER/MULTIPLIER UNITs`. Blanks around it are ignored.
    ///
    /// # Errors
    /// The text is neither.
    pub fn parse(text: &'a [u8]) -> Result<Self, RowTextError> {
        let text = std::str::from_utf8(text).map_err(|_| RowTextError::NotUtf8)?.trim();
        let quoted = || text.chars().take(MAX_QUOTED_CHARS).collect();
        match text.split_once('/') {
            _ if text.is_empty() => Err(RowTextError::Empty),
            Some((requests, period)) => {
                let limit = parse_own_limit(requests.trim(), period.trim());
                limit.map(Self::Own).ok_or_else(|| RowTextError::InvalidLimit(quoted()))
            }
            None if is_valid_plan_or_table_name(text) => Ok(Self::Plan(text)),
            None => Err(RowTextError::InvalidName(quoted())),
        }
    }
}

fn parse_own_limit(requests: &str, period: &str) -> Option<OwnLimit> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let requests_per_unit = requests.parse().ok().filter(|_| is_number(requests))?;
    let digits = period.bytes().take_while(u8::is_ascii_digit).count();
    let (multiplier, unit) = period.split_at(digits);
    let multiplier = if multiplier.is_empty() { 1 } else { multiplier.parse().ok()? };
    let unit = unit.trim();
    let unit = Unit::from_name(unit).or_else(|| Unit::from_name(unit.strip_suffix('s').filter(|_| multiplier > 1)?))?;
    Some(OwnLimit { requests_per_unit, period: Period::new(unit, multiplier)? })
}

/// Writes `500/minute`, as it can be parsed again.
impl fmt::Display for OwnLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = self.period.unit().name();
        match self.period.multiplier() {
            1 => write!(f, "{}/{unit}", self.requests_per_unit),
            multiplier => write!(f, "{}/{multiplier} {unit}s", self.requests_per_unit),
        }
    }
}

/// Encoding of a row: bit 0 is set; bit 1 tells limits from plans; then the index of a plan, or three bits for the
/// unit, 27 for the multiplier and 32 for the hits. The longest period has fewer than 2^25 seconds.
const USED_BIT: u64 = 1;
const OWN_LIMIT_BIT: u64 = 2;
const UNIT_SHIFT: u32 = 2;
const MULTIPLIER_SHIFT: u32 = 5;
const HITS_SHIFT: u32 = 32;

impl PackedRow {
    /// Packs the row; never 0.
    pub(super) fn pack(self) -> u64 {
        match self {
            Self::Plan(index) => USED_BIT | u64::from(index) << UNIT_SHIFT,
            Self::Own(OwnLimit { requests_per_unit, period }) => {
                let unit = (period.unit() as u64) << UNIT_SHIFT;
                let multiplier = u64::from(period.multiplier()) << MULTIPLIER_SHIFT;
                USED_BIT | OWN_LIMIT_BIT | unit | multiplier | u64::from(requests_per_unit) << HITS_SHIFT
            }
        }
    }

    /// Unpacks a row that [`PackedRow::pack`] made.
    #[expect(clippy::cast_possible_truncation, reason = "each part has as many bits as it is masked to")]
    pub(super) fn unpack(row: u64) -> Self {
        if row & OWN_LIMIT_BIT == 0 {
            return Self::Plan((row >> UNIT_SHIFT) as u16);
        }
        let unit = Unit::ALL.get((row >> UNIT_SHIFT & 0b111) as usize).copied().unwrap_or(Unit::Second);
        let multiplier = (row >> MULTIPLIER_SHIFT) as u32 & ((1 << (HITS_SHIFT - MULTIPLIER_SHIFT)) - 1);
        let period = Period::new(unit, multiplier).unwrap_or(const { Period::new(Unit::Second, 1).expect("a second") });
        Self::Own(OwnLimit { requests_per_unit: (row >> HITS_SHIFT) as u32, period })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_and_names_are_parsed() {
        let own = |text: &str| match RowValue::parse(text.as_bytes()) {
            Ok(RowValue::Own(own)) => own.to_string(),
            other => format!("{other:?}"),
        };
        for (text, expected) in [
            ("500/minute", "500/minute"),
            (" 500 / Minute ", "500/minute"),
            ("100/5 minutes", "100/5 minutes"),
            ("100/5minute", "100/5 minutes"),
            ("0/day", "0/day"),
        ] {
            assert_eq!(own(text), expected);
        }
        for text in
            ["500/minutes", "/minute", "+5/minute", "5/", "5/0 minutes", "5/eon", "4294967296/hour", "1/367 days"]
        {
            assert!(matches!(RowValue::parse(text.as_bytes()), Err(RowTextError::InvalidLimit(_))), "{text}");
        }
        assert_eq!(RowValue::parse(b" gold "), Ok(RowValue::Plan("gold")));
        assert_eq!(RowValue::parse(b""), Err(RowTextError::Empty));
        assert_eq!(RowValue::parse(b"\xff"), Err(RowTextError::NotUtf8));
        assert!(matches!(RowValue::parse(b"a b"), Err(RowTextError::InvalidName(_))));
    }
}

//! The period of a limit: a unit of time times a multiplier, 366 days at most.
//!
//! A unit is one row of a table. Units have fixed lengths: a month is 30 days and a year 365 days. Only fixed windows
//! of months can follow the calendar instead.
//!
//! Decides: which units and multipliers there are; the length of a month (30 days) and of a year.

use std::fmt;

/// A day in microseconds.
const DAY_US: u64 = 86_400_000_000;

/// Maximum length of a period, in microseconds: 366 days.
pub const MAX_PERIOD_US: u64 = 366 * DAY_US;

/// Number of a unit in protobuf; it is the same in every enum that has the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProtobufUnitNumber {
    /// `envoy.type.v3.RateLimitUnit` has the unit, and so has `RateLimitResponse.RateLimit.Unit`.
    Envoy(i32),
    /// Only `RateLimitResponse.RateLimit.Unit` of the rate limit service has the unit.
    Service(i32),
}

/// A unit's row in the table of units.
struct UnitProperties {
    /// Name in rule files: lower case, singular.
    name: &'static str,
    seconds: u64,
    /// `None` for a unit that protobuf lacks: responses then name no unit.
    number: Option<ProtobufUnitNumber>,
}

/// Declares the table of units.
macro_rules! define_units {
    ($($(#[$attribute:meta])* $variant:ident: $properties:expr;)*) => {
        /// Unit of a period.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Unit {
            $($(#[$attribute])* $variant,)*
        }

        impl Unit {
            /// All units, shortest first.
            pub const ALL: [Self; [$(stringify!($variant)),*].len()] = [$(Self::$variant),*];

            /// Row of the table.
            const fn properties(self) -> UnitProperties {
                match self {
                    $(Self::$variant => $properties,)*
                }
            }
        }
    };
}

define_units! {
    /// 1 s.
    Second: UnitProperties { name: "second", seconds: 1, number: Some(ProtobufUnitNumber::Envoy(1)) };
    /// 60 s.
    Minute: UnitProperties { name: "minute", seconds: 60, number: Some(ProtobufUnitNumber::Envoy(2)) };
    /// 3600 s.
    Hour: UnitProperties { name: "hour", seconds: 3600, number: Some(ProtobufUnitNumber::Envoy(3)) };
    /// 86 400 s.
    Day: UnitProperties { name: "day", seconds: 86_400, number: Some(ProtobufUnitNumber::Envoy(4)) };
    /// 7 days; windows begin on Thursdays, because the Unix epoch did.
    Week: UnitProperties { name: "week", seconds: 7 * 86_400, number: Some(ProtobufUnitNumber::Service(7)) };
    /// 30 days.
    Month: UnitProperties { name: "month", seconds: 30 * 86_400, number: Some(ProtobufUnitNumber::Envoy(5)) };
    /// 365 days.
    Year: UnitProperties { name: "year", seconds: 365 * 86_400, number: Some(ProtobufUnitNumber::Envoy(6)) };
}

impl Unit {
    /// Name in rule files: lower case, singular.
    pub const fn name(self) -> &'static str {
        self.properties().name
    }

    /// Returns the unit of that name; ignores case.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|unit| unit.name().eq_ignore_ascii_case(name))
    }

    /// Length in seconds.
    pub const fn seconds(self) -> u64 {
        self.properties().seconds
    }

    /// Number of the unit in `RateLimitResponse.RateLimit.Unit`; `None` if that lacks the unit.
    pub const fn protobuf_number(self) -> Option<i32> {
        match self.properties().number {
            Some(ProtobufUnitNumber::Envoy(number) | ProtobufUnitNumber::Service(number)) => Some(number),
            None => None,
        }
    }

    /// Returns the unit of a number in `RateLimitResponse.RateLimit.Unit`.
    pub fn from_protobuf_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|unit| unit.protobuf_number() == Some(number))
    }

    /// Returns true if `envoy.type.v3.RateLimitUnit` has the unit.
    pub const fn is_in_envoy_unit_enum(self) -> bool {
        matches!(self.properties().number, Some(ProtobufUnitNumber::Envoy(_)))
    }
}

/// Period of a limit: a unit times a multiplier, 366 days at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Period {
    unit: Unit,
    multiplier: u32,
}

impl Period {
    /// Creates a period of `multiplier` units; `None` if that is 0 or longer than 366 days.
    pub const fn new(unit: Unit, multiplier: u32) -> Option<Self> {
        let period = Self { unit, multiplier };
        // Compare in seconds: seconds x multiplier fits in 64 bits; in microseconds it would overflow.
        let seconds = unit.seconds() * multiplier as u64;
        if multiplier == 0 || seconds > MAX_PERIOD_US / 1_000_000 { None } else { Some(period) }
    }

    /// Creates a period of whole seconds, in the largest unit up to days that fits; `None` for parts of a second, 0, or
    /// more than 366 days.
    pub fn from_micros(micros: u64) -> Option<Self> {
        let seconds = Some(micros / 1_000_000).filter(|_| micros.is_multiple_of(1_000_000))?;
        let units = [Unit::Day, Unit::Hour, Unit::Minute, Unit::Second];
        let unit = units.into_iter().find(|unit| seconds.is_multiple_of(unit.seconds()))?;
        Self::new(unit, u32::try_from(seconds / unit.seconds()).ok()?)
    }

    /// Unit as written.
    pub const fn unit(self) -> Unit {
        self.unit
    }

    /// Multiplier as written, at least 1.
    pub const fn multiplier(self) -> u32 {
        self.multiplier
    }

    /// Length in microseconds; months are 30 days and years 365.
    pub const fn micros(self) -> u64 {
        self.unit.seconds() * self.multiplier as u64 * 1_000_000
    }
}

/// Returns `count` units in words: `minute` or `5 minutes`.
pub fn period_in_words(unit: &str, count: u32) -> String {
    if count == 1 { unit.to_owned() } else { format!("{count} {unit}s") }
}

/// Writes `minute` or `5_minute`, the form used in counter keys and metric names.
impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.multiplier {
            1 => f.write_str(self.unit.name()),
            multiplier => write!(f, "{multiplier}_{}", self.unit.name()),
        }
    }
}

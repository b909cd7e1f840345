//! The period of a limit: a unit of time times a multiplier, 366 days at most.
//!
//! Units have fixed lengths: a month is 30 days and a year 365 days. Only fixed windows of months can follow the
//! calendar instead.

use std::fmt;

/// A day in microseconds.
const DAY_US: u64 = 86_400_000_000;

/// Maximum length of a period, in microseconds: 366 days.
pub const MAX_PERIOD_US: u64 = 366 * DAY_US;

/// Unit of a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unit {
    /// 1 s.
    Second,
    /// 60 s.
    Minute,
    /// 3600 s.
    Hour,
    /// 86 400 s.
    Day,
    /// 30 days.
    Month,
    /// 365 days.
    Year,
    /// 7 days; windows begin on Thursdays, because the Unix epoch did.
    Week,
}

impl Unit {
    /// All units, shortest first.
    pub const ALL: [Self; 7] = [Self::Second, Self::Minute, Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year];

    /// Name in rule files: lower case, singular.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Second => "second",
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
            Self::Year => "year",
        }
    }

    /// Returns the unit of that name; ignores case.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|unit| unit.name().eq_ignore_ascii_case(name))
    }

    /// Number of the unit in `RateLimitResponse.RateLimit.Unit`.
    pub const fn number(self) -> i32 {
        match self {
            Self::Second => 1,
            Self::Minute => 2,
            Self::Hour => 3,
            Self::Day => 4,
            Self::Month => 5,
            Self::Year => 6,
            Self::Week => 7,
        }
    }

    /// Length in seconds.
    pub const fn seconds(self) -> u64 {
        match self {
            Self::Second => 1,
            Self::Minute => 60,
            Self::Hour => 3600,
            Self::Day => 86_400,
            Self::Week => 7 * 86_400,
            Self::Month => 30 * 86_400,
            Self::Year => 365 * 86_400,
        }
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

/// Writes `minute` or `5_minute`, the form used in counter keys and metric names.
impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.multiplier {
            1 => f.write_str(self.unit.name()),
            multiplier => write!(f, "{multiplier}_{}", self.unit.name()),
        }
    }
}

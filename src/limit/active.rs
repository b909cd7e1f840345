//! Times of the week, and days of the calendar, at which a limit is active: outside them it does not exist.
//!
//! A span begins on each of its days, from `first_day` to `last_day`, at `from` and lasts until `to`, on the next day if `to` is not later than `from`.
//! Both are local times, so a span is an hour longer or shorter where the clock changes. The days name the day on which
//! a span begins.
//!
//! [`ActiveTimes`] is interned and remembers until when its last answer holds, so a decision costs a comparison.
//!
//! Decides: when a limit is active, also with two spans at once.
//! Decides: which texts are weekdays or ranges of days (`fri-mon`).

use std::fmt;

use super::calendar::{CalendarDay, InternedValues, TimeOfDay, Weekday, Zone};
use super::window::{CachedBounds, WindowBounds};
use crate::base::clock::Time;

/// Minutes of a day.
const DAY_MINUTES: usize = 1440;

/// Set of weekdays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Weekdays(u8);

impl Weekdays {
    /// All days.
    pub const ALL: Self = Self(0x7f);

    /// No day.
    pub const NONE: Self = Self(0);

    /// Parses days and ranges of days, such as `mon-fri` or `sat,sun`. A range may pass Sunday.
    pub fn parse(text: &str) -> Option<Self> {
        let day = |name: &str| Weekday::from_name(&name.trim().to_ascii_lowercase()).map(|day| day as u8);
        text.split(',').try_fold(Self::NONE, |days, part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (day(first)?, day(last)?);
            let count = (last + 7 - first) % 7;
            Some((0..=count).fold(days, |days, offset| Self(days.0 | 1 << ((first + offset) % 7))))
        })
    }

    /// Returns the days of both sets.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    const fn contains(self, day: Weekday) -> bool {
        self.0 >> (day as u8) & 1 == 1
    }
}

/// Writes `mon,tue`, which [`Weekdays::parse`] reads.
impl fmt::Display for Weekdays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let days = Weekday::ALL.into_iter().filter(|day| self.contains(*day));
        let names: Vec<&str> = days.map(|day| &day.name()[..3]).collect();
        f.write_str(&names.join(","))
    }
}

/// `active` of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ActiveSpec {
    /// Days on which a span begins, at least one.
    pub days: Weekdays,
    /// First day on which one begins; `None`: there were always some.
    pub first_day: Option<CalendarDay>,
    /// Last day on which one begins; `None`: there will always be some.
    pub last_day: Option<CalendarDay>,
    /// Start of a span.
    pub from: TimeOfDay,
    /// End of a span; 00:00 is the end of the day if `from` is 00:00 too.
    pub to: TimeOfDay,
    /// Zone of the times.
    pub zone: Zone,
}

impl ActiveSpec {
    /// Returns `true` if a span begins on the day with this number.
    fn begins_on(&self, day: i64) -> bool {
        self.days.contains(Weekday::of_day_number(day))
            && self.first_day.is_none_or(|first| first.day_number() <= day)
            && self.last_day.is_none_or(|last| day <= last.day_number())
    }

    /// Returns `true` if the last span ends before the first one of `other` begins, in the same zone.
    fn ends_before(&self, other: &Self) -> bool {
        let ends_on_next_day = self.to <= self.from && self.to != TimeOfDay::default();
        let end = self.last_day.map(|last| last.day_number() + i64::from(ends_on_next_day));
        end.zip(other.first_day).is_some_and(|(end, first)| end < first.day_number())
    }

    /// Marks the minutes of the week that are active, from Monday on.
    fn mark_active_minutes(&self, minutes: &mut [bool]) {
        let (from, to) =
            (usize::from(self.from.minutes_since_midnight()), usize::from(self.to.minutes_since_midnight()));
        let length = if to > from { to - from } else { to + DAY_MINUTES - from };
        for (index, _) in Weekday::ALL.into_iter().enumerate().filter(|(_, day)| self.days.contains(*day)) {
            let start = index * DAY_MINUTES + from;
            (start..start + length).for_each(|minute| minutes[minute % (7 * DAY_MINUTES)] = true);
        }
    }

    /// Returns `true` if both can be active at once. Times in different zones count as such.
    pub fn overlaps(&self, other: &Self) -> bool {
        let minutes = |spec: &Self| {
            let mut minutes = vec![false; 7 * DAY_MINUTES];
            spec.mark_active_minutes(&mut minutes);
            minutes
        };
        let follow_each_other = self.ends_before(other) || other.ends_before(self);
        let share_minutes = || minutes(self).into_iter().zip(minutes(other)).any(|(one, other)| one && other);
        self.zone != other.zone || !follow_each_other && share_minutes()
    }
}

/// Writes the value of `active` in a rule file.
impl fmt::Display for ActiveSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { days, first_day, last_day, from, to, zone } = self;
        f.write_str("{")?;
        for (key, day) in [("first_day", first_day), ("last_day", last_day)] {
            day.map_or(Ok(()), |day| write!(f, "{key}: {day}, "))?;
        }
        write!(f, "days: \"{days}\", from: \"{from}\", ")?;
        // The whole day, which has no end that could be written.
        if from != to {
            write!(f, "to: \"{to}\", ")?;
        }
        write!(f, "timezone: {}}}", zone.name())
    }
}

/// Times at which a limit is active.
#[derive(Clone, Copy)]
pub struct ActiveTimes(&'static InternedTimes);

struct InternedTimes {
    spec: ActiveSpec,
    /// Last answer: the time for which it holds, and whether the limit is active.
    answer: CachedBounds,
}

/// Definitions in use, each once: a reload of the same rules adds none.
static INTERNED_TIMES: InternedValues<ActiveSpec, InternedTimes> = InternedValues::new();

impl ActiveTimes {
    /// Returns the times of a definition.
    pub fn new(spec: ActiveSpec) -> Self {
        let make = |spec: &ActiveSpec| InternedTimes { spec: *spec, answer: CachedBounds::default() };
        Self(INTERNED_TIMES.get_or_insert_with(spec, make))
    }

    /// Definition of the times.
    pub fn spec(self) -> ActiveSpec {
        self.0.spec
    }

    /// Returns `true` if the limit is active at `at`; beyond the year 9999 it is.
    pub fn contains(self, at: Time) -> bool {
        let found = self.0.answer.find_or_compute(at, || self.find_activity_span(at));
        found.is_none_or(|(_, is_active)| is_active)
    }

    /// Finds the span around `at` in which the limit is, or is not, active, and which of both; `None` beyond the year
    /// 9999.
    fn find_activity_span(self, at: Time) -> Option<(WindowBounds, bool)> {
        let ActiveSpec { from, to, zone, .. } = self.0.spec;
        let at_s = i64::try_from(at.as_micros() / 1_000_000).ok()?;
        let today = zone.local_time(at)?.day;
        // The days around one on which a span begins.
        let (mut before, mut after) = (i64::MIN, i64::MAX);
        for day in (today - 8..=today + 8).filter(|day| self.0.spec.begins_on(*day)) {
            let start_s = zone.unix_seconds_of_local_time(day, from)?;
            let end_s = zone.unix_seconds_of_local_time(if to > from { day } else { day + 1 }, to)?;
            if start_s <= at_s && at_s < end_s {
                return Some((WindowBounds::from_unix_seconds(start_s, end_s), true));
            }
            if end_s <= at_s {
                before = before.max(end_s);
            } else {
                after = after.min(start_s);
            }
        }
        // The next span may be beyond the days that were looked at; so the answer holds for a day.
        let (start_s, end_s) = (before.max(at_s - 86_400), after.min(at_s + 86_400));
        Some((WindowBounds::from_unix_seconds(start_s, end_s), false))
    }
}

impl PartialEq for ActiveTimes {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for ActiveTimes {}

impl fmt::Debug for ActiveTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.spec(), f)
    }
}

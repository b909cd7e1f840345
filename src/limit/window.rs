//! Windows of a fixed_window that follow a calendar: days, weeks, months and years of a time zone.
//!
//! - *Days* begin at `day_starts`, so a day has 23 or 25 hours where the clock changes. Several days in one window are
//!   counted from 1970-01-01, several weeks from the week with that day, several months from January of the year 0.
//! - *Hours, minutes and seconds* are counted from the start of the day; the last window of a day ends with it.
//! - A `month_day` that a month lacks is its last day.
//!
//! [`CalendarWindows`] are interned with the period of their limit, so that a [`Limit`](crate::limit::Limit) stays
//! `Copy` and a reload keeps what it has. They remember the window of now and the next one: only the first question
//! after the end of a window asks the calendar.
//!
//! Decides: on which day a window of a time zone begins; a `month_day` that a month lacks.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use super::calendar::{InternedValues, LocalTime, TimeOfDay, Weekday, Zone, day_number_in_month};
use super::period::{Period, Unit};
use crate::base::clock::Time;
use crate::base::named_enum::named_enum;

/// A day in microseconds.
const DAY_US: u64 = 86_400_000_000;

named_enum! {
    /// Length of a month in a window.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub enum MonthLength {
        /// Months of the calendar, from `month_day`.
        #[default]
        Calendar = "calendar",
        /// 30 days.
        ThirtyDays = "30_days",
    }
}

/// `window` of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WindowSpec {
    /// Zone whose clock is followed.
    pub zone: Zone,
    /// Time at which a day begins.
    pub day_starts: TimeOfDay,
    /// First day of a week.
    pub week_starts: Weekday,
    /// Length of a month.
    pub month: MonthLength,
    /// First day of a month, 1 to 31; of a year: of its January.
    pub month_day: u8,
}

impl WindowSpec {
    /// Window of a zone with all other keys at their defaults.
    pub fn in_zone(zone: Zone) -> Self {
        Self {
            zone,
            day_starts: TimeOfDay::default(),
            week_starts: Weekday::default(),
            month: MonthLength::default(),
            month_day: 1,
        }
    }

    /// Returns `false` for a period of hours, minutes or seconds that is longer than the day that it is counted in.
    pub fn applies_to(&self, period: Period) -> bool {
        match period.unit() {
            Unit::Second | Unit::Minute | Unit::Hour => period.micros() <= DAY_US,
            Unit::Day | Unit::Week | Unit::Month | Unit::Year => true,
        }
    }

    /// Returns the keys that matter for a period, so that another one does not start a new counter.
    fn without_irrelevant_keys(self, period: Period) -> Self {
        let Self { zone, day_starts, week_starts, month, month_day } = self;
        let plain = Self { day_starts, ..Self::in_zone(zone) };
        match period.unit() {
            Unit::Second | Unit::Minute | Unit::Hour | Unit::Day => plain,
            Unit::Week => Self { week_starts, ..plain },
            Unit::Month if month == MonthLength::ThirtyDays => Self { month, ..plain },
            Unit::Month | Unit::Year => Self { month_day, ..plain },
        }
    }
}

/// Writes the value of `window` in a rule file: `{timezone: Europe/Berlin, day_starts: "06:00"}`. Keys at their
/// defaults are left out.
impl fmt::Display for WindowSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { zone, day_starts, week_starts, month, month_day } = self;
        write!(f, "{{timezone: {}", zone.name())?;
        if *day_starts != TimeOfDay::default() {
            write!(f, ", day_starts: \"{day_starts}\"")?;
        }
        if *week_starts != Weekday::default() {
            write!(f, ", week_starts: {}", week_starts.name())?;
        }
        if *month != MonthLength::default() {
            write!(f, ", month: {}", month.name())?;
        }
        if *month_day != 1 {
            write!(f, ", month_day: {month_day}")?;
        }
        f.write_str("}")
    }
}

/// Windows of a limit, which cover all time without gaps.
#[derive(Clone, Copy)]
pub struct CalendarWindows(&'static InternedCalendar);

/// Start and end of a window; the end is the start of the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowBounds {
    /// Start.
    pub start: Time,
    /// End.
    pub end: Time,
}

impl WindowBounds {
    /// Bounds in seconds since the Unix epoch; those before it are moved to it.
    pub(super) fn from_unix_seconds(start_s: i64, end_s: i64) -> Self {
        let [start, end] = [start_s, end_s].map(|seconds| Time::from_secs(u64::try_from(seconds).unwrap_or(0)));
        Self { start, end }
    }

    fn contains(self, at: Time) -> bool {
        self.start <= at && at < self.end
    }
}

struct InternedCalendar {
    spec: WindowSpec,
    grid: BoundaryGrid,
    period: Period,
    /// Text that identifies the definition, in keys of counters.
    identity: String,
    current: CachedBounds,
    next: CachedBounds,
}

impl InternedCalendar {
    fn new(spec: &WindowSpec, period: Period) -> Self {
        let count = i64::from(period.multiplier());
        let WindowSpec { zone, day_starts, week_starts, month, month_day } = *spec;
        let (grid, first) = match period.unit() {
            Unit::Second | Unit::Minute | Unit::Hour => {
                let length_s = i64::try_from(period.micros() / 1_000_000).unwrap_or(i64::MAX);
                (BoundaryGrid::PartsOfDay { length_s }, String::new())
            }
            Unit::Day => (BoundaryGrid::Days { count, origin: 0 }, String::new()),
            Unit::Week => {
                // The week that contains 1970-01-01, a Thursday.
                let since = Weekday::Thursday.days_since_monday() - week_starts.days_since_monday();
                (
                    BoundaryGrid::Days { count: 7 * count, origin: -since.rem_euclid(7) },
                    format!(",{}", week_starts.name()),
                )
            }
            Unit::Month if month == MonthLength::ThirtyDays => {
                (BoundaryGrid::Days { count: 30 * count, origin: 0 }, ",30_days".to_owned())
            }
            Unit::Month => (BoundaryGrid::Months { count, day: month_day }, format!(",{month_day}")),
            Unit::Year => (BoundaryGrid::Months { count: 12 * count, day: month_day }, format!(",{month_day}")),
        };
        let minutes = day_starts.minutes_since_midnight();
        let identity = format!("{period}@{}{first},{:02}{:02}", zone.name(), minutes / 60, minutes % 60);
        let (current, next) = Default::default();
        Self { spec: *spec, grid, period, identity, current, next }
    }
}

/// Boundaries of windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BoundaryGrid {
    /// Every `length_s` seconds from the start of a day.
    PartsOfDay { length_s: i64 },
    /// Every `count` days, one of them on day `origin` since 1970-01-01.
    Days { count: i64, origin: i64 },
    /// On a day of every `count`th month.
    Months { count: i64, day: u8 },
}

/// Definitions in use, each once: a reload of the same rules adds none. Limits of requests add at most one for each
/// period, of which there are fewer than 100 000 beside each `window` of `defaults`.
static INTERNED_CALENDARS: InternedValues<(WindowSpec, Period), InternedCalendar> = InternedValues::new();

impl CalendarWindows {
    /// Returns the windows of a limit; `None` for a period of hours, minutes or seconds that is longer than a day.
    pub fn new(spec: &WindowSpec, period: Period) -> Option<Self> {
        if !spec.applies_to(period) {
            return None;
        }
        let key = (spec.without_irrelevant_keys(period), period);
        Some(Self(INTERNED_CALENDARS.get_or_insert_with(key, |(spec, period)| InternedCalendar::new(spec, *period))))
    }

    /// Returns the window that contains `at`. Beyond the year 9999 windows have the length of the period.
    pub fn bounds_at(self, at: Time) -> WindowBounds {
        self.find_or_compute_bounds(&self.0.current, at)
    }

    /// Returns the window that contains `at`, a time after the window of now, and remembers it apart from that one.
    pub fn bounds_at_later_time(self, at: Time) -> WindowBounds {
        self.find_or_compute_bounds(&self.0.next, at)
    }

    /// The definition, with the keys that have no effect on the period at their defaults.
    pub fn spec(self) -> WindowSpec {
        self.0.spec
    }

    /// Text that identifies the definition, such as `month@Europe/Berlin,15,0600`.
    pub fn identity(self) -> &'static str {
        &self.0.identity
    }

    fn find_or_compute_bounds(self, cached: &CachedBounds, at: Time) -> WindowBounds {
        let found = cached.find_or_compute(at, || Some((self.calendar_bounds(at)?, false)));
        found.map(|(bounds, _)| bounds).unwrap_or_else(|| {
            let length_us = self.0.period.micros();
            let start = Time::from_micros(at.as_micros() / length_us * length_us);
            WindowBounds { start, end: start.plus_us(length_us) }
        })
    }

    fn calendar_bounds(self, at: Time) -> Option<WindowBounds> {
        let local = self.0.spec.zone.local_time(at)?;
        let at_s = i64::try_from(at.as_micros() / 1_000_000).ok()?;
        let (start_s, end_s) = match self.0.grid {
            BoundaryGrid::PartsOfDay { length_s } => {
                let (day_s, day_end_s) =
                    self.find_boundaries(BoundaryGrid::Days { count: 1, origin: 0 }, local, at_s)?;
                let start_s = day_s + (at_s - day_s) / length_s * length_s;
                (start_s, (start_s + length_s).min(day_end_s))
            }
            grid @ (BoundaryGrid::Days { .. } | BoundaryGrid::Months { .. }) => {
                self.find_boundaries(grid, local, at_s)?
            }
        };
        Some(WindowBounds::from_unix_seconds(start_s, end_s))
    }

    /// Returns the last boundary up to `at_s`, and the first one after it.
    fn find_boundaries(self, grid: BoundaryGrid, local: LocalTime, at_s: i64) -> Option<(i64, i64)> {
        let boundary_s =
            |index| self.0.spec.zone.unix_seconds_of_local_time(grid.day_of_boundary(index)?, self.0.spec.day_starts);
        let mut index = grid.last_boundary_index(local)?;
        // The day may not have begun yet, or the day after it already, where the clock is put back at midnight.
        while boundary_s(index)? > at_s {
            index -= 1;
        }
        while boundary_s(index + 1)? <= at_s {
            index += 1;
        }
        Some((boundary_s(index)?, boundary_s(index + 1)?))
    }
}

impl BoundaryGrid {
    /// Index of a boundary on the local day, or of the last one before it.
    fn last_boundary_index(self, local: LocalTime) -> Option<i64> {
        match self {
            Self::PartsOfDay { .. } => None,
            Self::Days { count, origin } => Some((local.day - origin).div_euclid(count)),
            Self::Months { count, .. } => Some(local.month_number()?.div_euclid(count)),
        }
    }

    /// Day of a boundary, in days since 1970-01-01.
    fn day_of_boundary(self, index: i64) -> Option<i64> {
        match self {
            Self::PartsOfDay { .. } => None,
            Self::Days { count, origin } => Some(index * count + origin),
            Self::Months { count, day } => day_number_in_month(index * count, day),
        }
    }
}

/// Bounds of a time and a flag of it, in one word, so that readers never see a part of two: the start in seconds since
/// the Unix epoch, the flag, and the length in seconds in the lower 26 bits. 0: none.
#[derive(Default)]
pub(super) struct CachedBounds(AtomicU64);

/// Bits of the length: up to 776 days.
const LENGTH_BITS: u32 = 26;
/// Bits of the flag and the length.
const FLAG_AND_LENGTH_BITS: u32 = LENGTH_BITS + 1;

impl CachedBounds {
    /// Returns the remembered bounds and flag if they contain `at`, else the computed ones, which it remembers.
    #[inline]
    pub(super) fn find_or_compute(
        &self,
        at: Time,
        compute: impl FnOnce() -> Option<(WindowBounds, bool)>,
    ) -> Option<(WindowBounds, bool)> {
        let packed = self.0.load(Ordering::Relaxed);
        let start = Time::from_micros((packed >> FLAG_AND_LENGTH_BITS) * 1_000_000);
        let end = start.plus_us((packed & ((1 << LENGTH_BITS) - 1)) * 1_000_000);
        let cached = WindowBounds { start, end };
        if cached.contains(at) {
            return Some((cached, packed >> LENGTH_BITS & 1 == 1));
        }
        let (bounds, flag) = compute()?;
        let (start_s, length_s) = (bounds.start.as_micros() / 1_000_000, bounds.end.since_us(bounds.start) / 1_000_000);
        if start_s < 1 << (u64::BITS - FLAG_AND_LENGTH_BITS) && length_s < 1 << LENGTH_BITS {
            let packed = start_s << FLAG_AND_LENGTH_BITS | u64::from(flag) << LENGTH_BITS | length_s;
            self.0.store(packed, Ordering::Relaxed);
        }
        Some((bounds, flag))
    }
}

impl PartialEq for CalendarWindows {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for CalendarWindows {}

impl fmt::Debug for CalendarWindows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.identity())
    }
}

/// Writes the windows for people: `in windows of Europe/Berlin from 06:00`.
impl fmt::Display for CalendarWindows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "in windows of {} from {}", self.0.spec.zone.name(), self.0.spec.day_starts)?;
        match self.0.grid {
            BoundaryGrid::Months { day, .. } if day > 1 => write!(f, " on day {day}"),
            BoundaryGrid::Days { origin, .. } if self.0.period.unit() == Unit::Week => {
                write!(f, " on {}", Weekday::of_day_number(origin).name())
            }
            BoundaryGrid::PartsOfDay { .. } | BoundaryGrid::Days { .. } | BoundaryGrid::Months { .. } => Ok(()),
        }
    }
}

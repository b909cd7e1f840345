//! The keys of a limit that concern time: `window`, `ban`, `reservations`, `active`.
//!
//! Decides: times of day, weekdays, time zones; a `ban` of 0 or without `for`.

use std::num::NonZeroU32;

use super::fields::{DocumentReader, Field};
use super::keys::{ReadValue, rule_keys};
use super::value::{InvalidValue, parse_duration_us};
use crate::limit::active::{ActiveSpec, Weekdays};
use crate::limit::ban::{Ban, MAX_REJECTIONS_BEFORE_BAN};
use crate::limit::calendar::{CalendarDay, TimeOfDay, Weekday, Zone};
use crate::limit::reservation::{DEFAULT_SETTLE_WITHIN_S, ReservationPolicy, UnsettledPolicy};
use crate::limit::window::{MonthLength, WindowSpec};
use crate::rules::diagnostic::escape_for_message;
use crate::rules::key_table::{Section, ValueKind};
use crate::rules::yaml::{Scalar, Spanned, YamlContent};

rule_keys! {
    /// Value of `window`.
    #[derive(Clone, Copy, Debug, Default)]
    pub struct WindowKeys of [Window] {
        tollkeeper "timezone" zone: Option<Spanned<Zone>> = "UTC",
            "Time zone of IANA's database, such as Europe/Berlin, whose data is built in. A day has 23 or 25 hours where its clock changes.";
        tollkeeper "day_starts" day_starts: Option<Spanned<TimeOfDay>> = "00:00",
            "Local time at which a day begins, and with it a week, a month and a year. Hours, minutes and seconds are counted from it.";
        tollkeeper "week_starts" week_starts: Option<Spanned<Weekday>> = "monday", "First day of a week.";
        tollkeeper "month" month: Option<Spanned<MonthLength>> = "calendar",
            "calendar: months begin on month_day. 30_days: every 30 days, counted from 1970-01-01.";
        tollkeeper "month_day" month_day: Option<Spanned<u32>> as Count(1, 31) = "1",
            "Day on which a month begins, and a year in its January. In a month without that day: its last day.";
    }
}

rule_keys! {
    /// Value of `ban`, written as a mapping.
    #[derive(Clone, Copy, Debug, Default)]
    pub struct BanKeys of [Ban] {
        tollkeeper "for" length: Option<Spanned<BanLength>>, "Length of the ban. Required.";
        tollkeeper "after" after: Option<Spanned<u32>> as Count(1, MAX_REJECTIONS_BEFORE_BAN as u64) = "1",
            "The ban begins with this rejection. Rejections add up as long as less than a period lies between two.";
        tollkeeper "count_peeks" count_peeks: bool = "false", "Rejected peeks (0 hits) are rejections too.";
    }
}

rule_keys! {
    /// Value of `reservations`, written as a mapping.
    #[derive(Clone, Copy, Debug, Default)]
    pub struct ReservationKeys of [ReservationPolicy] {
        tollkeeper "settle_within" settle_within_us: Option<Spanned<u64>> as WholeSeconds = "10m",
            "Time after which an estimate is not settled any more, in whole seconds. Longer than any stream.";
        tollkeeper "unsettled" unsettled: Option<Spanned<UnsettledPolicy>> = "keep",
            "What becomes of an estimate that is not settled in time: keep (it stays charged) or return (it is given back when hits are lacking).";
        tollkeeper "estimate" estimate: Option<Spanned<u32>> as Count(1, u32::MAX as u64),
            "Estimate of every request. If absent: its hits_addend.";
    }
}

rule_keys! {
    /// Value of `active`.
    #[derive(Clone, Copy, Debug, Default)]
    pub struct ActiveKeys of [Active] {
        tollkeeper "days" days: Option<Spanned<Weekdays>> = "mon-sun",
            "Days on which the limit becomes active: mon-fri, sat,sun, or a list.";
        tollkeeper "first_day" first_day: Option<Spanned<CalendarDay>>,
            "First day on which the limit becomes active: YYYY-MM-DD. If absent: it always was.";
        tollkeeper "last_day" last_day: Option<Spanned<CalendarDay>>,
            "Last day on which the limit becomes active: YYYY-MM-DD. If absent: it always will be.";
        tollkeeper "from" from: Option<Spanned<TimeOfDay>> = "00:00", "Local time at which the limit becomes active.";
        tollkeeper "to" to: Option<Spanned<TimeOfDay>>,
            "Local time at which the limit ends, on the next day unless it is later than from. If absent: at the end of the day.";
        tollkeeper "timezone" zone: Option<Spanned<Zone>> = "UTC",
            "Time zone of IANA's database, such as Europe/Berlin, whose data is built in. A day has 23 or 25 hours where its clock changes.";
    }
}

impl ReadValue for WindowSpec {
    const KIND: ValueKind = ValueKind::Table(Section::Window);

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let mut keys = WindowKeys::default();
        if !reader.read_section(&mut keys, field.node, Section::Window, &field.path) {
            return None;
        }
        let mut window = Self::in_zone(value_or(keys.zone, Zone::utc()));
        window.day_starts = value_or(keys.day_starts, window.day_starts);
        window.week_starts = value_or(keys.week_starts, window.week_starts);
        window.month = value_or(keys.month, window.month);
        if let Some(day) = keys.month_day {
            if window.month == MonthLength::ThirtyDays {
                let message = "`month_day` does not apply to months of 30 days";
                let field_path = field.path.with_key("month_day");
                reader.report_error(day.at, &field_path, message, "remove it, or `month: 30_days`");
            }
            // The row bounds the number.
            window.month_day = u8::try_from(day.value).unwrap_or(1);
        }
        Some(window)
    }
}

/// A duration, or a mapping with the duration and the rejections before the ban.
impl ReadValue for Ban {
    const KIND: ValueKind = ValueKind::DurationOrTable(Section::Ban);

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let YamlContent::Map(_) = field.node.content else {
            return Self::new(BanLength::read_value(reader, field)?.0, 1);
        };
        let errors = reader.found.error_count();
        let mut keys = BanKeys::default();
        if !reader.read_section(&mut keys, field.node, Section::Ban, &field.path) {
            return None;
        }
        let Some(length) = keys.length else {
            if reader.found.error_count() == errors {
                let hint = "write `for`, such as `for: 10m`";
                reader.report_error(field.at, &field.path.with_key("for"), "a `ban` without a length", hint);
            }
            return None;
        };
        Some(Self::new(length.value.0, value_or(keys.after, 1))?.with_count_of_peeks(keys.count_peeks))
    }
}

/// Length of a ban, in microseconds; not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BanLength(u64);

impl ReadValue for BanLength {
    const KIND: ValueKind = ValueKind::Duration;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        reader.read_scalar(field, |scalar| match parse_duration_us(scalar.text())? {
            0 => Err(InvalidValue { message: "a `ban` of 0".to_owned(), hint: "remove it".to_owned() }),
            length_us => Ok(Self(length_us)),
        })
    }
}

/// The time within which reservations are settled, or a mapping.
impl ReadValue for ReservationPolicy {
    const KIND: ValueKind = ValueKind::DurationOrTable(Section::ReservationPolicy);

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let mut keys = ReservationKeys::default();
        let errors = reader.found.error_count();
        let within_us = if let YamlContent::Map(_) = field.node.content {
            reader.read_section(&mut keys, field.node, Section::ReservationPolicy, &field.path);
            keys.settle_within_us.map(|within| within.value)
        } else {
            reader.read_whole_seconds(field, "settle_within")
        };
        if reader.found.error_count() > errors {
            return None;
        }
        let within_s = within_us.and_then(|within_us| u32::try_from(within_us / 1_000_000).ok());
        let estimate = keys.estimate.and_then(|estimate| NonZeroU32::new(estimate.value));
        let unsettled = value_or(keys.unsettled, UnsettledPolicy::default());
        Self::new(within_s.unwrap_or(DEFAULT_SETTLE_WITHIN_S), unsettled, estimate)
    }
}

impl ReadValue for ActiveSpec {
    const KIND: ValueKind = ValueKind::Table(Section::Active);

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let mut keys = ActiveKeys::default();
        let errors = reader.found.error_count();
        reader.read_section(&mut keys, field.node, Section::Active, &field.path);
        let midnight = TimeOfDay::default();
        let active = Self {
            days: value_or(keys.days, Weekdays::ALL),
            first_day: keys.first_day.map(|day| day.value),
            last_day: keys.last_day.map(|day| day.value),
            from: value_or(keys.from, midnight),
            to: value_or(keys.to, midnight),
            zone: value_or(keys.zone, Zone::utc()),
        };
        if let Some(to) = keys.to.filter(|to| to.value == active.from) {
            let message = format!("`active` from {} to {}", active.from, to.value);
            reader.report_error(to.at, &field.path.with_key("to"), message, "leave both out for whole days");
        }
        if let (Some(first), Some(last)) = (active.first_day, keys.last_day)
            && last.value < first
        {
            let message = format!("`active` from {first} to {}", last.value);
            reader.report_error(last.at, &field.path.with_key("last_day"), message, "write a later last_day");
        }
        (reader.found.error_count() == errors).then_some(active)
    }
}

/// Days as text, `mon-fri` or `sat,sun`, or as a list of such.
impl ReadValue for Weekdays {
    const KIND: ValueKind = ValueKind::Days;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        let invalid = |text: &str| InvalidValue {
            message: format!("`{}` is no day of the week, and no range of days", escape_for_message(text)),
            hint: "write days and ranges of days, such as mon-fri or sat,sun".to_owned(),
        };
        let YamlContent::List(list) = &field.node.content else {
            return reader
                .read_scalar(field, |scalar| Self::parse(scalar.text()).ok_or_else(|| invalid(scalar.text())));
        };
        let mut days = Self::NONE;
        for (index, node) in list.iter().enumerate() {
            let text = node.as_scalar().map_or("", Scalar::text);
            match Self::parse(text) {
                Some(more) => days = days.union(more),
                None => {
                    let InvalidValue { message, hint } = invalid(text);
                    reader.report_error(node.at, &field.path.with_index(index), message, hint);
                }
            }
        }
        if list.is_empty() {
            reader.report_error(field.at, &field.path, "an empty list of days", invalid("").hint);
        }
        Some(days)
    }
}

impl ReadValue for Zone {
    const KIND: ValueKind = ValueKind::Text;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        reader.read_scalar(field, |scalar| {
            Self::from_name(scalar.text()).ok_or_else(|| InvalidValue {
                message: format!("unknown time zone '{}'", escape_for_message(scalar.text())),
                hint: Self::nearest_name(scalar.text()).map_or_else(
                    || "write a name of IANA's database, such as Europe/Berlin".to_owned(),
                    |near| format!("did you mean `{near}`?"),
                ),
            })
        })
    }
}

impl ReadValue for CalendarDay {
    const KIND: ValueKind = ValueKind::Day;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        reader.read_scalar(field, |scalar| {
            Self::parse(scalar.text()).ok_or_else(|| InvalidValue {
                message: format!("`{}` is not a day", escape_for_message(scalar.text())),
                hint: "write it as YYYY-MM-DD, such as 2026-12-04".to_owned(),
            })
        })
    }
}

impl ReadValue for TimeOfDay {
    const KIND: ValueKind = ValueKind::TimeOfDay;

    fn read_value(reader: &mut DocumentReader<'_>, field: &Field<'_>) -> Option<Self> {
        reader.read_scalar(field, |scalar| {
            Self::parse(scalar.text()).ok_or_else(|| InvalidValue {
                message: format!("`{}` is not a time of day", escape_for_message(scalar.text())),
                hint: "write it as \"HH:MM\", from \"00:00\" to \"23:59\"".to_owned(),
            })
        })
    }
}

/// The value of a key, or another if it is not written.
fn value_or<T>(key: Option<Spanned<T>>, other: T) -> T {
    key.map_or(other, |spanned| spanned.value)
}

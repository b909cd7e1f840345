//! Reads the keys of a limit that concern time: `window`, `ban`, `reservations`, `max_duration`, `active`.
//!
//! Decides: which times keys take: `max_duration`, `settle_within`, times of day, weekdays, time zones.
//! Decides: a `ban` of 0 or without `for`.

use std::num::NonZeroU32;

use crate::limit::active::{ActiveSpec, Weekdays};
use crate::limit::ban::Ban;
use crate::limit::calendar::{TimeOfDay, Weekday, Zone};
use crate::limit::period::Period;
use crate::limit::reservation::{DEFAULT_SETTLE_WITHIN_S, ReservationPolicy, UnsettledPolicy};
use crate::limit::window::{MonthLength, WindowSpec};
use crate::rules::diagnostic::escape_for_message;
use crate::rules::document::fields::{DocumentReader, Field, FieldPath};
use crate::rules::document::value::{InvalidValue, parse_duration_us};
use crate::rules::key_table::Section;
use crate::rules::yaml::{Scalar, Spanned, YamlContent};

impl DocumentReader<'_> {
    pub(super) fn read_window(
        &mut self,
        field: &Field<'_, '_>,
        field_path: &FieldPath<'_>,
    ) -> Option<Spanned<WindowSpec>> {
        if field.node.is_null() {
            return None;
        }
        let mut window = WindowSpec::in_zone(Zone::utc());
        let mut month_day = None;
        for key in self.read_fields(field.node, Section::Window, "window", field_path)? {
            let field_path = field_path.with_key(key.key.name);
            match key.key.name {
                "timezone" => set_if_read(&mut window.zone, self.read_zone(&key, &field_path)),
                "day_starts" => set_if_read(&mut window.day_starts, self.read_time_of_day(&key, &field_path)),
                "week_starts" => {
                    set_if_read(&mut window.week_starts, self.read_choice(&key, Weekday::from_name, &field_path));
                }
                "month" => set_if_read(&mut window.month, self.read_choice(&key, MonthLength::from_name, &field_path)),
                "month_day" => month_day = self.read_u32(&key, &field_path),
                _ => {}
            }
        }
        if let Some(day) = month_day {
            if window.month == MonthLength::ThirtyDays {
                let message = "`month_day` does not apply to months of 30 days";
                self.report_error(day.at, &field_path.with_key("month_day"), message, "remove it, or `month: 30_days`");
            }
            // The table bounds the number.
            window.month_day = u8::try_from(day.value).unwrap_or(1);
        }
        Some(Spanned { value: window, at: field.at })
    }

    /// Reads `ban`: a duration, or a mapping with the duration and the rejections before the ban.
    pub(super) fn read_ban(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Option<Spanned<Ban>> {
        let (mut length, mut after, mut counts_peeks) = (None, None, false);
        if let YamlContent::Map(_) = field.node.content {
            for key in self.read_fields(field.node, Section::Ban, "ban", field_path)? {
                let field_path = field_path.with_key(key.key.name);
                match key.key.name {
                    "for" => length = self.read_ban_length(&key, &field_path),
                    "after" => after = self.read_u32(&key, &field_path),
                    "count_peeks" => counts_peeks = self.read_bool_or_false(&key, &field_path),
                    _ => {}
                }
            }
            if length.is_none() {
                let message = "a `ban` without a length";
                self.report_error(field.at, &field_path.with_key("for"), message, "write `for`, such as `for: 10m`");
            }
        } else {
            length = self.read_ban_length(field, field_path);
        }
        let ban = Ban::new(length?.value, after.map_or(1, |after| after.value))?.with_count_of_peeks(counts_peeks);
        Some(Spanned { value: ban, at: field.at })
    }

    fn read_ban_length(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Option<Spanned<u64>> {
        let parse = |scalar: &Scalar<'_>| match parse_duration_us(scalar.text())? {
            0 => Err(InvalidValue { message: "a `ban` of 0".to_owned(), hint: "remove it".to_owned() }),
            length_us => Ok(length_us),
        };
        self.read_parsed_scalar(field, parse, field_path)
    }

    /// Reads `reservations`: the time within which they are settled, or a mapping.
    pub(super) fn read_reservation_policy(
        &mut self,
        field: &Field<'_, '_>,
        field_path: &FieldPath<'_>,
    ) -> Option<Spanned<ReservationPolicy>> {
        let (mut within_s, mut unsettled, mut estimate) = (None, UnsettledPolicy::default(), None);
        let errors = self.found.error_count();
        if let YamlContent::Map(_) = field.node.content {
            for key in self.read_fields(field.node, Section::ReservationPolicy, "reservations", field_path)? {
                let field_path = field_path.with_key(key.key.name);
                match key.key.name {
                    "settle_within" => within_s = self.read_settle_within(&key, &field_path),
                    "unsettled" => {
                        set_if_read(&mut unsettled, self.read_choice(&key, UnsettledPolicy::from_name, &field_path));
                    }
                    "estimate" => estimate = self.read_u32(&key, &field_path),
                    _ => {}
                }
            }
        } else {
            within_s = self.read_settle_within(field, field_path);
        }
        if self.found.error_count() > errors {
            return None;
        }
        let within_s = within_s.map_or(DEFAULT_SETTLE_WITHIN_S, |within_s| within_s.value);
        let estimate = estimate.and_then(|estimate| NonZeroU32::new(estimate.value));
        Some(Spanned { value: ReservationPolicy::new(within_s, unsettled, estimate)?, at: field.at })
    }

    fn read_settle_within(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Option<Spanned<u32>> {
        let parse = |scalar: &Scalar<'_>| {
            let duration_us = parse_duration_us(scalar.text())?;
            let whole_s = duration_us.is_multiple_of(1_000_000).then_some(duration_us / 1_000_000);
            let whole_s = whole_s.and_then(|seconds| u32::try_from(seconds).ok()).filter(|seconds| *seconds > 0);
            whole_s.ok_or_else(|| InvalidValue {
                message: format!("a `settle_within` of {}", escape_for_message(scalar.text())),
                hint: "write whole seconds, from 1s to 366 days, such as 10m".to_owned(),
            })
        };
        self.read_parsed_scalar(field, parse, field_path)
    }

    /// Reads `max_duration`: whole seconds, because keys of counters and metrics name it so.
    pub(super) fn read_max_duration(
        &mut self,
        field: &Field<'_, '_>,
        field_path: &FieldPath<'_>,
    ) -> Option<Spanned<u64>> {
        let parse = |scalar: &Scalar<'_>| {
            let duration_us = parse_duration_us(scalar.text())?;
            Period::from_micros(duration_us).map(|_| duration_us).ok_or_else(|| InvalidValue {
                message: format!("a `max_duration` of {}", scalar.text()),
                hint: "write whole seconds, from 1s to 366 days, such as 10m".to_owned(),
            })
        };
        self.read_parsed_scalar(field, parse, field_path)
    }

    pub(super) fn read_active_times(
        &mut self,
        field: &Field<'_, '_>,
        field_path: &FieldPath<'_>,
    ) -> Option<Spanned<ActiveSpec>> {
        if field.node.is_null() {
            return None;
        }
        let midnight = TimeOfDay::default();
        let mut active = ActiveSpec { days: Weekdays::ALL, from: midnight, to: midnight, zone: Zone::utc() };
        let mut to = None;
        let errors = self.found.error_count();
        for key in self.read_fields(field.node, Section::Active, "active", field_path)? {
            let field_path = field_path.with_key(key.key.name);
            match key.key.name {
                "days" => set_if_read(&mut active.days, self.read_days(&key, &field_path)),
                "from" => set_if_read(&mut active.from, self.read_time_of_day(&key, &field_path)),
                "to" => to = self.read_time_of_day(&key, &field_path),
                "timezone" => set_if_read(&mut active.zone, self.read_zone(&key, &field_path)),
                _ => {}
            }
        }
        active.to = to.map_or(midnight, |to| to.value);
        if let Some(to) = to.filter(|to| to.value == active.from) {
            let message = format!("`active` from {} to {}", active.from, to.value);
            self.report_error(to.at, &field_path.with_key("to"), message, "leave both out for whole days");
        }
        (self.found.error_count() == errors).then_some(Spanned { value: active, at: field.at })
    }

    /// Reads days as text, `mon-fri` or `sat,sun`, or as a list of such.
    fn read_days(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Option<Spanned<Weekdays>> {
        let invalid = |text: &str| InvalidValue {
            message: format!("`{}` are not days of the week", escape_for_message(text)),
            hint: "write days and ranges of days, such as mon-fri or sat,sun".to_owned(),
        };
        let YamlContent::List(list) = &field.node.content else {
            let parse = |scalar: &Scalar<'_>| Weekdays::parse(scalar.text()).ok_or_else(|| invalid(scalar.text()));
            return self.read_parsed_scalar(field, parse, field_path);
        };
        let mut days = Weekdays::NONE;
        for (index, node) in list.iter().enumerate() {
            let text = node.as_scalar().map_or("", Scalar::text);
            match Weekdays::parse(text) {
                Some(more) => days = days.union(more),
                None => {
                    let InvalidValue { message, hint } = invalid(text);
                    self.report_error(node.at, &field_path.with_index(index), message, hint);
                }
            }
        }
        if days == Weekdays::NONE {
            let InvalidValue { hint, .. } = invalid("");
            self.report_error(field.at, field_path, "an empty list of days", hint);
        }
        Some(Spanned { value: days, at: field.at })
    }

    fn read_zone(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Option<Spanned<Zone>> {
        let parse = |scalar: &Scalar<'_>| {
            Zone::from_name(scalar.text()).ok_or_else(|| InvalidValue {
                message: format!("unknown time zone '{}'", escape_for_message(scalar.text())),
                hint: Zone::nearest_name(scalar.text()).map_or_else(
                    || "write a name of IANA's database, such as Europe/Berlin".to_owned(),
                    |near| format!("did you mean `{near}`?"),
                ),
            })
        };
        self.read_parsed_scalar(field, parse, field_path)
    }

    fn read_time_of_day(&mut self, field: &Field<'_, '_>, field_path: &FieldPath<'_>) -> Option<Spanned<TimeOfDay>> {
        let parse = |scalar: &Scalar<'_>| {
            TimeOfDay::parse(scalar.text()).ok_or_else(|| InvalidValue {
                message: format!("`{}` is not a time of day", escape_for_message(scalar.text())),
                hint: "write it as \"HH:MM\", from \"00:00\" to \"23:59\"".to_owned(),
            })
        };
        self.read_parsed_scalar(field, parse, field_path)
    }
}

/// Sets a value that was read.
fn set_if_read<T>(value: &mut T, read: Option<Spanned<T>>) {
    if let Some(read) = read {
        *value = read.value;
    }
}

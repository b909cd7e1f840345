//! Windows that follow a calendar (`window`), against another implementation of calendars: chrono-tz.
//!
//! The expected boundaries are listed day by day over ten years, with the rule for skipped and repeated local times
//! written out here.

use chrono::{Datelike, Duration, LocalResult, NaiveDate, NaiveDateTime, NaiveTime, Offset, TimeZone};
use chrono_tz::Tz;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::calendar::{TimeOfDay, Weekday, Zone};
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::window::{CalendarWindows, MonthLength, WindowSpec};
use tollkeeper::limit::{Limit, LimitSpec};

/// Zones with clock changes at 02:00, at midnight, of half an hour, in Ramadan, of a whole day, and without any.
const ZONES: [&str; 10] = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Africa/Casablanca",
    "Pacific/Apia",
    "Asia/Kolkata",
    "America/Sao_Paulo",
    "America/Havana",
    "Asia/Beirut",
];

/// Ten years that both databases know alike; Samoa skipped 2011-12-30, and Sao Paulo's clock changed until 2019.
const FIRST: (i32, u32, u32) = (2011, 1, 1);
const LAST: (i32, u32, u32) = (2021, 1, 1);

fn date((year, month, day): (i32, u32, u32)) -> NaiveDate {
    NaiveDate::from_ymd_opt(year, month, day).unwrap()
}

/// Instant of a local time: the first of two; a skipped one is moved by as much as the clock was put forward.
fn instant(zone: Tz, local: NaiveDateTime) -> i64 {
    match zone.from_local_datetime(&local) {
        LocalResult::Single(time) | LocalResult::Ambiguous(time, _) => time.timestamp(),
        LocalResult::None => {
            // With the offset that held before the gap.
            let mut before = local;
            let offset = loop {
                before -= Duration::minutes(15);
                if let Some(time) = zone.from_local_datetime(&before).latest() {
                    break time.offset().fix().local_minus_utc();
                }
            };
            local.and_utc().timestamp() - i64::from(offset)
        }
    }
}

/// Days on which windows begin.
fn first_days(unit: Unit, count: i64, spec: &WindowSpec) -> Vec<NaiveDate> {
    let epoch = date((1970, 1, 1));
    let days = (0..).map(|day| date(FIRST) + Duration::days(day)).take_while(|day| *day < date(LAST));
    let begins = |day: &NaiveDate| {
        let number = (*day - epoch).num_days();
        match unit {
            Unit::Day => number % count == 0,
            Unit::Week => {
                let weekday = i64::from(day.weekday().num_days_from_monday());
                let first = i64::from(epoch.weekday().num_days_from_monday());
                let start = spec.week_starts.days_since_monday();
                // Weeks since the one that contains the epoch.
                let since_start_of_first = number + (first - start).rem_euclid(7);
                weekday == start && (since_start_of_first / 7) % count == 0
            }
            Unit::Month | Unit::Year => {
                let next_month = match day.month() {
                    12 => date((day.year() + 1, 1, 1)),
                    month => date((day.year(), month + 1, 1)),
                };
                let last = next_month.pred_opt().unwrap().day();
                let months = if unit == Unit::Year { 12 } else { count };
                let month = i64::from(day.year()) * 12 + i64::from(day.month0());
                day.day() == u32::from(spec.month_day).min(last) && month % months == 0
            }
            Unit::Second | Unit::Minute | Unit::Hour => unreachable!("not counted in days"),
        }
    };
    days.filter(begins).collect()
}

/// All boundaries in the ten years, in seconds.
fn boundaries(zone: Tz, unit: Unit, count: i64, spec: &WindowSpec) -> Vec<i64> {
    let minutes = u32::from(spec.day_starts.minutes_since_midnight());
    let time = NaiveTime::from_hms_opt(minutes / 60, minutes % 60, 0).unwrap();
    let mut found: Vec<i64> = match unit {
        Unit::Second | Unit::Minute | Unit::Hour => {
            let length = i64::try_from(unit.seconds()).unwrap() * count;
            let days = boundaries(zone, Unit::Day, 1, spec);
            days.windows(2)
                .flat_map(|day| (day[0]..day[1]).step_by(usize::try_from(length).unwrap()))
                .chain(days.last().copied())
                .collect()
        }
        _ => first_days(unit, count, spec).into_iter().map(|day| instant(zone, day.and_time(time))).collect(),
    };
    found.dedup();
    found
}

fn check_windows(zone_name: &str, unit: Unit, count: u32, spec: WindowSpec) {
    let zone: Tz = zone_name.parse().unwrap();
    let spec = WindowSpec { zone: Zone::from_name(zone_name).unwrap(), ..spec };
    let window = CalendarWindows::new(&spec, Period::new(unit, count).unwrap()).unwrap();
    let expected = boundaries(zone, unit, i64::from(count), &spec);
    assert!(expected.len() >= 8, "{zone_name} {unit:?}");
    let time = |seconds: i64| Time::from_secs(u64::try_from(seconds).unwrap());
    // Of days and windows within a day, all near a change of the clock, and some of the others, which are alike: at night all.
    let have_changes = !matches!(unit, Unit::Week | Unit::Month | Unit::Year);
    let every = if kit::is_nightly() { 1 } else { 23 };
    let days = if have_changes { boundaries(zone, Unit::Day, 1, &spec) } else { Vec::new() };
    let changes: Vec<i64> = days.windows(2).filter(|day| day[1] - day[0] != 86_400).map(|day| day[0]).collect();
    let is_near_a_change = |start: i64| {
        let next = changes.partition_point(|change| *change < start - 2 * 86_400);
        changes.get(next).is_some_and(|change| *change < start + 2 * 86_400)
    };
    for (index, pair) in expected.windows(2).enumerate() {
        if have_changes && index % every != 0 && !is_near_a_change(pair[0]) {
            continue;
        }
        let (start, end) = (time(pair[0]), time(pair[1]));
        assert!(start < end);
        let middle = start.plus_us(end.since_us(start) / 2);
        for at in [start, middle, Time::from_micros(end.as_micros() - 1)] {
            let found = window.bounds_at(at);
            assert_eq!((found.start, found.end), (start, end), "{zone_name} {count} {unit:?} {spec:?} at {at}");
        }
    }
}

fn spec(day_starts: &str) -> WindowSpec {
    WindowSpec { day_starts: TimeOfDay::parse(day_starts).unwrap(), ..WindowSpec::in_zone(Zone::utc()) }
}

#[test]
fn days_of_ten_years_begin_as_in_another_calendar() {
    for zone in ZONES {
        for day_starts in ["00:00", "00:30", "01:30", "02:00", "02:15", "02:30", "06:00", "23:30"] {
            check_windows(zone, Unit::Day, 1, spec(day_starts));
            check_windows(zone, Unit::Day, 3, spec(day_starts));
        }
    }
}

#[test]
fn weeks_of_ten_years_begin_as_in_another_calendar() {
    for zone in ZONES {
        for week_starts in Weekday::ALL {
            check_windows(zone, Unit::Week, 1, WindowSpec { week_starts, ..spec("02:30") });
            check_windows(zone, Unit::Week, 2, WindowSpec { week_starts, ..spec("00:00") });
        }
    }
}

#[test]
fn months_and_years_of_ten_years_begin_as_in_another_calendar() {
    for zone in ZONES {
        for month_day in [1, 2, 15, 28, 29, 30, 31] {
            for months in [1, 2, 3, 5, 12] {
                check_windows(zone, Unit::Month, months, WindowSpec { month_day, ..spec("02:30") });
            }
            check_windows(zone, Unit::Year, 1, WindowSpec { month_day, ..spec("06:00") });
        }
    }
}

#[test]
fn hours_are_counted_from_the_start_of_the_day() {
    for zone in ZONES {
        for (unit, count) in [(Unit::Hour, 1), (Unit::Hour, 5), (Unit::Hour, 6), (Unit::Hour, 24), (Unit::Minute, 90)] {
            check_windows(zone, unit, count, spec("06:00"));
            check_windows(zone, unit, count, spec("02:30"));
        }
    }
}

/// Lengths in hours of the days in Berlin around the changes of 2024.
#[test]
fn day_has_23_or_25_hours_where_the_clock_changes() {
    let spec = WindowSpec { zone: Zone::from_name("europe/berlin").unwrap(), ..spec("00:00") };
    let window = CalendarWindows::new(&spec, Period::new(Unit::Day, 1).unwrap()).unwrap();
    let hours_at = |date: &str| {
        let at = date.parse::<NaiveDate>().unwrap().and_hms_opt(12, 0, 0).unwrap().and_utc().timestamp();
        let bounds = window.bounds_at(Time::from_secs(u64::try_from(at).unwrap()));
        bounds.end.since_us(bounds.start) / 3_600_000_000
    };
    assert_eq!(["2024-03-30", "2024-03-31", "2024-10-27", "2024-10-28"].map(hours_at), [24, 23, 25, 24]);
}

#[test]
fn month_of_thirty_days_is_counted_from_1970() {
    let spec = WindowSpec { month: MonthLength::ThirtyDays, ..spec("06:00") };
    let window = CalendarWindows::new(&spec, Period::new(Unit::Month, 1).unwrap()).unwrap();
    let bounds = window.bounds_at(Time::from_secs(86_400 * 61));
    assert_eq!(
        (bounds.start, bounds.end),
        (Time::from_secs(86_400 * 60 + 21_600), Time::from_secs(86_400 * 90 + 21_600))
    );
}

#[test]
fn window_covers_the_epoch_and_the_end_of_time() {
    for (unit, count) in [(Unit::Second, 1), (Unit::Day, 366), (Unit::Week, 52), (Unit::Month, 12), (Unit::Year, 1)] {
        let window = CalendarWindows::new(&spec("06:00"), Period::new(unit, count).unwrap()).unwrap();
        for at in [0, 1, 253_400_000_000_000_000, u64::MAX / 2, u64::MAX - 1].map(Time::from_micros) {
            let bounds = window.bounds_at(at);
            assert!(bounds.start <= at && at < bounds.end, "{unit:?} {at} {bounds:?}");
        }
    }
}

#[test]
fn equal_definitions_are_interned_once() {
    let month = Period::new(Unit::Month, 1).unwrap();
    let first = CalendarWindows::new(&WindowSpec { month_day: 7, ..spec("06:00") }, month).unwrap();
    let other_week = WindowSpec { month_day: 7, week_starts: Weekday::Sunday, ..spec("06:00") };
    assert_eq!(first, CalendarWindows::new(&other_week, month).unwrap());
    assert_ne!(first, CalendarWindows::new(&WindowSpec { month_day: 8, ..spec("06:00") }, month).unwrap());
    assert_eq!(first.identity(), "month@UTC,7,0600");
    // A part of a day that is longer than a day has no windows.
    assert!(CalendarWindows::new(&spec("06:00"), Period::new(Unit::Hour, 25).unwrap()).is_none());
}

fn limit(zone: &str) -> Limit {
    let window = Some(WindowSpec { zone: Zone::from_name(zone).unwrap(), ..spec("00:00") });
    let spec = LimitSpec::new(Algorithm::FixedWindow, 2, Period::new(Unit::Day, 1).unwrap());
    Limit::new(&LimitSpec { window, count_rejected: Some(false), ..spec }).unwrap()
}

/// The second replica's calendar ends the day at another time.
#[test]
fn stored_end_of_a_window_holds_for_a_replica_with_another_calendar() {
    // 2024-06-01T12:00Z; Berlin's day ends at 22:00Z, London's at 23:00Z.
    let noon = 1_717_243_200;
    let (berlin, london) = (limit("Europe/Berlin"), limit("Europe/London"));
    let hit = ChargeRequest::new(Hits::Charge(1), 0);
    let at = |hours: u64| Time::from_secs(noon + hours * 3600);
    let mut state = State::empty(london.counting_method());
    let mut charge = |limit: &Limit, hours| {
        let result = state.charge(limit, at(hours), hit);
        (result.admitted, result.reset_us / 3_600_000_000)
    };
    assert_eq!(charge(&london, 9), (true, 2));
    // Berlin's next day has begun, but the stored window lasts for another hour.
    assert_eq!(charge(&berlin, 10), (true, 1));
    assert_eq!(charge(&berlin, 10), (false, 1));
    // Then a window opens, with the end that the replica knows which charges first.
    assert_eq!(charge(&berlin, 11), (true, 23));
    assert_eq!(charge(&london, 33), (true, 1));
    assert_eq!(charge(&london, 33), (false, 1));
}

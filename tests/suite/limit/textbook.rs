//! Worked cases of the textbooks, as tables: requests at given times, and the result of each.
//!
//! A case does not know where its counters live. `run_case` calls a driver once for each request, so that the same
//! tables run on bare states and on every store. Times count from [`ORIGIN`], where a second, a minute, an hour and a
//! day begin; a driver with a clock of its own sets it to the given time.
//!
//! Features of HTTP (a path without limit, a body, a counter for each address) are keys here: a key without limits is
//! unlimited, and each key has counters of its own.

use std::collections::HashMap;

use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::joint_charge::charge_together;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::{Charge, ChargeRequest, ChargeResult, Counter, JointLimit};
use tollkeeper::limit::counter_path::CounterPath;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::{Entry, Hits};
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::rules::rule::set::hash_limit_identity;
use tollkeeper::store::memory::MemoryStore;

/// 2026-01-01 00:00:00 UTC.
const ORIGIN: Time = Time::from_secs(1_767_225_600);

const MS: u64 = 1_000;
const SECOND: u64 = 1_000 * MS;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;

/// Longest wait of a caller in these tests, in microseconds.
const PATIENCE: u64 = 30 * SECOND;

/// Charges a counter, by its key, limits, time and hits; returns one result per limit, in their order.
pub(crate) type Driver<'d> = dyn FnMut(&str, &[JointLimit<'_>], Time, ChargeRequest) -> Vec<ChargeResult> + 'd;

/// A worked case.
pub(crate) struct Case {
    /// Identifier in the list of cases, with its variation.
    pub(crate) id: String,
    /// The key and the limits of the next row.
    key: &'static str,
    limits: Vec<Limit>,
    rows: Vec<Row>,
}

/// One request.
struct Row {
    at_us: u64,
    key: &'static str,
    limits: Vec<Limit>,
    hits: Hits,
    /// Result of each limit.
    responses: Vec<Answer>,
}

/// The checked part of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    admitted: bool,
    remaining: u32,
    retry_after_us: Option<u64>,
    delay_us: u64,
}

/// Runs a case; the driver's counters of all its keys must be empty.
pub(crate) fn run_case(case: &Case, charge: &mut Driver<'_>) {
    for (index, row) in case.rows.iter().enumerate() {
        let limits: Vec<_> = row.limits.iter().map(|limit| JointLimit { limit, rejects_others: true }).collect();
        // A key without limits is never charged from.
        if limits.is_empty() {
            continue;
        }
        let results = charge(row.key, &limits, ORIGIN.plus_us(row.at_us), ChargeRequest::new(row.hits, PATIENCE));
        let responses: Vec<_> = results
            .iter()
            .map(|result| Answer {
                admitted: result.admitted,
                remaining: result.remaining.try_into().unwrap(),
                retry_after_us: result.retry_after_us,
                delay_us: result.delay_us,
            })
            .collect();
        assert_eq!(
            responses,
            row.responses,
            "{}: request {} for {}, at {} us: {:?}",
            case.id,
            index + 1,
            row.key,
            row.at_us,
            row.hits
        );
    }
}

#[test]
fn textbook_cases_hold_on_bare_states() {
    for case in cases() {
        let mut states: HashMap<String, Vec<State>> = HashMap::new();
        run_case(&case, &mut |key, limits, now, request| {
            let states = states
                .entry(key.to_owned())
                .or_insert_with(|| limits.iter().map(|term| State::empty(term.limit.algorithm())).collect());
            charge_together(limits, states, now, request).into_vec()
        });
    }
}

#[test]
fn textbook_cases_hold_in_memory() {
    for case in cases() {
        let store = MemoryStore::new(1 << 20);
        run_case(&case, &mut |key, limits, now, request| {
            let entries = [Entry { key: b"key", value: key.as_bytes() }];
            let counters = limits
                .iter()
                .map(|&JointLimit { limit, rejects_others }| Counter {
                    limit,
                    shadow: !rejects_others,
                    quota: false,
                    tag: hash_limit_identity(limit, 0),
                    epoch: 0,
                })
                .collect();
            let path = CounterPath { domain: "textbook", entries: &entries, shared: &[], candidate: None };
            store.charge(&Charge::new(path, counters, request), now).expect("there is room").into_vec()
        });
    }
}

/// All cases.
pub(crate) fn cases() -> Vec<Case> {
    let all = [
        token_bucket_cases(),
        leaky_bucket_cases(),
        fixed_window_cases(),
        sliding_window_log_cases(),
        sliding_window_counter_cases(),
        cases_of_any_algorithm(),
    ];
    all.into_iter().flatten().collect()
}

fn token_bucket_cases() -> Vec<Case> {
    let in_ms = |ms| Some(ms * MS);
    let tb1 = token(4, 2, Unit::Second);
    let tb2 = token(3, 1, Unit::Second);
    let tb3 = token(2, 6, Unit::Minute);
    let tb4 = token(1, 10, Unit::Second);
    let tb5 = token(50, 1, Unit::Day);
    let tb6 = token(2, 1, Unit::Day);
    let tb7 = token(100, 10, Unit::Second);
    let tb8 = token(10, 1, Unit::Day);
    vec![
        Case::new("TB1", tb1)
            .charges(0, [ok(3), ok(2), ok(1), ok(0), no(in_ms(500))])
            .charges(500 * MS, [ok(0)])
            // Nine and a half seconds would refill 19 tokens; the bucket's capacity is four.
            .charges(10 * SECOND, [ok(3), ok(2), ok(1), ok(0), no(in_ms(500))]),
        Case::new("TB2", tb2).charges(0, [ok(2), ok(1), ok(0), no(in_ms(1_000))]),
        Case::new("TB3, for each address", tb3)
            .from("a")
            .charges(0, [ok(1), ok(0)])
            .from("b")
            .charges(0, [ok(1), ok(0)])
            .from("a")
            .charges(0, [no(in_ms(10_000))])
            .from("b")
            .charges(0, [no(in_ms(10_000))]),
        Case::new("TB4", tb4)
            .charges(0, [ok(0), no(in_ms(100))])
            .charges(100 * MS - 1, [no(Some(1))])
            .charges(100 * MS, [ok(0)]),
        Case::new("TB5", tb5).charges(0, ok_down_from(50)).charges(0, [no(Some(DAY))]),
        Case::new("TB6, for each API key", tb6)
            .from("key1")
            .charges(0, [ok(1), ok(0)])
            .from("key2")
            .charges(0, [ok(1), ok(0)])
            .from("key1")
            .charges(0, [no(Some(DAY))])
            .from("key2")
            .charges(0, [no(Some(DAY))])
            .from("anonymous")
            .charges(0, [ok(1)]),
        Case::new("TB7", tb7).charges(0, ok_down_from(100)).charges(0, [no(in_ms(100))]),
        // Five tokens of one a day.
        Case::new("TB8", tb8).takes(0, 5, [ok(5), ok(0), no(Some(5 * DAY))]),
        Case::new("TB9", tb6).from("/health").free(0, 10).from("/").charges(0, [ok(1), ok(0), no(Some(DAY))]),
        debt_case(),
    ]
}

/// DB1: usage reported afterwards becomes debt, up to one period.
fn debt_case() -> Case {
    let limit = limit(LimitSpec { count_rejected: Some(true), ..limits(Algorithm::TokenBucket, 1_000, Unit::Hour) });
    // 501 tokens of 3.6 s, from 1500 used to 999.
    let owed = 30 * MINUTE + 3_600 * MS;
    Case::new("DB1", limit)
        .peek(0, ok(1_000))
        .takes(0, 1_500, [no(None)])
        .peek(0, no(Some(owed)))
        .peek(owed - 1, no(Some(1)))
        .peek(owed, ok(1))
        .takes(owed, 10_000, [no(None)])
        // 1001 tokens, from 2000 used to 999.
        .peek(owed, no(Some(HOUR + 3_600 * MS)))
}

fn leaky_bucket_cases() -> Vec<Case> {
    let lb1 = leaky(3, 10, Unit::Second);
    let lb2 = leaky(2, 1, Unit::Second);
    let lb3 = leaky(2, 10, Unit::Second);
    let lb4 = leaky(10, 5, Unit::Second);
    let lb5 = leaky(1, 10, Unit::Second);
    let lb7 = leaky(1, 100, Unit::Second);
    let lb8 = leaky(5, 100, Unit::Second);
    let lb9 = leaky(10, 2, Unit::Second);
    vec![
        Case::new("LB1", lb1).charges(0, [ok(2), delayed(1, 100 * MS), delayed(0, 200 * MS)]),
        Case::new("LB2", lb2).charges(0, [ok(1), delayed(0, SECOND), no(Some(SECOND))]),
        Case::new("LB3, for each address", lb3)
            .from("a")
            .charges(0, [ok(1), delayed(0, 100 * MS), no(Some(100 * MS))])
            .from("b")
            .charges(0, [ok(1), delayed(0, 100 * MS)]),
        // They leave at 10, 210 and 410 ms; a request that has left in part still occupies its slot.
        Case::new("LB4", lb4)
            .charges(10 * MS, [ok(9)])
            .charges(20 * MS, [delayed(8, 190 * MS)])
            .charges(30 * MS, [delayed(7, 380 * MS)]),
        Case::new("LB5, for each key", lb5)
            .from("a")
            .charges(0, [ok(0), no(Some(100 * MS))])
            .from("b")
            .charges(0, [ok(0)]),
        Case::new("LB6", lb2)
            .from("/health")
            .free(0, 10)
            .from("/")
            .charges(0, [ok(1), delayed(0, SECOND), no(Some(SECOND))]),
        Case::new("LB7", lb7).charges(0, [ok(0), no(Some(10 * MS))]),
        Case::new("LB8, one bucket for all methods", lb8).charges(
            0,
            [
                ok(4),
                delayed(3, 10 * MS),
                delayed(2, 20 * MS),
                delayed(1, 30 * MS),
                delayed(0, 40 * MS),
                no(Some(10 * MS)),
            ],
        ),
        Case::new("LB9", lb9).charges(
            0,
            [ok(9), delayed(8, 500 * MS), delayed(7, SECOND), delayed(6, 1_500 * MS), delayed(5, 2 * SECOND)],
        ),
    ]
}

fn fixed_window_cases() -> Vec<Case> {
    let five = window(Algorithm::FixedWindow, 5, Unit::Minute);
    let day = window(Algorithm::FixedWindow, 5, Unit::Day);
    let two = window(Algorithm::FixedWindow, 2, Unit::Second);
    let mut cases = vec![
        // All but the last within the 2:00:30 to 2:01:30 of the text.
        Case::new("FW1", five)
            .charges(2 * HOUR + 30 * SECOND, ok_down_from(5))
            .charges(2 * HOUR + MINUTE, ok_down_from(5))
            .charges(2 * HOUR + MINUTE + 29 * SECOND, [no(Some(31 * SECOND))]),
        Case::new("FW4", two).charges(0, [ok(1), ok(0), no(Some(SECOND))]),
        Case::new("FW5, a day", day).charges(0, ok_down_from(5)).charges(0, [no(Some(DAY))]),
        Case::new("FW5, a minute", five).charges(0, ok_down_from(5)).charges(0, [no(Some(MINUTE))]),
    ];
    cases.extend(boundary_cases());
    cases
}

/// FW1x, FW2 and FW3: admissions around a boundary, with each window algorithm.
fn boundary_cases() -> Vec<Case> {
    let log = Algorithm::SlidingWindowLog;
    let counter = Algorithm::SlidingWindowCounter;
    let (first, second) = (2 * HOUR + 55 * SECOND, 2 * HOUR + 65 * SECOND);
    let mut cases = vec![
        Case::new("FW1x, fixed_window", window(Algorithm::FixedWindow, 5, Unit::Minute))
            .charges(first, ok_down_from(5))
            .charges(second, ok_down_from(5)),
        Case::new("FW1x, sliding_window_log", window(log, 5, Unit::Minute))
            .charges(first, ok_down_from(5))
            .charges(second, [no(Some(50 * SECOND)); 5]),
        // floor(5 x 55/60) = 4 lets one by; then floor(1 + 5 x left) is 5 until less than 4/5 of the window are left,
        // 12 s into it.
        Case::new("FW1x, sliding_window_counter", window(counter, 5, Unit::Minute))
            .charges(first, ok_down_from(5))
            .charges(second, [ok(0)])
            .charges(second, [no(Some(7 * SECOND + 1)); 4]),
    ];
    let far = [
        ("FW2", Unit::Hour, HOUR + 59 * MINUTE, 2 * HOUR, HOUR),
        ("FW3", Unit::Minute, 59 * SECOND, 60 * SECOND, MINUTE),
    ];
    for (id, unit, first, second, period) in far {
        let fixed = window(Algorithm::FixedWindow, 100, unit);
        cases.push(
            Case::new(&format!("{id}, fixed_window"), fixed)
                .charges(first, ok_down_from(100))
                .charges(second, ok_down_from(100)),
        );
        cases.push(
            Case::new(&format!("{id}, sliding_window_log"), window(log, 100, unit))
                .charges(first, ok_down_from(100))
                .charges(second, vec![no(Some(first + period - second)); 100]),
        );
        // At the window's first microsecond all 100 still count; a microsecond later 99 do.
        cases.push(
            Case::new(&format!("{id}, sliding_window_counter"), window(counter, 100, unit))
                .charges(first, ok_down_from(100))
                .charges(second, vec![no(Some(1)); 100]),
        );
    }
    cases
}

fn sliding_window_log_cases() -> Vec<Case> {
    let log = Algorithm::SlidingWindowLog;
    let at = |minutes: u64, seconds: u64| HOUR + minutes * MINUTE + seconds * SECOND;
    let sl1 = window(log, 2, Unit::Minute);
    let counted = limit(LimitSpec { count_rejected: Some(true), ..limits(log, 2, Unit::Minute) });
    let sl2 = window(log, 1, Unit::Minute);
    let sl3 = window(log, 5, Unit::Minute);
    vec![
        Case::new("SL1", sl1)
            .charges(at(0, 1), [ok(1)])
            .charges(at(0, 30), [ok(0)])
            .charges(at(0, 50), [no(Some(11 * SECOND))])
            .charges(at(1, 40), [ok(1)])
            .charges(at(1, 45), [ok(0)]),
        // The rejected hit of 1:00:50 replaces that of 1:00:01, and expires at 1:01:50.
        Case::new("SL1, count_rejected", counted)
            .charges(at(0, 1), [ok(1)])
            .charges(at(0, 30), [ok(0)])
            .charges(at(0, 50), [no(Some(40 * SECOND))])
            .charges(at(1, 40), [ok(0)])
            // The hit of 1:01:45 replaces that of 1:00:50 likewise.
            .charges(at(1, 45), [no(Some(55 * SECOND))]),
        Case::new("SL2", sl2).charges(0, [ok(0)]).charges(MINUTE - 1, [no(Some(1))]).charges(MINUTE, [ok(0)]),
        (0..5)
            .fold(Case::new("SL3", sl3), |case, ms| {
                case.charges(ms * MS, [ok(4 - u32::try_from(ms).expect("at most 4"))])
            })
            .charges(5 * MS, [no(Some(MINUTE - 5 * MS))])
            .charges(MINUTE - MS, [no(Some(MS))])
            .charges(MINUTE, [ok(0)]),
        Case::new("SL4", sl3).charges(0, ok_down_from(5)).charges(999, [no(Some(MINUTE - 999)); 2]),
    ]
}

fn sliding_window_counter_cases() -> Vec<Case> {
    let counter = Algorithm::SlidingWindowCounter;
    let sc1 = window(counter, 7, Unit::Minute);
    let before = window(counter, 200, Unit::Minute);
    let into = |tenths: u64| HOUR + tenths * 6 * SECOND;
    let lowered = |to: u32| {
        Case::new(&format!("SC2, lowered to {to}"), before)
            .takes(HOUR - SECOND, 150, [ok(50)])
            .takes(HOUR, 50, [ok(0)])
            .peek(into(5), ok(75))
    };
    vec![
        Case::new("SC1", sc1)
            .charges(HOUR - 30 * SECOND, [ok(6), ok(5), ok(4), ok(3), ok(2)])
            // floor(5 x 0.8) = 4, so that three fit.
            .charges(into(2), [ok(2), ok(1), ok(0)])
            // floor(3 + 5 x 0.7) = 6 and floor(4 + 3.5) = 7, until less than 0.6 of the window are left.
            .charges(into(3), [ok(0), no(Some(6 * SECOND + 1))]),
        // Of the 150 before, as many count as the new limit admits: 50 and 62.5.
        lowered(125).under(&[window(counter, 125, Unit::Minute)]).charges(into(5), [ok(12)]),
        // 50 and 25, and the window has room again only for what the limit admits.
        lowered(50).under(&[window(counter, 50, Unit::Minute)]).charges(into(5), [no(Some(30 * SECOND + 1))]),
    ]
}

fn cases_of_any_algorithm() -> Vec<Case> {
    let mut cases = vec![two_limits_case()];
    for algorithm in Algorithm::ALL {
        let limit = match algorithm {
            Algorithm::LeakyBucket => leaky(10, 10, Unit::Second),
            _ => window(algorithm, 10, Unit::Second),
        };
        let [tenth, eleventh] = match algorithm {
            Algorithm::TokenBucket => [ok(0), no(Some(100 * MS))],
            Algorithm::LeakyBucket => [delayed(0, 900 * MS), no(Some(100 * MS))],
            Algorithm::FixedWindow | Algorithm::SlidingWindowLog => [ok(0), no(Some(SECOND))],
            // floor(10 x left) is 9 a microsecond after the next window began.
            Algorithm::SlidingWindowCounter => [ok(0), no(Some(SECOND + 1))],
            Algorithm::Concurrent => unreachable!("it is not among them"),
        };
        let case = Case::new(&format!("RC1, {algorithm}"), limit);
        cases.push(case.takes(0, 9, [ok(1)]).charges(0, [tenth, eleventh]));
    }
    cases
}

/// ML1: hits rejected by the limit per second are not charged to the limit per day.
fn two_limits_case() -> Case {
    let of = |unit, count| limit(LimitSpec { sole: false, ..limits(Algorithm::FixedWindow, count, unit) });
    let limits = [of(Unit::Second, 10), of(Unit::Day, 1_000)];
    let mut case = Case::new("ML1", limits[0]).under(&limits);
    for second in 0..10 {
        let day_left = 1_000 - 10 * second;
        for request in 0..100 {
            let responses = match 9_u32.checked_sub(request) {
                Some(left) => [ok(left), ok(day_left - request - 1)],
                None => [no(Some(SECOND)), ok(day_left - 10)],
            };
            case = case.row(u64::from(second) * SECOND, Hits::Charge(1), &responses);
        }
    }
    case
}

impl Case {
    fn new(id: &str, limit: Limit) -> Self {
        Self { id: id.to_owned(), key: "all", limits: vec![limit], rows: Vec::new() }
    }

    /// Sets the key of the following rows.
    fn from(self, key: &'static str) -> Self {
        Self { key, ..self }
    }

    /// Sets the limits of the following rows.
    fn under(self, limits: &[Limit]) -> Self {
        Self { limits: limits.to_vec(), ..self }
    }

    /// One request of one hit for each result.
    fn charges(self, at_us: u64, responses: impl IntoIterator<Item = Answer>) -> Self {
        self.takes(at_us, 1, responses)
    }

    /// One request of `hits` hits for each result.
    fn takes(self, at_us: u64, hits: u64, responses: impl IntoIterator<Item = Answer>) -> Self {
        responses.into_iter().fold(self, |case, response| case.row(at_us, Hits::Charge(hits), &[response]))
    }

    /// Adds a peek.
    fn peek(self, at_us: u64, response: Answer) -> Self {
        self.row(at_us, Hits::Peek, &[response])
    }

    /// Adds requests that no limit applies to.
    fn free(self, at_us: u64, times: usize) -> Self {
        (0..times).fold(self, |case, _| case.row(at_us, Hits::Charge(1), &[]))
    }

    fn row(mut self, at_us: u64, hits: Hits, responses: &[Answer]) -> Self {
        // As many limits as results: all or, if the key is unlimited, none.
        let limits = self.limits[..responses.len()].to_vec();
        self.rows.push(Row { at_us, key: self.key, limits, hits, responses: responses.to_vec() });
        self
    }
}

/// Admitted at once, with this many remaining.
const fn ok(remaining: u32) -> Answer {
    delayed(remaining, 0)
}

/// Admitted with a delay.
const fn delayed(remaining: u32, delay_us: u64) -> Answer {
    Answer { admitted: true, remaining, retry_after_us: None, delay_us }
}

/// Rejected, with nothing remaining.
const fn no(retry_after_us: Option<u64>) -> Answer {
    Answer { admitted: false, remaining: 0, retry_after_us, delay_us: 0 }
}

/// As many admitted as there can be.
fn ok_down_from(limit: u32) -> Vec<Answer> {
    (0..limit).rev().map(ok).collect()
}

fn token(bucket_size: u32, requests_per_unit: u32, unit: Unit) -> Limit {
    limit(LimitSpec { bucket_size: Some(bucket_size), ..limits(Algorithm::TokenBucket, requests_per_unit, unit) })
}

fn leaky(queue_size: u32, requests_per_unit: u32, unit: Unit) -> Limit {
    limit(LimitSpec { queue_size: Some(queue_size), ..limits(Algorithm::LeakyBucket, requests_per_unit, unit) })
}

fn window(algorithm: Algorithm, requests_per_unit: u32, unit: Unit) -> Limit {
    limit(limits(algorithm, requests_per_unit, unit))
}

fn limits(algorithm: Algorithm, requests_per_unit: u32, unit: Unit) -> LimitSpec {
    LimitSpec::new(algorithm, requests_per_unit.into(), Period::new(unit, 1).expect("not too long"))
}

fn limit(limits: LimitSpec) -> Limit {
    Limit::new(&limits).expect("keys that the algorithm knows")
}

//! Random histories of a counter: alternating limits, times, hits and maximum delays.
//!
//! Most bugs are at boundaries, so most times and hits are *relative*: to the period, to the time of one hit, to the
//! end of a window, to the last result, to the capacity.

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{FileFailurePersistence, TestCaseResult};
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::fixed_window;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::{ChargeRequest, ChargeResult};
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::{Hits, MAX_HITS};
use tollkeeper::limit::{DEFAULT_MAX_SLIDING_LOG_HITS, Limit, LimitSpec, MAX_REQUESTS_PER_UNIT};

/// Configuration of the properties: `PROPTEST_CASES` cases; failed seeds are kept beside the source.
pub(crate) fn config() -> ProptestConfig {
    let kept = FileFailurePersistence::WithSource("proptest-regressions");
    ProptestConfig { failure_persistence: Some(Box::new(kept)), ..ProptestConfig::default() }
}

/// Kinds of events that a history may contain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HistoryOptions {
    /// Several limits alternate, as with overrides and reloads.
    pub(crate) many_limits: bool,
    /// The clock may step back.
    pub(crate) backwards: Backwards,
    /// Hits may be refunded.
    pub(crate) refunds: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backwards {
    Never,
    WithinAPeriod,
    AnyFar,
}

/// Everything that can happen.
pub(crate) const WILD: HistoryOptions =
    HistoryOptions { many_limits: true, backwards: Backwards::AnyFar, refunds: true };

/// One limit, and a clock that only moves forwards.
pub(crate) const CALM: HistoryOptions =
    HistoryOptions { many_limits: false, backwards: Backwards::Never, refunds: false };

/// A history of one counter.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    /// Limits of one algorithm and period.
    pub(crate) limits: Vec<Limit>,
    start: Time,
    /// Maximum step of the clock backwards, in periods; more than one discards the state.
    max_periods_back: u64,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
pub(crate) struct Step {
    limit: Index,
    jump: Jump,
    amount: Amount,
    max_delay: MaxDelay,
}

/// Movement of the clock before a charge.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Jump {
    Stay,
    Micros(u64),
    /// Thousandths of a period.
    Share(u64),
    /// Multiple of the time for one hit to drain, plus microseconds.
    HitTimes(u64, i64),
    /// A period, and some microseconds.
    Period(i64),
    /// To the end of the window, and some microseconds.
    Boundary(i64),
    /// To the last result's retry_after, and some microseconds.
    Retry(i64),
    /// To the last result's reset, and some microseconds.
    Reset(i64),
    /// Thousandths of a period back.
    Back(u64),
}

/// Number of hits, relative to the capacity.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Amount {
    Peek,
    Few(u64),
    /// Quarters of the capacity, at least 1.
    Quarters(u64),
    OneTooMany,
    Most,
    Back(u64),
    BackQuarters(u64),
    BackMost,
}

/// Maximum delay that the caller accepts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MaxDelay {
    Micros(u64),
    /// Multiple of the time for one hit to drain, plus microseconds.
    HitTimes(u64, i64),
    Endless,
}

pub(crate) fn scenario(shape: HistoryOptions) -> impl Strategy<Value = Scenario> {
    proptest::sample::select(&Algorithm::ALL[..]).prop_flat_map(move |algorithm| scenario_of(algorithm, shape))
}

pub(crate) fn scenario_of(algorithm: Algorithm, shape: HistoryOptions) -> impl Strategy<Value = Scenario> {
    let max_limits = if shape.many_limits { 3 } else { 1 };
    let max_periods_back = match shape.backwards {
        Backwards::Never => 0,
        Backwards::WithinAPeriod => 1,
        Backwards::AnyFar => u64::from(u32::MAX),
    };
    let limits = (period(), any::<bool>()).prop_flat_map(move |(period, calendar)| {
        proptest::collection::vec(limit(algorithm, period, calendar), 1..=max_limits)
    });
    (limits, start(), proptest::collection::vec(step(shape), 1..40)).prop_map(move |(limits, start, steps)| {
        // Beyond the year 9999 there are no calendar months.
        let start = if limits[0].follows_calendar_months() { start.min(Time::from_secs(7_000_000_000)) } else { start };
        Scenario { limits, start, max_periods_back, steps }
    })
}

pub(crate) fn period() -> impl Strategy<Value = Period> {
    let of =
        |unit, max: u32| (1..=max).prop_map(move |multiplier| Period::new(unit, multiplier).expect("not too long"));
    prop_oneof![
        4 => of(Unit::Second, 90),
        2 => of(Unit::Minute, 5),
        1 => of(Unit::Hour, 3),
        1 => of(Unit::Day, 366),
        1 => of(Unit::Week, 2),
        2 => of(Unit::Month, 12),
        1 => of(Unit::Year, 1),
    ]
}

fn count() -> impl Strategy<Value = u32> {
    prop_oneof![
        1 => Just(0),
        2 => Just(1),
        8 => 2..=20_u32,
        2 => 21..=5_000_u32,
        1 => Just(1_000_000),
        1 => any::<u32>(),
        1 => Just(u32::MAX),
    ]
}

pub(crate) fn limit(algorithm: Algorithm, period: Period, calendar_months: bool) -> impl Strategy<Value = Limit> {
    let size = proptest::option::of(count().prop_map(|size| size.max(1)));
    let wait = prop_oneof![0..10_u64, 0..100_000_000_u64, Just(u64::MAX)];
    let options = (size, proptest::option::of(wait), any::<Option<bool>>(), any::<bool>());
    let above_32_bits = prop_oneof![1 << 32..=MAX_REQUESTS_PER_UNIT, Just(MAX_REQUESTS_PER_UNIT)];
    let above_32_bits = proptest::option::weighted(0.2, above_32_bits);
    (count(), above_32_bits, options).prop_map(move |(requests, above_32_bits, options)| {
        let (size, max_wait_us, count_rejected, sole) = options;
        let token = algorithm == Algorithm::TokenBucket;
        let leaky = algorithm == Algorithm::LeakyBucket;
        Limit::new(&LimitSpec {
            bucket_size: size.filter(|_| token),
            queue_size: size.filter(|_| leaky),
            max_wait_us: max_wait_us.filter(|_| token || leaky),
            count_rejected: count_rejected.filter(|_| !leaky),
            sole,
            calendar_months,
            ..LimitSpec::new(
                algorithm,
                match algorithm {
                    Algorithm::SlidingWindowLog => requests.min(DEFAULT_MAX_SLIDING_LOG_HITS).into(),
                    Algorithm::FixedWindow | Algorithm::SlidingWindowCounter => {
                        above_32_bits.unwrap_or(requests.into())
                    }
                    _ => requests.into(),
                },
                period,
            )
        })
        .expect("keys that the algorithm knows, in their ranges")
    })
}

fn start() -> impl Strategy<Value = Time> {
    prop_oneof![
        1 => (0..3_u64).prop_map(Time::from_micros),
        4 => (1_700_000_000_000_000..1_800_000_000_000_000_u64).prop_map(Time::from_micros),
        1 => Just(Time::from_micros(u64::MAX / 2)),
    ]
}

fn step(shape: HistoryOptions) -> impl Strategy<Value = Step> {
    (any::<Index>(), jump(shape.backwards), amount(shape.refunds), max_delay())
        .prop_map(|(limit, jump, amount, max_delay)| Step { limit, jump, amount, max_delay })
}

pub(crate) fn jump(backwards: Backwards) -> BoxedStrategy<Jump> {
    let off = -1..=1_i64;
    let forwards = prop_oneof![
        4 => Just(Jump::Stay),
        2 => (1..4_u64).prop_map(Jump::Micros),
        2 => (0..1_000_u64).prop_map(Jump::Share),
        1 => (1_000..3_500_u64).prop_map(Jump::Share),
        3 => (1..4_u64, off.clone()).prop_map(|(times, off)| Jump::HitTimes(times, off)),
        1 => off.clone().prop_map(Jump::Period),
        2 => off.clone().prop_map(Jump::Boundary),
        3 => off.clone().prop_map(Jump::Retry),
        1 => off.prop_map(Jump::Reset),
    ];
    match backwards {
        Backwards::Never => forwards.boxed(),
        Backwards::WithinAPeriod | Backwards::AnyFar => {
            prop_oneof![9 => forwards, 1 => (0..3_000_u64).prop_map(Jump::Back)].boxed()
        }
    }
}

pub(crate) fn amount(refunds: bool) -> BoxedStrategy<Amount> {
    let forwards = prop_oneof![
        1 => Just(Amount::Peek),
        6 => (1..5_u64).prop_map(Amount::Few),
        4 => (1..=4_u64).prop_map(Amount::Quarters),
        1 => Just(Amount::OneTooMany),
        1 => Just(Amount::Most),
    ];
    if !refunds {
        return forwards.boxed();
    }
    prop_oneof![
        10 => forwards,
        2 => (1..5_u64).prop_map(Amount::Back),
        1 => (1..=4_u64).prop_map(Amount::BackQuarters),
        1 => Just(Amount::BackMost),
    ]
    .boxed()
}

pub(crate) fn max_delay() -> impl Strategy<Value = MaxDelay> {
    prop_oneof![
        2 => Just(MaxDelay::Micros(0)),
        1 => (0..30_000_000_u64).prop_map(MaxDelay::Micros),
        3 => (0..6_u64, -1..=1_i64).prop_map(|(times, off)| MaxDelay::HitTimes(times, off)),
        1 => Just(MaxDelay::Endless),
    ]
}

impl Scenario {
    /// Runs the history with `charge`; later times depend on its results.
    pub(crate) fn run(
        &self,
        mut charge: impl FnMut(&Limit, Time, ChargeRequest) -> Result<ChargeResult, TestCaseError>,
    ) -> TestCaseResult {
        let mut now = self.start;
        let mut latest = now;
        let mut last = ChargeResult::default();
        for step in &self.steps {
            let limit = step.limit.get(&self.limits);
            now = step.jump.from(now, limit, &last);
            let back = limit.period_us().saturating_mul(self.max_periods_back);
            now = now.max(Time::from_micros(latest.as_micros().saturating_sub(back)));
            latest = latest.max(now);
            last = charge(limit, now, ChargeRequest::new(step.amount.of(limit), step.max_delay.of(limit)))?;
        }
        Ok(())
    }
}

impl Jump {
    pub(crate) fn from(self, now: Time, limit: &Limit, last: &ChargeResult) -> Time {
        let (by, off) = match self {
            Self::Stay => (0, 0),
            Self::Micros(micros) => (micros, 0),
            Self::Share(thousandths) => (limit.period_us() / 1000 * thousandths, 0),
            Self::HitTimes(times, off) => (hit_us(limit) * times, off),
            Self::Period(off) => (limit.period_us(), off),
            Self::Boundary(off) => (fixed_window::window_bounds(limit, now).1.since_us(now), off),
            Self::Retry(off) => (last.retry_after_us.unwrap_or(0), off),
            Self::Reset(off) => (last.reset_us, off),
            Self::Back(thousandths) => {
                let back = limit.period_us() / 1000 * thousandths;
                return Time::from_micros(now.as_micros().saturating_sub(back));
            }
        };
        // Bounded, because some waits exceed the range of the clock; an offset must not move the clock back.
        let by = if by > 10 * limit.period_us() { limit.period_us() } else { by };
        now.plus_us(by.saturating_add_signed(off))
    }
}

impl Amount {
    pub(crate) fn of(self, limit: &Limit) -> Hits {
        let capacity = limit.capacity();
        match self {
            Self::Peek => Hits::Peek,
            Self::Few(hits) => Hits::Charge(hits),
            Self::Quarters(quarters) => Hits::Charge((capacity * quarters / 4).max(1)),
            Self::OneTooMany => Hits::Charge(capacity + 1),
            Self::Most => Hits::Charge(MAX_HITS),
            Self::Back(hits) => Hits::Refund(hits),
            Self::BackQuarters(quarters) => Hits::Refund((capacity * quarters / 4).max(1)),
            Self::BackMost => Hits::Refund(MAX_HITS),
        }
    }
}

impl MaxDelay {
    pub(crate) fn of(self, limit: &Limit) -> u64 {
        match self {
            Self::Micros(micros) => micros,
            Self::HitTimes(times, off) => (hit_us(limit) * times).saturating_add_signed(off),
            Self::Endless => u64::MAX,
        }
    }
}

/// Time for one hit to drain, in microseconds, rounded up.
fn hit_us(limit: &Limit) -> u64 {
    limit.period_us().div_ceil(limit.requests_per_unit().max(1))
}

/// Time at which hits were last counted.
pub(crate) fn last_counted(state: &State) -> Time {
    match state {
        State::TokenBucket(state) => state.last,
        State::LeakyBucket(state) => state.last,
        State::FixedWindow(state) => state.last,
        State::SlidingWindowLog(state) => state.last,
        State::SlidingWindowCounter(state) => state.last,
        State::CalendarWindow(state) => state.last,
        State::Slots(state) => state.last,
        State::WithBan(state) => last_counted(&state.counter),
        State::WithReservations(state) => last_counted(&state.counter),
        State::WithPool(state) => last_counted(&state.part),
    }
}

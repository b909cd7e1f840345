//! A limit: how many hits pass in which period, by which algorithm, and what is promised about it.
//!
//! `LimitSpec` is what somebody wrote; `Limit` is what the algorithms use. `Limit::new` is the only way from one to the
//! other, so that a `Limit` is valid once built and no algorithm checks anything again.

use std::fmt;
use std::num::NonZeroU32;

/// A day in microseconds.
const DAY_US: u64 = 86_400_000_000;

/// The longest period, in microseconds: 366 days.
pub const MAX_PERIOD_US: u64 = 366 * DAY_US;

/// How hits are counted against a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Algorithm {
    /// Tokens refill continuously; idle time earns a burst.
    TokenBucket,
    /// Requests leave one by one at a fixed rate; those that wait are held.
    LeakyBucket,
    /// A count for each window aligned to the Unix epoch.
    #[default]
    FixedWindow,
    /// An entry for each admitted hit; exact in any window.
    SlidingWindowLog,
    /// The last window's count, weighted by what is left of it, plus this window's.
    SlidingWindowCounter,
}

impl Algorithm {
    /// All five, in the order of the documentation.
    pub const ALL: [Self; 5] =
        [Self::TokenBucket, Self::LeakyBucket, Self::FixedWindow, Self::SlidingWindowLog, Self::SlidingWindowCounter];

    /// The name in rule files, metrics and counter keys.
    pub const fn name(self) -> &'static str {
        match self {
            Self::TokenBucket => "token_bucket",
            Self::LeakyBucket => "leaky_bucket",
            Self::FixedWindow => "fixed_window",
            Self::SlidingWindowLog => "sliding_window_log",
            Self::SlidingWindowCounter => "sliding_window_counter",
        }
    }

    /// The algorithm of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The unit of a period.
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
    /// 7 days; windows begin on Thursdays, as the epoch did.
    Week,
}

impl Unit {
    /// All units, shortest first.
    pub const ALL: [Self; 7] = [Self::Second, Self::Minute, Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year];

    /// The name in rule files: lower case, singular.
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

    /// The unit of that name, in any case.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|unit| unit.name().eq_ignore_ascii_case(name))
    }

    /// The unit's number in `RateLimitResponse.RateLimit.Unit`.
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

    /// Its length in seconds.
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

/// The time over which a limit holds: a unit times a multiplier, 366 days at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Period {
    unit: Unit,
    multiplier: u32,
}

impl Period {
    /// `multiplier` units; `None` if that is 0 or longer than 366 days.
    pub const fn new(unit: Unit, multiplier: u32) -> Option<Self> {
        let period = Self { unit, multiplier };
        // Neither factor is large enough for the product to pass 64 bits: 31 536 000 x 2^32 x 10^6 would, so compare
        // seconds.
        let seconds = unit.seconds() * multiplier as u64;
        if multiplier == 0 || seconds > MAX_PERIOD_US / 1_000_000 { None } else { Some(period) }
    }

    /// The unit as written.
    pub const fn unit(self) -> Unit {
        self.unit
    }

    /// The multiplier as written, at least 1.
    pub const fn multiplier(self) -> u32 {
        self.multiplier
    }

    /// Its length in microseconds; months are 30 days and years 365.
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

/// What replicas may disagree about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consistency {
    /// Every admitted hit was counted in the store first.
    Strict,
    /// Answered from this process, with at most this much over the limit in any period.
    Eventual(Overshoot),
}

/// A bound on the hits admitted over a limit in any span of one period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overshoot {
    /// Thousandths of a percent of the limit, 1 to 100 000.
    MilliPercent(u32),
    /// So many hits, at least 1.
    Hits(u32),
}

impl Overshoot {
    /// What applies where a rule says `eventual` and no more: 5 %.
    pub const DEFAULT: Self = Self::MilliPercent(5_000);
}

/// What a rule answers when its counter can not be asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StorePolicy {
    /// Limit within this process.
    #[default]
    Local,
    /// Admit.
    Allow,
    /// Refuse, to be tried again after 1 s.
    Deny,
    /// Answer UNAVAILABLE, so that Envoy's `failure_mode_deny` decides.
    Error,
}

impl StorePolicy {
    /// All four.
    pub const ALL: [Self; 4] = [Self::Local, Self::Allow, Self::Deny, Self::Error];

    /// The name in rule files and settings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::Error => "error",
        }
    }

    /// The policy of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|policy| policy.name() == name)
    }
}

/// A limit as somebody asked for it. `None` stands for "not said".
#[derive(Clone, Copy, Debug)]
pub struct LimitSpec {
    /// How hits are counted.
    pub algorithm: Algorithm,
    /// Hits in a period; 0 refuses everything.
    pub requests_per_unit: u32,
    /// The period.
    pub period: Period,
    /// token_bucket: the tokens the bucket holds; `requests_per_unit` where not said.
    pub bucket_size: Option<u32>,
    /// leaky_bucket: the requests in the bucket at once, the one that is leaving included; 1 where not said.
    pub queue_size: Option<u32>,
    /// leaky_bucket and token_bucket: the longest an answer may be held, in microseconds.
    pub max_wait_us: Option<u64>,
    /// Whether refused hits count.
    pub count_rejected: Option<bool>,
    /// Strict where not said.
    pub consistency: Option<Consistency>,
    /// Local where not said.
    pub on_store_error: Option<StorePolicy>,
    /// Whether it is the only limit of its descriptor.
    pub sole: bool,
    /// Whether fixed windows of months follow the calendar (UTC).
    pub calendar_months: bool,
    /// The most requests per unit that a sliding_window_log may keep.
    pub log_max: u32,
}

impl LimitSpec {
    /// The plainest limit: so many a period, all else as by default.
    pub const fn new(algorithm: Algorithm, requests_per_unit: u32, period: Period) -> Self {
        Self {
            algorithm,
            requests_per_unit,
            period,
            bucket_size: None,
            queue_size: None,
            max_wait_us: None,
            count_rejected: None,
            consistency: None,
            on_store_error: None,
            sole: true,
            calendar_months: false,
            log_max: DEFAULT_LOG_MAX,
        }
    }
}

/// The most requests per unit that a sliding_window_log keeps unless a setting says otherwise.
pub const DEFAULT_LOG_MAX: u32 = 10_000;

/// Why terms are no limit. Each names the key at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// A key that means nothing for this algorithm.
    #[error("`{key}` has no meaning for {algorithm}")]
    Meaningless {
        /// The key.
        key: &'static str,
        /// The algorithm.
        algorithm: Algorithm,
    },
    /// A bucket or queue that holds nothing.
    #[error("`{key}` must be at least 1")]
    Zero {
        /// The key.
        key: &'static str,
    },
    /// A log of more entries than one may keep.
    #[error("sliding_window_log keeps an entry for each hit, {limit} here, and at most {most} are allowed")]
    LogTooLong {
        /// `requests_per_unit`.
        limit: u32,
        /// The most that is allowed.
        most: u32,
    },
    /// `consistency: eventual` with something it can not promise.
    #[error("`consistency: eventual` can not be kept with {with}")]
    NotEventual {
        /// What it clashes with.
        with: &'static str,
    },
}

impl LimitError {
    /// The key of the rule file that is at fault.
    pub const fn key(self) -> &'static str {
        match self {
            Self::Meaningless { key, .. } | Self::Zero { key } => key,
            Self::LogTooLong { .. } => "requests_per_unit",
            Self::NotEventual { .. } => "consistency",
        }
    }
}

/// A valid limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    algorithm: Algorithm,
    requests_per_unit: u32,
    period: Period,
    capacity: u32,
    max_wait_us: u64,
    count_rejected: bool,
    calendar_months: bool,
    consistency: Consistency,
    on_store_error: StorePolicy,
    /// What its period is longer than it was written, in microseconds.
    longer_us: u64,
}

impl Limit {
    /// The limit that `terms` describe, or the first thing that is wrong with them.
    pub fn new(terms: &LimitSpec) -> Result<Self, LimitError> {
        let algorithm = terms.algorithm;
        let meaningless = |key| Err(LimitError::Meaningless { key, algorithm });
        let token = algorithm == Algorithm::TokenBucket;
        let leaky = algorithm == Algorithm::LeakyBucket;
        if terms.bucket_size.is_some() && !token {
            return meaningless("bucket_size");
        }
        if terms.queue_size.is_some() && !leaky {
            return meaningless("queue_size");
        }
        if terms.max_wait_us.is_some() && !token && !leaky {
            return meaningless("max_wait");
        }
        if terms.count_rejected == Some(true) && leaky {
            return meaningless("count_rejected");
        }
        if terms.bucket_size == Some(0) {
            return Err(LimitError::Zero { key: "bucket_size" });
        }
        if terms.queue_size == Some(0) {
            return Err(LimitError::Zero { key: "queue_size" });
        }
        if algorithm == Algorithm::SlidingWindowLog && terms.requests_per_unit > terms.log_max {
            return Err(LimitError::LogTooLong { limit: terms.requests_per_unit, most: terms.log_max });
        }
        let consistency = terms.consistency.unwrap_or(Consistency::Strict);
        if let Consistency::Eventual(_) = consistency {
            Self::check_eventual(terms)?;
        }
        Ok(Self {
            algorithm,
            requests_per_unit: terms.requests_per_unit,
            period: terms.period,
            capacity: match algorithm {
                Algorithm::TokenBucket => terms.bucket_size.unwrap_or(terms.requests_per_unit),
                Algorithm::LeakyBucket => terms.queue_size.unwrap_or(1),
                _ => terms.requests_per_unit,
            },
            max_wait_us: terms.max_wait_us.unwrap_or(if leaky { u64::MAX } else { 0 }),
            count_rejected: terms
                .count_rejected
                .unwrap_or(algorithm == Algorithm::FixedWindow && terms.sole && consistency == Consistency::Strict),
            calendar_months: terms.calendar_months
                && algorithm == Algorithm::FixedWindow
                && terms.period.unit() == Unit::Month,
            consistency,
            on_store_error: terms.on_store_error.unwrap_or_default(),
            longer_us: 0,
        })
    }

    /// The share of one of so many replicas that count by themselves: the hits of a period and what can pass at once
    /// are divided and rounded down, to at least 1 unless they were 0. All else stays.
    pub const fn share_of(&self, replicas: NonZeroU32) -> Self {
        const fn divided(count: u32, replicas: NonZeroU32) -> u32 {
            let share = count / replicas.get();
            if share == 0 && count > 0 { 1 } else { share }
        }
        Self {
            requests_per_unit: divided(self.requests_per_unit, replicas),
            capacity: divided(self.capacity, replicas),
            ..*self
        }
    }

    /// The same over a period that is longer by so many microseconds, ten seconds at most, in whole milliseconds.
    pub const fn lengthened(&self, by_us: u64) -> Self {
        Self { longer_us: if by_us < 10_000_000 { by_us / 1000 * 1000 } else { 10_000_000 }, ..*self }
    }

    /// What a share or a lease can not express: held answers, and debt.
    fn check_eventual(terms: &LimitSpec) -> Result<(), LimitError> {
        let with = if terms.algorithm == Algorithm::LeakyBucket {
            "leaky_bucket: a queue needs one order of arrival for all replicas"
        } else if terms.max_wait_us.is_some_and(|wait| wait > 0) {
            "`max_wait`: tokens taken in advance need one order of arrival for all replicas"
        } else if terms.count_rejected == Some(true) {
            "`count_rejected: true`: a refusal that is answered locally is not counted"
        } else {
            return Ok(());
        };
        Err(LimitError::NotEventual { with })
    }

    /// How hits are counted.
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Hits in a period; 0 refuses everything.
    pub const fn requests_per_unit(&self) -> u32 {
        self.requests_per_unit
    }

    /// The period as written.
    pub const fn period(&self) -> Period {
        self.period
    }

    /// The period in microseconds, 1 s to 366 days.
    pub const fn period_us(&self) -> u64 {
        self.period.micros() + self.longer_us
    }

    /// What can pass at once: the limit of a window, the size of a bucket or queue.
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The longest an answer may be held, in microseconds; `u64::MAX`: as long as the caller waits.
    pub const fn max_wait_us(&self) -> u64 {
        self.max_wait_us
    }

    /// Whether refused hits count too.
    pub const fn count_rejected(&self) -> bool {
        self.count_rejected
    }

    /// Whether its windows are calendar months in UTC.
    pub const fn calendar_months(&self) -> bool {
        self.calendar_months
    }

    /// What replicas may disagree about.
    pub const fn consistency(&self) -> Consistency {
        self.consistency
    }

    /// What is answered when the counter can not be asked.
    pub const fn on_store_error(&self) -> StorePolicy {
        self.on_store_error
    }
}

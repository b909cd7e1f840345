//! A limit: the number of hits that pass in a period, the algorithm that counts them, and its guarantees.
//!
//! A [`LimitSpec`] is a limit as written; a [`Limit`] is a limit as the algorithms use it. [`Limit::new`] is the only
//! way from one to the other, so a `Limit` is always valid and no algorithm checks it again.
//!
//! Decides: which limits are valid; default of `count_rejected`, `bucket_size` and `queue_size`.
//! Decides: the share of `local` (`fallback_share`); that a `reserve` has a hit for each region.
//! Decides: which policies for a failed store there are (`StoreFailurePolicy`).

pub mod request;
pub mod slot;
pub mod counter_path;
pub mod period;
pub mod ban;
pub mod overflow;
pub mod charge;
pub mod reservation;
pub mod algorithm;
pub mod slot_table;
pub mod reservation_table;
pub mod calendar;
pub mod window;
pub mod active;
pub mod region_parts;
pub mod local_budget;
pub mod hold;
pub mod pool;
pub mod division;
pub mod region_requests;
mod contradicting_keys;

use std::fmt;
use std::num::{NonZeroU16, NonZeroU32};

use self::algorithm::{Algorithm, CapacityRuleKey, RejectedHitsPolicy};
use self::ban::Ban;
use self::overflow::ChainPosition;
use self::period::{Period, Unit, period_in_words};
use self::reservation::ReservationPolicy;
use self::window::{CalendarWindows, WindowSpec};
use crate::base::named_enum::{named_enum, serialize_by_name};
use crate::limit::algorithm::CountingMethod;

/// Consistency of a counter between replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consistency {
    /// Every hit is counted in the store before it is admitted.
    Strict,
    /// Hits are admitted from this process, with at most this much over the limit in any period.
    Eventual(Overshoot),
}

/// Bound on the hits admitted over a limit in any span of one period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overshoot {
    /// Thousandths of a percent of the limit, 1 to 100 000.
    MilliPercent(u32),
    /// Number of hits, at least 1.
    Hits(u32),
}

impl Overshoot {
    /// Overshoot of a rule without `max_overshoot`, with `consistency: eventual` or `scope: global`: 5 %.
    pub const DEFAULT: Self = Self::MilliPercent(5_000);
}

/// Regions that a limit holds over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Each region has the limit for itself.
    Region,
    /// All regions together have the limit.
    Global(GlobalScope),
}

/// Keys of a limit that all regions share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalScope {
    /// Bound on the hits that all regions together admit over the limit in any period.
    pub max_overshoot: Overshoot,
    /// Part of the limit that is split evenly over the regions in advance: thousandths of a percent, up to 100 000.
    pub reserve_milli_percent: u32,
    /// Hits that a region admits while it is cut off.
    pub on_region_loss: RegionLossPolicy,
    /// Number of regions.
    pub regions: NonZeroU16,
}

impl GlobalScope {
    /// Reserve of a global limit without `reserve`: 10 %, in thousandths of a percent.
    pub const DEFAULT_RESERVE_MILLI_PERCENT: u32 = 10_000;

    /// Creates the scope of a limit over `regions` regions, with all optional keys at their defaults.
    pub const fn new(regions: NonZeroU16) -> Self {
        Self {
            max_overshoot: Overshoot::DEFAULT,
            reserve_milli_percent: Self::DEFAULT_RESERVE_MILLI_PERCENT,
            on_region_loss: RegionLossPolicy::Share,
            regions,
        }
    }
}

named_enum! {
    /// Failure policy: the decision of a rule while its store fails.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub enum StoreFailurePolicy {
        /// Limit within this process.
        #[default]
        Local = "local",
        /// Admit.
        Allow = "allow",
        /// Reject, with a retry after 1 s.
        Deny = "deny",
        /// Answer UNAVAILABLE, so that Envoy's `failure_mode_deny` decides.
        Error = "error",
    }
}

named_enum! {
    /// Hits that a cut-off region admits in a period, once those that it was granted are used.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub enum RegionLossPolicy {
        /// The region's part of half the overshoot.
        #[default]
        Share = "share",
        /// The limit divided by the number of regions, which may exceed the overshoot.
        Local = "local",
        /// None.
        Deny = "deny",
        /// Any number.
        Allow = "allow",
    }
}

serialize_by_name!(Algorithm, Unit, StoreFailurePolicy, RegionLossPolicy);

/// Unvalidated limit. `None` stands for a key that was not written.
#[derive(Clone, Copy, Debug)]
pub struct LimitSpec {
    /// Algorithm that counts hits.
    pub algorithm: Algorithm,
    /// Hits in a period, at most [`MAX_REQUESTS_PER_UNIT`]; 0 rejects everything.
    pub requests_per_unit: u64,
    /// Period of the limit.
    pub period: Period,
    /// token_bucket: tokens that the bucket holds; default `requests_per_unit`.
    pub bucket_size: Option<u32>,
    /// leaky_bucket: requests in the bucket at once, including the one that is leaving; default 1.
    pub queue_size: Option<u32>,
    /// leaky_bucket and token_bucket: maximum delay of an answer, in microseconds.
    pub max_wait_us: Option<u64>,
    /// Rejected hits count too.
    pub count_rejected: Option<bool>,
    /// Consistency between replicas; default strict.
    pub consistency: Option<Consistency>,
    /// Regions that the limit holds over; default region.
    pub scope: Option<Scope>,
    /// Answer while the store fails; default local.
    pub on_store_error: Option<StoreFailurePolicy>,
    /// The limit is the only one of its descriptor.
    pub sole: bool,
    /// Fixed windows of months follow the calendar (UTC).
    pub calendar_months: bool,
    /// Calendar that fixed windows follow; default: windows of the period's length, from the Unix epoch.
    pub window: Option<WindowSpec>,
    /// Ban of a client that exceeds the limit; default: none.
    pub ban: Option<Ban>,
    /// Requests charge an estimate, and the end of their streams settles; default: no.
    pub reservations: Option<ReservationPolicy>,
    /// Place of the limit among those that overflow into each other; default: it is none of them.
    pub chain_position: ChainPosition,
    /// Maximum `requests_per_unit` of a sliding_window_log.
    pub log_max: u32,
}

impl LimitSpec {
    /// Creates a limit with all optional keys at their defaults.
    pub const fn new(algorithm: Algorithm, requests_per_unit: u64, period: Period) -> Self {
        Self {
            algorithm,
            requests_per_unit,
            period,
            bucket_size: None,
            queue_size: None,
            max_wait_us: None,
            count_rejected: None,
            consistency: None,
            scope: None,
            on_store_error: None,
            sole: true,
            calendar_months: false,
            window: None,
            ban: None,
            reservations: None,
            chain_position: ChainPosition::NotInChain,
            log_max: DEFAULT_MAX_SLIDING_LOG_HITS,
        }
    }
}

/// Maximum of `requests_per_unit`, 2^53 - 1: larger numbers are not exact in a Lua script.
pub const MAX_REQUESTS_PER_UNIT: u64 = (1 << 53) - 1;

/// Default maximum of `requests_per_unit` for a sliding_window_log.
pub const DEFAULT_MAX_SLIDING_LOG_HITS: u32 = 10_000;

/// Default timeout of Envoy's rate limit filter, in microseconds.
pub const DEFAULT_ENVOY_TIMEOUT_US: u64 = 20_000;

/// Reason why a [`LimitSpec`] is not a valid limit. Each names the key at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// The key does not apply to this algorithm.
    #[error("`{key}` does not apply to {algorithm}")]
    Meaningless {
        /// Key at fault.
        key: &'static str,
        /// Algorithm of the limit.
        algorithm: Algorithm,
    },
    /// The bucket or queue holds nothing.
    #[error("`{key}` must be at least 1")]
    Zero {
        /// Key at fault.
        key: &'static str,
    },
    /// A window of less than a day would be longer than the day that it is counted in.
    #[error("`window` counts {unit}s from the start of each day, so {multiplier} {unit}s are too long")]
    WindowTooLong {
        /// Unit of the limit.
        unit: &'static str,
        /// Its multiplier.
        multiplier: u32,
    },
    /// The log would hold more entries than allowed.
    #[error("sliding_window_log keeps an entry for each hit, {limit} here, and at most {max} are allowed")]
    LogTooLong {
        /// `requests_per_unit` of the limit.
        limit: u64,
        /// Maximum that is allowed.
        max: u32,
    },
    /// `requests_per_unit` is above 2^32 - 1, which only windows of one region count.
    #[error("`requests_per_unit` above 4294967295 cannot be kept with {with}")]
    NotLarge {
        /// Key or algorithm that contradicts it, with what to write.
        with: &'static str,
    },
    /// `consistency: eventual` contradicts another key.
    #[error("`consistency: eventual` cannot be kept with {with}")]
    NotEventual {
        /// Key or algorithm that contradicts it, with the reason.
        with: &'static str,
    },
    /// `reservations` contradicts another key.
    #[error("`reservations` cannot be kept with {with}")]
    NotReserved {
        /// Key or algorithm that contradicts it, with the reason.
        with: &'static str,
    },
    /// A limit that overflows into another, or takes the overflow of another, contradicts another key.
    #[error("limits that overflow into each other (`overflow_to`) cannot have {with}")]
    OverflowUnsupported {
        /// Key or algorithm that contradicts it, with the reason.
        with: &'static str,
    },
    /// `scope: global` contradicts another key.
    #[error("`scope: global` cannot be kept with {with}")]
    NotGlobal {
        /// Key or algorithm that contradicts it, with the reason.
        with: &'static str,
    },
    /// The reserve of a global limit gives a region nothing.
    #[error("`scope: global`: the reserve of this limit gives each of {regions} regions less than one hit")]
    ReserveTooSmall {
        /// Number of regions.
        regions: u16,
    },
}

impl LimitError {
    /// Key of the rule file that is at fault.
    pub const fn rule_file_key(self) -> &'static str {
        match self {
            Self::Meaningless { key, .. } | Self::Zero { key } => key,
            Self::WindowTooLong { .. } => "window",
            Self::LogTooLong { .. } | Self::NotLarge { .. } => "requests_per_unit",
            Self::NotEventual { .. } => "consistency",
            Self::NotReserved { .. } => "reservations",
            Self::OverflowUnsupported { .. } => "overflow_to",
            Self::NotGlobal { .. } | Self::ReserveTooSmall { .. } => "scope",
        }
    }
}

/// Whether a region reaches the global Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionConnection {
    /// It answered a moment ago.
    Connected,
    /// It has not answered for some seconds.
    CutOff,
}

/// Valid limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    algorithm: Algorithm,
    counting: CountingMethod,
    requests_per_unit: u64,
    period: Period,
    capacity: u64,
    /// Capacity without regard to holds and to how hits are charged: the size of the bucket that a level is of.
    size: u64,
    /// The level of the bucket was charged under this limit, whatever its size.
    never_cuts_level: bool,
    max_wait_us: u64,
    count_rejected: bool,
    calendar_months: bool,
    window: Option<CalendarWindows>,
    ban: Option<Ban>,
    reservations: Option<ReservationPolicy>,
    chain_position: ChainPosition,
    consistency: Consistency,
    scope: Scope,
    /// How the Redis of a region counts the limit; `None`: as one of its own.
    in_region: Option<RegionConnection>,
    on_store_error: StoreFailurePolicy,
    /// Milliseconds by which the period is longer than written.
    extension_ms: u16,
}

impl Limit {
    /// Longest delay that bounds no tokens taken in advance: 2^50 - 1, so that a flags word holds eight times it.
    pub(crate) const UNBOUNDED_MAX_WAIT_US: u64 = (1 << 50) - 1;

    /// Validates `spec`.
    ///
    /// # Errors
    /// The first key that contradicts the algorithm, is out of range, or contradicts another key.
    pub fn new(spec: &LimitSpec) -> Result<Self, LimitError> {
        let properties = spec.algorithm.properties();
        spec.check_rule_keys(properties)?;
        let consistency = spec.consistency.unwrap_or(Consistency::Strict);
        if let Consistency::Eventual(_) = consistency {
            spec.check_eventual_consistency(properties)?;
        }
        let scope = spec.scope.unwrap_or(Scope::Region);
        if let Scope::Global(_) = scope {
            spec.check_global_scope()?;
        }
        if spec.chain_position != ChainPosition::NotInChain {
            spec.check_overflow()?;
        }
        let too_long =
            LimitError::WindowTooLong { unit: spec.period.unit().name(), multiplier: spec.period.multiplier() };
        let build_windows = |window| CalendarWindows::new(&window, spec.period).ok_or(too_long);
        let window = spec.window.map(build_windows).transpose()?;
        let capacity = match properties.capacity {
            CapacityRuleKey::RequestsPerUnit => spec.requests_per_unit,
            CapacityRuleKey::BucketSize => spec.bucket_size.map_or(spec.requests_per_unit, u64::from),
            CapacityRuleKey::QueueSize => spec.queue_size.map_or(1, u64::from),
        };
        let mut limit = Self {
            algorithm: spec.algorithm,
            counting: if window.is_some() { CountingMethod::CalendarWindow } else { spec.algorithm.into() },
            requests_per_unit: spec.requests_per_unit,
            period: spec.period,
            capacity,
            size: capacity,
            never_cuts_level: false,
            max_wait_us: spec.max_wait_us.unwrap_or(properties.delay.default_max_wait_us()),
            count_rejected: false,
            calendar_months: spec.calendar_months
                && properties.follows_calendar
                && window.is_none()
                && spec.period.unit() == Unit::Month,
            window,
            ban: spec.ban,
            reservations: spec.reservations,
            chain_position: spec.chain_position,
            consistency,
            scope,
            in_region: None,
            on_store_error: spec.on_store_error.unwrap_or_default(),
            extension_ms: 0,
        };
        limit.count_rejected = spec.count_rejected.unwrap_or_else(|| spec.sole && limit.counts_rejected_if_sole());
        limit.check_reserve()?;
        Ok(limit)
    }

    /// Returns the share of one replica, if `replicas` count independently in each region of the limit.
    ///
    /// `requests_per_unit` and the capacity are divided and rounded down, to at least 1 unless they were 0. Everything
    /// else stays.
    pub const fn share_per_replica(&self, replicas: NonZeroU32) -> Self {
        const fn divide_to_at_least_one(count: u64, replicas: NonZeroU32) -> u64 {
            let share = count / replicas.get() as u64;
            if share == 0 && count > 0 { 1 } else { share }
        }
        let regions = NonZeroU32::new(self.region_count().get() as u32).expect("a nonzero number stays nonzero");
        let replicas = replicas.saturating_mul(regions);
        Self { requests_per_unit: divide_to_at_least_one(self.requests_per_unit, replicas), ..*self }
            .with_capacity(divide_to_at_least_one(self.capacity, replicas))
    }

    /// Returns the share of one replica while its store fails: as [`Self::share_per_replica`], and for a global limit
    /// at most the replica's part of the cut-off allowance, because the region's grants may have been used already.
    pub fn fallback_share(&self, replicas: NonZeroU32) -> Self {
        let share = self.share_per_replica(replicas);
        if self.global_scope().is_none() {
            return share;
        }
        let most = self.cut_off_allowance() / u64::from(replicas.get());
        Self { requests_per_unit: share.requests_per_unit.min(most), ..share }.with_capacity(share.capacity.min(most))
    }

    /// Returns the limit with another `requests_per_unit`, which is its capacity too.
    pub const fn with_requests_per_unit(&self, requests_per_unit: u64) -> Self {
        Self { requests_per_unit, ..*self }.with_capacity(requests_per_unit)
    }

    const fn with_capacity(&self, capacity: u64) -> Self {
        Self { capacity, size: capacity, ..*self }
    }

    /// Returns the limit with another `on_store_error`.
    #[must_use]
    pub const fn with_on_store_error(&self, on_store_error: StoreFailurePolicy) -> Self {
        Self { on_store_error, ..*self }
    }

    /// Returns the limit with its period extended by `by_us` microseconds, in whole milliseconds and by 10 s at most.
    pub fn with_longer_period(&self, by_us: u64) -> Self {
        const MAX_EXTENSION_MS: u16 = 10_000;
        Self { extension_ms: u16::try_from(by_us / 1000).unwrap_or(MAX_EXTENSION_MS).min(MAX_EXTENSION_MS), ..*self }
    }

    /// Algorithm that counts hits.
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// State and script that count the limit.
    pub const fn counting_method(&self) -> CountingMethod {
        self.counting
    }

    /// Hits in a period; 0 rejects everything.
    pub const fn requests_per_unit(&self) -> u64 {
        self.requests_per_unit
    }

    /// Period as written.
    pub const fn period(&self) -> Period {
        self.period
    }

    /// Period in microseconds, 1 s to 366 days.
    pub const fn period_us(&self) -> u64 {
        self.period.micros() + self.extension_ms as u64 * 1000
    }

    /// Hits that can pass at once: the limit of a window, the size of a bucket or queue.
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// [`Limit::capacity`] without regard to holds: the size of the bucket that a level is of.
    pub(crate) const fn size_without_holds(&self) -> u64 {
        self.size
    }

    /// Most hits of one window of a sliding_window_counter that count: the limit, and as many rejected ones.
    pub(crate) const fn most_hits_of_window(&self) -> u64 {
        let has_debt = self.count_rejected || self.reservations.is_some();
        if has_debt { 2 * self.size } else { self.size }
    }

    /// True if the level of the bucket is known to be one of this limit, because a hold was made under it.
    pub(crate) const fn never_cuts_level(&self) -> bool {
        self.never_cuts_level
    }

    /// Maximum delay of an answer, in microseconds; `u64::MAX`: up to the caller's deadline.
    pub const fn max_wait_us(&self) -> u64 {
        self.max_wait_us
    }

    /// [`Limit::max_wait_us`] as scripts know it: `Limit::UNBOUNDED_MAX_WAIT_US` from 35 years on.
    pub fn max_tokens_wait_us(&self) -> u64 {
        self.max_wait_us.min(Self::UNBOUNDED_MAX_WAIT_US)
    }

    /// Longest wait of a request in the queue of the limit, in microseconds; `None` if no request waits in one.
    pub fn longest_queue_wait_us(&self) -> Option<u64> {
        let is_queue = self.algorithm.properties().capacity == CapacityRuleKey::QueueSize;
        let each_us = self.period_us() / self.requests_per_unit.max(1);
        let places = self.capacity.saturating_sub(1);
        let waits = is_queue && places > 0 && self.max_wait_us >= each_us;
        waits.then(|| each_us.saturating_mul(places).min(self.max_wait_us))
    }

    /// `max_wait` in microseconds; `None` if it is the default of the algorithm, though a rule may write that too.
    pub fn non_default_max_wait_us(&self) -> Option<u64> {
        let default = self.algorithm.properties().delay.default_max_wait_us();
        Some(self.max_wait_us).filter(|max_wait_us| *max_wait_us != default)
    }

    /// Returns the same limit, which delays as long as another one.
    #[must_use]
    pub const fn with_max_wait_of(&self, other: &Self) -> Self {
        Self { max_wait_us: other.max_wait_us, ..*self }
    }

    /// Returns `true` if rejected hits count, unless the rule says otherwise, where this is the only limit.
    pub fn counts_rejected_if_sole(&self) -> bool {
        self.algorithm.properties().rejected_hits == RejectedHitsPolicy::CountedByDefault
            && self.consistency == Consistency::Strict
            && self.scope == Scope::Region
            && self.ban.is_none()
            && self.reservations.is_none()
    }

    /// Returns `true` if rejected hits count too.
    pub const fn counts_rejected_hits(&self) -> bool {
        self.count_rejected
    }

    /// Returns `true` if a peek is rejected only past the limit, and not once it is used up.
    pub fn passes_peeks_at_limit(&self) -> bool {
        self.count_rejected && self.algorithm() == Algorithm::FixedWindow
    }

    /// Returns `true` if windows are calendar months in UTC.
    pub const fn follows_calendar_months(&self) -> bool {
        self.calendar_months
    }

    /// Returns `true` if the limit counts requests at once, by slots; its period is then `max_duration`.
    pub const fn is_concurrent(&self) -> bool {
        matches!(self.algorithm, Algorithm::Concurrent)
    }

    /// Windows of a calendar that the limit follows.
    pub const fn calendar_windows(&self) -> Option<CalendarWindows> {
        self.window
    }

    /// Ban of a client that exceeds the limit.
    pub const fn ban(&self) -> Option<Ban> {
        self.ban
    }

    /// Reservations: requests charge an estimate, and the end of their streams settles.
    pub const fn reservations(&self) -> Option<ReservationPolicy> {
        self.reservations
    }

    /// Returns the limit with these reservations, if its algorithm and other keys allow them; else the same limit.
    #[must_use]
    pub fn with_reservations(&self, reservations: ReservationPolicy) -> Self {
        let is_strict = self.consistency == Consistency::Strict && self.scope == Scope::Region;
        match LimitSpec::reason_against_reservations(self.algorithm, self.ban) {
            None if is_strict => Self { reservations: Some(reservations), count_rejected: false, ..*self },
            _ => *self,
        }
    }

    /// Returns the limit without reservations.
    pub(crate) const fn without_reservations(&self) -> Self {
        Self { reservations: None, ..*self }
    }

    /// Returns the limit without reservations, with rejected hits that count: a settlement above the estimate.
    pub(crate) const fn for_excess_settlement(&self) -> Self {
        Self { reservations: None, count_rejected: true, ..*self }
    }

    /// Place of the limit among those of its list that overflow into each other.
    pub const fn chain_position(&self) -> ChainPosition {
        self.chain_position
    }

    /// Returns `true` if the end of a stream changes the counter: it frees a slot, or settles a reservation.
    pub const fn follows_streams(&self) -> bool {
        self.is_concurrent() || self.reservations.is_some()
    }

    /// Consistency between replicas.
    pub const fn consistency(&self) -> Consistency {
        self.consistency
    }

    /// Regions that the limit holds over.
    pub const fn scope(&self) -> Scope {
        self.scope
    }

    /// Answer while the store fails.
    pub const fn on_store_error(&self) -> StoreFailurePolicy {
        self.on_store_error
    }
}

/// Writes the limit for people: `10 per 5 minutes by token_bucket, bucket_size 20`.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_concurrent() {
            let (count, unit) = (self.period.multiplier(), self.period.unit().name());
            let plural = if count == 1 { "" } else { "s" };
            return write!(f, "{} at once, each for {count} {unit}{plural} at most", self.requests_per_unit);
        }
        let period = period_in_words(self.period.unit().name(), self.period.multiplier());
        write!(f, "{} per {period} by {}", self.requests_per_unit, self.algorithm)?;
        if let Some(key) = self.algorithm.properties().capacity.rule_file_key() {
            write!(f, ", {key} {}", self.capacity)?;
        }
        if let Some(window) = self.window {
            write!(f, " {window}")?;
        }
        if self.count_rejected {
            f.write_str(", rejected hits count")?;
        }
        if let Some(ban) = self.ban {
            write!(f, ", ban {ban}")?;
        }
        if let Some(reservations) = self.reservations {
            write!(f, ", reservations {reservations}")?;
        }
        if self.chain_position.takes_overflow() {
            f.write_str(", takes the overflow of the limit before it")?;
        }
        let mut keys = self.global_scope().into_iter().flat_map(GlobalScope::rule_file_keys);
        keys.try_for_each(|(key, value)| write!(f, ", {key} {value}"))
    }
}

//! Rate-limit algorithms: pure arithmetic on the state of a counter. This file has their tables.
//!
//! Each is a module with a `State` and two functions: `charge(limit, state, now, request) -> ChargeResult`, and
//! `admits`, a charge that changes nothing; [`state`] dispatches to them. None knows a clock, I/O, a log or a store.
//!
//! - A state holds what was *used*, not what is left, so a limit may change under a live counter.
//! - All numbers are integers; times are in microseconds; products that can exceed 64 bits are computed in u128.
//! - Rounding is against the caller. The one exception is sliding_window_counter, which rounds down.
//!
//! A new algorithm is a row of this table and of that of countings below it, a module of the same name here, and a
//! Lua file of the same name in `src/store/redis/lua/`. All else follows from the tables. The module's `State`
//! implements `StoredState`, so the compiler names what it lacks.
//!
//! Decides: the default algorithm (`fixed_window`); which keys apply to an algorithm.
//! Decides: which algorithms cannot be eventual, and why.

pub mod leaky_level;
pub mod stored_state;
pub mod token_bucket;
pub mod leaky_bucket;
pub mod fixed_window;
pub mod calendar_window;
pub mod sliding_window_log;
pub mod sliding_window_counter;
pub mod ban_state;
pub mod slots;
pub mod region_pool;
pub mod state;
pub mod joint_charge;
pub mod reservation_charge;
pub mod pool_charge;

use std::fmt;

/// Applies a macro to all rows of the table of algorithms.
///
/// A row is: attributes of the variant, the variant, the module (also its name in rule files, metrics and counter keys,
/// and the name of its Lua file), and its [`AlgorithmProperties`]. The order is that of the documentation.
macro_rules! for_each_algorithm {
    ($callback:ident) => {
        $callback! {
            /// Tokens are refilled continuously; idle time earns a burst.
            TokenBucket, token_bucket, AlgorithmProperties {
                capacity: CapacityRuleKey::BucketSize,
                delay: DelayPolicy::IfMaxWait,
                rejected_hits: RejectedHitsPolicy::CountedOnRequest,
                hit_expiry: HitExpiry::Continuous,
                rejection_end_is_fixed: false,
                not_eventual: None,
                follows_calendar: false,
            };
            /// Requests leave one by one at a fixed rate; those that find others before them are delayed.
            LeakyBucket, leaky_bucket, AlgorithmProperties {
                capacity: CapacityRuleKey::QueueSize,
                delay: DelayPolicy::UntilDeadline,
                rejected_hits: RejectedHitsPolicy::NeverCounted,
                hit_expiry: HitExpiry::Continuous,
                rejection_end_is_fixed: false,
                not_eventual: Some("leaky_bucket: a queue needs one order of arrival for all replicas"),
                follows_calendar: false,
            };
            /// One count for each window; windows are aligned to the Unix epoch.
            #[default]
            FixedWindow, fixed_window, AlgorithmProperties {
                capacity: CapacityRuleKey::RequestsPerUnit,
                delay: DelayPolicy::Never,
                rejected_hits: RejectedHitsPolicy::CountedByDefault,
                hit_expiry: HitExpiry::WithWindow,
                rejection_end_is_fixed: true,
                not_eventual: None,
                follows_calendar: true,
            };
            /// One entry for each admitted hit; exact in any window.
            SlidingWindowLog, sliding_window_log, AlgorithmProperties {
                capacity: CapacityRuleKey::RequestsPerUnit,
                delay: DelayPolicy::Never,
                rejected_hits: RejectedHitsPolicy::CountedOnRequest,
                hit_expiry: HitExpiry::AfterPeriod,
                rejection_end_is_fixed: false,
                not_eventual: None,
                follows_calendar: false,
            };
            /// Count of this window plus that of the previous one, weighted by the part of it that still overlaps.
            SlidingWindowCounter, sliding_window_counter, AlgorithmProperties {
                capacity: CapacityRuleKey::RequestsPerUnit,
                delay: DelayPolicy::Never,
                rejected_hits: RejectedHitsPolicy::CountedOnRequest,
                hit_expiry: HitExpiry::WithWindow,
                rejection_end_is_fixed: false,
                not_eventual: None,
                follows_calendar: false,
            };
        }
    };
}

/// Properties of an algorithm: the keys of a rule that apply to it, and what stores need to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlgorithmProperties {
    /// Key that sets the number of hits that can pass at once.
    pub capacity: CapacityRuleKey,
    /// Delay of an admitted request; decides whether `max_wait` applies.
    pub delay: DelayPolicy,
    /// Treatment of rejected hits; decides whether `count_rejected` applies.
    pub rejected_hits: RejectedHitsPolicy,
    /// Expiry of charged hits; decides how long counters are kept, and the size, life and return of leases.
    pub hit_expiry: HitExpiry,
    /// A rejection ends at a time that no further hit postpones, even if rejected hits count.
    pub rejection_end_is_fixed: bool,
    /// Reason why `consistency: eventual` does not apply; `None` if it does.
    pub not_eventual: Option<&'static str>,
    /// Windows can follow a calendar: `window`, or calendar months in UTC.
    pub follows_calendar: bool,
}

/// Key that sets the number of hits that can pass at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CapacityRuleKey {
    /// `requests_per_unit`: the limit of a window.
    RequestsPerUnit,
    /// `bucket_size`; `requests_per_unit` by default.
    BucketSize,
    /// `queue_size`; 1 by default.
    QueueSize,
}

impl CapacityRuleKey {
    /// Key of a rule file that only this kind of capacity has, if any.
    pub const fn rule_file_key(self) -> Option<&'static str> {
        match self {
            Self::RequestsPerUnit => None,
            Self::BucketSize => Some("bucket_size"),
            Self::QueueSize => Some("queue_size"),
        }
    }
}

/// Delay of an admitted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DelayPolicy {
    /// Admitted requests are answered at once.
    Never,
    /// Admitted requests are delayed only if the rule has a `max_wait`.
    IfMaxWait,
    /// Admitted requests are delayed until the caller's deadline at most, or for `max_wait` if that is shorter.
    UntilDeadline,
}

impl DelayPolicy {
    /// `max_wait` of a rule without it, in microseconds; `u64::MAX`: up to the caller's deadline.
    pub(super) const fn default_max_wait_us(self) -> u64 {
        match self {
            Self::Never | Self::IfMaxWait => 0,
            Self::UntilDeadline => u64::MAX,
        }
    }
}

/// Treatment of hits that are rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectedHitsPolicy {
    /// Never counted; `count_rejected: true` is an error.
    NeverCounted,
    /// Counted with `count_rejected: true`.
    CountedOnRequest,
    /// Counted by default if the limit is strict and the only one of its descriptor.
    CountedByDefault,
}

/// Expiry of charged hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HitExpiry {
    /// Hits belong to an aligned window and expire with it.
    WithWindow,
    /// Hits drain at the rate of the limit.
    Continuous,
    /// Hits expire one period after they were entered. The state is a log, whose length a setting bounds.
    AfterPeriod,
}

macro_rules! define_algorithm {
    ($($(#[$attribute:meta])* $variant:ident, $name:ident, $properties:expr;)*) => {
        /// Algorithm that counts hits against a limit.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Algorithm {
            $($(#[$attribute])* $variant,)*
            /// Counts requests at once, by slots. A rule writes it as `concurrent`, not as an `algorithm`.
            Concurrent,
        }

        impl Algorithm {
            /// All algorithms that a rule can name, in the order of the documentation.
            pub const ALL: [Self; Self::NAMES.len()] = [$(Self::$variant),*];

            /// Names of all algorithms, in the same order.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),*];

            /// Name in rule files, metrics and counter keys.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => stringify!($name),)*
                    Self::Concurrent => "concurrent",
                }
            }

            /// Properties from the table.
            pub const fn properties(self) -> AlgorithmProperties {
                match self {
                    $(Self::$variant => $properties,)*
                    Self::Concurrent => CONCURRENT_PROPERTIES,
                }
            }
        }
    };
}
for_each_algorithm!(define_algorithm);

/// Properties of [`Algorithm::Concurrent`].
const CONCURRENT_PROPERTIES: AlgorithmProperties = AlgorithmProperties {
    capacity: CapacityRuleKey::RequestsPerUnit,
    delay: DelayPolicy::Never,
    rejected_hits: RejectedHitsPolicy::NeverCounted,
    hit_expiry: HitExpiry::WithWindow,
    rejection_end_is_fixed: false,
    not_eventual: Some("`concurrent`: a replica cannot know of slots that others freed without asking the store"),
    follows_calendar: false,
};

impl AlgorithmProperties {
    /// Returns true if the state has an entry for each hit, so that a setting bounds its memory.
    pub fn keeps_hit_log(&self) -> bool {
        self.hit_expiry == HitExpiry::AfterPeriod
    }

    /// Returns true if `consistency: eventual` applies.
    pub const fn can_be_eventual(&self) -> bool {
        self.not_eventual.is_none()
    }
}

impl Algorithm {
    /// Returns true if limits and charges above 2^32 - 1 are exact. Buckets keep their sizes in 32 bits.
    pub const fn counts_above_32_bits(self) -> bool {
        matches!(self, Self::FixedWindow | Self::SlidingWindowCounter)
    }

    /// Returns the algorithm of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().chain([Self::Concurrent]).find(|algorithm| algorithm.name() == name)
    }

    /// Returns the algorithm that a rule names so.
    pub fn from_rule_word(word: &str) -> Option<Self> {
        Self::from_name(word).filter(|algorithm| *algorithm != Self::Concurrent)
    }

    /// Returns true if `scope: global` applies: a region can decide alone by hits that it was granted.
    pub const fn can_be_global(self) -> bool {
        matches!(self, Self::FixedWindow | Self::SlidingWindowCounter | Self::TokenBucket)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Applies a macro to all rows of the table of countings: the state and the script that count a limit in one store.
///
/// Each algorithm is a counting of the same name. A fixed_window with a `window` is counted by calendar_window, a
/// concurrent limit by slots. The numbers 5 and 6 were those of countings of earlier versions.
///
/// A row is the variant, the module (also the name in keys of counters), the Lua file in `src/store/redis/lua/`, and
/// its [`CountingMethodProperties`].
#[macro_export]
macro_rules! for_each_counting {
    ($callback:ident) => {
        $callback! {
            TokenBucket, token_bucket, "token_bucket.lua",
                CountingMethodProperties { wire_id: 0, lua_helpers: &["divide"] };
            LeakyBucket, leaky_bucket, "leaky_bucket.lua",
                CountingMethodProperties { wire_id: 1, lua_helpers: &["divide"] };
            FixedWindow, fixed_window, "fixed_window.lua",
                CountingMethodProperties { wire_id: 2, lua_helpers: &[] };
            SlidingWindowLog, sliding_window_log, "sliding_window_log.lua",
                CountingMethodProperties { wire_id: 3, lua_helpers: &["log"] };
            SlidingWindowCounter, sliding_window_counter, "sliding_window_counter.lua",
                CountingMethodProperties { wire_id: 4, lua_helpers: &["divide"] };
            CalendarWindow, calendar_window, "calendar_window.lua",
                CountingMethodProperties { wire_id: 7, lua_helpers: &[] };
            Slots, slots, "slots.lua",
                CountingMethodProperties { wire_id: 8, lua_helpers: &[] };
        }
    };
}
pub use for_each_counting;

/// Properties of a counting that scripts need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountingMethodProperties {
    /// Number of the counting in script arguments. Part of the wire format: replicas of all versions must agree.
    pub wire_id: u8,
    /// Helper functions that the Lua file calls, by the names of their parts.
    pub lua_helpers: &'static [&'static str],
}

macro_rules! define_counting {
    ($($variant:ident, $name:ident, $lua_file:literal, $properties:expr;)*) => {
        /// State and script that count a limit.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum CountingMethod {
            $(
                #[doc = concat!("Counts with the state of ", stringify!($name), ".")]
                $variant,
            )*
        }

        impl CountingMethod {
            /// All countings.
            pub const ALL: [Self; [$(stringify!($name)),*].len()] = [$(Self::$variant),*];

            /// Name in keys of counters.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => stringify!($name),)*
                }
            }

            /// Properties from the table.
            pub const fn properties(self) -> CountingMethodProperties {
                match self {
                    $(Self::$variant => $properties,)*
                }
            }
        }
    };
}
for_each_counting!(define_counting);

macro_rules! define_conversion {
    ($($(#[$attribute:meta])* $variant:ident, $name:ident, $properties:expr;)*) => {
        impl From<Algorithm> for CountingMethod {
            fn from(algorithm: Algorithm) -> Self {
                match algorithm {
                    $(Algorithm::$variant => Self::$variant,)*
                    Algorithm::Concurrent => Self::Slots,
                }
            }
        }
    };
}
for_each_algorithm!(define_conversion);

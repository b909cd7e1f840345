//! State of a counter of any algorithm, and charges on several counters at once.
//!
//! The enum and its dispatch are generated from the [table of countings](crate::limit::algorithm::CountingMethod), so
//! an algorithm without a module, a `State`, `charge`, `admits` or a `StoredState` does not compile.
//!
//! Decides: bans and reservations under `local`.

use super::region_pool::{RegionPool, TakenHits};
use super::stored_state::{MalformedReply, ReplyReader, ScriptCharge, ShareRatio, StoredState};
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::ban_state::BanState;
use crate::limit::algorithm::{CountingMethod, for_each_counting};
use crate::limit::charge::{ChargeRequest, ChargeResult, effective_time};
use crate::limit::reservation::ReservationView;
use crate::limit::slot::SlotUse;

macro_rules! define_state {
    ($($variant:ident, $module:ident, $lua_file:literal, $properties:expr;)*) => {
        /// State of a counter: one variant for each counting.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum State {
            $(
                #[doc = concat!("State of a [", stringify!($module), "](super::", stringify!($module), ").")]
                $variant(super::$module::State),
            )*
            /// State of a counter with a ban.
            WithBan(Box<CounterWithBan>),
            /// State of a counter with reservations.
            WithReservations(Box<CounterWithReservations>),
            /// State of a counter with a region's pool.
            WithPool(Box<CounterWithPool>),
        }

        impl State {
            /// Creates the state of a counter without hits.
            pub fn empty(counting: impl Into<CountingMethod>) -> Self {
                match counting.into() {
                    $(CountingMethod::$variant => Self::$variant(Default::default()),)*
                }
            }

            /// Time of the last charge that changed the state.
            pub fn last_charge_at(&self) -> Time {
                match self {
                    $(Self::$variant(state) => state.last,)*
                    Self::WithBan(state) => state.counter.last_charge_at(),
                    Self::WithReservations(state) => state.counter.last_charge_at(),
                    Self::WithPool(state) => state.part.last_charge_at(),
                }
            }

            /// Applies a request to this state, whatever bans there are.
            pub(super) fn charge_counter(
                &mut self,
                limit: &Limit,
                now: Time,
                request: ChargeRequest,
            ) -> ChargeResult {
                match (limit.counting_method(), &mut *self) {
                    $((CountingMethod::$variant, Self::$variant(state)) => {
                        super::$module::charge(limit, state, now, request)
                    })*
                    (counting, _) => {
                        *self = Self::empty(counting);
                        self.charge_counter(limit, now, request)
                    }
                }
            }

            /// Returns `true` if [`State::charge_counter`] would admit the hits; changes nothing.
            pub(super) fn counter_admits(&self, limit: &Limit, now: Time, request: ChargeRequest) -> bool {
                match (limit.counting_method(), self) {
                    $((CountingMethod::$variant, Self::$variant(state)) => {
                        super::$module::admits(limit, state, now, request)
                    })*
                    (counting, _) => Self::empty(counting).counter_admits(limit, now, request),
                }
            }

            /// Packs the state into three words; the first is the time of the last charge in microseconds. Records of a
            /// log are left out.
            #[inline]
            pub fn to_packed_words(&self) -> [u64; 3] {
                match self {
                    $(Self::$variant(state) => {
                        let [a, b] = state.to_packed_words();
                        [state.last.as_micros(), a, b]
                    })*
                    Self::WithBan(state) => state.counter.to_packed_words(),
                    Self::WithReservations(state) => state.counter.to_packed_words(),
                    Self::WithPool(state) => state.part.to_packed_words(),
                }
            }

            /// Unpacks the words of [`State::to_packed_words`].
            #[inline]
            pub fn from_packed_words(counting: impl Into<CountingMethod>, [last, a, b]: [u64; 3]) -> Self {
                let last = Time::from_micros(last);
                match counting.into() {
                    $(CountingMethod::$variant => Self::$variant(StoredState::from_packed_words([a, b], last)),)*
                }
            }

            /// Decodes the state of a counter that follows the time of its last charge in a script's reply, without
            /// its ban: see [`State::with_ban_from_reply`].
            ///
            /// # Errors
            /// The script cannot have returned these numbers.
            #[inline]
            pub fn read_counter_state_from_reply(
                counting: CountingMethod,
                reply: &mut ReplyReader<'_>,
                last: Time,
            ) -> Result<Self, MalformedReply> {
                match counting {
                    $(CountingMethod::$variant => StoredState::read_from_reply(reply, last).map(Self::$variant),)*
                }
            }

            /// Returns a state that uses the same part of `share` as this one uses of `limit`, rounded up.
            pub fn scaled_to_share(&self, limit: &Limit, share: &Limit, now: Time) -> Self {
                let ratio = ShareRatio::new(share, limit);
                match self {
                    $(Self::$variant(state) => Self::$variant(state.scaled_to_fallback_share(ratio, limit, now)),)*
                    // A ban is not shared out: it holds as it is.
                    Self::WithBan(state) => {
                        state.counter.scaled_to_share(limit, share, now).with_ban(state.ban)
                    }
                    // What is reserved was charged.
                    Self::WithReservations(state) => state.counter.scaled_to_share(limit, share, now),
                    // The fallback never has what a region holds.
                    Self::WithPool(_) => Self::empty_for(share),
                }
            }

            /// Computes the script arguments `a` and `b` of a call that charges a counter at about `now`.
            #[inline]
            pub fn script_arguments<'c>(
                counting: CountingMethod,
                charges: impl Iterator<Item = ScriptCharge<'c>>,
                now: Time,
            ) -> [i64; 2] {
                match counting {
                    $(CountingMethod::$variant => super::$module::State::script_arguments(charges, now),)*
                }
            }

            /// Returns the longest delay in microseconds that keeps the numbers of a script exact.
            #[inline]
            pub fn max_lua_exact_delay_us(limit: &Limit) -> u64 {
                match limit.counting_method() {
                    $(CountingMethod::$variant => super::$module::State::max_lua_exact_delay_us(limit),)*
                }
            }

            /// Derives the wait of a rejected charge, in microseconds, from the result of another charge on the same
            /// state. The hits are at most the capacity. `None`: the result does not tell.
            pub fn derive_wait_from_result_us(
                limit: &Limit,
                result: &ChargeResult,
                request: ChargeRequest,
            ) -> Option<u64> {
                match limit.counting_method() {
                    $(CountingMethod::$variant => {
                        super::$module::State::derive_wait_from_result_us(limit, result, request)
                    })*
                }
            }
        }
    };
}
for_each_counting!(define_state);

/// State of a counter, and that of the ban beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterWithBan {
    /// State of the counter.
    pub counter: State,
    /// State of the ban.
    pub ban: BanState,
}

/// State of a region's counter: its part, and its pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterWithPool {
    /// State of the part, under [`Limit::region_part`].
    pub part: State,
    /// The pool.
    pub pool: RegionPool,
    /// Hits that charges on this value took from the pool, and from the part; not stored.
    pub taken: TakenHits,
}

/// State of a counter, and what a request sees of its reservations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterWithReservations {
    /// State of the counter.
    pub counter: State,
    /// What the request sees of the reservations.
    pub view: ReservationView,
}

impl State {
    /// Creates the state of a counter of `limit` without hits.
    pub fn empty_for(limit: &Limit) -> Self {
        let counter = Self::empty(limit.counting_method());
        if limit.is_counted_in_region() {
            return Self::WithPool(Box::new(CounterWithPool::empty(limit)));
        }
        if limit.ban().is_some() { counter.with_ban(BanState::default()) } else { counter }
    }

    /// Adds the state of a ban to that of a counter.
    #[must_use]
    pub fn with_ban(self, ban: BanState) -> Self {
        Self::WithBan(Box::new(CounterWithBan { counter: self, ban }))
    }

    /// Applies a request to this state. A state of another counting than the limit's is empty.
    pub fn charge(&mut self, limit: &Limit, now: Time, request: ChargeRequest) -> ChargeResult {
        if limit.is_counted_in_region() {
            return self.charge_with_pool(limit, now, request);
        }
        match (limit.ban(), limit.reservations()) {
            (None, None) => self.charge_counter(limit, now, request),
            (Some(_), _) => self.charge_under_ban(limit, now, request),
            (None, Some(_)) => self.charge_with_reservations(limit, now, request),
        }
    }

    /// Returns `true` if [`State::charge`] would admit the hits; changes nothing.
    pub fn admits(&self, limit: &Limit, now: Time, request: ChargeRequest) -> bool {
        match (limit.ban(), self) {
            _ if limit.is_counted_in_region() => self.with_empty_pool(limit).admits(limit, now, request),
            (Some(_), Self::WithBan(state)) => {
                !state.ban.rejects(limit, now, request.hits) && state.counter.counter_admits(limit, now, request)
            }
            (None, _) if limit.reservations().is_some() => self.admits_with_reservations(limit, now, request),
            _ => self.counter_admits(limit, now, request),
        }
    }

    /// Adds the ban that follows the state of a counter in a script's reply, if the limit has one.
    ///
    /// # Errors
    /// The script cannot have returned these numbers.
    pub fn with_ban_from_reply(self, limit: &Limit, reply: &mut ReplyReader<'_>) -> Result<Self, MalformedReply> {
        if limit.ban().is_none() {
            return Ok(self);
        }
        let (last, until) = (reply.read_time()?, reply.read_time()?);
        Ok(self.with_ban(BanState { last, until, rejections: reply.read_number()? }))
    }

    fn charge_under_ban(&mut self, limit: &Limit, now: Time, request: ChargeRequest) -> ChargeResult {
        let Self::WithBan(state) = self else {
            *self = Self::empty_for(limit);
            return self.charge_under_ban(limit, now, request);
        };
        let rejected_elsewhere = request.rejected_elsewhere || state.ban.rejects(limit, now, request.hits);
        let mut result = state.counter.charge_counter(limit, now, ChargeRequest { rejected_elsewhere, ..request });
        state.ban.apply_to_result(limit, now, request, &mut result);
        result
    }

    /// Adds the pool that follows the state of a counter in a script's reply, if a region counts the limit.
    ///
    /// # Errors
    /// The script cannot have returned these numbers.
    pub fn with_pool_from_reply(self, limit: &Limit, reply: &mut ReplyReader<'_>) -> Result<Self, MalformedReply> {
        if !limit.is_counted_in_region() {
            return Ok(self);
        }
        let pool = RegionPool::read_from_reply(reply)?;
        Ok(Self::WithPool(Box::new(CounterWithPool { part: self, pool, taken: TakenHits::default() })))
    }

    /// The counter with its pool; `None` of a counter without one.
    pub const fn pool(&self) -> Option<&CounterWithPool> {
        if let Self::WithPool(state) = self { Some(state) } else { None }
    }

    /// Copy of the counter with its pool; an empty one in place of another state.
    fn with_empty_pool(&self, limit: &Limit) -> CounterWithPool {
        self.pool().cloned().unwrap_or_else(|| CounterWithPool::empty(limit))
    }

    fn charge_with_pool(&mut self, limit: &Limit, now: Time, request: ChargeRequest) -> ChargeResult {
        if self.pool().is_none() {
            *self = Self::WithPool(Box::new(CounterWithPool::empty(limit)));
        }
        match self {
            Self::WithPool(state) => state.charge(limit, now, request),
            _ => ChargeResult::default(),
        }
    }

    /// Sets the slot of the request that charges this state, if it counts slots.
    pub fn set_slot_use(&mut self, slot: &SlotUse) {
        if let Self::Slots(state) = self {
            *state = state.with_slot_use(slot);
        }
    }

    /// Time that [`State::charge`] works at: the later of `now` and the last charge; `now` if the state is discarded.
    pub fn effective_charge_time(&self, limit: &Limit, now: Time) -> Time {
        effective_time(now, self.last_charge_at(), limit.period_us()).map_or(now, |time| time.at)
    }
}

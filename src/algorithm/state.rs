//! State of a counter of any algorithm, and charges on several counters at once.
//!
//! The enum and its dispatch are generated from the [table of algorithms](crate::limit::algorithm), so an algorithm
//! without a module, a `State`, `charge` or `admits` does not compile.

use smallvec::SmallVec;

use super::{ChargeRequest, ChargeResult, EnforcedLimit, effective_time};
use crate::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::{Algorithm, for_each_algorithm};

macro_rules! define_state {
    ($($(#[$attribute:meta])* $variant:ident, $module:ident, $properties:expr;)*) => {
        /// State of a counter: one variant for each algorithm.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum State {
            $(
                #[doc = concat!("State of a [", stringify!($module), "](super::", stringify!($module), ").")]
                $variant(super::$module::State),
            )*
        }

        impl State {
            /// Creates the state of a counter without hits.
            pub fn empty(algorithm: Algorithm) -> Self {
                match algorithm {
                    $(Algorithm::$variant => Self::$variant(Default::default()),)*
                }
            }

            /// Time of the last charge that changed the state.
            pub const fn last(&self) -> Time {
                match self {
                    $(Self::$variant(state) => state.last,)*
                }
            }

            /// Applies a request to this state. A state of another algorithm than the limit's counts as empty.
            pub fn charge(&mut self, limit: &Limit, now: Time, request: ChargeRequest) -> ChargeResult {
                match (limit.algorithm(), &mut *self) {
                    $((Algorithm::$variant, Self::$variant(state)) => {
                        super::$module::charge(limit, state, now, request)
                    })*
                    (algorithm, _) => {
                        *self = Self::empty(algorithm);
                        self.charge(limit, now, request)
                    }
                }
            }

            /// Returns `true` if [`State::charge`] would admit the hits; changes nothing.
            pub fn admits(&self, limit: &Limit, now: Time, request: ChargeRequest) -> bool {
                match (limit.algorithm(), self) {
                    $((Algorithm::$variant, Self::$variant(state)) => {
                        super::$module::admits(limit, state, now, request)
                    })*
                    (algorithm, _) => Self::empty(algorithm).admits(limit, now, request),
                }
            }
        }
    };
}
for_each_algorithm!(define_state);

impl State {
    /// Time that [`State::charge`] works at: the later of `now` and the last charge; `now` if the state is discarded.
    pub fn time(&self, limit: &Limit, now: Time) -> Time {
        effective_time(now, self.last(), limit.period_us()).map_or(now, |time| time.at)
    }
}

/// Applies a request to all limits of a descriptor at once.
///
/// If an enforced limit rejects the hits, only limits where rejected hits count are charged. Otherwise each limit that
/// admits the hits is charged, and one that does not (a quota, or in shadow mode) only if its rejected hits count.
/// `states` are those of `limits`, in the same order.
pub fn charge_together(
    limits: &[EnforcedLimit<'_>],
    states: &mut [State],
    now: Time,
    request: ChargeRequest,
) -> SmallVec<[ChargeResult; 1]> {
    if let ([only], [state]) = (limits, &mut *states) {
        return SmallVec::from([state.charge(only.limit, now, request)]);
    }
    let rejected =
        limits.iter().zip(states.iter()).any(|(one, state)| one.enforced && !state.admits(one.limit, now, request));
    // For a limit that rejects these hits itself, the flag makes no difference.
    let request = ChargeRequest { rejected_elsewhere: request.rejected_elsewhere || rejected, ..request };
    limits.iter().zip(states).map(|(one, state)| state.charge(one.limit, now, request)).collect()
}

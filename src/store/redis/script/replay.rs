//! Results of a call, computed from the states that its script returned.
//!
//! A script decides charges and changes states, but does not compute results. It returns its time and the states as it
//! found them. The same charges are repeated here on those states by the algorithms of
//! [`algorithm`](crate::limit::algorithm), so that each result is computed in one place for all stores.

use smallvec::SmallVec;

use crate::base::clock::Time;
use crate::limit::algorithm::region::{GlobalView, RegionUse};
use crate::limit::algorithm::reply_reader::{MalformedReply, ReplyReader};
use crate::limit::algorithm::state::{State, charge_together};
use crate::limit::charge::{ChargeRequest, ChargeResult, JointLimit};
use crate::store::charge::{OwnedCharge, OwnedCounter};

/// Outcome of a call.
#[derive(Clone, Debug)]
pub struct ScriptOutcome {
    /// Results of each charge, one for each of its counters.
    pub results: Vec<SmallVec<[ChargeResult; 1]>>,
    /// States after all charges. Records of a log that no charge of the call can distinguish are merged.
    pub states: SmallVec<[State; 1]>,
    /// Time at which the charges were made.
    pub now: Time,
    /// Effects on the counters of global limits.
    pub region: RegionEffects,
}

/// Effects of a call on the counters of global limits (see `regions`); none on those of other limits.
#[derive(Clone, Debug, Default)]
pub struct RegionEffects {
    /// Indices of the counters on which the call opened a grant request. Their states describe it.
    pub requesting_counters: Vec<usize>,
    /// Hits that the call admitted.
    pub used: RegionUse,
}

/// Arguments of a call beside its charges, which decide what its script did.
#[derive(Clone, Copy, Debug, Default)]
pub struct CallArguments<'c> {
    /// The call concerns leases, so the reply ends with the lent hits.
    pub has_leases: bool,
    /// View of the global Redis; needed by countings of regions.
    pub view: Option<&'c GlobalView>,
}

/// Repeats the charges of a call on the states in its script's reply.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn replay(
    charges: &[OwnedCharge],
    reply: &[u8],
    arguments: CallArguments<'_>,
) -> Result<ScriptOutcome, MalformedReply> {
    let mut reader = ReplyReader::new(reply);
    let now = reader.time()?;
    let counters = charges.first().map_or(&[][..], |charge| &charge.counters);
    let mut states: SmallVec<[State; 1]> = SmallVec::with_capacity(counters.len());
    for counter in counters {
        let last = reader.time()?;
        let mut state = State::read(counter.limit.counting(), &mut reader, last)?;
        arguments.view.inspect(|view| state.set_view(view));
        states.push(state);
    }
    let lent = if arguments.has_leases { reader.number()? } else { 0 };
    if !reader.is_empty() {
        return Err(MalformedReply);
    }
    let regions = arguments.view.map(|_| RegionsBefore::of(counters, &states, now));
    let results = charges.iter().map(|charge| replay_one(charge, &mut states, ReplyHead { now, lent })).collect();
    let region = regions.map_or_else(RegionEffects::default, |before| before.effects(counters, &states, now));
    Ok(ScriptOutcome { results, states, now, region })
}

/// Counters of regions before the charges of a call.
struct RegionsBefore {
    /// Open grant request of each counter.
    requests: SmallVec<[u64; 4]>,
    used: RegionUse,
}

impl RegionsBefore {
    fn of(counters: &[OwnedCounter], states: &[State], now: Time) -> Self {
        Self { requests: states.iter().map(State::open_request).collect(), used: region_use(counters, states, now) }
    }

    /// Returns the effects of the charges that led to these states.
    fn effects(self, counters: &[OwnedCounter], states: &[State], now: Time) -> RegionEffects {
        let is_new = |index: &usize| self.requests[*index] != states[*index].open_request();
        let requesting_counters = (0..states.len()).filter(is_new).collect();
        RegionEffects { requesting_counters, used: region_use(counters, states, now).since(self.used) }
    }
}

/// Returns the hits that all counters of regions have used at `now`.
fn region_use(counters: &[OwnedCounter], states: &[State], now: Time) -> RegionUse {
    let mut used = RegionUse::default();
    counters.iter().zip(states).for_each(|(counter, state)| used += state.region_use(&counter.limit, now));
    used
}

/// Time of a call, and the hits that are lent at it.
#[derive(Clone, Copy)]
struct ReplyHead {
    now: Time,
    lent: u64,
}

fn replay_one(charge: &OwnedCharge, states: &mut [State], head: ReplyHead) -> SmallVec<[ChargeResult; 1]> {
    let ReplyHead { now, lent } = head;
    let limits = charge.limits();
    let request = ChargeRequest { max_delay_us: charge.max_delay_us(), lent, ..charge.request };
    if charge.dry_run {
        charge_together(&limits, &mut states.to_vec(), now, request)
    } else if let Some(void_from) = charge.void_from {
        // A refund always passes, and each counter decides for itself whether the refund is void.
        let refund = |(limit, state): (&JointLimit<'_>, &mut State)| {
            if state.time(limit.limit, now) >= void_from {
                state.clone().charge(limit.limit, now, request)
            } else {
                state.charge(limit.limit, now, request)
            }
        };
        limits.iter().zip(states.iter_mut()).map(refund).collect()
    } else {
        charge_together(&limits, states, now, request)
    }
}

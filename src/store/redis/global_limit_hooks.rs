//! Additions of global limits to a call: what the script must know of the global Redis, and what follows its reply.
//!
//! A call without global limits has no [`GlobalLimitHooks`]; [`regions`](super::regions) explains what they are for.

use std::sync::Arc;

use bytes::Bytes;
use tokio::time::Instant;

use super::regions::GlobalGrantClient;
use super::regions::grants::GrantRequest;
use super::regions::resets::RegionCounterToReset;
use super::script::{RegionEffects, encode_global_redis_view};
use crate::base::clock::Time;
use crate::limit::algorithm::region::GlobalTimeAndStanding;
use crate::limit::algorithm::state::State;
use crate::store::charge::OwnedCharge;
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::hash_slot::hash_slot;
use crate::store::client::redis::node::Node;
use crate::store::client::redis::server_clock::{ClockReading, InstantRange};

/// Additions of global limits to a call, by the grants of the region.
#[derive(Clone, Debug)]
pub(super) struct GlobalLimitHooks(Arc<GlobalGrantClient>);

/// View of the global Redis, and the argument that tells it.
pub(super) struct EncodedGlobalView {
    pub(super) view: GlobalTimeAndStanding,
    pub(super) argument: [u8; 40],
}

impl GlobalLimitHooks {
    /// Creates the hooks of a call in a region with these grants.
    pub(super) const fn new(grants: Arc<GlobalGrantClient>) -> Self {
        Self(grants)
    }

    /// Returns the view of the global Redis at a call to `node` in the time `within`; `key` is one of its counters.
    pub(super) fn encode_global_redis_view_for_call(
        &self,
        node: &Node,
        key: &[u8],
        charges: &[OwnedCharge],
        within: InstantRange,
    ) -> EncodedGlobalView {
        let view = self.0.view_for_call(node, || hash_slot(key), longest_period_us(charges), within);
        EncodedGlobalView { view, argument: encode_global_redis_view(&view) }
    }

    /// Records the time of `node` in the reply to a call that was sent at `sent`.
    pub(super) fn record_clock(&self, node: &Node, sent: Instant, server: Time) {
        node.record_clock_and_detect_jump(&ClockReading {
            within: InstantRange { from: sent, until: Instant::now() },
            server,
        });
    }

    /// Records the effects of a call, and requests grants in the background where the call opened a request.
    ///
    /// `charge` is any charge of the call; keys and states are those of its counters.
    pub(super) fn record_use_and_request_grants(
        &self,
        keys: &[Bytes],
        charge: &OwnedCharge,
        states: &[State],
        effects: &RegionEffects,
    ) {
        for &index in &effects.requesting_counters {
            let (limit, key) = (charge.counters[index].limit, keys[index].clone());
            GrantRequest::from_state(&states[index], limit, key)
                .into_iter()
                .for_each(|request| self.0.request_grant(request));
        }
        self.0.count_admitted_hits(effects.used);
    }

    /// Resets the global limits of `charge` in all regions.
    ///
    /// # Errors
    /// The global Redis failed.
    pub(super) async fn reset(
        &self,
        keys: &[Bytes],
        charge: &OwnedCharge,
        deadline: Instant,
    ) -> Result<(), RedisError> {
        let counters = keys.iter().zip(&charge.counters);
        let counters = counters.filter(|(_, counter)| counter.limit.is_counted_in_region());
        let counters: Vec<RegionCounterToReset> =
            counters.map(|(key, counter)| RegionCounterToReset { key: key.clone(), limit: counter.limit }).collect();
        self.0.reset(&counters, deadline).await
    }
}

/// Returns the longest period of the global limits, in microseconds.
fn longest_period_us(charges: &[OwnedCharge]) -> u64 {
    let counters = charges.first().map_or(&[][..], |charge| &charge.counters);
    let global = counters.iter().filter(|counter| counter.limit.is_counted_in_region());
    global.map(|counter| counter.limit.period_us()).max().unwrap_or(0)
}

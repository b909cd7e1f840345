//! Sums of the slots of a concurrent limit, or of the reservations of another one, for `explain`: who holds how many.

use std::time::Instant;

use super::Redis;
use super::key::reservations_key;
use crate::base::clock::Time;
use crate::limit::charge::Charge;
use crate::limit::slot::HolderId;
use crate::limit::slot_table::{SlotSummary, SummarizedSlot};
use crate::store::client::redis::error::RedisError;
use crate::store::client::redis::resp::{Reply, reply_bytes};

/// Maximum number of slots that a summary looks at.
const MAX_SUMMARIZED_SLOTS: usize = 10_000;

impl Redis {
    /// Sums up to about 10 000 slots or reservations of the limit at `index` of a charge.
    ///
    /// # Errors
    /// Redis failed, or its user may not run HSCAN.
    pub async fn summarize_slots(
        &self,
        charge: &Charge<'_>,
        index: usize,
        now: Time,
        deadline: Instant,
    ) -> Result<SlotSummary, RedisError> {
        let call = self.prepare_call(charge, self.keys.counter_set_id(charge, now), None, now);
        let is_of_reservations = charge.counters[index].limit.reservations().is_some();
        let key = call.command.keys().get(index).ok_or(RedisError::Misconfigured)?;
        let key = &if is_of_reservations { reservations_key(key) } else { key.clone() };
        let (mut cursor, mut slots) = (b"0".to_vec(), Vec::new());
        loop {
            let words: [&[u8]; 5] = [b"HSCAN", key, &cursor, b"COUNT", b"1000"];
            let reply = call.deployment.client.call_key_unrecorded(key, &words, deadline).await?;
            cursor = decode_slot_page(&reply, &mut slots).ok_or(RedisError::BadReply)?;
            if cursor == b"0" || slots.len() >= MAX_SUMMARIZED_SLOTS {
                break;
            }
        }
        let holders = self.fallback().slot_holders();
        let summary = SlotSummary::new(slots.into_iter(), now, &|holder| holders.is_dead(holder, now));
        Ok(SlotSummary { is_partial: cursor != b"0", is_of_reservations, ..summary })
    }
}

/// Appends the slots of a page of a hash that `lua/slots.lua` or `lua/reservations.lua` wrote; returns the cursor of
/// the next one.
fn decode_slot_page(reply: &Reply, slots: &mut Vec<SummarizedSlot>) -> Option<Vec<u8>> {
    let Reply::Array(parts) = reply else { return None };
    let [cursor, Reply::Array(fields)] = &**parts else { return None };
    for pair in fields.chunks_exact(2) {
        let [field, value] = pair else { return None };
        let (field, value) = (reply_bytes(field)?, reply_bytes(value)?);
        if field.len() == 16 {
            let word = |at: usize| Some(u64::from_le_bytes(*value.get(at..)?.first_chunk()?));
            let seats = u32::from_le_bytes(*value.get(24..)?.first_chunk()?);
            slots.push(SummarizedSlot { holder: HolderId(word(8)?), expires: Time::from_micros(word(16)?), seats });
        }
    }
    Some(reply_bytes(cursor)?.to_vec())
}

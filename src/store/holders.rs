//! Envoys that hold slots, and which of them are dead.
//!
//! A health check of gRPC with the metadata `x-tollkeeper-holder` is a heartbeat, and so is every call that takes or
//! frees a slot. A holder of which two health checks came within `TOLLKEEPER_HOLDER_TIMEOUT` is dead when nothing was
//! heard of it for this time; its slots are then free. Any other holder is never dead: its slots end with
//! `max_duration`, and the log says so once. One check alone tells nothing: anyone can send one in any name, and an
//! Envoy may send them too rarely.
//!
//! With Redis, replicas share what they heard: an Envoy sends its checks to all of them, its calls to one. So a replica
//! may believe for a while that an Envoy is dead which took a slot elsewhere, as after its restart. A slot of a dead
//! holder is therefore free only if it was taken at least half of the timeout before this replica was told of the death.
//!
//! Silence counts only while somebody listens. After a process stood still, or its clock was set, the silence of each
//! holder begins anew; with Redis, after no replica told what it heard. Otherwise all slots would be free after a pause.
//!
//! Decides: which Envoy is dead, and when its silence counts (`TOLLKEEPER_HOLDER_TIMEOUT`).
//! Decides: how many Envoys there may be, and how much of a name is kept.
//! Decides: the warning that an Envoy holds slots and sends no health checks, or too rarely.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use crate::base::clock::{Time, to_micros};
use crate::base::text::remove_unprintable;
use crate::limit::slot::HolderId;

/// Default of `TOLLKEEPER_HOLDER_TIMEOUT`.
pub const DEFAULT_HOLDER_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest name of a holder that is kept, in bytes.
const MAX_NAME_BYTES: usize = 128;
/// Maximum number of holders in the table; beyond it, those that have been silent for longest are forgotten.
pub const MAX_HOLDERS: usize = 10_000;
/// Time after which a silent holder is forgotten, in microseconds: a day. Its slots then end with `max_duration`.
const FORGET_AFTER_US: u64 = 86_400_000_000;
/// Time without a health check after the first slot, after which a holder is reported, in microseconds.
const NO_HEARTBEAT_WARNING_AFTER_US: u64 = 60_000_000;

/// Holders that this process heard of.
#[derive(Debug)]
pub struct SlotHolderTable {
    holders: RwLock<BTreeMap<HolderId, SlotHolder>>,
    timeout_us: AtomicU64,
    /// Time of the last sign that this process runs, in microseconds since the Unix epoch.
    ran_us: AtomicU64,
    /// Time since which this process has run without a pause, in microseconds since the Unix epoch.
    runs_since_us: AtomicU64,
    /// Holders that no replica heard for the timeout; `None` without a shared table.
    shared_dead: RwLock<Option<SharedDeadHolders>>,
}

/// Holders that the shared table said are dead.
#[derive(Debug)]
struct SharedDeadHolders {
    ids: BTreeSet<HolderId>,
    told: Time,
}

/// An Envoy that holds slots, or called not long ago.
#[derive(Clone, Debug, Default)]
struct SlotHolder {
    name: String,
    /// Time of the last call or health check.
    heard: Time,
    /// Time of the first slot; `None`: it holds none.
    first_slot: Option<Time>,
    /// Time of the last health check.
    checked: Option<Time>,
    /// Two of its health checks came within the timeout.
    has_heartbeats: bool,
    /// It was heard since the shared table was told.
    is_unreported: bool,
    /// The log has said that it sends no health checks, or too rarely.
    is_warned: bool,
}

/// A holder as reports show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotHolderStatus {
    /// Identity.
    pub id: HolderId,
    /// Name, as sent.
    pub name: String,
    /// Time of the last call or health check.
    pub heard: Time,
    /// Two of its health checks came within the timeout.
    pub has_heartbeats: bool,
    /// Its slots are free.
    pub is_dead: bool,
}

/// A heartbeat for the shared table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderHeartbeat {
    /// Identity of the holder.
    pub id: HolderId,
    /// Microseconds since it was heard.
    pub age_us: u64,
    /// Two of its health checks came within the timeout; else it only counts if the shared table has the holder.
    pub has_heartbeats: bool,
}

impl Default for SlotHolderTable {
    fn default() -> Self {
        Self {
            holders: RwLock::default(),
            timeout_us: AtomicU64::new(to_micros(DEFAULT_HOLDER_TIMEOUT)),
            ran_us: AtomicU64::default(),
            runs_since_us: AtomicU64::default(),
            shared_dead: RwLock::default(),
        }
    }
}

impl SlotHolderTable {
    /// Sets the time of silence after which a holder is dead (`TOLLKEEPER_HOLDER_TIMEOUT`).
    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout_us.store(to_micros(timeout), Ordering::Relaxed);
    }

    /// Time of silence after which a holder is dead.
    pub fn timeout(&self) -> Duration {
        Duration::from_micros(self.timeout_us.load(Ordering::Relaxed))
    }

    /// Records that this process runs. Must be called several times in the timeout, or no holder is ever dead.
    pub fn record_that_process_runs(&self, now: Time) {
        let ran = Time::from_micros(self.ran_us.swap(now.as_micros(), Ordering::Relaxed));
        if self.is_pause(ran, now) {
            self.runs_since_us.store(now.as_micros(), Ordering::Relaxed);
            // After a clock that was set back, nobody was heard in the future; how long ago the last health check came is
            // not known.
            let mut holders = self.holders.write().unwrap_or_else(PoisonError::into_inner);
            for holder in holders.values_mut() {
                holder.heard = holder.heard.min(now);
                holder.checked = None;
            }
        }
    }

    /// Returns true if a process that ran at `ran` and runs at `now` may have heard nothing in between: it stood still,
    /// or its clock was set.
    fn is_pause(&self, ran: Time, now: Time) -> bool {
        let longest_us = self.timeout_us.load(Ordering::Relaxed) / 2;
        now.since_us(ran) > longest_us || ran.since_us(now) > longest_us
    }

    /// Returns true if this process has listened for longer than the timeout.
    fn has_listened_for_timeout(&self, now: Time) -> bool {
        let ran = Time::from_micros(self.ran_us.load(Ordering::Relaxed));
        let since = Time::from_micros(self.runs_since_us.load(Ordering::Relaxed));
        !self.is_pause(ran, now) && now.since_us(since) > self.timeout_us.load(Ordering::Relaxed)
    }

    /// Records a health check with this name.
    pub fn record_heartbeat(&self, name: &[u8], now: Time) {
        let timeout_us = self.timeout_us.load(Ordering::Relaxed);
        self.update_holder(HolderId::from_name(name), name, now, |holder| {
            let before = holder.checked.replace(now);
            holder.has_heartbeats |= before.is_some_and(|before| before < now && now.since_us(before) <= timeout_us);
        });
    }

    /// Records a call that uses a slot.
    ///
    /// Changes nothing, and so needs no lock for writing, if a call was recorded a moment ago.
    pub fn record_slot_call(&self, id: HolderId, name: &[u8], now: Time) {
        let moment_us = self.timeout_us.load(Ordering::Relaxed) / 32;
        let is_recorded = |holder: &SlotHolder| {
            holder.is_unreported && holder.first_slot.is_some() && now.since_us(holder.heard) < moment_us
        };
        if self.holders.read().unwrap_or_else(PoisonError::into_inner).get(&id).is_some_and(is_recorded) {
            return;
        }
        self.update_holder(id, name, now, |holder| holder.first_slot = holder.first_slot.or(Some(now)));
    }

    fn update_holder(&self, id: HolderId, name: &[u8], now: Time, change: impl FnOnce(&mut SlotHolder)) {
        let mut holders = self.holders.write().unwrap_or_else(PoisonError::into_inner);
        if !holders.contains_key(&id) && holders.len() >= MAX_HOLDERS {
            forget_longest_silent_tenth(&mut holders);
        }
        let holder = holders.entry(id).or_insert_with(|| {
            let text = String::from_utf8_lossy(&name[..name.len().min(MAX_NAME_BYTES)]);
            SlotHolder { name: remove_unprintable(&text).into_owned(), ..SlotHolder::default() }
        });
        holder.heard = holder.heard.max(now);
        holder.is_unreported = true;
        change(holder);
    }

    /// Returns true if the slots of a holder are free.
    pub fn is_dead(&self, id: HolderId, now: Time) -> bool {
        let timeout_us = self.timeout_us.load(Ordering::Relaxed);
        let is_silent = |holder: &SlotHolder| now.since_us(holder.heard) > timeout_us;
        let own = self.holders.read().unwrap_or_else(PoisonError::into_inner);
        match (own.get(&id), &*self.shared_dead.read().unwrap_or_else(PoisonError::into_inner)) {
            (Some(holder), _) if !is_silent(holder) => false,
            (Some(holder), None) => holder.has_heartbeats && self.has_listened_for_timeout(now),
            (None, None) => false,
            (_, Some(dead)) => self.is_dead_list_fresh(dead, now) && dead.ids.contains(&id),
        }
    }

    /// Returns true if a slot that a holder took at `taken` is free because the holder is dead.
    pub fn is_slot_freed_by_death(&self, id: HolderId, taken: Time, now: Time) -> bool {
        // After a clock was set back, slots of before seem to be taken later.
        let is_old = taken > now || now.since_us(taken) >= self.least_age_of_freed_slot_us(now);
        is_old && self.is_dead(id, now)
    }

    /// Age in microseconds from which a slot of a dead holder is free: a younger one was taken by an Envoy that is back,
    /// and of which this process did not hear yet.
    fn least_age_of_freed_slot_us(&self, now: Time) -> u64 {
        let dead = self.shared_dead.read().unwrap_or_else(PoisonError::into_inner);
        let since_told_us = dead.as_ref().map_or(0, |dead| now.since_us(dead.told));
        (self.timeout_us.load(Ordering::Relaxed) / 2).saturating_add(since_told_us)
    }

    /// Takes the heartbeats that were not yet sent to the shared table.
    pub fn take_heartbeats(&self, now: Time) -> Vec<HolderHeartbeat> {
        let mut holders = self.holders.write().unwrap_or_else(PoisonError::into_inner);
        let unreported = holders.iter_mut().filter(|(_, holder)| holder.is_unreported);
        let heartbeat = |(id, holder): (&HolderId, &mut SlotHolder)| {
            holder.is_unreported = false;
            HolderHeartbeat { id: *id, age_us: now.since_us(holder.heard), has_heartbeats: holder.has_heartbeats }
        };
        unreported.map(heartbeat).collect()
    }

    /// Takes back heartbeats that could not be sent.
    pub fn put_back_heartbeats(&self, heartbeats: &[HolderHeartbeat]) {
        let mut holders = self.holders.write().unwrap_or_else(PoisonError::into_inner);
        for heartbeat in heartbeats {
            holders.entry(heartbeat.id).and_modify(|holder| holder.is_unreported = true);
        }
    }

    /// Sets the holders that no replica heard for the timeout. From then on the shared table alone tells who is dead.
    /// They are dead for half of the timeout after `now`: later, as after this process stood still, they may be back.
    pub fn set_shared_dead_holders(&self, dead: impl Iterator<Item = HolderId>, now: Time) {
        let dead = SharedDeadHolders { ids: dead.collect(), told: now };
        *self.shared_dead.write().unwrap_or_else(PoisonError::into_inner) = Some(dead);
    }

    fn is_dead_list_fresh(&self, dead: &SharedDeadHolders, now: Time) -> bool {
        now.since_us(dead.told) <= self.timeout_us.load(Ordering::Relaxed) / 2
    }

    /// Encodes the dead holders for a script, eight bytes each, after the age in microseconds from which their slots are
    /// free. Those that this process just heard are left out; without any there is nothing.
    pub fn encode_dead_holders(&self, now: Time) -> Vec<u8> {
        let least_age_us = self.least_age_of_freed_slot_us(now);
        let timeout_us = self.timeout_us.load(Ordering::Relaxed);
        let own = self.holders.read().unwrap_or_else(PoisonError::into_inner);
        let dead = self.shared_dead.read().unwrap_or_else(PoisonError::into_inner);
        let is_heard = |id: &HolderId| own.get(id).is_some_and(|holder| now.since_us(holder.heard) <= timeout_us);
        let dead = dead.iter().filter(|dead| self.is_dead_list_fresh(dead, now)).flat_map(|dead| &dead.ids);
        let mut dead = dead.filter(|id| !is_heard(id)).peekable();
        let age = dead.peek().map(|_| least_age_us.to_le_bytes());
        age.into_iter().chain(dead.map(|id| id.0.to_le_bytes())).flatten().collect()
    }

    /// Logs, once for each, holders whose slots have no heartbeats; forgets those that were silent for a day.
    pub fn warn_and_forget_silent(&self, now: Time) {
        let mut holders = self.holders.write().unwrap_or_else(PoisonError::into_inner);
        holders.retain(|_, holder| now.since_us(holder.heard) < FORGET_AFTER_US);
        for holder in holders.values_mut() {
            let is_due = holder.first_slot.is_some_and(|first| now.since_us(first) >= NO_HEARTBEAT_WARNING_AFTER_US);
            if is_due && !holder.has_heartbeats && !holder.is_warned {
                holder.is_warned = true;
                tracing::warn!(
                    holder = holder.name,
                    "an envoy holds slots and sends no health checks, or not two within TOLLKEEPER_HOLDER_TIMEOUT: if it \
                     dies, its slots end with `max_duration` (give its cluster `grpc_health_check` with the metadata \
                     x-tollkeeper-holder, and an interval of 5 s)"
                );
            }
        }
    }

    /// Number of holders.
    pub fn len(&self) -> usize {
        self.holders.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Returns true without any holder.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Name of a holder; its number if this process never heard of it.
    pub fn name(&self, id: HolderId) -> String {
        let holders = self.holders.read().unwrap_or_else(PoisonError::into_inner);
        holders.get(&id).map_or_else(|| format!("{:016x}", id.0), |holder| holder.name.clone())
    }

    /// All holders that this process heard of, those heard last first.
    pub fn statuses(&self, now: Time) -> Vec<SlotHolderStatus> {
        let holders = self.holders.read().unwrap_or_else(PoisonError::into_inner).clone();
        let status = |(id, holder): (HolderId, SlotHolder)| SlotHolderStatus {
            id,
            is_dead: self.is_dead(id, now),
            name: holder.name,
            heard: holder.heard,
            has_heartbeats: holder.has_heartbeats,
        };
        let mut statuses: Vec<_> = holders.into_iter().map(status).collect();
        statuses.sort_by_key(|status| (std::cmp::Reverse(status.heard), status.id));
        statuses
    }
}

/// Removes the tenth of the holders that was heard longest ago.
fn forget_longest_silent_tenth(holders: &mut BTreeMap<HolderId, SlotHolder>) {
    let mut heard: Vec<Time> = holders.values().map(|holder| holder.heard).collect();
    heard.sort_unstable();
    let Some(oldest) = heard.get(heard.len() / 10).copied() else { return };
    holders.retain(|_, holder| holder.heard > oldest);
}

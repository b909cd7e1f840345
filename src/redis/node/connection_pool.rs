//! Connections of one node.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwapOption;
use tokio::sync::SetOnce;

use crate::redis::connection::Connection;

/// Fixed number of connection slots, used in turn.
#[derive(Debug)]
pub(super) struct ConnectionPool {
    slots: Box<[ArcSwapOption<Connection>]>,
    next: AtomicUsize,
    /// Set once the first connection attempt has succeeded or failed.
    first_attempt_done: SetOnce<()>,
}

impl ConnectionPool {
    /// Creates a pool of `size` empty slots.
    pub(super) fn new(size: usize) -> Self {
        Self {
            slots: (0..size).map(|_| ArcSwapOption::empty()).collect(),
            next: AtomicUsize::new(0),
            first_attempt_done: SetOnce::new(),
        }
    }

    /// Number of slots.
    pub(super) fn size(&self) -> usize {
        self.slots.len()
    }

    /// Number of open connections.
    pub(super) fn open(&self) -> usize {
        self.slots.iter().filter(|slot| slot.load().is_some()).count()
    }

    /// Returns the next open connection; `None` if none is open.
    pub(super) fn get(&self) -> Option<Arc<Connection>> {
        if let [slot] = &*self.slots {
            return slot.load_full();
        }
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let size = self.slots.len();
        (0..size).find_map(|step| self.slots[first.wrapping_add(step) % size].load_full())
    }

    /// Waits for the first connection attempt, then calls [`ConnectionPool::get`]; callers bound the wait.
    pub(super) async fn get_after_first_attempt(&self) -> Option<Arc<Connection>> {
        self.first_attempt_done.wait().await;
        self.get()
    }

    /// Puts a connection into a slot.
    pub(super) fn insert(&self, slot: usize, connection: Connection) {
        self.slots[slot].store(Some(Arc::new(connection)));
        self.set_first_attempt_done();
    }

    /// Empties a slot.
    pub(super) fn remove(&self, slot: usize) {
        self.slots[slot].store(None);
    }

    /// Empties all slots.
    pub(super) fn clear(&self) {
        self.slots.iter().for_each(|slot| slot.store(None));
    }

    /// Ends the wait for the first connection attempt.
    pub(super) fn set_first_attempt_done(&self) {
        if !self.first_attempt_done.initialized() {
            let _already_set = self.first_attempt_done.set(());
        }
    }
}

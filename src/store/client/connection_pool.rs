//! Connections to one server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwapOption;
use tokio::sync::SetOnce;

/// Fixed number of connection slots, used in turn.
#[derive(Debug)]
pub(crate) struct ConnectionPool<C> {
    slots: Box<[ArcSwapOption<C>]>,
    next: AtomicUsize,
    /// Set once the first connection attempt has succeeded or failed.
    first_attempt_done: SetOnce<()>,
}

impl<C> ConnectionPool<C> {
    /// Creates a pool of `size` empty slots.
    pub(crate) fn new(size: usize) -> Self {
        Self {
            slots: (0..size).map(|_| ArcSwapOption::empty()).collect(),
            next: AtomicUsize::new(0),
            first_attempt_done: SetOnce::new(),
        }
    }

    /// Number of slots.
    pub(crate) fn size(&self) -> usize {
        self.slots.len()
    }

    /// Number of open connections.
    pub(crate) fn open(&self) -> usize {
        self.slots.iter().filter(|slot| slot.load().is_some()).count()
    }

    /// Returns the next open connection; `None` if none is open.
    pub(crate) fn get(&self) -> Option<Arc<C>> {
        if let [slot] = &*self.slots {
            return slot.load_full();
        }
        self.get_from(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the first open connection from slot `first` on, modulo the number of slots; `None` if none is open.
    pub(crate) fn get_from(&self, first: usize) -> Option<Arc<C>> {
        let size = self.slots.len();
        (0..size).find_map(|step| self.slots[first.wrapping_add(step) % size].load_full())
    }

    /// Waits for the first connection attempt, then calls [`ConnectionPool::get`]; callers bound the wait.
    pub(crate) async fn get_after_first_attempt(&self) -> Option<Arc<C>> {
        self.first_attempt_done.wait().await;
        self.get()
    }

    /// Puts a connection into a slot.
    pub(crate) fn insert(&self, slot: usize, connection: C) {
        self.slots[slot].store(Some(Arc::new(connection)));
        self.set_first_attempt_done();
    }

    /// Empties a slot.
    pub(crate) fn remove(&self, slot: usize) {
        self.slots[slot].store(None);
    }

    /// Empties all slots.
    pub(crate) fn clear(&self) {
        self.slots.iter().for_each(|slot| slot.store(None));
    }

    /// Ends the wait for the first connection attempt.
    pub(crate) fn set_first_attempt_done(&self) {
        if !self.first_attempt_done.initialized() {
            let _already_set = self.first_attempt_done.set(());
        }
    }
}

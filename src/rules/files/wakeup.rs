//! Wakes the thread that watches rule files.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use crate::base::sharded::lock_ignoring_poison;

/// Reasons for which the thread was woken.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WakeReason {
    /// An event may have changed the files.
    pub(super) changed: bool,
    /// A reload was requested.
    pub(super) reload: bool,
    /// The thread is to end.
    pub(super) stop: bool,
}

/// Condition variable with the reasons since the last wake-up. Any number of them wake the thread once.
#[derive(Debug, Default)]
pub(super) struct Wakeup {
    reason: Mutex<WakeReason>,
    condition: Condvar,
}

impl Wakeup {
    /// Wakes the thread; `set` adds the reason.
    pub(super) fn notify(&self, set: impl FnOnce(&mut WakeReason)) {
        set(&mut lock_ignoring_poison(&self.reason));
        self.condition.notify_one();
    }

    /// Waits for a reason, or until `deadline`. A stop stays set.
    pub(super) fn wait_until(&self, deadline: Instant) -> WakeReason {
        let is_quiet = |reason: &mut WakeReason| !(reason.changed || reason.reload || reason.stop);
        let timeout = deadline.saturating_duration_since(Instant::now());
        let waited = self.condition.wait_timeout_while(lock_ignoring_poison(&self.reason), timeout, is_quiet);
        let (mut reason, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let woken_by = *reason;
        *reason = WakeReason { stop: woken_by.stop, ..WakeReason::default() };
        woken_by
    }
}

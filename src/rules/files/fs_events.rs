//! Events of the directories with rule files, which wake the watching thread.
//!
//! Only directories are watched, never files: a replaced file has a new inode, and only its directory reports that.
//! After each change they are watched anew, because a path may lead to another one by then.
//! An event is a hint: without events (no inotify, or its limits reached), polling notices all changes later.
//!
//! Decides: changes during a reload (`Wakeup`).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{ErrorKind, Event, RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::time::Instant;

use crate::base::sharded::lock_ignoring_poison;

/// Subscription to the events of directories.
pub(super) struct FsEvents {
    watcher: RecommendedWatcher,
    watched: BTreeSet<PathBuf>,
    /// Time after which changes are noticed without events, for the log.
    poll_interval: Duration,
    /// A failed subscription was logged; the log has only the first.
    warned: bool,
}

impl FsEvents {
    /// Sends events to `wakeup`. Returns `None` and logs a warning if the system supports none.
    pub(super) fn new(wakeup: Arc<Wakeup>, poll_interval: Duration) -> Option<Self> {
        let notify_of_change = move |event: notify::Result<Event>| {
            if event.map_or(true, |event| may_be_change(&event)) {
                wakeup.notify(|reason| reason.changed = true);
            }
        };
        match notify::recommended_watcher(notify_of_change) {
            Ok(watcher) => Some(Self { watcher, watched: BTreeSet::new(), poll_interval, warned: false }),
            Err(error) => {
                tracing::warn!(
                    error = %error,
                    "the system reports no file events; rule files are compared every {poll_interval:?} instead"
                );
                None
            }
        }
    }

    /// Watches `directories` and no others. Returns `true` if watches were placed, so that an earlier search may be stale.
    ///
    /// `renew` places every watch again even if the paths are the same, because a path may lead to another inode.
    pub(super) fn watch(&mut self, directories: &BTreeSet<PathBuf>, renew: bool) -> bool {
        if self.watched == *directories && !renew {
            return false;
        }
        for directory in std::mem::replace(&mut self.watched, directories.clone()) {
            // Fails if the directory was removed, and its watch with it.
            let _ = self.watcher.unwatch(&directory);
        }
        for directory in directories {
            if let Err(error) = self.watcher.watch(directory, RecursiveMode::NonRecursive) {
                self.warn_once_of_failed_watch(directory, &error);
            }
        }
        true
    }

    fn warn_once_of_failed_watch(&mut self, directory: &Path, error: &notify::Error) {
        // The directory was removed since the search; the next search notices that.
        let removed = matches!(error.kind, ErrorKind::PathNotFound);
        if !removed && !self.warned {
            self.warned = true;
            tracing::warn!(
                directory = %directory.display(), error = %error,
                "cannot watch a directory; changes there are noticed by polling every {:?}", self.poll_interval
            );
        }
    }
}

/// Returns `true` if the files may have changed. Reading them opens and closes files, so that does not matter.
fn may_be_change(event: &Event) -> bool {
    match event.kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => true,
        EventKind::Access(_) => event.need_rescan(),
        _ => true,
    }
}

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

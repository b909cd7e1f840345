//! Watches on the directories of the rule files, and the events that wake the watching thread.
//!
//! Only directories are watched, never files: a replaced file has a new inode, and only its directory reports that. For
//! every path on which the rule files depend, each directory on the path is watched for the next name, through symbolic
//! links. So a swapped link, a renamed parent and a file that appears later are all noticed. Directories are identified
//! by their real paths; watches follow inodes, so they are placed again after every event that matters.
//!
//! Without events (no inotify, or its limits reached), polling notices all changes later.
//!
//! Decides: how a changed file is noticed behind links and swapped directories (ConfigMap).
//! Decides: changes during a reload (`Wakeup`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{ErrorKind, Event, RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::time::Instant;

use super::walk::WatchedPath;
use crate::base::sharded::lock_ignoring_poison;

/// The inotify watches that are placed now.
pub(super) struct FsWatches {
    watcher: RecommendedWatcher,
    /// Directories that are watched, shared with the thread that receives events.
    set: Arc<Mutex<DirectoriesToWatch>>,
    /// Time after which changes are noticed without events, for the log.
    poll_interval: Duration,
    /// A failed watch was logged; the log has only the first.
    warned: bool,
}

impl FsWatches {
    /// Subscribes to events, which wake `wakeup`. Returns `None` and logs a warning if the system supports none.
    pub(super) fn new(wakeup: Arc<Wakeup>, poll_interval: Duration) -> Option<Self> {
        let set = Arc::new(Mutex::new(DirectoriesToWatch::default()));
        let received = Arc::clone(&set);
        let notify_if_relevant = move |event: notify::Result<Event>| {
            if event.map_or(true, |event| lock_ignoring_poison(&received).is_relevant_event(&event)) {
                wakeup.notify(|reason| reason.changed = true);
            }
        };
        match notify::recommended_watcher(notify_if_relevant) {
            Ok(watcher) => Some(Self { watcher, set, poll_interval, warned: false }),
            Err(error) => {
                tracing::warn!(
                    error = %error,
                    "the system reports no file events; rule files are compared every {poll_interval:?} instead"
                );
                None
            }
        }
    }

    /// Watches the directories on which `paths` depend. Returns `true` if watches were placed, so that an earlier
    /// search may be stale.
    ///
    /// `renew` places every watch again even if the paths are the same, because a path may lead to another inode.
    pub(super) fn replace_watches(&mut self, paths: &[WatchedPath], renew: bool) -> bool {
        let set = DirectoriesToWatch::from_paths(paths);
        let old = lock_ignoring_poison(&self.set).clone();
        if set == old && !renew {
            return false;
        }
        lock_ignoring_poison(&self.set).clone_from(&set);
        for directory in old.directories.keys() {
            // Fails if the directory was removed, and its watch with it.
            let _ = self.watcher.unwatch(directory);
        }
        for directory in set.directories.keys() {
            let placed = self.watcher.watch(directory, RecursiveMode::NonRecursive);
            if let Err(error) = placed {
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

/// Directories that are watched, by their real paths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct DirectoriesToWatch {
    directories: BTreeMap<PathBuf, WatchedDir>,
}

/// Entries of a directory that matter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct WatchedDir {
    /// Device and inode: a directory that was replaced needs a new watch.
    id: (u64, u64),
    /// All entries matter.
    all: bool,
    /// Names of the entries that matter.
    names: BTreeSet<OsString>,
}

impl DirectoriesToWatch {
    fn from_paths(paths: &[WatchedPath]) -> Self {
        let mut set = Self::default();
        for trace in paths {
            match trace {
                WatchedPath::Followed(path) => {
                    set.add_path(path);
                }
                WatchedPath::Listed(path) => {
                    if let Some(directory) = set.add_path(path) {
                        set.get_or_add_directory(&directory).all = true;
                    }
                }
            }
        }
        set
    }

    /// Resolves `path` name by name, through links, and adds each directory with the name looked up in it. Returns the
    /// real path, or `None` if it does not exist.
    fn add_path(&mut self, path: &Path) -> Option<PathBuf> {
        let mut at = PathBuf::from("/");
        let mut rest: VecDeque<OsString> = split_path_components(&std::path::absolute(path).ok()?).collect();
        let mut links_left = MAX_SYMLINKS;
        while let Some(name) = rest.pop_front() {
            if name == OsStr::new("..") {
                at.pop();
                continue;
            }
            let next = at.join(&name);
            self.get_or_add_directory(&at).names.insert(name);
            if !fs::symlink_metadata(&next).ok()?.is_symlink() {
                at = next;
                continue;
            }
            links_left = usize::checked_sub(links_left, 1)?;
            let target = fs::read_link(&next).ok()?;
            if target.is_absolute() {
                at = PathBuf::from("/");
            }
            for name in split_path_components(&target).collect::<Vec<_>>().into_iter().rev() {
                rest.push_front(name);
            }
        }
        Some(at)
    }

    fn get_or_add_directory(&mut self, directory: &Path) -> &mut WatchedDir {
        self.directories.entry(directory.to_owned()).or_insert_with(|| WatchedDir {
            id: fs::metadata(directory).map(|it| (it.dev(), it.ino())).unwrap_or_default(),
            ..WatchedDir::default()
        })
    }

    /// Returns `true` if `event` may change the rule files. Reading them opens files, so opening does not matter.
    fn is_relevant_event(&self, event: &Event) -> bool {
        match event.kind {
            EventKind::Access(AccessKind::Close(AccessMode::Write)) => {}
            EventKind::Access(_) => return false,
            _ => {}
        }
        event.need_rescan() || event.paths.iter().any(|path| self.is_watched_path(path))
    }

    fn is_watched_path(&self, path: &Path) -> bool {
        let as_entry = path.parent().zip(path.file_name()).is_some_and(|(parent, name)| {
            self.directories.get(parent).is_some_and(|directory| directory.all || directory.names.contains(name))
        });
        as_entry || self.directories.contains_key(path)
    }
}

/// Maximum number of symbolic links followed in one path, as in Linux.
const MAX_SYMLINKS: usize = 40;

fn split_path_components(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some(OsString::from("..")),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    })
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

//! Watching rule files for changes.
//!
//! A thread hashes the contents of all files and compares the hash with that of the last delivered set: after an event
//! of the file system (`fs_events`), at every poll interval, and on request. Events only trigger a comparison and carry
//! no information; a lost event delays a change by one poll interval at most.
//!
//! A set is delivered after two consecutive reads with the same result, so no half-written set is delivered, and an
//! error is delivered once. The watcher does not know whether a set compiles. `fs_events` follows links and
//! directories.
//!
//! Decides: when a changed rule file is read, and how long after the last write; half-written files.
//! Decides: a second SIGHUP during a reload.

use std::hash::{Hash, Hasher};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use siphasher::sip128::{Hasher128, SipHasher13};
use tokio::sync::watch;
use tokio::time::Instant;

use super::fs_events::{FsWatches, WakeReason, Wakeup};
use super::read::{FilesRead, read_found_files};
use super::walk::{FileSearchResult, FileStamps, WatchedPath, search_location};
use super::{RuleFileSetResult, RuleFilesLocation};
use crate::base::sharded::lock_ignoring_poison;
use crate::base::threads;
use crate::settings::rules::RuleSettings;

/// Intervals of the watcher.
#[derive(Clone, Debug)]
pub struct WatchTiming {
    /// Time without events before files are read, and time between the two reads that must agree.
    ///
    /// A burst of events postpones the first read by five times this at most. 1 ms to 10 s, default 100 ms.
    pub debounce: Duration,
    /// Interval between comparisons without an event: 1 ms to 366 days, default 10 s.
    pub poll_interval: Duration,
    /// Subscribe to events of the file system; without them only polling notices changes. Default true.
    pub events: bool,
}

impl Default for WatchTiming {
    fn default() -> Self {
        Self { debounce: Duration::from_millis(100), poll_interval: Duration::from_secs(10), events: true }
    }
}

impl From<&RuleSettings> for WatchTiming {
    fn from(settings: &RuleSettings) -> Self {
        let poll_interval = settings.poll_interval.unwrap_or(Duration::MAX);
        Self { debounce: settings.reload_debounce, poll_interval, events: true }
    }
}

impl WatchTiming {
    fn clamp_intervals(self) -> Self {
        let day = Duration::from_secs(24 * 60 * 60);
        Self {
            // Two reads at the same moment would agree on a file that is half written.
            debounce: self.debounce.clamp(Duration::from_millis(1), Duration::from_secs(10)),
            poll_interval: self.poll_interval.clamp(Duration::from_millis(1), 366 * day),
            ..self
        }
    }
}

/// Watches the files of a location until it is dropped.
#[derive(Debug)]
pub struct FileWatcher {
    wakeup: Arc<Wakeup>,
    comparisons: Arc<AtomicU64>,
}

impl FileWatcher {
    /// Starts to watch `location`. `last` is the set that the caller has; a change since then is delivered too.
    ///
    /// # Errors
    /// The thread cannot be started. Missing events are not an error: they are logged, and polling goes on.
    pub fn start(
        location: RuleFilesLocation,
        timing: WatchTiming,
        last: &RuleFileSetResult,
    ) -> io::Result<(Self, FileSetReceiver)> {
        let read = |scan: FileSearchResult| {
            let FilesRead { result, named } = read_found_files(scan);
            (result, named)
        };
        let comparison = FileComparison { read, fingerprint: hash_result };
        Self::start_comparing(location, timing, hash_result(last), comparison)
    }

    /// Starts to watch files without reading them. `last` has the stamps that the caller knows; a change since then is
    /// delivered too.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start_comparing_stamps(
        location: RuleFilesLocation,
        timing: WatchTiming,
        last: &FileStamps,
    ) -> io::Result<(Self, FileSetReceiver<FileStamps>)> {
        let comparison = FileComparison {
            read: |scan| (FileStamps::from_search(scan), Vec::new()),
            fingerprint: FileStamps::fingerprint,
        };
        Self::start_comparing(location, timing, last.fingerprint(), comparison)
    }

    fn start_comparing<T: Send + 'static>(
        location: RuleFilesLocation,
        timing: WatchTiming,
        delivered: u128,
        comparison: FileComparison<T>,
    ) -> io::Result<(Self, FileSetReceiver<T>)> {
        let timing = timing.clamp_intervals();
        let wakeup = Arc::new(Wakeup::default());
        let comparisons = Arc::new(AtomicU64::new(0));
        let slot = Arc::new(Mutex::new(None));
        let (filled, changes) = watch::channel(());
        let thread = WatchThread {
            fs_watches: timing.events.then(|| FsWatches::new(Arc::clone(&wakeup), timing.poll_interval)).flatten(),
            location,
            timing,
            wakeup: Arc::clone(&wakeup),
            comparisons: Arc::clone(&comparisons),
            delivered,
            named: Vec::new(),
            comparison,
            slot: Arc::clone(&slot),
            filled,
        };
        thread::Builder::new().name("rule-files".to_owned()).spawn(move || {
            threads::lower_thread_priority();
            thread.watch_until_stopped();
        })?;
        Ok((Self { wakeup, comparisons }, FileSetReceiver { slot, filled: changes }))
    }

    /// Reads all files now and delivers them even if nothing changed.
    pub fn reload(&self) {
        self.reloader().reload();
    }

    /// Handle that requests a reload; it does not keep the watcher alive.
    pub fn reloader(&self) -> WatchReloader {
        WatchReloader { wakeup: Arc::clone(&self.wakeup) }
    }

    /// Number of times that all files were read and compared since the start.
    pub fn comparison_count(&self) -> u64 {
        self.comparisons.load(Ordering::Relaxed)
    }
}

/// Ends the thread, at once or after the read in progress; waits for neither.
impl Drop for FileWatcher {
    fn drop(&mut self) {
        self.wakeup.notify(|reason| reason.stop = true);
    }
}

/// Requests reloads from a [`FileWatcher`].
#[derive(Clone, Debug)]
pub struct WatchReloader {
    wakeup: Arc<Wakeup>,
}

impl WatchReloader {
    /// Reads all files now and delivers them even if nothing changed.
    pub fn reload(&self) {
        self.wakeup.notify(|reason| reason.reload = true);
    }
}

/// Receiver of changed sets. Holds only the newest: a slow receiver misses the sets that it replaced.
#[derive(Debug)]
pub struct FileSetReceiver<T = RuleFileSetResult> {
    slot: Arc<Mutex<Option<T>>>,
    filled: watch::Receiver<()>,
}

impl<T> FileSetReceiver<T> {
    /// Returns the next changed set, or its errors; `None` after the watcher has ended. Cancel safe.
    pub async fn next_set(&mut self) -> Option<T> {
        loop {
            self.filled.mark_unchanged();
            if let Some(result) = lock_ignoring_poison(&self.slot).take() {
                return Some(result);
            }
            self.filled.changed().await.ok()?;
        }
    }
}

/// How files are compared.
struct FileComparison<T> {
    /// Reads what a search found, and returns further paths to watch.
    read: fn(FileSearchResult) -> (T, Vec<WatchedPath>),
    fingerprint: fn(&T) -> u128,
}

/// The thread that compares files.
struct WatchThread<T> {
    location: RuleFilesLocation,
    timing: WatchTiming,
    wakeup: Arc<Wakeup>,
    fs_watches: Option<FsWatches>,
    comparisons: Arc<AtomicU64>,
    /// Fingerprint of the last delivered set.
    delivered: u128,
    /// Paths that the files named when they were last read.
    named: Vec<WatchedPath>,
    comparison: FileComparison<T>,
    slot: Arc<Mutex<Option<T>>>,
    filled: watch::Sender<()>,
}

/// The thread has to end: its watcher was dropped.
struct StopRequested;

impl<T> WatchThread<T> {
    fn watch_until_stopped(mut self) {
        // The first comparison is due at once: something may have changed since the caller's read.
        let mut poll_at = Instant::now();
        loop {
            let reason = self.wakeup.wait_until(poll_at);
            let compared = self.wait_for_quiet(reason).and_then(|reason| self.deliver_if_changed(reason));
            if compared.is_err() {
                return;
            }
            poll_at = Instant::now() + self.timing.poll_interval;
        }
    }

    /// Waits after an event until no more come, for five times the debounce at most: a busy neighbour in the directory
    /// must not keep a change from being noticed.
    fn wait_for_quiet(&self, mut reason: WakeReason) -> Result<WakeReason, StopRequested> {
        let latest = Instant::now() + self.timing.debounce * 5;
        let mut more = reason.changed;
        while more && !reason.reload && !reason.stop && Instant::now() < latest {
            let next = self.wakeup.wait_until(latest.min(Instant::now() + self.timing.debounce));
            more = next.changed;
            reason.reload |= next.reload;
            reason.stop |= next.stop;
        }
        if reason.stop { Err(StopRequested) } else { Ok(reason) }
    }

    /// Reads all files, and delivers a set that differs from the last one, or any set after a reload request.
    ///
    /// A single read may see a file half written, or the old half of a set and the new half of another. Therefore a
    /// difference counts once two consecutive reads agree. Contents that keep changing are never delivered: a truncated
    /// rule file may well be valid and lack the limits at its end.
    fn deliver_if_changed(&mut self, reason: WakeReason) -> Result<(), StopRequested> {
        let mut reload = reason.reload;
        let mut last = (self.comparison.fingerprint)(&self.watch_and_read_files(reason.changed || reload));
        let since = Instant::now();
        let mut warned = false;
        while reload || last != self.delivered {
            let reason = self.wait_for_debounce()?;
            reload |= reason.reload;
            let result = self.watch_and_read_files(reason.changed);
            let fingerprint = (self.comparison.fingerprint)(&result);
            if fingerprint == last {
                self.deliver_result(result, fingerprint);
                return Ok(());
            }
            last = fingerprint;
            if !warned && since.elapsed() > CHANGING_FILES_WARNING_DELAY {
                warned = true;
                tracing::warn!("rule files keep changing; they take effect once they stay the same");
            }
        }
        Ok(())
    }

    /// Waits for the whole debounce time; only a stop ends it early.
    fn wait_for_debounce(&self) -> Result<WakeReason, StopRequested> {
        let until = Instant::now() + self.timing.debounce;
        let mut all = WakeReason::default();
        loop {
            let reason = self.wakeup.wait_until(until);
            all.changed |= reason.changed;
            all.reload |= reason.reload;
            if reason.stop {
                return Err(StopRequested);
            }
            if Instant::now() >= until {
                return Ok(all);
            }
        }
    }

    /// Reads all files once.
    ///
    /// Watches are placed before, so that a change during the read is noticed. If the paths differ after that, the
    /// watches are placed again.
    fn watch_and_read_files(&mut self, changed: bool) -> T {
        let mut renew = changed;
        let mut placements = 0;
        let result = loop {
            let mut scan = search_location(&self.location);
            if let Some(fs_watches) = &mut self.fs_watches {
                while placements < MAX_WATCH_PLACEMENTS {
                    scan.watched.extend(self.named.iter().cloned());
                    if !fs_watches.replace_watches(&scan.watched, renew) {
                        break;
                    }
                    placements += 1;
                    renew = false;
                    scan = search_location(&self.location);
                }
            }
            let (result, named) = (self.comparison.read)(scan);
            let is_watched = self.fs_watches.is_none() || placements >= MAX_WATCH_PLACEMENTS || named == self.named;
            self.named = named;
            if is_watched {
                break result;
            }
        };
        self.comparisons.fetch_add(1, Ordering::Relaxed);
        result
    }

    fn deliver_result(&mut self, result: T, fingerprint: u128) {
        self.delivered = fingerprint;
        *lock_ignoring_poison(&self.slot) = Some(result);
        self.filled.send_replace(());
    }
}

/// Time for which contents may differ from read to read before a warning is logged.
const CHANGING_FILES_WARNING_DELAY: Duration = Duration::from_secs(5);
/// Maximum number of times that one read places the watches; polling covers a tree that changes even faster.
const MAX_WATCH_PLACEMENTS: usize = 4;

/// Hashes a result to 128 bits, so that two different results practically never have the same fingerprint.
fn hash_result(result: &RuleFileSetResult) -> u128 {
    let mut hasher = SipHasher13::new();
    match result {
        Ok(set) => {
            for file in &set.files {
                file.name.hash(&mut hasher);
                file.bytes.hash(&mut hasher);
            }
            set.sets.hash(&mut hasher);
            set.warnings.hash(&mut hasher);
        }
        // The readable part of a failed set has no effect.
        Err(failure) => {
            hasher.write_u8(1);
            failure.errors.hash(&mut hasher);
        }
    }
    hasher.finish128().as_u128()
}

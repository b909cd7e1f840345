//! Watching rule files for changes.
//!
//! A thread compares the stamps of all files with those of the last time: at every poll interval, after an event of the
//! file system (`fs_events`), and on request. Events carry no information; a lost event delays a change by one poll
//! interval at most. If a stamp differs, all files are read, and the hash of their contents is compared.
//!
//! A set is delivered after two consecutive reads with the same result, so no half-written set is delivered, and an
//! error is delivered once. The watcher does not know whether a set compiles.
//!
//! Decides: when a changed rule file is read, and how long after the last write; half-written files.
//! Decides: a second SIGHUP during a reload.

use std::hash::{Hash, Hasher};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime};

use siphasher::sip128::{Hasher128, SipHasher13};
use tokio::sync::watch;
use tokio::time::Instant;

use super::fs_events::{FsEvents, WakeReason, Wakeup};
use super::read::{FilesRead, read_found_files};
use super::walk::{FileSearchResult, FileStamps, search_location};
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
    /// Interval between comparisons without an event: 1 ms to 366 days, default 1 s.
    pub poll_interval: Duration,
    /// Subscribe to events of the file system; without them only polling notices changes. Default true.
    pub events: bool,
}

impl Default for WatchTiming {
    fn default() -> Self {
        Self { debounce: Duration::from_millis(100), poll_interval: Duration::from_secs(1), events: true }
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
            read: |scan| (FileStamps::new(&scan, &[]), Vec::new()),
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
            events: timing.events.then(|| FsEvents::new(Arc::clone(&wakeup), timing.poll_interval)).flatten(),
            location,
            timing,
            wakeup: Arc::clone(&wakeup),
            comparisons: Arc::clone(&comparisons),
            delivered,
            seen: None,
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

    /// Number of times that the stamps of all files were compared since the start.
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
    /// Reads what a search found, and returns the paths of further files.
    read: fn(FileSearchResult) -> (T, Vec<PathBuf>),
    fingerprint: fn(&T) -> u128,
}

/// The thread that compares files.
struct WatchThread<T> {
    location: RuleFilesLocation,
    timing: WatchTiming,
    wakeup: Arc<Wakeup>,
    events: Option<FsEvents>,
    comparisons: Arc<AtomicU64>,
    /// Fingerprint of the last delivered set.
    delivered: u128,
    /// Fingerprint of the stamps with which the files were last read; `None` if they may have changed without another one.
    seen: Option<u128>,
    /// Paths that the files named when they were last read.
    named: Vec<PathBuf>,
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

    /// Reads all files if a stamp differs, and delivers a set that differs from the last one, or any set after a reload
    /// request.
    ///
    /// A single read may see a file half written, or the old half of a set and the new half of another. Therefore a
    /// difference counts once two consecutive reads agree. Contents that keep changing are never delivered: a truncated
    /// rule file may well be valid and lack the limits at its end.
    fn deliver_if_changed(&mut self, reason: WakeReason) -> Result<(), StopRequested> {
        let mut reload = reason.reload;
        let (_, stamps) = self.search_and_watch(reason.changed);
        if !reload && self.seen == Some(stamps.fingerprint()) {
            return Ok(());
        }
        let mut last = (self.comparison.fingerprint)(&self.read());
        let since = Instant::now();
        let mut warned = false;
        while reload || last != self.delivered {
            reload |= self.wait_for_debounce()?.reload;
            let result = self.read();
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
    fn read(&mut self) -> T {
        // The stamps are older than the contents, so that a change during the read is noticed later.
        let (search, stamps) = self.search_and_watch(true);
        let (result, named) = (self.comparison.read)(search);
        // The stamps of files that are named for the first time are not known yet.
        let is_certain = named == self.named && !stamps.may_hide_change(SystemTime::now());
        self.seen = is_certain.then(|| stamps.fingerprint());
        self.named = named;
        result
    }

    /// Searches the files, watches their directories and takes their stamps. What changed before a directory was watched is
    /// found by a second search; polling covers a tree that changes even faster.
    fn search_and_watch(&mut self, renew: bool) -> (FileSearchResult, FileStamps) {
        self.comparisons.fetch_add(1, Ordering::Relaxed);
        let search = |named: &[PathBuf]| {
            let mut search = search_location(&self.location);
            named.iter().for_each(|path| search.add_directory_of(path));
            search
        };
        let mut found = search(&self.named);
        if let Some(events) = &mut self.events
            && events.watch(&found.directories, renew)
        {
            found = search(&self.named);
            events.watch(&found.directories, false);
        }
        let stamps = FileStamps::new(&found, &self.named);
        (found, stamps)
    }

    fn deliver_result(&mut self, result: T, fingerprint: u128) {
        self.delivered = fingerprint;
        *lock_ignoring_poison(&self.slot) = Some(result);
        self.filled.send_replace(());
    }
}

/// Time for which contents may differ from read to read before a warning is logged.
const CHANGING_FILES_WARNING_DELAY: Duration = Duration::from_secs(5);

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

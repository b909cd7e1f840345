//! Noticing that the rule files changed.
//!
//! A thread of its own compares the contents of all files with what was handed over last, by hash: when the file
//! system says that something moved (`sight`), every poll interval besides, and when asked. Events only ever say
//! when to look, never what changed; a lost one costs a poll interval at most.
//!
//! What is handed over was read twice in a row with the same result, so no half-written set leaves here, and an
//! error is handed over once. Whether the set is any good is not known here.

mod sight;

use std::hash::{Hash, Hasher};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use siphasher::sip128::{Hasher128, SipHasher13};
use tokio::sync::watch;

use self::sight::Sight;
use super::source::{Layout, Reading, Survey};

/// When to look.
#[derive(Clone, Debug)]
pub struct Timing {
    /// How long the files must have been quiet, and the time between the two readings that must agree. A burst
    /// postpones the first reading by five of these at most. At most 10 s, default 100 ms.
    pub debounce: Duration,
    /// How often contents are compared without any event: at least 1 ms, default 10 s; what is longer than 366 days is
    /// never.
    pub poll_interval: Duration,
    /// Whether to ask the system for events; without, only polling notices changes. Default true.
    pub events: bool,
}

impl Default for Timing {
    fn default() -> Self {
        Self { debounce: Duration::from_millis(100), poll_interval: Duration::from_secs(10), events: true }
    }
}

impl Timing {
    fn bounded(self) -> Self {
        let day = Duration::from_secs(24 * 60 * 60);
        Self {
            // Two readings at the same moment would agree about a file that is half written.
            debounce: self.debounce.clamp(Duration::from_millis(1), Duration::from_secs(10)),
            poll_interval: self.poll_interval.clamp(Duration::from_millis(1), 366 * day),
            ..self
        }
    }
}

/// Watches the files of a layout until it is dropped.
#[derive(Debug)]
pub struct Watcher {
    bell: Arc<Bell>,
    looks: Arc<AtomicU64>,
}

impl Watcher {
    /// Starts to watch `layout`, of which `seen` was read last: a change since then is handed over too.
    ///
    /// # Errors
    ///
    /// When no thread can be started. That the system gives no events is no error; it is logged, and polling goes on.
    pub fn start(layout: Layout, timing: Timing, seen: &Reading) -> io::Result<(Self, Changes)> {
        let timing = timing.bounded();
        let bell = Arc::new(Bell::default());
        let looks = Arc::new(AtomicU64::new(0));
        let slot = Arc::new(Mutex::new(None));
        let (filled, changes) = watch::channel(());
        let sentry = Sentry {
            sight: timing.events.then(|| Sight::new(Arc::clone(&bell), timing.poll_interval)).flatten(),
            layout,
            timing,
            bell: Arc::clone(&bell),
            looks: Arc::clone(&looks),
            seen: fingerprint(seen),
            slot: Arc::clone(&slot),
            filled,
        };
        thread::Builder::new().name("rule-files".to_owned()).spawn(move || {
            yield_to_decisions();
            sentry.run();
        })?;
        Ok((Self { bell, looks }, Changes { slot, filled: changes }))
    }

    /// Reads everything now and hands it over even if nothing changed.
    pub fn reload(&self) {
        self.bell.ring(|rung| rung.reload = true);
    }

    /// How often the files were read and compared since the start.
    pub fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }
}

/// Ends the thread, at once or when the reading under way is done; waits for neither.
impl Drop for Watcher {
    fn drop(&mut self) {
        self.bell.ring(|rung| rung.stop = true);
    }
}

/// Where changes arrive. Holds the newest only: a slow reader misses what was replaced meanwhile.
#[derive(Debug)]
pub struct Changes {
    slot: Arc<Mutex<Option<Reading>>>,
    filled: watch::Receiver<()>,
}

impl Changes {
    /// The next change: all files, or what is in the way. `None` once the watcher is gone. Cancelling loses nothing.
    pub async fn next(&mut self) -> Option<Reading> {
        loop {
            self.filled.mark_unchanged();
            if let Some(reading) = lock(&self.slot).take() {
                return Some(reading);
            }
            self.filled.changed().await.ok()?;
        }
    }
}

/// What woke the thread.
#[derive(Clone, Copy, Debug, Default)]
struct Rung {
    changed: bool,
    reload: bool,
    stop: bool,
}

/// Wakes the thread. Any number of rings between two looks are one.
#[derive(Debug, Default)]
struct Bell {
    rung: Mutex<Rung>,
    wake: Condvar,
}

impl Bell {
    fn ring(&self, how: impl FnOnce(&mut Rung)) {
        how(&mut lock(&self.rung));
        self.wake.notify_one();
    }

    /// Waits for a ring, or until `deadline`. A stop stays rung.
    fn wait_until(&self, deadline: Instant) -> Rung {
        let quiet = |rung: &mut Rung| !(rung.changed || rung.reload || rung.stop);
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.wake.wait_timeout_while(lock(&self.rung), left, quiet);
        let (mut rung, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let taken = *rung;
        *rung = Rung { stop: taken.stop, ..Rung::default() };
        taken
    }
}

/// The thread that looks.
struct Sentry {
    layout: Layout,
    timing: Timing,
    bell: Arc<Bell>,
    sight: Option<Sight>,
    looks: Arc<AtomicU64>,
    /// The fingerprint of what was handed over last.
    seen: u128,
    slot: Arc<Mutex<Option<Reading>>>,
    filled: watch::Sender<()>,
}

/// A look was cut short because the watcher is gone.
struct Stopped;

impl Sentry {
    fn run(mut self) {
        // The first look is due at once: something may have changed since the caller's reading.
        let mut poll_at = Instant::now();
        loop {
            let rung = self.bell.wait_until(poll_at);
            let looked = self.wait_for_quiet(rung).and_then(|rung| self.compare(rung));
            if looked.is_err() {
                return;
            }
            poll_at = Instant::now() + self.timing.poll_interval;
        }
    }

    /// After an event, waits until no more come, for five times the debounce at most: a busy neighbour in the
    /// directory must not keep a change from being seen.
    fn wait_for_quiet(&self, mut rung: Rung) -> Result<Rung, Stopped> {
        let latest = Instant::now() + self.timing.debounce * 5;
        let mut more = rung.changed;
        while more && !rung.reload && !rung.stop && Instant::now() < latest {
            let next = self.bell.wait_until(latest.min(Instant::now() + self.timing.debounce));
            more = next.changed;
            rung.reload |= next.reload;
            rung.stop |= next.stop;
        }
        if rung.stop { Err(Stopped) } else { Ok(rung) }
    }

    /// Looks, and hands over what differs from what was handed over last, or anything if a reload was asked for.
    ///
    /// A single reading may have met a file half written, or the old half of a set and the new half of another.
    /// So a difference counts once two readings in a row agree. Contents that never settle are never handed over:
    /// a truncated rule file may well be valid and lack the limits at its end.
    fn compare(&mut self, rung: Rung) -> Result<(), Stopped> {
        let mut reload = rung.reload;
        let mut last = fingerprint(&self.look(rung.changed || reload));
        let since = Instant::now();
        let mut told = false;
        while reload || last != self.seen {
            let rung = self.pause()?;
            reload |= rung.reload;
            let reading = self.look(rung.changed);
            let print = fingerprint(&reading);
            if print == last {
                self.hand_over(reading, print);
                return Ok(());
            }
            last = print;
            if !told && since.elapsed() > UNSETTLED {
                told = true;
                tracing::warn!("rule files keep changing; they take effect once they stay the same");
            }
        }
        Ok(())
    }

    /// Waits out the debounce, whatever rings but a stop.
    fn pause(&self) -> Result<Rung, Stopped> {
        let until = Instant::now() + self.timing.debounce;
        let mut all = Rung::default();
        loop {
            let rung = self.bell.wait_until(until);
            all.changed |= rung.changed;
            all.reload |= rung.reload;
            if rung.stop {
                return Err(Stopped);
            }
            if Instant::now() >= until {
                return Ok(all);
            }
        }
    }

    /// Reads everything once. The watches are placed before, so that what changes during the reading rings; and if
    /// the paths differ once they are placed, they are placed again.
    fn look(&mut self, moved: bool) -> Reading {
        let mut survey = Survey::of(&self.layout);
        if let Some(sight) = &mut self.sight {
            let mut renew = moved;
            for _ in 0..AIMS {
                if !sight.aim(survey.trail(), renew) {
                    break;
                }
                renew = false;
                survey = Survey::of(&self.layout);
            }
        }
        let reading = survey.load();
        self.looks.fetch_add(1, Ordering::Relaxed);
        reading
    }

    fn hand_over(&mut self, reading: Reading, print: u128) {
        self.seen = print;
        *lock(&self.slot) = Some(reading);
        self.filled.send_replace(());
    }
}

/// How long contents may differ from reading to reading before the log says so.
const UNSETTLED: Duration = Duration::from_secs(5);
/// How often one look places the watches; polling covers a tree that changes even faster.
const AIMS: usize = 4;

/// Tells readings apart. 128 bits: no two differing readings will ever be taken for the same.
fn fingerprint(reading: &Reading) -> u128 {
    let mut hasher = SipHasher13::new();
    match reading {
        Ok(sources) => {
            for file in &sources.files {
                file.name.hash(&mut hasher);
                file.bytes.hash(&mut hasher);
            }
            sources.warnings.hash(&mut hasher);
        }
        // What can be read of a refused set changes nothing.
        Err(refused) => {
            hasher.write_u8(1);
            refused.errors.hash(&mut hasher);
        }
    }
    hasher.finish128().as_u128()
}

/// A panic elsewhere leaves these values whole: each is replaced in one step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lowers the priority of this thread: on a busy machine reading and compiling a large set of rules must not keep a
/// decision waiting for a core. Without the permission it goes on as it is.
pub(crate) fn yield_to_decisions() {
    const NICENESS: i32 = 10;
    if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
        tracing::debug!(%error, "rules are loaded at full priority");
    }
}

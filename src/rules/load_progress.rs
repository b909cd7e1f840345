//! Progress of a load of rules: what is compiled, since when, and whether newer rules supersede it.
//!
//! Decides: when a load is called slow (`SLOW_LOAD_AFTER`).

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::base::sharded::lock_ignoring_poison;

/// Time after which a load is called slow.
pub const SLOW_LOAD_AFTER: Duration = Duration::from_secs(5);

/// State of the load that runs, if one does.
#[derive(Debug, Default)]
pub struct LoadProgress {
    running: Mutex<Option<RunningLoad>>,
    superseded: AtomicBool,
}

#[derive(Debug)]
struct RunningLoad {
    since: Instant,
    /// What is compiled.
    step: String,
    /// Time of the next warning, since the begin.
    warn_after: Duration,
}

impl LoadProgress {
    /// Records that a load begins.
    pub fn begin(&self) {
        self.superseded.store(false, Ordering::Relaxed);
        *lock_ignoring_poison(&self.running) =
            Some(RunningLoad { since: Instant::now(), step: "rules".to_owned(), warn_after: SLOW_LOAD_AFTER });
    }

    /// Records that the load has ended.
    pub fn end(&self) {
        *lock_ignoring_poison(&self.running) = None;
    }

    /// Records what the load compiles from now on, such as `expression in FILE:LINE`. Warns if the load is slow.
    pub fn set_step(&self, step: String) {
        if let Some(running) = lock_ignoring_poison(&self.running).as_mut() {
            running.step = step;
            let elapsed = running.since.elapsed();
            if elapsed >= running.warn_after {
                running.warn_after = elapsed + SLOW_LOAD_AFTER;
                tracing::warn!(
                    "rules are compiled for {} s: {}; the rules before stay",
                    elapsed.as_secs(),
                    running.step
                );
            }
        }
    }

    /// Makes the load end without a result, because newer rules are there.
    pub fn supersede(&self) {
        self.superseded.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if the load has to end.
    pub fn is_superseded(&self) -> bool {
        self.superseded.load(Ordering::Relaxed)
    }

    /// Describes a slow load: for how long it has run, and what it compiles.
    pub fn describe_slow_load(&self) -> Option<String> {
        let running = lock_ignoring_poison(&self.running);
        let running = running.as_ref().filter(|running| running.since.elapsed() >= SLOW_LOAD_AFTER)?;
        Some(format!("compiling for {} s: {}", running.since.elapsed().as_secs(), running.step))
    }
}

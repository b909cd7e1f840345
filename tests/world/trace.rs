//! What happened in a run, in order: for comparison of two runs by a hash, and for reading.
//!
//! `WORLD_TRACE=1` prints each event, `WORLD_TRACE=2` also what connections to Redis carry.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::rc::Rc;
use std::sync::LazyLock;

use tokio::time::Instant;

/// 0: nothing is printed, 1: events, 2: also bytes.
static PRINTED_LEVEL: LazyLock<u8> =
    LazyLock::new(|| std::env::var("WORLD_TRACE").map_or(0, |level| level.parse().expect("WORLD_TRACE is 0, 1 or 2")));

/// Events of a run.
#[derive(Clone, Debug)]
pub struct Trace(Rc<TraceState>);

#[derive(Debug)]
struct TraceState {
    started: Instant,
    hasher: RefCell<DefaultHasher>,
    lines: Cell<u64>,
    counts: RefCell<BTreeMap<&'static str, u64>>,
}

impl Trace {
    /// Creates a trace without events.
    pub fn new() -> Self {
        let state = TraceState {
            started: Instant::now(),
            hasher: RefCell::new(DefaultHasher::new()),
            lines: Cell::new(0),
            counts: RefCell::default(),
        };
        Self(Rc::new(state))
    }

    /// Records an event.
    pub fn record(&self, text: impl FnOnce() -> String) {
        let (line, at_ms) = (text(), self.0.started.elapsed().as_millis());
        let mut hasher = self.0.hasher.borrow_mut();
        (at_ms, &line).hash(&mut *hasher);
        self.0.lines.set(self.0.lines.get() + 1);
        if *PRINTED_LEVEL >= 1 {
            eprintln!("{:>6}.{:03} {line}", at_ms / 1000, at_ms % 1000);
        }
    }

    /// Records bytes that were exchanged.
    pub fn record_bytes(&self, bytes: &[u8]) {
        let at_ms = self.0.started.elapsed().as_millis();
        (at_ms, bytes).hash(&mut *self.0.hasher.borrow_mut());
        if *PRINTED_LEVEL >= 2 {
            eprintln!("{:>6}.{:03} {}", at_ms / 1000, at_ms % 1000, bytes.escape_ascii());
        }
    }

    /// Counts a fault or a recovery.
    pub fn count(&self, what: &'static str) {
        self.count_many(what, 1);
    }

    /// Counts several at once.
    pub fn count_many(&self, what: &'static str, times: u64) {
        *self.0.counts.borrow_mut().entry(what).or_default() += times;
    }

    /// Hash of all events so far.
    pub fn hash(&self) -> u64 {
        self.0.hasher.borrow().finish()
    }

    /// How often each fault and recovery happened.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.0.counts.borrow().clone()
    }
}

//! Tap: a live sample of decisions, as records of the decision log, for operators that listen.
//!
//! While nobody listens, a decision reads one flag. A listener filters decisions by domain, entry and verdict, and gets
//! at most [`MAX_LINES_PER_SECOND`]; the others are counted. A decision never waits for a listener.
//!
//! Decides: how many decisions a tap shows, how many taps there are, and how long a line of one may be.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use serde::Deserialize;
use tokio::sync::mpsc;

use crate::decide::log::record::{DecisionRecord, RecordedVerdict};
use crate::limit::request::Request;

/// Maximum number of listeners.
pub const MAX_LISTENERS: usize = 4;
/// Maximum number of lines that a listener gets in a second.
pub const MAX_LINES_PER_SECOND: u64 = 100;
/// Maximum number of lines that wait for a listener.
const MAX_WAITING_LINES: usize = 64;
/// Maximum length of a line in bytes; longer ones are left out.
const MAX_LINE_BYTES: usize = 64 << 10;
/// Bits of the number of lines in a packed second.
const LINE_COUNT_BITS: u32 = 16;

/// Decisions that a listener asks for.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TapFilter {
    /// Domain of the request.
    pub domain: Option<String>,
    /// Entry that a descriptor must have: `key=value`, or a key.
    pub entry: Option<String>,
    /// Verdict on the request.
    pub verdict: Option<RecordedVerdict>,
}

/// Listeners of a process.
#[derive(Debug, Default)]
pub struct DecisionTap {
    has_listeners: AtomicBool,
    listeners: RwLock<Vec<Arc<Listener>>>,
    last_seq: AtomicU64,
}

#[derive(Debug)]
struct Listener {
    filter: TapFilter,
    lines: mpsc::Sender<Vec<u8>>,
    /// Second since the Unix epoch, and the number of lines in it.
    lines_of_second: AtomicU64,
    left_out: AtomicU64,
}

/// Lines of one listener, until it is dropped.
#[derive(Debug)]
pub struct TapLines {
    tap: Arc<DecisionTap>,
    listener: Arc<Listener>,
    lines: mpsc::Receiver<Vec<u8>>,
}

impl TapFilter {
    fn matches(&self, request: &Request<'_>, verdict: RecordedVerdict) -> bool {
        self.verdict.is_none_or(|asked| asked == verdict)
            && self.domain.as_deref().is_none_or(|domain| domain == request.domain)
            && self.entry.as_deref().is_none_or(|asked| has_entry(request, asked))
    }
}

fn has_entry(request: &Request<'_>, asked: &str) -> bool {
    let (key, value) = asked.split_once('=').map_or((asked, None), |(key, value)| (key, Some(value)));
    let mut entries = request.descriptors.iter().flat_map(|descriptor| &descriptor.entries);
    entries.any(|entry| entry.key == key.as_bytes() && value.is_none_or(|value| entry.value == value.as_bytes()))
}

impl DecisionTap {
    /// True if anyone listens.
    #[inline]
    pub fn has_listeners(&self) -> bool {
        self.has_listeners.load(Ordering::Relaxed)
    }

    /// Adds a listener; `None` if there are [`MAX_LISTENERS`].
    pub fn listen(self: &Arc<Self>, filter: TapFilter) -> Option<TapLines> {
        let mut listeners = self.listeners.write().unwrap_or_else(PoisonError::into_inner);
        if listeners.len() >= MAX_LISTENERS {
            return None;
        }
        let (sender, lines) = mpsc::channel(MAX_WAITING_LINES);
        let listener = Arc::new(Listener {
            filter,
            lines: sender,
            lines_of_second: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
        });
        listeners.push(Arc::clone(&listener));
        self.has_listeners.store(true, Ordering::Relaxed);
        Some(TapLines { tap: Arc::clone(self), listener, lines })
    }

    /// Passes a decision to the listeners that ask for it. `record` is called at most once, with a number of the record.
    pub(super) fn send_decision<'a>(
        &self,
        request: &Request<'_>,
        verdict: RecordedVerdict,
        now_us: u64,
        record: impl FnOnce(u64) -> DecisionRecord<'a>,
    ) {
        let listeners = self.listeners.read().unwrap_or_else(PoisonError::into_inner);
        let takes =
            |listener: &&Arc<Listener>| listener.filter.matches(request, verdict) && listener.takes_line(now_us);
        let mut taking = listeners.iter().filter(takes).peekable();
        if taking.peek().is_none() {
            return;
        }
        let mut line = Vec::new();
        record(self.last_seq.fetch_add(1, Ordering::Relaxed) + 1).append_line(&mut line);
        for listener in taking {
            if line.len() > MAX_LINE_BYTES || listener.lines.try_send(line.clone()).is_err() {
                listener.left_out.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

impl Listener {
    /// Counts a line; false if the second has as many as it may have.
    fn takes_line(&self, now_us: u64) -> bool {
        let second = (now_us / 1_000_000) << LINE_COUNT_BITS;
        let count_line = |packed: u64| {
            let lines = if packed & !((1 << LINE_COUNT_BITS) - 1) == second { packed - second } else { 0 };
            (lines < MAX_LINES_PER_SECOND).then_some(second + lines + 1)
        };
        let takes = self.lines_of_second.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count_line).is_ok();
        if !takes {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
        takes
    }
}

impl TapLines {
    /// Waits for the next lines: a decision, and before it the number of those that were left out, if any were.
    pub async fn next_lines(&mut self) -> Option<Vec<u8>> {
        let line = self.lines.recv().await?;
        match self.listener.left_out.swap(0, Ordering::Relaxed) {
            0 => Some(line),
            left_out => {
                let mut lines = format!("{{\"v\":1,\"type\":\"left_out\",\"decisions\":{left_out}}}\n").into_bytes();
                lines.extend_from_slice(&line);
                Some(lines)
            }
        }
    }
}

impl Drop for TapLines {
    fn drop(&mut self) {
        let mut listeners = self.tap.listeners.write().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|listener| !Arc::ptr_eq(listener, &self.listener));
        self.tap.has_listeners.store(!listeners.is_empty(), Ordering::Relaxed);
    }
}

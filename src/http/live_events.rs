//! Events of `/live`: one sampler for all listeners.
//!
//! The sampler starts with the first listener and ends with the last, so nothing is computed without a listener. It
//! computes one event a second on a low-priority thread. All listeners share its text, and only the newest is kept.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{MissedTickBehavior, interval};

use super::off_thread::render_off_thread;
use crate::report::live::{LiveReport, LiveTotals};
use crate::scrape::MetricsCollector;

/// Maximum number of listeners.
pub const MAX_LISTENERS: usize = 16;
/// Time between events.
const INTERVAL: Duration = Duration::from_secs(1);

/// Text of the newest event; `None` before the first.
type NewestEvent = Option<Arc<str>>;

/// Events of `/live`.
#[derive(Debug)]
pub struct LiveEvents {
    collector: MetricsCollector,
    stopping: watch::Receiver<bool>,
    places: Arc<Semaphore>,
    /// Sender of the running sampler; `None` while there is no listener.
    sampler: Mutex<Option<watch::Sender<NewestEvent>>>,
}

/// A listener; its place is free again when it is dropped.
#[derive(Debug)]
pub(super) struct LiveListener {
    events: watch::Receiver<NewestEvent>,
    stopping: watch::Receiver<bool>,
    _place: OwnedSemaphorePermit,
}

impl LiveEvents {
    /// Events of this process, until `stopping` turns true.
    pub fn new(collector: MetricsCollector, stopping: watch::Receiver<bool>) -> Self {
        Self { collector, stopping, places: Arc::new(Semaphore::new(MAX_LISTENERS)), sampler: Mutex::default() }
    }

    /// Adds a listener; `None` if there are [`MAX_LISTENERS`].
    pub(super) fn listen(self: &Arc<Self>) -> Option<LiveListener> {
        let place = Arc::clone(&self.places).try_acquire_owned().ok()?;
        let mut sampler = self.sampler();
        let mut events = match &*sampler {
            Some(sender) => sender.subscribe(),
            None => {
                let (sender, events) = watch::channel(None);
                *sampler = Some(sender);
                tokio::spawn(Arc::clone(self).sample());
                events
            }
        };
        // The newest event is sent at once.
        events.mark_changed();
        Some(LiveListener { events, stopping: self.stopping.clone(), _place: place })
    }

    /// Sends an event each second until there is no listener.
    async fn sample(self: Arc<Self>) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last: Option<LiveTotals> = None;
        loop {
            ticks.tick().await;
            if self.has_ended() {
                return;
            }
            let (collector, before) = (self.collector.clone(), last.clone());
            let render = move || {
                let totals = LiveTotals::new(&collector);
                let report = LiveReport::new(&collector, before.as_ref().unwrap_or(&totals), &totals);
                (serde_json::to_string(&report).unwrap_or_default(), totals)
            };
            // Without a thread the next tick tries again.
            let Some((event, totals)) = render_off_thread(render).await else { continue };
            last = Some(totals);
            if let Some(sender) = &*self.sampler() {
                sender.send_replace(Some(event.into()));
            }
        }
    }

    /// True without a listener; then the next listener starts another sampler.
    fn has_ended(&self) -> bool {
        // Locked during the check, so that no listener joins a sampler that ends.
        let mut sampler = self.sampler();
        let is_unused = sampler.as_ref().is_none_or(|sender| sender.receiver_count() == 0);
        if is_unused {
            *sampler = None;
        }
        is_unused
    }

    fn sampler(&self) -> MutexGuard<'_, Option<watch::Sender<NewestEvent>>> {
        self.sampler.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LiveListener {
    /// Waits for the next event; `None` when the process stops.
    pub(super) async fn next(&mut self) -> Option<Arc<str>> {
        loop {
            tokio::select! {
                // An error means that the sender was dropped, which also ends the process.
                _ = self.stopping.wait_for(|stop| *stop) => return None,
                changed = self.events.changed() => changed.ok()?,
            }
            if let Some(event) = &*self.events.borrow_and_update() {
                return Some(Arc::clone(event));
            }
        }
    }
}

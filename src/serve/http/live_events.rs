//! Events of `/live`: one sampler for all subscribers.
//!
//! The sampler starts with the first subscriber and ends with the last, so nothing is computed without a subscriber. It
//! computes one event a second on a low-priority thread. All subscribers share its text, and only the newest is kept.
//!
//! Each subscriber is a connection of the debug listener, which `serve::server::admission` bounds.
//!
//! Decides: how often `/live` has an event, and when it ends.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::page_builder::PageBuilder;
use crate::base::sharded::lock_ignoring_poison;
use crate::base::text::escape_unprintable_json;
use crate::serve::metrics_collector::MetricsCollector;
use crate::serve::report::live::LiveReport;
use crate::serve::status::DecisionTotals;

/// Time between events.
const EVENT_INTERVAL: Duration = Duration::from_secs(1);

/// Text of the newest event; `None` before the first.
type NewestEvent = Option<Arc<str>>;

/// Events of `/live`.
#[derive(Debug)]
pub struct LiveEvents {
    collector: MetricsCollector,
    pages: PageBuilder,
    stopping: watch::Receiver<bool>,
    /// Sender of the running sampler; `None` while there is no subscriber.
    sampler: Mutex<Option<watch::Sender<NewestEvent>>>,
}

/// A subscriber; it counts until it is dropped.
#[derive(Debug)]
pub(super) struct LiveSubscriber {
    events: watch::Receiver<NewestEvent>,
    stopping: watch::Receiver<bool>,
}

impl LiveEvents {
    /// Events of this process, until `stopping` turns true.
    pub fn new(collector: MetricsCollector, pages: PageBuilder, stopping: watch::Receiver<bool>) -> Self {
        Self { collector, pages, stopping, sampler: Mutex::default() }
    }

    /// Turns true when the process begins to stop.
    pub(super) fn stopping(&self) -> watch::Receiver<bool> {
        self.stopping.clone()
    }

    /// Adds a subscriber.
    pub(super) fn subscribe(self: &Arc<Self>) -> LiveSubscriber {
        let mut sampler = self.lock_sampler();
        let mut events = match &*sampler {
            Some(sender) => sender.subscribe(),
            None => {
                let (sender, events) = watch::channel(None);
                *sampler = Some(sender);
                tokio::spawn(Arc::clone(self).send_events_until_unused());
                events
            }
        };
        // The newest event is sent at once.
        events.mark_changed();
        LiveSubscriber { events, stopping: self.stopping.clone() }
    }

    /// Sends an event each second until there is no subscriber.
    async fn send_events_until_unused(self: Arc<Self>) {
        let mut ticks = interval(EVENT_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last: Option<DecisionTotals> = None;
        loop {
            ticks.tick().await;
            if self.end_sampler_if_unused() {
                return;
            }
            let (collector, before) = (self.collector.clone(), last.clone());
            let render = move || {
                let totals = DecisionTotals::new(&collector);
                let report = LiveReport::new(&collector, before.as_ref().unwrap_or(&totals), &totals);
                (escape_unprintable_json(&serde_json::to_string(&report).unwrap_or_default()).into_owned(), totals)
            };
            // Without a thread the next tick tries again.
            let Some((event, totals)) = self.pages.run_one_at_a_time(render).await else { continue };
            last = Some(totals);
            if let Some(sender) = &*self.lock_sampler() {
                sender.send_replace(Some(event.into()));
            }
        }
    }

    /// Ends the sampler and returns true if there is no subscriber; the next subscriber starts another one.
    fn end_sampler_if_unused(&self) -> bool {
        // Locked during the check, so that no subscriber joins a sampler that ends.
        let mut sampler = self.lock_sampler();
        let is_unused = sampler.as_ref().is_none_or(|sender| sender.receiver_count() == 0);
        if is_unused {
            *sampler = None;
        }
        is_unused
    }

    fn lock_sampler(&self) -> MutexGuard<'_, Option<watch::Sender<NewestEvent>>> {
        lock_ignoring_poison(&self.sampler)
    }
}

impl LiveSubscriber {
    /// Waits for the next event; `None` when the process begins to stop.
    pub(super) async fn next_event(&mut self) -> Option<Arc<str>> {
        loop {
            tokio::select! {
                // An error means that the sender is gone: the process is ending.
                _ = self.stopping.wait_for(|stop| *stop) => return None,
                changed = self.events.changed() => changed.ok()?,
            }
            if let Some(event) = &*self.events.borrow_and_update() {
                return Some(Arc::clone(event));
            }
        }
    }
}

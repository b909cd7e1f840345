//! Events of `/live`: one sampler for all subscribers.
//!
//! The sampler starts with the first subscriber and ends with the last, so nothing is computed without a subscriber. It
//! computes one event a second on a low-priority thread. All subscribers share its text, and only the newest is kept.
//!
//! Decides: how many listeners `/live` may have.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::page_builder::PageBuilder;
use super::token_attempts::client_network;
use crate::base::sharded::lock_ignoring_poison;
use crate::base::text::escape_unprintable_json;
use crate::serve::metrics_collector::MetricsCollector;
use crate::serve::report::live::{LiveReport, LiveTotals};

/// Maximum number of subscribers.
const MAX_SUBSCRIBERS: usize = 16;
/// Maximum number of subscribers of one client: an IPv4 address, or a /64 network of IPv6.
const MAX_SUBSCRIBERS_PER_CLIENT: usize = 8;
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
    subscribers_by_client: Arc<SubscriberCounts>,
    /// Sender of the running sampler; `None` while there is no subscriber.
    sampler: Mutex<Option<watch::Sender<NewestEvent>>>,
}

/// A subscriber; it counts until it is dropped.
#[derive(Debug)]
pub(super) struct LiveSubscriber {
    events: watch::Receiver<NewestEvent>,
    stopping: watch::Receiver<bool>,
    _permit: SubscriberPermit,
}

/// Subscribers by client.
#[derive(Debug, Default)]
struct SubscriberCounts(Mutex<HashMap<IpAddr, usize>>);

/// Count of one subscriber, until it is dropped.
#[derive(Debug)]
struct SubscriberPermit {
    subscribers_by_client: Arc<SubscriberCounts>,
    client: IpAddr,
}

/// Bound that keeps a subscriber out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TooManySubscribers {
    /// There are [`MAX_SUBSCRIBERS`].
    #[error("{MAX_SUBSCRIBERS} listeners")]
    InAll,
    /// There are [`MAX_SUBSCRIBERS_PER_CLIENT`] of this client.
    #[error("{MAX_SUBSCRIBERS_PER_CLIENT} listeners of this address")]
    OfClient,
}

impl SubscriberCounts {
    /// Adds a subscriber of a client.
    fn add_subscriber(self: &Arc<Self>, peer: IpAddr) -> Result<SubscriberPermit, TooManySubscribers> {
        let client = client_network(peer);
        let mut subscribers = lock_ignoring_poison(&self.0);
        if subscribers.values().sum::<usize>() >= MAX_SUBSCRIBERS {
            return Err(TooManySubscribers::InAll);
        }
        let of_client = subscribers.entry(client).or_default();
        if *of_client >= MAX_SUBSCRIBERS_PER_CLIENT {
            return Err(TooManySubscribers::OfClient);
        }
        *of_client += 1;
        Ok(SubscriberPermit { subscribers_by_client: Arc::clone(self), client })
    }
}

impl Drop for SubscriberPermit {
    fn drop(&mut self) {
        let mut subscribers = lock_ignoring_poison(&self.subscribers_by_client.0);
        if let Entry::Occupied(mut of_client) = subscribers.entry(self.client) {
            *of_client.get_mut() -= 1;
            if *of_client.get() == 0 {
                of_client.remove();
            }
        }
    }
}

impl LiveEvents {
    /// Events of this process, until `stopping` turns true.
    pub fn new(collector: MetricsCollector, pages: PageBuilder, stopping: watch::Receiver<bool>) -> Self {
        Self { collector, pages, stopping, subscribers_by_client: Arc::default(), sampler: Mutex::default() }
    }

    /// Turns true when the process begins to stop.
    pub(super) fn stopping(&self) -> watch::Receiver<bool> {
        self.stopping.clone()
    }

    /// Adds a subscriber.
    ///
    /// # Errors
    /// There are too many subscribers in all, or of this client.
    pub(super) fn subscribe(self: &Arc<Self>, peer: IpAddr) -> Result<LiveSubscriber, TooManySubscribers> {
        let permit = self.subscribers_by_client.add_subscriber(peer)?;
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
        Ok(LiveSubscriber { events, stopping: self.stopping.clone(), _permit: permit })
    }

    /// Sends an event each second until there is no subscriber.
    async fn send_events_until_unused(self: Arc<Self>) {
        let mut ticks = interval(EVENT_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last: Option<LiveTotals> = None;
        loop {
            ticks.tick().await;
            if self.end_sampler_if_unused() {
                return;
            }
            let (collector, before) = (self.collector.clone(), last.clone());
            let render = move || {
                let totals = LiveTotals::new(&collector);
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

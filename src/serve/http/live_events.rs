//! Events of `/live`: one sampler for all listeners.
//!
//! The sampler starts with the first listener and ends with the last, so nothing is computed without a listener. It
//! computes one event a second on a low-priority thread. All listeners share its text, and only the newest is kept.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::response::render_off_thread;
use super::token_attempts::client_network;
use crate::base::printable_text::escape_unprintable_json;
use crate::base::sharded::lock_ignoring_poison;
use crate::serve::report::live::{LiveReport, LiveTotals};
use crate::serve::scrape::MetricsCollector;

/// Maximum number of listeners.
const MAX_LISTENERS: usize = 16;
/// Maximum number of listeners of one client: an IPv4 address, or a /64 network of IPv6.
const MAX_LISTENERS_PER_CLIENT: usize = 8;
/// Time between events.
const INTERVAL: Duration = Duration::from_secs(1);

/// Text of the newest event; `None` before the first.
type NewestEvent = Option<Arc<str>>;

/// Events of `/live`.
#[derive(Debug)]
pub struct LiveEvents {
    collector: MetricsCollector,
    stopping: watch::Receiver<bool>,
    listeners_by_client: Arc<ListenerCounts>,
    /// Sender of the running sampler; `None` while there is no listener.
    sampler: Mutex<Option<watch::Sender<NewestEvent>>>,
}

/// A listener; it counts until it is dropped.
#[derive(Debug)]
pub(super) struct LiveListener {
    events: watch::Receiver<NewestEvent>,
    stopping: watch::Receiver<bool>,
    _permit: ListenerPermit,
}

/// Listeners by client.
#[derive(Debug, Default)]
struct ListenerCounts(Mutex<HashMap<IpAddr, usize>>);

/// Count of one listener, until it is dropped.
#[derive(Debug)]
struct ListenerPermit {
    listeners_by_client: Arc<ListenerCounts>,
    client: IpAddr,
}

/// Bound that keeps a listener out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TooManyListeners {
    /// There are [`MAX_LISTENERS`].
    #[error("{MAX_LISTENERS} listeners")]
    InAll,
    /// There are [`MAX_LISTENERS_PER_CLIENT`] of this client.
    #[error("{MAX_LISTENERS_PER_CLIENT} listeners of this address")]
    OfClient,
}

impl ListenerCounts {
    /// Adds a listener of a client.
    fn take(self: &Arc<Self>, peer: IpAddr) -> Result<ListenerPermit, TooManyListeners> {
        let client = client_network(peer);
        let mut listeners = lock_ignoring_poison(&self.0);
        if listeners.values().sum::<usize>() >= MAX_LISTENERS {
            return Err(TooManyListeners::InAll);
        }
        let of_client = listeners.entry(client).or_default();
        if *of_client >= MAX_LISTENERS_PER_CLIENT {
            return Err(TooManyListeners::OfClient);
        }
        *of_client += 1;
        Ok(ListenerPermit { listeners_by_client: Arc::clone(self), client })
    }
}

impl Drop for ListenerPermit {
    fn drop(&mut self) {
        let mut listeners = lock_ignoring_poison(&self.listeners_by_client.0);
        if let Entry::Occupied(mut of_client) = listeners.entry(self.client) {
            *of_client.get_mut() -= 1;
            if *of_client.get() == 0 {
                of_client.remove();
            }
        }
    }
}

impl LiveEvents {
    /// Events of this process, until `stopping` turns true.
    pub fn new(collector: MetricsCollector, stopping: watch::Receiver<bool>) -> Self {
        Self { collector, stopping, listeners_by_client: Arc::default(), sampler: Mutex::default() }
    }

    /// Adds a listener.
    ///
    /// # Errors
    /// There are too many listeners in all, or of this client.
    pub(super) fn listen(self: &Arc<Self>, peer: IpAddr) -> Result<LiveListener, TooManyListeners> {
        let permit = self.listeners_by_client.take(peer)?;
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
        Ok(LiveListener { events, stopping: self.stopping.clone(), _permit: permit })
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
                (escape_unprintable_json(&serde_json::to_string(&report).unwrap_or_default()).into_owned(), totals)
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
        lock_ignoring_poison(&self.sampler)
    }
}

impl LiveListener {
    /// Waits for the next event; `None` when the process begins to stop.
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

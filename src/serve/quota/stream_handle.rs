//! A stream, as other streams and pages see it.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Mutex, MutexGuard};

use tokio::sync::Notify;

use crate::base::client_network::client_network;
use crate::base::clock::Time;
use crate::base::sharded::lock_ignoring_poison;

/// A stream, as others see it.
#[derive(Debug)]
pub struct StreamHandle {
    pub(super) id: u64,
    pub(super) peer: String,
    /// Network of the proxy; streams over a Unix socket are of one client.
    pub(super) client: IpAddr,
    /// The proxy keeps the ratio of tokens when its bucket changes.
    pub(super) keeps_ratio: bool,
    pub(super) opened: Time,
    state: Mutex<SharedStreamState>,
    pub(super) wake: Notify,
}

/// What others change of a stream, or see of it.
#[derive(Debug, Default)]
pub(super) struct SharedStreamState {
    pub(super) domain: String,
    /// Indices of buckets whose assignment may change.
    pub(super) due: BTreeSet<u32>,
    pub(super) buckets: usize,
    pub(super) reports: u64,
    pub(super) last_report: Time,
}

impl StreamHandle {
    /// A new stream.
    pub(super) fn new(id: u64, peer: Option<SocketAddr>, keeps_ratio: bool, opened: Time) -> Self {
        let client = peer.map_or(Ipv4Addr::UNSPECIFIED.into(), |peer| client_network(peer.ip()));
        let peer = peer.map(|peer| peer.to_string()).unwrap_or_default();
        Self { id, peer, client, keeps_ratio, opened, state: Mutex::default(), wake: Notify::new() }
    }

    /// Locks what changes.
    pub(super) fn lock(&self) -> MutexGuard<'_, SharedStreamState> {
        lock_ignoring_poison(&self.state)
    }

    /// Makes the stream look at a bucket.
    pub(super) fn mark_due(&self, bucket: u32) {
        self.lock().due.insert(bucket);
        self.wake.notify_one();
    }
}

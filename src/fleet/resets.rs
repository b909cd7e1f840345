//! Resets of counters, told to all replicas.
//!
//! The replica that resets a counter adds the request to a stream in Redis. Each replica waits for the next entry with
//! a blocking read, and drops what it caches about the same counters. An entry is only a hint: rejections are cached
//! for a second at most anyway, and a forged one can drop caches, but neither counters nor shares.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use super::envelope::{SummaryKey, verified};
use super::exchange::{Exchange, ResetEntry};
use crate::decision_log::record::{EntryRecord, OverrideRecord};
use crate::grpc::service::{DEFAULT_DEADLINE, Service};
use crate::redis::error::RedisError;
use crate::request::{Descriptor, Entry, Hits, Request};

/// Time before the start of reading from which on entries count, so that none is missed at a new connection.
const OVERLAP_MS: u64 = 2000;
/// Pause after entries, which bounds what a flood of them costs.
const PAUSE: Duration = Duration::from_millis(20);
/// Pause after a failure.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of descriptors of an entry; `/reset` takes no more.
const MAX_DESCRIPTORS: usize = 100;

/// Request whose counters were reset.
#[derive(Debug, Serialize, Deserialize)]
struct ResetMessage<'m> {
    domain: String,
    #[serde(borrow)]
    descriptors: Vec<ResetDescriptor<'m>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct ResetDescriptor<'m> {
    #[serde(borrow)]
    entries: Vec<EntryRecord<'m>>,
    #[serde(rename = "override", borrow)]
    limit_override: Option<OverrideRecord<'m>>,
}

impl<'m> From<&Descriptor<'m>> for ResetDescriptor<'m> {
    fn from(descriptor: &Descriptor<'m>) -> Self {
        Self {
            entries: descriptor.entries.iter().map(EntryRecord::plain).collect(),
            limit_override: descriptor.limit_override.as_ref().map(OverrideRecord::from),
        }
    }
}

/// Encodes a request whose counters were reset.
pub(super) fn encode(request: &Request<'_>) -> Vec<u8> {
    let descriptors = request.descriptors.iter().map(ResetDescriptor::from).collect();
    serde_json::to_vec(&ResetMessage { domain: request.domain.to_owned(), descriptors }).unwrap_or_default()
}

/// Drops what this process caches about counters that others reset, for ever. `reader` serves nothing else.
pub(super) async fn follow(reader: Exchange, service: Arc<Service>, key: Option<SummaryKey>) {
    loop {
        if let Ok(time) = reader.time().await {
            let milliseconds = time.redis.as_micros() / 1000;
            let from = format!("{}-0", milliseconds.saturating_sub(OVERLAP_MS)).into_bytes();
            // Entries may be lost or unreadable: begin at the current time again.
            let _failed = follow_from(&reader, from, |entry| apply(&service, entry, key.as_ref())).await;
        }
        sleep(RETRY_INTERVAL).await;
    }
}

/// Passes the entries after `last` to `apply` until Redis fails.
async fn follow_from(reader: &Exchange, mut last: Vec<u8>, apply: impl Fn(&ResetEntry)) -> Result<(), RedisError> {
    loop {
        let entries = reader.read_resets(&last).await?;
        entries.iter().for_each(&apply);
        if let Some(newest) = entries.into_iter().next_back() {
            last = newest.id;
            sleep(PAUSE).await;
        }
    }
}

fn apply(service: &Service, entry: &ResetEntry, key: Option<&SummaryKey>) {
    let Ok(Ok(message)) = verified(&entry.sealed, key).map(serde_json::from_slice::<ResetMessage<'_>>) else { return };
    if message.descriptors.len() > MAX_DESCRIPTORS {
        return;
    }
    for descriptor in &message.descriptors {
        forget(service, &message.domain, descriptor);
    }
    tracing::debug!(domain = message.domain, "dropped what was cached about counters that were reset");
}

fn forget(service: &Service, domain: &str, descriptor: &ResetDescriptor<'_>) {
    let parts = descriptor.entries.iter().map(|entry| Some([entry.key_bytes()?, entry.value_bytes()?]));
    let Some(parts) = parts.collect::<Option<Vec<_>>>() else { return };
    let sent = Descriptor {
        entries: parts.iter().map(|[key, value]| Entry { key, value }).collect(),
        hits: Hits::Charge(1),
        hits_addend: None,
        limit_override: descriptor.limit_override.as_ref().and_then(OverrideRecord::as_sent),
    };
    let request = Request { domain, descriptors: [sent].into_iter().collect(), hits_addend: 0 };
    let Some(loaded) = service.rules.load_full() else { return };
    service.decider.forget_cached(service.context(Some(&loaded), DEFAULT_DEADLINE), &request);
}

//! Announcements of `POST /reset` to all replicas.
//!
//! The replica that resets a counter adds the request to a stream in Redis. Each replica waits for the next entry with
//! a blocking read, and drops what it caches about the same counters. An entry is only a hint: rejections are cached
//! for a second at most anyway, and a forged one can drop caches, but neither counters nor shares.
//!
//! Decides: which replicas learn of a `POST /reset`, and how.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use super::authentication::{AuthenticationKey, check_authentication_code};
use super::redis_client::FleetRedisKeys;
use crate::base::clock::Clock;
use crate::decide::log::record::{EntryRecord, OverrideRecord};
use crate::limit::request::{Descriptor, Entry, Hits, Request};
use crate::serve::grpc::service::{DEFAULT_CALLER_DEADLINE, RateLimitService};
use crate::serve::redis_stream::StreamReader;
use crate::settings::fleet::FleetRedis;
use crate::store::client::redis::key_connection::KeyCommandError;
use crate::telemetry::log_throttle::LogThrottle;

/// Time before the current one at which reading of the stream begins, so that a new connection misses no entry.
const READ_START_OVERLAP: Duration = Duration::from_secs(2);
/// Maximum number of entries that one command reads.
const MAX_ENTRIES_PER_READ: usize = 16;
/// Pause after entries, which bounds what a flood of them costs.
const PAUSE_AFTER_ENTRIES: Duration = Duration::from_millis(20);
/// Pause after a failure.
const READ_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after Redis rejected the command, which takes longer to mend.
const READ_RETRY_INTERVAL_AFTER_REFUSAL: Duration = Duration::from_secs(5);
/// Shortest time between two equal log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
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
            entries: descriptor.entries.iter().map(EntryRecord::with_plain_value).collect(),
            limit_override: descriptor.limit_override.as_ref().map(OverrideRecord::from),
        }
    }
}

/// Encodes a request whose counters were reset.
pub(super) fn encode_reset(request: &Request<'_>) -> Vec<u8> {
    let descriptors = request.descriptors.iter().map(ResetDescriptor::from).collect();
    serde_json::to_vec(&ResetMessage { domain: request.domain.to_owned(), descriptors }).unwrap_or_default()
}

/// Reads the stream, over a connection of its own.
#[derive(Debug)]
pub(super) struct ResetReader(StreamReader);

impl ResetReader {
    /// Starts to look for the server. Needs a tokio runtime.
    pub(super) fn start(redis: &FleetRedis) -> Self {
        Self(StreamReader::start(&redis.deployment, FleetRedisKeys::new(&redis.key_prefix).resets))
    }

    /// Drops what this process caches about counters that others reset, for ever.
    pub(super) async fn follow_resets(
        mut self,
        service: Arc<RateLimitService>,
        authentication: Option<AuthenticationKey>,
    ) {
        let failure_log = LogThrottle::every(LOG_INTERVAL);
        loop {
            // Entries may be lost or unreadable: begin at the current time again.
            let end = self
                .follow_resets_from_now(|sealed| apply_reset_to_caches(&service, sealed, authentication.as_ref()))
                .await;
            let is_transient = end.as_ref().err().is_none_or(KeyCommandError::is_transient);
            if let Err(error) = end
                && !is_transient
                && let Some(suppressed) = failure_log.allow(Clock::System.now())
            {
                let fix = error.advice("give the user of Redis the commands of docs/redis.md");
                tracing::warn!(%error, fix, suppressed, "cannot read resets of other replicas: caches end after a second");
            }
            sleep(if is_transient { READ_RETRY_INTERVAL } else { READ_RETRY_INTERVAL_AFTER_REFUSAL }).await;
        }
    }

    /// Passes messages of the stream, from about now on, to `apply` until Redis fails.
    async fn follow_resets_from_now(&mut self, apply: impl Fn(&[u8])) -> Result<(), KeyCommandError> {
        let mut last = self.0.read_start_id(READ_START_OVERLAP).await?;
        loop {
            let entries = self.0.read_after(&last, MAX_ENTRIES_PER_READ).await?;
            entries.iter().for_each(|entry| apply(&entry.value));
            if let Some(newest) = entries.into_iter().next_back() {
                last = newest.id;
                sleep(PAUSE_AFTER_ENTRIES).await;
            }
        }
    }
}

/// Drops what this process caches about the counters of a sealed message; ignores one that is not authentic.
fn apply_reset_to_caches(service: &RateLimitService, sealed: &[u8], key: Option<&AuthenticationKey>) {
    let Ok(Ok(message)) = check_authentication_code(sealed, key).map(serde_json::from_slice::<ResetMessage<'_>>) else {
        return;
    };
    if message.descriptors.len() > MAX_DESCRIPTORS {
        return;
    }
    for descriptor in &message.descriptors {
        forget_counters_of_descriptor(service, &message.domain, descriptor);
    }
    tracing::debug!(domain = message.domain, "dropped what was cached about counters that were reset");
}

/// Drops what this process caches about the counters of a descriptor that another replica reset.
fn forget_counters_of_descriptor(service: &RateLimitService, domain: &str, descriptor: &ResetDescriptor<'_>) {
    let parts = descriptor.entries.iter().map(|entry| Some([entry.key_bytes()?, entry.value_bytes()?]));
    let Some(parts) = parts.collect::<Option<Vec<_>>>() else { return };
    let sent = Descriptor {
        entries: parts.iter().map(|[key, value]| Entry { key, value }).collect(),
        hits: Hits::Charge(1),
        hits_addend: None,
        limit_override: descriptor.limit_override.as_ref().and_then(OverrideRecord::to_limit_override),
    };
    let request = Request { domain, descriptors: [sent].into_iter().collect(), hits_addend: 0 };
    let Some(loaded) = service.rules.current_rules_owned() else { return };
    service
        .decider
        .forget_cached_counters(service.build_decision_context(Some(&loaded), DEFAULT_CALLER_DEADLINE), &request);
}

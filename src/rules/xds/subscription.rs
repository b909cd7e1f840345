//! Protocol of a subscription to all resources of one type, without I/O and without a clock.
//!
//! The first request of a stream claims no version and no nonce, because a control plane that restarted counts versions
//! from 1 again and does not answer a client that claims the version which it has. Each response is accepted or
//! refused; the caller may have applied a part of what it refuses, and says so in the message. A refusal claims the
//! version that was accepted on the same stream. The first refusal is sent at once; a server answers it with the same
//! resources at once, so the same content is refused again after a delay that grows. Content that is applied already is
//! accepted at once, whatever its version and the order of resources.
//!
//! Decides: when an update is accepted (ACK) or refused (NACK); type URL, version and nonce of a request.

use std::time::Duration;

use prost_types::Any;
use tokio::time::Instant;

use crate::base::pb::xds::{DiscoveryRequest, DiscoveryResponse, Node, Status};
use crate::base::text::{escape_unprintable, truncate_to_bytes};

/// Type of the resources.
pub const TYPE_URL: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";

/// Delay before the second refusal of the same content; it doubles with each further one.
pub const MIN_REFUSAL_DELAY: Duration = Duration::from_millis(500);

/// Maximum delay before the same content is refused again.
pub const MAX_REFUSAL_DELAY: Duration = Duration::from_secs(5);

/// Maximum length of the error of a refusal, in bytes.
const MAX_ERROR_BYTES: usize = 2048;

/// State of a subscription.
#[derive(Debug)]
pub struct Subscription {
    node: Node,
    /// Version that was accepted on this stream; empty if there is none.
    accepted_version: String,
    /// Response that is being applied.
    applying: Option<ResponseIdentity>,
    /// Content that is applied, from this stream or an earlier one.
    applied: Option<ContentHash>,
    /// Last refusal; `None` once other content was accepted.
    refusal: Option<Refusal>,
    /// Refusal that is sent later.
    delayed: Option<DelayedRefusal>,
}

/// Reaction to a response.
#[derive(Debug)]
pub enum Reaction {
    /// The response is for another subscription.
    Ignore,
    /// The resources are new; [`Subscription::conclude_apply`] follows.
    Apply(Vec<Any>),
    /// The content is applied already; the request accepts it.
    Accept(DiscoveryRequest),
    /// The content was refused before and is refused again at [`Subscription::next_refusal_time`].
    RefuseLater,
}

/// Identity of a response on its stream.
#[derive(Clone, Debug)]
struct ResponseIdentity {
    version: String,
    nonce: String,
    content: ContentHash,
}

#[derive(Debug)]
struct Refusal {
    content: ContentHash,
    message: String,
    delay: Duration,
}

#[derive(Debug)]
struct DelayedRefusal {
    due: Instant,
    received: ResponseIdentity,
}

/// Hash of a set of resources, independent of their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ContentHash([u8; 32]);

impl ContentHash {
    fn hash_resources(resources: &[Any]) -> Self {
        let one = |resource: &Any| {
            let mut hasher = blake3::Hasher::new();
            hasher.update(&(resource.type_url.len() as u64).to_le_bytes());
            hasher.update(resource.type_url.as_bytes());
            hasher.update(&resource.value);
            *hasher.finalize().as_bytes()
        };
        let mut hashes: Vec<[u8; 32]> = resources.iter().map(one).collect();
        hashes.sort_unstable();
        Self(*blake3::hash(hashes.as_flattened()).as_bytes())
    }
}

impl Subscription {
    /// A subscription of `node`, before its first stream.
    pub const fn new(node: Node) -> Self {
        Self { node, accepted_version: String::new(), applying: None, applied: None, refusal: None, delayed: None }
    }

    /// Begins a new stream; returns its first request.
    pub fn begin_stream(&mut self) -> DiscoveryRequest {
        self.accepted_version.clear();
        self.applying = None;
        self.delayed = None;
        self.build_request(String::new(), None)
    }

    /// Decides the reaction to a response.
    pub fn handle_response(&mut self, response: DiscoveryResponse, now: Instant) -> Reaction {
        let DiscoveryResponse { version_info: version, resources, type_url, nonce } = response;
        if !type_url.is_empty() && type_url != TYPE_URL {
            return Reaction::Ignore;
        }
        let content = ContentHash::hash_resources(&resources);
        let received = ResponseIdentity { version, nonce, content };
        if let Some(refusal) = self.refusal.as_mut().filter(|refusal| refusal.content == content) {
            let due = match &self.delayed {
                // A response that supersedes another one does not postpone the answer.
                Some(delayed) => delayed.due,
                None => {
                    let due = now + refusal.delay;
                    refusal.delay = (refusal.delay * 2).min(MAX_REFUSAL_DELAY);
                    due
                }
            };
            self.delayed = Some(DelayedRefusal { due, received });
            return Reaction::RefuseLater;
        }
        self.delayed = None;
        // After a refusal the applied content is applied again, which clears the reported error.
        if self.applied == Some(content) && self.refusal.is_none() {
            return Reaction::Accept(self.accept_response(received));
        }
        self.applying = Some(received);
        Reaction::Apply(resources)
    }

    /// Takes the result of the last [`Reaction::Apply`]; returns the answer to the server.
    pub fn conclude_apply(&mut self, result: &Result<(), String>) -> Option<DiscoveryRequest> {
        let received = self.applying.take()?;
        Some(match result {
            Ok(()) => {
                self.applied = Some(received.content);
                self.refusal = None;
                self.accept_response(received)
            }
            Err(message) => {
                let message = bounded_first_line(message);
                let request = self.build_nack(received.nonce, message.clone());
                self.refusal = Some(Refusal { content: received.content, message, delay: MIN_REFUSAL_DELAY });
                request
            }
        })
    }

    /// Returns the time of the next delayed refusal, if there is one.
    pub fn next_refusal_time(&self) -> Option<Instant> {
        self.delayed.as_ref().map(|delayed| delayed.due)
    }

    /// Removes the delayed refusal, due or not, and returns the message that sends it.
    pub fn take_delayed_refusal(&mut self) -> Option<DiscoveryRequest> {
        let delayed = self.delayed.take()?;
        let message = self.refusal.as_ref()?.message.clone();
        Some(self.build_nack(delayed.received.nonce, message))
    }

    /// Returns the version that was accepted on this stream; empty if there is none.
    pub fn accepted_version(&self) -> &str {
        &self.accepted_version
    }

    /// Records the version of a response as accepted; returns the request that tells the server.
    fn accept_response(&mut self, received: ResponseIdentity) -> DiscoveryRequest {
        self.accepted_version = received.version;
        self.build_request(received.nonce, None)
    }

    fn build_nack(&self, nonce: String, message: String) -> DiscoveryRequest {
        self.build_request(nonce, Some(Status { message, ..Status::default() }))
    }

    fn build_request(&self, response_nonce: String, error_detail: Option<Status>) -> DiscoveryRequest {
        DiscoveryRequest {
            version_info: self.accepted_version.clone(),
            node: Some(self.node.clone()),
            resource_names: Vec::new(),
            type_url: TYPE_URL.to_owned(),
            response_nonce,
            error_detail,
        }
    }
}

/// Returns the first of several problems, bounded and printable.
fn bounded_first_line(message: &str) -> String {
    escape_unprintable(truncate_to_bytes(message.lines().next().unwrap_or_default(), MAX_ERROR_BYTES))
}

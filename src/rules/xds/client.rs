//! Client of the control plane: keeps one stream open, for ever.
//!
//! Decisions of the protocol are in `subscription`; this is its I/O. A lost stream changes no rule. While a refusal
//! waits for its time, further responses are read.
//!
//! The first delay after a stream that was answered is `XDS_CLIENT_BACKOFF_INITIAL_INTERVAL`; each further one is twice
//! as long, up to the maximum. They are randomized, so that replicas do not connect at the same time.
//!
//! Decides: a control plane that is away, silent (`FIRST_RESPONSE_WARNING_DELAY`) or sends nonsense.
//! Decides: pauses between attempts (`RetryDelays`); when the cache is written.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use prost_types::{Any, Struct, Value};
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tonic::metadata::{MetadataKey, MetadataValue};
use tonic::{Code, Request, Status, Streaming};

use super::cache::{CachedResources, ResourceCache};
use super::connect::{ResolveHost, append_causes, connect_to_control_plane};
use super::refused_domains::{AppliedUpdate, UpdateResult, format_refusal};
use super::resource::{self, RuleResource};
use super::status::StreamStatus;
use super::subscription::{Reaction, Subscription};
use crate::base::clock::Clock;
use crate::base::pb::xds::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use crate::base::pb::xds::{DiscoveryRequest, DiscoveryResponse, Node};
use crate::base::random::random_fraction;
use crate::rules::diagnostic::escape_for_message;
use crate::settings::xds::{XdsBackoff, XdsSettings};
use crate::telemetry::log_throttle::ErrorDedup;

/// Time without a response on a new stream after which a warning is logged.
pub const FIRST_RESPONSE_WARNING_DELAY: Duration = Duration::from_secs(30);

/// Maximum time that a request waits for room in the queue to the server.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum number of requests in the queue to the server.
const MAX_QUEUED_REQUESTS: usize = 16;

/// Resources of one response.
#[derive(Debug)]
pub struct ReceivedResources {
    /// Version at the control plane.
    pub version: Arc<str>,
    /// Resources, or the reasons why there are none.
    pub resources: Result<Vec<RuleResource>, Vec<String>>,
}

/// Client of the control plane.
#[derive(Debug)]
pub struct XdsClient {
    /// Settings of the stream.
    pub settings: XdsSettings,
    /// Keeps the accepted resources, if set.
    pub cache: Option<ResourceCache>,
    /// Time without a response after which a warning is logged.
    pub answer_timeout: Duration,
    /// Resolver of the server's name.
    pub resolve: ResolveHost,
    /// State for pages and metrics.
    pub status: Arc<StreamStatus>,
    /// Receives the resources.
    pub updates: mpsc::Sender<ReceivedResources>,
    /// Results of the updates, one for each.
    pub results: mpsc::Receiver<UpdateResult>,
}

/// Node of the first and all further requests.
pub fn build_node(settings: &XdsSettings) -> Node {
    let text = |value: &String| Value { kind: Some(prost_types::value::Kind::StringValue(value.clone())) };
    let fields = settings.node_metadata.iter().map(|(name, value)| (name.clone(), text(value))).collect();
    Node { id: settings.node_id.clone(), metadata: Some(Struct { fields }) }
}

impl XdsClient {
    /// Keeps a stream open until the receiver of the updates is gone.
    pub async fn keep_stream_open(mut self) {
        let mut subscription = Subscription::new(build_node(&self.settings));
        let mut delays = RetryDelays::new(self.settings.backoff);
        let mut errors = ErrorDedup::default();
        let server = self.settings.server_address();
        while !self.updates.is_closed() {
            let answered = self.status.snapshot().accepted_or_refused_count();
            let error = self.open_and_run_stream(&mut subscription).await;
            if self.status.snapshot().accepted_or_refused_count() != answered {
                delays.reset();
                errors.forget_errors();
            }
            if errors.should_log(&error) {
                tracing::warn!("xDS stream to {server}: {error}; rules stay as they are");
            }
            self.status.record_lost(error);
            sleep(delays.next_delay(random_fraction())).await;
        }
    }

    /// Opens a stream and follows it to its end; returns the reason.
    async fn open_and_run_stream(&mut self, subscription: &mut Subscription) -> String {
        let channel = match connect_to_control_plane(&self.settings, self.resolve).await {
            Ok(channel) => channel,
            Err(error) => return error,
        };
        let (requests, mut queued) = mpsc::channel(MAX_QUEUED_REQUESTS);
        let outgoing = stream::poll_fn(move |context| queued.poll_recv(context));
        let mut client =
            AggregatedDiscoveryServiceClient::new(channel).max_decoding_message_size(self.settings.max_message_bytes);
        if requests.try_send(subscription.begin_stream()).is_err() {
            return "the connection was lost".to_owned();
        }
        self.status.record_opened();
        let call = client.stream_aggregated_resources(self.add_configured_headers(outgoing));
        // Servers send the head of the response with the first message.
        let responses = match self.await_first_answer(call).await {
            Ok(response) => response.into_inner(),
            Err(error) => return describe_status(&error),
        };
        StreamExchange { requests, responses, subscription }.exchange_messages(self).await
    }

    /// Adds `CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS`.
    fn add_configured_headers<S>(&self, outgoing: S) -> Request<S> {
        let mut request = Request::new(outgoing);
        for header in &self.settings.headers {
            let name = MetadataKey::from_bytes(header.name.as_bytes());
            // Both were checked with the settings.
            if let (Ok(name), Ok(value)) = (name, MetadataValue::try_from(header.value.reveal())) {
                request.metadata_mut().append(name, value);
            }
        }
        request
    }

    /// Waits for the first answer, with a warning if it does not come.
    async fn await_first_answer<T>(&self, answer: impl Future<Output = T>) -> T {
        let mut answer = std::pin::pin!(answer);
        if let Ok(answer) = timeout(self.answer_timeout, &mut answer).await {
            return answer;
        }
        let seconds = self.answer_timeout.as_secs();
        let error = format!(
            "no answer for {seconds} s: the control plane has no rules for CONFIG_GRPC_XDS_NODE_ID={}, or is not ready",
            self.settings.node_id
        );
        tracing::warn!("xDS stream to {}: {error}", self.settings.server_address());
        self.status.record_silent(error);
        answer.await
    }

    /// Writes the resources in force to the cache.
    async fn write_to_cache(&self, version: &str, applied: AppliedUpdate) {
        let Some(cache) = self.cache.clone() else { return };
        let (version, path) = (version.to_owned(), cache.path().display().to_string());
        let write = spawn_blocking(move || {
            let AppliedUpdate { resources, refused } = applied;
            let resources = resources.iter().map(RuleResource::to_any).collect();
            let accepted_at = Clock::System.now();
            cache.write_resources(CachedResources { version, accepted_at, resources, refused })
        });
        if let Ok(Err(error)) = write.await {
            tracing::warn!("TOLLKEEPER_XDS_CACHE={path} cannot be written: {error}");
        }
    }

    /// Passes resources on and waits until they are applied or rejected.
    async fn apply_resources(&mut self, version: &str, resources: Vec<Any>) -> Option<UpdateResult> {
        let resources = resource::parse_resources(resources);
        self.updates.send(ReceivedResources { version: version.into(), resources }).await.ok()?;
        self.results.recv().await
    }
}

/// Messages of one stream.
struct StreamExchange<'s> {
    requests: mpsc::Sender<DiscoveryRequest>,
    responses: Streaming<DiscoveryResponse>,
    subscription: &'s mut Subscription,
}

impl StreamExchange<'_> {
    /// Exchanges messages until the stream ends; returns the reason.
    async fn exchange_messages(mut self, client: &mut XdsClient) -> String {
        let mut is_first = true;
        loop {
            let due = self.subscription.next_refusal_time();
            tokio::select! {
                message = next_response(&mut self.responses, client, is_first) => match message {
                    Ok(Some(response)) => {
                        is_first = false;
                        client.status.record_response();
                        if let Err(ended) = self.handle_response(response, client).await {
                            return ended;
                        }
                    }
                    Ok(None) => return "the server closed the stream".to_owned(),
                    Err(error) => return describe_status(&error),
                },
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    if let Some(refusal) = self.subscription.take_delayed_refusal() {
                        client.status.record_refused_again();
                        if let Err(ended) = self.send_request(refusal).await {
                            return ended;
                        }
                    }
                }
            }
        }
    }

    /// Handles a response; the error is the reason why the stream cannot go on.
    async fn handle_response(&mut self, response: DiscoveryResponse, client: &mut XdsClient) -> Result<(), String> {
        let version = response.version_info.clone();
        match self.subscription.handle_response(response, Instant::now()) {
            Reaction::RefuseLater | Reaction::Ignore => Ok(()),
            Reaction::Accept(accepted) => {
                client.status.record_accepted(&version);
                self.send_request(accepted).await
            }
            Reaction::Apply(resources) => {
                let Some(result) = client.apply_resources(&version, resources).await else {
                    return Err("the process is stopping".to_owned());
                };
                let result = record_result(client, &version, result).await;
                match self.subscription.conclude_apply(&result) {
                    Some(answer) => self.send_request(answer).await,
                    None => Ok(()),
                }
            }
        }
    }

    async fn send_request(&self, request: DiscoveryRequest) -> Result<(), String> {
        match timeout(SEND_TIMEOUT, self.requests.send(request)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err("the connection was lost".to_owned()),
            Err(_) => Err("the server does not read".to_owned()),
        }
    }
}

/// Records the result of a response; the error is the message that refuses the response.
async fn record_result(client: &XdsClient, version: &str, result: UpdateResult) -> Result<(), String> {
    match result {
        Ok(applied) if applied.refused.is_empty() => {
            client.status.record_accepted(version);
            client.write_to_cache(version, applied).await;
            Ok(())
        }
        Ok(applied) => {
            let names: Vec<_> =
                applied.refused.iter().map(|refused| format!("'{}'", escape_for_message(&refused.domain))).collect();
            let names = names.join(", ");
            tracing::warn!("xDS version '{version}' is refused for {names}: they keep their last rules, if any");
            let message = format_refusal(&applied.refused);
            client.status.record_refused_domains(version, applied.refused.clone());
            client.write_to_cache(version, applied).await;
            Err(message)
        }
        Err(error) => {
            tracing::warn!("xDS version '{version}' is refused; rules stay as they are");
            client.status.record_refused(version.to_owned(), error.clone());
            Err(error)
        }
    }
}

/// Waits for the next response, with a warning if the first one does not come. Cancel safe.
async fn next_response(
    responses: &mut Streaming<DiscoveryResponse>,
    client: &XdsClient,
    is_first: bool,
) -> Result<Option<DiscoveryResponse>, Status> {
    if is_first { client.await_first_answer(responses.message()).await } else { responses.message().await }
}

fn describe_status(status: &Status) -> String {
    let text = match status.code() {
        // tonic's own code of a lost connection, too.
        Code::Unknown => status.message().to_owned(),
        code => format!("{code}: {}", status.message()),
    };
    append_causes(text, std::error::Error::source(status))
}

/// Lower bound of a delay, so that no setting makes the client spin.
const MIN_DELAY: Duration = Duration::from_millis(100);

/// Delays between streams.
#[derive(Debug)]
pub struct RetryDelays {
    backoff: XdsBackoff,
    /// Delay before randomization.
    next: Duration,
}

impl RetryDelays {
    /// Delays by these settings.
    pub const fn new(backoff: XdsBackoff) -> Self {
        Self { backoff, next: backoff.initial }
    }

    /// Starts from the first delay again.
    pub const fn reset(&mut self) {
        self.next = self.backoff.initial;
    }

    /// Returns the next delay. `random` is in 0 to 1.
    pub fn next_delay(&mut self, random: f64) -> Duration {
        let XdsBackoff { initial, max, random_factor, jitter } = self.backoff;
        let max = max.max(MIN_DELAY);
        let delay = self.next.min(max);
        self.next = delay.max(initial).saturating_mul(2).min(max);
        let factor = if jitter { random_factor.mul_add(random.mul_add(2.0, -1.0), 1.0) } else { 1.0 };
        Duration::try_from_secs_f64(delay.as_secs_f64() * factor).unwrap_or(max).clamp(MIN_DELAY, max)
    }
}

//! Rules of a control plane, over xDS.
//!
//! One stream to the aggregated discovery service, State of the World, carries all rules. `client` keeps it open,
//! `subscription` is its protocol, `resource` decodes what it brings, `refused_domains` sorts out domains that cannot
//! be used, and `status` tells what happened.

pub mod status;
pub mod subscription;
pub mod resource;
pub mod refused_domains;
pub mod connect;
pub mod cache;
pub mod client;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::base::clock::{Clock, Time};
use crate::settings::problem::UnusableSetting;
use crate::settings::xds::XdsSettings;
use cache::{CachedResources, ResourceCache};
use client::{FIRST_RESPONSE_WARNING_DELAY, ReceivedResources, XdsClient};
use connect::{ResolveHost, resolve_host};
use refused_domains::{AcceptedResource, AcceptedResources, RefusedDomain, UpdateResult};
use resource::RuleResource;
use status::StreamStatus;

/// Configuration of a control plane as a source.
#[derive(Clone, Debug)]
pub struct XdsConfig {
    /// Settings of the stream.
    pub settings: XdsSettings,
    /// Time without a response on a new stream after which a warning is logged.
    pub answer_timeout: Duration,
    /// Resolver of the server's name.
    pub resolve: ResolveHost,
}

impl XdsConfig {
    /// Configuration with the default times and the system's resolver.
    pub const fn new(settings: XdsSettings) -> Self {
        Self { settings, answer_timeout: FIRST_RESPONSE_WARNING_DELAY, resolve: resolve_host }
    }
}

/// A control plane as a source of rules.
#[derive(Debug)]
pub struct XdsSource {
    updates: mpsc::Receiver<ReceivedResources>,
    results: mpsc::Sender<UpdateResult>,
    status: Arc<StreamStatus>,
    client: JoinHandle<()>,
    /// Resources in force.
    accepted: Arc<AcceptedResources>,
    /// Version that is being applied.
    applying: Option<Arc<str>>,
    /// Rules from the cache that are being applied.
    cached: Option<CachedVersion>,
}

/// Version of rules from the cache.
#[derive(Debug)]
struct CachedVersion {
    version: String,
    accepted_at: Time,
    /// Domains that had been refused.
    refused: Vec<RefusedDomain>,
}

impl XdsSource {
    /// Starts the client, and returns the resources in the cache. Requires a runtime; blocks on disk I/O.
    pub(super) fn start(config: XdsConfig) -> (Self, Option<ReceivedResources>) {
        let status = Arc::new(StreamStatus::new(&config.settings, Clock::System));
        // The client waits for the result of each update, so there is never more than one.
        let (update_sender, updates) = mpsc::channel(1);
        let (results, result_receiver) = mpsc::channel(1);
        let cache = ResourceCache::new(&config.settings);
        let (cached, first) = cache.as_ref().and_then(read_cache).unzip();
        let client = XdsClient {
            cache,
            settings: config.settings,
            answer_timeout: config.answer_timeout,
            resolve: config.resolve,
            status: Arc::clone(&status),
            updates: update_sender,
            results: result_receiver,
        };
        let client = tokio::spawn(client.keep_stream_open());
        let (accepted, applying) = (Arc::default(), first.as_ref().map(|first| Arc::clone(&first.version)));
        (Self { updates, results, status, client, accepted, applying, cached }, first)
    }

    /// Returns the next resources; `None` after the client has ended. Cancel safe.
    pub(super) async fn next_resources(&mut self) -> Option<ReceivedResources> {
        let received = self.updates.recv().await?;
        self.applying = Some(Arc::clone(&received.version));
        Some(received)
    }

    /// Resources in force.
    pub(super) const fn accepted_resources(&self) -> &Arc<AcceptedResources> {
        &self.accepted
    }

    /// Passes the result of the last resources to the client, unless they are from the cache.
    pub(super) fn report_result(&mut self, result: &UpdateResult) {
        let cached = self.cached.take();
        if let (Ok(applied), Some(version)) = (result, self.applying.take()) {
            let refused_before = cached.iter().flat_map(|cached| &cached.refused);
            let old: HashMap<_, _> =
                refused_before.chain(&applied.refused).map(|old| (old.domain.as_str(), old)).collect();
            let accept = |resource: &RuleResource| {
                let kept = old.get(resource.domain.as_str()).and_then(|old| old.kept_version.clone());
                let version = kept.unwrap_or_else(|| Arc::clone(&version));
                (resource.domain.clone(), AcceptedResource { resource: resource.clone(), version })
            };
            self.accepted = Arc::new(applied.resources.iter().map(accept).collect());
        }
        if let Some(CachedVersion { version, accepted_at, mut refused }) = cached {
            match result {
                Ok(applied) => {
                    refused.retain(|old| applied.refused.iter().all(|new| new.domain != old.domain));
                    refused.extend(applied.refused.iter().cloned());
                    self.status.record_loaded_from_cache(version, accepted_at, refused);
                }
                Err(_) => tracing::warn!("TOLLKEEPER_XDS_CACHE is ignored: its rules cannot be used"),
            }
            return;
        }
        // Fails only if the client has ended.
        let _ = self.results.try_send(result.clone());
    }

    /// State of the stream.
    pub(super) const fn status(&self) -> &Arc<StreamStatus> {
        &self.status
    }
}

impl Drop for XdsSource {
    fn drop(&mut self) {
        self.client.abort();
    }
}

/// Reads the cache; an unusable one is reported and ignored.
fn read_cache(cache: &ResourceCache) -> Option<(CachedVersion, ReceivedResources)> {
    let path = cache.path().display();
    match cache.read_resources() {
        Ok(Some(CachedResources { version, accepted_at, resources, refused })) => {
            tracing::warn!(
                "starting with the rules in TOLLKEEPER_XDS_CACHE={path}, version '{version}' of {accepted_at}"
            );
            let resources = resource::parse_resources(resources);
            let received = ReceivedResources { version: version.as_str().into(), resources };
            Some((CachedVersion { version, accepted_at, refused }, received))
        }
        Ok(None) => None,
        Err(error) => {
            tracing::warn!("TOLLKEEPER_XDS_CACHE={path} is ignored: {error}");
            None
        }
    }
}

/// Returns the first problem of the files in the TLS settings, if one cannot be used. Blocks on disk I/O.
pub fn find_unusable_tls_file(settings: &XdsSettings) -> Option<UnusableSetting> {
    settings.tls.as_ref().and_then(|tls| connect::build_tls_config(tls).err())
}

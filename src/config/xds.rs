//! Rules of a control plane, over xDS.
//!
//! One stream to the aggregated discovery service, State of the World, carries all rules. `client` keeps it open,
//! `subscription` is its protocol, `resource` converts what it brings, and `status` tells what happened.

pub mod status;
pub mod subscription;
pub mod resource;
pub mod retry;
pub mod connect;
pub mod client;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::clock::Clock;
use crate::settings::problem::UnusableSetting;
use crate::settings::xds::XdsSettings;
use client::{ANSWER_TIMEOUT, ReceivedResources, XdsClient};
use status::StreamStatus;

/// Configuration of a control plane as a source.
#[derive(Clone, Debug)]
pub struct XdsConfig {
    /// Settings of the stream.
    pub settings: XdsSettings,
    /// Time without a response on a new stream after which a warning is logged.
    pub answer_timeout: Duration,
}

impl XdsConfig {
    /// Configuration with the default times.
    pub const fn new(settings: XdsSettings) -> Self {
        Self { settings, answer_timeout: ANSWER_TIMEOUT }
    }
}

/// A control plane as a source of rules.
#[derive(Debug)]
pub struct XdsSource {
    updates: mpsc::Receiver<ReceivedResources>,
    results: mpsc::Sender<Result<(), String>>,
    status: Arc<StreamStatus>,
    client: JoinHandle<()>,
}

impl XdsSource {
    /// Starts the client. Requires a runtime.
    pub(super) fn start(config: XdsConfig) -> Self {
        let status = Arc::new(StreamStatus::new(&config.settings, Clock::System));
        // The client waits for the result of each update, so there is never more than one.
        let (update_sender, updates) = mpsc::channel(1);
        let (results, result_receiver) = mpsc::channel(1);
        let client = XdsClient {
            settings: config.settings,
            answer_timeout: config.answer_timeout,
            status: Arc::clone(&status),
            updates: update_sender,
            results: result_receiver,
        };
        Self { updates, results, status, client: tokio::spawn(client.run()) }
    }

    /// Returns the next resources; `None` after the client has ended. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<ReceivedResources> {
        self.updates.recv().await
    }

    /// Passes the result of the last resources to the client.
    pub(super) fn acknowledge(&self, result: &Result<(), String>) {
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

/// Finds a file of the TLS settings that cannot be used.
pub fn unusable_file(settings: &XdsSettings) -> Option<UnusableSetting> {
    settings.tls.as_ref().and_then(|tls| connect::client_config(tls).err())
}

//! Webhook of levels that keys reach: POST of the record that the decision log has, signed as Standard Webhooks says
//! (<https://github.com/standard-webhooks/standard-webhooks>): `v1,` and the HMAC-SHA256 of id, time and body, in base64.
//!
//! A thread of its own sends one request after another. The receiver recognizes a repeated one by `webhook-id`, which
//! is the same for a key, a level and a period.
//!
//! Decides: what a webhook gets, how often a request is repeated, and how many wait.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ring::hmac;
use ureq::Agent;

use crate::base::clock::Clock;
use crate::base::threads;
use crate::settings::credentials::SecretSource;
use crate::settings::problem::UnusableSetting;
use crate::settings::secret::Secret;
use crate::settings::webhook::WebhookSettings;
use crate::store::client::tokens::token_fetch::build_http_agent;
use crate::telemetry::log_throttle::LogThrottle;

/// Maximum number of requests that wait; more are dropped, and counted.
const MAX_WAITING: usize = 1_000;
/// Pauses before a request is sent again, after an answer of 429 or 5xx, or none.
const RETRY_DELAYS: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(3), Duration::from_secs(9), Duration::from_secs(27)];
/// Interval of the warning that the webhook fails.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Requests since the start.
pub static WEBHOOK_COUNTS: WebhookCounts = WebhookCounts {
    is_used: AtomicBool::new(false),
    sent: AtomicU64::new(0),
    failed: AtomicU64::new(0),
    dropped: AtomicU64::new(0),
};

/// Number of requests, by what became of them.
#[derive(Debug)]
pub struct WebhookCounts {
    is_used: AtomicBool,
    sent: AtomicU64,
    failed: AtomicU64,
    dropped: AtomicU64,
}

impl WebhookCounts {
    /// Number of each outcome, by its name in metrics; `None` without a webhook.
    pub fn counts_by_outcome(&self) -> Option<[(&'static str, u64); 3]> {
        let counts = [("sent", &self.sent), ("failed", &self.failed), ("dropped", &self.dropped)];
        let is_used = self.is_used.load(Ordering::Relaxed);
        is_used.then(|| counts.map(|(outcome, count)| (outcome, count.load(Ordering::Relaxed))))
    }
}

/// A request that waits.
#[derive(Debug)]
struct WebhookRequest {
    id: String,
    body: Vec<u8>,
}

/// Webhook whose thread has not started.
#[derive(Debug)]
pub struct WebhookTarget {
    url: Secret,
    key: Option<hmac::Key>,
}

/// Webhook that runs.
#[derive(Debug)]
pub struct LevelWebhook {
    sender: SyncSender<WebhookRequest>,
}

impl WebhookTarget {
    /// Reads the secret.
    ///
    /// # Errors
    /// Its file cannot be used.
    pub fn load(settings: &WebhookSettings) -> Result<Self, UnusableSetting> {
        let secret = settings.secret.as_ref().map(SecretSource::load_secret).transpose()?;
        let key = secret.map(|secret| {
            let text = secret.reveal();
            let decoded = text.strip_prefix("whsec_").and_then(|key| BASE64_STANDARD.decode(key).ok());
            hmac::Key::new(hmac::HMAC_SHA256, decoded.as_deref().unwrap_or(text.as_bytes()))
        });
        Ok(Self { url: settings.url.clone(), key })
    }

    /// Starts the thread that sends.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(self) -> io::Result<LevelWebhook> {
        let (sender, requests) = sync_channel(MAX_WAITING);
        WEBHOOK_COUNTS.is_used.store(true, Ordering::Relaxed);
        thread::Builder::new().name("webhook".to_owned()).spawn(move || {
            threads::lower_thread_priority();
            self.send_all(&requests);
        })?;
        Ok(LevelWebhook { sender })
    }

    fn send_all(&self, requests: &Receiver<WebhookRequest>) {
        static FAILURE_LOG: LogThrottle = LogThrottle::every(LOG_INTERVAL);
        let agent = build_http_agent(self.url.reveal().starts_with("https://"));
        for request in requests {
            let mut delays = RETRY_DELAYS.iter();
            let outcome = loop {
                match self.send(&agent, &request) {
                    Err(SendError { what, may_repeat: true }) => match delays.next() {
                        Some(pause) => thread::sleep(*pause),
                        None => break Err(what),
                    },
                    other => break other.map_err(|error| error.what),
                }
            };
            let Err(what) = outcome else {
                WEBHOOK_COUNTS.sent.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            WEBHOOK_COUNTS.failed.fetch_add(1, Ordering::Relaxed);
            if let Some(suppressed) = FAILURE_LOG.allow(Clock::System.now()) {
                tracing::warn!(suppressed, "a level was not sent to TOLLKEEPER_NOTIFY_WEBHOOK: {what}");
            }
        }
    }

    fn send(&self, agent: &Agent, request: &WebhookRequest) -> Result<(), SendError> {
        let time_s = (Clock::System.now().as_micros() / 1_000_000).to_string();
        let mut post = agent.post(self.url.reveal()).header("content-type", "application/json");
        post = post.header("webhook-id", &request.id).header("webhook-timestamp", &time_s);
        if let Some(key) = &self.key {
            let mut context = hmac::Context::with_key(key);
            for part in [request.id.as_bytes(), b".", time_s.as_bytes(), b".", &request.body] {
                context.update(part);
            }
            let signature = format!("v1,{}", BASE64_STANDARD.encode(context.sign()));
            post = post.header("webhook-signature", signature);
        }
        // The error may hold the URL, which may be secret: only its kind is told.
        let no_answer = |error: ureq::Error| SendError {
            what: match error {
                ureq::Error::Timeout(_) => "no answer in time".to_owned(),
                ureq::Error::Io(error) => format!("it cannot be reached: {}", error.kind()),
                _ => "it cannot be reached".to_owned(),
            },
            may_repeat: true,
        };
        let status = post.send(&request.body[..]).map_err(no_answer)?.status();
        if status.is_success() {
            return Ok(());
        }
        let may_repeat = status.is_server_error() || status.as_u16() == 429;
        Err(SendError { what: format!("it answers {}", status.as_u16()), may_repeat })
    }
}

/// Why a request was not taken.
struct SendError {
    what: String,
    may_repeat: bool,
}

impl LevelWebhook {
    /// Sends a body, later; never waits.
    pub fn send(&self, id: &str, body: &[u8]) {
        let request = WebhookRequest { id: id.to_owned(), body: body.trim_ascii_end().to_vec() };
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = self.sender.try_send(request) {
            WEBHOOK_COUNTS.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

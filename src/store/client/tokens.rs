//! Tokens of cloud identities: passwords of minutes or hours, renewed before they expire.
//!
//! A `TokenSource` has one task for each identity and setting that asks for it, however many nodes log in with it. A
//! token that cannot be renewed stays, because the server may still accept it; the reason is logged and counted, and
//! the next attempt comes after a delay that doubles. Connections wait for the first token only within the time limit
//! of a connection attempt. Nothing here prints a token or a key.
//!
//! Decides: when a token of a cloud identity is renewed.

pub mod token_fetch;
pub mod aws;
pub mod google;
mod azure;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use self::aws::AwsTokenSigner;
use self::token_fetch::{CredentialRenewalFailure, FetchOutcome, Token, TokenError};
use crate::base::clock::Clock;
use crate::base::random::random_fraction;
use crate::base::sharded::lock_ignoring_poison;
use crate::base::threads::lower_thread_priority;
use crate::settings::cloud_identity::{CloudIdentity, TokenSourceSettings};
use crate::telemetry::log_throttle::LogThrottle;

/// Shortest time until the next attempt after a failure, and until a renewal.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Longest time until the next attempt after a failure.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
/// Longest time for which a token is kept although it is valid for longer.
const MAX_RENEW_INTERVAL: Duration = Duration::from_secs(6 * 3600);
/// Time between two log lines about failures of one source.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Statistics of a source of tokens.
#[derive(Clone, Copy, Debug)]
pub struct TokenStats {
    /// Variable that asks for the identity.
    pub setting: &'static str,
    /// Number of new tokens.
    pub renewals: u64,
    /// Number of failed attempts.
    pub failures: u64,
    /// Expiry of the last token in seconds since the Unix epoch; 0 without one.
    pub expires_at_s: u64,
}

/// Handle to the tokens of an identity; dropping the last one ends the renewals.
pub(crate) struct TokenSource {
    state: Arc<TokenState>,
    task: OnceLock<AbortHandle>,
}

/// State that the task of renewals and connections share.
struct TokenState {
    identity: CloudIdentity,
    current: ArcSwapOption<Token>,
    last_error: ArcSwapOption<TokenError>,
    renewals: AtomicU64,
    failures: AtomicU64,
    /// True once there is a token.
    ready: watch::Sender<bool>,
    log: LogThrottle,
}

/// Sources in use.
static SOURCES: Mutex<Vec<Weak<TokenSource>>> = Mutex::new(Vec::new());

/// Returns the statistics of all sources in use.
pub fn token_stats() -> Vec<TokenStats> {
    let sources = SOURCES.lock().unwrap_or_else(PoisonError::into_inner);
    sources.iter().filter_map(Weak::upgrade).map(|source| source.stats()).collect()
}

impl TokenSource {
    /// Returns the source for an identity: one that is in use, or a new one.
    pub(crate) fn for_identity(identity: &CloudIdentity) -> Arc<Self> {
        let mut sources = SOURCES.lock().unwrap_or_else(PoisonError::into_inner);
        sources.retain(|source| source.strong_count() > 0);
        let known = sources.iter().filter_map(Weak::upgrade).find(|source| source.state.identity == *identity);
        known.unwrap_or_else(|| {
            let source = Arc::new(Self { state: Arc::new(TokenState::new(identity.clone())), task: OnceLock::new() });
            sources.push(Arc::downgrade(&source));
            source
        })
    }

    /// Variable that asks for the identity.
    pub(crate) fn setting(&self) -> &'static str {
        self.state.identity.setting
    }

    /// Returns the last token; `None` before the first. Does not wait.
    pub(crate) fn last_token(&self) -> Option<Arc<Token>> {
        self.state.current.load_full()
    }

    /// Returns the text of the last failure since the last new token, free of secrets.
    pub(crate) fn last_error(&self) -> Option<String> {
        self.state.last_error.load_full().map(|error| error.to_string())
    }

    /// Returns the last token; waits for the first until `limit`. Needs a tokio runtime, and starts the renewals.
    pub(crate) async fn wait_for_token(&self, limit: Duration) -> Option<Arc<Token>> {
        self.task.get_or_init(|| tokio::spawn(keep_token_renewed(Arc::clone(&self.state))).abort_handle());
        let mut ready = self.state.ready.subscribe();
        let _late = timeout(limit, ready.wait_for(|is_ready| *is_ready)).await;
        self.last_token()
    }

    fn stats(&self) -> TokenStats {
        TokenStats {
            setting: self.setting(),
            renewals: self.state.renewals.load(Ordering::Relaxed),
            failures: self.state.failures.load(Ordering::Relaxed),
            expires_at_s: self.last_token().map_or(0, |token| token.expires_at_s),
        }
    }
}

impl fmt::Debug for TokenSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenSource").field("setting", &self.setting()).finish_non_exhaustive()
    }
}

impl Drop for TokenSource {
    fn drop(&mut self) {
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }
}

impl TokenState {
    fn new(identity: CloudIdentity) -> Self {
        Self {
            identity,
            current: ArcSwapOption::empty(),
            last_error: ArcSwapOption::empty(),
            renewals: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            ready: watch::Sender::new(false),
            log: LogThrottle::every(LOG_INTERVAL),
        }
    }

    /// Puts a token into use, unless it is the last one again.
    fn record_token(&self, token: Token) {
        if self.current.load().as_ref().is_some_and(|old| old.password == token.password) {
            return;
        }
        tracing::debug!(setting = self.identity.setting, expires_at_s = token.expires_at_s, "token for redis renewed");
        self.current.store(Some(Arc::new(token)));
        self.renewals.fetch_add(1, Ordering::Relaxed);
        self.ready.send_replace(true);
    }

    fn record_failure(&self, error: TokenError) {
        let expires_at_s = self.current.load().as_ref().map(|token| token.expires_at_s);
        let what = match expires_at_s {
            Some(_) => "cannot renew the token for redis: the last one stays",
            None => "cannot get a token for redis",
        };
        self.count_and_log_failure(error, expires_at_s.unwrap_or(0), what);
    }

    fn record_credential_renewal_failure(
        &self,
        CredentialRenewalFailure { error, expires_at_s }: CredentialRenewalFailure,
    ) {
        self.count_and_log_failure(
            error,
            expires_at_s,
            "credentials of AWS not renewed: the old ones sign tokens until they end",
        );
    }

    /// Counts a failure, after which something is valid until `expires_at_s`, and logs it with the text `what`.
    fn count_and_log_failure(&self, error: TokenError, expires_at_s: u64, what: &str) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        if let Some(suppressed) = self.log.allow(Clock::System.now()) {
            let (setting, valid_s) = (self.identity.setting, expires_at_s.saturating_sub(now_s()));
            tracing::error!(setting, suppressed, valid_s, %error, "{what}");
        }
        self.last_error.store(Some(Arc::new(error)));
    }
}

/// Renews the token after two thirds of its lifetime, and after failures with a delay that doubles.
async fn keep_token_renewed(state: Arc<TokenState>) {
    let fetcher = Arc::new(Mutex::new(TokenFetcher::new(&state.identity)));
    let mut failures_in_a_row = 0_u32;
    loop {
        let renewed_for = match fetch_on_own_thread(Arc::clone(&fetcher)).await {
            Ok(FetchOutcome { token, problem }) => {
                let expires_at_s = token.as_ref().map_or(0, |token| token.expires_at_s);
                if let Some(token) = token {
                    state.record_token(token);
                }
                match problem {
                    Some(problem) => {
                        state.record_credential_renewal_failure(problem);
                        None
                    }
                    None => Some(Duration::from_secs(expires_at_s.saturating_sub(now_s()))),
                }
            }
            Err(error) => {
                state.record_failure(error);
                None
            }
        };
        let pause = match renewed_for {
            Some(lifetime) => {
                failures_in_a_row = 0;
                state.last_error.store(None);
                pause_until_renewal(lifetime)
            }
            None => {
                failures_in_a_row = failures_in_a_row.saturating_add(1);
                retry_delay(failures_in_a_row)
            }
        };
        sleep(pause).await;
    }
}

/// Returns two thirds of a lifetime, within bounds.
pub fn pause_until_renewal(lifetime: Duration) -> Duration {
    (lifetime.min(2 * MAX_RENEW_INTERVAL) * 2 / 3).clamp(MIN_RETRY_DELAY, MAX_RENEW_INTERVAL)
}

/// Returns the delay after a number of failures in a row, of which up to a quarter is random.
fn retry_delay(failures: u32) -> Duration {
    let doubled = MIN_RETRY_DELAY * 2_u32.pow(failures.saturating_sub(1).min(6));
    doubled.min(MAX_RETRY_DELAY).mul_f64(1.0 - random_fraction() / 4.0)
}

/// Gets a token on a thread of its own: a call in progress delays neither other tasks nor the end of the process.
async fn fetch_on_own_thread(fetcher: Arc<Mutex<TokenFetcher>>) -> Result<FetchOutcome, TokenError> {
    let (sender, receiver) = oneshot::channel();
    let work = move || {
        lower_thread_priority();
        let outcome = lock_ignoring_poison(&fetcher).fetch().and_then(|fetched| fetched.check(now_s()));
        let _gone = sender.send(outcome);
    };
    let started = std::thread::Builder::new().name("tokens".to_owned()).spawn(work);
    started.map_err(|error| TokenError(format!("cannot start a thread: {error}")))?;
    receiver.await.map_err(|_| TokenError("the thread ended without a result".to_owned()))?
}

/// Gets tokens of one identity; blocks its thread.
enum TokenFetcher {
    Aws(AwsTokenSigner),
    Others(CloudIdentity),
}

impl TokenFetcher {
    fn new(identity: &CloudIdentity) -> Self {
        match &identity.source {
            TokenSourceSettings::Aws(settings) => Self::Aws(AwsTokenSigner::new(settings.clone())),
            TokenSourceSettings::Google { .. } | TokenSourceSettings::Azure(_) => Self::Others(identity.clone()),
        }
    }

    fn fetch(&mut self) -> Result<FetchOutcome, TokenError> {
        let identity = match self {
            Self::Aws(tokens) => return tokens.fetch(now_s()),
            Self::Others(identity) => identity,
        };
        let token = match &identity.source {
            TokenSourceSettings::Google { metadata_host } => google::fetch_token(metadata_host, now_s())?,
            TokenSourceSettings::Azure(settings) => azure::fetch_token(settings, now_s())?,
            TokenSourceSettings::Aws(_) => return Err(TokenError("not a source of access tokens".to_owned())),
        };
        Ok(FetchOutcome { token: Some(token), problem: None })
    }
}

/// Returns the time in seconds since the Unix epoch.
fn now_s() -> u64 {
    Clock::System.now().as_micros() / 1_000_000
}

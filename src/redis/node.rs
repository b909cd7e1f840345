//! One server that takes writes: its connections, kept up, and its breaker.
//!
//! Each connection has a keeper that dials until there is one, proves it by a write as the rules write, and dials anew
//! when it ends. Once the breaker opens, a prober tries the server ten times a second, over the connections it has and
//! over new ones: after a partition an old connection waits for the system's retransmission, which may take longer than
//! the partition did. Nobody who charges waits for any of this.
//!
//! A call is sent once. What is sent elsewhere or asks for its script is the caller's affair.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use super::circuit_breaker::CircuitBreaker;
use super::connect::{self, ConnectError, Connected};
use super::connection::{Closed, Connection, in_words};
use super::deadline::timeout_with_grace;
use super::deployment_context::DeploymentContext;
use super::error::{RedisError, ReplyError};
use super::error_dedup::ErrorDedup;
use super::health_check::{self, OptionalCommands};
use super::reply::Reply;
use super::send::send;
use crate::clock::Clock;
use crate::settings::redis::Endpoint;
use crate::telemetry::log_throttle::LogThrottle;

/// Between two dials of a server that can not be reached, and two probes of one that fails.
const RETRY: Duration = Duration::from_millis(100);
/// The longest that a probe's late answer is waited for before the next one is sent.
const LATE: Duration = Duration::from_secs(1);
/// How often it is said that the breaker opened, and that it closed.
const BREAKS_SAID: Duration = Duration::from_secs(1);
/// How often it is said that scripts are refused, and how long the last refusal counts.
const REFUSALS_SAID: Duration = Duration::from_secs(60);
/// A connection that ends sooner is not made anew at once.
const SHORT_LIVED: Duration = Duration::from_millis(20);
/// How long a breaker is open before new connections are tried besides the old ones.
const SUSPICION: Duration = Duration::from_millis(200);
/// Between two dials of a connection that is to replace one that still serves.
const RENEW_AGAIN: Duration = Duration::from_secs(1);
/// The ends of connections are said no more often.
const ENDS_SAID: Duration = Duration::from_secs(1);
/// How often the files of credentials and certificates are compared.
const FILES_CHECKED: Duration = Duration::from_secs(1);

/// A server; dropping it closes its connections once what is in flight is done.
#[derive(Debug)]
pub(crate) struct Node {
    state: Arc<State>,
    tasks: Vec<AbortHandle>,
}

#[derive(Debug)]
struct State {
    endpoint: Endpoint,
    context: Arc<DeploymentContext>,
    breaker: CircuitBreaker,
    connections: Box<[ArcSwapOption<Connection>]>,
    next_connection: AtomicUsize,
    /// The first dial has come to an end, one way or the other.
    first_dial_done: AtomicBool,
    /// Rung when a connection is there.
    connected: Notify,
    /// Rung when the breaker opens.
    opened: Notify,
    /// Rung when connections are to be replaced by new ones.
    reconnect: Notify,
    /// A slot that this node owns, for the probe's key.
    slot: AtomicU16,
    misconfigured: ArcSwapOption<String>,
    /// Where only some rules need scripts, and the last one was refused: what to do about that.
    scripts_refused: ArcSwapOption<(String, Instant)>,
    refusals: LogThrottle,
    openings: LogThrottle,
    closings: LogThrottle,
    complaint: Mutex<ErrorDedup>,
    ended: LogThrottle,
}

impl Node {
    /// Begins to connect to `endpoint`.
    pub(crate) fn start(endpoint: Endpoint, context: Arc<DeploymentContext>) -> Arc<Self> {
        let connections = (0..context.connections).map(|_| ArcSwapOption::empty()).collect();
        let state = Arc::new(State {
            endpoint,
            context,
            breaker: CircuitBreaker::default(),
            connections,
            next_connection: AtomicUsize::new(0),
            first_dial_done: AtomicBool::new(false),
            connected: Notify::new(),
            opened: Notify::new(),
            reconnect: Notify::new(),
            slot: AtomicU16::new(0),
            misconfigured: ArcSwapOption::empty(),
            scripts_refused: ArcSwapOption::empty(),
            refusals: LogThrottle::every(REFUSALS_SAID),
            openings: LogThrottle::every(BREAKS_SAID),
            closings: LogThrottle::every(BREAKS_SAID),
            complaint: Mutex::default(),
            ended: LogThrottle::every(ENDS_SAID),
        });
        let keepers =
            (0..state.connections.len()).map(|place| tokio::spawn(maintain(Arc::clone(&state), place)).abort_handle());
        let mut tasks: Vec<AbortHandle> = keepers.collect();
        tasks.push(tokio::spawn(recover(Arc::clone(&state))).abort_handle());
        tasks.push(tokio::spawn(watch_files(Arc::clone(&state))).abort_handle());
        Arc::new(Self { state, tasks })
    }

    /// Where it is.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.state.endpoint
    }

    /// A slot of a cluster that this node owns.
    pub(crate) fn set_slot(&self, slot: u16) {
        self.state.slot.store(slot, Ordering::Relaxed);
    }

    /// Whether charges are sent to it now.
    pub(crate) fn is_available(&self) -> bool {
        !self.state.breaker.is_open() && self.state.connection().is_some()
    }

    /// Whether nothing is sent to it, because it failed too often in a row.
    pub(crate) fn is_breaker_open(&self) -> bool {
        self.state.breaker.is_open()
    }

    /// How many connections to it are in use.
    pub(crate) fn connections(&self) -> usize {
        self.state.connections.iter().filter(|connection| connection.load().is_some()).count()
    }

    /// What somebody has to mend, if anything.
    pub(crate) fn misconfigured(&self) -> Option<Arc<String>> {
        let state = &*self.state;
        let refused = || {
            let refused = state.scripts_refused.load_full();
            // The rule that was refused may be gone.
            refused.filter(|refused| refused.1.elapsed() < REFUSALS_SAID).map(|refused| Arc::new(refused.0.clone()))
        };
        state.misconfigured.load_full().or_else(refused)
    }

    /// Sends one command and waits for its reply, not longer than `until`; `asking` sends ASKING before it.
    pub(crate) async fn call(&self, words: &[&[u8]], asking: bool, until: Instant) -> Result<Reply, ReplyError> {
        let connection = self.connection(until).await?;
        let outcome = send(&connection, words, asking, until).await;
        let optional = &self.state.context.optional_commands;
        self.note(&outcome, optional.as_ref().is_some_and(|optional| words[0].starts_with(optional.prefix)));
        outcome
    }

    /// As [`Node::call`], for what no charge needs: how it ends says nothing about the server.
    pub(crate) async fn call_aside(&self, words: &[&[u8]], asking: bool, until: Instant) -> Result<Reply, ReplyError> {
        let unreachable = ReplyError::Failed(RedisError::Unreachable);
        if self.state.breaker.is_open() {
            return Err(unreachable);
        }
        let connection = timeout_with_grace(self.state.first_line(), until).await.flatten().ok_or(unreachable)?;
        send(&connection, words, asking, until).await
    }

    /// Sends two commands, the one behind the other, and waits for both replies.
    pub(crate) async fn call_two(
        &self,
        first: &[&[u8]],
        second: &[&[u8]],
        asking: bool,
        until: Instant,
    ) -> (Result<Reply, ReplyError>, Result<Reply, ReplyError>) {
        let connection = match self.connection(until).await {
            Ok(connection) => connection,
            Err(refused) => return (Err(refused.clone()), Err(refused)),
        };
        let outcomes =
            tokio::join!(biased; send(&connection, first, asking, until), send(&connection, second, asking, until));
        // Sent as one, they fail as one.
        self.note(if outcomes.0.is_ok() { &outcomes.1 } else { &outcomes.0 }, false);
        outcomes
    }

    /// A connection, if charges are sent to this server.
    async fn connection(&self, until: Instant) -> Result<Arc<Connection>, ReplyError> {
        let unreachable = ReplyError::Failed(RedisError::Unreachable);
        if self.state.breaker.is_open() {
            return Err(unreachable);
        }
        if let Some(connection) = self.state.connection() {
            return Ok(connection);
        }
        match timeout_with_grace(self.state.first_line(), until).await {
            Some(connection) => connection.ok_or(unreachable),
            None => Err(self.timed_out()),
        }
    }

    /// Takes note of an answer that has not come in time.
    pub(crate) fn timed_out(&self) -> ReplyError {
        self.state.failed(RedisError::Timeout);
        ReplyError::Failed(RedisError::Timeout)
    }

    fn note(&self, outcome: &Result<Reply, ReplyError>, beside: bool) {
        // Where counters need no scripts, a server that forbids them still serves most rules.
        match outcome {
            Err(ReplyError::Failed(RedisError::Misconfigured)) if beside => self.state.scripts_are_refused(),
            Ok(_) => {
                // A load first: there is nothing to clear as a rule.
                if beside && self.state.scripts_refused.load().is_some() {
                    self.state.scripts_refused.store(None);
                } else if !beside && self.state.misconfigured.load().is_some() {
                    self.state.misconfigured.store(None);
                }
                self.state.succeeded();
            }
            Err(ReplyError::NoScript | ReplyError::Moved(_) | ReplyError::Ask(_)) => self.state.succeeded(),
            Err(ReplyError::Failed(error)) => self.state.failed(*error),
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        self.state.connections.iter().for_each(|connection| connection.store(None));
    }
}

impl State {
    /// A connection, in turns.
    fn connection(&self) -> Option<Arc<Connection>> {
        if let [connection] = &*self.connections {
            return connection.load_full();
        }
        let next_connection = self.next_connection.fetch_add(1, Ordering::Relaxed);
        (0..self.connections.len())
            .find_map(|step| self.connections[(next_connection + step) % self.connections.len()].load_full())
    }

    /// The first connection, if it is still being dialled: whoever waits bounds it.
    async fn first_line(&self) -> Option<Arc<Connection>> {
        while !self.first_dial_done.load(Ordering::Acquire) {
            let connected = self.connected.notified();
            if !self.first_dial_done.load(Ordering::Acquire) {
                connected.await;
            }
        }
        self.connection()
    }

    /// Slot of the keys of a health check; `None` outside a cluster.
    fn probed_slot(&self) -> Option<u16> {
        self.context.is_cluster.then(|| self.slot.load(Ordering::Relaxed))
    }

    fn succeeded(&self) {
        if self.breaker.record_success()
            && let Some(suppressed) = self.closings.allow(Clock::System.now())
        {
            tracing::warn!(server = %self.endpoint, suppressed, "redis serves again");
        }
    }

    fn failed(&self, error: RedisError) {
        if error.is_misconfiguration() {
            self.note(&ConnectError { kind: error, text: error.to_string() });
        }
        if error.is_of_server() && self.breaker.record_failure() {
            if let Some(suppressed) = self.openings.allow(Clock::System.now()) {
                let server = &self.endpoint;
                tracing::error!(%server, %error, suppressed, "redis fails: `on_store_error` decides until it is back");
            }
            self.opened.notify_one();
            self.context.refresh_topology.notify_one();
        }
    }

    /// Rules that need scripts can not be counted here; others can.
    fn scripts_are_refused(&self) {
        let is_known = self.scripts_refused.load().as_ref().is_some_and(|refused| refused.1.elapsed() < RETRY);
        if !is_known {
            let Some(OptionalCommands { consequence, advice, .. }) = &self.context.optional_commands else { return };
            if let Some(suppressed) = self.refusals.allow(Clock::System.now()) {
                let server = &self.endpoint;
                tracing::error!(%server, suppressed, "{consequence}: {advice}");
            }
            self.scripts_refused.store(Some(Arc::new((format!("{}: {advice}", self.endpoint), Instant::now()))));
        }
    }

    /// Puts a proved connection in use.
    fn publish(&self, place: usize, connection: Connected) -> Closed {
        self.connections[place].store(Some(Arc::new(connection.connection)));
        self.context.opened.fetch_add(1, Ordering::Relaxed);
        self.misconfigured.store(None);
        self.first_dial_done.store(true, Ordering::Release);
        self.connected.notify_waiters();
        self.succeeded();
        connection.end
    }

    /// Dials, and writes as the rules do.
    async fn dial(&self) -> Result<Connected, ConnectError> {
        let context = &*self.context;
        let connection = connect::dial(&self.endpoint, &context.connect).await?;
        self.health_check(&connection.connection).await?;
        Ok(connection)
    }

    /// As [`State::health_check`], but an answer that is late is waited for, up to [`LATE`]: probes must not pile up before a
    /// server that is frozen.
    async fn health_check_patiently(&self, connection: &Connection) -> Result<(), ConnectError> {
        let mut proof = pin!(health_check::run(&*self.context.health_check, connection, self.probed_slot()));
        let late = ConnectError { kind: RedisError::Timeout, text: "a probe got no answer in time".to_owned() };
        match timeout(self.context.call_timeout, &mut proof).await {
            Ok(outcome) => outcome,
            Err(_) => {
                self.note(&late);
                self.complain(&late);
                self.context.refresh_topology.notify_one();
                // While it is awaited, new connections are tried besides.
                let reconnect = async {
                    sleep(SUSPICION).await;
                    self.reconnect.notify_one();
                };
                let _late = timeout(LATE, async { tokio::join!(&mut proof, reconnect) }).await;
                Err(late)
            }
        }
    }

    async fn health_check(&self, connection: &Connection) -> Result<(), ConnectError> {
        match timeout(
            self.context.call_timeout,
            health_check::run(&*self.context.health_check, connection, self.probed_slot()),
        )
        .await
        {
            Ok(outcome) => outcome,
            Err(_) => Err(ConnectError { kind: RedisError::Timeout, text: "a probe got no answer in time".to_owned() }),
        }
    }

    /// Says what is wrong.
    fn complain(&self, error: &ConnectError) {
        if self.complaint.lock().unwrap_or_else(PoisonError::into_inner).should_log(&error.text) {
            let setting = self.context.connect.setting;
            tracing::error!(setting, server = %self.endpoint, "cannot count in redis: {error}");
        }
    }

    /// Says that nothing is wrong any more.
    fn reached(&self) {
        if self.complaint.lock().unwrap_or_else(PoisonError::into_inner).end() {
            tracing::warn!(server = %self.endpoint, "redis can be reached again");
        } else {
            tracing::info!(server = %self.endpoint, "connected to redis");
        }
    }

    /// Takes note of what is wrong, so that health can tell. A server that is slow may be set up wrongly all the same.
    fn note(&self, error: &ConnectError) {
        if error.kind == RedisError::Timeout {
            return;
        }
        let text = error.kind.is_misconfiguration().then(|| Arc::new(format!("{}: {error}", self.endpoint)));
        self.misconfigured.store(text);
    }
}

/// Keeps one connection up.
async fn maintain(state: Arc<State>, place: usize) {
    loop {
        match state.dial().await {
            Ok(connection) => {
                state.reached();
                if place == 0 {
                    warn_of_eviction(&state, &connection.connection).await;
                }
                let end = state.publish(place, connection);
                let since = Instant::now();
                let why = serve_until_closed(&state, place, end).await;
                state.connections[place].store(None);
                if since.elapsed() < SHORT_LIVED {
                    sleep(RETRY).await;
                }
                if let Some(suppressed) = state.ended.allow(Clock::System.now()) {
                    tracing::warn!(server = %state.endpoint, why, suppressed, "a connection to redis ended");
                }
                state.context.refresh_topology.notify_one();
            }
            Err(error) => {
                state.note(&error);
                state.complain(&error);
                state.first_dial_done.store(true, Ordering::Release);
                state.connected.notify_waiters();
                state.context.refresh_topology.notify_one();
                sleep(RETRY).await;
            }
        }
    }
}

/// Says of a server that drops keys when its memory is full that counters are among them.
async fn warn_of_eviction(state: &State, connection: &Connection) {
    if let Ok(Some(policy)) = timeout(state.context.call_timeout, health_check::eviction_policy(connection)).await {
        tracing::warn!(
            server = %state.endpoint,
            maxmemory_policy = policy,
            "redis may evict counters, which begin anew then: strict limits want `maxmemory-policy noeviction`"
        );
    }
}

/// Waits for the end of a connection; replaces it meanwhile when it is asked to. Until that succeeds the old one goes
/// on to serve, and how the new one fails is said and no more.
async fn serve_until_closed(state: &Arc<State>, place: usize, mut end: Closed) -> String {
    let mut due = false;
    loop {
        tokio::select! {
            why = &mut end => return why.map_or_else(|_| "closed".to_owned(), |why| in_words(&why)),
            () = state.reconnect.notified() => {}
            () = sleep(RENEW_AGAIN), if due => {}
        }
        match state.dial().await {
            // What is in flight on the old connection ends there.
            Ok(connection) => {
                state.reached();
                end = state.publish(place, connection);
                due = false;
            }
            Err(error) => {
                state.complain(&error);
                due = true;
            }
        }
    }
}

/// Tries a server whose breaker is open until it serves.
async fn recover(state: Arc<State>) {
    loop {
        state.opened.notified().await;
        let since = Instant::now();
        while state.breaker.is_open() {
            if let Some(connection) = state.connection() {
                match state.health_check_patiently(&connection).await {
                    Ok(()) => {
                        state.misconfigured.store(None);
                        state.succeeded();
                        break;
                    }
                    Err(error) => {
                        state.note(&error);
                        state.complain(&error);
                    }
                }
            }
            state.context.refresh_topology.notify_one();
            if since.elapsed() > SUSPICION {
                // One at a time: a server that has too much to do must not be stormed.
                state.reconnect.notify_one();
            }
            sleep(RETRY).await;
        }
    }
}

/// Asks for new connections when files with credentials or certificates have changed.
async fn watch_files(state: Arc<State>) {
    if !state.context.connect.reads_files() {
        return;
    }
    let mut seen = state.context.connect.fingerprint();
    loop {
        sleep(FILES_CHECKED).await;
        let now = state.context.connect.fingerprint();
        if now != seen {
            seen = now;
            tracing::info!(server = %state.endpoint, "credentials or certificates for redis changed: connecting anew");
            state.reconnect.notify_waiters();
        }
    }
}

//! Background tasks of a node: keep its connections open, and find out when a failing server serves again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use super::state::{NodeState, RECONNECT_AFTER};
use crate::clock::Clock;
use crate::redis::connection::Connection;
use crate::redis::health_check;
use crate::upstream::pipeline::Closed;
use crate::upstream::stream::io_error_text;

/// Pause between two connection attempts or health checks of a failing server.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Lifetime below which a closed connection is reopened only after [`RETRY_INTERVAL`].
const MIN_LIFETIME: Duration = Duration::from_millis(20);
/// Pause between two attempts to replace a connection that still works.
const REPLACE_INTERVAL: Duration = Duration::from_secs(1);
/// Pause between two checks for changed files.
const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Starts the tasks of a node. Needs a tokio runtime.
pub(super) fn start(state: &Arc<NodeState>) -> Vec<AbortHandle> {
    let connections = (0..state.pool.size()).map(|slot| tokio::spawn(maintain(Arc::clone(state), slot)));
    let mut tasks: Vec<AbortHandle> = connections.map(|task| task.abort_handle()).collect();
    tasks.push(tokio::spawn(recover(Arc::clone(state))).abort_handle());
    tasks.push(tokio::spawn(watch_files(Arc::clone(state))).abort_handle());
    tasks
}

/// Keeps the connection of one pool slot open.
async fn maintain(state: Arc<NodeState>, slot: usize) {
    loop {
        match state.connect().await {
            Ok(connected) => {
                state.log_connected();
                if slot == 0 {
                    warn_of_eviction(&state, &connected.connection).await;
                }
                let closed = state.publish(slot, connected);
                let since = Instant::now();
                let reason = serve_until_closed(&state, slot, closed).await;
                state.pool.remove(slot);
                if since.elapsed() < MIN_LIFETIME {
                    sleep(RETRY_INTERVAL).await;
                }
                if let Some(suppressed) = state.closed_log.allow(Clock::System.now()) {
                    tracing::warn!(server = %state.endpoint, reason, suppressed, "a connection to redis closed");
                }
                state.request_topology_refresh();
            }
            Err(error) => {
                state.record_connect_error(&error);
                state.log_connect_error(&error);
                state.pool.set_first_attempt_done();
                state.request_topology_refresh();
                sleep(RETRY_INTERVAL).await;
            }
        }
    }
}

/// Warns if the server may evict keys when its memory is full.
async fn warn_of_eviction(state: &NodeState, connection: &Connection) {
    let policy = timeout(state.context.call_timeout, health_check::eviction_policy(connection)).await;
    if let Ok(Some(policy)) = policy {
        tracing::warn!(
            server = %state.endpoint,
            maxmemory_policy = policy,
            "redis may evict keys when its memory is full: set `maxmemory-policy noeviction`"
        );
    }
}

/// Waits until a connection closes, and returns the reason. Replaces it by a new one when requested.
///
/// The old connection serves until the new one is checked; a failed attempt is only logged.
async fn serve_until_closed(state: &NodeState, slot: usize, mut closed: Closed) -> String {
    let mut retry = false;
    loop {
        tokio::select! {
            reason = &mut closed => {
                return reason.map_or_else(|_| "closed".to_owned(), |reason| io_error_text(&reason));
            }
            () = state.reconnect.notified() => {}
            () = sleep(REPLACE_INTERVAL), if retry => {}
        }
        match state.connect().await {
            // Commands in flight on the old connection complete there.
            Ok(connected) => {
                state.log_connected();
                closed = state.publish(slot, connected);
                retry = false;
            }
            Err(error) => {
                state.log_connect_error(&error);
                retry = true;
            }
        }
    }
}

/// Checks a server whose breaker is open, over its connections and over new ones, until it serves again.
///
/// New connections are needed after a network partition: an old one waits for the kernel's retransmission, which may
/// take longer than the partition did.
async fn recover(state: Arc<NodeState>) {
    loop {
        state.breaker_opened.notified().await;
        let since = Instant::now();
        while state.breaker.is_open() {
            if let Some(connection) = state.pool.get() {
                match state.health_check(&connection).await {
                    Ok(()) => {
                        state.misconfiguration.clear();
                        state.record_success();
                        break;
                    }
                    Err(error) => {
                        state.record_connect_error(&error);
                        state.log_connect_error(&error);
                    }
                }
            }
            state.request_topology_refresh();
            if since.elapsed() > RECONNECT_AFTER {
                // One connection at a time, because the server may be overloaded.
                state.reconnect.notify_one();
            }
            sleep(RETRY_INTERVAL).await;
        }
    }
}

/// Requests new connections when files with credentials or certificates change.
async fn watch_files(state: Arc<NodeState>) {
    if !state.context.connect.reads_files() {
        return;
    }
    let mut seen = state.context.connect.fingerprint();
    loop {
        sleep(FILE_CHECK_INTERVAL).await;
        let now = state.context.connect.fingerprint();
        if now != seen {
            seen = now;
            tracing::info!(server = %state.endpoint, "credentials or certificates for redis changed: reconnecting");
            state.reconnect.notify_waiters();
        }
    }
}

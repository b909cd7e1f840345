//! Graceful shutdown: drain, close connections, finish responses, send the last metrics and spans.
//!
//! The shutdown does not wait for connections to close: a client that is frozen would keep the process until the
//! timeout. It waits for delayed responses, and then a moment for clients to read them. Part of the timeout is reserved
//! for the last work, which begins even if responses are still delayed.
//!
//! Decides: what happens at the end: drain, its times, decision log and spans; the end of `Watch` and of quota streams.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use super::error::ServerError;
use super::metrics_push_threads::PeriodicThread;
use crate::decide::log::DecisionLog;
use crate::serve::fleet::member::FleetMembership;
use crate::serve::grpc::health::GrpcHealth;
use crate::serve::grpc::service::RateLimitService;
use crate::serve::quota::service::QuotaService;
use crate::settings::process::ShutdownSettings;
use crate::telemetry::logs::LIFECYCLE_TARGET;
use crate::telemetry::traces::SpanQueue;

/// Time for clients to read their last responses and to close.
const CLOSE_GRACE: Duration = Duration::from_secs(1);
/// Interval at which delayed responses are counted.
const DELAYED_RESPONSE_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum time to shut down the store and to send the last metrics and spans; half of a shorter shutdown timeout.
const LAST_WORK_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time to send the last spans, and to write the last records of decisions.
const LAST_SPANS_AND_RECORDS_TIMEOUT: Duration = Duration::from_secs(1);

/// A server that is unhealthy and still serves.
pub(super) struct DrainingServer<'s> {
    pub(super) service: &'s RateLimitService,
    pub(super) fleet: &'s FleetMembership,
    pub(super) statsd: PeriodicThread,
    /// Thread that exports metrics over OTLP; `None` if there is none.
    pub(super) otlp_metrics: Option<PeriodicThread>,
    pub(super) grpc_health: GrpcHealth,
    /// The quota service, if it is on.
    pub(super) quota: Option<&'s QuotaService>,
    /// Asks the listeners to stop.
    pub(super) stop: watch::Sender<bool>,
    /// Tasks of the listeners.
    pub(super) serving: JoinSet<()>,
}

impl DrainingServer<'_> {
    /// Serves for the drain period, then stops; all within the shutdown timeout.
    ///
    /// The last part of the timeout is reserved to shut down the store and to send metrics and spans, so that delayed
    /// responses do not keep the process from releasing its slot.
    ///
    /// # Errors
    /// Responses were still delayed at the end of the timeout; a listener's task panicked.
    pub(super) async fn drain_and_stop(self, settings: &ShutdownSettings) -> Result<(), ServerError> {
        let Self { service, fleet, statsd, otlp_metrics, grpc_health, quota, stop, mut serving } = self;
        let end = Instant::now() + settings.timeout;
        let reserved_from = end - LAST_WORK_TIMEOUT.min(settings.timeout / 2);
        let drain_period = settings.drain_period;
        tracing::info!(target: LIFECYCLE_TARGET, ?drain_period, "stopping: reporting unhealthy, still serving");
        let mut serve_last = pin!(async {
            sleep(settings.drain_period).await;
            grpc_health.close_watch_streams();
            if let Some(quota) = quota {
                quota.end_streams();
            }
            stop.send_replace(true);
            // Outlives the timeout: dropping the tasks would end the delayed responses before they are counted.
            wait_until_closed_or_answered(service, &mut serving).await
        });
        let served = timeout_at(reserved_from, &mut serve_last).await;
        let serve_until_end = async {
            match served {
                Ok(result) => Ok(result),
                Err(_) => timeout_at(end, &mut serve_last).await,
            }
        };
        let (served, _) = tokio::join!(
            serve_until_end,
            timeout_at(end, async {
                tokio::join!(shut_down_store_and_send_last_telemetry(service, statsd, otlp_metrics), fleet.stop())
            })
        );
        match served {
            Ok(result) => result?,
            Err(_) if service.delayed_response_count() > 0 => return Err(ServerError::CutOff(settings.timeout)),
            Err(_) => {}
        }
        tracing::info!(target: LIFECYCLE_TARGET, "stopped");
        Ok(())
    }
}

/// Waits until all connections are closed, or until no response is delayed any more.
async fn wait_until_closed_or_answered(
    service: &RateLimitService,
    serving: &mut JoinSet<()>,
) -> Result<(), ServerError> {
    let all_closed = async {
        while let Some(result) = serving.join_next().await {
            result?;
        }
        Ok(())
    };
    tokio::select! {
        result = all_closed => result,
        () = wait_until_all_answered(service) => Ok(()),
    }
}

/// Shuts down the store, and sends the last metrics, spans and records of decisions; takes up to 2 s.
async fn shut_down_store_and_send_last_telemetry(
    service: &RateLimitService,
    statsd: PeriodicThread,
    otlp_metrics: Option<PeriodicThread>,
) {
    let span_queue = service.tracer.as_ref().map(|tracer| Arc::clone(&tracer.span_queue));
    let last_spans = async {
        if let Some(span_queue) = span_queue {
            export_last_spans(span_queue).await;
        }
    };
    let last_records = async {
        if let Some(log) = &service.decider.log {
            write_last_decision_records(Arc::clone(log)).await;
        }
    };
    let last_metrics = async {
        service.decider.store.shutdown().await;
        let last_export = async {
            if let Some(thread) = otlp_metrics {
                thread.send_last_metrics("collector of metrics").await;
            }
        };
        tokio::join!(statsd.send_last_metrics("statsd server"), last_export);
    };
    tokio::join!(last_metrics, last_spans, last_records);
}

/// Waits until no response is delayed, and clients had [`CLOSE_GRACE`] to read the last ones.
async fn wait_until_all_answered(service: &RateLimitService) {
    loop {
        sleep(CLOSE_GRACE).await;
        if service.delayed_response_count() == 0 {
            break;
        }
        while service.delayed_response_count() > 0 {
            sleep(DELAYED_RESPONSE_POLL_INTERVAL).await;
        }
    }
}

/// Writes the queued records of decisions, for at most [`LAST_SPANS_AND_RECORDS_TIMEOUT`].
async fn write_last_decision_records(log: Arc<DecisionLog>) {
    let written = tokio::task::spawn_blocking(move || log.flush_and_end(LAST_SPANS_AND_RECORDS_TIMEOUT)).await;
    if !written.unwrap_or(false) {
        tracing::warn!("last records of the decision log not written: a destination takes longer than 1 s");
    }
}

/// Sends the queued spans, for at most [`LAST_SPANS_AND_RECORDS_TIMEOUT`].
async fn export_last_spans(span_queue: Arc<SpanQueue>) {
    let exported =
        tokio::task::spawn_blocking(move || span_queue.export_remaining_and_stop(LAST_SPANS_AND_RECORDS_TIMEOUT));
    if !tokio::time::timeout(LAST_SPANS_AND_RECORDS_TIMEOUT, exported).await.is_ok_and(|result| result.unwrap_or(false))
    {
        tracing::warn!("last spans not sent: the collector takes longer than 1 s");
    }
}

//! The life of a process: load, listen, run, drain, end.
//!
//! It opens its listeners first, so that a port taken is found out before anything else, reads the rules, and then
//! answers, with or without rules: a probe must find somebody home. On a signal to stop it says that
//! it is unhealthy and goes on serving for the drain period, so that whoever routes to it hears of it first; then
//! connections are asked to close and what is in flight is finished, up to the shutdown timeout. A second signal
//! ends it at once. Rules that change are put in force by a task of its own.

mod connection;
mod admission;
mod statsd_reporter;
mod coalesced_writer;
mod admission_service;
mod http2;
mod reloading_tls;
mod listeners;
mod reload;
mod in_flight;
mod signals;
mod traces;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;

use self::listeners::BoundListeners;
use self::reload::{Reloader, RuleUpdates};
use self::signals::{SignalAction, Signals};
use self::statsd_reporter::StatsdReporter;
use crate::clock::Clock;
use crate::config::compile::options::CompileOptions;
use crate::config::live::LiveRules;
use crate::config::source::{ReloadHandle, SourceConfig};
use crate::decide::Decider;
use crate::grpc::health::GrpcHealth;
use crate::grpc::service::Service;
use crate::health::{Health, HealthRequirements};
use crate::http::metrics_pages::Exposition;
use crate::http::routes::AppState;
use crate::scrape::MetricsCollector;
use crate::settings::process::ShutdownSettings;
use crate::settings::{self, Settings};
use crate::store::Store;
use crate::store::health::StoreHealth;
use crate::telemetry::listener_stats::ServerStats;
use crate::telemetry::metrics::Metrics;

/// Why a process could not run.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A listener could not be opened: the setting, what it says, and why.
    #[error("{setting}: cannot listen on {address}: {error}")]
    Listen {
        /// The variable that says where.
        setting: &'static str,
        /// Where.
        address: String,
        /// Why not.
        error: io::Error,
    },
    /// The system refused something the process can not do without.
    #[error("{what}: {error}")]
    System {
        /// What.
        what: &'static str,
        /// Why not.
        error: io::Error,
    },
    /// A listener stopped though nobody asked it to.
    #[error("a listener failed: {0}")]
    Serve(tokio::task::JoinError),
    /// A file that maps the names of metrics can not be used: which, and why.
    #[error("PROMETHEUS_MAPPER_YAML={0}")]
    Mapper(String),
    /// Traces can not be sent as a setting says: which, and why.
    #[error("{0}")]
    Traces(String),
    /// The certificate of a listener can not be used: the setting, and why.
    #[error("{0}")]
    Certificate(String),
    /// Answers were still held when the shutdown timeout ended, and were cut off.
    #[error("TOLLKEEPER_SHUTDOWN_TIMEOUT: answers were still held after {} s and were cut off", .0.as_secs_f64())]
    CutOff(Duration),
}

/// How often a share of the memory store is swept, and how many shares there are: all of it in 4 s.
const SWEEP_INTERVAL: Duration = Duration::from_millis(125);
const SWEEP_SHARES: usize = 32;

/// Runs until a signal ends it, or an error does.
///
/// # Errors
/// A listener that can not be opened; work that had to be cut off at the end.
pub async fn run(settings: Settings, source: SourceConfig) -> Result<(), ServerError> {
    let exposition = exposition(&settings.metrics)?;
    let tracer = settings.tracing.as_ref().map(traces::start).transpose().map_err(ServerError::Traces)?;
    let mut signals = Signals::listen().map_err(|error| ServerError::System { what: "signal handlers", error })?;
    let server_stats = Arc::new(ServerStats::default());
    let listeners = BoundListeners::open(&settings, &server_stats)?;
    let clock = Clock::System;
    let rules = Arc::new(LiveRules::default());
    let store = open_store(&settings);
    let store_health = Arc::new(StoreHealth::default());
    let needs = HealthRequirements {
        domain: settings.rules.healthy_with_at_least_one_config,
        store: matches!(&settings.store, settings::store::StoreSettings::Redis(redis) if redis.health_needs_connection),
    };
    let health = Arc::new(Health::new(Arc::clone(&rules), Arc::clone(&store_health), needs));
    let metrics = Metrics::new(settings.metrics.max_request_series, settings.metrics.top_keys);
    let metrics = Arc::new(if settings.metrics.is_off { metrics.disabled() } else { metrics });
    let decider = Decider::new(store, settings.decisions.clone(), Arc::clone(&metrics));
    let mut service = Service::new(clock.clone(), Arc::clone(&rules), decider);
    service.tracer = tracer;
    let service = Arc::new(service);
    let reloader = Reloader { rules, options: CompileOptions::from(&settings), clock, metrics };
    let updates = RuleUpdates::start(reloader, source)
        .map_err(|error| ServerError::System { what: "the source of rules", error })?;
    let reload = updates.reload_handle();
    if service.rules.load().is_none() {
        tracing::error!("no rules are loaded: every request gets an error until the rules are right");
    }

    let (stop, stopping) = watch::channel(false);
    let grpc_health = GrpcHealth::new(Arc::clone(&health), Arc::clone(&service.decider.metrics)).await;
    let collector = MetricsCollector {
        service: Arc::clone(&service),
        health: Arc::clone(&health),
        listeners: server_stats,
        path_label: settings.metrics.path_label,
    };
    let statsd = StatsdReporter::start(&settings.metrics, collector.clone())
        .map_err(|error| ServerError::System { what: "the sender of metrics", error })?;
    let max_body_bytes = settings.grpc.max_message_bytes;
    let state = AppState { collector, max_body_bytes, exposition, admin: settings.admin.clone() };
    let mut background = JoinSet::new();
    background.spawn(updates.follow(grpc_health.clone()));
    background.spawn(grpc_health.clone().follow_store());
    background.spawn(sweep(Arc::clone(&service)));
    listeners.follow_certificates(&mut background);
    background.spawn(report_store(Arc::clone(&service), store_health));
    let [grpc, http, inside, prometheus] = listeners.addresses();
    let mut serving = listeners
        .serve(&settings.grpc, state, &grpc_health, &stopping)
        .map_err(|error| ServerError::System { what: "the listeners", error })?;
    tracing::warn!(grpc, http, debug = inside, prometheus, "serving");

    serve_on(&mut signals, &reload, &mut serving).await?;
    health.drain();
    grpc_health.sync().await;
    let ending = drain(&settings.shutdown, (&service, statsd), grpc_health, (stop, serving));
    let second = async { while signals.wait().await != SignalAction::Stop {} };
    tokio::select! {
        ended = ending => ended,
        () = second => {
            tracing::warn!("a second signal: ending at once");
            Ok(())
        }
    }
}

/// Goes on until a signal asks for the end.
async fn serve_on(signals: &mut Signals, reload: &ReloadHandle, serving: &mut JoinSet<()>) -> Result<(), ServerError> {
    loop {
        tokio::select! {
            wanted = signals.wait() => match wanted {
                SignalAction::Stop => return Ok(()),
                SignalAction::Reload => {
                    tracing::warn!("SIGHUP: reading the rules again");
                    reload.reload();
                }
            },
            // No listener ends by itself before it is told to.
            Some(ended) = serving.join_next() => flatten(ended)?,
        }
    }
}

/// What Prometheus gets, if it gets anything.
fn exposition(settings: &settings::metrics::MetricsSettings) -> Result<Option<Arc<Exposition>>, ServerError> {
    let exposition = settings.prometheus.as_ref().map(|of| Exposition::new(of, &settings.tags)).transpose();
    Ok(exposition.map_err(ServerError::Mapper)?.map(Arc::new))
}

/// How long clients get to read their last answers and to close.
const LINGER: Duration = Duration::from_secs(1);

/// Goes on serving for a while, then asks clients to close and finishes what is held; all within the shutdown timeout.
///
/// It does not wait for connections: a client that is frozen or dawdles would keep the process until the timeout.
async fn drain(
    settings: &ShutdownSettings,
    (service, statsd): (&Service, StatsdReporter),
    grpc_health: GrpcHealth,
    (stop, mut serving): (watch::Sender<bool>, JoinSet<()>),
) -> Result<(), ServerError> {
    tracing::warn!(drain_period = ?settings.drain_period, "stopping: unhealthy from now on");
    let finish = async {
        tokio::time::sleep(settings.drain_period).await;
        grpc_health.close().await;
        stop.send_replace(true);
        let answered = async {
            loop {
                tokio::time::sleep(LINGER).await;
                if service.held() == 0 {
                    break;
                }
                while service.held() > 0 {
                    tokio::time::sleep(LINGER / 20).await;
                }
            }
        };
        let closed = async {
            while let Some(ended) = serving.join_next().await {
                flatten(ended)?;
            }
            Ok(())
        };
        let ended = tokio::select! {
            ended = closed => ended,
            () = answered => Ok(()),
        };
        let span_queue = service.tracer.as_ref().map(|tracer| Arc::clone(&tracer.span_queue));
        let last_spans = async {
            if let Some(span_queue) = span_queue {
                traces::finish(span_queue).await;
            }
        };
        let last_metrics = async {
            service.decider.store.shutdown().await;
            statsd.finish().await;
        };
        tokio::join!(last_metrics, last_spans);
        ended
    };
    let timeout = settings.timeout;
    match tokio::time::timeout(timeout, finish).await {
        Ok(ended) => ended?,
        Err(_) if service.held() > 0 => return Err(ServerError::CutOff(timeout)),
        Err(_) => {}
    }
    tracing::warn!("stopped");
    Ok(())
}

fn flatten(ended: Result<(), tokio::task::JoinError>) -> Result<(), ServerError> {
    ended.map_err(ServerError::Serve)
}

/// The store that the settings ask for. One in Redis connects in the background: nothing waits for it.
fn open_store(settings: &Settings) -> Store {
    let capacity_bytes = settings.memory.capacity_bytes as u64;
    match &settings.store {
        settings::store::StoreSettings::Memory => {
            tracing::warn!(
                capacity_bytes,
                "counters are kept in this process's memory: every replica counts for itself"
            );
        }
        settings::store::StoreSettings::Redis(redis) => {
            tracing::warn!(
                setting = redis.main.setting,
                redis = %redis.main.topology,
                per_second = redis.per_second.as_ref().map(|deployment| deployment.topology.to_string()),
                timeout_ms = redis.timeout.as_millis(),
                "counters are kept in redis"
            );
        }
    }
    Store::open(&settings.store, capacity_bytes)
}

/// Tells the health pages how the store is.
async fn report_store(service: Arc<Service>, health: Arc<StoreHealth>) {
    service.decider.store.report_health(&health).await;
}

/// Drops expired counters, a share of the store at a time.
async fn sweep(service: Arc<Service>) {
    let mut ticks = tokio::time::interval(SWEEP_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for turn in (0..SWEEP_SHARES).cycle() {
        ticks.tick().await;
        let now = service.clock.now();
        service.decider.store.sweep(now, turn, SWEEP_SHARES);
        if turn == 0 {
            service.decider.metrics.top_keys.sweep(now);
        }
    }
}

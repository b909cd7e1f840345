//! The life of the server process: load, listen, serve, drain, stop.
//!
//! The server is this process; the servers of a store are always named so. Its listeners admit connections
//! (`connection`, `admission`), and hand requests to the gRPC service (`http2`) or to the pages (`http::routes`).
//!
//! Everything that the settings name is validated and the listeners open first, so that problems are found before
//! anything else. Then the rules are loaded and requests are answered, with or without rules, because health probes
//! need an answer. On SIGTERM or SIGINT the process reports that it is unhealthy and serves on for the drain period, so
//! that load balancers notice. Then connections are asked to close and requests in flight are finished, up to the
//! shutdown timeout. A second signal ends the process at once.
//!
//! Decides: the order of a start, without rules too; which signals end the process or reload (SIGTERM twice, SIGHUP).
//! Decides: when expired counters of memory are removed; the warning of evictions; plain or hashed keys in reports.

pub mod error;
mod admission;
mod tls;
pub mod coalesced_writer;
pub mod inbound_frames;
pub mod http2;
mod connection;
pub mod listeners;
pub mod startup;
mod table_changes;
mod reload;
mod metrics_push_threads;
mod shutdown;

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;

use self::error::ServerError;
use self::listeners::{BoundListeners, StartSummary};
use self::metrics_push_threads::{PeriodicThread, start_otlp_metrics_thread, start_statsd_thread};
use self::reload::{ReloadTrigger, RuleApplier, RuleUpdater};
use self::shutdown::DrainingServer;
use self::startup::StartupResources;
use self::table_changes::TableFollowers;
use self::tls::watch_expiry_of_presented_certificates;
use crate::base::clock::{Clock, Time};
use crate::base::threads;
use crate::decide::decider::Decider;
use crate::decide::log::value_form::ValueForm;
use crate::decide::log::{DecisionLog, LogHeaderContext};
use crate::decide::reached_levels::ReachedLevelSender;
use crate::rules::compile::options::CompileOptions;
use crate::rules::defaults_file::DefaultsStatus;
use crate::rules::files::watch::WatchTiming;
use crate::rules::live::LiveRules;
use crate::rules::source::SourceConfig;
use crate::rules::table_loader::TableLoader;
use crate::serve::blocks::SharedBlocks;
use crate::serve::fleet::authentication::AuthenticationKey;
use crate::serve::fleet::member::FleetMembership;
use crate::serve::grpc::health::GrpcHealth;
use crate::serve::grpc::service::RateLimitService;
use crate::serve::health::{Health, HealthRequirements};
use crate::serve::http::app_state::{AppState, PrometheusPageConfig};
use crate::serve::http::browser_protection::AllowedHosts;
use crate::serve::http::live_events::LiveEvents;
use crate::serve::http::page_builder::PageBuilder;
use crate::serve::http::report_pages::record_history_each_minute;
use crate::serve::level_webhook::WebhookTarget;
use crate::serve::metrics_collector::MetricsCollector;
use crate::serve::quota::service::QuotaService;
use crate::serve::reached_level_notifier::ReachedLevelNotifier;
use crate::settings::Settings;
use crate::settings::fleet::TopKeyValueForm;
use crate::settings::redis::RedisSettings;
use crate::settings::secret::Secret;
use crate::settings::store::StoreSettings;
use crate::settings::tracing::TracingSettings;
use crate::store::Store;
use crate::store::health::StoreHealth;
use crate::store::stats::MemoryUsage;
use crate::telemetry::listener_stats::StatsByListener;
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::logs::LIFECYCLE_TARGET;
use crate::telemetry::otlp::{self, OtlpSpanExporter};
use crate::telemetry::otlp_metrics::BlockingMetricExporter;
use crate::telemetry::scheduler_lag::measure_task_lag;
use crate::telemetry::service_metrics::ServiceMetrics;
use crate::telemetry::traces::{ExportThreadContext, SpanQueue, Tracer};

/// Runs the server until a signal or an error ends it.
///
/// # Errors
/// A listener, certificate, thread or file that the settings name cannot be used; responses that were cut off at the
/// end of the shutdown.
pub async fn run_server(settings: Settings, source: SourceConfig) -> Result<(), ServerError> {
    let listener_stats = Arc::new(StatsByListener::default());
    let StartupResources { guards, prometheus_page, exporter, metric_exporter, logged_values, fleet_secret, webhook } =
        StartupResources::load_files_and_check_addresses(&settings, &listener_stats).map_err(ServerError::Startup)?;
    let listeners = BoundListeners::open_all(&settings, guards).map_err(|error| ServerError::Startup(vec![error]))?;
    let mut signals = Signals::install_handlers().map_err(error_naming_resource("signal handlers"))?;
    let rules = Arc::new(LiveRules::default());
    let store_health = Arc::new(StoreHealth::default());
    let health = build_health(&settings, &rules, &store_health);
    let mut service = build_service(&settings, rules);
    service.tracer = settings.tracing.as_ref().zip(exporter).map(|(tracing, it)| start_tracer(tracing, it));
    service.decider.key_values = choose_value_form_in_rejected_keys(&settings, fleet_secret.as_ref());
    service.decider.log = start_decision_log(&settings, logged_values, &service.clock)?;
    let (reached_levels, levels_to_tell) = ReachedLevelSender::new();
    service.decider.reached_levels = Some(reached_levels);
    let service = Arc::new(service);
    let updates = start_rule_updates(&settings, source, &service)?;
    let reload = updates.reload_trigger();

    let (stop, stopping) = watch::channel(false);
    let grpc_health = GrpcHealth::new(Arc::clone(&health), Arc::clone(&service));
    let quota = settings.grpc.max_quota_buckets.map(|max| QuotaService::start(Arc::clone(&service), max));
    let collector = build_metrics_collector(&settings, &service, &health, &listener_stats, quota.clone());
    let statsd = start_statsd_thread(&settings.metrics, collector.clone())
        .map_err(error_naming_resource("the thread that reports metrics"))?;
    let otlp_metrics = start_metric_export(&settings, metric_exporter, &collector)?;
    let fleet = start_fleet(&settings, collector.clone(), fleet_secret)?;
    let (drain, draining) = watch::channel(false);
    let blocks = SharedBlocks::start(Arc::clone(&service), &settings.store).await;
    let pages = AppStateParts { collector, blocks, fleet: Arc::clone(&fleet), prometheus_page, draining };
    let state = build_app_state(&settings, pages);
    let mut background = JoinSet::new();
    background.spawn(updates.apply_updates(grpc_health.clone()));
    background.spawn(grpc_health.clone().send_status_after_store_changes());
    background.spawn(record_history_each_minute(state.collector.clone(), state.pages.clone()));
    listeners.watch_certificates(&mut background);
    background.spawn(watch_expiry_of_presented_certificates(settings.presented_certificates(), listener_stats));
    spawn_upkeep(&mut background, &service, store_health);
    let webhook = webhook.map(WebhookTarget::start).transpose();
    let webhook = webhook.map_err(error_naming_resource("the thread of the webhook"))?;
    background
        .spawn(ReachedLevelNotifier::new(Arc::clone(&service), &settings.store, webhook).tell_all(levels_to_tell));
    listeners.log_start(&build_start_summary(&settings, &service));
    let mut serving = listeners
        .start_serving(&settings, &state, &grpc_health, &stopping)
        .map_err(error_naming_resource("the listeners"))?;

    serve_until_stopped(&mut signals, &reload, &mut serving).await?;
    health.start_draining();
    drain.send_replace(true);
    grpc_health.send_changed_status();
    let quota = quota.as_deref();
    let draining =
        DrainingServer { service: &service, fleet: &fleet, statsd, otlp_metrics, grpc_health, quota, stop, serving };
    tokio::select! {
        result = draining.drain_and_stop(&settings.shutdown) => result,
        () = signals.wait_for_second_stop() => Ok(()),
    }
}

/// Starts the tasks that look after the counters, the store and the threads.
fn spawn_upkeep(background: &mut JoinSet<()>, service: &Arc<RateLimitService>, store_health: Arc<StoreHealth>) {
    background.spawn(sweep_counters(Arc::clone(service)));
    background.spawn(follow_store_health(Arc::clone(service), store_health));
    background.spawn(measure_task_lag());
}

/// Returns a conversion of an error of the system to one that names the resource.
fn error_naming_resource(resource: &'static str) -> impl FnOnce(io::Error) -> ServerError {
    move |error| ServerError::System { resource, error }
}

/// Signal handlers of the process: SIGTERM and SIGINT stop it, SIGHUP reloads the rules.
#[derive(Debug)]
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

/// Reaction to a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SignalAction {
    /// Shut down.
    Stop,
    /// Reload the rules.
    Reload,
}

impl Signals {
    /// Installs the handlers, which replace the default action of ending the process.
    fn install_handlers() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for a signal that ends a shutdown at once.
    async fn wait_for_second_stop(&mut self) {
        while self.wait_for_signal().await != SignalAction::Stop {}
        tracing::info!(target: LIFECYCLE_TARGET, "second signal received: stopping at once");
    }

    /// Waits for the next signal.
    async fn wait_for_signal(&mut self) -> SignalAction {
        tokio::select! {
            _ = self.terminate.recv() => SignalAction::Stop,
            _ = self.interrupt.recv() => SignalAction::Stop,
            _ = self.hangup.recv() => SignalAction::Reload,
        }
    }
}

fn build_metrics_collector(
    settings: &Settings,
    service: &Arc<RateLimitService>,
    health: &Arc<Health>,
    listeners: &Arc<StatsByListener>,
    quota: Option<Arc<QuotaService>>,
) -> MetricsCollector {
    MetricsCollector {
        service: Arc::clone(service),
        health: Arc::clone(health),
        listeners: Arc::clone(listeners),
        path_label: settings.metrics.path_label,
        quota,
    }
}

/// What the state of the pages is built from.
struct AppStateParts {
    collector: MetricsCollector,
    blocks: Arc<SharedBlocks>,
    fleet: Arc<FleetMembership>,
    prometheus_page: Option<Arc<PrometheusPageConfig>>,
    /// Turns true when the process begins to stop.
    draining: watch::Receiver<bool>,
}

fn build_app_state(settings: &Settings, sources: AppStateParts) -> AppState {
    let AppStateParts { collector, blocks, fleet, prometheus_page, draining } = sources;
    let pages = PageBuilder::default();
    AppState {
        live: Arc::new(LiveEvents::new(collector.clone(), pages.clone(), draining)),
        pages,
        collector,
        blocks,
        fleet,
        debug_hosts: AllowedHosts(settings.listeners.debug_hosts.clone().into()),
        max_body_bytes: settings.grpc.max_message_bytes,
        prometheus_page,
        admin_token: settings.admin.clone(),
    }
}

/// Serves until a signal asks to stop; reloads the rules on SIGHUP.
async fn serve_until_stopped(
    signals: &mut Signals,
    reload: &ReloadTrigger,
    serving: &mut JoinSet<()>,
) -> Result<(), ServerError> {
    loop {
        tokio::select! {
            action = signals.wait_for_signal() => match action {
                SignalAction::Stop => return Ok(()),
                SignalAction::Reload => {
                    tracing::info!(target: LIFECYCLE_TARGET, "SIGHUP received: reloading the rules");
                    reload.request_reload();
                }
            },
            // A listener's task does not end before the shutdown unless it panics.
            Some(result) = serving.join_next() => result?,
        }
    }
}

fn build_health(settings: &Settings, rules: &Arc<LiveRules>, store: &Arc<StoreHealth>) -> Arc<Health> {
    let requirements = HealthRequirements {
        domain: settings.rules.healthy_with_at_least_one_config,
        rules: settings.rules.healthy_with_rules_only,
        store: matches!(&settings.store, StoreSettings::Redis(redis) if redis.health_needs_connection),
    };
    Arc::new(Health::new(Arc::clone(rules), Arc::clone(store), requirements))
}

fn build_service(settings: &Settings, rules: Arc<LiveRules>) -> RateLimitService {
    let metrics = ServiceMetrics::new(settings.metrics.max_request_series, settings.metrics.top_keys);
    let metrics = Arc::new(if settings.metrics.is_off { metrics.without_request_counts() } else { metrics });
    let mut decider = Decider::new(open_store(settings), settings.decisions.clone(), metrics);
    if let StoreSettings::Redis(redis) = &settings.store {
        decider.set_max_unknown_row_reads_per_s(redis.tables.unknown_reads_per_s);
    }
    let mut service = RateLimitService::new(Clock::System, rules, decider);
    service.max_descriptors = settings.client_limits.descriptors;
    service
}

/// Starts to export traces.
fn start_tracer(settings: &TracingSettings, exporter: OtlpSpanExporter) -> Tracer {
    let thread = ExportThreadContext { setting: settings.collector.setting, on_start: threads::lower_thread_priority };
    let span_queue =
        SpanQueue::start(exporter, &otlp::build_resource(&settings.collector.resource), settings.queue, thread);
    let (protocol, endpoint) = (settings.collector.protocol, settings.collector.endpoint.as_str());
    tracing::info!(?protocol, endpoint, ratio = settings.sampler.ratio, "exporting traces");
    Tracer {
        sampler: settings.sampler,
        formats: settings.formats,
        shows_descriptors: settings.records_descriptors,
        span_queue: Arc::new(span_queue),
    }
}

/// Starts the decision log, if there is one.
fn start_decision_log(
    settings: &Settings,
    values: Option<ValueForm>,
    clock: &Clock,
) -> Result<Option<Arc<DecisionLog>>, ServerError> {
    let Some((log, values)) = settings.decision_log.as_ref().zip(values) else { return Ok(None) };
    let facts = LogHeaderContext::new(settings, clock.clone());
    let started = DecisionLog::start(log, values, facts);
    let started =
        started.map_err(|error| ServerError::System { resource: "the threads of the decision log", error })?;
    Ok(Some(Arc::new(started)))
}

/// Chooses the form of the values in rejected keys, hashed as in the decision log.
fn choose_value_form_in_rejected_keys(settings: &Settings, secret: Option<&Secret>) -> ValueForm {
    match (settings.fleet.top_values, secret) {
        (TopKeyValueForm::Plain, _) => ValueForm::Plain,
        (TopKeyValueForm::Hashed, Some(secret)) => ValueForm::hashed_with(secret.reveal()),
        (TopKeyValueForm::Hashed, None) | (TopKeyValueForm::None, _) => ValueForm::Omitted,
    }
}

/// Starts the export of metrics over OTLP; `None` without an exporter.
fn start_metric_export(
    settings: &Settings,
    exporter: Option<BlockingMetricExporter>,
    collector: &MetricsCollector,
) -> Result<Option<PeriodicThread>, ServerError> {
    let Some((exporter, otlp)) = exporter.zip(settings.otlp_metrics.as_ref()) else { return Ok(None) };
    let thread = start_otlp_metrics_thread(exporter, otlp.interval, collector.clone());
    thread.map(Some).map_err(error_naming_resource("the thread that exports metrics"))
}

/// Starts the view of all replicas.
fn start_fleet(
    settings: &Settings,
    collector: MetricsCollector,
    secret: Option<Secret>,
) -> Result<Arc<FleetMembership>, ServerError> {
    let key = secret.map(|secret| AuthenticationKey::new(secret.reveal()));
    let fleet = FleetMembership::start(collector, &settings.fleet, key);
    let fleet = fleet.map_err(|error| ServerError::System { resource: "the thread of the fleet", error })?;
    Ok(Arc::new(fleet))
}

/// Starts the source of the rules and loads them for the first time.
fn start_rule_updates(
    settings: &Settings,
    source: SourceConfig,
    service: &RateLimitService,
) -> Result<RuleUpdater, ServerError> {
    let redis = match &settings.store {
        StoreSettings::Redis(redis) => Some(RedisSettings::clone(redis)),
        StoreSettings::Memory | StoreSettings::Memcache(_) => None,
    };
    let applier = RuleApplier {
        rules: Arc::clone(&service.rules),
        options: CompileOptions::from(settings),
        clock: service.clock.clone(),
        metrics: Arc::clone(&service.decider.metrics),
        log: service.decider.log.clone(),
        defaults: settings.rules.defaults.clone().map(|path| Arc::new(DefaultsStatus::new(path))),
        last: Arc::default(),
        tables: Arc::new(Mutex::new(match &redis {
            Some(redis) => TableLoader::with_lookup_settings(redis.tables),
            None => TableLoader::default().refuse_redis_tables(),
        })),
    };
    let followers = redis.map(TableFollowers::new);
    let updates = RuleUpdater::start(applier, source, WatchTiming::from(&settings.rules), followers)
        .map_err(|error| ServerError::System { resource: "the source of the rules", error })?;
    if service.rules.current_rules().is_some() {
        return Ok(updates);
    }
    if let Some(log) = &service.decider.log {
        log.write_header(None);
    }
    if let Some(xds) = &settings.xds {
        let (server, node_id) = (xds.server_address(), &xds.node_id);
        tracing::warn!(server, node_id, "waiting for rules over xDS: every request gets an error until they are there");
    } else {
        tracing::error!("no rules are loaded: every request gets an error until the rules are valid");
    }
    Ok(updates)
}

/// Opens the store. A Redis store connects in the background.
fn open_store(settings: &Settings) -> Store {
    let capacity_bytes = settings.memory.capacity_bytes as u64;
    match &settings.store {
        StoreSettings::Memory => {
            tracing::info!(capacity_bytes, "counters are in this process's memory: each replica counts separately");
        }
        StoreSettings::Redis(redis) => {
            tracing::info!(
                setting = redis.main.setting,
                redis = %redis.main.topology,
                per_second = redis.per_second.as_ref().map(|deployment| deployment.topology.to_string()),
                timeout_ms = redis.timeout.as_millis(),
                "counters are in redis"
            );
        }
        StoreSettings::Memcache(memcache) => {
            let timeout_ms = memcache.timeout.as_millis();
            tracing::info!(memcache = %memcache.servers, timeout_ms, "counters are in memcache");
        }
    }
    Store::open(&settings.store, capacity_bytes, settings.slots.holder_timeout)
}

fn build_start_summary(settings: &Settings, service: &RateLimitService) -> StartSummary {
    StartSummary {
        rules: service.rules.status().rules,
        counters: describe_counter_location(&settings.store),
        has_admin_token: settings.admin.is_some(),
    }
}

/// Describes where the counters are (memory, Redis, memcached), for the log line of the start.
fn describe_counter_location(settings: &StoreSettings) -> String {
    match settings {
        StoreSettings::Memory => "memory of this process, not shared".to_owned(),
        StoreSettings::Redis(redis) => format!("redis {}", redis.main.topology),
        StoreSettings::Memcache(memcache) => format!("memcache {}", memcache.servers),
    }
}

/// Interval between the sweeps of two parts of the memory store.
const SWEEP_INTERVAL: Duration = Duration::from_millis(125);
/// Number of parts of the memory store; a sweep of all takes 4 s.
const SWEEP_PARTS: usize = 32;

/// Copies the state of the store's connections to the health pages.
async fn follow_store_health(service: Arc<RateLimitService>, health: Arc<StoreHealth>) {
    service.decider.store.report_health_repeatedly(&health).await;
}

/// Removes expired counters, one part of the store at a time. Warns about counters that were evicted.
async fn sweep_counters(service: Arc<RateLimitService>) {
    let mut logged_evictions = 0;
    let mut ticks = tokio::time::interval(SWEEP_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for part in (0..SWEEP_PARTS).cycle() {
        ticks.tick().await;
        let now = service.clock.now();
        let holders = service.decider.store.slot_holders();
        // First: a sweep looks for dead holders.
        holders.record_that_process_runs(now);
        service.decider.store.sweep(now, part, SWEEP_PARTS);
        if part == 0 {
            holders.warn_and_forget_silent(now);
            let metrics = &service.decider.metrics;
            metrics.top_keys.drop_old_windows(now);
            metrics.busiest_keys.drop_old_windows(now);
            metrics.unmatched.drop_old_windows(now);
            warn_of_evictions(&service.decider.store.stats().memory, &mut logged_evictions, now);
        }
    }
}

/// Warns, once a minute at most, if counters were evicted since the last warning.
fn warn_of_evictions(usage: &MemoryUsage, logged: &mut u64, now: Time) {
    static EVICTION_LOG_THROTTLE: LogThrottle = LogThrottle::every(Duration::from_secs(60));
    if usage.evicted > *logged && EVICTION_LOG_THROTTLE.allow(now).is_some() {
        let (evicted, capacity_bytes) = (usage.evicted - *logged, usage.capacity_bytes);
        *logged = usage.evicted;
        tracing::warn!(
            evicted,
            capacity_bytes,
            "counters evicted: TOLLKEEPER_MEMORY_BYTES is used up, and these callers start at zero \
             (raise it, or find keys that grow without end: `tollkeeper top --rules --finding keys_seen_once`)"
        );
    }
}

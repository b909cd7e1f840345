//! Validation of everything that the settings name and the process cannot start without.
//!
//! `serve` starts with it and `check --env` runs the same, so the two cannot disagree. All problems are reported at
//! once, except a port in use: another process may hold it only for now, so it is found when the listeners open. Files
//! that are read again later, such as a password for Redis, do not prevent the start: see [`find_file_warnings`].
//!
//! Decides: which files and addresses stop a start; what `check --env` tries of them.

use std::sync::Arc;

use super::connection::ListenerGuards;
use super::error::StartupError;
use super::listeners;
use super::metrics_push_threads::build_metric_exporter;
use super::tls::{self, find_expired_certificate};
use crate::base::threads;
use crate::decide::log;
use crate::decide::log::value_form::ValueForm;
use crate::rules::{defaults_file, xds};
use crate::serve::http::admin_token;
use crate::serve::http::app_state::{self, PrometheusPageConfig};
use crate::serve::level_webhook::WebhookTarget;
use crate::settings::Settings;
use crate::settings::credentials::SecretSource;
use crate::settings::problem::UnusableSetting;
use crate::settings::secret::Secret;
use crate::settings::tracing::TracingSettings;
use crate::store;
use crate::telemetry::listener_stats::StatsByListener;
use crate::telemetry::otlp::{self, OtlpSpanExporter};
use crate::telemetry::otlp_metrics::BlockingMetricExporter;

/// What the server needs to start, built from the files that the settings name.
pub(super) struct StartupResources {
    /// Admission limits of each kind of listener, and its TLS certificate if it has one.
    pub(super) guards: Vec<ListenerGuards>,
    /// Path and options of the Prometheus page; `None` if the page is off.
    pub(super) prometheus_page: Option<Arc<PrometheusPageConfig>>,
    /// OTLP exporter of spans; `None` if tracing is off.
    pub(super) exporter: Option<OtlpSpanExporter>,
    /// OTLP exporter of metrics; `None` if there is none.
    pub(super) metric_exporter: Option<BlockingMetricExporter>,
    /// Form of entry values (plain, hashed, left out) in the decision log; `None` if there is no decision log.
    pub(super) logged_values: Option<ValueForm>,
    /// Secret shared by all replicas, which authenticates their summaries and hashes values of rejected keys.
    pub(super) fleet_secret: Option<Secret>,
    pub(super) webhook: Option<WebhookTarget>,
}

impl StartupResources {
    /// Reads the files that the settings name, and checks the addresses to listen on.
    ///
    /// # Errors
    /// Every file that cannot be used and every address that cannot be listened on; at least one.
    pub(super) fn load_files_and_check_addresses(
        settings: &Settings,
        stats: &Arc<StatsByListener>,
    ) -> Result<Self, Vec<StartupError>> {
        let mut errors = listeners::find_address_problems(settings);
        let guards = ok_or_collect_errors(&mut errors, listeners::load_guards_and_certificates(settings, stats));
        let metrics = &settings.metrics;
        let prometheus_page =
            metrics.prometheus.as_ref().map(|prometheus| PrometheusPageConfig::new(prometheus, &metrics.tags));
        let prometheus_page = ok_or_collect_errors(&mut errors, prometheus_page.transpose().map_err(Some)).flatten();
        let exporter = settings.tracing.as_ref().map(build_span_exporter).transpose();
        let exporter = ok_or_collect_errors(&mut errors, exporter.map_err(Some)).flatten();
        let metric_exporter = settings.otlp_metrics.as_ref().map(|otlp| build_metric_exporter(otlp, &metrics.tags));
        let metric_exporter = ok_or_collect_errors(&mut errors, metric_exporter.transpose().map_err(Some)).flatten();
        let values = settings.decision_log.as_ref().map(log::check_sinks_and_build_value_form).transpose();
        let values = ok_or_collect_errors(&mut errors, values);
        let secret = settings.fleet.secret.as_ref().map(SecretSource::load_secret).transpose();
        // If the decision log failed, it has already reported the same key file.
        let secret = secret.map_err(|unusable| values.is_some().then_some(unusable));
        let fleet_secret = ok_or_collect_errors(&mut errors, secret).flatten();
        let webhook = settings.webhook.as_ref().map(WebhookTarget::load).transpose();
        let webhook = ok_or_collect_errors(&mut errors, webhook.map_err(Some)).flatten();
        if !errors.is_empty() {
            return Err(errors);
        }
        Ok(Self {
            guards: guards.unwrap_or_default(),
            prometheus_page: prometheus_page.map(Arc::new),
            exporter,
            metric_exporter,
            logged_values: values.flatten(),
            fleet_secret,
            webhook,
        })
    }
}

/// Value of a result; `None` of an error, which is added to `errors`.
fn ok_or_collect_errors<T, E: Into<StartupError>>(
    errors: &mut Vec<StartupError>,
    result: Result<T, impl IntoIterator<Item = E>>,
) -> Option<T> {
    result.map_err(|found| errors.extend(found.into_iter().map(Into::into))).ok()
}

/// Builds the OTLP exporter of spans. Its certificates are read only now, not again when they change.
///
/// # Errors
/// Names the setting and the problem.
fn build_span_exporter(settings: &TracingSettings) -> Result<OtlpSpanExporter, UnusableSetting> {
    let collector = &settings.collector;
    let options = collector.build_otlp_options(threads::lower_thread_priority)?;
    otlp::build_span_exporter(&options).map_err(|error| UnusableSetting {
        setting: collector.setting,
        shown: collector.endpoint.clone(),
        what: error.to_string(),
    })
}

/// Returns every problem that prevents a start with these settings, except ports that another process uses.
pub fn find_startup_problems(settings: &Settings) -> Vec<StartupError> {
    StartupResources::load_files_and_check_addresses(settings, &Arc::default()).err().unwrap_or_default()
}

/// Returns files that cannot be used and do not prevent the start, such as an expired certificate.
pub fn find_file_warnings(settings: &Settings) -> Vec<UnusableSetting> {
    let mut unusable = store::find_settings_with_unusable_files(&settings.store);
    let listeners = [&settings.listeners.grpc_tls, &settings.listeners.http_tls];
    unusable.extend(
        listeners.into_iter().flatten().filter_map(|tls| find_expired_certificate(&tls.certificate, "clients")),
    );
    unusable.extend(settings.presented_certificates().iter().filter_map(|presented| {
        find_expired_certificate(&presented.file, tls::name_rejecting_servers(presented.client))
    }));
    unusable.extend(settings.xds.as_ref().and_then(xds::find_unusable_tls_file));
    unusable.extend(settings.rules.defaults.as_deref().and_then(defaults_file::find_unusable_file));
    unusable.extend(settings.admin.as_ref().and_then(admin_token::find_unusable_token_file));
    unusable.extend(settings.metrics.prometheus.as_ref().and_then(app_state::find_missing_mapping_file));
    // Both Redis deployments have the same certificates, so a problem of theirs is found twice.
    unusable.dedup();
    unusable
}

//! Export of metrics to an OpenTelemetry collector, off unless `OTEL_METRICS_EXPORTER` asks for it.
//!
//! Decides: interval and temporality of metrics over OTLP; `OTEL_EXPORTER_OTLP_HEADERS` of metrics.

use std::path::PathBuf;
use std::time::Duration;

use super::collector::{CollectorSettings, parse_attribute};
use super::metrics::DISABLE_STATS;
use super::secret::Secret;
use super::setting::settings;
use super::tracing::{Compression, OTEL_EXPORTER_OTLP_HEADERS, OTEL_SDK_DISABLED, OtelProtocol, OtlpSignalVariables};
use super::value::choices;
use super::value::text::{SecretUrl, TextList};
use super::values::Values;
use crate::base::named_enum::named_enum;
use crate::telemetry::otlp_metrics::Temporality;

settings! { "Metrics over OTLP", only read "with OTEL_METRICS_EXPORTER=otlp and without OTEL_SDK_DISABLED and DISABLE_STATS";
    OTEL_METRICS_EXPORTER: TextList = "none", "otlp: send metrics to a collector"
        .differs("the default of OpenTelemetry is otlp");
    OTEL_METRIC_EXPORT_INTERVAL: u64 = "60000", "interval of sending metrics to the collector, in milliseconds"
        .within("1000 to 3600000");
    OTEL_METRIC_EXPORT_TIMEOUT: u64 = "30000", "see OTEL_EXPORTER_OTLP_METRICS_TIMEOUT"
        .within("1 to 3600000") .without_effect("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT applies instead");
    OTEL_METRICS_EXEMPLAR_FILTER: String = "", "selection of exemplars"
        .without_effect("no exemplars are recorded");
    OTEL_EXPORTER_OTLP_METRICS_ENDPOINT: Option<SecretUrl> = "",
        "URL of the collector for metrics; over HTTP with the whole path";
    OTEL_EXPORTER_OTLP_METRICS_PROTOCOL: Option<OtelProtocol> = "", "protocol of the collector for metrics";
    OTEL_EXPORTER_OTLP_METRICS_HEADERS: Option<Secret> = "", "headers of export requests for metrics: k=v,k=v";
    OTEL_EXPORTER_OTLP_METRICS_TIMEOUT: Option<u64> = "",
        "time limit of an export request for metrics, in milliseconds" .within("1 to 3600000");
    OTEL_EXPORTER_OTLP_METRICS_COMPRESSION: Option<Compression> = "", "compression of export requests for metrics";
    OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE: Option<PathBuf> = "",
        "CA certificates for the collector of metrics, PEM file, instead of the system's";
    OTEL_EXPORTER_OTLP_METRICS_CLIENT_CERTIFICATE: Option<PathBuf> = "", "client certificate for it, PEM file";
    OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY: Option<PathBuf> = "", "private key of the client certificate (PEM)";
    OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE: TemporalityPreference = "cumulative",
        "counts since the start, or since the last export; lowmemory is delta";
    OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION: String = "explicit_bucket_histogram", "form of histograms"
        .without_effect("histograms have the bounds that Prometheus gets");
}

named_enum! {
    /// Time that counts are for, in OpenTelemetry's words.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum TemporalityPreference {
        /// Since the start of the process.
        Cumulative = "cumulative",
        /// Since the last export.
        Delta = "delta",
        /// Since the last export, as all counters here are synchronous.
        LowMemory = "lowmemory",
    }
}

choices! { TemporalityPreference: EMPTY_IS_UNSET }

/// Export of metrics to a collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtlpMetricsSettings {
    /// The collector.
    pub collector: CollectorSettings,
    /// Headers of each request, by name.
    pub headers: Vec<(String, Secret)>,
    /// Interval of exports, 1 s to 1 h.
    pub interval: Duration,
    /// Time that counts are for.
    pub temporality: Temporality,
}

/// Variables of the export of metrics over OTLP.
static METRIC_VARIABLES: OtlpSignalVariables = OtlpSignalVariables {
    path: "/v1/metrics",
    endpoint: &OTEL_EXPORTER_OTLP_METRICS_ENDPOINT,
    protocol: &OTEL_EXPORTER_OTLP_METRICS_PROTOCOL,
    headers: &OTEL_EXPORTER_OTLP_METRICS_HEADERS,
    timeout: &OTEL_EXPORTER_OTLP_METRICS_TIMEOUT,
    compression: &OTEL_EXPORTER_OTLP_METRICS_COMPRESSION,
    certificate: &OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE,
    client_certificate: &OTEL_EXPORTER_OTLP_METRICS_CLIENT_CERTIFICATE,
    client_key: &OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY,
};

impl OtlpMetricsSettings {
    /// Reads the settings; `None` if no metrics are exported.
    pub(super) fn from_values(values: &mut Values) -> Option<Self> {
        let TextList(exporters) = values.get(&OTEL_METRICS_EXPORTER);
        let asks_for = |name: &str| exporters.iter().any(|exporter| exporter.trim() == name);
        let unknown = exporters.iter().map(|name| name.trim()).find(|name| !["otlp", "none", ""].contains(name));
        if unknown.is_some() {
            let what = "names another exporter than otlp, which has no effect; USE_PROMETHEUS serves Prometheus";
            values.add_notice(&OTEL_METRICS_EXPORTER, what);
        }
        if !asks_for("otlp") || values.get(&OTEL_SDK_DISABLED) || values.get(&DISABLE_STATS) {
            return None;
        }
        let temporality = match values.get(&OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE) {
            TemporalityPreference::Cumulative => Temporality::Cumulative,
            TemporalityPreference::Delta | TemporalityPreference::LowMemory => Temporality::Delta,
        };
        Some(Self {
            // A problem with the headers is found here.
            collector: CollectorSettings::from_signal_variables(values, &METRIC_VARIABLES),
            headers: read_headers(values),
            interval: Duration::from_millis(values.get(&OTEL_METRIC_EXPORT_INTERVAL)),
            temporality,
        })
    }
}

/// Reads the headers for all signals, and those for metrics, which take precedence.
fn read_headers(values: &Values) -> Vec<(String, Secret)> {
    let mut headers: Vec<(String, Secret)> = Vec::new();
    for setting in [&OTEL_EXPORTER_OTLP_HEADERS, &OTEL_EXPORTER_OTLP_METRICS_HEADERS] {
        let Some(given) = values.get(setting) else { continue };
        for (name, value) in given.reveal().split(',').filter_map(parse_attribute) {
            let name = name.to_ascii_lowercase();
            headers.retain(|(other, _)| *other != name);
            headers.push((name, Secret::new(value)));
        }
    }
    headers
}

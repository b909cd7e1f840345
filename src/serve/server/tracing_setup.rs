//! Builds the tracer from the settings: first the exporter, which can fail, then its queue and thread.
//!
//! Certificate files are read once, at startup, so that a problem with one of them is a startup error.

use std::sync::Arc;

use crate::base::threads;
use crate::settings::problem::UnusableSetting;
use crate::settings::tracing::TracingSettings;
use crate::telemetry::otlp::{self, OtlpExporter};
use crate::telemetry::traces::Tracer;
use crate::telemetry::traces::span_queue::{ExportThread, SpanQueue};

/// Builds the exporter.
///
/// # Errors
/// Names the setting and the problem.
pub(super) fn exporter(settings: &TracingSettings) -> Result<OtlpExporter, UnusableSetting> {
    let collector = &settings.collector;
    let options = collector.options(threads::lower_priority)?;
    otlp::span_exporter(&options).map_err(|error| UnusableSetting {
        setting: collector.setting,
        shown: collector.endpoint.clone(),
        what: error.to_string(),
    })
}

/// Starts to export.
pub(super) fn start_tracer(settings: &TracingSettings, exporter: OtlpExporter) -> Tracer {
    let thread = ExportThread { setting: settings.collector.setting, on_start: threads::lower_priority };
    let span_queue = SpanQueue::start(exporter, &otlp::resource(&settings.collector.resource), settings.queue, thread);
    let (protocol, endpoint) = (settings.collector.protocol, settings.collector.endpoint.as_str());
    tracing::warn!(?protocol, endpoint, ratio = settings.sampler.ratio, "exporting traces");
    Tracer {
        sampler: settings.sampler,
        formats: settings.formats,
        shows_descriptors: settings.records_descriptors,
        span_queue: Arc::new(span_queue),
    }
}

//! Export and sampling of traces.

use std::time::Duration;

use super::choices::SamplerKind;
use super::collector::{CollectorSettings, TRACES};
use super::setting::AnySetting;
use super::table::tracing::*;
use super::value::text::TextList;
use super::values::Values;
use crate::telemetry::traces::TraceSampler;
use crate::telemetry::traces::propagation::PropagationFormats;
use crate::telemetry::traces::span_queue::SpanQueueOptions;

/// Export and sampling of traces.
#[derive(Clone, Debug, PartialEq)]
pub struct TracingSettings {
    /// Connection to the collector.
    pub collector: CollectorSettings,
    /// Selection of the requests that are traced.
    pub sampler: TraceSampler,
    /// Formats of trace context that are read from requests.
    pub formats: PropagationFormats,
    /// Bounds of the export queue.
    pub queue: SpanQueueOptions,
    /// `true` if spans hold keys and values of descriptors.
    pub records_descriptors: bool,
}

/// Settings that the export of traces shares with that of logs.
const SHARED: [&dyn AnySetting; 14] = [
    &TRACING_SERVICE_NAME,
    &TRACING_SERVICE_NAMESPACE,
    &TRACING_SERVICE_INSTANCE_ID,
    &TRACING_EXPORTER_PROTOCOL,
    &OTEL_SERVICE_NAME,
    &OTEL_RESOURCE_ATTRIBUTES,
    &OTEL_EXPORTER_OTLP_ENDPOINT,
    &OTEL_EXPORTER_OTLP_PROTOCOL,
    &OTEL_EXPORTER_OTLP_HEADERS,
    &OTEL_EXPORTER_OTLP_TIMEOUT,
    &OTEL_EXPORTER_OTLP_COMPRESSION,
    &OTEL_EXPORTER_OTLP_CERTIFICATE,
    &OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE,
    &OTEL_EXPORTER_OTLP_CLIENT_KEY,
];

impl TracingSettings {
    /// Reads the settings; `None` if no traces are exported. `exports_logs` means that logs use the shared ones.
    pub(super) fn read(values: &mut Values, exports_logs: bool) -> Option<Self> {
        let tracing = Self {
            collector: CollectorSettings::read(values, &TRACES),
            sampler: sampler(values),
            formats: formats(values),
            queue: queue(values),
            records_descriptors: values.get(&TOLLKEEPER_TRACE_DESCRIPTORS),
        };
        if values.get(&TRACING_ENABLED) && !values.get(&OTEL_SDK_DISABLED) {
            return Some(tracing);
        }
        let is_enabled = values.get(&TRACING_ENABLED);
        let why = if is_enabled { "OTEL_SDK_DISABLED is true" } else { "it is only read with TRACING_ENABLED=true" };
        let is_read = |name| exports_logs && SHARED.iter().any(|shared| shared.name() == name);
        for setting in GROUP.settings {
            let name = setting.name();
            if !setting.info().is_family() && name != OTEL_SDK_DISABLED.name() && !is_read(name) {
                values.ignore_if_changed(*setting, why);
            }
        }
        None
    }
}

fn sampler(values: &mut Values) -> TraceSampler {
    let otel = values.get(&OTEL_TRACES_SAMPLER);
    let (true, Some(otel)) = (!values.is_set(&TRACING_SAMPLING_RATE), otel) else {
        values.ignore_if_changed(&OTEL_TRACES_SAMPLER, "TRACING_SAMPLING_RATE is set");
        let is_unset = otel.is_none();
        let why = if is_unset { "OTEL_TRACES_SAMPLER is not set" } else { "TRACING_SAMPLING_RATE is set" };
        values.ignore_if_changed(&OTEL_TRACES_SAMPLER_ARG, why);
        return TraceSampler { follows_parent: true, ratio: values.get(&TRACING_SAMPLING_RATE) };
    };
    let ratio = match otel.selection {
        SamplerKind::All => 1.0,
        SamplerKind::None => 0.0,
        SamplerKind::Ratio => values.get(&OTEL_TRACES_SAMPLER_ARG),
    };
    TraceSampler { follows_parent: otel.follows_parent, ratio }
}

fn formats(values: &mut Values) -> PropagationFormats {
    let TextList(names) = values.get(&OTEL_PROPAGATORS);
    let names: Vec<&str> = names.iter().map(|name| name.trim()).filter(|name| !name.is_empty()).collect();
    if names.iter().any(|name| !["tracecontext", "baggage", "b3", "b3multi", "none"].contains(name)) {
        let fix = "give tracecontext, b3 and b3multi, or fewer of them, or none";
        values.problem(&OTEL_PROPAGATORS, "names an unknown format", fix);
    }
    let has = |name| names.contains(&name);
    PropagationFormats { tracecontext: has("tracecontext"), b3: has("b3"), b3_multi: has("b3multi") }
}

fn queue(values: &mut Values) -> SpanQueueOptions {
    let queue = SpanQueueOptions {
        max_spans: values.get(&OTEL_BSP_MAX_QUEUE_SIZE),
        max_batch_spans: values.get(&OTEL_BSP_MAX_EXPORT_BATCH_SIZE),
        delay: Duration::from_millis(values.get(&OTEL_BSP_SCHEDULE_DELAY)),
    };
    if queue.max_batch_spans <= queue.max_spans {
        return queue;
    }
    if values.is_set(&OTEL_BSP_MAX_EXPORT_BATCH_SIZE) {
        let fix = "give less, or a larger OTEL_BSP_MAX_QUEUE_SIZE";
        values.problem(&OTEL_BSP_MAX_EXPORT_BATCH_SIZE, "more than OTEL_BSP_MAX_QUEUE_SIZE", fix);
    }
    SpanQueueOptions { max_batch_spans: queue.max_spans, ..queue }
}

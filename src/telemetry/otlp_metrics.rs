//! Export of metrics to an OpenTelemetry collector, in the caller's thread.
//!
//! Metrics have the names, labels and bounds that Prometheus gets, because they are translated from the same families
//! when they are exported; counting costs nothing more. The instruments of OpenTelemetry's SDK would count a second
//! time, so only its messages are used. With delta temporality a count that did not arrive is part of the next one.
//!
//! Decides: which metrics go over OTLP; how many points a request has; when a count is sent again.

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_client::MetricsServiceClient;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value as NumberValue;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, ResourceMetrics,
    ScopeMetrics, Sum,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message as _;
use tokio::runtime::{Builder, Runtime};
use tonic::codec::CompressionEncoding;
use tonic::metadata::{MetadataKey, MetadataMap, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use ureq::Agent;

use super::metrics::histogram::{BUCKET_BOUNDS_US, HistogramSnapshot};
use super::metrics::{Family, Label, MetricKind, MetricValue, Series};
use super::otlp::{self, OtlpError, OtlpOptions, OtlpProtocol};
use crate::base::clock::Time;
use crate::base::text::truncate_and_escape;

/// Maximum number of data points in a request; collectors accept 4 MiB by default.
const MAX_POINTS_PER_REQUEST: usize = 5_000;

/// Time that exported counts are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Temporality {
    /// Since the start of the process.
    Cumulative,
    /// Since the last export that arrived.
    Delta,
}

/// Options of an exporter of metrics.
#[derive(Clone, Debug)]
pub struct OtlpMetricsOptions {
    /// The collector.
    pub collector: OtlpOptions,
    /// Headers of each request.
    pub headers: Vec<(String, String)>,
    /// True to compress requests with gzip.
    pub is_compressed: bool,
    /// Time that counts are for.
    pub temporality: Temporality,
    /// Attributes on all data points; a label of the same name takes precedence.
    pub tags: Vec<(String, String)>,
    /// Attributes of the resource, as for [`otlp::build_resource`].
    pub resource: Vec<(String, String)>,
}

/// Numbers of export requests of this process.
#[derive(Debug, Default)]
pub struct MetricExportCounts {
    is_used: AtomicBool,
    sent: AtomicU64,
    failed: AtomicU64,
}

/// Numbers of export requests.
pub static METRIC_EXPORT_COUNTS: MetricExportCounts =
    MetricExportCounts { is_used: AtomicBool::new(false), sent: AtomicU64::new(0), failed: AtomicU64::new(0) };

impl MetricExportCounts {
    /// Returns the number of requests that the collector accepted, and of those that it did not; `None` if no metrics
    /// are exported.
    pub fn counts_by_outcome(&self) -> Option<[(&'static str, u64); 2]> {
        let counts = [("sent", self.sent.load(Ordering::Relaxed)), ("failed", self.failed.load(Ordering::Relaxed))];
        self.is_used.load(Ordering::Relaxed).then_some(counts)
    }
}

/// Exporter of metrics that blocks its caller.
#[derive(Debug)]
pub struct BlockingMetricExporter {
    transport: Transport,
    timeout: Duration,
    resource: Resource,
    temporality: Temporality,
    tags: Vec<(String, String)>,
    started_ns: u64,
    /// Last values that arrived, by series; empty unless counts are deltas.
    arrived: HashMap<SeriesKey, ArrivedValue>,
}

/// Connection to the collector, made when it is first used.
#[derive(Debug)]
enum Transport {
    Http { agent: Agent, url: String, headers: Vec<(String, String)>, is_compressed: bool },
    Grpc { client: Box<MetricsServiceClient<Channel>>, metadata: MetadataMap, runtime: BackgroundDropRuntime },
}

/// Runtime that may be dropped in a task of another one, as at a failed start.
#[derive(Debug)]
struct BackgroundDropRuntime(Option<Runtime>);

impl Drop for BackgroundDropRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Name and labels of a series.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct SeriesKey {
    name: String,
    labels: Vec<Label>,
}

/// Value that arrived at the collector.
#[derive(Clone, Debug)]
struct ArrivedValue {
    value: MetricValue,
    at_ns: u64,
}

/// Metrics of one request.
#[derive(Debug, Default)]
struct Batch {
    metrics: Vec<Metric>,
    points: usize,
    /// Values to remember once the request has arrived.
    values: Vec<(SeriesKey, ArrivedValue)>,
}

impl BlockingMetricExporter {
    /// Creates an exporter, which connects when it sends. Counts begin at `started`.
    ///
    /// # Errors
    /// The options are invalid.
    pub fn new(options: &OtlpMetricsOptions, started: Time) -> Result<Self, OtlpError> {
        METRIC_EXPORT_COUNTS.is_used.store(true, Ordering::Relaxed);
        let attributes = otlp::build_resource(&options.resource);
        let attributes = attributes.iter().map(|(name, value)| build_attribute(name.to_string(), value.to_string()));
        Ok(Self {
            transport: Transport::new(options)?,
            timeout: options.collector.timeout,
            resource: Resource { attributes: attributes.collect(), ..Resource::default() },
            temporality: options.temporality,
            tags: options.tags.clone(),
            started_ns: started.as_micros().saturating_mul(1000),
            arrived: HashMap::new(),
        })
    }

    /// Exports the families that `collect` passes on, at `now`, in as many requests as they need.
    ///
    /// # Errors
    /// A request did not arrive; the others did. The text has no secrets.
    pub fn export(&mut self, now: Time, collect: impl FnOnce(&mut dyn FnMut(Family))) -> Result<(), String> {
        let now_ns = now.as_micros().saturating_mul(1000);
        let mut batches = vec![Batch::default()];
        collect(&mut |family| self.add_family(&mut batches, family, now_ns));
        let mut outcome = Ok(());
        let mut arrived = HashMap::new();
        for batch in batches {
            let Batch { metrics, points, values } = batch;
            if points == 0 {
                continue;
            }
            match self.transport.send(self.build_request(metrics), self.timeout) {
                Ok(()) => {
                    METRIC_EXPORT_COUNTS.sent.fetch_add(1, Ordering::Relaxed);
                    arrived.extend(values);
                }
                Err(error) => {
                    METRIC_EXPORT_COUNTS.failed.fetch_add(1, Ordering::Relaxed);
                    let kept = values.into_iter().filter_map(|(key, _)| self.arrived.remove_entry(&key));
                    arrived.extend(kept);
                    outcome = Err(error);
                }
            }
        }
        // Series that are gone are forgotten.
        self.arrived = arrived;
        outcome
    }

    fn build_request(&self, metrics: Vec<Metric>) -> ExportMetricsServiceRequest {
        let scope = InstrumentationScope {
            name: "tollkeeper".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..InstrumentationScope::default()
        };
        let scope = ScopeMetrics { scope: Some(scope), metrics, ..ScopeMetrics::default() };
        let resource = Some(self.resource.clone());
        let metrics = ResourceMetrics { resource, scope_metrics: vec![scope], ..ResourceMetrics::default() };
        ExportMetricsServiceRequest { resource_metrics: vec![metrics] }
    }

    /// Adds the series of a family to the last batch, and to new ones when it is full.
    fn add_family(&self, batches: &mut Vec<Batch>, family: Family, now_ns: u64) {
        let Family { name, help, kind, mut series } = family;
        while !series.is_empty() {
            let room = batches.last().map_or(0, |batch| MAX_POINTS_PER_REQUEST - batch.points);
            if room == 0 {
                batches.push(Batch::default());
                continue;
            }
            let rest = series.split_off(room.min(series.len()));
            let Some(batch) = batches.last_mut() else { return };
            batch.points += series.len();
            let data = self.build_metric_data(batch, Family { name: name.clone(), help, kind, series }, now_ns);
            let (name, description) = (name.to_string(), help.to_owned());
            batch.metrics.push(Metric { name, description, data: Some(data), ..Metric::default() });
            series = rest;
        }
    }

    fn build_metric_data(&self, batch: &mut Batch, family: Family, now_ns: u64) -> Data {
        let Family { name, kind, series, .. } = family;
        let aggregation_temporality = match self.temporality {
            Temporality::Cumulative => AggregationTemporality::Cumulative.into(),
            Temporality::Delta => AggregationTemporality::Delta.into(),
        };
        let mut numbers = Vec::new();
        let mut histograms = Vec::new();
        for Series { labels, value, .. } in series {
            let attributes = self.build_attributes(&labels);
            let (value, start_ns) = match (self.temporality, kind) {
                (Temporality::Delta, MetricKind::Counter | MetricKind::Histogram) => {
                    let key = SeriesKey { name: name.to_string(), labels };
                    let delta = self.delta_since_last_arrival(&key, &value);
                    batch.values.push((key, ArrivedValue { value, at_ns: now_ns }));
                    delta
                }
                _ => (value, self.started_ns),
            };
            match value {
                MetricValue::Histogram(snapshot) => {
                    histograms.push(build_histogram_point(&snapshot, attributes, start_ns, now_ns));
                }
                MetricValue::Counter(count) => {
                    let value = NumberValue::AsInt(count.try_into().unwrap_or(i64::MAX));
                    numbers.push(build_number_point(value, attributes, start_ns, now_ns));
                }
                MetricValue::Gauge(level) => {
                    numbers.push(build_number_point(NumberValue::AsDouble(level), attributes, start_ns, now_ns));
                }
            }
        }
        match kind {
            MetricKind::Gauge => Data::Gauge(Gauge { data_points: numbers }),
            MetricKind::Counter => Data::Sum(Sum { data_points: numbers, aggregation_temporality, is_monotonic: true }),
            MetricKind::Histogram => Data::Histogram(Histogram { data_points: histograms, aggregation_temporality }),
        }
    }

    /// Returns what was counted since the last value that arrived, and the time of that in nanoseconds.
    fn delta_since_last_arrival(&self, key: &SeriesKey, value: &MetricValue) -> (MetricValue, u64) {
        let Some(last) = self.arrived.get(key) else { return (value.clone(), self.started_ns) };
        (subtract(value, &last.value).unwrap_or_else(|| value.clone()), last.at_ns)
    }

    fn build_attributes(&self, labels: &[Label]) -> Vec<KeyValue> {
        let tags = self.tags.iter().filter(|(name, _)| labels.iter().all(|(own, _)| own != name));
        let labels = labels.iter().map(|(name, value)| build_attribute(name.to_string(), value.clone()));
        labels.chain(tags.map(|(name, value)| build_attribute(name.clone(), value.clone()))).collect()
    }
}

/// Returns the difference of two counts; `None` if the second is larger, because counting began anew.
fn subtract(value: &MetricValue, last: &MetricValue) -> Option<MetricValue> {
    match (value, last) {
        (MetricValue::Counter(count), MetricValue::Counter(last)) => count.checked_sub(*last).map(MetricValue::Counter),
        (MetricValue::Gauge(level), MetricValue::Gauge(last)) => {
            (level >= last).then_some(MetricValue::Gauge(level - last))
        }
        (MetricValue::Histogram(snapshot), MetricValue::Histogram(last)) => {
            let mut counts = snapshot.counts;
            for (count, last) in counts.iter_mut().zip(last.counts) {
                *count = count.checked_sub(last)?;
            }
            let sum_ns = snapshot.sum_ns.wrapping_sub(last.sum_ns);
            Some(MetricValue::Histogram(Box::new(HistogramSnapshot { counts, sum_ns })))
        }
        _ => None,
    }
}

fn build_attribute(key: String, value: String) -> KeyValue {
    let value = Some(AnyValue { value: Some(any_value::Value::StringValue(value)) });
    KeyValue { key, value, ..KeyValue::default() }
}

fn build_number_point(
    value: NumberValue,
    attributes: Vec<KeyValue>,
    start_time_unix_nano: u64,
    time_unix_nano: u64,
) -> NumberDataPoint {
    NumberDataPoint {
        attributes,
        start_time_unix_nano,
        time_unix_nano,
        value: Some(value),
        ..NumberDataPoint::default()
    }
}

/// Builds a histogram of durations in seconds.
#[expect(clippy::cast_precision_loss, reason = "OTLP has only doubles")]
fn build_histogram_point(
    snapshot: &HistogramSnapshot,
    attributes: Vec<KeyValue>,
    start_time_unix_nano: u64,
    time_unix_nano: u64,
) -> HistogramDataPoint {
    HistogramDataPoint {
        attributes,
        start_time_unix_nano,
        time_unix_nano,
        count: snapshot.observation_count(),
        sum: Some(snapshot.sum_ns as f64 / 1e9),
        bucket_counts: snapshot.counts.to_vec(),
        explicit_bounds: BUCKET_BOUNDS_US.iter().map(|bound| *bound as f64 / 1e6).collect(),
        ..HistogramDataPoint::default()
    }
}

impl Transport {
    fn new(options: &OtlpMetricsOptions) -> Result<Self, OtlpError> {
        let OtlpMetricsOptions { collector, headers, is_compressed, .. } = options;
        match collector.protocol {
            OtlpProtocol::Http => {
                let (agent, url) = (otlp::build_http_agent(collector)?, collector.endpoint.clone());
                Ok(Self::Http { agent, url, headers: headers.clone(), is_compressed: *is_compressed })
            }
            OtlpProtocol::Grpc => {
                let runtime = BackgroundDropRuntime(Some(Builder::new_current_thread().enable_all().build()?));
                let endpoint = Endpoint::from_shared(collector.endpoint.clone())?.timeout(collector.timeout);
                let endpoint = match collector.endpoint.starts_with("https://") {
                    true => endpoint.tls_config(otlp::build_tonic_tls(&collector.tls))?,
                    false => endpoint,
                };
                let entered = runtime.0.as_ref().map(Runtime::enter);
                let mut client = MetricsServiceClient::new(endpoint.connect_lazy());
                drop(entered);
                if *is_compressed {
                    client = client.send_compressed(CompressionEncoding::Gzip);
                }
                Ok(Self::Grpc { client: Box::new(client), metadata: build_metadata(headers), runtime })
            }
        }
    }

    /// Sends a request, and waits for its reply for at most `limit`.
    fn send(&mut self, message: ExportMetricsServiceRequest, limit: Duration) -> Result<(), String> {
        match self {
            Self::Http { agent, url, headers, is_compressed } => {
                let mut request = agent.post(url.as_str()).header("content-type", "application/x-protobuf");
                for (name, value) in headers.iter() {
                    request = request.header(name.as_str(), value.as_str());
                }
                let mut body = message.encode_to_vec();
                if *is_compressed {
                    request = request.header("content-encoding", "gzip");
                    body = compress(&body).map_err(|error| error.to_string())?;
                }
                let status = request.send(&body).map_err(|error| error.to_string())?.status();
                if status.is_success() { Ok(()) } else { Err(format!("the collector answers {status}")) }
            }
            Self::Grpc { client, metadata, runtime } => {
                let mut request = tonic::Request::new(message);
                *request.metadata_mut() = metadata.clone();
                let BackgroundDropRuntime(Some(runtime)) = runtime else {
                    return Err("the exporter has ended".to_owned());
                };
                let sent = runtime.block_on(async { tokio::time::timeout(limit, client.export(request)).await });
                match sent {
                    Ok(Ok(_)) => Ok(()),
                    Ok(Err(status)) => Err(describe_status(&status)),
                    Err(_) => Err(format!("no answer of the collector in {limit:?}")),
                }
            }
        }
    }
}

/// Describes an answer of the collector, whose text has any length.
fn describe_status(status: &tonic::Status) -> String {
    format!("the collector answers {:?}: {}", status.code(), truncate_and_escape(status.message(), 200))
}

fn compress(body: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(body)?;
    encoder.finish()
}

/// Builds the headers of calls; the settings have checked them.
fn build_metadata(headers: &[(String, String)]) -> MetadataMap {
    let mut metadata = MetadataMap::new();
    for (name, value) in headers {
        let name = MetadataKey::from_bytes(name.as_bytes());
        if let (Ok(name), Ok(value)) = (name, MetadataValue::try_from(value.as_str())) {
            metadata.insert(name, value);
        }
    }
    metadata
}

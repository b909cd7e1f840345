//! Metrics over OTLP, compared with the page for Prometheus.

use std::collections::BTreeMap;

use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use opentelemetry_proto::tonic::metrics::v1::{HistogramDataPoint, NumberDataPoint};

use super::{SHOP, Watched, wait_for, with_rules};
use kit::otlp_collector::{OtlpCollector, ReceivedMetrics, texts};
use kit::tollkeeper::Setup;

/// Temporality of data points, in the numbers of OTLP.
const DELTA: i32 = 1;
const CUMULATIVE: i32 = 2;

/// Exports metrics to the collector every second.
fn exporting(collector: &OtlpCollector) -> Setup {
    with_rules(SHOP)
        .env("OTEL_METRICS_EXPORTER", "otlp")
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url())
        .env("OTEL_METRIC_EXPORT_INTERVAL", "1000")
}

/// Name of a sample as on the page for Prometheus.
fn sample_name(name: &str, labels: &BTreeMap<String, String>) -> String {
    let labels: Vec<String> = labels.iter().map(|(label, value)| format!("{label}={value:?}")).collect();
    if labels.is_empty() { name.to_owned() } else { format!("{name}{{{}}}", labels.join(",")) }
}

fn number(point: &NumberDataPoint) -> f64 {
    match point.value {
        #[expect(clippy::cast_precision_loss, reason = "numbers in tests are small")]
        Some(Value::AsInt(count)) => count as f64,
        Some(Value::AsDouble(level)) => level,
        None => panic!("no value: {point:?}"),
    }
}

/// Numbers and histograms of a request.
#[derive(Debug, Default)]
struct Exported {
    counters: BTreeMap<String, f64>,
    gauges: BTreeMap<String, f64>,
    histograms: BTreeMap<String, HistogramDataPoint>,
}

impl Exported {
    fn of(received: &ReceivedMetrics, temporality: i32) -> Self {
        let mut exported = Self::default();
        for metric in &received.metrics {
            assert!(!metric.description.is_empty(), "{}", metric.name);
            let name = |attributes| sample_name(&metric.name, &texts(attributes));
            match metric.data.as_ref().expect("a metric has data") {
                Data::Sum(sum) => {
                    assert_eq!((sum.is_monotonic, sum.aggregation_temporality), (true, temporality));
                    let points = sum.data_points.iter().map(|point| (name(&point.attributes), number(point)));
                    exported.counters.extend(points);
                }
                Data::Gauge(gauge) => {
                    let points = gauge.data_points.iter().map(|point| (name(&point.attributes), number(point)));
                    exported.gauges.extend(points);
                }
                Data::Histogram(histogram) => {
                    assert_eq!(histogram.aggregation_temporality, temporality);
                    let points = histogram.data_points.iter().map(|point| (name(&point.attributes), point.clone()));
                    exported.histograms.extend(points);
                }
                other => panic!("{other:?}"),
            }
        }
        exported
    }
}

const USER_HITS: &str = r#"ratelimit_service_rate_limit_total_hits{domain="shop",key1="user"}"#;

#[test]
fn metrics_over_otlp_are_those_of_prometheus() {
    for protocol in ["http/protobuf", "grpc"] {
        let collector = OtlpCollector::start();
        let setup = exporting(&collector)
            .env("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", protocol)
            .env("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "authorization=Bearer%20s3cret")
            .env("OTEL_EXPORTER_OTLP_HEADERS", "authorization=other")
            .env("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "gzip")
            .env("OTEL_SERVICE_NAME", "limits")
            .env("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
            .env("EXTRA_TAGS", "zone:eu");
        let watched = Watched::start(setup);
        for _ in 0..3 {
            watched.admits("shop", "user=ann", 1);
        }
        let hits = sample_name(
            "ratelimit_service_rate_limit_total_hits",
            &[("domain", "shop"), ("key1", "user"), ("zone", "eu")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
        );
        let received = wait_for("the hits", || {
            let last = collector.metrics().pop()?;
            (Exported::of(&last, CUMULATIVE).counters.get(&hits) == Some(&3.0)).then_some(last)
        });
        assert_eq!(received.authorization, "Bearer s3cret", "{protocol}");
        assert_eq!(received.encoding, "gzip", "{protocol}");
        for (name, value) in [("service.name", "limits"), ("deployment.environment.name", "test")] {
            assert_eq!(received.resource.get(name).map(String::as_str), Some(value), "{:?}", received.resource);
        }
        let exported = Exported::of(&received, CUMULATIVE);
        let page = watched.scrape();
        // The same series.
        let of_page = |kind: &str| -> Vec<&String> {
            let family = |name: &str| name.split('{').next().unwrap_or_default().to_owned();
            let has_kind = |name: &&String| page.types.get(&family(name)).is_some_and(|found| found == kind);
            page.samples.keys().filter(has_kind).collect()
        };
        assert_eq!(exported.counters.keys().collect::<Vec<_>>(), of_page("counter"), "{protocol}");
        assert_eq!(exported.gauges.keys().collect::<Vec<_>>(), of_page("gauge"), "{protocol}");
        // Bounds and counts of a histogram.
        let name = r#"ratelimit_service_response_time_seconds{grpc_method="ShouldRateLimit",zone="eu"}"#;
        let histogram = &exported.histograms[name];
        assert_eq!(histogram.explicit_bounds.len() + 1, histogram.bucket_counts.len());
        for bound in &histogram.explicit_bounds {
            let bucket = "ratelimit_service_response_time_seconds_bucket";
            let sample = format!(r#"{bucket}{{grpc_method="ShouldRateLimit",le="{bound}",zone="eu"}}"#);
            assert!(page.samples.contains_key(&sample), "{sample} in {:#?}", page.with_prefix(bucket));
        }
        let decisions = &exported.histograms[r#"tollkeeper_decision_duration_seconds{zone="eu"}"#];
        assert_eq!((decisions.count, decisions.bucket_counts.iter().sum::<u64>()), (3, 3));
        assert!(decisions.sum.is_some_and(|sum| sum > 0.0));
        assert!(decisions.start_time_unix_nano > 0 && decisions.start_time_unix_nano < decisions.time_unix_nano);
        assert!(!watched.server.stderr().contains("s3cret"));
    }
}

#[test]
fn deltas_over_otlp_add_up_although_requests_are_refused() {
    let collector = OtlpCollector::start();
    let setup = exporting(&collector).env("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta");
    let mut watched = Watched::start(setup);
    let sum = || -> f64 {
        let requests = collector.metrics();
        requests.iter().filter_map(|request| Exported::of(request, DELTA).counters.get(USER_HITS).copied()).sum()
    };
    watched.admits("shop", "user=ann", 1);
    wait_for("the first hit", || (sum() >= 1.0).then_some(()));
    collector.refuse_metrics(true);
    watched.admits("shop", "user=ann", 1);
    let failed = r#"tollkeeper_otlp_metric_exports_total{outcome="failed"}"#;
    wait_for("a refused export", || (watched.scrape().count(failed) >= 2).then_some(()));
    collector.refuse_metrics(false);
    wait_for("the hit that was refused", || (sum() >= 2.0).then_some(()));
    // The last export is that of the end.
    watched.admits("shop", "user=ann", 1);
    watched.server.signal("TERM");
    watched.server.wait();
    let said = watched.server.stderr();
    // A slow machine does not send it within the second that it has, and says so.
    let expected = if said.contains("last metrics not sent") { 2.0..=3.0 } else { 3.0..=3.0 };
    assert!(expected.contains(&sum()), "{}: {said}", sum());
    assert!(said.contains("metrics not sent over OTLP"), "{said}");
}

#[test]
fn start_that_fails_for_another_reason_ends_with_its_error() {
    for protocol in ["http/protobuf", "grpc"] {
        let collector = OtlpCollector::start();
        let setup = exporting(&collector)
            .env("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
            .env("GRPC_SERVER_USE_TLS", "true")
            .env("GRPC_SERVER_TLS_CERT", "/nonexistent/tls.crt")
            .env("GRPC_SERVER_TLS_KEY", "/nonexistent/tls.key");
        let ended = setup.run();
        assert_eq!(ended.code, Some(2), "{protocol}: {}", ended.stderr);
        assert!(
            ended.stderr.contains("GRPC_SERVER_TLS_CERT") && !ended.stderr.contains("panicked"),
            "{}",
            ended.stderr
        );
    }
}

#[test]
fn nothing_is_sent_over_otlp_unless_asked_for() {
    let collector = OtlpCollector::start();
    let setup =
        with_rules(SHOP).env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url()).env("OTEL_METRIC_EXPORT_INTERVAL", "1000");
    let mut watched = Watched::start(setup);
    watched.admits("shop", "user=ann", 1);
    // The end would send a last export.
    watched.server.signal("TERM");
    watched.server.wait();
    assert!(collector.metrics().is_empty());
    let said = watched.server.stderr();
    assert!(said.contains("it is only read with OTEL_METRICS_EXPORTER=otlp"), "{said}");
}

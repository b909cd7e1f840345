//! Encodes families for Prometheus.
//!
//! The `prometheus` crate writes the text. This module adds tags to series, and applies the operator's mapping of names
//! if there is one. If the mapping gives two series the same name and labels, they are added up.
//!
//! Decides: names, tags and labels of Prometheus, and their escapes.

use std::borrow::Cow;
use std::collections::BTreeMap;

use prometheus::TextEncoder;
use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};

use super::histogram::{BUCKET_BOUNDS_US, HistogramSnapshot};
use super::mapper::Mapper;
use super::{Family, Label, MetricKind, MetricValue, Series};

/// Options of the page for Prometheus.
#[derive(Debug, Default)]
pub struct ExpositionOptions {
    /// Labels on every series.
    pub tags: Vec<(String, String)>,
    /// Mapping of statsd names; `None` uses the families' own names and labels.
    pub mapper: Option<Mapper>,
    /// True if response times are in milliseconds instead of seconds.
    pub milliseconds: bool,
}

/// Page in the Prometheus text format, being built.
#[derive(Debug)]
pub struct TextPage<'o> {
    options: &'o ExpositionOptions,
    text: String,
    /// Mapped families by name.
    mapped: BTreeMap<String, MappedFamily>,
    /// Number of names that were mapped.
    mapped_names: usize,
}

#[derive(Debug)]
struct MappedFamily {
    kind: MetricKind,
    help: &'static str,
    series: BTreeMap<Vec<(String, String)>, MergedValue>,
}

/// Sum of all values that are mapped to one series.
#[derive(Debug, Default)]
struct MergedValue {
    number: f64,
    /// Histogram and its scale.
    histogram: Option<(HistogramSnapshot, f64)>,
}

impl<'o> TextPage<'o> {
    /// An empty page.
    pub const fn new(options: &'o ExpositionOptions) -> Self {
        Self { options, text: String::new(), mapped: BTreeMap::new(), mapped_names: 0 }
    }

    /// Adds a family. A family without series adds nothing.
    pub fn add_family(&mut self, family: Family) {
        let Family { name, help, kind, series } = family;
        let Some(mapper) = &self.options.mapper else {
            let metrics = series.into_iter().map(|series| self.build_metric(kind, series)).collect();
            return self.write_family(&name, help, kind, metrics);
        };
        let (named, other): (Vec<Series>, Vec<Series>) =
            series.into_iter().partition(|series| series.statsd_name.is_some());
        for Series { statsd_name, value, .. } in named {
            let statsd_name = statsd_name.unwrap_or_default();
            self.mapped_names += 1;
            if let Some(mapped) = mapper.map_name(&statsd_name, kind) {
                let new = || MappedFamily { kind, help, series: BTreeMap::new() };
                let family = self.mapped.entry(mapped.name.clone()).or_insert_with(new);
                if family.kind == kind {
                    family.series.entry(mapped.labels.clone()).or_default().add_value(value, mapped.scale);
                }
            }
        }
        let metrics = other.into_iter().map(|series| self.build_metric(kind, series)).collect();
        self.write_family(&name, help, kind, metrics);
    }

    /// Returns the page.
    pub fn into_text(mut self) -> String {
        for (name, MappedFamily { kind, help, series }) in std::mem::take(&mut self.mapped) {
            let metrics =
                series.into_iter().map(|(labels, value)| self.build_mapped_metric(kind, labels, &value)).collect();
            self.write_family(&name, help, kind, metrics);
        }
        if let Some(mapper) = &self.options.mapper {
            mapper.clear_oversized_cache(self.mapped_names);
        }
        self.text
    }

    fn write_family(&mut self, name: &str, help: &str, kind: MetricKind, metrics: Vec<Metric>) {
        if metrics.is_empty() {
            return;
        }
        let mut family = MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(match kind {
            MetricKind::Counter => MetricType::COUNTER,
            MetricKind::Gauge => MetricType::GAUGE,
            MetricKind::Histogram => MetricType::HISTOGRAM,
        });
        family.set_metric(metrics);
        if let Err(error) = TextEncoder::new().encode_utf8(&[family], &mut self.text) {
            tracing::error!(name, %error, "metric cannot be encoded for prometheus");
        }
    }

    fn build_metric(&self, kind: MetricKind, series: Series) -> Metric {
        let mut metric = Metric::from_label(self.build_labels(series.labels));
        match series.value {
            MetricValue::Histogram(snapshot) => {
                // Only metrics that envoyproxy/ratelimit has too may be in milliseconds.
                let is_compatible = series.statsd_name.is_some();
                let units_per_second = if self.options.milliseconds && is_compatible { 1e3 } else { 1.0 };
                metric.set_histogram(build_histogram(&snapshot, units_per_second));
            }
            MetricValue::Counter(count) => set_metric_value(&mut metric, kind, to_f64(count)),
            MetricValue::Gauge(level) => set_metric_value(&mut metric, kind, level),
        }
        metric
    }

    fn build_mapped_metric(&self, kind: MetricKind, labels: Vec<(String, String)>, value: &MergedValue) -> Metric {
        let labels = labels.into_iter().map(|(name, value)| (Cow::Owned(name), value)).collect();
        let mut metric = Metric::from_label(self.build_labels(labels));
        match &value.histogram {
            // statsd timings are in milliseconds; the mapping's scale converts them, usually to seconds.
            Some((snapshot, scale)) => metric.set_histogram(build_histogram(snapshot, scale * 1e3)),
            None => set_metric_value(&mut metric, kind, value.number),
        }
        metric
    }

    fn build_labels(&self, labels: Vec<Label>) -> Vec<LabelPair> {
        let pair = |name: String, value: String| {
            let mut pair = LabelPair::default();
            pair.set_name(name);
            pair.set_value(value);
            pair
        };
        // A label of the series takes precedence over a tag of the same name.
        let tags: Vec<LabelPair> = self
            .options
            .tags
            .iter()
            .filter(|(name, _)| labels.iter().all(|(own, _)| own != name))
            .map(|(name, value)| pair(name.clone(), value.clone()))
            .collect();
        labels.into_iter().map(|(name, value)| pair(name.into_owned(), value)).chain(tags).collect()
    }
}

impl MergedValue {
    fn add_value(&mut self, value: MetricValue, scale: f64) {
        match value {
            MetricValue::Counter(count) => self.number += to_f64(count) * scale,
            MetricValue::Gauge(level) => self.number += level * scale,
            MetricValue::Histogram(snapshot) => {
                let (sum, _) = self.histogram.get_or_insert_with(|| (HistogramSnapshot::default(), scale));
                for (sum, count) in sum.counts.iter_mut().zip(snapshot.counts) {
                    *sum += count;
                }
                sum.sum_ns = sum.sum_ns.wrapping_add(snapshot.sum_ns);
            }
        }
    }
}

fn set_metric_value(metric: &mut Metric, kind: MetricKind, number: f64) {
    if kind == MetricKind::Counter {
        let mut counter = Counter::default();
        counter.set_value(number);
        metric.set_counter(counter);
    } else {
        let mut gauge = Gauge::default();
        gauge.set_value(number);
        metric.set_gauge(gauge);
    }
}

/// Histogram in a unit of which a second has `units_per_second`.
fn build_histogram(snapshot: &HistogramSnapshot, units_per_second: f64) -> Histogram {
    let mut cumulative = 0;
    let buckets = BUCKET_BOUNDS_US.iter().zip(snapshot.counts).map(|(bound, count)| {
        cumulative += count;
        let mut bucket = Bucket::default();
        // Multiplying first keeps bounds in seconds free of rounding errors.
        bucket.set_upper_bound(to_f64(*bound) * units_per_second / 1e6);
        bucket.set_cumulative_count(cumulative);
        bucket
    });
    let mut histogram = Histogram::default();
    histogram.set_bucket(buckets.collect());
    histogram.set_sample_count(snapshot.observation_count());
    histogram.set_sample_sum(to_f64(snapshot.sum_ns) * units_per_second / 1e9);
    histogram
}

/// Converts a count; above 2^53 the lowest digits are lost.
#[expect(clippy::cast_precision_loss, reason = "Prometheus has only doubles")]
const fn to_f64(count: u64) -> f64 {
    count as f64
}

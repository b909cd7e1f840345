//! Families of series as Prometheus reads them.
//!
//! The library writes the text; here series get the tags that all have, and the names of an operator's file if there is
//! one. Two names that a file maps to one are one series, and are added up.

use std::borrow::Cow;
use std::collections::BTreeMap;

use prometheus::TextEncoder;
use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};

use super::family::{Family, Label, MetricKind, MetricValue, Series};
use super::histogram::{BOUNDS_US, HistogramSnapshot};
use super::mapper::Mapper;

/// How everything looks that Prometheus gets.
#[derive(Debug, Default)]
pub struct ExpositionOptions {
    /// Labels on every series.
    pub tags: Vec<(String, String)>,
    /// Names and labels, if an operator has a say in them.
    pub mapper: Option<Mapper>,
    /// Response times are milliseconds.
    pub milliseconds: bool,
}

/// A page under way.
#[derive(Debug)]
pub struct TextPage<'s> {
    options: &'s ExpositionOptions,
    text: String,
    /// What the mapper made, by name.
    mapped: BTreeMap<String, MappedFamily>,
    /// How many names went through the mapper.
    names: usize,
}

#[derive(Debug)]
struct MappedFamily {
    kind: MetricKind,
    help: &'static str,
    series: BTreeMap<Vec<(String, String)>, MergedValue>,
}

#[derive(Debug, Default)]
struct MergedValue {
    number: f64,
    times: Option<(HistogramSnapshot, f64)>,
}

impl<'s> TextPage<'s> {
    /// An empty page.
    pub const fn new(options: &'s ExpositionOptions) -> Self {
        Self { options, text: String::new(), mapped: BTreeMap::new(), names: 0 }
    }

    /// Adds a family; one without series adds nothing.
    pub fn add(&mut self, family: Family) {
        let Family { name, help, kind, series } = family;
        let Some(mapper) = &self.options.mapper else {
            let metrics = series.into_iter().map(|series| self.metric(kind, series)).collect();
            return self.write(&name, help, kind, metrics);
        };
        let (named, other): (Vec<Series>, Vec<Series>) = series.into_iter().partition(|series| series.stats.is_some());
        for Series { stats, value, .. } in named {
            let stats = stats.unwrap_or_default();
            self.names += 1;
            if let Some(mapped) = mapper.map(&stats, kind) {
                let family = self.mapped.entry(mapped.name.clone()).or_insert_with(|| MappedFamily {
                    kind,
                    help,
                    series: BTreeMap::new(),
                });
                if family.kind == kind {
                    family.series.entry(mapped.labels.clone()).or_default().add(value, mapped.scale);
                }
            }
        }
        let metrics = other.into_iter().map(|series| self.metric(kind, series)).collect();
        self.write(&name, help, kind, metrics);
    }

    /// The page.
    pub fn finish(mut self) -> String {
        for (name, MappedFamily { kind, help, series }) in std::mem::take(&mut self.mapped) {
            let metrics = series.into_iter().map(|(labels, sum)| self.merged(kind, labels, &sum)).collect();
            self.write(&name, help, kind, metrics);
        }
        if let Some(mapper) = &self.options.mapper {
            mapper.sweep(self.names);
        }
        self.text
    }

    fn write(&mut self, name: &str, help: &str, kind: MetricKind, metrics: Vec<Metric>) {
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
            tracing::error!(name, %error, "a metric can not be written for prometheus");
        }
    }

    fn metric(&self, kind: MetricKind, series: Series) -> Metric {
        let mut metric = Metric::from_label(self.labels(series.labels));
        match series.value {
            MetricValue::Histogram(times) => {
                metric.set_histogram(histogram(&times, self.per_second(series.stats.is_some())))
            }
            MetricValue::Counter(count) => set(&mut metric, kind, float(count)),
            MetricValue::Gauge(level) => set(&mut metric, kind, level),
        }
        metric
    }

    fn merged(&self, kind: MetricKind, labels: Vec<(String, String)>, sum: &MergedValue) -> Metric {
        let labels = labels.into_iter().map(|(name, value)| (Cow::Owned(name), value)).collect();
        let mut metric = Metric::from_label(self.labels(labels));
        match &sum.times {
            // Names in dots speak of milliseconds; what scales them makes seconds of them.
            Some((times, scale)) => metric.set_histogram(histogram(times, scale * 1e3)),
            None => set(&mut metric, kind, sum.number),
        }
        metric
    }

    fn labels(&self, labels: Vec<Label>) -> Vec<LabelPair> {
        let pair = |name: String, value: String| {
            let mut pair = LabelPair::default();
            pair.set_name(name);
            pair.set_value(value);
            pair
        };
        // A tag does not hide what a series says of itself.
        let tags: Vec<LabelPair> = self
            .options
            .tags
            .iter()
            .filter(|(name, _)| labels.iter().all(|(of_series, _)| of_series != name))
            .map(|(name, value)| pair(name.clone(), value.clone()))
            .collect();
        labels.into_iter().map(|(name, value)| pair(name.into_owned(), value)).chain(tags).collect()
    }

    /// How many of the unit of a histogram a second is: only what envoyproxy/ratelimit has too may be milliseconds.
    fn per_second(&self, is_of_peer: bool) -> f64 {
        if self.options.milliseconds && is_of_peer { 1e3 } else { 1.0 }
    }
}

impl MergedValue {
    fn add(&mut self, value: MetricValue, scale: f64) {
        match value {
            MetricValue::Counter(count) => self.number += float(count) * scale,
            MetricValue::Gauge(level) => self.number += level * scale,
            MetricValue::Histogram(times) => {
                let (sum, _) = self.times.get_or_insert_with(|| (HistogramSnapshot::default(), scale));
                for (sum, count) in sum.counts.iter_mut().zip(times.counts) {
                    *sum += count;
                }
                sum.sum_ns = sum.sum_ns.wrapping_add(times.sum_ns);
            }
        }
    }
}

fn set(metric: &mut Metric, kind: MetricKind, number: f64) {
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

/// A histogram in units of which a second has `per_second`.
fn histogram(times: &HistogramSnapshot, per_second: f64) -> Histogram {
    let mut below = 0;
    let buckets = BOUNDS_US.iter().zip(times.counts).map(|(bound, count)| {
        below += count;
        let mut bucket = Bucket::default();
        // In this order a bound of seconds is written without the dust of a division.
        bucket.set_upper_bound(float(*bound) * per_second / 1e6);
        bucket.set_cumulative_count(below);
        bucket
    });
    let mut histogram = Histogram::default();
    histogram.set_bucket(buckets.collect());
    histogram.set_sample_count(times.count());
    histogram.set_sample_sum(float(times.sum_ns) * per_second / 1e9);
    histogram
}

/// Counts past 2^53 lose their last digits in Prometheus.
#[expect(clippy::cast_precision_loss, reason = "Prometheus has nothing but doubles")]
const fn float(count: u64) -> f64 {
    count as f64
}

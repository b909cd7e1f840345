//! Counters, gauges and histograms, and their encodings for Prometheus and statsd. This file has the families of
//! metrics: the result of collecting, input of all encoders.
//!
//! A series has two names. `statsd_name` is the dotted name that envoyproxy/ratelimit uses; statsd and mapping files
//! use it. The family's name and the labels are for Prometheus. Families are passed on one at a time, so that ten
//! thousand rules do not need memory for all their series at once.

pub mod striped_counters;
pub mod histogram;
pub mod limit_registry;
pub mod limit_stats;
pub mod mapper;
pub mod prometheus;
pub mod statsd;

use std::borrow::Cow;
use std::collections::HashMap;

use self::histogram::HistogramSnapshot;

/// Series of one metric as they were collected.
#[derive(Clone, Debug, PartialEq)]
pub struct Family {
    /// Name in Prometheus.
    pub name: Cow<'static, str>,
    /// HELP text, one line.
    pub help: &'static str,
    /// Type of all values.
    pub kind: MetricKind,
    /// The series.
    pub series: Vec<Series>,
}

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Only increases.
    Counter,
    /// Increases and decreases.
    Gauge,
    /// Durations in buckets.
    Histogram,
}

/// One series.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Name in statsd; `None` for series that are not sent there.
    pub statsd_name: Option<String>,
    /// Labels in Prometheus.
    pub labels: Vec<Label>,
    /// Value.
    pub value: MetricValue,
}

/// Name and value of a label.
pub type Label = (Cow<'static, str>, String);

/// Value of a series. Counters and histograms count from the start of the process.
#[derive(Clone, Debug, PartialEq)]
pub enum MetricValue {
    /// Value of a counter.
    Counter(u64),
    /// Value of a gauge.
    Gauge(f64),
    /// Value of a histogram.
    Histogram(Box<HistogramSnapshot>),
}

impl Family {
    /// A family without series.
    pub fn new(name: impl Into<Cow<'static, str>>, kind: MetricKind, help: &'static str) -> Self {
        Self { name: name.into(), help, kind, series: Vec::new() }
    }

    /// A gauge with one series.
    pub fn gauge(name: &'static str, help: &'static str, level: impl TryInto<u64>) -> Self {
        Self::new(name, MetricKind::Gauge, help).add_series(Series::new(MetricValue::gauge_from(level)))
    }

    /// A counter with one series.
    pub fn counter(name: &'static str, help: &'static str, count: u64) -> Self {
        Self::new(name, MetricKind::Counter, help).add_series(Series::new(MetricValue::Counter(count)))
    }

    /// A counter with one series for each value of `label`.
    pub fn counter_by_label(
        name: &'static str,
        help: &'static str,
        label: &'static str,
        counts: impl IntoIterator<Item = (&'static str, u64)>,
    ) -> Self {
        let series =
            counts.into_iter().map(|(value, count)| Series::new(MetricValue::Counter(count)).with_label(label, value));
        Self { series: series.collect(), ..Self::new(name, MetricKind::Counter, help) }
    }

    /// Adds up the counters of equal labels, in place of the first of them.
    #[must_use]
    pub fn sum_counters_of_equal_labels(mut self) -> Self {
        let mut sums: HashMap<&[Label], u64> = HashMap::with_capacity(self.series.len());
        for series in &self.series {
            if let MetricValue::Counter(count) = series.value {
                *sums.entry(&series.labels).or_default() += count;
            }
        }
        if sums.len() < self.series.len() {
            let firsts = self.series.iter().filter_map(|series| {
                let count = sums.remove(&*series.labels)?;
                Some(Series { value: MetricValue::Counter(count), ..series.clone() })
            });
            self.series = firsts.collect();
        }
        self
    }

    /// Adds a series.
    #[must_use]
    pub fn add_series(mut self, series: Series) -> Self {
        self.series.push(series);
        self
    }
}

impl MetricValue {
    /// Value of a gauge that counts something.
    pub fn gauge_from(count: impl TryInto<u64>) -> Self {
        let count: u64 = count.try_into().unwrap_or(u64::MAX);
        #[expect(clippy::cast_precision_loss, reason = "a gauge is a double")]
        {
            Self::Gauge(count as f64)
        }
    }
}

impl Series {
    /// A series without labels that is not sent to statsd.
    pub fn new(value: MetricValue) -> Self {
        Self { statsd_name: None, labels: Vec::new(), value }
    }

    /// Sets the name in statsd.
    #[must_use]
    pub fn with_statsd_name(mut self, name: impl Into<String>) -> Self {
        self.statsd_name = Some(name.into());
        self
    }

    /// Adds a label.
    #[must_use]
    pub fn with_label(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.labels.push((Cow::Borrowed(name), value.into()));
        self
    }
}

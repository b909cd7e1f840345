//! What a reading of all instruments gives: families of series, each with a value.
//!
//! A series has two names. `stats` is the one that envoyproxy/ratelimit has for it, in dots; statsd gets it, and
//! mapping files speak of it. The family's name and the labels are for Prometheus. Whoever reads asks for one family
//! after the other, so that ten thousand rules do not take the room of all their series at once.

use std::borrow::Cow;

use super::histogram::HistogramSnapshot;

/// Series of one name.
#[derive(Clone, Debug, PartialEq)]
pub struct Family {
    /// Its name in Prometheus.
    pub name: Cow<'static, str>,
    /// What it counts; one line.
    pub help: &'static str,
    /// What its values are.
    pub kind: MetricKind,
    /// Its series.
    pub series: Vec<Series>,
}

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// It only grows.
    Counter,
    /// It goes up and down.
    Gauge,
    /// Durations in buckets.
    Histogram,
}

/// One series.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Its name in statsd; `None`: it is not sent there.
    pub stats: Option<String>,
    /// Its labels.
    pub labels: Vec<Label>,
    /// Its value.
    pub value: MetricValue,
}

/// Name and value of a label.
pub type Label = (Cow<'static, str>, String);

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum MetricValue {
    /// Of a counter, since the start of the process.
    Counter(u64),
    /// Of a gauge.
    Gauge(f64),
    /// Of a histogram, since the start of the process.
    Histogram(Box<HistogramSnapshot>),
}

impl Family {
    /// A family without series.
    pub fn new(name: impl Into<Cow<'static, str>>, kind: MetricKind, help: &'static str) -> Self {
        Self { name: name.into(), help, kind, series: Vec::new() }
    }

    /// With one more series.
    #[must_use]
    pub fn with(mut self, series: Series) -> Self {
        self.series.push(series);
        self
    }
}

impl Series {
    /// A series without labels that statsd does not get.
    pub fn of(value: MetricValue) -> Self {
        Self { stats: None, labels: Vec::new(), value }
    }

    /// With this name in statsd.
    #[must_use]
    pub fn stats(mut self, name: impl Into<String>) -> Self {
        self.stats = Some(name.into());
        self
    }

    /// With one more label.
    #[must_use]
    pub fn label(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.labels.push((Cow::Borrowed(name), value.into()));
        self
    }
}

//! Encodes metrics for statsd or DogStatsD: the change since the last report, one line per series.
//!
//! Counters are sent as differences; unchanged counters are left out. A histogram is sent as one timing line per bucket
//! that grew, with 1 / count as sample rate: receivers multiply by it, so a million calls take twenty lines. A report
//! that could not be sent is merged into the next one. Sockets belong to the caller, `serve::server`.
//!
//! Decides: size of a statsd packet; time and sample rate of a line; tags and DogStatsD names (mogrifiers).

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io;

use regex::Regex;

use super::histogram::{BUCKET_BOUNDS_US, HistogramSnapshot};
use super::{Family, MetricValue};

/// Encodes families and remembers what one server has received.
#[derive(Debug)]
pub struct StatsdEncoder {
    format: StatsdFormat,
    tags: Vec<(String, String)>,
    reported: HashMap<String, LastSentValue>,
    /// Number of completed reports.
    round: u64,
    pending: Vec<PendingLine>,
}

/// Syntax of tags.
#[derive(Debug)]
pub enum StatsdFormat {
    /// statsd: tags are part of the name.
    Statsd,
    /// DogStatsD: tags follow the value. The first matching rewrite applies to a name.
    DogStatsd(Vec<NameRewrite>),
}

/// Rewrites names and turns parts of them into tags.
#[derive(Debug)]
pub struct NameRewrite {
    /// Names that are rewritten.
    pub pattern: Regex,
    /// New name; `$1` stands for the first group of the pattern.
    pub name: String,
    /// Additional tags, with the same placeholders.
    pub tags: Vec<(String, String)>,
}

/// Last value of a series that was sent.
#[derive(Debug)]
struct LastSentValue {
    value: MetricValue,
    /// Round in which the series was last seen.
    round: u64,
}

/// A line to send, and the value to remember once it is sent.
#[derive(Debug)]
struct PendingLine {
    text: String,
    reported: Option<(String, MetricValue)>,
}

/// Maximum size of a packet in bytes, which fits an Ethernet frame with all headers.
const MAX_PACKET_BYTES: usize = 1432;

impl StatsdEncoder {
    /// Encoder of a server that has received nothing yet. `tags` go on every series.
    pub fn new(format: StatsdFormat, tags: Vec<(String, String)>) -> Self {
        Self { format, tags, reported: HashMap::new(), round: 0, pending: Vec::new() }
    }

    /// Encodes the changes of a family. Counters of one name are added up.
    pub fn add_family(&mut self, family: &Family) {
        let mut sums: HashMap<&str, u64> = HashMap::new();
        for series in &family.series {
            if let (Some(name), MetricValue::Counter(count)) = (&series.statsd_name, &series.value) {
                *sums.entry(name).or_default() += count;
            }
        }
        for series in &family.series {
            let Some(name) = &series.statsd_name else { continue };
            let before = self.reported.get_mut(name).map(|reported| {
                reported.round = self.round;
                reported.value.clone()
            });
            match (&series.value, before) {
                (MetricValue::Counter(_), before) => {
                    // The first series of a name has the sum.
                    let Some(count) = sums.remove(&**name) else { continue };
                    let before = if let Some(MetricValue::Counter(before)) = before { before } else { 0 };
                    // The counter of a rule that was removed and added again restarts at 0.
                    let increase = if count >= before { count - before } else { count };
                    if increase > 0 {
                        self.add_line(name, &format!("{increase}|c"), Some(MetricValue::Counter(count)));
                    }
                }
                (MetricValue::Gauge(level), _) => self.add_line(name, &format!("{level}|g"), None),
                (MetricValue::Histogram(snapshot), before) => {
                    let before =
                        if let Some(MetricValue::Histogram(before)) = before { before } else { Box::default() };
                    self.add_timing_lines(name, snapshot, &before);
                }
            }
        }
    }

    /// Passes the encoded lines to `send` in packets, each a number of lines with their line ends.
    ///
    /// # Errors
    /// The error of `send`; lines that were not sent are part of the next report.
    pub fn send_report(&mut self, mut send: impl FnMut(&str) -> io::Result<()>) -> io::Result<()> {
        let lines = std::mem::take(&mut self.pending);
        let mut packet = String::new();
        let mut reported: Vec<(String, MetricValue)> = Vec::new();
        for line in lines {
            if !packet.is_empty() && packet.len() + line.text.len() > MAX_PACKET_BYTES {
                send(&packet)?;
                packet.clear();
                self.remember_reported_values(&mut reported);
            }
            packet.push_str(&line.text);
            reported.extend(line.reported);
        }
        if !packet.is_empty() {
            send(&packet)?;
            self.remember_reported_values(&mut reported);
        }
        let round = self.round;
        self.reported.retain(|_, reported| reported.round == round);
        self.round += 1;
        Ok(())
    }

    fn remember_reported_values(&mut self, reported: &mut Vec<(String, MetricValue)>) {
        let round = self.round;
        self.reported.extend(reported.drain(..).map(|(name, value)| (name, LastSentValue { value, round })));
    }

    /// Adds a line `name:ms|ms` for each bucket of a histogram with new observations, at the bucket's upper bound.
    ///
    /// The sample rate of a line is one in the number of these observations, so that the server counts all of them.
    fn add_timing_lines(&mut self, name: &str, snapshot: &HistogramSnapshot, before: &HistogramSnapshot) {
        for (bucket, (count, before)) in snapshot.counts.iter().zip(before.counts).enumerate() {
            let increase = count.saturating_sub(before);
            if increase == 0 {
                continue;
            }
            let bound = BUCKET_BOUNDS_US.get(bucket).unwrap_or(&BUCKET_BOUNDS_US[BUCKET_BOUNDS_US.len() - 1]);
            #[expect(clippy::cast_precision_loss, reason = "a sample rate needs no more digits")]
            let (ms, rate) = (*bound as f64 / 1e3, 1.0 / increase as f64);
            let value = if increase == 1 { format!("{ms}|ms") } else { format!("{ms}|ms|@{rate}") };
            self.add_line(name, &value, Some(MetricValue::Histogram(Box::new(snapshot.clone()))));
        }
    }

    /// Adds a line; `reported` is remembered once it is sent.
    fn add_line(&mut self, name: &str, value: &str, reported: Option<MetricValue>) {
        let text = match &self.format {
            StatsdFormat::Statsd => format_statsd_line(name, value, &self.tags),
            StatsdFormat::DogStatsd(rewrites) => format_dogstatsd_line(name, value, &self.tags, rewrites),
        };
        let reported = reported.map(|reported| (name.to_owned(), reported));
        self.pending.push(PendingLine { text, reported });
    }
}

/// Formats `name.__tag=value:1|c`.
fn format_statsd_line(name: &str, value: &str, tags: &[(String, String)]) -> String {
    let mut line = String::with_capacity(name.len() + value.len() + 16);
    line.push_str(name);
    for (tag, tag_value) in tags {
        let _ = write!(line, ".__{tag}={tag_value}");
    }
    let _ = writeln!(line, ":{value}");
    line
}

/// Formats `name:1|c|#tag:value`.
fn format_dogstatsd_line(name: &str, value: &str, tags: &[(String, String)], rewrites: &[NameRewrite]) -> String {
    let (name, mut all_tags) = rewrite_name(rewrites, name);
    all_tags.extend(tags.iter().cloned());
    // A comma separates tags, and a bar the parts of a line.
    let part = |text: &str| text.replace([',', '|', '\n'], "_");
    let all_tags: Vec<String> = all_tags.iter().map(|(tag, value)| format!("{}:{}", part(tag), part(value))).collect();
    match all_tags.is_empty() {
        true => format!("{name}:{value}\n"),
        false => format!("{name}:{value}|#{}\n", all_tags.join(",")),
    }
}

/// Applies the first rewrite that matches; returns the new name and additional tags.
fn rewrite_name(rewrites: &[NameRewrite], name: &str) -> (String, Vec<(String, String)>) {
    let found = rewrites.iter().find_map(|rewrite| rewrite.pattern.captures(name).map(|groups| (rewrite, groups)));
    let Some((rewrite, groups)) = found else { return (name.to_owned(), Vec::new()) };
    let expand = |text: &str| {
        let mut expanded = String::new();
        groups.expand(text, &mut expanded);
        expanded
    };
    let tags = rewrite.tags.iter().map(|(tag, value)| (expand(tag), expand(value))).collect();
    (expand(&rewrite.name), tags)
}

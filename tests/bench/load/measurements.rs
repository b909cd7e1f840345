//! Measurements of a run: latencies, verdicts, errors, the verdict of each descriptor, and what the server used.
//!
//! CPU time and memory of the server are read from its process on this machine or from its metrics.
//!
//! Decides: how exact latencies of `bench` are; where CPU time and memory of the server come from (`measure_usage`).

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;
use procfs::process::Process;
use tollkeeper::base::pb::RateLimitResponse;
use tollkeeper::base::pb::rate_limit_response::Code;

use super::connection::CallError;

/// Measurements of a run.
#[derive(Debug)]
pub struct LoadMeasurements {
    /// Latencies of calls that were answered or timed out, in microseconds.
    pub latencies: Histogram<u64>,
    /// Delays between the due time and the sending of calls in an open loop, in microseconds.
    pub send_delays: Histogram<u64>,
    /// Responses by overall code.
    pub verdicts: VerdictCounts,
    /// Calls without a response, by error.
    pub errors: BTreeMap<String, u64>,
    /// Verdicts on descriptors, those of the warm-up included.
    pub events: Vec<DescriptorVerdict>,
    /// Number of descriptors that did not fit in `events`.
    pub dropped_events: u64,
    /// Resource usage of the server between warm-up and end, if it was asked for.
    pub usage: Option<UsageSpan>,
}

/// Responses by overall code.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct VerdictCounts {
    /// Responses with OK.
    pub ok: u64,
    /// Responses with OVER_LIMIT.
    pub over_limit: u64,
    /// Responses with another code.
    pub unknown: u64,
}

/// Resource usage of the server at both ends of a time span.
#[derive(Clone, Copy, Debug)]
pub struct UsageSpan {
    /// Usage at the beginning.
    pub before: ResourceUsage,
    /// Usage at the end.
    pub after: ResourceUsage,
    /// Number of responses in between.
    pub responses: u64,
}

/// Verdict on one descriptor.
#[derive(Clone, Copy, Debug)]
pub struct DescriptorVerdict {
    /// Hash of the domain and the entries, which identifies the counter.
    pub counter: u64,
    /// Middle of the time between request and response, in microseconds since the Unix epoch.
    pub at_us: u64,
    /// Requested hits.
    pub hits: u32,
    /// Index of the template.
    pub template: u16,
    /// Index of the descriptor in the template.
    pub descriptor: u16,
    /// Limit in the response.
    pub limit: Option<LimitInResponse>,
    /// `true` if the descriptor was not over its limit.
    pub admitted: bool,
}

/// Limit as a response states it.
#[derive(Clone, Copy, Debug)]
pub struct LimitInResponse {
    /// Requests per unit.
    pub requests_per_unit: u32,
    /// Number of the unit in protobuf.
    pub unit: i32,
}

/// Maximum number of events in memory, which take 400 MB.
pub(crate) const MAX_VERDICT_EVENTS: usize = 10_000_000;
/// Maximum number of distinct errors.
const MAX_ERROR_KINDS: usize = 32;
/// Maximum latency in a histogram, in microseconds; longer ones are recorded as this.
const MAX_LATENCY_US: u64 = 3_600_000_000;

impl LoadMeasurements {
    pub(crate) fn new() -> Self {
        let histogram = || Histogram::new_with_max(MAX_LATENCY_US, 3).expect("three digits up to an hour can be kept");
        Self {
            latencies: histogram(),
            send_delays: histogram(),
            verdicts: VerdictCounts::default(),
            errors: BTreeMap::new(),
            events: Vec::new(),
            dropped_events: 0,
            usage: None,
        }
    }

    /// Counts a response.
    pub(crate) fn count_verdict(&mut self, response: &RateLimitResponse) {
        let count = match response.overall_code() {
            Code::Ok => &mut self.verdicts.ok,
            Code::OverLimit => &mut self.verdicts.over_limit,
            Code::Unknown => &mut self.verdicts.unknown,
        };
        *count += 1;
    }

    /// Counts a call without a response.
    pub(crate) fn count_error(&mut self, error: &CallError) {
        let mut kind = error.to_string();
        if self.errors.len() >= MAX_ERROR_KINDS && !self.errors.contains_key(&kind) {
            "others".clone_into(&mut kind);
        }
        *self.errors.entry(kind).or_default() += 1;
    }

    /// Adds the measurements of another connection.
    pub(crate) fn merge(&mut self, other: Self) {
        // Adding cannot fail: all histograms have the same bounds.
        let _ = self.latencies.add(&other.latencies);
        let _ = self.send_delays.add(&other.send_delays);
        self.verdicts.ok += other.verdicts.ok;
        self.verdicts.over_limit += other.verdicts.over_limit;
        self.verdicts.unknown += other.verdicts.unknown;
        other.errors.into_iter().for_each(|(kind, count)| *self.errors.entry(kind).or_default() += count);
        self.events.extend(other.events);
        self.dropped_events += other.dropped_events;
    }
}

/// Source of the measurements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UsageSource {
    /// A process on this machine.
    Pid(i32),
    /// A page in Prometheus's text format with `process_cpu_seconds_total` and `process_resident_memory_bytes`.
    Metrics(String),
}

/// Resource usage of a server process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ResourceUsage {
    /// CPU time of all threads since the process started, user and system.
    pub cpu: Duration,
    /// Resident memory, in bytes.
    pub resident_bytes: u64,
}

/// Time limit for reading the metrics page.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(5);

impl UsageSource {
    /// Measures the usage until now. Blocks on I/O, so it must not run in an async task.
    pub fn measure_usage(&self) -> Result<ResourceUsage, String> {
        match self {
            Self::Pid(pid) => read_process_usage(*pid).map_err(|error| format!("--pid {pid}: {error}")),
            Self::Metrics(url) => measure_from_metrics_page(url).map_err(|why| format!("--metrics {url}: {why}")),
        }
    }
}

/// Reads the scheduler's statistics in nanoseconds, if the kernel has them; those of the process count in 10 ms.
fn read_process_usage(pid: i32) -> procfs::ProcResult<ResourceUsage> {
    let process = Process::new(pid)?;
    let stat = process.stat()?;
    let precise: Option<u64> = process
        .tasks()?
        .map(|task| task.and_then(|task| task.schedstat()).map(|account| account.sum_exec_runtime).ok())
        .sum();
    let ticks = (stat.utime + stat.stime) * 1_000_000_000 / procfs::ticks_per_second();
    // Only the statistics of the process include threads that have exited.
    let cpu = Duration::from_nanos(precise.filter(|precise| *precise > 0).unwrap_or(ticks));
    Ok(ResourceUsage { cpu, resident_bytes: stat.rss * procfs::page_size() })
}

fn measure_from_metrics_page(url: &str) -> Result<ResourceUsage, String> {
    let agent =
        ureq::Agent::new_with_config(ureq::Agent::config_builder().timeout_global(Some(SCRAPE_TIMEOUT)).build());
    let page = agent.get(url).call().map_err(|error| error.to_string())?.body_mut().read_to_string();
    let page = page.map_err(|error| error.to_string())?;
    let value = |name: &str| {
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix([' ', '{'])?.rsplit(' ').next());
        value.and_then(|value| value.parse::<f64>().ok()).filter(|value| value.is_finite() && *value >= 0.0)
    };
    let cpu = value("process_cpu_seconds_total").ok_or("the page has no process_cpu_seconds_total")?;
    let resident = value("process_resident_memory_bytes").ok_or("the page has no process_resident_memory_bytes")?;
    let cpu = Duration::try_from_secs_f64(cpu).map_err(|error| error.to_string())?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes, and not below 0")]
    Ok(ResourceUsage { cpu, resident_bytes: resident as u64 })
}

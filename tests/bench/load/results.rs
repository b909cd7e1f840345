//! Results of a run: statistics, and the accuracy of each limit, compared with an exact sliding window log.
//!
//! Accuracy answers two questions about one counter at a time: do more hits than the limit pass in any period, and
//! which verdicts would an exact sliding window log have given differently for the same requests? The second measure is
//! Cloudflare's for its sliding counter (0.003 % of requests wrongly allowed or limited). The log follows its own
//! verdicts, so an early difference can last for a period. A fixed window and a bucket promise something other than a
//! log, and differ from it without being wrong.
//!
//! Decides: which verdicts of `bench` are right (`measure_accuracy`); which percentiles it prints, and how many errors.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::AddAssign;

use hdrhistogram::Histogram;
use serde::Serialize;
use tollkeeper::limit::period::Unit;

use super::load_generator::LoadPlan;
use super::measurements::{DescriptorVerdict, LimitInResponse, LoadMeasurements, UsageSpan, VerdictCounts};

/// Results of a run.
#[derive(Clone, Debug, Serialize)]
pub struct BenchResults {
    /// Number of responses in the measurement.
    pub answers: u64,
    /// Length of the measurement, in seconds.
    pub seconds: f64,
    /// Responses per second.
    pub answers_per_second: f64,
    /// Latencies of calls that were answered or timed out; in an open loop they count from the due time.
    pub latency_us: Percentiles,
    /// Delays between due time and sending in an open loop, because the generator was late or all streams were busy.
    pub send_delay_us: Option<Percentiles>,
    /// Number of calls that took longer than Envoy's default timeout of 20 ms.
    pub later_than_20_ms: u64,
    /// Responses by overall code.
    pub verdicts: VerdictCounts,
    /// Calls without a response, by error.
    pub errors: BTreeMap<String, u64>,
    /// Resource usage of the server.
    pub server: Option<ServerUsage>,
    /// Accuracy of each limit.
    pub limits: Vec<LimitAccuracy>,
    /// Number of descriptors that the server reported no limit for.
    pub unlimited: u64,
    /// Number of descriptors that were not evaluated, because there were too many to record.
    pub not_evaluated: u64,
}

/// Distribution of a quantity, in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Percentiles {
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p99_9: u64,
    /// 99.99th percentile.
    pub p99_99: u64,
    /// Maximum.
    pub max: u64,
}

/// Resource usage of the server during the measurement.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ServerUsage {
    /// CPU time per response, in microseconds.
    pub cpu_us_per_answer: f64,
    /// Average number of busy cores.
    pub cores: f64,
    /// Resident memory after the warm-up, in bytes.
    pub resident_bytes_before: u64,
    /// Resident memory at the end, in bytes.
    pub resident_bytes: u64,
}

/// Accuracy of a limit over all of its counters, from the start of the warm-up.
#[derive(Clone, Debug, Serialize)]
pub struct LimitAccuracy {
    /// Domain of the requests.
    pub domain: String,
    /// Descriptor as in its template.
    pub descriptor: String,
    /// Allowed hits per period.
    pub limit: u64,
    /// Period, in seconds.
    pub period_seconds: f64,
    /// Number of counters.
    pub counters: u64,
    /// Requested hits.
    pub requested: u64,
    /// Admitted hits.
    pub admitted: u64,
    /// Maximum of hits that a counter admitted in any period, wherever it begins.
    pub max_in_a_period: u64,
    /// Maximum of hits that a counter admitted in a period aligned to the clock, as fixed windows are.
    pub max_in_a_window: u64,
    /// Number of counters that admitted more than the limit in some period.
    pub counters_over_in_a_period: u64,
    /// Number of counters that admitted more than the limit in some aligned period.
    pub counters_over_in_a_window: u64,
    /// Admitted hits that an exact sliding window log would have rejected.
    pub wrongly_admitted: u64,
    /// Rejected hits that an exact sliding window log would have admitted.
    pub wrongly_rejected: u64,
}

/// A limit as the command line states it or, without that, as responses report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StatedLimit {
    /// Allowed hits per period.
    pub hits: u64,
    /// Period, in microseconds.
    pub period_us: u64,
}

/// Envoy's default timeout for rate limit calls, in microseconds.
const ENVOY_DEFAULT_TIMEOUT_US: u64 = 20_000;

impl BenchResults {
    /// Computes the results; `stated` is the limit of all descriptors, if it is not to be taken from the responses.
    pub fn new(plan: &LoadPlan, mut record: LoadMeasurements, stated: Option<StatedLimit>) -> Self {
        let seconds = plan.duration.as_secs_f64();
        let VerdictCounts { ok, over_limit, unknown } = record.verdicts;
        let answers = ok + over_limit + unknown;
        let in_time = record.latencies.count_between(0, ENVOY_DEFAULT_TIMEOUT_US);
        let (limits, unlimited) = evaluate_limits(plan, &mut record.events, stated);
        Self {
            answers,
            seconds,
            answers_per_second: answers as f64 / seconds,
            latency_us: Percentiles::from_histogram(&record.latencies),
            send_delay_us: plan.rate.map(|_| Percentiles::from_histogram(&record.send_delays)),
            later_than_20_ms: record.latencies.len() - in_time,
            verdicts: record.verdicts,
            errors: record.errors,
            server: record.usage.map(|usage| ServerUsage::new(&usage, seconds)),
            limits,
            unlimited,
            not_evaluated: record.dropped_events,
        }
    }
}

impl ServerUsage {
    fn new(usage: &UsageSpan, seconds: f64) -> Self {
        let cpu_seconds = usage.after.cpu.saturating_sub(usage.before.cpu).as_secs_f64();
        Self {
            cpu_us_per_answer: cpu_seconds * 1e6 / usage.responses.max(1) as f64,
            cores: cpu_seconds / seconds,
            resident_bytes_before: usage.before.resident_bytes,
            resident_bytes: usage.after.resident_bytes,
        }
    }
}

impl Percentiles {
    fn from_histogram(histogram: &Histogram<u64>) -> Self {
        Self {
            mean: histogram.mean(),
            p50: histogram.value_at_quantile(0.5),
            p90: histogram.value_at_quantile(0.9),
            p99: histogram.value_at_quantile(0.99),
            p99_9: histogram.value_at_quantile(0.999),
            p99_99: histogram.value_at_quantile(0.9999),
            max: histogram.max(),
        }
    }
}

/// Identity of a limit: a descriptor of a template, with its limit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct LimitKey {
    template: u16,
    descriptor: u16,
    limit: StatedLimit,
}

/// Accuracy of the counters of a limit.
#[derive(Default)]
struct AccuracySum {
    accuracy: CounterAccuracy,
    counters: u64,
    over_in_a_period: u64,
    over_in_a_window: u64,
}

/// Evaluates each limit, and counts the descriptors without one.
fn evaluate_limits(
    plan: &LoadPlan,
    events: &mut [DescriptorVerdict],
    stated: Option<StatedLimit>,
) -> (Vec<LimitAccuracy>, u64) {
    events.sort_unstable_by_key(|event| (event.counter, event.at_us));
    let mut unlimited = 0;
    let mut sums: HashMap<LimitKey, AccuracySum> = HashMap::new();
    for counter in events.chunk_by(|one, next| one.counter == next.counter) {
        // A limit may change during the run: the last one counts.
        let reported = counter.iter().rev().find_map(|event| event.limit).and_then(|limit| limit.to_stated_limit());
        let Some(limit) = stated.or(reported) else {
            unlimited += counter.len() as u64;
            continue;
        };
        let verdicts: Vec<TimedVerdict> = counter.iter().map(to_timed_verdict).collect();
        let accuracy = measure_accuracy(&verdicts, limit.hits, limit.period_us);
        let key = LimitKey { template: counter[0].template, descriptor: counter[0].descriptor, limit };
        let sum = sums.entry(key).or_default();
        sum.accuracy += accuracy;
        sum.counters += 1;
        sum.over_in_a_period += u64::from(accuracy.max_in_a_period > limit.hits);
        sum.over_in_a_window += u64::from(accuracy.max_in_a_window > limit.hits);
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_unstable_by_key(|(key, _)| *key);
    (sums.iter().map(|(key, sum)| build_limit_accuracy(plan, *key, sum)).collect(), unlimited)
}

fn build_limit_accuracy(plan: &LoadPlan, key: LimitKey, sum: &AccuracySum) -> LimitAccuracy {
    let template = plan.mix.templates().nth(key.template.into());
    let descriptor = template.and_then(|template| template.descriptor_texts().nth(key.descriptor.into()));
    let accuracy = &sum.accuracy;
    LimitAccuracy {
        domain: template.map(|template| template.domain().to_owned()).unwrap_or_default(),
        descriptor: descriptor.unwrap_or_default(),
        limit: key.limit.hits,
        period_seconds: key.limit.period_us as f64 / 1e6,
        counters: sum.counters,
        requested: accuracy.requested,
        admitted: accuracy.admitted,
        max_in_a_period: accuracy.max_in_a_period,
        max_in_a_window: accuracy.max_in_a_window,
        counters_over_in_a_period: sum.over_in_a_period,
        counters_over_in_a_window: sum.over_in_a_window,
        wrongly_admitted: accuracy.wrongly_admitted,
        wrongly_rejected: accuracy.wrongly_rejected,
    }
}

fn to_timed_verdict(event: &DescriptorVerdict) -> TimedVerdict {
    TimedVerdict { at_us: event.at_us, hits: event.hits.into(), admitted: event.admitted }
}

impl LimitInResponse {
    fn to_stated_limit(self) -> Option<StatedLimit> {
        let unit = Unit::from_protobuf_number(self.unit)?;
        Some(StatedLimit { hits: self.requests_per_unit.into(), period_us: unit.seconds() * 1_000_000 })
    }
}

/// A request with the verdict of a limiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedVerdict {
    /// Time of the request, in microseconds of any monotonic clock.
    pub at_us: u64,
    /// Hits of the request.
    pub hits: u64,
    /// `true` if the request was admitted.
    pub admitted: bool,
}

/// Verdicts on the requests of a counter, in hits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterAccuracy {
    /// Requested hits.
    pub requested: u64,
    /// Admitted hits.
    pub admitted: u64,
    /// Maximum of hits admitted in any period, wherever it begins.
    pub max_in_a_period: u64,
    /// Maximum of hits admitted in a period that begins at a multiple of it.
    pub max_in_a_window: u64,
    /// Admitted hits that the log would have rejected.
    pub wrongly_admitted: u64,
    /// Rejected hits that the log would have admitted.
    pub wrongly_rejected: u64,
}

/// Combines two counters of one limit: sums, and the greater of the maxima.
impl AddAssign for CounterAccuracy {
    fn add_assign(&mut self, other: Self) {
        self.requested += other.requested;
        self.admitted += other.admitted;
        self.max_in_a_period = self.max_in_a_period.max(other.max_in_a_period);
        self.max_in_a_window = self.max_in_a_window.max(other.max_in_a_window);
        self.wrongly_admitted += other.wrongly_admitted;
        self.wrongly_rejected += other.wrongly_rejected;
    }
}

/// Evaluates the verdicts on one counter, sorted by time.
///
/// `period_us` must not be 0. Windows are aligned to 0 of the clock of the verdicts.
pub fn measure_accuracy(verdicts: &[TimedVerdict], limit: u64, period_us: u64) -> CounterAccuracy {
    let mut accuracy = CounterAccuracy::default();
    let (mut admitted, mut log) = (SlidingWindow::default(), SlidingWindow::default());
    let (mut window, mut in_window) = (None, 0);
    for verdict in verdicts {
        let horizon = verdict.at_us.checked_sub(period_us);
        admitted.remove_entries_until(horizon);
        log.remove_entries_until(horizon);
        accuracy.requested += verdict.hits;
        if verdict.admitted {
            accuracy.admitted += verdict.hits;
            admitted.add_verdict(verdict);
            accuracy.max_in_a_period = accuracy.max_in_a_period.max(admitted.hits);
            if window.replace(verdict.at_us / period_us) != Some(verdict.at_us / period_us) {
                in_window = 0;
            }
            in_window += verdict.hits;
            accuracy.max_in_a_window = accuracy.max_in_a_window.max(in_window);
        }
        let by_log = log.hits + verdict.hits <= limit;
        if by_log {
            log.add_verdict(verdict);
        }
        match (verdict.admitted, by_log) {
            (true, false) => accuracy.wrongly_admitted += verdict.hits,
            (false, true) => accuracy.wrongly_rejected += verdict.hits,
            _ => {}
        }
    }
    accuracy
}

/// Hits of the last period.
#[derive(Default)]
struct SlidingWindow {
    /// Time and hits of each request.
    entries: VecDeque<(u64, u64)>,
    hits: u64,
}

impl SlidingWindow {
    /// Removes the entries up to the time `horizon`.
    fn remove_entries_until(&mut self, horizon: Option<u64>) {
        while let (Some(horizon), Some((at, hits))) = (horizon, self.entries.front().copied())
            && at <= horizon
        {
            self.entries.pop_front();
            self.hits -= hits;
        }
    }

    fn add_verdict(&mut self, verdict: &TimedVerdict) {
        self.entries.push_back((verdict.at_us, verdict.hits));
        self.hits += verdict.hits;
    }
}

//! What a run found, as it is written and as JSON.

use std::collections::{BTreeMap, HashMap};

use hdrhistogram::Histogram;
use serde::Serialize;

use super::exact::{Judgement, Verdict, judge};
use super::load::{Event, Plan, Record};
use crate::pb::RateLimitUnit;

/// What a run found.
#[derive(Clone, Debug, Serialize)]
pub struct Findings {
    /// Answers, in what was measured.
    pub answers: u64,
    /// How long was measured, in seconds.
    pub seconds: f64,
    /// Answers a second.
    pub answers_per_second: f64,
    /// Latencies of calls that were answered or timed out. In an open loop they count from when a call was due.
    pub latency_us: Spread,
    /// In an open loop, how long calls waited until they were sent: because the generator was late, or because as many
    /// as may be were on their way.
    pub unsent_us: Option<Spread>,
    /// Calls that took longer than the 20 ms after which Envoy, unless told otherwise, stops waiting.
    pub later_than_20_ms: u64,
    /// Answers by verdict.
    pub verdicts: Verdicts,
    /// Calls without an answer, by why.
    pub errors: BTreeMap<String, u64>,
    /// What the server used.
    pub server: Option<Server>,
    /// Each limit that was met, and how its counters were kept.
    pub limits: Vec<Limit>,
    /// Descriptors that are in none of `limits`: the server told no limit for them.
    pub unlimited: u64,
    /// Descriptors that were not judged, because there were too many to remember.
    pub not_judged: u64,
}

/// How a quantity spreads, in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Spread {
    /// The mean.
    pub mean: f64,
    /// Half are not above.
    pub p50: u64,
    /// Nine of ten are not above.
    pub p90: u64,
    /// 99 of 100 are not above.
    pub p99: u64,
    /// 999 of 1000 are not above.
    pub p99_9: u64,
    /// 9999 of 10 000 are not above.
    pub p99_99: u64,
    /// The greatest.
    pub max: u64,
}

/// Answers by verdict.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Verdicts {
    /// The request may pass.
    pub ok: u64,
    /// It may not.
    pub over_limit: u64,
    /// Neither.
    pub unknown: u64,
}

/// What the server used.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Server {
    /// CPU time for each answer, in microseconds.
    pub cpu_us_per_answer: f64,
    /// CPUs that it kept busy.
    pub cores: f64,
    /// Resident memory after the warm-up, in bytes.
    pub resident_bytes_before: u64,
    /// Resident memory at the end, in bytes.
    pub resident_bytes: u64,
}

/// How the counters of a limit were kept, from the beginning of the warm-up on.
#[derive(Clone, Debug, Serialize)]
pub struct Limit {
    /// The domain.
    pub domain: String,
    /// The descriptor, as its template is written.
    pub descriptor: String,
    /// Hits that the limit allows.
    pub limit: u64,
    /// In this time, in seconds.
    pub period_seconds: f64,
    /// Counters that were met.
    pub counters: u64,
    /// Hits that were asked for.
    pub asked: u64,
    /// Hits that passed.
    pub admitted: u64,
    /// The most hits of a counter that passed in any period, wherever it begins.
    pub most_in_a_period: u64,
    /// The most hits of a counter that passed in a period of the clock, as fixed windows count.
    pub most_in_a_window: u64,
    /// Counters of which more than the limit passed in some period.
    pub counters_over_in_a_period: u64,
    /// Counters of which more than the limit passed in a period of the clock.
    pub counters_over_in_a_window: u64,
    /// Hits that passed, and would not have by an exact sliding window log.
    pub wrongly_admitted: u64,
    /// Hits that were refused, and would have passed by an exact sliding window log.
    pub wrongly_refused: u64,
}

/// What Envoy waits, unless it is told otherwise, in microseconds.
const ENVOYS_TIMEOUT_US: u64 = 20_000;

impl Findings {
    /// Works out what `record` says. `stated` is the limit that holds for all descriptors, hits and microseconds, where
    /// it is not to be taken from the answers.
    pub fn new(plan: &Plan, mut record: Record, stated: Option<(u64, u64)>) -> Self {
        let seconds = plan.duration.as_secs_f64();
        let [ok, over_limit, unknown] = record.verdicts;
        let answers = ok + over_limit + unknown;
        let late = record.latencies.len() - record.latencies.count_between(0, ENVOYS_TIMEOUT_US);
        let server = record.usage.map(|([before, after], answers)| {
            let cpu = after.cpu.saturating_sub(before.cpu).as_secs_f64();
            Server {
                cpu_us_per_answer: cpu * 1e6 / answers.max(1) as f64,
                cores: cpu / seconds,
                resident_bytes_before: before.resident_bytes,
                resident_bytes: after.resident_bytes,
            }
        });
        let (limits, unlimited) = limits(plan, &mut record.events, stated);
        Self {
            answers,
            seconds,
            answers_per_second: answers as f64 / seconds,
            latency_us: Spread::of(&record.latencies),
            unsent_us: plan.rate.map(|_| Spread::of(&record.waits)),
            later_than_20_ms: late,
            verdicts: Verdicts { ok, over_limit, unknown },
            errors: record.failures,
            server,
            limits,
            unlimited,
            not_judged: record.unheard,
        }
    }
}

impl Spread {
    fn of(histogram: &Histogram<u64>) -> Self {
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

/// A template, a descriptor of it, and a limit with its period in microseconds.
type Place = (u16, u16, u64, u64);

/// What the counters of a limit come to.
#[derive(Default)]
struct Sum {
    judgement: Judgement,
    counters: u64,
    over_in_a_period: u64,
    over_in_a_window: u64,
}

/// Each limit that was met, and the descriptors without one.
fn limits(plan: &Plan, events: &mut [Event], stated: Option<(u64, u64)>) -> (Vec<Limit>, u64) {
    let names: Vec<(String, Vec<String>)> =
        plan.mix.templates().map(|template| (template.domain().to_owned(), template.descriptors().collect())).collect();
    events.sort_unstable_by_key(|event| (event.counter, event.at_us));
    let mut unlimited = 0;
    let mut sums: HashMap<Place, Sum> = HashMap::new();
    for counter in events.chunk_by(|one, next| one.counter == next.counter) {
        // A limit may change while it is asked for: the last word holds.
        let told = counter.iter().rev().find_map(|event| event.limit).and_then(|(limit, unit)| {
            let period_us = period_us(unit)?;
            Some((u64::from(limit), period_us))
        });
        let Some((limit, period_us)) = stated.or(told) else {
            unlimited += counter.len() as u64;
            continue;
        };
        let verdicts: Vec<Verdict> = counter.iter().map(verdict).collect();
        let judgement = judge(&verdicts, limit, period_us);
        let sum = sums.entry((counter[0].template, counter[0].descriptor, limit, period_us)).or_default();
        sum.judgement += judgement;
        sum.counters += 1;
        sum.over_in_a_period += u64::from(judgement.most_in_a_period > limit);
        sum.over_in_a_window += u64::from(judgement.most_in_a_window > limit);
    }
    let mut limits: Vec<_> = sums.into_iter().collect();
    limits.sort_unstable_by_key(|(place, _)| *place);
    let limits = limits.into_iter().map(|((template, descriptor, limit, period_us), sum)| {
        let (domain, descriptors) = &names[usize::from(template)];
        Limit {
            domain: domain.clone(),
            descriptor: descriptors[usize::from(descriptor)].clone(),
            limit,
            period_seconds: period_us as f64 / 1e6,
            counters: sum.counters,
            asked: sum.judgement.asked,
            admitted: sum.judgement.admitted,
            most_in_a_period: sum.judgement.most_in_a_period,
            most_in_a_window: sum.judgement.most_in_a_window,
            counters_over_in_a_period: sum.over_in_a_period,
            counters_over_in_a_window: sum.over_in_a_window,
            wrongly_admitted: sum.judgement.wrongly_admitted,
            wrongly_refused: sum.judgement.wrongly_refused,
        }
    });
    (limits.collect(), unlimited)
}

fn verdict(event: &Event) -> Verdict {
    Verdict { at_us: event.at_us, hits: event.hits.into(), admitted: event.admitted }
}

/// How long a unit is, in microseconds; a month has 30 days.
fn period_us(unit: i32) -> Option<u64> {
    const SECOND: u64 = 1_000_000;
    const DAY: u64 = 86_400 * SECOND;
    /// Not among Envoy's units, and told by servers that know weeks.
    const WEEK: i32 = 7;
    Some(match RateLimitUnit::try_from(unit) {
        Ok(RateLimitUnit::Second) => SECOND,
        Ok(RateLimitUnit::Minute) => 60 * SECOND,
        Ok(RateLimitUnit::Hour) => 3600 * SECOND,
        Ok(RateLimitUnit::Day) => DAY,
        Ok(RateLimitUnit::Month) => 30 * DAY,
        Ok(RateLimitUnit::Year) => 365 * DAY,
        _ if unit == WEEK => 7 * DAY,
        _ => return None,
    })
}

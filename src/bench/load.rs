//! The load itself: who asks when, and what is written down of the answers.
//!
//! A closed loop asks again once it was answered, and finds how much a server can take. An open loop asks when it was
//! meant to, whatever became of the calls before; its latencies count from then, so that a server that stands still for
//! a second is charged with every call of that second, and not with the one that happened to be on its way.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;

use super::connection::{Dial, Failure, GrpcConnection};
use super::keys::Keys;
use super::template::{Mix, Values};
use super::usage::{Source, Usage};
use crate::clock::{Clock, micros};
use crate::pb::rate_limit_response::Code;
use crate::pb::{RateLimitRequest, RateLimitResponse};

/// What to ask, how often, and for how long.
#[derive(Clone)]
pub struct Plan {
    /// The server.
    pub dial: Dial,
    /// The requests.
    pub mix: Mix,
    /// The key space.
    pub keys: Keys,
    /// Calls a second, over all connections; `None`: a closed loop.
    pub rate: Option<f64>,
    /// Connections; 1 at least.
    pub connections: usize,
    /// Calls on their way on each connection: always so many in a closed loop, at most so many in an open one.
    pub streams: usize,
    /// Before anything is measured.
    pub warm_up: Duration,
    /// What is measured.
    pub duration: Duration,
    /// Where the random numbers begin: the same seed draws the same keys.
    pub seed: u64,
    /// Where the server's use of CPU and memory is read.
    pub usage: Option<Source>,
}

/// How far a run is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Since its beginning.
    pub elapsed: Duration,
    /// Answers so far.
    pub answers: u64,
    /// Calls without an answer so far.
    pub failures: u64,
}

/// What was written down.
#[derive(Debug)]
pub struct Record {
    /// Of calls that were answered or timed out, in microseconds.
    pub latencies: Histogram<u64>,
    /// How long calls of an open loop waited for being sent, in microseconds.
    pub waits: Histogram<u64>,
    /// Answers, by verdict: OK, over limit, unknown.
    pub verdicts: [u64; 3],
    /// Calls without an answer, by why.
    pub failures: BTreeMap<String, u64>,
    /// Descriptors with a verdict, those of the warm-up included.
    pub events: Vec<Event>,
    /// Descriptors that found no room in `events`.
    pub unheard: u64,
    /// What the server used before and after, and the answers in between.
    pub usage: Option<([Usage; 2], u64)>,
}

/// A descriptor with its verdict.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// Which counter: a hash of its domain and entries.
    pub counter: u64,
    /// When, in microseconds since the Unix epoch: half way between question and answer.
    pub at_us: u64,
    /// Hits it asked for.
    pub hits: u32,
    /// Which template.
    pub template: u16,
    /// Which descriptor of it.
    pub descriptor: u16,
    /// The limit that the server told: requests, and the unit as in protobuf.
    pub limit: Option<(u32, i32)>,
    /// Whether it passed.
    pub admitted: bool,
}

/// Why a run came to nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// A connection that it was to begin with was not made.
    #[error(transparent)]
    Connection(Failure),
    /// Something else, in a line.
    #[error("{0}")]
    Other(String),
}

impl From<String> for Trouble {
    fn from(what: String) -> Self {
        Self::Other(what)
    }
}

/// The most events that are kept: 400 MB of them.
const MOST_EVENTS: usize = 10_000_000;
/// The most kinds of failures that are told apart.
const MOST_KINDS: usize = 32;
/// The longest latency that is told from longer ones, in microseconds.
const LONGEST_US: u64 = 3_600_000_000;
/// How often progress is told.
const PROGRESS: Duration = Duration::from_millis(200);
/// How long a connection that was lost is left alone.
const RECONNECT_AFTER: Duration = Duration::from_millis(50);

impl Record {
    fn new() -> Self {
        let histogram = || Histogram::new_with_max(LONGEST_US, 3).expect("three digits up to an hour can be kept");
        Self {
            latencies: histogram(),
            waits: histogram(),
            verdicts: [0; 3],
            failures: BTreeMap::new(),
            events: Vec::new(),
            unheard: 0,
            usage: None,
        }
    }

    fn failed(&mut self, failure: &Failure) {
        let mut kind = failure.to_string();
        if self.failures.len() >= MOST_KINDS && !self.failures.contains_key(&kind) {
            "others".clone_into(&mut kind);
        }
        *self.failures.entry(kind).or_default() += 1;
    }

    fn add(&mut self, other: Self) {
        // All have the same bounds.
        let _ = self.latencies.add(&other.latencies);
        let _ = self.waits.add(&other.waits);
        self.verdicts.iter_mut().zip(other.verdicts).for_each(|(sum, more)| *sum += more);
        other.failures.into_iter().for_each(|(kind, count)| *self.failures.entry(kind).or_default() += count);
        self.events.extend(other.events);
        self.unheard += other.unheard;
    }
}

/// What all who ask share.
struct Run {
    plan: Plan,
    lines: Vec<Line>,
    begun: Instant,
    /// The wall clock when it began, in microseconds.
    begun_us: u64,
    hasher: RandomState,
    number: AtomicU64,
    answers: AtomicU64,
    failures: AtomicU64,
}

/// A connection, what is due on it, and what came of it.
struct Line {
    connection: tokio::sync::Mutex<Option<GrpcConnection>>,
    due: tokio::sync::Mutex<UnboundedReceiver<Instant>>,
    record: Mutex<Record>,
}

/// Runs a plan, and tells of its progress now and then. Nothing is asked before every connection is made.
pub async fn run(plan: Plan, mut progress: impl FnMut(Progress)) -> Result<Record, Trouble> {
    let (mut lines, mut pacers) = (Vec::new(), Vec::new());
    for _ in 0..plan.connections {
        let connection = plan.dial.connect().await.map_err(Trouble::Connection)?;
        let (pacer, due) = unbounded_channel();
        pacers.push(pacer);
        let (connection, due) = (tokio::sync::Mutex::new(Some(connection)), tokio::sync::Mutex::new(due));
        lines.push(Line { connection, due, record: Mutex::new(Record::new()) });
    }
    look(plan.usage.as_ref()).await?;
    let run = Arc::new(Run {
        begun: Instant::now(),
        begun_us: Clock::System.now().as_micros(),
        hasher: RandomState::new(),
        number: AtomicU64::new(0),
        answers: AtomicU64::new(0),
        failures: AtomicU64::new(0),
        lines,
        plan,
    });
    if run.plan.rate.is_some() {
        let run = Arc::clone(&run);
        std::thread::spawn(move || run.pace(&pacers));
    }
    let mut askers = JoinSet::new();
    for line in 0..run.plan.connections {
        for stream in 0..run.plan.streams {
            askers.spawn(Arc::clone(&run).ask(line, stream));
        }
    }
    let usage = tokio::spawn(Arc::clone(&run).usage());
    let mut ticks = tokio::time::interval(PROGRESS);
    loop {
        tokio::select! {
            _ = ticks.tick() => progress(run.progress()),
            ended = askers.join_next() => match ended {
                None => break,
                Some(ended) => ended.map_err(|error| error.to_string())?,
            }
        }
    }
    progress(run.progress());
    let usage = usage.await.map_err(|error| error.to_string())??;
    let mut record = Record { usage, ..Record::new() };
    for line in &run.lines {
        let part = std::mem::replace(&mut *line.record.lock().unwrap_or_else(PoisonError::into_inner), Record::new());
        record.add(part);
    }
    Ok(record)
}

impl Run {
    fn measured_from(&self) -> Instant {
        self.begun + self.plan.warm_up
    }

    fn end(&self) -> Instant {
        self.measured_from() + self.plan.duration
    }

    fn progress(&self) -> Progress {
        Progress {
            elapsed: self.begun.elapsed(),
            answers: self.answers.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
        }
    }

    /// Says when calls are due, on one connection after the other. It has a thread of its own: a runtime's timer is a
    /// millisecond coarse, and waits for whoever runs.
    fn pace(&self, pacers: &[UnboundedSender<Instant>]) {
        let Some(rate) = self.plan.rate else { return };
        let whole = (self.plan.warm_up + self.plan.duration).as_secs_f64() * rate;
        let mut number: u64 = 0;
        while (number as f64) < whole {
            let due = self.begun + Duration::from_secs_f64(number as f64 / rate);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let lines = pacers.len() as u64;
            #[expect(clippy::cast_possible_truncation, reason = "the place of a connection")]
            if pacers[(number % lines) as usize].send(due).is_err() {
                return;
            }
            number += 1;
        }
    }

    /// When the next call on a connection is due; `None` once it is over.
    async fn due(&self, line: usize) -> Option<Instant> {
        match self.plan.rate {
            Some(_) => self.lines[line].due.lock().await.recv().await,
            None => Some(Instant::now()).filter(|now| *now < self.end()),
        }
    }

    /// One that asks again and again.
    async fn ask(self: Arc<Self>, line: usize, stream: usize) {
        let seed = self.plan.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut random = SmallRng::seed_from_u64(seed.wrapping_add((line * self.plan.streams + stream) as u64));
        let keys = self.plan.keys.sampler();
        let mut connection = None;
        while let Some(due) = self.due(line).await {
            let number = self.number.fetch_add(1, Ordering::Relaxed);
            let (template, request) = {
                let key = keys.draw(&mut random);
                let (place, template) = self.plan.mix.draw(&mut random);
                (place, template.fill(&mut Values { key, number, random: &mut random }))
            };
            let sent = Instant::now();
            let answer = if sent > self.end() + self.plan.dial.timeout {
                // It fell behind, and shall not go on for ever.
                Err(Failure::Late)
            } else {
                self.call(line, &mut connection, &request).await
            };
            self.enter(line, (due, sent), (template, &request), answer);
        }
    }

    /// Asks on this asker's handle of the connection; the first to find it lost connects anew, for all.
    async fn call(
        &self,
        line: usize,
        own: &mut Option<GrpcConnection>,
        request: &RateLimitRequest,
    ) -> Result<RateLimitResponse, Failure> {
        let connection = match own {
            Some(connection) => connection,
            None => {
                let mut shared = self.lines[line].connection.lock().await;
                if shared.is_none() {
                    tokio::time::sleep(RECONNECT_AFTER).await;
                    *shared = Some(self.plan.dial.connect().await?);
                }
                own.insert(shared.clone().ok_or_else(|| Failure::Connection("lost".to_owned()))?)
            }
        };
        let answer = connection.call(request).await;
        if let Err(Failure::Connection(_)) = answer {
            let mut shared = self.lines[line].connection.lock().await;
            shared.take_if(|shared| shared.is_same(connection));
            *own = None;
        }
        answer
    }

    fn enter(
        &self,
        line: usize,
        (due, sent): (Instant, Instant),
        (template, request): (usize, &RateLimitRequest),
        answer: Result<RateLimitResponse, Failure>,
    ) {
        let done = Instant::now();
        let counter = if answer.is_ok() { &self.answers } else { &self.failures };
        counter.fetch_add(1, Ordering::Relaxed);
        let mut record = self.lines[line].record.lock().unwrap_or_else(PoisonError::into_inner);
        if (self.measured_from()..self.end()).contains(&due) {
            if matches!(answer, Ok(_) | Err(Failure::Late)) {
                record.latencies.saturating_record(micros(done - due));
            }
            if self.plan.rate.is_some() {
                record.waits.saturating_record(micros(sent - due));
            }
            match &answer {
                Ok(answer) => record.verdicts[verdict(answer)] += 1,
                Err(failure) => record.failed(failure),
            }
        }
        let Ok(answer) = answer else { return };
        let at_us = self.begun_us + micros(sent + (done - sent) / 2 - self.begun);
        let room = MOST_EVENTS / self.lines.len();
        for (place, (descriptor, status)) in request.descriptors.iter().zip(&answer.statuses).enumerate() {
            let hits = descriptor.hits_addend.unwrap_or_else(|| request.hits_addend.max(1).into());
            let hits = u32::try_from(hits).unwrap_or(u32::MAX);
            // Looks and refunds have no verdict to judge.
            if hits == 0 || descriptor.is_negative_hits {
                continue;
            }
            if record.events.len() >= room {
                record.unheard += 1;
                continue;
            }
            record.events.push(Event {
                counter: self.hasher.hash_one((&request.domain, &descriptor.entries)),
                at_us,
                hits,
                template: u16::try_from(template).unwrap_or(u16::MAX),
                descriptor: u16::try_from(place).unwrap_or(u16::MAX),
                limit: status.current_limit.as_ref().map(|limit| (limit.requests_per_unit, limit.unit)),
                admitted: status.code() != Code::OverLimit,
            });
        }
    }

    /// What the server uses from the end of the warm-up to the end, and the answers in between.
    async fn usage(self: Arc<Self>) -> Result<Option<([Usage; 2], u64)>, String> {
        let source = self.plan.usage.as_ref();
        tokio::time::sleep_until(self.measured_from().into()).await;
        let (before, answers) = (look(source).await?, self.answers.load(Ordering::Relaxed));
        tokio::time::sleep_until(self.end().into()).await;
        let (after, answers) = (look(source).await?, self.answers.load(Ordering::Relaxed) - answers);
        Ok(before.zip(after).map(|(before, after)| ([before, after], answers)))
    }
}

async fn look(source: Option<&Source>) -> Result<Option<Usage>, String> {
    let Some(source) = source.cloned() else { return Ok(None) };
    let looked = tokio::task::spawn_blocking(move || source.usage()).await;
    looked.map_err(|error| error.to_string())?.map(Some)
}

/// The place of a verdict in [`Record::verdicts`].
fn verdict(answer: &RateLimitResponse) -> usize {
    match answer.overall_code() {
        Code::Ok => 0,
        Code::OverLimit => 1,
        Code::Unknown => 2,
    }
}

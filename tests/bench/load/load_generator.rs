//! Generation of load: the times of calls, and the recording of their results.
//!
//! A closed loop sends the next call when the previous one is answered, and finds the maximum throughput of a server.
//! An open loop sends calls when they are due, whatever happens to earlier ones; its latencies count from the due time,
//! so a server that pauses for a second is charged with every call of that second (no coordinated omission).
//! `connection` makes a call, with its timeout and errors; `results` judges verdicts.
//!
//! Decides: from when the latency of a call of `bench` counts.
//! Decides: `bench` and a server that does not listen (it ends), a lost connection (errors), Ctrl-C (prints nothing).

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;
use tollkeeper::base::clock::{Clock, to_micros};
use tollkeeper::base::pb::rate_limit_response::Code;
use tollkeeper::base::pb::{RateLimitRequest, RateLimitResponse};
use tollkeeper::base::sharded::lock_ignoring_poison;

use super::connection::{BenchConnection, BenchTarget, CallError};
use super::measurements::{
    DescriptorVerdict, LimitInResponse, LoadMeasurements, MAX_VERDICT_EVENTS, ResourceUsage, UsageSource, UsageSpan,
};
use super::requests::{KeySpace, PlaceholderValues, RequestMix};

/// Parameters of a run.
#[derive(Clone)]
pub struct LoadPlan {
    /// The server.
    pub target: BenchTarget,
    /// The requests.
    pub mix: RequestMix,
    /// The key space.
    pub keys: KeySpace,
    /// Calls per second over all connections, for an open loop; `None` means a closed loop.
    pub rate: Option<f64>,
    /// Number of connections, at least 1.
    pub connections: usize,
    /// Concurrent calls on each connection: constant in a closed loop, a maximum in an open one.
    pub streams: usize,
    /// Time before the measurement.
    pub warm_up: Duration,
    /// Time of the measurement.
    pub duration: Duration,
    /// Seed of the random numbers; the same seed samples the same keys.
    pub seed: u64,
    /// Source of the server's CPU time and memory.
    pub usage: Option<UsageSource>,
}

/// Progress of a run.
#[derive(Clone, Copy, Debug)]
pub struct LoadProgress {
    /// Time since the start.
    pub elapsed: Duration,
    /// Number of responses.
    pub responses: u64,
    /// Number of calls without a response.
    pub errors: u64,
}

/// Error of a run without a result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadRunError {
    /// A connection could not be opened at the start.
    #[error(transparent)]
    Connection(CallError),
    /// Another error, on one line.
    #[error("{0}")]
    Other(String),
}

impl From<String> for LoadRunError {
    fn from(what: String) -> Self {
        Self::Other(what)
    }
}

/// Interval of progress reports.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// Delay before a lost connection is opened again.
const RECONNECT_DELAY: Duration = Duration::from_millis(50);

/// State of a run, shared by all streams.
struct LoadRun {
    plan: LoadPlan,
    connections: Vec<LoadConnection>,
    started: Instant,
    /// Wall-clock time of the start, in microseconds since the Unix epoch.
    started_us: u64,
    hasher: RandomState,
    next_number: AtomicU64,
    responses: AtomicU64,
    errors: AtomicU64,
}

/// A connection with the due times of its calls and its measurements.
struct LoadConnection {
    connection: tokio::sync::Mutex<Option<BenchConnection>>,
    due: tokio::sync::Mutex<UnboundedReceiver<Instant>>,
    record: Mutex<LoadMeasurements>,
}

/// A request on its way.
struct PendingCall {
    request: RateLimitRequest,
    template: usize,
    due: Instant,
    sent: Instant,
}

/// Runs a plan and reports progress. Calls begin when every connection is open.
pub async fn generate_load(
    plan: LoadPlan,
    mut progress: impl FnMut(LoadProgress),
) -> Result<LoadMeasurements, LoadRunError> {
    let (mut connections, mut due_senders) = (Vec::new(), Vec::new());
    for _ in 0..plan.connections {
        let connection = plan.target.connect().await.map_err(LoadRunError::Connection)?;
        let (sender, due) = unbounded_channel();
        due_senders.push(sender);
        let (connection, due) = (tokio::sync::Mutex::new(Some(connection)), tokio::sync::Mutex::new(due));
        connections.push(LoadConnection { connection, due, record: Mutex::new(LoadMeasurements::new()) });
    }
    read_server_usage(plan.usage.as_ref()).await?;
    let run = Arc::new(LoadRun {
        started: Instant::now(),
        started_us: Clock::System.now().as_micros(),
        hasher: RandomState::new(),
        next_number: AtomicU64::new(0),
        responses: AtomicU64::new(0),
        errors: AtomicU64::new(0),
        connections,
        plan,
    });
    if run.plan.rate.is_some() {
        let run = Arc::clone(&run);
        std::thread::spawn(move || run.send_due_times(&due_senders));
    }
    let mut streams = JoinSet::new();
    for connection in 0..run.plan.connections {
        for stream in 0..run.plan.streams {
            streams.spawn(Arc::clone(&run).send_calls(connection, stream));
        }
    }
    let usage = tokio::spawn(Arc::clone(&run).measure_server_usage());
    let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
    loop {
        tokio::select! {
            _ = ticks.tick() => progress(run.progress()),
            ended = streams.join_next() => match ended {
                None => break,
                Some(ended) => ended.map_err(|error| error.to_string())?,
            }
        }
    }
    progress(run.progress());
    let usage = usage.await.map_err(|error| error.to_string())??;
    Ok(run.merge_measurements(usage))
}

impl LoadRun {
    fn measurement_start(&self) -> Instant {
        self.started + self.plan.warm_up
    }

    fn measurement_end(&self) -> Instant {
        self.measurement_start() + self.plan.duration
    }

    fn progress(&self) -> LoadProgress {
        LoadProgress {
            elapsed: self.started.elapsed(),
            responses: self.responses.load(Ordering::Relaxed),
            errors: self.errors.load(Ordering::Relaxed),
        }
    }

    /// Merges the measurements of all connections.
    fn merge_measurements(&self, usage: Option<UsageSpan>) -> LoadMeasurements {
        let mut all = LoadMeasurements { usage, ..LoadMeasurements::new() };
        for connection in &self.connections {
            let mut record = lock_ignoring_poison(&connection.record);
            all.merge(std::mem::replace(&mut *record, LoadMeasurements::new()));
        }
        all
    }

    /// Sends the due times of calls to the connections in turn.
    ///
    /// Runs on a thread of its own: the timer of a tokio runtime has a resolution of 1 ms and waits for busy workers.
    fn send_due_times(&self, due_senders: &[UnboundedSender<Instant>]) {
        let Some(rate) = self.plan.rate else { return };
        let total = (self.plan.warm_up + self.plan.duration).as_secs_f64() * rate;
        for (number, sender) in (0_u64..).zip(due_senders.iter().cycle()) {
            if number as f64 >= total {
                return;
            }
            let due = self.started + Duration::from_secs_f64(number as f64 / rate);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if sender.send(due).is_err() {
                return;
            }
        }
    }

    /// Waits for the due time of the next call on a connection; `None` after the end.
    async fn receive_due_time(&self, connection: usize) -> Option<Instant> {
        match self.plan.rate {
            Some(_) => self.connections[connection].due.lock().await.recv().await,
            None => Some(Instant::now()).filter(|now| *now < self.measurement_end()),
        }
    }

    /// Sends calls one after the other until the end.
    async fn send_calls(self: Arc<Self>, connection: usize, stream: usize) {
        let seed = self.plan.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let stream_number = (connection * self.plan.streams + stream) as u64;
        let mut random = SmallRng::seed_from_u64(seed.wrapping_add(stream_number));
        let keys = self.plan.keys.build_sampler();
        let mut handle = None;
        while let Some(due) = self.receive_due_time(connection).await {
            let number = self.next_number.fetch_add(1, Ordering::Relaxed);
            let key = keys.sample_key(&mut random);
            let (template, request) = self.plan.mix.sample_template(&mut random);
            let request = request.fill_placeholders(&mut PlaceholderValues { key, number, random: &mut random });
            let call = PendingCall { request, template, due, sent: Instant::now() };
            let response = if call.sent > self.measurement_end() + self.plan.target.timeout {
                // The stream fell behind; the run must end all the same.
                Err(CallError::Timeout)
            } else {
                self.send_call(connection, &mut handle, &call.request).await
            };
            self.record_result(connection, &call, response);
        }
    }

    /// Sends a request on the stream's handle of the connection; the first stream that finds it lost reconnects for
    /// all.
    async fn send_call(
        &self,
        connection: usize,
        handle: &mut Option<BenchConnection>,
        request: &RateLimitRequest,
    ) -> Result<RateLimitResponse, CallError> {
        let own = match handle {
            Some(own) => own,
            None => {
                let mut shared = self.connections[connection].connection.lock().await;
                if shared.is_none() {
                    tokio::time::sleep(RECONNECT_DELAY).await;
                    *shared = Some(self.plan.target.connect().await?);
                }
                handle.insert(shared.clone().ok_or_else(|| CallError::Connection("lost".to_owned()))?)
            }
        };
        let response = own.call(request).await;
        if let Err(CallError::Connection(_)) = response {
            let mut shared = self.connections[connection].connection.lock().await;
            shared.take_if(|shared| shared.is_same_connection(own));
            *handle = None;
        }
        response
    }

    /// Records the result of a call.
    fn record_result(&self, connection: usize, call: &PendingCall, response: Result<RateLimitResponse, CallError>) {
        let done = Instant::now();
        let counter = if response.is_ok() { &self.responses } else { &self.errors };
        counter.fetch_add(1, Ordering::Relaxed);
        let mut record = lock_ignoring_poison(&self.connections[connection].record);
        if (self.measurement_start()..self.measurement_end()).contains(&call.due) {
            if matches!(response, Ok(_) | Err(CallError::Timeout)) {
                record.latencies.saturating_record(to_micros(done - call.due));
            }
            if self.plan.rate.is_some() {
                record.send_delays.saturating_record(to_micros(call.sent - call.due));
            }
            match &response {
                Ok(response) => record.count_verdict(response),
                Err(error) => record.count_error(error),
            }
        }
        if let Ok(response) = response {
            let at_us = self.started_us + to_micros(call.sent + (done - call.sent) / 2 - self.started);
            self.record_verdicts(&mut record, call, &response, at_us);
        }
    }

    fn record_verdicts(
        &self,
        record: &mut LoadMeasurements,
        call: &PendingCall,
        response: &RateLimitResponse,
        at_us: u64,
    ) {
        let capacity = MAX_VERDICT_EVENTS / self.connections.len();
        let request = &call.request;
        for (index, (descriptor, status)) in request.descriptors.iter().zip(&response.statuses).enumerate() {
            let hits = descriptor.hits_addend.unwrap_or_else(|| request.hits_addend.max(1).into());
            let hits = u32::try_from(hits).unwrap_or(u32::MAX);
            // Peeks and refunds have no verdict to evaluate.
            if hits == 0 || descriptor.is_negative_hits {
                continue;
            }
            if record.events.len() >= capacity {
                record.dropped_events += 1;
                continue;
            }
            let limit = status.current_limit.as_ref();
            record.events.push(DescriptorVerdict {
                counter: self.hasher.hash_one((&request.domain, &descriptor.entries)),
                at_us,
                hits,
                template: u16::try_from(call.template).unwrap_or(u16::MAX),
                descriptor: u16::try_from(index).unwrap_or(u16::MAX),
                limit: limit
                    .map(|limit| LimitInResponse { requests_per_unit: limit.requests_per_unit, unit: limit.unit }),
                admitted: status.code() != Code::OverLimit,
            });
        }
    }

    /// Measures the resource usage of the server between the end of the warm-up and the end of the run.
    async fn measure_server_usage(self: Arc<Self>) -> Result<Option<UsageSpan>, String> {
        let source = self.plan.usage.as_ref();
        tokio::time::sleep_until(self.measurement_start().into()).await;
        let (before, responses) = (read_server_usage(source).await?, self.responses.load(Ordering::Relaxed));
        tokio::time::sleep_until(self.measurement_end().into()).await;
        let (after, responses) = (read_server_usage(source).await?, self.responses.load(Ordering::Relaxed) - responses);
        Ok(before.zip(after).map(|(before, after)| UsageSpan { before, after, responses }))
    }
}

async fn read_server_usage(source: Option<&UsageSource>) -> Result<Option<ResourceUsage>, String> {
    let Some(source) = source.cloned() else { return Ok(None) };
    let usage = tokio::task::spawn_blocking(move || source.measure_usage()).await;
    usage.map_err(|error| error.to_string())?.map(Some)
}

//! Load: gRPC calls over bare HTTP/2, so that the generator uses less CPU than the server under measurement.
//!
//! A closed loop measures the cost of a call and the throughput. An open loop starts calls on schedule, independent of
//! earlier ones, and measures latency. Request frames are built in advance.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::SendRequest;
use http::Request;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::process::MeasuredServer;

/// Connections of a closed loop.
const CONNECTIONS: usize = 4;
/// Concurrent calls per connection, unless a situation sets fewer.
pub(crate) const STREAMS: usize = 64;

/// Result of one measurement.
pub(crate) struct Cost {
    pub(crate) us_per_call: f64,
    pub(crate) calls_per_s: f64,
    /// Number of responses other than OK.
    pub(crate) rejected: u64,
}

/// A connection.
#[derive(Clone)]
pub(crate) struct Caller {
    requests: SendRequest<Bytes>,
    uri: http::Uri,
}

impl Caller {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.expect("a connection");
        stream.set_nodelay(true).expect("nodelay");
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(1 << 20).initial_connection_window_size(1 << 24);
        let (requests, connection) = builder.handshake(stream).await.expect("a handshake");
        tokio::spawn(async move { connection.await.expect("the connection holds") });
        let uri = format!("http://{address}/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
        Self { requests, uri: uri.parse().expect("a uri") }
    }

    /// Makes a call; true if the response is OK.
    pub(crate) async fn call(&self, frame: Bytes) -> bool {
        let head = Request::post(self.uri.clone())
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .expect("a request");
        let mut requests = self.requests.clone().ready().await.expect("the server is there");
        let (answer, mut body) = requests.send_request(head, false).expect("a stream");
        body.send_data(frame, true).expect("it is sent");
        let mut body = answer.await.expect("an answer").into_body();
        let mut message = Vec::with_capacity(64);
        while let Some(data) = body.data().await {
            let data = data.expect("data");
            body.flow_control().release_capacity(data.len()).expect("capacity");
            message.extend_from_slice(&data);
        }
        // Five bytes of frame header, then field 1, the overall code: 1 is OK.
        assert!(message.len() > 7, "no message in the answer");
        message[5..7] == [8, 1]
    }
}

/// Closed loop: each stream makes its next call when the last one is answered.
#[derive(Clone, Copy)]
pub(crate) struct ClosedLoop {
    pub(crate) connections: usize,
    /// Concurrent calls per connection.
    pub(crate) streams: usize,
    pub(crate) time: Duration,
}

/// Wait of an open loop for the next due calls.
#[derive(Clone, Copy)]
pub(crate) enum Pace {
    /// Sleeps about a millisecond, and starts what has become due.
    Sleep,
    /// Occupies a core, and starts each call in time.
    Spin,
}

/// Calls in a closed loop for `time`; `request` builds the frame for a key.
pub(crate) async fn closed_loop(
    server: &MeasuredServer,
    keys: u64,
    request: fn(u64) -> Bytes,
    (streams, time): (usize, Duration),
) -> Cost {
    closed_loop_over(server, keys, request, ClosedLoop { connections: CONNECTIONS, streams, time }).await
}

/// As [`closed_loop`], over a number of connections.
pub(crate) async fn closed_loop_over(
    server: &MeasuredServer,
    keys: u64,
    request: fn(u64) -> Bytes,
    ClosedLoop { connections, streams, time }: ClosedLoop,
) -> Cost {
    let calls = Arc::new(AtomicU64::new(0));
    let rejected = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    for connection in 0..connections {
        let caller = Caller::connect(server.address()).await;
        for stream in 0..streams {
            let (caller, calls, stop) = (caller.clone(), Arc::clone(&calls), Arc::clone(&stop));
            let rejected = Arc::clone(&rejected);
            let mut random = (connection * streams + stream + 1) as u64 * 0x9e37_79b9;
            callers.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    if !caller.call(request(random % keys)).await {
                        rejected.fetch_add(1, Ordering::Relaxed);
                    }
                    calls.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    }
    let (cpu, before, started) = (server.cpu(), calls.load(Ordering::Relaxed), Instant::now());
    tokio::time::sleep(time).await;
    let (cpu, count, elapsed) = (server.cpu() - cpu, calls.load(Ordering::Relaxed) - before, started.elapsed());
    stop.store(true, Ordering::Relaxed);
    while callers.join_next().await.is_some() {}
    Cost {
        us_per_call: cpu.as_secs_f64() * 1e6 / count as f64,
        calls_per_s: count as f64 / elapsed.as_secs_f64(),
        rejected: rejected.load(Ordering::Relaxed),
    }
}

/// Calls once for each of `keys`, keys that [`closed_loop`] does not use.
pub(crate) async fn call_once_for_each(server: &MeasuredServer, keys: Range<u64>, request: fn(u64) -> Bytes) {
    let mut streams = JoinSet::new();
    let caller = Caller::connect(server.address()).await;
    for stream in 0..STREAMS as u64 {
        let (caller, keys) = (caller.clone(), keys.start + stream..keys.end);
        streams.spawn(async move {
            for key in keys.step_by(STREAMS) {
                caller.call(request(10_000_000 + key)).await;
            }
        });
    }
    while streams.join_next().await.is_some() {}
}

/// Calls at a steady rate for `time`; returns the sorted latencies in microseconds, from each call's scheduled start.
pub(crate) async fn open_loop_latencies(
    server: &MeasuredServer,
    per_second: u32,
    time: Duration,
    pace: Pace,
    request: fn(u64) -> Bytes,
) -> Vec<u64> {
    let mut callers = Vec::new();
    for _ in 0..CONNECTIONS {
        callers.push(Caller::connect(server.address()).await);
    }
    let started = Instant::now();
    let mut calls = JoinSet::new();
    let mut place: u32 = 0;
    let total = per_second * u32::try_from(time.as_secs()).expect("seconds");
    while place < total {
        // Starts all due calls: the runtime's timer has a resolution of one millisecond.
        let due = u32::try_from(started.elapsed().as_micros() * u128::from(per_second) / 1_000_000).unwrap_or(total);
        // The first call is due at once.
        while place < (due + 1).min(total) {
            let intended = started + Duration::from_secs(1) * place / per_second;
            let caller = callers[place as usize % CONNECTIONS].clone();
            calls.spawn(async move {
                caller.call(request(u64::from(place % 10_000))).await;
                u64::try_from(intended.elapsed().as_micros()).unwrap_or(u64::MAX)
            });
            place += 1;
        }
        match pace {
            Pace::Sleep => tokio::time::sleep(Duration::from_micros(200)).await,
            Pace::Spin => tokio::task::yield_now().await,
        }
    }
    let mut latencies = calls.join_all().await;
    latencies.sort_unstable();
    latencies
}

/// Latency percentile, in per mille.
pub(crate) fn percentile(latencies: &[u64], permille: usize) -> u64 {
    latencies[(latencies.len() - 1) * permille / 1000]
}

/// Median.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

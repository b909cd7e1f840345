//! Server, Redis and load generator on cores of their own: throughput by number of cores, and latency in an open loop.
//!
//! `taskset` pins each process when it starts, so that the number of its threads follows. The load generator has one
//! thread and the last core. With three cores for the server, Redis shares that one. The columns of CPU show which
//! process limits a figure. The same cores also serve with a process for each core: such processes share nothing, so
//! that what they lose against linear is the machine's.

use std::fs;
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;

use crate::load::{ClosedLoop, Pace, closed_loop_over, median, open_loop_latencies, percentile};
use crate::process::{self, MeasuredServer};
use crate::redis::{RULES, many, one};
use kit::redis::options;

const ROUND: Duration = Duration::from_secs(5);
/// More than cores, because a connection uses one core at a time.
const CONNECTIONS: usize = 12;
/// Descriptors of a call on counters in memory: the server then does much more per call than the load generator.
const DESCRIPTORS: u64 = 50;
const MAX_SERVER_CORES: usize = 3;
/// Calls in flight on each connection to counters in memory.
const MEMORY_STREAMS: usize = 24;

/// Calls on counters in memory, encoded in advance.
static FRAMES: LazyLock<Vec<Bytes>> = LazyLock::new(|| (0..2000).map(|key| many("fixed", key, DESCRIPTORS)).collect());

type FrameOfKey = fn(u64) -> Bytes;

/// Throughput with one, two and three cores for the server.
pub(crate) fn throughput() {
    run_alone(3, async |cores| {
        println!(
            "{:<8} {:>5} {:>9} {:>8} {:>10} {:>9} {:>8} {:>7}",
            "store", "cores", "calls/s", "/ linear", "/ separate", "server %", "redis %", "load %"
        );
        for is_redis in [false, true] {
            let mut first = None;
            for count in 1..=MAX_SERVER_CORES.min(cores.len() - 1) {
                let place = Placement { cores: &cores, server: count };
                let rate = throughput_with(&place, is_redis, first).await;
                first = first.or(Some(rate));
            }
        }
    });
}

async fn throughput_with(place: &Placement<'_>, is_redis: bool, first: Option<f64>) -> f64 {
    let (tollkeeper, redis) = place.start(is_redis);
    let (request, keys): (FrameOfKey, _) = match is_redis {
        true => (|key| one("fixed", key), 100_000),
        false => (|key| FRAMES[usize::try_from(key).expect("a small number")].clone(), FRAMES.len() as u64),
    };
    let streams = if is_redis { 32 } else { MEMORY_STREAMS };
    let load = ClosedLoop { connections: CONNECTIONS, streams, time: ROUND };
    let own = MeasuredServer::this_process();
    closed_loop_over(&tollkeeper, keys, request, load).await;
    let cpu = || (tollkeeper.cpu(), redis.as_ref().map(MeasuredServer::cpu).unwrap_or_default(), own.cpu());
    let (before, started) = (cpu(), Instant::now());
    let rate = closed_loop_over(&tollkeeper, keys, request, load).await.calls_per_s;
    let (after, elapsed) = (cpu(), started.elapsed().as_secs_f64());
    let percent = |before: Duration, after: Duration| 100.0 * (after - before).as_secs_f64() / elapsed;
    drop((tollkeeper, redis));
    let separate = match is_redis {
        true => "-".to_owned(),
        false => format!("{:.2}", rate / separate_processes(place).await),
    };
    println!(
        "{:<8} {:>5} {rate:>9.0} {:>8.2} {separate:>10} {:>9.0} {:>8.0} {:>7.0}",
        if is_redis { "redis" } else { "memory" },
        place.server,
        rate / first.unwrap_or(rate) / place.server as f64,
        percent(before.0, after.0),
        percent(before.1, after.1),
        percent(before.2, after.2),
    );
    rate
}

/// Calls a second of processes with one core each, over as many cores as the server has.
async fn separate_processes(place: &Placement<'_>) -> f64 {
    let start = |core| place.start_pinned(&[core], || MeasuredServer::start(process::tollkeeper(RULES)));
    let servers: Vec<_> = place.cores[..place.server].iter().copied().map(start).collect();
    let load = ClosedLoop { connections: CONNECTIONS / servers.len(), streams: MEMORY_STREAMS, time: ROUND };
    let request: FrameOfKey = |key| FRAMES[usize::try_from(key).expect("a small number")].clone();
    let loops = || join_all(servers.iter().map(|server| closed_loop_over(server, FRAMES.len() as u64, request, load)));
    loops().await;
    loops().await.iter().map(|cost| cost.calls_per_s).sum()
}

/// Latency at half of capacity, beside the empty handler at the same rate on the same core.
pub(crate) fn latency() {
    run_alone(3, async |cores| {
        for is_redis in [false, true] {
            let place = Placement { cores: &cores, server: 1 };
            let (tollkeeper, _redis) = place.start(is_redis);
            let empty = place.start_pinned(&cores[..1], MeasuredServer::empty_handler);
            let store = if is_redis { "redis" } else { "memory" };
            let request: FrameOfKey = |key| one("fixed", key);
            let load = ClosedLoop { connections: CONNECTIONS, streams: 32, time: ROUND };
            let capacity = closed_loop_over(&tollkeeper, 10_000, request, load).await.calls_per_s;
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some tens of thousands")]
            let rate = (capacity / 2.0) as u32;
            let mut ratios = Vec::new();
            for round in 1..=5 {
                let floor = open_loop_latencies(&empty, rate, ROUND, Pace::Spin, request).await;
                let ours = open_loop_latencies(&tollkeeper, rate, ROUND, Pace::Spin, request).await;
                let [floor, ours] = [floor, ours].map(|sorted| [500, 990, 999].map(|at| percentile(&sorted, at)));
                println!(
                    "{store:<6} {rate} calls/s, round {round}: p50, p99, p99.9: {ours:?} us, empty handler {floor:?} us"
                );
                ratios.push(ours[2] as f64 / floor[2] as f64);
            }
            println!("{store:<6} p99.9 / empty handler, median of the rounds: {:.2}", median(&mut ratios));
        }
    });
}

/// Cores of this machine, and the number of those that the server has.
struct Placement<'c> {
    cores: &'c [usize],
    server: usize,
}

impl Placement<'_> {
    /// Starts tollkeeper on its cores, with a Redis on the next one if there is one left, else on the last one.
    fn start(&self, is_redis: bool) -> (MeasuredServer, Option<MeasuredServer>) {
        let redis = is_redis.then(|| {
            let core = self.server.min(self.cores.len() - 1);
            self.start_pinned(&self.cores[core..=core], || options().start())
        });
        let mut setup = process::tollkeeper(RULES);
        if let Some(redis) = &redis {
            setup = setup.env("REDIS_URL", redis.address());
        }
        let tollkeeper = self.start_pinned(&self.cores[..self.server], || MeasuredServer::start(setup));
        (tollkeeper, redis.map(MeasuredServer::owned_redis))
    }

    /// Starts a process on these cores, and returns to the last core.
    fn start_pinned<T>(&self, cores: &[usize], start: impl FnOnce() -> T) -> T {
        pin(cores);
        let started = start();
        pin(&self.cores[self.cores.len() - 1..]);
        started
    }
}

/// Runs a measurement in a thread with a runtime of its own; prints a line instead with fewer than `min_cores`.
fn run_alone(min_cores: usize, work: impl AsyncFnOnce(Vec<usize>) + Send) {
    let cores = allowed_cores();
    if cores.len() < min_cores {
        return println!("skipped: {} cores, and the measurement needs {min_cores}", cores.len());
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(work(cores.clone()));
        });
    });
    pin(&cores);
}

/// Pins all threads of this process, and those of processes that it starts, to these cores.
fn pin(cores: &[usize]) {
    let list = cores.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let mut taskset = Command::new("taskset");
    taskset.args(["-a", "-c", "-p", &list, &std::process::id().to_string()]).stdout(Stdio::null());
    assert!(taskset.status().expect("taskset can be started").success(), "taskset failed for cores {list}");
}

/// Cores on which this process may run, in ascending order.
fn allowed_cores() -> Vec<usize> {
    let status = fs::read_to_string("/proc/self/status").expect("Linux");
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).expect("the list of cores");
    let number = |text: &str| text.trim().parse::<usize>().expect("a number");
    let range = |part: &str| match part.split_once('-') {
        Some((first, last)) => number(first)..=number(last),
        None => number(part)..=number(part),
    };
    list.split(',').flat_map(range).collect()
}

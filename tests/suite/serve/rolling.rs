//! A rolling restart under open-loop load: through a real Envoy and from a gRPC client that follows health, three
//! replicas that share a Redis are restarted one after the other. No request is lost, and a strict limit is kept
//! exactly.
//!
//! Requests are sent on schedule, independent of earlier ones. Responses are compared with requests, so a
//! request that was lost, let through by Envoy or decided by a policy instead of the counter shows.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use tollkeeper::base::pb::RateLimitRequest;
use tollkeeper::base::pb::rate_limit_response::Code;
use tollkeeper::base::pb::rate_limit_service_client::RateLimitServiceClient;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use kit::envoy::Envoy;
use kit::port::Port;
use kit::redis::{self, Server};
use kit::tollkeeper::{Tollkeeper, with_rules};
use kit::{grpc, read, repository, wait_for};

/// Time between two requests of the one client and of the other.
const PACE: Duration = Duration::from_millis(8);
/// Requests that one user sends before the next begins; the limit is 100.
const REQUESTS_PER_USER: usize = 150;
const LIMIT: usize = 100;
/// Number of senders: more than requests are in flight at any time.
const SENDERS: usize = 32;

/// Requests sent and admitted, by user.
#[derive(Debug, Default)]
struct Book {
    next: AtomicUsize,
    done: AtomicBool,
    users: Mutex<BTreeMap<String, [usize; 2]>>,
    lost: Mutex<Vec<String>>,
}

impl Book {
    /// Next user and the time to send at; `None` at the end.
    fn next(&self, started: Instant) -> Option<String> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let due = started + PACE * u32::try_from(number).expect("it does not last that long");
        thread::sleep(due.saturating_duration_since(Instant::now()));
        (!self.done.load(Ordering::Relaxed)).then(|| format!("user{}", number / REQUESTS_PER_USER))
    }

    fn enter(&self, user: String, result: Result<bool, String>) {
        match result {
            Ok(passed) => {
                let mut users = self.users.lock().unwrap();
                let [sent, admitted] = users.entry(user).or_default();
                *sent += 1;
                *admitted += usize::from(passed);
            }
            Err(error) => self.lost.lock().unwrap().push(error),
        }
    }
}

fn replica(redis: &Server, port: &Port) -> Tollkeeper {
    with_rules(&read(&repository("envoy/replicas.rules.yaml")))
        .env("REDIS_URL", redis.address())
        .env("REDIS_SOCKET_TYPE", "tcp")
        // Long enough that a busy machine does not change verdicts.
        .env("TOLLKEEPER_STORE_TIMEOUT", "10s")
        .env("GRPC_PORT", port.number().to_string())
        .start()
}

/// A client of all replicas that calls the healthy ones round-robin.
#[derive(Debug)]
struct Balanced {
    runtime: tokio::runtime::Runtime,
    replicas: Vec<(Channel, Arc<AtomicBool>)>,
    next: AtomicUsize,
}

impl Balanced {
    fn over(ports: &[Port]) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let replicas = ports.iter().map(|port| {
            let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{}", port.number())).unwrap();
            let (channel, serves) =
                (runtime.block_on(async { endpoint.connect_lazy() }), Arc::new(AtomicBool::new(false)));
            runtime.spawn(watch(endpoint, Arc::clone(&serves)));
            (channel, serves)
        });
        let replicas = replicas.collect();
        Self { runtime, replicas, next: AtomicUsize::new(0) }
    }

    fn serving(&self) -> usize {
        self.replicas.iter().filter(|(_, serves)| serves.load(Ordering::Relaxed)).count()
    }

    fn admits(&self, request: RateLimitRequest) -> Result<bool, String> {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let replicas_from_next =
            (first..first + self.replicas.len()).map(|place| &self.replicas[place % self.replicas.len()]);
        let mut serving = replicas_from_next.filter(|(_, serves)| serves.load(Ordering::Relaxed));
        let (channel, _) = serving.next().ok_or("no replica says that it serves")?;
        let mut client = RateLimitServiceClient::new(channel.clone());
        let response = self.runtime.block_on(client.should_rate_limit(request));
        response.map(|response| response.into_inner().overall_code() == Code::Ok).map_err(|status| status.to_string())
    }
}

/// Watches the health of a replica.
async fn watch(endpoint: Endpoint, serves: Arc<AtomicBool>) {
    loop {
        if let Ok(channel) = endpoint.connect().await
            && let Ok(stream) = HealthClient::new(channel).watch(HealthCheckRequest::default()).await
        {
            let mut stream = stream.into_inner();
            while let Ok(Some(response)) = stream.message().await {
                serves.store(response.status() == ServingStatus::Serving, Ordering::Relaxed);
            }
        }
        serves.store(false, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Healthy members of Envoy's cluster.
fn healthy(envoy: &Envoy) -> u64 {
    envoy.stat("cluster.tollkeeper.membership_healthy")
}

#[test]
fn rolling_restart_loses_no_request_and_keeps_a_strict_limit() {
    let redis = redis::options().start();
    let ports = [Port::reserve(), Port::reserve(), Port::reserve()];
    let mut replicas: Vec<Tollkeeper> = ports.iter().map(|port| replica(&redis, port)).collect();
    let envoy = Envoy::start("replicas", &ports.each_ref().map(Port::number));
    let client = Balanced::over(&ports);
    wait_for("all replicas to serve", || (healthy(&envoy) == 3 && client.serving() == 3).then_some(()));

    let (tally, started) = (Book::default(), Instant::now());
    let through_envoy = |user: &str| {
        let response = envoy.get("/").header("x-user", user).try_send().map_err(|error| error.to_string())?;
        match response.status {
            200 => Ok(true),
            429 => Ok(false),
            status => Err(format!("Envoy answered {status}")),
        }
    };
    thread::scope(|scope| {
        for sender in 0..SENDERS {
            let (tally, client, through_envoy) = (&tally, &client, &through_envoy);
            scope.spawn(move || {
                while let Some(user) = tally.next(started) {
                    let result = match sender % 2 {
                        0 => through_envoy(&user),
                        _ => client.admits(grpc::rate_limit_request("replicas", &[("user", &user)])),
                    };
                    tally.enter(user, result);
                }
            });
        }
        for (replica_of, port) in replicas.iter_mut().zip(&ports) {
            replica_of.signal("TERM");
            let status = replica_of.wait();
            assert!(status.success(), "{status}: {}", replica_of.stderr());
            *replica_of = replica(&redis, port);
            wait_for("the new replica to serve", || (healthy(&envoy) == 3 && client.serving() == 3).then_some(()));
        }
        tally.done.store(true, Ordering::Relaxed);
    });

    let (users, lost) = (tally.users.into_inner().unwrap(), tally.lost.into_inner().unwrap());
    let sent: usize = users.values().map(|[sent, _]| sent).sum();
    println!("{sent} requests of {} users in {:?}, {} lost", users.len(), started.elapsed(), lost.len());
    assert!(lost.is_empty(), "{} of {sent} lost: {:?}", lost.len(), &lost[..lost.len().min(5)]);
    for (user, [sent, admitted]) in &users {
        assert_eq!(*admitted, LIMIT.min(*sent), "{user} sent {sent}");
    }
    assert!(users.len() > 5, "{users:?}");
    for stat in ["ratelimit.error", "ratelimit.failure_mode_allowed"] {
        assert_eq!(envoy.stat(&format!("cluster.upstream.{stat}")), 0, "{stat}");
    }
}

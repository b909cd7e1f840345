//! Three replicas on one Redis, single and cluster: never one hit over a limit, and none lost under it.
//!
//! Hundreds of callers send requests at once, over gRPC, on one counter and on many, under each algorithm. Limits are
//! per year, so that nothing refills meanwhile, except those of a delaying leaky bucket, which are checked against
//! their departures. A charge that Redis does not decide is an error and fails the test: no decision is by policy.
//!
//! `TOLLKEEPER_TABLE` names a file that the overshoot is written to, as a table.

use std::env;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tollkeeper::base::pb::RateLimitRequest;
use tollkeeper::base::pb::rate_limit_response::Code;
use tollkeeper::base::pb::rate_limit_service_client::RateLimitServiceClient;
use tollkeeper::limit::algorithm::Algorithm;
use tonic::transport::{Channel, Endpoint};

use kit::redis::cluster::Cluster;
use kit::redis::{Server, options};
use kit::test_service::{TestRequest, store_runtime};
use kit::tollkeeper::{Setup, Tollkeeper, with_rules};

const REPLICAS: usize = 3;
const CALLERS: usize = 300;
/// Limit of the hot key, and of each of many keys.
const HOT: u64 = 150;
const EACH: u64 = 7;
const KEYS: usize = 30;
/// Interval at which a leaky bucket releases a request, and its queue size.
const APART: Duration = Duration::from_millis(100);
const QUEUE: usize = 12;

/// Algorithms that delay no request.
fn at_once() -> impl Iterator<Item = Algorithm> {
    Algorithm::ALL.into_iter().filter(|algorithm| *algorithm != Algorithm::LeakyBucket)
}

fn rules() -> String {
    let mut rules = "domain: shop\ndefaults: {on_store_error: error}\ndescriptors:\n".to_owned();
    let mut rule = |key: &str, limit: &str| writeln!(rules, "  - {{key: {key}, rate_limit: {limit}}}").unwrap();
    for algorithm in at_once() {
        let yearly = |limit: u64| format!("unit: year, requests_per_unit: {limit}, algorithm: {algorithm}");
        rule(&format!("hot_{algorithm}"), &format!("{{{}}}", yearly(HOT)));
        rule(&format!("each_{algorithm}"), &format!("{{{}}}", yearly(EACH)));
        rule(&format!("ten_{algorithm}"), &format!("{{{}}}", yearly(10)));
        rule(&format!("sized_{algorithm}"), &format!("{{{}, count_rejected: false}}", yearly(HOT)));
    }
    let leaky = "algorithm: leaky_bucket";
    rule("hot_leaky_bucket", &format!("{{unit: second, requests_per_unit: 10, queue_size: {QUEUE}, {leaky}}}"));
    // The first leaves at once, the next in a year.
    rule("each_leaky_bucket", &format!("{{unit: year, requests_per_unit: 1, queue_size: 1, {leaky}}}"));
    rule(
        "several",
        "[{unit: year, requests_per_unit: 130, algorithm: sliding_window_log}, \
          {unit: month, requests_per_unit: 100, algorithm: token_bucket}, \
          {unit: year, requests_per_unit: 120, algorithm: fixed_window}, \
          {unit: year, requests_per_unit: 50, algorithm: sliding_window_counter, shadow_mode: true}]",
    );
    rules
}

/// Replicas that share their counters, and their clients.
struct Fleet {
    topology: &'static str,
    clients: Vec<RateLimitServiceClient<Channel>>,
    turn: AtomicUsize,
    replicas: Vec<Tollkeeper>,
}

impl Fleet {
    fn on_single(server: &Server) -> Self {
        Self::start("single", |setup| setup.env("REDIS_SOCKET_TYPE", "tcp").env("REDIS_URL", server.address()))
    }

    fn on_cluster(cluster: &Cluster) -> Self {
        let nodes = cluster.addresses().join(",");
        Self::start("cluster", |setup| setup.env("REDIS_TYPE", "cluster").env("REDIS_URL", &nodes))
    }

    fn start(topology: &'static str, on: impl Fn(Setup) -> Setup) -> Self {
        let rules = rules();
        let setup = || with_rules(&rules).env("TOLLKEEPER_STORE_TIMEOUT", "10s");
        let replicas: Vec<_> = (0..REPLICAS).map(|_| on(setup()).start()).collect();
        let clients = replicas.iter().map(|replica| {
            let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{}", replica.grpc_port())).unwrap();
            let channel = store_runtime().block_on(endpoint.connect()).expect("the replica accepts");
            RateLimitServiceClient::new(channel)
        });
        let fleet = Self { topology, clients: clients.collect(), turn: AtomicUsize::new(0), replicas };
        // Cluster nodes are discovered shortly after the start.
        for client in &fleet.clients {
            kit::wait_for("the replica to know all nodes", || {
                let known = (0..30)
                    .map(|value| admits(client.clone(), about("each_fixed_window", &format!("prime {value}"), 0)));
                let known = store_runtime().block_on(join_all(known));
                known.iter().all(Result::is_ok).then_some(())
            });
        }
        fleet
    }

    /// Runs all callers at once; each sends its requests in order, to the replicas in turn.
    fn offer(&self, callers: Vec<Vec<RateLimitRequest>>) -> Vec<Answered> {
        self.try_offer(callers).unwrap_or_else(|error| {
            let logs: Vec<_> = self.replicas.iter().map(Tollkeeper::stderr).collect();
            panic!("{}: {error}\n{}", self.topology, logs.join("\n"))
        })
    }

    fn try_offer(&self, callers: Vec<Vec<RateLimitRequest>>) -> Result<Vec<Answered>, tonic::Status> {
        store_runtime().block_on(async {
            let callers = callers.into_iter().map(|requests| {
                let client = self.clients[self.turn.fetch_add(1, Ordering::Relaxed) % REPLICAS].clone();
                tokio::spawn(async move {
                    let mut responses = Vec::with_capacity(requests.len());
                    for request in requests {
                        let hits = request.descriptors[0].hits_addend.unwrap_or(1);
                        let admitted = admits(client.clone(), request).await?;
                        responses.push(Answered { admitted, hits, at: Instant::now() });
                    }
                    Ok(responses)
                })
            });
            let responses: Result<Vec<_>, _> =
                join_all(callers).await.into_iter().map(|responses| responses.expect("no caller panics")).collect();
            responses.map(|responses| responses.into_iter().flatten().collect())
        })
    }

    /// Sends single hits on one key; returns the number admitted.
    fn offer_one_by_one(&self, key: &str, value: &str, hits: usize) -> u64 {
        let callers = (0..CALLERS).map(|caller| {
            let share = hits / CALLERS + usize::from(caller < hits % CALLERS);
            vec![about(key, value, 1); share]
        });
        admitted(&self.offer(callers.collect()))
    }
}

/// Response to a request.
struct Answered {
    admitted: bool,
    hits: u64,
    at: Instant,
}

fn admitted(responses: &[Answered]) -> u64 {
    responses.iter().filter(|response| response.admitted).map(|response| response.hits).sum()
}

/// Makes a call; true if it is admitted.
async fn admits(mut client: RateLimitServiceClient<Channel>, request: RateLimitRequest) -> Result<bool, tonic::Status> {
    let response = client.should_rate_limit(request).await?.into_inner();
    Ok(response.overall_code() == Code::Ok)
}

fn about(key: &str, value: &str, hits: u64) -> RateLimitRequest {
    TestRequest::new("shop").descriptor(&[(key, value)]).hits(hits).0
}

/// Writes the offered and admitted hits to the table.
struct Table(String);

impl Table {
    fn new() -> Self {
        Self("| replicas | redis | algorithm | demand | offered | admitted | limit | over | lost |\n|---|---|---|---|---|---|---|---|---|\n".to_owned())
    }

    /// Adds a line, and checks that exactly the demand or the limit was admitted, whichever is less.
    fn exactly(&mut self, fleet: &Fleet, (algorithm, what): (&str, &str), (offered, admitted, limit): (u64, u64, u64)) {
        let (over, lost) = (admitted.saturating_sub(limit), offered.min(limit).saturating_sub(admitted));
        writeln!(
            self.0,
            "| {REPLICAS} | {} | {algorithm} | {what} | {offered} | {admitted} | {limit} | {over} | {lost} |",
            fleet.topology
        )
        .unwrap();
        assert_eq!((over, lost), (0, 0), "{algorithm}, {what}, {}: {admitted} of {offered}", fleet.topology);
    }

    fn publish(&self) {
        print!("{}", self.0);
        if let Some(path) = env::var_os("TOLLKEEPER_TABLE") {
            let file = File::options().create(true).append(true).open(path);
            file.and_then(|mut file| file.write_all(self.0.as_bytes())).expect("the table can be written");
        }
    }
}

#[test]
fn three_replicas_on_one_server_admit_exactly_the_limit() {
    let server = options().start();
    admits_the_limit_and_not_one_more(&Fleet::on_single(&server));
}

#[test]
fn three_replicas_on_a_cluster_admit_exactly_the_limit() {
    let cluster = Cluster::start();
    admits_the_limit_and_not_one_more(&Fleet::on_cluster(&cluster));
}

fn admits_the_limit_and_not_one_more(fleet: &Fleet) {
    let mut table = Table::new();
    for algorithm in at_once() {
        one_key(fleet, &mut table, algorithm);
        many_keys(fleet, &mut table, (algorithm, EACH));
        hits_of_all_sizes(fleet, &mut table, algorithm);
        nine_of_ten(fleet, &mut table, algorithm);
    }
    many_keys(fleet, &mut table, (Algorithm::LeakyBucket, 1));
    several_limits(fleet, &mut table);
    check_delaying_bucket(fleet, &mut table);
    table.publish();
}

/// One hot key above its limit, and another below.
fn one_key(fleet: &Fleet, table: &mut Table, algorithm: Algorithm) {
    let key = format!("hot_{algorithm}");
    for (value, offered) in [("over", 3 * HOT), ("under", HOT - 1), ("even", HOT)] {
        let admitted = fleet.offer_one_by_one(&key, value, usize::try_from(offered).unwrap());
        table.exactly(fleet, (algorithm.name(), "one key"), (offered, admitted, HOT));
    }
}

/// Many keys on three cluster nodes, some above their limit and some below.
fn many_keys(fleet: &Fleet, table: &mut Table, (algorithm, limit): (Algorithm, u64)) {
    let key = format!("each_{algorithm}");
    let demand = |place: usize| if place.is_multiple_of(2) { limit + 3 } else { limit - 1 };
    let mut callers: Vec<Vec<RateLimitRequest>> = vec![Vec::new(); CALLERS];
    let mut places = Vec::new();
    for place in 0..KEYS {
        for _ in 0..demand(place) {
            // Shuffled, so that callers compete for every key.
            let caller = (places.len() * 7) % CALLERS;
            callers[caller].push(about(&key, &place.to_string(), 1));
            places.push((caller, place));
        }
    }
    // Responses are grouped by caller, in order.
    places.sort_by_key(|(caller, _)| *caller);
    let responses = fleet.offer(callers);
    for place in 0..KEYS {
        let admitted =
            places.iter().zip(&responses).filter(|((_, of), response)| *of == place && response.admitted).count();
        assert_eq!(admitted as u64, demand(place).min(limit), "{algorithm}, {}: key {place}", fleet.topology);
    }
    let wanted: u64 = (0..KEYS).map(|place| demand(place).min(limit)).sum();
    table.exactly(fleet, (algorithm.name(), "30 keys"), (responses.len() as u64, admitted(&responses), wanted));
}

/// Charges of several hits: small charges use the rest that is too small for large ones, and refunds free hits.
fn hits_of_all_sizes(fleet: &Fleet, table: &mut Table, algorithm: Algorithm) {
    let key = format!("sized_{algorithm}");
    let callers = (0..CALLERS).map(|caller| vec![about(&key, "s", 1 + caller as u64 % 5)]);
    let responses = fleet.offer(callers.collect());
    let large = admitted(&responses);
    assert!(large <= HOT && large + 5 > HOT, "{algorithm}: {large}");
    let rest = fleet.offer_one_by_one(&key, "s", 50);
    let offered = responses.iter().map(|response| response.hits).sum::<u64>() + 50;
    table.exactly(fleet, (algorithm.name(), "1 to 5 hits"), (offered, large + rest, HOT));

    let refund = |hits| TestRequest::new("shop").descriptor(&[(&key, "s")]).refund(hits).0;
    let refunds = fleet.offer((0..40).map(|place| vec![refund(1 + place % 2)]).collect());
    assert!(refunds.iter().all(|refund| refund.admitted), "{algorithm}");
    let again = fleet.offer_one_by_one(&key, "s", 100);
    table.exactly(fleet, (algorithm.name(), "after 60 refunded"), (100, again, 60));
}

/// With nine of ten used, two replicas that charge at once get one hit in total.
fn nine_of_ten(fleet: &Fleet, table: &mut Table, algorithm: Algorithm) {
    let key = format!("ten_{algorithm}");
    let nine = |place: usize| vec![about(&key, &place.to_string(), 9)];
    let filled = fleet.offer((0..KEYS).map(nine).collect());
    assert_eq!(admitted(&filled), 9 * KEYS as u64, "{algorithm}");
    for place in 0..KEYS {
        let one = || vec![about(&key, &place.to_string(), 1)];
        let responses = fleet.offer(vec![one(), one()]);
        assert_eq!(admitted(&responses), 1, "{algorithm}, {}: key {place}", fleet.topology);
    }
    let (offered, admitted) = (11 * KEYS as u64, 10 * KEYS as u64);
    table.exactly(fleet, (algorithm.name(), "9 of 10, then 2 at once"), (offered, admitted, admitted));
}

/// The lowest of several limits decides, and the others are charged no more than it admits.
fn several_limits(fleet: &Fleet, table: &mut Table) {
    let admitted = fleet.offer_one_by_one("several", "s", 400);
    table.exactly(fleet, ("four together", "one key"), (400, admitted, 100));
}

/// A leaky bucket admits at least its queue size, and requests leave one by one.
fn check_delaying_bucket(fleet: &Fleet, table: &mut Table) {
    let key = "hot_leaky_bucket";
    let began = Instant::now();
    let responses = fleet.offer((0..CALLERS).map(|_| vec![about(key, "h", 1)]).collect());
    let mut departures: Vec<Duration> =
        responses.iter().filter(|response| response.admitted).map(|response| response.at - began).collect();
    departures.sort_unstable();
    let rejected_at = responses.iter().filter(|response| !response.admitted).map(|response| response.at - began);
    let offering = rejected_at.max().expect("most are rejected");
    // The first leaves on arrival, after `began`, and each other one interval after the previous one.
    for (place, departure) in (0_u32..).zip(&departures) {
        assert!(*departure >= APART * place, "{}: {place} left after {departure:?}", fleet.topology);
    }
    let left = offering.as_millis() / APART.as_millis();
    println!("leaky_bucket, {}: {} admitted, all offered within {offering:?}", fleet.topology, departures.len());
    // Room that appears meanwhile is used, and not exceeded.
    let max_admitted = QUEUE + usize::try_from(left).unwrap() + 1;
    let limit = departures.len().clamp(QUEUE, max_admitted) as u64;
    table.exactly(fleet, ("leaky_bucket", "one key, held"), (CALLERS as u64, departures.len() as u64, limit));
}

//! Slots through the program: holders by metadata, heartbeats by health checks, releases that outlive their calls, and
//! what the logs and metrics show.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tonic::Code;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use kit::grpc::{Client, rate_limit_request};
use kit::redis::{Server, options};
use kit::streams::slot_token;
use kit::tollkeeper::{Setup, Tollkeeper, inherited_env, program_path, with_rules};
use kit::{http, wait_for};

const RULES: &str = "domain: shop\ndescriptors: [{key: k, rate_limit: {concurrent: 1, max_duration: 10m}}]\n";
const HOLDER: &str = "x-tollkeeper-holder";

fn setup(server: Option<&Server>) -> Setup {
    let setup = with_rules(RULES).env("TOLLKEEPER_HOLDER_TIMEOUT", "1s").env("TOLLKEEPER_ON_STORE_ERROR", "error");
    match server {
        None => setup,
        Some(server) => setup
            .env("REDIS_SOCKET_TYPE", "tcp")
            .env("REDIS_URL", server.address())
            .env("TOLLKEEPER_STORE_TIMEOUT", "5s"),
    }
}

/// Sends health checks, as an Envoy does.
fn check_health(replica: &Tollkeeper, holder: &str) {
    (0..2).for_each(|_| check_health_once(replica, holder));
}

fn check_health_once(replica: &Tollkeeper, holder: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{}", replica.grpc_port())).unwrap();
        let mut client = HealthClient::new(endpoint.connect().await.unwrap());
        let mut request = tonic::Request::new(HealthCheckRequest::default());
        request.metadata_mut().insert(HOLDER, holder.parse().unwrap());
        client.check(request).await.unwrap();
    });
}

/// Calls with the entries after `k=a`; returns the token, `-` if it is rejected, empty if there is none.
fn call(replica: &Tollkeeper, holder: &str, entries: &[(&str, &str)]) -> Result<String, tonic::Status> {
    let entries: Vec<_> = [("k", "a")].into_iter().chain(entries.iter().copied()).collect();
    let request = rate_limit_request("shop", &entries);
    let response = Client::connect(replica.grpc_port()).call_with_headers(&request, &[(HOLDER, holder)])?;
    Ok(slot_token(&response).unwrap_or_default())
}

fn acquire(replica: &Tollkeeper, holder: &str, stream: &str) -> String {
    // At the start Redis may not be connected.
    wait_for("a decision", || call(replica, holder, &[("slot", stream)]).ok())
}

#[test]
fn token_of_the_answer_frees_the_slot() {
    let server = options().start();
    for server in [None, Some(&server)] {
        let replica = setup(server).start();
        let token = acquire(&replica, "one", "1");
        assert_eq!(token.len(), 48, "{token}");
        assert_eq!(acquire(&replica, "two", "1"), "-", "another Envoy has other streams");
        assert_eq!(call(&replica, "one", &[("slot", "1"), ("release", &token)]).unwrap(), "");
        assert_eq!(acquire(&replica, "two", "1").len(), 48);
        let refused = call(&replica, "one", &[("slot", "%STREAM_ID%")]).expect_err("it is refused");
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains("enable_formatter_for_ratelimit_action_descriptor_value"), "{refused}");
        wait_for("the line about the formatter", || {
            replica.stderr().contains("enable_formatter_for_ratelimit_action_descriptor_value").then_some(())
        });
    }
}

#[test]
fn slots_of_a_dead_holder_are_free() {
    let server = options().start();
    for server in [None, Some(&server)] {
        let replica = setup(server).start();
        check_health(&replica, "one");
        assert_eq!(acquire(&replica, "one", "1").len(), 48);
        // Heartbeats keep the slot for many times the timeout.
        let until = Instant::now() + Duration::from_secs(4);
        while Instant::now() < until {
            check_health(&replica, "one");
            assert_eq!(acquire(&replica, "two", "2"), "-");
            thread::sleep(Duration::from_millis(200));
        }
        wait_for("the slot of the dead holder", || (acquire(&replica, "two", "2") != "-").then_some(()));
        assert!(until.elapsed() >= Duration::from_millis(500), "it lived until the timeout");
    }
}

/// A replica that stands still hears nobody, and nobody is dead for that.
#[test]
fn replica_that_stood_still_keeps_the_slots() {
    let replica = setup(None).env("TOLLKEEPER_HOLDER_TIMEOUT", "2s").start();
    check_health(&replica, "one");
    assert_eq!(acquire(&replica, "one", "1").len(), 48);
    replica.freeze();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| call(&replica, "two", &[("slot", "2")]));
        thread::sleep(Duration::from_secs(3));
        replica.thaw();
        assert_eq!(waiting.join().unwrap().unwrap(), "-", "the first Envoy had no way to be heard");
    });
    wait_for("the slot of the holder that is silent since", || (acquire(&replica, "two", "2") != "-").then_some(()));
}

/// Envoys live while all replicas are away; the first one that is back has not heard all of them yet.
#[test]
fn outage_of_all_replicas_keeps_the_slots() {
    const TIMEOUT: Duration = Duration::from_secs(5);
    let server = options().start();
    let start = || setup(Some(&server)).env("TOLLKEEPER_HOLDER_TIMEOUT", "5s").start();
    let mut replica = start();
    check_health(&replica, "one");
    assert_eq!(acquire(&replica, "one", "1").len(), 48);
    // Until Redis knows the holder.
    wait_for("the heartbeat", || server.query::<Vec<String>>(&["KEYS", "*{holders}"]).pop());
    replica.kill();
    thread::sleep(TIMEOUT + Duration::from_secs(1));
    let replica = start();
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        let answer = acquire(&replica, "two", "2");
        assert!(answer == "-" || began.elapsed() > TIMEOUT, "the first Envoy had no replica to be heard by");
        thread::sleep(Duration::from_millis(50));
    }
    wait_for("the slot of the holder that is silent since", || (acquire(&replica, "two", "2") != "-").then_some(()));
}

/// As after a failover to a server whose clock is behind: what was heard before lies in the future.
#[test]
fn clock_of_redis_that_is_set_back_keeps_no_slot_of_a_dead_holder() {
    let server = options().own_clock().start();
    let replica = setup(Some(&server)).start();
    check_health(&replica, "one");
    assert_eq!(acquire(&replica, "one", "1").len(), 48);
    wait_for("the heartbeat", || server.query::<Vec<String>>(&["KEYS", "*{holders}"]).pop());
    server.set_clock(-3600);
    wait_for("the slot of the dead holder", || (acquire(&replica, "two", "2") != "-").then_some(()));
}

#[test]
fn slots_without_heartbeats_are_kept() {
    let server = options().start();
    for server in [None, Some(&server)] {
        let replica = setup(server).start();
        assert_eq!(acquire(&replica, "one", "1").len(), 48);
        // Somebody tries its name.
        check_health_once(&replica, "one");
        let until = Instant::now() + Duration::from_secs(3);
        while Instant::now() < until {
            assert_eq!(acquire(&replica, "two", "2"), "-");
            thread::sleep(Duration::from_millis(100));
        }
    }
}

#[test]
fn signs_of_life_are_shared_between_replicas() {
    let check = |replica: &Tollkeeper| check_health(replica, "one");
    // A repeated request keeps its slot.
    let repeat = |replica: &Tollkeeper| drop(acquire(replica, "one", "1"));
    // If the machine holds back the signs themselves, the slot may be free, and nothing is shown.
    assert!((0..3).any(|_| signs_at_one_replica_keep_a_slot_of_another(check)), "health checks were late three times");
    assert!((0..3).any(|_| signs_at_one_replica_keep_a_slot_of_another(repeat)), "calls were late three times");
}

/// Returns false if the slot was free because signs were late by half of the timeout.
fn signs_at_one_replica_keep_a_slot_of_another(send_sign: impl Fn(&Tollkeeper) + Sync) -> bool {
    const TIMEOUT: Duration = Duration::from_secs(4);
    let server = options().start();
    let start = || setup(Some(&server)).env("TOLLKEEPER_HOLDER_TIMEOUT", "4s").start();
    let (first, second) = (start(), start());
    check_health(&first, "one");
    assert_eq!(acquire(&first, "one", "1").len(), 48);
    send_sign(&second);
    // The first replica hears nothing more, the second one does.
    let (longest_pause, is_over) = (Mutex::new(Duration::ZERO), AtomicBool::new(false));
    let is_taken = thread::scope(|scope| {
        scope.spawn(|| {
            let mut last = Instant::now();
            while !is_over.load(Ordering::Relaxed) {
                send_sign(&second);
                let mut longest = longest_pause.lock().unwrap();
                *longest = last.elapsed().max(*longest);
                last = Instant::now();
                drop(longest);
                thread::sleep(Duration::from_millis(200));
            }
        });
        let until = Instant::now() + TIMEOUT * 9 / 4;
        let mut is_taken = false;
        while Instant::now() < until && !is_taken {
            is_taken = acquire(&first, "two", "2") != "-";
            thread::sleep(Duration::from_millis(200));
        }
        is_over.store(true, Ordering::Relaxed);
        is_taken
    });
    let longest_pause = longest_pause.into_inner().unwrap();
    let is_late = longest_pause > TIMEOUT / 2;
    assert!(!is_taken || is_late, "the slot was taken; signs came within {longest_pause:?}");
    if !is_taken {
        wait_for("the slot of the dead holder", || (acquire(&first, "two", "2") != "-").then_some(()));
    }
    !is_taken
}

#[test]
fn cancelled_release_is_carried_out() {
    let server = options().start();
    let replica = setup(Some(&server)).env("TOLLKEEPER_STORE_TIMEOUT", "10s").start();
    let token = acquire(&replica, "", "1");
    server.freeze();
    let request = rate_limit_request("shop", &[("k", "a"), ("slot", "1"), ("release", &token)]);
    let began = Instant::now();
    Client::connect(replica.grpc_port()).call_until(&request, || began.elapsed() > Duration::from_millis(300));
    server.thaw();
    wait_for("the slot", || (acquire(&replica, "", "2") != "-").then_some(()));
}

/// The call runs when Redis goes on: the slot is taken, although the answer was a rejection.
#[test]
fn slot_of_a_request_that_a_policy_rejected_is_freed() {
    let server = options().start();
    let replica =
        setup(Some(&server)).env("TOLLKEEPER_ON_STORE_ERROR", "deny").env("TOLLKEEPER_STORE_TIMEOUT", "500ms").start();
    let token = wait_for("an answer of Redis", || Some(acquire(&replica, "", "1")).filter(|token| token.len() == 48));
    assert_eq!(call(&replica, "", &[("slot", "1"), ("release", &token)]).unwrap(), "");
    server.freeze();
    let answer = call(&replica, "", &[("slot", "2")]).unwrap();
    server.thaw();
    // Envoy sends what it was told.
    wait_for("the release", || call(&replica, "", &[("slot", "2"), ("release", &answer)]).ok());
    wait_for("the slot", || Some(acquire(&replica, "", "3")).filter(|token| token.len() == 48));
}

/// Envoy may not report the end of a rejected request, or not say which slot it meant.
#[test]
fn slot_of_a_request_that_a_policy_rejected_is_given_back() {
    let server = options().start();
    let replica =
        setup(Some(&server)).env("TOLLKEEPER_ON_STORE_ERROR", "deny").env("TOLLKEEPER_STORE_TIMEOUT", "500ms").start();
    let token = wait_for("an answer of Redis", || Some(acquire(&replica, "", "1")).filter(|token| token.len() == 48));
    assert_eq!(call(&replica, "", &[("slot", "1"), ("release", &token)]).unwrap(), "");
    server.freeze();
    assert_eq!(call(&replica, "", &[("slot", "2")]).unwrap(), "?");
    server.thaw();
    wait_for("the slot", || Some(acquire(&replica, "", "3")).filter(|token| token.len() == 48));
}

/// The slot that the retry of such a request takes is not given back with it.
#[test]
fn retry_of_a_request_that_a_policy_rejected_keeps_its_slot() {
    let server = options().start();
    let replica =
        setup(Some(&server)).env("TOLLKEEPER_ON_STORE_ERROR", "deny").env("TOLLKEEPER_STORE_TIMEOUT", "500ms").start();
    let token = wait_for("an answer of Redis", || Some(acquire(&replica, "", "1")).filter(|token| token.len() == 48));
    assert_eq!(call(&replica, "", &[("slot", "1"), ("release", &token)]).unwrap(), "");
    server.freeze();
    assert_eq!(call(&replica, "", &[("slot", "2")]).unwrap(), "?");
    server.thaw();
    let retry = wait_for("an answer of Redis", || Some(acquire(&replica, "", "2")).filter(|token| token != "?"));
    assert_eq!(retry.len(), 48, "{retry}");
    assert_eq!(acquire(&replica, "", "3"), "-");
}

/// With `on_store_error: local`, a slot may be in the replica's part and, later, in Redis.
#[test]
fn slot_taken_in_a_stall_of_redis_is_free_in_both_places_after_its_stream() {
    let server = options().start();
    let replica =
        setup(Some(&server)).env("TOLLKEEPER_ON_STORE_ERROR", "local").env("TOLLKEEPER_STORE_TIMEOUT", "500ms").start();
    let is_in_redis = || !server.query::<Vec<String>>(&["KEYS", "*:concurrent*"]).is_empty();
    wait_for("a slot in Redis", || {
        let token = acquire(&replica, "", "1");
        let was_in_redis = is_in_redis();
        call(&replica, "", &[("slot", "1"), ("release", &token)]).unwrap();
        was_in_redis.then_some(())
    });
    for (stream, ends_in_stall) in [("2", true), ("3", false), ("4", true)] {
        server.freeze();
        let token = wait_for("a slot", || Some(acquire(&replica, "", stream)).filter(|token| token.len() == 48));
        if ends_in_stall {
            assert_eq!(call(&replica, "", &[("slot", stream), ("release", &token)]).unwrap(), "");
        }
        server.thaw();
        if !ends_in_stall {
            wait_for("the release", || call(&replica, "", &[("slot", stream), ("release", &token)]).ok());
        }
        // Redis has made the calls that waited.
        thread::sleep(Duration::from_secs(1));
        wait_for("no slot in Redis", || (!is_in_redis()).then_some(()));
    }
}

/// The filter `release` has another address than the filter `acquire`, or sends no name.
#[test]
fn token_frees_the_slot_whoever_brings_it() {
    let replica = setup(None).start();
    let token = acquire(&replica, "one", "1");
    assert_eq!(call(&replica, "two", &[("slot", "1"), ("release", &token)]).unwrap(), "");
    let other = acquire(&replica, "two", "1");
    assert_eq!(other.len(), 48);
    assert_eq!(call(&replica, "one", &[("slot", "1"), ("release", &token)]).unwrap(), "");
    assert_eq!(acquire(&replica, "three", "1"), "-", "an old token frees nothing");
}

#[test]
fn release_that_the_store_fails_to_make_is_an_error() {
    let server = options().start();
    let replica = setup(Some(&server)).env("TOLLKEEPER_ON_STORE_ERROR", "local").start();
    let token = acquire(&replica, "", "1");
    server.kill();
    let failed = || call(&replica, "", &[("slot", "1"), ("release", &token)]).err();
    assert_eq!(wait_for("an error", failed).code(), Code::Unavailable, "Envoy repeats the call");
    // What was given out without the store is freed without it.
    let local = wait_for("a slot of this process", || Some(acquire(&replica, "", "2")).filter(|token| token != "-"));
    assert_eq!(acquire(&replica, "", "3"), "-");
    assert_eq!(call(&replica, "", &[("slot", "2"), ("release", &local)]).unwrap(), "");
    assert_ne!(acquire(&replica, "", "3"), "-");
}

#[test]
fn release_that_the_store_failed_to_make_is_repeated() {
    // Redis keeps its data over a restart.
    let server = options().with(&[("appendonly", "yes"), ("appendfsync", "always")]).start();
    let replica = setup(Some(&server)).env("TOLLKEEPER_STORE_TIMEOUT", "500ms").start();
    let token = acquire(&replica, "", "1");
    server.kill();
    let failed = call(&replica, "", &[("slot", "1"), ("release", &token)]).expect_err("Redis does not answer");
    assert_eq!(failed.code(), Code::Unavailable, "Envoy may give up now");
    server.restart();
    wait_for("the slot", || call(&replica, "", &[("slot", "2")]).ok().filter(|token| token.len() == 48));
}

/// A candidate's release is sent on its own; nothing waits for its result.
#[test]
fn release_of_a_candidate_that_the_store_failed_to_make_is_repeated() {
    let server = options().with(&[("appendonly", "yes"), ("appendfsync", "always")]).start();
    let rules = "domain: shop
descriptors:
  - key: k
    rate_limit: [{concurrent: 3}, {concurrent: 1, name: tighter, shadow_mode: true}]
";
    let replica = with_rules(rules)
        .env("REDIS_SOCKET_TYPE", "tcp")
        .env("REDIS_URL", server.address())
        .env("TOLLKEEPER_STORE_TIMEOUT", "500ms")
        .start();
    let token = wait_for("Redis", || call(&replica, "", &[("slot", "1")]).ok());
    let address = format!("127.0.0.1:{}", replica.debug_port());
    let explain = || output_of(&["explain", "--addr", &address, "--domain", "shop", "--descriptor", "k=a"]);
    wait_for("both slots", || (explain().matches(" 1 used, ").count() == 2).then_some(()));
    server.kill();
    call(&replica, "", &[("slot", "1"), ("release", &token)]).expect_err("Redis does not answer");
    server.restart();
    wait_for("both slots to be free", || (explain().matches(" 0 used, ").count() == 2).then_some(()));
}

/// Runs `tollkeeper` with these arguments; returns its standard output.
fn output_of(arguments: &[&str]) -> String {
    let output =
        std::process::Command::new(program_path()).args(arguments).env_clear().envs(inherited_env()).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn slots_are_explained_counted_and_missed_if_nothing_releases_them() {
    let replica =
        with_rules("domain: shop\ndescriptors: [{key: k, rate_limit: {concurrent: 30, max_duration: 10m}}]\n").start();
    let tokens: Vec<_> = (0..25).map(|stream| acquire(&replica, "one", &stream.to_string())).collect();
    let address = format!("127.0.0.1:{}", replica.debug_port());
    let explained = output_of(&["explain", "--addr", &address, "--domain", "shop", "--descriptor", "k=a"]);
    assert!(explained.contains("25 slots in use, 25 seats; the oldest is "), "{explained}");
    assert!(explained.contains("25 slots of one\n"), "{explained}");
    let top = output_of(&["top", "--addr", &address, "--rules"]);
    assert!(top.contains("slots: 25 taken, 0 freed, 0 seats never released"), "{top}");
    let find = || output_of(&["top", "--addr", &address, "--rules", "--finding", "slots_not_released"]);
    let missed = ["shop.k", "25 slots were taken and none was released"];
    let found = find();
    assert!(missed.iter().all(|part| found.contains(part)), "{found}");
    call(&replica, "one", &[("slot", "0"), ("release", &tokens[0])]).unwrap();
    let found = find();
    assert!(missed.iter().all(|part| !found.contains(part)), "{found}");
    let top = output_of(&["top", "--addr", &address, "--rules"]);
    assert!(top.contains("slots: 25 taken, 1 freed"), "{top}");
}

#[test]
fn top_finds_reservations_that_nothing_settles() {
    let limit = "{unit: hour, requests_per_unit: 1000, reservations: 10m}";
    let replica = with_rules(&format!("domain: shop\ndescriptors: [{{key: k, rate_limit: {limit}}}]\n")).start();
    let tokens: Vec<_> = (0..25).map(|stream| acquire(&replica, "one", &stream.to_string())).collect();
    let address = format!("127.0.0.1:{}", replica.debug_port());
    let find = || output_of(&["top", "--addr", &address, "--rules", "--finding", "reservations_not_settled"]);
    let found = find();
    assert!(found.contains("shop.k") && found.contains("none was settled: Envoy needs"), "{found}");
    call(&replica, "one", &[("slot", "0"), ("release", &tokens[0])]).unwrap();
    let found = find();
    assert!(!found.contains("none was settled"), "{found}");
}

#[test]
fn values_of_slots_are_in_no_log_and_no_metric() {
    let log = tempfile::tempdir().unwrap();
    let file = log.path().join("decisions.jsonl");
    let replica =
        with_rules("domain: shop\ndescriptors: [{key: k, detailed_metric: true, rate_limit: {concurrent: 1}}]")
            .env("LOG_LEVEL", "debug")
            .env("TOLLKEEPER_DECISION_LOG_WHEN", "all")
            .env("TOLLKEEPER_DECISION_LOG", format!("file:{}", file.display()))
            .env("USE_PROMETHEUS", "false")
            .start();
    let token = acquire(&replica, "one", "secret-stream");
    assert_eq!(acquire(&replica, "one", "secret-other"), "-");
    call(&replica, "one", &[("slot", "secret-stream"), ("release", &token)]).unwrap();
    let text = wait_for("the decision log", || {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        (text.matches("\"slot\":{").count() == 3).then_some(text)
    });
    for part in ["\"action\":\"acquire\"", "\"action\":\"release\"", "\"slot\":\"taken\"", "\"slot\":\"freed\""] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let page = |path| String::from_utf8_lossy(&http::get(replica.debug_port(), path).send().body).into_owned();
    let (metrics, top) = (page("/stats"), page("/top"));
    assert!(metrics.contains("shop.k_a"), "{metrics}");
    for (what, text) in [("log", &text), ("stderr", &replica.stderr()), ("metrics", &metrics), ("top", &top)] {
        assert!(!text.contains("secret-"), "{what}: {text}");
    }
}

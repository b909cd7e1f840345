//! Decisions while Redis is unreachable: by each policy, for one descriptor and for several, and the health checks.
//!
//! The Redis never replies, so every charge fails; where some charges fail and others do not, a full memory store is
//! used (see `memory`). Failures of real servers are tested in `redis::faults`.

use std::net::Ipv4Addr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tollkeeper::base::clock::Time;
use tollkeeper::serve::blocks::SharedBlocks;
use tollkeeper::serve::fleet::member::FleetMembership;
use tollkeeper::serve::grpc::decode;
use tollkeeper::serve::grpc::health::GrpcHealth;
use tollkeeper::serve::health::{Health, HealthRequirements};
use tollkeeper::serve::http::app_state::AppState;
use tollkeeper::serve::http::browser_protection::AllowedHosts;
use tollkeeper::serve::http::build_http_router;
use tollkeeper::serve::http::live_events::LiveEvents;
use tollkeeper::serve::http::page_builder::PageBuilder;
use tollkeeper::serve::metrics_collector::MetricsCollector;
use tollkeeper::settings::Settings;
use tollkeeper::store::Store;
use tollkeeper::store::fallback::Fallback;
use tollkeeper::store::health::StoreHealth;
use tollkeeper::store::redis::Redis;
use tonic::transport::{Endpoint, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use kit::http;
use kit::test_service::{TestRequest, TestService, store_runtime};

/// Noon on Wednesday the 8th of July 2026: the day is half over.
const NOON: Time = Time::from_secs(1_783_512_000);
const MS: u64 = 1_000;

const ERROR: &str = "The service is currently unavailable: \
                     the store failed, and the policy is `on_store_error: error`";

/// A store of one of `replicas` processes whose Redis does not exist.
fn unreachable_store(replicas: u32) -> Store {
    let local = Fallback::new(1 << 20, NonZeroU32::new(replicas).unwrap());
    let env = [("REDIS_URL", "/does/not/exist.sock")].map(|(name, value)| (name.into(), value.into()));
    let (settings, _) = Settings::from_env(env.into_iter()).expect("they are valid");
    let tollkeeper::settings::store::StoreSettings::Redis(redis) = settings.store else { panic!("it counts in Redis") };
    let _within = store_runtime().enter();
    Store::from(Redis::start(&redis, local))
}

/// A service with rules of the domain `shop` whose Redis never replies.
fn test_service(env: &[(&str, &str)], replicas: u32, rules: &str) -> TestService {
    let service = TestService::new(env.iter().copied(), NOON).with_store(unreachable_store(replicas));
    service.load([("rules.yaml", format!("domain: shop\n{rules}").as_str())]);
    service
}

/// A request for descriptors of `shop` with these keys.
fn about(keys: &[&str]) -> TestRequest {
    keys.iter().fold(TestRequest::new("shop"), |request, key| request.descriptor(&[(key, "x")]))
}

fn text(service: &TestService, request: &TestRequest) -> String {
    service.decide(request).map_or_else(|error| format!("{}: {error}", error.grpc_code()), |response| response.text())
}

const RULES: &str = "defaults: {on_store_error: error}
descriptors:
  - {key: unsaid, rate_limit: {unit: day, requests_per_unit: 7}}
  - {key: local, rate_limit: {unit: day, requests_per_unit: 2, on_store_error: local}}
  - {key: allow, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: allow}}
  - {key: deny, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: deny, name: d}}
  - {key: error, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: error}}
  - {key: shadow_local, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: local}}
  - {key: shadow_deny, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: deny}}
  - {key: shadow_error, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: error}}
  - {key: quota_deny, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: deny}}
  - {key: quota_allow, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: allow}}
  - key: quota_trial
    quota_mode: true
    shadow_mode: true
    rate_limit: {unit: day, requests_per_unit: 7, on_store_error: error}
  - {key: free, rate_limit: {unlimited: true}}
  - key: allow_deny
    rate_limit:
      - {unit: hour, requests_per_unit: 7, on_store_error: allow}
      - {unit: day, requests_per_unit: 9, on_store_error: deny}
  - key: deny_error
    rate_limit:
      - {unit: hour, requests_per_unit: 7, on_store_error: deny}
      - {unit: day, requests_per_unit: 9, on_store_error: error}
  - key: local_allow
    rate_limit:
      - {unit: hour, requests_per_unit: 7, on_store_error: local}
      - {unit: day, requests_per_unit: 2, on_store_error: allow}
  - key: allow_trial_error
    rate_limit:
      - {unit: hour, requests_per_unit: 7, on_store_error: allow}
      - {unit: day, requests_per_unit: 9, on_store_error: error, shadow_mode: true}
";

#[test]
fn rejection_by_a_share_has_retry_after_if_the_limit_has_room_for_the_hits() {
    // Of 7 a day, this process has 2.
    let rules = "descriptors: [{key: local, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: local}}]";
    let service = test_service(&[], 3, rules);
    for (hits, retry_after) in [(3, " Retry-After: 43200"), (7, " Retry-After: 43200"), (8, "")] {
        let expected = format!("OVER [OVER 7/DAY left 0 in 43200 s]{retry_after}");
        assert_eq!(text(&service, &about(&["local"]).hits(hits)), expected, "{hits} hits");
    }
}

#[test]
fn each_policy_gives_its_response() {
    let denied = "OVER [OVER d: 7/DAY left 0 in 1 s] Retry-After: 1";
    let table: &[(&[&str], &str)] = &[
        (&["unsaid"], ERROR),
        (&["allow"], "OK [OK]"),
        (&["deny"], denied),
        (&["error"], ERROR),
        (&["local"], "OK [OK 2/DAY left 1 in 43200 s]"),
        (&["local"], "OK [OK 2/DAY left 0 in 43200 s]"),
        (&["local"], "OVER [OVER 2/DAY left 0 in 43200 s] Retry-After: 43200"),
        // Descriptors without counters are not affected.
        (&["free"], "OK [OK unlimited]"),
        (&["unknown"], "OK [OK]"),
        // A limit in shadow mode rejects nothing and causes no error.
        (&["shadow_local"], "OK [OK]"),
        (&["shadow_deny"], "OK [OK]"),
        (&["shadow_error"], "OK [OK]"),
        // Several descriptors: an error takes precedence over other policies, a rejection over an admission.
        (&["allow", "shadow_error", "free"], "OK [OK, OK, OK unlimited]"),
        (&["allow", "deny"], "OVER [OK, OVER d: 7/DAY left 0 in 1 s] Retry-After: 1"),
        (&["deny", "local"], "OVER [OVER d: 7/DAY left 0 in 1 s, OVER 2/DAY left 0 in 43200 s] Retry-After: 43200"),
        (&["error", "deny"], ERROR),
        (&["local", "error"], ERROR),
        (&["free", "error"], ERROR),
        // A denied quota counts as an exceeded quota.
        (&["quota_deny"], "OVER [OVER 7/DAY left 0 in 1 s] Retry-After: 1"),
        (&["quota_deny", "allow"], "OVER [OVER 7/DAY left 0 in 1 s, OK] Retry-After: 1"),
        (&["quota_deny", "quota_allow"], "OK [OVER 7/DAY left 0 in 1 s, OK]"),
        (&["quota_deny", "quota_trial"], "OK [OVER 7/DAY left 0 in 1 s, OK]"),
        // Several limits of one descriptor: the least lenient enforced policy, and the status shows its limit.
        (&["allow_deny"], "OVER [OVER 9/DAY left 0 in 1 s] Retry-After: 1"),
        (&["deny_error"], ERROR),
        (&["allow_trial_error"], "OK [OK]"),
        (&["local_allow"], "OK [OK 2/DAY left 1 in 43200 s]"),
    ];
    let service = test_service(&[], 1, RULES);
    for (step, (keys, expected)) in table.iter().enumerate() {
        assert_eq!(text(&service, &about(keys)), *expected, "step {step}: {keys:?}");
    }
}

#[test]
fn failed_quota_decides_only_together_with_all_others() {
    let rules = "descriptors:
  - {key: error, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: error}}
  - {key: deny, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: deny}}
  - {key: room, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: allow}}
  - {key: deny_alone, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: deny}}
  - key: deny_beside_quota
    rate_limit:
      - {unit: day, requests_per_unit: 7, on_store_error: deny}
      - {unit: hour, requests_per_unit: 7, on_store_error: error, quota_mode: true}
  - key: local_beside_quota
    rate_limit:
      - {unit: day, requests_per_unit: 1, on_store_error: local}
      - {unit: hour, requests_per_unit: 7, on_store_error: deny, quota_mode: true}
  - key: error_beside_quota
    rate_limit:
      - {unit: day, requests_per_unit: 7, on_store_error: error}
      - {unit: hour, requests_per_unit: 7, on_store_error: allow, quota_mode: true}";
    let service = test_service(&[], 1, rules);
    let table: &[(&[&str], &str)] = &[
        (&["error"], ERROR),
        (&["error", "deny"], ERROR),
        (&["deny"], "OVER"),
        // Another quota has room, whatever the failed one would say.
        (&["error", "room"], "OK"),
        (&["deny", "room"], "OK"),
        (&["error", "deny", "room"], "OK"),
        (&["error", "room", "deny_alone"], "OVER"),
        // In a list, the policy of a quota does not replace that of the limit beside it.
        (&["deny_beside_quota", "room"], "OVER"),
        (&["error_beside_quota", "room"], ERROR),
        (&["local_beside_quota", "room"], "OK"),
        (&["local_beside_quota", "room"], "OVER"),
    ];
    for (step, (keys, expected)) in table.iter().enumerate() {
        let found = text(&service, &about(keys));
        assert!(found.starts_with(expected), "step {step}: {keys:?}: {found}");
    }
}

#[test]
fn peeks_and_refunds_are_never_rejected() {
    let service = test_service(&[], 1, RULES);
    let table = [
        (about(&["error"]).hits(0), "OK [OK]"),
        (about(&["deny"]).hits(0), "OK [OK]"),
        (about(&["allow"]).hits(0), "OK [OK]"),
        (about(&["error"]).refund(3), "OK [OK]"),
        (about(&["deny"]).refund(3), "OK [OK]"),
        // Under `local` both report the fallback counters.
        (about(&["local"]).hits(0), "OK [OK 2/DAY left 2 in 43200 s]"),
        (about(&["local"]).hits(3), "OVER [OVER 2/DAY left 0 in 43200 s]"),
        (about(&["local"]).hits(0), "OK [OK 2/DAY left 0 in 43200 s]"),
        (about(&["local"]).refund(2), "OK [OK 2/DAY left 1 in 43200 s]"),
        (
            about(&["error"]).hits(0).descriptor(&[("deny", "x")]),
            "OVER [OK, OVER d: 7/DAY left 0 in 1 s] Retry-After: 1",
        ),
        // An override uses the policy of its domain.
        (about(&["any"]).limit(5, 3, None), ERROR),
        (about(&["any"]).limit(5, 3, None).hits(0), "OK [OK]"),
    ];
    for (step, (request, expected)) in table.iter().enumerate() {
        assert_eq!(text(&service, request), *expected, "step {step}: {request:?}");
    }
}

#[test]
fn global_shadow_mode_rejects_nothing() {
    let service = test_service(&[("SHADOW_MODE", "true")], 1, RULES);
    assert_eq!(text(&service, &about(&["error"])), "OK [OK]");
    assert_eq!(text(&service, &about(&["deny"])), "OK [OVER d: 7/DAY left 0 in 1 s]");
}

#[test]
fn headers_and_metadata_name_only_decided_limits() {
    let env = [("LIMIT_RESPONSE_HEADERS_ENABLED", "true"), ("TOLLKEEPER_METADATA_VERDICTS", "true")];
    let service = test_service(&env, 4, RULES);
    let response = |keys| service.decide(&about(keys)).unwrap();
    assert_eq!(response(&["allow"]).text(), "OK [OK]");
    let denied = response(&["deny", "allow"]);
    assert_eq!(
        denied.text(),
        "OVER [OVER d: 7/DAY left 0 in 1 s, OK] RateLimit-Limit: 7 RateLimit-Remaining: 0 RateLimit-Reset: 1 \
         Retry-After: 1"
    );
    assert!(format!("{:?}", denied.response.dynamic_metadata).contains("shop.deny"));
    // The status shows the configured limit, and the remaining hits of the share.
    assert_eq!(
        response(&["local"]).text(),
        "OK [OK 2/DAY left 0 in 43200 s] RateLimit-Limit: 2 RateLimit-Remaining: 0 RateLimit-Reset: 43200"
    );
}

#[test]
fn local_policy_limits_each_replica_to_its_share() {
    // limit, replicas, hits admitted in the window
    let table = [(10, 1, 10), (10, 3, 3), (10, 10, 1), (10, 100, 1), (1, 2, 1), (0, 2, 0)];
    for (limit, replicas, expected) in table {
        let rules = format!(
            "descriptors: [{{key: k, rate_limit: {{unit: day, requests_per_unit: {limit}, count_rejected: false}}}}]"
        );
        let service = test_service(&[], replicas, &rules);
        let response = service.decide(&about(&["k"]).hits(limit + 1)).unwrap().text();
        assert!(response.starts_with("OVER ") && !response.contains("Retry-After"), "{response}");
        let passed = (0..20).filter(|_| !service.decide(&about(&["k"])).unwrap().over_limit()).count();
        assert_eq!(passed, expected, "{limit} over {replicas}");
        // More hits than the share are rejected, but not permanently.
        if limit > 0 {
            let all = service.decide(&about(&["k"]).hits(limit)).unwrap().text();
            assert!(all.starts_with("OVER ") && all.contains("Retry-After: 43200"), "{all}");
        }
    }
}

#[test]
fn rejected_request_charges_the_fallback() {
    let rules = "descriptors:
  - {key: wide, rate_limit: {unit: day, requests_per_unit: 9}}
  - {key: full, rate_limit: {unit: day, requests_per_unit: 0}}
  - {key: deny, rate_limit: {unit: day, requests_per_unit: 9, on_store_error: deny}}";
    for (spares, left_after) in [("false", 6), ("true", 8)] {
        let service = test_service(&[("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", spares)], 1, rules);
        assert!(service.decide(&about(&["wide", "full"])).unwrap().over_limit());
        assert!(service.decide(&about(&["deny", "wide"])).unwrap().over_limit());
        assert_eq!(service.decide(&about(&["wide"])).unwrap().statuses(), [(false, left_after)], "{spares}");
    }
}

#[test]
fn delay_after_a_slow_store_stays_within_the_deadline() {
    let rules = "descriptors:
  - {key: k, rate_limit: {unit: second, requests_per_unit: 1000, algorithm: leaky_bucket, queue_size: 100}}";
    // caller's deadline in ms, and delay of the last delayed request, in the fallback and behind Redis
    let table = [(1, 0, 0), (4, 2, 2), (10, 8, 3), (20, 18, 3), (50, 48, 33), (30_000, 99, 99)];
    for (deadline_ms, in_memory_ms, behind_redis_ms) in table {
        let memory = TestService::new([("LOG_LEVEL", "info")], NOON);
        memory.load([("rules.yaml", format!("domain: shop\n{rules}").as_str())]);
        for (service, expected) in [(memory, in_memory_ms), (test_service(&[], 1, rules), behind_redis_ms)] {
            let decide_with_deadline =
                |_| service.decide_within(&about(&["k"]), Duration::from_millis(deadline_ms)).unwrap();
            let longest = (0..150)
                .map(decide_with_deadline)
                .filter(|response| !response.over_limit())
                .map(|response| response.delay)
                .max();
            assert_eq!(longest, Some(Duration::from_millis(expected)), "{deadline_ms} ms");
        }
    }
}

#[test]
fn redis_timeout_follows_the_caller_deadline() {
    let service = test_service(&[], 1, RULES);
    // caller's deadline in microseconds, and the part of it that Redis gets
    let table =
        [(30_000 * MS, Some(15 * MS)), (20 * MS, Some(15 * MS)), (12 * MS, Some(7 * MS)), (5 * MS, None), (0, None)];
    for (deadline_us, expected_us) in table {
        let before = tokio::time::Instant::now();
        let context = service.inner.build_decision_context(None, Duration::from_micros(deadline_us));
        let after = tokio::time::Instant::now();
        match (context.store.deadline, expected_us.map(Duration::from_micros)) {
            (Some(until), Some(given)) => assert!(before + given <= until && until <= after + given, "{deadline_us}"),
            (until, given) => assert_eq!((until, given), (None, None), "{deadline_us}"),
        }
    }
    // A caller without time for Redis is answered by the policy.
    let response = service.decide_within(&about(&["local"]), Duration::ZERO).unwrap();
    assert_eq!(response.text(), "OK [OK 2/DAY left 1 in 43200 s]");
}

#[test]
fn every_failed_charge_is_counted() {
    let service = test_service(&[], 1, RULES);
    let failed = || service.inner.decider.failed_charge_counts().map(|(_, count)| count).sum::<u64>();
    let table: [(&[&str], u64); 5] =
        [(&["free"], 0), (&["allow"], 1), (&["local", "deny"], 3), (&["shadow_error"], 4), (&["allow_deny"], 5)];
    for (keys, expected) in table {
        let _ = service.decide(&about(keys));
        assert_eq!(failed(), expected, "{keys:?}");
    }
    let _ = service.decide(&about(&["error"]).hits(0));
    assert_eq!(failed(), 6);
    let names: Vec<_> = service.inner.decider.failed_charge_counts().map(|(name, _)| name).collect();
    assert!(names.contains(&"memory_full") && names.contains(&"timeout"), "{names:?}");
}

#[test]
fn explain_shows_the_fallback_counter_if_that_decides() {
    let service = test_service(&[], 1, RULES);
    let loaded = service.inner.rules.current_rules_owned().unwrap();
    let request = about(&["local", "unknown", "deny"]);
    let context = service.inner.build_decision_context(Some(&loaded), Duration::from_secs(1));
    let request = decode::convert_request(&request.0);
    let counters = runtime().block_on(service.inner.decider.peek_counters(context, &request));
    let [local, unknown, deny] = &counters[..] else { panic!("three descriptors: {counters:?}") };
    let local = local[0].expect("the counter of this process decides");
    assert_eq!((local.is_fallback, local.result.after, local.result.remaining), (true, 0, 2));
    assert_eq!((unknown.len(), &deny[..]), (0, &[None][..]));
    // Nothing was charged to the fallback counters.
    assert_eq!(text(&service, &about(&["local"])), "OK [OK 2/DAY left 1 in 43200 s]");
}

/// State of the store: lost or misconfigured.
const STATES: [(bool, bool); 4] = [(false, false), (true, false), (false, true), (true, true)];

#[test]
fn health_follows_the_store_as_configured() {
    let error_rule = "descriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 1, on_store_error: error}}]";
    let shadow_rule = "descriptors: [{key: k, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 1, on_store_error: error}}]";
    let local_rule = "descriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 1}}]";
    // The policy of overrides, which the rules do not show.
    let error_default = "defaults: {on_store_error: error}\n\
                         descriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 1, on_store_error: local}}]";
    let error_only_default = "defaults: {on_store_error: error}";
    // rules, whether health needs the store, statuses of the pages in each state
    let (ok, no, unready) = (200, 500, 503);
    let table = [
        (local_rule, false, [(ok, ok), (ok, ok), (ok, unready), (ok, unready)]),
        (shadow_rule, false, [(ok, ok), (ok, ok), (ok, unready), (ok, unready)]),
        (error_rule, false, [(ok, ok), (ok, unready), (ok, unready), (ok, unready)]),
        (error_default, false, [(ok, ok), (ok, unready), (ok, unready), (ok, unready)]),
        (error_only_default, false, [(ok, ok), (ok, unready), (ok, unready), (ok, unready)]),
        (local_rule, true, [(ok, ok), (no, unready), (ok, unready), (no, unready)]),
        (error_rule, true, [(ok, ok), (no, unready), (ok, unready), (no, unready)]),
    ];
    let runtime = runtime();
    for (rules, needs_store, expected) in table {
        let service = Arc::new(test_service(&[], 1, rules).inner);
        let store = Arc::new(StoreHealth::default());
        let needs = HealthRequirements { domain: false, rules: false, store: needs_store };
        let health = Arc::new(Health::new(Arc::clone(&service.rules), Arc::clone(&store), needs));
        let (settings, _) = Settings::from_env(std::iter::empty()).unwrap();
        let blocks = runtime.block_on(SharedBlocks::start(Arc::clone(&service), &settings.store));
        let collector = MetricsCollector { service, health, listeners: Arc::default(), path_label: false, quota: None };
        let fleet =
            runtime.block_on(async { FleetMembership::start(collector.clone(), &settings.fleet, None).unwrap() });
        let site = AppState {
            blocks,
            fleet: Arc::new(fleet),
            live: Arc::new(LiveEvents::new(
                collector.clone(),
                PageBuilder::default(),
                tokio::sync::watch::channel(false).1,
            )),
            pages: PageBuilder::default(),
            collector,
            debug_hosts: AllowedHosts(Arc::default()),
            max_body_bytes: 1 << 20,
            prometheus_page: None,
            admin_token: None,
        };
        let port = runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            let port = listener.local_addr().unwrap().port();
            tokio::spawn(async move { axum::serve(listener, build_http_router(site)).await });
            port
        });
        for ((lost, misconfigured), expected) in STATES.into_iter().zip(expected) {
            store.set_lost(lost);
            store.set_misconfigured(misconfigured.then_some("REDIS_AUTH: refused"));
            let statuses = ["/healthcheck", "/readyz"].map(|page| http::get(port, page).send().status);
            assert_eq!(statuses, [expected.0, expected.1], "{rules} {needs_store} {lost} {misconfigured}");
            assert_eq!(http::get(port, "/livez").send().status, 200);
        }
    }
}

#[test]
fn health_watch_reports_store_loss_and_recovery() {
    runtime().block_on(async {
        let rules = Arc::clone(&test_service(&[], 1, RULES).inner.rules);
        let store = Arc::new(StoreHealth::default());
        let needs = HealthRequirements { domain: false, rules: false, store: true };
        let health = GrpcHealth::new(
            Arc::new(Health::new(rules, Arc::clone(&store), needs)),
            Arc::new(test_service(&[], 1, RULES).inner),
        );
        tokio::spawn(health.clone().send_status_after_store_changes());
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        let server = Server::builder().add_service(health.build_server());
        tokio::spawn(server.serve_with_incoming(incoming));
        let mut client = HealthClient::new(Endpoint::from_shared(address).unwrap().connect().await.unwrap());
        let mut seen = client.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
        let mut next = async || seen.message().await.unwrap().unwrap().status().as_str_name();
        assert_eq!(next().await, "SERVING");
        store.set_lost(true);
        assert_eq!(next().await, "NOT_SERVING");
        store.set_lost(false);
        assert_eq!(next().await, "SERVING");
    });
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

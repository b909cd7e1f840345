//! Life cycle of a process as operators see it: start, failed start, pages, and shutdown.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use prost::Message as _;
use serde_json::{Value, json};
use tonic::Code;

use kit::grpc::{self, Client};
use kit::http::{self, Response};
use kit::http2_frames::{DATA, END_STREAM, GOAWAY, HEADERS, Http2Connection};
use kit::redis;
use kit::scrape::{scrape, with_prometheus};
use kit::tollkeeper::{self, Setup, Tollkeeper};
use kit::{PATIENCE, wait_for};

const RULES: &str = "\
domain: shop
descriptors:
- key: user
  rate_limit: {unit: day, requests_per_unit: 2}
- key: queue
  rate_limit: {unit: minute, requests_per_unit: 60, algorithm: leaky_bucket, queue_size: 2}
- key: slow_queue
  rate_limit: {unit: hour, requests_per_unit: 60, algorithm: leaky_bucket, queue_size: 2}
";

fn server() -> Setup {
    tollkeeper::with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s")
}

/// Body for `/json` that charges `hits` for one entry.
fn charge(key: &str, value: &str, hits: u64) -> String {
    let entry = json!({ "key": key, "value": value });
    json!({ "domain": "shop", "descriptors": [{ "entries": [entry], "hitsAddend": hits }] }).to_string()
}

/// Starts two calls, the second of which is delayed; both results are sent when both calls are done.
fn delayed_calls(port: u16, key: &'static str) -> mpsc::Receiver<Vec<Result<(), Code>>> {
    let (results, outcome) = mpsc::channel();
    thread::spawn(move || {
        let calls = Client::connect(port).call_concurrently(
            &grpc::rate_limit_request("shop", &[(key, "x")]),
            2,
            Duration::from_secs(600),
        );
        results.send(calls.into_iter().map(|call| call.map(drop).map_err(|status| status.code())).collect())
    });
    outcome
}

#[test]
fn health_is_served_under_three_names() {
    let server = server().start();
    let client = Client::connect(server.grpc_port());
    for name in ["", "ratelimit", "envoy.service.ratelimit.v3.RateLimitService"] {
        assert!(client.is_serving(name).unwrap(), "{name:?}");
    }
    assert_eq!(client.is_serving("other").unwrap_err().code(), Code::NotFound);
    for page in ["/healthcheck", "/readyz", "/livez"] {
        for method in ["GET", "POST"] {
            let response = http::request(method, server.http_port(), page).send();
            assert_eq!((response.status, response.text().as_str()), (200, "OK"), "{method} {page}");
            assert_eq!(response.header("content-type").as_deref(), Some("text/plain; charset=utf-8"));
        }
    }
}

#[test]
fn shutdown_reports_unhealthy_before_it_stops_serving() {
    for signal in ["TERM", "INT"] {
        let mut server = server().env("TOLLKEEPER_DRAIN_PERIOD", "3s").start();
        let mut connection = Http2Connection::connect(server.grpc_port());
        let watching = Client::connect(server.grpc_port());
        let (sender, results) = mpsc::channel();
        let watch = thread::spawn(move || watching.watch(|serving| sender.send(serving).unwrap()));
        assert!(results.recv_timeout(PATIENCE).unwrap());

        server.signal(signal);
        assert!(!results.recv_timeout(PATIENCE).unwrap(), "the stream says that it is serving");
        let response = http::get(server.http_port(), "/healthcheck").send();
        assert_eq!((response.status, response.text().as_str()), (500, ""));
        assert_eq!(http::get(server.http_port(), "/livez").send().status, 200);
        let client = Client::connect(server.grpc_port());
        assert!(!client.is_serving("").unwrap());
        client.call(&grpc::rate_limit_request("shop", &[("user", "late")])).unwrap();
        assert_eq!(server.post_json(&charge("user", "late", 1)).status, 200);
        assert!(server.try_wait().is_none());

        assert!(watch.join().unwrap().is_ok(), "the stream ended badly");
        let kinds: Vec<_> = std::iter::from_fn(|| connection.next()).map(|frame| frame.kind).collect();
        assert!(kinds.contains(&GOAWAY), "{kinds:?}");
        assert_eq!(server.wait().code(), Some(0), "{}", server.stderr());
    }
}

#[test]
fn shutdown_finishes_delayed_responses() {
    let mut server = server().start();
    let outcome = delayed_calls(server.grpc_port(), "queue");
    wait_for("the queue to be full", || (server.post_json(&charge("queue", "x", 0)).status == 429).then_some(()));
    server.signal("TERM");
    assert_eq!(outcome.recv_timeout(PATIENCE).unwrap(), [Ok(()), Ok(())]);
    assert_eq!(server.wait().code(), Some(0), "{}", server.stderr());
}

#[test]
fn shutdown_ends_within_its_timeout() {
    let mut server = server().env("TOLLKEEPER_SHUTDOWN_TIMEOUT", "300ms").start();
    let outcome = delayed_calls(server.grpc_port(), "slow_queue");
    wait_for("the queue to be full", || (server.post_json(&charge("slow_queue", "x", 0)).status == 429).then_some(()));
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(1));
    assert!(outcome.recv_timeout(PATIENCE).unwrap().iter().any(Result::is_err));
    assert!(server.stderr().contains("TOLLKEEPER_SHUTDOWN_TIMEOUT"), "{}", server.stderr());
}

#[test]
fn shutdown_that_reaches_its_timeout_releases_the_replica_place() {
    let redis = redis::options().start();
    let replica = || {
        let setup = server()
            .env("REDIS_SOCKET_TYPE", "tcp")
            .env("REDIS_URL", redis.address())
            .env("TOLLKEEPER_STORE_TIMEOUT", "10s")
            .env("TOLLKEEPER_MAX_REPLICAS", "1");
        setup.env("TOLLKEEPER_SHUTDOWN_TIMEOUT", "2s")
    };
    let registered = |server: &Tollkeeper| {
        wait_for("the first claim", || {
            let stats = server.store_stats();
            stats["live_replicas"].is_u64().then(|| (stats["live_replicas"].clone(), stats["slot"].clone()))
        })
    };
    // Delayed responses, and a drain period without end, use up the time.
    for drain_period in ["0s", "2s"] {
        let mut server = replica().env("TOLLKEEPER_DRAIN_PERIOD", drain_period).start();
        assert_eq!(registered(&server), (json!(1), json!(0)), "{drain_period}");
        let _outcome = delayed_calls(server.grpc_port(), "slow_queue");
        let full = || server.post_json(&charge("slow_queue", "x", 0)).status == 429;
        wait_for("the queue to be full", || full().then_some(()));
        server.signal("TERM");
        assert_eq!(server.wait().code(), Some(1), "{}", server.stderr());
        redis.query::<()>(&["DEL", "tk1:{shop|slow_queue=x}:leaky_bucket:3600s"]);
    }
    assert_eq!(registered(&replica().start()), (json!(1), json!(0)));
}

#[test]
fn second_signal_ends_at_once() {
    let mut server = server().env("TOLLKEEPER_DRAIN_PERIOD", "1h").env("TOLLKEEPER_SHUTDOWN_TIMEOUT", "1h").start();
    server.signal("TERM");
    wait_for("the drain", || (server.healthcheck() == 500).then_some(()));
    // The peer's page keeps the peer's status.
    let ready = http::get(server.http_port(), "/readyz").send();
    assert_eq!((ready.status, ready.text().as_str()), (503, "the process is stopping\n"));
    // A reload does not end the process.
    server.signal("HUP");
    assert_eq!(server.healthcheck(), 500);
    server.signal("INT");
    assert_eq!(server.wait().code(), Some(0), "{}", server.stderr());
}

#[test]
fn slow_clients_do_not_delay_shutdown() {
    let mut server = server().start();
    let slow_connections: Vec<_> = [server.grpc_port(), server.http_port(), server.debug_port()]
        .into_iter()
        .flat_map(|port| {
            [(port, ""), (port, "PRI * HTTP/2"), (port, "GET /healthcheck HTT"), (port, "GET / HTTP/1.1\r\n\r\n")]
        })
        .map(|(port, text)| {
            let mut stream = http::connect(port, Ipv4Addr::LOCALHOST).unwrap();
            stream.write_all(text.as_bytes()).unwrap();
            stream
        })
        .collect();
    let mut idle = Http2Connection::connect(server.grpc_port());
    idle.call(1, &[]).unwrap();
    idle.message(1, 10, b"", END_STREAM).unwrap();
    assert!(idle.next().is_some());
    assert_eq!(server.healthcheck(), 200);
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0), "{}", server.stderr());
    drop(slow_connections);
}

#[test]
fn occupied_port_is_one_error_line() {
    let occupied = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = occupied.local_addr().unwrap().port().to_string();
    for setting in ["GRPC_PORT", "PORT", "DEBUG_PORT"] {
        let ended = server().env(setting, &port).run();
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
        assert!(ended.stderr.contains(&format!("{setting}: cannot listen on 127.0.0.1:{port}: ")), "{}", ended.stderr);
    }
}

#[test]
fn unsupported_settings_stop_the_start() {
    let ended = server().env("PORT", "x").env("BACKEND_TYPE", "ring").env("REDIS_URL", "redis://:hunter2").run();
    assert_eq!((ended.code, ended.stderr.lines().count()), (Some(2), 3), "{}", ended.stderr);
    assert!(ended.stderr.contains("PORT=x"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("hunter2"), "{}", ended.stderr);
}

#[test]
fn unknown_arguments_are_usage_errors() {
    for arguments in [["--nonsense", ""], ["serv", ""], ["--config", ""]] {
        let setup =
            arguments.iter().filter(|it| !it.is_empty()).fold(tollkeeper::without_rules(), |setup, it| setup.arg(*it));
        assert_eq!(setup.run().code, Some(2), "{arguments:?}");
    }
}

#[test]
fn invoked_as_ratelimit_it_serves_and_warns_of_arguments() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("ratelimit/config")).unwrap();
    fs::write(root.path().join("ratelimit/config/rules.yaml"), RULES).unwrap();
    let setup = tollkeeper::without_rules().invoked_as("ratelimit", &["-nonsense", "--other=x"]);
    let server = setup.env("RUNTIME_ROOT", root.path()).env("RUNTIME_SUBDIRECTORY", "ratelimit").start();
    assert_eq!(server.post_json(&charge("user", "ann", 1)).status, 200);
    assert_eq!(server.rules_status()["rules"], 3);
    for argument in ["-nonsense: ", "--other=x: "] {
        assert!(server.stderr().contains(argument), "{}", server.stderr());
    }
}

#[test]
fn envoy_gateway_environment_starts_without_its_control_plane() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("ratelimit/config")).unwrap();
    fs::write(root.path().join("ratelimit/config/rules.yaml"), RULES).unwrap();
    let harmless = [
        ("RUNTIME_SUBDIRECTORY", "ratelimit"),
        ("RUNTIME_IGNOREDOTFILES", "true"),
        ("RUNTIME_WATCH_ROOT", "false"),
        ("LOG_LEVEL", "info"),
        ("USE_STATSD", "false"),
        ("CONFIG_GRPC_XDS_SERVER_URL", "envoy-gateway:18001"),
        ("CONFIG_GRPC_XDS_NODE_ID", "envoy-ratelimit"),
        ("GRPC_SERVER_TLS_CERT", "/certs/tls.crt"),
        ("GRPC_SERVER_TLS_KEY", "/certs/tls.key"),
        ("GRPC_SERVER_TLS_CA_CERT", "/certs/ca.crt"),
        ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true"),
        ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "/certs/tls.crt"),
        ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", "/certs/tls.key"),
        ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", "/certs/ca.crt"),
        ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"),
        ("USE_PROMETHEUS", "true"),
        ("PROMETHEUS_ADDR", "127.0.0.1:0"),
    ];
    let setup = |more: &[(&str, &str)]| {
        let named = harmless.iter().chain(more);
        let setup = tollkeeper::without_rules().invoked_as("ratelimit", &[]).env("RUNTIME_ROOT", root.path());
        named.fold(setup, |setup, (name, value)| setup.env(name, value))
    };
    let server = setup(&[]).start();
    assert_eq!(server.post_json(&charge("user", "ann", 1)).status, 200);
    for named in ["GRPC_SERVER_TLS_CERT", "CONFIG_GRPC_XDS_SERVER_URL"] {
        assert!(server.stderr().contains(named), "{named} has no effect, and nothing says so: {}", server.stderr());
    }
    // Certificates of the control plane are read for each connection; they may be there later.
    let server = setup(&[("CONFIG_TYPE", "GRPC_XDS_SOTW")]).start();
    assert_eq!(server.rules_status()["xds"]["server"], "envoy-gateway:18001");
    assert_eq!(server.post_json(&charge("user", "ann", 1)).status, 400);
    let ended = setup(&[("GRPC_SERVER_USE_TLS", "true")]).run();
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("GRPC_SERVER_TLS_CERT=/certs/tls.crt: it cannot be read"), "{}", ended.stderr);
}

#[test]
fn config_flag_takes_precedence_over_runtime_root() {
    let server = server().env("RUNTIME_ROOT", "/nowhere").start();
    assert_eq!(server.rules_status()["rules"], 3);
    assert_eq!(server.stderr().matches("RUNTIME_ variables").count(), 1, "{}", server.stderr());
}

#[test]
fn unix_socket_replaces_the_port() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("grpc.sock");
    // A crash leaves a socket file without a listener.
    drop(UnixListener::bind(&path).unwrap());
    let first = server().env("GRPC_UDS", &path).start();
    let client = Client::connect_unix(&path);
    client.call(&grpc::rate_limit_request("shop", &[("user", "ann")])).unwrap();
    assert!(http::connect(first.grpc_port(), Ipv4Addr::LOCALHOST).is_err(), "the port is open as well");

    let second = server().env("GRPC_UDS", &path).run();
    assert_eq!((second.code, second.stderr.lines().count()), (Some(2), 1), "{}", second.stderr);
    assert!(second.stderr.contains(&format!("GRPC_UDS: cannot listen on {}: ", path.display())), "{}", second.stderr);
    client.call(&grpc::rate_limit_request("shop", &[("user", "ann")])).unwrap();

    let file = directory.path().join("file");
    fs::write(&file, "kept").unwrap();
    for path in [&file, &directory.path().join("no/such/directory"), &directory.path().join("x".repeat(200))] {
        let ended = server().env("GRPC_UDS", path).run();
        assert_eq!((ended.code, ended.stderr.lines().count()), (Some(2), 1), "{}", ended.stderr);
    }
    assert_eq!(fs::read_to_string(file).unwrap(), "kept");
}

#[test]
fn reflection_is_on_by_default_on_loopback_only() {
    const METHODS: [&str; 2] = [
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ];
    // ServerReflectionRequest.list_services = "*"
    let list_services = b"\x3a\x01*".as_slice();
    let cases = [
        ("127.0.0.1", None, true),
        ("localhost", None, true),
        ("0.0.0.0", None, false),
        ("127.0.0.1", Some("false"), false),
        ("0.0.0.0", Some("true"), true),
    ];
    for (host, setting, offered) in cases {
        let setup = server().env("GRPC_HOST", host);
        let setup = match setting {
            Some(setting) => setup.env("TOLLKEEPER_REFLECTION", setting),
            None => setup,
        };
        let server = setup.start();
        let client = Client::connect(server.grpc_port());
        for method in METHODS {
            match client.call_raw(method, list_services) {
                Ok(response) => {
                    let text = String::from_utf8_lossy(&response).into_owned();
                    assert!(offered && text.contains("envoy.service.ratelimit.v3.RateLimitService"), "{text}");
                    assert!(text.contains("grpc.health.v1.Health"), "{text}");
                }
                Err(status) => assert!(!offered && status.code() == Code::Unimplemented, "{host}: {status}"),
            }
        }
    }
}

#[test]
fn unknown_method_is_unimplemented() {
    let server = server().start();
    let client = Client::connect(server.grpc_port());
    for method in [
        "/envoy.service.ratelimit.v3.RateLimitService/Other",
        "/envoy.service.ratelimit.v2.RateLimitService/ShouldRateLimit",
        "/",
    ] {
        assert_eq!(client.call_raw(method, b"".as_slice()).unwrap_err().code(), Code::Unimplemented, "{method}");
    }
}

#[test]
fn callers_of_older_rate_limit_services_are_told_of() {
    let (setup, port) = with_prometheus(server());
    let server = setup.start();
    let client = Client::connect(server.grpc_port());
    let long: &'static str = format!("/{}/x%1b", "a".repeat(4000)).leak();
    for method in [
        "/envoy.service.ratelimit.v2.RateLimitService/ShouldRateLimit",
        "/pb.lyft.ratelimit.RateLimitService/ShouldRateLimit",
        "/envoy.service.ratelimit.v2x.RateLimitService/ShouldRateLimit",
        long,
    ] {
        for _ in 0..3 {
            assert_eq!(client.call_raw(method, b"".as_slice()).unwrap_err().code(), Code::Unimplemented, "{method}");
        }
    }
    let log = server.stderr();
    let lines = |part: &str| log.lines().filter(|line| line.contains(part)).collect::<Vec<_>>();
    for (service, fix) in
        [("envoy.service.ratelimit.v2", "transport_api_version: V3"), ("pb.lyft.ratelimit", "upgrade that Envoy")]
    {
        let found = lines(&format!("service={service}"));
        assert!(found.len() == 1 && found[0].contains("peer=127.0.0.1:") && found[0].contains(fix), "{log}");
        let problems = http::get(server.debug_port(), "/problems").send().text();
        assert!(problems.contains(service) && problems.contains(fix), "{problems}");
    }
    let others = lines("there is no such gRPC method here");
    assert!(others.len() == 1 && others[0].len() < 400, "{others:?}");
    let page = scrape(port.number());
    let count = |service: &str| page.samples[&format!("tollkeeper_unknown_grpc_calls_total{{service=\"{service}\"}}")];
    assert_eq!(["envoy.service.ratelimit.v2", "pb.lyft.ratelimit", "other"].map(count), [3.0, 3.0, 6.0]);
}

#[test]
fn connections_are_accepted_only_once_calls_are_answered() {
    // A Redis that accepts and never answers: the start waits for blocked values.
    let silent = TcpListener::bind(("127.0.0.1", 0)).expect("loopback has a port");
    let address = silent.local_addr().expect("it is bound").to_string();
    for over_socket in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let setup = server().env("REDIS_SOCKET_TYPE", "tcp").env("REDIS_URL", &address);
        let setup = if over_socket { setup.env("GRPC_UDS", &path) } else { setup };
        let server = setup.launch();
        let is_accepted = || match over_socket {
            true => UnixStream::connect(&path).is_ok(),
            false => TcpStream::connect(("127.0.0.1", server.grpc_port())).is_ok(),
        };
        wait_for("a connection to be accepted", || is_accepted().then_some(()));
        assert!(server.stderr().contains("serving"), "accepted before it serves:\n{}", server.stderr());
    }
}

#[test]
fn compressed_requests_are_accepted() {
    let server = server().start();
    let response = Client::connect(server.grpc_port())
        .call_compressed(&grpc::rate_limit_request("shop", &[("user", "ann")]))
        .unwrap();
    assert_eq!(response.statuses[0].limit_remaining, 1);
}

#[test]
fn old_connection_gets_goaway() {
    let server = server().env("GRPC_MAX_CONNECTION_AGE", "100ms").start();
    let mut connection = Http2Connection::connect(server.grpc_port());
    let kinds: Vec<_> = std::iter::from_fn(|| connection.next()).map(|frame| frame.kind).collect();
    assert!(kinds.contains(&GOAWAY), "{kinds:?}");
    assert!(server.post_json(&charge("user", "ann", 1)).status == 200);
}

#[test]
fn old_connection_is_closed_after_its_grace() {
    let server = server().env("GRPC_MAX_CONNECTION_AGE", "100ms").env("GRPC_MAX_CONNECTION_AGE_GRACE", "200ms").start();
    let calls = delayed_calls(server.grpc_port(), "slow_queue").recv_timeout(PATIENCE).unwrap();
    assert!(calls.iter().any(Result::is_err), "a call outlived its connection: {calls:?}");
}

#[test]
fn connection_of_a_vanished_client_is_closed() {
    let server = server().env("TOLLKEEPER_GRPC_KEEPALIVE_INTERVAL", "1s").start();
    // The client never answers a ping.
    let mut stream = http::connect(server.grpc_port(), Ipv4Addr::LOCALHOST).unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();
    let mut received = Vec::new();
    // A reset also closes the connection.
    let _ = stream.read_to_end(&mut received);
    assert!(!received.is_empty());
}

#[test]
fn connection_that_answers_pings_stays() {
    let server = server().env("TOLLKEEPER_GRPC_KEEPALIVE_INTERVAL", "1s").env("GRPC_MAX_CONNECTION_AGE", "3s").start();
    let mut connection = Http2Connection::connect(server.grpc_port());
    let last = std::iter::from_fn(|| connection.next()).map(|frame| frame.kind).last();
    assert_eq!(last, Some(GOAWAY), "it was cut off before it was old");
}

fn is_bad_request_with(reason: &str, response: &Response) -> bool {
    response.status == 400
        && response.text().starts_with(&format!("Bad Request: {reason}"))
        && response.header("content-type").as_deref() == Some("text/plain; charset=utf-8")
        && response.header("x-content-type-options").as_deref() == Some("nosniff")
}

#[test]
fn json_endpoint_matches_envoyproxy_ratelimit() {
    let server = server().start();
    let mut responses = Vec::new();
    for method in ["POST", "GET", "PUT"] {
        let body = charge("user", "ann", 1);
        let request = http::post(server.http_port(), "/json", body);
        let request = if method == "POST" { request } else { request.method(method) };
        let response = request.send();
        assert_eq!(response.header("content-type").as_deref(), Some("application/json"), "{response:?}");
        let mut body: Value = serde_json::from_slice(&response.body).unwrap();
        let reset = body["statuses"][0].as_object_mut().unwrap().remove("durationUntilReset").unwrap();
        assert!(reset.as_str().unwrap().ends_with('s'), "{reset}");
        responses.push((response.status, body));
    }
    let limit = json!({ "requestsPerUnit": 2, "unit": "DAY" });
    let ok = |code, status| json!({ "overallCode": code, "statuses": [status] });
    assert_eq!(responses[0], (200, ok("OK", json!({ "code": "OK", "currentLimit": limit, "limitRemaining": 1 }))));
    assert_eq!(responses[1], (200, ok("OK", json!({ "code": "OK", "currentLimit": limit }))));
    let (status, rejection) = &responses[2];
    assert_eq!((*status, &rejection["overallCode"]), (429, &json!("OVER_LIMIT")));
    assert_eq!(rejection["statuses"][0], json!({ "code": "OVER_LIMIT", "currentLimit": limit }));
    let retry_after = server.post_json(&charge("user", "ann", 1)).header("retry-after").expect("it can pass later");
    assert!((1..=86_400).contains(&retry_after.parse::<u32>().unwrap()), "{retry_after}");
    assert_eq!(server.post_json(&charge("user", "ann", 3)).header("retry-after"), None, "it can never pass");

    let (no_descriptors, no_domain) =
        ("rate limit descriptor list must not be empty", "rate limit domain must not be empty");
    let rejected = [
        ("", "EOF while parsing a value at line 1 column 0"),
        ("{", "EOF while parsing an object at line 1 column 1"),
        ("[]", "invalid type: sequence, expected a map"),
        ("null", "invalid type: null, expected a map"),
        ("x", "expected value at line 1 column 1"),
        (r#"{"domain":"shop"}"#, no_descriptors),
        (r#"{"domain":"","descriptors":[{}]}"#, no_domain),
        (r#"{"descriptors":[{}]}"#, no_domain),
        (r#"{"domain":"shop","descriptors":[]}"#, no_descriptors),
        (r#"{"domain":"shop","descriptors":[{}],"other":1}"#, "unrecognized field name 'other'"),
    ];
    for (body, reason) in rejected {
        let response = server.post_json(body);
        assert!(is_bad_request_with(reason, &response), "{body}: {response:?}");
    }
    let nothing = server.post_json(r#"{"domain":"other","descriptors":[{}]}"#);
    assert_eq!((nothing.status, nothing.text().as_str()), (200, r#"{"overallCode":"OK","statuses":[{"code":"OK"}]}"#));
}

#[test]
fn json_without_rules_is_a_bad_request() {
    let server = tollkeeper::without_rules().arg("--config").arg("/nowhere/rules.yaml").start_unhealthy();
    assert!(is_bad_request_with("no rate limit configuration loaded\n", &server.post_json(&charge("user", "ann", 1))));
    assert_eq!(http::get(server.debug_port(), "/rlconfig").send().text(), "");
}

#[test]
fn unknown_pages_are_not_found() {
    let server = server().start();
    for path in ["/", "/jsonx", "/json/", "/rlconfig", "/metrics", "/%00"] {
        let response = http::get(server.http_port(), path).send();
        assert_eq!((response.status, response.text().as_str()), (404, "404 page not found\n"), "{path}");
        assert_eq!(response.header("content-type").as_deref(), Some("text/plain; charset=utf-8"));
        assert_eq!(response.header("x-content-type-options").as_deref(), Some("nosniff"));
    }
}

#[test]
fn debug_listener_lists_its_pages() {
    let server = server().env("TOLLKEEPER_RLQS", "true").start();
    let response = http::get(server.debug_port(), "/").send();
    let pages: Vec<_> = response.text().lines().map(|line| line.split(": ").next().unwrap().to_owned()).collect();
    assert_eq!(response.status, 200);
    assert!(pages.is_sorted() && pages.contains(&"/rlconfig".to_owned()), "{pages:?}");
    // The stream of events has no end.
    for page in pages.into_iter().filter(|page| page != "/live") {
        let response = http::get(server.debug_port(), &page).send();
        let is_known = !response.text().starts_with("404 page not found\n");
        assert!((200..500).contains(&response.status) && is_known, "{page}: {response:?}");
    }
    let response = http::get(server.debug_port(), "/rlconfig").send();
    assert!(
        response.text().contains("shop.user: unit=DAY requests_per_unit=2, shadow_mode: false, quota_mode: false\n")
    );
    let explained = http::post(server.debug_port(), "/explain", charge("user", "ann", 1)).send();
    assert_eq!(explained.status, 200, "{explained:?}");
    // A peek charges nothing.
    assert_eq!(server.post_json(&charge("user", "ann", 2)).status, 200);
    assert!(!http::get(server.debug_port(), "/json").send().text().contains("overallCode"));
}

#[test]
fn json_log_lines_are_objects() {
    let mut server = server().env("LOG_FORMAT", "json").env("LOG_LEVEL", "debug").start();
    fs::write(server.rules_path(), "domain: shop\nnonsense: \"\\e[31m\"\n").unwrap();
    wait_for("the rejected rules", || server.stderr().contains("Error loading new configuration: ").then_some(()));
    server.signal("TERM");
    server.wait();
    let log = server.stderr();
    for line in log.lines() {
        let event: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        for key in ["@timestamp", "level", "@message"] {
            assert!(event[key].is_string(), "{line}");
        }
    }
    assert!(log.lines().count() > 3, "{log}");
}

#[test]
fn log_names_the_listeners() {
    let server = server().start();
    for port in [server.grpc_port(), server.http_port(), server.debug_port()] {
        let address = format!("127.0.0.1:{port}");
        wait_for("the line that says where", || server.stderr().contains(&address).then_some(()));
    }
}

#[test]
fn delay_stays_within_the_call_deadline() {
    let server = server().start();
    let client = Client::connect(server.grpc_port());
    // The second call would be delayed by a minute, so it is rejected at once.
    let request = grpc::rate_limit_request("shop", &[("slow_queue", "y")]);
    let calls = client.call_concurrently(&request, 2, Duration::from_secs(20));
    let codes: Vec<_> = calls.into_iter().map(|call| call.unwrap().overall_code).collect();
    assert_eq!(codes.iter().sum::<i32>(), 1 + 2, "{codes:?}");
}

#[test]
fn cancelled_call_does_no_harm() {
    let server = server().start();
    let mut connection = Http2Connection::connect(server.grpc_port());
    let message = grpc::rate_limit_request("shop", &[("queue", "z")]).encode_to_vec();
    for stream in [1, 3] {
        connection.call(stream, &[]).unwrap();
        connection.message(stream, u32::try_from(message.len()).unwrap(), &message, END_STREAM).unwrap();
    }
    // One of the two is answered, the other is delayed.
    assert_eq!(connection.next().unwrap().kind, HEADERS);
    assert_eq!(connection.next().unwrap().kind, DATA);
    drop(connection);
    assert_eq!(server.post_json(&charge("user", "ann", 1)).status, 200);
}

#[test]
fn peek_then_lost_report_is_warned_about_once() {
    let rules = "\
domain: shop
descriptors:
- key: free
  rate_limit: {unit: day, requests_per_unit: 2, algorithm: token_bucket}
- key: owed
  rate_limit: {unit: day, requests_per_unit: 2, algorithm: token_bucket, count_rejected: true}
";
    let server = tollkeeper::with_rules(rules).env("TOLLKEEPER_DRAIN_PERIOD", "0s").start();
    for key in ["owed", "free", "free"] {
        assert_eq!(server.post_json(&charge(key, "x", 0)).status, 200, "a peek");
        assert_eq!(server.post_json(&charge(key, "x", 3)).status, 429, "a report over the limit");
    }
    let warned = || server.stderr().lines().filter(|line| line.contains("count_rejected: true")).count();
    assert_eq!(warned(), 1, "{}", server.stderr());
    assert!(server.stderr().contains("shop.free"), "{}", server.stderr());
}

#[test]
fn spared_descriptor_is_not_taken_for_a_peek() {
    let rules = "\
domain: shop
descriptors:
- key: a
  rate_limit: {unit: day, requests_per_unit: 2, algorithm: token_bucket}
- key: b
  rate_limit: {unit: day, requests_per_unit: 2, algorithm: token_bucket}
";
    let server = tollkeeper::with_rules(rules)
        .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
        .env("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true")
        .start();
    let both = json!({ "domain": "shop", "descriptors": [
        { "entries": [{ "key": "a", "value": "x" }], "hitsAddend": 3 },
        { "entries": [{ "key": "b", "value": "x" }] },
    ] });
    assert_eq!(server.post_json(&both.to_string()).status, 429, "a rejects, and b is not charged");
    assert_eq!(server.post_json(&charge("b", "x", 3)).status, 429);
    assert!(!server.stderr().contains("count_rejected"), "{}", server.stderr());
}

#[test]
fn unloadable_rules_keep_the_process_unready() {
    let server = tollkeeper::with_rules("domain: shop\ndescriptors: [{key: ''}]\n").start_unhealthy();
    let status = |path: &str| http::get(server.http_port(), path).send().status;
    assert_eq!([status("/healthcheck"), status("/livez"), status("/readyz")], [200, 200, 503]);
    assert!(server.stderr().contains("no rules are loaded"), "{}", server.stderr());
    fs::write(server.rules_path(), RULES).unwrap();
    wait_for("the rules to be loaded", || (status("/readyz") == 200).then_some(()));
}

#[test]
fn explain_page_is_bounded() {
    let server = server().start();
    let explain_status = |descriptors: usize, entries: usize| {
        let entry = json!({ "key": "user", "value": "x" });
        let descriptor = json!({ "entries": vec![entry; entries] });
        let body = json!({ "domain": "shop", "descriptors": vec![descriptor; descriptors] });
        http::post(server.debug_port(), "/explain", body.to_string()).send().status
    };
    assert_eq!(
        [
            explain_status(100, 1),
            explain_status(1, 2048),
            explain_status(101, 1),
            explain_status(1, 2049),
            explain_status(10, 205)
        ],
        [200, 200, 400, 400, 400]
    );
}

#[test]
fn help_works_under_another_program_name() {
    for request in ["--help", "--version"] {
        let ended = tollkeeper::without_rules().invoked_as("ratelimit", &[request]).run();
        assert_eq!(ended.code, Some(0), "{request}: {}", ended.stderr);
    }
}

#[test]
fn evictions_are_logged() {
    let rules = "domain: shop\ndescriptors:\n- {key: user, rate_limit: {unit: day, requests_per_unit: 9}}\n";
    let server = tollkeeper::with_rules(rules).env("TOLLKEEPER_MEMORY_BYTES", "1MiB").start();
    let charge = |users: std::ops::Range<u32>| {
        let descriptors: Vec<_> =
            users.map(|user| json!({"entries": [{"key": "user", "value": user.to_string()}]})).collect();
        let answer = server.post_json(&json!({"domain": "shop", "descriptors": descriptors}).to_string());
        assert_eq!(answer.status, 200);
    };
    charge(0..10);
    assert!(!server.stderr().contains("evicted"), "{}", server.stderr());
    (1..5).for_each(|batch| charge(batch * 9000..(batch + 1) * 9000));
    let line = wait_for("a line about evictions", || {
        let log = server.stderr();
        log.lines().find(|line| line.contains("counters evicted: TOLLKEEPER_MEMORY_BYTES")).map(str::to_owned)
    });
    assert!(line.contains("level=warning") && line.contains(" evicted="), "{line}");
    // One line for all of them.
    assert_eq!(server.stderr().matches("counters evicted").count(), 1);
}

//! The pages of the debug and HTTP listeners under load: what builds them, and what clients that read nothing keep.

use std::fmt::Write as _;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};

use kit::grpc::{Client, rate_limit_request};
use kit::redis;
use kit::tollkeeper::{Setup, Tollkeeper, with_rules, with_runtime_files};
use kit::{http, wait_for};

/// Number of limits for pages of megabytes.
const MANY_LIMITS: usize = 4000;

/// Rules of one domain with this many limits.
fn many_limits(count: usize) -> String {
    let mut rules = "domain: shop\ndescriptors:\n".to_owned();
    for index in 0..count {
        writeln!(rules, "- {{key: path_of_the_shop_{index:05}, rate_limit: {{unit: day, requests_per_unit: 3}}}}")
            .unwrap();
    }
    rules
}

fn server(rules: &str) -> Setup {
    with_rules(rules).env("TOLLKEEPER_DRAIN_PERIOD", "0s")
}

/// Three domains of which two names begin alike, and one has a character that metrics replace.
fn three_domains() -> Setup {
    let file = |domain: &str| {
        let rules = format!(
            "domain: \"{domain}\"\ndescriptors:\n- {{key: user, rate_limit: {{unit: day, requests_per_unit: 2}}}}\n"
        );
        (format!("{}.yaml", domain.replace(':', "-")), rules)
    };
    let files = ["shop", "shop.eu", "shop:us"].map(file);
    with_runtime_files(files.into()).env("TOLLKEEPER_DRAIN_PERIOD", "0s")
}

fn charge(server: &Tollkeeper, domain: &str, value: &str, times: usize) {
    let client = Client::connect(server.grpc_port());
    for _ in 0..times {
        client.call(&rate_limit_request(domain, &[("user", value)])).unwrap();
    }
}

fn get_json(server: &Tollkeeper, page: &str) -> Value {
    let response = http::get(server.debug_port(), page).send();
    assert_eq!(response.status, 200, "{page}: {response:?}");
    serde_json::from_slice(&response.body).unwrap()
}

/// Domain and entries of the keys that were rejected most, sorted.
fn domains_and_entries(report: &Value) -> Vec<(String, Value)> {
    let rows = report["overall"].as_array().unwrap().iter();
    let mut rows: Vec<_> =
        rows.map(|row| (row["domain"].as_str().unwrap_or("none").to_owned(), row["entries"].clone())).collect();
    rows.sort_by(|a, b| a.0.cmp(&b.0));
    rows
}

fn entries_of(value: &str) -> Value {
    json!([{"key": "user", "value": value}])
}

#[test]
fn every_rejected_key_names_its_domain_and_entries() {
    let server = three_domains().start();
    for (domain, value) in [("shop", "ann"), ("shop.eu", "bob"), ("shop:us", "eve")] {
        charge(&server, domain, value, 5);
    }
    let expected = [("shop", "ann"), ("shop.eu", "bob"), ("shop:us", "eve")];
    let expected = expected.map(|(domain, value)| (domain.to_owned(), entries_of(value)));
    assert_eq!(domains_and_entries(&get_json(&server, "/top")), expected);
    assert_eq!(domains_and_entries(&get_json(&server, "/fleet?minutes=10")["top"]), expected);
    let rules = get_json(&server, "/rules");
    let mut domains: Vec<&str> =
        rules["rules"].as_array().unwrap().iter().map(|r| r["domain"].as_str().unwrap()).collect();
    domains.sort_unstable();
    assert_eq!(domains, ["shop", "shop.eu", "shop:us"]);
}

#[test]
fn key_of_another_replica_names_its_domain_and_entries() {
    let redis = redis::options().start();
    let replica = || {
        three_domains()
            .env("REDIS_URL", redis.address())
            .env("REDIS_SOCKET_TYPE", "tcp")
            .env("TOLLKEEPER_FLEET", "true")
            .start()
    };
    let (here, there) = (replica(), replica());
    charge(&there, "shop.eu", "bob", 5);
    let report = wait_for("the key of the other replica", || {
        let report = get_json(&here, "/fleet?minutes=10");
        let is_there = !report["top"]["overall"].as_array().unwrap().is_empty();
        is_there.then_some(report)
    });
    assert_eq!(domains_and_entries(&report["top"]), [("shop.eu".to_owned(), entries_of("bob"))]);
}

/// CPU time of the threads that decide, as the system counts it.
fn worker_cpu(server: &Tollkeeper) -> Duration {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.id())).unwrap();
    let ticks: u64 = tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok())
        .filter_map(|stat| {
            let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
            let is_worker = name.starts_with("tokio");
            let fields: Vec<&str> = rest.split_whitespace().collect();
            is_worker.then(|| fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap())
        })
        .sum();
    Duration::from_millis(ticks * 10)
}

#[test]
fn pages_take_no_time_of_the_threads_that_decide() {
    let server = server(&many_limits(1000)).start();
    for page in ["/settings", "/rlconfig", "/stats", "/rules?most=1000"] {
        let before = worker_cpu(&server);
        for _ in 0..30 {
            assert_eq!(http::get(server.debug_port(), page).send().status, 200, "{page}");
        }
        let taken = worker_cpu(&server) - before;
        assert!(taken < Duration::from_millis(150), "{page}: {taken:?}");
    }
}

#[test]
fn expensive_page_is_built_once_a_second_for_all_who_ask() {
    let server = server(&many_limits(1000)).start();
    let cpu = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", server.id())).unwrap();
        let fields: Vec<u64> = stat
            .rsplit_once(')')
            .unwrap()
            .1
            .split_whitespace()
            .skip(11)
            .take(2)
            .map(|field| field.parse().unwrap())
            .collect();
        fields.iter().sum::<u64>()
    };
    let get = || assert_eq!(http::get(server.debug_port(), "/settings").send().status, 200);
    let before = cpu();
    (0..4).for_each(|_| {
        get();
        // Each of these is built anew.
        std::thread::sleep(Duration::from_millis(1100));
    });
    let of_four = cpu() - before;
    let (before, start) = (cpu(), Instant::now());
    (0..200).for_each(|_| get());
    let (of_many, seconds) = (cpu() - before, start.elapsed().as_secs());
    assert!(of_many < of_four * (2 + seconds) + 20, "{of_many} ticks for 200 pages, {of_four} for four");
}

/// A connection whose receive buffer is small, so that the server keeps what is not read.
fn connect_with_small_buffer(port: u16) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)).into()).unwrap();
    socket.into()
}

fn resident_mib(server: &Tollkeeper) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

#[test]
fn clients_that_do_not_read_pages_take_bounded_memory() {
    let server = server(&many_limits(MANY_LIMITS)).start();
    let page = "/rules?most=10000";
    let bytes = http::get(server.debug_port(), page).send().body.len();
    assert!(bytes > 2 << 20, "{bytes}");
    let before = resident_mib(&server);
    let clients: Vec<TcpStream> = (0..100)
        .map(|_| {
            let mut client = connect_with_small_buffer(server.debug_port());
            // The server closes most of them.
            let _ = write!(client, "GET {page} HTTP/1.1\r\nHost: localhost\r\n\r\n");
            client
        })
        .collect();
    let closed = wait_for("clients that are closed", || {
        let closed = clients.iter().filter(|client| {
            client.set_nonblocking(true).unwrap();
            client.peek(&mut [0; 12]).map_or_else(|error| error.kind() != ErrorKind::WouldBlock, |read| read == 0)
        });
        Some(closed.count()).filter(|closed| *closed > 50)
    });
    let grown = resident_mib(&server).saturating_sub(before);
    assert!(grown < 64, "{grown} MiB for {closed} of 100 clients closed");
    assert_eq!(http::get(server.debug_port(), "/livez").from(9).send().status, 200);
    // What a client keeps is free again when it is gone. Until then the server may reset further connections.
    drop(clients);
    wait_for("the page", || {
        http::get(server.debug_port(), page).try_send().is_ok_and(|response| response.status == 200).then_some(())
    });
}

#[test]
fn bodies_of_json_requests_in_progress_are_bounded_per_address() {
    let server = server(&many_limits(1))
        .env("TOLLKEEPER_GRPC_MAX_MESSAGE_BYTES", "1MiB")
        .env("TOLLKEEPER_MAX_BUFFERED_BYTES", "16MiB")
        .start();
    let request = |length: usize| format!("POST /json HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n");
    let length = 1_000_000;
    let mut clients: Vec<TcpStream> = (0..10)
        .map(|_| {
            let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, server.http_port())).unwrap();
            let _ =
                client.write_all(request(length).as_bytes()).and_then(|()| client.write_all(&vec![b' '; length - 1]));
            client
        })
        .collect();
    let refused = wait_for("refusals", || {
        let mut refused = 0;
        for client in &mut clients {
            client.set_nonblocking(true).unwrap();
            let mut start = [0; 12];
            match client.peek(&mut start) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                _ => refused += usize::from(start == *b"HTTP/1.1 503"),
            }
        }
        (refused >= 5).then_some(refused)
    });
    assert!(refused < 10, "{refused}");
    drop(clients);
    let small = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"path_of_the_shop_00000","value":"1"}]}]}"#;
    wait_for("another request", || (server.post_json(small).status == 200).then_some(()));
}

#[test]
fn rules_are_paged_searched_and_found_by_their_whole_name() {
    let server = server(&many_limits(250)).start();
    let names = |query: &str| {
        let report = get_json(&server, &format!("/rules?{query}"));
        let names = report["rules"].as_array().unwrap().iter().map(|limit| limit["rule"].as_str().unwrap().to_owned());
        (report["limits"].as_u64().unwrap(), names.collect::<Vec<_>>())
    };
    let (all, first) = names("most=100&order=file");
    let (_, last) = names("most=100&order=file&offset=200");
    assert_eq!((all, first.len(), last.len()), (250, 100, 50));
    assert_eq!((&*first[0], &*last[49]), ("shop.path_of_the_shop_00000", "shop.path_of_the_shop_00249"));
    let (found, names_found) = names("search=SHOP%20_0012&order=file");
    assert_eq!((found, &*names_found[0]), (10, "shop.path_of_the_shop_00120"));
    assert_eq!(names("rule=shop.path_of_the_shop_00007&exact=true").0, 1);
    assert_eq!((names("rule=shop&exact=true").0, names("rule=shop").0), (0, 250));
}

/// Reads what a client of `/live` gets until it has an event that `accept` accepts.
fn wait_for_live(server: &Tollkeeper, accept: impl Fn(&Value) -> bool) -> Value {
    let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, server.debug_port())).unwrap();
    write!(client, "GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut text = String::new();
    let mut buffer = [0; 4096];
    loop {
        let length = client.read(&mut buffer).unwrap();
        text += &String::from_utf8_lossy(&buffer[..length]);
        let events = text.split("data: ").skip(1).filter_map(|rest| rest.split_once("\n\n"));
        if let Some(event) =
            events.filter_map(|(event, _)| serde_json::from_str(event).ok()).find(|event| accept(event))
        {
            return event;
        }
    }
}

#[test]
fn requests_are_rejected_once_whatever_the_number_of_their_limits() {
    let rules = "\
domain: shop
descriptors:
- key: user
  rate_limit:
  - {unit: day, requests_per_unit: 1}
  - {unit: hour, requests_per_unit: 1, name: hourly}
  - {unit: minute, requests_per_unit: 1, name: minutely}
";
    let server = server(rules).start();
    let charged = std::thread::scope(|scope| {
        let live = scope.spawn(|| wait_for_live(&server, |event| event["recent"]["calls_per_s"].as_f64() > Some(5.0)));
        // The first event is sent at once and counts nothing.
        std::thread::sleep(Duration::from_millis(300));
        charge(&server, "shop", "ann", 21);
        live.join().unwrap()
    });
    let charged = &charged["recent"];
    assert!(charged["rejected_per_s"].as_f64() <= charged["calls_per_s"].as_f64(), "{charged}");
    let recent = get_json(&server, "/fleet?minutes=10")["recent"].clone();
    assert!(recent["rejected_per_s"].as_f64() <= recent["calls_per_s"].as_f64(), "{recent}");
}

#[test]
fn values_that_are_not_logged_are_on_no_page() {
    let rules = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: day, requests_per_unit: 2}, decision_log: none}
- {key: path, rate_limit: {unit: day, requests_per_unit: 2}}
";
    const TOKEN: &str = "a token of an operator";
    for (setting, hidden) in [("plain", vec!["ann-the-user"]), ("none", vec!["ann-the-user", "cart-the-path"])] {
        let server =
            server(rules).env("TOLLKEEPER_DECISION_LOG_VALUES", setting).env("TOLLKEEPER_ADMIN_TOKEN", TOKEN).start();
        let client = Client::connect(server.grpc_port());
        for _ in 0..5 {
            for (key, value) in [("user", "ann-the-user"), ("path", "cart-the-path")] {
                client.call(&rate_limit_request("shop", &[(key, value)])).unwrap();
            }
        }
        let pages = [
            "/top",
            "/top?format=text",
            "/top?format=text&show=busiest",
            "/unmatched",
            "/fleet?minutes=10",
            "/fleet?minutes=10&format=text",
            "/counters?domain=shop&rule=shop.user",
            "/counters?domain=shop&rule=shop.path",
            "/problems",
            "/stats",
        ];
        for page in pages {
            let request = http::get(server.debug_port(), page).header("authorization", format!("Bearer {TOKEN}"));
            let response = request.send();
            assert_eq!(response.status, 200, "{page}: {response:?}");
            let text = response.text();
            for value in &hidden {
                assert!(!text.contains(value), "{setting}: {page} shows {value}: {text}");
            }
        }
        let top = get_json(&server, "/top");
        let user = top["overall"].as_array().unwrap().iter().find(|row| row["rule"] == "shop.user").unwrap();
        assert_eq!((&user["key"], &user["entries"]), (&json!("user"), &json!([{"key": "user"}])));
        let shows_path = top.to_string().contains("cart-the-path");
        assert_eq!(shows_path, setting == "plain");
    }
}

#[test]
fn lost_store_is_told_and_its_local_rejections_count() {
    let rules = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: day, requests_per_unit: 1, on_store_error: local}}
";
    let redis = redis::options().start();
    let server = server(rules)
        .env("REDIS_URL", redis.address())
        .env("REDIS_SOCKET_TYPE", "tcp")
        .env("TOLLKEEPER_STORE_TIMEOUT", "100ms")
        .start();
    charge(&server, "shop", "ann", 1);
    wait_for("the store", || (get_json(&server, "/problems")["store_available"] == true).then_some(()));
    redis.kill();
    wait_for("the loss", || {
        charge(&server, "shop", "ann", 1);
        (get_json(&server, "/problems")["store_available"] == false).then_some(())
    });
    std::thread::scope(|scope| {
        let live =
            scope.spawn(|| wait_for_live(&server, |event| event["recent"]["rejected_per_s"].as_f64() > Some(0.0)));
        while !live.is_finished() {
            charge(&server, "shop", "bob", 5);
        }
    });
}

mod page_builder {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use axum::http::{StatusCode, Uri};
    use tollkeeper::base::threads;
    use tollkeeper::serve::http::page_builder::{Page, PageBuilder};

    #[tokio::test]
    async fn pages_that_took_long_are_kept_but_no_errors() {
        for (status, expected) in [(StatusCode::OK, 1), (StatusCode::BAD_REQUEST, 2)] {
            let (pages, built) = (PageBuilder::default(), Arc::new(AtomicU32::new(0)));
            for _ in 0..2 {
                let built = Arc::clone(&built);
                let build = move || {
                    let before = threads::thread_cpu_time();
                    while threads::thread_cpu_time() < before + Duration::from_millis(5) {}
                    built.fetch_add(1, Ordering::Relaxed);
                    Some(Page::error(status, "a page\n".to_owned()))
                };
                // What removes a kept page runs on this thread too, so not yet.
                let response = pages.respond_with_page(&Uri::from_static("/top"), build).await;
                assert_eq!(response.status(), status);
            }
            assert_eq!(built.load(Ordering::Relaxed), expected, "{status}");
        }
    }
}

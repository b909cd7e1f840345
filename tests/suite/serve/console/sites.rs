//! Requests that a web page in the operator's browser can cause: by DNS rebinding, from another origin, in a frame.

use super::server;
use kit::http::{self, Request, Response};

/// Response to a GET with this target and `Host`.
fn get(port: u16, target: &str, host: &str) -> Response {
    http::get(port, target).host(host).send()
}

#[test]
fn rebound_name_is_refused_on_every_page() {
    let server = server().env("TOLLKEEPER_DEBUG_HOSTS", "Console.Example, other.example").start();
    let port = server.debug_port();
    let allowed = [
        "127.0.0.1",
        "127.0.0.1:6070",
        "10.1.2.3",
        "[::1]:6070",
        "localhost",
        "LOCALHOST:6070",
        "localhost.",
        "a.localhost",
        "tollkeeper:6070",
        "tollkeeper.limits.svc",
        "tollkeeper.limits.svc.cluster.local:6070",
        "console.example:6070",
        "CONSOLE.example",
        "other.example",
    ];
    for host in allowed {
        assert_eq!(get(port, "/rules", host).status, 200, "{host}");
    }
    let refused = [
        "attacker.example",
        "attacker.example:6070",
        "attacker.example.",
        "localhost.attacker.example",
        "127.0.0.1.attacker.example",
        "evilconsole.example",
        "x.console.example",
        "svc.attacker.example",
        "127.0.0.1.nip.io",
        "user@attacker.example",
    ];
    for host in refused {
        for page in ["/", "/console.js", "/live", "/rules", "/top", "/settings", "/rlconfig", "/nowhere"] {
            assert_eq!(get(port, page, host).status, 421, "{host} {page}");
        }
    }
    // The target of the request wins over the header, so both are checked.
    assert_eq!(get(port, "http://attacker.example/rules", "localhost").status, 421);
}

#[test]
fn refusal_of_a_name_names_the_setting() {
    let server = server().start();
    let response = get(server.debug_port(), "/rules", "attacker.example");
    assert!(response.text().contains("TOLLKEEPER_DEBUG_HOSTS"), "{response:?}");
    assert_eq!(response.header("x-content-type-options").as_deref(), Some("nosniff"));
}

#[test]
fn invalid_names_of_hosts_end_the_start() {
    for names in ["http://console.example", "console.example:6070", "a,,b", "127.0.0.1"] {
        let ended = server().env("TOLLKEEPER_DEBUG_HOSTS", names).run();
        assert!(ended.code == Some(2) && ended.stderr.contains("TOLLKEEPER_DEBUG_HOSTS"), "{names}: {}", ended.stderr);
    }
}

#[test]
fn request_of_another_site_is_refused() {
    let server = server().env("TOLLKEEPER_ADMIN_TOKEN", "correct horse battery staple").start();
    let port = server.debug_port();
    let own = format!("http://127.0.0.1:{port}");
    let get = |path: &str| http::get(port, path);
    let reset = || {
        let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"login","value":"x"}]}]}"#;
        http::post(port, "/reset", body).header("authorization", "Bearer correct horse battery staple")
    };
    let with = |request: Request, headers: &[(&str, &str)]| {
        headers.iter().fold(request, |request, (name, value)| request.header(name, value)).send().status
    };
    let other: [&[(&str, &str)]; 7] = [
        &[("origin", "http://attacker.example")],
        &[("origin", "null")],
        &[("origin", "http://127.0.0.1")],
        &[("origin", "http://127.0.0.1:1"), ("sec-fetch-site", "same-origin")],
        &[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors"), ("sec-fetch-dest", "script")],
        &[("sec-fetch-site", "same-site"), ("sec-fetch-mode", "cors"), ("sec-fetch-dest", "empty")],
        &[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe")],
    ];
    for headers in other {
        for request in [get("/rules"), get("/live"), get("/console.js"), reset(), http::post(port, "/explain", "{}")] {
            assert_eq!(with(request, headers), 403, "{headers:?}");
        }
    }
    // A link may be followed, a form may not be sent.
    let link = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")];
    assert_eq!(with(get("/"), &link), 200);
    assert_eq!(with(reset(), &link), 403);
    // The console itself.
    let console = [("sec-fetch-site", "same-origin"), ("sec-fetch-mode", "cors"), ("sec-fetch-dest", "empty")];
    assert_eq!(with(get("/rules"), &console), 200);
    assert_eq!(with(reset().header("origin", &own), &console), 200);
    assert_eq!(with(get("/"), &[("sec-fetch-site", "none")]), 200);
    // No preflight is answered, so no other site can send the token or another method than GET and POST.
    let preflight = http::request("OPTIONS", port, "/reset")
        .header("origin", "http://attacker.example")
        .header("access-control-request-method", "POST")
        .send();
    assert_eq!(preflight.status, 403);
    assert!(preflight.all("access-control-allow-origin").is_empty());
}

/// It needs no token and no preflight, so a web page could charge and refund.
#[test]
fn json_of_another_site_is_refused() {
    let server = server().env("TOLLKEEPER_DEBUG_HOSTS", "limits.example").start();
    let port = server.http_port();
    let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"login","value":"x"}],"hitsAddend":"0"}]}"#;
    let send = |method: &str, host: &str, headers: &[(&str, &str)]| {
        let request = http::post(port, "/json", body).method(method).host(host);
        headers.iter().fold(request, |request, (name, value)| request.header(name, value)).send().status
    };
    let own = format!("127.0.0.1:{port}");
    for method in ["POST", "PUT", "DELETE"] {
        for headers in [
            &[("origin", "http://attacker.example"), ("content-type", "text/plain")][..],
            &[("origin", "null")],
            &[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors"), ("sec-fetch-dest", "empty")],
            &[("sec-fetch-site", "same-site")],
        ] {
            assert_eq!(send(method, &own, headers), 403, "{method} {headers:?}");
        }
        // A name that was made to point at this process is the page's own site.
        let rebound = [("origin", "http://attacker.example"), ("sec-fetch-site", "same-origin")];
        assert_eq!(send(method, "attacker.example", &rebound), 421);
        assert_eq!(send(method, "attacker.example", &[("sec-fetch-site", "same-origin")]), 421);
    }
    // Neither Envoy nor curl sends these headers, and they may use any name.
    assert_eq!(send("POST", "ratelimit.shop.example", &[]), 200);
    assert_eq!(send("POST", &own, &[("origin", &format!("http://{own}")), ("sec-fetch-site", "same-origin")]), 200);
    assert_eq!(send("POST", "limits.example", &[("origin", "https://limits.example")]), 200);
    let probe = http::get(port, "/healthcheck").host("any.example").send();
    assert_eq!(probe.status, 200);
}

#[test]
fn get_changes_nothing() {
    let server = server().env("TOLLKEEPER_ADMIN_TOKEN", "correct horse battery staple").start();
    for page in ["/reset", "/log_level?level=debug"] {
        let request =
            http::get(server.debug_port(), page).header("authorization", "Bearer correct horse battery staple");
        let status = request.send().status;
        assert!(status == 405 || page != "/reset", "{page}: {status}");
    }
    assert_eq!(http::get(server.debug_port(), "/log_level").send().text(), "warn\n");
}

#[test]
fn debug_listener_that_other_machines_reach_is_warned_of() {
    for (host, is_open) in [("127.0.0.1", false), ("::1", false), ("localhost", false), ("0.0.0.0", true)] {
        for token in [None, Some("correct horse battery staple")] {
            let setup = server().env("DEBUG_HOST", host);
            let server =
                token.into_iter().fold(setup, |setup, token| setup.env("TOLLKEEPER_ADMIN_TOKEN", token)).start();
            let log = server.stderr();
            let lines: Vec<_> = log.lines().filter(|line| line.contains("DEBUG_HOST=127.0.0.1")).collect();
            assert_eq!(lines.len(), usize::from(is_open), "{host}: {log}");
            let expected = format!("has_admin_token={}", token.is_some());
            assert!(lines.iter().all(|line| line.contains(&expected) && line.contains("docs/console.md")), "{log}");
        }
    }
}

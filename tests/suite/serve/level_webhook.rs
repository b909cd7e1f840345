//! The webhook of levels: what it gets, the signature, repeated requests, and that it holds up no decision.

use std::net::TcpListener;
use std::process::Command;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use serde_json::Value;

use crate::decide::decision_log::schema::assert_valid;
use kit::http_server::HttpServer;
use kit::scrape::{scrape, with_prometheus};
use kit::tollkeeper::{Setup, Tollkeeper, with_rules};
use kit::wait_for;

const RULES: &str = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: year, requests_per_unit: 2, notify: [50%]}}
";

/// Key `tollkeeper-webhook-key` in base64.
const SECRET: &str = "whsec_dG9sbGtlZXBlci13ZWJob29rLWtleQ==";

type Received = Arc<Mutex<Vec<(HeaderMap, String)>>>;

/// A receiver that answers with these statuses, the last one for ever.
fn receiver(statuses: &'static [u16]) -> (HttpServer, Received) {
    let received = Received::default();
    let of_route = Arc::clone(&received);
    let answer = move |headers: HeaderMap, body: Bytes| async move {
        let mut received = of_route.lock().unwrap();
        received.push((headers, String::from_utf8(body.to_vec()).unwrap()));
        let status = statuses[(received.len() - 1).min(statuses.len() - 1)];
        StatusCode::from_u16(status).unwrap()
    };
    (HttpServer::start(0, Router::new().route("/levels", post(answer)), None), received)
}

fn ask(server: &Tollkeeper, user: &str) {
    let body = format!(r#"{{"domain":"shop","descriptors":[{{"entries":[{{"key":"user","value":"{user}"}}]}}]}}"#);
    assert_eq!(server.post_json(&body).status, 200);
}

fn with_webhook(setup: Setup, url: &str) -> Setup {
    setup.env("TOLLKEEPER_NOTIFY_WEBHOOK", url).env("TOLLKEEPER_NOTIFY_WEBHOOK_SECRET", SECRET)
}

fn header<'h>(headers: &'h HeaderMap, name: &str) -> &'h str {
    headers.get(name).unwrap_or_else(|| panic!("no {name}: {headers:?}")).to_str().unwrap()
}

/// The signature as another implementation of HMAC makes it.
fn sign(text: &str) -> String {
    let program = "import base64, hashlib, hmac, sys\n\
                   key = base64.b64decode(sys.argv[1].removeprefix('whsec_'))\n\
                   print('v1,' + base64.b64encode(hmac.new(key, sys.argv[2].encode(), hashlib.sha256).digest()).decode())";
    let output = Command::new("python3").args(["-c", program, SECRET, text]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn level_is_posted_signed_and_repeated_until_it_is_taken() {
    let (receiver, received) = receiver(&[500, 204]);
    let (setup, metrics) = with_prometheus(with_rules(RULES).env("LOG_LEVEL", "debug"));
    let server = with_webhook(setup, &format!("http://127.0.0.1:{}/levels", receiver.port())).start();
    ask(&server, "q\\\"\\n");
    let requests = wait_for("two requests", || Some(received.lock().unwrap().clone()).filter(|all| all.len() == 2));
    for (headers, body) in &requests {
        let [id, time, signature] =
            ["webhook-id", "webhook-timestamp", "webhook-signature"].map(|name| header(headers, name));
        assert_eq!(signature, sign(&format!("{id}.{time}.{body}")));
        assert_eq!(header(headers, "content-type"), "application/json");
        assert_valid(body);
        let record: Value = serde_json::from_str(body).unwrap();
        assert_eq!((&record["level"], &record["entries"][0]["value"]), (&"50%".into(), &"q\"\n".into()));
    }
    assert_eq!(header(&requests[0].0, "webhook-id"), header(&requests[1].0, "webhook-id"));
    let sent = || scrape(metrics.number()).count("tollkeeper_level_webhook_requests_total{outcome=\"sent\"}");
    wait_for("the count", || (sent() == 1).then_some(()));
    assert!(!server.stderr().contains("dG9sbGtlZXBlci13ZWJob29rLWtleQ"), "the secret is in the log");
}

#[test]
fn refused_request_is_not_repeated_and_the_url_stays_secret() {
    let (receiver, received) = receiver(&[404]);
    let (setup, metrics) = with_prometheus(with_rules(RULES));
    let url = format!("http://127.0.0.1:{}/levels?token=very-secret-token", receiver.port());
    let server = with_webhook(setup, &url).start();
    ask(&server, "ann");
    let failed = || scrape(metrics.number()).count("tollkeeper_level_webhook_requests_total{outcome=\"failed\"}");
    wait_for("the count", || (failed() == 1).then_some(()));
    assert_eq!(received.lock().unwrap().len(), 1);
    let text = server.stderr();
    assert!(text.contains("a level was not sent to TOLLKEEPER_NOTIFY_WEBHOOK: it answers 404"), "{text}");
    assert!(!text.contains("very-secret-token"), "{text}");
}

#[test]
fn webhook_that_never_answers_holds_up_no_decision_and_says_what_is_lost() {
    // Accepts connections, and reads nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let (setup, metrics) = with_prometheus(with_rules(RULES));
    let server = with_webhook(setup, &format!("http://{}/", silent.local_addr().unwrap())).start();
    (0..1_100).for_each(|user| ask(&server, &user.to_string()));
    let dropped = || scrape(metrics.number()).count("tollkeeper_level_webhook_requests_total{outcome=\"dropped\"}");
    wait_for("requests that are dropped", || (dropped() >= 90).then_some(()));
    let told = scrape(metrics.number()).count("tollkeeper_reached_levels_total{outcome=\"told\"}");
    assert!(told + dropped() >= 1_100, "{told}");
}

#[test]
fn unusable_webhook_prevents_the_start_and_is_named() {
    for (url, secret, problem) in [
        ("ftp://host/", SECRET, "TOLLKEEPER_NOTIFY_WEBHOOK"),
        ("http:///path", SECRET, "TOLLKEEPER_NOTIFY_WEBHOOK"),
        ("http://host/", "short", "TOLLKEEPER_NOTIFY_WEBHOOK_SECRET"),
    ] {
        let mut check = Command::new(kit::tollkeeper::program_path());
        check.args(["check", "--env"]).env_clear().env("TOLLKEEPER_NOTIFY_WEBHOOK", url);
        let output = check.env("TOLLKEEPER_NOTIFY_WEBHOOK_SECRET", secret).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && text.contains(problem), "{url}: {text}");
        assert!(!text.contains(SECRET), "{text}");
    }
}

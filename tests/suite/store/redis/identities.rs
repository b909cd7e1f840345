//! Logins by identities of clouds: against fake metadata servers, a fake STS and a fake Entra.

use std::collections::HashSet;
use std::fs;
use std::io::Read as _;
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::to_bytes;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::IntoResponse as _;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::json;

use super::faults::load::with_policies;
use kit::http;
use kit::http_server::HttpServer;
use kit::redis::{Server, options};
use kit::scrape::{scrape, with_prometheus};
use kit::tollkeeper::{Setup, Tollkeeper};
use kit::wait_for;

/// A request that a fake service got: method, target, headers in lower case, and body.
#[derive(Clone, Debug)]
struct Asked {
    method: String,
    target: String,
    headers: String,
    body: String,
}

/// Answer of a fake service.
type Answer = (u16, String);

/// A fake metadata or token service on loopback.
struct FakeService {
    server: HttpServer,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl FakeService {
    fn start(answer: impl Fn(&Asked, usize) -> Answer + Send + Sync + 'static) -> Self {
        let asked: Arc<Mutex<Vec<Asked>>> = Arc::default();
        let (recorder, answer) = (Arc::clone(&asked), Arc::new(answer));
        let handle = move |request: Request| {
            let (recorder, answer) = (Arc::clone(&recorder), Arc::clone(&answer));
            async move {
                let (head, body) = request.into_parts();
                let body = to_bytes(body, 1 << 20).await.expect("a body");
                let asked = Asked {
                    method: head.method.to_string(),
                    target: head.uri.path_and_query().expect("a path").to_string(),
                    headers: format!("{:?}", head.headers),
                    body: String::from_utf8(body.to_vec()).expect("a form"),
                };
                let number = {
                    let mut recorder = recorder.lock().expect("no panic");
                    recorder.push(asked.clone());
                    recorder.len()
                };
                let (status, text) = answer(&asked, number);
                (StatusCode::from_u16(status).expect("a status"), text).into_response()
            }
        };
        Self { server: HttpServer::start(0, Router::new().fallback(handle), None), asked }
    }

    fn host(&self) -> String {
        format!("127.0.0.1:{}", self.server.port())
    }

    fn url(&self) -> String {
        format!("http://{}", self.host())
    }

    fn asked(&self) -> Vec<Asked> {
        self.asked.lock().expect("no panic").clone()
    }
}

/// An access token of Entra for an object.
fn entra_token(object: &str) -> String {
    format!("aGVhZA.{}.c2ln", URL_SAFE_NO_PAD.encode(json!({"oid": object}).to_string()))
}

fn oauth(token: &str, expires_in: u64) -> Answer {
    (200, json!({"access_token": token, "expires_in": expires_in, "token_type": "Bearer"}).to_string())
}

/// Ids of the connections of a user.
fn connections(server: &Server, user: &str) -> HashSet<String> {
    let clients: String = server.query(&["CLIENT", "LIST"]);
    let of_user = clients.lines().filter(|line| line.contains(&format!(" user={user} ")));
    of_user.filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect()
}

const BODY: &str = r#"{"domain":"faults","descriptors":[{"entries":[{"key":"deny","value":"a"}]}]}"#;

/// Waits for an answer of Redis: the policy of this rule rejects without it.
fn wait_for_strict_answer(tollkeeper: &Tollkeeper) {
    wait_for("an answer of Redis", || (tollkeeper.post_json(BODY).status == 200).then_some(()));
}

#[test]
fn open_connections_log_in_again_with_each_token_of_entra() {
    let (first, second) = (entra_token("object-a"), entra_token("object-b"));
    let (one, two) = (first.clone(), second.clone());
    let metadata = FakeService::start(move |_, number| if number == 1 { oauth(&one, 20) } else { oauth(&two, 86_000) });
    let rules = |token: &str| format!("on >{token} ~* &* +@all");
    let server = options().user("object-a", &rules(&first)).user("object-b", &rules(&second)).start();
    let tollkeeper = with_policies()
        .env("REDIS_URL", server.address())
        .env("REDIS_POOL_SIZE", "3")
        // A slow machine replaces no connection because a check of it is late.
        .env("TOLLKEEPER_STORE_TIMEOUT", "5s")
        .env("TOLLKEEPER_REDIS_IDENTITY", "azure")
        .env("TOLLKEEPER_AZURE_METADATA_URL", metadata.url())
        .env("AZURE_CLIENT_ID", "client 1")
        .start();
    // Three of the pool, and that of blocked values.
    let before = wait_for("the pool", || Some(connections(&server, "object-a")).filter(|ids| ids.len() >= 4));
    wait_for("the pool to log in again", || {
        (before.intersection(&connections(&server, "object-b")).count() >= 4).then_some(())
    });
    wait_for_strict_answer(&tollkeeper);
    let asked = &metadata.asked()[0];
    let resource = "resource=https%3A%2F%2Fredis.azure.com%2F&client_id=client%201";
    let target = format!("/metadata/identity/oauth2/token?api-version=2018-02-01&{resource}");
    assert_eq!((&*asked.method, &asked.target), ("GET", &target));
    assert!(asked.headers.contains(r#""metadata": "true""#), "{}", asked.headers);
    assert!(!tollkeeper.stderr().contains(&first) && !tollkeeper.stderr().contains(&second));
}

#[test]
fn workload_identity_exchanges_the_token_of_its_file() {
    let directory = tempfile::tempdir().expect("a directory can be made");
    let file = directory.path().join("federated");
    fs::write(&file, "federated.token\n").expect("a file can be written");
    let token = entra_token("object-a");
    let answer = token.clone();
    let entra = FakeService::start(move |_, _| oauth(&answer, 3600));
    // A secret does not travel to a proxy without TLS.
    let proxy = FakeService::start(|_, _| (502, String::new()));
    let server = options().user("object-a", &format!("on >{token} ~* &* +@all")).start();
    let tollkeeper = with_policies()
        .env("REDIS_URL", server.address())
        .env("TOLLKEEPER_REDIS_IDENTITY", "azure")
        .env("AZURE_CLIENT_ID", "client")
        .env("AZURE_TENANT_ID", "tenant")
        .env("AZURE_FEDERATED_TOKEN_FILE", &file)
        .env("AZURE_AUTHORITY_HOST", entra.url())
        .env("HTTP_PROXY", proxy.url())
        .env("ALL_PROXY", proxy.url())
        .start();
    wait_for_strict_answer(&tollkeeper);
    assert_eq!(proxy.asked().len(), 0);
    let asked = &entra.asked()[0];
    assert_eq!((&*asked.method, &*asked.target), ("POST", "/tenant/oauth2/v2.0/token"));
    let expected = "grant_type=client_credentials&client_id=client&scope=https%3A%2F%2Fredis.azure.com%2F.default&\
                    client_assertion_type=urn%3Aietf%3Aparams%3Aoauth%3Aclient-assertion-type%3Ajwt-bearer&\
                    client_assertion=federated.token";
    assert_eq!(asked.body, expected);
}

#[test]
fn failing_source_leaves_the_last_token_and_is_counted() {
    let metadata = FakeService::start(|_, number| match number {
        1 => (503, r#"{"error":"warming_up","access_token":"s3cret-token"}"#.to_owned()),
        2 => oauth("s3cret-token", 3),
        _ => (500, "s3cret-token".to_owned()),
    });
    let server = options().password("s3cret-token").start();
    let setup = with_policies()
        .env("REDIS_URL", server.address())
        .env("TOLLKEEPER_REDIS_IDENTITY", "google")
        .env("GCE_METADATA_HOST", metadata.host());
    let (setup, port) = with_prometheus(setup);
    let tollkeeper = setup.start();
    // The first attempt fails; the process starts and says so.
    wait_for("the failure to be told", || {
        let text = tollkeeper.stderr();
        (text.contains("TOLLKEEPER_REDIS_IDENTITY") && text.contains("answers 503 (warming_up)")).then_some(())
    });
    wait_for_strict_answer(&tollkeeper);
    let label = r#"{setting="TOLLKEEPER_REDIS_IDENTITY"}"#;
    let count = |name: &str| scrape(port.number()).count(&format!("tollkeeper_redis_token_{name}{label}"));
    wait_for("renewals to fail", || (count("failures_total") >= 3).then_some(()));
    assert_eq!(count("renewals_total"), 1);
    assert!(count("not_after_seconds") > 1_700_000_000);
    // The server still accepts the last token, although it has expired by its own word.
    server.query::<()>(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    wait_for_strict_answer(&tollkeeper);
    // Once it does not, the error names both the setting and the reason.
    server.query::<()>(&["CONFIG", "SET", "requirepass", "another"]);
    let _closes_itself_too = server.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no"]);
    wait_for("the reason", || {
        tollkeeper.stderr().contains("look at TOLLKEEPER_REDIS_IDENTITY, whose token is not renewed").then_some(())
    });
    let asked = &metadata.asked()[1];
    assert_eq!(asked.target, "/computeMetadata/v1/instance/service-accounts/default/token");
    assert!(asked.headers.contains(r#""metadata-flavor": "Google""#), "{}", asked.headers);
    let pages = ["/config", "/metrics", "/rlconfig", "/store", "/fleet"];
    let shown = pages.map(|page| http::get(tollkeeper.debug_port(), page).send().text()).join("\n");
    assert!(!tollkeeper.stderr().contains("s3cret") && !shown.contains("s3cret"), "{}", tollkeeper.stderr());
}

/// Accepts a connection, and returns what it says first, up to the signature.
fn read_login(listener: &TcpListener) -> String {
    let (mut connection, _) = listener.accept().expect("a connection");
    connection.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket has a timeout");
    let mut text = String::new();
    let mut buffer = [0; 4096];
    while !text.contains("X-Amz-Signature=") {
        let length = connection.read(&mut buffer).expect("a login");
        assert!(length > 0, "the connection closed: {text}");
        text.push_str(&String::from_utf8_lossy(&buffer[..length]));
    }
    text
}

/// Starts a process that logs in to `listener` as an IAM user.
fn iam_setup(listener: &TcpListener) -> Setup {
    let address = listener.local_addr().expect("it has an address").to_string();
    with_policies()
        .env("REDIS_URL", address)
        .env("REDIS_AWS_IAM_AUTH", "true")
        .env("REDIS_AWS_IAM_CACHE_NAME", "My-Cache")
        .env("REDIS_AWS_IAM_USER_ID", "cache-user")
        .env("AWS_REGION", "eu-west-1")
}

/// JSON of metadata and container credentials.
fn aws_credentials(expiration: &str) -> String {
    let keys = json!({"Code": "Success", "AccessKeyId": "ASIAEXAMPLE", "SecretAccessKey": "s3cret-key",
        "Token": "s3cret/session=", "Expiration": expiration});
    keys.to_string()
}

const FAR: &str = "2099-01-01T00:00:00Z";

/// Asserts that a login has the user, and a token of the credentials above.
fn assert_signed_login(login: &str) {
    let scope = "%2Feu-west-1%2Felasticache%2Faws4_request";
    for part in [
        "\r\nAUTH\r\n",
        "\r\ncache-user\r\n",
        "\r\nmy-cache/?Action=connect&User=cache-user&X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=ASIAEXAMPLE%2F",
        scope,
        "&X-Amz-Expires=900&X-Amz-Security-Token=s3cret%2Fsession%3D&X-Amz-SignedHeaders=host&X-Amz-Signature=",
    ] {
        assert!(login.contains(part), "{part} in {login}");
    }
}

#[test]
fn aws_tokens_are_signed_with_credentials_of_instance_metadata() {
    let metadata = FakeService::start(|asked, _| match &*asked.target {
        "/latest/api/token" if asked.method == "PUT" => (200, "session-1".to_owned()),
        _ if !asked.headers.contains(r#""x-aws-ec2-metadata-token": "session-1""#) => (401, String::new()),
        "/latest/meta-data/iam/security-credentials/" => (200, "role-1\n".to_owned()),
        "/latest/meta-data/iam/security-credentials/role-1" => (200, aws_credentials(FAR)),
        _ => (404, String::new()),
    });
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let tollkeeper = iam_setup(&listener).env("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url()).start_unhealthy();
    assert_signed_login(&read_login(&listener));
    assert!(!tollkeeper.stderr().contains("s3cret"), "{}", tollkeeper.stderr());
}

#[test]
fn aws_tokens_are_signed_with_credentials_of_a_pod() {
    let directory = tempfile::tempdir().expect("a directory can be made");
    let file = directory.path().join("token");
    fs::write(&file, "pod-token\n").expect("a file can be written");
    let agent = FakeService::start(|asked, _| match asked.headers.contains(r#""authorization": "pod-token""#) {
        true => (200, aws_credentials(FAR)),
        false => (401, String::new()),
    });
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let _tollkeeper = iam_setup(&listener)
        .env("AWS_CONTAINER_CREDENTIALS_FULL_URI", format!("{}/v1/credentials", agent.url()))
        .env("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", &file)
        .start_unhealthy();
    assert_signed_login(&read_login(&listener));
    assert_eq!(agent.asked()[0].target, "/v1/credentials");
}

#[test]
fn aws_tokens_are_signed_with_credentials_of_a_web_identity() {
    let directory = tempfile::tempdir().expect("a directory can be made");
    let file = directory.path().join("token");
    fs::write(&file, "web.identity.token").expect("a file can be written");
    let sts = FakeService::start(|_, _| {
        let reply = format!(
            "<AssumeRoleWithWebIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">\n\
             <AssumeRoleWithWebIdentityResult><Credentials><SessionToken>s3cret/session=</SessionToken>\
             <SecretAccessKey>s3cret-key</SecretAccessKey><Expiration>{FAR}</Expiration>\
             <AccessKeyId>ASIAEXAMPLE</AccessKeyId></Credentials></AssumeRoleWithWebIdentityResult>\
             </AssumeRoleWithWebIdentityResponse>"
        );
        (200, reply)
    });
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let _tollkeeper = iam_setup(&listener)
        .env("AWS_WEB_IDENTITY_TOKEN_FILE", &file)
        .env("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/limits")
        .env("AWS_ENDPOINT_URL_STS", sts.url())
        .start_unhealthy();
    assert_signed_login(&read_login(&listener));
    let asked = &sts.asked()[0];
    let expected = "Action=AssumeRoleWithWebIdentity&Version=2011-06-15&\
                    RoleArn=arn%3Aaws%3Aiam%3A%3A123456789012%3Arole%2Flimits&RoleSessionName=tollkeeper&\
                    WebIdentityToken=web.identity.token";
    assert_eq!((&*asked.method, &*asked.body), ("POST", expected));
}

#[test]
fn aws_tokens_of_short_credentials_are_renewed_on_open_connections() {
    let until = |seconds: i64| (jiff::Timestamp::now() + jiff::SignedDuration::from_secs(seconds)).to_string();
    let agent = FakeService::start(move |_, number| match number {
        1 | 2 => (200, aws_credentials(&until(9))),
        3 => (500, r#"{"Code":"InternalError"}"#.to_owned()),
        _ => (200, aws_credentials(FAR)),
    });
    // Any password will do; the token itself is the subject of other tests.
    let server = options().user("cache-user", "on nopass ~* &* +@all").start();
    let setup = with_policies()
        .env("REDIS_URL", server.address())
        .env("REDIS_POOL_SIZE", "3")
        .env("TOLLKEEPER_STORE_TIMEOUT", "5s")
        .env("REDIS_AWS_IAM_AUTH", "true")
        .env("REDIS_AWS_IAM_CACHE_NAME", "my-cache")
        .env("REDIS_AWS_IAM_USER_ID", "cache-user")
        .env("REDIS_AWS_IAM_REGION", "eu-west-1")
        .env("AWS_CONTAINER_CREDENTIALS_FULL_URI", agent.url());
    let (setup, port) = with_prometheus(setup);
    let tollkeeper = setup.start();
    wait_for_strict_answer(&tollkeeper);
    let before = wait_for("the pool", || Some(connections(&server, "cache-user")).filter(|ids| ids.len() >= 4));
    let label = r#"{setting="REDIS_AWS_IAM_AUTH"}"#;
    let count = |name: &str| scrape(port.number()).count(&format!("tollkeeper_redis_token_{name}{label}"));
    wait_for("credentials of a day", || (agent.asked().len() >= 4).then_some(()));
    wait_for("the failure to be counted", || (count("failures_total") == 1).then_some(()));
    wait_for("renewals", || (count("renewals_total") >= 3).then_some(()));
    // AUTH on open connections: more logins than connections.
    wait_for("logins on open connections", || {
        let auth = server.info("cmdstat_auth");
        let logins: u64 = auth.strip_prefix("calls=")?.split(',').next()?.parse().ok()?;
        let made = server.info("total_connections_received").parse::<u64>().expect("a number");
        let kept = before.intersection(&connections(&server, "cache-user")).count();
        (logins > made && kept >= 3).then_some(())
    });
    assert!(!tollkeeper.stderr().contains("s3cret"), "{}", tollkeeper.stderr());
}

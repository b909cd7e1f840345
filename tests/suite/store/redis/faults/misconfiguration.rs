//! Settings that cannot work with the servers they name: one clear log line names the setting and shows no secret, and
//! an outage is never reported as a misconfiguration, or the reverse.

use std::path::Path;

use tempfile::TempDir;

use super::fake_server;
use kit::grpc::Client;
use kit::http;
use kit::redis::certificates::Certificates;
use kit::redis::cluster::Cluster;
use kit::redis::sentinels::{NAME, Sentinels};
use kit::redis::{Server, options};
use kit::scrape::{scrape, with_prometheus};
use kit::tollkeeper::{Tollkeeper, with_rules};
use kit::wait_for;

/// Rules without the policy `error`, so that a process stays ready without its store.
const RULES: &str = "domain: shop
descriptors:
  - {key: user, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: deny}}
  - {key: log, rate_limit: {unit: day, requests_per_unit: 7, on_store_error: deny, algorithm: sliding_window_log}}
";

/// A secret that no output may show.
const SECRETS: [&str; 2] = ["s3cret-right", "s3cret-wrong"];

/// A wrong environment.
struct Case {
    env: Vec<(&'static str, String)>,
    /// Text that the log line contains.
    expected_text: &'static [&'static str],
    misconfigured: bool,
}

fn misconfigured_env(env: &[(&'static str, &str)], expected_text: &'static [&'static str]) -> Case {
    let env = env.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    Case { env, expected_text, misconfigured: true }
}

fn unreachable(env: &[(&'static str, &str)], expected_text: &'static [&'static str]) -> Case {
    Case { misconfigured: false, ..misconfigured_env(env, expected_text) }
}

fn start(env: &[(&'static str, String)]) -> Tollkeeper {
    let setup = with_rules(RULES).env("REDIS_TIMEOUT", "300ms");
    env.iter().fold(setup, |setup, (name, value)| setup.env(name, value)).start()
}

fn page(tollkeeper: &Tollkeeper, path: &str) -> u16 {
    http::get(tollkeeper.http_port(), path).send().status
}

/// Starts a process for each case and checks its log line and pages.
fn assert_reported(cases: Vec<Case>) {
    for Case { env, expected_text, misconfigured } in cases {
        let tollkeeper = start(&env);
        let level = if misconfigured { "level=error" } else { "level=warning" };
        // Lines of clients with other tasks name no setting.
        let parts = expected_text.iter().chain(&["setting="]);
        let is_it = |line: &&str| line.contains(level) && parts.clone().all(|part| line.contains(part));
        let mut patience = 500;
        let line = wait_for("the line to be said", || {
            let log = tollkeeper.stderr();
            patience -= 1;
            assert!(patience > 0, "{env:?}: nothing says {expected_text:?} in\n{log}");
            log.lines().find(is_it).map(str::to_owned)
        });
        // Where the login is at fault, its settings are named.
        let settings = ["setting=REDIS_URL", "setting=\"REDIS_AUTH or", "setting=REDIS_AUTH_FILE"];
        assert!(settings.iter().any(|setting| line.contains(setting)), "{line}");
        println!("{line}");
        let ready = if misconfigured { 503 } else { 200 };
        wait_for(&format!("/readyz to be {ready} under {env:?}"), || {
            (page(&tollkeeper, "/readyz") == ready).then_some(())
        });
        assert_eq!([page(&tollkeeper, "/livez"), page(&tollkeeper, "/healthcheck")], [200, 200], "{env:?}");
        let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"a"}]}]}"#;
        assert_eq!(tollkeeper.post_json(body).status, 429, "{env:?}: answered by policy");
        for secret in SECRETS {
            assert!(!tollkeeper.stderr().contains(secret), "{env:?}: a secret in\n{}", tollkeeper.stderr());
        }
    }
}

#[test]
fn unreachable_server_is_an_outage() {
    let server = options().start();
    let address = server.address();
    server.kill();
    assert_reported(vec![
        unreachable(
            &[("REDIS_URL", "no-such-host.invalid:6379")],
            &["no-such-host.invalid:6379", "failed to lookup address"],
        ),
        unreachable(&[("REDIS_URL", &address)], &["Connection refused"]),
        unreachable(&[("REDIS_URL", &address), ("REDIS_TYPE", "cluster")], &["Connection refused"]),
        unreachable(
            &[("REDIS_URL", &format!("master,{address}")), ("REDIS_TYPE", "sentinel")],
            &["Connection refused"],
        ),
    ]);
}

#[test]
fn rejected_password_is_reported_and_not_shown() {
    let server = options().password(SECRETS[0]).start();
    let address = server.address();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("password");
    std::fs::write(&file, format!("{}\n", SECRETS[1])).unwrap();
    let file = file.to_str().unwrap();
    let url = format!("redis://:{}@{address}", SECRETS[1]);
    assert_reported(vec![
        misconfigured_env(&[("REDIS_URL", &address)], &["NOAUTH", "REDIS_AUTH"]),
        misconfigured_env(
            &[("REDIS_URL", &address), ("REDIS_AUTH", SECRETS[1])],
            &["WRONGPASS", "setting=\"REDIS_AUTH or"],
        ),
        misconfigured_env(
            &[("REDIS_URL", &address), ("REDIS_AUTH", &format!("{}:more", SECRETS[0]))],
            &["WRONGPASS", "what stands before the colon was taken as the user", "`:PASSWORD`"],
        ),
        misconfigured_env(&[("REDIS_URL", &url)], &["WRONGPASS", "REDIS_URL"]),
        misconfigured_env(
            &[("REDIS_URL", &address), ("REDIS_AUTH_FILE", file)],
            &["WRONGPASS", "setting=REDIS_AUTH_FILE"],
        ),
        misconfigured_env(
            &[("REDIS_URL", &address), ("REDIS_AUTH_FILE", "/does/not/exist")],
            &["REDIS_AUTH_FILE", "/does/not/exist", "No such file"],
        ),
    ]);
}

#[test]
fn missing_acl_permission_is_named() {
    let rules = |rest: &str| format!("on >{} ~* {rest}", SECRETS[0]);
    let server = options()
        .user("noeval", &rules("+@all -eval -evalsha"))
        .user("nolist", &rules("+@all -@list"))
        .user("readonly", &rules("-@all +@read +@connection +eval +evalsha"))
        .user("otherkeys", &format!("on >{} ~app:* +@all", SECRETS[0]))
        .user("least", &rules("-@all +eval +evalsha +time +get +set +pexpire +@list"))
        .user("counts", &rules("-@all +ping +incrby +expire +get"))
        .start();
    let address = server.address();
    let auth = |user: &str| format!("{user}:{}", SECRETS[0]);
    let cases = ["noeval", "nolist", "readonly", "otherkeys"].map(|user| {
        misconfigured_env(
            &[("REDIS_URL", &address), ("REDIS_AUTH", &auth(user))],
            &["+eval +evalsha", "`tk1:`", "REDIS_AUTH"],
        )
    });
    assert_reported(cases.into());
    for (user, format) in [("least", "tollkeeper"), ("counts", "ratelimit")] {
        let tollkeeper = start(&[
            ("REDIS_URL", address.clone()),
            ("REDIS_AUTH", auth(user)),
            ("TOLLKEEPER_KEY_FORMAT", format.to_owned()),
        ]);
        let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"b"}]}]}"#;
        wait_for("a strict answer", || (tollkeeper.post_json(body).status == 200).then_some(()));
        assert_eq!(page(&tollkeeper, "/readyz"), 200);
    }
}

#[test]
fn missing_permission_is_named_in_the_words_of_any_version() {
    let redis_6 = format!("127.0.0.1:{}", fake_server::serve(fake_server::redis_6_without_llen));
    let redis_8 = format!("127.0.0.1:{}", fake_server::serve(fake_server::redis_8_without_llen));
    assert_reported(vec![
        misconfigured_env(&[("REDIS_URL", &redis_6)], &["executing the script", "+eval +evalsha", "`tk1:`"]),
        misconfigured_env(&[("REDIS_URL", &redis_8)], &["'llen'", "+eval +evalsha", "`tk1:`"]),
    ]);
}

#[test]
fn tls_mismatch_is_reported() {
    let directory = TempDir::new().unwrap();
    let certificates = Certificates::new(directory.path());
    let server = options().tls(&certificates).with(&[("tls-auth-clients", "yes")]).start();
    let open = options().tls(&certificates).start();
    // A node whose certificate has only a name announces its address.
    certificates.issue_server_for("server", &["localhost"]);
    let node =
        options().cluster().tls(&certificates).with(&[("cluster-announce-ip", "127.0.0.1"), ("tls-cluster", "yes")]);
    let node = node.start();
    node.query::<()>(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    let node_url = format!("rediss://localhost:{}", node.tls_port());
    let path = |name: &str| certificates.path(name).to_str().unwrap().to_owned();
    let ca = path("ca.crt");
    let tls = |server: &Server| format!("rediss://127.0.0.1:{}", server.tls_port());
    assert_reported(
        vec![
            misconfigured_env(
                &[("REDIS_URL", &tls(&open)), ("REDIS_TLS_CACERT", &path("other_ca.crt"))],
                &["REDIS_TLS_CACERT", "UnknownIssuer"],
            ),
            misconfigured_env(&[("REDIS_URL", &tls(&open))], &["REDIS_TLS_CACERT", "UnknownIssuer"]),
            misconfigured_env(
                &[("REDIS_URL", &node_url), ("REDIS_TYPE", "cluster"), ("REDIS_TLS_CACERT", &ca)],
                &["the cluster announces 127.0.0.1:", "cluster-announce-hostname", "cluster-preferred-endpoint-type"],
            ),
            misconfigured_env(
                &[("REDIS_URL", &format!("rediss://127.0.0.2:{}", open.tls_port())), ("REDIS_TLS_CACERT", &ca)],
                // The server listens on 127.0.0.1 only, so connecting fails before any certificate is checked.
                &["Connection refused"],
            ),
            misconfigured_env(
                &[("REDIS_URL", &tls(&open)), ("REDIS_TLS_CACERT", &path("server.key"))],
                &["REDIS_TLS_CACERT=", "no certificate in it"],
            ),
            misconfigured_env(
                &[
                    ("REDIS_URL", &tls(&server)),
                    ("REDIS_TLS_CACERT", &ca),
                    ("REDIS_TLS_CLIENT_CERT", &path("client.crt")),
                    ("REDIS_TLS_CLIENT_KEY", &path("server.key")),
                ],
                &["REDIS_TLS_CLIENT_KEY=", "not the key of REDIS_TLS_CLIENT_CERT; give the pair"],
            ),
            misconfigured_env(&[("REDIS_URL", &tls(&server)), ("REDIS_TLS_CACERT", &ca)], &["REDIS_TLS_CLIENT_CERT"]),
            misconfigured_env(
                &[("REDIS_URL", &format!("rediss://{}", open.address())), ("REDIS_TLS_CACERT", &ca)],
                &["speaks no TLS", "REDIS_TLS"],
            ),
            misconfigured_env(
                &[("REDIS_URL", &format!("127.0.0.1:{}", open.tls_port()))],
                &["speaks TLS", "REDIS_TLS=true"],
            ),
        ]
        .into_iter()
        .map(|case| Case { misconfigured: !case.expected_text.contains(&"Connection refused"), ..case })
        .collect(),
    );
}

#[test]
fn wrong_deployment_type_is_reported() {
    let (single, cluster) = (options().start(), Cluster::start());
    let sentinels = Sentinels::start_with(&options(), &options());
    let (single, node, sentinel) = (single.address(), cluster.node(0).address(), sentinels.sentinel(0).address());
    assert_reported(vec![
        misconfigured_env(&[("REDIS_URL", &node)], &["node of a cluster", "REDIS_TYPE=cluster"]),
        misconfigured_env(&[("REDIS_URL", &cluster.node(4).address())], &["node of a cluster", "REDIS_TYPE=cluster"]),
        misconfigured_env(&[("REDIS_URL", &sentinel)], &["sentinel", "REDIS_TYPE=sentinel"]),
        misconfigured_env(
            &[("REDIS_URL", &single), ("REDIS_TYPE", "cluster")],
            &["cluster support disabled", "REDIS_TYPE=cluster"],
        ),
        misconfigured_env(&[("REDIS_URL", &sentinel), ("REDIS_TYPE", "cluster")], &["is it a node of a cluster"]),
        misconfigured_env(
            &[("REDIS_URL", &format!("{NAME},{single}")), ("REDIS_TYPE", "sentinel")],
            &["is it a sentinel"],
        ),
        misconfigured_env(
            &[("REDIS_URL", &format!("elsewhere,{sentinel}")), ("REDIS_TYPE", "sentinel")],
            &["knows no master `elsewhere`", "first word of the URL"],
        ),
    ]);
}

#[test]
fn too_old_server_is_reported_with_the_required_version() {
    let address = format!("127.0.0.1:{}", fake_server::serve(fake_server::redis_4));
    assert_reported(vec![misconfigured_env(&[("REDIS_URL", &address)], &["too old", "5.0", "time"])]);
}

#[test]
fn health_reports_outages_as_configured() {
    let server = options().start();
    for needs_connection in ["true", "false"] {
        let env =
            [("REDIS_URL", server.address()), ("REDIS_HEALTH_CHECK_ACTIVE_CONNECTION", needs_connection.to_owned())];
        let tollkeeper = start(&env);
        let client = Client::connect(tollkeeper.grpc_port());
        let states = || {
            let serves = client.is_serving("").expect("health is asked");
            let [health, ready, live] = ["/healthcheck", "/readyz", "/livez"].map(|path| page(&tollkeeper, path));
            (serves, health, ready, live)
        };
        let well = (true, 200, 200, 200);
        let lost = if needs_connection == "true" { (false, 500, 503, 200) } else { well };
        wait_for("all to be well", || (states() == well).then_some(()));
        server.kill();
        wait_for("the loss to be told", || {
            let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"a"}]}]}"#;
            let rejected = tollkeeper.post_json(body).status == 429;
            (rejected && states() == lost).then_some(())
        });
        server.restart();
        wait_for("all to be well again", || (states() == well).then_some(()));
    }
}

#[test]
fn password_may_contain_any_character() {
    for password in ["two words", "quo\"te", "it's", "back\\slash", "näßlich", "a:b@c/d?e#f%20,{}"] {
        let server = options().start();
        server.query::<()>(&["CONFIG", "SET", "requirepass", password]);
        let tollkeeper = start(&[("REDIS_URL", server.address()), ("REDIS_AUTH", format!("default:{password}"))]);
        let body = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"b"}]}]}"#;
        wait_for(&format!("a strict answer with {password:?}"), || {
            (tollkeeper.post_json(body).status == 200).then_some(())
        });
    }
}

/// Replaces a file atomically.
pub(super) fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).expect("a file can be written");
    std::fs::rename(new, path).expect("a file can be renamed");
}

#[test]
fn server_that_may_evict_keys_is_warned_of_once() {
    for (policy, warnings) in [("allkeys-lru", 1), ("noeviction", 0)] {
        let server = options().with(&[("maxmemory-policy", policy)]).start();
        let setup = with_rules(RULES).env("REDIS_URL", server.address()).env("REDIS_POOL_SIZE", "3");
        let (setup, prometheus) = with_prometheus(setup);
        let tollkeeper = setup.start();
        // A connection is counted after the warning.
        let connections = || scrape(prometheus.number()).count("ratelimit_redis_pool_cx_active");
        wait_for("all connections", || (connections() == 3).then_some(()));
        let log = tollkeeper.stderr();
        assert_eq!(log.matches("redis may evict keys when its memory is full").count(), warnings, "{policy}: {log}");
    }
}

/// A Redis that freezes, ends and comes back needs nobody: no line about it is an error.
#[test]
fn failures_that_pass_by_themselves_are_warnings() {
    let redis = options().start();
    let tollkeeper = start(&[("REDIS_URL", redis.address()), ("REDIS_SOCKET_TYPE", "tcp".to_owned())]);
    let charge =
        || tollkeeper.post_json(r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"a"}]}]}"#);
    let wait_for_line = |text: &str| {
        wait_for(text, || {
            charge();
            tollkeeper.stderr().contains(text).then_some(())
        });
    };
    // Before that, the policy of the rule rejects.
    wait_for("a charge in redis", || (charge().status == 200).then_some(()));
    redis.freeze();
    wait_for_line("redis fails");
    redis.thaw();
    wait_for_line("redis serves again");
    redis.kill();
    wait_for_line("cannot use redis");
    redis.restart();
    wait_for_line("connected to redis again");
    let log = tollkeeper.stderr();
    assert!(!log.contains("level=error"), "{log}");
}

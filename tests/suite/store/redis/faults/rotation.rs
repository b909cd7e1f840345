//! Credentials and certificates that change while the process runs.

use std::collections::HashSet;
use std::fs;

use super::load::{Load, with_policies};
use super::misconfiguration::replace;
use super::{CALLS_PER_FAULT, wait_for_place};
use kit::redis::certificates::Certificates;
use kit::redis::options;
use kit::wait_for;

#[test]
fn changed_password_file_is_reread() {
    let _place = wait_for_place();
    let directory = tempfile::tempdir().expect("a directory can be made");
    let file = directory.path().join("password");
    replace(&file, "1st-word\n");
    let server = options().password("1st-word").user("app", "on >one ~* &* +@all").start();
    let setup = with_policies().env("REDIS_URL", server.address()).env("REDIS_AUTH_FILE", &file);
    let tollkeeper = setup.start();
    let load = Load::strict_on(&tollkeeper);

    let kill = |user: &str| server.query::<()>(&["CLIENT", "KILL", "USER", user]);
    let changed = load.run_fault("single: password changed, the file late", |load| {
        server.query::<()>(&["CONFIG", "SET", "requirepass", "2nd-word"]);
        kill("default");
        load.wait_for_calls(CALLS_PER_FAULT);
        replace(&file, "2nd-word\n");
    });
    changed.expect_contract().expect_by_policy();
    // Changing the file before the server does no harm: old connections stay until new ones are accepted.
    let rotated = load.run_fault("single: password changed, the file first", |load| {
        replace(&file, "3rd-word\n");
        wait_for("the new password to be rejected", || {
            (tollkeeper.stderr().matches("WRONGPASS").count() >= 2).then_some(())
        });
        load.wait_for_calls(CALLS_PER_FAULT);
        server.query::<()>(&["CONFIG", "SET", "requirepass", "3rd-word"]);
        load.wait_for_calls(2 * CALLS_PER_FAULT);
        kill("default");
    });
    rotated.expect_contract().expect_strict(90.0, |_| true);
    let other = load.run_fault("single: another ACL user", |load| {
        replace(&file, "app:one");
        wait_for("the other user to connect", || {
            let clients: String = server.query(&["CLIENT", "LIST"]);
            clients.contains("user=app").then_some(())
        });
        load.wait_for_calls(CALLS_PER_FAULT);
    });
    other.expect_contract().expect_strict(90.0, |_| true);
    let locked = load.run_fault("single: ACL user's password changed", |load| {
        server.query::<()>(&["ACL", "SETUSER", "app", "resetpass", ">4th-word"]);
        kill("app");
        load.wait_for_calls(CALLS_PER_FAULT);
        replace(&file, "app:4th-word");
    });
    locked.expect_contract().expect_by_policy();
    let forbidden = load.run_fault("single: scripts forbidden to the user", |load| {
        server.query::<()>(&["ACL", "SETUSER", "app", "-eval", "-evalsha"]);
        load.wait_for_calls(CALLS_PER_FAULT);
        server.query::<()>(&["ACL", "SETUSER", "app", "+eval", "+evalsha"]);
    });
    forbidden.expect_contract().expect_by_policy();
    // Words that no message has: `network` has `two`.
    for secret in ["1st-word", "2nd-word", "3rd-word", "4th-word"] {
        assert!(!tollkeeper.stderr().contains(secret), "{}", tollkeeper.stderr());
    }
}

#[test]
fn open_connections_log_in_again_when_the_file_changes() {
    let _place = wait_for_place();
    let directory = tempfile::tempdir().expect("a directory can be made");
    let file = directory.path().join("token");
    replace(&file, "app:one");
    let server = options().user("app", "on >one ~* &* +@all").user("next", "on >two ~* &* +@all").start();
    let setup = with_policies().env("REDIS_URL", server.address()).env("REDIS_AUTH_FILE", &file);
    // A connection whose answer a busy machine delays would be replaced.
    let tollkeeper = setup.env("REDIS_POOL_SIZE", "3").env("TOLLKEEPER_STORE_TIMEOUT", "1s").start();
    let load = Load::strict_on(&tollkeeper);
    let connections = |user: &str| -> HashSet<String> {
        let clients: String = server.query(&["CLIENT", "LIST"]);
        let of_user = clients.lines().filter(|line| line.contains(&format!(" user={user} ")));
        of_user.filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect()
    };
    let before = wait_for("the pool", || Some(connections("app")).filter(|ids| ids.len() >= 3));
    let mut pool = HashSet::new();
    let renewed = load.run_fault("single: another token, the old user gone, then a wrong token", |load| {
        replace(&file, "next:two");
        // Connections of other tasks are replaced when they close.
        pool = wait_for("the pool to log in again", || {
            let kept: HashSet<String> = before.intersection(&connections("next")).cloned().collect();
            (kept.len() >= 3).then_some(kept)
        });
        // Redis closes the connections of a user that it deletes.
        server.query::<()>(&["ACL", "DELUSER", "app"]);
        load.wait_for_calls(CALLS_PER_FAULT);
        replace(&file, "next:wrong");
        wait_for("the wrong token to be rejected", || tollkeeper.stderr().contains("WRONGPASS").then_some(()));
        load.wait_for_calls(CALLS_PER_FAULT);
        assert!(pool.is_subset(&connections("next")), "{pool:?} {:?}", connections("next"));
    });
    renewed.expect_contract().expect_strict(100.0, |_| true);
}

#[test]
fn changed_certificates_are_used_for_new_connections() {
    let directory = tempfile::tempdir().expect("a directory can be made");
    let certificates = Certificates::new(directory.path());
    let server = options().tls(&certificates).with(&[("tls-auth-clients", "yes")]).start();
    let path = |name: &str| certificates.path(name);
    let (cert, key) = (directory.path().join("used.crt"), directory.path().join("used.key"));
    let give = |name: &str| {
        let read = |end: &str| fs::read_to_string(path(&format!("{name}.{end}"))).expect("it is there");
        replace(&cert, &read("crt"));
        replace(&key, &read("key"));
    };
    give("client");
    let tollkeeper = with_policies()
        .env("REDIS_URL", format!("rediss://127.0.0.1:{}", server.tls_port()))
        .env("REDIS_TLS_CACERT", path("ca.crt"))
        .env("REDIS_TLS_CLIENT_CERT", &cert)
        .env("REDIS_TLS_CLIENT_KEY", &key)
        .start();
    let body = r#"{"domain":"faults","descriptors":[{"entries":[{"key":"deny","value":"a"}]}]}"#;
    let strict = || (tollkeeper.post_json(body).status == 200).then_some(());
    wait_for("a strict answer", strict);
    // One connection is for charges, another for blocked values.
    let connected = || -> HashSet<String> {
        let clients: String = server.query(&["CLIENT", "LIST"]);
        let port = server.tls_port().to_string();
        let lines = clients.lines().filter(|line| line.contains(&format!("laddr=127.0.0.1:{port}")));
        lines
            .filter_map(|line| line.split_whitespace().find(|word| word.starts_with("id=")))
            .map(str::to_owned)
            .collect()
    };
    let first = wait_for("two connections", || Some(connected()).filter(|connections| connections.len() == 2));

    // A key that does not match the certificate is logged, and the old connections stay.
    replace(&key, &fs::read_to_string(path("server.key")).expect("it is there"));
    wait_for("it to be said", || tollkeeper.stderr().contains("REDIS_TLS_CLIENT_KEY").then_some(()));
    assert_eq!((connected(), tollkeeper.post_json(body).status), (first.clone(), 200));

    certificates.issue_server("client");
    give("client");
    wait_for("both connections to be replaced", || {
        let now = connected();
        (now.len() == 2 && now.is_disjoint(&first)).then_some(())
    });
    wait_for("a strict answer", strict);
    assert_eq!(tollkeeper.healthcheck(), 200);
}

//! TLS to memcached.

use std::path::PathBuf;

use tonic::Code;

use super::{call, client_of, counting_in};
use kit::grpc::Client;
use kit::memcached::{Memcached, memcached};
use kit::redis::certificates::Certificates;
use kit::tollkeeper::Setup;
use kit::wait_for;

fn over_tls(address: &str, ca: PathBuf) -> Setup {
    counting_in(address).env("MEMCACHE_TLS", "true").env("MEMCACHE_TLS_CACERT", ca)
}

fn with_certificate(setup: Setup, certificates: &Certificates) -> Setup {
    setup
        .env("MEMCACHE_TLS_CLIENT_CERT", certificates.path("client.crt"))
        .env("MEMCACHE_TLS_CLIENT_KEY", certificates.path("client.key"))
}

fn assert_counts(setup: Setup, server: &Memcached) {
    server.command("flush_all", "OK");
    let tollkeeper = setup.start();
    assert_eq!(call(&client_of(&tollkeeper), "user", "ann"), Ok((true, 2)));
}

/// Expects that nothing is counted, and that one line of the log has these texts.
fn assert_refused(setup: Setup, expected: &[&str]) {
    let tollkeeper = setup.env("TOLLKEEPER_STORE_TIMEOUT", "100ms").start();
    let client = Client::connect(tollkeeper.grpc_port());
    assert_eq!(call(&client, "user", "ann"), Err(Code::Unavailable));
    wait_for(&format!("a line with {expected:?}"), || {
        let log = tollkeeper.stderr();
        log.lines().any(|line| expected.iter().all(|text| line.contains(text))).then_some(())
    });
    assert_eq!(call(&client, "user", "ann"), Err(Code::Unavailable));
}

#[test]
fn server_with_a_certificate_of_a_trusted_authority_counts() {
    let files = tempfile::tempdir().expect("a temporary directory can be made");
    let certificates = Certificates::new(files.path());
    let (ca, other_ca) = (certificates.path("ca.crt"), certificates.path("other_ca.crt"));
    let server = memcached().tls(&certificates, false).start();
    assert_counts(over_tls(&server.address(), ca.clone()), &server);
    assert_counts(over_tls(&format!("localhost:{}", server.port()), ca.clone()), &server);
    assert_refused(over_tls(&server.address(), other_ca), &["MEMCACHE_TLS_CACERT", "UnknownIssuer"]);
    // The certificate is for localhost and 127.0.0.1.
    let other_name = format!("127.0.0.2:{}", server.port());
    let skip = |setup: Setup| setup.env("MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION", "true");
    assert_refused(over_tls(&other_name, ca.clone()), &["MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION"]);
    assert_counts(skip(over_tls(&other_name, ca)), &server);
    // Only the name is skipped.
    let other_ca = certificates.path("other_ca.crt");
    assert_refused(skip(over_tls(&other_name, other_ca)), &["MEMCACHE_TLS_CACERT", "UnknownIssuer"]);
}

#[test]
fn server_that_requires_a_client_certificate_gets_it() {
    let files = tempfile::tempdir().expect("a temporary directory can be made");
    let certificates = Certificates::new(files.path());
    let ca = certificates.path("ca.crt");
    let server = memcached().tls(&certificates, true).start();
    assert_counts(with_certificate(over_tls(&server.address(), ca.clone()), &certificates), &server);
    assert_refused(over_tls(&server.address(), ca), &["MEMCACHE_TLS_CLIENT_CERT"]);
}

#[test]
fn plaintext_and_tls_that_meet_are_reported() {
    let files = tempfile::tempdir().expect("a temporary directory can be made");
    let certificates = Certificates::new(files.path());
    let (plain, tls) = (memcached().start(), memcached().tls(&certificates, false).start());
    let ca = certificates.path("ca.crt");
    assert_refused(over_tls(&plain.address(), ca), &["does the server speak TLS?", "unset MEMCACHE_TLS"]);
    assert_refused(counting_in(&tls.address()), &["speaks TLS", "MEMCACHE_TLS=true"]);
}

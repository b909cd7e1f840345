//! TLS settings of the listeners, and limits on clients: combinations that are complete, and rejected ones.

use std::path::Path;
use std::time::Duration;

use tollkeeper::settings::client_limits::ClientLimits;
use tollkeeper::settings::pem::PemFile;
use tollkeeper::settings::tls::RequiredSan;

use super::{notices, problems, read};

const GRPC: [(&str, &str); 3] =
    [("GRPC_SERVER_USE_TLS", "true"), ("GRPC_SERVER_TLS_CERT", "/tls.crt"), ("GRPC_SERVER_TLS_KEY", "/keys/tls.key")];

#[test]
fn listeners_use_tls_if_configured() {
    let listeners = read(&[]).listeners;
    assert_eq!((listeners.grpc_tls, listeners.http_tls), (None, None));
    let more = [("GRPC_CLIENT_TLS_CACERT", "/ca.crt"), ("GRPC_CLIENT_TLS_SAN", "envoy.example")];
    let listeners = read(&[&GRPC[..], &more].concat()).listeners;
    let tls = listeners.grpc_tls.unwrap();
    assert_eq!(tls.certificate, PemFile { setting: "GRPC_SERVER_TLS_CERT", path: "/tls.crt".into() });
    assert_eq!(tls.key, PemFile { setting: "GRPC_SERVER_TLS_KEY", path: "/keys/tls.key".into() });
    let clients = tls.clients.unwrap();
    assert_eq!(clients.authorities.path, Path::new("/ca.crt"));
    let san = RequiredSan { setting: "GRPC_CLIENT_TLS_SAN", name: "envoy.example".to_owned() };
    assert_eq!(clients.san, Some(san));
    assert_eq!(listeners.http_tls, None);
    let http = [("TOLLKEEPER_HTTP_TLS_CERT", "/a"), ("TOLLKEEPER_HTTP_TLS_KEY", "/b")];
    let tls = read(&http).listeners.http_tls.unwrap();
    assert_eq!((tls.key.path.as_path(), tls.clients), (Path::new("/b"), None));
}

#[test]
fn incomplete_tls_settings_stop_the_start_and_name_the_missing_one() {
    let with = |more: &[(&'static str, &'static str)]| [&GRPC[..1], more].concat();
    let (certificate, key) = (GRPC[1], GRPC[2]);
    for (vars, expected) in [
        (
            with(&[]),
            "GRPC_SERVER_USE_TLS=true: there is no certificate to serve with; give GRPC_SERVER_TLS_CERT and GRPC_SERVER_TLS_KEY",
        ),
        (with(&[certificate]), "GRPC_SERVER_TLS_CERT=/tls.crt: set without GRPC_SERVER_TLS_KEY; give both or none"),
        (with(&[key]), "GRPC_SERVER_TLS_KEY=/keys/tls.key: set without GRPC_SERVER_TLS_CERT; give both or none"),
        (
            with(&[certificate, key, ("GRPC_CLIENT_TLS_SAN", "a.b")]),
            "GRPC_CLIENT_TLS_SAN=a.b: clients are not required to present a certificate; give GRPC_CLIENT_TLS_CACERT, the CA that signed it",
        ),
        (
            with(&[certificate, key, ("GRPC_CLIENT_TLS_CACERT", "/ca"), ("GRPC_CLIENT_TLS_SAN", "*.b")]),
            "GRPC_CLIENT_TLS_SAN=*.b: not a name that a certificate can hold; give one DNS name, without a wildcard",
        ),
        (
            vec![("GRPC_CLIENT_TLS_CACERT", "/ca")],
            "GRPC_CLIENT_TLS_CACERT=/ca: without TLS clients present no certificate; set GRPC_SERVER_USE_TLS=true, or unset it to accept every client",
        ),
        (
            vec![("GRPC_CLIENT_TLS_SAN", "a.b")],
            "GRPC_CLIENT_TLS_SAN=a.b: without TLS clients present no certificate; set GRPC_SERVER_USE_TLS=true, or unset it to accept every client",
        ),
        (
            vec![("TOLLKEEPER_HTTP_TLS_CERT", "/a")],
            "TOLLKEEPER_HTTP_TLS_CERT=/a: set without TOLLKEEPER_HTTP_TLS_KEY; give both or none",
        ),
        (
            vec![("TOLLKEEPER_HTTP_TLS_CLIENT_CACERT", "/a")],
            "TOLLKEEPER_HTTP_TLS_CLIENT_CACERT=/a: without TLS clients present no certificate; give TOLLKEEPER_HTTP_TLS_CERT and TOLLKEEPER_HTTP_TLS_KEY, or unset it to accept every client",
        ),
    ] {
        assert_eq!(problems(&vars), [expected]);
    }
    // Envoy Gateway names the files even if TLS is off.
    let idle = notices(&GRPC[1..]);
    assert_eq!(idle.len(), 2, "{idle:?}");
    assert!(idle.iter().all(|notice| notice.ends_with("it is only read with GRPC_SERVER_USE_TLS=true")), "{idle:?}");
}

#[test]
fn client_limits_have_defaults_and_zero_disables() {
    let seconds = Duration::from_secs;
    let defaults = ClientLimits {
        connections: Some(10_000),
        connections_per_address: Some(2000),
        requests: Some(65_536),
        requests_per_address: Some(16_384),
        buffered_bytes: Some(128 << 20),
        buffered_bytes_per_address: Some(32 << 20),
        buffered_bytes_per_connection: Some(16 << 20),
        descriptors: 10_000,
        head_timeout: seconds(60),
        idle_timeout: Some(seconds(3600)),
    };
    assert_eq!(read(&[]).client_limits, defaults);
    let none = read(&[
        ("TOLLKEEPER_MAX_CONNECTIONS", "0"),
        ("TOLLKEEPER_MAX_CONCURRENT_REQUESTS", "0"),
        ("TOLLKEEPER_MAX_BUFFERED_BYTES", "0"),
        ("TOLLKEEPER_MAX_DESCRIPTORS", "7"),
        ("TOLLKEEPER_HEAD_TIMEOUT", "5s"),
        ("TOLLKEEPER_IDLE_TIMEOUT", "0"),
    ]);
    let expected = ClientLimits {
        connections: None,
        connections_per_address: None,
        requests: None,
        requests_per_address: None,
        buffered_bytes: None,
        buffered_bytes_per_address: None,
        buffered_bytes_per_connection: None,
        descriptors: 7,
        head_timeout: seconds(5),
        idle_timeout: None,
    };
    assert_eq!(none.client_limits, expected);
    // A part is at least one, or a message.
    let small = read(&[
        ("TOLLKEEPER_MAX_CONNECTIONS", "3"),
        ("TOLLKEEPER_MAX_CONCURRENT_REQUESTS", "9"),
        ("TOLLKEEPER_MAX_BUFFERED_BYTES", "20MiB"),
    ]);
    let small = small.client_limits;
    assert_eq!((small.connections_per_address, small.requests_per_address), (Some(1), Some(2)));
    let bytes = [small.buffered_bytes, small.buffered_bytes_per_address, small.buffered_bytes_per_connection];
    assert_eq!(bytes, [Some(20 << 20), Some(5 << 20), Some(4 << 20)]);
    assert_eq!(problems(&[("TOLLKEEPER_MAX_CONNECTIONS", "-1")]).len(), 1);
}

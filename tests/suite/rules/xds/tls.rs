//! TLS to the control plane, with certificates as Envoy Gateway makes them: RSA keys in PKCS#1, leaves without
//! extendedKeyUsage and basicConstraints, all replaced together.

use std::fs;
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_RSA_SHA256};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{PrivatePkcs1KeyDer, PrivatePkcs8KeyDer};

use super::{client_of, limit, stream_status};
use kit::tollkeeper::Setup;
use kit::wait_for;
use kit::xds_server::{ServerTls, XdsServer, daily, resource};

/// A key for tests only, in PKCS#1.
const RSA_KEY: &str = include_str!("rsa.key");

/// The key, in PKCS#8 as the library that signs wants it.
pub(super) fn rsa_key() -> KeyPair {
    let pkcs1 = PrivatePkcs1KeyDer::from_pem_slice(RSA_KEY.as_bytes()).unwrap();
    let pkcs1 = pkcs1.secret_pkcs1_der();
    // INTEGER 0, the algorithm rsaEncryption, OCTET STRING.
    let algorithm = [2, 1, 0, 0x30, 0x0d, 6, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 1, 5, 0];
    let sized = |tag: u8, content: &[u8]| {
        let [high, low] = u16::try_from(content.len()).unwrap().to_be_bytes();
        [&[tag, 0x82, high, low], content].concat()
    };
    let pkcs8 = sized(0x30, &[&algorithm[..], &sized(4, pkcs1)].concat());
    KeyPair::from_pkcs8_der_and_sign_algo(&PrivatePkcs8KeyDer::from(pkcs8), &PKCS_RSA_SHA256).unwrap()
}

/// Writes `ca.crt`, `server.crt`, `server.key`, `client.crt` and `client.key`, for a server of these names.
pub(super) fn issue(directory: &Path, authority: KeyPair, names: &[&str]) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, "envoy-gateway");
    params.key_usages.push(KeyUsagePurpose::KeyCertSign);
    let ca = params.self_signed(&authority).unwrap();
    let issuer = Issuer::new(params, authority);
    let write = |name: &str, text: &str| {
        let next = directory.join("next");
        fs::write(&next, text).unwrap();
        fs::rename(next, directory.join(name)).unwrap();
    };
    for (leaf, names) in [("server", names), ("client", &["*.envoy-gateway-system"])] {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name.push(DnType::CommonName, "*");
        params.key_usages.extend([KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment]);
        write(&format!("{leaf}.crt"), &params.signed_by(&rsa_key(), &issuer).unwrap().pem());
        write(&format!("{leaf}.key"), RSA_KEY);
    }
    write("ca.crt", &ca.pem());
}

fn tls_client_of(server: &XdsServer, directory: &Path) -> Setup {
    client_of(server)
        .env("CONFIG_GRPC_XDS_SERVER_URL", format!("localhost:{}", server.port()))
        .env("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true")
        .env("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", directory.join("client.crt"))
        .env("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", directory.join("client.key"))
        .env("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", directory.join("ca.crt"))
}

pub(super) fn start(directory: &Path) -> XdsServer {
    XdsServer::start_tls(ServerTls { directory: directory.to_owned() })
}

#[test]
fn certificates_of_envoy_gateway_work_and_are_read_for_every_connection() {
    let directory = tempfile::tempdir().unwrap();
    issue(directory.path(), rsa_key(), &["localhost"]);
    let server = start(directory.path());
    let tollkeeper = tls_client_of(&server, directory.path()).start();
    server.send(0, "1", "a", vec![resource(&daily("shop", &[("user", 1)]))]);
    server.request(0, 1);
    assert_eq!(limit(&tollkeeper, "shop", "user"), Some(1));

    // Another authority, another key of it, other certificates.
    issue(directory.path(), KeyPair::generate().unwrap(), &["localhost"]);
    server.end(0);
    server.send(1, "1", "a", vec![resource(&daily("shop", &[("user", 2)]))]);
    server.request(1, 1);
    assert_eq!(limit(&tollkeeper, "shop", "user"), Some(2));
}

#[test]
fn name_of_the_server_is_checked() {
    let directory = tempfile::tempdir().unwrap();
    issue(directory.path(), rsa_key(), &["envoy-gateway"]);
    let server = start(directory.path());
    let tollkeeper = tls_client_of(&server, directory.path()).start();
    let error = wait_for("the error", || stream_status(&tollkeeper)["stream_error"].as_str().map(str::to_owned));
    assert!(error.contains("TLS handshake failed") && error.contains("name"), "{error}");
    assert_eq!(server.streams(), 0);
    let by_san =
        tls_client_of(&server, directory.path()).env("CONFIG_GRPC_XDS_SERVER_TLS_SAN", "envoy-gateway").start();
    server.request(0, 0);
    assert_eq!(stream_status(&by_san)["server"], format!("localhost:{}", server.port()));
}

#[test]
fn unreadable_certificate_keeps_the_process_up_and_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    issue(directory.path(), rsa_key(), &["localhost"]);
    let server = start(directory.path());
    let away = directory.path().join("away.key");
    let key = directory.path().join("client.key");
    fs::rename(&key, &away).unwrap();
    let tollkeeper = tls_client_of(&server, directory.path()).start();
    let error = wait_for("the error", || stream_status(&tollkeeper)["stream_error"].as_str().map(str::to_owned));
    assert!(error.starts_with("CONFIG_GRPC_XDS_CLIENT_TLS_KEY="), "{error}");
    fs::rename(&away, &key).unwrap();
    server.request(0, 0);
}

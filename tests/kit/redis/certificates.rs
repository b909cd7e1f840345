//! Certificates for TLS, made for one test: an authority, certificates signed by it, and an unrelated authority.
//!
//! Server certificates are for `localhost` and 127.0.0.1 only, so that another name for the same machine fails.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::KeyUsagePurpose;
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType};

/// A directory with `ca.crt`, `server.crt`, `server.key`, `client.crt`, `client.key` and `other_ca.crt`, all PEM.
#[derive(Debug)]
pub struct Certificates {
    directory: PathBuf,
    authority: Issuer<'static, KeyPair>,
}

impl Certificates {
    /// Makes all of them in `directory`.
    pub fn new(directory: &Path) -> Self {
        let (certificate, authority) = new_authority("tollkeeper test authority");
        let certificates = Self { directory: directory.to_owned(), authority };
        certificates.write("ca.crt", &certificate);
        certificates.write("other_ca.crt", &new_authority("another test authority").0);
        certificates.issue_server("server");
        certificates.issue("client", &[], &[ExtendedKeyUsagePurpose::ClientAuth]);
        certificates
    }

    /// The path of a file, such as `ca.crt`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Makes a new key and certificate for a server, `NAME.crt` and `NAME.key`, in place of any of that name.
    pub fn issue_server(&self, name: &str) {
        self.issue_server_for(name, &["localhost", "127.0.0.1"]);
    }

    /// Makes a new key and certificate for a server of these names, as [`Certificates::issue_server`] does.
    pub fn issue_server_for(&self, name: &str, hosts: &[&str]) {
        // Servers of a cluster are clients of each other.
        let usages = [ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        self.issue(name, hosts, &usages);
    }

    /// Makes a new key and certificate for a server that was valid until 2020.
    pub fn issue_expired_server(&self, name: &str) {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).expect("it is a name");
        params.not_before = rcgen::date_time_ymd(2019, 1, 1);
        params.not_after = rcgen::date_time_ymd(2020, 1, 1);
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().expect("a key can be made");
        let certificate = params.signed_by(&key, &self.authority).expect("a certificate can be signed");
        self.write(&format!("{name}.crt"), &certificate.pem());
        self.write(&format!("{name}.key"), &key.serialize_pem());
    }

    /// Makes a new key and certificate for a client of these names, `NAME.crt` and `NAME.key`.
    pub fn issue_client(&self, name: &str, hosts: &[&str]) {
        self.issue(name, hosts, &[ExtendedKeyUsagePurpose::ClientAuth]);
    }

    /// Makes a new key and certificate for a client that is named by a URI.
    pub fn issue_client_with_uri(&self, name: &str, uri: &str) {
        let mut params = CertificateParams::default();
        params.subject_alt_names.push(SanType::URI(uri.try_into().expect("it is ASCII")));
        self.sign(name, params, &[ExtendedKeyUsagePurpose::ClientAuth]);
    }

    fn issue(&self, name: &str, hosts: &[&str], usages: &[ExtendedKeyUsagePurpose]) {
        let hosts: Vec<_> = hosts.iter().map(|host| (*host).to_owned()).collect();
        let params = CertificateParams::new(hosts).expect("the hosts are names and addresses");
        self.sign(name, params, usages);
    }

    fn sign(&self, name: &str, mut params: CertificateParams, usages: &[ExtendedKeyUsagePurpose]) {
        params.distinguished_name.push(DnType::CommonName, format!("tollkeeper test {name}"));
        params.use_authority_key_identifier_extension = true;
        params.key_usages.push(KeyUsagePurpose::DigitalSignature);
        params.extended_key_usages.extend(usages.iter().cloned());
        let key = KeyPair::generate().expect("a key can be made");
        let certificate = params.signed_by(&key, &self.authority).expect("a certificate can be signed");
        self.write(&format!("{name}.crt"), &certificate.pem());
        self.write(&format!("{name}.key"), &key.serialize_pem());
    }

    fn write(&self, name: &str, pem: &str) {
        fs::write(self.path(name), pem).expect("a certificate can be written");
    }
}

/// Certificate as PEM, and its signer.
fn new_authority(name: &str) -> (String, Issuer<'static, KeyPair>) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages.extend([KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyCertSign]);
    let key = KeyPair::generate().expect("a key can be made");
    let certificate = params.self_signed(&key).expect("a certificate can be signed");
    (certificate.pem(), Issuer::new(params, key))
}

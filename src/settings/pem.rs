//! PEM files of TLS: certificates, private keys and CA certificates.
//!
//! Settings name the files; listeners and clients read them, repeatedly where certificates can be
//! replaced. All errors have one form, `NAME=path: what`, where the name is the variable or flag that gave the path.
//!
//! Decides: how PEM files are read, also keys with a password; whether CAs of the system are trusted beside a file.

use std::fmt::Display;
use std::fs;
use std::io::Read as _;
use std::path::PathBuf;
use std::sync::LazyLock;

use der::asn1::{AnyRef, GeneralizedTime, UtcTime};
use der::{Reader as _, SliceReader, Tag, Tagged as _};
use rustls::client::WantsClientCert;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ConfigBuilder, RootCertStore};

use super::problem::UnusableSetting;

/// A PEM file, with the setting that names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PemFile {
    /// The variable or flag, for error messages.
    pub setting: &'static str,
    /// Path of the file.
    pub path: PathBuf,
}

/// A client certificate and its private key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCertificate {
    /// Certificate chain, the client's own certificate first.
    pub certificate: PemFile,
    /// Private key of that certificate, not encrypted.
    pub key: PemFile,
}

/// Completes the configuration of a TLS client, with a client certificate if there is one.
///
/// # Errors
/// The certificate or the key cannot be used.
pub fn finish_tls_client_config(
    builder: ConfigBuilder<ClientConfig, WantsClientCert>,
    client: Option<&ClientCertificate>,
) -> Result<ClientConfig, UnusableSetting> {
    let Some(ClientCertificate { certificate, key }) = client else { return Ok(builder.with_no_client_auth()) };
    let (chain, secret) = (certificate.read_contents()?, key.read_contents()?);
    builder
        .with_client_auth_cert(certificate.parse_certificates(&chain)?, key.parse_private_key(&secret)?)
        .map_err(|error| key.unusable_key_error(certificate, &error))
}

/// Maximum size of a PEM file in bytes; a larger file is a mistake.
const MAX_FILE_BYTES: u64 = 1 << 20;

impl PemFile {
    /// Reads the contents.
    pub fn read_contents(&self) -> Result<Vec<u8>, UnusableSetting> {
        let mut contents = Vec::new();
        let read = fs::File::open(&self.path).and_then(|open| open.take(MAX_FILE_BYTES + 1).read_to_end(&mut contents));
        match read {
            Ok(length) if length as u64 > MAX_FILE_BYTES => Err(self.file_error("larger than 1 MiB; give a PEM file")),
            Ok(_) => Ok(contents),
            Err(error) => Err(self.file_error(format_args!("it cannot be read: {error}"))),
        }
    }

    /// Parses the certificates in `pem`, the contents of this file; at least one.
    pub fn parse_certificates(&self, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, UnusableSetting> {
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
        match found {
            Ok(found) if found.is_empty() => Err(self.file_error("no certificate in it; give one as PEM")),
            Ok(found) => Ok(found),
            Err(error) => Err(self.file_error(format_args!("not PEM: {error}"))),
        }
    }

    /// Adds the CA certificates in `pem`, the contents of this file, to `roots`.
    pub fn add_ca_certificates(&self, pem: &[u8], roots: &mut RootCertStore) -> Result<(), UnusableSetting> {
        for certificate in self.parse_certificates(pem)? {
            let added = roots.add(certificate);
            added.map_err(|error| self.file_error(format_args!("not a certificate of an authority: {error}")))?;
        }
        Ok(())
    }

    /// Parses the private key in `pem`, the contents of this file.
    pub fn parse_private_key(&self, pem: &[u8]) -> Result<PrivateKeyDer<'static>, UnusableSetting> {
        PrivateKeyDer::from_pem_slice(pem)
            .map_err(|_| self.file_error("no private key in it; give one as PEM that needs no password"))
    }

    /// Formats the error of a private key, in this file, that cannot be used with `certificate`.
    pub fn unusable_key_error(&self, certificate: &Self, error: &rustls::Error) -> UnusableSetting {
        match error {
            rustls::Error::InconsistentKeys(_) => {
                self.file_error(format_args!("not the key of {}; give the pair", certificate.setting))
            }
            error => self.file_error(format_args!("the key cannot be used: {error}")),
        }
    }

    /// Formats an error about this file.
    pub fn file_error(&self, what: impl Display) -> UnusableSetting {
        UnusableSetting { setting: self.setting, shown: self.path.display().to_string(), what: what.to_string() }
    }
}

/// Returns the system's CA certificates, read once because there are many; some may be unusable.
pub fn load_system_roots() -> &'static [CertificateDer<'static>] {
    static SYSTEM_ROOTS: LazyLock<Vec<CertificateDer<'static>>> =
        LazyLock::new(|| rustls_native_certs::load_native_certs().certs);
    &SYSTEM_ROOTS
}

/// Collects the CA certificates that a client trusts: the system's, and those of the file.
pub fn collect_trusted_roots(ca: Option<&PemFile>) -> Result<RootCertStore, UnusableSetting> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(load_system_roots().iter().cloned());
    if let Some(ca) = ca {
        ca.add_ca_certificates(&ca.read_contents()?, &mut roots)?;
    }
    Ok(roots)
}

/// Reads the expiry of a certificate, in seconds since the Unix epoch.
///
/// RFC 5280, 4.1: a certificate starts with its signed part, and that with an optional version, serial number,
/// algorithm, issuer and validity.
pub fn parse_not_after(certificate: &[u8]) -> der::Result<i64> {
    let mut certificate = read_sequence(&mut SliceReader::new(certificate)?)?;
    let mut fields = read_sequence(&mut certificate)?;
    let version_or_serial: AnyRef<'_> = fields.decode()?;
    let before_validity = if matches!(version_or_serial.tag(), Tag::ContextSpecific { .. }) { 3 } else { 2 };
    for _ in 0..before_validity {
        fields.tlv_bytes()?;
    }
    let mut validity = read_sequence(&mut fields)?;
    validity.tlv_bytes()?;
    let not_after: AnyRef<'_> = validity.decode()?;
    let since_epoch = match not_after.tag() {
        Tag::GeneralizedTime => not_after.decode_as::<GeneralizedTime>()?.to_unix_duration(),
        _ => not_after.decode_as::<UtcTime>()?.to_unix_duration(),
    };
    Ok(since_epoch.as_secs().cast_signed())
}

/// Reads a SEQUENCE and returns a reader of its contents.
fn read_sequence<'d>(reader: &mut SliceReader<'d>) -> der::Result<SliceReader<'d>> {
    let sequence: AnyRef<'d> = reader.decode()?;
    sequence.tag().assert_eq(Tag::Sequence)?;
    SliceReader::new(sequence.value())
}

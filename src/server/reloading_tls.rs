//! Who a listener is, and whom it lets in: its certificate, its key, and the authorities that vouch for clients.
//!
//! The files are read every second and compared by their contents, so that it does not matter how they are replaced: by
//! a rename, by a swapped link on the way, or in place. What differs counts once two readings in a row agree, and then
//! all of it or nothing: a pair that does not fit leaves the old one in force, with one line in the log. Connections
//! that are open go on as they are; sessions are not resumed across a change.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::verify_server_name;
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, RootCertStore, ServerConfig, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{Accept, TlsAcceptor};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::admission::{ListenerAdmission, Purpose};
use crate::clock::Clock;
use crate::settings::pem::PemFile;
use crate::settings::tls::{ClientAuth, ListenerTls, RequiredSan};
use crate::telemetry::log_throttle::LogThrottle;

/// Who a listener is.
#[derive(Debug)]
pub(super) struct ReloadingTls {
    tls: ListenerTls,
    admission: Arc<ListenerAdmission>,
    config: ArcSwap<ServerConfig>,
    /// What was read at the start.
    read: blake3::Hash,
}

/// How often the files are compared.
const COMPARED: Duration = Duration::from_secs(1);

impl ReloadingTls {
    /// Reads the files; an error names the setting and says what to do.
    pub(super) fn load(tls: &ListenerTls, admission: &Arc<ListenerAdmission>) -> Result<Self, String> {
        let pem = PemFiles::read(tls);
        let read = fingerprint(&pem);
        let (config, not_after) = pem?.config(tls, admission.purpose())?;
        note(admission, tls, not_after);
        Ok(Self { tls: tls.clone(), admission: Arc::clone(admission), config: ArcSwap::from_pointee(config), read })
    }

    /// Begins a handshake.
    pub(super) fn accept<I: AsyncRead + AsyncWrite + Unpin>(&self, io: I) -> Accept<I> {
        TlsAcceptor::from(self.config.load_full()).accept(io)
    }

    /// Puts what changes in force, for ever.
    pub(super) async fn follow(self: Arc<Self>) {
        // What was acted upon last, and what the reading before said.
        let (mut known, mut before) = (self.read, self.read);
        loop {
            tokio::time::sleep(COMPARED).await;
            let tls = self.tls.clone();
            let Ok(pem) = tokio::task::spawn_blocking(move || PemFiles::read(&tls)).await else { continue };
            let read = fingerprint(&pem);
            if read != known && read == before {
                known = read;
                self.replace(pem);
            }
            before = read;
        }
    }

    fn replace(&self, pem: Result<PemFiles, String>) {
        match pem.and_then(|pem| pem.config(&self.tls, self.admission.purpose())) {
            Ok((config, not_after)) => {
                self.config.store(Arc::new(config));
                let PemFile { setting, path } = &self.tls.certificate;
                tracing::warn!("{setting}={}: the new certificate is in force", path.display());
                note(&self.admission, &self.tls, not_after);
            }
            Err(problem) => tracing::warn!("{problem}; the certificate before stays in force"),
        }
    }
}

/// Notes when a certificate ends.
fn note(admission: &ListenerAdmission, tls: &ListenerTls, not_after: i64) {
    admission.stats().note_not_after(not_after);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    if i64::try_from(now).is_ok_and(|now| not_after < now) {
        let PemFile { setting, path } = &tls.certificate;
        tracing::warn!("{setting}={}: the certificate has expired; clients will refuse it", path.display());
    }
}

/// Tells of a client that did not get through the handshake; those that only look whether somebody listens are not
/// told of.
pub(super) fn log_handshake_failure(error: &io::Error, purpose: Purpose, peer: Option<SocketAddr>) {
    static THROTTLE: LogThrottle = LogThrottle::every(Duration::from_secs(60));
    if error.kind() == io::ErrorKind::InvalidData
        && let Some(suppressed) = THROTTLE.allow(Clock::System.now())
    {
        let peer = peer.map(|peer| peer.to_string());
        tracing::warn!(listener = purpose.name(), peer, suppressed, %error, "a TLS handshake failed");
    }
}

/// The contents of the files.
struct PemFiles {
    certificate: Vec<u8>,
    key: Vec<u8>,
    authorities: Option<Vec<u8>>,
}

impl PemFiles {
    fn read(tls: &ListenerTls) -> Result<Self, String> {
        Ok(Self {
            certificate: tls.certificate.contents()?,
            key: tls.key.contents()?,
            authorities: tls.clients.as_ref().map(|clients| clients.authorities.contents()).transpose()?,
        })
    }

    /// How to speak TLS with it, and when the certificate ends.
    fn config(&self, tls: &ListenerTls, purpose: Purpose) -> Result<(ServerConfig, i64), String> {
        let provider = Arc::new(ring::default_provider());
        let chain = tls.certificate.certificates(&self.certificate)?;
        let not_after = not_after(&chain[0]).ok_or_else(|| {
            tls.certificate.wrong("the first certificate in it can not be read; give one in X.509, as PEM")
        })?;
        let key = tls.key.private_key(&self.key)?;
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| tls.certificate.wrong(error))?;
        let builder = match (&tls.clients, &self.authorities) {
            (Some(clients), Some(pem)) => builder.with_client_cert_verifier(verifier(clients, pem, provider)?),
            _ => builder.with_no_client_auth(),
        };
        let mut config =
            builder.with_single_cert(chain, key).map_err(|error| tls.key.key_mismatch(&tls.certificate, &error))?;
        config.alpn_protocols = match purpose {
            Purpose::Grpc => vec![b"h2".to_vec()],
            _ => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
        };
        Ok((config, not_after))
    }
}

/// Tells readings apart: by contents, or by what is in the way of them.
fn fingerprint(pem: &Result<PemFiles, String>) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    let mut add = |part: &[u8]| {
        hasher.update(&part.len().to_le_bytes());
        hasher.update(part);
    };
    match pem {
        Ok(PemFiles { certificate, key, authorities }) => {
            let parts = [certificate.as_slice(), key, authorities.as_deref().unwrap_or_default()];
            parts.into_iter().for_each(add);
        }
        Err(problem) => add(problem.as_bytes()),
    }
    hasher.finalize()
}

fn not_after(certificate: &CertificateDer<'_>) -> Option<i64> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    Some(certificate.validity().not_after.timestamp())
}

/// Verifies the certificates of clients: only those that these authorities have signed, not those of the system, which
/// sign for anybody.
fn verifier(
    clients: &ClientAuth,
    pem: &[u8],
    provider: Arc<rustls::crypto::CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let mut roots = RootCertStore::empty();
    clients.authorities.add_authorities(pem, &mut roots)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
    let verifier = verifier.map_err(|error| clients.authorities.wrong(error))?;
    let Some(RequiredSan { setting, name }) = &clients.san else { return Ok(verifier) };
    let name = ServerName::try_from(name.clone()).map_err(|_| format!("{setting}={name}: not a DNS name"))?;
    Ok(Arc::new(SanVerifier { verifier, name }))
}

/// Lets in only who has a certificate for this name, among its alternative names; that of its subject does not count.
#[derive(Debug)]
struct SanVerifier {
    verifier: Arc<dyn ClientCertVerifier>,
    name: ServerName<'static>,
}

impl ClientCertVerifier for SanVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.verifier.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.verifier.verify_client_cert(end_entity, intermediates, now)?;
        // Names in certificates are matched alike, whoever shows them.
        verify_server_name(&ParsedCertificate::try_from(end_entity)?, &self.name)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}

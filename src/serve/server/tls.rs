//! TLS of a listener, reloaded when its certificate files change; certificates of clients, and expiry of certificates.
//!
//! The files are read every second and compared by content, so it does not matter how they are replaced: by rename, by
//! a swapped symlink, or in place. A change is applied after two equal reads in a row, completely or not at all: if the
//! files do not fit together, the previous certificate stays and a line is logged. Open connections keep their
//! certificate, and sessions are not resumed across a change.
//!
//! Certificates of clients are verified by the configured authorities, and optionally by a DNS name. The system's
//! authorities are not trusted, because they sign certificates for everyone.
//!
//! A listener warns of the expiry of its own certificate when it loads one. Connections to servers read their
//! certificate for each connection, so a task reads the files beside them and warns; a certificate that is read once at
//! the start is not read again.
//!
//! Decides: TLS versions, ALPN, client certificates and their names (`SanVerifier`); when a new certificate is used.
//! Decides: one that does not fit its key; the warning of an expired one (`ExpiryWarning`).
//! Decides: failed handshakes (plaintext on a TLS port); that sessions are not resumed across a change.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use jiff::Timestamp;
use rustls::client::verify_server_name;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{DistinguishedName, Error, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{Accept, TlsAcceptor};

use super::admission::ListenerAdmission;
use crate::base::clock::Clock;
use crate::settings::PresentedCertificate;
use crate::settings::pem::{PemFile, parse_not_after};
use crate::settings::problem::UnusableSetting;
use crate::settings::tls::{ClientAuth, ListenerTls, RequiredSan, forward_signature_checks};
use crate::telemetry::listener_stats::{ListenerKind, OutgoingTlsConnection, StatsByListener};
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::logs::LIFECYCLE_TARGET;

/// TLS configuration of a listener, replaced when its files change.
#[derive(Debug)]
pub(super) struct ReloadingTls {
    tls: ListenerTls,
    admission: Arc<ListenerAdmission>,
    config: ArcSwap<ServerConfig>,
    /// Fingerprint of the files read at startup.
    initial: blake3::Hash,
}

/// Interval at which files of certificates are read.
const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl ReloadingTls {
    /// Reads the files.
    ///
    /// # Errors
    /// Names the setting, the problem and the remedy.
    pub(super) fn load(tls: &ListenerTls, admission: &Arc<ListenerAdmission>) -> Result<Self, UnusableSetting> {
        let pem = PemContents::read_files(tls);
        let initial = fingerprint_files(&pem);
        let (config, not_after) = pem?.build_config(tls, admission.kind())?;
        admission.stats().set_certificate_not_after(not_after);
        Ok(Self { tls: tls.clone(), admission: Arc::clone(admission), config: ArcSwap::from_pointee(config), initial })
    }

    /// Starts a handshake.
    pub(super) fn start_handshake<I: AsyncRead + AsyncWrite + Unpin>(&self, io: I) -> Accept<I> {
        TlsAcceptor::from(self.config.load_full()).accept(io)
    }

    /// Compares the files forever, applies changes, and warns of a certificate that has expired.
    pub(super) async fn watch_files(self: Arc<Self>) {
        let (mut applied, mut previous) = (self.initial, self.initial);
        let mut warning = ExpiryWarning::default();
        loop {
            if let Some(not_after) = self.admission.stats().certificate_not_after() {
                warning.warn_if_expired(&self.tls.certificate, not_after, "clients");
            }
            tokio::time::sleep(FILE_CHECK_INTERVAL).await;
            let tls = self.tls.clone();
            let Ok(pem) = tokio::task::spawn_blocking(move || PemContents::read_files(&tls)).await else { continue };
            let current = fingerprint_files(&pem);
            if current != applied && current == previous {
                applied = current;
                self.replace_config(pem);
            }
            previous = current;
        }
    }

    fn replace_config(&self, pem: Result<PemContents, UnusableSetting>) {
        match pem.and_then(|pem| pem.build_config(&self.tls, self.admission.kind())) {
            Ok((config, not_after)) => {
                self.config.store(Arc::new(config));
                let PemFile { setting, path } = &self.tls.certificate;
                tracing::info!(target: LIFECYCLE_TARGET, "new certificate loaded: {setting}={}", path.display());
                self.admission.stats().set_certificate_not_after(not_after);
            }
            Err(problem) => tracing::warn!("new certificate rejected, the previous one stays active: {problem}"),
        }
    }
}

/// Logs a failed handshake. A client that closes the connection early, such as a port probe, is not logged.
pub(super) fn log_handshake_failure(error: &io::Error, listener: ListenerKind, peer: Option<SocketAddr>) {
    static HANDSHAKE_LOG_THROTTLE: LogThrottle = LogThrottle::every(Duration::from_secs(60));
    if error.kind() == io::ErrorKind::InvalidData
        && let Some(suppressed) = HANDSHAKE_LOG_THROTTLE.allow(Clock::System.now())
    {
        let peer = peer.map(|peer| peer.to_string());
        tracing::warn!(listener = listener.name(), peer, suppressed, %error, "TLS handshake failed");
    }
}

/// Contents of the certificate files.
struct PemContents {
    certificate: Vec<u8>,
    key: Vec<u8>,
    client_authorities: Option<Vec<u8>>,
}

impl PemContents {
    fn read_files(tls: &ListenerTls) -> Result<Self, UnusableSetting> {
        Ok(Self {
            certificate: tls.certificate.read_contents()?,
            key: tls.key.read_contents()?,
            client_authorities: tls.clients.as_ref().map(|clients| clients.authorities.read_contents()).transpose()?,
        })
    }

    /// Builds the TLS configuration; also returns the certificate's expiry in seconds since the Unix epoch.
    fn build_config(&self, tls: &ListenerTls, listener: ListenerKind) -> Result<(ServerConfig, i64), UnusableSetting> {
        let provider = Arc::new(ring::default_provider());
        let chain = tls.certificate.parse_certificates(&self.certificate)?;
        let not_after = parse_not_after(&chain[0]).map_err(|_| {
            tls.certificate.file_error("its first certificate cannot be parsed; give an X.509 certificate as PEM")
        })?;
        let key = tls.key.parse_private_key(&self.key)?;
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| tls.certificate.file_error(error))?;
        let builder = match (&tls.clients, &self.client_authorities) {
            (Some(clients), Some(pem)) => {
                builder.with_client_cert_verifier(build_client_verifier(clients, pem, provider)?)
            }
            _ => builder.with_no_client_auth(),
        };
        let mut config = builder
            .with_single_cert(chain, key)
            .map_err(|error| tls.key.unusable_key_error(&tls.certificate, &error))?;
        config.alpn_protocols = match listener {
            ListenerKind::Grpc => vec![b"h2".to_vec()],
            _ => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
        };
        Ok((config, not_after))
    }
}

/// Hash of the files' contents, or of the error that reading them gave.
fn fingerprint_files(pem: &Result<PemContents, UnusableSetting>) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    let mut add = |part: &[u8]| {
        hasher.update(&part.len().to_le_bytes());
        hasher.update(part);
    };
    match pem {
        Ok(PemContents { certificate, key, client_authorities }) => {
            let parts = [certificate.as_slice(), key, client_authorities.as_deref().unwrap_or_default()];
            parts.into_iter().for_each(add);
        }
        Err(problem) => add(problem.to_string().as_bytes()),
    }
    hasher.finalize()
}

/// Verifier of client certificates. `pem` holds the authorities.
fn build_client_verifier(
    clients: &ClientAuth,
    pem: &[u8],
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, UnusableSetting> {
    let mut roots = RootCertStore::empty();
    clients.authorities.add_ca_certificates(pem, &mut roots)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
    let verifier = verifier.map_err(|error| clients.authorities.file_error(error))?;
    let Some(RequiredSan { setting, name }) = &clients.san else { return Ok(verifier) };
    let name = ServerName::try_from(name.clone()).map_err(|_| UnusableSetting {
        setting,
        shown: name.clone(),
        what: "not a DNS name".to_owned(),
    })?;
    Ok(Arc::new(SanVerifier { verifier, name }))
}

/// Accepts certificates whose subject alternative names contain `name`; the subject's common name does not count.
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
        // rustls matches alternative names of clients and servers by the same rules.
        verify_server_name(&ParsedCertificate::try_from(end_entity)?, &self.name)?;
        Ok(verified)
    }

    forward_signature_checks!();
}

/// Warning that a certificate has expired, logged once for each certificate.
#[derive(Debug, Default)]
struct ExpiryWarning {
    logged_for: Option<i64>,
}

impl ExpiryWarning {
    /// Warns if the certificate of `file` has expired. `not_after` is its expiry in seconds since the Unix epoch, and
    /// `rejected_by` says who rejects it.
    fn warn_if_expired(&mut self, file: &PemFile, not_after: i64, rejected_by: &str) {
        if not_after < unix_time_now_s() && self.logged_for != Some(not_after) {
            self.logged_for = Some(not_after);
            let PemFile { setting, path } = file;
            let path = path.display();
            tracing::warn!("certificate has expired: {rejected_by} will reject it (replace {setting}={path})");
        }
    }
}

/// Finds a certificate that has expired: the process starts with it, and `rejected_by` says who rejects it.
pub(super) fn find_expired_certificate(file: &PemFile, rejected_by: &str) -> Option<UnusableSetting> {
    let not_after = read_expiry(file)?;
    let expiry = Timestamp::from_second(not_after).ok().filter(|_| not_after < unix_time_now_s())?;
    let what = format_args!("the certificate expired at {expiry}; {rejected_by} reject it, replace it");
    Some(file.file_error(what))
}

/// Records and reports the expiry of the certificates that this process presents to servers; never returns.
pub(super) async fn watch_expiry_of_presented_certificates(
    certificates: Vec<PresentedCertificate>,
    stats: Arc<StatsByListener>,
) {
    let mut warnings: Vec<ExpiryWarning> = certificates.iter().map(|_| ExpiryWarning::default()).collect();
    let mut is_first = true;
    loop {
        for (certificate, warning) in certificates.iter().zip(&mut warnings) {
            if is_first || certificate.is_read_again {
                let file = certificate.file.clone();
                let read = tokio::task::spawn_blocking(move || read_expiry(&file)).await;
                // A file that cannot be read, perhaps for a moment, is an error of the connection that needs it.
                if let Ok(Some(not_after)) = read {
                    stats.set_presented_certificate_not_after(certificate.client, not_after);
                }
            }
            if let Some(not_after) = stats.presented_certificate_not_after(certificate.client) {
                warning.warn_if_expired(&certificate.file, not_after, name_rejecting_servers(certificate.client));
            }
        }
        is_first = false;
        tokio::time::sleep(FILE_CHECK_INTERVAL).await;
    }
}

/// Returns who rejects an expired certificate of this connection.
pub(super) const fn name_rejecting_servers(client: OutgoingTlsConnection) -> &'static str {
    match client {
        OutgoingTlsConnection::Redis => "Redis servers",
        OutgoingTlsConnection::Memcached => "memcached servers",
        OutgoingTlsConnection::Xds => "xDS servers",
        OutgoingTlsConnection::OtlpTraces => "collectors of traces",
        OutgoingTlsConnection::OtlpLogs => "collectors of logs",
        OutgoingTlsConnection::OtlpMetrics => "collectors of metrics",
    }
}

/// Reads the expiry of the first certificate, in seconds since the Unix epoch; `None` if the file cannot be used.
fn read_expiry(file: &PemFile) -> Option<i64> {
    let pem = file.read_contents().ok()?;
    parse_not_after(file.parse_certificates(&pem).ok()?.first()?).ok()
}

fn unix_time_now_s() -> i64 {
    i64::try_from(Clock::System.now().as_micros() / 1_000_000).unwrap_or(i64::MAX)
}

//! TLS to Redis: the authorities to trust and the certificate to show, read anew for each connection.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::settings::redis::Tls;

/// How to speak TLS as `tls` says; the error names the setting.
pub(super) fn config(tls: &Tls) -> Result<ClientConfig, String> {
    let provider = Arc::new(ring::default_provider());
    let roots = Arc::new(roots(tls.ca.as_deref())?);
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
        .build()
        .map_err(|error| format!("REDIS_TLS_CACERT: {error}"))?;
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("REDIS_TLS: {error}"))?;
    let builder = if tls.skip_hostname {
        builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyName { verifier }))
    } else {
        builder.with_webpki_verifier(verifier)
    };
    Ok(match &tls.client {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => builder
            .with_client_auth_cert(certificates("REDIS_TLS_CLIENT_CERT", certificate)?, private_key(key)?)
            .map_err(|error| format!("REDIS_TLS_CLIENT_CERT and REDIS_TLS_CLIENT_KEY do not fit: {error}"))?,
    })
}

/// The system's authorities, read once: there are many, and a dial must not take long.
static SYSTEM: LazyLock<Vec<CertificateDer<'static>>> =
    LazyLock::new(|| rustls_native_certs::load_native_certs().certs);

/// The system's authorities, and those of the file.
fn roots(ca: Option<&Path>) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    // Some of a system's certificates may be unusable; the others will do.
    roots.add_parsable_certificates(SYSTEM.iter().cloned());
    if let Some(path) = ca {
        for certificate in certificates("REDIS_TLS_CACERT", path)? {
            roots.add(certificate).map_err(|error| format!("REDIS_TLS_CACERT: {}: {error}", path.display()))?;
        }
    }
    Ok(roots)
}

fn certificates(setting: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let wrong = |error: rustls::pki_types::pem::Error| format!("{setting}: {}: {error}", path.display());
    let found: Vec<_> = CertificateDer::pem_file_iter(path).map_err(wrong)?.collect::<Result<_, _>>().map_err(wrong)?;
    if found.is_empty() {
        return Err(format!("{setting}: {}: no certificate in it", path.display()));
    }
    Ok(found)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| format!("REDIS_TLS_CLIENT_KEY: {}: {error}", path.display()))
}

/// Accepts a certificate for another name; its chain is verified.
#[derive(Debug)]
struct AnyName {
    verifier: Arc<WebPkiServerVerifier>,
}

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match self.verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // The chain is checked before the name.
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            outcome => outcome,
        }
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

//! TLS configuration of connections to Redis; each connection reads the certificate files again.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, SignatureScheme};

use crate::settings::pem::{trusted_roots, with_client_certificate};
use crate::settings::problem::UnusableSetting;
use crate::settings::redis::RedisTls;

/// Builds the configuration of a TLS client.
///
/// # Errors
/// The setting to change.
pub(crate) fn client_config(tls: &RedisTls) -> Result<ClientConfig, UnusableSetting> {
    let provider = Arc::new(ring::default_provider());
    let roots = Arc::new(trusted_roots(tls.ca.as_ref())?);
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
        .build()
        .map_err(|error| UnusableSetting {
            setting: "REDIS_TLS_CACERT",
            shown: tls.ca.as_ref().map(|ca| ca.path.display().to_string()).unwrap_or_default(),
            what: error.to_string(),
        })?;
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| UnusableSetting { setting: "REDIS_TLS", shown: "true".to_owned(), what: error.to_string() })?;
    let builder = if tls.skip_hostname {
        builder.dangerous().with_custom_certificate_verifier(Arc::new(IgnoreHostname { verifier }))
    } else {
        builder.with_webpki_verifier(verifier)
    };
    with_client_certificate(builder, tls.client.as_ref())
}

/// Verifier that checks the chain of a certificate and accepts any host name.
#[derive(Debug)]
struct IgnoreHostname {
    verifier: Arc<WebPkiServerVerifier>,
}

impl ServerCertVerifier for IgnoreHostname {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match self.verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // The chain is verified before the name.
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

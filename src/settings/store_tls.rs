//! TLS of connections to a store; each connection reads the certificate files again.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, Error};

use super::pem::{ClientCertificate, PemFile, collect_trusted_roots, finish_tls_client_config};
use super::problem::UnusableSetting;
use super::setting::{AnySetting, Setting};
use super::values::Values;

/// TLS of connections to a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreTls {
    /// The variable that names CA certificates, for error messages.
    pub ca_setting: &'static str,
    /// CA certificates to trust beside the system's.
    pub ca: Option<PemFile>,
    /// Client certificate and its key.
    pub client: Option<ClientCertificate>,
    /// `true` if a trusted certificate may be for another name.
    pub skip_hostname: bool,
}

/// The variables of the certificates of one store.
pub(crate) struct StoreTlsVariables {
    pub(crate) ca: &'static Setting<Option<PathBuf>>,
    pub(crate) certificate: &'static Setting<Option<PathBuf>>,
    pub(crate) key: &'static Setting<Option<PathBuf>>,
    pub(crate) skip_hostname: &'static Setting<bool>,
}

impl StoreTlsVariables {
    /// Returns the four settings without their types.
    pub(crate) fn all_settings(&self) -> [&'static dyn AnySetting; 4] {
        [self.ca, self.certificate, self.key, self.skip_hostname]
    }

    /// Reads the settings; a certificate without its key is a problem, and so is a key without its certificate.
    pub(crate) fn read_tls(&self, values: &mut Values) -> StoreTls {
        let client = match (values.pem_file(self.certificate), values.pem_file(self.key)) {
            (Some(certificate), Some(key)) => Some(ClientCertificate { certificate, key }),
            (None, None) => None,
            (certificate, _) => {
                let (lone, missing) =
                    if certificate.is_some() { (self.certificate, self.key) } else { (self.key, self.certificate) };
                values.add_problem(lone, format!("set without {}", missing.name()), "give both or none");
                None
            }
        };
        let skip_hostname = values.get(self.skip_hostname);
        StoreTls { ca_setting: self.ca.name(), ca: values.pem_file(self.ca), client, skip_hostname }
    }
}

impl StoreTls {
    /// Builds the configuration of a TLS client.
    ///
    /// # Errors
    /// The setting to change.
    pub(crate) fn build_client_config(&self) -> Result<ClientConfig, UnusableSetting> {
        let provider = Arc::new(ring::default_provider());
        let roots = Arc::new(collect_trusted_roots(self.ca.as_ref())?);
        let unusable = |what: String| UnusableSetting {
            setting: self.ca_setting,
            shown: self.ca.as_ref().map(|ca| ca.path.display().to_string()).unwrap_or_default(),
            what,
        };
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
            .build()
            .map_err(|error| unusable(error.to_string()))?;
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(error.to_string()))?;
        let builder = if self.skip_hostname {
            builder.dangerous().with_custom_certificate_verifier(Arc::new(HostnameIgnoringVerifier { verifier }))
        } else {
            builder.with_webpki_verifier(verifier)
        };
        finish_tls_client_config(builder, self.client.as_ref())
    }

    /// Paths of the files that connecting reads.
    pub(crate) fn certificate_paths(&self) -> impl Iterator<Item = &PathBuf> {
        let pair = self.client.iter().flat_map(|client| [&client.certificate, &client.key]);
        self.ca.iter().chain(pair).map(|file| &file.path)
    }
}

/// Implements what a verifier of servers or clients does not decide by itself, by its field `verifier`: the checks of
/// signatures.
macro_rules! forward_signature_checks {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &rustls::pki_types::CertificateDer<'_>,
            signature: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            self.verifier.verify_tls12_signature(message, certificate, signature)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &rustls::pki_types::CertificateDer<'_>,
            signature: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            self.verifier.verify_tls13_signature(message, certificate, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
            self.verifier.supported_verify_schemes()
        }
    };
}
pub(crate) use forward_signature_checks;

/// Verifier that checks the chain of a certificate and accepts any host name.
#[derive(Debug)]
struct HostnameIgnoringVerifier {
    verifier: Arc<WebPkiServerVerifier>,
}

impl ServerCertVerifier for HostnameIgnoringVerifier {
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

    forward_signature_checks!();
}

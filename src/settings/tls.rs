//! TLS: of the gRPC and HTTP listeners, with the certificates that clients must present, and of connections to a store.
//!
//! Each connection to a store reads the certificate files again.
//!
//! Decides: when a listener speaks TLS, and which client names it demands; a certificate without its key.
//! Decides: which certificate a Redis or memcached server must present, and whether its name is checked.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, Error};

use super::pem::{ClientCertificate, PemFile, collect_trusted_roots, finish_tls_client_config};
use super::problem::UnusableSetting;
use super::setting::{AnySetting, Setting, settings};
use super::values::Values;

settings! { "TLS of the listeners";
    GRPC_SERVER_USE_TLS: bool = "false", "serve gRPC over TLS" .often_set();
    GRPC_SERVER_TLS_CERT: Option<PathBuf> = "",
        "certificate chain of the gRPC listener (PEM); reloaded when it changes"
        .differs("may be in another directory than the key") .only_read("with GRPC_SERVER_USE_TLS=true")
        .often_set();
    GRPC_SERVER_TLS_KEY: Option<PathBuf> = "",
        "private key of the gRPC listener (PEM)"
        .only_read("with GRPC_SERVER_USE_TLS=true")
        .often_set();
    GRPC_SERVER_TLS_CA_CERT: Option<PathBuf> = "", "set by Envoy Gateway"
        .without_effect("envoyproxy/ratelimit does not read it either");
    GRPC_CLIENT_TLS_CACERT: Option<PathBuf> = "",
        "CA certificates for clients (PEM); set: clients need a certificate"
        .differs_by_value("the system's CAs are not trusted; without TLS it prevents the start")
        .often_set();
    GRPC_CLIENT_TLS_SAN: Option<String> = "", "DNS name that a client certificate must hold"
        .differs("without GRPC_CLIENT_TLS_CACERT it prevents the start");
    TOLLKEEPER_HTTP_TLS_CERT: Option<PathBuf> = "",
        "certificate chain of the HTTP listener (PEM); not set: no TLS";
    TOLLKEEPER_HTTP_TLS_KEY: Option<PathBuf> = "", "private key of the HTTP listener (PEM)";
    TOLLKEEPER_HTTP_TLS_CLIENT_CACERT: Option<PathBuf> = "",
        "CA certificates for clients of the HTTP listener (PEM); set: clients and probes need a certificate";
}

/// TLS of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerTls {
    /// Certificate chain, the listener's own certificate first.
    pub certificate: PemFile,
    /// Private key of that certificate, not encrypted.
    pub key: PemFile,
    /// Requirements on client certificates; `None` means that clients need none.
    pub clients: Option<ClientAuth>,
}

/// Requirements on client certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientAuth {
    /// CA certificates that may have signed them.
    pub authorities: PemFile,
    /// Subject alternative name that they must hold; `None` means any.
    pub san: Option<RequiredSan>,
}

/// Subject alternative name that a client certificate must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequiredSan {
    /// The variable, for error messages.
    pub setting: &'static str,
    /// The DNS name.
    pub name: String,
}

impl ListenerTls {
    /// Reads TLS of the gRPC listener.
    ///
    /// Client certificates without TLS would let everybody in; that prevents the start.
    pub(super) fn read_grpc(values: &mut Values) -> Option<Self> {
        let authorities = values.pem_file(&GRPC_CLIENT_TLS_CACERT);
        let san = values.get(&GRPC_CLIENT_TLS_SAN);
        if !values.get(&GRPC_SERVER_USE_TLS) {
            let fix = "set GRPC_SERVER_USE_TLS=true, or unset it to accept every client";
            if authorities.is_some() {
                values.add_problem(&GRPC_CLIENT_TLS_CACERT, "without TLS clients present no certificate", fix);
            }
            if san.is_some() {
                values.add_problem(&GRPC_CLIENT_TLS_SAN, "without TLS clients present no certificate", fix);
            }
            return None;
        }
        if !values.differs_from_default(&GRPC_SERVER_TLS_CERT) && !values.differs_from_default(&GRPC_SERVER_TLS_KEY) {
            let fix = "give GRPC_SERVER_TLS_CERT and GRPC_SERVER_TLS_KEY";
            values.add_problem(&GRPC_SERVER_USE_TLS, "there is no certificate to serve with", fix);
        }
        if san.is_some() && authorities.is_none() {
            let fix = "give GRPC_CLIENT_TLS_CACERT, the CA that signed it";
            values.add_problem(&GRPC_CLIENT_TLS_SAN, "clients are not required to present a certificate", fix);
        }
        if san.as_deref().is_some_and(|name| ServerName::try_from(name).is_err()) {
            let what = "not a name that a certificate can hold";
            values.add_problem(&GRPC_CLIENT_TLS_SAN, what, "give one DNS name, without a wildcard");
        }
        let san = san.map(|name| RequiredSan { setting: GRPC_CLIENT_TLS_SAN.name(), name });
        let ClientCertificate { certificate, key } =
            values.certificate_with_key(&GRPC_SERVER_TLS_CERT, &GRPC_SERVER_TLS_KEY)?;
        if certificate.path.parent() != key.path.parent() {
            values
                .mark_difference_from_envoy_ratelimit(&GRPC_SERVER_TLS_CERT, "it is in another directory than the key");
        }
        Some(Self { certificate, key, clients: authorities.map(|authorities| ClientAuth { authorities, san }) })
    }

    /// Reads TLS of the HTTP listener.
    pub(super) fn read_http(values: &mut Values) -> Option<Self> {
        let authorities = values.pem_file(&TOLLKEEPER_HTTP_TLS_CLIENT_CACERT);
        let has_files = values.differs_from_default(&TOLLKEEPER_HTTP_TLS_CERT)
            || values.differs_from_default(&TOLLKEEPER_HTTP_TLS_KEY);
        if authorities.is_some() && !has_files {
            let fix = "give TOLLKEEPER_HTTP_TLS_CERT and TOLLKEEPER_HTTP_TLS_KEY, or unset it to accept every client";
            let what = "without TLS clients present no certificate";
            values.add_problem(&TOLLKEEPER_HTTP_TLS_CLIENT_CACERT, what, fix);
        }
        let ClientCertificate { certificate, key } =
            values.certificate_with_key(&TOLLKEEPER_HTTP_TLS_CERT, &TOLLKEEPER_HTTP_TLS_KEY)?;
        let clients = authorities.map(|authorities| ClientAuth { authorities, san: None });
        Some(Self { certificate, key, clients })
    }
}

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
    /// Reads the settings; a certificate without its key is a problem, and so is a key without its certificate.
    pub(crate) fn read_tls(&self, values: &mut Values) -> StoreTls {
        let client = values.certificate_with_key(self.certificate, self.key);
        let skip_hostname = values.get(self.skip_hostname);
        StoreTls { ca_setting: self.ca.name(), ca: values.pem_file(self.ca), client, skip_hostname }
    }
}

impl StoreTls {
    /// Builds the configuration of a TLS client.
    ///
    /// # Errors
    /// The setting to change.
    pub fn build_client_config(&self) -> Result<ClientConfig, UnusableSetting> {
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
    pub fn certificate_paths(&self) -> impl Iterator<Item = &PathBuf> {
        let pair = self.client.iter().flat_map(|client| [&client.certificate, &client.key]);
        self.ca.iter().chain(pair).map(|file| &file.path)
    }
}

/// Implements what a verifier of servers or clients does not decide by itself, by its field `verifier`: the checks of
/// signatures.
#[macro_export]
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
pub use forward_signature_checks;

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

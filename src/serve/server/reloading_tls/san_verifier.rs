//! Verification of client certificates: by the configured authorities, and optionally by a DNS name.
//!
//! The system's authorities are not trusted, because they sign certificates for everyone.

use std::sync::Arc;

use rustls::client::verify_server_name;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{DistinguishedName, Error, RootCertStore};

use crate::settings::problem::UnusableSetting;
use crate::settings::store_tls::forward_signature_checks;
use crate::settings::tls::{ClientAuth, RequiredSan};

/// Verifier of client certificates. `pem` holds the authorities.
pub(super) fn build_client_verifier(
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

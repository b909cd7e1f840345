//! TLS of the gRPC and HTTP listeners, and the certificates that clients must present.

use std::path::PathBuf;

use rustls::pki_types::ServerName;

use super::pem::PemFile;
use super::setting::{AnySetting, Condition, RequiredValue, Requirement, settings};
use super::values::Values;

settings! { "TLS of the listeners";
    GRPC_SERVER_USE_TLS: bool = false, "serve gRPC over TLS";
    GRPC_SERVER_TLS_CERT: Option<PathBuf> = None,
        "certificate chain of the gRPC listener, PEM file; reloaded when it changes"
        .differs_when(Condition::Never, "it may be in another directory than the key") .only_with(&REQUIRES_GRPC_TLS);
    GRPC_SERVER_TLS_KEY: Option<PathBuf> = None,
        "private key of the gRPC listener, PEM file; reloaded when it changes" .only_with(&REQUIRES_GRPC_TLS);
    GRPC_SERVER_TLS_CA_CERT: Option<PathBuf> = None, "set by Envoy Gateway"
        .has_no_effect_with_notice_when(Condition::NotEmpty, "envoyproxy/ratelimit does not read it either");
    GRPC_CLIENT_TLS_CACERT: Option<PathBuf> = None,
        "CA certificates for clients, PEM file; set: clients need a certificate; reloaded when it changes"
        .differs_when(Condition::NotEmpty, "the system's CAs are not trusted; without TLS it prevents the start");
    GRPC_CLIENT_TLS_SAN: Option<String> = None, "DNS name that a client certificate must hold"
        .differs_when(Condition::Never, "without GRPC_CLIENT_TLS_CACERT it prevents the start");
    TOLLKEEPER_HTTP_TLS_CERT: Option<PathBuf> = None,
        "certificate chain of the HTTP listener, PEM file; not set: it serves without TLS";
    TOLLKEEPER_HTTP_TLS_KEY: Option<PathBuf> = None, "private key of the HTTP listener, PEM file";
    TOLLKEEPER_HTTP_TLS_CLIENT_CACERT: Option<PathBuf> = None,
        "CA certificates for clients of the HTTP listener, PEM file; set: clients and probes need a certificate";
}

static REQUIRES_GRPC_TLS: Requirement = Requirement {
    any_of: &[RequiredValue::Is(&GRPC_SERVER_USE_TLS, "true")],
    why: "it is only read with GRPC_SERVER_USE_TLS=true",
};

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

/// The two settings of a certificate and its key, with the files that they name.
struct KeyPairFiles {
    certificate_setting: &'static dyn AnySetting,
    certificate: Option<PemFile>,
    key_setting: &'static dyn AnySetting,
    key: Option<PemFile>,
}

impl ListenerTls {
    /// Reads TLS of the gRPC listener.
    ///
    /// Client certificates without TLS would let everybody in; that prevents the start.
    pub(super) fn read_grpc(values: &mut Values) -> Option<Self> {
        let pair = KeyPairFiles {
            certificate_setting: &GRPC_SERVER_TLS_CERT,
            certificate: values.pem_file(&GRPC_SERVER_TLS_CERT),
            key_setting: &GRPC_SERVER_TLS_KEY,
            key: values.pem_file(&GRPC_SERVER_TLS_KEY),
        };
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
        if pair.certificate.is_none() && pair.key.is_none() {
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
        if let (Some(certificate), Some(key)) = (&pair.certificate, &pair.key)
            && certificate.path.parent() != key.path.parent()
        {
            values
                .mark_difference_from_envoy_ratelimit(&GRPC_SERVER_TLS_CERT, "it is in another directory than the key");
        }
        pair.into_listener_tls(values, authorities.map(|authorities| ClientAuth { authorities, san }))
    }

    /// Reads TLS of the HTTP listener.
    pub(super) fn read_http(values: &mut Values) -> Option<Self> {
        let pair = KeyPairFiles {
            certificate_setting: &TOLLKEEPER_HTTP_TLS_CERT,
            certificate: values.pem_file(&TOLLKEEPER_HTTP_TLS_CERT),
            key_setting: &TOLLKEEPER_HTTP_TLS_KEY,
            key: values.pem_file(&TOLLKEEPER_HTTP_TLS_KEY),
        };
        let authorities = values.pem_file(&TOLLKEEPER_HTTP_TLS_CLIENT_CACERT);
        if authorities.is_some() && pair.certificate.is_none() && pair.key.is_none() {
            let fix = "give TOLLKEEPER_HTTP_TLS_CERT and TOLLKEEPER_HTTP_TLS_KEY, or unset it to accept every client";
            let what = "without TLS clients present no certificate";
            values.add_problem(&TOLLKEEPER_HTTP_TLS_CLIENT_CACERT, what, fix);
        }
        pair.into_listener_tls(values, authorities.map(|authorities| ClientAuth { authorities, san: None }))
    }
}

impl KeyPairFiles {
    /// Returns the TLS of a listener with these files; `None` without both. One without the other is a problem.
    fn into_listener_tls(self, values: &mut Values, clients: Option<ClientAuth>) -> Option<ListenerTls> {
        let Self { certificate_setting, certificate, key_setting, key } = self;
        match (certificate, key) {
            (Some(certificate), Some(key)) => return Some(ListenerTls { certificate, key, clients }),
            (Some(_), None) => {
                let fix = format!("give {}", key_setting.name());
                values.add_problem(certificate_setting, "the certificate has no key", fix);
            }
            (None, Some(_)) => {
                let fix = format!("give {}", certificate_setting.name());
                values.add_problem(key_setting, "the key has no certificate", fix);
            }
            (None, None) => {}
        }
        None
    }
}

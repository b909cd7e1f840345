//! How listeners are encrypted, and what clients may take of them.

use std::path::PathBuf;

use rustls::pki_types::ServerName;

use super::Values;
use crate::settings::bounds::Bounds;
use crate::settings::tls::{Clients, File, Tls};

impl Values {
    /// TLS of the gRPC listener, by the names of envoyproxy/ratelimit.
    ///
    /// Whoever asks for certificates of clients without TLS would be open to everybody: that stops the start.
    pub(super) fn grpc_tls(&mut self) -> Option<Tls> {
        const SWITCH: &str = "GRPC_SERVER_USE_TLS";
        const CERTIFICATE: &str = "GRPC_SERVER_TLS_CERT";
        const KEY: &str = "GRPC_SERVER_TLS_KEY";
        const AUTHORITY: &str = "GRPC_CLIENT_TLS_CACERT";
        const NAME: &str = "GRPC_CLIENT_TLS_SAN";
        let (certificate, key, authority) = (self.file(CERTIFICATE), self.file(KEY), self.file(AUTHORITY));
        let name = Some(self.text(NAME)).filter(|name| !name.is_empty());
        if !self.bool(SWITCH) {
            for name in [CERTIFICATE, KEY] {
                self.idle(name, "it is only read with GRPC_SERVER_USE_TLS=true");
            }
            for (name, is_set) in [(AUTHORITY, authority.is_some()), (NAME, name.is_some())] {
                if is_set {
                    let fix = "set GRPC_SERVER_USE_TLS=true, or unset it to let everybody in";
                    self.problem(name, "no client is asked for a certificate without TLS", fix);
                }
            }
            return None;
        }
        if certificate.is_none() && key.is_none() {
            let fix = "give GRPC_SERVER_TLS_CERT and GRPC_SERVER_TLS_KEY";
            self.problem(SWITCH, "there is no certificate to serve with", fix);
        }
        if name.is_some() && authority.is_none() {
            let fix = "give GRPC_CLIENT_TLS_CACERT, the authority that signed it";
            self.problem(NAME, "no client is asked for a certificate", fix);
        }
        if name.as_deref().is_some_and(|name| ServerName::try_from(name).is_err()) {
            self.problem(NAME, "not a name that a certificate can hold", "give one DNS name, without a wildcard");
        }
        let name = name.map(|name| (NAME, name));
        let clients = authority.map(|authorities| Clients { authorities, name });
        self.pair((CERTIFICATE, certificate), (KEY, key), clients)
    }

    /// TLS of the listener for `/json` and the health pages.
    pub(super) fn http_tls(&mut self) -> Option<Tls> {
        const CERTIFICATE: &str = "TOLLKEEPER_HTTP_TLS_CERT";
        const KEY: &str = "TOLLKEEPER_HTTP_TLS_KEY";
        const AUTHORITY: &str = "TOLLKEEPER_HTTP_TLS_CLIENT_CACERT";
        let (certificate, key, authority) = (self.file(CERTIFICATE), self.file(KEY), self.file(AUTHORITY));
        if authority.is_some() && certificate.is_none() && key.is_none() {
            let fix = "give TOLLKEEPER_HTTP_TLS_CERT and TOLLKEEPER_HTTP_TLS_KEY, or unset it to let everybody in";
            self.problem(AUTHORITY, "no client is asked for a certificate without TLS", fix);
        }
        let clients = authority.map(|authorities| Clients { authorities, name: None });
        self.pair((CERTIFICATE, certificate), (KEY, key), clients)
    }

    /// A certificate and its key: both or none.
    fn pair(
        &mut self,
        (certificate_name, certificate): (&'static str, Option<File>),
        (key_name, key): (&'static str, Option<File>),
        clients: Option<Clients>,
    ) -> Option<Tls> {
        match (certificate, key) {
            (Some(certificate), Some(key)) => Some(Tls { certificate, key, clients }),
            (Some(_), None) => {
                self.problem(certificate_name, "the certificate has no key", &format!("give {key_name}"));
                None
            }
            (None, Some(_)) => {
                self.problem(key_name, "the key has no certificate", &format!("give {certificate_name}"));
                None
            }
            (None, None) => None,
        }
    }

    /// The file that a variable names, if it names one.
    pub(super) fn file(&self, setting: &'static str) -> Option<File> {
        Some(self.path(setting)).filter(|path| *path != PathBuf::new()).map(|path| File { setting, path })
    }

    /// What clients may take.
    pub(super) fn bounds(&self) -> Bounds {
        let most = |name| Some(self.int(name)).filter(|most| *most > 0);
        Bounds {
            connections: most("TOLLKEEPER_MAX_CONNECTIONS"),
            connections_per_address: most("TOLLKEEPER_MAX_CONNECTIONS_PER_ADDRESS"),
            requests: most("TOLLKEEPER_MAX_CONCURRENT_REQUESTS"),
            requests_per_address: most("TOLLKEEPER_MAX_CONCURRENT_REQUESTS_PER_ADDRESS"),
            head_bytes: u32::try_from(self.bytes("TOLLKEEPER_MAX_HEADER_BYTES")).unwrap_or(u32::MAX),
            head_timeout: self.duration("TOLLKEEPER_HEAD_TIMEOUT"),
            idle_timeout: self.time("TOLLKEEPER_IDLE_TIMEOUT"),
        }
    }
}

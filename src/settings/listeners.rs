//! Addresses to listen on, and who may use the debug listener.

use std::path::PathBuf;

use super::address::{Address, Host};
use super::secret::Secret;
use super::setting::Setting;
use super::table::listeners::*;
use super::tls::ListenerTls;
use super::values::Values;

/// Addresses to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listeners {
    /// Rate limit service and gRPC health service.
    pub grpc: GrpcListener,
    /// `/json` and the health pages.
    pub http: Address,
    /// `/rlconfig` and the other debug pages.
    pub debug: Address,
    /// TLS of the gRPC listener; `None` means plaintext.
    pub grpc_tls: Option<ListenerTls>,
    /// TLS of the HTTP listener; `None` means plaintext.
    pub http_tls: Option<ListenerTls>,
}

/// Address of the rate limit service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrpcListener {
    /// A TCP port.
    Tcp(Address),
    /// A unix socket at this path.
    Unix(PathBuf),
}

impl Listeners {
    pub(super) fn read(values: &mut Values) -> Self {
        let address =
            |host: &Setting<Host>, port: &Setting<u16>| Address { host: values.get(host), port: values.get(port) };
        let grpc = match values.get(&GRPC_UDS) {
            Some(path) => GrpcListener::Unix(path),
            None => GrpcListener::Tcp(address(&GRPC_HOST, &GRPC_PORT)),
        };
        let (http, debug) = (address(&HOST, &PORT), address(&DEBUG_HOST, &DEBUG_PORT));
        Self { grpc, http, debug, grpc_tls: ListenerTls::read_grpc(values), http_tls: ListenerTls::read_http(values) }
    }
}

/// Bearer token that admin requests to the debug listener must present.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminToken {
    /// The token itself, at least [`AdminToken::MIN_BYTES`] long.
    Text(Secret),
    /// A file that holds the token, read at each request.
    File(PathBuf),
}

impl AdminToken {
    /// Minimum length of a token in bytes, so that it cannot be guessed.
    pub const MIN_BYTES: usize = 16;

    pub(super) fn read(values: &mut Values) -> Option<Self> {
        let (token, file) = (values.get(&TOLLKEEPER_ADMIN_TOKEN), values.get(&TOLLKEEPER_ADMIN_TOKEN_FILE));
        if token.is_some() && file.is_some() {
            values.problem(&TOLLKEEPER_ADMIN_TOKEN_FILE, "set beside TOLLKEEPER_ADMIN_TOKEN", "give one of them");
        }
        if token.as_ref().is_some_and(|token| token.reveal().len() < Self::MIN_BYTES) {
            let fix = format!("give {} bytes or more, as from `openssl rand -hex 32`", Self::MIN_BYTES);
            values.problem(&TOLLKEEPER_ADMIN_TOKEN, "too short to be a secret", fix);
        }
        token.map(Self::Text).or_else(|| file.map(Self::File))
    }
}

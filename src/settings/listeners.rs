//! Addresses to listen on, and who may use the debug listener.

use std::path::PathBuf;

use super::address::{Address, Host};
use super::secret::Secret;
use super::setting::Setting;
use super::table::listeners::*;
use super::tls::ListenerTls;
use super::value::text::TextList;
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
    /// Names by which requests may address the debug listener, in lower case.
    pub debug_hosts: Vec<String>,
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
        let debug_hosts = debug_hosts(values);
        Self {
            grpc,
            http,
            debug,
            debug_hosts,
            grpc_tls: ListenerTls::read_grpc(values),
            http_tls: ListenerTls::read_http(values),
        }
    }
}

/// Names of `TOLLKEEPER_DEBUG_HOSTS`.
fn debug_hosts(values: &mut Values) -> Vec<String> {
    let TextList(names) = values.get(&TOLLKEEPER_DEBUG_HOSTS);
    let names: Vec<String> = names.iter().map(|name| name.trim().to_ascii_lowercase()).collect();
    if names.iter().any(|name| !matches!(Host::parse(name), Some(Host::Name(_)))) {
        let fix = "give host names without ports, such as console.example; IP addresses need none";
        values.problem(&TOLLKEEPER_DEBUG_HOSTS, "not a list of host names", fix);
    }
    names
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

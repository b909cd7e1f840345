//! Addresses to listen on, and who may use the debug listener.
//!
//! Decides: ports of the listeners; who gets reflection without a setting (a local address).

use std::path::PathBuf;

use super::address::{Address, Host};
use super::credentials::SecretVariables;
use super::secret::Secret;
use super::setting::{Setting, settings};
use super::tls::ListenerTls;
use super::value::text::TextList;
use super::values::Values;

settings! { "Listeners";
    GRPC_HOST: Host = "0.0.0.0", "address of the gRPC listener; 0.0.0.0: all, IPv4 and IPv6"
        .often_set();
    GRPC_PORT: u16 = "8081", "port of the gRPC listener; 0: any free one" .often_set();
    GRPC_UDS: Option<PathBuf> = "", "unix socket of the gRPC listener, instead of GRPC_HOST and GRPC_PORT";
    HOST: Host = "0.0.0.0", "address of the HTTP listener: /json, /healthcheck, /livez and /readyz" .often_set();
    PORT: u16 = "8080", "port of the HTTP listener; 0: any free one" .often_set();
    DEBUG_HOST: Host = "0.0.0.0", "address of the debug listener: /rlconfig, /stats, /top, /explain and more"
        .often_set();
    DEBUG_PORT: u16 = "6070", "port of the debug listener; 0: any free one"
        .differs("no /debug/pprof pages") .often_set();
    TOLLKEEPER_DEBUG_HOSTS: TextList = "",
        "host names of the debug listener, besides IP addresses, localhost and services";
    TOLLKEEPER_ADMIN_TOKEN: Option<Secret> = "",
        "bearer token for changes, key listing and taps on the debug listener; at least 16 bytes";
    TOLLKEEPER_ADMIN_TOKEN_FILE: Option<PathBuf> = "",
        "file that holds TOLLKEEPER_ADMIN_TOKEN, read at each admin request"
        .often_set();
}

/// Addresses to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listeners {
    /// Rate limit service and gRPC health service.
    pub grpc: GrpcListenAddress,
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

/// Address of the gRPC listener: a port, or a unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrpcListenAddress {
    /// A TCP port.
    Tcp(Address),
    /// A unix socket at this path.
    Unix(PathBuf),
}

impl GrpcListenAddress {
    /// Returns `true` if no other machine can connect. A name other than `localhost` is not looked up and counts as
    /// reachable.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Tcp(address) => match &address.host {
                Host::Wildcard => false,
                Host::Ip(ip) => ip.to_canonical().is_loopback(),
                Host::Name(name) => name.eq_ignore_ascii_case("localhost"),
            },
            Self::Unix(_) => true,
        }
    }
}

impl Listeners {
    pub(super) fn from_values(values: &mut Values) -> Self {
        let address =
            |host: &Setting<Host>, port: &Setting<u16>| Address { host: values.get(host), port: values.get(port) };
        // Manifests give a host and a port beside the socket, so these count as read.
        let tcp = address(&GRPC_HOST, &GRPC_PORT);
        let grpc = values.get(&GRPC_UDS).map_or(GrpcListenAddress::Tcp(tcp), GrpcListenAddress::Unix);
        let (http, debug) = (address(&HOST, &PORT), address(&DEBUG_HOST, &DEBUG_PORT));
        let debug_hosts = read_allowed_debug_hosts(values);
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

/// Reads the host names of `TOLLKEEPER_DEBUG_HOSTS`, in lower case.
fn read_allowed_debug_hosts(values: &mut Values) -> Vec<String> {
    let TextList(names) = values.get(&TOLLKEEPER_DEBUG_HOSTS);
    let names: Vec<String> = names.iter().map(|name| name.trim().to_ascii_lowercase()).collect();
    if names.iter().any(|name| !matches!(Host::parse(name), Some(Host::Name(_)))) {
        let fix = "give host names without ports, such as console.example; IP addresses need none";
        values.add_problem(&TOLLKEEPER_DEBUG_HOSTS, "not a list of host names", fix);
    }
    names
}

/// Bearer token that admin requests to the debug listener must present; a file is read at each request.
pub static ADMIN_TOKEN_VARIABLES: SecretVariables =
    SecretVariables { text: &TOLLKEEPER_ADMIN_TOKEN, file: &TOLLKEEPER_ADMIN_TOKEN_FILE };

//! Control plane that sends the rules over xDS.
//!
//! Decides: the largest message over xDS; headers, node and TLS to a control plane.

use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use rustls::pki_types::ServerName;

use super::address::{Address, Host};
use super::pem::{ClientCertificate, PemFile};
use super::rules::{CONFIG_TYPE, RuleSourceKind};
use super::secret::Secret;
use super::setting::settings;
use super::value::text::SecretUrl;
use super::values::Values;

settings! { "Rules over xDS", only read "with CONFIG_TYPE=GRPC_XDS_SOTW";
    CONFIG_GRPC_XDS_NODE_ID: String = "default", "node id, which selects the rules";
    CONFIG_GRPC_XDS_NODE_METADATA: String = "", "node metadata: k=v,k=v";
    CONFIG_GRPC_XDS_SERVER_URL: SecretUrl = "localhost:18000", "host:port of the xDS server" .often_set();
    CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL: Duration = "3s", "time between connection attempts"
        .without_effect("the delays of XDS_CLIENT_BACKOFF_* apply, as in envoyproxy/ratelimit");
    CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS: Option<Secret> = "", "headers of the stream: k:v,k:v";
    CONFIG_GRPC_XDS_SERVER_USE_TLS: bool = "false", "connect over TLS";
    CONFIG_GRPC_XDS_CLIENT_TLS_CERT: Option<PathBuf> = "",
        "client certificate for the xDS server (PEM); read for each connection"
        .only_read("with CONFIG_TYPE=GRPC_XDS_SOTW and CONFIG_GRPC_XDS_SERVER_USE_TLS=true");
    CONFIG_GRPC_XDS_CLIENT_TLS_KEY: Option<PathBuf> = "", "private key of the client certificate (PEM)"
        .only_read("with CONFIG_TYPE=GRPC_XDS_SOTW and CONFIG_GRPC_XDS_SERVER_USE_TLS=true");
    CONFIG_GRPC_XDS_SERVER_TLS_CACERT: Option<PathBuf> = "",
        "CA certificates for the xDS server beside the system's (PEM)"
        .only_read("with CONFIG_TYPE=GRPC_XDS_SOTW and CONFIG_GRPC_XDS_SERVER_USE_TLS=true");
    CONFIG_GRPC_XDS_SERVER_TLS_SAN: Option<String> = "",
        "name that the certificate of the xDS server must hold, instead of the host"
        .only_read("with CONFIG_TYPE=GRPC_XDS_SOTW and CONFIG_GRPC_XDS_SERVER_USE_TLS=true");
    XDS_CLIENT_BACKOFF_INITIAL_INTERVAL: Duration = "600ms", "first delay after a lost stream"
        .differs("10s there");
    XDS_CLIENT_BACKOFF_MAX_INTERVAL: Duration = "3s", "longest delay after a lost stream"
        .differs("60s there");
    XDS_CLIENT_BACKOFF_RANDOM_FACTOR: f64 = "0.66", "share of a delay by which it varies"
        .within("0 to 1");
    XDS_CLIENT_BACKOFF_JITTER: bool = "true", "randomize the delays";
    XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES: i64 = "0", "maximum size of a message; 0: 64 MiB"
        .differs("0 is 4 MiB there");
    TOLLKEEPER_XDS_CACHE: Option<PathBuf> = "",
        "file of the last accepted rules, for a start without the control plane";
}

/// Maximum size of a message if none is set.
const DEFAULT_MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Control plane that sends the rules.
#[derive(Clone, Debug, PartialEq)]
pub struct XdsSettings {
    /// Name or address.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Id by which the control plane selects the rules.
    pub node_id: String,
    /// Metadata of the node, by name.
    pub node_metadata: Vec<(String, String)>,
    /// Headers of the stream.
    pub headers: Vec<XdsHeader>,
    /// TLS; `None` means plaintext.
    pub tls: Option<XdsTls>,
    /// Delays after a lost stream.
    pub backoff: XdsBackoff,
    /// Maximum size of a message.
    pub max_message_bytes: usize,
    /// File that keeps the last accepted resources.
    pub cache: Option<PathBuf>,
}

/// A header of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdsHeader {
    /// Valid name, in lower case.
    pub name: String,
    /// Valid value.
    pub value: Secret,
}

/// TLS of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdsTls {
    /// CA certificates that are trusted beside the system's.
    pub ca: Option<PemFile>,
    /// Certificate to present.
    pub client: Option<ClientCertificate>,
    /// Name that the certificate of the server must hold; `None` means the host.
    pub san: Option<String>,
}

/// Delays after a lost stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct XdsBackoff {
    /// First delay.
    pub initial: Duration,
    /// Longest delay.
    pub max: Duration,
    /// Share of a delay by which it varies, from 0 to 1.
    pub random_factor: f64,
    /// `true` if delays vary.
    pub jitter: bool,
}

impl XdsSettings {
    /// Reads the settings; `None` if the rules are files.
    pub(super) fn from_values(values: &mut Values) -> Option<Self> {
        if values.get(&CONFIG_TYPE) != RuleSourceKind::Xds {
            return None;
        }
        let server = read_server_host_and_port(values);
        let initial = values.get(&XDS_CLIENT_BACKOFF_INITIAL_INTERVAL);
        let max = values.get(&XDS_CLIENT_BACKOFF_MAX_INTERVAL);
        // One of them may be set without the other.
        let is_max_set = values.is_set(&XDS_CLIENT_BACKOFF_MAX_INTERVAL);
        let (initial, max) = if is_max_set { (initial.min(max), max) } else { (initial, max.max(initial)) };
        let max_message_bytes = usize::try_from(values.get(&XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES)).unwrap_or_default();
        let settings = Self {
            host: String::new(),
            port: 0,
            node_id: values.get(&CONFIG_GRPC_XDS_NODE_ID),
            node_metadata: read_node_metadata(values),
            headers: read_headers(values),
            tls: read_tls(values),
            backoff: XdsBackoff {
                initial,
                max,
                random_factor: values.get(&XDS_CLIENT_BACKOFF_RANDOM_FACTOR),
                jitter: values.get(&XDS_CLIENT_BACKOFF_JITTER),
            },
            cache: values.get(&TOLLKEEPER_XDS_CACHE),
            max_message_bytes: if max_message_bytes == 0 { DEFAULT_MAX_MESSAGE_BYTES } else { max_message_bytes },
        };
        let (host, port) = server?;
        Some(Self { host, port, ..settings })
    }

    /// Returns `host:port`.
    pub fn server_address(&self) -> String {
        let brackets = self.host.contains(':');
        if brackets { format!("[{}]:{}", self.host, self.port) } else { format!("{}:{}", self.host, self.port) }
    }
}

/// Reads the address of the server: `host:port`, after `dns:///` too.
fn read_server_host_and_port(values: &mut Values) -> Option<(String, u16)> {
    let url = values.get(&CONFIG_GRPC_XDS_SERVER_URL);
    let text = url.reveal();
    let text = ["dns:///", "passthrough:///"].into_iter().find_map(|scheme| text.strip_prefix(scheme)).unwrap_or(text);
    let Some(Address { host, port: port @ 1.. }) = Address::parse(text) else {
        let what = "not an address";
        values.add_problem(&CONFIG_GRPC_XDS_SERVER_URL, what, "give host:port, with a port of 1 to 65535");
        return None;
    };
    let host = match host {
        Host::Wildcard => "localhost".to_owned(),
        Host::Ip(ip) => ip.to_string(),
        Host::Name(name) => name,
    };
    Some((host, port))
}

fn read_node_metadata(values: &mut Values) -> Vec<(String, String)> {
    let text = values.get(&CONFIG_GRPC_XDS_NODE_METADATA);
    match split_pairs(&text, '=') {
        Some(pairs) => pairs,
        None => {
            values.add_problem(&CONFIG_GRPC_XDS_NODE_METADATA, "not a map", "give key=value,key=value");
            Vec::new()
        }
    }
}

fn read_headers(values: &mut Values) -> Vec<XdsHeader> {
    let text = values.get(&CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS);
    let header = |(name, value): (String, String)| {
        let name = HeaderName::from_bytes(name.trim().as_bytes()).ok()?.as_str().to_owned();
        let is_text = !name.ends_with("-bin") && HeaderValue::from_str(&value).is_ok();
        is_text.then(|| XdsHeader { name, value: Secret::new(&value) })
    };
    let headers = split_pairs(text.as_ref().map_or("", Secret::reveal), ':');
    let headers = headers.and_then(|pairs| pairs.into_iter().map(header).collect());
    headers.unwrap_or_else(|| {
        let fix = "give name:value,name:value, with names and values that a header can hold";
        values.add_problem(&CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS, "not headers", fix);
        Vec::new()
    })
}

/// Splits pairs at the first `separator` of each; `None` if a pair has none.
fn split_pairs(text: &str, separator: char) -> Option<Vec<(String, String)>> {
    let pairs = text.split(',').filter(|_| !text.trim().is_empty());
    let pair = |pair: &str| pair.split_once(separator).map(|(name, value)| (name.to_owned(), value.to_owned()));
    pairs.map(pair).collect()
}

fn read_tls(values: &mut Values) -> Option<XdsTls> {
    if !values.get(&CONFIG_GRPC_XDS_SERVER_USE_TLS) {
        return None;
    }
    let ca = values.pem_file(&CONFIG_GRPC_XDS_SERVER_TLS_CACERT);
    let san = values.get(&CONFIG_GRPC_XDS_SERVER_TLS_SAN);
    if san.as_deref().is_some_and(|name| ServerName::try_from(name).is_err()) {
        let what = "not a name that a certificate can hold";
        values.add_problem(&CONFIG_GRPC_XDS_SERVER_TLS_SAN, what, "give one DNS name, without a wildcard");
    }
    let client = values.certificate_with_key(&CONFIG_GRPC_XDS_CLIENT_TLS_CERT, &CONFIG_GRPC_XDS_CLIENT_TLS_KEY);
    Some(XdsTls { ca, client, san })
}

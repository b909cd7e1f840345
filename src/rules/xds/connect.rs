//! Connection to the control plane.
//!
//! Each connection resolves the name and reads the certificates again. If the name has several addresses, one that does
//! not answer leaves time for the others. A dead server is found by TCP keepalive, not by HTTP/2 pings: servers
//! end connections of clients that ping more often than every 5 minutes.
//!
//! Decides: how a dead control plane is noticed (TCP keepalive); when certificates for it are read.

use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::Duration;

use axum::http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};
use tower::{ServiceExt as _, service_fn};

use crate::settings::pem::{collect_trusted_roots, finish_tls_client_config};
use crate::settings::problem::UnusableSetting;
use crate::settings::setting::AnySetting as _;
use crate::settings::xds::CONFIG_GRPC_XDS_SERVER_USE_TLS;
use crate::settings::xds::{XdsSettings, XdsTls};

/// Upper bound on resolving, connecting and the TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Time without data after which the kernel probes the connection.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);

/// Interval of further probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// Time after which the kernel closes a connection with unacknowledged data or probes.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(20);

/// Returns the addresses of a host; may block.
pub type ResolveHost = fn(&str) -> io::Result<Vec<IpAddr>>;

/// Asks the system's resolver.
///
/// # Errors
/// The host has no address, or the resolver fails.
pub fn resolve_host(host: &str) -> io::Result<Vec<IpAddr>> {
    Ok((host, 0).to_socket_addrs()?.map(|address| address.ip()).collect())
}

/// Connects to the control plane, or gives up after 3 s.
///
/// # Errors
/// The reason, with the setting to check.
pub async fn connect_to_control_plane(settings: &XdsSettings, resolve: ResolveHost) -> Result<Channel, String> {
    tokio::select! {
        biased;
        () = sleep(CONNECT_TIMEOUT) => Err(format!("no connection within {} s", CONNECT_TIMEOUT.as_secs())),
        opened = open_tls_and_http2_channel(settings, resolve) => opened,
    }
}

/// Opens a channel: TCP, TLS if it is set, then HTTP/2.
async fn open_tls_and_http2_channel(settings: &XdsSettings, resolve: ResolveHost) -> Result<Channel, String> {
    let server = settings.server_address();
    let tls = settings.tls.as_ref().map(build_tls_config).transpose().map_err(|error| error.to_string())?;
    let stream = open_tcp(&server, resolve).await?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let origin = format!("{scheme}://{server}").parse().map_err(|error| format!("{server}: {error}"))?;
    let endpoint = Endpoint::from_shared(format!("http://{server}")).map_err(|error| format_error_chain(&error))?;
    let endpoint = endpoint.origin(origin);
    let opened = match tls {
        None => start_http2_on_stream(&endpoint, stream).await,
        Some(config) => {
            let name = tls_server_name(settings)?;
            let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
            start_http2_on_stream(&endpoint, stream.map_err(|error| format!("the TLS handshake failed: {error}"))?)
                .await
        }
    };
    opened.map_err(|error| format_error_chain(&error))
}

/// Connects to the first address of `server`, `host:port`, that answers.
pub async fn open_tcp(server: &str, resolve: ResolveHost) -> Result<TcpStream, String> {
    let addresses = service_fn(move |name: Name| async move {
        let addresses = spawn_blocking(move || resolve(name.as_str())).await.map_err(io::Error::other)??;
        Ok::<_, io::Error>(addresses.into_iter().map(|ip| SocketAddr::new(ip, 0)))
    });
    let mut connector = HttpConnector::new_with_resolver(addresses);
    // Addresses of one family share this time.
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    connector.set_nodelay(true);
    connector.set_keepalive(Some(KEEPALIVE_IDLE));
    connector.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    #[cfg(target_os = "linux")]
    connector.set_tcp_user_timeout(Some(TCP_USER_TIMEOUT));
    let uri: Uri = format!("http://{server}").parse().map_err(|error| format!("{server}: {error}"))?;
    let stream = connector.oneshot(uri).await.map_err(|error| format_error_chain(&error))?;
    Ok(stream.into_inner())
}

/// Builds an HTTP/2 channel over an open connection.
async fn start_http2_on_stream(
    endpoint: &Endpoint,
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
) -> Result<Channel, tonic::transport::Error> {
    let mut opened = Some(TokioIo::new(stream));
    let connector = service_fn(move |_| {
        // A channel is used until its connection is lost.
        let stream = opened.take().ok_or_else(|| io::Error::other("the connection is lost"));
        async move { stream }
    });
    endpoint.connect_with_connector(connector).await
}

fn tls_server_name(settings: &XdsSettings) -> Result<ServerName<'static>, String> {
    let name = settings.tls.as_ref().and_then(|tls| tls.san.clone()).unwrap_or_else(|| settings.host.clone());
    ServerName::try_from(name.clone()).map_err(|_| format!("{name} is not a name that a certificate can hold"))
}

/// Reads the certificates, and builds the TLS configuration of the client from them.
///
/// # Errors
/// The setting to change.
pub fn build_tls_config(tls: &XdsTls) -> Result<ClientConfig, UnusableSetting> {
    let roots = collect_trusted_roots(tls.ca.as_ref())?;
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| UnusableSetting {
            setting: CONFIG_GRPC_XDS_SERVER_USE_TLS.name(),
            shown: "true".to_owned(),
            what: error.to_string(),
        })?
        .with_root_certificates(roots);
    let mut config = finish_tls_client_config(builder, tls.client.as_ref())?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

/// Formats an error with its causes.
pub fn format_error_chain(error: &(dyn Error + 'static)) -> String {
    append_causes(error.to_string(), error.source())
}

/// Appends the causes of an error to its text.
pub(super) fn append_causes(mut text: String, mut cause: Option<&(dyn Error + 'static)>) -> String {
    while let Some(error) = cause {
        let next = error.to_string();
        // Some errors repeat their cause.
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

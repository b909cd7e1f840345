//! TLS flags of the commands that connect to a server.
//!
//! Files are read and validated before connecting, so that a mistake in a flag is reported as such. The system's CA
//! certificates are trusted beside those of a file.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use tonic::transport::{ClientTlsConfig, Identity};

use crate::settings::address::Target;
use crate::settings::pem::{ClientCertificate, PemFile, trusted_roots, with_client_certificate};

/// TLS flags.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub(super) struct TlsArgs {
    /// Connect over TLS; a CA of the system or of --ca must have signed the server's certificate
    #[arg(long)]
    tls: bool,
    /// PEM file with CA certificates to trust beside the system's
    #[arg(long, value_name = "FILE", requires = "tls")]
    ca: Option<PathBuf>,
    /// PEM file with the client certificate, for servers that require one
    #[arg(long, value_name = "FILE", requires = "tls", requires = "key")]
    cert: Option<PathBuf>,
    /// PEM file with the private key of the client certificate
    #[arg(long, value_name = "FILE", requires = "tls", requires = "cert")]
    key: Option<PathBuf>,
    /// Name that the server's certificate must hold, if it is not the host of --addr
    #[arg(long, value_name = "NAME", requires = "tls")]
    server_name: Option<String>,
}

impl TlsArgs {
    /// Reads the files for TLS with `target`; `None` without --tls. The error names the flag.
    pub(super) fn read(&self, target: &Target) -> Result<Option<ClientTls>, String> {
        let file = |setting, path: &Option<PathBuf>| path.clone().map(|path| PemFile { setting, path });
        let certificate = file("--cert", &self.cert);
        let identity = certificate.zip(file("--key", &self.key));
        let identity = identity.map(|(certificate, key)| ClientCertificate { certificate, key });
        let files = TlsFiles { switch: "--tls", ca: file("--ca", &self.ca), identity };
        self.tls.then(|| ClientTls::read(&files, target, self.server_name.as_deref())).transpose()
    }
}

/// Files for TLS, each with the flag that names it.
pub(super) struct TlsFiles {
    /// Flag that turns on TLS.
    pub(super) switch: &'static str,
    /// CA certificates to trust beside the system's.
    pub(super) ca: Option<PemFile>,
    /// Client certificate and its key.
    pub(super) identity: Option<ClientCertificate>,
}

/// TLS configuration for one server.
#[derive(Clone, Debug)]
pub(super) struct ClientTls {
    /// Configuration for `tokio_rustls`.
    pub(super) config: Arc<ClientConfig>,
    /// Name that the server's certificate must hold.
    pub(super) server_name: ServerName<'static>,
    /// Configuration for tonic.
    pub(super) tonic_config: ClientTlsConfig,
    /// `true` if there is a client certificate.
    has_client_certificate: bool,
}

impl ClientTls {
    /// Reads the files; `name` takes precedence over the target's host.
    pub(super) fn read(files: &TlsFiles, target: &Target, name: Option<&str>) -> Result<Self, String> {
        let host = match target {
            Target::Tcp(address) => address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host),
            Target::Unix(_) => {
                return Err(format!("{}: TLS needs HOST:PORT; remove it for {target}", files.switch));
            }
        };
        let name = match name {
            Some(name) => ServerName::try_from(name).map_err(|_| {
                format!("--server-name={name}: not a valid name for a certificate; give a DNS name or an IP")
            })?,
            None => ServerName::try_from(host.trim_matches(['[', ']']))
                .map_err(|_| format!("{target}: not a valid host for a certificate; give a DNS name or an IP"))?,
        };
        let roots = trusted_roots(files.ca.as_ref())?;
        let tonic_config = ClientTlsConfig::new().trust_anchors(roots.roots.iter().cloned()).domain_name(name.to_str());
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("{}: {error}", files.switch))?
            .with_root_certificates(roots);
        let mut config = with_client_certificate(builder, files.identity.as_ref())?;
        let tonic_config = match &files.identity {
            None => tonic_config,
            Some(ClientCertificate { certificate, key }) => {
                tonic_config.identity(Identity::from_pem(certificate.contents()?, key.contents()?))
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        let (config, server_name) = (Arc::new(config), name.to_owned());
        Ok(Self { config, server_name, tonic_config, has_client_certificate: files.identity.is_some() })
    }

    /// Suggests what to check after a server ended the connection for this reason.
    pub(super) fn hint(&self, why: &str) -> &'static str {
        if why.contains("peer certificate") {
            "see --ca and --server-name"
        } else if why.contains("corrupt message") {
            "the server may not use TLS"
        } else if self.has_client_certificate {
            "the server may reject the certificate of --cert"
        } else {
            "the server may require a client certificate; see --cert"
        }
    }
}

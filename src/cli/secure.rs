//! TLS of the commands that connect to a server: the flags, and what is made of the files that they name.
//!
//! Files are read and checked before anything is dialled, so that a mistake in a flag is told as one. The authorities
//! of the system are trusted as well as those of a file.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use tonic::transport::{ClientTlsConfig, Identity};

use crate::settings::pem::{PemFile, trusted_roots};
use crate::settings::target::Target;

/// How to speak TLS.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub(super) struct Args {
    /// Speak TLS; the server's certificate must be signed by an authority of the system or of --ca
    #[arg(long)]
    tls: bool,
    /// PEM file of authorities to trust
    #[arg(long, value_name = "FILE", requires = "tls")]
    ca: Option<PathBuf>,
    /// PEM file of the certificate to show to a server that asks for one
    #[arg(long, value_name = "FILE", requires = "tls", requires = "key")]
    cert: Option<PathBuf>,
    /// PEM file of its private key
    #[arg(long, value_name = "FILE", requires = "tls", requires = "cert")]
    key: Option<PathBuf>,
    /// The name that the server's certificate must hold, if it is not the host of --addr
    #[arg(long, value_name = "NAME", requires = "tls")]
    server_name: Option<String>,
}

impl Args {
    /// How to speak TLS with `target`, if it is asked for. The error names the flag.
    pub(super) fn tls(&self, target: &Target) -> Result<Option<Tls>, String> {
        let file = |setting, path: &Option<PathBuf>| path.clone().map(|path| PemFile { setting, path });
        let identity = file("--cert", &self.cert).zip(file("--key", &self.key));
        let files = Files { switch: "--tls", ca: file("--ca", &self.ca), identity };
        self.tls.then(|| Tls::read(&files, target, self.server_name.as_deref())).transpose()
    }
}

/// The files for TLS, each with the flag that names it.
pub(super) struct Files {
    /// The flag that asks for TLS.
    pub(super) switch: &'static str,
    /// Authorities to trust besides those of the system.
    pub(super) ca: Option<PemFile>,
    /// The certificate to show, and its key.
    pub(super) identity: Option<(PemFile, PemFile)>,
}

/// How to speak TLS with one server.
#[derive(Clone, Debug)]
pub(super) struct Tls {
    /// For a client that dials by itself.
    pub(super) config: Arc<ClientConfig>,
    /// The name that the server's certificate must hold.
    pub(super) name: ServerName<'static>,
    /// The same for tonic.
    pub(super) of_tonic: ClientTlsConfig,
    /// Whether a certificate is shown.
    shows_certificate: bool,
}

impl Tls {
    /// Reads the files. `name` goes before the target's host.
    pub(super) fn read(files: &Files, target: &Target, name: Option<&str>) -> Result<Self, String> {
        let host = match target {
            Target::Tcp(address) => address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host),
            Target::Unix(_) => {
                return Err(format!("{}: TLS is for HOST:PORT only; leave it out for {target}", files.switch));
            }
        };
        let name = match name {
            Some(name) => ServerName::try_from(name)
                .map_err(|_| format!("--server-name={name}: no certificate can hold that; give a DNS name or an IP"))?,
            None => ServerName::try_from(host.trim_matches(['[', ']']))
                .map_err(|_| format!("{target}: no certificate can hold this host; give a DNS name or an IP"))?,
        };
        let roots = trusted_roots(files.ca.as_ref())?;
        let of_tonic = ClientTlsConfig::new().trust_anchors(roots.roots.iter().cloned()).domain_name(name.to_str());
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("{}: {error}", files.switch))?
            .with_root_certificates(roots);
        let (mut config, of_tonic) = match &files.identity {
            None => (builder.with_no_client_auth(), of_tonic),
            Some((certificate, key)) => {
                let (chain, secret) = (certificate.contents()?, key.contents()?);
                let config = builder
                    .with_client_auth_cert(certificate.certificates(&chain)?, key.private_key(&secret)?)
                    .map_err(|error| key.key_mismatch(certificate, &error))?;
                (config, of_tonic.identity(Identity::from_pem(chain, secret)))
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        let (config, name) = (Arc::new(config), name.to_owned());
        Ok(Self { config, name, of_tonic, shows_certificate: files.identity.is_some() })
    }

    /// What to look at once a connection ended for this reason, with a server that is there.
    pub(super) fn advice(&self, why: &str) -> &'static str {
        if why.contains("peer certificate") {
            "see --ca and --server-name"
        } else if why.contains("corrupt message") {
            "perhaps the server speaks no TLS"
        } else if self.shows_certificate {
            "perhaps the server does not take the certificate of --cert"
        } else {
            "perhaps the server wants a certificate; see --cert"
        }
    }
}

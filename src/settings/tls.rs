//! How listeners are encrypted, whom they let in, and the files and authorities that TLS is made of.
//!
//! Files are named, not read: who listens or connects reads them when it needs them, again and again where certificates
//! can be replaced. What is wrong with one is said in the same words everywhere, `NAME=path: what`, the name being what
//! a person gave the path by: a variable, or a flag.

use std::fmt::Display;
use std::fs;
use std::io::Read as _;
use std::path::PathBuf;
use std::sync::LazyLock;

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// How a listener is encrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// The chain of certificates that it shows, its own first; PEM.
    pub certificate: File,
    /// The private key of the first; PEM, not encrypted.
    pub key: File,
    /// Whose certificate a client must show; `None`: it needs none.
    pub clients: Option<Clients>,
}

/// Clients that are let in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clients {
    /// The authorities that may have signed their certificates; PEM.
    pub authorities: File,
    /// The name that they must hold, and the variable that says so; `None`: any.
    pub name: Option<(&'static str, String)>,
}

/// A file that a variable or a flag names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// The variable or the flag.
    pub setting: &'static str,
    /// The file.
    pub path: PathBuf,
}

/// A larger file is a mistake, in bytes.
const LARGEST_BYTES: u64 = 1 << 20;

impl File {
    /// What is in it.
    pub(crate) fn contents(&self) -> Result<Vec<u8>, String> {
        let mut contents = Vec::new();
        let read = fs::File::open(&self.path).and_then(|open| open.take(LARGEST_BYTES + 1).read_to_end(&mut contents));
        match read {
            Ok(length) if length as u64 > LARGEST_BYTES => Err(self.wrong("larger than 1 MiB; give a PEM file")),
            Ok(_) => Ok(contents),
            Err(error) => Err(self.wrong(format_args!("it can not be read: {error}"))),
        }
    }

    /// The certificates in `pem`, which are its contents; at least one.
    pub(crate) fn certificates(&self, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
        match found {
            Ok(found) if found.is_empty() => Err(self.wrong("no certificate in it; give one as PEM")),
            Ok(found) => Ok(found),
            Err(error) => Err(self.wrong(format_args!("not PEM: {error}"))),
        }
    }

    /// Adds the certificates in `pem`, which are its contents, to the authorities that are trusted.
    pub(crate) fn add_authorities(&self, pem: &[u8], roots: &mut RootCertStore) -> Result<(), String> {
        for certificate in self.certificates(pem)? {
            let added = roots.add(certificate);
            added.map_err(|error| self.wrong(format_args!("not a certificate of an authority: {error}")))?;
        }
        Ok(())
    }

    /// The private key in `pem`, which is its contents.
    pub(crate) fn private_key(&self, pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
        PrivateKeyDer::from_pem_slice(pem)
            .map_err(|_| self.wrong("no private key in it; give one as PEM that needs no password"))
    }

    /// Why a key can not be used with a certificate; this is the key's file.
    pub(crate) fn misfit(&self, certificate: &Self, error: &rustls::Error) -> String {
        match error {
            rustls::Error::InconsistentKeys(_) => {
                self.wrong(format_args!("not the key of {}; give the pair", certificate.setting))
            }
            error => self.wrong(format_args!("the key can not be used: {error}")),
        }
    }

    /// `NAME=path: what`, as all problems with settings are told.
    pub(crate) fn wrong(&self, what: impl Display) -> String {
        format!("{}={}: {what}", self.setting, self.path.display())
    }
}

/// The system's authorities, read once: there are many, and a dial must not take long. Some may be unusable.
pub(crate) fn of_system() -> &'static [CertificateDer<'static>] {
    static SYSTEM: LazyLock<Vec<CertificateDer<'static>>> =
        LazyLock::new(|| rustls_native_certs::load_native_certs().certs);
    &SYSTEM
}

/// What a client trusts: the system's authorities, and those of the file.
pub(crate) fn trusted(ca: Option<&File>) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(of_system().iter().cloned());
    if let Some(ca) = ca {
        ca.add_authorities(&ca.contents()?, &mut roots)?;
    }
    Ok(roots)
}

//! How listeners are encrypted, and whom they let in.
//!
//! Files are named, not read: whoever listens reads them, again and again, so that certificates can be replaced.

use std::path::PathBuf;

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

/// A file that a variable names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// The variable.
    pub setting: &'static str,
    /// The file.
    pub path: PathBuf,
}

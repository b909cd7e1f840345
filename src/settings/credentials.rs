//! User and password of a server.
//!
//! Credentials are never shown, not even by `Debug`: with one colon too many, part of a password becomes the user.
//! Files are named, not read; connections read them.

use std::fmt;
use std::path::PathBuf;

use super::secret::Secret;

/// Credentials for a server.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    /// No credentials.
    None,
    /// Credentials from the environment.
    Inline {
        /// The user; `None` means the default user.
        user: Option<String>,
        /// Its password.
        password: Secret,
    },
    /// A file with `password` or `user:password`, with or without a line break at the end, read at each use.
    File(PathBuf),
}

impl Credentials {
    /// Parses `password`, or `user:password`, split at the first colon. `None` if there is neither.
    pub fn parse(text: &str) -> Option<Self> {
        let (user, password) = text.split_once(':').unwrap_or(("", text));
        let user = (!user.is_empty()).then(|| user.to_owned());
        // A user may need no password.
        (user.is_some() || !password.is_empty()).then(|| Self::Inline { user, password: Secret::new(password) })
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Inline { password, .. } => write!(f, "Inline({password:?})"),
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
        }
    }
}

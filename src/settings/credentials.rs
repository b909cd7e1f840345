//! User and password of a server, from a variable, a file or a URL.
//!
//! Credentials are never shown, not even by `Debug`: with one colon too many, part of a password becomes the user.
//! Files are named, not read; connections read them (`store::client::redis::connect`).
//!
//! Decides: which user and password are used, and which wins: variable, file or URL.

use std::fmt;
use std::path::PathBuf;

use super::cloud_identity::{CloudIdentity, IdentityVariables};
use super::secret::Secret;
use super::setting::{AnySetting as _, Setting};
use super::value::text::SecretUrl;
use super::values::Values;

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
    /// Credentials in a file.
    File(CredentialFile),
    /// Tokens of an identity that a cloud gives.
    Identity(Box<CloudIdentity>),
}

/// File with `password` or `user:password`, with or without a line break at the end, read at each use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialFile {
    /// Variable that names the file, for messages.
    pub setting: &'static str,
    /// The file.
    pub path: PathBuf,
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
            Self::File(file) => f.debug_tuple("File").field(file).finish(),
            Self::Identity(identity) => f.debug_tuple("Identity").field(&identity.setting).finish(),
        }
    }
}

/// The variables that give the credentials for servers or sentinels.
pub(crate) struct CredentialVariables {
    /// The credentials themselves; `None` if no variable gives them.
    pub(crate) auth: Option<&'static Setting<Option<Secret>>>,
    /// File that holds them; `None` if no variable names one.
    pub(crate) file: Option<&'static Setting<Option<PathBuf>>>,
    /// Variables of an identity that logs in instead; `None` if there are none.
    pub(crate) identity: Option<&'static IdentityVariables>,
}

impl CredentialVariables {
    /// Reads the credentials of the variables, or else returns those of the URL.
    pub(crate) fn read_credentials(
        &self,
        values: &mut Values,
        in_url: Credentials,
        url: &Setting<SecretUrl>,
    ) -> Credentials {
        let auth = self.auth.and_then(|setting| Some((setting, values.get(setting)?)));
        let file = self.file.and_then(|setting| Some((setting, values.get(setting)?)));
        if let Some(identity) = self.identity.and_then(|variables| variables.read_identity(values)) {
            let of_url = (in_url != Credentials::None).then(|| url.name());
            let given = auth.map(|(setting, _)| setting.name()).or(file.map(|(setting, _)| setting.name())).or(of_url);
            if let Some(given) = given {
                let what = format!("{given} gives a password too");
                values.add_problem_with_name(identity.setting, what, "unset one of them");
            }
            return Credentials::Identity(Box::new(identity));
        }
        if let Some((setting, path)) = file {
            if let Some((auth, _)) = auth {
                values.add_problem(setting, format!("{} is set too", auth.name()), "unset one of them");
            } else if in_url != Credentials::None {
                let what = format!("{} holds a password too", url.name());
                values.add_problem(setting, what, "leave it to the file, which may say user:password");
            }
            return Credentials::File(CredentialFile { setting: setting.name(), path });
        }
        let Some((setting, secret)) = auth else { return in_url };
        if in_url != Credentials::None {
            values.add_notice(url, format!("holds a password, which {} overrides", setting.name()));
        }
        if secret.reveal().ends_with(['\n', '\r']) {
            values.add_problem(setting, "it ends in a line break", "remove it");
        }
        Credentials::parse(secret.reveal()).unwrap_or_else(|| {
            values.add_problem(setting, "it holds no password", "give password or user:password");
            Credentials::None
        })
    }
}

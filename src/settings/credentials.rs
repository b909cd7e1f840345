//! User and password of a server, from a variable, a file or a URL; and secrets of this process.
//!
//! Credentials are never shown, not even by `Debug`: with one colon too many, part of a password becomes the user.
//! Files of passwords are named, not read; connections read them (`store::client::redis::connect`).
//!
//! Decides: which user and password are used, and which wins: variable, file or URL.
//! Decides: the shortest admin token and hash key (`MIN_BYTES`).

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::PathBuf;

use super::cloud_identity::{CloudIdentity, IdentityVariables};
use super::problem::UnusableSetting;
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
    file: Option<&'static Setting<Option<PathBuf>>>,
    /// Variables of an identity that logs in instead; `None` if there are none.
    identity: Option<&'static IdentityVariables>,
}

impl CredentialVariables {
    /// Variables of the credentials themselves, and of a file that holds them.
    pub(crate) const fn new(
        auth: Option<&'static Setting<Option<Secret>>>,
        file: Option<&'static Setting<Option<PathBuf>>>,
    ) -> Self {
        Self { auth, file, identity: None }
    }

    /// Adds the variables of an identity that logs in instead.
    pub(crate) const fn or_identity(self, identity: &'static IdentityVariables) -> Self {
        Self { identity: Some(identity), ..self }
    }

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

/// A secret of this process, in a variable or in a file that another variable names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretSource {
    /// The secret itself, at least [`SecretSource::MIN_BYTES`] long.
    Text(Secret),
    /// A file that holds it.
    File(CredentialFile),
}

/// The two variables of a secret.
pub struct SecretVariables {
    pub(crate) text: &'static Setting<Option<Secret>>,
    pub(crate) file: &'static Setting<Option<PathBuf>>,
}

impl SecretVariables {
    /// Returns `true` for the name of one of the variables.
    pub(crate) fn has_name(&self, name: &OsString) -> bool {
        name == self.text.name() || name == self.file.name()
    }

    /// Reads where the secret is; `None` if neither variable is set.
    pub(crate) fn read_source(&self, values: &mut Values) -> Option<SecretSource> {
        let (text, file) = (values.get(self.text), values.get(self.file));
        if text.is_some() && file.is_some() {
            values.add_problem(self.file, format!("set beside {}", self.text.name()), "give one of them");
        }
        if text.as_ref().is_some_and(|text| text.reveal().len() < SecretSource::MIN_BYTES) {
            let fix = format!("give {} bytes or more, as from `openssl rand -hex 32`", SecretSource::MIN_BYTES);
            values.add_problem(self.text, "too short to be a secret", fix);
        }
        let file = file.map(|path| CredentialFile { setting: self.file.name(), path });
        text.map(SecretSource::Text).or(file.map(SecretSource::File))
    }
}

impl SecretSource {
    /// Minimum length of a secret in bytes, so that it cannot be guessed.
    pub const MIN_BYTES: usize = 16;
    /// Maximum size of a file in bytes.
    const MAX_FILE_BYTES: u64 = 4096;

    /// Returns the secret; white space at the end of a file is ignored.
    ///
    /// # Errors
    /// The file cannot be read, or holds less than [`SecretSource::MIN_BYTES`] or more than 4096 bytes.
    pub fn load_secret(&self) -> Result<Secret, UnusableSetting> {
        let CredentialFile { setting, path } = match self {
            Self::Text(secret) => return Ok(secret.clone()),
            Self::File(file) => file,
        };
        let unusable = |what: String| UnusableSetting { setting, shown: path.display().to_string(), what };
        let mut text = String::new();
        let read = File::open(path).and_then(|file| file.take(Self::MAX_FILE_BYTES + 1).read_to_string(&mut text));
        read.map_err(|error| unusable(format!("cannot be read: {error}; name a readable file")))?;
        let secret = text.trim_end();
        if secret.len() < Self::MIN_BYTES || text.len() as u64 > Self::MAX_FILE_BYTES {
            let (min, max) = (Self::MIN_BYTES, Self::MAX_FILE_BYTES);
            return Err(unusable(format!("holds {} bytes; give {min} to {max}", text.len())));
        }
        Ok(Secret::new(secret))
    }
}

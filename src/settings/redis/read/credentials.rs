//! Reading of credentials for Redis, from variables, files and URLs.

use std::path::PathBuf;

use crate::settings::credentials::Credentials;
use crate::settings::secret::Secret;
use crate::settings::setting::{AnySetting as _, Setting};
use crate::settings::url::Url;
use crate::settings::value::text::SecretUrl;
use crate::settings::values::Values;

/// Settings of the credentials for servers or sentinels.
pub(super) struct CredentialSettings {
    pub(super) auth: &'static Setting<Option<Secret>>,
    pub(super) file: &'static Setting<Option<PathBuf>>,
}

impl CredentialSettings {
    /// Reads the credentials of the variables, or else returns those of the URL.
    pub(super) fn read(&self, values: &mut Values, in_url: Credentials, url: &Setting<SecretUrl>) -> Credentials {
        let (secret, path) = (values.get(self.auth), values.get(self.file));
        if let Some(path) = path {
            if secret.is_some() {
                values.problem(self.file, format!("{} is set too", self.auth.name()), "unset one of them");
            } else if in_url != Credentials::None {
                let what = format!("{} holds a password too", url.name());
                values.problem(self.file, what, "leave it to the file, which may say user:password");
            }
            return Credentials::File(path);
        }
        let Some(secret) = secret else { return in_url };
        if in_url != Credentials::None {
            values.notice(url, format!("holds a password, which {} overrides", self.auth.name()));
        }
        if secret.reveal().ends_with(['\n', '\r']) {
            values.problem(self.auth, "it ends in a line break", "remove it");
        }
        Credentials::parse(secret.reveal()).unwrap_or_else(|| {
            values.problem(self.auth, "it holds no password", "give password or user:password");
            Credentials::None
        })
    }
}

/// Returns the credentials in the addresses of a URL, which must all have the same.
pub(super) fn same_credentials(
    values: &mut Values,
    url: &Setting<SecretUrl>,
    urls: &[&Url],
    login: &CredentialSettings,
) -> Credentials {
    let mut given = urls.iter().map(|url| &url.credentials).filter(|credentials| **credentials != Credentials::None);
    let first = given.next().cloned().unwrap_or(Credentials::None);
    if given.any(|other| *other != first) {
        let fix = format!("give the same to all, or leave them out and give {}", login.auth.name());
        values.problem(url, "its addresses have different users or passwords", fix);
    }
    first
}

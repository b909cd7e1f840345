//! A token, and the reasons why there is none.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use crate::settings::secret::Secret;

/// Maximum size of a token in bytes.
const MAX_TOKEN_BYTES: usize = 32 * 1024;

/// Password that expires, with its user.
#[derive(Debug)]
pub(crate) struct Token {
    /// User; `None` for the default user.
    pub(crate) user: Option<String>,
    pub(crate) password: Secret,
    /// Expiry in seconds since the Unix epoch.
    pub(crate) expires_at_s: u64,
}

/// Outcome of an attempt to get a token.
pub(super) struct Fetched {
    pub(super) token: Token,
    /// Failure that an older credential made up for.
    pub(super) problem: Option<TokenError>,
}

/// Reason why there is no new token, free of secrets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct TokenError(pub(super) String);

impl Fetched {
    /// Refuses a token that cannot be used at `now_s`, in seconds since the Unix epoch.
    pub(super) fn check(self, now_s: u64) -> Result<Self, TokenError> {
        let Token { password, expires_at_s, .. } = &self.token;
        let is_plain = !password.reveal().is_empty() && password.reveal().bytes().all(|b| b.is_ascii_graphic());
        if !is_plain || password.reveal().len() > MAX_TOKEN_BYTES {
            return Err(TokenError("the token is empty, too long or not printable".to_owned()));
        }
        if *expires_at_s <= now_s {
            return Err(TokenError("the token has expired already; is the clock of this machine right?".to_owned()));
        }
        Ok(self)
    }
}

/// Reads a file with a token that another program renews, without white space around it.
pub(super) fn read_token_file(setting: &'static str, path: &Path) -> Result<Secret, TokenError> {
    let mut text = String::new();
    let limit = MAX_TOKEN_BYTES as u64;
    let read = File::open(path).and_then(|file| file.take(limit).read_to_string(&mut text));
    read.map_err(|error| TokenError(format!("{setting}: cannot read {}: {error}", path.display())))?;
    Ok(Secret::new(text.trim()))
}

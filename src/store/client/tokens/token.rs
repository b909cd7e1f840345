//! A token, and the reasons why there is none.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use crate::settings::secret::Secret;

/// Maximum size of a token in bytes.
const MAX_TOKEN_BYTES: usize = 32 * 1024;
/// Maximum lifetime of a token in seconds; a source that says more is taken to say this.
pub(super) const MAX_LIFETIME_S: u64 = 7 * 86_400;

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
pub(super) struct FetchOutcome {
    /// The token; `None`: the last one is good enough.
    pub(super) token: Option<Token>,
    /// Credentials that could not be renewed, and still sign tokens.
    pub(super) problem: Option<CredentialRenewalFailure>,
}

/// Failure to renew credentials, of which the old ones still sign tokens.
pub(super) struct CredentialRenewalFailure {
    pub(super) error: TokenError,
    /// Expiry of these credentials in seconds since the Unix epoch.
    pub(super) expires_at_s: u64,
}

/// Reason why there is no new token, free of secrets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct TokenError(pub(super) String);

impl FetchOutcome {
    /// Refuses a token that cannot be used at `now_s`, in seconds since the Unix epoch.
    pub(super) fn check(self, now_s: u64) -> Result<Self, TokenError> {
        let Some(Token { password, expires_at_s, .. }) = &self.token else { return Ok(self) };
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
    let limit = MAX_TOKEN_BYTES as u64 + 1;
    let read = File::open(path).and_then(|file| file.take(limit).read_to_string(&mut text));
    read.map_err(|error| TokenError(format!("{setting}: cannot read {}: {error}", path.display())))?;
    if text.len() > MAX_TOKEN_BYTES {
        return Err(TokenError(format!("{setting}: {} has more than {MAX_TOKEN_BYTES} bytes", path.display())));
    }
    Ok(Secret::new(text.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_that_is_too_long_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("a file can be made");
        let read = |length: usize| {
            std::fs::write(file.path(), "t".repeat(length)).expect("a file can be written");
            read_token_file("SETTING", file.path()).map(|token| token.reveal().len()).map_err(|error| error.0)
        };
        assert_eq!(read(MAX_TOKEN_BYTES), Ok(MAX_TOKEN_BYTES));
        let error = read(MAX_TOKEN_BYTES + 1).expect_err("it is too long");
        assert!(error.contains("SETTING") && error.contains("more than 32768 bytes"), "{error}");
    }
}

//! Authentication of what replicas publish: an authentication code, a line feed, a message as JSON.
//!
//! Replicas with a common secret authenticate their summaries, so that other users of the Redis can forge none. Without
//! a secret the code is a row of dashes and anyone who can write to Redis can add a summary.
//!
//! Decides: summaries of other replicas that are not authentic (secret), or of another version.

use super::summary::{MAX_SUMMARY_BYTES, ReplicaSummary, SUMMARY_VERSION};

/// Length of the authentication code in bytes of text.
const AUTHENTICATION_CODE_CHARS: usize = 64;
/// Context of the derived key, which keeps it apart from other uses of the same secret.
const KEY_DERIVATION_CONTEXT: &str = "tollkeeper fleet v1 summaries";

/// Key that authenticates summaries.
#[derive(Clone)]
pub struct AuthenticationKey(Box<[u8; 32]>);

impl std::fmt::Debug for AuthenticationKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AuthenticationKey(***)")
    }
}

/// Reason why a summary is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SummaryError {
    /// It is longer than [`MAX_SUMMARY_BYTES`].
    TooLong,
    /// Its authentication code is not that of the secret.
    NotAuthentic,
    /// It is not a summary.
    Malformed,
    /// It has another version of the format.
    OtherVersion,
    /// Its time is not that of a running replica.
    Outdated,
    /// A part of it contradicts itself; the rest was used.
    Contradictory,
    /// There are more replicas than are read.
    TooMany,
}

impl SummaryError {
    /// Text for people.
    pub const fn description(self) -> &'static str {
        match self {
            Self::TooLong => "longer than 64 KiB",
            Self::NotAuthentic => "not authenticated with this replica's TOLLKEEPER_DECISION_LOG_HASH_KEY",
            Self::Malformed => "not a summary",
            Self::OtherVersion => "of another version of the format",
            Self::Outdated => "published at another time than now",
            Self::Contradictory => "partly contradictory",
            Self::TooMany => "beyond 1000 replicas",
        }
    }
}

impl AuthenticationKey {
    /// Derives the key from a secret.
    pub fn new(secret: &str) -> Self {
        Self(Box::new(blake3::derive_key(KEY_DERIVATION_CONTEXT, secret.as_bytes())))
    }

    /// Authentication code, which compares in constant time.
    fn compute_code(&self, json: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(&self.0, json)
    }
}

/// Adds the authentication code to a message; `None` if it is longer than [`MAX_SUMMARY_BYTES`] then.
pub(super) fn add_authentication_code(message: &[u8], key: Option<&AuthenticationKey>) -> Option<Vec<u8>> {
    let code =
        key.map_or_else(|| "-".repeat(AUTHENTICATION_CODE_CHARS), |key| key.compute_code(message).to_hex().to_string());
    let sealed = [code.as_bytes(), b"\n", message].concat();
    (sealed.len() <= MAX_SUMMARY_BYTES).then_some(sealed)
}

/// Returns the message without its authentication code, which is right if there is a secret.
///
/// # Errors
/// The reason why it is left out.
pub(super) fn check_authentication_code<'s>(
    sealed: &'s [u8],
    key: Option<&AuthenticationKey>,
) -> Result<&'s [u8], SummaryError> {
    if sealed.len() > MAX_SUMMARY_BYTES {
        return Err(SummaryError::TooLong);
    }
    let (code, rest) = sealed.split_at_checked(AUTHENTICATION_CODE_CHARS).ok_or(SummaryError::Malformed)?;
    let message = rest.strip_prefix(b"\n").ok_or(SummaryError::Malformed)?;
    match key {
        Some(key) if blake3::Hash::from_hex(code).ok() != Some(key.compute_code(message)) => {
            Err(SummaryError::NotAuthentic)
        }
        _ => Ok(message),
    }
}

/// Encodes a summary; `None` if it is longer than [`MAX_SUMMARY_BYTES`].
pub fn encode_summary(summary: &ReplicaSummary, key: Option<&AuthenticationKey>) -> Option<Vec<u8>> {
    add_authentication_code(&serde_json::to_vec(summary).ok()?, key)
}

/// Decodes a summary.
///
/// # Errors
/// The reason why it is left out.
pub fn decode_summary(sealed: &[u8], key: Option<&AuthenticationKey>) -> Result<ReplicaSummary, SummaryError> {
    let json = check_authentication_code(sealed, key)?;
    let summary: ReplicaSummary = serde_json::from_slice(json).map_err(|_| SummaryError::Malformed)?;
    if summary.v == SUMMARY_VERSION { Ok(summary) } else { Err(SummaryError::OtherVersion) }
}

//! Published form of a summary: an authentication code, a line feed, JSON.
//!
//! Replicas with a common secret authenticate their summaries, so that other users of the Redis can forge none. Without
//! a secret the code is a row of dashes and anyone who can write to Redis can add a summary.

use super::summary::{MAX_BYTES, ReplicaSummary, VERSION};

/// Length of the authentication code in bytes of text.
const CODE_BYTES: usize = 64;
/// Context of the derived key, which keeps it apart from other uses of the same secret.
const KEY_CONTEXT: &str = "tollkeeper fleet v1 summaries";

/// Key that authenticates summaries.
#[derive(Clone)]
pub struct SummaryKey(Box<[u8; 32]>);

impl std::fmt::Debug for SummaryKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SummaryKey(***)")
    }
}

/// Reason why a summary is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SummaryError {
    /// It is longer than [`MAX_BYTES`].
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
    pub const fn text(self) -> &'static str {
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

impl SummaryKey {
    /// Derives the key from a secret.
    pub fn new(secret: &str) -> Self {
        Self(Box::new(blake3::derive_key(KEY_CONTEXT, secret.as_bytes())))
    }

    /// Authentication code, which compares in constant time.
    fn code(&self, json: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(&self.0, json)
    }
}

/// Encodes a summary; `None` if it is longer than [`MAX_BYTES`].
pub fn seal(summary: &ReplicaSummary, key: Option<&SummaryKey>) -> Option<Vec<u8>> {
    let json = serde_json::to_vec(summary).ok()?;
    let code = key.map_or_else(|| "-".repeat(CODE_BYTES), |key| key.code(&json).to_hex().to_string());
    let sealed = [code.as_bytes(), b"\n", &json].concat();
    (sealed.len() <= MAX_BYTES).then_some(sealed)
}

/// Decodes a summary.
///
/// # Errors
/// The reason why it is left out.
pub fn open(sealed: &[u8], key: Option<&SummaryKey>) -> Result<ReplicaSummary, SummaryError> {
    if sealed.len() > MAX_BYTES {
        return Err(SummaryError::TooLong);
    }
    let (code, rest) = sealed.split_at_checked(CODE_BYTES).ok_or(SummaryError::Malformed)?;
    let json = rest.strip_prefix(b"\n").ok_or(SummaryError::Malformed)?;
    if let Some(key) = key
        && blake3::Hash::from_hex(code).ok() != Some(key.code(json))
    {
        return Err(SummaryError::NotAuthentic);
    }
    let summary: ReplicaSummary = serde_json::from_slice(json).map_err(|_| SummaryError::Malformed)?;
    if summary.v == VERSION { Ok(summary) } else { Err(SummaryError::OtherVersion) }
}

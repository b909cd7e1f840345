//! Scripts that a server caches by the hash of their text.

use sha1::{Digest, Sha1};

/// A script.
#[derive(Debug)]
pub struct Script {
    /// Text for EVAL.
    pub text: String,
    /// SHA-1 of the text in lower-case hexadecimal digits, for EVALSHA.
    pub sha1: String,
    /// Script that runs several calls of this one, as `key_call` describes; `None` if there is none.
    pub merged: Option<Box<Self>>,
}

impl Script {
    /// Creates a script of this text.
    pub fn new(text: String) -> Self {
        let sha1 = Sha1::digest(&text).iter().fold(String::new(), |digits, byte| format!("{digits}{byte:02x}"));
        Self { text, sha1, merged: None }
    }
}

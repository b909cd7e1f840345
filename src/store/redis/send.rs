//! What replies mean: an answer, or what an error reply asks for.

use std::time::Instant;

use super::connect;
use super::failure::Refused;
use super::line::{Line, Reply};

/// Sends one command, and keeps the text of an error, shortened.
pub(super) async fn send_and_tell(line: &Line, words: &[&[u8]]) -> Result<Reply, (Refused, String)> {
    match line.call(words, false, None).await {
        Ok(Reply::Error(text)) => Err((Refused::from_reply(&text), connect::shortened(&text))),
        Ok(reply) => Ok(reply),
        Err(error) => Err((Refused::Failed(error), error.to_string())),
    }
}

/// Sends one command, and waits until then for its reply; `asking` sends ASKING before it.
pub(super) async fn send(line: &Line, words: &[&[u8]], asking: bool, until: Instant) -> Result<Reply, Refused> {
    match line.call(words, asking, Some(until)).await {
        Ok(Reply::Error(text)) => Err(Refused::from_reply(&text)),
        Ok(reply) => Ok(reply),
        Err(error) => Err(Refused::Failed(error)),
    }
}

/// A number, also where it comes as text.
pub(super) fn integer(reply: &Reply) -> Option<i64> {
    match reply {
        Reply::Integer(number) => Some(*number),
        Reply::BulkString(_) | Reply::SimpleString(_) => text(reply)?.parse().ok(),
        Reply::Error(_) | Reply::Array(_) | Reply::Null => None,
    }
}

/// A text.
pub(super) fn text(reply: &Reply) -> Option<&str> {
    bytes(reply).and_then(|bytes| std::str::from_utf8(bytes).ok())
}

/// Bytes of any kind.
pub(super) fn bytes(reply: &Reply) -> Option<&[u8]> {
    match reply {
        Reply::BulkString(bytes) | Reply::SimpleString(bytes) => Some(bytes),
        Reply::Error(_) | Reply::Integer(_) | Reply::Array(_) | Reply::Null => None,
    }
}

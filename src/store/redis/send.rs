//! One command and its outcome: an answer, or what an error reply asks for.

use std::time::Instant;

use super::connect;
use super::failure::Refused;
use super::line::Line;
use super::reply::Reply;

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

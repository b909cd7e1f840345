//! One command and its outcome: an answer, or what an error reply asks for.

use std::time::Instant;

use super::connect;
use super::connection::Connection;
use super::error::ReplyError;
use super::reply::Reply;

/// Sends one command, and keeps the text of an error, shortened.
pub(crate) async fn send_with_error_text(
    connection: &Connection,
    words: &[&[u8]],
) -> Result<Reply, (ReplyError, String)> {
    match connection.call(words, false, None).await {
        Ok(Reply::Error(text)) => Err((ReplyError::from_reply(&text), connect::shortened(&text))),
        Ok(reply) => Ok(reply),
        Err(error) => Err((ReplyError::Failed(error), error.to_string())),
    }
}

/// Sends one command, and waits until then for its reply; `asking` sends ASKING before it.
pub(crate) async fn send(
    connection: &Connection,
    words: &[&[u8]],
    asking: bool,
    until: Instant,
) -> Result<Reply, ReplyError> {
    match connection.call(words, asking, Some(until)).await {
        Ok(Reply::Error(text)) => Err(ReplyError::from_reply(&text)),
        Ok(reply) => Ok(reply),
        Err(error) => Err(ReplyError::Failed(error)),
    }
}

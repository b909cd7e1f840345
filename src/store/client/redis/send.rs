//! Commands whose error replies become errors.

use std::time::Instant;

use super::connection::Connection;
use super::error::{RedisError, ReplyError, log_text};
use super::reply::Reply;

/// Error of a command, and its text for logs.
pub(crate) type ErrorWithText = (ReplyError, String);

/// Sends a command without a deadline, and keeps the text of an error.
pub(crate) async fn send_with_error_text(connection: &Connection, words: &[&[u8]]) -> Result<Reply, ErrorWithText> {
    match connection.call(words, false, None).await {
        Ok(Reply::Error(text)) => Err((ReplyError::from_reply(&text), log_text(&text))),
        Ok(reply) => Ok(reply),
        Err(error) => Err((ReplyError::Failed(error), error.to_string())),
    }
}

/// Sends a command, after an ASKING if `asking`, and waits for its reply until `deadline`.
pub(crate) async fn send(
    connection: &Connection,
    words: &[&[u8]],
    asking: bool,
    deadline: Instant,
) -> Result<Reply, ReplyError> {
    checked(connection.call(words, asking, Some(deadline)).await)
}

/// Turns an error reply into an error.
pub(crate) fn checked(outcome: Result<Reply, RedisError>) -> Result<Reply, ReplyError> {
    match outcome {
        Ok(Reply::Error(text)) => Err(ReplyError::from_reply(&text)),
        Ok(reply) => Ok(reply),
        Err(error) => Err(ReplyError::Failed(error)),
    }
}

/// Returns the kind of an error reply to a command that cannot be redirected.
pub(crate) const fn error_kind(error: &ReplyError) -> RedisError {
    match error {
        ReplyError::Failed(kind) => *kind,
        ReplyError::NoScript | ReplyError::Moved(_) | ReplyError::Ask(_) => RedisError::BadReply,
    }
}

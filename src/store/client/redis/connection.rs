//! Connection to one Redis server: commands, and calls of scripts that travel together. The protocol is RESP2, which
//! every server speaks.
//!
//! This file is the boundary to the protocol: open a connection on a stream, send a command with a deadline, get its
//! reply, learn that the connection closed. The rest of the client uses nothing below it, so that another connection,
//! such as `MultiplexedConnection` of the `redis` crate, could take its place by a change of this file alone.
//!
//! Calls of one script on one key each, queued at the same moment, are merged: the server then parses one command,
//! starts one script and reads its clock once for up to 16 calls. No call waits for others, and each fails alone. Calls
//! are not merged in a cluster, nor behind a proxy that divides keys, which each connection checks.
//!
//! A merged script has all keys as KEYS. Its ARGV are, for each group of keys with equal arguments, the number of keys
//! and the argument. It returns a head, then for each key the rest of the reply to its call, or the error of that
//! call.
//!
//! Decides: which calls on other counters share a command; the largest reply (`MAX_REPLY_BYTES`).

use std::cmp::Ordering;
use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use smallvec::SmallVec;
use tokio::time::Instant;

use super::error::{RedisError, ReplyError, sanitize_error_text};
use super::resp::{Reply, decode_reply, write_command};
use crate::base::text::to_hex;
use crate::store::client::pipeline::{ByteStream, ClosedReceiver, MergeableCall, Pipeline, WireProtocol};

/// RESP2.
#[derive(Debug)]
struct Resp;

impl WireProtocol for Resp {
    type Reply = Reply;
    type Mergeable = MergeableScriptCall;

    /// Replies of scripts have a few kilobytes.
    const MAX_REPLY_BYTES: usize = 16 << 20;

    #[inline]
    fn encode(out: &mut BytesMut, words: &[&[u8]]) {
        write_command(out, words);
    }

    #[inline]
    fn decode(input: &mut BytesMut) -> io::Result<Option<Reply>> {
        decode_reply(input)
    }

    fn error_text(reply: &Reply) -> Option<&str> {
        if let Reply::Error(text) = reply { Some(text) } else { None }
    }
}

/// Open connection; dropping it closes it and fails its pending commands.
#[derive(Debug)]
pub struct Connection(Pipeline<Resp>);

impl Connection {
    /// Creates a connection on `stream`, which is connected already. Needs a tokio runtime.
    pub fn from_stream(stream: impl ByteStream) -> (Self, ClosedReceiver) {
        Self::on_boxed_stream(Box::new(stream))
    }

    /// As [`Connection::from_stream`], on a boxed stream.
    pub(crate) fn on_boxed_stream(stream: Box<dyn ByteStream>) -> (Self, ClosedReceiver) {
        let (pipeline, closed) = Pipeline::open(stream);
        (Self(pipeline), closed)
    }

    /// Sends a command, after an ASKING if `asking`, and waits for its reply until `deadline`.
    ///
    /// # Errors
    /// [`RedisError::Timeout`] at the deadline, [`RedisError::Broken`] if the connection closes and
    /// [`RedisError::Overloaded`] if too many commands are queued. An error reply is a reply.
    pub async fn call(&self, words: &[&[u8]], asking: bool, deadline: Option<Instant>) -> Result<Reply, RedisError> {
        let prefix: Option<&[&[u8]]> = asking.then_some(&[b"ASKING"]);
        Ok(self.0.call(words, prefix, deadline).await?)
    }

    /// Time by which the last late reply exceeded the deadline of its command, with its age in seconds.
    pub(crate) fn last_lateness(&self) -> Option<(u64, Duration)> {
        self.0.last_lateness()
    }

    /// Calls a script on one key, in one command with the mergeable calls that are queued at the same moment, if any,
    /// and waits for its reply until `deadline`.
    ///
    /// # Errors
    /// As for [`Connection::call`].
    pub async fn call_mergeable(&self, call: MergeableScriptCall, deadline: Instant) -> Result<Reply, RedisError> {
        Ok(self.0.call_mergeable(call, deadline).await?)
    }
}

/// Error of a command, and its text for logs.
pub(crate) type ErrorWithText = (ReplyError, String);

/// Sends a command without a deadline, and keeps the text of an error.
pub(crate) async fn send_with_error_text(connection: &Connection, words: &[&[u8]]) -> Result<Reply, ErrorWithText> {
    match connection.call(words, false, None).await {
        Ok(Reply::Error(text)) => Err((ReplyError::from_reply(&text), sanitize_error_text(&text))),
        Ok(reply) => Ok(reply),
        Err(error) => Err((ReplyError::Failed(error), error.to_string())),
    }
}

/// Sends a command, after an ASKING if `asking`, and waits for its reply until `deadline`.
pub(crate) async fn send_command(
    connection: &Connection,
    words: &[&[u8]],
    asking: bool,
    deadline: Instant,
) -> Result<Reply, ReplyError> {
    error_reply_as_error(connection.call(words, asking, Some(deadline)).await)
}

/// Turns an error reply into an error.
pub(crate) fn error_reply_as_error(outcome: Result<Reply, RedisError>) -> Result<Reply, ReplyError> {
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

/// Lua script of Redis, with its hash for EVALSHA.
#[derive(Debug)]
pub struct Script {
    /// Text for EVAL.
    pub text: String,
    /// SHA-1 of the text in lower-case hexadecimal digits, for EVALSHA.
    pub sha1: String,
    /// Script that runs several calls of this one; `None` if there is none.
    pub merged: Option<Box<Self>>,
}

impl Script {
    /// Creates a script of this text.
    pub fn new(text: String) -> Self {
        let sha1 = to_hex(digest(&SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes()).as_ref());
        Self { text, sha1, merged: None }
    }
}

/// Maximum number of calls in one command; bounds the time for which the server runs nothing else.
const MAX_MERGED_CALLS: usize = 16;

/// Call of a script with one key and one argument.
#[derive(Clone, Debug)]
pub struct MergeableScriptCall {
    /// The script, which has a merged one.
    pub script: &'static Script,
    /// The key.
    pub key: Bytes,
    /// Argument of the script, the `ARGV[1]` of a call with a command of its own; calls with equal ones have it once in
    /// their command. A script that needs more (leases, see `lua/driver.lua`) is never merged.
    pub argument: Bytes,
    /// The server lacks the script, so its text is sent.
    pub sends_text: bool,
}

impl MergeableCall<Reply> for MergeableScriptCall {
    const MAX_MERGED: usize = MAX_MERGED_CALLS;

    /// Calls with equal arguments are neighbours too.
    fn merge_order(&self, other: &Self) -> Ordering {
        let kind = |call: &Self| (std::ptr::from_ref(call.script).addr(), call.sends_text);
        kind(self).cmp(&kind(other)).then_with(|| self.argument.cmp(&other.argument))
    }

    fn can_merge(&self, other: &Self) -> bool {
        std::ptr::eq(self.script, other.script) && self.sends_text == other.sends_text
    }

    fn encode_merged(out: &mut BytesMut, calls: &[Self]) {
        let Some(first) = calls.first() else { return };
        let script = match &first.script.merged {
            Some(merged) if calls.len() > 1 => merged,
            _ => first.script,
        };
        let groups: SmallVec<[(String, &Bytes); MAX_MERGED_CALLS]> = calls
            .chunk_by(|one, next| one.argument == next.argument)
            .map(|group| (group.len().to_string(), &group[0].argument))
            .collect();
        let key_count = calls.len().to_string();
        let mut words: SmallVec<[&[u8]; 8]> = SmallVec::new();
        words.push(if first.sends_text { b"EVAL" } else { b"EVALSHA" });
        words.push(if first.sends_text { script.text.as_bytes() } else { script.sha1.as_bytes() });
        words.push(key_count.as_bytes());
        words.extend(calls.iter().map(|call| &*call.key));
        if let [call] = calls {
            words.push(&call.argument);
        } else {
            for (keys, argument) in &groups {
                words.extend([keys.as_bytes(), argument]);
            }
        }
        write_command(out, &words);
    }

    fn split_reply(reply: Reply, calls: usize) -> Vec<Reply> {
        match reply {
            Reply::Array(parts) if parts.len() == calls + 1 => {
                let mut parts = parts.into_iter();
                let Some(Reply::BulkString(head)) = parts.next() else { return vec![Reply::Null; calls] };
                parts.map(|part| build_reply_of_merged_call(&head, part)).collect()
            }
            Reply::Error(_) => vec![reply; calls],
            // No script returns this; a call that gets it fails.
            _ => vec![Reply::Null; calls],
        }
    }
}

/// Returns the reply to one of the merged calls: the head that all have, then its own part.
fn build_reply_of_merged_call(head: &[u8], part: Reply) -> Reply {
    let Reply::BulkString(rest) = part else { return part };
    let mut reply = BytesMut::with_capacity(head.len() + rest.len());
    reply.extend_from_slice(head);
    reply.extend_from_slice(&rest);
    Reply::BulkString(reply.freeze())
}

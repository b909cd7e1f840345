//! Connection to one Redis server: commands, and calls of scripts that travel together. The protocol is RESP2, which
//! every server speaks.
//!
//! This file is the boundary to the protocol: open a connection on a stream, send a command with a deadline, get its
//! reply, learn that the connection closed. The rest of the client uses nothing below it, so that another connection,
//! such as `MultiplexedConnection` of the `redis` crate, could take its place by a change of this file alone.
//!
//! Calls of one script on one key each, queued at the same moment, are merged: the server then parses one command,
//! starts one script and reads its clock once for up to 16 calls. No call waits for others.
//!
//! A merged script has all keys as KEYS. Its ARGV are, for each group of keys with equal arguments, the number of keys
//! and both arguments. It returns a head, then for each key the rest of the reply to its call, or the error of that
//! call.
//!
//! Decides: which calls on other counters share a command; the largest reply (`MAX_REPLY_BYTES`).

use std::cmp::Ordering;
use std::io;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use smallvec::SmallVec;

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

/// Call of a script with one key and two arguments.
#[derive(Clone, Debug)]
pub struct MergeableScriptCall {
    /// The script, which has a merged one.
    pub script: &'static Script,
    /// The key.
    pub key: Bytes,
    /// Arguments of the script; calls with equal ones have them once in their command.
    ///
    /// The first is the `ARGV[1]` of a call with a command of its own, and the second its `ARGV[3]`, left out if it
    /// is empty. `ARGV[2]` is empty: a script that needs it (leases, see `lua/driver.lua`) is never merged.
    pub arguments: [Bytes; 2],
    /// The server lacks the script, so its text is sent.
    pub sends_text: bool,
}

impl MergeableCall<Reply> for MergeableScriptCall {
    const MAX_MERGED: usize = MAX_MERGED_CALLS;

    /// Calls with equal arguments are neighbours too.
    fn merge_order(&self, other: &Self) -> Ordering {
        let kind = |call: &Self| (std::ptr::from_ref(call.script).addr(), call.sends_text);
        kind(self).cmp(&kind(other)).then_with(|| self.arguments.cmp(&other.arguments))
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
        let groups: SmallVec<[(String, &[Bytes; 2]); MAX_MERGED_CALLS]> = calls
            .chunk_by(|one, next| one.arguments == next.arguments)
            .map(|group| (group.len().to_string(), &group[0].arguments))
            .collect();
        let key_count = calls.len().to_string();
        let mut words: SmallVec<[&[u8]; 8]> = SmallVec::new();
        words.push(if first.sends_text { b"EVAL" } else { b"EVALSHA" });
        words.push(if first.sends_text { script.text.as_bytes() } else { script.sha1.as_bytes() });
        words.push(key_count.as_bytes());
        words.extend(calls.iter().map(|call| &*call.key));
        if let [call] = calls {
            let [first, second] = &call.arguments;
            words.push(first);
            if !second.is_empty() {
                words.extend([&b""[..], second]);
            }
        } else {
            for (keys, [first, second]) in &groups {
                words.extend([keys.as_bytes(), first, second]);
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

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::sync::LazyLock;
    use std::time::{Duration, Instant};

    use bytes::Bytes;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::runtime::Builder;

    use super::Connection;
    use crate::store::client::redis::connection::{MergeableScriptCall, Script};
    use crate::store::client::redis::error::RedisError;
    use crate::store::client::redis::resp::Reply;

    const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";

    fn with_connection<F: Future>(work: impl FnOnce(Connection, DuplexStream) -> F) -> F::Output {
        let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(async {
            let (ours, theirs) = duplex(1 << 20);
            work(Connection::from_stream(ours).0, theirs).await
        })
    }

    async fn expect_pings(server: &mut DuplexStream, pings: usize) {
        let mut received = vec![0; PING.len() * pings];
        server.read_exact(&mut received).await.expect("the commands arrive");
        assert_eq!(received, PING.repeat(pings));
    }

    #[test]
    fn late_reply_is_dropped() {
        with_connection(|connection, mut server| async move {
            let soon = Some(Instant::now() + Duration::from_millis(5));
            let (late, next) = (connection.call(&[b"PING"], false, soon), connection.call(&[b"PING"], false, None));
            let answer = async {
                expect_pings(&mut server, 2).await;
                tokio::time::sleep(Duration::from_millis(50)).await;
                server.write_all(b":1\r\n:2\r\n").await.expect("the client reads");
            };
            let (late, next, ()) = tokio::join!(biased; late, next, answer);
            assert_eq!(late, Err(RedisError::Timeout));
            assert_eq!(next, Ok(Reply::Integer(2)));
        });
    }

    #[test]
    fn fragmented_replies_reach_callers_in_order() {
        with_connection(|connection, mut server| async move {
            let calls = futures_util::future::join_all((0..100).map(|_| connection.call(&[b"PING"], false, None)));
            let answer = async {
                expect_pings(&mut server, 100).await;
                for byte in (0..100).flat_map(|number| format!("$2\r\n{number:02}\r\n").into_bytes()) {
                    server.write_all(&[byte]).await.expect("the client reads");
                }
            };
            for (number, reply) in tokio::join!(biased; calls, answer).0.into_iter().enumerate() {
                assert_eq!(reply, Ok(Reply::BulkString(format!("{number:02}").into())));
            }
        });
    }

    #[test]
    fn closed_connection_fails_pending_and_later_commands() {
        for garbage in [&b""[..], b"HTTP/1.1 400 Bad Request\r\n", b":1\r\n:2\r\n:3\r\n"] {
            with_connection(|connection, mut server| async move {
                let close = async {
                    expect_pings(&mut server, 1).await;
                    server.write_all(garbage).await.expect("the client reads");
                    drop(server);
                };
                let (reply, ()) = tokio::join!(biased; connection.call(&[b"PING"], false, None), close);
                assert!(matches!(reply, Err(RedisError::Broken) | Ok(Reply::Integer(1))), "{reply:?}");
                assert_eq!(connection.call(&[b"PING"], false, None).await, Err(RedisError::Broken));
            });
        }
    }

    /// Reads what the client has sent in one write.
    async fn sent(server: &mut DuplexStream) -> String {
        let mut bytes = vec![0; 1 << 10];
        let length = server.read(&mut bytes).await.expect("commands arrive");
        String::from_utf8(bytes[..length].to_vec()).expect("commands are text here")
    }

    #[test]
    fn command_of_a_dropped_caller_is_not_sent() {
        with_connection(|connection, mut server| async move {
            for asking in [false, true] {
                let mut dropped = Box::pin(connection.call(&[b"DROPPED"], asking, None));
                assert!(futures_util::poll!(dropped.as_mut()).is_pending());
                let mut kept = Box::pin(connection.call(&[b"PING"], asking, None));
                assert!(futures_util::poll!(kept.as_mut()).is_pending());
                drop(dropped);
                let before = if asking { "*1\r\n$6\r\nASKING\r\n" } else { "" };
                assert_eq!(sent(&mut server).await, format!("{before}*1\r\n$4\r\nPING\r\n"));
                server.write_all(if asking { b"+OK\r\n:1\r\n" } else { b":1\r\n" }).await.expect("the client reads");
                assert_eq!(kept.await, Ok(Reply::Integer(1)));
            }
        });
    }

    type PendingReply<'c> = Pin<Box<dyn Future<Output = Result<Reply, RedisError>> + 'c>>;

    /// Calls on `count` keys with one of two arguments.
    fn key_calls(connection: &Connection, count: usize) -> Vec<PendingReply<'_>> {
        static SCRIPT: LazyLock<Script> = LazyLock::new(|| {
            let merged = Some(Box::new(Script::new("merged".to_owned())));
            Script { merged, ..Script::new("one".to_owned()) }
        });
        let call = |number: usize| MergeableScriptCall {
            script: &SCRIPT,
            key: format!("k{number}").into(),
            arguments: [if number.is_multiple_of(3) { "third" } else { "other" }.into(), Bytes::new()],
            sends_text: true,
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        (0..count).map(|number| Box::pin(connection.call_mergeable(call(number), deadline)) as Pin<Box<_>>).collect()
    }

    #[test]
    fn calls_queued_together_share_a_command() {
        with_connection(|connection, mut server| async move {
            let mut calls = key_calls(&connection, 5);
            for call in &mut calls {
                assert!(futures_util::poll!(call.as_mut()).is_pending());
            }
            // A call without a caller is not sent.
            drop(calls.remove(1));
            let words = ["EVAL", "merged", "4", "k2", "k4", "k0", "k3", "2", "other", "", "2", "third", ""];
            let lines: String = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
            assert_eq!(sent(&mut server).await, format!("*13\r\n{lines}"));
            server
                .write_all(b"*5\r\n$1\r\n@\r\n$1\r\n2\r\n-ERR 4\r\n$1\r\n0\r\n$1\r\n3\r\n")
                .await
                .expect("the client reads");
            let replies = futures_util::future::join_all(calls).await;
            let text = |text: &'static str| Ok(Reply::BulkString(text.into()));
            assert_eq!(replies, [text("@0"), text("@2"), text("@3"), Ok(Reply::Error("ERR 4".into()))]);
        });
    }

    #[test]
    fn at_most_16_calls_share_a_command_and_all_get_its_error() {
        with_connection(|connection, mut server| async move {
            let mut calls = key_calls(&connection, 33);
            for call in &mut calls {
                assert!(futures_util::poll!(call.as_mut()).is_pending());
            }
            let text = sent(&mut server).await;
            assert_eq!(text.matches("EVAL").count(), 3, "{text}");
            assert_eq!(text.matches("\r\nmerged\r\n$2\r\n16\r\n").count(), 2);
            assert_eq!(text.matches("\r\none\r\n$1\r\n1\r\n").count(), 1);
            server.write_all(b"-BUSY\r\n:1\r\n$1\r\nx\r\n").await.expect("the client reads");
            let replies = futures_util::future::join_all(calls).await;
            let count = |wanted: &Reply| replies.iter().filter(|reply| reply.as_ref() == Ok(wanted)).count();
            assert_eq!(count(&Reply::Error("BUSY".into())), 16);
            assert_eq!((count(&Reply::Null), count(&Reply::BulkString("x".into()))), (16, 1));
        });
    }

    #[test]
    fn call_of_a_dropped_caller_is_not_merged() {
        with_connection(|connection, mut server| async move {
            let mut waiting = Box::pin(connection.call(&[b"PING"], false, None));
            assert!(futures_util::poll!(waiting.as_mut()).is_pending());
            expect_pings(&mut server, 1).await;
            let mut calls = key_calls(&connection, 2);
            for call in &mut calls {
                assert!(futures_util::poll!(call.as_mut()).is_pending());
            }
            drop(calls);
            server.write_all(b"+PONG\r\n").await.expect("the client reads");
            waiting.await.expect("a reply");
            let ping = connection.call(&[b"PING"], false, None);
            let answer = async {
                expect_pings(&mut server, 1).await;
                server.write_all(b"+PONG\r\n").await.expect("the client reads");
            };
            assert!(tokio::join!(biased; ping, answer).0.is_ok());
        });
    }

    #[test]
    fn reply_to_an_unsent_command_closes_the_connection() {
        with_connection(|connection, mut server| async move {
            server.write_all(b":1\r\n").await.expect("the client reads");
            assert_eq!(connection.call(&[b"PING"], false, None).await, Err(RedisError::Broken));
        });
    }

    #[test]
    fn expired_command_is_not_sent() {
        let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(async {
            // The server reads nothing at first, so that the driver cannot write the second command.
            let (ours, mut server) = duplex(4);
            let connection = Connection::from_stream(ours).0;
            let mut first = Box::pin(connection.call(&[b"PING"], false, None));
            assert!(futures_util::poll!(first.as_mut()).is_pending());
            tokio::time::sleep(Duration::from_millis(5)).await;
            let soon = Some(Instant::now() + Duration::from_millis(5));
            assert_eq!(connection.call(&[b"EXPIRED"], false, soon).await, Err(RedisError::Timeout));
            let last = connection.call(&[b"PING"], false, None);
            let answer = async {
                expect_pings(&mut server, 2).await;
                server.write_all(b":1\r\n:2\r\n").await.expect("the client reads");
            };
            let (first, last, ()) = tokio::join!(biased; first, last, answer);
            assert_eq!((first, last), (Ok(Reply::Integer(1)), Ok(Reply::Integer(2))));
        });
    }
}

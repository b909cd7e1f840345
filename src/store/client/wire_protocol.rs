//! Protocol of a pipelined connection, one reply to each command in the same order, and the stream below it.

use std::cmp::Ordering;
use std::io;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite};

/// Encoding of commands, and decoding of replies.
pub trait WireProtocol: 'static {
    /// Reply to one command.
    type Reply: Send + 'static;

    /// Call that can share a command with others; [`NoMergeableCall`] if the protocol has none.
    type Mergeable: MergeableCall<Self::Reply>;

    /// Maximum size of a reply, in bytes; a longer one closes the connection.
    const MAX_REPLY_BYTES: usize;

    /// Appends a command to `out`.
    fn encode(out: &mut BytesMut, words: &[&[u8]]);

    /// Removes the first reply from `input`; `None` while it is incomplete.
    ///
    /// # Errors
    /// The bytes are no reply.
    fn decode(input: &mut BytesMut) -> io::Result<Option<Self::Reply>>;

    /// Returns the text of an error reply.
    fn error_text(reply: &Self::Reply) -> Option<&str>;
}

/// Call that can share a command with others that are queued at the same moment.
pub trait MergeableCall<Reply>: Sized + Send + 'static {
    /// Maximum number of calls in one command.
    const MAX_MERGED: usize;

    /// Order in which calls that can share a command are neighbours.
    fn merge_order(&self, other: &Self) -> Ordering;

    /// Returns true if both calls can share a command.
    fn can_merge(&self, other: &Self) -> bool;

    /// Appends the command for these calls, which can share one.
    fn encode_merged(out: &mut BytesMut, calls: &[Self]);

    /// Returns the reply to each of the calls that shared a command, more than one.
    fn split_reply(reply: Reply, calls: usize) -> Vec<Reply>;
}

/// Mergeable call of a protocol without any.
#[derive(Debug)]
pub enum NoMergeableCall {}

impl<Reply> MergeableCall<Reply> for NoMergeableCall {
    const MAX_MERGED: usize = 1;

    fn merge_order(&self, _: &Self) -> Ordering {
        match *self {}
    }

    fn can_merge(&self, _: &Self) -> bool {
        match *self {}
    }

    fn encode_merged(_: &mut BytesMut, _: &[Self]) {}

    fn split_reply(reply: Reply, _: usize) -> Vec<Reply> {
        vec![reply]
    }
}

/// Reason why a command got no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PipelineError {
    /// The deadline passed; the command may have run.
    Timeout,
    /// The connection closed; the command may have run.
    Broken,
    /// Too many commands are queued.
    Overloaded,
}

/// Byte stream to a server.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

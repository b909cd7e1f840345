//! Protocol of a pipelined connection: one reply to each command, in the same order.

use std::cmp::Ordering;
use std::io;

use bytes::BytesMut;

/// Encoding of commands, and decoding of replies.
pub trait WireProtocol: 'static {
    /// Reply to one command.
    type Reply: Send + 'static;

    /// Call that can share a command with others.
    type Mergeable: Send + 'static;

    /// Maximum size of a reply, in bytes; a longer one closes the connection.
    const MAX_REPLY_BYTES: usize;

    /// Maximum number of calls in one command.
    const MAX_MERGED: usize;

    /// Appends a command to `out`.
    fn encode(out: &mut BytesMut, words: &[&[u8]]);

    /// Order in which calls that can share a command are neighbours.
    fn merge_order(one: &Self::Mergeable, other: &Self::Mergeable) -> Ordering;

    /// Returns true if both calls can share a command.
    fn can_merge(one: &Self::Mergeable, other: &Self::Mergeable) -> bool;

    /// Appends the command for these calls, which can share one.
    fn encode_merged(out: &mut BytesMut, calls: &[Self::Mergeable]);

    /// Returns the reply to each of the calls that shared a command, more than one.
    fn split(reply: Self::Reply, calls: usize) -> Vec<Self::Reply>;

    /// Removes the first reply from `input`; `None` while it is incomplete.
    ///
    /// # Errors
    /// The bytes are no reply.
    fn decode(input: &mut BytesMut) -> io::Result<Option<Self::Reply>>;

    /// Returns the text of an error reply.
    fn error_text(reply: &Self::Reply) -> Option<&str>;
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

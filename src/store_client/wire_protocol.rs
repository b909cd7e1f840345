//! Protocol of a pipelined connection: one reply to each command, in the same order.

use std::io;

use bytes::BytesMut;

/// Encoding of commands, and decoding of replies.
pub trait WireProtocol: 'static {
    /// Reply to one command.
    type Reply: Send + 'static;

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

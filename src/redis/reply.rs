//! What a server says: bytes become replies, and replies numbers, texts and places.
//!
//! A server may be a stranger, or broken: a reply is looked over before it is parsed, because the parser calls itself
//! for each list within a list, and keeps a hundred bytes for an element of four. Nothing is asked and nothing is
//! awaited here.

use std::io;

use bytes::BytesMut;
use redis_protocol::resp2::decode::decode_bytes_mut;
use redis_protocol::resp2::types::BytesFrame;
use smallvec::SmallVec;

/// What a server says to one command, an error reply included.
pub type Reply = BytesFrame;

/// The most lists inside one another. CLUSTER HASH_SLOTS has four, with what Redis 7 says of a node.
pub const DEEPEST: usize = 16;
/// The most elements of a reply, all its lists together: CLUSTER HASH_SLOTS of 16384 owners with some replicas each.
pub const MOST_ELEMENTS: u64 = 500_000;

/// Takes the first reply from `input`; `None` while it is not all there.
///
/// # Errors
/// It is no reply, or one with more than [`DEEPEST`] or [`MOST_ELEMENTS`] allow.
pub fn next(input: &mut BytesMut) -> io::Result<Option<Reply>> {
    // Anything else than a list is one element, and there is a great deal of it.
    if input.first() == Some(&b'*') && !is_small(input) {
        return Err(io::Error::other(format!(
            "a reply of more than {MOST_ELEMENTS} elements, or {DEEPEST} lists inside one another"
        )));
    }
    match decode_bytes_mut(input) {
        Ok(decoded) => Ok(decoded.map(|(reply, ..)| reply)),
        Err(_) => Err(io::Error::other("no reply of a Redis")),
    }
}

/// Whether what there is of the first reply keeps the bounds. What makes no sense does: the parser will say so.
fn is_small(input: &[u8]) -> bool {
    // How many elements are still to come in each list that is open.
    let mut open: SmallVec<[u64; DEEPEST]> = SmallVec::new();
    let (mut rest, mut elements) = (input, 0_u64);
    loop {
        let Some(length) = memchr::memmem::find(rest, b"\r\n") else { return true };
        let (head, after) = (&rest[..length], &rest[length + 2..]);
        // As the parser reads it: `-0` is a length, `-1` stands for nothing, and any other sign is its error.
        let count = head.get(1..).and_then(|digits| std::str::from_utf8(digits).ok()?.parse::<isize>().ok());
        let count = count.and_then(|count| u64::try_from(count).ok());
        rest = match (head.first(), count) {
            (Some(b'*'), Some(count)) => {
                elements = elements.saturating_add(count);
                if elements > MOST_ELEMENTS || open.len() == DEEPEST {
                    return false;
                }
                open.push(count);
                after
            }
            (Some(b'$'), Some(count)) => {
                // Two more end it.
                let bytes = usize::try_from(count).unwrap_or(usize::MAX).saturating_add(2);
                let Some(after) = after.get(bytes..) else { return true };
                after
            }
            _ => after,
        };
        if head.first() != Some(&b'*') || count.is_none() {
            match open.last_mut() {
                Some(left) => *left = left.saturating_sub(1),
                None => return true,
            }
        }
        // Lists that have got their last element are elements themselves.
        while open.last() == Some(&0) {
            open.pop();
            match open.last_mut() {
                Some(left) => *left = left.saturating_sub(1),
                None => return true,
            }
        }
    }
}

/// A number, also where it comes as text.
pub fn integer(reply: &Reply) -> Option<i64> {
    match reply {
        Reply::Integer(number) => Some(*number),
        Reply::BulkString(_) | Reply::SimpleString(_) => text(reply)?.parse().ok(),
        Reply::Error(_) | Reply::Array(_) | Reply::Null => None,
    }
}

/// A text.
pub fn text(reply: &Reply) -> Option<&str> {
    bytes(reply).and_then(|bytes| std::str::from_utf8(bytes).ok())
}

/// Bytes of any kind.
pub fn bytes(reply: &Reply) -> Option<&[u8]> {
    match reply {
        Reply::BulkString(bytes) | Reply::SimpleString(bytes) => Some(bytes),
        Reply::Error(_) | Reply::Integer(_) | Reply::Array(_) | Reply::Null => None,
    }
}

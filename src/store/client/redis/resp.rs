//! RESP2: encoding of commands, and decoding of replies within bounds.
//!
//! A server may be broken or hostile. The decoder calls itself for each nested array and allocates about a hundred
//! bytes for an element of four, so the nesting and the number of elements are checked before a reply is decoded.
//!
//! Decides: the protocol with Redis (RESP2), and how deep a reply may nest.

use std::io;

use bytes::BytesMut;
use redis_protocol::resp2::decode::decode_bytes_mut;
use redis_protocol::resp2::types::BytesFrame;
use smallvec::SmallVec;

use crate::base::clock::Time;

/// Maximum size of the head of an array or a bulk string: its kind, 20 digits and a line end.
const MAX_HEAD_BYTES: usize = 23;
const LINE_END: &[u8] = b"\r\n";

/// Appends a command, an array of bulk strings, to `out`.
pub(super) fn write_command(out: &mut BytesMut, words: &[&[u8]]) {
    // Many small writes to a slice are faster than to a buffer that may grow.
    let bound = |word: &&[u8]| MAX_HEAD_BYTES + word.len() + LINE_END.len();
    let (start, max_bytes) = (out.len(), MAX_HEAD_BYTES + words.iter().map(bound).sum::<usize>());
    out.resize(start + max_bytes, 0);
    let mut writer = SliceWriter { out: &mut out[start..], written: 0 };
    writer.write_head(b'*', words.len());
    for word in words {
        writer.write_head(b'$', word.len());
        writer.append_bytes(word);
        writer.append_bytes(LINE_END);
    }
    let end = start + writer.written;
    out.truncate(end);
}

/// Appends to a slice that is long enough.
struct SliceWriter<'o> {
    out: &'o mut [u8],
    written: usize,
}

impl SliceWriter<'_> {
    #[inline]
    fn append_bytes(&mut self, bytes: &[u8]) {
        self.out[self.written..][..bytes.len()].copy_from_slice(bytes);
        self.written += bytes.len();
    }

    #[inline]
    fn write_head(&mut self, kind: u8, length: usize) {
        // Most lengths have one or two digits.
        match u8::try_from(length) {
            Ok(ones @ 0..10) => self.append_bytes(&[kind, b'0' + ones, b'\r', b'\n']),
            Ok(number @ 10..100) => self.append_bytes(&[kind, b'0' + number / 10, b'0' + number % 10, b'\r', b'\n']),
            _ => {
                self.append_bytes(&[kind]);
                self.append_bytes(itoa::Buffer::new().format(length).as_bytes());
                self.append_bytes(LINE_END);
            }
        }
    }
}

/// Reply to one command; may be an error reply.
pub type Reply = BytesFrame;

/// Maximum nesting of arrays; CLUSTER SLOTS of Redis 7 needs four.
pub const MAX_DEPTH: usize = 16;
/// Maximum number of elements of a reply, nested ones included: CLUSTER SLOTS of 16384 owners with some replicas each.
pub const MAX_REPLY_ELEMENTS: u64 = 500_000;

/// Removes the first reply from `input`; `None` while it is incomplete.
///
/// # Errors
/// The bytes are no reply, or the reply exceeds [`MAX_DEPTH`] or [`MAX_REPLY_ELEMENTS`].
pub fn decode_reply(input: &mut BytesMut) -> io::Result<Option<Reply>> {
    // Any reply but an array is one element.
    if input.first() == Some(&b'*') && !is_within_bounds(input) {
        let text = format!("a reply with more than {MAX_REPLY_ELEMENTS} elements or {MAX_DEPTH} nested arrays");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    match decode_bytes_mut(input) {
        Ok(decoded) => Ok(decoded.map(|(reply, ..)| reply)),
        Err(_) => Err(io::Error::other("not a Redis reply")),
    }
}

/// Returns true for the error that closes a connection because a reply exceeds a bound.
pub(crate) fn is_reply_too_large(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::FileTooLarge
}

/// Returns true if the received part of the first reply is within the bounds, or is invalid: the decoder rejects that.
fn is_within_bounds(input: &[u8]) -> bool {
    // Number of missing elements of each open array.
    let mut open: SmallVec<[u64; MAX_DEPTH]> = SmallVec::new();
    let (mut rest, mut elements) = (input, 0_u64);
    loop {
        let Some(length) = memchr::memmem::find(rest, b"\r\n") else { return true };
        let (head, after) = (&rest[..length], &rest[length + 2..]);
        // As the decoder reads it: `-0` is a length, `-1` stands for null, any other sign is an error.
        let count = head.get(1..).and_then(|digits| std::str::from_utf8(digits).ok()?.parse::<isize>().ok());
        let count = count.and_then(|count| u64::try_from(count).ok());
        rest = match (head.first(), count) {
            (Some(b'*'), Some(count)) => {
                elements = elements.saturating_add(count);
                if elements > MAX_REPLY_ELEMENTS || open.len() == MAX_DEPTH {
                    return false;
                }
                open.push(count);
                after
            }
            (Some(b'$'), Some(count)) => {
                // Plus CR LF.
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
        // A complete array is an element of the array around it.
        while open.last() == Some(&0) {
            open.pop();
            match open.last_mut() {
                Some(left) => *left = left.saturating_sub(1),
                None => return true,
            }
        }
    }
}

/// Returns an integer, which may be sent as text.
pub fn reply_integer(reply: &Reply) -> Option<i64> {
    match reply {
        Reply::Integer(number) => Some(*number),
        Reply::BulkString(_) | Reply::SimpleString(_) => reply_text(reply)?.parse().ok(),
        Reply::Error(_) | Reply::Array(_) | Reply::Null => None,
    }
}

/// Returns a string if it is UTF-8.
pub fn reply_text(reply: &Reply) -> Option<&str> {
    reply_bytes(reply).and_then(|bytes| std::str::from_utf8(bytes).ok())
}

/// Returns the bytes of a string.
pub fn reply_bytes(reply: &Reply) -> Option<&[u8]> {
    match reply {
        Reply::BulkString(bytes) | Reply::SimpleString(bytes) => Some(bytes),
        Reply::Error(_) | Reply::Integer(_) | Reply::Array(_) | Reply::Null => None,
    }
}

/// Returns the time in the reply to TIME.
pub fn time_in_reply(reply: &Reply) -> Option<Time> {
    let Reply::Array(parts) = reply else { return None };
    let [seconds, micros] = &**parts else { return None };
    let number = |part| u64::try_from(reply_integer(part)?).ok();
    Some(Time::from_micros(number(seconds)?.saturating_mul(1_000_000).saturating_add(number(micros)?)))
}

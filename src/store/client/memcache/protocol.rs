//! Text protocol of memcached, as a pipelined connection uses it.

use std::io;

use bytes::{BufMut, BytesMut};

use super::reply::{self, MAX_VALUE_BYTES, MemcacheReply};
use crate::store::client::pipeline::{NoMergeableCall, WireProtocol};

/// Text protocol of memcached. The last word of `add` is the value; keys must hold neither spaces nor control bytes.
#[derive(Debug)]
pub struct MemcacheProtocol;

impl WireProtocol for MemcacheProtocol {
    type Reply = MemcacheReply;
    type Mergeable = NoMergeableCall;

    const MAX_REPLY_BYTES: usize = MAX_VALUE_BYTES + (4 << 10);

    fn encode(out: &mut BytesMut, words: &[&[u8]]) {
        let (line, value) = match words {
            [b"add", .., value] => (&words[..words.len() - 1], Some(*value)),
            _ => (words, None),
        };
        for (index, word) in line.iter().enumerate() {
            if index > 0 {
                out.put_u8(b' ');
            }
            out.put_slice(word);
        }
        out.put_slice(b"\r\n");
        if let Some(value) = value {
            out.put_slice(value);
            out.put_slice(b"\r\n");
        }
    }

    fn decode(input: &mut BytesMut) -> io::Result<Option<MemcacheReply>> {
        reply::decode_reply(input)
    }

    fn error_text(reply: &MemcacheReply) -> Option<&str> {
        if let MemcacheReply::Error(text) = reply { Some(text) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;

    use super::{MemcacheProtocol, WireProtocol};

    #[test]
    fn commands_are_lines_and_add_has_a_value() {
        let mut out = BytesMut::new();
        MemcacheProtocol::encode(&mut out, &[b"incr", b"k", b"2"]);
        MemcacheProtocol::encode(&mut out, &[b"add", b"k", b"0", b"60", b"2", b"12"]);
        MemcacheProtocol::encode(&mut out, &[b"version"]);
        assert_eq!(out, &b"incr k 2\r\nadd k 0 60 2\r\n12\r\nversion\r\n"[..]);
    }
}

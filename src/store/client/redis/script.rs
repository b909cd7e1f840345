//! Scripts that a server caches by the hash of their text, and calls of one script that travel as one command.
//!
//! Calls on one key each, queued at the same moment, are merged: the server then parses one command, starts one script
//! and reads its clock once for up to 16 calls. No call waits for others.
//!
//! A merged script has all keys as KEYS. Its ARGV are, for each group of keys with equal arguments, the number of keys
//! and both arguments. It returns a head, then for each key the rest of the reply to its call, or the error of that
//! call.

use std::cmp::Ordering;

use bytes::{Bytes, BytesMut};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use smallvec::SmallVec;

use super::command::write_command;
use super::reply::Reply;
use crate::store::client::wire_protocol::MergeableCall;

/// A script.
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
        let hash = digest(&SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes());
        let sha1 = hash.as_ref().iter().fold(String::new(), |digits, byte| format!("{digits}{byte:02x}"));
        Self { text, sha1, merged: None }
    }
}

/// Maximum number of calls in one command; bounds the time for which the server runs nothing else.
const MAX_MERGED_CALLS: usize = 16;

/// Call of a script with one key and two arguments.
#[derive(Clone, Debug)]
pub struct KeyCall {
    /// The script, which has a merged one.
    pub script: &'static Script,
    /// The key.
    pub key: Bytes,
    /// Arguments of the script; calls with equal ones have them once in their command.
    ///
    /// The first is the `ARGV[1]` of a call that is sent alone, and the second its `ARGV[3]`, which is left out if it
    /// is empty. `ARGV[2]` is empty: a script that needs it (leases, see `lua/driver.lua`) is never merged.
    pub arguments: [Bytes; 2],
    /// The server lacks the script, so its text is sent.
    pub sends_text: bool,
}

impl MergeableCall<Reply> for KeyCall {
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
                parts.map(|part| with_head(&head, part)).collect()
            }
            Reply::Error(_) => vec![reply; calls],
            // No script returns this; a call that gets it fails.
            _ => vec![Reply::Null; calls],
        }
    }
}

/// Returns the reply to one call.
fn with_head(head: &[u8], part: Reply) -> Reply {
    let Reply::BulkString(rest) = part else { return part };
    let mut reply = BytesMut::with_capacity(head.len() + rest.len());
    reply.extend_from_slice(head);
    reply.extend_from_slice(&rest);
    Reply::BulkString(reply.freeze())
}

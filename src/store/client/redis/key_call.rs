//! Calls of a script on one key each, which travel as one command if they are queued at the same moment.
//!
//! The server then parses one command, starts one script and reads its clock once for up to 16 calls. No
//! call waits for others.
//!
//! A merged script has all keys as KEYS. Its ARGV are, for each group of keys with equal arguments, the number of keys
//! and both arguments. It returns a head, then for each key the rest of the reply to its call, or the error of that
//! call.

use std::cmp::Ordering;

use bytes::{Bytes, BytesMut};
use smallvec::SmallVec;

use super::command::write_command;
use super::reply::Reply;
use super::script::Script;

/// Maximum number of calls in one command; bounds the time for which the server runs nothing else.
pub(crate) const MAX_MERGED: usize = 16;

/// Call of a script with one key and two arguments.
#[derive(Clone, Debug)]
pub struct KeyCall {
    /// The script, which has a merged one.
    pub script: &'static Script,
    /// The key.
    pub key: Bytes,
    /// The arguments; calls with equal ones have them once in their command. Alone, a call has them as its first and
    /// third, or only the first if the second is empty.
    pub arguments: [Bytes; 2],
    /// The server lacks the script, so its text is sent.
    pub sends_text: bool,
}

impl KeyCall {
    /// Order in which calls that can share a command, and among these calls with equal arguments, are neighbours.
    pub(super) fn merge_order(&self, other: &Self) -> Ordering {
        let kind = |call: &Self| (std::ptr::from_ref(call.script).addr(), call.sends_text);
        kind(self).cmp(&kind(other)).then_with(|| self.arguments.cmp(&other.arguments))
    }

    /// Returns true if both calls can share a command.
    pub(super) fn can_merge(&self, other: &Self) -> bool {
        std::ptr::eq(self.script, other.script) && self.sends_text == other.sends_text
    }
}

/// Appends the command for these calls, which can share one.
pub(super) fn encode(out: &mut BytesMut, calls: &[KeyCall]) {
    let Some(first) = calls.first() else { return };
    let script = match &first.script.merged {
        Some(merged) if calls.len() > 1 => merged,
        _ => first.script,
    };
    let groups: SmallVec<[(String, &[Bytes; 2]); MAX_MERGED]> = calls
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

/// Returns the reply to each of the calls that shared a command.
pub(super) fn split(reply: Reply, calls: usize) -> Vec<Reply> {
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

/// Returns the reply to one call.
fn with_head(head: &[u8], part: Reply) -> Reply {
    let Reply::BulkString(rest) = part else { return part };
    let mut reply = BytesMut::with_capacity(head.len() + rest.len());
    reply.extend_from_slice(head);
    reply.extend_from_slice(&rest);
    Reply::BulkString(reply.freeze())
}

//! What an operator may do with the counters themselves: see whose there are, and let go of some.
//!
//! Seeing is a SCAN of every node, a thousand keys at a time so that no node is held up, and bounded in keys and in
//! time. The text of a key tells its path, but for paths that are too long for it, which are only counted. How these
//! calls end says nothing about a server: a user that may not make them may still serve every rule.

use std::collections::HashSet;
use std::time::Instant;

use super::Redis;
use super::key::{self, ParsedKey};
use crate::clock::Time;
use crate::counter::Charge;
use crate::redis::error::{RedisError, ReplyError};
use crate::redis::node::Node;
use crate::redis::reply::{Reply, bytes};

/// Keys that a scan looks at, at most.
const MOST_KEYS: usize = 1_000_000;
/// Keys that a node looks at in one go.
const KEYS_AT_ONCE: usize = 1000;

/// What a scan found.
#[derive(Debug, Default)]
pub struct KeyScan {
    /// Whose counters there are, each once.
    pub paths: Vec<ParsedKey>,
    /// Whether all keys were looked at.
    pub complete: bool,
    /// Keys of the domain whose path is too long to be told.
    pub untold: usize,
}

impl Redis {
    /// The paths of a domain that have counters and are `wanted`: `most` of them at most, and not later than `until`.
    ///
    /// # Errors
    /// A node that could not be asked. Counters in the format of envoyproxy/ratelimit are never found: their keys do
    /// not tell where a value ends.
    pub async fn scan(
        &self,
        domain: &str,
        most: usize,
        until: Instant,
        mut wanted: impl FnMut(&ParsedKey) -> bool,
    ) -> Result<KeyScan, RedisError> {
        let pattern = key::pattern_of(&self.shared.prefix, domain);
        let mut found_scan = KeyScan { complete: true, ..KeyScan::default() };
        let (mut known, mut looked_at) = (HashSet::new(), 0);
        let nodes: Vec<_> = self.shared.routes().flat_map(|route| route.nodes()).collect();
        if nodes.is_empty() {
            return Err(RedisError::Unreachable);
        }
        for node in nodes {
            let mut cursor = b"0".to_vec();
            loop {
                let (next, keys) = scan(&node, (&cursor, &pattern), until).await?;
                looked_at += KEYS_AT_ONCE;
                for found in keys {
                    match key::read(&self.shared.prefix, &found) {
                        None => found_scan.untold += 1,
                        Some(path) if known.contains(&path) || !wanted(&path) => {}
                        Some(_) if found_scan.paths.len() == most => found_scan.complete = false,
                        Some(path) => {
                            known.insert(path.clone());
                            found_scan.paths.push(path);
                        }
                    }
                }
                if next == b"0" {
                    break;
                }
                if !found_scan.complete || looked_at > MOST_KEYS || Instant::now() >= until {
                    found_scan.complete = false;
                    return Ok(found_scan);
                }
                cursor = next;
            }
        }
        Ok(found_scan)
    }

    /// Lets go of the counters of a charge, in Redis and in what this process keeps of them; how many there were. What
    /// other replicas know to be over they forget within a second, and what was leased stays lent until then.
    ///
    /// # Errors
    /// Redis could not be asked, or its user may not UNLINK.
    pub async fn forget(&self, charge: &Charge<'_>, (now, until): (Time, Instant)) -> Result<u64, RedisError> {
        let (id, path) = self.shared.id(charge, now);
        let gone = self.shared.place(charge, (id, path), None, now).unlink(until).await?;
        self.shared.over.forget(id);
        self.shared.local.forget(charge);
        Ok(gone)
    }
}

/// Some more keys of a node, and where to go on.
async fn scan(
    node: &Node,
    (cursor, pattern): (&[u8], &[u8]),
    until: Instant,
) -> Result<(Vec<u8>, Vec<Vec<u8>>), RedisError> {
    let count = KEYS_AT_ONCE.to_string();
    let words: [&[u8]; 6] = [b"SCAN", cursor, b"MATCH", pattern, b"COUNT", count.as_bytes()];
    let reply = node.call_unrecorded(&words, false, until).await.map_err(|refused| match refused {
        ReplyError::Failed(error) => error,
        ReplyError::NoScript | ReplyError::Moved(_) | ReplyError::Ask(_) => RedisError::BadReply,
    })?;
    let Reply::Array(parts) = reply else { return Err(RedisError::BadReply) };
    let [next, Reply::Array(keys)] = &*parts else { return Err(RedisError::BadReply) };
    let next = bytes(next).ok_or(RedisError::BadReply)?.to_vec();
    Ok((next, keys.iter().filter_map(bytes).map(<[u8]>::to_vec).collect()))
}

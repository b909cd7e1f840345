//! SCAN of the counters of a domain, for operators.
//!
//! Every node is scanned, a thousand keys at a time so that no node is held up, within bounds on keys and time. Keys
//! whose path is truncated are only counted. The outcome says nothing about the health of a server: a user who may not
//! run SCAN may still serve every rule.
//!
//! Decides: how many keys `/counters` visits in Redis.

use std::collections::HashSet;
use std::sync::Arc;

use tokio::time::Instant;

use super::key;
use super::key::OwnedCounterPath;
use crate::store::client::redis::error::{RedisError, ReplyError};
use crate::store::client::redis::node::Node;
use crate::store::client::redis::resp::{Reply, reply_bytes};

/// Upper bound on the keys that a scan visits.
const MAX_VISITED_KEYS: usize = 1_000_000;
/// Keys that a node visits per SCAN.
const KEYS_PER_SCAN: usize = 1000;

/// Bounds and subject of a scan.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScanOptions<'a> {
    /// `CACHE_KEY_PREFIX`.
    pub(super) prefix: &'a str,
    pub(super) domain: &'a str,
    /// Upper bound on the paths to return.
    pub(super) max_paths: usize,
    pub(super) deadline: Instant,
}

/// Page of a SCAN.
struct ScanPage {
    /// Cursor of the next page; `0` after the last one.
    next_cursor: Vec<u8>,
    keys: Vec<Vec<u8>>,
}

/// Result of a scan.
#[derive(Debug, Default)]
pub struct KeyScanResult {
    /// Paths that have counters, each once.
    pub paths: Vec<OwnedCounterPath>,
    /// True if all keys were visited.
    pub complete: bool,
    /// Number of keys of the domain whose path is truncated.
    pub truncated: usize,
}

/// Lists the paths of a domain that have counters and pass `filter`.
///
/// # Errors
/// A node could not be scanned, or there is none.
pub(super) async fn scan_paths(
    nodes: Vec<Arc<Node>>,
    options: ScanOptions<'_>,
    mut filter: impl FnMut(&OwnedCounterPath) -> bool,
) -> Result<KeyScanResult, RedisError> {
    if nodes.is_empty() {
        return Err(RedisError::Unreachable);
    }
    let pattern = key::domain_scan_pattern(options.prefix, options.domain);
    let mut scan = KeyScanResult { complete: true, ..KeyScanResult::default() };
    let (mut known, mut visited) = (HashSet::new(), 0);
    for node in nodes {
        let mut cursor = b"0".to_vec();
        loop {
            let page = scan_page(&node, &cursor, &pattern, options.deadline).await?;
            visited += KEYS_PER_SCAN;
            for found in page.keys.into_iter().filter(|found| !key::is_record_key(found)) {
                match key::parse_path(options.prefix, &found) {
                    None => scan.truncated += 1,
                    Some(path) if known.contains(&path) || !filter(&path) => {}
                    Some(_) if scan.paths.len() == options.max_paths => scan.complete = false,
                    Some(path) => {
                        known.insert(path.clone());
                        scan.paths.push(path);
                    }
                }
            }
            if page.next_cursor == b"0" {
                break;
            }
            if !scan.complete || visited > MAX_VISITED_KEYS || Instant::now() >= options.deadline {
                scan.complete = false;
                return Ok(scan);
            }
            cursor = page.next_cursor;
        }
    }
    Ok(scan)
}

async fn scan_page(node: &Node, cursor: &[u8], pattern: &[u8], deadline: Instant) -> Result<ScanPage, RedisError> {
    let count = KEYS_PER_SCAN.to_string();
    let words: [&[u8]; 6] = [b"SCAN", cursor, b"MATCH", pattern, b"COUNT", count.as_bytes()];
    let reply = node.call_unrecorded(&words, false, deadline).await.map_err(|error| match error {
        ReplyError::Failed(error) => error,
        ReplyError::NoScript | ReplyError::Moved(_) | ReplyError::Ask(_) => RedisError::BadReply,
    })?;
    let Reply::Array(parts) = reply else { return Err(RedisError::BadReply) };
    let [next_cursor, Reply::Array(keys)] = &*parts else { return Err(RedisError::BadReply) };
    let next_cursor = reply_bytes(next_cursor).ok_or(RedisError::BadReply)?.to_vec();
    Ok(ScanPage { next_cursor, keys: keys.iter().filter_map(reply_bytes).map(<[u8]>::to_vec).collect() })
}

//! Keys of counters in Redis: `<prefix>tk1:{<path>}[:candidate=<name>]:<algorithm>:<period>[:<epoch>]`, with the path
//! `<domain>|<key>=<value>|...`.
//!
//! - The period is in seconds, `<n>mo` for calendar months, or `<period>@<zone>[,<first day>],<start of the day>` for a
//!   `window`, as in `month@Europe/Berlin,15,0600`.
//! - The path is in braces: it is the hash tag, so all limits of a descriptor have one hash slot.
//! - `\ | = { }` in a path are escaped as `\` and two hexadecimal digits, so two paths never have the same key, and a
//!   value cannot choose its slot. The pattern of a shared value follows `\*`.
//! - A path or a candidate's name over 200 bytes is truncated and ends in `\#` and its BLAKE3-128.
//! - `\ { }` in the prefix are escaped too: the first brace of a key is the one before its path.
//! - `overflow_` before the algorithm: the limit takes the overflow of another.
//! - The name of a candidate limit is escaped as a path is, and `:` too.
//! - `<key of a counter>:ban` is the ban beside it, `<key of a counter>:reservations` its open reservations.
//! - `<prefix>tk1:{<path>}:leases` is the record of leases of a descriptor, `...}:candidate=<name>:leases` that of a
//!   candidate.
//! - `<key of a counter>:holds` is the record of the holds on its hits.
//! - Other keys have a word in the braces, without `|`: `{replicas}`, `{holders}`, `{fleet}`, `{blocks}`.
//!
//! The format is public: other programs read it, and counters survive an upgrade. An incompatible format becomes `tk2`.
//!
//! Decides: a counter's key in Redis: hash tag, long or strange values, `CACHE_KEY_PREFIX`.
//! Decides: which change of a limit starts a new key.
//! Decides: paths over 200 bytes (a hash in the key).

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use memchr::memmem;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::limit::charge::{Charge, Counter};
use crate::limit::counter_path::CounterPath;
use crate::limit::local_budget::log_extension_us;

use super::global_answers::GlobalAnswers;
use super::script::script_for_limits;
use crate::base::clock::Time;
use crate::limit::{Consistency, Limit};
use crate::settings::counters::KeyFormat;
use crate::settings::redis::RedisSettings;
use crate::store::client::redis::connection::Script;
use crate::store::window_key::{EnvoyRatelimitKey, ExpiryJitter};

/// Spreads a small number over all bits: 2^128 divided by the golden ratio.
const BIT_SPREAD_MULTIPLIER: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;

/// Key format, and the settings that belong to it.
#[derive(Debug)]
pub(super) struct KeyScheme {
    prefix: String,
    format: KeyFormat,
    jitter: ExpiryJitter,
    /// Answers of the global Redis, if this Redis is that of a region; `None`: there is only one region.
    global_answers: Option<Arc<GlobalAnswers>>,
}

/// Hashes that identify the counters of a descriptor in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CounterSetId {
    /// Hash of the set of counters; in the format of envoyproxy/ratelimit of the window too.
    pub(super) counters: u128,
    /// Hash of the path alone, which the fallback counters are keyed by.
    pub(super) path: u128,
}

/// Redis command that counts the hits of a descriptor, and the keys that it works on.
#[derive(Clone, Debug)]
pub(super) enum CountCommand {
    /// EVALSHA of a script on these keys.
    Script {
        /// The script.
        script: &'static Script,
        /// One key for each counter.
        keys: SmallVec<[Bytes; 1]>,
    },
    /// INCRBY, and EXPIRE after it.
    Incrby(EnvoyRatelimitKey),
}

impl CountCommand {
    /// Returns the keys of the counters; all have the same hash slot.
    pub(super) fn keys(&self) -> &[Bytes] {
        match self {
            Self::Script { keys, .. } => keys,
            Self::Incrby(window) => std::slice::from_ref(window.key()),
        }
    }
}

impl KeyScheme {
    /// Creates the scheme of a Redis, which is that of a region if there is a global one.
    pub(super) fn new(settings: &RedisSettings, global_answers: Option<Arc<GlobalAnswers>>) -> Self {
        Self {
            prefix: settings.key_prefix.clone(),
            format: settings.key_format,
            jitter: ExpiryJitter::up_to(settings.expiration_jitter),
            global_answers,
        }
    }

    /// Returns the limit as this Redis counts it.
    pub(super) fn limit_as_counted(&self, limit: &Limit) -> Limit {
        let limit = limit.with_longer_period(eventual_log_extension_us(limit));
        self.global_answers
            .as_ref()
            .map_or(limit, |answers| limit.as_counted_in_region(answers.connection(Instant::now())))
    }

    /// Returns true if this Redis counts a part of a limit of the charge.
    pub(super) fn has_region_part(&self, charge: &Charge<'_>) -> bool {
        self.global_answers.is_some() && charge.counters.iter().any(|counter| counter.limit.global_scope().is_some())
    }

    /// Returns `CACHE_KEY_PREFIX`.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns true if all counters have keys of tollkeeper's own format.
    pub(super) fn uses_own_format(&self) -> bool {
        self.format == KeyFormat::Tollkeeper
    }

    /// Identifies the counters of a charge.
    pub(super) fn counter_set_id(&self, charge: &Charge<'_>, now: Time) -> CounterSetId {
        // The log of an eventual limit keeps hits for longer. A call has one period for each counter, so strict and
        // eventual charges on a log are sent apart. So are those under a global limit and under one of the region.
        let tags = charge.counters.iter().fold(0_u128, |tags, Counter { limit, tag, .. }| {
            // Calls with other bans have other scripts or arguments.
            let ban = limit.ban().map_or(0, |ban| ban.length_us() << 18 | ban.rejections_before_ban() << 1);
            let is_granted = self.global_answers.is_some() && limit.global_scope().is_some();
            let mark = eventual_log_extension_us(limit) + u64::from(is_granted) + ban;
            tags.rotate_left(1) ^ tag ^ u128::from(mark).wrapping_mul(BIT_SPREAD_MULTIPLIER)
        });
        let window = match self.format {
            KeyFormat::Tollkeeper => 0,
            KeyFormat::Ratelimit => {
                let start_s = EnvoyRatelimitKey::window_start_s(charge, now).unwrap_or(0);
                u128::from(start_s).wrapping_mul(BIT_SPREAD_MULTIPLIER)
            }
        };
        // A call concerns one slot: charges of others are neither joined nor delayed.
        let slot = charge.slot.map_or(0, |slot| slot.id.0 ^ (u128::from(slot.token.0) << 64 | slot.action as u128));
        CounterSetId { counters: charge.path_hash ^ tags ^ window ^ slot, path: charge.path_hash }
    }

    /// Selects the command that counts a charge. The format of envoyproxy/ratelimit has keys for some limits only; all
    /// others use scripts.
    pub(super) fn choose_command(&self, charge: &Charge<'_>, now: Time) -> CountCommand {
        let window = match self.format {
            KeyFormat::Tollkeeper => None,
            KeyFormat::Ratelimit => EnvoyRatelimitKey::for_charge(&self.prefix, charge, now, self.jitter.random_s()),
        };
        if let Some(window) = window {
            return CountCommand::Incrby(window);
        }
        if !self.has_region_part(charge) {
            return self.build_script_command(&charge.path, &charge.counters);
        }
        let limits: SmallVec<[Limit; 2]> =
            charge.counters.iter().map(|counter| self.limit_as_counted(counter.limit)).collect();
        let counted = |(counter, limit): (&Counter<'_>, _)| Counter { limit, ..*counter };
        let counters: SmallVec<[Counter<'_>; 2]> = charge.counters.iter().zip(&limits).map(counted).collect();
        self.build_script_command(&charge.path, &counters)
    }

    fn build_script_command(&self, path: &CounterPath<'_>, counters: &[Counter<'_>]) -> CountCommand {
        CountCommand::Script {
            script: script_for_limits(counters.iter().map(|counter| counter.limit)),
            keys: build_counter_keys(&self.prefix, path, counters),
        }
    }
}

/// Longest path in a key, in bytes, without the prefix and the suffix.
pub const MAX_PATH_BYTES: usize = 200;

/// Initial capacity of the buffer of a key, in bytes.
const KEY_CAPACITY: usize = 160;

/// Length of the digest of a truncated path: `\#` and 32 digits.
const DIGEST_BYTES: usize = 34;

/// Returns the keys of a descriptor's counters, in their order, then those of the bans, the reservations and the pools
/// beside them. `prefix` is `CACHE_KEY_PREFIX`.
pub fn build_counter_keys(prefix: &str, path: &CounterPath<'_>, counters: &[Counter<'_>]) -> SmallVec<[Bytes; 1]> {
    let mut key = Vec::with_capacity(KEY_CAPACITY);
    push_prefix_and_version(&mut key, prefix);
    let start = key.len();
    push_escaped_counter_path(&mut key, path);
    truncate_long_path(&mut key, start);
    key.push(b'}');
    if let Some(name) = path.candidate {
        key.extend_from_slice(CANDIDATE_MARK);
        let start = key.len();
        push_escaped(&mut key, name.as_bytes(), &ESCAPED_IN_CANDIDATE);
        truncate_long_path(&mut key, start);
    }
    let path_end = key.len();
    let with_suffix = |counter| {
        key.truncate(path_end);
        push_algorithm_period_epoch(&mut key, counter);
        Bytes::copy_from_slice(&key)
    };
    let mut keys: SmallVec<[Bytes; 1]> = counters.iter().map(with_suffix).collect();
    for (index, _) in counters.iter().enumerate().filter(|(_, counter)| counter.limit.ban().is_some()) {
        keys.push([&keys[index], BAN_SUFFIX].concat().into());
    }
    for (index, _) in counters.iter().enumerate().filter(|(_, counter)| counter.limit.reservations().is_some()) {
        keys.push(reservations_key(&keys[index]));
    }
    for (index, _) in counters.iter().enumerate().filter(|(_, counter)| counter.limit.is_counted_in_region()) {
        keys.push([&keys[index], POOL_SUFFIX].concat().into());
    }
    keys
}

/// End of the key of the pool of a region beside a counter.
const POOL_SUFFIX: &[u8] = b":pool";

/// Returns the key of the counter that a pool is beside.
pub(super) fn counter_key_of_pool(pool_key: &[u8]) -> &[u8] {
    pool_key.strip_suffix(POOL_SUFFIX).unwrap_or(pool_key)
}

/// Returns the key in the global Redis under which a region reports its list of regions.
pub(super) fn region_list_key(prefix: &str, region: &str) -> Bytes {
    let mut key = key_head(prefix);
    key.extend_from_slice(format!("regions}}:{region}").as_bytes());
    key.freeze()
}

/// End of the key of the ban beside a counter.
const BAN_SUFFIX: &[u8] = b":ban";

/// End of the key of the reservations of a counter.
const RESERVATIONS_SUFFIX: &[u8] = b":reservations";

/// Returns the key of the reservations of a counter, in the same slot.
pub(super) fn reservations_key(counter_key: &[u8]) -> Bytes {
    [counter_key, RESERVATIONS_SUFFIX].concat().into()
}

/// Begins the name of a candidate, after the path. No algorithm has this name.
const CANDIDATE_MARK: &[u8] = b":candidate=";

/// End of the key of a record of leases; keys of counters end in a period or an epoch.
const LEASES_SUFFIX: &[u8] = b":leases";

/// Returns the key of the record of leases beside a counter: it has the same path, and the same candidate.
pub fn leases_key(counter_key: &[u8]) -> Bytes {
    let path_end = counter_key.iter().position(|byte| *byte == b'}').map_or(counter_key.len(), |brace| brace + 1);
    let (path, rest) = counter_key.split_at(path_end);
    let candidate_end = rest
        .strip_prefix(CANDIDATE_MARK)
        .map_or(0, |name| CANDIDATE_MARK.len() + name.iter().position(|byte| *byte == b':').unwrap_or(name.len()));
    [path, &rest[..candidate_end], LEASES_SUFFIX].concat().into()
}

/// Precedes the algorithm in the key of a limit that takes the overflow of another.
const OVERFLOW_MARK: &[u8] = b":overflow_";

/// Precedes the algorithm in the key of a counter that a region counts.
const REGION_MARK: &[u8] = b":part_";

/// Returns the key in the global Redis of a counter that a region counts: it has the same slot there.
pub(super) fn global_key(region_key: &[u8]) -> Bytes {
    let (start, end) = find_region_mark(region_key).map_or((0, 0), |at| (at, at + REGION_MARK.len()));
    [&region_key[..start], b":global_less_parts_", &region_key[end..]].concat().into()
}

/// Returns the position of [`REGION_MARK`], which stands after the path.
fn find_region_mark(key: &[u8]) -> Option<usize> {
    let path_end = key.iter().position(|byte| *byte == b'}')?;
    memmem::find(&key[path_end..], REGION_MARK).map(|at| path_end + at)
}

/// End of the key of a record of holds.
const HOLDS_SUFFIX: &[u8] = b":holds";

/// Returns the key of the record of holds beside a counter, in the same slot.
pub fn holds_key(counter_key: &[u8]) -> Bytes {
    [counter_key, HOLDS_SUFFIX].concat().into()
}

/// Returns true for the key of a record of leases, of holds or of reservations.
pub(super) fn is_record_key(key: &[u8]) -> bool {
    [LEASES_SUFFIX, HOLDS_SUFFIX, RESERVATIONS_SUFFIX].iter().any(|suffix| key.ends_with(suffix))
}

/// Returns the text before the path: the prefix, the version and the opening brace.
pub(super) fn key_head(prefix: &str) -> BytesMut {
    let mut head = Vec::with_capacity(KEY_CAPACITY);
    push_prefix_and_version(&mut head, prefix);
    BytesMut::from(&head[..])
}

fn push_prefix_and_version(key: &mut Vec<u8>, prefix: &str) {
    push_escaped(key, prefix.as_bytes(), &ESCAPED_IN_PREFIX);
    key.extend_from_slice(b"tk1:{");
}

/// Set of bytes, as a table.
type ByteSet = [bool; 256];

static ESCAPED_IN_PREFIX: ByteSet = byte_set(br"\{}");
static ESCAPED_IN_PATH: ByteSet = byte_set(br"\|={}");
static ESCAPED_IN_CANDIDATE: ByteSet = byte_set(br"\|={}:");

const fn byte_set(bytes: &[u8]) -> ByteSet {
    let (mut set, mut index) = ([false; 256], 0);
    while index < bytes.len() {
        set[bytes[index] as usize] = true;
        index += 1;
    }
    set
}

fn push_escaped_counter_path(key: &mut Vec<u8>, path: &CounterPath<'_>) {
    push_escaped(key, path.domain.as_bytes(), &ESCAPED_IN_PATH);
    let mut shared = path.shared.iter().peekable();
    for (index, entry) in path.entries.iter().enumerate() {
        key.push(b'|');
        push_escaped(key, entry.key, &ESCAPED_IN_PATH);
        key.push(b'=');
        match shared.next_if(|(shared_index, _)| *shared_index == index) {
            Some((_, pattern)) => {
                key.extend_from_slice(br"\*");
                push_escaped(key, pattern, &ESCAPED_IN_PATH);
            }
            None => push_escaped(key, entry.value, &ESCAPED_IN_PATH),
        }
    }
}

fn push_escaped(key: &mut Vec<u8>, mut text: &[u8], escaped: &ByteSet) {
    while let Some(index) = text.iter().position(|byte| escaped[usize::from(*byte)]) {
        key.extend_from_slice(&text[..index]);
        key.push(b'\\');
        push_hex(key, text[index]);
        text = &text[index + 1..];
    }
    key.extend_from_slice(text);
}

/// Appends a byte as two hexadecimal digits.
fn push_hex(key: &mut Vec<u8>, byte: u8) {
    const HEX_DIGITS: &[u8; 16] = b"0123456789abcdef";
    key.extend_from_slice(&[HEX_DIGITS[usize::from(byte >> 4)], HEX_DIGITS[usize::from(byte & 15)]]);
}

/// Truncates a long path. A path that is not truncated contains no `\#`, so the two cannot be equal.
fn truncate_long_path(key: &mut Vec<u8>, start: usize) {
    if key.len() - start > MAX_PATH_BYTES {
        let digest = blake3::hash(&key[start..]);
        key.truncate(start + MAX_PATH_BYTES - DIGEST_BYTES);
        key.extend_from_slice(br"\#");
        for byte in &digest.as_bytes()[..16] {
            push_hex(key, *byte);
        }
    }
}

/// Returns the SCAN pattern of a domain's counters.
pub(super) fn domain_scan_pattern(prefix: &str, domain: &str) -> Vec<u8> {
    let mut key = Vec::with_capacity(KEY_CAPACITY);
    push_prefix_and_version(&mut key, prefix);
    push_escaped(&mut key, domain.as_bytes(), &ESCAPED_IN_PATH);
    key.push(b'|');
    let mut pattern = Vec::with_capacity(key.len() + 8);
    for byte in key {
        if br"*?[]\".contains(&byte) {
            pattern.push(b'\\');
        }
        pattern.push(byte);
    }
    pattern.push(b'*');
    pattern
}

/// Path of counters: a domain and its entries.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OwnedCounterPath {
    /// The domain.
    pub domain: Vec<u8>,
    /// Key and value of each entry.
    pub entries: Vec<[Vec<u8>; 2]>,
    /// Indices of the entries whose value is a pattern that several values share.
    pub shared: Vec<usize>,
}

/// Parses the path of a key; `None` if the key has another format or its path is truncated.
pub fn parse_path(prefix: &str, key: &[u8]) -> Option<OwnedCounterPath> {
    let path = key.strip_prefix(&*key_head(prefix))?;
    let end = path.iter().position(|byte| *byte == b'}')?;
    let mut parts = path[..end].split(|byte| *byte == b'|');
    let domain = unescape(parts.next()?)?;
    let (mut entries, mut shared) = (Vec::new(), Vec::new());
    for (index, part) in parts.enumerate() {
        let equals = part.iter().position(|byte| *byte == b'=')?;
        let (name, value) = (&part[..equals], &part[equals + 1..]);
        let value = match value.strip_prefix(br"\*") {
            Some(pattern) => {
                shared.push(index);
                pattern
            }
            None => value,
        };
        entries.push([unescape(name)?, unescape(value)?]);
    }
    Some(OwnedCounterPath { domain, entries, shared })
}

fn unescape(mut text: &[u8]) -> Option<Vec<u8>> {
    let mut plain = Vec::with_capacity(text.len());
    while let Some(index) = text.iter().position(|byte| *byte == b'\\') {
        plain.extend_from_slice(&text[..index]);
        let digits = std::str::from_utf8(text.get(index + 1..index + 3)?).ok()?;
        plain.push(u8::from_str_radix(digits, 16).ok()?);
        text = &text[index + 3..];
    }
    plain.extend_from_slice(text);
    Some(plain)
}

/// Appends algorithm, period and epoch, which distinguish the counters of a path. Equal lengths of periods are equal.
fn push_algorithm_period_epoch(key: &mut Vec<u8>, counter: &Counter<'_>) {
    let limit = counter.limit;
    key.extend_from_slice(match limit.chain_position().takes_overflow() {
        true => OVERFLOW_MARK,
        false if limit.is_counted_in_region() => REGION_MARK,
        false => b":",
    });
    key.extend_from_slice(limit.algorithm().name().as_bytes());
    if limit.is_concurrent() {
        return push_epoch(key, counter.epoch);
    }
    if let Some(window) = limit.calendar_windows() {
        key.push(b':');
        key.extend_from_slice(window.identity().as_bytes());
        return push_epoch(key, counter.epoch);
    }
    let (period, unit) = match limit.follows_calendar_months() {
        true => (u64::from(limit.period().multiplier()), &b"mo"[..]),
        false => (limit.period_us() / 1_000_000, &b"s"[..]),
    };
    push_colon_and_number(key, period);
    key.extend_from_slice(unit);
    push_epoch(key, counter.epoch);
}

/// Appends an epoch that is not 0.
fn push_epoch(key: &mut Vec<u8>, epoch: u64) {
    if epoch != 0 {
        push_colon_and_number(key, epoch);
    }
}

/// Appends a colon and a number.
fn push_colon_and_number(key: &mut Vec<u8>, number: u64) {
    key.push(b':');
    key.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

/// Returns how much longer than a period the log of an eventual limit keeps hits, in microseconds; 0 for strict limits.
fn eventual_log_extension_us(limit: &Limit) -> u64 {
    match limit.consistency() {
        Consistency::Strict => 0,
        Consistency::Eventual(_) => log_extension_us(limit),
    }
}

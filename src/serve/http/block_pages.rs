//! Pages that block a value at once, list the blocks and undo them.
//!
//! All need the admin token, and each change writes a line to the audit log. Keys and values that are not UTF-8 are in
//! base64, as in the decision log.
//!
//! Decides: what a request to block may say (`for`, `until`, lengths); unblocking without a block (404); audit lines.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use jiff::Timestamp;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::admin_token::AuthenticatedAdmin;
use super::app_state::AppState;
use super::response::{WholeBody, respond_internal_error, respond_pretty_json};
use crate::base::clock::{Time, to_micros};
use crate::base::go_syntax::parse_unsigned_duration;
use crate::base::text::{escape_unprintable, replace_unprintable};
use crate::decide::blocks::{Block, MAX_BLOCKS};
use crate::limit::period::MAX_PERIOD_US;
use crate::serve::blocks::{BlockedEntry, ChangeBlocksError, EntryBytes};
use crate::telemetry::logs::AUDIT_TARGET;

/// Maximum length of a domain, a key and a reason, in bytes.
const MAX_NAME_BYTES: usize = 256;
/// Maximum length of a value, in bytes.
const MAX_VALUE_BYTES: usize = 1024;

/// Body of `POST /block` and `DELETE /block`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct BlockRequest {
    domain: String,
    #[serde(deserialize_with = "deserialize_entry")]
    entry: BlockedEntry,
    until: Option<String>,
    #[serde(rename = "for")]
    duration: Option<String>,
    reason: Option<String>,
}

/// Keys of `entry`.
const ENTRY_KEYS: [&str; 4] = ["key", "key_base64", "value", "value_base64"];

/// A valid body, and the bytes of its entry.
struct ParsedBlockRequest {
    request: BlockRequest,
    key: Vec<u8>,
    value: Vec<u8>,
}

/// A block as pages show it.
#[derive(Debug, Deserialize, Serialize)]
pub struct ShownBlock {
    /// Domain.
    pub domain: String,
    /// Blocked entry.
    pub entry: BlockedEntry,
    /// End, RFC 3339 in UTC.
    pub until: String,
    /// Reason that the operator gave.
    pub reason: String,
}

/// Result of a change.
#[derive(Debug, Serialize)]
struct BlockChangeReport {
    #[serde(flatten)]
    block: Option<ShownBlock>,
    #[serde(skip_serializing_if = "Option::is_none")]
    removed: Option<bool>,
    /// `fleet`: all replicas; `process`: this process only, because its counters are not in Redis.
    scope: &'static str,
    /// True if SHADOW_MODE rejects nothing, blocked values included.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    without_effect_by_shadow_mode: bool,
    /// True if no rule of the domain has the key: probably it is not what Envoy sends.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    key_in_no_rule: bool,
}

/// Page of `GET /blocks`.
#[derive(Debug, Deserialize, Serialize)]
pub struct BlockList {
    /// `fleet`: they hold for all replicas; `process`: for this process only.
    pub scope: String,
    /// Largest number of blocks.
    pub max_blocks: usize,
    /// The blocks, by domain, key and value.
    pub blocks: Vec<ShownBlock>,
}

impl From<&Block> for ShownBlock {
    fn from(block: &Block) -> Self {
        let (domain, reason) = (block.domain.clone(), block.reason.clone());
        Self { domain, entry: BlockedEntry::of_block(block), until: block.until.to_string(), reason }
    }
}

/// Reads an entry, and refuses keys that it does not have.
fn deserialize_entry<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BlockedEntry, D::Error> {
    let fields = serde_json::Map::deserialize(deserializer)?;
    if let Some(unknown) = fields.keys().find(|key| !ENTRY_KEYS.contains(&key.as_str())) {
        return Err(D::Error::unknown_field(unknown, &ENTRY_KEYS));
    }
    BlockedEntry::deserialize(serde_json::Value::Object(fields)).map_err(D::Error::custom)
}

impl BlockRequest {
    /// Reads a body; the error says what to write.
    fn parse(body: &[u8]) -> Result<ParsedBlockRequest, String> {
        let request: Self = serde_json::from_slice(body).map_err(|error| {
            let example = r#"{"domain":"shop","entry":{"key":"user","value":"ann"},"for":"10m","reason":"abuse"}"#;
            format!("{}; write {example}", replace_unprintable(&error.to_string()))
        })?;
        let (key, value) = request.entry.decode()?;
        let lengths = [
            ("domain", request.domain.len(), 1, MAX_NAME_BYTES),
            ("entry.key", key.len(), 1, MAX_NAME_BYTES),
            ("entry.value", value.len(), 0, MAX_VALUE_BYTES),
            ("reason", request.reason.as_ref().map_or(0, String::len), 0, MAX_NAME_BYTES),
        ];
        match lengths.iter().find(|(_, length, min, max)| !(*min..=*max).contains(length)) {
            Some((name, _, min, max)) => Err(format!("`{name}` must have {min} to {max} bytes")),
            None => Ok(ParsedBlockRequest { request, key, value }),
        }
    }
}

impl ParsedBlockRequest {
    /// Returns the block, which ends within 366 days.
    fn into_block(self, now: Time) -> Result<Block, String> {
        let Self { request, key, value } = self;
        let until = match (&request.until, &request.duration) {
            (Some(until), None) => until
                .parse::<Timestamp>()
                .ok()
                .and_then(|until| u64::try_from(until.as_microsecond()).ok())
                .map(Time::from_micros)
                .ok_or("`until` must be a time such as 2026-07-08T10:05:30Z")?,
            (None, Some(duration)) => {
                let duration = parse_unsigned_duration(duration);
                now.plus_us(to_micros(duration.map_err(|_| "`for` must be a duration such as 10m or 1h30m")?))
            }
            (None, None) | (Some(_), Some(_)) => return Err("write either `until` or `for`".to_owned()),
        };
        if until <= now || until.since_us(now) > MAX_PERIOD_US {
            return Err("a block must end in the future, within 366 days".to_owned());
        }
        let reason = request.reason.as_deref().map(str::trim).filter(|reason| !reason.is_empty());
        let reason = escape_unprintable(reason.ok_or("write a `reason`, for the audit log and /explain")?);
        Ok(Block { domain: request.domain, key, value, until, reason })
    }
}

/// `POST /block`: blocks a value, or changes its block.
pub(super) async fn block_value(
    admin: AuthenticatedAdmin,
    State(state): State<AppState>,
    WholeBody(body): WholeBody,
) -> Response {
    let now = state.collector.service.clock.now();
    let block = match BlockRequest::parse(&body).and_then(|request| request.into_block(now)) {
        Ok(block) => block,
        Err(problem) => return admin.reject_with_audit_log(StatusCode::BAD_REQUEST, problem),
    };
    let rules = state.collector.service.rules.current_rules_owned();
    let key_in_no_rule = match rules.map(|loaded| loaded.rules.domain_has_key(&block.domain, &block.key)) {
        Some(None) => {
            return admin.reject_with_audit_log(StatusCode::NOT_FOUND, "domain not found (/rlconfig lists them)");
        }
        Some(Some(has_key)) => !has_key,
        None => false,
    };
    let shown = ShownBlock::from(&block);
    let [key, value] = [&block.key, &block.value].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    if let Err(error) = state.blocks.add(block).await {
        let status = status_of_change_error(&error);
        return admin.reject_with_audit_log(status, error);
    }
    let (AuthenticatedAdmin { peer, path }, scope) = (&admin, scope_name(&state));
    let ShownBlock { domain, until, reason, entry: _ } = &shown;
    tracing::warn!(target: AUDIT_TARGET, peer, path, domain, key, value, until, reason, scope, "value blocked");
    let without_effect_by_shadow_mode = state.collector.service.decider.behaviour.shadow_mode;
    let (block, removed) = (Some(shown), None);
    respond_pretty_json(&BlockChangeReport { block, removed, scope, without_effect_by_shadow_mode, key_in_no_rule })
}

/// `DELETE /block`: undoes a block.
pub(super) async fn unblock_value(
    admin: AuthenticatedAdmin,
    State(state): State<AppState>,
    WholeBody(body): WholeBody,
) -> Response {
    let ParsedBlockRequest { request: BlockRequest { domain, .. }, key, value } = match BlockRequest::parse(&body) {
        Ok(parsed) => parsed,
        Err(problem) => return admin.reject_with_audit_log(StatusCode::BAD_REQUEST, problem),
    };
    let removed = match state.blocks.remove(&domain, EntryBytes { key: &key, value: &value }).await {
        Ok(removed) => removed,
        Err(error) => return admin.reject_with_audit_log(status_of_change_error(&error), error),
    };
    if !removed {
        return admin.reject_with_audit_log(StatusCode::NOT_FOUND, "there is no such block (GET /blocks lists them)");
    }
    let (AuthenticatedAdmin { peer, path }, scope) = (&admin, scope_name(&state));
    let [key, value] = [key, value].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    tracing::warn!(target: AUDIT_TARGET, peer, path, domain, key, value, scope, "value unblocked");
    let (block, removed, without_effect_by_shadow_mode, key_in_no_rule) = (None, Some(true), false, false);
    respond_pretty_json(&BlockChangeReport { block, removed, scope, without_effect_by_shadow_mode, key_in_no_rule })
}

/// `GET /blocks`: the blocks in force.
pub(super) async fn show_blocks(admin: AuthenticatedAdmin, State(state): State<AppState>) -> Response {
    let AuthenticatedAdmin { peer, path } = &admin;
    tracing::warn!(target: AUDIT_TARGET, peer, path, "blocks listed");
    let service = &state.collector.service;
    let blocks = service.decider.blocks.list(service.clock.now());
    let blocks = blocks.iter().map(|block| ShownBlock::from(&**block)).collect();
    let list = BlockList { scope: scope_name(&state).to_owned(), max_blocks: MAX_BLOCKS, blocks };
    let page = tokio::task::spawn_blocking(move || respond_pretty_json(&list)).await;
    page.unwrap_or_else(|_| respond_internal_error())
}

fn scope_name(state: &AppState) -> &'static str {
    if state.blocks.is_shared() { "fleet" } else { "process" }
}

const fn status_of_change_error(error: &ChangeBlocksError) -> StatusCode {
    match error {
        ChangeBlocksError::TooMany => StatusCode::CONFLICT,
        ChangeBlocksError::Redis(_) => StatusCode::BAD_GATEWAY,
    }
}

//! `block`, `unblock` and `blocks`: block a value at once, undo it, and list what is blocked.
//!
//! Keys and values that are not UTF-8 are in base64, as in the JSON of the server.
//!
//! Decides: options of `block`, `unblock` and `blocks`.

use serde_json::{Map, Value, json};

use super::admin_client::{AdminServerArgs, call_server, print_answer};
use super::client::PageRequest;
use super::print::{CommandOutcome, escape_and_shorten};
use crate::base::text::escape_unprintable;
use crate::base::text_table::{NumberAlignment, format_table};
use crate::serve::blocks::BlockedEntry;
use crate::serve::http::block_pages::{BlockList, ShownBlock};

/// Blocked entry.
#[derive(Debug, clap::Args)]
struct EntryArgs {
    /// Domain of the requests
    #[arg(long, value_name = "DOMAIN")]
    domain: String,
    /// Key of the entry
    #[arg(long, value_name = "KEY", required_unless_present = "key_base64", conflicts_with = "key_base64")]
    key: Option<String>,
    /// Key of the entry in base64, for bytes that are not UTF-8
    #[arg(long, value_name = "BASE64")]
    key_base64: Option<String>,
    /// Value of the entry
    #[arg(long, value_name = "VALUE", required_unless_present = "value_base64", conflicts_with = "value_base64")]
    value: Option<String>,
    /// Value of the entry in base64, for bytes that are not UTF-8
    #[arg(long, value_name = "BASE64")]
    value_base64: Option<String>,
}

/// Arguments of `block`.
#[derive(Debug, clap::Args)]
pub(super) struct BlockArgs {
    #[command(flatten)]
    entry: EntryArgs,
    /// Length of the block, such as 10m or 1h30m; 366 days at most
    #[arg(long = "for", value_name = "DURATION", required_unless_present = "until", conflicts_with = "until")]
    duration: Option<String>,
    /// End of the block, such as 2026-07-08T10:05:30Z
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// Reason, for the audit log, /explain, /fleet and the decision log
    #[arg(long, value_name = "TEXT")]
    reason: String,
    #[command(flatten)]
    server: AdminServerArgs,
}

/// Arguments of `unblock`.
#[derive(Debug, clap::Args)]
pub(super) struct UnblockArgs {
    #[command(flatten)]
    entry: EntryArgs,
    #[command(flatten)]
    server: AdminServerArgs,
}

/// Arguments of `blocks`.
#[derive(Debug, clap::Args)]
pub(super) struct ListArgs {
    #[command(flatten)]
    server: AdminServerArgs,
}

pub(super) const BLOCK_HELP: &str = "\
Every request of the domain that has the entry in any descriptor is rejected, before any rule and without a counter. \
With counters in Redis the block holds for all replicas within a second, and over restarts; else for that server only. A \
block of the same entry is replaced.

The token is that of the server: TOLLKEEPER_ADMIN_TOKEN or TOLLKEEPER_ADMIN_TOKEN_FILE in the environment.

Examples:
  tollkeeper block --domain example --key user --value ann \\
    --for 10m --reason abuse
  tollkeeper block --domain example --key token --value-base64 /wA= \\
    --for 1h30m --reason leaked

Exit codes: 0 blocked, 1 the server refused or did not answer, 2 invalid usage.";

pub(super) const UNBLOCK_HELP: &str = "\
The token is that of the server: TOLLKEEPER_ADMIN_TOKEN or TOLLKEEPER_ADMIN_TOKEN_FILE in the environment.

Examples:
  tollkeeper unblock --domain example --key user --value ann

Exit codes: 0 unblocked, 1 there was no such block or the server did not answer, 2 invalid usage.";

pub(super) const LIST_HELP: &str = "\
The token is that of the server: TOLLKEEPER_ADMIN_TOKEN or TOLLKEEPER_ADMIN_TOKEN_FILE in the environment. Keys and \
values that are not UTF-8 are shown as base64:...; `top --fleet` shows blocks without their values, and needs no token.

Examples:
  tollkeeper blocks
  tollkeeper blocks --addr localhost:6070 --json

Exit codes: 0 listed, 1 the server refused or did not answer, 2 invalid usage.";

/// Blocks a value.
pub(super) fn run_block(args: &BlockArgs) -> CommandOutcome {
    let mut body = args.entry.to_json();
    body.insert("reason".to_owned(), json!(args.reason));
    let end = [("for", &args.duration), ("until", &args.until)].into_iter();
    body.extend(end.filter_map(|(name, text)| Some((name.to_owned(), json!(text.as_ref()?)))));
    let body = Value::Object(body).to_string();
    print_answer(call_server(&args.server, "/block", PageRequest::Post(&body)), &args.server, format_blocked)
}

/// Undoes a block.
pub(super) fn run_unblock(args: &UnblockArgs) -> CommandOutcome {
    let body = Value::Object(args.entry.to_json()).to_string();
    let format = |answer: &[u8]| Some(format!("unblocked{}\n", format_scope(&serde_json::from_slice(answer).ok()?)));
    print_answer(call_server(&args.server, "/block", PageRequest::Delete(&body)), &args.server, format)
}

/// Lists the blocks.
pub(super) fn run_list(args: &ListArgs) -> CommandOutcome {
    print_answer(call_server(&args.server, "/blocks", PageRequest::Get), &args.server, format_block_list)
}

impl EntryArgs {
    /// Returns the domain and the entry as the server reads them.
    fn to_json(&self) -> Map<String, Value> {
        let Self { domain, key, key_base64, value, value_base64 } = self;
        let fields = [("key", key), ("key_base64", key_base64), ("value", value), ("value_base64", value_base64)];
        let fields = fields.into_iter().filter_map(|(name, text)| Some((name.to_owned(), json!(text.as_ref()?))));
        let entry = Value::Object(fields.collect());
        [("domain".to_owned(), json!(domain)), ("entry".to_owned(), entry)].into_iter().collect()
    }
}

/// Formats the answer to `block`.
fn format_blocked(answer: &[u8]) -> Option<String> {
    let report: Value = serde_json::from_slice(answer).ok()?;
    let block: ShownBlock = serde_json::from_value(report.clone()).ok()?;
    let without_effect = report["without_effect_by_shadow_mode"] == true;
    let mut note = if without_effect { "SHADOW_MODE is on: nothing is rejected\n" } else { "" }.to_owned();
    if report["key_in_no_rule"] == true {
        note += "warning: no rule of this domain has this key: does Envoy send it? (explain shows what matches, \
                 unblock undoes the block)\n";
    }
    let (entry, until) = (escape_and_shorten(&format_entry(&block.entry)), escape_unprintable(&block.until));
    Some(format!("blocked {entry} until {until}{}\n{note}", format_scope(&report)))
}

/// Formats for whom a change holds.
fn format_scope(report: &Value) -> &'static str {
    match report["scope"].as_str() {
        Some("fleet") => " on all replicas",
        _ => " on this server only: its counters are not in Redis",
    }
}

/// Formats the answer to `blocks`.
fn format_block_list(answer: &[u8]) -> Option<String> {
    let list: BlockList = serde_json::from_slice(answer).ok()?;
    if list.blocks.is_empty() {
        return Some("nothing is blocked\n".to_owned());
    }
    let row = |block: &ShownBlock| {
        let texts = [&block.until, &block.domain, &format_entry(&block.entry), &block.reason];
        texts.map(|text| escape_and_shorten(text))
    };
    let table =
        format_table(&["UNTIL", "DOMAIN", "ENTRY", "REASON"], list.blocks.iter().map(row), NumberAlignment::Left);
    let scope = if list.scope == "fleet" { "on all replicas" } else { "on this server only" };
    Some(format!("{table}{} of at most {}, {scope}\n", list.blocks.len(), list.max_blocks))
}

/// Formats an entry: `user=ann`, `user=base64:/wA=`.
fn format_entry(entry: &BlockedEntry) -> String {
    let part = |text: &Option<String>, base64: &Option<String>| match (text, base64) {
        (Some(text), _) => text.clone(),
        (None, Some(base64)) => format!("base64:{base64}"),
        (None, None) => String::new(),
    };
    format!("{}={}", part(&entry.key, &entry.key_base64), part(&entry.value, &entry.value_base64))
}

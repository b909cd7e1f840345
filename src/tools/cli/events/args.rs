//! Arguments and help of `events`.
//!
//! Decides: options of `events`.

use std::ffi::OsString;

use crate::decide::log::redis_stream::EntryId;

/// Arguments of `events`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Key of the stream
    #[arg(long, value_name = "KEY")]
    pub(super) stream: String,
    /// Print the records after the entry of this id [default: all]
    #[arg(long, value_name = "ID", default_value_t, hide_default_value = true)]
    pub(super) after: EntryId,
    /// Wait for further records instead of ending
    #[arg(long)]
    pub(super) follow: bool,
    /// End after this many records
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) count: Option<u64>,
    /// Print each record as {"id":...,"record":...}
    #[arg(long)]
    pub(super) ids: bool,
    /// Redis of the stream, as in TOLLKEEPER_DECISION_LOG_REDIS_URL
    #[arg(long, value_name = "URL")]
    pub(super) url: Option<String>,
    /// Removed
    #[arg(long, hide = true)]
    pub(super) group: Option<OsString>,
    /// Removed
    #[arg(long, hide = true)]
    pub(super) consumer: Option<OsString>,
    /// Removed
    #[arg(long, hide = true)]
    pub(super) claim_after: Option<OsString>,
    /// Removed
    #[arg(long, hide = true)]
    pub(super) ack: Option<OsString>,
}

pub(crate) const HELP: &str = "\
Prints one JSON record per line, in the order of the stream, from its start or after an entry. To go on later, keep the \
id of the last record (--ids), and give it as --after.

Redis is that of the server's settings (TOLLKEEPER_DECISION_LOG_REDIS_..., REDIS_...); 5.0 or newer. Its user needs \
+xread.

Examples:
  tollkeeper events --stream decisions
  tollkeeper events --stream decisions --count 10 > ten.jsonl
  tollkeeper events --stream decisions --ids --follow \\
    --after 1783512000000-0

Exit codes: 0 ended or stopped, 1 Redis or the output failed, 2 invalid usage or settings.";

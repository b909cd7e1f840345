//! Arguments and help of `events`.
//!
//! Decides: options of `events`, their defaults and ranges.

use std::time::Duration;

use crate::settings::value::number::DurationRange;
use crate::tools::cli::request_flags::parse_duration;

/// Arguments of `events`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Key of the stream
    #[arg(long, value_name = "KEY")]
    pub(super) stream: String,
    /// Consumer group; created at the start of the stream if it is missing
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(super) group: String,
    /// Name of this consumer, different for each consumer of the group [default: HOST-PID]
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(super) consumer: Option<String>,
    /// Wait for further records instead of ending
    #[arg(long)]
    pub(super) follow: bool,
    /// End after this many records
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) count: Option<u64>,
    /// Time after which records that another consumer did not acknowledge are taken over
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_claim_after)]
    pub(super) claim_after: Duration,
    /// Acknowledge records after printing them, or when standard input has their ids, one per line
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = AckTrigger::Printed)]
    pub(super) ack: AckTrigger,
    /// Redis of the stream, as in TOLLKEEPER_DECISION_LOG_REDIS_URL
    #[arg(long, value_name = "URL")]
    pub(super) url: Option<String>,
}

/// Event that acknowledges a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum AckTrigger {
    /// The record was printed
    Printed,
    /// Standard input has the id; each record is printed as {"id":...,"deliveries":...,"record":...}
    Stdin,
}

pub(crate) const HELP: &str = "\
Prints one JSON record per line. The consumers of a group share the records; each is printed at least once, again if its \
consumer died before it was acknowledged. With a --consumer of its own, a worker that restarts begins with its own \
records at once; else another takes them over after --claim-after.

Redis is that of the server's settings (TOLLKEEPER_DECISION_LOG_REDIS_..., REDIS_...); 5.0 or newer. Its user needs \
+xreadgroup +xpending +xclaim +xrange +xack, and +xgroup to create a group.

Examples:
  tollkeeper events --stream decisions --group report
  tollkeeper events --stream decisions --group report --count 10 > ten.jsonl
  tollkeeper events --stream decisions --group retry --consumer worker-1 \\
    --follow

Exit codes: 0 ended or stopped, 1 Redis or the output failed, 2 invalid usage or settings.";

fn parse_claim_after(text: &str) -> Result<Duration, String> {
    parse_duration(text, &DurationRange::new(Duration::from_secs(1), Duration::from_secs(7 * 86_400)))
}

//! Figures of a recommendation. The field names of the JSON are an interface.

use serde::Serialize;

use super::demand::{DemandTotals, RecordedRejections};
use crate::tools::simulate::tally::TimelineResults;

/// Figures of a recommendation.
#[derive(Clone, Debug, Serialize)]
pub struct RecommendationResults {
    /// Version of the format.
    pub version: u32,
    /// The limit that is in the rules.
    pub rule: ExistingLimitResults,
    /// Traffic that the figures come from.
    pub basis: TrafficBasisResults,
    /// Share of keys that may be rejected.
    pub goal: RejectionGoalResults,
    /// Reasons why the figures may differ from those of a server.
    pub warnings: Vec<String>,
    /// Peak use of the keys, by period.
    #[serde(rename = "use")]
    pub uses: Vec<PeakUseResults>,
    /// Periods that were left out.
    pub left_out_periods: Vec<UntriedPeriod>,
    /// Smallest limits, the recommended one first.
    pub limits: Vec<SmallestLimitResults>,
    /// Charges over time under the recommended limit; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeline: Option<TimelineResults>,
    /// Rule file with the recommended limit; absent if no limit was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub yaml: Option<String>,
}

/// The limit that the recommendation is for, as the rules have it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ExistingLimitResults {
    /// Path, as in `/rlconfig`.
    pub path: String,
    /// File, line and column of the rule.
    pub location: String,
    /// The limit in words.
    pub limit: String,
    /// Keys that it rejects in these charges, alone and with empty counters at the start.
    pub rejected_keys: u64,
    /// Their share of the keys, 0 to 1.
    pub rejected_keys_share: f64,
}

/// Traffic that the figures come from.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TrafficBasisResults {
    /// Keys with a charge.
    pub keys: u64,
    /// Requests and hits.
    #[serde(flatten)]
    pub totals: DemandTotals,
    /// Time of the first charge, RFC 3339 in UTC.
    pub first: String,
    /// Time of the last charge.
    pub last: String,
    /// Time between them, in seconds.
    pub span_seconds: f64,
    /// Processes of the traffic.
    pub processes: u64,
    /// Share of keys in the log, 0 to 1; absent without a header.
    pub sample: Option<f64>,
    /// Decisions that the log lost.
    pub dropped: u64,
    /// Earlier rejections of these charges; absent if the traffic has no answers.
    pub already_rejected: Option<RecordedRejections>,
}

/// Share of keys that may be rejected.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct RejectionGoalResults {
    /// Share, 0 to 1; absent if a number of keys was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rejected_keys_share: Option<f64>,
    /// Number of these keys, rounded down.
    pub rejected_keys: u64,
}

/// Peak use of the keys: most hits in any span of one period, less refunds.
#[derive(Clone, Debug, Serialize)]
pub struct PeakUseResults {
    /// Period, such as `minute` or `5_minute`.
    pub period: String,
    /// Median over the keys.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 99th percentile.
    pub p99: u64,
    /// Maximum.
    pub max: u64,
}

/// Period that was not searched.
#[derive(Clone, Debug, Serialize)]
pub struct UntriedPeriod {
    /// Period.
    pub period: String,
    /// Reason.
    pub reason: String,
}

/// Smallest limit of a period that rejects no more keys than the goal allows; periods without one are left out.
#[derive(Clone, Debug, Serialize)]
pub struct SmallestLimitResults {
    /// Algorithm: that of the rule.
    pub algorithm: &'static str,
    /// Period.
    pub period: String,
    /// The limit.
    pub requests_per_unit: u64,
    /// token_bucket: size of the bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket_size: Option<u64>,
    /// leaky_bucket: size of the queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_size: Option<u64>,
    /// Keys that it rejects at least once, by replay of their charges.
    pub rejected_keys: u64,
    /// Their share of the keys, 0 to 1.
    pub rejected_keys_share: f64,
    /// The limit is that of `yaml`.
    pub recommended: bool,
}

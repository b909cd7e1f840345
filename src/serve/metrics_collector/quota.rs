//! Metrics of the rate limit quota service; none if it is off.
//!
//! Decides: metrics of RLQS.

use crate::serve::quota::service::QuotaService;
use crate::serve::quota::stats::Count;
use crate::telemetry::metrics::Family;

/// Emits the metrics of the quota service.
pub(super) fn emit_quota(quota: Option<&QuotaService>, emit: &mut dyn FnMut(Family)) {
    let Some(quota) = quota else { return };
    let stats = &quota.stats;
    emit(Family::gauge("tollkeeper_rlqs_streams", "Number of open quota streams.", quota.stream_count()));
    emit(Family::gauge("tollkeeper_rlqs_buckets", "Number of buckets of all quota streams.", quota.bucket_count()));
    emit(Family::gauge("tollkeeper_rlqs_keys", "Number of keys whose limits are divided.", quota.key_count()));
    let mut count = |name, help, count: &Count| {
        emit(Family::counter(name, help, count.total()));
    };
    count("tollkeeper_rlqs_reports_total", "Total number of messages with usage reports.", &stats.reports);
    count(
        "tollkeeper_rlqs_assignments_total",
        "Total number of assignments sent, renewals included.",
        &stats.assignments,
    );
    count("tollkeeper_rlqs_assigned_hits_total", "Total number of tokens in assigned buckets.", &stats.assigned_hits);
    let hits = [("allowed", stats.allowed_hits.total()), ("denied", stats.denied_hits.total())];
    let help = "Total number of requests that proxies reported, by their verdict.";
    emit(Family::counter_by_label("tollkeeper_rlqs_reported_hits_total", help, "verdict", hits));
    let mut count = |name, help, count: &Count| {
        emit(Family::counter(name, help, count.total()));
    };
    let help = "Total number of requests that proxies let pass without a rule for their bucket.";
    count("tollkeeper_rlqs_unmatched_hits_total", help, &stats.unmatched_hits);
    let help = "Total number of lent hits that proxies used beyond what they had, such as before an assignment.";
    count("tollkeeper_rlqs_debt_hits_total", help, &stats.debt_hits);
    let help = "Total number of buckets that proxies were told to forget: idle ones, and those above the maximum.";
    count("tollkeeper_rlqs_abandoned_buckets_total", help, &stats.abandoned);
    let help = "Total number of reports of buckets whose id is not UTF-8, or too long.";
    count("tollkeeper_rlqs_unassignable_ids_total", help, &stats.unassignable);
    let help = "Total number of reports of buckets under a limit that cannot be divided.";
    count("tollkeeper_rlqs_indivisible_reports_total", help, &stats.refused);
    let help = "Total number of requests for hits to the store that failed.";
    count("tollkeeper_rlqs_store_errors_total", help, quota.store_failures());
    let help = "Total number of streams that were ended because the proxy did not read.";
    count("tollkeeper_rlqs_unread_streams_total", help, &stats.unread_streams);
}

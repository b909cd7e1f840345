//! Checks of filters that get quotas over RLQS: what Envoy 1.40 ignores in them, and what crashes it.

use super::bootstrap::ConnectionManager;
use super::config_node::ConfigNode;
use super::descriptors::find_formatter;
use super::finding::{EnvoyCheck, EnvoyFindings};

/// Type of the settings of a bucket, in the matcher of a quota filter.
const BUCKET_SETTINGS_TYPE: &str = "envoy.extensions.filters.http.rate_limit_quota.v3.RateLimitQuotaBucketSettings";

/// Interval in which Envoy reports, in seconds.
const REPORT_INTERVAL_S: f64 = 5.0;

/// Checks the quota filters of a connection manager.
pub(super) fn check_manager(manager: &ConnectionManager<'_, '_>, found: &mut EnvoyFindings) {
    for filter in &manager.quota_filters {
        let metadata = filter.field("rlqs_server").map_or_else(Vec::new, |server| server.items("initial_metadata"));
        for header in &metadata {
            if let Some(formatter) = header.text("value").and_then(find_formatter) {
                let message = format!("`{formatter}` in `initial_metadata` of a quota stream");
                found.report(EnvoyCheck::RlqsMetadataLiteral, header, message);
            }
        }
        visit_buckets(filter, found);
    }
}

/// Visits the settings of all buckets below; the parser bounds depth and number.
fn visit_buckets(node: &ConfigNode<'_, '_>, found: &mut EnvoyFindings) {
    if let Some((BUCKET_SETTINGS_TYPE, settings)) = node.type_name_and_message() {
        check_bucket(&settings, found);
    }
    if let Some(preview) = node.field("keep_matching").filter(ConfigNode::is_true) {
        found.report(EnvoyCheck::RlqsPreviewDenies, &preview, "a preview bucket (`keep_matching`)");
    }
    node.fields().for_each(|(_, child)| visit_buckets(&child, found));
    node.elements().for_each(|child| visit_buckets(&child, found));
}

fn check_bucket(settings: &ConfigNode<'_, '_>, found: &mut EnvoyFindings) {
    let interval = settings.field("reporting_interval");
    let differs = settings.seconds("reporting_interval").is_some_and(|seconds| seconds != REPORT_INTERVAL_S);
    if let Some(interval) = interval.filter(|_| differs) {
        found.report(EnvoyCheck::RlqsReportingInterval, &interval, "a `reporting_interval` other than 5s");
    }
    if let Some(fallback) = settings.field_at(&["no_assignment_behavior", "fallback_rate_limit"]) {
        if let Some(bucket) = fallback.field("token_bucket") {
            let message = "a `token_bucket` in `no_assignment_behavior`";
            found.report(EnvoyCheck::RlqsCrash, &bucket, message);
        }
        report_ignored_rate(&fallback, "no_assignment_behavior", found);
    }
    let Some(expired) = settings.field("expired_assignment_behavior") else { return };
    if let Some(reuse) = expired.field("reuse_last_assignment") {
        found.report(EnvoyCheck::RlqsFallbackIgnored, &reuse, "`reuse_last_assignment`");
    }
    let Some(fallback) = expired.field("fallback_rate_limit") else { return };
    if expired.field("expired_assignment_behavior_timeout").is_none() {
        let message = "a fallback without `expired_assignment_behavior_timeout` is in force for no time";
        found.report(EnvoyCheck::RlqsFallbackIgnored, &fallback, message);
    }
    report_ignored_rate(&fallback, "expired_assignment_behavior", found);
    if let Some(bucket) = fallback.field("token_bucket") {
        if bucket.seconds("fill_interval").is_none_or(|seconds| seconds < 1.0) {
            let node = bucket.field("fill_interval").unwrap_or_else(|| bucket.clone());
            found.report(EnvoyCheck::RlqsUnlimitedBucket, &node, "a `fill_interval` below one second");
        }
        if bucket.field("tokens_per_fill").is_none() {
            found.report(EnvoyCheck::RlqsNeverFilled, &bucket, "a bucket without `tokens_per_fill`");
        }
    }
}

fn report_ignored_rate(fallback: &ConfigNode<'_, '_>, place: &str, found: &mut EnvoyFindings) {
    if let Some(rate) = fallback.field("requests_per_time_unit") {
        let message = format!("`requests_per_time_unit` in `{place}`");
        found.report(EnvoyCheck::RlqsFallbackIgnored, &rate, message);
    }
}

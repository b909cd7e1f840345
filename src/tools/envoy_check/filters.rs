//! Checks of filters and of the places of `rate_limits`: what is never sent, and what is sent otherwise than written.
//!
//! Of filters that get quotas over RLQS: what Envoy 1.40 ignores in them, and what crashes it.
//!
//! Decides: which filters and timeouts `check --envoy` reports.

use std::collections::HashSet;

use super::bootstrap::{Bootstrap, ConnectionManager, RateLimitFilter, RuntimeFlag, UnclaimedPerRoute};
use super::config_node::ConfigNode;
use super::descriptors::{LimitEntry, LimitPlace, find_formatter};
use super::finding::{EnvoyCheck, EnvoyFindings, FindingSeverity};
use crate::base::text::truncate_and_escape;

/// Maximum length of a name in a message, in characters.
const MAX_NAME_CHARS: usize = 100;

/// Checks the rate limit filters of a connection manager and their descriptors.
pub(super) fn check_manager(
    manager: &ConnectionManager<'_, '_>,
    bootstrap: &Bootstrap<'_, '_>,
    found: &mut EnvoyFindings,
) {
    for filter in &manager.filters {
        let entries = manager.entries_of(filter);
        if entries.is_empty() && !manager.has_unknown_routes {
            let message = format!("no `rate_limits` for the filter '{}'", filter.name);
            found.report(EnvoyCheck::FilterNeverAsks, &filter.listed, message);
        }
        hint_at_missing_timeout(filter, &entries, found);
        hint_at_dropped_descriptors(&entries, found);
    }
    check_per_route_names(manager, bootstrap, found);
    if !manager.filters.is_empty() {
        check_route_entries(manager, found);
    }
    for answer in manager.limited_direct_responses.iter().filter(|_| !manager.filters.is_empty()) {
        found.report(EnvoyCheck::DirectResponseNotLimited, answer, "limits on a route that answers by itself");
    }
    let own = manager.filters.iter().flat_map(|filter| &filter.entries);
    for entry in own.chain(&manager.route_entries) {
        check_formatters(entry, bootstrap.formatters, found);
        warn_about_spoofable_address(entry, manager, found);
    }
}

/// Reports each RateLimitPerRoute whose name no HTTP filter has. Routes from elsewhere may be for another manager.
fn check_per_route_names(
    manager: &ConnectionManager<'_, '_>,
    bootstrap: &Bootstrap<'_, '_>,
    found: &mut EnvoyFindings,
) {
    for UnclaimedPerRoute { name, node } in &manager.unclaimed_per_route {
        if !manager.has_own_routes && bootstrap.managers.iter().any(|other| other.has_http_filter(name)) {
            continue;
        }
        let fix = match &*manager.filters {
            [only] => Some(format!("write it under `{}`, the name of the filter", only.name)),
            _ => None,
        };
        let message = format!("RateLimitPerRoute under '{name}', and no HTTP filter has this name");
        found.report_with_fix(EnvoyCheck::PerRouteWithoutFilter, node, message, fix);
    }
}

/// Headers that each request has.
const HEADERS_OF_EVERY_REQUEST: [&str; 5] = [":path", ":method", ":authority", ":scheme", "x-request-id"];

/// Hints at descriptors that Envoy drops when a header or a query parameter is missing, once for each.
///
/// What is sent at the end of a stream has the entries of another descriptor, which has the hint. A header that
/// `header_value_match` names was thought of.
fn hint_at_dropped_descriptors(entries: &[LimitEntry<'_, '_>], found: &mut EnvoyFindings) {
    let matches = entries.iter().flat_map(|entry| &entry.actions).flat_map(|action| action.node.items("headers"));
    // Envoy compares names of headers without case.
    let matched: HashSet<String> =
        matches.filter_map(|header| header.text("name")).map(str::to_ascii_lowercase).collect();
    let is_expected = |name: &str| {
        let name = name.to_ascii_lowercase();
        HEADERS_OF_EVERY_REQUEST.contains(&&*name) || matched.contains(&name)
    };
    for entry in entries.iter().filter(|entry| !entry.on_stream_done) {
        let required = entry.actions.iter().filter(|action| !action.is_optional).filter_map(|action| {
            let header = action.node.text("header_name").filter(|name| !is_expected(name));
            header.or_else(|| action.node.text("query_parameter_name"))
        });
        let required: Vec<String> =
            required.map(|name| format!("`{}`", truncate_and_escape(name, MAX_NAME_CHARS))).collect();
        let message = match &*required {
            [] => continue,
            [one] => format!("this descriptor needs {one}, which a request may lack"),
            several => format!("this descriptor needs all of {}, which a request may lack", several.join(", ")),
        };
        found.report(EnvoyCheck::DescriptorMayBeDropped, &entry.node, message);
    }
}

/// Checks that the items of routes and virtual hosts are sent, with what they say.
fn check_route_entries(manager: &ConnectionManager<'_, '_>, found: &mut EnvoyFindings) {
    let in_routes = manager.route_entries.iter().filter(|entry| entry.place.drops_hits());
    for entry in in_routes {
        let mut of_stage = manager.filters.iter().filter(|filter| filter.stage == entry.stage).peekable();
        let mut is_own_used = false;
        if of_stage.peek().is_none() {
            let message = format!("`stage: {}`, and no rate limit filter has it", entry.stage);
            found.report(EnvoyCheck::StageWithoutFilter, &entry.node, message);
        } else if of_stage.all(|filter| {
            is_own_used = is_own_used || !filter.entries.is_empty();
            !filter.entries.is_empty() || entry.replaced_for.contains(&filter.name)
        }) {
            let message = match is_own_used {
                true => "`rate_limits` beside those of the filter",
                false => "`rate_limits` beside those of a RateLimitPerRoute",
            };
            found.report(EnvoyCheck::RouteLimitsIgnored, &entry.node, message);
        }
        if let Some(hits) = entry.node.field("hits_addend") {
            let what = if hits.flag("is_negative_hits") { "`is_negative_hits`" } else { "`hits_addend`" };
            let place = match entry.place {
                LimitPlace::VirtualHost => "a virtual host",
                LimitPlace::Route | LimitPlace::PerRoute | LimitPlace::Filter => "a route",
            };
            found.report(EnvoyCheck::HitsAddendDropped, &hits, format!("{what} in {place}"));
        }
    }
}

/// Hints at a timeout that is not written; slots have checks of their own.
fn hint_at_missing_timeout(
    filter: &RateLimitFilter<'_, '_>,
    entries: &[LimitEntry<'_, '_>],
    found: &mut EnvoyFindings,
) {
    if filter.node.field("timeout").is_some() || entries.iter().any(LimitEntry::is_release) {
        return;
    }
    let is_acquire = entries.iter().any(LimitEntry::is_acquire);
    let severity = if is_acquire { FindingSeverity::Warning } else { FindingSeverity::Hint };
    let message = format!("no `timeout` in the filter '{}'", filter.name);
    found.report_with_severity(severity, EnvoyCheck::TimeoutDefault, &filter.listed, message);
}

/// Checks the text of an item's actions for formatters that Envoy sends as they are.
fn check_formatters(entry: &LimitEntry<'_, '_>, flag: RuntimeFlag, found: &mut EnvoyFindings) {
    for action in &entry.actions {
        let in_value = action.value.and_then(find_formatter).filter(|_| action.needs_formatter_flag());
        if let Some(formatter) = in_value {
            let node = action.node.field("descriptor_value").unwrap_or_else(|| action.node.clone());
            let message = format!("`{formatter}` in a descriptor, and no runtime flag that expands it");
            match flag {
                RuntimeFlag::On => {}
                RuntimeFlag::Off => found.report(EnvoyCheck::FormatterLiteral, &node, message),
                RuntimeFlag::Unknown => {
                    let message = format!("`{formatter}` in a descriptor; the runtime flag is not in this file");
                    found.report_with_severity(FindingSeverity::Warning, EnvoyCheck::FormatterLiteral, &node, message);
                }
            }
        }
        let never = ["descriptor_key", "default_value"].iter().filter_map(|name| action.node.field(name));
        for field in never {
            if let Some(formatter) = field.as_text().and_then(find_formatter) {
                let message = format!("`{formatter}` in a field without formatters");
                found.report(EnvoyCheck::FormatterNeverExpanded, &field, message);
            }
        }
    }
}

/// Warns about a limit by address that a client can choose.
fn warn_about_spoofable_address(
    entry: &LimitEntry<'_, '_>,
    manager: &ConnectionManager<'_, '_>,
    found: &mut EnvoyFindings,
) {
    let is_trusted =
        manager.node.flag("use_remote_address") || manager.node.field("original_ip_detection_extensions").is_some();
    let by_address =
        entry.actions.iter().find(|action| matches!(action.key, Some("remote_address" | "masked_remote_address")));
    if let Some(action) = by_address.filter(|_| !is_trusted) {
        let message = "a limit by the client's address, without `use_remote_address`";
        found.report(EnvoyCheck::AddressForgeable, &action.node, message);
    }
}

/// Checks network and thrift filters.
pub(super) fn check_network_filters(bootstrap: &Bootstrap<'_, '_>, found: &mut EnvoyFindings) {
    for filter in &bootstrap.network_filters {
        for descriptor in filter.items("descriptors") {
            for name in ["limit", "hits_addend"] {
                if let Some(field) = descriptor.field(name) {
                    let message = format!("`{name}` in a network filter");
                    found.report(EnvoyCheck::NetworkFieldsDropped, &field, message);
                }
            }
        }
        report_missing_timeout(filter, found);
    }
    for (filter, entries) in &bootstrap.thrift_filters {
        for entry in entries.iter().filter(|entry| entry.on_stream_done) {
            let message = "`apply_on_stream_done` in a thrift proxy";
            found.report(EnvoyCheck::StreamDoneIgnored, &entry.node, message);
        }
        report_missing_timeout(filter, found);
    }
}

fn report_missing_timeout(filter: &ConfigNode<'_, '_>, found: &mut EnvoyFindings) {
    if filter.field("timeout").is_none() {
        found.report(EnvoyCheck::TimeoutDefault, filter, "no `timeout` in this filter");
    }
}

/// Type of the settings of a bucket, in the matcher of a quota filter.
const BUCKET_SETTINGS_TYPE: &str = "envoy.extensions.filters.http.rate_limit_quota.v3.RateLimitQuotaBucketSettings";

/// Interval in which Envoy reports, in seconds.
const REPORT_INTERVAL_S: f64 = 5.0;

/// Checks the quota filters of a connection manager.
pub(super) fn check_quota_filters(manager: &ConnectionManager<'_, '_>, found: &mut EnvoyFindings) {
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

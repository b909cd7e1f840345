//! Checks of concurrency limits: the filters that acquire and release slots, and the heartbeats of their holder.
//!
//! An item with an entry `slot` acquires; with `apply_on_stream_done` it releases. What goes wrong without each part
//! was measured with Envoy 1.40 under cancelled requests, restarts and crashes.
//!
//! Decides: which filters for slots `check --envoy` reports (`failure_mode_deny`, release).
//! Decides: health checks (`heartbeat-slow`) and holders of concurrent limits.

use std::collections::HashSet;

use super::bootstrap::{Bootstrap, ConnectionManager};
use super::config_node::ConfigNode;
use super::descriptors::{Action, LimitEntry, RELEASE_KEY, SLOT_KEY};
use super::finding::{EnvoyCheck, EnvoyFindings};
use super::routes::RateLimitFilter;

/// Smallest timeout of a release without a warning, in seconds.
const MIN_RELEASE_TIMEOUT_S: f64 = 2.0;

/// Longest interval of health checks that are heartbeats, in seconds: a holder may miss one within 30 s.
const MAX_HEARTBEAT_INTERVAL_S: f64 = 15.0;

/// Metadata that names the holder of slots.
const HOLDER_METADATA_KEY: &str = "x-tollkeeper-holder";

/// A filter with the items of one kind that it sends.
struct SlotFilter<'m, 'n, 'a> {
    /// Place among the rate limit filters of the manager.
    index: usize,
    filter: &'m RateLimitFilter<'n, 'a>,
    entries: Vec<&'m LimitEntry<'n, 'a>>,
}

/// Checks the concurrency limits of a connection manager.
pub(super) fn check_manager(
    manager: &ConnectionManager<'_, '_>,
    bootstrap: &Bootstrap<'_, '_>,
    found: &mut EnvoyFindings,
) {
    let acquires = find_filters(manager, LimitEntry::is_acquire);
    let releases = find_filters(manager, LimitEntry::is_release);
    for acquire in &acquires {
        check_acquire_filter(acquire, &releases, found);
        if releases.is_empty()
            && !manager.has_unknown_routes
            && let Some(entry) = acquire.entries.first()
        {
            let message = "slots are acquired, and no filter releases them";
            found.report(EnvoyCheck::ReleaseMissing, &entry.node, message);
        }
    }
    let acquired: HashSet<_> =
        acquires.iter().flat_map(|acquire| &acquire.entries).map(|entry| describe_slot(entry)).collect();
    for release in &releases {
        check_release_filter(release, found);
        check_filter_order(release, &acquires, found);
        check_slots_agree(release, &acquired, found);
    }
    for slot_filter in acquires.iter().chain(&releases) {
        check_holder(slot_filter.filter, bootstrap, found);
    }
}

fn find_filters<'m, 'n, 'a>(
    manager: &'m ConnectionManager<'n, 'a>,
    is_of_kind: fn(&LimitEntry<'n, 'a>) -> bool,
) -> Vec<SlotFilter<'m, 'n, 'a>> {
    let of_filter = |(index, filter): (usize, &'m RateLimitFilter<'n, 'a>)| {
        let entries: Vec<_> = manager.entries_of(index).into_iter().filter(|entry| is_of_kind(entry)).collect();
        (!entries.is_empty()).then_some(SlotFilter { index, filter, entries })
    };
    manager.filters.iter().enumerate().filter_map(of_filter).collect()
}

fn check_acquire_filter(
    acquire: &SlotFilter<'_, '_, '_>,
    releases: &[SlotFilter<'_, '_, '_>],
    found: &mut EnvoyFindings,
) {
    let filter = acquire.filter;
    let retry = filter.grpc_service().and_then(|service| service.field("retry_policy"));
    let only_acquires = !releases.iter().any(|release| release.index == acquire.index);
    if let Some(retry) = retry.filter(|_| only_acquires) {
        found.report(EnvoyCheck::AcquireRetried, &retry, "a retry policy in the filter that acquires slots");
    }
    if !filter.node.flag("failure_mode_deny") {
        let node = filter.node.field("failure_mode_deny").unwrap_or_else(|| filter.listed.clone());
        let message = "the filter that acquires slots lets requests pass when it has no answer";
        found.report(EnvoyCheck::AcquireFailsOpen, &node, message);
    }
    for entry in &acquire.entries {
        let slots: Vec<&Action<'_, '_>> = entry.actions.iter().filter(|action| action.key == Some(SLOT_KEY)).collect();
        let is_header = |action: &&Action<'_, '_>| action.node.text("header_name").is_some();
        if let Some(first) = slots.first().filter(|_| slots.iter().all(is_header)) {
            found.report(EnvoyCheck::SlotForgeable, &first.node, "a slot that only headers of the client identify");
        }
    }
}

fn check_release_filter(release: &SlotFilter<'_, '_, '_>, found: &mut EnvoyFindings) {
    let filter = release.filter;
    let service = filter.grpc_service();
    if let Some(service) = service.filter(|service| service.field("retry_policy").is_none()) {
        let message = "no `retry_policy` in the filter that releases slots";
        found.report(EnvoyCheck::ReleaseWithoutRetry, &service, message);
    }
    let is_long = filter.node.seconds("timeout").is_some_and(|seconds| seconds >= MIN_RELEASE_TIMEOUT_S);
    if !is_long {
        let node = filter.node.field("timeout").unwrap_or_else(|| filter.listed.clone());
        let message =
            format!("a release may take {} only", filter.node.text("timeout").unwrap_or("20 ms (the default)"));
        found.report(EnvoyCheck::ReleaseTimeoutShort, &node, message);
    }
    for entry in &release.entries {
        match entry.find_action(RELEASE_KEY) {
            None => {
                found.report(EnvoyCheck::ReleaseWithoutToken, &entry.node, "a release without the entry `release`");
            }
            Some(action) if action.node.text("default_value").is_none() => {
                let message = "the entry `release` has no default value";
                found.report(EnvoyCheck::ReleaseDefaultMissing, &action.node, message);
            }
            Some(_) => {}
        }
    }
}

fn check_filter_order(
    release: &SlotFilter<'_, '_, '_>,
    acquires: &[SlotFilter<'_, '_, '_>],
    found: &mut EnvoyFindings,
) {
    let Some(first) = acquires.iter().map(|acquire| acquire.index).min() else { return };
    let listed = &release.filter.listed;
    if acquires.iter().any(|acquire| acquire.index == release.index) {
        let message = format!("the filter '{}' acquires slots and releases them", release.filter.name);
        found.report(EnvoyCheck::ReleaseInAcquireFilter, listed, message);
    } else if release.index > first {
        let message =
            format!("the filter '{}' releases slots, and is behind the one that acquires", release.filter.name);
        found.report(EnvoyCheck::ReleaseBehindAcquire, listed, message);
    }
}

/// Checks that each release names the slot of an acquire.
fn check_slots_agree(release: &SlotFilter<'_, '_, '_>, acquired: &HashSet<Vec<&str>>, found: &mut EnvoyFindings) {
    for entry in release.entries.iter().filter(|entry| entry.has_slot()) {
        if !acquired.is_empty() && !acquired.contains(&describe_slot(entry)) {
            found.report(EnvoyCheck::SlotDiffers, &entry.node, "no acquire has the same entries as this release");
        }
    }
}

/// Texts of each action but `release`, to compare.
fn describe_slot<'n>(entry: &LimitEntry<'n, '_>) -> Vec<&'n str> {
    let mut texts = Vec::new();
    for action in entry.actions.iter().filter(|action| action.key != Some(RELEASE_KEY)) {
        action.node.visit_texts(&mut |text| texts.push(text));
    }
    texts
}

/// Checks that health checks are heartbeats of the holder that the filter names.
fn check_holder(filter: &RateLimitFilter<'_, '_>, bootstrap: &Bootstrap<'_, '_>, found: &mut EnvoyFindings) {
    let Some(service) = filter.grpc_service() else { return };
    let named = service.field_at(&["envoy_grpc", "cluster_name"]).and_then(|name| name.as_text());
    let Some(cluster) = named.and_then(|name| bootstrap.clusters.get(name)) else { return };
    let header = |list: Vec<ConfigNode<'_, '_>>| {
        let of_holder = list
            .iter()
            .find(|header| header.text("key").is_some_and(|key| key.eq_ignore_ascii_case(HOLDER_METADATA_KEY)));
        of_holder.and_then(|header| header.text("value")).map(str::to_owned)
    };
    let own = header(service.items("initial_metadata"));
    let checks = cluster.items("health_checks");
    let grpc = checks.iter().find_map(|check| Some((check, check.field("grpc_health_check")?)));
    let Some((check, grpc)) = grpc else {
        let message = "no gRPC health check in the cluster of a concurrency limit";
        found.report(EnvoyCheck::HeartbeatMissing, cluster, message);
        return;
    };
    let headers = grpc.items("initial_metadata").iter().filter_map(|option| option.field("header")).collect();
    match (own, header(headers)) {
        (_, None) => {
            let message = format!("no {HOLDER_METADATA_KEY} in `initial_metadata` of the health check");
            found.report(EnvoyCheck::HeartbeatMissing, check, message);
        }
        (own, Some(of_check)) if own.as_deref() != Some(&*of_check) => {
            let message = format!("the filter '{}' and the health check name different holders", filter.name);
            found.report(EnvoyCheck::HolderDiffers, &service, message);
        }
        _ => {}
    }
    let is_often = |name: &str| check.seconds(name).is_some_and(|seconds| seconds <= MAX_HEARTBEAT_INTERVAL_S);
    if let Some(name) = ["interval", "no_traffic_interval"].iter().find(|name| !is_often(name)) {
        let node = check.field(name).unwrap_or_else(|| check.clone());
        let message = format!("`{name}` of the health check is not set, or above {MAX_HEARTBEAT_INTERVAL_S} s");
        found.report(EnvoyCheck::HeartbeatSlow, &node, message);
    }
}

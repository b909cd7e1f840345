//! Checks of rate limit filters and of the places of `rate_limits`: what is never sent, sent twice or only afterwards,
//! and what is sent otherwise than written.
//!
//! Decides: which filters and timeouts `check --envoy` reports.

use std::collections::{HashMap, HashSet};

use super::bootstrap::{Bootstrap, ConnectionManager, RuntimeFlag};
use super::config_node::ConfigNode;
use super::descriptors::{HitsAddend, LimitEntry, LimitPlace, find_formatter};
use super::document::GIVE_DUMP;
use super::finding::{EnvoyCheck, EnvoyFindings, FindingSeverity};
use super::routes::{LimitList, NotInForce, RateLimitFilter};
use crate::base::text::truncate_and_escape;

/// Maximum length of a name in a message, in characters.
pub(super) const MAX_NAME_CHARS: usize = 100;

/// Maximum number of items of routes that are compared with others of their route.
const MAX_COMPARED_ENTRIES: usize = 100_000;

/// Checks the rate limit filters of a connection manager and their descriptors.
pub(super) fn check_manager(
    manager: &ConnectionManager<'_, '_>,
    bootstrap: &Bootstrap<'_, '_>,
    found: &mut EnvoyFindings,
) {
    report_missing_parts(manager, found);
    for (at, filter) in manager.filters.iter().enumerate() {
        let entries = manager.entries_of(at);
        let can_ask = check_gates(filter, manager, bootstrap, found);
        if entries.is_empty() && can_ask && !manager.has_unknown_routes {
            let message = format!("no `rate_limits` for the filter '{}'", filter.name);
            found.report(EnvoyCheck::FilterNeverAsks, &filter.listed, message);
        }
        check_timeout(filter, &entries, found);
    }
    if manager.filters.is_empty() {
        return;
    }
    for list in &manager.routes.lists {
        check_list(list, manager, found);
        for entry in &list.entries {
            check_formatters(entry, bootstrap.formatters, found);
            if entry.node.text("disable_key").is_some_and(|key| is_switched_off(bootstrap, key)) {
                let message = "`disable_key`, and the runtime of this file disables it";
                found.report(EnvoyCheck::RouteLimitsIgnored, &entry.node, message);
            }
        }
    }
    compare_entries_of_routes(manager, found);
}

fn is_switched_off(bootstrap: &Bootstrap<'_, '_>, key: &str) -> bool {
    bootstrap.runtime_number(&format!("ratelimit.{key}.http_filter_enabled")) == Some(0)
}

/// Reports filters and routes that the file only names.
fn report_missing_parts(manager: &ConnectionManager<'_, '_>, found: &mut EnvoyFindings) {
    for listed in &manager.missing_filters {
        let name = truncate_and_escape(listed.text("name").unwrap_or_default(), MAX_NAME_CHARS);
        let message = format!("the configuration of the filter '{name}' is not in this file");
        found.report(EnvoyCheck::NotInFile, listed, message);
    }
    let needs_routes = |filter: &&RateLimitFilter<'_, '_>| filter.own_limits().is_none();
    if let Some(filter) = manager.filters.iter().find(needs_routes).filter(|_| manager.has_unknown_routes) {
        let message = format!("the routes of the filter '{}' are not in this file", filter.name);
        let fix = match manager.is_partial {
            true => "give the patches that add `rate_limits` in one file with this one, or the page /config_dump",
            false => GIVE_DUMP,
        };
        found.report_with_fix(EnvoyCheck::NotInFile, &filter.listed, message, Some(fix.to_owned()));
    }
}

/// Reports settings by which a filter asks never, or not for all requests. Returns `false` if it never asks.
fn check_gates(
    filter: &RateLimitFilter<'_, '_>,
    manager: &ConnectionManager<'_, '_>,
    bootstrap: &Bootstrap<'_, '_>,
    found: &mut EnvoyFindings,
) -> bool {
    let is_enabled_somewhere = manager.routes.per_filter_names.contains(filter.name);
    if filter.is_disabled && !is_enabled_somewhere && !manager.has_unknown_routes {
        let node = filter.listed.field("disabled").unwrap_or_else(|| filter.listed.clone());
        let message = format!("the filter '{}' is disabled, and no route enables it", filter.name);
        found.report(EnvoyCheck::FilterNotAsked, &node, message);
        return false;
    }
    let mut can_ask = true;
    if let Some(kind) = filter.node.field("request_type").filter(|kind| kind.as_text() == Some("internal")) {
        let knows_internal = manager.node.field("internal_address_config").is_some();
        let is_external = !knows_internal && !manager.is_partial;
        let message = match is_external {
            true => "`request_type: internal`, and without `internal_address_config` no request is internal",
            false => "`request_type: internal`: requests from outside are not limited",
        };
        let severity = if is_external { FindingSeverity::Error } else { FindingSeverity::Warning };
        found.report_with_severity(severity, EnvoyCheck::FilterNotAsked, &kind, message);
        can_ask = !is_external;
    }
    for (name, check) in
        [("filter_enabled", EnvoyCheck::FilterNotAsked), ("filter_enforced", EnvoyCheck::FilterNotEnforced)]
    {
        let Some(fraction) = filter.node.field(name) else { continue };
        let key = fraction.text("runtime_key");
        let percent = key.and_then(|key| bootstrap.runtime_number(key).map(|percent| percent as f64));
        let percent = percent.unwrap_or_else(|| read_percent(&fraction));
        if percent >= 100.0 {
            continue;
        }
        let by_key = key.map_or_else(String::new, |key| format!(", unless the runtime key `{key}` says more"));
        let is_never = percent == 0.0 && key.is_none() && check == EnvoyCheck::FilterNotAsked;
        let severity = if is_never { FindingSeverity::Error } else { FindingSeverity::Warning };
        found.report_with_severity(severity, check, &fraction, format!("`{name}` is {percent} %{by_key}"));
        can_ask &= !is_never;
    }
    can_ask
}

/// Percentage of a RuntimeFractionalPercent.
fn read_percent(fraction: &ConfigNode<'_, '_>) -> f64 {
    let Some(value) = fraction.field("default_value") else { return 100.0 };
    let numerator = value.text("numerator").and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
    let denominator = match value.text("denominator") {
        Some("TEN_THOUSAND" | "1") => 100.0,
        Some("MILLION" | "2") => 10_000.0,
        _ => 1.0,
    };
    numerator / denominator
}

/// Checks that the items of routes and virtual hosts are sent, with what they say.
fn check_list(list: &LimitList<'_, '_>, manager: &ConnectionManager<'_, '_>, found: &mut EnvoyFindings) {
    let filters = &manager.filters;
    let mut is_sent_somewhere = false;
    for entry in &list.entries {
        if let Some(hits) = entry.node.field("hits_addend").filter(|_| list.place.drops_hits()) {
            let what = if hits.flag("is_negative_hits") { "`is_negative_hits`" } else { "`hits_addend`" };
            let place = if list.place == LimitPlace::VirtualHost { "a virtual host" } else { "a route" };
            found.report(EnvoyCheck::HitsAddendDropped, &hits, format!("{what} in {place}"));
        }
        if list.is_sent(entry, filters) {
            is_sent_somewhere |= list.is_kept_out_by(NotInForce::RouteLimits, entry, filters);
            continue;
        }
        if !filters.iter().any(|filter| list.applies(entry, filter)) {
            let message = format!("`stage: {}`, and no rate limit filter has it", entry.stage);
            found.report(EnvoyCheck::StageWithoutFilter, &entry.node, message);
            continue;
        }
        let (why, fix) = match list.find_barrier(entry, filters) {
            None | Some(NotInForce::AnswersItself) => continue,
            // The filter has a finding.
            Some(NotInForce::Disabled) if filters.iter().all(|filter| filter.is_disabled) => continue,
            Some(NotInForce::FilterLimits) => ("beside those of the filter", None),
            Some(NotInForce::PerRouteLimits) => ("beside those of a RateLimitPerRoute", None),
            Some(NotInForce::RouteLimits) => ("of a virtual host whose routes have their own", Some(INCLUDE_HOST)),
            Some(NotInForce::Ignored) => ("of a virtual host, under `vh_rate_limits: IGNORE`", Some(INCLUDE_HOST)),
            Some(NotInForce::Disabled) => {
                ("where the filter is disabled", Some("enable the filter there, or remove it"))
            }
        };
        let (message, fix) = (format!("`rate_limits` {why}"), fix.map(str::to_owned));
        found.report_with_fix(EnvoyCheck::RouteLimitsIgnored, &entry.node, message, fix);
    }
    if let Some(first) = list.entries.first().filter(|_| is_sent_somewhere && list.replacing_routes > 0) {
        let (replacing, all) = (list.replacing_routes, list.routes);
        let message = format!("`rate_limits` of a virtual host, which {replacing} of its {all} routes replace");
        found.report(EnvoyCheck::HostLimitsReplaced, &first.node, message);
    }
}

/// How a route gets the limits of its virtual host.
const INCLUDE_HOST: &str = "write `vh_rate_limits: INCLUDE` in a RateLimitPerRoute of the route";

/// Reports a timeout that is not written, or written where it is not used; slots have checks of their own.
fn check_timeout(filter: &RateLimitFilter<'_, '_>, entries: &[&LimitEntry<'_, '_>], found: &mut EnvoyFindings) {
    if let Some(timeout) = filter.grpc_service().and_then(|service| service.field("timeout")) {
        let message = format!("`timeout: {}` inside `grpc_service`", timeout.as_text().unwrap_or_default());
        found.report(EnvoyCheck::TimeoutNotUsed, &timeout, message);
    }
    if filter.node.field("timeout").is_some() || entries.iter().any(|entry| entry.is_release()) {
        return;
    }
    let is_acquire = entries.iter().any(|entry| entry.is_acquire());
    let severity = if is_acquire { FindingSeverity::Warning } else { FindingSeverity::Hint };
    let message = format!("no `timeout` in the filter '{}'", filter.name);
    found.report_with_severity(severity, EnvoyCheck::TimeoutDefault, &filter.listed, message);
}

/// An item that a filter sends on a route.
struct SentEntry<'r, 'n, 'a> {
    filter: &'r RateLimitFilter<'n, 'a>,
    domain: Option<&'n str>,
    entry: &'r LimitEntry<'n, 'a>,
}

/// What items share that may count in one counter, as far as the file says: domain and keys.
type CounterKeys<'n> = (Option<&'n str>, Option<Vec<&'n str>>);

impl<'n> SentEntry<'_, 'n, '_> {
    fn counter_keys(&self) -> CounterKeys<'n> {
        (self.domain, self.entry.keys())
    }
}

/// Compares all items that a request of a route sends: each counts once, and what counts afterwards is asked before.
fn compare_entries_of_routes(manager: &ConnectionManager<'_, '_>, found: &mut EnvoyFindings) {
    let mut seen = HashSet::new();
    let mut left = MAX_COMPARED_ENTRIES;
    for route in manager.routes.routes.iter().filter(|route| seen.insert(&route.asks)) {
        let mut sent = Vec::new();
        for (ask, filter) in route.asks.iter().zip(&manager.filters) {
            let domain = manager.domain_of(*ask, filter);
            sent.extend(manager.routes.entries_of(*ask, filter).map(|entry| SentEntry { filter, domain, entry }));
        }
        let Some(rest) = left.checked_sub(sent.len()) else { return };
        left = rest;
        let (afterwards, before): (Vec<_>, Vec<_>) = sent.into_iter().partition(|one| one.entry.on_stream_done);
        report_double_charges(&before, found);
        // For each counter that is asked before: whether it is charged then.
        let mut charged_before: HashMap<CounterKeys<'_>, bool> = HashMap::new();
        for one in &before {
            *charged_before.entry(one.counter_keys()).or_default() |= one.entry.hits == HitsAddend::Charges;
        }
        for one in afterwards.iter().filter(|one| !one.entry.is_release()) {
            // An item with an unknown key may be the same.
            let same = charged_before.get(&one.counter_keys()).or_else(|| charged_before.get(&(one.domain, None)));
            let (entry, is_unknown) = (one.entry, one.entry.keys().is_none() || manager.has_unknown_routes);
            match (entry.hits, same) {
                (HitsAddend::Refunds, Some(true)) => {
                    let refund = entry.node.field_at(&["hits_addend", "is_negative_hits"]);
                    let refund = refund.unwrap_or_else(|| entry.node.clone());
                    found.report(EnvoyCheck::RefundAsSlot, &refund, "a refund when the request is done");
                }
                (HitsAddend::Charges, None) if !is_unknown => {
                    let node = entry.node.field("apply_on_stream_done").unwrap_or_else(|| entry.node.clone());
                    let message = "`apply_on_stream_done`, and no item with these keys that is sent before";
                    found.report(EnvoyCheck::ChargedButNeverChecked, &node, message);
                }
                _ => {}
            }
        }
    }
}

/// Reports items that a request sends twice in one domain.
fn report_double_charges(before: &[SentEntry<'_, '_, '_>], found: &mut EnvoyFindings) {
    let mut first_filters = HashMap::new();
    for one in before.iter().filter(|one| one.entry.hits == HitsAddend::Charges && !one.entry.has_slot()) {
        let first = *first_filters.entry((one.domain, one.entry.identity)).or_insert((one.filter, one.entry.node.at));
        if (first.0.at, first.1) == (one.filter.at, one.entry.node.at) {
            continue;
        }
        if first.0.at == one.filter.at {
            found.report(EnvoyCheck::CountedTwice, &one.entry.node, "the same actions twice in one call");
        } else {
            let message = format!("the filter '{}' sends the same as the filter '{}'", one.filter.name, first.0.name);
            found.report(EnvoyCheck::CountedTwice, &one.filter.listed, message);
        }
    }
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

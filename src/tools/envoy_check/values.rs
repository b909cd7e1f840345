//! Checks of the values of entries: whether they are there when a filter asks, and whether the client chooses them.
//!
//! Decides: which descriptors `check --envoy` says Envoy drops, and which values a client can spell otherwise.

use std::collections::HashSet;

use super::bootstrap::ConnectionManager;
use super::config_node::ConfigNode;
use super::descriptors::{Action, LimitEntry, RELEASE_KEY, SLOT_KEY};
use super::filters::MAX_NAME_CHARS;
use super::finding::{EnvoyCheck, EnvoyFindings, FindingSeverity, Problem};
use super::routes::RateLimitFilter;
use super::sources::{Absence, ClientChoice, Source, expected_headers, is_dodged};
use crate::base::text::truncate_and_escape;
use crate::rules::rule::set::{DomainRules, RuleSet};
use crate::rules::yaml::Position;

/// Maximum number of items of routes whose sources are searched, with routes that are compared for metadata.
const MAX_SEARCHED_ENTRIES: usize = 1_000_000;

/// Checks the values of all descriptors of a connection manager.
pub(super) fn check_manager(manager: &ConnectionManager<'_, '_>, rules: Option<&RuleSet>, found: &mut EnvoyFindings) {
    let mut left = MAX_SEARCHED_ENTRIES;
    for (at, filter) in manager.filters.iter().enumerate() {
        let entries = manager.entries_of(at);
        let absent = report_absences(manager, at, &mut left, found);
        hint_at_dropped_descriptors(manager, filter, &entries, &absent, found);
        let own = filter.node.text("domain");
        let of_routes = manager.routes.domains.iter().filter(|(of_filter, _)| *of_filter == filter.name);
        let names = own.into_iter().chain(of_routes.filter_map(|(_, domain)| domain.as_text()));
        let domains: Option<Vec<_>> =
            rules.map(|rules| names.filter_map(|name| Some((rules, rules.domain(name)?))).collect());
        for entry in &entries {
            warn_of_cost_in_header(manager, filter, entry, found);
            let chosen = entry.actions.iter().filter(|action| !matches!(action.key, Some(SLOT_KEY | RELEASE_KEY)));
            for action in chosen {
                report_client_choice(manager, filter, action, domains.as_deref(), found);
                report_joined_header(manager, filter, action, found);
            }
            for header in expected_headers(entry) {
                if let Some(example) = is_dodged(&header, manager) {
                    let name = header.text("name").unwrap_or_default();
                    let message = format!("`{name}` must be exactly this, and {example} is not");
                    found.report(EnvoyCheck::ClientChosenSpelling, &header, message);
                }
            }
        }
    }
}

/// Reports values that are never there when the filter at `at` asks. Returns the positions of their items.
fn report_absences(
    manager: &ConnectionManager<'_, '_>,
    at: usize,
    left: &mut usize,
    found: &mut EnvoyFindings,
) -> HashSet<Position> {
    let filter = &manager.filters[at];
    let (mut seen, mut absent) = (HashSet::new(), HashSet::new());
    for route in manager.routes.routes.iter().filter(|route| seen.insert((route.asks[at], route.added_headers))) {
        let added = &manager.routes.added_headers[route.added_headers];
        for entry in manager.routes.entries_of(route.asks[at], filter).filter(|entry| !entry.on_stream_done) {
            let Some(rest) = left.checked_sub(1) else { return absent };
            *left = rest;
            for action in &entry.actions {
                let source = Source::of(action);
                let why = match source {
                    Source::RouteMetadata => {
                        let Some(rest) = left.checked_sub(manager.routes.sending_steps()) else { return absent };
                        *left = rest;
                        lacks_metadata_everywhere(manager, at, entry, action).then_some(Absence::NobodyWrites)
                    }
                    source => manager.find_absence(source, filter.at, added),
                };
                if let Some(why) = why {
                    absent.insert(entry.node.at);
                    report_absence(action, source, &why, found);
                }
            }
        }
    }
    absent
}

fn report_absence(action: &Action<'_, '_>, source: Source<'_>, why: &Absence<'_>, found: &mut EnvoyFindings) {
    let what = match source {
        Source::Header(name) => format!("`{}`", truncate_and_escape(name, MAX_NAME_CHARS)),
        Source::Metadata(namespace) => format!("metadata of '{}'", truncate_and_escape(namespace, MAX_NAME_CHARS)),
        _ => "this metadata".to_owned(),
    };
    let (message, fix) = match why {
        Absence::RouterAdds => (
            format!("{what} is added by `request_headers_to_add`, after the filters have asked"),
            "set it in a filter `envoy.filters.http.header_mutation` before this one, or write the value as `generic_key` in the route".to_owned(),
        ),
        Absence::WrittenBehind(name) => {
            let name = truncate_and_escape(name, MAX_NAME_CHARS);
            (format!("{what} comes from the filter '{name}', behind this one"), format!("put the filter '{name}' before the rate limit filter"))
        }
        Absence::NobodyWrites if source == Source::RouteMetadata => (
            format!("no route has {what}, as a text"),
            "write `metadata: { filter_metadata: ... }` with a text in the route".to_owned(),
        ),
        Absence::NobodyWrites => (
            format!("no filter before this one writes {what}"),
            "add the filter that writes it before this one".to_owned(),
        ),
    };
    let has_default = action.is_optional || action.node.text("default_value").is_some();
    let severity = if has_default { FindingSeverity::Warning } else { FindingSeverity::Error };
    found.report_problem(&action.node, Problem { severity, check: EnvoyCheck::ValueNeverSet, message, fix: Some(fix) });
}

/// Returns `true` if the metadata of an action is a text in none of the routes on which the filter sends the item.
fn lacks_metadata_everywhere(
    manager: &ConnectionManager<'_, '_>,
    at: usize,
    entry: &LimitEntry<'_, '_>,
    action: &Action<'_, '_>,
) -> bool {
    let Some(key) = action.node.field("metadata_key") else { return false };
    let has_it = |metadata: &ConfigNode<'_, '_>| {
        let namespace = key.text("key").and_then(|name| metadata.field("filter_metadata")?.field(name));
        let steps = key.items("path");
        let value = steps.iter().try_fold(namespace?, |node, step| node.field(step.text("key")?))?;
        Some(value.is_text())
    };
    let mut sending = manager.routes.sending(at, entry);
    let is_known = !manager.is_partial && !manager.has_unknown_routes;
    is_known && sending.all(|route| !route.metadata.as_ref().and_then(has_it).unwrap_or(false))
}

/// Hints at descriptors that Envoy drops when a header or a query parameter is missing, once for each; warns in a filter
/// that is to let no request pass unlimited.
///
/// What is sent at the end of a stream has the entries of another descriptor, which has the hint. A header that
/// `header_value_match` names was thought of.
fn hint_at_dropped_descriptors(
    manager: &ConnectionManager<'_, '_>,
    filter: &RateLimitFilter<'_, '_>,
    entries: &[&LimitEntry<'_, '_>],
    absent: &HashSet<Position>,
    found: &mut EnvoyFindings,
) {
    let matches = entries.iter().flat_map(|entry| &entry.actions).flat_map(|action| action.node.items("headers"));
    // Envoy compares names of headers without case.
    let matched: HashSet<String> =
        matches.filter_map(|header| header.text("name")).map(str::to_ascii_lowercase).collect();
    let is_expected =
        |name: &str| manager.has_always_header(name, filter.at) || matched.contains(&name.to_ascii_lowercase());
    for entry in entries.iter().filter(|entry| !entry.on_stream_done && !absent.contains(&entry.node.at)) {
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
        let must_hold = filter.node.flag("failure_mode_deny");
        let severity = if must_hold { FindingSeverity::Warning } else { FindingSeverity::Hint };
        found.report_with_severity(severity, EnvoyCheck::DescriptorMayBeDropped, &entry.node, message);
    }
}

/// Warns of a cost that is read from a header of the request: whoever writes no number there is not limited.
fn warn_of_cost_in_header(
    manager: &ConnectionManager<'_, '_>,
    filter: &RateLimitFilter<'_, '_>,
    entry: &LimitEntry<'_, '_>,
    found: &mut EnvoyFindings,
) {
    let Some(format) = entry.node.field_at(&["hits_addend", "format"]).filter(|_| !entry.on_stream_done) else {
        return;
    };
    let header = format.as_text().and_then(|text| text.strip_prefix("%REQ(")?.strip_suffix(")%"));
    let Some(name) = header.filter(|name| !manager.has_always_header(name, filter.at)) else { return };
    // A route that matches the header was written for those who lack it.
    if manager.node.field("route_config").is_some_and(|routes| routes.has_text_below(&["name"], name)) {
        return;
    }
    let name = truncate_and_escape(name, MAX_NAME_CHARS);
    let message = format!("the cost is `{name}`, in which a request may lack a number");
    let fix = "refuse such requests in a route: docs/cookbook.md, a cost in a request header".to_owned();
    let (severity, check) = (FindingSeverity::Warning, EnvoyCheck::DescriptorMayBeDropped);
    found.report_problem(&format, Problem { severity, check, message, fix: Some(fix) });
}

/// Reports metadata that is a header's values in one text, of which the application may read one.
fn report_joined_header(
    manager: &ConnectionManager<'_, '_>,
    filter: &RateLimitFilter<'_, '_>,
    action: &Action<'_, '_>,
    found: &mut EnvoyFindings,
) {
    let Some(name) = manager.find_joined_header(action, filter.at) else { return };
    let name = truncate_and_escape(name, MAX_NAME_CHARS);
    let message = format!("`{name}: a` and `{name}: b` in one request are `a,b` here; the application may read one");
    let fix = format!(
        "make it one value by `early_header_mutation_extensions`, as envoy/gateway.yaml does; or acknowledge it, if a proxy before this Envoy overwrites `{name}`"
    );
    found.report_with_fix(EnvoyCheck::ClientChosenSpelling, &action.node, message, Some(fix));
}

/// Reports a value that the client can choose. `domains` are those of the rules that decide, if they are known.
fn report_client_choice(
    manager: &ConnectionManager<'_, '_>,
    filter: &RateLimitFilter<'_, '_>,
    action: &Action<'_, '_>,
    domains: Option<&[(&RuleSet, &DomainRules)]>,
    found: &mut EnvoyFindings,
) {
    let is_trusted = manager.is_partial
        || manager.node.flag("use_remote_address")
        || manager.node.field("original_ip_detection_extensions").is_some();
    if matches!(&*action.name, "remote_address" | "masked_remote_address") && !is_trusted {
        let message = "a limit by the client's address, without `use_remote_address`";
        found.report(EnvoyCheck::AddressForgeable, &action.node, message);
    }
    let source = Source::of(action);
    let Some(choice) = manager.find_client_choice(source, filter.at) else { return };
    let name = match source {
        Source::Header(name) | Source::Query(name) => format!("`{}`", truncate_and_escape(name, MAX_NAME_CHARS)),
        Source::Claim => "a claim of a token that no filter before verifies".to_owned(),
        _ => "`request.url_path`".to_owned(),
    };
    let sample = if source == Source::UrlPath || name == "`:path`" { "/login" } else { "shop.example" };
    match choice {
        ClientChoice::Address => {
            let message = format!("a limit by {name}, which is what the client writes, and more");
            let fix = "count by `remote_address`, with `use_remote_address` and `xff_num_trusted_hops`; or acknowledge it, if a proxy before this Envoy overwrites the header";
            found.report_with_fix(EnvoyCheck::AddressForgeable, &action.node, message, Some(fix.to_owned()));
        }
        ClientChoice::Free => {
            found.report(
                EnvoyCheck::ClientChosenSpelling,
                &action.node,
                format!("{name} is any text that the client likes"),
            );
        }
        ClientChoice::QueryParameter => {
            let message =
                format!("of several {name} in the query Envoy sends the first; the application may use another");
            found.report_with_severity(FindingSeverity::Hint, EnvoyCheck::ClientChosenSpelling, &action.node, message);
        }
        ClientChoice::Spelling { .. } => {
            let Some(example) = find_escaping_spelling(choice, action, sample, domains) else { return };
            let example = truncate_and_escape(&example, MAX_NAME_CHARS);
            let message = format!("{name} of the same request may be `{example}`");
            let fix = match sample {
                "/login" => Some("write `normalize_path: true` and `merge_slashes: true` in the connection manager, and send `request.url_path`; or a rule with `match: { regex: ... }` and `share_threshold: true`".to_owned()),
                _ => None,
            };
            found.report_with_fix(EnvoyCheck::ClientChosenSpelling, &action.node, message, fix);
        }
    }
}

/// Returns a spelling that another counter counts, or none; `None` if the rules count all that are known in one.
fn find_escaping_spelling(
    choice: ClientChoice,
    action: &Action<'_, '_>,
    sample: &str,
    domains: Option<&[(&RuleSet, &DomainRules)]>,
) -> Option<String> {
    let without_rules = || choice.respell(sample).into_iter().next();
    let (Some(domains), Some(key)) = (domains, action.key) else { return without_rules() };
    domains.iter().find_map(|(rules, domain)| {
        rules.find_escaping_value(domain, key.as_bytes(), sample, |value| choice.respell(value))
    })
}

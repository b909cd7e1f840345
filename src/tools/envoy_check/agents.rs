//! Checks of limits by what Envoy reads in the messages of agents and models: MCP calls, and the token usage of answers.
//!
//! Decides: which MCP calls and which tokens `check --envoy` says are not limited.

use super::bootstrap::ConnectionManager;
use super::config_node::ConfigNode;
use super::descriptors::LimitEntry;
use super::finding::{EnvoyCheck, EnvoyFindings};
use super::http_filters::HttpFilter;
use super::sources::Source;

const MCP_NAMESPACE: &str = "envoy.filters.http.mcp";

/// Maximum number of filters of a connection manager that are compared with all items.
const MAX_COMPARED_FILTERS: usize = 64;

/// Checks the filters of a connection manager whose metadata limits read.
pub(super) fn check_manager(manager: &ConnectionManager<'_, '_>, found: &mut EnvoyFindings) {
    let entries: Vec<_> = (0..manager.filters.len()).flat_map(|at| manager.entries_of(at)).collect();
    let is_compared = |filter: &HttpFilter<'_, '_>| matches!(filter.package, "mcp" | "ai_protocol_manager");
    let compared = manager.http_filters.iter().enumerate().filter(|(_, filter)| is_compared(filter));
    for (at, filter) in compared.take(MAX_COMPARED_FILTERS) {
        if let Some(message) = filter.message.as_ref().filter(|_| filter.package == "mcp") {
            check_mcp(manager, filter, message, &entries, found);
        }
        if let Some(usage) = filter.token_usage() {
            check_usage(manager, at, &usage, &entries, found);
        }
    }
}

/// Reports a filter that lets messages pass from which it does not read what the server will do.
fn check_mcp(
    manager: &ConnectionManager<'_, '_>,
    filter: &HttpFilter<'_, '_>,
    message: &ConfigNode<'_, '_>,
    entries: &[&LimitEntry<'_, '_>],
    found: &mut EnvoyFindings,
) {
    let mut actions = entries.iter().flat_map(|entry| &entry.actions);
    let is_read = actions.any(|action| Source::of(action) == Source::Metadata(MCP_NAMESPACE));
    let is_overridden = manager.routes.has_per_route_config(filter.name) || manager.has_unknown_routes;
    if !is_read || is_overridden {
        return;
    }
    let mode = message.field("traffic_mode");
    let rejects = mode.as_ref().is_some_and(|mode| matches!(mode.as_text(), Some("REJECT_NO_MCP" | "1")));
    if !rejects {
        let name = mode.as_ref().and_then(|mode| mode.as_text()).unwrap_or("PASS_THROUGH");
        let message = format!("limits by the content of MCP messages, and `traffic_mode: {name}`");
        found.report(EnvoyCheck::McpCallsUnread, mode.as_ref().unwrap_or(&filter.listed), message);
    } else if !message.flag("reject_duplicate_keys") {
        let what = "limits by the content of MCP messages, without `reject_duplicate_keys: true`";
        found.report(EnvoyCheck::McpCallsUnread, &filter.listed, what);
    }
}

/// Checks the filter at `at` of all HTTP filters, and the charges that read its usage.
fn check_usage(
    manager: &ConnectionManager<'_, '_>,
    at: usize,
    usage: &ConfigNode<'_, '_>,
    entries: &[&LimitEntry<'_, '_>],
    found: &mut EnvoyFindings,
) {
    let filter = &manager.http_filters[at];
    let Some(namespace) = filter.typed_namespace() else { return };
    let mut is_charged = false;
    for entry in entries {
        for action in &entry.actions {
            let reads = action.value.is_some_and(|value| reads_untyped(value, namespace));
            if reads || Source::of(action) == Source::Metadata(namespace) {
                report_untyped(&action.node, namespace, found);
            }
        }
        let Some(format) = entry.node.field_at(&["hits_addend", "format"]) else { continue };
        let text = format.as_text().unwrap_or_default();
        let is_typed = text.contains("metadata.typed_filter_metadata") && text.contains(namespace);
        let is_untyped = reads_untyped(text, namespace);
        is_charged |= is_typed || is_untyped;
        if is_untyped {
            report_untyped(&format, namespace, found);
        } else if is_typed && !text.contains("has(") && !text.contains(" in ") {
            let message = format!("the usage '{namespace}' in `hits_addend`, and nothing for an answer without it");
            found.report(EnvoyCheck::UsageMayBeMissing, &format, message);
        }
    }
    if !is_charged || manager.has_unknown_routes || manager.is_partial {
        return;
    }
    let is_declared = manager.routes.has_per_route_config(filter.name);
    let protocol = usage.text("default_llm_protocol").filter(|name| !matches!(*name, "LLM_PROTOCOL_UNSPECIFIED" | "0"));
    if !usage.flag("include_unconfigured_routes") && !is_declared {
        let message =
            "`token_usage` without `include_unconfigured_routes`, and no route has an AiProtocolManagerPerRoute";
        found.report(EnvoyCheck::UsageNotRead, usage, message);
    } else if protocol.is_none() && !is_declared {
        found.report(EnvoyCheck::LlmProtocolMissing, usage, "`token_usage` without `default_llm_protocol`");
    }
    report_compression(manager, at, usage, found);
}

fn report_untyped(node: &ConfigNode<'_, '_>, namespace: &str, found: &mut EnvoyFindings) {
    let message = format!("'{namespace}' is typed metadata, and this reads untyped metadata");
    found.report(EnvoyCheck::TypedMetadataNotRead, node, message);
}

/// Returns `true` if a text with formatters reads untyped metadata of the namespace.
fn reads_untyped(text: &str, namespace: &str) -> bool {
    const READERS: [(&str, [char; 2]); 3] = [
        ("%DYNAMIC_METADATA(", [':', ')']),
        ("metadata.filter_metadata['", ['\'', '\'']),
        ("metadata.filter_metadata[\"", ['"', '"']),
    ];
    READERS.iter().any(|(reader, ends)| {
        let names = |rest: &str| rest.strip_prefix(namespace).is_some_and(|after| after.starts_with(*ends));
        text.split(reader).skip(1).any(names)
    })
}

/// Reports answers that may be compressed when the filter at `at` reads them.
fn report_compression(
    manager: &ConnectionManager<'_, '_>,
    at: usize,
    usage: &ConfigNode<'_, '_>,
    found: &mut EnvoyFindings,
) {
    const ENCODING: &str = "accept-encoding";
    let behind = &manager.http_filters[at + 1..];
    if let Some(compressor) = behind.iter().find(|filter| filter.package == "compressor") {
        let fix = "put the compressor before the filter that reads the usage".to_owned();
        let message = format!("the usage is read from answers that the filter '{}' compresses", compressor.name);
        found.report_with_fix(EnvoyCheck::UsageCompressed, usage, message, Some(fix));
        return;
    }
    let is_changed = behind.iter().any(|filter| filter.package == "decompressor")
        || manager.http_filters.iter().any(|filter| filter.removes_header(ENCODING) || filter.sets_header(ENCODING));
    let only_configured = !usage.flag("include_unconfigured_routes");
    let name = only_configured.then_some(manager.http_filters[at].name);
    if !is_changed && manager.routes.keep_accept_encoding(name) {
        let message = "the usage is read from answers, and requests keep their `accept-encoding`";
        found.report(EnvoyCheck::UsageCompressed, usage, message);
    }
}

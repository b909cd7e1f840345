//! Why a limit will not work: checks of an Envoy bootstrap.
//!
//! Envoy accepts much that does not limit: text of formatters that is sent as it is, costs that are left out, a cluster
//! that does not exist, a filter that is never asked. Each check is one of [`finding::EnvoyCheck`]; what it says was
//! seen with Envoy 1.40. With rules it also says which descriptors match none of them.
//!
//! The file is read as Envoy reads it, in YAML or JSON, with names in `snake_case` or `lowerCamelCase`. What no check
//! concerns is ignored, so a file of another version is no error. A configuration dump of a running Envoy works too.
//!
//! Decides: whether an Envoy file is YAML or JSON; several documents, an empty one.

pub mod finding;
pub mod config_node;
pub mod descriptors;
mod bootstrap;
mod clusters;
mod filters;
mod slots;
mod rule_match;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::bootstrap::Bootstrap;
use self::config_node::ConfigNode;
use self::finding::{EnvoyFindings, ReportedFile};
use crate::rules::diagnostic::{Diagnostic, Diagnostics, Severity};
use crate::rules::rule::set::RuleSet;
use crate::rules::yaml::{DocumentSelection, YamlNode, parse};

/// Checks the text of a bootstrap; `rules` are those that decide on what this Envoy sends, if they are known.
///
/// # Errors
/// The problems of text that is neither YAML nor JSON, or that has no message, such as an empty text.
pub fn check_bootstrap(file: &Arc<str>, text: &str, rules: Option<&RuleSet>) -> Result<EnvoyFindings, Diagnostics> {
    let mut problems = Diagnostics::default();
    let roots = parse::parse_documents(text, DocumentSelection::All, file, &mut problems);
    if problems.has_errors() {
        return Err(problems);
    }
    if !roots.iter().any(|root| ConfigNode::root(root).fields().next().is_some()) {
        problems.push(describe_missing_message(file, &roots));
        return Err(problems);
    }
    let mut found = EnvoyFindings::new(ReportedFile { name: Arc::clone(file), text });
    for root in &roots {
        check_document(&ConfigNode::root(root), rules, &mut found);
    }
    found.sort_errors_first();
    Ok(found)
}

/// The problem of a text without any message of Envoy, which a failed download leaves.
fn describe_missing_message(file: &Arc<str>, roots: &[YamlNode<'_>]) -> Diagnostic {
    let is_empty = roots.iter().all(YamlNode::is_null);
    let message = if is_empty { "the input is empty" } else { "this is no configuration of Envoy" };
    Diagnostic {
        severity: Severity::Error,
        file: Arc::clone(file),
        line: 1,
        column: 1,
        path: String::new(),
        message: message.to_owned(),
        hint: Some("give a bootstrap or the page /config_dump; `curl -sSf` tells why a download failed".to_owned()),
    }
}

/// Returns the shortest timeout of the HTTP filters of each domain, in microseconds; none for unreadable texts.
pub fn collect_shortest_timeouts<'t>(texts: impl Iterator<Item = &'t str>) -> BTreeMap<String, u64> {
    let mut timeouts = BTreeMap::new();
    for text in texts {
        let roots = parse::parse_documents(text, DocumentSelection::All, &Arc::from(""), &mut Diagnostics::default());
        for root in &roots {
            rule_match::collect_shortest_timeouts(&Bootstrap::read(&ConfigNode::root(root)), &mut timeouts);
        }
    }
    timeouts
}

fn check_document(root: &ConfigNode<'_, '_>, rules: Option<&RuleSet>, found: &mut EnvoyFindings) {
    let bootstrap = Bootstrap::read(root);
    if bootstrap.has_no_limits() {
        found.report_no_limits(root);
    }
    for manager in &bootstrap.managers {
        filters::check_manager(manager, &bootstrap, found);
        slots::check_manager(manager, &bootstrap, found);
        filters::check_quota_filters(manager, found);
    }
    filters::check_network_filters(&bootstrap, found);
    clusters::check_clusters(&bootstrap, found);
    if let Some(rules) = rules {
        rule_match::check_rules(&bootstrap, rules, found);
    }
}

//! Why a limit will not work: checks of an Envoy bootstrap.
//!
//! Envoy accepts much that does not limit: text of formatters that is sent as it is, costs that are left out, a cluster
//! that does not exist, a filter that is never asked. Each check is one of [`finding::EnvoyCheck`]; what it says was
//! seen with Envoy 1.40. With rules it also says which descriptors match none of them.
//!
//! The file is read as Envoy reads it, in YAML or JSON, with names in `snake_case` or `lowerCamelCase`. What no check
//! concerns is ignored, so a file of another version is no error. A configuration dump of a running Envoy works too.

pub mod finding;
mod config_node;
mod descriptors;
mod bootstrap;
mod clusters;
mod filters;
mod slots;
mod quota;
mod rule_match;

use std::sync::Arc;

use self::bootstrap::Bootstrap;
use self::config_node::ConfigNode;
use self::finding::{EnvoyFindings, ReportedFile};
use crate::rules::diagnostic::Diagnostics;
use crate::rules::rule::set::RuleSet;
use crate::rules::yaml::{DocumentSelection, parse};

/// Checks the text of a bootstrap; `rules` are those that decide on what this Envoy sends, if they are known.
///
/// # Errors
/// The problems of text that is neither YAML nor JSON.
pub fn check_bootstrap(file: &Arc<str>, text: &str, rules: Option<&RuleSet>) -> Result<EnvoyFindings, Diagnostics> {
    let mut problems = Diagnostics::default();
    let roots = parse::parse_documents(text, DocumentSelection::All, file, &mut problems);
    if problems.has_errors() {
        return Err(problems);
    }
    let mut found = EnvoyFindings::new(ReportedFile { name: Arc::clone(file), text });
    for root in &roots {
        check_document(&ConfigNode::root(root), rules, &mut found);
    }
    found.finish();
    Ok(found)
}

fn check_document(root: &ConfigNode<'_, '_>, rules: Option<&RuleSet>, found: &mut EnvoyFindings) {
    let bootstrap = Bootstrap::read(root);
    if bootstrap.has_no_limits() {
        found.report_no_limits(root);
    }
    for manager in &bootstrap.managers {
        filters::check_manager(manager, &bootstrap, found);
        slots::check_manager(manager, &bootstrap, found);
        quota::check_manager(manager, found);
    }
    filters::check_network_filters(&bootstrap, found);
    clusters::check_clusters(&bootstrap, found);
    if let Some(rules) = rules {
        rule_match::check_rules(&bootstrap, rules, found);
    }
}

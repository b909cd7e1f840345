//! Why a limit will not work: checks of an Envoy bootstrap.
//!
//! Envoy accepts much that does not limit: text of formatters that is sent as it is, costs that are left out, a cluster
//! that does not exist, a filter that is never asked. Each check is one of [`finding::EnvoyCheck`]; what it says was
//! seen with Envoy 1.40. With rules it also says which descriptors match none of them.
//!
//! The file is read as Envoy reads it, in YAML or JSON, with names in `snake_case` or `lowerCamelCase`. What no check
//! concerns is ignored, so a file of another version is no error. `document` says which forms are read; `routes` is the
//! model of what is asked on each route, and `sources` of the values, from which all checks of HTTP filters judge.
//!
//! Decides: whether an Envoy file is YAML or JSON; several documents, an empty one.

pub mod config_node;
pub mod finding;
pub mod descriptors;
mod document;
mod routes;
mod http_filters;
mod bootstrap;
mod sources;
mod clusters;
mod filters;
mod values;
mod agents;
mod slots;
mod rule_match;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::bootstrap::Bootstrap;
use self::config_node::ConfigNode;
use self::document::{Document, Form, GIVE_DUMP, Refusal, sort_documents};
use self::finding::{EnvoyCheck, EnvoyFindings, ReportedFile};
pub use self::rule_match::ReachedRules;
use crate::rules::diagnostic::{Diagnostic, Diagnostics, Severity};
use crate::rules::rule::set::RuleSet;
use crate::rules::yaml::{DocumentSelection, Position, parse};

/// Checks the text of a file; `rules` are those that decide on what this Envoy sends, if they are known. Notes in
/// `reached` what it reaches of them.
///
/// # Errors
/// The problems of text that is neither YAML nor JSON, and of a file without anything that can be checked.
pub fn check_file(
    file: &Arc<str>,
    text: &str,
    rules: Option<&RuleSet>,
    reached: &mut ReachedRules,
) -> Result<EnvoyFindings, Diagnostics> {
    let mut problems = Diagnostics::default();
    let roots = parse::parse_documents(text, DocumentSelection::All, file, &mut problems);
    if problems.has_errors() {
        return Err(problems);
    }
    let (documents, refusals) = sort_documents(roots);
    let mut found = EnvoyFindings::new(ReportedFile { name: Arc::clone(file), text });
    for document in &documents {
        if let Err(refusal) = check_document(document, rules, reached, &mut found) {
            problems.push(describe_refusal(file, refusal));
        }
    }
    if documents.is_empty() {
        let empty = || Refusal {
            at: Position { line: 1, column: 1 },
            what: "the input is empty".to_owned(),
            fix: DOWNLOAD_FAILED,
        };
        problems.push(describe_refusal(file, refusals.into_iter().next().unwrap_or_else(empty)));
    } else {
        refusals.iter().for_each(|refusal| found.report_unread(refusal.at, &refusal.what, refusal.fix));
    }
    if problems.has_errors() {
        return Err(problems);
    }
    found.sort_errors_first();
    Ok(found)
}

/// Checks one file by itself, without the rules that nothing of it reaches.
///
/// # Errors
/// As of [`check_file`].
pub fn check_bootstrap(file: &Arc<str>, text: &str, rules: Option<&RuleSet>) -> Result<EnvoyFindings, Diagnostics> {
    check_file(file, text, rules, &mut ReachedRules::default())
}

/// What to do about an input without text.
const DOWNLOAD_FAILED: &str = "give a bootstrap or the page /config_dump; `curl -sSf` tells why a download failed";

fn describe_refusal(file: &Arc<str>, Refusal { at, what, fix }: Refusal) -> Diagnostic {
    Diagnostic {
        severity: Severity::Error,
        file: Arc::clone(file),
        line: at.line.max(1),
        column: at.column.max(1),
        path: String::new(),
        message: what,
        hint: Some(fix.to_owned()),
    }
}

/// Returns the shortest timeout of the HTTP filters of each domain, in microseconds; none for unreadable texts.
pub fn collect_shortest_timeouts<'t>(texts: impl Iterator<Item = &'t str>) -> BTreeMap<String, u64> {
    let mut timeouts = BTreeMap::new();
    for text in texts {
        let roots = parse::parse_documents(text, DocumentSelection::All, &Arc::from(""), &mut Diagnostics::default());
        for Document { root, form } in &sort_documents(roots).0 {
            rule_match::collect_shortest_timeouts(&Bootstrap::read(&ConfigNode::root(root), *form), &mut timeouts);
        }
    }
    timeouts
}

/// Checks a document, or refuses one that lacks what decides whether anything is limited.
fn check_document(
    document: &Document<'_>,
    rules: Option<&RuleSet>,
    reached: &mut ReachedRules,
    found: &mut EnvoyFindings,
) -> Result<(), Refusal> {
    let root = ConfigNode::root(&document.root);
    let bootstrap = Bootstrap::read(&root, document.form);
    let is_unsure = bootstrap.managers.iter().any(|manager| !manager.missing_filters.is_empty());
    if bootstrap.has_no_limits() && !is_unsure {
        let (what, fix) = match document.form {
            Form::Bootstrap | Form::Dump if bootstrap.has_all_listeners => {
                found.report(EnvoyCheck::NoLimits, &root, "no rate limit filter in this file");
                return Ok(());
            }
            Form::Patches => ("these patches add no rate limit filter", PATCHES_TOGETHER),
            Form::Bootstrap => {
                ("the listeners of this bootstrap come from elsewhere, so their filters are not known", GIVE_DUMP)
            }
            Form::Dump => ("this dump has no listeners with a rate limit filter, and not all listeners", GIVE_DUMP),
            Form::Part => ("this part of a configuration has no rate limit filter", GIVE_DUMP),
        };
        return Err(Refusal { at: root.at, what: what.to_owned(), fix });
    }
    for manager in &bootstrap.managers {
        filters::check_manager(manager, &bootstrap, found);
        values::check_manager(manager, rules, found);
        agents::check_manager(manager, found);
        slots::check_manager(manager, &bootstrap, found);
    }
    clusters::check_clusters(&bootstrap, found);
    if let Some(rules) = rules {
        rule_match::check_rules(&bootstrap, rules, reached, found);
    }
    Ok(())
}

/// What patches without the filter need.
const PATCHES_TOGETHER: &str =
    "give them in one file with the patch that adds `envoy.filters.http.ratelimit`, or give the page /config_dump";

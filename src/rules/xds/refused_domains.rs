//! Rules of each domain by themselves: a domain that cannot be used is refused alone.
//!
//! A client of xDS may apply the good resources of a response and refuse it, naming the bad ones (gRFC A46). A domain
//! that is refused keeps the rules that were accepted for it last, if there are any. The response is refused as a whole
//! if no resource of it can be used, or if two resources are of one domain, because then the fault may be that of
//! either.
//!
//! Decides: one domain that cannot be used, beside others; two resources with one domain.

use std::collections::{HashMap, HashSet};
use std::slice;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::resource::RuleResource;
use crate::base::text::truncate_to_bytes;
use crate::rules::compile::options::CompileOptions;
use crate::rules::compile::{CompiledRules, compile_documents};
use crate::rules::diagnostic::{Diagnostic, Diagnostics, Severity};
use crate::rules::document::MAX_DESCRIPTORS;

/// Maximum number of problems of a domain that are kept.
const MAX_PROBLEMS_OF_DOMAIN: usize = 20;

/// Maximum length of all problems of a domain together, in bytes.
const MAX_DOMAIN_ERROR_BYTES: usize = 4096;

/// Maximum length of a domain's part in the message to the control plane, in bytes.
const MAX_SHOWN_ERROR_BYTES: usize = 300;

/// Domain of a response whose rules were refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedDomain {
    /// Name; empty if the resource has none.
    pub domain: String,
    /// Problems of its rules, one a line.
    pub error: String,
    /// Version of the rules that it keeps; absent if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_version: Option<Arc<str>>,
}

/// Rules that were applied.
#[derive(Clone, Debug, Default)]
pub struct AppliedUpdate {
    /// Resources in force, those that refused domains keep included; empty for other sources.
    pub resources: Vec<RuleResource>,
    /// Domains that were refused, while the others were applied.
    pub refused: Vec<RefusedDomain>,
}

/// Result of an update; the error is the text of all problems.
pub type UpdateResult = Result<AppliedUpdate, String>;

/// Resource that was accepted, and the version that brought it.
#[derive(Clone, Debug)]
pub struct AcceptedResource {
    /// The resource.
    pub resource: RuleResource,
    /// Version at the control plane.
    pub version: Arc<str>,
}

/// Resources that were accepted last, by domain.
pub type AcceptedResources = HashMap<String, AcceptedResource>;

/// Rules of all domains that can be used, and the domains that cannot.
#[derive(Debug)]
pub struct CompiledResources {
    /// Rules, those that refused domains keep included.
    pub compiled: CompiledRules,
    /// Resources that they were compiled from, sorted by name and domain.
    pub resources: Vec<RuleResource>,
    /// Domains that were refused; empty if all can be used.
    pub refused: Vec<RefusedDomain>,
}

/// Compiles resources together.
///
/// # Errors
/// Every problem of every resource, if at least one is an error.
pub fn compile_resources(resources: &[RuleResource], options: &CompileOptions) -> Result<CompiledRules, Diagnostics> {
    let mut documents = Vec::with_capacity(resources.len());
    let mut found = Diagnostics::default();
    let mut descriptors_left = MAX_DESCRIPTORS;
    for resource in resources {
        match resource.decode(&mut descriptors_left) {
            Ok(document) => documents.push(document),
            Err(message) => found.push(build_undecodable_error(resource, message)),
        }
    }
    if found.has_errors() {
        return Err(found);
    }
    compile_documents(documents, options)
}

fn build_undecodable_error(resource: &RuleResource, message: String) -> Diagnostic {
    let (severity, file) = (Severity::Error, Arc::clone(&resource.name));
    Diagnostic { severity, file, line: 0, column: 0, path: String::new(), message, hint: None }
}

/// Compiles resources; a domain that cannot be used keeps its resource of `accepted`, if it has one.
///
/// # Errors
/// Every problem, if the resources can only be refused together.
pub fn compile_each_domain(
    resources: Vec<RuleResource>,
    accepted: &AcceptedResources,
    options: &CompileOptions,
) -> Result<CompiledResources, Diagnostics> {
    let problems = match compile_resources(&resources, options) {
        Ok(compiled) => return Ok(CompiledResources { compiled, resources, refused: Vec::new() }),
        Err(problems) => problems,
    };
    let domains: HashSet<&str> = resources.iter().map(|resource| resource.domain.as_str()).collect();
    if domains.len() < resources.len() {
        return Err(problems);
    }
    let (mut usable, mut refused) = (Vec::with_capacity(resources.len()), Vec::new());
    let mut kept = Vec::new();
    for resource in resources {
        match compile_resources(slice::from_ref(&resource), options) {
            Ok(_) => usable.push(resource),
            Err(problems) => {
                let last = accepted.get(&resource.domain);
                kept.extend(last.map(|last| last.resource.clone()));
                let kept_version = last.map(|last| Arc::clone(&last.version));
                refused.push(RefusedDomain { domain: resource.domain, error: join_problems(&problems), kept_version });
            }
        }
    }
    if usable.is_empty() || refused.is_empty() {
        return Err(problems);
    }
    usable.extend(kept);
    usable.sort_by(|a, b| (&a.name, &a.domain).cmp(&(&b.name, &b.domain)));
    match compile_resources(&usable, options) {
        Ok(compiled) => Ok(CompiledResources { compiled, resources: usable, refused }),
        Err(_) => Err(problems),
    }
}

fn join_problems(problems: &Diagnostics) -> String {
    let texts: Vec<_> = problems.errors().iter().take(MAX_PROBLEMS_OF_DOMAIN).map(ToString::to_string).collect();
    truncate_to_bytes(&texts.join("\n"), MAX_DOMAIN_ERROR_BYTES).to_owned()
}

/// Returns the message to the control plane: the first problem of each domain, which begins with its name.
pub fn format_refusal(refused: &[RefusedDomain]) -> String {
    let reasons = refused.iter().filter_map(|domain| domain.error.lines().next());
    let reasons: Vec<_> = reasons.map(|reason| truncate_to_bytes(reason, MAX_SHOWN_ERROR_BYTES)).collect();
    format!("{} (the other domains are applied)", reasons.join("; "))
}

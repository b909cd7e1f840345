//! Checks of what Envoy sends against rules: domains, and descriptors that no value makes match.
//!
//! Decides: which rules no filter of Envoy reaches.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use super::bootstrap::{Bootstrap, RuntimeFlag};
use super::config_node::ConfigNode;
use super::descriptors::LimitEntry;
use super::finding::{EnvoyCheck, EnvoyFindings};
use crate::base::clock::to_micros;
use crate::base::text::truncate_and_escape;
use crate::limit::DEFAULT_ENVOY_TIMEOUT_US;
use crate::rules::rule::NodeId;
use crate::rules::rule::near_miss::PossibleEntry;
use crate::rules::rule::set::{DomainRules, RuleSet};

/// Maximum number of different descriptors that are searched in the rules.
const MAX_SEARCHED_DESCRIPTORS: usize = 2000;

/// Maximum number of characters of a domain or value in a message.
const MAX_TEXT_CHARS: usize = 60;

/// Checks all filters against the rules. Notes in `reached` what they reach.
pub(super) fn check_rules(
    bootstrap: &Bootstrap<'_, '_>,
    rules: &RuleSet,
    reached: &mut ReachedRules,
    found: &mut EnvoyFindings,
) {
    let has_formatters = bootstrap.formatters != RuntimeFlag::Off;
    let mut checker = RuleChecker { rules, has_formatters, searched: HashMap::new(), reached };
    for manager in &bootstrap.managers {
        let of_routes = manager.routes.domains.iter();
        let of_routes: Vec<_> =
            of_routes.filter_map(|(of_filter, node)| Some((*of_filter, find_domain(node, rules, found)?))).collect();
        for (at, filter) in manager.filters.iter().enumerate() {
            let own = filter.node.field("domain").and_then(|domain| find_domain(&domain, rules, found));
            let of_routes = of_routes.iter().filter(|(of_filter, _)| *of_filter == filter.name);
            let possible: Vec<&DomainRules> = own.into_iter().chain(of_routes.map(|(_, domain)| *domain)).collect();
            possible.iter().for_each(|domain| warn_about_longest_queue(&filter.node, domain, rules, found));
            checker.note_domains(&possible, manager.has_unknown_routes || manager.is_partial);
            for entry in manager.entries_of(at) {
                checker.check_entry(entry, &possible, found);
            }
        }
    }
    let quota_filters = bootstrap.managers.iter().flat_map(|manager| &manager.quota_filters);
    for filter in quota_filters.chain(&bootstrap.network_filters) {
        let domain = filter.field("domain").and_then(|domain| find_domain(&domain, rules, found));
        checker.note_domains(domain.as_slice(), true);
    }
}

/// Rules that descriptors of Envoy can match, of all files.
#[derive(Debug, Default)]
pub struct ReachedRules {
    /// Domains that a filter asks in, by name, with the rules reached; `None` if not all descriptors are known.
    domains: BTreeMap<String, Option<HashSet<NodeId>>>,
}

impl ReachedRules {
    /// Reports rules that nothing reaches, in domains whose descriptors are all known.
    pub fn report_others(&self, rules: &RuleSet, found: &mut EnvoyFindings) {
        for (name, reached) in &self.domains {
            if let Some((domain, reached)) = rules.domain(name).zip(reached.as_ref()) {
                for rule in rules.unreached_rules(domain, reached) {
                    found.report_rule(EnvoyCheck::RuleUnreachable, rule);
                }
            }
        }
    }
}

/// Returns the rules of the domain that a node names, or reports it.
fn find_domain<'r>(
    node: &ConfigNode<'_, '_>,
    rules: &'r RuleSet,
    found: &mut EnvoyFindings,
) -> Option<&'r DomainRules> {
    let name = node.as_text()?;
    if let Some(domain) = rules.domain(name) {
        return Some(domain);
    }
    let shown = |name: &str| truncate_and_escape(name, MAX_TEXT_CHARS);
    let near = rules.find_similar_domain(name).map(|near| format!("did you mean `domain: {}`?", shown(near)));
    found.report_with_fix(EnvoyCheck::DomainUnknown, node, format!("no rule has the domain '{}'", shown(name)), near);
    None
}

/// A descriptor that matches no rule, whatever its values.
#[derive(Clone)]
struct UnmatchableDescriptor {
    message: String,
    /// What to do, if a rule is near.
    fix: Option<String>,
}

/// Searches the rules of descriptors, once for equal ones: routes repeat them.
struct RuleChecker<'r> {
    rules: &'r RuleSet,
    reached: &'r mut ReachedRules,
    /// Envoy expands formatters in values.
    has_formatters: bool,
    /// Mismatches of the descriptors that were searched, by domains and entries; `None`: a rule can match.
    searched: HashMap<String, Option<UnmatchableDescriptor>>,
}

impl RuleChecker<'_> {
    fn check_entry(&mut self, entry: &LimitEntry<'_, '_>, domains: &[&DomainRules], found: &mut EnvoyFindings) {
        // An entry of an unknown action may match any rule.
        let Some(entries) = entry.possible_entries(self.has_formatters) else {
            self.note_domains(domains, true);
            return;
        };
        let mismatch = self.find_known_mismatch(&entries, domains);
        // A limit that comes with the request needs no rule.
        if entry.node.field("limit").is_none() {
            report_mismatch(&entry.node, mismatch, found);
        }
    }

    /// Notes that a filter asks in these domains; `is_unknown` if it may send more than the file says.
    fn note_domains(&mut self, domains: &[&DomainRules], is_unknown: bool) {
        for domain in domains {
            let reached = self.reached.domains.entry(domain.name.clone()).or_insert_with(|| Some(HashSet::new()));
            reached.take_if(|_| is_unknown);
        }
    }

    fn note_reached(&mut self, entries: &[PossibleEntry<'_>], domains: &[&DomainRules]) {
        for domain in domains {
            let Some(reached) = self.reached.domains.get_mut(&domain.name) else { continue };
            reached.take_if(|reached| !self.rules.collect_matches(domain, entries, reached));
        }
    }

    /// Searches the rules, once for equal descriptors, and notes what these reach. Beyond the bound nothing is searched.
    fn find_known_mismatch(
        &mut self,
        entries: &[PossibleEntry<'_>],
        domains: &[&DomainRules],
    ) -> Option<UnmatchableDescriptor> {
        let names: Vec<&str> = domains.iter().map(|domain| &*domain.name).collect();
        let id = format!("{names:?} {entries:?}");
        if let Some(known) = self.searched.get(&id) {
            return known.clone();
        }
        if self.searched.len() >= MAX_SEARCHED_DESCRIPTORS {
            self.note_domains(domains, true);
            return None;
        }
        self.note_reached(entries, domains);
        let mismatch = if entries.is_empty() { None } else { self.find_mismatch(entries, domains) };
        self.searched.insert(id, mismatch.clone());
        mismatch
    }

    fn find_mismatch(&self, entries: &[PossibleEntry<'_>], domains: &[&DomainRules]) -> Option<UnmatchableDescriptor> {
        let first = domains.first()?;
        if domains.iter().any(|domain| self.rules.can_match(domain, entries)) {
            return None;
        }
        let message = format!("({}) matches no rule of the domain '{}'", describe_entries(entries), first.name);
        let fix = self.rules.find_near_miss(first, entries).map(|near| match &near.location {
            Some(location) => format!("{} ({location})", near.describe()),
            None => near.describe(),
        });
        Some(UnmatchableDescriptor { message, fix })
    }
}

fn report_mismatch(node: &ConfigNode<'_, '_>, mismatch: Option<UnmatchableDescriptor>, found: &mut EnvoyFindings) {
    if let Some(UnmatchableDescriptor { message, fix }) = mismatch {
        found.report_with_fix(EnvoyCheck::DescriptorUnmatched, node, message, fix);
    }
}

/// Writes `key=value,key=...`.
fn describe_entries(entries: &[PossibleEntry<'_>]) -> String {
    let text = |bytes: &[u8]| truncate_and_escape(&String::from_utf8_lossy(bytes), MAX_TEXT_CHARS);
    let written = entries.iter().map(|entry| {
        let value = entry.value.map_or_else(|| "...".to_owned(), text);
        format!("{}={value}", text(entry.key))
    });
    written.collect::<Vec<_>>().join(",")
}

/// Warns about the longest queue, if its requests may wait longer than the filter does.
fn warn_about_longest_queue(
    filter: &ConfigNode<'_, '_>,
    domain: &DomainRules,
    rules: &RuleSet,
    found: &mut EnvoyFindings,
) {
    let deciding = rules.rules_of_domain(domain).flat_map(|compiled| {
        let limits = compiled.limits.iter().filter(|limit| !limit.shadow && !limit.candidate);
        limits.map(|limit| (&compiled.rule, &limit.limit))
    });
    let longest = deciding.filter_map(|(rule, limit)| Some((limit.longest_queue_wait_us()?, rule)));
    let Some((wait_us, rule)) = longest.max_by_key(|(wait_us, _)| *wait_us) else { return };
    if wait_us > read_timeout_us(filter) {
        let node = filter.field("timeout").unwrap_or_else(|| filter.clone());
        let (rule, wait_ms) = (truncate_and_escape(&rule.path, MAX_TEXT_CHARS), wait_us / 1000);
        found.report(EnvoyCheck::QueueBeyondTimeout, &node, format!("the queue of '{rule}' lasts {wait_ms} ms"));
    }
}

/// Time that a filter waits for an answer, in microseconds.
fn read_timeout_us(filter: &ConfigNode<'_, '_>) -> u64 {
    let written = filter.seconds("timeout").and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    written.map_or(DEFAULT_ENVOY_TIMEOUT_US, to_micros)
}

/// Adds the shortest timeout of the filters of each domain, in microseconds, to `timeouts`.
pub(super) fn collect_shortest_timeouts(bootstrap: &Bootstrap<'_, '_>, timeouts: &mut BTreeMap<String, u64>) {
    for manager in &bootstrap.managers {
        for (at, filter) in manager.filters.iter().enumerate() {
            let of_routes = manager.routes.domains.iter().filter(|(of_filter, _)| *of_filter == filter.name);
            let own = filter.node.text("domain");
            let releases = manager.entries_of(at).iter().any(|entry| entry.is_release());
            for name in own.into_iter().chain(of_routes.filter_map(|(_, domain)| domain.as_text())) {
                // Nothing waits for a release.
                let timeout_us = if releases { u64::MAX } else { read_timeout_us(&filter.node) };
                let shortest = timeouts.entry(name.to_owned()).or_insert(u64::MAX);
                *shortest = timeout_us.min(*shortest);
            }
        }
    }
}

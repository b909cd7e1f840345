//! Checks of what Envoy sends against rules: domains, and descriptors that no value makes match.
//!
//! Decides: which rules no filter of Envoy reaches.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::bootstrap::{Bootstrap, RouteDomain, RuntimeFlag};
use super::config_node::ConfigNode;
use super::descriptors::LimitEntry;
use super::finding::{EnvoyCheck, EnvoyFindings};
use crate::base::clock::to_micros;
use crate::base::text::truncate_and_escape;
use crate::limit::DEFAULT_ENVOY_TIMEOUT_US;
use crate::rules::rule::near_miss::PossibleEntry;
use crate::rules::rule::set::{DomainRules, RuleSet};

/// Maximum number of different descriptors that are searched in the rules.
const MAX_SEARCHED_DESCRIPTORS: usize = 2000;

/// Maximum number of characters of a domain or value in a message.
const MAX_TEXT_CHARS: usize = 60;

/// Checks all filters against the rules.
pub(super) fn check_rules(bootstrap: &Bootstrap<'_, '_>, rules: &RuleSet, found: &mut EnvoyFindings) {
    let has_formatters = bootstrap.formatters != RuntimeFlag::Off;
    let mut checker = RuleChecker { rules, has_formatters, searched: HashMap::new() };
    for manager in &bootstrap.managers {
        let mut of_routes = Vec::new();
        for RouteDomain { of_filter, node } in &manager.route_domains {
            of_routes.extend(find_domain(node, rules, found).map(|domain| (*of_filter, domain)));
        }
        for filter in &manager.filters {
            let own = filter.node.field("domain").and_then(|domain| find_domain(&domain, rules, found));
            let of_routes = of_routes.iter().filter(|(of_filter, _)| *of_filter == filter.name);
            let possible: Vec<&DomainRules> = own.into_iter().chain(of_routes.map(|(_, domain)| *domain)).collect();
            possible.iter().for_each(|domain| warn_about_longest_queue(&filter.node, domain, rules, found));
            for entry in manager.entries_of(filter) {
                checker.check_entry(&entry, &possible, found);
            }
        }
        for filter in &manager.quota_filters {
            filter.field("domain").and_then(|domain| find_domain(&domain, rules, found));
        }
    }
    for (filter, entries) in &bootstrap.thrift_filters {
        let domain = filter.field("domain").and_then(|domain| find_domain(&domain, rules, found));
        entries.iter().for_each(|entry| checker.check_entry(entry, domain.as_slice(), found));
    }
    for filter in &bootstrap.network_filters {
        let domain = filter.field("domain").and_then(|domain| find_domain(&domain, rules, found));
        for descriptor in filter.items("descriptors") {
            let entries = descriptor.items("entries");
            let entries: Vec<_> = entries.iter().filter_map(read_network_filter_entry).collect();
            checker.check_entries(&descriptor, &entries, domain.as_slice(), found);
        }
    }
}

/// Entry of a network filter; its value may be a format.
fn read_network_filter_entry<'n>(entry: &ConfigNode<'n, '_>) -> Option<PossibleEntry<'n>> {
    let value = entry.text("value").filter(|value| !value.contains('%'));
    Some(PossibleEntry { key: entry.text("key")?.as_bytes(), value: value.map(str::as_bytes), is_optional: false })
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
    /// Envoy expands formatters in values.
    has_formatters: bool,
    /// Mismatches of the descriptors that were searched, by domains and entries; `None`: a rule can match.
    searched: HashMap<String, Option<UnmatchableDescriptor>>,
}

impl RuleChecker<'_> {
    fn check_entry(&mut self, entry: &LimitEntry<'_, '_>, domains: &[&DomainRules], found: &mut EnvoyFindings) {
        // A limit that comes with the request needs no rule, and an entry of an unknown action may match any.
        if entry.node.field("limit").is_some() {
            return;
        }
        if let Some(entries) = entry.possible_entries(self.has_formatters) {
            self.check_entries(&entry.node, &entries, domains, found);
        }
    }

    fn check_entries(
        &mut self,
        node: &ConfigNode<'_, '_>,
        entries: &[PossibleEntry<'_>],
        domains: &[&DomainRules],
        found: &mut EnvoyFindings,
    ) {
        let names: Vec<&str> = domains.iter().map(|domain| &*domain.name).collect();
        let id = format!("{names:?} {entries:?}");
        let known = self.searched.get(&id).cloned();
        // Beyond the bound descriptors are not searched.
        let mismatch = known.unwrap_or_else(|| {
            let is_searched = !entries.is_empty() && self.searched.len() < MAX_SEARCHED_DESCRIPTORS;
            let mismatch = is_searched.then(|| self.find_mismatch(entries, domains)).flatten();
            self.searched.insert(id, mismatch.clone());
            mismatch
        });
        if let Some(UnmatchableDescriptor { message, fix }) = mismatch {
            found.report_with_fix(EnvoyCheck::DescriptorUnmatched, node, message, fix);
        }
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
        for filter in &manager.filters {
            let of_routes = manager.route_domains.iter().filter(|domain| domain.of_filter == filter.name);
            let own = filter.node.text("domain");
            let releases = manager.entries_of(filter).iter().any(LimitEntry::is_release);
            for name in own.into_iter().chain(of_routes.filter_map(|domain| domain.node.as_text())) {
                // Nothing waits for a release.
                let timeout_us = if releases { u64::MAX } else { read_timeout_us(&filter.node) };
                let shortest = timeouts.entry(name.to_owned()).or_insert(u64::MAX);
                *shortest = timeout_us.min(*shortest);
            }
        }
    }
}

//! The compiled rules: a flat tree in which every step is a hash probe.
//!
//! All nodes are in one vector. One hash table maps (parent, composite key) to a node; the wildcards and `match`
//! patterns of a node have indices of their own, and nodes with a `match` are not in the table: no value is found as
//! one. The table uses SipHash with random keys, because clients choose the keys that are looked up. SipHash hashes a
//! stream, so `key`, `_` and `value` are not joined before a look-up.
//!
//! Decides: which change of a rule starts its counter anew (`hash_limit_identity`, `epoch`).
//! Decides: which plan a value has, a row's own limit (`CompiledPlans`).
//! Decides: order of entries of a quota's bucket (`order_bucket_entries`).

use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::Hasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::HashTable;
use siphasher::sip::SipHasher13;
use siphasher::sip128::{Hasher128, SipHasher13 as SipHasher13_128};
use smallvec::SmallVec;

use super::backtracking_bound::{count_repeated_keys, max_backtracking_steps};
use super::notify_levels::NotifyLevels;
use super::patterns::{Patterns, PatternsBuilder};
use super::value_pattern::{MatchKind, MatchPattern, ValuePattern};
use super::{
    Domain, EntryOrder, MatchingOptions, NodeId, OWN_LIMIT_NAME, OverrideDefaults, PlanChoices, Rule, RuleAllowance,
    RuleNode, RulePlan, SourceLocation, TableDeclaration, UnitOverrideDefaults,
};
use crate::base::random::random_u64_pair;
use crate::limit::active::ActiveTimes;
use crate::limit::period::Unit;
use crate::limit::request::Entry;
use crate::limit::{Limit, StoreFailurePolicy};
use crate::rules::plan_table::live::{LiveTable, PlanSource, RowLookUpResult};
use crate::rules::plan_table::{FoundRow, OwnLimit};
use crate::telemetry::metrics::limit_registry::{LimitRegistry, OVERFLOW_NAME};
use crate::telemetry::metrics::limit_stats::{LimitName, LimitStats};

/// All rules, compiled and immutable.
#[derive(Debug)]
pub struct RuleSet {
    /// Hash of the texts that the rules come from, with their names; empty in tools.
    pub id: Box<str>,
    /// Hash of these texts without their names; empty in tools.
    pub contents_hash: Box<str>,
    domains: HashMap<String, DomainRules>,
    roots: Vec<NodeId>,
    rule_count: usize,
    can_error: bool,
    /// A domain takes entries in any order, or searches with backtracking.
    has_matching_options: bool,
    /// Rows of tables are in Redis.
    reads_rows_from_redis: bool,
    /// A domain has a limit that follows streams.
    follows_streams: bool,
    pub(super) nodes: Vec<CompiledNode>,
    edges: HashTable<u32>,
    hash_keys: (u64, u64),
}

/// Rules of one domain.
#[derive(Debug)]
pub struct DomainRules {
    /// Name of the domain.
    pub name: String,
    defaults: OverrideDefaults,
    defaults_by_unit: Vec<UnitOverrideDefaults>,
    /// How descriptors are matched.
    pub matching: MatchingOptions,
    /// The domain has a limit that follows streams, so trailing entries `slot` and `release` are not matched.
    pub follows_streams: bool,
    /// With entries in any order: keys that a path has more than once, with the largest number of times.
    pub(super) repeated_keys: HashMap<Box<[u8]>, u64>,
    /// With backtracking: upper bound of the nodes that the search for one descriptor tries; else 0.
    pub(super) max_backtracking_steps: u64,
    pub(super) root: NodeId,
    /// Names of its plans.
    pub plans: Vec<Arc<str>>,
    /// Its tables, in the order of their declarations.
    pub tables: Vec<LiveTable>,
    /// Counts for limits that come with requests and for which there are no statistics of their own.
    pub others: Arc<LimitStats>,
}

/// Compiled node of the rule tree.
#[derive(Debug)]
pub(super) struct CompiledNode {
    pub(super) parent: NodeId,
    /// Composite key: `key` or `key_value`; empty for the root of a domain.
    pub(super) composite: Box<[u8]>,
    /// Length of the key in `composite`, in bytes.
    pub(super) key_length: usize,
    /// Kind of match that the node gives; a wildcard is also matched by its own text, as a value.
    pub(super) match_kind: MatchKind,
    /// The `match` of the node, if it has one.
    pub(super) pattern: Option<Arc<MatchPattern>>,
    pub(super) rule: Option<Box<CompiledRule>>,
    /// Children that match more than one value of their key.
    pub(super) patterns: Option<Box<Patterns>>,
    pub(super) children: SmallVec<[NodeId; 2]>,
    pub(super) share_threshold: bool,
    pub(super) value_to_metric: bool,
    /// A path that ends here has no limit on purpose.
    pub(super) exempt: bool,
    pub(super) location: Option<SourceLocation>,
}

/// A rule, with values that are computed before requests arrive.
#[derive(Debug)]
pub struct CompiledRule {
    /// The rule.
    pub rule: Rule,
    /// Limits with their counters' tags, candidates last; empty if the rule is unlimited.
    pub limits: SmallVec<[CompiledLimit; 1]>,
    /// Number of limits before the candidates.
    deciding: usize,
    /// State of the one-time warning about peeks.
    pub peek_warning: LostReportWarnings,
    /// Metric names contain the values of each request.
    pub named_by_request: bool,
    /// A limit of the rule is not always active.
    pub has_active_times: bool,
    /// A limit has levels of `notify`.
    pub notifies: bool,
    /// Plans that a table chooses from; `None` for most rules.
    plans: Option<Box<CompiledPlans>>,
}

/// Plans that a table chooses from for one rule.
#[derive(Debug)]
struct CompiledPlans {
    /// Index of the table among those of the domain.
    table: usize,
    /// Index of the entry whose value is looked up.
    entry: usize,
    /// The rule under each plan of the domain; `None` for the default plan.
    plans: Vec<Option<CompiledRule>>,
    /// The rule for limits of rows, without limits.
    own: CompiledRule,
    /// Statistics of all limits of rows.
    own_stats: Arc<LimitStats>,
    own_shadow: bool,
    own_quota: bool,
}

/// Limits that a table chose.
#[derive(Clone, Copy, Debug)]
pub struct TableChoice<'r> {
    /// The rule with the limits of the plan.
    pub rule: &'r CompiledRule,
    /// How the plan was found.
    pub source: PlanSource,
    /// Limit of the row's own, in place of those of the rule.
    pub own: Option<ChosenOwnLimit<'r>>,
}

/// Limit of a row's own, as a rule has it.
#[derive(Clone, Copy, Debug)]
pub struct ChosenOwnLimit<'r> {
    /// The limit.
    pub limit: OwnLimit,
    /// Shadow mode.
    pub shadow: bool,
    /// Quota mode.
    pub quota: bool,
    /// Statistics of all such limits of the rule.
    pub stats: &'r Arc<LimitStats>,
}

/// One-time warning about a rule that clients peek at: hits reported after the peek are lost if they are rejected.
#[derive(Debug, Default)]
pub struct LostReportWarnings {
    peeked: AtomicBool,
    warned: AtomicBool,
}

impl LostReportWarnings {
    /// Records a peek.
    pub fn record_peek(&self) {
        // Loading first keeps the cache line of a busy rule shared.
        if !self.peeked.load(Ordering::Relaxed) {
            self.peeked.store(true, Ordering::Relaxed);
        }
    }

    /// Returns `true` once: on the first call after a peek.
    pub fn should_warn_once(&self) -> bool {
        self.peeked.load(Ordering::Relaxed) && !self.warned.swap(true, Ordering::Relaxed)
    }
}

/// Compiled limit of a rule.
#[derive(Clone, Debug)]
pub struct CompiledLimit {
    /// The limit.
    pub limit: Limit,
    /// Hash of algorithm, period and epoch: the part of the counter's key that comes from the rule.
    pub tag: u128,
    /// Epoch of the rule, or of its domain.
    pub epoch: u64,
    /// Shadow mode.
    pub shadow: bool,
    /// Quota mode.
    pub quota: bool,
    /// Candidate: charged as if it were the only limit of the rule.
    pub candidate: bool,
    /// Times at which the limit is active; `None`: always.
    pub active: Option<ActiveTimes>,
    /// Levels at which `notify` tells that the limit is used up to there.
    pub notify: Option<NotifyLevels>,
    /// Statistics of the limit.
    pub stats: Arc<LimitStats>,
}

impl DomainRules {
    /// Defaults for limits of `unit` that are sent with a request.
    pub fn defaults_for_override(&self, unit: Unit) -> &OverrideDefaults {
        let of_unit = self.defaults_by_unit.iter().find(|of_unit| of_unit.unit == unit);
        of_unit.map_or(&self.defaults, |of_unit| &of_unit.defaults)
    }
}

impl RuleSet {
    /// Compiles domains, without exported statistics.
    ///
    /// Names of domains, and composite keys among siblings, must be distinct.
    pub fn new(domains: Vec<Domain>) -> Self {
        Self::from_domains(domains, &LimitRegistry::new(0))
    }

    /// Compiles domains; their statistics are registered in `limit_stats`.
    pub fn from_domains(domains: Vec<Domain>, limit_stats: &LimitRegistry) -> Self {
        let mut set = Self {
            id: Box::default(),
            contents_hash: Box::default(),
            domains: HashMap::with_capacity(domains.len()),
            roots: Vec::with_capacity(domains.len()),
            rule_count: 0,
            can_error: false,
            has_matching_options: domains.iter().any(|domain| domain.matching != MatchingOptions::default()),
            reads_rows_from_redis: false,
            follows_streams: domains.iter().any(Domain::follows_streams),
            nodes: Vec::new(),
            edges: HashTable::new(),
            hash_keys: random_u64_pair(),
        };
        for domain in domains {
            let follows_streams = domain.follows_streams();
            let root = set.add_node(0, Box::default(), 0, MatchKind::Any);
            let repeated_keys = match domain.matching.order {
                EntryOrder::AsWritten => HashMap::new(),
                EntryOrder::Any => count_repeated_keys(&domain.descriptors),
            };
            let repeated_keys = repeated_keys.into_iter().map(|(key, times)| (key.as_bytes().into(), times)).collect();
            let max_backtracking_steps = max_backtracking_steps(&domain.descriptors, domain.matching);
            set.add_subtrees(root, domain.descriptors, &domain.name, limit_stats);
            let others = limit_stats.register_rule_limit(LimitName::new([&*domain.name, OVERFLOW_NAME]));
            let Domain { name, defaults, defaults_by_unit, matching, plans, tables, .. } = domain;
            let empty = |declared: &TableDeclaration| LiveTable::new(Arc::clone(&declared.name), Arc::default());
            let rules = DomainRules {
                name: name.clone(),
                defaults,
                defaults_by_unit,
                matching,
                follows_streams,
                repeated_keys,
                max_backtracking_steps,
                root,
                plans,
                tables: tables.iter().map(empty).collect(),
                others,
            };
            set.roots.push(root);
            set.domains.insert(name, rules);
        }
        set.nodes.shrink_to_fit();
        let override_can_error = |domain: &DomainRules| {
            let by_unit = domain.defaults_by_unit.iter().map(|of_unit| &of_unit.defaults);
            by_unit.chain([&domain.defaults]).any(|defaults| defaults.on_store_error == Some(StoreFailurePolicy::Error))
        };
        set.rule_count = set.nodes.iter().filter(|node| node.rule.is_some()).count();
        set.can_error =
            set.rules().any(CompiledRule::can_error_on_store_failure) || set.domains.values().any(override_can_error);
        set
    }

    /// Returns the rules of a domain.
    pub fn domain(&self, name: &str) -> Option<&DomainRules> {
        self.domains.get(name)
    }

    /// Replaces a table of a domain, before the rules decide. Returns false if there is no such table.
    pub fn replace_table(&mut self, domain: &str, index: usize, table: LiveTable) -> bool {
        let place = self.domains.get_mut(domain).and_then(|domain| domain.tables.get_mut(index));
        let Some(place) = place else { return false };
        self.reads_rows_from_redis |= table.row_cache().is_some();
        *place = table;
        true
    }

    /// Returns true if rows of tables must be read from Redis before limits are selected.
    pub const fn reads_rows_from_redis(&self) -> bool {
        self.reads_rows_from_redis
    }

    /// Returns true if a domain has a limit that follows streams.
    pub const fn follows_streams(&self) -> bool {
        self.follows_streams
    }

    /// Keeps the plans of recorded decisions from now on, in place of the rows of tables, which a log does not have.
    pub fn switch_to_recorded_plans(&mut self) {
        self.domains.values_mut().flat_map(|domain| &mut domain.tables).for_each(LiveTable::switch_to_recorded_rows);
    }

    /// Sets the plan that a recorded decision found for a path; `own` is the limit of its row, if it had one.
    pub fn set_recorded_plan(&self, domain: &str, entries: &[Entry<'_>], plan: &str, own: Option<OwnLimit>) {
        let Some(domain) = self.domain(domain) else { return };
        let Some(found) = self.find_rule(domain, entries) else { return };
        let Some(plans) = found.rule.plans.as_deref() else { return };
        let Some((entry, table)) = entries.get(plans.entry).zip(domain.tables.get(plans.table)) else { return };
        let index = domain.plans.iter().position(|known| **known == *plan).and_then(|index| u16::try_from(index).ok());
        table.set_recorded_row(entry.value, own.map(FoundRow::Own).or(index.map(FoundRow::Plan)));
    }

    /// All domains, in no order.
    pub fn domains(&self) -> impl Iterator<Item = &DomainRules> {
        self.domains.values()
    }

    /// Number of rules.
    pub const fn rule_count(&self) -> usize {
        self.rule_count
    }

    /// Returns `true` if a rule, or an override by the defaults of its domain, answers with an error while the store
    /// fails.
    pub const fn can_error_on_store_failure(&self) -> bool {
        self.can_error
    }

    /// Returns `true` if a domain takes entries in any order, or searches with backtracking.
    #[inline]
    pub(super) const fn has_matching_options(&self) -> bool {
        self.has_matching_options
    }

    /// Number of domains.
    pub fn domain_count(&self) -> usize {
        self.domains.len()
    }

    /// Iterates over all rules in file order, a node before its children. A rule with plans occurs once for each.
    pub fn rules(&self) -> impl Iterator<Item = &CompiledRule> {
        self.rules_below(self.roots.iter().rev().copied().collect())
    }

    /// Returns `true` if a descriptor of the domain has the key, at any level; `None` if there is no such domain.
    pub fn domain_has_key(&self, domain: &str, key: &[u8]) -> Option<bool> {
        let mut waiting = self.nodes[self.domain(domain)?.root as usize].children.to_vec();
        while let Some(id) = waiting.pop() {
            let node = &self.nodes[id as usize];
            let own = &node.composite[..node.key_length];
            // A key with a `*` matches others.
            if own == key || own.contains(&b'*') {
                return Some(true);
            }
            waiting.extend(&node.children);
        }
        Some(false)
    }

    /// Rules of one domain, as [`RuleSet::rules`] has them.
    pub fn rules_of_domain(&self, domain: &DomainRules) -> impl Iterator<Item = &CompiledRule> {
        self.rules_below(vec![domain.root])
    }

    fn rules_below(&self, mut waiting: Vec<NodeId>) -> impl Iterator<Item = &CompiledRule> {
        std::iter::from_fn(move || {
            let node = &self.nodes[waiting.pop()? as usize];
            waiting.extend(node.children.iter().rev());
            Some(node)
        })
        .filter_map(|node| node.rule.as_deref())
        .flat_map(CompiledRule::under_each_plan)
    }

    /// Location of the first descriptor that matches on a value; `None` if all match on keys alone.
    pub fn first_value_match_location(&self) -> Option<&SourceLocation> {
        let has_value = |node: &&CompiledNode| node.composite.len() > node.key_length;
        self.nodes.iter().find(has_value).and_then(|node| node.location.as_ref())
    }

    /// Returns the child of `parent` whose composite key is the concatenation of the parts.
    pub(super) fn find_child(&self, parent: NodeId, composite: &[&[u8]]) -> Option<NodeId> {
        self.edges.find(self.hash_edge(parent, composite), |child| self.is_child(*child, parent, composite)).copied()
    }

    fn is_child(&self, child: NodeId, parent: NodeId, composite: &[&[u8]]) -> bool {
        let node = &self.nodes[child as usize];
        let mut rest = &*node.composite;
        node.parent == parent
            && composite.iter().all(|part| match rest.strip_prefix(*part) {
                Some(after) => {
                    rest = after;
                    true
                }
                None => false,
            })
            && rest.is_empty()
    }

    fn hash_edge(&self, parent: NodeId, composite: &[&[u8]]) -> u64 {
        let mut hasher = SipHasher13::new_with_keys(self.hash_keys.0 ^ u64::from(parent), self.hash_keys.1);
        composite.iter().for_each(|part| hasher.write(part));
        hasher.finish()
    }

    fn add_node(&mut self, parent: NodeId, composite: Box<[u8]>, key_length: usize, match_kind: MatchKind) -> NodeId {
        let id = NodeId::try_from(self.nodes.len()).expect("rule files are bounded far below 2^32 descriptors");
        self.nodes.push(CompiledNode {
            parent,
            composite,
            key_length,
            match_kind,
            pattern: None,
            rule: None,
            patterns: None,
            children: SmallVec::new(),
            share_threshold: false,
            value_to_metric: false,
            exempt: false,
            location: None,
        });
        id
    }

    /// Adds the subtrees of `parent`.
    fn add_subtrees(&mut self, parent: NodeId, nodes: Vec<RuleNode>, domain: &str, limit_stats: &LimitRegistry) {
        let mut waiting = vec![(parent, nodes, false)];
        while let Some((parent, nodes, by_value)) = waiting.pop() {
            let mut patterns = PatternsBuilder::default();
            for node in nodes {
                let composite = node.composite_key().into_bytes().into_boxed_slice();
                let id = self.add_node(parent, composite, node.key.len(), node.match_kind());
                self.nodes[parent as usize].children.push(id);
                match &node.value {
                    ValuePattern::Match(pattern) => {
                        patterns.add_operator(id, node.key.as_bytes(), pattern);
                        self.nodes[id as usize].pattern = Some(Arc::clone(pattern));
                    }
                    ValuePattern::Any | ValuePattern::Exact(_) | ValuePattern::Wildcard(_) => {
                        self.add_edge(parent, id);
                        if node.match_kind() == MatchKind::Wildcard {
                            patterns.add_wildcard(id, &self.nodes[id as usize].composite);
                        }
                    }
                }
                let by_value = by_value || node.value_to_metric;
                let rule = node.rule.map(|rule| {
                    let stats =
                        |extra: Option<&str>| limit_stats.register_rule_limit(self.metric_name(domain, id, extra));
                    Box::new(CompiledRule::new(rule, by_value, &stats))
                });
                let compiled = &mut self.nodes[id as usize];
                compiled.rule = rule;
                compiled.share_threshold = node.share_threshold;
                compiled.value_to_metric = node.value_to_metric;
                compiled.exempt = node.exempt;
                compiled.location = Some(node.location);
                if !node.descriptors.is_empty() {
                    waiting.push((id, node.descriptors, by_value));
                }
            }
            self.nodes[parent as usize].patterns = patterns.build();
        }
    }

    /// Returns the metric name of a limit of the rule at `node`: domain, composite keys, and the suffix of a later
    /// limit.
    fn metric_name(&self, domain: &str, node: NodeId, extra: Option<&str>) -> LimitName {
        let mut parts: SmallVec<[Cow<'_, str>; 6]> = extra.map(Cow::Borrowed).into_iter().collect();
        let mut at = &self.nodes[node as usize];
        // The root of a domain is the only node without a key.
        while !at.composite.is_empty() {
            parts.push(String::from_utf8_lossy(&at.composite));
            at = &self.nodes[at.parent as usize];
        }
        parts.push(Cow::Borrowed(domain));
        LimitName::new(parts.iter().rev().map(|part| &**part))
    }

    /// Adds a child to those that are found by their composite key.
    fn add_edge(&mut self, parent: NodeId, child: NodeId) {
        let hash = self.hash_edge(parent, &[&self.nodes[child as usize].composite]);
        let (nodes, hash_keys) = (&self.nodes, self.hash_keys);
        self.edges.insert_unique(hash, child, |child| {
            let node = &nodes[*child as usize];
            let mut hasher = SipHasher13::new_with_keys(hash_keys.0 ^ u64::from(node.parent), hash_keys.1);
            hasher.write(&node.composite);
            hasher.finish()
        });
    }
}

/// Hashes algorithm, period, calendar and epoch to 128 bits: the part of a counter's key that comes from its limit.
///
/// The hash is not keyed: counters combine it with a hash under random keys.
pub fn hash_limit_identity(limit: &Limit, epoch: u64) -> u128 {
    let mut hasher = SipHasher13_128::new();
    hasher.write_u8(limit.algorithm() as u8);
    // Slots survive a change of `max_duration`, and of the plan.
    hasher.write_u64(if limit.is_concurrent() { 0 } else { limit.period_us() });
    hasher.write_u8(u8::from(limit.follows_calendar_months()));
    hasher.write_u64(epoch);
    if let Some(window) = limit.calendar_windows() {
        hasher.write(window.identity().as_bytes());
    }
    if limit.chain_position().takes_overflow() {
        hasher.write_u8(1);
    }
    hasher.finish128().as_u128()
}

impl CompiledRule {
    fn new(mut rule: Rule, by_value: bool, stats: &dyn Fn(Option<&str>) -> Arc<LimitStats>) -> Self {
        let plans = rule.plan.as_mut().and_then(|plan| Some((plan.table, plan.choices.take()?)));
        let plans = plans.map(|(table, choices)| Box::new(CompiledPlans::new(&rule, table, choices, by_value, stats)));
        let limits: SmallVec<[CompiledLimit; 1]> = match &rule.allowance {
            RuleAllowance::Unlimited { .. } => SmallVec::new(),
            RuleAllowance::Limits(limits) => limits
                .iter()
                .enumerate()
                .map(|(index, of_rule)| CompiledLimit {
                    limit: of_rule.limit,
                    tag: hash_limit_identity(&of_rule.limit, of_rule.epoch),
                    epoch: of_rule.epoch,
                    shadow: of_rule.shadow,
                    quota: of_rule.quota,
                    candidate: of_rule.candidate,
                    active: of_rule.active,
                    notify: of_rule.notify.clone(),
                    stats: stats(rule.limit_suffix(index).as_deref()),
                })
                .collect(),
        };
        let named_by_request = by_value || rule.detailed_metric;
        let deciding = limits.iter().take_while(|limit| !limit.candidate).count();
        let has_active_times = limits.iter().any(|limit| limit.active.is_some());
        let notifies = limits.iter().any(|limit| limit.notify.is_some());
        let peek_warning = LostReportWarnings::default();
        Self { rule, limits, deciding, peek_warning, named_by_request, has_active_times, notifies, plans }
    }

    /// The rule under its default plan, then under each other plan; most rules have none.
    pub fn under_each_plan(&self) -> impl Iterator<Item = &Self> {
        let others = self.plans.iter().flat_map(|plans| plans.plans.iter().flatten());
        std::iter::once(self).chain(others)
    }

    /// The table that chooses the plan, and the value that is looked up; `None` if the rule has no plans.
    pub fn looked_up_table_and_value<'a>(
        &self,
        domain: &'a DomainRules,
        entries: &[Entry<'a>],
    ) -> Option<(&'a LiveTable, &'a [u8])> {
        let plans = self.plans.as_deref()?;
        Some((domain.tables.get(plans.table)?, entries.get(plans.entry)?.value))
    }

    /// Chooses the plan for a request with these entries; `None` if the rule has no plans.
    #[inline]
    pub fn choose_plan<'r>(&'r self, domain: &DomainRules, entries: &[Entry<'_>]) -> Option<TableChoice<'r>> {
        self.plans.as_deref().map(|plans| plans.choose(self, domain, entries))
    }

    /// Limits that decide: all but the candidates, which are last.
    pub fn deciding_limits(&self) -> &[CompiledLimit] {
        &self.limits[..self.deciding]
    }

    /// Returns `true` if a limit answers with an error while the store fails. Shadow limits never fail a request.
    fn can_error_on_store_failure(&self) -> bool {
        self.limits.iter().any(|of_rule| !of_rule.shadow && of_rule.limit.on_store_error() == StoreFailurePolicy::Error)
    }

    /// Name of the limit at `index`; empty if it has none.
    pub fn limit_name(&self, index: usize) -> &str {
        match &self.rule.allowance {
            RuleAllowance::Unlimited { name, .. } => name,
            RuleAllowance::Limits(limits) => limits.get(index).map_or("", |limit| &limit.name),
        }
    }

    /// Defaults that were left out of the limit at `index`, each with the reason.
    pub fn left_out_defaults(&self, index: usize) -> &[String] {
        match &self.rule.allowance {
            RuleAllowance::Unlimited { .. } => &[],
            RuleAllowance::Limits(limits) => limits.get(index).map_or(&[], |limit| &limit.left_out_defaults),
        }
    }
}

impl CompiledPlans {
    fn new(
        default: &Rule,
        table: usize,
        choices: PlanChoices,
        by_value: bool,
        stats: &dyn Fn(Option<&str>) -> Arc<LimitStats>,
    ) -> Self {
        let PlanChoices { entry, plans, shadow: own_shadow, quota: own_quota } = choices;
        let plans = plans.into_iter().map(|rule| rule.map(|rule| CompiledRule::new(rule, by_value, stats)));
        let plan = RulePlan { name: OWN_LIMIT_NAME.into(), table, choices: None };
        let own = Rule {
            allowance: RuleAllowance::Limits(Vec::new()),
            replaces: Vec::new(),
            plan: Some(Box::new(plan)),
            ..default.clone()
        };
        Self {
            table,
            entry,
            plans: plans.collect(),
            own: CompiledRule::new(own, by_value, stats),
            own_stats: stats(Some(OWN_LIMIT_NAME)),
            own_shadow,
            own_quota,
        }
    }

    fn choose<'r>(&'r self, default: &'r CompiledRule, domain: &DomainRules, entries: &[Entry<'_>]) -> TableChoice<'r> {
        let found = entries.get(self.entry).zip(domain.tables.get(self.table));
        match found.map_or(RowLookUpResult::NoRow, |(entry, table)| table.find(entry.value)) {
            RowLookUpResult::NoRow => TableChoice { rule: default, source: PlanSource::Default, own: None },
            RowLookUpResult::NotRead => TableChoice { rule: default, source: PlanSource::NotRead, own: None },
            RowLookUpResult::Row(FoundRow::Plan(index)) => {
                let rule = self.plans.get(usize::from(index)).and_then(Option::as_ref).unwrap_or(default);
                TableChoice { rule, source: PlanSource::Row, own: None }
            }
            RowLookUpResult::Row(FoundRow::Own(limit)) => {
                let Self { own_shadow: shadow, own_quota: quota, own_stats: stats, .. } = self;
                let own = ChosenOwnLimit { limit, shadow: *shadow, quota: *quota, stats };
                TableChoice { rule: &self.own, source: PlanSource::OwnLimit, own: Some(own) }
            }
        }
    }
}

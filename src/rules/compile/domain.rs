//! A domain while it is compiled, and the order of its rules for `matching: { order: any }`.
//!
//! For any order, the paths of the rules are sorted by key. A path is all descriptors down to one that has a rule, or
//! that exempts its values. Descriptors with one key are sorted by kind and text, because their order means nothing
//! either. The rules get the names of their sorted paths. Of patterns that meet at one level, the one that comes first
//! in the files stays first.
//!
//! Decides: `defaults`, `matching`, plans and tables that differ between files of a domain.
//! Decides: the order of rules with `order: any`, and one rule twice under it.

use std::collections::HashMap;
use std::sync::Arc;

use super::options::CompileOptions;
use super::plans::{CompiledPlan, MAX_PLANS, MAX_TABLES, WrittenPlan, compile_table_source};
use super::{limit, memcache};
use crate::rules::diagnostic::{Diagnostic, Diagnostics, Severity, escape_for_message};
use crate::rules::document::defaults::DefaultableKeys;
use crate::rules::document::fields::{DocumentReader, FieldPath};
use crate::rules::document::matching::MatchingSpec;
use crate::rules::document::{PlanSpec, TableSpec};
use crate::rules::rule::value_pattern::has_star;
use crate::rules::rule::{
    Domain, MatchingOptions, OWN_LIMIT_NAME, OverrideDefaults, RuleNode, SourceLocation, TableDeclaration,
    UnitOverrideDefaults,
};
use crate::rules::yaml::{Position, Spanned};

/// A domain to which documents add descriptors.
pub(super) struct DomainBuilder {
    pub(super) domain: Domain,
    /// Indices of the outermost descriptors.
    pub(super) siblings: SiblingIndex,
    pub(super) location: SourceLocation,
    /// `defaults` of the first document that has them.
    pub(super) defaults: Option<LocatedDefaults>,
    /// `matching` of the first document that has it, with its location.
    pub(super) matching: Option<(MatchingSpec, SourceLocation)>,
    /// Plans of all documents.
    pub(super) written_plans: Vec<WrittenPlan>,
    /// Their limits, once all documents are read.
    pub(super) plans: Vec<CompiledPlan>,
}

/// `defaults` of a document, with their location.
pub(super) struct LocatedDefaults {
    pub(super) keys: DefaultableKeys,
    pub(super) location: SourceLocation,
}

/// Index of each descriptor of one level, by composite key.
pub(super) type SiblingIndex = HashMap<String, usize>;

impl DomainBuilder {
    /// A domain without descriptors.
    pub(super) fn new(name: String, location: SourceLocation) -> Self {
        let defaults = OverrideDefaults::default();
        let domain = Domain {
            name,
            defaults,
            defaults_by_unit: Vec::new(),
            matching: MatchingOptions::default(),
            plans: Vec::new(),
            tables: Vec::new(),
            descriptors: Vec::new(),
        };
        let (siblings, written_plans, plans) = (SiblingIndex::new(), Vec::new(), Vec::new());
        Self { domain, siblings, location, defaults: None, matching: None, written_plans, plans }
    }

    /// Returns the domain, with the defaults for limits that are sent with a request.
    pub(super) fn build_domain(self, options: &CompileOptions) -> Domain {
        let Self { mut domain, defaults, plans, .. } = self;
        domain.plans = plans.into_iter().map(|plan| plan.name).collect();
        let layers = options.rule_defaults.layers_for_domain(&domain.name);
        let own = defaults.map(|defaults| defaults.keys).unwrap_or_default();
        let merged = |unit| {
            let merged = layers.layers_for_unit(unit).fold(own.clone(), DefaultableKeys::with_fallback);
            if options.memcache { memcache::remove_unsupported_keys(merged) } else { merged }
        };
        let of_unit = |unit| UnitOverrideDefaults {
            unit,
            defaults: limit::convert_override_defaults(&merged(Some(unit)), options),
        };
        domain.defaults_by_unit = layers.units_with_defaults().map(of_unit).collect();
        domain.defaults = limit::convert_override_defaults(&merged(None), options);
        domain
    }

    /// Sets how the descriptors of a domain are matched, as `set_or_check_defaults` does.
    pub(super) fn set_or_check_matching(
        &mut self,
        reader: &mut DocumentReader<'_>,
        spec: MatchingSpec,
        location: SourceLocation,
    ) {
        match &self.matching {
            None => {
                self.domain.matching = MatchingOptions { order: spec.order, backtrack: spec.backtrack };
                self.matching = Some((spec, location));
            }
            Some((first, _)) if *first == spec => {}
            Some((_, first)) => {
                let at = Position { line: location.line, column: location.column };
                let message =
                    format!("domain '{}' has two different `matching`", escape_for_message(&self.domain.name));
                let hint = format!("make them the same as in {first}, or state them in one file only");
                reader.report_error(at, &FieldPath::ROOT.with_key("matching"), message, hint);
            }
        }
    }

    /// Sets the defaults of a domain from the first document that has them; those of other documents must be the same.
    pub(super) fn set_or_check_defaults(&mut self, reader: &mut DocumentReader<'_>, defaults: LocatedDefaults) {
        match &self.defaults {
            None => self.defaults = Some(defaults),
            Some(first) if first.keys.has_same_values(&defaults.keys) => {}
            Some(LocatedDefaults { location: first, .. }) => {
                let at = Position { line: defaults.location.line, column: defaults.location.column };
                let message =
                    format!("domain '{}' has two different `defaults`", escape_for_message(&self.domain.name));
                let hint = format!("make them the same as in {first}, or state them in one file only");
                reader.report_error(at, &FieldPath::ROOT.with_key("defaults"), message, hint);
            }
        }
    }
}

impl DomainBuilder {
    /// Adds the plans of a document. Reports names that are taken or reserved.
    pub(super) fn add_plans(&mut self, reader: &mut DocumentReader<'_>, plans: Vec<PlanSpec>) {
        for plan in plans {
            let plans = FieldPath::ROOT.with_key("plans");
            let field_path = plans.with_key(&plan.name.value);
            let (name, at) = (&plan.name.value, plan.name.at);
            let first = self.written_plans.iter().find(|first| first.plan.name.value == *name);
            if let Some(WrittenPlan { file, plan: first }) = first {
                let message = format!("the plan '{name}' is defined twice");
                let first = source_location(file, first.name.at);
                reader.report_error(at, &field_path, message, format!("the first is at {first}; remove one"));
            } else if name == OWN_LIMIT_NAME {
                let message = format!("the plan '{OWN_LIMIT_NAME}' would be confused with limits of rows in metrics");
                reader.report_error(at, &field_path, message, "rename it");
            } else if self.written_plans.len() == MAX_PLANS {
                let message = format!("more than {MAX_PLANS} plans in one domain");
                reader.report_error(at, &field_path, message, "write limits of single values into the table");
                return;
            }
            self.written_plans.push(WrittenPlan { file: Arc::clone(reader.file), plan });
        }
    }

    /// Adds the tables of a document. Reports those that cannot be read.
    pub(super) fn add_tables(&mut self, reader: &mut DocumentReader<'_>, tables: Vec<TableSpec>, memcache: bool) {
        for table in tables {
            let tables = FieldPath::ROOT.with_key("tables");
            let field_path = tables.with_key(&table.name.value);
            let Spanned { value: name, at } = &table.name;
            if let Some(first) = self.domain.tables.iter().find(|first| *first.name == **name) {
                let message = format!("the table '{name}' is defined twice");
                reader.report_error(
                    *at,
                    &field_path,
                    message,
                    format!("the first is at {}; remove one", first.location),
                );
                continue;
            }
            if self.domain.tables.len() == MAX_TABLES {
                let message = format!("more than {MAX_TABLES} tables in one domain");
                return reader.report_error(*at, &field_path, message, "put the rows of several into one");
            }
            if let Some(source) = compile_table_source(reader, &table, memcache, &field_path) {
                let (name, location) = (name.as_str().into(), source_location(reader.file, *at));
                self.domain.tables.push(TableDeclaration { name, source, location });
            }
        }
    }
}

fn source_location(file: &Arc<str>, at: Position) -> SourceLocation {
    SourceLocation { file: Arc::clone(file), line: at.line, column: at.column }
}

/// A node of the new tree.
struct SortedNode {
    /// Without descriptors.
    node: RuleNode,
    below: SortedLevel,
}

/// Nodes of one level of the new tree, by composite key.
#[derive(Default)]
struct SortedLevel {
    nodes: Vec<SortedNode>,
    by_composite: HashMap<String, usize>,
}

/// Sorts the rules of a domain; reports keys that cannot be sorted, and paths that become the same.
pub(super) fn sort_rules(domain: &mut Domain, found: &mut Diagnostics) {
    let mut sorted = SortedLevel::default();
    for node in std::mem::take(&mut domain.descriptors) {
        add_sorted_paths(node, &mut Vec::new(), &mut sorted, &domain.name, found);
    }
    domain.descriptors = sorted.into_nodes();
}

/// Adds the paths through `node`; `above` has the nodes before it, without descriptors.
fn add_sorted_paths(
    mut node: RuleNode,
    above: &mut Vec<RuleNode>,
    sorted: &mut SortedLevel,
    domain: &str,
    found: &mut Diagnostics,
) {
    if has_star(&node.key) {
        let message = format!("a `*` in the key '{}' with `order: any`", escape_for_message(&node.key));
        let hint = "write the keys out: entries are sorted by key";
        found.push(Diagnostic::at_location(Severity::Error, &node.location, message, hint));
    }
    let below = std::mem::take(&mut node.descriptors);
    let step = RuleNode { rule: None, exempt: false, ..node.clone() };
    if node.rule.is_some() || node.exempt {
        // The rule belongs to the path, not to the descriptor that has it.
        let (mut rule, exempt) = (node.rule.take(), std::mem::take(&mut node.exempt));
        let mut numbered: Vec<(usize, RuleNode)> = above.iter().cloned().chain([node]).enumerate().collect();
        let location = step.location.clone();
        numbered.sort_by_cached_key(|(_, node)| (node.key.clone(), node.match_kind() as u8, node.composite_key()));
        if let Some(choices) = rule.as_mut().and_then(|rule| rule.plan.as_mut()).and_then(|plan| plan.choices.as_mut())
        {
            choices.entry = numbered.iter().position(|(index, _)| *index == choices.entry).unwrap_or(choices.entry);
        }
        let mut path: Vec<RuleNode> = numbered.into_iter().map(|(_, node)| node).collect();
        if let Some(last) = path.last_mut() {
            (last.rule, last.exempt, last.location) = (rule, exempt, location);
        }
        sorted.add_path(path, domain, found);
    }
    above.push(step);
    for child in below {
        add_sorted_paths(child, above, sorted, domain, found);
    }
    above.pop();
}

impl SortedLevel {
    fn add_path(&mut self, path: Vec<RuleNode>, domain: &str, found: &mut Diagnostics) {
        let name = path.iter().fold(domain.to_owned(), |name, node| format!("{name}.{}", node.composite_key()));
        let mut level = self;
        let last = path.len().saturating_sub(1);
        for (depth, mut node) in path.into_iter().enumerate() {
            if let Some(rule) = &mut node.rule {
                rule.path.clone_from(&name);
                rule.plan_rules_mut().for_each(|rule| rule.path.clone_from(&name));
            }
            let composite = node.composite_key();
            let at = level.by_composite.get(&composite).copied();
            let at = at.unwrap_or_else(|| {
                level.by_composite.insert(composite, level.nodes.len());
                let plain = RuleNode { rule: None, exempt: false, ..node.clone() };
                level.nodes.push(SortedNode { node: plain, below: Self::default() });
                level.nodes.len() - 1
            });
            let SortedNode { node: known, below } = &mut level.nodes[at];
            report_keys_set_differently(known, &node, found);
            if depth == last {
                if known.rule.is_some() || known.exempt {
                    let message = format!("with `order: any`, '{}' is there twice", escape_for_message(&name));
                    let hint = format!("the first is at {}; remove one", known.location);
                    found.push(Diagnostic::at_location(Severity::Error, &node.location, message, hint));
                }
                (known.rule, known.exempt, known.location) = (node.rule.take(), node.exempt, node.location);
            }
            level = below;
        }
    }

    fn into_nodes(self) -> Vec<RuleNode> {
        let node = |SortedNode { node, below }| RuleNode { descriptors: below.into_nodes(), ..node };
        self.nodes.into_iter().map(node).collect()
    }
}

/// Reports keys that two descriptors set differently, which become one.
fn report_keys_set_differently(known: &RuleNode, node: &RuleNode, found: &mut Diagnostics) {
    for (key, differs) in [
        ("share_threshold", known.share_threshold != node.share_threshold),
        ("value_to_metric", known.value_to_metric != node.value_to_metric),
    ] {
        if differs {
            let message =
                format!("with `order: any`, this is the descriptor at {} with another `{key}`", known.location);
            found.push(Diagnostic::at_location(Severity::Error, &node.location, message, "set it the same in both"));
        }
    }
}

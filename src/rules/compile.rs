//! Compiler: turns the documents of all rule texts into checked rules.
//!
//! One run finds every problem of every text; no problem hides another, and one error rejects all rules. Messages
//! contain those of envoyproxy/ratelimit word for word, because people search for them.
//!
//! All documents are read before the first rule is compiled, because the `defaults` of a domain apply to its rules in
//! every file.
//!
//! The work is linear in the size of the texts: siblings are compared by hash, and strings are moved from the document
//! into the rules. Rules without an error are complete, so `RuleSet::new` checks nothing.
//!
//! Decides: what a bad rule file does (all errors at once, no rule of it loads).
//! Decides: two files with one domain (`MERGE_DOMAIN_CONFIG`).
//! Decides: a rule twice in a domain, also `{ key: a_b }` beside `{ key: a, value: b }`.
//! Decides: reserved keys (`slot`, `release`), an empty key or domain.
//! Decides: `value` beside `match`, `rate_limit` beside `plan`, bodies and `over_limit_content_type`.
//! Decides: where `share_threshold` is an error; too much backtracking.

pub mod value_set_files;
pub mod options;
pub mod lints;
mod match_pattern;
mod domain_lints;
mod limit_defaults;
mod memcache;
mod overflow;
mod domain;
pub mod limit;
pub(crate) mod plans;

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use crate::limit::counter_path::KeyShare;
use crate::limit::period::Unit;
use crate::limit::slot::{RELEASE_KEY, SLOT_KEY};
use crate::rules::diagnostic::{AcknowledgedLines, Diagnostic, Diagnostics, Severity, escape_for_message};
use crate::rules::document::defaults::{DefaultableKeys, check_defaults};
use crate::rules::document::fields::{DocumentReader, FieldPath};
use crate::rules::document::rejection::RejectionKeys;
use crate::rules::document::{self, DescriptorSpec, Document, MAX_DESCRIPTORS, RateLimitSpec, read};
use crate::rules::rule::backtracking_bound::{MAX_BACKTRACKING_STEPS, max_backtracking_steps};
use crate::rules::rule::value_pattern::{ValuePattern, has_star};
use crate::rules::rule::{Domain, EntryOrder, RejectionResponse, Rule, RuleAllowance, RuleNode, SourceLocation};
use crate::rules::yaml::{self, DocumentSelection, Position, Spanned, YamlNode, text};
use domain::{DomainBuilder, LocatedDefaults, SiblingIndex};
use limit_defaults::DomainSettings;
use match_pattern::ExpressionWork;
use options::CompileOptions;
use plans::{CompiledPlan, CompiledRateLimit, PathKey, PlanRuleCompiler, PlansAndTables, RulePlace};

/// Text of rules, such as a rule file.
#[derive(Clone, Debug)]
pub struct RuleText {
    /// Name in messages.
    pub name: Arc<str>,
    /// YAML or JSON.
    pub bytes: Vec<u8>,
    /// Documents of the text that count.
    pub documents: DocumentSelection,
}

/// Rules that compiled without errors.
#[derive(Clone, Debug)]
pub struct CompiledRules {
    /// Domains, in order of first appearance.
    pub domains: Vec<Domain>,
    /// Warnings; never errors.
    pub warnings: Diagnostics,
}

/// Compiles the rules of all `texts` together, in the order given.
///
/// # Errors
/// Every problem of every text, if at least one is an error.
pub fn compile_texts(texts: &[RuleText], options: &CompileOptions) -> Result<CompiledRules, Diagnostics> {
    let mut compiler = Compiler::new(options);
    let documents: Vec<_> = texts.iter().flat_map(|text| compiler.read_documents(text)).collect();
    let files: Vec<_> = texts.iter().map(|text| Arc::clone(&text.name)).collect();
    compiler.compile_all_documents(documents, &files)
}

/// Compiles rules that were not written as text, in the order given.
///
/// # Errors
/// Every problem of every document, if at least one is an error.
pub fn compile_documents(
    documents: Vec<NamedDocument>,
    options: &CompileOptions,
) -> Result<CompiledRules, Diagnostics> {
    let files: Vec<_> = documents.iter().map(|document| Arc::clone(&document.file)).collect();
    Compiler::new(options).compile_all_documents(documents, &files)
}

struct Compiler<'o> {
    options: &'o CompileOptions,
    found: Diagnostics,
    acknowledged: Vec<(Arc<str>, AcknowledgedLines)>,
    domains: Vec<DomainBuilder>,
    by_name: HashMap<String, usize>,
    work: RefCell<ExpressionWork>,
    /// Number of descriptors that may still be read.
    descriptors_left: usize,
}

/// A document with the name of its file or resource.
#[derive(Clone, Debug)]
pub struct NamedDocument {
    /// Name in messages.
    pub file: Arc<str>,
    /// The document.
    pub document: Document,
}

/// Descriptors of a document before they are compiled, with the index of their domain.
struct DocumentDescriptors {
    file: Arc<str>,
    domain: usize,
    descriptors: Vec<DescriptorSpec>,
}

impl<'o> Compiler<'o> {
    fn new(options: &'o CompileOptions) -> Self {
        Self {
            options,
            found: Diagnostics::default(),
            acknowledged: Vec::new(),
            domains: Vec::new(),
            by_name: HashMap::new(),
            work: RefCell::default(),
            descriptors_left: MAX_DESCRIPTORS,
        }
    }

    /// Compiles the documents of `files`.
    fn compile_all_documents(
        mut self,
        documents: Vec<NamedDocument>,
        files: &[Arc<str>],
    ) -> Result<CompiledRules, Diagnostics> {
        let declared: Vec<_> =
            documents.into_iter().map(|document| self.register_domain_of_document(document)).collect();
        self.compile_plans();
        for document in declared {
            self.compile_descriptors(document);
        }
        for builder in &mut self.domains {
            sort_and_check_domain(builder, self.found.has_errors(), &mut self.found);
        }
        for (file, lines) in &self.acknowledged {
            self.found.remove_acknowledged(file, lines);
        }
        self.found.sort(files);
        if self.found.has_errors() {
            return Err(self.found);
        }
        let options = self.options;
        let domains = self.domains.into_iter().map(|builder| builder.build_domain(options)).collect();
        Ok(CompiledRules { domains, warnings: self.found })
    }

    /// Reads the documents of the text of a rule file.
    fn read_documents(&mut self, source: &RuleText) -> Vec<NamedDocument> {
        let file = &source.name;
        let text = match text::decode_text(&source.bytes) {
            Ok(text) => text,
            Err(text::UnreadableText { at: Position { line, column }, message, hint }) => {
                let message = format!("error loading config file: yaml: {message}");
                let (file, path, hint) = (Arc::clone(file), String::new(), Some(hint.to_owned()));
                let severity = Severity::Error;
                self.found.push(Diagnostic { severity, file, line, column, path, message, hint });
                return Vec::new();
            }
        };
        let acknowledged = AcknowledgedLines::from_text(&text);
        if !acknowledged.is_empty() {
            self.acknowledged.push((Arc::clone(file), acknowledged));
        }
        let before = self.found.error_count();
        let mut roots = yaml::parse::parse_documents(&text, source.documents, file, &mut self.found);
        // An empty document beside others is a stray `---`; an empty document alone is the text.
        if roots.len() > 1 {
            roots.retain(|root| !root.is_null());
        }
        let named = |document| NamedDocument { file: Arc::clone(file), document };
        if roots.is_empty() && self.found.error_count() == before {
            return vec![named(Document { at: Position { line: 1, column: 1 }, ..Document::default() })];
        }
        let count = roots.iter().map(YamlNode::count_listed_mappings).sum();
        let Some(left) = self.descriptors_left.checked_sub(count) else {
            let message = format!("the rules have more than {MAX_DESCRIPTORS} descriptors, with this file");
            let (file, path) = (Arc::clone(file), String::new());
            let hint =
                Some("write values of one limit as a list or a set: `match: {in: {file: values.txt}}`".to_owned());
            let severity = Severity::Error;
            self.found.push(Diagnostic { severity, file, line: 1, column: 1, path, message, hint });
            return Vec::new();
        };
        self.descriptors_left = left;
        let mut reader = DocumentReader::new(file, &mut self.found);
        roots.iter().filter_map(|root| read::read_document(&mut reader, root)).map(named).collect()
    }

    /// Registers the domain of a document, with defaults, plans and tables; returns the document's descriptors.
    fn register_domain_of_document(&mut self, NamedDocument { file, document }: NamedDocument) -> DocumentDescriptors {
        let mut reader = DocumentReader::new(&file, &mut self.found);
        let name = document.domain.unwrap_or(Spanned { value: String::new(), at: document.at });
        if name.value.is_empty() && !document.unreadable {
            let message = "config file cannot have empty domain";
            reader.report_error(name.at, &FieldPath::ROOT, message, "begin the file with `domain: NAME`");
        }
        let domain = self.find_or_add_domain(name, &file);
        if let Some(Spanned { value: keys, at }) = document.defaults {
            let mut reader = DocumentReader::new(&file, &mut self.found);
            let field_path = FieldPath::ROOT.with_key("defaults");
            check_defaults(&mut reader, &keys, &field_path);
            if self.options.memcache {
                memcache::report_unsupported_keys(&mut reader, &keys, &field_path);
            }
            let defaults = LocatedDefaults { keys, location: source_location(&file, at) };
            self.domains[domain].set_or_check_defaults(&mut reader, defaults);
        }
        if let Some(Spanned { value: spec, at }) = document.matching {
            let mut reader = DocumentReader::new(&file, &mut self.found);
            self.domains[domain].set_or_check_matching(&mut reader, spec, source_location(&file, at));
        }
        let mut reader = DocumentReader::new(&file, &mut self.found);
        self.domains[domain].add_plans(&mut reader, document.plans);
        self.domains[domain].add_tables(&mut reader, document.tables, self.options.memcache);
        DocumentDescriptors { file, domain, descriptors: document.descriptors }
    }

    /// Compiles the plans of all domains, with the defaults of their domain.
    fn compile_plans(&mut self) {
        for builder in &mut self.domains {
            let scope = DomainSettings {
                defaults: builder.defaults.as_ref().map(|defaults| &defaults.keys),
                layers: self.options.rule_defaults.layers_for_domain(&builder.domain.name),
                options: self.options,
                caller_timeout_us: self.options.caller_timeouts_us.get(&*builder.domain.name).copied(),
                work: &self.work,
            };
            for written in &builder.written_plans {
                let mut reader = DocumentReader::new(&written.file, &mut self.found);
                let (plans, none) = (FieldPath::ROOT.with_key("plans"), PlansAndTables { plans: &[], tables: &[] });
                let plan = &written.plan;
                let mut compiler =
                    DescriptorCompiler { reader: &mut reader, scope: &scope, plan_scope: none, path_keys: Vec::new() };
                let field_path = plans.with_key(&plan.name.value);
                let parts = compiler.compile_limits(&plan.rate_limit, &DescriptorSpec::default(), &field_path);
                builder.plans.push(CompiledPlan::new(&plan.name.value, parts));
            }
        }
    }

    /// Compiles the descriptors of a document, with the defaults of their domain.
    fn compile_descriptors(&mut self, DocumentDescriptors { file, domain, descriptors }: DocumentDescriptors) {
        let DomainBuilder { domain, siblings, defaults, plans, .. } = &mut self.domains[domain];
        let Domain { name, tables, descriptors: nodes, .. } = domain;
        let scope = DomainSettings {
            defaults: defaults.as_ref().map(|defaults| &defaults.keys),
            layers: self.options.rule_defaults.layers_for_domain(name),
            options: self.options,
            caller_timeout_us: self.options.caller_timeouts_us.get(&**name).copied(),
            work: &self.work,
        };
        let mut reader = DocumentReader::new(&file, &mut self.found);
        let plan_scope = PlansAndTables { plans, tables };
        let mut compiler = DescriptorCompiler { reader: &mut reader, scope: &scope, plan_scope, path_keys: Vec::new() };
        compiler.compile_level(&mut SiblingNodes { parent: name, nodes, siblings }, descriptors, &FieldPath::ROOT);
    }

    /// Returns the index of the domain to add to: a new one, unless it exists and may be merged.
    fn find_or_add_domain(&mut self, domain: Spanned<String>, file: &Arc<str>) -> usize {
        let location = source_location(file, domain.at);
        match self.by_name.entry(domain.value.clone()) {
            Entry::Occupied(known) if self.options.merge_domains => return *known.get(),
            Entry::Occupied(known) if !domain.value.is_empty() => {
                let first = &self.domains[*known.get()].location;
                let message = format!("duplicate domain '{}' in config file", escape_for_message(&domain.value));
                let hint = format!("it is in {first} already; rename one, or merge them (MERGE_DOMAIN_CONFIG=true)");
                DocumentReader::new(file, &mut self.found).report_error(
                    domain.at,
                    &FieldPath::ROOT.with_key("domain"),
                    message,
                    hint,
                );
            }
            Entry::Occupied(_) => {}
            Entry::Vacant(vacant) => {
                vacant.insert(self.domains.len());
            }
        }
        // A rejected duplicate becomes a domain of its own, so that its descriptors are still checked.
        self.domains.push(DomainBuilder::new(domain.value, location));
        self.domains.len() - 1
    }
}

fn source_location(file: &Arc<str>, at: Position) -> SourceLocation {
    SourceLocation { file: Arc::clone(file), line: at.line, column: at.column }
}

/// Puts the rules of a domain in the order of `matching`, and reports what only the whole domain shows.
fn sort_and_check_domain(builder: &mut DomainBuilder, has_errors: bool, found: &mut Diagnostics) {
    let DomainBuilder { domain, matching, plans, .. } = builder;
    if domain.matching.order == EntryOrder::Any {
        domain::sort_rules(domain, found);
    }
    if domain.follows_streams() {
        report_keys_reserved_for_streams(domain, found);
    }
    // Rules with errors would give problems that follow from those.
    if has_errors {
        return;
    }
    domain_lints::warn_about_hidden_rules(domain, found);
    domain_lints::warn_about_unknown_names(domain, plans, found);
    let steps = max_backtracking_steps(&domain.descriptors, domain.matching);
    if steps > MAX_BACKTRACKING_STEPS
        && let Some((_, location)) = matching
    {
        let message = format!(
            "backtracking could try {steps} descriptors of domain '{}' for one request; at most \
             {MAX_BACKTRACKING_STEPS} are allowed",
            escape_for_message(&domain.name)
        );
        let hint = "join wildcards and `match` of one level, or leave `backtrack` out";
        found.push(Diagnostic::at_location(Severity::Error, location, message, hint));
    }
}

/// Reports descriptors with the key `slot` or `release` in a domain with limits that follow streams. There these keys
/// identify a stream and are never matched.
fn report_keys_reserved_for_streams(domain: &Domain, found: &mut Diagnostics) {
    let mut waiting = vec![domain.descriptors.as_slice()];
    while let Some(nodes) = waiting.pop() {
        let is_slot_key = |node: &&RuleNode| [SLOT_KEY, RELEASE_KEY].contains(&node.key.as_bytes());
        for node in nodes.iter().filter(is_slot_key) {
            let message = format!(
                "the key `{}` is not matched in a domain with `concurrent` or `reservations`, where it identifies a stream",
                node.key
            );
            found.push(Diagnostic::at_location(Severity::Error, &node.location, message, "rename it, in Envoy too"));
        }
        waiting.extend(nodes.iter().map(|node| node.descriptors.as_slice()).filter(|below| !below.is_empty()));
    }
}

/// Compiles descriptors of one document.
struct DescriptorCompiler<'l, 'f> {
    reader: &'l mut DocumentReader<'f>,
    scope: &'l DomainSettings<'l>,
    plan_scope: PlansAndTables<'l>,
    /// Keys from the outermost descriptor to the current one.
    path_keys: Vec<PathKey>,
}

/// Compiled descriptors below one parent.
struct SiblingNodes<'l> {
    /// Name of the descriptor above: `domain.composite.composite`.
    parent: &'l str,
    nodes: &'l mut Vec<RuleNode>,
    siblings: &'l mut SiblingIndex,
}

impl DescriptorCompiler<'_, '_> {
    /// Compiles descriptors with their children, and adds them to a level; `path_above` is that of the descriptor above.
    ///
    /// Recurses as deep as a document may nest: 127 levels.
    fn compile_level(
        &mut self,
        level: &mut SiblingNodes<'_>,
        descriptors: Vec<DescriptorSpec>,
        path_above: &FieldPath<'_>,
    ) {
        let list_path = path_above.with_key("descriptors");
        level.nodes.reserve_exact(descriptors.len());
        level.siblings.reserve(descriptors.len());
        for mut written in descriptors {
            let field_path = list_path.with_index(written.index);
            let mut node = self.compile_node_without_rule(&mut written, &field_path);
            let path = format!("{}.{}", level.parent, node.composite_key());
            let below = std::mem::take(&mut written.descriptors);
            if !below.is_empty() {
                let (nodes, siblings) = (&mut node.descriptors, &mut SiblingIndex::new());
                self.compile_level(&mut SiblingNodes { parent: &path, nodes, siblings }, below, &field_path);
            }
            node.rule = self.compile_rule(&mut written, path, &field_path);
            self.path_keys.pop();
            self.add_node(level, node, &field_path);
        }
        lints::warn_about_costly_wildcards(self.reader, level.nodes, &list_path);
        lints::warn_about_costly_expressions(self.reader, level.nodes, &list_path);
    }

    fn add_node(&mut self, level: &mut SiblingNodes<'_>, node: RuleNode, field_path: &FieldPath<'_>) {
        // A descriptor without a key was reported; do not report that two of them collide.
        if !node.key.is_empty() {
            match level.siblings.entry(node.composite_key()) {
                Entry::Vacant(vacant) => {
                    vacant.insert(level.nodes.len());
                }
                Entry::Occupied(first) => {
                    self.report_duplicate_descriptor(&node, &level.nodes[*first.get()], level.parent, field_path);
                }
            }
        }
        level.nodes.push(node);
    }

    fn report_duplicate_descriptor(
        &mut self,
        node: &RuleNode,
        first: &RuleNode,
        parent: &str,
        field_path: &FieldPath<'_>,
    ) {
        let path = escape_for_message(&format!("{parent}.{}", node.composite_key()));
        let quirk = if node.key == first.key { "" } else { "; a key `a_b` is the same as a key `a` with a value `b`" };
        let hint = format!("the first is at {}{quirk}", first.location);
        let at = Position { line: node.location.line, column: node.location.column };
        self.reader.report_error(at, field_path, format!("duplicate descriptor composite key '{path}'"), hint);
    }

    /// Compiles a descriptor without its children and its rule. Pushes its key onto `path_keys`; the caller pops it.
    fn compile_node_without_rule(&mut self, written: &mut DescriptorSpec, field_path: &FieldPath<'_>) -> RuleNode {
        if written.key.value.is_empty() && !written.unreadable {
            self.reader.report_error(written.key.at, field_path, "descriptor has empty key", "write `key: NAME`");
        }
        let node = RuleNode {
            key: std::mem::take(&mut written.key.value),
            value: self.compile_value(written, field_path),
            rule: None,
            share_threshold: written.share_threshold.is_some_and(|share| share.value),
            value_to_metric: written.value_to_metric,
            exempt: matches!(written.rate_limit, RateLimitSpec::None) && written.descriptors.is_empty(),
            descriptors: Vec::new(),
            location: source_location(self.reader.file, written.key.at),
        };
        lints::warn_about_descriptor_without_effect(self.reader, written, &node, field_path);
        let cannot_share = !node.match_kind().can_share_counter();
        if let Some(share) = written.share_threshold.filter(|share| share.value && cannot_share) {
            let message = format!(
                "share_threshold can only be used with wildcard values (containing '*'), but found key '{}'",
                escape_for_message(&node.composite_key())
            );
            self.reader.report_error(
                share.at,
                &field_path.with_key("share_threshold"),
                message,
                "add a `*` to the value or leave it out",
            );
        }
        let shares = node.share_threshold && node.match_kind().can_share_counter();
        let level_above = self.path_keys.iter().find(|level| level.counts_each_value);
        if let (Some(share), Some(level)) = (written.share_threshold.filter(|_| shares), level_above) {
            let field_path = field_path.with_key("share_threshold");
            lints::warn_about_level_that_does_not_share(self.reader, share.at, &level.key, &field_path);
        }
        let counts_each_value = !shares && lints::has_values_that_belong_together(&node.value);
        self.path_keys.push(PathKey { key: node.key.clone(), shares, counts_each_value });
        node
    }

    /// Compiles `value` or `match`.
    fn compile_value(&mut self, written: &mut DescriptorSpec, field_path: &FieldPath<'_>) -> ValuePattern {
        let value = std::mem::take(&mut written.value);
        let Some(matching) = written.matching.take() else {
            lints::warn_about_value_like_pattern(self.reader, written.at, &value, field_path);
            return ValuePattern::from(value);
        };
        let field_path = field_path.with_key("match");
        if !value.is_empty() {
            let hint = "leave one of them out; `in: [VALUE]` matches one value";
            self.reader.report_error(matching.at, &field_path, "`match` beside `value`", hint);
        }
        if has_star(&written.key.value) {
            let hint = "write keys without `*`, each with a descriptor of its own";
            self.reader.report_error(matching.at, &field_path, "`match` with a `*` in the key", hint);
        }
        ValuePattern::Match(match_pattern::compile_match(
            self.reader,
            matching,
            self.scope.options,
            self.scope.work,
            &field_path,
        ))
    }

    fn compile_rule(&mut self, written: &mut DescriptorSpec, path: String, field_path: &FieldPath<'_>) -> Option<Rule> {
        let rate_limit = std::mem::take(&mut written.rate_limit);
        self.check_enforced_share(written, &rate_limit, field_path);
        if let Some(choice) = written.plan.take() {
            let field_path = field_path.with_key("plan");
            if !matches!(rate_limit, RateLimitSpec::None) {
                let message = "`plan` beside `rate_limit`";
                self.reader.report_error(choice.at, &field_path, message, "remove one of them");
            }
            let place = RulePlace { path, location: source_location(self.reader.file, choice.at) };
            let (scope, path_keys) = (self.plan_scope, &self.path_keys);
            let mut compiler = PlanRuleCompiler { reader: self.reader, scope, path_keys };
            return compiler.compile_rule(&choice, written, &place, &field_path);
        }
        let parts = self.compile_limits(&rate_limit, written, &field_path.with_key("rate_limit"))?;
        let CompiledRateLimit { allowance, replaces, rejection, at } = parts;
        Some(Rule {
            path,
            location: source_location(self.reader.file, at),
            allowance,
            replaces,
            metadata: written.metadata.take().map(|metadata| metadata.value),
            enforced_share: written.enforced_share.map(|share| KeyShare { milli_percent: share.value }),
            rejection,
            detailed_metric: written.detailed_metric,
            logging: written.logging.map(|logging| logging.value),
            plan: None,
        })
    }

    /// Reports an `enforced_share` of a descriptor whose limits reject nothing, or that has none.
    fn check_enforced_share(
        &mut self,
        written: &DescriptorSpec,
        rate_limit: &RateLimitSpec,
        field_path: &FieldPath<'_>,
    ) {
        let Some(share) = written.enforced_share else { return };
        let field_path = field_path.with_key("enforced_share");
        let is_unlimited = match rate_limit {
            RateLimitSpec::None => written.plan.is_none(),
            RateLimitSpec::Unreadable => false,
            RateLimitSpec::One(one) => one.value.unlimited,
            RateLimitSpec::Many(many) => many.value.iter().any(|limit| limit.unlimited),
        };
        if written.shadow_mode {
            let hint = "remove `shadow_mode`: the limits are in shadow mode for all keys but this share";
            self.reader.report_error(share.at, &field_path, "`enforced_share` beside `shadow_mode: true`", hint);
        } else if is_unlimited {
            let message = "`enforced_share` of a descriptor without a limit";
            self.reader.report_error(
                share.at,
                &field_path,
                message,
                "write it beside the `rate_limit` or `plan` that it is for",
            );
        }
    }

    /// Compiles the limits of a descriptor, or of a plan; `None` if there are none.
    fn compile_limits(
        &mut self,
        rate_limit: &RateLimitSpec,
        written: &DescriptorSpec,
        field_path: &FieldPath<'_>,
    ) -> Option<CompiledRateLimit> {
        let (limits, at): (&[document::RateLimitEntry], Position) = match rate_limit {
            RateLimitSpec::None | RateLimitSpec::Unreadable => return None,
            RateLimitSpec::One(one) => (std::slice::from_ref(&*one.value), one.at),
            RateLimitSpec::Many(many) => (&many.value, many.at),
        };
        let rejection = self.compile_rejection(written, limits, field_path);
        let replaces = limit::compile_replaced_names(self.reader, limits, field_path);
        if self.scope.options.memcache {
            memcache::check_single_limit(self.reader, at, limits.len(), field_path);
        }
        let unlimited = limits.iter().find(|limit| limit.unlimited);
        let allowance = if let Some(only) = unlimited {
            limit::compile_unlimited(self.reader, only, written, field_path)
        } else {
            RuleAllowance::Limits(limit::compile_limits(self.reader, limits, written, self.scope, field_path))
        };
        Some(CompiledRateLimit { allowance, replaces, rejection, at })
    }

    /// Response to a rejection: keys beside or in the `rate_limit`, else that of the defaults.
    fn compile_rejection(
        &mut self,
        beside: &DescriptorSpec,
        limits: &[document::RateLimitEntry],
        field_path: &FieldPath<'_>,
    ) -> RejectionResponse {
        let inside = limits.first().map(|limit| limit.defaultable.rejection_keys()).unwrap_or_default();
        let beside = beside.rejection_keys();
        let own = RejectionKeys {
            body: self.choose_in_or_beside_rate_limit("over_limit_body", beside.body, inside.body, field_path),
            content_type: self.choose_in_or_beside_rate_limit(
                "over_limit_content_type",
                beside.content_type,
                inside.content_type,
                field_path,
            ),
            format: self.choose_in_or_beside_rate_limit("over_limit_format", beside.format, inside.format, field_path),
            headers: self.choose_in_or_beside_rate_limit(
                "over_limit_headers",
                beside.headers,
                inside.headers,
                field_path,
            ),
            jitter: self.choose_in_or_beside_rate_limit("jitter", beside.jitter, inside.jitter, field_path),
        };
        let own = own.report_keys_beside_format(self.reader, field_path);
        let unit = limits.first().and_then(|limit| Unit::from_name(&limit.unit.as_ref()?.value));
        let defaults = self.scope.defaults.into_iter().chain(self.scope.layers.layers_for_unit(unit));
        let all = defaults.map(DefaultableKeys::rejection_keys).fold(own, RejectionKeys::or);
        if let Some(content_type) = own.content_type.filter(|_| all.body.is_none()) {
            let message = match all.format {
                Some(_) => "`over_limit_content_type` beside the `over_limit_format` of `defaults`, which sets it too",
                None => "`over_limit_content_type` without `over_limit_body`",
            };
            self.reader.report_warning(content_type.at, field_path, message, "it has no effect; add a body");
        }
        if let Some(content_type) = own.content_type.filter(|spanned| !spanned.value.contains('/')) {
            let field_path = field_path.with_key("over_limit_content_type");
            let message = "this is no content type: it has no `/`";
            self.reader.report_warning(content_type.at, &field_path, message, "write one such as application/json");
        }
        let rejection = all.build();
        if let (Some(own), Some(body)) = (own.body, &rejection.body) {
            let content_type = rejection.content_type.as_deref();
            let (message, hint) = match () {
                () if !body.is_json_if_declared(content_type) => (
                    "the content type is JSON, and the body is not",
                    "put texts in quotes, also \"%LIMIT_NAME%\" and \"%RETRY_AT%\"; numbers need none",
                ),
                () if body.lacks_content_type(content_type) => (
                    "values in this body are not escaped, because it has no content type",
                    "add `over_limit_content_type: application/json`",
                ),
                () => return rejection,
            };
            self.reader.report_warning(own.at, &field_path.with_key("over_limit_body"), message, hint);
        }
        rejection
    }

    /// Returns the value of a key that may be written beside or inside `rate_limit`; reports one in both places.
    fn choose_in_or_beside_rate_limit<'w, T>(
        &mut self,
        key: &str,
        beside: Option<&'w Spanned<T>>,
        inside: Option<&'w Spanned<T>>,
        field_path: &FieldPath<'_>,
    ) -> Option<&'w Spanned<T>> {
        if let (Some(_), Some(inside)) = (beside, inside) {
            let message = "this is written beside `rate_limit` too";
            self.reader.report_error(
                inside.at,
                &field_path.with_key(key),
                message,
                "write it in one of the two places",
            );
        }
        beside.or(inside)
    }
}

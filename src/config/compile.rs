//! From documents to checked rules: what the keys of all files mean to each other.
//!
//! Every problem of every file is found in one go; a problem never hides another, and with one error nothing is
//! returned. The messages of envoyproxy/ratelimit appear in ours word for word, since people search for them.
//!
//! The work is linear in the size of the files: siblings are compared by hash, strings move from the document into the
//! rules. A rule that no error was reported for is complete, so `RuleSet::new` has nothing left to check.

pub mod limit;
pub mod lints;
pub mod options;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use crate::config::diagnostic::{Diagnostic, Diagnostics, Severity, quotable};
use crate::config::document::fields::{DocumentReader, FieldPath};
use crate::config::document::{self, DefaultableKeys, DescriptorSpec, Document, RateLimitSpec, Spanned, read};
use crate::config::yaml::{self, Documents, Position, text};
use crate::rule::{Allowance, Domain, OverLimitBody, OverrideDefaults, Rule, RuleNode, SourceLocation};
use limit::DocumentScope;
use options::CompileOptions;

/// Text of rules, such as a rule file.
#[derive(Clone, Debug)]
pub struct RuleText {
    /// Name in messages.
    pub name: Arc<str>,
    /// YAML or JSON.
    pub bytes: Vec<u8>,
    /// Documents of the text that count.
    pub documents: Documents,
}

/// Rules without errors.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The domains, in order of first appearance.
    pub domains: Vec<Domain>,
    /// What is probably not as it was meant; no errors.
    pub warnings: Diagnostics,
}

/// The rules of all `sources` together, taken in the order given; or all that is wrong with them.
pub fn compile(sources: &[RuleText], options: &CompileOptions) -> Result<Compiled, Diagnostics> {
    let mut compiler =
        Compiler { options, found: Diagnostics::default(), domains: Vec::new(), by_name: HashMap::new() };
    for source in sources {
        compiler.add(source);
    }
    let files: Vec<_> = sources.iter().map(|source| Arc::clone(&source.name)).collect();
    compiler.found.sort(&files);
    if compiler.found.has_errors() {
        return Err(compiler.found);
    }
    let domains = compiler.domains.into_iter().map(|building| building.domain).collect();
    Ok(Compiled { domains, warnings: compiler.found })
}

struct Compiler<'o> {
    options: &'o CompileOptions,
    found: Diagnostics,
    domains: Vec<DomainBuilder>,
    by_name: HashMap<String, usize>,
}

/// A domain that files may still add to.
struct DomainBuilder {
    domain: Domain,
    /// The outermost descriptors by composite key.
    siblings: Siblings,
    location: SourceLocation,
    /// Where the defaults that hold for overrides were stated.
    defaults: Option<SourceLocation>,
}

/// Descriptors of one level: composite key to number.
type Siblings = HashMap<String, usize>;

impl Compiler<'_> {
    fn add(&mut self, source: &RuleText) {
        let file = &source.name;
        let text = match text::decode(&source.bytes) {
            Ok(text) => text,
            Err(text::Unreadable { at: Position { line, column }, message, hint }) => {
                let message = format!("error loading config file: yaml: {message}");
                let (file, path, hint) = (Arc::clone(file), String::new(), Some(hint.to_owned()));
                let severity = Severity::Error;
                return self.found.push(Diagnostic { severity, file, line, column, path, message, hint });
            }
        };
        let before = self.found.error_count();
        let mut roots = yaml::parse(&text, source.documents, file, &mut self.found);
        // An empty document beside others is a stray `---`; alone, or where reading failed, it is the file.
        if roots.len() > 1 {
            roots.retain(|root| !root.is_null());
        }
        if roots.is_empty() && self.found.error_count() == before {
            self.document(Document { at: Position { line: 1, column: 1 }, ..Document::default() }, file);
        }
        for root in roots {
            let mut reader = DocumentReader { file, found: &mut self.found };
            if let Some(document) = read::document(&mut reader, &root) {
                self.document(document, file);
            }
        }
    }

    fn document(&mut self, document: Document, file: &Arc<str>) {
        let mut reader = DocumentReader { file, found: &mut self.found };
        let field_path = FieldPath::ROOT;
        let domain = document.domain.unwrap_or(Spanned { value: String::new(), at: document.at });
        if domain.value.is_empty() && !document.unreadable {
            let message = "config file cannot have empty domain";
            reader.error(domain.at, &field_path, message, "begin the file with `domain: NAME`");
        }
        let scope =
            DocumentScope { defaults: document.defaults.as_ref().map(|spanned| &spanned.value), options: self.options };
        let defaults = document.defaults.as_ref().map(|written| {
            let settings = limit::check_defaults(&mut reader, &written.value, &field_path.key("defaults"));
            (settings, location(file, written.at))
        });
        let building = self.building(domain, file);
        let mut reader = DocumentReader { file, found: &mut self.found };
        let building = &mut self.domains[building];
        building.take_defaults(&mut reader, defaults, self.options);
        let DomainBuilder { domain: Domain { name, descriptors, .. }, siblings, .. } = building;
        let mut level = DescriptorScope { reader: &mut reader, scope: &scope };
        level.extend((descriptors, siblings), name, document.descriptors, &field_path);
    }

    /// The number of the domain to add to: a new one, unless it is known and may be merged.
    fn building(&mut self, domain: Spanned<String>, file: &Arc<str>) -> usize {
        let location = location(file, domain.at);
        match self.by_name.entry(domain.value.clone()) {
            Entry::Occupied(known) if self.options.merge_domains => return *known.get(),
            Entry::Occupied(known) if !domain.value.is_empty() => {
                let first = &self.domains[*known.get()].location;
                let message = format!("duplicate domain '{}' in config file", quotable(&domain.value));
                let hint = format!("it is in {first} already; rename one, or merge them (MERGE_DOMAIN_CONFIG=true)");
                DocumentReader { file, found: &mut self.found }.error(
                    domain.at,
                    &FieldPath::ROOT.key("domain"),
                    message,
                    hint,
                );
            }
            Entry::Occupied(_) => {}
            Entry::Vacant(vacant) => {
                vacant.insert(self.domains.len());
            }
        }
        // A refused duplicate gets a place of its own, so that the rest of it is still checked.
        let defaults =
            OverrideDefaults { on_store_error: Some(self.options.on_store_error), ..OverrideDefaults::default() };
        let domain = Domain { name: domain.value, defaults, descriptors: Vec::new() };
        self.domains.push(DomainBuilder { domain, siblings: Siblings::new(), location, defaults: None });
        self.domains.len() - 1
    }
}

impl DomainBuilder {
    /// Takes the first defaults that a domain's files state for overrides; others must be the same.
    fn take_defaults(
        &mut self,
        reader: &mut DocumentReader<'_>,
        stated: Option<(DefaultableKeys, SourceLocation)>,
        options: &CompileOptions,
    ) {
        let Some((settings, location)) = stated else { return };
        let defaults = limit::defaults(&settings, options);
        match &self.defaults {
            None => (self.domain.defaults, self.defaults) = (defaults, Some(location)),
            Some(_) if self.domain.defaults == defaults => {}
            Some(first) => {
                let at = Position { line: location.line, column: location.column };
                let message = format!("domain '{}' has two different `defaults`", quotable(&self.domain.name));
                let hint = format!("make them the same as in {first}, or state them in one file only");
                reader.error(at, &FieldPath::ROOT.key("defaults"), message, hint);
            }
        }
    }
}

fn location(file: &Arc<str>, at: Position) -> SourceLocation {
    SourceLocation { file: Arc::clone(file), line: at.line, column: at.column }
}

/// What is needed to compile descriptors of one document, at any depth.
struct DescriptorScope<'l, 'f> {
    reader: &'l mut DocumentReader<'f>,
    scope: &'l DocumentScope<'l>,
}

impl DescriptorScope<'_, '_> {
    /// Adds descriptors to those of one level, whose parents' path is `parent`.
    fn extend(
        &mut self,
        (nodes, siblings): (&mut Vec<RuleNode>, &mut Siblings),
        parent: &str,
        written: Vec<DescriptorSpec>,
        field_path: &FieldPath<'_>,
    ) {
        nodes.reserve_exact(written.len());
        siblings.reserve(written.len());
        let field_path = field_path.key("descriptors");
        for descriptor in written {
            let field_path = field_path.index(descriptor.index);
            let node = self.node(descriptor, parent, &field_path);
            // A descriptor without a key was reported; that two of them collide says nothing more.
            if !node.key.is_empty() {
                match siblings.entry(node.composite()) {
                    Entry::Vacant(vacant) => {
                        vacant.insert(nodes.len());
                    }
                    Entry::Occupied(first) => self.collision(&node, &nodes[*first.get()], parent, &field_path),
                }
            }
            nodes.push(node);
        }
        lints::on_wildcards(self.reader, nodes, &field_path);
    }

    fn collision(&mut self, node: &RuleNode, first: &RuleNode, parent: &str, field_path: &FieldPath<'_>) {
        let path = quotable(&format!("{parent}.{}", node.composite()));
        let quirk = if node.key == first.key { "" } else { "; a key `a_b` is the same as a key `a` with a value `b`" };
        let hint = format!("the first stands at {}{quirk}", first.location);
        let at = Position { line: node.location.line, column: node.location.column };
        self.reader.error(at, field_path, format!("duplicate descriptor composite key '{path}'"), hint);
    }

    fn node(&mut self, mut written: DescriptorSpec, parent: &str, field_path: &FieldPath<'_>) -> RuleNode {
        if written.key.value.is_empty() && !written.unreadable {
            self.reader.error(written.key.at, field_path, "descriptor has empty key", "write `key: NAME`");
        }
        lints::on_descriptor(self.reader, &written, field_path);
        let mut node = RuleNode {
            key: std::mem::take(&mut written.key.value),
            value: std::mem::take(&mut written.value),
            rule: None,
            share_threshold: written.share_threshold.is_some_and(|share| share.value),
            value_to_metric: written.value_to_metric,
            descriptors: Vec::new(),
            location: location(self.reader.file, written.key.at),
        };
        let composite = node.composite();
        if let Some(share) = written.share_threshold.filter(|share| share.value && !composite.contains('*')) {
            let message = format!(
                "share_threshold can only be used with wildcard values (containing '*'), but found key '{}'",
                quotable(&composite)
            );
            self.reader.error(
                share.at,
                &field_path.key("share_threshold"),
                message,
                "add a `*` to the value or leave it out",
            );
        }
        let path = format!("{parent}.{composite}");
        let children = std::mem::take(&mut written.descriptors);
        if !children.is_empty() {
            self.extend((&mut node.descriptors, &mut Siblings::new()), &path, children, field_path);
        }
        node.rule = self.rule(&mut written, path, field_path);
        node
    }

    fn rule(&mut self, written: &mut DescriptorSpec, path: String, field_path: &FieldPath<'_>) -> Option<Rule> {
        let field_path = field_path.key("rate_limit");
        let rate_limit = std::mem::take(&mut written.rate_limit);
        let (limits, at): (&[document::RateLimitEntry], Position) = match &rate_limit {
            RateLimitSpec::None | RateLimitSpec::Unreadable => return None,
            RateLimitSpec::One(one) => (std::slice::from_ref(&*one.value), one.at),
            RateLimitSpec::Many(many) => (&many.value, many.at),
        };
        let over_limit_body = self.over_limit_body(written, limits, &field_path);
        let replaces = limit::replaces(self.reader, limits, &field_path);
        let unlimited = limits.iter().find(|limit| limit.unlimited);
        let allowance = if let Some(only) = unlimited {
            limit::unlimited(self.reader, only, written, &field_path)
        } else {
            Allowance::Limits(limit::limits(self.reader, limits, written, (self.scope, &field_path)))
        };
        Some(Rule {
            path,
            location: location(self.reader.file, at),
            allowance,
            replaces,
            metadata: written.metadata.take(),
            over_limit_body,
            detailed_metric: written.detailed_metric,
        })
    }

    /// What a over_limit_body says: as beside or in the `rate_limit`, else as the domain has it.
    fn over_limit_body(
        &mut self,
        beside: &DescriptorSpec,
        limits: &[document::RateLimitEntry],
        field_path: &FieldPath<'_>,
    ) -> OverLimitBody {
        let inside = limits.first().map(|limit| &limit.defaultable.over_limit_body);
        let domain = self.scope.defaults.map(|defaults| &defaults.over_limit_body);
        let body = self.one_of(
            beside.over_limit_body.body.as_ref(),
            inside.and_then(|over_limit_body| over_limit_body.body.as_ref()),
            &field_path.key("over_limit_body"),
        );
        let content_type = self.one_of(
            beside.over_limit_body.content_type.as_ref(),
            inside.and_then(|over_limit_body| over_limit_body.content_type.as_ref()),
            &field_path.key("over_limit_content_type"),
        );
        let body = body.or_else(|| domain?.body.as_ref());
        if let Some(content_type) = content_type.filter(|_| body.is_none()) {
            let message = "`over_limit_content_type` without `over_limit_body`";
            self.reader.warning(content_type.at, field_path, message, "it has no effect; add a body");
        }
        limit::over_limit_body(body, content_type.or_else(|| domain?.content_type.as_ref()))
    }

    /// One of two places for the same key.
    fn one_of<'w>(
        &mut self,
        beside: Option<&'w Spanned<String>>,
        inside: Option<&'w Spanned<String>>,
        field_path: &FieldPath<'_>,
    ) -> Option<&'w Spanned<String>> {
        if let (Some(_), Some(inside)) = (beside, inside) {
            let message = "this stands beside `rate_limit` too";
            self.reader.error(inside.at, field_path, message, "write it in one of the two places");
        }
        beside.or(inside)
    }
}

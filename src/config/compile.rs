//! From documents to checked rules: what the keys of all files mean to each other.
//!
//! Every problem of every file is found in one go; a problem never hides another, and with one error nothing is
//! returned. The messages of envoyproxy/ratelimit appear in ours word for word, since people search for them.
//!
//! The work is linear in the size of the files: siblings are compared by hash, strings move from the document into the
//! rules. A rule that no error was reported for is complete, so `RuleSet::new` has nothing left to check.

pub mod advice;
pub mod limit;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use crate::config::diagnostic::{Diagnostic, Diagnostics, Severity, quotable};
use crate::config::document::fields::{Reader, Trail};
use crate::config::document::{self, Descriptor, Document, RateLimit, Settings, Spot, read};
use crate::config::yaml::{self, Documents, Position, text};
use crate::limit::{DEFAULT_LOG_MAX, StorePolicy};
use crate::rule::{Allowance, Defaults, Domain, Node, Origin, Refusal, Rule};
use crate::settings;
use limit::Scope;

/// A rule file as it was found.
#[derive(Clone, Debug)]
pub struct Source {
    /// Its name in messages.
    pub name: Arc<str>,
    /// Its bytes.
    pub text: Vec<u8>,
    /// Which of its documents are read.
    pub documents: Documents,
}

/// The settings that change what rule files mean.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether files may add to each other's domains (`MERGE_DOMAIN_CONFIG`).
    pub merge_domains: bool,
    /// Whether fixed windows of months follow the calendar (`USE_CALENDAR_MONTH_RATE_LIMIT`).
    pub calendar_months: bool,
    /// The most requests per unit that a sliding_window_log may keep.
    pub log_max: u32,
    /// What holds where neither rule nor domain says `on_store_error`.
    pub on_store_error: StorePolicy,
    /// How many replicas share an eventual limit at most (`TOLLKEEPER_MAX_REPLICAS`), at least 1; for advice only.
    pub max_replicas: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            merge_domains: false,
            calendar_months: false,
            log_max: DEFAULT_LOG_MAX,
            on_store_error: StorePolicy::default(),
            max_replicas: 16,
        }
    }
}

/// What the settings of a process say about it.
impl From<&settings::Settings> for Options {
    fn from(settings: &settings::Settings) -> Self {
        Self {
            merge_domains: settings.rules.merge_domains,
            calendar_months: settings.behaviour.calendar_months,
            log_max: settings.behaviour.log_max,
            on_store_error: settings.rules.on_store_error,
            max_replicas: settings.rules.max_replicas,
        }
    }
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
pub fn compile(sources: &[Source], options: &Options) -> Result<Compiled, Diagnostics> {
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
    options: &'o Options,
    found: Diagnostics,
    domains: Vec<Building>,
    by_name: HashMap<String, usize>,
}

/// A domain that files may still add to.
struct Building {
    domain: Domain,
    /// The outermost descriptors by composite key.
    siblings: Siblings,
    origin: Origin,
    /// Where the defaults that hold for overrides were stated.
    defaults: Option<Origin>,
}

/// Descriptors of one level: composite key to number.
type Siblings = HashMap<String, usize>;

impl Compiler<'_> {
    fn add(&mut self, source: &Source) {
        let file = &source.name;
        let text = match text::decode(&source.text) {
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
            let mut reader = Reader { file, found: &mut self.found };
            if let Some(document) = read::document(&mut reader, &root) {
                self.document(document, file);
            }
        }
    }

    fn document(&mut self, document: Document, file: &Arc<str>) {
        let mut reader = Reader { file, found: &mut self.found };
        let trail = Trail::ROOT;
        let domain = document.domain.unwrap_or(Spot { value: String::new(), at: document.at });
        if domain.value.is_empty() && !document.unreadable {
            let message = "config file cannot have empty domain";
            reader.error(domain.at, &trail, message, "begin the file with `domain: NAME`");
        }
        let scope = Scope { defaults: document.defaults.as_ref().map(|spot| &spot.value), options: self.options };
        let defaults = document.defaults.as_ref().map(|written| {
            let settings = limit::check_defaults(&mut reader, &written.value, &trail.key("defaults"));
            (settings, origin(file, written.at))
        });
        let building = self.building(domain, file);
        let mut reader = Reader { file, found: &mut self.found };
        let building = &mut self.domains[building];
        building.take_defaults(&mut reader, defaults, self.options);
        let Building { domain: Domain { name, descriptors, .. }, siblings, .. } = building;
        let mut level = Level { reader: &mut reader, scope: &scope };
        level.extend((descriptors, siblings), name, document.descriptors, &trail);
    }

    /// The number of the domain to add to: a new one, unless it is known and may be merged.
    fn building(&mut self, domain: Spot<String>, file: &Arc<str>) -> usize {
        let origin = origin(file, domain.at);
        match self.by_name.entry(domain.value.clone()) {
            Entry::Occupied(known) if self.options.merge_domains => return *known.get(),
            Entry::Occupied(known) if !domain.value.is_empty() => {
                let first = &self.domains[*known.get()].origin;
                let message = format!("duplicate domain '{}' in config file", quotable(&domain.value));
                let hint = format!("it is in {first} already; rename one, or merge them (MERGE_DOMAIN_CONFIG=true)");
                Reader { file, found: &mut self.found }.error(domain.at, &Trail::ROOT.key("domain"), message, hint);
            }
            Entry::Occupied(_) => {}
            Entry::Vacant(vacant) => {
                vacant.insert(self.domains.len());
            }
        }
        // A refused duplicate gets a place of its own, so that the rest of it is still checked.
        let defaults = Defaults { on_store_error: Some(self.options.on_store_error), ..Defaults::default() };
        let domain = Domain { name: domain.value, defaults, descriptors: Vec::new() };
        self.domains.push(Building { domain, siblings: Siblings::new(), origin, defaults: None });
        self.domains.len() - 1
    }
}

impl Building {
    /// Takes the first defaults that a domain's files state for overrides; others must be the same.
    fn take_defaults(&mut self, reader: &mut Reader<'_>, stated: Option<(Settings, Origin)>, options: &Options) {
        let Some((settings, origin)) = stated else { return };
        let defaults = limit::defaults(&settings, options);
        match &self.defaults {
            None => (self.domain.defaults, self.defaults) = (defaults, Some(origin)),
            Some(_) if self.domain.defaults == defaults => {}
            Some(first) => {
                let at = Position { line: origin.line, column: origin.column };
                let message = format!("domain '{}' has two different `defaults`", quotable(&self.domain.name));
                let hint = format!("make them the same as in {first}, or state them in one file only");
                reader.error(at, &Trail::ROOT.key("defaults"), message, hint);
            }
        }
    }
}

fn origin(file: &Arc<str>, at: Position) -> Origin {
    Origin { file: Arc::clone(file), line: at.line, column: at.column }
}

/// What is needed to compile descriptors of one document, at any depth.
struct Level<'l, 'f> {
    reader: &'l mut Reader<'f>,
    scope: &'l Scope<'l>,
}

impl Level<'_, '_> {
    /// Adds descriptors to those of one level, whose parents' path is `parent`.
    fn extend(
        &mut self,
        (nodes, siblings): (&mut Vec<Node>, &mut Siblings),
        parent: &str,
        written: Vec<Descriptor>,
        trail: &Trail<'_>,
    ) {
        nodes.reserve_exact(written.len());
        siblings.reserve(written.len());
        let trail = trail.key("descriptors");
        for descriptor in written {
            let trail = trail.index(descriptor.index);
            let node = self.node(descriptor, parent, &trail);
            // A descriptor without a key was reported; that two of them collide says nothing more.
            if !node.key.is_empty() {
                match siblings.entry(node.composite()) {
                    Entry::Vacant(vacant) => {
                        vacant.insert(nodes.len());
                    }
                    Entry::Occupied(first) => self.collision(&node, &nodes[*first.get()], parent, &trail),
                }
            }
            nodes.push(node);
        }
        advice::on_wildcards(self.reader, nodes, &trail);
    }

    fn collision(&mut self, node: &Node, first: &Node, parent: &str, trail: &Trail<'_>) {
        let path = quotable(&format!("{parent}.{}", node.composite()));
        let quirk = if node.key == first.key { "" } else { "; a key `a_b` is the same as a key `a` with a value `b`" };
        let hint = format!("the first stands at {}{quirk}", first.origin);
        let at = Position { line: node.origin.line, column: node.origin.column };
        self.reader.error(at, trail, format!("duplicate descriptor composite key '{path}'"), hint);
    }

    fn node(&mut self, mut written: Descriptor, parent: &str, trail: &Trail<'_>) -> Node {
        if written.key.value.is_empty() && !written.unreadable {
            self.reader.error(written.key.at, trail, "descriptor has empty key", "write `key: NAME`");
        }
        advice::on_descriptor(self.reader, &written, trail);
        let mut node = Node {
            key: std::mem::take(&mut written.key.value),
            value: std::mem::take(&mut written.value),
            rule: None,
            share_threshold: written.share_threshold.is_some_and(|share| share.value),
            value_to_metric: written.value_to_metric,
            descriptors: Vec::new(),
            origin: origin(self.reader.file, written.key.at),
        };
        let composite = node.composite();
        if let Some(share) = written.share_threshold.filter(|share| share.value && !composite.contains('*')) {
            let message = format!(
                "share_threshold can only be used with wildcard values (containing '*'), but found key '{}'",
                quotable(&composite)
            );
            self.reader.error(
                share.at,
                &trail.key("share_threshold"),
                message,
                "add a `*` to the value or leave it out",
            );
        }
        let path = format!("{parent}.{composite}");
        let children = std::mem::take(&mut written.descriptors);
        if !children.is_empty() {
            self.extend((&mut node.descriptors, &mut Siblings::new()), &path, children, trail);
        }
        node.rule = self.rule(&mut written, path, trail);
        node
    }

    fn rule(&mut self, written: &mut Descriptor, path: String, trail: &Trail<'_>) -> Option<Rule> {
        let trail = trail.key("rate_limit");
        let rate_limit = std::mem::take(&mut written.rate_limit);
        let (limits, at): (&[document::Limit], Position) = match &rate_limit {
            RateLimit::None | RateLimit::Unreadable => return None,
            RateLimit::One(one) => (std::slice::from_ref(&*one.value), one.at),
            RateLimit::Many(many) => (&many.value, many.at),
        };
        let refusal = self.refusal(written, limits, &trail);
        let replaces = limit::replaces(self.reader, limits, &trail);
        let unlimited = limits.iter().find(|limit| limit.unlimited);
        let allowance = if let Some(only) = unlimited {
            limit::unlimited(self.reader, only, written, &trail)
        } else {
            Allowance::Limits(limit::limits(self.reader, limits, written, (self.scope, &trail)))
        };
        Some(Rule {
            path,
            origin: origin(self.reader.file, at),
            allowance,
            replaces,
            metadata: written.metadata.take(),
            refusal,
            detailed_metric: written.detailed_metric,
        })
    }

    /// What a refusal says: as beside or in the `rate_limit`, else as the domain has it.
    fn refusal(&mut self, beside: &Descriptor, limits: &[document::Limit], trail: &Trail<'_>) -> Refusal {
        let inside = limits.first().map(|limit| &limit.settings.refusal);
        let domain = self.scope.defaults.map(|defaults| &defaults.refusal);
        let body = self.one_of(
            beside.refusal.body.as_ref(),
            inside.and_then(|refusal| refusal.body.as_ref()),
            &trail.key("over_limit_body"),
        );
        let content_type = self.one_of(
            beside.refusal.content_type.as_ref(),
            inside.and_then(|refusal| refusal.content_type.as_ref()),
            &trail.key("over_limit_content_type"),
        );
        let body = body.or_else(|| domain?.body.as_ref());
        if let Some(content_type) = content_type.filter(|_| body.is_none()) {
            let message = "`over_limit_content_type` without `over_limit_body`";
            self.reader.warning(content_type.at, trail, message, "it has no effect; add a body");
        }
        limit::refusal(body, content_type.or_else(|| domain?.content_type.as_ref()))
    }

    /// One of two places for the same key.
    fn one_of<'w>(
        &mut self,
        beside: Option<&'w Spot<String>>,
        inside: Option<&'w Spot<String>>,
        trail: &Trail<'_>,
    ) -> Option<&'w Spot<String>> {
        if let (Some(_), Some(inside)) = (beside, inside) {
            let message = "this stands beside `rate_limit` too";
            self.reader.error(inside.at, trail, message, "write it in one of the two places");
        }
        beside.or(inside)
    }
}

//! Parser of YAML text: builds the tree from the events of `granit_parser`.
//!
//! `granit_parser` is the parser of serde-saphyr, the maintained successor of serde_yaml. The typed layer of
//! serde-saphyr is not used, because it hides whether a scalar was plain or quoted, and `"3"` is not a number here.
//!
//! The number of nodes that aliases expand to is bounded, because a walk over the tree visits them. Depth is bounded
//! too, including aliases, so a walk can recurse. Merge keys are resolved, and of duplicate keys the last one counts.
//!
//! Decides: a key twice, `<<`; the warning of documents that are not read.
//! Decides: how deep YAML nests, and to how many nodes aliases expand (`MAX_ALIASED_NODES`).

use std::borrow::Cow;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use serde_saphyr::granit_parser::{self, Event, Parser, ScalarStyle, Span, Tag};

use super::{DocumentSelection, Position, Scalar, YamlContent, YamlEntry, YamlNode};
use crate::rules::diagnostic::{Diagnostic, Diagnostics, Severity, escape_for_message};

/// Maximum depth of nested nodes, including aliases: 127 levels of descriptors.
pub const MAX_DEPTH: usize = 256;

/// Maximum number of nodes that the aliases and merge keys of one file expand to.
pub const MAX_ALIASED_NODES: usize = 1_000_000;

/// Parses the documents of `text` up to the first syntax error. Errors and warnings go to `found`.
pub fn parse_documents<'a>(
    text: &'a str,
    which: DocumentSelection,
    file: &Arc<str>,
    found: &mut Diagnostics,
) -> Vec<YamlNode<'a>> {
    let options = granit_parser::options! {
        emit_comments: false,
        // The tree has a tighter bound of its own, with a better message.
        flow_nesting_limit: 2 * MAX_DEPTH,
        block_nesting_limit: 2 * MAX_DEPTH,
    };
    let mut builder = TreeBuilder::new(file, found);
    for event in Parser::new_from_str_with_options(text, options) {
        match event {
            Ok((Event::DocumentStart(..), span))
                if which == DocumentSelection::FirstOnly && !builder.documents.is_empty() =>
            {
                builder.warn_ignored_document(span_position(&span));
                break;
            }
            Ok((event, span)) => {
                if builder.add_event(event, &span).is_none() {
                    break;
                }
            }
            // An error after the only document that is read does not affect it.
            Err(error) if which == DocumentSelection::FirstOnly && !builder.documents.is_empty() => {
                builder.warn_ignored_document(marker_position(error.marker()));
                break;
            }
            Err(error) => {
                let at = error_position(text, &error);
                builder.add_error(at, &error.info(), hint_for_error(error.kind()));
                break;
            }
        }
    }
    builder.documents
}

/// Returns hints for common mistakes.
fn hint_for_error(kind: &granit_parser::ErrorKind) -> Option<&'static str> {
    use granit_parser::ErrorKind as Kind;
    Some(match kind {
        Kind::TabNotAllowed | Kind::TabInBlockIndentation | Kind::TabInIndentation | Kind::TabInPlainScalar => {
            "indent with spaces, not tabs"
        }
        Kind::MissingAnchorOrAliasName | Kind::UnknownAnchor => "put text that begins with `*` or `&` in quotes",
        Kind::UnexpectedCharacter { character: '%' | '@' | '`' } => "put text that begins so in quotes",
        Kind::MappingValueNotAllowed | Kind::InvalidIndentation | Kind::ExpectedBlockMappingKey => {
            "check the indentation of this line and the one before"
        }
        Kind::MisplacedFlowCollectionEnd => "remove the bracket that nothing opens",
        Kind::UnclosedQuotedScalar | Kind::InvalidQuotedScalarIndent => "close the quote",
        _ => return None,
    })
}

/// Position of an error. That of a tab is where the tab is, not where the value before it begins.
fn error_position(text: &str, error: &granit_parser::ScanError) -> Position {
    let at = marker_position(error.marker());
    if *error.kind() != granit_parser::ErrorKind::TabInPlainScalar {
        return at;
    }
    let lines = text.lines().zip(1..).skip(at.line as usize);
    let mut indented = lines.filter(|(line, _)| line.trim_start_matches(' ').starts_with('\t'));
    indented.next().map_or(at, |(line, number)| {
        let column = line.find('\t').and_then(|spaces| u32::try_from(spaces).ok()).unwrap_or(0);
        Position { line: number, column: column + 1 }
    })
}

fn span_position(span: &Span) -> Position {
    marker_position(&span.start)
}

fn marker_position(marker: &granit_parser::Marker) -> Position {
    let small = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Position { line: small(marker.line().max(1)), column: small(marker.col()).saturating_add(1) }
}

/// Node of an anchor, with the size that an alias of it adds.
struct AnchoredNode<'a> {
    node: YamlNode<'a>,
    nodes: usize,
    height: usize,
}

/// A collection that is still open.
struct OpenCollection {
    at: Position,
    mapping: bool,
    anchor: usize,
    /// Index of its first item in `TreeBuilder::finished`.
    first: usize,
    /// Number of nodes before it.
    before: usize,
    /// Height of its highest child.
    height: usize,
}

struct TreeBuilder<'a, 'f> {
    file: &'f Arc<str>,
    found: &'f mut Diagnostics,
    documents: Vec<YamlNode<'a>>,
    open: Vec<OpenCollection>,
    /// Finished nodes of open collections, those of the innermost last.
    finished: Vec<YamlNode<'a>>,
    anchors: HashMap<usize, AnchoredNode<'a>>,
    /// Number of nodes so far, including those that aliases expand to.
    nodes: usize,
    /// Number of nodes that aliases expand to.
    aliased: usize,
}

impl<'a, 'f> TreeBuilder<'a, 'f> {
    fn new(file: &'f Arc<str>, found: &'f mut Diagnostics) -> Self {
        let (documents, open, finished, anchors) = (Vec::new(), Vec::new(), Vec::new(), HashMap::new());
        Self { file, found, documents, open, finished, anchors, nodes: 0, aliased: 0 }
    }

    /// Adds an event; `None` ends the parse after an error.
    fn add_event(&mut self, event: Event<'a>, span: &Span) -> Option<()> {
        let at = span_position(span);
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let scalar = Scalar::new(text, style == ScalarStyle::Plain, yaml_tag_suffix(tag.as_deref()).as_deref());
                self.nodes += 1;
                self.add_node(YamlNode { at, content: YamlContent::Scalar(scalar) }, anchor, 1, 1)
            }
            Event::SequenceStart(_, anchor, _) => self.begin_collection(at, false, anchor),
            Event::MappingStart(_, anchor, _) => self.begin_collection(at, true, anchor),
            Event::SequenceEnd | Event::MappingEnd => self.end_collection(),
            Event::Alias(anchor) => self.add_alias(anchor, at),
            Event::DocumentStart(..) => {
                self.anchors.clear();
                Some(())
            }
            _ => Some(()),
        }
    }

    fn begin_collection(&mut self, at: Position, mapping: bool, anchor: usize) -> Option<()> {
        self.nodes += 1;
        let first = self.finished.len();
        self.open.push(OpenCollection { at, mapping, anchor, first, before: self.nodes - 1, height: 0 });
        self.check_depth(at, 0)
    }

    fn end_collection(&mut self) -> Option<()> {
        let open = self.open.pop().expect("the parser ends only what it began");
        let items = self.finished.split_off(open.first);
        let content = if open.mapping {
            YamlContent::Map(Rc::new(self.build_mapping(items)?))
        } else {
            YamlContent::List(Rc::new(items))
        };
        let nodes = self.nodes - open.before;
        self.add_node(YamlNode { at: open.at, content }, open.anchor, nodes, open.height + 1)
    }

    fn add_alias(&mut self, anchor: usize, at: Position) -> Option<()> {
        let Some(AnchoredNode { node, nodes, height }) = self.anchors.get(&anchor) else {
            return self.add_error(at, "an alias is inside the value that it names", Some("write the value out"));
        };
        let (node, nodes, height) = (node.clone(), *nodes, *height);
        self.nodes += nodes;
        self.count_aliased_nodes(nodes, at)?;
        self.check_depth(at, height)?;
        self.add_node(node, 0, nodes, height)
    }

    /// Counts nodes that an alias expands to.
    fn count_aliased_nodes(&mut self, nodes: usize, at: Position) -> Option<()> {
        self.aliased += nodes;
        if self.aliased > MAX_ALIASED_NODES {
            return self.add_error(at, "document contains excessive aliasing", Some("write the values out"));
        }
        Some(())
    }

    fn check_depth(&mut self, at: Position, height: usize) -> Option<()> {
        if self.open.len() + height > MAX_DEPTH {
            let message = format!("nested deeper than {MAX_DEPTH} levels");
            return self.add_error(at, &message, Some("no request has that many entries"));
        }
        Some(())
    }

    /// Puts a finished node where it belongs.
    fn add_node(&mut self, node: YamlNode<'a>, anchor: usize, nodes: usize, height: usize) -> Option<()> {
        if anchor != 0 {
            self.anchors.insert(anchor, AnchoredNode { node: node.clone(), nodes, height });
        }
        match self.open.last_mut() {
            Some(parent) => {
                parent.height = parent.height.max(height);
                self.finished.push(node);
            }
            None => self.documents.push(node),
        }
        Some(())
    }

    /// Pairs keys with values, resolves merge keys and drops all but the last of equal keys.
    ///
    /// A written key takes precedence over a merged one in any order; of merged keys the first takes precedence.
    fn build_mapping(&mut self, items: Vec<YamlNode<'a>>) -> Option<Vec<YamlEntry<'a>>> {
        let mut entries: Vec<YamlEntry<'a>> = Vec::with_capacity(items.len() / 2);
        let mut merges: Vec<(YamlNode<'a>, usize)> = Vec::new();
        let mut seen = SeenKeys::default();
        let mut items = items.into_iter();
        while let (Some(key), Some(value)) = (items.next(), items.next()) {
            if key.is_merge_key() {
                merges.push((value, entries.len()));
                continue;
            }
            match seen.find_key(&key) {
                Some(earlier) => {
                    self.warn_about_duplicate_key(&key, entries[earlier].0.at);
                    entries[earlier] = (key, value);
                }
                None => seen.add_entry((key, value), &mut entries),
            }
        }
        for (source, before) in merges {
            self.add_merge_key_entries(&source, before, &mut seen, &mut entries)?;
        }
        Some(entries)
    }

    /// Adds the entries of `source`, the value of a merge key after `before` entries, whose keys `entries` lacks.
    fn add_merge_key_entries(
        &mut self,
        source: &YamlNode<'a>,
        before: usize,
        seen: &mut SeenKeys<'a>,
        entries: &mut Vec<YamlEntry<'a>>,
    ) -> Option<()> {
        let maps = match &source.content {
            YamlContent::List(list) => list.as_slice(),
            _ => std::slice::from_ref(source),
        };
        for map in maps {
            let YamlContent::Map(merged) = &map.content else {
                let message = "map merge requires map or sequence of maps as the value";
                return self.add_error(map.at, message, Some("merge with `<<: *anchor` of a mapping"));
            };
            self.count_aliased_nodes(merged.len(), map.at)?;
            for entry in merged.iter() {
                match seen.find_key(&entry.0) {
                    None => seen.add_entry(entry.clone(), entries),
                    Some(earlier) if earlier < before => self.warn_overridden_key(&entries[earlier].0),
                    Some(_) => {}
                }
            }
        }
        Some(())
    }

    fn warn_about_duplicate_key(&mut self, key: &YamlNode<'a>, earlier: Position) {
        let message = format!("the key `{}` is written twice in this mapping", escape_for_message(&key.key_label()));
        let hint = format!("this one counts, the one in line {} does not", earlier.line);
        self.add_warning(key.at, message, hint);
    }

    fn warn_overridden_key(&mut self, key: &YamlNode<'a>) {
        let message =
            format!("the key `{}` is written before a merge key that has it too", escape_for_message(&key.key_label()));
        self.add_warning(key.at, message, "this one counts; put `<<` first to be read alike everywhere".into());
    }

    fn warn_ignored_document(&mut self, at: Position) {
        let message = "only the first document of this file is read".into();
        self.add_warning(at, message, "put each domain in a file of its own, or load this file with --config".into());
    }

    fn add_warning(&mut self, at: Position, message: String, hint: String) {
        self.found.push(build_diagnostic(Severity::Warning, self.file, at, message, Some(hint)));
    }

    /// Records an error that ends the parse.
    fn add_error(&mut self, at: Position, message: &str, hint: Option<&str>) -> Option<()> {
        let message = format!("error loading config file: yaml: {}", escape_for_message(message));
        self.found.push(build_diagnostic(Severity::Error, self.file, at, message, hint.map(Into::into)));
        None
    }
}

/// Creates a diagnostic about the text, without a path in the document.
fn build_diagnostic(
    severity: Severity,
    file: &Arc<str>,
    at: Position,
    message: String,
    hint: Option<String>,
) -> Diagnostic {
    let Position { line, column } = at;
    Diagnostic { severity, file: Arc::clone(file), line, column, path: String::new(), message, hint }
}

/// Index of the keys of one mapping.
#[derive(Default)]
struct SeenKeys<'a>(HashMap<Cow<'a, str>, usize>);

impl<'a> SeenKeys<'a> {
    fn find_key(&self, key: &YamlNode<'a>) -> Option<usize> {
        self.0.get(key.as_scalar()?.text()).copied()
    }

    fn add_entry(&mut self, entry: YamlEntry<'a>, entries: &mut Vec<YamlEntry<'a>>) {
        if let Some(key) = entry.0.as_scalar() {
            self.0.insert(key.text.clone(), entries.len());
        }
        entries.push(entry);
    }
}

/// Returns the tag of YAML's own schema, such as `str`; empty for a tag of another schema.
fn yaml_tag_suffix(tag: Option<&Tag>) -> Option<Cow<'_, str>> {
    tag.map(|tag| tag.suffix_in_namespace("tag:yaml.org,2002:").unwrap_or_default())
}

//! The keys of one mapping, held to the table of keys.
//!
//! `Reader` is where findings go while a document is read; a `Trail` says where in the document that is, as a list
//! that lives on the stack, so that a path is only written out for a finding. `Reader::fields` sorts the keys of a
//! mapping: those that mean something here, those to be ignored as envoyproxy/ratelimit does, and errors.

use std::fmt;
use std::sync::Arc;

use super::value::{described, go_value};
use crate::config::diagnostic::{Diagnostic, Diagnostics, Severity, quotable};
use crate::config::keys::{Key, Place, find, nearest};
use crate::config::yaml::scalar::Value;
use crate::config::yaml::{Content, Node, Position};

/// The way from the root of a document to a place in it.
#[derive(Clone, Copy, Debug)]
pub struct Trail<'p> {
    parent: Option<&'p Trail<'p>>,
    step: Step<'p>,
}

#[derive(Clone, Copy, Debug)]
enum Step<'p> {
    Key(&'p str),
    Index(usize),
}

impl<'p> Trail<'p> {
    /// The document itself.
    pub const ROOT: Trail<'static> = Trail { parent: None, step: Step::Key("") };

    /// What `key` holds here.
    pub fn key(&'p self, key: &'p str) -> Self {
        Self { parent: Some(self), step: Step::Key(key) }
    }

    /// The element of that number here, from 0.
    pub fn index(&'p self, index: usize) -> Self {
        Self { parent: Some(self), step: Step::Index(index) }
    }
}

/// Writes `descriptors[2].rate_limit.unit`.
impl fmt::Display for Trail<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(parent) = self.parent else { return Ok(()) };
        parent.fmt(f)?;
        match self.step {
            Step::Key(key) if parent.parent.is_none() => write!(f, "{}", quotable(key)),
            Step::Key(key) => write!(f, ".{}", quotable(key)),
            Step::Index(index) => write!(f, "[{index}]"),
        }
    }
}

/// Where findings about one file go.
#[derive(Debug)]
pub struct Reader<'f> {
    /// The file's name.
    pub file: &'f Arc<str>,
    /// All findings so far.
    pub found: &'f mut Diagnostics,
}

impl Reader<'_> {
    /// Records an error; an empty hint is none.
    pub fn error(&mut self, at: Position, trail: &Trail<'_>, message: impl Into<String>, hint: impl Into<String>) {
        self.report(Severity::Error, (at, trail), message.into(), hint.into());
    }

    /// Records a warning; an empty hint is none.
    pub fn warning(&mut self, at: Position, trail: &Trail<'_>, message: impl Into<String>, hint: impl Into<String>) {
        self.report(Severity::Warning, (at, trail), message.into(), hint.into());
    }

    fn report(&mut self, severity: Severity, (at, trail): (Position, &Trail<'_>), message: String, hint: String) {
        let hint = (!hint.is_empty()).then_some(hint);
        let (file, path) = (Arc::clone(self.file), trail.to_string());
        self.found.push(Diagnostic { severity, file, line: at.line, column: at.column, path, message, hint });
    }
}

/// A key that means something where it stands.
#[derive(Clone, Copy, Debug)]
pub struct Field<'n, 'a> {
    /// The key.
    pub key: &'static Key,
    /// Where it stands.
    pub at: Position,
    /// What it holds.
    pub node: &'n Node<'a>,
}

impl Reader<'_> {
    /// The keys of a mapping that mean something at `place`. What is no mapping has none, and is reported
    /// as something that is no `into`.
    pub fn fields<'n, 'a>(
        &mut self,
        node: &'n Node<'a>,
        place: Place,
        into: &str,
        trail: &Trail<'_>,
    ) -> Option<Vec<Field<'n, 'a>>> {
        let Content::Map(map) = &node.content else {
            self.wrong_type(node, into, "write a mapping here", trail);
            return None;
        };
        let mut fields = Vec::with_capacity(map.len());
        for (name, node) in map.iter() {
            let Some(known) = self.known(name, Some(place), trail) else { continue };
            if known.places.contains(&place) {
                fields.push(Field { key: known, at: name.at, node });
            } else {
                self.misplaced((known, name.at), node, place, trail);
            }
        }
        Some(fields)
    }

    /// The key of that name, or an error.
    fn known(&mut self, name: &Node<'_>, place: Option<Place>, trail: &Trail<'_>) -> Option<&'static Key> {
        let text = match name.scalar() {
            Some(scalar) if scalar.value() == Value::Text => scalar.text(),
            _ => {
                let message = format!("config error, key is not of type string: {}", go_value(name));
                self.error(name.at, trail, message, "put it in quotes if it is meant as a name");
                return None;
            }
        };
        let known = find(text);
        if known.is_none() {
            let hint = nearest(text, place).map_or_else(String::new, |near| format!("did you mean `{near}`?"));
            self.error(name.at, &trail.key(text), format!("config error, unknown key '{}'", quotable(text)), hint);
        }
        known
    }

    /// A known key where it means nothing.
    fn misplaced(&mut self, (key, at): (&Key, Position), node: &Node<'_>, place: Place, trail: &Trail<'_>) {
        let trail = trail.key(key.name);
        let message = format!("`{}` means nothing in {}", key.name, place.phrase());
        let belongs = key.places.iter().map(|place| place.phrase()).collect::<Vec<_>>().join(" or ");
        if place == Place::Limit && key.name == "unlimited" {
            self.error(at, &trail, "`unlimited` in a list of limits", "write `rate_limit: {unlimited: true}` alone");
        } else if key.peer {
            self.warning(at, &trail, message, format!("it is ignored; it belongs in {belongs}"));
            self.ignored(node, &trail);
        } else {
            self.error(at, &trail, message, format!("it belongs in {belongs}"));
        }
    }

    /// What an ignored key holds is still held to the names and types that the peer checks everywhere.
    fn ignored(&mut self, node: &Node<'_>, trail: &Trail<'_>) {
        match &node.content {
            Content::Scalar(scalar) => {
                if matches!(scalar.value(), Value::Float(_) | Value::Large(_)) {
                    self.error(node.at, trail, "error checking config: a number that no key takes", "");
                }
            }
            Content::List(list) => {
                for (index, element) in list.iter().enumerate() {
                    let trail = trail.index(index);
                    match &element.content {
                        Content::Map(_) => self.ignored(element, &trail),
                        _ => self.not_a_mapping(element, &trail),
                    }
                }
            }
            Content::Map(map) => {
                for (name, node) in map.iter() {
                    match self.known(name, None, trail) {
                        Some(key) if !key.peer => {
                            let message = format!("config error, unknown key '{}'", key.name);
                            self.error(name.at, &trail.key(key.name), message, "it means nothing here");
                        }
                        // What metadata holds is free.
                        Some(key) if key.name != "metadata" => self.ignored(node, &trail.key(key.name)),
                        _ => {}
                    }
                }
            }
        }
    }

    /// An element of a list that should be a mapping and is none.
    pub fn not_a_mapping(&mut self, element: &Node<'_>, trail: &Trail<'_>) {
        let message = format!("config error, yaml file contains list of type other than map: {}", go_value(element));
        self.error(element.at, trail, message, "write a mapping such as `- key: ...`");
    }

    /// A value of another type than `into`, as the peer's YAML reader calls it.
    pub fn wrong_type(&mut self, node: &Node<'_>, into: &str, hint: &str, trail: &Trail<'_>) {
        // At the root the peer has not looked into anything yet.
        if let Content::List(list) = &node.content
            && trail.parent.is_some()
            && let Some((index, element)) =
                list.iter().enumerate().find(|(_, element)| !matches!(element.content, Content::Map(_)))
        {
            return self.not_a_mapping(element, &trail.index(index));
        }
        let odd = node.scalar().is_some_and(|scalar| matches!(scalar.value(), Value::Float(_) | Value::Large(_)));
        let prefix = if odd { "error checking config: " } else { "" };
        self.error(node.at, trail, format!("{prefix}cannot unmarshal {} into {into}", described(node)), hint);
    }
}

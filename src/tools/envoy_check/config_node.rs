//! A message of Envoy's configuration: fields by name, with position and path.
//!
//! A name is found in `snake_case` and in `lowerCamelCase`, as protobuf's JSON has both. A field that is null is
//! absent. A field of another type than expected is absent too: Envoy refuses such a file by itself.

use std::fmt::Write as _;
use std::rc::Rc;

use crate::rules::yaml::{Position, ScalarValue, YamlContent, YamlNode};

/// Prefix of the type URLs of messages.
const TYPE_URL_PREFIX: &str = "type.googleapis.com/";

/// Types of messages that carry another one as `type_url` and `value`.
const TYPED_STRUCTS: [&str; 2] = ["xds.type.v3.TypedStruct", "udpa.type.v1.TypedStruct"];

/// A node of the configuration.
#[derive(Clone, Debug)]
pub(super) struct ConfigNode<'n, 'a> {
    node: &'n YamlNode<'a>,
    /// Position of the key, or of the element of a list.
    pub(super) at: Position,
    path: Option<Rc<PathStep<'n>>>,
}

/// Step of a path, with those before it.
#[derive(Debug)]
struct PathStep<'n> {
    before: Option<Rc<PathStep<'n>>>,
    step: KeyOrIndex<'n>,
}

#[derive(Debug)]
enum KeyOrIndex<'n> {
    Key(&'n str),
    Index(usize),
}

impl<'n, 'a> ConfigNode<'n, 'a> {
    /// The root of a document.
    pub(super) const fn root(node: &'n YamlNode<'a>) -> Self {
        Self { node, at: node.at, path: None }
    }

    /// The node itself.
    pub(super) const fn yaml(&self) -> &'n YamlNode<'a> {
        self.node
    }

    /// Visits the names of all fields below, and all texts, in their order.
    pub(super) fn visit_texts(&self, visit: &mut impl FnMut(&'n str)) {
        self.as_text().into_iter().for_each(&mut *visit);
        for (name, field) in self.fields() {
            visit(name);
            field.visit_texts(visit);
        }
        self.elements().for_each(|element| element.visit_texts(visit));
    }

    /// Returns `true` if a field below, whose name is one of `names`, is this text, letters of any case.
    pub(super) fn has_text_below(&self, names: &[&str], text: &str) -> bool {
        let is_it = |name: &str, field: &Self| {
            names.iter().any(|one| names_field(name, one))
                && field.as_text().is_some_and(|value| value.eq_ignore_ascii_case(text))
        };
        self.fields().any(|(name, field)| is_it(name, &field) || field.has_text_below(names, text))
            || self.elements().any(|element| element.has_text_below(names, text))
    }

    /// Returns a field.
    pub(super) fn field(&self, name: &str) -> Option<Self> {
        self.fields().find(|(key, node)| names_field(key, name) && !node.node.is_null()).map(|(_, node)| node)
    }

    /// Returns a field of a field, and so on.
    pub(super) fn field_at(&self, names: &[&str]) -> Option<Self> {
        names.iter().try_fold(self.clone(), |node, name| node.field(name))
    }

    /// Fields in their order; none if the node is not a message.
    pub(super) fn fields(&self) -> impl Iterator<Item = (&'n str, Self)> + use<'_, 'n, 'a> {
        let map = match &self.node.content {
            YamlContent::Map(map) => map.as_slice(),
            YamlContent::List(_) | YamlContent::Scalar(_) => &[],
        };
        map.iter().filter_map(|(key, node)| {
            let name = key.as_scalar()?.text();
            Some((name, Self { node, at: key.at, path: self.extend_path(KeyOrIndex::Key(name)) }))
        })
    }

    /// Elements of the list that a field is; none if it is no list.
    pub(super) fn items(&self, name: &str) -> Vec<Self> {
        self.field(name).map_or_else(Vec::new, |list| list.elements().collect())
    }

    /// Elements, if the node is a list.
    pub(super) fn elements(&self) -> impl Iterator<Item = Self> + use<'_, 'n, 'a> {
        let list = match &self.node.content {
            YamlContent::List(list) => list.as_slice(),
            YamlContent::Map(_) | YamlContent::Scalar(_) => &[],
        };
        list.iter().enumerate().map(|(index, node)| Self {
            node,
            at: node.at,
            path: self.extend_path(KeyOrIndex::Index(index)),
        })
    }

    /// Text of the node, if it is a scalar.
    pub(super) fn as_text(&self) -> Option<&'n str> {
        self.node.as_scalar().map(|scalar| scalar.text())
    }

    /// Returns `true` if the node is a text, and no number or other value.
    pub(super) fn is_text(&self) -> bool {
        self.node.as_scalar().is_some_and(|scalar| scalar.value() == ScalarValue::Text)
    }

    /// Text of a field.
    pub(super) fn text(&self, name: &str) -> Option<&'n str> {
        self.field(name)?.as_text()
    }

    /// Returns `true` if the node is the boolean true, or its word.
    pub(super) fn is_true(&self) -> bool {
        self.node.as_scalar().is_some_and(|scalar| match scalar.value() {
            ScalarValue::Bool(value) => value,
            _ => scalar.text() == "true",
        })
    }

    /// Returns `true` if a field is true.
    pub(super) fn flag(&self, name: &str) -> bool {
        self.field(name).is_some_and(|field| field.is_true())
    }

    /// Value of a field that is a whole number.
    pub(super) fn whole_number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }

    /// Value of a field that is a duration such as `0.25s`, in seconds.
    pub(super) fn seconds(&self, name: &str) -> Option<f64> {
        self.text(name)?.strip_suffix('s')?.parse().ok().filter(|seconds: &f64| seconds.is_finite())
    }

    /// Full name of the type of a message with `@type`, and the message.
    pub(super) fn type_name_and_message(&self) -> Option<(&'n str, Self)> {
        let of_url = |url: &'n str| url.strip_prefix(TYPE_URL_PREFIX).unwrap_or(url);
        let name = of_url(self.fields().find(|(key, _)| *key == "@type")?.1.as_text()?);
        if TYPED_STRUCTS.contains(&name) {
            return Some((of_url(self.text("type_url")?), self.field("value")?));
        }
        Some((name, self.clone()))
    }

    /// The field `typed_config` of this message, if it has this type.
    pub(super) fn typed_config(&self, type_name: &str) -> Option<Self> {
        let (name, message) = self.field("typed_config")?.type_name_and_message()?;
        (name == type_name).then_some(message)
    }

    /// Path from the root, such as `static_resources.clusters[0].name`.
    pub(super) fn path(&self) -> String {
        let mut steps = Vec::new();
        let mut next = self.path.as_ref();
        while let Some(step) = next {
            steps.push(&step.step);
            next = step.before.as_ref();
        }
        let mut path = String::new();
        for step in steps.into_iter().rev() {
            // Writing to a string does not fail.
            let _ = match step {
                KeyOrIndex::Key(key) if path.is_empty() => write!(path, "{key}"),
                KeyOrIndex::Key(key) => write!(path, ".{key}"),
                KeyOrIndex::Index(index) => write!(path, "[{index}]"),
            };
        }
        path
    }

    fn extend_path(&self, step: KeyOrIndex<'n>) -> Option<Rc<PathStep<'n>>> {
        Some(Rc::new(PathStep { before: self.path.clone(), step }))
    }
}

/// Returns `true` if `written` is the field `name`, given in `snake_case`, or its name in `lowerCamelCase`.
pub fn names_field(written: &str, name: &str) -> bool {
    if written == name {
        return true;
    }
    let mut written = written.chars();
    let mut after_underscore = false;
    for letter in name.chars() {
        if letter == '_' {
            after_underscore = true;
            continue;
        }
        let expected = if after_underscore { letter.to_ascii_uppercase() } else { letter };
        after_underscore = false;
        if written.next() != Some(expected) {
            return false;
        }
    }
    written.next().is_none()
}

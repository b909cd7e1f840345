//! Descriptors that the actions of a `rate_limits` item make: the keys, and the values as far as the file has them.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use super::config_node::ConfigNode;
use crate::rules::rule::near_miss::PossibleEntry;

/// Type of the extension that makes an entry from a CEL expression.
const EXPRESSION_TYPE: &str = "envoy.extensions.rate_limit_descriptors.expr.v3.Descriptor";

/// Type of the extension that makes an entry from a claim of a token, which it does not verify.
pub(super) const CLAIM_TYPE: &str = "envoy.extensions.rate_limit_descriptors.jwt_claim.v3.Descriptor";

/// Key of the entries that identify a slot; they match no rule.
pub(super) const SLOT_KEY: &str = "slot";

/// Key of the entry that a release ends with; it matches no rule.
pub(super) const RELEASE_KEY: &str = "release";

/// Place of a `rate_limits` item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LimitPlace {
    /// In the filter.
    Filter,
    /// In the `RateLimitPerRoute` of a route or virtual host.
    PerRoute,
    /// In the action of a route.
    Route,
    /// In a virtual host.
    VirtualHost,
}

impl LimitPlace {
    /// Returns `true` if Envoy leaves `hits_addend` out there.
    pub(super) const fn drops_hits(self) -> bool {
        match self {
            Self::Filter | Self::PerRoute => false,
            Self::Route | Self::VirtualHost => true,
        }
    }
}

/// What a descriptor does to its counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HitsAddend {
    Charges,
    Peeks,
    Refunds,
}

/// An item of `rate_limits`: one descriptor of the call.
#[derive(Clone, Debug)]
pub(super) struct LimitEntry<'n, 'a> {
    pub(super) node: ConfigNode<'n, 'a>,
    pub(super) stage: u64,
    /// Sent when the stream is done.
    pub(super) on_stream_done: bool,
    pub(super) hits: HitsAddend,
    /// Hash of its actions and its `limit`: equal ones make equal descriptors.
    pub(super) identity: u64,
    pub(super) actions: Vec<Action<'n, 'a>>,
}

/// An action: the entry that it adds.
#[derive(Clone, Debug)]
pub(super) struct Action<'n, 'a> {
    /// Name of the action, such as `request_headers`.
    pub(super) name: String,
    /// Text of a CEL expression.
    pub(super) expression: Option<&'n str>,
    pub(super) node: ConfigNode<'n, 'a>,
    /// Key of its entry; `None` if the file does not say it.
    pub(super) key: Option<&'n str>,
    /// Value of its entry, if the file has it.
    pub(super) value: Option<&'n str>,
    /// Left out of the descriptor if it has no value.
    pub(super) is_optional: bool,
}

impl<'n, 'a> LimitEntry<'n, 'a> {
    /// Reads the items of the field `rate_limits` of `parent`.
    pub(super) fn read_all(parent: &ConfigNode<'n, 'a>, place: LimitPlace) -> Vec<Self> {
        parent
            .items("rate_limits")
            .into_iter()
            .map(|node| Self {
                stage: node.whole_number("stage").unwrap_or(0),
                hits: read_hits(&node, place),
                identity: hash_texts(["actions", "limit"].iter().filter_map(|name| node.field(name))),
                on_stream_done: node.flag("apply_on_stream_done"),
                actions: node.items("actions").iter().filter_map(Action::read).collect(),
                node,
            })
            .collect()
    }

    /// Sorted keys of its entries; `None` if one is not known.
    pub(super) fn keys(&self) -> Option<Vec<&'n str>> {
        let mut keys: Vec<&str> = self.actions.iter().map(|action| action.key).collect::<Option<_>>()?;
        keys.sort_unstable();
        Some(keys)
    }

    /// Returns the action whose entry has this key.
    pub(super) fn find_action(&self, key: &str) -> Option<&Action<'n, 'a>> {
        self.actions.iter().find(|action| action.key == Some(key))
    }

    /// Returns `true` if the descriptor identifies a slot.
    pub(super) fn has_slot(&self) -> bool {
        self.find_action(SLOT_KEY).is_some()
    }

    /// Returns `true` if the descriptor asks for a slot.
    pub(super) fn is_acquire(&self) -> bool {
        self.has_slot() && !self.on_stream_done
    }

    /// Returns `true` if the descriptor gives a slot back.
    pub(super) fn is_release(&self) -> bool {
        self.on_stream_done && (self.has_slot() || self.find_action(RELEASE_KEY).is_some())
    }

    /// Entries that are matched against rules; `None` if a key is not known. `has_formatters` is true if Envoy expands
    /// formatters in values.
    pub(super) fn possible_entries(&self, has_formatters: bool) -> Option<Vec<PossibleEntry<'n>>> {
        let for_rules = self.actions.iter().filter(|action| !matches!(action.key, Some(SLOT_KEY | RELEASE_KEY)));
        for_rules
            .map(|action| {
                let value = action.value.filter(|value| !has_formatters || find_formatter(value).is_none());
                Some(PossibleEntry {
                    key: action.key?.as_bytes(),
                    value: value.map(str::as_bytes),
                    is_optional: action.is_optional,
                })
            })
            .collect()
    }
}

impl<'n, 'a> Action<'n, 'a> {
    fn read(action: &ConfigNode<'n, 'a>) -> Option<Self> {
        let (name, node) = action.fields().next()?;
        let name = snake_case(name);
        let key_or = |default: &'n str| Some(node.text("descriptor_key").unwrap_or(default));
        let value = node.text("descriptor_value");
        let (key, value, is_optional) = match &*name {
            "generic_key" => (key_or("generic_key"), value, false),
            "header_value_match" => (key_or("header_match"), value, false),
            "query_parameter_value_match" => (key_or("query_match"), value, false),
            // Its value is always a format.
            "remote_address_match" => {
                (key_or("remote_address_match"), value.filter(|value| find_formatter(value).is_none()), false)
            }
            "remote_address" => (Some("remote_address"), None, false),
            "masked_remote_address" => (Some("masked_remote_address"), None, false),
            "source_cluster" => (Some("source_cluster"), None, false),
            "destination_cluster" => (Some("destination_cluster"), None, false),
            "request_headers" | "query_parameters" | "metadata" | "dynamic_metadata" => {
                (node.text("descriptor_key"), None, node.flag("skip_if_absent"))
            }
            "extension" => {
                let known = node.typed_config(EXPRESSION_TYPE).or_else(|| node.typed_config(CLAIM_TYPE));
                let optional =
                    known.as_ref().is_some_and(|known| known.flag("skip_if_error") || known.flag("skip_if_absent"));
                (known.and_then(|known| known.text("descriptor_key")), None, optional)
            }
            _ => (None, None, false),
        };
        let expression = node.typed_config(EXPRESSION_TYPE).and_then(|expression| expression.text("text"));
        Some(Self { name, expression, key, value, is_optional, node })
    }

    /// Returns `true` if Envoy expands formatters in the value with the runtime flag, and sends them as they are
    /// without it.
    pub(super) fn needs_formatter_flag(&self) -> bool {
        matches!(&*self.name, "generic_key" | "header_value_match" | "query_parameter_value_match")
    }
}

/// Envoy leaves `hits_addend` out in routes and virtual hosts.
fn read_hits(node: &ConfigNode<'_, '_>, place: LimitPlace) -> HitsAddend {
    match node.field("hits_addend").filter(|_| !place.drops_hits()) {
        Some(hits) if hits.flag("is_negative_hits") => HitsAddend::Refunds,
        Some(hits) if hits.whole_number("number") == Some(0) => HitsAddend::Peeks,
        _ => HitsAddend::Charges,
    }
}

/// Hash of all texts of some nodes, with the names of their fields.
fn hash_texts<'n, 'a: 'n>(nodes: impl Iterator<Item = ConfigNode<'n, 'a>>) -> u64 {
    let mut hasher = DefaultHasher::new();
    nodes.for_each(|node| node.visit_texts(&mut |text| text.hash(&mut hasher)));
    hasher.finish()
}

fn snake_case(name: &str) -> String {
    let mut snake = String::with_capacity(name.len() + 4);
    for letter in name.chars() {
        if letter.is_ascii_uppercase() {
            snake.push('_');
        }
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}

/// Returns the first formatter in a text, such as `%REQ(x-user)%`.
pub fn find_formatter(text: &str) -> Option<&str> {
    let mut start = 0;
    while let Some(open) = text.get(start..)?.find('%').map(|at| start + at) {
        let rest = &text[open + 1..];
        let name =
            rest.find(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')).unwrap_or(rest.len());
        let after = &rest[name..];
        let arguments = if after.starts_with('(') { after.find(")%").map(|end| end + 1) } else { Some(0) };
        if rest.starts_with(|c: char| c.is_ascii_uppercase())
            && let Some(arguments) = arguments
            && after[arguments..].starts_with('%')
        {
            return Some(&text[open..open + name + arguments + 2]);
        }
        start = open + 1;
    }
    None
}

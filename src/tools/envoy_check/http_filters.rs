//! HTTP filters of any type: which headers and metadata they write, as far as their configuration says.
//!
//! Decides: which HTTP filters write which headers and metadata (`PASSIVE_FILTERS` write none).

use super::config_node::ConfigNode;

/// Filters that write no header and no metadata, by the last part of their package.
const PASSIVE_FILTERS: [&str; 17] = [
    "adaptive_concurrency",
    "admission_control",
    "bandwidth_limit",
    "buffer",
    "compressor",
    "cors",
    "csrf",
    "decompressor",
    "fault",
    "grpc_stats",
    "grpc_web",
    "health_check",
    "local_ratelimit",
    "rate_limit_quota",
    "ratelimit",
    "rbac",
    "router",
];

/// Namespace of token usage, unless `metadata_namespace` names another.
const DEFAULT_USAGE_NAMESPACE: &str = "envoy.ai.token_usage";

/// Namespace of metadata from headers, unless `metadata_namespace` names another.
const DEFAULT_HEADER_NAMESPACE: &str = "envoy.filters.http.header_to_metadata";

/// An HTTP filter of any type.
#[derive(Debug)]
pub(super) struct HttpFilter<'n, 'a> {
    /// The filter in its list.
    pub(super) listed: ConfigNode<'n, 'a>,
    pub(super) name: &'n str,
    /// Last part of the package of its type, such as `jwt_authn`; empty if it is not known.
    pub(super) package: &'n str,
    pub(super) message: Option<ConfigNode<'n, 'a>>,
}

impl<'n, 'a> HttpFilter<'n, 'a> {
    /// Returns `true` if its configuration says that it sets this header of requests.
    pub(super) fn sets_header(&self, name: &str) -> bool {
        let Some(message) = &self.message else { return false };
        match self.package {
            "header_mutation" => {
                let mutations = message.field("mutations");
                mutations.is_some_and(|mutations| appends_header(&mutations.items("request_mutations"), name))
            }
            "jwt_authn" => message.has_text_below(&["header_name", "forward_payload_header"], name),
            _ => false,
        }
    }

    /// Returns `true` if its configuration says that this header of requests has one value behind it, which it writes.
    pub(super) fn overwrites_header(&self, name: &str) -> bool {
        match self.package {
            "header_mutation" => {
                let mutations = self.message.as_ref().and_then(|message| message.field("mutations"));
                mutations.is_some_and(|mutations| overwrites_header(&mutations.items("request_mutations"), name))
            }
            _ => self.sets_header(name),
        }
    }

    /// Returns `true` if its configuration says that it removes this header of requests.
    pub(super) fn removes_header(&self, name: &str) -> bool {
        let message = self.message.as_ref().filter(|_| self.package == "header_mutation");
        let mutations = message.and_then(|message| message.field("mutations"));
        let mutations = mutations.map_or_else(Vec::new, |mutations| mutations.items("request_mutations"));
        mutations.iter().any(|mutation| mutation.text("remove").is_some_and(|key| key.eq_ignore_ascii_case(name)))
    }

    /// Returns the header of requests that it copies to `key` in the metadata of a namespace, as it came.
    pub(super) fn header_in_metadata(&self, namespace: &str, key: &str) -> Option<&'n str> {
        let rules = self.message.as_ref().filter(|_| self.package == "header_to_metadata")?.items("request_rules");
        rules.iter().find_map(|rule| {
            let present = rule.field("on_header_present")?;
            let is_copy = present.text("value").is_none() && present.field("regex_value_rewrite").is_none();
            let is_this = present.text("metadata_namespace").unwrap_or(DEFAULT_HEADER_NAMESPACE) == namespace
                && present.text("key") == Some(key);
            rule.text("header").filter(|_| is_copy && is_this)
        })
    }

    /// Its configuration of what it reads from answers of models.
    pub(super) fn token_usage(&self) -> Option<ConfigNode<'n, 'a>> {
        let message = self.message.as_ref().filter(|_| self.package == "ai_protocol_manager")?;
        message.field_at(&["response_handling", "token_usage"])
    }

    /// Namespace of the typed metadata that it writes after the answer.
    pub(super) fn typed_namespace(&self) -> Option<&'n str> {
        let named = self.token_usage()?.text("metadata_namespace").filter(|name| !name.is_empty());
        Some(named.unwrap_or(DEFAULT_USAGE_NAMESPACE))
    }

    /// Returns `true` if it writes no header and no metadata, and verifies nothing.
    pub(super) fn is_passive(&self) -> bool {
        PASSIVE_FILTERS.contains(&self.package)
    }

    /// Returns `true` if it may set this header, as far as its configuration says.
    pub(super) fn may_set_header(&self, name: &str) -> bool {
        !self.is_passive() && (self.package != "jwt_authn" || self.sets_header(name))
    }

    /// Returns `true` if its configuration says that it writes metadata of this namespace.
    pub(super) fn writes_namespace(&self, namespace: &str) -> bool {
        let own = namespace.strip_prefix("envoy.filters.http.").is_some_and(|own| own == self.package);
        let is_named = |message: &ConfigNode<'_, '_>| message.has_text_below(&["metadata_namespace"], namespace);
        own || self.message.as_ref().is_some_and(is_named)
    }
}

/// Returns `true` if one of the mutations appends or sets a header, also where it was missing.
pub(super) fn appends_header(mutations: &[ConfigNode<'_, '_>], name: &str) -> bool {
    let mut appending =
        mutations.iter().filter(|mutation| !matches!(append_action(mutation), Some("OVERWRITE_IF_EXISTS" | "3")));
    appending.any(|mutation| mutated_header(mutation).is_some_and(|key| key.eq_ignore_ascii_case(name)))
}

/// Returns `true` if one of the mutations replaces all values of a header.
pub(super) fn overwrites_header(mutations: &[ConfigNode<'_, '_>], name: &str) -> bool {
    const OVERWRITE: [&str; 4] = ["OVERWRITE_IF_EXISTS_OR_ADD", "OVERWRITE_IF_EXISTS", "2", "3"];
    let mut overwriting =
        mutations.iter().filter(|mutation| append_action(mutation).is_some_and(|action| OVERWRITE.contains(&action)));
    overwriting.any(|mutation| mutated_header(mutation).is_some_and(|key| key.eq_ignore_ascii_case(name)))
}

fn append_action<'n>(mutation: &ConfigNode<'n, '_>) -> Option<&'n str> {
    mutation.text("append_action").or_else(|| mutation.field("append")?.text("append_action"))
}

fn mutated_header<'n>(mutation: &ConfigNode<'n, '_>) -> Option<&'n str> {
    let key = mutation.field_at(&["append", "header", "key"]).or_else(|| mutation.field_at(&["header", "key"]));
    key.and_then(|key| key.as_text())
}

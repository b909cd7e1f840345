//! Sources of entries: whether a value exists when a filter asks, and whether the client chooses its spelling.
//!
//! A header may come from the client, from an HTTP filter, or from the router, which adds `request_headers_to_add` after
//! all filters have asked. Dynamic metadata comes from filters only. Of a filter that is not known, anything may come, so
//! what cannot be told counts as there.
//!
//! Decides: which values the client spells as it likes, and which are not there when a filter asks.

use super::bootstrap::ConnectionManager;
use super::config_node::ConfigNode;
use super::descriptors::{Action, CLAIM_TYPE, LimitEntry};
use super::http_filters::{HttpFilter, appends_header, overwrites_header};

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source<'n> {
    /// A header; `:path` and others of HTTP/2 too.
    Header(&'n str),
    /// The path without its query.
    UrlPath,
    /// A parameter of the query.
    Query(&'n str),
    /// Dynamic metadata of a namespace.
    Metadata(&'n str),
    /// Metadata of the route.
    RouteMetadata,
    /// A claim of a token that nothing verifies here.
    Claim,
    /// The file, Envoy itself, or not known.
    Other,
}

/// Why a value is never there when a filter asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Absence<'n> {
    /// The router adds it, after the filters.
    RouterAdds,
    /// The filter with this name writes it, and stands behind.
    WrittenBehind(&'n str),
    /// No filter writes it.
    NobodyWrites,
}

impl<'n> Source<'n> {
    /// Source of the entry of an action.
    pub(super) fn of(action: &Action<'n, '_>) -> Self {
        let node = &action.node;
        if let Some(name) = node.text("header_name").filter(|_| action.name == "request_headers") {
            return Self::Header(name);
        }
        match &*action.name {
            "query_parameters" => node.text("query_parameter_name").map_or(Self::Other, Self::Query),
            "metadata" | "dynamic_metadata" => match node.text("source") {
                None | Some("DYNAMIC" | "0") => {
                    let namespace = node.field("metadata_key").and_then(|key| key.text("key"));
                    namespace.map_or(Self::Other, Self::Metadata)
                }
                Some("ROUTE_ENTRY" | "1") => Self::RouteMetadata,
                Some(_) => Self::Other,
            },
            "extension" if node.typed_config(CLAIM_TYPE).is_some() => Self::Claim,
            "extension" => action.expression.map_or(Self::Other, Self::of_expression),
            _ => Self::Other,
        }
    }

    fn of_expression(text: &'n str) -> Self {
        match text.trim() {
            "request.path" => Self::Header(":path"),
            "request.url_path" => Self::UrlPath,
            "request.host" => Self::Header(":authority"),
            "request.useragent" => Self::Header("user-agent"),
            text => {
                let name = text.strip_prefix("request.headers[").and_then(|rest| rest.strip_suffix(']'));
                name.map_or(Self::Other, |name| Self::Header(name.trim_matches(['\'', '"'])))
            }
        }
    }
}

impl<'n> ConnectionManager<'n, '_> {
    /// Returns why the value of an action is never there when the filter at `filter_at` asks on a route; `None` if it
    /// may be there. `added` are the headers that the router adds there.
    pub(super) fn find_absence(
        &self,
        source: Source<'_>,
        filter_at: usize,
        added: &[ConfigNode<'n, '_>],
    ) -> Option<Absence<'n>> {
        let (before, behind) = self.http_filters.split_at(filter_at.min(self.http_filters.len()));
        match source {
            Source::Header(name) if !self.has_always_header(name, filter_at) => {
                if before.iter().any(|filter| filter.may_set_header(name)) {
                    return None;
                }
                let behind = behind.iter().find(|filter| filter.sets_header(name));
                let is_added = appends_header(added, name).then_some(Absence::RouterAdds);
                is_added.or_else(|| behind.map(|filter| Absence::WrittenBehind(filter.name)))
            }
            // That it is typed has a finding of its own.
            Source::Metadata(name) if self.http_filters.iter().any(|filter| filter.typed_namespace() == Some(name)) => {
                None
            }
            Source::Metadata(namespace) => {
                let writes = |filter: &&HttpFilter<'_, '_>| filter.writes_namespace(namespace);
                if before.iter().any(|filter| writes(&filter)) {
                    return None;
                }
                if let Some(filter) = behind.iter().skip(1).find(writes) {
                    // An opaque filter may write any namespace, but hardly one that a known filter writes.
                    return Some(Absence::WrittenBehind(filter.name));
                }
                let is_of_http = !namespace.contains(".listener.") && !namespace.contains(".network.");
                let only_passive = before.iter().all(|filter| filter.is_passive());
                (only_passive && is_of_http && !self.is_partial).then_some(Absence::NobodyWrites)
            }
            _ => None,
        }
    }

    /// Returns `true` if each request has this header when the filter at `filter_at` asks.
    pub(super) fn has_always_header(&self, name: &str, filter_at: usize) -> bool {
        const OF_EVERY_REQUEST: [&str; 7] =
            [":path", ":method", ":authority", "host", ":scheme", "x-request-id", "x-forwarded-proto"];
        let name = name.to_ascii_lowercase();
        let of_address = ["x-forwarded-for", "x-envoy-external-address"].contains(&&*name)
            && self.node.flag("use_remote_address")
            && !self.node.flag("skip_xff_append");
        OF_EVERY_REQUEST.contains(&&*name)
            || of_address
            || self.http_filters.iter().take(filter_at).any(|filter| filter.sets_header(&name))
            || self.sets_header_early(&name)
    }

    /// Returns the header whose values the metadata of an action is, joined by commas if a request has several; `None`
    /// if a filter before makes it one.
    pub(super) fn find_joined_header(&self, action: &Action<'n, '_>, filter_at: usize) -> Option<&'n str> {
        let Source::Metadata(namespace) = Source::of(action) else { return None };
        let path = action.node.field("metadata_key")?.items("path");
        let [step] = &*path else { return None };
        let key = step.text("key")?;
        let before = &self.http_filters[..filter_at.min(self.http_filters.len())];
        before.iter().enumerate().find_map(|(at, filter)| {
            let name = filter.header_in_metadata(namespace, key)?;
            let is_one =
                self.overwrites_header_early(name) || before[..at].iter().any(|filter| filter.overwrites_header(name));
            (!is_one).then_some(name)
        })
    }

    fn sets_header_early(&self, name: &str) -> bool {
        self.early_mutations().any(|mutations| appends_header(&mutations, name))
    }

    fn overwrites_header_early(&self, name: &str) -> bool {
        self.early_mutations().any(|mutations| overwrites_header(&mutations, name))
    }

    /// Mutations of each extension that changes headers before all filters.
    fn early_mutations(&self) -> impl Iterator<Item = Vec<ConfigNode<'_, '_>>> {
        let early = self.node.items("early_header_mutation_extensions").into_iter();
        let messages = early.filter_map(|early| early.field("typed_config")?.type_name_and_message());
        messages.map(|(_, message)| message.items("mutations"))
    }

    /// Returns what the client chooses about the value of a source; `None` if it cannot, or if that is not known.
    pub(super) fn find_client_choice(&self, source: Source<'_>, filter_at: usize) -> Option<ClientChoice> {
        const ADDRESS_HEADERS: [&str; 11] = [
            "x-forwarded-for",
            "forwarded",
            "x-real-ip",
            "true-client-ip",
            "cf-connecting-ip",
            "x-client-ip",
            "x-cluster-client-ip",
            "fastly-client-ip",
            "x-original-forwarded-for",
            "x-forwarded-client-ip",
            "x-forwarded",
        ];
        const FREE_HEADERS: [&str; 9] = [
            "user-agent",
            "cookie",
            "referer",
            "origin",
            "accept",
            "accept-language",
            "accept-encoding",
            "traceparent",
            "x-request-id",
        ];
        let name = match source {
            Source::Header(name) => name.to_ascii_lowercase(),
            Source::UrlPath => return self.path_choice(false),
            Source::Query(_) => return Some(ClientChoice::QueryParameter),
            Source::Claim => {
                // Any filter that is not passive may verify the token.
                let before = &self.http_filters[..filter_at];
                let is_verified = before.iter().any(|filter| !filter.is_passive());
                return (!is_verified && !self.is_partial).then_some(ClientChoice::Free);
            }
            Source::Metadata(_) | Source::RouteMetadata | Source::Other => return None,
        };
        let is_overwritten = self.http_filters.iter().take(filter_at).any(|filter| filter.overwrites_header(&name));
        match &*name {
            _ if is_overwritten => None,
            ":path" => self.path_choice(true),
            ":authority" | "host" => {
                // Envoy compares hosts without case, but keeps the letters as they came.
                let port = if self.node.flag("strip_any_host_port") { "" } else { ":8080" };
                Some(ClientChoice::Spelling { prefix: "", suffix: port, changes_case: true })
            }
            "authorization" => Some(ClientChoice::Spelling { prefix: "", suffix: "", changes_case: true }),
            name if ADDRESS_HEADERS.contains(&name) => Some(ClientChoice::Address),
            name if FREE_HEADERS.contains(&name) => Some(ClientChoice::Free),
            _ => None,
        }
    }

    fn path_choice(&self, has_query: bool) -> Option<ClientChoice> {
        let knows_path = !self.is_partial;
        let prefix = match (self.node.flag("merge_slashes"), self.node.flag("normalize_path")) {
            _ if !knows_path => "",
            (false, _) => "/",
            (true, false) => "/x/..",
            (true, true) => "",
        };
        let suffix = if has_query { "?x" } else { "" };
        let is_free = prefix.is_empty() && suffix.is_empty();
        (!is_free).then_some(ClientChoice::Spelling { prefix, suffix, changes_case: false })
    }
}

/// What the client chooses about a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientChoice {
    /// An address, which it may invent.
    Address,
    /// Any text.
    Free,
    /// Which of several values counts.
    QueryParameter,
    /// Another spelling of the same thing.
    Spelling { prefix: &'static str, suffix: &'static str, changes_case: bool },
}

impl ClientChoice {
    /// Spellings of a value that a client may send in its place.
    pub(super) fn respell(self, value: &str) -> Vec<String> {
        let Self::Spelling { prefix, suffix, changes_case } = self else { return vec![format!("{value}x")] };
        let mut spellings = Vec::new();
        if !prefix.is_empty() {
            spellings.push(format!("{prefix}{value}"));
        }
        if !suffix.is_empty() {
            spellings.insert(0, format!("{value}{suffix}"));
        }
        if changes_case {
            spellings.push(swap_first_case(value));
        }
        spellings
    }
}

fn swap_first_case(value: &str) -> String {
    let mut letters = value.chars();
    let first =
        letters.next().map(|c| if c.is_ascii_lowercase() { c.to_ascii_uppercase() } else { c.to_ascii_lowercase() });
    first.into_iter().chain(letters).collect()
}

/// Returns an example that a matcher of a whole `:path` or host does not match, though the application takes it for the
/// same.
pub(super) fn is_dodged(header: &ConfigNode<'_, '_>, manager: &ConnectionManager<'_, '_>) -> Option<&'static str> {
    let example = match header.text("name")? {
        ":path" => "the same path with a query",
        ":authority" | "host" if !manager.node.flag("strip_any_host_port") => "the same host with a port",
        _ => return None,
    };
    let is_whole = |node: &ConfigNode<'_, '_>| {
        let regex = node.field_at(&["safe_regex", "regex"]).and_then(|regex| regex.as_text());
        // An expression matches the whole text.
        node.field("exact").is_some()
            || node.field("suffix").is_some()
            || regex.is_some_and(|regex| ["?", ".*", ".+", "[^", "\\W"].iter().all(|any| !regex.contains(any)))
    };
    let is_exact = header.field("exact_match").is_some() || header.field("string_match").as_ref().is_some_and(is_whole);
    (is_exact && !header.flag("invert_match")).then_some(example)
}

/// Matchers of headers of an item with `expect_match`.
pub(super) fn expected_headers<'n, 'a>(entry: &LimitEntry<'n, 'a>) -> Vec<ConfigNode<'n, 'a>> {
    let matches = entry.actions.iter().filter(|action| action.name == "header_value_match");
    let expects = |action: &&Action<'n, 'a>| action.node.field("expect_match").is_none_or(|field| field.is_true());
    matches.filter(expects).flat_map(|action| action.node.items("headers")).collect()
}

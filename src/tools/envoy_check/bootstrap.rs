//! The parts of a bootstrap that concern limits: connection managers with their filters and routes, other filters that
//! ask for limits, clusters, and the runtime.
//!
//! Connection managers are found wherever they stand, also in a configuration dump, because a listener can nest them.
//!
//! Decides: what of Envoy's configuration `check --envoy` looks at.

use std::collections::HashMap;

use super::config_node::ConfigNode;
use super::descriptors::LimitEntry;
use super::document::{CONNECTION_MANAGER_TYPE, Form};
use super::http_filters::HttpFilter;
use super::routes::{Ask, LimitList, RateLimitFilter, Routes};
use crate::rules::yaml::Position;

const HTTP_FILTER_TYPE: &str = "envoy.extensions.filters.http.ratelimit.v3.RateLimit";
const NETWORK_FILTER_TYPE: &str = "envoy.extensions.filters.network.ratelimit.v3.RateLimit";
const THRIFT_FILTER_TYPE: &str = "envoy.extensions.filters.network.thrift_proxy.filters.ratelimit.v3.RateLimit";
const QUOTA_FILTER_TYPE: &str = "envoy.extensions.filters.http.rate_limit_quota.v3.RateLimitQuotaFilterConfig";
const ROUTES_TYPE: &str = "envoy.config.route.v3.RouteConfiguration";
const EXTENSION_TYPE: &str = "envoy.config.core.v3.TypedExtensionConfig";
const CLUSTERS_DUMP_TYPE: &str = "envoy.admin.v3.ClustersConfigDump";
const LISTENERS_DUMP_TYPE: &str = "envoy.admin.v3.ListenersConfigDump";
const BOOTSTRAP_DUMP_TYPE: &str = "envoy.admin.v3.BootstrapConfigDump";
const CLUSTER_TYPE: &str = "envoy.config.cluster.v3.Cluster";

/// Runtime flag by which Envoy expands formatters in values of descriptors.
const FORMATTER_FLAG: &str = "envoy.reloadable_features.enable_formatter_for_ratelimit_action_descriptor_value";

/// Maximum number of rate limit filters of a connection manager that are checked: each is compared with all routes.
const MAX_CHECKED_FILTERS: usize = 64;

/// What the file says of a runtime flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RuntimeFlag {
    On,
    Off,
    /// Not set here, but a layer from elsewhere may set it.
    Unknown,
}

/// The parts that concern limits.
#[derive(Debug)]
pub(super) struct Bootstrap<'n, 'a> {
    pub(super) managers: Vec<ConnectionManager<'n, 'a>>,
    /// Filters of TCP and of thrift proxies, of which only the service is checked.
    pub(super) network_filters: Vec<ConfigNode<'n, 'a>>,
    pub(super) clusters: HashMap<&'n str, ConfigNode<'n, 'a>>,
    /// All clusters are in the file.
    pub(super) has_all_clusters: bool,
    /// All listeners are in the file.
    pub(super) has_all_listeners: bool,
    pub(super) formatters: RuntimeFlag,
    /// The bootstrap, for its runtime.
    pub(super) settings: ConfigNode<'n, 'a>,
}

/// A connection manager.
#[derive(Debug)]
pub(super) struct ConnectionManager<'n, 'a> {
    pub(super) node: ConfigNode<'n, 'a>,
    /// All its filters.
    pub(super) http_filters: Vec<HttpFilter<'n, 'a>>,
    /// Its rate limit filters, in their order.
    pub(super) filters: Vec<RateLimitFilter<'n, 'a>>,
    /// Its quota filters.
    pub(super) quota_filters: Vec<ConfigNode<'n, 'a>>,
    /// Filters that may be of rate limits, whose configuration is not in the file.
    pub(super) missing_filters: Vec<ConfigNode<'n, 'a>>,
    pub(super) routes: Routes<'n, 'a>,
    /// Its routes are not in the file; the field that says where they come from.
    pub(super) has_unknown_routes: bool,
    /// It is made of patches: other filters and fields of the manager are not in the file.
    pub(super) is_partial: bool,
}

impl<'n, 'a> Bootstrap<'n, 'a> {
    pub(super) fn read(root: &ConfigNode<'n, 'a>, form: Form) -> Self {
        let configs = root.items("configs");
        let find_dump =
            |name: &str| configs.iter().find(|config| config.type_name_and_message().is_some_and(|(is, _)| is == name));
        let listeners = find_dump(LISTENERS_DUMP_TYPE);
        let of_dump = find_dump(BOOTSTRAP_DUMP_TYPE).and_then(|dump| dump.field("bootstrap"));
        let settings = of_dump.unwrap_or_else(|| root.clone());
        // A dump repeats the listeners of the bootstrap.
        let repeated = listeners.and_then(|_| settings.field_at(&["static_resources", "listeners"]));
        let mut parts = FoundParts { repeated: repeated.map(|node| node.at), ..FoundParts::default() };
        parts.visit(root);
        let mut clusters = std::mem::take(&mut parts.clusters);
        let listed = root.field_at(&["static_resources", "clusters"]);
        for cluster in listed.iter().flat_map(ConfigNode::elements) {
            if let Some(name) = cluster.text("name") {
                clusters.insert(name, cluster);
            }
        }
        let nodes = std::mem::take(&mut parts.managers);
        let managers = nodes.into_iter().map(|node| ConnectionManager::read(node, &parts, form)).collect();
        let is_static = |name: &str| form == Form::Bootstrap && root.field_at(&["dynamic_resources", name]).is_none();
        Self {
            managers,
            network_filters: parts.network_filters,
            clusters,
            has_all_clusters: find_dump(CLUSTERS_DUMP_TYPE).is_some()
                || is_static("cds_config") && is_static("ads_config"),
            has_all_listeners: listeners.is_some() || is_static("lds_config") && is_static("ads_config"),
            formatters: read_formatter_flag(&settings),
            settings,
        }
    }

    /// Returns `true` if no filter asks for limits, as far as the file says.
    pub(super) fn has_no_limits(&self) -> bool {
        let has_filter =
            |manager: &ConnectionManager<'_, '_>| !manager.filters.is_empty() || !manager.quota_filters.is_empty();
        self.network_filters.is_empty() && !self.managers.iter().any(has_filter)
    }

    /// Value of a runtime key in the layers of the file.
    pub(super) fn runtime_number(&self, key: &str) -> Option<u64> {
        let layers = self.settings.field("layered_runtime").map_or_else(Vec::new, |runtime| runtime.items("layers"));
        let values = layers.iter().rev().filter_map(|layer| layer.field("static_layer"));
        values.filter_map(|values| find_runtime_value(&values, key)?.as_text()?.parse().ok()).next()
    }
}

/// Messages by their types.
#[derive(Default)]
struct FoundParts<'n, 'a> {
    managers: Vec<ConfigNode<'n, 'a>>,
    network_filters: Vec<ConfigNode<'n, 'a>>,
    clusters: HashMap<&'n str, ConfigNode<'n, 'a>>,
    routes: HashMap<&'n str, ConfigNode<'n, 'a>>,
    /// Configurations of filters that come by themselves, by name.
    extensions: HashMap<&'n str, ConfigNode<'n, 'a>>,
    /// Position of listeners that stand elsewhere too.
    repeated: Option<Position>,
}

impl<'n, 'a> FoundParts<'n, 'a> {
    /// Visits all nodes below; the parser bounds depth and number.
    fn visit(&mut self, node: &ConfigNode<'n, 'a>) {
        if self.repeated == Some(node.at) && node.as_text().is_none() {
            return;
        }
        // A dump has a listener in each of its states.
        if let Some(state) = node.field("active_state").or_else(|| node.field("warming_state")) {
            return self.visit(&state);
        }
        if let Some((name, message)) = node.type_name_and_message() {
            match name {
                CONNECTION_MANAGER_TYPE => self.managers.push(message),
                NETWORK_FILTER_TYPE | THRIFT_FILTER_TYPE => self.network_filters.push(message),
                CLUSTER_TYPE => {
                    self.clusters.extend(message.text("name").map(|name| (name, message.clone())));
                }
                ROUTES_TYPE => {
                    self.routes.extend(message.text("name").map(|name| (name, message.clone())));
                }
                EXTENSION_TYPE => {
                    self.extensions.extend(message.text("name").map(|name| (name, message.clone())));
                }
                _ => {}
            }
        }
        node.fields().for_each(|(_, child)| self.visit(&child));
        node.elements().for_each(|child| self.visit(&child));
    }
}

impl<'n, 'a> ConnectionManager<'n, 'a> {
    fn read(node: ConfigNode<'n, 'a>, parts: &FoundParts<'n, 'a>, form: Form) -> Self {
        let (mut filters, mut quota_filters, mut missing_filters) = (Vec::new(), Vec::new(), Vec::new());
        let mut http_filters = Vec::new();
        for listed in node.items("http_filters") {
            let name = listed.text("name").unwrap_or_default();
            let found = listed.field("config_discovery").and_then(|_| parts.extensions.get(name).cloned());
            let config = found.unwrap_or_else(|| listed.clone()).field("typed_config");
            let config = config.and_then(|config| config.type_name_and_message());
            let at = http_filters.len();
            match &config {
                Some((HTTP_FILTER_TYPE, message)) if filters.len() < MAX_CHECKED_FILTERS => {
                    filters.push(RateLimitFilter::read(&listed, message, at));
                }
                Some((QUOTA_FILTER_TYPE, message)) => quota_filters.push(message.clone()),
                None if listed.field("config_discovery").is_some()
                    || name.contains("rate_limit")
                    || name.contains("ratelimit") =>
                {
                    missing_filters.push(listed.clone());
                }
                Some(_) | None => {}
            }
            let package = config.as_ref().and_then(|(name, _)| name.rsplit('.').nth(2));
            let message = config.map(|(_, message)| message);
            http_filters.push(HttpFilter { listed, name, package: package.unwrap_or_default(), message });
        }
        let dynamic = node.field_at(&["rds", "route_config_name"]).and_then(|name| name.as_text());
        let own_routes = node.field("route_config");
        let configuration = own_routes.or_else(|| parts.routes.get(dynamic?).cloned());
        let is_partial = form == Form::Patches;
        let routes = Routes::read(configuration.as_ref(), &filters, is_partial);
        Self {
            has_unknown_routes: configuration.is_none_or(|configuration| configuration.field("vhds").is_some()),
            node,
            http_filters,
            filters,
            quota_filters,
            missing_filters,
            routes,
            is_partial,
        }
    }
}

impl<'n, 'a> ConnectionManager<'n, 'a> {
    /// Items that the filter at `filter_at` sends on some route, each once.
    pub(super) fn entries_of(&self, filter_at: usize) -> Vec<&LimitEntry<'n, 'a>> {
        let filter = &self.filters[filter_at];
        let sent = |list: &'_ LimitList<'n, 'a>, entry: &LimitEntry<'n, 'a>| list.applies(entry, filter);
        let lists = self.routes.lists_of(filter_at);
        lists.flat_map(|list| list.entries.iter().filter(move |entry| sent(list, entry))).collect()
    }

    /// Domain in which a filter asks.
    pub(super) fn domain_of(&self, ask: Ask, filter: &RateLimitFilter<'n, 'a>) -> Option<&'n str> {
        match ask.domain {
            Some(domain) => self.routes.domains[domain].1.as_text(),
            None => filter.node.text("domain"),
        }
    }
}

/// Reads the runtime flag from the static layers; a later layer takes precedence.
fn read_formatter_flag(root: &ConfigNode<'_, '_>) -> RuntimeFlag {
    let layers = root.field("layered_runtime").map_or_else(Vec::new, |runtime| runtime.items("layers"));
    let mut flag = RuntimeFlag::Off;
    for layer in &layers {
        let Some(values) = layer.field("static_layer") else {
            // The admin layer is for experiments.
            if layer.field("admin_layer").is_none() && flag == RuntimeFlag::Off {
                flag = RuntimeFlag::Unknown;
            }
            continue;
        };
        if let Some(value) = find_runtime_value(&values, FORMATTER_FLAG) {
            flag = if value.is_true() { RuntimeFlag::On } else { RuntimeFlag::Off };
        }
    }
    flag
}

/// Finds a runtime key, which is written with dots or as nested mappings.
fn find_runtime_value<'n, 'a>(values: &ConfigNode<'n, 'a>, name: &str) -> Option<ConfigNode<'n, 'a>> {
    values.fields().find_map(|(key, value)| {
        let rest = name.strip_prefix(key)?;
        if rest.is_empty() { Some(value) } else { find_runtime_value(&value, rest.strip_prefix('.')?) }
    })
}

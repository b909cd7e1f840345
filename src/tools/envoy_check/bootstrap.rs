//! The parts of a bootstrap that concern limits: connection managers with their filters and routes, other filters that
//! ask for limits, clusters, and the runtime.
//!
//! Connection managers are found wherever they stand, also in a configuration dump, because a listener can nest them.
//!
//! Decides: what of Envoy's configuration `check --envoy` looks at.

use std::collections::HashMap;
use std::rc::Rc;

use super::config_node::ConfigNode;
use super::descriptors::{LimitEntry, LimitPlace};

const CONNECTION_MANAGER_TYPE: &str =
    "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
const HTTP_FILTER_TYPE: &str = "envoy.extensions.filters.http.ratelimit.v3.RateLimit";
const PER_ROUTE_TYPE: &str = "envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute";
const NETWORK_FILTER_TYPE: &str = "envoy.extensions.filters.network.ratelimit.v3.RateLimit";
const THRIFT_FILTER_TYPE: &str = "envoy.extensions.filters.network.thrift_proxy.filters.ratelimit.v3.RateLimit";
const THRIFT_PROXY_TYPE: &str = "envoy.extensions.filters.network.thrift_proxy.v3.ThriftProxy";
const QUOTA_FILTER_TYPE: &str = "envoy.extensions.filters.http.rate_limit_quota.v3.RateLimitQuotaFilterConfig";
const ROUTES_TYPE: &str = "envoy.config.route.v3.RouteConfiguration";
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
    pub(super) network_filters: Vec<ConfigNode<'n, 'a>>,
    /// Filters of thrift proxies, with the routes of their proxy.
    pub(super) thrift_filters: Vec<(ConfigNode<'n, 'a>, Vec<LimitEntry<'n, 'a>>)>,
    pub(super) clusters: HashMap<&'n str, ConfigNode<'n, 'a>>,
    /// Clusters come from elsewhere too.
    pub(super) has_dynamic_clusters: bool,
    pub(super) formatters: RuntimeFlag,
}

/// A connection manager.
#[derive(Debug)]
pub(super) struct ConnectionManager<'n, 'a> {
    pub(super) node: ConfigNode<'n, 'a>,
    /// Its rate limit filters, in their order.
    pub(super) filters: Vec<RateLimitFilter<'n, 'a>>,
    /// Its quota filters.
    pub(super) quota_filters: Vec<ConfigNode<'n, 'a>>,
    /// Items of virtual hosts and routes, and of their RateLimitPerRoute.
    pub(super) route_entries: Vec<LimitEntry<'n, 'a>>,
    /// Domains that a RateLimitPerRoute names.
    pub(super) route_domains: Vec<RouteDomain<'n, 'a>>,
    /// Each RateLimitPerRoute under a name that no HTTP filter of this manager has.
    pub(super) unclaimed_per_route: Vec<UnclaimedPerRoute<'n, 'a>>,
    /// Its routes stand in it, so that no other manager uses them.
    pub(super) has_own_routes: bool,
    /// Routes that answer by themselves, with limits.
    pub(super) limited_direct_responses: Vec<ConfigNode<'n, 'a>>,
    /// Its routes are not in the file.
    pub(super) has_unknown_routes: bool,
}

/// Domain of a RateLimitPerRoute.
#[derive(Debug)]
pub(super) struct RouteDomain<'n, 'a> {
    /// Name of the filter that uses it.
    pub(super) of_filter: &'n str,
    pub(super) node: ConfigNode<'n, 'a>,
}

/// RateLimitPerRoute that no filter of a connection manager gets.
#[derive(Debug)]
pub(super) struct UnclaimedPerRoute<'n, 'a> {
    /// Name that it stands under.
    pub(super) name: &'n str,
    pub(super) node: ConfigNode<'n, 'a>,
}

/// A rate limit filter of a connection manager.
#[derive(Debug)]
pub(super) struct RateLimitFilter<'n, 'a> {
    /// The filter in its list.
    pub(super) listed: ConfigNode<'n, 'a>,
    /// Its configuration.
    pub(super) node: ConfigNode<'n, 'a>,
    pub(super) name: &'n str,
    pub(super) stage: u64,
    pub(super) entries: Vec<LimitEntry<'n, 'a>>,
}

impl<'n, 'a> Bootstrap<'n, 'a> {
    pub(super) fn read(root: &ConfigNode<'n, 'a>) -> Self {
        let mut parts = FoundParts::default();
        parts.visit(root);
        let mut clusters = parts.clusters;
        let listed = root.field_at(&["static_resources", "clusters"]);
        for cluster in listed.iter().flat_map(ConfigNode::elements) {
            if let Some(name) = cluster.text("name") {
                clusters.insert(name, cluster);
            }
        }
        let managers = parts.managers.into_iter().map(|node| ConnectionManager::read(node, &parts.routes)).collect();
        Self {
            managers,
            network_filters: parts.network_filters,
            thrift_filters: parts.thrift_proxies.iter().flat_map(read_thrift_proxy).collect(),
            clusters,
            has_dynamic_clusters: root.field_at(&["dynamic_resources", "cds_config"]).is_some(),
            formatters: read_formatter_flag(root),
        }
    }

    /// Returns `true` if no filter asks for limits.
    pub(super) fn has_no_limits(&self) -> bool {
        let has_filter =
            |manager: &ConnectionManager<'_, '_>| !manager.filters.is_empty() || !manager.quota_filters.is_empty();
        self.network_filters.is_empty() && self.thrift_filters.is_empty() && !self.managers.iter().any(has_filter)
    }
}

/// Messages by their types.
#[derive(Default)]
struct FoundParts<'n, 'a> {
    managers: Vec<ConfigNode<'n, 'a>>,
    network_filters: Vec<ConfigNode<'n, 'a>>,
    thrift_proxies: Vec<ConfigNode<'n, 'a>>,
    clusters: HashMap<&'n str, ConfigNode<'n, 'a>>,
    routes: HashMap<&'n str, ConfigNode<'n, 'a>>,
}

impl<'n, 'a> FoundParts<'n, 'a> {
    /// Visits all nodes below; the parser bounds depth and number.
    fn visit(&mut self, node: &ConfigNode<'n, 'a>) {
        if let Some((name, message)) = node.type_name_and_message() {
            match name {
                CONNECTION_MANAGER_TYPE => self.managers.push(message),
                NETWORK_FILTER_TYPE => self.network_filters.push(message),
                THRIFT_PROXY_TYPE => self.thrift_proxies.push(message),
                CLUSTER_TYPE => {
                    self.clusters.extend(message.text("name").map(|name| (name, message.clone())));
                }
                ROUTES_TYPE => {
                    self.routes.extend(message.text("name").map(|name| (name, message.clone())));
                }
                _ => {}
            }
        }
        node.fields().for_each(|(_, child)| self.visit(&child));
        node.elements().for_each(|child| self.visit(&child));
    }
}

impl<'n, 'a> ConnectionManager<'n, 'a> {
    fn read(node: ConfigNode<'n, 'a>, routes: &HashMap<&'n str, ConfigNode<'n, 'a>>) -> Self {
        let listed = node.items("http_filters");
        let filters = listed.iter().filter_map(RateLimitFilter::read).take(MAX_CHECKED_FILTERS).collect();
        let quota_filters = listed.iter().filter_map(|filter| filter.typed_config(QUOTA_FILTER_TYPE)).collect();
        let dynamic = node.field_at(&["rds", "route_config_name"]).and_then(|name| name.as_text());
        let own_routes = node.field("route_config");
        let has_own_routes = own_routes.is_some();
        let configuration = own_routes.or_else(|| routes.get(dynamic?).cloned());
        let mut manager = Self {
            has_unknown_routes: configuration.is_none(),
            node,
            filters,
            quota_filters,
            route_entries: Vec::new(),
            route_domains: Vec::new(),
            unclaimed_per_route: Vec::new(),
            has_own_routes,
            limited_direct_responses: Vec::new(),
        };
        if let Some(configuration) = configuration {
            manager.read_routes(&configuration);
        }
        manager
    }

    fn read_routes(&mut self, configuration: &ConfigNode<'n, 'a>) {
        let of_all = self.read_per_route(configuration);
        for host in configuration.items("virtual_hosts") {
            let of_host = merge_names(&of_all, self.read_per_route(&host));
            let mut of_each_route: Option<Vec<&str>> = None;
            for route in host.items("routes") {
                let before = self.route_entries.len();
                let of_route = merge_names(&of_host, self.read_per_route(&route));
                match &mut of_each_route {
                    None => of_each_route = Some(of_route.clone()),
                    Some(names) => names.retain(|name| of_route.contains(name)),
                }
                if let Some(action) = route.field("route") {
                    let replaced_for: Rc<[&str]> = of_route.into();
                    let entries = LimitEntry::read_all(&action, LimitPlace::Route).into_iter();
                    let entries = entries.map(|entry| LimitEntry { replaced_for: Rc::clone(&replaced_for), ..entry });
                    self.route_entries.extend(entries);
                    let weighted = action.field_at(&["weighted_clusters", "clusters"]);
                    weighted.iter().flat_map(ConfigNode::elements).for_each(|cluster| {
                        self.read_per_route(&cluster);
                    });
                }
                let answers = ["direct_response", "redirect"].iter().find_map(|name| route.field(name));
                if let Some(answer) = answers.filter(|_| self.route_entries.len() > before) {
                    self.limited_direct_responses.push(answer);
                }
            }
            let replaced_for: Rc<[&str]> = of_each_route.unwrap_or(of_host).into();
            let entries = LimitEntry::read_all(&host, LimitPlace::VirtualHost).into_iter();
            let entries = entries.map(|entry| LimitEntry { replaced_for: Rc::clone(&replaced_for), ..entry });
            self.route_entries.extend(entries);
        }
    }

    /// Reads each RateLimitPerRoute of a route, a virtual host or a cluster. Returns the names of the filters that have
    /// `rate_limits` there: they send no others.
    fn read_per_route(&mut self, holder: &ConfigNode<'n, 'a>) -> Vec<&'n str> {
        let mut with_limits = Vec::new();
        let Some(configs) = holder.field("typed_per_filter_config") else { return with_limits };
        for (of_filter, config) in configs.fields() {
            let Some((PER_ROUTE_TYPE, message)) = config.type_name_and_message() else { continue };
            if !self.has_http_filter(of_filter) {
                self.unclaimed_per_route.push(UnclaimedPerRoute { name: of_filter, node: config });
            }
            let entries = LimitEntry::read_all(&message, LimitPlace::PerRoute);
            // Only names of filters, which are few.
            if !entries.is_empty() && self.filters.iter().any(|filter| filter.name == of_filter) {
                with_limits.push(of_filter);
            }
            let entries = entries.into_iter().map(|entry| LimitEntry { of_filter: Some(of_filter), ..entry });
            self.route_entries.extend(entries);
            self.route_domains.extend(message.field("domain").map(|node| RouteDomain { of_filter, node }));
        }
        with_limits
    }

    /// Returns `true` if an HTTP filter has this name, whatever it does.
    pub(super) fn has_http_filter(&self, name: &str) -> bool {
        let Some(filters) = self.node.field("http_filters") else { return false };
        filters.elements().any(|filter| filter.text("name") == Some(name))
    }

    /// Returns the descriptors that a filter sends: its own, else those of its stage, except on routes with a
    /// RateLimitPerRoute; and those of a RateLimitPerRoute under its name.
    pub(super) fn entries_of(&self, filter: &RateLimitFilter<'n, 'a>) -> Vec<LimitEntry<'n, 'a>> {
        let has_own = !filter.entries.is_empty();
        let of_routes = self.route_entries.iter().filter(|entry| match entry.place {
            LimitPlace::PerRoute => entry.of_filter == Some(filter.name),
            LimitPlace::Filter | LimitPlace::Route | LimitPlace::VirtualHost => {
                !has_own && entry.stage == filter.stage && !entry.replaced_for.contains(&filter.name)
            }
        });
        filter.entries.iter().chain(of_routes).cloned().collect()
    }
}

impl<'n, 'a> RateLimitFilter<'n, 'a> {
    fn read(listed: &ConfigNode<'n, 'a>) -> Option<Self> {
        let node = listed.typed_config(HTTP_FILTER_TYPE)?;
        Some(Self {
            listed: listed.clone(),
            name: listed.text("name").unwrap_or_default(),
            stage: node.whole_number("stage").unwrap_or(0),
            entries: LimitEntry::read_all(&node, LimitPlace::Filter),
            node,
        })
    }

    /// Its `grpc_service`.
    pub(super) fn grpc_service(&self) -> Option<ConfigNode<'n, 'a>> {
        self.node.field_at(&["rate_limit_service", "grpc_service"])
    }
}

/// Returns all names once.
fn merge_names<'n>(outer: &[&'n str], inner: Vec<&'n str>) -> Vec<&'n str> {
    let mut names = outer.to_vec();
    names.extend(inner.into_iter().filter(|name| !outer.contains(name)));
    names
}

/// Returns the rate limit filters of a thrift proxy, each with the items of its routes.
fn read_thrift_proxy<'n, 'a>(proxy: &ConfigNode<'n, 'a>) -> Vec<(ConfigNode<'n, 'a>, Vec<LimitEntry<'n, 'a>>)> {
    let routes = proxy.field("route_config").map_or_else(Vec::new, |routes| routes.items("routes"));
    let entries: Vec<_> = routes
        .iter()
        .filter_map(|route| route.field("route"))
        .flat_map(|action| LimitEntry::read_all(&action, LimitPlace::Route))
        .collect();
    let filters = proxy.items("thrift_filters");
    filters.iter().filter_map(|filter| Some((filter.typed_config(THRIFT_FILTER_TYPE)?, entries.clone()))).collect()
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

//! What each rate limit filter asks on each route: the model that all checks of HTTP filters read.
//!
//! For each route, the lists of `rate_limits` that are in force for a filter, why others are not, the domain, and the
//! headers that the router adds after the filters. As measured with Envoy 1.40:
//!
//! - The most specific `typed_per_filter_config` counts alone: of the weighted cluster, the route, the virtual host, the
//!   route configuration. Any but a disabling one enables a filter with `disabled: true`.
//! - Its `rate_limits` replace those of the filter, and these all others, with `stage` ignored.
//! - A route with `rate_limits` of any stage replaces those of its virtual host, unless they are included.
//!
//! Decides: which `rate_limits` are in force on a route, for which filter.

use std::collections::{HashMap, HashSet};

use super::config_node::ConfigNode;
use super::descriptors::{LimitEntry, LimitPlace};
use crate::rules::yaml::Position;

const PER_ROUTE_TYPE: &str = "envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute";
const FILTER_CONFIG_TYPE: &str = "envoy.config.route.v3.FilterConfig";

/// A rate limit filter of a connection manager.
#[derive(Debug)]
pub(super) struct RateLimitFilter<'n, 'a> {
    /// The filter in its list.
    pub(super) listed: ConfigNode<'n, 'a>,
    /// Its configuration.
    pub(super) node: ConfigNode<'n, 'a>,
    pub(super) name: &'n str,
    pub(super) stage: u64,
    /// Only routes with a configuration for it enable it.
    pub(super) is_disabled: bool,
    /// Its place among all HTTP filters.
    pub(super) at: usize,
}

impl<'n, 'a> RateLimitFilter<'n, 'a> {
    pub(super) fn read(listed: &ConfigNode<'n, 'a>, node: &ConfigNode<'n, 'a>, at: usize) -> Self {
        Self {
            listed: listed.clone(),
            name: listed.text("name").unwrap_or_default(),
            stage: node.whole_number("stage").unwrap_or(0),
            is_disabled: listed.flag("disabled"),
            at,
            node: node.clone(),
        }
    }

    /// Its `grpc_service`.
    pub(super) fn grpc_service(&self) -> Option<ConfigNode<'n, 'a>> {
        self.node.field_at(&["rate_limit_service", "grpc_service"])
    }

    /// Its own `rate_limits`, if it has items.
    pub(super) fn own_limits(&self) -> Option<ConfigNode<'n, 'a>> {
        self.node.field("rate_limits").filter(|list| list.elements().next().is_some())
    }
}

/// Why a list is not in force for a filter on a route; the first is the most telling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum NotInForce {
    /// The filter has a list of its own.
    FilterLimits,
    /// A RateLimitPerRoute has a list.
    PerRouteLimits,
    /// The route has a list, and does not include that of its virtual host.
    RouteLimits,
    /// `vh_rate_limits: IGNORE`.
    Ignored,
    /// The filter is disabled there.
    Disabled,
    /// Envoy answers by itself.
    AnswersItself,
}

/// The items of one field `rate_limits`.
#[derive(Debug)]
pub(super) struct LimitList<'n, 'a> {
    pub(super) place: LimitPlace,
    pub(super) entries: Vec<LimitEntry<'n, 'a>>,
    /// Filters for which it is in force on a route, as bits.
    in_force_for: u64,
    /// Filters for which it is not on a route, by the reason, as bits.
    not_in_force_for: [u64; 6],
    /// Number of routes of a virtual host, and of those that replace its list without saying so.
    pub(super) routes: usize,
    pub(super) replacing_routes: usize,
}

/// What a filter asks on a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ask {
    /// Indices of the lists in force, in the order in which Envoy sends them.
    lists: [Option<usize>; 2],
    /// Index of the domain that replaces the filter's.
    pub(super) domain: Option<usize>,
}

/// A route, or one of its weighted clusters.
#[derive(Debug)]
pub(super) struct Route<'n, 'a> {
    /// For each filter of the manager.
    pub(super) asks: Vec<Ask>,
    /// Index of the headers that the router adds.
    pub(super) added_headers: usize,
    /// Metadata of the route.
    pub(super) metadata: Option<ConfigNode<'n, 'a>>,
}

/// All routes of a connection manager, with what they share.
#[derive(Debug, Default)]
pub(super) struct Routes<'n, 'a> {
    pub(super) routes: Vec<Route<'n, 'a>>,
    pub(super) lists: Vec<LimitList<'n, 'a>>,
    /// Domains of each RateLimitPerRoute, with the name of their filter.
    pub(super) domains: Vec<(&'n str, ConfigNode<'n, 'a>)>,
    /// `request_headers_to_add` of routes and all around them, without equal ones.
    pub(super) added_headers: Vec<Vec<ConfigNode<'n, 'a>>>,
    /// Names under which a configuration enables a filter.
    pub(super) per_filter_names: HashSet<&'n str>,
    /// Names of all filters that have a configuration for a route, of any type.
    configured_names: HashSet<&'n str>,
    /// Requests of a route keep the `accept-encoding` of the client.
    keeps_accept_encoding: bool,
    /// Names of filters that have a configuration for such a route.
    names_with_accept_encoding: HashSet<&'n str>,
    list_indices: HashMap<Position, usize>,
    domain_indices: HashMap<Position, usize>,
    header_indices: HashMap<Vec<Position>, usize>,
}

/// What the most specific `typed_per_filter_config` says of a filter.
struct PerFilterConfig<'n, 'a> {
    is_disabled: bool,
    per_route: Option<ConfigNode<'n, 'a>>,
}

impl<'n, 'a> LimitList<'n, 'a> {
    /// Returns `true` if a filter sends the item on a route.
    pub(super) fn is_sent(&self, entry: &LimitEntry<'n, 'a>, filters: &[RateLimitFilter<'n, 'a>]) -> bool {
        has_filter(self.in_force_for, filters, |filter| self.applies(entry, filter))
    }

    /// Returns the most telling reason why no filter sends an item.
    pub(super) fn find_barrier(
        &self,
        entry: &LimitEntry<'n, 'a>,
        filters: &[RateLimitFilter<'n, 'a>],
    ) -> Option<NotInForce> {
        use NotInForce::{AnswersItself, Disabled, FilterLimits, Ignored, PerRouteLimits, RouteLimits};
        let all = [FilterLimits, PerRouteLimits, RouteLimits, Ignored, Disabled, AnswersItself];
        all.into_iter().find(|reason| self.is_kept_out_by(*reason, entry, filters))
    }

    /// Returns `true` if a filter does not send the item on a route, for this reason.
    pub(super) fn is_kept_out_by(
        &self,
        reason: NotInForce,
        entry: &LimitEntry<'n, 'a>,
        filters: &[RateLimitFilter<'n, 'a>],
    ) -> bool {
        has_filter(self.not_in_force_for[reason as usize], filters, |filter| self.applies(entry, filter))
    }

    /// Returns `true` if a filter sends the item where the list is in force: outside a route configuration the stage
    /// does not count.
    pub(super) fn applies(&self, entry: &LimitEntry<'n, 'a>, filter: &RateLimitFilter<'n, 'a>) -> bool {
        matches!(self.place, LimitPlace::Filter | LimitPlace::PerRoute) || entry.stage == filter.stage
    }
}

fn has_filter<'n, 'a>(
    bits: u64,
    filters: &[RateLimitFilter<'n, 'a>],
    is_meant: impl Fn(&RateLimitFilter<'n, 'a>) -> bool,
) -> bool {
    filters.iter().enumerate().any(|(at, filter)| bits & (1 << at) != 0 && is_meant(filter))
}

impl<'n, 'a> Routes<'n, 'a> {
    /// Reads the routes of a configuration, or none, for these filters, of which there are at most 64.
    ///
    /// With `has_others`, hosts have routes that are not in the file.
    pub(super) fn read(
        configuration: Option<&ConfigNode<'n, 'a>>,
        filters: &[RateLimitFilter<'n, 'a>],
        has_others: bool,
    ) -> Self {
        let mut routes = Self::default();
        for filter in filters {
            routes.read_list(&filter.node, LimitPlace::Filter);
        }
        let hosts = configuration.map_or_else(Vec::new, |configuration| configuration.items("virtual_hosts"));
        for host in &hosts {
            let mut listed = host.items("routes");
            if listed.is_empty() || has_others {
                listed.push(host.clone());
            }
            for route in &listed {
                let action = route.field("route");
                let weighted = action.as_ref().and_then(|action| action.field_at(&["weighted_clusters", "clusters"]));
                let clusters: Vec<_> = weighted.iter().flat_map(ConfigNode::elements).map(Some).collect();
                let variants = if clusters.is_empty() { vec![None] } else { clusters };
                for cluster in &variants {
                    let holders = [cluster.as_ref(), Some(route), Some(host), configuration];
                    routes.read_route(action.as_ref(), holders, filters);
                }
            }
        }
        if hosts.is_empty() {
            let own = |filter: &RateLimitFilter<'n, 'a>| {
                let list = filter.own_limits().filter(|_| !filter.is_disabled)?;
                routes.list_indices.get(&list.at).copied()
            };
            let asks: Vec<Ask> =
                filters.iter().map(|filter| Ask { lists: [own(filter), None], domain: None }).collect();
            routes.note_use(&asks);
            let added_headers = routes.index_headers(Vec::new());
            routes.routes.push(Route { asks, added_headers, metadata: None });
        }
        routes
    }

    /// `holders` are the weighted cluster, the route, the host and the configuration: what may have configurations for
    /// filters, the most specific first.
    fn read_route(
        &mut self,
        action: Option<&ConfigNode<'n, 'a>>,
        holders: [Option<&ConfigNode<'n, 'a>>; 4],
        filters: &[RateLimitFilter<'n, 'a>],
    ) {
        let [_, route, host, _] = holders;
        let is_in_file = route.map(|route| route.at) != host.map(|host| host.at);
        for holder in holders.into_iter().flatten() {
            self.note_enabled_filters(holder);
        }
        let answers_itself =
            route.is_some_and(|route| ["direct_response", "redirect"].iter().any(|name| route.field(name).is_some()));
        let of_route = action.and_then(|action| self.read_list(action, LimitPlace::Route));
        let of_host = host.and_then(|host| self.read_list(host, LimitPlace::VirtualHost));
        let mut says_override = action.is_some_and(|action| action.field("include_vh_rate_limits").is_some());
        let mut asks = Vec::with_capacity(filters.len());
        for (at, filter) in filters.iter().enumerate() {
            let config = find_per_filter_config(&holders, filter.name);
            let is_disabled = config.as_ref().map_or(filter.is_disabled, |config| config.is_disabled);
            let per_route = config.and_then(|config| config.per_route);
            let of_filter = filter.own_limits().and_then(|list| self.list_indices.get(&list.at).copied());
            let of_per_route = per_route.as_ref().and_then(|message| self.read_list(message, LimitPlace::PerRoute));
            let domain = per_route.as_ref().and_then(|message| self.read_domain(filter.name, message));
            let policy = per_route.as_ref().and_then(|message| message.text("vh_rate_limits"));
            says_override |= policy.is_some();
            let host_reason = find_why_host_is_not_in_force(action, policy, of_route.is_some());
            let whole = match () {
                () if answers_itself => Some(NotInForce::AnswersItself),
                () if is_disabled => Some(NotInForce::Disabled),
                () => None,
            };
            let replaced = |by: Option<usize>, reason| by.is_some().then_some(reason);
            let by_per_route = replaced(of_per_route, NotInForce::PerRouteLimits);
            let by_filter = by_per_route.or_else(|| replaced(of_filter, NotInForce::FilterLimits));
            let lists = [of_per_route, of_filter, of_route, of_host];
            let reasons = [None, by_per_route, by_filter, by_filter.or(host_reason)].map(|reason| whole.or(reason));
            asks.push(Ask { lists: self.lists_in_force(at, lists, reasons), domain });
        }
        if let Some(list) = of_host.filter(|_| is_in_file) {
            self.lists[list].routes += 1;
            self.lists[list].replacing_routes += usize::from(of_route.is_some() && !says_override);
        }
        self.note_use(&asks);
        let added = holders.into_iter().flatten().flat_map(|holder| holder.items("request_headers_to_add")).collect();
        let added_headers = self.index_headers(added);
        let metadata = route.filter(|_| is_in_file).and_then(|route| route.field("metadata"));
        self.routes.push(Route { asks, added_headers, metadata });
        if !answers_itself && !holders.into_iter().flatten().any(changes_accept_encoding) {
            self.note_accept_encoding(holders);
        }
    }

    /// Returns the lists that the filter at this index uses; notes for the others why not.
    fn lists_in_force(
        &mut self,
        filter: usize,
        lists: [Option<usize>; 4],
        reasons: [Option<NotInForce>; 4],
    ) -> [Option<usize>; 2] {
        let mut in_force = lists.into_iter().zip(reasons).filter_map(|(list, reason)| {
            let Some(reason) = reason else { return list };
            self.lists[list?].not_in_force_for[reason as usize] |= 1 << filter;
            None
        });
        [in_force.next(), in_force.next()]
    }

    fn note_use(&mut self, asks: &[Ask]) {
        for (at, ask) in asks.iter().enumerate() {
            for list in ask.lists.into_iter().flatten() {
                self.lists[list].in_force_for |= 1 << at;
            }
        }
    }

    /// Reads the list of `parent` once; `None` if it has no items.
    fn read_list(&mut self, parent: &ConfigNode<'n, 'a>, place: LimitPlace) -> Option<usize> {
        let at = parent.field("rate_limits")?.at;
        if let Some(known) = self.list_indices.get(&at) {
            return Some(*known);
        }
        let entries = LimitEntry::read_all(parent, place);
        if entries.is_empty() {
            return None;
        }
        self.lists.push(LimitList {
            place,
            entries,
            in_force_for: 0,
            not_in_force_for: [0; 6],
            routes: 0,
            replacing_routes: 0,
        });
        self.list_indices.insert(at, self.lists.len() - 1);
        Some(self.lists.len() - 1)
    }

    fn read_domain(&mut self, of_filter: &'n str, message: &ConfigNode<'n, 'a>) -> Option<usize> {
        let domain = message.field("domain")?;
        let next = self.domains.len();
        let index = *self.domain_indices.entry(domain.at).or_insert(next);
        if index == next {
            self.domains.push((of_filter, domain));
        }
        Some(index)
    }

    fn index_headers(&mut self, added: Vec<ConfigNode<'n, 'a>>) -> usize {
        let next = self.added_headers.len();
        let index = *self.header_indices.entry(added.iter().map(|node| node.at).collect()).or_insert(next);
        if index == next {
            self.added_headers.push(added);
        }
        index
    }

    fn note_enabled_filters(&mut self, holder: &ConfigNode<'n, 'a>) {
        let Some(configs) = holder.field("typed_per_filter_config") else { return };
        let is_enabled = |config| read_per_filter_config(&config).is_some_and(|read| !read.is_disabled);
        self.configured_names.extend(configs.fields().map(|(name, _)| name));
        self.per_filter_names.extend(configs.fields().filter_map(|(name, config)| is_enabled(config).then_some(name)));
    }

    fn note_accept_encoding(&mut self, holders: [Option<&ConfigNode<'n, 'a>>; 4]) {
        self.keeps_accept_encoding = true;
        let configs = holders.into_iter().flatten().filter_map(|holder| holder.field("typed_per_filter_config"));
        configs.for_each(|configs| self.names_with_accept_encoding.extend(configs.fields().map(|(name, _)| name)));
    }

    /// Returns `true` if requests keep the `accept-encoding` of the client on a route; with a name, on a route that has a
    /// configuration for this filter.
    pub(super) fn keep_accept_encoding(&self, configured: Option<&str>) -> bool {
        configured.map_or(self.keeps_accept_encoding, |name| self.names_with_accept_encoding.contains(name))
    }

    /// Returns `true` if a route, or what is around it, has a configuration for the filter with this name.
    pub(super) fn has_per_route_config(&self, name: &str) -> bool {
        self.configured_names.contains(name)
    }

    /// Lists in force for a filter on some route, each once.
    pub(super) fn lists_of(&self, filter_at: usize) -> impl Iterator<Item = &LimitList<'n, 'a>> {
        self.lists.iter().filter(move |list| list.in_force_for & (1 << filter_at) != 0)
    }

    /// Routes on which an item is in force for the filter at `filter_at`.
    pub(super) fn sending(&self, filter_at: usize, entry: &LimitEntry<'n, 'a>) -> impl Iterator<Item = &Route<'n, 'a>> {
        let has_it = |list: &LimitList<'n, 'a>| list.entries.iter().any(|other| other.node.at == entry.node.at);
        let list = self.lists.iter().position(has_it);
        self.routes.iter().filter(move |route| list.is_some() && route.asks[filter_at].lists.contains(&list))
    }

    /// Number of steps that [`Self::sending`] takes at most.
    pub(super) fn sending_steps(&self) -> usize {
        self.routes.len() + self.lists.iter().map(|list| list.entries.len()).sum::<usize>()
    }

    /// Items that a filter sends on a route.
    pub(super) fn entries_of<'r>(
        &'r self,
        ask: Ask,
        filter: &'r RateLimitFilter<'n, 'a>,
    ) -> impl Iterator<Item = &'r LimitEntry<'n, 'a>> {
        let lists = ask.lists.into_iter().flatten().map(|list| &self.lists[list]);
        lists.flat_map(move |list| list.entries.iter().filter(move |entry| list.applies(entry, filter)))
    }
}

/// Returns `true` if a route, or what is around it, removes or sets `accept-encoding` of requests.
fn changes_accept_encoding(holder: &ConfigNode<'_, '_>) -> bool {
    const NAME: &str = "accept-encoding";
    let removed = holder.items("request_headers_to_remove");
    let added = holder.field("request_headers_to_add");
    removed.iter().any(|name| name.as_text().is_some_and(|name| name.eq_ignore_ascii_case(NAME)))
        || added.is_some_and(|added| added.has_text_below(&["key"], NAME))
}

fn find_per_filter_config<'n, 'a>(
    holders: &[Option<&ConfigNode<'n, 'a>>],
    name: &str,
) -> Option<PerFilterConfig<'n, 'a>> {
    holders.iter().flatten().find_map(|holder| {
        let configs = holder.field("typed_per_filter_config")?;
        let (_, config) = configs.fields().find(|(of_filter, _)| *of_filter == name)?;
        read_per_filter_config(&config)
    })
}

/// Reads a configuration for a filter, also one in a `FilterConfig`; `None` for another type.
fn read_per_filter_config<'n, 'a>(config: &ConfigNode<'n, 'a>) -> Option<PerFilterConfig<'n, 'a>> {
    let (name, message) = config.type_name_and_message()?;
    match name {
        PER_ROUTE_TYPE => Some(PerFilterConfig { is_disabled: false, per_route: Some(message) }),
        FILTER_CONFIG_TYPE => {
            let inner = message.field("config").and_then(|inner| inner.type_name_and_message());
            let per_route = inner.filter(|(name, _)| *name == PER_ROUTE_TYPE).map(|(_, message)| message);
            Some(PerFilterConfig { is_disabled: message.flag("disabled"), per_route })
        }
        _ => None,
    }
}

/// What keeps the virtual host's limits from a route; `policy` is its `vh_rate_limits`.
fn find_why_host_is_not_in_force(
    action: Option<&ConfigNode<'_, '_>>,
    policy: Option<&str>,
    has_route_limits: bool,
) -> Option<NotInForce> {
    let includes_host = action.is_some_and(|action| action.flag("include_vh_rate_limits"));
    match policy {
        _ if includes_host => None,
        Some("INCLUDE" | "1") => None,
        Some("IGNORE" | "2") => Some(NotInForce::Ignored),
        _ => has_route_limits.then_some(NotInForce::RouteLimits),
    }
}

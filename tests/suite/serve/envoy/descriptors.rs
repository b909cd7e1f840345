//! `docs/envoy.md`, compared with a real Envoy: the entry of each action, what is sent from which place, and what
//! becomes of a request if tollkeeper does not answer.
//!
//! The decision log says what arrived. Every route sends a second descriptor with its number, so that a dropped
//! descriptor differs from a call that was not made.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;

use kit::envoy::Envoy;
use kit::http::Request;
use kit::port::Port;
use kit::tollkeeper::{Tollkeeper, with_rules};
use kit::{read, repository, wait_for};

/// Envoy's bootstrap, with a comment in each place that a test fills.
const TEMPLATE: &str = "tests/suite/docs/cookbook/envoy.yaml";

/// Claims: `sub` is `ann`, `org.name` is `acme`, `num` is the number 5. No key signed it.
const TOKEN: &str =
    "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiJhbm4iLCJvcmciOnsibmFtZSI6ImFjbWUifSwibnVtIjo1fQ.c2ln";

/// An entry, or `None` if Envoy leaves the whole descriptor out; without a key: a descriptor of no entries.
type Sent = Option<Vec<(String, String)>>;

/// What a request must send from a route with these actions.
#[derive(Debug)]
struct Row {
    /// An item of `rate_limits`, as JSON or as YAML in one line.
    item: String,
    /// `METHOD /path`, `name: value`, or words for people.
    request: String,
    sent: Sent,
}

fn page() -> String {
    read(&repository("docs/envoy.md"))
}

/// Text of a section, from its heading to the next of the same level.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let (_, rest) = page.split_once(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no section {heading}"));
    rest.split("\n## ").next().unwrap()
}

/// Cells of each row of a section's first table.
fn table(section: &str) -> Vec<Vec<&str>> {
    let rows = section.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
    let rows = rows.take_while(|line| line.starts_with("| "));
    rows.map(|row| row.trim_matches('|').split(" | ").map(|cell| cell.trim_matches(' ')).collect()).collect()
}

/// `(key, value)`.
fn entry(text: &str) -> (String, String) {
    let inner = text.strip_prefix('(').and_then(|text| text.strip_suffix(')'));
    let (key, value) = inner.and_then(|inner| inner.split_once(", ")).unwrap_or_else(|| panic!("no entry: {text}"));
    (key.to_owned(), value.to_owned())
}

fn rows_of_tables(page: &str) -> Vec<Row> {
    let rows = ["Every action and its entry", "Missing values"].map(|heading| table(section(page, heading)));
    let rows = rows.concat().into_iter().map(|cells| {
        let [action, request, sent] = cells[..] else { panic!("{} cells: {cells:?}", cells.len()) };
        let sent = match sent {
            "no descriptor" => None,
            "no entry" => Some(Vec::new()),
            sent => Some(vec![entry(sent.trim_matches('`'))]),
        };
        let item = format!("{{ actions: [{{ {} }}] }}", action.trim_matches('`'));
        Row { item, request: request.strip_prefix('`').unwrap_or(request).trim_end_matches('`').to_owned(), sent }
    });
    rows.collect()
}

/// Blocks that begin with `# REQUEST sends ENTRY`.
fn rows_of_blocks(page: &str) -> Vec<Row> {
    let blocks = page.split("```yaml\n# ").skip(1).map(|rest| rest.split("```").next().unwrap());
    let rows = blocks.map(|block| {
        let (first, yaml) = block.split_once('\n').unwrap();
        let (request, sent) = first.split_once(" sends ").unwrap_or_else(|| panic!("{first}"));
        let items: Value = serde_saphyr::from_str(yaml).unwrap();
        Row { item: items[0].to_string(), request: request.to_owned(), sent: Some(vec![entry(sent)]) }
    });
    rows.collect()
}

/// A tollkeeper that records what arrives, behind an Envoy.
struct Recorder {
    envoy: Envoy,
    tollkeeper: Tollkeeper,
    log: PathBuf,
    _directory: TempDir,
}

impl Recorder {
    fn start(bootstrap: impl FnOnce(String) -> String) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("decisions.jsonl");
        let rules = "domain: shop\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 5}}]";
        let setup = with_rules(rules).env("TOLLKEEPER_DECISION_LOG", format!("file:{}", log.display()));
        let tollkeeper = setup.env("TOLLKEEPER_DECISION_LOG_WHEN", "all").start();
        let envoy = Envoy::start_file(TEMPLATE, &[tollkeeper.grpc_port()], bootstrap);
        Self { envoy, tollkeeper, log, _directory: directory }
    }

    /// The decisions that the calls made so far left in the log, in order.
    fn decisions(&self) -> Vec<Value> {
        let calls = self.envoy.stat("cluster.tollkeeper.upstream_rq_completed");
        let failed = self.envoy.stat("cluster.upstream.ratelimit.error");
        assert_eq!(failed, 0, "calls failed; tollkeeper said:\n{}", self.tollkeeper.stderr());
        wait_for("the decisions to be logged", || {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            let records = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            let decisions: Vec<_> = records.filter(|record| record["type"] == "decision").collect();
            (decisions.len() as u64 >= calls).then_some(decisions)
        })
    }
}

/// Entries of a descriptor in the decision log.
fn entries(descriptor: &Value) -> Vec<(String, String)> {
    let entries = descriptor["entries"].as_array().unwrap().iter();
    entries.map(|entry| (text(&entry["key"]), text(&entry["value"]))).collect()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}")).to_owned()
}

/// Replaces `from`, which must be there, once.
fn replace(text: &str, from: &str, to: &str) -> String {
    assert!(text.contains(from), "the template has no {from}");
    text.replacen(from, to, 1)
}

const ROUTE: &str = "                        # MATCH
                          route:
                            cluster: upstream
                            # ROUTE
                          # BESIDE ROUTE
";

/// An Envoy with a route for each row, which the header `x-row` chooses.
fn with_routes(template: &str, rows: &[Row]) -> String {
    let mut routes = String::new();
    for (number, row) in rows.iter().enumerate() {
        let own = format!("{{ generic_key: {{ descriptor_key: row, descriptor_value: \"{number}\" }} }}");
        write!(
            routes,
            "                        - match: {{ prefix: /, headers: [{{ name: x-row, string_match: {{ exact: \"{number}\" }} }}] }}
                          metadata: {{ filter_metadata: {{ shop: {{ team: blue }} }} }}
                          route: {{ cluster: upstream, rate_limits: [{}, {{ actions: [{own}] }}] }}
",
            row.item
        )
        .unwrap();
    }
    let text = replace(template, ROUTE, &routes);
    let text = replace(&text, "# CONNECTION MANAGER", "use_remote_address: true");
    let text = replace(&text, "# FILTER\n", "domain: shop\n                      timeout: 10s\n");
    let set_metadata = "- name: envoy.filters.http.set_metadata
                    typed_config:
                      \"@type\": type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config
                      metadata: [{ metadata_namespace: shop, value: { plan: gold } }]
                  - name: envoy.filters.http.ratelimit
";
    let text = replace(&text, "- name: envoy.filters.http.ratelimit\n", set_metadata);
    let cluster = "    - name: upstream\n      connect_timeout: 10s\n";
    let metadata = "      metadata: { filter_metadata: { shop: { region: eu } } }\n";
    let text = replace(&text, cluster, &format!("{cluster}{metadata}"));
    let endpoints = "cluster_name: upstream\n        endpoints:\n          - lb_endpoints:";
    let metadata = "metadata: { filter_metadata: { shop: { zone: eu-1 } } }";
    let text = replace(&text, endpoints, &endpoints.replace("- lb", &format!("- {metadata}\n            lb")));
    format!("node: {{ id: test, cluster: edge }}\n{text}")
}

/// The request that a row describes.
fn request(envoy: &Envoy, row: &Row) -> Request {
    if let Some((method, path)) = row.request.split_once(" /")
        && ["GET", "POST"].contains(&method)
    {
        return envoy.get(&format!("/{path}")).method(method).header("content-length", "0");
    }
    match row.request.split_once(": ") {
        Some(("host", name)) => envoy.get("/").host(name),
        Some((name, value)) => envoy.get("/").header(name, value.replace("TOKEN", TOKEN)),
        None => envoy.get("/"),
    }
}

/// Sends the request of each row and compares what arrived.
fn assert_sent(rows: &[Row], change: impl FnOnce(String) -> String) {
    let recorder = Recorder::start(|template| change(with_routes(&template, rows)));
    for (number, row) in rows.iter().enumerate() {
        let response = request(&recorder.envoy, row).header("x-row", number.to_string()).send();
        assert_eq!(response.status, 200, "{row:?}: {response:?}");
    }
    let decisions = recorder.decisions();
    assert_eq!(decisions.len(), rows.len());
    let mut wrong = Vec::new();
    for (number, (row, decision)) in rows.iter().zip(&decisions).enumerate() {
        let mut arrived: Vec<_> = decision["descriptors"].as_array().unwrap().iter().map(entries).collect();
        assert_eq!(arrived.pop(), Some(vec![("row".to_owned(), number.to_string())]));
        let expected: Vec<_> = row.sent.clone().into_iter().collect();
        if arrived != expected {
            wrong.push(format!("{}, {}: {arrived:?} instead of {expected:?}", row.item, row.request));
        }
    }
    assert!(wrong.is_empty(), "docs/envoy.md differs from Envoy:\n{}", wrong.join("\n"));
}

#[test]
fn each_action_sends_the_entry_of_the_page() {
    let page = page();
    let mut rows = rows_of_tables(&page);
    assert!(rows.len() >= 24, "{}", rows.len());
    rows.extend(rows_of_blocks(&page));
    let token = rows.iter().find(|row| row.item.contains("jwt_claim")).expect("the page has a claim").item.clone();
    let other_claim = |name: &str, sent: Sent| Row {
        item: token.replace("\"claim_name\":\"sub\"", &format!("\"claim_name\":\"{name}\"")),
        request: "authorization: Bearer TOKEN".to_owned(),
        sent,
    };
    rows.push(other_claim("org.name", Some(vec![("subject".to_owned(), "acme".to_owned())])));
    rows.push(other_claim("num", None));
    rows.push(Row { request: String::new(), ..other_claim("sub", None) });
    // Rows that the page leaves out, because they are as those of another action.
    let absent = "query_parameter_name: user, descriptor_key: user";
    let csv = "descriptor_value: csv, query_parameters: [{ name: format, string_match: { exact: csv } }]";
    let ranges = "ranges: [{ address_prefix: 10.0.0.0, prefix_len: 8 }]";
    let method = "header_name: \":method\", descriptor_key: method";
    let region = "descriptor_key: region, source: CLUSTER_ENTRY, metadata_key: { key: shop, path: [{ key: region }] }";
    let of = |key: &str, value: &str| Some(vec![(key.to_owned(), value.to_owned())]);
    for (action, request, sent) in [
        (format!("request_headers: {{ {method} }}"), "POST /", of("method", "POST")),
        (format!("query_parameters: {{ {absent} }}"), "any", None),
        (format!("query_parameters: {{ {absent}, skip_if_absent: true }}"), "any", Some(Vec::new())),
        (format!("metadata: {{ {region} }}"), "any", of("region", "eu")),
        (format!("query_parameter_value_match: {{ {csv} }}"), "GET /?format=xml", None),
        (format!("remote_address_match: {{ descriptor_value: in, address_matcher: {{ {ranges} }} }}"), "any", None),
        (
            format!(
                "remote_address_match: {{ descriptor_value: out, address_matcher: {{ {ranges}, invert_match: true }} }}"
            ),
            "any",
            of("remote_address_match", "out"),
        ),
    ] {
        rows.push(Row { item: format!("{{ actions: [{{ {action} }}] }}"), request: request.to_owned(), sent });
    }
    assert_sent(&rows, |bootstrap| bootstrap);
}

#[test]
fn values_have_formatters_only_with_the_runtime_flag() {
    const FLAG: &str = "envoy.reloadable_features.enable_formatter_for_ratelimit_action_descriptor_value";
    let page = page();
    assert!(page.contains(FLAG));
    let row = |value: &str, sent: &str| {
        assert!(page.contains(&format!("`\"{value}\"`")), "the page has no {value}");
        let item =
            format!("{{ actions: [{{ generic_key: {{ descriptor_key: v, descriptor_value: \"{value}\" }} }}] }}");
        let sent = Some(vec![("v".to_owned(), sent.to_owned())]);
        Row { item, request: "x-user: ann".to_owned(), sent }
    };
    let [both, path] = ["%REQ(:METHOD)%-%REQ(x-user)%", "%PATH(NQ)%"];
    assert_sent(&[row(both, both), row(path, path)], |bootstrap| bootstrap);
    let layer = format!("layered_runtime: {{ layers: [{{ name: static, static_layer: {{ {FLAG}: true }} }}] }}");
    assert_sent(&[row(both, "GET-ann"), row(path, "/")], |bootstrap| format!("{bootstrap}\n{layer}\n"));
}

/// `rate_limits` with one descriptor, `(generic_key, PLACE)`.
fn limits(place: &str) -> String {
    format!("rate_limits: [{{ actions: [{{ generic_key: {{ descriptor_value: {place} }} }}] }}]")
}

/// Settings of the route, the filter and the virtual host.
#[derive(Default)]
struct Places {
    virtual_host: bool,
    route: String,
    per_route: String,
    filter: String,
}

impl Places {
    fn fill(&self, template: &str) -> String {
        let text = replace(
            template,
            "# FILTER\n",
            &format!("domain: shop\n                      timeout: 10s\n                      {}\n", self.filter),
        );
        // The field stands beside `typed_config`.
        let name = "- name: envoy.filters.http.ratelimit\n";
        let text = match text.split_once("DISABLED") {
            Some((start, end)) => {
                replace(&format!("{start}{end}"), name, &format!("{name}                    disabled: true\n"))
            }
            None => text,
        };
        let domains = "domains: [\"*\"]\n";
        let virtual_host = if self.virtual_host { limits("virtual_host") } else { String::new() };
        let text = replace(&text, domains, &format!("{domains}                      {virtual_host}\n"));
        let per_route = if self.per_route.is_empty() {
            String::new()
        } else {
            let kind = "type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute";
            format!(
                "                          typed_per_filter_config: {{ envoy.filters.http.ratelimit: \
                 {{ \"@type\": {kind}, {} }} }}\n",
                self.per_route
            )
        };
        let comma = if self.route.is_empty() { "" } else { ", " };
        let route = format!(
            "                        - match: {{ prefix: / }}\n                          \
             route: {{ cluster: upstream{comma}{} }}\n{per_route}",
            self.route
        );
        replace(&text, ROUTE, &route)
    }

    /// Domains, and values of descriptors, of the calls that one request causes.
    fn calls(&self) -> Vec<(String, Vec<String>)> {
        let recorder = Recorder::start(|template| self.fill(&template));
        assert_eq!(recorder.envoy.get("/").send().status, 200);
        let decisions = recorder.decisions();
        let calls = decisions.iter().map(|decision| {
            let descriptors = decision["descriptors"].as_array().unwrap().iter();
            (text(&decision["domain"]), descriptors.map(|it| entries(it)[0].1.clone()).collect())
        });
        calls.collect()
    }
}

/// Rows of the page, in its order, with the settings that they describe and what is sent.
#[test]
fn place_of_rate_limits_decides_what_is_sent() {
    let page = page();
    let rows = table(section(&page, "Where `rate_limits` may stand"));
    let both = || Places { virtual_host: true, route: limits("route"), ..Places::default() };
    let including = format!("include_vh_rate_limits: true, {}", limits("route"));
    let cases: [(&str, Places, &[&str]); 7] = [
        ("virtual host only", Places { virtual_host: true, ..Places::default() }, &["virtual_host"]),
        ("virtual host and route", both(), &["route"]),
        ("`include_vh_rate_limits: true`", Places { route: including, ..both() }, &["route", "virtual_host"]),
        (
            "`vh_rate_limits: INCLUDE`",
            Places { per_route: "vh_rate_limits: INCLUDE".to_owned(), ..both() },
            &["route", "virtual_host"],
        ),
        (
            "`vh_rate_limits: IGNORE`",
            Places { route: String::new(), per_route: "vh_rate_limits: IGNORE".to_owned(), ..both() },
            &[],
        ),
        ("`RateLimitPerRoute` has `rate_limits`", Places { per_route: limits("per_route"), ..both() }, &["per_route"]),
        ("the filter has `rate_limits`", Places { filter: limits("filter"), ..both() }, &["filter"]),
    ];
    assert_eq!(rows.len(), cases.len());
    for ((words, places, sent), row) in cases.iter().zip(rows) {
        assert!(row[0].contains(words), "{words}: {row:?}");
        let expected: Vec<(String, Vec<String>)> = if sent.is_empty() {
            Vec::new()
        } else {
            vec![("shop".to_owned(), sent.iter().map(|value| (*value).to_owned()).collect())]
        };
        assert_eq!(places.calls(), expected, "{}", row[0]);
    }
    let unless = Places { filter: limits("filter"), per_route: limits("per_route"), ..both() };
    assert_eq!(unless.calls(), [("shop".to_owned(), vec!["per_route".to_owned()])]);
    let other = Places { per_route: "domain: other".to_owned(), ..both() };
    assert_eq!(other.calls(), [("other".to_owned(), vec!["route".to_owned()])]);
    // Another stage than that of the filter.
    let staged = limits("route").replace("actions", "stage: 1, actions");
    assert!(Places { route: staged.clone(), ..Places::default() }.calls().is_empty());
    // It hides the limits of the virtual host all the same.
    assert!(Places { route: staged, ..both() }.calls().is_empty());
    // A filter that is disabled, with a route that enables it and without; requests of which none is internal.
    let filter = |more: &str| format!("{}\n                      {more}", limits("filter"));
    assert!(Places { filter: filter("request_type: internal"), ..both() }.calls().is_empty());
    assert!(Places { filter: filter("filter_enabled: { default_value: {} }"), ..both() }.calls().is_empty());
    for (per_route, sent) in [("", false), ("vh_rate_limits: OVERRIDE", true)] {
        let places = Places { filter: filter("") + "DISABLED", per_route: per_route.to_owned(), ..both() };
        assert_eq!(!places.calls().is_empty(), sent, "{per_route}");
    }
    // The router adds these headers, after the filters.
    let made = "request_headers: { header_name: x-made, descriptor_key: made }";
    let made = limits("made").replace("generic_key: { descriptor_value: made }", made);
    let places = Places { route: made, ..Places::default() };
    let adds =
        "domains: [\"*\"]\n                      request_headers_to_add: [{ header: { key: x-made, value: v } }]\n";
    let recorder = Recorder::start(|template| places.fill(&template).replacen("domains: [\"*\"]\n", adds, 1));
    assert_eq!(recorder.envoy.get("/").send().status, 200);
    assert_eq!(recorder.decisions(), [Value::Null; 0]);
}

#[test]
fn hits_addend_is_sent_from_filter_and_per_route_only() {
    let limits = |place| limits(place).replace("actions", "hits_addend: { number: 7 }, actions");
    let cases = [
        (Places { route: limits("route"), ..Places::default() }, 1),
        (Places { filter: limits("filter"), ..Places::default() }, 7),
        (Places { per_route: limits("per_route"), ..Places::default() }, 7),
    ];
    for (places, hits) in cases {
        let recorder = Recorder::start(|template| places.fill(&template));
        assert_eq!(recorder.envoy.get("/").send().status, 200);
        assert_eq!(recorder.decisions()[0]["descriptors"][0]["hits"], hits);
    }
}

/// Limit, as `x-ratelimit-limit` says it, of two items: one whose rule has 5 a day, and one with 50 a day in the route.
fn shown_limits(options: [&str; 2], filter_shows: bool) -> Option<String> {
    let item = |value: &str, limit: &str, option: &str| {
        let option = if option.is_empty() { String::new() } else { format!(", x_ratelimit_option: {option}") };
        format!("{{ actions: [{{ generic_key: {{ descriptor_key: k, descriptor_value: {value} }} }}]{limit}{option} }}")
    };
    let limit = ", limit: { rate_limit: { requests_per_unit: 50, unit: DAY } }";
    let items = [item("rule", "", options[0]), item("route", limit, options[1])].join(", ");
    let places = Places { route: format!("rate_limits: [{items}]"), ..Places::default() };
    let recorder = Recorder::start(|template| {
        let bootstrap = places.fill(&template);
        let shows = "enable_x_ratelimit_headers: DRAFT_VERSION_03";
        if filter_shows { bootstrap } else { replace(&bootstrap, shows, "") }
    });
    let response = recorder.envoy.get("/").send();
    assert_eq!(response.status, 200);
    response.header("x-ratelimit-limit")
}

#[test]
fn item_of_the_route_has_a_limit_and_an_option_for_its_headers() {
    let (on, off) = ("DRAFT_VERSION_03", "\"OFF\"");
    let page = page();
    assert!(page.contains(&format!("`x_ratelimit_option: {on}` or `{off}`")));
    assert!(page.contains("`limit: { rate_limit: { requests_per_unit: 5, unit: MINUTE } }`"));
    assert_eq!(shown_limits(["", ""], true).as_deref(), Some("5, 5;w=86400, 50;w=86400"));
    assert_eq!(shown_limits(["", off], true).as_deref(), Some("5, 5;w=86400"));
    assert_eq!(shown_limits([on, ""], false).as_deref(), Some("5, 5;w=86400"));
    // The limit with the least left is off.
    assert_eq!(shown_limits([off, ""], true), None);
    assert_eq!(shown_limits(["", on], false), None);
}

#[test]
fn failure_mode_decides_if_tollkeeper_does_not_answer() {
    let page = page();
    let rows = table(section(&page, "If tollkeeper does not answer"));
    assert_eq!(rows.len(), 5);
    for row in rows {
        let [filter, status, error, allowed] = row[..] else { panic!("{row:?}") };
        let settings = filter.split('`').skip(1).step_by(2).collect::<Vec<_>>().join("\n                      ");
        let status: u16 = if status.starts_with("what the upstream") { 200 } else { status.parse().unwrap() };
        // Nobody listens there.
        let tollkeeper = Port::reserve();
        let places = Places { route: limits("route"), filter: settings, ..Places::default() };
        let envoy = Envoy::start_file(TEMPLATE, &[tollkeeper.number()], |template| places.fill(&template));
        assert_eq!(envoy.get("/").send().status, status, "{filter}");
        let stat = |name: &str| envoy.stat(&format!("cluster.upstream.ratelimit.{name}")).to_string();
        assert_eq!((stat("error").as_str(), stat("failure_mode_allowed").as_str()), (error, allowed), "{filter}");
    }
}

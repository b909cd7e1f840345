//! Alerts and dashboard: they parse, fire when they should, name metrics that exist, and lead to their runbooks.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use serde_json::Value;

use super::{RENDERINGS, documents, list, run_tool, tool};
use kit::envoy::Envoy;
use kit::port::Port;
use kit::tollkeeper::with_rules;
use kit::{grpc, http, read, repository, wait_for};

fn promtool(arguments: &[&str]) -> Result<String, String> {
    run_tool(Command::new(tool("PROMTOOL")).args(arguments), "")
}

/// Alerts in the format of Prometheus.
fn alerts() -> Vec<Value> {
    let file = documents(&read(&repository("deploy/prometheus/alerts.yaml"))).remove(0);
    list(&file["groups"]).iter().flat_map(|group| list(&group["rules"])).cloned().collect()
}

fn dashboard() -> Value {
    serde_json::from_str(&read(&repository("deploy/grafana/tollkeeper.json"))).unwrap()
}

/// Panels, without the rows that separate them.
fn panels(dashboard: &Value) -> impl Iterator<Item = &Value> {
    list(&dashboard["panels"]).iter().filter(|panel| panel["type"] != "row")
}

/// Title and expression of each query, with Grafana's variables replaced.
fn queries(dashboard: &Value) -> Vec<(String, String)> {
    let title = |panel: &Value| panel["title"].as_str().unwrap().to_owned();
    let targets = panels(dashboard).flat_map(|panel| list(&panel["targets"]).iter().map(move |it| (title(panel), it)));
    let notes = list(&dashboard["annotations"]["list"]).iter().map(|it| ("annotation".to_owned(), it));
    let filled = |query: &str| query.replace("$__rate_interval", "5m").replace("$job", ".*").replace("$instance", ".*");
    targets.chain(notes).map(|(place, it)| (place, filled(it["expr"].as_str().unwrap()))).collect()
}

/// Start of the metrics of Envoy that alerts and panels query: `cluster.NAME.ratelimit.*`.
const ENVOY_METRICS: [&str; 1] = ["envoy_cluster_ratelimit_"];

/// Metric names in an expression: words with a prefix of metrics of tollkeeper or Envoy.
fn metrics(expression: &str) -> impl Iterator<Item = &str> {
    let words = expression.split(|character: char| !character.is_ascii_alphanumeric() && character != '_');
    let prefixes = ["tollkeeper_", "ratelimit_", "process_", "envoy_cluster_ratelimit"];
    words.filter(move |word| prefixes.iter().any(|prefix| word.starts_with(prefix)))
}

#[test]
fn alerts_fire_at_their_thresholds_and_not_before() {
    promtool(&["check", "rules", "deploy/prometheus/alerts.yaml"]).unwrap();
    for tests in ["alerts.test.yaml", "alerts.long.test.yaml"] {
        promtool(&["test", "rules", &format!("deploy/prometheus/{tests}")]).unwrap_or_else(|wrong| panic!("{wrong}"));
    }
    // Each is tested both ways.
    let tests = ["alerts.test.yaml", "alerts.long.test.yaml"]
        .map(|name| documents(&read(&repository(&format!("deploy/prometheus/{name}")))).remove(0)["tests"].clone());
    let cases = tests.iter().flat_map(list).flat_map(|test| list(&test["alert_rule_test"]));
    let cases: Vec<_> = cases.collect();
    for alert in alerts() {
        let of_alert = cases.iter().filter(|case| case["alertname"] == alert["alert"]);
        let (quiet, firing): (Vec<_>, Vec<_>) =
            of_alert.copied().partition(|case| list(&case["exp_alerts"]).is_empty());
        assert!(!quiet.is_empty() && !firing.is_empty(), "{}", alert["alert"]);
    }
}

/// Anchor of a heading, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|character| character.is_alphanumeric() || " -".contains(*character));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

#[test]
fn each_alert_has_its_runbook_and_each_runbook_its_alert() {
    let page = read(&repository("docs/runbooks.md"));
    let headings = page.lines().filter_map(|line| line.strip_prefix("## "));
    let headings: BTreeSet<_> = headings.map(anchor).filter(|it| it.starts_with("tollkeeper-")).collect();
    let alerts = alerts();
    let linked = alerts.iter().map(|alert| {
        let url = alert["annotations"]["runbook_url"].as_str().unwrap();
        let (page, anchor) = url.split_once('#').unwrap();
        assert_eq!(page, "docs/runbooks.md");
        let words = anchor.split('-').map(|word| word[..1].to_uppercase() + &word[1..]);
        assert_eq!(alert["alert"], words.collect::<String>(), "{url}");
        anchor.to_owned()
    });
    assert_eq!(linked.collect::<BTreeSet<_>>(), headings);
    for alert in &alerts {
        let severity = alert["labels"]["severity"].as_str().unwrap();
        assert!(["critical", "warning", "info"].contains(&severity), "{severity}");
        assert!(alert["for"].is_string() && alert["annotations"]["summary"].is_string(), "{}", alert["alert"]);
    }
}

/// Envoy's own page, with a prefix and without, as the series of alerts and of the panel.
#[test]
fn alerts_and_panel_know_the_names_that_envoy_gives_its_statistics() {
    let calls_fail = Port::reserve();
    let dashboard = dashboard();
    let of_panel = queries(&dashboard).into_iter().filter(|(_, query)| query.contains("envoy_cluster_ratelimit"));
    let of_panel: Vec<_> = of_panel.map(|(_, query)| query).collect();
    assert_eq!(of_panel.len(), 2, "{of_panel:?}");
    for prefix in ["", "stat_prefix: edge.in, "] {
        let with_prefix = format!("{prefix}domain: gateway");
        let envoy = Envoy::start_with("gateway", &[calls_fail.number()], |text| {
            let field = "domain: gateway\n";
            assert!(text.contains(field), "the filter has another domain");
            let indent = text.lines().find(|line| line.ends_with(field.trim_end())).unwrap();
            let indent = &indent[..indent.find("domain").unwrap()];
            text.replacen(field, &format!("{}\n", with_prefix.replace(", ", &format!("\n{indent}"))), 1)
        });
        envoy.get("/search").send();
        let page = wait_for("Envoy to count a failed call", || {
            let page = envoy.prometheus_page();
            page.contains("failure_mode_allowed{").then_some(page)
        });
        let series = page.lines().filter(|line| line.starts_with("envoy_cluster_ratelimit_")).map(|line| {
            let (series, _) = line.rsplit_once(' ').unwrap();
            let series = series.replace('{', "{job=\"envoy\",namespace=\"edge\",");
            serde_json::json!({ "series": series, "values": "0+60x20" })
        });
        let expected = |alert: &str| {
            let alert = alerts().into_iter().find(|it| it["alert"] == alert).unwrap();
            serde_json::json!({ "expr": alert["expr"], "eval_time": "15m", "exp_samples": [{
                "labels": r#"{envoy_cluster_name="upstream", job="envoy", namespace="edge"}"#,
                "value": if alert["alert"] == "TollkeeperEnvoyErrors" { 300 } else { 1 },
            }]})
        };
        let of_panel = of_panel.iter().map(|query| {
            let labels = r#"{envoy_cluster_name="upstream"}"#;
            serde_json::json!({ "expr": query, "eval_time": "15m", "exp_samples": [{ "labels": labels, "value": 1 }] })
        });
        let cases = ["TollkeeperEnvoyFailOpen", "TollkeeperEnvoyErrors"].map(expected).into_iter().chain(of_panel);
        let test = serde_json::json!({ "evaluation_interval": "1m", "tests": [{
            "interval": "1m", "input_series": series.collect::<Vec<_>>(), "promql_expr_test": cases.collect::<Vec<_>>(),
        }]});
        let file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
        fs::write(file.path(), test.to_string()).unwrap();
        promtool(&["test", "rules", file.path().to_str().unwrap()]).unwrap_or_else(|wrong| panic!("{wrong}\n{test:#}"));
    }
}

#[test]
fn chart_ships_the_same_alerts_and_dashboard() {
    let full = &RENDERINGS[1];
    let rule = full.named("PrometheusRule", "edge-limiter").unwrap();
    let file = read(&repository("deploy/prometheus/alerts.yaml"));
    let with_address =
        file.replace("runbook_url: docs", "runbook_url: https://git.example/edge/tollkeeper/blob/main/docs");
    assert_eq!(rule["spec"], documents(&with_address).remove(0));
    let map = full.named("ConfigMap", "edge-limiter-dashboard").unwrap();
    let shipped: Value = serde_json::from_str(map["data"]["tollkeeper.json"].as_str().unwrap()).unwrap();
    assert_eq!(shipped, dashboard());
}

/// Metric names in the source, whole or composed of two parts.
fn written_names() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut directories = vec![repository("src")];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = read(&path);
                names.extend(text.split('"').skip(1).step_by(2).filter(|it| metrics(it).eq([*it])).map(str::to_owned));
            }
        }
    }
    names
}

/// Metric name without the suffixes of histograms.
fn family(name: &str) -> &str {
    let suffix = ["_bucket", "_count", "_sum"].into_iter().find_map(|suffix| name.strip_suffix(suffix));
    suffix.unwrap_or(name)
}

#[test]
fn queried_metrics_exist() {
    let port = Port::reserve();
    let address = format!("127.0.0.1:{}", port.number());
    let server =
        with_rules("domain: shop\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 1}}]\n")
            .env("USE_PROMETHEUS", "true")
            .env("PROMETHEUS_ADDR", &address)
            .start();
    let scrape = http::get(port.number(), "/metrics").send().text();
    let scraped = scrape.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next().map(str::to_owned));
    let mut known: BTreeSet<String> = scraped.collect();
    assert!(known.len() > 40, "{scrape}");
    drop(server);
    // This scrape lacks the metrics of Redis, TLS and eventual rules.
    known.extend(written_names());
    known.extend(ENVOY_METRICS.map(str::to_owned));
    let dashboard = dashboard();
    let alerts = alerts();
    let of_alerts = alerts.iter().map(|alert| (alert["alert"].to_string(), alert["expr"].as_str().unwrap().to_owned()));
    let mut missing = BTreeSet::new();
    for (place, expression) in of_alerts.chain(queries(&dashboard)) {
        let mut all = metrics(&expression).peekable();
        assert!(all.peek().is_some(), "{place}: {expression} queries no metric of tollkeeper or Envoy");
        missing.extend(all.filter(|name| !known.contains(family(name))).map(|name| format!("{place}: {name}")));
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn rule_decisions_count_rules_with_request_named_metrics() {
    let rules = "domain: shop\ndescriptors:\n\
        - {key: user, value_to_metric: true, rate_limit: {unit: day, requests_per_unit: 5}}\n\
        - {key: path, detailed_metric: true, rate_limit: {unit: day, requests_per_unit: 5}}\n\
        - {key: idle, rate_limit: {unit: day, requests_per_unit: 5}}\n";
    let port = Port::reserve();
    let address = format!("127.0.0.1:{}", port.number());
    let server = with_rules(rules).env("USE_PROMETHEUS", "true").env("PROMETHEUS_ADDR", &address).start();
    let client = grpc::Client::connect(server.grpc_port());
    for (key, times) in [("user", 2), ("path", 3)] {
        for _ in 0..times {
            client.call(&grpc::rate_limit_request("shop", &[(key, "x")])).unwrap();
        }
    }
    let scrape = http::get(port.number(), "/metrics").send().text();
    let met = |rule: &str| {
        let name = format!("tollkeeper_rule_decisions_total{{domain=\"shop\",rule=\"shop.{rule}\"}} ");
        scrape
            .lines()
            .find_map(|line| line.strip_prefix(&name))
            .unwrap_or_else(|| panic!("{name}: {scrape}"))
            .to_owned()
    };
    assert_eq!([met("user"), met("path"), met("idle")], ["2", "3", "0"]);
}

#[test]
fn dashboard_matches_the_grafana_schema() {
    let judged = |dashboard: &Value| {
        run_tool(Command::new(tool("SCHEMAS")).args(["tests/deploy/schemas.py", "dashboard"]), &dashboard.to_string())
    };
    let mut dashboard = dashboard();
    judged(&dashboard).unwrap();
    dashboard["panels"][1]["fieldConfig"]["defaults"]["unitt"] = Value::from("s");
    assert!(judged(&dashboard).unwrap_err().contains("panels[1].fieldConfig.defaults.unitt"));
}

#[test]
fn dashboard_queries_parse() {
    let dashboard = dashboard();
    let queries = queries(&dashboard);
    assert!(queries.len() > 40, "{}", queries.len());
    // promtool parses expressions only as part of rules.
    let rules: Vec<_> = (0..)
        .zip(&queries)
        .map(|(number, (_, query))| serde_json::json!({ "record": format!("query:number_{number}"), "expr": query }))
        .collect();
    let file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
    let groups = serde_json::json!({ "groups": [{ "name": "queries", "rules": rules }] });
    fs::write(file.path(), groups.to_string()).unwrap();
    promtool(&["check", "rules", file.path().to_str().unwrap()]).unwrap_or_else(|wrong| panic!("{wrong}\n{groups:#}"));
}

#[test]
fn dashboard_panels_have_titles_and_do_not_overlap() {
    let dashboard = dashboard();
    let mut taken = BTreeSet::new();
    let mut numbers = BTreeSet::new();
    for panel in list(&dashboard["panels"]) {
        let at = |name: &str| panel["gridPos"][name].as_u64().unwrap();
        assert!(at("x") + at("w") <= 24, "{}", panel["title"]);
        for cell in (at("x")..at("x") + at("w")).flat_map(|x| (at("y")..at("y") + at("h")).map(move |y| (x, y))) {
            assert!(taken.insert(cell), "{} lies on another", panel["title"]);
        }
        assert!(numbers.insert(panel["id"].as_u64().unwrap()), "{}: two with one number", panel["title"]);
        assert!(panel["title"].as_str().is_some_and(|title| !title.is_empty()));
    }
    // Panels use the data source that the user chooses.
    for panel in panels(&dashboard) {
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{}", panel["title"]);
    }
}

//! `docs/cookbook.md`, taken apart: the recipes with what Envoy sends, the rules, other files and the commands.
//!
//! A recipe may have several *ways*: each file of rules is one, with the last block of Envoy's before it.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use kit::{read, repository};

/// A recipe of the page.
#[derive(Debug)]
pub(super) struct Recipe {
    /// Number before its heading.
    pub(super) number: usize,
    /// 1 for the first way of the recipe, 2 for the next.
    pub(super) way: usize,
    /// Its heading, without the number.
    pub(super) heading: String,
    /// Keys of the YAML block that is Envoy's.
    pub(super) envoy: Map<String, Value>,
    /// Text of the YAML block that is a file of rules.
    pub(super) rules: String,
    /// Files that the page shows with `$ cat NAME`, with their text.
    pub(super) files: Vec<(String, String)>,
    /// Other commands, with the lines that the page shows of their outputs.
    pub(super) commands: Vec<Command>,
    /// True if a paragraph names the trap.
    pub(super) has_trap: bool,
}

/// A command and the lines that the page shows of its output.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) text: String,
    pub(crate) output: Vec<String>,
}

impl Recipe {
    /// The first way of the recipe of that number.
    pub(super) fn find(number: usize) -> Self {
        Self::find_way(number, 1)
    }

    /// A way of the recipe of that number.
    pub(super) fn find_way(number: usize, way: usize) -> Self {
        let found = recipes().into_iter().find(|recipe| (recipe.number, recipe.way) == (number, way));
        found.unwrap_or_else(|| panic!("docs/cookbook.md has no recipe {number} in way {way}"))
    }

    /// Keys of a block of Envoy's, added to those of the earlier recipe that its first line names: lists are joined,
    /// and `hits_addend` is the cost in the last of the recipe's `rate_limits`.
    fn parse_envoy(block: &str, heading: &str, earlier: &[Self]) -> Map<String, Value> {
        let own: Option<Map<String, Value>> =
            serde_saphyr::from_str(block).unwrap_or_else(|error| panic!("{heading}: {error}"));
        let mut own = own.unwrap_or_default();
        let Some(named) = block.strip_prefix("# as in recipe ") else { return own };
        let number: String = named.chars().take_while(char::is_ascii_digit).collect();
        let base = earlier.iter().find(|recipe| recipe.number.to_string() == number);
        let mut envoy = base.unwrap_or_else(|| panic!("{heading}: no recipe {number} stands before it")).envoy.clone();
        if let Some(cost) = own.remove("hits_addend") {
            let limits = &mut envoy["typed_per_filter_config"]["envoy.filters.http.ratelimit"]["rate_limits"];
            limits.as_array_mut().and_then(|limits| limits.last_mut()).expect("there are limits")["hits_addend"] = cost;
        }
        for (key, value) in own {
            match (envoy.get_mut(&key), value) {
                (Some(Value::Array(list)), Value::Array(more)) => list.extend(more),
                (_, value) => drop(envoy.insert(key, value)),
            }
        }
        envoy
    }

    /// All ways of a recipe.
    fn parse(section: &str, earlier: &[Self]) -> Vec<Self> {
        let (heading, text) = section.split_once('\n').expect("a heading is a line");
        let (number, heading) = heading.split_once(". ").expect("recipes are numbered");
        let (mut envoy, mut ways) = (None, Vec::new());
        // What follows a block, up to the next one, belongs to it.
        for part in text.split("```yaml\n").skip(1) {
            let (block, after) = part.split_once("```").expect("a block ends");
            if !block.starts_with("domain: ") {
                envoy = Some(Self::parse_envoy(block, heading, earlier));
                continue;
            }
            let (mut files, mut commands) = (Vec::new(), Vec::new());
            for Command { text, output } in shown_commands(after) {
                match text.strip_prefix("cat ") {
                    Some(name) => files.push((name.to_owned(), output.join("\n") + "\n")),
                    None => commands.push(Command { text, output }),
                }
            }
            ways.push(Self {
                number: number.parse().expect("a number"),
                way: ways.len() + 1,
                heading: heading.to_owned(),
                envoy: envoy.clone().unwrap_or_else(|| panic!("{heading}: rules before Envoy")),
                rules: block.to_owned(),
                files,
                commands,
                has_trap: text.contains("\n**Trap:** "),
            });
        }
        ways
    }

    /// Domain of the rules.
    pub(super) fn domain(&self) -> &str {
        self.rules["domain: ".len()..].lines().next().expect("a domain has a name")
    }

    /// Changes the rules, for the traps; panics if the page does not have `from`.
    pub(super) fn replace_in_rules(&mut self, from: &str, to: &str) {
        assert!(self.rules.contains(from), "{}: the rules have no {from:?}", self.heading);
        self.rules = self.rules.replace(from, to);
    }

    /// Changes what Envoy sends, for the traps; panics if the page does not have `from`.
    pub(super) fn replace_in_envoy(&mut self, from: &str, to: &str) {
        let text = serde_json::to_string(&self.envoy).expect("what was read can be written");
        assert!(text.contains(from), "{}: Envoy has no {from:?}", self.heading);
        self.envoy = serde_json::from_str(&text.replace(from, to)).expect("the change keeps JSON");
    }

    /// Writes the rules, as `DOMAIN.yaml`, and the other files into a directory.
    pub(super) fn write_files(&self, directory: &Path) {
        fs::write(directory.join(format!("{}.yaml", self.domain())), &self.rules).expect("a file can be written");
        for (name, text) in &self.files {
            fs::write(directory.join(name), text).expect("a file can be written");
        }
    }

    /// The bootstrap of an Envoy with what the page shows.
    pub(super) fn bootstrap(&self, template: &str) -> String {
        let mut connection_manager = vec!["use_remote_address: true".to_owned()];
        let mut filter = vec![format!("domain: {}", self.domain())];
        let (mut route, mut beside_route, mut filters_before) = (Vec::new(), Vec::new(), Vec::new());
        let (mut grpc_service, mut cluster) = (Vec::new(), Vec::new());
        let (mut filters_behind, mut routes_before) = (Vec::new(), Vec::new());
        let mut route_match = "{ prefix: / }".to_owned();
        if !self.envoy.contains_key("circuit_breakers") {
            cluster.push(
                "circuit_breakers: { thresholds: [{ max_requests: 100000, max_pending_requests: 100000 }] }".into(),
            );
        }
        if !self.envoy.contains_key("timeout") {
            // Envoy's 20 ms expire on a machine busy with tests, and Envoy fails open.
            filter.push("timeout: 10s".to_owned());
        }
        for (key, value) in &self.envoy {
            let line = format!("{key}: {value}");
            match key.as_str() {
                "rate_limits" => route.push(line),
                "typed_per_filter_config" | "request_headers_to_remove" => beside_route.push(line),
                "routes" => {
                    routes_before.extend(value.as_array().expect("a list").iter().map(|it| format!("- {it}")));
                }
                "http_filters" => {
                    // The rate limit filter without a configuration stands for that of the template.
                    let filters = value.as_array().expect("a list");
                    let is_ours =
                        |it: &Value| it["name"] == "envoy.filters.http.ratelimit" && it["typed_config"].is_null();
                    let own = filters.iter().position(is_ours).unwrap_or(filters.len());
                    let line = |it: &Value| format!("- {it}");
                    filters_before.extend(filters[..own].iter().map(line));
                    filters_behind.extend(filters.iter().skip(own + 1).map(line));
                }
                "timeout" | "failure_mode_deny" => filter.push(line),
                "use_remote_address" => assert_eq!(*value, Value::Bool(true), "{}", self.heading),
                "xff_num_trusted_hops"
                | "upgrade_configs"
                | "stream_idle_timeout"
                | "normalize_path"
                | "merge_slashes"
                | "early_header_mutation_extensions" => connection_manager.push(line),
                "match" => route_match = value.to_string(),
                "initial_metadata" => grpc_service.push(line),
                "circuit_breakers" | "health_checks" => cluster.push(line),
                _ => panic!("{}: where does {key} belong?", self.heading),
            }
        }
        let places = [
            ("CONNECTION MANAGER", connection_manager),
            ("FILTERS BEFORE", filters_before),
            ("FILTER", filter),
            ("GRPC SERVICE", grpc_service),
            ("FILTERS BEHIND", filters_behind),
            ("MATCH", routes_before.into_iter().chain([format!("- match: {route_match}")]).collect()),
            ("ROUTE", route),
            ("BESIDE ROUTE", beside_route),
            ("CLUSTER", cluster),
        ];
        let asks = ["rate_limits", "typed_per_filter_config"].iter().any(|key| self.envoy.contains_key(*key));
        let bootstrap = places.into_iter().fold(template.to_owned(), |text, (place, lines)| {
            let (before, after) = text.split_once(&format!("# {place}\n")).expect("the template has each place");
            let indent = format!("\n{}", before.rsplit('\n').next().expect("a line begins"));
            format!("{before}{}\n{after}", lines.join(&indent))
        });
        if asks { bootstrap } else { without_filter_that_asks(&bootstrap) }
    }
}

/// The bootstrap without the filter that asks for each request.
fn without_filter_that_asks(bootstrap: &str) -> String {
    let (before, rest) = bootstrap.split_once("- name: envoy.filters.http.ratelimit\n").expect("there is one");
    let (_, after) = rest.split_once("- name: envoy.filters.http.router\n").expect("a router follows it");
    format!("{before}- name: envoy.filters.http.router\n{after}")
}

/// All recipes of the page in all their ways, in its order.
pub(super) fn recipes() -> Vec<Recipe> {
    let page = read(&repository("docs/cookbook.md"));
    page.split("\n## ").skip(1).fold(Vec::new(), |mut recipes, section| {
        recipes.extend(Recipe::parse(section, &recipes));
        recipes
    })
}

/// Commands of indented lines that begin with `$ `, continued ones joined, each with the lines below it.
pub(crate) fn shown_commands(text: &str) -> Vec<Command> {
    let mut commands: Vec<Command> = Vec::new();
    let (mut is_open, mut is_continued) = (false, false);
    for line in text.lines() {
        let Some(line) = line.strip_prefix("    ") else {
            is_open = false;
            continue;
        };
        let (part, continues) = line.strip_suffix('\\').map_or((line, false), |part| (part.trim_end(), true));
        if let Some(command) = part.strip_prefix("$ ") {
            commands.push(Command { text: command.to_owned(), output: Vec::new() });
            (is_open, is_continued) = (true, continues);
        } else if is_open && is_continued {
            let command = &mut commands.last_mut().expect("it began").text;
            *command += &format!(" {}", part.trim_start());
            is_continued = continues;
        } else if is_open {
            commands.last_mut().expect("it began").output.push(line.to_owned());
        }
    }
    commands
}

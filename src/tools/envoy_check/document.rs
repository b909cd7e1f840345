//! Forms in which Envoy's configuration comes: a bootstrap, a configuration dump, or patches of it.
//!
//! An EnvoyFilter of Istio and an EnvoyPatchPolicy of Envoy Gateway hold parts of a configuration that a control plane
//! makes. All patches of a file become one connection manager with its routes, and the clusters. Any other document is
//! refused, because what was not read must not count as absent.
//!
//! Decides: which forms `check --envoy` reads (EnvoyFilter, EnvoyPatchPolicy), and what it refuses.

use std::borrow::Cow;
use std::rc::Rc;

use super::config_node::ConfigNode;
use crate::base::text::truncate_and_escape;
use crate::rules::yaml::{Position, Scalar, YamlContent, YamlNode};

/// Type of a connection manager.
pub(super) const CONNECTION_MANAGER_TYPE: &str =
    "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";

/// Maximum length of a name in a message, in characters.
const MAX_NAME_CHARS: usize = 60;

/// Maximum number of patches of a file: each is compared with others at its place.
const MAX_PATCHES: usize = 10_000;

/// Maximum number of steps of the place of a patch.
const MAX_STEPS: usize = 32;

/// Fields of a bootstrap, one of which each has.
const BOOTSTRAP_FIELDS: [&str; 5] = ["static_resources", "dynamic_resources", "admin", "node", "layered_runtime"];

/// Field of [`join_patches`] with messages that stand elsewhere than in the connection manager.
const OTHER_MESSAGES: &str = "others";

/// Form of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// What Envoy starts with.
    Bootstrap,
    /// Page `/config_dump`, or a part of it.
    Dump,
    /// Messages without what stands around them, such as a file of listeners.
    Part,
    /// Patches of a configuration that is not in the file.
    Patches,
}

/// A document that can be checked.
pub(super) struct Document<'a> {
    pub(super) root: YamlNode<'a>,
    pub(super) form: Form,
}

/// A document that is not read: where, what it is, and what to give instead.
pub(super) struct Refusal {
    pub(super) at: Position,
    pub(super) what: String,
    pub(super) fix: &'static str,
}

/// What to give where a part is missing.
pub(super) const GIVE_DUMP: &str = "give the configuration of a running Envoy: `curl -s localhost:9901/config_dump`";

/// Sorts the documents of a file into those that can be checked, and others.
pub(super) fn sort_documents(roots: Vec<YamlNode<'_>>) -> (Vec<Document<'_>>, Vec<Refusal>) {
    let (mut documents, mut refusals, mut patches) = (Vec::new(), Vec::new(), Vec::new());
    let mut waiting: Vec<YamlNode<'_>> = roots.into_iter().rev().collect();
    while let Some(root) = waiting.pop() {
        let node = ConfigNode::root(&root);
        let kind = node.text("kind").filter(|_| node.field("apiVersion").is_some());
        let form = match kind {
            Some("List") => {
                let items = node.field("items");
                waiting.extend(items.iter().flat_map(ConfigNode::elements).map(|item| item.yaml().clone()));
                continue;
            }
            Some("EnvoyFilter") => {
                patches.extend(
                    node.field_at(&["spec", "configPatches"])
                        .iter()
                        .flat_map(ConfigNode::elements)
                        .filter_map(|patch| read_istio_patch(&patch)),
                );
                continue;
            }
            Some("EnvoyPatchPolicy") => {
                patches.extend(
                    node.field_at(&["spec", "jsonPatches"])
                        .iter()
                        .flat_map(ConfigNode::elements)
                        .filter_map(|patch| read_json_patch(&patch)),
                );
                continue;
            }
            Some(kind) => {
                refusals.push(refuse_kind(&node, kind));
                continue;
            }
            None if !node.items("configs").is_empty() => Form::Dump,
            None if BOOTSTRAP_FIELDS.iter().any(|name| node.field(name).is_some()) => Form::Bootstrap,
            None if node.type_name_and_message().is_some() || !node.items("resources").is_empty() => Form::Part,
            None => {
                refusals.extend(refuse_other(&node));
                continue;
            }
        };
        documents.push(Document { root, form });
    }
    if patches.len() > MAX_PATCHES {
        let what = format!("these are more than {MAX_PATCHES} patches");
        refusals.push(Refusal { at: patches[0].value.at, what, fix: GIVE_DUMP });
    } else if !patches.is_empty() {
        documents.push(Document { root: join_patches(patches), form: Form::Patches });
    }
    (documents, refusals)
}

fn refuse_kind(node: &ConfigNode<'_, '_>, kind: &str) -> Refusal {
    let fix = match kind {
        "ConfigMap" | "Secret" => "give the text of the bootstrap in it, with `kubectl get ... -o jsonpath=...`",
        "RateLimitConfig" => "give the rules as PATH, without --envoy",
        _ => GIVE_DUMP,
    };
    let kind = truncate_and_escape(kind, MAX_NAME_CHARS);
    Refusal { at: node.at, what: format!("this is a {kind} of Kubernetes, and no configuration of Envoy"), fix }
}

/// Refuses a document without a known form; an empty one is none.
fn refuse_other(node: &ConfigNode<'_, '_>) -> Option<Refusal> {
    if node.yaml().is_null() {
        return None;
    }
    let has = |name: &str| node.field(name).is_some();
    let (what, fix) = if has("domain") && has("descriptors") {
        ("this is a rule file, and no configuration of Envoy", "give it as PATH, without --envoy")
    } else if ["http_filters", "filter_chains", "virtual_hosts", "listeners", "rate_limits"]
        .iter()
        .any(|name| has(name))
    {
        (
            "this is a part of a configuration, and what stands around it decides what is asked",
            "give the whole bootstrap, or the page /config_dump",
        )
    } else {
        (
            "this is no configuration of Envoy",
            "give a bootstrap, the page /config_dump, an EnvoyFilter or an EnvoyPatchPolicy; `curl -sSf` tells why a download failed",
        )
    };
    Some(Refusal { at: node.at, what: what.to_owned(), fix })
}

/// A value that a patch puts at a place of the joined configuration. `-` in the place is one more element of a list.
struct Patch<'a> {
    place: Vec<String>,
    value: YamlNode<'a>,
    /// Stands before the values at this place so far.
    is_first: bool,
}

fn place(steps: &[&str]) -> Vec<String> {
    steps.iter().map(|step| (*step).to_owned()).collect()
}

/// Reads a patch of an EnvoyFilter. Patches of one virtual host belong together.
fn read_istio_patch<'a>(patch: &ConfigNode<'_, 'a>) -> Option<Patch<'a>> {
    let value = patch.field_at(&["patch", "value"])?;
    let operation = patch.field("patch")?.text("operation").unwrap_or_default();
    let host = patch.field_at(&["match", "routeConfiguration", "vhost"]);
    let host = format!("host {}", host.and_then(|host| host.text("name")).unwrap_or_default());
    let place = match patch.text("applyTo")? {
        "HTTP_FILTER" => place(&["manager", "http_filters", "-"]),
        "VIRTUAL_HOST" => place(&["manager", "route_config", "virtual_hosts", &host]),
        "HTTP_ROUTE" => place(&["manager", "route_config", "virtual_hosts", &host, "routes", "-"]),
        "ROUTE_CONFIGURATION" => place(&["manager", "route_config"]),
        "CLUSTER" => place(&["static_resources", "clusters", "-"]),
        _ => place(&[OTHER_MESSAGES, "-"]),
    };
    Some(Patch { place, value: value.yaml().clone(), is_first: operation == "INSERT_FIRST" })
}

/// Reads a JSON patch of an EnvoyPatchPolicy: its `path`, behind what its `jsonPath` selects.
fn read_json_patch<'a>(patch: &ConfigNode<'_, 'a>) -> Option<Patch<'a>> {
    let operation = patch.field("operation")?;
    let value = operation.field("value")?.yaml().clone();
    let selected = operation.text("jsonPath").unwrap_or_default();
    let mut steps = Vec::new();
    for name in selected.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')) {
        match name {
            "http_filters" | "virtual_hosts" | "routes" => steps.extend([name.to_owned(), "0".to_owned()]),
            "route" | "typed_per_filter_config" | "rate_limits" => steps.push(name.to_owned()),
            _ => {}
        }
    }
    let path = operation.text("path").unwrap_or_default();
    steps
        .extend(path.split('/').filter(|step| !step.is_empty()).map(|step| step.replace("~1", "/").replace("~0", "~")));
    let kind = patch.text("type").unwrap_or_default();
    let find = |name: &str| steps.iter().position(|step| step == name);
    let mut joined =
        match (kind.rsplit('.').next(), find("http_filters"), find("virtual_hosts").or_else(|| find("routes"))) {
            (Some("Cluster"), ..) if steps.is_empty() => place(&["static_resources", "clusters", "-"]),
            (Some("RouteConfiguration"), _, None) => [place(&["manager", "route_config"]), steps].concat(),
            (_, Some(at), _) => [place(&["manager"]), steps.split_off(at)].concat(),
            (_, None, Some(at)) if steps[at] == "routes" => {
                [place(&["manager", "route_config", "virtual_hosts", "0"]), steps.split_off(at)].concat()
            }
            (_, None, Some(at)) => [place(&["manager", "route_config"]), steps.split_off(at)].concat(),
            (_, None, None) => place(&[OTHER_MESSAGES, "-"]),
        };
    if joined.len() > MAX_STEPS {
        joined = place(&[OTHER_MESSAGES, "-"]);
    }
    // A filter that is added at an index moves the others.
    let is_filter = joined.len() == 3 && joined[1] == "http_filters";
    let is_first = is_filter && joined[2] == "0";
    if is_filter {
        "-".clone_into(&mut joined[2]);
    }
    Some(Patch { place: joined, value, is_first })
}

/// A node of the joined configuration that several patches may reach.
#[derive(Default)]
struct Joined<'a> {
    /// What patches put here as a whole.
    values: Vec<YamlNode<'a>>,
    below: Vec<(String, Joined<'a>)>,
}

impl<'a> Joined<'a> {
    fn put(&mut self, steps: &[String], value: YamlNode<'a>, is_first: bool) {
        let Some((step, rest)) = steps.split_first() else {
            self.values.push(value);
            return;
        };
        let known = self.below.iter().position(|(name, _)| name == step && step != "-");
        let at = known.unwrap_or_else(|| {
            let at = if is_first && rest.is_empty() { 0 } else { self.below.len() };
            self.below.insert(at, (step.clone(), Self::default()));
            at
        });
        self.below[at].1.put(rest, value, is_first);
    }

    /// Fields of all mappings that were put here, then what is below.
    fn build(self) -> YamlNode<'a> {
        let at = self.values.first().map_or(Position::default(), |value| value.at);
        if self.below.is_empty() && self.values.len() == 1 {
            return self.values.into_iter().next().unwrap_or_else(|| build_map(at, Vec::new()));
        }
        let is_list =
            self.below.iter().any(|(step, _)| step == "-" || step.starts_with("host ") || step.parse::<u32>().is_ok());
        let mut fields = Vec::new();
        let mut elements = Vec::new();
        for value in self.values {
            match value.content {
                YamlContent::Map(map) => fields.extend(map.iter().cloned()),
                YamlContent::List(list) => elements.extend(list.iter().cloned()),
                YamlContent::Scalar(_) => {}
            }
        }
        if is_list || !elements.is_empty() {
            elements.extend(self.below.into_iter().map(|(_, below)| below.build()));
            return YamlNode { at, content: YamlContent::List(Rc::new(elements)) };
        }
        let below = self.below.into_iter().map(|(name, below)| {
            let below = below.build();
            (build_text(below.at, name), below)
        });
        fields.extend(below);
        build_map(at, fields)
    }
}

fn build_map<'a>(at: Position, fields: Vec<(YamlNode<'a>, YamlNode<'a>)>) -> YamlNode<'a> {
    YamlNode { at, content: YamlContent::Map(Rc::new(fields)) }
}

fn build_text<'a>(at: Position, text: impl Into<Cow<'a, str>>) -> YamlNode<'a> {
    YamlNode { at, content: YamlContent::Scalar(Scalar::new(text.into(), false, None)) }
}

/// Joins all patches into one configuration.
fn join_patches(patches: Vec<Patch<'_>>) -> YamlNode<'_> {
    let mut joined = Joined::default();
    for Patch { place, value, is_first } in patches {
        joined.put(&place, value, is_first);
    }
    let manager = build_text(Position::default(), CONNECTION_MANAGER_TYPE);
    joined.put(&place(&["manager", "@type"]), manager, false);
    joined.build()
}

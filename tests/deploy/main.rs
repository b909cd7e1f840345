//! Tests of everything below `deploy/`: Helm and kustomize render it, the schemas of Kubernetes, of the custom
//! resources and of Grafana validate it, promtool runs the alerts, and Envoy loads the filter for Istio and runs the
//! bootstrap of the compose file.
//!
//! `deploy/install-tools.sh` installs the tools and prints their variables; a missing tool fails the test. No test
//! needs a cluster, so none proves that a pod starts.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, its helpers too")]

#[path = "../generated.rs"]
#[allow(dead_code, reason = "the suite and `.ci/generate` use the rest")]
mod generated;

mod chart;
mod compose;
mod hooks;
mod image;
mod ai_gateway;
mod istio;
mod manifests;
mod monitoring;
mod release;
mod values;

use std::env;
use std::ffi::OsString;
use std::io::Write as _;
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;

use serde_json::Value;

use kit::repository;

/// Versions of Kubernetes to validate against: the oldest that the chart allows, and newer ones.
const KUBERNETES: [&str; 5] = ["1.25", "1.28", "1.31", "1.34", "1.37"];

/// Path of a tool, from the variable `TOLLKEEPER_TEST_NAME`.
fn tool(name: &str) -> OsString {
    let variable = format!("TOLLKEEPER_TEST_{name}");
    env::var_os(&variable).unwrap_or_else(|| {
        panic!("{variable} is not set: run tests/run.sh, or set what deploy/install-tools.sh prints")
    })
}

/// Standard output of a tool for this input; its standard error if it fails.
fn run_tool(command: &mut Command, input: &str) -> Result<String, String> {
    command.current_dir(repository("")).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_owned();
    // Write from a thread: a tool that prints much before it has read its input would deadlock otherwise.
    let writer = std::thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    writer.join().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    if status.success() { Ok(text(stdout)) } else { Err(text(stderr)) }
}

/// Manifests of the chart as the release `edge` with these arguments, or Helm's error.
fn helm(arguments: &[&str]) -> Result<String, String> {
    let mut command = Command::new(tool("HELM"));
    command.args(["template", "edge", "deploy/chart", "--namespace", "limits", "--kube-version", "1.34.0"]);
    command.args(["--values", "deploy/chart/ci/image-values.yaml"]);
    run_tool(command.args(arguments), "")
}

fn kustomize(directory: &str) -> String {
    let mut command = Command::new(tool("KUSTOMIZE"));
    run_tool(command.args(["build", directory]), "").unwrap_or_else(|problem| panic!("{directory}: {problem}"))
}

/// The documents of a YAML stream that are not empty.
fn documents(yaml: &str) -> Vec<Value> {
    let all: Vec<Value> = serde_saphyr::from_multiple(yaml).unwrap_or_else(|error| panic!("{error}\n{yaml}"));
    all.into_iter().filter(|document| !document.is_null()).collect()
}

/// Manifests as they are applied together.
struct Rendering {
    /// Their origin, for messages.
    name: &'static str,
    yaml: String,
    manifests: Vec<Value>,
}

impl Rendering {
    fn new(name: &'static str, yaml: String) -> Self {
        Self { name, manifests: documents(&yaml), yaml }
    }

    fn of_kind<'a>(&'a self, kind: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
        let kind = kind.to_owned();
        self.manifests.iter().filter(move |manifest| manifest["kind"] == kind.as_str())
    }

    /// The manifest of that kind and name.
    fn named(&self, kind: &str, name: &str) -> Option<&Value> {
        self.of_kind(kind).find(|manifest| manifest["metadata"]["name"] == name)
    }

    /// The Deployment of tollkeeper itself.
    fn deployment(&self) -> &Value {
        let mut all = self.of_kind("Deployment");
        let first = all.next().unwrap_or_else(|| panic!("{}: no Deployment", self.name));
        assert!(all.next().is_none(), "{}: more than one Deployment", self.name);
        first
    }

    /// The container of tollkeeper itself.
    fn container(&self) -> &Value {
        &self.deployment()["spec"]["template"]["spec"]["containers"][0]
    }

    /// Environment variables with literal values.
    fn environment(&self) -> Vec<(&str, &str)> {
        let all = list(&self.container()["env"]).iter();
        all.filter_map(|variable| Some((variable["name"].as_str()?, variable["value"].as_str()?))).collect()
    }

    fn setting(&self, name: &str) -> &str {
        let found = self.environment().into_iter().find(|(other, _)| *other == name);
        found.unwrap_or_else(|| panic!("{}: {name} is not set", self.name)).1
    }
}

/// Elements of a list; empty for any other value.
fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The chart with minimal and with full values, and both kustomize renderings.
static RENDERINGS: LazyLock<[Rendering; 4]> = LazyLock::new(|| {
    [
        Rendering::new("chart, few values", helm(&[]).unwrap()),
        Rendering::new("chart, all values", helm(&["-f", "tests/deploy/full.values.yaml"]).unwrap()),
        Rendering::new("kubernetes", kustomize("deploy/kubernetes")),
        Rendering::new("kubernetes-redis", kustomize("deploy/kubernetes-redis")),
    ]
});

/// Validates manifests with the schemas of Kubernetes and custom resources; returns the tool's output or its errors.
fn validate(manifests: &str) -> Result<String, String> {
    let mut command = Command::new(tool("SCHEMAS"));
    command.args(["tests/deploy/schemas.py", "manifests"]).arg(tool("CRDS")).args(KUBERNETES);
    run_tool(&mut command, manifests)
}

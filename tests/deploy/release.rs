//! Continuous integration and releases, as far as they can be checked without GitHub: actionlint reads the workflows,
//! their actions are pinned, and the scripts that they call produce what a release consists of.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::tempdir;

use crate::{documents, run_tool, tool};
use kit::tollkeeper::program_path;
use kit::{read, repository};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Path and text of each workflow.
fn workflows() -> Vec<(String, String)> {
    let files = fs::read_dir(repository(".github/workflows")).unwrap();
    let mut all: Vec<_> =
        files.map(|file| file.unwrap().path()).map(|path| (path.display().to_string(), read(&path))).collect();
    all.sort();
    assert!(all.len() >= 2, "{all:?}");
    all
}

fn script(name: &str) -> Command {
    let mut command = Command::new(repository(".ci").join(name));
    command.current_dir(repository(""));
    command
}

fn succeed(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{command:?}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

fn fail(command: &mut Command) -> String {
    let Output { status, stderr, .. } = command.output().unwrap();
    assert!(!status.success(), "{command:?} succeeded");
    String::from_utf8(stderr).unwrap()
}

#[test]
fn workflows_pass_actionlint() {
    let mut command = Command::new(tool("ACTIONLINT"));
    // shellcheck is not installed everywhere.
    command.args(["-shellcheck=", "-pyflakes="]).args(workflows().iter().map(|(path, _)| path));
    run_tool(&mut command, "").unwrap_or_else(|problems| panic!("{problems}"));
}

#[test]
fn actions_are_pinned_to_one_commit_each() {
    let mut commits = BTreeMap::new();
    for (path, text) in workflows() {
        for line in text.lines().filter_map(|line| line.trim_start().trim_start_matches("- ").strip_prefix("uses: ")) {
            if line.starts_with("./") {
                continue;
            }
            let (action, pin) = line.split_once('@').unwrap();
            let (commit, version) = pin.split_once(" # v").unwrap_or_else(|| panic!("{path}: no version: {line}"));
            let is_commit = commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
            assert!(is_commit && version.contains('.'), "{path}: {line}");
            let first = commits.entry(action.to_owned()).or_insert_with(|| commit.to_owned());
            assert_eq!(first, commit, "{path}: {action}");
        }
    }
    assert!(commits.len() >= 8, "{commits:?}");
}

#[test]
fn workflows_grant_no_more_than_reading_by_default() {
    for (path, text) in workflows() {
        let workflow = documents(&text).remove(0);
        let permissions = workflow["permissions"].as_object().unwrap_or_else(|| panic!("{path}: no permissions"));
        assert!(permissions.values().all(|permission| permission == "read"), "{path}");
        assert!(!text.contains("pull_request_target"), "{path}: runs code of a stranger with our secrets");
        for (name, job) in workflow["jobs"].as_object().unwrap() {
            // A job that calls a workflow has the time limits of that one.
            assert!(job["uses"].is_string() || name == "names" || job["timeout-minutes"].is_number(), "{path}: {name}");
        }
    }
}

/// What a tool from a registry does with such a job's rights is beyond our control.
#[test]
fn jobs_with_rights_compile_no_tools_and_builders_attest_what_they_build() {
    let release = documents(&read(&repository(".github/workflows/release.yml"))).remove(0);
    let mut attested = 0;
    for (name, job) in release["jobs"].as_object().unwrap() {
        let permissions = job["permissions"].as_object().unwrap();
        let steps = job["steps"].as_array().map(Vec::as_slice).unwrap_or_default();
        let runs = |text: &str| steps.iter().any(|step| step["run"].as_str().is_some_and(|run| run.contains(text)));
        let uses =
            |action: &str| steps.iter().any(|step| step["uses"].as_str().is_some_and(|uses| uses.starts_with(action)));
        let has_rights = permissions.values().any(|permission| permission == "write");
        assert!(!(has_rights && runs("cargo install")), "{name} compiles a tool with rights");
        assert!(
            !(uses("actions/attest-build-provenance") && uses("actions/download-artifact")),
            "{name} attests what it did not build"
        );
        attested += usize::from(uses("actions/attest-build-provenance"));
    }
    assert_eq!(attested, 2, "image and archives; chart and compose.yaml");
}

#[test]
fn crates_and_actions_are_looked_at_on_a_schedule() {
    let dependabot = documents(&read(&repository(".github/dependabot.yml"))).remove(0);
    let ecosystems: Vec<_> =
        dependabot["updates"].as_array().unwrap().iter().map(|it| it["package-ecosystem"].as_str().unwrap()).collect();
    assert_eq!(ecosystems, ["github-actions", "cargo", "docker"]);
    let nightly = documents(&read(&repository(".github/workflows/nightly.yml"))).remove(0);
    let steps = nightly["jobs"]["steps"]["strategy"]["matrix"]["step"].to_string();
    let script = read(&repository(".ci/nightly"));
    for step in ["advisories", "fuzz"] {
        assert!(steps.contains(step) && script.contains(&format!("\n{step}() {{")), "{step}: {steps}");
    }
    assert!(script.contains("cargo deny check"), "{script}");
}

#[test]
fn nothing_names_an_owner() {
    for path in ["deploy", ".github/workflows", ".ci", "README.md", "CONTRIBUTING.md", "SECURITY.md", "docs"] {
        for (path, text) in texts(&repository(path)) {
            assert!(!text.contains("ghcr.io/tollkeeper") && !text.contains("github.com/tollkeeper"), "{path}");
        }
    }
}

/// Path and text of a file, or of all text files in a directory.
fn texts(path: &Path) -> Vec<(String, String)> {
    if path.is_dir() {
        return fs::read_dir(path).unwrap().flat_map(|entry| texts(&entry.unwrap().path())).collect();
    }
    fs::read_to_string(path).map(|text| (path.display().to_string(), text)).into_iter().collect()
}

#[test]
fn notes_are_the_changelog_of_the_version() {
    let notes = succeed(script("release-notes").arg(format!("v{VERSION}")));
    assert!(notes.contains("### ") && !notes.contains("\n## "), "{notes}");
    // A candidate has the notes of its version, but the version of no file.
    let error = fail(script("release-notes").arg("v99.0.0"));
    assert!(error.contains(&format!("Cargo.toml has version '{VERSION}', the tag says 99.0.0")), "{error}");
    let error = fail(script("release-notes").arg(VERSION));
    assert!(error.contains("usage"), "{error}");
}

#[test]
fn archives_hold_the_program_and_are_reproducible() {
    let directory = tempdir().unwrap();
    // That of amd64 runs: it writes its manual pages and completions.
    let program_of = |arch| match arch {
        "amd64" => format!("#!/bin/sh\nexec '{}' \"$@\"\n", program_path().display()),
        other => other.to_owned(),
    };
    for arch in ["amd64", "arm64"] {
        let programs = directory.path().join(format!("programs/linux_{arch}"));
        fs::create_dir_all(&programs).unwrap();
        fs::write(programs.join("tollkeeper"), program_of(arch)).unwrap();
    }
    let pack = |output: &str| {
        succeed(
            script("release-archives")
                .arg(VERSION)
                .arg(directory.path().join("programs"))
                .arg(directory.path().join(output)),
        );
        ["amd64", "arm64"]
            .map(|arch| directory.path().join(output).join(format!("tollkeeper-{VERSION}-linux-{arch}.tar.gz")))
    };
    let [first, second] = [pack("first"), pack("second")];
    for (arch, (first, second)) in ["amd64", "arm64"].into_iter().zip(first.iter().zip(&second)) {
        assert!(fs::read(first).unwrap() == fs::read(second).unwrap(), "{arch} differs between two runs");
        let unpacked = directory.path().join(arch);
        fs::create_dir(&unpacked).unwrap();
        succeed(Command::new("tar").arg("--extract").arg("--file").arg(first).arg("--directory").arg(&unpacked));
        let content = unpacked.join(format!("tollkeeper-{VERSION}-linux-{arch}"));
        let program = content.join("tollkeeper");
        assert_eq!(read(&program), program_of(arch));
        assert_eq!(fs::metadata(&program).unwrap().permissions().mode() & 0o777, 0o755);
        for file in ["LICENSE", "README.md", "example.yaml", "tollkeeper.env", "tollkeeper.service"] {
            assert!(content.join(file).is_file(), "{file}");
        }
        for file in ["man1/tollkeeper.1", "man1/tollkeeper-check.1", "completions/tollkeeper.bash"] {
            assert!(read(&content.join(file)).contains("tollkeeper"), "{file}");
        }
    }
}

#[test]
fn released_chart_names_its_image_and_its_home() {
    let directory = tempdir().unwrap();
    let (image, home) = ("registry.example/edge/tollkeeper", "https://git.example/edge/tollkeeper");
    let mut package = script("release-chart");
    package.env("TOLLKEEPER_TEST_HELM", tool("HELM"));
    succeed(package.args(["9.8.7", image, home]).arg(directory.path()));
    let archive = directory.path().join("tollkeeper-9.8.7.tgz");
    let helm = |arguments: &[&str]| {
        let mut command = Command::new(tool("HELM"));
        run_tool(command.args(arguments).arg(&archive), "").unwrap_or_else(|problem| panic!("{problem}"))
    };
    let chart = documents(&helm(&["show", "chart"])).remove(0);
    assert_eq!((&chart["version"], &chart["appVersion"]), (&"9.8.7".into(), &"9.8.7".into()));
    assert_eq!((&chart["home"], &chart["sources"][0]), (&home.into(), &home.into()));
    let images = chart["annotations"]["artifacthub.io/images"].as_str().unwrap();
    assert!(images.contains(&format!("image: {image}:9.8.7")), "{images}");
    let set = ["template", "edge", "--kube-version", "1.34.0", "--set", "prometheusRule.enabled=true"];
    let manifests = helm(&set);
    assert!(manifests.contains("helm.sh/hook: test"), "the package lacks templates/tests");
    assert!(manifests.contains(&format!("runbook_url: {home}/blob/v9.8.7/docs/runbooks.md#tollkeeper-")));
    let manifests = documents(&manifests);
    let deployment = manifests.iter().find(|manifest| manifest["kind"] == "Deployment").unwrap();
    let container: &Value = &deployment["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["image"], format!("{image}:9.8.7"));
}

#[test]
fn systemd_unit_starts_with_its_example_settings() {
    let unit = read(&repository("deploy/systemd/tollkeeper.service"));
    let settings = read(&repository("deploy/systemd/tollkeeper.env"));
    let settings: Vec<_> =
        settings.lines().filter_map(|line| line.split_once('=')).filter(|(name, _)| !name.starts_with('#')).collect();
    assert!(settings.len() >= 5, "{settings:?}");
    let checks: Vec<_> = unit.lines().filter_map(|line| line.strip_prefix("ExecStartPre=")).collect();
    assert_eq!(checks.len(), 2);
    for check in checks {
        let arguments = check.strip_prefix("/usr/local/bin/tollkeeper ").unwrap();
        let arguments = arguments.replace("/etc/tollkeeper/rules.yaml", "config/example.yaml");
        let mut command = Command::new(program_path());
        command.current_dir(repository("")).env_clear().envs(settings.iter().copied()).args(arguments.split(' '));
        succeed(&mut command);
    }
    let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/local/bin/tollkeeper ")).unwrap();
    assert_eq!(start, "serve --config /etc/tollkeeper/rules.yaml");
    for hardening in ["DynamicUser=yes", "CapabilityBoundingSet=\n", "NoNewPrivileges=yes", "ProtectSystem=strict"] {
        assert!(unit.contains(hardening), "{hardening}");
    }
}

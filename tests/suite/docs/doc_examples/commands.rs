//! Commands of the documentation: each is run as it is written, or listed with the reason why it cannot be.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::tools::simulate::Log;
use kit::tollkeeper::{inherited_env, program_path};
use kit::{read, repository};

/// First words of a command; other indented lines are settings, outputs and files.
const PROGRAMS: [&str; 14] = [
    "tollkeeper",
    "cargo",
    "curl",
    "docker",
    "git",
    "grpcurl",
    "helm",
    "kubectl",
    "nft",
    "openssl",
    "python3",
    "redis-cli",
    "sudo",
    "tar",
];

/// Needs a server at the address of the example; `help_examples` and the modules of the pages run such commands.
const SERVER: &str = "it calls a server";
/// Runs until it is stopped, on fixed ports; the kit starts the program with these settings.
const SERVES: &str = "it serves until it is stopped";
const CLUSTER: &str = "it needs a cluster of Kubernetes";
const CHANGES: &str = "it changes this machine";

/// Pages and beginnings of commands that are not run, with the reason.
const NOT_RUN: &[(&str, &str, &str)] = &[
    ("README.md", "docker compose", "it needs Docker; the module `compose` of `deploy` runs what is in the file"),
    ("README.md", "helm install", CLUSTER),
    ("README.md", "cargo run -- serve", SERVES),
    ("README.md", "cargo run -- call", SERVER),
    ("calling.md", "tollkeeper serve", SERVES),
    ("calling.md", "curl", SERVER),
    ("calling.md", "grpcurl", SERVER),
    ("calling.md", "tollkeeper call", SERVER),
    ("coming-from-envoyproxy-ratelimit.md", "tollkeeper check /data/", "its files are those of the reader"),
    ("coming-from-envoyproxy-ratelimit.md", "tollkeeper call --addr", SERVER),
    ("coming-from-envoyproxy-ratelimit.md", "tollkeeper explain --addr", SERVER),
    ("concurrency.md", "cargo run --release", SERVES),
    ("concurrency.md", "tollkeeper check --envoy", "the module `envoy_check` checks these files"),
    ("cookbook.md", "curl", SERVER),
    ("cookbook.md", "tollkeeper block", SERVER),
    ("cookbook.md", "tollkeeper unblock", SERVER),
    ("cookbook.md", "tollkeeper top", SERVER),
    ("cookbook.md", "tollkeeper explain", "the module `cookbook` runs and compares them"),
    ("decision-log.md", "TOLLKEEPER_DECISION_LOG=file:/var/log/", SERVES),
    ("decision-log.md", "tollkeeper events", SERVER),
    ("envoy.md", "LOG_LEVEL=debug", SERVES),
    ("envoy-check.md", "tollkeeper check --envoy", "the module `envoy_check` checks such files"),
    ("envoy-ai-gateway.md", "kubectl", CLUSTER),
    ("envoy-ai-gateway.md", "curl", CLUSTER),
    ("envoy-gateway.md", "kubectl", CLUSTER),
    ("envoy-gateway.md", "curl", CLUSTER),
    ("layers.md", "sudo nft -f", CHANGES),
    ("layers.md", "nft -c", "`nft_accepts_the_nftables_example` runs it"),
    ("memcache.md", "BACKEND_TYPE=memcache", SERVES),
    ("metrics.md", "OTEL_METRICS_EXPORTER=otlp", SERVES),
    ("operations.md", "tollkeeper block", SERVER),
    ("operations.md", "tollkeeper top", SERVER),
    ("operations.md", "tollkeeper unblock", SERVER),
    ("operations.md", "kubectl", CLUSTER),
    ("operations.md", "curl", SERVER),
    ("performance.md", "cargo run --release --manifest-path", SERVER),
    ("quota.md", "TOLLKEEPER_RLQS=true cargo run", SERVES),
    ("quota.md", "curl", SERVER),
    ("quota.md", "tollkeeper top", SERVER),
    ("redis.md", "REDIS_URL=redis:6379", SERVES),
    ("rules.md", "redis-cli", SERVER),
    ("security.md", "GRPC_SERVER_USE_TLS=true", SERVES),
    ("security.md", "tollkeeper call --addr", SERVER),
    ("simulate.md", "TOLLKEEPER_DECISION_LOG=file:", SERVES),
    (
        "simulate.md",
        "tollkeeper simulate --rules rules.yaml --table",
        "its rules have a table; `help_examples` runs it",
    ),
    ("traces.md", "docker run", "it needs the network"),
    ("traces.md", "TRACING_ENABLED=true", SERVES),
    ("traces.md", "tollkeeper call", SERVER),
    ("troubleshooting.md", "curl", SERVER),
    ("troubleshooting.md", "redis-cli", SERVER),
    ("troubleshooting.md", "tollkeeper explain --addr", SERVER),
    ("troubleshooting.md", "tollkeeper top", SERVER),
    ("troubleshooting.md", "tollkeeper why", "its log is that of the reader"),
    ("why.md", "tollkeeper why", "its log is of another day; the module `why` compares such outputs"),
];

/// Commands of a page: indented lines and those in a block of a shell, continued ones joined.
fn commands(page: &str) -> Vec<String> {
    let mut commands: Vec<String> = Vec::new();
    let (mut fence, mut is_continued) = (None, false);
    for line in page.lines() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            fence = if fence.is_some() { None } else { Some(language) };
            continue;
        }
        let is_shown = fence.map_or(line.starts_with("    "), |language| ["sh", "bash", "console"].contains(&language));
        let text = line.trim().trim_start_matches("$ ");
        if is_continued && is_shown {
            let command = commands.last_mut().unwrap();
            command.push(' ');
            command.push_str(text.trim_end_matches('\\').trim_end());
        } else {
            let is_assignment = |word: &&str| {
                word.split_once('=').is_some_and(|(name, _)| {
                    name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
                })
            };
            let program = text.split_whitespace().find(|word| !is_assignment(word) && *word != "\\");
            // A line of assignments alone is a command only if it is continued.
            let is_prefix = program.is_none() && text.ends_with('\\');
            if !is_shown || !(is_prefix || program.is_some_and(|program| PROGRAMS.contains(&program))) {
                is_continued = false;
                continue;
            }
            commands.push(text.trim_end_matches('\\').trim_end().to_owned());
        }
        is_continued = text.ends_with('\\') || text.ends_with('|');
    }
    commands
}

/// Files that the commands read, and the program under its name.
fn prepare(directory: &Path) {
    let rules = "\
domain: shop
descriptors:
- {key: login, rate_limit: {unit: minute, requests_per_unit: 5, algorithm: sliding_window_log}}
- key: user
  rate_limit: {unit: minute, requests_per_unit: 100}
  descriptors: [{key: path, rate_limit: {unit: minute, requests_per_unit: 20}}]
";
    let log = (0..200).fold(Log::new("p", rules), |log, number| log.decided(number * 20_000, "ann", true));
    for (name, text) in [("rules.yaml", rules), ("new.yaml", rules), ("decisions.jsonl", &log.text())] {
        fs::write(directory.join(name), text).unwrap();
    }
    fs::create_dir(directory.join("bin")).unwrap();
    symlink(program_path(), directory.join("bin/tollkeeper")).unwrap();
    symlink(repository("config"), directory.join("config")).unwrap();
}

#[test]
fn commands_of_the_documentation_are_run_or_listed() {
    let mut pages: Vec<_> = fs::read_dir(repository("docs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.push(repository("README.md"));
    pages.sort();
    let (mut used, mut run) = (BTreeSet::new(), 0);
    for path in pages {
        let page = path.file_name().unwrap().to_str().unwrap();
        let directory = tempfile::tempdir().unwrap();
        prepare(directory.path());
        for command in commands(&read(&path)) {
            let listed = NOT_RUN.iter().position(|(of, start, _)| *of == page && command.starts_with(start));
            if let Some(index) = listed {
                used.insert(index);
                continue;
            }
            let mut shell = Command::new("bash");
            let search = format!("{}/bin:{}:/usr/sbin", directory.path().display(), std::env::var("PATH").unwrap());
            shell.args(["-eo", "pipefail", "-c", &command]).current_dir(directory.path());
            let output = shell.env_clear().envs(inherited_env()).env("PATH", search).output().unwrap();
            assert!(output.status.success(), "{page}: {command}\n{output:?}");
            run += 1;
        }
    }
    assert!(run >= 9, "only {run} commands were run");
    let unused: Vec<_> = (0..NOT_RUN.len()).filter(|index| !used.contains(index)).map(|index| NOT_RUN[index]).collect();
    assert!(unused.is_empty(), "listed, but in no page: {unused:?}");
}

/// Messages by which a reader finds the cause.
#[test]
fn messages_of_troubleshooting_are_in_the_program() {
    let page = read(&repository("docs/troubleshooting.md"));
    let source = source_text(&repository("src"));
    for text in [
        "no rule file has this domain",
        "this entry matched nothing",
        "nodes below it: no limit applies",
        "than the path in the rules",
        "ends at a node without a rate_limit",
        "this rule decides",
        "no rate limit configuration loaded",
        "memory of this process, not shared",
        "keys_seen_once",
        "the server takes no writes",
        "no answer in time",
        "failed_charges",
        "last_error",
        "loaded_at",
    ] {
        assert!(page.contains(text), "the page does not quote {text:?}");
        assert!(source.contains(text), "the program does not say {text:?}");
    }
}

/// Messages that the tables of causes quote are in the program.
#[test]
fn log_lines_of_the_page_about_failures_are_in_the_program() {
    let page = read(&repository("docs/failures.md"));
    let (_, table) = page.split_once("| cause | charges log | also logged |").unwrap();
    let source = source_text(&repository("src"));
    let mut quoted = 0;
    for row in table.lines().skip(2).take_while(|line| line.starts_with('|')) {
        let columns: Vec<&str> = row.split('|').collect();
        for text in columns[2..4].iter().flat_map(|column| column.split('`').skip(1).step_by(2)) {
            // The first words of a message come from the program's names: `redis fails`.
            for part in text
                .split(": ")
                .map(|part| part.trim_start_matches("redis").trim().trim_end_matches(" redis").trim_end_matches(':'))
            {
                let name_is_filled_in = part.replace(" redis ", " {program} ");
                assert!(source.contains(part) || source.contains(&name_is_filled_in), "`{text}` of {row}: {part:?}");
                quoted += 1;
            }
        }
    }
    assert!(quoted >= 20, "{quoted}");
}

fn source_text(directory: &Path) -> String {
    let mut text = String::new();
    for entry in fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            text.push_str(&source_text(&entry));
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&read(&entry));
        }
    }
    text
}

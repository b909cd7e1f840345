//! Commands of the documentation, run as they are written: those of the program, of openssl, and of curl for pages of
//! the program. Only addresses are replaced.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::tools::simulate::Log;
use kit::tollkeeper::{Tollkeeper, inherited_env, program_path, without_rules};
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

/// Rules of the files that the commands name.
const RULES: &str = "\
domain: shop
descriptors:
- {key: login, rate_limit: {unit: minute, requests_per_unit: 5, algorithm: sliding_window_log}}
- key: user
  rate_limit: {unit: minute, requests_per_unit: 100}
  descriptors: [{key: path, rate_limit: {unit: minute, requests_per_unit: 20}}]
";

/// True for commands that end by themselves and need nothing but a server, openssl and prepared files.
///
/// The module `cookbook` runs the commands of its page; `envoy_check`, `why`, `tls`, `fleet` and `events` run
/// those that need certificates, more than one server, or a log and files of the reader.
fn is_run(page: &str, command: &str) -> bool {
    let words: Vec<&str> = command.split_whitespace().skip_while(|word| word.contains('=')).collect();
    match words[..] {
        _ if page == "cookbook.md" => false,
        ["openssl", ..] => true,
        ["curl", ..] => [":8080/", ":6070/"].iter().any(|port| command.contains(port)),
        ["tollkeeper", "serve" | "bench" | "events" | "why", ..] => false,
        ["tollkeeper", ..] => {
            ![" --tls ", " --fleet", " --table ", " envoy.yaml ", " /data/"].iter().any(|part| command.contains(part))
        }
        _ => false,
    }
}

/// Files that the commands read, and the program under its name.
fn prepare(directory: &Path) {
    let log = (0..200).fold(Log::new("p", RULES), |log, number| log.decided(number * 20_000, "ann", true));
    for (name, text) in [("rules.yaml", RULES), ("new.yaml", RULES), ("decisions.jsonl", &log.text())] {
        fs::write(directory.join(name), text).unwrap();
    }
    fs::create_dir(directory.join("bin")).unwrap();
    symlink(program_path(), directory.join("bin/tollkeeper")).unwrap();
    for shipped in ["config", "envoy"] {
        symlink(repository(shipped), directory.join(shipped)).unwrap();
    }
}

/// The command with the addresses of `server` in place of those of the documentation.
fn adapted(command: &str, server: &Tollkeeper) -> String {
    let ports = [(8081, server.grpc_port()), (8080, server.http_port()), (6070, server.debug_port())];
    let mut adapted = command.replace("curl ", "curl --fail ");
    for (shown, port) in ports {
        for host in ["127.0.0.1", "localhost", "HOST", "tollkeeper"] {
            adapted = adapted.replace(&format!("{host}:{shown}"), &format!("127.0.0.1:{port}"));
        }
    }
    let is_of = |names: &[&str]| names.iter().any(|name| command.starts_with(&format!("tollkeeper {name}")));
    if !command.contains(" --addr ") && !command.contains(" --config ") {
        if is_of(&["call"]) {
            adapted += &format!(" --addr 127.0.0.1:{}", server.grpc_port());
        } else if is_of(&["top", "explain", "block", "unblock", "quota", "reset"]) {
            adapted += &format!(" --addr 127.0.0.1:{}", server.debug_port());
        }
    }
    adapted
}

#[test]
fn commands_of_the_documentation_run() {
    const TOKEN: &str = "a token of 32 characters or more";
    let directories = ["docs", "docs/reference"].map(|path| fs::read_dir(repository(path)).unwrap());
    let mut pages: Vec<_> = directories.into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    pages.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.push(repository("README.md"));
    pages.sort();
    let mut run = 0;
    for path in pages {
        let page = path.file_name().unwrap().to_str().unwrap();
        let commands =
            commands(&read(&path)).into_iter().map(|command| command.replace("cargo run -- ", "tollkeeper "));
        let commands: Vec<String> = commands.filter(|command| is_run(page, command)).collect();
        if commands.is_empty() {
            continue;
        }
        let directory = tempfile::tempdir().unwrap();
        prepare(directory.path());
        let rules = [repository("config/example.yaml"), directory.path().join("rules.yaml")];
        let server = rules.into_iter().fold(without_rules(), |setup, path| setup.arg("--config").arg(path));
        let server = server.env("TOLLKEEPER_ADMIN_TOKEN", TOKEN).env("TOLLKEEPER_DRAIN_PERIOD", "0s").start();
        for command in commands {
            let mut shell = Command::new("bash");
            let search = format!("{}/bin:{}:/usr/sbin", directory.path().display(), std::env::var("PATH").unwrap());
            shell.args(["-eo", "pipefail", "-c", &adapted(&command, &server)]).current_dir(directory.path());
            shell.env_clear().envs(inherited_env()).env("PATH", search);
            let output = shell.env("TOLLKEEPER_ADMIN_TOKEN", TOKEN).env("TOKEN", TOKEN).output().unwrap();
            assert!(output.status.success(), "{page}: {command}\n{output:?}");
            run += 1;
        }
    }
    assert!(run >= 40, "only {run} commands were run");
}

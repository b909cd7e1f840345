//! Rule files at the edges of the language, as envoyproxy/ratelimit reads them.
//!
//! A file that loads there loads here, with the same `/rlconfig` lines. A file rejected there is rejected here with
//! the same text, unless it is listed in `LOADS_HERE` with the reason.

use std::sync::Arc;

use serde_json::Value;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{CompiledRules, RuleText, compile_texts};
use tollkeeper::rules::diagnostic::Diagnostics;
use tollkeeper::rules::rule::rlconfig::format_rlconfig;
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::yaml::DocumentSelection;

/// Files that fail there and load here, with the reason.
const LOADS_HERE: &[(&str, &str)] = &[
    ("edge_value_float", "a plain scalar where text is meant is its text"),
    ("edge_value_inf", "a plain scalar where text is meant is its text"),
    ("edge_value_bignum", "a plain scalar where text is meant is its text"),
    ("edge_value_exp", "a plain scalar where text is meant is its text"),
    ("edge_key_float", "a plain scalar where text is meant is its text"),
    ("edge_rpu_big", "a limit has up to 53 bits"),
];

fn recorded() -> Vec<Value> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/peer.jsonl");
    let text = std::fs::read_to_string(path).expect("the recordings are part of the repository");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("each line is an object"));
    lines.filter(|line| line.get("steps").is_none()).collect()
}

fn load(line: &Value) -> Result<CompiledRules, Diagnostics> {
    load_with(line, &CompileOptions::default())
}

fn load_with(line: &Value, options: &CompileOptions) -> Result<CompiledRules, Diagnostics> {
    let latin1 = line["encoding"] == "latin-1";
    let files = line["files"].as_object().expect("files are an object");
    let sources: Vec<RuleText> = files
        .iter()
        .map(|(name, text)| {
            let text = text.as_str().expect("a file is text");
            let text = if latin1 {
                text.chars().map(|c| u8::try_from(u32::from(c)).expect("latin-1")).collect()
            } else {
                text.as_bytes().to_vec()
            };
            RuleText { name: Arc::from(name.as_str()), bytes: text, documents: DocumentSelection::FirstOnly }
        })
        .collect();
    let merge_domains = line["env"]["MERGE_DOMAIN_CONFIG"] == "true";
    compile_texts(&sources, &CompileOptions { merge_domains, ..options.clone() })
}

/// The part of the peer's message that ours must contain; `None` where it is the YAML reader's own.
fn words(recorded: &str) -> Option<&str> {
    match recorded.strip_prefix("error loading config file: yaml: ") {
        None => Some(recorded),
        Some(yaml) => yaml.find("cannot unmarshal").map(|at| &yaml[at..]),
    }
}

#[test]
fn rule_files_load_like_in_envoyproxy_ratelimit() {
    let lines = recorded();
    assert_eq!(lines.len(), 116);
    let mut differences = Vec::new();
    for line in &lines {
        let name = line["name"].as_str().expect("a name");
        let loaded = load(line);
        let expected_error = line["config_error"].as_str();
        if LOADS_HERE.iter().any(|(known, _)| *known == name) {
            if loaded.is_err() || expected_error.is_none() {
                differences.push(format!("{name}: is no difference any more"));
            }
            continue;
        }
        match (loaded, expected_error) {
            (Ok(_), Some(error)) => differences.push(format!("{name}: loads, and there: {error}")),
            (Err(found), None) => differences.push(format!("{name}: fails: {found}")),
            (Err(found), Some(error)) => {
                // `requests_per_unit` has 32 bits there.
                let missing =
                    words(error).filter(|words| !found.to_string().replace("uint64", "uint32").contains(words));
                differences.extend(missing.map(|words| format!("{name}: says {found}, and there: {words}")));
            }
            (Ok(compiled), None) => {
                // A name with a line break in it was recorded as two lines.
                let text = format_rlconfig(&RuleSet::new(compiled.domains.clone())).join("\n");
                let mut ours: Vec<&str> = text.lines().collect();
                ours.sort_unstable();
                let theirs: Vec<&str> =
                    line["rlconfig"].as_array().expect("lines").iter().filter_map(Value::as_str).collect();
                if ours != theirs {
                    differences.push(format!("{name}: {ours:?}, and there: {theirs:?}"));
                }
            }
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn rule_files_of_envoyproxy_ratelimit_load_with_memcache() {
    let mut loaded = 0;
    for line in recorded() {
        let domains = |result: Result<CompiledRules, Diagnostics>| match result {
            Ok(compiled) => Ok(format!("{:?}", compiled.domains)),
            Err(found) => Err(found.to_string()),
        };
        let without = domains(load(&line));
        let with = domains(load_with(&line, &CompileOptions { memcache: true, ..CompileOptions::default() }));
        assert_eq!(with, without, "{}", line["name"]);
        loaded += usize::from(without.is_ok());
    }
    assert!(loaded > 50, "only {loaded} files");
}

#[test]
fn recorded_rules_give_the_same_rlconfig_lines() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/peer.jsonl");
    let text = std::fs::read_to_string(path).expect("the recordings are part of the repository");
    let mut differences = Vec::new();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).expect("each line is an object");
        if line.get("steps").is_none() {
            continue;
        }
        match load(&line) {
            Err(found) => differences.push(format!("{}: {found}", line["name"])),
            Ok(compiled) => {
                let mut ours = format_rlconfig(&RuleSet::new(compiled.domains.clone()));
                ours.sort_unstable();
                let theirs: Vec<&str> =
                    line["rlconfig"].as_array().expect("lines").iter().filter_map(Value::as_str).collect();
                if ours != theirs {
                    differences.push(format!("{}: {ours:?}, and there: {theirs:?}", line["name"]));
                }
            }
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

//! The chart's values: `values.yaml` has their defaults and describes each in the comment above it. The descriptions in
//! `values.schema.json` and the table in the chart's `README.md` come from there; `BLESS=1` rewrites both.

use std::fmt::Write as _;
use std::fs;

use serde_json::{Map, Value, json};

use super::documents;
use crate::kit::{read, repository};

const SCHEMA: &str = "deploy/chart/values.schema.json";
const README: &str = "deploy/chart/README.md";
const TABLE: [&str; 2] = ["<!-- values -->\n", "<!-- end of values -->"];

/// Comment directly above each key of `values.yaml`, by the key's path.
fn comments(yaml: &str) -> Vec<(Vec<String>, String)> {
    let mut path: Vec<(usize, String)> = Vec::new();
    let (mut comment, mut all) = (String::new(), Vec::new());
    for line in yaml.lines() {
        let text = line.trim_start();
        let indent = line.len() - text.len();
        if let Some(words) = text.strip_prefix("# ") {
            let space = if comment.is_empty() { "" } else { " " };
            write!(comment, "{space}{words}").unwrap();
            continue;
        }
        let is_key = text.starts_with(|first: char| first.is_ascii_alphabetic());
        if let Some((key, _)) = text.split_once(':').filter(|_| is_key) {
            path.retain(|(outer, _)| *outer < indent);
            path.push((indent, key.to_owned()));
            let keys = path.iter().map(|(_, key)| key.clone()).collect();
            all.push((keys, std::mem::take(&mut comment)));
        }
        comment.clear();
    }
    all
}

/// A value that the schema describes on its own.
struct Leaf {
    path: Vec<String>,
    default: Value,
    schema: Value,
}

/// Leaves of the schema in the order of `values.yaml`. Objects without known properties are leaves.
fn leaves(values: &Value, schema: &Value, path: &[String]) -> Vec<Leaf> {
    let Some(properties) = schema["properties"].as_object() else {
        return vec![Leaf { path: path.to_vec(), default: values.clone(), schema: schema.clone() }];
    };
    let all = values.as_object().unwrap_or_else(|| panic!("{path:?} has no defaults"));
    let below = |key: &String| [path, std::slice::from_ref(key)].concat();
    all.iter()
        .flat_map(|(key, value)| {
            let inner = properties.get(key).unwrap_or_else(|| panic!("{:?} is not in the schema", below(key)));
            leaves(value, inner, &below(key))
        })
        .collect()
}

fn values() -> Value {
    documents(&read(&repository("deploy/chart/values.yaml"))).remove(0)
}

/// The schema with the comments of `values.yaml` as descriptions.
fn described(mut schema: Value) -> Value {
    for (path, comment) in comments(&read(&repository("deploy/chart/values.yaml"))) {
        let mut at = Some(&mut schema);
        for key in &path {
            at = at.and_then(|schema| schema.get_mut("properties")?.get_mut(key));
        }
        // Keys below a leaf, such as resources.limits, are no values of their own.
        let Some(place) = at.and_then(Value::as_object_mut).filter(|_| !comment.is_empty()) else { continue };
        place.shift_remove("description");
        let rest = std::mem::take(place);
        *place = Map::from_iter([("description".to_owned(), json!(comment))].into_iter().chain(rest));
    }
    schema
}

/// The README with this table of values.
fn readme_with_table(text: &str, leaves: &[Leaf]) -> String {
    let mut table = "\n| value | default | description |\n|---|---|---|\n".to_owned();
    for leaf in leaves {
        let (path, default) = (leaf.path.join("."), leaf.default.to_string());
        let description = leaf.schema["description"].as_str().unwrap_or_default().replace('|', "\\|");
        writeln!(table, "| `{path}` | `{default}` | {description} |").unwrap();
    }
    let (before, rest) = text.split_once(TABLE[0]).unwrap();
    let (_, after) = rest.split_once(TABLE[1]).unwrap();
    [before, TABLE[0], &table, "\n", TABLE[1], after].concat()
}

#[test]
fn schema_describes_every_value() {
    let text = read(&repository(SCHEMA));
    let schema = described(serde_json::from_str(&text).unwrap());
    let expected = serde_json::to_string_pretty(&schema).unwrap() + "\n";
    if std::env::var_os("BLESS").is_some() {
        fs::write(repository(SCHEMA), &expected).unwrap();
    } else {
        assert!(text == expected, "{SCHEMA} differs from the comments in values.yaml: run with BLESS=1");
    }
    for leaf in leaves(&values(), &schema, &[]) {
        assert!(leaf.schema["description"].is_string(), "{:?} has no comment in values.yaml", leaf.path);
    }
    assert_same_keys(&values(), &schema, "values");
}

/// Checks that every property of the schema has a default.
fn assert_same_keys(values: &Value, schema: &Value, path: &str) {
    let Some(properties) = schema["properties"].as_object() else { return };
    for (key, inner) in properties {
        // Probes take any of these; the kubelet's default is 0.
        if key == "initialDelaySeconds" {
            continue;
        }
        assert!(values.get(key).is_some(), "values.yaml does not show {path}.{key}");
        assert_same_keys(&values[key], inner, &format!("{path}.{key}"));
    }
}

#[test]
fn readme_lists_every_value() {
    let schema = described(serde_json::from_str(&read(&repository(SCHEMA))).unwrap());
    let text = read(&repository(README));
    let expected = readme_with_table(&text, &leaves(&values(), &schema, &[]));
    if std::env::var_os("BLESS").is_some() {
        fs::write(repository(README), &expected).unwrap();
        return;
    }
    assert!(text == expected, "the table in {README} is stale: run with BLESS=1");
}

//! The chart's values: `values.yaml` has their defaults and describes each in the comment above it. The descriptions in
//! `values.schema.json` and the table in the chart's `README.md` come from there.

use serde_json::Value;

use crate::generated::{VALUES_SCHEMA, assert_up_to_date, chart_values, default_values, leaves};
use kit::{read, repository};

#[test]
fn schema_and_readme_have_the_comments_of_the_values() {
    assert_up_to_date(&chart_values());
}

#[test]
fn schema_describes_every_value() {
    let (values, schema) = (default_values(), serde_json::from_str(&read(&repository(VALUES_SCHEMA))).unwrap());
    for leaf in leaves(&values, &schema, &[]) {
        assert!(leaf.schema["description"].is_string(), "{:?} has no comment in values.yaml", leaf.path);
    }
    assert_same_keys(&values, &schema, "values");
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

//! The published JSON Schema of the log, applied to records.

use serde_json::Value;

use kit::json_schema::schema_errors;
use kit::repository;

/// The schema, without the freedom to add fields: a field that it does not describe is an error.
fn strict() -> Value {
    let text = kit::read(&repository("docs/decision-log.schema.json"));
    let mut schema: Value = serde_json::from_str(&text).unwrap();
    for definition in schema["$defs"].as_object_mut().unwrap().values_mut() {
        close(definition);
    }
    schema
}

/// Forbids fields that are not described, in objects at any depth.
fn close(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            fields.values_mut().for_each(close);
            if fields.get("type").is_some_and(|kind| kind == "object") && fields.contains_key("properties") {
                fields.insert("additionalProperties".to_owned(), Value::Bool(false));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(close),
        _ => {}
    }
}

/// Asserts that every line is a record as the schema describes it.
pub(crate) fn assert_valid(lines: &str) {
    let schema = strict();
    for line in lines.lines() {
        let record: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let errors = schema_errors(&schema, &record);
        assert!(errors.is_empty(), "{errors:#?}\n{line}");
    }
}

#[test]
fn schema_rejects_unknown_fields_versions_and_words() {
    let valid = r#"{"v":1,"type":"dropped","process":"0123456789abcdef","time_us":1,"count":2,"reason":"queue_full"}"#;
    assert_valid(valid);
    let schema = strict();
    for (from, to) in [
        ("\"v\":1", "\"v\":2"),
        ("dropped", "lost"),
        ("0123456789abcdef", "me"),
        ("\"count\":2", "\"count\":0"),
        ("queue_full", "tired"),
        ("\"count\":2", "\"count\":2,\"more\":1"),
        ("\"time_us\":1,", ""),
    ] {
        let record: Value = serde_json::from_str(&valid.replace(from, to)).unwrap();
        assert!(!schema_errors(&schema, &record).is_empty(), "{record}");
    }
}

#[test]
fn examples_of_the_documentation_are_records() {
    let page = kit::read(&repository("docs/decision-log.md"));
    let examples: Vec<&str> = page.split("```json\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(!examples.is_empty());
    for example in examples {
        assert_valid(example);
        let reader =
            tollkeeper::decide::log::reader::RecordReader::new("docs", std::io::Cursor::new(example.to_owned()));
        // Tools that replay decisions leave levels out.
        let read = example.lines().filter(|line| !line.contains(r#""type":"threshold""#));
        assert_eq!(super::read_records(&mut reader.unwrap()).len(), read.count());
    }
}

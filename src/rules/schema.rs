//! JSON Schemas of a rule file and of a file of defaults, for completion and checks in editors.
//!
//! Generated from the table of keys, with one definition for each section. It is stricter than the reader where that
//! helps (it marks keys that would be ignored), and looser where a schema cannot express a rule (contradictions between
//! keys). `tollkeeper check` is authoritative.
//!
//! Decides: what an editor completes and checks (JSON Schema).

use serde_json::{Map, Value, json};

use crate::limit::period::Unit;
use crate::rules::document::read::all_keys;
use crate::rules::key_table::{RuleFileKey, Section, ValueKind};

/// Returns the schema of a rule file, draft 2020-12.
pub fn rule_file_schema() -> Value {
    let definitions: Map<String, Value> = Section::ALL
        .into_iter()
        .filter(|section| section.is_in_rule_files() && *section != Section::Root)
        .map(|section| (section.name().to_owned(), section_schema(section)))
        .collect();
    let mut schema = Map::new();
    schema.insert("$schema".into(), json!("https://json-schema.org/draft/2020-12/schema"));
    schema.insert("title".into(), json!("tollkeeper rules"));
    schema.insert("description".into(), json!("Rate limits of one domain: a superset of envoyproxy/ratelimit's."));
    if let Value::Object(root) = section_schema(Section::Root) {
        schema.extend(root);
    }
    schema.insert("$defs".into(), Value::Object(definitions));
    Value::Object(schema)
}

/// Returns the schema of the file of `TOLLKEEPER_RULE_DEFAULTS`, draft 2020-12.
pub fn defaults_file_schema() -> Value {
    let units = Unit::ALL.map(|unit| any_case_pattern(unit.name())).join("|");
    let mut of_domain = section_schema(Section::DomainDefaults);
    of_domain["properties"]["by_unit"] = json!({
        "type": ["object", "null"],
        "description": of_domain["properties"]["by_unit"]["description"],
        "patternProperties": { (format!("^({units})$")): nullable_section_schema(Section::Defaults) },
        "additionalProperties": false,
    });
    let domains = json!({
        "type": ["object", "null"],
        "description": "Defaults by domain; `*` stands for all domains.",
        "additionalProperties": nullable_section_schema(Section::DomainDefaults),
    });
    let mut definitions = Map::new();
    definitions.insert(Section::DomainDefaults.name().to_owned(), of_domain);
    for section in [Section::Defaults, Section::Window] {
        definitions.insert(section.name().to_owned(), section_schema(section));
    }
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tollkeeper defaults",
        "description": "Defaults for rules of any source: the file of TOLLKEEPER_RULE_DEFAULTS.",
        "type": "object",
        "properties": { "defaults": domains },
        "required": ["defaults"],
        "additionalProperties": false,
        "$defs": definitions,
    })
}

fn nullable_section_schema(section: Section) -> Value {
    json!({ "anyOf": [section_reference(section), { "type": "null" }] })
}

/// Schema of a mapping with the keys of a section.
fn section_schema(section: Section) -> Value {
    let keys = all_keys().filter(|key| key.belongs_in(section));
    let properties: Map<String, Value> = keys.map(|key| (key.name.to_owned(), key_schema(key))).collect();
    let mut mapping = Map::new();
    mapping.insert("type".into(), json!("object"));
    mapping.insert("properties".into(), Value::Object(properties));
    // `<<` is YAML's merge key; editors that do not resolve it see it as a key.
    mapping.insert("patternProperties".into(), json!({"^<<$": true}));
    mapping.insert("additionalProperties".into(), json!(false));
    match section {
        Section::Root => mapping.insert("required".into(), json!(["domain"])),
        Section::Descriptor => mapping.insert("required".into(), json!(["key"])),
        Section::Replaces => mapping.insert("required".into(), json!(["name"])),
        Section::Ban => mapping.insert("required".into(), json!(["for"])),
        Section::MatchSet => mapping.insert("required".into(), json!(["file"])),
        Section::Match | Section::Negation => {
            mapping.insert("minProperties".into(), json!(1));
            mapping.insert("maxProperties".into(), json!(1))
        }
        // A limit of 0 needs no unit, and one of streams at once has none.
        Section::Limit => {
            let zero =
                json!({ "required": ["requests_per_unit"], "properties": { "requests_per_unit": { "const": 0 } } });
            let concurrent = json!({ "required": ["concurrent"] });
            mapping.insert("anyOf".into(), json!([{ "required": ["unit"] }, zero, concurrent]))
        }
        Section::Plan => mapping.insert("required".into(), json!(["from", "default"])),
        Section::Table => mapping.insert("oneOf".into(), json!([{ "required": ["file"] }, { "required": ["redis"] }])),
        Section::Defaults
        | Section::Matching
        | Section::RateLimit
        | Section::Window
        | Section::ReservationPolicy
        | Section::Active
        | Section::DefaultsFile
        | Section::DomainDefaults => None,
    };
    Value::Object(mapping)
}

/// Schema of a key's value, with description and default.
fn key_schema(key: &RuleFileKey) -> Value {
    let mut property = match value_kind_schema(key.kind) {
        Value::Object(property) => property,
        _ => Map::new(),
    };
    property.insert("description".into(), json!(key.doc));
    if !key.default.is_empty() {
        let default = serde_json::from_str(key.default).unwrap_or_else(|_| json!(key.default));
        property.insert("default".into(), default);
    }
    Value::Object(property)
}

fn section_reference(section: Section) -> Value {
    json!({ "$ref": format!("#/$defs/{}", section.name()) })
}

fn value_kind_schema(kind: ValueKind) -> Value {
    match kind {
        ValueKind::Text | ValueKind::Body | ValueKind::ContentType => {
            json!({ "type": ["string", "number", "boolean", "null"] })
        }
        ValueKind::Count(min, max) => json!({ "type": ["integer", "null"], "minimum": min, "maximum": max }),
        ValueKind::Flag => json!({ "type": ["boolean", "null"] }),
        ValueKind::Day => json!({ "type": ["string", "null"], "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$" }),
        ValueKind::TimeOfDay => json!({ "type": ["string", "null"], "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$" }),
        ValueKind::DurationOrTable(section) => {
            json!({ "anyOf": [value_kind_schema(ValueKind::Duration), section_reference(section), { "type": "null" }] })
        }
        ValueKind::Days => {
            json!({ "anyOf": [{ "type": ["string", "null"] }, { "type": "array", "items": { "type": "string" } }] })
        }
        ValueKind::Duration | ValueKind::WholeSeconds => {
            let number = r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|\u00b5s|\u03bcs|ms|s|m|h)";
            json!({ "anyOf": [{ "type": "string", "pattern": format!("^({number})+$|^0$") }, { "const": 0 }] })
        }
        ValueKind::Overshoot => {
            let percent = json!({ "type": "string", "pattern": r"^[0-9]*\.?[0-9]*\s*%$" });
            json!({ "anyOf": [percent, { "type": "integer", "minimum": 1 }] })
        }
        ValueKind::Percentage(_) => json!({ "type": "string", "pattern": r"^[0-9]*\.?[0-9]*\s*%$" }),
        ValueKind::Percentages(least) => {
            json!({ "type": "array", "items": value_kind_schema(ValueKind::Percentage(least)), "minItems": 1 })
        }
        ValueKind::Choice(words) => json!({ "enum": words }),
        ValueKind::Unit => {
            let any_case = Unit::ALL.map(|unit| any_case_pattern(unit.name())).join("|");
            // The names are for completion, the pattern for other cases.
            json!({ "anyOf": [{ "enum": Unit::ALL.map(Unit::name) }, { "type": "string", "pattern": format!("^({any_case})$") }] })
        }
        ValueKind::Table(section) => nullable_section_schema(section),
        ValueKind::Tables(section) => json!({ "type": ["array", "null"], "items": section_reference(section) }),
        ValueKind::Limits => limits_schema(),
        ValueKind::NamedLimits => named_elements_schema(&limits_schema()),
        ValueKind::NamedTables(section) => named_elements_schema(&section_reference(section)),
        ValueKind::Set => {
            let text = json!({ "type": ["string", "number", "boolean"] });
            let list = json!({ "type": "array", "minItems": 1, "items": text });
            json!({ "anyOf": [list, section_reference(Section::MatchSet)] })
        }
        ValueKind::Headers => {
            let value = json!({ "type": ["string", "number", "boolean"] });
            json!({ "type": ["object", "null"], "additionalProperties": value, "maxProperties": 16 })
        }
        ValueKind::Free => json!({ "type": ["object", "null"] }),
    }
}

fn limits_schema() -> Value {
    let list = json!({ "type": "array", "minItems": 1, "items": section_reference(Section::Limit) });
    json!({ "anyOf": [section_reference(Section::RateLimit), list, { "type": "null" }] })
}

/// Schema of a mapping from names that the user chooses.
fn named_elements_schema(element: &Value) -> Value {
    json!({
        "type": ["object", "null"],
        "patternProperties": { "^[A-Za-z0-9_-]{1,64}$": element, "^<<$": true },
        "additionalProperties": false,
    })
}

/// Returns a pattern that matches `word` in any case.
fn any_case_pattern(word: &str) -> String {
    word.chars().map(|letter| format!("[{letter}{}]", letter.to_ascii_uppercase())).collect()
}

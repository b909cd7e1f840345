//! The JSON Schema of a rule file, so that editors complete and check it.
//!
//! Made from the table of keys, one definition for each kind of mapping. It is stricter than the reader where that
//! helps who writes (a key that would be ignored is marked), and looser where a schema can not say it (what keys mean
//! to each other): `tollkeeper check` has the last word.

use serde_json::{Map, Value, json};

use crate::config::keys::{KEYS, Key, Kind, Place};
use crate::limit::period::Unit;

/// The schema, draft 2020-12.
pub fn json_schema() -> Value {
    let definitions: Map<String, Value> =
        Place::ALL.into_iter().skip(1).map(|place| (place.name().to_owned(), mapping(place))).collect();
    let mut schema = Map::new();
    schema.insert("$schema".into(), json!("https://json-schema.org/draft/2020-12/schema"));
    schema.insert("title".into(), json!("tollkeeper rules"));
    schema.insert("description".into(), json!("Rate limits of one domain: a superset of envoyproxy/ratelimit's."));
    if let Value::Object(root) = mapping(Place::Root) {
        schema.extend(root);
    }
    schema.insert("$defs".into(), Value::Object(definitions));
    Value::Object(schema)
}

/// A mapping with the keys that may stand in it.
fn mapping(place: Place) -> Value {
    let keys = KEYS.iter().filter(|key| key.places.contains(&place));
    let properties: Map<String, Value> = keys.map(|key| (key.name.to_owned(), property(key))).collect();
    let mut mapping = Map::new();
    mapping.insert("type".into(), json!("object"));
    mapping.insert("properties".into(), Value::Object(properties));
    // `<<` is YAML's merge key; editors that do not resolve it see it as a key.
    mapping.insert("patternProperties".into(), json!({"^<<$": true}));
    mapping.insert("additionalProperties".into(), json!(false));
    match place {
        Place::Root => mapping.insert("required".into(), json!(["domain"])),
        Place::Descriptor => mapping.insert("required".into(), json!(["key"])),
        Place::Replaces => mapping.insert("required".into(), json!(["name"])),
        Place::Limit => mapping.insert("required".into(), json!(["unit"])),
        Place::Defaults | Place::RateLimit => None,
    };
    Value::Object(mapping)
}

/// What a key holds, with its sentence and its default.
fn property(key: &Key) -> Value {
    let mut property = match kind(key.kind) {
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

fn reference(place: Place) -> Value {
    json!({ "$ref": format!("#/$defs/{}", place.name()) })
}

fn kind(kind: Kind) -> Value {
    match kind {
        Kind::Text => json!({ "type": ["string", "number", "boolean", "null"] }),
        Kind::Count(least, most) => json!({ "type": ["integer", "null"], "minimum": least, "maximum": most }),
        Kind::Flag => json!({ "type": ["boolean", "null"] }),
        Kind::Duration => {
            let number = r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|\u00b5s|\u03bcs|ms|s|m|h)";
            json!({ "anyOf": [{ "type": "string", "pattern": format!("^({number})+$|^0$") }, { "const": 0 }] })
        }
        Kind::Overshoot => {
            let percent = json!({ "type": "string", "pattern": r"^[0-9]*\.?[0-9]*\s*%$" });
            json!({ "anyOf": [percent, { "type": "integer", "minimum": 1 }] })
        }
        Kind::Choice(words) => json!({ "enum": words }),
        Kind::Unit => {
            let any_case = Unit::ALL.map(|unit| any_case(unit.name())).join("|");
            // The names for completion, the pattern for those who shout.
            json!({ "anyOf": [{ "enum": Unit::ALL.map(Unit::name) }, { "type": "string", "pattern": format!("^({any_case})$") }] })
        }
        Kind::Table(place) => json!({ "anyOf": [reference(place), { "type": "null" }] }),
        Kind::Tables(place) => json!({ "type": ["array", "null"], "items": reference(place) }),
        Kind::Limits => {
            let list = json!({ "type": "array", "minItems": 1, "items": reference(Place::Limit) });
            json!({ "anyOf": [reference(Place::RateLimit), list, { "type": "null" }] })
        }
        Kind::Free => json!({ "type": ["object", "null"] }),
    }
}

/// A pattern that takes `word` in any case.
fn any_case(word: &str) -> String {
    word.chars().map(|letter| format!("[{letter}{}]", letter.to_ascii_uppercase())).collect()
}

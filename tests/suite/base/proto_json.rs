//! JSON of requests and responses, compared with prost-reflect, which converts by the protobuf descriptors.
//!
//! Requests here are stricter in three points, which [`as_judged`] evens out: no field comes twice, a number in a
//! string is one as JSON writes it, and a number is never rounded.

use std::collections::HashSet;
use std::io;
use std::sync::LazyLock;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};
use prost_types::value::Kind;
use prost_types::{Duration, ListValue, Struct, Timestamp};
use serde::Serialize;
use serde_json::{Map, Number, Value, json};
use tollkeeper::base::pb::proto_json::{request_from_json, request_to_json, response_to_json};
use tollkeeper::base::pb::rate_limit_descriptor::{Entry, RateLimitOverride};
use tollkeeper::base::pb::rate_limit_response::{DescriptorStatus, Quota, RateLimit, quota};
use tollkeeper::base::pb::{self, HeaderValue, RateLimitDescriptor, RateLimitRequest, RateLimitResponse};
use tollkeeper::base::text::escape_unprintable_json;

static REQUEST: LazyLock<MessageDescriptor> = LazyLock::new(|| message("RateLimitRequest"));
static RESPONSE: LazyLock<MessageDescriptor> = LazyLock::new(|| message("RateLimitResponse"));

fn message(name: &str) -> MessageDescriptor {
    let pool = DescriptorPool::decode(pb::file_descriptor_set()).unwrap();
    pool.get_message_by_name(&format!("envoy.service.ratelimit.v3.{name}")).unwrap()
}

/// The JSON that prost-reflect writes; `None` if it cannot.
fn judged_json(descriptor: &MessageDescriptor, message: &impl Message) -> Option<String> {
    struct ShortNumbers;
    impl serde_json::ser::Formatter for ShortNumbers {
        fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
            write!(writer, "{value}")
        }
    }
    let message = DynamicMessage::decode(descriptor.clone(), message.encode_to_vec().as_slice()).ok()?;
    let mut text = Vec::new();
    message.serialize(&mut serde_json::Serializer::with_formatter(&mut text, ShortNumbers)).ok()?;
    Some(escape_unprintable_json(str::from_utf8(&text).unwrap()).into_owned())
}

/// The request that prost-reflect reads; `None` if it refuses the text.
fn judged_request(text: &str) -> Option<RateLimitRequest> {
    let mut json = serde_json::Deserializer::from_str(text);
    let message = DynamicMessage::deserialize(REQUEST.clone(), &mut json).ok()?;
    json.end().ok()?;
    Some(message.transcode_to().unwrap())
}

/// The request with each number in the form in which prost-reflect takes it.
fn as_judged(value: &Value) -> Value {
    const NUMBERS: [&str; 6] =
        ["hitsAddend", "hits_addend", "requestsPerUnit", "requests_per_unit", "unitMultiplier", "unit_multiplier"];
    let field = |(name, value): (&String, &Value)| {
        let value = match value {
            Value::String(text) if NUMBERS.contains(&&**name) => match serde_json::from_str::<Number>(text) {
                Ok(number) if text.trim() == text => judged_number(&number),
                _ => json!("not a number"),
            },
            Value::Number(number) if NUMBERS.contains(&&**name) || name == "unit" => judged_number(number),
            value => as_judged(value),
        };
        (name.clone(), value)
    };
    match value {
        Value::Object(fields) if has_both_spellings(fields) => json!({ "a field is there twice": true }),
        Value::Object(fields) => Value::Object(fields.iter().map(field).collect()),
        Value::Array(items) => items.iter().map(as_judged).collect(),
        value => value.clone(),
    }
}

fn has_both_spellings(fields: &Map<String, Value>) -> bool {
    let camel_case = fields.keys().map(|name| name.replace('_', "").to_lowercase());
    camel_case.collect::<HashSet<_>>().len() < fields.len()
}

/// A whole number without a fraction; one of 2^64 or more as text that is no number.
fn judged_number(number: &Number) -> Value {
    match number.as_f64() {
        Some(float) if number.is_f64() && float >= 18_446_744_073_709_551_616.0 => json!("out of range"),
        #[expect(clippy::cast_possible_truncation, reason = "it is whole and in range")]
        Some(float) if number.is_f64() && float.fract() == 0.0 && float.abs() < 1e15 => json!(float as i64),
        _ => json!(number),
    }
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![Just(String::new()), "[a-z]{1,6}", any::<String>()]
}

/// A request whose keys and values are text.
fn request() -> impl Strategy<Value = RateLimitRequest> {
    let entry = (text(), text()).prop_map(|(key, value)| Entry { key: key.into(), value: value.into() });
    let limit = (any::<u32>(), prop_oneof![0..9, any::<i32>()], option::of(0_u32..3)).prop_map(
        |(requests_per_unit, unit, unit_multiplier)| RateLimitOverride { requests_per_unit, unit, unit_multiplier },
    );
    let hits = option::of(prop_oneof![0..3_u64, any::<u64>()]);
    let descriptor = (vec(entry, 0..3), option::of(limit), hits, any::<bool>()).prop_map(
        |(entries, limit, hits_addend, is_negative_hits)| RateLimitDescriptor {
            entries,
            limit,
            hits_addend,
            is_negative_hits,
        },
    );
    (text(), vec(descriptor, 0..3), any::<u32>()).prop_map(|(domain, descriptors, hits_addend)| RateLimitRequest {
        domain,
        descriptors,
        hits_addend,
    })
}

/// Change of one field or item of a request.
#[derive(Clone, Debug)]
enum Change {
    /// Another value.
    Value(Value),
    /// Another name, if it is a field.
    Name(&'static str),
    /// The other spelling of the name, if it is a field.
    Spelling,
    /// Another field beside it.
    Beside(&'static str, Value),
}

const NAMES: [&str; 20] = [
    "domain",
    "descriptors",
    "hitsAddend",
    "hits_addend",
    "entries",
    "limit",
    "isNegativeHits",
    "is_negative_hits",
    "key",
    "value",
    "requestsPerUnit",
    "requests_per_unit",
    "unit",
    "unitMultiplier",
    "unit_multiplier",
    "hitsaddend",
    "HITS_ADDEND",
    "hits-addend",
    "",
    "unknown",
];

fn any_value() -> impl Strategy<Value = Value> {
    let texts = vec![
        "",
        "x",
        "0",
        "5",
        "-0",
        "-1",
        "01",
        "+1",
        " 1",
        "1 ",
        "1.0",
        "1.5",
        "10e-1",
        "1e1",
        "1e999",
        "4294967295",
        "4294967296",
        "18446744073709551615",
        "18446744073709551616",
        "NaN",
        "null",
        "[5]",
        "UNKNOWN",
        "DAY",
        "WEEK",
        "MONTH",
        "day",
        "true",
        "\u{e9}\n\u{2028}",
    ];
    let numbers =
        vec![-0.0, 1.0, 1.5, -1.0, 4_294_967_295.0, 4_294_967_296.0, 9.1e15, 1e17, 1.844_674_407_370_955_2e19, 1e300];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        select(texts).prop_map(Value::from),
        select(numbers).prop_map(Value::from),
        select(vec![0_u64, 1, 7, 4_294_967_295, 4_294_967_296, u64::MAX]).prop_map(Value::from),
        select(vec![-1, -2_147_483_648, -2_147_483_649, i64::MIN]).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 8, 3, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..3).prop_map(Value::from),
            vec((select(NAMES.as_slice()), inner), 0..3).prop_map(|fields| {
                Value::Object(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
            }),
        ]
    })
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        3 => any_value().prop_map(Change::Value),
        1 => select(NAMES.as_slice()).prop_map(Change::Name),
        3 => Just(Change::Spelling),
        1 => (select(NAMES.as_slice()), any_value()).prop_map(|(name, value)| Change::Beside(name, value)),
    ]
}

/// The places of all fields and items, as JSON pointers.
fn places(value: &Value, path: &str, found: &mut Vec<String>) {
    let below: Vec<(String, &Value)> = match value {
        Value::Object(fields) => fields.iter().map(|(name, value)| (format!("{path}/{name}"), value)).collect(),
        Value::Array(items) => items.iter().enumerate().map(|(at, item)| (format!("{path}/{at}"), item)).collect(),
        _ => return,
    };
    for (path, value) in below {
        places(value, &path, found);
        found.push(path);
    }
}

fn apply(request: &mut Value, place: &str, change: Change) {
    let (parent, name) = place.rsplit_once('/').unwrap();
    let rename = |request: &mut Value, to: String| {
        let Some(Value::Object(fields)) = request.pointer_mut(parent) else { return };
        *fields = std::mem::take(fields)
            .into_iter()
            .map(|(field, value)| (if field == name { to.clone() } else { field }, value))
            .collect::<Map<_, _>>();
    };
    match change {
        Change::Value(value) => *request.pointer_mut(place).unwrap() = value,
        Change::Name(to) => rename(request, to.to_owned()),
        Change::Spelling if name.contains('_') => {
            let mut words = name.split('_');
            let first = words.next().unwrap().to_owned();
            rename(request, words.fold(first, |name, word| name + &word[..1].to_uppercase() + &word[1..]));
        }
        Change::Spelling => {
            let snake =
                name.chars().map(|c| if c.is_uppercase() { format!("_{}", c.to_lowercase()) } else { c.into() });
            rename(request, snake.collect());
        }
        Change::Beside(beside, value) => {
            if let Some(Value::Object(fields)) = request.pointer_mut(parent) {
                fields.insert(beside.to_owned(), value);
            }
        }
    }
}

/// Some value of metadata; numbers that are not finite have no form in JSON.
fn metadata_value() -> impl Strategy<Value = prost_types::Value> {
    let leaf = prop_oneof![
        Just(None),
        Just(Some(Kind::NullValue(0))),
        any::<bool>().prop_map(|value| Some(Kind::BoolValue(value))),
        prop_oneof![
            (-9_i32..9).prop_map(f64::from),
            any::<f64>(),
            select(vec![0.0, -0.0, 1e21, 1e-9, 5e15, f64::MAX]),
            select(vec![f64::NAN, f64::INFINITY]),
        ]
        .prop_map(|number| Some(Kind::NumberValue(number))),
        text().prop_map(|text| Some(Kind::StringValue(text))),
    ];
    leaf.prop_map(|kind| prost_types::Value { kind }).prop_recursive(5, 16, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(|values| Kind::ListValue(ListValue { values })),
            vec((text(), inner), 0..4)
                .prop_map(|fields| Kind::StructValue(Struct { fields: fields.into_iter().collect() })),
        ]
        .prop_map(|kind| prost_types::Value { kind: Some(kind) })
    })
}

fn quota() -> impl Strategy<Value = Quota> {
    let seconds = prop_oneof![
        0..9_000_000_000_i64,
        select(vec![-62_135_596_801, -62_135_596_800, 253_402_300_799, 253_402_300_800]),
        any::<i64>(),
    ];
    let end = (seconds, prop_oneof![Just(0), 0..1_000_000_000, any::<i32>()])
        .prop_map(|(seconds, nanos)| quota::ExpirationSpecifier::ValidUntil(Timestamp { seconds, nanos }));
    (0_u32..3, text(), option::of(end)).prop_map(|(requests, id, expiration_specifier)| Quota {
        requests,
        id,
        expiration_specifier,
    })
}

fn status() -> impl Strategy<Value = DescriptorStatus> {
    let limit = (text(), any::<u32>(), -1..9, option::of(0_u32..3)).prop_map(
        |(name, requests_per_unit, unit, unit_multiplier)| RateLimit { name, requests_per_unit, unit, unit_multiplier },
    );
    let seconds = prop_oneof![
        -9..9_i64,
        select(vec![-315_576_000_001, -315_576_000_000, 315_576_000_000, 315_576_000_001, i64::MIN]),
    ];
    let nanos = prop_oneof![Just(0), -999_999_999..1_000_000_000, select(vec![1_000_000_000, i32::MIN])];
    let duration = (seconds, nanos).prop_map(|(seconds, nanos)| Duration { seconds, nanos });
    (-1..4, option::of(limit), 0_u32..3, option::of(duration), option::of(quota())).prop_map(
        |(code, current_limit, limit_remaining, duration_until_reset, quota)| DescriptorStatus {
            code,
            current_limit,
            limit_remaining,
            duration_until_reset,
            quota,
        },
    )
}

fn response() -> impl Strategy<Value = RateLimitResponse> {
    let header = || {
        vec((text(), text(), vec(any::<u8>(), 0..4)), 0..3).prop_map(|headers| {
            headers.into_iter().map(|(key, value, raw_value)| HeaderValue { key, value, raw_value }).collect()
        })
    };
    let metadata =
        vec((text(), metadata_value()), 0..3).prop_map(|fields| Struct { fields: fields.into_iter().collect() });
    let parts = (-1..4, vec(status(), 0..2), header(), header(), vec(any::<u8>(), 0..6), option::of(metadata));
    (parts, option::weighted(0.2, quota())).prop_map(
        |(
            (overall_code, statuses, response_headers_to_add, request_headers_to_add, raw_body, dynamic_metadata),
            quota,
        )| {
            RateLimitResponse {
                overall_code,
                statuses,
                response_headers_to_add,
                request_headers_to_add,
                raw_body,
                dynamic_metadata,
                quota,
            }
        },
    )
}

proptest! {
    #[test]
    fn requests_are_written_as_the_descriptors_say(request in request()) {
        let text = request_to_json(&request).unwrap();
        prop_assert_eq!(Some(text.clone()), judged_json(&REQUEST, &request));
        prop_assert_eq!(request_from_json(text.as_bytes()).unwrap(), request);
    }

    #[test]
    fn requests_are_read_as_the_descriptors_say(
        request in request(),
        changes in vec((any::<Index>(), change()), 0..4),
    ) {
        let mut json: Value = serde_json::from_str(&request_to_json(&request).unwrap()).unwrap();
        for (at, change) in changes {
            let mut found = Vec::new();
            places(&json, "", &mut found);
            if !found.is_empty() {
                apply(&mut json, at.get::<String>(&found), change);
            }
        }
        let read = request_from_json(json.to_string().as_bytes());
        let expected = judged_request(&as_judged(&json).to_string());
        prop_assert_eq!(read.as_ref().ok(), expected.as_ref(), "{}: {:?}", json, read);
    }

    #[test]
    fn responses_are_written_as_the_descriptors_say(response in response()) {
        prop_assert_eq!(response_to_json(&response).ok(), judged_json(&RESPONSE, &response));
    }
}

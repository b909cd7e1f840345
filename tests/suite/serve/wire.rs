//! The wire format: protobuf and JSON requests are decoded, decisions are encoded, and no input breaks the decoder.

use std::borrow::Cow;

use proptest::prelude::*;
use prost::Message;
use prost::bytes::Bytes;
use prost_types::value::Kind;
use serde_json::json;
use tollkeeper::base::pb::proto_json::{JsonError, request_from_json, response_to_json};
use tollkeeper::base::pb::rate_limit_descriptor::{Entry, RateLimitOverride};
use tollkeeper::base::pb::rate_limit_response::{Code, Quota, quota, rate_limit};
use tollkeeper::base::pb::{RateLimitDescriptor, RateLimitRequest, RateLimitResponse, RateLimitUnit};
use tollkeeper::decide::decision::{CurrentLimit, Decision, Header, ReportedStatus};
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::{self, Hits, LimitOverride, MAX_HITS_OF_DESCRIPTOR};
use tollkeeper::serve::grpc::{decode, encode};

/// A request with one descriptor.
fn request(hits_addend: u32, descriptor: RateLimitDescriptor) -> RateLimitRequest {
    RateLimitRequest { domain: "shop".into(), descriptors: vec![descriptor], hits_addend }
}

fn entry(key: &str, value: impl Into<Bytes>) -> Entry {
    Entry { key: Bytes::copy_from_slice(key.as_bytes()), value: value.into() }
}

/// Encodes and decodes a message.
fn sent<M: Message + Default>(message: &M) -> M {
    M::decode(message.encode_to_vec().as_slice()).unwrap()
}

/// True if the borrowed decoder accepts the bytes; checks that prost decodes the same message.
fn decodes_borrowed(bytes: &[u8]) -> bool {
    let message = RateLimitRequest::decode(bytes);
    let request = decode::decode_borrowed_request(bytes);
    if let Some(request) = &request {
        assert_eq!(request, &decode::convert_request(message.as_ref().expect("prost reads it too")), "{bytes:02x?}");
    }
    request.is_some()
}

#[test]
fn hits_default_from_descriptor_to_request_to_one() {
    let table = [
        // hits of the request, hits of the descriptor, negative, hits charged
        (0, None, false, Hits::Charge(1)),
        (1, None, false, Hits::Charge(1)),
        (7, None, false, Hits::Charge(7)),
        (u32::MAX, None, false, Hits::Charge(u64::from(u32::MAX))),
        (0, Some(0), false, Hits::Peek),
        (7, Some(0), false, Hits::Peek),
        (7, Some(1), false, Hits::Charge(1)),
        (0, Some(9), false, Hits::Charge(9)),
        (0, Some(MAX_HITS_OF_DESCRIPTOR), false, Hits::Charge(MAX_HITS_OF_DESCRIPTOR)),
        (0, Some(MAX_HITS_OF_DESCRIPTOR + 1), false, Hits::Charge(MAX_HITS_OF_DESCRIPTOR)),
        (0, Some(u64::MAX), false, Hits::Charge(MAX_HITS_OF_DESCRIPTOR)),
        (0, None, true, Hits::Refund(1)),
        (7, None, true, Hits::Refund(7)),
        (7, Some(0), true, Hits::Peek),
        (7, Some(3), true, Hits::Refund(3)),
        (0, Some(u64::MAX), true, Hits::Refund(MAX_HITS_OF_DESCRIPTOR)),
    ];
    for (request_hits, of_descriptor, is_negative_hits, expected) in table {
        let descriptor =
            RateLimitDescriptor { hits_addend: of_descriptor, is_negative_hits, ..RateLimitDescriptor::default() };
        let message = sent(&request(request_hits, descriptor));
        let decoded = decode::convert_request(&message);
        assert_eq!(decoded.descriptors[0].hits, expected, "{message:?}");
        assert_eq!(decoded.descriptors[0].hits_addend, of_descriptor, "{message:?}");
        assert!(decodes_borrowed(&message.encode_to_vec()), "{message:?}");
        assert_eq!(decoded.hits_addend, request_hits, "{message:?}");
    }
}

#[test]
fn override_is_decoded_as_sent() {
    let table = [
        // unit, multiplier, requests per unit, the multiplier seen
        (RateLimitUnit::Minute as i32, None, 10, 1),
        (RateLimitUnit::Unknown as i32, None, 0, 1),
        (RateLimitUnit::Hour as i32, Some(0), u32::MAX, 0),
        (RateLimitUnit::Year as i32, Some(u32::MAX), 1, u32::MAX),
        (7, Some(2), 5, 2),
        (i32::MAX, Some(1), 5, 1),
        (-1, None, 5, 1),
    ];
    for (unit, unit_multiplier, requests_per_unit, seen) in table {
        let limit = Some(RateLimitOverride { requests_per_unit, unit, unit_multiplier });
        let message = sent(&request(0, RateLimitDescriptor { limit, ..RateLimitDescriptor::default() }));
        let expected = LimitOverride { requests_per_unit, unit, unit_multiplier: seen };
        assert_eq!(decode::convert_request(&message).descriptors[0].limit_override, Some(expected), "{message:?}");
    }
    let plain = request(0, RateLimitDescriptor::default());
    assert_eq!(decode::convert_request(&plain).descriptors[0].limit_override, None);
}

#[test]
fn bytes_of_envoy_are_decoded() {
    let service = b"\x0a\x14\x0a\x07service\x12\x09service_2";
    let messages: [(&[u8], &[u8]); 3] = [
        (b"\x12\x14\x0a\x08\x0a\x03foo\x12\x01f\x0a\x08\x0a\x03baz\x12\x01b", b""),
        (b"\x12\x18", b"\x1a\x00"),
        (b"\x12\x1a", b"\x1a\x02\x08\x01"),
    ];
    let [first, peek, charge] = messages.map(|(head, tail)| {
        let entries: &[u8] = if tail.is_empty() { b"" } else { service };
        RateLimitRequest::decode([b"\x0a\x02rl", head, entries, tail].concat().as_slice()).unwrap()
    });

    let first = decode::convert_request(&first);
    assert_eq!(first.domain, "rl");
    let entries: Vec<_> = first.descriptors[0].entries.iter().map(|entry| (entry.key, entry.value)).collect();
    assert_eq!(entries, [(b"foo".as_slice(), b"f".as_slice()), (b"baz", b"b")]);
    assert_eq!(first.descriptors[0].hits, Hits::Charge(1));

    for (message, hits, addend) in [(peek, Hits::Peek, 0), (charge, Hits::Charge(1), 1)] {
        let decoded = decode::convert_request(&message);
        assert_eq!(decoded.descriptors[0].entries[0], request::Entry { key: b"service", value: b"service_2" });
        assert_eq!((decoded.descriptors[0].hits, decoded.descriptors[0].hits_addend), (hits, Some(addend)));
    }
}

#[test]
fn any_value_is_decoded_whole() {
    let long = vec![b'x'; 20_000];
    let values: [&[u8]; 5] = [b"", b"caf\xe9", b"\x00\xff\xfe\x00", b"a|b=c{d}", &long];
    for value in values {
        let entries = vec![entry("x-user", Bytes::copy_from_slice(value))];
        let message = sent(&request(0, RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }));
        assert_eq!(decode::convert_request(&message).descriptors[0].entries[0].value, value);
    }
}

#[test]
fn thousands_of_descriptors_keep_their_order() {
    let descriptors = (0..5_000)
        .map(|number: u32| RateLimitDescriptor {
            entries: vec![entry("number", number.to_string())],
            ..RateLimitDescriptor::default()
        })
        .collect();
    let message = sent(&RateLimitRequest { domain: "shop".into(), descriptors, hits_addend: 0 });
    let decoded = decode::convert_request(&message);
    assert_eq!(decoded.descriptors.len(), 5_000);
    for (number, descriptor) in decoded.descriptors.iter().enumerate() {
        assert_eq!(descriptor.entries[0].value, number.to_string().as_bytes());
    }
}

#[test]
fn empty_message_is_an_empty_request() {
    let message = RateLimitRequest::decode(b"".as_slice()).unwrap();
    assert_eq!(decode::convert_request(&message), request::Request::default());
    let message = RateLimitRequest::decode(b"\x12\x00".as_slice()).unwrap();
    assert!(decode::convert_request(&message).descriptors[0].entries.is_empty());
}

/// Decision with every field set, rejected by the first of two descriptors.
fn rejection() -> Decision<'static> {
    let period = Period::new(Unit::Week, 2).unwrap();
    let metadata = json!({ "text": "t", "number": 5, "none": null, "yes": true, "list": [1.5, {}] });
    Decision {
        over_limit: true,
        shadowed: false,
        statuses: [
            ReportedStatus {
                over_limit: true,
                current_limit: Some(CurrentLimit { name: "per-key", requests_per_unit: 10, period }),
                remaining: 0,
                until_reset_s: Some(34),
            },
            ReportedStatus { remaining: u32::MAX.into(), ..ReportedStatus::default() },
        ]
        .into_iter()
        .collect(),
        headers: [
            Header { name: "RateLimit-Limit", value: Cow::Borrowed("10") },
            Header { name: "RateLimit-Remaining", value: Cow::Owned("0".into()) },
        ]
        .into_iter()
        .collect(),
        request_headers: vec![Header { name: "x-exceeded", value: Cow::Borrowed("a;shadow\r\n") }],
        body: Some("slow down".into()),
        metadata: metadata.as_object().cloned(),
        delay_us: 0,
    }
}

#[test]
fn decision_is_encoded_in_full() {
    let response = sent(&encode::encode_response(&rejection()));
    assert_eq!(response.overall_code(), Code::OverLimit);
    let [over, unlimited] = response.statuses.as_slice() else { panic!("{response:?}") };
    assert_eq!(over.code(), Code::OverLimit);
    let limit = over.current_limit.clone().unwrap();
    assert_eq!((limit.name.as_str(), limit.requests_per_unit), ("per-key", 10));
    assert_eq!((limit.unit(), limit.unit_multiplier), (rate_limit::Unit::Week, Some(2)));
    assert_eq!(over.limit_remaining, 0);
    assert_eq!(over.duration_until_reset, Some(prost_types::Duration { seconds: 34, nanos: 0 }));
    assert_eq!((unlimited.code(), unlimited.limit_remaining), (Code::Ok, u32::MAX));
    assert_eq!((&unlimited.current_limit, &unlimited.duration_until_reset), (&None, &None));
    let headers: Vec<_> = response.response_headers_to_add.iter().map(|h| (h.key.as_str(), h.value.as_str())).collect();
    assert_eq!(headers, [("RateLimit-Limit", "10"), ("RateLimit-Remaining", "0")]);
    assert!(response.response_headers_to_add.iter().all(|header| header.raw_value.is_empty()));
    assert_eq!(response.raw_body, b"slow down");
    let [exceeded] = response.request_headers_to_add.as_slice() else { panic!("{response:?}") };
    assert_eq!((exceeded.key.as_str(), exceeded.value.as_str()), ("x-exceeded", "a;shadow"));
    assert_eq!(response.quota, None);
}

#[test]
fn inapplicable_fields_are_left_unset() {
    let mut decision = rejection();
    decision.over_limit = false;
    decision.metadata = None;
    let period = Period::new(Unit::Minute, 1).unwrap();
    decision.statuses[0].current_limit = Some(CurrentLimit { name: "", requests_per_unit: 1, period });
    let response = encode::encode_response(&decision);
    assert_eq!(response.overall_code(), Code::Ok);
    assert!(response.raw_body.is_empty(), "an OK response has no body of a rejection");
    assert_eq!(response.dynamic_metadata, None);
    assert_eq!(response.statuses[0].current_limit.as_ref().unwrap().unit_multiplier, None);
}

#[test]
fn every_unit_has_its_enum_value() {
    for unit in Unit::ALL {
        let number = rate_limit::Unit::from_str_name(&unit.name().to_uppercase()).unwrap();
        assert_eq!(unit.protobuf_number(), Some(number as i32), "{unit:?}");
    }
}

#[test]
fn overlong_duration_is_clamped() {
    for seconds in [315_576_000_000, u64::MAX] {
        let mut decision = rejection();
        decision.statuses[0].until_reset_s = Some(seconds);
        let response = encode::encode_response(&decision);
        assert_eq!(response.statuses[0].duration_until_reset.unwrap().seconds, 315_576_000_000);
        assert!(response_to_json(&response).is_ok());
    }
}

#[test]
fn metadata_of_any_depth_is_decodable() {
    for in_list in [false, true] {
        let mut value = json!("innermost");
        for depth in 1..=100 {
            value = if in_list && depth != 1 { json!([value]) } else { json!({ "a": value }) };
            let decision = Decision { metadata: json!({ "a": value }).as_object().cloned(), ..rejection() };
            let response = encode::encode_response(&decision);
            let metadata = sent(&response).dynamic_metadata.unwrap();
            let kept = format!("{metadata:?}").contains("innermost");
            assert_eq!(kept, depth < encode::MAX_METADATA_DEPTH, "lists: {in_list}, depth {depth}");
            assert!(response_to_json(&response).is_ok(), "lists: {in_list}, depth {depth}");
        }
    }
}

#[test]
fn request_is_decoded_from_json() {
    let full = json!({
        "domain": "shop",
        "hitsAddend": 3,
        "descriptors": [{
            "entries": [{ "key": "user", "value": "caf\u{e9}" }, { "key": "path" }],
            "limit": { "requestsPerUnit": 10, "unit": "HOUR", "unitMultiplier": 2 },
            "hitsAddend": "18446744073709551615",
            "isNegativeHits": true,
        }],
    });
    let expected = RateLimitRequest {
        domain: "shop".into(),
        hits_addend: 3,
        descriptors: vec![RateLimitDescriptor {
            entries: vec![entry("user", "caf\u{e9}"), entry("path", "")],
            limit: Some(RateLimitOverride { requests_per_unit: 10, unit: 3, unit_multiplier: Some(2) }),
            hits_addend: Some(u64::MAX),
            is_negative_hits: true,
        }],
    };
    assert_eq!(request_from_json(full.to_string().as_bytes()).unwrap(), expected);
    let original_names = full
        .to_string()
        .replace("hitsAddend", "hits_addend")
        .replace("requestsPerUnit", "requests_per_unit")
        .replace("unitMultiplier", "unit_multiplier")
        .replace("isNegativeHits", "is_negative_hits");
    assert_eq!(request_from_json(original_names.as_bytes()).unwrap(), expected);
}

#[test]
fn json_distinguishes_absent_from_zero() {
    let table = [
        (r"{}", None, None),
        (r#"{"hitsAddend": null}"#, None, None),
        (r#"{"hitsAddend": 0}"#, Some(0), None),
        (r#"{"hitsAddend": "0"}"#, Some(0), None),
        (r#"{"hits_addend": 5.0}"#, Some(5), None),
        (r#"{"limit": {}}"#, None, Some((0, None))),
        (r#"{"limit": {"unit": 7}}"#, None, Some((7, None))),
        (r#"{"limit": {"unit": 99, "unitMultiplier": 0}}"#, None, Some((99, Some(0)))),
        (r#"{"limit": {"unit": "YEAR"}}"#, None, Some((6, None))),
    ];
    for (text, hits_addend, limit) in table {
        let text = format!(r#"{{"descriptors": [{text}]}}"#);
        let read = request_from_json(text.as_bytes()).unwrap();
        let descriptor = &read.descriptors[0];
        assert_eq!(descriptor.hits_addend, hits_addend, "{text}");
        assert_eq!(descriptor.limit.as_ref().map(|limit| (limit.unit, limit.unit_multiplier)), limit, "{text}");
    }
}

#[test]
fn invalid_json_request_is_rejected() {
    let deep = [r#"{"descriptors":"#, &"[".repeat(1_000_000)].concat();
    let table: [(&[u8], &str); 20] = [
        (b"", "EOF while parsing"),
        (b" \n", "EOF while parsing"),
        (b"null", "invalid type"),
        (b"[]", "invalid type"),
        (b"{", "EOF while parsing"),
        (b"{} {}", "trailing characters"),
        (b"\xef\xbb\xbf{}", "expected value"),
        (b"{\"domain\": \"caf\xe9\"}", "invalid unicode"),
        (br#"{"domain": "\ud800"}"#, "unexpected end of hex escape"),
        (br#"{"domain": 5}"#, "domain: invalid type"),
        (br#"{"domian": "shop"}"#, "unrecognized field name 'domian'"),
        (br#"{"hitsAddend": -1}"#, "hitsAddend: the number -1 is out of range at line 1 column 17"),
        (br#"{"hitsAddend": 4294967296}"#, "out of range"),
        (br#"{"hitsAddend": 1.5}"#, "expected integer"),
        (br#"{"descriptors": {}}"#, "invalid type"),
        (br#"{"descriptors": [null]}"#, "invalid type"),
        (
            br#"{"descriptors": [{"entries": [{"key": "a", "val": "b"}]}]}"#,
            "descriptors: entries: unrecognized field name 'val'",
        ),
        (br#"{"descriptors": [{"limit": {"unit": "WEEK"}}]}"#, "unrecognized enum value 'WEEK'"),
        (br#"{"descriptors": [{"limit": {"unit": "minute"}}]}"#, "unrecognized enum value 'minute'"),
        (deep.as_bytes(), "at line 1 column"),
    ];
    for (text, expected) in table {
        let shown = String::from_utf8_lossy(&text[..text.len().min(80)]).into_owned();
        match request_from_json(text) {
            Err(JsonError::NotARequest(error)) => assert!(error.to_string().contains(expected), "{shown}: {error}"),
            other => panic!("{shown}: {other:?}"),
        }
    }
}

/// Forms of numbers that protojson of Go accepts or refuses.
#[test]
fn json_numbers_are_read_as_envoyproxy_ratelimit_reads_them() {
    for number in ["2", "2.0", "2e0", "0.2e1", r#""2""#, r#""2.0""#, r#""2e0""#, r#""20e-1""#] {
        let text = format!(r#"{{"hitsAddend": {number}, "descriptors": [{{"hits_addend": {number}}}]}}"#);
        let read = request_from_json(text.as_bytes()).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!((read.hits_addend, read.descriptors[0].hits_addend), (2, Some(2)), "{text}");
    }
    let zero = request_from_json(br#"{"hitsAddend": "-0"}"#).unwrap();
    assert_eq!(zero.hits_addend, 0);
    let largest = br#"{"descriptors": [{"hitsAddend": "18446744073709551615"}]}"#;
    assert_eq!(request_from_json(largest).unwrap().descriptors[0].hits_addend, Some(u64::MAX));
    for number in [r#""01""#, r#""+1""#, r#"" 1""#, r#""1 ""#, r#""""#, r#""1.5""#, r#""18446744073709551616""#, "true"]
    {
        for field in ["hitsAddend", "hits_addend"] {
            let text = format!(r#"{{"descriptors": [{{"{field}": {number}}}]}}"#);
            assert!(matches!(request_from_json(text.as_bytes()), Err(JsonError::NotARequest(_))), "{text}");
        }
    }
    let unit = br#"{"descriptors": [{"limit": {"requestsPerUnit": "5.0", "unit": 3.0}}]}"#;
    let read = request_from_json(unit).unwrap();
    let limit = read.descriptors[0].limit.as_ref().unwrap();
    assert_eq!((limit.requests_per_unit, limit.unit), (5, 3));
}

/// A field that comes twice is an error, in both spellings too, and nothing is charged.
#[test]
fn json_field_that_comes_twice_is_refused() {
    for text in [
        r#"{"domain": "shop", "domain": "shop"}"#,
        r#"{"hitsAddend": 1, "hits_addend": 1}"#,
        r#"{"descriptors": [], "descriptors": []}"#,
        r#"{"descriptors": [{"entries": [{"key": "a", "value": "b", "key": "a"}]}]}"#,
    ] {
        match request_from_json(text.as_bytes()) {
            Err(JsonError::NotARequest(error)) => assert!(error.to_string().contains("there twice"), "{error}"),
            other => panic!("{text}: {other:?}"),
        }
    }
    let two = r#"{"descriptors": [{"entries": [{"key": "a"}, {"key": "a"}]}, {"entries": []}]}"#;
    assert_eq!(request_from_json(two.as_bytes()).unwrap().descriptors.len(), 2);
}

#[test]
fn request_is_read_from_lines_of_logs() {
    let page = include_str!("../../../docs/why.md");
    let access_log = page.lines().find(|line| line.contains("\"ratelimit\":{")).expect("why.md shows a line").trim();
    let metadata = r#"{"descriptors":[{"entries":["q=a=b,c","flag="],"hitsAddend":0}],"domain":"shop","hitsAddend":2}"#;
    let page = include_str!("../../../docs/decision-log.md");
    let record = page.lines().find(|line| line.starts_with("{\"v\":1")).expect("decision-log.md shows a record");
    let refund = r#"{"domain":"d","verdict":"ok","descriptors":[{"entries":[{"key":"k"}],"hits":-3}]}"#;
    for (text, expected) in [
        (
            access_log,
            r#"{"domain":"gateway","descriptors":[{"entries":[{"key":"remote_address","value":"127.0.0.1"}]},{"entries":[{"key":"api_key","value":"alice"}]}]}"#,
        ),
        (
            metadata,
            r#"{"domain":"shop","descriptors":[{"entries":[{"key":"q","value":"a=b,c"},{"key":"flag"}],"hitsAddend":"0"}],"hitsAddend":2}"#,
        ),
        (record, r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"alice"}],"hitsAddend":"1"}]}"#),
        (refund, r#"{"domain":"d","descriptors":[{"entries":[{"key":"k"}],"hitsAddend":"3","isNegativeHits":true}]}"#),
    ] {
        let read = request_from_json(text.as_bytes()).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(read, request_from_json(expected.as_bytes()).unwrap(), "{text}");
    }
    // A misspelt request is none, nor is a record without its values.
    for text in [
        r#"{"domain":"d","descriptors":[{"entries":[{"key":"k","value":"v"}]}],"hits":1}"#,
        r#"{"verdict":"ok","domain":"d","descriptors":[{"entries":[{"key":"k","value_hash":"00"}]}]}"#,
        r#"{"ratelimit":{"domain":"d"}}"#,
    ] {
        assert!(request_from_json(text.as_bytes()).is_err(), "{text}");
    }
}

#[test]
fn response_is_encoded_as_json() {
    let expected = concat!(
        r#"{"overallCode":"OVER_LIMIT","statuses":[{"code":"OVER_LIMIT","currentLimit":"#,
        r#"{"requestsPerUnit":10,"unit":"WEEK","name":"per-key","unitMultiplier":2},"durationUntilReset":"34s"},"#,
        r#"{"code":"OK","limitRemaining":4294967295}],"responseHeadersToAdd":[{"key":"RateLimit-Limit","value":"10"},"#,
        r#"{"key":"RateLimit-Remaining","value":"0"}],"requestHeadersToAdd":[{"key":"x-exceeded","value":"a;shadow"}],"#,
        r#""rawBody":"c2xvdyBkb3du","#,
        r#""dynamicMetadata":{"list":[1.5,{}],"none":null,"number":5,"text":"t","yes":true}}"#,
    );
    assert_eq!(response_to_json(&encode::encode_response(&rejection())).unwrap(), expected);
    assert_eq!(response_to_json(&RateLimitResponse::default()).unwrap(), "{}");
}

#[test]
fn response_without_json_form_is_an_error() {
    let mut response = encode::encode_response(&rejection());
    let fields = &mut response.dynamic_metadata.as_mut().unwrap().fields;
    fields.insert("number".into(), prost_types::Value { kind: Some(Kind::NumberValue(f64::NAN)) });
    assert!(matches!(response_to_json(&response), Err(JsonError::Unprintable(_))));

    let far = prost_types::Timestamp { seconds: i64::MAX, nanos: -1 };
    let expiration_specifier = Some(quota::ExpirationSpecifier::ValidUntil(far));
    let quota = Some(Quota { expiration_specifier, ..Quota::default() });
    let response = RateLimitResponse { quota, ..RateLimitResponse::default() };
    assert!(matches!(response_to_json(&response), Err(JsonError::Unprintable(_))));

    let mut value = prost_types::Value::default();
    for _ in 0..200 {
        value = prost_types::Value { kind: Some(Kind::ListValue(prost_types::ListValue { values: vec![value] })) };
    }
    let dynamic_metadata = Some(prost_types::Struct { fields: [("a".to_owned(), value)].into() });
    let response = RateLimitResponse { dynamic_metadata, ..RateLimitResponse::default() };
    assert!(matches!(response_to_json(&response), Err(JsonError::Unprintable(_))));
}

#[test]
fn file_descriptors_name_the_service_and_use_strings() {
    let pool = prost_reflect::DescriptorPool::decode(tollkeeper::base::pb::file_descriptor_set()).unwrap();
    let service = pool.get_service_by_name("envoy.service.ratelimit.v3.RateLimitService").unwrap();
    assert_eq!(service.methods().map(|method| method.name().to_owned()).collect::<Vec<_>>(), ["ShouldRateLimit"]);
    let entry = pool.get_message_by_name("envoy.extensions.common.ratelimit.v3.RateLimitDescriptor.Entry").unwrap();
    assert!(entry.fields().all(|field| field.kind() == prost_reflect::Kind::String));
}

/// Any request, with any bytes.
fn any_request() -> impl Strategy<Value = RateLimitRequest> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..30).prop_map(Bytes::from);
    let entries = prop::collection::vec((bytes(), bytes()).prop_map(|(key, value)| Entry { key, value }), 0..5);
    let limit =
        (any::<u32>(), any::<i32>(), any::<Option<u32>>()).prop_map(|(requests_per_unit, unit, unit_multiplier)| {
            RateLimitOverride { requests_per_unit, unit, unit_multiplier }
        });
    let descriptor = (entries, prop::option::of(limit), any::<Option<u64>>(), any::<bool>()).prop_map(
        |(entries, limit, hits_addend, is_negative_hits)| RateLimitDescriptor {
            entries,
            limit,
            hits_addend,
            is_negative_hits,
        },
    );
    (any::<String>(), prop::collection::vec(descriptor, 0..5), any::<u32>())
        .prop_map(|(domain, descriptors, hits_addend)| RateLimitRequest { domain, descriptors, hits_addend })
}

proptest! {
    #[test]
    fn request_round_trips(message in any_request()) {
        let decoded = decode::convert_request(&message);
        prop_assert_eq!(decoded.domain, &message.domain);
        prop_assert_eq!(decoded.descriptors.len(), message.descriptors.len());
        for (descriptor, sent) in decoded.descriptors.iter().zip(&message.descriptors) {
            let entries: Vec<_> = descriptor.entries.iter().map(|entry| (entry.key, entry.value)).collect();
            let expected: Vec<_> = sent.entries.iter().map(|entry| (&*entry.key, &*entry.value)).collect();
            prop_assert_eq!(entries, expected);
        }
        prop_assert_eq!(&sent(&message), &message);
        let is_plain = message.descriptors.iter().all(|descriptor| descriptor.limit.is_none());
        prop_assert_eq!(decodes_borrowed(&message.encode_to_vec()), is_plain);
    }

    /// Two concatenated messages decode as one merged message.
    #[test]
    fn borrowed_decode_equals_prost(first in any_request(), then in any_request()) {
        decodes_borrowed(&[first.encode_to_vec(), then.encode_to_vec()].concat());
        let all = first.descriptors.iter().chain(&then.descriptors).flat_map(RateLimitDescriptor::encode_to_vec);
        let all: Vec<u8> = all.collect();
        let mut bytes = vec![0x12];
        prost::encoding::encode_varint(all.len() as u64, &mut bytes);
        decodes_borrowed(&[bytes, all].concat());
    }

    #[test]
    fn any_bytes_are_decoded_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(message) = RateLimitRequest::decode(bytes.as_slice()) {
            decode::convert_request(&message);
        }
        decodes_borrowed(&bytes);
        if let Ok(message) = RateLimitResponse::decode(bytes.as_slice()) {
            let _ = response_to_json(&message);
        }
        let _ = request_from_json(&bytes);
    }

    #[test]
    fn damaged_messages_are_decoded_without_panic(
        message in any_request(),
        cut in any::<prop::sample::Index>(),
        flip in any::<(prop::sample::Index, u8)>(),
    ) {
        let mut bytes = message.encode_to_vec();
        bytes.push(0);
        let at = flip.0.index(bytes.len());
        bytes[at] ^= flip.1;
        for damaged in [bytes.as_slice(), &bytes[..cut.index(bytes.len())]] {
            if let Ok(message) = RateLimitRequest::decode(damaged) {
                decode::convert_request(&message);
            }
            decodes_borrowed(damaged);
        }
    }

    #[test]
    fn damaged_json_is_read_without_panic(cut in 0_usize..90, with in any::<u8>()) {
        let text = br#"{"domain":"d","descriptors":[{"entries":[{"key":"k","value":"v"}],"limit":{"unit":"DAY"}}]}"#;
        let mut damaged = text.to_vec();
        damaged[cut] = with;
        let _ = request_from_json(&damaged);
        prop_assert!(request_from_json(&text[..cut]).is_err());
    }
}

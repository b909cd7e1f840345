//! Descriptors that nest as deeply as they may, and deeper, and the messages that read them.

use std::thread;

use bytes::Bytes;
use proptest::prelude::*;
use prost::Message as _;
use prost::encoding::encode_varint;
use prost_types::value::Kind;
use prost_types::{Any, ListValue, Struct, Value};
use tollkeeper::base::pb::xds::{RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit};
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::rule::rlconfig::format_rlconfig;
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::xds::refused_domains::compile_resources;
use tollkeeper::rules::xds::resource::{
    MAX_DESCRIPTOR_DEPTH, PartlyDecodedDescriptor, PartlyDecodedRateLimitConfig, RuleResource, parse_resources,
};

use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::document::MAX_DESCRIPTORS;
use tollkeeper::rules::yaml::DocumentSelection;

use super::{accepted, client_of, facts};
use kit::http;
use kit::xds_server::{TYPE_URL, XdsServer, daily, limited, resource};

/// Stack of a thread that asks for none.
const STACK_BYTES: usize = 2 << 20;

fn field(number: u8, content: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    encode_varint(content.len() as u64, &mut field);
    field.extend(content);
    field
}

/// A resource of `domain` with one descriptor below another, `k0` to the limited innermost one.
fn chain(domain: &str, depth: usize, innermost: &RateLimitDescriptor) -> Any {
    let mut descriptor = innermost.encode_to_vec();
    for number in (0..depth - 1).rev() {
        let key = field(1, format!("k{number}").as_bytes());
        descriptor = [key, field(4, &descriptor)].concat();
    }
    let value = [field(1, domain.as_bytes()), field(2, domain.as_bytes()), field(3, &descriptor)].concat();
    Any { type_url: TYPE_URL.to_owned(), value }
}

/// Keys of such a chain.
fn keys(depth: usize) -> Vec<String> {
    (0..depth - 1).map(|number| format!("k{number}")).chain(["user".to_owned()]).collect()
}

fn compile(resources: Vec<Any>) -> Result<RuleSet, String> {
    let resources = parse_resources(resources).map_err(|errors| errors.join("\n"))?;
    let compiled = compile_resources(&resources, &CompileOptions::default());
    Ok(RuleSet::new(compiled.map_err(|problems| problems.to_string())?.domains))
}

/// Runs `work` with the stack of a usual thread, whatever that of the test is.
fn on_usual_stack<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    thread::scope(|scope| {
        thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, work).unwrap().join().unwrap()
    })
}

#[test]
fn deepest_descriptors_become_rules_and_deeper_ones_are_an_error() {
    on_usual_stack(|| {
        let innermost = limited("user", RateLimitUnit::Day, 3);
        let set = compile(vec![chain("deep", MAX_DESCRIPTOR_DEPTH, &innermost)]).unwrap();
        let path = keys(MAX_DESCRIPTOR_DEPTH).join(".");
        let expected = format!("deep.{path}: unit=DAY requests_per_unit=3, shadow_mode: false, quota_mode: false");
        assert_eq!(format_rlconfig(&set), [expected]);

        let error = compile(vec![chain("deep", MAX_DESCRIPTOR_DEPTH + 1, &innermost)]).unwrap_err();
        assert_eq!(error, "deep: it cannot be decoded: descriptors nest deeper than 98 levels");
        let error = compile(vec![chain("deep", 100_000, &innermost)]).unwrap_err();
        assert_eq!(error, "deep: it cannot be decoded: descriptors nest deeper than 98 levels");
    });
}

#[test]
fn problem_of_the_innermost_descriptor_is_found() {
    on_usual_stack(|| {
        let error = compile(vec![chain("deep", MAX_DESCRIPTOR_DEPTH, &limited("", RateLimitUnit::Unknown, 3))]);
        let error = error.unwrap_err();
        assert!(
            error.starts_with("deep: descriptor has empty key (descriptors[0].descriptors[0]"),
            "{}",
            &error[..200]
        );
        assert!(error.contains("invalid rate limit unit 'UNKNOWN'"));
    });
}

#[test]
fn metadata_keeps_the_bound_of_the_decoder() {
    let mut value = Value { kind: Some(Kind::BoolValue(true)) };
    for _ in 0..200 {
        value = Value { kind: Some(Kind::ListValue(ListValue { values: vec![value] })) };
    }
    let metadata = Some(Struct { fields: [("a".to_owned(), value)].into() });
    let innermost = RateLimitDescriptor { metadata, ..limited("user", RateLimitUnit::Day, 3) };
    let error = compile(vec![chain("deep", 3, &innermost)]).unwrap_err();
    assert!(error.contains("recursion limit"), "{error}");
}

#[test]
fn domain_that_nests_too_deeply_is_refused_alone_and_by_name() {
    let server = XdsServer::start();
    let tollkeeper = client_of(&server).start();
    let limited = limited("user", RateLimitUnit::Day, 1);
    let deepest = MAX_DESCRIPTOR_DEPTH;
    server.send(0, "1", "a", vec![chain("deep", deepest + 1, &limited), resource(&daily("shop", &[]))]);
    let refused = server.request(0, 1);
    let message = refused.error_detail.as_ref().map(|error| error.message.clone()).unwrap_or_default();
    assert!(message.contains("deep: it cannot be decoded: descriptors nest deeper than 98 levels"), "{message}");
    assert_eq!(tollkeeper.rules_status()["domains"], 1);
    server.send(0, "2", "b", vec![chain("deep", deepest, &limited), resource(&daily("shop", &[]))]);
    assert_eq!(facts(&server.request(0, 2)), accepted("2", "b"));
    let entries: Vec<_> = keys(deepest).iter().map(|key| format!(r#"{{"key":"{key}","value":"v"}}"#)).collect();
    let body = format!(r#"{{"domain":"deep","descriptors":[{{"entries":[{}]}}]}}"#, entries.join(","));
    assert_eq!([0; 2].map(|_| tollkeeper.post_json(&body).status), [200, 429]);
    let explained = tollkeeper.explain(&body);
    assert!(explained.to_string().contains("k96"), "{}", &explained.to_string()[..500]);
    let page = http::get(tollkeeper.debug_port(), "/rlconfig").send();
    assert!(page.text().contains("k96.user: unit=DAY requests_per_unit=1"), "{}", page.text());
}

/// The generated message of the same fields, whose descriptors are decoded.
fn generated(fields: PartlyDecodedDescriptor) -> Result<RateLimitDescriptor, prost::DecodeError> {
    let PartlyDecodedDescriptor {
        key,
        value,
        rate_limit,
        descriptors,
        shadow_mode,
        detailed_metric,
        quota_mode,
        metadata,
    } = fields;
    let below = |encoded: Bytes| generated(PartlyDecodedDescriptor::decode(encoded)?);
    let descriptors = descriptors.into_iter().map(below).collect::<Result<_, _>>()?;
    Ok(RateLimitDescriptor { key, value, rate_limit, descriptors, shadow_mode, detailed_metric, quota_mode, metadata })
}

fn generated_config(encoded: &[u8]) -> Result<RateLimitConfig, prost::DecodeError> {
    let PartlyDecodedRateLimitConfig { name, domain, descriptors } = PartlyDecodedRateLimitConfig::decode(encoded)?;
    let decode = |encoded: Bytes| generated(PartlyDecodedDescriptor::decode(encoded)?);
    Ok(RateLimitConfig { name, domain, descriptors: descriptors.into_iter().map(decode).collect::<Result<_, _>>()? })
}

fn any_descriptor() -> impl Strategy<Value = RateLimitDescriptor> {
    let policy = ("[ab]{0,2}", 0..9_i32, any::<u32>(), any::<bool>());
    let policy = policy.prop_map(|(name, unit, requests_per_unit, unlimited)| RateLimitPolicy {
        unit,
        requests_per_unit,
        unlimited,
        name,
        replaces: Vec::new(),
    });
    let metadata = prop::collection::btree_map("[a-c]", any::<bool>(), 0..3).prop_map(|fields| Struct {
        fields: fields.into_iter().map(|(name, flag)| (name, Value { kind: Some(Kind::BoolValue(flag)) })).collect(),
    });
    let modes = any::<(bool, bool, bool)>();
    let leaf = ("[a-c]{0,3}", "[a-c]{0,3}", prop::option::of(policy), modes, prop::option::of(metadata));
    let leaf = leaf.prop_map(|(key, value, rate_limit, modes, metadata)| RateLimitDescriptor {
        key,
        value,
        rate_limit,
        descriptors: Vec::new(),
        shadow_mode: modes.0,
        detailed_metric: modes.1,
        quota_mode: modes.2,
        metadata,
    });
    leaf.prop_recursive(4, 20, 3, |inner| {
        (inner.clone(), prop::collection::vec(inner, 0..3))
            .prop_map(|(outer, descriptors)| RateLimitDescriptor { descriptors, ..outer })
    })
}

#[test]
fn number_of_descriptors_and_of_reported_problems_is_bounded() {
    let many = |count: usize| {
        let descriptors = field(3, &[]).repeat(count);
        let value = [field(1, b"many"), field(2, b"many"), descriptors].concat();
        Any { type_url: TYPE_URL.to_owned(), value }
    };
    let error = compile(vec![many(MAX_DESCRIPTORS + 1)]).unwrap_err();
    assert!(error.starts_with("many: it cannot be decoded: the rules have more than 300000 descriptors"), "{error}");
    // All resources count together.
    let error = compile(vec![many(MAX_DESCRIPTORS - 1), many(2)]).unwrap_err();
    assert!(error.contains("more than 300000 descriptors"), "{error}");
    let errors = parse_resources(vec![Any::default(); 100_000]).unwrap_err();
    assert_eq!((errors.len(), errors[100].as_str()), (101, "further resources were not read"));
    let text = format!("domain: d\ndescriptors: [{}]\n", vec!["{}"; MAX_DESCRIPTORS + 1].join(","));
    let text = RuleText { name: "x.yaml".into(), bytes: text.into(), documents: DocumentSelection::All };
    let found = compile_texts(&[text], &CompileOptions::default()).unwrap_err();
    assert_eq!(found.error_count(), 1);
    assert!(found.to_string().contains("more than 300000 descriptors, with this file"), "{found}");
}

proptest! {
    /// The messages that leave descriptors encoded read the same bytes as the generated ones, also damaged bytes.
    #[test]
    fn messages_with_encoded_descriptors_equal_the_generated_ones(
        descriptors in prop::collection::vec(any_descriptor(), 0..4),
        damage in prop::option::of((any::<prop::sample::Index>(), any::<u8>())),
    ) {
        let config = RateLimitConfig { name: "n".to_owned(), domain: "d".to_owned(), descriptors };
        let mut encoded = config.encode_to_vec();
        if let Some((at, byte)) = damage {
            let at = at.index(encoded.len());
            encoded[at] = byte;
        }
        let expected = RateLimitConfig::decode(&*encoded);
        prop_assert_eq!(generated_config(&encoded).ok(), expected.clone().ok());
        let resource = RuleResource { name: "n".into(), domain: "d".to_owned(), encoded: encoded.into() };
        prop_assert_eq!(resource.decode(&mut 1_000_000).is_ok(), expected.is_ok());
    }
}

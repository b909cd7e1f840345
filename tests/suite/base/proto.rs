//! Comparison of the files of `proto/` with the descriptors in a real Envoy binary.
//!
//! Every message, field, enum value and method becomes a line of text with its properties on the wire. Envoy must have
//! all of our lines, and [`LEFT_OUT`] lists Envoy's other ones, so the test notices a field that a newer Envoy adds.
//! The descriptor set has `string` for an entry's key and value; the tests of `wire` show that generated code accepts
//! bytes.

use std::collections::BTreeSet;
use std::io::BufRead;
use std::path::PathBuf;

use prost::Message;
use prost::encoding::{DecodeContext, decode_key, skip_field};
use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet};
use tollkeeper::base::pb;

/// Messages and enums of Envoy's files that ours omit.
const LEFT_OUT: [(&str, &str); 2] = [
    (
        "envoy.config.core.v3",
        "AsyncDataSource BuildVersion ControlPlane DataSource Extension HeaderMap HeaderValueOption KeyValue \
         KeyValueAppend KeyValueMutation KeyValuePair Locality Metadata Node QueryParameter RemoteDataSource \
         RequestMethod RetryPolicy RoutingPriority RuntimeDouble RuntimeFeatureFlag RuntimeFractionalPercent \
         RuntimePercent RuntimeUInt32 RuntimeUInt64 TrafficDirection TransportSocket WatchedDirectory",
    ),
    (
        "envoy.extensions.common.ratelimit.v3",
        "LocalClusterRateLimit LocalRateLimitDescriptor VhRateLimitsOptions XRateLimitHeadersRFCVersion",
    ),
];

#[test]
fn declared_messages_match_envoy() {
    for (ours, envoys) in file_pairs() {
        let extra: Vec<_> = ours.difference(&envoys).collect();
        assert!(extra.is_empty(), "in proto/, but not in Envoy: {extra:#?}");
    }
}

#[test]
fn omitted_fields_are_listed() {
    let missing: BTreeSet<String> = file_pairs().iter().flat_map(|(ours, envoys)| envoys - ours).collect();
    let left_out: Vec<String> = LEFT_OUT
        .iter()
        .flat_map(|(package, names)| names.split_whitespace().map(move |name| format!("{package}.{name}")))
        .collect();
    let inside =
        |fact: &str, name: &String| fact.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with(['.', ' ']));
    let unlisted: Vec<_> = missing.iter().filter(|fact| !left_out.iter().any(|name| inside(fact, name))).collect();
    assert!(unlisted.is_empty(), "in Envoy, but neither in proto/ nor listed as left out: {unlisted:#?}");
    let stale: Vec<_> = left_out.iter().filter(|name| !missing.iter().any(|fact| inside(fact, name))).collect();
    assert!(stale.is_empty(), "listed as left out, but not in Envoy, or in proto/: {stale:#?}");
}

/// Lines of our version and of Envoy's version, for each of our files.
fn file_pairs() -> Vec<(BTreeSet<String>, BTreeSet<String>)> {
    let set = FileDescriptorSet::decode(pb::file_descriptor_set()).unwrap();
    let ours: Vec<_> = set.file.iter().filter(|file| file.name().starts_with("envoy/")).collect();
    assert_eq!(ours.len(), 4, "files of proto/ in the descriptor set");
    let path = std::env::var_os("TOLLKEEPER_TEST_ENVOY")
        .map(PathBuf::from)
        .expect("TOLLKEEPER_TEST_ENVOY must be the path of an Envoy binary; tests/run.sh installs one and sets it");
    let binary =
        std::fs::read(&path).unwrap_or_else(|error| panic!("TOLLKEEPER_TEST_ENVOY={}: {error}", path.display()));
    ours.into_iter().map(|file| (facts(file), facts(&envoys_file(&binary, file.name())))).collect()
}

/// Descriptor of the file `name`, located in the binary by its first field: 0x0a, the length, the name.
fn envoys_file(binary: &[u8], name: &str) -> FileDescriptorProto {
    let start = [&[u8::try_from(name.len()).unwrap()], name.as_bytes()].concat();
    let mut rest = binary;
    while rest.skip_until(0x0a).unwrap() > 0 {
        if rest.starts_with(&start) {
            let at = binary.len() - rest.len() - 1;
            return FileDescriptorProto::decode(one_message(&binary[at..])).unwrap();
        }
    }
    panic!("no descriptor of {name} in the Envoy binary");
}

/// Serialized message at the start of `bytes`, which ends before the first field with a lower number.
fn one_message(bytes: &[u8]) -> &[u8] {
    let (mut rest, mut end, mut last) = (bytes, bytes.len(), 0);
    while let Ok((number, wire_type)) = decode_key(&mut rest)
        && number >= last
        && skip_field(wire_type, number, &mut rest, DecodeContext::default()).is_ok()
    {
        (last, end) = (number, rest.len());
    }
    &bytes[..bytes.len() - end]
}

fn facts(file: &FileDescriptorProto) -> BTreeSet<String> {
    let mut facts = BTreeSet::from([format!("{} is {}", file.name(), file.syntax())]);
    let package = file.package();
    for message in &file.message_type {
        message_facts(package, message, &mut facts);
    }
    for values in &file.enum_type {
        enum_facts(package, values, &mut facts);
    }
    for service in &file.service {
        for method in &service.method {
            facts.insert(format!(
                "{package}.{}.{} ({} {}) returns ({} {})",
                service.name(),
                method.name(),
                if method.client_streaming() { "stream" } else { "one" },
                method.input_type(),
                if method.server_streaming() { "stream" } else { "one" },
                method.output_type(),
            ));
        }
    }
    facts
}

fn message_facts(scope: &str, message: &DescriptorProto, facts: &mut BTreeSet<String>) {
    let name = format!("{scope}.{}", message.name());
    facts.insert(format!("{name} message"));
    for field in &message.field {
        let oneof = field.oneof_index.map(|index| message.oneof_decl[usize::try_from(index).unwrap()].name());
        facts.insert(format!(
            "{name}.{} = {} {:?} {:?} {} oneof {oneof:?}",
            field.name(),
            field.number(),
            field.label(),
            field.r#type(),
            field.type_name()
        ));
    }
    for nested in &message.nested_type {
        message_facts(&name, nested, facts);
    }
    for values in &message.enum_type {
        enum_facts(&name, values, facts);
    }
}

fn enum_facts(scope: &str, values: &EnumDescriptorProto, facts: &mut BTreeSet<String>) {
    let name = format!("{scope}.{}", values.name());
    facts.insert(format!("{name} enum"));
    for value in &values.value {
        facts.insert(format!("{name}.{} = {}", value.name(), value.number()));
    }
}

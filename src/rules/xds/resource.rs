//! Resources: the rules of one domain each, as a control plane encodes them.
//!
//! A [`RuleResource`] keeps the encoded rules with the domain that they are of, which is known even if the rest cannot
//! be decoded. It becomes the document that the same rules in YAML become, without positions; the compiler does the
//! rest. Resources come in random order, so they are sorted by name and domain. Fields that the messages lack pass
//! unnoticed.
//!
//! Descriptors below a descriptor are kept as bytes, which are the same on the wire, and decoded one level at a time, so
//! that they are counted before they take memory.
//!
//! Decides: how a descriptor over xDS becomes a rule: units, metadata, depth (`MAX_DESCRIPTOR_DEPTH`).
//! Decides: a resource of another type; how many descriptors a response may have (`MAX_DESCRIPTORS`).

use std::sync::Arc;

use bytes::Bytes;
use prost::Message;
use prost_types::value::Kind;
use prost_types::{Any, Struct};

use super::subscription::TYPE_URL;
use crate::base::pb::xds::{RateLimitPolicy, RateLimitUnit};
use crate::limit::period::Unit;
use crate::rules::compile::NamedDocument;
use crate::rules::diagnostic::escape_for_message;
use crate::rules::document::{DescriptorSpec, Document, MAX_DESCRIPTORS, RateLimitEntry, RateLimitSpec};
use crate::rules::yaml::{Position, Spanned};

/// Encoded rules of a domain. Clones share them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleResource {
    /// Name in messages: that of the resource, else the domain.
    pub name: Arc<str>,
    /// Domain; empty if the resource has none.
    pub domain: String,
    /// Encoded `RateLimitConfig`.
    pub encoded: Bytes,
}

/// Parses names and domains of resources, and sorts by them. The rules are not decoded yet.
///
/// # Errors
/// The resources that are of another type, or have no readable domain.
pub fn parse_resources(resources: Vec<Any>) -> Result<Vec<RuleResource>, Vec<String>> {
    let count = resources.len();
    let mut read = Vec::with_capacity(count);
    let mut errors = Vec::new();
    for (index, resource) in resources.into_iter().enumerate() {
        if errors.len() == MAX_REPORTED_RESOURCES {
            errors.push("further resources were not read".to_owned());
            break;
        }
        match parse_resource(resource) {
            Ok(resource) => read.push(resource),
            Err(error) => errors.push(format!("resource {index} of {count}: {error}")),
        }
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    read.sort_by(|a, b| (&a.name, &a.domain).cmp(&(&b.name, &b.domain)));
    Ok(read)
}

/// Parses resources that were accepted before, from [`RuleResource::encoded`].
///
/// # Errors
/// The resources that have no readable domain.
pub fn parse_recorded_resources(encoded: Vec<Vec<u8>>) -> Result<Vec<RuleResource>, Vec<String>> {
    let resources = encoded.into_iter().map(|value| Any { type_url: TYPE_URL.to_owned(), value });
    parse_resources(resources.collect())
}

/// Maximum number of resources of a response that are reported.
const MAX_REPORTED_RESOURCES: usize = 100;

fn parse_resource(resource: Any) -> Result<RuleResource, String> {
    if resource.type_url != TYPE_URL {
        return Err(format!("it is a '{}', not a RateLimitConfig", escape_for_message(&resource.type_url)));
    }
    let encoded = Bytes::from(resource.value);
    let mut fields = PartlyDecodedRateLimitConfig::default();
    // Fields before the error are read: control planes write the domain first.
    let decoded = fields.merge(encoded.clone());
    let PartlyDecodedRateLimitConfig { name, domain, .. } = fields;
    if let (Err(error), true) = (decoded, domain.is_empty()) {
        return Err(format!("it cannot be decoded: {error}"));
    }
    let name: Arc<str> = escape_for_message(if name.is_empty() { &domain } else { &name }).into();
    Ok(RuleResource { name, domain, encoded })
}

impl RuleResource {
    /// The resource as a control plane sends it.
    pub fn to_any(&self) -> Any {
        Any { type_url: TYPE_URL.to_owned(), value: self.encoded.to_vec() }
    }

    /// Decodes the rules, at most `descriptors_left` descriptors, and subtracts their number.
    ///
    /// # Errors
    /// The rules are not protobuf, are more, or nest deeper than [`MAX_DESCRIPTOR_DEPTH`].
    pub fn decode(&self, descriptors_left: &mut usize) -> Result<NamedDocument, String> {
        let decoded = PartlyDecodedRateLimitConfig::decode(self.encoded.clone()).map_err(|error| error.to_string());
        let descriptors = decoded.and_then(|fields| decode_descriptors(fields.descriptors, 1, descriptors_left));
        let descriptors = descriptors.map_err(|error| format!("it cannot be decoded: {error}"))?;
        let domain = Spanned { value: self.domain.clone(), at: Position::default() };
        let document = Document { domain: Some(domain), descriptors, ..Document::default() };
        Ok(NamedDocument { file: Arc::clone(&self.name), document })
    }
}

/// Maximum number of descriptors from the outermost to the innermost one: decoders of protobuf,
/// and so envoyproxy/ratelimit, follow 100 nested messages.
pub const MAX_DESCRIPTOR_DEPTH: usize = 98;

/// `RateLimitConfig` with encoded descriptors.
#[derive(Clone, PartialEq, Message)]
pub struct PartlyDecodedRateLimitConfig {
    /// Name of the resource.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Domain.
    #[prost(string, tag = "2")]
    pub domain: String,
    /// Outermost descriptors, each a [`PartlyDecodedDescriptor`].
    #[prost(bytes = "bytes", repeated, tag = "3")]
    pub descriptors: Vec<Bytes>,
}

/// `RateLimitDescriptor` with encoded descriptors below it.
#[derive(Clone, PartialEq, Message)]
pub struct PartlyDecodedDescriptor {
    /// Key.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Value.
    #[prost(string, tag = "2")]
    pub value: String,
    /// Limit, if there is one.
    #[prost(message, optional, tag = "3")]
    pub rate_limit: Option<RateLimitPolicy>,
    /// Descriptors below, each a [`PartlyDecodedDescriptor`].
    #[prost(bytes = "bytes", repeated, tag = "4")]
    pub descriptors: Vec<Bytes>,
    /// The limit is in shadow mode.
    #[prost(bool, tag = "5")]
    pub shadow_mode: bool,
    /// Metric names contain the values of the request.
    #[prost(bool, tag = "6")]
    pub detailed_metric: bool,
    /// The limit is a quota.
    #[prost(bool, tag = "7")]
    pub quota_mode: bool,
    /// Metadata for responses.
    #[prost(message, optional, tag = "8")]
    pub metadata: Option<Struct>,
}

/// Decodes descriptors with all below them, at most `descriptors_left`, and subtracts their number. `depth` is that of `encoded`,
/// from 1.
///
/// # Errors
/// A descriptor is not protobuf, they are more, or nest deeper than [`MAX_DESCRIPTOR_DEPTH`].
fn decode_descriptors(
    encoded: Vec<Bytes>,
    depth: usize,
    descriptors_left: &mut usize,
) -> Result<Vec<DescriptorSpec>, String> {
    *descriptors_left = descriptors_left.checked_sub(encoded.len()).ok_or_else(|| {
        format!("the rules have more than {MAX_DESCRIPTORS} descriptors (several values of a key need one each)")
    })?;
    if depth > MAX_DESCRIPTOR_DEPTH && !encoded.is_empty() {
        return Err(format!("descriptors nest deeper than {MAX_DESCRIPTOR_DEPTH} levels"));
    }
    let decode = |(index, encoded)| {
        let mut fields = PartlyDecodedDescriptor::decode(encoded).map_err(|error| error.to_string())?;
        let below = decode_descriptors(std::mem::take(&mut fields.descriptors), depth + 1, descriptors_left)?;
        Ok(DescriptorSpec { descriptors: below, ..convert_descriptor(index, fields) })
    };
    encoded.into_iter().enumerate().map(decode).collect()
}

fn convert_descriptor(index: usize, fields: PartlyDecodedDescriptor) -> DescriptorSpec {
    DescriptorSpec {
        index,
        key: with_unknown_position(fields.key),
        value: fields.value,
        rate_limit: fields.rate_limit.map_or(RateLimitSpec::None, |policy| {
            RateLimitSpec::One(with_unknown_position(Box::new(convert_policy(policy))))
        }),
        shadow_mode: fields.shadow_mode,
        quota_mode: fields.quota_mode,
        detailed_metric: fields.detailed_metric,
        metadata: fields.metadata.map(|metadata| with_unknown_position(struct_to_json(metadata))),
        ..DescriptorSpec::default()
    }
}

fn convert_policy(policy: RateLimitPolicy) -> RateLimitEntry {
    RateLimitEntry {
        unit: Some(with_unknown_position(unit_name(policy.unit))),
        requests_per_unit: Some(with_unknown_position(policy.requests_per_unit.into())),
        unlimited: policy.unlimited,
        name: with_unknown_position(policy.name),
        replaces: policy.replaces.into_iter().map(|replaced| with_unknown_position(replaced.name)).collect(),
        ..RateLimitEntry::default()
    }
}

/// Returns the name of a unit as in YAML; that of an unknown one is no unit, which the compiler reports.
fn unit_name(unit: i32) -> String {
    match Unit::from_protobuf_number(unit) {
        Some(known) => known.name().to_owned(),
        None if unit == RateLimitUnit::Unknown as i32 => RateLimitUnit::Unknown.as_str_name().to_owned(),
        None => unit.to_string(),
    }
}

fn struct_to_json(fields: Struct) -> serde_json::Map<String, serde_json::Value> {
    fields.fields.into_iter().map(|(name, value)| (name, value_to_json(value.kind))).collect()
}

fn value_to_json(value: Option<Kind>) -> serde_json::Value {
    match value {
        None | Some(Kind::NullValue(_)) => serde_json::Value::Null,
        Some(Kind::NumberValue(number)) => number.into(),
        Some(Kind::StringValue(text)) => text.into(),
        Some(Kind::BoolValue(flag)) => flag.into(),
        Some(Kind::StructValue(fields)) => struct_to_json(fields).into(),
        Some(Kind::ListValue(list)) => list.values.into_iter().map(|value| value_to_json(value.kind)).collect(),
    }
}

fn with_unknown_position<T>(value: T) -> Spanned<T> {
    Spanned { value, at: Position::default() }
}

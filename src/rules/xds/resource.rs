//! Conversion of resources to rule documents.
//!
//! A resource becomes the document that the same rules in YAML become, without positions; the compiler does the rest.
//! Resources come in random order, so they are sorted by name and domain. Fields that the messages lack pass unnoticed.

use std::sync::Arc;

use prost::Message as _;
use prost_types::value::Kind;
use prost_types::{Any, Struct};

use super::subscription::TYPE_URL;
use crate::base::pb::xds::{RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit};
use crate::limit::period::Unit;
use crate::rules::compile::NamedDocument;
use crate::rules::diagnostic::escape_for_message;
use crate::rules::document::{DescriptorSpec, Document, RateLimitEntry, RateLimitSpec};
use crate::rules::yaml::{Position, Spanned};

/// Decodes resources to documents, sorted by name and domain.
///
/// # Errors
/// The resources that are of another type or cannot be decoded.
pub fn decode_documents(resources: &[Any]) -> Result<Vec<NamedDocument>, Vec<String>> {
    let mut documents = Vec::with_capacity(resources.len());
    let mut errors = Vec::new();
    for (index, resource) in resources.iter().enumerate() {
        match decode_document(resource) {
            Ok(document) => documents.push(document),
            Err(error) => errors.push(format!("resource {index} of {}: {error}", resources.len())),
        }
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    let domain = |named: &NamedDocument| named.document.domain.as_ref().map(|domain| domain.value.clone());
    documents.sort_by_cached_key(|named| (Arc::clone(&named.file), domain(named)));
    Ok(documents)
}

/// Decodes resources that were accepted before, from [`NamedDocument::resource`].
///
/// # Errors
/// The resources that cannot be decoded.
pub fn decode_recorded_documents(resources: Vec<Vec<u8>>) -> Result<Vec<NamedDocument>, Vec<String>> {
    let resources = resources.into_iter().map(|value| Any { type_url: TYPE_URL.to_owned(), value });
    decode_documents(&resources.collect::<Vec<_>>())
}

fn decode_document(resource: &Any) -> Result<NamedDocument, String> {
    if resource.type_url != TYPE_URL {
        return Err(format!("it is a '{}', not a RateLimitConfig", escape_for_message(&resource.type_url)));
    }
    let config = RateLimitConfig::decode(resource.value.as_slice());
    let config = config.map_err(|error| format!("it cannot be decoded: {error}"))?;
    Ok(NamedDocument { resource: resource.value.clone(), ..convert_config(config) })
}

fn convert_config(config: RateLimitConfig) -> NamedDocument {
    let RateLimitConfig { name, domain, descriptors } = config;
    let file: Arc<str> = escape_for_message(if name.is_empty() { &domain } else { &name }).into();
    let document = Document {
        domain: Some(with_unknown_position(domain)),
        descriptors: convert_descriptors(descriptors),
        ..Document::default()
    };
    NamedDocument { file, document, resource: Vec::new() }
}

fn convert_descriptors(descriptors: Vec<RateLimitDescriptor>) -> Vec<DescriptorSpec> {
    descriptors.into_iter().enumerate().map(|(index, written)| convert_descriptor(index, written)).collect()
}

fn convert_descriptor(index: usize, written: RateLimitDescriptor) -> DescriptorSpec {
    DescriptorSpec {
        index,
        key: with_unknown_position(written.key),
        value: written.value,
        rate_limit: written.rate_limit.map_or(RateLimitSpec::None, |policy| {
            RateLimitSpec::One(with_unknown_position(Box::new(convert_policy(policy))))
        }),
        shadow_mode: written.shadow_mode,
        quota_mode: written.quota_mode,
        detailed_metric: written.detailed_metric,
        metadata: written.metadata.map(struct_to_json),
        descriptors: convert_descriptors(written.descriptors),
        ..DescriptorSpec::default()
    }
}

fn convert_policy(policy: RateLimitPolicy) -> RateLimitEntry {
    RateLimitEntry {
        unit: Some(with_unknown_position(unit_name(policy.unit))),
        requests_per_unit: with_unknown_position(policy.requests_per_unit),
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

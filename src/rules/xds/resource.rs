//! Resources: the rules of one domain each, as a control plane encodes them.
//!
//! A [`RuleResource`] keeps the encoded rules with the domain that they are of, which is known even if the rest cannot
//! be decoded. It becomes the document that the same rules in YAML become, without positions; the compiler does the
//! rest. Resources come in random order, so they are sorted by name and domain. Fields that the messages lack pass
//! unnoticed.

use std::sync::Arc;

use bytes::Bytes;
use prost::Message as _;
use prost_types::Any;

use super::descriptors::{PartlyDecodedRateLimitConfig, decode_descriptors};
use super::subscription::TYPE_URL;
use crate::rules::compile::NamedDocument;
use crate::rules::diagnostic::escape_for_message;
use crate::rules::document::Document;
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

    /// Decodes the rules.
    ///
    /// # Errors
    /// The rules are not protobuf, or nest deeper than [`super::descriptors::MAX_DESCRIPTOR_DEPTH`].
    pub fn decode(&self) -> Result<NamedDocument, String> {
        let decoded = PartlyDecodedRateLimitConfig::decode(self.encoded.clone()).map_err(|error| error.to_string());
        let descriptors = decoded.and_then(|fields| decode_descriptors(fields.descriptors));
        let descriptors = descriptors.map_err(|error| format!("it cannot be decoded: {error}"))?;
        let domain = Spanned { value: self.domain.clone(), at: Position::default() };
        let document = Document { domain: Some(domain), descriptors: descriptors.into(), ..Document::default() };
        Ok(NamedDocument { file: Arc::clone(&self.name), document })
    }
}

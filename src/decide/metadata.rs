//! Dynamic metadata for Envoy: the request, the metadata of rules whose descriptors pass, and the rules or blocks that
//! rejected.
//!
//! Everything is copied, so that merging never changes a rule. The token of a slot is added in `slot_answers`.
//!
//! Decides: the dynamic metadata for Envoy; which `metadata` of rules is sent if several match or one rejects.
//! Decides: names in `over_limit`.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::blocks::{Block, BlockMatch};
use super::charged_request::ChargedRequest;
use super::outcome::DescriptorOutcome;
use super::selected_request::SelectedRequest;
use super::selection::Selection;
use super::status::DescriptorStatus;
use crate::limit::period::Unit;
use crate::limit::request::{Descriptor, LimitOverride, Request};
use crate::rules::rule::metric_names::build_override_metric_name;
use crate::settings::decisions::DecisionSettings;
use crate::telemetry::metrics::limit_registry::OVERFLOW_NAME;
use crate::telemetry::metrics::limit_stats::LimitName;

/// Metadata of an answer; `None` if it is switched off.
pub(super) fn build_metadata(charged: &ChargedRequest<'_, '_, '_>) -> Option<Map<String, Value>> {
    let SelectedRequest { decider, request, selections, .. } = *charged.selected;
    let behaviour = &decider.behaviour;
    if !behaviour.response_dynamic_metadata && !behaviour.metadata_verdicts {
        return None;
    }
    let mut fields = Map::new();
    if behaviour.response_dynamic_metadata {
        insert_request_fields(&mut fields, request);
        let attached = merge_rule_metadata(charged);
        if !attached.is_empty() {
            fields.insert("metadata".to_owned(), Value::Object(attached));
        }
    }
    if behaviour.metadata_verdicts {
        let rejections = selections.iter().zip(charged.statuses);
        let rejections = rejections.zip(&request.descriptors);
        let rejections: Vec<_> = rejections
            .filter_map(|((selection, status), descriptor)| {
                build_rejection_metadata(request.domain, selection, status, descriptor)
            })
            .collect();
        if !rejections.is_empty() {
            fields.insert("over_limit".to_owned(), Value::Array(rejections));
        }
        let overflows: Vec<_> = selections.iter().zip(charged.outcomes).flat_map(build_overflow_metadata).collect();
        if !overflows.is_empty() {
            fields.insert("overflow".to_owned(), Value::Array(overflows));
        }
    }
    Some(fields)
}

/// The limits that took hits which those before them had no room for.
fn build_overflow_metadata<'a>(
    (selection, outcome): (&'a Selection<'_>, &'a DescriptorOutcome),
) -> impl Iterator<Item = Value> + 'a {
    selection.limits.iter().enumerate().filter_map(move |(at, selected)| {
        let result = outcome.limit_result(at).filter(|_| selected.limit.chain_position().takes_overflow())?;
        let hits = result.after.checked_sub(result.before).filter(|hits| *hits > 0)?;
        let rule = selection.rule?.rule.limit_path(selected.index);
        Some(json!({ "rule": rule, "name": selected.name, "hits": hits }))
    })
}

/// Metadata of the rejection of a request with blocked entries; `None` if it is switched off.
pub(super) fn build_block_metadata(
    behaviour: &DecisionSettings,
    request: &Request<'_>,
    blocked: &BlockMatch,
) -> Option<Map<String, Value>> {
    if !behaviour.response_dynamic_metadata && !behaviour.metadata_verdicts {
        return None;
    }
    let mut fields = Map::new();
    if behaviour.response_dynamic_metadata {
        insert_request_fields(&mut fields, request);
    }
    if behaviour.metadata_verdicts {
        let rejection = |block: &Arc<Block>| {
            let Block { key, until, reason, domain: _, value: _ } = &**block;
            let key = String::from_utf8_lossy(key);
            json!({ "blocked": { "key": key, "reason": reason, "until": until.to_string() } })
        };
        let rejections = blocked.descriptors.iter().flatten().map(rejection).collect();
        fields.insert("over_limit".to_owned(), Value::Array(rejections));
    }
    Some(fields)
}

fn insert_request_fields(fields: &mut Map<String, Value>, request: &Request<'_>) {
    fields.insert("domain".to_owned(), json!(request.domain));
    let descriptors: Vec<_> = request.descriptors.iter().map(build_descriptor_metadata).collect();
    fields.insert("descriptors".to_owned(), Value::Array(descriptors));
    if request.hits_addend != 0 {
        fields.insert("hitsAddend".to_owned(), json!(request.hits_addend));
    }
}

fn build_descriptor_metadata(descriptor: &Descriptor<'_>) -> Value {
    let mut fields = Map::new();
    fields.insert("entries".to_owned(), descriptor.entries.iter().map(ToString::to_string).collect());
    if let Some(limit_override) = &descriptor.limit_override {
        fields.insert("limit".to_owned(), Value::String(format_override(limit_override)));
    }
    if let Some(hits_addend) = descriptor.hits_addend {
        fields.insert("hitsAddend".to_owned(), json!(hits_addend));
    }
    Value::Object(fields)
}

/// The limit in protobuf's text format, without fields at their default. A unit that Envoy's own enum lacks, such as a
/// week, is written as its number.
fn format_override(sent: &LimitOverride) -> String {
    let mut fields = Vec::new();
    if sent.requests_per_unit != 0 {
        fields.push(format!("requests_per_unit:{}", sent.requests_per_unit));
    }
    match Unit::from_protobuf_number(sent.unit).filter(|unit| unit.is_in_envoy_unit_enum()) {
        Some(unit) => fields.push(format!("unit:{}", unit.name().to_uppercase())),
        None if sent.unit != 0 => fields.push(format!("unit:{}", sent.unit)),
        None => {}
    }
    if sent.unit_multiplier != 1 {
        fields.push(format!("unit_multiplier:{{value:{}}}", sent.unit_multiplier));
    }
    fields.join(" ")
}

/// Metadata of the rules whose descriptors pass, merged in the order of the request; the first value of a key stays.
fn merge_rule_metadata(charged: &ChargedRequest<'_, '_, '_>) -> Map<String, Value> {
    let mut merged = Map::new();
    for (selection, status) in charged.selected.selections.iter().zip(charged.statuses) {
        let passed = !selection.limits.is_empty() && !status.shown.over_limit && !status.limit_verdicts.fail();
        let metadata = selection.rule.filter(|_| passed).and_then(|compiled| compiled.rule.metadata.as_ref());
        if let Some(metadata) = metadata {
            merge_keeping_existing(&mut merged, metadata);
        }
    }
    merged
}

fn merge_keeping_existing(merged: &mut Map<String, Value>, added: &Map<String, Value>) {
    for (key, value) in added {
        match (merged.get_mut(key), value) {
            (None, _) => {
                merged.insert(key.clone(), value.clone());
            }
            (Some(Value::Object(merged)), Value::Object(added)) => merge_keeping_existing(merged, added),
            (Some(_), _) => {}
        }
    }
}

/// The limit that rejected, for the access log, by its name in metrics, with its plan; `None` if none did.
fn build_rejection_metadata(
    domain: &str,
    selection: &Selection<'_>,
    status: &DescriptorStatus<'_>,
    descriptor: &Descriptor<'_>,
) -> Option<Value> {
    let shown = status.shown.over_limit.then_some(&status.shown)?;
    let rule = status.shown_limit_path(selection).unwrap_or_else(|| {
        let parts = build_override_metric_name(&descriptor.entries);
        let parts: Vec<_> = std::iter::once(domain).chain(parts.iter().map(String::as_str)).collect();
        let name = LimitName::from_request(&parts).unwrap_or_else(|| LimitName::new([domain, OVERFLOW_NAME]));
        name.as_str().to_owned()
    });
    let mut fields = Map::new();
    fields.insert("rule".to_owned(), json!(rule));
    fields.insert("name".to_owned(), json!(shown.current_limit.map_or("", |limit| limit.name)));
    if let Some(plan) = selection.plan() {
        fields.insert("plan".to_owned(), json!(*plan.name));
    }
    Some(Value::Object(fields))
}

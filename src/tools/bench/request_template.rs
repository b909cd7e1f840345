//! Templates of requests, sent many times with different values.
//!
//! In keys and values of descriptors, `{key}` is a number from the key space, `{n}` the number of the request,
//! `{random:N}` a random number below N, and `{run}` eight letters that differ in each run, for fresh counters. `{{` is
//! a brace.

use bytes::Bytes;
use rand::RngExt as _;
use rand::rngs::SmallRng;

use crate::base::pb::rate_limit_descriptor::Entry;
use crate::base::pb::{RateLimitDescriptor, RateLimitRequest};

/// A request with placeholders.
#[derive(Clone, Debug)]
pub struct RequestTemplate {
    /// The request as written; the keys and values of its descriptors are replaced.
    request: RateLimitRequest,
    /// Keys and values of each descriptor, parsed.
    descriptors: Vec<Vec<[TemplateText; 2]>>,
}

/// A text with placeholders.
type TemplateText = Vec<TemplatePart>;

#[derive(Clone, Debug, PartialEq, Eq)]
enum TemplatePart {
    Literal(String),
    Key,
    Number,
    Random(u64),
}

/// Values of the placeholders in one request.
#[derive(Debug)]
pub struct PlaceholderValues<'a> {
    /// The key, sampled from the key space.
    pub key: u64,
    /// Number of the request.
    pub number: u64,
    /// Source of random numbers.
    pub random: &'a mut SmallRng,
}

impl RequestTemplate {
    /// Parses the placeholders of a request, with `run` for `{run}`. The error names the invalid text.
    pub fn new(request: RateLimitRequest, run: &str) -> Result<Self, String> {
        let read = |bytes: &Bytes| {
            let text = std::str::from_utf8(bytes).map_err(|_| "a template is UTF-8".to_owned())?;
            parse_placeholders(text, run)
        };
        let entry = |entry: &Entry| Ok([read(&entry.key)?, read(&entry.value)?]);
        let descriptor = |descriptor: &RateLimitDescriptor| descriptor.entries.iter().map(entry).collect();
        let descriptors = request.descriptors.iter().map(descriptor).collect::<Result<_, String>>()?;
        Ok(Self { request, descriptors })
    }

    /// Returns the domain.
    pub fn domain(&self) -> &str {
        &self.request.domain
    }

    /// Formats each descriptor as it was written.
    pub fn descriptor_texts(&self) -> impl Iterator<Item = String> + '_ {
        let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
        self.request.descriptors.iter().map(move |descriptor| {
            let entries = descriptor.entries.iter().map(|entry| format!("{}={}", text(&entry.key), text(&entry.value)));
            entries.collect::<Vec<_>>().join(",")
        })
    }

    /// Returns the request with a value for every placeholder.
    pub fn fill_placeholders(&self, values: &mut PlaceholderValues<'_>) -> RateLimitRequest {
        let mut request = self.request.clone();
        for (descriptor, texts) in request.descriptors.iter_mut().zip(&self.descriptors) {
            for (entry, [key, value]) in descriptor.entries.iter_mut().zip(texts) {
                // A text without placeholders needs no copy.
                for (text, field) in [(key, &mut entry.key), (value, &mut entry.value)] {
                    match &text[..] {
                        [] => *field = Bytes::new(),
                        [TemplatePart::Literal(literal)] if literal.as_bytes() == field => {}
                        parts => *field = fill_template(parts, values).into(),
                    }
                }
            }
        }
        request
    }
}

fn fill_template(parts: &[TemplatePart], values: &mut PlaceholderValues<'_>) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(24);
    for part in parts {
        // Writing to a String does not fail.
        let _ = match part {
            TemplatePart::Literal(literal) => write!(text, "{literal}"),
            TemplatePart::Key => write!(text, "{}", values.key),
            TemplatePart::Number => write!(text, "{}", values.number),
            TemplatePart::Random(below) => write!(text, "{}", values.random.random_range(0..*below)),
        };
    }
    text
}

fn parse_placeholders(text: &str, run: &str) -> Result<TemplateText, String> {
    let mut parts = Vec::new();
    let mut literal = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        literal += before;
        if let Some(after) = after.strip_prefix('{') {
            literal.push('{');
            rest = after;
            continue;
        }
        let wrong = |what: &str| {
            format!("`{text}`: {what}; {{key}}, {{n}}, {{random:N}} and {{run}} are known, {{{{ is a brace")
        };
        let (name, after) = after.split_once('}').ok_or_else(|| wrong("a placeholder is not closed"))?;
        let part = match name {
            "run" => {
                literal += run;
                None
            }
            "key" => Some(TemplatePart::Key),
            "n" => Some(TemplatePart::Number),
            _ => match name.strip_prefix("random:").map(str::parse) {
                Some(Ok(below @ 1..)) => Some(TemplatePart::Random(below)),
                _ => return Err(wrong(&format!("{{{name}}} is not a placeholder"))),
            },
        };
        if let Some(part) = part {
            if !literal.is_empty() {
                parts.push(TemplatePart::Literal(std::mem::take(&mut literal)));
            }
            parts.push(part);
        }
        rest = after;
    }
    literal += rest;
    if !literal.is_empty() {
        parts.push(TemplatePart::Literal(literal));
    }
    Ok(parts)
}

/// Templates with weights.
#[derive(Clone, Debug)]
pub struct RequestMix {
    /// Each template with the sum of its weight and of those before it.
    templates: Vec<(u64, RequestTemplate)>,
}

impl RequestMix {
    /// Builds a mix. At least one weight must be above 0.
    pub fn new(weighted: impl IntoIterator<Item = (u32, RequestTemplate)>) -> Result<Self, String> {
        let mut sum = 0;
        let templates: Vec<_> = weighted
            .into_iter()
            .map(|(weight, template)| {
                sum += u64::from(weight);
                (sum, template)
            })
            .collect();
        if sum == 0 {
            return Err("a mix needs a request with a weight above 0".to_owned());
        }
        Ok(Self { templates })
    }

    /// Iterates over the templates in order.
    pub fn templates(&self) -> impl Iterator<Item = &RequestTemplate> {
        self.templates.iter().map(|(_, template)| template)
    }

    /// Samples a template, and its index.
    pub fn sample_template(&self, random: &mut SmallRng) -> (usize, &RequestTemplate) {
        let index = match &self.templates[..] {
            [_] => 0,
            all => {
                let position = random.random_range(0..all[all.len() - 1].0);
                all.partition_point(|(sum, _)| *sum <= position)
            }
        };
        (index, &self.templates[index].1)
    }
}

//! Requests by template: what is asked again and again, with other values.
//!
//! In keys and values of descriptors, `{key}` is the number that the key space drew for the request, `{n}` the number
//! of the request, `{random:N}` a number below N, and `{run}` eight letters that no other run has, so that counters
//! are fresh. `{{` is a brace.

use bytes::Bytes;
use rand::RngExt as _;
use rand::rngs::SmallRng;

use crate::pb::rate_limit_descriptor::Entry;
use crate::pb::{RateLimitDescriptor, RateLimitRequest};

/// A request with placeholders.
#[derive(Clone, Debug)]
pub struct Template {
    /// As it was written, but for the keys and values.
    request: RateLimitRequest,
    /// For each descriptor, its keys and values.
    descriptors: Vec<Vec<[Text; 2]>>,
}

/// A text with placeholders.
type Text = Vec<Part>;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Literal(String),
    Key,
    Number,
    Random(u64),
}

/// What placeholders stand for in one request.
#[derive(Debug)]
pub struct Values<'a> {
    /// The number that the key space drew.
    pub key: u64,
    /// The number of the request.
    pub number: u64,
    /// Where random numbers come from.
    pub random: &'a mut SmallRng,
}

impl Template {
    /// Reads the placeholders of a request. `run` is put where it is wanted. An error names the text that is wrong.
    pub fn new(request: RateLimitRequest, run: &str) -> Result<Self, String> {
        let read = |bytes: &Bytes| {
            let text = std::str::from_utf8(bytes).map_err(|_| "a template is UTF-8".to_owned())?;
            parts(text, run)
        };
        let entry = |entry: &Entry| Ok([read(&entry.key)?, read(&entry.value)?]);
        let descriptor = |descriptor: &RateLimitDescriptor| descriptor.entries.iter().map(entry).collect();
        let descriptors = request.descriptors.iter().map(descriptor).collect::<Result<_, String>>()?;
        Ok(Self { request, descriptors })
    }

    /// The domain.
    pub fn domain(&self) -> &str {
        &self.request.domain
    }

    /// How each descriptor was written.
    pub fn descriptors(&self) -> impl Iterator<Item = String> + '_ {
        let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
        self.request.descriptors.iter().map(move |descriptor| {
            let entries = descriptor.entries.iter().map(|entry| format!("{}={}", text(&entry.key), text(&entry.value)));
            entries.collect::<Vec<_>>().join(",")
        })
    }

    /// The request, once every placeholder has its value.
    pub fn fill(&self, values: &mut Values<'_>) -> RateLimitRequest {
        let mut request = self.request.clone();
        for (descriptor, texts) in request.descriptors.iter_mut().zip(&self.descriptors) {
            for (entry, [key, value]) in descriptor.entries.iter_mut().zip(texts) {
                // A text without placeholders is what it was.
                for (text, field) in [(key, &mut entry.key), (value, &mut entry.value)] {
                    match &text[..] {
                        [] => *field = Bytes::new(),
                        [Part::Literal(literal)] if literal.as_bytes() == field => {}
                        parts => *field = filled(parts, values).into(),
                    }
                }
            }
        }
        request
    }
}

fn filled(parts: &[Part], values: &mut Values<'_>) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(24);
    for part in parts {
        // Writing to a String does not fail.
        let _ = match part {
            Part::Literal(literal) => write!(text, "{literal}"),
            Part::Key => write!(text, "{}", values.key),
            Part::Number => write!(text, "{}", values.number),
            Part::Random(below) => write!(text, "{}", values.random.random_range(0..*below)),
        };
    }
    text
}

fn parts(text: &str, run: &str) -> Result<Text, String> {
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
            "key" => Some(Part::Key),
            "n" => Some(Part::Number),
            _ => match name.strip_prefix("random:").map(str::parse) {
                Some(Ok(below @ 1..)) => Some(Part::Random(below)),
                _ => return Err(wrong(&format!("{{{name}}} is no placeholder"))),
            },
        };
        if let Some(part) = part {
            if !literal.is_empty() {
                parts.push(Part::Literal(std::mem::take(&mut literal)));
            }
            parts.push(part);
        }
        rest = after;
    }
    literal += rest;
    if !literal.is_empty() {
        parts.push(Part::Literal(literal));
    }
    Ok(parts)
}

/// Templates, some met more often than others.
#[derive(Clone, Debug)]
pub struct Mix {
    /// Each with the sum of its weight and of those before it.
    templates: Vec<(u64, Template)>,
}

impl Mix {
    /// Each template with its weight. There must be one at least, and a weight that is not 0.
    pub fn new(weighted: impl IntoIterator<Item = (u32, Template)>) -> Result<Self, String> {
        let mut sum = 0;
        let templates: Vec<_> = weighted
            .into_iter()
            .map(|(weight, template)| {
                sum += u64::from(weight);
                (sum, template)
            })
            .collect();
        if sum == 0 {
            return Err("a mix needs a request whose weight is not 0".to_owned());
        }
        Ok(Self { templates })
    }

    /// All of them, in order.
    pub fn templates(&self) -> impl Iterator<Item = &Template> {
        self.templates.iter().map(|(_, template)| template)
    }

    /// The place of the next one, and the template.
    pub fn draw(&self, random: &mut SmallRng) -> (usize, &Template) {
        let place = match &self.templates[..] {
            [_] => 0,
            all => {
                let drawn = random.random_range(0..all[all.len() - 1].0);
                all.partition_point(|(sum, _)| *sum <= drawn)
            }
        };
        (place, &self.templates[place].1)
    }
}

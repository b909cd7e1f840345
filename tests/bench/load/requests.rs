//! Requests of the load: templates, sent many times with different values, and the distribution of their keys.
//!
//! In keys and values of descriptors, `{key}` is a number from the key space, `{n}` the number of the request,
//! `{random:N}` a random number below N, and `{run}` eight letters that differ in each run, for fresh counters. `{{` is
//! a brace.
//!
//! Decides: which keys and requests `bench` sends (`KeySpace`, `RequestTemplate`).

use std::fmt;
use std::str::FromStr;

use bytes::Bytes;
use rand::RngExt as _;
use rand::rngs::SmallRng;
use rand_distr::{Distribution as _, Zipf};
use tollkeeper::base::pb::rate_limit_descriptor::Entry;
use tollkeeper::base::pb::{RateLimitDescriptor, RateLimitRequest};

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

/// A set of keys, which are numbers from 0, and how often each is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KeySpace {
    /// A single key, the hottest possible.
    One,
    /// This many keys, all equally likely.
    Uniform(u64),
    /// A Zipf distribution: the n-th key has a frequency proportional to n to the power of minus the exponent, as
    /// names, addresses and URLs do.
    Zipf {
        /// Number of keys.
        count: u64,
        /// Exponent, from 0 (uniform) to 10.
        exponent: f64,
    },
}

/// Maximum number of keys: the integers that an `f64` represents exactly.
const MAX_KEYS: u64 = 1 << 53;
/// Default exponent: that of words in texts, and approximately of URLs in access logs.
const DEFAULT_ZIPF_EXPONENT: f64 = 1.0;

impl KeySpace {
    /// Returns a sampler of keys.
    pub fn build_sampler(self) -> KeySampler {
        match self {
            Self::One => KeySampler::One,
            Self::Uniform(count) => KeySampler::Uniform(count),
            Self::Zipf { count, exponent } => match Zipf::new(count as f64, exponent) {
                Ok(zipf) => KeySampler::Zipf(zipf),
                // Unreachable: parsing bounds the count and the exponent.
                Err(_) => KeySampler::One,
            },
        }
    }
}

/// Sampler of keys.
#[derive(Clone, Copy, Debug)]
pub enum KeySampler {
    /// Always 0.
    One,
    /// Uniform below this number.
    Uniform(u64),
    /// Zipf-distributed ranks.
    Zipf(Zipf<f64>),
}

impl KeySampler {
    /// Samples the key of the next request.
    pub fn sample_key(&self, random: &mut SmallRng) -> u64 {
        match self {
            Self::One => 0,
            Self::Uniform(count) => random.random_range(0..*count),
            // Ranks are whole numbers from 1.
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank, from 1 to the count")]
            Self::Zipf(zipf) => (zipf.sample(random) as u64).saturating_sub(1),
        }
    }
}

/// `one`, `uniform:COUNT`, `zipf:COUNT` or `zipf:COUNT:EXPONENT`.
impl FromStr for KeySpace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "write one, uniform:COUNT or zipf:COUNT:EXPONENT, such as zipf:1000000:1.1".to_owned();
        let count = |text: &str| match text.replace('_', "").parse() {
            Ok(count @ 1..=MAX_KEYS) => Ok(count),
            _ => Err(format!("`{text}` is not a number of keys; write 1 to {MAX_KEYS}")),
        };
        let parts: Vec<&str> = text.split(':').collect();
        Ok(match parts[..] {
            ["one"] => Self::One,
            ["uniform", number] => Self::Uniform(count(number)?),
            ["zipf", number] => Self::Zipf { count: count(number)?, exponent: DEFAULT_ZIPF_EXPONENT },
            ["zipf", number, exponent] => match exponent.parse() {
                Ok(exponent @ 0.0..=10.0) => Self::Zipf { count: count(number)?, exponent },
                _ => return Err(format!("`{exponent}` is not an exponent; write 0 to 10, such as 1.1")),
            },
            _ => return Err(wrong()),
        })
    }
}

impl fmt::Display for KeySpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One => f.write_str("one"),
            Self::Uniform(count) => write!(f, "uniform:{count}"),
            Self::Zipf { count, exponent } => write!(f, "zipf:{count}:{exponent}"),
        }
    }
}

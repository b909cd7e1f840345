//! A scrape of the Prometheus page, as numbers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use super::http;
use super::port::Port;
use super::tollkeeper::Setup;

/// The metrics page, parsed.
#[derive(Debug)]
pub struct Scrape {
    /// Text of the page.
    pub text: String,
    /// Values by `name{label="value",...}`, with labels sorted by name.
    pub samples: BTreeMap<String, f64>,
    /// Types of families: counter, gauge or histogram.
    pub types: BTreeMap<String, String>,
}

/// Adds a metrics listener on a port that stays reserved until the second value is dropped.
pub fn with_prometheus(setup: Setup) -> (Setup, Port) {
    let port = Port::reserve();
    let address = format!("127.0.0.1:{}", port.number());
    (setup.env("USE_PROMETHEUS", "true").env("PROMETHEUS_ADDR", address), port)
}

/// The page at this port.
pub fn scrape(port: u16) -> Scrape {
    // Another query each time: a page that took long is kept for a second.
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let page = http::get(port, &format!("/metrics?{}", NUMBER.fetch_add(1, Ordering::Relaxed))).send();
    assert_eq!(page.status, 200, "{page:?}");
    assert_eq!(page.header("content-type").as_deref(), Some("text/plain; version=0.0.4"));
    Scrape::parse(page.text())
}

impl Scrape {
    fn parse(text: String) -> Self {
        let (mut samples, mut types) = (BTreeMap::new(), BTreeMap::new());
        for line in text.lines() {
            if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
                assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} comes twice");
            } else if !line.starts_with('#') {
                let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no sample: {line:?}"));
                let value = value.parse().unwrap_or_else(|_| panic!("no number: {line:?}"));
                let name = sorted(name);
                assert!(samples.insert(name.clone(), value).is_none(), "{name} comes twice");
            }
        }
        Self { text, samples, types }
    }

    /// Value of a sample; panics if it is missing.
    pub fn value(&self, name: &str) -> f64 {
        *self.samples.get(name).unwrap_or_else(|| panic!("no {name} in\n{}", self.text))
    }

    /// Integer value of a sample; panics if it is missing or not an integer.
    pub fn count(&self, name: &str) -> u64 {
        let value = self.value(name);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is checked")]
        let count = value as u64;
        #[expect(clippy::cast_precision_loss, reason = "it is checked")]
        {
            assert!((count as f64).to_bits() == value.to_bits(), "{name} is {value}");
        }
        count
    }

    /// Samples with this name prefix, as `name value`.
    pub fn with_prefix(&self, start: &str) -> Vec<String> {
        let matching = self.samples.iter().filter(|(name, _)| name.starts_with(start));
        matching.map(|(name, value)| format!("{name} {value}")).collect()
    }
}

/// Series name with its labels sorted.
fn sorted(name: &str) -> String {
    let Some((name, labels)) = name.strip_suffix('}').and_then(|name| name.split_once('{')) else {
        return name.to_owned();
    };
    let (mut parts, mut start, mut quoted, mut escaped) = (Vec::new(), 0, false, false);
    for (at, byte) in labels.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => quoted = !quoted,
            b',' if !quoted => {
                parts.push(&labels[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&labels[start..]);
    parts.retain(|part| !part.is_empty());
    parts.sort_unstable();
    format!("{name}{{{}}}", parts.join(","))
}

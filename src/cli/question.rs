//! The request that `call` and `explain` are about: from flags, or from a file as for `/json`.
//!
//! A descriptor is `key=value,key=value`, split at the first `=`; a backslash takes the `,`, `=` or `\` behind it for
//! what it is. What flags can not say (hits of one descriptor, refunds, overrides, values with control characters)
//! a request file can.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::http::json::request_from_json;
use crate::pb::rate_limit_descriptor::Entry;
use crate::pb::{RateLimitDescriptor, RateLimitRequest};

/// What says the request.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub(super) struct Args {
    /// The domain of the rules
    #[arg(long, value_name = "DOMAIN", required_unless_present = "request")]
    domain: Option<String>,
    /// key=value,key=value: its entries, outermost first; repeatable. A backslash escapes `,` `=` and `\`
    #[arg(long = "descriptor", value_name = "K=V,K=V", required_unless_present = "request", value_parser = descriptor)]
    descriptors: Vec<RateLimitDescriptor>,
    /// A file with the whole request instead, as JSON like the body of /json; - for standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["domain", "descriptors"])]
    request: Option<PathBuf>,
}

/// The largest request file, in bytes: what a server takes by default.
const MOST_BYTES: u64 = 4 << 20;

impl Args {
    /// The request, or one line that says what is wrong with its file.
    pub(super) fn request(&self) -> Result<RateLimitRequest, String> {
        match self.file()? {
            Some((name, text)) => request_from_json(&text).map_err(|error| format!("{name}: {error}")),
            None => Ok(self.of_flags()),
        }
    }

    /// The request that the flags say.
    pub(super) fn of_flags(&self) -> RateLimitRequest {
        let (domain, descriptors) = (self.domain.clone().unwrap_or_default(), self.descriptors.clone());
        RateLimitRequest { domain, descriptors, hits_addend: 0 }
    }

    /// The request's file, if it is in one: how to call it in a message, and its text.
    pub(super) fn file(&self) -> Result<Option<(String, Vec<u8>)>, String> {
        let Some(path) = &self.request else { return Ok(None) };
        let name = format!("--request {}", path.display());
        let text = read(path).map_err(|error| format!("{name}: {error}"))?;
        if text.len() as u64 > MOST_BYTES {
            return Err(format!("{name}: more than {MOST_BYTES} bytes; split the request"));
        }
        Ok(Some((name, text)))
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    if path == Path::new("-") {
        io::stdin().lock().take(MOST_BYTES + 1).read_to_end(&mut text)?;
    } else {
        File::open(path)?.take(MOST_BYTES + 1).read_to_end(&mut text)?;
    }
    Ok(text)
}

/// The descriptor that `text` says. The error completes a sentence that begins with `text`.
pub(super) fn descriptor(text: &str) -> Result<RateLimitDescriptor, String> {
    let mut entries = Vec::new();
    // The key once its `=` was met, and the part that is being read.
    let (mut key, mut part) = (None, String::new());
    let mut characters = text.chars();
    loop {
        match characters.next() {
            Some('\\') => match characters.next() {
                Some(escaped @ (',' | '=' | '\\')) => part.push(escaped),
                _ => {
                    return Err(
                        "a backslash stands before `,`, `=` or another backslash; write `\\\\` for one".to_owned()
                    );
                }
            },
            Some('=') if key.is_none() => key = Some(std::mem::take(&mut part)),
            next @ (Some(',') | None) => {
                let value = std::mem::take(&mut part);
                let Some(key) = key.take() else {
                    return Err(format!("`{value}` has no `=`; write key=value,key=value, and `\\,` for a comma"));
                };
                entries.push(Entry { key: key.into(), value: value.into() });
                if next.is_none() {
                    return Ok(RateLimitDescriptor { entries, ..RateLimitDescriptor::default() });
                }
            }
            Some(character) => part.push(character),
        }
    }
}

/// `key=value,key=value`, escaped so that [`descriptor`] reads it back where it is UTF-8.
pub(super) fn descriptor_text(descriptor: &RateLimitDescriptor) -> String {
    let entry = |entry: &Entry| format!("{}={}", escaped(&entry.key, ",=\\"), escaped(&entry.value, ",\\"));
    descriptor.entries.iter().map(entry).collect::<Vec<_>>().join(",")
}

fn escaped(bytes: &[u8], special: &str) -> String {
    let mut text = String::new();
    for character in String::from_utf8_lossy(bytes).chars() {
        if special.contains(character) {
            text.push('\\');
        }
        text.push(character);
    }
    text
}

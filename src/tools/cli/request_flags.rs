//! Flags that several commands share: a request as a domain and descriptors, or a file like the body of `/json`; and
//! durations in the notation of settings, such as `5s` and `1m30s`.
//!
//! A descriptor is `key=value,key=value`, split at the first `=`; a backslash escapes `,`, `=` and `\`. A request file
//! is needed for hits of a single descriptor, refunds, overrides, and values with control characters.
//!
//! Decides: how `--descriptor` and `--request` are read, also with a comma (`\,`).

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::base::pb::proto_json::request_from_json;
use crate::base::pb::rate_limit_descriptor::Entry;
use crate::base::pb::{RateLimitDescriptor, RateLimitRequest};
use crate::settings::value::SettingValue as _;

/// Request flags.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub struct RequestArgs {
    /// Domain of the rules
    #[arg(long, value_name = "DOMAIN", required_unless_present = "request")]
    domain: Option<String>,
    /// Entries of a descriptor, outermost first; repeatable. A backslash escapes `,` `=` and `\`
    #[arg(long = "descriptor", value_name = "K=V,K=V", required_unless_present = "request", value_parser = parse_descriptor)]
    descriptors: Vec<RateLimitDescriptor>,
    /// File with the whole request, as JSON like the body of /json; - for standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["domain", "descriptors"])]
    request: Option<PathBuf>,
}

/// Maximum size of a request file in bytes, the default limit of a server.
const MAX_REQUEST_FILE_BYTES: u64 = 4 << 20;

/// A request file.
pub struct RequestFile {
    /// Name of the file for messages.
    pub name: String,
    /// Its contents.
    pub text: Vec<u8>,
}

impl RequestArgs {
    /// Returns the request. The error is one line about its file.
    pub(super) fn read_request(&self) -> Result<RateLimitRequest, String> {
        match self.read_request_file()? {
            Some(file) => request_from_json(&file.text).map_err(|error| format!("{}: {error}", file.name)),
            None => Ok(self.build_request()),
        }
    }

    /// Builds the request of the flags.
    pub fn build_request(&self) -> RateLimitRequest {
        let (domain, descriptors) = (self.domain.clone().unwrap_or_default(), self.descriptors.clone());
        RateLimitRequest { domain, descriptors, hits_addend: 0 }
    }

    /// Reads the request file, if there is one.
    pub fn read_request_file(&self) -> Result<Option<RequestFile>, String> {
        let Some(path) = &self.request else { return Ok(None) };
        let name = format!("--request {}", path.display());
        let text = read_request_bytes(path).map_err(|error| format!("{name}: {error}"))?;
        if text.len() as u64 > MAX_REQUEST_FILE_BYTES {
            return Err(format!("{name}: more than {MAX_REQUEST_FILE_BYTES} bytes; split the request"));
        }
        Ok(Some(RequestFile { name, text }))
    }
}

fn read_request_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    if path == Path::new("-") {
        io::stdin().lock().take(MAX_REQUEST_FILE_BYTES + 1).read_to_end(&mut text)?;
    } else {
        File::open(path)?.take(MAX_REQUEST_FILE_BYTES + 1).read_to_end(&mut text)?;
    }
    Ok(text)
}

/// Parses a descriptor. The error completes a sentence that begins with `text`.
pub(super) fn parse_descriptor(text: &str) -> Result<RateLimitDescriptor, String> {
    let mut entries = Vec::new();
    // The key after its `=`, and the part that is being read.
    let (mut key, mut part) = (None, String::new());
    let mut characters = text.chars();
    loop {
        match characters.next() {
            Some('\\') => match characters.next() {
                Some(escaped @ (',' | '=' | '\\')) => part.push(escaped),
                _ => {
                    return Err(
                        "a backslash must precede `,`, `=` or another backslash; write `\\\\` for one".to_owned()
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

/// Formats a descriptor so that [`parse_descriptor`] parses it again, if it is UTF-8.
pub(super) fn format_descriptor(descriptor: &RateLimitDescriptor) -> String {
    let entry = |entry: &Entry| {
        format!("{}={}", escape_with_backslash(&entry.key, ",=\\"), escape_with_backslash(&entry.value, ",\\"))
    };
    descriptor.entries.iter().map(entry).collect::<Vec<_>>().join(",")
}

fn escape_with_backslash(bytes: &[u8], special: &str) -> String {
    let mut text = String::new();
    for character in String::from_utf8_lossy(bytes).chars() {
        if special.contains(character) {
            text.push('\\');
        }
        text.push(character);
    }
    text
}

/// Parses a duration of `range`. The error says what to write.
pub fn parse_duration(text: &str, range: &str) -> Result<Duration, String> {
    Duration::parse(text, range).map_err(|invalid| format!("{}; {}", invalid.what, invalid.fix))
}

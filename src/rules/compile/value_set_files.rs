//! Contents of the files with values that rules name: `in: { file: blocked.txt }` and `cidr: { file: offices.txt }`.
//!
//! A file has one entry a line. Blank lines count as nothing, and so do lines that begin with `#`; in a file of
//! networks a `#` begins a comment anywhere. A byte order mark and the blanks around an entry are left out, and lines
//! may end in CR LF. Nothing of a file with a bad line takes effect. A set that a loaded rule has is not compiled
//! again.
//!
//! Decides: what a file of values or networks may contain; how many entries (`MAX_SET_ENTRIES`), and how large.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::base::sharded::lock_ignoring_poison;
use crate::rules::diagnostic::{Diagnostic, Severity, escape_for_message};
use crate::rules::rule::network::{Network, NetworkError, NetworkSet};
use crate::rules::rule::value_set::ValueSet;

/// Maximum number of entries of one set.
pub const MAX_SET_ENTRIES: usize = 2_000_000;
/// Maximum length of a value in a file, in bytes.
const MAX_VALUE_BYTES: usize = 4096;
/// Maximum number of bad lines of one file that are reported.
const MAX_REPORTED_LINES: usize = 10;

/// A file with a set, as it was read.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SetFileText {
    /// Name of the rule file that names it.
    pub rule_file: Arc<str>,
    /// Name as the rule has it.
    pub name: Arc<str>,
    /// Name in messages.
    pub path: Arc<str>,
    /// Contents, or the reason why there are none.
    pub contents: Result<SetContents, String>,
}

/// Contents of a file with a set, and their hash: computed once, however many rules name the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetContents {
    hash: [u8; 32],
    bytes: Arc<[u8]>,
}

impl From<Vec<u8>> for SetContents {
    fn from(bytes: Vec<u8>) -> Self {
        Self { hash: *blake3::hash(&bytes).as_bytes(), bytes: bytes.into() }
    }
}

impl Deref for SetContents {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Hash for SetContents {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.hash.hash(state);
    }
}

impl SetContents {
    /// Hash of the bytes.
    pub const fn content_hash(&self) -> &[u8; 32] {
        &self.hash
    }
}

/// All files with sets that a set of rule files names.
#[derive(Clone, Debug, Default)]
pub struct SetFiles {
    /// The files, with one element for each rule file that names them.
    pub texts: Vec<SetFileText>,
    /// Indices of the files by rule file and name.
    index: OnceLock<HashMap<NamedBy, usize>>,
}

/// Names of a rule file, and of a file with a set as the rule file has it.
type NamedBy = (Arc<str>, Arc<str>);

impl From<Vec<SetFileText>> for SetFiles {
    fn from(texts: Vec<SetFileText>) -> Self {
        Self { texts, index: OnceLock::new() }
    }
}

impl SetFiles {
    /// Returns the file that `rule_file` names so.
    pub(super) fn find(&self, rule_file: &Arc<str>, name: &str) -> Option<&SetFileText> {
        let key = |text: &SetFileText| (Arc::clone(&text.rule_file), Arc::clone(&text.name));
        let index = self.index.get_or_init(|| self.texts.iter().map(key).zip(0..).collect());
        index.get(&(Arc::clone(rule_file), name.into())).map(|at| &self.texts[*at])
    }
}

/// Sets that loaded rules have, by the hash of their contents.
#[derive(Debug, Default)]
pub struct SetCache {
    values: SetsByHash<ValueSet>,
    networks: SetsByHash<NetworkSet>,
}

/// Sets that something still uses.
type SetsByHash<T> = Mutex<HashMap<[u8; 32], Weak<T>>>;

impl SetCache {
    /// Returns the values of a file.
    ///
    /// # Errors
    /// The bad lines.
    pub(super) fn parse_values(&self, path: &Arc<str>, bytes: &SetContents) -> Result<Arc<ValueSet>, Vec<Diagnostic>> {
        find_or_parse(&self.values, bytes, || {
            let mut problems = LineProblems::new(path);
            let entries = lines_of_set(bytes).filter(|(line, value)| {
                let is_bad = value.len() > MAX_VALUE_BYTES || value.contains(&0);
                if is_bad {
                    let (message, hint) = match value.len() > MAX_VALUE_BYTES {
                        true => (
                            format!("a value of {} bytes", value.len()),
                            format!("at most {MAX_VALUE_BYTES} are allowed"),
                        ),
                        false => ("a zero byte".to_owned(), "the file must be text, with one value a line".to_owned()),
                    };
                    problems.report(*line, message, hint);
                }
                !is_bad
            });
            let set = entries.take(MAX_SET_ENTRIES + 1).map(|(_, value)| value).collect::<ValueSet>();
            problems.check_entry_count(set.len());
            problems.into_result(set)
        })
    }

    /// Returns the networks of a file.
    ///
    /// # Errors
    /// The bad lines.
    pub(super) fn parse_networks(
        &self,
        path: &Arc<str>,
        bytes: &SetContents,
    ) -> Result<Arc<NetworkSet>, Vec<Diagnostic>> {
        find_or_parse(&self.networks, bytes, || {
            let mut problems = LineProblems::new(path);
            let mut networks = Vec::new();
            for (line, text) in lines_of_set(bytes) {
                let text = text.split(|byte| *byte == b'#').next().unwrap_or_default().trim_ascii_end();
                match parse_network_bytes(text) {
                    Ok(network) => networks.push(network),
                    Err((message, hint)) => problems.report(line, message, hint),
                }
                if networks.len() > MAX_SET_ENTRIES {
                    break;
                }
            }
            problems.check_entry_count(networks.len());
            problems.into_result(networks.into_iter().collect::<NetworkSet>())
        })
    }
}

fn find_or_parse<T>(
    known: &SetsByHash<T>,
    bytes: &SetContents,
    parse: impl FnOnce() -> Result<T, Vec<Diagnostic>>,
) -> Result<Arc<T>, Vec<Diagnostic>> {
    if let Some(set) = lock_ignoring_poison(known).get(bytes.content_hash()).and_then(Weak::upgrade) {
        return Ok(set);
    }
    let set = Arc::new(parse()?);
    let mut known = lock_ignoring_poison(known);
    known.retain(|_, set| set.strong_count() > 0);
    known.insert(*bytes.content_hash(), Arc::downgrade(&set));
    Ok(set)
}

/// Entries of a file, with the number of their lines from 1.
fn lines_of_set(bytes: &[u8]) -> impl Iterator<Item = (u32, &[u8])> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let lines = (1..).zip(bytes.split(|byte| *byte == b'\n')).map(|(line, text)| (line, text.trim_ascii()));
    lines.filter(|(_, text)| !text.is_empty() && !text.starts_with(b"#"))
}

fn parse_network_bytes(text: &[u8]) -> Result<Network, (String, String)> {
    let text = std::str::from_utf8(text).unwrap_or("\u{fffd}");
    parse_network(text)
}

/// Parses a network; returns the error message and a fix if it is none.
pub(super) fn parse_network(text: &str) -> Result<Network, (String, String)> {
    Network::parse(text).map_err(|error| match error {
        NetworkError::NotANetwork => {
            let hint = "write an address, or a network such as 10.0.0.0/8 or 2001:db8::/32".to_owned();
            (format!("`{}` is not a network", escape_for_message(text)), hint)
        }
        NetworkError::HostBits(network) => {
            (format!("`{}` has bits beyond its length", escape_for_message(text)), format!("write {network}"))
        }
    })
}

/// Problems of the lines of one file.
struct LineProblems<'p> {
    path: &'p Arc<str>,
    found: Vec<Diagnostic>,
    more: usize,
}

impl<'p> LineProblems<'p> {
    fn new(path: &'p Arc<str>) -> Self {
        Self { path, found: Vec::new(), more: 0 }
    }

    fn report(&mut self, line: u32, message: String, hint: String) {
        if self.found.len() == MAX_REPORTED_LINES {
            self.more += 1;
            return;
        }
        let (severity, file, path) = (Severity::Error, Arc::clone(self.path), String::new());
        self.found.push(Diagnostic { severity, file, line, column: 1, path, message, hint: Some(hint) });
    }

    fn check_entry_count(&mut self, count: usize) {
        if count > MAX_SET_ENTRIES {
            let message = format!("more than {MAX_SET_ENTRIES} entries");
            self.report(1, message, "divide the file, and name each part in a descriptor".to_owned());
        }
    }

    fn into_result<T>(mut self, set: T) -> Result<T, Vec<Diagnostic>> {
        if self.more > 0
            && let Some(last) = self.found.last_mut()
        {
            last.message += &format!("; {} more lines are bad", self.more);
        }
        if self.found.is_empty() { Ok(set) } else { Err(self.found) }
    }
}

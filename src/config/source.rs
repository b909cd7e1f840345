//! Rule sources: deliver sets of rules, behind one interface.
//!
//! A [`RuleSource`] delivers [`RuleUpdate`]s and receives the result of each. The reloader and the pages that show
//! rules do not know the kind of source. A new kind is a variant of [`SourceConfig`], [`RuleSource`] and
//! [`SourceReloader`]; every `match` here is exhaustive.

use std::io;
use std::sync::Arc;

use super::compile::RuleText;
use super::files::read::read;
use super::files::watch::{Changes, WatchReloader, WatchTiming, Watcher};
use super::files::{ReadResult, RuleLocation};
use super::yaml::Documents;

/// Configuration of a rule source.
#[derive(Clone, Debug)]
pub enum SourceConfig {
    /// Rule files on disk.
    Files(FilesConfig),
}

/// Configuration of rule files as a source.
#[derive(Clone, Debug)]
pub struct FilesConfig {
    /// Location of the files.
    pub location: RuleLocation,
    /// Documents of a file that count.
    pub documents: Documents,
    /// Intervals at which changes are noticed.
    pub timing: WatchTiming,
}

/// A complete set of rules as a source delivers it, not compiled yet.
#[derive(Clone, Debug)]
pub struct RuleSnapshot {
    /// Rule texts, in the order in which they are compiled.
    pub texts: Vec<RuleText>,
    /// Version that the source gives the set; `None` if it has no versions.
    pub version: Option<Arc<str>>,
    /// Warnings of the source, not of the compiler.
    pub warnings: Vec<String>,
    /// Rejects a set without texts while rules are loaded, instead of lifting every limit.
    pub keep_rules_if_empty: bool,
}

/// A new set of rules, or the reasons why the source cannot deliver it.
pub type RuleUpdate = Result<RuleSnapshot, Vec<String>>;

/// A running source of rules.
#[derive(Debug)]
pub enum RuleSource {
    /// Rule files on disk.
    Files(FileSource),
}

impl RuleSource {
    /// Starts a source. Returns it with the update that is available at once, if any.
    ///
    /// Blocks on disk I/O.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(config: SourceConfig) -> io::Result<(Self, Option<RuleUpdate>)> {
        match config {
            SourceConfig::Files(files) => {
                let (source, first) = FileSource::start(files)?;
                Ok((Self::Files(source), Some(first)))
            }
        }
    }

    /// Returns the next update; `None` after the source has ended. Cancel safe.
    pub async fn next(&mut self) -> Option<RuleUpdate> {
        match self {
            Self::Files(files) => files.next().await,
        }
    }

    /// Reports the result of the last update to the source: applied, or rejected with this message.
    pub fn acknowledge(&mut self, _result: &Result<(), String>) {
        match self {
            // Files need no answer.
            Self::Files(_) => {}
        }
    }

    /// Handle that requests the rules again.
    pub fn reloader(&self) -> SourceReloader {
        match self {
            Self::Files(files) => SourceReloader::Files(files.watcher.reloader()),
        }
    }
}

/// Requests the rules again from a source, as SIGHUP does.
#[derive(Clone, Debug)]
pub enum SourceReloader {
    /// Reads the files.
    Files(WatchReloader),
}

impl SourceReloader {
    /// Requests an update even if nothing changed.
    pub fn reload(&self) {
        match self {
            Self::Files(files) => files.reload(),
        }
    }
}

/// Rule files as a source.
#[derive(Debug)]
pub struct FileSource {
    watcher: Watcher,
    changes: Changes,
    documents: Documents,
}

impl FileSource {
    fn start(config: FilesConfig) -> io::Result<(Self, RuleUpdate)> {
        let FilesConfig { location, documents, timing } = config;
        let first = read(&location);
        let (watcher, changes) = Watcher::start(location, timing, &first)?;
        Ok((Self { watcher, changes, documents }, update(first, documents)))
    }

    async fn next(&mut self) -> Option<RuleUpdate> {
        let result = self.changes.next().await?;
        Some(update(result, self.documents))
    }
}

/// Converts files that were read.
fn update(result: ReadResult, documents: Documents) -> RuleUpdate {
    let set = result.map_err(|failure| failure.errors.iter().map(ToString::to_string).collect::<Vec<_>>())?;
    Ok(RuleSnapshot {
        texts: set.files.into_iter().map(|file| RuleText { name: file.name, bytes: file.bytes, documents }).collect(),
        version: None,
        warnings: set.warnings.iter().map(ToString::to_string).collect(),
        // A missing volume is more likely than the wish to lift every limit.
        keep_rules_if_empty: true,
    })
}

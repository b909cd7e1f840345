//! Result of a search for rule files, before any content is read.

use std::path::PathBuf;
use std::sync::Arc;

use super::{PathError, PathProblem};

/// A path on which the result of a search depends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WatchedPath {
    /// Path that was followed to its end, or as far as it exists.
    Followed(PathBuf),
    /// Directory in which every entry matters.
    Listed(PathBuf),
}

/// Rule files that a search found, its errors and warnings, and the paths to watch.
#[derive(Debug, Default)]
pub(super) struct FileSearchResult {
    pub(super) found: Vec<FoundFile>,
    pub(super) errors: Vec<PathError>,
    pub(super) warnings: Vec<PathError>,
    /// Paths whose change may change the result.
    pub(super) watched: Vec<WatchedPath>,
}

/// A rule file that was found.
#[derive(Debug)]
pub(super) struct FoundFile {
    pub(super) name: Arc<str>,
    pub(super) path: PathBuf,
    /// Size in bytes when the file was found; it may have grown since.
    pub(super) size: u64,
}

impl FileSearchResult {
    /// Sorts the files by name, and keeps one file of each name.
    ///
    /// Of two files with one name the later one in the search stays, as in envoyproxy/ratelimit. Under `--config` the
    /// two are the same file, given twice.
    pub(super) fn sort_and_deduplicate(&mut self) {
        self.found.sort_by(|a, b| (&a.name, &a.path).cmp(&(&b.name, &b.path)));
        let warnings = &mut self.warnings;
        self.found.dedup_by(|later, kept| {
            if later.name != kept.name {
                return false;
            }
            std::mem::swap(later, kept);
            if later.path != kept.path {
                warnings.push(PathError::new(&later.path, PathProblem::Hidden(kept.path.clone())));
            }
            true
        });
    }
}

//! Stamps of files: what changes when a file does, without reading it.
//!
//! Tables are large, so they are compared by stamp and read only when it differs. A replaced file has another inode,
//! and a file that is written in place another time or size.

use std::fs::{self, Metadata};
use std::hash::Hash as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use siphasher::sip128::{Hasher128 as _, SipHasher13};

use super::PathProblem;
use super::search_result::FileSearchResult;

/// Identity, size and time of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileStamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    /// Stamp of a file with this metadata.
    pub fn from_metadata(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// Stamps of all files of a search, or why a file has none.
#[derive(Clone, Debug, Default)]
pub struct FileStamps(pub Vec<(PathBuf, Result<FileStamp, PathProblem>)>);

impl FileStamps {
    /// Takes the stamps of the files that a search found.
    pub(super) fn from_search(scan: FileSearchResult) -> Self {
        let stamp = |path: PathBuf| {
            let metadata = fs::metadata(&path).map_err(|error| PathProblem::from(&error));
            (path, metadata.map(|metadata| FileStamp::from_metadata(&metadata)))
        };
        let errors = scan.errors.into_iter().map(|error| (error.path, Err(error.problem)));
        let mut stamps: Vec<_> = scan.found.into_iter().map(|found| stamp(found.path)).chain(errors).collect();
        stamps.sort_by(|one, other| one.0.cmp(&other.0));
        Self(stamps)
    }

    /// Hashes the stamps, so that two different results practically never have the same hash.
    pub(super) fn fingerprint(&self) -> u128 {
        let mut hasher = SipHasher13::new();
        self.0.hash(&mut hasher);
        hasher.finish128().as_u128()
    }
}

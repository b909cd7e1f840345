//! Reading of rule files.
//!
//! Anyone who can write to the directory may put anything there, so nothing blocks and everything is bounded: only
//! regular files are opened, and sizes, counts and depths have limits.

use super::contents::read_contents;
use super::search_result::{FileSearchResult, FoundFile, WatchedPath};
use super::value_set_files::SetFilesRead;
use super::walk::search_location;
use super::{
    MAX_ERRORS, MAX_FILE_BYTES, MAX_TOTAL_BYTES, PathError, PathProblem, RuleFile, RuleFileSet, RuleFileSetFailure,
    RuleFileSetResult, RuleFilesLocation,
};

/// Reads all rule files of `location`. Blocks on disk I/O, so do not call it on an async worker thread.
///
/// # Errors
/// Every path that cannot be read, up to 100.
pub fn read_rule_files(location: &RuleFilesLocation) -> RuleFileSetResult {
    read_found_files(search_location(location)).result
}

/// Result of reading the files that a search found.
pub(super) struct FilesRead {
    pub(super) result: RuleFileSetResult,
    /// Paths that the rule files name, whose change may change the result.
    pub(super) named: Vec<WatchedPath>,
}

/// Reads the files that a search found, and those that they name; none of them if their sum is too large.
pub(super) fn read_found_files(mut scan: FileSearchResult) -> FilesRead {
    enforce_total_size(&mut scan);
    let FileSearchResult { found, mut errors, warnings, .. } = scan;
    let mut files = Vec::with_capacity(found.len());
    let mut bytes_left = MAX_TOTAL_BYTES;
    for FoundFile { name, path, .. } in found {
        if errors.len() >= MAX_ERRORS {
            break;
        }
        match read_contents(&path, bytes_left) {
            Ok(bytes) => {
                bytes_left -= bytes.len() as u64;
                files.push(RuleFile { name, path, bytes });
            }
            Err(problem) => errors.push(PathError { path, problem }),
        }
    }
    let sets = SetFilesRead::read(&mut files, bytes_left);
    let named = sets.paths_to_watch();
    let set = RuleFileSet { files, sets: sets.texts, warnings };
    let result = if errors.is_empty() { Ok(set) } else { Err(RuleFileSetFailure { errors, readable: set }) };
    FilesRead { result, named }
}

/// Reports the file that takes the sum of sizes past [`MAX_TOTAL_BYTES`], and drops all files, so that none is read.
///
/// A file that is too large by itself is left to the reading, which reports it.
fn enforce_total_size(scan: &mut FileSearchResult) {
    let mut total = 0;
    let past = scan.found.iter().filter(|file| file.size <= MAX_FILE_BYTES).find(|file| {
        total += file.size;
        total > MAX_TOTAL_BYTES
    });
    if let Some(file) = past {
        scan.errors.push(PathError::new(&file.path, PathProblem::TotalTooLarge));
        scan.found.clear();
    }
}

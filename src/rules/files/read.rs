//! Reading of rule files.
//!
//! Anyone who can write to the directory may put anything there, so nothing blocks and everything is bounded: only
//! regular files are opened, and sizes, counts and depths have limits.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use super::scan::{FileSearchResult, FoundFile};
use super::walk::search_location;
use super::{
    MAX_ERRORS, MAX_FILE_BYTES, MAX_TOTAL_BYTES, PathError, PathProblem, ReadFailure, ReadResult, RuleFile,
    RuleFileSet, RuleLocation,
};

/// Reads all rule files of `location`. Blocks on disk I/O, so do not call it on an async worker thread.
///
/// # Errors
/// Every path that cannot be read, up to 100.
pub fn read_rule_files(location: &RuleLocation) -> ReadResult {
    read_found_files(search_location(location))
}

/// Reads the files that a search found; none of them if their sum is too large.
pub(super) fn read_found_files(mut scan: FileSearchResult) -> ReadResult {
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
    let set = RuleFileSet { files, warnings };
    if errors.is_empty() { Ok(set) } else { Err(ReadFailure { errors, readable: set }) }
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

/// Returns the bytes of a regular file, of which at most `bytes_left` may be read.
fn read_contents(path: &Path, bytes_left: u64) -> Result<Vec<u8>, PathProblem> {
    let file = open_regular_file(path)?;
    let size = file.metadata().map_err(|error| PathProblem::from(&error))?.len();
    check_size(size, bytes_left)?;
    // One byte more than allowed shows that the file has grown; the capacity is bounded by the check above.
    let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0));
    file.take(MAX_FILE_BYTES.min(bytes_left) + 1).read_to_end(&mut bytes).map_err(|error| PathProblem::from(&error))?;
    check_size(bytes.len() as u64, bytes_left)?;
    Ok(bytes)
}

/// Opens a regular file.
///
/// The type is checked before, because opening a device may have an effect, and after, because the path may lead
/// elsewhere by then. Without O_NONBLOCK, a FIFO in between would block.
fn open_regular_file(path: &Path) -> Result<File, PathProblem> {
    check_regular(&fs::metadata(path).map_err(|error| PathProblem::from(&error))?)?;
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file =
        OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|error| PathProblem::from(&error))?;
    check_regular(&file.metadata().map_err(|error| PathProblem::from(&error))?)?;
    Ok(file)
}

fn check_regular(metadata: &fs::Metadata) -> Result<(), PathProblem> {
    let file_type = metadata.file_type();
    match () {
        () if file_type.is_file() => Ok(()),
        () if file_type.is_dir() => Err(PathProblem::NotAFile("a directory")),
        () if file_type.is_fifo() => Err(PathProblem::NotAFile("a FIFO")),
        () if file_type.is_socket() => Err(PathProblem::NotAFile("a socket")),
        () => Err(PathProblem::NotAFile("a device")),
    }
}

fn check_size(size: u64, bytes_left: u64) -> Result<(), PathProblem> {
    if size > MAX_FILE_BYTES {
        return Err(PathProblem::FileTooLarge(size));
    }
    if size > bytes_left { Err(PathProblem::TotalTooLarge) } else { Ok(()) }
}

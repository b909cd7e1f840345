//! Contents of one file: only of regular files, and with a bound.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use super::{MAX_FILE_BYTES, PathProblem};

/// Returns the bytes of a regular file, of which at most `bytes_left` may be read.
pub(super) fn read_contents(path: &Path, bytes_left: u64) -> Result<Vec<u8>, PathProblem> {
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
pub(in crate::rules) fn open_regular_file(path: &Path) -> Result<File, PathProblem> {
    check_is_regular_file(&fs::metadata(path).map_err(|error| PathProblem::from(&error))?)?;
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file =
        OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|error| PathProblem::from(&error))?;
    check_is_regular_file(&file.metadata().map_err(|error| PathProblem::from(&error))?)?;
    Ok(file)
}

fn check_is_regular_file(metadata: &fs::Metadata) -> Result<(), PathProblem> {
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

//! A file as a sink, rotated by size.
//!
//! `PATH` is the current file, `PATH.1` the last one, and so on. The disk never has more than the configured size: if a
//! rotation fails, records are lost and counted. A failed write is undone, so that a full disk leaves no half line. A
//! file that a crash left with half a line, and any compressed one, is rotated at the start. Every file begins with a
//! header, so that each can be read by itself. A file that others move or truncate is followed, as logrotate expects. A
//! path that is no regular file, such as a pipe, is written as it is.
//!
//! Compressed, each write is a gzip member of its own; members in a row are a valid file.
//!
//! Decides: when a log file is rotated, how many are kept, their mode and compression; a full disk.
//! Decides: the header of a new file.

use std::borrow::Cow;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::Compression;
use flate2::write::GzEncoder;
use rustix::fs::{Access, access};

use crate::decide::log::header::{HeaderReason, HeaderRecord};
use crate::settings::decision_log::DecisionLogSettings;

/// Permissions of the files: values may identify persons.
const FILE_MODE: u32 = 0o600;

/// Log file with its rotated predecessors.
#[derive(Debug)]
pub(crate) struct FileSink {
    path: PathBuf,
    max_bytes: u64,
    max_files: u32,
    is_compressed: bool,
    /// `None` before the first write, and after an error that leaves the file in doubt.
    current: Option<CurrentFile>,
    /// Last header, which begins the next file.
    header: Option<Arc<HeaderRecord>>,
}

#[derive(Debug)]
struct CurrentFile {
    file: File,
    /// Size in bytes; `None`: not a regular file.
    length: Option<u64>,
    /// Size of the header at its start, in bytes; a file with nothing else is not rotated.
    header_length: u64,
    /// A write to a file that is not regular failed, so that its last line may have no end.
    has_open_line: bool,
}

impl FileSink {
    pub(super) fn new(path: &Path, settings: &DecisionLogSettings) -> Self {
        Self {
            path: path.to_owned(),
            max_bytes: settings.max_file_bytes,
            max_files: settings.max_files,
            is_compressed: path.extension().is_some_and(|extension| extension == "gz"),
            current: None,
            header: None,
        }
    }

    /// True if larger writes are worth a longer wait.
    pub(super) const fn is_compressed(&self) -> bool {
        self.is_compressed
    }

    /// Writes a header, and keeps it for the files that follow.
    pub(super) fn write_header(&mut self, header: &Arc<HeaderRecord>) -> io::Result<()> {
        self.header = Some(Arc::clone(header));
        self.write_lines(&header.to_line())
    }

    /// Writes whole lines.
    pub(super) fn write_lines(&mut self, lines: &[u8]) -> io::Result<()> {
        let bytes = self.compress_if_set(lines)?;
        let mut current = match self.current.take() {
            Some(mut current) => {
                if current.update_length_and_check_path(&self.path) {
                    current
                } else {
                    self.open_next_file()?
                }
            }
            None => self.open_first_file()?,
        };
        if current.is_full(bytes.len(), self.max_bytes) {
            current = self.rotate()?;
        }
        let written = current.append(&bytes);
        let is_usable = match &written {
            Ok(()) => true,
            // The reader of a pipe went away: opening it waits for the next one.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => false,
            Err(_) => current.has_open_line || current.undo_write(),
        };
        self.current = is_usable.then_some(current);
        written
    }

    /// Opens the current file; rotates it if its end may be damaged.
    fn open_first_file(&self) -> io::Result<CurrentFile> {
        let mut current = CurrentFile::open(&self.path)?;
        let is_damaged = match current.length {
            None | Some(0) => false,
            Some(_) if self.is_compressed => true,
            Some(length) => {
                let mut last = [0];
                let mut reader = File::open(&self.path)?;
                reader.seek(SeekFrom::Start(length - 1))?;
                reader.read_exact(&mut last)?;
                last != *b"\n"
            }
        };
        if is_damaged {
            current = self.rotate()?;
        }
        Ok(current)
    }

    /// Renames the files, the oldest one over the one to delete, and begins a new one.
    fn rotate(&self) -> io::Result<CurrentFile> {
        for number in (1..self.max_files).rev() {
            let older = if number == 1 { self.path.clone() } else { self.rotated_path(number - 1) };
            match fs::rename(older, self.rotated_path(number)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        if self.max_files == 1 {
            fs::remove_file(&self.path)?;
        }
        self.open_next_file()
    }

    /// Opens a file that follows another; a new one begins with a header.
    fn open_next_file(&self) -> io::Result<CurrentFile> {
        let mut current = CurrentFile::open(&self.path)?;
        if let (Some(header), Some(0)) = (&self.header, current.length) {
            let header = HeaderRecord { event: HeaderReason::Rotation, ..HeaderRecord::clone(header) };
            current.append(&self.compress_if_set(&header.to_line())?)?;
            current.header_length = current.length.unwrap_or(0);
        }
        Ok(current)
    }

    /// Path of the rotated file with this number, from 1.
    fn rotated_path(&self, number: u32) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(format!(".{number}"));
        path.into()
    }

    fn compress_if_set<'l>(&self, lines: &'l [u8]) -> io::Result<Cow<'l, [u8]>> {
        if self.is_compressed {
            // Fast, as lines come from the decisions' own machine.
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(lines)?;
            encoder.finish().map(Cow::Owned)
        } else {
            Ok(Cow::Borrowed(lines))
        }
    }
}

impl CurrentFile {
    fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).mode(FILE_MODE).open(path)?;
        let metadata = file.metadata()?;
        let length = metadata.is_file().then_some(metadata.len());
        if metadata.is_file() && metadata.permissions().mode() & 0o777 != FILE_MODE {
            file.set_permissions(Permissions::from_mode(FILE_MODE))?;
        }
        Ok(Self { file, length, header_length: 0, has_open_line: false })
    }

    /// Returns true if the path still leads to this file; updates its length, which others may have changed.
    fn update_length_and_check_path(&mut self, path: &Path) -> bool {
        let Some(length) = &mut self.length else { return true };
        match (fs::metadata(path), self.file.metadata()) {
            (Ok(at_path), Ok(own)) if (at_path.dev(), at_path.ino()) == (own.dev(), own.ino()) => {
                *length = own.len();
                true
            }
            _ => false,
        }
    }

    /// True if the file must be rotated before this many bytes are appended.
    fn is_full(&self, bytes: usize, max_bytes: u64) -> bool {
        self.length.is_some_and(|length| length > self.header_length && length + bytes as u64 > max_bytes)
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.has_open_line {
            self.file.write_all(b"\n")?;
        }
        self.has_open_line = self.length.is_none();
        self.file.write_all(bytes)?;
        self.has_open_line = false;
        self.length = self.length.map(|length| length + bytes.len() as u64);
        Ok(())
    }

    /// Removes what a failed write left; false if that fails too.
    fn undo_write(&self) -> bool {
        self.length.is_some_and(|length| self.file.set_len(length).is_ok())
    }
}

/// Checks that a log file can be written, without creating it. A pipe is not opened, because that waits for a reader.
pub(super) fn check_file_is_writable(path: &Path) -> Result<(), String> {
    let writable = |path: &Path| access(path, Access::WRITE_OK).map_err(|error| format!("cannot be written: {error}"));
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err("is a directory; name a file".to_owned()),
        Ok(_) => writable(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            match parent.is_dir() {
                true => writable(parent).map_err(|error| format!("its directory {error}")),
                false => Err("its directory does not exist; create it".to_owned()),
            }
        }
        Err(error) => Err(format!("cannot be written: {error}")),
    }
}

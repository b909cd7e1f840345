//! Where rule files come from: the paths given with `--config`, or the directory that the `RUNTIME_*` variables name.
//!
//! `read` returns the bytes of all files, sorted by name, or every reason why it can not. Whoever can write to the
//! directory may put anything there, so nothing blocks and everything is bounded: only regular files are opened, and
//! sizes, counts and depths have limits. A set is complete or refused; a file is never left out because it failed.
//! What could be read of a refused set is for checking only. What the bytes mean is not known here.

mod walk;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The largest rule file, in bytes.
pub const MAX_FILE_BYTES: u64 = 64 << 20;
/// All rule files together, in bytes.
pub const MAX_TOTAL_BYTES: u64 = 256 << 20;
/// The most rule files.
pub const MAX_FILES: usize = 10_000;
/// Errors after which reading stops: they tell enough.
const MAX_ERRORS: usize = 100;

/// Where the rule files are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Files and directories as given. Of a directory, searched recursively, the `.yaml`, `.yml` and `.json` files
    /// whose names do not start with a dot or end in `.schema.json`; finding none is an error.
    Paths(Vec<PathBuf>),
    /// The directories of envoyproxy/ratelimit. Every regular file counts, whatever its extension.
    Runtime {
        /// `RUNTIME_ROOT`; empty: there are no rules.
        root: PathBuf,
        /// `RUNTIME_SUBDIRECTORY`, below the root.
        subdirectory: String,
        /// `RUNTIME_APPDIRECTORY`: the directory below the subdirectory, or with `watch_root` the first part of the
        /// dotted names that count.
        app_directory: String,
        /// `RUNTIME_IGNOREDOTFILES`: names that start with a dot are skipped, directories too.
        ignore_dotfiles: bool,
        /// `RUNTIME_WATCH_ROOT`: names are dotted from the subdirectory on (`config.shop.yaml`).
        watch_root: bool,
    },
}

/// One rule file as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// How messages call it: its path as given, or under `RUNTIME_*` its path below the directory with dots for
    /// slashes.
    pub name: Arc<str>,
    /// Where it was read.
    pub path: PathBuf,
    /// What it holds, at most [`MAX_FILE_BYTES`].
    pub bytes: Vec<u8>,
}

/// All rule files of a layout, at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// Sorted by name, no two of one name. May be empty under `RUNTIME_*` only.
    pub files: Vec<SourceFile>,
    /// What loads and is probably not meant: without rule files under `RUNTIME_*`, always one that says why.
    pub warnings: Vec<SourceError>,
}

/// What reading a layout gave: all of it, or everything that is in the way.
pub type Reading = Result<Sources, Refused>;

/// A set of which something can not be read, so that none of it may take effect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refused {
    /// What is in the way; at least one.
    pub errors: Vec<SourceError>,
    /// The rest, so that whoever checks rules can say what is wrong with it too.
    pub readable: Sources,
}

/// A path that can not be read as rules, or is probably not meant so. Prints `path: what; fix`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{}: {problem}; {}", .path.display(), .problem.fix())]
pub struct SourceError {
    /// The path in question, as it was given or found.
    pub path: PathBuf,
    /// What is wrong with it.
    pub problem: Problem,
}

impl SourceError {
    fn new(path: &Path, problem: Problem) -> Self {
        Self { path: path.to_owned(), problem }
    }
}

/// What is wrong with a path.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Problem {
    /// Nothing is there, or it vanished while it was read.
    #[error("no such file or directory")]
    Missing,
    /// A symbolic link leads to nothing.
    #[error("the symbolic link leads nowhere")]
    Dangling,
    /// Symbolic links lead back to where they started.
    #[error("symbolic links form a loop")]
    Loop,
    /// The system refused, in its words.
    #[error("can not be read: {0}")]
    Unreadable(String),
    /// Something that is no regular file stands where a rule file should; the word for it.
    #[error("is {0}, not a regular file")]
    NotAFile(&'static str),
    /// A file stands where a directory should.
    #[error("is not a directory")]
    NotADirectory,
    /// A directory given with `--config`, or the one that `RUNTIME_*` names, holds no rule file.
    #[error("the directory has no rule files")]
    NoRuleFiles,
    /// The `RUNTIME_*` variables name no directory; the variable that is empty.
    #[error("{0} is empty, so there are no rules and every request passes")]
    Unset(&'static str),
    /// The file's size in bytes, past [`MAX_FILE_BYTES`].
    #[error("has {0} bytes, more than the {MAX_FILE_BYTES} that a rule file may have")]
    FileTooLarge(u64),
    /// This file takes the sum past [`MAX_TOTAL_BYTES`].
    #[error("takes the rule files past {MAX_TOTAL_BYTES} bytes together")]
    TotalTooLarge,
    /// There are more rule files than [`MAX_FILES`].
    #[error("there are more than {MAX_FILES} rule files")]
    TooManyFiles,
    /// The search looked at as many names as it may; how many.
    #[error("there are more than {0} files and directories to search")]
    TooManyEntries(usize),
    /// Directories are nested deeper than this.
    #[error("is more than {0} directories deep")]
    TooDeep(usize),
    /// Another file of the same dotted name is used instead.
    #[error("is not read, because {} has the same dotted name", .0.display())]
    Hidden(PathBuf),
}

impl Problem {
    /// What to do about it.
    pub const fn fix(&self) -> &'static str {
        match self {
            Self::Missing => "check the spelling and what is mounted there",
            Self::Dangling => "remove the link or restore its target",
            Self::Loop => "remove the link that leads back",
            Self::Unreadable(_) => "give the process permission to read it",
            Self::NotAFile(_) => "put a regular file there or move this away",
            Self::NotADirectory => "name a directory",
            Self::NoRuleFiles => "add a .yaml, .yml or .json file or name another directory",
            Self::Unset(_) => "set it, or name the rules with --config",
            Self::FileTooLarge(_) => "split it, or check that it is a rule file",
            Self::TotalTooLarge | Self::TooManyFiles | Self::TooManyEntries(_) => {
                "name a directory that holds only rule files"
            }
            Self::TooDeep(_) => "name a directory closer to the rule files",
            Self::Hidden(_) => "rename one of the two",
        }
    }

    fn of(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOENT) => Self::Missing,
            Some(libc::ELOOP) => Self::Loop,
            _ => Self::Unreadable(error.to_string()),
        }
    }
}

/// Reads all rule files of `layout`. Blocks for as long as the disk takes: not for an async worker thread.
pub fn read(layout: &Layout) -> Reading {
    Survey::of(layout).load()
}

/// A path that decided what a walk found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trace {
    /// Followed to its end, or as far as it exists.
    Followed(PathBuf),
    /// A directory of which every entry matters.
    Listed(PathBuf),
}

/// What a layout holds, before any content is read.
#[derive(Debug, Default)]
pub(super) struct Survey {
    found: Vec<Found>,
    errors: Vec<SourceError>,
    warnings: Vec<SourceError>,
    trail: Vec<Trace>,
}

#[derive(Debug)]
struct Found {
    name: Arc<str>,
    path: PathBuf,
    /// In bytes, when it was found; it may have grown since.
    size: u64,
}

impl Survey {
    /// Lists the files of `layout`.
    pub(super) fn of(layout: &Layout) -> Self {
        let mut survey = match layout {
            Layout::Paths(paths) => walk::given(paths),
            Layout::Runtime { root, subdirectory, app_directory, ignore_dotfiles, watch_root } => {
                let runtime = walk::Runtime {
                    root,
                    // As in the peer, an absolute subdirectory is still one below the root.
                    subdirectory: subdirectory.trim_start_matches('/'),
                    app_directory: app_directory.trim_start_matches('/'),
                    ignore_dotfiles: *ignore_dotfiles,
                };
                if *watch_root { runtime.below_root() } else { runtime.below_app_directory() }
            }
        };
        survey.sort();
        survey
    }

    /// The paths whose change may change what is read.
    pub(super) fn trail(&self) -> &[Trace] {
        &self.trail
    }

    /// Sorts by name. Of two files with one name the later on a walk stays, as in the peer; under `--config` they are
    /// the same file, given twice.
    fn sort(&mut self) {
        self.found.sort_by(|a, b| (&a.name, &a.path).cmp(&(&b.name, &b.path)));
        let warnings = &mut self.warnings;
        self.found.dedup_by(|later, kept| {
            if later.name != kept.name {
                return false;
            }
            std::mem::swap(later, kept);
            if later.path != kept.path {
                warnings.push(SourceError::new(&later.path, Problem::Hidden(kept.path.clone())));
            }
            true
        });
    }

    /// Reads what was found; nothing at all if it is too much.
    pub(super) fn load(mut self) -> Reading {
        self.check_total();
        let Self { found, mut errors, warnings, .. } = self;
        let mut files = Vec::with_capacity(found.len());
        let mut left = MAX_TOTAL_BYTES;
        for Found { name, path, .. } in found {
            if errors.len() >= MAX_ERRORS {
                break;
            }
            match contents(&path, left) {
                Ok(bytes) => {
                    left -= bytes.len() as u64;
                    files.push(SourceFile { name, path, bytes });
                }
                Err(problem) => errors.push(SourceError { path, problem }),
            }
        }
        let sources = Sources { files, warnings };
        if errors.is_empty() { Ok(sources) } else { Err(Refused { errors, readable: sources }) }
    }

    /// Names the file that takes the sum past its bound, and keeps all from being read. Files that are each too
    /// large are left to the reading, which says so.
    fn check_total(&mut self) {
        let mut total = 0;
        let past = self.found.iter().filter(|file| file.size <= MAX_FILE_BYTES).find(|file| {
            total += file.size;
            total > MAX_TOTAL_BYTES
        });
        if let Some(file) = past {
            self.errors.push(SourceError::new(&file.path, Problem::TotalTooLarge));
            self.found.clear();
        }
    }
}

/// The bytes of a regular file, of which `left` bytes may still be read.
fn contents(path: &Path, left: u64) -> Result<Vec<u8>, Problem> {
    let file = open(path)?;
    let size = file.metadata().map_err(|e| Problem::of(&e))?.len();
    check_size(size, left)?;
    // One byte more than allowed shows that the file grew meanwhile; the capacity is bounded by the check above.
    let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0));
    file.take(MAX_FILE_BYTES.min(left) + 1).read_to_end(&mut bytes).map_err(|e| Problem::of(&e))?;
    check_size(bytes.len() as u64, left)?;
    Ok(bytes)
}

/// Opens a regular file. Looks before, because opening a device may do something, and after, because the path may by
/// then lead elsewhere; without O_NONBLOCK a FIFO would hold the caller in between.
fn open(path: &Path) -> Result<File, Problem> {
    regular(&fs::metadata(path).map_err(|e| Problem::of(&e))?)?;
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|e| Problem::of(&e))?;
    regular(&file.metadata().map_err(|e| Problem::of(&e))?)?;
    Ok(file)
}

fn regular(metadata: &fs::Metadata) -> Result<(), Problem> {
    let kind = metadata.file_type();
    match () {
        () if kind.is_file() => Ok(()),
        () if kind.is_dir() => Err(Problem::NotAFile("a directory")),
        () if kind.is_fifo() => Err(Problem::NotAFile("a FIFO")),
        () if kind.is_socket() => Err(Problem::NotAFile("a socket")),
        () => Err(Problem::NotAFile("a device")),
    }
}

fn check_size(size: u64, left: u64) -> Result<(), Problem> {
    if size > MAX_FILE_BYTES {
        return Err(Problem::FileTooLarge(size));
    }
    if size > left { Err(Problem::TotalTooLarge) } else { Ok(()) }
}

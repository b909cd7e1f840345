//! Rule files: their locations, contents and everything that can be wrong with a path.
//!
//! [`read`] returns the bytes of all files, or every reason why it cannot; [`watch`] repeats that when files change.
//! A set is complete or fails as a whole: a file is never left out because it failed. The readable part of a failed set
//! is for `check` only. Contents are not interpreted here.
//!
//! Decides: how many rule files, and how large; words and fixes for a path that cannot be read (`PathProblem`).

mod fs_events;
pub mod read;
pub mod walk;
pub mod watch;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;

use super::compile::value_set_files::SetFileText;
use super::diagnostic::{Diagnostic, Severity};
use crate::settings::rules::RuleSettings;

/// Maximum size of a rule file, in bytes.
pub const MAX_FILE_BYTES: u64 = 64 << 20;
/// Maximum size of all rule files together, in bytes.
pub const MAX_TOTAL_BYTES: u64 = 256 << 20;
/// Maximum size of the file of a table, in bytes.
pub const MAX_TABLE_BYTES: u64 = 256 << 20;
/// Maximum number of rule files.
pub const MAX_FILES: usize = 10_000;
/// Maximum number of errors; reading stops there.
const MAX_ERRORS: usize = 100;

/// Location of the rule files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleFilesLocation {
    /// Files and directories given with `--config`.
    ///
    /// Of a directory, searched recursively, these are the `.yaml`, `.yml` and `.json` files whose names do not start
    /// with a dot or end in `.schema.json`. A directory without any is an error.
    Paths(Vec<PathBuf>),
    /// Directories of envoyproxy/ratelimit. Every regular file counts, whatever its extension.
    Runtime {
        /// `RUNTIME_ROOT`; empty: there are no rules.
        root: PathBuf,
        /// `RUNTIME_SUBDIRECTORY`, below the root.
        subdirectory: String,
        /// `RUNTIME_APPDIRECTORY`: the directory below the subdirectory or, with `watch_root`, the first part of the
        /// dotted names that count.
        app_directory: String,
        /// `RUNTIME_IGNOREDOTFILES`: skips names that start with a dot, directories too.
        ignore_dotfiles: bool,
        /// `RUNTIME_WATCH_ROOT`: names are dotted from the subdirectory on (`config.shop.yaml`).
        watch_root: bool,
    },
}

impl RuleFilesLocation {
    /// Returns the empty variable because of which no file is read, as in envoyproxy/ratelimit.
    pub fn find_empty_env_variable(&self) -> Option<&'static str> {
        let is_root = |directory: &str| directory.trim_start_matches('/').is_empty();
        match self {
            Self::Paths(_) => None,
            Self::Runtime { root, .. } if root.as_os_str().is_empty() => Some("RUNTIME_ROOT"),
            Self::Runtime { watch_root: true, subdirectory, .. } if is_root(subdirectory) => {
                Some("RUNTIME_SUBDIRECTORY")
            }
            Self::Runtime { watch_root: false, app_directory, .. } if is_root(app_directory) => {
                Some("RUNTIME_APPDIRECTORY")
            }
            Self::Runtime { .. } => None,
        }
    }
}

impl From<&RuleSettings> for RuleFilesLocation {
    fn from(settings: &RuleSettings) -> Self {
        Self::Runtime {
            root: settings.root.clone(),
            subdirectory: settings.subdirectory.to_string_lossy().into_owned(),
            app_directory: settings.app_directory.to_string_lossy().into_owned(),
            ignore_dotfiles: settings.ignore_dot_files,
            watch_root: settings.watch_root,
        }
    }
}

/// One rule file as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleFile {
    /// Name in messages: the path as given or, under `RUNTIME_*`, the path below the directory with dots for slashes.
    pub name: Arc<str>,
    /// Path of the file.
    pub path: PathBuf,
    /// Contents, at most [`MAX_FILE_BYTES`].
    pub bytes: Vec<u8>,
}

/// All rule files of a location, at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleFileSet {
    /// Files sorted by name, no two of one name. Empty only under `RUNTIME_*`.
    pub files: Vec<RuleFile>,
    /// Files with sets that the rule files name, readable or not.
    pub sets: Vec<SetFileText>,
    /// Paths that are probably not meant; without rule files under `RUNTIME_*`, always one with the reason.
    pub warnings: Vec<PathError>,
}

/// Result of reading a location: all of it, or every error.
pub type RuleFileSetResult = Result<RuleFileSet, RuleFileSetFailure>;

/// Failure to read a part of a set, so that none of it may take effect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleFileSetFailure {
    /// Errors, at least one.
    pub errors: Vec<PathError>,
    /// The rest of the set, so that `check` can report its problems too.
    pub readable: RuleFileSet,
}

/// A path that cannot be read as rules, or is probably not meant so. Prints `path: what; fix`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{}: {problem}; {}", .path.display(), .problem.suggested_fix())]
pub struct PathError {
    /// The path, as it was given or found.
    pub path: PathBuf,
    /// Its problem.
    pub problem: PathProblem,
}

impl PathError {
    fn new(path: &Path, problem: PathProblem) -> Self {
        Self { path: path.to_owned(), problem }
    }

    /// Returns it as a diagnostic of the file, at line 1.
    pub fn to_diagnostic(&self, severity: Severity) -> Diagnostic {
        Diagnostic {
            severity,
            file: self.path.to_string_lossy().into(),
            line: 1,
            column: 1,
            path: String::new(),
            message: self.problem.to_string(),
            hint: Some(self.problem.suggested_fix().to_owned()),
        }
    }
}

/// Problem of a path.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum PathProblem {
    /// The path does not exist, or vanished while it was read.
    #[error("no such file or directory")]
    Missing,
    /// The target of a symbolic link does not exist.
    #[error("the symbolic link leads nowhere")]
    Dangling,
    /// A symbolic link leads to a file or directory outside of the directory of the rules.
    #[error("a symbolic link leads out of the directory of the rules")]
    LeadsOut,
    /// Symbolic links lead back to where they started.
    #[error("symbolic links form a loop")]
    Loop,
    /// The operating system returned an error, in its words.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// The path is not a regular file; the word for its type.
    #[error("is {0}, not a regular file")]
    NotAFile(&'static str),
    /// The path is a file instead of a directory.
    #[error("is not a directory")]
    NotADirectory,
    /// The directory has no rule file.
    #[error("the directory has no rule files")]
    NoRuleFiles,
    /// The `RUNTIME_*` variables name no directory; the variable that is empty.
    #[error("{0} is empty, so there are no rules and every request passes")]
    Unset(&'static str),
    /// The file is larger than [`MAX_FILE_BYTES`]; its size in bytes.
    #[error("has {0} bytes, more than the {MAX_FILE_BYTES} that a rule file may have")]
    FileTooLarge(u64),
    /// The file of a table is larger than it may be; its size in bytes.
    #[error("has {0} bytes, more than the {MAX_TABLE_BYTES} that a table may have")]
    TableTooLarge(u64),
    /// This file makes the set larger than [`MAX_TOTAL_BYTES`].
    #[error("takes the rule files past {MAX_TOTAL_BYTES} bytes together")]
    TotalTooLarge,
    /// There are more rule files than [`MAX_FILES`].
    #[error("there are more than {MAX_FILES} rule files")]
    TooManyFiles,
    /// There are more files and directories than a search may look at; their maximum.
    #[error("there are more than {0} files and directories to search")]
    TooManyEntries(usize),
    /// Directories are nested deeper than this.
    #[error("is more than {0} directories deep")]
    TooDeep(usize),
    /// Another file with the same dotted name is used instead.
    #[error("is not read, because {} has the same dotted name", .0.display())]
    Hidden(PathBuf),
}

impl PathProblem {
    /// Fix to suggest.
    pub const fn suggested_fix(&self) -> &'static str {
        match self {
            Self::Missing => "check the spelling and what is mounted there",
            Self::LeadsOut => "put the file itself there, or name the directory that it is in",
            Self::Dangling => "remove the link or restore its target",
            Self::Loop => "remove the link that leads back",
            Self::Unreadable(_) => "give the process permission to read it",
            Self::NotAFile(_) => "put a regular file there or move this away",
            Self::NotADirectory => "name a directory",
            Self::NoRuleFiles => "add a .yaml, .yml or .json file or name another directory",
            Self::Unset(_) => "set it, or name the rules with --config",
            Self::TableTooLarge(_) => "split the table",
            Self::FileTooLarge(_) => "split it, or check that it is a rule file",
            Self::TotalTooLarge | Self::TooManyFiles | Self::TooManyEntries(_) => {
                "name a directory that holds only rule files"
            }
            Self::TooDeep(_) => "name a directory closer to the rule files",
            Self::Hidden(_) => "rename one of the two",
        }
    }
}

/// Classifies an error of the operating system.
impl From<&io::Error> for PathProblem {
    fn from(error: &io::Error) -> Self {
        match Errno::from_io_error(error) {
            Some(Errno::NOENT) => Self::Missing,
            Some(Errno::LOOP) => Self::Loop,
            _ => Self::Unreadable(error.to_string()),
        }
    }
}

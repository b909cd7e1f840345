//! Search for the rule files of a location, without reading them: its result, and the stamps of the files found.
//!
//! One search serves `--config` and the `RUNTIME_*` directories; they differ only in the names that count. Symbolic
//! links below a directory are followed if they lead to what is below it too, or below `RUNTIME_ROOT`; others are errors. A directory whose name starts with `..` is never entered: a mounted Kubernetes ConfigMap keeps
//! its versions there and links to their files from above. A search also records the directories whose events may change
//! its result, for the watcher.
//!
//! A stamp changes when a file does: a replaced file has another inode, and a file that is written in place another time
//! or size. So files are compared by their stamps, and read when these differ.
//!
//! Decides: which files are read as rules: extensions, subdirectories, dotfiles, links, loops, depth.
//! Decides: order and equal names of files; a missing or empty directory, also in `check`.
//! Decides: when a file has changed (`FileStamps`).

use std::collections::{BTreeSet, HashSet};
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::hash::Hash as _;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use siphasher::sip128::{Hasher128 as _, SipHasher13};

use super::{MAX_ERRORS, MAX_FILES, PathError, PathProblem, RuleFilesLocation};
use crate::rules::plan_table::is_table_file;

/// Maximum number of names in one search, rule files or not.
const MAX_ENTRIES: usize = 100_000;
/// Maximum depth of directories below a given one.
const MAX_DEPTH: usize = 32;

/// Selection of the names that count.
enum NameFilter<'a> {
    /// Names with a rule extension, without dotfiles and schemas for editors; named by path.
    Extension,
    /// All files, named by their dotted paths below `base`, which must start with `prefix`.
    Dotted { base: &'a Path, prefix: String, ignore_dotfiles: bool },
}

/// Searches `location`.
pub(super) fn search_location(location: &RuleFilesLocation) -> FileSearchResult {
    if let Some(variable) = location.find_empty_env_variable() {
        return build_unset_variable_result(variable);
    }
    let mut scan = match location {
        RuleFilesLocation::Paths(paths) => search_paths(paths),
        RuleFilesLocation::Runtime { root, subdirectory, app_directory, ignore_dotfiles, watch_root } => {
            let runtime = RuntimeDirectories {
                root,
                // As in envoyproxy/ratelimit, an absolute subdirectory is still one below the root.
                subdirectory: subdirectory.trim_start_matches('/'),
                app_directory: app_directory.trim_start_matches('/'),
                ignore_dotfiles: *ignore_dotfiles,
            };
            if *watch_root { runtime.search_watched_root() } else { runtime.search_app_directory() }
        }
    };
    scan.sort_and_deduplicate();
    scan
}

/// Searches files and directories given with `--config`.
fn search_paths(paths: &[PathBuf]) -> FileSearchResult {
    let mut walk = FileSearch::new(NameFilter::Extension);
    for path in paths {
        walk.scan.add_directory_of(path);
        let before = (walk.scan.found.len(), walk.scan.errors.len());
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => {
                walk.search_from(path, path, &metadata);
                if before == (walk.scan.found.len(), walk.scan.errors.len()) {
                    walk.add_error(path, PathProblem::NoRuleFiles);
                }
            }
            // Reading reports a path that is not a regular file.
            Ok(metadata) => walk.add_found_file(path, &metadata),
            Err(error) => walk.add_error(path, problem_of_path(path, &error)),
        }
    }
    walk.scan
}

/// Returns the files of a directory that are rules under `RUNTIME_ROOT`, and none with `--config`.
pub fn find_files_of_runtime_only(directory: &Path, ignore_dotfiles: bool) -> Vec<PathBuf> {
    let runtime = RuntimeDirectories { root: directory, subdirectory: "", app_directory: "", ignore_dotfiles };
    let with_config: HashSet<PathBuf> =
        search_paths(&[directory.to_owned()]).found.into_iter().map(|file| file.path).collect();
    let found = runtime.search_app_directory().found.into_iter().map(|file| file.path);
    found.filter(|path| !with_config.contains(path)).collect()
}

/// Directories of the `RUNTIME_*` variables.
struct RuntimeDirectories<'a> {
    root: &'a Path,
    subdirectory: &'a str,
    app_directory: &'a str,
    ignore_dotfiles: bool,
}

impl RuntimeDirectories<'_> {
    /// Searches as with `RUNTIME_WATCH_ROOT`: files below the subdirectory whose dotted names start with the app
    /// directory.
    ///
    /// The subdirectory may be missing; the parent of the root may not.
    fn search_watched_root(&self) -> FileSearchResult {
        let base = self.root.join(self.subdirectory);
        let prefix = format!("{}.", self.app_directory);
        let mut walk =
            FileSearch::new(NameFilter::Dotted { base: &base, prefix, ignore_dotfiles: self.ignore_dotfiles });
        walk.scan.add_directory_of(self.root);
        walk.scan.add_directory_of(&base);
        let parent = self.root.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match fs::metadata(&base) {
            Err(error) if problem_of_path(&base, &error) == PathProblem::Missing && parent.exists() => {
                walk.add_warning(&base, PathProblem::Missing);
            }
            Err(_) if !parent.exists() => walk.add_error(parent, PathProblem::Missing),
            found => walk.search_runtime_directory(self.root, &base, found),
        }
        walk.scan
    }

    /// Searches as without `RUNTIME_WATCH_ROOT`: files below the app directory, which must exist.
    fn search_app_directory(&self) -> FileSearchResult {
        let base = self.root.join(self.subdirectory).join(self.app_directory);
        let prefix = String::new();
        let mut walk =
            FileSearch::new(NameFilter::Dotted { base: &base, prefix, ignore_dotfiles: self.ignore_dotfiles });
        walk.scan.add_directory_of(self.root);
        walk.scan.add_directory_of(&base);
        walk.search_runtime_directory(self.root, &base, fs::metadata(&base));
        walk.scan
    }
}

fn build_unset_variable_result(variable: &'static str) -> FileSearchResult {
    let warning = PathError::new(Path::new(variable), PathProblem::Unset(variable));
    FileSearchResult { warnings: vec![warning], ..FileSearchResult::default() }
}

struct FileSearch<'a> {
    names: NameFilter<'a>,
    scan: FileSearchResult,
    /// Number of names that may still be searched.
    entries_left: usize,
    /// Device and inode of the directories from the given one down to the current one.
    inside: Vec<(u64, u64)>,
    /// The given directory or `RUNTIME_ROOT`, without links; `None` for a given file.
    within: Option<Arc<Path>>,
    /// A bound was reached, so the search ends.
    full: bool,
}

impl<'a> FileSearch<'a> {
    fn new(names: NameFilter<'a>) -> Self {
        Self {
            names,
            scan: FileSearchResult::default(),
            entries_left: MAX_ENTRIES,
            inside: Vec::new(),
            within: None,
            full: false,
        }
    }

    /// Searches the directory that the `RUNTIME_*` variables name, below `root`.
    fn search_runtime_directory(&mut self, root: &Path, base: &Path, found: std::io::Result<Metadata>) {
        match found {
            Ok(metadata) if metadata.is_dir() => {
                self.search_from(base, root, &metadata);
                if self.scan.found.is_empty() && self.scan.errors.is_empty() {
                    self.add_warning(base, PathProblem::NoRuleFiles);
                }
            }
            Ok(_) => self.add_error(base, PathProblem::NotADirectory),
            Err(error) => self.add_error(base, problem_of_path(base, &error)),
        }
    }

    /// Searches a given directory, whose links may lead to what is below `within`.
    fn search_from(&mut self, path: &Path, within: &Path, metadata: &Metadata) {
        match fs::canonicalize(within) {
            Ok(real) => {
                self.within = Some(real.into());
                self.search_directory(path, metadata);
                self.within = None;
            }
            Err(error) => self.add_error(path, problem_of_path(path, &error)),
        }
    }

    fn search_directory(&mut self, path: &Path, metadata: &Metadata) {
        let id = (metadata.dev(), metadata.ino());
        if self.inside.contains(&id) {
            return self.add_error(path, PathProblem::Loop);
        }
        if self.inside.len() > MAX_DEPTH {
            return self.add_error(path, PathProblem::TooDeep(MAX_DEPTH));
        }
        self.scan.directories.insert(path.to_owned());
        self.inside.push(id);
        match self.list_directory(path) {
            Ok(entries) => {
                for entry in entries {
                    if self.full {
                        break;
                    }
                    self.visit_entry(&entry);
                }
            }
            Err(problem) => self.add_error(path, problem),
        }
        self.inside.pop();
    }

    /// Returns the entries of a directory, sorted, so that two searches have the same result.
    fn list_directory(&mut self, path: &Path) -> Result<Vec<PathBuf>, PathProblem> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(path).map_err(|e| PathProblem::from(&e))? {
            self.entries_left = self.entries_left.checked_sub(1).ok_or(PathProblem::TooManyEntries(MAX_ENTRIES))?;
            entries.push(entry.map_err(|e| PathProblem::from(&e))?.path());
        }
        entries.sort();
        Ok(entries)
    }

    fn visit_entry(&mut self, path: &Path) {
        let name = path.file_name().map(OsStr::as_bytes).unwrap_or_default();
        if name.starts_with(b".") && self.names.skips_dotfiles() {
            return;
        }
        let link = path.is_symlink();
        if link {
            self.scan.add_directory_of(path);
            let names = &self.names;
            if (names.rule_file_name(path).is_some() || path.is_dir() && names.may_have_rule_files_below(path))
                && let Err(problem) = check_is_within(path, self.within.as_deref())
            {
                return self.add_error(path, problem);
            }
        }
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => {
                if !name.starts_with(b"..") && self.names.may_have_rule_files_below(path) {
                    self.search_directory(path, &metadata);
                }
            }
            Ok(metadata) if self.names.rule_file_name(path).is_some() => self.add_found_file(path, &metadata),
            // Some editors lock a file with a dangling link beside it: `.#name`.
            Err(_) if link && name.starts_with(b".") => {}
            Err(error) if self.names.may_hide_rule_files(path) => self.add_error(path, problem_of_path(path, &error)),
            Ok(_) | Err(_) => {}
        }
    }

    fn add_found_file(&mut self, path: &Path, metadata: &Metadata) {
        if self.scan.found.len() == MAX_FILES {
            return self.add_error(path, PathProblem::TooManyFiles);
        }
        let name = self.names.rule_file_name(path).unwrap_or_else(|| path.to_string_lossy().into());
        self.scan.found.push(FoundFile {
            name,
            path: path.to_owned(),
            stamp: FileStamp::from_metadata(metadata),
            within: self.within.clone(),
        });
    }

    fn add_error(&mut self, path: &Path, problem: PathProblem) {
        self.full |= matches!(problem, PathProblem::TooManyFiles | PathProblem::TooManyEntries(_));
        self.scan.errors.push(PathError::new(path, problem));
        self.full |= self.scan.errors.len() >= MAX_ERRORS;
    }

    fn add_warning(&mut self, path: &Path, problem: PathProblem) {
        self.scan.warnings.push(PathError::new(path, problem));
    }
}

impl NameFilter<'_> {
    fn skips_dotfiles(&self) -> bool {
        match self {
            Self::Extension => true,
            Self::Dotted { ignore_dotfiles, .. } => *ignore_dotfiles,
        }
    }

    /// Returns the name of the file at `path`, or `None` if it does not count.
    fn rule_file_name(&self, path: &Path) -> Option<Arc<str>> {
        // The directory may contain a JSON schema for editors.
        if path.as_os_str().as_bytes().ends_with(b".schema.json") {
            return None;
        }
        if is_table_file(path) {
            return None;
        }
        match self {
            Self::Extension => {
                let is_rule_file = path.extension().is_some_and(|it| it == "yaml" || it == "yml" || it == "json");
                is_rule_file.then(|| path.to_string_lossy().into())
            }
            Self::Dotted { base, prefix, .. } => {
                let name = dotted_name(base, path);
                name.starts_with(prefix).then(|| name.into())
            }
        }
    }

    /// Returns `true` if an unreadable path may be a rule file, or a link to a directory of rule files.
    fn may_hide_rule_files(&self, path: &Path) -> bool {
        let directory = match self {
            Self::Extension => path.is_symlink() && path.extension().is_none(),
            Self::Dotted { .. } => path.is_symlink() && self.may_have_rule_files_below(path),
        };
        directory || self.rule_file_name(path).is_some()
    }

    /// Returns `true` if a name below the directory at `path` can count.
    fn may_have_rule_files_below(&self, path: &Path) -> bool {
        match self {
            Self::Extension => true,
            Self::Dotted { base, prefix, .. } => {
                let start = dotted_name(base, path) + ".";
                start.starts_with(prefix) || prefix.starts_with(&start)
            }
        }
    }
}

fn dotted_name(base: &Path, path: &Path) -> String {
    path.strip_prefix(base).unwrap_or(path).to_string_lossy().replace('/', ".")
}

/// Returns the problem of an unreadable path; distinguishes a dangling link from a missing path.
fn problem_of_path(path: &Path, error: &std::io::Error) -> PathProblem {
    match PathProblem::from(error) {
        PathProblem::Missing if path.is_symlink() => PathProblem::Dangling,
        problem => problem,
    }
}

/// Checks that a path is really below `within`, a path without links. A path that leads nowhere is left to others.
pub(super) fn check_is_within(path: &Path, within: Option<&Path>) -> Result<(), PathProblem> {
    match (fs::canonicalize(path), within) {
        (Ok(real), Some(within)) if !real.starts_with(within) => Err(PathProblem::LeadsOut),
        _ => Ok(()),
    }
}

/// Rule files that a search found, its errors and warnings, and the directories to watch.
#[derive(Debug, Default)]
pub(super) struct FileSearchResult {
    pub(super) found: Vec<FoundFile>,
    pub(super) errors: Vec<PathError>,
    pub(super) warnings: Vec<PathError>,
    /// Directories in which a change of an entry may change the result.
    pub(super) directories: BTreeSet<PathBuf>,
}

/// A rule file that was found.
#[derive(Debug)]
pub(super) struct FoundFile {
    pub(super) name: Arc<str>,
    pub(super) path: PathBuf,
    /// Directory that it must be in or below, without links.
    pub(super) within: Option<Arc<Path>>,
    /// Stamp when the file was found; it may have changed since.
    pub(super) stamp: FileStamp,
}

impl FileSearchResult {
    /// Adds the directory of `path` to those to watch, and that of the file to which its links lead; of a directory that does not exist,
    /// the one in which it has to appear. A link in between that is elsewhere is not watched: stamps show its changes.
    pub(super) fn add_directory_of(&mut self, path: &Path) {
        let real = fs::canonicalize(path).ok();
        for path in [std::path::absolute(path).ok(), real].into_iter().flatten() {
            let existing = path.ancestors().skip(1).find(|directory| directory.exists());
            self.directories.extend(existing.map(Path::to_owned));
        }
    }

    /// Sorts the files by name, and keeps one file of each name.
    ///
    /// Of two files with one name the later one in the search stays, as in envoyproxy/ratelimit. Under `--config` the
    /// two are the same file, given twice.
    fn sort_and_deduplicate(&mut self) {
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

/// Identity, size and time of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileStamp {
    device: u64,
    inode: u64,
    /// Size in bytes.
    pub(super) size: u64,
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
    /// Takes the stamps of the files that a search found, and of those at the paths `named`.
    pub(super) fn new(search: &FileSearchResult, named: &[PathBuf]) -> Self {
        let problems = search.errors.iter().chain(&search.warnings);
        let problems = problems.map(|problem| (problem.path.clone(), Err(problem.problem.clone())));
        let found = search.found.iter().map(|found| (found.path.clone(), Ok(found.stamp)));
        let named = named.iter().map(|path| {
            let metadata = fs::metadata(path).map_err(|error| PathProblem::from(&error));
            (path.clone(), metadata.map(|metadata| FileStamp::from_metadata(&metadata)))
        });
        let mut stamps: Vec<_> = found.chain(problems).chain(named).collect();
        stamps.sort_by(|one, other| one.0.cmp(&other.0));
        Self(stamps)
    }

    /// Hashes the stamps, so that two different results practically never have the same hash.
    pub(super) fn fingerprint(&self) -> u128 {
        let mut hasher = SipHasher13::new();
        self.0.hash(&mut hasher);
        hasher.finish128().as_u128()
    }

    /// Returns `true` if a change at `now` may leave a stamp as it is: file systems round times, so two changes can have
    /// the same one.
    pub fn may_hide_change(&self, now: SystemTime) -> bool {
        let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let settled = now.saturating_sub(COARSEST_FILE_TIME).as_secs();
        let changed = self.0.iter().filter_map(|(_, stamp)| stamp.as_ref().ok()).map(|stamp| stamp.changed.0);
        changed.max().is_some_and(|newest| u64::try_from(newest).is_ok_and(|newest| newest >= settled))
    }
}

/// Coarsest time that file systems store: FAT stores two seconds. A second more is for their clocks.
const COARSEST_FILE_TIME: Duration = Duration::from_secs(3);

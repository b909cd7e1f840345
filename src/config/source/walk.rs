//! Finding the rule files of a layout without reading them.
//!
//! One walk serves `--config` directories and the `RUNTIME_*` directories; they differ only in which names count.
//! Symbolic links are followed, except that a directory whose name starts with `..` is never entered: that is how a
//! mounted Kubernetes ConfigMap keeps its versions, whose files are linked from above. Besides the files, a walk
//! leaves the trail of paths that decided what it found, so that a watcher knows where to look.

use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Found, MAX_ERRORS, MAX_FILES, Problem, SourceError, Survey, Trace};

/// Names looked at in one walk, rule files or not.
const MAX_ENTRIES: usize = 100_000;
/// Directories below one that was named.
const MAX_DEPTH: usize = 32;

/// Which names count.
enum Names<'a> {
    /// Rule extensions, no dotfiles, no schema that an editor reads; called by their paths.
    Given,
    /// All, called by their dotted paths below `base`, which must start with `prefix`.
    Dotted { base: &'a Path, prefix: String, ignore_dotfiles: bool },
}

/// Lists files and directories given with `--config`.
pub(super) fn given(paths: &[PathBuf]) -> Survey {
    let mut walk = Walk::new(Names::Given);
    for path in paths {
        walk.survey.trail.push(Trace::Followed(path.clone()));
        let before = (walk.survey.found.len(), walk.survey.errors.len());
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => {
                walk.directory(path, &metadata);
                if before == (walk.survey.found.len(), walk.survey.errors.len()) {
                    walk.error(path, Problem::NoRuleFiles);
                }
            }
            // What else may be there is for the reading to refuse.
            Ok(metadata) => walk.found(path, &metadata),
            Err(error) => walk.error(path, problem_at(path, &error)),
        }
    }
    walk.survey
}

/// What the `RUNTIME_*` variables say.
pub(super) struct Runtime<'a> {
    pub(super) root: &'a Path,
    pub(super) subdirectory: &'a str,
    pub(super) app_directory: &'a str,
    pub(super) ignore_dotfiles: bool,
}

impl Runtime<'_> {
    /// With `RUNTIME_WATCH_ROOT`: the files below the subdirectory whose dotted names start with the app directory.
    /// The subdirectory may be missing; the directory that holds the root may not.
    pub(super) fn below_root(&self) -> Survey {
        if self.root.as_os_str().is_empty() {
            return unset("RUNTIME_ROOT");
        }
        if self.subdirectory.is_empty() {
            return unset("RUNTIME_SUBDIRECTORY");
        }
        let base = self.root.join(self.subdirectory);
        let prefix = format!("{}.", self.app_directory);
        let mut walk = Walk::new(Names::Dotted { base: &base, prefix, ignore_dotfiles: self.ignore_dotfiles });
        walk.survey.trail.push(Trace::Followed(base.clone()));
        let holder = self.root.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match fs::metadata(&base) {
            Err(error) if problem_at(&base, &error) == Problem::Missing && holder.exists() => {
                walk.warn(&base, Problem::Missing);
            }
            Err(_) if !holder.exists() => walk.error(holder, Problem::Missing),
            found => walk.base(&base, found),
        }
        walk.survey
    }

    /// Without `RUNTIME_WATCH_ROOT`: the files below the app directory, which must be there.
    pub(super) fn below_app_directory(&self) -> Survey {
        if self.root.as_os_str().is_empty() {
            return unset("RUNTIME_ROOT");
        }
        if self.app_directory.is_empty() {
            return unset("RUNTIME_APPDIRECTORY");
        }
        let base = self.root.join(self.subdirectory).join(self.app_directory);
        let prefix = String::new();
        let mut walk = Walk::new(Names::Dotted { base: &base, prefix, ignore_dotfiles: self.ignore_dotfiles });
        walk.survey.trail.push(Trace::Followed(base.clone()));
        walk.base(&base, fs::metadata(&base));
        walk.survey
    }
}

fn unset(variable: &'static str) -> Survey {
    let warning = SourceError::new(Path::new(variable), Problem::Unset(variable));
    Survey { warnings: vec![warning], ..Survey::default() }
}

struct Walk<'a> {
    names: Names<'a>,
    survey: Survey,
    /// Names that may still be looked at.
    entries_left: usize,
    /// Device and inode of the directories from the named one to here.
    inside: Vec<(u64, u64)>,
    /// A bound was met: nothing more is looked at.
    full: bool,
}

impl<'a> Walk<'a> {
    fn new(names: Names<'a>) -> Self {
        Self { names, survey: Survey::default(), entries_left: MAX_ENTRIES, inside: Vec::new(), full: false }
    }

    /// Walks the directory that `RUNTIME_*` names.
    fn base(&mut self, base: &Path, found: std::io::Result<Metadata>) {
        match found {
            Ok(metadata) if metadata.is_dir() => {
                self.directory(base, &metadata);
                if self.survey.found.is_empty() && self.survey.errors.is_empty() {
                    self.warn(base, Problem::NoRuleFiles);
                }
            }
            Ok(_) => self.error(base, Problem::NotADirectory),
            Err(error) => self.error(base, problem_at(base, &error)),
        }
    }

    fn directory(&mut self, path: &Path, metadata: &Metadata) {
        let id = (metadata.dev(), metadata.ino());
        if self.inside.contains(&id) {
            return self.error(path, Problem::Loop);
        }
        if self.inside.len() > MAX_DEPTH {
            return self.error(path, Problem::TooDeep(MAX_DEPTH));
        }
        self.survey.trail.push(Trace::Listed(path.to_owned()));
        self.inside.push(id);
        match self.list(path) {
            Ok(entries) => {
                for entry in entries {
                    if self.full {
                        break;
                    }
                    self.entry(&entry);
                }
            }
            Err(problem) => self.error(path, problem),
        }
        self.inside.pop();
    }

    /// The entries of a directory, sorted, so that two walks find and say the same.
    fn list(&mut self, path: &Path) -> Result<Vec<PathBuf>, Problem> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(path).map_err(|e| Problem::of(&e))? {
            self.entries_left = self.entries_left.checked_sub(1).ok_or(Problem::TooManyEntries(MAX_ENTRIES))?;
            entries.push(entry.map_err(|e| Problem::of(&e))?.path());
        }
        entries.sort();
        Ok(entries)
    }

    fn entry(&mut self, path: &Path) {
        let name = path.file_name().map(OsStr::as_bytes).unwrap_or_default();
        if name.starts_with(b".") && self.names.skip_dotfiles() {
            return;
        }
        let link = path.is_symlink();
        if link {
            self.survey.trail.push(Trace::Followed(path.to_owned()));
        }
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => {
                if !name.starts_with(b"..") && self.names.may_be_below(path) {
                    self.directory(path, &metadata);
                }
            }
            Ok(metadata) if self.names.name(path).is_some() => self.found(path, &metadata),
            // Some editors lock a file with a dangling link beside it, `.#name`.
            Err(_) if link && name.starts_with(b".") => {}
            Err(error) if self.names.may_count(path) => self.error(path, problem_at(path, &error)),
            Ok(_) | Err(_) => {}
        }
    }

    fn found(&mut self, path: &Path, metadata: &Metadata) {
        if self.survey.found.len() == MAX_FILES {
            return self.error(path, Problem::TooManyFiles);
        }
        let name = self.names.name(path).unwrap_or_else(|| path.to_string_lossy().into());
        self.survey.found.push(Found { name, path: path.to_owned(), size: metadata.len() });
    }

    fn error(&mut self, path: &Path, problem: Problem) {
        self.full |= matches!(problem, Problem::TooManyFiles | Problem::TooManyEntries(_));
        self.survey.errors.push(SourceError::new(path, problem));
        self.full |= self.survey.errors.len() >= MAX_ERRORS;
    }

    fn warn(&mut self, path: &Path, problem: Problem) {
        self.survey.warnings.push(SourceError::new(path, problem));
    }
}

impl Names<'_> {
    fn skip_dotfiles(&self) -> bool {
        match self {
            Self::Given => true,
            Self::Dotted { ignore_dotfiles, .. } => *ignore_dotfiles,
        }
    }

    /// How the file at `path` is called, or nothing if it does not count.
    fn name(&self, path: &Path) -> Option<Arc<str>> {
        // The schema that editors check rules by stands beside them, and is none.
        if path.as_os_str().as_bytes().ends_with(b".schema.json") {
            return None;
        }
        match self {
            Self::Given => {
                let rules = path.extension().is_some_and(|it| it == "yaml" || it == "yml" || it == "json");
                rules.then(|| path.to_string_lossy().into())
            }
            Self::Dotted { base, prefix, .. } => {
                let name = dotted(base, path);
                name.starts_with(prefix).then(|| name.into())
            }
        }
    }

    /// Whether what can not be looked at may be a rule file, or a link to a directory of them.
    fn may_count(&self, path: &Path) -> bool {
        let directory = match self {
            Self::Given => path.is_symlink() && path.extension().is_none(),
            Self::Dotted { .. } => path.is_symlink() && self.may_be_below(path),
        };
        directory || self.name(path).is_some()
    }

    /// Whether the name of anything below the directory at `path` can count.
    fn may_be_below(&self, path: &Path) -> bool {
        match self {
            Self::Given => true,
            Self::Dotted { base, prefix, .. } => {
                let start = dotted(base, path) + ".";
                start.starts_with(prefix) || prefix.starts_with(&start)
            }
        }
    }
}

fn dotted(base: &Path, path: &Path) -> String {
    path.strip_prefix(base).unwrap_or(path).to_string_lossy().replace('/', ".")
}

/// Why `path` can not be looked at: a link that leads nowhere is not the same as nothing there.
fn problem_at(path: &Path, error: &std::io::Error) -> Problem {
    match Problem::of(error) {
        Problem::Missing if path.is_symlink() => Problem::Dangling,
        problem => problem,
    }
}

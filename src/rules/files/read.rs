//! Reading of rule files, and of the files with values that they name: `match: { in: { file: blocked.txt } }`.
//!
//! Anyone who can write to the directory may put anything there, so nothing blocks and everything is bounded: only
//! regular files are opened, and sizes, counts and depths have limits.
//!
//! The name of a file with values is relative to the directory of the rule file, and leads nowhere above it: rules may
//! come from people who must not read other files of the machine, and messages show lines. For the same reason a link
//! leads nowhere above it, and a link of a searched directory nowhere out of that; those of a mounted ConfigMap stay
//! below it. A hard link cannot be told from a file. Only `.txt` and `.list` files can be named, so that no rule file
//! becomes a set. A set is not read as rules, whatever names count as
//! rule files.
//!
//! Decides: files that cannot be opened, FIFOs, devices and links that lead out (`open_regular_file`).
//! Decides: whether one bad file stops the others.
//! Decides: which files of values a rule may name (`resolve_set_file_path`), how many (`MAX_SET_FILES`).

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use memchr::memmem;
use rustix::fs::OFlags;

use super::walk::{FileSearchResult, FoundFile, check_is_within, search_location};
use super::{
    MAX_ERRORS, MAX_FILE_BYTES, MAX_TOTAL_BYTES, PathError, PathProblem, RuleFile, RuleFileSet, RuleFileSetFailure,
    RuleFileSetResult, RuleFilesLocation,
};
use crate::rules::compile::value_set_files::{SetContents, SetFileText};
use crate::rules::diagnostic::Diagnostics;
use crate::rules::yaml::parse::parse_documents;
use crate::rules::yaml::{DocumentSelection, YamlContent, YamlNode, text};

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
    pub(super) named: Vec<PathBuf>,
}

/// Reads the files that a search found, and those that they name; none of them if their sum is too large.
pub(super) fn read_found_files(mut scan: FileSearchResult) -> FilesRead {
    enforce_total_size(&mut scan);
    let FileSearchResult { found, mut errors, warnings, .. } = scan;
    let mut files = Vec::with_capacity(found.len());
    let mut bytes_left = MAX_TOTAL_BYTES;
    for FoundFile { name, path, within, .. } in found {
        if errors.len() >= MAX_ERRORS {
            break;
        }
        match read_contents(&path, within.as_deref(), bytes_left) {
            Ok(bytes) => {
                bytes_left -= bytes.len() as u64;
                files.push(RuleFile { name, path, bytes });
            }
            Err(problem) => errors.push(PathError { path, problem }),
        }
    }
    let sets = SetFilesRead::read(&mut files, bytes_left);
    let SetFilesRead { texts: sets, paths: named } = sets;
    let set = RuleFileSet { files, sets, warnings };
    let result = if errors.is_empty() { Ok(set) } else { Err(RuleFileSetFailure { errors, readable: set }) };
    FilesRead { result, named }
}

/// Reports the file that takes the sum of sizes past [`MAX_TOTAL_BYTES`], and drops all files, so that none is read.
///
/// A file that is too large by itself is left to the reading, which reports it.
fn enforce_total_size(scan: &mut FileSearchResult) {
    let mut total = 0;
    let past = scan.found.iter().filter(|file| file.stamp.size <= MAX_FILE_BYTES).find(|file| {
        total += file.stamp.size;
        total > MAX_TOTAL_BYTES
    });
    if let Some(file) = past {
        scan.errors.push(PathError::new(&file.path, PathProblem::TotalTooLarge));
        scan.found.clear();
    }
}

/// Returns the bytes of a regular file, of which at most `bytes_left` may be read. `within` is as in
/// [`open_regular_file`].
pub(super) fn read_contents(path: &Path, within: Option<&Path>, bytes_left: u64) -> Result<Vec<u8>, PathProblem> {
    let file = open_regular_file(path, within)?;
    let size = file.metadata().map_err(|error| PathProblem::from(&error))?.len();
    check_size(size, bytes_left)?;
    // One byte more than allowed shows that the file has grown; the capacity is bounded by the check above.
    let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0));
    file.take(MAX_FILE_BYTES.min(bytes_left) + 1).read_to_end(&mut bytes).map_err(|error| PathProblem::from(&error))?;
    check_size(bytes.len() as u64, bytes_left)?;
    Ok(bytes)
}

/// Opens a regular file that is really below `within`, a path without links; anywhere without it.
///
/// The type is checked before, because opening a device may have an effect, and after, because the path may lead
/// elsewhere by then. Without O_NONBLOCK, a FIFO in between would block.
pub(in crate::rules) fn open_regular_file(path: &Path, within: Option<&Path>) -> Result<File, PathProblem> {
    check_is_within(path, within)?;
    check_is_regular_file(&fs::metadata(path).map_err(|error| PathProblem::from(&error))?)?;
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file =
        OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|error| PathProblem::from(&error))?;
    check_is_regular_file(&file.metadata().map_err(|error| PathProblem::from(&error))?)?;
    // The path of what is open, which no change of a link alters. A system without it has the check above.
    let opened = Path::new("/proc/self/fd").join(file.as_raw_fd().to_string());
    match (fs::read_link(opened), within) {
        (Ok(real), Some(within)) if !real.starts_with(within) => Err(PathProblem::LeadsOut),
        _ => Ok(file),
    }
}

/// Returns the directory of a rule file without links; the files that it names must be there or below.
pub(in crate::rules) fn resolve_directory_of(rule_file: &Path) -> PathBuf {
    let directory = rule_file.parent().filter(|directory| !directory.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    // One that cannot be resolved has no files.
    fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned())
}

/// Checks that a path given to a command is no link that leads out of its directory. Commands show lines of files, and
/// check what others propose; `serve` takes such a link, because its operator named it.
///
/// # Errors
/// The path with its problem.
pub fn check_link_of_command(path: &Path) -> Result<(), PathError> {
    let within = resolve_directory_of(path);
    let is_file_link = path.is_symlink() && !path.is_dir();
    let checked = if is_file_link { check_is_within(path, Some(&within)) } else { Ok(()) };
    checked.map_err(|problem| PathError::new(path, problem))
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

/// Maximum number of files with sets.
pub const MAX_SET_FILES: usize = 1000;
/// Maximum length of the name of a file with a set, in bytes.
const MAX_SET_FILE_NAME_BYTES: usize = 255;

/// Files with sets that were read, and their paths.
#[derive(Debug, Default)]
struct SetFilesRead {
    texts: Vec<SetFileText>,
    paths: Vec<PathBuf>,
}

impl SetFilesRead {
    /// Reads the files that `files` name, of which at most `bytes_left` bytes. Takes those that were read as rule files
    /// out of `files`.
    fn read(files: &mut Vec<RuleFile>, mut bytes_left: u64) -> Self {
        let mut named: Vec<(Arc<str>, String, Result<PathBuf, String>)> = Vec::new();
        let mut directories: HashMap<PathBuf, PathBuf> = HashMap::new();
        for file in files.iter() {
            for name in find_set_file_names(&file.bytes) {
                let path = resolve_set_file_path(&file.path, &name);
                if let Ok(path) = &path {
                    directories.insert(path.clone(), resolve_directory_of(&file.path));
                }
                named.push((Arc::clone(&file.name), name, path));
            }
        }
        let mut read = Self::default();
        let mut contents: HashMap<PathBuf, Result<SetContents, String>> = HashMap::new();
        for (rule_file, name, path) in named {
            let (shown, of_file) = match path {
                Err(problem) => (name.clone(), Err(problem)),
                Ok(path) if contents.len() == MAX_SET_FILES && !contents.contains_key(&path) => {
                    (name.clone(), Err(format!("there are more than {MAX_SET_FILES} such files")))
                }
                Ok(path) => {
                    let of_file = contents.entry(path.clone()).or_insert_with(|| {
                        let of_file = take_or_read_contents(files, &path, directories.get(&path), bytes_left);
                        bytes_left -= of_file.as_ref().map_or(0, |bytes| bytes.len() as u64);
                        of_file
                    });
                    (path.to_string_lossy().into_owned(), of_file.clone())
                }
            };
            let text = SetFileText { rule_file, name: name.into(), path: shown.into(), contents: of_file };
            read.texts.push(text);
        }
        read.paths = contents.into_keys().collect();
        read.paths.sort_unstable();
        read
    }
}

/// Returns the contents of a file of a set. If it was read as a rule file, it is no longer one.
fn take_or_read_contents(
    files: &mut Vec<RuleFile>,
    path: &Path,
    within: Option<&PathBuf>,
    bytes_left: u64,
) -> Result<SetContents, String> {
    match files.iter().position(|file| file.path == path) {
        Some(index) => Ok(files.remove(index).bytes.into()),
        None => read_contents(path, within.map(PathBuf::as_path), bytes_left)
            .map(SetContents::from)
            .map_err(|problem| problem.to_string()),
    }
}

/// Returns the path of the file with a set that the rule file at `rule_file` names, or why it cannot be named.
pub fn resolve_set_file_path(rule_file: &Path, name: &str) -> Result<PathBuf, String> {
    let path = Path::new(name);
    let is_below = path.components().all(|component| matches!(component, Component::Normal(_)));
    if name.is_empty() || name.len() > MAX_SET_FILE_NAME_BYTES || name.contains(|c: char| c.is_control() || c == '#') {
        return Err("it is not a name of a file".to_owned());
    }
    if !is_below {
        return Err("it leads out of the directory of the rule file".to_owned());
    }
    if path.extension().is_none_or(|extension| extension != "txt" && extension != "list") {
        return Err("its name does not end in .txt or .list".to_owned());
    }
    Ok(rule_file.parent().unwrap_or(Path::new("")).join(path))
}

/// Returns the names of files with sets in the text of a rule file, each once; none of a text that cannot be read.
pub fn find_set_file_names(bytes: &[u8]) -> Vec<String> {
    let Ok(text) = text::decode_text(bytes) else { return Vec::new() };
    // Most rule files have none, and are not parsed here.
    if ["match", "file"].iter().any(|word| memmem::find(text.as_bytes(), word.as_bytes()).is_none()) {
        return Vec::new();
    }
    // Problems are reported by the compiler.
    let documents = parse_documents(&text, DocumentSelection::All, &"".into(), &mut Diagnostics::default());
    let mut names: Vec<String> = Vec::new();
    let mut known: HashSet<&str> = HashSet::new();
    let mut waiting: Vec<&YamlNode<'_>> = documents.iter().collect();
    while let Some(node) = waiting.pop() {
        if let YamlContent::List(list) =
            find_mapping_value(node, "descriptors").map_or(&node.content, |list| &list.content)
        {
            waiting.extend(list.iter());
        }
        let operators = find_mapping_value(node, "match");
        let operators = operators.and_then(|operators| find_mapping_value(operators, "not").or(Some(operators)));
        for operator in ["in", "cidr"] {
            let file =
                operators.and_then(|operators| find_mapping_value(find_mapping_value(operators, operator)?, "file"));
            if let Some(name) = file.and_then(YamlNode::as_scalar).map(|name| name.text())
                && known.insert(name)
            {
                names.push(name.to_owned());
            }
        }
    }
    names
}

fn find_mapping_value<'n, 'a>(node: &'n YamlNode<'a>, key: &str) -> Option<&'n YamlNode<'a>> {
    let YamlContent::Map(map) = &node.content else { return None };
    map.iter().find(|(name, _)| name.as_scalar().is_some_and(|name| name.text() == key)).map(|(_, value)| value)
}

//! `config_check_cmd`: the rule checker of envoyproxy/ratelimit, with its flags and output.
//!
//! It checks the files directly in a directory, with any extension, in the order of their names, and reads the first
//! document of each, and the sets and tables that they name. Unlike the original it reports all problems, and skips
//! versions of a Kubernetes ConfigMap (`..data`). Warnings go to standard error.
//!
//! Decides: flags of `config_check_cmd`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use super::go_flags::{self, Flag};
use super::print::{CommandOutcome, fail_if_unwritten, print_error, print_to_stdout};
use super::rule_files::{self, CheckedRules, TableFiles};
use crate::base::text::escape_unprintable;
use crate::rules::compile::RuleText;
use crate::rules::compile::options::CompileOptions;
use crate::rules::compile::value_set_files::{SetFileText, SetFiles};
use crate::rules::diagnostic::Diagnostics;
use crate::rules::files::read::{check_link_of_command, read_rule_files};
use crate::rules::files::{MAX_FILES, MAX_TOTAL_BYTES, RuleFilesLocation};
use crate::rules::plan_table::is_table_file;
use crate::rules::yaml::DocumentSelection;

const FLAGS: [Flag; 2] = [
    Flag { name: "config_dir", is_switch: false, help: "path to directory containing rate limit configs" },
    Flag {
        name: "merge_domain_configs",
        is_switch: true,
        help: "whether to merge configurations, referencing the same domain",
    },
];

/// Checks the files of a directory.
pub(super) fn run(arguments: &[OsString]) -> CommandOutcome {
    let given = match go_flags::parse_flags(&FLAGS, arguments) {
        Ok(given) => given,
        Err(outcome) => return outcome,
    };
    let directory = given.last_value("config_dir").unwrap_or_default();
    let mut page =
        format!("checking rate limit configs...\nloading config directory: {}\n", escape_unprintable(directory));
    let outcome = match check_directory(Path::new(directory), given.is_on("merge_domain_configs"), &mut page) {
        Ok(()) => CommandOutcome::Success,
        Err(problem) => {
            page += &problem;
            CommandOutcome::Failure
        }
    };
    fail_if_unwritten(print_to_stdout(page), outcome)
}

/// Writes a line to `page` for each step; the error is the last lines.
fn check_directory(directory: &Path, merge_domains: bool, page: &mut String) -> Result<(), String> {
    let options = CompileOptions { merge_domains, ..CompileOptions::from(&rule_files::read_settings_or_defaults()) };
    let failed = |error: io::Error| {
        format!("error opening directory {}: {error}\n", escape_unprintable(&directory.to_string_lossy()))
    };
    let (mut sources, mut bytes): (Vec<RuleText>, u64) = (Vec::new(), 0);
    let mut sets: Vec<SetFileText> = Vec::new();
    for path in list_directory_entries(directory).map_err(failed)? {
        if is_table_file(&path) {
            continue;
        }
        *page += &format!("opening config file: {}\n", escape_unprintable(&path.to_string_lossy()));
        let (source, named) = read_rule_file(&path)?;
        sets.extend(named);
        bytes += source.bytes.len() as u64;
        if sources.len() == MAX_FILES || bytes > MAX_TOTAL_BYTES {
            return Err(format!("error opening config file: more than {MAX_FILES} files or {MAX_TOTAL_BYTES} bytes\n"));
        }
        sources.push(source);
    }
    sources.retain(|source| sets.iter().all(|set| set.path != source.name));
    let options = CompileOptions { set_files: Arc::new(SetFiles::from(sets)), ..options };
    let rules = CheckedRules::compile(sources, &options, Diagnostics::default(), &TableFiles::default());
    rules.diagnostics.warnings().iter().for_each(|warning| print_error(escape_unprintable(&warning.to_string())));
    match rules.diagnostics.errors() {
        [] => *page += "all rate limit configs ok\n",
        errors => {
            let line =
                |error| format!("error loading rate limit configs: {}\n", escape_unprintable(&format!("{error}")));
            return Err(errors.iter().map(line).collect());
        }
    }
    Ok(())
}

/// Lists a directory, sorted, without versions of a ConfigMap and JSON Schemas.
fn list_directory_entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let is_version = entry.file_name().as_encoded_bytes().starts_with(b"..") && entry.path().is_dir();
        let is_schema = entry.file_name().as_encoded_bytes().ends_with(b".schema.json");
        if !is_version && !is_schema {
            entries.push(entry.path());
        }
    }
    entries.sort();
    Ok(entries)
}

/// Reads a rule file with any name, and the sets that it names; a directory is an error.
fn read_rule_file(path: &Path) -> Result<(RuleText, Vec<SetFileText>), String> {
    let failed = |what: &dyn std::fmt::Display| {
        format!("error opening config file: {}\n", escape_unprintable(&what.to_string()))
    };
    if path.is_dir() {
        return Err(failed(&format_args!("{}: is a directory", path.display())));
    }
    check_link_of_command(path).map_err(|error| failed(&error))?;
    let read = read_rule_files(&RuleFilesLocation::Paths(vec![path.to_owned()]))
        .map_err(|refused| failed(&refused.errors[0]))?;
    let file = read.files.into_iter().next().ok_or_else(|| failed(&path.display()))?;
    let text = RuleText { name: file.name, bytes: file.bytes, documents: DocumentSelection::FirstOnly };
    Ok((text, read.sets))
}

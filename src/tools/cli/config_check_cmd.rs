//! `config_check_cmd`: the rule checker of envoyproxy/ratelimit, with its flags and output.
//!
//! It checks the files directly in a directory, with any extension, in the order of their names, and reads the first
//! document of each, and the sets and tables that they name. Unlike the original it reports all problems, and skips
//! versions of a Kubernetes ConfigMap (`..data`). Warnings go to standard error.
//!
//! Decides: flags of `config_check_cmd`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{fs, io};

use clap::Parser;

use super::print::{CommandOutcome, fail_if_unwritten, print_error, print_to_stdout};
use super::rule_files::{self, CheckedRules, TableFiles};
use crate::base::go_syntax::parse_bool;
use crate::base::text::escape_unprintable;
use crate::rules::compile::options::CompileOptions;
use crate::rules::diagnostic::Diagnostics;
use crate::rules::plan_table::is_table_file;
use crate::rules::yaml::DocumentSelection;

/// Arguments, with one dash or two.
#[derive(Debug, Parser)]
#[command(name = "config_check_cmd")]
struct Args {
    /// Path to directory containing rate limit configs
    #[arg(long = "config_dir", default_value = "", overrides_with = "config_dir")]
    config_dir: PathBuf,
    /// Whether to merge configurations, referencing the same domain
    #[arg(long = "merge_domain_configs", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value = "false", overrides_with = "merge_domain_configs", action = clap::ArgAction::Set,
        value_parser = |text: &str| parse_bool(text).ok_or("not a bool; give true or false"))]
    merge_domain_configs: bool,
    /// Without effect, as in the original
    #[arg(hide = true, trailing_var_arg = true)]
    ignored: Vec<OsString>,
}

/// Checks the files of a directory.
pub(super) fn run(arguments: &[OsString]) -> CommandOutcome {
    let args = match Args::try_parse_from(arguments.iter().cloned().map(add_second_dash)) {
        Ok(args) => args,
        Err(error) => {
            // `--help` is an error for clap too; it chooses the right stream.
            let _ = error.print();
            return if error.use_stderr() { CommandOutcome::UsageError } else { CommandOutcome::Success };
        }
    };
    for argument in &args.ignored {
        print_error(format_args!("{}: this argument has no effect", escape_unprintable(&argument.to_string_lossy())));
    }
    let directory = escape_unprintable(&args.config_dir.to_string_lossy());
    let mut page = format!("checking rate limit configs...\nloading config directory: {directory}\n");
    let outcome = match list_rule_files(&args.config_dir) {
        Ok(paths) => check_files(&paths, args.merge_domain_configs, &mut page),
        Err(error) => {
            page += &format!("error opening directory {directory}: {}\n", escape_unprintable(&error.to_string()));
            CommandOutcome::Failure
        }
    };
    fail_if_unwritten(print_to_stdout(page), outcome)
}

/// Turns `-name` into `--name`; Go's flags may have one dash or two.
fn add_second_dash(argument: OsString) -> OsString {
    match argument.to_str() {
        Some(text) if text.starts_with('-') && !text.starts_with("--") && text.len() > 2 => format!("-{text}").into(),
        _ => argument,
    }
}

/// Checks the files as one set, and writes a line to `page` for each file and each error.
fn check_files(paths: &[PathBuf], merge_domains: bool, page: &mut String) -> CommandOutcome {
    for path in paths {
        *page += &format!("opening config file: {}\n", escape_unprintable(&path.to_string_lossy()));
    }
    let options = CompileOptions { merge_domains, ..CompileOptions::from(&rule_files::read_settings_or_defaults()) };
    let (none, documents) = (Diagnostics::default(), DocumentSelection::FirstOnly);
    let rules = CheckedRules::read_and_compile_documents(paths, documents, &options, none, &TableFiles::default());
    rules.diagnostics.warnings().iter().for_each(|warning| print_error(escape_unprintable(&warning.to_string())));
    for error in rules.diagnostics.errors() {
        *page += &format!("error loading rate limit configs: {}\n", escape_unprintable(&error.to_string()));
    }
    if rules.diagnostics.has_errors() {
        return CommandOutcome::Failure;
    }
    *page += "all rate limit configs ok\n";
    CommandOutcome::Success
}

/// Lists a directory, sorted, without tables, JSON Schemas and versions of a ConfigMap.
///
/// # Errors
/// The directory cannot be read, or has a directory that is no such version.
fn list_rule_files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let (name, path) = (entry.file_name(), entry.path());
        if path.is_dir() {
            if !name.as_encoded_bytes().starts_with(b"..") {
                return Err(io::Error::other(format!("{}: is a directory", path.display())));
            }
        } else if !name.as_encoded_bytes().ends_with(b".schema.json") && !is_table_file(&path) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

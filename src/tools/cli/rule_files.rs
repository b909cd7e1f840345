//! Rule files of the commands, read as `serve` reads them, with all problems.
//!
//! A file that cannot be read is a problem at line 1, and hides no problem of another file. The settings that change
//! the meaning of rules come from the environment. Invalid ones are replaced by their defaults, so that rules can be
//! checked on any machine.
//!
//! Decides: how a command reads rule files.

use std::collections::HashMap;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::print::print_error;
use crate::base::clock::Time;
use crate::base::text::escape_unprintable;
use crate::rules::compile::options::CompileOptions;
use crate::rules::compile::value_set_files::SetFiles;
use crate::rules::compile::{CompiledRules, RuleText, compile_texts};
use crate::rules::defaults_file;
use crate::rules::diagnostic::{Diagnostic, Diagnostics, Severity};
use crate::rules::files::read::{check_link_of_command, read_rule_files};
use crate::rules::files::walk::find_files_of_runtime_only;
use crate::rules::files::{MAX_FILE_BYTES, PathError, PathProblem, RuleFile, RuleFileSetFailure, RuleFilesLocation};
use crate::rules::rule::Domain;
use crate::rules::rule::set::RuleSet;
use crate::rules::table_loader::{RuleFilePaths, TableLoader};
use crate::rules::yaml::{DocumentSelection, text};
use crate::settings::Settings;

/// Rule files with their problems.
pub(super) struct CheckedRules {
    /// The readable files.
    pub(super) sources: Vec<RuleText>,
    /// Files with sets that they name.
    set_files: Arc<SetFiles>,
    /// All problems and warnings.
    pub(super) diagnostics: Diagnostics,
    /// The rules with their tables, if there are no errors.
    pub(super) set: Option<RuleSet>,
}

/// Files of tables by their names, in place of those that rules name.
pub(super) type TableFiles = HashMap<String, PathBuf>;

/// Maximum number of files that one warning names.
const MAX_FILES_SHOWN: usize = 5;

/// Path that means standard input.
const STDIN_PATH: &str = "-";

impl CheckedRules {
    /// Reads and compiles files, directories and `-`.
    ///
    /// `diagnostics` are problems found before.
    pub(super) fn read_and_compile(paths: &[PathBuf], options: &CompileOptions, diagnostics: Diagnostics) -> Self {
        Self::read_and_compile_documents(paths, DocumentSelection::All, options, diagnostics, &TableFiles::default())
    }

    /// Reads and compiles as [`CheckedRules::read_and_compile`], these documents of each file, with other files of
    /// tables.
    pub(super) fn read_and_compile_documents(
        paths: &[PathBuf],
        documents: DocumentSelection,
        options: &CompileOptions,
        mut diagnostics: Diagnostics,
        tables: &TableFiles,
    ) -> Self {
        let (mut sources, mut sets) = (Vec::new(), Vec::new());
        let (stdin, mut paths): (Vec<_>, Vec<_>) =
            paths.iter().cloned().partition(|path| path == Path::new(STDIN_PATH));
        paths.retain(|path| match check_link_of_command(path) {
            Ok(()) => true,
            Err(error) => {
                diagnostics.push(error.to_diagnostic(Severity::Error));
                false
            }
        });
        if !paths.is_empty() {
            let read = read_rule_files(&RuleFilesLocation::Paths(paths)).unwrap_or_else(
                |RuleFileSetFailure { errors, readable }| {
                    errors.iter().for_each(|error| diagnostics.push(error.to_diagnostic(Severity::Error)));
                    readable
                },
            );
            read.warnings.iter().for_each(|warning| diagnostics.push(warning.to_diagnostic(Severity::Warning)));
            let source = |file: RuleFile| RuleText { name: file.name, bytes: file.bytes, documents };
            sources.extend(read.files.into_iter().map(source));
            sets = read.sets;
        }
        if !stdin.is_empty() {
            let mut text = Vec::new();
            // One more byte makes the compiler report that it is too large.
            if let Err(error) = io::stdin().lock().take(MAX_FILE_BYTES + 1).read_to_end(&mut text) {
                let problem = PathProblem::Unreadable(error.to_string());
                diagnostics.push(PathError { path: STDIN_PATH.into(), problem }.to_diagnostic(Severity::Error));
            }
            sources.push(RuleText { name: STDIN_PATH.into(), bytes: text, documents });
        }
        let options = CompileOptions { set_files: Arc::new(SetFiles::from(sets)), ..options.clone() };
        Self::compile(sources, &options, diagnostics, tables)
    }

    /// Compiles files, and reads their tables; `diagnostics` are problems of others. `tables` replace files that the
    /// rules name.
    fn compile(
        sources: Vec<RuleText>,
        options: &CompileOptions,
        mut diagnostics: Diagnostics,
        tables: &TableFiles,
    ) -> Self {
        let set = match compile_texts(&sources, options) {
            Ok(CompiledRules { domains, warnings }) => {
                diagnostics.append(warnings);
                let set = build_rule_set(domains, tables, &mut diagnostics);
                set.filter(|_| !diagnostics.has_errors())
            }
            Err(problems) => {
                diagnostics.append(problems);
                None
            }
        };
        Self { sources, set_files: Arc::clone(&options.set_files), diagnostics, set }
    }

    /// Warns about files of given directories that `serve` reads under `RUNTIME_ROOT`, and not with `--config`.
    pub(super) fn warn_about_files_left_out(&mut self, paths: &[PathBuf], ignore_dotfiles: bool) {
        for directory in paths.iter().filter(|path| path.is_dir()) {
            let mut left_out = find_files_of_runtime_only(directory, ignore_dotfiles);
            let is_set = |path: &Path| self.set_files.texts.iter().any(|set| Path::new(&*set.path) == path);
            left_out.retain(|path| !paths.contains(path) && !is_set(path));
            let names = left_out.iter().map(|path| path.strip_prefix(directory).unwrap_or(path).to_string_lossy());
            let shown: Vec<_> = names.take(MAX_FILES_SHOWN).collect();
            let more = left_out.len() - shown.len();
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            if shown.is_empty() {
                continue;
            }
            self.diagnostics.push(Diagnostic {
                severity: Severity::Warning,
                file: directory.to_string_lossy().into(),
                line: 0,
                column: 0,
                path: String::new(),
                message: format!(
                    "{}{more}: not read, because hidden or without .yaml, .yml or .json",
                    shown.join(", ")
                ),
                hint: Some("but `serve` with RUNTIME_ROOT reads every file: give them as PATH too".to_owned()),
            });
        }
    }

    /// Formats every problem with its line, errors first.
    pub(super) fn format_problems(&self) -> String {
        let texts: Vec<(&Arc<str>, _)> =
            self.sources.iter().filter_map(|file| Some((&file.name, text::decode_text(&file.bytes).ok()?))).collect();
        let set_text = |name: &Arc<str>| {
            let set = self.set_files.texts.iter().find(|text| text.path == *name)?;
            text::decode_text(set.contents.as_ref().ok()?).ok()
        };
        let mut page = String::new();
        for diagnostic in self.diagnostics.errors().iter().chain(self.diagnostics.warnings()) {
            page += &escape_unprintable(&diagnostic.to_string());
            page.push('\n');
            if let Some((_, text)) = texts.iter().find(|(name, _)| **name == diagnostic.file) {
                page += &diagnostic.format_excerpt(text);
            } else if let Some(text) = set_text(&diagnostic.file) {
                page += &diagnostic.format_excerpt(&text);
            }
        }
        let (errors, warnings) = self.diagnostics.dropped_counts();
        for (more, what) in [(errors, "errors"), (warnings, "warnings")] {
            if more > 0 {
                page += &format!("and {more} more {what}\n");
            }
        }
        page
    }
}

/// Builds the rule set with its tables, or reports the problems of tables.
fn build_rule_set(domains: Vec<Domain>, tables: &TableFiles, found: &mut Diagnostics) -> Option<RuleSet> {
    let mut loader = TableLoader::with_replacement_files(tables.clone());
    match loader.prepare_tables(&domains, &RuleFilePaths::default(), Time::from_micros(0)) {
        Ok(prepared) => {
            let mut set = RuleSet::new(domains);
            loader.attach_to_rules(prepared, &mut set);
            Some(set)
        }
        Err(problems) => {
            found.append(problems);
            None
        }
    }
}

/// Options by the settings, with the defaults of a file, or of `TOLLKEEPER_RULE_DEFAULTS`. Problems of the file go to
/// `found`.
pub(super) fn build_compile_options(
    settings: &Settings,
    defaults: Option<&Path>,
    found: &mut Diagnostics,
) -> CompileOptions {
    let mut options = CompileOptions::from(settings);
    if let Some(path) = defaults.or(settings.rules.defaults.as_deref()) {
        match defaults_file::read_defaults(path) {
            Ok((defaults, warnings)) => {
                options.rule_defaults = Arc::new(defaults);
                found.append(warnings);
            }
            Err(problems) => found.append(problems),
        }
    }
    options
}

/// Returns the settings of the environment, with the defaults and a message for what `serve` would refuse.
pub(super) fn read_settings_or_defaults() -> Settings {
    let (settings, problems) = Settings::from_env_ignoring_invalid(std::env::vars_os());
    if !problems.is_empty() {
        let names: Vec<&str> = problems.iter().map(|problem| problem.name.as_str()).collect();
        let names = escape_unprintable(&names.join(", "));
        print_error(format_args!("invalid settings have their defaults here: {names} (see `tollkeeper check --env`)"));
    }
    settings
}

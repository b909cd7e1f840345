//! Rule sources: deliver sets of rules, behind one interface.
//!
//! A [`RuleSource`] delivers [`RuleUpdate`]s and receives the result of each. The reloader and the pages that show
//! rules do not know the kind of source. A new kind is a variant of [`SourceConfig`], [`RuleSource`] and
//! [`SourceReloader`]; every `match` here is exhaustive.
//!
//! Decides: a control plane's empty answer; what SIGHUP does with rules over xDS; which lines `/problems` shows.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use super::compile::options::CompileOptions;
use super::compile::value_set_files::SetFiles;
use super::compile::{CompiledRules, RuleText, compile_texts};
use super::diagnostic::{Diagnostic, Diagnostics};
use super::files::read::read_rule_files;
use super::files::watch::{FileSetReceiver, FileWatcher, WatchReloader, WatchTiming};
use super::files::{RuleFile, RuleFileSetResult, RuleFilesLocation};
use super::live::{NumberedLine, RuleProblem};
use super::table_loader::RuleFilePaths;
use super::xds::client::ReceivedResources;
use super::xds::refused_domains::{
    AcceptedResources, CompiledResources, RefusedDomain, UpdateResult, compile_each_domain, compile_resources,
};
use super::xds::resource::RuleResource;
use super::xds::status::StreamStatus;
use super::xds::{XdsConfig, XdsSource};
use super::yaml::DocumentSelection;

/// Configuration of a rule source.
#[derive(Clone, Debug)]
pub enum SourceConfig {
    /// Rule files on disk.
    Files(FilesConfig),
    /// A control plane.
    Xds(Box<XdsConfig>),
}

/// Configuration of rule files as a source.
#[derive(Clone, Debug)]
pub struct FilesConfig {
    /// Location of the files.
    pub location: RuleFilesLocation,
    /// Documents of a file that count.
    pub documents: DocumentSelection,
    /// Intervals at which changes are noticed.
    pub timing: WatchTiming,
}

/// A complete set of rules as a source delivers it, not compiled yet.
#[derive(Clone, Debug)]
pub struct RuleSnapshot {
    /// Rules, in the order in which they are compiled.
    pub rules: SourceRules,
    /// Version that the source gives the set; `None` if it has no versions.
    pub version: Option<Arc<str>>,
    /// Paths of the files, by the names of their texts.
    pub paths: Arc<RuleFilePaths>,
    /// Warnings of the source, not of the compiler.
    pub warnings: Vec<String>,
    /// Resources that domains keep if theirs cannot be used.
    pub accepted: Arc<AcceptedResources>,
    /// Rejects a set without texts while rules are loaded, instead of lifting every limit.
    pub keep_rules_if_empty: bool,
}

/// Rules as a source has them.
#[derive(Clone, Debug)]
pub enum SourceRules {
    /// Texts.
    Texts(RuleTexts),
    /// Resources of a control plane.
    Resources(Vec<RuleResource>),
}

/// Texts of rules, with the files that they name.
#[derive(Clone, Debug, Default)]
pub struct RuleTexts {
    /// Texts.
    pub texts: Vec<RuleText>,
    /// Files with sets.
    pub sets: Arc<SetFiles>,
}

/// Texts that name no files.
impl From<Vec<RuleText>> for RuleTexts {
    fn from(texts: Vec<RuleText>) -> Self {
        Self { texts, sets: Arc::default() }
    }
}

impl RuleTexts {
    fn compile(&self, options: &CompileOptions) -> Result<CompiledRules, Diagnostics> {
        compile_texts(&self.texts, &CompileOptions { set_files: Arc::clone(&self.sets), ..options.clone() })
    }
}

impl SourceRules {
    /// Returns `true` if there are none.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Texts(texts) => texts.texts.is_empty(),
            Self::Resources(resources) => resources.is_empty(),
        }
    }

    /// Names of the texts or resources.
    pub fn source_names(&self) -> Vec<Arc<str>> {
        match self {
            Self::Texts(of_files) => of_files.texts.iter().map(|text| Arc::clone(&text.name)).collect(),
            Self::Resources(resources) => resources.iter().map(|resource| Arc::clone(&resource.name)).collect(),
        }
    }

    /// Copies the texts; none of a control plane.
    pub fn copy_texts(&self) -> Arc<[RuleText]> {
        match self {
            Self::Texts(of_files) => of_files.texts.clone().into(),
            Self::Resources(_) => Arc::default(),
        }
    }

    /// Compiles them together.
    ///
    /// # Errors
    /// Every problem, if at least one is an error.
    pub fn compile(self, options: &CompileOptions) -> Result<CompiledRules, Diagnostics> {
        match self {
            Self::Texts(of_files) => of_files.compile(options),
            Self::Resources(resources) => compile_resources(&resources, options),
        }
    }
}

/// Maximum number of errors that are kept with the lines of their files.
const MAX_KEPT_ERRORS: usize = 20;
/// Number of lines before and after the line of an error.
const CONTEXT_LINES: u32 = 2;
/// Maximum number of characters of such a line.
const MAX_LINE_CHARS: usize = 200;

/// Errors of rules that did not compile.
#[derive(Clone, Debug)]
pub struct CompileFailure {
    /// All of them.
    pub diagnostics: Diagnostics,
    /// The first of them, with the lines of their files.
    pub problems: Vec<RuleProblem>,
}

/// Rules that compiled, and what of their source is in force.
#[derive(Debug)]
pub struct CompiledSnapshot {
    /// The rules.
    pub compiled: CompiledRules,
    /// Texts or resources that they were compiled from.
    pub rules: SourceRules,
    /// Domains of a control plane, or rule files, that were refused.
    pub refused: Vec<RefusedDomain>,
    /// Their errors, with the lines of their files.
    pub problems: Vec<RuleProblem>,
}

impl RuleSnapshot {
    /// Compiles the rules. Domains of a control plane are refused one by one; an error in a rule file refuses all
    /// rules, and comes with the lines around it. A file whose expressions take too much work is refused alone: its
    /// text of `previous` stays, if there is one.
    ///
    /// # Errors
    /// Every problem, if at least one is an error that refuses all rules.
    pub fn compile_with_error_lines(
        self,
        previous: &[RuleText],
        options: &CompileOptions,
    ) -> Result<CompiledSnapshot, CompileFailure> {
        match self.rules {
            SourceRules::Texts(of_files) => compile_without_costly_files(of_files, previous, options),
            SourceRules::Resources(resources) => match compile_each_domain(resources, &self.accepted, options) {
                Ok(CompiledResources { compiled, resources, refused }) => Ok(CompiledSnapshot {
                    compiled,
                    rules: SourceRules::Resources(resources),
                    refused,
                    problems: Vec::new(),
                }),
                Err(diagnostics) => Err(CompileFailure { diagnostics, problems: Vec::new() }),
            },
        }
    }
}

/// Maximum number of times that rules are compiled again without files that take too much work.
const MAX_COMPILE_REPEATS: usize = 20;

/// Compiles texts; leaves out files whose expressions take too much work, or keeps their text of `previous`.
fn compile_without_costly_files(
    mut of_files: RuleTexts,
    previous: &[RuleText],
    options: &CompileOptions,
) -> Result<CompiledSnapshot, CompileFailure> {
    let mut refused: Vec<RefusedDomain> = Vec::new();
    let mut problems = Vec::new();
    let mut repeats = 0;
    loop {
        let diagnostics = match of_files.compile(options) {
            Ok(compiled) => {
                return Ok(CompiledSnapshot { compiled, rules: SourceRules::Texts(of_files), refused, problems });
            }
            Err(diagnostics) => diagnostics,
        };
        let errors = diagnostics.errors().iter().take(MAX_KEPT_ERRORS);
        let of_errors: Vec<_> = errors.map(|error| build_rule_problem(error, &of_files)).collect();
        if repeats == MAX_COMPILE_REPEATS || !diagnostics.are_only_about_costly_files() {
            return Err(CompileFailure { diagnostics, problems: of_errors });
        }
        repeats += 1;
        let is_refused = |refused: &[RefusedDomain], name: &str| refused.iter().any(|file| file.domain == *name);
        let costly: HashSet<Arc<str>> = diagnostics.errors().iter().map(|error| Arc::clone(&error.file)).collect();
        of_files.texts.retain_mut(|text| {
            let last = previous.iter().find(|last| last.name == text.name && !is_refused(&refused, &text.name));
            match (costly.contains(&text.name), last) {
                (false, _) => true,
                (true, Some(last)) => {
                    *text = last.clone();
                    true
                }
                (true, None) => false,
            }
        });
        for error in diagnostics.errors() {
            if !is_refused(&refused, &error.file) {
                let domain = error.file.to_string();
                refused.push(RefusedDomain { domain, error: error.to_string(), kept_version: None });
            }
        }
        problems.extend(of_errors);
    }
}

fn build_rule_problem(error: &Diagnostic, of_files: &RuleTexts) -> RuleProblem {
    let text = of_files.texts.iter().find(|text| text.name == error.file).map(|text| &*text.bytes);
    let set = || of_files.sets.texts.iter().find(|text| text.path == error.file)?.contents.as_deref().ok();
    let bytes = text.or_else(set).unwrap_or_default();
    let numbered = (1..).zip(bytes.split(|byte| *byte == b'\n'));
    let around = error.line.saturating_sub(CONTEXT_LINES)..=error.line.saturating_add(CONTEXT_LINES);
    let line = |(number, line): (u32, &[u8])| {
        // Four bytes are the longest character.
        let start = &line[..line.len().min(4 * MAX_LINE_CHARS)];
        NumberedLine { number, text: String::from_utf8_lossy(start).trim_end().chars().take(MAX_LINE_CHARS).collect() }
    };
    let is_shown = |(number, _): &(u32, &[u8])| error.line > 0 && around.contains(number);
    RuleProblem {
        message: error.to_string(),
        file: Arc::clone(&error.file),
        line: error.line,
        lines: numbered.filter(is_shown).map(line).collect(),
    }
}

/// A new set of rules, or the reasons why the source cannot deliver it.
pub type RuleUpdate = Result<RuleSnapshot, Vec<String>>;

/// A running source of rules.
#[derive(Debug)]
pub enum RuleSource {
    /// Rule files on disk.
    Files(FileSource),
    /// A control plane.
    Xds(XdsSource),
}

impl RuleSource {
    /// Starts a source. Returns it with the update that is available at once, if any.
    ///
    /// Blocks on disk I/O. A control plane requires a runtime.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(config: SourceConfig) -> io::Result<(Self, Option<RuleUpdate>)> {
        match config {
            SourceConfig::Files(files) => {
                let (source, first) = FileSource::start(files)?;
                Ok((Self::Files(source), Some(first)))
            }
            SourceConfig::Xds(xds) => {
                let (source, first) = XdsSource::start(*xds);
                let first = first.map(|received| build_xds_update(received, source.accepted_resources()));
                Ok((Self::Xds(source), first))
            }
        }
    }

    /// Returns the next update; `None` after the source has ended. Cancel safe.
    pub async fn next_update(&mut self) -> Option<RuleUpdate> {
        match self {
            Self::Files(files) => files.next_update().await,
            Self::Xds(xds) => {
                let received = xds.next_resources().await?;
                Some(build_xds_update(received, xds.accepted_resources()))
            }
        }
    }

    /// Reports the result of the last update to the source: applied, or rejected with this message.
    pub fn report_result(&mut self, result: &UpdateResult) {
        match self {
            // Files need no answer.
            Self::Files(_) => {}
            Self::Xds(xds) => xds.report_result(result),
        }
    }

    /// State of the stream from a control plane; `None` for other sources.
    pub const fn xds_stream_status(&self) -> Option<&Arc<StreamStatus>> {
        match self {
            Self::Files(_) => None,
            Self::Xds(xds) => Some(xds.status()),
        }
    }

    /// Handle that requests the rules again.
    pub fn reloader(&self) -> SourceReloader {
        match self {
            Self::Files(files) => SourceReloader::Files(files.watcher.reloader()),
            Self::Xds(_) => SourceReloader::Pushed,
        }
    }
}

/// Requests the rules again from a source, as SIGHUP does.
#[derive(Clone, Debug)]
pub enum SourceReloader {
    /// Reads the files.
    Files(WatchReloader),
    /// Does nothing, because the source sends each change by itself.
    Pushed,
}

impl SourceReloader {
    /// Requests an update even if nothing changed.
    pub fn request_reload(&self) {
        match self {
            Self::Files(files) => files.reload(),
            Self::Pushed => tracing::warn!("rules come over xDS: there is nothing to reload"),
        }
    }
}

/// Rule files as a source.
#[derive(Debug)]
pub struct FileSource {
    watcher: FileWatcher,
    changes: FileSetReceiver,
    documents: DocumentSelection,
}

impl FileSource {
    fn start(config: FilesConfig) -> io::Result<(Self, RuleUpdate)> {
        let FilesConfig { location, documents, timing } = config;
        let first = read_rule_files(&location);
        let (watcher, changes) = FileWatcher::start(location, timing, &first)?;
        Ok((Self { watcher, changes, documents }, build_files_update(first, documents)))
    }

    async fn next_update(&mut self) -> Option<RuleUpdate> {
        let result = self.changes.next_set().await?;
        Some(build_files_update(result, self.documents))
    }
}

/// Builds the update of rule files that were read.
fn build_files_update(result: RuleFileSetResult, documents: DocumentSelection) -> RuleUpdate {
    let text = |file: RuleFile| RuleText { name: file.name, bytes: file.bytes, documents };
    let set = result.map_err(|failure| failure.errors.iter().map(ToString::to_string).collect::<Vec<_>>())?;
    let paths = set.files.iter().map(|file| (Arc::clone(&file.name), file.path.clone())).collect();
    Ok(RuleSnapshot {
        paths: Arc::new(paths),
        rules: SourceRules::Texts(RuleTexts {
            texts: set.files.into_iter().map(text).collect(),
            sets: Arc::new(SetFiles::from(set.sets)),
        }),
        version: None,
        warnings: set.warnings.iter().map(ToString::to_string).collect(),
        accepted: Arc::default(),
        // A missing volume is more likely than the wish to lift every limit.
        keep_rules_if_empty: true,
    })
}

/// Builds the update of resources that a control plane sent; domains that cannot be used keep those of `accepted`.
fn build_xds_update(received: ReceivedResources, accepted: &Arc<AcceptedResources>) -> RuleUpdate {
    let ReceivedResources { version, resources } = received;
    let resources = resources?;
    let mut warnings = Vec::new();
    if resources.is_empty() {
        warnings.push(format!("version '{version}' of the control plane has no rules: no request is limited"));
    }
    Ok(RuleSnapshot {
        rules: SourceRules::Resources(resources),
        version: Some(version),
        paths: Arc::default(),
        warnings,
        accepted: Arc::clone(accepted),
        // A control plane says so when the last policy is deleted.
        keep_rules_if_empty: false,
    })
}

//! `check`: finds problems of rule files and of the environment.
//!
//! Writes text for people or JSON for CI, with the same contents. The field names of the JSON are an interface.

use std::path::PathBuf;

use clap::ValueEnum;
use serde::Serialize;

use super::env_report::{self, VariableReport};
use super::outcome::CommandOutcome;
use super::print::{counted, finish, print};
use super::rule_files::{self, CheckedRules, settings_or_defaults};
use crate::base::text::to_pretty_json;
use crate::rules::compile::options::CompileOptions;
use crate::rules::diagnostic::{Diagnostic, Diagnostics};

/// Arguments of `check`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Rule files, directories of rule files (.yaml, .yml and .json, recursively), or - for standard input
    #[arg(value_name = "PATH", required_unless_present_any = ["env", "defaults"])]
    paths: Vec<PathBuf>,
    /// Check the environment variables, as a start would
    #[arg(long)]
    env: bool,
    /// Merge files with the same domain, as MERGE_DOMAIN_CONFIG=true does
    #[arg(long)]
    merge_domains: bool,
    /// File of defaults to check, and to apply to the rules, as TOLLKEEPER_RULE_DEFAULTS does
    #[arg(long, value_name = "FILE")]
    defaults: Option<PathBuf>,
    /// Format of the output
    #[arg(long, value_enum, default_value_t)]
    format: OutputFormat,
}

pub(super) const HELP: &str = "\
All files together must load as one set: a domain must not repeat, unless domains are merged. These environment variables \
change the meaning of rules, as for `serve`: BACKEND_TYPE, MERGE_DOMAIN_CONFIG, TOLLKEEPER_LOG_MAX, TOLLKEEPER_MAX_REPLICAS, \
TOLLKEEPER_ON_STORE_ERROR, TOLLKEEPER_RULE_DEFAULTS and USE_CALENDAR_MONTH_RATE_LIMIT. A file that cannot be read is reported at 1:1.

--format json writes one object. `ok` is true if the exit code is 0. With PATH it has `files`, `errors` and `warnings` \
(numbers) and `diagnostics` (severity, file, line, column, path, message, optional hint; the first 1000 of each \
severity). With --env it has `environment` (name, value, disposition, prevents_start, optional why and fix); a \
disposition is honoured, differs, no_effect, unknown, unusable (a file without which a part of the service does \
not work) or invalid.

--env runs the validation of the start: run it where the service will run, with its files. Ports that another process \
uses are found only by the start.

Examples:
  tollkeeper check config/example.yaml
  tollkeeper check --merge-domains shop.yaml more/
  tollkeeper check --defaults defaults.yaml
  kubectl get configmap tollkeeper-rules -o jsonpath='{.data.rules\\.yaml}' \\
    | tollkeeper check -
  env -i PATH=\"$PATH\" $(cat deploy.env) tollkeeper check --env --format json

Exit codes: 0 no errors (there may be warnings), 1 errors, or a variable that prevents the start or names an unusable \
file, 2 invalid usage.";

/// Format of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum OutputFormat {
    /// Text for people
    #[default]
    Text,
    /// JSON for programs
    Json,
}

/// The JSON output.
#[derive(Serialize)]
struct CheckReport<'r> {
    ok: bool,
    #[serde(flatten)]
    rules: Option<RuleFilesReport<'r>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    environment: Option<&'r [VariableReport]>,
}

#[derive(Serialize)]
struct RuleFilesReport<'r> {
    files: usize,
    errors: u64,
    warnings: u64,
    diagnostics: Vec<&'r Diagnostic>,
}

/// Checks the files and the environment.
pub(super) fn run(args: &Args) -> CommandOutcome {
    let environment = args.env.then(env_report::variables);
    let rules = (!args.paths.is_empty() || args.defaults.is_some()).then(|| {
        let mut found = Diagnostics::default();
        let options = rule_files::options(&settings_or_defaults(), args.defaults.as_deref(), &mut found);
        let merge_domains = options.merge_domains || args.merge_domains;
        CheckedRules::read(&args.paths, &CompileOptions { merge_domains, ..options }, found)
    });
    let ok = rules.as_ref().is_none_or(|rules| !rules.diagnostics.has_errors())
        && environment.as_ref().is_none_or(|variables| variables.iter().all(VariableReport::is_usable));
    let page = match args.format {
        OutputFormat::Text => text(rules.as_ref(), environment.as_deref()),
        OutputFormat::Json => json(ok, rules.as_ref(), environment.as_deref()),
    };
    finish(print(page), if ok { CommandOutcome::Success } else { CommandOutcome::Failure })
}

fn text(rules: Option<&CheckedRules>, variables: Option<&[VariableReport]>) -> String {
    let mut page = String::new();
    if let Some(rules) = rules {
        page += &rules.text();
        let (errors, warnings) = (rules.diagnostics.error_count(), rules.diagnostics.warning_count());
        let files = counted(rules.sources.len() as u64, "file");
        page += &format!("{files}, {}, {}\n", counted(errors, "error"), counted(warnings, "warning"));
    }
    if let Some(variables) = variables {
        page += if page.is_empty() { "" } else { "\n" };
        page += &env_report::text(variables);
    }
    page
}

fn json(ok: bool, rules: Option<&CheckedRules>, environment: Option<&[VariableReport]>) -> String {
    let rules = rules.map(|CheckedRules { sources, diagnostics, .. }| RuleFilesReport {
        files: sources.len(),
        errors: diagnostics.error_count(),
        warnings: diagnostics.warning_count(),
        diagnostics: diagnostics.errors().iter().chain(diagnostics.warnings()).collect(),
    });
    let report = to_pretty_json(&CheckReport { ok, rules, environment });
    report.expect("it holds only texts, numbers and flags") + "\n"
}

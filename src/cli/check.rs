//! `check`: what is wrong with rule files, and what a start would make of the environment.
//!
//! As text for people and as JSON for CI; both say the same. The field names of the JSON are an interface.

use std::path::PathBuf;

use serde::Serialize;

use super::environment::{self, VariableReport};
use super::print::{count, ended, print};
use super::rules::{Rules, settings};
use super::{Format, Outcome};
use crate::config::compile::options::CompileOptions;
use crate::config::diagnostic::Diagnostic;

/// What `check` takes.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Rule files, directories of them (.yaml, .yml and .json files, searched recursively), or - for standard input
    #[arg(value_name = "PATH", required_unless_present = "env")]
    paths: Vec<PathBuf>,
    /// Say of each variable of the environment what a start would make of it
    #[arg(long)]
    env: bool,
    /// Let files add to each other's domains; MERGE_DOMAIN_CONFIG=true does the same
    #[arg(long)]
    merge_domains: bool,
    /// How to write what was found
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(super) const HELP: &str = "\
All files together must load as one set: a domain may not repeat, unless domains are merged. What a file means depends \
on variables that are read as `serve` reads them: MERGE_DOMAIN_CONFIG, TOLLKEEPER_LOG_MAX, TOLLKEEPER_MAX_REPLICAS, \
TOLLKEEPER_ON_STORE_ERROR and USE_CALENDAR_MONTH_RATE_LIMIT. A file that can not be read is reported at 1:1.

With --format json one object is written. `ok` says whether the exit code is 0. With PATH it has `files`, `errors` and \
`warnings` (numbers) and `diagnostics` (severity, file, line, column, path, message, perhaps hint; the first 1000 of each \
severity). With --env it has `environment` (name, value, disposition, prevents_start, perhaps why and fix), where a disposition is \
honoured, differs, no_effect, unknown, refused or invalid.

Examples:
  tollkeeper check config/example.yaml
  tollkeeper check --merge-domains shop.yaml more/
  kubectl get configmap rules -o jsonpath={.data.rules} | tollkeeper check -
  env -i $(cat deploy.env) tollkeeper check --env --format json

Exit codes: 0 no errors (warnings are none), 1 errors, or a variable that stops the start, 2 bad usage.";

/// The JSON form.
#[derive(Serialize)]
struct Report<'r> {
    ok: bool,
    #[serde(flatten)]
    rules: Option<RulesReport<'r>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    environment: Option<&'r [VariableReport]>,
}

#[derive(Serialize)]
struct RulesReport<'r> {
    files: usize,
    errors: u64,
    warnings: u64,
    diagnostics: Vec<&'r Diagnostic>,
}

/// Checks.
pub(super) fn run(args: &Args) -> Outcome {
    let environment = args.env.then(environment::variables);
    let rules = (!args.paths.is_empty()).then(|| {
        let options = CompileOptions::from(&settings());
        Rules::read(
            &args.paths,
            &CompileOptions { merge_domains: options.merge_domains || args.merge_domains, ..options },
        )
    });
    let ok = rules.as_ref().is_none_or(|rules| !rules.found.has_errors())
        && environment.as_ref().is_none_or(|variables| variables.iter().all(|variable| !variable.prevents_start));
    let page = match args.format {
        Format::Text => text(rules.as_ref(), environment.as_deref()),
        Format::Json => json(ok, rules.as_ref(), environment.as_deref()),
    };
    ended(print(page), if ok { Outcome::Done } else { Outcome::Failed })
}

fn text(rules: Option<&Rules>, variables: Option<&[VariableReport]>) -> String {
    let mut page = String::new();
    if let Some(rules) = rules {
        page += &rules.text();
        let (errors, warnings) = (rules.found.error_count(), rules.found.warning_count());
        let files = count(rules.sources.len() as u64, "file");
        page += &format!("{files}, {}, {}\n", count(errors, "error"), count(warnings, "warning"));
    }
    if let Some(variables) = variables {
        page += if page.is_empty() { "" } else { "\n" };
        page += &environment::text(variables);
    }
    page
}

fn json(ok: bool, rules: Option<&Rules>, environment: Option<&[VariableReport]>) -> String {
    let rules = rules.map(|Rules { sources, found, .. }| RulesReport {
        files: sources.len(),
        errors: found.error_count(),
        warnings: found.warning_count(),
        diagnostics: found.errors().iter().chain(found.warnings()).collect(),
    });
    let report = serde_json::to_string_pretty(&Report { ok, rules, environment });
    report.expect("it holds only texts, numbers and flags") + "\n"
}

//! `check`: finds problems of rule files, of the environment and of Envoy bootstraps.
//!
//! Writes text for people or JSON for CI, with the same contents. The field names of the JSON are an interface. The
//! variables of the environment and what they name are validated by the code that starts the server; the report has
//! each variable that is set, and its effect on a start.
//!
//! Decides: when `check` fails (with warnings only: 0, `is_ok`); hints of `check --quota`.
//! Decides: which settings `check --env` tries.

mod envoy_files;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use clap::ValueEnum;
use serde::Serialize;

use self::envoy_files::{CheckedEnvoyFiles, EnvoyFiles};
use super::print::{CommandOutcome, fail_if_unwritten, format_with_noun, print_to_stdout, usage_error};
use super::rule_files::{self, CheckedRules, read_settings_or_defaults};
use crate::base::text::{escape_unprintable, to_pretty_json};
use crate::base::text_table::{NumberAlignment, format_table};
use crate::rules::compile::options::CompileOptions;
use crate::rules::diagnostic::{Diagnostic, Diagnostics};
use crate::rules::files::RuleFilesLocation;
use crate::rules::rule::Rule;
use crate::rules::rule::set::RuleSet;
use crate::serve::server::startup;
use crate::settings::metrics::PROMETHEUS_MAPPER_YAML;
use crate::settings::report::{self, Disposition, ReportedVariable};
use crate::settings::setting::AnySetting as _;
use crate::settings::store::StoreSettings;
use crate::settings::{Settings, environment};
use crate::store::hold_refusal_in_store;
use crate::telemetry::metrics::mapper::Mapper;

/// Arguments of `check`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Rule files, directories of rule files (.yaml, .yml and .json, recursively), or - for standard input
    #[arg(value_name = "PATH", required_unless_present_any = ["env", "defaults", "envoy", "addr", "log"])]
    paths: Vec<PathBuf>,
    /// Envoy bootstrap, /config_dump, EnvoyFilter or EnvoyPatchPolicy (YAML or JSON), or - for standard input, to check why a limit will not work; repeatable
    #[arg(long, value_name = "FILE")]
    envoy: Vec<PathBuf>,
    /// Removed
    #[arg(long, hide = true)]
    addr: Option<OsString>,
    /// Removed
    #[arg(long, hide = true)]
    log: Vec<OsString>,
    /// Check the environment variables, as a start would
    #[arg(long)]
    env: bool,
    /// Merge files with the same domain, as MERGE_DOMAIN_CONFIG=true does
    #[arg(long)]
    merge_domains: bool,
    /// File of defaults to check, and to apply to the rules, as TOLLKEEPER_RULE_DEFAULTS does
    #[arg(long, value_name = "FILE")]
    defaults: Option<PathBuf>,
    /// Name the limits that cannot be divided among proxies over RLQS, or are too small for that; the default with
    /// TOLLKEEPER_RLQS=true
    #[arg(long)]
    quota: bool,
    /// Format of the output
    #[arg(long, value_enum, default_value_t)]
    format: OutputFormat,
    /// Write one JSON object, as --format json does
    #[arg(long, conflicts_with = "format")]
    json: bool,
}

pub(super) const HELP: &str = "\
All files together must load as one set: a domain must not repeat, unless domains are merged. These environment variables \
change the meaning of rules, as for `serve`: BACKEND_TYPE, MERGE_DOMAIN_CONFIG, TOLLKEEPER_LOG_MAX, TOLLKEEPER_MAX_REPLICAS, \
TOLLKEEPER_ON_STORE_ERROR, TOLLKEEPER_RULE_DEFAULTS and USE_CALENDAR_MONTH_RATE_LIMIT. A file that cannot be read is reported at 1:1.

--json writes one object. `ok` is true if the exit code is 0. With PATH it has `files`, `errors` and `warnings` \
(numbers) and `diagnostics` (severity, file, line, column, path, message, optional hint; the first 1000 of each \
severity), and `acknowledged` if there are acknowledged warnings. With --quota `quota_hints` (file, line, rule, message). With --env it has `environment` (name, value, disposition, prevents_start, optional why and fix); a \
disposition is honoured, differs, no_effect, unknown, unusable (a file without which a part of the service does \
not work) or invalid.

--envoy reads a bootstrap of Envoy, the page /config_dump of a running one, an EnvoyFilter or an EnvoyPatchPolicy, and says why a limit will not work there: a \
filter that is never asked, a value that is not there yet, a value that the client spells, slots that leak, a cluster whose calls fail. Anything else is refused. \
Each finding has its place, the consequence and the fix. With PATH it also says which domains and descriptors of Envoy match no \
rule, whatever their values. A comment `# check: ok, REASON` at the line, or alone above it, acknowledges warnings and hints, and in rule \
files warnings. The JSON has `envoy` (files, errors, warnings, hints, acknowledged, and findings with severity, check, file, line, column, path, message, \
consequence and fix). The checks are listed in docs/reference/envoy-check.md.

--env runs the validation of the start: run it where the service will run, with its files. Ports that another process \
uses are found only by the start.

Examples:
  tollkeeper check config/example.yaml
  tollkeeper check --merge-domains shop.yaml more/
  tollkeeper check --defaults defaults.yaml
  tollkeeper check --envoy envoy/gateway.yaml envoy/gateway.rules.yaml
  tollkeeper check --quota shop.yaml
  kubectl get configmap tollkeeper-rules -o jsonpath='{.data.rules\\.yaml}' \\
    | tollkeeper check -
  env -i PATH=\"$PATH\" $(cat deploy.env) tollkeeper check --env --json

Exit codes: 0 no errors (there may be warnings and hints), 1 errors, or a variable that prevents the start or names an unusable \
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
    envoy: Option<&'r CheckedEnvoyFiles>,
    #[serde(skip_serializing_if = "Option::is_none")]
    environment: Option<&'r [VariableReport]>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Everything that was checked.
struct CheckedInputs {
    rules: Option<CheckedRules>,
    quota_hints: Vec<DivisionHint>,
    envoy: Option<CheckedEnvoyFiles>,
    environment: Option<Vec<VariableReport>>,
}

impl CheckedInputs {
    /// Returns `true` if nothing that was checked has an error.
    fn is_ok(&self) -> bool {
        self.rules.as_ref().is_none_or(|rules| !rules.diagnostics.has_errors())
            && self.envoy.as_ref().is_none_or(|envoy| !envoy.has_errors())
            && self.environment.as_ref().is_none_or(|variables| variables.iter().all(VariableReport::is_usable))
    }
}

#[derive(Serialize)]
struct RuleFilesReport<'r> {
    files: usize,
    errors: u64,
    warnings: u64,
    #[serde(skip_serializing_if = "is_zero")]
    acknowledged: u64,
    diagnostics: Vec<&'r Diagnostic>,
    #[serde(skip_serializing_if = "<[DivisionHint]>::is_empty")]
    quota_hints: &'r [DivisionHint],
}

/// Instead of the check of traffic that earlier versions had.
const TRAFFIC_CHECKS_REMOVED: &str = "--addr and --log were removed: tollkeeper top --rules --addr HOST:PORT --finding \
slots_not_released, or --finding reservations_not_settled, names the limits of a running server that Envoy never releases";

/// Checks the files and the environment.
pub(super) fn run(args: &Args) -> CommandOutcome {
    if args.addr.is_some() || !args.log.is_empty() {
        return usage_error(TRAFFIC_CHECKS_REMOVED);
    }
    let environment = args.env.then(report_environment);
    let settings = (!args.paths.is_empty() || args.defaults.is_some()).then(read_settings_or_defaults);
    let envoy = (!args.envoy.is_empty()).then(|| EnvoyFiles::read(&args.envoy));
    let rules = settings.as_ref().map(|settings| {
        let mut found = Diagnostics::default();
        let mut options = rule_files::build_compile_options(settings, args.defaults.as_deref(), &mut found);
        options.caller_timeouts_us =
            Arc::new(envoy.as_ref().map(EnvoyFiles::collect_shortest_timeouts).unwrap_or_default());
        let merge_domains = options.merge_domains || args.merge_domains;
        let options = CompileOptions { merge_domains, ..options };
        let mut rules = CheckedRules::read_and_compile(&args.paths, &options, found);
        rules.warn_about_files_left_out(&args.paths, settings.rules.ignore_dot_files);
        rules
    });
    let for_quotas = rules.as_ref().zip(settings.as_ref());
    let for_quotas = for_quotas.filter(|(_, settings)| args.quota || settings.grpc.max_quota_buckets.is_some());
    let quota_hints =
        for_quotas.map(|(rules, settings)| find_division_hints(rules, &settings.store)).unwrap_or_default();
    let envoy = envoy.map(|files| files.check(rules.as_ref().and_then(|rules| rules.set.as_ref())));
    let checked = CheckedInputs { rules, quota_hints, envoy, environment };
    let page = match args.format {
        OutputFormat::Text if !args.json => format_text(&checked),
        OutputFormat::Text | OutputFormat::Json => format_json(&checked),
    };
    let outcome = if checked.is_ok() { CommandOutcome::Success } else { CommandOutcome::Failure };
    fail_if_unwritten(print_to_stdout(page), outcome)
}

/// Smallest limit per period that is divided without a hint: fewer hits are too few for a handful of proxies.
const MIN_HITS_DIVIDED_WITHOUT_HINT: u64 = 10;

/// A limit that RLQS does not divide well, and why.
#[derive(Serialize)]
struct DivisionHint {
    file: String,
    line: u32,
    rule: String,
    message: String,
}

/// Finds the limits that cannot be divided among proxies, and those that are too small.
fn find_division_hints(rules: &CheckedRules, store: &StoreSettings) -> Vec<DivisionHint> {
    let limits = rules.set.iter().flat_map(RuleSet::rules).flat_map(|compiled| {
        let deciding = compiled.limits.iter().filter(|limit| !limit.shadow && !limit.candidate);
        deciding.map(move |limit| (&compiled.rule, &limit.limit))
    });
    let hint = |rule: &Rule, message: String| DivisionHint {
        file: rule.location.file.to_string(),
        line: rule.location.line,
        rule: rule.path.clone(),
        message,
    };
    limits
        .filter_map(|(rule, limit)| match (hold_refusal_in_store(limit, store), limit.requests_per_unit()) {
            (Some(reason), _) => Some(hint(rule, format!("RLQS assigns nothing to its buckets: {reason}"))),
            (None, hits @ 1..MIN_HITS_DIVIDED_WITHOUT_HINT) => Some(hint(
                rule,
                format!("{hits} hits per period are few to divide among proxies over RLQS: ask over RLS instead"),
            )),
            (None, _) => None,
        })
        .collect()
}

fn format_text(CheckedInputs { rules, quota_hints, envoy, environment }: &CheckedInputs) -> String {
    let mut page = String::new();
    if let Some(rules) = rules {
        page += &rules.format_problems();
        for DivisionHint { file, line, rule, message } in quota_hints {
            let (file, rule) = (escape_unprintable(file), escape_unprintable(rule));
            page += &format!("{file}:{line}: hint: {rule}: {message}\n");
        }
        let (errors, warnings) = (rules.diagnostics.error_count(), rules.diagnostics.warning_count());
        let files = format_with_noun(rules.sources.len() as u64, "file");
        page += &format!("{files}, {}, {}", format_with_noun(errors, "error"), format_with_noun(warnings, "warning"));
        page += &match rules.diagnostics.acknowledged_count() {
            0 => "\n".to_owned(),
            acknowledged => format!(", {acknowledged} acknowledged\n"),
        };
    }
    if let Some(envoy) = envoy {
        page += if page.is_empty() { "" } else { "\n" };
        page += &envoy.format_text();
    }
    if let Some(variables) = environment {
        page += if page.is_empty() { "" } else { "\n" };
        page += &format_variables(variables);
    }
    page
}

/// Formats all findings as one JSON object: of the rules, of Envoy's files and of the environment.
fn format_json(checked: &CheckedInputs) -> String {
    let rules = checked.rules.as_ref().map(|CheckedRules { sources, diagnostics, .. }| RuleFilesReport {
        files: sources.len(),
        errors: diagnostics.error_count(),
        warnings: diagnostics.warning_count(),
        acknowledged: diagnostics.acknowledged_count(),
        diagnostics: diagnostics.errors().iter().chain(diagnostics.warnings()).collect(),
        quota_hints: &checked.quota_hints,
    });
    let (envoy, environment) = (checked.envoy.as_ref(), checked.environment.as_deref());
    let report = to_pretty_json(&CheckReport { ok: checked.is_ok(), rules, envoy, environment });
    report.expect("it holds only texts, numbers and flags") + "\n"
}

/// A variable of the environment, as `check --env --json` writes it.
#[derive(Serialize)]
struct VariableReport {
    name: String,
    /// Value for display; missing for an unknown name.
    value: Option<String>,
    disposition: &'static str,
    /// `true` if a start fails because of the variable.
    prevents_start: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

/// Names of the dispositions: in JSON, and the word for each in text.
const DISPOSITION_WORDS: [(&str, &str); 6] = [
    ("honoured", "honoured"),
    ("differs", "different"),
    ("no_effect", "without effect"),
    ("unknown", "unknown"),
    ("unusable", "unusable"),
    ("invalid", "invalid"),
];

/// Reports the variables of this process that concern a start, and others by which it fails.
fn report_environment() -> Vec<VariableReport> {
    let mut variables: Vec<_> =
        report::report_variables(std::env::vars_os()).into_iter().map(VariableReport::from).collect();
    // Without valid settings nothing else can be validated; the start fails by them.
    if let Ok((settings, _)) = Settings::from_env(std::env::vars_os()) {
        if metrics_mapper_has_regexes(&settings) {
            find_or_add_variable(&mut variables, PROMETHEUS_MAPPER_YAML.name())
                .set_disposition("differs", "its regular expressions match whole names".to_owned());
        }
        if let Some(empty) = find_empty_location_variable(&settings, &variables) {
            let why = "empty, so no file is read and every request passes, as in envoyproxy/ratelimit";
            let row = find_or_add_variable(&mut variables, empty);
            row.set_disposition("unusable", why.to_owned());
            row.fix = Some("name the directory of the rules, or give serve --config".to_owned());
        }
        for unusable in startup::find_file_warnings(&settings) {
            find_or_add_variable(&mut variables, unusable.setting).set_disposition("unusable", unusable.what);
        }
        for problem in startup::find_startup_problems(&settings) {
            let row = find_or_add_variable(&mut variables, problem.setting());
            row.set_disposition("invalid", problem.description());
            row.prevents_start = true;
        }
    }
    variables
}

/// Finds the empty variable because of which no rule file is read, if variables say where the rules are.
fn find_empty_location_variable(settings: &Settings, variables: &[VariableReport]) -> Option<&'static str> {
    let says_where = variables.iter().any(|variable| variable.name.starts_with("RUNTIME_"));
    let location = RuleFilesLocation::from(&settings.rules);
    location.find_empty_env_variable().filter(|_| says_where && settings.xds.is_none())
}

/// Returns `true` if the mapping file of metrics is valid and has regular expressions.
fn metrics_mapper_has_regexes(settings: &Settings) -> bool {
    let path = settings.metrics.prometheus.as_ref().and_then(|prometheus| prometheus.mapper.as_deref());
    path.is_some_and(|path| Mapper::read_file(path).is_ok_and(|mapper| mapper.has_regexes()))
}

/// Finds the row of a variable, or adds one if the variable is not set.
fn find_or_add_variable<'v>(variables: &'v mut Vec<VariableReport>, name: &str) -> &'v mut VariableReport {
    let index = variables.iter().position(|variable| variable.name == name).unwrap_or_else(|| {
        let value = environment::find_setting(name).map(|setting| setting.default_text().to_owned());
        let (name, disposition) = (name.to_owned(), "honoured");
        variables.push(VariableReport { name, value, disposition, prevents_start: false, why: None, fix: None });
        variables.len() - 1
    });
    &mut variables[index]
}

impl VariableReport {
    fn set_disposition(&mut self, disposition: &'static str, why: String) {
        (self.disposition, self.why, self.fix) = (disposition, Some(why), None);
    }

    /// Returns `true` if the service works with the variable.
    fn is_usable(&self) -> bool {
        !self.prevents_start && self.disposition != "unusable"
    }
}

impl From<ReportedVariable> for VariableReport {
    fn from(reported: ReportedVariable) -> Self {
        let prevents_start = reported.disposition.prevents_start();
        let (disposition, why, fix) = match reported.disposition {
            Disposition::Honoured => ("honoured", None, None),
            Disposition::Differs { why } => ("differs", Some(why), None),
            Disposition::NoEffect { why } => ("no_effect", Some(why), None),
            Disposition::Invalid { what, fix } => ("invalid", Some(what), Some(fix)),
            Disposition::Unknown { fix } => ("unknown", Some("not known".to_owned()), fix),
        };
        Self { name: reported.name, value: reported.value, disposition, prevents_start, why, fix }
    }
}

/// Formats a table of the variables, and the number of each disposition.
fn format_variables(variables: &[VariableReport]) -> String {
    if variables.is_empty() {
        return "no variable for tollkeeper is set, so the defaults apply\n".to_owned();
    }
    let rows = variables.iter().map(|variable| {
        let known = DISPOSITION_WORDS.iter().find(|(name, _)| *name == variable.disposition);
        let disposition = known.map_or(variable.disposition, |(_, word)| word);
        let note = [variable.why.as_deref(), variable.fix.as_deref()].into_iter().flatten().collect::<Vec<_>>();
        [&variable.name, variable.value.as_deref().unwrap_or_default(), disposition, &note.join("; ")]
            .map(escape_unprintable)
    });
    let page = format_table(&["VARIABLE", "VALUE", "DISPOSITION", "NOTE"], rows, NumberAlignment::Left);
    let sums: Vec<String> = DISPOSITION_WORDS
        .iter()
        .map(|(name, word)| (variables.iter().filter(|variable| variable.disposition == *name).count(), word))
        .filter(|(sum, _)| *sum > 0)
        .map(|(sum, word)| format!("{sum} {word}"))
        .collect();
    let any = |condition: fn(&VariableReport) -> bool| variables.iter().any(condition);
    let stop = match (any(|variable| variable.prevents_start), any(|variable| !variable.is_usable())) {
        (true, _) => "; a start would fail",
        (false, true) => "; it would start, but not all of it would work",
        (false, false) => "",
    };
    format!("{page}{}: {}{stop}\n", format_with_noun(variables.len() as u64, "variable"), sums.join(", "))
}

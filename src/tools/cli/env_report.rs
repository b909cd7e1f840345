//! The report of `check --env`: each variable that is set, and its effect on a start.
//!
//! The settings and what they name are validated by the code that starts the server.

use serde::Serialize;

use super::print::counted;
use crate::base::table::{NumberAlignment, format_table};
use crate::serve::report::text::plain;
use crate::serve::server::startup;
use crate::settings::metrics::PROMETHEUS_MAPPER_YAML;
use crate::settings::report::{self, Disposition, ReportedVariable};
use crate::settings::setting::AnySetting as _;
use crate::settings::{Settings, groups};
use crate::telemetry::metrics::mapper::Mapper;

/// A variable of the environment, as `check --env --json` writes it.
#[derive(Serialize)]
pub(super) struct VariableReport {
    name: String,
    /// Value for display; missing for an unknown name.
    value: Option<String>,
    disposition: &'static str,
    /// `true` if a start fails because of the variable.
    pub(super) prevents_start: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

/// Words for dispositions, in JSON and in text.
const DISPOSITIONS: [(&str, &str); 6] = [
    ("honoured", "honoured"),
    ("differs", "different"),
    ("no_effect", "without effect"),
    ("unknown", "unknown"),
    ("unusable", "unusable"),
    ("invalid", "invalid"),
];

/// Reports the variables of this process that concern a start, and others by which it fails.
pub(super) fn variables() -> Vec<VariableReport> {
    let mut variables: Vec<_> = report::report(std::env::vars_os()).into_iter().map(variable).collect();
    // Without valid settings nothing else can be validated; the start fails by them.
    if let Ok((settings, _)) = Settings::from_env(std::env::vars_os()) {
        if has_regexes(&settings) {
            row(&mut variables, PROMETHEUS_MAPPER_YAML.name())
                .set("differs", "its regular expressions match whole names".to_owned());
        }
        for unusable in startup::find_unusable_files(&settings) {
            row(&mut variables, unusable.setting).set("unusable", unusable.what);
        }
        for problem in startup::find_problems(&settings) {
            let row = row(&mut variables, problem.setting());
            row.set("invalid", problem.what());
            row.prevents_start = true;
        }
    }
    variables
}

/// Returns `true` if the mapping file of metrics is valid and has regular expressions.
fn has_regexes(settings: &Settings) -> bool {
    let path = settings.metrics.prometheus.as_ref().and_then(|prometheus| prometheus.mapper.as_deref());
    path.is_some_and(|path| Mapper::read(path).is_ok_and(|mapper| mapper.has_regexes()))
}

/// The row of a variable; a new one if the variable is not set.
fn row<'v>(variables: &'v mut Vec<VariableReport>, name: &str) -> &'v mut VariableReport {
    let index = variables.iter().position(|variable| variable.name == name).unwrap_or_else(|| {
        let value = groups::find(name).map(|setting| setting.default_text());
        let (name, disposition) = (name.to_owned(), "honoured");
        variables.push(VariableReport { name, value, disposition, prevents_start: false, why: None, fix: None });
        variables.len() - 1
    });
    &mut variables[index]
}

impl VariableReport {
    fn set(&mut self, disposition: &'static str, why: String) {
        (self.disposition, self.why, self.fix) = (disposition, Some(why), None);
    }

    /// Returns `true` if the service works with the variable.
    pub(super) fn is_usable(&self) -> bool {
        !self.prevents_start && self.disposition != "unusable"
    }
}

fn variable(reported: ReportedVariable) -> VariableReport {
    let prevents_start = reported.disposition.prevents_start();
    let (disposition, why, fix) = match reported.disposition {
        Disposition::Honoured => ("honoured", None, None),
        Disposition::Differs { why } => ("differs", Some(why.to_owned()), None),
        Disposition::NoEffect { why } => ("no_effect", Some(why.to_owned()), None),
        Disposition::Invalid { what, fix } => ("invalid", Some(what), Some(fix)),
        Disposition::Unknown { nearest } => {
            ("unknown", Some("not known".to_owned()), nearest.map(|name| format!("did you mean {name}?")))
        }
    };
    VariableReport { name: reported.name, value: reported.value, disposition, prevents_start, why, fix }
}

/// Formats a table of the variables, and the number of each disposition.
pub(super) fn text(variables: &[VariableReport]) -> String {
    if variables.is_empty() {
        return "no variable for tollkeeper is set, so the defaults apply\n".to_owned();
    }
    let rows = variables.iter().map(|variable| {
        let known = DISPOSITIONS.iter().find(|(name, _)| *name == variable.disposition);
        let disposition = known.map_or(variable.disposition, |(_, word)| word);
        let note = [variable.why.as_deref(), variable.fix.as_deref()].into_iter().flatten().collect::<Vec<_>>();
        [&variable.name, variable.value.as_deref().unwrap_or_default(), disposition, &note.join("; ")].map(plain)
    });
    let page = format_table(&["VARIABLE", "VALUE", "DISPOSITION", "NOTE"], rows, NumberAlignment::Left);
    let sums: Vec<String> = DISPOSITIONS
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
    format!("{page}{}: {}{stop}\n", counted(variables.len() as u64, "variable"), sums.join(", "))
}

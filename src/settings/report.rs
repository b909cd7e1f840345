//! The effect of an environment, variable by variable: the data behind `check --env` and `/settings`.
//!
//! The report says what a start with the same environment would do, and comes from the same code: `values` decides.
//!
//! Decides: which of several dispositions of a variable `check --env` and `/settings` show.

use std::ffi::OsString;

use serde::Serialize;

use super::environment::Environment;
use super::setting::Support;
use super::values::{EnvironmentFindings, Variable, VariableEffect};
use super::{Settings, environment};

/// A variable of the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedVariable {
    /// Name of the variable.
    pub name: String,
    /// Its value, masked if it may hold a secret; `None` for an unknown variable.
    pub value: Option<String>,
    /// Its effect on a start.
    pub disposition: Disposition,
}

/// Effect of a variable on a start, with all other variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// The variable is honoured.
    Honoured,
    /// The variable is honoured, and with this value differs from envoyproxy/ratelimit.
    Differs {
        /// The difference.
        why: String,
    },
    /// The variable has no effect, and no verdict depends on it.
    NoEffect {
        /// The reason.
        why: String,
    },
    /// The variable prevents the start: its value is invalid.
    Invalid {
        /// Description of the mistake.
        what: String,
        /// Correction.
        fix: String,
    },
    /// The variable looks meant for this program and is not known.
    Unknown {
        /// What to do: a similar name, or what to use instead.
        fix: Option<String>,
    },
}

impl Disposition {
    /// Returns `true` if a start with this variable fails.
    pub const fn prevents_start(&self) -> bool {
        matches!(self, Self::Invalid { .. })
    }
}

/// A setting with its value in a running process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EffectiveSetting {
    /// Name of the variable; of a family, of the one that is set.
    pub name: String,
    /// Its value or default, masked if it may hold a secret.
    pub value: String,
    /// `true` if the environment sets it.
    pub set: bool,
    /// Reason why it has no effect, if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ignored: Option<String>,
}

/// Lists all settings of a process with this environment, in the order of the documentation.
pub fn list_effective_settings(vars: impl Iterator<Item = (OsString, OsString)>) -> Vec<EffectiveSetting> {
    let variables = report_variables(vars);
    let mut all = Vec::with_capacity(variables.len());
    for setting in environment::all_settings() {
        let is_own = |name: &str| environment::find_setting(name).is_some_and(|other| other.name() == setting.name());
        let set: Vec<_> = variables.iter().filter(|variable| is_own(&variable.name)).collect();
        if set.is_empty() && !setting.info().is_variable_family() {
            let (name, value) = (setting.name().to_owned(), setting.default_text().to_owned());
            all.push(EffectiveSetting { name, value, set: false, ignored: None });
        }
        all.extend(set.into_iter().map(|variable| EffectiveSetting {
            name: variable.name.clone(),
            value: variable.value.clone().unwrap_or_default(),
            set: true,
            ignored: if let Disposition::NoEffect { why } = &variable.disposition { Some(why.clone()) } else { None },
        }));
    }
    all
}

/// Reports each known variable that is set, in the order of the documentation, then each unknown one that looks meant
/// for this program: one that begins as known ones do, of another rate limiter, or a misspelled name. A variable that is
/// missing and prevents the start is among the known ones.
pub fn report_variables(vars: impl Iterator<Item = (OsString, OsString)>) -> Vec<ReportedVariable> {
    let environment = Environment::select_variables(vars);
    let (_, findings) = Settings::read(&environment);
    let known = environment.known.iter().map(|variable| ReportedVariable {
        name: variable.name.clone(),
        value: Some(variable.format_for_message()),
        disposition: decide_disposition(variable, &findings),
    });
    let is_set = |name: &str| environment.known.iter().any(|variable| variable.name == name);
    let missing = findings.problems.iter().filter(|problem| !is_set(&problem.name)).map(|problem| ReportedVariable {
        name: problem.name.clone(),
        value: Some(problem.shown.clone()),
        disposition: Disposition::Invalid { what: problem.what.clone(), fix: problem.fix.clone() },
    });
    let mut known: Vec<_> = known.chain(missing).collect();
    known.sort_by_key(|variable| environment::setting_position(&variable.name));
    let unknown = environment.unknown.iter().map(|variable| ReportedVariable {
        name: variable.name.clone(),
        value: None,
        disposition: Disposition::Unknown { fix: variable.suggestion() },
    });
    known.extend(unknown);
    known
}

fn decide_disposition(variable: &Variable, findings: &EnvironmentFindings) -> Disposition {
    match variable.own_effect() {
        VariableEffect::None(why) => return Disposition::NoEffect { why: why.to_owned() },
        VariableEffect::Invalid(invalid) => return Disposition::Invalid { what: invalid.what, fix: invalid.fix },
        VariableEffect::Used => {}
    }
    // A valid value may still be wrong, or without effect, because of other variables.
    if let Some(problem) = findings.problems.iter().find(|problem| problem.name == variable.name) {
        return Disposition::Invalid { what: problem.what.clone(), fix: problem.fix.clone() };
    }
    if let Some(ignored) = findings.ignored.iter().find(|ignored| ignored.name == variable.name) {
        return Disposition::NoEffect { why: ignored.what.clone() };
    }
    if let Some(difference) = findings.differences.iter().find(|difference| difference.name == variable.name) {
        return Disposition::Differs { why: difference.what.clone() };
    }
    match variable.setting.info().support {
        Support::Differs { by_value: true, how } if variable.differs_from_default() => {
            Disposition::Differs { why: how.to_owned() }
        }
        _ => Disposition::Honoured,
    }
}

//! The values of an environment, read by typed setting.
//!
//! A setting that is not set reads as its default, and so does one with an invalid value, so that everything else can
//! still be checked. Whatever is found out on the way is collected here: problems, notices and ignored variables.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use super::environment::{Environment, VariableEffect};
use super::pem::PemFile;
use super::problem::{Notice, SettingProblem};
use super::setting::{AnySetting, Setting};
use super::table;
use super::value::SettingValue;

/// Valid values by setting, and the findings about them.
#[derive(Default)]
pub(crate) struct Values {
    /// The valid values, by the full name of their variable.
    given: HashMap<String, GivenValue>,
    problems: Vec<SettingProblem>,
    ignored: Vec<SettingRemark>,
    differences: Vec<SettingRemark>,
    notices: Vec<Notice>,
}

struct GivenValue {
    text: String,
    /// The text for messages.
    shown: String,
}

/// A variable that is set, and its effect because of other variables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SettingRemark {
    pub(crate) name: &'static str,
    pub(crate) why: &'static str,
}

/// A value with the setting that it comes from.
pub(crate) struct SourcedValue<T> {
    pub(crate) name: &'static str,
    pub(crate) value: T,
}

/// Findings about an environment.
pub(crate) struct EnvironmentFindings {
    /// Problems in the order of the documentation; the settings are unusable if there is one.
    pub(crate) problems: Vec<SettingProblem>,
    /// Variables without effect because of others.
    pub(crate) ignored: Vec<SettingRemark>,
    /// Variables that, with these values, differ from envoyproxy/ratelimit.
    pub(crate) differences: Vec<SettingRemark>,
    /// Notices in the order of the documentation, then those about unknown variables.
    pub(crate) notices: Vec<Notice>,
}

impl Values {
    /// Collects the values that are used, and the problems and notices about single variables.
    pub(crate) fn new(environment: &Environment) -> Self {
        let mut values = Self::default();
        for variable in &environment.known {
            let (name, shown) = (variable.name.clone(), variable.shown());
            match variable.effect() {
                VariableEffect::Used => {
                    let text = variable.text.clone().unwrap_or_default();
                    values.given.insert(name, GivenValue { text, shown });
                }
                VariableEffect::Invalid(invalid) => {
                    values.problems.push(SettingProblem { name, shown, what: invalid.what, fix: invalid.fix });
                }
                // One notice for a family, however many of its variables are set.
                VariableEffect::None(why) => values.notices.push(Notice::no_effect(variable.setting.name(), why)),
            }
        }
        values
    }

    /// Returns the value of `setting`.
    pub(crate) fn get<T: SettingValue>(&self, setting: &Setting<T>) -> T {
        let given = self.given.get(setting.name()).and_then(|given| setting.parse(&given.text).ok());
        given.unwrap_or_else(|| setting.default())
    }

    /// Returns the value of a duration of which 0 means "never" or "no limit".
    pub(crate) fn nonzero(&self, setting: &Setting<Duration>) -> Option<Duration> {
        Some(self.get(setting)).filter(|duration| !duration.is_zero())
    }

    /// Returns the text of the variable `name` of a family.
    pub(crate) fn of_family(&self, name: &str) -> Option<&str> {
        self.given.get(name).map(|given| given.text.as_str())
    }

    /// Returns the first value that is set of two settings for the same thing.
    pub(crate) fn first_set<T: SettingValue>(&self, settings: [&Setting<Option<T>>; 2]) -> Option<SourcedValue<T>> {
        settings.into_iter().find_map(|setting| {
            let value = self.get(setting)?;
            Some(SourcedValue { name: setting.name(), value })
        })
    }

    /// Returns the file that `setting` names.
    pub(crate) fn file(&self, setting: &Setting<Option<PathBuf>>) -> Option<PemFile> {
        self.get(setting).map(|path| PemFile { setting: setting.name(), path })
    }

    /// Returns `true` if the variable is set and its value is used.
    pub(crate) fn is_set(&self, setting: &dyn AnySetting) -> bool {
        self.given.contains_key(setting.name())
    }

    /// Returns `true` if a problem with the variable was found.
    pub(crate) fn is_invalid(&self, setting: &dyn AnySetting) -> bool {
        self.problems.iter().any(|problem| problem.name == setting.name())
    }

    /// Adds a problem with a setting.
    pub(crate) fn problem(&mut self, setting: &dyn AnySetting, what: impl Into<String>, fix: impl Into<String>) {
        self.problem_with(setting.name(), what, fix);
    }

    /// Adds a problem with the variable `name`.
    pub(crate) fn problem_with(&mut self, name: &str, what: impl Into<String>, fix: impl Into<String>) {
        let shown = self.given.get(name).map(|given| given.shown.clone()).unwrap_or_default();
        self.problems.push(SettingProblem { name: name.to_owned(), shown, what: what.into(), fix: fix.into() });
    }

    /// Adds a notice about a setting.
    pub(crate) fn notice(&mut self, setting: &dyn AnySetting, what: impl Into<String>) {
        self.notices.push(Notice { name: setting.name().to_owned(), what: what.into() });
    }

    /// Records that a setting is ignored because of others, even if it is set to its default.
    pub(crate) fn ignore(&mut self, setting: &dyn AnySetting, why: &'static str) {
        self.ignored.push(SettingRemark { name: setting.name(), why });
    }

    /// Records that a setting, with the values of all, differs from envoyproxy/ratelimit.
    pub(crate) fn difference(&mut self, setting: &dyn AnySetting, why: &'static str) {
        self.differences.push(SettingRemark { name: setting.name(), why });
    }

    /// Records that a setting is ignored because of others, if it is set to anything but its default.
    pub(crate) fn ignore_if_changed(&mut self, setting: &dyn AnySetting, why: &'static str) {
        if self.given.get(setting.name()).is_some_and(|given| setting.overrides_default(&given.text)) {
            self.ignore(setting, why);
        }
    }

    /// Returns the findings in the order of the documentation.
    pub(crate) fn into_findings(self, environment: &Environment) -> EnvironmentFindings {
        let Self { mut problems, ignored, differences, mut notices, .. } = self;
        problems.sort_by_key(|problem| table::position(&problem.name));
        problems.dedup();
        notices.extend(ignored.iter().map(|ignored| Notice::no_effect(ignored.name, ignored.why)));
        notices.sort_by_key(|notice| table::position(&notice.name));
        notices.dedup();
        for variable in &environment.unknown {
            let guess = variable.nearest.map(|name| format!("; did you mean {name}?")).unwrap_or_default();
            let what = format!("is not known and has no effect{guess}");
            notices.push(Notice { name: variable.name.clone(), what });
        }
        EnvironmentFindings { problems, ignored, differences, notices }
    }
}

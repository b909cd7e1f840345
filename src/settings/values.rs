//! The values of an environment, read by typed setting.
//!
//! A setting that is not set reads as its default, and so does one with an invalid value, so that everything else can
//! still be checked. Whatever is found out on the way is collected here: problems, notices and ignored variables.
//! `Variable::own_effect` is the one place that decides about a single variable, for the start and for `check --env`
//! alike. A variable that is set and that no reader has read has no effect, so readers read only what they use.
//!
//! Decides: what a wrong variable does, or one that is not UTF-8 (`own_effect`).
//! Decides: which variables have no effect because of others (`ignore_unread_variables`), also in `check --env`.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::pem::{ClientCertificate, PemFile};
use super::problem::{InvalidSetting, Notice, SettingProblem};
use super::setting::{AnySetting, Setting, Support};
use super::value::SettingValue;

/// A known variable that is set.
#[derive(Clone)]
pub(crate) struct Variable {
    /// Its full name, which may be one of a family.
    pub(crate) name: String,
    /// The setting that it belongs to.
    pub(crate) setting: &'static dyn AnySetting,
    /// Its text; `None` if it is not UTF-8.
    pub(crate) text: Option<String>,
}

/// The effect of a variable, taken by itself.
pub(crate) enum VariableEffect {
    /// Its value is used.
    Used,
    /// Its value is valid and has no effect.
    None(&'static str),
    /// Its value is invalid, which prevents the start.
    Invalid(InvalidSetting),
}

impl Variable {
    /// Returns the effect of this variable by itself, regardless of the others.
    pub(crate) fn own_effect(&self) -> VariableEffect {
        let Some(text) = &self.text else {
            return VariableEffect::Invalid(InvalidSetting::new("not UTF-8", "give plain text"));
        };
        match (self.setting.validate(text), self.setting.info().support) {
            (Err(invalid), _) => VariableEffect::Invalid(invalid),
            (Ok(()), Support::NoEffect { why }) if self.setting.overrides_default(text) => VariableEffect::None(why),
            (Ok(()), _) => VariableEffect::Used,
        }
    }

    /// Returns `true` if its value is valid and not the default.
    pub(crate) fn differs_from_default(&self) -> bool {
        self.text.as_ref().is_some_and(|text| self.setting.overrides_default(text))
    }

    /// Formats its value for messages; `?` stands for one that is not UTF-8.
    pub(crate) fn format_for_message(&self) -> String {
        self.text.as_deref().map_or_else(|| "?".to_owned(), |text| self.setting.format_for_message(text))
    }
}

/// Valid values by setting, and the findings about them.
#[derive(Default)]
pub(crate) struct Values {
    /// The valid values, by the full name of their variable.
    given: BTreeMap<String, GivenValue>,
    findings: EnvironmentFindings,
}

struct GivenValue {
    setting: &'static dyn AnySetting,
    text: String,
    /// The text for messages.
    shown: String,
    /// `true` if a reader asked for the value.
    is_read: Cell<bool>,
}

impl GivenValue {
    /// Returns the text for a reader.
    fn read(&self) -> &str {
        self.is_read.set(true);
        &self.text
    }
}

/// A value with the setting that it comes from.
pub(crate) struct SourcedValue<T> {
    pub(crate) name: &'static str,
    pub(crate) value: T,
}

/// Findings about an environment.
#[derive(Default)]
pub(crate) struct EnvironmentFindings {
    /// Problems; the settings are unusable if there is one.
    pub(crate) problems: Vec<SettingProblem>,
    /// Variables without effect because of others, with the reason.
    pub(crate) ignored: Vec<Notice>,
    /// Variables that, with these values, differ from envoyproxy/ratelimit, and how.
    pub(crate) differences: Vec<Notice>,
    /// Notices that are not in `ignored`.
    pub(crate) notices: Vec<Notice>,
}

impl Values {
    /// Collects the values that are used, and the problems and notices about single variables.
    pub(crate) fn new(variables: &[Variable]) -> Self {
        let mut values = Self::default();
        for variable in variables {
            let (name, shown) = (variable.name.clone(), variable.format_for_message());
            match variable.own_effect() {
                VariableEffect::Used => {
                    let (setting, text) = (variable.setting, variable.text.clone().unwrap_or_default());
                    values.given.insert(name, GivenValue { setting, text, shown, is_read: Cell::new(false) });
                }
                VariableEffect::Invalid(invalid) => {
                    values.findings.problems.push(SettingProblem { name, shown, what: invalid.what, fix: invalid.fix });
                }
                // One notice for a family, however many of its variables are set.
                VariableEffect::None(why) => {
                    values.findings.notices.push(Notice::no_effect(variable.setting.name(), why));
                }
            }
        }
        values
    }

    /// Returns the value of `setting`; its default if none was given, or one that was reported as wrong.
    pub(crate) fn get<T: SettingValue>(&self, setting: &Setting<T>) -> T {
        let given = self.given.get(setting.name()).and_then(|given| setting.parse(given.read()).ok());
        given.unwrap_or_else(|| setting.default())
    }

    /// Returns the value of `setting` if the condition is true, and otherwise its default, without reading it.
    pub(crate) fn get_if<T: SettingValue>(&self, is_used: bool, setting: &Setting<T>) -> T {
        if is_used { self.get(setting) } else { setting.default() }
    }

    /// Returns the value of a duration of which 0 means "never" or "no limit".
    pub(crate) fn duration_unless_zero(&self, setting: &Setting<Duration>) -> Option<Duration> {
        Some(self.get(setting)).filter(|duration| !duration.is_zero())
    }

    /// Returns the text of the variable `name` of a family.
    pub(crate) fn family_member_text(&self, name: &str) -> Option<&str> {
        self.given.get(name).map(GivenValue::read)
    }

    /// Returns the first value that is set of two settings for the same thing; both count as read.
    pub(crate) fn first_set<T: SettingValue>(&self, settings: [&Setting<Option<T>>; 2]) -> Option<SourcedValue<T>> {
        let values = settings.map(|setting| Some(SourcedValue { name: setting.name(), value: self.get(setting)? }));
        values.into_iter().flatten().next()
    }

    /// Returns the file that `setting` names.
    pub(crate) fn pem_file(&self, setting: &Setting<Option<PathBuf>>) -> Option<PemFile> {
        self.get(setting).map(|path| PemFile { setting: setting.name(), path })
    }

    /// Returns the certificate and key that two settings name; one without the other is a problem.
    pub(crate) fn certificate_with_key(
        &mut self,
        certificate: &Setting<Option<PathBuf>>,
        key: &Setting<Option<PathBuf>>,
    ) -> Option<ClientCertificate> {
        let names = [certificate.name(), key.name()];
        let (certificate, key) = (self.pem_file(certificate), self.pem_file(key));
        self.pair_certificate(certificate, key, names)
    }

    /// Pairs a certificate with its key; adds a problem with the variable called `names` that is missing.
    pub(crate) fn pair_certificate(
        &mut self,
        certificate: Option<PemFile>,
        key: Option<PemFile>,
        names: [&'static str; 2],
    ) -> Option<ClientCertificate> {
        let (lone, missing) = match (certificate, key) {
            (Some(certificate), Some(key)) => return Some(ClientCertificate { certificate, key }),
            (None, None) => return None,
            (Some(certificate), None) => (certificate, names[1]),
            (None, Some(key)) => (key, names[0]),
        };
        self.add_problem_with_name(lone.setting, format!("set without {missing}"), "give both or none");
        None
    }

    /// Returns `true` if the variable is set and its value is used.
    pub(crate) fn is_set(&self, setting: &dyn AnySetting) -> bool {
        self.given.contains_key(setting.name())
    }

    /// Returns `true` if a problem with the variable was found.
    pub(crate) fn is_invalid(&self, setting: &dyn AnySetting) -> bool {
        self.findings.problems.iter().any(|problem| problem.name == setting.name())
    }

    /// Adds a problem with a setting.
    pub(crate) fn add_problem(&mut self, setting: &dyn AnySetting, what: impl Into<String>, fix: impl Into<String>) {
        self.add_problem_with_name(setting.name(), what, fix);
    }

    /// Adds a problem with the variable `name`.
    pub(crate) fn add_problem_with_name(&mut self, name: &str, what: impl Into<String>, fix: impl Into<String>) {
        let shown = self.given.get(name).map(|given| given.shown.clone()).unwrap_or_default();
        self.findings.problems.push(SettingProblem {
            name: name.to_owned(),
            shown,
            what: what.into(),
            fix: fix.into(),
        });
    }

    /// Adds a notice about a setting.
    pub(crate) fn add_notice(&mut self, setting: &dyn AnySetting, what: impl Into<String>) {
        self.add_notice_about_variable(setting.name(), what);
    }

    /// Adds a notice about the variable `name`.
    pub(crate) fn add_notice_about_variable(&mut self, name: &str, what: impl Into<String>) {
        self.findings.notices.push(Notice { name: name.to_owned(), what: what.into() });
    }

    /// Records that a setting is ignored because of others, even if it is set to its default.
    pub(crate) fn mark_ignored(&mut self, setting: &dyn AnySetting, why: &str) {
        self.findings.ignored.push(Notice { name: setting.name().to_owned(), what: why.to_owned() });
    }

    /// Records that a setting, with the values of all, differs from envoyproxy/ratelimit.
    pub(crate) fn mark_difference_from_envoy_ratelimit(&mut self, setting: &dyn AnySetting, why: &str) {
        self.findings.differences.push(Notice { name: setting.name().to_owned(), what: why.to_owned() });
    }

    /// Returns `true` if the variable is set to anything but its default; it does not count as read.
    pub(crate) fn differs_from_default(&self, setting: &dyn AnySetting) -> bool {
        self.given.get(setting.name()).is_some_and(|given| setting.overrides_default(&given.text))
    }

    /// Records that the variables which no reader has read are ignored, unless they are set to their defaults.
    pub(crate) fn ignore_unread_variables(&mut self) {
        /// Names that clouds give to every program.
        const CLOUD_PREFIXES: [&str; 3] = ["AWS_", "AZURE_", "GCE_"];
        for (name, given) in &self.given {
            let info = given.setting.info();
            let is_for_all_programs = CLOUD_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
            let has_no_effect = matches!(info.support, Support::NoEffect { .. });
            if given.is_read.get()
                || is_for_all_programs
                || has_no_effect
                || !given.setting.overrides_default(&given.text)
            {
                continue;
            }
            let what = match info.only_read {
                "" => "nothing reads it with these settings".to_owned(),
                when => format!("it is only read {when}"),
            };
            self.findings.ignored.push(Notice { name: name.clone(), what });
        }
    }

    /// Returns the findings, in the order in which they were made.
    pub(crate) fn into_findings(self) -> EnvironmentFindings {
        self.findings
    }
}

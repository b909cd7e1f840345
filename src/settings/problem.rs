//! What can be wrong with a setting, and what an operator should know about one.
//!
//! Texts complete `NAME=value: what; fix`, and never repeat text that may be secret.
//!
//! Decides: the wording of a wrong setting.

use std::fmt;

/// Reason why a text is not a value of a setting, and the correction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidSetting {
    /// Description of the mistake, without text that may be secret.
    pub what: String,
    /// Correction; completes "NAME=value: what; ...".
    pub fix: String,
}

impl InvalidSetting {
    /// Combines a mistake and its correction.
    pub(crate) fn new(what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { what: what.into(), fix: fix.into() }
    }
}

/// A fact about a variable that an operator should know and that prevents nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The variable.
    pub name: String,
    /// The fact; completes a sentence that begins with the name.
    pub what: String,
}

impl Notice {
    /// Notice that the variable `name` has no effect.
    pub(crate) fn no_effect(name: &str, why: &str) -> Self {
        Self { name: name.to_owned(), what: format!("has no effect: {why}") }
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.what)
    }
}

/// All problems of an environment that prevent the start, one line each.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct SettingsError {
    /// At least one problem, in the order of the documentation.
    pub problems: Vec<SettingProblem>,
}

/// A variable that prevents the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingProblem {
    /// The variable.
    pub name: String,
    /// Its value, masked if it may hold a secret.
    pub shown: String,
    /// Description of the mistake.
    pub what: String,
    /// Correction.
    pub fix: String,
}

/// `NAME=value: what is wrong; what to do`
impl fmt::Display for SettingProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}: {}; {}", self.name, self.shown, self.what, self.fix)
    }
}

/// A setting whose value is valid and names something that cannot be used, such as a file that is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting}={shown}: {what}")]
pub struct UnusableSetting {
    /// The variable or flag.
    pub setting: &'static str,
    /// Its value, free of secrets.
    pub shown: String,
    /// Description of the problem, with a correction.
    pub what: String,
}

impl From<UnusableSetting> for String {
    fn from(unusable: UnusableSetting) -> Self {
        unusable.to_string()
    }
}

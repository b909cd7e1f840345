//! The error of a value that a setting does not accept.

/// Reason why a text is not a value of a setting, and the correction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidSetting {
    /// Description of the mistake, without text that may be secret.
    pub what: String,
    /// Correction; completes "NAME=value: what; ...".
    pub fix: String,
}

impl InvalidSetting {
    pub(crate) fn new(what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { what: what.into(), fix: fix.into() }
    }
}

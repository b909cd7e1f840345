//! Types that settings can have: their syntax, their defaults, and how their text may be shown.
//!
//! Each type parses its own text and says what is wrong and how to correct it. Syntax is Go's, because the environments
//! of envoyproxy/ratelimit are written in it. Nothing here knows the name of a setting.

pub mod choice;
pub mod number;
pub mod optional;
pub mod size;
pub mod text;

use super::invalid::InvalidSetting;
use super::secret::one_line;

/// A type of setting values.
pub trait SettingValue: PartialEq + Sized + 'static {
    /// The form of a default that a constant can hold.
    type Default: Copy + Send + Sync + 'static;
    /// The restriction of one setting, such as a range; `()` for types without one.
    type Allowed: Copy + Send + Sync + 'static;
    /// The restriction of a setting that declares none.
    const ANY: Self::Allowed;
    /// Name of the type in the documentation; empty if the allowed values say it.
    const KIND: &'static str;
    /// `true` if the empty text means that the setting is not set.
    const EMPTY_IS_UNSET: bool = false;

    /// Parses `text`.
    fn parse(text: &str, allowed: &Self::Allowed) -> Result<Self, InvalidSetting>;

    /// Converts a declared default to a value.
    fn from_default(default: Self::Default) -> Self;

    /// Formats a declared default as it would be written in the environment.
    fn default_text(default: Self::Default) -> String;

    /// Describes the allowed values, such as `0 to 65535`; `None` if there is no restriction to mention.
    fn allowed_text(_allowed: &Self::Allowed) -> Option<String> {
        None
    }

    /// Formats the text of a variable for messages: on one line, at most 100 characters, without secrets.
    fn shown(text: &str) -> String {
        one_line(text)
    }
}

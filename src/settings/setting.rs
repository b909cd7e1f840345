//! A setting: a typed constant for one environment variable.
//!
//! A `Setting<T>` is declared once, in the file of its group: its name, default, allowed values and help. Reading it
//! gives a `T`, so a read cannot fail and cannot name a setting that does not exist. `AnySetting` is the same without
//! the type: `--help`, `docs/reference/settings.md` and `check --env` list settings by it.

use std::marker::PhantomData;

use super::problem::InvalidSetting;
use super::value::SettingValue;

/// An environment variable with values of type `T`.
pub struct Setting<T: SettingValue> {
    info: SettingInfo,
    /// The default as it would be written in the environment; empty if there is none.
    default: &'static str,
    /// The allowed values, for types that have a range.
    range: &'static str,
    value: PhantomData<fn() -> T>,
}

/// Facts about a setting that do not depend on its type.
#[derive(Clone, Copy)]
pub struct SettingInfo {
    /// Name of the variable; a name that ends in `*` is a family of variables that begin like it.
    pub name: &'static str,
    /// Meaning and unit, on one line of less than 120 characters.
    pub help: &'static str,
    /// Support for the variable in this program.
    pub support: Support,
    /// `true` for one of the forty that people set; `tollkeeper settings` and `docs/reference/settings.md` name them
    /// first.
    pub is_often_set: bool,
    /// Text for a notice that nothing read the variable: completes "it is only read"; empty if there is nothing to say.
    pub only_read: &'static str,
}

impl SettingInfo {
    /// Returns `true` if `name` is the name of this setting, or belongs to its family.
    pub fn covers_variable(&self, name: &str) -> bool {
        match self.name.strip_suffix('*') {
            Some(family) => name.starts_with(family),
            None => name == self.name,
        }
    }

    /// Returns `true` if the setting is a family of variables.
    pub fn is_variable_family(&self) -> bool {
        self.name.ends_with('*')
    }
}

/// Support for a variable in this program, compared with envoyproxy/ratelimit.
#[derive(Clone, Copy, Debug)]
pub enum Support {
    /// The variable has its documented effect.
    Honoured,
    /// The variable is honoured, with a difference from envoyproxy/ratelimit.
    Differs {
        /// `true` if any value but the default makes the difference; otherwise the code that reads the setting knows.
        by_value: bool,
        /// The difference.
        how: &'static str,
    },
    /// The variable has no effect, and no verdict depends on it; a value other than the default gets a notice.
    NoEffect {
        /// Reason for the notice.
        why: &'static str,
    },
}

impl<T: SettingValue> Setting<T> {
    /// Declares a setting that is honoured and accepts every value of its type.
    pub(crate) const fn new(name: &'static str, default: &'static str, help: &'static str) -> Self {
        let info = SettingInfo { name, help, support: Support::Honoured, is_often_set: false, only_read: "" };
        Self { info, default, range: T::RANGE, value: PhantomData }
    }

    /// Restricts the values to a range, such as `0 or 1s to 24h` or `1 or more`.
    pub(crate) const fn within(self, range: &'static str) -> Self {
        Self { range, ..self }
    }

    /// Declares a difference from envoyproxy/ratelimit.
    pub(crate) const fn differs(self, how: &'static str) -> Self {
        self.with_support(Support::Differs { by_value: false, how })
    }

    /// Declares a difference from envoyproxy/ratelimit that any value but the default makes.
    pub(crate) const fn differs_by_value(self, how: &'static str) -> Self {
        self.with_support(Support::Differs { by_value: true, how })
    }

    /// Declares that the setting has no effect.
    pub(crate) const fn without_effect(self, why: &'static str) -> Self {
        self.with_support(Support::NoEffect { why })
    }

    const fn with_support(self, support: Support) -> Self {
        Self { info: SettingInfo { support, ..self.info }, ..self }
    }

    /// Declares that people often set the setting.
    pub(crate) const fn often_set(self) -> Self {
        Self { info: SettingInfo { is_often_set: true, ..self.info }, ..self }
    }

    /// Says when the setting is read, for a notice that it was not: completes "it is only read", such as `with X=true`.
    pub(crate) const fn only_read(self, when: &'static str) -> Self {
        Self { info: SettingInfo { only_read: when, ..self.info }, ..self }
    }

    /// Parses a value.
    pub fn parse(&self, text: &str) -> Result<T, InvalidSetting> {
        T::parse(text, self.range)
    }

    /// Returns the value of a variable that is not set.
    pub fn default(&self) -> T {
        T::from_default(self.default, self.range)
    }
}

/// A setting without its type.
pub trait AnySetting: Send + Sync {
    /// Returns name, help and support.
    fn info(&self) -> &SettingInfo;

    /// Returns the default as it would be written in the environment; empty if there is none.
    fn default_text(&self) -> &'static str;

    /// Returns the name of the type in the documentation; empty for a choice of words.
    fn type_name(&self) -> &'static str;

    /// Describes the allowed values, such as `0 to 65535`.
    fn allowed_values_text(&self) -> Option<String>;

    /// Validates `text`.
    fn validate(&self, text: &str) -> Result<(), InvalidSetting>;

    /// Returns `true` if `text` is a valid value other than the default.
    fn overrides_default(&self, text: &str) -> bool;

    /// Formats the text of the variable for messages.
    fn format_for_message(&self, text: &str) -> String;

    /// Returns the name of the variable.
    fn name(&self) -> &'static str {
        self.info().name
    }
}

impl<T: SettingValue> AnySetting for Setting<T> {
    fn info(&self) -> &SettingInfo {
        &self.info
    }

    fn default_text(&self) -> &'static str {
        self.default
    }

    fn type_name(&self) -> &'static str {
        T::TYPE_NAME
    }

    fn allowed_values_text(&self) -> Option<String> {
        Some(T::describe_allowed_values(self.range)).filter(|allowed| !allowed.is_empty())
    }

    fn validate(&self, text: &str) -> Result<(), InvalidSetting> {
        self.parse(text).map(drop)
    }

    fn overrides_default(&self, text: &str) -> bool {
        self.parse(text).is_ok_and(|value| value != self.default())
    }

    fn format_for_message(&self, text: &str) -> String {
        T::format_for_message(text)
    }
}

/// Settings of one concern, listed under one heading.
#[derive(Clone, Copy)]
pub struct SettingGroup {
    /// The heading.
    pub title: &'static str,
    /// The settings, in the order of the documentation.
    pub settings: &'static [&'static dyn AnySetting],
}

/// Declares the settings of a group as typed constants, and the group itself as `GROUP`.
///
/// `NAME: Type = default, "help" .method(...)` declares the variable `NAME`; `NAME as "TEXT*"` declares a family.
/// `"Title", only read "with X=true";` is `only_read` of all settings that do not say it themselves.
macro_rules! settings {
    (@name $name:ident) => { stringify!($name) };
    (@name $name:ident $text:literal) => { $text };
    ($title:literal; $($settings:tt)*) => { $crate::settings::setting::settings! { $title, only read ""; $($settings)* } };
    ($title:literal, only read $when:literal;
        $($name:ident $(as $text:literal)?: $type:ty = $default:expr, $help:literal $(.$method:ident($($arg:expr),*))*;)*
    ) => {
        $(
            #[doc = $help]
            pub static $name: $crate::settings::setting::Setting<$type> = $crate::settings::setting::Setting::new(
                $crate::settings::setting::settings!(@name $name $($text)?),
                $default,
                $help,
            ).only_read($when)$(.$method($($arg),*))*;
        )*

        /// The settings of this file.
        pub static GROUP: $crate::settings::setting::SettingGroup =
            $crate::settings::setting::SettingGroup { title: $title, settings: &[$(&$name),*] };
    };
}
pub(crate) use settings;

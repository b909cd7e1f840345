//! Types that settings can have: their syntax, their defaults, and how their text may be shown.
//!
//! Each type parses its own text and says what is wrong and how to correct it. Syntax is Go's, because the environments
//! of envoyproxy/ratelimit are written in it. Nothing here knows the name of a setting.
//!
//! Decides: that an empty variable is as if unset (`EMPTY_IS_UNSET`).

pub mod number;
pub mod text;

use super::problem::InvalidSetting;
use super::secret::shorten_for_message;

/// A type of setting values.
pub trait SettingValue: PartialEq + Sized + 'static {
    /// The form of a default that a constant can hold, such as `&'static str` for a `String`.
    type Default: Copy + Send + Sync + 'static;
    /// The restriction of one setting, such as a range; `()` for types without one.
    type AllowedValues: Copy + Send + Sync + 'static;
    /// The restriction of a setting that declares none.
    const UNRESTRICTED: Self::AllowedValues;
    /// Name of the type in the documentation; empty if the allowed values say it.
    const TYPE_NAME: &'static str;
    /// `true` if the empty text means that the setting is not set.
    const EMPTY_IS_UNSET: bool = false;

    /// Parses `text`.
    fn parse(text: &str, allowed: &Self::AllowedValues) -> Result<Self, InvalidSetting>;

    /// Converts a declared default to a value.
    fn from_default(default: Self::Default) -> Self;

    /// Formats a declared default as it would be written in the environment.
    fn default_text(default: Self::Default) -> String;

    /// Describes the allowed values, such as `0 to 65535`; `None` if there is no restriction to mention.
    fn allowed_values_text(_allowed: &Self::AllowedValues) -> Option<String> {
        None
    }

    /// Formats the text of a variable for messages: on one line, at most 100 characters, without secrets.
    fn format_for_message(text: &str) -> String {
        shorten_for_message(text)
    }
}

/// A value that may be missing: a setting without a default, or one whose empty text means "not set".
impl<T: SettingValue> SettingValue for Option<T> {
    type Default = Option<T::Default>;
    type AllowedValues = T::AllowedValues;
    const UNRESTRICTED: T::AllowedValues = T::UNRESTRICTED;
    const TYPE_NAME: &'static str = T::TYPE_NAME;

    fn parse(text: &str, allowed: &T::AllowedValues) -> Result<Self, InvalidSetting> {
        if T::EMPTY_IS_UNSET && text.is_empty() { Ok(None) } else { T::parse(text, allowed).map(Some) }
    }

    fn from_default(default: Option<T::Default>) -> Self {
        default.map(T::from_default)
    }

    fn default_text(default: Option<T::Default>) -> String {
        default.map(T::default_text).unwrap_or_default()
    }

    fn allowed_values_text(allowed: &T::AllowedValues) -> Option<String> {
        T::allowed_values_text(allowed)
    }

    fn format_for_message(text: &str) -> String {
        T::format_for_message(text)
    }
}

/// Words, each with the value that it stands for.
pub type WordTable<T> = &'static [(&'static str, T)];

/// One of a closed set of values, each with a word for it.
///
/// Enums take their words from `named_enum!`, where other parts of the program find them too.
pub trait Choice: Copy + PartialEq + Send + Sync + 'static {
    /// The words that are accepted, with what each stands for; the first word of a value is its name.
    const ACCEPTED_WORDS: WordTable<Self>;
    /// `true` if words are accepted only in the case of `ACCEPTED_WORDS`.
    const CASE_SENSITIVE: bool = false;
    /// `true` if the empty text means that the setting is not set.
    const EMPTY_IS_UNSET: bool = false;

    /// Returns the word for this value.
    fn word(self) -> &'static str {
        Self::ACCEPTED_WORDS.iter().find(|(_, value)| *value == self).map(|(word, _)| *word).unwrap_or_default()
    }
}

impl<T: Choice> SettingValue for T {
    type Default = T;
    type AllowedValues = ();
    const UNRESTRICTED: () = ();
    const TYPE_NAME: &'static str = "";
    const EMPTY_IS_UNSET: bool = <T as Choice>::EMPTY_IS_UNSET;

    fn parse(text: &str, _: &()) -> Result<Self, InvalidSetting> {
        let is_same = |word: &str| if T::CASE_SENSITIVE { word == text } else { word.eq_ignore_ascii_case(text) };
        let known = T::ACCEPTED_WORDS.iter().find(|(word, _)| is_same(word)).map(|(_, value)| *value);
        known.ok_or_else(|| match text {
            "" => InvalidSetting::new("set but empty", format!("unset it or give {}", list_words::<T>())),
            _ => InvalidSetting::new("not known", format!("give {}", list_words::<T>())),
        })
    }

    fn from_default(default: T) -> Self {
        default
    }

    fn default_text(default: T) -> String {
        default.word().to_owned()
    }

    fn allowed_values_text(_: &()) -> Option<String> {
        Some(list_words::<T>())
    }
}

/// Formats the words as `a, b or c`, without the empty one.
fn list_words<T: Choice>() -> String {
    let words: Vec<&str> = T::ACCEPTED_WORDS.iter().map(|(word, _)| *word).filter(|word| !word.is_empty()).collect();
    match words.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => String::new(),
    }
}

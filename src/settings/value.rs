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
    /// Name of the type in the documentation; empty if the allowed values say it.
    const TYPE_NAME: &'static str;
    /// Range of a setting that declares none; empty if every value is allowed.
    const RANGE: &'static str = "";
    /// `true` if the empty text means that the setting is not set.
    const EMPTY_IS_UNSET: bool = false;

    /// Parses `text`, of a value in `range`.
    fn parse(text: &str, range: &str) -> Result<Self, InvalidSetting>;

    /// Parses a declared default.
    fn from_default(default: &str, range: &str) -> Self {
        Self::parse(default, range).expect("a test parses all defaults")
    }

    /// Describes the allowed values, such as `0 to 65535`; empty if there is no restriction to mention.
    fn describe_allowed_values(range: &str) -> String {
        range.to_owned()
    }

    /// Formats the text of a variable for messages: on one line, at most 100 characters, without secrets.
    fn format_for_message(text: &str) -> String {
        shorten_for_message(text)
    }
}

/// A value that may be missing: a setting without a default, or one whose empty text means "not set".
impl<T: SettingValue> SettingValue for Option<T> {
    const TYPE_NAME: &'static str = T::TYPE_NAME;
    const RANGE: &'static str = T::RANGE;

    fn parse(text: &str, range: &str) -> Result<Self, InvalidSetting> {
        if T::EMPTY_IS_UNSET && text.is_empty() { Ok(None) } else { T::parse(text, range).map(Some) }
    }

    fn from_default(default: &str, range: &str) -> Self {
        if default.is_empty() { None } else { Some(T::from_default(default, range)) }
    }

    fn describe_allowed_values(range: &str) -> String {
        T::describe_allowed_values(range)
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
    /// The words that are accepted, with what each stands for.
    const ACCEPTED_WORDS: WordTable<Self>;
    /// `true` if words are accepted only in the case of `ACCEPTED_WORDS`.
    const CASE_SENSITIVE: bool = false;
    /// `true` if the empty text means that the setting is not set.
    const EMPTY_IS_UNSET: bool = false;
}

/// Makes enums of `named_enum!` choices; `Type: CASE_SENSITIVE` sets a constant of `Choice` to `true`.
macro_rules! choices {
    ($($type:ty $(: $flag:ident)?),+) => {$(
        impl $crate::settings::value::Choice for $type {
            const ACCEPTED_WORDS: $crate::settings::value::WordTable<Self> = Self::ACCEPTED_WORDS;
            $(const $flag: bool = true;)?
        }
    )+};
}
pub(crate) use choices;

impl<T: Choice> SettingValue for T {
    const TYPE_NAME: &'static str = "";
    const EMPTY_IS_UNSET: bool = <T as Choice>::EMPTY_IS_UNSET;

    fn parse(text: &str, _: &str) -> Result<Self, InvalidSetting> {
        let is_same = |word: &str| if T::CASE_SENSITIVE { word == text } else { word.eq_ignore_ascii_case(text) };
        let known = T::ACCEPTED_WORDS.iter().find(|(word, _)| is_same(word)).map(|(_, value)| *value);
        known.ok_or_else(|| match text {
            "" => InvalidSetting::new("set but empty", format!("unset it or give {}", list_words::<T>())),
            _ => InvalidSetting::new("not known", format!("give {}", list_words::<T>())),
        })
    }

    fn describe_allowed_values(_: &str) -> String {
        list_words::<T>()
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

//! Values that are one of a few words.

use super::SettingValue;
use crate::settings::invalid::InvalidSetting;

/// One of a closed set of values, each with a word for it.
pub trait Choice: Copy + PartialEq + Send + Sync + 'static {
    /// The words that are accepted, with what each stands for; the first word of a value is its name.
    const WORDS: &'static [(&'static str, Self)];
    /// `true` if words are accepted only in the case of `WORDS`.
    const CASE_SENSITIVE: bool = false;
    /// `true` if the empty text means that the setting is not set.
    const EMPTY_IS_UNSET: bool = false;

    /// Returns the word for this value.
    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(_, value)| *value == self).map(|(word, _)| *word).unwrap_or_default()
    }
}

impl<T: Choice> SettingValue for T {
    type Default = T;
    type Allowed = ();
    const ANY: () = ();
    const KIND: &'static str = "";
    const EMPTY_IS_UNSET: bool = <T as Choice>::EMPTY_IS_UNSET;

    fn parse(text: &str, _: &()) -> Result<Self, InvalidSetting> {
        let is_same = |word: &str| if T::CASE_SENSITIVE { word == text } else { word.eq_ignore_ascii_case(text) };
        let known = T::WORDS.iter().find(|(word, _)| is_same(word)).map(|(_, value)| *value);
        known.ok_or_else(|| match text {
            "" => InvalidSetting::new("set but empty", format!("unset it or give {}", words::<T>())),
            _ => InvalidSetting::new("not known", format!("give {}", words::<T>())),
        })
    }

    fn from_default(default: T) -> Self {
        default
    }

    fn default_text(default: T) -> String {
        default.word().to_owned()
    }

    fn allowed_text(_: &()) -> Option<String> {
        Some(words::<T>())
    }
}

/// Formats the words as `a, b or c`, without the empty one.
fn words<T: Choice>() -> String {
    let words: Vec<&str> = T::WORDS.iter().map(|(word, _)| *word).filter(|word| !word.is_empty()).collect();
    match words.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => String::new(),
    }
}

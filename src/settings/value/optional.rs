//! Values that may be missing: a setting without a default, or one whose empty text means "not set".

use super::SettingValue;
use crate::settings::invalid::InvalidSetting;

impl<T: SettingValue> SettingValue for Option<T> {
    type Default = Option<T::Default>;
    type Allowed = T::Allowed;
    const ANY: T::Allowed = T::ANY;
    const KIND: &'static str = T::KIND;

    fn parse(text: &str, allowed: &T::Allowed) -> Result<Self, InvalidSetting> {
        if T::EMPTY_IS_UNSET && text.is_empty() { Ok(None) } else { T::parse(text, allowed).map(Some) }
    }

    fn from_default(default: Option<T::Default>) -> Self {
        default.map(T::from_default)
    }

    fn default_text(default: Option<T::Default>) -> String {
        default.map(T::default_text).unwrap_or_default()
    }

    fn allowed_text(allowed: &T::Allowed) -> Option<String> {
        T::allowed_text(allowed)
    }

    fn shown(text: &str) -> String {
        T::shown(text)
    }
}

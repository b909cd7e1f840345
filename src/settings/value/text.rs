//! Texts: plain ones, paths, lists, maps, header names, hosts, addresses and secrets.
//!
//! Decides: which texts are a header name (`HeaderName`) or a secret; white space around a text.

use std::path::PathBuf;

use super::SettingValue;
use crate::settings::address::{Address, Host};
use crate::settings::problem::InvalidSetting;
use crate::settings::secret::{SECRET_MASK, Secret, mask_credentials};

impl SettingValue for String {
    const TYPE_NAME: &'static str = "text";
    const EMPTY_IS_UNSET: bool = true;

    fn parse(text: &str, _: &str) -> Result<Self, InvalidSetting> {
        Ok(text.to_owned())
    }
}

impl SettingValue for PathBuf {
    const TYPE_NAME: &'static str = "path";
    const EMPTY_IS_UNSET: bool = true;

    fn parse(text: &str, _: &str) -> Result<Self, InvalidSetting> {
        if text.contains('\0') {
            return Err(InvalidSetting::new("not a path", "remove the NUL character"));
        }
        Ok(text.into())
    }
}

/// A list: texts separated by commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextList(pub Vec<String>);

impl SettingValue for TextList {
    const TYPE_NAME: &'static str = "list: a,b";

    fn parse(text: &str, _: &str) -> Result<Self, InvalidSetting> {
        Ok(Self(if text.trim().is_empty() { Vec::new() } else { text.split(',').map(str::to_owned).collect() }))
    }
}

/// A map: `key:value` pairs separated by commas, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextMap(pub Vec<(String, String)>);

impl SettingValue for TextMap {
    const TYPE_NAME: &'static str = "map: k:v,k:v";

    fn parse(text: &str, _: &str) -> Result<Self, InvalidSetting> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let pairs = text.split(',').map(|pair| {
            let (key, value) = pair.split_once(':')?;
            (!value.contains(':')).then(|| (key.to_owned(), value.to_owned()))
        });
        let pairs = pairs.collect::<Option<Vec<_>>>();
        pairs.map(Self).ok_or_else(|| InvalidSetting::new("not a map", "give key:value,key:value"))
    }
}

/// The name of an HTTP header, which cannot end the header line or start another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderName(pub String);

impl SettingValue for HeaderName {
    const TYPE_NAME: &'static str = "header name";
    const EMPTY_IS_UNSET: bool = true;

    /// Parses a field name by RFC 9110, section 5.1, of at most 256 bytes; spaces around it are removed.
    fn parse(text: &str, _: &str) -> Result<Self, InvalidSetting> {
        const MAX_HEADER_NAME_BYTES: usize = 256;
        let name = text.trim();
        let is_token = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b));
        if !is_token || name.len() > MAX_HEADER_NAME_BYTES {
            return Err(InvalidSetting::new("not a header name", "give letters, digits and hyphens, 256 at most"));
        }
        Ok(Self(name.to_owned()))
    }
}

impl SettingValue for Host {
    const TYPE_NAME: &'static str = "host";

    fn parse(text: &str, _: &str) -> Result<Self, InvalidSetting> {
        let invalid = || InvalidSetting::new("not an address", "give an IP address or a host name, without a port");
        Self::parse(text).ok_or_else(invalid)
    }
}

impl SettingValue for Address {
    const TYPE_NAME: &'static str = "host:port";

    fn parse(text: &str, _: &str) -> Result<Self, InvalidSetting> {
        let invalid = || InvalidSetting::new("not an address", "give host:port or :port, with a port of 0 to 65535");
        Self::parse(text).ok_or_else(invalid)
    }
}

impl SettingValue for Secret {
    const TYPE_NAME: &'static str = "secret text";
    const EMPTY_IS_UNSET: bool = true;

    fn parse(text: &str, _: &str) -> Result<Self, InvalidSetting> {
        Ok(Self::new(text))
    }

    fn format_for_message(text: &str) -> String {
        if text.is_empty() { String::new() } else { SECRET_MASK.to_owned() }
    }
}

/// A URL or a list of URLs that may contain credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretUrl(Secret);

impl SecretUrl {
    /// Returns the text, credentials included.
    pub(crate) fn reveal(&self) -> &str {
        self.0.reveal()
    }
}

impl SettingValue for SecretUrl {
    const TYPE_NAME: &'static str = "address, may hold a secret";
    const EMPTY_IS_UNSET: bool = true;

    fn parse(text: &str, _: &str) -> Result<Self, InvalidSetting> {
        Ok(Self(Secret::new(text)))
    }

    fn format_for_message(text: &str) -> String {
        mask_credentials(text)
    }
}

//! Texts: plain ones, paths, lists, maps, header names, hosts, addresses and secrets.
//!
//! Decides: which texts are a header name (`HeaderName`) or a secret; white space around a text.

use std::path::PathBuf;

use super::SettingValue;
use crate::settings::address::{Address, Host};
use crate::settings::problem::InvalidSetting;
use crate::settings::secret::{SECRET_MASK, Secret, mask_credentials};

impl SettingValue for String {
    type Default = &'static str;
    type AllowedValues = ();
    const UNRESTRICTED: () = ();
    const TYPE_NAME: &'static str = "text";
    const EMPTY_IS_UNSET: bool = true;

    fn parse(text: &str, _: &()) -> Result<Self, InvalidSetting> {
        Ok(text.to_owned())
    }

    fn from_default(default: &'static str) -> Self {
        default.to_owned()
    }

    fn default_text(default: &'static str) -> Self {
        default.to_owned()
    }
}

impl SettingValue for PathBuf {
    type Default = &'static str;
    type AllowedValues = ();
    const UNRESTRICTED: () = ();
    const TYPE_NAME: &'static str = "path";
    const EMPTY_IS_UNSET: bool = true;

    fn parse(text: &str, _: &()) -> Result<Self, InvalidSetting> {
        if text.contains('\0') {
            return Err(InvalidSetting::new("not a path", "remove the NUL character"));
        }
        Ok(text.into())
    }

    fn from_default(default: &'static str) -> Self {
        default.into()
    }

    fn default_text(default: &'static str) -> String {
        default.to_owned()
    }
}

/// A list: texts separated by commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextList(pub Vec<String>);

impl TextList {
    fn split_at_commas(text: &str) -> Self {
        Self(if text.trim().is_empty() { Vec::new() } else { text.split(',').map(str::to_owned).collect() })
    }
}

impl SettingValue for TextList {
    type Default = &'static str;
    type AllowedValues = ();
    const UNRESTRICTED: () = ();
    const TYPE_NAME: &'static str = "list: a,b";

    fn parse(text: &str, _: &()) -> Result<Self, InvalidSetting> {
        Ok(Self::split_at_commas(text))
    }

    fn from_default(default: &'static str) -> Self {
        Self::split_at_commas(default)
    }

    fn default_text(default: &'static str) -> String {
        default.to_owned()
    }
}

/// A map: `key:value` pairs separated by commas, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextMap(pub Vec<(String, String)>);

impl SettingValue for TextMap {
    /// The only default is the empty map.
    type Default = ();
    type AllowedValues = ();
    const UNRESTRICTED: () = ();
    const TYPE_NAME: &'static str = "map: k:v,k:v";

    fn parse(text: &str, _: &()) -> Result<Self, InvalidSetting> {
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

    fn from_default(_: ()) -> Self {
        Self::default()
    }

    fn default_text(_: ()) -> String {
        String::new()
    }
}

/// The name of an HTTP header, which cannot end the header line or start another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderName(pub String);

impl SettingValue for HeaderName {
    type Default = &'static str;
    type AllowedValues = ();
    const UNRESTRICTED: () = ();
    const TYPE_NAME: &'static str = "header name";
    const EMPTY_IS_UNSET: bool = true;

    /// Parses a field name by RFC 9110, section 5.1, of at most 256 bytes; spaces around it are removed.
    fn parse(text: &str, _: &()) -> Result<Self, InvalidSetting> {
        const MAX_HEADER_NAME_BYTES: usize = 256;
        let name = text.trim();
        let is_token = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b));
        if !is_token || name.len() > MAX_HEADER_NAME_BYTES {
            return Err(InvalidSetting::new("not a header name", "give letters, digits and hyphens, 256 at most"));
        }
        Ok(Self(name.to_owned()))
    }

    fn from_default(default: &'static str) -> Self {
        Self(default.to_owned())
    }

    fn default_text(default: &'static str) -> String {
        default.to_owned()
    }
}

impl SettingValue for Host {
    /// The only default is the wildcard.
    type Default = ();
    type AllowedValues = ();
    const UNRESTRICTED: () = ();
    const TYPE_NAME: &'static str = "host";

    fn parse(text: &str, _: &()) -> Result<Self, InvalidSetting> {
        let invalid = || InvalidSetting::new("not an address", "give an IP address or a host name, without a port");
        Self::parse(text).ok_or_else(invalid)
    }

    fn from_default(_: ()) -> Self {
        Self::Wildcard
    }

    fn default_text(_: ()) -> String {
        "0.0.0.0".to_owned()
    }
}

impl SettingValue for Address {
    /// A port on all addresses of the machine.
    type Default = u16;
    type AllowedValues = ();
    const UNRESTRICTED: () = ();
    const TYPE_NAME: &'static str = "host:port";

    fn parse(text: &str, _: &()) -> Result<Self, InvalidSetting> {
        let invalid = || InvalidSetting::new("not an address", "give host:port or :port, with a port of 0 to 65535");
        Self::parse(text).ok_or_else(invalid)
    }

    fn from_default(port: u16) -> Self {
        Self { host: Host::Wildcard, port }
    }

    fn default_text(port: u16) -> String {
        format!(":{port}")
    }
}

impl SettingValue for Secret {
    /// A secret has no default.
    type Default = ();
    type AllowedValues = ();
    const UNRESTRICTED: () = ();
    const TYPE_NAME: &'static str = "secret text";
    const EMPTY_IS_UNSET: bool = true;

    fn parse(text: &str, _: &()) -> Result<Self, InvalidSetting> {
        Ok(Self::new(text))
    }

    fn from_default(_: ()) -> Self {
        Self::new("")
    }

    fn default_text(_: ()) -> String {
        String::new()
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
    type Default = &'static str;
    type AllowedValues = ();
    const UNRESTRICTED: () = ();
    const TYPE_NAME: &'static str = "address, may hold a secret";
    const EMPTY_IS_UNSET: bool = true;

    fn parse(text: &str, _: &()) -> Result<Self, InvalidSetting> {
        Ok(Self(Secret::new(text)))
    }

    fn from_default(default: &'static str) -> Self {
        Self(Secret::new(default))
    }

    fn default_text(default: &'static str) -> String {
        default.to_owned()
    }

    fn format_for_message(text: &str) -> String {
        mask_credentials(text)
    }
}

//! Bytes as text: hexadecimal digits, and the percent-encoding of URLs and forms.

use std::fmt::Write as _;

/// Returns bytes as lower-case hexadecimal digits.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _infallible = write!(text, "{byte:02x}");
        text
    })
}

/// Encodes everything but letters, digits, `-`, `_`, `.` and `~` as `%XX`, as queries, forms and AWS need it.
pub(crate) fn percent_encode(text: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len() + 16), |mut encoded, byte| {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            let _infallible = write!(encoded, "%{byte:02X}");
        }
        encoded
    })
}

//! Record of an entry as a line that is safe to print.

use serde::de::IgnoredAny;

use crate::base::text::printable_json;

/// Reason why the record of an entry cannot be printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UnusableRecord {
    /// The entry has no field `record`.
    #[error("it has no field `record`")]
    Missing,
    /// The record is not JSON.
    #[error("its record is not JSON")]
    NotJson,
    /// The entry is larger than a reply may be.
    #[error("it is larger than 16 MiB")]
    TooLarge,
}

/// Returns a record as one line of JSON without unprintable characters, and without a line break at its end.
///
/// # Errors
/// The record is missing, or is no JSON object.
pub(crate) fn json_line(record: Option<&[u8]>) -> Result<String, UnusableRecord> {
    let record = record.ok_or(UnusableRecord::Missing)?;
    let text = std::str::from_utf8(record).map_err(|_| UnusableRecord::NotJson)?;
    if !text.trim_start().starts_with('{') || serde_json::from_str::<IgnoredAny>(text).is_err() {
        return Err(UnusableRecord::NotJson);
    }
    // Raw line feeds are between values only.
    Ok(printable_json(text).replace('\n', " "))
}

#[cfg(test)]
mod tests {
    use super::{UnusableRecord, json_line};

    #[test]
    fn line_is_the_same_json_without_control_characters() {
        let record = "{\n\"a\":\t\"x\u{7f}\u{9b}2J\\u001b \u{e9}\"\r\n}\n";
        let line = json_line(Some(record.as_bytes())).unwrap();
        assert!(!line.contains(char::is_control), "{line:?}");
        let parse = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(parse(&line), parse(record));
    }

    #[test]
    fn record_that_is_not_an_object_of_json_is_unusable() {
        assert_eq!(json_line(None), Err(UnusableRecord::Missing));
        let nested = "{\"a\":".to_owned() + &"[".repeat(1 << 20);
        for record in
            [&b""[..], b"text", b"[1]", b"{}\n{}", b"{\"a\":\"\x1b\"}", b"{\"a\":\"\xff\"}", nested.as_bytes()]
        {
            assert_eq!(json_line(Some(record)), Err(UnusableRecord::NotJson));
        }
    }
}

//! Standard output as a sink. The log of the process goes to standard error, so the two do not mix.

use std::borrow::Cow;
use std::io::{self, Write as _};

use memchr::memchr2_iter;

/// DEL, U+007F.
const DEL: u8 = 0x7f;
/// First of the two bytes of U+0080 to U+00BF.
const LATIN_1_LEAD: u8 = 0xc2;

/// Standard output.
#[derive(Debug, Default)]
pub(crate) struct StdoutSink {
    /// The last write failed, so that the current line may have no end.
    has_open_line: bool,
}

impl StdoutSink {
    /// Writes whole lines.
    pub(super) fn write(&mut self, lines: &[u8]) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        if self.has_open_line {
            stdout.write_all(b"\n")?;
        }
        self.has_open_line = true;
        stdout.write_all(&printable(lines))?;
        stdout.flush()?;
        self.has_open_line = false;
        Ok(())
    }
}

/// Escapes the control characters that JSON allows in strings, U+007F to U+009F: terminals act on them.
fn printable(lines: &[u8]) -> Cow<'_, [u8]> {
    let mut escaped = Vec::new();
    let mut copied = 0;
    for at in memchr2_iter(DEL, LATIN_1_LEAD, lines) {
        let (code, length) = match lines[at..] {
            [DEL, ..] => (DEL, 1),
            [LATIN_1_LEAD, code @ 0x80..=0x9f, ..] => (code, 2),
            _ => continue,
        };
        escaped.extend_from_slice(&lines[copied..at]);
        escaped.extend_from_slice(format!("\\u{code:04x}").as_bytes());
        copied = at + length;
    }
    if copied == 0 {
        return Cow::Borrowed(lines);
    }
    escaped.extend_from_slice(&lines[copied..]);
    Cow::Owned(escaped)
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn control_characters_of_terminals_are_escaped() {
        let line = "{\"a\":\"\u{7f}x\u{80}\u{9b}2J\u{9f}\u{a0}\u{e9}\u{20ac}\u{7f}\"}\n";
        let written = String::from_utf8(printable(line.as_bytes()).into_owned()).unwrap();
        assert!(!written.trim_end().contains(char::is_control), "{written:?}");
        let parse = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(parse(&written), parse(line));
        let plain = "{\"a\":\"\u{a0}\u{bf}\u{e9}\"}\n".as_bytes();
        assert_eq!(*printable(plain), *plain);
    }
}

//! Acknowledged warnings: lines of a file whose author has read the warnings and wants what is written.
//!
//! A comment `# check: ok, REASON` at the end of a line, or alone in the lines above it, acknowledges the warnings of
//! that line. Errors cannot be acknowledged.

use std::collections::HashSet;

/// Beginning of a comment that acknowledges warnings, after the `#` and spaces.
const ACKNOWLEDGING_COMMENT: &str = "check: ok";

/// Lines of a text whose warnings are acknowledged, from 1.
#[derive(Clone, Debug, Default)]
pub struct AcknowledgedLines {
    lines: HashSet<u32>,
}

impl AcknowledgedLines {
    /// Finds the lines of a text whose warnings its comments acknowledge.
    pub fn from_text(text: &str) -> Self {
        let mut lines = HashSet::new();
        // Most files have none.
        if !text.contains(ACKNOWLEDGING_COMMENT) {
            return Self { lines };
        }
        let mut is_for_next = false;
        for (number, line) in (1..).zip(text.lines()) {
            let is_marked = line.match_indices('#').any(|(at, _)| is_acknowledging_comment(line, at));
            let content = line.trim_start();
            if content.is_empty() || content.starts_with('#') {
                is_for_next |= is_marked;
                continue;
            }
            if is_marked || is_for_next {
                lines.insert(number);
            }
            is_for_next = false;
        }
        Self { lines }
    }

    /// Returns `true` if no line is acknowledged.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Returns `true` if the warnings of a line are acknowledged.
    pub fn contains_line(&self, line: u32) -> bool {
        self.lines.contains(&line)
    }
}

/// Returns `true` if the `#` at this place begins a comment that acknowledges warnings.
fn is_acknowledging_comment(line: &str, at: usize) -> bool {
    let is_comment = line[..at].chars().next_back().is_none_or(char::is_whitespace);
    let Some(rest) = line[at + 1..].trim_start().strip_prefix(ACKNOWLEDGING_COMMENT) else { return false };
    is_comment && rest.chars().next().is_none_or(|next| !next.is_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::AcknowledgedLines;

    #[test]
    fn comments_acknowledge_their_line_or_the_next() {
        let text = "\
# check: ok, the file is a sample
domain: a
descriptors:  # check: ok
# check: ok: two lines
# of comment

- key: b # check: okay
- key: c#check: ok
- value: '# check: ok'
- key: d
";
        let found = AcknowledgedLines::from_text(text);
        let lines: Vec<u32> = (0..12).filter(|line| found.contains_line(*line)).collect();
        // In quotes it looks the same: only warnings of that line are concerned.
        assert_eq!(lines, [2, 3, 7]);
        assert!(!AcknowledgedLines::from_text("domain: a\n").contains_line(1));
    }
}

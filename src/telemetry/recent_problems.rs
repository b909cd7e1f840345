//! The last warnings and errors of the log, for operators who do not read it.
//!
//! Lines of the audit log are left out: they have descriptors of requests, and clients without the token cause them at
//! any rate. Memory is bounded by the number of lines and the size of each.

use std::collections::VecDeque;
use std::sync::Mutex;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::base::sharded::lock_ignoring_poison;
use crate::base::text::{replace_unprintable, truncate_to_bytes};

/// Maximum number of lines that are kept.
pub const MAX_KEPT_LINES: usize = 100;
/// Maximum size of a message, of a field, and of all fields of a line in bytes.
const MAX_TEXT_BYTES: usize = 2048;

/// A warning or an error of the log.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoggedProblem {
    /// Time of the last occurrence, RFC 3339 in UTC.
    pub time: String,
    /// `warning`, `error` or `fatal`.
    pub level: &'static str,
    /// Module that logged it.
    pub target: &'static str,
    /// Message.
    pub message: String,
    /// Fields.
    pub fields: Map<String, Value>,
    /// Number of times that it was logged in a row.
    pub times: u64,
}

/// The last warnings and errors, the oldest first.
#[derive(Debug, Default)]
pub struct RecentProblems(Mutex<VecDeque<LoggedProblem>>);

/// The last warnings and errors that this process logged.
pub static RECENT_PROBLEMS: RecentProblems = RecentProblems(Mutex::new(VecDeque::new()));

impl RecentProblems {
    /// Adds a line, with texts cut to their maximum size.
    pub fn add_line(&self, mut problem: LoggedProblem) {
        problem.message = sanitize_and_cut_text(&problem.message);
        let mut room = MAX_TEXT_BYTES;
        let fields = std::mem::take(&mut problem.fields);
        for (name, value) in fields {
            let value = value.as_str().map(|text| Value::from(sanitize_and_cut_text(text))).unwrap_or(value);
            let size = name.len() + value.as_str().map_or(20, str::len);
            let Some(left) = room.checked_sub(size) else { break };
            room = left;
            problem.fields.insert(name, value);
        }
        let mut lines = lock_ignoring_poison(&self.0);
        if let Some(last) = lines.back_mut()
            && (last.level, &last.message, &last.fields) == (problem.level, &problem.message, &problem.fields)
        {
            last.times += 1;
            last.time = problem.time;
            return;
        }
        if lines.len() >= MAX_KEPT_LINES {
            lines.pop_front();
        }
        lines.push_back(problem);
    }

    /// Returns the lines, the oldest first.
    pub fn copy_lines(&self) -> Vec<LoggedProblem> {
        lock_ignoring_poison(&self.0).iter().cloned().collect()
    }
}

/// Replaces unprintable characters of `text` but line feeds, and cuts it to [`MAX_TEXT_BYTES`].
fn sanitize_and_cut_text(text: &str) -> String {
    let start = truncate_to_bytes(text, MAX_TEXT_BYTES);
    let mut bounded = replace_unprintable(start);
    if start.len() < text.len() {
        bounded.push_str("...");
    }
    bounded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(message: &str) -> LoggedProblem {
        let fields = [("huge".to_owned(), Value::from("x".repeat(100_000))), ("more".to_owned(), Value::from("y"))];
        LoggedProblem {
            time: "2026-01-01T00:00:00Z".to_owned(),
            level: "warning",
            target: "tollkeeper",
            message: message.to_owned(),
            fields: fields.into_iter().collect(),
            times: 1,
        }
    }

    #[test]
    fn lines_are_bounded_in_number_and_size() {
        let recent = RecentProblems::default();
        for index in 0..1000 {
            recent.add_line(problem(&format!("{index} {}", "z".repeat(100_000))));
        }
        let lines = recent.copy_lines();
        assert_eq!(lines.len(), MAX_KEPT_LINES);
        assert!(lines[0].message.starts_with("900 ") && lines[99].message.starts_with("999 "));
        let bytes: usize = lines.iter().map(|line| serde_json::to_string(line).unwrap().len()).sum();
        assert!(bytes < MAX_KEPT_LINES * (2 * MAX_TEXT_BYTES + 300), "{bytes}");
    }

    #[test]
    fn equal_lines_in_a_row_are_one() {
        let recent = RecentProblems::default();
        for _ in 0..500 {
            recent.add_line(problem("a\u{1b}[31m"));
        }
        recent.add_line(problem("b"));
        let lines = recent.copy_lines();
        let shown: Vec<_> = lines.iter().map(|line| (line.message.as_str(), line.times)).collect();
        assert_eq!(shown, [("a\u{fffd}[31m", 500), ("b", 1)]);
    }
}

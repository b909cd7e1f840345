//! Tables for people: aligned columns under headings, in reports and in the output of commands.
//!
//! Columns are as wide as their widest cell on a terminal, where a Chinese character takes two columns and a combining
//! mark none. Nothing is wrapped or cut, so that output is the same in a terminal, a pipe and a log. Cells must be
//! escaped and have no line breaks.
//!
//! Decides: alignment of columns in printed tables, wide characters included.

use serde::{Deserialize, Serialize};
use unicode_width::UnicodeWidthStr as _;

/// Format of a report.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// JSON, for programs.
    #[default]
    Json,
    /// Tables, for people.
    Text,
}

/// Alignment of cells that begin with a digit or a minus sign; all others are aligned left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberAlignment {
    /// Like text.
    Left,
    /// At the end of the column, so that numbers can be compared.
    Right,
}

/// Formats rows under headings. Two blanks separate columns, and no line ends with a blank.
pub fn format_table<R: AsRef<[String]>>(
    headings: &[&str],
    rows: impl IntoIterator<Item = R>,
    numbers: NumberAlignment,
) -> String {
    let rows: Vec<R> = rows.into_iter().collect();
    let mut widths: Vec<usize> = headings.iter().map(|heading| heading.width()).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row.as_ref()) {
            *width = cell.width().max(*width);
        }
    }
    let mut table = String::new();
    push_row(&mut table, headings.iter().copied(), &widths, NumberAlignment::Left);
    for row in &rows {
        push_row(&mut table, row.as_ref().iter().map(String::as_str), &widths, numbers);
    }
    table
}

fn push_row<'c>(table: &mut String, cells: impl Iterator<Item = &'c str>, widths: &[usize], numbers: NumberAlignment) {
    let start = table.len();
    for (index, (cell, width)) in cells.zip(widths).enumerate() {
        let padding = " ".repeat(width.saturating_sub(cell.width()));
        let is_number = cell.starts_with(|first: char| first.is_ascii_digit() || first == '-');
        let is_last = index + 1 == widths.len();
        *table += &match numbers {
            NumberAlignment::Right if is_number && !is_last => format!("{padding}{cell}  "),
            _ => format!("{cell}{padding}  "),
        };
    }
    table.truncate(start + table[start..].trim_end().len());
    table.push('\n');
}

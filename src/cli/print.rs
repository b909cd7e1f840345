//! How the commands talk: to standard output what was asked for, to standard error what went wrong.
//!
//! A reader that went away, as `head` does, is no error and no panic. What came from a stranger (a value, a file's
//! name, a server's message) is made plain first, so that it can move no cursor and pass for nothing that it is not.
//! There are no colours: what is printed looks the same in a terminal, a pipe and a log.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write as _};

use comfy_table::{Table, presets};

use super::Outcome;
use crate::report::text::plain;

/// Writes to standard output.
pub(super) fn print(text: impl Display) -> io::Result<()> {
    let mut out = io::stdout().lock();
    write!(out, "{text}")?;
    out.flush()
}

/// Says on standard error what went wrong; if nobody listens there, there is nobody to tell.
pub(super) fn complain(what: impl Display) {
    let _ = writeln!(io::stderr(), "tollkeeper: {what}");
}

/// Says on standard error what the output does not: progress, or what it rests on.
pub(super) fn remark(what: impl Display) {
    let _ = write!(io::stderr(), "{what}");
}

/// `outcome`, unless the output could not be written; a reader that went away has seen enough.
pub(super) fn ended(written: io::Result<()>, outcome: Outcome) -> Outcome {
    match written {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            complain(format_args!("standard output: {error}"));
            Outcome::Failed
        }
        _ => outcome,
    }
}

/// `plain`, and no more than 60 characters of it: for a line that has other things to say.
pub(super) fn short(text: &str) -> String {
    const MOST_CHARS: usize = 60;
    match text.char_indices().nth(MOST_CHARS) {
        Some((end, _)) => plain(&text[..end]) + "...",
        None => plain(text),
    }
}

/// Rows under headings, in aligned columns, each line ended; cells must be plain.
pub(super) fn table(headings: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(headings).add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt() + "\n"
}

/// A span of time in words, rounded up from a second on: `1.2 ms`, `34 s`, `2 h 5 min`.
pub(super) fn span(micros: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    match micros {
        0 => return "0 s".to_owned(),
        1..1_000 => return format!("{micros} us"),
        1_000..1_000_000 => return format!("{}.{} ms", micros / 1_000, micros % 1_000 / 100),
        _ => {}
    }
    let seconds = micros.div_ceil(1_000_000);
    // Two of a unit at least: `90 s` says more than `1 min 30 s`, and windows of a minute are the most usual.
    let Some(largest) = UNITS.iter().position(|(unit, _)| seconds >= 2 * *unit) else { return format!("{seconds} s") };
    let (unit, name) = UNITS[largest];
    let mut text = format!("{} {name}", seconds / unit);
    if let Some((next, name)) = UNITS.get(largest + 1)
        && seconds % unit >= *next
    {
        text += &format!(" {} {name}", seconds % unit / next);
    }
    text
}

/// `1 file`, `2 files`.
pub(super) fn count(number: u64, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {what}{plural}")
}

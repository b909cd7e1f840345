//! Output of the commands: results to standard output, errors and progress to standard error; and exit codes.
//!
//! A closed pipe, as after `head`, is neither an error nor a panic. Untrusted text (a value, the name of a file, the
//! message of a server) is escaped first, so that it cannot control the terminal. Verdicts have colours in a terminal,
//! unless NO_COLOR is set; a pipe and a log have none.
//!
//! Decides: the number of each exit code (0, 1, 2); a closed output (`head`).

use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anstream::{AutoStream, ColorChoice};
use anstyle::AnsiColor;

use crate::base::text::truncate_and_escape;
use crate::tools::simulate::results::compute_share;

/// Writes text to standard output.
pub fn print_to_stdout(text: impl Display) -> io::Result<()> {
    let mut out = io::stdout().lock();
    write!(out, "{text}")?;
    out.flush()
}

/// Words of verdicts in tables and explanations: those of requests that pass, and those of others.
const VERDICTS: [(&str, AnsiColor); 4] = [
    ("OVER_LIMIT", AnsiColor::Red),
    ("OK", AnsiColor::Green),
    ("one more hit is rejected", AnsiColor::Red),
    ("one more hit is admitted", AnsiColor::Green),
];

/// Writes a text of this program to standard output, with colours of its verdicts if that is a terminal that shows them
/// (`NO_COLOR`, `CLICOLOR`, `TERM`).
pub(super) fn print_with_colored_verdicts(text: impl Display) -> io::Result<()> {
    match AutoStream::choice(&io::stdout()) {
        ColorChoice::Never => print_to_stdout(text),
        _ => print_to_stdout(color_verdicts(&text.to_string())),
    }
}

/// Adds the colours of verdicts, which stand between spaces or at the end of a line.
fn color_verdicts(text: &str) -> String {
    let mut colored = String::with_capacity(text.len() + text.len() / 8);
    let mut rest = text;
    while !rest.is_empty() {
        let starts_word = colored.is_empty() || colored.ends_with([' ', '\n']);
        let found = VERDICTS.into_iter().find(|(word, _)| {
            let end = rest.strip_prefix(word).filter(|_| starts_word);
            end.is_some_and(|end| end.is_empty() || end.starts_with([' ', '\n', ',', ';', ':']))
        });
        let (part, color) = match found {
            Some((word, color)) => (word, Some(color)),
            None => (&rest[..rest.chars().next().map_or(1, char::len_utf8)], None),
        };
        let style = color.map(AnsiColor::on_default).unwrap_or_default();
        colored += &format!("{style}{part}{style:#}");
        rest = &rest[part.len()..];
    }
    colored
}

/// Writes an error to standard error, and ignores a failure to do so.
pub fn print_error(what: impl Display) {
    let _ = writeln!(io::stderr(), "tollkeeper: {what}");
}

/// Writes why the arguments cannot be used, and returns the outcome of that.
pub(super) fn usage_error(what: impl Display) -> CommandOutcome {
    print_error(what);
    CommandOutcome::UsageError
}

/// Writes progress or a remark to standard error, without a line break.
pub fn print_to_stderr_without_newline(what: impl Display) {
    let _ = write!(io::stderr(), "{what}");
}

/// Line of progress on standard error, if that is a terminal. Dropped, it is cleared.
pub(super) struct ProgressLine {
    /// Time before which the line is not written again; `None`: it is never written.
    next: Option<Instant>,
    is_shown: bool,
}

impl ProgressLine {
    const INTERVAL: Duration = Duration::from_millis(200);
    const CLEAR_LINE: &str = "\r\u{1b}[K";

    pub(super) fn start() -> Self {
        let next = io::stderr().is_terminal().then(|| Instant::now() + Self::INTERVAL);
        Self { next, is_shown: false }
    }

    /// Writes the line again, unless it was written just now.
    pub(super) fn show(&mut self, text: impl FnOnce() -> String) {
        let now = Instant::now();
        if self.next.is_some_and(|next| now >= next) {
            self.next = Some(now + Self::INTERVAL);
            self.is_shown = true;
            print_to_stderr_without_newline(format_args!("{}{}", Self::CLEAR_LINE, text()));
        }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if self.is_shown {
            print_to_stderr_without_newline(Self::CLEAR_LINE);
        }
    }
}

/// Returns `outcome`, or a failure if the output could not be written for another reason than a closed pipe.
pub fn fail_if_unwritten(written: io::Result<()>, outcome: CommandOutcome) -> CommandOutcome {
    match written {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            print_error(format_args!("standard output: {error}"));
            CommandOutcome::Failure
        }
        _ => outcome,
    }
}

/// Escapes untrusted text and cuts it at 60 characters.
pub(super) fn escape_and_shorten(text: &str) -> String {
    truncate_and_escape(text, 60)
}

/// Formats a duration, rounded up from a second on: `1.2 ms`, `34 s`, `2 h 5 min`.
pub(super) fn format_micros(micros: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    match micros {
        0 => return "0 s".to_owned(),
        1..1_000 => return format!("{micros} us"),
        1_000..1_000_000 => return format!("{}.{} ms", micros / 1_000, micros % 1_000 / 100),
        _ => {}
    }
    let seconds = micros.div_ceil(1_000_000);
    // At least two of a unit: `90 s` is clearer than `1 min 30 s`.
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

/// Formats a measured time: three digits from a second on, where `format_micros` rounds up to whole seconds.
pub fn format_latency(micros: u64) -> String {
    let seconds = micros as f64 / 1e6;
    match micros {
        // More would be shown as the next number of digits.
        1_000_000..9_995_000 => format!("{seconds:.2} s"),
        9_995_000..99_950_000 => format!("{seconds:.1} s"),
        _ => format_micros(micros),
    }
}

/// Formats a duration in seconds like `format_micros`.
pub fn format_seconds(seconds: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a duration")]
    format_micros((seconds * 1e6) as u64)
}

/// Formats a number and its share of a whole: `5 (2.50 %)`.
pub(super) fn format_with_share(part: u64, whole: u64) -> String {
    format!("{part} ({:.2} %)", compute_share(part, whole) * 100.0)
}

/// Formats a number with its noun: `1 file`, `2 files`.
pub(super) fn format_with_noun(number: u64, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {what}{plural}")
}

/// Outcome of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandOutcome {
    /// The command succeeded.
    Success,
    /// The command failed, or found problems.
    Failure,
    /// The command line or the settings are invalid.
    UsageError,
}

impl From<CommandOutcome> for ExitCode {
    fn from(outcome: CommandOutcome) -> Self {
        match outcome {
            CommandOutcome::Success => Self::SUCCESS,
            CommandOutcome::Failure => Self::FAILURE,
            CommandOutcome::UsageError => Self::from(2),
        }
    }
}

//! The log: one event a line, to stderr, as text or JSON.
//!
//! The keys and the names of the levels are those of the log that operators of envoyproxy/ratelimit already collect:
//! `@timestamp`, `level`, `@message` in JSON; `time`, `level`, `msg` in text; other fields beside them. No character of
//! a message or field can end its line, start another or steer a terminal: whatever is not printable is escaped, and a
//! value longer than [`MAX_VALUE_BYTES`] is cut. Spans are not written here: they are for traces. The level may be
//! changed while the process runs; what is not written then costs as little as if it had been so from the start.

use std::fmt::{self, Write as _};
use std::sync::{Mutex, OnceLock, PoisonError};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::{LookupSpan, Registry};
use tracing_subscriber::reload::{self, Handle};

use crate::clock::{Clock, Time};

/// The longest value of a message or field that is written, in bytes; the rest is cut.
pub const MAX_VALUE_BYTES: usize = 16 * 1024;

/// The target of an error that ends the process: written with the level `fatal`.
pub const FATAL: &str = "tollkeeper::fatal";

/// The target of the lines that tell who did what to a running process: written at any level.
pub const AUDIT: &str = "tollkeeper::audit";

/// Which events are written: those of the level and the graver ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Level {
    /// Nothing: no event is that grave.
    Panic,
    /// What ends the process.
    Fatal,
    /// What went wrong.
    Error,
    /// What an operator should know, the few lines at the start included.
    #[default]
    Warn,
    /// What happened.
    Info,
    /// What it takes to follow a problem.
    Debug,
    /// Everything, the libraries' own events included.
    Trace,
}

impl Level {
    /// The names as written in `LOG_LEVEL`, gravest first; `warning` is another name of `warn`.
    pub const NAMES: [&str; 8] = ["panic", "fatal", "error", "warn", "warning", "info", "debug", "trace"];

    /// The level of that name, in any case.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name.to_ascii_lowercase().as_str() {
            "panic" => Self::Panic,
            "fatal" => Self::Fatal,
            "error" => Self::Error,
            "warn" | "warning" => Self::Warn,
            "info" => Self::Info,
            "debug" => Self::Debug,
            "trace" => Self::Trace,
            _ => return None,
        })
    }

    /// Its name as it is written in `LOG_LEVEL`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Panic => "panic",
            Self::Fatal => "fatal",
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }

    const fn filter(self) -> LevelFilter {
        match self {
            Self::Panic | Self::Fatal => LevelFilter::OFF,
            Self::Error => LevelFilter::ERROR,
            Self::Warn => LevelFilter::WARN,
            Self::Info => LevelFilter::INFO,
            Self::Debug => LevelFilter::DEBUG,
            Self::Trace => LevelFilter::TRACE,
        }
    }
}

/// How a line looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// `time="..." level=warning msg="..." key=value`
    #[default]
    Text,
    /// `{"@timestamp":"...","level":"warning","@message":"...","key":"value"}`
    Json,
}

/// Why the log can not be begun, or changed.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// It was begun before.
    #[error("the log was begun before")]
    Begun,
    /// [`init`] was not called.
    #[error("the log was not begun")]
    NotBegun,
}

/// The level that [`init`] or [`set`] set last.
static LEVEL: Mutex<Level> = Mutex::new(Level::Warn);
/// By what the level is changed; there once [`init`] was called.
static FILTER: OnceLock<Handle<Targets, Registry>> = OnceLock::new();

/// Sends the events of this process to stderr, from now to its end; an error if it was called before.
pub fn init(level: Level, format: Format) -> Result<(), LogError> {
    let (subscriber, filter) = changeable(level, format, Clock::System, std::io::stderr);
    tracing::subscriber::set_global_default(subscriber).map_err(|_| LogError::Begun)?;
    FILTER.set(filter).map_err(|_| LogError::Begun)?;
    *LEVEL.lock().unwrap_or_else(PoisonError::into_inner) = level;
    Ok(())
}

/// The level in force.
pub fn current() -> Level {
    *LEVEL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Puts another level in force, until the process ends; an error if there is no log yet.
pub fn set(level: Level) -> Result<(), LogError> {
    let filter = FILTER.get().ok_or(LogError::NotBegun)?;
    // Held meanwhile, so that what is told is what is in force.
    let mut current = LEVEL.lock().unwrap_or_else(PoisonError::into_inner);
    filter.reload(targets(level)).map_err(|_| LogError::NotBegun)?;
    *current = level;
    Ok(())
}

/// What [`init`] installs, with a clock and a writer of the caller's choice.
pub fn subscriber<W>(level: Level, format: Format, clock: Clock, writer: W) -> impl Subscriber + Send + Sync
where
    W: for<'writer> MakeWriter<'writer> + Send + Sync + 'static,
{
    changeable(level, format, clock, writer).0
}

fn changeable<W>(
    level: Level,
    format: Format,
    clock: Clock,
    writer: W,
) -> (impl Subscriber + Send + Sync, Handle<Targets, Registry>)
where
    W: for<'writer> MakeWriter<'writer> + Send + Sync + 'static,
{
    let (filter, handle) = reload::Layer::new(targets(level));
    let lines = tracing_subscriber::fmt::layer().event_format(Lines { format, clock }).with_writer(writer);
    (tracing_subscriber::registry().with(filter).with(lines), handle)
}

/// Whose events are written at that level.
fn targets(level: Level) -> Targets {
    let fatal = if level == Level::Panic { LevelFilter::OFF } else { level.filter().max(LevelFilter::ERROR) };
    // The libraries below speak to their developers: only their warnings concern an operator, unless all is asked for.
    let libraries = if level == Level::Trace { LevelFilter::DEBUG } else { level.filter().min(LevelFilter::WARN) };
    Targets::new()
        .with_default(libraries)
        .with_target("tollkeeper", level.filter())
        .with_target(FATAL, fatal)
        .with_target(AUDIT, level.filter().max(LevelFilter::WARN))
}

/// Writes an event as a line.
struct Lines {
    format: Format,
    clock: Clock,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut line = Line { message: String::new(), fields: serde_json::Map::new() };
        event.record(&mut line);
        let written = match self.format {
            Format::Text => line.text(&timestamp(self.clock.now()), level_name(event.metadata())),
            Format::Json => line.json(timestamp(self.clock.now()), level_name(event.metadata())),
        };
        writeln!(writer, "{written}")
    }
}

/// RFC 3339 in UTC, with nine digits of a second, the last three of them 0.
fn timestamp(now: Time) -> String {
    let micros = i64::try_from(now.as_micros()).unwrap_or(i64::MAX);
    let time = jiff::Timestamp::from_microsecond(micros).unwrap_or(jiff::Timestamp::MAX);
    format!("{time:.9}")
}

fn level_name(metadata: &Metadata<'_>) -> &'static str {
    match *metadata.level() {
        tracing::Level::ERROR if metadata.target() == FATAL => "fatal",
        tracing::Level::ERROR => "error",
        tracing::Level::WARN => "warning",
        tracing::Level::INFO => "info",
        tracing::Level::DEBUG => "debug",
        tracing::Level::TRACE => "trace",
    }
}

/// An event, taken apart.
struct Line {
    message: String,
    fields: serde_json::Map<String, serde_json::Value>,
}

impl Line {
    fn text(&self, time: &str, level: &str) -> String {
        let mut line = format!("time=\"{time}\" level={level} msg={}", quoted(&self.message));
        for (name, value) in &self.fields {
            let value = match value {
                serde_json::Value::String(text) if is_plain(text) => text.clone(),
                serde_json::Value::String(text) => quoted(text),
                other => other.to_string(),
            };
            // Writing to a String does not fail.
            let _ = write!(line, " {name}={value}");
        }
        line
    }

    fn json(self, time: String, level: &str) -> String {
        let mut object = serde_json::Map::with_capacity(3 + self.fields.len());
        object.insert("@timestamp".into(), time.into());
        object.insert("level".into(), level.into());
        object.insert("@message".into(), self.message.into());
        for (name, value) in self.fields {
            let name = if object.contains_key(&name) { format!("fields.{name}") } else { name };
            object.insert(name, value);
        }
        // JSON escapes what is below the space; the other characters that can steer a terminal can stand only inside a
        // string, where an escape means the same.
        let plain = serde_json::Value::Object(object).to_string();
        let mut escaped = String::with_capacity(plain.len());
        for c in plain.chars() {
            if is_unprintable(c) {
                let _ = write!(escaped, "\\u{:04x}", u32::from(c));
            } else {
                escaped.push(c);
            }
        }
        escaped
    }

    fn put(&mut self, field: &Field, value: serde_json::Value) {
        match (field.name(), value) {
            ("message", serde_json::Value::String(text)) => self.message = text,
            (name, value) => drop(self.fields.insert(name.to_owned(), value)),
        }
    }
}

impl Visit for Line {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, cut(value).into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, cut(&format!("{value:?}")).into());
    }
}

/// `text`, or as much of it as is written.
fn cut(text: &str) -> String {
    if text.len() <= MAX_VALUE_BYTES {
        return text.to_owned();
    }
    let kept = (0..=MAX_VALUE_BYTES).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    format!("{}... ({} bytes more)", &text[..kept], text.len() - kept)
}

/// `text` in quotes, on one line, with all that is not printable escaped.
fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            c if is_unprintable(c) => drop(write!(quoted, "\\u{:04x}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// Whether a value reads the same without quotes.
fn is_plain(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-._/@^+:".contains(c))
}

/// Controls, line and paragraph separators, and the marks that turn the direction of what follows: all below U+10000.
fn is_unprintable(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

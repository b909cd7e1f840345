//! The log: one event per line on stderr, as text or JSON; and its last warnings and errors, for operators who do not
//! read it.
//!
//! Keys and level names are those of envoyproxy/ratelimit's log: `@timestamp`, `level`, `@message` in JSON; `time`,
//! `level`, `msg` in text; then the other fields. Lines of the audit log have the field `target`, by which they are
//! found. No message or field can end its line, start another or send escape sequences to a terminal: unprintable
//! characters are escaped, and values longer than [`MAX_VALUE_BYTES`] are cut. Spans are not logged; they are for
//! traces. The level can be changed while the process runs, and disabled events stay as cheap as from the start.
//!
//! Of the audit log no line is kept among the last warnings and errors: such lines have descriptors of requests, and
//! clients without the token cause them at any rate. Memory is bounded by the number of lines and the size of each.
//!
//! Decides: which levels there are (`warn`, `warning`), and which lines appear; format of a line.
//! Decides: the longest value in a line; `PUT /log_level`; how many lines `/problems` keeps (`MAX_KEPT_LINES`).

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::sync::{Mutex, OnceLock};

use serde::Serialize;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::registry::{LookupSpan, Registry};
use tracing_subscriber::reload::{self, Handle};

use super::http2_refusals::build_refusal_layer;
use crate::base::clock::{Clock, Time};
use crate::base::named_enum::named_enum;
use crate::base::sharded::lock_ignoring_poison;
use crate::base::text::{escape_unprintable_json, quote_as_json, replace_unprintable, truncate_to_bytes};

/// Maximum length of a message or field value in bytes; the rest is cut.
pub const MAX_VALUE_BYTES: usize = 16 * 1024;

/// Target of an error that ends the process, logged with the level `fatal`.
pub const FATAL_TARGET: &str = "tollkeeper::fatal";

/// Target of the steps of the process's life: start, rules loaded anew, stop. They are information, and logged at the
/// level of warnings too.
pub const LIFECYCLE_TARGET: &str = "tollkeeper::lifecycle";

/// Target of admin actions, logged at every level.
pub const AUDIT_TARGET: &str = "tollkeeper::audit";

named_enum! {
    /// Log level: events of this severity and above are logged.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum Level {
        /// No events.
        Panic = "panic",
        /// Errors that end the process.
        Fatal = "fatal",
        /// Errors.
        Error = "error",
        /// Warnings, and the steps of the process's life.
        #[default]
        Warn = "warn" | "warning",
        /// Information.
        Info = "info",
        /// Details for debugging.
        Debug = "debug",
        /// All events, including those of libraries.
        Trace = "trace",
    }
}

impl Level {
    /// Parses a word of `LOG_LEVEL`, ignoring case.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ACCEPTED_WORDS.iter().find(|(word, _)| word.eq_ignore_ascii_case(text)).map(|(_, level)| *level)
    }

    const fn level_filter(self) -> LevelFilter {
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

named_enum! {
    /// Format of lines.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum Format {
        /// `time="..." level=warning msg="..." key=value`
        #[default]
        Text = "text" | "",
        /// `{"@timestamp":"...","level":"warning","@message":"...","key":"value"}`
        Json = "json",
    }
}

/// Error of setting up or changing the log.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// [`init`] was called before.
    #[error("the log is initialized already")]
    AlreadyInitialized,
    /// [`init`] was not called.
    #[error("the log is not initialized")]
    NotInitialized,
}

/// Level of the last call of [`init`] or [`set_level`].
static CURRENT_LEVEL: Mutex<Level> = Mutex::new(Level::Warn);
/// Handle that changes the level, set by [`init`].
static FILTER_HANDLE: OnceLock<Handle<Targets, Registry>> = OnceLock::new();

/// Starts to log the events of this process to stderr; an error if it was called before.
pub fn init(level: Level, format: Format) -> Result<(), LogError> {
    let (subscriber, filter) = build_subscriber_and_handle(level, format, Clock::System, std::io::stderr);
    tracing::subscriber::set_global_default(subscriber).map_err(|_| LogError::AlreadyInitialized)?;
    FILTER_HANDLE.set(filter).map_err(|_| LogError::AlreadyInitialized)?;
    *lock_ignoring_poison(&CURRENT_LEVEL) = level;
    Ok(())
}

/// Current level.
pub fn current_level() -> Level {
    *lock_ignoring_poison(&CURRENT_LEVEL)
}

/// Changes the level until the process ends; an error before [`init`].
pub fn set_level(level: Level) -> Result<(), LogError> {
    let filter = FILTER_HANDLE.get().ok_or(LogError::NotInitialized)?;
    // Locked during the change, so that `current_level` agrees with the filter.
    let mut current = lock_ignoring_poison(&CURRENT_LEVEL);
    filter.reload(build_target_filter(level)).map_err(|_| LogError::NotInitialized)?;
    *current = level;
    Ok(())
}

/// Builds the subscriber that [`init`] installs, with a clock and writer of the caller's choice.
pub fn build_subscriber<W>(level: Level, format: Format, clock: Clock, writer: W) -> impl Subscriber + Send + Sync
where
    W: for<'writer> MakeWriter<'writer> + Send + Sync + 'static,
{
    build_subscriber_and_handle(level, format, clock, writer).0
}

/// Builds the subscriber, and the handle that changes its level.
fn build_subscriber_and_handle<W>(
    level: Level,
    format: Format,
    clock: Clock,
    writer: W,
) -> (impl Subscriber + Send + Sync, Handle<Targets, Registry>)
where
    W: for<'writer> MakeWriter<'writer> + Send + Sync + 'static,
{
    let (filter, handle) = reload::Layer::new(build_target_filter(level));
    let lines = tracing_subscriber::fmt::layer().event_format(LineFormatter { format, clock }).with_writer(writer);
    let subscriber = tracing_subscriber::registry().with(lines.with_filter(filter));
    (subscriber.with(build_refusal_layer()), handle)
}

/// Builds the filter of a level: this crate's events at the level, those of libraries from warnings on.
fn build_target_filter(level: Level) -> Targets {
    let fatal = if level == Level::Panic { LevelFilter::OFF } else { level.level_filter().max(LevelFilter::ERROR) };
    // Events of libraries below warnings are for their developers.
    let libraries =
        if level == Level::Trace { LevelFilter::DEBUG } else { level.level_filter().min(LevelFilter::WARN) };
    // A client makes h2 warn once for each frame that it sends.
    let h2 = if level == Level::Trace { LevelFilter::DEBUG } else { LevelFilter::OFF };
    let is_above_errors = level.level_filter() >= LevelFilter::WARN;
    let lifecycle = if is_above_errors { level.level_filter().max(LevelFilter::INFO) } else { level.level_filter() };
    Targets::new()
        .with_default(libraries)
        .with_target("h2", h2)
        .with_target("tollkeeper", level.level_filter())
        .with_target(LIFECYCLE_TARGET, lifecycle)
        .with_target(FATAL_TARGET, fatal)
        .with_target(AUDIT_TARGET, level.level_filter().max(LevelFilter::WARN))
}

/// Writes events as lines.
struct LineFormatter {
    format: Format,
    clock: Clock,
}

impl<S, N> FormatEvent<S, N> for LineFormatter
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut line = EventLine { message: String::new(), fields: Map::new() };
        if event.metadata().target() == AUDIT_TARGET {
            line.fields.insert("target".to_owned(), AUDIT_TARGET.into());
        }
        event.record(&mut line);
        line.record_recent_problem(event.metadata(), self.clock.now());
        let written = match self.format {
            Format::Text => line.format_text(&format_timestamp(self.clock.now()), level_name(event.metadata())),
            Format::Json => line.format_json(format_timestamp(self.clock.now()), level_name(event.metadata())),
        };
        writeln!(writer, "{written}")
    }
}

/// Formats a time as RFC 3339 in UTC, with nine digits of the second of which the last three are 0.
fn format_timestamp(now: Time) -> String {
    let micros = i64::try_from(now.as_micros()).unwrap_or(i64::MAX);
    let time = jiff::Timestamp::from_microsecond(micros).unwrap_or(jiff::Timestamp::MAX);
    format!("{time:.9}")
}

/// Path of a module of the program, whichever of its crates has the module: it begins with `tollkeeper::`.
fn module_path(target: &'static str) -> Cow<'static, str> {
    match target.split_once("::") {
        Some((name, module)) if name.starts_with("tollkeeper_") => format!("tollkeeper::{module}").into(),
        _ => target.into(),
    }
}

fn level_name(metadata: &Metadata<'_>) -> &'static str {
    match *metadata.level() {
        tracing::Level::ERROR if metadata.target() == FATAL_TARGET => "fatal",
        tracing::Level::ERROR => "error",
        tracing::Level::WARN => "warning",
        tracing::Level::INFO => "info",
        tracing::Level::DEBUG => "debug",
        tracing::Level::TRACE => "trace",
    }
}

/// Message and fields of an event.
struct EventLine {
    message: String,
    fields: Map<String, Value>,
}

impl EventLine {
    /// Keeps a warning or an error for the page of problems.
    fn record_recent_problem(&self, metadata: &'static Metadata<'static>, now: Time) {
        if *metadata.level() > tracing::Level::WARN || metadata.target() == AUDIT_TARGET {
            return;
        }
        RECENT_PROBLEMS.add_line(LoggedProblem {
            time: now.to_string(),
            level: level_name(metadata),
            target: module_path(metadata.target()),
            message: self.message.clone(),
            fields: self.fields.clone(),
            times: 1,
        });
    }

    fn format_text(&self, time: &str, level: &str) -> String {
        let mut line = format!("time=\"{time}\" level={level} msg={}", quote_as_json(&self.message));
        for (name, value) in &self.fields {
            let value = match value {
                Value::String(text) if needs_no_quotes(text) => text.clone(),
                Value::String(text) => quote_as_json(text),
                other => other.to_string(),
            };
            // Writing to a String does not fail.
            let _ = write!(line, " {name}={value}");
        }
        line
    }

    fn format_json(self, time: String, level: &str) -> String {
        let mut object = Map::with_capacity(3 + self.fields.len());
        object.insert("@timestamp".into(), time.into());
        object.insert("level".into(), level.into());
        object.insert("@message".into(), self.message.into());
        for (name, value) in self.fields {
            let name = if object.contains_key(&name) { format!("fields.{name}") } else { name };
            object.insert(name, value);
        }
        escape_unprintable_json(&Value::Object(object).to_string()).into_owned()
    }

    fn insert_field(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(text)) => self.message = text,
            (name, value) => drop(self.fields.insert(name.to_owned(), value)),
        }
    }
}

impl Visit for EventLine {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.insert_field(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.insert_field(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.insert_field(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.insert_field(field, value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.insert_field(field, cut_value(value).into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.insert_field(field, cut_value(&format!("{value:?}")).into());
    }
}

/// Cuts `text` to [`MAX_VALUE_BYTES`].
fn cut_value(text: &str) -> String {
    if text.len() <= MAX_VALUE_BYTES {
        return text.to_owned();
    }
    let start = truncate_to_bytes(text, MAX_VALUE_BYTES);
    format!("{start}... ({} bytes more)", text.len() - start.len())
}

/// True if a value needs no quotes.
fn needs_no_quotes(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-._/@^+:".contains(c))
}

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
    /// Module that logged it, as if the program were one crate.
    pub target: Cow<'static, str>,
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

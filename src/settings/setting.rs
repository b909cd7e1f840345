//! What is known about one environment variable.
//!
//! A `Setting` is a row of the table: parsing, refusing, `--help`, `docs/settings.md` and `check --env` all read it, so
//! they can not disagree. It holds data only; the values themselves are elsewhere.

use std::fmt;
use std::time::Duration;

/// One environment variable, or a family of them.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// The variable's name; ending in `*`, all names that begin like it.
    pub name: &'static str,
    /// What its value may be.
    pub kind: Kind,
    /// The text that stands for it where it is not set; of its kind, or empty.
    pub default: &'static str,
    /// Where it stands in the documentation.
    pub group: Group,
    /// What this program does with it.
    pub status: Status,
    /// What it means, with its unit; one line.
    pub doc: &'static str,
}

impl Setting {
    /// Whether `name` is this setting's name or of its family.
    pub fn covers(&self, name: &str) -> bool {
        match self.name.strip_suffix('*') {
            Some(family) => name.starts_with(family),
            None => name == self.name,
        }
    }
}

/// What a value may be, and its bounds, both inclusive.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "min and max are the bounds named above")]
pub enum Kind {
    /// `true`, `false`, or Go's other words for them.
    Bool,
    /// A whole number; `0x`, `0o`, `0b` and a leading `0` choose its base.
    Int { min: i64, max: i64 },
    /// A decimal number.
    Float { min: f64, max: f64 },
    /// A duration in Go's syntax; 0 is taken too where `zero` says so.
    Duration { min: Duration, max: Duration, zero: bool },
    /// A size: plain bytes, or with KiB, MiB or GiB.
    Bytes { min: u64, max: u64 },
    /// Any text.
    Text,
    /// A path of a file or directory.
    Path,
    /// Texts, parted by commas.
    List,
    /// `key:value` pairs, parted by commas.
    Map,
    /// The name of an HTTP header, or nothing.
    Header,
    /// `host:port`; the host may be missing.
    Address,
    /// One of these words.
    OneOf { words: &'static [&'static str], any_case: bool },
    /// Text that is never shown.
    Secret,
    /// Text whose credentials are never shown.
    Url,
}

/// Names the kind, with its bounds where they tell something: `int, 0 to 65535`.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Bool => f.write_str("bool"),
            Self::Int { min: i64::MIN, .. } => f.write_str("int"),
            Self::Int { min, max: i64::MAX } => write!(f, "int, {min} or more"),
            Self::Int { min, max } => write!(f, "int, {min} to {max}"),
            Self::Float { min: f64::MIN, .. } => f.write_str("float"),
            Self::Float { min, max } => write!(f, "float, {min} to {max}"),
            Self::Duration { max, .. } if max >= LONGEST => f.write_str("duration"),
            Self::Duration { min, max, zero } => {
                let zero = if zero && !min.is_zero() { "0 or " } else { "" };
                write!(f, "duration, {zero}{} to {}", DurationText(min), DurationText(max))
            }
            Self::Bytes { min, max } => write!(f, "bytes, {} to {}", BytesText(min), BytesText(max)),
            Self::Text => f.write_str("text"),
            Self::Path => f.write_str("path"),
            Self::List => f.write_str("list: a,b"),
            Self::Map => f.write_str("map: k:v,k:v"),
            Self::Header => f.write_str("header name"),
            Self::Address => f.write_str("host:port"),
            Self::OneOf { words, .. } => f.write_str(&one_of(words)),
            Self::Secret => f.write_str("secret text"),
            Self::Url => f.write_str("address, may hold a secret"),
        }
    }
}

/// What a Go duration can hold, rounded to whole hours: about 292 years.
pub(crate) const LONGEST: Duration = Duration::from_secs(2_562_047 * 3600);

/// `a, b or c`; an empty word is left out.
pub(crate) fn one_of(words: &[&str]) -> String {
    let words: Vec<&str> = words.iter().copied().filter(|word| !word.is_empty()).collect();
    match words.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => String::new(),
    }
}

/// Writes a duration as it may be given: in the largest unit that holds it without a fraction.
pub(crate) struct DurationText(pub(crate) Duration);

impl fmt::Display for DurationText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u128, &str); 6] = [
            (3_600_000_000_000, "h"),
            (60_000_000_000, "m"),
            (1_000_000_000, "s"),
            (1_000_000, "ms"),
            (1_000, "us"),
            (1, "ns"),
        ];
        let nanos = self.0.as_nanos();
        match UNITS.iter().find(|(unit, _)| nanos >= *unit && nanos.is_multiple_of(*unit)) {
            Some((unit, name)) => write!(f, "{}{name}", nanos / unit),
            None => f.write_str("0"),
        }
    }
}

/// Writes a size as it may be given: in the largest unit that holds it without a fraction.
pub(crate) struct BytesText(pub(crate) u64);

impl fmt::Display for BytesText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = BYTE_UNITS.iter().find(|(_, bytes)| self.0 >= *bytes && self.0.is_multiple_of(*bytes));
        match unit {
            Some((name, bytes)) => write!(f, "{}{name}", self.0 / bytes),
            None => write!(f, "{}", self.0),
        }
    }
}

/// The units of sizes, largest first.
pub(crate) const BYTE_UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// What this program does with a variable.
#[derive(Clone, Copy, Debug)]
pub enum Status {
    /// What it says.
    Honoured,
    /// What it says, but not quite as envoyproxy/ratelimit does.
    Differs(&'static str),
    /// Nothing, which changes no verdict; worth a warning when the value asks for something.
    NoEffect {
        /// Which values ask for something.
        when: When,
        /// Why nothing is done.
        why: &'static str,
    },
    /// The first of these that applies stops the start; a value to which none applies is honoured.
    Refused(&'static [Refusal]),
}

/// A value that would change verdicts or security, and is not implemented.
#[derive(Clone, Copy, Debug)]
pub struct Refusal {
    /// Which values are refused.
    pub when: When,
    /// What is missing.
    pub why: &'static str,
    /// What to do about it.
    pub instead: &'static str,
}

/// Some of the values that a variable can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// All, the empty text included.
    Set,
    /// All but the empty text.
    Filled,
    /// Whatever means true.
    True,
    /// This very text.
    Is(&'static str),
    /// All but this text and the empty one.
    Not(&'static str),
}

impl When {
    /// Whether `text` is such a value.
    pub fn applies(self, text: &str) -> bool {
        match self {
            Self::Set => true,
            Self::Filled => !text.is_empty(),
            Self::True => super::parse::bool(text) == Some(true),
            Self::Is(word) => text == word,
            Self::Not(word) => !text.is_empty() && text != word,
        }
    }
}

/// Completes "refused ..." in the documentation.
impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Set => f.write_str("when set"),
            Self::Filled => f.write_str("unless empty"),
            Self::True => f.write_str("when true"),
            Self::Is(word) => write!(f, "when {word}"),
            Self::Not(word) => write!(f, "unless {word}"),
        }
    }
}

/// Where a setting stands in the documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the titles below say it")]
pub enum Group {
    Listeners,
    Grpc,
    Bounds,
    Tls,
    Rules,
    Answers,
    Counters,
    Process,
    Logs,
    Metrics,
    Tracing,
    Xds,
    Redis,
    Memcache,
}

impl Group {
    /// All, in the order of the documentation.
    pub const ALL: [Self; 14] = [
        Self::Listeners,
        Self::Grpc,
        Self::Bounds,
        Self::Tls,
        Self::Rules,
        Self::Answers,
        Self::Counters,
        Self::Process,
        Self::Logs,
        Self::Metrics,
        Self::Tracing,
        Self::Xds,
        Self::Redis,
        Self::Memcache,
    ];

    /// The heading of its settings.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Listeners => "Listeners",
            Self::Grpc => "gRPC",
            Self::Bounds => "What clients may take",
            Self::Tls => "TLS of the listeners",
            Self::Rules => "Rules and their files",
            Self::Answers => "Answers",
            Self::Counters => "Counters",
            Self::Process => "Process",
            Self::Logs => "Logs",
            Self::Metrics => "Metrics",
            Self::Tracing => "Tracing",
            Self::Xds => "Rules over xDS",
            Self::Redis => "Counters in Redis",
            Self::Memcache => "Counters in memcache",
        }
    }
}

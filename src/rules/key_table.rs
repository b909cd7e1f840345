//! The row of a key: its sections, the type of its value, default and description.
//!
//! The keys are declared in `document`. The reader, the JSON Schema and the messages about unknown and misplaced keys
//! follow from the rows, and tests compare `config/reference.yaml` with them.
//!
//! Decides: largest numbers (`epoch`, `over_limit_body`).

use Section::{
    Active, Ban, Defaults, DefaultsFile, Descriptor, DomainDefaults, Limit, Match, MatchSet, Matching, Negation, Plan,
    RateLimit, Replaces, ReservationPolicy, Root, Window,
};

use crate::base::named_enum::named_enum;

named_enum! {
    /// Kind of mapping in a rule file, with its name in the schema.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Section {
        /// The document itself.
        Root = "document",
        /// `defaults:` of the document.
        Defaults = "defaults",
        /// `matching:` of the document.
        Matching = "matching",
        /// An element of `descriptors:`.
        Descriptor = "descriptor",
        /// `match:` of a descriptor.
        Match = "match",
        /// `not:` of a `match:`.
        Negation = "not",
        /// `in:` or `cidr:` of a `match:`, written as a mapping.
        MatchSet = "match_set",
        /// `rate_limit:` written as a mapping.
        RateLimit = "rate_limit",
        /// An element of `rate_limit:` written as a list.
        Limit = "limit",
        /// An element of `replaces:`.
        Replaces = "replaces",
        /// `window:` of a limit.
        Window = "window",
        /// `ban:` of a limit, written as a mapping.
        Ban = "ban",
        /// `reservations:` of a limit, written as a mapping.
        ReservationPolicy = "reservations",
        /// `active:` of a limit.
        Active = "active",
        /// `plan:` of a descriptor.
        Plan = "plan",
        /// A value of `tables:`.
        Table = "table",
        /// The file of `TOLLKEEPER_RULE_DEFAULTS`.
        DefaultsFile = "defaults_file",
        /// A domain in that file.
        DomainDefaults = "domain_defaults",
    }
}

impl Section {
    /// Name in messages, after "in".
    pub(crate) const fn message_phrase(self) -> &'static str {
        match self {
            Root => "the document itself",
            Defaults => "`defaults`",
            Matching => "`matching`",
            Descriptor => "a descriptor",
            Match => "a `match`",
            Negation => "a `not`",
            MatchSet => "a set of a `match`",
            RateLimit => "a `rate_limit`",
            Limit => "a list of limits",
            Replaces => "`replaces`",
            Window => "`window`",
            Ban => "`ban`",
            ReservationPolicy => "`reservations`",
            Active => "`active`",
            Plan => "`plan`",
            Self::Table => "a table",
            DefaultsFile => "a file of defaults",
            DomainDefaults => "a domain of a file of defaults",
        }
    }

    /// What a section is called in messages about a value of another type: the Go type into which envoyproxy/ratelimit
    /// reads it, or a word for a section that it does not have.
    pub(crate) const fn type_in_messages(self) -> &'static str {
        match self {
            Root => "map[interface {}]interface {}",
            Descriptor => "config.YamlDescriptor",
            RateLimit | Limit => "config.YamlRateLimit",
            Replaces => "config.yamlReplaces",
            Plan => "a plan",
            Self::Table => "a table",
            DefaultsFile | DomainDefaults => "defaults",
            _ => self.name(),
        }
    }

    /// Returns `true` for a section of a rule file.
    pub fn is_in_rule_files(self) -> bool {
        !matches!(self, DefaultsFile | DomainDefaults)
    }
}

/// Type of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    /// Text; a plain number, date or boolean counts as text.
    Text,
    /// Text of 64 KiB at most.
    Body,
    /// Text that can be the value of a header.
    ContentType,
    /// Mapping from names of headers to their values.
    Headers,
    /// Whole number between these, inclusive.
    Count(u64, u64),
    /// Boolean.
    Flag,
    /// Duration, or a mapping.
    DurationOrTable(Section),
    /// Days of the week as text, or as a list.
    Days,
    /// Time of day, `HH:MM`.
    TimeOfDay,
    /// Day of the calendar, `YYYY-MM-DD`.
    Day,
    /// Duration in Go's notation, such as `1h30m`, 366 days at most.
    Duration,
    /// Duration of whole seconds, from 1 s to 366 days.
    WholeSeconds,
    /// Percentage or number of hits.
    Overshoot,
    /// Percentage: at least so many thousandths of a percent, and 100 % at most.
    Percentage(u32),
    /// List of such percentages.
    Percentages(u32),
    /// One of these words.
    Choice(&'static [&'static str]),
    /// Unit of time; case is ignored.
    Unit,
    /// Mapping.
    Table(Section),
    /// List of mappings.
    Tables(Section),
    /// One limit as a mapping, or several as a list of mappings.
    Limits,
    /// List of texts, or a mapping with the name of a file.
    Set,
    /// Mapping from names to such limits.
    NamedLimits,
    /// Mapping from names to mappings.
    NamedTables(Section),
    /// Mapping with any content.
    Free,
}

named_enum! {
    /// Value of `consistency`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ConsistencyWord {
        /// Every hit is counted in the store first.
        Strict = "strict",
        /// Hits are admitted from the process, within `max_overshoot`.
        Eventual = "eventual",
    }
}

named_enum! {
    /// Value of `scope`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ScopeWord {
        /// Each region has the limit for itself.
        Region = "region",
        /// All regions have the limit together.
        Global = "global",
    }
}

/// A key of a rule file.
#[derive(Clone, Copy, Debug)]
pub struct RuleFileKey {
    /// Name as written.
    pub name: &'static str,
    /// Envoyproxy/ratelimit has the key too.
    pub peer: bool,
    /// Sections to which it belongs.
    pub sections: &'static [Section],
    /// Type of its value.
    pub kind: ValueKind,
    /// Default in YAML; empty if there is none, or if it depends on other keys.
    pub default: &'static str,
    /// Description in one or two sentences.
    pub doc: &'static str,
}

/// Maximum epoch: above it, a double is not exact.
pub const MAX_EPOCH: u64 = 1 << 53;

/// Maximum length of `over_limit_body`, in bytes.
pub const MAX_OVER_LIMIT_BODY_BYTES: usize = 64 * 1024;

impl RuleFileKey {
    /// Returns `true` if the key can be written in `section`.
    pub fn belongs_in(&self, section: Section) -> bool {
        self.sections.contains(&section)
    }
}

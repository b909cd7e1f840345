//! Sections of a rule file, types of values, and the keys of all sections.
//!
//! A key is declared once, in [`rule_keys!`](crate::rules::document::keys::rule_keys): name, type, default and
//! description. The reader, the JSON Schema and the messages about unknown and misplaced keys follow from that row, and
//! tests compare `config/reference.yaml` with it. In a wrong section, a key of envoyproxy/ratelimit (`peer`) is ignored.
//!
//! Decides: largest numbers (`epoch`, `over_limit_body`); `did you mean`.

use Section::{
    Active, Ban, Defaults, DefaultsFile, Descriptor, DomainDefaults, Limit, Match, MatchSet, Matching, Negation, Plan,
    RateLimit, Replaces, ReservationPolicy, Root, Window,
};

use super::document::defaults::DefaultableKeys;
use super::document::matching::{MatchKeys, MatchSetKeys, MatchingSpec};
use super::document::times::{ActiveKeys, BanKeys, ReservationKeys, WindowKeys};
use super::document::{DescriptorSpec, Document, PlanChoiceSpec, RateLimitEntry, ReplacesKeys, TableSpec};
use super::rule_defaults::DefaultsFileKeys;
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

    /// Go type into which envoyproxy/ratelimit reads the section, in messages about a value of another type; for a
    /// section that it does not have, the name.
    pub(crate) const fn go_type(self) -> &'static str {
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
    pub fn is_of_rule_files(self) -> bool {
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
    /// Duration in Go's notation, such as `1h30m`, 366 days at most.
    Duration,
    /// Duration of whole seconds, from 1 s to 366 days.
    WholeSeconds,
    /// Percentage or number of hits.
    Overshoot,
    /// Percentage.
    Percentage,
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

/// Returns the keys of all sections.
pub fn rule_file_keys() -> impl Iterator<Item = &'static RuleFileKey> {
    let tables: [&'static [RuleFileKey]; 15] = [
        Document::KEYS,
        DefaultableKeys::KEYS,
        MatchingSpec::KEYS,
        DescriptorSpec::KEYS,
        MatchKeys::KEYS,
        MatchSetKeys::KEYS,
        RateLimitEntry::KEYS,
        ReplacesKeys::KEYS,
        WindowKeys::KEYS,
        BanKeys::KEYS,
        ReservationKeys::KEYS,
        ActiveKeys::KEYS,
        PlanChoiceSpec::KEYS,
        TableSpec::KEYS,
        DefaultsFileKeys::KEYS,
    ];
    tables.into_iter().flatten()
}

impl RuleFileKey {
    /// Returns `true` if the key can be written in `section`.
    pub fn belongs_in(&self, section: Section) -> bool {
        self.sections.contains(&section)
    }

    /// Returns the sections in which a key of this name can be written, outermost first; only those of the same kind
    /// of file as `section`, if there are any.
    pub(crate) fn sections_of_name(&self, section: Section) -> Vec<Section> {
        let has_key = |at: &Section| rule_file_keys().any(|key| key.name == self.name && key.belongs_in(*at));
        let all: Vec<Section> = Section::ALL.into_iter().filter(has_key).collect();
        let same_file = |at: &Section| at.is_of_rule_files() == section.is_of_rule_files();
        if all.iter().any(same_file) { all.into_iter().filter(same_file).collect() } else { all }
    }
}

/// Returns the key of that name that belongs in `section`, else that of another section.
pub fn find_rule_file_key(name: &str, section: Section) -> Option<&'static RuleFileKey> {
    let mut named = rule_file_keys().filter(|key| key.name == name);
    let first = named.next()?;
    Some(if first.belongs_in(section) { first } else { named.find(|key| key.belongs_in(section)).unwrap_or(first) })
}

/// Returns the key of `section` that is most similar to `name`, if one is similar enough.
pub(crate) fn nearest_rule_file_key(name: &str, section: Section) -> Option<&'static str> {
    // Bounded, because a comparison takes time proportional to the length.
    if name.len() > 40 {
        return None;
    }
    let lower = name.to_ascii_lowercase().replace('-', "_");
    rule_file_keys()
        .filter(|key| key.belongs_in(section))
        .map(|key| (strsim::normalized_damerau_levenshtein(&lower, key.name), key.name))
        .filter(|(likeness, _)| *likeness >= 0.6)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}

//! The table of keys of a rule file: sections, type, default and description of each.
//!
//! The reader rejects keys that are not in the table, the JSON Schema is generated from it, and tests compare the code
//! and `config/reference.yaml` with it. In a wrong section, a key of envoyproxy/ratelimit (`peer`) is ignored.
//!
//! Decides: keys of a rule file: where, defaults, largest numbers (`concurrent`, `requests_per_unit`); `did you mean`.

use crate::base::named_enum::named_enum;
use crate::limit::algorithm::Algorithm;
use crate::limit::ban::MAX_REJECTIONS_BEFORE_BAN;
use crate::limit::calendar::Weekday;
use crate::limit::reservation::UnsettledPolicy;
use crate::limit::window::MonthLength;
use crate::limit::{RegionLossPolicy, StoreFailurePolicy};
use crate::rules::rule::{EntryOrder, RuleLogging};
use Section::{
    Active, Ban, Defaults, DefaultsFile, Descriptor, DomainDefaults, Limit, Match, MatchSet, Matching, Negation, Plan,
    RateLimit, Replaces, ReservationPolicy, Root, Window,
};
use ValueKind::{
    Choice, Count, Days, Duration, DurationOrTable, Flag, Free, Limits, NamedLimits, NamedTables, Overshoot,
    Percentage, Set, Table, Tables, Text, TimeOfDay, Unit,
};

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
    /// All sections of a rule file, outermost first.
    pub const RULE_FILE_SECTIONS: [Self; 16] = [
        Root,
        Defaults,
        Matching,
        Descriptor,
        Match,
        Negation,
        MatchSet,
        RateLimit,
        Limit,
        Replaces,
        Window,
        Ban,
        ReservationPolicy,
        Active,
        Plan,
        Self::Table,
    ];

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

    /// Returns `true` for a section of a rule file.
    pub(crate) fn is_of_rule_files(self) -> bool {
        Self::RULE_FILE_SECTIONS.contains(&self)
    }
}

/// Type of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    /// Text; a plain number, date or boolean counts as text.
    Text,
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

/// Description of `after` of a ban.
const BAN_AFTER_HELP: &str =
    "The ban begins with this rejection. Rejections add up as long as less than a period lies between two.";
/// Description of `estimate`.
const ESTIMATE_DOC: &str = "Estimate of every request. If absent: its hits_addend.";

/// Maximum length of `over_limit_body`, in bytes.
pub const MAX_OVER_LIMIT_BODY_BYTES: usize = 64 * 1024;

/// The table, in the order of the documentation.
pub const RULE_FILE_KEYS: &[RuleFileKey] = &[
    define_envoy_key(
        "domain",
        &[Root],
        Text,
        "",
        "The namespace that requests name. Required, and unique over all files unless domains are merged.",
    ),
    define_tollkeeper_key(
        "defaults",
        &[Root],
        Table(Defaults),
        "",
        "Defaults for every rule of the domain, and for limits that are sent with a request.",
    ),
    define_tollkeeper_key(
        "plans",
        &[Root],
        NamedLimits,
        "",
        "Named limits for `plan`: each is one limit as a mapping, or several as a list, as in `rate_limit`.",
    ),
    define_tollkeeper_key(
        "tables",
        &[Root],
        NamedTables(Section::Table),
        "",
        "Tables that map values to plans, by name.",
    ),
    define_tollkeeper_key(
        "file",
        &[Section::Table],
        Text,
        "",
        "File of the table, relative to the directory of the rule file: .csv with a heading, or .jsonl. It is watched.",
    ),
    define_tollkeeper_key(
        "redis",
        &[Section::Table],
        Text,
        "",
        "Name of a table in the Redis of the counters, in place of file: a hash from values to plans or limits.",
    ),
    define_tollkeeper_key(
        "keep",
        &[Section::Table],
        Duration,
        "",
        "redis only: lifetime of a row in this process; absent: 5m. A row that is used is looked up again after half of it. 1s to 24h.",
    ),
    define_envoy_key(
        "descriptors",
        &[Root, Descriptor],
        Tables(Descriptor),
        "",
        "The rules of this level, in order. An entry matches one of them: the exact value, else the first wildcard or match in this order, else the bare key.",
    ),
    define_tollkeeper_key("matching", &[Root], Table(Matching), "", "How the descriptors of the domain are matched."),
    define_tollkeeper_key(
        "order",
        &[Matching],
        Choice(EntryOrder::NAMES),
        "as_written",
        "as_written: entries must come in the order of the rules. any: in any order they match the same rule and counter.",
    ),
    define_tollkeeper_key(
        "backtrack",
        &[Matching],
        Flag,
        "false",
        "If a better match has no rule for the entries after it, the next match is tried.",
    ),
    define_envoy_key(
        "key",
        &[Descriptor, Plan],
        Text,
        "",
        "The key of a descriptor entry. Required. In `plan`: the key of the entry whose value is looked up, if it is not the last.",
    ),
    define_envoy_key(
        "value",
        &[Descriptor],
        Text,
        "",
        "The value of the entry. If absent: any value, each with a counter of its own. Each `*` matches any run of characters, also an empty one.",
    ),
    define_tollkeeper_key(
        "match",
        &[Descriptor],
        Table(Match),
        "",
        "The values of the entry, by one operator, in place of value.",
    ),
    define_tollkeeper_key("in", &[Match, Negation], Set, "", "The value is one of these, or of the lines of a file."),
    define_tollkeeper_key(
        "cidr",
        &[Match, Negation],
        Set,
        "",
        "The value is the text of an address in one of these networks, or of the lines of a file.",
    ),
    define_tollkeeper_key(
        "regex",
        &[Match, Negation],
        Text,
        "",
        "The regular expression matches the whole value, as bytes; `.` is any byte. It takes linear time.",
    ),
    define_tollkeeper_key("not", &[Match], Table(Negation), "", "The operator in it does not match."),
    define_tollkeeper_key(
        "file",
        &[MatchSet],
        Text,
        "",
        "The name of a .txt or .list file with one entry a line, relative to the directory of the rule file.",
    ),
    define_envoy_key(
        "rate_limit",
        &[Descriptor],
        Limits,
        "",
        "Limits of a descriptor that ends here: one as a mapping, or several as a list, all of which must pass. If absent: no limit.",
    ),
    define_tollkeeper_key(
        "plan",
        &[Descriptor],
        Table(Plan),
        "",
        "Plan whose limits decide, chosen by a table for each value; in place of rate_limit.",
    ),
    define_tollkeeper_key("from", &[Plan], Text, "", "Name of the table. Required."),
    define_tollkeeper_key("default", &[Plan], Text, "", "Plan of values without a row. Required."),
    define_envoy_key(
        "unit",
        &[RateLimit, Limit],
        Unit,
        "",
        "The unit of the period; only a limit of 0 needs none: second, minute, hour, day, week (from Thursday 00:00 UTC), month (30 days) or year (365 days).",
    ),
    define_tollkeeper_key(
        "unit_multiplier",
        &[RateLimit, Limit],
        Count(1, u32::MAX as u64),
        "1",
        "The period is the unit times this, 366 days at most.",
    ),
    define_envoy_key(
        "requests_per_unit",
        &[RateLimit, Limit],
        Count(0, u32::MAX as u64),
        "0",
        "Hits allowed in a period; 0 rejects everything.",
    ),
    define_envoy_key("unlimited", &[RateLimit], Flag, "false", "Admits everything, uncounted. Must not have a unit."),
    define_tollkeeper_key(
        "algorithm",
        &[Defaults, RateLimit, Limit],
        Choice(Algorithm::NAMES),
        "fixed_window",
        "Algorithm that counts hits.",
    ),
    define_tollkeeper_key(
        "window",
        &[Defaults, RateLimit, Limit],
        Table(Window),
        "",
        "fixed_window only: its windows follow the calendar of a time zone. Without the key they have the length of the period, counted from 1970 in UTC.",
    ),
    define_tollkeeper_key(
        "timezone",
        &[Window, Active],
        Text,
        "UTC",
        "Time zone of IANA's database, such as Europe/Berlin, whose data is built in. A day has 23 or 25 hours where its clock changes.",
    ),
    define_tollkeeper_key(
        "day_starts",
        &[Window],
        TimeOfDay,
        "00:00",
        "Local time at which a day begins, and with it a week, a month and a year. Hours, minutes and seconds are counted from it.",
    ),
    define_tollkeeper_key("week_starts", &[Window], Choice(Weekday::NAMES), "monday", "First day of a week."),
    define_tollkeeper_key(
        "month",
        &[Window],
        Choice(MonthLength::NAMES),
        "calendar",
        "calendar: months begin on month_day. 30_days: every 30 days, counted from 1970-01-01.",
    ),
    define_tollkeeper_key(
        "month_day",
        &[Window],
        Count(1, 31),
        "1",
        "Day on which a month begins, and a year in its January. In a month without that day: its last day.",
    ),
    define_tollkeeper_key(
        "ban",
        &[RateLimit, Limit],
        DurationOrTable(Ban),
        "",
        "Bans a client that exceeds the limit: its counter rejects everything for this long. Further tries do not prolong it, unless count_rejected is true. Not for eventual and global limits.",
    ),
    define_tollkeeper_key("for", &[Ban], Duration, "", "Length of the ban. Required."),
    define_tollkeeper_key("after", &[Ban], Count(1, MAX_REJECTIONS_BEFORE_BAN as u64), "1", BAN_AFTER_HELP),
    define_tollkeeper_key("count_peeks", &[Ban], Flag, "false", "Rejected peeks (0 hits) are rejections too."),
    define_tollkeeper_key(
        "reservations",
        &[RateLimit, Limit],
        DurationOrTable(ReservationPolicy),
        "",
        "Requests charge an estimate of their cost, and the end of their streams settles with the true one. A duration is settle_within. Envoy must report the end of streams. Not for leaky_bucket, eventual and global limits.",
    ),
    define_tollkeeper_key(
        "settle_within",
        &[ReservationPolicy],
        Duration,
        "10m",
        "Time after which an estimate is not settled any more, in whole seconds. Longer than any stream.",
    ),
    define_tollkeeper_key(
        "unsettled",
        &[ReservationPolicy],
        Choice(UnsettledPolicy::NAMES),
        "keep",
        "What becomes of an estimate that is not settled in time: keep (it stays charged) or return (it is given back when hits are lacking).",
    ),
    define_tollkeeper_key("estimate", &[ReservationPolicy], Count(1, u32::MAX as u64), "", ESTIMATE_DOC),
    define_tollkeeper_key(
        "concurrent",
        &[RateLimit, Limit],
        Count(0, u32::MAX as u64),
        "",
        "Streams at once, in place of requests in a period: each takes a slot, and frees it when it ends. 0 rejects everything. Envoy must report the end of streams.",
    ),
    define_tollkeeper_key(
        "max_duration",
        &[RateLimit, Limit],
        Duration,
        "1h",
        "concurrent only: hard end of a slot whose stream is never reported to have ended, in whole seconds. Longer than any stream.",
    ),
    define_tollkeeper_key(
        "active",
        &[RateLimit, Limit],
        Table(Active),
        "",
        "Times at which the limit exists. Outside them it counts nothing, rejects nothing and replaces nothing. If absent: always.",
    ),
    define_tollkeeper_key(
        "days",
        &[Active],
        Days,
        "mon-sun",
        "Days on which the limit becomes active: mon-fri, sat,sun, or a list.",
    ),
    define_tollkeeper_key("from", &[Active], TimeOfDay, "00:00", "Local time at which the limit becomes active."),
    define_tollkeeper_key(
        "to",
        &[Active],
        TimeOfDay,
        "",
        "Local time at which the limit ends, on the next day unless it is later than from. If absent: at the end of the day.",
    ),
    define_tollkeeper_key(
        "bucket_size",
        &[RateLimit, Limit],
        Count(1, u32::MAX as u64),
        "",
        "token_bucket: number of tokens, which can pass at once. If absent: requests_per_unit.",
    ),
    define_tollkeeper_key(
        "queue_size",
        &[Defaults, RateLimit, Limit],
        Count(1, u32::MAX as u64),
        "1",
        "leaky_bucket: requests in the bucket at once, including the one that leaves; 1: no request waits.",
    ),
    define_tollkeeper_key(
        "max_wait",
        &[Defaults, RateLimit, Limit],
        Duration,
        "",
        "leaky_bucket, token_bucket: maximum delay of an answer. If absent: leaky_bucket up to the caller's deadline, token_bucket 0.",
    ),
    define_tollkeeper_key(
        "count_rejected",
        &[Defaults, RateLimit, Limit],
        Flag,
        "",
        "Counts rejected hits too. If absent: true for a single strict fixed_window, else false. Not for leaky_bucket.",
    ),
    define_tollkeeper_key(
        "consistency",
        &[Defaults, RateLimit, Limit],
        Choice(ConsistencyWord::NAMES),
        "strict",
        "strict: every hit is counted in the store before it is admitted. eventual: answered from this process, within max_overshoot.",
    ),
    define_tollkeeper_key(
        "max_overshoot",
        &[Defaults, RateLimit, Limit],
        Overshoot,
        "5%",
        "eventual or global only: maximum that all replicas, or all regions, together admit over the limit in any period, as a percentage of it or as hits.",
    ),
    define_tollkeeper_key(
        "scope",
        &[Defaults, RateLimit, Limit],
        Choice(ScopeWord::NAMES),
        "region",
        "region: each region has the limit for itself. global: all regions (TOLLKEEPER_REGIONS) have it together, within max_overshoot.",
    ),
    define_tollkeeper_key(
        "reserve",
        &[Defaults, RateLimit, Limit],
        Percentage,
        "10%",
        "scope: global only: part of the limit that is split evenly over the regions in advance, for keys that are new to a region.",
    ),
    define_tollkeeper_key(
        "on_region_loss",
        &[Defaults, RateLimit, Limit],
        Choice(RegionLossPolicy::NAMES),
        "share",
        "scope: global only: hits of a region that is cut off, once its grants are used: share (its part of max_overshoot), local (limit / regions), deny, or allow.",
    ),
    define_tollkeeper_key(
        "on_store_error",
        &[Defaults, RateLimit, Limit],
        Choice(StoreFailurePolicy::NAMES),
        "local",
        "Answer while the store fails: local (limit within this process), allow, deny, or error. TOLLKEEPER_ON_STORE_ERROR changes the default.",
    ),
    define_tollkeeper_key(
        "epoch",
        &[Defaults, RateLimit, Limit],
        Count(0, MAX_EPOCH),
        "0",
        "Part of the counter's key: raising it resets the counters at once.",
    ),
    define_envoy_key(
        "name",
        &[RateLimit, Limit, Replaces],
        Text,
        "",
        "The limit's name, returned to the client and used by replaces.",
    ),
    define_envoy_key(
        "replaces",
        &[RateLimit, Limit],
        Tables(Replaces),
        "",
        "Names of the limits that this one replaces in the same request.",
    ),
    define_envoy_key(
        "shadow_mode",
        &[Descriptor, Limit],
        Flag,
        "false",
        "Shadow mode: the limit is counted and reported, but rejects nothing. With a name in a list, beside a limit without these two: a candidate, which is charged as if it were the only limit.",
    ),
    define_envoy_key(
        "quota_mode",
        &[Descriptor, Limit],
        Flag,
        "false",
        "Quota mode: the limit rejects a request only together with all other quotas of that request.",
    ),
    define_tollkeeper_key(
        "over_limit_body",
        &[Defaults, Descriptor, RateLimit],
        Text,
        "",
        "Body of a rejection, 64 KiB at most.",
    ),
    define_tollkeeper_key(
        "over_limit_content_type",
        &[Defaults, Descriptor, RateLimit],
        Text,
        "",
        "Content type of over_limit_body.",
    ),
    define_envoy_key(
        "detailed_metric",
        &[Descriptor],
        Flag,
        "false",
        "Metrics of this rule are named after the whole path with the request's values. Avoid it where clients choose the values.",
    ),
    define_envoy_key(
        "value_to_metric",
        &[Descriptor],
        Flag,
        "false",
        "Metrics of this rule and those below it are named after the request's value of this entry.",
    ),
    define_tollkeeper_key(
        "decision_log",
        &[Descriptor],
        Choice(RuleLogging::NAMES),
        "",
        "Decisions of this rule that the decision log has, in place of TOLLKEEPER_DECISION_LOG_WHEN.",
    ),
    define_envoy_key(
        "share_threshold",
        &[Descriptor],
        Flag,
        "false",
        "All values that the wildcard or match matches share one counter.",
    ),
    define_envoy_key(
        "metadata",
        &[Descriptor],
        Free,
        "",
        "Dynamic metadata to return when the descriptor passes, if RESPONSE_DYNAMIC_METADATA is on.",
    ),
];

/// The key that only the file of `TOLLKEEPER_RULE_DEFAULTS` has.
pub const BY_UNIT_KEY: RuleFileKey = define_tollkeeper_key(
    "by_unit",
    &[DomainDefaults],
    Free,
    "",
    "Defaults for limits of a unit, by its name; they take precedence over those of the domain.",
);

impl RuleFileKey {
    /// Returns `true` if the key can be written in `section`.
    pub fn belongs_in(&self, section: Section) -> bool {
        self.sections.contains(&section)
            || match section {
                DefaultsFile => self.name == "defaults",
                DomainDefaults => self.sections.contains(&Defaults),
                _ => false,
            }
    }
}

/// Declares a key that envoyproxy/ratelimit has too.
const fn define_envoy_key(
    name: &'static str,
    sections: &'static [Section],
    kind: ValueKind,
    default: &'static str,
    doc: &'static str,
) -> RuleFileKey {
    RuleFileKey { name, peer: true, sections, kind, default, doc }
}

/// Declares a key that only tollkeeper has.
const fn define_tollkeeper_key(
    name: &'static str,
    sections: &'static [Section],
    kind: ValueKind,
    default: &'static str,
    doc: &'static str,
) -> RuleFileKey {
    RuleFileKey { name, peer: false, sections, kind, default, doc }
}

/// Returns the key of that name that belongs in `section`, else that of another section.
pub fn find_rule_file_key(name: &str, section: Section) -> Option<&'static RuleFileKey> {
    let mut named = RULE_FILE_KEYS.iter().chain([&BY_UNIT_KEY]).filter(|key| key.name == name);
    named.clone().find(|key| key.belongs_in(section)).or_else(|| named.next())
}

/// Returns the key of `section` that is most similar to `name`, if one is similar enough.
pub(crate) fn nearest_rule_file_key(name: &str, section: Section) -> Option<&'static str> {
    // Bounded, because a comparison takes time proportional to the length.
    if name.len() > 40 {
        return None;
    }
    let lower = name.to_ascii_lowercase().replace('-', "_");
    RULE_FILE_KEYS
        .iter()
        .chain([&BY_UNIT_KEY])
        .filter(|key| key.belongs_in(section))
        .map(|key| (strsim::normalized_damerau_levenshtein(&lower, key.name), key.name))
        .filter(|(likeness, _)| *likeness >= 0.6)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}

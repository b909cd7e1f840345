//! Every key of a rule file: where it may stand, what it holds, its default, and a sentence about it.
//!
//! The one table. The reader refuses what is not in it, the JSON Schema is made from it, and tests compare
//! `config/reference.yaml` and the code's defaults with it. A key that envoyproxy/ratelimit knows (`peer`) is ignored
//! with a warning where it means nothing, as there; a key of tollkeeper's own is an error there.

use crate::limit::algorithm::Algorithm;
use Section::{Defaults, Descriptor, Limit, RateLimit, Replaces, Root};
use ValueKind::{Choice, Count, Duration, Flag, Free, Limits, Overshoot, Table, Tables, Text, Unit};

/// A kind of mapping in a rule file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Section {
    /// The document itself.
    Root,
    /// `defaults:` of the document.
    Defaults,
    /// An element of `descriptors:`.
    Descriptor,
    /// `rate_limit:` written as a mapping.
    RateLimit,
    /// An element of `rate_limit:` written as a list.
    Limit,
    /// An element of `replaces:`.
    Replaces,
}

impl Section {
    /// All of them, outermost first.
    pub const ALL: [Self; 6] = [Root, Defaults, Descriptor, RateLimit, Limit, Replaces];

    /// What messages call it, after "in".
    pub(crate) const fn phrase(self) -> &'static str {
        match self {
            Root => "the document itself",
            Defaults => "`defaults`",
            Descriptor => "a descriptor",
            RateLimit => "a `rate_limit`",
            Limit => "a list of limits",
            Replaces => "`replaces`",
        }
    }

    /// What the schema calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Root => "document",
            Defaults => "defaults",
            Descriptor => "descriptor",
            RateLimit => "rate_limit",
            Limit => "limit",
            Replaces => "replaces",
        }
    }
}

/// What a key holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueKind {
    /// Text; a plain number, date or boolean is its own text.
    Text,
    /// A whole number from the first to the second, both included.
    Count(u64, u64),
    /// A boolean.
    Flag,
    /// A time in Go's notation, such as `1h30m`, 366 days at most.
    Duration,
    /// A percentage or a number of hits.
    Overshoot,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A unit of time, in any case.
    Unit,
    /// A mapping.
    Table(Section),
    /// A list of mappings.
    Tables(Section),
    /// One limit as a mapping, or several as a list of mappings.
    Limits,
    /// A mapping of anything.
    Free,
}

/// A key of a rule file.
#[derive(Clone, Copy, Debug)]
pub struct RuleKey {
    /// As written.
    pub name: &'static str,
    /// Whether envoyproxy/ratelimit knows it.
    pub peer: bool,
    /// Where it means something.
    pub sections: &'static [Section],
    /// What it holds.
    pub kind: ValueKind,
    /// What holds where it is not written, in YAML; empty if nothing does, or if that depends on other keys.
    pub default: &'static str,
    /// What it does, in a sentence or two.
    pub doc: &'static str,
}

/// The largest epoch: beyond it a double is not exact.
pub const MAX_EPOCH: u64 = 1 << 53;

/// The longest `over_limit_body`, in bytes.
pub const MAX_BODY_BYTES: usize = 64 * 1024;

/// The table, in the order of the documentation.
pub const KEYS: &[RuleKey] = &[
    peer(
        "domain",
        &[Root],
        Text,
        "",
        "The namespace that requests name. Required, and unique over all files unless domains are merged.",
    ),
    own(
        "defaults",
        &[Root],
        Table(Defaults),
        "",
        "What holds for every rule of the domain that does not say otherwise, and for limits that travel with a request.",
    ),
    peer(
        "descriptors",
        &[Root, Descriptor],
        Tables(Descriptor),
        "",
        "The rules of this level, in order. A request matches one per level: the exact value, else the first wildcard in this order, else the bare key.",
    ),
    peer("key", &[Descriptor], Text, "", "The key of a descriptor entry. Required."),
    peer(
        "value",
        &[Descriptor],
        Text,
        "",
        "The value of the entry. Not written: any value, each with a counter of its own. A `*` stands for any run of characters, none too.",
    ),
    peer(
        "rate_limit",
        &[Descriptor],
        Limits,
        "",
        "What a request that ends here may do: one limit as a mapping, or several as a list, all of which must pass. Not written: no limit.",
    ),
    peer(
        "unit",
        &[RateLimit, Limit],
        Unit,
        "",
        "The unit of the period: second, minute, hour, day, week (from Thursday 00:00 UTC), month (30 days) or year (365 days).",
    ),
    own(
        "unit_multiplier",
        &[RateLimit, Limit],
        Count(1, u32::MAX as u64),
        "1",
        "The period is the unit times this, 366 days at most.",
    ),
    peer(
        "requests_per_unit",
        &[RateLimit, Limit],
        Count(0, u32::MAX as u64),
        "0",
        "Hits allowed in a period; 0 refuses everything.",
    ),
    peer("unlimited", &[RateLimit], Flag, "false", "Allow everything, uncounted. Needs no unit and allows none."),
    own("algorithm", &[Defaults, RateLimit, Limit], Choice(Algorithm::NAMES), "fixed_window", "How hits are counted."),
    own(
        "bucket_size",
        &[RateLimit, Limit],
        Count(1, u32::MAX as u64),
        "",
        "token_bucket: the tokens it holds, which can pass at once; requests_per_unit where not written.",
    ),
    own(
        "queue_size",
        &[Defaults, RateLimit, Limit],
        Count(1, u32::MAX as u64),
        "1",
        "leaky_bucket: requests in the bucket at once, the one that leaves included; 1 means that none waits.",
    ),
    own(
        "max_wait",
        &[Defaults, RateLimit, Limit],
        Duration,
        "",
        "leaky_bucket, token_bucket: the longest an answer may be held. Where not written: leaky_bucket as long as the caller waits, token_bucket 0.",
    ),
    own(
        "count_rejected",
        &[Defaults, RateLimit, Limit],
        Flag,
        "",
        "Whether refused hits count too. Where not written: true for a single strict fixed_window, else false. Not for leaky_bucket.",
    ),
    own(
        "consistency",
        &[Defaults, RateLimit, Limit],
        Choice(&["strict", "eventual"]),
        "strict",
        "strict: every admitted hit was counted in the store first. eventual: answered from this process, within max_overshoot.",
    ),
    own(
        "max_overshoot",
        &[Defaults, RateLimit, Limit],
        Overshoot,
        "5%",
        "eventual only: what all replicas together may admit over the limit in any period, as a percentage of it or as hits.",
    ),
    own(
        "on_store_error",
        &[Defaults, RateLimit, Limit],
        Choice(&["local", "allow", "deny", "error"]),
        "local",
        "What is answered when the counter can not be asked: limit within this process, allow, deny, or answer an error. TOLLKEEPER_ON_STORE_ERROR changes the default.",
    ),
    own(
        "epoch",
        &[Defaults, RateLimit, Limit],
        Count(0, MAX_EPOCH),
        "0",
        "Part of the counter's key: raising it resets the counters at once.",
    ),
    peer(
        "name",
        &[RateLimit, Limit, Replaces],
        Text,
        "",
        "The limit's name, returned to the client and used by replaces.",
    ),
    peer(
        "replaces",
        &[RateLimit, Limit],
        Tables(Replaces),
        "",
        "Limits that are switched off, by name, in a request that meets this one.",
    ),
    peer("shadow_mode", &[Descriptor, Limit], Flag, "false", "A trial: counted and reported, but it refuses nothing."),
    peer(
        "quota_mode",
        &[Descriptor, Limit],
        Flag,
        "false",
        "It refuses a request only together with all other quotas of that request.",
    ),
    own(
        "over_limit_body",
        &[Defaults, Descriptor, RateLimit],
        Text,
        "",
        "Sent as the body of a refusal, 64 KiB at most.",
    ),
    own(
        "over_limit_content_type",
        &[Defaults, Descriptor, RateLimit],
        Text,
        "",
        "The content type of over_limit_body.",
    ),
    peer(
        "detailed_metric",
        &[Descriptor],
        Flag,
        "false",
        "The metrics of this rule carry the whole path with the request's values. Beware of values that strangers choose.",
    ),
    peer(
        "value_to_metric",
        &[Descriptor],
        Flag,
        "false",
        "The metrics of the rules from here on carry the request's value of this entry.",
    ),
    peer("share_threshold", &[Descriptor], Flag, "false", "All values that the wildcard matches share one counter."),
    peer(
        "metadata",
        &[Descriptor],
        Free,
        "",
        "Returned as dynamic metadata when the descriptor passes, if RESPONSE_DYNAMIC_METADATA is on.",
    ),
];

const fn peer(
    name: &'static str,
    sections: &'static [Section],
    kind: ValueKind,
    default: &'static str,
    doc: &'static str,
) -> RuleKey {
    RuleKey { name, peer: true, sections, kind, default, doc }
}

const fn own(
    name: &'static str,
    sections: &'static [Section],
    kind: ValueKind,
    default: &'static str,
    doc: &'static str,
) -> RuleKey {
    RuleKey { name, peer: false, sections, kind, default, doc }
}

/// The key of that name, wherever it may stand.
pub fn find(name: &str) -> Option<&'static RuleKey> {
    KEYS.iter().find(|key| key.name == name)
}

/// The key that was probably meant: the nearest one that may stand at `section`, if any is near.
pub(crate) fn nearest(name: &str, section: Option<Section>) -> Option<&'static str> {
    // What is far too long resembles nothing, and comparing it would cost its length squared.
    if name.len() > 40 {
        return None;
    }
    let lower = name.to_ascii_lowercase().replace('-', "_");
    KEYS.iter()
        .filter(|key| section.is_none_or(|section| key.sections.contains(&section)))
        .map(|key| (strsim::normalized_damerau_levenshtein(&lower, key.name), key.name))
        .filter(|(likeness, _)| *likeness >= 0.6)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}

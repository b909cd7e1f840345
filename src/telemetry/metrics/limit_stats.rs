//! Statistics of one limit, and its name in metrics.
//!
//! Statistics are looked up when rules are loaded, so that a decision only adds to counters. A reload that keeps a rule
//! keeps its statistics. Names are sanitized here, once: no name from a request or a rule file can end a statsd line or
//! add a field to it.
//!
//! Decides: names of limits in metrics; replaced characters; since when distinct keys are counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::Label;
use super::striped_counters::StripedCounters;
use crate::telemetry::hyperloglog::HyperLogLog;

/// Counter of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum LimitStat {
    /// Hits of all requests.
    TotalHits,
    /// Hits that exceeded the limit, in shadow mode too.
    OverLimit,
    /// Hits within the limit and above NEAR_LIMIT_RATIO of it.
    NearLimit,
    /// Hits within the limit.
    WithinLimit,
    /// Hits that exceeded the limit and were admitted because of shadow mode.
    ShadowMode,
    /// Hits rejected by the over-limit cache.
    OverLimitWithLocalCache,
    /// Refunded hits.
    TotalNegativeHits,
    /// Hits that an eventual rule admitted and never charged.
    Uncharged,
    /// Decisions that admitted.
    Ok,
    /// Decisions that rejected.
    Over,
    /// Decisions that exceeded the limit in shadow mode.
    Shadow,
    /// Decisions by the policy `local`.
    Local,
    /// Decisions by the policy `allow`.
    Allow,
    /// Decisions by the policy `deny`.
    Deny,
    /// Decisions by the policy `error`.
    Error,
    /// Decisions that a ban rejected, in shadow mode too.
    Banned,
    /// Bans that the limit began, in shadow mode too.
    Bans,
    /// Slots that requests took.
    SlotsTaken,
    /// Slots that releases freed.
    SlotsFreed,
    /// Releases that came before their requests.
    EarlyReleases,
    /// Requests that came after their releases.
    LateRequests,
    /// Seats that were not released: their slots expired, or their holders died.
    SeatsExpired,
    /// Estimates that requests reserved.
    Reservations,
    /// Reservations that were settled.
    ReservationsSettled,
    /// Reservations that were found unsettled after their time, or of a dead holder.
    ReservationsUnsettled,
    /// Hits by which settlements exceeded their estimates.
    ReservationExcessHits,
    /// Descriptors of the domain that matched no rule; only in the statistics of a domain's other limits.
    Unmatched,
    /// Decisions by the policy `local` that rejected; also among [`LimitStat::Local`].
    LocalRejected,
}

impl LimitStat {
    /// Number of counters.
    pub const STAT_COUNT: usize = Self::LocalRejected as usize + 1;

    /// Counters that envoyproxy/ratelimit also has, with their names there and HELP texts.
    pub const ENVOY_RATELIMIT_COUNTERS: [(Self, &'static str, &'static str); 7] = [
        (Self::TotalHits, "total_hits", "Total number of hits in requests."),
        (Self::OverLimit, "over_limit", "Total number of hits that exceeded the limit, in shadow mode too."),
        (Self::NearLimit, "near_limit", "Total number of hits within the limit and above NEAR_LIMIT_RATIO of it."),
        (Self::WithinLimit, "within_limit", "Total number of hits within the limit."),
        (
            Self::ShadowMode,
            "shadow_mode",
            "Total number of hits that exceeded the limit and were admitted because of shadow mode.",
        ),
        (
            Self::OverLimitWithLocalCache,
            "over_limit_with_local_cache",
            "Total number of hits rejected by the over-limit cache, without a call to Redis.",
        ),
        (Self::TotalNegativeHits, "total_negative_hits", "Total number of refunded hits."),
    ];

    /// Counters of decisions, with their verdict.
    pub const VERDICT_COUNTERS: [(Self, &'static str); 7] = [
        (Self::Ok, "ok"),
        (Self::Over, "over_limit"),
        (Self::Shadow, "shadow"),
        (Self::Local, "local"),
        (Self::Allow, "allow"),
        (Self::Deny, "deny"),
        (Self::Error, "error"),
    ];
}

/// Statistics of one limit.
#[derive(Debug)]
pub struct LimitStats {
    counts: StripedCounters<{ LimitStat::STAT_COUNT }>,
    name: Arc<LimitName>,
    id: u64,
    created: Instant,
    /// Distinct keys that matched the limit.
    pub keys: HyperLogLog,
    /// Distinct keys that the limit rejected.
    pub rejected_keys: HyperLogLog,
    /// Decisions counted under a name from the request: admitted, rejected.
    under_request_names: [AtomicU64; 2],
}

/// Number of decisions on a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecisionCounts {
    /// Decisions of any verdict.
    pub total: u64,
    /// Decisions that rejected, by the limit or a policy, or would have without shadow mode.
    pub rejected: u64,
}

/// Decisions on a limit by what became of the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecisionsByResult {
    /// Decisions of any verdict.
    pub matched: u64,
    /// Decisions that admitted, in shadow mode too.
    pub passed: u64,
    /// Decisions that rejected; those by the policy `error` are neither.
    pub rejected: u64,
    /// Decisions that exceeded the limit in shadow mode, which are also among `passed`.
    pub exceeded_in_shadow: u64,
}

/// Maximum length of a name from a request in bytes.
pub const MAX_REQUESTED_NAME_BYTES: usize = 512;

/// Name of a limit in metrics.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LimitName {
    /// `domain.composite.composite`, as in statsd.
    key: Box<str>,
    /// End of each part in `key`, the domain first.
    ends: Box<[u32]>,
    /// Domain, as requests name it; `None` if it is not known.
    domain: Option<Box<str>>,
}

impl LimitName {
    /// Joins a domain and composite keys, sanitized.
    pub fn new<'a>(parts: impl IntoIterator<Item = &'a str>) -> Self {
        let (mut key, mut ends, mut domain) = (String::new(), Vec::new(), None);
        for part in parts {
            domain = domain.or_else(|| Some(part.into()));
            if !ends.is_empty() {
                key.push('.');
            }
            push_sanitized_name(&mut key, part);
            ends.push(u32::try_from(key.len()).unwrap_or(u32::MAX));
        }
        Self { key: key.into_boxed_str(), ends: ends.into_boxed_slice(), domain }
    }

    /// Joins a domain and composite keys of a request; `None` beyond [`MAX_REQUESTED_NAME_BYTES`].
    pub fn from_request(parts: &[&str]) -> Option<Self> {
        let length: usize = parts.iter().map(|part| part.len() + 1).sum();
        (length <= MAX_REQUESTED_NAME_BYTES).then(|| Self::new(parts.iter().copied()))
    }

    /// Restores a full name that another replica published, with its domain.
    ///
    /// The parts after the domain are not known. Without the domain, or with one that is not that of the name, the domain
    /// is not known either.
    pub fn from_published(key: &str, domain: Option<&str>) -> Self {
        let end = |text: &str| u32::try_from(text.len()).unwrap_or(u32::MAX);
        let own = domain.map(|domain| (Self::new([domain]), domain));
        let own = own.filter(|(own, _)| key.strip_prefix(&*own.key).is_some_and(|rest| rest.starts_with('.')));
        let ends = own.iter().map(|(own, _)| end(&own.key)).chain([end(key)]).collect();
        Self { key: key.into(), ends, domain: own.map(|(_, domain)| domain.into()) }
    }

    /// Full name: `domain.composite.composite`.
    pub fn as_str(&self) -> &str {
        &self.key
    }

    /// Domain, as metrics name it.
    pub fn domain(&self) -> &str {
        self.parts().next().unwrap_or_default()
    }

    /// Domain, as requests name it; `None` if it is not known.
    pub fn known_domain(&self) -> Option<&str> {
        self.domain.as_deref()
    }

    /// Domain, then the composite keys.
    pub fn parts(&self) -> impl Iterator<Item = &str> {
        let starts = std::iter::once(0).chain(self.ends.iter().map(|end| end.saturating_add(1) as usize));
        starts.zip(&*self.ends).map(|(start, end)| self.key.get(start..*end as usize).unwrap_or_default())
    }

    /// True if the name is `prefix`, or starts with `prefix` and a dot.
    pub fn is_at_or_below_prefix(&self, prefix: &str) -> bool {
        is_at_or_below_prefix(&self.key, prefix)
    }

    /// True if the name is `rule`, or, unless `exact`, starts with `rule` and a dot.
    pub fn is_selected_by(&self, rule: &str, exact: bool) -> bool {
        if exact { self.as_str() == rule } else { self.is_at_or_below_prefix(rule) }
    }

    /// Labels `domain`, `key1`, `key2` and so on.
    pub fn labels(&self) -> Vec<Label> {
        const LABEL_NAMES: [&str; 8] = ["domain", "key1", "key2", "key3", "key4", "key5", "key6", "key7"];
        let name =
            |index: usize| LABEL_NAMES.get(index).map_or_else(|| format!("key{index}").into(), |name| (*name).into());
        self.parts().enumerate().map(|(index, part)| (name(index), part.to_owned())).collect()
    }
}

impl LimitStats {
    /// Statistics without any decision.
    pub fn new(name: LimitName) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Self {
            counts: Default::default(),
            name: Arc::new(name),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            created: Instant::now(),
            keys: HyperLogLog::default(),
            rejected_keys: HyperLogLog::default(),
            under_request_names: Default::default(),
        }
    }

    /// Name in metrics.
    pub fn name(&self) -> &LimitName {
        &self.name
    }

    /// Shared name in metrics, for reports that keep it.
    pub const fn name_arc(&self) -> &Arc<LimitName> {
        &self.name
    }

    /// Combines the hash of a key with the identifier of the limit.
    pub const fn combine_id_with_key(&self, key: u128) -> u128 {
        key ^ (self.id as u128).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
    }

    /// Identifier that is unique in this process.
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// Time since counting began.
    pub fn age(&self) -> Duration {
        self.created.elapsed()
    }

    /// Number of decisions under this name, of any verdict.
    pub fn decision_count(&self) -> u64 {
        LimitStat::VERDICT_COUNTERS.iter().map(|(count, _)| self.counter_value(*count)).sum()
    }

    /// Counts a decision whose verdict is counted under a name from the request.
    pub fn record_decision_under_request_name(&self, is_rejected: bool) {
        self.under_request_names[usize::from(is_rejected)].fetch_add(1, Ordering::Relaxed);
    }

    /// Number of decisions, including those counted under names from requests, and those of policies.
    pub fn total_decision_counts(&self) -> DecisionCounts {
        let DecisionsByResult { matched, rejected, exceeded_in_shadow, .. } = self.decisions_by_result();
        DecisionCounts { total: matched, rejected: rejected + exceeded_in_shadow }
    }

    /// Number of decisions by what became of the request, including those counted under names from requests.
    pub fn decisions_by_result(&self) -> DecisionsByResult {
        let count = |stat| self.counter_value(stat);
        let [admitted, rejected] = [0, 1].map(|index: usize| self.under_request_names[index].load(Ordering::Relaxed));
        // Read before the decisions that they are part of.
        let local_rejected = count(LimitStat::LocalRejected);
        let shadow = count(LimitStat::Shadow);
        let local = count(LimitStat::Local);
        DecisionsByResult {
            matched: self.decision_count() + admitted + rejected,
            passed: count(LimitStat::Ok)
                + shadow
                + count(LimitStat::Allow)
                + local.saturating_sub(local_rejected)
                + admitted,
            rejected: count(LimitStat::Over) + count(LimitStat::Deny) + local_rejected + rejected,
            exceeded_in_shadow: shadow,
        }
    }

    /// Adds to a counter; adding 0 does not write.
    pub fn add_to_counter(&self, stat: LimitStat, count: u64) {
        if count > 0 {
            self.counts.add_to_counter(stat as usize, count);
        }
    }

    /// Current value of a counter.
    pub fn counter_value(&self, stat: LimitStat) -> u64 {
        self.counts.counter_value(stat as usize)
    }
}

/// Returns `true` if the name of a limit is `prefix`, or starts with `prefix` and a dot.
pub fn is_at_or_below_prefix(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Appends `text`, sanitized as in envoyproxy/ratelimit: `:`, `|`, the dots of IPv4 addresses and control characters
/// become `_`.
fn push_sanitized_name(key: &mut String, text: &str) {
    let start = key.len();
    key.extend(text.chars().map(|c| if c == ':' || c == '|' || c.is_control() { '_' } else { c }));
    if !text.contains('.') {
        return;
    }
    // Replace the dots of each IPv4 address in one pass.
    let sanitized = key.split_off(start);
    let mut rest = &*sanitized;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        key.push_str(&rest[..start]);
        rest = &rest[start..];
        let length = ipv4_address_length(rest.as_bytes());
        let (address, after) = rest.split_at(if length > 0 { length } else { 1 });
        key.extend(address.chars().map(|c| if c == '.' { '_' } else { c }));
        rest = after;
    }
    key.push_str(rest);
}

/// Length of the `\d{1,3}(\.\d{1,3}){3}` at the start of `text`; 0 if there is none.
fn ipv4_address_length(text: &[u8]) -> usize {
    let mut at = 0;
    for octet in 0..4 {
        if octet > 0 {
            if text.get(at) != Some(&b'.') {
                return 0;
            }
            at += 1;
        }
        let digits = text[at..].iter().take(3).take_while(|byte| byte.is_ascii_digit()).count();
        if digits == 0 {
            return 0;
        }
        at += digits;
    }
    at
}

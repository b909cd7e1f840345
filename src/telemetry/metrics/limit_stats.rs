//! What is counted of one limit, and under which names.
//!
//! A stats is found when rules are loaded, so that a decision only adds to it. It outlives the rules it was found for:
//! a reload that keeps a rule keeps its counts. The names are made safe here once: whatever a stranger or a rule file
//! wrote, no name ends a line of statsd or begins another field of one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::family::Label;
use crate::telemetry::hyperloglog::HyperLogLog;

/// What a limit did. Hits unless it says otherwise; each is `ratelimit.service.rate_limit.<key>.<name>` in statsd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum LimitStat {
    /// All hits that were asked for.
    TotalHits,
    /// Hits beyond the limit, trials included.
    OverLimit,
    /// Admitted hits past the near-limit ratio.
    NearLimit,
    /// Hits within the limit.
    WithinLimit,
    /// Hits that a trial would have refused.
    ShadowMode,
    /// Hits that were refused by what Redis had said before.
    OverLimitWithLocalCache,
    /// Hits given back.
    TotalNegativeHits,
    /// Hits of an eventual rule that were admitted and never charged.
    Uncharged,
    /// Decisions that let pass.
    Ok,
    /// Decisions that refused.
    Over,
    /// Decisions that would have refused, were it no trial.
    Shadow,
    /// Decisions by the policy `local`.
    Local,
    /// Decisions by the policy `allow`.
    Allow,
    /// Decisions by the policy `deny`.
    Deny,
    /// Decisions by the policy `error`.
    Error,
}

impl LimitStat {
    /// How many there are.
    pub const ALL: usize = Self::Error as usize + 1;

    /// Those that envoyproxy/ratelimit counts too, with their names there and what they mean.
    pub const OF_PEER: [(Self, &'static str, &'static str); 7] = [
        (Self::TotalHits, "total_hits", "Hits that were asked for."),
        (Self::OverLimit, "over_limit", "Hits beyond the limit, those of trials included."),
        (Self::NearLimit, "near_limit", "Hits within the limit and past NEAR_LIMIT_RATIO of it."),
        (Self::WithinLimit, "within_limit", "Hits within the limit."),
        (Self::ShadowMode, "shadow_mode", "Hits beyond the limit that passed because it is a trial."),
        (Self::OverLimitWithLocalCache, "over_limit_with_local_cache", "Hits refused without asking Redis again."),
        (Self::TotalNegativeHits, "total_negative_hits", "Hits given back."),
    ];

    /// Decisions, by verdict.
    pub const VERDICTS: [(Self, &'static str); 7] = [
        (Self::Ok, "ok"),
        (Self::Over, "over_limit"),
        (Self::Shadow, "shadow"),
        (Self::Local, "local"),
        (Self::Allow, "allow"),
        (Self::Deny, "deny"),
        (Self::Error, "error"),
    ];
}

/// The counts of one limit.
#[derive(Debug)]
#[repr(align(128))]
pub struct LimitStats {
    counts: [AtomicU64; LimitStat::ALL],
    name: Arc<LimitName>,
    serial: u64,
    since: Instant,
    /// The keys that met it.
    pub keys: HyperLogLog,
    /// Those that it refused.
    pub refused_keys: HyperLogLog,
    elsewhere: [AtomicU64; 2],
}

/// The names of a limit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LimitName {
    /// `domain.composite.composite`, as statsd gets it.
    key: Box<str>,
    /// Where its parts end in `key`, the domain first.
    ends: Box<[u32]>,
}

impl LimitName {
    /// Of a domain and composite keys below it, made safe.
    pub fn new<'a>(parts: impl IntoIterator<Item = &'a str>) -> Self {
        let (mut key, mut ends) = (String::new(), Vec::new());
        for part in parts {
            if !ends.is_empty() {
                key.push('.');
            }
            push_safe(&mut key, part);
            ends.push(u32::try_from(key.len()).unwrap_or(u32::MAX));
        }
        Self { key: key.into_boxed_str(), ends: ends.into_boxed_slice() }
    }

    /// The whole of it: `domain.composite.composite`.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The domain.
    pub fn domain(&self) -> &str {
        self.parts().next().unwrap_or_default()
    }

    /// The domain, then the composite keys.
    pub fn parts(&self) -> impl Iterator<Item = &str> {
        let begins = std::iter::once(0).chain(self.ends.iter().map(|end| end.saturating_add(1) as usize));
        begins.zip(&*self.ends).map(|(begin, end)| self.key.get(begin..*end as usize).unwrap_or_default())
    }

    /// Whether it is the name `above`, or begins with it and a dot.
    pub fn is_or_is_below(&self, above: &str) -> bool {
        let rest = self.key.strip_prefix(above);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }

    /// `domain`, then `key1`, `key2` and so on.
    pub fn labels(&self) -> Vec<Label> {
        const KEYS: [&str; 8] = ["domain", "key1", "key2", "key3", "key4", "key5", "key6", "key7"];
        let name = |place: usize| KEYS.get(place).map_or_else(|| format!("key{place}").into(), |name| (*name).into());
        self.parts().enumerate().map(|(place, part)| (name(place), part.to_owned())).collect()
    }
}

impl LimitStats {
    /// Nothing counted yet.
    pub fn new(name: LimitName) -> Self {
        static SERIALS: AtomicU64 = AtomicU64::new(0);
        Self {
            counts: Default::default(),
            name: Arc::new(name),
            serial: SERIALS.fetch_add(1, Ordering::Relaxed),
            since: Instant::now(),
            keys: HyperLogLog::default(),
            refused_keys: HyperLogLog::default(),
            elsewhere: Default::default(),
        }
    }

    /// Its names.
    pub fn name(&self) -> &LimitName {
        &self.name
    }

    /// Its names, to be kept by whoever tells of it.
    pub const fn shared_name(&self) -> &Arc<LimitName> {
        &self.name
    }

    /// What tells it from all other limit_stats of this process.
    pub const fn serial(&self) -> u64 {
        self.serial
    }

    /// How long it has been counting.
    pub fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// Decisions of any verdict.
    pub fn decisions(&self) -> u64 {
        LimitStat::VERDICTS.iter().map(|(count, _)| self.get(*count)).sum()
    }

    /// Notes a decision that is counted under a name that the request made.
    pub fn note_elsewhere(&self, refused: bool) {
        self.elsewhere[usize::from(refused)].fetch_add(1, Ordering::Relaxed);
    }

    /// Decisions of any verdict, and those that refused or would have, under whatever name they are counted.
    pub fn all_decisions(&self) -> (u64, u64) {
        let [passed, refused] = [0, 1].map(|which: usize| self.elsewhere[which].load(Ordering::Relaxed));
        (self.decisions() + passed + refused, self.get(LimitStat::Over) + self.get(LimitStat::Shadow) + refused)
    }

    /// Counts; nothing is written where it counts 0.
    pub fn add(&self, count: LimitStat, by: u64) {
        if by > 0 {
            self.counts[count as usize].fetch_add(by, Ordering::Relaxed);
        }
    }

    /// What was counted until now.
    pub fn get(&self, count: LimitStat) -> u64 {
        self.counts[count as usize].load(Ordering::Relaxed)
    }
}

/// Adds `text` as the keys of envoyproxy/ratelimit have it: `:` and `|`, which mean something to statsd, and the dots
/// of what looks like an IPv4 address become `_`. So do line ends and other controls.
fn push_safe(key: &mut String, text: &str) {
    let begin = key.len();
    key.extend(text.chars().map(|c| if c == ':' || c == '|' || c.is_control() { '_' } else { c }));
    if !text.contains('.') {
        return;
    }
    // Four runs of up to three digits with dots between: no part of it is looked at twice.
    let safe = key.split_off(begin);
    let mut rest = &*safe;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        key.push_str(&rest[..start]);
        rest = &rest[start..];
        let length = address_length(rest.as_bytes());
        let (address, after) = rest.split_at(if length > 0 { length } else { 1 });
        key.extend(address.chars().map(|c| if c == '.' { '_' } else { c }));
        rest = after;
    }
    key.push_str(rest);
}

/// How long the `\d{1,3}(\.\d{1,3}){3}` is that `text` begins with; 0: it begins with none.
fn address_length(text: &[u8]) -> usize {
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

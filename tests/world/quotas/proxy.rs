//! A proxy that decides by itself, as Envoy 1.40 does: its buckets, what they were assigned, and what they report.
//!
//! A state machine without time of its own. What Envoy ignores, it ignores too: strategies that it does not know, equal
//! tokens with another interval, buckets that it does not have. A library of gRPC differs: its buckets are full after each
//! change, and it forgets a bucket whose assignment ended.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::Message as _;
use tollkeeper::base::pb::rlqs::bucket_id::BucketEntry;
use tollkeeper::base::pb::rlqs::rate_limit_quota_response::bucket_action::{
    BucketAction as Action, QuotaAssignmentAction,
};
use tollkeeper::base::pb::rlqs::rate_limit_quota_usage_reports::BucketQuotaUsage;
use tollkeeper::base::pb::rlqs::rate_limit_strategy::{BlanketRule, Strategy as SentStrategy};
use tollkeeper::base::pb::rlqs::{BucketId, RateLimitQuotaResponse, RateLimitQuotaUsageReports, TokenBucket};

/// Parts of a token that are counted: as many as a second has microseconds.
const PARTS_OF_TOKEN: u64 = 1_000_000;

/// A bucket, by its rule and its value.
pub type BucketName = (usize, u64);

/// Tokens of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Tokens that it holds.
    pub max: u64,
    /// Tokens that arrive in an interval.
    pub fill: u64,
    /// The interval in seconds.
    pub interval_s: u64,
}

/// How a proxy is configured, and what it is.
#[derive(Clone, Copy, Debug)]
pub struct ProxyOptions {
    /// `no_assignment_behavior` allows.
    pub allows_unassigned: bool,
    /// `expired_assignment_behavior`, without end.
    pub fallback: Option<Tokens>,
    /// It is an Envoy: buckets keep the ratio of their tokens when they change.
    pub is_envoy: bool,
    /// Interval of its reports, in milliseconds.
    pub report_ms: u64,
}

/// What decides a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// An assignment.
    Assignment,
    /// `no_assignment_behavior`: the bucket had no assignment yet.
    None,
    /// `expired_assignment_behavior`, or without that `no_assignment_behavior`: the assignment has ended.
    Ended,
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// It passes.
    pub passes: bool,
    /// What decided.
    pub basis: Basis,
}

#[derive(Clone, Copy, Debug)]
struct Filled {
    tokens: Tokens,
    /// Parts of tokens that were left at `at_us`.
    parts: u64,
    at_us: u64,
}

impl Filled {
    const fn full(tokens: Tokens, at_us: u64) -> Self {
        Self { tokens, parts: tokens.max * PARTS_OF_TOKEN, at_us }
    }

    fn parts_at(&self, now_us: u64) -> u64 {
        // A part for each token and microsecond.
        let filled = self.tokens.fill * (now_us - self.at_us) / self.tokens.interval_s;
        (self.parts + filled).min(self.tokens.max * PARTS_OF_TOKEN)
    }

    fn take(&mut self, now_us: u64) -> bool {
        let parts = self.parts_at(now_us);
        let Some(left) = parts.checked_sub(PARTS_OF_TOKEN) else { return false };
        (self.parts, self.at_us) = (left, now_us);
        true
    }
}

#[derive(Clone, Copy, Debug)]
enum Strategy {
    Allow,
    Deny,
    Tokens(Filled),
}

#[derive(Clone, Copy, Debug)]
struct Assignment {
    strategy: Strategy,
    ends_us: u64,
}

#[derive(Debug)]
struct Bucket {
    assignment: Option<Assignment>,
    /// Begins to be filled when an assignment ended.
    fallback: Option<Filled>,
    allowed: u64,
    denied: u64,
    reported_us: u64,
}

/// The filter of a proxy.
#[derive(Debug)]
pub struct Proxy {
    options: ProxyOptions,
    buckets: BTreeMap<BucketName, Bucket>,
    domain_was_sent: bool,
}

impl Proxy {
    /// A proxy without buckets.
    pub const fn new(options: ProxyOptions) -> Self {
        Self { options, buckets: BTreeMap::new(), domain_was_sent: false }
    }

    /// Decides a request; returns with it the report of a bucket that is new.
    pub fn decide(&mut self, name: BucketName, now_us: u64) -> (Decision, Option<Bytes>) {
        self.expire(name, now_us);
        if let Some(bucket) = self.buckets.get_mut(&name) {
            let decision = bucket.decide(self.options, now_us);
            match decision.passes {
                true => bucket.allowed += 1,
                false => bucket.denied += 1,
            }
            return (decision, None);
        }
        let mut bucket = Bucket::new(now_us);
        let decision = bucket.decide(self.options, now_us);
        self.buckets.insert(name, bucket);
        let (allowed, denied) = if decision.passes { (1, 0) } else { (0, 1) };
        let usage = BucketQuotaUsage {
            bucket_id: Some(id_of(name)),
            time_elapsed: Some(prost_types::Duration::default()),
            num_requests_allowed: allowed,
            num_requests_denied: denied,
        };
        (decision, Some(self.report(vec![usage])))
    }

    /// What a library of gRPC does with a bucket whose assignment ended.
    fn expire(&mut self, name: BucketName, now_us: u64) {
        if !self.options.is_envoy
            && self.options.fallback.is_none()
            && self.buckets.get(&name).is_some_and(|bucket| bucket.has_ended(now_us))
        {
            self.buckets.remove(&name);
        }
    }

    /// Report of all buckets. Its usage is reported once; `is_new_stream`: that of the time without a stream is lost.
    pub fn report_all(&mut self, now_us: u64, is_new_stream: bool) -> Bytes {
        let names: Vec<BucketName> = self.buckets.keys().copied().collect();
        names.into_iter().for_each(|name| self.expire(name, now_us));
        self.domain_was_sent &= !is_new_stream;
        let usages = self.buckets.iter_mut().map(|(name, bucket)| {
            let elapsed_us = now_us - bucket.reported_us;
            bucket.reported_us = now_us;
            let (allowed, denied) = (std::mem::take(&mut bucket.allowed), std::mem::take(&mut bucket.denied));
            let is_lost = is_new_stream && self.options.is_envoy;
            BucketQuotaUsage {
                bucket_id: Some(id_of(*name)),
                time_elapsed: Some(prost_types::Duration {
                    seconds: i64::try_from(elapsed_us / 1_000_000).unwrap(),
                    nanos: if self.options.is_envoy {
                        0
                    } else {
                        i32::try_from(elapsed_us % 1_000_000).unwrap() * 1000
                    },
                }),
                num_requests_allowed: if is_lost { 0 } else { allowed },
                num_requests_denied: if is_lost { 0 } else { denied },
            }
        });
        let usages = usages.collect();
        self.report(usages)
    }

    fn report(&mut self, bucket_quota_usages: Vec<BucketQuotaUsage>) -> Bytes {
        let has_domain = self.options.is_envoy || !std::mem::replace(&mut self.domain_was_sent, true);
        let domain = if has_domain { "world".to_owned() } else { String::new() };
        RateLimitQuotaUsageReports { domain, bucket_quota_usages }.encode_to_vec().into()
    }

    /// Applies a response: all its actions at once, in their order.
    pub fn apply(&mut self, response: &RateLimitQuotaResponse, now_us: u64) {
        for action in &response.bucket_action {
            let Some(name) = action.bucket_id.as_ref().and_then(name_of) else { continue };
            let Some(bucket) = self.buckets.get_mut(&name) else { continue };
            match &action.bucket_action {
                Some(Action::QuotaAssignmentAction(assigned)) => {
                    if let Some(assignment) = bucket.change(self.options, assigned, now_us) {
                        (bucket.assignment, bucket.fallback) = (Some(assignment), None);
                    }
                }
                Some(Action::AbandonAction(_)) => {
                    self.buckets.remove(&name);
                }
                None => {}
            }
        }
    }

    /// What a bucket has, for a trace.
    pub fn describe(&self, now_us: u64) -> String {
        let buckets = self.buckets.iter().map(|(name, bucket)| {
            let has = match bucket.assignment.map(|assignment| assignment.strategy) {
                None => "nothing".to_owned(),
                Some(Strategy::Allow) => "allow".to_owned(),
                Some(Strategy::Deny) => "deny".to_owned(),
                Some(Strategy::Tokens(filled)) => {
                    let Tokens { max, fill, interval_s } = filled.tokens;
                    format!("{} of {max}, {fill} in {interval_s} s", filled.parts_at(now_us) / PARTS_OF_TOKEN)
                }
            };
            let left_ms = bucket.assignment.map_or(0, |assignment| assignment.ends_us.saturating_sub(now_us) / 1000);
            format!("{name:?} {has} for {left_ms} ms")
        });
        buckets.collect::<Vec<_>>().join("; ")
    }
}

impl Bucket {
    const fn new(now_us: u64) -> Self {
        Self { assignment: None, fallback: None, allowed: 0, denied: 0, reported_us: now_us }
    }

    fn has_ended(&self, now_us: u64) -> bool {
        self.assignment.is_some_and(|assignment| assignment.ends_us <= now_us)
    }

    fn decide(&mut self, options: ProxyOptions, now_us: u64) -> Decision {
        match &mut self.assignment {
            Some(assignment) if assignment.ends_us > now_us => {
                let passes = match &mut assignment.strategy {
                    Strategy::Allow => true,
                    Strategy::Deny => false,
                    Strategy::Tokens(filled) => filled.take(now_us),
                };
                Decision { passes, basis: Basis::Assignment }
            }
            Some(_) => {
                let passes = match options.fallback {
                    Some(tokens) => self.fallback.get_or_insert(Filled::full(tokens, now_us)).take(now_us),
                    None => options.allows_unassigned,
                };
                Decision { passes, basis: Basis::Ended }
            }
            None => Decision { passes: options.allows_unassigned, basis: Basis::None },
        }
    }

    /// The assignment that follows from an action; `None` if it is skipped.
    fn change(&self, options: ProxyOptions, action: &QuotaAssignmentAction, now_us: u64) -> Option<Assignment> {
        // Without a time to live, or with less than a second, it is never in force.
        let ttl_s = action.assignment_time_to_live.map_or(0, |ttl| u64::try_from(ttl.seconds).unwrap_or(0));
        let ends_us = now_us + ttl_s * 1_000_000;
        let strategy = match action.rate_limit_strategy.as_ref()?.strategy.as_ref()? {
            SentStrategy::BlanketRule(rule) if *rule == i32::from(BlanketRule::AllowAll) => Strategy::Allow,
            SentStrategy::BlanketRule(_) => Strategy::Deny,
            SentStrategy::TokenBucket(sent) if sent.max_tokens == 0 => Strategy::Deny,
            SentStrategy::TokenBucket(sent) => match tokens_of(sent) {
                Some(tokens) => Strategy::Tokens(self.refill(options, tokens, now_us)),
                None => Strategy::Allow,
            },
            SentStrategy::RequestsPerTimeUnit(_) => return None,
        };
        Some(Assignment { strategy, ends_us })
    }

    fn refill(&self, options: ProxyOptions, tokens: Tokens, now_us: u64) -> Filled {
        let in_force = self.assignment.filter(|assignment| assignment.ends_us > now_us);
        let Some(Strategy::Tokens(old)) = in_force.map(|assignment| assignment.strategy) else {
            return Filled::full(tokens, now_us);
        };
        if (old.tokens.max, old.tokens.fill) == (tokens.max, tokens.fill) {
            return old;
        }
        if !options.is_envoy {
            return Filled::full(tokens, now_us);
        }
        let parts = u128::from(old.parts_at(now_us)) * u128::from(tokens.max) / u128::from(old.tokens.max);
        Filled { tokens, parts: u64::try_from(parts).unwrap(), at_us: now_us }
    }
}

/// Tokens of a bucket as they are understood; `None`: they limit nothing.
fn tokens_of(sent: &TokenBucket) -> Option<Tokens> {
    let interval_s = sent.fill_interval.map_or(0, |interval| u64::try_from(interval.seconds).unwrap_or(0));
    let fill = sent.tokens_per_fill.unwrap_or(0).into();
    (interval_s > 0).then_some(Tokens { max: sent.max_tokens.into(), fill, interval_s })
}

fn id_of((rule, value): BucketName) -> BucketId {
    let entry = BucketEntry { key: format!("rule{rule}").into(), value: format!("value{value}").into() };
    BucketId { bucket: vec![entry] }
}

fn name_of(id: &BucketId) -> Option<BucketName> {
    let [entry] = &*id.bucket else { return None };
    let number = |bytes: &Bytes, prefix: &str| std::str::from_utf8(bytes).ok()?.strip_prefix(prefix)?.parse().ok();
    Some((usize::try_from(number(&entry.key, "rule")?).ok()?, number(&entry.value, "value")?))
}

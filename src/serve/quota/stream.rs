//! One stream: reads reports, and sends what follows from them.
//!
//! A stream has a task of its own. It works through a report in pieces and yields between them. A response is built
//! only when the last one was taken: a proxy that does not read costs one message, and gets what is due when it reads
//! again.
//!
//! Decides: when a bucket is abandoned; how large a response may be.
//! Decides: why a quota stream ends (unread responses, two domains, malformed report, drain).
//! Decides: buckets while no rules are loaded; what a changed rule does to open streams.
//! Decides: the TTL of buckets without a limit.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::{Stream, StreamExt as _};
use prost::Message as _;
use smallvec::SmallVec;
use tokio::sync::mpsc::{self, Permit, Sender};
use tokio::time::Instant;
use tonic::Status;

use super::bucket::{BucketKind, Buckets, log_indivisible_limit, log_too_many_buckets, log_unassignable_bucket};
use super::divisions::{BucketOfStream, MAX_HOLDERS_PER_KEY, division_key};
use super::evidence::DeliveryEvidence;
use super::messages::{
    ReportField, ReportFields, UnassignableReason, elapsed_us, normalize_id, push_abandonment, push_assignment,
};
use super::room::count_places_of_id;
use super::service::QuotaService;
use super::stream_handle::StreamHandle;
use crate::base::clock::Time;
use crate::base::pb::codec::GRPC_FRAME_HEAD_BYTES;
use crate::base::pb::rlqs::rate_limit_quota_usage_reports::BucketQuotaUsage;
use crate::base::pb::rlqs::{BucketId, RateLimitQuotaResponse};
use crate::decide::decider::Decider;
use crate::decide::quota_buckets::{BucketLimits, ReportedHits};
use crate::limit::division::assignment::{Assignment, Retirement, Strategy};
use crate::limit::division::holder::Usage;
use crate::limit::request::{Descriptor, Entry, Hits, Request};

/// Buckets that are worked on between two yields.
const BUCKETS_PER_TURN: usize = 64;
/// Time without requests after which a bucket is abandoned, in microseconds.
const IDLE_US: u64 = 60_000_000;
/// Time without a report after which a bucket counts as forgotten by its proxy, in microseconds.
const FORGOTTEN_US: u64 = 60_000_000;
/// Time to live of an assignment that lets everything pass, in seconds.
const OPEN_TTL_S: u32 = 60;
/// Time before the end of an assignment that lets everything pass in which it is renewed, in microseconds.
const OPEN_RENEWAL_US: u64 = 31_000_000;
/// Time that a proxy may leave a response unread, while more is due.
const MAX_UNREAD_TIME: Duration = Duration::from_secs(60);
/// Bytes of ids from which on no more wait to be abandoned; the proxy reports others again.
const MAX_UNWANTED_BYTES: usize = 128 << 10;
/// Bytes that an id counts beside its own.
const MIN_UNWANTED_BYTES: usize = 128;
/// Bytes of a response from which on what is due goes into the next one.
const MAX_RESPONSE_BYTES: usize = 2 << 20;
/// Bytes of the actions of one bucket, without its id.
const ACTION_BYTES: usize = 64;
/// Maximum length of a domain in bytes.
const MAX_DOMAIN_BYTES: usize = 4096;
/// Longest rest after a report.
const MAX_READING_PAUSE: Duration = Duration::from_secs(1);
/// Time in which a response is built; what is still due then goes into the next one.
///
/// An assignment is taken as sent when its bucket is worked on: a response that took longer would make its times old.
const MAX_RESPONSE_TIME: Duration = Duration::from_millis(200);
/// Interval of housekeeping.
const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(1);

/// Messages of a proxy.
pub trait ReportStream: Stream<Item = Result<Bytes, Status>> + Unpin + Send {}

impl<S: Stream<Item = Result<Bytes, Status>> + Unpin + Send> ReportStream for S {}

/// Sends responses.
pub type ResponseSender = Sender<Result<RateLimitQuotaResponse, Status>>;

/// The task of a stream.
pub struct StreamTask {
    /// The service that the stream belongs to.
    pub quota: Arc<QuotaService>,
    handle: Arc<StreamHandle>,
    domain: String,
    buckets: Buckets,
    /// Ids that the proxy must forget, because there is no room for them.
    unwanted: Vec<BucketId>,
    /// What they count.
    unwanted_bytes: usize,
    /// Number of the rules that the buckets were matched by.
    rules_version: u64,
    /// Time since when a response waits for the proxy.
    unread_since: Option<Instant>,
    evidence: Option<DeliveryEvidence>,
    /// Bytes of all responses.
    produced_bytes: u64,
    /// Buckets with an assignment in a later response than the one that evidence is waited for.
    buckets_for_next_evidence: BTreeSet<u32>,
    /// Evidence that is waited for.
    awaited: Option<AwaitedEvidence>,
}

/// Buckets whose last assignments are in force once a PING was answered.
struct AwaitedEvidence {
    buckets: BTreeSet<u32>,
    /// All that was sent before this is received.
    sent_before: Time,
    received: BoxFuture<'static, ()>,
}

/// Why a stream ends.
enum StreamEnd {
    /// The proxy, or the server, ends it.
    Closed,
    /// An error that the proxy is told.
    Failed(Status),
}

impl StreamTask {
    /// A task without buckets.
    pub fn new(quota: Arc<QuotaService>, handle: Arc<StreamHandle>, evidence: Option<DeliveryEvidence>) -> Self {
        Self {
            evidence,
            produced_bytes: 0,
            buckets_for_next_evidence: BTreeSet::new(),
            awaited: None,
            quota,
            handle,
            domain: String::new(),
            buckets: Buckets::default(),
            unwanted: Vec::new(),
            unwanted_bytes: 0,
            rules_version: 0,
            unread_since: None,
        }
    }

    /// Serves the stream until it ends. `reports` are the messages of the proxy, undecoded.
    pub async fn run(mut self, mut reports: impl ReportStream, responses: ResponseSender) {
        let end = self.serve(&mut reports, &responses).await;
        self.remove_all_buckets();
        self.quota.close_stream(&self.handle);
        if let StreamEnd::Failed(status) = end {
            // Fails if the proxy is gone.
            let _ = responses.try_send(Err(status));
        }
    }

    async fn serve(&mut self, reports: &mut impl ReportStream, responses: &ResponseSender) -> StreamEnd {
        let quota = Arc::clone(&self.quota);
        let mut housekeeping = tokio::time::interval(HOUSEKEEPING_INTERVAL);
        housekeeping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut reads_again = Instant::now();
        loop {
            let has_due = !self.unwanted.is_empty() || !self.handle.lock().due.is_empty();
            tokio::select! {
                biased;
                () = quota.ending.wait() => return StreamEnd::Closed,
                () = responses.closed() => return StreamEnd::Closed,
                report = reports.next(), if reads_again <= Instant::now() => match report {
                    Some(Ok(report)) => {
                        let began = Instant::now();
                        if let Err(status) = self.take_report(report).await {
                            return StreamEnd::Failed(status);
                        }
                        // Reports take half of the stream's time at most, however many there are.
                        let ended = Instant::now();
                        reads_again = ended + (ended - began).min(MAX_READING_PAUSE);
                    }
                    Some(Err(_)) | None => return StreamEnd::Closed,
                },
                permit = responses.reserve(), if has_due => match permit {
                    Ok(permit) => {
                        self.unread_since = None;
                        self.respond(permit).await;
                    }
                    Err(mpsc::error::SendError(())) => return StreamEnd::Closed,
                },
                () = self.handle.wake.notified(), if !has_due => {}
                () = tokio::time::sleep_until(reads_again), if reads_again > Instant::now() => {}
                () = wait_for_evidence(&mut self.awaited) => self.take_evidence(),
                _ = housekeeping.tick() => {
                    self.rematch_and_drop_buckets().await;
                    if self.is_unread_for_too_long(has_due, responses) {
                        self.quota.stats.unread_streams.add(1);
                        return StreamEnd::Failed(Status::resource_exhausted("responses are not read"));
                    }
                }
            }
        }
    }

    /// True if the proxy has not read for so long that the stream must end.
    fn is_unread_for_too_long(&mut self, has_due: bool, responses: &ResponseSender) -> bool {
        if !has_due || responses.capacity() > 0 {
            self.unread_since = None;
            return false;
        }
        self.unread_since.get_or_insert_with(Instant::now).elapsed() > MAX_UNREAD_TIME
    }

    /// Handles a message of the proxy: its buckets are matched, their usage is charged, their assignments are sent.
    async fn take_report(&mut self, report: Bytes) -> Result<(), Status> {
        let now = self.quota.service.clock.now();
        self.quota.stats.reports.add(1);
        let mut fields = ReportFields::new(report);
        let mut in_turn = 0;
        let mut usages = Vec::new();
        while let Some(field) = fields.next_field()? {
            match field {
                ReportField::Domain(domain) => self.take_domain(&domain)?,
                ReportField::Usage(usage) => usages.push(usage),
                ReportField::TooLong => self.record_unassignable(UnassignableReason::TooLong),
                ReportField::Unknown => {}
            }
            in_turn += 1;
            if in_turn % BUCKETS_PER_TURN == 0 {
                self.take_usages(std::mem::take(&mut usages), now).await;
                tokio::task::yield_now().await;
            }
        }
        self.take_usages(usages, now).await;
        let mut state = self.handle.lock();
        state.reports += 1;
        state.last_report = now;
        state.buckets = self.buckets.len();
        Ok(())
    }

    fn take_domain(&mut self, domain: &[u8]) -> Result<(), Status> {
        if domain.len() > MAX_DOMAIN_BYTES {
            return Err(Status::invalid_argument("the domain is too long"));
        }
        let domain = std::str::from_utf8(domain).map_err(|_| Status::invalid_argument("the domain is not UTF-8"))?;
        if self.domain.is_empty() {
            domain.clone_into(&mut self.domain);
            domain.clone_into(&mut self.handle.lock().domain);
        } else if !domain.is_empty() && self.domain != domain {
            return Err(Status::invalid_argument("a stream is for one domain"));
        }
        Ok(())
    }

    /// Takes the usages of one turn, which come one by one.
    pub async fn take_usages(&mut self, usages: Vec<Box<BucketQuotaUsage>>, now: Time) {
        let mut indices: SmallVec<[(u32, Box<BucketQuotaUsage>); BUCKETS_PER_TURN]> = SmallVec::new();
        for mut usage in usages {
            if let Some(index) = self.find_or_add_bucket(usage.bucket_id.take(), now) {
                indices.push((index, usage));
            }
        }
        self.match_buckets(&indices.iter().map(|(index, _)| *index).collect::<Vec<_>>(), now).await;
        let mut keys: SmallVec<[u128; BUCKETS_PER_TURN]> = SmallVec::new();
        for (index, usage) in &indices {
            keys.extend(self.take_usage(*index, usage, now));
        }
        keys.sort_unstable();
        keys.dedup();
        self.quota.divisions.settle_keys_with_store(keys).await;
        self.handle.lock().due.extend(indices.iter().map(|(index, _)| *index));
    }

    fn record_unassignable(&self, reason: UnassignableReason) {
        self.quota.stats.unassignable.add(1);
        log_unassignable_bucket(&self.handle.peer, &self.domain, reason);
    }

    /// Returns the index of a bucket; `None` if it cannot be answered, or there is no room for it.
    fn find_or_add_bucket(&mut self, id: Option<BucketId>, now: Time) -> Option<u32> {
        let id = match normalize_id(id) {
            Ok(id) => id,
            Err(reason) => {
                self.record_unassignable(reason);
                return None;
            }
        };
        let encoded = id.encode_to_vec();
        if let Some(index) = self.buckets.find(&encoded) {
            return Some(index);
        }
        if !self.quota.room.take(self.handle.client, self.buckets.places(), count_places_of_id(&encoded)) {
            log_too_many_buckets(&self.handle.peer, &self.domain, self.buckets.len());
            self.quota.stats.abandoned.add(1);
            if self.unwanted_bytes < MAX_UNWANTED_BYTES {
                self.unwanted_bytes += encoded.len() + MIN_UNWANTED_BYTES;
                self.unwanted.push(id);
            }
            return None;
        }
        Some(self.buckets.add(encoded.into(), now))
    }

    /// Takes the usage of one bucket; returns the key of its division.
    fn take_usage(&mut self, index: u32, usage: &BucketQuotaUsage, now: Time) -> Option<u128> {
        let (allowed, denied) = (usage.num_requests_allowed, usage.num_requests_denied);
        let bucket = self.buckets.get_mut(index)?;
        bucket.reported = now;
        if allowed > 0 || denied > 0 {
            bucket.used = now;
        }
        let (kind, id) = (bucket.kind, bucket.id.clone());
        let stats = &self.quota.stats;
        stats.allowed_hits.add(allowed.min(u64::from(u32::MAX)));
        stats.denied_hits.add(denied.min(u64::from(u32::MAX)));
        if allowed > 0 || denied > 0 {
            self.record_decisions(&id, ReportedHits { allowed, denied });
        }
        match kind {
            BucketKind::Open { is_matched, .. } => {
                if !is_matched {
                    self.quota.stats.unmatched_hits.add(allowed.min(u64::from(u32::MAX)));
                }
                None
            }
            BucketKind::Refused => {
                self.quota.stats.refused.add(1);
                None
            }
            BucketKind::Divided { key } => {
                let received = self.quota.earliest_arrival(now);
                let usage = Usage { allowed, denied, elapsed_us: elapsed_us(usage), received };
                let debt = self.quota.divisions.record_report(key, &self.holder(index), usage, now);
                self.quota.stats.debt_hits.add(debt.min(u64::from(u32::MAX)));
                Some(key)
            }
        }
    }

    fn record_decisions(&self, id: &Bytes, reported: ReportedHits) {
        let Ok(id) = BucketId::decode(id.clone()) else { return };
        let rules = self.quota.service.rules.current_rules();
        let context = self.quota.service.build_decision_context(rules.as_deref(), Duration::ZERO);
        let entries = entries_as_refs(&id);
        self.quota.service.decider.record_bucket_report(context, &self.domain, &entries, reported);
    }

    fn holder(&self, bucket: u32) -> BucketOfStream {
        BucketOfStream { stream: Arc::clone(&self.handle), bucket }
    }

    /// Matches buckets that were not matched by the current rules, or whose limits may change.
    async fn match_buckets(&mut self, indices: &[u32], now: Time) {
        let Some(rules) = self.quota.service.rules.current_rules_owned() else { return };
        let quota = Arc::clone(&self.quota);
        let context = quota.service.build_decision_context(Some(&rules), Duration::MAX);
        for index in indices {
            let Some(bucket) = self.buckets.get(*index) else { continue };
            if bucket.rules_version == rules.version && !bucket.may_change {
                continue;
            }
            let bucket_id = bucket.id.clone();
            let Ok(id) = BucketId::decode(bucket_id.clone()) else { continue };
            let entries = entries_as_refs(&id);
            if Decider::must_read_bucket_rows(context) {
                let descriptor =
                    Descriptor { entries: entries.clone(), hits: Hits::Peek, hits_addend: None, limit_override: None };
                let descriptors = SmallVec::from_iter([descriptor]);
                let request = Request { domain: &self.domain, descriptors, hits_addend: 0 };
                quota.service.decider.read_bucket_rows(context, &request).await;
            }
            let matched = quota.service.decider.select_bucket_limits(context, &self.domain, &bucket_id, &entries);
            // There may be room later at a key that has too many proxies now.
            let is_dividable = matches!(matched.limits, BucketLimits::Divided(_));
            let kind = self.join_division(*index, matched.limits, now);
            if let Some(bucket) = self.buckets.get_mut(*index) {
                let is_key_full = is_dividable && kind == BucketKind::Refused;
                (bucket.kind, bucket.rules_version, bucket.may_change) =
                    (kind, rules.version, matched.may_change || is_key_full);
            }
        }
    }

    /// Makes a bucket a holder of what limits it, in place of what limited it before.
    fn join_division(&self, index: u32, limits: BucketLimits, now: Time) -> BucketKind {
        let old = self.buckets.get(index).map(|bucket| bucket.kind);
        let open = |is_matched| match old {
            Some(BucketKind::Open { ends, .. }) => BucketKind::Open { ends, is_matched },
            _ => BucketKind::Open { ends: Time::default(), is_matched },
        };
        let new = match &limits {
            BucketLimits::Unmatched => open(false),
            BucketLimits::Unlimited => open(true),
            BucketLimits::Refused(_) => BucketKind::Refused,
            BucketLimits::Divided(counters) => BucketKind::Divided { key: division_key(counters) },
        };
        let holder = self.holder(index);
        let moved_from = match old.filter(|old| *old != new) {
            Some(BucketKind::Divided { key }) => Some(key),
            _ => None,
        };
        if let Some(key) = moved_from {
            self.quota.divisions.leave(key, &holder, now);
        }
        match limits {
            BucketLimits::Divided(counters) => {
                let (rule, key) = (counters.rule.clone(), division_key(&counters));
                if !self.quota.divisions.join(key, counters, holder.clone(), now) {
                    log_indivisible_limit(
                        &rule,
                        &format!(
                            "too many proxies of {MAX_HOLDERS_PER_KEY}, or of one address, share its key at this replica"
                        ),
                    );
                    return BucketKind::Refused;
                }
                if moved_from.is_some() {
                    self.quota.divisions.note_assignment_of_former_key(key, &holder);
                }
            }
            BucketLimits::Refused(refusal) if old != Some(new) => {
                log_indivisible_limit(&refusal.rule, refusal.reason);
            }
            BucketLimits::Refused(_) | BucketLimits::Unmatched | BucketLimits::Unlimited => {}
        }
        new
    }

    /// Sends what is due.
    async fn respond(&mut self, permit: Permit<'_, Result<RateLimitQuotaResponse, Status>>) {
        let due = std::mem::take(&mut self.handle.lock().due);
        let mut response = RateLimitQuotaResponse::default();
        self.unwanted_bytes = 0;
        for id in self.unwanted.drain(..) {
            push_abandonment(&mut response, &id);
        }
        let began = Instant::now();
        let mut due = due.into_iter();
        let (mut count, mut bytes) = (0, 0);
        while began.elapsed() < MAX_RESPONSE_TIME
            && bytes < MAX_RESPONSE_BYTES
            && let Some(index) = due.next()
        {
            count += 1;
            if count % BUCKETS_PER_TURN == 0 {
                tokio::task::yield_now().await;
            }
            // Two actions at most.
            bytes += self.buckets.get(index).map_or(0, |bucket| 2 * (bucket.id.len() + ACTION_BYTES));
            self.add_actions(index, &mut response, self.quota.service.clock.now());
        }
        self.handle.lock().due.extend(due);
        if !response.bucket_action.is_empty() {
            self.produced_bytes += (response.encoded_len() + GRPC_FRAME_HEAD_BYTES) as u64;
            permit.send(Ok(response));
        }
        self.await_evidence();
    }

    /// Begins to wait for evidence that the last response was received, if a bucket needs it.
    fn await_evidence(&mut self) {
        let Some(evidence) = &self.evidence else { return };
        if self.awaited.is_none() && !self.buckets_for_next_evidence.is_empty() {
            self.awaited = Some(AwaitedEvidence {
                buckets: std::mem::take(&mut self.buckets_for_next_evidence),
                sent_before: self.quota.service.clock.now().plus_us(1),
                received: Box::pin(evidence.clone().wait_until_received(self.produced_bytes)),
            });
        }
    }

    fn take_evidence(&mut self) {
        let Some(AwaitedEvidence { buckets, sent_before, .. }) = self.awaited.take() else { return };
        let now = self.quota.service.clock.now();
        for index in buckets {
            if let Some(key) = self.key_of(index) {
                self.quota.divisions.record_ping_ack(key, &self.holder(index), sent_before, now);
            }
        }
        self.await_evidence();
    }

    /// Adds what is to be sent of the bucket `index` to a response.
    pub fn add_actions(&mut self, index: u32, response: &mut RateLimitQuotaResponse, now: Time) {
        let Some(bucket) = self.buckets.get(index) else { return };
        let Ok(id) = BucketId::decode(bucket.id.clone()) else { return };
        let is_idle = now.since_us(bucket.used) >= IDLE_US;
        let kind = bucket.kind;
        let assignment = match kind {
            BucketKind::Refused => None,
            BucketKind::Open { .. } if is_idle => return self.abandon(index, &id, response, now),
            BucketKind::Open { ends, is_matched } => {
                let is_due = ends.since_us(now) < OPEN_RENEWAL_US;
                if is_due && let Some(bucket) = self.buckets.get_mut(index) {
                    let ends = now.plus_us(u64::from(OPEN_TTL_S) * 1_000_000);
                    bucket.kind = BucketKind::Open { ends, is_matched };
                }
                is_due.then_some(Assignment { strategy: Strategy::Allow, starts_full: false, ttl_s: OPEN_TTL_S })
            }
            BucketKind::Divided { key } if is_idle => {
                match self.quota.divisions.retire(key, &self.holder(index), now) {
                    Retirement::Assign(assignment) => Some(assignment),
                    Retirement::Wait => None,
                    Retirement::Done => return self.abandon(index, &id, response, now),
                }
            }
            BucketKind::Divided { key } => self.quota.divisions.assign(key, &self.holder(index), now),
        };
        if let Some(assignment) = assignment {
            if matches!(kind, BucketKind::Divided { .. }) {
                self.buckets_for_next_evidence.insert(index);
            }
            self.quota.stats.assignments.add(1);
            if let Strategy::Tokens(tokens) = assignment.strategy {
                self.quota.stats.assigned_hits.add(tokens.max.into());
            }
            push_assignment(response, &id, assignment);
        }
    }

    /// Makes the proxy forget a bucket.
    fn abandon(&mut self, index: u32, id: &BucketId, response: &mut RateLimitQuotaResponse, now: Time) {
        self.remove_bucket(index, now);
        self.quota.stats.abandoned.add(1);
        push_abandonment(response, id);
    }

    fn remove_bucket(&mut self, index: u32, now: Time) {
        let Some(bucket) = self.buckets.remove(index) else { return };
        self.quota.room.give_back(self.handle.client, count_places_of_id(&bucket.id));
        if let BucketKind::Divided { key } = bucket.kind {
            self.quota.divisions.leave(key, &self.holder(index), now);
        }
    }

    /// Matches all buckets again after a change of the rules, and drops those that the proxy forgot.
    async fn rematch_and_drop_buckets(&mut self) {
        let now = self.quota.service.clock.now();
        let version = self.quota.service.rules.current_rules().as_ref().map_or(0, |rules| rules.version);
        let has_changed = version != self.rules_version;
        self.rules_version = version;
        let indices = self.buckets.indices();
        for turn in indices.chunks(BUCKETS_PER_TURN) {
            let is_forgotten = |index: &&u32| {
                self.buckets.get(**index).is_some_and(|bucket| now.since_us(bucket.reported) > FORGOTTEN_US)
            };
            let forgotten: Vec<u32> = turn.iter().filter(is_forgotten).copied().collect();
            forgotten.into_iter().for_each(|index| self.remove_bucket(index, now));
            if has_changed {
                self.match_buckets(turn, now).await;
                let keys: SmallVec<[u128; BUCKETS_PER_TURN]> =
                    turn.iter().filter_map(|index| self.key_of(*index)).collect();
                self.quota.divisions.settle_keys_with_store(keys).await;
                self.handle.lock().due.extend(turn);
                tokio::task::yield_now().await;
            }
        }
    }

    fn key_of(&self, index: u32) -> Option<u128> {
        match self.buckets.get(index)?.kind {
            BucketKind::Divided { key } => Some(key),
            BucketKind::Open { .. } | BucketKind::Refused => None,
        }
    }

    fn remove_all_buckets(&mut self) {
        let now = self.quota.service.clock.now();
        for index in self.buckets.indices() {
            self.remove_bucket(index, now);
        }
    }
}

async fn wait_for_evidence(awaited: &mut Option<AwaitedEvidence>) {
    match awaited {
        Some(awaited) => (&mut awaited.received).await,
        None => std::future::pending().await,
    }
}

fn entries_as_refs(id: &BucketId) -> SmallVec<[Entry<'_>; 4]> {
    id.bucket.iter().map(|entry| Entry { key: &entry.key, value: &entry.value }).collect()
}

//! A proxy that a test plays: a stream, on which it reports what the test says and keeps what it is assigned.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use tokio::runtime::{self, Runtime};
use tokio::sync::mpsc;
use tollkeeper::base::pb::rlqs::bucket_id::BucketEntry;
use tollkeeper::base::pb::rlqs::rate_limit_quota_response::bucket_action::BucketAction as Action;
use tollkeeper::base::pb::rlqs::rate_limit_quota_service_client::RateLimitQuotaServiceClient;
use tollkeeper::base::pb::rlqs::rate_limit_quota_usage_reports::BucketQuotaUsage;
use tollkeeper::base::pb::rlqs::rate_limit_strategy::{BlanketRule, Strategy};
use tollkeeper::base::pb::rlqs::{BucketId, RateLimitQuotaResponse, RateLimitQuotaUsageReports};
use tonic::transport::Endpoint;
use tonic::{Status, Streaming};

use kit::PATIENCE;

/// A bucket's key and value pairs, with requests that passed and that were denied.
pub(crate) type TextUsage<'a> = (&'a [(&'a str, &'a str)], u64, u64);
/// The same with any bytes, and requests that passed.
pub(crate) type BytesUsage<'a> = (&'a [(&'a [u8], &'a [u8])], u64);

/// Pairs of a bucket, sorted.
type BucketKey = Vec<(Vec<u8>, Vec<u8>)>;

/// What a bucket was assigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Assigned {
    Allow,
    Deny,
    Tokens { max: u32, fill: u32, interval_s: u32, ttl_s: u32, starts_full: bool },
}

/// A stream.
#[derive(Debug)]
pub(crate) struct Proxy {
    runtime: Runtime,
    domain: String,
    reports: mpsc::Sender<RateLimitQuotaUsageReports>,
    responses: Result<Streaming<RateLimitQuotaResponse>, Status>,
    /// Assignments that no test has asked for, by bucket.
    waiting: HashMap<BucketKey, Vec<Assigned>>,
    /// Number of responses that were read.
    pub(crate) responses_read: usize,
}

impl Proxy {
    /// Opens a stream for a domain to a port of 127.0.0.1.
    pub(crate) fn connect(port: u16, domain: &str) -> Self {
        let runtime = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (reports, receiver) = mpsc::channel(16);
        let responses = runtime.block_on(async {
            let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}")).unwrap();
            let endpoint = endpoint.user_agent("envoy").unwrap();
            let channel = endpoint.connect().await.unwrap();
            let sent = futures_util::stream::unfold(receiver, |mut receiver: mpsc::Receiver<_>| async move {
                receiver.recv().await.map(|report| (report, receiver))
            });
            let mut client = RateLimitQuotaServiceClient::new(channel);
            client.stream_rate_limit_quotas(sent).await.map(tonic::Response::into_inner)
        });
        Self { runtime, domain: domain.to_owned(), reports, responses, waiting: HashMap::new(), responses_read: 0 }
    }

    /// Sends a report of these buckets.
    pub(crate) fn report(&mut self, usages: &[TextUsage<'_>]) {
        self.report_after(Duration::ZERO, usages);
    }

    /// Sends a report of these buckets, which says that so much time has passed since the last one.
    pub(crate) fn report_after(&mut self, elapsed: Duration, usages: &[TextUsage<'_>]) {
        let usage = |(entries, allowed, denied): &TextUsage<'_>| {
            let entries = entries.iter().map(|(key, value)| entry(key.as_bytes(), value.as_bytes())).collect();
            let time_elapsed = Some(prost_types::Duration::try_from(elapsed).unwrap());
            BucketQuotaUsage { time_elapsed, ..usage_of(entries, *allowed, *denied) }
        };
        self.send(usages.iter().map(usage).collect());
    }

    /// Reads what has come, without waiting; returns the last assignment of a bucket among it.
    pub(crate) fn last_of_now(&mut self, bucket: &[(&str, &str)]) -> Option<Assigned> {
        while let Some(response) = self.receive(Duration::from_millis(1)) {
            self.take(response);
        }
        self.waiting.get_mut(&key_of(bucket)).and_then(|waiting| std::mem::take(waiting).pop())
    }

    /// Sends a report of buckets whose ids are any bytes.
    pub(crate) fn report_bytes(&mut self, usages: &[BytesUsage<'_>]) {
        let usage = |(entries, allowed): &BytesUsage<'_>| {
            usage_of(entries.iter().map(|(key, value)| entry(key, value)).collect(), *allowed, 0)
        };
        self.send(usages.iter().map(usage).collect());
    }

    fn send(&mut self, bucket_quota_usages: Vec<BucketQuotaUsage>) {
        let report = RateLimitQuotaUsageReports { domain: self.domain.clone(), bucket_quota_usages };
        // Fails if the server has ended the stream, which a test sees at its end.
        let _ = self.runtime.block_on(self.reports.send(report));
    }

    /// The next assignment of a bucket.
    pub(crate) fn next(&mut self, bucket: &[(&str, &str)]) -> Assigned {
        let key = key_of(bucket);
        loop {
            if let Some(waiting) = self.waiting.get_mut(&key).filter(|waiting| !waiting.is_empty()) {
                return waiting.remove(0);
            }
            let response = self.receive(PATIENCE).unwrap_or_else(|| panic!("no response for {bucket:?}"));
            self.take(response);
        }
    }

    fn receive(&mut self, patience: Duration) -> Option<RateLimitQuotaResponse> {
        let responses = self.responses.as_mut().expect("the stream is open");
        let next = self.runtime.block_on(async { tokio::time::timeout(patience, responses.message()).await });
        next.ok()?.expect("the stream does not fail")
    }

    fn take(&mut self, response: RateLimitQuotaResponse) {
        self.responses_read += 1;
        let mut denied = HashMap::new();
        for action in response.bucket_action {
            let id = action.bucket_id.unwrap_or_default();
            let mut key: BucketKey = id.bucket.iter().map(|entry| (entry.key.to_vec(), entry.value.to_vec())).collect();
            key.sort();
            let Some(Action::QuotaAssignmentAction(assignment)) = action.bucket_action else { continue };
            let ttl_s = u32::try_from(assignment.assignment_time_to_live.unwrap().seconds).unwrap();
            let assigned = match assignment.rate_limit_strategy.unwrap().strategy.unwrap() {
                Strategy::BlanketRule(rule) if rule == i32::from(BlanketRule::AllowAll) => Assigned::Allow,
                Strategy::BlanketRule(_) => Assigned::Deny,
                Strategy::TokenBucket(bucket) => {
                    let interval_s = u32::try_from(bucket.fill_interval.unwrap().seconds).unwrap();
                    // Unset, it is none to Envoy, and 1 to others. One token a year is none to all.
                    let fill = bucket.tokens_per_fill.expect("it means the same to all clients");
                    Assigned::Tokens {
                        max: bucket.max_tokens,
                        fill: if interval_s == 365 * 86_400 { 0 } else { fill },
                        interval_s,
                        ttl_s,
                        starts_full: denied.contains_key(&key),
                    }
                }
                Strategy::RequestsPerTimeUnit(_) => panic!("Envoy ignores this strategy"),
            };
            let waiting = self.waiting.entry(key.clone()).or_default();
            if denied.insert(key, ()).is_some() {
                waiting.pop();
            }
            waiting.push(assigned);
        }
    }

    /// Waits for the end of the stream; returns its error.
    pub(crate) fn end(&mut self) -> Option<Status> {
        match &mut self.responses {
            Err(status) => Some(status.clone()),
            Ok(responses) => loop {
                let next = self.runtime.block_on(async { tokio::time::timeout(PATIENCE, responses.message()).await });
                match next.expect("the stream ends") {
                    Ok(Some(_)) => {}
                    Ok(None) => return None,
                    Err(status) => return Some(status),
                }
            },
        }
    }
}

fn key_of(bucket: &[(&str, &str)]) -> BucketKey {
    let mut key: BucketKey =
        bucket.iter().map(|(key, value)| (key.as_bytes().to_vec(), value.as_bytes().to_vec())).collect();
    key.sort();
    key
}

fn entry(key: &[u8], value: &[u8]) -> BucketEntry {
    BucketEntry { key: Bytes::copy_from_slice(key), value: Bytes::copy_from_slice(value) }
}

fn usage_of(bucket: Vec<BucketEntry>, allowed: u64, denied: u64) -> BucketQuotaUsage {
    BucketQuotaUsage {
        bucket_id: Some(BucketId { bucket }),
        time_elapsed: Some(prost_types::Duration { seconds: 0, nanos: 0 }),
        num_requests_allowed: allowed,
        num_requests_denied: denied,
    }
}

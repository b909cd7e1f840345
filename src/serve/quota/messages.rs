//! Messages of the quota service: reports are read piece by piece, without a copy, and actions are built.
//!
//! A report can have a hundred thousand buckets, so it is never decoded as a whole. Malformed pieces are errors of the
//! stream; numbers that cannot be are clamped.
//!
//! Decides: which ids of buckets are refused; how an assignment is written.

use bytes::{Buf as _, Bytes};
use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint, skip_field};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::{ProstCodec, ProstEncoder};

use crate::base::pb::rlqs::bucket_id::BucketEntry;
use crate::base::pb::rlqs::rate_limit_quota_response::BucketAction;
use crate::base::pb::rlqs::rate_limit_quota_response::bucket_action::{
    AbandonAction, BucketAction as Action, QuotaAssignmentAction,
};
use crate::base::pb::rlqs::rate_limit_quota_usage_reports::BucketQuotaUsage;
use crate::base::pb::rlqs::rate_limit_strategy::{BlanketRule, Strategy as SentStrategy};
use crate::base::pb::rlqs::{BucketId, RateLimitQuotaResponse, RateLimitStrategy, TokenBucket};
use crate::limit::division::assignment::{Assignment, ProxyTokenBucket, Strategy};

/// Maximum number of pairs of a bucket's id.
const MAX_ENTRIES: usize = 64;
/// Maximum size of a bucket's id in bytes.
const MAX_ID_BYTES: usize = 4096;

/// Codec that leaves reports as they came.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QuotaCodec;

/// Decoder of the codec.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawDecoder;

impl Codec for QuotaCodec {
    type Encode = RateLimitQuotaResponse;
    type Decode = Bytes;
    type Encoder = ProstEncoder<RateLimitQuotaResponse>;
    type Decoder = RawDecoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<RateLimitQuotaResponse, RateLimitQuotaResponse>::default().encoder()
    }

    fn decoder(&mut self) -> RawDecoder {
        RawDecoder
    }
}

impl Decoder for RawDecoder {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

/// Fields of a report, in their order.
#[derive(Debug)]
pub struct ReportFields {
    left: Bytes,
}

/// One field of a report.
#[derive(Debug)]
pub enum ReportField {
    /// `domain`.
    Domain(Bytes),
    /// `bucket_quota_usages`.
    Usage(Box<BucketQuotaUsage>),
    /// A usage that is too long to have an id that can be assigned. It is not decoded: an empty pair of an id takes
    /// two bytes in a message, and 64 in memory.
    TooLong,
    /// A field that this version does not know.
    Unknown,
}

/// Maximum length of a usage in bytes: more than the largest id and its numbers need.
const MAX_USAGE_BYTES: usize = 8192;

impl ReportFields {
    /// The fields of a message.
    pub const fn new(message: Bytes) -> Self {
        Self { left: message }
    }

    /// Returns the next field; `None` at the end.
    ///
    /// # Errors
    /// The message is malformed.
    pub fn next_field(&mut self) -> Result<Option<ReportField>, Status> {
        let malformed = |error: prost::DecodeError| Status::invalid_argument(format!("malformed report: {error}"));
        if self.left.has_remaining() {
            let (field, wire_type) = decode_key(&mut self.left).map_err(malformed)?;
            if wire_type != WireType::LengthDelimited || !matches!(field, 1 | 2) {
                skip_field(wire_type, field, &mut self.left, prost::encoding::DecodeContext::default())
                    .map_err(malformed)?;
                return Ok(Some(ReportField::Unknown));
            }
            let length = decode_varint(&mut self.left).map_err(malformed)?;
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            if length > self.left.len() {
                return Err(Status::invalid_argument("malformed report: a field ends after the message"));
            }
            let value = self.left.split_to(length);
            return Ok(Some(match field {
                1 => ReportField::Domain(value),
                _ if length > MAX_USAGE_BYTES => ReportField::TooLong,
                _ => ReportField::Usage(Box::new(BucketQuotaUsage::decode(value).map_err(malformed)?)),
            }));
        }
        Ok(None)
    }
}

/// Reason why a bucket cannot be assigned anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnassignableReason {
    /// A key or value is not UTF-8: Envoy resets a stream on which it gets such an id.
    NotUtf8,
    /// It has too many pairs, or too many bytes.
    TooLong,
}

/// Brings the id of a bucket into one form: sorted by key, each key once, in buffers of its own.
///
/// # Errors
/// Nothing can be assigned to such a bucket.
pub(super) fn normalize_id(id: Option<BucketId>) -> Result<BucketId, UnassignableReason> {
    let mut entries = id.unwrap_or_default().bucket;
    let bytes = entries.iter().map(|entry| entry.key.len() + entry.value.len()).fold(0, usize::saturating_add);
    if entries.len() > MAX_ENTRIES || bytes > MAX_ID_BYTES {
        return Err(UnassignableReason::TooLong);
    }
    let is_text = |bytes: &Bytes| std::str::from_utf8(bytes).is_ok();
    if !entries.iter().all(|entry| is_text(&entry.key) && is_text(&entry.value)) {
        return Err(UnassignableReason::NotUtf8);
    }
    // The last pair of a key counts, as in any map.
    entries.reverse();
    entries.sort_by(|one, other| one.key.cmp(&other.key));
    entries.dedup_by(|later, first| later.key == first.key);
    let own = |bytes: &Bytes| Bytes::copy_from_slice(bytes);
    let bucket = entries.iter().map(|it| BucketEntry { key: own(&it.key), value: own(&it.value) }).collect();
    Ok(BucketId { bucket })
}

/// Interval in which a bucket that is not refilled gets a token: a year, and assignments end within minutes. The API has
/// no bucket without a refill: an unset `tokens_per_fill` is none to Envoy, and 1 to gRPC clients.
const NO_REFILL_INTERVAL_S: u32 = 31_536_000;

/// Adds the actions of an assignment to a response.
pub fn push_assignment(response: &mut RateLimitQuotaResponse, id: &BucketId, assignment: Assignment) {
    if assignment.starts_full {
        push_strategy(response, id, Strategy::Deny, assignment.ttl_s);
    }
    push_strategy(response, id, assignment.strategy, assignment.ttl_s);
}

fn push_strategy(response: &mut RateLimitQuotaResponse, id: &BucketId, strategy: Strategy, ttl_s: u32) {
    let strategy = match strategy {
        Strategy::Allow => SentStrategy::BlanketRule(BlanketRule::AllowAll.into()),
        Strategy::Deny => SentStrategy::BlanketRule(BlanketRule::DenyAll.into()),
        Strategy::Tokens(ProxyTokenBucket { max, fill, interval_s }) => {
            let (fill, interval_s) = if fill > 0 { (fill, interval_s) } else { (1, NO_REFILL_INTERVAL_S) };
            SentStrategy::TokenBucket(TokenBucket {
                max_tokens: max,
                tokens_per_fill: Some(fill),
                fill_interval: Some(prost_types::Duration { seconds: interval_s.into(), nanos: 0 }),
            })
        }
    };
    response.bucket_action.push(BucketAction {
        bucket_id: Some(id.clone()),
        bucket_action: Some(Action::QuotaAssignmentAction(QuotaAssignmentAction {
            assignment_time_to_live: Some(prost_types::Duration { seconds: ttl_s.into(), nanos: 0 }),
            rate_limit_strategy: Some(RateLimitStrategy { strategy: Some(strategy) }),
        })),
    });
}

/// Adds an action to a response that makes the proxy forget a bucket.
pub(super) fn push_abandonment(response: &mut RateLimitQuotaResponse, id: &BucketId) {
    response.bucket_action.push(BucketAction {
        bucket_id: Some(id.clone()),
        bucket_action: Some(Action::AbandonAction(AbandonAction {})),
    });
}

/// Elapsed time of a report in microseconds; 0 if it is absent or negative.
pub(super) fn elapsed_us(usage: &BucketQuotaUsage) -> u64 {
    let Some(elapsed) = usage.time_elapsed else { return 0 };
    let seconds = u64::try_from(elapsed.seconds).unwrap_or(0);
    let micros = u64::try_from(elapsed.nanos).unwrap_or(0).min(999_999_999) / 1000;
    seconds.saturating_mul(1_000_000).saturating_add(micros)
}

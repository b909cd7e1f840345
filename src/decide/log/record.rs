//! Records of the decision log, as they are written and read: one JSON object on each line; and conversions between
//! parts of a request and parts of a record.
//!
//! Every line starts with `v`, the version of the format, and `type`. Readers ignore fields and types that they do not
//! know; a change that old readers would misread raises [`FORMAT_VERSION`]. `docs/decision-log.schema.json` describes
//! the fields, and a test compares both. Text is borrowed, when writing from the request and when reading from the
//! line.
//!
//! Decides: what a line of the decision log holds (`time_us`, `duration_us`); text that is not UTF-8 (base64).

use std::borrow::Cow;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::header::HeaderRecord;
use crate::base::text::escape_unprintable_json_lines;
use crate::limit::algorithm::Algorithm;
use crate::limit::period::Unit;
use crate::limit::request::{Entry, Hits, LimitOverride};
use crate::limit::slot::{HolderId, SlotAction, SlotChange, SlotId, SlotToken, SlotUse};
use crate::limit::{RegionLossPolicy, StoreFailurePolicy};

/// Version of the format.
pub const FORMAT_VERSION: u32 = 1;

/// Text of a record, borrowed if possible.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RecordText<'a>(#[serde(borrow)] pub Cow<'a, str>);

impl<'a> From<&'a str> for RecordText<'a> {
    fn from(text: &'a str) -> Self {
        Self(Cow::Borrowed(text))
    }
}

impl From<String> for RecordText<'_> {
    fn from(text: String) -> Self {
        Self(Cow::Owned(text))
    }
}

impl std::ops::Deref for RecordText<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn is_empty_text(text: &RecordText<'_>) -> bool {
    text.is_empty()
}

const fn default_unit_multiplier() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_default_unit_multiplier(count: &u32) -> bool {
    *count == 1
}

/// One line of the log.
#[derive(Clone, Debug, PartialEq)]
pub enum Record<'a> {
    /// A decision.
    Decision(Box<DecisionRecord<'a>>),
    /// Settings and rules of the decisions that follow.
    Header(Box<HeaderRecord>),
    /// Records that are missing.
    Dropped(DroppedCountRecord),
}

/// A decision, with everything that it depended on but the counters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecisionRecord<'a> {
    /// Random id of the process.
    #[serde(borrow)]
    pub process: RecordText<'a>,
    /// Number of the record in its process, from 1; missing numbers are lost records.
    pub seq: u64,
    /// Arrival of the request, in microseconds since the Unix epoch.
    pub time_us: u64,
    /// Domain of the request.
    #[serde(borrow)]
    pub domain: RecordText<'a>,
    /// `hits_addend` of the request as sent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub hits_addend: u32,
    /// Descriptors, in the order of the request.
    #[serde(borrow)]
    pub descriptors: SmallVec<[DescriptorRecord<'a>; 1]>,
    /// Answer.
    pub verdict: RecordedVerdict,
    /// Reason why there is no answer, with the verdict `error`.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub error: Option<RecordText<'a>>,
    /// Microseconds until a rejected request could pass; absent: it was not rejected, or never will.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_us: Option<u64>,
    /// Delay of the answer, in microseconds.
    #[serde(default, skip_serializing_if = "is_default")]
    pub delay_us: u64,
    /// Longest delay that the caller's deadline allowed, in microseconds.
    pub max_delay_us: u64,
    /// Id of the rule set, as in its header; empty if no rules were loaded.
    #[serde(borrow)]
    pub rules: RecordText<'a>,
    /// Trace of the request in hexadecimal, if it was sampled.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<RecordText<'a>>,
    /// Microseconds from the arrival to the decision, a delay excluded.
    pub duration_us: u64,
}

impl DecisionRecord<'_> {
    /// Time of the last charge by the clock of Redis, in microseconds; `None` if no charge has one.
    pub fn last_charge_us(&self) -> Option<u64> {
        self.descriptors.iter().filter_map(|descriptor| descriptor.now_us).max()
    }
}

/// One descriptor of a decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DescriptorRecord<'a> {
    /// Entries, outermost first.
    #[serde(borrow)]
    pub entries: SmallVec<[EntryRecord<'a>; 2]>,
    /// Number of hits: 0 peeks, a negative number refunds.
    pub hits: i64,
    /// Limit that came with the request.
    #[serde(rename = "override", borrow, default, skip_serializing_if = "Option::is_none")]
    pub limit_override: Option<OverrideRecord<'a>>,
    /// True if the sample contains the key, so that all of its selected decisions are in the log.
    pub sampled: bool,
    /// Rule that matched, unless a limit of the request took precedence.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<RuleRecord<'a>>,
    /// True if the rule is unlimited.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unlimited: bool,
    /// Limits that decided, in the order of the rule.
    #[serde(borrow, default, skip_serializing_if = "SmallVec::is_empty")]
    pub limits: SmallVec<[LimitRecord<'a>; 1]>,
    /// Part of the service that decided; absent without limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided_by: Option<DecisionSource>,
    /// Failure policy that decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<StoreFailurePolicy>,
    /// Kind of failure that made the policy decide, as in metrics.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<RecordText<'a>>,
    /// Block that rejected, with `decided_by: block`; absent otherwise.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub block: Option<BlockRecord<'a>>,
    /// Time that the counters worked at, if it is not the arrival: the time of Redis, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub now_us: Option<u64>,
    /// Slot that the descriptor takes or frees.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<SlotRecord<'a>>,
    /// Verdict on the descriptor alone.
    pub verdict: RecordedVerdict,
}

/// Slot that a descriptor takes or frees. The values that name it are not in the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotRecord<'a> {
    /// What the call does with it: `acquire`, `release` (by token), `release_unanswered` or `release_rejected`.
    #[serde(borrow)]
    pub action: RecordText<'a>,
    /// Hash of the holder and of the values of the entries `slot`.
    #[serde(borrow)]
    pub id: RecordText<'a>,
    /// Token that was handed out, or brought back.
    #[serde(borrow)]
    pub token: RecordText<'a>,
    /// Hash of the name of the Envoy.
    #[serde(borrow)]
    pub holder: RecordText<'a>,
}

impl SlotRecord<'_> {
    /// The slot; `None` if the record is malformed.
    pub fn to_slot_use(&self) -> Option<SlotUse> {
        Some(SlotUse {
            id: SlotId(u128::from_str_radix(&self.id, 16).ok()?),
            token: SlotToken(u64::from_str_radix(&self.token, 16).ok()?),
            holder: HolderId(u64::from_str_radix(&self.holder, 16).ok()?),
            action: SlotAction::from_name(&self.action)?,
        })
    }
}

impl From<SlotUse> for SlotRecord<'_> {
    fn from(SlotUse { id, token, holder, action }: SlotUse) -> Self {
        Self {
            action: action.name().into(),
            id: format!("{:032x}", id.0).into(),
            token: format!("{:016x}", token.0).into(),
            holder: format!("{:016x}", holder.0).into(),
        }
    }
}

/// Key and value of a descriptor.
///
/// Exactly one of the value's fields is set, or none if values are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryRecord<'a> {
    /// Key, if it is UTF-8.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub key: Option<RecordText<'a>>,
    /// Bytes of any other key, in base64.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub key_base64: Option<RecordText<'a>>,
    /// Value, if it is UTF-8.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub value: Option<RecordText<'a>>,
    /// Bytes of any other value, in base64.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub value_base64: Option<RecordText<'a>>,
    /// Keyed hash of the value.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub value_hash: Option<RecordText<'a>>,
}

/// Block of a value, because of which a descriptor was rejected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockRecord<'a> {
    /// Key of the blocked entry; the value is in the entries, in their form.
    #[serde(borrow)]
    pub key: RecordText<'a>,
    /// End of the block, in microseconds since the Unix epoch.
    pub until_us: u64,
    /// Reason that the operator gave.
    #[serde(borrow)]
    pub reason: RecordText<'a>,
}

/// Limit that came with a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverrideRecord<'a> {
    /// Hits in a period.
    pub requests_per_unit: u32,
    /// Name of the unit, or the number of an unknown one.
    #[serde(borrow)]
    pub unit: RecordText<'a>,
    /// Number of units in the period.
    pub multiplier: u32,
}

/// Rule that matched a descriptor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleRecord<'a> {
    /// Path of the rule, as in `/rlconfig` and metrics.
    #[serde(borrow)]
    pub path: RecordText<'a>,
    /// Rule file.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub file: Option<RecordText<'a>>,
    /// Line in the file, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    /// Resource of the control plane, in place of a file.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub resource: Option<RecordText<'a>>,
    /// Plan that a table chose; `own` for the limit of a row.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<RecordText<'a>>,
}

/// One limit of a descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitRecord<'a> {
    /// Name; empty if it has none.
    #[serde(borrow, default, skip_serializing_if = "is_empty_text")]
    pub name: RecordText<'a>,
    /// Algorithm.
    pub algorithm: Algorithm,
    /// Hits in a period.
    pub requests_per_unit: u32,
    /// Unit of the period.
    pub unit: Unit,
    /// Number of units in the period.
    #[serde(default = "default_unit_multiplier", skip_serializing_if = "is_default_unit_multiplier")]
    pub unit_multiplier: u32,
    /// `bucket_size` or `queue_size`; absent: `requests_per_unit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<u32>,
    /// `max_wait` in microseconds; absent if the limit has none, so that it never delays (token_bucket) or delays as
    /// long as the caller waits (leaky_bucket).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_wait_us: Option<u64>,
    /// `window` as in a rule file; absent: windows do not follow a time zone.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub window: Option<RecordText<'a>>,
    /// `ban` as in a rule file; absent: none.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub ban: Option<RecordText<'a>>,
    /// `reservations` as in a rule file; absent: none.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub reservations: Option<RecordText<'a>>,
    /// `active` as in a rule file; absent: always.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub active: Option<RecordText<'a>>,
    /// Keys of a limit that all regions share; absent: each region has the limit for itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub global: Option<GlobalScopeRecord>,
    /// True in shadow mode.
    #[serde(default, skip_serializing_if = "is_default")]
    pub shadow: bool,
    /// True for a candidate: it was charged apart, and changed no verdict.
    #[serde(default, skip_serializing_if = "is_default")]
    pub candidate: bool,
    /// True in quota mode.
    #[serde(default, skip_serializing_if = "is_default")]
    pub quota: bool,
    /// Result of the charge; absent if a failure policy decided without a counter, and for a candidate whose result
    /// came after the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<LimitResultRecord>,
}

/// Keys of a limit with `scope: global`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GlobalScopeRecord {
    /// `reserve` in thousandths of a percent.
    pub reserve_milli_percent: u32,
    /// `max_overshoot` in hits, rounded down.
    pub max_overshoot: u64,
    /// `on_region_loss`.
    pub on_region_loss: RegionLossPolicy,
}

/// Result of a charge on one limit. Durations count from the time that the counters worked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitResultRecord {
    /// True if the limit admits the hits.
    pub admitted: bool,
    /// Hits counted before.
    pub before: u64,
    /// Hits counted after.
    pub after: u64,
    /// Hits that would still pass at once.
    pub remaining: u32,
    /// Microseconds until the full limit is available again.
    pub reset_us: u64,
    /// Microseconds until the same hits could pass; absent: they passed, or never will.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_us: Option<u64>,
    /// Delay that the limit asks for, in microseconds.
    #[serde(default, skip_serializing_if = "is_default")]
    pub delay_us: u64,
    /// Microseconds until the ban of the client ends; 0: it is not banned.
    #[serde(default, skip_serializing_if = "is_default")]
    pub banned_us: u64,
    /// What became of the slot or reservation: `taken`, `renewed`, `freed` (a reservation: settled), `released_early`
    /// or `late`; absent if nothing did.
    #[serde(default, skip_serializing_if = "is_default")]
    pub slot: SlotChange,
    /// Seats that were found expired, or held by a dead Envoy, and freed; of reservations their number.
    #[serde(default, skip_serializing_if = "is_default")]
    pub expired_seats: u32,
    /// Hits by which the settlement of a reservation exceeds its estimate.
    #[serde(default, skip_serializing_if = "is_default")]
    pub above_estimate: u64,
}

/// Verdict on a request or a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordedVerdict {
    /// Admitted.
    Ok,
    /// Rejected.
    OverLimit,
    /// Admitted, and a limit in shadow mode was exceeded.
    Shadow,
    /// No answer: the store failed under the policy `error`, or the request was invalid.
    Error,
}

impl RecordedVerdict {
    /// Name in records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::OverLimit => "over_limit",
            Self::Shadow => "shadow",
            Self::Error => "error",
        }
    }
}

/// Source of the decision of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecisionSource {
    /// The counters.
    Counter,
    /// The over-limit cache of this process.
    OverLimitCache,
    /// This process's free share of an eventual limit.
    Share,
    /// A lease of an eventual limit.
    Lease,
    /// A proxy, by what it was assigned over the rate limit quota service; the record is of its report.
    Rlqs,
    /// A failure policy.
    Policy,
    /// A blocked value.
    Block,
}

impl DecisionSource {
    /// Name in records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::OverLimitCache => "over_limit_cache",
            Self::Share => "share",
            Self::Lease => "lease",
            Self::Rlqs => "rlqs",
            Self::Policy => "policy",
            Self::Block => "block",
        }
    }
}

/// Number of records that are missing, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DroppedCountRecord {
    /// Random id of the process.
    pub process: String,
    /// Time in microseconds since the Unix epoch.
    pub time_us: u64,
    /// Number of records.
    pub count: u64,
    /// Reason why they were dropped.
    pub reason: DropReason,
}

/// Reason why records were dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DropReason {
    /// The queue was full: the destination is slower than the decisions.
    QueueFull,
    /// The destination returned an error.
    WriteFailed,
}

impl HeaderRecord {
    /// Returns the line of the record.
    pub fn to_line(&self) -> Vec<u8> {
        let mut line = Vec::new();
        append_serialized_line(&mut line, b"{\"v\":1,\"type\":\"header\"", self);
        line
    }
}

impl DroppedCountRecord {
    /// Returns the line of the record.
    pub fn to_line(&self) -> Vec<u8> {
        let mut line = Vec::new();
        append_serialized_line(&mut line, b"{\"v\":1,\"type\":\"dropped\"", self);
        line
    }
}

/// Appends a line: the head, then the fields of `record`.
fn append_serialized_line(line: &mut Vec<u8>, head: &[u8], record: &impl Serialize) {
    let start = line.len();
    line.extend_from_slice(head);
    let fields = line.len();
    if serde_json::to_writer(&mut *line, record).is_err() {
        // Writing to memory does not fail, and no map has keys that are not text.
        line.truncate(start);
        return;
    }
    line[fields] = b',';
    line.push(b'\n');
    if let Cow::Owned(escape_unprintable) = escape_unprintable_json_lines(&line[start..]) {
        line.truncate(start);
        line.extend(escape_unprintable);
    }
}

impl<'a> EntryRecord<'a> {
    /// Key of an entry, without its value.
    pub fn without_value(entry: &Entry<'a>) -> Self {
        let (key, key_base64) = encode_text_or_base64(entry.key);
        Self { key, key_base64, ..Self::default() }
    }

    /// An entry with its value, as it was sent.
    pub fn with_plain_value(entry: &Entry<'a>) -> Self {
        let (value, value_base64) = encode_text_or_base64(entry.value);
        Self { value, value_base64, ..Self::without_value(entry) }
    }

    /// Bytes of the key; `None` if the base64 is invalid.
    pub fn key_bytes(&self) -> Option<Cow<'_, [u8]>> {
        decode_text_or_base64(self.key.as_ref(), self.key_base64.as_ref())
    }

    /// Bytes of the value; `None` if it was hashed or left out.
    pub fn value_bytes(&self) -> Option<Cow<'_, [u8]>> {
        decode_text_or_base64(self.value.as_ref(), self.value_base64.as_ref())
    }
}

/// Bytes as text, or else in base64.
pub(crate) fn encode_text_or_base64<'b, T: From<&'b str> + From<String>>(bytes: &'b [u8]) -> (Option<T>, Option<T>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (Some(text.into()), None),
        Err(_) => (None, Some(BASE64_STANDARD.encode(bytes).into())),
    }
}

fn decode_text_or_base64<'t>(
    text: Option<&'t RecordText<'_>>,
    base64: Option<&RecordText<'_>>,
) -> Option<Cow<'t, [u8]>> {
    match (text, base64) {
        (Some(text), _) => Some(Cow::Borrowed(text.as_bytes())),
        (None, Some(base64)) => BASE64_STANDARD.decode(base64.as_bytes()).ok().map(Cow::Owned),
        (None, None) => None,
    }
}

impl From<&LimitOverride> for OverrideRecord<'_> {
    fn from(sent: &LimitOverride) -> Self {
        let known = Unit::from_protobuf_number(sent.unit);
        Self {
            requests_per_unit: sent.requests_per_unit,
            unit: known.map_or_else(|| sent.unit.to_string().into(), |unit| unit.name().into()),
            multiplier: sent.unit_multiplier,
        }
    }
}

impl OverrideRecord<'_> {
    /// The limit as it was sent; `None` if the unit is neither a name nor a number.
    pub fn to_limit_override(&self) -> Option<LimitOverride> {
        let known = Unit::ALL.into_iter().find(|unit| unit.name() == &*self.unit);
        Some(LimitOverride {
            requests_per_unit: self.requests_per_unit,
            unit: known.map_or_else(|| self.unit.parse().ok(), Unit::protobuf_number)?,
            unit_multiplier: self.multiplier,
        })
    }
}

/// Number of hits in a record: 0 for a peek, negative for a refund.
pub const fn hits_to_number(hits: Hits) -> i64 {
    match hits {
        Hits::Peek => 0,
        Hits::Charge(count) => count.cast_signed(),
        Hits::Refund(count) => -count.cast_signed(),
    }
}

/// Converts the signed number of a record to hits; a negative one is a refund.
pub const fn hits_from_number(signed: i64) -> Hits {
    Hits::new(signed.unsigned_abs(), signed < 0)
}

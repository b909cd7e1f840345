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
use super::record_field::{
    RecordField, RecordText, append_quoted, append_start_without_quote, declare_record, impl_fields_by_name,
};
use crate::base::text::escape_unprintable_json_lines;
use crate::limit::algorithm::Algorithm;
use crate::limit::period::Unit;
use crate::limit::request::{Entry, Hits, LimitOverride};
use crate::limit::slot::{HolderId, SlotAction, SlotChange, SlotId, SlotToken, SlotUse};
use crate::limit::{RegionLossPolicy, StoreFailurePolicy};

/// Version of the format.
pub const FORMAT_VERSION: u32 = 1;

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

declare_record! {
    /// A decision, with everything that it depended on but the counters.
    #[derive(Clone, Debug, PartialEq)]
    pub struct DecisionRecord<'a> {
        /// Random id of the process.
        process: RecordText<'a>,
        /// Zone of the replica; empty if it has none.
        zone: RecordText<'a> = default,
        /// Number of the record in its process, from 1; missing numbers are lost records.
        seq: u64,
        /// Arrival of the request, in microseconds since the Unix epoch.
        time_us: u64,
        /// Domain of the request.
        domain: RecordText<'a>,
        /// `hits_addend` of the request as sent.
        hits_addend: u32 = default,
        /// Descriptors, in the order of the request.
        descriptors: SmallVec<[DescriptorRecord<'a>; 1]>,
        /// Answer.
        verdict: RecordedVerdict,
        /// Reason why there is no answer, with the verdict `error`.
        error: Option<RecordText<'a>> = default,
        /// Microseconds until a rejected request could pass; absent: it was not rejected, or never will.
        retry_after_us: Option<u64> = default,
        /// Delay of the answer, in microseconds.
        delay_us: u64 = default,
        /// Longest delay that the caller's deadline allowed, in microseconds.
        max_delay_us: u64,
        /// Id of the rule set, as in its header; empty if no rules were loaded.
        rules: RecordText<'a>,
        /// Trace of the request in hexadecimal, if it was sampled.
        trace_id: Option<RecordText<'a>> = default,
        /// Microseconds from the arrival to the decision, a delay excluded.
        duration_us: u64,
    }
}

declare_record! {
    /// A level of `notify` that a key reached.
    #[derive(Clone, Debug, PartialEq)]
    pub struct ThresholdRecord<'a> {
        /// Random id of the process; empty without a decision log.
        process: RecordText<'a> = default,
        /// Zone of the replica; empty if it has none.
        zone: RecordText<'a> = default,
        /// Arrival of the request that reached the level, in microseconds since the Unix epoch.
        time_us: u64,
        /// Domain of the request.
        domain: RecordText<'a>,
        /// Entries of the descriptor, outermost first.
        entries: SmallVec<[EntryRecord<'a>; 2]>,
        /// Rule of the limit.
        rule: RuleRecord<'a>,
        /// The limit, with the result of the charge.
        limit: LimitRecord<'a>,
        /// The level, such as `80%`.
        level: RecordText<'a>,
        /// End of the period in which the level is told once, in microseconds since the Unix epoch.
        period_end_us: u64,
    }
}

impl ThresholdRecord<'_> {
    /// Appends the line of the record.
    pub fn append_line(&self, line: &mut Vec<u8>) {
        line.extend_from_slice(b"{\"v\":1,\"type\":\"threshold\"");
        self.append_fields(line);
        line.extend_from_slice(b"}\n");
    }
}

/// Length of most records with one descriptor, in bytes.
const USUAL_LINE_BYTES: usize = 1024;

impl DecisionRecord<'_> {
    /// Appends the line of the record.
    pub fn append_line(&self, line: &mut Vec<u8>) {
        line.reserve(USUAL_LINE_BYTES);
        line.extend_from_slice(b"{\"v\":1,\"type\":\"decision\"");
        self.append_fields(line);
        line.extend_from_slice(b"}\n");
    }

    /// Time of the last charge by the clock of Redis, in microseconds; `None` if no charge has one.
    pub fn last_charge_us(&self) -> Option<u64> {
        self.descriptors.iter().filter_map(|descriptor| descriptor.now_us).max()
    }
}

declare_record! {
    /// One descriptor of a decision.
    #[derive(Clone, Debug, PartialEq)]
    pub struct DescriptorRecord<'a> {
        /// Entries, outermost first.
        entries: SmallVec<[EntryRecord<'a>; 2]>,
        /// Number of hits: 0 peeks, a negative number refunds.
        hits: i64,
        /// Limit that came with the request.
        limit_override as "override": Option<OverrideRecord<'a>> = default,
        /// True if the sample contains the key, so that all of its selected decisions are in the log.
        sampled: bool,
        /// Rule that matched, unless a limit of the request took precedence.
        rule: Option<RuleRecord<'a>> = default,
        /// True if the rule is unlimited.
        unlimited: bool = default,
        /// Limits that decided, in the order of the rule.
        limits: SmallVec<[LimitRecord<'a>; 1]> = default,
        /// Part of the service that decided; absent without limits.
        decided_by: Option<DecisionSource> = default,
        /// Failure policy that decided.
        policy: Option<StoreFailurePolicy> = default,
        /// Kind of failure that made the policy decide, as in metrics.
        reason: Option<RecordText<'a>> = default,
        /// Block that rejected, with `decided_by: block`; absent otherwise.
        block: Option<BlockRecord<'a>> = default,
        /// Time that the counters worked at, if it is not the arrival: the time of Redis, in microseconds.
        now_us: Option<u64> = default,
        /// Slot that the descriptor takes or frees.
        slot: Option<SlotRecord<'a>> = default,
        /// Verdict on the descriptor alone.
        verdict: RecordedVerdict,
    }
}

declare_record! {
    /// Slot that a descriptor takes or frees. The values that name it are not in the log.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct SlotRecord<'a> {
        /// What the call does with it: `acquire`, `release` (by token), `release_unanswered` or `release_rejected`.
        action: RecordText<'a>,
        /// Hash of the holder and of the values of the entries `slot`.
        id: RecordText<'a>,
        /// Token that was handed out, or brought back.
        token: RecordText<'a>,
        /// Hash of the name of the Envoy.
        holder: RecordText<'a>,
    }
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

declare_record! {
    /// Key and value of a descriptor.
    ///
    /// Exactly one of the value's fields is set, or none if values are left out.
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    pub struct EntryRecord<'a> {
        /// Key, if it is UTF-8.
        key: Option<RecordText<'a>> = default,
        /// Bytes of any other key, in base64.
        key_base64: Option<RecordText<'a>> = default,
        /// Value, if it is UTF-8.
        value: Option<RecordText<'a>> = default,
        /// Bytes of any other value, in base64.
        value_base64: Option<RecordText<'a>> = default,
        /// Keyed hash of the value.
        value_hash: Option<RecordText<'a>> = default,
    }
}

declare_record! {
    /// Block of a value, because of which a descriptor was rejected.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct BlockRecord<'a> {
        /// Key of the blocked entry; the value is in the entries, in their form.
        key: RecordText<'a>,
        /// End of the block, in microseconds since the Unix epoch.
        until_us: u64,
        /// Reason that the operator gave.
        reason: RecordText<'a>,
    }
}

declare_record! {
    /// Limit that came with a request.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct OverrideRecord<'a> {
        /// Hits in a period.
        requests_per_unit: u32,
        /// Name of the unit, or the number of an unknown one.
        unit: RecordText<'a>,
        /// Number of units in the period.
        multiplier: u32,
    }
}

declare_record! {
    /// Rule that matched a descriptor.
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    pub struct RuleRecord<'a> {
        /// Path of the rule, as in `/rlconfig` and metrics.
        path: RecordText<'a>,
        /// Rule file.
        file: Option<RecordText<'a>> = default,
        /// Line in the file, from 1.
        line: Option<u32> = default,
        /// Resource of the control plane, in place of a file.
        resource: Option<RecordText<'a>> = default,
        /// Plan that a table chose; `own` for the limit of a row.
        plan: Option<RecordText<'a>> = default,
    }
}

declare_record! {
    /// One limit of a descriptor.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct LimitRecord<'a> {
        /// Name; empty if it has none.
        name: RecordText<'a> = default,
        /// Algorithm.
        algorithm: Algorithm,
        /// Hits in a period.
        requests_per_unit: u64,
        /// Unit of the period.
        unit: Unit,
        /// Number of units in the period; absent: 1.
        unit_multiplier: Option<u32> = default,
        /// `bucket_size` or `queue_size`; absent: `requests_per_unit`.
        capacity: Option<u64> = default,
        /// `max_wait` in microseconds; absent if the limit has none, so that it never delays (token_bucket) or delays as
        /// long as the caller waits (leaky_bucket).
        max_wait_us: Option<u64> = default,
        /// `window` as in a rule file; absent: windows do not follow a time zone.
        window: Option<RecordText<'a>> = default,
        /// `ban` as in a rule file; absent: none.
        ban: Option<RecordText<'a>> = default,
        /// `reservations` as in a rule file; absent: none.
        reservations: Option<RecordText<'a>> = default,
        /// True if the limit takes only the hits that those before it have no room for (`overflow_to`).
        takes_overflow: bool = default,
        /// `active` as in a rule file; absent: always.
        active: Option<RecordText<'a>> = default,
        /// Keys of a limit that all regions share; absent: each region has the limit for itself.
        global: Option<GlobalScopeRecord> = default,
        /// True in shadow mode.
        shadow: bool = default,
        /// True for a candidate: it was charged apart, and changed no verdict.
        candidate: bool = default,
        /// True in quota mode.
        quota: bool = default,
        /// Result of the charge; absent if a failure policy decided without a counter, and for a candidate whose result
        /// came after the answer.
        result: Option<LimitResultRecord> = default,
    }
}

declare_record! {
    /// Keys of a limit with `scope: global`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct GlobalScopeRecord {
        /// `reserve` in thousandths of a percent.
        reserve_milli_percent: u32,
        /// `max_overshoot` in hits, rounded down.
        max_overshoot: u64,
        /// `on_region_loss`.
        on_region_loss: RegionLossPolicy,
    }
}

declare_record! {
    /// Result of a charge on one limit. Durations count from the time that the counters worked at.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct LimitResultRecord {
        /// True if the limit admits the hits.
        admitted: bool,
        /// Hits counted before.
        before: u64,
        /// Hits counted after.
        after: u64,
        /// Hits that would still pass at once.
        remaining: u64,
        /// Microseconds until the full limit is available again.
        reset_us: u64,
        /// Microseconds until the same hits could pass; absent: they passed, or never will.
        retry_after_us: Option<u64> = default,
        /// Delay that the limit asks for, in microseconds.
        delay_us: u64 = default,
        /// Microseconds until the ban of the client ends; 0: it is not banned.
        banned_us: u64 = default,
        /// What became of the slot or reservation: `taken`, `renewed`, `freed` (a reservation: settled), `released_early`
        /// or `late`; absent if nothing did.
        slot: SlotChange = default,
        /// Seats that were found expired, or held by a dead Envoy, and freed; of reservations their number.
        expired_seats: u32 = default,
        /// Hits by which the settlement of a reservation exceeds its estimate.
        above_estimate: u64 = default,
    }
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

impl_fields_by_name! { RecordedVerdict DecisionSource }

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

//! Encoding of a decision's record: the JSON that its `Serialize` gives, at a fraction of the time.
//!
//! A derived serializer scans each field's name for characters to escape. Here the names are constants, and text is
//! scanned eight bytes at a time. A test compares both encodings.

use super::record::{
    BlockRecord, DecisionRecord, DescriptorRecord, EntryRecord, GlobalScopeRecord, LimitRecord, LimitResultRecord,
    OverrideRecord, RecordText, RuleRecord, SlotRecord,
};

/// Length of most records with one descriptor, in bytes.
const USUAL_LINE_BYTES: usize = 1024;

impl DecisionRecord<'_> {
    /// Appends the line of the record.
    pub fn append_line(&self, line: &mut Vec<u8>) {
        line.reserve(USUAL_LINE_BYTES);
        append_text(line, "{\"v\":1,\"type\":\"decision\",\"process\":", &self.process);
        append_number(line, ",\"seq\":", self.seq);
        append_number(line, ",\"time_us\":", self.time_us);
        append_text(line, ",\"domain\":", &self.domain);
        if self.hits_addend != 0 {
            append_number(line, ",\"hits_addend\":", self.hits_addend);
        }
        append_list(line, ",\"descriptors\":[", &self.descriptors, append_descriptor);
        append_unescaped(line, ",\"verdict\":\"", self.verdict.name());
        append_optional_text(line, ",\"error\":", self.error.as_ref());
        append_optional_number(line, ",\"retry_after_us\":", self.retry_after_us);
        if self.delay_us != 0 {
            append_number(line, ",\"delay_us\":", self.delay_us);
        }
        append_number(line, ",\"max_delay_us\":", self.max_delay_us);
        append_text(line, ",\"rules\":", &self.rules);
        append_optional_text(line, ",\"trace_id\":", self.trace_id.as_ref());
        append_number(line, ",\"duration_us\":", self.duration_us);
        line.extend_from_slice(b"}\n");
    }
}

fn append_descriptor(line: &mut Vec<u8>, record: &DescriptorRecord<'_>) {
    append_list(line, "{\"entries\":[", &record.entries, append_entry);
    append_number(line, ",\"hits\":", record.hits);
    if let Some(sent) = &record.limit_override {
        append_limit_override(line, sent);
    }
    append_bool(line, ",\"sampled\":", record.sampled);
    if let Some(matched) = &record.rule {
        append_rule(line, matched);
    }
    if record.unlimited {
        append_bool(line, ",\"unlimited\":", true);
    }
    if !record.limits.is_empty() {
        append_list(line, ",\"limits\":[", &record.limits, append_limit);
    }
    if let Some(decided_by) = record.decided_by {
        append_unescaped(line, ",\"decided_by\":\"", decided_by.name());
    }
    if let Some(policy) = record.policy {
        append_unescaped(line, ",\"policy\":\"", policy.name());
    }
    append_optional_text(line, ",\"reason\":", record.reason.as_ref());
    if let Some(BlockRecord { key, until_us, reason }) = &record.block {
        append_text(line, ",\"block\":{\"key\":", key);
        append_number(line, ",\"until_us\":", *until_us);
        append_text(line, ",\"reason\":", reason);
        line.push(b'}');
    }
    append_optional_number(line, ",\"now_us\":", record.now_us);
    if let Some(SlotRecord { action, id, token, holder }) = &record.slot {
        append_text(line, ",\"slot\":{\"action\":", action);
        append_text(line, ",\"id\":", id);
        append_text(line, ",\"token\":", token);
        append_text(line, ",\"holder\":", holder);
        line.push(b'}');
    }
    append_unescaped(line, ",\"verdict\":\"", record.verdict.name());
    line.push(b'}');
}

fn append_entry(line: &mut Vec<u8>, record: &EntryRecord<'_>) {
    let EntryRecord { key, key_base64, value, value_base64, value_hash } = record;
    let start = line.len();
    append_optional_text(line, ",\"key\":", key.as_ref());
    append_optional_text(line, ",\"key_base64\":", key_base64.as_ref());
    append_optional_text(line, ",\"value\":", value.as_ref());
    append_optional_text(line, ",\"value_base64\":", value_base64.as_ref());
    append_optional_text(line, ",\"value_hash\":", value_hash.as_ref());
    match line.get_mut(start) {
        // The comma of the first field.
        Some(first) => *first = b'{',
        None => line.push(b'{'),
    }
    line.push(b'}');
}

fn append_limit_override(line: &mut Vec<u8>, record: &OverrideRecord<'_>) {
    append_number(line, ",\"override\":{\"requests_per_unit\":", record.requests_per_unit);
    append_text(line, ",\"unit\":", &record.unit);
    append_number(line, ",\"multiplier\":", record.multiplier);
    line.push(b'}');
}

fn append_rule(line: &mut Vec<u8>, record: &RuleRecord<'_>) {
    append_text(line, ",\"rule\":{\"path\":", &record.path);
    append_optional_text(line, ",\"file\":", record.file.as_ref());
    append_optional_number(line, ",\"line\":", record.line);
    append_optional_text(line, ",\"resource\":", record.resource.as_ref());
    append_optional_text(line, ",\"plan\":", record.plan.as_ref());
    line.push(b'}');
}

fn append_limit(line: &mut Vec<u8>, record: &LimitRecord<'_>) {
    if record.name.is_empty() {
        append_unescaped(line, "{\"algorithm\":\"", record.algorithm.name());
    } else {
        append_text(line, "{\"name\":", &record.name);
        append_unescaped(line, ",\"algorithm\":\"", record.algorithm.name());
    }
    append_number(line, ",\"requests_per_unit\":", record.requests_per_unit);
    append_unescaped(line, ",\"unit\":\"", record.unit.name());
    if record.unit_multiplier != 1 {
        append_number(line, ",\"unit_multiplier\":", record.unit_multiplier);
    }
    append_optional_number(line, ",\"capacity\":", record.capacity);
    append_optional_number(line, ",\"max_wait_us\":", record.max_wait_us);
    append_optional_text(line, ",\"window\":", record.window.as_ref());
    append_optional_text(line, ",\"ban\":", record.ban.as_ref());
    append_optional_text(line, ",\"reservations\":", record.reservations.as_ref());
    append_optional_text(line, ",\"active\":", record.active.as_ref());
    if let Some(GlobalScopeRecord { reserve_milli_percent, max_overshoot, on_region_loss }) = record.global {
        append_number(line, ",\"global\":{\"reserve_milli_percent\":", reserve_milli_percent);
        append_number(line, ",\"max_overshoot\":", max_overshoot);
        append_unescaped(line, ",\"on_region_loss\":\"", on_region_loss.name());
        line.push(b'}');
    }
    for (name, is_set) in
        [(",\"shadow\":", record.shadow), (",\"candidate\":", record.candidate), (",\"quota\":", record.quota)]
    {
        if is_set {
            append_bool(line, name, true);
        }
    }
    if let Some(charged) = &record.result {
        append_result(line, charged);
    }
    line.push(b'}');
}

fn append_result(line: &mut Vec<u8>, record: &LimitResultRecord) {
    append_bool(line, ",\"result\":{\"admitted\":", record.admitted);
    append_number(line, ",\"before\":", record.before);
    append_number(line, ",\"after\":", record.after);
    append_number(line, ",\"remaining\":", record.remaining);
    append_number(line, ",\"reset_us\":", record.reset_us);
    append_optional_number(line, ",\"retry_after_us\":", record.retry_after_us);
    if record.delay_us != 0 {
        append_number(line, ",\"delay_us\":", record.delay_us);
    }
    if record.banned_us != 0 {
        append_number(line, ",\"banned_us\":", record.banned_us);
    }
    if let Some(change) = record.slot.name() {
        append_unescaped(line, ",\"slot\":\"", change);
    }
    if record.expired_seats != 0 {
        append_number(line, ",\"expired_seats\":", record.expired_seats);
    }
    if record.above_estimate != 0 {
        append_number(line, ",\"above_estimate\":", record.above_estimate);
    }
    line.push(b'}');
}

fn append_list<T>(line: &mut Vec<u8>, open: &str, items: &[T], encode: impl Fn(&mut Vec<u8>, &T)) {
    line.extend_from_slice(open.as_bytes());
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            line.push(b',');
        }
        encode(line, item);
    }
    line.push(b']');
}

fn append_number(line: &mut Vec<u8>, name: &str, value: impl itoa::Integer) {
    line.extend_from_slice(name.as_bytes());
    line.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
}

fn append_optional_number(line: &mut Vec<u8>, name: &str, value: Option<impl itoa::Integer>) {
    if let Some(value) = value {
        append_number(line, name, value);
    }
}

fn append_bool(line: &mut Vec<u8>, name: &str, value: bool) {
    line.extend_from_slice(name.as_bytes());
    line.extend_from_slice(if value { b"true" } else { b"false" });
}

/// Appends a text that needs no escapes; `name` ends with its opening quote.
fn append_unescaped(line: &mut Vec<u8>, name: &str, value: &str) {
    line.extend_from_slice(name.as_bytes());
    line.extend_from_slice(value.as_bytes());
    line.push(b'"');
}

fn append_text(line: &mut Vec<u8>, name: &str, value: &str) {
    line.extend_from_slice(name.as_bytes());
    if needs_no_escape(value.as_bytes()) {
        line.push(b'"');
        line.extend_from_slice(value.as_bytes());
        line.push(b'"');
    } else {
        // Writing text to memory does not fail.
        let _ = serde_json::to_writer(line, value);
    }
}

fn append_optional_text(line: &mut Vec<u8>, name: &str, value: Option<&RecordText<'_>>) {
    if let Some(value) = value {
        append_text(line, name, value);
    }
}

/// True if JSON needs no escape for any of the bytes.
fn needs_no_escape(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [b' '; 8];
    last[..rest.len()].copy_from_slice(rest);
    words.iter().chain([&last]).all(|word| word_needs_no_escape(u64::from_ne_bytes(*word)))
}

/// True if none of eight bytes is a control character, a quote or a backslash.
const fn word_needs_no_escape(word: u64) -> bool {
    const LOW_BIT_OF_EACH_BYTE: u64 = u64::MAX / 0xff;
    const HIGH_BIT_OF_EACH_BYTE: u64 = 0x80 * LOW_BIT_OF_EACH_BYTE;
    // The lowest match has its high bit set; a borrow affects only higher bytes. Bytes from 0x80 on are plain.
    let below_space = word.wrapping_sub(0x20 * LOW_BIT_OF_EACH_BYTE) & !word;
    let quote = word ^ (b'"' as u64 * LOW_BIT_OF_EACH_BYTE);
    let backslash = word ^ (b'\\' as u64 * LOW_BIT_OF_EACH_BYTE);
    let is_zero = (quote.wrapping_sub(LOW_BIT_OF_EACH_BYTE) & !quote)
        | (backslash.wrapping_sub(LOW_BIT_OF_EACH_BYTE) & !backslash);
    (below_space | is_zero) & HIGH_BIT_OF_EACH_BYTE == 0
}

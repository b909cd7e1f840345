//! Encoding of a decision's record: the JSON that its `Serialize` gives, at a fraction of the time.
//!
//! A derived serializer scans each field's name for characters to escape. Here the names are constants, and text is
//! scanned eight bytes at a time. A test compares both encodings.

use super::record::{
    DecisionRecord, DescriptorRecord, EntryRecord, GlobalRecord, LimitRecord, OverrideRecord, ResultRecord, RuleRecord,
    Text,
};

/// Length of most records with one descriptor, in bytes.
const USUAL_BYTES: usize = 1024;

impl DecisionRecord<'_> {
    /// Appends the line of the record.
    pub fn write(&self, line: &mut Vec<u8>) {
        line.reserve(USUAL_BYTES);
        text(line, "{\"v\":1,\"type\":\"decision\",\"process\":", &self.process);
        number(line, ",\"seq\":", self.seq);
        number(line, ",\"time_us\":", self.time_us);
        text(line, ",\"domain\":", &self.domain);
        if self.hits_addend != 0 {
            number(line, ",\"hits_addend\":", self.hits_addend);
        }
        list(line, ",\"descriptors\":[", &self.descriptors, descriptor);
        word(line, ",\"verdict\":\"", self.verdict.name());
        optional_text(line, ",\"error\":", self.error.as_ref());
        optional_number(line, ",\"retry_after_us\":", self.retry_after_us);
        if self.delay_us != 0 {
            number(line, ",\"delay_us\":", self.delay_us);
        }
        number(line, ",\"max_delay_us\":", self.max_delay_us);
        text(line, ",\"rules\":", &self.rules);
        optional_text(line, ",\"trace_id\":", self.trace_id.as_ref());
        number(line, ",\"duration_us\":", self.duration_us);
        line.extend_from_slice(b"}\n");
    }
}

fn descriptor(line: &mut Vec<u8>, record: &DescriptorRecord<'_>) {
    list(line, "{\"entries\":[", &record.entries, entry);
    number(line, ",\"hits\":", record.hits);
    if let Some(sent) = &record.limit_override {
        limit_override(line, sent);
    }
    flag(line, ",\"sampled\":", record.sampled);
    if let Some(matched) = &record.rule {
        rule(line, matched);
    }
    if record.unlimited {
        flag(line, ",\"unlimited\":", true);
    }
    if !record.limits.is_empty() {
        list(line, ",\"limits\":[", &record.limits, limit);
    }
    if let Some(decided_by) = record.decided_by {
        word(line, ",\"decided_by\":\"", decided_by.name());
    }
    if let Some(policy) = record.policy {
        word(line, ",\"policy\":\"", policy.name());
    }
    optional_text(line, ",\"reason\":", record.reason.as_ref());
    optional_number(line, ",\"now_us\":", record.now_us);
    word(line, ",\"verdict\":\"", record.verdict.name());
    line.push(b'}');
}

fn entry(line: &mut Vec<u8>, record: &EntryRecord<'_>) {
    let EntryRecord { key, key_base64, value, value_base64, value_hash } = record;
    let start = line.len();
    optional_text(line, ",\"key\":", key.as_ref());
    optional_text(line, ",\"key_base64\":", key_base64.as_ref());
    optional_text(line, ",\"value\":", value.as_ref());
    optional_text(line, ",\"value_base64\":", value_base64.as_ref());
    optional_text(line, ",\"value_hash\":", value_hash.as_ref());
    match line.get_mut(start) {
        // The comma of the first field.
        Some(first) => *first = b'{',
        None => line.push(b'{'),
    }
    line.push(b'}');
}

fn limit_override(line: &mut Vec<u8>, record: &OverrideRecord<'_>) {
    number(line, ",\"override\":{\"requests_per_unit\":", record.requests_per_unit);
    text(line, ",\"unit\":", &record.unit);
    number(line, ",\"multiplier\":", record.multiplier);
    line.push(b'}');
}

fn rule(line: &mut Vec<u8>, record: &RuleRecord<'_>) {
    text(line, ",\"rule\":{\"path\":", &record.path);
    optional_text(line, ",\"file\":", record.file.as_ref());
    optional_number(line, ",\"line\":", record.line);
    optional_text(line, ",\"resource\":", record.resource.as_ref());
    line.push(b'}');
}

fn limit(line: &mut Vec<u8>, record: &LimitRecord<'_>) {
    if record.name.is_empty() {
        word(line, "{\"algorithm\":\"", record.algorithm.name());
    } else {
        text(line, "{\"name\":", &record.name);
        word(line, ",\"algorithm\":\"", record.algorithm.name());
    }
    number(line, ",\"requests_per_unit\":", record.requests_per_unit);
    word(line, ",\"unit\":\"", record.unit.name());
    if record.unit_multiplier != 1 {
        number(line, ",\"unit_multiplier\":", record.unit_multiplier);
    }
    optional_number(line, ",\"capacity\":", record.capacity);
    if let Some(GlobalRecord { reserve_milli_percent, max_overshoot, on_region_loss }) = record.global {
        number(line, ",\"global\":{\"reserve_milli_percent\":", reserve_milli_percent);
        number(line, ",\"max_overshoot\":", max_overshoot);
        word(line, ",\"on_region_loss\":\"", on_region_loss.name());
        line.push(b'}');
    }
    for (name, is_set) in
        [(",\"shadow\":", record.shadow), (",\"candidate\":", record.candidate), (",\"quota\":", record.quota)]
    {
        if is_set {
            flag(line, name, true);
        }
    }
    if let Some(charged) = &record.result {
        result(line, charged);
    }
    line.push(b'}');
}

fn result(line: &mut Vec<u8>, record: &ResultRecord) {
    flag(line, ",\"result\":{\"admitted\":", record.admitted);
    number(line, ",\"before\":", record.before);
    number(line, ",\"after\":", record.after);
    number(line, ",\"remaining\":", record.remaining);
    number(line, ",\"reset_us\":", record.reset_us);
    optional_number(line, ",\"retry_after_us\":", record.retry_after_us);
    if record.delay_us != 0 {
        number(line, ",\"delay_us\":", record.delay_us);
    }
    line.push(b'}');
}

fn list<T>(line: &mut Vec<u8>, open: &str, items: &[T], encode: impl Fn(&mut Vec<u8>, &T)) {
    line.extend_from_slice(open.as_bytes());
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            line.push(b',');
        }
        encode(line, item);
    }
    line.push(b']');
}

fn number(line: &mut Vec<u8>, name: &str, value: impl itoa::Integer) {
    line.extend_from_slice(name.as_bytes());
    line.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
}

fn optional_number(line: &mut Vec<u8>, name: &str, value: Option<impl itoa::Integer>) {
    if let Some(value) = value {
        number(line, name, value);
    }
}

fn flag(line: &mut Vec<u8>, name: &str, value: bool) {
    line.extend_from_slice(name.as_bytes());
    line.extend_from_slice(if value { b"true" } else { b"false" });
}

/// Appends a word that needs no escapes; `name` ends with its opening quote.
fn word(line: &mut Vec<u8>, name: &str, value: &str) {
    line.extend_from_slice(name.as_bytes());
    line.extend_from_slice(value.as_bytes());
    line.push(b'"');
}

fn text(line: &mut Vec<u8>, name: &str, value: &str) {
    line.extend_from_slice(name.as_bytes());
    if is_plain(value.as_bytes()) {
        line.push(b'"');
        line.extend_from_slice(value.as_bytes());
        line.push(b'"');
    } else {
        // Writing text to memory does not fail.
        let _ = serde_json::to_writer(line, value);
    }
}

fn optional_text(line: &mut Vec<u8>, name: &str, value: Option<&Text<'_>>) {
    if let Some(value) = value {
        text(line, name, value);
    }
}

/// True if JSON needs no escape for any of the bytes.
fn is_plain(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [b' '; 8];
    last[..rest.len()].copy_from_slice(rest);
    words.iter().chain([&last]).all(|word| has_plain_bytes(u64::from_ne_bytes(*word)))
}

/// True if none of eight bytes is a control character, a quote or a backslash.
const fn has_plain_bytes(word: u64) -> bool {
    const ONES: u64 = u64::MAX / 0xff;
    const HIGH_BITS: u64 = 0x80 * ONES;
    // The lowest match has its high bit set; a borrow affects only higher bytes. Bytes from 0x80 on are plain.
    let below_space = word.wrapping_sub(0x20 * ONES) & !word;
    let quote = word ^ (b'"' as u64 * ONES);
    let backslash = word ^ (b'\\' as u64 * ONES);
    let is_zero = (quote.wrapping_sub(ONES) & !quote) | (backslash.wrapping_sub(ONES) & !backslash);
    (below_space | is_zero) & HIGH_BITS == 0
}

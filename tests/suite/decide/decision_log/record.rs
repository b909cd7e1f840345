//! Records: what is written can be read, without a loss, and fits the schema.

use std::num::NonZeroU16;

use proptest::prelude::*;
use smallvec::smallvec;
use tollkeeper::decide::log::header::{
    HeaderReason, HeaderRecord, RuleDocumentFormat, RuleDocumentRecord, RuleSetRecord, SettingsRecord,
};
use tollkeeper::decide::log::reader::RecordReader;
use tollkeeper::decide::log::record::{
    BlockRecord, DecisionRecord, DecisionSource, DescriptorRecord, DropReason, DroppedCountRecord, EntryRecord,
    FORMAT_VERSION, GlobalScopeRecord, LimitRecord, LimitResultRecord, OverrideRecord, Record, RecordedVerdict,
    RuleRecord, SlotRecord, hits_from_number, hits_to_number,
};
use tollkeeper::limit::RegionLossPolicy;
use tollkeeper::limit::StoreFailurePolicy;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::period::Unit;
use tollkeeper::limit::request::{Entry, Hits, LimitOverride};
use tollkeeper::limit::slot::SlotChange;

use super::schema::assert_valid;

fn full_slot() -> SlotRecord<'static> {
    SlotRecord {
        action: "acquire".into(),
        id: "0123456789abcdef0123456789abcdef".into(),
        token: "0123456789abcdef".into(),
        holder: "fedcba9876543210".into(),
    }
}

fn full_result() -> LimitResultRecord {
    LimitResultRecord {
        admitted: false,
        before: 3,
        after: 4,
        remaining: 6,
        reset_us: 7,
        retry_after_us: Some(8),
        delay_us: 9,
        banned_us: 10,
        slot: SlotChange::Taken,
        expired_seats: 11,
        above_estimate: 12,
    }
}

/// A decision with every field set.
pub(super) fn full_decision<'a>() -> DecisionRecord<'a> {
    let entry = Entry { key: b"user", value: b"alice" };
    let sent = LimitOverride { requests_per_unit: 10, unit: 2, unit_multiplier: 3 };
    let limit = LimitRecord {
        name: "daily".into(),
        algorithm: Algorithm::TokenBucket,
        requests_per_unit: 10,
        unit: Unit::Day,
        unit_multiplier: Some(2),
        capacity: Some(20),
        max_wait_us: Some(1_500_000),
        window: Some("{timezone: Europe/Berlin, day_starts: \"06:00\"}".into()),
        ban: Some("{for: 10m, after: 20}".into()),
        reservations: Some("{settle_within: 10m, unsettled: return, estimate: 40}".into()),
        takes_overflow: true,
        active: Some("{days: \"mon\", from: \"08:00\", to: \"20:00\", timezone: UTC}".into()),
        global: Some(GlobalScopeRecord {
            reserve_milli_percent: 10_000,
            max_overshoot: 60,
            on_region_loss: RegionLossPolicy::Local,
        }),
        shadow: true,
        candidate: true,
        quota: true,
        result: Some(full_result()),
    };
    let descriptor = DescriptorRecord {
        entries: smallvec![EntryRecord::with_plain_value(&entry)],
        hits: -2,
        limit_override: Some(OverrideRecord::from(&sent)),
        sampled: true,
        rule: Some(RuleRecord {
            path: "shop.user".into(),
            file: Some("rules.yaml".into()),
            line: Some(12),
            resource: None,
            plan: Some("gold".into()),
        }),
        unlimited: true,
        limits: smallvec![limit],
        decided_by: Some(DecisionSource::Policy),
        policy: Some(StoreFailurePolicy::Local),
        reason: Some("timeout".into()),
        block: Some(BlockRecord { key: "us\"er".into(), until_us: 2, reason: "abuse".into() }),
        now_us: Some(1),
        slot: Some(full_slot()),
        verdict: RecordedVerdict::Shadow,
    };
    DecisionRecord {
        process: "0123456789abcdef".into(),
        zone: "europe-west1-b".into(),
        seq: 17,
        time_us: 1_783_512_000_000_000,
        domain: "shop".into(),
        hits_addend: 3,
        descriptors: smallvec![descriptor],
        verdict: RecordedVerdict::Error,
        error: Some("store".into()),
        retry_after_us: Some(5),
        delay_us: 6,
        max_delay_us: 7,
        rules: "abc".into(),
        trace_id: Some("0123456789abcdef0123456789abcdef".into()),
        duration_us: 8,
    }
}

pub(super) fn header() -> HeaderRecord {
    let document = |name: &str, format, text: Option<&str>, base64: Option<&str>| RuleDocumentRecord {
        name: name.to_owned(),
        format,
        text: text.map(str::to_owned),
        base64: base64.map(str::to_owned),
    };
    HeaderRecord {
        event: HeaderReason::Start,
        process: "0123456789abcdef".to_owned(),
        seq: 0,
        time_us: 1,
        program: "1.2.3".to_owned(),
        store: "memory".to_owned(),
        settings: SettingsRecord {
            shadow_mode: false,
            quota_mode: false,
            stop_cache_key_increment_when_overlimit: false,
            merge_domains: true,
            calendar_months: true,
            log_max: 10_000,
            on_store_error: StoreFailurePolicy::Deny,
            max_replicas: 16,
            regions: NonZeroU16::new(3),
            when: vec!["all".to_owned()],
            sample: 0.01,
            values: "plain".to_owned(),
        },
        rules: Some(RuleSetRecord {
            id: "abc".to_owned(),
            version: Some("3".to_owned()),
            documents: vec![
                document("a.yaml", RuleDocumentFormat::Yaml, Some("domain: a\n"), None),
                document("b.yaml", RuleDocumentFormat::YamlFirst, None, Some("//4=")),
                document("c", RuleDocumentFormat::Xds, None, Some("CgFj")),
            ],
        }),
    }
}

fn read_all(lines: &[u8]) -> Vec<Record<'static>> {
    super::read_records(&mut RecordReader::new("log", std::io::Cursor::new(lines.to_vec())).unwrap())
}

#[test]
fn records_are_read_as_they_were_written_and_fit_the_schema() {
    let small = DecisionRecord {
        zone: "".into(),
        hits_addend: 0,
        error: None,
        retry_after_us: None,
        delay_us: 0,
        trace_id: None,
        descriptors: smallvec![DescriptorRecord {
            limit_override: None,
            rule: None,
            unlimited: false,
            limits: smallvec![],
            decided_by: None,
            policy: None,
            reason: None,
            now_us: None,
            ..full_decision().descriptors.remove(0)
        }],
        ..full_decision()
    };
    let dropped = |reason| DroppedCountRecord { process: "0123456789abcdef".to_owned(), time_us: 1, count: 2, reason };
    let (queue_full, write_failed) = (dropped(DropReason::QueueFull), dropped(DropReason::WriteFailed));
    let mut lines = Vec::new();
    lines.extend(header().to_line());
    full_decision().append_line(&mut lines);
    small.append_line(&mut lines);
    lines.extend(queue_full.to_line());
    lines.extend(write_failed.to_line());
    assert_valid(std::str::from_utf8(&lines).unwrap());
    let expected = vec![
        Record::Header(Box::new(header())),
        Record::Decision(Box::new(full_decision())),
        Record::Decision(Box::new(small)),
        Record::Dropped(queue_full),
        Record::Dropped(write_failed),
    ];
    assert_eq!(read_all(&lines), expected);
}

/// Line of a record by its `Serialize`, which the encoder must match.
fn serialized(record: &DecisionRecord<'_>) -> String {
    let fields = serde_json::to_string(record).unwrap();
    format!("{{\"v\":{FORMAT_VERSION},\"type\":\"decision\",{}\n", fields.strip_prefix('{').unwrap())
}

fn encoded(record: &DecisionRecord<'_>) -> String {
    let mut line = Vec::new();
    record.append_line(&mut line);
    String::from_utf8(line).unwrap()
}

#[test]
fn a_record_without_optional_fields_is_encoded_as_it_is_serialized() {
    let limit = LimitRecord {
        name: "".into(),
        algorithm: Algorithm::FixedWindow,
        requests_per_unit: 0,
        unit: Unit::Year,
        unit_multiplier: None,
        capacity: None,
        max_wait_us: None,
        window: None,
        ban: None,
        reservations: None,
        takes_overflow: false,
        active: None,
        global: None,
        shadow: false,
        candidate: false,
        quota: false,
        result: Some(LimitResultRecord {
            admitted: true,
            before: u64::MAX,
            after: 0,
            remaining: u64::MAX,
            reset_us: 0,
            retry_after_us: None,
            delay_us: 0,
            banned_us: 0,
            slot: SlotChange::None,
            expired_seats: 0,
            above_estimate: 0,
        }),
    };
    let bare = LimitRecord { result: None, ..limit.clone() };
    let descriptor = DescriptorRecord {
        entries: smallvec![EntryRecord::default(), EntryRecord::default()],
        hits: i64::MIN,
        limit_override: None,
        sampled: false,
        rule: Some(RuleRecord { resource: Some("shop".into()), ..RuleRecord::default() }),
        unlimited: false,
        limits: smallvec![limit, bare],
        decided_by: None,
        policy: None,
        reason: None,
        block: None,
        now_us: None,
        slot: None,
        verdict: RecordedVerdict::OverLimit,
    };
    let empty = DescriptorRecord {
        entries: smallvec![],
        rule: None,
        limits: smallvec![],
        decided_by: Some(DecisionSource::OverLimitCache),
        policy: Some(StoreFailurePolicy::Deny),
        ..descriptor.clone()
    };
    let record = DecisionRecord {
        process: "".into(),
        hits_addend: 0,
        descriptors: smallvec![descriptor, empty],
        verdict: RecordedVerdict::Ok,
        error: None,
        retry_after_us: None,
        delay_us: 0,
        trace_id: None,
        ..full_decision()
    };
    assert_eq!(encoded(&record), serialized(&record));
    let without = DecisionRecord { descriptors: smallvec![], ..record };
    assert_eq!(encoded(&without), serialized(&without));
}

#[test]
fn every_word_is_encoded_as_it_is_serialized() {
    let mut record = full_decision();
    let sources = [
        DecisionSource::Counter,
        DecisionSource::OverLimitCache,
        DecisionSource::Share,
        DecisionSource::Lease,
        DecisionSource::Rlqs,
        DecisionSource::Policy,
    ];
    let verdicts = [RecordedVerdict::Ok, RecordedVerdict::OverLimit, RecordedVerdict::Shadow, RecordedVerdict::Error];
    let words = sources.iter().zip(verdicts.iter().cycle()).zip(StoreFailurePolicy::ALL.iter().cycle());
    for (((source, verdict), policy), unit) in words.zip(Unit::ALL.iter().cycle()) {
        for algorithm in Algorithm::ALL {
            let descriptor = &mut record.descriptors[0];
            (descriptor.decided_by, descriptor.policy, descriptor.verdict) = (Some(*source), Some(*policy), *verdict);
            (descriptor.limits[0].algorithm, descriptor.limits[0].unit) = (algorithm, *unit);
            record.verdict = *verdict;
            assert_eq!(encoded(&record), serialized(&record));
        }
    }
}

#[test]
fn every_character_is_escaped_as_it_is_serialized() {
    let mut record = full_decision();
    for character in (0..=0x100).filter_map(char::from_u32) {
        // At each place of the eight bytes that are scanned at once, and after them.
        for before in 0..12 {
            let value = format!("{}{character}{}", "a".repeat(before), "\u{7f}é".repeat(before % 4));
            record.descriptors[0].entries[0].value = Some(value.into());
            assert_eq!(encoded(&record), serialized(&record));
        }
    }
}

proptest! {
    #[test]
    fn keys_and_values_of_any_bytes_are_recorded_without_loss(
        key in prop_oneof![any::<Vec<u8>>(), any::<String>().prop_map(String::into_bytes)],
        value in prop_oneof![any::<Vec<u8>>(), any::<String>().prop_map(String::into_bytes)],
    ) {
        let entry = Entry { key: &key, value: &value };
        let mut decision = full_decision();
        decision.descriptors[0].entries = smallvec![EntryRecord::with_plain_value(&entry)];
        let mut line = Vec::new();
        decision.append_line(&mut line);
        let text = std::str::from_utf8(&line).unwrap();
        prop_assert_eq!(text, serialized(&decision));
        prop_assert_eq!(text.matches('\n').count(), 1);
        assert_valid(text);
        let records = read_all(&line);
        let Record::Decision(read) = &records[0] else { panic!("{records:?}") };
        let entry = &read.descriptors[0].entries[0];
        prop_assert_eq!(entry.key_bytes().unwrap(), key.as_slice());
        prop_assert_eq!(entry.value_bytes().unwrap(), value.as_slice());
    }

    #[test]
    fn hits_and_overrides_are_recorded_without_loss(
        count in any::<u64>(),
        negative in any::<bool>(),
        requests_per_unit in any::<u32>(),
        unit in prop_oneof![-2..10, any::<i32>()],
        unit_multiplier in any::<u32>(),
    ) {
        let hits = Hits::new(count, negative);
        prop_assert_eq!(hits_from_number(hits_to_number(hits)), hits);
        let sent = LimitOverride { requests_per_unit, unit, unit_multiplier };
        prop_assert_eq!(OverrideRecord::from(&sent).to_limit_override(), Some(sent));
    }
}

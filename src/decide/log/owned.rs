//! Records that outlive the line that they were read from.

use std::borrow::Cow;

use super::record::{
    DecisionRecord, DescriptorRecord, EntryRecord, LimitRecord, OverrideRecord, Record, RuleRecord, Text,
};

impl Text<'_> {
    /// Copies the text if it is borrowed.
    pub fn into_owned(self) -> Text<'static> {
        Text(Cow::Owned(self.0.into_owned()))
    }
}

fn owned(text: Option<Text<'_>>) -> Option<Text<'static>> {
    text.map(Text::into_owned)
}

impl Record<'_> {
    /// Copies all borrowed text.
    pub fn into_owned(self) -> Record<'static> {
        match self {
            Self::Decision(decision) => Record::Decision(Box::new(decision.into_owned())),
            Self::Header(header) => Record::Header(header),
            Self::Dropped(dropped) => Record::Dropped(dropped),
        }
    }
}

impl DecisionRecord<'_> {
    /// Copies all borrowed text.
    pub fn into_owned(self) -> DecisionRecord<'static> {
        DecisionRecord {
            process: self.process.into_owned(),
            domain: self.domain.into_owned(),
            descriptors: self.descriptors.into_iter().map(DescriptorRecord::into_owned).collect(),
            error: owned(self.error),
            rules: self.rules.into_owned(),
            trace_id: owned(self.trace_id),
            seq: self.seq,
            time_us: self.time_us,
            hits_addend: self.hits_addend,
            verdict: self.verdict,
            retry_after_us: self.retry_after_us,
            delay_us: self.delay_us,
            max_delay_us: self.max_delay_us,
            duration_us: self.duration_us,
        }
    }
}

impl DescriptorRecord<'_> {
    fn into_owned(self) -> DescriptorRecord<'static> {
        DescriptorRecord {
            entries: self.entries.into_iter().map(EntryRecord::into_owned).collect(),
            limit_override: self.limit_override.map(|sent| OverrideRecord {
                requests_per_unit: sent.requests_per_unit,
                unit: sent.unit.into_owned(),
                multiplier: sent.multiplier,
            }),
            rule: self.rule.map(|rule| RuleRecord {
                path: rule.path.into_owned(),
                file: owned(rule.file),
                line: rule.line,
                resource: owned(rule.resource),
            }),
            limits: self.limits.into_iter().map(LimitRecord::into_owned).collect(),
            reason: owned(self.reason),
            hits: self.hits,
            sampled: self.sampled,
            unlimited: self.unlimited,
            decided_by: self.decided_by,
            policy: self.policy,
            now_us: self.now_us,
            verdict: self.verdict,
        }
    }
}

impl EntryRecord<'_> {
    fn into_owned(self) -> EntryRecord<'static> {
        EntryRecord {
            key: owned(self.key),
            key_base64: owned(self.key_base64),
            value: owned(self.value),
            value_base64: owned(self.value_base64),
            value_hash: owned(self.value_hash),
        }
    }
}

impl LimitRecord<'_> {
    fn into_owned(self) -> LimitRecord<'static> {
        LimitRecord {
            name: self.name.into_owned(),
            algorithm: self.algorithm,
            requests_per_unit: self.requests_per_unit,
            unit: self.unit,
            unit_multiplier: self.unit_multiplier,
            capacity: self.capacity,
            global: self.global,
            shadow: self.shadow,
            candidate: self.candidate,
            quota: self.quota,
            result: self.result,
        }
    }
}

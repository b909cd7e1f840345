//! Results of `why`: the JSON that the command prints, and the basis of its text.
//!
//! Decides: why a descriptor is not in the logs.

use serde::Serialize;

use super::descriptor_history::{AskedDecision, DescriptorHistory, RuleChange};
use super::rejection::{BanFacts, RejectingLimit, Remedy, limit_rejected_hits, list_remedies_for_block_or_policy};
use super::time_range::format_time;
use crate::decide::log::header::SettingsRecord;
use crate::decide::log::record::{DecisionRecord, RecordedVerdict};

/// Decisions on one descriptor, and the reasons for them.
#[derive(Debug, Serialize)]
pub struct WhyResults<'l> {
    /// Domain that was asked about.
    pub domain: &'l str,
    /// Descriptor that was asked about.
    pub descriptor: String,
    /// Asked time, with its range; absent: the whole logs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<TimeSpan>,
    /// The logs.
    pub log: LogFacts,
    /// Requests with the descriptor within the range.
    pub requests: u64,
    /// Requests that were rejected.
    pub rejected: u64,
    /// Rejected requests in which the descriptor itself had room.
    pub rejected_by_other_descriptors: u64,
    /// Requests that only a limit in shadow mode would have rejected.
    pub shadow: u64,
    /// Requests without an answer.
    pub errors: u64,
    /// Time of the first rejection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_rejected: Option<String>,
    /// Time of the last rejection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_rejected: Option<String>,
    /// Limits that rejected requests, most first.
    pub causes: Vec<CauseCount>,
    /// Records that are missing within the range.
    pub dropped: u64,
    /// Starts and changes of rules within the range.
    pub rule_changes: Vec<RuleChange>,
    /// Decisions by time.
    pub decisions: Vec<DecisionWithRemedies<'l>>,
    /// Decisions that were left out because there are too many.
    pub left_out: u64,
    /// Descriptors that are most like the asked one, if the logs do not have it.
    pub nearest: Vec<String>,
    /// Remarks on gaps of the logs.
    pub notes: Vec<String>,
}

/// Span of time around an asked time, as RFC 3339.
#[derive(Debug, Serialize)]
pub struct TimeSpan {
    /// Asked time.
    pub at: String,
    /// Start.
    pub from: String,
    /// End.
    pub to: String,
}

/// Facts about the logs.
#[derive(Debug, Serialize)]
pub struct LogFacts {
    /// Number of decisions.
    pub decisions: u64,
    /// Time of the first record.
    pub first: Option<String>,
    /// Time of the last record.
    pub last: Option<String>,
    /// Number of decisions on the descriptor at any time.
    pub found: u64,
}

/// Number of requests that were rejected for one cause.
#[derive(Debug, Serialize)]
pub struct CauseCount {
    /// Number of requests.
    pub requests: u64,
    /// Rule with its line, limit and policy.
    pub cause: String,
}

/// A decision, and changes that would have let it pass.
#[derive(Debug, Serialize)]
pub struct DecisionWithRemedies<'l> {
    /// Time by the clock of Redis, if its process charges there, in microseconds since the Unix epoch.
    #[serde(skip)]
    pub time_us: u64,
    /// The same as RFC 3339.
    pub time: String,
    /// Positions of the asked descriptor, from 0.
    pub asked: Vec<usize>,
    /// Limits that rejected the request.
    pub rejected_by: Vec<LimitRemedies>,
    /// The record of the log.
    pub record: DecisionRecord<'l>,
}

/// Changes that would have let the hits of a descriptor pass one limit.
#[derive(Debug, Serialize)]
pub struct LimitRemedies {
    /// Position of the descriptor, from 0.
    pub descriptor: usize,
    /// Position of the limit, from 0; absent if a failure policy rejected without a limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Ban that the limit began, or that rejected the hits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ban: Option<BanFacts>,
    /// Changes.
    pub remedies: Vec<Remedy>,
}

impl<'l> WhyResults<'l> {
    /// Results of a history that is complete.
    pub fn new(history: &'l DescriptorHistory<'_>) -> Self {
        let (counts, log) = (&history.counts, &history.log);
        let mut causes: Vec<CauseCount> = Vec::new();
        causes.extend(
            counts.causes.iter().map(|(cause, requests)| CauseCount { requests: *requests, cause: cause.clone() }),
        );
        causes.sort_by(|one, other| other.requests.cmp(&one.requests).then_with(|| one.cause.cmp(&other.cause)));
        let decisions = history.decisions_by_time();
        let decisions: Vec<_> = decisions.into_iter().map(build_shown_decision).collect();
        let mut rule_changes = history.headers.changes.clone();
        rule_changes.sort_by_key(|change| change.time_us);
        Self {
            domain: history.asked.domain,
            descriptor: history.asked.descriptor_text(),
            range: history.range.bounds().map(|bounds| TimeSpan {
                at: format_time(bounds.at_us),
                from: format_time(bounds.from_us),
                to: format_time(bounds.to_us),
            }),
            log: LogFacts {
                decisions: log.decisions,
                first: log.first_us.map(format_time),
                last: log.last_us.map(format_time),
                found: log.found,
            },
            requests: counts.requests,
            rejected: counts.rejected,
            rejected_by_other_descriptors: counts.rejected_by_others,
            shadow: counts.shadow,
            errors: counts.errors,
            first_rejected: counts.first_rejected_us.map(format_time),
            last_rejected: counts.last_rejected_us.map(format_time),
            causes,
            dropped: counts.dropped,
            rule_changes,
            left_out: counts.showable - decisions.len() as u64,
            decisions,
            nearest: if log.found == 0 { history.nearest.nearest_texts() } else { Vec::new() },
            notes: collect_notes(history),
        }
    }
}

fn build_shown_decision(
    AskedDecision { time_us, record, asked_positions }: AskedDecision<'_>,
) -> DecisionWithRemedies<'_> {
    let mut rejected_by = Vec::new();
    if record.verdict == RecordedVerdict::OverLimit {
        for (index, descriptor) in record.descriptors.iter().enumerate() {
            if descriptor.verdict != RecordedVerdict::OverLimit {
                continue;
            }
            let before = rejected_by.len();
            for (at, limit) in descriptor.limits.iter().enumerate().filter(|(_, limit)| limit_rejected_hits(limit)) {
                let rejecting = RejectingLimit { decision: &record, descriptor, limit };
                let (ban, remedies) = (rejecting.find_ban(), rejecting.list_remedies());
                rejected_by.push(LimitRemedies { descriptor: index, limit: Some(at), ban, remedies });
            }
            if rejected_by.len() == before {
                let remedies = list_remedies_for_block_or_policy(&record, descriptor);
                rejected_by.push(LimitRemedies { descriptor: index, limit: None, ban: None, remedies });
            }
        }
    }
    DecisionWithRemedies { time_us, time: format_time(time_us), asked: asked_positions.to_vec(), rejected_by, record }
}

/// Remarks on everything that the logs may not tell.
fn collect_notes(history: &DescriptorHistory<'_>) -> Vec<String> {
    let (counts, log) = (&history.counts, &history.log);
    let mut notes = history.problems.clone();
    let settings = history.headers.settings.as_ref();
    if counts.dropped > 0 {
        notes.push(format!(
            "up to {} records are missing here: the destination of the log was too slow, or failed",
            counts.dropped
        ));
    }
    if history.headers.more_changes > 0 {
        notes.push(format!("{} more changes of rules are not listed", history.headers.more_changes));
    }
    if counts.unsampled > 0 {
        notes.push(format!(
            "the sample leaves this key out: {} of these decisions are logged for another descriptor of the request, \
             and others may be missing",
            counts.unsampled
        ));
    }
    if log.decisions == 0 {
        notes.push("the logs have no decisions".to_owned());
    } else if log.found == 0 {
        notes.extend(list_reasons_for_absence(history, settings));
    } else if counts.requests == 0 {
        let time = |time_us: Option<u64>| time_us.map(format_time).unwrap_or_default();
        let (first, last) = (time(log.first_found_us), time(log.last_found_us));
        notes.push(format!("the logs have the descriptor {} times at other times, {first} to {last}", log.found));
    }
    notes.extend(describe_uncovered_range(history));
    if let Some(settings) = settings
        && !settings.when.iter().any(|when| when == "all")
    {
        let when = settings.when.join(",");
        notes.push(format!(
            "the log has only some decisions (TOLLKEEPER_DECISION_LOG_WHEN={when}): others are not counted here"
        ));
    }
    notes
}

/// Reasons why the logs may not have a descriptor.
fn list_reasons_for_absence(history: &DescriptorHistory<'_>, settings: Option<&SettingsRecord>) -> Vec<String> {
    let log = &history.log;
    let mut reasons =
        vec!["the logs have no decision on this descriptor: entries must be all those of the request".to_owned()];
    if history.asked.descriptor_text().contains('*') {
        let hint = "a `*` is no pattern here: ask for a value as it was sent (`top` shows the pattern of values that \
                    share a counter)";
        reasons.push(hint.to_owned());
    }
    if log.other_hashes > 0 {
        let reason = match history.asked.has_hash_key() {
            true => "the value did not occur, or TOLLKEEPER_DECISION_LOG_HASH_KEY (or _FILE) is not the key of the log",
            false => {
                "give the key of the log in TOLLKEEPER_DECISION_LOG_HASH_KEY or TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE"
            }
        };
        reasons.push(format!("descriptors with these keys and other, hashed values: {} ({reason})", log.other_hashes));
    }
    if log.hidden > 0 {
        reasons.push(format!(
            "descriptors with these keys and without values: {} (decision_log: none of their rule, or \
             TOLLKEEPER_DECISION_LOG_VALUES=none)",
            log.hidden
        ));
    }
    if let Some(settings) = settings.filter(|settings| settings.sample < 1.0) {
        reasons.push(format!(
            "the log has a sample of the keys, and this one may not be in it (TOLLKEEPER_DECISION_LOG_SAMPLE={})",
            settings.sample
        ));
    }
    reasons
}

/// Describes the part of the range that the logs do not cover; `None` if they do, or were read in part.
fn describe_uncovered_range(history: &DescriptorHistory<'_>) -> Option<String> {
    let log = &history.log;
    if history.is_partial {
        return None;
    }
    let (first_us, last_us) = (log.first_us?, log.last_us?);
    if history.range.is_unreached_by_logs() {
        return Some(format!("the logs end before that time of day, at {}", format_time(last_us)));
    }
    let bounds = history.range.bounds()?;
    if bounds.from_us > last_us {
        Some(format!("the logs end before, at {}", format_time(last_us)))
    } else if bounds.to_us < first_us {
        Some(format!("the logs begin later, at {}", format_time(first_us)))
    } else if bounds.from_us < first_us {
        Some(format!("the logs begin within this time, at {}", format_time(first_us)))
    } else {
        None
    }
}

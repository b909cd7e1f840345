//! What is wrong: a sentence, since when, and what to do about it. Each replica finds its own (`alarms`) and publishes it
//! with its summary; the fleet joins equal ones, and adds what one replica does and others do not (`differences`).
//!
//! Decides: advice and runbook of each alarm (`ADVICE`).
//! Decides: which findings of replicas are one (`merge_equal_findings`).

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::base::clock::Time;

/// A condition that an operator should know, as it holds now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Finding {
    /// Name of the condition, such as `store_lost`.
    pub kind: Cow<'static, str>,
    /// Replicas that it concerns, by name, at most [`MAX_NAMED_REPLICAS`]; none as a replica publishes it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<String>,
    /// What is wrong, and a remedy.
    pub text: String,
    /// What to do first; not published.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub advice: Cow<'static, str>,
    /// Where to read more: a path of the repository and of its site; not published.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub runbook: Cow<'static, str>,
    /// Time at which it was seen first, RFC 3339 in UTC.
    pub since: String,
}

/// Times at which findings were seen first.
#[derive(Debug, Default)]
pub struct FirstSeen(BTreeMap<(Cow<'static, str>, Vec<String>), Time>);

/// Maximum number of findings that a replica publishes.
pub const MAX_FINDINGS: usize = 24;
/// Maximum number of findings of one kind, with texts that differ.
const MAX_TEXTS_OF_KIND: usize = 3;
/// Maximum length of the text of a published finding, in bytes.
pub const MAX_FINDING_TEXT_BYTES: usize = 768;
/// Text of findings of a kind beyond [`MAX_TEXTS_OF_KIND`].
const FURTHER_TEXTS: &str = "these replicas have it too, with other figures: see their own pages";
/// Maximum number of replicas that a finding names.
pub const MAX_NAMED_REPLICAS: usize = 10;

/// What to do about a finding, and the page that has more.
pub const ADVICE: [(&str, &str, &str); 21] = [
    ("not_ready", "see the text, and /problems", "docs/runbooks.md#alarm-not-ready"),
    ("store_lost", "see the error in the text, and /store", "docs/runbooks.md#tollkeeper-store-lost"),
    ("server_not_used", "see /store, which names the server's failure", "docs/runbooks.md#tollkeeper-store-errors"),
    ("reload_failed", "mend the file that /problems names, or go back", "docs/runbooks.md#tollkeeper-config-refused"),
    (
        "xds_stream_lost",
        "see xds in /rlconfig/status, and the control plane",
        "docs/runbooks.md#tollkeeper-xds-stream-down",
    ),
    ("rlqs_off", "set TOLLKEEPER_RLQS=true and restart", "docs/quota.md"),
    ("mostly_rejected", "see `tollkeeper top`, then the limit", "docs/runbooks.md#tollkeeper-refusals-surging"),
    (
        "rejections_rose_after_load",
        "see what the load changed, and undo it",
        "docs/runbooks.md#alarm-rejections-rose-after-load",
    ),
    ("no_requests", "see the statistics of Envoy's cluster", "docs/runbooks.md#tollkeeper-envoy-fail-open"),
    ("hot_key", "find out who it is: `tollkeeper top`, `tollkeeper tap`", "docs/runbooks.md#alarm-hot-key"),
    ("unmatched", "compare with `tollkeeper top --unmatched`", "docs/runbooks.md#tollkeeper-nothing-matches"),
    (
        "unmatched_descriptors",
        "compare with `tollkeeper top --unmatched`",
        "docs/runbooks.md#tollkeeper-nothing-matches",
    ),
    (
        "almost_matches_rule",
        "correct the rule, or the descriptor in Envoy",
        "docs/troubleshooting.md#a-limit-does-nothing",
    ),
    ("late", "give the process more CPU, and no limit of it", "docs/runbooks.md#tollkeeper-decisions-slow"),
    ("certificate_expired", "renew the certificate", "docs/runbooks.md#tollkeeper-certificate-expiring"),
    ("certificate_expires", "renew the certificate", "docs/runbooks.md#tollkeeper-certificate-expiring"),
    ("not_publishing", "see whether it runs and reaches Redis", "docs/runbooks.md#tollkeeper-replicas-missing"),
    ("different_rules", "compare /rlconfig/status of the replicas", "docs/runbooks.md#tollkeeper-replicas-differ"),
    ("answers_by_policy", "see /store of these replicas", "docs/runbooks.md#tollkeeper-store-errors"),
    ("clocks_apart", "synchronize the hosts' clocks", "docs/runbooks.md#tollkeeper-clock-skew"),
    ("different_builds", "end the update that is under way", "docs/runbooks.md#tollkeeper-replicas-differ"),
];

/// Advice on other findings, and their page.
const OTHER_ADVICE: (&str, &str) = ("see the text", "docs/console.md#alarms");

impl Finding {
    /// A finding of a process about itself, or of one replica about others, without a time.
    pub fn new(kind: &'static str, replicas: Vec<String>, text: String) -> Self {
        Self { kind: kind.into(), replicas, text, ..Self::default() }
    }

    /// True for a finding that a replica may have published: its texts are short.
    pub fn fits_bounds(&self) -> bool {
        self.kind.len() <= 64 && self.since.len() <= 40 && self.text.len() <= MAX_FINDING_TEXT_BYTES
    }

    /// The finding with what to do about it.
    #[must_use]
    pub fn with_advice(mut self) -> Self {
        let advice = ADVICE.iter().find(|(of, ..)| *of == self.kind).map(|(_, advice, runbook)| (*advice, *runbook));
        let (advice, runbook) = advice.unwrap_or(OTHER_ADVICE);
        (self.advice, self.runbook) = (advice.into(), runbook.into());
        self
    }
}

impl FirstSeen {
    /// Sets since when the findings are there, and forgets those that ended.
    pub fn set_since_and_forget_ended(&mut self, findings: &mut [Finding], now: Time) {
        let before = std::mem::take(&mut self.0);
        for finding in findings {
            let id = (finding.kind.clone(), finding.replicas.clone());
            let first = before.get(&id).copied().unwrap_or(now);
            finding.since = self.0.entry(id).or_insert(first).to_string();
        }
    }
}

/// Joins what replicas published: equal findings are one, since the earliest, and name the replicas that have it.
pub fn merge_equal_findings<'r>(published: impl Iterator<Item = (&'r str, Finding)>) -> Vec<Finding> {
    let mut joined: Vec<Finding> = Vec::new();
    for (replica, mut finding) in published {
        let of_kind = || joined.iter().filter(|known| known.kind == finding.kind);
        if of_kind().count() >= MAX_TEXTS_OF_KIND && !of_kind().any(|known| known.text == finding.text) {
            finding.text = FURTHER_TEXTS.to_owned();
        }
        let known = joined.iter_mut().find(|known| known.kind == finding.kind && known.text == finding.text);
        match known {
            Some(known) => {
                if known.replicas.len() < MAX_NAMED_REPLICAS {
                    known.replicas.push(replica.to_owned());
                }
                known.since = finding.since.min(std::mem::take(&mut known.since));
            }
            None => joined.push(Finding { replicas: vec![replica.to_owned()], ..finding }.with_advice()),
        }
    }
    joined
}

/// Formats the time of day, in UTC: `14:03`.
pub(super) fn format_minute_of_day(time: Time) -> String {
    let minute = time.as_micros() / 60_000_000;
    format!("{:02}:{:02}", minute / 60 % 24, minute % 60)
}

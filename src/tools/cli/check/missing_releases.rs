//! Rules whose slots were taken and never released, or whose estimates were never settled: in the traffic of a server
//! or in decision logs.
//!
//! Without the `release` filter of Envoy nothing of a rule file is wrong. Each slot ends with `max_duration` only, and
//! each reservation with `settle_within`.
//!
//! Decides: which rules with `concurrent` traffic of a log never releases.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::decide::log::reader::{ReadError, RecordReader};
use crate::decide::log::record::{DescriptorRecord, Record};
use crate::limit::algorithm::Algorithm;
use crate::limit::slot::SlotAction;
use crate::serve::report::rules::{LimitFindingKind, RuleUsageReport};
use crate::settings::address::ConnectAddress;
use crate::tools::cli::client::{fetch_page, parse_page};

/// Number of requests from which on a missing release is a finding.
const MIN_REQUESTS_FOR_WARNING: u64 = 20;
/// Maximum number of rules that are counted.
const MAX_COUNTED_RULES: usize = 10_000;

/// A rule whose slots or reservations no traffic released.
#[derive(Debug, Serialize)]
pub(super) struct MissingReleaseWarning {
    /// Path of the rule.
    pub(super) rule: String,
    /// What is wrong, and the fix.
    pub(super) message: String,
}

/// Rules whose slots or reservations the traffic never released, and traffic that could not be read.
#[derive(Debug, Default, Serialize)]
pub(super) struct MissingReleases {
    /// Rules whose slots or reservations no traffic released.
    pub(super) warnings: Vec<MissingReleaseWarning>,
    /// Servers and logs that could not be read.
    pub(super) problems: Vec<String>,
}

/// Numbers of requests and of releases under a rule.
#[derive(Default)]
struct RequestAndReleaseCounts {
    requests: u64,
    releases: u64,
    /// One of its limits is concurrent; else one has reservations.
    is_concurrent: bool,
}

impl MissingReleases {
    /// Looks at the limits of a server, and at logs.
    pub(super) fn read_and_check(server: Option<&ConnectAddress>, logs: &[PathBuf]) -> Self {
        let mut found = Self::default();
        if let Some(server) = server {
            match fetch_warnings(server) {
                Ok(warnings) => found.warnings = warnings,
                Err(problem) => found.problems.push(problem),
            }
        }
        let mut uses = BTreeMap::new();
        for path in logs {
            if let Err(problem) = count_requests_and_releases(path, &mut uses) {
                found.problems.push(problem);
            }
        }
        let unreleased =
            uses.into_iter().filter(|(_, uses)| uses.requests >= MIN_REQUESTS_FOR_WARNING && uses.releases == 0);
        found.warnings.extend(unreleased.map(|(rule, RequestAndReleaseCounts { requests, is_concurrent, .. })| {
            let found = match is_concurrent {
                true => "requests asked for slots and none released one",
                false => "requests reserved an estimate and none was settled",
            };
            let message = format!(
                "{requests} {found}: Envoy needs a second rate limit filter in front, with apply_on_stream_done and the \
                 entry `release`"
            );
            MissingReleaseWarning { rule, message }
        }));
        found
    }
}

fn fetch_warnings(server: &ConnectAddress) -> Result<Vec<MissingReleaseWarning>, String> {
    let mut warnings = Vec::new();
    for (name, kind) in [
        ("slots_not_released", LimitFindingKind::SlotsNotReleased),
        ("reservations_not_settled", LimitFindingKind::ReservationsNotSettled),
    ] {
        let page = fetch_page(server, &format!("/rules?finding={name}&most=10000"), None)?;
        let report = parse_page::<RuleUsageReport>(server, &page, "a report")?;
        for limit in report.rules {
            let unreleased = limit.findings.into_iter().filter(|found| found.kind == kind);
            warnings.extend(
                unreleased.map(|found| MissingReleaseWarning { rule: limit.rule.clone(), message: found.advice }),
            );
        }
    }
    Ok(warnings)
}

/// Counts the uses of slots in a log. Lines that are no records are left out.
fn count_requests_and_releases(
    path: &Path,
    uses: &mut BTreeMap<String, RequestAndReleaseCounts>,
) -> Result<(), String> {
    let file = File::open(path).map_err(|error| format!("{}: cannot be opened: {error}", path.display()))?;
    let name = path.display().to_string();
    let mut reader = RecordReader::new(&name, file).map_err(|error| error.to_string())?;
    loop {
        match reader.next_record() {
            Ok(Some(Record::Header(header))) if header.settings.when.iter().all(|when| when != "all") => {
                return Err(format!(
                    "{name}: the log has only some decisions, so it does not tell which slots were released (write it \
                     with TOLLKEEPER_DECISION_LOG_WHEN=all)"
                ));
            }
            Ok(Some(Record::Decision(decision))) => {
                decision.descriptors.iter().for_each(|descriptor| count_descriptor(descriptor, uses));
            }
            Ok(Some(_)) | Err(ReadError::NotARecord { .. } | ReadError::UnknownVersion { .. }) => {}
            Ok(None) => return Ok(()),
            Err(error) => return Err(error.to_string()),
        }
    }
}

fn count_descriptor(descriptor: &DescriptorRecord<'_>, uses: &mut BTreeMap<String, RequestAndReleaseCounts>) {
    let Some(rule) = descriptor.rule.as_ref() else { return };
    let is_concurrent = descriptor.limits.iter().any(|limit| limit.algorithm == Algorithm::Concurrent);
    if !is_concurrent && descriptor.limits.iter().all(|limit| limit.reservations.is_none()) {
        return;
    }
    if !uses.contains_key(&*rule.path) && uses.len() == MAX_COUNTED_RULES {
        return;
    }
    let action = descriptor.slot.as_ref().and_then(|slot| SlotAction::from_name(&slot.action));
    let uses = uses.entry(rule.path.to_string()).or_default();
    uses.is_concurrent |= is_concurrent;
    match action.is_some_and(SlotAction::is_release) {
        true => uses.releases += 1,
        false if descriptor.hits > 0 => uses.requests += 1,
        false => {}
    }
}

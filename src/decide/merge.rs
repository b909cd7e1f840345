//! Verdicts merge into one answer: statuses, the overall code, headers and body.
//!
//! A trial (`shadow_mode`) never refuses; quotas refuse only all together; any other refused limit refuses the request.
//! A real refusal goes before a failed draw that may not be answered, and that before all else.

use std::borrow::Cow;
use std::cmp::{Ordering, Reverse};

use smallvec::SmallVec;

use super::metadata;
use super::selection::{Selected, Selection};
use super::{DecideError, Outcome};
use crate::algorithm::Level;
use crate::decision::{CurrentLimit, Decision, Header, Status};
use crate::limit::{Algorithm, StorePolicy};
use crate::request::Request;
use crate::settings::Behaviour;

/// What is known of one descriptor once it was decided.
#[derive(Debug)]
pub(super) struct Verdict<'r> {
    pub(super) status: Status<'r>,
    /// The place of the limit that the status is of, among those selected.
    shown: Option<usize>,
    /// The limit that the status is of is a quota.
    quota: bool,
    /// How long the answer is to be held for it, in microseconds.
    hold_us: u64,
    /// The store failed, and the rule says so.
    failed: bool,
}

/// Merges what came of the draws.
pub(super) fn merge<'r>(
    behaviour: &'r Behaviour,
    request: &Request<'_>,
    selections: &[Selection<'r>],
    outcomes: &[Outcome],
) -> Result<Decision<'r>, DecideError> {
    let verdicts: SmallVec<[Verdict<'r>; 2]> =
        selections.iter().zip(outcomes).map(|(selection, outcome)| verdict(selection, outcome)).collect();
    let refused = is_refused(behaviour, selections, &verdicts);
    if !refused && verdicts.iter().any(|verdict| verdict.failed) {
        return Err(DecideError::Store);
    }
    let over_limit = refused && !behaviour.shadow_mode;
    let mut headers = limit_headers(behaviour, &verdicts);
    let mut body = None;
    if over_limit {
        headers.extend(retry_after_header(behaviour, &verdicts));
        let refusal = selections
            .iter()
            .zip(&verdicts)
            .filter(|(_, verdict)| verdict.status.over_limit)
            .find_map(|(selection, _)| selection.refusal.filter(|refusal| refusal.body.is_some()));
        body = refusal.and_then(|refusal| refusal.body.as_deref());
        let content_type = refusal.and_then(|refusal| refusal.content_type.as_deref());
        headers.extend(content_type.map(|value| Header { name: "content-type", value: Cow::Borrowed(value) }));
    }
    Ok(Decision {
        over_limit,
        headers,
        body,
        metadata: metadata::of(behaviour, request, selections, &verdicts),
        hold_us: if over_limit { 0 } else { verdicts.iter().map(|verdict| verdict.hold_us).max().unwrap_or(0) },
        statuses: verdicts.into_iter().map(|verdict| verdict.status).collect(),
    })
}

/// Whether the request is refused, trials of the whole process aside: any limit that is no quota refuses it, and quotas
/// do if there are any and all refuse. Under QUOTA_MODE all are quotas, those that nothing matched too.
fn is_refused(behaviour: &Behaviour, selections: &[Selection<'_>], verdicts: &[Verdict<'_>]) -> bool {
    let (mut quotas, mut refused_quotas) = (0, 0);
    for (selection, verdict) in selections.iter().zip(verdicts) {
        if selection.unlimited {
            continue;
        }
        let over = verdict.status.over_limit;
        if behaviour.quota_mode || verdict.quota {
            quotas += 1;
            refused_quotas += usize::from(over);
        } else if over {
            return true;
        }
    }
    quotas > 0 && quotas == refused_quotas
}

fn verdict<'r>(selection: &Selection<'r>, outcome: &Outcome) -> Verdict<'r> {
    let free = |remaining| Verdict {
        status: Status { remaining, ..Status::default() },
        shown: None,
        quota: false,
        hold_us: 0,
        failed: false,
    };
    match outcome {
        Outcome::Free => free(if selection.unlimited { u32::MAX } else { 0 }),
        Outcome::Drawn(levels) => drawn(selection, levels),
        Outcome::Failed(StorePolicy::Local | StorePolicy::Allow) => free(0),
        Outcome::Failed(StorePolicy::Error) => Verdict { failed: true, ..free(0) },
        Outcome::Failed(StorePolicy::Deny) => {
            let shown = selection.limits.iter().position(|selected| !selected.shadow).unwrap_or(0);
            let selected = &selection.limits[shown];
            let status = Status {
                over_limit: true,
                current_limit: Some(current_limit(selected)),
                remaining: 0,
                until_reset_s: Some(1),
            };
            Verdict { status, shown: Some(shown), quota: selected.quota, hold_us: 0, failed: false }
        }
    }
}

/// The verdict of limits that were decided together.
fn drawn<'r>(selection: &Selection<'r>, levels: &[Level]) -> Verdict<'r> {
    let shown = shown(&selection.limits, levels);
    let (selected, level) = (&selection.limits[shown], &levels[shown]);
    let until_us = match level.retry_after_us {
        Some(retry_after_us) if !level.admitted && selected.limit.algorithm() != Algorithm::FixedWindow => {
            retry_after_us
        }
        _ => level.reset_us,
    };
    let until_reset_s = until_us.div_ceil(1_000_000).max(u64::from(!level.admitted));
    let held = selection.limits.iter().zip(levels).filter(|(selected, _)| !selected.shadow);
    Verdict {
        status: Status {
            over_limit: !level.admitted && !selected.shadow,
            current_limit: Some(current_limit(selected)),
            remaining: if level.admitted { level.remaining } else { 0 },
            until_reset_s: Some(until_reset_s),
        },
        shown: Some(shown),
        quota: selected.quota,
        hold_us: held.map(|(_, level)| level.hold_us).max().unwrap_or(0),
        failed: false,
    }
}

fn current_limit<'r>(selected: &Selected<'r>) -> CurrentLimit<'r> {
    CurrentLimit {
        name: selected.name,
        requests_per_unit: selected.limit.requests_per_unit(),
        period: selected.limit.period(),
    }
}

/// Which of a descriptor's limits its status is of: a refused one before others, one that is no quota before quotas,
/// the longest wait; else the one with the least share left; the first on a tie. Trials speak only among themselves.
fn shown(limits: &[Selected<'_>], levels: &[Level]) -> usize {
    let any_enforced = limits.iter().any(|selected| !selected.shadow);
    let eligible = (0..limits.len()).filter(|place| !(any_enforced && limits[*place].shadow));
    let refused = eligible.clone().filter(|place| !levels[*place].admitted);
    // No promise at all is the longest wait. `min_by_key` gives the first on a tie.
    let longest =
        |place: &usize| (limits[*place].quota, Reverse(levels[*place].retry_after_us.map_or(u64::MAX, |wait| wait)));
    refused.min_by_key(longest).unwrap_or_else(|| {
        let least = eligible.min_by(|a, b| share_left(limits, levels, *a, *b));
        least.unwrap_or(0)
    })
}

/// Compares what is left of two limits, as shares of what can pass at once.
fn share_left(limits: &[Selected<'_>], levels: &[Level], a: usize, b: usize) -> Ordering {
    let share =
        |of: usize, other: usize| u64::from(levels[of].remaining) * u64::from(limits[other].limit.capacity().max(1));
    share(a, b).cmp(&share(b, a))
}

/// `RateLimit-*` headers, of the last refused limit that is no quota, else of the first with the least remaining.
fn limit_headers<'r>(behaviour: &'r Behaviour, verdicts: &[Verdict<'r>]) -> SmallVec<[Header<'r>; 4]> {
    let Some(names) = &behaviour.limit_headers else { return SmallVec::new() };
    let mut least = (u32::MAX, None);
    for verdict in verdicts {
        let Some(limit) = verdict.status.current_limit else { continue };
        let refuses = verdict.status.over_limit && !(behaviour.quota_mode || verdict.quota);
        if refuses || verdict.status.remaining < least.0 {
            least = (verdict.status.remaining, Some((limit, &verdict.status)));
        }
    }
    let (_, Some((limit, status))) = least else { return SmallVec::new() };
    let header = |name: &'r str, value: u64| Header { name, value: Cow::Owned(value.to_string()) };
    SmallVec::from_iter([
        header(&names.limit, u64::from(limit.requests_per_unit)),
        header(&names.remaining, u64::from(status.remaining)),
        header(&names.reset, status.until_reset_s.unwrap_or(0)),
    ])
}

/// When to come back, in seconds: what the longest of the refusals says.
fn retry_after_header<'r>(behaviour: &'r Behaviour, verdicts: &[Verdict<'r>]) -> Option<Header<'r>> {
    let name = behaviour.retry_after_header.as_deref()?;
    let refused = verdicts.iter().filter(|verdict| verdict.status.over_limit);
    let seconds = refused.filter_map(|verdict| verdict.status.until_reset_s).max()?;
    Some(Header { name, value: Cow::Owned(seconds.to_string()) })
}

impl Verdict<'_> {
    /// The name of the limit that the status is of, as `/rlconfig` and metrics know it.
    pub(super) fn limit_path(&self, selection: &Selection<'_>) -> Option<String> {
        let selected = selection.limits.get(self.shown?)?;
        selection.rule.map(|compiled| compiled.rule.limit_path(selected.place))
    }
}

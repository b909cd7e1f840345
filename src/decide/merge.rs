//! Merges the verdicts on descriptors into one answer: statuses, the overall code, headers and body.
//!
//! A limit in shadow mode never rejects a request. Quotas reject it only if all of them are exceeded. Any other
//! exceeded limit rejects it. A rejection by counters takes precedence over a failure under the policy `error`, and
//! that over the other failure policies.

use std::borrow::Cow;

use smallvec::SmallVec;

use super::error::DecideError;
use super::metadata;
use super::outcome::DescriptorOutcome;
use super::selection::{SelectedRequest, Selection};
use super::verdict::Verdict;
use crate::decision::{Decision, Header};
use crate::settings::decisions::DecisionSettings;

/// Merges the outcomes of the charges.
pub(super) fn merge<'r>(
    behaviour: &'r DecisionSettings,
    selected: SelectedRequest<'_, 'r, '_>,
    outcomes: &[DescriptorOutcome],
) -> Result<Decision<'r>, DecideError> {
    let SelectedRequest { request, selections } = selected;
    let verdicts: SmallVec<[Verdict<'r>; 2]> =
        selections.iter().zip(outcomes).map(|(selection, outcome)| Verdict::of(selection, outcome)).collect();
    let is_over = |verdict: &Verdict<'_>| verdict.status.over_limit;
    let is_over_by_counters = |verdict: &Verdict<'_>| is_over(verdict) && !verdict.by_policy;
    let may_reject = !behaviour.shadow_mode;
    let failed = may_reject && verdicts.iter().any(|verdict| verdict.failed);
    if failed && !is_rejected(behaviour, selections, &verdicts, is_over_by_counters) {
        return Err(DecideError::Store);
    }
    let rejected = is_rejected(behaviour, selections, &verdicts, is_over);
    let over_limit = may_reject && rejected;
    // Delay only admitted responses; SHADOW_MODE must not add latency.
    let may_delay = !over_limit && !behaviour.shadow_mode;
    let mut headers = limit_headers(behaviour, &verdicts);
    let mut body = None;
    if over_limit {
        headers.extend(retry_after_header(behaviour, &verdicts));
        let rejection = selections
            .iter()
            .zip(&verdicts)
            .filter(|(_, verdict)| verdict.status.over_limit)
            .find_map(|(selection, _)| selection.over_limit_body.filter(|rejection| rejection.body.is_some()));
        body = rejection.and_then(|rejection| rejection.body.as_deref());
        let content_type = rejection.and_then(|rejection| rejection.content_type.as_deref());
        headers.extend(content_type.map(|value| Header { name: "content-type", value: Cow::Borrowed(value) }));
    }
    Ok(Decision {
        over_limit,
        shadowed: rejected && !may_reject,
        headers,
        body,
        metadata: metadata::of(behaviour, request, selections, &verdicts),
        delay_us: verdicts.iter().map(|verdict| verdict.delay_us).max().filter(|_| may_delay).unwrap_or(0),
        statuses: verdicts.into_iter().map(|verdict| verdict.status).collect(),
    })
}

/// Tells whether the request is rejected, SHADOW_MODE aside: by any exceeded limit that is not a quota, or by quotas if
/// there are any and all are exceeded. Under QUOTA_MODE all descriptors are quotas, those without a rule too.
fn is_rejected(
    behaviour: &DecisionSettings,
    selections: &[Selection<'_>],
    verdicts: &[Verdict<'_>],
    is_over: impl Fn(&Verdict<'_>) -> bool,
) -> bool {
    let (mut quotas, mut exceeded_quotas) = (0, 0);
    for (selection, verdict) in selections.iter().zip(verdicts) {
        if selection.unlimited {
            continue;
        }
        let over = is_over(verdict);
        if behaviour.quota_mode || verdict.quota {
            quotas += 1;
            exceeded_quotas += usize::from(over);
        } else if over {
            return true;
        }
    }
    quotas > 0 && quotas == exceeded_quotas
}

/// `RateLimit-*` headers of the last exceeded limit that is not a quota, else of the first with the least remaining.
fn limit_headers<'r>(behaviour: &'r DecisionSettings, verdicts: &[Verdict<'r>]) -> SmallVec<[Header<'r>; 4]> {
    let Some(names) = &behaviour.limit_headers else { return SmallVec::new() };
    let mut least = (u32::MAX, None);
    for verdict in verdicts {
        let Some(limit) = verdict.status.current_limit else { continue };
        let is_exceeded = verdict.status.over_limit && !(behaviour.quota_mode || verdict.quota);
        if is_exceeded || verdict.status.remaining < least.0 {
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

/// `Retry-After` header: the longest wait of the rejections, in seconds. `None` if one of them is permanent.
fn retry_after_header<'r>(behaviour: &'r DecisionSettings, verdicts: &[Verdict<'r>]) -> Option<Header<'r>> {
    let name = behaviour.retry_after_header.as_deref()?;
    let mut rejected = verdicts.iter().filter(|verdict| verdict.status.over_limit);
    if rejected.clone().any(|verdict| verdict.permanent) {
        return None;
    }
    let seconds = rejected.try_fold(0, |longest, verdict| verdict.status.until_reset_s.map(|s| s.max(longest)))?;
    Some(Header { name, value: Cow::Owned(seconds.to_string()) })
}

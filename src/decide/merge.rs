//! Verdicts merge into one answer: statuses, the overall code, headers and body.
//!
//! A trial (`shadow_mode`) never refuses; quotas refuse only all together; any other refused limit refuses the request.
//! A real refusal goes before a failed charge that may not be answered, and that before what other policies say.

use std::borrow::Cow;

use smallvec::SmallVec;

use super::metadata;
use super::selection::Selection;
use super::verdict::Verdict;
use super::{DecideError, DescriptorOutcome};
use crate::decision::{Decision, Header};
use crate::request::Request;
use crate::settings::decisions::DecisionSettings;

/// Merges what came of the charges.
pub(super) fn merge<'r>(
    behaviour: &'r DecisionSettings,
    request: &Request<'_>,
    selections: &[Selection<'r>],
    outcomes: &[DescriptorOutcome],
) -> Result<Decision<'r>, DecideError> {
    let verdicts: SmallVec<[Verdict<'r>; 2]> =
        selections.iter().zip(outcomes).map(|(selection, outcome)| Verdict::of(selection, outcome)).collect();
    let is_over = |verdict: &Verdict<'_>| verdict.status.over_limit;
    let is_really_over = |verdict: &Verdict<'_>| is_over(verdict) && !verdict.by_policy;
    let may_refuse = !behaviour.shadow_mode;
    let failed = may_refuse && verdicts.iter().any(|verdict| verdict.failed);
    if failed && !is_refused(behaviour, selections, &verdicts, is_really_over) {
        return Err(DecideError::Store);
    }
    let refused = is_refused(behaviour, selections, &verdicts, is_over);
    let over_limit = may_refuse && refused;
    // A refusal is never held, and a trial must not be felt.
    let is_held = !over_limit && !behaviour.shadow_mode;
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
        shadowed: refused && !may_refuse,
        headers,
        body,
        metadata: metadata::of(behaviour, request, selections, &verdicts),
        delay_us: verdicts.iter().map(|verdict| verdict.delay_us).max().filter(|_| is_held).unwrap_or(0),
        statuses: verdicts.into_iter().map(|verdict| verdict.status).collect(),
    })
}

/// Whether the request is refused, trials of the whole process aside: any limit that is no quota refuses it, and quotas
/// do if there are any and all refuse. Under QUOTA_MODE all are quotas, those that nothing matched too.
fn is_refused(
    behaviour: &DecisionSettings,
    selections: &[Selection<'_>],
    verdicts: &[Verdict<'_>],
    is_over: impl Fn(&Verdict<'_>) -> bool,
) -> bool {
    let (mut quotas, mut refused_quotas) = (0, 0);
    for (selection, verdict) in selections.iter().zip(verdicts) {
        if selection.unlimited {
            continue;
        }
        let over = is_over(verdict);
        if behaviour.quota_mode || verdict.quota {
            quotas += 1;
            refused_quotas += usize::from(over);
        } else if over {
            return true;
        }
    }
    quotas > 0 && quotas == refused_quotas
}

/// `RateLimit-*` headers, of the last refused limit that is no quota, else of the first with the least remaining.
fn limit_headers<'r>(behaviour: &'r DecisionSettings, verdicts: &[Verdict<'r>]) -> SmallVec<[Header<'r>; 4]> {
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

/// When to come back, in seconds: what the longest of the refusals says. Nothing if one of them is for good.
fn retry_after_header<'r>(behaviour: &'r DecisionSettings, verdicts: &[Verdict<'r>]) -> Option<Header<'r>> {
    let name = behaviour.retry_after_header.as_deref()?;
    let mut refused = verdicts.iter().filter(|verdict| verdict.status.over_limit);
    if refused.clone().any(|verdict| verdict.permanent) {
        return None;
    }
    let seconds = refused.try_fold(0, |longest, verdict| verdict.status.until_reset_s.map(|s| s.max(longest)))?;
    Some(Header { name, value: Cow::Owned(seconds.to_string()) })
}

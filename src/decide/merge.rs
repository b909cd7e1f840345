//! Merges the outcomes of all descriptors into one decision: statuses, the overall code, headers and body.
//!
//! [`answer`] tells if the request is rejected, and which verdict wins. Body and retry time are those of the
//! descriptors that reject it. A request with blocked entries is rejected whatever its refunds come to.

use std::borrow::Cow;
use std::sync::Arc;

use smallvec::SmallVec;

use super::answer::{Answer, combine_verdicts, quotas_reject, retry_after_us};
use super::blocks::{Block, BlockMatch};
use super::metadata;
use super::outcome::{DescriptorOutcome, LimitVerdicts};
use super::request_headers::{append_descriptor_headers, build_exceeded_limits_header};
use super::selection::{RequestWithSelections, Selection};
use super::status::DescriptorStatus;
use crate::base::clock::Time;
use crate::decide::decision::{DecideError, Decision, Header, ReportedStatus};
use crate::rules::rule::OverLimitBody;
use crate::settings::decisions::{DecisionSettings, LimitHeaderNames};

/// Merges the outcomes of all descriptors into the decision on the request.
///
/// It is filled where it stands: each copy would cost a hundredth of a decision from memory.
pub(super) fn merge_outcomes<'r>(
    behaviour: &'r DecisionSettings,
    selected: RequestWithSelections<'_, 'r, '_>,
    outcomes: &[DescriptorOutcome],
    decision: &mut Decision<'r>,
) -> Result<(), DecideError> {
    let RequestWithSelections { request, selections } = selected;
    let mut statuses: SmallVec<[DescriptorStatus<'r>; 2]> = SmallVec::new();
    let decided = selections.iter().zip(outcomes);
    statuses.extend(decided.map(|(selection, outcome)| DescriptorStatus::from_outcome(behaviour, selection, outcome)));
    let rejected = match combine_verdicts(&statuses.iter().map(|status| status.limit_verdicts), !behaviour.shadow_mode)
    {
        Answer::Failed => return Err(DecideError::Store),
        answer => answer == Answer::Rejected,
    };
    let over_limit = rejected && !behaviour.shadow_mode;
    // Delay only admitted responses; SHADOW_MODE must not add latency.
    let may_delay = !rejected && !behaviour.shadow_mode;
    (decision.over_limit, decision.shadowed) = (over_limit, rejected && !over_limit);
    append_descriptor_headers(&mut decision.headers, behaviour, &statuses);
    append_limit_headers(&mut decision.headers, behaviour.limit_headers.as_ref(), &statuses);
    append_limit_headers(&mut decision.request_headers, behaviour.request_limit_headers.as_ref(), &statuses);
    if over_limit {
        decision.headers.extend(build_retry_after_header(behaviour, &statuses));
        let rejection = select_rejection_body(selections, &statuses);
        decision.body = rejection.and_then(|rejection| rejection.body.as_deref());
        let content_type = rejection.and_then(|rejection| rejection.content_type.as_deref());
        let content_type = content_type.map(|text| Header { name: "content-type", value: Cow::Borrowed(text) });
        decision.headers.extend(content_type);
    } else {
        decision.request_headers.extend(build_exceeded_limits_header(behaviour, selections, outcomes));
    }
    decision.metadata = metadata::build_metadata(behaviour, request, selections, &statuses);
    decision.delay_us = statuses.iter().map(|status| status.delay_us).max().filter(|_| may_delay).unwrap_or(0);
    decision.statuses.extend(statuses.into_iter().map(|status| status.shown));
    Ok(())
}

/// Builds the rejection of a request with blocked entries; `outcomes` are those of its refunds, or none.
pub(super) fn build_block_rejection<'r>(
    behaviour: &'r DecisionSettings,
    now: Time,
    selected: RequestWithSelections<'_, 'r, '_>,
    outcomes: &[DescriptorOutcome],
    blocked: &BlockMatch,
) -> Decision<'r> {
    let wait_s = |until: Time| until.since_us(now).div_ceil(1_000_000).max(1);
    let status = |(index, block): (usize, &Option<Arc<Block>>)| match (block, selected.selections.get(index)) {
        (Some(block), _) => {
            ReportedStatus { over_limit: true, until_reset_s: Some(wait_s(block.until)), ..ReportedStatus::default() }
        }
        (None, Some(selection)) if index < outcomes.len() => {
            DescriptorStatus::from_outcome(behaviour, selection, &outcomes[index]).shown
        }
        (None, _) => ReportedStatus::default(),
    };
    let retry_after = behaviour.retry_after_header.as_deref();
    let retry_after = retry_after.map(|name| Header { name, value: Cow::Owned(wait_s(blocked.until).to_string()) });
    Decision {
        over_limit: true,
        shadowed: false,
        statuses: blocked.descriptors.iter().enumerate().map(status).collect(),
        headers: retry_after.into_iter().collect(),
        request_headers: Vec::new(),
        body: None,
        metadata: metadata::build_block_metadata(behaviour, selected.request, blocked),
        delay_us: 0,
    }
}

/// First body of the descriptors that reject the request. Exceeded quotas do only if all are.
fn select_rejection_body<'r>(
    selections: &[Selection<'r>],
    statuses: &[DescriptorStatus<'_>],
) -> Option<&'r OverLimitBody> {
    let quotas_reject = quotas_reject(statuses.iter().map(|status| status.limit_verdicts));
    let rejects = |limit_verdicts: &LimitVerdicts| {
        limit_verdicts.hard.rejects() || quotas_reject && limit_verdicts.quotas.is_some()
    };
    let rejecting = selections.iter().zip(statuses).filter(|(_, status)| rejects(&status.limit_verdicts));
    let bodies = rejecting.filter_map(|(selection, _)| selection.over_limit_body);
    bodies.into_iter().find(|rejection| rejection.body.is_some())
}

/// Appends the `RateLimit-*` headers of the last exceeded limit that is not a quota, else of the first with the least
/// remaining.
fn append_limit_headers<'r>(
    headers: &mut impl Extend<Header<'r>>,
    names: Option<&'r LimitHeaderNames>,
    statuses: &[DescriptorStatus<'r>],
) {
    let Some(names) = names else { return };
    let mut least = (u32::MAX, None);
    for status in statuses {
        let Some(limit) = status.shown.current_limit else { continue };
        let is_exceeded = status.limit_verdicts.hard.rejects();
        if is_exceeded || status.shown.remaining < least.0 {
            least = (status.shown.remaining, Some((limit, &status.shown)));
        }
    }
    let (_, Some((limit, status))) = least else { return };
    let header = |name: &'r str, value: u64| Header { name, value: Cow::Owned(value.to_string()) };
    headers.extend([
        header(&names.limit, u64::from(limit.requests_per_unit)),
        header(&names.remaining, u64::from(status.remaining)),
        header(&names.reset, status.until_reset_s.unwrap_or(0)),
    ]);
}

/// `Retry-After` header: seconds until the same request could pass, rounded up, at least 1. `None` if it never will.
fn build_retry_after_header<'r>(
    behaviour: &'r DecisionSettings,
    statuses: &[DescriptorStatus<'r>],
) -> Option<Header<'r>> {
    let name = behaviour.retry_after_header.as_deref()?;
    let wait_us = retry_after_us(statuses.iter().map(|status| status.limit_verdicts))?;
    Some(Header { name, value: Cow::Owned(wait_us.div_ceil(1_000_000).max(1).to_string()) })
}

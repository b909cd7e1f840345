//! Merges the outcomes of all descriptors into one decision: statuses, the overall code, headers and body.
//!
//! `outcome` tells if the request is rejected, and which verdict wins. Body and retry time are those
//! of the descriptors that reject it. A request with blocked entries is rejected whatever its refunds come to.
//!
//! Headers for the upstream are off by default. The upstream learns by name which limits a request exceeded although it
//! passes: limits in shadow mode, quotas while others have room, and any limit under SHADOW_MODE. It may then answer with
//! less instead of failing later. Names come from rules, so they are made safe for a header, and their number and length
//! are bounded.
//!
//! Decides: which limit and headers a response shows.
//! Decides: headers for the upstream and the client, and how many limits they name (`MAX_LISTED_EXCEEDED_LIMITS`).
//! Decides: what SHADOW_MODE changes in an answer (`;shadow`).
//! Decides: Retry-After: rounded to whole seconds, at least 1, none, after a block, with `jitter`.
//! Decides: the body of a rejection (`over_limit_body`) if several reject; the delay of a request with several.
//! Decides: characters of a limit's name in a header (`encode_limit_name`); the answer of a block.
//! Decides: which of several descriptors fills `RateLimit-*` and the other headers.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::sync::Arc;

use smallvec::SmallVec;

use super::blocks::{Block, BlockMatch};
use super::charged_request::ChargedRequest;
use super::decision::{DecideError, Decision, Header, ReportedStatus};
use super::metadata;
use super::outcome::{Answer, DescriptorOutcome, combine_verdicts, quotas_reject, retry_after_us};
use super::policy_headers::{ResponseKind, policy_headers};
use super::selected_request::SelectedRequest;
use super::selection::{SelectedLimit, Selection};
use super::status::DescriptorStatus;
use crate::base::clock::Time;
use crate::base::random::random_u64;
use crate::base::text::truncate_to_bytes;
use crate::rules::rule::rejection_body::BodyValue;
use crate::settings::decisions::{DecisionSettings, LimitHeaderNames};

/// Merges the outcomes of all descriptors into the decision on the request.
///
/// It is filled where it stands: each copy would cost a hundredth of a decision from memory.
pub(super) fn merge_outcomes<'r>(
    charged: &ChargedRequest<'_, 'r, '_>,
    decision: &mut Decision<'r>,
) -> Result<(), DecideError> {
    let ChargedRequest { selected, outcomes, statuses, .. } = *charged;
    let SelectedRequest { decider, selections, .. } = *selected;
    let behaviour = &decider.behaviour;
    if let Some(blocked) = selected.blocked {
        reject_blocked_request(charged, blocked, decision);
        return Ok(());
    }
    let rejected = match combine_verdicts(&charged.limit_verdicts(), !behaviour.shadow_mode) {
        Answer::Failed => return Err(DecideError::Store),
        answer => answer == Answer::Rejected,
    };
    let over_limit = rejected && !behaviour.shadow_mode;
    // Delay only admitted responses; SHADOW_MODE must not add latency.
    let may_delay = !rejected && !behaviour.shadow_mode;
    (decision.over_limit, decision.shadowed) = (over_limit, rejected && !over_limit);
    append_limit_headers(&mut decision.headers, behaviour.limit_headers.as_ref(), statuses);
    append_limit_headers(&mut decision.request_headers, behaviour.request_limit_headers.as_ref(), statuses);
    let kind = if over_limit {
        ResponseKind::Rejection { wait_s: add_rejection_response(charged, decision) }
    } else {
        decision.request_headers.extend(build_exceeded_limits_header(behaviour, selections, outcomes));
        ResponseKind::Admission
    };
    if behaviour.policy_headers && !behaviour.shadow_mode {
        decision.headers.extend(policy_headers(charged, kind));
    }
    decision.metadata = metadata::build_metadata(charged);
    decision.delay_us = statuses.iter().map(|status| status.delay_us).max().filter(|_| may_delay).unwrap_or(0);
    decision.statuses.reserve_exact(statuses.len());
    decision.statuses.extend(statuses.iter().map(|status| status.shown.clone()));
    Ok(())
}

/// Rejects a request with blocked entries, of which only the refunds were charged.
#[cold]
fn reject_blocked_request<'r>(charged: &ChargedRequest<'_, 'r, '_>, blocked: &BlockMatch, decision: &mut Decision<'r>) {
    let SelectedRequest { decider, context, request, .. } = *charged.selected;
    let wait_s = |until: Time| until.since_us(context.store.now).div_ceil(1_000_000).max(1);
    let shown = |(status, block): (&DescriptorStatus<'r>, &Option<Arc<Block>>)| match block {
        Some(block) => {
            ReportedStatus { over_limit: true, until_reset_s: Some(wait_s(block.until)), ..ReportedStatus::default() }
        }
        None => status.shown.clone(),
    };
    let retry_after = decider.behaviour.retry_after_header.as_deref();
    decision.over_limit = true;
    decision.statuses.extend(charged.statuses.iter().zip(&blocked.descriptors).map(shown));
    decision
        .headers
        .extend(retry_after.map(|name| Header { name, value: Cow::Owned(wait_s(blocked.until).to_string()) }));
    decision.metadata = metadata::build_block_metadata(&decider.behaviour, request, blocked);
}

/// Adds what the rules that reject the request tell the client: the first body, the first headers, and the time to wait
/// with the largest jitter. Rules with quotas count only if all quotas of the request are exceeded. Returns the seconds
/// to wait; `None` if the same request will never pass, or if nothing tells them.
fn add_rejection_response<'r>(charged: &ChargedRequest<'_, 'r, '_>, decision: &mut Decision<'r>) -> Option<u64> {
    let SelectedRequest { decider, selections, .. } = *charged.selected;
    let (mut with_body, mut headers, mut jitter) = (None, None, 0);
    // Most rules tell nothing of their own.
    if selections.iter().any(|selection| selection.rejection.is_some()) {
        let quotas_reject = quotas_reject(charged.limit_verdicts());
        for (index, (selection, verdicts)) in selections.iter().zip(charged.limit_verdicts()).enumerate() {
            let rejects = verdicts.hard.rejects() || quotas_reject && verdicts.quotas.is_some();
            let Some(response) = selection.rejection.filter(|_| rejects) else { continue };
            with_body = with_body.or(response.body.as_ref().map(|body| (index, response, body)));
            headers = headers.or(response.headers.as_deref());
            jitter = jitter.max(response.jitter_milli_percent.unwrap_or(0));
        }
    }
    let retry_after = decider.behaviour.retry_after_header.as_deref();
    let tells_wait = retry_after.is_some() || with_body.is_some() || decider.behaviour.policy_headers;
    let wait_s = if tells_wait { draw_wait_s(charged, jitter) } else { None };
    decision.headers.extend(retry_after.zip(wait_s).map(|(name, wait_s)| Header::new(name, wait_s.to_string())));
    if let Some((index, response, body)) = with_body {
        let content_type = response.content_type.as_deref();
        decision.headers.extend(content_type.map(|text| Header::new("content-type", text)));
        decision.body = Some(body.fill(content_type, |value| format_body_value(charged, index, wait_s, value)));
    }
    let headers = headers.into_iter().flatten();
    decision.headers.extend(headers.map(|(name, value)| Header::new(name, value.as_str())));
    wait_s
}

/// Value in the body of a rejection by the descriptor at `index`. A request that can never pass waits for a day: the rules
/// may be others by then.
#[cold]
fn format_body_value(
    charged: &ChargedRequest<'_, '_, '_>,
    index: usize,
    wait_s: Option<u64>,
    value: BodyValue,
) -> String {
    let (selection, status) = (&charged.selected.selections[index], &charged.statuses[index]);
    let limit = status.shown_limit.map_or(selection.limits.first(), |shown| selection.limits.get(shown));
    let wait_s = wait_s.unwrap_or(86_400);
    match value {
        BodyValue::LimitName => {
            let name = limit.map_or(Cow::Borrowed(""), |selected| selection.limit_name(selected));
            let cut = truncate_to_bytes(&name, MAX_LIMIT_NAME_BYTES);
            if cut.len() < name.len() { format!("{cut}...") } else { cut.to_owned() }
        }
        BodyValue::Limit => limit.map_or(0, |selected| selected.limit.requests_per_unit()).to_string(),
        BodyValue::Remaining => status.shown.remaining.to_string(),
        BodyValue::RetryAfter => wait_s.to_string(),
        BodyValue::RetryAt => {
            let now_s = charged.selected.context.store.now.as_micros().div_ceil(1_000_000);
            Time::from_secs(now_s.saturating_add(wait_s).min(MAX_SHOWN_TIME_S)).to_string()
        }
    }
}

/// Latest time that a body shows: the end of the year 9999.
const MAX_SHOWN_TIME_S: u64 = 253_402_300_799;

/// Appends the `RateLimit-*` headers of the last exceeded limit that is not a quota, else of the first with the least
/// remaining.
fn append_limit_headers<'r>(
    headers: &mut impl Extend<Header<'r>>,
    names: Option<&'r LimitHeaderNames>,
    statuses: &[DescriptorStatus<'r>],
) {
    let Some(names) = names else { return };
    let mut least = (u64::MAX, None);
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
        header(&names.limit, limit.requests_per_unit),
        header(&names.remaining, status.remaining),
        header(&names.reset, status.until_reset_s.unwrap_or(0)),
    ]);
}

/// Seconds until the same request could pass, rounded up, at least 1, and a random number of seconds up to the jitter;
/// `None` if it will never pass.
fn draw_wait_s(charged: &ChargedRequest<'_, '_, '_>, jitter_milli_percent: u32) -> Option<u64> {
    let wait_s = retry_after_us(charged.limit_verdicts())?.div_ceil(1_000_000).max(1);
    let added_s = if jitter_milli_percent > 0 { jitter_s(wait_s, jitter_milli_percent, random_u64()) } else { 0 };
    Some(wait_s.saturating_add(added_s))
}

/// Picks a whole number of seconds from 0 to `jitter_milli_percent` of a wait, rounded up, by 64 random bits. All are
/// equally likely, except the last one if that share of the wait is not whole.
pub fn jitter_s(wait_s: u64, jitter_milli_percent: u32, random: u64) -> u64 {
    const WHOLE: u128 = 100_000;
    // A wait is below 2^45 s: microseconds in 64 bits.
    let choices = u128::from(wait_s) * u128::from(jitter_milli_percent) + WHOLE;
    let chosen = choices.saturating_mul(u128::from(random)) >> 64;
    u64::try_from(chosen / WHOLE).unwrap_or(u64::MAX)
}

/// Maximum number of limits that the header of exceeded limits names; `...` stands for more.
const MAX_LISTED_EXCEEDED_LIMITS: usize = 16;

/// Maximum length of a limit's name in a header or a body, in bytes; a longer one is cut, and ends in `...`.
const MAX_LIMIT_NAME_BYTES: usize = 128;

/// Returns the header with the names of exceeded limits, for a request that passes; `None` if no limit is exceeded.
///
/// `outcomes` has an outcome for each selection.
fn build_exceeded_limits_header<'r>(
    behaviour: &'r DecisionSettings,
    selections: &[Selection<'r>],
    outcomes: &[DescriptorOutcome],
) -> Option<Header<'r>> {
    let name = behaviour.exceeded_limits_header.as_deref()?;
    let mut named: SmallVec<[String; 4]> = SmallVec::new();
    for (selection, outcome) in selections.iter().zip(outcomes) {
        let limits = selection.limits.iter().enumerate();
        for (_, selected) in limits.filter(|(index, _)| outcome.limit_rejects(*index)) {
            let limit = format_exceeded_limit(behaviour, selection, selected);
            if named.contains(&limit) {
                continue;
            }
            if named.len() == MAX_LISTED_EXCEEDED_LIMITS {
                named.push("...".to_owned());
                return Some(Header { name, value: Cow::Owned(named.join(", ")) });
            }
            named.push(limit);
        }
    }
    (!named.is_empty()).then(|| Header { name, value: Cow::Owned(named.join(", ")) })
}

/// Returns the name of a limit, else its path as in `/rlconfig`, and why the request passes in spite of it.
fn format_exceeded_limit<'r>(
    behaviour: &DecisionSettings,
    selection: &Selection<'r>,
    selected: &SelectedLimit<'r>,
) -> String {
    let mut name = encode_limit_name(&selection.limit_name(selected));
    if selected.shadow || behaviour.shadow_mode {
        name.push_str(";shadow");
    } else if selected.quota {
        name.push_str(";quota");
    }
    name
}

/// Encodes a name as visible ASCII without the separators of the header; other bytes become `%XX`.
pub fn encode_limit_name(name: &str) -> String {
    let mut encoded = String::with_capacity(name.len().min(MAX_LIMIT_NAME_BYTES));
    for byte in name.bytes() {
        let is_plain = byte.is_ascii_graphic() && !matches!(byte, b',' | b';' | b'%' | b'"' | b'\\');
        if encoded.len() + if is_plain { 1 } else { 3 } > MAX_LIMIT_NAME_BYTES {
            return encoded + "...";
        }
        match is_plain {
            true => encoded.push(char::from(byte)),
            // Writing to a String does not fail.
            false => drop(write!(encoded, "%{byte:02X}")),
        }
    }
    encoded
}

//! The response headers `RateLimit-Policy` and `RateLimit`, structured fields of
//! draft-ietf-httpapi-ratelimit-headers-11: `"burst";q=100;w=60` and `"burst";r=50;t=30`.
//!
//! `RateLimit-Policy` names all limits of the request, `RateLimit` says how many hits are left. A rejection says so only
//! of the limits that reject, because its Retry-After must not be earlier than the end of a window (section 6).
//! No partition key (`pk`) is sent: it would identify the client.
//!
//! Decides: which limits the two headers name, and how many (`MAX_POLICIES`): none in shadow mode, no name twice.
//! Decides: quota, unit and window of a limit in `RateLimit-Policy`, hits left and seconds in `RateLimit`.

use std::borrow::Cow;
use std::fmt::Write as _;

use smallvec::SmallVec;

use super::charged_request::ChargedRequest;
use super::decision::Header;
use super::outcome::quotas_reject;
use super::status::until_reset_us;
use crate::limit::Limit;
use crate::limit::charge::ChargeResult;
use crate::limit::period::Unit;

/// Maximum number of limits that each header names. Those that reject come first if there are more.
const MAX_POLICIES: usize = 16;

/// Length of a limit's name in bytes from which it is cut, and ends in `...`.
const MAX_NAME_BYTES: usize = 128;

/// Whether the request is rejected, for its headers.
#[derive(Clone, Copy, Debug)]
pub(super) enum ResponseKind {
    /// The request passes.
    Admission,
    /// It is rejected; value of Retry-After in seconds, `None` if it is not known.
    Rejection { wait_s: Option<u64> },
}

/// A limit of the request, as the headers show it.
#[derive(Debug)]
struct Policy<'a> {
    name: Cow<'a, str>,
    limit: &'a Limit,
    /// Result of the charge; `None` if the store failed.
    result: Option<&'a ChargeResult>,
    /// The limit rejects the request.
    rejects: bool,
}

impl Policy<'_> {
    /// Hits that are left, 0 after a rejection; the most if they are not known.
    fn remaining(&self) -> u64 {
        self.result.map_or(u64::MAX, |result| if result.admitted { result.remaining } else { 0 })
    }

    fn write_quota(&self, text: &mut String) {
        write_policy_name(&self.name, text);
        // Writing to a String does not fail.
        let _ = write!(text, ";q={}", self.limit.requests_per_unit());
        // Months and years of a calendar have no one length.
        let calendar_unit = self.limit.calendar_windows().map(|_| self.limit.period().unit());
        let has_length =
            !self.limit.follows_calendar_months() && !matches!(calendar_unit, Some(Unit::Month | Unit::Year));
        if self.limit.is_concurrent() {
            text.push_str(";qu=\"concurrent-requests\"");
        } else if has_length {
            let _ = write!(text, ";w={}", self.limit.period().micros().div_ceil(1_000_000));
        }
    }

    fn write_remaining(&self, result: &ChargeResult, wait_s: Option<u64>, text: &mut String) {
        write_policy_name(&self.name, text);
        let _ = write!(text, ";r={}", self.remaining());
        if !self.limit.is_concurrent() {
            let until_reset_s = until_reset_us(self.limit, result).div_ceil(1_000_000);
            let _ = write!(text, ";t={}", wait_s.map_or(until_reset_s, |wait_s| until_reset_s.min(wait_s)));
        }
    }
}

/// Headers with the limits of the request; none if it has no limit outside shadow mode.
#[cold]
pub(super) fn policy_headers<'r>(
    charged: &ChargedRequest<'_, 'r, '_>,
    kind: ResponseKind,
) -> impl Iterator<Item = Header<'r>> + use<'r> {
    let policies = collect_policies(charged, kind);
    let is_shown = |policy: &&Policy<'_>| policy.rejects || matches!(kind, ResponseKind::Admission);
    let wait_s = match kind {
        ResponseKind::Admission => None,
        ResponseKind::Rejection { wait_s } => wait_s,
    };
    let (mut quotas, mut remaining) = (String::new(), String::new());
    for policy in &policies {
        separate(&mut quotas);
        policy.write_quota(&mut quotas);
    }
    for policy in policies.iter().filter(is_shown) {
        if let Some(result) = policy.result {
            separate(&mut remaining);
            policy.write_remaining(result, wait_s, &mut remaining);
        }
    }
    let headers = [("RateLimit-Policy", quotas), ("RateLimit", remaining)];
    headers.into_iter().filter(|(_, value)| !value.is_empty()).map(|(name, value)| Header::new(name, value))
}

/// Limits of the request that are not in shadow mode, in its order. Of several with one name the one with the fewest
/// hits left.
fn collect_policies<'a>(charged: &'a ChargedRequest<'_, '_, '_>, kind: ResponseKind) -> SmallVec<[Policy<'a>; 4]> {
    let is_rejected = matches!(kind, ResponseKind::Rejection { .. });
    let quotas_reject = is_rejected && quotas_reject(charged.limit_verdicts());
    let mut policies: SmallVec<[Policy<'a>; 4]> = SmallVec::new();
    for (selection, outcome) in charged.selected.selections.iter().zip(charged.outcomes) {
        for (index, selected) in selection.limits.iter().enumerate().filter(|(_, selected)| !selected.shadow) {
            let result = outcome.limit_result(index);
            let is_exceeded = result.is_some_and(|result| !result.admitted);
            let policy = Policy {
                name: selection.limit_name(selected),
                limit: &selected.limit,
                result,
                rejects: is_rejected && is_exceeded && (!selected.quota || quotas_reject),
            };
            match policies.iter_mut().find(|other| other.name == policy.name) {
                Some(other) if (policy.rejects, other.remaining()) > (other.rejects, policy.remaining()) => {
                    *other = policy;
                }
                Some(_) => {}
                None => policies.push(policy),
            }
        }
    }
    if policies.len() > MAX_POLICIES {
        policies.sort_by_key(|policy| !policy.rejects);
        policies.truncate(MAX_POLICIES);
    }
    policies
}

fn separate(list: &mut String) {
    if !list.is_empty() {
        list.push_str(", ");
    }
}

/// Writes a name as a String of RFC 9651, section 3.3.3. Bytes other than printable ASCII become `%XX`.
fn write_policy_name(name: &str, text: &mut String) {
    text.push('"');
    let start = text.len();
    for byte in name.bytes() {
        if text.len() - start >= MAX_NAME_BYTES {
            text.push_str("...");
            break;
        }
        match byte {
            b'"' | b'\\' => text.extend(['\\', char::from(byte)]),
            b' '..=b'~' => text.push(char::from(byte)),
            _ => drop(write!(text, "%{byte:02X}")),
        }
    }
    text.push('"');
}

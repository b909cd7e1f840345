//! Headers of a decision for the upstream, and headers of all descriptors for the client. All are off by default.
//!
//! The upstream learns by name which limits a request exceeded although it passes: limits in shadow mode, quotas while
//! others have room, and any limit under SHADOW_MODE. It may then answer with less instead of failing later. Names come
//! from rules, so they are made safe for a header, and their number and length are bounded.

use std::borrow::Cow;
use std::fmt::Write as _;

use smallvec::SmallVec;

use super::outcome::DescriptorOutcome;
use super::selection::{SelectedLimit, Selection};
use super::status::DescriptorStatus;
use crate::decide::decision::Header;
use crate::limit::period::Unit;
use crate::settings::decisions::DecisionSettings;

/// Maximum number of limits that the header of exceeded limits names; `...` stands for more.
const MAX_LISTED_EXCEEDED_LIMITS: usize = 16;

/// Maximum length of a name in that header, in bytes; a longer one is cut, and ends in `...`.
const MAX_LIMIT_NAME_BYTES: usize = 128;

/// Maximum number of descriptors that have headers of their own: Envoy takes 100 headers of a response by default.
const MAX_DESCRIPTORS_WITH_HEADERS: usize = 32;

/// Name of a limit that came with the request.
const OVERRIDE_LIMIT_NAME: &str = "override";

/// Returns the header with the names of exceeded limits, for a request that passes; `None` if no limit is exceeded.
///
/// `outcomes` has an outcome for each selection.
pub(super) fn build_exceeded_limits_header<'r>(
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
fn format_exceeded_limit(
    behaviour: &DecisionSettings,
    selection: &Selection<'_>,
    selected: &SelectedLimit<'_>,
) -> String {
    let mut name = match (selected.name, selection.rule) {
        ("", Some(compiled)) => encode_limit_name(&compiled.rule.limit_path(selected.index)),
        ("", None) => OVERRIDE_LIMIT_NAME.to_owned(),
        (name, _) => encode_limit_name(name),
    };
    if selected.shadow || behaviour.shadow_mode {
        name.push_str(";shadow");
    } else if selected.quota {
        name.push_str(";quota");
    }
    name
}

/// Encodes a name as visible ASCII without the separators of the header; other bytes become `%XX`.
fn encode_limit_name(name: &str) -> String {
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

/// Appends two headers for each descriptor with a limit: `ratelimit-limit-seconds` and `ratelimit-remaining-seconds`
/// for a limit per second.
pub(super) fn append_descriptor_headers<'r>(
    headers: &mut SmallVec<[Header<'r>; 4]>,
    behaviour: &DecisionSettings,
    statuses: &[DescriptorStatus<'r>],
) {
    if !behaviour.headers_of_all_descriptors {
        return;
    }
    let limited = statuses.iter().filter_map(|status| Some((status.shown.current_limit?, status.shown.remaining)));
    for (limit, remaining) in limited.take(MAX_DESCRIPTORS_WITH_HEADERS) {
        let (limit_name, remaining_name) = limit_header_names(limit.period.unit());
        headers.push(Header { name: limit_name, value: Cow::Owned(limit.requests_per_unit.to_string()) });
        headers.push(Header { name: remaining_name, value: Cow::Owned(remaining.to_string()) });
    }
}

/// Names of the headers of a limit and its remaining hits, as proposed for envoyproxy/ratelimit (PR 1190).
const fn limit_header_names(unit: Unit) -> (&'static str, &'static str) {
    match unit {
        Unit::Second => ("ratelimit-limit-seconds", "ratelimit-remaining-seconds"),
        Unit::Minute => ("ratelimit-limit-minutes", "ratelimit-remaining-minutes"),
        Unit::Hour => ("ratelimit-limit-hours", "ratelimit-remaining-hours"),
        Unit::Day => ("ratelimit-limit-days", "ratelimit-remaining-days"),
        Unit::Week => ("ratelimit-limit-weeks", "ratelimit-remaining-weeks"),
        Unit::Month => ("ratelimit-limit-months", "ratelimit-remaining-months"),
        Unit::Year => ("ratelimit-limit-years", "ratelimit-remaining-years"),
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_LIMIT_NAME_BYTES, encode_limit_name};

    #[test]
    fn name_is_encoded_for_a_header_and_cut() {
        for (name, encoded) in [
            ("per-key", "per-key"),
            ("shop.user_*", "shop.user_*"),
            ("a, b;c%\r\nx: y", "a%2C%20b%3Bc%25%0D%0Ax:%20y"),
            ("\u{fc}\u{202e}\"\\", "%C3%BC%E2%80%AE%22%5C"),
        ] {
            assert_eq!(encode_limit_name(name), encoded);
        }
        assert_eq!(encode_limit_name(&"x".repeat(128)), "x".repeat(128));
        assert_eq!(encode_limit_name(&"x".repeat(129)), "x".repeat(128) + "...");
        let cut = encode_limit_name(&"\u{fc}".repeat(1000));
        assert!(cut.len() <= MAX_LIMIT_NAME_BYTES + 3 && cut.ends_with("C..."), "{cut}");
    }
}

//! Places of the limits of a list that overflow into each other (`overflow_to`).
//!
//! A limit overflows into the next one of its list: the order of a list is the order in which its limits take hits, and
//! no hits can go in a circle. Modes and times of one limit alone would take it out of the order.
//!
//! Decides: which limit `overflow_to` may name, and where.

use super::limit_defaults::DomainSettings;
use super::memcache;
use crate::limit::overflow::ChainPosition;
use crate::rules::diagnostic::escape_for_message;
use crate::rules::document::RateLimitEntry;
use crate::rules::document::fields::{DocumentReader, FieldPath};
use crate::rules::yaml::Spanned;

/// Returns the place of each limit; reports targets that a limit cannot overflow into.
pub(super) fn resolve_chain_positions(
    reader: &mut DocumentReader<'_>,
    written: &[RateLimitEntry],
    scope: &DomainSettings<'_>,
    field_path: &FieldPath<'_>,
) -> Vec<ChainPosition> {
    let mut places = vec![ChainPosition::NotInChain; written.len()];
    for (index, limit) in written.iter().enumerate() {
        let Some(target) = &limit.overflow_to else { continue };
        let field_path = limit.index.map_or(*field_path, |index| field_path.with_index(index));
        let problem = find_problem(written, index, target);
        if let Some(Problem { message, hint }) = problem {
            reader.report_error(target.at, &field_path.with_key("overflow_to"), message, hint);
            continue;
        }
        if scope.options.memcache {
            memcache::report_unsupported_overflow(reader, target.at, &field_path);
        }
        if places[index] == ChainPosition::NotInChain {
            places[index] = ChainPosition::First;
        }
        places[index + 1] = ChainPosition::After;
    }
    places
}

/// Problem of a key, and what to do.
struct Problem {
    message: String,
    hint: String,
}

fn find_problem(written: &[RateLimitEntry], index: usize, target: &Spanned<String>) -> Option<Problem> {
    let name = escape_for_message(&target.value);
    let problem = |message: String, hint: String| Some(Problem { message, hint });
    let Some(at) = written.iter().position(|limit| !target.value.is_empty() && limit.name.value == target.value) else {
        let message = format!("`overflow_to` names '{name}', and no limit of this list has that name");
        let hint = "name the next limit of the list: hits do not overflow into the limits of another descriptor";
        return problem(message, hint.to_owned());
    };
    if at == index {
        let message = format!("'{name}' overflows into itself");
        return problem(message, "name the next limit of the list, or remove `overflow_to`".to_owned());
    }
    if at != index + 1 {
        let message = format!("'{name}' is not the next limit of the list");
        return problem(message, format!("write '{name}' directly below: limits take hits in the order of the list"));
    }
    let keys = |limit: &RateLimitEntry| {
        let modes = [("shadow_mode", limit.shadow_mode), ("quota_mode", limit.quota_mode)];
        let times = ("active", limit.active.is_some());
        modes.into_iter().chain([times]).find(|(_, is_set)| *is_set).map(|(key, _)| key)
    };
    let key = keys(&written[index]).or_else(|| keys(&written[at]))?;
    let hint = match key {
        "active" => "remove `active`: both limits must exist at the same times".to_owned(),
        _ => format!("write `{key}` beside `rate_limit`, for all limits of the list"),
    };
    problem(format!("`{key}` of a limit that overflows into another, or takes the overflow of one"), hint)
}

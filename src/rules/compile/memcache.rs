//! Checks of rules whose counters are in memcache.
//!
//! Memcache adds to a number and reads the sum, whatever the sum is. That counts a fixed window with its rejected hits,
//! and nothing else.
//!
//! Decides: which rules memcached cannot count, and what the error says.

use crate::limit::LimitSpec;
use crate::limit::algorithm::Algorithm;
use crate::rules::document::defaults::DefaultableKeys;
use crate::rules::document::fields::{DocumentReader, FieldPath};
use crate::rules::key_table::{ConsistencyWord, ScopeWord};
use crate::rules::yaml::Position;

/// Reports the keys of a limit, or of `defaults`, that need more than an increment.
pub(super) fn report_unsupported_keys(
    reader: &mut DocumentReader<'_>,
    keys: &DefaultableKeys,
    field_path: &FieldPath<'_>,
) {
    if let Some(window) = keys.window {
        let message = "`window` is not possible with BACKEND_TYPE=memcache, which cannot keep the end of a window";
        reader.report_error(window.at, &field_path.with_key("window"), message, "use Redis, or remove it");
    }
    let mut check = |at: Option<Position>, key: &str, value: &str| {
        let Some(at) = at else { return };
        report_unsupported(reader, at, &field_path.with_key(key), &format!("`{key}: {value}`"));
    };
    let algorithm = keys.algorithm.filter(|algorithm| algorithm.value != Algorithm::FixedWindow);
    check(algorithm.map(|spanned| spanned.at), "algorithm", algorithm.map_or("", |spanned| spanned.value.name()));
    let uncounted = keys.count_rejected.filter(|counted| !counted.value);
    check(uncounted.map(|spanned| spanned.at), "count_rejected", "false");
    check(keys.eventual_consistency_position(), "consistency", "eventual");
    check(keys.global_scope_position(), "scope", "global");
}

/// Reports a `ban`, which memcached cannot keep.
pub(super) fn report_unsupported_ban(
    reader: &mut DocumentReader<'_>,
    at: Option<Position>,
    field_path: &FieldPath<'_>,
) {
    if let Some(at) = at {
        report_unsupported(reader, at, &field_path.with_key("ban"), "`ban`");
    }
}

/// Reports `reservations`, which memcached cannot keep.
pub(super) fn report_unsupported_reservations(
    reader: &mut DocumentReader<'_>,
    at: Option<Position>,
    field_path: &FieldPath<'_>,
) {
    if let Some(at) = at {
        let message = "`reservations` is not possible with BACKEND_TYPE=memcache, which has no table of reservations";
        reader.report_error(at, &field_path.with_key("reservations"), message, "use Redis, or remove it");
    }
}

/// Reports `overflow_to`: memcached cannot change two counters at once.
pub(super) fn report_unsupported_overflow(reader: &mut DocumentReader<'_>, at: Position, field_path: &FieldPath<'_>) {
    let message = "`overflow_to` is not possible with BACKEND_TYPE=memcache, which cannot change two counters at once";
    reader.report_error(at, &field_path.with_key("overflow_to"), message, "use Redis, or remove it");
}

/// Reports `concurrent`, which memcached cannot keep.
pub(super) fn report_unsupported_concurrent(reader: &mut DocumentReader<'_>, at: Position, field_path: &FieldPath<'_>) {
    let message = "`concurrent` is not possible with BACKEND_TYPE=memcache, which has no table of slots";
    reader.report_error(at, &field_path.with_key("concurrent"), message, "use Redis, or remove it");
}

/// Returns `true` if a limit needs more than an increment.
pub(super) fn needs_more_than_increment(spec: &LimitSpec) -> bool {
    spec.algorithm != Algorithm::FixedWindow
        || spec.count_rejected == Some(false)
        || spec.consistency.is_some()
        || spec.scope.is_some()
        || spec.window.is_some()
        || spec.ban.is_some()
        || spec.reservations.is_some()
}

/// Removes the keys of defaults that need more than an increment.
pub(super) fn remove_unsupported_keys(keys: DefaultableKeys) -> DefaultableKeys {
    DefaultableKeys {
        algorithm: keys.algorithm.filter(|algorithm| algorithm.value == Algorithm::FixedWindow),
        count_rejected: keys.count_rejected.filter(|counted| counted.value),
        consistency: keys.consistency.filter(|consistency| consistency.value == ConsistencyWord::Strict),
        scope: keys.scope.filter(|scope| scope.value == ScopeWord::Region),
        window: None,
        ..keys
    }
}

/// Reports a list of more than one limit: whether a hit counts in one of them depends on the others.
pub(super) fn check_single_limit(
    reader: &mut DocumentReader<'_>,
    at: Position,
    count: usize,
    field_path: &FieldPath<'_>,
) {
    if count > 1 {
        report_unsupported(reader, at, field_path, &format!("a list of {count} limits"));
    }
}

fn report_unsupported(reader: &mut DocumentReader<'_>, at: Position, field_path: &FieldPath<'_>, what: &str) {
    let message =
        format!("{what} is not possible with BACKEND_TYPE=memcache, where an increment cannot be conditional");
    reader.report_error(at, field_path, message, "count one fixed window with its rejected hits, or use Redis");
}

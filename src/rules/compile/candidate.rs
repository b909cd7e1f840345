//! Candidate limits: limits of a list that are tried beside those that decide.
//!
//! A limit with a `name` and a `shadow_mode` of its own is a candidate if the list has a limit without these. Alone, it
//! is a limit in shadow mode: the response shows it, and its counter has no name.

use crate::rules::document::RateLimitEntry;
use crate::rules::document::fields::{DocumentReader, FieldPath};

/// Returns the number of limits in a list that decide: all but its candidates, or 0 if it has no other limits.
pub(super) fn deciding_count(written: &[RateLimitEntry]) -> usize {
    written.iter().filter(|one| !is_named_shadow(one)).count()
}

/// Returns `true` if a limit of a list with this number of deciding limits is a candidate.
pub(super) fn is_candidate(written: &RateLimitEntry, deciding: usize) -> bool {
    deciding > 0 && is_named_shadow(written)
}

/// Reports a key of a candidate that would change other limits.
pub(super) fn check(reader: &mut DocumentReader<'_>, written: &RateLimitEntry, field_path: &FieldPath<'_>) {
    if let Some(replaced) = written.replaces.first() {
        let message = "a candidate limit (`shadow_mode` and `name` in a list) cannot replace others";
        reader.error(replaced.at, &field_path.key("replaces"), message, "move `replaces` to another limit of the list");
    }
}

fn is_named_shadow(written: &RateLimitEntry) -> bool {
    written.shadow_mode && !written.name.value.is_empty()
}

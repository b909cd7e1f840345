//! Contradictions within one mapping of defaults, in a rule file or in a file of defaults.

use super::DefaultableKeys;
use super::fields::{DocumentReader, FieldPath};
use crate::limit::algorithm::Algorithm;

/// Reports contradictions within `defaults`.
pub fn check_defaults(reader: &mut DocumentReader<'_>, settings: &DefaultableKeys, field_path: &FieldPath<'_>) {
    let eventual = settings.eventual.filter(|eventual| eventual.value);
    let is_global = settings.global.is_some_and(|global| global.value);
    let strict = settings.eventual.is_some() && eventual.is_none() && !is_global;
    if let Some(overshoot) = settings.max_overshoot.filter(|_| strict) {
        let message = "`max_overshoot` without `consistency: eventual`";
        reader.error(
            overshoot.at,
            &field_path.key("max_overshoot"),
            message,
            "a strict limit is never exceeded; remove one",
        );
    }
    check_global(reader, settings, field_path);
    let Some(eventual) = eventual else { return };
    let algorithm = settings.algorithm.map(|spanned| spanned.value);
    let clashes = [
        (
            algorithm.is_some_and(|algorithm| !algorithm.properties().can_be_eventual()),
            algorithm.map_or("", Algorithm::name),
        ),
        (settings.max_wait_us.is_some_and(|spanned| spanned.value > 0), "`max_wait`"),
        (settings.count_rejected.is_some_and(|spanned| spanned.value), "`count_rejected: true`"),
    ];
    for (_, with) in clashes.into_iter().filter(|(clash, _)| *clash) {
        let message = format!("`consistency: eventual` cannot be kept with {with}");
        reader.error(eventual.at, &field_path.key("consistency"), message, "set one of them in the rules instead");
    }
}

/// Reports keys that no limit keeps beside a default of `scope: global`.
fn check_global(reader: &mut DocumentReader<'_>, settings: &DefaultableKeys, field_path: &FieldPath<'_>) {
    let Some(global) = settings.global.filter(|global| global.value) else { return };
    let algorithm = settings.algorithm.map(|spanned| spanned.value);
    if let Some(with) = algorithm.filter(|algorithm| !algorithm.can_be_global()).map(Algorithm::name) {
        let message = format!("`scope: global` cannot be kept with {with}");
        reader.error(global.at, &field_path.key("scope"), message, "set one of them in the rules instead");
    }
}

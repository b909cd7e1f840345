//! Compiler of one limit: its period, its defaults, and contradictions between its keys; and of a list of limits.
//!
//! A key of the limit itself must apply to its algorithm; otherwise it is an error. A key of `defaults` is skipped
//! where it does not apply, so that one set of defaults can serve limits of several algorithms.
//!
//! A limit of a list with a `name` and a `shadow_mode` of its own is a *candidate* if the list has a limit without
//! these: it is tried beside those that decide. Alone it is a limit in shadow mode: the response shows it, and its
//! counter has no name.
//!
//! Decides: which limits may stand in one rule: a list, one `name` twice.
//! Decides: one that another makes pointless (no warning); which keys may stand beside `unlimited` and `concurrent`.
//! Decides: which limits of a list are candidates; what `replaces` may name; an unknown or missing unit, also over xDS.
//! Decides: a `max_overshoot` above the limit; `scope: global` without `TOLLKEEPER_REGIONS`.
//! Decides: that `shadow_mode` and `quota_mode` hold for own limits only.

use super::limit_defaults::{
    CompiledLimitEntry, DEFAULT_CONCURRENT_MAX_DURATION_US, DomainSettings, LimitKeys, PlaceInRule, has_same_counter,
};
use super::options::CompileOptions;
use super::{limit_defaults, lints, memcache, overflow};
use crate::limit::active::ActiveTimes;
use crate::limit::algorithm::Algorithm;
use crate::limit::period::{Period, Unit};
use crate::limit::{Consistency, Limit, LimitError, LimitSpec, Overshoot, StoreFailurePolicy};
use crate::rules::diagnostic::escape_for_message;
use crate::rules::document::defaults::DefaultableKeys;
use crate::rules::document::fields::{DocumentReader, FieldPath};
use crate::rules::document::{DescriptorSpec, RateLimitEntry};
use crate::rules::key_table::ConsistencyWord;
use crate::rules::rule::{OverrideDefaults, RuleAllowance, RuleLimit};
use crate::rules::yaml::Spanned;

/// Converts `defaults` to those of limits that are sent with a request.
pub(super) fn convert_override_defaults(keys: &DefaultableKeys, options: &CompileOptions) -> OverrideDefaults {
    // Exhaustive, so that a new key cannot be forgotten here.
    let DefaultableKeys {
        algorithm,
        window,
        queue_size,
        max_wait_us,
        count_rejected,
        consistency,
        max_overshoot,
        // Such a limit is always one of its region.
        scope: _,
        reserve_milli_percent: _,
        on_region_loss: _,
        on_store_error,
        epoch,
        over_limit_body: _,
        over_limit_content_type: _,
        over_limit_format: _,
        over_limit_headers: _,
        jitter: _,
    } = keys;
    let overshoot = max_overshoot.map_or(Overshoot::DEFAULT, |spanned| spanned.value);
    let consistency = consistency.map(|spanned| match spanned.value {
        ConsistencyWord::Strict => Consistency::Strict,
        ConsistencyWord::Eventual => Consistency::Eventual(overshoot),
    });
    OverrideDefaults {
        algorithm: algorithm.map(|spanned| spanned.value).unwrap_or_default(),
        window: window.map(|spanned| spanned.value),
        queue_size: queue_size.map(|spanned| spanned.value),
        max_wait_us: max_wait_us.map(|spanned| spanned.value),
        count_rejected: count_rejected.map(|spanned| spanned.value),
        consistency,
        on_store_error: Some(on_store_error.map_or(options.on_store_error, |spanned| spanned.value)),
        epoch: epoch.map_or(0, |spanned| spanned.value),
        rejection: keys.rejection_keys().build(),
    }
}

/// Returns the names that a rule's limits replace, each once.
pub(super) fn compile_replaced_names(
    reader: &mut DocumentReader<'_>,
    limits: &[RateLimitEntry],
    field_path: &FieldPath<'_>,
) -> Vec<String> {
    let own: Vec<&str> = limits.iter().map(|limit| limit.name.value.as_str()).filter(|name| !name.is_empty()).collect();
    let mut names: Vec<String> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for name in limits.iter().flat_map(|limit| &limit.replaces) {
        let field_path = field_path.with_key("replaces");
        if name.value.is_empty() {
            let message = "should not have an empty replaces entry";
            reader.report_error(name.at, &field_path, message, "write `- name: NAME` of the limit to switch off");
        } else if own.contains(&name.value.as_str()) {
            let message = "replaces should not contain name of same descriptor";
            reader.report_error(name.at, &field_path, message, format!("remove '{}'", escape_for_message(&name.value)));
        } else if seen.insert(&name.value) {
            names.push(name.value.clone());
        }
    }
    names
}

/// Compiles a `rate_limit` that is unlimited; reports keys that do not apply to it.
pub(super) fn compile_unlimited(
    reader: &mut DocumentReader<'_>,
    limit: &RateLimitEntry,
    descriptor: &DescriptorSpec,
    field_path: &FieldPath<'_>,
) -> RuleAllowance {
    if let Some(unit) = limit.unit.as_ref().filter(|unit| Unit::from_name(&unit.value).is_some()) {
        let message = "should not specify rate limit unit when unlimited";
        reader.report_error(unit.at, &field_path.with_key("unit"), message, "remove `unit` or `unlimited`");
    }
    if let Some(key) = limit.written_keys().find(|key| !["unit", "requests_per_unit"].contains(&key.value)) {
        let message = format!("`{}` does not apply when unlimited", key.value);
        reader.report_error(key.at, &field_path.with_key(key.value), message, "remove it or `unlimited`");
    }
    RuleAllowance::Unlimited {
        name: limit.name.value.clone(),
        requests_per_unit: limit.requests(),
        shadow: descriptor.shadow_mode,
        quota: descriptor.quota_mode,
    }
}

/// Compiles the limits of a rule; leaves out those with errors after which nothing more can be checked.
pub(super) fn compile_limits(
    reader: &mut DocumentReader<'_>,
    written: &[RateLimitEntry],
    descriptor: &DescriptorSpec,
    scope: &DomainSettings<'_>,
    field_path: &FieldPath<'_>,
) -> Vec<RuleLimit> {
    // 0: none but named shadow limits, which then decide.
    let deciding = written.iter().filter(|one| !is_candidate_if_in_list(one)).count();
    // Bounded, because the checks below compare all pairs.
    if let Some(extra) = written.get(MAX_LIMITS_PER_DESCRIPTOR) {
        let message = format!("{} limits on one descriptor", written.len());
        reader.report_error(
            extra.at,
            field_path,
            message,
            format!("at most {MAX_LIMITS_PER_DESCRIPTOR} are decided together"),
        );
        return Vec::new();
    }
    let mut compiled: Vec<CompiledLimitEntry<'_>> = Vec::with_capacity(written.len());
    let chain_positions = overflow::resolve_chain_positions(reader, written, scope, field_path);
    for (one, chain_position) in written.iter().zip(chain_positions) {
        let field_path = one.index.map_or(*field_path, |index| field_path.with_index(index));
        let candidate = deciding > 0 && is_candidate_if_in_list(one);
        // The only deciding limit, and each candidate, count as the only limit of the rule.
        let sole = candidate || written.len() == 1 || deciding == 1;
        let place = PlaceInRule { sole, chain_position };
        let Some((limit, keys)) = compile_limit(reader, one, place, scope, &field_path) else { continue };
        let limit = build_rule_limit(limit, one, descriptor, candidate, keys.epoch());
        let entry = CompiledLimitEntry { limit, written: one, keys };
        check_against_other_limits(reader, &entry, &compiled, &field_path);
        check_notify(reader, &entry, &field_path);
        compiled.push(entry);
    }
    limit_defaults::apply_defaults_file(reader, &mut compiled, scope, field_path);
    for CompiledLimitEntry { limit, written, .. } in compiled.iter().filter(|entry| !entry.written.unreadable) {
        let field_path = written.index.map_or(*field_path, |index| field_path.with_index(index));
        lints::warn_about_limit(reader, written, &limit.limit, scope, &field_path);
    }
    if scope.options.regions.is_none() {
        compiled.iter_mut().for_each(|entry| entry.limit.limit = entry.limit.limit.without_global_scope());
    }
    let mut limits: Vec<RuleLimit> = compiled.into_iter().map(|entry| entry.limit).collect();
    limits.sort_by_key(|limit| limit.candidate);
    for candidate in limits.iter_mut().filter(|limit| limit.candidate) {
        // If the store fails, a candidate admits.
        candidate.limit = candidate.limit.with_on_store_error(StoreFailurePolicy::Allow);
    }
    limits
}

/// A limit with the keys that say how its rule uses it.
fn build_rule_limit(
    limit: Limit,
    written: &RateLimitEntry,
    descriptor: &DescriptorSpec,
    candidate: bool,
    epoch: u64,
) -> RuleLimit {
    RuleLimit {
        limit,
        name: written.name.value.clone(),
        shadow: descriptor.shadow_mode || written.shadow_mode,
        quota: !candidate && (descriptor.quota_mode || written.quota_mode),
        candidate,
        epoch,
        replaces: written.replaces.iter().map(|name| name.value.clone()).collect(),
        active: written.active.map(|active| ActiveTimes::new(active.value)),
        overflow_to: written.overflow_to.as_ref().map(|target| target.value.clone()),
        notify: written.notify.as_ref().map(|levels| levels.value.clone()),
        left_out_defaults: Vec::new(),
    }
}

fn is_candidate_if_in_list(written: &RateLimitEntry) -> bool {
    written.shadow_mode && !written.name.value.is_empty()
}

/// Reports a key of a candidate that would change other limits.
fn check_candidate_keys(reader: &mut DocumentReader<'_>, written: &RateLimitEntry, field_path: &FieldPath<'_>) {
    if let Some(replaced) = written.replaces.first() {
        let message = "a candidate limit (`shadow_mode` and `name` in a list) cannot replace others";
        reader.report_error(
            replaced.at,
            &field_path.with_key("replaces"),
            message,
            "move `replaces` to another limit of the list",
        );
    }
}

/// Reports a limit that has the counter or the name of one of `others`, or a key that a candidate cannot have.
fn check_against_other_limits(
    reader: &mut DocumentReader<'_>,
    entry: &CompiledLimitEntry<'_>,
    others: &[CompiledLimitEntry<'_>],
    field_path: &FieldPath<'_>,
) {
    let CompiledLimitEntry { limit: RuleLimit { limit, name, candidate, .. }, written, .. } = entry;
    // A limit with an unknown unit has been given another period.
    let has_known_unit = |written: &RateLimitEntry| {
        written.concurrent.is_some() || written.unit.as_ref().is_none_or(|unit| Unit::from_name(&unit.value).is_some())
    };
    let shares_counter = |other: &CompiledLimitEntry<'_>| {
        has_known_unit(written)
            && has_known_unit(other.written)
            && has_same_counter(&other.limit.limit, limit)
            && entry.limit.can_share_counter(&other.limit)
    };
    if others.iter().any(shares_counter) {
        let message = match limit.is_concurrent() {
            true => "two `concurrent` limits on one descriptor".to_owned(),
            false => format!("two limits of {} for {} on one descriptor", limit.algorithm(), limit.period()),
        };
        let hint = match limit.is_concurrent() {
            true => "keep the lower one, or try one beside the other, in `shadow_mode` and with a `name`",
            false => {
                "keep the lower one, change the period or the algorithm of one, or try one beside an enforced one, in \
                 `shadow_mode` and with a `name`"
            }
        };
        reader.report_error(written.at, field_path, message, hint);
    }
    if *candidate {
        check_candidate_keys(reader, written, field_path);
    }
    if !name.is_empty() && others.iter().any(|other| other.limit.name == *name) {
        let message = format!("two limits named '{}' on one descriptor", escape_for_message(name));
        reader.report_error(written.name.at, &field_path.with_key("name"), message, "rename one");
    }
}

/// Maximum number of limits of one descriptor.
const MAX_LIMITS_PER_DESCRIPTOR: usize = 16;

fn compile_limit<'w>(
    reader: &mut DocumentReader<'_>,
    written: &'w RateLimitEntry,
    place: PlaceInRule,
    scope: &DomainSettings<'w>,
    field_path: &FieldPath<'_>,
) -> Option<(Limit, LimitKeys<'w>)> {
    let period = match written.concurrent {
        None => compile_period(reader, written, field_path),
        Some(_) => Period::from_micros(
            written.max_duration_us.map_or(DEFAULT_CONCURRENT_MAX_DURATION_US, |max_duration| max_duration.value),
        ),
    };
    check_concurrent_keys(reader, written, scope, field_path);
    let period = if written.unreadable { period? } else { period.unwrap_or(Period::new(Unit::Second, 1)?) };
    if scope.options.memcache {
        memcache::report_unsupported_keys(reader, &written.defaultable, field_path);
        memcache::report_unsupported_ban(reader, written.ban.map(|ban| ban.at), field_path);
        memcache::report_unsupported_reservations(reader, written.reservations.map(|spanned| spanned.at), field_path);
    }
    let mut keys = LimitKeys::new(written, period, place, scope);
    // Defaults are added to a limit without contradictions.
    while let Err(error) = Limit::new(&keys.resolve_spec())
        && !matches!(error, LimitError::ReserveTooSmall { .. })
    {
        report_limit_error(reader, written, error, field_path);
        // Clear the reported key, to find further errors.
        if !keys.clear_key(error.rule_file_key()) {
            return None;
        }
    }
    keys.add_rule_file_defaults(scope.rule_file_defaults());
    let spec = keys.resolve_spec();
    check_overshoot(reader, written, &spec, field_path);
    check_global_scope_keys(reader, written, &spec, field_path);
    check_reservation_estimate(reader, written, &spec, field_path);
    let limit = Limit::new(&spec).or_else(|error| {
        let has_no_regions = scope.options.regions.is_none();
        if has_no_regions && matches!(error, LimitError::ReserveTooSmall { .. }) {
            lints::warn_about_global_scope_without_regions(reader, written, field_path);
        } else {
            report_limit_error(reader, written, error, field_path);
            keys.clear_key(error.rule_file_key());
        }
        keys.build_limit(has_no_regions)
    });
    Some((limit.ok()?, keys))
}

/// Reports keys that contradict `concurrent`, or need it.
fn check_concurrent_keys(
    reader: &mut DocumentReader<'_>,
    written: &RateLimitEntry,
    scope: &DomainSettings<'_>,
    field_path: &FieldPath<'_>,
) {
    let Some(concurrent) = written.concurrent else {
        if let Some(max_duration) = written.max_duration_us {
            let message = "`max_duration` without `concurrent`";
            let hint = "remove it, or write `concurrent: N`";
            reader.report_error(max_duration.at, &field_path.with_key("max_duration"), message, hint);
        }
        return;
    };
    let periodic = ["requests_per_unit", "unit", "unit_multiplier", "algorithm", "max_overshoot"];
    for Spanned { value: key, at } in written.written_keys().filter(|key| periodic.contains(&key.value)) {
        let message = format!("`{key}` beside `concurrent`");
        let hint = "remove it: streams at once have no period; write limits of both kinds as a list";
        reader.report_error(at, &field_path.with_key(key), message, hint);
    }
    if scope.options.memcache {
        memcache::report_unsupported_concurrent(reader, concurrent.at, field_path);
    }
}

/// Returns the period, or reports its errors.
fn compile_period(
    reader: &mut DocumentReader<'_>,
    written: &RateLimitEntry,
    field_path: &FieldPath<'_>,
) -> Option<Period> {
    let name = written.unit.as_ref().map_or("", |unit| unit.value.as_str());
    let at = written.unit.as_ref().map_or(written.at, |unit| unit.at);
    // A limit of 0 rejects everything, however long its period is.
    let is_needless = written.requests_per_unit.is_some_and(|requests| requests.value == 0) && written.unit.is_none();
    let Some(unit) = Unit::from_name(name).or(is_needless.then_some(Unit::Second)) else {
        // A unit that could not be read was reported already.
        if written.unit.is_some() || !written.unreadable {
            let message = format!("invalid rate limit unit '{}'", escape_for_message(name));
            reader.report_error(at, &field_path.with_key("unit"), message, suggest_valid_unit(name));
        }
        return None;
    };
    let multiplier = written.unit_multiplier.map_or(1, |multiplier| multiplier.value);
    let period = Period::new(unit, multiplier);
    if period.is_none() {
        let at = written.unit_multiplier.map_or(at, |multiplier| multiplier.at);
        let message = format!("a period of {multiplier} {}s", unit.name());
        reader.report_error(at, &field_path.with_key("unit_multiplier"), message, "the longest is 366 days");
    }
    period
}

fn suggest_valid_unit(name: &str) -> String {
    let lower = name.trim().to_ascii_lowercase();
    let meant = Unit::ALL.into_iter().find(|unit| !lower.is_empty() && lower.trim_end_matches('s') == unit.name());
    if let Some(unit) = meant {
        return format!("did you mean `{}`?", unit.name());
    }
    suggest_multiplier(&lower).unwrap_or_else(|| format!("write one of {}", Unit::ALL.map(Unit::name).join(", ")))
}

/// Returns the hint for a length in place of a unit, such as `30s`, `5m` or `2 hours`.
fn suggest_multiplier(written: &str) -> Option<String> {
    let digits = written.find(|c: char| !c.is_ascii_digit())?;
    let count: u32 = written[..digits].parse().ok().filter(|count| *count > 0)?;
    let unit = match written[digits..].trim() {
        "s" | "sec" | "secs" | "second" | "seconds" => Unit::Second,
        "m" | "min" | "mins" | "minute" | "minutes" => Unit::Minute,
        "h" | "hour" | "hours" => Unit::Hour,
        "d" | "day" | "days" => Unit::Day,
        "w" | "week" | "weeks" => Unit::Week,
        _ => return None,
    };
    Some(match count {
        1 => format!("write `unit: {}`", unit.name()),
        _ => format!("write `unit: {}, unit_multiplier: {count}`", unit.name()),
    })
}

/// Reports a `notify` of a limit whose charges are not counted as hits of the key.
fn check_notify(reader: &mut DocumentReader<'_>, entry: &CompiledLimitEntry<'_>, field_path: &FieldPath<'_>) {
    let Some(notify) = &entry.written.notify else { return };
    let what = match () {
        () if entry.limit.limit.is_concurrent() => "a `concurrent` limit",
        () if entry.limit.candidate => "a candidate (`shadow_mode` and `name` in a list)",
        () => return,
    };
    let message = format!("`notify` of {what}");
    reader.report_error(notify.at, &field_path.with_key("notify"), message, "remove it");
}

/// Reports a `max_overshoot` that has no effect or exceeds the limit.
fn check_overshoot(
    reader: &mut DocumentReader<'_>,
    written: &RateLimitEntry,
    spec: &LimitSpec,
    field_path: &FieldPath<'_>,
) {
    let Some(overshoot) = written.defaultable.max_overshoot else { return };
    let field_path = field_path.with_key("max_overshoot");
    if spec.consistency.is_none() && spec.scope.is_none() {
        let hint = match spec.algorithm.properties().not_eventual {
            Some(_) => format!("remove it; a {} is always strict", spec.algorithm),
            None => "a strict limit is never exceeded; remove it, or add `consistency: eventual` or `scope: global`"
                .to_owned(),
        };
        reader.report_error(overshoot.at, &field_path, "`max_overshoot` without `consistency: eventual`", hint);
    }
    if let Overshoot::Hits(hits) = overshoot.value
        && u64::from(hits) > spec.requests_per_unit
    {
        let message = format!("a `max_overshoot` of {hits} hits is more than 100% of the limit");
        reader.report_error(overshoot.at, &field_path, message, "raise the limit instead");
    }
}

/// Reports keys of a global limit that have no effect on this one.
fn check_global_scope_keys(
    reader: &mut DocumentReader<'_>,
    written: &RateLimitEntry,
    spec: &LimitSpec,
    field_path: &FieldPath<'_>,
) {
    let own = &written.defaultable;
    let reserve = own.reserve_milli_percent.map(|spanned| ("reserve", spanned.at));
    let loss = own.on_region_loss.map(|spanned| ("on_region_loss", spanned.at));
    for (key, at) in reserve.into_iter().chain(loss).filter(|_| spec.scope.is_none()) {
        let message = format!("`{key}` without `scope: global`");
        reader.report_error(at, &field_path.with_key(key), message, "remove it, or add `scope: global`");
    }
}

/// Reports an estimate that never fits: every request would be rejected.
fn check_reservation_estimate(
    reader: &mut DocumentReader<'_>,
    written: &RateLimitEntry,
    spec: &LimitSpec,
    field_path: &FieldPath<'_>,
) {
    let Some(reservations) = written.reservations else { return };
    let most = spec.bucket_size.map_or(spec.requests_per_unit, u64::from);
    if let Some(estimate) =
        reservations.value.fixed_estimate().filter(|estimate| most > 0 && u64::from(estimate.get()) > most)
    {
        let message = format!("an estimate of {estimate} never fits in {most}, so every request is rejected");
        let field_path = field_path.with_key("reservations");
        reader.report_error(reservations.at, &field_path.with_key("estimate"), message, "lower it, or raise the limit");
    }
}

fn report_limit_error(
    reader: &mut DocumentReader<'_>,
    written: &RateLimitEntry,
    error: LimitError,
    field_path: &FieldPath<'_>,
) {
    let hint = match error {
        LimitError::Meaningless { algorithm: Algorithm::Concurrent, .. } => {
            "remove it: a stream has a slot or none, whatever came before"
        }
        LimitError::Meaningless { key: "bucket_size", .. } => "remove it, or write `algorithm: token_bucket`",
        LimitError::Meaningless { key: "queue_size", .. } => "remove it, or write `algorithm: leaky_bucket`",
        LimitError::Meaningless { key: "max_wait", .. } => {
            "remove it; only leaky_bucket and token_bucket delay answers"
        }
        LimitError::Meaningless { key: "window", .. } => "remove it, or write `algorithm: fixed_window`",
        LimitError::WindowTooLong { .. } => "write a larger `unit`, such as day",
        LimitError::Meaningless { .. } => "remove it; a leaky_bucket never counts rejected hits",
        LimitError::Zero { .. } => "write a larger number",
        LimitError::LogTooLong { .. } => "write `algorithm: sliding_window_counter`, which keeps two numbers",
        LimitError::NotLarge { .. } => "write a smaller number, or count larger units",
        LimitError::NotEventual { .. } | LimitError::NotGlobal { .. } | LimitError::NotReserved { .. } => {
            "remove one of them"
        }
        LimitError::OverflowUnsupported { .. } => "remove it, or `overflow_to`",
        LimitError::ReserveTooSmall { .. } => "raise the limit or `reserve`, or use `scope: region`",
    };
    let at = written.written_position(error.rule_file_key()).unwrap_or(written.at);
    reader.report_error(at, &field_path.with_key(error.rule_file_key()), error.to_string(), hint);
}

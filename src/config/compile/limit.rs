//! One limit: its period, what it takes from the domain's defaults, and what contradicts what.
//!
//! What a limit says itself must fit its algorithm, and is an error where it does not. What only `defaults` say holds
//! where it fits and is passed over elsewhere, so that one set of defaults can serve rules of several algorithms.

use std::sync::Arc;

use super::{Options, advice};
use crate::config::diagnostic::quotable;
use crate::config::document::fields::{Reader, Trail};
use crate::config::document::{Descriptor, Limit as Written, Settings, Spot};
use crate::config::yaml::Position;
use crate::limit::algorithm::{Algorithm, Capacity, Delay, RejectedHits};
use crate::limit::period::{Period, Unit};
use crate::limit::{Consistency, Limit, LimitError, LimitSpec, Overshoot, StorePolicy};
use crate::rule::{Allowance, Defaults, Refusal, RuleLimit};

/// What holds for all limits of one document.
pub(super) struct Scope<'s> {
    /// Its `defaults`.
    pub(super) defaults: Option<&'s Settings>,
    /// The process's settings.
    pub(super) options: &'s Options,
}

impl<'s> Scope<'s> {
    /// A key of the defaults.
    fn default<T: Copy>(&self, key: impl Fn(&'s Settings) -> Option<Spot<T>>) -> Option<T> {
        key(self.defaults?).map(|spot| spot.value)
    }
}

/// A refusal of these parts.
pub(super) fn refusal(body: Option<&Spot<String>>, content_type: Option<&Spot<String>>) -> Refusal {
    let shared = |spot: &Spot<String>| Arc::from(spot.value.as_str());
    Refusal { body: body.map(shared), content_type: content_type.map(shared) }
}

/// Reports what contradicts itself within `defaults`; returns them as written.
pub(super) fn check_defaults(reader: &mut Reader<'_>, settings: &Settings, trail: &Trail<'_>) -> Settings {
    let eventual = settings.eventual.filter(|eventual| eventual.value);
    let strict = settings.eventual.is_some() && eventual.is_none();
    if let Some(overshoot) = settings.max_overshoot.filter(|_| strict) {
        let message = "`max_overshoot` without `consistency: eventual`";
        reader.error(
            overshoot.at,
            &trail.key("max_overshoot"),
            message,
            "a strict limit is never exceeded; remove one",
        );
    }
    let Some(eventual) = eventual else { return settings.clone() };
    let algorithm = settings.algorithm.map(|spot| spot.value);
    let clashes = [
        (
            algorithm.is_some_and(|algorithm| algorithm.properties().not_eventual.is_some()),
            algorithm.map_or("", Algorithm::name),
        ),
        (settings.max_wait_us.is_some_and(|spot| spot.value > 0), "`max_wait`"),
        (settings.count_rejected.is_some_and(|spot| spot.value), "`count_rejected: true`"),
    ];
    for (_, with) in clashes.into_iter().filter(|(clash, _)| *clash) {
        let message = format!("`consistency: eventual` cannot be kept with {with}");
        reader.error(eventual.at, &trail.key("consistency"), message, "let the rules say one of them");
    }
    settings.clone()
}

/// What defaults mean for limits that travel with a request.
pub(super) fn defaults(settings: &Settings, options: &Options) -> Defaults {
    let overshoot = settings.max_overshoot.map_or(Overshoot::DEFAULT, |spot| spot.value);
    let consistency =
        settings.eventual.map(|spot| if spot.value { Consistency::Eventual(overshoot) } else { Consistency::Strict });
    Defaults {
        algorithm: settings.algorithm.map(|spot| spot.value).unwrap_or_default(),
        queue_size: settings.queue_size.map(|spot| spot.value),
        max_wait_us: settings.max_wait_us.map(|spot| spot.value),
        count_rejected: settings.count_rejected.map(|spot| spot.value),
        consistency,
        on_store_error: Some(settings.on_store_error.map_or(options.on_store_error, |spot| spot.value)),
        epoch: settings.epoch.map_or(0, |spot| spot.value),
        refusal: refusal(settings.refusal.body.as_ref(), settings.refusal.content_type.as_ref()),
    }
}

/// The names that a rule's limits switch off, each once.
pub(super) fn replaces(reader: &mut Reader<'_>, limits: &[Written], trail: &Trail<'_>) -> Vec<String> {
    let own: Vec<&str> = limits.iter().map(|limit| limit.name.value.as_str()).filter(|name| !name.is_empty()).collect();
    let mut names: Vec<String> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for name in limits.iter().flat_map(|limit| &limit.replaces) {
        let trail = trail.key("replaces");
        if name.value.is_empty() {
            let message = "should not have an empty replaces entry";
            reader.error(name.at, &trail, message, "write `- name: NAME` of the limit to switch off");
        } else if own.contains(&name.value.as_str()) {
            let message = "replaces should not contain name of same descriptor";
            reader.error(name.at, &trail, message, format!("remove '{}'", quotable(&name.value)));
        } else if seen.insert(&name.value) {
            names.push(name.value.clone());
        }
    }
    names
}

/// A `rate_limit` that allows everything; what else it says must mean something.
pub(super) fn unlimited(
    reader: &mut Reader<'_>,
    limit: &Written,
    descriptor: &Descriptor,
    trail: &Trail<'_>,
) -> Allowance {
    if let Some(unit) = limit.unit.as_ref().filter(|unit| Unit::from_name(&unit.value).is_some()) {
        let message = "should not specify rate limit unit when unlimited";
        reader.error(unit.at, &trail.key("unit"), message, "remove `unit` or `unlimited`");
    }
    let other = limit.unit_multiplier.map(|spot| Spot { value: "unit_multiplier", at: spot.at });
    let other = other.or(limit.bucket_size.map(|spot| Spot { value: "bucket_size", at: spot.at }));
    if let Some(key) = other.or(limit.settings.first()) {
        let message = format!("`{}` has no meaning when unlimited", key.value);
        reader.error(key.at, &trail.key(key.value), message, "remove it or `unlimited`");
    }
    Allowance::Unlimited {
        name: limit.name.value.clone(),
        requests_per_unit: limit.requests_per_unit.value,
        shadow: descriptor.shadow_mode,
        quota: descriptor.quota_mode,
    }
}

/// The limits of a rule; those with errors are left out.
pub(super) fn limits(
    reader: &mut Reader<'_>,
    written: &[Written],
    descriptor: &Descriptor,
    (scope, trail): (&Scope<'_>, &Trail<'_>),
) -> Vec<RuleLimit> {
    let sole = written.len() == 1;
    let mut limits: Vec<RuleLimit> = Vec::with_capacity(written.len());
    // A list is short; its length is bounded so that comparing all pairs is.
    if let Some(extra) = written.get(MAX_LIMITS) {
        let message = format!("{} limits on one descriptor", written.len());
        reader.error(extra.at, trail, message, format!("at most {MAX_LIMITS} are decided together"));
        return limits;
    }
    for one in written {
        let trail = one.index.map_or(*trail, |index| trail.index(index));
        let Some(limit) = limit(reader, one, sole, (scope, &trail)) else { continue };
        let same = |other: &&RuleLimit| {
            other.limit.algorithm() == limit.algorithm()
                && other.limit.period_us() == limit.period_us()
                && other.limit.calendar_months() == limit.calendar_months()
        };
        if limits.iter().any(|other| same(&other)) {
            let message = format!("two limits of {} for {} on one descriptor", limit.algorithm(), limit.period());
            reader.error(one.at, &trail, message, "keep the lower one, or change the period or the algorithm of one");
        }
        let name = &one.name;
        if !name.value.is_empty() && limits.iter().any(|other| other.name == name.value) {
            let message = format!("two limits named '{}' on one descriptor", quotable(&name.value));
            reader.error(name.at, &trail.key("name"), message, "rename one");
        }
        limits.push(RuleLimit {
            limit,
            name: name.value.clone(),
            shadow: descriptor.shadow_mode || one.shadow_mode,
            quota: descriptor.quota_mode || one.quota_mode,
            epoch: one.settings.epoch.map(|spot| spot.value).or(scope.default(|d| d.epoch)).unwrap_or(0),
        });
    }
    limits
}

/// The most limits that one descriptor may have.
const MAX_LIMITS: usize = 16;

fn limit(
    reader: &mut Reader<'_>,
    written: &Written,
    sole: bool,
    (scope, trail): (&Scope<'_>, &Trail<'_>),
) -> Option<Limit> {
    let period = period(reader, written, trail);
    let period = if written.unreadable { period? } else { period.unwrap_or(Period::new(Unit::Second, 1)?) };
    let mut spec = limit_spec(written, period, sole, scope);
    check_overshoot(reader, written, &spec, trail);
    let limit = loop {
        match Limit::new(&spec) {
            Ok(limit) => break limit,
            Err(error) => {
                report(reader, written, error, trail);
                // What was reported is put aside, to find what else is wrong.
                if !set_aside(&mut spec, error) {
                    return None;
                }
            }
        }
    };
    if !written.unreadable {
        advice::on_limit(reader, written, &limit, (scope.options, trail));
    }
    Some(limit)
}

/// The period, or what is wrong with it.
fn period(reader: &mut Reader<'_>, written: &Written, trail: &Trail<'_>) -> Option<Period> {
    let name = written.unit.as_ref().map_or("", |unit| unit.value.as_str());
    let at = written.unit.as_ref().map_or(written.at, |unit| unit.at);
    let Some(unit) = Unit::from_name(name) else {
        // A unit that could not be read was reported as such.
        if written.unit.is_some() || !written.unreadable {
            let message = format!("invalid rate limit unit '{}'", quotable(name));
            reader.error(at, &trail.key("unit"), message, unit_hint(name));
        }
        return None;
    };
    let multiplier = written.unit_multiplier.map_or(1, |multiplier| multiplier.value);
    let period = Period::new(unit, multiplier);
    if period.is_none() {
        let at = written.unit_multiplier.map_or(at, |multiplier| multiplier.at);
        let message = format!("a period of {multiplier} {}s", unit.name());
        reader.error(at, &trail.key("unit_multiplier"), message, "the longest is 366 days");
    }
    period
}

fn unit_hint(name: &str) -> String {
    let lower = name.trim().to_ascii_lowercase();
    let meant = Unit::ALL.into_iter().find(|unit| !lower.is_empty() && lower.trim_end_matches('s') == unit.name());
    match meant {
        Some(unit) => format!("did you mean `{}`?", unit.name()),
        None => format!("write one of {}", Unit::ALL.map(Unit::name).join(", ")),
    }
}

/// The limit as written, completed by the defaults that apply to it.
fn limit_spec(written: &Written, period: Period, sole: bool, scope: &Scope<'_>) -> LimitSpec {
    let own = &written.settings;
    let value = |spot: Spot<u32>| spot.value;
    let algorithm = own.algorithm.map(|spot| spot.value).or(scope.default(|d| d.algorithm)).unwrap_or_default();
    let properties = algorithm.properties();
    let own_wait = own.max_wait_us.map(|spot| spot.value);
    let own_rejected = own.count_rejected.map(|spot| spot.value);
    let own_eventual = own.eventual.map(|spot| spot.value);
    let can_be_eventual = properties.not_eventual.is_none() && own_wait.unwrap_or(0) == 0 && own_rejected != Some(true);
    let eventual = own_eventual.or(scope.default(|d| d.eventual).filter(|_| can_be_eventual)).unwrap_or(false);
    let can_wait = match properties.delay {
        Delay::Never => false,
        Delay::IfMaxWait => !eventual,
        Delay::UntilDeadline => true,
    };
    let can_count_rejected = properties.rejected_hits != RejectedHits::NeverCounted && !eventual;
    let overshoot = own.max_overshoot.map(|spot| spot.value).or_else(|| {
        // A default of more hits than this limit has means all of them.
        scope.default(|d| d.max_overshoot).map(|overshoot| match overshoot {
            Overshoot::Hits(hits) => Overshoot::Hits(hits.min(written.requests_per_unit.value).max(1)),
            Overshoot::MilliPercent(_) => overshoot,
        })
    });
    LimitSpec {
        bucket_size: written.bucket_size.map(value),
        queue_size: own
            .queue_size
            .map(value)
            .or(scope.default(|d| d.queue_size).filter(|_| properties.capacity == Capacity::QueueSize)),
        max_wait_us: own_wait.or(scope.default(|d| d.max_wait_us).filter(|_| can_wait)),
        count_rejected: own_rejected
            .or(scope.default(|d| d.count_rejected).filter(|counted| !counted || can_count_rejected)),
        consistency: eventual.then(|| Consistency::Eventual(overshoot.unwrap_or(Overshoot::DEFAULT))),
        on_store_error: Some(policy(own, scope)),
        sole,
        calendar_months: scope.options.calendar_months,
        log_max: scope.options.log_max,
        ..LimitSpec::new(algorithm, written.requests_per_unit.value, period)
    }
}

fn policy(own: &Settings, scope: &Scope<'_>) -> StorePolicy {
    own.on_store_error
        .map(|spot| spot.value)
        .or(scope.default(|d| d.on_store_error))
        .unwrap_or(scope.options.on_store_error)
}

/// What a limit says of its own overshoot must be used, and be no more than the limit.
fn check_overshoot(reader: &mut Reader<'_>, written: &Written, spec: &LimitSpec, trail: &Trail<'_>) {
    let Some(overshoot) = written.settings.max_overshoot else { return };
    let trail = trail.key("max_overshoot");
    if spec.consistency.is_none() {
        let hint = match spec.algorithm.properties().not_eventual {
            Some(_) => format!("remove it; a {} is always strict", spec.algorithm),
            None => "a strict limit is never exceeded; remove it, or add `consistency: eventual`".to_owned(),
        };
        reader.error(overshoot.at, &trail, "`max_overshoot` without `consistency: eventual`", hint);
    }
    if let Overshoot::Hits(hits) = overshoot.value
        && hits > spec.requests_per_unit
    {
        let message = format!("a `max_overshoot` of {hits} hits is more than 100% of the limit");
        reader.error(overshoot.at, &trail, message, "raise the limit instead");
    }
}

fn report(reader: &mut Reader<'_>, written: &Written, error: LimitError, trail: &Trail<'_>) {
    let hint = match error {
        LimitError::Meaningless { key: "bucket_size", .. } => "remove it, or write `algorithm: token_bucket`",
        LimitError::Meaningless { key: "queue_size", .. } => "remove it, or write `algorithm: leaky_bucket`",
        LimitError::Meaningless { key: "max_wait", .. } => "remove it; only leaky_bucket and token_bucket hold answers",
        LimitError::Meaningless { .. } => "remove it; what a full bucket refuses leaves no trace",
        LimitError::Zero { .. } => "write a larger number",
        LimitError::LogTooLong { .. } => "write `algorithm: sliding_window_counter`, which keeps two numbers",
        LimitError::NotEventual { .. } => "remove one of them",
    };
    let at = place(written, error.key());
    reader.error(at, &trail.key(error.key()), error.to_string(), hint);
}

/// Where a key stands, or the limit that was to have it.
fn place(written: &Written, key: &str) -> Position {
    let own = &written.settings;
    let at = match key {
        "bucket_size" => written.bucket_size.map(|spot| spot.at),
        "queue_size" => own.queue_size.map(|spot| spot.at),
        "max_wait" => own.max_wait_us.map(|spot| spot.at),
        "count_rejected" => own.count_rejected.map(|spot| spot.at),
        "consistency" => own.eventual.map(|spot| spot.at),
        "requests_per_unit" => Some(written.requests_per_unit.at),
        _ => None,
    };
    at.unwrap_or(written.at)
}

/// Takes back the term at fault; `false` if it can not be.
fn set_aside(spec: &mut LimitSpec, error: LimitError) -> bool {
    match error.key() {
        "bucket_size" => spec.bucket_size.take().is_some(),
        "queue_size" => spec.queue_size.take().is_some(),
        "max_wait" => spec.max_wait_us.take().is_some(),
        "count_rejected" => spec.count_rejected.take().is_some(),
        "consistency" => spec.consistency.take().is_some(),
        _ => false,
    }
}

//! One limit as written, completed by the defaults that apply to it: those of its domain, and those of
//! `TOLLKEEPER_RULE_DEFAULTS`.
//!
//! A limit is valid without the defaults of `TOLLKEEPER_RULE_DEFAULTS`. Each of them is tried, those with precedence
//! first. One that would make the limit invalid, or undo a key with precedence, is left out with a warning. So no
//! default makes a rule invalid.
//!
//! Decides: which default of a limit wins: the rule, its domain, `TOLLKEEPER_RULE_DEFAULTS`, the environment.
//! Decides: which algorithm and values a limit has if none is named.

use std::cell::RefCell;
use std::num::NonZeroU16;

use super::match_pattern::ExpressionWork;
use super::memcache;
use super::options::CompileOptions;
use crate::limit::algorithm::{Algorithm, AlgorithmProperties, CapacityRuleKey, DelayPolicy, RejectedHitsPolicy};
use crate::limit::period::{Period, Unit};
use crate::limit::window::WindowSpec;
use crate::limit::{Consistency, GlobalScope, Limit, LimitSpec, Overshoot, Scope};
use crate::rules::document::RateLimitEntry;
use crate::rules::document::defaults::{DefaultableKey, DefaultableKeys};
use crate::rules::document::fields::{DocumentReader, FieldPath};
use crate::rules::key_table::{ConsistencyWord, ScopeWord};
use crate::rules::rule::RuleLimit;
use crate::rules::rule_defaults::DefaultLayers;
use crate::rules::yaml::{Position, Spanned};

/// Number of regions that a global limit is checked for if only one region is configured.
const ASSUMED_REGION_COUNT: NonZeroU16 = NonZeroU16::new(2).expect("2 is not 0");

/// Settings that apply to all limits of a domain.
pub(super) struct DomainSettings<'s> {
    /// `defaults` of the domain in its rule file.
    pub(super) defaults: Option<&'s DefaultableKeys>,
    /// Defaults of `TOLLKEEPER_RULE_DEFAULTS`, which come after those.
    pub(super) layers: DefaultLayers<'s>,
    /// Settings of the process.
    pub(super) options: &'s CompileOptions,
    /// Shortest timeout of the callers of the domain, in microseconds, if it is known.
    pub(super) caller_timeout_us: Option<u64>,
    /// Work of expressions.
    pub(super) work: &'s RefCell<ExpressionWork>,
}

impl<'s> DomainSettings<'s> {
    /// `defaults` of the domain in its rule file, or none.
    pub(super) fn rule_file_defaults(&self) -> &'s DefaultableKeys {
        self.defaults.unwrap_or(const { &DefaultableKeys::NONE })
    }
}

/// A limit with the entry that it was compiled from.
pub(super) struct CompiledLimitEntry<'w> {
    pub(super) limit: RuleLimit,
    pub(super) written: &'w RateLimitEntry,
    /// The only limit of the descriptor that decides, or a candidate.
    pub(super) sole: bool,
}

/// `max_duration` of a concurrent limit that has none, in microseconds: 1 h.
pub(super) const DEFAULT_CONCURRENT_MAX_DURATION_US: u64 = 3_600_000_000;

/// Returns `true` if two limits of one descriptor would share a counter.
pub(super) fn has_same_counter(one: &Limit, other: &Limit) -> bool {
    if one.is_concurrent() && other.is_concurrent() {
        return true;
    }
    one.algorithm() == other.algorithm()
        && one.period_us() == other.period_us()
        && one.follows_calendar_months() == other.follows_calendar_months()
        && one.calendar_windows() == other.calendar_windows()
}

/// Completes a limit. Defaults that do not apply to its other keys are left out.
pub(super) fn fill_in_limit_defaults(
    written: &RateLimitEntry,
    period: Period,
    sole: bool,
    defaults: &DefaultableKeys,
    options: &CompileOptions,
) -> LimitSpec {
    if written.concurrent.is_some() {
        return complete_concurrent_spec(written, period, sole, defaults, options);
    }
    let own = &written.defaultable;
    let algorithm = own.algorithm.or(defaults.algorithm).map(without_position).unwrap_or_default();
    let properties = algorithm.properties();
    let (own_wait, own_rejected) = (own.max_wait_us.map(without_position), own.count_rejected.map(without_position));
    let can_be_eventual = can_default_be_eventual(written, properties);
    let consistency = own.consistency.or(defaults.consistency.filter(|_| can_be_eventual)).map(without_position);
    let eventual = consistency == Some(ConsistencyWord::Eventual);
    let can_wait = match properties.delay {
        DelayPolicy::Never => false,
        DelayPolicy::IfMaxWait => !eventual,
        DelayPolicy::UntilDeadline => true,
    };
    let can_count_rejected = properties.rejected_hits != RejectedHitsPolicy::NeverCounted && !eventual;
    let (overshoot, window) =
        (resolve_overshoot(written, defaults), resolve_calendar_window(own, defaults, algorithm, period));
    let keys = GlobalScopeInputs {
        algorithm,
        period,
        overshoot,
        has_window: window.is_some(),
        has_ban: written.ban.is_some(),
        has_reservations: written.reservations.is_some(),
    };
    let scope = resolve_global_scope(own, defaults, keys, options);
    let is_global = scope.is_some();
    let can_wait = can_wait && !(is_global && properties.delay == DelayPolicy::IfMaxWait);
    let can_count_rejected = can_count_rejected && !is_global && written.reservations.is_none();
    let default_queue =
        defaults.queue_size.map(without_position).filter(|_| properties.capacity == CapacityRuleKey::QueueSize);
    let default_rejected =
        defaults.count_rejected.map(without_position).filter(|counted| !counted || can_count_rejected);
    LimitSpec {
        bucket_size: written.bucket_size.map(without_position),
        queue_size: own.queue_size.map(without_position).or(default_queue),
        max_wait_us: own_wait.or(defaults.max_wait_us.map(without_position).filter(|_| can_wait)),
        count_rejected: own_rejected.or(default_rejected),
        consistency: eventual.then(|| Consistency::Eventual(overshoot.unwrap_or(Overshoot::DEFAULT))),
        on_store_error: Some(
            own.on_store_error.or(defaults.on_store_error).map_or(options.on_store_error, |spanned| spanned.value),
        ),
        sole,
        scope,
        calendar_months: options.calendar_months,
        window,
        ban: written.ban.map(without_position),
        reservations: written.reservations.map(without_position),
        log_max: options.log_max,
        ..LimitSpec::new(algorithm, written.requests(), period)
    }
}

/// Returns true if a default consistency `eventual` agrees with the limit's own keys.
fn can_default_be_eventual(written: &RateLimitEntry, properties: AlgorithmProperties) -> bool {
    let DefaultableKeys { max_wait_us, count_rejected, .. } = &written.defaultable;
    written.ban.is_none()
        && written.reservations.is_none()
        && properties.can_be_eventual()
        && max_wait_us.map_or(0, without_position) == 0
        && count_rejected.map(without_position) != Some(true)
}

/// Completes a limit of requests at once; `period` is its `max_duration`. Of the defaults, `on_store_error`
/// and `epoch` apply.
fn complete_concurrent_spec(
    written: &RateLimitEntry,
    period: Period,
    sole: bool,
    defaults: &DefaultableKeys,
    options: &CompileOptions,
) -> LimitSpec {
    let own = &written.defaultable;
    // Refused, with the reason.
    let is_global = own.scope.is_some_and(|scope| scope.value == ScopeWord::Global);
    let is_eventual = own.consistency.is_some_and(|consistency| consistency.value == ConsistencyWord::Eventual);
    LimitSpec {
        bucket_size: written.bucket_size.map(without_position),
        queue_size: own.queue_size.map(without_position),
        max_wait_us: own.max_wait_us.map(without_position),
        count_rejected: own.count_rejected.map(without_position),
        consistency: is_eventual.then_some(Consistency::Eventual(Overshoot::DEFAULT)),
        scope: is_global.then(|| Scope::Global(GlobalScope::new(options.regions.unwrap_or(ASSUMED_REGION_COUNT)))),
        on_store_error: Some(
            own.on_store_error.or(defaults.on_store_error).map_or(options.on_store_error, |spanned| spanned.value),
        ),
        sole,
        window: own.window.map(without_position),
        ban: written.ban.map(without_position),
        reservations: written.reservations.map(without_position),
        log_max: options.log_max,
        ..LimitSpec::new(Algorithm::Concurrent, written.concurrent.map_or(0, without_position), period)
    }
}

fn without_position<T>(spanned: Spanned<T>) -> T {
    spanned.value
}

/// Returns the overshoot of a limit. A default in hits is lowered to the hits of the limit.
fn resolve_overshoot(written: &RateLimitEntry, defaults: &DefaultableKeys) -> Option<Overshoot> {
    let default = || match defaults.max_overshoot?.value {
        Overshoot::Hits(hits) => Some(Overshoot::Hits(hits.min(written.requests()).max(1))),
        percent @ Overshoot::MilliPercent(_) => Some(percent),
    };
    written.defaultable.max_overshoot.map(without_position).or_else(default)
}

/// Returns the calendar of a limit. A default that does not apply to the limit's other keys is left out.
fn resolve_calendar_window(
    own: &DefaultableKeys,
    defaults: &DefaultableKeys,
    algorithm: Algorithm,
    period: Period,
) -> Option<WindowSpec> {
    let can_follow = algorithm.properties().follows_calendar && own.global_scope_position().is_none();
    let default = defaults.window.filter(|window| can_follow && window.value.applies_to(period));
    own.window.or(default).map(|spanned| spanned.value)
}

/// Values of a limit on which its global scope depends.
#[derive(Clone, Copy)]
struct GlobalScopeInputs {
    algorithm: Algorithm,
    period: Period,
    overshoot: Option<Overshoot>,
    has_window: bool,
    has_ban: bool,
    has_reservations: bool,
}

/// Returns the scope of a limit that all regions share; `None` for another one. A default that cannot be kept with the
/// limit's other keys is left out.
fn resolve_global_scope(
    own: &DefaultableKeys,
    defaults: &DefaultableKeys,
    limit: GlobalScopeInputs,
    options: &CompileOptions,
) -> Option<Scope> {
    let waits = own.max_wait_us.is_some_and(|wait| wait.value > 0);
    let counts_rejected = own.count_rejected.is_some_and(|counted| counted.value);
    let is_calendar_month = options.calendar_months && limit.period.unit() == Unit::Month;
    let follows_calendar = is_calendar_month || limit.has_window;
    let can_be_global = limit.algorithm.can_be_global()
        && !waits
        && !counts_rejected
        && !follows_calendar
        && !limit.has_ban
        && !limit.has_reservations;
    let scope = own.scope.or(defaults.scope.filter(|_| can_be_global))?.value;
    let reserve = own.reserve_milli_percent.or(defaults.reserve_milli_percent);
    let on_region_loss = own.on_region_loss.or(defaults.on_region_loss);
    (scope == ScopeWord::Global).then(|| {
        Scope::Global(GlobalScope {
            max_overshoot: limit.overshoot.unwrap_or(Overshoot::DEFAULT),
            reserve_milli_percent: reserve.map_or(GlobalScope::DEFAULT_RESERVE_MILLI_PERCENT, |spanned| spanned.value),
            on_region_loss: on_region_loss.map(|spanned| spanned.value).unwrap_or_default(),
            regions: options.regions.unwrap_or(ASSUMED_REGION_COUNT),
        })
    })
}

/// Applies the defaults to the limits of a rule; warns about those that are left out.
pub(super) fn apply_rule_defaults(
    reader: &mut DocumentReader<'_>,
    entries: &mut [CompiledLimitEntry<'_>],
    scope: &DomainSettings<'_>,
    field_path: &FieldPath<'_>,
) {
    if scope.layers.has_no_defaults() {
        return;
    }
    for index in 0..entries.len() {
        // Candidates share no counter.
        let candidate = entries[index].limit.candidate;
        let others =
            entries.iter().enumerate().filter(|(at, other)| *at != index && !candidate && !other.limit.candidate);
        let others: Vec<Limit> = others.map(|(_, other)| other.limit.limit).collect();
        let CompiledLimitEntry { limit, written, sole } = &mut entries[index];
        let mut completion = DefaultedLimit::from_written(written, &limit.limit, *sole, scope);
        completion.others = others;
        for layer in scope.layers.layers_for_unit(Some(limit.limit.period().unit())) {
            completion.try_default_layer(layer);
        }
        completion.record_unused_defaults();
        let field_path = written.index.map_or(*field_path, |index| field_path.with_index(index));
        for LeftOutDefault { key, at, reason } in completion.left_out {
            let Position { line, column } = at;
            let text =
                format!("the default `{key}` of {}:{line}:{column} is left out: {reason}", scope.layers.file_name());
            reader.report_warning(written.at, &field_path, text.clone(), "");
            limit.left_out_defaults.push(text);
        }
        limit.limit = completion.limit;
        limit.epoch = completion.keys.epoch.map_or(0, |epoch| epoch.value);
    }
}

/// A default that is not applied.
struct LeftOutDefault {
    /// The key, with its value if that is a word.
    key: String,
    /// Its position in the file of defaults.
    at: Position,
    reason: String,
}

/// A limit to which defaults are added.
struct DefaultedLimit<'s> {
    written: &'s RateLimitEntry,
    options: &'s CompileOptions,
    sole: bool,
    /// Keys of the limit itself and of the `defaults` of its rule file, then accepted defaults.
    keys: DefaultableKeys,
    /// Keys that are accepted defaults.
    accepted: DefaultableKeys,
    spec: LimitSpec,
    limit: Limit,
    /// Other limits of the descriptor.
    others: Vec<Limit>,
    left_out: Vec<LeftOutDefault>,
}

impl<'s> DefaultedLimit<'s> {
    fn from_written(written: &'s RateLimitEntry, limit: &Limit, sole: bool, scope: &DomainSettings<'s>) -> Self {
        let keys = written.defaultable.clone().with_fallback(scope.rule_file_defaults());
        let spec = fill_in_limit_defaults(written, limit.period(), sole, &keys, scope.options);
        Self {
            written,
            options: scope.options,
            sole,
            keys,
            accepted: DefaultableKeys::NONE,
            spec,
            limit: *limit,
            others: Vec::new(),
            left_out: Vec::new(),
        }
    }

    fn try_default_layer(&mut self, layer: &DefaultableKeys) {
        for key in DefaultableKey::ALL {
            let Some(at) = layer.key_position(key).filter(|_| self.keys.key_position(key).is_none()) else { continue };
            let mut keys = self.keys.clone();
            keys.copy_key(key, layer);
            let spec = fill_in_limit_defaults(self.written, self.limit.period(), self.sole, &keys, self.options);
            match self.build_limit_if_valid(&spec) {
                Ok(limit) => {
                    (self.keys, self.spec, self.limit) = (keys, spec, limit);
                    self.accepted.copy_key(key, layer);
                }
                Err(reason) => self.left_out.push(LeftOutDefault { key: layer.describe_key(key), at, reason }),
            }
        }
    }

    /// Returns the limit with one more default, or the reason why it cannot have that default.
    fn build_limit_if_valid(&self, spec: &LimitSpec) -> Result<Limit, String> {
        if let Some(key) = find_key_without_effect(&self.spec, spec) {
            return Err(format!("it contradicts `{key}`, which takes precedence"));
        }
        if self.options.memcache && memcache::needs_more_than_increment(spec) {
            return Err("BACKEND_TYPE=memcache counts only fixed windows with their rejected hits".to_owned());
        }
        let limit = Limit::new(spec).map_err(|error| error.to_string())?;
        if !has_same_counter(&limit, &self.limit) && self.others.iter().any(|other| has_same_counter(&limit, other)) {
            return Err("another limit of the descriptor has this algorithm and period".to_owned());
        }
        Ok(limit)
    }

    /// Adds to `left_out` the accepted defaults that another key disables, but not those for other algorithms.
    fn record_unused_defaults(&mut self) {
        let properties = self.spec.algorithm.properties();
        let mut unused = Vec::new();
        if let Some(at) = self.accepted.eventual_consistency_position()
            && self.spec.consistency.is_none()
        {
            let eventual_spec = LimitSpec { consistency: Some(Consistency::Eventual(Overshoot::DEFAULT)), ..self.spec };
            let reason = Limit::new(&eventual_spec).err().map(|error| error.to_string()).unwrap_or_default();
            unused.push(LeftOutDefault { key: "consistency: eventual".to_owned(), at, reason });
        }
        if let Some(at) = self.accepted.global_scope_position()
            && self.spec.scope.is_none()
        {
            let scope = Some(Scope::Global(GlobalScope::new(ASSUMED_REGION_COUNT)));
            let reason = Limit::new(&LimitSpec { scope, ..self.spec }).err();
            let reason = reason.map(|error| error.to_string()).unwrap_or_default();
            unused.push(LeftOutDefault { key: "scope: global".to_owned(), at, reason });
        }
        let contradicted = if self.spec.scope.is_some() { "scope: global" } else { "consistency: eventual" };
        let contradiction = |key: &str, at| {
            let reason = format!("it contradicts `{contradicted}`");
            LeftOutDefault { key: key.to_owned(), at, reason }
        };
        if let Some(wait) = self.accepted.max_wait_us.filter(|wait| wait.value > 0)
            && self.spec.max_wait_us.is_none()
            && properties.delay == DelayPolicy::IfMaxWait
        {
            unused.push(contradiction("max_wait", wait.at));
        }
        if let Some(counted) = self.accepted.count_rejected.filter(|counted| counted.value)
            && self.spec.count_rejected.is_none()
            && properties.rejected_hits != RejectedHitsPolicy::NeverCounted
        {
            unused.push(contradiction("count_rejected: true", counted.at));
        }
        if let Some(window) = self.accepted.window
            && self.spec.window.is_none()
            && properties.follows_calendar
        {
            let reason = Limit::new(&LimitSpec { window: Some(window.value), ..self.spec }).err();
            let reason = reason.map(|error| error.to_string()).unwrap_or_default();
            unused.push(LeftOutDefault { key: "window".to_owned(), at: window.at, reason });
        }
        self.left_out.extend(unused);
    }
}

/// Returns the name of a key that has an effect in `before` but no longer in `after`, if there is one.
fn find_key_without_effect(before: &LimitSpec, after: &LimitSpec) -> Option<&'static str> {
    let lost = [
        ("window", before.window.is_some() && after.window.is_none()),
        ("queue_size", before.queue_size.is_some() && after.queue_size.is_none()),
        ("max_wait", before.max_wait_us.is_some() && after.max_wait_us.is_none()),
        ("count_rejected", before.count_rejected.is_some() && after.count_rejected.is_none()),
        ("scope: global", before.scope.is_some() && after.scope.is_none()),
        ("consistency: eventual", before.consistency.is_some() && after.consistency.is_none()),
    ];
    lost.into_iter().find(|(_, is_lost)| *is_lost).map(|(key, _)| key)
}

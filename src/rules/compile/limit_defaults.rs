//! One limit as written, completed by the defaults that apply to it: those of its domain, and those of
//! `TOLLKEEPER_RULE_DEFAULTS`.
//!
//! A limit is valid without the defaults of `TOLLKEEPER_RULE_DEFAULTS`. Each of them is tried, those with precedence
//! first. One that would make the limit invalid, or undo a key with precedence, is left out with a warning. So no
//! default makes a rule invalid.
//!
//! Decides: which default of a limit wins: the rule, its domain, `TOLLKEEPER_RULE_DEFAULTS`, the environment.
//! Decides: which algorithm and values a limit has if none is named.

use std::borrow::Cow;
use std::cell::RefCell;
use std::num::NonZeroU16;

use super::match_pattern::ExpressionWork;
use super::memcache;
use super::options::CompileOptions;
use crate::limit::algorithm::{Algorithm, CapacityRuleKey, DelayPolicy, RejectedHitsPolicy};
use crate::limit::charge::clamp_to_u32;
use crate::limit::overflow::ChainPosition;
use crate::limit::period::Period;
use crate::limit::{Consistency, GlobalScope, Limit, LimitError, LimitSpec, Overshoot, Scope};
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

/// A limit with the keys that it was compiled from.
pub(super) struct CompiledLimitEntry<'w> {
    pub(super) limit: RuleLimit,
    pub(super) written: &'w RateLimitEntry,
    pub(super) keys: LimitKeys<'w>,
}

/// `max_duration` of a concurrent limit that has none, in microseconds: 1 h.
pub(super) const DEFAULT_CONCURRENT_MAX_DURATION_US: u64 = 3_600_000_000;

/// Returns `true` if two limits of one descriptor would share a counter.
pub(super) fn has_same_counter(one: &Limit, other: &Limit) -> bool {
    if one.is_concurrent() && other.is_concurrent() {
        return true;
    }
    one.chain_position().takes_overflow() == other.chain_position().takes_overflow()
        && one.algorithm() == other.algorithm()
        && one.period_us() == other.period_us()
        && one.follows_calendar_months() == other.follows_calendar_months()
        && one.calendar_windows() == other.calendar_windows()
}

/// Place of a limit in its rule.
#[derive(Clone, Copy)]
pub(super) struct PlaceInRule {
    /// It is the only one that decides, or a candidate.
    pub(super) sole: bool,
    /// Its place among limits that overflow into each other.
    pub(super) chain_position: ChainPosition,
}

/// The keys of a limit: its own, and the defaults that it has.
///
/// [`Limit::new`] is the judge of what can stand together: a default is tried, and kept if the limit is valid with it.
pub(super) struct LimitKeys<'w> {
    /// The limit as written, without keys that were reported.
    written: Cow<'w, RateLimitEntry>,
    /// Accepted defaults, for keys that are not written. One that does not apply to the algorithm has no effect.
    defaults: DefaultableKeys,
    period: Period,
    sole: bool,
    chain_position: ChainPosition,
    options: &'w CompileOptions,
}

impl<'w> LimitKeys<'w> {
    /// Keys of a limit, with `algorithm` of the rule file's defaults, against which its own keys are checked.
    pub(super) fn new(
        written: &'w RateLimitEntry,
        period: Period,
        place: PlaceInRule,
        scope: &DomainSettings<'w>,
    ) -> Self {
        let defaults = DefaultableKeys { algorithm: scope.rule_file_defaults().algorithm, ..DefaultableKeys::NONE };
        let PlaceInRule { sole, chain_position } = place;
        Self { written: Cow::Borrowed(written), defaults, period, sole, chain_position, options: scope.options }
    }

    /// `epoch` of the limit.
    pub(super) fn epoch(&self) -> u64 {
        self.written.defaultable.epoch.or(self.defaults.epoch).map_or(0, |epoch| epoch.value)
    }

    /// Returns the limit with these keys. `region_if_too_small`: a global limit that is too small for its reserve becomes
    /// one of its region, as `scope: global` has no effect without regions.
    ///
    /// # Errors
    /// Keys contradict each other, or the limit is too small or too large for them.
    pub(super) fn build_limit(&self, region_if_too_small: bool) -> Result<Limit, LimitError> {
        let spec = self.resolve_spec();
        match Limit::new(&spec) {
            Err(LimitError::ReserveTooSmall { .. }) if region_if_too_small => {
                Limit::new(&LimitSpec { scope: Some(Scope::Region), ..spec })
            }
            result => result,
        }
    }

    /// Adds the defaults of the rule file that the limit can have; skips those that contradict its other keys. A limit
    /// that is too small or too large for its defaults stays so, for the caller to report.
    pub(super) fn add_rule_file_defaults(&mut self, defaults: &DefaultableKeys) {
        // Here `window` takes precedence over `scope: global`, which contradicts it.
        for key in [DefaultableKey::Window].into_iter().chain(DefaultableKey::ALL) {
            let contradicts = |error: LimitError| {
                !matches!(
                    error,
                    LimitError::ReserveTooSmall { .. } | LimitError::LogTooLong { .. } | LimitError::Zero { .. }
                )
            };
            if let Some(with) = self.with_default(key, defaults)
                && !Limit::new(&with.resolve_spec()).is_err_and(contradicts)
            {
                *self = with;
            }
        }
    }

    /// Returns the keys with one more default; `None` if `from` does not have it, or the limit has the key.
    fn with_default(&self, key: DefaultableKey, from: &DefaultableKeys) -> Option<Self> {
        from.key_position(key)?;
        if self.written.defaultable.key_position(key).or(self.defaults.key_position(key)).is_some() {
            return None;
        }
        let mut defaults = self.defaults.clone();
        defaults.copy_key(key, from);
        Some(Self { written: self.written.clone(), defaults, ..*self })
    }

    /// Clears a key of the limit that was reported, or its default; returns `false` if there is none.
    pub(super) fn clear_key(&mut self, key: &str) -> bool {
        let written = self.written.to_mut();
        match key {
            "bucket_size" => written.bucket_size.take().is_some(),
            "ban" => written.ban.take().is_some(),
            "reservations" => written.reservations.take().is_some(),
            "overflow_to" => std::mem::take(&mut self.chain_position) != ChainPosition::NotInChain,
            _ => DefaultableKey::from_name(key).is_some_and(|key| {
                let had = written.defaultable.key_position(key).or(self.defaults.key_position(key)).is_some();
                written.defaultable.copy_key(key, &DefaultableKeys::NONE);
                self.defaults.copy_key(key, &DefaultableKeys::NONE);
                had
            }),
        }
    }

    /// The limit with these keys, valid or not: a default that does not apply to the algorithm has no effect.
    pub(super) fn resolve_spec(&self) -> LimitSpec {
        let (written, own, given, options) = (&*self.written, &self.written.defaultable, &self.defaults, self.options);
        let algorithm = match written.concurrent {
            None => own.algorithm.or(given.algorithm).map(without_position).unwrap_or_default(),
            Some(_) => Algorithm::Concurrent,
        };
        let properties = algorithm.properties();
        let has_queue = properties.capacity == CapacityRuleKey::QueueSize;
        let can_count = properties.rejected_hits != RejectedHitsPolicy::NeverCounted;
        let given_queue = given.queue_size.filter(|_| has_queue);
        let given_wait = given.max_wait_us.filter(|_| properties.delay != DelayPolicy::Never);
        let given_count = given.count_rejected.filter(|counted| !counted.value || can_count);
        let given_window = given.window.filter(|_| properties.follows_calendar);
        let overshoot = self.overshoot();
        let is_eventual =
            own.consistency.or(given.consistency).is_some_and(|key| key.value == ConsistencyWord::Eventual);
        let is_global = own.scope.or(given.scope).is_some_and(|key| key.value == ScopeWord::Global);
        let reserve = own.reserve_milli_percent.or(given.reserve_milli_percent).map(without_position);
        let on_region_loss = own.on_region_loss.or(given.on_region_loss).map(without_position);
        let on_store_error = own.on_store_error.or(given.on_store_error).map(without_position);
        LimitSpec {
            bucket_size: written.bucket_size.map(without_position),
            queue_size: own.queue_size.or(given_queue).map(without_position),
            max_wait_us: own.max_wait_us.or(given_wait).map(without_position),
            count_rejected: own.count_rejected.or(given_count).map(without_position),
            consistency: is_eventual.then_some(Consistency::Eventual(overshoot)),
            scope: is_global.then(|| {
                Scope::Global(GlobalScope {
                    max_overshoot: overshoot,
                    reserve_milli_percent: reserve.unwrap_or(GlobalScope::DEFAULT_RESERVE_MILLI_PERCENT),
                    on_region_loss: on_region_loss.unwrap_or_default(),
                    regions: options.regions.unwrap_or(ASSUMED_REGION_COUNT),
                })
            }),
            on_store_error: Some(on_store_error.unwrap_or(options.on_store_error)),
            sole: self.sole,
            chain_position: self.chain_position,
            calendar_months: options.calendar_months && written.concurrent.is_none(),
            window: own.window.or(given_window).map(without_position),
            ban: written.ban.map(without_position),
            reservations: written.reservations.map(without_position),
            log_max: options.log_max,
            ..LimitSpec::new(
                algorithm,
                written.concurrent.map_or(written.requests(), |streams| streams.value.into()),
                self.period,
            )
        }
    }

    /// `max_overshoot` of the limit. A default in hits is lowered to the hits of the limit.
    fn overshoot(&self) -> Overshoot {
        let default = || match self.defaults.max_overshoot?.value {
            Overshoot::Hits(hits) => Some(Overshoot::Hits(hits.min(clamp_to_u32(self.written.requests())).max(1))),
            percent @ Overshoot::MilliPercent(_) => Some(percent),
        };
        let own = self.written.defaultable.max_overshoot.map(without_position);
        own.or_else(default).unwrap_or(Overshoot::DEFAULT)
    }
}

fn without_position<T>(spanned: Spanned<T>) -> T {
    spanned.value
}

/// Applies the defaults of `TOLLKEEPER_RULE_DEFAULTS` to the limits of a rule; warns about those that are left out.
pub(super) fn apply_defaults_file(
    reader: &mut DocumentReader<'_>,
    entries: &mut [CompiledLimitEntry<'_>],
    scope: &DomainSettings<'_>,
    field_path: &FieldPath<'_>,
) {
    if scope.layers.has_no_defaults() {
        return;
    }
    for index in 0..entries.len() {
        let this = &entries[index].limit;
        let others =
            entries.iter().enumerate().filter(|(at, other)| *at != index && this.can_share_counter(&other.limit));
        let others: Vec<Limit> = others.map(|(_, other)| other.limit.limit).collect();
        let CompiledLimitEntry { limit, written, keys } = &mut entries[index];
        let field_path = written.index.map_or(*field_path, |index| field_path.with_index(index));
        for layer in scope.layers.layers_for_unit(Some(limit.limit.period().unit())) {
            for key in DefaultableKey::ALL {
                let Some(with) = keys.with_default(key, layer) else { continue };
                match build_limit_with_default(keys, &with, &limit.limit, &others) {
                    Ok(built) => (*keys, limit.limit) = (with, built),
                    Err(reason) => {
                        let Position { line, column } = layer.key_position(key).unwrap_or_default();
                        let text = format!(
                            "the default `{}` of {}:{line}:{column} is left out: {reason}",
                            layer.describe_key(key),
                            scope.layers.file_name()
                        );
                        reader.report_warning(written.at, &field_path, text.clone(), "");
                        limit.left_out_defaults.push(text);
                    }
                }
            }
        }
        limit.epoch = keys.epoch();
    }
}

/// Returns the limit of `with`, which has one default more than `keys` and the limit `before`, or the reason why it
/// cannot have that default.
fn build_limit_with_default(
    keys: &LimitKeys<'_>,
    with: &LimitKeys<'_>,
    before: &Limit,
    others: &[Limit],
) -> Result<Limit, String> {
    let (former, spec) = (keys.resolve_spec(), with.resolve_spec());
    if let Some(key) = find_key_losing_effect(&former, &spec) {
        return Err(format!("it contradicts `{key}`, which takes precedence"));
    }
    let needs_more = memcache::needs_more_than_increment;
    if keys.options.memcache && needs_more(&spec) && !needs_more(&former) {
        return Err("BACKEND_TYPE=memcache counts only fixed windows with their rejected hits".to_owned());
    }
    let was_too_small = matches!(Limit::new(&former), Err(LimitError::ReserveTooSmall { .. }));
    let limit = with.build_limit(was_too_small).map_err(|error| error.to_string())?;
    if !has_same_counter(&limit, before) && others.iter().any(|other| has_same_counter(&limit, other)) {
        return Err("another limit of the descriptor has this algorithm and period".to_owned());
    }
    Ok(limit)
}

/// Returns the name of a key that has an effect in `before` but no longer in `after`, if there is one: a default that
/// does not apply to the algorithm of `after`.
fn find_key_losing_effect(before: &LimitSpec, after: &LimitSpec) -> Option<&'static str> {
    let lost = [
        ("window", before.window.is_some() && after.window.is_none()),
        ("queue_size", before.queue_size.is_some() && after.queue_size.is_none()),
        ("max_wait", before.max_wait_us.is_some() && after.max_wait_us.is_none()),
        ("count_rejected", before.count_rejected.is_some() && after.count_rejected.is_none()),
    ];
    lost.into_iter().find(|(_, is_lost)| *is_lost).map(|(key, _)| key)
}

//! Applies the defaults of `TOLLKEEPER_RULE_DEFAULTS` to the limits of one rule.
//!
//! The limits are valid without them. Each default is tried, those with precedence first. One that would make a limit
//! invalid, or undo a key with precedence, is left out with a warning. So no default makes a rule invalid.

use super::limit_spec::{
    ASSUMED_REGION_COUNT, CompiledLimitEntry, DomainSettings, fill_in_limit_defaults, has_same_counter,
};
use super::memcache;
use super::options::CompileOptions;
use crate::limit::algorithm::{DelayPolicy, RejectedHitsPolicy};
use crate::limit::{Consistency, GlobalScope, Limit, LimitSpec, Overshoot, Scope};
use crate::rules::document::RateLimitEntry;
use crate::rules::document::defaults::{DefaultableKey, DefaultableKeys};
use crate::rules::document::fields::{DocumentReader, FieldPath};
use crate::rules::yaml::Position;

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

/// Keys in the order in which their defaults are tried: all but the two of the body of a rejection, which fits any
/// limit.
const KEYS_IN_DEFAULTING_ORDER: [DefaultableKey; DefaultableKey::ALL.len() - 2] = [
    DefaultableKey::Algorithm,
    DefaultableKey::Consistency,
    DefaultableKey::Scope,
    DefaultableKey::Reserve,
    DefaultableKey::OnRegionLoss,
    DefaultableKey::MaxOvershoot,
    DefaultableKey::Window,
    DefaultableKey::QueueSize,
    DefaultableKey::MaxWait,
    DefaultableKey::CountRejected,
    DefaultableKey::OnStoreError,
    DefaultableKey::Epoch,
];

/// Returns the name of a key, with its value if that is a word.
fn describe_key(key: DefaultableKey, keys: &DefaultableKeys) -> String {
    let word = match key {
        DefaultableKey::Algorithm => keys.algorithm.map(|it| it.value.name()),
        DefaultableKey::Consistency => keys.consistency.map(|it| it.value.name()),
        DefaultableKey::Scope => keys.scope.map(|it| it.value.name()),
        DefaultableKey::OnRegionLoss => keys.on_region_loss.map(|it| it.value.name()),
        DefaultableKey::OnStoreError => keys.on_store_error.map(|it| it.value.name()),
        DefaultableKey::CountRejected => keys.count_rejected.map(|it| if it.value { "true" } else { "false" }),
        DefaultableKey::Window
        | DefaultableKey::QueueSize
        | DefaultableKey::MaxWait
        | DefaultableKey::MaxOvershoot
        | DefaultableKey::Reserve
        | DefaultableKey::Epoch
        | DefaultableKey::OverLimitBody
        | DefaultableKey::OverLimitContentType => None,
    };
    word.map_or_else(|| key.name().to_owned(), |word| format!("{}: {word}", key.name()))
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
        for key in KEYS_IN_DEFAULTING_ORDER {
            let Some(at) = layer.key_position(key).filter(|_| self.keys.key_position(key).is_none()) else { continue };
            let mut keys = self.keys.clone();
            keys.copy_key(key, layer);
            let spec = fill_in_limit_defaults(self.written, self.limit.period(), self.sole, &keys, self.options);
            match self.build_limit_if_valid(&spec) {
                Ok(limit) => {
                    (self.keys, self.spec, self.limit) = (keys, spec, limit);
                    self.accepted.copy_key(key, layer);
                }
                Err(reason) => self.left_out.push(LeftOutDefault { key: describe_key(key, layer), at, reason }),
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

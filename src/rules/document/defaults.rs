//! The keys that a limit and `defaults` can both have, and contradictions within `defaults`.
//!
//! A new row does not build until `convert_override_defaults` handles it, for limits that are sent with requests. What
//! the key means for a limit is for `compile::limit_defaults` to say.
//!
//! Decides: which keys `defaults` may have, and which of them contradict each other (`check_defaults`).

use std::sync::Arc;

use super::fields::{DocumentReader, FieldPath};
use super::keys::{ReadField as _, ReadValue as _, rule_keys};
use super::rejection::RejectionKeys;
use crate::base::named_enum::named_enum;
use crate::limit::algorithm::Algorithm;
use crate::limit::window::WindowSpec;
use crate::limit::{Overshoot, RegionLossPolicy, StoreFailurePolicy};
use crate::rules::key_table::{ConsistencyWord, MAX_EPOCH, ScopeWord};
use crate::rules::rule::RejectionHeaders;
use crate::rules::rule::rejection_body::{RejectionBody, RejectionFormat};
use crate::rules::yaml::{Position, Spanned};

/// Declares the keys: the variant of each before its row.
macro_rules! defaultable_keys {
    (
        $(#[$attribute:meta])*
        $(
            $variant:ident $key:literal $field:ident $(in [$($only:ident),+])?: $type:ty
            $(as $kind:ident $(($($bound:expr),+))?)? $(= $default:literal)?, $doc:literal;
        )+
    ) => {
        rule_keys! {
            $(#[$attribute])*
            #[derive(Clone, Debug, Default)]
            pub struct DefaultableKeys of [Defaults, RateLimit, Limit, DomainDefaults] {
                $(
                    tollkeeper $key $field $(in [$($only),+])?: Option<Spanned<$type>>
                    $(as $kind $(($($bound),+))?)? $(= $default)?, $doc;
                )+
            }
        }

        named_enum! {
            /// A key that a limit and `defaults` can both have.
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub enum DefaultableKey {
                $(#[doc = concat!("`", $key, "`.")] $variant = $key,)+
            }
        }

        impl DefaultableKeys {
            /// No keys.
            pub const NONE: Self = Self { $($field: None,)+ };

            /// Returns `true` if both have the same keys with the same values, at any position.
            pub fn has_same_values(&self, other: &Self) -> bool {
                fn is_same_value<T: PartialEq>(one: Option<&Spanned<T>>, other: Option<&Spanned<T>>) -> bool {
                    one.map(|spanned| &spanned.value) == other.map(|spanned| &spanned.value)
                }
                true $(&& is_same_value(self.$field.as_ref(), other.$field.as_ref()))+
            }

            /// Returns these keys, and those of `lower` that are not written here.
            pub fn with_fallback(self, lower: &Self) -> Self {
                Self { $($field: self.$field.or_else(|| Clone::clone(&lower.$field)),)+ }
            }

            /// Returns the position of a key; `None` if it is not written.
            pub fn key_position(&self, key: DefaultableKey) -> Option<Position> {
                match key {
                    $(DefaultableKey::$variant => self.$field.position(),)+
                }
            }

            /// Sets a key to what it is in `from`.
            pub fn copy_key(&mut self, key: DefaultableKey, from: &Self) {
                match key {
                    $(DefaultableKey::$variant => self.$field.clone_from(&from.$field),)+
                }
            }

            /// Returns the name of a key, with its value if that is a word.
            pub fn describe_key(&self, key: DefaultableKey) -> String {
                let word = match key {
                    $(DefaultableKey::$variant => self.$field.as_ref().and_then(|spanned| spanned.value.fixed_word()),)+
                };
                word.map_or_else(|| key.name().to_owned(), |word| format!("{}: {word}", key.name()))
            }
        }
    };
}

defaultable_keys! {
    /// Keys that a limit and `defaults` can both have; those of `defaults` are for limits without them. They are in the
    /// order in which defaults are tried: an earlier one may exclude a later one. Those of a rule file try `window` first.
    Algorithm "algorithm" algorithm: Algorithm = "fixed_window", "Algorithm that counts hits.";
    Consistency "consistency" consistency: ConsistencyWord = "strict",
        "strict: every hit is counted in the store before it is admitted. eventual: answered from this process, within max_overshoot.";
    Scope "scope" scope: ScopeWord = "region",
        "region: each region has the limit for itself. global: all regions (TOLLKEEPER_REGIONS) have it together, within max_overshoot.";
    Reserve "reserve" reserve_milli_percent: u32 as Percentage(1) = "10%",
        "scope: global only: part of the limit that is split evenly over the regions in advance, for keys that are new to a region.";
    OnRegionLoss "on_region_loss" on_region_loss: RegionLossPolicy = "share",
        "scope: global only: hits of a region that is cut off, once its grants are used: share (its part of max_overshoot), local (limit / regions), deny, or allow.";
    MaxOvershoot "max_overshoot" max_overshoot: Overshoot = "5%",
        "eventual or global only: maximum that all replicas, or all regions, together admit over the limit in any period, as a percentage of it or as hits.";
    Window "window" window: WindowSpec,
        "fixed_window only: its windows follow the calendar of a time zone. Without the key they have the length of the period, counted from 1970 in UTC.";
    QueueSize "queue_size" queue_size: u32 as Count(1, u32::MAX as u64) = "1",
        "leaky_bucket: requests in the bucket at once, including the one that leaves; 1: no request waits.";
    MaxWait "max_wait" max_wait_us: u64 as Duration,
        "leaky_bucket, token_bucket: maximum delay of an answer. If absent: leaky_bucket up to the caller's deadline, token_bucket 0.";
    CountRejected "count_rejected" count_rejected: bool,
        "Counts rejected hits too. If absent: true for a single strict fixed_window, else false. Not for leaky_bucket.";
    OnStoreError "on_store_error" on_store_error: StoreFailurePolicy = "local",
        "Answer while the store fails: local (limit within this process), allow, deny, or error. TOLLKEEPER_ON_STORE_ERROR changes the default.";
    Epoch "epoch" epoch: u64 as Count(0, MAX_EPOCH) = "0",
        "Part of the counter's key: raising it resets the counters at once.";
    OverLimitBody "over_limit_body" over_limit_body in [Defaults, RateLimit, DomainDefaults]: RejectionBody,
        "Body of a rejection, 64 KiB at most. It can have %LIMIT_NAME%, %LIMIT%, %REMAINING%, %RETRY_AFTER% (seconds) and %RETRY_AT%.";
    OverLimitContentType "over_limit_content_type" over_limit_content_type in [Defaults, RateLimit, DomainDefaults]: Arc<str> as ContentType,
        "Content type of over_limit_body.";
    OverLimitFormat "over_limit_format" over_limit_format in [Defaults, RateLimit, DomainDefaults]: RejectionFormat,
        "Body and content type of a rejection as in a well-known API, in place of over_limit_body.";
    OverLimitHeaders "over_limit_headers" over_limit_headers in [Defaults, RateLimit, DomainDefaults]: Arc<RejectionHeaders>,
        "Headers of a rejection, 16 at most: a mapping from names to values.";
    Jitter "jitter" jitter in [Defaults, RateLimit, DomainDefaults]: u32 as Percentage(0),
        "Random addition to the Retry-After of a rejection: at most this percentage of the wait, rounded up to whole seconds. If absent: none.";
}

impl DefaultableKeys {
    /// Position of `consistency: eventual`; `None` if it is not written.
    pub fn eventual_consistency_position(&self) -> Option<Position> {
        self.consistency.filter(|consistency| consistency.value == ConsistencyWord::Eventual).map(|it| it.at)
    }

    /// Keys of what a rejection tells.
    pub fn rejection_keys(&self) -> RejectionKeys<'_> {
        RejectionKeys {
            body: self.over_limit_body.as_ref(),
            content_type: self.over_limit_content_type.as_ref(),
            format: self.over_limit_format.as_ref(),
            headers: self.over_limit_headers.as_ref(),
            jitter: self.jitter.as_ref(),
        }
    }

    /// Position of `scope: global`; `None` if it is not written.
    pub fn global_scope_position(&self) -> Option<Position> {
        self.scope.filter(|scope| scope.value == ScopeWord::Global).map(|it| it.at)
    }
}

/// Reports contradictions within `defaults`.
pub fn check_defaults(reader: &mut DocumentReader<'_>, settings: &DefaultableKeys, field_path: &FieldPath<'_>) {
    let eventual_at = settings.eventual_consistency_position();
    let strict = settings.consistency.is_some() && eventual_at.is_none() && settings.global_scope_position().is_none();
    if let Some(overshoot) = settings.max_overshoot.filter(|_| strict) {
        let message = "`max_overshoot` without `consistency: eventual`";
        reader.report_error(
            overshoot.at,
            &field_path.with_key("max_overshoot"),
            message,
            "a strict limit is never exceeded; remove one",
        );
    }
    settings.rejection_keys().report_keys_beside_format(reader, field_path);
    check_window_defaults(reader, settings, field_path);
    check_global_scope_defaults(reader, settings, field_path);
    let Some(eventual_at) = eventual_at else { return };
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
        reader.report_error(
            eventual_at,
            &field_path.with_key("consistency"),
            message,
            "set one of them in the rules instead",
        );
    }
}

/// Reports a `window` that no limit can have, because the algorithm of `defaults` has none.
fn check_window_defaults(reader: &mut DocumentReader<'_>, settings: &DefaultableKeys, field_path: &FieldPath<'_>) {
    let algorithm = settings.algorithm.map(|spanned| spanned.value);
    if let (Some(window), Some(algorithm)) = (settings.window, algorithm)
        && !algorithm.properties().follows_calendar
    {
        let message = format!("`window` does not apply to {algorithm}");
        reader.report_error(window.at, &field_path.with_key("window"), message, "set one of them in the rules instead");
    }
}

/// Reports a default `algorithm` that cannot be combined with a default of `scope: global`.
fn check_global_scope_defaults(
    reader: &mut DocumentReader<'_>,
    settings: &DefaultableKeys,
    field_path: &FieldPath<'_>,
) {
    let Some(global_at) = settings.global_scope_position() else { return };
    let algorithm = settings.algorithm.map(|spanned| spanned.value);
    if let Some(with) = algorithm.filter(|algorithm| !algorithm.can_be_global()).map(Algorithm::name) {
        let message = format!("`scope: global` cannot be kept with {with}");
        reader.report_error(global_at, &field_path.with_key("scope"), message, "set one of them in the rules instead");
    }
}

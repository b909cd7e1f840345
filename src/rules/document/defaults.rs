//! The table of keys that a limit and `defaults` can both have, and contradictions within `defaults`.
//!
//! A new key is a row of this table and of [that of all keys](crate::rules::key_table). The compiler then asks for the
//! reader of its value (`read`), its place among the defaults that are tried (`compile::rule_defaults`), and its value
//! for limits of requests (`compile::limit`). What it means for a limit is for `compile::limit_defaults` to say.
//!
//! Decides: which keys `defaults` may have, and which of them contradict each other (`check_defaults`).

use std::sync::Arc;

use super::fields::{DocumentReader, FieldPath};
use crate::base::named_enum::named_enum;
use crate::limit::algorithm::Algorithm;
use crate::limit::window::WindowSpec;
use crate::limit::{Overshoot, RegionLossPolicy, StoreFailurePolicy};
use crate::rules::key_table::{ConsistencyWord, ScopeWord};
use crate::rules::yaml::{Position, Spanned};

/// Declares the keys: a row is the variant, the name in rule files, the field, and the type of its value.
macro_rules! defaultable_keys {
    ($($(#[$attribute:meta])* $variant:ident = $name:literal, $field:ident: $type:ty;)+) => {
        named_enum! {
            /// A key that a limit and `defaults` can both have.
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub enum DefaultableKey {
                $(#[doc = concat!("`", $name, "`.")] $variant = $name,)+
            }
        }

        /// Keys that a limit and `defaults` can both have; those of `defaults` are for limits without them.
        #[derive(Clone, Debug, Default)]
        pub struct DefaultableKeys {
            $($(#[$attribute])* pub $field: Option<Spanned<$type>>,)+
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
                    $(DefaultableKey::$variant => self.$field.as_ref().map(|spanned| spanned.at),)+
                }
            }

            /// Sets a key to what it is in `from`.
            pub fn copy_key(&mut self, key: DefaultableKey, from: &Self) {
                match key {
                    $(DefaultableKey::$variant => self.$field.clone_from(&from.$field),)+
                }
            }
        }
    };
}

defaultable_keys! {
    /// `algorithm`.
    Algorithm = "algorithm", algorithm: Algorithm;
    /// `window`.
    Window = "window", window: WindowSpec;
    /// `queue_size`.
    QueueSize = "queue_size", queue_size: u32;
    /// `max_wait`, in microseconds.
    MaxWait = "max_wait", max_wait_us: u64;
    /// `count_rejected`.
    CountRejected = "count_rejected", count_rejected: bool;
    /// `consistency`.
    Consistency = "consistency", consistency: ConsistencyWord;
    /// `max_overshoot`.
    MaxOvershoot = "max_overshoot", max_overshoot: Overshoot;
    /// `scope`.
    Scope = "scope", scope: ScopeWord;
    /// `reserve`, in thousandths of a percent.
    Reserve = "reserve", reserve_milli_percent: u32;
    /// `on_region_loss`.
    OnRegionLoss = "on_region_loss", on_region_loss: RegionLossPolicy;
    /// `on_store_error`.
    OnStoreError = "on_store_error", on_store_error: StoreFailurePolicy;
    /// `epoch`.
    Epoch = "epoch", epoch: u64;
    /// `over_limit_body`; rules share the text.
    OverLimitBody = "over_limit_body", over_limit_body: Arc<str>;
    /// `over_limit_content_type`.
    OverLimitContentType = "over_limit_content_type", over_limit_content_type: Arc<str>;
}

impl DefaultableKeys {
    /// Returns the first written key, in the order of the table.
    pub fn first_written_key(&self) -> Option<Spanned<DefaultableKey>> {
        DefaultableKey::ALL.into_iter().find_map(|key| Some(Spanned { value: key, at: self.key_position(key)? }))
    }

    /// Position of `consistency: eventual`; `None` if it is not written.
    pub fn eventual_consistency_position(&self) -> Option<Position> {
        self.consistency.filter(|consistency| consistency.value == ConsistencyWord::Eventual).map(|it| it.at)
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

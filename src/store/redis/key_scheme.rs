//! Identity of a descriptor's counters: their keys in Redis, and the hashes that stand for them in this process.

use bytes::Bytes;
use smallvec::SmallVec;

use super::eventual::budget::log_extension_us;
use super::key;
use super::script::script_for;
use crate::base::clock::Time;
use crate::limit::Limit;
use crate::limit::counter::{Charge, Counter, Path};
use crate::settings::counters::KeyFormat;
use crate::settings::redis::RedisSettings;
use crate::store::client::redis::script::Script;
use crate::store::window_key::{ExpiryJitter, WindowKey};

/// Spreads a small number over all bits: 2^128 divided by the golden ratio.
const MULTIPLIER: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;

/// Key format, and the settings that belong to it.
#[derive(Debug)]
pub(super) struct KeyScheme {
    prefix: String,
    format: KeyFormat,
    jitter: ExpiryJitter,
    /// True if this Redis is that of a region, which counts global limits from grants.
    is_regional: bool,
}

/// Hashes that identify the counters of a descriptor in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CounterId {
    /// Hash of the set of counters; in the format of envoyproxy/ratelimit of the window too.
    pub(super) counters: u128,
    /// Hash of the path alone, which the fallback counters are keyed by.
    pub(super) path: u128,
}

/// Redis command that counts the hits of a descriptor, and the keys that it works on.
#[derive(Clone, Debug)]
pub(super) enum CountCommand {
    /// EVALSHA of a script on these keys.
    Script {
        /// The script.
        script: &'static Script,
        /// One key for each counter.
        keys: SmallVec<[Bytes; 1]>,
    },
    /// INCRBY, and EXPIRE after it.
    Incrby(WindowKey),
}

impl CountCommand {
    /// Returns the keys of the counters; all have the same hash slot.
    pub(super) fn keys(&self) -> &[Bytes] {
        match self {
            Self::Script { keys, .. } => keys,
            Self::Incrby(window) => std::slice::from_ref(window.key()),
        }
    }
}

impl KeyScheme {
    /// Creates the scheme of a Redis; `is_regional` if it is that of a region.
    pub(super) fn new(settings: &RedisSettings, is_regional: bool) -> Self {
        Self {
            prefix: settings.key_prefix.clone(),
            format: settings.key_format,
            jitter: ExpiryJitter::below(settings.expiration_jitter),
            is_regional,
        }
    }

    /// Returns the limit as this Redis counts it.
    pub(super) fn counted_limit(&self, limit: &Limit) -> Limit {
        let limit = limit.lengthened(log_extension_us(limit));
        if self.is_regional { limit.in_region() } else { limit }
    }

    /// Returns true if this Redis counts a limit of the charge from grants.
    pub(super) fn has_global_limit(&self, charge: &Charge<'_>) -> bool {
        self.is_regional && charge.counters.iter().any(|counter| counter.limit.in_region().is_counted_in_region())
    }

    /// Returns `CACHE_KEY_PREFIX`.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns true if all counters have keys of tollkeeper's own format.
    pub(super) fn is_native(&self) -> bool {
        self.format == KeyFormat::Tollkeeper
    }

    /// Identifies the counters of a charge.
    pub(super) fn counter_id(&self, charge: &Charge<'_>, now: Time) -> CounterId {
        // The log of an eventual limit keeps hits for longer. A call has one period for each counter, so strict and
        // eventual charges on a log are sent apart. So are those under a global limit and under one of the region.
        let tags = charge.counters.iter().fold(0_u128, |tags, Counter { limit, tag, .. }| {
            let mark = log_extension_us(limit) + u64::from(self.is_regional && limit.global_scope().is_some());
            tags.rotate_left(1) ^ tag ^ u128::from(mark).wrapping_mul(MULTIPLIER)
        });
        let window = match self.format {
            KeyFormat::Tollkeeper => 0,
            KeyFormat::Ratelimit => {
                let start_s = WindowKey::start_s(charge, now).unwrap_or(0);
                u128::from(start_s).wrapping_mul(MULTIPLIER)
            }
        };
        CounterId { counters: charge.key ^ tags ^ window, path: charge.key }
    }

    /// Selects the command that counts a charge. The format of envoyproxy/ratelimit has keys for some limits only; all
    /// others use scripts.
    pub(super) fn count_command(&self, charge: &Charge<'_>, now: Time) -> CountCommand {
        let window = match self.format {
            KeyFormat::Tollkeeper => None,
            KeyFormat::Ratelimit => WindowKey::of(&self.prefix, charge, now, self.jitter.random_s()),
        };
        if let Some(window) = window {
            return CountCommand::Incrby(window);
        }
        if !self.has_global_limit(charge) {
            return self.script_command(&charge.path, &charge.counters);
        }
        let limits: SmallVec<[Limit; 2]> =
            charge.counters.iter().map(|counter| self.counted_limit(counter.limit)).collect();
        let counted = |(counter, limit): (&Counter<'_>, _)| Counter { limit, ..*counter };
        let counters: SmallVec<[Counter<'_>; 2]> = charge.counters.iter().zip(&limits).map(counted).collect();
        self.script_command(&charge.path, &counters)
    }

    fn script_command(&self, path: &Path<'_>, counters: &[Counter<'_>]) -> CountCommand {
        CountCommand::Script {
            script: script_for(counters.iter().map(|counter| counter.limit.counting())),
            keys: key::keys(&self.prefix, path, counters),
        }
    }
}

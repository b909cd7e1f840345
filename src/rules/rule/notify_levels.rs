//! Levels of a limit at which `notify` tells that it is used up to there.
//!
//! Decides: how many levels a limit may have (`MAX_NOTIFY_LEVELS`), and the hits of a level.

use std::fmt;
use std::sync::Arc;

use crate::base::text::format_milli_percent;

/// Maximum number of levels of one limit.
pub const MAX_NOTIFY_LEVELS: usize = 8;

/// Levels of a limit, ascending and distinct: 1 to [`MAX_NOTIFY_LEVELS`] of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotifyLevels(Arc<[NotifyLevel]>);

/// Share of a limit, in thousandths of a percent, 1 % to 100 %.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NotifyLevel {
    /// The share.
    pub milli_percent: u32,
}

impl NotifyLevel {
    /// The whole limit.
    pub const WHOLE: Self = Self { milli_percent: 100_000 };
    /// The smallest level.
    pub const LEAST: Self = Self { milli_percent: 1_000 };

    /// Hits with which a limit of `capacity` hits has reached the level: its share, rounded up, and at least 1.
    pub const fn hits_of(self, capacity: u64) -> u64 {
        let whole = Self::WHOLE.milli_percent as u64;
        let part = self.milli_percent as u64;
        // In two steps, because 2^53 hits times 100 000 exceed 64 bits.
        let hits = capacity / whole * part + (capacity % whole * part).div_ceil(whole);
        if hits == 0 { 1 } else { hits }
    }
}

impl fmt::Display for NotifyLevel {
    /// Writes `80%`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format_milli_percent(self.milli_percent))
    }
}

impl NotifyLevels {
    /// Sorts levels; `None` if there are none, too many, or equal ones.
    pub fn new(mut levels: Vec<NotifyLevel>) -> Option<Self> {
        levels.sort_unstable();
        let are_distinct = levels.windows(2).all(|two| two[0] != two[1]);
        (are_distinct && (1..=MAX_NOTIFY_LEVELS).contains(&levels.len())).then(|| Self(levels.into()))
    }

    /// Levels that `count` hits of a limit of `capacity` hits have reached.
    pub fn reached(&self, capacity: u64, count: u64) -> impl Iterator<Item = NotifyLevel> {
        self.0.iter().copied().take_while(move |level| level.hits_of(capacity) <= count)
    }
}

impl fmt::Display for NotifyLevels {
    /// Writes the value of `notify` in a rule file: `[50%, 80%]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let levels: Vec<_> = self.0.iter().map(NotifyLevel::to_string).collect();
        write!(f, "[{}]", levels.join(", "))
    }
}

//! Max-min fair shares: nobody gets more than it wants while another gets less than an equal part.
//!
//! Water filling: all wants are filled to one level, the highest that the amount allows. What is left when all wants
//! are filled is spread evenly.
//!
//! Decides: the fair part of each proxy (max-min).

/// Result of filling wants from an amount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FillLevel {
    /// Part of a want that is filled, rounded up; `u64::MAX` if all wants are filled.
    pub level: u64,
    /// Amount on top of each want, once all are filled.
    pub spread: u64,
}

/// What the holders of a pool should have.
#[derive(Clone, Copy, Debug, Default)]
pub struct Levels {
    /// Level of all whose wants count: those who may have an assignment from elsewhere wait.
    pub(super) level: FillLevel,
    /// The level if those wait no longer.
    pub(super) level_of_all_holders: FillLevel,
    /// Part of what this replica could hold that it leaves to decisions over RLS.
    pub(super) share_of_decisions: u64,
    /// A holder, another replica or RLS should have more than is free.
    pub(super) is_starved: bool,
    /// Of rates.
    pub(super) buckets: BucketLevels,
}

/// What holders should have of the buckets of rates.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BucketLevels {
    /// Even part of each holder; 0 if it is too small, and buckets follow the refill.
    pub(super) even: u64,
    /// Refill that nobody should have, until the parts that are lacking are full.
    pub(super) refill_kept: u64,
    /// Holders must give up what they have beyond the even part.
    pub(super) are_starved: bool,
    /// Holders are told of small differences too: one has no share, or they have more than there is.
    pub(super) tells_small_differences: bool,
    /// Number of holders without a share, if an even part would be one.
    pub(super) without_part: u64,
}

impl FillLevel {
    /// Fills `wants` from `amount`. Of what is left over, `spread_eighths` of eight parts are spread.
    pub fn fill(amount: u64, wants: &mut [u64], spread_eighths: u64) -> Self {
        wants.sort_unstable();
        let mut left = amount;
        for (index, want) in wants.iter().enumerate() {
            let others = (wants.len() - index) as u64;
            if want.saturating_mul(others) > left {
                return Self { level: left.div_ceil(others), spread: 0 };
            }
            left -= want;
        }
        let spread = (left / 8 * spread_eighths + left % 8 * spread_eighths / 8) / (wants.len() as u64).max(1);
        Self { level: u64::MAX, spread }
    }

    /// Share of a want.
    pub const fn share(self, want: u64) -> u64 {
        if want > self.level { self.level } else { want.saturating_add(self.spread) }
    }

    /// True if a want is not filled.
    pub const fn is_short(self) -> bool {
        self.level != u64::MAX
    }
}

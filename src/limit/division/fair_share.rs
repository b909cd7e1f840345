//! Max-min fair shares: nobody gets more than it wants while another gets less than an equal part.
//!
//! Water filling: all wants are filled to one level, the highest that the amount allows. What is left when all wants
//! are filled is spread evenly.
//!
//! Decides: the fair part of each proxy (max-min).

/// Result of filling wants from an amount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FillLevel {
    /// Part of a want that is filled, rounded up; `u64::MAX` if all wants are filled.
    pub(super) level: u64,
    /// Amount on top of each want, once all are filled.
    pub(super) spread: u64,
}

impl FillLevel {
    /// Fills `wants` from `amount`. Of what is left over, `spread_eighths` of eight parts are spread.
    pub(super) fn fill(amount: u64, wants: &mut [u64], spread_eighths: u64) -> Self {
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
    pub(super) const fn share(self, want: u64) -> u64 {
        if want > self.level { self.level } else { want.saturating_add(self.spread) }
    }

    /// True if a want is not filled.
    pub(super) const fn is_short(self) -> bool {
        self.level != u64::MAX
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn small_wants_are_filled_before_large_ones() {
        let level = FillLevel::fill(50, &mut [44, 8, 3], 7);
        assert_eq!(level, FillLevel { level: 39, spread: 0 });
        assert_eq!([44, 8, 3].map(|want| level.share(want)), [39, 8, 3]);
    }

    #[test]
    fn rest_is_spread_evenly() {
        let level = FillLevel::fill(100, &mut [10, 10], 8);
        assert_eq!(level.share(10), 50);
    }

    proptest! {
        #[test]
        fn shares_exceed_the_amount_by_rounding_only(
            amount in 0..1_000_000_u64, mut wants in prop::collection::vec(0..100_000_u64, 0..50), eighths in 0..=8_u64,
        ) {
            let level = FillLevel::fill(amount, &mut wants, eighths);
            let sum: u64 = wants.iter().map(|want| level.share(*want)).sum();
            prop_assert!(sum < amount + wants.len().max(1) as u64, "{sum} of {amount}");
            if level.is_short() {
                prop_assert!(sum >= amount, "{sum} of {amount} although a want is not filled");
            }
        }
    }
}

//! Max-min shares: small wants are filled first, the rest is spread evenly.

use proptest::prelude::*;
use tollkeeper::limit::division::fair_share::FillLevel;

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

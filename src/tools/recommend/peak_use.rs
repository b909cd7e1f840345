//! Peak use: the most hits of a counter in any span of one period, less refunds.

use super::demand::{ChargeSequence, LimitDemand};
use crate::base::clock::Time;
use crate::limit::request::Hits;

/// Peak use of each sequence, in their order.
pub(super) fn peaks_by_sequence(demand: &LimitDemand, period_us: u64) -> Vec<u64> {
    demand.sequences.iter().map(|sequence| peak(sequence, period_us)).collect()
}

/// Peak use of each key, ascending: the highest of its counters.
pub(super) fn peaks_by_key(demand: &LimitDemand, peaks: &[u64]) -> Vec<u64> {
    let mut by_key = vec![0; demand.keys];
    for (sequence, peak) in demand.sequences.iter().zip(peaks) {
        by_key[sequence.key] = by_key[sequence.key].max(*peak);
    }
    by_key.sort_unstable();
    by_key
}

/// Value at a quantile, by nearest rank; 0 without values.
pub(super) fn quantile(ascending: &[u64], quantile: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within the length")]
    let rank = (quantile * ascending.len() as f64).ceil() as usize;
    ascending.get(rank.max(1) - 1).copied().unwrap_or(0)
}

fn peak(sequence: &ChargeSequence, period_us: u64) -> u64 {
    let signed = |hits: Hits| match hits {
        Hits::Charge(hits) => i128::from(hits),
        Hits::Refund(hits) => -i128::from(hits),
        Hits::Peek => 0,
    };
    let charges = &sequence.charges;
    let (mut oldest, mut sum, mut peak, mut now) = (0, 0, 0, Time::default());
    for (newest, charge) in charges.iter().enumerate() {
        sum += signed(charge.hits);
        // As in the algorithms, time never runs backwards.
        now = now.max(charge.at);
        while oldest < newest && charges[oldest].at.plus_us(period_us) <= now {
            sum -= signed(charges[oldest].hits);
            oldest += 1;
        }
        peak = peak.max(sum);
    }
    u64::try_from(peak).unwrap_or(u64::MAX)
}

//! Sampling of the request path, for statistics that are too costly to keep for each decision.
//!
//! Each thread takes its first [`OBSERVATIONS_BEFORE_SAMPLING`] whole, so that small numbers are exact, and then one of
//! [`SAMPLED_WEIGHT`] at random, so that no pattern of the traffic is missed. Nothing is shared between threads.

use std::cell::Cell;

/// Number of observations of each thread that are all taken.
pub const OBSERVATIONS_BEFORE_SAMPLING: u32 = 1024;

/// Observations that a sampled one stands for.
pub const SAMPLED_WEIGHT: u64 = 16;

/// Statistics that are sampled, each with a number of observations of its own: the few of one are not lost among the
/// many of another.
#[derive(Clone, Copy, Debug)]
pub enum SampledStatistic {
    /// Keys with most hits.
    BusiestKeys,
    /// Descriptors that match no rule.
    UnmatchedDescriptors,
}

thread_local! {
    /// Number of observations of each statistic up to [`OBSERVATIONS_BEFORE_SAMPLING`], and the state of a linear
    /// congruential generator.
    static SAMPLER_STATE: Cell<([u32; 2], u32)> = const { Cell::new(([0; 2], 1)) };
}

/// Returns the number of observations that this one stands for; `None` if it is left out.
pub fn weight_if_sampled(statistic: SampledStatistic) -> Option<u64> {
    SAMPLER_STATE.with(|state| {
        let (mut taken, random) = state.get();
        let own = &mut taken[statistic as usize];
        if *own < OBSERVATIONS_BEFORE_SAMPLING {
            *own += 1;
            state.set((taken, random));
            return Some(1);
        }
        // Constants of Numerical Recipes; the upper bits are the random ones.
        let random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.set((taken, random));
        (random >> 28 == 0).then_some(SAMPLED_WEIGHT)
    })
}

#[cfg(test)]
mod tests {
    use super::SampledStatistic::{BusiestKeys, UnmatchedDescriptors};
    use super::{OBSERVATIONS_BEFORE_SAMPLING, weight_if_sampled};

    #[test]
    fn first_observations_are_taken_and_later_ones_stand_for_as_many_as_there_are() {
        let all = std::thread::spawn(|| {
            let first: u64 = (0..OBSERVATIONS_BEFORE_SAMPLING).filter_map(|_| weight_if_sampled(BusiestKeys)).sum();
            let later: u64 = (0..1_600_000).filter_map(|_| weight_if_sampled(BusiestKeys)).sum();
            // Another statistic has exact observations left.
            assert_eq!(weight_if_sampled(UnmatchedDescriptors), Some(1));
            (first, later)
        });
        let (first, later) = all.join().expect("the thread ends");
        assert_eq!(first, u64::from(OBSERVATIONS_BEFORE_SAMPLING));
        assert!((1_500_000..1_700_000).contains(&later), "{later}");
    }
}

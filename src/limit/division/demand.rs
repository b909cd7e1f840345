//! Demand: hits per second that are asked for, as reports tell it some seconds late.
//!
//! Small differences between samples are noise, and are smoothed. A difference that chance does not explain is a change
//! of the demand, which happened at some time within the sample: so the sample is a mean of the former demand and the
//! new one, and the new one is further away. The sample after it has the new demand alone.
//!
//! Decides: how the demand of a proxy is measured from its reports.

/// Time over which noise is smoothed, in microseconds.
const SMOOTHING_US: u64 = 10_000_000;
/// Largest demand that is recorded, in thousandths of a hit per second.
const MAX_DEMAND_MHPS: u64 = 1 << 50;
/// Standard deviations from which a difference is a change.
const SIGNIFICANT_DEVIATIONS: u64 = 3;

/// Demand of a proxy, or of all who ask over RLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Thousandths of a hit per second.
    pub mhps: u64,
    /// Number of samples, up to 255.
    pub samples: u8,
    /// The last sample showed a change.
    has_changed: bool,
}

impl Demand {
    /// Records that `hits` were asked for in `since_us`.
    pub fn take_sample(&mut self, hits: u64, since_us: u64) {
        let since_us = u128::from(since_us.max(1));
        let measured = saturate_to_u64(u128::from(hits) * 1_000_000_000 / since_us).min(MAX_DEMAND_MHPS);
        let former = self.mhps;
        let expected = saturate_to_u64(u128::from(former) * since_us / 1_000_000_000);
        let deviation = hits.max(expected).max(1).isqrt();
        let is_change = hits.abs_diff(expected) > SIGNIFICANT_DEVIATIONS * deviation;
        self.mhps = match is_change {
            _ if self.samples == 0 => measured,
            true if self.has_changed => measured,
            // The change was in the middle of the sample, or before it if the demand would be nearly 0.
            true if measured > former => measured.saturating_add(measured - former),
            true => measured.saturating_mul(2).saturating_sub(former).max(measured / 4),
            false => {
                let weight = since_us * u128::from(measured) + u128::from(SMOOTHING_US) * u128::from(former);
                saturate_to_u64(weight / (since_us + u128::from(SMOOTHING_US)))
            }
        }
        .min(MAX_DEMAND_MHPS);
        self.has_changed = is_change && !self.has_changed && self.samples > 0;
        self.samples = self.samples.saturating_add(1);
    }

    /// Hits in `span_us`, rounded up.
    pub(super) fn in_span(&self, span_us: u64) -> u64 {
        saturate_to_u64((u128::from(self.mhps) * u128::from(span_us)).div_ceil(1_000_000_000))
    }
}

fn saturate_to_u64(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

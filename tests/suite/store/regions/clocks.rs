//! Clock of the global Redis as a call knows it: true for scripts that run in time, unknown for all others.

use std::time::Duration;

use proptest::prelude::*;
use tokio::time::Instant;
use tollkeeper::limit::algorithm::region::GlobalTimeAndStanding;
use tollkeeper::store::client::redis::server_clock::{InstantRange, OffsetInterval, process_time_us};
use tollkeeper::store::redis::regions::calls::{ClockOffsets, compute_global_view};

fn interval() -> impl Strategy<Value = OffsetInterval> {
    (0..1_i64 << 50, 0..2_000_000_i64).prop_map(|(lo_us, width)| OffsetInterval { lo_us, hi_us: lo_us + width })
}

/// Place of a true offset in its interval.
fn part() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), Just(1.0), 0.0..=1.0]
}

fn fraction_ns() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(999), 0..1000_u64]
}

proptest! {
    #[test]
    fn script_that_runs_in_time_finds_global_time_inside_its_bounds(
        region in interval(),
        global in interval(),
        (call_us, runs_after_us) in (1..10_000_000_u64).prop_flat_map(|call_us| (Just(call_us), prop_oneof![Just(0), Just(call_us), 0..=call_us])),
        parts in (part(), part()),
        fraction_ns in (fraction_ns(), fraction_ns(), fraction_ns()),
    ) {
        let from = Instant::now() + Duration::from_nanos(fraction_ns.0);
        let within = InstantRange { from, until: from + Duration::from_micros(call_us) };
        let clock = compute_global_view(ClockOffsets { region, global }, within);
        // True offsets, in nanoseconds; the clocks show whole microseconds.
        let inside = |interval: OffsetInterval, part: f64, extra_ns: u64| {
            #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "any point inside")]
            let offset_us = interval.lo_us + (part * interval.width_us() as f64) as i64;
            let most_ns = i128::from(interval.hi_us - offset_us) * 1000;
            i128::from(offset_us) * 1000 + i128::from(extra_ns).min(most_ns)
        };
        let runs_at = from + Duration::from_micros(runs_after_us);
        let process_ns = i128::from(process_time_us(runs_at)) * 1000 + i128::from(fraction_ns.0);
        let region_us = (process_ns + inside(region, parts.0, fraction_ns.1)).div_euclid(1000);
        let global_us = (process_ns + inside(global, parts.1, fraction_ns.2)).div_euclid(1000);
        prop_assert!(i128::from(clock.valid_from.as_micros()) <= region_us, "{clock:?} {region_us}");
        prop_assert!(region_us < i128::from(clock.valid_until.as_micros()), "{clock:?} {region_us}");
        prop_assert!(region_us + i128::from(clock.offset_lo) <= global_us, "{clock:?} {region_us} {global_us}");
        prop_assert!(global_us <= region_us + i128::from(clock.offset_hi), "{clock:?} {region_us} {global_us}");
        // A clock that jumped by more than the call, its uncertainty and the rounding of its bounds is outside.
        let jump_us = i128::from(call_us) + i128::from(region.width_us()) + 10_010;
        for elsewhere in [region_us - jump_us, region_us + jump_us] {
            let known = i128::from(clock.valid_from.as_micros()) <= elsewhere
                && elsewhere < i128::from(clock.valid_until.as_micros());
            prop_assert!(!known, "{clock:?} {elsewhere}");
        }
    }
}

#[test]
fn clock_before_1970_is_unknown() {
    let now = Instant::now();
    let far = OffsetInterval { lo_us: -(1 << 60), hi_us: -(1 << 60) };
    let within = InstantRange { from: now, until: now };
    assert_eq!(compute_global_view(ClockOffsets { region: far, global: far }, within), GlobalTimeAndStanding::UNKNOWN);
}

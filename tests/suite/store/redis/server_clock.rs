//! Intervals of a server's clock contain its true offset, whatever the network and drift do, and a jump is noticed.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tokio::time::Instant;
use tollkeeper::base::clock::Time;
use tollkeeper::store::client::redis::server_clock::{
    ClockJumps, ClockReading, InstantRange, ServerClock, process_time_us,
};

/// Largest drift of a clock against true time, in parts per billion.
const MAX_DRIFT_PPB: i128 = 500_000;
const PPB: i128 = 1_000_000_000;
const NS_PER_US: i128 = 1000;

/// One call to the server: the pause before it, the time on the way there and back, all in nanoseconds of true time.
#[derive(Clone, Copy, Debug)]
struct Call {
    pause_ns: u64,
    there_ns: u64,
    back_ns: u64,
    /// Drift of both clocks from the pause on, in parts per billion.
    process_drift: i128,
    server_drift: i128,
    /// True if the reply is recorded after that of the next call.
    is_late: bool,
}

fn call() -> impl Strategy<Value = Call> {
    let pause = prop_oneof![0..5_000_000_u64, 0..30_000_000_000_u64];
    let way = || prop_oneof![10_000..200_000_u64, 0..400_000_000_u64];
    let drift = || prop_oneof![Just(MAX_DRIFT_PPB), Just(-MAX_DRIFT_PPB), -MAX_DRIFT_PPB..=MAX_DRIFT_PPB];
    (pause, way(), way(), drift(), drift(), any::<bool>()).prop_map(
        |(pause_ns, there_ns, back_ns, process_drift, server_drift, is_late)| Call {
            pause_ns,
            there_ns,
            back_ns,
            process_drift,
            server_drift,
            is_late,
        },
    )
}

/// Two drifting clocks, in nanoseconds times [`PPB`].
struct Clocks {
    origin: Instant,
    process: i128,
    server: i128,
}

impl Clocks {
    fn new(offset_us: i64) -> Self {
        let origin = Instant::now();
        let server = (i128::from(process_time_us(origin)) + i128::from(offset_us)) * NS_PER_US * PPB;
        Self { origin, process: 0, server }
    }

    fn pass(&mut self, true_ns: u64, call: Call) {
        self.process += i128::from(true_ns) * (PPB + call.process_drift);
        self.server += i128::from(true_ns) * (PPB + call.server_drift);
    }

    fn process(&self) -> Instant {
        self.origin + Duration::from_nanos(u64::try_from(self.process / PPB).expect("time moves forwards"))
    }

    fn server(&self) -> Time {
        Time::from_micros(u64::try_from(self.server / PPB / NS_PER_US).expect("the offset is positive"))
    }

    fn reading(&mut self, call: Call) -> ClockReading {
        self.pass(call.pause_ns, call);
        let from = self.process();
        self.pass(call.there_ns, call);
        let server = self.server();
        self.pass(call.back_ns, call);
        // A caller reads its clock after the reply has arrived: one nanosecond covers the rounding of this test.
        ClockReading { within: InstantRange { from, until: self.process() + Duration::from_nanos(1) }, server }
    }

    /// Checks the interval of the true offset, now and through the last call.
    fn check(&self, clock: &ServerClock, range: InstantRange) -> Result<(), TestCaseError> {
        let offset = clock.offset(range).expect("a reading was recorded");
        let process_time_us = i128::from(process_time_us(self.origin)) + self.process / PPB / NS_PER_US;
        let server_us = self.server / PPB / NS_PER_US;
        let truth = server_us - process_time_us;
        // Both are rounded down here.
        prop_assert!(i128::from(offset.lo_us) <= truth + 1, "{offset:?} {truth}");
        prop_assert!(truth - 1 <= i128::from(offset.hi_us), "{offset:?} {truth}");
        Ok(())
    }
}

proptest! {
    #[test]
    fn offset_is_always_inside_the_interval(
        offset_us in 1_000_000_000_i64..1 << 50,
        calls in proptest::collection::vec(call(), 1..60),
    ) {
        let (jumps, mut clocks) = (Arc::<ClockJumps>::default(), Clocks::new(offset_us));
        let clock = ServerClock::new(Arc::clone(&jumps));
        let mut late: Option<ClockReading> = None;
        for call in calls {
            let reading = clocks.reading(call);
            let postponed = if call.is_late { late.replace(reading) } else { prop_assert_eq!(clock.record(&reading), None); late.take() };
            if let Some(postponed) = postponed {
                prop_assert_eq!(clock.record(&postponed), None);
            }
            if late.is_none() {
                let now = clocks.process();
                clocks.check(&clock, InstantRange { from: now, until: now })?;
                clocks.check(&clock, InstantRange { from: reading.within.from, until: now + Duration::from_secs(1) })?;
            }
        }
        prop_assert_eq!(jumps.count(), 0);
    }

    #[test]
    fn jump_beyond_the_intervals_is_noticed(
        calls in proptest::collection::vec(call(), 1..20),
        jump_us in prop_oneof![-100_000_000..-3_000_000_i64, 3_000_000..100_000_000_i64],
    ) {
        let (jumps, mut clocks) = (Arc::<ClockJumps>::default(), Clocks::new(1 << 50));
        let (jumping, other) = (ServerClock::new(Arc::clone(&jumps)), ServerClock::new(Arc::clone(&jumps)));
        let call = calls[0];
        for call in calls {
            let reading = clocks.reading(call);
            prop_assert_eq!((jumping.record(&reading), other.record(&reading)), (None, None));
        }
        let before = clocks.reading(call);
        clocks.server += i128::from(jump_us) * NS_PER_US * PPB;
        let after = clocks.reading(call);
        let largest_us = jumping.record(&after);
        prop_assert!(largest_us >= Some(jump_us.unsigned_abs()), "{largest_us:?}");
        prop_assert_eq!(jumps.count(), 1);
        prop_assert_eq!(jumps.last_large_jump_at_us(), process_time_us(after.within.until));
        // What was sent before the notice proves nothing, for no clock of the process.
        let late = (jumping.record(&before), other.record(&before), jumping.record(&after));
        prop_assert_eq!(late, (None, None, None));
        let now = InstantRange { from: clocks.process(), until: clocks.process() };
        prop_assert_eq!((jumping.offset(now), other.offset(now)), (None, None));
        let next = clocks.reading(Call { pause_ns: call.pause_ns + 1_000_000, ..call });
        // The other clock did jump against what was known of it before.
        prop_assert_eq!(jumping.record(&next), None);
        prop_assert!(other.record(&next) >= Some(jump_us.unsigned_abs()));
        prop_assert_eq!(jumps.count(), 2);
        let next = clocks.reading(Call { pause_ns: call.pause_ns + 1_000_000, ..call });
        prop_assert_eq!((jumping.record(&next), other.record(&next)), (None, None));
        let now = clocks.process();
        clocks.check(&jumping, InstantRange { from: now, until: now })?;
        clocks.check(&other, InstantRange { from: now, until: now })?;
    }
}

#[test]
fn interval_narrows_to_the_fastest_reading() {
    let clock = ServerClock::new(Arc::default());
    let start = Instant::now();
    let at = |us| start + Duration::from_micros(us);
    let reading = |from: u64, server: u64, until: u64| ClockReading {
        within: InstantRange { from: at(from), until: at(until) },
        server: Time::from_micros(1_000_000 + server),
    };
    let width = |us| clock.offset(InstantRange { from: at(us), until: at(us) }).map(|offset| offset.width_us());
    assert_eq!(width(0), None);
    clock.record(&reading(0, 50_000, 100_000));
    assert!(width(100_000) >= Some(100_000));
    clock.record(&reading(100_000, 100_200, 100_400));
    assert!(width(100_400) <= Some(410));
    clock.record(&reading(200_000, 250_000, 300_000));
    assert!(width(300_000) <= Some(820), "a slow reading widened the interval: {:?}", width(300_000));
}

#[test]
fn impossible_readings_are_ignored() {
    let clock = ServerClock::new(Arc::default());
    let now = Instant::now();
    let within = InstantRange { from: now, until: now };
    for server in [(1 << 53) + 1, u64::MAX] {
        assert_eq!(clock.record(&ClockReading { within, server: Time::from_micros(server) }), None);
    }
    let backwards = InstantRange { from: now + Duration::from_secs(1), until: now };
    assert_eq!(clock.record(&ClockReading { within: backwards, server: Time::from_secs(1) }), None);
    assert_eq!(clock.offset(within), None);
}

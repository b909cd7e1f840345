//! Delays between streams.

use std::time::Duration;

use tollkeeper::rules::xds::client::RetryDelays;
use tollkeeper::settings::xds::XdsBackoff;

const fn backoff(initial_ms: u64, max_ms: u64, random_factor: f64, jitter: bool) -> XdsBackoff {
    let (initial, max) = (Duration::from_millis(initial_ms), Duration::from_millis(max_ms));
    XdsBackoff { initial, max, random_factor, jitter }
}

#[test]
fn delays_double_up_to_the_maximum_and_start_again_after_a_reset() {
    let mut delays = RetryDelays::new(backoff(600, 3000, 0.66, false));
    let next: Vec<u128> = (0..5).map(|_| delays.next_delay(0.0).as_millis()).collect();
    assert_eq!(next, [600, 1200, 2400, 3000, 3000]);
    delays.reset();
    assert_eq!(delays.next_delay(0.0).as_millis(), 600);
}

#[test]
fn default_delays_are_randomized_between_200_ms_and_3_s() {
    for (random, first, fourth) in [(0.0, 204, 1020), (0.5, 600, 3000), (1.0, 996, 3000)] {
        let mut delays = RetryDelays::new(backoff(600, 3000, 0.66, true));
        let next: Vec<u128> = (0..4).map(|_| delays.next_delay(random).as_millis()).collect();
        assert_eq!((next[0], next[3]), (first, fourth), "{random}");
    }
}

#[test]
fn no_setting_makes_the_client_spin() {
    for settings in [backoff(0, 0, 0.0, false), backoff(0, 1000, 1.0, true), backoff(1, 1, 1.0, true)] {
        let mut delays = RetryDelays::new(settings);
        for _ in 0..10 {
            assert!(delays.next_delay(0.0) >= Duration::from_millis(100), "{settings:?}");
        }
    }
}

//! Lag of the scheduler.

use std::time::Duration;

use tokio::time::Instant;
use tollkeeper::telemetry::scheduler_lag::SchedulerLag;

#[test]
fn largest_lag_is_remembered_for_five_to_ten_seconds() {
    let (lag, start) = (SchedulerLag::new(), Instant::now());
    let after = |seconds| start + Duration::from_secs(seconds);
    assert_eq!(lag.recent_maximum(start), Duration::ZERO);
    lag.record(Duration::from_millis(40), after(1));
    lag.record(Duration::from_millis(3), after(2));
    assert_eq!(lag.recent_maximum(after(5)), Duration::from_millis(40));
    assert_eq!(lag.recent_maximum(after(9)), Duration::from_millis(40));
    assert_eq!(lag.recent_maximum(after(11)), Duration::ZERO);
}

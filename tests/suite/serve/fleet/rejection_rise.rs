//! Rejections that rose after a load of rules, and the limit that rejects more.

use std::sync::Arc;

use tollkeeper::base::clock::Time;
use tollkeeper::rules::live::LoadRecord;
use tollkeeper::serve::fleet::rejection_rise::{RejectionRise, find_most_risen_limit, find_rise_after_load};
use tollkeeper::telemetry::decision_history::{DecisionHistory, RequestMinute, RequestTotals};
use tollkeeper::telemetry::metrics::limit_stats::{LimitName, LimitStat, LimitStats};

/// First minute of the tests.
const FIRST: u64 = 1000;

/// Minutes with (requests, rejected), of which the last runs, and a load in the middle of minute `load`.
fn rise(minutes: &[[u64; 2]], load: u64) -> Option<[u64; 2]> {
    let counts = minutes.iter().map(|[requests, rejected]| RequestMinute {
        requests: *requests,
        rejected: *rejected,
        ..RequestMinute::default()
    });
    let minutes: Vec<_> = (FIRST..).zip(counts).collect();
    let record = |at_s, version, changed| LoadRecord { at_s, version, changed };
    let at_s = (FIRST + load) * 60 + 30;
    let first = record((FIRST - 1) * 60, Some(1), true);
    let [repeated, refused] = [record(at_s + 10, Some(3), false), record(at_s + 20, None, false)];
    assert_eq!(find_rise_after_load(&minutes, &[first, repeated, refused]), None, "no load changed anything");
    let found = find_rise_after_load(&minutes, &[first, record(at_s, Some(2), true), repeated, refused])?;
    assert_eq!((found.version, found.load_s), (2, (FIRST + load) * 60 + 30));
    Some([found.percent_before, found.percent_after])
}

#[test]
fn rise_after_a_load_is_found_if_it_is_large_and_lasts() {
    let (usual, high) = ([200, 2], [200, 100]);
    assert_eq!(rise(&[usual, usual, [200, 60], high, high], 2), Some([1, 50]));
    assert_eq!(rise(&[usual, usual, [200, 60], high], 2), Some([1, 50]), "the minute after the load runs");
    for (what, minutes, load) in [
        ("the minute of the load has both", vec![usual, usual, high], 2),
        ("few percent more", vec![usual, usual, usual, [200, 21], [200, 21]], 2),
        ("it was like this before", vec![usual, [200, 60], usual, usual, high, high], 3),
        ("few requests after", vec![usual, usual, usual, [90, 60]], 2),
        ("few rejections after", vec![usual, usual, usual, [110, 45]], 2),
        ("few requests before", vec![[40, 0], [40, 0], usual, high, high], 2),
        ("no minute before", vec![usual, high, high], 0),
        ("it ended", vec![usual, usual, usual, high, high, usual, usual, usual], 2),
        ("it began later", vec![usual, usual, usual, usual, usual, high, high], 2),
        ("long ago", [vec![usual; 3], vec![high; 31]].concat(), 2),
    ] {
        assert_eq!(rise(&minutes, load), None, "{what}");
    }
    assert_eq!(rise(&[vec![usual; 3], vec![high; 30]].concat(), 2), Some([1, 50]));
}

#[test]
fn limit_that_rejects_more_than_before_is_named() {
    let limits: Vec<Arc<LimitStats>> =
        ["login", "user"].map(|name| Arc::new(LimitStats::new(LimitName::new(["shop", name])))).into();
    let history = DecisionHistory::default();
    let rise = RejectionRise { load_s: (FIRST + 2) * 60, version: 2, percent_before: 1, percent_after: 50 };
    // `login` rejects most, before as well.
    for (minute, rejected) in (FIRST..).zip([[500, 10], [500, 10], [500, 100], [510, 200], [510, 200]]) {
        for (limit, rejected) in limits.iter().zip(rejected) {
            limit.add_to_counter(LimitStat::Over, rejected);
        }
        history.record_minute(Time::from_secs((minute + 1) * 60), &limits, RequestTotals::default());
    }
    let now = Time::from_secs((FIRST + 4) * 60 + 59);
    let found = find_most_risen_limit(&history, Time::from_micros(now.as_micros() + 1_000_000), &limits, &rise);
    let found = found.expect("user rose");
    assert_eq!((&*found.name, found.per_minute_before), ("shop.user", 10));
    assert!(found.per_minute_after > 100, "{found:?}");
    let quiet = RejectionRise { load_s: (FIRST + 5) * 60, ..rise };
    assert_eq!(find_most_risen_limit(&history, now, &limits, &quiet), None);
}

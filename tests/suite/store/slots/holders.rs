//! Which holders of slots are dead.

use std::time::Duration;

use tollkeeper::base::clock::Time;
use tollkeeper::limit::slot::HolderId;
use tollkeeper::store::holders::SlotHolderTable;

const TIMEOUT_S: u64 = 30;

/// Table of a process that runs, and writes so each second, from `first_s` to `last_s`.
fn run(table: &SlotHolderTable, first_s: u64, last_s: u64) {
    (first_s..=last_s).for_each(|second| table.record_that_process_runs(Time::from_secs(second)));
}

#[test]
fn holder_is_dead_a_timeout_after_the_clock_was_set_back() {
    let (table, one) = (SlotHolderTable::default(), HolderId::from_name(b"one"));
    table.set_timeout(Duration::from_secs(TIMEOUT_S));
    run(&table, 7000, 7200);
    table.record_heartbeat(b"one", Time::from_secs(7200));
    run(&table, 3600, 3600 + TIMEOUT_S);
    assert!(!table.is_dead(one, Time::from_secs(3600 + TIMEOUT_S)));
    run(&table, 3601 + TIMEOUT_S, 3700);
    assert!(table.is_dead(one, Time::from_secs(3700)));
}

#[test]
fn old_list_of_dead_holders_tells_nothing() {
    let (table, one) = (SlotHolderTable::default(), HolderId::from_name(b"one"));
    table.set_timeout(Duration::from_secs(TIMEOUT_S));
    table.set_shared_dead_holders([one].into_iter(), Time::from_secs(1000));
    for (second, is_dead) in [(1000, true), (1015, true), (1016, false)] {
        let now = Time::from_secs(second);
        assert_eq!((table.is_dead(one, now), !table.encode_dead_holders(now).is_empty()), (is_dead, is_dead));
    }
}

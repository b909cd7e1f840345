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
    [7199, 7200].iter().for_each(|second| table.record_heartbeat(b"one", Time::from_secs(*second)));
    run(&table, 3600, 3600 + TIMEOUT_S);
    assert!(!table.is_dead(one, Time::from_secs(3600 + TIMEOUT_S)));
    run(&table, 3601 + TIMEOUT_S, 3700);
    assert!(table.is_dead(one, Time::from_secs(3700)));
}

/// Anyone can send a health check in any name, and one Envoy may check too rarely to be missed.
#[test]
fn holder_is_dead_only_after_health_checks_that_followed_each_other() {
    for (checks_s, is_dead) in [
        (&[][..], false),
        (&[7000], false),
        (&[6900, 7000], false),
        (&[6900, 6931, 6962, 7000], false),
        // The clock was set back meanwhile.
        (&[7000, 6965], false),
        (&[6970, 7000], true),
        (&[6900, 6930, 7000], true),
    ] {
        let (table, one) = (SlotHolderTable::default(), HolderId::from_name(b"one"));
        table.set_timeout(Duration::from_secs(TIMEOUT_S));
        run(&table, 6800, 6800);
        table.record_slot_call(one, b"one", Time::from_secs(6800));
        checks_s.iter().for_each(|second| table.record_heartbeat(b"one", Time::from_secs(*second)));
        run(&table, 6801, 7100);
        assert_eq!(table.is_dead(one, Time::from_secs(7100)), is_dead, "{checks_s:?}");
        let shared = table.take_heartbeats(Time::from_secs(7100));
        assert!(shared.len() == 1 && shared[0].has_heartbeats == is_dead, "{shared:?}");
    }
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

/// A restarted Envoy may take slots at one replica while another still believes that it is dead.
#[test]
fn slot_that_was_taken_after_the_death_is_not_free() {
    let (table, one) = (SlotHolderTable::default(), HolderId::from_name(b"one"));
    table.set_timeout(Duration::from_secs(TIMEOUT_S));
    table.set_shared_dead_holders([one].into_iter(), Time::from_secs(1000));
    for (taken_s, now_s, is_free) in [(985, 1000, true), (986, 1000, false), (985, 1010, true), (986, 1010, false)] {
        let (taken, now) = (Time::from_secs(taken_s), Time::from_secs(now_s));
        assert_eq!(table.is_slot_freed_by_death(one, taken, now), is_free, "{taken_s} {now_s}");
        let age = (now_s - 985) * 1_000_000;
        assert_eq!(table.encode_dead_holders(now), [age.to_le_bytes(), one.0.to_le_bytes()].concat());
    }
}

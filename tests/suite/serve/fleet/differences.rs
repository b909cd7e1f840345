//! Differences between replicas, and their problems.

use tollkeeper::base::clock::Time;
use tollkeeper::serve::fleet::differences::{find_problems, find_replica_differences};
use tollkeeper::serve::fleet::summary::{PublishedKeyForm, ReplicaSummary};
use tollkeeper::serve::status::StoreStatus;

const NOW: Time = Time::from_secs(61);

/// Makes a replica differ from others.
type Change = fn(&mut ReplicaSummary);

fn usual(name: &str) -> ReplicaSummary {
    let mut summary = ReplicaSummary { name: name.to_owned(), build: "1".to_owned(), ..ReplicaSummary::default() };
    summary.rules.hash = "a".to_owned();
    summary.store = StoreStatus { available: true, servers: 1, ..StoreStatus::default() };
    (summary.recent.calls, summary.recent.span_us) = (1000, 60_000_000);
    summary.published_us = 60_000_000;
    summary
}

#[test]
fn each_difference_is_found_with_the_replicas_that_differ() {
    let usual = || vec![usual("a"), usual("b"), usual("c")];
    assert_eq!(find_replica_differences(&usual(), NOW), []);
    let changes: [(&str, Change); 6] = [
        ("not_publishing", |replica| replica.published_us -= 12_000_000),
        ("different_rules", |replica| replica.rules.hash = "b".to_owned()),
        ("no_traffic", |replica| replica.recent.calls = 0),
        ("clocks_apart", |replica| replica.clock_offset_us = -1_000_001),
        ("different_builds", |replica| replica.build = "2".to_owned()),
        ("different_values", |replica| replica.values = PublishedKeyForm::Hashed),
    ];
    for (kind, change) in changes {
        let mut replicas = usual();
        change(&mut replicas[1]);
        let found = find_replica_differences(&replicas, NOW);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((&*found[0].kind, &*found[0].replicas), (kind, &["b".to_owned()][..]));
        // One replica alone differs from none.
        assert_eq!(find_replica_differences(&replicas[1..2], NOW), []);
    }
}

#[test]
fn unmatched_descriptors_are_found_if_they_are_most() {
    let mut replicas = vec![usual("a"), usual("b")];
    replicas[1].recent.verdicts.ok = 500;
    for (unmatched, is_found) in [(0, false), (500, false), (501, true)] {
        replicas[1].recent.unmatched = unmatched;
        let found = find_problems(&replicas, NOW);
        assert_eq!(found.len(), usize::from(is_found), "{found:?}");
        assert!(found.iter().all(|one| one.kind == "unmatched_descriptors" && one.replicas == ["b"]));
        // One replica alone has it too.
        assert_eq!(find_problems(&replicas[1..], NOW).len(), usize::from(is_found));
    }
    (replicas[1].recent.verdicts.ok, replicas[1].recent.unmatched) = (0, 99);
    assert_eq!(find_problems(&replicas, NOW), []);
}

#[test]
fn clock_that_differs_is_ahead_or_behind() {
    for (offset_us, expected) in [(-90_000_000, "that of c is 90 s ahead"), (2_500_000, "that of c is 3 s behind")] {
        let mut replicas = vec![usual("a"), usual("b"), usual("c")];
        replicas[2].clock_offset_us = offset_us;
        let found = find_replica_differences(&replicas, NOW);
        assert!(found[0].text.contains(expected), "{found:?}");
    }
}

#[test]
fn what_all_replicas_do_is_no_difference() {
    let mut replicas = vec![usual("a"), usual("b")];
    for replica in &mut replicas {
        replica.recent.verdicts.local = 5;
        replica.clock_offset_us = 90_000_000;
    }
    assert_eq!(find_replica_differences(&replicas, NOW), []);
}

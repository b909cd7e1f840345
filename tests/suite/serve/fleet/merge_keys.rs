//! Rejected and busiest keys of several replicas: bounds that hold, bounded memory, hostile entries.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tollkeeper::base::clock::Time;
use tollkeeper::serve::fleet::merge_keys::{MAX_BUSY_KEYS, MergedBusiestKeys, MergedRejectedKeys};
use tollkeeper::serve::fleet::replica_summary_builder::{ListedLimitNames, add_rejected_keys};
use tollkeeper::serve::fleet::summary::{
    BusyKeySummary, PublishedKeyForm, RejectedKeyCountSummary, RejectedKeySummary, RejectedKeysMinuteSummary,
    ReplicaSummary,
};
use tollkeeper::telemetry::metrics::limit_stats::{LimitName, LimitStats};
use tollkeeper::telemetry::top_keys::{KEPT_MINUTES, KeyHits, TopKeys, UnenforcedMode};

const MAX_KEYS_PER_MINUTE: usize = 3_000;

/// First minute of the tests.
const FIRST: u64 = 30_000_000;

fn minute(number: u64) -> Time {
    Time::from_secs((FIRST + number) * 60)
}

/// Summary of these rejections, with room for this many bytes of keys.
fn summary(top_keys: &TopKeys, room: usize) -> ReplicaSummary {
    let (mut summary, mut names) = (ReplicaSummary::default(), ListedLimitNames::default());
    add_rejected_keys(&mut summary, &top_keys.recent_keys_by_minute(minute(5)), &mut names, room);
    (summary.names, summary.domains) = (names.listed, names.domains);
    summary
}

proptest! {
    /// Rejections are (replica, minute, key, hits).
    #[test]
    fn merged_counts_stay_within_their_bounds(
        mut rejections in prop::collection::vec((0_usize..5, 0_u64..6, 0_usize..40, 1_u64..5), 1..600),
        counters in 8_usize..64,
        room in 100_usize..4000,
    ) {
        rejections.sort_by_key(|(_, minute, ..)| *minute);
        let stats = [["shop", "a"], ["shop", "b"]].map(|name| LimitStats::new(LimitName::new(name)));
        let replicas: Vec<TopKeys> = (0..5).map(|_| TopKeys::new(counters)).collect();
        let mut truth: BTreeMap<(String, bool, String), u64> = BTreeMap::new();
        for (replica, at, key, hits) in rejections {
            let (limit, text, in_shadow) = (&stats[key % 2], (key % 20).to_string(), key < 20);
            let (key, mode) = (key % 20, in_shadow.then_some(UnenforcedMode::Shadow));
            // Each process hashes keys in its own way.
            let id = (key as u128 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835 + replica as u128 * 2);
            let rejection = KeyHits { id, limit, mode, hits };
            replicas[replica].record_key(rejection, minute(at), |pushed| pushed.extend_from_slice(text.as_bytes()));
            *truth.entry((limit.name().as_str().to_owned(), in_shadow, text)).or_default() += hits;
        }
        let mut merged = MergedRejectedKeys::default();
        for top_keys in &replicas {
            prop_assert!(merged.add_summary(&summary(top_keys, room), FIRST + 5));
        }
        let found = merged.snapshot(FIRST + 5, KEPT_MINUTES, |_| true);
        let bounds: BTreeMap<_, _> = found
            .keys
            .iter()
            .map(|key| {
                let id = (key.limit.as_str().to_owned(), key.mode.is_some(), key.text.to_string());
                (id, (key.at_least, key.at_most))
            })
            .collect();
        for (key, hits) in &truth {
            match bounds.get(key) {
                Some((least, most)) => prop_assert!(least <= hits && hits <= most, "{key:?}: {hits} in {least}..={most}"),
                None => prop_assert!(*hits <= found.max_missed, "{key:?}: {hits} > {}", found.max_missed),
            }
        }
    }
}

/// Summary with these keys and their exact counts in one minute.
fn exact(keys: impl Iterator<Item = (usize, u64)>) -> ReplicaSummary {
    let mut summary = ReplicaSummary { names: vec!["shop.a".to_owned()], ..ReplicaSummary::default() };
    let mut minute = RejectedKeysMinuteSummary { minute: FIRST, ..RejectedKeysMinuteSummary::default() };
    for (index, (key, hits)) in keys.enumerate() {
        summary.keys.push(RejectedKeySummary { name: 0, text: key.to_string(), mode: None });
        minute.counts.push(RejectedKeyCountSummary { key: index, at_least: hits, at_most: hits, requests: hits });
    }
    summary.minutes.push(minute);
    summary
}

#[test]
fn keys_are_bounded_and_those_dropped_are_in_the_bound() {
    let mut merged = MergedRejectedKeys::default();
    for part in 0..5 {
        let keys = (0..MAX_KEYS_PER_MINUTE).map(|key| (part * MAX_KEYS_PER_MINUTE + key, 1 + (key % 7) as u64));
        assert!(merged.add_summary(&exact(keys), FIRST));
        let kept = merged.snapshot(FIRST, 1, |_| true).keys.len();
        assert!(kept <= 2 * MAX_KEYS_PER_MINUTE, "{part}: {kept}");
    }
    // A key that was dropped comes back.
    assert!(merged.add_summary(&exact([(0, 10)].into_iter()), FIRST));
    let found = merged.snapshot(FIRST, 1, |_| true);
    let key = found.keys.iter().find(|key| &*key.text == "0").expect("the last key is kept");
    assert!(key.at_least <= 11 && 11 <= key.at_most, "{key:?}");
    assert!(found.max_missed >= 7, "{}", found.max_missed);
}

#[test]
fn contradictory_minute_is_left_out() {
    let broken: [fn(&mut ReplicaSummary); 4] = [
        |summary| summary.minutes[0].counts[0].key = 7,
        |summary| summary.minutes[0].counts[0].at_least = 9,
        |summary| summary.keys[0].name = usize::MAX,
        |summary| summary.keys[0].text = "x".repeat(10_000),
    ];
    for change in broken {
        let mut summary = exact([(1, 5)].into_iter());
        change(&mut summary);
        let mut merged = MergedRejectedKeys::default();
        assert!(!merged.add_summary(&summary, FIRST), "{summary:?}");
        assert!(merged.snapshot(FIRST, 1, |_| true).keys.is_empty());
    }
    let mut far = exact([(1, 5)].into_iter());
    far.minutes[0].minute = u64::MAX;
    let mut merged = MergedRejectedKeys::default();
    assert!(merged.add_summary(&far, FIRST));
    assert!(merged.snapshot(FIRST, 1, |_| true).keys.is_empty());
}

/// Summary of these busiest keys, as (name, text, hits).
fn busy_summary(keys: &[(usize, &str, u64)]) -> ReplicaSummary {
    let busy = keys.iter().map(|(name, text, hits)| BusyKeySummary { name: *name, text: (*text).into(), hits: *hits });
    ReplicaSummary {
        names: vec!["shop.user".to_owned(), "shop.path".to_owned()],
        domains: vec!["shop".to_owned(), "shop".to_owned()],
        busy: busy.collect(),
        values: PublishedKeyForm::Plain,
        ..ReplicaSummary::default()
    }
}

#[test]
fn hits_of_a_key_are_added_up_and_hostile_entries_are_left_out() {
    let mut merged = MergedBusiestKeys::default();
    merged.add_summary(&busy_summary(&[(0, "user=ann", 5), (1, "path=/", 7), (9, "user=eve", 1)]));
    merged.add_summary(&busy_summary(&[(0, "user=ann", 4), (0, &"x".repeat(5000), u64::MAX)]));
    let many: Vec<_> = (0..MAX_BUSY_KEYS + 9).map(|_| (0, "user=bob", 1)).collect();
    merged.add_summary(&busy_summary(&many));
    let rows = |filter: fn(&str) -> bool| -> Vec<(String, u64)> {
        let snapshot = merged.snapshot(|name| filter(name.as_str()));
        snapshot.keys.iter().map(|key| (key.text.to_string(), key.at_least)).collect()
    };
    let row = |text: &str, hits| (text.to_owned(), hits);
    assert_eq!(rows(|_| true), [row("user=bob", 50), row("user=ann", 9), row("path=/", 7)]);
    assert_eq!(rows(|name| name == "shop.path"), [row("path=/", 7)]);
}

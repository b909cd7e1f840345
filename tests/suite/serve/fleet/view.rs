//! The view of all replicas, from their summaries.

use tollkeeper::base::clock::Time;
use tollkeeper::serve::fleet::authentication::{SummaryError, encode_summary};
use tollkeeper::serve::fleet::redis_client::GoneSummary;
use tollkeeper::serve::fleet::report::FleetReport;
use tollkeeper::serve::fleet::summary::{
    BlocksSummary, LATENCY_BOUNDS_VERSION, LatencySummary, LimitSummary, ReplicaSummary, SUMMARY_VERSION,
};
use tollkeeper::serve::fleet::view::{FleetViewBuilder, MergedCountsByLimit};
use tollkeeper::serve::quota::page::QuotaTotals;
use tollkeeper::telemetry::metrics::histogram::BUCKET_BOUNDS_US;

const MAX_LIMITS: usize = 20_000;

const NOW_US: u64 = 1_800_000_000_000_000;

fn summary(incarnation: &str) -> ReplicaSummary {
    let mut summary = ReplicaSummary {
        v: SUMMARY_VERSION,
        incarnation: incarnation.to_owned(),
        name: "host".to_owned(),
        published_us: NOW_US,
        ..ReplicaSummary::default()
    };
    let counts = vec![1; BUCKET_BOUNDS_US.len() + 1];
    summary.recent.latency = LatencySummary { bounds: LATENCY_BOUNDS_VERSION, counts };
    summary
}

/// Whether each replica that is gone is replaced, the last first. Replicas are names, with the minutes since they
/// began; those that are gone have the minutes since then too.
fn replaced(running: &[(&str, u64)], gone: &[(&str, u64, u64)]) -> Vec<bool> {
    let began = |name: &str, minutes: u64| {
        let started_us = NOW_US - minutes * 60_000_000;
        ReplicaSummary { name: name.to_owned(), started_us, ..summary("x") }
    };
    let running: Vec<_> = running.iter().map(|(name, minutes)| began(name, *minutes)).collect();
    let gone = gone.iter().map(|(name, minutes, since)| {
        let published_us = NOW_US - since * 60_000_000;
        tollkeeper::serve::fleet::view::GoneReplica {
            summary: ReplicaSummary { published_us, ..began(name, *minutes) },
            is_replaced: false,
        }
    });
    let mut gone: Vec<_> = gone.collect();
    tollkeeper::serve::fleet::view::mark_replaced(&running, &mut gone);
    gone.into_iter().map(|gone| gone.is_replaced).collect()
}

#[test]
fn replica_that_began_later_replaces_one_that_is_gone() {
    assert_eq!(replaced(&[("a", 60)], &[("b", 60, 5)]), [false]);
    assert_eq!(replaced(&[("a", 60), ("c", 4)], &[("b", 60, 5)]), [true]);
    // A roll-out begins the new ones first, and one of the old was killed.
    assert_eq!(replaced(&[("a", 60), ("c", 6)], &[("b", 60, 5)]), [false]);
    // One began, two are gone: the first is missing.
    assert_eq!(replaced(&[("a", 60), ("d", 2)], &[("c", 60, 9), ("b", 60, 5)]), [true, false]);
    // The one that began between them can only stand for the first.
    assert_eq!(replaced(&[("a", 60), ("d", 7), ("e", 2)], &[("c", 60, 9), ("b", 60, 5)]), [true, true]);
    // A process that ends again and again in one pod.
    assert_eq!(replaced(&[("b", 1), ("a", 60)], &[("b", 60, 5), ("b", 4, 2)]), [true, true]);
    assert_eq!(replaced(&[("a", 60)], &[("b", 60, 5), ("b", 4, 2)]), [false, true]);
    // The name goes before the order.
    assert_eq!(replaced(&[("c", 1), ("b", 3)], &[("b", 60, 5), ("c", 60, 4)]), [true, true]);
}

fn view(others: &[ReplicaSummary]) -> tollkeeper::serve::fleet::view::FleetView {
    let mut view = FleetViewBuilder::new(summary("0000000000"), Time::from_micros(NOW_US));
    others.iter().for_each(|other| {
        view.add_published_summary(&other.incarnation, &encode_summary(other, None).unwrap(), None);
    });
    view.finish_view(None)
}

#[test]
fn replicas_of_one_name_get_unique_names() {
    let mut other = summary("2222222222");
    other.name = "another".to_owned();
    let view = view(&[summary("1111111111"), other]);
    let names: Vec<&str> = view.replicas.iter().map(|replica| &*replica.name).collect();
    assert_eq!(names, ["host/000000", "another", "host/111111"]);
}

#[test]
fn histogram_of_another_version_is_left_out_and_counted() {
    let mut other = summary("2");
    other.recent.latency.bounds = LATENCY_BOUNDS_VERSION + 1;
    let report = FleetReport::new(&view(&[summary("1"), other]), None, &Default::default());
    assert_eq!(report.recent.latency_left_out, 1);
    assert_eq!(report.recent.latency_us, report.replicas[0].recent.latency_us);
    assert!(report.recent.latency_us.is_some());
    assert!(report.format_text(Default::default()).contains("other bounds and are left out: 1"));
}

#[test]
fn what_a_gone_replica_holds_is_listed_until_it_ends() {
    let quota = QuotaTotals { keys: 1, held_hits: 40, held_for_s: 100, ..QuotaTotals::default() };
    let blocks = BlocksSummary { values: 1, rejected_requests: 7 };
    let brief = ReplicaSummary { quota: Some(quota), blocks, ..summary("1") }.without_lists();
    let sealed = encode_summary(&brief, None).unwrap();
    let report_after = |seconds: u64| {
        let mut view = FleetViewBuilder::new(summary("0"), Time::from_micros(NOW_US + seconds * 1_000_000));
        view.add_gone_replica(GoneSummary { id: "1", sealed: &sealed, published: Time::from_micros(NOW_US) }, None);
        FleetReport::new(&view.finish_view(None), None, &Default::default())
    };
    let mut report = report_after(60);
    assert_eq!(report.replicas[1].quota, Some(QuotaTotals { held_for_s: 40, ..quota }));
    report.blocked_values = 1;
    let text = report.format_text(Default::default());
    assert!(text.contains("40s  ") && text.contains("which rejected 0 requests"), "{text}");
    assert_eq!([100, 400].map(|seconds| report_after(seconds).replicas[1].quota), [None; 2]);
}

#[test]
fn long_text_is_not_kept() {
    let mut other = summary("1");
    other.build = "x".repeat(60_000);
    let view = view(&[other]);
    assert_eq!((view.replicas.len(), view.left_out[&SummaryError::Malformed]), (1, 1));
}

#[test]
fn rates_of_the_first_moment_are_not_multiplied() {
    let mut other = summary("1");
    (other.recent.calls, other.recent.span_us) = (5, 0);
    let report = FleetReport::new(&view(&[other]), None, &Default::default());
    assert!(report.recent.calls_per_s <= 5.0, "{}", report.recent.calls_per_s);
}

#[test]
fn limits_without_room_are_counted() {
    let mut merged = MergedCountsByLimit::default();
    for part in 0..3 {
        let names: Vec<String> = (0..MAX_LIMITS / 2).map(|name| format!("{part}.{name}")).collect();
        let limits = (0..names.len()).map(|name| LimitSummary { name, ..LimitSummary::default() }).collect();
        merged.add_summary(&ReplicaSummary { names, limits, limits_left_out: 7, ..ReplicaSummary::default() });
    }
    assert_eq!((merged.by_name.len(), merged.left_out), (MAX_LIMITS, MAX_LIMITS / 2 + 3 * 7));
}

mod clock_offset {
    use std::time::Duration;

    use tollkeeper::serve::fleet::member::is_better_clock_offset;

    #[test]
    fn inexact_clock_offset_counts_only_if_it_refutes_the_last() {
        assert!(is_better_clock_offset(5, Duration::from_millis(1), 0));
        assert!(!is_better_clock_offset(400_000, Duration::from_millis(500), 0));
        // The clock of the host jumped by an hour.
        assert!(is_better_clock_offset(3_600_000_000, Duration::from_millis(500), 0));
    }
}

//! The view of all replicas, from their summaries.

use tollkeeper::base::clock::Time;
use tollkeeper::serve::fleet::authentication::{SummaryError, encode_summary};
use tollkeeper::serve::fleet::finding::Finding;
use tollkeeper::serve::fleet::report::FleetReport;
use tollkeeper::serve::fleet::summary::{ReplicaSummary, SUMMARY_VERSION};
use tollkeeper::serve::fleet::view::FleetViewBuilder;
use tollkeeper::serve::status::{LATENCY_BOUNDS_VERSION, LatencyHistogram};
use tollkeeper::telemetry::metrics::histogram::BUCKET_BOUNDS_US;

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
    summary.recent.latency = LatencyHistogram { bounds: LATENCY_BOUNDS_VERSION, counts };
    summary
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
    let report = FleetReport::new(&view(&[summary("1"), other]), &Default::default());
    assert_eq!(report.recent.latency_left_out, 1);
    assert_eq!(report.recent.latency_us, report.replicas[0].recent.latency_us);
    assert!(report.recent.latency_us.is_some());
    assert!(report.format_text(Default::default()).contains("other bounds and are left out: 1"));
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
    let report = FleetReport::new(&view(&[other]), &Default::default());
    assert!(report.recent.calls_per_s <= 5.0, "{}", report.recent.calls_per_s);
}

/// Kind, text and replicas of the findings of a view.
fn findings(others: &[ReplicaSummary]) -> Vec<(String, String, Vec<String>)> {
    let found = view(others).findings.into_iter();
    found.map(|finding| (finding.kind.into_owned(), finding.text, finding.replicas)).collect()
}

fn with_finding(incarnation: &str, kind: &'static str, text: &str, since: &str) -> ReplicaSummary {
    let finding = Finding { since: since.to_owned(), ..Finding::new(kind, Vec::new(), text.to_owned()) };
    ReplicaSummary { name: format!("pod-{incarnation}"), findings: vec![finding], ..summary(incarnation) }
}

#[test]
fn equal_findings_of_replicas_are_one_since_the_earliest() {
    let others = [
        with_finding("1", "store_lost", "lost", "2027-01-15T08:00:05Z"),
        with_finding("2", "store_lost", "lost", "2027-01-15T08:00:00Z"),
        with_finding("3", "late", "late", "2027-01-15T08:00:00Z"),
    ];
    let joined = view(&others).findings;
    assert_eq!(joined[0].replicas, ["pod-1", "pod-2"]);
    assert_eq!(
        (&*joined[0].since, &*joined[0].runbook),
        ("2027-01-15T08:00:00Z", "docs/runbooks.md#tollkeeper-store-lost")
    );
    assert_eq!((joined.len(), &*joined[1].kind), (2, "late"));
}

#[test]
fn findings_of_one_kind_with_many_texts_are_few_and_name_ten_replicas() {
    let others: Vec<_> =
        (1..=60).map(|at| with_finding(&at.to_string(), "late", &format!("{at} s late"), "")).collect();
    let found = findings(&others);
    assert_eq!(found.len(), 4, "{found:?}");
    assert!(found[3].1.contains("see their own pages") && found[3].2.len() == 10, "{found:?}");
}

#[test]
fn summary_with_long_or_many_findings_is_left_out() {
    let long = with_finding("1", "late", &"x".repeat(10_000), "");
    let many = ReplicaSummary { findings: vec![Finding::default(); 100], ..summary("2") };
    let view = view(&[long, many]);
    assert_eq!((view.findings.len(), view.left_out[&SummaryError::Malformed]), (0, 2));
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

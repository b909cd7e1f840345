//! Published summaries: their size, and those of other versions.

use tollkeeper::serve::fleet::summary::ReplicaSummary;
use tollkeeper::serve::quota::page::QuotaTotals;

#[test]
fn quotas_of_a_later_build_are_read() {
    let quota = QuotaTotals { streams: 3, held_hits: 40, ..QuotaTotals::default() };
    let summary = ReplicaSummary { quota: Some(quota), ..ReplicaSummary::default() };
    let mut json = serde_json::to_value(&summary).unwrap();
    let read = |json: &serde_json::Value| serde_json::from_value::<ReplicaSummary>(json.clone()).unwrap().quota;
    assert_eq!(read(&json), Some(quota));
    json["quota"] = serde_json::json!({"streams": 3, "held_hits": 40, "new": [1]});
    assert_eq!(read(&json), Some(quota));
    assert!(!serde_json::to_string(&ReplicaSummary::default()).unwrap().contains("quota"));
}

mod size {
    use std::sync::Arc;

    use tollkeeper::base::clock::Time;
    use tollkeeper::serve::fleet::authentication::encode_summary;
    use tollkeeper::serve::fleet::replica_summary_builder::{ListedLimitNames, add_rejected_keys};
    use tollkeeper::serve::fleet::summary::*;
    use tollkeeper::telemetry::metrics::limit_stats::{LimitName, LimitStats};
    use tollkeeper::telemetry::service_metrics::ServiceMetrics;
    use tollkeeper::telemetry::top_keys::{KeyCountsInMinute, KeyHits, TopKeys};

    const MAX_KEYS_BYTES: usize = 30 << 10;

    /// Rejected keys of each of ten minutes: `texts` are the same in all.
    fn minutes(limits: &[Arc<LimitStats>], texts: impl Fn(usize) -> String) -> Vec<KeyCountsInMinute> {
        let top_keys = TopKeys::new(2048);
        for minute in 0..10 {
            for key in 0..2000 {
                let rejection = KeyHits {
                    id: (key as u128 + 1) << 64 | key as u128,
                    limit: &limits[key % limits.len()],
                    mode: None,
                    hits: 1,
                };
                top_keys.record_key(rejection, Time::from_secs((30_000_000 + minute) * 60), |text| {
                    text.extend_from_slice(texts(key).as_bytes());
                });
            }
        }
        top_keys.recent_keys_by_minute(Time::from_secs(30_000_009 * 60))
    }

    #[test]
    fn summary_of_many_keys_fits() {
        let metrics = ServiceMetrics::new(2048, 0);
        let limits: Vec<Arc<LimitStats>> = (0..10_000)
            .map(|limit| metrics.limits.register_rule_limit(LimitName::new(["d", &limit.to_string()])))
            .collect();
        let texts: [fn(usize) -> String; 3] =
            [|key| key.to_string(), |key| format!("{key}={}", "x".repeat(300)), |key| format!("{key}\u{1}\"")];
        for text in texts {
            let (mut summary, mut names) =
                (ReplicaSummary { v: SUMMARY_VERSION, ..ReplicaSummary::default() }, ListedLimitNames::default());
            add_rejected_keys(&mut summary, &minutes(&limits, text), &mut names, MAX_KEYS_BYTES);
            let keys_bytes = serde_json::to_vec(&(&summary.keys, &summary.minutes, &names.listed)).unwrap().len();
            assert!(keys_bytes <= MAX_KEYS_BYTES + 1024, "{keys_bytes}");
            (summary.names, summary.domains) = (names.listed, names.domains);
            let sealed = encode_summary(&summary, None).map(|sealed| sealed.len());
            assert!(
                sealed.is_some_and(|bytes| bytes > MAX_KEYS_BYTES - 1024 && bytes <= MAX_KEYS_BYTES + 2048),
                "{sealed:?}"
            );
            // Keys without room are within the bound of each minute.
            assert!(summary.minutes.iter().all(|minute| minute.counts.len() == 2000 || minute.max_missed > 0));
        }
    }
}

//! Upper bounds on admissions, checked over whole histories without knowledge of states.

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::Limit;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::request::Hits;

use super::model::window;
use super::scenario::{Backwards, CALM, HistoryOptions, Scenario, config, scenario_of};

/// Admitted charge; times are in microseconds.
#[derive(Clone, Copy, Debug)]
struct Passed {
    /// Time of the charge.
    charged_at: i128,
    /// Time at which the response departs.
    departs_at: i128,
    hits: i128,
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn sliding_window_log_admits_at_most_the_limit_in_any_window(scenario in scenario_of(Algorithm::SlidingWindowLog, CALM)) {
        let (limit, period) = (scenario.limits[0], period(&scenario.limits[0]));
        let passed = run_history(&scenario, |passed, now, hits| {
            let recent = passed.iter().filter(|charge| charge.charged_at > now - period);
            let hits_in_period: i128 = recent.map(|charge| charge.hits).sum();
            // Without `count_rejected` only admitted hits count.
            prop_assert!(limit.counts_rejected_hits() || hits_in_period + hits > limit_hits(&limit), "rejected though it fits");
            Ok(())
        })?;
        for charge in &passed {
            let (start, end) = (charge.charged_at - period, charge.charged_at);
            let inside = passed.iter().filter(|other| start < other.charged_at && other.charged_at <= end);
            prop_assert!(inside.map(|other| other.hits).sum::<i128>() <= limit_hits(&limit));
        }
    }

    #[test]
    fn fixed_window_admits_at_most_the_limit_in_each_window(scenario in scenario_of(Algorithm::FixedWindow, CALM)) {
        let limit = scenario.limits[0];
        let of_window = |passed: &[Passed], at| {
            let (start, end) = window(&limit, at);
            let inside = passed.iter().filter(|charge| start <= charge.charged_at && charge.charged_at < end);
            inside.map(|charge| charge.hits).sum::<i128>()
        };
        let passed = run_history(&scenario, |passed, now, hits| {
            let fits = of_window(passed, now) + hits <= limit_hits(&limit);
            prop_assert!(limit.counts_rejected_hits() || !fits, "rejected though it fits");
            Ok(())
        })?;
        for charge in &passed {
            prop_assert!(of_window(&passed, charge.charged_at) <= limit_hits(&limit));
        }
    }

    /// In any span of time t between two departures, at most `bucket_size` + t x limit / period leave.
    #[test]
    fn token_bucket_admits_at_most_burst_plus_refill_in_any_span(scenario in scenario_of(Algorithm::TokenBucket, CALM)) {
        let limit = scenario.limits[0];
        let passed = run_history(&scenario, |_, _, _| Ok(()))?;
        for (index, first) in passed.iter().enumerate() {
            let mut sum = 0;
            for last in &passed[index..] {
                sum += last.hits;
                // Departures are rounded up to a microsecond, so a span may appear one microsecond too short.
                let span = last.departs_at - first.departs_at + 1;
                let beyond = sum - i128::from(limit.capacity());
                prop_assert!(beyond * period(&limit) <= span * limit_hits(&limit), "{} hits within {} us", sum, span);
            }
        }
    }

    #[test]
    fn leaky_bucket_releases_in_order_at_its_rate(
        scenario in scenario_of(Algorithm::LeakyBucket, HistoryOptions { backwards: Backwards::WithinAPeriod, ..CALM }),
    ) {
        let limit = scenario.limits[0];
        let passed = run_history(&scenario, |_, _, _| Ok(()))?;
        for pair in passed.windows(2) {
            let apart = pair[1].departs_at - pair[0].departs_at;
            // Both times are rounded up: the distance may be a microsecond short, but not shorter.
            prop_assert!(apart >= pair[0].hits * period(&limit) / limit_hits(&limit), "{:?}", pair);
        }
        // Rounding does not add up: over the whole history the rate is exact.
        if let (Some(first), Some(last)) = (passed.first(), passed.last()) {
            let between: i128 = passed[..passed.len() - 1].iter().map(|charge| charge.hits).sum();
            prop_assert!(last.departs_at - first.departs_at >= between * period(&limit) / limit_hits(&limit));
        }
    }

    #[test]
    fn leaky_bucket_refund_keeps_announced_departures(
        scenario in scenario_of(Algorithm::LeakyBucket, HistoryOptions { refunds: true, ..CALM }),
    ) {
        for pair in run_history(&scenario, |_, _, _| Ok(()))?.windows(2) {
            prop_assert!(pair[0].departs_at <= pair[1].departs_at, "{:?}", pair);
        }
    }

    #[test]
    fn leaky_bucket_never_queues_more_than_its_size(scenario in scenario_of(Algorithm::LeakyBucket, CALM)) {
        let limit = scenario.limits[0];
        for charge in run_history(&scenario, |_, _, _| Ok(()))? {
            // The requests ahead of a request fit into the queue without it.
            let before = i128::from(limit.capacity()) - charge.hits;
            let delay = charge.departs_at - charge.charged_at;
            prop_assert!((delay - 1) * limit_hits(&limit) < before * period(&limit) || delay == 0);
        }
    }
}

/// Runs a history; returns the admitted charges, and calls `rejected` for each of the others.
fn run_history(
    scenario: &Scenario,
    rejected: impl Fn(&[Passed], i128, i128) -> TestCaseResult,
) -> Result<Vec<Passed>, TestCaseError> {
    let mut state = State::empty(scenario.limits[0].algorithm());
    let mut passed = Vec::new();
    scenario.run(|limit: &Limit, now: Time, request: ChargeRequest| {
        let result = state.charge(limit, now, request);
        prop_assert!(
            result.delay_us <= request.max_delay_us.min(limit.max_wait_us()),
            "delayed longer than the caller accepts"
        );
        let charged_at = i128::from(now.as_micros());
        if let Hits::Charge(hits) = request.hits {
            if result.admitted {
                passed.push(Passed {
                    charged_at,
                    departs_at: charged_at + i128::from(result.delay_us),
                    hits: i128::from(hits),
                });
            } else {
                rejected(&passed, charged_at, i128::from(hits))?;
            }
        }
        Ok(result)
    })?;
    Ok(passed)
}

/// Hits in a period.
fn limit_hits(limit: &Limit) -> i128 {
    i128::from(limit.requests_per_unit())
}

fn period(limit: &Limit) -> i128 {
    i128::from(limit.period_us())
}

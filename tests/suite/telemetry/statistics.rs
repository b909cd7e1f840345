//! Statistics in memory: of limits, of keys and of descriptors without a rule.

mod decision_history {
    use std::sync::Arc;

    use tollkeeper::base::clock::Time;
    use tollkeeper::telemetry::decision_history::{
        DecisionHistory, MAX_LIMITS_WITH_HISTORY, MinuteCounts, RequestTotals,
    };
    use tollkeeper::telemetry::metrics::limit_stats::{LimitName, LimitStat, LimitStats};

    fn limit(name: &str) -> Arc<LimitStats> {
        Arc::new(LimitStats::new(LimitName::new(["shop", name])))
    }

    fn at(minute: u64, second: u64) -> Time {
        Time::from_micros((minute * 60 + second) * 1_000_000)
    }

    fn matched(history: &DecisionHistory, now: Time, limit: &LimitStats) -> Vec<(u64, u32)> {
        history
            .sum_limits_by_minute(now, &[limit])
            .into_iter()
            .map(|(minute, counts)| (minute, counts.matched))
            .collect()
    }

    #[test]
    fn minute_has_the_difference_of_totals_and_the_last_minute_runs() {
        let (history, login) = (DecisionHistory::default(), limit("login"));
        login.add_to_counter(LimitStat::Ok, 5);
        login.add_to_counter(LimitStat::Over, 2);
        login.add_to_counter(LimitStat::Shadow, 3);
        login.add_to_counter(LimitStat::Local, 7);
        login.add_to_counter(LimitStat::LocalRejected, 4);
        history.record_minute(at(100, 0), std::slice::from_ref(&login), RequestTotals::default());
        login.add_to_counter(LimitStat::Ok, 1);
        let minutes = history.sum_limits_by_minute(at(100, 30), &[&login]);
        let first = MinuteCounts { matched: 17, passed: 5 + 3 + 3, rejected: 2 + 4, exceeded_in_shadow: 3 };
        let running = MinuteCounts { matched: 1, passed: 1, ..MinuteCounts::default() };
        assert_eq!(minutes, [(99, first), (100, running)]);
    }

    #[test]
    fn sixty_minutes_are_kept() {
        let (history, login) = (DecisionHistory::default(), limit("login"));
        for minute in 1..=100 {
            login.add_to_counter(LimitStat::Ok, minute);
            history.record_minute(at(minute + 1, 0), std::slice::from_ref(&login), RequestTotals::default());
        }
        let minutes = matched(&history, at(101, 1), &login);
        let mut expected: Vec<(u64, u32)> = (41..=100).map(|minute| (minute, u32::try_from(minute).unwrap())).collect();
        expected.push((101, 0));
        assert_eq!(minutes, expected);
    }

    #[test]
    fn second_record_of_a_minute_is_ignored_and_a_clock_that_goes_back_clears() {
        let (history, login) = (DecisionHistory::default(), limit("login"));
        let record = |now: Time| {
            login.add_to_counter(LimitStat::Ok, 1);
            history.record_minute(now, std::slice::from_ref(&login), RequestTotals::default());
        };
        record(at(10, 0));
        record(at(10, 59));
        assert_eq!(matched(&history, at(10, 59), &login), [(9, 1), (10, 1)]);
        record(at(11, 0));
        assert_eq!(matched(&history, at(11, 0), &login), [(9, 1), (10, 2), (11, 0)]);
        record(at(5, 0));
        assert_eq!(matched(&history, at(5, 0), &login), [(4, 1), (5, 0)]);
    }

    #[test]
    fn memory_is_bounded_and_only_of_limits_with_decisions() {
        let history = DecisionHistory::default();
        let limits: Vec<_> = (0..MAX_LIMITS_WITH_HISTORY + 10).map(|at| limit(&at.to_string())).collect();
        limits.iter().skip(5).for_each(|limit| limit.add_to_counter(LimitStat::Ok, 1));
        history.record_minute(at(10, 0), &limits, RequestTotals::default());
        let size = history.size();
        assert_eq!((size.limits, size.left_out), (MAX_LIMITS_WITH_HISTORY, 5));
        assert!(size.bytes < MAX_LIMITS_WITH_HISTORY * 1100, "{size:?}");
        // What the running minute had before is not known of a limit that was left out.
        let (last, left_out) = (&limits[MAX_LIMITS_WITH_HISTORY - 1], &limits[MAX_LIMITS_WITH_HISTORY + 9]);
        left_out.add_to_counter(LimitStat::Ok, 7);
        assert_eq!(matched(&history, at(10, 30), left_out), [(9, 0), (10, 0)]);
        // With room for it, its ring begins with what it has by then: the room of limits that are gone is free a
        // minute later.
        history.record_minute(at(11, 0), &limits[10..], RequestTotals::default());
        assert_eq!(history.size().left_out, 5);
        history.record_minute(at(12, 0), &limits[10..], RequestTotals::default());
        assert_eq!((history.size().left_out, matched(&history, at(12, 0), left_out).pop()), (0, Some((12, 0))));
        left_out.add_to_counter(LimitStat::Ok, 3);
        assert_eq!(matched(&history, at(12, 30), left_out), [(9, 0), (10, 0), (11, 0), (12, 3)]);
        assert_eq!(matched(&history, at(12, 30), last), [(9, 1), (10, 0), (11, 0), (12, 0)]);
        // A limit that is gone loses its ring.
        history.record_minute(at(13, 0), &limits[10..20], RequestTotals::default());
        assert_eq!(history.size().limits, 10);
    }
}

mod limit_registry {
    use std::sync::Arc;

    use tollkeeper::telemetry::metrics::limit_registry::LimitRegistry;
    use tollkeeper::telemetry::metrics::limit_stats::{LimitName, LimitStats};

    #[test]
    fn limits_of_rules_are_without_those_that_requests_name() {
        let registry = LimitRegistry::new(10);
        registry.register_rule_limit(LimitName::new(["shop", "user"]));
        assert!(registry.register_request_limit(&["shop", "requested"]).is_some());
        let names = |limits: Vec<Arc<LimitStats>>| -> Vec<String> {
            limits.iter().map(|limit| limit.name().as_str().to_owned()).collect()
        };
        assert_eq!(names(registry.rule_limit_stats()), ["shop.user"]);
        assert_eq!(names(registry.all_limit_stats()), ["shop.user", "shop.requested"]);
    }
}

mod striped_counters {
    use tollkeeper::telemetry::metrics::striped_counters::StripedCounters;

    const STRIPES: usize = 8;

    #[test]
    fn additions_of_many_threads_are_all_counted() {
        let counters = StripedCounters::<2>::default();
        std::thread::scope(|scope| {
            for _ in 0..2 * STRIPES {
                scope.spawn(|| (0..100_000).for_each(|count| counters.add_to_counter(count % 2, 3)));
            }
        });
        let expected = 3 * 50_000 * 2 * STRIPES as u64;
        assert_eq!([counters.counter_value(0), counters.counter_value(1)], [expected, expected]);
    }
}

mod top_keys {
    use tollkeeper::telemetry::top_keys::SampledStatistic::{BusiestKeys, UnmatchedDescriptors};
    use tollkeeper::telemetry::top_keys::{OBSERVATIONS_BEFORE_SAMPLING, weight_if_sampled};

    #[test]
    fn first_observations_are_taken_and_later_ones_stand_for_as_many_as_there_are() {
        let all = std::thread::spawn(|| {
            let first: u64 = (0..OBSERVATIONS_BEFORE_SAMPLING).filter_map(|_| weight_if_sampled(BusiestKeys)).sum();
            let later: u64 = (0..1_600_000).filter_map(|_| weight_if_sampled(BusiestKeys)).sum();
            // Another statistic has exact observations left.
            assert_eq!(weight_if_sampled(UnmatchedDescriptors), Some(1));
            (first, later)
        });
        let (first, later) = all.join().expect("the thread ends");
        assert_eq!(first, u64::from(OBSERVATIONS_BEFORE_SAMPLING));
        assert!((1_500_000..1_700_000).contains(&later), "{later}");
    }
}

mod unmatched_descriptors {
    use tollkeeper::base::clock::Time;
    use tollkeeper::telemetry::unmatched_descriptors::{UnmatchedDescriptor, UnmatchedDescriptors, WINDOW_S};

    const SHARD_COUNT: usize = 4;

    const COUNTERS_PER_SHARD: usize = 32;

    fn record(unmatched: &UnmatchedDescriptors, domain: &str, keys: &[&str], at_s: u64) {
        let keys_of = keys.iter().map(|key| key.as_bytes());
        let descriptor = UnmatchedDescriptor { domain, has_rules: true, keys: keys_of };
        unmatched.record(descriptor, Time::from_secs(at_s), |text| text.extend_from_slice(keys.join(",").as_bytes()));
    }

    #[test]
    fn paths_are_counted_by_domain_and_keys_and_forgotten() {
        let unmatched = UnmatchedDescriptors::new(true);
        let start = 100 * WINDOW_S;
        for _ in 0..3 {
            record(&unmatched, "shop", &["user"], start);
        }
        record(&unmatched, "shop", &["us", "er"], start);
        record(&unmatched, "edge", &["user"], start + WINDOW_S);
        let counts = |at_s: u64| -> Vec<(String, String, u64)> {
            let paths = unmatched.snapshot(Time::from_secs(at_s));
            paths.into_iter().map(|path| (path.domain, path.example, path.count)).collect()
        };
        let row = |domain: &str, example: &str, count| (domain.to_owned(), example.to_owned(), count);
        assert_eq!(counts(start + WINDOW_S), [row("shop", "user", 3), row("edge", "user", 1), row("shop", "us,er", 1)]);
        assert_eq!(counts(start + 2 * WINDOW_S), [row("edge", "user", 1)]);
        unmatched.drop_old_windows(Time::from_secs(start + 3 * WINDOW_S));
        assert_eq!(counts(start + WINDOW_S), []);
    }

    #[test]
    fn number_of_paths_is_bounded_and_frequent_ones_stay() {
        let unmatched = UnmatchedDescriptors::new(true);
        for number in 0..500 {
            record(&unmatched, "shop", &["often"], 1);
            record(&unmatched, "shop", &[&format!("key-{number}")], 1);
        }
        let paths = unmatched.snapshot(Time::from_secs(1));
        assert!(paths.len() <= SHARD_COUNT * COUNTERS_PER_SHARD, "{}", paths.len());
        assert_eq!((&*paths[0].example, paths[0].count), ("often", 500));
        let off = UnmatchedDescriptors::new(false);
        record(&off, "shop", &["user"], 1);
        assert_eq!(off.snapshot(Time::from_secs(1)), []);
    }
}

#[test]
fn name_of_a_limit_keeps_the_domain_as_requests_name_it() {
    use tollkeeper::telemetry::metrics::limit_stats::LimitName;

    let name = LimitName::new(["sh:op", "user"]);
    assert_eq!((name.as_str(), name.domain(), name.known_domain()), ("sh_op.user", "sh_op", Some("sh:op")));
    assert_ne!(name, LimitName::new(["sh_op", "user"]), "another domain");
    for domain in [None, Some("shop"), Some("sh"), Some("sh:op.user"), Some("")] {
        assert_eq!(LimitName::from_published("sh_op.user", domain).known_domain(), None, "{domain:?}");
    }
    let published = LimitName::from_published("sh_op.user", Some("sh:op"));
    assert_eq!((published.domain(), published.known_domain()), ("sh_op", Some("sh:op")));
}

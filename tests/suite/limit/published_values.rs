//! Texts, numbers and hashes that logs and other versions have.

mod algorithm {
    use tollkeeper::limit::algorithm::{Algorithm, CountingMethod};

    #[test]
    fn wire_ids_of_released_versions_stay() {
        let released = [
            ("token_bucket", 0),
            ("leaky_bucket", 1),
            ("fixed_window", 2),
            ("sliding_window_log", 3),
            ("sliding_window_counter", 4),
        ];
        for (name, id) in released {
            let counting = CountingMethod::ALL.into_iter().find(|counting| counting.name() == name).expect(name);
            assert_eq!(counting.properties().wire_id, id, "{name}");
        }
    }

    #[test]
    fn no_two_countings_share_a_wire_id() {
        let mut ids = CountingMethod::ALL.map(|counting| counting.properties().wire_id);
        ids.sort_unstable();
        assert!(ids.is_sorted_by(|id, next| id < next), "{ids:?}");
    }

    #[test]
    fn counting_of_an_algorithm_has_its_name() {
        for algorithm in Algorithm::ALL {
            assert_eq!(CountingMethod::from(algorithm).name(), algorithm.name());
        }
    }
}

mod ban {
    use tollkeeper::limit::ban::Ban;

    #[test]
    fn text_of_a_ban_is_read_again() {
        for (length_us, after) in [(1, 1), (90_000_000, 1), (3_600_000_000, 20), (1_500, 100_000), (7_000_001, 2)] {
            let ban = Ban::new(length_us, after).unwrap();
            for ban in [ban, ban.with_count_of_peeks(true)] {
                assert_eq!(Ban::from_text(&ban.to_string()), Some(ban), "{ban}");
                assert_eq!((ban.length_us(), ban.rejections_before_ban()), (length_us, after.into()), "{ban}");
            }
        }
        for text in ["", "10", "0s", "{for: 10m}", "{for: 10m, after: 0}", "{for: 10m, after: x}", "10m,"] {
            assert_eq!(Ban::from_text(text), None, "{text}");
        }
    }
}

mod counter_path {
    use std::hash::Hasher as _;

    use siphasher::sip128::{Hasher128 as _, SipHasher13};
    use tollkeeper::limit::counter_path::CounterPath;
    use tollkeeper::limit::request::Entry;

    /// Other versions, which share the log's sample, hash the parts one by one.
    #[test]
    fn hash_of_a_path_is_that_of_its_parts() {
        let text: Vec<u8> = (0..=255).cycle().take(1000).collect();
        for length in (0..300).chain([511, 1000]) {
            let (key, value, domain) = (&text[..length % 70], &text[..length], "shop");
            let entries = [Entry { key, value }, Entry { key: value, value: key }];
            let shared: &[(usize, &[u8])] = &[(1, b"a*")];
            let path = CounterPath { domain, entries: &entries, shared, candidate: Some("lower") };
            let mut by_parts = SipHasher13::new_with_keys(3, 4);
            let parts = [(0, domain.as_bytes()), (0, key), (0, value), (0, value), (1, b"a*"), (0, b"lower")];
            for (mark, part) in parts {
                by_parts.write_u64((part.len() as u64) << 1 | mark);
                by_parts.write(part);
            }
            assert_eq!(path.hash_parts(SipHasher13::new_with_keys(3, 4)), by_parts.finish128().as_u128(), "{length}");
        }
    }
}

mod reservation {
    use std::num::NonZeroU32;

    use tollkeeper::limit::reservation::{ReservationPolicy, UnsettledPolicy};

    #[test]
    fn text_of_reservations_is_read_again() {
        for unsettled in [UnsettledPolicy::Keep, UnsettledPolicy::Return] {
            for estimate in [None, NonZeroU32::new(1), NonZeroU32::new(u32::MAX)] {
                for seconds in [1, 600, 86_400, 366 * 86_400] {
                    let written = ReservationPolicy::new(seconds, unsettled, estimate).unwrap();
                    assert_eq!(written.settle_within_us(), u64::from(seconds) * 1_000_000);
                    assert_eq!((written.unsettled_policy(), written.fixed_estimate()), (unsettled, estimate));
                    assert_eq!(ReservationPolicy::from_logged_text(&written.to_string()), Some(written), "{written}");
                }
            }
        }
        for text in ["", "0s", "400d", "{settle_within: 10m, unsettled: x}", "{settle_within: 1m, estimate: 0}"] {
            assert_eq!(ReservationPolicy::from_logged_text(text), None, "{text}");
        }
    }
}

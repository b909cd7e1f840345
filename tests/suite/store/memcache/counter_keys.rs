//! Keys and counts in memcached.

mod keys {
    use std::time::Duration;

    use proptest::collection::vec;
    use proptest::prelude::*;
    use smallvec::smallvec;
    use tollkeeper::base::clock::Time;
    use tollkeeper::limit::algorithm::Algorithm;
    use tollkeeper::limit::charge::{Charge, ChargeRequest, Counter};
    use tollkeeper::limit::counter_path::CounterPath;
    use tollkeeper::limit::period::{Period, Unit};
    use tollkeeper::limit::request::{Entry, Hits};
    use tollkeeper::limit::{Limit, LimitSpec};
    use tollkeeper::settings::counters::KeyFormat;
    use tollkeeper::store::memcache::counter_key::{CounterKey, MemcacheKeyScheme, hash_if_refused};
    use tollkeeper::store::window_key::ExpiryJitter;

    const MAX_KEY_BYTES: usize = 250;

    const MAX_EXPIRATION_UNIX_S: u64 = i32::MAX as u64;

    fn expiration(life_s: u64, now_s: u64) -> u64 {
        CounterKey { bytes: Default::default(), life_s, max_count: 0 }.expiration_s(now_s)
    }

    #[test]
    fn life_of_more_than_thirty_days_is_a_unix_time() {
        const NOW: u64 = 1_800_000_000;
        const MONTH: u64 = 2_592_000;
        assert_eq!([0, 1, 3600, MONTH].map(|life| expiration(life, NOW)), [1, 1, 3600, MONTH]);
        assert_eq!(expiration(MONTH + 1, NOW), NOW + MONTH + 1);
        assert_eq!(expiration(31_536_000, NOW), NOW + 31_536_000);
        // Beyond 32 bits, the longest relative life is the best there is.
        assert_eq!(expiration(31_536_000, MAX_EXPIRATION_UNIX_S), MONTH);
        assert_eq!(expiration(u64::MAX, NOW), MONTH);
    }

    #[test]
    fn key_outlives_its_window_by_ticks_of_the_clock_of_memcached() {
        let period = Period::new(Unit::Second, 1).expect("a period");
        let spec = LimitSpec { count_rejected: Some(true), ..LimitSpec::new(Algorithm::FixedWindow, 1, period) };
        let limit = Limit::new(&spec).expect("a limit");
        let entries = [Entry { key: b"k", value: b"v" }];
        let counter = Counter { limit: &limit, shadow: false, quota: false, tag: 0, epoch: 0 };
        let path = CounterPath { domain: "d", entries: &entries, shared: &[], candidate: None };
        let charge = Charge::new(path, smallvec![counter], ChargeRequest::new(Hits::Charge(1), 0));
        for (format, bytes) in
            [(KeyFormat::Tollkeeper, "p:tk1:{d|k=v}:fixed_window:1s:7"), (KeyFormat::Ratelimit, "p:d_k_v_7")]
        {
            let keys =
                MemcacheKeyScheme { prefix: "p:".to_owned(), format, jitter: ExpiryJitter::up_to(Duration::ZERO) };
            let key = keys.counter_key(&charge, Time::from_secs(7)).expect("a key");
            // A tick may come at once, so a life of 1 s may end within the window.
            assert!(key.life_s > 2, "{key:?}");
            assert_eq!(key.bytes, bytes);
        }
    }

    #[test]
    fn refused_keys_are_hashed() {
        let longest = "k".repeat(MAX_KEY_BYTES);
        for kept in [&longest[..], "d_k_v_1", "d_k_\u{e9}_1", "tkh"] {
            assert_eq!(hash_if_refused(kept.to_owned().into()), kept);
        }
        let too_long = "k".repeat(MAX_KEY_BYTES + 1);
        for refused in [&too_long[..], "a b", "a\r\nflush_all", "a\0", "a\x7f"] {
            let key = hash_if_refused(refused.to_owned().into());
            assert_eq!((key.len(), &key[..4]), (68, &b"tkh:"[..]), "{key:?}");
        }
        assert_ne!(hash_if_refused("a b".into()), hash_if_refused("a  b".into()));
    }

    proptest! {
        #[test]
        fn any_key_is_a_word_of_at_most_250_bytes(bytes in vec(any::<u8>(), 0..400)) {
            let key = hash_if_refused(bytes.into());
            prop_assert!(key.len() <= MAX_KEY_BYTES && key.iter().all(|byte| *byte > b' ' && *byte != 0x7f));
        }
    }
}

mod counts {
    use tollkeeper::limit::charge::MAX_COUNT;
    use tollkeeper::store::memcache::count_before;

    #[test]
    fn wrapped_count_is_the_maximum() {
        assert_eq!([count_before(3, 3), count_before(10, 3)], [0, 7]);
        assert_eq!([count_before(2, 3), count_before(0, 1), count_before(u64::MAX, 1)], [MAX_COUNT; 3]);
    }
}

//! Rows of tables: memory, look-ups, texts, and the cache of rows from Redis.

mod plan_table {
    use std::collections::HashMap;

    use proptest::prelude::*;
    use tollkeeper::limit::period::{Period, Unit};
    use tollkeeper::rules::plan_table::{OwnLimit, PlanOrLimit, PlanTable, RowTextError, RowValue};

    #[test]
    fn a_million_rows_fit_in_35_mib() {
        let mut table = PlanTable::with_capacity(0);
        for row in 0..1_000_000 {
            table.add_row(format!("tenant-{row:05}").as_bytes(), RowValue::Plan("gold"), row).expect("a new value");
        }
        assert!(table.memory_bytes() < 35 << 20, "{} bytes", table.memory_bytes());
    }

    fn value_strategy() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![prop::collection::vec(any::<u8>(), 1..4), prop::collection::vec(any::<u8>(), 1..300)]
    }

    fn row_strategy() -> impl Strategy<Value = (u16, Option<OwnLimit>)> {
        let own = (any::<u32>(), 0..Unit::ALL.len(), 1..4_u32);
        let own = own.prop_filter_map("a period", |(requests_per_unit, unit, multiplier)| {
            let period = Period::new(Unit::ALL[unit], multiplier)?;
            Some(OwnLimit { requests_per_unit, period })
        });
        (0..5_u16, prop::option::of(own))
    }

    proptest! {
        #[test]
        fn look_ups_equal_those_of_a_hash_map(
            rows in prop::collection::vec((value_strategy(), row_strategy()), 0..200),
            others in prop::collection::vec(value_strategy(), 0..50),
        ) {
            let (mut table, mut model) = (PlanTable::with_capacity(0), HashMap::new());
            for (line, (value, (plan, own))) in (1..).zip(&rows) {
                let name = format!("plan{plan}");
                let row = own.map_or(RowValue::Plan(&name), RowValue::Own);
                let added = table.add_row(value, row, line);
                prop_assert_eq!(added.is_ok(), !model.contains_key(value));
                model.entry(value.clone()).or_insert((name, *own));
            }
            prop_assert_eq!(table.row_count(), model.len());
            for value in rows.iter().map(|(value, _)| value).chain(&others) {
                let found = table.find(value).map(|row| match row {
                    PlanOrLimit::Plan(index) => (table.named_plans()[usize::from(index)].name.to_string(), None),
                    PlanOrLimit::Own(own) => (String::new(), Some(own)),
                });
                let expected = model.get(value).map(|(name, own)| match own {
                    None => (name.clone(), None),
                    Some(own) => (String::new(), Some(*own)),
                });
                prop_assert_eq!(found, expected);
            }
        }
    }

    #[test]
    fn limits_and_names_are_parsed() {
        let own = |text: &str| match RowValue::parse(text.as_bytes()) {
            Ok(RowValue::Own(own)) => own.to_string(),
            other => format!("{other:?}"),
        };
        for (text, expected) in [
            ("500/minute", "500/minute"),
            (" 500 / Minute ", "500/minute"),
            ("100/5 minutes", "100/5 minutes"),
            ("100/5minute", "100/5 minutes"),
            ("0/day", "0/day"),
        ] {
            assert_eq!(own(text), expected);
        }
        for text in
            ["500/minutes", "/minute", "+5/minute", "5/", "5/0 minutes", "5/eon", "4294967296/hour", "1/367 days"]
        {
            assert!(matches!(RowValue::parse(text.as_bytes()), Err(RowTextError::InvalidLimit(_))), "{text}");
        }
        assert_eq!(RowValue::parse(b" gold "), Ok(RowValue::Plan("gold")));
        assert_eq!(RowValue::parse(b""), Err(RowTextError::Empty));
        assert_eq!(RowValue::parse(b"\xff"), Err(RowTextError::NotUtf8));
        assert!(matches!(RowValue::parse(b"a b"), Err(RowTextError::InvalidName(_))));
    }
}

mod row_cache {
    use std::time::Duration;

    use tokio::time::Instant;

    use tollkeeper::rules::plan_table::FoundRow;
    use tollkeeper::rules::plan_table::row_cache::{InvalidRow, RowCache, RowFreshness};

    const ROW_OVERHEAD_BYTES: usize = 112;

    #[test]
    fn memory_is_bounded_and_used_rows_stay() {
        let bytes = 64 * 2 * 20 * (ROW_OVERHEAD_BYTES + 10);
        let cache = RowCache::new("t".into(), Duration::from_secs(60), vec!["gold".into()], bytes);
        let now = Instant::now();
        cache.insert(b"used", Some(FoundRow::Plan(0)), now);
        for number in 0..100_000 {
            cache.insert(format!("v{number:09}").as_bytes(), None, now);
            assert_eq!(cache.find(b"used"), Some(Some(FoundRow::Plan(0))));
        }
        assert!(cache.len() * (ROW_OVERHEAD_BYTES + 10) <= bytes, "{} rows", cache.len());
        assert_eq!((cache.find(b"v000000000"), cache.find(b"v000099999")), (None, Some(None)));
    }

    #[test]
    fn rows_age_and_stay_known() {
        let cache = RowCache::new("t".into(), Duration::from_secs(60), vec!["gold".into()], 32 << 20);
        let now = Instant::now();
        assert_eq!(cache.row_freshness(b"a", now), RowFreshness::Unknown);
        cache.insert(b"a", Some(FoundRow::Plan(0)), now);
        let ages = [0, 29, 30, 59, 60].map(|seconds| cache.row_freshness(b"a", now + Duration::from_secs(seconds)));
        assert_eq!(
            ages,
            [
                RowFreshness::Fresh,
                RowFreshness::Fresh,
                RowFreshness::RefreshDue,
                RowFreshness::RefreshDue,
                RowFreshness::Stale
            ]
        );
        cache.mark_changed(b"a");
        assert_eq!(
            (cache.row_freshness(b"a", now), cache.find(b"a")),
            (RowFreshness::Stale, Some(Some(FoundRow::Plan(0))))
        );
        cache.insert(b"a", None, now);
        assert_eq!((cache.row_freshness(b"a", now), cache.find(b"a")), (RowFreshness::Fresh, Some(None)));
        cache.mark_all_changed();
        assert_eq!(cache.row_freshness(b"a", now), RowFreshness::Stale);
        assert_eq!(cache.parse_row(b"gold"), Ok(FoundRow::Plan(0)));
        assert_eq!(cache.parse_row(b"silver"), Err(InvalidRow::UnknownPlan("silver".to_owned())));
    }
}

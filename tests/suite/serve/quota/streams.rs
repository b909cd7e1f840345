//! Messages and tasks of quota streams.

mod messages {
    use bytes::{BufMut as _, BytesMut};
    use prost::encoding::{WireType, encode_key, encode_varint};
    use tollkeeper::base::pb::rlqs::rate_limit_quota_response::bucket_action::BucketAction as Action;
    use tollkeeper::base::pb::rlqs::rate_limit_strategy::{BlanketRule, Strategy as SentStrategy};
    use tollkeeper::base::pb::rlqs::{BucketId, RateLimitQuotaResponse};
    use tollkeeper::limit::division::assignment::{Assignment, ProxyTokenBucket, Strategy};
    use tollkeeper::serve::quota::messages::{ReportField, ReportFields, push_assignment};

    const MAX_USAGE_BYTES: usize = 8192;

    /// A usage whose id has this many empty pairs, of two bytes each in a message.
    fn usage_with_empty_pairs(pairs: usize) -> BytesMut {
        let mut id = BytesMut::new();
        (0..pairs).for_each(|_| id.put_slice(&[0x0a, 0]));
        let mut usage = BytesMut::new();
        encode_key(1, WireType::LengthDelimited, &mut usage);
        encode_varint(id.len() as u64, &mut usage);
        usage.put(id);
        let mut report = BytesMut::new();
        encode_key(2, WireType::LengthDelimited, &mut report);
        encode_varint(usage.len() as u64, &mut report);
        report.put(usage);
        report
    }

    #[test]
    fn long_usages_are_not_decoded() {
        let field = |pairs| ReportFields::new(usage_with_empty_pairs(pairs).freeze()).next_field();
        assert!(matches!(field(1_000_000), Ok(Some(ReportField::TooLong))));
        assert!(matches!(field(MAX_USAGE_BYTES / 2), Ok(Some(ReportField::TooLong))));
        assert!(matches!(field(64), Ok(Some(ReportField::Usage(_)))));
    }

    /// Strategies and times to live of the actions of an assignment of tokens.
    fn actions(starts_full: bool) -> Vec<(SentStrategy, i64)> {
        let strategy = Strategy::Tokens(ProxyTokenBucket { max: 40, fill: 4, interval_s: 1 });
        let mut response = RateLimitQuotaResponse::default();
        let assignment = Assignment { strategy, starts_full, ttl_s: 15 };
        push_assignment(&mut response, &BucketId::default(), assignment);
        let actions = response.bucket_action.into_iter().map(|action| {
            let Some(Action::QuotaAssignmentAction(sent)) = action.bucket_action else { panic!("{action:?}") };
            let ttl = sent.assignment_time_to_live.expect("without one, Envoy never puts it in force");
            (sent.rate_limit_strategy.unwrap().strategy.unwrap(), ttl.seconds)
        });
        actions.collect()
    }

    #[test]
    fn denial_goes_before_a_bucket_that_begins_full() {
        let [deny, bucket] = &*actions(true) else { panic!("a pair") };
        assert_eq!(*deny, (SentStrategy::BlanketRule(BlanketRule::DenyAll.into()), 15));
        assert_eq!(actions(false), [*bucket]);
        let (SentStrategy::TokenBucket(bucket), 15) = bucket else { panic!("{bucket:?}") };
        // Envoy takes an interval below a second as no limit.
        assert_eq!(bucket.fill_interval, Some(prost_types::Duration { seconds: 1, nanos: 0 }));
    }
}

mod task {
    use std::sync::Arc;

    use tollkeeper::base::clock::{Clock, Time};
    use tollkeeper::base::pb::rlqs::rate_limit_quota_response::bucket_action::BucketAction as Action;
    use tollkeeper::base::pb::rlqs::rate_limit_quota_usage_reports::BucketQuotaUsage;
    use tollkeeper::base::pb::rlqs::{BucketId, RateLimitQuotaResponse};
    use tollkeeper::decide::decider::Decider;
    use tollkeeper::rules::live::LiveRules;
    use tollkeeper::serve::grpc::service::RateLimitService;
    use tollkeeper::serve::quota::service::QuotaService;
    use tollkeeper::serve::quota::stream::StreamTask;
    use tollkeeper::settings::Settings;
    use tollkeeper::store::memory::MemoryStore;

    const START: Time = Time::from_secs(1_800_000_000);

    /// A task of a stream; its clock stands at [`START`].
    fn start_task() -> StreamTask {
        let variables = [("TOLLKEEPER_RLQS".into(), "true".into())];
        let (settings, _) = Settings::from_env(variables.into_iter()).expect("it is valid");
        let decider = Decider::new(MemoryStore::new(1 << 20).into(), settings.decisions, Arc::default());
        let service = RateLimitService::new(Clock::manual(START), Arc::new(LiveRules::default()), decider);
        let quota = QuotaService::start(Arc::new(service), settings.grpc.max_quota_buckets.expect("it is on"));
        let handle = quota.open_stream(None, true);
        StreamTask::new(quota, handle, None)
    }

    #[tokio::test]
    async fn bucket_without_requests_is_abandoned_after_a_minute() {
        let mut task = start_task();
        let usage = |allowed| {
            let usage = BucketQuotaUsage { bucket_id: Some(BucketId::default()), ..BucketQuotaUsage::default() };
            vec![Box::new(BucketQuotaUsage { num_requests_allowed: allowed, ..usage })]
        };
        let mut is_abandoned = async |allowed: u64, second: u64| {
            let now = START.plus_us(second * 1_000_000);
            task.take_usages(usage(allowed), now).await;
            let mut response = RateLimitQuotaResponse::default();
            task.add_actions(0, &mut response, now);
            response.bucket_action.iter().any(|it| matches!(it.bucket_action, Some(Action::AbandonAction(_))))
        };
        assert!(!is_abandoned(1, 0).await);
        assert!(!is_abandoned(1, 40).await);
        assert!(!is_abandoned(0, 99).await, "59 s after the last request");
        assert!(is_abandoned(0, 100).await);
        assert_eq!(task.quota.bucket_count(), 0);
    }
}

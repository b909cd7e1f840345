//! Single steps of the ledger, one proof each: what a broken step would give away.

use super::*;
use tollkeeper::limit::division::assign::{LentChange, LentHits, LentTarget, Step, next_strategy};
use tollkeeper::limit::division::assignment::Retirement;
use tollkeeper::limit::division::empty_buckets::{EmptyBuckets, RecentlyUsedRefill};
use tollkeeper::limit::division::holder::Part;
use tollkeeper::limit::division::ledger::{LENT_TTL_S, RATE_TTL_S};
use tollkeeper::limit::hold::{HeldAmount, HoldAnswer, HoldRequest, OtherPool};

const SECOND_US: u64 = 1_000_000;
const START: Time = Time::from_micros(1_800_000_000_000_000);

fn at(second: u64) -> Time {
    START.plus_us(second * SECOND_US)
}

/// A division with one proxy that was assigned a part of a limit of 100; returns the part too.
fn division_with_one_proxy(unit: Unit) -> (Division<u32>, u64) {
    let limit = limit(Algorithm::FixedWindow, 100, unit, None);
    let mut division = Division::new([DividedLimit::new(&limit)], START);
    division.join(1, true, START);
    division.record_report(0, Usage { allowed: 0, denied: 1, elapsed_us: 0, received: START }, START);
    request_and_grant_all(&mut division, START);
    let assignment = division.assign(0, START).expect("the first report is answered");
    division.record_ping_ack(0, START.plus_us(1), START);
    let Strategy::Tokens(tokens) = assignment.strategy else { panic!("{assignment:?}") };
    (division, tokens.max.into())
}

/// A division whose one proxy reported at 5 s that two hits are left of its part, while the store has more; returns the
/// part too.
fn division_with_two_hits_left() -> (Division<u32>, u64) {
    let (mut division, part) = division_with_one_proxy(Unit::Day);
    division.record_report(0, usage(part - 2, 0, at(5)), at(5));
    request_and_grant_all(&mut division, at(5));
    grant(&mut division, 60, at(5));
    (division, part)
}

/// Asks a store that grants everything; returns what was asked.
fn request_and_grant_all(division: &mut Division<u32>, now: Time) -> Option<HoldRequest> {
    let request = division.next_pool_request(0, now)?;
    let grant = HoldAnswer { granted: request.wanted, ..HoldAnswer::default() };
    division.record_answer(0, &request, grant, now);
    Some(request)
}

/// Grants what to hold, for as long as an assignment of lent hits lasts.
fn grant(division: &mut Division<u32>, held: u64, now: Time) {
    let request = HoldRequest { lasts_us: 61 * SECOND_US, ..HoldRequest::default() };
    let held = HeldAmount { hits: held, capacity: 0 };
    division.record_answer(0, &request, HoldAnswer { granted: held, ..HoldAnswer::default() }, now);
}

fn usage(allowed: u64, denied: u64, received: Time) -> Usage {
    Usage { allowed, denied, elapsed_us: 5 * SECOND_US, received }
}

#[test]
fn assignment_that_ends_without_a_report_counts_as_used() {
    let (mut division, part) = division_with_one_proxy(Unit::Day);
    division.expire(at(62));
    let request = division.next_pool_request(0, at(62)).expect("it has something to tell");
    assert_eq!(request.used, part);
}

#[test]
fn refilled_bucket_may_use_lent_hits_as_long_as_it_is_renewed() {
    let limits =
        [(50, Unit::Second), (100_000, Unit::Day)].map(|(hits, unit)| limit(Algorithm::FixedWindow, hits, unit, None));
    let mut division = Division::new(limits.iter().map(DividedLimit::new), START);
    division.join(1, true, START);
    division.record_report(0, Usage { allowed: 0, denied: 1, elapsed_us: 0, received: START }, START);
    for second in (0..100).step_by(5) {
        let now = at(second);
        if second > 0 {
            division.record_report(0, usage(125, 0, now), now);
            assert!(division.reserved(1) >= 125, "at {second} s: {}", division.reserved(1));
        }
        division.expire(now);
        for pool in 0..2 {
            let Some(request) = division.next_pool_request(pool, now) else { continue };
            let until = now.plus_us(request.lasts_us);
            let answer = HoldAnswer { granted: request.wanted, now, until, ..HoldAnswer::default() };
            division.record_answer(pool, &request, answer, now);
        }
        if division.assign(0, now).is_some() {
            division.record_ping_ack(0, now.plus_us(1), now);
        }
    }
}

#[test]
fn report_that_may_have_waited_confirms_nothing() {
    // Requests were denied: if the report was made under the assignment, its bucket is empty.
    let (mut division, part) = division_with_one_proxy(Unit::Day);
    division.record_report(0, usage(0, 5, at(5)), at(5));
    division.record_report(0, usage(0, 5, at(10)), at(10));
    assert_eq!(division.reserved(0), 0);
    // This process stood still since before the sending: the same reports may be older than the assignment.
    let (mut division, _) = division_with_one_proxy(Unit::Day);
    division.record_report(0, usage(0, 5, START), at(5));
    division.record_report(0, usage(0, 5, START), at(10));
    assert_eq!(division.reserved(0), part);
}

#[test]
fn report_within_a_second_of_the_sending_confirms_nothing() {
    let (mut division, part) = division_with_one_proxy(Unit::Day);
    let soon = START.plus_us(SECOND_US / 2);
    division.record_report(0, usage(0, 5, soon), soon);
    division.record_report(0, usage(0, 5, soon.plus_us(1)), soon.plus_us(1));
    assert_eq!(division.reserved(0), part);
}

#[test]
fn report_within_a_second_of_a_new_bucket_does_not_bound_what_passed_before_it() {
    let (mut division, _) = division_with_two_hits_left();
    let assignment = division.assign(0, at(5)).expect("it has little left");
    let Strategy::Tokens(tokens) = assignment.strategy else { panic!("{assignment:?}") };
    division.record_ping_ack(0, at(6), at(5));
    let soon = at(5).plus_us(SECOND_US / 2);
    division.record_report(0, usage(0, 0, soon), soon);
    // The two that were left passed before the new bucket came, and after the report that was on its way.
    division.record_report(0, usage(2, 0, at(10)), at(10));
    assert_eq!(division.reserved(0), u64::from(tokens.max));
}

#[test]
fn what_is_given_back_is_not_handed_out_while_the_store_is_asked() {
    let (mut division, _) = division_with_one_proxy(Unit::Second);
    // The proxy gives up most, and that has rested.
    division.record_report(0, usage(5, 0, at(5)), at(5));
    let others = vec![OtherPool { pool: PoolId([2; 16]), demand: 100, held: HeldAmount::default(), until: at(100) }];
    let request = HoldRequest { lasts_us: 16 * SECOND_US, ..HoldRequest::default() };
    let held = HeldAmount { hits: division.pools[0].hits.held, capacity: 0 };
    division.record_answer(0, &request, HoldAnswer { granted: held, others, ..HoldAnswer::default() }, at(5));
    division.assign(0, at(5)).expect("its part shrinks");
    division.record_ping_ack(0, at(6), at(5));
    division.record_report(0, usage(5, 0, at(10)), at(10));
    division.expire(at(10));
    let before = division.free_share(0);
    let request = division.next_pool_request(0, at(10)).expect("another replica has more demand");
    assert!(before > 0 && request.wanted.hits < held.hits, "{before} free, {request:?}");
    assert_eq!(division.free_share(0) + division.reserved(0), request.wanted.hits);
    // Nor after an answer that was lost.
    division.record_unanswered_request(0, &request);
    assert_eq!(division.free_share(0) + division.reserved(0), request.wanted.hits);
}

#[test]
fn hits_of_a_lost_stream_stay_held_until_its_assignment_ends() {
    let (mut division, part) = division_with_one_proxy(Unit::Minute);
    division.leave(0, at(5));
    division.expire(at(30));
    assert_eq!(division.reserved(0), part, "the proxy may use them in the next window");
    division.expire(at(62));
    assert_eq!(division.next_pool_request(0, at(62)).map(|request| request.used), Some(part));
}

#[test]
fn hits_of_an_unknown_assignment_are_no_part_of_what_is_assigned() {
    let limit = limit(Algorithm::FixedWindow, 100, Unit::Day, None);
    let mut division = Division::new([DividedLimit::new(&limit)], START);
    division.join(1, true, START);
    // Not a first request: the proxy comes from another replica, and has nothing any more.
    division.record_report(0, usage(0, 9, START), START);
    request_and_grant_all(&mut division, START);
    assert!(division.assign(0, START).is_some());
    let part = division.reserved(0);
    // These may have passed before the assignment came.
    let soon = START.plus_us(SECOND_US / 2);
    division.record_report(0, usage(7, 0, soon), soon);
    assert_eq!(division.reserved(0), part);
}

#[test]
fn bucket_of_a_proxy_that_admits_without_an_assignment_is_not_raised_in_proportion() {
    let limit = limit(Algorithm::FixedWindow, 100, Unit::Day, None);
    for allowed in [0, 1] {
        let mut division = Division::new([DividedLimit::new(&limit)], START);
        division.join(1, true, START);
        // The proxy says what it does with its first request.
        division.record_report(0, Usage { allowed, denied: 1 - allowed, elapsed_us: 0, received: START }, START);
        request_and_grant_all(&mut division, START);
        grant(&mut division, 40, START);
        assert!(division.assign(0, START).is_some());
        division.record_report(0, usage(2, 0, at(5)), at(5));
        grant(&mut division, 90, at(5));
        division.holders[0].demand.take_sample(1000, SECOND_US);
        let raised = division.assign(0, at(5)).expect("more is free");
        // What it had left beside what was reported would be raised too.
        assert_eq!(raised.starts_full, allowed == 1);
    }
}

#[test]
fn hits_of_a_rate_that_became_lent_hits_are_given_back_when_its_proxies_are_gone() {
    let mut division = Division::new([DividedLimit::new(&bucket(50, 50, 10))], START);
    division.join(1, true, START);
    division.record_report(0, Usage { allowed: 0, denied: 1, elapsed_us: 0, received: START }, START);
    request_and_grant_all(&mut division, START);
    assert!(division.assign(0, START).is_some());
    division.record_report(0, usage(50, 0, at(5)), at(5));
    // Full again in 250 s.
    division.change_limits([DividedLimit::new(&bucket(2, 50, 10))]);
    // What the proxy had is over, and has not rested.
    division.expire(at(40));
    division.expire(at(41));
    division.leave(0, at(42));
    let asked = division.next_pool_request(0, at(60)).expect("something is held");
    assert_eq!(asked.wanted, HeldAmount::default());
}

#[test]
fn change_waits_until_the_one_before_it_is_confirmed() {
    let (mut division, _) = division_with_one_proxy(Unit::Day);
    let shrink = |division: &mut Division<u32>, held: u64, now: Time| {
        grant(division, held, now);
        division.assign(0, now)
    };
    division.record_report(0, usage(1, 0, at(5)), at(5));
    division.holders[0].demand.take_sample(1000, SECOND_US);
    assert!(shrink(&mut division, 40, at(5)).is_some(), "the first change");
    assert_eq!(shrink(&mut division, 10, at(6)), None, "the second");
    division.record_report(0, usage(1, 0, at(10)), at(10));
    division.holders[0].demand.take_sample(1000, SECOND_US);
    assert_eq!(shrink(&mut division, 10, at(10)), None, "a report may come where responses do not");
    division.record_ping_ack(0, at(5).plus_us(1), at(11));
    division.record_report(0, usage(1, 0, at(15)), at(15));
    division.holders[0].demand.take_sample(1000, SECOND_US);
    assert!(shrink(&mut division, 10, at(15)).is_some(), "the second, later");
}

#[test]
fn silent_proxy_gets_neither_a_renewal_nor_more() {
    let (mut division, _) = division_with_one_proxy(Unit::Day);
    division.record_report(0, usage(1, 0, at(29)), at(29));
    assert_eq!(division.assign(0, at(29)), None, "it lasts for 31 s");
    request_and_grant_all(&mut division, at(35));
    division.record_ping_ack(0, at(29), at(35));
    assert_eq!(division.assign(0, at(35)), None, "something between may reply to PINGs for it");
    division.record_report(0, usage(1, 0, at(35)), at(35));
    assert!(division.assign(0, at(35)).is_some());
    // A rate: other replicas leave more to this one.
    let (mut division, _) = division_with_one_proxy(Unit::Second);
    division.record_report(0, usage(5, 0, at(5)), at(5));
    request_and_grant_all(&mut division, at(11));
    division.record_ping_ack(0, at(5), at(11));
    assert_eq!(division.assign(0, at(11)), None);
    division.record_report(0, usage(5, 0, at(11)), at(11));
    assert!(division.assign(0, at(11)).is_some());
}

#[test]
fn division_without_holders_is_forgotten_after_a_lost_answer() {
    // A rate, of which no hits are charged.
    let (mut division, _) = division_with_one_proxy(Unit::Second);
    division.leave(0, at(5));
    division.expire(at(20));
    let request = division.next_pool_request(0, at(20)).expect("it gives back what it holds");
    division.record_unanswered_request(0, &request);
    assert!(division.is_empty());
    // Hits that were used are told again, until there is an answer.
    let (mut division, part) = division_with_one_proxy(Unit::Day);
    division.leave(0, at(5));
    division.expire(at(62));
    let request = division.next_pool_request(0, at(62)).expect("it has something to tell");
    division.record_unanswered_request(0, &request);
    assert!(!division.is_empty());
    assert_eq!(division.next_event(at(62)), Some(at(72)));
    division.expire(at(72));
    let again = request_and_grant_all(&mut division, at(72)).expect("it is told again");
    assert_eq!((again.used, again.first_number), (part, request.number));
    assert!(division.is_empty());
    assert_eq!(division.next_event(at(72)), None);
}

#[test]
fn hits_are_charged_once_the_unknown_assignment_is_over() {
    let limit = limit(Algorithm::FixedWindow, 100, Unit::Day, None);
    let mut division = Division::new([DividedLimit::new(&limit)], START);
    division.join(1, true, START);
    division.record_report(0, usage(3, 0, START), START);
    assert_eq!(division.pools[0].hits.used, 0, "another assignment of this proxy admitted them, and is charged");
    division.record_report(0, usage(4, 0, at(62)), at(62));
    assert_eq!(division.pools[0].hits.used, 4);
}

#[test]
fn last_hits_are_charged_once_and_those_of_the_next_division_too() {
    let limit = limit(Algorithm::FixedWindow, 100, Unit::Day, None);
    let (mut held, mut state) = (CounterHolds::default(), State::empty_for(&limit));
    let mut room_after = |request: HoldRequest, second: u64| {
        let counter = StateWithLimit { limit: &limit, state: &mut state };
        held.charge_used_and_grant(counter, PoolId([1; 16]), request, at(second)).room.hits
    };
    let told = |second: u64, hits: u64| {
        let mut division: Division<u32> = Division::new([DividedLimit::new(&limit)], at(second));
        division.pools[0].hits.used = hits;
        division.next_pool_request(0, at(second)).expect("it has something to tell")
    };
    let last = told(0, 10);
    assert_eq!(room_after(last, 0), 90);
    // The answer was lost, and then another.
    assert_eq!(room_after(last, 10), 90);
    assert_eq!(room_after(last, 19), 90);
    // The key has proxies again.
    assert_eq!(room_after(told(20, 4), 20), 86);
}

#[test]
fn idle_proxy_gives_its_hits_back_before_its_bucket_is_abandoned() {
    let (mut division, part) = division_with_one_proxy(Unit::Day);
    division.record_report(0, usage(0, 0, at(5)), at(5));
    let Retirement::Assign(assignment) = division.retire(0, at(5)) else { panic!("it has {part} hits") };
    let Strategy::Tokens(tokens) = assignment.strategy else { panic!("{assignment:?}") };
    assert_eq!((tokens.max, assignment.starts_full), (1, false));
    division.record_ping_ack(0, at(5).plus_us(1), at(6));
    assert_eq!(division.retire(0, at(6)), Retirement::Wait, "it may have used more before that");
    division.record_report(0, usage(0, 0, at(10)), at(10));
    assert_eq!((division.retire(0, at(10)), division.reserved(0)), (Retirement::Done, 1));
    // A rate has nothing that a proxy could have used and not reported.
    let (mut division, _) = division_with_one_proxy(Unit::Second);
    assert_eq!(division.retire(0, at(5)), Retirement::Done);
}

#[test]
fn assignment_lasts_for_15_s_at_least() {
    let (division, _) = division_with_one_proxy(Unit::Second);
    let ends = division.build_holder_report(&division.holders[0]).ends;
    assert_eq!(ends, at(RATE_TTL_S.into()));
    const { assert!(RATE_TTL_S >= 15 && LENT_TTL_S >= 15) };
    // A renewal of lent hits, at any time of the window that does not end with the next report.
    for left_s in 11..=60 {
        let limit = limit(Algorithm::FixedWindow, 100, Unit::Minute, None);
        let mut division = Division::new([DividedLimit::new(&limit)], START);
        division.join(1, true, START);
        division.record_report(0, Usage { allowed: 0, denied: 1, elapsed_us: 0, received: START }, START);
        let grant = |division: &mut Division<u32>, now: Time| {
            let request = division.next_pool_request(0, now).expect("it is due");
            let window_end = Some(at(50 + left_s));
            division.record_answer(
                0,
                &request,
                HoldAnswer { granted: request.wanted, window_end, ..HoldAnswer::default() },
                now,
            );
        };
        grant(&mut division, START);
        division.assign(0, START).expect("the first report is answered");
        division.record_report(0, usage(1, 0, at(50)), at(50));
        grant(&mut division, at(50));
        let renewed = division.assign(0, at(50)).expect("it ends soon");
        assert!(renewed.ttl_s >= 15, "{left_s} s of the window are left: {renewed:?}");
    }
}

#[test]
fn assignment_ends_before_the_hold() {
    let limit = limit(Algorithm::FixedWindow, 100, Unit::Day, None);
    let mut division = Division::new([DividedLimit::new(&limit)], START);
    division.join(1, true, START);
    division.record_report(0, Usage { allowed: 0, denied: 1, elapsed_us: 0, received: START }, START);
    let request = division.next_pool_request(0, START).expect("it holds nothing");
    let request = HoldRequest { lasts_us: 20 * SECOND_US, ..request };
    division.record_answer(0, &request, HoldAnswer { granted: request.wanted, ..HoldAnswer::default() }, START);
    assert_eq!(division.assign(0, START).map(|assignment| assignment.ttl_s), Some(19));
    // There is no answer of the store, or its hold is over.
    let mut division = Division::new([DividedLimit::new(&limit)], START);
    division.join(1, true, START);
    division.record_report(0, Usage { allowed: 0, denied: 1, elapsed_us: 0, received: START }, START);
    assert_eq!(division.assign(0, START), None);
}

#[test]
fn bucket_that_is_full_after_a_change_denies_until_the_old_one_has_rested() {
    let limit = limit(Algorithm::FixedWindow, 100, Unit::Second, None);
    for keeps_ratio in [true, false] {
        let mut division = Division::new([DividedLimit::new(&limit)], START);
        division.join(1, keeps_ratio, START);
        division.record_report(0, Usage { allowed: 0, denied: 1, elapsed_us: 0, received: START }, START);
        request_and_grant_all(&mut division, START);
        division.assign(0, START).expect("the first report is answered");
        // Another proxy comes, and this one uses little.
        division.join(2, keeps_ratio, at(5));
        division.record_report(0, usage(5, 0, at(5)), at(5));
        division.record_report(1, Usage { allowed: 0, denied: 1, elapsed_us: 0, received: at(5) }, at(5));
        request_and_grant_all(&mut division, at(5));
        let changed = division.assign(0, at(5)).expect("it gets less");
        assert_eq!(changed.strategy == Strategy::Deny, !keeps_ratio, "{changed:?}");
        assert!(!changed.starts_full, "{changed:?}");
    }
}

#[test]
fn assignment_may_be_in_use_until_its_time_after_the_proxy_received_it() {
    for (received, over) in [(Some(0), 16), (Some(7), 23), (None, 16)] {
        let limit = limit(Algorithm::FixedWindow, 100, Unit::Second, None);
        let mut division = Division::new([DividedLimit::new(&limit)], START);
        division.join(1, true, START);
        division.record_report(0, Usage { allowed: 0, denied: 1, elapsed_us: 0, received: START }, START);
        request_and_grant_all(&mut division, START);
        let free = division.free_share(0);
        assert_eq!(division.assign(0, START).map(|assignment| assignment.ttl_s), Some(15));
        if let Some(second) = received {
            division.record_ping_ack(0, START.plus_us(1), at(second));
        }
        division.expire(at(15));
        division.expire(Time::from_micros(at(over).as_micros() - 1));
        assert!(division.free_share(0) < free, "received {received:?}");
        division.expire(at(over));
        assert_eq!(division.free_share(0), free, "received {received:?}");
    }
}

#[test]
fn silent_proxy_leaves_the_division() {
    let (mut division, _) = division_with_one_proxy(Unit::Second);
    division.record_report(0, usage(50, 0, at(5)), at(5));
    let want = |second| division.pools[0].want(&division.holders[0], 1, at(second));
    assert_eq!((want(16) > 0, want(17)), (true, 0));
}

#[test]
fn failed_request_is_repeated() {
    let (mut division, _) = division_with_one_proxy(Unit::Day);
    division.record_report(0, usage(10, 0, at(5)), at(5));
    let request = division.next_pool_request(0, at(5)).expect("it has something to tell");
    division.record_unanswered_request(0, &request);
    division.record_report(0, usage(3, 0, at(10)), at(10));
    let again = division.next_pool_request(0, at(10)).expect("it is told again");
    assert_eq!((again.used, again.first_number), (10, request.number));
    let grant = HoldAnswer { granted: again.wanted, ..HoldAnswer::default() };
    division.record_answer(0, &again, grant, at(10));
    let next = division.next_pool_request(0, at(10)).expect("three more were used");
    assert_eq!((next.used, next.number, next.first_number), (3, again.number + 1, 0));
}

#[test]
fn refill_moves_once_it_is_out_of_use_and_the_bucket_after_a_rest() {
    let (mut division, part) = division_with_one_proxy(Unit::Second);
    division.join(2, true, at(5));
    division.record_report(0, usage(5, 0, at(5)), at(5));
    division.record_report(1, Usage { allowed: 0, denied: 1, elapsed_us: 0, received: at(5) }, at(5));
    request_and_grant_all(&mut division, at(5));
    let before = (division.free_share(0), division.free_buckets(0));
    division.assign(0, at(5)).expect("it gets less");
    division.expire(at(6));
    assert_eq!((division.free_share(0), division.free_buckets(0)), before, "of {part}, without evidence");
    division.record_ping_ack(0, at(6), at(6));
    let has = division.holders[0].rates[0].now;
    let given_up = (part - has.refill, part - has.bucket);
    assert!(given_up.0 > given_up.1 && given_up.1 > 0, "{given_up:?}");
    // The margin after the acknowledgement.
    division.expire(at(7));
    assert_eq!((division.free_share(0), division.free_buckets(0)), (before.0 + given_up.0, before.1));
    // And the time in which it is full again.
    division.expire(at(8));
    assert_eq!((division.free_share(0), division.free_buckets(0)), (before.0 + given_up.0, before.1 + given_up.1));
}

#[test]
fn empty_buckets_are_filled_by_refill_that_nobody_has() {
    let refill_us = 10 * SECOND_US;
    let mut empty = EmptyBuckets::default();
    empty.fill(refill_us, START);
    empty.add(Part { refill: 0, bucket: 20 }, 0, refill_us);
    empty.set_unowned_refill(5);
    empty.fill(refill_us, at(10));
    assert_eq!(empty.share, 15);
    // Some was handed out meanwhile, and came back.
    empty.lower_unowned_refill_to(2);
    empty.lower_unowned_refill_to(9);
    empty.fill(refill_us, at(15));
    assert_eq!(empty.share, 14);
    // Without a refill, nothing is filled.
    empty.set_unowned_refill(0);
    empty.fill(refill_us, at(100));
    assert_eq!((empty.share, empty.full_at(refill_us)), (14, None));
    // Less than a hit is kept for the next time.
    empty.set_unowned_refill(1);
    empty.fill(refill_us, at(109));
    assert_eq!((empty.share, empty.full_at(refill_us)), (14, Some(at(240))));
    empty.fill(refill_us, at(110));
    assert_eq!(empty.share, 13);
    // What is added later gains nothing from the time before.
    empty.set_unowned_refill(100);
    empty.fill(refill_us, at(1000));
    empty.fill(refill_us, at(2000));
    empty.add(Part { refill: 5, bucket: 6 }, 0, refill_us);
    empty.fill(refill_us, at(2000));
    assert_eq!(empty.share, 6);
    // But what came with it does, from the time on that it was out of use.
    empty.add(Part { refill: 5, bucket: 6 }, 10 * SECOND_US, refill_us);
    assert_eq!(empty.share, 7);
}

#[test]
fn refill_rests_although_more_goes_out_of_use_again_and_again() {
    let mut recently_used = RecentlyUsedRefill::default();
    let shares = [(0, 7), (6, 1), (12, 1), (18, 1), (24, 0)].map(|(second, refill)| {
        recently_used.add(refill, 10 * SECOND_US, at(second));
        recently_used.share(10 * SECOND_US, at(second))
    });
    assert_eq!(shares, [7, 8, 9, 10, 2]);
    assert_eq!([33, 34, 44].map(|second| recently_used.share(10 * SECOND_US, at(second))), [2, 0, 0]);
}

#[test]
fn replica_that_was_granted_nothing_of_a_bucket_asks_again() {
    let limit = limit(Algorithm::TokenBucket, 10, Unit::Minute, None);
    let mut division = Division::new([DividedLimit::new(&limit)], START);
    division.join(1, true, START);
    division.record_report(0, Usage { allowed: 0, denied: 1, elapsed_us: 0, received: START }, START);
    let request = division.next_pool_request(0, START).expect("it has a proxy");
    let all = HeldAmount { hits: 0, capacity: 10 };
    let others = vec![OtherPool { pool: PoolId([2; 16]), demand: 10, held: all, until: at(60) }];
    division.record_answer(0, &request, HoldAnswer { others, ..HoldAnswer::default() }, START);
    assert_eq!(division.assign(0, START).map(|assignment| assignment.strategy), Some(Strategy::Deny));
    division.record_report(0, usage(0, 5, at(5)), at(5));
    division.expire(at(5));
    let request = division.next_pool_request(0, at(5)).expect("the bucket was refilled meanwhile");
    assert!(request.wanted.capacity > 0, "{request:?}");
}

#[test]
fn newcomer_gets_a_part_before_its_demand_is_known() {
    let (mut division, part) = division_with_one_proxy(Unit::Second);
    division.record_report(0, usage(500, 500, at(5)), at(5));
    division.join(2, true, at(5));
    division.record_report(1, Usage { allowed: 0, denied: 1, elapsed_us: 0, received: at(5) }, at(5));
    request_and_grant_all(&mut division, at(5));
    division.assign(0, at(5)).expect("it must leave a part to the newcomer");
    let refill = division.holders[0].rates[0].now.refill;
    assert!(refill <= part / 3 * 2, "{refill} of {part}");
}

#[test]
fn first_sample_is_the_demand() {
    let (mut division, _) = division_with_one_proxy(Unit::Second);
    division.record_report(0, usage(50, 0, at(5)), at(5));
    assert_eq!(division.holders[0].demand.mhps, 10_000);
}

#[test]
fn hold_of_a_window_lasts_until_its_rates_count_no_more() {
    let period = Period::new(Unit::Second, 10).expect("ten seconds are a period");
    let limit = Limit::new(&LimitSpec::new(Algorithm::FixedWindow, 100, period)).expect("the limit is valid");
    let mut division = Division::new([DividedLimit::new(&limit)], START);
    division.join(1, true, START);
    division.record_report(0, Usage { allowed: 0, denied: 1, elapsed_us: 0, received: START }, START);
    let request = request_and_grant_all(&mut division, START).expect("it holds nothing");
    let assignment = division.assign(0, START).expect("the first report is answered");
    // If this replica dies, the last hits pass when the assignment ends, and count in the window of that time.
    assert!(request.lasts_us >= (u64::from(assignment.ttl_s) + 10) * SECOND_US, "{request:?}, {assignment:?}");
}

#[test]
fn nearly_empty_bucket_is_replaced() {
    let (mut division, part) = division_with_two_hits_left();
    // The two that are left may be one and a bit: a raise by the ratio would give half of what is reserved for it.
    let assignment = division.assign(0, at(5)).expect("it has two hits left");
    let Strategy::Tokens(tokens) = assignment.strategy else { panic!("{assignment:?}") };
    assert!(assignment.starts_full && u64::from(tokens.max) <= part, "{assignment:?}");
}

#[test]
fn smaller_limit_leaves_no_more_than_it_free() {
    let (mut division, _) = division_with_two_hits_left();
    assert!(division.free_share(0) > 20);
    division.change_limits([DividedLimit::new(&limit(Algorithm::FixedWindow, 20, Unit::Day, None))]);
    assert!(division.free_share(0) + division.reserved(0) <= 20, "{} free", division.free_share(0));
}

#[test]
fn refill_is_given_back_to_the_store_after_a_rest() {
    let (mut division, _) = division_with_one_proxy(Unit::Second);
    division.record_report(0, usage(5, 0, at(5)), at(5));
    let others = vec![OtherPool { pool: PoolId([2; 16]), demand: 100, held: HeldAmount::default(), until: at(100) }];
    let request = HoldRequest { lasts_us: 16 * SECOND_US, ..HoldRequest::default() };
    let held = HeldAmount { hits: division.pools[0].hits.held, capacity: 0 };
    division.record_answer(0, &request, HoldAnswer { granted: held, others, ..HoldAnswer::default() }, at(5));
    // Its bucket is small, and most of the refill goes without one.
    let rate = &mut division.holders[0].rates[0];
    let part = rate.now.refill;
    rate.change_to(Part { refill: part, bucket: part }, Some(at(5)), at(6));
    rate.now.bucket = 10;
    rate.change_to(Part { refill: 10, bucket: 10 }, Some(at(5)), at(6));
    division.expire(at(6));
    assert!(division.free_share(0) >= part - 10, "holders may have it");
    assert_eq!(division.next_pool_request(0, at(6)), None, "the store would admit as much at once");
    division.expire(at(7));
    let request = division.next_pool_request(0, at(7)).expect("another replica has more demand");
    assert!(request.wanted.hits < part, "{request:?}");
}

#[test]
fn newcomer_leaves_half_of_what_is_unused_in_the_store() {
    let (mut division, part) = division_with_one_proxy(Unit::Day);
    let request = HoldRequest { lasts_us: 61 * SECOND_US, ..HoldRequest::default() };
    let held = HeldAmount { hits: part, capacity: 0 };
    division.record_answer(
        0,
        &request,
        HoldAnswer { granted: held, room: HeldAmount { hits: 100 - part, capacity: 0 }, ..HoldAnswer::default() },
        at(1),
    );
    division.join(2, true, at(1));
    division.record_report(1, Usage { allowed: 0, denied: 1, elapsed_us: 0, received: at(1) }, at(1));
    let request = request_and_grant_all(&mut division, at(1)).expect("the newcomer has nothing");
    assert_eq!(request.wanted.hits, part + (100 - part).div_ceil(2));
    assert!(division.assign(1, at(1)).is_some_and(|assignment| assignment.strategy != Strategy::Deny));
    assert_eq!(division.free_share(0), 0, "what it does not get is left to decisions over RLS");
}

#[test]
fn bucket_begins_anew_at_a_proxy_that_may_have_the_same_tokens_with_another_interval() {
    let assign_first = |has_unknown_assignment: bool| {
        let limit = limit(Algorithm::FixedWindow, 100, Unit::Second, None);
        let mut division = Division::new([DividedLimit::new(&limit)], START);
        division.join(1, true, START);
        division.holders[0].has_unknown_assignment = has_unknown_assignment;
        request_and_grant_all(&mut division, START);
        division.record_ping_ack(0, START, START);
        division.assign(0, START).expect("it has nothing of this division")
    };
    assert!(assign_first(true).starts_full);
    assert!(!assign_first(false).starts_full);
}

#[test]
fn another_interval_comes_with_other_tokens() {
    let limits = |first: u64, second: u64| {
        let limit = |hits: u64, seconds: u64| {
            let period = Period::new(Unit::Second, u32::try_from(seconds).expect("few")).expect("a period");
            let hits = u32::try_from(hits).expect("few");
            DividedLimit::new(&Limit::new(&LimitSpec::new(Algorithm::FixedWindow, hits.into(), period)).expect("valid"))
        };
        [limit(first, 1), limit(second, 10)]
    };
    for hits in [50, 1, 2] {
        let mut division = Division::new(limits(hits, 1000), START);
        division.join(1, true, START);
        division.record_report(0, Usage { allowed: 0, denied: 1, elapsed_us: 0, received: START }, START);
        let advance = |division: &mut Division<u32>, second: u64| {
            division.expire(at(second));
            for pool in 0..2 {
                let total = division.pools[pool].limit.total();
                let request = HoldRequest { lasts_us: 100 * SECOND_US, ..HoldRequest::default() };
                let held = HeldAmount { hits: total, capacity: 0 };
                division.record_answer(
                    pool,
                    &request,
                    HoldAnswer { granted: held, ..HoldAnswer::default() },
                    at(second),
                );
            }
            division.assign(0, at(second)).map(|assignment| assignment.strategy)
        };
        let Some(Strategy::Tokens(first)) = advance(&mut division, 0) else { panic!("it has nothing") };
        assert_eq!((first.max, first.interval_s), (u32::try_from(hits).expect("few"), 1));
        // The second limit allows as many tokens now, in ten times the time.
        division.record_report(0, usage(100_000, 1, at(5)), at(5));
        division.change_limits(limits(1000, hits));
        match advance(&mut division, 5).expect("it gets less") {
            Strategy::Tokens(then) => {
                assert_eq!(then.interval_s, 10);
                assert_ne!((then.max, then.fill), (first.max, first.fill));
            }
            strategy => assert_eq!((strategy, hits), (Strategy::Deny, 1)),
        }
    }
}

#[test]
fn next_step_of_lent_hits_follows_from_what_a_holder_has_and_could_have() {
    const ALONE: LentTarget = LentTarget { hits: 100, enough: 30, free: 50, is_short: false };
    let target = |hits: u64, free: u64| LentTarget { hits, free, is_short: true, ..ALONE };
    let ratio = |max: u32| LentHits::Ratio { max, can_grow: true };
    let (replace, raise, shrink) = (
        |hits: u64| Step::Change(LentChange::Replace(hits)),
        |hits: u64| Step::Change(LentChange::Raise(hits)),
        |hits: u64| Step::Change(LentChange::Shrink(hits)),
    );
    let deny = Step::Change(LentChange::Deny);
    let table = [
        // Nothing is in force: a new bucket of what is free, or a denial.
        (LentHits::Nothing, 0, ALONE, replace(50)),
        (LentHits::Nothing, 0, target(20, 50), replace(20)),
        (LentHits::Nothing, 0, target(100, 0), deny),
        // What it has from elsewhere is better than less than enough.
        (LentHits::Foreign, 0, target(100, 29), Step::Wait),
        (LentHits::Foreign, 0, target(100, 30), replace(30)),
        (LentHits::Unconfirmed, 0, ALONE, Step::Renew),
        (LentHits::Allowed, 0, ALONE, deny),
        (LentHits::Denied, 0, ALONE, replace(50)),
        (LentHits::Denied, 0, target(100, 0), Step::Renew),
        // A bucket that begins anew with each change: only for a tenth more than what is left of it.
        (LentHits::Bucket, 40, ALONE, replace(50)),
        (LentHits::Bucket, 48, ALONE, Step::Renew),
        (LentHits::Bucket, 100, target(89, 5), replace(5)),
        (LentHits::Bucket, 100, target(89, 0), deny),
        (LentHits::Bucket, 100, target(90, 0), Step::Renew),
        (LentHits::Bucket, 100, LentTarget { hits: 89, free: 0, ..ALONE }, Step::Renew),
        (LentHits::Bucket, 0, target(100, 0), deny),
        // One that keeps its ratio grows by what is free, and shrinks if others lack hits.
        (ratio(100), 60, ALONE, raise(100)),
        (ratio(100), 60, target(100, 5), Step::Renew),
        (ratio(100), 60, target(100, 7), raise(67)),
        (ratio(100), 60, target(30, 0), shrink(30)),
        (ratio(100), 60, target(0, 0), shrink(0)),
        (ratio(100), 60, LentTarget { hits: 30, free: 0, ..ALONE }, Step::Renew),
        // Little is left: a raise by the ratio would be of a rounding error.
        (ratio(100), 7, ALONE, raise(57)),
        (ratio(100), 6, ALONE, replace(50)),
        (ratio(100), 0, ALONE, replace(50)),
        (ratio(100), 0, target(100, 0), deny),
        // It may have more than is known.
        (LentHits::Ratio { max: 100, can_grow: false }, 40, ALONE, replace(50)),
        (LentHits::Ratio { max: 100, can_grow: false }, 60, ALONE, Step::Renew),
        (LentHits::Ratio { max: 100, can_grow: false }, 60, target(30, 0), shrink(30)),
        // More than can be assigned.
        (ratio(1 << 31), 1 << 30, LentTarget { hits: 1 << 32, free: 1 << 32, ..ALONE }, replace(1 << 31)),
    ];
    for (current, left, target, step) in table {
        assert_eq!(next_strategy(current, left, target), step, "{current:?}, {left} left, {target:?}");
    }
}

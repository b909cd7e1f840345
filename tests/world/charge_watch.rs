//! Repeats the charges of each call of a script by the algorithms of this program, and compares the counter that
//! follows with the one in Redis.
//!
//! Replicas decide from the state that a script found, and never see the one that it left. So a script that charges what
//! they reject, or does not charge what they admit, shows here and nowhere else.

use std::cell::RefCell;
use std::iter;
use std::rc::Rc;

use bytes::Bytes;
use simulated_redis::keyspace::Value;
use simulated_redis::server::Server;
use tollkeeper::base::clock::Time;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::algorithm::{Algorithm, CountingMethod};
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::store::charge::{OwnedCharge, OwnedCounter};
use tollkeeper::store::redis::script::{CallTime, encode_charges, replay_charges};

use super::plan::RulePlan;
use super::trace::Trace;

/// Begin of the keys of the counters of a rule.
const KEY_START: &str = "tk1:{world|rule";
/// Bytes of a counter's numbers in an argument: the time, the algorithm, the period, `a` and `b`.
const HEAD_BYTES: usize = 40;
/// Bytes of a run of equal charges in an argument.
const RUN_BYTES: usize = 48;

/// Compares counters with the charges on them; for rules that are not global.
#[derive(Debug)]
pub struct ChargeWatch {
    rules: Vec<RulePlan>,
    trace: Trace,
    /// What was found.
    breaches: RefCell<Vec<String>>,
}

/// A call on a counter that is about to run.
#[derive(Debug)]
pub struct WatchedCall {
    key: Bytes,
    charges: Vec<OwnedCharge>,
    /// The state after the charges.
    expected: State,
}

impl ChargeWatch {
    /// A watch over the counters of these rules.
    pub fn new(rules: &[RulePlan], trace: &Trace) -> Rc<Self> {
        Rc::new(Self { rules: rules.to_vec(), trace: trace.clone(), breaches: RefCell::default() })
    }

    /// Returns what was found.
    pub fn take_breaches(&self) -> Vec<String> {
        self.breaches.take()
    }

    /// Repeats the charges of a command that is about to run.
    pub fn repeat_charges(&self, server: &Server, now_us: u64, words: &[Bytes]) -> Vec<WatchedCall> {
        let calls = calls_of_command(words).unwrap_or_default();
        calls.into_iter().filter_map(|(key, argument)| self.repeat_call(server, now_us, &key, &argument)).collect()
    }

    fn repeat_call(&self, server: &Server, now_us: u64, key: &Bytes, argument: &Bytes) -> Option<WatchedCall> {
        let rule = self.rule_of(key)?;
        let charges = decode_charges(&rule, argument)?;
        let encoded = encode_charges(&charges, CallTime::Server { about: Time::from_micros(now_us) });
        if expanded_runs(&encoded) != expanded_runs(argument) {
            self.breaches.borrow_mut().push(format!("unknown form of an argument for {rule:?}: {argument:?}"));
            return None;
        }
        let reply = reply_with_state(server, now_us, key, rule.algorithm);
        let expected = replay_charges(&charges, &reply, false).ok()?.states.pop()?;
        Some(WatchedCall { key: key.clone(), charges, expected })
    }

    fn rule_of(&self, key: &[u8]) -> Option<RulePlan> {
        let (index, _) = str::from_utf8(key).ok()?.strip_prefix(KEY_START)?.split_once('=')?;
        self.rules.get(index.parse::<usize>().ok()?).copied()
    }

    /// Compares the counters of calls that have run.
    pub fn compare_counters(&self, server: &Server, now_us: u64, calls: Vec<WatchedCall>) {
        for WatchedCall { key, charges, expected } in calls {
            self.trace.count("counters were compared with repeated charges");
            let Some(peek) = charges.last().map(|charge| OwnedCharge { dry_run: true, ..charge.clone() }) else {
                continue;
            };
            let reply = reply_with_state(server, now_us, &key, peek.counters[0].limit.algorithm());
            let found = replay_charges(&[peek], &reply, false).ok().and_then(|found| found.states.into_iter().next());
            if found.as_ref() != Some(&expected) {
                let charges: Vec<_> = charges.iter().map(|charge| (charge.request, charge.void_from)).collect();
                self.breaches.borrow_mut().push(format!(
                    "{} after {charges:?} at {now_us} is {found:?} in Redis, and must be {expected:?}",
                    key.escape_ascii()
                ));
            }
        }
    }
}

/// Keys and arguments of the calls on one counter each that a command of a script makes, without refunds beside leases:
/// what they give back depends on these.
fn calls_of_command(words: &[Bytes]) -> Option<Vec<(Bytes, Bytes)>> {
    let [name, _, key_count, rest @ ..] = words else { return None };
    if !name.starts_with(b"EVAL") {
        return None;
    }
    let (keys, arguments) = rest.split_at_checked(str::from_utf8(key_count).ok()?.parse().ok()?)?;
    match (keys, arguments) {
        ([key], [argument]) => Some(vec![(key.clone(), argument.clone())]),
        ([key, leases], [argument, purpose, ..]) if leases.ends_with(b":leases") => {
            let charges = number_at(purpose, 0)? == 0 && runs_of(argument)?.all(|[_, hits, ..]| hits >= 0);
            charges.then(|| vec![(key.clone(), argument.clone())])
        }
        _ => {
            let mut keys = keys.iter();
            let mut calls = Vec::new();
            for [count, argument] in arguments.as_chunks().0 {
                let of_group = keys.by_ref().take(str::from_utf8(count).ok()?.parse().ok()?);
                calls.extend(of_group.map(|key| (key.clone(), argument.clone())));
            }
            Some(calls)
        }
    }
}

/// The reply of a script that found the counter so.
fn reply_with_state(server: &Server, now_us: u64, key: &Bytes, algorithm: Algorithm) -> Vec<u8> {
    let mut reply = now_us.to_le_bytes().to_vec();
    match server.live_value(key, now_us) {
        Some(Value::String(bytes)) => reply.extend_from_slice(bytes),
        // The first element has the time of the last charge, unless a later one has, and the sum before the hits.
        Some(Value::List(list)) => {
            let number =
                |element: Option<&Bytes>, place| element.and_then(|bytes| number_at(bytes, place)).unwrap_or(0);
            let last = number(list.front(), 0).max(number(list.back(), 0));
            for number in [last, number(list.front(), 1), i64::try_from(list.len()).unwrap() - 1] {
                reply.extend_from_slice(&number.to_le_bytes());
            }
            list.iter().skip(1).for_each(|element| reply.extend_from_slice(element));
        }
        _ => {
            let numbers = match CountingMethod::from(algorithm) {
                CountingMethod::FixedWindow => 2,
                CountingMethod::LeakyBucket => 4,
                _ => 3,
            };
            reply.extend(iter::repeat_n(0, 8 * numbers));
        }
    }
    reply
}

/// The charges of an argument; `None` if there are none.
fn decode_charges(rule: &RulePlan, argument: &[u8]) -> Option<Vec<OwnedCharge>> {
    let period_us = u64::try_from(number_at(argument, 2)?).ok()?;
    let mut charges = Vec::new();
    for [times, hits, limit, _, wait, flags] in runs_of(argument)? {
        let limit = limit_of(rule, u32::try_from(limit).ok()?, period_us, flags & 2 > 0)?;
        let counter = OwnedCounter { limit, shadow: false, quota: false, tag: 0 };
        let (amount, wait) = (hits.unsigned_abs(), u64::try_from(wait).ok()?);
        let (hits, longest_us) = if hits < 0 { (Hits::Refund(amount), 0) } else { (Hits::Charge(amount), wait) };
        let void_from = (matches!(hits, Hits::Refund(_)) && wait > 0).then(|| Time::from_micros(wait));
        let request = ChargeRequest::new(hits, longest_us);
        let charge = OwnedCharge { void_from, ..OwnedCharge::new([counter].into_iter().collect(), request) };
        charges.extend(iter::repeat_n(charge, usize::try_from(times).ok()?));
    }
    (!charges.is_empty()).then_some(charges)
}

fn limit_of(rule: &RulePlan, limit: u32, period_us: u64, counts_rejected: bool) -> Option<Limit> {
    let period = Period::new(Unit::Second, u32::try_from(rule.period_s).ok()?)?;
    let size = u32::try_from(rule.size).ok();
    let spec = LimitSpec {
        bucket_size: size.filter(|_| rule.algorithm == Algorithm::TokenBucket),
        queue_size: size.filter(|_| rule.algorithm == Algorithm::LeakyBucket),
        count_rejected: (rule.algorithm != Algorithm::LeakyBucket).then_some(counts_rejected),
        ..LimitSpec::new(rule.algorithm, limit.into(), period)
    };
    let limit = Limit::new(&spec).ok()?;
    Some(limit.with_longer_period(period_us.saturating_sub(rule.period_s * 1_000_000)))
}

/// The runs of equal charges in an argument: how many, hits, limit, capacity, wait and flags.
fn runs_of(argument: &[u8]) -> Option<impl Iterator<Item = [i64; 6]>> {
    let digits = usize::from(*argument.get(HEAD_BYTES)?);
    let runs = argument.get(HEAD_BYTES + 1 + digits..)?;
    let run_at = |run: &[u8]| std::array::from_fn(|place| number_at(run, place).unwrap_or(0));
    Some(runs.chunks_exact(RUN_BYTES).map(run_at))
}

/// What an argument says of each of its charges: equal ones may be one run or several.
fn expanded_runs(argument: &[u8]) -> Option<Vec<[i64; 5]>> {
    let each = |[times, of_each @ ..]: [i64; 6]| iter::repeat_n(of_each, usize::try_from(times).unwrap_or(0));
    Some(runs_of(argument)?.flat_map(each).collect())
}

fn number_at(bytes: &[u8], place: usize) -> Option<i64> {
    bytes.as_chunks().0.get(place).map(|bytes| i64::from_le_bytes(*bytes))
}

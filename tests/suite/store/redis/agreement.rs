//! Scripts and algorithms agree on results, states and key lifetimes.
//!
//! Random calls go to a Redis, with the time in them, and charge by charge to bare states. Every result, every state
//! afterwards, and the lifetime of each key must be equal. States are read from Redis itself, in the format that
//! `src/store/redis/lua` documents.
//!
//! `PROPTEST_CASES=20000 cargo test --test suite redis::agreement` runs more cases. Failed seeds are kept beside the
//! source.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{TestCaseResult, TestRunner};
use redis::{Connection, ErrorKind, RedisResult, ServerErrorKind, Value, cmd, from_redis_value};
use smallvec::SmallVec;
use tollkeeper::base::clock::{Clock, Time};
use tollkeeper::limit::algorithm::joint_charge::charge_together;
use tollkeeper::limit::algorithm::leaky_level::RememberedSize;
use tollkeeper::limit::algorithm::sliding_window_log::LoggedHits;
use tollkeeper::limit::algorithm::state::State;
use tollkeeper::limit::algorithm::{
    Algorithm, fixed_window, leaky_bucket, sliding_window_counter, sliding_window_log, token_bucket,
};
use tollkeeper::limit::charge::{ChargeRequest, ChargeResult, JointLimit};
use tollkeeper::limit::overflow::ChainPosition;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{Limit, LimitSpec};
use tollkeeper::store::charge::{MAX_CHARGES_PER_CALL, OwnedCharge, OwnedCounter};
use tollkeeper::store::client::redis::error::{RedisError, ReplyError};
use tollkeeper::store::redis::eventual::{LeaseArguments, LeasePurpose, StoredLease};
use tollkeeper::store::redis::script::{CallTime, ScriptOutcome, encode_charges, replay_charges, script_for_limits};

use crate::limit::algorithms::scenario::{self, Amount, Backwards, Jump, MaxDelay};
use crate::limit::textbook;
use kit::redis::{Server, options};

/// Latest time that a script accepts, in the year 2255.
const LAST_TIME: Time = Time::from_micros((1 << 53) - 1);
/// Modulus of the running sum of a log.
const HIT_SUM_MODULUS: u64 = 1 << 52;

/// Sequence of calls on the counters of one descriptor.
#[derive(Clone, Debug)]
struct History {
    /// For each key, the limits that charges use in turn.
    keys: Vec<Vec<(Limit, bool)>>,
    /// Records of a log before the first call, and the hits seen; a fixed window counts the latter.
    log: Vec<(u64, u32)>,
    seen: u64,
    start: Time,
    calls: Vec<(Jump, Vec<Step>)>,
}

/// A run of equal charges.
#[derive(Clone, Debug)]
struct Step {
    limit: Index,
    amount: Amount,
    max_delay: MaxDelay,
    /// The longest delay is the one that is needed, plus these microseconds.
    edge: Option<i64>,
    dry_run: bool,
    /// Refunds are void from this many microseconds after the call.
    until: Option<i64>,
    times: usize,
}

fn history(most_keys: usize, algorithms: &'static [Algorithm], longest_log: usize) -> impl Strategy<Value = History> {
    let record = |most_hits: u32| (1..2_000_000_u64, prop_oneof![4 => Just(1), 1 => 1..=most_hits]);
    let log = prop_oneof![
        proptest::collection::vec(record(1), 0..=longest_log),
        proptest::collection::vec(record(20), 0..=longest_log),
    ];
    let seen =
        prop_oneof![2 => Just(0), 1 => (1..6_u64).prop_map(|less| HIT_SUM_MODULUS - less), 1 => 0..HIT_SUM_MODULUS];
    let calls = proptest::collection::vec((scenario::jump(Backwards::AnyFar), steps()), 1..20);
    let keys = proptest::collection::vec(proptest::sample::select(algorithms).prop_flat_map(key), 1..=most_keys);
    (keys, log, seen, start(), calls).prop_map(|(keys, log, seen, start, calls)| History {
        keys,
        log,
        seen,
        start,
        calls,
    })
}

fn key(algorithm: Algorithm) -> impl Strategy<Value = Vec<(Limit, bool)>> {
    (scenario::period(), any::<bool>()).prop_flat_map(move |(period, calendar)| {
        let limit = scenario::limit(algorithm, period, calendar);
        let longer_us = prop_oneof![3 => Just(0), 1 => 1..1_000_000_u64];
        let limits = proptest::collection::vec((limit, proptest::bool::weighted(0.8)), 1..=3);
        (limits, longer_us).prop_map(|(limits, longer_us)| {
            limits
                .into_iter()
                .map(|(limit, enforced)| (limit.with_longer_period(longer_us), enforced))
                .collect::<Vec<_>>()
        })
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop_oneof![
        2 => proptest::collection::vec(step(), 1..=1),
        1 => proptest::collection::vec(step(), 1..=12),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let times = prop_oneof![4 => Just(1), 1 => 2..6_usize];
    let dry_run = proptest::bool::weighted(0.15);
    let edge = proptest::option::weighted(0.2, -1..=1_i64);
    let until = proptest::option::weighted(0.5, prop_oneof![-1..=1_i64, -2_000_000..2_000_000_i64]);
    let step = (any::<Index>(), scenario::amount(true), scenario::max_delay(), edge, dry_run, until, times);
    step.prop_map(|(limit, amount, max_delay, edge, dry_run, until, times)| Step {
        limit,
        amount,
        max_delay,
        edge,
        dry_run,
        until,
        times,
    })
}

fn start() -> impl Strategy<Value = Time> {
    prop_oneof![
        1 => (0..3_u64).prop_map(Time::from_micros),
        4 => (1_700_000_000_000_000..1_800_000_000_000_000_u64).prop_map(Time::from_micros),
        1 => (0..1_u64 << 53).prop_map(Time::from_micros),
    ]
}

impl Step {
    /// Charges of the run. The first key decides the request, because all keys share its hits.
    fn charges(
        &self,
        keys: &[Vec<(Limit, bool)>],
        state: &State,
        now: Time,
    ) -> impl Iterator<Item = OwnedCharge> + use<> {
        let counter = |limits: &Vec<(Limit, bool)>| {
            let &(limit, enforced) = self.limit.get(limits);
            OwnedCounter { limit, shadow: !enforced, quota: false, tag: 0 }
        };
        let counters: SmallVec<[_; 1]> = keys.iter().map(counter).collect();
        let limit = counters[0].limit;
        let impatient = ChargeRequest::new(self.amount.of(&limit), 0);
        let max_delay_us = match (self.edge, state.clone().charge(&limit, now, impatient).retry_after_us) {
            (Some(off), Some(wait_us)) => wait_us.saturating_add_signed(off),
            _ => self.max_delay.of(&limit),
        };
        let request = ChargeRequest { max_delay_us, ..impatient };
        let until = self.until.filter(|_| matches!(request.hits, Hits::Refund(_)));
        let until =
            until.map(|off| Time::from_micros(now.as_micros().saturating_add_signed(off).max(1)).min(LAST_TIME));
        std::iter::repeat_n(
            OwnedCharge { counters, request, dry_run: self.dry_run, void_from: until, slot: None },
            self.times,
        )
    }
}

impl History {
    /// Runs the history on new keys of a Redis and on bare states.
    fn live(&self, redis: &mut Redis) -> TestCaseResult {
        let names = redis.new_keys(self.keys.len());
        let first: Vec<_> = self.keys.iter().map(|limits| limits[0].0).collect();
        let mut states: Vec<_> = first.iter().map(|limit| State::empty(limit.algorithm())).collect();
        for (name, state) in names.iter().zip(&mut states) {
            match state {
                State::SlidingWindowLog(log) => {
                    *log = self.log(first[0].period_us());
                    redis.plant_log(name, log, self.seen);
                }
                State::FixedWindow(window) if self.seen > 0 => {
                    *window = fixed_window::State { count: 2 * self.seen, last: self.start };
                    let words = [window.last.as_micros().to_le_bytes(), window.count.to_le_bytes()];
                    redis.query::<()>(&[b"SET", name.as_bytes(), &words.concat()]);
                }
                _ => {}
            }
            if redis.form != ScriptForm::CallerTime {
                redis.mark(name);
            }
        }
        let (mut now, mut last) = (self.start, ChargeResult::default());
        for (jump, steps) in &self.calls {
            now = jump.from(now, &first[0], &last).min(LAST_TIME);
            let charges: Vec<_> = steps.iter().flat_map(|step| step.charges(&self.keys, &states[0], now)).collect();
            let began = Instant::now();
            let outcome = redis.call(&names, &charges, Some(now)).expect("a script that fails has a mistake");
            let lives = redis.lives_at(&names, now, began);
            let took = began.elapsed();
            let (results, written) = expected(&charges, &mut states, now);
            prop_assert_eq!(outcome.now, now);
            prop_assert_eq!(&outcome.results, &results, "{:?} at {}", charges, now);
            for (place, (name, state)) in names.iter().zip(&states).enumerate() {
                let algorithm = first[place].algorithm();
                let stored = redis.state(name, algorithm);
                prop_assert_eq!(&stored.unwrap_or_else(|| State::empty(algorithm)), state, "{:?} at {}", charges, now);
                prop_assert!(alike(&outcome.states[place], state), "{:?} is not {:?}", outcome.states[place], state);
                if let (Some(limit), Some(life)) = (&written[place], lives[place]) {
                    check_life(life, took, state, limit, now)?;
                }
            }
            last = results.last().map_or(last, |results| results[0]);
        }
        Ok(())
    }

    /// Log at the start of the history.
    fn log(&self, period_us: u64) -> sliding_window_log::State {
        let length = u64::try_from(self.log.len()).unwrap();
        let mut log = sliding_window_log::State::default();
        let gap_us = |share: u64| 1 + (period_us / (length + 1)).min(period_us / 1000 * share / 100_000);
        let mut at = self.start.as_micros().saturating_sub(self.log.iter().map(|&(share, _)| gap_us(share)).sum());
        for &(share, hits) in &self.log {
            at += gap_us(share);
            log.records.push_back(LoggedHits { at: Time::from_micros(at), hits });
            log.held += u64::from(hits);
            log.last = Time::from_micros(at);
        }
        log
    }
}

/// Results of bare states, and for each key the limit of the last charge that changed it.
pub(super) fn expected(
    charges: &[OwnedCharge],
    states: &mut [State],
    now: Time,
) -> (Vec<SmallVec<[ChargeResult; 1]>>, Vec<Option<Limit>>) {
    let mut written = vec![None; states.len()];
    let results = charges.iter().map(|charge| {
        let terms: Vec<_> = charge
            .counters
            .iter()
            .map(|counter| JointLimit { limit: &counter.limit, rejects_others: !counter.shadow })
            .collect();
        let request = charge.request_with_bounded_delay();
        if charge.dry_run {
            return charge_together(&terms, &mut states.to_vec(), now, request);
        }
        let late = |place: usize| {
            let last = scenario::last_counted(&states[place]);
            let at = if last.since_us(now) > terms[place].limit.period_us() { now } else { now.max(last) };
            charge.void_from.is_some_and(|until| at >= until)
        };
        let late: Vec<bool> = (0..states.len()).map(late).collect();
        let found = states.to_vec();
        let results = charge_together(&terms, states, now, request);
        for (place, found) in found.iter().enumerate().filter(|(place, _)| late[*place]) {
            states[place] = found.clone();
        }
        let all = terms.iter().zip(&results).all(|(term, result)| result.admitted || !term.rejects_others);
        for (place, counter) in charge.counters.iter().enumerate() {
            let counts = match request.hits {
                Hits::Peek => false,
                // Of an overflow, a limit may take no hits.
                _ if counter.limit.chain_position() != ChainPosition::NotInChain => states[place] != found[place],
                Hits::Charge(_) => all && results[place].admitted || counter.limit.counts_rejected_hits(),
                Hits::Refund(_) => !late[place],
            };
            if counts {
                written[place] = Some(counter.limit);
            }
        }
        results
    });
    (results.collect(), written)
}

/// True if they are equal, except for merged records of a log.
pub(super) fn alike(outcome: &State, state: &State) -> bool {
    match (outcome, state) {
        (State::SlidingWindowLog(outcome), State::SlidingWindowLog(state)) => outcome.last == state.last,
        (State::WithBan(outcome), State::WithBan(state)) => {
            outcome.ban == state.ban && alike(&outcome.counter, &state.counter)
        }
        _ => outcome == state,
    }
}

/// Remaining lifetime of a key.
#[derive(Clone, Copy, Debug)]
struct KeyLife {
    ms: i64,
    /// The call left the expiry as it was.
    is_kept: bool,
}

/// Checks that a key lives between its time to empty and one period longer; `took` may have passed.
fn check_life(life: KeyLife, took: Duration, state: &State, limit: &Limit, now: Time) -> TestCaseResult {
    let reset_us = state.clone().charge(limit, now, ChargeRequest::new(Hits::Peek, 0)).reset_us;
    let empty_us = u128::from(reset_us.max(scenario::last_counted(state).since_us(now))).min(1 << 53);
    let life_us = u128::try_from(life.ms).expect("a key has a life") * 1000;
    // A life that an earlier call set was read in whole milliseconds, and counted from there in whole milliseconds.
    let rounding_us = if life.is_kept { 3000 } else { 1000 };
    prop_assert!(
        life_us + took.as_micros() + rounding_us >= empty_us.min((1 << 53) - 1_000_000),
        "{life_us} of {empty_us}"
    );
    let most_us = empty_us + u128::from(limit.period_us()) + 1000;
    prop_assert!(life.is_kept || life_us <= most_us, "{life_us} of {empty_us} for {state:?} at {now} under {limit:?}");
    Ok(())
}

/// Source of the time at which a script charges, and its form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScriptForm {
    /// The time is an argument; all writes set the expiry.
    CallerTime,
    /// The script asks the server for the time, for which the test substitutes its own.
    ServerTime,
    /// As before, and the call could share its command.
    Merged,
}

/// Connection that calls scripts as the store does.
pub(super) struct Redis {
    pub(super) connection: Connection,
    keys: u64,
    /// Microseconds by which the caller's clock is ahead of the server's.
    pub(super) caller_ahead_us: i64,
    pub(super) form: ScriptForm,
    /// Time at which each key expires, in microseconds, for scripts that do not always set it.
    expiries: HashMap<String, u64>,
}

/// Expiry in milliseconds that the test sets after each call, to see if the next one sets its own; 3000 years.
const MARKED_MS: i64 = 100_000_000_000_000;

impl Redis {
    pub(super) fn new(server: &Server) -> Self {
        let client = redis::Client::open(format!("redis://{}", server.address())).expect("it is an address");
        let connection = client.get_connection().expect("the server answers");
        Self { connection, keys: 0, caller_ahead_us: 0, form: ScriptForm::CallerTime, expiries: HashMap::new() }
    }

    pub(super) fn new_keys(&mut self, count: usize) -> Vec<String> {
        self.keys += 1;
        (0..count).map(|place| format!("{{{}}}:{place}", self.keys)).collect()
    }

    /// Calls the script with `now` as the server's time.
    fn call_at_server_time(
        &mut self,
        keys: &[String],
        charges: &[OwnedCharge],
        now: Time,
    ) -> RedisResult<ScriptOutcome> {
        let (seconds, rest) = (now.as_micros() / 1_000_000, now.as_micros() % 1_000_000);
        let time = [seconds.to_string(), rest.to_string()];
        self.query::<()>(&[b"DEL", b"clock"]);
        self.query::<()>(&[b"RPUSH", b"clock", time[0].as_bytes(), time[1].as_bytes()]);
        let script = script_for_limits(charges[0].counters.iter().map(|counter| &counter.limit));
        let merged = script.merged.as_ref().filter(|_| self.form == ScriptForm::Merged);
        let text = &merged.map_or(script, |merged| merged).text;
        assert!(text.contains("redis.call('TIME')"));
        let text = text.replace("redis.call('TIME')", "redis.call('LRANGE', 'clock', 0, 1)");
        let about = Time::from_micros(now.as_micros().saturating_add_signed(self.caller_ahead_us));
        let mut command = cmd("EVAL");
        command.arg(text).arg(keys.len()).arg(keys);
        if merged.is_some() {
            command.arg(keys.len());
        }
        command.arg(&encode_charges(charges, CallTime::Server { about })[..]);
        let reply = match command.query(&mut self.connection)? {
            Value::Array(parts) => from_redis_value::<Vec<Vec<u8>>>(Value::Array(parts))?.concat(),
            reply => from_redis_value(reply)?,
        };
        Ok(replay_charges(charges, &reply, false).expect("a script's reply can be read"))
    }

    /// Calls the script as the store does.
    pub(super) fn call(
        &mut self,
        keys: &[String],
        charges: &[OwnedCharge],
        now: Option<Time>,
    ) -> RedisResult<ScriptOutcome> {
        if let (ScriptForm::ServerTime | ScriptForm::Merged, Some(now)) = (self.form, now) {
            return self.call_at_server_time(keys, charges, now);
        }
        let script = script_for_limits(charges[0].counters.iter().map(|counter| &counter.limit));
        let arguments =
            encode_charges(charges, now.map_or(CallTime::Server { about: Time::default() }, CallTime::Given));
        let mut call = |name: &str, which: &str| -> RedisResult<Vec<u8>> {
            let mut command = cmd(name);
            command.arg(which).arg(keys.len()).arg(keys).arg(&arguments[..]);
            command.query(&mut self.connection)
        };
        let reply = match call("EVALSHA", &script.sha1) {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => call("EVAL", &script.text),
            reply => reply,
        };
        Ok(replay_charges(charges, &reply?, false).expect("a script's reply can be read"))
    }

    /// Calls the script at `now` while hits are leased.
    pub(super) fn call_while_leased(
        &mut self,
        keys: &[String],
        charges: &[OwnedCharge],
        leased: StoredLease,
        now: Time,
    ) -> ScriptOutcome {
        let record = format!("{}:leases", keys[0]);
        let state: Vec<u8> = [leased.end.as_micros(), leased.hits].into_iter().flat_map(u64::to_le_bytes).collect();
        self.query::<()>(&[b"SET", record.as_bytes(), &state]);
        let script = script_for_limits(charges[0].counters.iter().map(|counter| &counter.limit));
        let purpose = LeasePurpose::Charge { requested: 0, kept_us: 0 };
        let leases = LeaseArguments { purpose, own: SmallVec::new() }.encode();
        let mut command = cmd("EVAL");
        command.arg(&script.text).arg(keys.len() + 1).arg(keys).arg(record);
        command.arg(&encode_charges(charges, CallTime::Given(now))[..]).arg(&leases[..]);
        let reply: Vec<u8> = command.query(&mut self.connection).expect("a script that fails has a mistake");
        replay_charges(charges, &reply, true).expect("a script's reply can be read")
    }

    /// Remaining lifetime of each key at `now` in milliseconds; `None` if the test itself wrote the key. The call that
    /// may have set it began at `began`.
    fn lives_at(&mut self, keys: &[String], now: Time, began: Instant) -> Vec<Option<KeyLife>> {
        if self.form == ScriptForm::CallerTime {
            return self.lives(keys).into_iter().map(|ms| Some(KeyLife { ms, is_kept: false })).collect();
        }
        let life = |key: &String| {
            let ms: i64 = self.query(&[b"PTTL", key.as_bytes()]);
            self.mark(key);
            if ms > MARKED_MS / 2 {
                let left_us = i128::from(*self.expiries.get(key)?) - i128::from(now.as_micros());
                return Some(KeyLife { ms: i64::try_from(left_us / 1000).expect("a short life"), is_kept: true });
            }
            if let Ok(left) = u64::try_from(ms) {
                let set_for = Duration::from_millis(left) + began.elapsed();
                self.expiries.insert(key.clone(), now.as_micros() + u64::try_from(set_for.as_micros()).unwrap());
            }
            Some(KeyLife { ms, is_kept: false })
        };
        keys.iter().map(life).collect()
    }

    /// Sets an expiry that shows if the next call sets its own.
    fn mark(&mut self, key: &str) {
        self.query::<()>(&[b"PEXPIRE", key.as_bytes(), MARKED_MS.to_string().as_bytes()]);
    }

    /// Remaining lifetime of keys in milliseconds, -2 if absent; then removes their expiry until the test ends.
    pub(super) fn lives(&mut self, keys: &[String]) -> Vec<i64> {
        let mut pipe = redis::pipe();
        for key in keys {
            pipe.cmd("PTTL").arg(key);
        }
        for key in keys {
            pipe.cmd("PERSIST").arg(key).ignore();
        }
        pipe.query(&mut self.connection).expect("keys can be asked")
    }

    pub(super) fn query<T: redis::FromRedisValue>(&mut self, words: &[&[u8]]) -> T {
        let mut command = redis::Cmd::new();
        for word in words {
            command.arg(*word);
        }
        let value: Value = command.query(&mut self.connection).expect("the command is known");
        from_redis_value(value).expect("it is of that type")
    }

    /// State of a key in the format of the scripts; `None` if the key is absent.
    pub(super) fn state(&mut self, key: &str, algorithm: Algorithm) -> Option<State> {
        if algorithm == Algorithm::SlidingWindowLog {
            let elements: Vec<Vec<u8>> = self.query(&[b"LRANGE", key.as_bytes(), b"0", b"-1"]);
            return (!elements.is_empty()).then(|| State::SlidingWindowLog(read_log(&elements)));
        }
        let value: Option<Vec<u8>> = self.query(&[b"GET", key.as_bytes()]);
        let words = words(&value?);
        let at = |place: usize| words[place];
        let narrow = |place: usize| u32::try_from(words[place]).expect("it is a small number");
        let last = Time::from_micros(at(0));
        let (state, length) = match algorithm {
            Algorithm::TokenBucket => {
                // A mark: 1 if it is cut, "hold", 0, the size, and 64 bits of 0.
                let mark = words.get(3).map(|word| {
                    assert_eq!((word >> 32, at(4) & 0xffff_ffff, at(5)), (0x646c_6f68, 0, 0));
                    RememberedSize { size: u32::try_from(at(4) >> 32).expect("32 bits"), was_resized: word & 1 == 1 }
                });
                let state = token_bucket::State { used: at(1), part: at(2), mark, last };
                (State::TokenBucket(state), if mark.is_some() { 6 } else { 3 })
            }
            Algorithm::LeakyBucket => {
                let (queued, part) = (narrow(1), at(2));
                let (tail, mark) = match narrow(3).checked_sub(1 << 31) {
                    Some(size) => (0, Some(RememberedSize { size, was_resized: true })),
                    None => (narrow(3), None),
                };
                (State::LeakyBucket(leaky_bucket::State { queued, part, tail, mark, last }), 4)
            }
            Algorithm::FixedWindow => (State::FixedWindow(fixed_window::State { count: at(1), last }), 2),
            Algorithm::SlidingWindowCounter => {
                let (current, previous) = (at(1), at(2));
                (State::SlidingWindowCounter(sliding_window_counter::State { current, previous, last }), 3)
            }
            Algorithm::SlidingWindowLog | Algorithm::Concurrent => {
                unreachable!("it is read above, or not compared here")
            }
        };
        assert_eq!(words.len(), length);
        Some(state)
    }

    /// Writes a log from which `seen` hits have expired.
    fn plant_log(&mut self, key: &str, log: &sliding_window_log::State, mut seen: u64) {
        let element = |at: Time, seen: u64| [at.as_micros().to_le_bytes(), seen.to_le_bytes()].concat();
        let mut elements = vec![element(Time::default(), seen)];
        for record in &log.records {
            seen = (seen + u64::from(record.hits)) % HIT_SUM_MODULUS;
            elements.push(element(record.at, seen));
        }
        if elements.len() > 1 {
            let mut words = vec![b"RPUSH".as_slice(), key.as_bytes()];
            words.extend(elements.iter().map(Vec::as_slice));
            self.query::<()>(&words);
        }
    }
}

fn words(bytes: &[u8]) -> Vec<u64> {
    let (words, rest) = bytes.as_chunks();
    assert!(rest.is_empty());
    words.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

fn read_log(elements: &[Vec<u8>]) -> sliding_window_log::State {
    let elements: Vec<[u64; 2]> = elements.iter().map(|raw| words(raw).try_into().expect("two numbers")).collect();
    let records: VecDeque<_> = elements
        .windows(2)
        .map(|pair| LoggedHits {
            at: Time::from_micros(pair[1][0]),
            hits: u32::try_from((pair[1][1] + HIT_SUM_MODULUS - pair[0][1]) % HIT_SUM_MODULUS).expect("few hits"),
        })
        .collect();
    let held = records.iter().map(|record| u64::from(record.hits)).sum();
    let last = elements.iter().map(|element| element[0]).max().map_or(Time::default(), Time::from_micros);
    sliding_window_log::State { records, held, last }
}

/// Runs random histories, as many as `PROPTEST_CASES` says.
fn check(histories: impl Strategy<Value = History>, form: ScriptForm) {
    let server = options().start();
    let redis = std::cell::RefCell::new(Redis { form, ..Redis::new(&server) });
    let config = ProptestConfig { source_file: Some(file!()), ..scenario::config() };
    let outcome = TestRunner::new(config).run(&histories, |history| history.live(&mut redis.borrow_mut()));
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn script_charges_one_limit_like_memory() {
    check(history(1, &Algorithm::ALL, 0), ScriptForm::CallerTime);
}

#[test]
fn script_at_server_time_charges_one_limit_like_memory() {
    check(history(1, &Algorithm::ALL, 0), ScriptForm::ServerTime);
}

#[test]
fn merged_script_charges_one_limit_like_memory() {
    check(history(1, &Algorithm::ALL, 0), ScriptForm::Merged);
}

#[test]
fn script_charges_several_limits_like_memory() {
    check(history(3, &Algorithm::ALL, 3), ScriptForm::CallerTime);
}

#[test]
fn script_at_server_time_charges_several_limits_like_memory() {
    check(history(3, &Algorithm::ALL, 3), ScriptForm::ServerTime);
}

/// Limits that overflow, all in shadow mode or none, and perhaps one beside them.
fn overflowing_history() -> impl Strategy<Value = History> {
    const ALGORITHMS: [Algorithm; 4] =
        [Algorithm::FixedWindow, Algorithm::TokenBucket, Algorithm::SlidingWindowCounter, Algorithm::SlidingWindowLog];
    let of_chain = |limit: &Limit, is_first: bool| {
        let has_bucket = limit.algorithm() == Algorithm::TokenBucket;
        let spec = LimitSpec {
            bucket_size: u32::try_from(limit.capacity().max(1)).ok().filter(|_| has_bucket),
            calendar_months: limit.follows_calendar_months(),
            sole: false,
            chain_position: if is_first { ChainPosition::First } else { ChainPosition::After },
            ..LimitSpec::new(limit.algorithm(), limit.requests_per_unit(), limit.period())
        };
        Limit::new(&spec).expect("it may overflow")
    };
    let first = prop_oneof![3 => Just(0), 1 => Just(1_usize)];
    (history(4, &ALGORITHMS, 3), first, any::<bool>()).prop_map(move |(mut history, first, enforced)| {
        for (place, limits) in history.keys.iter_mut().enumerate().skip(first) {
            *limits = limits.iter().map(|(limit, _)| (of_chain(limit, place == first), enforced)).collect();
        }
        history
    })
}

#[test]
fn script_divides_hits_of_an_overflow_like_memory() {
    check(overflowing_history(), ScriptForm::CallerTime);
}

#[test]
fn script_at_server_time_divides_hits_of_an_overflow_like_memory() {
    check(overflowing_history(), ScriptForm::ServerTime);
}

#[test]
fn ends_of_a_long_log_suffice() {
    check(history(2, &[Algorithm::SlidingWindowLog], 300), ScriptForm::CallerTime);
}

#[test]
fn textbook_cases_hold_in_redis() {
    let server = options().start();
    let mut redis = Redis::new(&server);
    for case in textbook::cases() {
        let mut keys: HashMap<String, Vec<String>> = HashMap::new();
        textbook::run_case(&case, &mut |key, terms, now, request| {
            let keys = keys.entry(key.to_owned()).or_insert_with(|| redis.new_keys(terms.len()));
            let counted = |term: &JointLimit<'_>| OwnedCounter {
                limit: *term.limit,
                shadow: !term.rejects_others,
                quota: false,
                tag: 0,
            };
            let charges = [OwnedCharge {
                counters: terms.iter().map(counted).collect(),
                request,
                dry_run: false,
                void_from: None,
                slot: None,
            }];
            let mut outcome = redis.call(keys, &charges, Some(now)).unwrap();
            redis.lives(keys);
            outcome.results.remove(0).into_vec()
        });
    }
}

/// One limit of 500 per minute for each algorithm.
fn all_limits() -> SmallVec<[OwnedCounter; 1]> {
    let counted = |algorithm| {
        let queue_size = (algorithm == Algorithm::LeakyBucket).then_some(500);
        let terms = LimitSpec::new(algorithm, 500, Period::new(Unit::Minute, 1).unwrap());
        let limit = Limit::new(&LimitSpec { queue_size, sole: false, ..terms }).unwrap();
        OwnedCounter { limit, shadow: false, quota: false, tag: 0 }
    };
    Algorithm::ALL.into_iter().map(counted).collect()
}

fn hit(counters: &[OwnedCounter]) -> OwnedCharge {
    OwnedCharge {
        counters: counters.into(),
        request: ChargeRequest::new(Hits::Charge(1), u64::MAX),
        dry_run: false,
        void_from: None,
        slot: None,
    }
}

/// First word of an error reply.
fn failure(reply: RedisResult<ScriptOutcome>) -> ReplyError {
    let error = reply.expect_err("it fails");
    let [word, rest] = [error.code(), error.detail()].map(Option::unwrap_or_default);
    ReplyError::from_reply(&format!("{word} {rest}"))
}

#[test]
fn foreign_value_fails_the_charge_and_stays() {
    let server = options().start();
    let mut redis = Redis::new(&server);
    let counters = all_limits();
    let plants: [&[&[u8]]; 6] = [
        &[b"SET", b"", b"5"],
        &[b"SET", b"", &[0xff; 16]],
        &[b"SET", b"", &[0xff; 24]],
        &[b"SET", b"", &[0xff; 32]],
        &[b"RPUSH", b"", &[0xff; 16]],
        &[b"HSET", b"", b"field", b"value"],
    ];
    for plant in plants {
        for place in 0..counters.len() {
            let keys = redis.new_keys(counters.len());
            let mut words = plant.to_vec();
            words[1] = keys[place].as_bytes();
            redis.query::<Value>(&words);
            let planted: Vec<u8> = redis.query(&[b"DUMP", keys[place].as_bytes()]);
            let alone = redis.call(&keys[place..=place], &[hit(&counters[place..=place])], None);
            assert_eq!(
                failure(alone),
                ReplyError::Failed(RedisError::WrongType),
                "{words:?} for {}",
                counters[place].limit.algorithm()
            );
            let together = redis.call(&keys, &[hit(&counters)], None);
            assert_eq!(failure(together), ReplyError::Failed(RedisError::WrongType));
            for (other, key) in keys.iter().enumerate() {
                let now: Option<Vec<u8>> = redis.query(&[b"DUMP", key.as_bytes()]);
                assert_eq!(now.as_ref(), (other == place).then_some(&planted), "{key} after {words:?}");
            }
        }
    }
}

#[test]
fn full_server_fails_the_charge_and_writes_nothing() {
    let server = options().start();
    let mut redis = Redis::new(&server);
    let counters = all_limits();
    let keys = redis.new_keys(counters.len());
    redis.query::<()>(&[b"CONFIG", b"SET", b"maxmemory", b"1"]);
    for (place, counter) in counters.iter().enumerate() {
        let alone = redis.call(&keys[place..=place], &[hit(&[*counter])], None);
        assert_eq!(failure(alone), ReplyError::Failed(RedisError::NoWrites), "{}", counter.limit.algorithm());
    }
    let together = redis.call(&keys, &[hit(&counters)], None);
    assert_eq!(failure(together), ReplyError::Failed(RedisError::NoWrites));
    let peek = OwnedCharge { request: ChargeRequest::new(Hits::Peek, 0), ..hit(&counters) };
    assert!(redis.call(&keys, &[peek], None).unwrap().results[0].iter().all(|result| result.admitted));
    assert_eq!(redis.query::<u64>(&[b"DBSIZE"]), 0);
}

#[test]
fn server_time_is_used_if_none_is_given() {
    let server = options().start();
    let mut redis = Redis::new(&server);
    let counters = all_limits();
    let keys = redis.new_keys(counters.len());
    let before = Clock::System.now();
    let now = redis.call(&keys, &[hit(&counters)], None).unwrap().now;
    assert!(before <= now && now <= Clock::System.now());
}

#[test]
fn call_of_512_charges_admits_exactly_the_limit_of_500() {
    let server = options().start();
    let mut redis = Redis::new(&server);
    let counters = all_limits();
    let keys = redis.new_keys(counters.len() + 1);
    let now = Time::from_secs(1_767_225_600);
    let admitted = |outcome: &ScriptOutcome| outcome.results.iter().filter(|results| results[0].admitted).count();
    for (place, counter) in counters.iter().enumerate() {
        let charges = vec![hit(&[*counter]); MAX_CHARGES_PER_CALL];
        assert!(
            encode_charges(&charges, CallTime::Server { about: Time::default() }).len() < 128,
            "equal charges travel as one"
        );
        let outcome = redis.call(&keys[place..=place], &charges, Some(now)).unwrap();
        assert_eq!(admitted(&outcome), 500, "{}", counter.limit.algorithm());
        assert_eq!(redis.state(&keys[place], counter.limit.algorithm()).as_ref(), outcome.states.first());
    }
    assert_eq!(redis.query::<u64>(&[b"DBSIZE"]), 5);
    redis.query::<()>(&[b"FLUSHALL"]);
    assert_eq!(admitted(&redis.call(&keys[..5], &vec![hit(&counters); MAX_CHARGES_PER_CALL], Some(now)).unwrap()), 500);
}

#[test]
fn malformed_script_reply_is_rejected() {
    for counter in all_limits() {
        let charges = [hit(&[counter])];
        let now = 1_767_225_600_000_000_u64.to_le_bytes();
        for reply in [&[][..], b"OK", &now, &[0xff; 24], &[0xff; 32], &[0xff; 40], &[0xff; 48]] {
            assert!(replay_charges(&charges, reply, false).is_err(), "{reply:?} for {}", counter.limit.algorithm());
        }
        // A log with a wrong number of records, and one whose records are out of order.
        let words = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        if counter.limit.algorithm() == Algorithm::SlidingWindowLog {
            assert!(replay_charges(&charges, &words(&[9, 9, 0, 1 << 50, 9, 1]), false).is_err());
            assert!(replay_charges(&charges, &words(&[9, 9, 0, 2, 8, 1, 7, 2]), false).is_err());
            assert!(replay_charges(&charges, &words(&[9, 9, 0, 2, 7, 1, 8, 2]), false).is_ok());
        }
    }
}

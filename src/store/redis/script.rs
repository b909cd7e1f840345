//! The scripts that charge from counters in Redis.
//!
//! A script decides charges one after the other and changes states; it returns its time and the states as it found them.
//! Here the same charges are made again from those, by the algorithms themselves: what a caller is told of a level is
//! computed in one place.
//!
//! A call has one argument: signed 64-bit numbers, laid out as `lua/driver.lua` says. Looks and trials change nothing
//! and are not sent. A hold is bounded so that every number stays one that a double holds exactly.
//!
//! No connection here: who sends a script and what failures mean is said elsewhere.

mod compose;

use std::io::Write as _;
use std::sync::OnceLock;

use bytes::Bytes;
use sha1::{Digest, Sha1};
use smallvec::SmallVec;

use crate::algorithm::sliding_window_log::LogRecord;
use crate::algorithm::state::{State, charge_together};
use crate::algorithm::{
    ChargeRequest, ChargeResult, EnforcedLimit, fixed_window, leaky_bucket, sliding_window_counter, sliding_window_log,
    token_bucket,
};
use crate::clock::Time;
use crate::limit::Limit;
use crate::limit::algorithm::Algorithm;
use crate::request::Hits;

/// The most charges in one call, for that other clients of the server wait meanwhile.
pub const MAX_CHARGES_PER_CALL: usize = 512;

/// Beyond it a double is not exact; a script reads no number above.
const MAX_EXACT: u64 = 1 << 53;

/// The hits ever entered in a log are counted modulo this.
const LOG_MODULUS: u64 = 1 << 52;

/// A counter to charge from: what a call needs of [`crate::counter::Counter`], owned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedCounter {
    /// The limit.
    pub limit: Limit,
    /// Whether its refusal refuses the descriptor.
    pub enforced: bool,
    /// What tells it from others of the path.
    pub tag: u128,
}

/// A charge of a call: what it needs of [`crate::counter::Charge`], owned. All charges of a call have the same counters in
/// the same order, but for limits, capacities and the like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChargeCommand {
    /// One for each key of the call.
    pub counters: SmallVec<[OwnedCounter; 1]>,
    /// What is charged.
    pub request: ChargeRequest,
    /// Only what it would find is asked.
    pub dry_run: bool,
    /// Hits that are given back are void from this time of the counter on, 1 us after the epoch at the least; `None`:
    /// never. For refunds only.
    pub void_from: Option<Time>,
}

impl ChargeCommand {
    /// The longest that the answer may be held, in microseconds: what is asked, bounded by 285 years, and by the time
    /// in which a token bucket makes 2^52 tokens, 12 days at the least, so that tokens that it lends can be counted.
    pub fn max_delay_us(&self) -> u64 {
        let lends = |counter: &OwnedCounter| {
            let limit = &counter.limit;
            let longest_us = (1 << 52) * u128::from(limit.period_us()) / u128::from(limit.requests_per_unit().max(1));
            (limit.algorithm() == Algorithm::TokenBucket).then(|| u64::try_from(longest_us).unwrap_or(u64::MAX))
        };
        self.counters.iter().filter_map(lends).fold(self.request.max_delay_us.min(MAX_EXACT - 1), u64::min)
    }
}

/// A script.
#[derive(Debug)]
pub struct Script {
    /// Its text, for EVAL.
    pub text: String,
    /// The SHA-1 of the text in lower-case hexadecimal digits, for EVALSHA.
    pub sha1: String,
}

/// What a call found.
#[derive(Clone, Debug)]
pub struct ScriptOutcome {
    /// For each charge, the levels of its counters.
    pub results: Vec<SmallVec<[ChargeResult; 1]>>,
    /// The states after all charges. Of a log, records that no charge of the call could tell apart are one.
    pub states: SmallVec<[State; 1]>,
    /// The time at which the charges were made.
    pub now: Time,
}

/// The reply is none of a script's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the reply of the script can not be read")]
pub struct MalformedReply;

/// The script for counters of these algorithms, one for each key of the call.
pub fn script_for(algorithms: impl Iterator<Item = Algorithm>) -> &'static Script {
    const ALGORITHMS: usize = Algorithm::ALL.len();
    static ALONE: [OnceLock<Script>; ALGORITHMS] = [const { OnceLock::new() }; ALGORITHMS];
    static TOGETHER: [OnceLock<Script>; 1 << ALGORITHMS] = [const { OnceLock::new() }; 1 << ALGORITHMS];
    let (mut keys, mut set, mut first) = (0, 0, Algorithm::default());
    for algorithm in algorithms {
        (keys, set, first) = (keys + 1, set | 1 << algorithm as usize, algorithm);
    }
    if keys == 1 {
        ALONE[first as usize].get_or_init(|| Script::new(compose::alone(first)))
    } else {
        TOGETHER[set].get_or_init(|| {
            Script::new(compose::together(
                Algorithm::ALL.into_iter().filter(|&algorithm| set >> algorithm as usize & 1 == 1),
            ))
        })
    }
}

/// The script that gives out slots to processes; [`super::replicas::claim`] has its argument and reply.
pub fn replicas_script() -> &'static Script {
    static SCRIPT: OnceLock<Script> = OnceLock::new();
    SCRIPT.get_or_init(|| Script::new(compose::replicas()))
}

impl Script {
    fn new(text: String) -> Self {
        let sha1 = Sha1::digest(&text).iter().fold(String::new(), |digits, byte| format!("{digits}{byte:02x}"));
        Self { sha1, text }
    }
}

/// The argument of a call of at most [`MAX_CHARGES_PER_CALL`] charges, at `now` or, if there is none, at the server's own time.
pub fn arguments(charges: &[ChargeCommand], now: Option<Time>) -> Bytes {
    let mut words = ArgEncoder(Vec::with_capacity(128));
    words.push(now.map_or(-1, |now| signed(now.as_micros().min(MAX_EXACT - 1))));
    let Some(first) = charges.first() else { return words.0.into() };
    for (place, counter) in first.counters.iter().enumerate() {
        let limit = &counter.limit;
        words.push(signed(limit.algorithm() as u64));
        words.push(signed(limit.period_us()));
        let [a, b] = match limit.algorithm() {
            Algorithm::FixedWindow if limit.calendar_months() => [i64::from(limit.period().multiplier()), 0],
            Algorithm::SlidingWindowLog => reach(charges, place),
            _ => [0, 0],
        };
        words.push(a);
        words.push(b);
        words.push_digits(limit.period_us() / 1000);
    }
    let mut effective = charges.iter().filter_map(|charge| Some((charge, charged_hits(charge)?))).peekable();
    while let Some((charge, hits)) = effective.next() {
        let mut times = 1;
        while effective.next_if(|(next, _)| *next == charge).is_some() {
            times += 1;
        }
        words.push(times);
        words.push(hits);
        for counter in &charge.counters {
            words.push_terms(counter, patience(charge, &counter.limit));
        }
    }
    words.0.into()
}

/// The hits that a charge takes, negative if it gives them back; `None` if it changes nothing whatever it finds.
fn charged_hits(charge: &ChargeCommand) -> Option<i64> {
    match charge.request.hits {
        _ if charge.dry_run => None,
        Hits::Peek => None,
        Hits::Charge(hits) => Some(signed(hits)),
        Hits::Refund(hits) => Some(-signed(hits)),
    }
}

/// How long a charge may wait; of a refund, until when it holds, 0 if that does not end.
fn patience(charge: &ChargeCommand, limit: &Limit) -> i64 {
    match charge.request.hits {
        Hits::Refund(_) => charge.void_from.map_or(0, |until| signed(until.as_micros().min(MAX_EXACT - 1))),
        Hits::Charge(_) | Hits::Peek => signed(charge.max_delay_us().min(limit.max_wait_us())),
    }
}

/// How far into a log the charges reach: from its oldest hit, less what the log holds, and from its newest; see
/// `lua/log.lua`.
fn reach(charges: &[ChargeCommand], place: usize) -> [i64; 2] {
    let (mut asked, mut most_debt, mut refunded, mut lowest) = (0, 0, 0, i64::MAX);
    for charge in charges {
        let limit = &charge.counters[place].limit;
        lowest = lowest.min(i64::from(limit.requests_per_unit()));
        match charge.request.hits {
            Hits::Peek => asked += 1,
            Hits::Charge(hits) => {
                asked += signed(hits);
                // Refused hits that are entered stand before those that are then waited for: they count twice.
                most_debt = most_debt.max(if limit.count_rejected() { signed(hits) } else { 0 });
            }
            Hits::Refund(hits) => refunded += signed(hits),
        }
    }
    [asked + most_debt - lowest, refunded]
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Numbers on their way to a script.
struct ArgEncoder(Vec<u8>);

impl ArgEncoder {
    fn push(&mut self, word: i64) {
        self.0.extend_from_slice(&word.to_le_bytes());
    }

    /// A number in digits, preceded by how many they are.
    fn push_digits(&mut self, number: u64) {
        let place = self.0.len();
        self.0.push(0);
        write!(self.0, "{number}").expect("a vector takes whatever is written");
        self.0[place] = u8::try_from(self.0.len() - place - 1).expect("a number has 20 digits at most");
    }

    fn push_terms(&mut self, counter: &OwnedCounter, patience: i64) {
        let limit = &counter.limit;
        self.push(i64::from(limit.requests_per_unit()));
        self.push(i64::from(limit.capacity()));
        self.push(patience);
        self.push(i64::from(counter.enforced) + 2 * i64::from(limit.count_rejected()));
    }
}

/// Makes the charges of a call again, from the states and at the time that its script returned.
pub fn replay(charges: &[ChargeCommand], reply: &[u8]) -> Result<ScriptOutcome, MalformedReply> {
    let mut reader = Reader(reply);
    let now = reader.time()?;
    let counters = charges.first().map_or(&[][..], |charge| &charge.counters);
    let mut states =
        counters.iter().map(|counter| reader.state(counter.limit.algorithm())).collect::<Result<SmallVec<_>, _>>()?;
    if !reader.0.is_empty() {
        return Err(MalformedReply);
    }
    let levels = charges.iter().map(|charge| replay_charge(charge, &mut states, now)).collect();
    Ok(ScriptOutcome { results: levels, states, now })
}

fn replay_charge(charge: &ChargeCommand, states: &mut SmallVec<[State; 1]>, now: Time) -> SmallVec<[ChargeResult; 1]> {
    let terms: SmallVec<[_; 1]> = charge
        .counters
        .iter()
        .map(|counter| EnforcedLimit { limit: &counter.limit, enforced: counter.enforced })
        .collect();
    let request = ChargeRequest { max_delay_us: charge.max_delay_us(), ..charge.request };
    if charge.dry_run {
        charge_together(&terms, &mut states.clone(), now, request)
    } else if let Some(until) = charge.void_from {
        // Refunds pass, each counter's by itself.
        let refund = |(term, state): (&EnforcedLimit<'_>, &mut State)| match state.time(term.limit, now) >= until {
            true => state.clone().charge(term.limit, now, request),
            false => state.charge(term.limit, now, request),
        };
        terms.iter().zip(states.iter_mut()).map(refund).collect()
    } else {
        charge_together(&terms, states, now, request)
    }
}

/// Numbers on their way back.
struct Reader<'r>(&'r [u8]);

impl Reader<'_> {
    fn word(&mut self) -> Result<u64, MalformedReply> {
        let (word, rest) = self.0.split_first_chunk().ok_or(MalformedReply)?;
        self.0 = rest;
        let word = u64::from_le_bytes(*word);
        if word <= MAX_EXACT { Ok(word) } else { Err(MalformedReply) }
    }

    fn time(&mut self) -> Result<Time, MalformedReply> {
        self.word().map(Time::from_micros)
    }

    fn word_u32(&mut self) -> Result<u32, MalformedReply> {
        u32::try_from(self.word()?).map_err(|_| MalformedReply)
    }

    fn state(&mut self, algorithm: Algorithm) -> Result<State, MalformedReply> {
        let last = self.time()?;
        Ok(match algorithm {
            Algorithm::TokenBucket => {
                State::TokenBucket(token_bucket::State { used: self.word()?, part: self.word()?, last })
            }
            Algorithm::LeakyBucket => {
                let (queued, part, tail) = (self.word_u32()?, self.word()?, self.word_u32()?);
                State::LeakyBucket(leaky_bucket::State { queued, part, tail, last })
            }
            Algorithm::FixedWindow => State::FixedWindow(fixed_window::State { count: self.word()?, last }),
            Algorithm::SlidingWindowLog => State::SlidingWindowLog(self.log(last)?),
            Algorithm::SlidingWindowCounter => {
                let (current, previous) = (self.word()?, self.word()?);
                State::SlidingWindowCounter(sliding_window_counter::State { current, previous, last })
            }
        })
    }

    fn log(&mut self, last: Time) -> Result<sliding_window_log::State, MalformedReply> {
        let (mut sum, count) = (self.word()?, self.word()?);
        let mut log = sliding_window_log::State { last, ..Default::default() };
        for _ in 0..count {
            let (at, next) = (self.time()?, self.word()?);
            let hits = (next + LOG_MODULUS).checked_sub(sum).ok_or(MalformedReply)? % LOG_MODULUS;
            let in_order = at <= last && log.records.back().is_none_or(|newest| newest.at < at);
            let hits = u32::try_from(hits).ok().filter(|hits| *hits > 0 && in_order).ok_or(MalformedReply)?;
            log.held += u64::from(hits);
            log.records.push_back(LogRecord { at, hits });
            sum = next;
        }
        Ok(log)
    }
}

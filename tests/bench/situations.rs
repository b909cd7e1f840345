//! Situations that the benches of single steps share: `micro` for wall time, `instructions` for instructions.
//!
//! A situation is prepared once: its rules are loaded, its counters exist and have been charged. Each step then does
//! one thing once, with the next of its inputs, in an order without neighbours, again and again, so that a million
//! inputs do not fit into any cache. Time is made up: it advances equally with every step.

#[path = "situations/deciding.rs"]
pub(crate) mod deciding;
#[path = "situations/charging.rs"]
pub(crate) mod charging;
#[path = "situations/matching.rs"]
pub(crate) mod matching;
#[path = "situations/messages.rs"]
pub(crate) mod messages;

use bytes::Bytes;
use tollkeeper::clock::Time;
use tollkeeper::config::compile::options::CompileOptions;
use tollkeeper::config::compile::{RuleText, compile};
use tollkeeper::config::yaml::Documents;
use tollkeeper::pb::codec;
use tollkeeper::pb::rate_limit_descriptor::Entry;
use tollkeeper::pb::{RateLimitDescriptor, RateLimitRequest};
use tollkeeper::rule::{Domain, RuleNode};

/// The domain of all rules and requests here.
pub(crate) const DOMAIN: &str = "bench";
/// Start time; counters keep 32 bits of seconds, so later times fit.
pub(crate) const BEGIN: Time = Time::from_secs(1_000_000_000);
/// Number of users in rotation if the counters are not what is measured.
const USERS: usize = 1000;
/// Length of a user's name if it does not matter.
const NAME_BYTES: usize = 13;
/// Memory bound of the counters, in bytes, as by default.
const CAPACITY_BYTES: u64 = 512 << 20;

/// One thing that is done again and again.
pub(crate) trait Situation {
    /// Does it once, with the next input; what comes of it is seen to be used.
    fn step(&mut self);

    /// Number of different inputs.
    fn inputs(&self) -> usize;

    /// Goes through all inputs, twice.
    fn warmed(mut self) -> Self
    where
        Self: Sized,
    {
        (0..2 * self.inputs()).for_each(|_| self.step());
        self
    }
}

/// Endless walk over positions: each once per round, never two neighbours in a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walk {
    /// Current position.
    pub(crate) at: usize,
    pub(crate) places: usize,
}

impl Walk {
    /// Through so many places: a power of ten, so that a prime step visits them all.
    pub(crate) const fn through(places: usize) -> Self {
        Self { at: 0, places }
    }

    pub(crate) const fn next(&mut self) -> usize {
        self.at = (self.at + 7919) % self.places;
        self.at
    }
}

/// The rules that a text in YAML says, below the line with the domain.
fn rules(descriptors: &str) -> Vec<Domain> {
    let text = format!("domain: {DOMAIN}\ndescriptors:\n{descriptors}").into_bytes();
    let source = RuleText { name: "rules.yaml".into(), bytes: text, documents: Documents::FirstOnly };
    compile(&[source], &CompileOptions::default()).map(|compiled| compiled.domains).expect("the rules are right")
}

/// The same, of which the last descriptor stands for so many that differ from it in what `name` does to them: reading
/// text takes callgrind longer than all that is measured.
fn many_rules(descriptors: &str, count: usize, name: impl Fn(usize, &mut RuleNode)) -> Vec<Domain> {
    let mut domains = rules(descriptors);
    let last = domains[0].descriptors.pop().expect("there is a descriptor");
    domains[0].descriptors.extend((0..count).map(|i| {
        let mut node = last.clone();
        name(i, &mut node);
        node
    }));
    domains
}

/// The key of the descriptor at `place` of a request.
fn key(place: usize) -> String {
    format!("user-{place}")
}

/// The frame of a request with so many descriptors, each of which says the name of the user, so many bytes long.
fn frame(user: usize, descriptors: usize, name_bytes: usize) -> Bytes {
    let value = Bytes::from(format!("user-{user:0width$}", width = name_bytes - "user-".len()));
    let entry = |place| Entry { key: key(place).into(), value: value.clone() };
    let descriptor = |place| RateLimitDescriptor { entries: vec![entry(place)], ..RateLimitDescriptor::default() };
    let descriptors = (0..descriptors).map(descriptor).collect();
    codec::frame(&RateLimitRequest { domain: DOMAIN.to_owned(), descriptors, hits_addend: 0 })
}

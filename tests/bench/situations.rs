//! Situations that the benches of single steps share: `micro` for wall time, `instructions` for instructions.
//!
//! A situation is prepared once: its rules are loaded, its counters exist and have been charged. Each step then does
//! one operation with the next input. Consecutive inputs are never neighbours, so a million inputs fit into no cache.
//! Time is simulated: it advances equally with every step.

#[path = "situations/deciding.rs"]
pub(crate) mod deciding;
#[path = "situations/charging.rs"]
pub(crate) mod charging;
#[path = "situations/holding.rs"]
pub(crate) mod holding;
#[path = "situations/matching.rs"]
pub(crate) mod matching;
#[path = "situations/messages.rs"]
pub(crate) mod messages;
#[path = "situations/tables.rs"]
pub(crate) mod tables;

use bytes::Bytes;
use tollkeeper::base::clock::Time;
use tollkeeper::base::pb::codec;
use tollkeeper::base::pb::rate_limit_descriptor::Entry;
use tollkeeper::base::pb::{RateLimitDescriptor, RateLimitRequest};
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::rule::{Domain, RuleNode};
use tollkeeper::rules::yaml::DocumentSelection;

/// The domain of all rules and requests here.
pub(crate) const DOMAIN: &str = "bench";
/// Start time; counters keep 32 bits of seconds, so later times fit.
pub(crate) const BEGIN: Time = Time::from_secs(1_000_000_000);
/// Number of users in rotation, in situations that do not measure counters.
const USERS: usize = 1000;
/// Length of a user's name if it does not matter.
const NAME_BYTES: usize = 13;
/// Memory bound of the counters, in bytes, as by default.
const CAPACITY_BYTES: u64 = 512 << 20;

/// One repeated operation.
pub(crate) trait Situation {
    /// Performs the operation with the next input, and passes the result to `black_box`.
    fn step(&mut self);

    /// Number of different inputs.
    fn inputs(&self) -> usize;

    /// Uses all inputs twice.
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
    pub(crate) positions: usize,
}

impl Walk {
    /// Walk over a power of ten of positions, all of which the prime step visits.
    pub(crate) const fn over(positions: usize) -> Self {
        Self { at: 0, positions }
    }

    pub(crate) const fn next(&mut self) -> usize {
        self.at = (self.at + 7919) % self.positions;
        self.at
    }
}

/// Rules parsed from YAML that starts at `descriptors`.
fn rules(descriptors: &str) -> Vec<Domain> {
    let text = format!("domain: {DOMAIN}\ndescriptors:\n{descriptors}").into_bytes();
    let source = RuleText { name: "rules.yaml".into(), bytes: text, documents: DocumentSelection::FirstOnly };
    compile_texts(&[source], &CompileOptions::default()).map(|compiled| compiled.domains).expect("the rules are right")
}

/// Same as [`rules`], with `count` copies of the last descriptor, each changed by `name`.
///
/// Parsing that much YAML under callgrind would take longer than the measurement.
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

/// Key of the descriptor at index `place` of a request.
fn key(place: usize) -> String {
    format!("user-{place}")
}

/// Frame of a request; each descriptor has the user's name as its value, `name_bytes` long.
fn frame(user: usize, descriptors: usize, name_bytes: usize) -> Bytes {
    let value = Bytes::from(format!("user-{user:0width$}", width = name_bytes - "user-".len()));
    let entry = |place| Entry { key: key(place).into(), value: value.clone() };
    let descriptor = |place| RateLimitDescriptor { entries: vec![entry(place)], ..RateLimitDescriptor::default() };
    let descriptors = (0..descriptors).map(descriptor).collect();
    codec::encode_grpc_frame(&RateLimitRequest { domain: DOMAIN.to_owned(), descriptors, hits_addend: 0 })
}

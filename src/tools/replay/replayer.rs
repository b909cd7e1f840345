//! Decides recorded requests with the code of the server, at their recorded times.
//!
//! Counters are in memory. Processes that shared a Redis share counters here; a process that counted in its own memory
//! has counters of its own, and starts with none. The store is bounded: it reports evictions, because they falsify a
//! replay.
//!
//! Decides: with which rules a recorded decision is repeated (`find_recorded_rules`), by whose clock, with which store.
//! Decides: evictions, and the end of a replay whose memory is full.

use std::collections::HashMap;
use std::sync::Arc;

use super::recorded_request::RecordedRequest;
use crate::base::clock::Time;
use crate::decide::decider::Decider;
use crate::decide::decision::{Decision, DecisionContext};
use crate::decide::results::DescriptorResults;
use crate::limit::request::Request;
use crate::limit::slot::SlotCaller;
use crate::rules::compile::options::CompileOptions;
use crate::rules::rule::set::RuleSet;
use crate::settings::decisions::DecisionSettings;
use crate::store::StoreContext;
use crate::store::memory::MemoryStore;
use crate::telemetry::service_metrics::ServiceMetrics;

/// Rules that a replay decides by.
#[derive(Clone, Debug)]
pub enum ReplayRules {
    /// These, from the first request to the last.
    Fixed(Arc<RuleSet>),
    /// Those that each process had loaded, as the headers of its log say.
    Recorded,
}

/// Settings and rules of a process, from a header of its log.
#[derive(Clone, Debug)]
pub struct RecordedHeader {
    /// Id of the process.
    pub process: Arc<str>,
    /// Number of its last decision before.
    pub seq: u64,
    /// Time of the header.
    pub at: Time,
    /// The process started, so its own counters are empty.
    pub is_start: bool,
    /// The process counts in its own memory.
    pub in_memory: bool,
    /// Settings of its decisions.
    pub behaviour: Arc<DecisionSettings>,
    /// Rules that it loaded; `None` before any.
    pub rules: Option<Arc<RuleSet>>,
    /// Id of these rules; empty before any.
    pub rules_id: Arc<str>,
    /// Settings that change the meaning of its rules.
    pub options: CompileOptions,
    /// Share of keys in the log, 0 to 1.
    pub sample: f64,
    /// The log has all decisions of these keys.
    pub is_complete: bool,
    /// Values are hashed.
    pub hashed_values: bool,
}

/// Bounds and defaults of a replay.
#[derive(Clone, Debug)]
pub struct ReplayOptions {
    /// Memory of all counters, in bytes.
    pub memory_bytes: u64,
    /// Settings of processes without a header.
    pub behaviour: Arc<DecisionSettings>,
}

/// Problem that ends a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// Too many processes have counters of their own.
    #[error("the traffic comes from more than {MAX_PROCESSES} processes (replay fewer files)")]
    TooManyProcesses,
    /// The counters of all processes need too much memory.
    #[error("the counters of {processes} processes need more than {memory_bytes} bytes (raise --memory)")]
    OutOfMemory {
        /// Number of processes.
        processes: usize,
        /// Bound of the memory.
        memory_bytes: u64,
    },
}

/// Answer of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayedAnswer {
    /// The request is rejected.
    pub over_limit: bool,
    /// The request would be rejected without SHADOW_MODE.
    pub shadowed: bool,
    /// The request got no answer: there were no rules, or no room for its counters under the policy `error`.
    pub failed: bool,
    /// The traffic does not have the recorded rules, so that there is no answer.
    pub has_unknown_rules: bool,
}

/// Counters that a replay could not keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterLosses {
    /// Counters evicted, because memory was full.
    pub evicted: u64,
    /// Charges without a counter, because memory was full of counters over their limits.
    pub without_counter: u64,
}

/// Maximum number of processes.
const MAX_PROCESSES: usize = 1000;
/// Decisions between the sweeps of two parts of a store.
const DECISIONS_PER_SWEEP: u32 = 1 << 14;
/// Parts of a store that are swept one after the other.
const SWEEP_PARTS: usize = 32;

/// Decides recorded requests.
#[derive(Debug)]
pub struct Replayer {
    rules: ReplayRules,
    options: ReplayOptions,
    shared: CounterSet,
    processes: Vec<ReplayedProcess>,
    by_id: HashMap<Arc<str>, usize>,
    /// Rule sets of all headers so far, by id; the converter of each file bounds their number.
    rule_sets: HashMap<Arc<str>, Arc<RuleSet>>,
    /// Process of the last request.
    current: Option<usize>,
    /// Losses of counters that were dropped at the end of their process.
    past_losses: CounterLosses,
}

/// A process of the traffic.
#[derive(Debug)]
struct ReplayedProcess {
    id: Arc<str>,
    behaviour: Arc<DecisionSettings>,
    /// Rules of its last header; `None` before any header.
    loaded: Option<RecordedProcessRules>,
    /// Counters of its own; `None`: it shares those of all.
    own: Option<Box<CounterSet>>,
}

/// Rules that a header of a process has.
#[derive(Clone, Debug)]
struct RecordedProcessRules {
    id: Arc<str>,
    /// `None` if the process had loaded none.
    rules: Option<Arc<RuleSet>>,
}

/// Counters with the decider that charges them.
#[derive(Debug)]
struct CounterSet {
    decider: Decider,
    behaviour: Arc<DecisionSettings>,
    until_sweep: u32,
    sweeps: usize,
}

impl Replayer {
    /// Creates a replayer with empty counters.
    pub fn new(rules: ReplayRules, options: ReplayOptions) -> Self {
        let shared = CounterSet::new(&options, &options.behaviour);
        let (processes, by_id, rule_sets) = (Vec::new(), HashMap::new(), HashMap::new());
        let past_losses = CounterLosses::default();
        Self { rules, options, shared, processes, by_id, rule_sets, current: None, past_losses }
    }

    /// Takes over settings and rules of a process.
    ///
    /// # Errors
    /// There are too many processes.
    pub fn apply_header(&mut self, header: &RecordedHeader) -> Result<(), ReplayError> {
        let index = self.find_or_add_process(&header.process)?;
        let process = &mut self.processes[index];
        process.behaviour = Arc::clone(&header.behaviour);
        process.loaded = Some(RecordedProcessRules { id: Arc::clone(&header.rules_id), rules: header.rules.clone() });
        if let Some(rules) = &header.rules {
            self.rule_sets.insert(Arc::clone(&header.rules_id), Arc::clone(rules));
        }
        if header.in_memory && (header.is_start || process.own.is_none()) {
            let own = CounterSet::new(&self.options, &process.behaviour);
            if let Some(old) = process.own.replace(Box::new(own)) {
                self.past_losses.add_losses(old.counter_losses());
            }
        }
        Ok(())
    }

    /// Decides a recorded request, and passes the results of each descriptor's limits to `observe`.
    ///
    /// `request` is that of `recorded`.
    ///
    /// # Errors
    /// There are too many processes, or their counters need too much memory.
    pub fn decide(
        &mut self,
        recorded: &RecordedRequest,
        request: &Request<'_>,
        observe: impl FnMut(DescriptorResults<'_, '_>),
    ) -> Result<ReplayedAnswer, ReplayError> {
        let index = match self.current {
            Some(current) if self.processes[current].id == recorded.process => current,
            _ => self.find_or_add_process(&recorded.process)?,
        };
        self.current = Some(index);
        let Self { rules: replay_rules, shared, processes, rule_sets, .. } = self;
        let process = &mut processes[index];
        let rules = match &*replay_rules {
            ReplayRules::Fixed(rules) => Some(&**rules),
            ReplayRules::Recorded => match find_recorded_rules(process.loaded.as_ref(), recorded, rule_sets) {
                Ok(rules) => rules,
                Err(UnknownRules) => {
                    return Ok(ReplayedAnswer { failed: true, has_unknown_rules: true, ..ReplayedAnswer::default() });
                }
            },
        };
        // Has no effect on tables that were read from files.
        rules.into_iter().for_each(|rules| set_recorded_plans(rules, recorded, request));
        let counters = process.own.as_deref_mut().unwrap_or(shared);
        counters.adopt_decision_settings(&process.behaviour);
        let (charge_times, slots) = (recorded.charge_times(), recorded.slot_uses());
        let context = DecisionContext {
            rules,
            max_delay_us: recorded.max_delay_us,
            store: StoreContext { now: recorded.arrival, deadline: None, span_ref: None, charge_times: &charge_times },
            slots: SlotCaller { recorded: &slots, ..SlotCaller::default() },
        };
        let answer = match counters.decider.decide_synchronously_with_observer(context, request, observe) {
            Ok(decision) => {
                let Decision { over_limit, shadowed, .. } = decision;
                let over_limit = over_limit || recorded.is_blocked;
                ReplayedAnswer { over_limit, shadowed, ..ReplayedAnswer::default() }
            }
            Err(_) => ReplayedAnswer { failed: true, ..ReplayedAnswer::default() },
        };
        if counters.sweep_if_due(recorded.order_time()) {
            self.check_memory_bound()?;
        }
        Ok(answer)
    }

    /// Counters that were lost so far.
    pub fn counter_losses(&self) -> CounterLosses {
        let own = self.processes.iter().filter_map(|process| process.own.as_deref());
        let mut losses = self.past_losses;
        own.chain([&self.shared]).for_each(|counters| losses.add_losses(counters.counter_losses()));
        losses
    }

    /// Index of a process, which is added if it is new.
    fn find_or_add_process(&mut self, id: &Arc<str>) -> Result<usize, ReplayError> {
        if let Some(index) = self.by_id.get(id) {
            return Ok(*index);
        }
        if self.processes.len() == MAX_PROCESSES {
            return Err(ReplayError::TooManyProcesses);
        }
        let behaviour = Arc::clone(&self.options.behaviour);
        self.processes.push(ReplayedProcess { id: Arc::clone(id), behaviour, loaded: None, own: None });
        self.by_id.insert(Arc::clone(id), self.processes.len() - 1);
        Ok(self.processes.len() - 1)
    }

    /// Compares the memory of all counters with its bound.
    fn check_memory_bound(&self) -> Result<(), ReplayError> {
        let own = self.processes.iter().filter_map(|process| process.own.as_deref());
        let bytes: u64 = own.chain([&self.shared]).map(|counters| counters.decider.store.stats().memory.bytes).sum();
        let memory_bytes = self.options.memory_bytes;
        // A single store keeps its own bound, and evicts.
        if bytes > 2 * memory_bytes {
            return Err(ReplayError::OutOfMemory { processes: self.processes.len(), memory_bytes });
        }
        Ok(())
    }
}

/// Sets the plans that a recorded decision found, so that it is repeated with them.
fn set_recorded_plans(rules: &RuleSet, recorded: &RecordedRequest, request: &Request<'_>) {
    for (of_log, descriptor) in recorded.descriptors().iter().zip(&request.descriptors) {
        if let Some(plan) = &of_log.plan {
            rules.set_recorded_plan(request.domain, &descriptor.entries, &plan.name, plan.own);
        }
    }
}

/// No header has the rules of a decision.
struct UnknownRules;

/// Finds the rules that decided a request; `None` if its process had none. `loaded` are those of the process.
fn find_recorded_rules<'r>(
    loaded: Option<&'r RecordedProcessRules>,
    recorded: &'r RecordedRequest,
    rule_sets: &'r HashMap<Arc<str>, Arc<RuleSet>>,
) -> Result<Option<&'r RuleSet>, UnknownRules> {
    let loaded = loaded.ok_or(UnknownRules)?;
    if let Some(rules) = &recorded.rules {
        return Ok(Some(rules));
    }
    if loaded.id == recorded.rules_id {
        return Ok(loaded.rules.as_deref());
    }
    rule_sets.get(&recorded.rules_id).map(|rules| Some(&**rules)).ok_or(UnknownRules)
}

impl CounterSet {
    fn new(options: &ReplayOptions, behaviour: &Arc<DecisionSettings>) -> Self {
        let store = MemoryStore::new(options.memory_bytes).into();
        let metrics = Arc::new(ServiceMetrics::new(0, 0).without_request_counts());
        Self {
            decider: Decider::new(store, DecisionSettings::clone(behaviour), metrics),
            behaviour: Arc::clone(behaviour),
            until_sweep: DECISIONS_PER_SWEEP,
            sweeps: 0,
        }
    }

    /// Takes over the settings of the process that decides next.
    fn adopt_decision_settings(&mut self, behaviour: &Arc<DecisionSettings>) {
        if !Arc::ptr_eq(&self.behaviour, behaviour) {
            self.decider.behaviour.clone_from(behaviour);
            self.behaviour = Arc::clone(behaviour);
        }
    }

    /// Removes the expired counters of a part of the store, now and then. Returns true after the last part.
    fn sweep_if_due(&mut self, now: Time) -> bool {
        self.until_sweep -= 1;
        if self.until_sweep > 0 {
            return false;
        }
        self.until_sweep = DECISIONS_PER_SWEEP;
        self.decider.store.sweep(now, self.sweeps % SWEEP_PARTS, SWEEP_PARTS);
        self.sweeps += 1;
        self.sweeps.is_multiple_of(SWEEP_PARTS)
    }

    fn counter_losses(&self) -> CounterLosses {
        CounterLosses {
            evicted: self.decider.store.stats().memory.evicted,
            without_counter: self.decider.failed_charge_counts().map(|(_, count)| count).sum(),
        }
    }
}

impl CounterLosses {
    fn add_losses(&mut self, other: Self) {
        self.evicted += other.evicted;
        self.without_counter += other.without_counter;
    }
}

//! Kinds of runs, and how one that breaks a promise is made smaller.

use std::collections::BTreeMap;
use std::fmt::Display;

use super::plan::TimedFault;

/// Result of a run.
#[derive(Debug)]
pub struct Outcome {
    /// What is broken; empty if all promises held.
    pub breaches: Vec<String>,
    /// Hash of all that happened.
    pub hash: u64,
    /// How often each fault and recovery happened.
    pub counts: BTreeMap<&'static str, u64>,
    /// Number of calls, or decisions of proxies, that were judged.
    pub calls: usize,
}

/// A kind of runs. Its text tells all but the faults.
pub trait Simulation: Clone + Display {
    /// Draws a run.
    fn draw(seed: u64) -> Self;

    /// Runs it in virtual time.
    fn run(&self) -> Outcome;

    /// What goes wrong in it.
    fn faults_mut(&mut self) -> &mut Vec<TimedFault>;
}

/// Draws and runs a seed. If a promise is broken, runs it again without faults that are not needed for that, and returns
/// what is left as a text.
pub fn run_seed<S: Simulation>(seed: u64) -> (Outcome, Option<String>) {
    let mut plan = S::draw(seed);
    let outcome = plan.run();
    let mut breaches = outcome.breaches.clone();
    let mut index = 0;
    while !breaches.is_empty() && index < plan.faults_mut().len() {
        let mut smaller = plan.clone();
        smaller.faults_mut().remove(index);
        let found = smaller.run().breaches;
        if found.is_empty() {
            index += 1;
        } else {
            (plan, breaches) = (smaller, found);
        }
    }
    let text = (!breaches.is_empty()).then(|| {
        let faults: Vec<String> = plan.faults_mut().iter().map(TimedFault::to_string).collect();
        format!("seed {seed}: {plan}\n  {}\n  {}", faults.join("\n  "), breaches.join("\n  "))
    });
    (outcome, text)
}

//! Puts rules in force: at the start, and whenever their files change.
//!
//! Rules are compiled on a thread of their own, so a large set delays no decision. A bad set is refused whole, with
//! every problem in the log; the last good one keeps serving. So is an empty one, except where no rules are in force.

use std::sync::Arc;
use std::thread;

use tokio::sync::oneshot;

use crate::clock::Clock;
use crate::config::compile::options::CompileOptions;
use crate::config::compile::{RuleText, compile};
use crate::config::live::LiveRules;
use crate::config::source::Reading;
use crate::config::watch::{Changes, yield_to_decisions};
use crate::config::yaml::Documents;
use crate::grpc::health::GrpcHealth;
use crate::rule::set::RuleSet;
use crate::telemetry::metrics::Metrics;

/// Puts rules in force.
#[derive(Clone, Debug)]
pub(super) struct Reloader {
    pub(super) rules: Arc<LiveRules>,
    pub(super) options: CompileOptions,
    pub(super) documents: Documents,
    pub(super) clock: Clock,
    pub(super) metrics: Arc<Metrics>,
}

/// Problems of one set that are written to the log one by one.
const MAX_LOGGED: usize = 20;

impl Reloader {
    /// Loads whatever changes until the watcher ends.
    pub(super) async fn follow(self, mut changes: Changes, health: GrpcHealth) {
        while let Some(reading) = changes.next().await {
            let reloader = self.clone();
            let (done, loaded) = oneshot::channel();
            let load = move || {
                yield_to_decisions();
                reloader.load(&reading);
                let _ = done.send(());
            };
            let spawned = thread::Builder::new().name("rules".to_owned()).spawn(load);
            match spawned {
                Ok(_) if loaded.await.is_err() => self.refuse(&["loading the rules panicked".to_owned()]),
                Ok(_) => {}
                Err(error) => self.refuse(&[format!("there is no thread to load the rules on: {error}")]),
            }
            health.sync().await;
        }
    }

    /// Puts what was read in force, or says why not.
    pub(super) fn load(&self, reading: &Reading) {
        let read = match reading {
            Ok(read) => read,
            Err(refused) => return self.refuse(&refused.errors.iter().map(ToString::to_string).collect::<Vec<_>>()),
        };
        if read.files.is_empty() && self.has_rules() {
            // Loading "no rules" would lift every limit: more likely a volume is gone than all rules are.
            return self.refuse(&read.warnings.iter().map(ToString::to_string).collect::<Vec<_>>());
        }
        read.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        let sources: Vec<RuleText> = read
            .files
            .iter()
            .map(|file| RuleText { name: Arc::clone(&file.name), text: file.bytes.clone(), documents: self.documents })
            .collect();
        let compiled = match compile(&sources, &self.options) {
            Ok(compiled) => compiled,
            Err(problems) => {
                return self.refuse(&problems.errors().iter().map(ToString::to_string).collect::<Vec<_>>());
            }
        };
        for warning in compiled.warnings.warnings().iter().take(MAX_LOGGED) {
            tracing::warn!("{warning}");
        }
        let names = sources.into_iter().map(|source| source.name).collect();
        let version =
            self.rules.replace(RuleSet::with_stats(compiled.domains, &self.metrics.limits), names, self.clock.now());
        let status = self.rules.status();
        tracing::warn!(version, domains = status.domains, rules = status.rules, "rules loaded");
    }

    fn has_rules(&self) -> bool {
        self.rules.load().as_ref().is_some_and(|loaded| loaded.rules.domain_count() > 0)
    }

    fn refuse(&self, problems: &[String]) {
        for problem in problems.iter().take(MAX_LOGGED) {
            tracing::error!("Error loading new configuration: {problem}");
        }
        if let Some(more) = problems.len().checked_sub(MAX_LOGGED).filter(|more| *more > 0) {
            tracing::error!("Error loading new configuration: {more} more problems; `tollkeeper check` lists them all");
        }
        self.rules.refuse(problems.join("\n"), self.clock.now());
    }
}

//! Applies rules: at the start, and whenever their source delivers an update.
//!
//! Rules are compiled on a thread of their own, so a large set delays no decision. A set with errors is rejected as a
//! whole, with every problem in the log, and the last good set stays. The outcome is reported to the source.

use std::io;
use std::sync::Arc;
use std::thread;

use tokio::sync::oneshot;

use crate::clock::Clock;
use crate::config::compile::options::CompileOptions;
use crate::config::live::{LiveRules, LoadedFrom};
use crate::config::recorded;
use crate::config::source::{RuleSource, RuleUpdate, SourceConfig, SourceReloader};
use crate::decision_log::log::DecisionLog;
use crate::grpc::health::GrpcHealth;
use crate::rule::set::RuleSet;
use crate::telemetry::service_metrics::ServiceMetrics;
use crate::thread_priority;

/// Compiles updates and replaces the rules.
#[derive(Clone, Debug)]
pub(super) struct Reloader {
    pub(super) rules: Arc<LiveRules>,
    pub(super) options: CompileOptions,
    pub(super) clock: Clock,
    pub(super) metrics: Arc<ServiceMetrics>,
    pub(super) log: Option<Arc<DecisionLog>>,
}

/// A reloader with its running source.
#[derive(Debug)]
pub(super) struct RuleUpdates {
    reloader: Reloader,
    source: RuleSource,
}

/// Maximum number of problems of one set that are logged.
const MAX_LOGGED: usize = 20;

impl RuleUpdates {
    /// Starts the source and applies the update that it has at once, if any.
    ///
    /// # Errors
    /// The source cannot be started.
    pub(super) fn start(reloader: Reloader, config: SourceConfig) -> io::Result<Self> {
        let (mut source, first) = RuleSource::start(config)?;
        if let Some(status) = source.stream_status() {
            reloader.rules.set_stream_status(Arc::clone(status));
        }
        if let Some(update) = first {
            source.acknowledge(&reloader.apply(update));
        }
        Ok(Self { reloader, source })
    }

    /// Handle that requests the rules again.
    pub(super) fn source_reloader(&self) -> SourceReloader {
        self.source.reloader()
    }

    /// Applies updates until the source ends.
    pub(super) async fn follow(mut self, health: GrpcHealth) {
        while let Some(update) = self.source.next().await {
            let result = self.reloader.apply_on_thread(update).await;
            self.source.acknowledge(&result);
            health.sync();
        }
    }
}

impl Reloader {
    /// Applies an update on a thread of its own.
    async fn apply_on_thread(&self, update: RuleUpdate) -> Result<(), String> {
        let reloader = self.clone();
        let (done, applied) = oneshot::channel();
        let apply = move || {
            thread_priority::lower();
            let _ = done.send(reloader.apply(update));
        };
        match thread::Builder::new().name("rules".to_owned()).spawn(apply) {
            Ok(_) => match applied.await {
                Ok(result) => result,
                Err(_) => self.reject(&["loading the rules panicked".to_owned()]),
            },
            Err(error) => self.reject(&[format!("cannot start a thread to load the rules: {error}")]),
        }
    }

    /// Compiles an update and replaces the rules, or rejects it with all its errors.
    fn apply(&self, update: RuleUpdate) -> Result<(), String> {
        let snapshot = match update {
            Ok(snapshot) => snapshot,
            Err(errors) => return self.reject(&errors),
        };
        if snapshot.rules.is_empty() && snapshot.keep_rules_if_empty && self.has_rules() {
            return self.reject(&snapshot.warnings);
        }
        snapshot.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        let names = snapshot.rules.names();
        let recorded = self.log.as_ref().map(|_| recorded::record(&snapshot.rules, snapshot.version.as_deref()));
        let compiled = match snapshot.rules.compile(&self.options) {
            Ok(compiled) => compiled,
            Err(problems) => {
                return self.reject(&problems.errors().iter().map(ToString::to_string).collect::<Vec<_>>());
            }
        };
        for warning in compiled.warnings.warnings().iter().take(MAX_LOGGED) {
            tracing::warn!("{warning}");
        }
        let from = LoadedFrom { names, version: snapshot.version };
        let mut rules = RuleSet::with_stats(compiled.domains, &self.metrics.limits);
        if let (Some(log), Some(recorded)) = (&self.log, recorded) {
            rules.id = recorded.id.as_str().into();
            log.announce(Some(recorded));
        }
        let version = self.rules.replace(rules, from, self.clock.now());
        let status = self.rules.status();
        tracing::warn!(version, domains = status.domains, rules = status.rules, "rules loaded");
        Ok(())
    }

    fn has_rules(&self) -> bool {
        self.rules.load().as_ref().is_some_and(|loaded| loaded.rules.domain_count() > 0)
    }

    /// Logs and records why a set was rejected. Returns the problems as an error.
    fn reject(&self, problems: &[String]) -> Result<(), String> {
        for problem in problems.iter().take(MAX_LOGGED) {
            tracing::error!("Error loading new configuration: {problem}");
        }
        if let Some(more) = problems.len().checked_sub(MAX_LOGGED).filter(|more| *more > 0) {
            tracing::error!("Error loading new configuration: {more} more problems; `tollkeeper check` lists them all");
        }
        let error = problems.join("\n");
        self.rules.reject(error.clone(), self.clock.now());
        Err(error)
    }
}

//! The decision path in this process: settings, rules and a clock that stands until a test moves it.
//!
//! It is put together as the server does it, from an environment and the text of rule files, and asked with messages as
//! they come over the wire. Nothing here waits: how long an answer would be held comes with it.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use tollkeeper::clock::{Clock, Time};
use tollkeeper::config::compile::{Options, Source, compile};
use tollkeeper::config::live::LiveRules;
use tollkeeper::config::yaml::Documents;
use tollkeeper::decide::Decider;
use tollkeeper::grpc::service::{AnswerError, DEFAULT_DEADLINE, Service};
use tollkeeper::pb::{RateLimitRequest, RateLimitResponse};
use tollkeeper::rule::set::RuleSet;
use tollkeeper::settings::Settings;
use tollkeeper::store::memory::Memory;

/// Somebody who answers.
#[derive(Debug)]
pub(crate) struct Desk {
    /// What answers.
    pub(crate) service: Service,
    options: Options,
}

impl Desk {
    /// Settings from these variables; no rules yet, at `start`.
    pub(crate) fn new<N: AsRef<str>>(env: impl IntoIterator<Item = (N, N)>, start: Time) -> Self {
        let variables = env.into_iter().map(|(name, value)| (OsString::from(name.as_ref()), value.as_ref().into()));
        let (settings, _) = Settings::from_env(variables).expect("the settings are valid");
        let options = Options {
            merge_domains: settings.rules.merge_domains,
            calendar_months: settings.behaviour.calendar_months,
            log_max: settings.behaviour.log_max,
            on_store_error: settings.rules.on_store_error,
            ..Options::default()
        };
        let store = Memory::new(settings.memory.capacity_bytes as u64);
        let decider = Decider { store, behaviour: settings.behaviour };
        let service = Service { clock: Clock::manual(start), rules: Arc::new(LiveRules::default()), decider };
        Self { service, options }
    }

    /// Puts the rules of these files, by name and text, in force in place of others.
    pub(crate) fn load<N: AsRef<str>>(&self, files: impl IntoIterator<Item = (N, N)>) {
        let sources: Vec<Source> = files
            .into_iter()
            .map(|(name, text)| Source {
                name: Arc::from(name.as_ref()),
                text: text.as_ref().as_bytes().to_vec(),
                documents: Documents::FirstOnly,
            })
            .collect();
        let compiled = compile(&sources, &self.options).unwrap_or_else(|found| panic!("{found}"));
        let names = sources.into_iter().map(|source| source.name).collect();
        self.service.rules.replace(RuleSet::new(compiled.domains), names, self.now());
    }

    /// The time.
    pub(crate) fn now(&self) -> Time {
        self.service.clock.now()
    }

    /// Lets so many microseconds pass.
    pub(crate) fn pass_us(&self, micros: u64) {
        self.service.clock.set(self.now().plus_us(micros));
    }

    /// The answer, for a caller that waits as long as one that does not say, and how long it would be held.
    pub(crate) fn answer(&self, request: &RateLimitRequest) -> Result<(RateLimitResponse, Duration), AnswerError> {
        self.service.decide(request, DEFAULT_DEADLINE)
    }
}

//! The settings of the process, read from its environment.
//!
//! `table` declares each variable as a typed constant. `Settings` is what the program uses, validated and by concern;
//! `Settings::from_env` is the only way from one to the other and reports all problems at once. A variable without
//! effect gets a notice. Rule files given on the command line are not settings, and neither is anything that can change
//! while the process runs.

pub mod address;
pub mod target;
pub mod secret;
pub mod credentials;
pub mod invalid;
pub mod value;
pub mod choices;
pub mod condition;
pub mod setting;
pub mod table;
mod environment;
pub mod problem;
pub mod pem;
mod values;
pub mod store_tls;
pub mod tls;
pub mod listeners;
pub mod client_limits;
pub mod grpc;
pub mod rules;
pub mod xds;
pub mod decisions;
pub mod endpoint;
mod url;
pub mod redis;
pub mod memcache;
pub mod store;
pub mod process;
pub mod collector;
pub mod decision_log;
pub mod fleet;
pub mod metrics;
pub mod tracing;
pub mod report;
pub mod reference;

use std::ffi::OsString;
use std::num::NonZeroUsize;

use client_limits::ClientLimits;
use decision_log::{DecisionLogSettings, HashKey};
use decisions::DecisionSettings;
use environment::Environment;
use fleet::FleetSettings;
use grpc::GrpcSettings;
use listeners::{AdminToken, Listeners};
use metrics::MetricsSettings;
use problem::{Notice, SettingsError};
use process::{LogSettings, ShutdownSettings};
use rules::RuleSettings;
use store::{MemorySettings, StoreSettings};
use table::process::TOLLKEEPER_WORKER_THREADS;
use tracing::TracingSettings;
use values::{EnvironmentFindings, Values};
use xds::XdsSettings;

/// All settings, by concern.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Addresses to listen on.
    pub listeners: Listeners,
    /// Limits on clients.
    pub client_limits: ClientLimits,
    /// Token for admin requests to the debug listener; `None` means that there are none.
    pub admin: Option<AdminToken>,
    /// Policy for gRPC connections.
    pub grpc: GrpcSettings,
    /// Location of the rules, and their defaults.
    pub rules: RuleSettings,
    /// Control plane that sends the rules; `None` means that they are files.
    pub xds: Option<XdsSettings>,
    /// Modes that override the rules, and the contents of responses.
    pub decisions: DecisionSettings,
    /// Store of the counters.
    pub store: StoreSettings,
    /// Counters in this process: all of them, or the fallback while Redis is unavailable.
    pub memory: MemorySettings,
    /// Time limits of a shutdown.
    pub shutdown: ShutdownSettings,
    /// Level and format of the log.
    pub logs: LogSettings,
    /// Decision log; `None` means that there is none.
    pub decision_log: Option<DecisionLogSettings>,
    /// View of all replicas, and the form of rejected keys.
    pub fleet: FleetSettings,
    /// Destinations of metrics.
    pub metrics: MetricsSettings,
    /// Export of traces; `None` means that there are none.
    pub tracing: Option<TracingSettings>,
    /// Number of worker threads; `None` means one per core.
    pub worker_threads: Option<NonZeroUsize>,
}

impl Settings {
    /// Reads the settings of an environment, with notices about it.
    ///
    /// The error names every variable that does not parse or that contradicts another. Neither result shows secrets.
    pub fn from_env(vars: impl Iterator<Item = (OsString, OsString)>) -> Result<(Self, Vec<Notice>), SettingsError> {
        let (settings, EnvironmentFindings { problems, notices, .. }) = Self::read(&Environment::read(vars));
        if problems.is_empty() { Ok((settings, notices)) } else { Err(SettingsError { problems }) }
    }

    /// Reads the settings of an environment, with the default for each variable that has a problem; the flag says that
    /// there is one. Not for a start: a default may contradict the valid variables.
    pub fn from_valid_vars(vars: impl Iterator<Item = (OsString, OsString)>) -> (Self, bool) {
        let (settings, findings) = Self::read(&Environment::read(vars));
        (settings, !findings.problems.is_empty())
    }

    /// Reads the settings, unusable if the findings have a problem.
    fn read(environment: &Environment) -> (Self, EnvironmentFindings) {
        let mut values = Values::new(environment);
        let store = StoreSettings::read(&mut values, environment.backend());
        let hash_key = HashKey::read(&mut values);
        let decision_log = DecisionLogSettings::read(&mut values, &store, hash_key.as_ref());
        let deployments = store.deployments().chain(decision_log.iter().flat_map(DecisionLogSettings::deployments));
        redis::read::ignore_unused_certificates(&mut values, deployments);
        let exports_logs = decision_log.as_ref().is_some_and(DecisionLogSettings::uses_collector);
        let fleet = FleetSettings::read(&mut values, &store, decision_log.as_ref(), hash_key);
        let settings = Self {
            listeners: Listeners::read(&mut values),
            client_limits: ClientLimits::read(&values),
            admin: AdminToken::read(&mut values),
            grpc: GrpcSettings::read(&values),
            rules: RuleSettings::read(&values),
            xds: XdsSettings::read(&mut values),
            decisions: DecisionSettings::read(&mut values),
            store,
            memory: MemorySettings::read(&values),
            shutdown: ShutdownSettings::read(&mut values),
            logs: LogSettings::read(&values),
            decision_log,
            fleet,
            metrics: MetricsSettings::read(&mut values),
            tracing: TracingSettings::read(&mut values, exports_logs),
            worker_threads: NonZeroUsize::new(values.get(&TOLLKEEPER_WORKER_THREADS)),
        };
        (settings, values.into_findings(environment))
    }
}

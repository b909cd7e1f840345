//! The settings of the process, read from its environment.
//!
//! Each group of variables is one file, which declares them as typed constants, and reads and checks them;
//! `environment` lists the groups. `Settings` is what the program uses, validated and by concern; `Settings::from_env`
//! is the only way from one to the other and reports all problems at once. A variable without effect gets a notice.
//! Rule files given on the command line are not settings, and neither is anything that can change while the process
//! runs.
//!
//! [`Settings::presented_certificates`] collects the certificates that this process presents to servers.
//!
//! Decides: that all problems are reported at once.
//! Decides: which certificates are read again (`is_read_again`) and watched for their end.

pub mod secret;
pub mod problem;
pub mod address;
pub mod value;
pub mod setting;
pub mod pem;
mod values;
pub mod cloud_identity;
pub mod credentials;
pub mod tls;
pub mod listeners;
pub mod grpc;
pub mod client_limits;
pub mod counters;
pub mod redis;
pub mod memcache;
pub mod metrics;
pub mod rules;
pub mod decisions;
pub mod xds;
pub mod process;
pub mod logs;
pub mod collector;
pub mod tracing;
pub mod otlp_metrics;
pub mod decision_log;
pub mod store;
pub mod webhook;
pub mod fleet;
pub mod environment;
pub mod report;
pub mod documentation;

use std::ffi::OsString;
use std::num::NonZeroUsize;

use client_limits::ClientLimits;
use collector::CollectorSettings;
use counters::{ConcurrentLimitSettings, MemoryStoreSettings};
use credentials::{SecretSource, SecretVariables};
use decision_log::{DecisionLogSettings, SinkSettings};
use decisions::{DecisionSettings, TOLLKEEPER_ON_STORE_ERROR};
use environment::Environment;
use fleet::FleetSettings;
use grpc::GrpcSettings;
use listeners::{ADMIN_TOKEN_VARIABLES, Listeners};
use logs::LogSettings;
use metrics::MetricsSettings;
use otlp_metrics::OtlpMetricsSettings;
use pem::{ClientCertificate, PemFile};
use problem::{Notice, SettingProblem, SettingsError};
use process::{ShutdownSettings, TOLLKEEPER_WORKER_THREADS};
use rules::RuleSettings;
use store::StoreSettings;
use tracing::TracingSettings;
use values::{EnvironmentFindings, Values};
use webhook::WebhookSettings;
use xds::XdsSettings;

use crate::telemetry::listener_stats::OutgoingTlsConnection;

/// All settings, by concern.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Addresses to listen on.
    pub listeners: Listeners,
    /// Limits on clients.
    pub client_limits: ClientLimits,
    /// Token for admin requests to the debug listener; `None` means that there are none.
    pub admin: Option<SecretSource>,
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
    pub memory: MemoryStoreSettings,
    /// Slots of concurrent limits.
    pub slots: ConcurrentLimitSettings,
    /// Time limits of a shutdown.
    pub shutdown: ShutdownSettings,
    /// Level and format of the log.
    pub logs: LogSettings,
    /// Decision log; `None` means that there is none.
    pub decision_log: Option<DecisionLogSettings>,
    /// Webhook of levels that keys reach; `None` means that there is none.
    pub webhook: Option<WebhookSettings>,
    /// View of all replicas, and the form of rejected keys.
    pub fleet: FleetSettings,
    /// Destinations of metrics.
    pub metrics: MetricsSettings,
    /// Export of metrics to a collector; `None` means that there is none.
    pub otlp_metrics: Option<OtlpMetricsSettings>,
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
        let (settings, EnvironmentFindings { problems, notices, .. }) =
            Self::read(&Environment::select_variables(vars));
        if problems.is_empty() { Ok((settings, notices)) } else { Err(SettingsError { problems }) }
    }

    /// Reads the settings of an environment, with the default for each variable that has a problem, and the problems.
    /// Not for a start: a default may contradict the valid variables.
    pub fn from_env_ignoring_invalid(vars: impl Iterator<Item = (OsString, OsString)>) -> (Self, Vec<SettingProblem>) {
        let (settings, findings) = Self::read(&Environment::select_variables(vars));
        (settings, findings.problems)
    }

    /// Reads where a secret is, and nothing else: the admin token, or the key of hashed values, whether or not the
    /// environment has a decision log.
    ///
    /// # Errors
    /// The secret is too short, or is given twice.
    pub fn secret_from_env(
        vars: impl Iterator<Item = (OsString, OsString)>,
        variables: &SecretVariables,
    ) -> Result<Option<SecretSource>, SettingsError> {
        let environment = Environment::select_variables(vars.filter(|(name, _)| variables.has_name(name)));
        let mut values = Values::new(&environment.known);
        let source = variables.read_source(&mut values);
        let problems = environment.sort_and_complete_findings(values.into_findings()).problems;
        if problems.is_empty() { Ok(source) } else { Err(SettingsError { problems }) }
    }

    /// Reads the settings, unusable if the findings have a problem.
    fn read(environment: &Environment) -> (Self, EnvironmentFindings) {
        let mut values = Values::new(&environment.known);
        let store = StoreSettings::from_values(&mut values, &environment.known);
        let fleet = FleetSettings::from_values(&mut values, &store);
        let counters = store.redis().map(|redis| &redis.main);
        let decision_log = DecisionLogSettings::from_values(&mut values, counters, fleet.secret.as_ref());
        let webhook = WebhookSettings::from_values(&mut values);
        let on_store_error = values.get(&TOLLKEEPER_ON_STORE_ERROR);
        let listeners = Listeners::from_values(&mut values);
        let settings = Self {
            client_limits: ClientLimits::from_values(&values),
            admin: ADMIN_TOKEN_VARIABLES.read_source(&mut values),
            grpc: GrpcSettings::from_values(&values, &listeners.grpc),
            listeners,
            rules: RuleSettings::from_values(&mut values, on_store_error),
            xds: XdsSettings::from_values(&mut values),
            decisions: DecisionSettings::from_values(&mut values),
            store,
            memory: MemoryStoreSettings::from_values(&values),
            slots: ConcurrentLimitSettings::from_values(&values),
            shutdown: ShutdownSettings::from_values(&mut values),
            logs: LogSettings::from_values(&values),
            decision_log,
            webhook,
            fleet,
            metrics: MetricsSettings::from_values(&mut values),
            tracing: TracingSettings::from_values(&mut values),
            otlp_metrics: OtlpMetricsSettings::from_values(&mut values),
            worker_threads: NonZeroUsize::new(values.get(&TOLLKEEPER_WORKER_THREADS)),
        };
        values.ignore_unread_variables();
        (settings, environment.sort_and_complete_findings(values.into_findings()))
    }
}

/// Certificate that this process presents to a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PresentedCertificate {
    /// Connection that presents it.
    pub client: OutgoingTlsConnection,
    /// File with the certificate.
    pub file: PemFile,
    /// True if each new connection reads the file; otherwise the start reads it once.
    pub is_read_again: bool,
}

impl Settings {
    /// Returns the certificates that this process presents: one to Redis, one to memcached, and so on.
    pub fn presented_certificates(&self) -> Vec<PresentedCertificate> {
        let log = self.decision_log.as_ref();
        let deployments =
            self.store.redis_deployments().chain(log.into_iter().flat_map(DecisionLogSettings::redis_deployments));
        // All Redis servers get the same certificate.
        let redis = deployments.filter_map(|deployment| deployment.tls.as_ref()?.client.as_ref()).next();
        let memcached = match &self.store {
            StoreSettings::Memcache(memcache) => memcache.tls.as_ref().and_then(|tls| tls.client.as_ref()),
            StoreSettings::Redis(_) | StoreSettings::Memory => None,
        };
        let xds = self.xds.as_ref().and_then(|xds| xds.tls.as_ref()?.client.as_ref());
        let traces = self.tracing.as_ref().and_then(|tracing| collector_certificate(&tracing.collector));
        let logs = log.into_iter().flat_map(|log| &log.sinks).find_map(|sink| match sink {
            SinkSettings::Otlp(collector) => collector_certificate(collector),
            SinkSettings::Stdout | SinkSettings::File(_) | SinkSettings::Redis(_) => None,
        });
        let metrics = self.otlp_metrics.as_ref().and_then(|metrics| collector_certificate(&metrics.collector));
        let presented = [
            (OutgoingTlsConnection::Redis, redis, true),
            (OutgoingTlsConnection::Memcached, memcached, true),
            (OutgoingTlsConnection::Xds, xds, true),
            (OutgoingTlsConnection::OtlpTraces, traces, false),
            (OutgoingTlsConnection::OtlpLogs, logs, false),
            (OutgoingTlsConnection::OtlpMetrics, metrics, false),
        ];
        let presented = presented.into_iter().filter_map(|(client, certificate, is_read_again)| {
            Some(PresentedCertificate { client, file: certificate?.certificate.clone(), is_read_again })
        });
        presented.collect()
    }
}

/// Returns the certificate for a collector, if the connection has TLS.
fn collector_certificate(collector: &CollectorSettings) -> Option<&ClientCertificate> {
    collector.tls.client.as_ref().filter(|_| collector.endpoint.starts_with("https://"))
}

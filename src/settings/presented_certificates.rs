//! Certificates that this process presents to servers: one place for their expiry.

use super::Settings;
use super::collector::CollectorSettings;
use super::decision_log::{DecisionLogSettings, SinkSettings};
use super::pem::{ClientCertificate, PemFile};
use super::store::StoreSettings;
use crate::telemetry::listener_stats::OutgoingTlsConnection;

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

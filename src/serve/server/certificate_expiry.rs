//! Expiry of certificates: the warning, and the watch over those that this process presents to servers.
//!
//! A listener reports its own certificate when it loads one. Connections to servers read their certificate for each
//! connection, so a task reads the files beside them; a certificate that is read once at the start is not read again.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use crate::base::clock::Clock;
use crate::settings::pem::{PemFile, parse_not_after};
use crate::settings::presented_certificates::PresentedCertificate;
use crate::settings::problem::UnusableSetting;
use crate::telemetry::listener_stats::{OutgoingTlsConnection, StatsByListener};

/// Interval at which the files are read.
const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Warning that a certificate has expired, logged once for each certificate.
#[derive(Debug, Default)]
pub(super) struct ExpiryWarning {
    logged_for: Option<i64>,
}

impl ExpiryWarning {
    /// Warns if the certificate of `file` has expired. `not_after` is its expiry in seconds since the Unix epoch, and
    /// `rejected_by` says who rejects it.
    pub(super) fn warn_if_expired(&mut self, file: &PemFile, not_after: i64, rejected_by: &str) {
        if not_after < unix_time_now_s() && self.logged_for != Some(not_after) {
            self.logged_for = Some(not_after);
            let PemFile { setting, path } = file;
            let path = path.display();
            tracing::warn!("certificate has expired: {rejected_by} will reject it (replace {setting}={path})");
        }
    }
}

/// Finds a certificate that has expired: the process starts with it, and `rejected_by` says who rejects it.
pub(super) fn find_expired_certificate(file: &PemFile, rejected_by: &str) -> Option<UnusableSetting> {
    let not_after = read_expiry(file)?;
    let expiry = Timestamp::from_second(not_after).ok().filter(|_| not_after < unix_time_now_s())?;
    let what = format_args!("the certificate expired at {expiry}; {rejected_by} reject it, replace it");
    Some(file.file_error(what))
}

/// Records and reports the expiry of the certificates that this process presents to servers; never returns.
pub(super) async fn watch_expiry_of_presented_certificates(
    certificates: Vec<PresentedCertificate>,
    stats: Arc<StatsByListener>,
) {
    let mut warnings: Vec<ExpiryWarning> = certificates.iter().map(|_| ExpiryWarning::default()).collect();
    let mut is_first = true;
    loop {
        for (certificate, warning) in certificates.iter().zip(&mut warnings) {
            if is_first || certificate.is_read_again {
                let file = certificate.file.clone();
                let read = tokio::task::spawn_blocking(move || read_expiry(&file)).await;
                // A file that cannot be read, perhaps for a moment, is an error of the connection that needs it.
                if let Ok(Some(not_after)) = read {
                    stats.set_presented_certificate_not_after(certificate.client, not_after);
                }
            }
            if let Some(not_after) = stats.presented_certificate_not_after(certificate.client) {
                warning.warn_if_expired(&certificate.file, not_after, name_rejecting_servers(certificate.client));
            }
        }
        is_first = false;
        tokio::time::sleep(FILE_CHECK_INTERVAL).await;
    }
}

/// Returns who rejects an expired certificate of this connection.
pub(super) const fn name_rejecting_servers(client: OutgoingTlsConnection) -> &'static str {
    match client {
        OutgoingTlsConnection::Redis => "Redis servers",
        OutgoingTlsConnection::Memcached => "memcached servers",
        OutgoingTlsConnection::Xds => "xDS servers",
        OutgoingTlsConnection::OtlpTraces => "collectors of traces",
        OutgoingTlsConnection::OtlpLogs => "collectors of logs",
        OutgoingTlsConnection::OtlpMetrics => "collectors of metrics",
    }
}

/// Reads the expiry of the first certificate, in seconds since the Unix epoch; `None` if the file cannot be used.
fn read_expiry(file: &PemFile) -> Option<i64> {
    let pem = file.read_contents().ok()?;
    parse_not_after(file.parse_certificates(&pem).ok()?.first()?).ok()
}

fn unix_time_now_s() -> i64 {
    i64::try_from(Clock::System.now().as_micros() / 1_000_000).unwrap_or(i64::MAX)
}

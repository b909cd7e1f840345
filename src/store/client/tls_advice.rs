//! Settings to check after a failed TLS handshake.

use std::io;

/// Names of one client's settings.
pub(crate) struct TlsSettingNames {
    /// Start of the names: `REDIS` in `REDIS_TLS_CACERT`.
    pub(crate) prefix: &'static str,
    /// Setting that names the servers.
    pub(crate) address: &'static str,
    /// Way to connect without TLS.
    pub(crate) plaintext: &'static str,
    /// Program that the server should be.
    pub(crate) server: &'static str,
}

impl TlsSettingNames {
    /// Returns the advice if `error` is a failed handshake.
    pub(crate) fn advice(&self, error: &io::Error) -> Option<String> {
        let error = error.get_ref()?.downcast_ref::<rustls::Error>()?;
        let Self { prefix, address, plaintext, server } = self;
        let name = format!("{error:?}");
        let is = |kind: &str| name.contains(kind);
        Some(if is("NotValidForName") {
            let check = format!("{prefix}_TLS_SKIP_HOSTNAME_VERIFICATION=true skips this check");
            format!("the host in {address} is not a name of the server's certificate; {check}")
        } else if is("InvalidCertificate") {
            format!("{prefix}_TLS_CACERT names the authorities that are trusted")
        } else if is("CertificateRequired") {
            format!("{prefix}_TLS_CLIENT_CERT and {prefix}_TLS_CLIENT_KEY name the certificate to show")
        } else if is("AlertReceived") {
            format!("does the server accept the certificate of {prefix}_TLS_CLIENT_CERT?")
        } else if is("InvalidMessage") {
            format!("does the server speak TLS? If not, {plaintext}")
        } else if is("PeerIncompatible") {
            "the server offers neither TLS 1.2 nor 1.3 as is needed".to_owned()
        } else if is("PeerMisbehaved") {
            format!("is the server a {server}?")
        } else {
            format!("look at {prefix}_TLS_CACERT")
        })
    }
}

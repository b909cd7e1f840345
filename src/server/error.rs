//! Errors that end the process: a setting that cannot be applied, a failed listener, an incomplete shutdown.

use std::io;
use std::time::Duration;

/// Error that ends the process.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A listener could not be opened.
    #[error("{setting}: cannot listen on {address}: {error}")]
    Listen {
        /// Environment variable that holds the address.
        setting: &'static str,
        /// Address, or path of the Unix socket.
        address: String,
        /// Error of the system.
        error: io::Error,
    },
    /// The system refused a resource that the process cannot run without.
    #[error("{resource}: {error}")]
    System {
        /// Name of the resource.
        resource: &'static str,
        /// Error of the system.
        error: io::Error,
    },
    /// The task of a listener ended before the shutdown.
    #[error("a listener failed: {0}")]
    Serve(#[from] tokio::task::JoinError),
    /// The file that maps metric names cannot be used. Holds the path and the reason.
    #[error("PROMETHEUS_MAPPER_YAML={0}")]
    Mapper(String),
    /// The exporter of traces cannot be set up. Holds the setting and the reason.
    #[error("{0}")]
    Traces(String),
    /// The certificate of a listener cannot be used. Holds the setting and the reason.
    #[error("{0}")]
    Certificate(String),
    /// Delayed responses were cut off, because the shutdown timeout expired first.
    #[error(
        "TOLLKEEPER_SHUTDOWN_TIMEOUT: delayed responses were cut off after {} s (raise it above the longest delay)",
        .0.as_secs_f64()
    )]
    CutOff(Duration),
}

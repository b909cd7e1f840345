//! Errors that end the process: a setting that cannot be applied, a failed listener, an incomplete shutdown.
//!
//! Decides: what a start or stop that failed says.

use std::io;
use std::time::Duration;

use crate::settings::problem::UnusableSetting;

/// Error that ends the process.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The process cannot start with its settings.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Startup(Vec<StartupError>),
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
    /// Delayed responses were cut off, because the shutdown timeout expired first.
    #[error(
        "TOLLKEEPER_SHUTDOWN_TIMEOUT: delayed responses were cut off after {} s (raise it above the longest delay)",
        .0.as_secs_f64()
    )]
    CutOff(Duration),
}

/// Reason why the process cannot start with its settings.
#[derive(Debug, thiserror::Error)]
pub enum StartupError {
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
    /// A file that a setting names cannot be used.
    #[error(transparent)]
    Unusable(#[from] UnusableSetting),
}

impl StartupError {
    /// The environment variable at fault.
    pub const fn setting(&self) -> &'static str {
        match self {
            Self::Listen { setting, .. } => setting,
            Self::Unusable(unusable) => unusable.setting,
        }
    }

    /// Description of the problem, without the variable and its value.
    pub fn description(&self) -> String {
        match self {
            Self::Listen { address, error, .. } => format!("cannot listen on {address}: {error}"),
            Self::Unusable(unusable) => unusable.what.clone(),
        }
    }
}

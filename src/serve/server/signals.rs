//! Signals of the process: SIGTERM and SIGINT stop it, SIGHUP reloads the rules.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signal handlers of the process.
#[derive(Debug)]
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

/// Reaction to a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SignalAction {
    /// Shut down.
    Stop,
    /// Reload the rules.
    Reload,
}

impl Signals {
    /// Installs the handlers, which replace the default action of ending the process.
    pub(super) fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the next signal.
    pub(super) async fn wait(&mut self) -> SignalAction {
        tokio::select! {
            _ = self.terminate.recv() => SignalAction::Stop,
            _ = self.interrupt.recv() => SignalAction::Stop,
            _ = self.hangup.recv() => SignalAction::Reload,
        }
    }
}

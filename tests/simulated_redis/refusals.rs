//! States of a server in which it refuses commands, and the texts of its errors.

use crate::commands::{ALLOW_BUSY, DENY_OOM, LOADING, NO_AUTH, Properties, STALE, WRITE};
use crate::reply::Failure;

/// State in which a server refuses commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// It reads its data from disk.
    Loading,
    /// It refuses writes as a replica does.
    ReadOnly,
    /// Its memory is full.
    OutOfMemory,
    /// It cannot write snapshots to disk.
    SnapshotsFail,
    /// It has too few replicas.
    NoReplicas,
    /// A script runs for too long.
    Busy,
    /// Too many nodes of the cluster are down.
    ClusterDown,
    /// It is a replica that has lost its primary, and serves no old data.
    MasterDown,
    /// All connections have to log in.
    NoAuth,
    /// No password is accepted.
    WrongPassword,
}

/// A write at a replica.
pub(crate) const READ_ONLY: Failure = Failure::fixed("READONLY You can't write against a read only replica.");
/// A connection that did not log in.
pub(crate) const NO_LOGIN: Failure = Failure::fixed("NOAUTH Authentication required.");
/// A wrong user or password.
pub(crate) const WRONG_PASSWORD: Failure =
    Failure::fixed("WRONGPASS invalid username-password pair or user is disabled.");

impl Refusal {
    /// Text of the error.
    pub(crate) const fn failure(self) -> Failure {
        match self {
            Self::Loading => Failure::fixed("LOADING Redis is loading the dataset in memory"),
            Self::ReadOnly => READ_ONLY,
            Self::OutOfMemory => Failure::fixed("OOM command not allowed when used memory > 'maxmemory'."),
            Self::SnapshotsFail => Failure::fixed(
                "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk. \
                 Commands that may modify the data set are disabled, because this instance is configured to report \
                 errors during writes if RDB snapshotting fails (stop-writes-on-bgsave-error option). Please check the \
                 Redis logs for details about the RDB error.",
            ),
            Self::NoReplicas => Failure::fixed("NOREPLICAS Not enough good replicas to write."),
            Self::Busy => {
                Failure::fixed("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.")
            }
            Self::ClusterDown => Failure::fixed("CLUSTERDOWN The cluster is down"),
            Self::MasterDown => {
                Failure::fixed("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.")
            }
            Self::NoAuth => NO_LOGIN,
            Self::WrongPassword => WRONG_PASSWORD,
        }
    }

    /// Returns true if a client's command is refused for its properties. Logins are checked apart.
    pub(crate) fn concerns(self, command: &Properties, has_keys: bool) -> bool {
        match self {
            Self::Loading => !command.has(LOADING),
            Self::ReadOnly | Self::NoReplicas => command.has(WRITE),
            Self::OutOfMemory => command.has(DENY_OOM),
            Self::SnapshotsFail => command.has(WRITE) || command.name == "ping",
            Self::Busy => !command.has(ALLOW_BUSY),
            Self::ClusterDown => has_keys,
            Self::MasterDown => !command.has(STALE),
            Self::NoAuth => !command.has(NO_AUTH),
            Self::WrongPassword => false,
        }
    }

    /// Returns the error of a script's command, if it is refused; `has_written`: an earlier command of the script may
    /// have changed a key.
    pub(crate) fn of_script_command(self, command: &Properties, has_written: bool) -> Option<Failure> {
        let is_refused = match self {
            Self::ReadOnly | Self::NoReplicas | Self::SnapshotsFail => command.has(WRITE),
            Self::OutOfMemory => command.has(DENY_OOM) && !has_written,
            _ => false,
        };
        is_refused.then(|| self.failure())
    }
}

//! Reasons why a limit as written is not valid.

use super::algorithm::Algorithm;

/// Reason why a [`LimitSpec`](super::LimitSpec) is not a valid limit. Each names the key at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// The key does not apply to this algorithm.
    #[error("`{key}` does not apply to {algorithm}")]
    Meaningless {
        /// Key at fault.
        key: &'static str,
        /// Algorithm of the limit.
        algorithm: Algorithm,
    },
    /// The bucket or queue holds nothing.
    #[error("`{key}` must be at least 1")]
    Zero {
        /// Key at fault.
        key: &'static str,
    },
    /// The log would hold more entries than allowed.
    #[error("sliding_window_log keeps an entry for each hit, {limit} here, and at most {max} are allowed")]
    LogTooLong {
        /// `requests_per_unit` of the limit.
        limit: u32,
        /// Maximum that is allowed.
        max: u32,
    },
    /// `consistency: eventual` contradicts another key.
    #[error("`consistency: eventual` cannot be kept with {with}")]
    NotEventual {
        /// Key or algorithm that contradicts it, with the reason.
        with: &'static str,
    },
    /// `scope: global` contradicts another key.
    #[error("`scope: global` cannot be kept with {with}")]
    NotGlobal {
        /// Key or algorithm that contradicts it, with the reason.
        with: &'static str,
    },
    /// The reserve of a global limit gives a region nothing.
    #[error("`scope: global`: the reserve of this limit gives each of {regions} regions less than one hit")]
    ReserveTooSmall {
        /// Number of regions.
        regions: u16,
    },
}

impl LimitError {
    /// Key of the rule file that is at fault.
    pub const fn key(self) -> &'static str {
        match self {
            Self::Meaningless { key, .. } | Self::Zero { key } => key,
            Self::LogTooLong { .. } => "requests_per_unit",
            Self::NotEventual { .. } => "consistency",
            Self::NotGlobal { .. } | Self::ReserveTooSmall { .. } => "scope",
        }
    }
}

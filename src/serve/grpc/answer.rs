//! Answers to requests: a response with its delay, or an error with its gRPC code.

use std::time::Duration;

use tonic::Code;

use super::encode;
use crate::base::pb::RateLimitResponse;
use crate::decide::decision::{DecideError, Decision};

/// Maximum number of descriptors in one request: many times what any proxy sends, and few enough that such a request
/// costs its sender more than it costs this process.
pub const MAX_DESCRIPTORS: usize = 10_000;

/// Response to a request, and its delay.
#[derive(Clone, Debug, PartialEq)]
pub struct DelayedResponse {
    /// The response.
    pub response: RateLimitResponse,
    /// Time from the decision until the response is due; zero unless a limit delays it.
    pub delay: Duration,
}

impl DelayedResponse {
    /// The response that encodes a decision.
    pub fn of(decision: &Decision<'_>) -> Self {
        Self { response: encode::response(decision), delay: Duration::from_micros(decision.delay_us) }
    }
}

/// Reason why a request got no response. [`AnswerError::code`] tells whose fault it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// The request is too large: the caller's fault.
    #[error("rate limit descriptor list has {count} entries, more than {MAX_DESCRIPTORS}")]
    TooManyDescriptors {
        /// Number of descriptors in the request.
        count: usize,
    },
    /// There is no decision.
    #[error(transparent)]
    Undecided(#[from] DecideError),
}

impl AnswerError {
    /// The gRPC code of this error. Envoy treats all but OK alike: its `failure_mode_deny` decides.
    pub const fn code(&self) -> Code {
        match self {
            Self::TooManyDescriptors { .. }
            | Self::Undecided(DecideError::EmptyDomain | DecideError::NoDescriptors) => Code::InvalidArgument,
            Self::Undecided(DecideError::NoRules | DecideError::Store) => Code::Unavailable,
        }
    }
}

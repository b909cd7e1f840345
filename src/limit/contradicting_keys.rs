//! Keys of a limit that contradict its algorithm or each other, with the reason for people.
//!
//! Decides: a log over `TOLLKEEPER_LOG_MAX`; which limits can be eventual (`NotEventual`), global or reserved, or overflow.
//! Decides: which limits can be above 2^32 - 1 (`NotLarge`).

use super::algorithm::{Algorithm, AlgorithmProperties, CapacityRuleKey, DelayPolicy, RejectedHitsPolicy};
use super::ban::Ban;
use super::period::Unit;
use super::{Consistency, LimitError, LimitSpec, MAX_REQUESTS_PER_UNIT, Scope};

impl LimitSpec {
    /// Checks that each key applies to the algorithm and is in range.
    pub(super) fn check_rule_keys(&self, properties: AlgorithmProperties) -> Result<(), LimitError> {
        let algorithm = self.algorithm;
        let meaningless = |key| Err(LimitError::Meaningless { key, algorithm });
        if self.requests_per_unit > u64::from(u32::MAX) {
            self.check_large()?;
        }
        if self.bucket_size.is_some() && properties.capacity != CapacityRuleKey::BucketSize {
            return meaningless("bucket_size");
        }
        if self.queue_size.is_some() && properties.capacity != CapacityRuleKey::QueueSize {
            return meaningless("queue_size");
        }
        if self.max_wait_us.is_some() && properties.delay == DelayPolicy::Never {
            return meaningless("max_wait");
        }
        if self.count_rejected == Some(true) && properties.rejected_hits == RejectedHitsPolicy::NeverCounted {
            return meaningless("count_rejected");
        }
        if self.window.is_some() && !properties.follows_calendar {
            return meaningless("window");
        }
        if self.ban.is_some() && algorithm == Algorithm::Concurrent {
            return meaningless("ban");
        }
        if self.reservations.is_some() {
            let counts_rejected = (self.count_rejected == Some(true)).then_some(
                "`count_rejected: true`: a rejected request costs nothing, and what a settlement adds counts anyway",
            );
            if let Some(with) = Self::reason_against_reservations(algorithm, self.ban).or(counts_rejected) {
                return Err(LimitError::NotReserved { with });
            }
        }
        if self.bucket_size == Some(0) {
            return Err(LimitError::Zero { key: "bucket_size" });
        }
        if self.queue_size == Some(0) {
            return Err(LimitError::Zero { key: "queue_size" });
        }
        if properties.keeps_hit_log() && self.requests_per_unit > u64::from(self.log_max) {
            return Err(LimitError::LogTooLong { limit: self.requests_per_unit, max: self.log_max });
        }
        Ok(())
    }

    /// Checks that the limit counts numbers above 2^32 - 1.
    fn check_large(&self) -> Result<(), LimitError> {
        let with = match self.scope {
            _ if self.requests_per_unit > MAX_REQUESTS_PER_UNIT => "numbers above 9007199254740991, the largest of all",
            _ if !self.algorithm.counts_above_32_bits() => {
                "this algorithm: use `fixed_window` or `sliding_window_counter`"
            }
            None | Some(Scope::Region) => return Ok(()),
            Some(Scope::Global(_)) => "`scope: global`",
        };
        Err(LimitError::NotLarge { with })
    }

    /// Reason why a limit with these keys cannot have reservations, for people; `None` if it can.
    pub(super) const fn reason_against_reservations(algorithm: Algorithm, ban: Option<Ban>) -> Option<&'static str> {
        match algorithm {
            Algorithm::LeakyBucket => {
                Some("leaky_bucket: others wait behind a request, so its places cannot be given back")
            }
            Algorithm::Concurrent => {
                Some("`concurrent`: a slot is freed as a whole; write a limit of its own beside it")
            }
            _ if ban.is_some() => Some("`ban`: a cost that exceeds the limit is known only when the request is over"),
            _ => None,
        }
    }

    /// Checks that nothing in the limit needs one order of arrival for all replicas, or counts hits that are not admitted.
    pub(super) fn check_eventual_consistency(&self, properties: AlgorithmProperties) -> Result<(), LimitError> {
        let with = if let Some(reason) = properties.not_eventual {
            reason
        } else if self.max_wait_us.is_some_and(|wait| wait > 0) {
            "`max_wait`: tokens taken in advance need one order of arrival for all replicas"
        } else if self.count_rejected == Some(true) {
            "`count_rejected: true`: a rejection that is answered locally is not counted"
        } else if self.ban.is_some() {
            "`ban`: a replica admits leased hits without knowing of a ban"
        } else if self.reservations.is_some() {
            "`reservations`: a settlement must find the estimate, which a lease does not record"
        } else {
            return Ok(());
        };
        Err(LimitError::NotEventual { with })
    }

    /// Checks that the hits that the limit has room for are known at once, and that nothing else changes its counter.
    pub(super) fn check_overflow(&self) -> Result<(), LimitError> {
        let with = match self.algorithm {
            Algorithm::LeakyBucket => "leaky_bucket: it delays hits in place of rejecting them",
            Algorithm::Concurrent => "`concurrent`: it counts streams at once, and the others count hits",
            _ if self.count_rejected == Some(true) => "`count_rejected: true`: hits that overflow are not rejected",
            _ if self.max_wait_us.is_some_and(|wait| wait > 0) => "`max_wait`: hits that overflow do not wait",
            _ if self.ban.is_some() => "`ban`: hits that overflow are not rejected",
            _ if self.reservations.is_some() => "`reservations`: a settlement knows one counter",
            _ if matches!(self.consistency, Some(Consistency::Eventual(_))) => {
                "`consistency: eventual`: a replica with a lease does not ask the other limit"
            }
            _ if matches!(self.scope, Some(Scope::Global(_))) => {
                "`scope: global`: a region does not know what the others have left"
            }
            _ => return Ok(()),
        };
        Err(LimitError::OverflowUnsupported { with })
    }

    /// Checks that nothing in the limit keeps a region from deciding alone by hits that it was granted.
    pub(super) fn check_global_scope(&self) -> Result<(), LimitError> {
        let with = match self.algorithm {
            Algorithm::LeakyBucket => "leaky_bucket: a queue needs one order of arrival for all regions",
            Algorithm::Concurrent => "`concurrent`: a region cannot know of slots that another one freed",
            Algorithm::SlidingWindowLog => "sliding_window_log: the time of each hit is known to its own region only",
            _ if self.count_rejected == Some(true) => {
                "`count_rejected: true`: a rejection is known to its own region only"
            }
            _ if self.max_wait_us.is_some_and(|wait| wait > 0) => {
                "`max_wait`: tokens taken in advance need one order of arrival for all regions"
            }
            _ if self.ban.is_some() => "`ban`: a rejection is known to its own region only",
            _ if self.reservations.is_some() => "`reservations`: a region cannot give back hits that it was granted",
            _ if self.window.is_some() => "`window`: all regions number windows of one length",
            _ if self.calendar_months && self.period.unit() == Unit::Month => {
                "calendar months: all regions number windows of one length"
            }
            _ => return Ok(()),
        };
        Err(LimitError::NotGlobal { with })
    }
}

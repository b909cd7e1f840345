//! Refunds of a deployment in the key format of envoyproxy/ratelimit: use of the script, and dropped refunds.
//!
//! A user or a proxy may forbid scripts. The first refund learns it from the reply and later ones do without, until the
//! next attempt. A wrong guess is harmless: both ways keep counts at 0 or above, also if replicas mix them. The refund
//! itself is in `incrby`.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::base::sharded::lock_ignoring_poison;
use crate::store::client::redis::error::{RedisError, ReplyError};

/// Time from a rejected script to the next attempt: the permissions of the user may have changed.
const SCRIPT_RETRY_AFTER_REJECTION: Duration = Duration::from_secs(60);
/// Time from a script without reply to the next attempt. Some proxies close the connection, which fails other charges.
const SCRIPT_RETRY_AFTER_NO_REPLY: Duration = Duration::from_secs(3600);

/// Script support of one deployment, and its number of dropped refunds.
#[derive(Debug, Default)]
pub(crate) struct RefundScriptSupport {
    scripts: Mutex<ScriptSupport>,
    dropped: AtomicU64,
}

#[derive(Clone, Copy, Debug, Default)]
enum ScriptSupport {
    #[default]
    Unknown,
    Supported,
    Unsupported {
        retry_at: Instant,
    },
}

impl RefundScriptSupport {
    /// Returns false if scripts are known to be rejected at `now`.
    pub(super) fn may_use_script(&self, now: Instant) -> bool {
        let mut support = lock_ignoring_poison(&self.scripts);
        match *support {
            ScriptSupport::Unknown | ScriptSupport::Supported => true,
            ScriptSupport::Unsupported { retry_at } if now < retry_at => false,
            ScriptSupport::Unsupported { .. } => {
                *support = ScriptSupport::Unknown;
                true
            }
        }
    }

    /// Records that the script ran.
    pub(super) fn record_script_ran(&self) {
        *lock_ignoring_poison(&self.scripts) = ScriptSupport::Supported;
    }

    /// Records a script that failed at `now`. Returns true if the server rejects scripts: it did not run, and commands
    /// can replace it.
    pub(super) fn record_script_failed(&self, error: &ReplyError, now: Instant) -> bool {
        let mut support = lock_ignoring_poison(&self.scripts);
        let (is_rejected, retry_after) = match (error, *support) {
            // Proxies have error texts of their own.
            (ReplyError::Failed(RedisError::Misconfigured | RedisError::BadReply), _) => {
                (true, SCRIPT_RETRY_AFTER_REJECTION)
            }
            (ReplyError::Failed(RedisError::Broken | RedisError::Timeout), ScriptSupport::Unknown) => {
                (false, SCRIPT_RETRY_AFTER_NO_REPLY)
            }
            _ => return false,
        };
        if !matches!(*support, ScriptSupport::Unsupported { .. }) {
            tracing::warn!(
                "refunds do without scripts: the server did not run one; a refund below 0 is dropped, and counted in \
                 tollkeeper_refunds_dropped_total (grant `+eval +evalsha` to the user of redis to refund down to 0)"
            );
        }
        *support = ScriptSupport::Unsupported { retry_at: now + retry_after };
        is_rejected
    }

    /// Counts refunds that were dropped because they would have gone below 0.
    pub(super) fn count_dropped(&self, refunds: u64) {
        self.dropped.fetch_add(refunds, Ordering::Relaxed);
    }

    /// Returns the number of dropped refunds.
    pub(crate) fn dropped_refunds(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::RefundScriptSupport;
    use crate::store::client::redis::error::{RedisError, ReplyError};

    #[test]
    fn scripts_are_tried_again_after_a_rejection() {
        let (refunds, start) = (RefundScriptSupport::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        let fails = |error, now| refunds.record_script_failed(&ReplyError::Failed(error), now);
        assert!(refunds.may_use_script(start));
        assert!(fails(RedisError::Misconfigured, start));
        assert_eq!([1, 59, 60].map(|seconds| refunds.may_use_script(after(seconds))), [false, false, true]);
        // A proxy that closes the connection is not tried again soon.
        assert!(!fails(RedisError::Broken, after(60)));
        assert_eq!([61, 120, 3660].map(|seconds| refunds.may_use_script(after(seconds))), [false, false, true]);
        // Where scripts have run, a broken connection says nothing about them.
        refunds.record_script_ran();
        assert!(!fails(RedisError::Broken, after(3661)) && !fails(RedisError::Timeout, after(3661)));
        assert!(refunds.may_use_script(after(3661)));
        assert!(fails(RedisError::BadReply, after(3662)));
        assert!(!refunds.may_use_script(after(3663)));
    }
}

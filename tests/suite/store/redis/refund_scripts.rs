//! Refunds where scripts are refused.

use std::time::Duration;

use tokio::time::Instant;
use tollkeeper::store::client::redis::error::{RedisError, ReplyError};
use tollkeeper::store::redis::incrby::RefundScriptSupport;

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

//! Responses: modes that override the rules, headers, metadata, and the failure policy.

use crate::limit::StorePolicy;
use crate::settings::condition::Condition;
use crate::settings::setting::settings;
use crate::settings::value::text::HeaderName;

settings! { "Responses";
    SHADOW_MODE: bool = false, "reject no request: all rules act as in shadow_mode";
    QUOTA_MODE: bool = false,
        "act as if every rule had quota_mode: reject only if all quotas are exceeded";
    STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT: bool = false,
        "charge a rejected request only to the limits that reject it";
    LIMIT_RESPONSE_HEADERS_ENABLED: bool = false, "send the three headers below with every response";
    LIMIT_LIMIT_HEADER: Option<HeaderName> = Some("RateLimit-Limit"), "header for the limit";
    LIMIT_REMAINING_HEADER: Option<HeaderName> = Some("RateLimit-Remaining"), "header for the remaining hits";
    LIMIT_RESET_HEADER: Option<HeaderName> = Some("RateLimit-Reset"), "header for the seconds until the limit resets";
    TOLLKEEPER_RETRY_AFTER_HEADER: Option<HeaderName> = Some("Retry-After"),
        "header of a rejection for the seconds until a retry can be admitted; empty: not sent";
    RESPONSE_DYNAMIC_METADATA: bool = false,
        "send the request and the metadata of its rules as dynamic metadata of the response"
        .differs(Condition::True, "metadata stays with its rule");
    TOLLKEEPER_METADATA_VERDICTS: bool = false,
        "add the rules that rejected the request to the dynamic metadata";
    TOLLKEEPER_ON_STORE_ERROR: StorePolicy = StorePolicy::Local,
        "decision for rules without on_store_error if Redis fails or is too slow";
}

//! Modes that override the rules, the contents of responses, and the failure policy.
//!
//! Decides: names of rate limit headers (`RateLimit-Limit`, `X-RateLimit-Limit`).
//! Decides: which names are refused (`RESERVED_REQUEST_HEADERS`).
//! Decides: default policy of a failed store, `SHADOW_MODE`, `QUOTA_MODE`.

use super::metrics::NEAR_LIMIT_RATIO;
use super::rules::{TOLLKEEPER_LOG_MAX, USE_CALENDAR_MONTH_RATE_LIMIT};
use super::setting::{AnySetting as _, Setting, settings};
use super::value::choices;
use super::value::text::HeaderName;
use super::values::Values;
use crate::limit::StoreFailurePolicy;

settings! { "Responses";
    SHADOW_MODE: bool = "false", "reject no request: all rules act as in shadow_mode" .often_set();
    QUOTA_MODE: bool = "false",
        "every rule has quota_mode: reject only if all quotas are exceeded";
    STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT: bool = "false",
        "charge a rejected request only to the limits that reject it";
    LIMIT_RESPONSE_HEADERS_ENABLED: bool = "false", "send the three headers below with every response"
        .often_set();
    LIMIT_LIMIT_HEADER: Option<HeaderName> = "RateLimit-Limit", "header for the limit"
        .only_read("with LIMIT_RESPONSE_HEADERS_ENABLED=true");
    LIMIT_REMAINING_HEADER: Option<HeaderName> = "RateLimit-Remaining", "header for the remaining hits"
        .only_read("with LIMIT_RESPONSE_HEADERS_ENABLED=true");
    LIMIT_RESET_HEADER: Option<HeaderName> = "RateLimit-Reset", "header for the seconds until the limit resets"
        .only_read("with LIMIT_RESPONSE_HEADERS_ENABLED=true");
    LIMIT_REQUEST_HEADERS_ENABLED: bool = "false", "send the three headers below to the upstream"
        .differs_by_value("only newer versions of envoyproxy/ratelimit have it (pull request 1168)");
    LIMIT_REQUEST_LIMIT_HEADER: Option<HeaderName> = "RateLimit-Limit", "header for the limit"
        .only_read("with LIMIT_REQUEST_HEADERS_ENABLED=true");
    LIMIT_REQUEST_REMAINING_HEADER: Option<HeaderName> = "RateLimit-Remaining", "header for the remaining hits"
        .only_read("with LIMIT_REQUEST_HEADERS_ENABLED=true");
    LIMIT_REQUEST_RESET_HEADER: Option<HeaderName> = "RateLimit-Reset",
        "header for the seconds until the limit resets"
        .only_read("with LIMIT_REQUEST_HEADERS_ENABLED=true");
    TOLLKEEPER_POLICY_HEADERS: bool = "false",
        "send RateLimit-Policy and RateLimit (draft-ietf-httpapi-ratelimit-headers-11)";
    TOLLKEEPER_EXCEEDED_LIMITS_HEADER: Option<HeaderName> = "",
        "header for the upstream: limits that a passing request exceeded";
    TOLLKEEPER_RETRY_AFTER_HEADER: Option<HeaderName> = "Retry-After",
        "header of a rejection, in seconds; empty: not sent";
    RESPONSE_DYNAMIC_METADATA: bool = "false",
        "send the request and the metadata of its rules as dynamic metadata"
        .differs_by_value("metadata stays with its rule");
    TOLLKEEPER_METADATA_VERDICTS: bool = "false",
        "add the rules that rejected the request to the dynamic metadata";
    TOLLKEEPER_ON_STORE_ERROR: StoreFailurePolicy = "local",
        "decision of rules without on_store_error if Redis fails or is late" .often_set();
}

choices! { StoreFailurePolicy }

/// Modes that override the rules, and the contents of responses.
#[derive(Clone, Debug, PartialEq)]
pub struct DecisionSettings {
    /// `true` if no request is rejected.
    pub shadow_mode: bool,
    /// `true` if every limit is a quota.
    pub quota_mode: bool,
    /// `true` if the dynamic metadata of a response describes the request and its rules.
    pub response_dynamic_metadata: bool,
    /// `true` if the dynamic metadata of a response names the rules that rejected the request.
    pub metadata_verdicts: bool,
    /// Headers of every response.
    pub limit_headers: Option<LimitHeaderNames>,
    /// `true` if every response has the headers `RateLimit-Policy` and `RateLimit`.
    pub policy_headers: bool,
    /// Headers of every request for the upstream.
    pub request_limit_headers: Option<LimitHeaderNames>,
    /// Header for the upstream that names exceeded limits.
    pub exceeded_limits_header: Option<String>,
    /// Header of rejections for the seconds until a retry.
    pub retry_after_header: Option<String>,
    /// `true` if a rejected request is charged only to the limits that reject it.
    pub stop_cache_key_increment_when_overlimit: bool,
    /// Maximum requests per unit of a sliding_window_log, at least 1.
    pub log_max: u32,
    /// `true` if fixed windows of months follow the calendar (UTC).
    pub calendar_months: bool,
    /// Share of a limit above which hits are counted as near it, 0 to 1.
    pub near_limit_ratio: f32,
}

/// Names of the three limit headers, as written; each is a valid header name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitHeaderNames {
    /// Header for the limit.
    pub limit: String,
    /// Header for the remaining hits.
    pub remaining: String,
    /// Header for the seconds until the limit resets.
    pub reset: String,
}

impl DecisionSettings {
    pub(super) fn from_values(values: &mut Values) -> Self {
        // envoyproxy/ratelimit reads the ratio in single precision.
        #[expect(clippy::cast_possible_truncation, reason = "the nearest number in single precision is meant")]
        let near_limit_ratio = values.get(&NEAR_LIMIT_RATIO) as f32;
        Self {
            shadow_mode: values.get(&SHADOW_MODE),
            quota_mode: values.get(&QUOTA_MODE),
            response_dynamic_metadata: values.get(&RESPONSE_DYNAMIC_METADATA),
            metadata_verdicts: values.get(&TOLLKEEPER_METADATA_VERDICTS),
            limit_headers: values.get(&LIMIT_RESPONSE_HEADERS_ENABLED).then(|| LimitHeaderNames {
                limit: read_required_header_name(values, &LIMIT_LIMIT_HEADER),
                remaining: read_required_header_name(values, &LIMIT_REMAINING_HEADER),
                reset: read_required_header_name(values, &LIMIT_RESET_HEADER),
            }),
            policy_headers: values.get(&TOLLKEEPER_POLICY_HEADERS),
            request_limit_headers: values.get(&LIMIT_REQUEST_HEADERS_ENABLED).then(|| {
                for setting in
                    [&LIMIT_REQUEST_LIMIT_HEADER, &LIMIT_REQUEST_REMAINING_HEADER, &LIMIT_REQUEST_RESET_HEADER]
                {
                    check_request_header_name(values, setting);
                }
                LimitHeaderNames {
                    limit: read_required_header_name(values, &LIMIT_REQUEST_LIMIT_HEADER),
                    remaining: read_required_header_name(values, &LIMIT_REQUEST_REMAINING_HEADER),
                    reset: read_required_header_name(values, &LIMIT_REQUEST_RESET_HEADER),
                }
            }),
            exceeded_limits_header: {
                check_request_header_name(values, &TOLLKEEPER_EXCEEDED_LIMITS_HEADER);
                read_header_name(values, &TOLLKEEPER_EXCEEDED_LIMITS_HEADER)
            },
            retry_after_header: read_header_name(values, &TOLLKEEPER_RETRY_AFTER_HEADER),
            stop_cache_key_increment_when_overlimit: values.get(&STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT),
            log_max: values.get(&TOLLKEEPER_LOG_MAX),
            calendar_months: values.get(&USE_CALENDAR_MONTH_RATE_LIMIT),
            near_limit_ratio,
        }
    }
}

/// Headers that frame or route a request; another value for the upstream would break it.
const RESERVED_REQUEST_HEADERS: [&str; 8] =
    ["host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "keep-alive", "authorization"];

/// Reports a header for the upstream that frames or routes requests.
fn check_request_header_name(values: &mut Values, setting: &Setting<Option<HeaderName>>) {
    let name = read_header_name(values, setting).unwrap_or_default();
    if RESERVED_REQUEST_HEADERS.iter().any(|reserved| name.eq_ignore_ascii_case(reserved)) {
        values.add_problem(setting, "a header that requests need", "give a name such as x-ratelimit-exceeded");
    }
}

/// Reads the name of a header; `None` if it is empty.
fn read_header_name(values: &Values, setting: &Setting<Option<HeaderName>>) -> Option<String> {
    values.get(setting).map(|HeaderName(name)| name).filter(|name| !name.is_empty())
}

/// Reads the name of a header that is always sent, and so cannot be empty.
fn read_required_header_name(values: &mut Values, setting: &Setting<Option<HeaderName>>) -> String {
    read_header_name(values, setting).unwrap_or_else(|| {
        values.add_problem(setting, "set but empty", "unset it or give a header name");
        setting.default_text().to_owned()
    })
}

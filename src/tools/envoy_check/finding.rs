//! Findings about an Envoy bootstrap, and the table of checks that give them.
//!
//! A check has a name, a severity, a consequence and a fix; names are an interface of the JSON output. Findings are
//! bounded like diagnostics: the first `MAX_FINDINGS` are kept, and the rest are counted.
//!
//! Decides: which checks of Envoy's configuration there are, and what each says.
//! Decides: findings that `# check: ok` acknowledges.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use serde::Serialize;

use super::config_node::ConfigNode;
use crate::base::named_enum::{named_enum, serialize_by_name};
use crate::base::text::truncate_and_escape;
use crate::rules::diagnostic::AcknowledgedLines;
use crate::rules::rule::{Rule, SourceLocation};
use crate::rules::yaml::Position;

/// Maximum number of characters of a rule's path in a message.
const MAX_PATH_CHARS: usize = 100;

/// Maximum number of findings that are kept.
const MAX_FINDINGS: usize = 1000;

named_enum! {
    /// Severity of a finding.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum FindingSeverity {
        /// A limit does not work.
        Error = "error",
        /// A limit does not work at times, or probably does not do what is intended.
        Warning = "warning",
        /// It works, and could work better.
        Hint = "hint",
    }
}
serialize_by_name!(FindingSeverity, EnvoyCheck);

/// What is always the same about the findings of a check.
#[derive(Clone, Copy, Debug)]
pub struct CheckText {
    /// Severity, unless a finding has another.
    pub severity: FindingSeverity,
    /// What happens because of it.
    pub consequence: &'static str,
    /// How to mend it.
    pub fix: &'static str,
}

/// Declares the checks with their texts.
macro_rules! envoy_checks {
    ($($variant:ident = $name:literal, $severity:ident: $consequence:literal, $fix:literal;)+) => {
        named_enum! {
            /// A check of a bootstrap.
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
            pub enum EnvoyCheck {
                $(#[doc = $consequence] $variant = $name,)+
            }
        }

        impl EnvoyCheck {
            /// Severity, consequence and fix.
            pub const fn text(self) -> CheckText {
                match self {
                    $(Self::$variant => CheckText {
                        severity: FindingSeverity::$severity,
                        consequence: $consequence,
                        fix: $fix,
                    },)+
                }
            }
        }
    };
}

envoy_checks! {
    NoLimits = "no-limits", Warning:
        "nothing that goes through this Envoy is limited",
        "add a filter `envoy.filters.http.ratelimit`, as in envoy/gateway.yaml";
    FilterNeverAsks = "filter-never-asks", Warning:
        "the filter has no descriptor to send, so it makes no call and limits nothing",
        "write `rate_limits` in the filter, a virtual host or a route";
    FilterNotAsked = "filter-not-asked", Warning:
        "Envoy makes no call for the requests that this leaves out, so they are not limited",
        "remove it, if all requests must be limited";
    FilterNotEnforced = "filter-not-enforced", Warning:
        "the requests that this leaves out are asked about and counted, and pass even over the limit",
        "remove it, or use `shadow_mode` of the rule";
    NotInFile = "not-in-file", Error:
        "what is asked there is not known, so nothing is said of it",
        "give the configuration of a running Envoy: `curl -s localhost:9901/config_dump`";
    NotRead = "not-read", Hint:
        "nothing is said of it",
        "give only configuration of Envoy";
    StageWithoutFilter = "stage-without-filter", Error:
        "no filter has this stage, so the descriptor is never sent",
        "write the same `stage` in the filter and here";
    RouteLimitsIgnored = "route-limits-ignored", Error:
        "other limits take its place, or the filter is switched off there, so the descriptor is never sent",
        "move this item into the `rate_limits` that are sent, or those here";
    HostLimitsReplaced = "host-limits-replaced", Warning:
        "on these routes Envoy sends the limits of the route only, so those of the virtual host do not limit them",
        "write `vh_rate_limits: INCLUDE` in a RateLimitPerRoute of the route, or OVERRIDE if it is meant";
    CountedTwice = "counted-twice", Error:
        "each request counts twice, so half of the limit is admitted",
        "remove one, or write another `stage` in one filter and in its items";
    ChargedButNeverChecked = "charged-but-never-checked", Warning:
        "it is counted when the response has ended, and nothing asks before, so no request is rejected by it",
        "add the same item without `apply_on_stream_done` and with `hits_addend: { number: 0 }` to the filter";
    ValueNeverSet = "value-never-set", Error:
        "the value is not there when the filter asks: Envoy drops the descriptor of each request, or sends the default",
        "write the value before the rate limit filter";
    TypedMetadataNotRead = "typed-metadata-not-read", Error:
        "only CEL reads typed metadata: Envoy drops the descriptor, so it charges nothing",
        "read `metadata.typed_filter_metadata` by `%TYPED_CEL(...)%` in `hits_addend`, as in envoy/llm.yaml";
    UsageNotRead = "usage-not-read", Error:
        "Envoy reads the usage of no answer: each charges nothing, or what the expression has for a missing usage",
        "write `include_unconfigured_routes: true` in `token_usage`, or an AiProtocolManagerPerRoute in the route";
    UsageMayBeMissing = "usage-may-be-missing", Warning:
        "Envoy drops the descriptor then: a client that streams without `include_usage`, or goes before the end, pays nothing",
        "write `has(...) ? ... : 600u`, as in envoy/llm.yaml, with the cost of an answer whose usage is not known";
    UsageCompressed = "usage-compressed", Warning:
        "Envoy does not read the usage of a compressed answer, so a client that accepts one is not charged",
        "write `request_headers_to_remove: [accept-encoding]` in the virtual host, or put a decompressor behind this filter";
    LlmProtocolMissing = "llm-protocol-missing", Warning:
        "Envoy guesses the protocol of each answer; one that it does not recognize has no usage, and charges nothing",
        "write `default_llm_protocol` in `token_usage`, or `llm_protocol` in the AiProtocolManagerPerRoute of each route";
    McpCallsUnread = "mcp-calls-unread", Warning:
        "a call that Envoy reads otherwise than the server, or not at all, is not limited: a batch, a large body, another content type, a repeated key",
        "write `traffic_mode: REJECT_NO_MCP` and `reject_duplicate_keys: true` in the filter, as in envoy/mcp.yaml";
    DescriptorMayBeDropped = "descriptor-may-be-dropped", Hint:
        "Envoy drops the whole descriptor then, and whoever leaves it out is not limited by it",
        "add an item with `header_value_match` and `expect_match: false` for these requests, or `skip_if_absent` beside other entries";
    HitsAddendDropped = "hits-addend-dropped", Error:
        "Envoy leaves it out in virtual hosts and routes: the call counts one hit, and a refund is one hit more",
        "move this item into `rate_limits` of the filter, or of a RateLimitPerRoute";
    AddressForgeable = "address-forgeable", Warning:
        "a client writes the header from which it comes, so each request can have a new one",
        "write `use_remote_address: true` in the connection manager, and `xff_num_trusted_hops` behind proxies";
    ClientChosenSpelling = "client-chosen-spelling", Warning:
        "each spelling has a counter of its own, or matches no rule, so a client gets around the limit",
        "limit by a value that the client does not choose: `generic_key` in a route or virtual host, `remote_address`, an authenticated identity";
    TimeoutNotUsed = "timeout-not-used", Warning:
        "Envoy does not use this timeout, but the one of the filter, 20 ms by default",
        "write `timeout` in the filter, beside `rate_limit_service`";
    TimeoutDefault = "timeout-default", Hint:
        "Envoy waits 20 ms for the answer; what takes longer is an error, and by default the request passes",
        "write `timeout` in the filter";
    QueueBeyondTimeout = "queue-beyond-timeout", Warning:
        "a request that would wait longer than the timeout of the filter is rejected, so the queue is shorter than the rule says",
        "raise `timeout` of the filter above the longest wait, or write a `max_wait` below it";
    FormatterLiteral = "formatter-literal", Error:
        "Envoy sends this text as it is: all requests have the same value and share one counter",
        "set the runtime flag envoy.reloadable_features.enable_formatter_for_ratelimit_action_descriptor_value: true";
    FormatterNeverExpanded = "formatter-never-expanded", Error:
        "Envoy expands no formatters in this field, whatever the runtime says, and sends the text as it is",
        "put the formatter into `descriptor_value` of a generic_key";
    ClusterUnknown = "cluster-unknown", Error:
        "Envoy starts all the same; each call fails, and by default each request passes",
        "write the `name` of a cluster of this file";
    ClusterNotHttp2 = "cluster-not-http2", Error:
        "gRPC needs HTTP/2: each call fails, and by default each request passes",
        "write `explicit_http_config: { http2_protocol_options: {} }` in the HttpProtocolOptions of the cluster";
    KeepaliveMissing = "keepalive-missing", Warning:
        "a peer that vanished without closing its connection is not noticed: each call waits for its timeout, for minutes",
        "write `connection_keepalive: { interval: 5s, timeout: 1s }` in `http2_protocol_options`";
    DefaultCircuitBreakers = "default-circuit-breakers", Hint:
        "Envoy fails calls beyond 1024 at a time, and retries beyond 3, at once; by default these requests pass",
        "write `circuit_breakers: { thresholds: [{ max_requests: 100000, max_pending_requests: 100000, max_retries: 100000 }] }`";
    ReleaseMissing = "release-missing", Error:
        "nothing gives the slots back: each is held until `max_duration`, and then the limit is reached",
        "add a second rate limit filter before this one, which sends the release";
    ReleaseBehindAcquire = "release-behind-acquire", Error:
        "when a client goes while the acquire is waiting, Envoy never reaches this filter: the slot leaks",
        "put the filter that releases before the one that acquires";
    ReleaseInAcquireFilter = "release-in-acquire-filter", Error:
        "a filter that waits for an answer sends no release: each cancelled request may leak a slot (11 % did)",
        "put `apply_on_stream_done` into a rate limit filter of its own, before this one";
    ReleaseWithoutRetry = "release-without-retry", Warning:
        "a release is lost if the service is away for a moment, and the slot is held until `max_duration`",
        "write `retry_policy` in the `grpc_service` of this filter, with `retry_on: \"unavailable,connect-failure,reset\"`";
    ReleaseTimeoutShort = "release-timeout-short", Warning:
        "a release that takes longer is given up, and the slot is held until `max_duration`",
        "write `timeout: 10s`: no request waits for a release";
    ReleaseWithoutToken = "release-without-token", Error:
        "without an entry `release` at its end it is one more acquire, and gives nothing back",
        "add the action `metadata` with `descriptor_key: release` as the last one";
    ReleaseDefaultMissing = "release-default-missing", Error:
        "if the acquire had no answer there is no token, and Envoy sends no release: the slot leaks",
        "write `default_value: \"?\"` in this action";
    SlotDiffers = "slot-differs", Error:
        "the release names another slot than the acquire, so it gives nothing back",
        "write the same actions in both, and `release` at the end of the one that releases";
    SlotForgeable = "slot-forgeable", Warning:
        "a client that repeats its x-request-id shares one slot among all its requests",
        "add `connection.id` and `request.time` as entries `slot`";
    AcquireRetried = "acquire-retried", Warning:
        "the acquire of one request may arrive several times, and keeps its slot between the tries",
        "remove `retry_policy` from the filter that acquires";
    AcquireFailsOpen = "acquire-fails-open", Warning:
        "what passes while the service does not answer holds no slot, so more may run than the limit says",
        "write `failure_mode_deny: true` in the filter that acquires, if the limit must hold";
    HeartbeatMissing = "heartbeat-missing", Warning:
        "the service cannot tell that this Envoy died: its slots are held until `max_duration`",
        "add a `grpc_health_check` whose `initial_metadata` has x-tollkeeper-holder";
    HeartbeatSlow = "heartbeat-slow", Warning:
        "without traffic Envoy checks each 60 s only, which is too late: its slots are given away while they are used",
        "write `no_traffic_interval: 5s` and `interval: 5s` in the health check";
    HolderDiffers = "holder-differs", Error:
        "the health checks are of another holder than the slots, which are given away while they are used",
        "write the same x-tollkeeper-holder in `initial_metadata` of the filters and of the health check";
    RefundAsSlot = "refund-as-slot", Warning:
        "a refund at the end of a request is lost whenever Envoy, the service or the call ends first, and never comes back",
        "use a rule with `concurrent`, which expires such slots";
    DomainUnknown = "domain-unknown", Error:
        "no rule has this domain, so every request passes",
        "write the `domain` of the rules, or add rules for it";
    RuleUnreachable = "rule-unreachable", Hint:
        "no descriptor of these files reaches this rule, so it limits nothing here",
        "add the actions for it, or remove the rule; with several Envoys, give the files of all";
    DescriptorUnmatched = "descriptor-unmatched", Error:
        "this descriptor matches no rule, whatever its values, so it limits nothing",
        "change the actions or the rules: keys, order and number of entries must be the same";
}

/// A finding, as the JSON output has it.
#[derive(Clone, Debug, Serialize)]
pub struct EnvoyFinding {
    /// Severity.
    pub severity: FindingSeverity,
    /// Name of the check.
    pub check: EnvoyCheck,
    /// Name of the file as it was given.
    pub file: String,
    /// Line, from 1.
    pub line: u32,
    /// Column in characters, from 1.
    pub column: u32,
    /// Path in the file, such as `static_resources.clusters[0]`.
    pub path: String,
    /// What is wrong there.
    pub message: String,
    /// What happens because of it.
    pub consequence: String,
    /// How to mend it.
    pub fix: String,
}

/// What is wrong at a place, with what differs from the text of its check.
pub(super) struct Problem {
    pub(super) severity: FindingSeverity,
    pub(super) check: EnvoyCheck,
    pub(super) message: String,
    /// Fix in place of the check's.
    pub(super) fix: Option<String>,
}

/// File whose findings are collected.
#[derive(Clone, Debug)]
pub struct ReportedFile<'t> {
    /// Name in findings.
    pub name: Arc<str>,
    /// Its text.
    pub text: &'t str,
}

/// Findings of one file.
#[derive(Debug)]
pub struct EnvoyFindings {
    file: Arc<str>,
    acknowledged_lines: AcknowledgedLines,
    seen: HashSet<(EnvoyCheck, u32, u32)>,
    kept: Vec<EnvoyFinding>,
    counts: BTreeMap<FindingSeverity, u64>,
    /// Number of warnings and hints that the file acknowledges.
    pub acknowledged: u64,
}

impl EnvoyFindings {
    /// No findings yet.
    pub(super) fn new(file: ReportedFile<'_>) -> Self {
        Self {
            file: file.name,
            acknowledged_lines: AcknowledgedLines::from_text(file.text),
            seen: HashSet::new(),
            kept: Vec::new(),
            counts: BTreeMap::new(),
            acknowledged: 0,
        }
    }

    /// Adds a finding of a check.
    pub(super) fn report(&mut self, check: EnvoyCheck, node: &ConfigNode<'_, '_>, message: impl Into<String>) {
        self.report_with_severity(check.text().severity, check, node, message);
    }

    /// Adds a finding with another severity than the check has. One check has one finding at a place.
    pub(super) fn report_with_severity(
        &mut self,
        severity: FindingSeverity,
        check: EnvoyCheck,
        node: &ConfigNode<'_, '_>,
        message: impl Into<String>,
    ) {
        self.report_problem(node, Problem { severity, check, message: message.into(), fix: None });
    }

    /// Adds a finding of a check with another fix.
    pub(super) fn report_with_fix(
        &mut self,
        check: EnvoyCheck,
        node: &ConfigNode<'_, '_>,
        message: String,
        fix: Option<String>,
    ) {
        self.report_problem(node, Problem { severity: check.text().severity, check, message, fix });
    }

    /// Adds a finding that says more than its check.
    pub(super) fn report_problem(&mut self, node: &ConfigNode<'_, '_>, problem: Problem) {
        let Problem { severity, check, message, fix } = problem;
        let finding = self.build(check, node, message);
        let fix = fix.unwrap_or(finding.fix);
        self.add(EnvoyFinding { severity, fix, ..finding });
    }

    /// Adds a finding about a rule, which stands in another file.
    pub(super) fn report_rule(&mut self, check: EnvoyCheck, rule: &Rule) {
        let CheckText { severity, consequence, fix } = check.text();
        let SourceLocation { file, line, column } = &rule.location;
        self.add(EnvoyFinding {
            severity,
            check,
            file: file.to_string(),
            line: *line,
            column: *column,
            path: rule.path.clone(),
            message: format!("nothing reaches the rule '{}'", truncate_and_escape(&rule.path, MAX_PATH_CHARS)),
            consequence: consequence.to_owned(),
            fix: fix.to_owned(),
        });
    }

    fn build(&self, check: EnvoyCheck, node: &ConfigNode<'_, '_>, message: String) -> EnvoyFinding {
        let CheckText { severity, consequence, fix } = check.text();
        EnvoyFinding {
            severity,
            check,
            file: self.file.to_string(),
            line: node.at.line,
            column: node.at.column,
            path: node.path(),
            message,
            consequence: consequence.to_owned(),
            fix: fix.to_owned(),
        }
    }

    /// Reports a document that is not read.
    pub(super) fn report_unread(&mut self, at: Position, what: &str, fix: &str) {
        let CheckText { severity, consequence, .. } = EnvoyCheck::NotRead.text();
        self.add(EnvoyFinding {
            severity,
            check: EnvoyCheck::NotRead,
            file: self.file.to_string(),
            line: at.line,
            column: at.column,
            path: String::new(),
            message: what.to_owned(),
            consequence: consequence.to_owned(),
            fix: fix.to_owned(),
        });
    }

    fn add(&mut self, finding: EnvoyFinding) {
        // An alias is one text in several places, and several filters use one cluster.
        let is_own = *finding.file == *self.file;
        if is_own
            && (self.seen.len() >= MAX_FINDINGS * 10
                || !self.seen.insert((finding.check, finding.line, finding.column)))
        {
            return;
        }
        if is_own && finding.severity != FindingSeverity::Error && self.acknowledged_lines.contains_line(finding.line) {
            self.acknowledged += 1;
            return;
        }
        *self.counts.entry(finding.severity).or_default() += 1;
        if self.kept.len() < MAX_FINDINGS {
            self.kept.push(finding);
        }
    }

    /// Sorts findings: errors first, then by file and position.
    pub(super) fn sort_errors_first(&mut self) {
        let key = |finding: &EnvoyFinding| {
            let is_foreign = *finding.file != *self.file;
            (finding.severity, is_foreign, finding.line, finding.column)
        };
        self.kept.sort_by_key(key);
    }

    /// Findings that are kept, errors first.
    pub fn kept(&self) -> &[EnvoyFinding] {
        &self.kept
    }

    /// Number of findings of a severity, also of those that were not kept.
    pub fn count(&self, severity: FindingSeverity) -> u64 {
        self.counts.get(&severity).copied().unwrap_or(0)
    }
}

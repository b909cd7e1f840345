//! What is wrong with this process, in sentences.
//!
//! An alarm is a condition that holds at the time of the report; none is acknowledged. Of each only the time is kept
//! at which the process saw it first. It looks each time it publishes its summary, every 5 s.
//!
//! Decides: which alarms a process has, and when: late process, certificate that ends, lost store.
//! Decides: when `hot_key`, `certificate_expires`, `store_lost` and the other alarms begin.

use std::collections::HashSet;
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

use super::finding::{Finding, MAX_FINDING_TEXT_BYTES, MAX_FINDINGS, format_minute_of_day};
use super::rejection_rise::{RejectionRise, find_most_risen_limit, find_rise_after_load};
use crate::base::clock::{Time, shorten_in_tests, to_micros};
use crate::base::text::{escape_unprintable, truncate_and_escape, truncate_to_bytes};
use crate::limit::StoreFailurePolicy;
use crate::rules::rule::near_miss::MissReason;
use crate::rules::rule::set::CompiledRule;
use crate::rules::xds::status::StreamState;
use crate::serve::metrics_collector::MetricsCollector;
use crate::serve::report::unmatched::{UnmatchedFinding, UnmatchedQuery, UnmatchedReport, UnmatchedRow};
use crate::serve::status::read_request_totals;
use crate::store::client::server_status::ServerStatus;
use crate::telemetry::decision_history::RequestMinute;
use crate::telemetry::listener_stats::OutgoingTlsConnection;
use crate::telemetry::metrics::limit_stats::LimitName;
use crate::telemetry::scheduler_lag::SCHEDULER_LAG;
use crate::telemetry::top_keys::KeyCount;

/// Maximum number of alarms about domains without a matching rule: requests name domains.
const MAX_UNMATCHED_ALARMS: usize = 3;
/// Minimum number of descriptors in the last minutes that a rule nearly matches, for an alarm.
const MIN_NEAR_MISSES: u64 = 20;
/// Minutes that are looked at for an alarm about rejections: the last two, and the one that runs.
const REJECTION_MINUTES: usize = 3;
/// Minimum number of requests in those minutes.
const MIN_REQUESTS_FOR_REJECTION_ALARM: u64 = 100;
/// Minimum number of charges that failed in those minutes, for an alarm.
const MIN_FAILED_CHARGES: u64 = 20;
/// Minimum share of them, in percent; fewer are single lost calls.
const MIN_FAILED_CHARGE_PERCENT: u64 = 1;
/// Minimum number of rejected hits of one key in those minutes, bursts left out, for an alarm: about six per second. A
/// limit that rejects one client now and then does its work.
const MIN_HITS_OF_HOT_KEY: u64 = 1000;
/// Maximum length of a key in an alarm, in characters.
const MAX_KEY_CHARS: usize = 100;
/// Minutes before the gap that are looked at for an alarm about requests that stopped.
const MINUTES_BEFORE_GAP: usize = 10;
/// Minimum number of requests in one of those minutes.
const MIN_REQUESTS_BEFORE_GAP: u64 = 30;
/// Lag of the process for an alarm: more than ten times the usual timeout of Envoy.
const MIN_LAG_FOR_ALARM: Duration = Duration::from_millis(250);
/// Time before the expiry of a certificate from which on it is an alarm.
const CERTIFICATE_EXPIRES_SOON_S: i64 = 3 * 86_400;
/// Time after a refused quota stream for which it is an alarm; proxies try again within seconds.
const REFUSED_STREAM_ALARM_TIME: Duration = Duration::from_secs(300);

/// Time without a stream to the control plane that is no alarm: streams end when it restarts.
const XDS_GRACE: Duration = Duration::from_secs(30);

/// Finds what is wrong with this process.
pub fn find_own_alarms(collector: &MetricsCollector) -> Vec<Finding> {
    let mut found = OwnAlarms(Vec::new());
    found.add_store_and_reload_failures(collector);
    found.add_lost_control_plane(collector);
    found.add_refused_quotas(collector);
    found.add_traffic(collector);
    found.add_hot_key(collector);
    found.add_unmatched(collector);
    found.add_process(collector);
    found.0.truncate(MAX_FINDINGS);
    found.0
}

struct OwnAlarms(Vec<Finding>);

impl OwnAlarms {
    fn add(&mut self, kind: &'static str, mut text: String) {
        text.truncate(truncate_to_bytes(&text, MAX_FINDING_TEXT_BYTES).len());
        self.0.push(Finding::new(kind, Vec::new(), text));
    }

    fn add_store_and_reload_failures(&mut self, collector: &MetricsCollector) {
        let (service, health) = (&collector.service, &collector.health);
        if let Some(slow) = service.rules.progress().describe_slow_load() {
            self.add("reload_slow", format!("a load of rules is slow, the rules before it are in force: {slow}"));
        }
        if let Some(reason) = health.not_ready_reason() {
            self.add("not_ready", format!("the process cannot decide: {reason}"));
        }
        let stats = service.decider.store.stats();
        let servers = stats.shared.map(|shared| shared.servers).unwrap_or_default();
        let open: Vec<&str> =
            servers.iter().filter(|server| server.is_breaker_open).map(|server| server.address.as_str()).collect();
        if health.is_store_lost() {
            let store = stats.store;
            let why = health.store_failure().map_or_else(String::new, |why| format!(" ({})", escape_unprintable(&why)));
            self.add(
                "store_lost",
                format!("the store fails, {store}{why}: failure policies decide until it is back (see Failures)"),
            );
        } else {
            self.add_charges_decided_by_policy(collector, &servers);
        }
        if !health.is_store_lost() && !open.is_empty() {
            let (failing, of) = (open.len(), servers.len());
            let list = open.join(", ");
            self.add(
                "server_not_used",
                format!("{failing} of {of} servers of the store fail and are not used: {list}"),
            );
        }
        if let Some(what) = health.unserved_slots() {
            self.add(
                "slots_not_served",
                format!("{}: failure policies decide for their keys", escape_unprintable(&what)),
            );
        }
        if let Some(error) = service.rules.status().last_error {
            let first = error.lines().next().unwrap_or_default();
            let text = format!(
                "the last load of rules failed: files that were loaded before keep their rules, and domains of others are \
                 not limited: {first}"
            );
            self.add("reload_failed", text);
        }
    }

    /// A share of charges that failed in a store that is not lost.
    fn add_charges_decided_by_policy(&mut self, collector: &MetricsCollector, servers: &[ServerStatus]) {
        let (metrics, now) = (&collector.service.decider.metrics, collector.service.clock.now());
        let minutes = metrics.history.requests_by_minute(now, &read_request_totals(collector));
        let recent = || minutes.iter().rev().take(REJECTION_MINUTES).map(|(_, of)| of);
        let failed: u64 = recent().map(RequestMinute::failed_charges).sum();
        let charges: u64 = recent().map(|of| of.charges).sum();
        if failed < MIN_FAILED_CHARGES || failed.saturating_mul(100) < charges * MIN_FAILED_CHARGE_PERCENT {
            return;
        }
        let of_policy = |at: usize| recent().map(|of| of.failed_by_policy[at]).sum::<u64>();
        let policies = StoreFailurePolicy::ALL.iter().enumerate().map(|(at, policy)| (policy.name(), of_policy(at)));
        let policies = policies.filter(|(_, count)| *count > 0).map(|(name, count)| format!("{name} {count}"));
        // Charges that had no time to be sent failed too, and were not counted as sent.
        let charges = charges.max(failed);
        let per_mille = failed.saturating_mul(1000) / charges;
        let why = ServerStatus::last_error_of(servers).map_or_else(String::new, |error| format!("; {error}"));
        let text = format!(
            "{}.{} % of the charges of the last two to three minutes had no answer of the store, and failure policies \
             decided them ({failed} of {charges}: {}){} (see `servers` in /store, and the lines `store failed` of the \
             log)",
            per_mille / 10,
            per_mille % 10,
            policies.collect::<Vec<_>>().join(", "),
            escape_unprintable(&why)
        );
        self.add("answers_by_policy", text);
    }

    /// A control plane that sends no rules: those that are in force grow old.
    fn add_lost_control_plane(&mut self, collector: &MetricsCollector) {
        let Some(xds) = collector.service.rules.status().xds.filter(|xds| xds.stream != StreamState::Up) else {
            return;
        };
        let now_us = collector.service.clock.now().as_micros();
        let since = xds.stream_since.parse::<Timestamp>().ok().and_then(|at| u64::try_from(at.as_microsecond()).ok());
        if since.is_some_and(|since| now_us.saturating_sub(since) < to_micros(shorten_in_tests(XDS_GRACE))) {
            return;
        }
        let why =
            xds.stream_error.map_or_else(String::new, |why| format!(": {}", truncate_and_escape(&why, MAX_KEY_CHARS)));
        let (server, since) = (escape_unprintable(&xds.server), xds.stream_since);
        let text = format!("no stream to the control plane {server} since {since}, its changes do not arrive{why}");
        self.add("xds_stream_lost", text);
    }

    /// Proxies that ask for quotas from a server without them.
    fn add_refused_quotas(&mut self, collector: &MetricsCollector) {
        let service = &collector.service;
        if service.refused_calls.has_recent_quota_stream(service.clock.now(), REFUSED_STREAM_ALARM_TIME) {
            let text = "a proxy asks for quotas, and RLQS is off: it uses its fallback, and often rejects all (set \
                        TOLLKEEPER_RLQS=true and restart)";
            self.add("rlqs_off", text.to_owned());
        }
    }

    /// Requests that are mostly rejected, and requests that stopped.
    fn add_traffic(&mut self, collector: &MetricsCollector) {
        let (metrics, now) = (&collector.service.decider.metrics, collector.service.clock.now());
        let minutes = metrics.history.requests_by_minute(now, &read_request_totals(collector));
        let recent = || minutes.iter().rev().take(REJECTION_MINUTES).map(|(_, of)| of);
        let (requests, rejected) =
            recent().fold((0, 0), |(requests, rejected), of| (requests + of.requests, rejected + of.rejected));
        let denied: u64 = recent().map(|of| of.failed_by_policy[StoreFailurePolicy::Deny as usize]).sum();
        if requests >= MIN_REQUESTS_FOR_REJECTION_ALARM && 2 * rejected >= requests {
            let by = match find_most_rejecting_limit(collector) {
                _ if 2 * denied >= rejected => {
                    ", because the store failed: `on_store_error: local` in `defaults` of the rule file ends that"
                        .to_owned()
                }
                Some((name, count)) => format!(", {count} decisions of them by {}", escape_unprintable(&name)),
                None => String::new(),
            };
            let span = "of the last two to three minutes";
            self.add("mostly_rejected", format!("{rejected} of {requests} requests {span} were rejected{by}"));
        }
        if let Some(rise) = find_rise_after_load(&minutes, &collector.service.rules.load_history()) {
            self.add("rejections_rose_after_load", describe_rise(collector, &rise));
        }
        if let Some(RequestGap { minutes, before }) = find_request_gap(&minutes) {
            let text = format!(
                "no request for {minutes} min or more, after {before} in a minute: if the other replicas get none \
                 either, Envoy does not reach them, and lets requests pass unless failure_mode_deny is set (see its \
                 statistics ratelimit.failure_mode_allowed, and the health of the cluster's hosts)"
            );
            self.add("no_requests", text);
        }
    }

    /// One key that has most of the rejected hits, for some time.
    fn add_hot_key(&mut self, collector: &MetricsCollector) {
        let (top_keys, now) = (&collector.service.decider.metrics.top_keys, collector.service.clock.now());
        let minutes = REJECTION_MINUTES as u64;
        let snapshot = |filter: &dyn Fn(&LimitName) -> bool| top_keys.snapshot(now, minutes, filter).keys;
        // Only with a key that has enough hits the rules are looked at.
        let candidates: Vec<_> = snapshot(&|_| true).into_iter().filter(has_hits_of_hot_key).collect();
        if candidates.is_empty() {
            return;
        }
        let names: HashSet<&LimitName> = candidates.iter().map(|key| &*key.limit).collect();
        let loaded = collector.service.rules.current_rules_owned();
        let rules = loaded.iter().flat_map(|loaded| loaded.rules.rules());
        let left_out: HashSet<&LimitName> =
            rules.flat_map(|rule| limits_left_out_of_hot_key_alarm(rule, &names)).collect();
        let rejects = |name: &LimitName| !left_out.contains(name);
        let all = top_keys.hits_in_last_minutes(now, minutes, rejects);
        if let Some(key) = find_hot_key(&snapshot(&rejects), all) {
            let (text, of) = (truncate_and_escape(&key.text, MAX_KEY_CHARS), escape_unprintable(key.limit.as_str()));
            let text = format!(
                "one key has {} of {all} rejected hits of the last two to three minutes: {text}, by \
                 {of} (block it if it is abuse: `tollkeeper block`; else give it a limit of its own)",
                key.at_least
            );
            self.add("hot_key", text);
        }
    }

    /// Domains of which nothing matches, and descriptors that differ from a rule only by case or order.
    fn add_unmatched(&mut self, collector: &MetricsCollector) {
        let service = &collector.service;
        let rules = service.rules.current_rules_owned();
        let query = UnmatchedQuery { most: Some(20), ..UnmatchedQuery::default() };
        let rules = rules.as_ref().map(|loaded| &loaded.rules);
        let report = UnmatchedReport::new(&service.decider.metrics, rules, service.clock.now(), &query, false);
        for UnmatchedFinding { advice, .. } in report.findings.into_iter().take(MAX_UNMATCHED_ALARMS) {
            self.add("unmatched", advice);
        }
        let mistakes = [MissReason::Case.name(), MissReason::Order.name()];
        let is_mistake = |row: &&UnmatchedRow| {
            row.about >= MIN_NEAR_MISSES && row.reason.as_deref().is_some_and(|reason| mistakes.contains(&reason))
        };
        for row in report.descriptors.iter().filter(is_mistake).take(MAX_UNMATCHED_ALARMS) {
            let at = row.origin.as_deref().map_or_else(String::new, |origin| format!(" ({origin})"));
            let text = format!("about {} descriptors of {} are not limited: {}{at}", row.about, row.domain, row.why);
            self.add("almost_matches_rule", escape_unprintable(&text));
        }
    }

    /// A process that runs late, and certificates that clients or servers refuse.
    fn add_process(&mut self, collector: &MetricsCollector) {
        let lag = SCHEDULER_LAG.recent_maximum(Instant::now());
        if lag >= MIN_LAG_FOR_ALARM {
            let text = format!(
                "the process ran {:.2} s late within the last seconds: it lacks CPU or was paused, and calls that Envoy \
                 gave up meanwhile passed unless failure_mode_deny is set",
                lag.as_secs_f64()
            );
            self.add("late", text);
        }
        let now_s = i64::try_from(collector.service.clock.now().as_micros() / 1_000_000).unwrap_or(i64::MAX);
        let of_listeners = collector.listeners.named_listeners().filter_map(|(name, stats)| {
            Some((format!("the {name} listener"), "clients, such as Envoy", stats.certificate_not_after()?))
        });
        let of_clients = OutgoingTlsConnection::ALL.into_iter().filter_map(|client| {
            let seconds = collector.listeners.presented_certificate_not_after(client)?;
            Some((format!("the connections to {}", client.name()), "servers", seconds))
        });
        for (of, who, seconds) in of_listeners.chain(of_clients) {
            let at = Timestamp::from_second(seconds).map_or_else(|_| seconds.to_string(), |time| time.to_string());
            if seconds <= now_s {
                self.add("certificate_expired", format!("the certificate of {of} expired at {at}: {who} refuse it"));
            } else if seconds - now_s < CERTIFICATE_EXPIRES_SOON_S {
                self.add("certificate_expires", format!("the certificate of {of} expires at {at}"));
            }
        }
    }
}

/// Minutes without a request, after some with.
#[derive(Debug, PartialEq, Eq)]
pub struct RequestGap {
    /// Full minutes without a request.
    pub minutes: usize,
    /// Requests of the busiest minute shortly before.
    pub before: u64,
}

/// Finds a gap of one to nine full minutes in the requests by minute, of which the last runs.
pub fn find_request_gap(minutes: &[(u64, RequestMinute)]) -> Option<RequestGap> {
    let newest_first = || minutes.iter().rev().map(|(_, of)| of.requests);
    // The minute that runs may have begun just now.
    let silent = newest_first().take_while(|requests| *requests == 0).count();
    let before = newest_first().skip(silent).take(MINUTES_BEFORE_GAP).max()?;
    let is_found = (2..=MINUTES_BEFORE_GAP).contains(&silent) && before >= MIN_REQUESTS_BEFORE_GAP;
    is_found.then(|| RequestGap { minutes: silent - 1, before })
}

/// Limits of a rule that are left out: all, if one of `names` is among them and the rule has seen one key alone, as that
/// of a `generic_key` with a value. A block of that key would concern everybody.
pub fn limits_left_out_of_hot_key_alarm<'r>(
    rule: &'r CompiledRule,
    names: &HashSet<&LimitName>,
) -> impl Iterator<Item = &'r LimitName> + use<'r> {
    // The first limit that is active counts the keys.
    let has_one_key = rule.limits.iter().any(|limit| names.contains(limit.stats.name()))
        && rule.limits.iter().all(|limit| limit.stats.keys.estimate() < 2);
    rule.limits.iter().filter(move |_| has_one_key).map(|limit| limit.stats.name())
}

/// True if a key has enough rejected hits for an alarm, bursts and shadow mode left out.
fn has_hits_of_hot_key(key: &KeyCount) -> bool {
    key.mode.is_none() && key.at_least - key.in_bursts >= MIN_HITS_OF_HOT_KEY
}

/// Returns the key that has more than half of `all` rejected hits, if these are many and no burst.
pub fn find_hot_key(keys: &[KeyCount], all: u64) -> Option<&KeyCount> {
    keys.iter().find(|key| has_hits_of_hot_key(key) && key.at_least > all / 2)
}

/// Describes a rise of rejections: the load of rules, and the limit that rejects more than before.
fn describe_rise(collector: &MetricsCollector, rise: &RejectionRise) -> String {
    let (metrics, now) = (&collector.service.decider.metrics, collector.service.clock.now());
    let RejectionRise { load_s, version, percent_before, percent_after, .. } = rise;
    let status = collector.service.rules.status();
    let at_source = status.source_version.filter(|_| status.version == *version).map(|version| {
        let version = truncate_and_escape(&version, MAX_KEY_CHARS);
        format!(", version {version} of the source")
    });
    let changes = status.changes.filter(|_| status.version == *version);
    let by = find_most_risen_limit(&metrics.history, now, &metrics.limits.all_limit_stats(), rise).map(|limit| {
        let (name, before, after) = (escape_unprintable(&limit.name), limit.per_minute_before, limit.per_minute_after);
        format!(": most by {name}, from {before} to {after} decisions a minute")
    });
    let at = format_minute_of_day(Time::from_secs(*load_s));
    format!(
        "rejections rose from {percent_before} % to {percent_after} % of the requests after rules were loaded at {at} \
         UTC (set {version} of the process{}){}{}",
        at_source.unwrap_or_default(),
        by.unwrap_or_default(),
        changes.map_or_else(String::new, |changes| format!("; the load: {changes}"))
    )
}

/// Returns the limit that rejected most decisions in the last minutes, with their number.
fn find_most_rejecting_limit(collector: &MetricsCollector) -> Option<(String, u64)> {
    let (metrics, now) = (&collector.service.decider.metrics, collector.service.clock.now());
    let limits = metrics.limits.all_limit_stats();
    let rejections = limits.iter().map(|limit| {
        let minutes = metrics.history.sum_limits_by_minute(now, &[limit]);
        let recent = minutes.iter().rev().take(REJECTION_MINUTES).map(|(_, of)| u64::from(of.rejected));
        (limit, recent.sum::<u64>())
    });
    let (limit, count) = rejections.max_by_key(|(_, count)| *count).filter(|(_, count)| *count > 0)?;
    Some((limit.name().as_str().to_owned(), count))
}

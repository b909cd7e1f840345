//! Metrics of the loaded rules and of reloads.

use crate::rules::live::LiveRules;
use crate::rules::xds::status::StreamState;
use crate::telemetry::metrics::family::{Family, MetricKind, MetricValue, Series};

/// Emits the metrics of the loaded rules and of reloads.
pub(super) fn collect(rules: &LiveRules, emit: &mut dyn FnMut(Family)) {
    let status = rules.status();
    let loads = |name, outcome: &str, help, count| {
        let statsd_name = format!("ratelimit.service.config_load_{outcome}");
        Family::new(name, MetricKind::Counter, help)
            .with(Series::new(MetricValue::Counter(count)).statsd_name(statsd_name))
    };
    let help = "Total number of successful loads of the rules.";
    emit(loads("ratelimit_service_config_load_success", "success", help, status.version));
    let help = "Total number of failed loads of the rules.";
    emit(loads("ratelimit_service_config_load_error", "error", help, status.refused));
    let help = "Version of the loaded rules, from 1; 0 if none are loaded.";
    emit(Family::gauge("tollkeeper_config_version", help, status.version));
    let is_successful = u8::from(status.last_error.is_none() && status.version > 0);
    let help = "1 if the last load of the rules was successful.";
    emit(Family::gauge("tollkeeper_config_last_load_successful", help, is_successful));
    emit(Family::gauge("tollkeeper_domains", "Number of loaded domains.", status.domains));
    emit(Family::gauge("tollkeeper_rules", "Number of loaded rules.", status.rules));
    if let Some(defaults) = &status.rule_defaults {
        let help = "1 if the file of TOLLKEEPER_RULE_DEFAULTS can be used as it is now.";
        emit(Family::gauge("tollkeeper_rule_defaults_valid", help, u8::from(defaults.last_error.is_none())));
        let help = "Total number of contents of that file that could not be used.";
        emit(Family::counter("tollkeeper_rule_defaults_refused_total", help, defaults.refused));
        let help = "Number of its defaults that the loaded limits cannot have.";
        emit(Family::gauge("tollkeeper_rule_defaults_left_out", help, defaults.left_out));
    }
    if let Some(xds) = &status.xds {
        let help = "1 if the stream from the control plane is open and was answered.";
        emit(Family::gauge("tollkeeper_xds_stream_up", help, u8::from(xds.stream == StreamState::Up)));
        let help = "Time when the loaded rules, read from the cache, had been accepted, in Unix seconds; 0 for others.";
        let cached_s = xds.cached_at.map_or(0, |at| at.as_micros() / 1_000_000);
        emit(Family::gauge("tollkeeper_xds_cached_rules_timestamp_seconds", help, cached_s));
        emit(Family::counter(
            "tollkeeper_xds_streams_total",
            "Total number of streams to the control plane.",
            xds.streams,
        ));
        let help = "Total number of responses of the control plane that were accepted.";
        emit(Family::counter("tollkeeper_xds_accepted_total", help, xds.accepted));
        let help = "Total number of refusals sent to the control plane, repeated ones included.";
        emit(Family::counter("tollkeeper_xds_refused_total", help, xds.refused));
    }
    if let Some(loaded) = rules.load().as_ref() {
        let seconds = loaded.loaded_at.as_micros() / 1_000_000;
        let help = "Time when the rules were loaded, in seconds since the Unix epoch.";
        emit(Family::gauge("tollkeeper_config_last_load_timestamp_seconds", help, seconds));
    }
}

//! Settings of the stream that a command reads: those of the server's sink.

use std::env;
use std::ffi::OsString;

use crate::settings::Settings;
use crate::settings::decision_log::{SinkSettings, StreamSettings};

/// Reads the Redis of a stream from the environment, as the server does; `url` takes precedence.
///
/// # Errors
/// The environment has problems, or names no Redis.
pub(super) fn stream_settings(key: &str, url: Option<&str>) -> Result<StreamSettings, String> {
    const SINK: &str = "TOLLKEEPER_DECISION_LOG";
    const URL: &str = "TOLLKEEPER_DECISION_LOG_REDIS_URL";
    if key.is_empty() || key.contains(',') || key.trim() != key {
        return Err(format!("'{key}' is not the key of a stream: give one without commas, and no blanks around it"));
    }
    let is_replaced = |name: &OsString| name == SINK || (name == URL && url.is_some());
    let mut vars: Vec<(OsString, OsString)> = env::vars_os().filter(|(name, _)| !is_replaced(name)).collect();
    vars.push((SINK.into(), format!("redis:{key}").into()));
    vars.extend(url.map(|url| (URL.into(), url.into())));
    let (settings, _) = Settings::from_env(vars.into_iter()).map_err(|error| error.to_string())?;
    let mut sinks = settings.decision_log.into_iter().flat_map(|log| log.sinks);
    match sinks.next() {
        Some(SinkSettings::Redis(stream)) => Ok(*stream),
        _ => Err(format!("'{key}' is not the key of a stream")),
    }
}

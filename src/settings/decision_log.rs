//! Decision log: destinations, and the decisions and values that it contains.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::choices::LoggedValues;
use super::collector::{CollectorSettings, LOGS};
use super::environment::Environment;
use super::problem::{SettingsError, UnusableSetting};
use super::redis::{self, DeploymentSettings};
use super::secret::Secret;
use super::setting::AnySetting;
use super::store::StoreSettings;
use super::table::decision_log::*;
use super::table::tracing::OTEL_EXPORTER_OTLP_ENDPOINT;
use super::value::text::TextList;
use super::values::Values;

/// Settings of the decision log.
#[derive(Clone, Debug, PartialEq)]
pub struct DecisionLogSettings {
    /// Destinations, at least one.
    pub sinks: Vec<SinkSettings>,
    /// Decisions that are logged.
    pub when: LoggedDecisions,
    /// Share of the keys that is logged, 0 to 1.
    pub sample: f64,
    /// Form of the values of descriptors.
    pub values: LoggedValues,
    /// Key of hashed values; set if `values` is `Hashed`.
    pub hash_key: Option<HashKey>,
    /// Maximum size of a file in bytes.
    pub max_file_bytes: u64,
    /// Number of files that are kept, the current one included; at least 1.
    pub max_files: u32,
    /// Maximum size of the records that wait for one sink, in bytes.
    pub queue_bytes: usize,
}

/// Destination of the decision log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SinkSettings {
    /// Standard output.
    Stdout,
    /// A file, compressed if its name ends in `.zst`.
    File(PathBuf),
    /// A stream in Redis.
    Redis(Box<StreamSettings>),
    /// Logs of an OpenTelemetry collector.
    Otlp(Box<CollectorSettings>),
}

/// Stream in Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamSettings {
    /// Key of the stream, not empty.
    pub key: String,
    /// Approximate number of records that are kept, at least 1.
    pub max_length: u64,
    /// Deployment that has the stream.
    pub deployment: DeploymentSettings,
}

impl StreamSettings {
    /// Reads the settings of a stream; `None` after a problem.
    fn read(values: &mut Values, store: &StoreSettings, key: &str) -> Option<Self> {
        let deployment = match store {
            _ if !values.get(&TOLLKEEPER_DECISION_LOG_REDIS_URL).reveal().is_empty() => redis::read::stream(values),
            StoreSettings::Redis(counters) => counters.main.clone(),
            StoreSettings::Memory | StoreSettings::Memcache(_) => {
                let what = "names a stream, but the counters are not in Redis";
                values.problem(&TOLLKEEPER_DECISION_LOG, what, "give TOLLKEEPER_DECISION_LOG_REDIS_URL");
                return None;
            }
        };
        let max_length = values.get(&TOLLKEEPER_DECISION_LOG_STREAM_LENGTH);
        Some(Self { key: key.to_owned(), max_length, deployment })
    }
}

/// Decisions that are logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoggedDecisions {
    /// Rejected requests.
    pub rejected: bool,
    /// Admitted requests that exceed a limit in shadow mode.
    pub shadow: bool,
    /// Decisions by a failure policy, and requests without a decision.
    pub errors: bool,
    /// All decisions.
    pub all: bool,
}

impl LoggedDecisions {
    /// Words of `TOLLKEEPER_DECISION_LOG_WHEN`.
    const WORDS: [&'static str; 4] = ["rejected", "shadow", "errors", "all"];

    /// Words that are set.
    pub fn words(self) -> impl Iterator<Item = &'static str> {
        let Self { rejected, shadow, errors, all } = self;
        Self::WORDS.into_iter().zip([rejected, shadow, errors, all]).filter_map(|(word, is_set)| is_set.then_some(word))
    }

    fn of(words: &[String]) -> Option<Self> {
        let mut logged = Self::default();
        for word in words.iter().map(|word| word.trim()).filter(|word| !word.is_empty()) {
            match word {
                "rejected" => logged.rejected = true,
                "shadow" => logged.shadow = true,
                "errors" => logged.errors = true,
                "all" => logged.all = true,
                _ => return None,
            }
        }
        (logged != Self::default()).then_some(logged)
    }
}

/// Key of hashed values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HashKey {
    /// The key itself.
    Text(Secret),
    /// A file that holds the key.
    File(PathBuf),
}

impl HashKey {
    /// Reads the key of an environment, whether or not that has a log.
    ///
    /// # Errors
    /// The key is too short, or is given twice.
    pub fn from_vars(vars: impl Iterator<Item = (OsString, OsString)>) -> Result<Option<Self>, SettingsError> {
        let names = [TOLLKEEPER_DECISION_LOG_HASH_KEY.name(), TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE.name()];
        let environment = Environment::read(vars.filter(|(name, _)| names.iter().any(|known| name == known)));
        let mut values = Values::new(&environment);
        let key = Self::read(&mut values);
        let problems = values.into_findings(&environment).problems;
        if problems.is_empty() { Ok(key) } else { Err(SettingsError { problems }) }
    }

    /// Minimum length of a key in bytes, so that values cannot be guessed without it.
    pub const MIN_BYTES: usize = 16;
    /// Maximum size of a key file in bytes.
    const MAX_BYTES: u64 = 4096;

    pub(super) fn read(values: &mut Values) -> Option<Self> {
        let (text, file) =
            (values.get(&TOLLKEEPER_DECISION_LOG_HASH_KEY), values.get(&TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE));
        if text.is_some() && file.is_some() {
            let what = "set beside TOLLKEEPER_DECISION_LOG_HASH_KEY";
            values.problem(&TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE, what, "give one of them");
        }
        if text.as_ref().is_some_and(|text| text.reveal().len() < Self::MIN_BYTES) {
            let fix = format!("give {} bytes or more, as from `openssl rand -hex 32`", Self::MIN_BYTES);
            values.problem(&TOLLKEEPER_DECISION_LOG_HASH_KEY, "too short to be a secret", fix);
        }
        text.map(Self::Text).or_else(|| file.map(Self::File))
    }

    /// Returns the key; white space at the end of a file is ignored.
    ///
    /// # Errors
    /// The file cannot be read, or holds less than [`HashKey::MIN_BYTES`] or more than 4096 bytes.
    pub fn secret(&self) -> Result<Secret, UnusableSetting> {
        let path = match self {
            Self::Text(secret) => return Ok(secret.clone()),
            Self::File(path) => path,
        };
        let unusable = |what: String| UnusableSetting {
            setting: TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE.name(),
            shown: path.display().to_string(),
            what,
        };
        let mut text = String::new();
        let read = File::open(path).and_then(|file| file.take(Self::MAX_BYTES + 1).read_to_string(&mut text));
        read.map_err(|error| unusable(format!("cannot be read: {error}; name a readable file")))?;
        let key = text.trim_end();
        if key.len() < Self::MIN_BYTES || text.len() as u64 > Self::MAX_BYTES {
            let (min, max) = (Self::MIN_BYTES, Self::MAX_BYTES);
            return Err(unusable(format!("holds {} bytes; give {min} to {max}", text.len())));
        }
        Ok(Secret::new(key))
    }
}

impl DecisionLogSettings {
    /// True if records go to an OpenTelemetry collector.
    pub fn uses_collector(&self) -> bool {
        self.sinks.iter().any(|sink| matches!(sink, SinkSettings::Otlp(_)))
    }

    /// Deployments of Redis that hold a stream.
    pub(super) fn deployments(&self) -> impl Iterator<Item = &DeploymentSettings> {
        self.sinks.iter().filter_map(|sink| match sink {
            SinkSettings::Redis(stream) => Some(&stream.deployment),
            SinkSettings::Stdout | SinkSettings::File(_) | SinkSettings::Otlp(_) => None,
        })
    }

    pub(super) fn read(values: &mut Values, store: &StoreSettings, hash_key: Option<&HashKey>) -> Option<Self> {
        let sinks = sinks(values, store);
        ignore_unused(values, &sinks);
        let TextList(words) = values.get(&TOLLKEEPER_DECISION_LOG_WHEN);
        let when = LoggedDecisions::of(&words);
        if when.is_none() {
            let fix = "give rejected, shadow and errors, or fewer of them, or all";
            values.problem(&TOLLKEEPER_DECISION_LOG_WHEN, "not a list of decisions", fix);
        }
        let logged_values = values.get(&TOLLKEEPER_DECISION_LOG_VALUES);
        if sinks.is_empty() {
            return None;
        }
        if logged_values == LoggedValues::Hashed && hash_key.is_none() {
            let fix = "give TOLLKEEPER_DECISION_LOG_HASH_KEY or TOLLKEEPER_DECISION_LOG_HASH_KEY_FILE";
            values.problem(&TOLLKEEPER_DECISION_LOG_VALUES, "there is no key to hash with", fix);
        }
        Some(Self {
            sinks,
            when: when.unwrap_or_default(),
            sample: values.get(&TOLLKEEPER_DECISION_LOG_SAMPLE),
            values: logged_values,
            hash_key: hash_key.filter(|_| logged_values == LoggedValues::Hashed).cloned(),
            max_file_bytes: values.get(&TOLLKEEPER_DECISION_LOG_FILE_BYTES).0,
            max_files: values.get(&TOLLKEEPER_DECISION_LOG_FILES),
            queue_bytes: values.get(&TOLLKEEPER_DECISION_LOG_QUEUE_BYTES).as_usize(),
        })
    }
}

fn sinks(values: &mut Values, store: &StoreSettings) -> Vec<SinkSettings> {
    let TextList(words) = values.get(&TOLLKEEPER_DECISION_LOG);
    let mut sinks = Vec::new();
    for word in words.iter().map(|word| word.trim()).filter(|word| !word.is_empty()) {
        let sink = match word.split_once(':') {
            None if word == "stdout" => SinkSettings::Stdout,
            Some(("file", path)) if !path.is_empty() && !path.contains('\0') => {
                SinkSettings::File(Path::new(path).to_owned())
            }
            Some(("redis", key)) if !key.is_empty() => match StreamSettings::read(values, store, key) {
                Some(stream) => SinkSettings::Redis(Box::new(stream)),
                None => continue,
            },
            None if word == "otlp" => SinkSettings::Otlp(Box::new(collector(values))),
            _ => {
                let fix = "give stdout, file:PATH, redis:STREAM or otlp, or a list of them";
                values.problem(&TOLLKEEPER_DECISION_LOG, "names an unknown destination", fix);
                continue;
            }
        };
        if sinks.contains(&sink) {
            values.problem(&TOLLKEEPER_DECISION_LOG, "names a destination twice", "give each once");
        } else {
            sinks.push(sink);
        }
    }
    sinks
}

/// Reads the connection to the collector. A local one is not assumed: its absence would lose records.
fn collector(values: &mut Values) -> CollectorSettings {
    if values.first_set([LOGS.endpoint, &OTEL_EXPORTER_OTLP_ENDPOINT]).is_none() {
        let fix = "give OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_LOGS_ENDPOINT";
        values.problem(&TOLLKEEPER_DECISION_LOG, "names a collector that has no URL", fix);
    }
    CollectorSettings::read(values, &LOGS)
}

/// Notes the settings of destinations that are not used.
fn ignore_unused(values: &mut Values, sinks: &[SinkSettings]) {
    const STREAM: [&dyn AnySetting; 8] = [
        &TOLLKEEPER_DECISION_LOG_STREAM_LENGTH,
        &TOLLKEEPER_DECISION_LOG_REDIS_URL,
        &TOLLKEEPER_DECISION_LOG_REDIS_TYPE,
        &TOLLKEEPER_DECISION_LOG_REDIS_TLS,
        &TOLLKEEPER_DECISION_LOG_REDIS_AUTH,
        &TOLLKEEPER_DECISION_LOG_REDIS_AUTH_FILE,
        &TOLLKEEPER_DECISION_LOG_REDIS_SENTINEL_AUTH,
        &TOLLKEEPER_DECISION_LOG_REDIS_SENTINEL_AUTH_FILE,
    ];
    const COLLECTOR: [&dyn AnySetting; 8] = [
        &OTEL_EXPORTER_OTLP_LOGS_ENDPOINT,
        &OTEL_EXPORTER_OTLP_LOGS_PROTOCOL,
        &OTEL_EXPORTER_OTLP_LOGS_HEADERS,
        &OTEL_EXPORTER_OTLP_LOGS_TIMEOUT,
        &OTEL_EXPORTER_OTLP_LOGS_COMPRESSION,
        &OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE,
        &OTEL_EXPORTER_OTLP_LOGS_CLIENT_CERTIFICATE,
        &OTEL_EXPORTER_OTLP_LOGS_CLIENT_KEY,
    ];
    if !sinks.iter().any(|sink| matches!(sink, SinkSettings::Redis(_))) {
        let why = "TOLLKEEPER_DECISION_LOG names no stream";
        STREAM.into_iter().for_each(|setting| values.ignore_if_changed(setting, why));
    }
    if !sinks.iter().any(|sink| matches!(sink, SinkSettings::Otlp(_))) {
        let why = "TOLLKEEPER_DECISION_LOG does not name otlp";
        COLLECTOR.into_iter().for_each(|setting| values.ignore_if_changed(setting, why));
    }
}

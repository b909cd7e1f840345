//! From the values of an environment to `Settings`.
//!
//! Each field is read here, and nowhere else, by the name of its variable; what is not set reads as the default in the
//! table. Checks that need more than one value, or more than its kind, are made here too. A value that is wrong is
//! noted and reads as its default, so that the rest is checked as well; nothing assembled from it gets out.

mod metrics;
mod redis;
mod tracing;
mod tls;

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use super::address::{Address, Host};
use super::environment::{Environment, Verdict};
use super::setting::DurationText;
use super::value::{Secret, Value};
use super::{
    AdminToken, Behaviour, Grpc, GrpcListener, HeaderNames, Listeners, Logs, Memory, Notice, Problem, Rules, Settings,
};
use super::{Shutdown, parse, table};
use crate::limit::StorePolicy;
use crate::telemetry::logs;

/// What a start makes of an environment.
pub(crate) struct Assembled {
    /// Not to be used if there are problems.
    pub(crate) settings: Settings,
    /// In the order of the documentation.
    pub(crate) problems: Vec<Problem>,
    /// Variables of which nothing comes because of others, and why.
    pub(crate) idle: Vec<(&'static str, &'static str)>,
    /// In the order of the documentation, then what is not known.
    pub(crate) notices: Vec<Notice>,
}

/// The settings of an environment that is sorted out, and everything that is wrong with it or worth saying.
pub(crate) fn assemble(environment: &Environment) -> Assembled {
    let mut values = Values::default();
    for variable in &environment.known {
        let mut problem = |what: &str, fix: &str| {
            let (name, shown) = (variable.name.clone(), variable.shown());
            values.problems.push(Problem { name, shown, what: what.to_owned(), fix: fix.to_owned() });
        };
        match variable.judge() {
            Verdict::Used(value) if variable.setting.name.ends_with('*') => {
                values.families.insert(variable.name.clone(), (value, variable.shown()));
            }
            Verdict::Used(value) => drop(values.given.insert(variable.setting.name, (value, variable.shown()))),
            Verdict::Refused(refusal) => problem(refusal.why, refusal.instead),
            Verdict::Invalid(fault) => problem(&fault.what, &fault.fix),
            // One line for a family, however many of it are set.
            Verdict::NoEffect(why) => values.notices.push(Notice::no_effect(variable.setting.name, why)),
        }
    }
    let settings = values.settings(environment.asks_for_redis());
    let Values { mut problems, idle, mut notices, .. } = values;
    problems.sort_by_key(|problem| row(&problem.name));
    problems.dedup();
    notices.extend(idle.iter().map(|(name, why)| Notice::no_effect(name, why)));
    notices.sort_by_key(|notice| row(&notice.name));
    notices.dedup();
    for stranger in &environment.unknown {
        let guess = stranger.nearest.map(|name| format!("; did you mean {name}?")).unwrap_or_default();
        notices.push(Notice { name: stranger.name.clone(), what: format!("is not known and has no effect{guess}") });
    }
    Assembled { settings, problems, idle, notices }
}

/// Where `name` stands in the table.
fn row(name: &str) -> Option<usize> {
    let setting = table::find(name)?;
    table::TABLE.iter().position(|other| other.name == setting.name)
}

impl Notice {
    fn no_effect(name: &str, why: &str) -> Self {
        Self { name: name.to_owned(), what: format!("has no effect: {why}") }
    }
}

/// The values that are set, and what is found out about them. What is not set, or not valid, reads as its default.
#[derive(Default)]
struct Values {
    /// By name: the value, and how it may be shown.
    given: HashMap<&'static str, (Value, String)>,
    /// The same of families, by the whole name.
    families: HashMap<String, (Value, String)>,
    problems: Vec<Problem>,
    idle: Vec<(&'static str, &'static str)>,
    notices: Vec<Notice>,
}

impl Values {
    fn settings(&mut self, in_redis: bool) -> Settings {
        Settings {
            listeners: self.listeners(),
            bounds: self.bounds(),
            admin: self.admin(),
            grpc: Grpc {
                max_connection_age: self.time("GRPC_MAX_CONNECTION_AGE"),
                max_connection_age_grace: self.time("GRPC_MAX_CONNECTION_AGE_GRACE"),
                keepalive_interval: self.time("TOLLKEEPER_GRPC_KEEPALIVE_INTERVAL"),
                keepalive_timeout: self.duration("TOLLKEEPER_GRPC_KEEPALIVE_TIMEOUT"),
                max_concurrent_streams: self.int("TOLLKEEPER_GRPC_MAX_CONCURRENT_STREAMS"),
                max_message_bytes: self.bytes("TOLLKEEPER_GRPC_MAX_MESSAGE_BYTES"),
                reflection: self.bool("TOLLKEEPER_REFLECTION"),
            },
            rules: self.rules(),
            behaviour: self.behaviour(),
            store: self.store(in_redis),
            memory: Memory { capacity_bytes: self.bytes("TOLLKEEPER_MEMORY_BYTES") },
            shutdown: self.shutdown(),
            logs: Logs {
                level: logs::Level::from_name(self.word("LOG_LEVEL")).unwrap_or_default(),
                format: if self.word("LOG_FORMAT") == "json" { logs::Format::Json } else { logs::Format::Text },
            },
            metrics: self.metrics(),
            tracing: self.tracing(),
            worker_threads: NonZeroUsize::new(self.int("TOLLKEEPER_WORKER_THREADS")),
        }
    }

    fn listeners(&mut self) -> Listeners {
        let socket = self.path("GRPC_UDS");
        let tcp = self.address("GRPC_HOST", "GRPC_PORT");
        Listeners {
            grpc: if socket.as_os_str().is_empty() { GrpcListener::Tcp(tcp) } else { GrpcListener::Unix(socket) },
            http: self.address("HOST", "PORT"),
            debug: self.address("DEBUG_HOST", "DEBUG_PORT"),
            grpc_tls: self.grpc_tls(),
            http_tls: self.http_tls(),
        }
    }

    fn admin(&mut self) -> Option<AdminToken> {
        let (token, file) = (self.secret("TOLLKEEPER_ADMIN_TOKEN"), self.path("TOLLKEEPER_ADMIN_TOKEN_FILE"));
        let (has_token, has_file) = (!token.reveal().is_empty(), !file.as_os_str().is_empty());
        if has_token && has_file {
            let fix = "give one of them";
            self.problem("TOLLKEEPER_ADMIN_TOKEN_FILE", "set beside TOLLKEEPER_ADMIN_TOKEN", fix);
        }
        if has_token && token.reveal().len() < AdminToken::LEAST_BYTES {
            let fix = format!("give {} bytes or more, as from `openssl rand -hex 32`", AdminToken::LEAST_BYTES);
            self.problem("TOLLKEEPER_ADMIN_TOKEN", "too short to be a secret", &fix);
        }
        match (has_token, has_file) {
            (true, _) => Some(AdminToken::Text(token)),
            (false, true) => Some(AdminToken::File(file)),
            (false, false) => None,
        }
    }

    fn rules(&self) -> Rules {
        Rules {
            root: self.path("RUNTIME_ROOT"),
            subdirectory: self.path("RUNTIME_SUBDIRECTORY"),
            app_directory: self.path("RUNTIME_APPDIRECTORY"),
            ignore_dot_files: self.bool("RUNTIME_IGNOREDOTFILES"),
            watch_root: self.bool("RUNTIME_WATCH_ROOT"),
            merge_domains: self.bool("MERGE_DOMAIN_CONFIG"),
            healthy_with_at_least_one_config: self.bool("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED"),
            poll_interval: self.time("TOLLKEEPER_POLL_INTERVAL"),
            reload_debounce: self.duration("TOLLKEEPER_RELOAD_DEBOUNCE"),
            on_store_error: StorePolicy::from_name(self.word("TOLLKEEPER_ON_STORE_ERROR")).unwrap_or_default(),
            max_replicas: self.int("TOLLKEEPER_MAX_REPLICAS"),
        }
    }

    fn behaviour(&mut self) -> Behaviour {
        let retry_after = self.text("TOLLKEEPER_RETRY_AFTER_HEADER");
        Behaviour {
            shadow_mode: self.bool("SHADOW_MODE"),
            quota_mode: self.bool("QUOTA_MODE"),
            response_dynamic_metadata: self.bool("RESPONSE_DYNAMIC_METADATA"),
            metadata_verdicts: self.bool("TOLLKEEPER_METADATA_VERDICTS"),
            limit_headers: self.bool("LIMIT_RESPONSE_HEADERS_ENABLED").then(|| HeaderNames {
                limit: self.header("LIMIT_LIMIT_HEADER"),
                remaining: self.header("LIMIT_REMAINING_HEADER"),
                reset: self.header("LIMIT_RESET_HEADER"),
            }),
            retry_after_header: (!retry_after.is_empty()).then_some(retry_after),
            stop_cache_key_increment_when_overlimit: self.bool("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT"),
            log_max: self.int("TOLLKEEPER_LOG_MAX"),
            calendar_months: self.bool("USE_CALENDAR_MONTH_RATE_LIMIT"),
            near_limit_ratio: self.ratio("NEAR_LIMIT_RATIO"),
        }
    }

    fn shutdown(&mut self) -> Shutdown {
        let drain_period = self.duration("TOLLKEEPER_DRAIN_PERIOD");
        let timeout = self.duration("TOLLKEEPER_SHUTDOWN_TIMEOUT");
        let is_known = !self.is_wrong("TOLLKEEPER_DRAIN_PERIOD") && !self.is_wrong("TOLLKEEPER_SHUTDOWN_TIMEOUT");
        if drain_period > timeout && is_known {
            let (drain, timeout) = (DurationText(drain_period), DurationText(timeout));
            if self.given.contains_key("TOLLKEEPER_SHUTDOWN_TIMEOUT") {
                let fix = format!("give more, or a TOLLKEEPER_DRAIN_PERIOD of at most {timeout}");
                let what = format!("shorter than the TOLLKEEPER_DRAIN_PERIOD of {drain}, which it includes");
                self.problem("TOLLKEEPER_SHUTDOWN_TIMEOUT", &what, &fix);
            } else {
                let fix = format!("give at most {timeout}, or a longer TOLLKEEPER_SHUTDOWN_TIMEOUT");
                let what = format!("longer than the TOLLKEEPER_SHUTDOWN_TIMEOUT of {timeout}, which includes it");
                self.problem("TOLLKEEPER_DRAIN_PERIOD", &what, &fix);
            }
        }
        Shutdown { drain_period, timeout }
    }

    fn address(&mut self, host: &'static str, port: &'static str) -> Address {
        let port = self.int(port);
        let parsed = Host::parse(&self.text(host));
        if parsed.is_none() {
            self.problem(host, "not an address", "give an IP address or a host name, without a port");
        }
        Address { host: parsed.unwrap_or(Host::Wildcard), port }
    }

    /// The name of a header that is sent, which must have one.
    fn header(&mut self, name: &'static str) -> String {
        let header = self.text(name);
        if header.is_empty() {
            self.problem(name, "set but empty", "unset it or give a header name");
        }
        header
    }

    fn problem(&mut self, name: &'static str, what: &str, fix: &str) {
        self.problem_of(name, what, fix);
    }

    /// The same of one of a family.
    fn problem_of(&mut self, name: &str, what: &str, fix: &str) {
        let given = self.given.get(name).or_else(|| self.families.get(name));
        let shown = given.map(|(_, shown)| shown.clone()).unwrap_or_default();
        self.problems.push(Problem { name: name.to_owned(), shown, what: what.to_owned(), fix: fix.to_owned() });
    }

    fn is_wrong(&self, name: &str) -> bool {
        self.problems.iter().any(|problem| problem.name == name)
    }

    /// Notes that nothing comes of `name`, if it asks for anything but its default.
    fn idle(&mut self, name: &'static str, why: &'static str) {
        let setting = table::find(name).expect("every name read here is in the table");
        // Not every number has a default.
        let default = parse::value(setting.kind, setting.default).ok();
        if self.given.get(name).is_some_and(|(value, _)| Some(value) != default.as_ref()) {
            self.idle.push((name, why));
        }
    }

    /// The value that is set, or the default of the table.
    fn value(&self, name: &'static str) -> Value {
        self.given.get(name).map_or_else(|| Self::default_of(name), |(value, _)| value.clone())
    }

    fn default_of(name: &'static str) -> Value {
        let setting = table::find(name).expect("every name read here is in the table");
        parse::value(setting.kind, setting.default).expect("every default that is read here is of its kind")
    }
}

/// Readers, one for each kind; a wrong one is a mistake in this file that the first start shows.
impl Values {
    fn bool(&self, name: &'static str) -> bool {
        let Value::Bool(value) = self.value(name) else { unreachable!("{name} is no bool") };
        value
    }

    /// A whole number; the bounds in the table keep it within `T`.
    fn int<T: TryFrom<i64>>(&self, name: &'static str) -> T {
        let Value::Int(value) = self.value(name) else { unreachable!("{name} is no int") };
        T::try_from(value).unwrap_or_else(|_| unreachable!("the bounds of {name} are too wide"))
    }

    /// A whole number that has no default.
    fn optional_int<T: TryFrom<i64>>(&self, name: &'static str) -> Option<T> {
        self.given.contains_key(name).then(|| self.int(name))
    }

    fn duration(&self, name: &'static str) -> Duration {
        let Value::Duration(value) = self.value(name) else { unreachable!("{name} is no duration") };
        value
    }

    /// A duration of which 0 means never.
    fn time(&self, name: &'static str) -> Option<Duration> {
        Some(self.duration(name)).filter(|span| !span.is_zero())
    }

    /// A size; on a machine that can not address it, the largest that it can.
    fn bytes(&self, name: &'static str) -> usize {
        let Value::Bytes(value) = self.value(name) else { unreachable!("{name} is no size") };
        usize::try_from(value).unwrap_or(usize::MAX)
    }

    fn float(&self, name: &'static str) -> f64 {
        let Value::Float(value) = self.value(name) else { unreachable!("{name} is no float") };
        value
    }

    /// A share, 0 to 1, in the precision that envoyproxy/ratelimit reads it in.
    fn ratio(&self, name: &'static str) -> f32 {
        #[expect(clippy::cast_possible_truncation, reason = "the nearest number in single precision is meant")]
        {
            self.float(name) as f32
        }
    }

    fn text(&self, name: &'static str) -> String {
        let Value::Text(value) = self.value(name) else { unreachable!("{name} is no text") };
        value
    }

    fn path(&self, name: &'static str) -> PathBuf {
        let Value::Path(value) = self.value(name) else { unreachable!("{name} is no path") };
        value
    }

    /// A secret, or an address that may hold one.
    fn secret(&self, name: &'static str) -> Secret {
        let Value::Secret(value) = self.value(name) else { unreachable!("{name} is no secret") };
        value
    }

    fn word(&self, name: &'static str) -> &'static str {
        let Value::Word(value) = self.value(name) else { unreachable!("{name} is no word") };
        value
    }
}

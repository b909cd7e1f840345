//! Where metrics go.

use regex::Regex;

use super::Values;
use crate::settings::metrics::{Metrics, Mogrifier, Prometheus, Protocol, Sink};
use crate::settings::parse;
use crate::settings::setting::Kind;
use crate::settings::value::Value;

impl Values {
    /// Where metrics go.
    pub(super) fn metrics(&mut self) -> Metrics {
        let mut tags = self.map("EXTRA_TAGS");
        tags.sort();
        if tags.windows(2).any(|pair| pair[0].0 == pair[1].0) {
            self.problem("EXTRA_TAGS", "names a tag twice", "give each tag once");
        }
        let is_label = |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        if tags.iter().any(|(name, _)| !is_label(name) || name.as_bytes()[0].is_ascii_digit()) {
            let fix = "give names of letters, digits and `_` that begin with no digit";
            self.problem("EXTRA_TAGS", "holds a name that Prometheus does not take", fix);
        }
        let is_off = self.bool("DISABLE_STATS");
        Metrics {
            is_off,
            prometheus: self.prometheus().filter(|_| !is_off),
            sinks: if is_off { Vec::new() } else { self.sinks() },
            flush_interval: self.duration("STATS_FLUSH_INTERVAL"),
            tags,
            path_label: self.bool("TOLLKEEPER_METRIC_PATH_LABEL"),
            most_requested: self.int("TOLLKEEPER_METRIC_SERIES"),
            top_keys: self.int("TOLLKEEPER_TOP_KEYS"),
        }
    }

    fn prometheus(&mut self) -> Option<Prometheus> {
        const IDLE: &str = "it is only read with USE_PROMETHEUS=true";
        if !self.bool("USE_PROMETHEUS") {
            for name in ["PROMETHEUS_ADDR", "PROMETHEUS_PATH", "PROMETHEUS_MAPPER_YAML"] {
                self.idle(name, IDLE);
            }
            self.idle("PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS", IDLE);
            return None;
        }
        let path = self.text("PROMETHEUS_PATH");
        if !path.starts_with('/') || path.contains(['{', '}', '*', '?', '#']) {
            self.problem("PROMETHEUS_PATH", "not a path", "give one that begins with `/` and holds none of { } * ? #");
        }
        let mapper = self.path("PROMETHEUS_MAPPER_YAML");
        let Value::Address(address) = self.value("PROMETHEUS_ADDR") else { unreachable!("it is an address") };
        Some(Prometheus {
            address,
            path,
            mapper: (!mapper.as_os_str().is_empty()).then_some(mapper),
            milliseconds: self.bool("PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS"),
        })
    }

    fn sinks(&mut self) -> Vec<Sink> {
        let named = self.given.contains_key("STATSD_HOST") || self.given.contains_key("STATSD_PORT");
        let by_dog = self.bool("USE_DOG_STATSD");
        // Who says where DogStatsD is has not asked for statsd too.
        let plain = if self.given.contains_key("USE_STATSD") { self.bool("USE_STATSD") } else { named && !by_dog };
        let (host, port) = (self.text("STATSD_HOST"), self.int("STATSD_PORT"));
        if (plain || by_dog) && (host.is_empty() || port == 0) {
            let name = if host.is_empty() { "STATSD_HOST" } else { "STATSD_PORT" };
            self.problem(name, "names no server", "give the host and the port of statsd");
        }
        let mogrifiers = self.mogrifiers();
        if !plain {
            self.idle("STATSD_PROTOCOL", "it is only read where metrics are sent to statsd");
        }
        let mut sinks = Vec::new();
        if plain {
            let protocol = if self.word("STATSD_PROTOCOL") == "udp" { Protocol::Udp } else { Protocol::Tcp };
            sinks.push(Sink { host: host.clone(), port, protocol });
        }
        if by_dog {
            sinks.push(Sink { host, port, protocol: Protocol::Dog(mogrifiers) });
        } else {
            self.idle("USE_DOG_STATSD_MOGRIFIERS", "it is only read with USE_DOG_STATSD=true");
        }
        sinks
    }

    fn mogrifiers(&mut self) -> Vec<Mogrifier> {
        let names = self.list("USE_DOG_STATSD_MOGRIFIERS");
        names.iter().filter_map(|name| self.mogrifier(name)).collect()
    }

    fn mogrifier(&mut self, name: &str) -> Option<Mogrifier> {
        let text = |what: &str| match self.families.get(&format!("DOG_STATSD_MOGRIFIER_{name}_{what}")) {
            Some((Value::Text(text), _)) => text.clone(),
            _ => String::new(),
        };
        let (pattern, new_name, tags) = (text("PATTERN"), text("NAME"), text("TAGS"));
        let of = |what: &str| format!("DOG_STATSD_MOGRIFIER_{name}_{what}");
        let problem = if pattern.is_empty() {
            Some((of("PATTERN"), "not set", "give a regular expression, or take it off USE_DOG_STATSD_MOGRIFIERS"))
        } else if Regex::new(&pattern).is_err() {
            Some((of("PATTERN"), "not a regular expression", "give one without look-around and back-references"))
        } else if new_name.is_empty() {
            Some((of("NAME"), "not set", "give the new name of what the pattern matches"))
        } else {
            None
        };
        let tags = match parse::value(Kind::Map, &tags) {
            Ok(Value::Map(tags)) => tags,
            _ => {
                self.problem_of(&of("TAGS"), "not a list of tags", "give k:v,k:v");
                return None;
            }
        };
        match problem {
            Some((name, what, fix)) => {
                self.problem_of(&name, what, fix);
                None
            }
            None => Some(Mogrifier { pattern, name: new_name, tags }),
        }
    }

    fn map(&self, name: &'static str) -> Vec<(String, String)> {
        let Value::Map(pairs) = self.value(name) else { unreachable!("{name} is no map") };
        pairs
    }

    fn list(&self, name: &'static str) -> Vec<String> {
        let Value::List(items) = self.value(name) else { unreachable!("{name} is no list") };
        items
    }
}

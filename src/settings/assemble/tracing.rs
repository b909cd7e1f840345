//! Where traces go, and which requests have one.
//!
//! The peer's TRACING_ names go before OpenTelemetry's own, and of those the ones for traces before the ones for
//! everything, as their specification has it.

use std::time::Duration;

use super::Values;
use crate::settings::setting::Group;
use crate::settings::table::TABLE;
use crate::settings::tls::File;
use crate::settings::tracing::{Protocol, Tls, Tracing};
use crate::settings::url::{decoded, endpoint};
use crate::settings::value::Value;
use crate::telemetry::traces::Sampler;
use crate::telemetry::traces::propagation::PropagationFormats;
use crate::telemetry::traces::span_queue::SpanQueueOptions;

const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
const PROTOCOLS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
const HEADERS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"];
const TIMEOUTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];
const CERTIFICATES: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"];
const CLIENT_CERTIFICATES: [&str; 2] =
    ["OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE", "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"];
const CLIENT_KEYS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", "OTEL_EXPORTER_OTLP_CLIENT_KEY"];

/// Where a collector on this machine listens, over HTTP.
const HTTP_DEFAULT: &str = "http://localhost:4318/v1/traces";
/// The same over gRPC.
const GRPC_DEFAULT: &str = "http://localhost:4317";

impl Values {
    /// Where traces go, if they go anywhere.
    pub(super) fn tracing(&mut self) -> Option<Tracing> {
        let is_on = self.bool("TRACING_ENABLED") && !self.bool("OTEL_SDK_DISABLED");
        let protocol = self.protocol();
        let endpoint = self.endpoint(protocol);
        self.check_headers();
        let tracing = Tracing {
            protocol,
            setting: self.first_given(ENDPOINTS).unwrap_or("OTEL_EXPORTER_OTLP_ENDPOINT"),
            endpoint,
            timeout: Duration::from_millis(self.int(self.first_given(TIMEOUTS).unwrap_or(TIMEOUTS[1]))),
            tls: self.collector_tls(),
            resource: self.resource(),
            sampler: self.sampler(),
            formats: self.formats(),
            queue: self.queue(),
            shows_descriptors: self.bool("TOLLKEEPER_TRACE_DESCRIPTORS"),
        };
        if !is_on {
            let why = if self.bool("TRACING_ENABLED") {
                "OTEL_SDK_DISABLED is true"
            } else {
                "it is only read with TRACING_ENABLED=true"
            };
            let others = TABLE.iter().filter(|setting| setting.group == Group::Tracing && !setting.name.ends_with('*'));
            for name in others.map(|setting| setting.name).filter(|name| *name != "OTEL_SDK_DISABLED") {
                self.idle(name, why);
            }
            return None;
        }
        Some(tracing)
    }

    /// The first of these that is set and not empty.
    fn first_given(&self, names: [&'static str; 2]) -> Option<&'static str> {
        let is_filled = |name: &&str| match self.given.get(name) {
            Some((Value::Text(text), _)) => !text.is_empty(),
            Some((Value::Secret(text), _)) => !text.reveal().is_empty(),
            Some((Value::Path(path), _)) => !path.as_os_str().is_empty(),
            Some((Value::Word(word), _)) => !word.is_empty(),
            other => other.is_some(),
        };
        names.into_iter().find(is_filled)
    }

    fn protocol(&mut self) -> Protocol {
        let otel = self.first_given(PROTOCOLS);
        let word = match otel {
            Some(name) if !self.given.contains_key("TRACING_EXPORTER_PROTOCOL") => self.word(name),
            _ => self.word("TRACING_EXPORTER_PROTOCOL"),
        };
        if self.given.contains_key("TRACING_EXPORTER_PROTOCOL") {
            PROTOCOLS.into_iter().for_each(|name| self.idle(name, "TRACING_EXPORTER_PROTOCOL is set"));
        }
        if word == "grpc" { Protocol::Grpc } else { Protocol::Http }
    }

    fn endpoint(&mut self, protocol: Protocol) -> String {
        let Some(name) = self.first_given(ENDPOINTS) else {
            return if protocol == Protocol::Grpc { GRPC_DEFAULT } else { HTTP_DEFAULT }.to_owned();
        };
        let url = self.secret(name).reveal().to_owned();
        if let Err(what) = check_url(&url) {
            self.problem(name, what, "give http://host:port or https://host:port");
        }
        match protocol {
            // The one for everything is the collector; where traces go there is fixed.
            Protocol::Http if name == ENDPOINTS[1] => format!("{}/v1/traces", url.trim_end_matches('/')),
            _ => url,
        }
    }

    /// Headers are sent as the variable has them; here it is only seen to it that they can be.
    fn check_headers(&mut self) {
        for name in HEADERS {
            let given = self.secret(name);
            if !given.reveal().split(',').filter(|pair| !pair.trim().is_empty()).all(is_header) {
                let fix = "give name=value,name=value, with what is special in a value as %20";
                self.problem(name, "not a list of headers", fix);
            }
        }
    }

    fn collector_tls(&mut self) -> Tls {
        let file = |names| self.first_given(names).and_then(|name| self.file(name));
        let (ca, certificate, key) = (file(CERTIFICATES), file(CLIENT_CERTIFICATES), file(CLIENT_KEYS));
        let client = match (certificate, key) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            (Some(File { setting, .. }), None) => {
                self.problem(setting, "a certificate without its key", "give OTEL_EXPORTER_OTLP_CLIENT_KEY too");
                None
            }
            (None, Some(File { setting, .. })) => {
                let fix = "give OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE too";
                self.problem(setting, "a key without its certificate", fix);
                None
            }
        };
        Tls { ca, client }
    }

    fn resource(&mut self) -> Vec<(String, String)> {
        let given = self.text("OTEL_RESOURCE_ATTRIBUTES");
        let pairs = given.split(',').filter(|pair| !pair.trim().is_empty());
        let pairs: Option<Vec<(String, String)>> = pairs
            .map(|pair| {
                let (name, value) = pair.split_once('=')?;
                let name = name.trim();
                (!name.is_empty()).then_some(())?;
                Some((name.to_owned(), decoded(value.trim()).ok()?))
            })
            .collect();
        if pairs.is_none() {
            let fix = "give name=value,name=value, with what is special in a value as %20";
            self.problem("OTEL_RESOURCE_ATTRIBUTES", "not a list of attributes", fix);
        }
        let mut resource = pairs.unwrap_or_default();
        let mut put = |name: &str, value: String| {
            resource.retain(|(other, _)| other != name);
            resource.push((name.to_owned(), value));
        };
        let otel = self.text("OTEL_SERVICE_NAME");
        if self.given.contains_key("TRACING_SERVICE_NAME") {
            put("service.name", self.text("TRACING_SERVICE_NAME"));
        } else if !otel.is_empty() {
            put("service.name", otel);
        }
        for (variable, name) in
            [("TRACING_SERVICE_NAMESPACE", "service.namespace"), ("TRACING_SERVICE_INSTANCE_ID", "service.instance.id")]
        {
            let value = self.text(variable);
            if !value.is_empty() {
                put(name, value);
            }
        }
        if !resource.iter().any(|(name, value)| name == "service.name" && !value.is_empty()) {
            resource.retain(|(name, _)| name != "service.name");
            let Value::Text(name) = Self::default_of("TRACING_SERVICE_NAME") else { unreachable!("it is a text") };
            resource.push(("service.name".to_owned(), name));
        }
        resource
    }

    fn sampler(&mut self) -> Sampler {
        let word = self.word("OTEL_TRACES_SAMPLER");
        if self.given.contains_key("TRACING_SAMPLING_RATE") || word.is_empty() {
            self.idle("OTEL_TRACES_SAMPLER", "TRACING_SAMPLING_RATE is set");
            let why = if word.is_empty() { "OTEL_TRACES_SAMPLER is not set" } else { "TRACING_SAMPLING_RATE is set" };
            self.idle("OTEL_TRACES_SAMPLER_ARG", why);
            return Sampler { follows_parent: true, ratio: self.float("TRACING_SAMPLING_RATE") };
        }
        let ratio = match word.rsplit_once("always_") {
            Some((_, "on")) => 1.0,
            Some(_) => 0.0,
            None => self.float("OTEL_TRACES_SAMPLER_ARG"),
        };
        Sampler { follows_parent: word.starts_with("parentbased_"), ratio }
    }

    fn formats(&mut self) -> PropagationFormats {
        let Value::List(names) = self.value("OTEL_PROPAGATORS") else { unreachable!("it is a list") };
        let names: Vec<&str> = names.iter().map(|name| name.trim()).filter(|name| !name.is_empty()).collect();
        if names.iter().any(|name| !["tracecontext", "baggage", "b3", "b3multi", "none"].contains(name)) {
            let fix = "give tracecontext, b3 and b3multi, or fewer of them, or none";
            self.problem("OTEL_PROPAGATORS", "names a form that is not known", fix);
        }
        let has = |name| names.contains(&name);
        PropagationFormats { tracecontext: has("tracecontext"), b3: has("b3"), b3_multi: has("b3multi") }
    }

    fn queue(&mut self) -> SpanQueueOptions {
        let queue = SpanQueueOptions {
            max_spans: self.int("OTEL_BSP_MAX_QUEUE_SIZE"),
            max_batch_spans: self.int("OTEL_BSP_MAX_EXPORT_BATCH_SIZE"),
            delay: Duration::from_millis(self.int("OTEL_BSP_SCHEDULE_DELAY")),
        };
        if queue.max_batch_spans <= queue.max_spans {
            return queue;
        }
        if self.given.contains_key("OTEL_BSP_MAX_EXPORT_BATCH_SIZE") {
            let fix = "give less, or a larger OTEL_BSP_MAX_QUEUE_SIZE";
            self.problem("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "more than OTEL_BSP_MAX_QUEUE_SIZE", fix);
        }
        SpanQueueOptions { max_batch_spans: queue.max_spans, ..queue }
    }
}

/// Whether `url` is one that a collector can have; what is wrong, if not. None of it is repeated.
fn check_url(url: &str) -> Result<(), &'static str> {
    let Some(rest) = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://")) else {
        return Err("not a URL of a collector");
    };
    let authority = rest.split('/').next().unwrap_or_default();
    if authority.contains('@') {
        return Err("holds a user or password, which goes into OTEL_EXPORTER_OTLP_HEADERS");
    }
    let is_place = endpoint(authority, Some(443)).is_ok();
    let is_plain = rest.bytes().all(|b| b.is_ascii_graphic() && !b"?#\"<>\\^`{|}".contains(&b));
    if is_place && is_plain { Ok(()) } else { Err("not a URL of a collector") }
}

/// Whether `pair` is `name=value` of a header that can be sent.
fn is_header(pair: &str) -> bool {
    let Some((name, value)) = pair.trim().split_once('=') else { return false };
    let (name, value) = (name.trim(), decoded(value.trim()));
    let is_token = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$&'*+-.^_`|~".contains(&b));
    is_token && !name.is_empty() && value.is_ok_and(|value| value.bytes().all(|b| (b' '..=b'~').contains(&b)))
}

//! Settings that are one of a few words.

use super::value::choice::Choice;
use crate::limit::StorePolicy;
use crate::telemetry::logs::{Level, LogFormat};
use crate::telemetry::otlp::OtlpProtocol;

/// Source of the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleSourceKind {
    /// Files.
    Files,
    /// A control plane, over xDS.
    Xds,
}

impl Choice for RuleSourceKind {
    const WORDS: &'static [(&'static str, Self)] = &[("FILE", Self::Files), ("GRPC_XDS_SOTW", Self::Xds)];
    const CASE_SENSITIVE: bool = true;
}

impl Choice for StorePolicy {
    const WORDS: &'static [(&'static str, Self)] =
        &[("local", Self::Local), ("allow", Self::Allow), ("deny", Self::Deny), ("error", Self::Error)];
}

/// Kind of store for counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendType {
    /// Redis.
    Redis,
    /// Memcached.
    Memcache,
}

impl Choice for BackendType {
    const WORDS: &'static [(&'static str, Self)] = &[("redis", Self::Redis), ("memcache", Self::Memcache)];
    const CASE_SENSITIVE: bool = true;
}

impl Choice for Level {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("panic", Self::Panic),
        ("fatal", Self::Fatal),
        ("error", Self::Error),
        ("warn", Self::Warn),
        ("warning", Self::Warn),
        ("info", Self::Info),
        ("debug", Self::Debug),
        ("trace", Self::Trace),
    ];
}

impl Choice for LogFormat {
    const WORDS: &'static [(&'static str, Self)] = &[("text", Self::Text), ("json", Self::Json), ("", Self::Text)];
}

/// Transport of statsd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatsdTransport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Choice for StatsdTransport {
    const WORDS: &'static [(&'static str, Self)] = &[("tcp", Self::Tcp), ("udp", Self::Udp)];
}

impl Choice for OtlpProtocol {
    const WORDS: &'static [(&'static str, Self)] = &[("http", Self::Http), ("grpc", Self::Grpc), ("", Self::Http)];
    const CASE_SENSITIVE: bool = true;
}

/// Protocol of the trace collector, in OpenTelemetry's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtelProtocol(pub OtlpProtocol);

impl Choice for OtelProtocol {
    const WORDS: &'static [(&'static str, Self)] =
        &[("http/protobuf", Self(OtlpProtocol::Http)), ("grpc", Self(OtlpProtocol::Grpc))];
    const CASE_SENSITIVE: bool = true;
    const EMPTY_IS_UNSET: bool = true;
}

/// Compression of exported spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// No compression.
    None,
    /// gzip.
    Gzip,
}

impl Choice for Compression {
    const WORDS: &'static [(&'static str, Self)] = &[("none", Self::None), ("gzip", Self::Gzip)];
    const EMPTY_IS_UNSET: bool = true;
}

/// Sampler in OpenTelemetry's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtelSampler {
    /// `true` if the caller's decision takes precedence.
    pub follows_parent: bool,
    /// SamplerKind of the other traces.
    pub selection: SamplerKind,
}

/// SamplerKind of traces that no caller decided about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SamplerKind {
    /// All traces.
    All,
    /// No trace.
    None,
    /// The share in `OTEL_TRACES_SAMPLER_ARG`.
    Ratio,
}

impl OtelSampler {
    const fn new(follows_parent: bool, selection: SamplerKind) -> Self {
        Self { follows_parent, selection }
    }
}

impl Choice for OtelSampler {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("always_on", Self::new(false, SamplerKind::All)),
        ("always_off", Self::new(false, SamplerKind::None)),
        ("traceidratio", Self::new(false, SamplerKind::Ratio)),
        ("parentbased_always_on", Self::new(true, SamplerKind::All)),
        ("parentbased_always_off", Self::new(true, SamplerKind::None)),
        ("parentbased_traceidratio", Self::new(true, SamplerKind::Ratio)),
    ];
    const CASE_SENSITIVE: bool = true;
    const EMPTY_IS_UNSET: bool = true;
}

/// Kind of socket of a single Redis server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketKind {
    /// TCP.
    Tcp,
    /// Unix socket.
    Unix,
}

impl Choice for SocketKind {
    const WORDS: &'static [(&'static str, Self)] = &[("tcp", Self::Tcp), ("unix", Self::Unix)];
}

/// Kind of a Redis deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeploymentKind {
    /// One server.
    Single,
    /// A primary that sentinels monitor.
    Sentinel,
    /// A cluster.
    Cluster,
}

impl Choice for DeploymentKind {
    const WORDS: &'static [(&'static str, Self)] =
        &[("SINGLE", Self::Single), ("SENTINEL", Self::Sentinel), ("CLUSTER", Self::Cluster)];
}

/// LogFormat of keys in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyFormat {
    /// tollkeeper's format, for every algorithm.
    Tollkeeper,
    /// envoyproxy/ratelimit's format, byte for byte, for strict fixed windows; tollkeeper's for the rest.
    Ratelimit,
}

impl Choice for KeyFormat {
    const WORDS: &'static [(&'static str, Self)] = &[("tollkeeper", Self::Tollkeeper), ("ratelimit", Self::Ratelimit)];
}

/// Form of the values of descriptors in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoggedValues {
    /// As sent.
    Plain,
    /// Keyed hash.
    Hashed,
    /// Left out.
    None,
}

/// Values of descriptors among the rejected keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopValues {
    /// As sent.
    Plain,
    /// Keyed hash.
    Hashed,
}

impl Choice for TopValues {
    const WORDS: &'static [(&'static str, Self)] = &[("plain", Self::Plain), ("hashed", Self::Hashed)];
}

impl Choice for LoggedValues {
    const WORDS: &'static [(&'static str, Self)] =
        &[("plain", Self::Plain), ("hashed", Self::Hashed), ("none", Self::None)];
}

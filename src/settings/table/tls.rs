//! TLS of the gRPC and HTTP listeners.

use std::path::PathBuf;

use crate::settings::condition::Condition;
use crate::settings::setting::settings;

settings! { "TLS of the listeners";
    GRPC_SERVER_USE_TLS: bool = false, "serve gRPC over TLS";
    GRPC_SERVER_TLS_CERT: Option<PathBuf> = None,
        "certificate chain of the gRPC listener, PEM file; reloaded when it changes"
        .differs(Condition::Never, "it may be in another directory than the key");
    GRPC_SERVER_TLS_KEY: Option<PathBuf> = None,
        "private key of the gRPC listener, PEM file; reloaded when it changes";
    GRPC_SERVER_TLS_CA_CERT: Option<PathBuf> = None, "set by Envoy Gateway"
        .no_effect(Condition::NotEmpty, "envoyproxy/ratelimit does not read it either");
    GRPC_CLIENT_TLS_CACERT: Option<PathBuf> = None,
        "CA certificates for clients, PEM file; set: clients need a certificate; reloaded when it changes"
        .differs(Condition::NotEmpty, "the system's CAs are not trusted; without TLS it prevents the start");
    GRPC_CLIENT_TLS_SAN: Option<String> = None, "DNS name that a client certificate must hold"
        .differs(Condition::Never, "without GRPC_CLIENT_TLS_CACERT it prevents the start");
    TOLLKEEPER_HTTP_TLS_CERT: Option<PathBuf> = None,
        "certificate chain of the HTTP listener, PEM file; not set: it serves without TLS";
    TOLLKEEPER_HTTP_TLS_KEY: Option<PathBuf> = None, "private key of the HTTP listener, PEM file";
    TOLLKEEPER_HTTP_TLS_CLIENT_CACERT: Option<PathBuf> = None,
        "CA certificates for clients of the HTTP listener, PEM file; set: clients and probes need a certificate";
}

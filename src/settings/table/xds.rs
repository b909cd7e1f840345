//! Rules over xDS.

use std::path::PathBuf;
use std::time::Duration;

use crate::settings::condition::Condition;
use crate::settings::secret::Secret;
use crate::settings::setting::settings;
use crate::settings::value::number::FloatRange;
use crate::settings::value::text::SecretUrl;

settings! { "Rules over xDS";
    CONFIG_GRPC_XDS_NODE_ID: String = "default", "node id, by which the control plane selects the rules";
    CONFIG_GRPC_XDS_NODE_METADATA: String = "", "node metadata: k=v,k=v";
    CONFIG_GRPC_XDS_SERVER_URL: SecretUrl = "localhost:18000", "host:port of the xDS server";
    CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL: Duration = Duration::from_secs(3), "time between connection attempts"
        .no_effect(Condition::NotEmpty, "the delays of XDS_CLIENT_BACKOFF_* apply, as in envoyproxy/ratelimit");
    CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS: Option<Secret> = None, "headers of the stream: k:v,k:v";
    CONFIG_GRPC_XDS_SERVER_USE_TLS: bool = false, "connect over TLS";
    CONFIG_GRPC_XDS_CLIENT_TLS_CERT: Option<PathBuf> = None,
        "client certificate for the xDS server, PEM file; read for each connection";
    CONFIG_GRPC_XDS_CLIENT_TLS_KEY: Option<PathBuf> = None, "private key of the client certificate, PEM file";
    CONFIG_GRPC_XDS_SERVER_TLS_CACERT: Option<PathBuf> = None,
        "CA certificates for the xDS server, PEM file; trusted beside the system's";
    CONFIG_GRPC_XDS_SERVER_TLS_SAN: Option<String> = None,
        "name that the certificate of the xDS server must hold, instead of the host";
    XDS_CLIENT_BACKOFF_INITIAL_INTERVAL: Duration = Duration::from_millis(600), "first delay after a lost stream"
        .differs(Condition::Never, "10s in envoyproxy/ratelimit");
    XDS_CLIENT_BACKOFF_MAX_INTERVAL: Duration = Duration::from_secs(3), "longest delay after a lost stream"
        .differs(Condition::Never, "60s in envoyproxy/ratelimit");
    XDS_CLIENT_BACKOFF_RANDOM_FACTOR: f64 = 0.66, "share of a delay by which it varies"
        .allowed(FloatRange::new(0.0, 1.0));
    XDS_CLIENT_BACKOFF_JITTER: bool = true, "randomize the delays";
    XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES: i64 = 0, "maximum size of a message; 0 means 64 MiB"
        .differs(Condition::Never, "0 means 4 MiB in envoyproxy/ratelimit");
    TOLLKEEPER_XDS_CACHE: Option<PathBuf> = None,
        "file that keeps the last accepted rules, for a start while the control plane is away";
}

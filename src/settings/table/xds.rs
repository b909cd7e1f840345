//! Rules over xDS, which this release does not support.

use std::path::PathBuf;
use std::time::Duration;

use crate::settings::condition::Condition;
use crate::settings::secret::Secret;
use crate::settings::setting::{Support, settings};
use crate::settings::value::text::SecretUrl;

const WITHOUT_XDS: Support =
    Support::NoEffect { when: Condition::NotEmpty, why: "it is only read with CONFIG_TYPE=GRPC_XDS_SOTW" };

settings! { "Rules over xDS";
    CONFIG_GRPC_XDS_NODE_ID: String = "default", "node id" .support(WITHOUT_XDS);
    CONFIG_GRPC_XDS_NODE_METADATA: String = "", "node metadata: k=v,k=v" .support(WITHOUT_XDS);
    CONFIG_GRPC_XDS_SERVER_URL: SecretUrl = "localhost:18000", "address of the xDS server" .support(WITHOUT_XDS);
    CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL: Duration = Duration::from_secs(3), "time between connection attempts"
        .support(WITHOUT_XDS);
    CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS: Option<Secret> = None, "headers of the stream: k:v,k:v"
        .support(WITHOUT_XDS);
    CONFIG_GRPC_XDS_SERVER_USE_TLS: bool = false, "connect over TLS" .support(WITHOUT_XDS);
    CONFIG_GRPC_XDS_CLIENT_TLS_CERT: Option<PathBuf> = None, "client certificate for the xDS server, PEM file"
        .support(WITHOUT_XDS);
    CONFIG_GRPC_XDS_CLIENT_TLS_KEY: Option<PathBuf> = None, "private key of the client certificate, PEM file"
        .support(WITHOUT_XDS);
    CONFIG_GRPC_XDS_SERVER_TLS_CACERT: Option<PathBuf> = None, "CA certificates for the xDS server, PEM file"
        .support(WITHOUT_XDS);
    CONFIG_GRPC_XDS_SERVER_TLS_SAN: Option<String> = None, "name that the certificate of the xDS server must hold"
        .support(WITHOUT_XDS);
    XDS_CLIENT_BACKOFF_INITIAL_INTERVAL: Duration = Duration::from_secs(10), "first delay after a lost stream"
        .support(WITHOUT_XDS);
    XDS_CLIENT_BACKOFF_MAX_INTERVAL: Duration = Duration::from_secs(60), "longest delay after a lost stream"
        .support(WITHOUT_XDS);
    XDS_CLIENT_BACKOFF_RANDOM_FACTOR: f64 = 0.5, "randomization factor of the delays" .support(WITHOUT_XDS);
    XDS_CLIENT_BACKOFF_JITTER: bool = true, "randomize the delays" .support(WITHOUT_XDS);
    XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES: i64 = 0, "maximum size of a message; 0 means 4 MiB" .support(WITHOUT_XDS);
}

//! Addresses to listen on, and access to the debug listener.

use std::path::PathBuf;

use crate::settings::address::Host;
use crate::settings::condition::Condition;
use crate::settings::secret::Secret;
use crate::settings::setting::settings;
use crate::settings::value::text::TextList;

settings! { "Listeners";
    GRPC_HOST: Host = (), "address of the gRPC listener; 0.0.0.0 means all addresses, IPv4 and IPv6";
    GRPC_PORT: u16 = 8081, "port of the gRPC listener; 0 means any free port";
    GRPC_UDS: Option<PathBuf> = None, "unix socket of the gRPC listener, instead of GRPC_HOST and GRPC_PORT";
    HOST: Host = (), "address of the HTTP listener: /json, /healthcheck, /livez and /readyz";
    PORT: u16 = 8080, "port of the HTTP listener; 0 means any free port";
    DEBUG_HOST: Host = (), "address of the debug listener: /rlconfig, /stats, /top, /explain and more";
    DEBUG_PORT: u16 = 6070, "port of the debug listener; 0 means any free port"
        .differs(Condition::Never, "there are no /debug/pprof pages");
    TOLLKEEPER_DEBUG_HOSTS: TextList = "",
        "further host names by which clients may address the debug listener, besides IP addresses, localhost and services";
    TOLLKEEPER_ADMIN_TOKEN: Option<Secret> = None,
        "bearer token for reset, key listing and log level on the debug listener; at least 16 bytes";
    TOLLKEEPER_ADMIN_TOKEN_FILE: Option<PathBuf> = None,
        "file that holds the admin token, instead of TOLLKEEPER_ADMIN_TOKEN; read at each admin request";
}

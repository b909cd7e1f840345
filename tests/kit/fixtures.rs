//! Short notations for rules and requests of the domain `shop`, for one caller or several threads.

use std::sync::Barrier;
use std::thread;

use super::test_service::{TestRequest, TestResponse, TestService};

/// Variables of the Deployment of Envoy Gateway, but for addresses.
pub const ENVOY_GATEWAY: &[(&str, &str)] = &[
    ("RUNTIME_ROOT", "/data"),
    ("RUNTIME_SUBDIRECTORY", "ratelimit"),
    ("RUNTIME_IGNOREDOTFILES", "true"),
    ("RUNTIME_WATCH_ROOT", "false"),
    ("LOG_LEVEL", "info"),
    ("USE_STATSD", "false"),
    ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
    ("CONFIG_GRPC_XDS_NODE_ID", "envoy-ratelimit"),
    ("GRPC_SERVER_USE_TLS", "true"),
    ("GRPC_SERVER_TLS_CERT", "/certs/tls.crt"),
    ("GRPC_SERVER_TLS_KEY", "/certs/tls.key"),
    ("GRPC_SERVER_TLS_CA_CERT", "/certs/ca.crt"),
    ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true"),
    ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "/certs/tls.crt"),
    ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", "/certs/tls.key"),
    ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", "/certs/ca.crt"),
    ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"),
    ("REDIS_SOCKET_TYPE", "tcp"),
    ("USE_PROMETHEUS", "true"),
    ("PROMETHEUS_MAPPER_YAML", "/etc/statsd-exporter/conf.yaml"),
];

/// Loads rules of the domain `shop`, given from `descriptors` or `defaults` on.
pub fn load_shop_rules(service: &TestService, rules: &str) {
    service.load([("rules.yaml", format!("domain: shop\n{rules}").as_str())]);
}

/// A request for descriptors of `shop`: `key=value,key=value; key=value`.
pub fn shop_request(descriptors: &str) -> TestRequest {
    descriptors.split("; ").fold(TestRequest::new("shop"), |request, descriptor| {
        let entries: Vec<_> = descriptor.split(',').map(|entry| entry.split_once('=').unwrap_or((entry, ""))).collect();
        request.descriptor(&entries)
    })
}

/// Decides a request; an error fails the test.
pub fn decide(service: &TestService, request: &TestRequest) -> TestResponse {
    service.decide(request).unwrap_or_else(|error| panic!("{error}: {request:?}"))
}

/// Decides the requests one by one, at one time, and compares each response's text.
pub fn assert_responses(service: &TestService, table: &[(TestRequest, &str)]) {
    for (step, (request, expected)) in table.iter().enumerate() {
        assert_eq!(decide(service, request).text(), *expected, "step {step}: {request:?}");
    }
}

/// Runs `act` on `threads` threads at once, with the number of the thread.
pub fn in_parallel(threads: u64, act: impl Fn(u64) + Sync) {
    let start = Barrier::new(usize::try_from(threads).unwrap());
    thread::scope(|scope| {
        for thread in 0..threads {
            let (start, act) = (&start, &act);
            scope.spawn(move || {
                start.wait();
                act(thread);
            });
        }
    });
}

//! `check --env` and `serve` in the same environment: they agree about each.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use kit::redis::certificates::Certificates;
use kit::tollkeeper::{inherited_env, program_path, without_rules};
use kit::{http, port::Port};

/// Result of a start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// The process serves and is ready, rules aside.
    Works,
    /// The process ends with exit code 2 and names these variables.
    Fails(&'static [&'static str]),
    /// The process serves, and a part of it does not work because of this variable.
    WorksInPart(&'static str),
}
use Start::{Fails, Works, WorksInPart};

/// An environment: names and values, in which `{}` is a directory with certificates and other files.
type Case = (&'static [(&'static str, &'static str)], Start);

const FILES: &[Case] = &[
    (&[], Works),
    (
        &[
            ("GRPC_SERVER_USE_TLS", "true"),
            ("GRPC_SERVER_TLS_CERT", "{}/server.crt"),
            ("GRPC_SERVER_TLS_KEY", "{}/server.key"),
        ],
        Works,
    ),
    (
        &[
            ("GRPC_SERVER_USE_TLS", "true"),
            ("GRPC_SERVER_TLS_CERT", "{}/gone.crt"),
            ("GRPC_SERVER_TLS_KEY", "{}/server.key"),
        ],
        Fails(&["GRPC_SERVER_TLS_CERT"]),
    ),
    (
        &[
            ("GRPC_SERVER_USE_TLS", "true"),
            ("GRPC_SERVER_TLS_CERT", "{}/server.crt"),
            ("GRPC_SERVER_TLS_KEY", "{}/client.key"),
        ],
        Fails(&["GRPC_SERVER_TLS_KEY"]),
    ),
    (&[("GRPC_SERVER_USE_TLS", "true")], Fails(&["GRPC_SERVER_USE_TLS"])),
    (
        &[
            ("GRPC_SERVER_USE_TLS", "true"),
            ("GRPC_SERVER_TLS_CERT", "{}/expired.crt"),
            ("GRPC_SERVER_TLS_KEY", "{}/expired.key"),
        ],
        WorksInPart("GRPC_SERVER_TLS_CERT"),
    ),
    (
        &[
            ("REDIS_URL", "rediss://127.0.0.1:1"),
            ("REDIS_TLS_CLIENT_CERT", "{}/expired.crt"),
            ("REDIS_TLS_CLIENT_KEY", "{}/expired.key"),
        ],
        WorksInPart("REDIS_TLS_CLIENT_CERT"),
    ),
    // Without a subdirectory no file is read, and every request passes.
    (&[("RUNTIME_ROOT", "{}")], WorksInPart("RUNTIME_SUBDIRECTORY")),
    (&[("RUNTIME_ROOT", "{}"), ("RUNTIME_SUBDIRECTORY", "")], WorksInPart("RUNTIME_SUBDIRECTORY")),
    (&[("RUNTIME_ROOT", "{}"), ("RUNTIME_SUBDIRECTORY", "shop")], Works),
    (&[("RUNTIME_ROOT", "{}"), ("RUNTIME_WATCH_ROOT", "false")], Works),
    (&[("RUNTIME_ROOT", ""), ("RUNTIME_SUBDIRECTORY", "shop")], WorksInPart("RUNTIME_ROOT")),
    (&[("GRPC_SERVER_USE_TLS", "true"), ("GRPC_SERVER_TLS_CERT", "{}/server.crt")], Fails(&["GRPC_SERVER_TLS_CERT"])),
    (
        &[("TOLLKEEPER_HTTP_TLS_CERT", "{}/empty"), ("TOLLKEEPER_HTTP_TLS_KEY", "{}/server.key")],
        Fails(&["TOLLKEEPER_HTTP_TLS_CERT"]),
    ),
    (
        &[
            ("GRPC_SERVER_USE_TLS", "true"),
            ("GRPC_SERVER_TLS_CERT", "{}/server.crt"),
            ("GRPC_SERVER_TLS_KEY", "{}/server.key"),
            ("GRPC_CLIENT_TLS_CACERT", "{}/gone.crt"),
        ],
        Fails(&["GRPC_CLIENT_TLS_CACERT"]),
    ),
    (&[("USE_PROMETHEUS", "true"), ("PROMETHEUS_MAPPER_YAML", "{}/gone.yaml")], WorksInPart("PROMETHEUS_MAPPER_YAML")),
    (&[("USE_PROMETHEUS", "true"), ("PROMETHEUS_MAPPER_YAML", "{}/bad.yaml")], Fails(&["PROMETHEUS_MAPPER_YAML"])),
    (&[("PROMETHEUS_MAPPER_YAML", "{}/gone.yaml")], Works),
    (
        &[("TRACING_ENABLED", "true"), ("OTEL_EXPORTER_OTLP_CERTIFICATE", "{}/gone.crt")],
        Fails(&["OTEL_EXPORTER_OTLP_CERTIFICATE"]),
    ),
    (&[("OTEL_EXPORTER_OTLP_CERTIFICATE", "{}/gone.crt")], Works),
    // All problems at once.
    (
        &[
            ("HOST", "192.0.2.1"),
            ("GRPC_SERVER_USE_TLS", "true"),
            ("GRPC_SERVER_TLS_CERT", "{}/gone.crt"),
            ("GRPC_SERVER_TLS_KEY", "{}/server.key"),
            ("USE_PROMETHEUS", "true"),
            ("PROMETHEUS_MAPPER_YAML", "{}/bad.yaml"),
        ],
        Fails(&["HOST", "GRPC_SERVER_TLS_CERT", "PROMETHEUS_MAPPER_YAML"]),
    ),
    (&[("TOLLKEEPER_ADMIN_TOKEN_FILE", "{}/token")], Works),
    (&[("TOLLKEEPER_ADMIN_TOKEN_FILE", "{}/gone")], WorksInPart("TOLLKEEPER_ADMIN_TOKEN_FILE")),
    (&[("REDIS_URL", "rediss://127.0.0.1:1"), ("REDIS_TLS_CACERT", "{}/gone")], WorksInPart("REDIS_TLS_CACERT")),
    (&[("REDIS_URL", "127.0.0.1:1"), ("REDIS_AUTH_FILE", "{}/gone")], WorksInPart("REDIS_AUTH_FILE")),
    (
        &[
            ("BACKEND_TYPE", "memcache"),
            ("MEMCACHE_HOST_PORT", "127.0.0.1:1"),
            ("MEMCACHE_TLS", "true"),
            ("MEMCACHE_TLS_CACERT", "{}/gone"),
        ],
        WorksInPart("MEMCACHE_TLS_CACERT"),
    ),
    (
        &[
            ("REDIS_TYPE", "sentinel"),
            ("REDIS_URL", "primary,127.0.0.1:1"),
            ("TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE", "{}/gone"),
        ],
        WorksInPart("TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE"),
    ),
];

const ADDRESSES: &[Case] = &[
    (&[("HOST", "192.0.2.1")], Fails(&["HOST"])),
    (&[("GRPC_HOST", "no such host")], Fails(&["GRPC_HOST"])),
    (&[("DEBUG_HOST", "no-such-host.invalid")], Fails(&["DEBUG_HOST"])),
    (&[("PORT", "70000")], Fails(&["PORT"])),
    (&[("USE_PROMETHEUS", "true"), ("PROMETHEUS_ADDR", "nonsense")], Fails(&["PROMETHEUS_ADDR"])),
    (&[("USE_PROMETHEUS", "true"), ("PROMETHEUS_ADDR", "192.0.2.1:9")], Fails(&["PROMETHEUS_ADDR"])),
    // Two listeners with one port, also by a default and by the wildcard.
    (&[("PORT", "{port}"), ("DEBUG_PORT", "{port}")], Fails(&["DEBUG_PORT"])),
    (&[("HOST", "0.0.0.0"), ("PORT", "{port}"), ("GRPC_PORT", "{port}")], Fails(&["PORT"])),
    (&[("GRPC_UDS", "{}/tollkeeper.sock")], Works),
    (&[("GRPC_UDS", "{}/gone/tollkeeper.sock")], Fails(&["GRPC_UDS"])),
    (&[("GRPC_UDS", "{}/token")], Fails(&["GRPC_UDS"])),
    (
        &[("TRACING_ENABLED", "true"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317")],
        Fails(&["OTEL_EXPORTER_OTLP_ENDPOINT"]),
    ),
    (&[("REDIS_URL", "127.0.0.1:port")], Fails(&["REDIS_URL"])),
    (&[("REDIS_TYPE", "cluster")], Fails(&["REDIS_URL"])),
    (
        &[("REDIS_URL", "127.0.0.1:1"), ("REDIS_TLS", "true"), ("REDIS_TLS_CLIENT_CERT", "{}/client.crt")],
        Fails(&["REDIS_TLS_CLIENT_CERT"]),
    ),
    (&[("BACKEND_TYPE", "memcache")], Fails(&["BACKEND_TYPE"])),
    (&[("BACKEND_TYPE", "memcache"), ("MEMCACHE_HOST_PORT", "127.0.0.1:1")], Works),
    (&[("BACKEND_TYPE", "memcache"), ("MEMCACHE_HOST_PORT", "127.0.0.1")], Fails(&["MEMCACHE_HOST_PORT"])),
    (&[("BACKEND_TYPE", "memcache"), ("MEMCACHE_SRV", "_memcache._tcp.no-such-host.invalid")], Works),
    (
        &[("BACKEND_TYPE", "memcache"), ("MEMCACHE_HOST_PORT", "a:1"), ("MEMCACHE_SRV", "_memcache._tcp.a")],
        Fails(&["MEMCACHE_HOST_PORT"]),
    ),
    // Redis is not read then.
    (&[("BACKEND_TYPE", "memcache"), ("MEMCACHE_HOST_PORT", "127.0.0.1:1"), ("REDIS_URL", "127.0.0.1:port")], Works),
    // Removed; without it the connection would have no TLS.
    (&[("TOLLKEEPER_GLOBAL_REDIS_TLS", "true")], Fails(&["TOLLKEEPER_GLOBAL_REDIS_TLS"])),
    (&[("TOLLKEEPER_SHUTDOWN_TIMEOUT", "1s")], Fails(&["TOLLKEEPER_SHUTDOWN_TIMEOUT"])),
];

#[test]
fn check_env_and_serve_agree_about_files() {
    agree_about(FILES);
}

#[test]
fn check_env_and_serve_agree_about_addresses_and_values() {
    agree_about(ADDRESSES);
}

fn agree_about(cases: &[Case]) {
    let directory = tempfile::tempdir().unwrap();
    Certificates::new(directory.path()).issue_expired_server("expired");
    for (name, text) in [("empty", ""), ("bad.yaml", "mappings: [{match: a}]\n"), ("token", "0123456789abcdef")] {
        fs::write(directory.path().join(name), text).unwrap();
    }
    for (env, expected) in cases {
        agree(directory.path(), env, *expected);
    }
}

fn agree(directory: &Path, env: &[(&str, &str)], expected: Start) {
    let ports = ["GRPC", "", "DEBUG"].map(|prefix| (prefix, Port::reserve()));
    let shared = Port::reserve();
    let mut all: Vec<(String, String)> = Vec::new();
    for (prefix, port) in &ports {
        let name = |part: &str| if prefix.is_empty() { part.to_owned() } else { format!("{prefix}_{part}") };
        all.extend([(name("HOST"), "127.0.0.1".to_owned()), (name("PORT"), port.number().to_string())]);
    }
    all.push(("PROMETHEUS_ADDR".to_owned(), "127.0.0.1:0".to_owned()));
    for (name, value) in env {
        let value = value.replace("{}", directory.to_str().unwrap());
        all.retain(|(other, _)| other != name);
        all.push(((*name).to_owned(), value.replace("{port}", &shared.number().to_string())));
    }
    let checked = Command::new(program_path())
        .args(["check", "--env", "--format", "json"])
        .env_clear()
        .envs(inherited_env())
        .envs(all.iter().cloned())
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&checked.stdout).unwrap_or_else(|error| panic!("{error}: {checked:?}"));
    let failing = |field: &dyn Fn(&Value) -> bool| -> BTreeSet<String> {
        let rows = report["environment"].as_array().unwrap().iter().filter(|row| field(row));
        rows.map(|row| row["name"].as_str().unwrap().to_owned()).collect()
    };
    let prevents = failing(&|row| row["prevents_start"] == true);
    let unusable = failing(&|row| row["disposition"] == "unusable");
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let (code, must_prevent, must_be_unusable) = match expected {
        Works => (0, names(&[]), names(&[])),
        Fails(settings) => (1, names(settings), names(&[])),
        WorksInPart(setting) => (1, names(&[]), names(&[setting])),
    };
    let found = (checked.status.code(), prevents, unusable);
    assert_eq!(found, (Some(code), must_prevent, must_be_unusable), "{env:?}: {report:#}");

    let setup = all.iter().fold(without_rules(), |setup, (name, value)| setup.env(name, value));
    let mut process = setup.arg("--config").arg(directory.join("rules")).launch();
    if let Fails(settings) = expected {
        let status = process.wait();
        let stderr = process.stderr();
        assert_eq!(status.code(), Some(2), "{env:?}: {stderr}");
        for setting in settings {
            assert!(stderr.contains(setting), "{env:?}: {setting} is not named: {stderr}");
        }
    } else {
        let http = &ports[1].1;
        kit::wait_for(&format!("a start with {env:?}"), || {
            assert_eq!(process.try_wait(), None, "{env:?}: {}", process.stderr());
            http::get(http.number(), "/livez").try_send().ok().filter(|response| response.status == 200)
        });
        process.kill();
    }
}

#[test]
fn mapping_file_differs_only_if_it_has_regular_expressions() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("map.yaml");
    for (match_type, expected) in [("glob", "honoured"), ("regex", "differs")] {
        fs::write(&path, format!("mappings: [{{match: a, match_type: {match_type}, name: b}}]\n")).unwrap();
        let mut check = Command::new(program_path());
        check.args(["check", "--env", "--format", "json"]).env_clear().env("USE_PROMETHEUS", "true");
        let output = check.env("PROMETHEUS_MAPPER_YAML", &path).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let rows = report["environment"].as_array().unwrap();
        let row = rows.iter().find(|row| row["name"] == "PROMETHEUS_MAPPER_YAML").unwrap();
        assert_eq!(row["disposition"], expected, "{report:#}");
    }
}

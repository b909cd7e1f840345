//! Listeners over TLS: admitted clients, changed files, and settings that stop the start.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

use kit::envoy::Envoy;
use kit::grpc::{Client, rate_limit_request};
use kit::redis::certificates::Certificates;
use kit::tollkeeper::{Setup, Tollkeeper, inherited_env, program_path, with_rules, without_rules};
use kit::{http, read, repository, wait_for};

const RULES: &str = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: day, requests_per_unit: 1000000}}
";

fn certificates() -> (TempDir, Certificates) {
    let directory = tempfile::tempdir().unwrap();
    let certificates = Certificates::new(directory.path());
    (directory, certificates)
}

fn server() -> Setup {
    with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s")
}

fn with_tls(certificate: impl AsRef<Path>, key: impl AsRef<Path>) -> Setup {
    let setup = server().env("GRPC_SERVER_USE_TLS", "true");
    setup.env("GRPC_SERVER_TLS_CERT", certificate).env("GRPC_SERVER_TLS_KEY", key)
}

fn secured(certificates: &Certificates) -> Setup {
    with_tls(certificates.path("server.crt"), certificates.path("server.key"))
}

fn mutual(certificates: &Certificates) -> Setup {
    secured(certificates).env("GRPC_CLIENT_TLS_CACERT", certificates.path("ca.crt"))
}

fn run(program: &Path, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).env_clear().envs(inherited_env()).output().unwrap()
}

/// Output of `tollkeeper call` with these arguments, and whether it succeeded.
fn call(port: u16, arguments: &[&str]) -> Result<String, String> {
    let address = format!("localhost:{port}");
    let usual = ["call", "--addr", &address, "--domain", "shop", "--descriptor", "user=ann"];
    let output = run(Path::new(program_path()), &[&usual, arguments].concat());
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

fn text(path: impl AsRef<Path>) -> String {
    path.as_ref().to_str().unwrap().to_owned()
}

/// `--tls`, and flags with files of these names.
fn flags(certificates: &Certificates, files: &[(&str, &str)]) -> Vec<String> {
    let files = files.iter().flat_map(|(flag, name)| [(*flag).to_owned(), text(certificates.path(name))]);
    ["--tls".to_owned()].into_iter().chain(files).collect()
}

fn call_with(port: u16, certificates: &Certificates, files: &[(&str, &str)]) -> Result<String, String> {
    let flags = flags(certificates, files);
    call(port, &flags.iter().map(String::as_str).collect::<Vec<_>>())
}

fn charge(client: &Client) -> bool {
    client.call(&rate_limit_request("shop", &[("user", "ann")])).is_ok()
}

#[test]
fn grpc_over_tls_requires_the_right_authority() {
    let (_directory, certificates) = certificates();
    let server = secured(&certificates).start();
    let port = server.grpc_port();
    let response = call_with(port, &certificates, &[("--ca", "ca.crt")]).unwrap();
    assert!(response.contains("OK"), "{response}");
    let ca = text(certificates.path("ca.crt"));
    call(port, &["--tls", "--ca", &ca, "--server-name", "127.0.0.1"]).unwrap();
    for (arguments, why) in [
        (vec!["--tls"], "UnknownIssuer; see --ca and --server-name"),
        (vec!["--tls", "--ca", &ca, "--server-name", "elsewhere.example"], "not valid for name"),
        (vec![], "the server may require TLS; see --tls"),
        (vec!["--tls", "--ca", "/nowhere"], "--ca=/nowhere: it cannot be read: No such file"),
        (vec!["--tls", "--cert", &ca, "--key", &ca], "no private key in it; give one as PEM"),
    ] {
        let output = call(port, &arguments).unwrap_err();
        assert!(output.contains(why) && output.lines().count() == 1, "{arguments:?}: {output}");
    }
    assert!(call(port, &["--ca", &ca]).unwrap_err().contains("--tls"));
    let stats = http::get(server.debug_port(), "/stats").send().text();
    let name = "tollkeeper_certificate_not_after_seconds{listener=\"grpc\"}: ";
    let seconds = stats.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    assert!(seconds.parse::<f64>().unwrap() > 1.8e9, "{seconds}");
    assert!(!stats.contains("not_after_seconds{listener=\"http\"}"), "{stats}");
}

/// Expiry of a client certificate in seconds since the Unix epoch, as `/stats` shows it.
fn client_expiry(server: &Tollkeeper, client: &str) -> Option<f64> {
    let name = format!("tollkeeper_certificate_not_after_seconds{{client=\"{client}\"}}: ");
    // The first warnings come before the listener.
    let stats = http::get(server.debug_port(), "/stats").try_send().ok()?.text();
    stats.lines().find_map(|line| line.strip_prefix(&name)).map(|seconds| seconds.parse().unwrap())
}

#[test]
fn expired_client_certificates_are_reported() {
    let (_directory, certificates) = certificates();
    certificates.issue_expired_server("expired");
    let (expired, key) = (certificates.path("expired.crt"), certificates.path("expired.key"));
    let nowhere = "127.0.0.1:1";
    let servers = without_rules()
        .env("REDIS_URL", format!("rediss://{nowhere}"))
        .env("CONFIG_TYPE", "GRPC_XDS_SOTW")
        .env("CONFIG_GRPC_XDS_SERVER_URL", nowhere)
        .env("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true")
        .env("TRACING_ENABLED", "true")
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", format!("https://{nowhere}"))
        .env("TOLLKEEPER_DECISION_LOG", "otlp");
    let memcached = with_rules(RULES)
        .env("BACKEND_TYPE", "memcache")
        .env("MEMCACHE_HOST_PORT", nowhere)
        .env("MEMCACHE_TLS", "true")
        .env("MEMCACHE_TLS_CLIENT_CERT", &expired)
        .env("MEMCACHE_TLS_CLIENT_KEY", &key)
        .launch();
    let variables = [
        ("redis", "Redis servers", "REDIS_TLS_CLIENT_CERT", "REDIS_TLS_CLIENT_KEY"),
        ("xds", "xDS servers", "CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "CONFIG_GRPC_XDS_CLIENT_TLS_KEY"),
        (
            "otlp_traces",
            "collectors of traces",
            "OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE",
            "OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY",
        ),
        (
            "otlp_logs",
            "collectors of logs",
            "OTEL_EXPORTER_OTLP_LOGS_CLIENT_CERTIFICATE",
            "OTEL_EXPORTER_OTLP_LOGS_CLIENT_KEY",
        ),
    ];
    let files = |setup: Setup, (_, _, certificate, secret): &(_, _, &str, &str)| {
        setup.env(certificate, &expired).env(secret, &key)
    };
    let server = variables.iter().fold(servers, files).launch();
    let memcached_row = ("memcached", "memcached servers", "MEMCACHE_TLS_CLIENT_CERT", "");
    for (server, rows) in [(&server, &variables[..]), (&memcached, &[memcached_row])] {
        for (client, rejecting, setting, _) in rows {
            let line = format!("certificate has expired: {rejecting} will reject it (replace {setting}=");
            wait_for("the warning", || server.stderr().contains(&line).then_some(()));
            let expiry = wait_for("the end of the certificate", || client_expiry(server, client));
            assert_eq!(expiry, 1_577_836_800.0, "2020-01-01 for {client}");
        }
    }
    // The next connection to Redis reads the new file; the exporters have read theirs once.
    certificates.issue_client("expired", &[]);
    wait_for("the new certificate", || client_expiry(&server, "redis").filter(|seconds| *seconds > 1.8e9));
    assert_eq!(client_expiry(&server, "otlp_traces"), Some(1_577_836_800.0));
    assert_eq!(server.stderr().matches("certificate has expired: Redis servers").count(), 1, "{}", server.stderr());
}

#[test]
fn client_certificate_is_required_if_configured() {
    let (_directory, certificates) = certificates();
    let (_elsewhere, others) = self::certificates();
    certificates.issue_client("envoy", &["envoy.example", "more.example"]);
    certificates.issue_client("other", &["other.example"]);
    let server = mutual(&certificates).start();
    let with = |server: &Tollkeeper, certificates: &Certificates, name: &str| {
        let (certificate, key) = (format!("{name}.crt"), format!("{name}.key"));
        // All clients trust the server, so that only the client certificate differs.
        let ca = text(certificates.path("trusted.crt"));
        let files = flags(certificates, &[("--cert", &certificate), ("--key", &key)]);
        let files = files.iter().map(String::as_str).chain(["--ca", &ca]);
        call(server.grpc_port(), &files.collect::<Vec<_>>())
    };
    for directory in [&certificates, &others] {
        fs::copy(certificates.path("ca.crt"), directory.path("trusted.crt")).unwrap();
    }
    with(&server, &certificates, "client").unwrap();
    let error = call_with(server.grpc_port(), &certificates, &[("--ca", "ca.crt")]).unwrap_err();
    assert!(error.contains("ertificate") && error.lines().count() == 1, "{error}");
    let error = with(&server, &others, "client").unwrap_err();
    assert!(error.lines().count() == 1, "{error}");
    let output = server.stderr();
    assert_eq!(output.matches("TLS handshake failed").count(), 1, "{output}");

    let named = mutual(&certificates).env("GRPC_CLIENT_TLS_SAN", "envoy.example").start();
    with(&named, &certificates, "envoy").unwrap();
    // The common name does not count.
    certificates.issue_client("envoy.example", &[]);
    for name in ["other", "client", "envoy.example"] {
        let error = with(&named, &certificates, name).unwrap_err();
        assert!(error.lines().count() == 1, "{name}: {error}");
    }
}

/// Waits until new connections are served with a certificate that this authority has signed.
fn wait_until_trusted_by(server: &Tollkeeper, certificates: &Certificates) {
    wait_for("the new certificate to be served", || {
        call_with(server.grpc_port(), certificates, &[("--ca", "ca.crt")]).ok()
    });
}

/// Replaces the files by those of another authority with `replace`; checks that the new certificate is served and that
/// old connections stay open.
fn is_replaced(server: &Tollkeeper, old: &Certificates, new: &Certificates, replace: impl FnOnce()) {
    let before = Client::connect_tls(server.grpc_port(), &old.path("ca.crt"), None);
    assert!(charge(&before));
    replace();
    wait_until_trusted_by(server, new);
    assert!(charge(&before), "the old connection is closed");
    call_with(server.grpc_port(), old, &[("--ca", "ca.crt")]).unwrap_err();
    let output = server.stderr();
    assert_eq!(output.matches("new certificate loaded").count(), 1, "{output}");
    assert!(!output.contains("the previous one stays active"), "{output}");
}

#[test]
fn renamed_certificate_is_reloaded() {
    let ((directory, old), (_elsewhere, new)) = (certificates(), certificates());
    let server = secured(&old).start();
    is_replaced(&server, &old, &new, || {
        for name in ["server.crt", "server.key"] {
            let beside = directory.path().join("next");
            fs::copy(new.path(name), &beside).unwrap();
            fs::rename(beside, old.path(name)).unwrap();
        }
    });
}

#[test]
fn certificate_behind_a_swapped_link_is_reloaded() {
    // As Kubernetes mounts a secret: NAME -> ..data/NAME, ..data -> a directory of that version.
    let ((_a, old), (_b, new)) = (certificates(), certificates());
    let mount = tempfile::tempdir().unwrap();
    let data = mount.path().join("..data");
    symlink(old.path(""), &data).unwrap();
    for name in ["server.crt", "server.key"] {
        symlink(Path::new("..data").join(name), mount.path().join(name)).unwrap();
    }
    let server = with_tls(mount.path().join("server.crt"), mount.path().join("server.key")).start();
    is_replaced(&server, &old, &new, || {
        let beside = mount.path().join("..data_tmp");
        symlink(new.path(""), &beside).unwrap();
        fs::rename(beside, &data).unwrap();
    });
}

#[test]
fn invalid_new_certificate_keeps_the_old_one() {
    let ((_a, certificates), (_b, others)) = (certificates(), certificates());
    let server = mutual(&certificates).start();
    let ca = certificates.path("ca.crt");
    let good = |name: &str| fs::read(certificates.path(name)).unwrap();
    let originals = [good("server.crt"), good("server.key"), good("ca.crt")];
    let trusted = certificates.path("trusted.crt");
    fs::copy(&ca, &trusted).unwrap();
    let bad: [(&str, Vec<u8>, &str); 4] = [
        ("server.key", fs::read(others.path("server.key")).unwrap(), "GRPC_SERVER_TLS_KEY"),
        (
            "server.crt",
            b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".to_vec(),
            "GRPC_SERVER_TLS_CERT",
        ),
        ("ca.crt", b"nothing of use".to_vec(), "GRPC_CLIENT_TLS_CACERT"),
        ("server.key", Vec::new(), "GRPC_SERVER_TLS_KEY"),
    ];
    for (index, (name, contents, setting)) in bad.into_iter().enumerate() {
        fs::write(certificates.path(name), contents).unwrap();
        let warnings = || {
            let output = server.stderr();
            output
                .lines()
                .filter(|line| line.contains("the previous one stays active"))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        wait_for("the change to be rejected", || (warnings().len() > index).then_some(()));
        let last = warnings().pop().unwrap();
        assert!(last.contains(&format!("{setting}={}", certificates.path(name).display())), "{last}");
        let client = Client::connect_tls(server.grpc_port(), &trusted, Some("client"));
        assert!(charge(&client), "{name}: the previous certificate is not served");
        // The warning is logged once, and the repaired files are loaded.
        for (name, contents) in ["server.crt", "server.key", "ca.crt"].iter().zip(&originals) {
            fs::write(certificates.path(name), contents).unwrap();
        }
        let reloads = || server.stderr().matches("new certificate loaded").count();
        wait_for("the repaired files to be loaded", || (reloads() > index).then_some(()));
        assert_eq!(warnings().len(), index + 1, "{}", server.stderr());
    }
}

#[test]
fn client_authority_is_reloaded() {
    let ((_a, certificates), (_b, others)) = (certificates(), certificates());
    let server = mutual(&certificates).start();
    let trusted = others.path("trusted.crt");
    fs::copy(certificates.path("ca.crt"), &trusted).unwrap();
    let gets_in = || {
        let (ca, certificate, key) = (text(&trusted), text(others.path("client.crt")), text(others.path("client.key")));
        call(server.grpc_port(), &["--tls", "--ca", &ca, "--cert", &certificate, "--key", &key]).is_ok()
    };
    assert!(!gets_in());
    let both = read(&certificates.path("ca.crt")) + &read(&others.path("ca.crt"));
    fs::write(certificates.path("ca.crt"), both).unwrap();
    wait_for("the second authority to be trusted", || gets_in().then_some(()));
}

#[test]
fn http_pages_are_served_over_tls() {
    let (_directory, certificates) = certificates();
    let setup = |more: &[(&str, &str)]| {
        let setup = server().env("TOLLKEEPER_HTTP_TLS_CERT", certificates.path("server.crt"));
        let setup = setup.env("TOLLKEEPER_HTTP_TLS_KEY", certificates.path("server.key"));
        more.iter().fold(setup, |setup, (name, file)| setup.env(name, certificates.path(file))).launch()
    };
    let curl = |server: &Tollkeeper, arguments: &[&str]| {
        let url = format!("https://localhost:{}/healthcheck", server.http_port());
        let ca = text(certificates.path("ca.crt"));
        let mut command = Command::new("curl");
        command.args(["--silent", "--show-error", "--max-time", "20", "--noproxy", "*", "--cacert", &ca]);
        let output = command.args(arguments).arg(url).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    };
    let server = setup(&[]);
    let get = |arguments: &[&str]| curl(&server, arguments);
    wait_for("it to be healthy over TLS", || get(&[]).filter(|page| page == "OK"));
    assert_eq!(get(&["--http1.1", "-w", " %{http_version}"]).as_deref(), Some("OK 1.1"));
    assert_eq!(get(&["--http2", "-w", " %{http_version}"]).as_deref(), Some("OK 2"));
    assert!(http::get(server.http_port(), "/healthcheck").try_send().is_err(), "it is answered without TLS as well");
    assert_eq!(http::get(server.debug_port(), "/stats").send().status, 200);

    let mutual = setup(&[("TOLLKEEPER_HTTP_TLS_CLIENT_CACERT", "ca.crt")]);
    let (certificate, key) = (text(certificates.path("client.crt")), text(certificates.path("client.key")));
    let shown = ["--cert", &certificate, "--key", &key];
    wait_for("it to be healthy for who shows a certificate", || curl(&mutual, &shown));
    assert_eq!(curl(&mutual, &[]), None);
}

#[test]
fn unusable_certificate_stops_the_start_with_one_line() {
    let ((directory, certificates), (_elsewhere, others)) = (certificates(), certificates());
    let write = |name: &str, contents: &str| {
        let path = directory.path().join(name);
        fs::write(&path, contents).unwrap();
        path
    };
    let pair = (certificates.path("server.crt"), certificates.path("server.key"));
    let (empty, missing) = (write("empty", ""), directory.path().join("missing"));
    let garbage = write("garbage", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    let large = write("large", &"x".repeat((1 << 20) + 1));
    let cases = [
        ((missing.clone(), pair.1.clone()), None, "GRPC_SERVER_TLS_CERT", "No such file"),
        ((directory.path().to_owned(), pair.1.clone()), None, "GRPC_SERVER_TLS_CERT", "directory"),
        ((empty.clone(), pair.1.clone()), None, "GRPC_SERVER_TLS_CERT", "no certificate in it"),
        ((garbage.clone(), pair.1.clone()), None, "GRPC_SERVER_TLS_CERT", "cannot be parsed"),
        ((large, pair.1.clone()), None, "GRPC_SERVER_TLS_CERT", "1 MiB"),
        ((pair.0.clone(), missing.clone()), None, "GRPC_SERVER_TLS_KEY", "No such file"),
        ((pair.0.clone(), pair.0.clone()), None, "GRPC_SERVER_TLS_KEY", "no private key in it"),
        (
            (pair.0.clone(), others.path("server.key")),
            None,
            "GRPC_SERVER_TLS_KEY",
            "not the key of GRPC_SERVER_TLS_CERT",
        ),
        (pair.clone(), Some(missing), "GRPC_CLIENT_TLS_CACERT", "No such file"),
        (pair.clone(), Some(empty), "GRPC_CLIENT_TLS_CACERT", "no certificate in it"),
        (pair, Some(garbage), "GRPC_CLIENT_TLS_CACERT", "not a certificate of an authority"),
    ];
    for ((certificate, key), authority, setting, why) in cases {
        let setup = with_tls(certificate, key);
        let setup = authority.into_iter().fold(setup, |setup, path| setup.env("GRPC_CLIENT_TLS_CACERT", path));
        let ended = setup.run();
        let output = &ended.stderr;
        assert_eq!((ended.code, output.lines().count()), (Some(2), 1), "{output}");
        assert!(output.contains(&format!("{setting}=")) && output.contains(why), "{setting} {why}: {output}");
    }
}

#[test]
fn slow_handshake_delays_no_one_and_is_closed() {
    let (_directory, certificates) = certificates();
    let server = secured(&certificates).env("TOLLKEEPER_HEAD_TIMEOUT", "500ms").start();
    let hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
    let mut slow_clients: Vec<_> = (0..100)
        .map(|index| {
            let mut stream = http::connect(server.grpc_port(), Ipv4Addr::LOCALHOST).unwrap();
            std::io::Write::write_all(&mut stream, &hello[..index % hello.len()]).unwrap();
            stream
        })
        .collect();
    call_with(server.grpc_port(), &certificates, &[("--ca", "ca.crt")]).unwrap();
    for stream in &mut slow_clients {
        http::read_until_closed(stream);
    }
    call_with(server.grpc_port(), &certificates, &[("--ca", "ca.crt")]).unwrap();
}

#[test]
fn envoy_calls_over_mutual_tls() {
    let (_directory, certificates) = certificates();
    certificates.issue_client("envoy", &["envoy.example"]);
    let path = |name| text(certificates.path(name));
    let rules = read(&repository("envoy/gateway.rules.yaml"));
    let files = [
        ("GRPC_SERVER_USE_TLS", "true".to_owned()),
        ("GRPC_SERVER_TLS_CERT", path("server.crt")),
        ("GRPC_SERVER_TLS_KEY", path("server.key")),
        ("GRPC_CLIENT_TLS_CACERT", path("ca.crt")),
        ("GRPC_CLIENT_TLS_SAN", "envoy.example".to_owned()),
    ];
    let server = files.iter().fold(with_rules(&rules), |setup, (name, value)| setup.env(name, value)).start();
    let socket = format!(
        "
      transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          \"@type\": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
          sni: localhost
          common_tls_context:
            tls_certificates: [{{ certificate_chain: {{ filename: {} }}, private_key: {{ filename: {} }} }}]
            validation_context:
              trusted_ca: {{ filename: {} }}
              match_typed_subject_alt_names: [{{ san_type: DNS, matcher: {{ exact: localhost }} }}]
",
        path("envoy.crt"),
        path("envoy.key"),
        path("ca.crt"),
    );
    let envoy = Envoy::start_with("gateway", &[server.grpc_port()], |bootstrap| {
        bootstrap.replace("    - name: tollkeeper\n", &format!("    - name: tollkeeper{socket}"))
    });
    assert_eq!(envoy.get("/hello").send().status, 200);
    let stats = http::get(server.debug_port(), "/stats").send().text();
    assert!(stats.contains("ratelimit_server.ShouldRateLimit.total_requests: 1"), "{stats}");
    assert_eq!(envoy.stat("cluster.tollkeeper.ssl.connection_error"), 0);
    assert!(envoy.stat("cluster.tollkeeper.ssl.handshake") > 0);
}

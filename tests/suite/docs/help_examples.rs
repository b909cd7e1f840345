//! Every example of every help text, run by a shell as it is printed. Only addresses and times are replaced.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::tools::simulate::Log;
use kit::port::Port;
use kit::redis::certificates::Certificates;
use kit::redis::{Server, options};
use kit::tollkeeper::{Setup, Tollkeeper, inherited_env, program_path, with_rules};
use kit::{http, read, repository, wait_for};

/// Admin token of the servers.
const TOKEN: &str = "correct horse battery staple";
/// Width of a terminal that shows each line whole, so that it can be copied.
const COLUMNS: usize = 80;

/// Help of a command, on a terminal of [`COLUMNS`].
fn help(command: &str) -> String {
    let mut help = Command::new(program_path());
    help.args(Some(command).filter(|command| !command.is_empty())).arg("--help");
    let output = help.env_clear().envs(inherited_env()).env("COLUMNS", COLUMNS.to_string()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Commands with a help text of their own, as the program lists them; the empty one is the program itself.
fn commands() -> Vec<String> {
    let overview = help("");
    let (_, listed) = overview.split_once("\nCommands:\n").expect("the program lists its commands");
    // A name is indented by two spaces; the continued lines of descriptions, by more.
    let names = listed.lines().take_while(|line| !line.is_empty()).filter_map(|line| {
        let name = line.strip_prefix("  ").filter(|line| !line.starts_with(' '))?;
        name.split(' ').next().map(str::to_owned)
    });
    let mut commands = vec![String::new()];
    commands.extend(names.filter(|name| name != "help"));
    assert!(commands.len() > 10, "{overview}");
    commands
}

/// Shell commands that the help shows as examples, one for each, continued lines joined.
fn examples(help: &str) -> Vec<String> {
    let mut examples: Vec<String> = Vec::new();
    let mut is_continued = false;
    for line in help.lines() {
        let Some(line) = line.strip_prefix("  ") else {
            assert!(!is_continued, "a continued line is followed by {line:?}");
            continue;
        };
        let is_command =
            !line.starts_with(' ') && line.split(' ').any(|word| word == "tollkeeper" || word == "kubectl");
        let (text, continues) = line.strip_suffix(" \\").map_or((line, false), |line| (line, true));
        if is_continued {
            *examples.last_mut().unwrap() += &format!(" {}", text.trim_start());
        } else if is_command {
            examples.push(text.to_owned());
        }
        is_continued = continues && (is_continued || is_command);
    }
    examples
}

/// Rules with a table, whose file an example replaces.
const WITH_TABLE: &str = "\
domain: shop
plans: {free: {unit: day, requests_per_unit: 9}}
tables: {customers: {file: customers.csv}}
descriptors: [{key: login, plan: {from: customers, default: free}}]
";

/// Servers that the examples call: in plain text, over mutual TLS, and at a unix socket.
struct Servers {
    plain: Tollkeeper,
    tls: Tollkeeper,
    unix: Tollkeeper,
    /// Server of a decision log's stream.
    redis: Server,
    directory: TempDir,
}

impl Servers {
    /// Starts them, and makes the directory with the files that the examples name.
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let certificates = Certificates::new(path);
        for (from, to) in [("client.crt", "me.crt"), ("client.key", "me.key")] {
            fs::copy(certificates.path(from), path.join(to)).unwrap();
        }
        for shipped in ["config", "envoy"] {
            symlink(repository(shipped), path.join(shipped)).unwrap();
        }
        let rules = |domain: &str, key: &str| {
            format!(
                "domain: {domain}\ndescriptors:\n- {{key: {key}, rate_limit: {{unit: day, requests_per_unit: 9}}}}\n"
            )
        };
        for part in ["more", "rules", "bin"] {
            fs::create_dir(path.join(part)).unwrap();
        }
        let request = json!({"domain": "example", "descriptors": [{"entries": [{"key": "login", "value": "ann"}]}]});
        for (name, text) in [
            ("shop.yaml", rules("shop", "a")),
            ("more/shop.yaml", rules("shop", "b")),
            ("rules/one.yaml", rules("one", "a")),
            ("more.yaml", rules("two", "a")),
            ("defaults.yaml", "defaults: {\"*\": {on_store_error: deny}}\n".to_owned()),
            ("new.yaml", rules("shop", "login")),
            ("old.yaml", rules("shop", "login")),
            ("rules.yaml", WITH_TABLE.to_owned()),
            ("new.csv", "value,plan\nann,free\n".to_owned()),
            ("decisions.jsonl", decision_log(&rules("shop", "login"))),
            ("access.log", json!({"start_time": "2026-01-01T00:00:00Z", "user": "ann"}).to_string() + "\n"),
            ("map.yaml", "time: start_time\ndomain: shop\ndescriptors: [[{key: login, field: user}]]\n".to_owned()),
            ("request.json", request.to_string()),
            ("refund.json", refund().to_string()),
            ("deploy.env", "LOG_LEVEL=info\nREDIS_URL=redis:6379\n".to_owned()),
        ] {
            fs::write(path.join(name), text).unwrap();
        }
        let setup = || with_rules(&read(&repository("config/example.yaml"))).env("TOLLKEEPER_DRAIN_PERIOD", "0s");
        let tls = |setup: Setup| {
            let setup =
                setup.env("GRPC_SERVER_USE_TLS", "true").env("GRPC_SERVER_TLS_KEY", certificates.path("server.key"));
            let setup = setup.env("GRPC_SERVER_TLS_CERT", certificates.path("server.crt"));
            setup.env("GRPC_CLIENT_TLS_CACERT", certificates.path("ca.crt"))
        };
        let plain = setup().env("TOLLKEEPER_ADMIN_TOKEN", TOKEN).env("TOLLKEEPER_RLQS", "true").start();
        let script = format!(
            "test \"$*\" = 'get configmap tollkeeper-rules -o jsonpath={{.data.rules\\.yaml}}' && cat {}/shop.yaml",
            path.display()
        );
        let kubectl = path.join("bin/kubectl");
        fs::write(&kubectl, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&kubectl, fs::Permissions::from_mode(0o755)).unwrap();
        symlink(program_path(), path.join("bin/tollkeeper")).unwrap();
        let unix = setup().env("GRPC_UDS", path.join("tollkeeper.sock")).start();
        let redis = options().start();
        for line in decision_log(&rules("shop", "login")).lines() {
            redis.query::<String>(&["XADD", "decisions", "*", "record", line]);
        }
        Self { plain, tls: tls(setup()).start(), unix, redis, directory }
    }

    /// Replaces addresses, which may be in use on this machine, and long times.
    fn adapted(&self, example: &str) -> String {
        let grpc = if example.contains(" --tls ") { &self.tls } else { &self.plain }.grpc_port();
        let debug = self.plain.debug_port();
        let mut command = example
            .replace("localhost:8081", &format!("localhost:{grpc}"))
            .replace("localhost:6070", &format!("localhost:{debug}"))
            .replace("/run/tollkeeper.sock", self.directory.path().join("tollkeeper.sock").to_str().unwrap());
        let own = |name: &str| example.starts_with(&format!("tollkeeper {name}"));
        let has_address = example.contains(" --addr ") || example.contains(" --config ");
        if own("call") && !has_address {
            command += &format!(" --addr 127.0.0.1:{grpc}");
        } else if ["top", "explain", "block", "unblock", "quota", "reset", "tap"].into_iter().any(own) && !has_address {
            command += &format!(" --addr 127.0.0.1:{debug}");
        }
        command
    }

    fn shell(&self, command: &str) -> Command {
        let path = format!("{}:{}", self.directory.path().join("bin").display(), std::env::var("PATH").unwrap());
        let mut shell = Command::new("bash");
        shell.args(["-c", &format!("set -o pipefail; {command}")]).current_dir(self.directory.path());
        shell.env_clear().envs(inherited_env()).env("PATH", path);
        shell.env("TOLLKEEPER_DECISION_LOG_REDIS_URL", self.redis.address()).env("TOLLKEEPER_ADMIN_TOKEN", TOKEN);
        shell
    }

    /// Text of a file that the examples name.
    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.directory.path().join(name)).unwrap()
    }

    /// Runs an example until it ends.
    fn run(&self, example: &str) -> Output {
        self.shell(&self.adapted(example)).output().unwrap()
    }
}

/// A decision log of one request.
fn decision_log(rules: &str) -> String {
    let log = Log::new("p", rules).decided(0, "ann", true);
    log.text()
}

/// The request file that the help of `call` shows.
fn refund() -> Value {
    let help = help("call");
    let (_, shown) = help.split_once("such as a refund:\n").expect("it shows a request file");
    let (shown, _) = shown.split_once("\n\n").unwrap();
    serde_json::from_str(shown).unwrap_or_else(|error| panic!("{error}: {shown}"))
}

#[test]
fn examples_in_help_run_as_printed() {
    let servers = Servers::start();
    let mut ran = 0;
    for command in commands() {
        let help = help(&command);
        for example in examples(&help).into_iter().filter(|example| !is_endless(example)) {
            let output = servers.run(&example);
            assert!(output.status.success(), "{example}\n{output:?}");
            ran += 1;
        }
    }
    assert!(ran >= 18, "only {ran} examples were found");
    // They called the servers that are meant.
    for (server, name) in [(&servers.plain, "plain"), (&servers.tls, "TLS"), (&servers.unix, "unix")] {
        let stats = http::get(server.debug_port(), "/stats").send().text();
        let called = stats.lines().any(|line| {
            line.strip_prefix("ratelimit_server.ShouldRateLimit.total_requests: ").is_some_and(|calls| calls != "0")
        });
        assert!(called, "no example called the {name} server: {stats}");
    }
}

/// Commands that run until they are stopped.
fn is_endless(example: &str) -> bool {
    example.contains(" --every ")
        || example.contains(" --follow")
        || example.contains("tollkeeper tap")
        || example.contains("tollkeeper serve")
        || example.ends_with(" tollkeeper")
}

#[test]
fn endless_examples_in_help_start_as_printed() {
    let servers = Servers::start();
    let mut ran = 0;
    for example in commands().iter().flat_map(|command| examples(&help(command))).filter(|example| is_endless(example))
    {
        let ports = [Port::reserve(), Port::reserve(), Port::reserve()];
        let mut command = servers.shell(&format!("exec env {}", servers.adapted(&example)));
        for (name, port) in ["GRPC_PORT", "PORT", "DEBUG_PORT"].into_iter().zip(&ports) {
            command.env(name, port.number().to_string());
        }
        let is_server = ![" --every ", " --follow", " tap "].iter().any(|word| example.contains(word));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        if is_server {
            wait_for(&format!("{example} to serve"), || {
                assert_eq!(child.try_wait().unwrap(), None, "{example}");
                http::get(ports[1].number(), "/healthcheck").try_send().ok().filter(|page| page.status == 200)
            });
        } else {
            let is_shown = AtomicBool::new(false);
            let lines = thread::scope(|scope| {
                // A tap shows what is decided meanwhile.
                scope.spawn(|| {
                    while example.contains(" tap ") && !is_shown.load(Ordering::Relaxed) {
                        servers.plain.post_json(&servers.read("request.json"));
                    }
                });
                let mut output = BufReader::new(child.stdout.take().unwrap());
                let mut lines = String::new();
                // With --every, the time is first.
                let count = if example.contains(" --every ") { 2 } else { 1 };
                for _ in 0..count {
                    output.read_line(&mut lines).unwrap();
                }
                is_shown.store(true, Ordering::Relaxed);
                lines
            });
            let words = ["rejected", "streams", "\"v\":1", "over_limit  example login=ann"];
            assert!(words.iter().any(|word| lines.contains(word)), "{example}: {lines:?}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        ran += 1;
    }
    assert!(ran >= 4, "only {ran} examples were found");
}

#[test]
fn top_explains_settings_that_turn_it_off() {
    let top = |server: &Tollkeeper, arguments: &[&str]| {
        let address = format!("127.0.0.1:{}", server.debug_port());
        let mut top = Command::new(Path::new(program_path()));
        let output = top.args(["top", "--addr", &address]).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let server = with_rules("domain: shop\n").env("DISABLE_STATS", "true").start();
    for arguments in [&[][..], &["--rules"]] {
        let text = top(&server, arguments);
        assert!(text.contains("DISABLE_STATS=true: keys and rules are not counted (unset it and restart)"), "{text}");
    }
    let server = with_rules("domain: shop\n").env("TOLLKEEPER_TOP_KEYS", "0").start();
    let text = top(&server, &[]);
    assert!(text.contains("TOLLKEEPER_TOP_KEYS=0: rejected keys are not tracked (unset it and restart)"), "{text}");
}

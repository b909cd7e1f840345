//! A tollkeeper process with rules and settings of its own.
//!
//! The process gets the environment of the test only, because variables of the machine could be settings that change
//! verdicts. Signals go by pid, through the shell's own `kill`.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::LazyLock;

use tempfile::TempDir;

use super::port::Port;
use super::{http, read, repository, signal, wait_for};

/// Arguments, environment and rules of a tollkeeper to start.
#[derive(Debug)]
pub struct Setup {
    rules: Rules,
    env: Vec<(String, String)>,
    name: Option<&'static str>,
    arguments: Vec<OsString>,
    container: Option<Vec<Volume>>,
    stdout: Option<File>,
}

/// A file or directory that a container sees.
#[derive(Debug)]
pub struct Volume {
    /// Path outside of the container.
    pub source: PathBuf,
    /// Path in the container.
    pub target: &'static str,
}

/// Rules, and the way to pass their location.
#[derive(Debug)]
enum Rules {
    /// No rules, or rules that the test passes itself.
    None,
    /// One file, by `--config`.
    File(String),
    /// Files by name, in the directory that RUNTIME_ROOT and its companions name.
    Runtime(Vec<(String, String)>),
}

/// A tollkeeper with these rules, in a file that the test may edit later.
pub fn with_rules(rules: &str) -> Setup {
    Setup { rules: Rules::File(rules.to_owned()), ..without_rules() }
}

/// A tollkeeper with these files, found as envoyproxy/ratelimit finds them: by its own environment variables.
pub fn with_runtime_files(files: Vec<(String, String)>) -> Setup {
    Setup { rules: Rules::Runtime(files), ..without_rules() }
}

/// A tollkeeper without rules of its own: `--config` and `RUNTIME_*` are the test's.
pub fn without_rules() -> Setup {
    Setup {
        rules: Rules::None,
        env: Vec::new(),
        name: None,
        arguments: vec!["serve".into()],
        container: None,
        stdout: None,
    }
}

impl Setup {
    /// Sets an environment variable; overrides the kit's own ports too.
    pub fn env(mut self, name: &str, value: impl AsRef<Path>) -> Self {
        let value = value.as_ref().to_str().expect("paths and values of tests are UTF-8").to_owned();
        self.env.push((name.to_owned(), value));
        self
    }

    /// Adds an argument.
    pub fn arg(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Calls the program by another name, with these arguments in place of the subcommand.
    pub fn invoked_as(mut self, name: &'static str, arguments: &[&'static str]) -> Self {
        self.name = Some(name);
        self.arguments = arguments.iter().map(OsString::from).collect();
        self
    }

    /// Runs it as process 1 of a restricted container that sees these files; see `tests/kit/image.sh`.
    pub fn in_container(mut self, volumes: Vec<Volume>) -> Self {
        self.container = Some(volumes);
        self
    }

    /// Passes this file as its standard output.
    pub fn stdout(mut self, file: File) -> Self {
        self.stdout = Some(file);
        self
    }

    /// Starts it and waits until it reports healthy.
    pub fn start(self) -> Tollkeeper {
        let mut tollkeeper = self.launch();
        tollkeeper.wait_until_healthy();
        tollkeeper
    }

    /// Starts it and waits until it answers, healthy or not.
    pub fn start_unhealthy(self) -> Tollkeeper {
        let mut tollkeeper = self.launch();
        tollkeeper.wait_for_answer("/livez", |response| response.status == 200);
        tollkeeper
    }

    /// Runs it until it exits by itself.
    pub fn run(self) -> ExitResult {
        let mut tollkeeper = self.launch();
        let status = tollkeeper.wait();
        ExitResult { code: status.code(), stderr: tollkeeper.stderr() }
    }

    /// Starts it and waits for nothing.
    pub fn launch(self) -> Tollkeeper {
        let files = tempfile::tempdir().expect("a temporary directory can be made");
        let ports = Ports { grpc: Port::reserve(), http: Port::reserve(), debug: Port::reserve() };
        let stderr = File::create(files.path().join("stderr")).expect("a file can be made");
        let mut command = match &self.container {
            Some(volumes) => container(volumes, self.name.unwrap_or("tollkeeper")),
            None => Command::new(self.name.map_or_else(|| program_path().into(), |name| linked_as(files.path(), name))),
        };
        command.env_clear().args(&self.arguments);
        self.rules.write_and_pass(files.path(), &mut command);
        // Background tasks of the fleet run three times as often, so that tests need not wait for them.
        command.env("TEST_PACE", "3");
        // Tests count the commands of their counters only.
        command.env("TOLLKEEPER_FLEET", "false");
        command.envs(inherited_env()).envs(ports.settings()).envs(self.env);
        command.stdin(Stdio::null()).stdout(self.stdout.map_or_else(Stdio::null, Stdio::from)).stderr(stderr);
        let child = command.spawn().expect("the binary under test can be started");
        Tollkeeper { child, ports, files }
    }
}

/// Exit code and output of a run.
#[derive(Debug)]
pub struct ExitResult {
    /// The exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// Its standard error.
    pub stderr: String,
}

/// The binary under test.
///
/// It is that of `CARGO_BIN_EXE_tollkeeper`, which cargo sets for tests, or stands in the directory above that of the
/// running tests.
pub fn program_path() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
        if let Some(named) = env::var_os("CARGO_BIN_EXE_tollkeeper") {
            return named.into();
        }
        let tests = env::current_exe().expect("the running program has a path");
        let program = tests.ancestors().nth(2).expect("it is in a directory of target").join("tollkeeper");
        assert!(program.exists(), "{} is missing: build it with `cargo build`", program.display());
        program
    });
    &PROGRAM
}

/// The command that runs the binary under test as `/bin/NAME` of a container; arguments follow.
fn container(volumes: &[Volume], name: &str) -> Command {
    let mut command = Command::new(repository("tests/kit/image.sh"));
    for Volume { source, target } in volumes {
        command.arg("-v").arg(format!("{}:{target}", source.display()));
    }
    command.arg(program_path()).arg(format!("/bin/{name}"));
    command
}

/// The binary under test under another name: a link in `directory`.
pub fn linked_as(directory: &Path, name: &str) -> PathBuf {
    let link = directory.join(name);
    symlink(program_path(), &link).expect("a link can be made");
    link
}

impl Rules {
    /// Writes the rules below `directory` and passes their location to the command.
    fn write_and_pass(&self, directory: &Path, command: &mut Command) {
        match self {
            Self::None => {}
            Self::File(text) => {
                let path = directory.join("rules.yaml");
                fs::write(&path, text).expect("the rules can be written");
                command.arg("--config").arg(path);
            }
            Self::Runtime(files) => {
                let below = directory.join("ratelimit/config");
                fs::create_dir_all(&below).expect("a directory can be made");
                for (name, text) in files {
                    fs::write(below.join(name), text).expect("the rules can be written");
                }
                command.env("RUNTIME_ROOT", directory).env("RUNTIME_SUBDIRECTORY", "ratelimit");
                command.env("RUNTIME_APPDIRECTORY", "config").env("RUNTIME_WATCH_ROOT", "false");
            }
        }
    }
}

/// Variables that a child inherits: the paths of programs, and of coverage data.
pub fn inherited_env() -> impl Iterator<Item = (&'static str, String)> {
    ["PATH", "TMPDIR", "RUST_BACKTRACE", "LLVM_PROFILE_FILE"]
        .into_iter()
        .filter_map(|name| env::var(name).ok().map(|value| (name, value)))
}

#[derive(Debug)]
struct Ports {
    grpc: Port,
    http: Port,
    debug: Port,
}

impl Ports {
    fn settings(&self) -> [(&'static str, String); 6] {
        let host = || "127.0.0.1".to_owned();
        [
            ("GRPC_HOST", host()),
            ("GRPC_PORT", self.grpc.number().to_string()),
            ("HOST", host()),
            ("PORT", self.http.number().to_string()),
            ("DEBUG_HOST", host()),
            ("DEBUG_PORT", self.debug.number().to_string()),
        ]
    }
}

/// A running tollkeeper; killed when dropped.
#[derive(Debug)]
pub struct Tollkeeper {
    child: Child,
    ports: Ports,
    files: TempDir,
}

impl Tollkeeper {
    /// Port of `ShouldRateLimit`, on 127.0.0.1.
    pub fn grpc_port(&self) -> u16 {
        self.ports.grpc.number()
    }

    /// Port of `/json` and `/healthcheck`, on 127.0.0.1.
    pub fn http_port(&self) -> u16 {
        self.ports.http.number()
    }

    /// Port of the debug listener, on 127.0.0.1.
    pub fn debug_port(&self) -> u16 {
        self.ports.debug.number()
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The rule file that it reads and watches, if its rules are in one.
    pub fn rules_path(&self) -> PathBuf {
        self.files.path().join("rules.yaml")
    }

    /// Response of `/json` to that body.
    pub fn post_json(&self, body: &str) -> http::Response {
        http::post(self.http_port(), "/json", body).send()
    }

    /// Page of `/explain` for that body.
    pub fn explain(&self, body: &str) -> serde_json::Value {
        let response = http::post(self.debug_port(), "/explain", body).send();
        serde_json::from_slice(&response.body).unwrap_or_else(|error| panic!("{error}: {response:?}"))
    }

    /// The page `/rlconfig/status`.
    pub fn rules_status(&self) -> serde_json::Value {
        let response = http::get(self.debug_port(), "/rlconfig/status").send();
        serde_json::from_slice(&response.body).unwrap_or_else(|error| panic!("{error}: {response:?}"))
    }

    /// The page `/store`: statistics of the store.
    pub fn store_stats(&self) -> serde_json::Value {
        let response = http::get(self.debug_port(), "/store").send();
        serde_json::from_slice(&response.body).unwrap_or_else(|error| panic!("{error}: {response:?}"))
    }

    /// The status of `/healthcheck`.
    pub fn healthcheck(&self) -> u16 {
        http::get(self.http_port(), "/healthcheck").send().status
    }

    /// Sends it a signal: TERM, INT or HUP.
    pub fn signal(&self, name: &str) {
        let kill = format!("kill -s {name} {}", self.child.id());
        let status = Command::new("sh").args(["-c", &kill]).status().expect("there is a shell");
        assert!(status.success(), "{kill}: {status}");
    }

    /// Stops it for a while: connections stay open without responses.
    pub fn freeze(&self) {
        signal::freeze(&self.child);
    }

    /// Continues it; the process then handles the bytes received meanwhile.
    pub fn thaw(&self) {
        signal::thaw(&self.child);
    }

    /// Waits until it ends by itself.
    pub fn wait(&mut self) -> ExitStatus {
        let stderr = self.files.path().join("stderr");
        wait_for(&format!("tollkeeper to end, which says in {}", stderr.display()), || self.try_wait())
    }

    /// Exit status, if it has ended.
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("the child can be asked")
    }

    /// Kills it and waits until it has ended.
    pub fn kill(&mut self) {
        signal::kill(&mut self.child);
    }

    /// Its log so far.
    pub fn stderr(&self) -> String {
        read(&self.files.path().join("stderr"))
    }

    /// Peak resident memory, in MiB.
    pub fn peak_mib(&self) -> u64 {
        let status = read(&PathBuf::from(format!("/proc/{}/status", self.child.id())));
        let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
        let kib: u64 = kib.and_then(|kib| kib.parse().ok()).expect("the kernel says how much memory a process has");
        kib / 1024
    }

    fn wait_until_healthy(&mut self) {
        self.wait_for_answer("/healthcheck", |response| response.status == 200 && response.text() == "OK");
    }

    fn wait_for_answer(&mut self, path: &str, is_it: impl Fn(&http::Response) -> bool) {
        let page = http::get(self.ports.http.number(), path);
        wait_for(&format!("tollkeeper to answer {path}"), || {
            if let Some(status) = self.try_wait() {
                panic!("tollkeeper ended with {status}:\n{}", self.stderr());
            }
            page.try_send().ok().filter(&is_it)
        });
    }
}

impl Drop for Tollkeeper {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("tollkeeper said:\n{}", self.stderr());
        }
        self.kill();
    }
}

//! Examples of `docs/calling.md`: each program is the text of the page or of a file that it names, built with Envoy's
//! published packages, and calls a real server.
//!
//! `tests/clients/install.sh` installs the packages; TOLLKEEPER_TEST_CLIENTS names their directory.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::docs::cookbook::page::shown_commands;
use kit::port::Port;
use kit::tollkeeper::{Tollkeeper, inherited_env, with_rules};
use kit::{read, repository};

/// Directory with the packages and programs of other languages.
fn clients() -> PathBuf {
    let path = env::var_os("TOLLKEEPER_TEST_CLIENTS");
    let what =
        "TOLLKEEPER_TEST_CLIENTS names no clients: run tests/run.sh, or set it to what tests/clients/install.sh prints";
    path.expect(what).into()
}

fn page() -> String {
    read(&repository("docs/calling.md"))
}

/// The block of the page in this language, with a deadline that a busy machine keeps.
fn example(language: &str, deadline: (&str, &str)) -> String {
    let page = page();
    let (_, rest) = page.split_once(&format!("```{language}\n")).unwrap_or_else(|| panic!("no example in {language}"));
    with_deadline(rest.split("```").next().unwrap(), deadline)
}

/// A file that the page names, with a deadline that a busy machine keeps.
fn example_file(name: &str, deadline: (&str, &str)) -> String {
    assert!(page().contains(&format!("(examples/{name})")), "the page does not name {name}");
    with_deadline(&read(&repository(&format!("docs/examples/{name}"))), deadline)
}

/// The program with another deadline.
fn with_deadline(code: &str, (own, longer): (&str, &str)) -> String {
    assert!(code.contains(own), "no {own} in\n{code}");
    code.replace(own, longer)
}

fn serve_example_rules() -> Tollkeeper {
    with_rules(&read(&repository("config/example.yaml"))).start()
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {output:?}");
    output
}

/// The only line of the program's output.
fn line_of(program: impl Fn(&str) -> Command, target: &str) -> String {
    let output = run(program(target).env("no_proxy", "*"));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Checks what the program prints below the limit, over it, and if nobody answers.
fn assert_prints_each_answer(program: impl Fn(&str) -> Command) {
    let tollkeeper = serve_example_rules();
    let target = format!("127.0.0.1:{}", tollkeeper.grpc_port());
    assert_eq!(line_of(&program, &target), "pass: 4 left");
    let body = r#"{"domain": "example", "descriptors": [{"entries": [{"key": "login", "value": "ann"}]}]}"#;
    for _ in 0..4 {
        assert_eq!(tollkeeper.post_json(body).status, 200);
    }
    let rejection = line_of(&program, &target);
    let seconds = rejection.strip_prefix("reject: retry after ").and_then(|rest| rest.strip_suffix(" s"));
    let seconds: u32 = seconds.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{rejection}"));
    assert!((1..=60).contains(&seconds), "{rejection}");

    let nobody = format!("127.0.0.1:{}", Port::reserve().number());
    let undecided = line_of(&program, &nobody).to_lowercase();
    assert!(undecided.starts_with("pass: no decision, "), "{undecided}");
}

/// A directory with one file.
fn directory_with(name: &str, text: &str) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join(name), text).unwrap();
    directory
}

#[test]
#[ignore = "a client of another language; .ci/nightly runs it"]
fn go_example_decides() {
    let directory = directory_with("main.go", &example("go", ("1*time.Second", "60*time.Second")));
    for name in ["go.mod", "go.sum"] {
        fs::copy(repository("tests/clients/go").join(name), directory.path().join(name)).unwrap();
    }
    run(Command::new(clients().join("bin/go")).args(["build", "-o", "call", "."]).current_dir(directory.path()));
    assert_prints_each_answer(|target| command(&directory.path().join("call"), &[OsStr::new(target)]));
}

/// A program with arguments.
fn command(program: &Path, arguments: &[&OsStr]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments);
    command
}

#[test]
#[ignore = "a client of another language; .ci/nightly runs it"]
fn python_example_decides() {
    let directory = directory_with("call.py", &example("python", ("timeout=1", "timeout=60")));
    let (python, file) = (clients().join("python/bin/python"), directory.path().join("call.py"));
    assert_prints_each_answer(|target| command(&python, &[file.as_os_str(), OsStr::new(target)]));
}

#[test]
#[ignore = "a client of another language; .ci/nightly runs it"]
fn node_example_decides() {
    let directory = directory_with("call.js", &example_file("call.js", ("Date.now() + 1000", "Date.now() + 60000")));
    let (node, file) = (clients().join("bin/node"), directory.path().join("call.js"));
    assert_prints_each_answer(|target| {
        let mut command = command(&node, &[file.as_os_str(), OsStr::new(target)]);
        command.env("NODE_PATH", clients().join("node/node_modules"));
        command
    });
}

#[test]
#[ignore = "needs a JDK and Maven; .ci/nightly runs it"]
fn java_example_decides() {
    // Java waits for a connection until the deadline; 20 s are enough for a cold machine.
    let directory = directory_with("Call.java", &example_file("Call.java", ("(1, TimeUnit", "(20, TimeUnit")));
    let (java, file) = (clients().join("bin/java"), directory.path().join("Call.java"));
    let jars = clients().join("java/*");
    assert_prints_each_answer(|target| {
        command(&java, &[OsStr::new("-cp"), jars.as_os_str(), file.as_os_str(), OsStr::new(target)])
    });
}

/// curl and grpcurl, as the page has them; each line of the page is a line of the output, or its beginning.
#[test]
fn commands_of_the_page_print_what_it_shows() {
    let tollkeeper = serve_example_rules();
    let search = format!("{}:{}", clients().join("bin").display(), env::var("PATH").unwrap());
    let mut compared = Vec::new();
    for shown in shown_commands(&page()) {
        let http = format!("http://127.0.0.1:{}/", tollkeeper.http_port());
        let text = shown.text.replace("http://127.0.0.1:8080/", &http);
        let text = text.replace("127.0.0.1:8081", &format!("127.0.0.1:{}", tollkeeper.grpc_port()));
        assert_ne!(text, shown.text, "the command names no address");
        let mut shell = Command::new("bash");
        shell.args(["-c", &text]).env_clear().envs(inherited_env()).env("PATH", &search).env("no_proxy", "*");
        let output = String::from_utf8(run(&mut shell).stdout).unwrap();
        let mut printed = output.lines().map(str::trim);
        for line in shown.output.iter().map(|line| line.trim()) {
            assert!(printed.by_ref().any(|printed| printed.starts_with(line)), "{text}: {line} not in\n{output}");
        }
        compared.push(shown.text.split(' ').next().unwrap().to_owned());
    }
    assert_eq!(compared, ["curl", "grpcurl", "curl", "curl"]);
}

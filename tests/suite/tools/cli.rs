//! The command line as a shell sees it: output and exit codes.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use tollkeeper::settings::environment::all_settings;

use kit::tollkeeper::{Tollkeeper, inherited_env, linked_as, program_path, with_rules};
use kit::{http, port::Port, read, repository, wait_for};

/// Exit code and output of a command.
#[derive(Debug)]
pub(crate) struct ExitResult {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl ExitResult {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A command to be run with an empty environment but for `env`.
pub(crate) struct Run<'r> {
    pub(crate) program: &'r Path,
    pub(crate) directory: &'r Path,
    pub(crate) env: &'r [(&'r str, &'r str)],
    pub(crate) stdin: &'r str,
}

impl Default for Run<'_> {
    fn default() -> Self {
        Self { program: Path::new(program_path()), directory: Path::new("."), env: &[], stdin: "" }
    }
}

impl Run<'_> {
    pub(crate) fn with(&self, arguments: &[&str]) -> ExitResult {
        let mut command = Command::new(self.program);
        command
            .args(arguments)
            .current_dir(self.directory)
            .env_clear()
            .envs(inherited_env())
            .envs(self.env.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // A command that does not read its input may have ended already.
        let _ = child.stdin.take().unwrap().write_all(self.stdin.as_bytes());
        let output = child.wait_with_output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        ExitResult { code: output.status.code().unwrap(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

fn run(arguments: &[&str]) -> ExitResult {
    Run::default().with(arguments)
}

/// A directory with these files.
fn directory(files: &[(&str, &str)]) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(directory.path().join(name), text).unwrap();
    }
    directory
}

const GOOD: &str = "domain: good\ndescriptors:\n  - {key: a, rate_limit: {unit: day, requests_per_unit: 1}}\n";
const BAD: &str =
    "domain: bad\ndescriptors:\n  - key: a\n    Value: b\n    rate_limit: {unit: days, requests_per_unit: 1}\n";
const SLOW: &str = "domain: slow\ndescriptors:\n  - key: a\n    rate_limit: {unit: day, requests_per_unit: 1, algorithm: leaky_bucket, queue_size: 2}\n";

#[test]
fn check_shows_every_problem_with_its_line_and_a_hint() {
    let directory = directory(&[("good.yaml", GOOD), ("bad.yaml", BAD)]);
    let ended =
        Run { directory: directory.path(), ..Run::default() }.with(&["check", "good.yaml", "gone.yaml", "bad.yaml"]);
    let expected = "\
gone.yaml:1:1: no such file or directory, check the spelling and what is mounted there
bad.yaml:4:5: config error, unknown key 'Value', did you mean `value`?
    4 |     Value: b
      |     ^
bad.yaml:5:18: invalid rate limit unit 'days', did you mean `day`?
    5 |     rate_limit: {unit: days, requests_per_unit: 1}
      |                  ^
2 files, 3 errors, 0 warnings
";
    assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (1, expected, ""));
}

#[test]
fn check_writes_json_for_programs() {
    let directory = directory(&[("bad.yaml", BAD), ("slow.yaml", SLOW)]);
    let ended = Run { directory: directory.path(), ..Run::default() }.with(&["check", "--format", "json", "."]);
    assert_eq!(ended.code, 1);
    let report = ended.json();
    let numbers = (&report["ok"], &report["files"], &report["errors"], &report["warnings"]);
    assert_eq!(numbers, (&json!(false), &json!(2), &json!(2), &json!(1)), "{report}");
    let expected = json!({
        "severity": "error", "file": "./bad.yaml", "line": 4, "column": 5, "path": "descriptors[0].Value",
        "message": "config error, unknown key 'Value'", "hint": "did you mean `value`?",
    });
    assert_eq!(report["diagnostics"][0], expected);
    assert_eq!(report["diagnostics"][2]["severity"], "warning", "{report}");
    assert_eq!(report["diagnostics"].as_array().unwrap().len(), 3);
    assert!(report.get("environment").is_none());
}

#[test]
fn check_exit_code_follows_its_findings() {
    let directory =
        directory(&[("good.yaml", GOOD), ("bad.yaml", BAD), ("slow.yaml", SLOW), ("more.yaml", GOOD.trim_end())]);
    fs::write(directory.path().join("more.yaml"), GOOD.replace("key: a", "key: b")).unwrap();
    let log = "domain: log\ndescriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: 9, algorithm: sliding_window_log}}]";
    // Five hits over: enough to share between two replicas.
    let eventual = "domain: eventual\ndescriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: 100, consistency: eventual}}]";
    type Case<'c> = (&'c [&'c str], &'c [(&'c str, &'c str)], &'c str, i32, &'c str);
    let cases: &[Case<'_>] = &[
        // arguments, environment, standard input, exit code, the last line
        (&["good.yaml"], &[], "", 0, "1 file, 0 errors, 0 warnings"),
        (&["slow.yaml"], &[], "", 0, "1 file, 0 errors, 1 warning"),
        (&["bad.yaml"], &[], "", 1, "1 file, 2 errors, 0 warnings"),
        (&["good.yaml", "more.yaml"], &[], "", 1, "2 files, 1 error, 0 warnings"),
        (&["--merge-domains", "good.yaml", "more.yaml"], &[], "", 0, "2 files, 0 errors, 0 warnings"),
        (&["good.yaml", "more.yaml"], &[("MERGE_DOMAIN_CONFIG", "true")], "", 0, "2 files, 0 errors, 0 warnings"),
        (&["-"], &[], BAD, 1, "1 file, 2 errors, 0 warnings"),
        (&["-", "good.yaml"], &[], "domain: other", 0, "2 files, 0 errors, 0 warnings"),
        (&["-"], &[], log, 0, "1 file, 0 errors, 0 warnings"),
        (&["-"], &[("TOLLKEEPER_LOG_MAX", "8")], log, 1, "1 file, 1 error, 0 warnings"),
        (&["-"], &[], eventual, 0, "1 file, 0 errors, 1 warning"),
        (&["-"], &[("TOLLKEEPER_MAX_REPLICAS", "2")], eventual, 0, "1 file, 0 errors, 0 warnings"),
        // Servers are not needed for a check.
        (&["good.yaml"], &[("BACKEND_TYPE", "memcache")], "", 0, "1 file, 0 errors, 0 warnings"),
        (&["slow.yaml"], &[("BACKEND_TYPE", "memcache")], "", 1, "1 file, 1 error, 1 warning"),
        // An environment that `serve` rejects does not prevent a check of the rules.
        (&["good.yaml"], &[("GRPC_PORT", "x")], "", 0, "1 file, 0 errors, 0 warnings"),
        (&["gone"], &[], "", 1, "0 files, 1 error, 0 warnings"),
        (&["."], &[], "", 1, "4 files, 3 errors, 1 warning"),
    ];
    for (arguments, env, stdin, code, last) in cases {
        let run = Run { directory: directory.path(), env, stdin, ..Run::default() };
        let ended = run.with(&[&["check"], *arguments].concat());
        assert_eq!((ended.code, ended.stdout.lines().last()), (*code, Some(*last)), "{arguments:?} {env:?}: {ended:?}");
    }
}

#[test]
fn check_names_files_of_a_directory_that_only_runtime_root_reads() {
    let other = GOOD.replace("good", "other");
    let files = directory(&[("a.yaml", GOOD), ("b", &other), (".config.yaml", "domain: ["), ("x.schema.json", "{}")]);
    let path = files.path().to_str().unwrap();
    let page = run(&["check", path]);
    assert_eq!(page.code, 0, "{page:?}");
    let warning = "warning: .config.yaml, b: not read, because hidden or without .yaml, .yml or .json, but `serve` with RUNTIME_ROOT";
    assert!(page.stdout.contains(warning) && page.stdout.contains("1 file, 0 errors, 1 warning"), "{}", page.stdout);
    let ignoring = Run { env: &[("RUNTIME_IGNOREDOTFILES", "true")], ..Run::default() }.with(&["check", path]);
    assert!(ignoring.stdout.contains("warning: b: not read"), "{}", ignoring.stdout);
    // As the warning says, each can be given too.
    let all = run(&["check", path, &format!("{path}/b"), &format!("{path}/.config.yaml")]);
    assert_eq!(all.code, 1, "{all:?}");
    let set = "domain: good\ndescriptors:\n  - {key: a, match: {in: {file: v.txt}}, rate_limit: {unit: day, requests_per_unit: 1}}\n";
    let files = directory(&[("a.yaml", set), ("v.txt", "one\n"), ("t.csv", "a,b\n")]);
    let page = run(&["check", files.path().to_str().unwrap()]);
    assert!(page.stdout.contains("0 warnings"), "sets and tables are no rules: {}", page.stdout);
}

#[test]
fn check_env_shows_the_disposition_of_each_variable() {
    let env = [
        ("GRPC_PORT", "99999"),
        ("LOG_LEVEL", "debug"),
        ("MERGE_DOMAIN_CONFIG", "true"),
        ("BACKEND_TYPE", "memcache"),
        ("TOLLKEEPER_LOG_MAXX", "\u{1b}[31m"),
        ("HOME", "/"),
    ];
    let ended = Run { env: &env, ..Run::default() }.with(&["check", "--env"]);
    let expected = "\
VARIABLE             VALUE     DISPOSITION  NOTE
GRPC_PORT            99999     invalid      out of range; give a whole number, 0 to 65535
MERGE_DOMAIN_CONFIG  true      different    files are merged in the order of their names
BACKEND_TYPE         memcache  invalid      there are no servers; give MEMCACHE_HOST_PORT or MEMCACHE_SRV
LOG_LEVEL            debug     honoured
TOLLKEEPER_LOG_MAXX            unknown      not known; did you mean TOLLKEEPER_LOG_MAX?
5 variables: 1 honoured, 1 different, 1 unknown, 2 invalid; a start would fail
";
    assert_eq!((ended.code, ended.stdout.as_str()), (1, expected), "{ended:?}");

    let cases = [
        (&env[..0], 0, "no variable for tollkeeper is set, so the defaults apply\n"),
        (&env[1..3], 0, "2 variables: 1 honoured, 1 different\n"),
        (&env[3..4], 1, "1 variable: 1 invalid; a start would fail\n"),
    ];
    for (env, code, end) in cases {
        let ended = Run { env, ..Run::default() }.with(&["check", "--env"]);
        assert!(ended.code == code && ended.stdout.ends_with(end), "{ended:?}");
    }
}

#[test]
fn check_env_combines_with_files_in_json() {
    let env = [("GRPC_PORT", "99999"), ("LOG_LEVEL", "debug")];
    let report =
        Run { env: &env, stdin: GOOD, ..Run::default() }.with(&["check", "--env", "-", "--format", "json"]).json();
    let expected = json!({
        "ok": false, "files": 1, "errors": 0, "warnings": 0, "diagnostics": [],
        "environment": [
            { "name": "GRPC_PORT", "value": "99999", "disposition": "invalid", "prevents_start": true,
              "why": "out of range", "fix": "give a whole number, 0 to 65535" },
            { "name": "LOG_LEVEL", "value": "debug", "disposition": "honoured", "prevents_start": false },
        ],
    });
    assert_eq!(report, expected);
}

const SHOP: &str = "\
domain: shop
descriptors:
  - key: user
    descriptors:
      - key: path
        value: /ca*
        rate_limit:
          - { unit: minute, requests_per_unit: 10 }
          - { unit: day, requests_per_unit: 100, name: daily, algorithm: sliding_window_log }
      - key: path
        value: /cat
        rate_limit: { unit: hour, requests_per_unit: 7 }
  - key: login
    rate_limit: { unit: minute, requests_per_unit: 5, algorithm: sliding_window_log }
";

#[test]
fn explain_shows_the_matched_rule_and_why_others_do_not_match() {
    let directory = directory(&[("shop.yaml", SHOP)]);
    let arguments = ["--descriptor", "user=42,path=/cart", "--descriptor", "user=42", "--descriptor", "x=\u{1b}[2Jy"];
    let ended = Run { directory: directory.path(), ..Run::default() }
        .with(&[&["explain", "--config", "shop.yaml", "--domain", "shop"], arguments.as_slice()].concat());
    let expected = r"domain shop

descriptor 1: user=42,path=/cart
  user=42 matches user by its key alone, at shop.yaml:3:5
  path=/cart matches path_/ca* by its wildcard, at shop.yaml:5:9
  => this rule decides
     shop.user.path_/ca* at shop.yaml:7:9
     limit 10 per minute by fixed_window
       strict: every admitted hit is counted first
     limit 100 per day by sliding_window_log (daily)
       strict: every admitted hit is counted first

descriptor 2: user=42
  user=42 matches user by its key alone, at shop.yaml:3:5
  => it ends at a node without a rate_limit, with 2 nodes below it: no limit applies
     shop.user.path_/ca* has more entries: did you mean user=42,path=/ca*?
     at shop.yaml:7:9

descriptor 3: x=\u{1b}[2Jy
  x=\u{1b}[2Jy matches nothing
  => this entry matched nothing, so no limit applies

This is based on the files only; a running server (--addr) shows its counters too.
";
    assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (0, expected, ""));
}

#[test]
fn explain_shows_the_limits_of_another_time() {
    let limit = |number, from, to| {
        format!(
            "{{unit: hour, requests_per_unit: {number}, active: {{from: '{from}', to: '{to}', timezone: Europe/Berlin}}}}"
        )
    };
    let (day, night) = (limit(100, "06:00", "22:00"), limit(20, "22:00", "06:00"));
    let directory =
        directory(&[("a.yaml", &format!("domain: a\ndescriptors:\n- {{key: k, rate_limit: [{day}, {night}]}}\n"))]);
    let explain = |rest: &[&str]| {
        let run = Run { directory: directory.path(), ..Run::default() };
        run.with(&[&["explain", "--domain", "a", "--descriptor", "k=1"], rest].concat())
    };
    for (at, decides, other) in [
        ("2026-12-01T21:59:59+01:00", "100", "20"),
        ("2026-12-01T22:00:00+01:00", "20", "100"),
        ("2026-12-02T04:59:59Z", "20", "100"),
        ("2026-12-02T05:00:00Z", "100", "20"),
    ] {
        let ended = explain(&["--config", "a.yaml", "--at", at]);
        let outcome = format!("=> this rule decides; limits of other times: {other} per hour by fixed_window");
        assert!(ended.stdout.contains(&outcome), "{at}: {ended:?}");
        assert!(ended.stdout.contains(&format!("     limit {decides} per hour")), "{at}: {ended:?}");
    }
    let zoneless = explain(&["--config", "a.yaml", "--at", "2026-12-01T22:00:00"]);
    assert!(zoneless.code == 2 && zoneless.stderr.contains("write a time with its zone"), "{zoneless:?}");
    let early = explain(&["--config", "a.yaml", "--at", "1969-12-01T22:00:00Z"]);
    assert!(early.code == 2 && early.stderr.contains("before 1970"), "{early:?}");
    assert_eq!(explain(&["--at", "2026-12-01T22:00:00Z"]).code, 2, "a server explains now");
}

#[test]
fn explain_shows_problems_of_rules() {
    let ended = Run { stdin: BAD, ..Run::default() }.with(&[
        "explain",
        "--config",
        "-",
        "--domain",
        "bad",
        "--descriptor",
        "a=b",
    ]);
    assert_eq!((ended.code, ended.stdout.as_str()), (1, ""));
    assert!(ended.stderr.contains("-:4:5: config error, unknown key 'Value', did you mean `value`?"), "{ended:?}");
}

#[test]
fn explain_shows_counters_of_a_server_without_charging() {
    let server = with_rules(SHOP).start();
    let address = format!("127.0.0.1:{}", server.debug_port());
    let explain = |more: &[&str]| {
        let ended =
            run(&[&["explain", "--addr", &address, "--domain", "shop", "--descriptor", "login=ann"], more].concat());
        assert_eq!(ended.code, 0, "{ended:?}");
        ended
    };
    assert_eq!(call(&server, &["--descriptor", "login=ann", "--hits", "2"]).code, 0);
    for _ in 0..3 {
        let text = explain(&[]).stdout;
        assert!(text.contains("       2 used, 3 remaining, reset in "), "{text}");
        assert!(text.contains("; one more hit is admitted\n"), "{text}");
        let limit = &explain(&["--json"]).json()["descriptors"][0]["limits"][0];
        assert_eq!(limit["counter"]["used"], 2, "{limit}");
    }
}

/// `call` for the domain `shop` of a server.
fn call(server: &Tollkeeper, arguments: &[&str]) -> ExitResult {
    let address = format!("127.0.0.1:{}", server.grpc_port());
    run(&[&["call", "--addr", &address, "--domain", "shop"], arguments].concat())
}

/// A page without the times at the end of its last line, which differ between runs.
fn untimed(page: &str) -> String {
    let last = page.trim_end().rfind('\n').map_or(0, |end| end + 1);
    let times = page[last..].find([';', 'i']).map_or(page.len(), |at| last + at);
    page[..times].trim_end().to_owned() + "\n"
}

#[test]
fn call_prints_responses_as_a_table() {
    let rules = "domain: shop\ndescriptors:\n  - {key: a, rate_limit: {unit: year, requests_per_unit: 3, algorithm: token_bucket}}\n  \
                 - {key: b, rate_limit: {unit: year, requests_per_unit: 0, name: never}}\n  \
                 - {key: c, rate_limit: {unit: year, requests_per_unit: 1}}\n";
    let server = with_rules(rules).start();
    let one = call(&server, &["--descriptor", r"a=x\,y", "--descriptor", "d=d"]);
    let expected = "\
DESCRIPTOR  CODE  LIMIT       REMAINING  RESET
a=x\\,y      OK    3 per year  2          121 d 16 h
d=d         OK    none
OK
";
    assert_eq!((one.code, untimed(&one.stdout).as_str(), one.stderr.as_str()), (0, expected, ""));

    let rejected = call(&server, &["--descriptor", "b=c"]);
    assert_eq!(rejected.code, 0);
    assert!(rejected.stdout.contains("b=c         OVER_LIMIT  0 per year (never)  0"), "{}", rejected.stdout);
    // A request that can never pass gets no Retry-After.
    assert!(!rejected.stdout.contains("Retry-After"), "{}", rejected.stdout);
    call(&server, &["--descriptor", "c=c"]);
    let rejected = call(&server, &["--descriptor", "c=c"]);
    assert!(rejected.stdout.contains("\nheader Retry-After: "), "{}", rejected.stdout);

    let several = call(&server, &["--descriptor", "a=z", "--count", "5"]);
    let codes: Vec<Vec<&str>> =
        several.stdout.lines().skip(1).take(5).map(|line| line.split_whitespace().take(3).collect()).collect();
    let row = |number, code| vec![number, "a=z", code];
    assert_eq!(
        codes,
        [row("1", "OK"), row("2", "OK"), row("3", "OK"), row("4", "OVER_LIMIT"), row("5", "OVER_LIMIT")],
        "{}",
        several.stdout
    );
    assert!(untimed(&several.stdout).ends_with("\n3 OK, 2 OVER_LIMIT\n"), "{}", several.stdout);

    let many = call(&server, &["--descriptor", "a=many", "--count", "300"]);
    let rows: Vec<&str> = many.stdout.lines().filter(|line| line.contains(" a=many ")).collect();
    assert_eq!((rows.len(), rows[19].split_whitespace().next()), (20, Some("20")), "{}", many.stdout);
    assert!(untimed(&many.stdout).ends_with("\n3 OK, 297 OVER_LIMIT\n"), "{}", many.stdout);
}

#[test]
fn interrupted_call_prints_its_totals() {
    let server = with_rules(GOOD).env("TOLLKEEPER_DRAIN_PERIOD", "0s").start();
    let address = format!("127.0.0.1:{}", server.grpc_port());
    let mut call = Command::new(program_path());
    call.args(["call", "--addr", &address, "--domain", "none", "--descriptor", "b=c", "--count", "1000000"]);
    let child = call.env_clear().envs(inherited_env()).stdout(Stdio::piped()).spawn().unwrap();
    // The second call is sent after the answer to the first.
    wait_for("two calls", || {
        let stats = http::get(server.debug_port(), "/stats").send().text();
        let mut counts =
            stats.lines().filter_map(|line| line.strip_prefix("ratelimit_server.ShouldRateLimit.total_requests: "));
        counts.any(|count| count.parse::<u64>().unwrap() > 1).then_some(())
    });
    kit::signal::interrupt(&child);
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("no limit applies: no rule of the domain matches") && text.contains(" OK; "), "{text}");
}

#[test]
fn address_of_the_debug_listener_may_be_in_the_environment() {
    let server = with_rules(GOOD).env("TOLLKEEPER_DRAIN_PERIOD", "0s").start();
    let address = format!("127.0.0.1:{}", server.debug_port());
    for command in [&["top"][..], &["quota"], &["explain", "--domain", "good", "--descriptor", "a=b"]] {
        let ended = Run { env: &[("TOLLKEEPER_ADDR", &address)], ..Run::default() }.with(command);
        // Quotas are off here, and this is what the server says.
        assert!(ended.code == 0 || ended.stderr.contains("TOLLKEEPER_RLQS"), "{command:?}: {ended:?}");
    }
    let ended = Run { env: &[("TOLLKEEPER_ADDR", "nowhere")], ..Run::default() }.with(&["top"]);
    assert_eq!(ended.code, 2, "{ended:?}");
}

#[test]
fn address_of_the_service_may_be_in_the_environment() {
    let server = with_rules(GOOD).start();
    let address = format!("127.0.0.1:{}", server.grpc_port());
    let call = ["call", "--domain", "good", "--descriptor", "a=b"];
    let ended = Run { env: &[("TOLLKEEPER_GRPC_ADDR", &address)], ..Run::default() }.with(&call);
    assert!(ended.code == 0 && ended.stdout.contains("OK in "), "{ended:?}");
}

#[test]
fn verdicts_have_colors_unless_no_color_is_set() {
    let rules = "domain: shop\ndescriptors:\n- {key: a, rate_limit: {unit: day, requests_per_unit: 1}}\n";
    let server = with_rules(rules).start();
    let address = format!("127.0.0.1:{}", server.grpc_port());
    let call = ["call", "--addr", &address, "--domain", "shop", "--descriptor", "a=OK", "--count", "2"];
    let output = |env: &[(&str, &str)]| Run { env, ..Run::default() }.with(&call).stdout;
    let [green, red] = ["\u{1b}[32mOK\u{1b}[0m", "\u{1b}[31mOVER_LIMIT\u{1b}[0m"];
    let colored = output(&[("CLICOLOR_FORCE", "1")]);
    assert!(colored.contains(&format!(" {green} ")) && colored.contains(&format!(" {red} ")), "{colored:?}");
    assert!(colored.contains("a=OK") && colored.contains(&format!("1 {red}; ")), "{colored:?}");
    assert!(!output(&[]).contains('\u{1b}'), "no terminal");
    assert!(!output(&[("NO_COLOR", "1")]).contains('\u{1b}'));
}

#[test]
fn serve_has_flags_for_a_first_contact() {
    let redis = kit::redis::options().start();
    let port = Port::reserve();
    let setup = with_rules(GOOD).env("REDIS_URL", "127.0.0.1:1").env("GRPC_PORT", "1");
    let setup = setup.env("TOLLKEEPER_STORE_TIMEOUT", "5s");
    let setup = setup.arg("--redis").arg(redis.address()).arg("--port").arg(port.number().to_string());
    let _server = setup.start();
    let address = format!("127.0.0.1:{}", port.number());
    let call = ["call", "--addr", &address, "--domain", "good", "--descriptor", "a=b", "--timeout", "10s"];
    let called = run(&call);
    assert_eq!(called.code, 0, "{called:?}");
    assert!(format!("{:?}", redis.command(&["KEYS", "tk1:{good*"]).unwrap()).contains("a=b"));
    let refused = run(&["serve", "--port", "70000"]);
    assert!(refused.code == 2 && refused.stderr.contains("--port"), "{refused:?}");
}

#[test]
fn call_says_that_an_entry_is_blocked() {
    let server = with_rules(GOOD).env("TOLLKEEPER_ADMIN_TOKEN", "0123456789abcdef").start();
    let address = format!("127.0.0.1:{}", server.debug_port());
    let token = [("TOLLKEEPER_ADMIN_TOKEN", "0123456789abcdef")];
    let block = ["block", "--addr", &address, "--domain", "good", "--key", "a", "--value", "b", "--for", "1h"];
    let block = [&block[..], &["--reason", "abuse"]].concat();
    let blocked = Run { env: &token, ..Run::default() }.with(&block);
    assert_eq!(blocked.code, 0, "{blocked:?}");
    let service = format!("127.0.0.1:{}", server.grpc_port());
    let called = run(&["call", "--addr", &service, "--domain", "good", "--descriptor", "a=b"]);
    assert!(called.stdout.contains("an entry is blocked (`tollkeeper blocks`"), "{called:?}");
}

#[test]
fn call_prints_latencies_of_seconds_with_their_digits() {
    let rules = "domain: shop\ndescriptors:\n- {key: a, rate_limit: {unit: minute, requests_per_unit: 40, algorithm: leaky_bucket, queue_size: 2}}\n";
    let server = with_rules(rules).start();
    // The second waits for a second and a half.
    let delayed = call(&server, &["--descriptor", "a=b", "--count", "2"]);
    let times = delayed.stdout.trim_end().rsplit_once("; ").unwrap().1;
    let longest = times.rsplit_once(", ").unwrap().1.strip_suffix(" s longest");
    let seconds: f64 = longest.and_then(|seconds| seconds.parse().ok()).unwrap_or_else(|| panic!("{delayed:?}"));
    assert!((1.3..1.99).contains(&seconds), "{delayed:?}");
}

#[test]
fn call_prints_one_json_line_per_response() {
    let server = with_rules(SHOP).start();
    let ended = call(&server, &["--descriptor", "login=ann", "--json", "--count", "6"]);
    let lines: Vec<Value> = ended.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let codes: Vec<&str> = lines.iter().map(|line| line["overallCode"].as_str().unwrap()).collect();
    assert_eq!(codes, ["OK", "OK", "OK", "OK", "OK", "OVER_LIMIT"], "{ended:?}");
    assert_eq!(lines[1]["statuses"][0]["limitRemaining"], 3);
}

#[test]
fn call_accepts_a_json_request_and_peeks() {
    let server = with_rules(SHOP).start();
    let address = format!("127.0.0.1:{}", server.grpc_port());
    let remaining = |ended: &ExitResult| ended.json()["statuses"][0]["limitRemaining"].as_u64();
    let peek = || remaining(&call(&server, &["--descriptor", "login=ann", "--json", "--hits", "0"]));
    assert_eq!(peek(), Some(5));
    assert_eq!(remaining(&call(&server, &["--descriptor", "login=ann", "--json", "--hits", "4"])), Some(1));
    assert_eq!(peek(), Some(1));
    let refund = r#"{"domain": "shop", "descriptors": [{"entries": [{"key": "login", "value": "ann"}], "hitsAddend": 3, "isNegativeHits": true}]}"#;
    let ended = Run { stdin: refund, ..Run::default() }.with(&["call", "--addr", &address, "--request", "-", "--json"]);
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(peek(), Some(4));
}

#[test]
fn call_connects_to_a_unix_socket() {
    let directory = directory(&[]);
    let socket = directory.path().join("grpc.sock");
    let server = with_rules(SHOP).env("GRPC_UDS", socket.to_str().unwrap()).start();
    let address = format!("unix:{}", socket.display());
    let ended = run(&["call", "--addr", &address, "--domain", "shop", "--descriptor", "login=ann"]);
    assert_eq!(ended.code, 0, "{ended:?} {}", server.stderr());
    assert!(ended.stdout.contains("5 per minute"), "{ended:?}");
}

#[test]
fn unreachable_server_is_named_in_one_line() {
    let unreachable = Port::reserve();
    let server = with_rules(SHOP).start();
    let (unreachable, server_http) =
        (format!("127.0.0.1:{}", unreachable.number()), format!("127.0.0.1:{}", server.grpc_port()));
    let cases: &[(&[&str], &str)] = &[
        (
            &["call", "--addr", &unreachable, "--domain", "d", "--descriptor", "a=b"],
            "Connection refused (os error 111); is the service running there?",
        ),
        (
            &["call", "--addr", "unix:/nowhere", "--domain", "d", "--descriptor", "a=b"],
            "unix:/nowhere cannot be reached: No such file",
        ),
        (
            &["call", "--addr", &server_http, "--domain", "", "--descriptor", "a=b"],
            "answered InvalidArgument: rate limit domain must not be empty",
        ),
        (&["explain", "--addr", &unreachable, "--domain", "d", "--descriptor", "a=b"], "Connection refused"),
        (
            &["explain", "--addr", "unix:/nowhere", "--domain", "d", "--descriptor", "a=b"],
            "no unix socket; give HOST:PORT",
        ),
    ];
    for (arguments, expected) in cases {
        let ended = run(arguments);
        assert_eq!((ended.code, ended.stdout.as_str()), (1, ""), "{ended:?}");
        assert!(ended.stderr.contains(expected) && ended.stderr.lines().count() == 1, "{ended:?}");
    }
}

#[test]
fn bad_usage_names_the_flag_and_a_fix() {
    let domain_args = ["--domain", "d", "--descriptor"];
    let call = |more: &[&'static str]| [&["call"], domain_args.as_slice(), more].concat();
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["check"], "<PATH>..."),
        (vec!["check", "--format", "xml", "x"], "[possible values: text, json]"),
        (vec!["call", "--domain", "d"], "--descriptor <K=V,K=V>"),
        (vec!["call", "--descriptor", "a=b"], "--domain <DOMAIN>"),
        (call(&["a"]), "`a` has no `=`; write key=value"),
        (call(&["a=b,,c=d"]), "`` has no `=`"),
        (call(&[r"a=\n"]), r"write `\\` for one"),
        (call(&["a=b", "--timeout", "20"]), "write 20s for seconds"),
        (call(&["a=b", "--count", "0"]), "1..=1000000"),
        (call(&["a=b", "--addr", "http://localhost:1"]), "give HOST:PORT, such as 127.0.0.1:8081, or unix:PATH"),
        (call(&["a=b", "--request", "x"]), "cannot be used with"),
        (vec!["call", "--request", "/nowhere"], "--request /nowhere: No such file"),
        (vec!["call", "--request", "/dev/null"], "--request /dev/null: EOF"),
        (
            vec!["explain", "--config", "x", "--addr", "y:1", "--domain", "d", "--descriptor", "a=b"],
            "cannot be used with",
        ),
        (vec!["--config", "x", "schema"], "cannot be used with"),
        (
            vec!["bench", "--addr", "localhost:8081", "--domain", "d"],
            "run cargo run --release --manifest-path tests/bench/",
        ),
        (vec!["bench", "--help"], "removed from this program"),
        (vec!["check", "--addr", "localhost:6070", "rules.yaml"], "top --rules --addr HOST:PORT --finding slots_not"),
        (vec!["check", "--log", "decisions.jsonl"], "--finding reservations_not_settled"),
        (vec!["chekc"], "some similar subcommands exist"),
        (vec!["serve", "rules.yaml"], "tip: write `--config rules.yaml`"),
        (vec!["rules.yaml"], "tip: write `--config rules.yaml`"),
        (vec!["serve", "tests"], "tip: write `--config tests`"),
    ];
    for (arguments, expected) in cases {
        let ended = run(&arguments);
        assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{arguments:?} {ended:?}");
        assert!(ended.stderr.contains(expected), "{arguments:?}: {}", ended.stderr);
    }
}

#[test]
fn every_command_has_help() {
    for command in ["serve", "check", "explain", "call", "schema", "settings"] {
        let ended = run(&[command, "--help"]);
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{command}");
        assert!(ended.stdout.contains(&format!("Usage: tollkeeper {command}")), "{}", ended.stdout);
        assert!(ended.stdout.lines().all(|line| line.chars().count() <= 120), "{}", ended.stdout);
        assert!(ended.stdout.contains("Exit codes: 0"), "{}", ended.stdout);
        assert!(run(&["help"]).stdout.contains(&format!("\n  {command}  ")));
    }
    assert_eq!(run(&["--version"]).stdout, format!("tollkeeper {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn settings_command_prints_what_people_set_and_with_all_every_variable() {
    let vars = [("REDIS_URL", "redis://:hunter2@h:1"), ("TOLLKEEPER_TABLE_BYTES", "2MiB"), ("PROMETHEUS_PATH", "/m")];
    let printed = |arguments: &[&str]| {
        let ended = Run { env: &vars, ..Run::default() }.with(arguments);
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{ended:?}");
        ended.stdout
    };
    let names = |text: &str| {
        let rows = text.lines().filter_map(|line| line.strip_prefix("* ").or(line.strip_prefix("  "))?.split_once('='));
        let names =
            rows.filter(|(name, _)| name.bytes().all(|b| b.is_ascii_uppercase() || b"_0123456789".contains(&b)));
        names.map(|(name, _)| name.to_owned()).collect::<Vec<_>>()
    };
    let (few, all) = (printed(&["settings"]), printed(&["settings", "--all"]));
    let often_set = all_settings().filter(|setting| setting.info().is_often_set).count();
    assert_eq!((often_set, names(&few).len()), (40, 42), "{few}");
    let declared = all_settings().filter(|setting| !setting.info().is_variable_family()).count();
    assert_eq!(names(&all).len(), declared);
    assert!(few.ends_with(&format!("\n--all prints {} more\n", declared - 42)), "{few}");
    for text in [&few, &all] {
        assert!(!text.contains("hunter2") && text.lines().all(|line| line.len() <= 100), "{text}");
        for row in [
            "\n* REDIS_URL=redis://***@h:1\n",
            "\n* TOLLKEEPER_TABLE_BYTES=2MiB\n",
            "\n  GRPC_PORT=8081\n",
            "\n* PROMETHEUS_PATH=/m\n      path of the metrics page\n      has no effect: it is only read with USE_PROMETHEUS=true\n",
        ] {
            assert!(text.contains(row), "{row}: {text}");
        }
    }
}

#[test]
fn schema_command_prints_the_committed_schema() {
    let ended = run(&["schema"]);
    assert_eq!(
        (ended.code, ended.json()),
        (0, serde_json::from_str(&read(&repository("config/rules.schema.json"))).unwrap())
    );
    let ended = run(&["schema", "--defaults"]);
    let committed = read(&repository("config/rule-defaults.schema.json"));
    assert_eq!((ended.code, ended.json()), (0, serde_json::from_str(&committed).unwrap()));
}

#[test]
fn manual_pages_and_completions_come_from_the_command_line() {
    let page = run(&["man"]);
    assert!(page.code == 0 && page.stdout.contains(".TH tollkeeper 1"), "{page:?}");
    let page = run(&["man", "check"]);
    assert!(page.code == 0 && page.stdout.contains(".TH tollkeeper-check 1"), "{page:?}");
    assert!(page.stdout.contains("Exit codes"), "{page:?}");
    for name in ["chek", "bench"] {
        let refused = run(&["man", name]);
        assert_eq!((refused.code, refused.stdout.as_str()), (2, ""));
        assert!(refused.stderr.contains(&format!("no command '{name}'")), "{refused:?}");
    }
    let files = tempfile::tempdir().unwrap();
    let pages = files.path().join("share/man1");
    assert_eq!(run(&["man", "--dir", pages.to_str().unwrap()]).code, 0);
    for page in ["tollkeeper.1", "tollkeeper-serve.1", "tollkeeper-why.1"] {
        assert!(pages.join(page).is_file(), "{page}");
    }
    assert!(!pages.join("tollkeeper-bench.1").exists(), "it is hidden");
    let refused = run(&["man", "--dir", "/proc/none"]);
    assert!(refused.code == 1 && refused.stderr.contains("/proc/none"), "{refused:?}");
    for (shell, text) in
        [("bash", "complete -F _tollkeeper"), ("zsh", "#compdef tollkeeper"), ("fish", "complete -c tollkeeper")]
    {
        let script = run(&["completions", shell]);
        assert!(script.code == 0 && script.stdout.contains(text) && script.stdout.contains("explain"), "{shell}");
    }
    assert_eq!(run(&["completions", "cmd"]).code, 2);
}

#[test]
fn check_and_explain_apply_defaults_of_rules() {
    let log = "defaults: {\"*\": {algorithm: sliding_window_log}}\n";
    let large = "domain: large\ndescriptors:\n  - {key: a, rate_limit: {unit: day, requests_per_unit: 99999}}\n";
    let wrong = "defaults: {good: {algoritm: fixed_window}}\n";
    let files = [("good.yaml", GOOD), ("large.yaml", large), ("log.yml", log), ("wrong.yml", wrong)];
    let directory = directory(&files);
    let run = |arguments: &[&str], env: &[(&str, &str)]| {
        Run { directory: directory.path(), env, ..Run::default() }.with(arguments)
    };
    let finding = "large.yaml:3:26: warning: the default `algorithm: sliding_window_log` of log.yml:1:18 is left out: ";
    for (arguments, env) in [
        (&["check", "--defaults", "log.yml", "good.yaml", "large.yaml"][..], &[][..]),
        (&["check", "good.yaml", "large.yaml"], &[("TOLLKEEPER_RULE_DEFAULTS", "log.yml")]),
    ] {
        let ended = run(arguments, env);
        let last = "2 files, 0 errors, 1 warning";
        assert_eq!((ended.code, ended.stdout.lines().last()), (0, Some(last)), "{ended:?}");
        assert!(ended.stdout.starts_with(finding), "{ended:?}");
    }
    let ended = run(&["check", "--defaults", "log.yml"], &[]);
    assert_eq!((ended.code, ended.stdout.as_str()), (0, "0 files, 0 errors, 0 warnings\n"), "{ended:?}");
    let ended = run(&["check", "--defaults", "wrong.yml"], &[]);
    assert_eq!(ended.code, 1, "{ended:?}");
    assert!(
        ended.stdout.starts_with("wrong.yml:1:19: config error, unknown key 'algoritm', did you mean"),
        "{ended:?}"
    );
    let env = [("TOLLKEEPER_RULE_DEFAULTS", "gone.yml")];
    let ended = run(&["check", "--env"], &env);
    assert!(ended.code == 1 && ended.stdout.contains("unusable"), "{ended:?}");

    let explain = ["explain", "--config", "good.yaml", "--domain", "good", "--descriptor", "a=1"];
    let ended = run(&explain, &[("TOLLKEEPER_RULE_DEFAULTS", "log.yml")]);
    assert!(ended.stdout.contains("1 per day by sliding_window_log"), "{ended:?}");
}

#[test]
fn explain_shows_the_promise_of_a_global_limit() {
    let rules = |keys: &str| {
        let limit = format!("{{unit: minute, requests_per_unit: 6000, scope: global{keys}}}");
        format!("domain: good\ndescriptors:\n  - {{key: a, rate_limit: {limit}}}\n")
    };
    let (share, allow) = (rules(""), rules(", reserve: 5%, on_region_loss: allow"));
    let lent = rules(", consistency: eventual");
    let directory = directory(&[("share.yaml", &share), ("allow.yaml", &allow), ("lent.yaml", &lent)]);
    let explained = |file: &str, env: &[(&str, &str)]| {
        let explain = ["explain", "--config", file, "--domain", "good", "--descriptor", "a=1"];
        Run { directory: directory.path(), env, ..Run::default() }.with(&explain).stdout
    };
    let regions = [
        ("BACKEND_TYPE", "redis"),
        ("REDIS_URL", "127.0.0.1:1"),
        ("TOLLKEEPER_REGION", "eu"),
        ("TOLLKEEPER_REGIONS", "eu,us,asia"),
        ("TOLLKEEPER_GLOBAL_REDIS_URL", "127.0.0.1:2"),
    ];
    let text = explained("share.yaml", &regions);
    assert!(
        text.contains(
            "6000 per minute by fixed_window, scope global, reserve 10%, max_overshoot 5%, on_region_loss share"
        ),
        "{text}"
    );
    assert!(text.contains("all 3 regions together admit at most 5 % more than one region with this limit"), "{text}");
    assert!(text.contains("reserve of a region: 200; "), "{text}");
    assert!(text.contains("beyond what it holds: 225 per period (on_region_loss: share)"), "{text}");
    let text = explained("allow.yaml", &regions);
    assert!(text.contains("no bound over all 3 regions while one is cut off"), "{text}");
    assert!(text.contains("any number (on_region_loss: allow)"), "{text}");
    let text = explained("lent.yaml", &regions);
    assert!(
        text.contains("all 3 regions together") && text.contains("; replicas lease hits of their region"),
        "{text}"
    );
    let text = explained("share.yaml", &[]);
    assert!(text.contains("strict: every admitted hit") && !text.contains("scope global"), "{text}");
}

#[test]
fn closed_stdout_is_not_an_error() {
    let mut child = Command::new(program_path())
        .arg("schema")
        .env_clear()
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), b"".as_slice()));
}

#[test]
fn readme_example_works() {
    let readme = read(&repository("README.md"));
    let line = readme.lines().find_map(|line| line.trim().strip_prefix("cargo run -- call ")).unwrap();
    let server = with_rules(&read(&repository("config/example.yaml"))).start();
    let address = format!("127.0.0.1:{}", server.grpc_port());
    let arguments: Vec<&str> = ["call", "--addr", &address].into_iter().chain(line.split_whitespace()).collect();
    let ended = run(&arguments);
    assert!(ended.stdout.contains("\n5 OK, 1 OVER_LIMIT; "), "{ended:?}");
}

#[test]
fn config_check_cmd_matches_envoyproxy_ratelimit() {
    let names = directory(&[]);
    let program = linked_as(names.path(), "config_check_cmd");
    let good = directory(&[("b.conf", GOOD), (".a", "domain: other")]);
    let bad = directory(&[("bad", BAD)]);
    let twice = directory(&[("a", GOOD), ("b", &GOOD.replace("key: a", "key: b"))]);
    fs::create_dir(good.path().join("..2026_01")).unwrap();
    let start =
        |dir: &TempDir| format!("checking rate limit configs...\nloading config directory: {}\n", dir.path().display());
    let opening = |dir: &TempDir, file: &str| format!("opening config file: {}/{file}\n", dir.path().display());
    let in_bad = format!("error loading rate limit configs: {}/bad", bad.path().display());
    let in_twice = format!(
        "error loading rate limit configs: {}/b:1:1: duplicate domain 'good' in config file",
        twice.path().display()
    );
    let cases = [
        (
            &good,
            vec!["-config_dir", "DIR"],
            0,
            start(&good) + &opening(&good, ".a") + &opening(&good, "b.conf") + "all rate limit configs ok\n",
        ),
        (
            &bad,
            vec!["--config_dir=DIR"],
            1,
            start(&bad)
                + &opening(&bad, "bad")
                + &in_bad
                + ":4:5: config error, unknown key 'Value', did you mean `value`?\n"
                + &in_bad
                + ":5:18: invalid rate limit unit 'days', did you mean `day`?\n",
        ),
        (&twice, vec!["-config_dir=DIR"], 1, start(&twice) + &opening(&twice, "a") + &opening(&twice, "b") + &in_twice),
        (
            &twice,
            vec!["-merge_domain_configs", "-config_dir", "DIR"],
            0,
            start(&twice) + &opening(&twice, "a") + &opening(&twice, "b") + "all rate limit configs ok\n",
        ),
    ];
    for (directory, arguments, code, expected) in cases {
        let path = directory.path().to_str().unwrap();
        let arguments: Vec<String> = arguments.iter().map(|argument| argument.replace("DIR", path)).collect();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let ended = Run { program: &program, ..Run::default() }.with(&arguments);
        assert_eq!(ended.code, code, "{ended:?}");
        assert!(ended.stdout.starts_with(&expected), "{arguments:?}: {}", ended.stdout);
    }
    for (arguments, code, expected) in [
        (["-config_dir", "/nowhere"], 1, "error opening directory /nowhere: No such file or directory"),
        (["-nope", ""], 2, "unexpected argument '--nope'"),
        (["-merge_domain_configs=maybe", ""], 2, "not a bool; give true or false"),
        (["-merge_domain_configs", "-config_dir"], 2, "a value is required for '--config_dir"),
    ] {
        let ended = Run { program: &program, ..Run::default() }.with(&arguments);
        assert_eq!(ended.code, code, "{ended:?}");
        assert!((ended.stdout + &ended.stderr).contains(expected), "{arguments:?}");
    }
}

#[test]
fn client_cmd_says_what_to_use_instead() {
    let names = directory(&[]);
    let program = linked_as(names.path(), "client_cmd");
    let ended = Run { program: &program, ..Run::default() }.with(&["-dial_string", "localhost:8081", "-domain=d"]);
    assert_eq!(ended.code, 2, "{ended:?}");
    assert!(ended.stderr.contains("removed (run tollkeeper call "), "{ended:?}");
}

#[test]
fn invoked_as_ratelimit_it_serves_and_warns_of_unknown_arguments() {
    let server = with_rules(SHOP).invoked_as("ratelimit", &["--frobnicate", "serve"]).start();
    assert_eq!(call(&server, &["--descriptor", "login=ann"]).code, 0);
    for argument in ["--frobnicate", "serve"] {
        let warning = format!("tollkeeper: {argument}: this argument has no effect\n");
        assert!(server.stderr().contains(&warning), "{}", server.stderr());
    }
}

mod latencies {
    use tollkeeper::tools::cli::print::format_latency;

    #[test]
    fn latencies_have_three_digits_from_a_second_on() {
        for (micros, text) in [
            (999_949, "999.9 ms"),
            (1_000_000, "1.00 s"),
            (1_234_567, "1.23 s"),
            (9_994_999, "9.99 s"),
            (9_995_000, "10.0 s"),
            (75_250_000, "75.2 s"),
            (99_950_000, "100 s"),
            (150_000_000, "2 min 30 s"),
        ] {
            assert_eq!(format_latency(micros), text);
        }
    }
}

#[test]
fn diff_lists_the_limits_that_differ() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, limit: u32| {
        let rules = format!(
            "domain: shop\ndescriptors:\n- {{key: user, rate_limit: {{unit: minute, requests_per_unit: {limit}}}}}\n"
        );
        fs::write(directory.path().join(name), rules).unwrap();
    };
    write("old.yaml", 300);
    write("new.yaml", 5);
    let run = Run { directory: directory.path(), ..Run::default() };
    let differ = run.with(&["diff", "old.yaml", "new.yaml"]);
    assert_eq!(differ.stdout, "shop.user 300 -> 5 a minute\n1 changed, 0 added, 0 removed\n", "{differ:?}");
    assert_eq!(differ.code, 0);
    assert_eq!(
        run.with(&["diff", "old.yaml", "old.yaml"]).stdout,
        "no limit changed (bodies, metadata and tables are not compared)\n"
    );
    assert_eq!(run.with(&["diff", "--json", "old.yaml", "new.yaml"]).json()["changed"], 1);
    let plans = |gold| {
        let limit = |number| format!("{{unit: day, requests_per_unit: {number}}}");
        let plans = format!(
            "domain: shop\nplans: {{free: {}, gold: {}}}\ntables: {{who: {{file: who.csv}}}}\n",
            limit(1),
            limit(gold)
        );
        plans + "descriptors:\n- {key: user, plan: {from: who, default: free}}\n"
    };
    fs::write(directory.path().join("who.csv"), "value,plan\nann,gold\n").unwrap();
    fs::write(directory.path().join("old.yaml"), plans(2)).unwrap();
    fs::write(directory.path().join("new.yaml"), plans(3)).unwrap();
    let differ = run.with(&["diff", "old.yaml", "new.yaml"]);
    assert_eq!(differ.stdout, "shop.user.gold 2 -> 3 a day\n1 changed, 0 added, 0 removed\n", "{differ:?}");
    let missing = run.with(&["diff", "old.yaml", "gone.yaml"]);
    assert!(missing.code == 1 && missing.stderr.contains("gone.yaml"), "{missing:?}");
}

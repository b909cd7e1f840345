//! `tollkeeper-bench`: key spaces, templates, judgement of verdicts, runs against a server, and the examples of its help.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, its helpers too")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Output};

use proptest::prelude::*;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use serde_json::Value;
use tollkeeper::base::pb::RateLimitRequest;
use tollkeeper_bench::requests::{KeySpace, PlaceholderValues, RequestMix, RequestTemplate};
use tollkeeper_bench::results::{CounterAccuracy, TimedVerdict, measure_accuracy};

use kit::redis::certificates::Certificates;
use kit::tollkeeper::{Setup, inherited_env, with_rules};
use kit::{grpc, port::Port};

/// The program under test; the kit starts the servers that it loads.
const PROGRAM: &str = env!("CARGO_BIN_EXE_tollkeeper-bench");

fn sampled(keys: &str, count: usize) -> BTreeMap<u64, usize> {
    let sampler = keys.parse::<KeySpace>().unwrap().build_sampler();
    let mut random = SmallRng::seed_from_u64(1);
    let mut met = BTreeMap::new();
    (0..count).for_each(|_| *met.entry(sampler.sample_key(&mut random)).or_default() += 1);
    met
}

#[test]
fn key_spaces_have_the_named_distribution() {
    assert_eq!(sampled("one", 10), BTreeMap::from([(0, 10)]));
    let uniform = sampled("uniform:10", 10_000);
    assert!(uniform.keys().copied().eq(0..10) && uniform.values().all(|met| (850..1150).contains(met)), "{uniform:?}");
    // Of 100 keys by Zipf's law, the first is met 1/H(100) = 0.193 of the time, the tenth a tenth of that.
    let zipf = sampled("zipf:100", 100_000);
    assert!((18_500..20_100).contains(&zipf[&0]) && (1700..2150).contains(&zipf[&9]), "{zipf:?}");
    assert!(*zipf.keys().next_back().unwrap() < 100);
    // With the exponent 2 it is 1 of 1.635, and a quarter of that.
    let steep = sampled("zipf:100:2", 100_000);
    assert!((60_300..62_000).contains(&steep[&0]) && (14_700..15_900).contains(&steep[&1]), "{steep:?}");
    for bad in ["", "two", "uniform", "uniform:0", "uniform:x", "zipf:10:-1", "zipf:10:11", "zipf:10:NaN", "zipf:1:1:1"]
    {
        assert!(bad.parse::<KeySpace>().is_err(), "{bad}");
    }
    for good in ["one", "uniform:1000000", "zipf:10:1.1"] {
        assert_eq!(good.parse::<KeySpace>().unwrap().to_string(), good);
    }
}

fn template(entries: &[(&str, &str)]) -> Result<RequestTemplate, String> {
    RequestTemplate::new(grpc::rate_limit_request("shop", entries), "abcdefgh")
}

#[test]
fn placeholders_are_replaced_per_request() {
    let mut random = SmallRng::seed_from_u64(1);
    let mut fill = |value: &str| {
        let template = template(&[("user", value)]).unwrap();
        let request: RateLimitRequest =
            template.fill_placeholders(&mut PlaceholderValues { key: 7, number: 9, random: &mut random });
        String::from_utf8(request.descriptors[0].entries[0].value.to_vec()).unwrap()
    };
    for (written, meant) in [
        ("", ""),
        ("ann", "ann"),
        ("u{key}", "u7"),
        ("{key}{n}-{run}", "79-abcdefgh"),
        ("{{key}", "{key}"),
        ("{random:1}}", "0}"),
    ] {
        assert_eq!(fill(written), meant, "{written}");
    }
    assert!((0..50).map(|_| fill("{random:3}")).all(|number| ["0", "1", "2"].contains(&&*number)));
    for bad in ["{", "{key", "{kay}", "{random:0}", "{random:x}", "{}"] {
        let error = template(&[("user", bad)]).unwrap_err();
        assert!(error.contains(bad) && error.contains("{key}"), "{error}");
    }
}

#[test]
fn request_mix_follows_the_weights() {
    let mix = RequestMix::new([1, 0, 3].map(|weight| (weight, template(&[("user", "ann")]).unwrap()))).unwrap();
    let mut random = SmallRng::seed_from_u64(1);
    let mut met = [0; 3];
    (0..4000).for_each(|_| met[mix.sample_template(&mut random).0] += 1);
    assert!((900..1100).contains(&met[0]) && met[1] == 0, "{met:?}");
    assert!(RequestMix::new([(0, template(&[]).unwrap())]).is_err());
}

fn verdicts(all: &[(u64, bool)]) -> Vec<TimedVerdict> {
    all.iter().map(|&(at_us, admitted)| TimedVerdict { at_us, hits: 1, admitted }).collect()
}

#[test]
fn burst_across_a_window_boundary_is_judged_wrongly_admitted() {
    // Two in 10 us; a fixed window lets four pass around 20.
    let all = verdicts(&[(18, true), (19, true), (20, true), (21, true), (22, false), (29, false)]);
    let expected = CounterAccuracy {
        requested: 6,
        admitted: 4,
        max_in_a_period: 4,
        max_in_a_window: 2,
        // The log has room again at 28, for the one of 29.
        wrongly_admitted: 2,
        wrongly_rejected: 1,
    };
    assert_eq!(measure_accuracy(&all, 2, 10), expected);
}

proptest! {
    #[test]
    fn verdicts_of_a_sliding_window_log_are_never_judged_wrong(
        gaps in prop::collection::vec((0_u64..50, 1_u64..4), 1..200),
        limit in 1_u64..12,
        period in 1_u64..200,
    ) {
        // By definition: the hits admitted in the period that ends now.
        let mut all: Vec<TimedVerdict> = Vec::new();
        let mut now = 0;
        for (gap, hits) in gaps {
            now += gap;
            let recent = all.iter().filter(|one| one.admitted && one.at_us + period > now);
            let used: u64 = recent.map(|one| one.hits).sum();
            all.push(TimedVerdict { at_us: now, hits, admitted: used + hits <= limit });
        }
        let accuracy = measure_accuracy(&all, limit, period);
        prop_assert_eq!((accuracy.wrongly_admitted, accuracy.wrongly_rejected), (0, 0));
        prop_assert!(accuracy.max_in_a_period <= limit && accuracy.max_in_a_window <= limit);
    }

    #[test]
    fn most_admitted_in_a_period_and_window_is_exact(
        gaps in prop::collection::vec((0_u64..50, any::<bool>()), 1..100),
        period in 1_u64..200,
    ) {
        let mut now = 0;
        let all: Vec<_> = gaps.iter().map(|(gap, admitted)| { now += gap; (now, *admitted) }).collect();
        let passed = || all.iter().filter(|(_, admitted)| *admitted).map(|(at, _)| *at);
        let max_admitted = |from: &dyn Fn(u64) -> u64| {
            let in_period = |at: u64| passed().filter(|other| (from(at)..from(at) + period).contains(other)).count();
            passed().map(in_period).max().unwrap_or(0) as u64
        };
        let accuracy = measure_accuracy(&verdicts(&all), 1, period);
        prop_assert_eq!(accuracy.max_in_a_period, max_admitted(&|at| at));
        prop_assert_eq!(accuracy.max_in_a_window, max_admitted(&|at| at / period * period));
    }
}

fn bench(arguments: &[&str]) -> Output {
    bench_after("0s", arguments)
}

fn bench_after(warm_up: &str, arguments: &[&str]) -> Output {
    let common = ["--warm-up", warm_up, "--duration", "500ms", "--connections", "2", "--timeout", "20s"];
    Command::new(PROGRAM).args(arguments).args(common).env_clear().envs(inherited_env()).output().unwrap()
}

fn found(output: &Output) -> Value {
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

const RULES: &str = "
domain: shop
descriptors:
  - key: strict
    rate_limit: { unit: hour, requests_per_unit: 20, algorithm: sliding_window_log }
  - key: lax
    shadow_mode: true
    rate_limit: { unit: hour, requests_per_unit: 20 }
  - key: minutes
    rate_limit: { unit: minute, unit_multiplier: 90, requests_per_unit: 20 }
  - key: paced
    rate_limit: { unit: second, requests_per_unit: 50, algorithm: leaky_bucket, queue_size: 9 }
";

#[test]
fn report_shows_load_and_accuracy() {
    let server = with_rules(RULES).start();
    let (address, pid) = (format!("127.0.0.1:{}", server.grpc_port()), server.id().to_string());
    let run = |more: &[&str]| found(&bench(&[&["--addr", &address, "--domain", "shop", "--json"], more].concat()));

    let closed = run(&["--descriptor", "strict={run}{key}", "--keys", "uniform:3", "--streams", "4", "--pid", &pid]);
    let (responses, limit) = (closed["answers"].as_u64().unwrap(), &closed["limits"][0]);
    assert!(responses > 60, "{closed}");
    assert_eq!([&limit["limit"], &limit["counters"], &limit["admitted"], &limit["max_in_a_period"]], [20, 3, 60, 20]);
    assert_eq!(limit["counters_over_in_a_period"], 0, "{closed}");
    assert!(limit["requested"].as_u64() >= Some(responses), "{closed}");
    assert!(closed["verdicts"]["over_limit"].as_u64() >= Some(responses - 60), "{closed}");
    assert!(closed["server"]["cpu_us_per_answer"].as_f64() > Some(0.0), "{closed}");
    assert!(closed["server"]["resident_bytes"].as_u64() > Some(1_000_000), "{closed}");
    assert!(closed["latency_us"]["p99"].as_u64() > Some(0) && closed["send_delay_us"].is_null(), "{closed}");

    // A limit that admits too much is detected.
    let lax = &run(&["--descriptor", "lax={run}", "--streams", "4"])["limits"][0];
    assert_eq!(lax["counters_over_in_a_period"], 1, "{lax}");
    assert_eq!(lax["requested"], lax["admitted"], "{lax}");
    assert_eq!(lax["wrongly_admitted"].as_u64(), lax["requested"].as_u64().map(|requested| requested - 20), "{lax}");

    // An open loop sends only the calls that are due.
    let open = run(&["--descriptor", "strict={run}{n}", "--rate", "200", "--limit", "20/1h"]);
    assert_eq!([&open["answers"], &open["verdicts"]["ok"], &open["limits"][0]["counters"]], [100, 100, 100], "{open}");
    assert!(open["send_delay_us"]["max"].is_u64(), "{open}");

    // --limit takes precedence over the limit in responses.
    let stated = &run(&["--descriptor", "minutes={run}", "--limit", "20/90m"])["limits"][0];
    assert_eq!([&stated["period_seconds"], &stated["admitted"]], [5400.0, 20.0], "{stated}");
}

#[test]
fn warm_up_is_not_measured() {
    let server = with_rules(RULES).start();
    let address = format!("127.0.0.1:{}", server.grpc_port());
    let arguments = ["--addr", &address, "--domain", "shop", "--descriptor", "strict={run}", "--json"];
    let open = found(&bench_after("500ms", &[&arguments[..], &["--rate", "200"]].concat()));
    // All admissions were earlier.
    assert_eq!([&open["answers"], &open["verdicts"]["ok"], &open["verdicts"]["over_limit"]], [100, 0, 100], "{open}");
    // Counters include the warm-up, so a limit is judged from the start.
    assert_eq!([&open["limits"][0]["requested"], &open["limits"][0]["admitted"]], [200, 20], "{open}");
}

#[test]
fn latency_counts_from_the_scheduled_start() {
    let server = with_rules(RULES).start();
    let address = format!("127.0.0.1:{}", server.grpc_port());
    // Each connection has 50 calls in 500 ms, one in flight at a time; together they pass one per 20 ms. The last call
    // was due after 500 ms and ends after 2 s, although its own response took no more than 40 ms.
    let arguments = ["--addr", &address, "--domain", "shop", "--descriptor", "paced={run}", "--streams", "1", "--json"];
    let paced = found(&bench(&[&arguments[..], &["--rate", "200"]].concat()));
    assert_eq!(paced["verdicts"]["ok"], 100, "{paced}");
    let us = |of: &str, which: &str| paced[of][which].as_u64().unwrap();
    assert!(us("latency_us", "p50") > 500_000 && us("latency_us", "max") > 1_300_000, "{paced}");
    assert!(us("send_delay_us", "p50") > 500_000 && us("send_delay_us", "p50") < us("latency_us", "p50"), "{paced}");
    assert!(paced["later_than_20_ms"].as_u64() > Some(90), "{paced}");
}

#[test]
fn same_seed_gives_the_same_keys() {
    let server = with_rules(RULES).start();
    let address = format!("127.0.0.1:{}", server.grpc_port());
    let keys = ["--keys", "uniform:1000000000", "--hits", "20", "--rate", "200", "--streams", "1"];
    let arguments = ["--addr", &address, "--domain", "shop", "--descriptor", "strict={key}", "--json"];
    // Each counter admits the hits of one call.
    for (seed, passed) in [("1", 100), ("2", 100), ("1", 0)] {
        let found = found(&bench(&[&arguments[..], &keys, &["--seed", seed]].concat()));
        assert_eq!([&found["answers"], &found["verdicts"]["ok"]], [100, passed], "{seed}: {found}");
        assert_eq!([&found["limits"][0]["requested"], &found["limits"][0]["admitted"]], [2000, 20 * passed], "{found}");
    }
}

#[test]
fn closed_loop_keeps_the_given_concurrency() {
    let server = with_rules(RULES).start();
    let address = format!("127.0.0.1:{}", server.grpc_port());
    let arguments = ["--addr", &address, "--domain", "shop", "--descriptor", "paced={run}", "--json"];
    // The bucket has room for nine.
    for (streams, is_too_many) in [("4", false), ("5", true)] {
        let found = found(&bench(&[&arguments[..], &["--streams", streams]].concat()));
        assert_eq!(found["verdicts"]["over_limit"].as_u64() > Some(0), is_too_many, "{streams}: {found}");
    }
}

#[test]
fn failed_calls_are_reported_and_fail_the_run() {
    let server = with_rules(RULES).start();
    let address = format!("127.0.0.1:{}", server.grpc_port());
    let arguments = ["--addr", &address, "--domain", "", "--descriptor", "strict=a", "--rate", "200"];
    let output = bench(&[&arguments[..], &["--json"]].concat());
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), &found["answers"]), (Some(1), &Value::from(0)), "{found}");
    let errors = found["errors"].as_object().unwrap();
    let (why, count) = errors.iter().next().unwrap();
    assert!(errors.len() == 1 && why.contains("domain") && *count == 100, "{found}");
    assert_eq!(stderr, "tollkeeper: some calls got no response; see `errors`\n");
    let page = String::from_utf8(bench(&arguments).stdout).unwrap();
    assert!(page.contains(&format!("errors     100 times: {why}")), "{page}");
}

#[test]
fn several_requests_are_mixed_by_weight() {
    let server = with_rules(RULES).start();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mix.json");
    let request = |key: &str, value: &str| {
        format!(r#"{{"domain": "shop", "descriptors": [{{"entries": [{{"key": "{key}", "value": "{value}"}}]}}]}}"#)
    };
    let (often, seldom) = (request("strict", "{run}{n}"), request("unknown", "{key}"));
    fs::write(&path, format!(r#"[{{"weight": 3, "request": {often}}}, {{"request": {seldom}}}]"#)).unwrap();
    let address = format!("127.0.0.1:{}", server.grpc_port());
    let output = bench(&["--addr", &address, "--request", path.to_str().unwrap(), "--rate", "800", "--json"]);
    let found = found(&output);
    let share = found["unlimited"].as_u64().unwrap();
    assert!((60..140).contains(&share) && found["limits"][0]["requested"] == 400 - share, "{found}");

    fs::write(&path, "[]").unwrap();
    let output = bench(&["--request", path.to_str().unwrap()]);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr.contains("mix.json: a mix needs a request with a weight above 0"), "{stderr}");
}

fn over_tls(setup: Setup, certificates: &Certificates) -> Setup {
    let setup = setup.env("GRPC_SERVER_USE_TLS", "true");
    let setup = setup.env("GRPC_SERVER_TLS_CERT", certificates.path("server.crt"));
    setup.env("GRPC_SERVER_TLS_KEY", certificates.path("server.key"))
}

const USUAL: [&str; 5] = ["--domain", "shop", "--descriptor", "strict={run}{key}", "--addr"];

/// Runs the load so that it fails at once; returns the exit code and the error line.
fn failing_bench(address: &str, arguments: &[&str]) -> (i32, String) {
    let output = bench(&[&USUAL, &[address][..], arguments].concat());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.stdout.is_empty(), "{arguments:?}: it ran, and found {}", String::from_utf8_lossy(&output.stdout));
    (output.status.code().unwrap(), stderr)
}

#[test]
fn tls_load_trusts_the_given_authority() {
    let directory = tempfile::tempdir().unwrap();
    let certificates = Certificates::new(directory.path());
    let file = |name| certificates.path(name).to_str().unwrap().to_owned();
    let (ca, cert, key) = (file("ca.crt"), file("client.crt"), file("client.key"));
    let (trusting, showing) = (["--tls", "--ca", &ca], ["--cert", &cert, "--key", &key]);
    let (open, plain) = (over_tls(with_rules(RULES), &certificates).start(), with_rules(RULES).start());
    let mutual = over_tls(with_rules(RULES), &certificates).env("GRPC_CLIENT_TLS_CACERT", &ca).start();
    let [open, mutual, plain] = [&open, &mutual, &plain].map(|server| format!("localhost:{}", server.grpc_port()));
    for (address, more) in [(&open, &["--server-name", "127.0.0.1"][..]), (&open, &[]), (&mutual, &showing)] {
        let found = found(&bench(&[&USUAL, &[address.as_str()][..], &trusting, more, &["--json"]].concat()));
        assert!(found["answers"].as_u64() > Some(0) && found["errors"] == serde_json::json!({}), "{found}");
    }

    let other = file("other_ca.crt");
    let of_another = ["--tls", "--ca", &ca, "--cert", &cert, "--key", &file("server.key")];
    let name = |name| ["--tls", "--ca", &ca, "--server-name", name];
    for (address, arguments, code, said) in [
        (open.as_str(), &["--tls", "--ca", &other][..], 1, "UnknownIssuer; see --ca and --server-name"),
        (&open, &["--tls"], 1, "UnknownIssuer; see --ca and --server-name"),
        (&open, &name("elsewhere.example"), 1, "see --ca and --server-name"),
        (&open, &[], 1, "; the server may require TLS; see --tls"),
        (&plain, &trusting, 1, "; the server may not use TLS"),
        // With TLS 1.3 the handshake succeeds before the server checks the client certificate.
        (&mutual, &trusting, 1, "; the server may require a client certificate; see --cert"),
        (&open, &name("no name"), 2, "--server-name=no name: not a valid name for a certificate"),
        (&open, &["--tls", "--ca", "/nowhere"], 2, "--ca=/nowhere: it cannot be read: No such file"),
        (&open, &["--tls", "--ca", &key], 2, "no certificate in it; give one as PEM"),
        (&open, &of_another, 2, "not the key of --cert; give the pair"),
        ("unix:/run/toll", &trusting, 2, "--tls: TLS needs HOST:PORT; remove it for unix:/run/toll"),
    ] {
        let (ended, stderr) = failing_bench(address, arguments);
        assert_eq!((ended, stderr.lines().count()), (code, 1), "{arguments:?}: {stderr}");
        assert!(stderr.contains(said), "{arguments:?}: {stderr}");
    }
    let (code, stderr) = failing_bench(&open, &["--ca", &ca]);
    assert!(code == 2 && stderr.contains("--tls"), "{stderr}");
}

#[test]
fn invalid_run_fails_with_one_line() {
    let unreachable = Port::reserve();
    let address = format!("127.0.0.1:{}", unreachable.number());
    for (arguments, code, said) in [
        (
            &["--addr", &address, "--domain", "d", "--descriptor", "a=b"][..],
            1,
            "Connection refused (os error 111); is the service running there?",
        ),
        (&["--domain", "d", "--descriptor", "a={b}"], 2, "{b} is not a placeholder"),
        (&["--domain", "d", "--descriptor", "a=b", "--rate", "0"], 2, "calls per second"),
        (&["--domain", "d", "--descriptor", "a=b", "--keys", "all"], 2, "uniform:COUNT"),
        (&["--domain", "d", "--descriptor", "a=b", "--limit", "5"], 2, "HITS/DURATION"),
    ] {
        let output = bench(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(stderr.contains(said), "{stderr}");
    }
}

/// The help on a terminal that shows each line whole, so that it can be copied.
fn help() -> String {
    let mut help = Command::new(PROGRAM);
    let output = help.arg("--help").env_clear().envs(inherited_env()).env("COLUMNS", "80").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Commands that the help shows as examples, continued lines joined.
fn examples(help: &str) -> Vec<String> {
    let (_, examples) = help.split_once("\nExamples:\n").expect("the help has examples");
    let (examples, _) = examples.split_once("\n\n").unwrap();
    let joined = examples.replace(" \\\n   ", "");
    joined.lines().map(|example| example.trim_start().to_owned()).collect()
}

#[test]
fn help_shows_every_placeholder() {
    let text = help().split_whitespace().collect::<Vec<_>>().join(" ");
    for placeholder in ["{key}", "{n}", "{random:N}", "{run}", "{{"] {
        assert!(text.contains(&format!(" {placeholder} ")), "{placeholder} is missing: {text}");
    }
    assert!(!text.contains('\u{1b}'), "{text:?}");
}

/// Writes a program of the shell.
fn write_script(path: &Path, text: &str) {
    fs::write(path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn examples_in_help_run_as_printed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let certificates = Certificates::new(path);
    for (from, to) in [("client.crt", "me.crt"), ("client.key", "me.key")] {
        fs::copy(certificates.path(from), path.join(to)).unwrap();
    }
    let request = r#"{"domain": "example", "descriptors": [{"entries": [{"key": "login", "value": "ann"}]}]}"#;
    fs::write(path.join("mix.json"), format!(r#"[{{"weight": 9, "request": {request}}}]"#)).unwrap();
    let rules = include_str!("../../../config/example.yaml");
    let (plain, tls) = (with_rules(rules).start(), over_tls(with_rules(rules), &certificates).start());
    symlink(PROGRAM, path.join("tollkeeper-bench")).unwrap();
    write_script(&path.join("pidof"), &format!("test \"$*\" = '-s tollkeeper' && echo {}", plain.id()));
    let search_path = format!("{}:{}", path.display(), std::env::var("PATH").unwrap());
    let examples = examples(&help());
    assert_eq!(examples.len(), 5, "{examples:?}");
    for example in examples {
        let server = if example.contains(" --tls ") { &tls } else { &plain };
        let mut command = example.replace("localhost:8081", &format!("localhost:{}", server.grpc_port()));
        command = command.replace(" --duration 30s", "") + " --duration 200ms --warm-up 0";
        if !example.contains(" --addr ") {
            command += &format!(" --addr 127.0.0.1:{}", server.grpc_port());
        }
        let mut shell = Command::new("bash");
        shell.args(["-c", &command]).current_dir(path).env_clear().envs(inherited_env()).env("PATH", &search_path);
        let output = shell.output().unwrap();
        assert!(output.status.success(), "{example}\n{output:?}");
    }
}

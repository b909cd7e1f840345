//! Examples of the documentation other than rules: commands run, the nftables rules parse, and the client behaves as
//! documented.

#[path = "doc_examples/commands.rs"]
mod commands;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::rule_defaults::RuleDefaults;
use tollkeeper::rules::yaml::DocumentSelection;

use kit::json_schema::schema_errors;
use kit::{read, repository};

/// Checks a file of rules with nft.
fn nft(file: &Path) -> Result<(), String> {
    // `nft -c` queries the kernel and needs CAP_NET_ADMIN, which a new network namespace grants.
    let direct: &[&str] = &["nft"];
    let own_namespace: &[&str] = &["unshare", "--map-root-user", "--net", "nft"];
    let mut error_text = String::new();
    for command in [direct, own_namespace] {
        let path = format!("{}:/usr/sbin", std::env::var("PATH").unwrap());
        let mut nft = Command::new("env");
        let output = nft.arg(format!("PATH={path}")).args(command).arg("-c").arg("-f").arg(file).output();
        let Output { status, stderr, .. } = output.expect("env can be run");
        if status.success() {
            return Ok(());
        }
        error_text = String::from_utf8_lossy(&stderr).into_owned();
        assert!(
            !error_text.contains("No such file"),
            "nft is missing: install nftables, see tests/run.sh: {error_text}"
        );
        if !error_text.contains("Operation not permitted") {
            return Err(error_text);
        }
    }
    // nft checks the syntax before it queries the kernel, so the syntax is valid here.
    println!("nft may not query the kernel here; only the syntax was checked: {error_text}");
    Ok(())
}

#[test]
fn nft_accepts_the_nftables_example() {
    let file = repository("docs/examples/nftables.conf");
    nft(&file).unwrap_or_else(|error_text| panic!("{error_text}"));
    let directory = tempfile::tempdir().unwrap();
    let broken = directory.path().join("broken.conf");
    std::fs::write(&broken, read(&file).replace("limit rate over", "limit rate above")).unwrap();
    assert!(nft(&broken).unwrap_err().contains("syntax error"));
}

/// Response with these header lines.
fn answer(status: &str, headers: &str) -> String {
    format!("HTTP/1.1 {status}\r\n{headers}content-length: 3\r\nconnection: close\r\n\r\nhi\n")
}

/// Reads one request and sends one response.
fn serve(mut stream: TcpStream, response: &str) {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).expect("a request") == 1 {
        head.push(byte[0]);
    }
    stream.write_all(response.as_bytes()).expect("the client reads");
}

/// Output of the example, and the arrival time of each request; requests beyond the responses get an error.
fn run_client(times: usize, responses: Vec<String>) -> (Output, Vec<Instant>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let came = Arc::new(Mutex::new(Vec::new()));
    let noted = came.clone();
    // The thread ends with the process, because the number of calls is unknown.
    thread::spawn(move || {
        let beyond = answer("500 One Too Many", "");
        for (place, stream) in listener.incoming().enumerate() {
            noted.lock().unwrap().push(Instant::now());
            serve(stream.unwrap(), responses.get(place).unwrap_or(&beyond));
        }
    });
    let client = repository("docs/examples/client.py");
    let mut python = Command::new("python3");
    let output = python.arg("-B").arg(client).arg(&url).arg(times.to_string()).env("no_proxy", "*").output();
    let came = came.lock().unwrap().clone();
    (output.expect("python3 can be run"), came)
}

#[test]
fn client_example_waits_for_retry_after_and_caches() {
    let responses = vec![
        answer("429 Too Many Requests", "retry-after: 1\r\n"),
        answer("429 Too Many Requests", "Retry-After: 2\r\n"),
        answer("200 OK", "x-ratelimit-limit: 10, 10;w=60\r\nx-ratelimit-remaining: 0\r\nx-ratelimit-reset: 1\r\n"),
        answer("200 OK", "cache-control: private, max-age=600\r\n"),
    ];
    let (output, came) = run_client(4, responses);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0 hi\n1 hi\n2 hi\n3 hi\n");
    assert_eq!(came.len(), 4);
    let waited: Vec<_> = came.windows(2).map(|pair| pair[1] - pair[0]).collect();
    for (waited, told_s) in waited.iter().zip([1, 2, 1]) {
        assert!(*waited >= Duration::from_secs(told_s), "{waited:?} instead of {told_s} s");
    }
}

#[test]
fn client_example_gives_up_if_the_wait_is_too_long() {
    let (output, came) = run_client(1, vec![answer("429 Too Many Requests", "retry-after: 90\r\n")]);
    assert_eq!(came.len(), 1);
    let error_text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error_text.contains("rejected with 429; retry after 9"), "{error_text}");
}

#[test]
fn client_example_parses_every_header_form() {
    let program = r#"
import client
def after(text): return client.retry_after({"Retry-After": text})
assert after("7") == 7 and after(" 0 ") == 0
assert after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
assert 86400 < after("Fri, 31 Dec 2100 23:59:59 GMT") < float("inf")
assert after("9" * 400) == float("inf")
for text in ["", "soon", "-1", "1.5", "\u00b2", "Wed, 99 Oct 99999999999 07:28:00 GMT"]:
    assert after(text) is None, text
assert client.retry_after({}) is None
def limit(headers): return client.number(headers, "Limit")
assert limit({"X-RateLimit-Limit": '10, 10;w=60;name="a", 1000;w=86400'}) == 10
assert limit({"RateLimit-Limit": "12"}) == 12 and limit({"X-RateLimit-Limit": "many"}) is None
"#;
    let mut python = Command::new("python3");
    let output = python.args(["-B", "-c", program]).current_dir(repository("docs/examples")).output();
    let output = output.expect("python3 can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn defaults_of_the_documentation_apply_to_rules() {
    let page = read(&repository("docs/envoy-gateway.md"));
    let block =
        page.split("```yaml\n").find_map(|rest| rest.starts_with("defaults:").then(|| rest.split("```").next()));
    let example = read(&repository("config/rule-defaults.yaml"));
    assert!(example.starts_with("# yaml-language-server: $schema=rule-defaults.schema.json\n"));
    for text in [block.flatten().expect("the page has an example"), example.as_str()] {
        let (defaults, warnings) = RuleDefaults::parse_file(&"defaults.yaml".into(), text.as_bytes()).unwrap();
        assert!(warnings.is_empty() && defaults.domain_names() == ["default/eg/http"], "{warnings}");
        let limits = [("minute", "sliding_window_counter"), ("second", "token_bucket")];
        for (unit, algorithm) in limits {
            let rules = format!(
                "domain: default/eg/http\ndescriptors: [{{key: k, rate_limit: {{unit: {unit}, requests_per_unit: 9}}}}]\n"
            );
            let rules = RuleText { name: "rules".into(), bytes: rules.into_bytes(), documents: DocumentSelection::All };
            let options = CompileOptions { rule_defaults: Arc::new(defaults.clone()), ..CompileOptions::default() };
            let rules = RuleSet::new(compile_texts(&[rules], &options).unwrap().domains);
            let limit = rules.rules().next().expect("there is a rule").limits[0].limit;
            assert_eq!((limit.algorithm().name(), limit.on_store_error().name()), (algorithm, "deny"));
        }
    }
}

#[test]
fn values_of_two_regions_fit_the_chart() {
    let page = read(&repository("docs/regions.md"));
    let block = page.split("```yaml\n").find(|rest| rest.contains("globalRedis:")).expect("the page has an example");
    let block = block.split("```").next().expect("a block ends");
    let schema: Value = serde_json::from_str(&read(&repository("deploy/chart/values.schema.json"))).unwrap();
    let of_values = |yaml: &str| -> Value { serde_saphyr::from_str(yaml).unwrap() };
    let errors = |yaml: &str| schema_errors(&schema, &of_values(yaml));
    assert_eq!(errors(block), [""; 0]);
    assert_eq!(errors(&block.replace("waitReplicas: 1", "waitReplicas: 2")).len(), 1, "the schema tells");
}

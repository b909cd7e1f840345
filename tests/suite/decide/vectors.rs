//! Replay of requests recorded at envoyproxy/ratelimit.
//!
//! Each line of the recordings is a domain with its rules and a sequence of requests. The tests replay it
//!
//! - in this process under a manual clock, which makes every second of every response known: with counters in memory,
//!   in Redis, and in Redis under the keys of envoyproxy/ratelimit;
//! - against the binary over gRPC and, with another process, over `/json`, with the recorded environment.
//!
//! [`DIFFERENCES`] lists every difference with its reason, and every listed response must differ. Under the same keys
//! nothing differs, and Redis has the same contents at the end. [`stats`] compares statsd counters.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};
use serde_json::Value;
use tollkeeper::base::clock::Time;
use tollkeeper::base::pb::proto_json::{request_from_json, response_to_json};
use tollkeeper::base::pb::rate_limit_response::{Code, DescriptorStatus};
use tollkeeper::base::pb::rate_limit_service_client::RateLimitServiceClient;
use tollkeeper::base::pb::{self, HeaderValue, RateLimitResponse};
use tollkeeper::rules::rule::rlconfig::format_rlconfig;

use kit::redis::{self, Server};
use kit::replica::Replica;
use kit::test_service::{TestRequest, TestService};
use kit::tollkeeper::{Setup, Tollkeeper, with_runtime_files};
use kit::{http, read, repository};

/// Responses that differ from the recorded ones: the line, the steps from 0, and the reason.
const DIFFERENCES: &[(&str, &[usize], &str)] = &[
    ("d2x0", &[6, 7, 19], STAR),
    ("d2x11", &[4, 7, 11], STAR),
    ("d3x0", &[1], STAR),
    ("d3x1", &[8], STAR),
    ("d3x4", &[6, 11, 15], STAR),
    ("d3x8", &[4, 6], STAR),
    ("d4x11", &[14, 21], STAR),
    ("d6x4", &[8, 10], STAR),
    ("d6x6", &[10], STAR),
    ("d7x1", &[3], STAR),
    ("d7x7", &[1], STAR),
    ("d9x4", &[10, 11, 14], STAR),
    ("d9x6", &[8], STAR),
    ("d9x8", &[16], STAR),
    ("d10x0", &[3, 4, 10, 12, 15], STAR),
    ("d10x9", &[9, 13], STAR),
    ("d10x10", &[14], STAR),
];

/// There the keys of counters are texts, and a client that sends the pattern of a shared wildcard as its value
/// (`10.*.1`) charges from the counter that all values of the pattern share. Here no two paths share a counter, and no
/// value can steer which is charged.
const STAR: &str = "a value that is the text of a pattern has a counter of its own";

/// Lines that were recorded from one process, under one environment.
struct Group {
    env: BTreeMap<String, String>,
    lines: Vec<Recording>,
}

/// A domain with its rules and requests.
struct Recording {
    name: String,
    files: Vec<(String, String)>,
    /// Lines of `/rlconfig`, sorted.
    rlconfig: Vec<String>,
    steps: Vec<Step>,
    /// Contents of Redis after the last request, by key without the start of the window.
    counters: BTreeMap<String, i64>,
    /// Statsd counters after the last request, without the common prefix.
    stats: BTreeMap<String, i64>,
}

struct Step {
    /// The request as recorded JSON.
    request: Vec<u8>,
    response: Answer,
}

/// A response, or the text of an error.
type Answer = Result<RateLimitResponse, String>;

/// Placeholder in a response for the seconds until the end of a window.
const END_OF_WINDOW: &str = "END_OF_WINDOW";
/// [`END_OF_WINDOW`] as a duration; no response has a negative one.
const END_OF_WINDOW_S: i64 = -1;

mod config;
mod stats;

fn recorded() -> Vec<Group> {
    let text = read(&repository("tests/vectors/peer.jsonl"));
    let mut groups: BTreeMap<String, Group> = BTreeMap::new();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).expect("each line is an object");
        if line.get("steps").is_none() {
            continue;
        }
        let env: BTreeMap<String, String> = pairs(&line["env"]).collect();
        let group = groups.entry(format!("{env:?}")).or_insert_with(|| Group { env, lines: Vec::new() });
        group.lines.push(Recording {
            name: line["name"].as_str().expect("a name").to_owned(),
            files: pairs(&line["files"]).collect(),
            rlconfig: items(&line["rlconfig"]).map(|line| line.as_str().expect("a line").to_owned()).collect(),
            steps: items(&line["steps"]).map(step).collect(),
            counters: counters(&line["counters"]),
            stats: counters(&line["stats"]),
        });
    }
    groups.into_values().collect()
}

fn pairs(object: &Value) -> impl Iterator<Item = (String, String)> {
    let fields = object.as_object().expect("an object").iter();
    fields.map(|(name, text)| (name.clone(), text.as_str().expect("a text").to_owned()))
}

fn counters(object: &Value) -> BTreeMap<String, i64> {
    let fields = object.as_object().expect("an object").iter();
    fields.map(|(key, count)| (key.clone(), count.as_i64().expect("a count"))).collect()
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().expect("a list").iter()
}

fn step(step: &Value) -> Step {
    let response = &step["response"];
    let response = match response["error"].as_str() {
        Some(error) => Err(error.to_owned()),
        // Headers are text and stay unchanged.
        None => {
            let duration = format!("\"duration_until_reset\":\"{END_OF_WINDOW}\"");
            let sentinel = format!("\"duration_until_reset\":\"{END_OF_WINDOW_S}s\"");
            Ok(response_from_json(&response.to_string().replace(&duration, &sentinel)))
        }
    };
    Step { request: step["request"].to_string().into_bytes(), response }
}

/// Response decoded from proto3 JSON.
fn response_from_json(text: &str) -> RateLimitResponse {
    static RESPONSE: LazyLock<MessageDescriptor> = LazyLock::new(|| {
        let pool = DescriptorPool::decode(pb::file_descriptor_set()).expect("the build wrote it");
        pool.get_message_by_name("envoy.service.ratelimit.v3.RateLimitResponse").expect("it is in there")
    });
    let mut json = serde_json::Deserializer::from_str(text);
    let message = DynamicMessage::deserialize(RESPONSE.clone(), &mut json);
    message.unwrap_or_else(|error| panic!("{error}: {text}")).transcode_to().expect("it is of this type")
}

/// Ends of the windows of a response.
#[derive(Clone, Copy)]
enum Now {
    /// Known time, so that the seconds until the end of a window are known.
    Known(Time),
    /// Unknown time: the seconds are between 1 and the length of the window.
    Unknown,
}

/// Converts a response to the form of the recordings.
///
/// Correct seconds become [`END_OF_WINDOW`], the Retry-After header is removed, and spaces in the protobuf text of
/// dynamic metadata are normalized.
fn normalize(mut response: RateLimitResponse, env: &BTreeMap<String, String>, now: Now) -> RateLimitResponse {
    if response.overall_code() == Code::OverLimit {
        let rejected = response.statuses.iter().filter(|status| status.code() == Code::OverLimit);
        let longest = rejected.map(seconds).max().expect("at least one rejection");
        let expected = HeaderValue { key: "Retry-After".into(), value: longest.to_string(), raw_value: Vec::new() };
        if response.response_headers_to_add.last() == Some(&expected) {
            response.response_headers_to_add.pop();
        }
    }
    let reset = env.get("LIMIT_RESET_HEADER").map_or("RateLimit-Reset", String::as_str);
    for header in response.response_headers_to_add.iter_mut().filter(|header| header.key == reset) {
        if response.statuses.iter().any(|status| seconds(status).to_string() == header.value && is_right(status, now)) {
            header.value = END_OF_WINDOW.to_owned();
        }
    }
    for status in &mut response.statuses {
        if is_right(status, now) {
            status.duration_until_reset.as_mut().expect("it is right").seconds = END_OF_WINDOW_S;
        }
    }
    normalize_overrides(&mut response);
    response
}

/// Normalizes spaces: Go's text format puts one or two between fields, at random.
fn normalize_overrides(response: &mut RateLimitResponse) {
    use prost_types::value::Kind;
    let fields = response.dynamic_metadata.as_mut().map(|metadata| &mut metadata.fields);
    let descriptors = fields.and_then(|fields| fields.get_mut("descriptors")).and_then(|list| list.kind.as_mut());
    let Some(Kind::ListValue(descriptors)) = descriptors else { return };
    for descriptor in &mut descriptors.values {
        let Some(Kind::StructValue(descriptor)) = &mut descriptor.kind else { continue };
        if let Some(Kind::StringValue(limit)) = descriptor.fields.get_mut("limit").and_then(|text| text.kind.as_mut()) {
            *limit = limit.split_whitespace().collect::<Vec<_>>().join(" ");
        }
    }
}

fn seconds(status: &DescriptorStatus) -> i64 {
    status.duration_until_reset.map_or(0, |duration| duration.seconds)
}

/// True if the seconds of a status lead to the end of its limit's window.
fn is_right(status: &DescriptorStatus, now: Now) -> bool {
    let Some(limit) = &status.current_limit else { return false };
    let length_s = match limit.unit {
        1 => 1,
        2 => 60,
        3 => 3600,
        4 => 86_400,
        5 => 30 * 86_400,
        6 => 365 * 86_400,
        7 => 7 * 86_400,
        other => panic!("{other} is not a unit of a limit"),
    };
    match now {
        Now::Unknown => (1..=length_s).contains(&seconds(status)),
        Now::Known(now) => {
            let now_s = i64::try_from(now.as_micros() / 1_000_000).expect("it is not that late");
            seconds(status) == length_s - now_s % length_s
        }
    }
}

fn text(response: &Answer) -> String {
    match response {
        Ok(response) => response_to_json(response).expect("it has a form in json"),
        Err(error) => format!("error: {error}"),
    }
}

/// A Wednesday in July, well inside windows of every length.
const NOW: Time = Time::from_secs(1_783_513_296);

/// Difference in one response.
struct Difference {
    name: String,
    step: usize,
    what: String,
}

impl Group {
    /// Replays all lines, in their order, with `call`.
    fn replay(&self, now: impl Fn() -> Now, mut call: impl FnMut(&[u8]) -> Answer) -> Vec<Difference> {
        let mut differences = Vec::new();
        for line in &self.lines {
            for (place, step) in line.steps.iter().enumerate() {
                let ours = call(&step.request).map(|response| normalize(response, &self.env, now()));
                let mut theirs = step.response.clone();
                theirs.iter_mut().for_each(normalize_overrides);
                if ours != theirs {
                    let request = String::from_utf8_lossy(&step.request);
                    let what = format!("{request}\n  ours:   {}\n  theirs: {}", text(&ours), text(&theirs));
                    differences.push(Difference { name: line.name.clone(), step: place, what });
                }
            }
        }
        differences
    }

    fn files(&self) -> Vec<(String, String)> {
        self.lines.iter().flat_map(|line| line.files.clone()).collect()
    }

    fn setup(&self) -> Setup {
        let setup = with_runtime_files(self.files());
        self.env.iter().fold(setup, |setup, (name, value)| setup.env(name, value))
    }

    fn start(&self) -> Tollkeeper {
        self.setup().start()
    }

    fn rlconfig(&self) -> Vec<&str> {
        let mut lines: Vec<&str> = self.lines.iter().flat_map(|line| &line.rlconfig).map(String::as_str).collect();
        lines.sort_unstable();
        lines
    }
}

/// Fails if a difference is not listed or a listed difference is missing.
fn assert_as_listed(mut differences: Vec<Difference>) {
    let mut wrong = Vec::new();
    let listed =
        DIFFERENCES.iter().flat_map(|(name, steps, reason)| steps.iter().map(move |step| (name, step, reason)));
    for (name, step, reason) in listed {
        let before = differences.len();
        differences.retain(|difference| (difference.name.as_str(), difference.step) != (*name, *step));
        if differences.len() == before {
            wrong.push(format!("{name}, step {step}: is the same by now; listed because {reason}"));
        }
    }
    wrong.extend(differences.into_iter().map(|Difference { name, step, what }| format!("{name}, step {step}: {what}")));
    assert!(wrong.is_empty(), "{} answers differ\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn recordings_are_complete() {
    let groups = recorded();
    let lines: Vec<&Recording> = groups.iter().flat_map(|group| &group.lines).collect();
    let steps: usize = lines.iter().map(|line| line.steps.len()).sum();
    assert_eq!((groups.len(), lines.len(), steps), (9, 132, 2021));
}

#[test]
fn memory_reproduces_every_recorded_request() {
    let mut differences = Vec::new();
    for group in recorded() {
        let service = TestService::new(group.env.clone(), NOW);
        service.load(group.files());
        differences.extend(group.replay(
            || Now::Known(service.now()),
            |request| {
                service.advance_us(1_000);
                let request = request_from_json(request).expect("it was recorded in this form");
                service
                    .decide(&TestRequest(request))
                    .map(|response| response.response)
                    .map_err(|error| error.to_string())
            },
        ));
        let loaded = service.inner.rules.current_rules();
        let mut lines = format_rlconfig(&loaded.as_ref().expect("rules are loaded").rules);
        lines.sort_unstable();
        assert_eq!(lines, group.rlconfig());
    }
    assert_as_listed(differences);
}

/// Replays a group with counters in this Redis, in the given key format.
fn replay_in_redis(group: &Group, server: &Server, key_format: &str) -> Vec<Difference> {
    server.query::<()>(&["FLUSHALL"]);
    let mut env = group.env.clone();
    env.insert("TOLLKEEPER_KEY_FORMAT".to_owned(), key_format.to_owned());
    let replica = Replica::new(&server.address(), env, NOW);
    replica.service.load(group.files());
    group.replay(
        || Now::Known(NOW),
        |request| {
            let request = request_from_json(request).expect("it was recorded in this form");
            replica.decide(&TestRequest(request)).map(|response| response.response).map_err(|error| error.to_string())
        },
    )
}

#[test]
fn ratelimit_key_format_reproduces_keys_and_responses() {
    let server = redis::options().start();
    let mut wrong = Vec::new();
    for group in recorded() {
        let differences = replay_in_redis(&group, &server, "ratelimit");
        wrong.extend(differences.into_iter().map(|difference| format!("{}: {}", difference.name, difference.what)));
        let mut ours: BTreeMap<String, i64> = BTreeMap::new();
        for key in server.query::<Vec<String>>(&["KEYS", "*"]) {
            if !key.ends_with(":probe") {
                let (name, start) = key.split_at(key.rfind('_').expect("a part of each key") + 1);
                assert!(start.parse::<u64>().is_ok(), "{key}");
                *ours.entry(name.to_owned()).or_default() += server.query::<i64>(&["GET", &key]);
            }
        }
        let theirs: BTreeMap<String, i64> = group.lines.iter().flat_map(|line| line.counters.clone()).collect();
        let same = |key: &&String| ours.get(*key) == theirs.get(*key);
        let keys: BTreeSet<&String> = ours.keys().chain(theirs.keys()).filter(|key| !same(key)).collect();
        wrong.extend(
            keys.into_iter().map(|key| format!("{key}: ours {:?}, theirs {:?}", ours.get(key), theirs.get(key))),
        );
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn redis_reproduces_every_recorded_request() {
    let server = redis::options().start();
    assert_as_listed(recorded().iter().flat_map(|group| replay_in_redis(group, &server, "tollkeeper")).collect());
}

/// Hours since the Unix epoch.
fn hour() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970").as_secs() / 3600
}

/// Replays every group against a process of its own, a few at a time.
///
/// All recorded limits have periods of an hour or longer, whose windows begin on the hour. If an hour begins during a
/// replay, windows may have started between any two requests, so the replay is repeated with a new process. A replay
/// takes seconds, so one repetition is enough.
fn replay_processes(replay: impl Fn(&Tollkeeper, &Group) -> Vec<Difference> + Sync) -> Vec<Difference> {
    let replay = |group: &Group| loop {
        let began_in = hour();
        let tollkeeper = group.start();
        let page = http::get(tollkeeper.debug_port(), "/rlconfig").send().text();
        let mut lines: Vec<&str> = page.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, group.rlconfig());
        let differences = replay(&tollkeeper, group);
        if hour() == began_in {
            return differences;
        }
    };
    let groups = recorded();
    thread::scope(|scope| {
        let replays: Vec<_> = groups.iter().map(|group| scope.spawn(|| replay(group))).collect();
        replays.into_iter().flat_map(|replay| replay.join().expect("no replay panics")).collect()
    })
}

#[test]
fn grpc_reproduces_every_recorded_request() {
    assert_as_listed(replay_processes(|tollkeeper, group| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let address = format!("http://127.0.0.1:{}", tollkeeper.grpc_port());
        let mut client = runtime.block_on(RateLimitServiceClient::connect(address)).expect("it listens");
        group.replay(
            || Now::Unknown,
            |request| {
                let request = request_from_json(request).expect("it was recorded in this form");
                let response = runtime.block_on(client.should_rate_limit(request));
                response.map(tonic::Response::into_inner).map_err(|status| status.message().to_owned())
            },
        )
    }));
}

#[test]
fn json_reproduces_every_recorded_request() {
    assert_as_listed(replay_processes(|tollkeeper, group| {
        group.replay(
            || Now::Unknown,
            |request| {
                let page = http::post(tollkeeper.http_port(), "/json", request).send();
                let content_type = page.header("content-type").unwrap_or_default();
                match (page.status, content_type.as_str()) {
                    (400, "text/plain; charset=utf-8") => {
                        let text = page.text();
                        let reason = text.strip_prefix("Bad Request: ").and_then(|text| text.strip_suffix('\n'));
                        Err(reason.unwrap_or(&text).to_owned())
                    }
                    (200 | 429, "application/json") => {
                        let response = response_from_json(&page.text());
                        let expected = if response.overall_code() == Code::Ok { 200 } else { 429 };
                        assert_eq!(page.status, expected, "{page:?}");
                        Ok(response)
                    }
                    _ => panic!("{page:?}"),
                }
            },
        )
    }));
}

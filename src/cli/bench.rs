//! `bench`: put a load on a rate limit service and tell how it bears it, and how exact it is.

mod report;

use std::io::{self, IsTerminal as _};
use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Deserialize;
use tokio::runtime;

use super::client::{advice, block_on};
use super::print::{complain, ended, print, remark};
use super::secure::{self, Tls};
use super::{Outcome, duration, question};
use crate::bench::connection::{Dial, Failure};
use crate::bench::findings::Findings;
use crate::bench::keys::Keys;
use crate::bench::load::{self, Plan, Progress, Trouble};
use crate::bench::template::{Mix, Template};
use crate::bench::usage::Source;
use crate::clock::micros;
use crate::http::json::request_from_json;
use crate::pb::RateLimitRequest;
use crate::report::text::plain;
use crate::settings::target::Target;
use crate::settings::value::number::DurationRange;

/// What `bench` takes.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The gRPC listener of any rate limit service; unix:PATH for a socket
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8081")]
    addr: Target,
    #[command(flatten)]
    secure: secure::Args,
    #[command(flatten)]
    question: question::Args,
    /// Hits of each request
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "request",
        value_parser = clap::value_parser!(u32).range(1..))]
    hits: u32,
    /// What {key} stands for: one, uniform:COUNT, or zipf:COUNT:EXPONENT
    #[arg(long, value_name = "SPACE", default_value = "uniform:10000")]
    keys: Keys,
    /// Calls a second, begun when they are due (open loop); without it a call begins when another ends (closed loop)
    #[arg(long, value_name = "N", value_parser = rate)]
    rate: Option<f64>,
    /// Connections
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1000))]
    connections: u16,
    /// Calls on their way on each connection: always so many, or with --rate at most so many
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    streams: Option<u16>,
    /// How long to measure
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = up_to_a_day)]
    duration: Duration,
    /// How long to ask before that
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = up_to_an_hour_or_none)]
    warm_up: Duration,
    /// How long an answer may take; the server is told
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = up_to_a_day)]
    timeout: Duration,
    /// The limit of every descriptor, where the server does not tell it as it is, such as 100/90s
    #[arg(long, value_name = "HITS/DURATION", value_parser = limit)]
    limit: Option<(u64, u64)>,
    /// The process that serves, on this machine: tell what CPU and memory it uses
    #[arg(long, value_name = "PID", conflicts_with = "metrics", value_parser = clap::value_parser!(i32).range(1..))]
    pid: Option<i32>,
    /// The same from the server's own metrics, such as http://127.0.0.1:9090/metrics
    #[arg(long, value_name = "URL")]
    metrics: Option<String>,
    /// Where the random numbers begin
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Write what was found as one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) const HELP: &str = "\
In keys and values, {key} is a number from the key space, {n} the number of the call, {random:N} a number below N, and \
{run} eight letters that no other run has, for counters that begin fresh; {{ is a brace.

Latencies of an open loop count from when a call was due, so that a pause of the server is charged with every call of \
that pause. A closed loop finds the most a server can take, and says little of latencies.

A request file (--request) with a list is a mix: [{\"weight\": 9, \"request\": {\"domain\": \"shop\", ...}}, ...].

`limits` tells how exact the verdicts were: the most that passed in any period of one counter, and which verdicts an \
exact sliding window log would have given otherwise. A fixed window lets up to twice its limit pass around its end and \
differs from a log without being wrong; so does a bucket. Times are those of this machine, so requests that were on \
their way together count as a tie. Counters should be fresh (see {run}) and of limits on hits that all ask for.

Examples:
  tollkeeper bench --domain example --descriptor 'login={key}' --keys uniform:100000
  tollkeeper bench --domain shop --descriptor 'api_key={run}{key}' --keys zipf:1000000:1.1 --rate 20000 --duration 30s
  tollkeeper bench --addr ratelimit:8081 --domain shop --descriptor 'user=u{key},path=/p{random:20}' --json
  tollkeeper bench --addr limits:8081 --tls --ca ca.crt --cert me.crt --key me.key --domain shop --descriptor 'user={key}'
  tollkeeper bench --request mix.json --pid $(pidof tollkeeper)

Exit codes: 0 every call was answered, 1 some were not, or none could be made, 2 bad usage.";

/// Calls on their way on each connection of a closed loop: Envoy has as many at full load.
const STREAMS: u16 = 64;
/// The same of an open loop: more than a server that keeps up ever needs.
const STREAMS_OPEN: u16 = 250;

/// Puts the load on, and tells.
pub(super) fn run(args: &Args) -> Outcome {
    let prepared = args.secure.tls(&args.addr).and_then(|tls| Ok((plan(args, tls.as_ref())?, tls)));
    let (plan, tls) = match prepared {
        Ok(prepared) => prepared,
        Err(problem) => {
            complain(plain(&problem));
            return Outcome::Misused;
        }
    };
    let bar = bar(&plan);
    let whole = plan.warm_up + plan.duration;
    let told = |progress: Progress| {
        let Progress { elapsed, answers, failures } = progress;
        bar.set_position(u64::try_from(elapsed.min(whole).as_millis()).unwrap_or(u64::MAX));
        let phase = if elapsed < plan.warm_up { "warm-up" } else { "measuring" };
        let rate = answers as f64 / elapsed.as_secs_f64().max(0.001);
        bar.set_message(format!("{phase}: {answers} answers, {rate:.0} a second, {failures} without an answer"));
    };
    let recorded = block_on(runtime::Builder::new_multi_thread(), async {
        let recorded = load::run(plan.clone(), told).await;
        recorded.map_err(|trouble| line(&trouble, &args.addr, tls.as_ref()))
    });
    bar.finish_and_clear();
    let findings = match recorded {
        Ok(record) => Findings::new(&plan, record, args.limit),
        Err(problem) => {
            complain(plain(&problem));
            return Outcome::Failed;
        }
    };
    let page = if args.json {
        match serde_json::to_string_pretty(&findings) {
            Ok(json) => json + "\n",
            Err(error) => {
                complain(error);
                return Outcome::Failed;
            }
        }
    } else {
        report::text(&plan, &findings)
    };
    let outcome = if findings.errors.is_empty() { Outcome::Done } else { Outcome::Failed };
    if args.json && outcome == Outcome::Failed {
        remark("tollkeeper: some calls have no answer; see `errors`\n");
    }
    ended(print(page), outcome)
}

/// What is told while it runs: a line, if somebody watches.
fn bar(plan: &Plan) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let length = u64::try_from((plan.warm_up + plan.duration).as_millis()).unwrap_or(u64::MAX);
    let style = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {msg}");
    ProgressBar::new(length).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// What is told of a run that came to nothing.
fn line(trouble: &Trouble, target: &Target, tls: Option<&Tls>) -> String {
    let hint = match trouble {
        Trouble::Connection(Failure::Unreachable(_)) => "; is the service running there?".to_owned(),
        Trouble::Connection(failure) => advice(target, tls, &failure.to_string()),
        Trouble::Other(_) => return trouble.to_string(),
    };
    format!("{target}: {trouble}{hint}")
}

fn plan(args: &Args, tls: Option<&Tls>) -> Result<Plan, String> {
    let run = letters();
    let template = |request| Template::new(request, &run);
    let mix = match args.question.file()? {
        Some((name, text)) => mix(&text, template).map_err(|why| format!("{name}: {why}"))?,
        None => {
            let mut request = args.question.of_flags();
            // 0 is as good as 1, and what is not sent costs nothing.
            request.hits_addend = if args.hits > 1 { args.hits } else { 0 };
            Mix::new([(1, template(request)?)])?
        }
    };
    let streams = args.streams.unwrap_or(if args.rate.is_some() { STREAMS_OPEN } else { STREAMS });
    let usage = args.pid.map(Source::Pid).or_else(|| args.metrics.clone().map(Source::Metrics));
    Ok(Plan {
        dial: Dial {
            target: args.addr.clone(),
            tls: tls.map(|tls| (Arc::clone(&tls.config), tls.name.clone())),
            timeout: args.timeout,
        },
        mix,
        keys: args.keys,
        rate: args.rate,
        connections: args.connections.into(),
        streams: streams.into(),
        warm_up: args.warm_up,
        duration: args.duration,
        seed: args.seed,
        usage,
    })
}

/// A request of a mix.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Weighted {
    /// How often it is met beside the others.
    #[serde(default = "one")]
    weight: u32,
    /// As the body of /json.
    request: serde_json::Value,
}

const fn one() -> u32 {
    1
}

/// One request, or a list of them with their weights.
fn mix(text: &[u8], template: impl Fn(RateLimitRequest) -> Result<Template, String>) -> Result<Mix, String> {
    if !text.trim_ascii_start().starts_with(b"[") {
        return Mix::new([(1, template(request_from_json(text).map_err(|error| error.to_string())?)?)]);
    }
    let all: Vec<Weighted> = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let request = |(number, Weighted { weight, request }): (usize, Weighted)| {
        let of_request = |why: String| format!("request {number}: {why}");
        let body = serde_json::to_vec(&request).map_err(|error| of_request(error.to_string()))?;
        let request = request_from_json(&body).map_err(|error| of_request(error.to_string()))?;
        Ok((weight, template(request).map_err(of_request)?))
    };
    Mix::new((1..).zip(all).map(request).collect::<Result<Vec<_>, String>>()?)
}

/// Eight letters that no other run has, but by an unlikely chance.
fn letters() -> String {
    let mut random = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), std::process::id());
    let letter = || {
        let letter = char::from(b'a' + u8::try_from(random % 26).unwrap_or(0));
        random /= 26;
        letter
    };
    std::iter::repeat_with(letter).take(8).collect()
}

fn rate(text: &str) -> Result<f64, String> {
    match text.replace('_', "").parse() {
        Ok(rate @ 0.001..=10_000_000.0) => Ok(rate),
        _ => Err("write calls a second, from 0.001 to 10000000".to_owned()),
    }
}

fn up_to_a_day(text: &str) -> Result<Duration, String> {
    duration::parse(text, &DurationRange::new(Duration::from_millis(1), Duration::from_secs(86_400)))
}

fn up_to_an_hour_or_none(text: &str) -> Result<Duration, String> {
    duration::parse(text, &DurationRange::new(Duration::from_millis(1), Duration::from_secs(3600)).or_zero())
}

/// Hits and microseconds.
fn limit(text: &str) -> Result<(u64, u64), String> {
    let (hits, period) = text.split_once('/').ok_or("write HITS/DURATION, such as 100/90s")?;
    let hits = hits.parse().map_err(|_| format!("`{hits}` is no number of hits"))?;
    Ok((hits, micros(up_to_a_day(period)?)))
}

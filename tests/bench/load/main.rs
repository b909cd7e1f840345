//! `tollkeeper-bench`: load-test a rate limit service, and measure the accuracy of its limits.
//!
//! Options and output; the library beside it has the load and the results.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Deserialize;
use tokio::runtime;
use tollkeeper::base::clock::to_micros;
use tollkeeper::base::pb::RateLimitRequest;
use tollkeeper::base::pb::proto_json::request_from_json;
use tollkeeper::base::random::random_u64;
use tollkeeper::base::text::{escape_unprintable, to_pretty_json};
use tollkeeper::base::text_table::{NumberAlignment, format_table};
use tollkeeper::settings::address::ConnectAddress;
use tollkeeper::tools::cli::client::{ClientTls, TlsArgs, block_on, suggest_connection_fix};
use tollkeeper::tools::cli::print::{
    CommandOutcome, fail_if_unwritten, format_latency, format_seconds, print_error, print_to_stderr_without_newline,
    print_to_stdout,
};
use tollkeeper::tools::cli::request_flags::{RequestArgs, parse_duration};
use tollkeeper_bench::connection::{BenchTarget, BenchTls, CallError};
use tollkeeper_bench::load_generator::{self, LoadPlan, LoadProgress, LoadRunError};
use tollkeeper_bench::measurements::{UsageSource, VerdictCounts};
use tollkeeper_bench::requests::{KeySpace, RequestMix, RequestTemplate};
use tollkeeper_bench::results::{BenchResults, LimitAccuracy, Percentiles, ServerUsage, StatedLimit};

/// Same allocator as tollkeeper's, so that generating load takes little CPU.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Load-test any rate limit service: throughput, latencies, accuracy.
#[derive(Debug, Parser)]
#[command(name = "tollkeeper-bench", max_term_width = 120, after_long_help = HELP)]
struct Args {
    /// Address of the gRPC listener of any rate limit service; unix:PATH for a unix socket
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8081")]
    addr: ConnectAddress,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    request: RequestArgs,
    /// Hits per request
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "request",
        value_parser = clap::value_parser!(u32).range(1..))]
    hits: u32,
    /// Key space for {key}: one, uniform:COUNT, or zipf:COUNT:EXPONENT
    #[arg(long, value_name = "SPACE", default_value = "uniform:10000")]
    keys: KeySpace,
    /// Calls per second, sent when they are due (open loop); without it each call waits for the previous one (closed
    /// loop)
    #[arg(long, value_name = "N", value_parser = parse_rate)]
    rate: Option<f64>,
    /// Number of connections
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1000))]
    connections: u16,
    /// Concurrent calls per connection: constant, or the maximum with --rate [default: 64, or 250 with --rate]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    streams: Option<u16>,
    /// Time of the measurement
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_duration_up_to_a_day)]
    duration: Duration,
    /// Time of load before the measurement; 0 for none
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = parse_duration_up_to_an_hour_or_zero)]
    warm_up: Duration,
    /// Time limit of a call, sent to the server as deadline
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = parse_duration_up_to_a_day)]
    timeout: Duration,
    /// Limit of every descriptor, if the server does not report it correctly, such as 100/90s
    #[arg(long, value_name = "HITS/DURATION", value_parser = parse_stated_limit)]
    limit: Option<StatedLimit>,
    /// Process id of the server on this machine, to report its CPU time and memory
    #[arg(long, value_name = "PID", conflicts_with = "metrics", value_parser = clap::value_parser!(i32).range(1..))]
    pid: Option<i32>,
    /// URL of the server's metrics, to report its CPU time and memory, such as http://127.0.0.1:9090/metrics
    #[arg(long, value_name = "URL")]
    metrics: Option<String>,
    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Write the results as one JSON object
    #[arg(long)]
    json: bool,
}

// The escape sequence keeps clap from replacing `{n}` by a line end; clap removes it where colours are off.
const HELP: &str = "\
Placeholders in keys and values: {key} is a number from the key space, {\u{1b}[0mn} the number of the call, {random:N} a random \
number below N, {run} eight letters that differ in each run, for fresh counters. {{ is a brace.

Latencies of an open loop count from the due time of a call, so that a pause of the server is charged with every call of \
that pause. A closed loop finds the maximum throughput of a server; its latencies say little.

A request file (--request) with a list is a weighted mix: [{\"weight\": 9, \"request\": {\"domain\": \"shop\", ...}}, ...].

`limits` shows how accurate the verdicts were: the maximum of hits that one counter admitted in any period, and the \
verdicts that an exact sliding window log would have given differently. A fixed window admits up to twice its limit around \
its end and differs from a log without being wrong; so does a bucket. Times are measured on this machine, so concurrent \
requests count as simultaneous. Use fresh counters (see {run}) and limits on hits that all requests have.

Examples:
  tollkeeper-bench --domain example --descriptor 'login={key}'
  tollkeeper-bench --domain example --descriptor 'api_key={run}{key}' \\
    --keys zipf:1000000:1.1 --rate 2000 --duration 30s
  tollkeeper-bench --addr localhost:8081 --domain example \\
    --descriptor 'user=u{key},action=a{random:20}' --json
  tollkeeper-bench --addr localhost:8081 --tls --ca ca.crt --cert me.crt \\
    --key me.key --domain example --descriptor 'login={key}'
  tollkeeper-bench --request mix.json --pid $(pidof -s tollkeeper)

Exit codes: 0 every call got a response, 1 some got none, or no call was possible, 2 invalid usage.";

/// Concurrent calls on each connection of a closed loop, as many as Envoy has at full load.
const DEFAULT_CLOSED_LOOP_STREAMS: u16 = 64;
/// Maximum of concurrent calls on each connection of an open loop, more than a server that keeps up needs.
const DEFAULT_OPEN_LOOP_STREAMS: u16 = 250;

fn main() -> ExitCode {
    run(&Args::parse()).into()
}

/// Runs the load and prints the results.
fn run(args: &Args) -> CommandOutcome {
    let prepared = args.tls.load_client_tls(&args.addr).and_then(|tls| Ok((build_load_plan(args, tls.as_ref())?, tls)));
    let (plan, tls) = match prepared {
        Ok(prepared) => prepared,
        Err(problem) => {
            print_error(escape_unprintable(&problem));
            return CommandOutcome::UsageError;
        }
    };
    let bar = build_progress_bar(&plan);
    let recorded = block_on(runtime::Builder::new_multi_thread(), async {
        let recorded =
            load_generator::generate_load(plan.clone(), |progress| update_progress_bar(&bar, &plan, progress)).await;
        recorded.map_err(|error| format_error(&error, &args.addr, tls.as_ref()))
    });
    bar.finish_and_clear();
    let results = match recorded {
        Ok(record) => BenchResults::new(&plan, record, args.limit),
        Err(problem) => {
            print_error(escape_unprintable(&problem));
            return CommandOutcome::Failure;
        }
    };
    print_results(args, &plan, &results)
}

fn print_results(args: &Args, plan: &LoadPlan, results: &BenchResults) -> CommandOutcome {
    let outcome = if results.errors.is_empty() { CommandOutcome::Success } else { CommandOutcome::Failure };
    if !args.json {
        return fail_if_unwritten(print_to_stdout(format_results(plan, results)), outcome);
    }
    let page = match to_pretty_json(results) {
        Ok(json) => json + "\n",
        Err(error) => {
            print_error(error);
            return CommandOutcome::Failure;
        }
    };
    if outcome == CommandOutcome::Failure {
        print_to_stderr_without_newline("tollkeeper: some calls got no response; see `errors`\n");
    }
    fail_if_unwritten(print_to_stdout(page), outcome)
}

/// Builds the progress bar, hidden if standard error is not a terminal.
fn build_progress_bar(plan: &LoadPlan) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let length = u64::try_from((plan.warm_up + plan.duration).as_millis()).unwrap_or(u64::MAX);
    let style = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {msg}");
    ProgressBar::new(length).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn update_progress_bar(bar: &ProgressBar, plan: &LoadPlan, progress: LoadProgress) {
    let LoadProgress { elapsed, responses, errors } = progress;
    let whole = plan.warm_up + plan.duration;
    bar.set_position(u64::try_from(elapsed.min(whole).as_millis()).unwrap_or(u64::MAX));
    let phase = if elapsed < plan.warm_up { "warm-up" } else { "measuring" };
    let rate = responses as f64 / elapsed.as_secs_f64().max(0.001);
    bar.set_message(format!("{phase}: {responses} responses, {rate:.0} per second, {errors} without a response"));
}

/// Formats the error of a run without a result.
fn format_error(error: &LoadRunError, target: &ConnectAddress, tls: Option<&ClientTls>) -> String {
    let hint = match error {
        LoadRunError::Connection(CallError::Unreachable(_)) => "; is the service running there?".to_owned(),
        LoadRunError::Connection(failure) => suggest_connection_fix(target, tls, &failure.to_string()),
        LoadRunError::Other(_) => return error.to_string(),
    };
    format!("{target}: {error}{hint}")
}

fn build_load_plan(args: &Args, tls: Option<&ClientTls>) -> Result<LoadPlan, String> {
    let run = generate_run_letters();
    let template = |request| RequestTemplate::new(request, &run);
    let mix = match args.request.read_request_file()? {
        Some(file) => parse_request_mix(&file.text, template).map_err(|why| format!("{}: {why}", file.name))?,
        None => {
            let mut request = args.request.build_request();
            // 1 is the default of the protocol, and an unset field takes no bytes.
            request.hits_addend = if args.hits > 1 { args.hits } else { 0 };
            RequestMix::new([(1, template(request)?)])?
        }
    };
    let default_streams = if args.rate.is_some() { DEFAULT_OPEN_LOOP_STREAMS } else { DEFAULT_CLOSED_LOOP_STREAMS };
    let usage = args.pid.map(UsageSource::Pid).or_else(|| args.metrics.clone().map(UsageSource::Metrics));
    Ok(LoadPlan {
        target: BenchTarget {
            target: args.addr.clone(),
            tls: tls.map(|tls| BenchTls { config: Arc::clone(&tls.config), server_name: tls.server_name.clone() }),
            timeout: args.timeout,
        },
        mix,
        keys: args.keys,
        rate: args.rate,
        connections: args.connections.into(),
        streams: args.streams.unwrap_or(default_streams).into(),
        warm_up: args.warm_up,
        duration: args.duration,
        seed: args.seed,
        usage,
    })
}

/// A request of a mix.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WeightedRequest {
    /// Frequency relative to the others.
    #[serde(default = "default_weight")]
    weight: u32,
    /// The request, like the body of /json.
    request: serde_json::Value,
}

const fn default_weight() -> u32 {
    1
}

/// Parses one request, or a list of requests with weights.
fn parse_request_mix(
    text: &[u8],
    template: impl Fn(RateLimitRequest) -> Result<RequestTemplate, String>,
) -> Result<RequestMix, String> {
    if !text.trim_ascii_start().starts_with(b"[") {
        return RequestMix::new([(1, template(request_from_json(text).map_err(|error| error.to_string())?)?)]);
    }
    let all: Vec<WeightedRequest> = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let mut mix = Vec::with_capacity(all.len());
    for (number, WeightedRequest { weight, request }) in (1..).zip(all) {
        let in_request = |why: String| format!("request {number}: {why}");
        let body = serde_json::to_vec(&request).map_err(|error| in_request(error.to_string()))?;
        let request = request_from_json(&body).map_err(|error| in_request(error.to_string()))?;
        mix.push((weight, template(request).map_err(in_request)?));
    }
    RequestMix::new(mix)
}

/// Returns eight random letters.
fn generate_run_letters() -> String {
    let mut random = random_u64();
    let letter = || {
        let letter = char::from(b'a' + u8::try_from(random % 26).unwrap_or(0));
        random /= 26;
        letter
    };
    std::iter::repeat_with(letter).take(8).collect()
}

fn parse_rate(text: &str) -> Result<f64, String> {
    match text.replace('_', "").parse() {
        Ok(rate @ 0.001..=10_000_000.0) => Ok(rate),
        _ => Err("give calls per second, from 0.001 to 10000000".to_owned()),
    }
}

fn parse_duration_up_to_a_day(text: &str) -> Result<Duration, String> {
    parse_duration(text, "1ms to 24h")
}

fn parse_duration_up_to_an_hour_or_zero(text: &str) -> Result<Duration, String> {
    parse_duration(text, "0 or 1ms to 1h")
}

fn parse_stated_limit(text: &str) -> Result<StatedLimit, String> {
    let (hits, period) = text.split_once('/').ok_or("give HITS/DURATION, such as 100/90s")?;
    let hits = hits.parse().map_err(|_| format!("`{hits}` is not a number of hits"))?;
    Ok(StatedLimit { hits, period_us: to_micros(parse_duration_up_to_a_day(period)?) })
}

/// Formats the results.
fn format_results(plan: &LoadPlan, results: &BenchResults) -> String {
    let mut page = String::new();
    let mut line = |name: &str, text: String| {
        // Writing to a String does not fail.
        let _ = writeln!(page, "{name:<11}{text}");
    };
    let load = match plan.rate {
        Some(rate) => format!("open loop, {rate} calls per second due"),
        None => format!("closed loop, {} streams on each", plan.streams),
    };
    let seconds = |time: Duration| format!("{} s", time.as_secs_f64());
    line("load", format!("{}: {} connections, {load}, keys {}", plan.target.target, plan.connections, plan.keys));
    line("measured", format!("{} after {} of warm-up", seconds(plan.duration), seconds(plan.warm_up)));
    let VerdictCounts { ok, over_limit, unknown } = results.verdicts;
    line("responses", format!("{}, {:.0} per second", results.answers, results.answers_per_second));
    line("verdicts", format!("OK {ok}, OVER_LIMIT {over_limit}, UNKNOWN {unknown}"));
    line("latency", format_percentiles(&results.latency_us));
    line("", format!("{} calls took longer than Envoy's default timeout of 20 ms", results.later_than_20_ms));
    if let Some(send_delay) = &results.send_delay_us {
        line("send delay", format!("{} (part of the latency)", format_percentiles(send_delay)));
    }
    if let Some(ServerUsage { cpu_us_per_answer, cores, resident_bytes_before, resident_bytes }) = results.server {
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        line("server", format!("{cpu_us_per_answer:.2} us of CPU per response, {cores:.2} cores busy"));
        let (before, after) = (megabytes(resident_bytes_before), megabytes(resident_bytes));
        line("", format!("{after:.1} MB resident, {before:.1} MB after the warm-up"));
    }
    for (error, count) in &results.errors {
        line("errors", format!("{count} times: {}", escape_unprintable(error)));
    }
    page + &format_accuracy_section(results)
}

fn format_percentiles(percentiles: &Percentiles) -> String {
    let Percentiles { p50, p90, p99, p99_9, p99_99, max, .. } = *percentiles;
    [("p50", p50), ("p90", p90), ("p99", p99), ("p99.9", p99_9), ("p99.99", p99_99), ("max", max)]
        .map(|(name, value)| format!("{name} {}", format_latency(value)))
        .join("  ")
}

fn format_accuracy_section(results: &BenchResults) -> String {
    let mut page = String::new();
    if !results.limits.is_empty() {
        page += "\nlimits, from the start of the warm-up\n";
        page += &format_accuracy_table(&results.limits);
    }
    if results.unlimited > 0 {
        page += &format!("{} descriptors have no reported limit; --limit states one\n", results.unlimited);
    }
    if results.not_evaluated > 0 {
        page += &format!("{} descriptors were too many to evaluate\n", results.not_evaluated);
    }
    page
}

fn format_accuracy_table(limits: &[LimitAccuracy]) -> String {
    let row = |limit: &LimitAccuracy| {
        let period = format_seconds(limit.period_seconds);
        let share = |hits: u64| format!("{hits} ({:.4} %)", hits as f64 / limit.requested.max(1) as f64 * 100.0);
        vec![
            format!("{} {}", escape_unprintable(&limit.domain), escape_unprintable(&limit.descriptor)),
            format!("{} in {period}", limit.limit),
            limit.counters.to_string(),
            format!("{} of {}", limit.admitted, limit.requested),
            format!("{} ({} over)", limit.max_in_a_period, limit.counters_over_in_a_period),
            format!("{} ({} over)", limit.max_in_a_window, limit.counters_over_in_a_window),
            share(limit.wrongly_admitted),
            share(limit.wrongly_rejected),
        ]
    };
    let headings = [
        "DESCRIPTOR",
        "LIMIT",
        "COUNTERS",
        "ADMITTED",
        "MAX IN ANY PERIOD",
        "MAX IN A WINDOW",
        "LOG WOULD REJECT",
        "LOG WOULD ADMIT",
    ];
    format_table(&headings, limits.iter().map(row), NumberAlignment::Left)
}

//! `call`: sends rate limit requests to a running server, as Envoy does.
//!
//! Requests go one after the other over one connection. A table shows the responses, of many the first ones. `--json` writes each response as it arrives.
//!
//! Decides: default and range of `--count`; what `call` prints, of how many responses.
//! Decides: its exit code (over the limit: 0).

use std::io;
use std::time::Duration;

use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};

use super::client::{ClientTls, RateLimitClient, TimedResponse, TlsArgs, block_on, default_grpc_address};
use super::print::{
    CommandOutcome, ProgressLine, escape_and_shorten, fail_if_unwritten, format_latency, format_micros, print_error,
    print_to_stdout, print_with_colored_verdicts, usage_error,
};
use super::request_flags::{RequestArgs, format_descriptor, parse_duration};
use crate::base::clock::to_micros;
use crate::base::pb::proto_json::response_to_json;
use crate::base::pb::rate_limit_response::rate_limit::Unit;
use crate::base::pb::rate_limit_response::{Code, DescriptorStatus, RateLimit};
use crate::base::pb::{HeaderValue, RateLimitRequest, RateLimitResponse};
use crate::base::text::escape_unprintable;
use crate::base::text_table::{NumberAlignment, format_table};
use crate::limit::period::period_in_words;
use crate::settings::address::ConnectAddress;

/// Arguments of `call`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Address of the gRPC listener of a running server; unix:PATH for a unix socket
    #[arg(long, value_name = "HOST:PORT", default_value = default_grpc_address())]
    addr: ConnectAddress,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    request: RequestArgs,
    /// Hits per request; 0 peeks without charging
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "request")]
    hits: u32,
    /// Number of requests, sent one after the other
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MAX_CALLS))]
    count: u32,
    /// Time limit of a call, sent to the server as deadline, which limits the delay of a leaky bucket too. Envoy's
    /// default is 20ms
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = parse_timeout)]
    timeout: Duration,
    /// Write each response as a line of JSON, like the body of /json
    #[arg(long)]
    json: bool,
}

pub(super) const HELP: &str = "\
Each request is charged, unless --hits is 0. Of more than 20 responses the table shows the first 20; the totals are of all.

Examples:
  tollkeeper call --domain example --descriptor login=ann --count 6
  tollkeeper call --addr unix:/run/tollkeeper.sock --domain example \\
    --descriptor user=42,action=like
  tollkeeper call --domain example --descriptor 'path=/a\\,b' --json
  tollkeeper call --addr localhost:8081 --tls --ca ca.crt --cert me.crt \\
    --key me.key --request refund.json

A request file has options that flags do not have, such as a refund:
  {\"domain\": \"example\", \"descriptors\": [
    {\"entries\": [{\"key\": \"login\", \"value\": \"ann\"}], \"hitsAddend\": 2, \"isNegativeHits\": true}]}

TOLLKEEPER_GRPC_ADDR is the default of --addr. Verdicts have colours in a terminal, unless NO_COLOR is set.

Ctrl-C ends the requests, and the totals are those until then.

Exit codes: 0 got a response (OK or OVER_LIMIT), 1 got none, 2 invalid usage.";

/// Maximum number of requests of one command, because their latencies are kept for the summary.
const MAX_CALLS: i64 = 1_000_000;

/// Sends the requests and prints the responses.
pub(super) fn run(args: &Args) -> CommandOutcome {
    let prepared = args.request.read_request().and_then(|request| Ok((request, args.tls.load_client_tls(&args.addr)?)));
    let (mut request, tls) = match prepared {
        Ok(prepared) => prepared,
        Err(problem) => {
            return usage_error(escape_unprintable(&problem));
        }
    };
    match args.hits {
        // 0 for the whole request means 1; only a descriptor can peek.
        0 => request.descriptors.iter_mut().for_each(|descriptor| descriptor.hits_addend = Some(0)),
        // The default: a request file may have other hits.
        1 => {}
        hits => request.hits_addend = hits,
    }
    let mut report = CallSummary::new(&request, args.count);
    let sent = block_on(runtime::Builder::new_current_thread(), send_requests(args, tls, &request, &mut report));
    let page = if args.json { String::new() } else { report.format_summary() };
    let outcome = match sent {
        Ok(written) => fail_if_unwritten(written, CommandOutcome::Success),
        Err(problem) => {
            print_error(problem);
            CommandOutcome::Failure
        }
    };
    fail_if_unwritten(print_with_colored_verdicts(page), outcome)
}

/// Sends all requests. The inner result is that of writing to standard output, which ends the sending too.
async fn send_requests(
    args: &Args,
    tls: Option<ClientTls>,
    request: &RateLimitRequest,
    report: &mut CallSummary,
) -> Result<io::Result<()>, String> {
    let mut client = RateLimitClient::connect(&args.addr, args.timeout, tls).await?;
    let mut progress = ProgressLine::start();
    let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| error.to_string())?;
    for number in 1..=args.count {
        let response = tokio::select! {
            biased;
            // What was sent is told.
            _ = interrupt.recv() => {
                return if number > 1 { Ok(Ok(())) } else { Err("interrupted before the first answer".to_owned()) };
            }
            response = client.call(request) => response?,
        };
        if args.json {
            let line = response_to_json(&response.response).map_err(|error| error.to_string())?;
            if let Err(error) = print_to_stdout(line + "\n") {
                return Ok(Err(error));
            }
        } else {
            report.add_response(response);
            progress.show(|| format!("{number} of {} sent", args.count));
        }
    }
    Ok(Ok(()))
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    parse_duration(text, "1us to 1h")
}

/// Maximum number of responses in the table.
const MAX_SHOWN_RESPONSES: usize = 20;

/// Responses so far.
struct CallSummary {
    /// Descriptors of the request, in the order of statuses.
    descriptors: Vec<String>,
    /// Expected number of responses.
    count: u32,
    rows: Vec<Vec<String>>,
    last: Option<RateLimitResponse>,
    /// Number of responses with each overall code.
    sums: Vec<(i32, u32)>,
    /// Latencies in microseconds.
    latencies_us: Vec<u32>,
}

impl CallSummary {
    /// Starts a report on `count` responses.
    fn new(request: &RateLimitRequest, count: u32) -> Self {
        Self {
            descriptors: request
                .descriptors
                .iter()
                .map(|descriptor| escape_and_shorten(&format_descriptor(descriptor)))
                .collect(),
            count,
            rows: Vec::new(),
            last: None,
            sums: Vec::new(),
            latencies_us: Vec::new(),
        }
    }

    /// Adds the next response.
    fn add_response(&mut self, response: TimedResponse) {
        let TimedResponse { response, latency } = response;
        self.latencies_us.push(u32::try_from(to_micros(latency)).unwrap_or(u32::MAX));
        match self.sums.iter_mut().find(|(code, _)| *code == response.overall_code) {
            Some((_, sum)) => *sum += 1,
            None => self.sums.push((response.overall_code, 1)),
        }
        if self.latencies_us.len() <= MAX_SHOWN_RESPONSES {
            self.add_status_rows(&response);
        }
        self.last = Some(response);
    }

    /// Formats the report; empty without a response.
    fn format_summary(mut self) -> String {
        let Some(last) = self.last.take() else { return String::new() };
        let headings = ["#", "DESCRIPTOR", "CODE", "LIMIT", "REMAINING", "RESET"];
        let skipped = usize::from(self.count == 1);
        let mut page = match self.rows.is_empty() {
            true => String::new(),
            false => format_table(
                &headings[skipped..],
                self.rows.into_iter().map(|row| row[skipped..].to_vec()),
                NumberAlignment::Left,
            ),
        };
        page += &format_headers_and_body(&last);
        if !last.statuses.is_empty() && last.statuses.iter().all(|status| status.current_limit.is_none()) {
            page += match last.overall_code() {
                Code::OverLimit => "an entry is blocked (`tollkeeper blocks` lists the blocked values)\n",
                _ => {
                    "no limit applies: no rule of the domain matches, or one without a limit (`tollkeeper explain` says which)\n"
                }
            };
        }
        let sums: Vec<String> = self.sums.iter().map(|(code, sum)| format!("{sum} {}", format_code(*code))).collect();
        self.latencies_us.sort_unstable();
        let time = |share: usize| {
            format_latency(self.latencies_us[(self.latencies_us.len() * share).div_ceil(100) - 1].into())
        };
        page += &match self.count {
            1 => format!("{} in {}\n", format_code(last.overall_code), time(100)),
            _ => format!("{}; {} median, {} p99, {} longest\n", sums.join(", "), time(50), time(99), time(100)),
        };
        page
    }

    fn add_status_rows(&mut self, response: &RateLimitResponse) {
        for (index, status) in response.statuses.iter().enumerate() {
            let number = if index == 0 { self.latencies_us.len().to_string() } else { String::new() };
            let descriptor = self.descriptors.get(index).cloned().unwrap_or_default();
            self.rows.push([vec![number, descriptor], format_status_cells(status)].concat());
        }
    }
}

fn format_status_cells(status: &DescriptorStatus) -> Vec<String> {
    let Some(limit) = &status.current_limit else {
        return vec![format_code(status.code), "none".to_owned(), String::new(), String::new()];
    };
    // Only a misbehaving server sends a duration that is negative or out of range.
    let reset = status.duration_until_reset.and_then(|span| span.try_into().ok()).unwrap_or_default();
    vec![
        format_code(status.code),
        format_limit(limit),
        status.limit_remaining.to_string(),
        format_micros(to_micros(reset)),
    ]
}

/// Formats a limit: `300 per 3 hours (name)`.
fn format_limit(limit: &RateLimit) -> String {
    let unit = Unit::try_from(limit.unit).map_or("?", |unit| unit.as_str_name()).to_ascii_lowercase();
    let period = period_in_words(&unit, limit.unit_multiplier.unwrap_or(1));
    let name = if limit.name.is_empty() { String::new() } else { format!(" ({})", escape_and_shorten(&limit.name)) };
    format!("{} per {period}{name}", limit.requests_per_unit)
}

fn format_code(code: i32) -> String {
    Code::try_from(code).map_or_else(|_| format!("code {code}"), |code| code.as_str_name().to_owned())
}

/// Formats the headers and the body in a response, one per line.
fn format_headers_and_body(response: &RateLimitResponse) -> String {
    let line = |what: &str, header: &HeaderValue| {
        let raw = String::from_utf8_lossy(&header.raw_value);
        let value = if header.value.is_empty() { raw.as_ref() } else { &header.value };
        format!("{what} {}: {}\n", escape_unprintable(&header.key), escape_and_shorten(value))
    };
    let mut lines = String::new();
    lines.extend(response.response_headers_to_add.iter().map(|header| line("header", header)));
    lines.extend(response.request_headers_to_add.iter().map(|header| line("request header", header)));
    if !response.raw_body.is_empty() {
        lines += &format!("body {}\n", escape_and_shorten(&String::from_utf8_lossy(&response.raw_body)));
    }
    lines
}

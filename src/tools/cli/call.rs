//! `call`: sends rate limit requests to a running server, as Envoy does.
//!
//! Requests go one after the other over one connection. A table shows the responses; of many, only those that differ
//! from the previous one. `--json` writes each response as it arrives.

mod report;

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use tokio::runtime;

use super::duration;
use super::outcome::CommandOutcome;
use super::print::{finish, print, print_error, print_note};
use super::request_args::RequestArgs;
use super::rpc_client::{RateLimitClient, block_on};
use super::tls_args::{ClientTls, TlsArgs};
use crate::base::pb::RateLimitRequest;
use crate::base::text::printable;
use crate::serve::http::json::response_to_json;
use crate::settings::address::Target;
use crate::settings::value::number::DurationRange;
use report::CallSummary;

/// Arguments of `call`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Address of the gRPC listener of a running server; unix:PATH for a unix socket
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8081")]
    addr: Target,
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
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = timeout)]
    timeout: Duration,
    /// Write each response as a line of JSON, like the body of /json
    #[arg(long)]
    json: bool,
}

pub(super) const HELP: &str = "\
Each request is charged, unless --hits is 0. Of more than 20 responses the table shows those with other codes than the \
previous one, and the last.

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

Exit codes: 0 got a response (OK or OVER_LIMIT), 1 got none, 2 invalid usage.";

/// Maximum number of requests of one command, because their latencies are kept for the summary.
const MAX_CALLS: i64 = 1_000_000;
/// Interval of progress messages.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Sends the requests and prints the responses.
pub(super) fn run(args: &Args) -> CommandOutcome {
    let prepared = args.request.request().and_then(|request| Ok((request, args.tls.read(&args.addr)?)));
    let (mut request, tls) = match prepared {
        Ok(prepared) => prepared,
        Err(problem) => {
            print_error(printable(&problem));
            return CommandOutcome::UsageError;
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
    let sent = block_on(runtime::Builder::new_current_thread(), send_all(args, tls, &request, &mut report));
    if shows_progress(args) {
        print_note("\r\u{1b}[K");
    }
    let page = if args.json { String::new() } else { report.text() };
    let outcome = match sent {
        Ok(written) => finish(written, CommandOutcome::Success),
        Err(problem) => {
            print_error(problem);
            CommandOutcome::Failure
        }
    };
    finish(print(page), outcome)
}

/// Sends all requests. The inner result is that of writing to standard output, which ends the sending too.
async fn send_all(
    args: &Args,
    tls: Option<ClientTls>,
    request: &RateLimitRequest,
    report: &mut CallSummary,
) -> Result<io::Result<()>, String> {
    let mut client = RateLimitClient::connect(&args.addr, args.timeout, tls).await?;
    let mut last_progress = Instant::now();
    for number in 1..=args.count {
        let response = client.call(request).await?;
        if args.json {
            let line = response_to_json(&response.response).map_err(|error| error.to_string())?;
            if let Err(error) = print(line + "\n") {
                return Ok(Err(error));
            }
        } else {
            report.add(response);
        }
        if shows_progress(args) && last_progress.elapsed() > PROGRESS_INTERVAL {
            last_progress = Instant::now();
            print_note(format_args!("\r{number} of {} sent", args.count));
        }
    }
    Ok(Ok(()))
}

/// Returns `true` if progress is shown: on a terminal, unless JSON output shows it.
fn shows_progress(args: &Args) -> bool {
    args.count > 1 && !args.json && io::stderr().is_terminal()
}

fn timeout(text: &str) -> Result<Duration, String> {
    duration::parse(text, &DurationRange::new(Duration::from_micros(1), Duration::from_secs(3600)))
}

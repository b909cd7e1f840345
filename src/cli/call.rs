//! `call`: ask a running server, as Envoy would.
//!
//! One question after the other on one connection. A table tells what became of them; of many, only the answers that
//! differ from the one before. `--json` writes each answer as it comes.

mod report;

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use tokio::runtime;

use super::client::{Client, block_on};
use super::print::{complain, ended, print, remark};
use super::secure::{self, Tls};
use super::{Outcome, duration, question};
use crate::http::json::response_to_json;
use crate::pb::RateLimitRequest;
use crate::report::text::plain;
use crate::settings::target::Target;
use crate::settings::value::number::DurationRange;
use report::Report;

/// What `call` takes.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The gRPC listener of a running server; unix:PATH for a socket
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8081")]
    addr: Target,
    #[command(flatten)]
    secure: secure::Args,
    #[command(flatten)]
    question: question::Args,
    /// Hits of the request; 0 looks without charging
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "request")]
    hits: u32,
    /// Ask so many times, one after the other
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MOST_CALLS))]
    count: u32,
    /// How long an answer may take; the server is told, and holds no answer of a leaky bucket beyond it. Envoy waits
    /// 20ms
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = timeout)]
    timeout: Duration,
    /// Write each answer as a line of JSON, like the body of /json
    #[arg(long)]
    json: bool,
}

pub(super) const HELP: &str = "\
Each question is charged, unless --hits is 0. Of more than 20 answers the table shows those whose codes differ from the \
answer before, and the last.

Examples:
  tollkeeper call --domain example --descriptor login=ann --count 6
  tollkeeper call --addr unix:/run/tollkeeper.sock --domain example --descriptor user=42,action=like
  tollkeeper call --domain example --descriptor 'path=/a\\,b' --descriptor api_key=k1 --json
  tollkeeper call --addr limits:8081 --tls --ca ca.crt --cert me.crt --key me.key --request refund.json

A request file says what flags can not, such as giving hits back:
  {\"domain\": \"example\", \"descriptors\": [
    {\"entries\": [{\"key\": \"login\", \"value\": \"ann\"}], \"hitsAddend\": 2, \"isNegativeHits\": true}]}

Exit codes: 0 answered (OK or OVER_LIMIT), 1 not answered, 2 bad usage.";

/// The most questions of one command: their times are kept for the summary.
const MOST_CALLS: i64 = 1_000_000;
/// How often progress is told.
const PROGRESS: Duration = Duration::from_millis(200);

/// Asks.
pub(super) fn run(args: &Args) -> Outcome {
    let asked = args.question.request().and_then(|request| Ok((request, args.secure.tls(&args.addr)?)));
    let (mut request, tls) = match asked {
        Ok(asked) => asked,
        Err(problem) => {
            complain(plain(&problem));
            return Outcome::Misused;
        }
    };
    match args.hits {
        // A 0 for the whole request means 1; only a descriptor can look.
        0 => request.descriptors.iter_mut().for_each(|descriptor| descriptor.hits_addend = Some(0)),
        // As if it were not sent, which is what a request file may have in mind.
        1 => {}
        hits => request.hits_addend = hits,
    }
    let mut report = Report::new(&request, args.count);
    let asked = block_on(runtime::Builder::new_current_thread(), ask(args, tls, &request, &mut report));
    if tells(args) {
        remark("\r\u{1b}[K");
    }
    let page = if args.json { String::new() } else { report.text() };
    let outcome = match asked {
        Ok(written) => ended(written, Outcome::Done),
        Err(problem) => {
            complain(problem);
            Outcome::Failed
        }
    };
    ended(print(page), outcome)
}

/// Asks as often as wanted. The inner result is that of writing, which ends the asking too.
async fn ask(
    args: &Args,
    tls: Option<Tls>,
    request: &RateLimitRequest,
    report: &mut Report,
) -> Result<io::Result<()>, String> {
    let mut client = Client::connect(&args.addr, args.timeout, tls).await?;
    let mut told = Instant::now();
    for number in 1..=args.count {
        let answer = client.ask(request).await?;
        if args.json {
            let line = response_to_json(&answer.response).map_err(|error| error.to_string())?;
            if let Err(error) = print(line + "\n") {
                return Ok(Err(error));
            }
        } else {
            report.add(answer);
        }
        if tells(args) && told.elapsed() > PROGRESS {
            told = Instant::now();
            remark(format_args!("\r{number} of {} asked", args.count));
        }
    }
    Ok(Ok(()))
}

/// Whether somebody may watch the progress; answers as JSON show it themselves.
fn tells(args: &Args) -> bool {
    args.count > 1 && !args.json && io::stderr().is_terminal()
}

fn timeout(text: &str) -> Result<Duration, String> {
    duration::parse(text, &DurationRange::new(Duration::from_micros(1), Duration::from_secs(3600)))
}

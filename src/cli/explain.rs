//! `explain`: which rule each descriptor of a request meets, and why the near misses did not match.
//!
//! From rule files without a server, or from a running server with its counters; nothing is charged either way. The
//! explanation is the decision's own, only its words are chosen here. Names and values come from strangers and are made
//! plain.

use std::fmt::Write as _;
use std::path::PathBuf;

use super::print::{complain, ended, print, short, span};
use super::rules::{Rules, settings};
use super::{Outcome, debug_listener, question};
use crate::config::compile::options::CompileOptions;
use crate::decide::explain::{ExplainedCounter, ExplainedDescriptor, ExplainedLimit, ExplainedStep, Explanation};
use crate::grpc::decode;
use crate::http::json::request_to_json;
use crate::pb::RateLimitRequest;
use crate::report::text::plain;
use crate::settings::target::Target;

/// What `explain` takes.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A rule file, a directory of them, or - for standard input; repeatable. Explains what they say, without a server
    #[arg(long = "config", value_name = "PATH")]
    config: Vec<PathBuf>,
    /// The debug listener of a running server, which explains with its counters; without --config
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:6070", conflicts_with = "config")]
    addr: Target,
    #[command(flatten)]
    question: question::Args,
    /// Write the explanation as one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) const HELP: &str = "\
Nothing is charged. With --config the rules are those of the files, as the environment of this command has them mean, \
and there are no counters to show. Without, the running server at --addr is asked, and its counters are shown too.

Examples:
  tollkeeper explain --config config/example.yaml --domain example --descriptor user=42,action=like
  tollkeeper explain --domain example --descriptor login=ann --descriptor path=/cart
  tollkeeper explain --addr 10.0.0.7:6070 --request request.json --json

Exit codes: 0 explained, 1 the rules have errors or the server did not answer, 2 bad usage.";

const NO_COUNTERS: &str =
    "\nThis is what the files say; a running server, asked with --addr, shows its counters too.\n";

/// Explains.
pub(super) fn run(args: &Args) -> Outcome {
    let request = match args.question.request() {
        Ok(request) => request,
        Err(problem) => {
            complain(plain(&problem));
            return Outcome::Misused;
        }
    };
    let explained = if args.config.is_empty() { ask(&args.addr, &request) } else { read(&args.config, &request) };
    let explanation = match explained {
        Ok(explanation) => explanation,
        Err(problem) => {
            complain(problem);
            return Outcome::Failed;
        }
    };
    let page = if args.json {
        serde_json::to_string_pretty(&explanation).expect("it holds only texts, numbers and flags") + "\n"
    } else {
        text(&explanation, args.config.is_empty())
    };
    ended(print(page), Outcome::Done)
}

/// What rule files say, without counters.
fn read(paths: &[PathBuf], request: &RateLimitRequest) -> Result<Explanation, String> {
    let settings = settings();
    let rules = Rules::read(paths, &CompileOptions::from(&settings));
    let Some(set) = &rules.set else {
        return Err(format!("the rules have errors\n{}", rules.text().trim_end()));
    };
    // There is no store: counters that never counted anything would only mislead.
    Ok(Explanation::of(&settings.decisions, set, &decode::request(request), &[]))
}

/// What a running server says.
fn ask(target: &Target, request: &RateLimitRequest) -> Result<Explanation, String> {
    let body = request_to_json(request).map_err(|error| error.to_string())?;
    let page = debug_listener::ask(target, "/explain", Some(&body))?;
    serde_json::from_slice(&page).map_err(|_| {
        format!("{target} answered, but not with an explanation; is it the debug listener of this version?")
    })
}

/// `counts` says whether counters were asked for.
fn text(explanation: &Explanation, counts: bool) -> String {
    let mut page = format!("domain {}\n", short(&explanation.domain));
    for (place, descriptor) in explanation.descriptors.iter().enumerate() {
        let _ = writeln!(page, "\ndescriptor {}: {}", place + 1, short(&descriptor.descriptor));
        describe(&mut page, descriptor, counts);
    }
    if !counts {
        page += NO_COUNTERS;
    }
    page
}

/// Writing to a string does not fail.
fn describe(page: &mut String, descriptor: &ExplainedDescriptor, counts: bool) {
    descriptor.steps.iter().for_each(|step| step_text(page, step));
    let _ = writeln!(page, "  => {}", plain(&descriptor.outcome));
    if let Some(rule) = &descriptor.rule {
        let _ = writeln!(page, "     {} at {}", plain(&rule.path), plain(&rule.origin));
    }
    descriptor.limits.iter().for_each(|limit| limit_text(page, limit, counts));
}

fn step_text(page: &mut String, step: &ExplainedStep) {
    let entry = short(&step.entry);
    let _ = match &step.met {
        Some([how, node, origin]) => {
            let how = match how.as_str() {
                "exact" => "exactly",
                "wildcard" => "by its wildcard",
                _ => "by its key alone",
            };
            writeln!(page, "  {entry} meets {} {how}, at {}", short(node), plain(origin))
        }
        None => writeln!(page, "  {entry} meets nothing"),
    };
    for [node, origin, why] in &step.misses {
        let _ = writeln!(page, "    not {} at {}: {}", short(node), plain(origin), plain(why));
    }
    if step.more_misses > 0 {
        let _ = writeln!(page, "    and {} more near misses", step.more_misses);
    }
}

fn limit_text(page: &mut String, limit: &ExplainedLimit, counts: bool) {
    let name = if limit.name.is_empty() { String::new() } else { format!(" ({})", short(&limit.name)) };
    let _ = writeln!(page, "     limit {}{name}", plain(&limit.limit));
    let _ = writeln!(page, "       {}", plain(&limit.guarantee));
    for (is_so, what) in [
        (limit.shadow_mode, "shadow_mode: it refuses nothing"),
        (limit.quota_mode, "quota_mode: it refuses only together with all other quotas"),
    ] {
        if is_so {
            let _ = writeln!(page, "       {what}");
        }
    }
    match &limit.counter {
        Some(counter) => *page += &format!("       {}\n", counter_text(counter)),
        None if counts => *page += "       the counter could not be asked\n",
        None => {}
    }
}

fn counter_text(counter: &ExplainedCounter) -> String {
    let ExplainedCounter { passes, used, remaining, reset_us, retry_after_us } = counter;
    let next = match (passes, retry_after_us) {
        (true, _) => "one more passes".to_owned(),
        (false, Some(retry)) => format!("one more is refused for {}", span(*retry)),
        (false, None) => "one more is refused".to_owned(),
    };
    format!("{used} used, {remaining} remaining, reset in {}; {next}", span(*reset_us))
}

//! `client_cmd`: the test client of envoyproxy/ratelimit, its flags and its lines.
//!
//! One request with one hit. Descriptors are split there at every `=`, so a value with one is refused; here it is
//! split at the first. TLS is not in this release, and asking for it is an error rather than a request in the clear.

use std::ffi::OsString;
use std::time::Duration;

use super::Outcome;
use super::client::{Client, block_on};
use super::go_flags::{self, Flag};
use super::print::{complain, ended, print};
use super::question::{descriptor, descriptor_text};
use super::target::Target;
use crate::http::json::response_to_json;
use crate::pb::{RateLimitDescriptor, RateLimitRequest};
use crate::report::text::plain;

const fn text(name: &'static str, help: &'static str) -> Flag {
    Flag { name, is_switch: false, help }
}

const FLAGS: [Flag; 8] = [
    text("dial_string", "url of ratelimit server in <host>:<port> form (default \"localhost:8081\")"),
    text("domain", "rate limit configuration domain to query"),
    text("descriptors", "descriptor list to query in <key>=<value>,<key>=<value>,... form; repeatable"),
    Flag { name: "grpc-use-tls", is_switch: true, help: "not in this release" },
    text("grpc-server-ca-file", "not in this release"),
    text("grpc-cert-file", "not in this release"),
    text("grpc-key-file", "not in this release"),
    text("oltp-protocol", "without effect: this client sends no spans"),
];

/// Go's client waits for ever; this is as good to a person, and ends.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Asks once.
pub(super) fn run(arguments: &[OsString]) -> Outcome {
    let given = match go_flags::read(&FLAGS, arguments) {
        Ok(given) => given,
        Err(outcome) => return outcome,
    };
    let has_file = |name: &&str| given.last(name).is_some_and(|file| !file.is_empty());
    let files = ["grpc-server-ca-file", "grpc-cert-file", "grpc-key-file"].iter().find(|name| has_file(name));
    if let Some(flag) = given.is_on("grpc-use-tls").then_some(&"grpc-use-tls").or(files) {
        return misused(&format!("-{flag}: TLS is not in this release; leave it out to ask in the clear"));
    }
    let address = given.last("dial_string").unwrap_or("localhost:8081");
    let target: Target = match address.parse() {
        Ok(target) => target,
        Err(fix) => return misused(&format!("-dial_string {address}: {fix}")),
    };
    let descriptors: Result<Vec<RateLimitDescriptor>, String> = given
        .all("descriptors")
        .map(|text| descriptor(text).map_err(|error| format!("-descriptors {text}: {error}")))
        .collect();
    let descriptors = match descriptors {
        Ok(descriptors) => descriptors,
        Err(problem) => return misused(&problem),
    };
    let domain = given.last("domain").unwrap_or_default().to_owned();
    ask(&target, &RateLimitRequest { domain, descriptors, hits_addend: 1 })
}

fn misused(what: &str) -> Outcome {
    complain(plain(what));
    Outcome::Misused
}

fn ask(target: &Target, request: &RateLimitRequest) -> Outcome {
    let shown: Vec<String> =
        request.descriptors.iter().map(|descriptor| format!("[{}]", plain(&descriptor_text(descriptor)))).collect();
    let mut page =
        format!("dial string: {target}\ndomain: {}\ndescriptors: {}\n", plain(&request.domain), shown.join(" "));
    let answered = block_on(async {
        let answer = Client::connect(target, TIMEOUT).await?.ask(request).await?;
        response_to_json(&answer.response).map_err(|error| error.to_string())
    });
    let outcome = match answered {
        Ok(response) => {
            page += &format!("response: {}\n", plain(&response));
            Outcome::Done
        }
        Err(problem) => {
            page += &format!("request error: {problem}\n");
            Outcome::Failed
        }
    };
    ended(print(page), outcome)
}

//! `client_cmd`: the test client of envoyproxy/ratelimit, its flags and its lines.
//!
//! One request with one hit. Descriptors are split there at every `=`, so a value with one is refused; here it is
//! split at the first. Files for TLS without `-grpc-use-tls` are an error rather than a request in the clear.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use tokio::runtime;

use super::Outcome;
use super::client::{Client, block_on};
use super::go_flags::{self, Flag, Given};
use super::print::{complain, ended, print};
use super::question::{descriptor, descriptor_text};
use super::secure::{Files, Tls};
use crate::http::json::response_to_json;
use crate::pb::{RateLimitDescriptor, RateLimitRequest};
use crate::report::text::plain;
use crate::settings::pem::PemFile;
use crate::settings::target::Target;

const fn text(name: &'static str, help: &'static str) -> Flag {
    Flag { name, is_switch: false, help }
}

const FLAGS: [Flag; 8] = [
    text("dial_string", "url of ratelimit server in <host>:<port> form (default \"localhost:8081\")"),
    text("domain", "rate limit configuration domain to query"),
    text("descriptors", "descriptor list to query in <key>=<value>,<key>=<value>,... form; repeatable"),
    Flag { name: "grpc-use-tls", is_switch: true, help: "speak TLS" },
    text("grpc-server-ca-file", "authorities to trust besides those of the system, PEM"),
    text("grpc-cert-file", "certificate to show to the server, PEM"),
    text("grpc-key-file", "its private key, PEM"),
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
    let address = given.last("dial_string").unwrap_or("localhost:8081");
    let target: Target = match address.parse() {
        Ok(target) => target,
        Err(fix) => return misused(&format!("-dial_string {address}: {fix}")),
    };
    let tls = match tls(&given, &target) {
        Ok(tls) => tls,
        Err(problem) => return misused(&problem),
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
    ask(&target, tls, &RateLimitRequest { domain, descriptors, hits_addend: 1 })
}

/// How to speak TLS, if it is asked for.
fn tls(given: &Given, target: &Target) -> Result<Option<Tls>, String> {
    let file = |setting: &'static str| {
        let path = given.last(&setting[1..]).filter(|path| !path.is_empty()).map(PathBuf::from)?;
        Some(PemFile { setting, path })
    };
    let (ca, certificate, key) = (file("-grpc-server-ca-file"), file("-grpc-cert-file"), file("-grpc-key-file"));
    if !given.is_on("grpc-use-tls") {
        return match [ca, certificate, key].iter().flatten().next() {
            Some(file) => Err(format!("{}: no TLS is spoken without -grpc-use-tls; give that too", file.setting)),
            None => Ok(None),
        };
    }
    if certificate.is_some() != key.is_some() {
        return Err("-grpc-cert-file and -grpc-key-file: give both or none".to_owned());
    }
    let files = Files { switch: "-grpc-use-tls", ca, identity: certificate.zip(key) };
    Tls::read(&files, target, None).map(Some)
}

fn misused(what: &str) -> Outcome {
    complain(plain(what));
    Outcome::Misused
}

fn ask(target: &Target, tls: Option<Tls>, request: &RateLimitRequest) -> Outcome {
    let shown: Vec<String> =
        request.descriptors.iter().map(|descriptor| format!("[{}]", plain(&descriptor_text(descriptor)))).collect();
    let mut page =
        format!("dial string: {target}\ndomain: {}\ndescriptors: {}\n", plain(&request.domain), shown.join(" "));
    let answered = block_on(runtime::Builder::new_current_thread(), async {
        let answer = Client::connect(target, TIMEOUT, tls).await?.ask(request).await?;
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

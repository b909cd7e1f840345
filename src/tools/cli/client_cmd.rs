//! `client_cmd`: the test client of envoyproxy/ratelimit, with its flags and output.
//!
//! Sends one request with one hit. The original splits descriptors at every `=` and rejects values that contain it;
//! here the first `=` separates. TLS files without `-grpc-use-tls` are an error instead of a request in plaintext.
//!
//! Decides: flags of `client_cmd`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use tokio::runtime;

use super::client::{ClientTls, RateLimitClient, TlsFiles, block_on};
use super::go_flags::{self, Flag, GivenFlags};
use super::print::{CommandOutcome, fail_if_unwritten, print_error, print_to_stdout};
use super::request_flags::{format_descriptor, parse_descriptor};
use crate::base::pb::proto_json::response_to_json;
use crate::base::pb::{RateLimitDescriptor, RateLimitRequest};
use crate::base::text::escape_unprintable;
use crate::settings::address::ConnectAddress;
use crate::settings::pem::{ClientCertificate, PemFile};

const fn flag_with_value(name: &'static str, help: &'static str) -> Flag {
    Flag { name, is_switch: false, help }
}

const FLAGS: [Flag; 8] = [
    flag_with_value("dial_string", "url of ratelimit server in <host>:<port> form (default \"localhost:8081\")"),
    flag_with_value("domain", "rate limit configuration domain to query"),
    flag_with_value("descriptors", "descriptor list to query in <key>=<value>,<key>=<value>,... form; repeatable"),
    Flag { name: "grpc-use-tls", is_switch: true, help: "connect over TLS" },
    flag_with_value("grpc-server-ca-file", "CA certificates to trust beside the system's, PEM file"),
    flag_with_value("grpc-cert-file", "client certificate, PEM file"),
    flag_with_value("grpc-key-file", "private key of the client certificate, PEM file"),
    flag_with_value("oltp-protocol", "no effect: this client sends no spans"),
];

/// Time limit of the call; the original has none.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Sends one request and prints the response.
pub(super) fn run(arguments: &[OsString]) -> CommandOutcome {
    let given = match go_flags::parse_flags(&FLAGS, arguments) {
        Ok(given) => given,
        Err(outcome) => return outcome,
    };
    let address = given.last_value("dial_string").unwrap_or("localhost:8081");
    let target: ConnectAddress = match address.parse() {
        Ok(target) => target,
        Err(fix) => return print_usage_error(&format!("-dial_string {address}: {fix}")),
    };
    let tls = match load_client_tls(&given, &target) {
        Ok(tls) => tls,
        Err(problem) => return print_usage_error(&problem),
    };
    let descriptors: Result<Vec<RateLimitDescriptor>, String> = given
        .all_values("descriptors")
        .map(|text| parse_descriptor(text).map_err(|error| format!("-descriptors {text}: {error}")))
        .collect();
    let descriptors = match descriptors {
        Ok(descriptors) => descriptors,
        Err(problem) => return print_usage_error(&problem),
    };
    let domain = given.last_value("domain").unwrap_or_default().to_owned();
    send_and_print(&target, tls, &RateLimitRequest { domain, descriptors, hits_addend: 1 })
}

/// Reads the TLS files; `None` without `-grpc-use-tls`.
fn load_client_tls(given: &GivenFlags, target: &ConnectAddress) -> Result<Option<ClientTls>, String> {
    let file = |setting: &'static str| {
        let path = given.last_value(&setting[1..]).filter(|path| !path.is_empty()).map(PathBuf::from)?;
        Some(PemFile { setting, path })
    };
    let (ca, certificate, key) = (file("-grpc-server-ca-file"), file("-grpc-cert-file"), file("-grpc-key-file"));
    if !given.is_on("grpc-use-tls") {
        return match [ca, certificate, key].iter().flatten().next() {
            Some(file) => Err(format!("{}: it needs -grpc-use-tls; give that too", file.setting)),
            None => Ok(None),
        };
    }
    if certificate.is_some() != key.is_some() {
        return Err("-grpc-cert-file and -grpc-key-file: give both or none".to_owned());
    }
    let files = TlsFiles {
        switch: "-grpc-use-tls",
        ca,
        identity: certificate.zip(key).map(|(certificate, key)| ClientCertificate { certificate, key }),
    };
    ClientTls::load_from_files(&files, target, None).map(Some)
}

fn print_usage_error(what: &str) -> CommandOutcome {
    print_error(escape_unprintable(what));
    CommandOutcome::UsageError
}

fn send_and_print(target: &ConnectAddress, tls: Option<ClientTls>, request: &RateLimitRequest) -> CommandOutcome {
    let shown: Vec<String> = request
        .descriptors
        .iter()
        .map(|descriptor| format!("[{}]", escape_unprintable(&format_descriptor(descriptor))))
        .collect();
    let mut page = format!(
        "dial string: {target}\ndomain: {}\ndescriptors: {}\n",
        escape_unprintable(&request.domain),
        shown.join(" ")
    );
    let response = block_on(runtime::Builder::new_current_thread(), async {
        let response = RateLimitClient::connect(target, CALL_TIMEOUT, tls).await?.call(request).await?;
        response_to_json(&response.response).map_err(|error| error.to_string())
    });
    let outcome = match response {
        Ok(response) => {
            page += &format!("response: {}\n", escape_unprintable(&response));
            CommandOutcome::Success
        }
        Err(problem) => {
            page += &format!("request error: {problem}\n");
            CommandOutcome::Failure
        }
    };
    fail_if_unwritten(print_to_stdout(page), outcome)
}

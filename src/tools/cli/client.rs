//! Clients of a running server: of its rate limit service, with the flags for TLS, and of its debug listener.
//!
//! A client of the service has one connection and one call at a time. Every error is one line with the address, the
//! reason and a hint. TLS files are read and validated before connecting, so that a mistake in a flag is reported as
//! such. The system's CA certificates are trusted beside those of a file.
//!
//! Decides: when a command uses TLS; how long it waits for a server, and what it says without an answer.
//! Decides: how `--every` repeats (the screen is not cleared).

use std::error::Error;
use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

use rustls::ClientConfig;
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use serde::de::DeserializeOwned;
use tokio::runtime;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};

use super::print::{CommandOutcome, fail_if_unwritten, format_micros, print_error, print_to_stdout};
use crate::base::clock::to_micros;
use crate::base::pb::rate_limit_service_client::RateLimitServiceClient;
use crate::base::pb::{RateLimitRequest, RateLimitResponse};
use crate::base::text::{escape_unprintable, escape_unprintable_json};
use crate::settings::address::ConnectAddress;
use crate::settings::environment::{DEBUG_ADDRESS_VARIABLE, GRPC_ADDRESS_VARIABLE};
use crate::settings::pem::{ClientCertificate, PemFile, collect_trusted_roots, finish_tls_client_config};
use crate::settings::secret::Secret;

/// Connection to a server.
pub(super) struct RateLimitClient {
    target: ConnectAddress,
    tls: Option<ClientTls>,
    timeout: Duration,
    rpc: RateLimitServiceClient<Channel>,
}

/// A response and its latency.
pub(super) struct TimedResponse {
    /// The response.
    pub(super) response: RateLimitResponse,
    /// Time between sending and receiving.
    pub(super) latency: Duration,
}

/// Time limit of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

impl RateLimitClient {
    /// Connects to a server; `timeout` limits each call and is sent as its deadline.
    pub(super) async fn connect(
        target: &ConnectAddress,
        timeout: Duration,
        tls: Option<ClientTls>,
    ) -> Result<Self, String> {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let address = match target {
            ConnectAddress::Tcp(address) => format!("{scheme}://{address}"),
            ConnectAddress::Unix(path) => format!("unix:{path}"),
        };
        let mut endpoint =
            Endpoint::from_shared(address).map_err(|error| format!("{target}: {}", format_root_cause(&error)))?;
        if let Some(tls) = &tls {
            endpoint = endpoint
                .tls_config(tls.tonic_config.clone())
                .map_err(|error| format!("TLS: {}", format_root_cause(&error)))?;
        }
        let channel = endpoint.connect_timeout(CONNECT_TIMEOUT).connect().await.map_err(|error| {
            let why = format_root_cause(&error);
            // A TLS error means that a server is there.
            let is_tls_error = ["certificate", "corrupt message", "fatal alert"].iter().any(|word| why.contains(word));
            let hint = match &tls {
                Some(tls) if is_tls_error => tls.suggest_tls_fix(&why),
                _ => "is the service running there?",
            };
            format!("{target} cannot be reached: {why}; {hint}")
        })?;
        Ok(Self { target: target.clone(), tls, timeout, rpc: RateLimitServiceClient::new(channel) })
    }

    /// Sends a request and waits for its response.
    pub(super) async fn call(&mut self, request: &RateLimitRequest) -> Result<TimedResponse, String> {
        let mut request = Request::new(request.clone());
        request.set_timeout(self.timeout);
        let sent = Instant::now();
        match self.rpc.should_rate_limit(request).await {
            Ok(response) => Ok(TimedResponse { response: response.into_inner(), latency: sent.elapsed() }),
            Err(status) => Err(self.format_error(&status, sent.elapsed())),
        }
    }

    fn format_error(&self, status: &Status, latency: Duration) -> String {
        let target = &self.target;
        match status.code() {
            Code::Cancelled | Code::DeadlineExceeded if latency >= self.timeout => {
                format!("{target} did not answer within {}; see --timeout", format_micros(to_micros(self.timeout)))
            }
            // Only a status created by this client has a source.
            _ if status.source().is_some() => {
                let why = format_root_cause(status);
                let hint = suggest_connection_fix(target, self.tls.as_ref(), &why);
                format!("{target} did not answer: {why}{hint}")
            }
            code => format!("{target} answered {code:?}: {}", escape_unprintable(status.message())),
        }
    }
}

/// Suggests what to check after a connection failed; completes the error text.
pub fn suggest_connection_fix(target: &ConnectAddress, tls: Option<&ClientTls>, why: &str) -> String {
    match (target, tls) {
        (_, Some(tls)) => format!("; {}", tls.suggest_tls_fix(why)),
        (ConnectAddress::Tcp(_), None) => "; the server may require TLS; see --tls".to_owned(),
        (ConnectAddress::Unix(_), None) => String::new(),
    }
}

/// Runs a future on a new runtime.
pub fn block_on<T>(
    mut runtime: runtime::Builder,
    future: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let runtime = runtime.enable_all().build();
    runtime.map_err(|error| format!("the runtime cannot be started: {error}"))?.block_on(future)
}

/// Formats the innermost source of an error, which names the reason.
fn format_root_cause(error: &dyn Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    escape_unprintable(&last.to_string())
}

/// TLS flags.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub struct TlsArgs {
    /// Connect over TLS; a CA of the system or of --ca must have signed the server's certificate
    #[arg(long)]
    tls: bool,
    /// PEM file with CA certificates to trust beside the system's
    #[arg(long, value_name = "FILE", requires = "tls")]
    ca: Option<PathBuf>,
    /// PEM file with the client certificate, for servers that require one
    #[arg(long, value_name = "FILE", requires = "tls", requires = "key")]
    cert: Option<PathBuf>,
    /// PEM file with the private key of the client certificate
    #[arg(long, value_name = "FILE", requires = "tls", requires = "cert")]
    key: Option<PathBuf>,
    /// Name that the server's certificate must hold, if it is not the host of --addr
    #[arg(long, value_name = "NAME", requires = "tls")]
    server_name: Option<String>,
}

impl TlsArgs {
    /// Reads the files for TLS with `target`; `None` without --tls. The error names the flag.
    pub fn load_client_tls(&self, target: &ConnectAddress) -> Result<Option<ClientTls>, String> {
        let file = |setting, path: &Option<PathBuf>| path.clone().map(|path| PemFile { setting, path });
        let certificate = file("--cert", &self.cert);
        let identity = certificate.zip(file("--key", &self.key));
        let identity = identity.map(|(certificate, key)| ClientCertificate { certificate, key });
        let ca = file("--ca", &self.ca);
        let name = self.server_name.as_deref();
        self.tls.then(|| ClientTls::load_from_files(ca.as_ref(), identity.as_ref(), target, name)).transpose()
    }
}

/// TLS configuration for one server.
#[derive(Clone, Debug)]
pub struct ClientTls {
    /// Configuration for `tokio_rustls`.
    pub config: Arc<ClientConfig>,
    /// Name that the server's certificate must hold.
    pub server_name: ServerName<'static>,
    /// Configuration for tonic.
    pub(super) tonic_config: ClientTlsConfig,
    /// `true` if there is a client certificate.
    has_client_certificate: bool,
}

impl ClientTls {
    /// Reads the files; `name` takes precedence over the target's host.
    fn load_from_files(
        ca: Option<&PemFile>,
        identity: Option<&ClientCertificate>,
        target: &ConnectAddress,
        name: Option<&str>,
    ) -> Result<Self, String> {
        let host = match target {
            ConnectAddress::Tcp(address) => address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host),
            ConnectAddress::Unix(_) => {
                return Err(format!("--tls: TLS needs HOST:PORT; remove it for {target}"));
            }
        };
        let name = match name {
            Some(name) => ServerName::try_from(name).map_err(|_| {
                format!("--server-name={name}: not a valid name for a certificate; give a DNS name or an IP")
            })?,
            None => ServerName::try_from(host.trim_matches(['[', ']']))
                .map_err(|_| format!("{target}: not a valid host for a certificate; give a DNS name or an IP"))?,
        };
        let roots = collect_trusted_roots(ca)?;
        let tonic_config = ClientTlsConfig::new().trust_anchors(roots.roots.iter().cloned()).domain_name(name.to_str());
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("--tls: {error}"))?
            .with_root_certificates(roots);
        let mut config = finish_tls_client_config(builder, identity)?;
        let tonic_config = match identity {
            None => tonic_config,
            Some(ClientCertificate { certificate, key }) => {
                tonic_config.identity(Identity::from_pem(certificate.read_contents()?, key.read_contents()?))
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        let (config, server_name) = (Arc::new(config), name.to_owned());
        Ok(Self { config, server_name, tonic_config, has_client_certificate: identity.is_some() })
    }

    /// Suggests what to check after a server ended the connection for this reason.
    pub(super) fn suggest_tls_fix(&self, why: &str) -> &'static str {
        if why.contains("peer certificate") {
            "see --ca and --server-name"
        } else if why.contains("corrupt message") {
            "the server may not use TLS"
        } else if self.has_client_certificate {
            "the server may reject the certificate of --cert"
        } else {
            "the server may require a client certificate; see --cert"
        }
    }
}

/// Time limit of a request.
const PAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a page in bytes.
const MAX_PAGE_BYTES: u64 = 64 << 20;
/// Maximum number of bytes of an error page that a message shows.
const MAX_SHOWN_ERROR_BYTES: usize = 300;

/// Request to the debug listener, with its body.
#[derive(Clone, Copy, Debug)]
pub(super) enum PageRequest<'a> {
    /// GET.
    Get,
    /// POST.
    Post(&'a str),
    /// DELETE.
    Delete(&'a str),
}

/// Fetches the page at `path`, by POST if there is a body. The error is a message for the user.
pub(super) fn fetch_page(target: &ConnectAddress, path: &str, body: Option<&str>) -> Result<Vec<u8>, String> {
    let (status, page) = send_page_request(target, path, body.map_or(PageRequest::Get, PageRequest::Post), None)?;
    match status {
        200 => Ok(page),
        _ => Err(describe_refusal(target, path, status, &page)),
    }
}

/// Describes an answer of the debug listener that is none of the page.
pub(super) fn describe_refusal(target: &ConnectAddress, path: &str, status: u16, page: &[u8]) -> String {
    let text = String::from_utf8_lossy(&page[..page.len().min(MAX_SHOWN_ERROR_BYTES)]);
    if status == 404 && text.starts_with("404 page not found") {
        let path = path.split('?').next().unwrap_or(path);
        return format!("{target} has no {path}; is it the debug listener (DEBUG_PORT) of tollkeeper?");
    }
    format!("{target} answered {status}: {}", escape_unprintable(text.trim_end()))
}

/// Default of `--addr` of commands that call the debug listener: [`DEBUG_ADDRESS_VARIABLE`].
pub(super) fn default_debug_address() -> &'static str {
    static ADDRESS: LazyLock<String> =
        LazyLock::new(|| std::env::var(DEBUG_ADDRESS_VARIABLE).unwrap_or_else(|_| "127.0.0.1:6070".to_owned()));
    &ADDRESS
}

/// Default of `--addr` of `call`: [`GRPC_ADDRESS_VARIABLE`].
pub(super) fn default_grpc_address() -> &'static str {
    static ADDRESS: LazyLock<String> =
        LazyLock::new(|| std::env::var(GRPC_ADDRESS_VARIABLE).unwrap_or_else(|_| "127.0.0.1:8081".to_owned()));
    &ADDRESS
}

/// Sends a request to the debug listener, with the admin token if there is one, and returns the status and the body of
/// its answer. The error is a message for the user.
pub(super) fn send_page_request(
    target: &ConnectAddress,
    path: &str,
    request: PageRequest<'_>,
    token: Option<&Secret>,
) -> Result<(u16, Vec<u8>), String> {
    let (status, mut body) = open_page(target, path, request, AnswerTime::Bounded, token)?;
    let page = body.with_config().limit(MAX_PAGE_BYTES).read_to_vec();
    Ok((status, page.map_err(|error| describe_no_answer(target, &error))?))
}

/// How long an answer may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerTime {
    /// Ten seconds.
    Bounded,
    /// Until the server or this program ends.
    Unbounded,
}

/// Sends a request to the debug listener, and returns the status and the body of its answer, which is not yet read.
pub(super) fn open_page(
    target: &ConnectAddress,
    path: &str,
    request: PageRequest<'_>,
    time: AnswerTime,
    token: Option<&Secret>,
) -> Result<(u16, ureq::Body), String> {
    let ConnectAddress::Tcp(address) = target else {
        return Err(format!("--addr {target}: the debug listener has no unix socket; give HOST:PORT"));
    };
    let agent = ureq::Agent::config_builder()
        .timeout_global((time == AnswerTime::Bounded).then_some(PAGE_TIMEOUT))
        .timeout_connect(Some(PAGE_TIMEOUT))
        .http_status_as_error(false)
        .max_redirects(0)
        .proxy(None)
        .build()
        .new_agent();
    let url = format!("http://{address}{path}");
    let authorization = token.map(|token| format!("Bearer {}", token.reveal()));
    let headers = authorization.iter().map(|value| ("authorization", value.as_str()));
    let response = match request {
        PageRequest::Get => headers.fold(agent.get(url), |call, (name, value)| call.header(name, value)).call(),
        PageRequest::Post(body) => {
            headers.fold(agent.post(url), |call, (name, value)| call.header(name, value)).send(body)
        }
        PageRequest::Delete(body) => {
            let call = agent.delete(url).force_send_body();
            headers.fold(call, |call, (name, value)| call.header(name, value)).send(body)
        }
    };
    let response = response.map_err(|error| describe_no_answer(target, &error))?;
    let status = response.status().as_u16();
    Ok((status, response.into_body()))
}

fn describe_no_answer(target: &ConnectAddress, error: &ureq::Error) -> String {
    format!("{target} did not answer: {error}; is the service running, with its debug listener (DEBUG_PORT) there?")
}

/// Prints what `fetch` returns, once or with this many seconds in between until the process is stopped.
pub(super) fn print_report_once_or_every(
    every_s: Option<u64>,
    json: bool,
    fetch: impl Fn() -> Result<String, String>,
) -> CommandOutcome {
    loop {
        let page = match fetch() {
            Ok(page) => page,
            Err(problem) => {
                print_error(problem);
                return CommandOutcome::Failure;
            }
        };
        let time = every_s.filter(|_| !json).map(|_| format!("{:.0} UTC\n", jiff::Timestamp::now()));
        let written = print_to_stdout(time.unwrap_or_default() + &page);
        match every_s {
            Some(seconds) if written.is_ok() => thread::sleep(Duration::from_secs(seconds)),
            _ => return fail_if_unwritten(written, CommandOutcome::Success),
        }
        if !json && print_to_stdout("\n").is_err() {
            return CommandOutcome::Success;
        }
    }
}

/// Parses a page; `what` is what it should be, such as `a report`.
pub(super) fn parse_page<T: DeserializeOwned>(target: &ConnectAddress, page: &[u8], what: &str) -> Result<T, String> {
    serde_json::from_slice(page)
        .map_err(|_| format!("{target} answered, but not with {what}; is it the debug listener of this version?"))
}

/// Returns a page of JSON as a line to print.
pub(super) fn format_json_as_line(page: &[u8]) -> String {
    escape_unprintable_json(&String::from_utf8_lossy(page)).into_owned() + "\n"
}

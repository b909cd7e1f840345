//! Client of the rate limit service: one connection, one call at a time.
//!
//! Every error is one line with the address, the reason and a hint.

use std::error::Error;
use std::future::Future;
use std::time::{Duration, Instant};

use tokio::runtime;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use super::print::micros_text;
use super::tls_args::ClientTls;
use crate::base::clock::micros;
use crate::base::pb::rate_limit_service_client::RateLimitServiceClient;
use crate::base::pb::{RateLimitRequest, RateLimitResponse};
use crate::base::text::printable;
use crate::settings::address::Target;

/// Connection to a server.
pub(super) struct RateLimitClient {
    target: Target,
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
    pub(super) async fn connect(target: &Target, timeout: Duration, tls: Option<ClientTls>) -> Result<Self, String> {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let address = match target {
            Target::Tcp(address) => format!("{scheme}://{address}"),
            Target::Unix(path) => format!("unix:{path}"),
        };
        let mut endpoint =
            Endpoint::from_shared(address).map_err(|error| format!("{target}: {}", root_cause(&error)))?;
        if let Some(tls) = &tls {
            endpoint = endpoint
                .tls_config(tls.tonic_config.clone())
                .map_err(|error| format!("TLS: {}", root_cause(&error)))?;
        }
        let channel = endpoint.connect_timeout(CONNECT_TIMEOUT).connect().await.map_err(|error| {
            let why = root_cause(&error);
            // A TLS error means that a server is there.
            let is_tls_error = ["certificate", "corrupt message", "fatal alert"].iter().any(|word| why.contains(word));
            let hint = match &tls {
                Some(tls) if is_tls_error => tls.hint(&why),
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
            Err(status) => Err(self.error_text(&status, sent.elapsed())),
        }
    }

    fn error_text(&self, status: &Status, latency: Duration) -> String {
        let target = &self.target;
        match status.code() {
            Code::Cancelled | Code::DeadlineExceeded if latency >= self.timeout => {
                format!("{target} did not answer within {}; see --timeout", micros_text(micros(self.timeout)))
            }
            // Only a status created by this client has a source.
            _ if status.source().is_some() => {
                let why = root_cause(status);
                let hint = connection_hint(target, self.tls.as_ref(), &why);
                format!("{target} did not answer: {why}{hint}")
            }
            code => format!("{target} answered {code:?}: {}", printable(status.message())),
        }
    }
}

/// Suggests what to check after a connection failed; completes the error text.
pub(super) fn connection_hint(target: &Target, tls: Option<&ClientTls>, why: &str) -> String {
    match (target, tls) {
        (_, Some(tls)) => format!("; {}", tls.hint(why)),
        (Target::Tcp(_), None) => "; the server may require TLS; see --tls".to_owned(),
        (Target::Unix(_), None) => String::new(),
    }
}

/// Runs a future on a new runtime.
pub(super) fn block_on<T>(
    mut runtime: runtime::Builder,
    future: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let runtime = runtime.enable_all().build();
    runtime.map_err(|error| format!("the runtime cannot be started: {error}"))?.block_on(future)
}

/// Formats the innermost source of an error, which names the reason.
fn root_cause(error: &dyn Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    printable(&last.to_string())
}

//! A client of the rate limit service, for the commands: one connection, one question at a time.
//!
//! Whatever goes wrong becomes one line that says who did not answer, why, and what to look at.

use std::error::Error;
use std::future::Future;
use std::time::{Duration, Instant};

use tokio::runtime;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use super::print::span;
use super::secure::Tls;
use crate::clock::micros;
use crate::pb::rate_limit_service_client::RateLimitServiceClient;
use crate::pb::{RateLimitRequest, RateLimitResponse};
use crate::report::text::plain;
use crate::settings::target::Target;

/// A connection to a server.
pub(super) struct Client {
    target: Target,
    tls: Option<Tls>,
    timeout: Duration,
    rpc: RateLimitServiceClient<Channel>,
}

/// An answer, and how long it took.
pub(super) struct Answer {
    /// The answer.
    pub(super) response: RateLimitResponse,
    /// From the sending to the answer.
    pub(super) took: Duration,
}

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

impl Client {
    /// Connects. `timeout` is how long each answer may take, and the server is told so.
    pub(super) async fn connect(target: &Target, timeout: Duration, tls: Option<Tls>) -> Result<Self, String> {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let address = match target {
            Target::Tcp(address) => format!("{scheme}://{address}"),
            Target::Unix(path) => format!("unix:{path}"),
        };
        let mut endpoint = Endpoint::from_shared(address).map_err(|error| format!("{target}: {}", cause(&error)))?;
        if let Some(tls) = &tls {
            endpoint = endpoint.tls_config(tls.of_tonic.clone()).map_err(|error| format!("TLS: {}", cause(&error)))?;
        }
        let channel = endpoint.connect_timeout(CONNECT_TIMEOUT).connect().await.map_err(|error| {
            let why = cause(&error);
            // Of TLS only somebody who is there can be the reason.
            let is_of_tls = ["certificate", "corrupt message", "fatal alert"].iter().any(|word| why.contains(word));
            let hint = match &tls {
                Some(tls) if is_of_tls => tls.advice(&why),
                _ => "is the service running there?",
            };
            format!("{target} can not be reached: {why}; {hint}")
        })?;
        Ok(Self { target: target.clone(), tls, timeout, rpc: RateLimitServiceClient::new(channel) })
    }

    /// Asks.
    pub(super) async fn ask(&mut self, request: &RateLimitRequest) -> Result<Answer, String> {
        let mut request = Request::new(request.clone());
        request.set_timeout(self.timeout);
        let sent = Instant::now();
        match self.rpc.should_rate_limit(request).await {
            Ok(response) => Ok(Answer { response: response.into_inner(), took: sent.elapsed() }),
            Err(status) => Err(self.trouble(&status, sent.elapsed())),
        }
    }

    fn trouble(&self, status: &Status, took: Duration) -> String {
        let target = &self.target;
        match status.code() {
            Code::Cancelled | Code::DeadlineExceeded if took >= self.timeout => {
                format!("{target} did not answer within {}; see --timeout", span(micros(self.timeout)))
            }
            // Only a status that was made here has a cause.
            _ if status.source().is_some() => {
                let why = cause(status);
                let advice = advice(target, self.tls.as_ref(), &why);
                format!("{target} did not answer: {why}{advice}")
            }
            code => format!("{target} answered {code:?}: {}", plain(status.message())),
        }
    }
}

/// What to look at once a connection ended for this reason, as the end of a sentence.
pub(super) fn advice(target: &Target, tls: Option<&Tls>, why: &str) -> String {
    match (target, tls) {
        (_, Some(tls)) => format!("; {}", tls.advice(why)),
        (Target::Tcp(_), None) => "; perhaps the server speaks TLS; see --tls".to_owned(),
        (Target::Unix(_), None) => String::new(),
    }
}

/// Waits for a client on a runtime of its own.
pub(super) fn block_on<T>(
    mut runtime: runtime::Builder,
    asking: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let runtime = runtime.enable_all().build();
    runtime.map_err(|error| format!("the runtime can not be started: {error}"))?.block_on(asking)
}

/// The last of the errors that lie behind one another: it names the reason.
fn cause(error: &dyn Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    plain(&last.to_string())
}

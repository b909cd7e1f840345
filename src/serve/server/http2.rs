//! gRPC server directly on h2: no layer between the frames and `ShouldRateLimit`.
//!
//! Nearly all requests are one small call that is answered at once. A general HTTP server wraps its body and response,
//! spawns a task, tracks frame times and scans the headers again, which costs a tenth of a response. Every other
//! request is converted to an `http::Request` and passed to the router.
//!
//! A request is dropped when the client resets its stream or the connection ends. Keepalive pings, and the limits of h2
//! on resets and small DATA frames, are here too; those on SETTINGS and GOAWAY are in `frame_filter`.
//!
//! Decides: calls that a client resets (`run_until_reset`); reset streams and small DATA frames.
//! Decides: keepalive pings (`KeepAlive`); which headers a service of the router gets (`ROUTED_HEADERS`).
//! Decides: how a refused call is answered (`grpc-status`, `grpc-message`, `%XX`).

pub mod in_flight;
mod stream;

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderName, HeaderValue, Request, Uri, Version, header};
use h2::server::{Builder, Connection, Handshake, SendResponse};
use h2::{Ping, PingPong, Reason, RecvStream};
use http_body_util::BodyExt as _;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep, timeout};

use self::in_flight::InFlightRequests;
use self::stream::{RequestBody, ResponseData, send_grpc_message, send_head, send_streamed_response};
use super::admission::{BufferedBytes, ConnectionPermit};
use super::inbound_frames::{FrameFilteringIo, InboundFrameState};
use crate::serve::grpc::call::{CallHead, CallPeer, InvalidCallHead, SLOT_HOLDER_HEADER};
use crate::serve::grpc::service::ShouldRateLimitMethod;
use crate::serve::quota::evidence::{ConnectionPings, DeliveryEvidence};
use crate::serve::quota::method::STREAM_PATH;
use crate::settings::client_limits::ClientLimits;
use crate::settings::grpc::GrpcSettings;
use crate::telemetry::listener_stats::ExceededLimit;

/// Configuration of HTTP/2 and the services that answer.
#[derive(Debug)]
pub(super) struct Http2Server {
    builder: Builder,
    /// `None` switches pings off.
    keep_alive: Option<KeepAliveTimes>,
    /// The quota service is on.
    serves_quotas: bool,
    /// Maximum time for the message of a call, from the first wait for it.
    message_timeout: Duration,
    rate_limit_method: ShouldRateLimitMethod,
    /// Answers calls of the other methods.
    router: TowerToHyperService<Router>,
}

/// Maximum number of streams that the client has reset before they were accepted; more close the connection.
///
/// h2's default of 20 is too low: an Envoy with a timeout of 20 ms resets that many while this process is descheduled.
const MAX_PENDING_RESETS: usize = 2048;
/// Initial flow-control window in bytes, of a stream and of a connection.
const FLOW_CONTROL_WINDOW_BYTES: u32 = 1024 * 1024;

/// Maximum number of concurrent calls on one connection, delayed responses included.
const MAX_CONCURRENT_STREAMS: u32 = 4096;
/// Budget of a connection for small DATA frames that are received and not yet read, for h2: two for each stream.
///
/// Each of them costs at most 256. Clients may send a message in two frames and the end of the stream in a third, on
/// all streams at once. h2's default would close the connection after 2000 such calls.
const DATA_FRAME_BUDGET: usize = 4096 * 2 * 256;

impl Http2Server {
    /// Server with the limits and keepalive of the settings.
    pub(super) fn new(
        bounds: &ClientLimits,
        settings: &GrpcSettings,
        rate_limit_method: ShouldRateLimitMethod,
        router: Router,
    ) -> Self {
        let mut builder = Builder::new();
        builder
            .max_header_list_size(settings.max_header_bytes)
            .max_concurrent_streams(MAX_CONCURRENT_STREAMS)
            .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
            .data_frame_budget(DATA_FRAME_BUDGET)
            .initial_window_size(FLOW_CONTROL_WINDOW_BYTES)
            .initial_connection_window_size(FLOW_CONTROL_WINDOW_BYTES);
        let keep_alive = settings.keepalive_interval;
        let keep_alive = keep_alive.map(|interval| KeepAliveTimes { interval, timeout: interval / 3 });
        let message_timeout = bounds.head_timeout;
        let router = TowerToHyperService::new(router);
        Self {
            builder,
            keep_alive,
            serves_quotas: settings.max_quota_buckets.is_some(),
            message_timeout,
            rate_limit_method,
            router,
        }
    }

    /// Serves a connection.
    pub(super) fn serve_connection<I>(
        self: Arc<Self>,
        io: I,
        permit: Arc<ConnectionPermit>,
    ) -> impl GracefulConnection + Send
    where
        I: AsyncRead + AsyncWrite + Unpin + Send,
    {
        let (io, inbound) = FrameFilteringIo::new(io);
        let state = ConnectionState::Handshaking(self.builder.handshake(io));
        let requests = InFlightRequests::new(self.rate_limit_method.answers_immediately());
        let keep_alive = self.keep_alive;
        let pings = self.serves_quotas.then(Arc::default);
        let of_connection = ConnectionParts { server: self, permit: Arc::clone(&permit), pings: pings.clone() };
        let respond = move |request, sender| answer_request(of_connection.clone(), request, sender);
        Http2Connection {
            state,
            permit,
            respond,
            requests,
            keep_alive,
            pings,
            inbound,
            is_refused: false,
            is_shutting_down: false,
        }
    }

    /// Answers a request through the router.
    async fn answer_by_router(
        &self,
        request: Request<Body>,
        mut sender: SendResponse<ResponseData>,
        written: Option<Arc<watch::Sender<u64>>>,
    ) -> Result<(), h2::Error> {
        match run_until_reset(&mut sender, pin!(self.router.call(request))).await {
            Some(Ok::<_, Infallible>(page)) => send_streamed_response(&mut sender, page, written.as_ref()).await,
            None => Ok(()),
        }
    }
}

/// An HTTP/2 connection with its requests; polling it serves both.
struct Http2Connection<I, R, F> {
    state: ConnectionState<I>,
    permit: Arc<ConnectionPermit>,
    /// Starts the response to a request.
    respond: R,
    requests: InFlightRequests<F>,
    keep_alive: Option<KeepAliveTimes>,
    /// `None` without the quota service.
    pings: Option<Arc<ConnectionPings>>,
    inbound: Arc<InboundFrameState>,
    /// True once the connection closes because it sent too many frames.
    is_refused: bool,
    is_shutting_down: bool,
}

enum ConnectionState<I> {
    Handshaking(Handshake<FrameFilteringIo<I>, ResponseData>),
    Open(Connection<FrameFilteringIo<I>, ResponseData>, Option<KeepAlive>),
}

/// A connection: a future that serves its requests when polled and completes when it is closed.
///
/// hyper-util has a sealed trait of this name; this one covers the gRPC server too.
pub(super) trait GracefulConnection: Future {
    /// Announces the end to the client (GOAWAY, or `connection: close`); requests in flight are still answered.
    fn graceful_shutdown(self: Pin<&mut Self>);
}

impl<I, R, F> GracefulConnection for Http2Connection<I, R, F>
where
    I: AsyncRead + AsyncWrite + Unpin,
    R: Fn(Request<RecvStream>, SendResponse<ResponseData>) -> F + Unpin,
    F: Future<Output = ()>,
{
    fn graceful_shutdown(mut self: Pin<&mut Self>) {
        self.is_shutting_down = true;
        if let ConnectionState::Open(connection, _) = &mut self.state {
            connection.graceful_shutdown();
        }
    }
}

impl<I, R, F> Future for Http2Connection<I, R, F>
where
    I: AsyncRead + AsyncWrite + Unpin,
    R: Fn(Request<RecvStream>, SendResponse<ResponseData>) -> F + Unpin,
    F: Future<Output = ()>,
{
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        loop {
            let (connection, keep_alive) = match &mut this.state {
                ConnectionState::Open(connection, keep_alive) => (connection, keep_alive),
                ConnectionState::Handshaking(handshake) => {
                    let Ok(mut connection) = ready!(Pin::new(handshake).poll(context)) else { return Poll::Ready(()) };
                    if this.is_shutting_down {
                        connection.graceful_shutdown();
                    }
                    let (times, replies) = (this.keep_alive, &this.pings);
                    let pings = connection.ping_pong().filter(|_| times.is_some() || replies.is_some());
                    let keep_alive = pings.map(|pings| KeepAlive::new(pings, times, replies.clone()));
                    this.state = ConnectionState::Open(connection, keep_alive);
                    continue;
                }
            };
            if keep_alive.as_mut().is_some_and(|pings| pings.poll_keep_alive(context).is_ready()) {
                return Poll::Ready(());
            }
            // `poll_accept` also writes the responses.
            loop {
                ready!(this.requests.poll_task_budget(context));
                match connection.poll_accept(context) {
                    Poll::Ready(Some(Ok((request, sender)))) => {
                        this.requests.start_request((this.respond)(request, sender));
                    }
                    Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(()),
                    Poll::Pending => break,
                }
            }
            if this.inbound.exceeds_frame_limit() && !this.is_refused {
                this.is_refused = true;
                this.permit.record_refusal(ExceededLimit::Frames);
                connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                continue;
            }
            let has_completed = this.requests.poll_pending(context);
            if this.inbound.resume_reading() {
                // Lets other connections run first.
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            if !has_completed {
                return Poll::Pending;
            }
        }
    }
}

/// What the requests of a connection share.
#[derive(Clone)]
struct ConnectionParts {
    server: Arc<Http2Server>,
    permit: Arc<ConnectionPermit>,
    pings: Option<Arc<ConnectionPings>>,
}

/// Answers one request. Client I/O errors are not actionable, so they are ignored.
async fn answer_request(
    ConnectionParts { server, permit: connection, pings }: ConnectionParts,
    request: Request<RecvStream>,
    mut sender: SendResponse<ResponseData>,
) {
    let (head, body) = request.into_parts();
    let permit = match connection.admit_request(head.uri.path()) {
        Ok(permit) => permit,
        Err(rejection) => {
            let _sent = send_head(&mut sender, rejection.into_response(), true);
            return;
        }
    };
    let peer = connection.peer;
    let buffered = BufferedBytes::new(connection);
    let is_quota_stream = head.uri.path() == STREAM_PATH;
    let mut body = match is_quota_stream {
        true => RequestBody::for_streaming_call(body, buffered),
        false => RequestBody::new(body, buffered, server.message_timeout),
    };
    let is_rate_limit_call = head.uri.path() == ShouldRateLimitMethod::PATH;
    let tracer = server.rate_limit_method.tracer().filter(|_| is_rate_limit_call);
    let mut call = match CallHead::parse(&head, tracer) {
        Ok(call) => call,
        Err(invalid) => {
            drop(head);
            return Box::pin(refuse_call(invalid, body, sender)).await;
        }
    };
    call.peer = peer.map(|peer| peer.ip());
    let _sent = if is_rate_limit_call {
        drop(head);
        let result = {
            let answer = pin!(server.rate_limit_method.answer_call(call, &mut body));
            run_until_reset(&mut sender, answer).await
        };
        match result.map(|answer| ResponseData::for_request(answer?, body.connection_permit(), permit)) {
            Some(Ok(message)) => send_grpc_message(&mut sender, message),
            Some(Err(status)) => send_head(&mut sender, status.into_http::<Body>(), true).map(drop),
            None => Ok(()),
        }
    } else {
        let pings = pings.filter(|_| is_quota_stream);
        let mut request = copy_head_for_router(&head, body);
        drop(head);
        let written = pings.map(|pings| add_quota_stream_extensions(request.extensions_mut(), pings));
        if let Some(peer) = peer {
            request.extensions_mut().insert(CallPeer(peer));
        }
        // Boxed, so that the future of the common call stays small.
        Box::pin(server.answer_by_router(request, sender, written)).await
    };
}

/// Adds what a quota stream knows of its connection to its request; returns the count of the bytes that are written.
fn add_quota_stream_extensions(extensions: &mut Extensions, pings: Arc<ConnectionPings>) -> Arc<watch::Sender<u64>> {
    let evidence = DeliveryEvidence::new(pings);
    let written = Arc::clone(&evidence.written);
    extensions.insert(evidence);
    written
}

/// Maximum time to wait for the end of an invalid call.
const MAX_WAIT_FOR_REST_OF_INVALID_CALL: Duration = Duration::from_secs(1);

/// Refuses an invalid call, if possible after its end.
///
/// An earlier response is followed by a reset of the stream, which many clients report in place of the response.
async fn refuse_call(invalid: InvalidCallHead, mut body: RequestBody, mut sender: SendResponse<ResponseData>) {
    let rest = async { while let Some(Ok(_discarded)) = body.frame().await {} };
    if run_until_reset(&mut sender, pin!(timeout(MAX_WAIT_FOR_REST_OF_INVALID_CALL, rest))).await.is_some() {
        let _sent = send_head(&mut sender, invalid.into_response(), true);
    }
}

/// Headers that the services of the router read.
const ROUTED_HEADERS: [HeaderName; 5] = [
    header::CONTENT_TYPE,
    header::USER_AGENT,
    SLOT_HOLDER_HEADER,
    HeaderName::from_static("grpc-encoding"),
    HeaderName::from_static("grpc-accept-encoding"),
];
/// Maximum length of their values in bytes; a longer one is left out.
const MAX_ROUTED_HEADER_BYTES: usize = 1024;

/// Builds the request that the router gets: the path and the headers that services read, copied.
///
/// The original ones can be slices of the frame that they came in, and would keep the whole frame.
fn copy_head_for_router(head: &Parts, body: RequestBody) -> Request<Body> {
    let mut request = Request::new(Body::new(body));
    *request.method_mut() = head.method.clone();
    *request.version_mut() = Version::HTTP_2;
    *request.uri_mut() = Uri::try_from(head.uri.path()).unwrap_or_default();
    for name in ROUTED_HEADERS {
        let value = head.headers.get(&name).filter(|value| value.len() <= MAX_ROUTED_HEADER_BYTES);
        if let Some(value) = value.and_then(|value| HeaderValue::from_bytes(value.as_bytes()).ok()) {
            request.headers_mut().insert(name, value);
        }
    }
    request
}

/// Runs `work`; `None` if the client resets the stream first.
async fn run_until_reset<F: Future>(
    sender: &mut SendResponse<ResponseData>,
    mut work: Pin<&mut F>,
) -> Option<F::Output> {
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => sender.poll_reset(context).map(|_| None),
    })
    .await
}

/// Interval of pings that are switched off: a year.
const NO_PINGS_INTERVAL: Duration = Duration::from_secs(365 * 86_400);

/// Interval and timeout of the keepalive pings of a connection.
#[derive(Clone, Copy, Debug)]
struct KeepAliveTimes {
    /// Time between the reply to a ping and the next ping.
    interval: Duration,
    /// Maximum time until the reply.
    timeout: Duration,
}

/// Keepalive pings of one connection, which detect a client that is gone.
///
/// A quota stream may ask for a ping at any time.
struct KeepAlive {
    pings: PingPong,
    times: KeepAliveTimes,
    replies: Option<Arc<ConnectionPings>>,
    /// A ping was asked for.
    is_wanted: bool,
    /// Ends when the next ping is due, or the reply to the last one is overdue.
    timer: Pin<Box<Sleep>>,
    awaits_reply: bool,
}

impl KeepAlive {
    fn new(pings: PingPong, times: Option<KeepAliveTimes>, replies: Option<Arc<ConnectionPings>>) -> Self {
        let times = times.unwrap_or(KeepAliveTimes { interval: NO_PINGS_INTERVAL, timeout: NO_PINGS_INTERVAL });
        let timer = Box::pin(sleep(times.interval));
        Self { pings, times, replies, is_wanted: false, timer, awaits_reply: false }
    }

    /// Sends a ping whenever one is due; ready when the reply to a ping is overdue and the connection must close.
    fn poll_keep_alive(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            self.is_wanted |= self.replies.as_ref().is_some_and(|replies| replies.take_request(context));
            if self.awaits_reply && self.pings.poll_pong(context).is_ready() {
                self.awaits_reply = false;
                if let Some(replies) = &self.replies {
                    replies.record_reply();
                }
                self.timer.as_mut().reset(Instant::now() + self.times.interval);
            }
            if self.awaits_reply || !self.is_wanted {
                ready!(self.timer.as_mut().poll(context));
                if self.awaits_reply {
                    return Poll::Ready(());
                }
            }
            self.is_wanted = false;
            if let Some(replies) = &self.replies {
                replies.record_sent();
            }
            // Sending fails if the connection is closing.
            self.awaits_reply = self.pings.send_ping(Ping::opaque()).is_ok();
            self.timer.as_mut().reset(Instant::now() + self.times.timeout);
        }
    }
}

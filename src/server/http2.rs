//! gRPC server directly on h2: no layer between the frames and `ShouldRateLimit`.
//!
//! Nearly all requests are one small call that is answered at once. A general HTTP server wraps its body and response,
//! spawns a task, tracks frame times and scans the headers again, which costs a tenth of a response. Every other
//! request is converted to an `http::Request` and passed to the router.
//!
//! A request is dropped when the client resets its stream or the connection ends.

mod keep_alive;
mod response;

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use bytes::Bytes;
use h2::server::{Builder, Connection, Handshake, SendResponse};
use h2::{Reason, RecvStream};
use http_body_util::BodyExt as _;
use hyper::body::Frame;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use self::keep_alive::{KeepAlive, KeepAliveTimes};
use self::response::{send_head, send_message, send_page};
use super::admission::{ConnectionPermit, RequestPermit};
use super::admission_service::admit;
use super::graceful::GracefulConnection;
use super::in_flight::InFlightRequests;
use super::inbound_frames::{FrameLimit, InboundFrames};
use crate::grpc::call_head::{CallHead, InvalidHead};
use crate::grpc::rate_limit_method::RateLimitMethod;
use crate::settings::grpc::GrpcSettings;

/// Configuration of HTTP/2 and the services that answer.
#[derive(Debug)]
pub(super) struct Http2Server {
    builder: Builder,
    /// `None` switches pings off.
    keep_alive: Option<KeepAliveTimes>,
    rate_limit_method: RateLimitMethod,
    /// Answers calls of the other methods.
    router: TowerToHyperService<Router>,
}

/// Maximum number of streams that the client has reset before they were accepted; more close the connection.
///
/// h2's default of 20 is too low: an Envoy with a timeout of 20 ms resets that many while this process is descheduled.
const MAX_PENDING_RESETS: usize = 2048;
/// Initial flow-control window in bytes, of a stream and of a connection.
const WINDOW_BYTES: u32 = 1024 * 1024;

/// Budget of a connection for small DATA frames that are received and not yet read, for h2.
///
/// Each of them costs at most 256. Clients may send a message in two frames and the end of the stream in a third, on
/// all streams at once. h2's default would close the connection after 2000 such calls.
fn data_frame_budget(max_concurrent_streams: u32) -> usize {
    const FRAME_COST: usize = 256;
    const FRAMES_PER_STREAM: usize = 2;
    let streams = usize::try_from(max_concurrent_streams).unwrap_or(usize::MAX);
    streams.saturating_mul(FRAMES_PER_STREAM * FRAME_COST)
}

impl Http2Server {
    /// Server with the limits and keepalive of the settings.
    pub(super) fn new(settings: &GrpcSettings, rate_limit_method: RateLimitMethod, router: Router) -> Self {
        let mut builder = Builder::new();
        builder
            .max_header_list_size(settings.max_header_bytes)
            .max_concurrent_streams(settings.max_concurrent_streams)
            .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
            .data_frame_budget(data_frame_budget(settings.max_concurrent_streams))
            .initial_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES);
        let timeout = settings.keepalive_timeout;
        let keep_alive = settings.keepalive_interval.map(|interval| KeepAliveTimes { interval, timeout });
        Self { builder, keep_alive, rate_limit_method, router: TowerToHyperService::new(router) }
    }

    /// Serves a connection.
    pub(super) fn serve<I>(self: Arc<Self>, io: I, permit: Arc<ConnectionPermit>) -> impl GracefulConnection + Send
    where
        I: AsyncRead + AsyncWrite + Unpin + Send,
    {
        let (io, frame_limit) = InboundFrames::new(io);
        let state = State::Handshaking(self.builder.handshake(io));
        let requests = InFlightRequests::new(self.rate_limit_method.is_immediate());
        let keep_alive = self.keep_alive;
        let respond = move |request, sender| respond(Arc::clone(&self), Arc::clone(&permit), request, sender);
        Http2Connection {
            state,
            respond,
            requests,
            keep_alive,
            frame_limit: Some(frame_limit),
            is_shutting_down: false,
        }
    }

    /// Answers a request through the router.
    async fn route(
        &self,
        request: Request<Body>,
        permit: Option<RequestPermit>,
        mut sender: SendResponse<Bytes>,
    ) -> Result<(), h2::Error> {
        let page = until_reset(&mut sender, pin!(self.router.call(request))).await;
        drop(permit);
        match page {
            Some(Ok::<_, Infallible>(page)) => send_page(&mut sender, page).await,
            None => Ok(()),
        }
    }
}

/// An HTTP/2 connection with its requests; polling it serves both.
struct Http2Connection<I, R, F> {
    state: State<I>,
    /// Starts the response to a request.
    respond: R,
    requests: InFlightRequests<F>,
    keep_alive: Option<KeepAliveTimes>,
    /// `None` once the connection closes because it was exceeded.
    frame_limit: Option<FrameLimit>,
    is_shutting_down: bool,
}

enum State<I> {
    Handshaking(Handshake<InboundFrames<I>, Bytes>),
    Open(Connection<InboundFrames<I>, Bytes>, Option<KeepAlive>),
}

impl<I, R, F> GracefulConnection for Http2Connection<I, R, F>
where
    I: AsyncRead + AsyncWrite + Unpin,
    R: Fn(Request<RecvStream>, SendResponse<Bytes>) -> F + Unpin,
    F: Future<Output = ()>,
{
    fn graceful_shutdown(mut self: Pin<&mut Self>) {
        self.is_shutting_down = true;
        if let State::Open(connection, _) = &mut self.state {
            connection.graceful_shutdown();
        }
    }
}

impl<I, R, F> Future for Http2Connection<I, R, F>
where
    I: AsyncRead + AsyncWrite + Unpin,
    R: Fn(Request<RecvStream>, SendResponse<Bytes>) -> F + Unpin,
    F: Future<Output = ()>,
{
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        loop {
            let (connection, keep_alive) = match &mut this.state {
                State::Open(connection, keep_alive) => (connection, keep_alive),
                State::Handshaking(handshake) => {
                    let Ok(mut connection) = ready!(Pin::new(handshake).poll(context)) else { return Poll::Ready(()) };
                    if this.is_shutting_down {
                        connection.graceful_shutdown();
                    }
                    let times = this.keep_alive;
                    let keep_alive = times.and_then(|times| Some(KeepAlive::new(connection.ping_pong()?, times)));
                    this.state = State::Open(connection, keep_alive);
                    continue;
                }
            };
            if keep_alive.as_mut().is_some_and(|pings| pings.poll_timeout(context).is_ready()) {
                return Poll::Ready(());
            }
            // `poll_accept` also writes the responses.
            loop {
                ready!(this.requests.poll_budget(context));
                match connection.poll_accept(context) {
                    Poll::Ready(Some(Ok((request, sender)))) => this.requests.start((this.respond)(request, sender)),
                    Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(()),
                    Poll::Pending => break,
                }
            }
            if this.frame_limit.take_if(|limit| limit.is_exceeded()).is_some() {
                connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                continue;
            }
            if !this.requests.poll_pending(context) {
                return Poll::Pending;
            }
        }
    }
}

/// Answers one request. Client I/O errors are not actionable, so they are ignored.
async fn respond(
    server: Arc<Http2Server>,
    connection: Arc<ConnectionPermit>,
    request: Request<RecvStream>,
    mut sender: SendResponse<Bytes>,
) {
    let (head, body) = request.into_parts();
    let permit = match admit(&connection, head.uri.path()) {
        Ok(permit) => permit,
        Err(rejection) => {
            let _sent = send_head(&mut sender, rejection.response(), true);
            return;
        }
    };
    let call = match CallHead::parse(&head) {
        Ok(call) => call,
        Err(invalid) => return Box::pin(refuse(invalid, RequestBody(body), sender)).await,
    };
    let body = RequestBody(body);
    let _sent = if head.uri.path() == RateLimitMethod::PATH {
        let answer = pin!(server.rate_limit_method.answer(call, body));
        let result = until_reset(&mut sender, answer).await;
        drop(permit);
        match result {
            Some(Ok(message)) => send_message(&mut sender, message),
            Some(Err(status)) => send_head(&mut sender, status.into_http::<Body>(), true).map(drop),
            None => Ok(()),
        }
    } else {
        // Boxed, so that the future of the common call stays small.
        Box::pin(server.route(Request::from_parts(head, Body::new(body)), permit, sender)).await
    };
}

/// Maximum time to wait for the end of an invalid call.
const MAX_REFUSAL_DELAY: Duration = Duration::from_secs(1);

/// Refuses an invalid call, if possible after its end.
///
/// An earlier response is followed by a reset of the stream, which many clients report in place of the response.
async fn refuse(invalid: InvalidHead, mut body: RequestBody, mut sender: SendResponse<Bytes>) {
    let rest = async { while let Some(Ok(_discarded)) = body.frame().await {} };
    if until_reset(&mut sender, pin!(timeout(MAX_REFUSAL_DELAY, rest))).await.is_some() {
        let _sent = send_head(&mut sender, invalid.response(), true);
    }
}

/// Runs `work`; `None` if the client resets the stream first.
async fn until_reset<F: Future>(sender: &mut SendResponse<Bytes>, mut work: Pin<&mut F>) -> Option<F::Output> {
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => sender.poll_reset(context).map(|_| None),
    })
    .await
}

/// Body of a request, which releases flow-control capacity as it is read.
#[derive(Debug)]
struct RequestBody(RecvStream);

impl hyper::body::Body for RequestBody {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        let stream = &mut self.0;
        Poll::Ready(match ready!(stream.poll_data(context)) {
            Some(Ok(data)) => {
                let released = stream.flow_control().release_capacity(data.len());
                Some(released.map(|()| Frame::data(data)))
            }
            Some(Err(error)) => Some(Err(error)),
            None => ready!(stream.poll_trailers(context)).transpose().map(|trailers| trailers.map(Frame::trailers)),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }
}

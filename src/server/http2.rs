//! gRPC over HTTP/2, with nothing between the frames and the call.
//!
//! Nearly all that comes is one call, small and answered at once. A general server would wrap its body and its answer,
//! spawn it, note when frames come, and look through its headers once more: a tenth of what an answer costs. So the
//! gRPC listener stands on h2 itself. Whatever is not that call goes to the router, in the clothes that it expects.
//!
//! A request that its client gives up, or whose connection ends, is dropped, with all that it waits for.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Request, Response, header};
use bytes::Bytes;
use h2::server::{Builder, Connection, Handshake, SendResponse};
use h2::{Ping, PingPong, Reason, RecvStream, SendStream};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Frame};
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, Sleep, sleep};
use tonic::Status;
use tonic::metadata::GRPC_CONTENT_TYPE;

use super::admission::{ConnectionPermit, RequestPermit};
use super::admission_service::admit;
use super::connection::GracefulConnection;
use super::in_flight::InFlightRequests;
use crate::grpc::call::Calls;
use crate::settings::client_limits::ClientLimits;
use crate::settings::grpc::GrpcSettings;

/// How gRPC is spoken, and what answers.
#[derive(Debug)]
pub(super) struct Http2Server {
    builder: Builder,
    /// Between two pings, and how long the answer to one may take; `None`: there are none.
    pings: Option<(Duration, Duration)>,
    calls: Calls,
    /// What answers all else.
    router: TowerToHyperService<Router>,
}

/// Calls that a client may give up before they are begun. More, and its connection is closed; the default of 20 is what
/// an Envoy gives up at its timeout of 20 ms when this process is not let run for a moment.
const MAX_PENDING_RESETS: usize = 2048;
/// What a client may send before it is read, on one call and on all of a connection.
const WINDOW_BYTES: u32 = 1024 * 1024;

impl Http2Server {
    /// As the settings say.
    pub(super) fn new(bounds: &ClientLimits, settings: &GrpcSettings, calls: Calls, router: Router) -> Self {
        let mut builder = Builder::new();
        builder
            .max_header_list_size(bounds.head_bytes)
            .max_concurrent_streams(settings.max_concurrent_streams)
            .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
            .initial_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES);
        let pings = settings.keepalive_interval.map(|interval| (interval, settings.keepalive_timeout));
        Self { builder, pings, calls, router: TowerToHyperService::new(router) }
    }

    /// Serves a connection.
    pub(super) fn serve<I>(self: Arc<Self>, io: I, permit: Arc<ConnectionPermit>) -> impl GracefulConnection + Send
    where
        I: AsyncRead + AsyncWrite + Unpin + Send,
    {
        let state = State::Handshaking(self.builder.handshake(io));
        let requests = InFlightRequests::new(self.calls.are_prompt());
        let pings = self.pings;
        let begin = move |request, respond| answer(Arc::clone(&self), Arc::clone(&permit), request, respond);
        Http2Connection { state, begin, requests, pings, is_shutting_down: false }
    }
}

/// A connection, which is served as it is polled.
struct Http2Connection<I, B, F> {
    state: State<I>,
    begin: B,
    requests: InFlightRequests<F>,
    pings: Option<(Duration, Duration)>,
    is_shutting_down: bool,
}

enum State<I> {
    Handshaking(Handshake<I, Bytes>),
    Open(Connection<I, Bytes>, Option<KeepAlive>),
}

impl<I, B, F> GracefulConnection for Http2Connection<I, B, F>
where
    I: AsyncRead + AsyncWrite + Unpin,
    B: Fn(Request<RecvStream>, SendResponse<Bytes>) -> F + Unpin,
    F: Future<Output = ()>,
{
    fn graceful_shutdown(mut self: Pin<&mut Self>) {
        self.is_shutting_down = true;
        if let State::Open(connection, _) = &mut self.state {
            connection.graceful_shutdown();
        }
    }
}

impl<I, B, F> Future for Http2Connection<I, B, F>
where
    I: AsyncRead + AsyncWrite + Unpin,
    B: Fn(Request<RecvStream>, SendResponse<Bytes>) -> F + Unpin,
    F: Future<Output = ()>,
{
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        loop {
            let (connection, pings) = match &mut this.state {
                State::Open(connection, pings) => (connection, pings),
                State::Handshaking(handshake) => {
                    let Ok(mut connection) = ready!(Pin::new(handshake).poll(context)) else { return Poll::Ready(()) };
                    if this.is_shutting_down {
                        connection.graceful_shutdown();
                    }
                    let pings = this.pings.and_then(|times| Some(KeepAlive::new(connection.ping_pong()?, times)));
                    this.state = State::Open(connection, pings);
                    continue;
                }
            };
            if pings.as_mut().is_some_and(|pings| pings.poll_lost(context).is_ready()) {
                return Poll::Ready(());
            }
            // What was answered is written on the way.
            loop {
                ready!(this.requests.poll_budget(context));
                match connection.poll_accept(context) {
                    Poll::Ready(Some(Ok((request, respond)))) => this.requests.begin((this.begin)(request, respond)),
                    Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(()),
                    Poll::Pending => break,
                }
            }
            if !this.requests.poll_pending(context) {
                return Poll::Pending;
            }
        }
    }
}

/// Finds out whether a client is still there.
struct KeepAlive {
    pings: PingPong,
    interval: Duration,
    patience: Duration,
    /// Until the next ping, or until the answer to the last one must have come.
    sleep: Pin<Box<Sleep>>,
    awaits: bool,
}

impl KeepAlive {
    fn new(pings: PingPong, (interval, patience): (Duration, Duration)) -> Self {
        Self { pings, interval, patience, sleep: Box::pin(sleep(interval)), awaits: false }
    }

    /// Ready once a ping was not answered in time.
    fn poll_lost(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.awaits && self.pings.poll_pong(context).is_ready() {
                self.awaits = false;
                self.sleep.as_mut().reset(Instant::now() + self.interval);
            }
            ready!(self.sleep.as_mut().poll(context));
            if self.awaits {
                return Poll::Ready(());
            }
            // It fails on a connection that is at its end already.
            self.awaits = self.pings.send_ping(Ping::opaque()).is_ok();
            self.sleep.as_mut().reset(Instant::now() + self.patience);
        }
    }
}

/// Answers one request. How that ends is its client's affair: an error says nothing that an operator could mend.
async fn answer(
    http2: Arc<Http2Server>,
    permit: Arc<ConnectionPermit>,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) {
    let (head, body) = request.into_parts();
    let request_permit = match admit(&permit, head.uri.path()) {
        Ok(request_permit) => request_permit,
        Err(refusal) => {
            let _gone = send_head(&mut respond, refusal.page(), true);
            return;
        }
    };
    let body = Received(body);
    let _gone = if http2.calls.takes(&head) {
        let call = pin!(http2.calls.answer(&head.headers, body));
        let answer = unless_given_up(&mut respond, call).await;
        drop(request_permit);
        match answer {
            Some(Ok(message)) => send_message(&mut respond, message),
            Some(Err(status)) => send_head(&mut respond, status.into_http::<Body>(), true).map(drop),
            None => Ok(()),
        }
    } else {
        // Boxed, so that a call does not carry the room that it takes.
        Box::pin(http2.page(Request::from_parts(head, Body::new(body)), request_permit, respond)).await
    };
}

impl Http2Server {
    /// Answers what is not the call.
    async fn page(
        &self,
        request: Request<Body>,
        request_permit: Option<RequestPermit>,
        mut respond: SendResponse<Bytes>,
    ) -> Result<(), h2::Error> {
        let page = unless_given_up(&mut respond, pin!(self.router.call(request))).await;
        drop(request_permit);
        match page {
            Some(Ok::<_, Infallible>(page)) => send_page(&mut respond, page).await,
            None => Ok(()),
        }
    }
}

/// What comes of it, unless the client gives the request up before.
async fn unless_given_up<F: Future>(respond: &mut SendResponse<Bytes>, mut work: Pin<&mut F>) -> Option<F::Output> {
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => respond.poll_reset(context).map(|_| None),
    })
    .await
}

/// A message waits with h2 until its client takes it: it is small, and one client has only so many calls.
fn send_message(respond: &mut SendResponse<Bytes>, message: Bytes) -> Result<(), h2::Error> {
    let mut head = Response::new(());
    head.headers_mut().insert(header::CONTENT_TYPE, GRPC_CONTENT_TYPE);
    let mut stream = respond.send_response(head, false)?;
    stream.send_data(message, false)?;
    stream.send_trailers(HeaderMap::from_iter([(Status::GRPC_STATUS, HeaderValue::from_static("0"))]))
}

fn send_head(
    respond: &mut SendResponse<Bytes>,
    page: Response<Body>,
    ends: bool,
) -> Result<(SendStream<Bytes>, Body), h2::Error> {
    let (head, body) = page.into_parts();
    Ok((respond.send_response(Response::from_parts(head, ()), ends)?, body))
}

/// Piece by piece, as its client takes them.
async fn send_page(respond: &mut SendResponse<Bytes>, page: Response<Body>) -> Result<(), h2::Error> {
    let ends = page.body().is_end_stream();
    let (mut stream, mut body) = send_head(respond, page, ends)?;
    if ends {
        return Ok(());
    }
    loop {
        // What waits for something to tell must hear that nobody listens any more.
        let next = poll_fn(|context| match pin!(body.frame()).poll(context) {
            Poll::Ready(next) => Poll::Ready(Ok(next)),
            Poll::Pending => stream.poll_reset(context).map(Err),
        });
        let frame = match next.await {
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(_broken))) => {
                stream.send_reset(Reason::INTERNAL_ERROR);
                return Ok(());
            }
            Ok(None) => return stream.send_data(Bytes::new(), true),
            Err(_given_up) => return Ok(()),
        };
        match frame.into_data() {
            Ok(data) => send_data(&mut stream, data).await?,
            Err(frame) => match frame.into_trailers() {
                Ok(trailers) => return stream.send_trailers(trailers),
                Err(_unknown) => {}
            },
        }
    }
}

async fn send_data(stream: &mut SendStream<Bytes>, mut data: Bytes) -> Result<(), h2::Error> {
    while !data.is_empty() {
        stream.reserve_capacity(data.len());
        let Some(room) = poll_fn(|context| stream.poll_capacity(context)).await else { return Ok(()) };
        // There may be none left by now: then there is no piece to send, not an empty one.
        match room?.min(data.len()) {
            0 => {}
            room => stream.send_data(data.split_to(room), false)?,
        }
    }
    Ok(())
}

/// The body of a request.
#[derive(Debug)]
struct Received(RecvStream);

impl hyper::body::Body for Received {
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

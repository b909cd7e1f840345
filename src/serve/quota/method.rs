//! `StreamRateLimitQuotas` as a service of the gRPC listener.
//!
//! Decides: quota streams that are off; how large a report may be.
//! Decides: which clients keep the ratio of their tokens (`keeps_ratio`).

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Request, header};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use tokio::sync::mpsc;
use tonic::codec::CompressionEncoding;
use tonic::server::StreamingService;
use tonic::{Response, Status, Streaming};
use tower::service_fn;

use super::evidence::DeliveryEvidence;
use super::messages::QuotaCodec;
use super::service::QuotaService;
use super::stream::StreamTask;
use crate::base::pb::QUOTA_METHOD_PATH;
use crate::base::pb::rlqs::RateLimitQuotaResponse;
use crate::serve::grpc::call::CallPeer;
use crate::serve::grpc::service::RateLimitService;

/// Path of the method in HTTP/2 requests.
pub const STREAM_PATH: &str = QUOTA_METHOD_PATH;
/// Maximum size of a report in bytes: 100 000 buckets with long ids. A report that is refused would cut the proxy off
/// from all its quotas.
const MAX_REPORT_BYTES: usize = 64 << 20;

/// Adds the method to the router of the gRPC listener.
pub fn add_to_router(router: Router, quota: &Arc<QuotaService>) -> Router {
    let quota = Arc::clone(quota);
    let serve = service_fn(move |request: Request<Body>| {
        let quota = Arc::clone(&quota);
        async move {
            let mut grpc = tonic::server::Grpc::new(QuotaCodec)
                .accept_compressed(CompressionEncoding::Gzip)
                .max_decoding_message_size(MAX_REPORT_BYTES);
            Ok::<_, Infallible>(grpc.streaming(StreamStarter { quota }, request).await.map(Body::new))
        }
    });
    router.route_service(STREAM_PATH, serve)
}

/// Adds an answer to the router of a server without quotas: UNIMPLEMENTED, with the setting. The log says it once.
pub fn add_refusal_to_router(router: Router, service: &Arc<RateLimitService>) -> Router {
    let service = Arc::clone(service);
    let refuse = service_fn(move |_: Request<Body>| {
        if service.refused_calls.record_quota_stream(service.clock.now()) {
            tracing::warn!(
                "a quota stream was refused: RLQS is off, and the proxy uses its fallback, often to reject all (set \
                 TOLLKEEPER_RLQS=true and restart)"
            );
        }
        let status = Status::unimplemented("RLQS is off: set TOLLKEEPER_RLQS=true for the server and restart it");
        async move { Ok::<_, Infallible>(status.into_http::<Body>()) }
    });
    router.route_service(STREAM_PATH, refuse)
}

/// Starts a task for each stream.
struct StreamStarter {
    quota: Arc<QuotaService>,
}

impl StreamingService<Bytes> for StreamStarter {
    type Response = RateLimitQuotaResponse;
    type ResponseStream = BoxStream<'static, Result<RateLimitQuotaResponse, Status>>;
    type Future = BoxFuture<'static, Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: tonic::Request<Streaming<Bytes>>) -> Self::Future {
        let quota = Arc::clone(&self.quota);
        Box::pin(async move {
            let (metadata, extensions, reports) = request.into_parts();
            let peer = extensions.get::<CallPeer>().map(|peer| peer.0);
            let evidence = extensions.get::<DeliveryEvidence>().cloned();
            let handle = quota.open_stream(peer, keeps_ratio(&metadata.into_headers()));
            // One response, so that a proxy that does not read costs no more.
            let (sender, receiver) = mpsc::channel(1);
            tokio::spawn(StreamTask::new(quota, handle, evidence).run(reports, sender));
            let responses = stream::unfold(receiver, |mut receiver| async move {
                let response = receiver.recv().await?;
                Some((response, receiver))
            });
            Ok(Response::new(responses.boxed()))
        })
    }
}

/// True for Envoy's own client, whose buckets keep the ratio of their tokens when they change. The libraries of gRPC,
/// which name themselves, are not known to do so.
fn keeps_ratio(headers: &HeaderMap) -> bool {
    let agent = headers.get(header::USER_AGENT).map(HeaderValue::as_bytes).unwrap_or_default();
    !agent.windows(5).any(|part| part == b"grpc-")
}

//! Services of the gRPC listener: rate limit service, health, and reflection if it is enabled.

use std::sync::Arc;

use axum::Router;
use tonic::codec::CompressionEncoding;
use tonic::service::Routes;

use super::health::GrpcHealth;
use super::service::{Rpc, Service};
use crate::pb;
use crate::pb::rate_limit_service_server::RateLimitServiceServer;
use crate::settings::grpc::GrpcSettings;

/// Builds the router of all services; unknown methods get UNIMPLEMENTED.
pub fn routes(settings: &GrpcSettings, service: &Arc<Service>, health: &GrpcHealth) -> Router {
    let service = RateLimitServiceServer::new(Rpc(Arc::clone(service)))
        .accept_compressed(CompressionEncoding::Gzip)
        .max_decoding_message_size(settings.max_message_bytes);
    let routes = Routes::new(service).add_service(health.server());
    let routes = if settings.reflection { with_reflection(routes) } else { routes };
    routes.prepare().into_axum_router()
}

fn with_reflection(routes: Routes) -> Routes {
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(pb::descriptor_set())
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    // Some clients know only the older name.
    match (reflection().build_v1(), reflection().build_v1alpha()) {
        (Ok(v1), Ok(v1alpha)) => routes.add_service(v1).add_service(v1alpha),
        (Err(error), _) | (_, Err(error)) => {
            tracing::error!(%error, "reflection is disabled: the descriptors cannot be served");
            routes
        }
    }
}

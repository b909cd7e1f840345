//! The rate limit service over gRPC: decodes protobuf into requests and encodes decisions into protobuf.
//!
//! `call` checks a call and reads its message. `service` answers `ShouldRateLimit`; tonic's services, built here,
//! answer all other methods. Between `decode` and `encode` stand the pipeline's own types: the code that decides does
//! not know protobuf. `/json` and the `call` subcommand use the same messages.
//!
//! Decides: which gRPC methods are offered; reflection.

pub mod call;
pub mod decode;
pub mod encode;
pub mod unknown_methods;
pub mod service;
pub mod health;

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use tonic::Status;
use tonic::service::Routes;
use tower::service_fn;

use self::call::CallPeer;
use self::health::GrpcHealth;
use self::service::RateLimitService;
use crate::base::pb;
use crate::settings::grpc::GrpcSettings;

/// Builds the router of all methods but `ShouldRateLimit`; unknown methods get UNIMPLEMENTED.
pub fn build_router_of_other_methods(
    settings: &GrpcSettings,
    health: &GrpcHealth,
    service: &Arc<RateLimitService>,
) -> Router {
    let routes = Routes::new(health.build_server());
    let routes = if settings.reflection { add_reflection(routes) } else { routes };
    let service = Arc::clone(service);
    routes.prepare().into_axum_router().fallback_service(service_fn(move |request: Request<Body>| {
        let peer = request.extensions().get::<CallPeer>().copied();
        let fix = service.refused_calls.refuse(request.uri().path(), peer, service.clock.now());
        async move { Ok::<_, Infallible>(Status::unimplemented(fix).into_http::<Body>()) }
    }))
}

fn add_reflection(routes: Routes) -> Routes {
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(pb::file_descriptor_set())
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

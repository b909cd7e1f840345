//! tonic services of the gRPC listener: health, and reflection if it is enabled.

use axum::Router;
use tonic::service::Routes;

use super::health::GrpcHealth;
use crate::base::pb;
use crate::settings::grpc::GrpcSettings;

/// Builds the router of all methods but `ShouldRateLimit`; unknown methods get UNIMPLEMENTED.
pub fn routes(settings: &GrpcSettings, health: &GrpcHealth) -> Router {
    let routes = Routes::new(health.server());
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

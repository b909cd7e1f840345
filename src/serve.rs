//! The server process: listeners, the gRPC service, pages over HTTP, metrics, and the view of all replicas.

pub mod health;
pub mod grpc;
pub mod scrape;
pub mod report;
pub mod fleet;
pub mod http;
pub mod server;

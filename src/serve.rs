//! The server process: listeners, the gRPC service, pages over HTTP, metrics, and the view of all replicas.
//!
//! Way of a gRPC call: `server/connection` accepts, `server/http2` reads the call and asks `server/admission`,
//! `grpc/service` decodes it, asks the decider and encodes the response. Way of `POST /json`: `server/connection` and
//! `server/admission` too, then `http/routes`, `http/decision_pages`, and the same `grpc/service`.

pub mod health;
pub mod grpc;
pub mod quota;
pub mod blocks;
pub mod level_webhook;
pub mod reached_level_notifier;
mod redis_stream;
pub mod metrics_collector;
pub mod status;
pub mod report;
pub mod fleet;
pub mod http;
pub mod server;

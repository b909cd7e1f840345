//! The rate limit service over gRPC: from protobuf to a request, and from a decision to protobuf.
//!
//! Between `decode` and `encode` there are the pipeline's own types: what decides does not know protobuf. What asks and
//! answers by other ways, `/json` and `call`, speaks the same messages.

pub mod decode;
pub mod encode;
pub mod health;
mod spans;
pub mod service;
pub mod call;
pub mod routes;

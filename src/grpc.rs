//! The rate limit service over gRPC: from protobuf to a request, and from a decision to protobuf.
//!
//! Only this module and `pb` know protobuf's shape of a question and an answer; in between there are the pipeline's
//! own types.

pub mod decode;
pub mod encode;
pub mod health;
pub mod service;
pub mod routes;

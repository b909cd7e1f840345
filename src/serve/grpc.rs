//! The rate limit service over gRPC: decodes protobuf into requests and encodes decisions into protobuf.
//!
//! Between `decode` and `encode` stand the pipeline's own types: the code that decides does not know protobuf. `/json`
//! and the `call` subcommand use the same messages.

pub mod decode;
pub mod encode;
pub mod answer;
pub mod call_head;
pub mod health;
mod message;
mod spans;
pub mod service;
pub mod rate_limit_method;
pub mod routes;

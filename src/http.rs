//! What tollkeeper serves over HTTP/1.1.

pub mod json;
pub mod metrics;
pub mod routes;
